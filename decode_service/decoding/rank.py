"""``RankDecoder``: a model on one device, one rank of a group, and what it decodes, each in an ``Attempt`` of its own.

It decides nothing; the plan was made once, for all ranks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from decode_service.decoding.attempt import Attempt, PeerFailedError, RankOutOfMemoryError
from decode_service.decoding.communicator import Communicator, SoloCommunicator
from decode_service.decoding.compilation import CompilableDecoder
from decode_service.decoding.convolution_choice import ConvolutionChoice, measured_choice
from decode_service.decoding.families import Family
from decode_service.decoding.footprint import with_footprint
from decode_service.decoding.host_copies import HostCopies
from decode_service.decoding.loading import ModelSource, load_family
from decode_service.decoding.memory import is_out_of_memory
from decode_service.decoding.rewrites import NAMES, Rewrite, apply_rewrites
from decode_service.decoding.work import with_work
from decode_service.planning.compiled_shapes import MEASURING_ROUNDS, BucketMeasurement, CompiledShapes
from decode_service.planning.conditioning import Conditioning
from decode_service.planning.layouts import Arrangement
from decode_service.planning.plan import DecodePlan, PixelFormat
from decode_service.planning.spec import ModelSpec, StrideTiles

NOT_MEASURED = ConvolutionChoice(None, True, "not measured: on CUDA alone")


@dataclass(frozen=True, slots=True, eq=False)
class RankPart:
    """What one rank hands over.

    Attributes:
        array: its part of the pixels, C-contiguous, in the asked dtype and layout, or None if it holds nothing.
        finite: whether everything this rank decoded was finite before clamping.
        digest: hex digest of the whole picture's bytes as this rank holds it, for broadcast plans, else empty.
        timings_ms: time by stage.
        compiled: whether all calls of the decoder ran compiled; None if this rank made none that could.
        measured: what was found out about calls met for the first time, where it was told to measure.
        finite_items: ``finite`` of each item, where they were decoded together.
    """

    array: np.ndarray | None
    finite: bool
    digest: str
    timings_ms: dict[str, float]
    compiled: bool | None
    measured: tuple[BucketMeasurement, ...] = ()
    finite_items: tuple[bool, ...] = ()


class RankDecoder:
    """A loaded model on one device, and the communicator it shares with its peers. One decode at a time."""

    def __init__(
        self,
        family: Family,
        *,
        device: torch.device,
        compile_enabled: bool = False,
        rewrites: Sequence[Rewrite] = (),
        convolutions: ConvolutionChoice = NOT_MEASURED,
        cuda_graphs: bool = False,
    ) -> None:
        self._family = family
        self._host = HostCopies.of(device)
        self._rewrites = tuple(rewrites)
        self._convolutions = convolutions
        self._device = device
        # A retry in float32 casts the weights up, and noise drawn in another dtype would be other noise.
        self._noise_dtype = family.dtype()
        self._decoder = CompilableDecoder(
            family.call_decoder,
            enabled=compile_enabled and family.compiles,
            synchronize=self._synchronize,
            cuda_graphs=cuda_graphs,
        )
        if compile_enabled and not family.compiles:
            self._decoder.reason = family.eager_reason
        family.call_decoder = self._decoder
        self._communicator: Communicator = SoloCommunicator()

    @classmethod
    def load(
        cls,
        source: ModelSource,
        *,
        device: str,
        tiles: StrideTiles | None = None,
        compile_enabled: bool = False,
        rewrites: Collection[str] = NAMES,
        threads: int | None = None,
        cuda_graphs: bool = False,
        measure_convolutions: bool | None = None,
    ) -> RankDecoder:
        """Load ``source`` onto ``device`` (``cpu``, ``cuda``, ``cuda:0``), with those of the ``rewrites`` that prove exact.

        Args:
            cuda_graphs: whether what is compiled is launched as CUDA graphs.
            measure_convolutions: whether to time 3-D convolutions and decode with the layout, and with or without cuDNN, that
                was fastest. None: on CUDA.

        Raises:
            ConfigError: the source cannot be loaded, or ``tiles`` do not fit it.
        """
        if threads is not None:
            torch.set_num_threads(threads)
        target = torch.device(device)
        if target.type == "cuda":
            # TF32 keeps 10 bits of a float32's mantissa: float32 is asked for where 1e-5 matters.
            torch.backends.cuda.matmul.allow_tf32 = False
            torch.backends.cudnn.allow_tf32 = False
        family = load_family(source, device=target, tiles=tiles)
        convolutions = NOT_MEASURED
        if target.type == "cuda" if measure_convolutions is None else measure_convolutions:
            lasts = family.structure.channels_last and "channels_last" in rewrites and family.spec.tested
            convolutions = measured_choice(
                getattr(family.vae, "decoder", family.vae), target, keeps_channels_last=lasts
            )
        if family.spec.tested:
            structure, declined = family.structure, {}
            if structure.channels_last and convolutions.layout == "contiguous":
                structure = dataclasses.replace(structure, channels_last=False)
                declined["channels_last"] = convolutions.reason
            applied = apply_rewrites(family.vae, structure, enabled=rewrites, declined=declined)
        else:
            reason = f"{family.spec.class_name} is not one of the tested families: its modules run as they are"
            applied = tuple(Rewrite(name, False, 0, reason) for name in NAMES)
        return cls(
            family,
            device=target,
            compile_enabled=compile_enabled,
            rewrites=applied,
            convolutions=convolutions,
            cuda_graphs=cuda_graphs,
        )

    @property
    def spec(self) -> ModelSpec:
        return self._family.spec

    def measured_spec(self) -> ModelSpec:
        """The spec with the memory and the work that decodes need, which takes a few seconds to measure."""
        return with_work(self._family, with_footprint(self._family))

    def describe(self) -> dict[str, Any]:
        """The model as ``/v1/models/{name}`` shows it: plain values only."""
        spec, vae = self.spec, self._family.vae
        return {
            "family": spec.family,
            "class_name": spec.class_name,
            "config": {key: _abridged(value) for key, value in _plain(self._family.config).items()},
            "dtype": str(self._family.dtype()).removeprefix("torch."),
            "dtype_reason": spec.dtype_reason,
            "parameters_by_dtype": _count_by_dtype(vae),
            "device": self._device.type,
            "parameters": sum(parameter.numel() for parameter in vae.parameters()),
            "latent_channels": spec.latent_channels,
            "output_channels": spec.output_channels,
            "spatial_compression_ratio": spec.spatial_ratio,
            "temporal_compression_ratio": getattr(spec.frame_rule, "ratio", 1),
            "frame_rule": spec.frame_rule.describe() if spec.frame_rule else "one frame",
            "denormalize": {
                "formula": self._family.denormalization(),
                "statistics": _plain(self._family.statistics()),
                "latents_are": "as the denoiser makes them where a request says denormalize: true, else as decode takes them",
            },
            "compile": {
                "active": self._decoder.active,
                "reason": self._decoder.reason,
                "cuda_graphs": self._decoder.cuda_graphs,
            },
            "rewrites": {
                rewrite.name: {"active": rewrite.active, "modules": rewrite.modules, "reason": rewrite.reason}
                for rewrite in self._rewrites
            },
            "convolutions": self._convolutions.describe(),
            "host_copies": None if self._host is None else self._host.describe(),
        }

    def attach(self, communicator: Communicator) -> None:
        """Join a group; the previous communicator is closed."""
        self._communicator.close()
        self._communicator = communicator

    def abort(self) -> None:
        """Make collectives of this rank and its peers fail soon; callable from another thread."""
        self._communicator.abort()

    def disable_compile(self, reason: str) -> None:
        """Decode eagerly from now on."""
        self._decoder.disable(reason)

    def use_compiled(self, keys: Collection[str]) -> None:
        """Run these buckets of the decoder compiled and no others; all ranks of a group are told the same."""
        self._decoder.use(keys)

    def compile_alone(self, plan: DecodePlan, latents: np.ndarray, dtype_name: str) -> CompiledShapes:
        """Compile what decoding ``latents`` calls and keep what is faster, as an engine has all its ranks do in warm-up.

        For a rank without a group, such as one that is measured by itself.
        """
        shapes = CompiledShapes()
        for _ in range(MEASURING_ROUNDS):
            part = self.decode(plan, latents, dtype_name, denormalize=False, pixels=PixelFormat(), measure=True)
            if not part.measured:
                break
            shapes.add(0, part.measured)
            self.use_compiled(shapes.kept())
        return shapes

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def decode(
        self,
        plan: DecodePlan,
        latents: np.ndarray,
        dtype_name: str,
        *,
        denormalize: bool,
        pixels: PixelFormat,
        arrangement: Arrangement | None = None,
        conditioning: Conditioning | None = None,
        seeds: Sequence[int] = (),
        precision: str | None = None,
        eager: bool = False,
        measure: bool = False,
    ) -> RankPart:
        """Carry out this rank's part of ``plan``.

        Args:
            latents: the whole request's latents, as they were sent; bfloat16 carried as uint16.
            dtype_name: wire dtype of ``latents``.
            denormalize: whether to apply the model's own statistics first.
            pixels: dtype and range of the result.
            arrangement: how the latents come into ``plan.latent_shape``; None where they have it.
            conditioning: timestep and noise, for decoders that take them; None for their defaults, without noise.
            seeds: of the noise of each item, where they are several requests'; otherwise one seed is for the whole.
            precision: ``float32`` to run this decode with the weights cast up; None for the model's own dtype.
            eager: leave the compiled decoder aside for this decode.
            measure: compile and time what the decoder is called with for the first time, if it may be compiled at all.
                The pixels are the same; it takes long.

        Raises:
            CompileFailedError: a compiled call failed; nothing was decoded.
            RankOutOfMemoryError: this rank or a peer ran out of device memory.
            PeerFailedError: a peer failed before the parts were brought together.
            UnshardableOperation: the model does something that cannot be sharded.
            CommunicatorAborted, RuntimeError: a collective was interrupted.
        """
        decoder = self._decoder
        calls, compiled_calls = decoder.calls, decoder.compiled_calls
        decoder.paused, decoder.measuring = eager, measure
        family = self._family if conditioning is None else self._family.conditioned(conditioning.timestep)
        attempt = Attempt(
            family,
            self._communicator,
            device=self._device,
            plan=plan,
            pixels=pixels,
            arrangement=arrangement,
            denormalize=denormalize,
            seeds=seeds,
            conditioning=conditioning,
            noise_dtype=self._noise_dtype,
            host=self._host,
        )
        if precision == "float32":
            # What was measured for half precision says nothing of the convolutions of this decode.
            own: contextlib.AbstractContextManager[Any] = _cast_up(self._family)
        else:
            own = self._convolutions.applied()
        try:
            with torch.inference_mode(), own:
                part = attempt.run(latents, dtype_name)
        except (RankOutOfMemoryError, PeerFailedError):
            # Agreed between the ranks: everybody left the attempt at the same place and the group is sound.
            raise
        except BaseException as error:
            self._leave(plan)
            if is_out_of_memory(error):
                raise RankOutOfMemoryError(str(error)) from None
            raise
        return RankPart(
            array=part,
            finite=attempt.finite,
            digest=attempt.digest,
            timings_ms=attempt.timings_ms,
            compiled=decoder.compiled_calls - compiled_calls == decoder.calls - calls
            if decoder.calls > calls
            else None,
            measured=decoder.take_measurements(),
            finite_items=attempt.finite_items,
        )

    def _leave(self, plan: DecodePlan) -> None:
        """Peers may wait for this rank in a collective that it will never join: let them fail now, not at a timeout.

        Runs while an error is on its way out, which must not be replaced by one about a group that is gone already.
        """
        if plan.needs_group:
            with contextlib.suppress(Exception):
                self._communicator.abort()


@contextlib.contextmanager
def _cast_up(family: Family) -> Iterator[None]:
    """The model in float32 for the length of the context; half-precision weights and buffers come back bit by bit.

    On the CPU they stay where they are meanwhile, since what was prepared of them or shares their memory is known by their place.
    On a device there may be no room for both.
    """
    own = {name: parameter.dtype for name, parameter in family.vae.named_parameters()}
    places = {name: x.data for name, x in family.vae.named_parameters() if x.device.type == "cpu"}
    # Casting gives a module other buffers, and its parameters other data.
    buffers = [(module._buffers, dict(module._buffers)) for module in family.vae.modules()]
    try:
        # Within the try: where memory ends half-way, some weights are float32 already.
        family.vae.float()
        yield
    finally:
        for name, parameter in family.vae.named_parameters():
            parameter.data = places[name] if name in places else parameter.data.to(own[name])
        for held, before in buffers:
            held.update(before)


def _count_by_dtype(vae: torch.nn.Module) -> dict[str, int]:
    """Parameters held in each dtype: some models keep a few layers in float32."""
    counts: dict[str, int] = {}
    for parameter in vae.parameters():
        name = str(parameter.dtype).removeprefix("torch.")
        counts[name] = counts.get(name, 0) + parameter.numel()
    return counts


#: Numbers that one entry of a config may have in a description. Statistics of channels and frames are some hundred; those
#: of every place of a picture (RAE) would be megabytes in every answer.
MAX_CONFIG_NUMBERS = 4096


def _abridged(value: Any) -> Any:
    """A config's entry, or what it is where it has more than ``MAX_CONFIG_NUMBERS`` numbers."""
    shape = []
    inner = value
    while isinstance(inner, list) and inner:
        shape.append(len(inner))
        inner = inner[0]
    if math.prod(shape) <= MAX_CONFIG_NUMBERS:
        return value
    return f"{' x '.join(map(str, shape))} numbers, left out here"


def _plain(value: Any) -> Any:
    """JSON-able values of a diffusers config."""
    if isinstance(value, dict):
        # All but the path that the operator loaded it from, which is nobody else's business.
        return {str(key): _plain(entry) for key, entry in value.items() if key != "_name_or_path"}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)
