"""The two seams of the engine: ``DecodeService``, which HTTP speaks to, and ``RankGroup``, which the engine speaks to.

Neither Ray nor torch is imported here, so both sides can be tested with an implementation of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from decode_client.wire import WireTensor

from decode_service.planning.plan import DecodePlan, PixelFormat
from decode_service.planning.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class DecodeJob:
    """One validated request, ready to be planned and queued.

    Attributes:
        latents: as they arrived; C order, little-endian.
        denormalize: whether the model's own statistics must be applied first.
        mode: ``auto`` or one of the plan's modes.
        strict: whether a mode that cannot run is an error instead of a fallback; None takes the configured default.
        collect: one of the plan's ``COLLECTS``, or None for the default.
        chunk: latent frames per pass, or None for the default.
        pixels: what the ranks return.
        deadline_s: seconds from now after which nobody waits for the pixels, or None.
        request_id: for logs and replies.
    """

    latents: WireTensor
    denormalize: bool = False
    mode: str = "auto"
    strict: bool | None = None
    collect: str | None = None
    chunk: int | None = None
    pixels: PixelFormat = field(default_factory=PixelFormat)
    deadline_s: float | None = None
    request_id: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class DecodeOutcome:
    """Decoded pixels, still in the parts in which the ranks handed them over.

    Attributes:
        plan: the plan that ran.
        dtype: ``uint8``, ``float16``, ``bfloat16`` (carried as numpy uint16) or ``float32``.
        shape: the whole picture's shape.
        part_axis: dimension of ``shape`` along which ``parts`` follow one another; 0 where there is one part.
        parts: C-contiguous arrays, in order.
        timings_ms: where the time went, by stage.
        digests: with ``collect=broadcast``, one hex digest of the whole picture per rank: all equal.
    """

    plan: DecodePlan
    dtype: str
    shape: tuple[int, ...]
    part_axis: int
    parts: Sequence[np.ndarray]
    timings_ms: Mapping[str, float]
    digests: Sequence[str] = ()

    def assemble(self) -> np.ndarray:
        """The whole picture as one C-contiguous array of ``shape``."""
        if len(self.parts) == 1:
            return np.ascontiguousarray(self.parts[0]).reshape(self.shape)
        return np.concatenate(list(self.parts), axis=self.part_axis)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def iter_bytes(self, chunk_bytes: int = 4 << 20) -> Iterator[memoryview]:
        """The bytes of ``assemble()`` in order, in pieces of about ``chunk_bytes``, without building the whole.

        Parts are interleaved plane by plane: a plane is everything inside one index of the dimensions before
        ``part_axis``.
        """
        planes = int(np.prod(self.shape[: self.part_axis], dtype=np.int64))
        flat = [np.ascontiguousarray(part).reshape(planes, -1).view(np.uint8) for part in self.parts]
        plane_bytes = sum(part.shape[1] for part in flat)
        if len(flat) == 1:
            whole = memoryview(flat[0].reshape(-1))
            for start in range(0, len(whole), chunk_bytes):
                yield whole[start : start + chunk_bytes]
            return
        planes_per_chunk = max(1, chunk_bytes // max(1, plane_bytes))
        for start in range(0, planes, planes_per_chunk):
            piece = np.concatenate([part[start : start + planes_per_chunk] for part in flat], axis=1)
            yield memoryview(piece.reshape(-1))


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether the service decodes now, and what stands in the way where it does not."""

    ready: bool
    state: str
    warnings: tuple[str, ...] = ()


class DecodeService(Protocol):
    """What the HTTP layer needs: one model, its limits, and a way to decode."""

    @property
    def spec(self) -> ModelSpec: ...

    def describe(self) -> dict[str, Any]:
        """Everything ``GET /v1/models/{name}`` shows: config, ratios, modes, limits, warm shapes, compile state."""
        ...

    def readiness(self) -> Readiness: ...

    @property
    def max_body_bytes(self) -> int: ...

    def plan(
        self,
        latent_shape: tuple[int, ...],
        *,
        mode: str = "auto",
        strict: bool | None = None,
        collect: str | None = None,
        chunk: int | None = None,
    ) -> DecodePlan:
        """Validate the shape against the model and the limits, and plan it, without decoding.

        Raises:
            DecodeServiceError: a 4xx that says what would be right.
        """
        ...

    async def decode(self, job: DecodeJob) -> DecodeOutcome:
        """Validate, plan, queue and decode.

        Cancelling the call stops the waiting, never ranks inside a collective.

        Raises:
            DecodeServiceError: see ``decode_service.errors``.
        """
        ...
