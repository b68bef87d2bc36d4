"""How requests to one model are planned on one group: the planner, with all that it needs to know of the two.

Plans are pure functions of their inputs (``decode_service.planning.planner``); this holds the inputs that do not come with
a request and that change while a service starts and runs: the model's spec, the policy, and the predicted times.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from decode_service.config import ServiceConfig
from decode_service.engine.predictions import Predictions
from decode_service.errors import InvalidRequestError, NotReadyError, OutputTooLargeError
from decode_service.planning.load import Load, full
from decode_service.planning.memory import BUDGET_SHARE
from decode_service.planning.plan import DecodePlan, PixelFormat
from decode_service.planning.planner import Policy, make_plan, need_in_float32, validate_latents
from decode_service.planning.spec import ModelSpec

Replan = Callable[[Load], DecodePlan]

NUMPY_DTYPES = {"uint8": np.uint8, "float16": np.float16, "bfloat16": np.uint16, "float32": np.float32}
"""What values of the reply are carried as, by the name of their dtype."""


class Plans:
    """The planner of one model on one group.

    Args:
        config: the settings of the application.
        group_size: number of ranks.
        predictions: what is known of how long decodes take.

    Attributes:
        policy: the operator's choices, with the memory budget of the device once that is known.
    """

    def __init__(self, config: ServiceConfig, group_size: int, predictions: Predictions) -> None:
        self._config = config
        self._predictions = predictions
        self._spec: ModelSpec | None = None
        self.group_size = group_size
        self.policy = Policy(
            mode=config.policy.mode,
            direct_max_pixels=config.policy.direct_max_pixels,
            busy_direct_max_pixels=config.policy.busy_direct_max_pixels,
            strict=config.policy.strict,
            chunk=config.policy.chunk,
            collect=config.policy.collect,
            memory_budget_bytes=config.policy.memory_budget_bytes,
        )

    def loaded(self, spec: ModelSpec, device_bytes: int | None) -> None:
        """Plan for ``spec`` from now on, on devices with ``device_bytes`` of memory (None: unknown)."""
        self._spec = spec
        if self.policy.memory_budget_bytes is None and device_bytes:
            self.policy = dataclasses.replace(self.policy, memory_budget_bytes=int(device_bytes * BUDGET_SHARE))

    @property
    def spec(self) -> ModelSpec:
        """The model.

        Raises:
            NotReadyError: before it is loaded.
        """
        if self._spec is None:
            raise NotReadyError("the model is still loading")
        return self._spec

    @property
    def dtype(self) -> str:
        """The dtype that the ranks decode in, which is another than configured where that cannot work."""
        return self.spec.dtype or self._config.torch_dtype_name()

    def distrust(self, axes: Sequence[str], why: str) -> None:
        """Never shard along ``axes`` again."""
        left = tuple(axis for axis in self.spec.exact_axes if axis not in axes)
        self._spec = dataclasses.replace(self.spec, exact_axes=left, no_exact_axes_reason=why)

    def make(self, latent_shape: tuple[int, ...], **wishes: Any) -> DecodePlan:
        """The plan for latents of ``latent_shape``, as ``vae.decode`` takes them, on an idle group.

        Args:
            wishes: ``mode``, ``strict``, ``collect``, ``chunk`` and ``pixel_bytes`` of ``make_plan``.

        Raises:
            DecodeServiceError: a 4xx that says what would be right.
        """
        spec = self.spec
        # Before planning: what a plan holds (every tile and its owner) grows with the picture.
        validate_latents(spec, latent_shape)
        frames, height, width = spec.output_extents(latent_shape)
        limit = self._config.limits.max_output_pixels
        pixels = latent_shape[0] * frames * height * width
        if pixels > limit:
            raise OutputTooLargeError(
                f"{latent_shape[0]} x {frames} frames of {height} x {width} are {pixels} pixels; the limit is {limit} "
                "(limits.max_output_pixels)",
                param="latents.shape",
            )
        return self._beside(Load(), latent_shape, wishes)

    def for_test(self, latent_shape: tuple[int, ...], mode: str) -> DecodePlan:
        """The plan of a decode that tests the ranks themselves, which no limit for requests may stop.

        A tiny latent of a video model may have more pixels than the operator's stills.
        """
        return make_plan(
            self.spec,
            latent_shape,
            group_size=self.group_size,
            policy=dataclasses.replace(self.policy, memory_budget_bytes=None),
            mode=mode,
            strict=True,
            collect="shards",
        )

    def in_float32(self, plan: DecodePlan, why: str, pixels: PixelFormat) -> DecodePlan:
        """``plan`` as it is carried out with the model cast up: it says what that needs, and predicts no time.

        Args:
            why: for people.
            pixels: what the ranks return.
        """
        need = need_in_float32(
            self.spec, plan, pixel_bytes=pixel_bytes(pixels), budget_bytes=self.policy.memory_budget_bytes
        )
        # Times are predicted for the model's own dtype.
        return dataclasses.replace(
            plan, dtype="float32", dtype_reason=why, memory=need, predicted_ms=None, alternatives=()
        )

    def replan(self, plan: DecodePlan, **wishes: Any) -> Replan | None:
        """How the request of ``plan`` is planned for the load at its start; None where no load makes a difference."""

        def replan(load: Load) -> DecodePlan:
            return self._beside(load, plan.latent_shape, wishes)

        if plan.axis is None or needs_all_ranks(replan(full(self.group_size))):
            return None
        return replan

    def _beside(self, load: Load, latent_shape: tuple[int, ...], wishes: dict[str, Any]) -> DecodePlan:
        return make_plan(
            self.spec,
            latent_shape,
            group_size=self.group_size,
            policy=self.policy,
            load=load,
            calibration=self._predictions.calibration,
            **wishes,
        )


def pixel_bytes(pixels: PixelFormat) -> int:
    """Bytes of one value of the reply.

    Raises:
        InvalidRequestError: there is no such dtype.
    """
    if pixels.dtype not in NUMPY_DTYPES:
        raise InvalidRequestError(
            f"pixels are one of {', '.join(NUMPY_DTYPES)}, got {pixels.dtype!r}", param="output.dtype"
        )
    return np.dtype(NUMPY_DTYPES[pixels.dtype]).itemsize


def needs_all_ranks(plan: DecodePlan) -> bool:
    """Whether a plan uses the communicator, which joins all ranks, also those that decode nothing."""
    # Of the plans that need no communicator only direct ones run anywhere: tiles, say, are assigned to rank numbers.
    return plan.needs_group or plan.mode != "direct"
