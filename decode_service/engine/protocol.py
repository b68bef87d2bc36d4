"""The seams of the engine: ``DecodeService``, which HTTP speaks to, ``RankGroup``, which does the work, and
``DecodeObserver``, which is told of it.

Neither Ray nor torch is imported here, so all sides can be tested with an implementation of their own, and the
coordinator process of a replica never loads torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
from decode_client.wire import WireTensor

from decode_service.planning.compiled_shapes import BucketMeasurement
from decode_service.planning.conditioning import Conditioning
from decode_service.planning.layouts import Arrangement, Layout
from decode_service.planning.plan import DecodePlan, PixelFormat
from decode_service.planning.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class DecodeJob:
    """One validated request, ready to be planned and queued.

    Attributes:
        latents: as they arrived; C order, little-endian.
        layout: how they lie.
        denormalize: whether the model's own statistics must be applied first.
        timestep, noise_scale, seed: for decoders with timestep conditioning; None for the defaults of ``conditioning_of``.
        mode: ``auto`` or one of the plan's modes.
        strict: whether a mode that cannot run is an error instead of a fallback; None takes the configured default.
        collect: one of the plan's ``COLLECTS``, or None for the default.
        chunk: latent frames per pass, or None for the default.
        pixels: what the ranks return.
        deadline_s: seconds from now after which nobody waits for the pixels, or None.
        request_id: for logs and replies.
        caller: who asks; callers take turns in the queue. Any string; jobs of the same one are decoded in order.
    """

    latents: WireTensor
    layout: Layout = field(default_factory=Layout)
    denormalize: bool = False
    timestep: float | None = None
    noise_scale: float | None = None
    seed: int | None = None
    mode: str = "auto"
    strict: bool | None = None
    collect: str | None = None
    chunk: int | None = None
    pixels: PixelFormat = field(default_factory=PixelFormat)
    deadline_s: float | None = None
    request_id: str = ""
    caller: str = ""


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
        compiled: whether every call of the decoder ran compiled, on all ranks.
    """

    plan: DecodePlan
    dtype: str
    shape: tuple[int, ...]
    part_axis: int
    parts: Sequence[np.ndarray]
    timings_ms: Mapping[str, float]
    digests: Sequence[str] = ()
    compiled: bool = False

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


RankErrorKind = Literal["compile", "out_of_memory", "died", "raised", "collective", "stalled"]

RANK_ERROR_PRIORITY: tuple[RankErrorKind, ...] = (
    "compile",
    "out_of_memory",
    "died",
    "raised",
    "stalled",
    "collective",
)
"""Root causes first. When one rank fails, the others fail in their collectives ("connection closed by peer"), and these
symptoms usually arrive before the cause."""


class RankError(Exception):
    """The ranks could not finish a task.

    Attributes:
        kind: the root cause: ``compile`` (a compiled call failed), ``out_of_memory``, ``died`` (the process is gone),
            ``raised`` (an exception outside collectives), ``stalled`` (no answer in time), or ``collective`` (only
            collectives failed, for example a broken network).
        rank: the rank at fault, as far as it can be told.
        message: one line for logs.
        lost: ranks that died or never came back from the task, whatever the root cause.
        bucket: with ``compile``, the call of the decoder that failed; empty for all of compilation.
    """

    def __init__(
        self, kind: RankErrorKind, rank: int, message: str, *, lost: Sequence[int] = (), bucket: str = ""
    ) -> None:
        super().__init__(f"rank {rank} {kind}: {message}")
        self.kind: RankErrorKind = kind
        self.rank = rank
        self.message = message
        self.lost = tuple(lost)
        self.bucket = bucket

    @property
    def needs_new_processes(self) -> bool:
        """Whether the group can only be saved by starting its ranks anew; otherwise new communicators are enough."""
        return bool(self.lost) or self.kind in ("died", "stalled")


@dataclass(frozen=True, slots=True)
class RankFailure:
    """A failure as a rank reports it: a value, not an exception.

    An exception would carry its traceback, and with it the frames that hold the failed attempt's tensors, and it might
    not survive pickling.

    Attributes:
        kind: what it means for the group.
        message: type and text of the exception.
        trace: the traceback as text, for logs; empty where it would only hide the message.
        bucket: see ``RankError``.
    """

    kind: RankErrorKind
    message: str
    trace: str
    bucket: str = ""

    def error(self, rank: int) -> RankError:
        return RankError(self.kind, rank, self.message, bucket=self.bucket)


@dataclass(frozen=True, slots=True)
class RankTask:
    """What every rank of a run is told, besides the latents.

    Attributes:
        plan: how the request is decoded.
        denormalize: whether the model's own statistics are applied first.
        pixels: what the ranks return.
        precision: dtype of the arithmetic where it differs from the model's own (``float32``), or None.
        eager: whether to leave the compiled decoder aside, for shapes that are decoded once.
        measure: whether to compile and time what the decoder is called with for the first time; in warm-up only.
        request_id: for logs.
        arrangement: how the latents become those that the plan is made for, or None where they lie that way already.
        conditioning: the other inputs of decoders with timestep conditioning, or None for their defaults.
        seeds: of the noise of each item, where ``plan.together`` are items of several requests; otherwise empty.
    """

    plan: DecodePlan
    denormalize: bool = False
    pixels: PixelFormat = field(default_factory=PixelFormat)
    precision: str | None = None
    eager: bool = False
    measure: bool = False
    request_id: str = ""
    arrangement: Arrangement | None = None
    conditioning: Conditioning | None = None
    seeds: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class RankPixels:
    """What one rank hands over after a run. The same as ``decoding.rank.RankPart``, in a module that needs no torch.

    Attributes:
        array: this rank's part of the picture, C-contiguous, in the asked dtype and layout; None if it holds nothing.
        finite: whether all its values are finite.
        digest: hex digest of the whole picture, with ``collect=broadcast``; otherwise empty.
        timings_ms: the rank's own stages, and ``put`` for handing the latents to the ranks.
        compiled: whether all calls of the decoder ran compiled; None if this rank made none that could.
        measured: what was found out about calls of the decoder, with ``RankTask.measure``.
        finite_items: ``finite`` of each item, where ``plan.together`` are several.
    """

    array: np.ndarray | None
    finite: bool
    digest: str
    timings_ms: Mapping[str, float]
    compiled: bool | None
    measured: Sequence[BucketMeasurement] = ()
    finite_items: tuple[bool, ...] = ()


@dataclass(frozen=True, slots=True)
class GroupInfo:
    """What a rank, or a group, says of the model once it is loaded.

    Attributes:
        spec: of the model.
        description: JSON-able, for ``/v1/models``.
        warnings: for people; of a group, what is not the same on all its ranks.
    """

    spec: ModelSpec
    description: Mapping[str, Any]
    warnings: tuple[str, ...] = ()


class RankGroup(Protocol):
    """The ranks of one replica: a way to run a task on some or all of them, and to get them back after a failure.

    The engine promises that ``recover``, ``set_compile``, ``use_compiled`` and ``close`` never overlap a ``run``, and that overlapping runs
    use disjoint ranks. A ``run`` must not be cancelled: ranks inside a collective can't be interrupted one by one.
    """

    @property
    def size(self) -> int: ...

    async def start(self) -> GroupInfo:
        """Start the ranks, load the model on each and join them.

        Raises:
            RankError: if a rank fails or is not there in time.
            ConfigError: if the configuration cannot work (no such model, not enough devices).
        """
        ...

    async def run(self, task: RankTask, latents: WireTensor, ranks: Sequence[int]) -> list[RankPixels]:
        """Carry out ``task`` on ``ranks`` and return what each hands over, in the order of ``ranks``.

        With more than one rank, ``ranks`` are all of the group, since its communicator joins all.

        Raises:
            RankError: with the root cause. No rank works on the task any more, except with the kinds that need new
                processes.
        """
        ...

    async def recover(self, error: RankError) -> None:
        """Make all ranks usable again: new communicators where the processes are sound, otherwise new processes.

        Raises:
            RankError: if that failed too.
        """
        ...

    async def set_compile(self, enabled: bool, reason: str) -> None:
        """Switch compilation on all ranks, also on those that are started later. Only switching off is supported."""
        ...

    async def use_compiled(self, keys: frozenset[str]) -> None:
        """Tell all ranks which buckets of the decoder run compiled. Ranks that are started later begin with none.

        Raises:
            RankError: if a rank could not be told. Others may have been.
        """
        ...

    async def close(self) -> None:
        """End the ranks and release what they hold. Callable twice."""
        ...


class DecodeObserver(Protocol):
    """Is told of all that the ranks decode for callers, for metrics. What it raises is logged, and is nobody's failure."""

    def decoded(self, mode: str, seconds: float, predicted_seconds: float | None, requests: int) -> None:
        """The ranks have decoded one request, or several in one pass; told once for all of them.

        Also where nobody waits for the pixels any more, and where they hold NaN, so that the request is decoded again.

        Args:
            mode: of the plan that ran.
            seconds: that the ranks took, without queue and transfer.
            predicted_seconds: what the plan said of them, or None where it predicted nothing.
            requests: how many were decoded; more than one where they shared a pass.
        """
        ...


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

    @property
    def max_total_body_bytes(self) -> int:
        """Of all bodies that are received, wait or are decoded; at least ``max_body_bytes``."""
        ...

    def plan(
        self,
        latent_shape: tuple[int, ...],
        *,
        layout: Layout | None = None,
        mode: str = "auto",
        strict: bool | None = None,
        collect: str | None = None,
        chunk: int | None = None,
        denormalize: bool = False,
        pixels: PixelFormat | None = None,
    ) -> DecodePlan:
        """Validate the shape against the model and the limits, and plan it for an idle group, without decoding.

        Args:
            latent_shape: of the latents as they are sent.
            layout: how they lie; None is ``auto``.
            denormalize: whether the model's own statistics would be applied, which not every model has.
            pixels: what the ranks would return, which takes memory; None is uint8.

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
