"""Every setting of the service: typed, validated, documented, in one place.

``deploy/config.yaml`` holds these under ``applications[].args``. Unknown keys are refused with the nearest right name,
because Ray Serve's own schema swallows them silently.
"""

from __future__ import annotations

import difflib
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictBool, model_validator


def _no_boolean_strings(value: Any) -> Any:
    """Refuse "true", "off", "1" and 1 where a boolean is meant: a quoted switch in YAML must not silently count."""
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"expected true or false without quotes, got {value!r}")
    return value


Switch = Annotated[StrictBool, BeforeValidator(_no_boolean_strings)]
OptionalSwitch = Annotated[StrictBool | None, BeforeValidator(_no_boolean_strings)]


def _no_booleans_or_strings_for_numbers(section: type[BaseModel], key: str, value: Any) -> None:
    """Refuse ``yes`` (which YAML reads as true, and Python as 1) and ``"2"`` where a number is meant."""
    field = section.model_fields.get(key)
    if field is None:
        return
    numeric = {int, float} & set(getattr(field.annotation, "__args__", (field.annotation,)))
    if numeric and isinstance(value, (bool, str)):
        raise ValueError(f"{key} is a number, got {value!r}")
    if key == "shapes" and isinstance(value, (list, tuple)):
        for shape in value:
            if isinstance(shape, (list, tuple)) and any(isinstance(extent, (bool, str)) for extent in shape):
                raise ValueError(f"a warm-up shape holds numbers, got {list(shape)!r}")


class Section(BaseModel):
    """Base of all sections: immutable, and an unknown key is an error that names the nearest right one."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _name_the_right_key(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        for key, value in values.items():
            _no_booleans_or_strings_for_numbers(cls, key, value)
        known = list(cls.model_fields)
        for key in values:
            if key not in known:
                near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.5)
                hint = f"did you mean {near[0]!r}?" if near else f"known keys are {', '.join(known)}"
                raise ValueError(f"unknown key {key!r}: {hint}")
        return values


class ModelConfig(Section):
    """Which VAE is served.

    Attributes:
        name: the name that requests and ``/v1/models`` use.
        source: ``builtin:demo``, a hub id, a local diffusers folder, or a single ``.safetensors`` file.
        subfolder: folder inside the source that holds the VAE (``vae`` in a whole pipeline); None for the source itself.
        dtype: dtype of weights and arithmetic; ``auto`` is bfloat16 on CUDA and float32 on the CPU.
        class_name: diffusers class, for weights without a config.json that says it.
        revision: hub revision.
    """

    name: str = Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]*$")
    source: str = Field(min_length=1)
    subfolder: str | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    class_name: str | None = None
    revision: str | None = None


class GroupConfig(Section):
    """The ranks that decode together.

    Attributes:
        ranks: number of ranks, one process and one device each.
        device: ``cuda`` (NCCL) or ``cpu`` (sockets on one host, gloo between several).
        threads: torch threads of one rank on the CPU; None divides the machine's cores.
        cpus_per_rank: logical CPUs that Ray reserves for a rank; None is 1 on CUDA and 0.25 on the CPU (a reservation
            for scheduling, not a limit).
        keep_freed_memory: CPU ranks keep up to 4 GiB each of memory that they have freed: a decode took 0.8 of the time and 1.7
            times the resident memory (768x768, bfloat16). Nothing is changed where the environment chooses an allocator
            (``LD_PRELOAD``) or settings of glibc's (``MALLOC_...``, ``GLIBC_TUNABLES``).
        placement: Ray placement strategy of the group; STRICT_PACK keeps it on one node.
        collective_timeout_s: how long a rank waits inside a collective before it gives up, and how long a rank may not
            answer a ping before it counts as frozen. Ranks compile side by side and wait for the slowest, so it must be
            longer than the times at which they finish one graph can differ.
        run_timeout_s: how long one decode may take; a group that takes longer is started anew.
        abort_grace_s: how long the other ranks get to come back once one has failed, before they are killed.
        start_timeout_s: how long loading and joining may take.
        max_rebuilds: rebuilds within ten minutes after which the replica reports itself unhealthy.
    """

    ranks: int = Field(default=1, ge=1, le=64)
    device: Literal["cpu", "cuda"] = "cpu"
    threads: int | None = Field(default=None, ge=1)
    cpus_per_rank: float | None = Field(default=None, ge=0)
    keep_freed_memory: Switch = True
    placement: Literal["STRICT_PACK", "PACK", "SPREAD", "STRICT_SPREAD"] = "STRICT_PACK"
    collective_timeout_s: float = Field(default=60.0, gt=0)
    run_timeout_s: float = Field(default=600.0, gt=0)
    abort_grace_s: float = Field(default=20.0, gt=0)
    start_timeout_s: float = Field(default=600.0, gt=0)
    max_rebuilds: int = Field(default=3, ge=0)

    @model_validator(mode="after")
    def _reserves_something(self) -> GroupConfig:
        if self.device == "cpu" and self.cpus_per_rank == 0:
            # Ray refuses an empty bundle, and it is the reservation that keeps a new rank from starting beside one that
            # is still dying.
            raise ValueError("cpus_per_rank must be positive where device is cpu, for example 0.25")
        return self

    def reserved_cpus(self) -> float:
        """Logical CPUs per rank, with the default filled in."""
        if self.cpus_per_rank is not None:
            return self.cpus_per_rank
        return 1.0 if self.device == "cuda" else 0.25

    def rank_resources(self) -> dict[str, float]:
        """What Ray reserves for one rank; exactly the size of its bundle."""
        resources = {"CPU": self.reserved_cpus()} if self.reserved_cpus() else {}
        if self.device == "cuda":
            resources["GPU"] = 1
        return resources

    def placement_bundles(self) -> list[dict[str, float]]:
        """Bundles of the group's placement group: one a rank.

        The replica itself sits in the first bundle and reserves nothing: it only coordinates.
        """
        return [self.rank_resources() for _ in range(self.ranks)]


class TileConfig(Section):
    """Tile geometry in pixels, for families whose tiles are free (not MiniMax-H3 and Allegro)."""

    size_px: int = Field(default=256, ge=16)
    stride_px: int = Field(default=192, ge=8)

    @model_validator(mode="after")
    def _stride_within_tile(self) -> TileConfig:
        if self.stride_px > self.size_px:
            raise ValueError(
                f"tile stride_px ({self.stride_px}) must not exceed size_px ({self.size_px}): tiles would leave gaps"
            )
        return self


class BatchConfig(Section):
    """Decoding requests of one shape that wait for a rank in one pass, where that was measured to be faster.

    Off by default, because the bytes of a reply then depend on what else waited (within 1e-5 in float32), and because for
    frames of ordinary size one pass of several takes as long as one after the other.

    Attributes:
        max_items: requests that one pass takes at most. With more than 1 the engine measures at the start up to which size
            of frames passes of so many, and of two, take less time and give the same pixels, for about
            ``calibration.seconds``, also where ``calibration.enabled`` is false. Requests that force a mode are decoded
            alone; where ``policy.mode`` is ``direct`` those that force none share passes, and where it is any other mode
            none do.
        window_ms: how long a request may wait, although a rank is idle, for others to come; what is behind it in the queue
            waits with it. Never more than half of the time to its deadline. 0: only what waits anyway is decoded together.
    """

    max_items: int = Field(default=1, ge=1, le=64)
    window_ms: float = Field(default=0.0, ge=0, le=10_000)


class PolicyConfig(Section):
    """How requests are planned.

    Attributes:
        mode: mode of requests that ask for ``auto``; ``auto`` itself lets the planner choose.
        direct_max_pixels: a frame of at most so many pixels (height x width) is never sharded, whatever the predicted
            times. None leaves it to them, and is 262144 (512 x 512) where there are none (``calibration``).
        busy_direct_max_pixels: while there are as many requests as ranks, a request of at most so many pixels in all
            (batch x frames x height x width) is decoded by one rank too, so that every rank has its own; larger ones
            would take one rank too long. 0: the load decides nothing. The default holds 81 frames of 480 x 832.
        strict: default of the request's ``strict``.
        chunk: latent frames per decoder pass after the first, for causal families. None takes the shortest that is
            predicted to be as fast as any that fits the memory, and is 1 where no times are predicted.
        collect: default of the request's ``collect``.
        tile: tile geometry; None takes the family's own.
        batch: decoding several requests in one pass.
        memory_budget_bytes: what a plan may need of a rank's memory, weights included; None takes nine tenths of a CUDA
            device, and sets no limit on the CPU.
    """

    mode: Literal["auto", "direct", "batch", "tile", "spatial_shard_height", "spatial_shard_width"] = "auto"
    direct_max_pixels: int | None = Field(default=None, ge=0)
    busy_direct_max_pixels: int = Field(default=32 << 20, ge=0)
    strict: Switch = False
    chunk: int | None = Field(default=None, ge=1)
    collect: Literal["shards", "rank0", "broadcast"] = "shards"
    tile: TileConfig | None = None
    batch: BatchConfig = BatchConfig()
    memory_budget_bytes: int | None = Field(default=None, ge=1)


class CalibrationConfig(Section):
    """Decodes that are timed at the start, on the ranks that serve, so that plans can predict how long they take.

    Attributes:
        enabled: whether to. Without, and where the times make no sense, ``auto`` decides by fixed rules and no plan has a
            predicted time. Passes of several requests (``policy.batch``) are timed whatever it says, because there are none
            without.
        seconds: how long it may take, about. Longer decodes tell more. Where size seems to make no difference, larger frames
            are timed, which may take as long once more, and times that make no sense are taken again. Timing passes of
            several requests may take as long once more, too.
    """

    enabled: Switch = True
    seconds: float = Field(default=3.0, gt=0, le=120)


class CompileConfig(Section):
    """``torch.compile`` of the decoder, for the shapes in ``warmup.shapes``.

    Every kind of call that decoding them makes (passes, tiles, bands of frames that are divided between ranks) is compiled in
    warm-up and timed against the same call uncompiled; the slower form is dropped, and so is one whose pixels differ.
    ``/v1/models/{name}`` lists the measurements.
    Other shapes are decoded uncompiled: no request waits for the compiler.

    Attributes:
        enabled: None means on for CUDA and off for the CPU.
        cache_dir: folder in which compiled code outlives the process, so that the next start loads it instead. It must not be
            writable by others, because its contents are run. Ranks of a machine may share it, and so may models. None: what
            ``TORCHINDUCTOR_CACHE_DIR`` says, or else ``$XDG_CACHE_HOME/decode-service/compiled`` (``~/.cache`` by default).
        cuda_graphs: launch compiled calls as CUDA graphs, which saves the time between kernels. Off by default: a graph keeps
            the memory of its call for as long as the process runs, which no plan counts, its results and the caches between
            passes are copied once more, and it has not been measured on a device yet. A call is still kept only if it is
            faster so than uncompiled, copies included.
        timeout_s: how long compiling and timing what one shape needs may take; it replaces ``group.run_timeout_s`` there.
    """

    enabled: OptionalSwitch = None
    cache_dir: str | None = Field(default=None, min_length=1)
    cuda_graphs: Switch = False
    timeout_s: float = Field(default=1800.0, gt=0)


class RewritesConfig(Section):
    """Exact rewrites of the decoder's modules: faster, with the same pixels within rounding.

    Each is compared with the modules it stands in for when the model is loaded and left off where it differs;
    ``/v1/models/{name}`` says which are on.

    Attributes:
        channels_last: weights and activations with the channels next to each other in memory (in half precision).
        causal_input: the input of a causal convolution is put together once, and padded by the convolution.
        one_frame_conv2d: a causal convolution over one frame with none before it as a 2-D convolution.
        causal_residual: what the convolutions of a residual block see of the frames before is kept as they take it; where ranks
            share a frame, with the neighbours' rows.
        upsample_conv: nearest upsampling and its convolution as one transposed convolution (on the CPU).
        norm_activation: norms in one or two passes over memory, and activations in place (on the CPU); on CUDA, in half precision
            and channels last, a norm and its activation in one kernel of Triton's.
        residual: the sum of a residual block is written in place, and not divided by one.
        packed_weights: weights of convolutions are kept in the order of their kernels, too (on the CPU): as much memory again.
    """

    channels_last: Switch = True
    causal_input: Switch = True
    one_frame_conv2d: Switch = True
    causal_residual: Switch = True
    upsample_conv: Switch = True
    norm_activation: Switch = True
    residual: Switch = True
    packed_weights: Switch = True

    def enabled(self) -> tuple[str, ...]:
        """The names of those that are on."""
        return tuple(name for name, on in self.model_dump().items() if on)


class WarmupConfig(Section):
    """Latent shapes decoded in the constructor, through the ordinary path, before the service reports ready.

    They are shapes as ``vae.decode`` takes them, also where requests come in another layout.

    Shapes of video families need two latent frames or more, because one never reaches the graph of the later frames; the
    engine checks that, once it knows the family.
    """

    shapes: tuple[tuple[int, ...], ...] = ()

    @model_validator(mode="after")
    def _shapes_are_latent_shapes(self) -> WarmupConfig:
        for shape in self.shapes:
            if len(shape) not in (4, 5) or min(shape) < 1:
                raise ValueError(
                    f"a warm-up shape is (B,C,H,W) or (B,C,T,H,W) with positive extents, got {list(shape)}"
                )
        return self


class LimitsConfig(Section):
    """What a request may ask for.

    Attributes:
        max_body_bytes: size of a request body.
        max_total_body_bytes: memory that the bodies of all requests may take together, from the moment at which one announces
            its length until its latents are decoded; more are answered 503 before they are read. At least ``max_body_bytes``.
            None is four times that, and 1 GiB at least.
        max_output_pixels: batch x frames x height x width of the decoded picture.
        max_queued: requests that wait or run; more are answered 503, first those of the caller that has most.
        default_deadline_s: deadline of requests that name none.
    """

    max_body_bytes: int = Field(default=256 << 20, ge=1024)
    max_total_body_bytes: int | None = Field(default=None, ge=1024)
    max_output_pixels: int = Field(default=512 * 1024 * 1024, ge=1)
    max_queued: int = Field(default=64, ge=1)
    default_deadline_s: float = Field(default=300.0, gt=0)

    @model_validator(mode="after")
    def _has_room_for_one_body(self) -> LimitsConfig:
        if self.total_body_bytes() < self.max_body_bytes:
            raise ValueError(
                f"max_total_body_bytes ({self.max_total_body_bytes}) must be at least max_body_bytes ({self.max_body_bytes}), "
                "or a request of that size could never be received"
            )
        return self

    def total_body_bytes(self) -> int:
        """``max_total_body_bytes``, with the default filled in: a queue of ordinary requests, or a few of the largest."""
        if self.max_total_body_bytes is not None:
            return self.max_total_body_bytes
        return max(4 * self.max_body_bytes, 1 << 30)


class ServiceConfig(Section):
    """The ``args`` of one application."""

    model: ModelConfig
    group: GroupConfig = GroupConfig()
    policy: PolicyConfig = PolicyConfig()
    calibration: CalibrationConfig = CalibrationConfig()
    compile: CompileConfig = CompileConfig()
    rewrites: RewritesConfig = RewritesConfig()
    warmup: WarmupConfig = WarmupConfig()
    limits: LimitsConfig = LimitsConfig()

    @model_validator(mode="after")
    def _has_a_device_for_cuda_graphs(self) -> ServiceConfig:
        if self.compile.cuda_graphs and (self.group.device != "cuda" or self.compile.enabled is False):
            raise ValueError("compile.cuda_graphs needs group.device: cuda, and compile.enabled")
        return self

    def compile_enabled(self) -> bool:
        """Whether to compile, with the default filled in."""
        return self.group.device == "cuda" if self.compile.enabled is None else self.compile.enabled

    def run_limit_s(self, *, measure: bool) -> float:
        """How long the ranks may take for one run; ``measure`` for one that compiles."""
        return self.compile.timeout_s if measure else self.group.run_timeout_s

    def torch_dtype_name(self) -> str:
        """The dtype of weights and arithmetic, with ``auto`` filled in."""
        if self.model.dtype != "auto":
            return self.model.dtype
        return "bfloat16" if self.group.device == "cuda" else "float32"
