"""``RankDecoder``: one rank's part of carrying out a plan. It decides nothing; the plan was made once, for all ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from decode_service.decoding.attention import query_blocks
from decode_service.decoding.communicator import Communicator, SoloCommunicator
from decode_service.decoding.compilation import CompilableDecoder, CompileFailedError
from decode_service.decoding.convolution_choice import ConvolutionChoice, measured_choice
from decode_service.decoding.families import Family
from decode_service.decoding.footprint import with_footprint
from decode_service.decoding.host_copies import HostCopies, Transfer
from decode_service.decoding.loading import ModelSource, load_family
from decode_service.decoding.memory import is_out_of_memory
from decode_service.decoding.pixels import TORCH_DTYPES, axis_dim, convert, from_carrier, pixel_shape, to_numpy
from decode_service.decoding.rewrites import NAMES, Rewrite, apply_rewrites
from decode_service.decoding.sharding import ShardedFrame
from decode_service.decoding.work import with_work
from decode_service.planning.bands import Band
from decode_service.planning.compiled_shapes import MEASURING_ROUNDS, BucketMeasurement, CompiledShapes
from decode_service.planning.conditioning import Conditioning
from decode_service.planning.layouts import Arrangement
from decode_service.planning.plan import DecodePlan, PixelFormat
from decode_service.planning.spec import ModelSpec, StrideTiles

# B batch, C channels, T latent frames, F pixel frames, H height, W width.

_OK, _OUT_OF_MEMORY, _COMPILE_FAILED, _FAILED = range(4)

NOT_MEASURED = ConvolutionChoice(None, True, "not measured: on CUDA alone")


class RankOutOfMemoryError(RuntimeError):
    """This rank, or a peer that it agreed with, ran out of device memory."""


class PeerFailedError(RuntimeError):
    """Another rank failed before the parts were brought together; its own error says why."""


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
        attempt = _Attempt(
            family,
            self._communicator,
            self._device,
            plan,
            pixels,
            arrangement,
            denormalize,
            seeds,
            conditioning,
            self._noise_dtype,
            self._host,
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


class _Attempt:
    """One decode on one rank."""

    def __init__(
        self,
        family: Family,
        communicator: Communicator,
        device: torch.device,
        plan: DecodePlan,
        pixels: PixelFormat,
        arrangement: Arrangement | None,
        denormalize: bool,
        seeds: Sequence[int],
        conditioning: Conditioning | None,
        noise_dtype: torch.dtype,
        host: HostCopies | None,
    ) -> None:
        self._family = family
        self._host = host
        self._transfer: Transfer | None = None
        self._communicator = communicator
        self._device = device
        self._plan = plan
        self._pixels = pixels
        self._arrangement = arrangement
        self._denormalize = denormalize
        self._seeds = seeds
        self._conditioning = conditioning
        self._noise_dtype = noise_dtype
        # One value for each item of a pass.
        self._finite = torch.ones(plan.together, dtype=torch.bool, device=device)
        self.finite = True
        self.finite_items: tuple[bool, ...] = ()
        self.digest = ""
        self.timings_ms: dict[str, float] = {}

    @property
    def rank(self) -> int:
        return self._communicator.rank

    def run(self, latents: np.ndarray, dtype_name: str) -> np.ndarray | None:
        try:
            return self._run(latents, dtype_name)
        finally:
            if self._transfer is not None:
                self._transfer.close()

    def _run(self, latents: np.ndarray, dtype_name: str) -> np.ndarray | None:
        with self._timed("prepare"):
            latents_BCTHW = self._prepare(latents, dtype_name)
        with self._timed("decode"):
            if self._plan.mode == "tile":
                part = self._tiles(latents_BCTHW)
            else:
                part = self._exact(latents_BCTHW)
        with self._timed("collect"):
            part = self._collect(part)
        with self._timed("to_host"):
            self.finite = bool(self._finite.all())
            if self._plan.together > 1:
                self.finite_items = tuple(self._finite.tolist())
            if part is None:
                return None
            array = self._on_host(part)
            if self._plan.collect == "broadcast":
                self.digest = hashlib.blake2b(array.data, digest_size=16).hexdigest()
                if self.rank != 0:
                    return None
            return self._as_sent(array)

    def _on_host(self, part: torch.Tensor) -> np.ndarray:
        if self._transfer is not None:
            return self._transfer.finish()
        return to_numpy(part) if self._host is None else self._host.fetch(part)

    @contextlib.contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self.timings_ms[stage] = (time.perf_counter() - start) * 1e3

    def _prepare(self, latents: np.ndarray, dtype_name: str) -> torch.Tensor:
        """Latents (B,C,T,H,W) on the device, in the model's dtype, as ``vae.decode`` takes them.

        Noise is drawn for the whole of them on the CPU, so that it depends neither on the number of ranks nor on the kind
        of device.
        """
        arrangement, conditioning = self._arrangement, self._conditioning
        arranged = latents.reshape(self._plan.latent_shape) if arrangement is None else arrangement.apply(latents)
        x = from_carrier(arranged, dtype_name).to(self._device, self._family.dtype())
        if x.dim() == 4:
            x = x.unsqueeze(2)
        if conditioning is None or conditioning.noise_scale == 0:
            return self._family.denormalize(x) if self._denormalize else x
        noises = []
        for seed, part in zip(self._seeds or [conditioning.seed], x.split(1) if self._seeds else [x], strict=True):
            generator = torch.Generator("cpu").manual_seed(seed)
            noises.append(torch.randn(part.shape, generator=generator, dtype=self._noise_dtype))
        noise = torch.cat(noises).to(x.device, x.dtype)
        return self._family.noised(x, noise, conditioning.noise_scale, denormalize=self._denormalize)

    def _as_sent(self, array: np.ndarray) -> np.ndarray:
        """Pixels with a frame dimension only where the latents had one."""
        if len(self._plan.latent_shape) == 5:
            return array
        frame_dim = 1 if self._pixels.dtype == "uint8" else 2
        return np.squeeze(array, axis=frame_dim)

    # Exact modes

    def _exact(self, latents_BCTHW: torch.Tensor) -> torch.Tensor | None:
        """This rank's part (5-D) of a direct, batch or spatial decode."""
        plan = self._plan
        if plan.axis in ("height", "width"):
            return self._decode_band(latents_BCTHW, plan.axis)
        if plan.mode == "direct":
            # Alone unless the result is broadcast; then rank 0 decodes and the others wait for it.
            band = None if plan.needs_group and self.rank != 0 else Band(0, latents_BCTHW.shape[0])
        else:
            band = plan.band(self.rank)
        part = None
        with self._agreeing():
            if band is not None:
                part = self._decode_items(latents_BCTHW[band.start : band.stop])
        return part

    def _decode_band(self, latents_BCTHW: torch.Tensor, axis: str) -> torch.Tensor:
        band = self._plan.bands[self.rank]
        dim = {"height": 3, "width": 4}[axis]
        local_BCTHW = latents_BCTHW.narrow(dim, band.start, band.size).contiguous()
        return self._decode_items(local_BCTHW, ShardedFrame(self._communicator, axis, self._plan.bands))

    def _decode_items(self, latents_BCTHW: torch.Tensor, frame: ShardedFrame | None = None) -> torch.Tensor:
        """Decode one item after the other (or as many together as planned), pass by pass, straight into the result.

        Where that is handed over as it is, it lies in host memory, and pixels of a pass travel while the next one is decoded.
        """
        spec, wanted = self._family.spec, self._pixels
        batch, _, _, height, width = latents_BCTHW.shape
        extents = (
            batch,
            spec.output_channels,
            self._plan.output_frames,
            height * spec.spatial_ratio,
            width * spec.spatial_ratio,
        )
        shape, dtype = pixel_shape(extents, wanted), TORCH_DTYPES[wanted.dtype]
        copy: Callable[[torch.Tensor, torch.Tensor], Any] = torch.Tensor.copy_
        if self._host is not None and self._parts_stay:
            self._transfer = self._host.transfer(shape, dtype)
            out, copy = self._transfer.target, self._transfer.copy
        else:
            out = torch.empty(shape, dtype=dtype, device=self._device)
        frame_dim = 1 if wanted.dtype == "uint8" else 2
        # One by one, but where the plan takes items of several requests together.
        at_once = self._plan.together
        for item in range(0, batch, at_once):
            start = 0
            for pixels_BCFHW in self._passes(latents_BCTHW[item : item + at_once], frame):
                converted = self._convert(pixels_BCFHW)
                frames = converted.shape[frame_dim]
                copy(out[item : item + at_once].narrow(frame_dim, start, frames), converted)
                start += frames
        return out

    def _passes(self, latents_BCTHW: torch.Tensor, frame: ShardedFrame | None) -> Iterator[torch.Tensor]:
        """The decoder's passes; the halo rule holds while the decoder runs and not while its pixels are used."""
        passes = self._family.decode(latents_BCTHW, self._plan.chunk)
        while True:
            # The whole frame's shape: keys and values are those of all bands.
            with query_blocks(self._plan.latent_shape, self._plan.together), frame or contextlib.nullcontext():
                pixels_BCFHW = next(passes, None)
            if pixels_BCFHW is None:
                return
            yield pixels_BCFHW

    def _convert(self, pixels_BCFHW: torch.Tensor) -> torch.Tensor:
        self._finite &= torch.isfinite(pixels_BCFHW).flatten(1).all(1)
        in_range = self._family.to_unit_range if self._pixels.range == "unit" else self._family.to_model_range
        return convert(in_range(pixels_BCFHW), self._pixels)

    # Tiles

    def _tiles(self, latents_BCTHW: torch.Tensor) -> torch.Tensor | None:
        """The whole picture on rank 0, None elsewhere; item by item, so that tiles of one item wait at a time."""
        items = latents_BCTHW.split(1)
        out: torch.Tensor | None = None
        for index, item in enumerate(items):
            pixels = self._tiles_of(item)
            if len(items) == 1 or pixels is None:
                out = pixels
                continue
            if out is None:
                out = pixels.new_empty((len(items), *pixels.shape[1:]))
            out[index : index + 1].copy_(pixels)
        return out

    def _tiles_of(self, latents_BCTHW: torch.Tensor) -> torch.Tensor | None:
        """One item, as ``_tiles``."""
        plan, family = self._plan, self._family
        assert plan.tiles is not None
        cells = [(row, column) for row in plan.tiles.rows for column in plan.tiles.columns]
        jobs = [(part, *cell) for part in range(len(plan.owners) // len(cells)) for cell in cells]
        done: dict[int, torch.Tensor] = {}
        with self._agreeing(), query_blocks(plan.latent_shape):
            for index, job in enumerate(jobs):
                if plan.owners[index] == self.rank:
                    tile = family.decode_tile(latents_BCTHW, *job, plan.chunk)
                    self._finite &= torch.isfinite(tile).all()
                    done[index] = tile
        if plan.ranks > 1:
            shapes = [family.tile_shape(latents_BCTHW.shape, *job) for job in jobs]
            self._gather_tiles(done, shapes, latents_BCTHW.dtype)
        if self.rank != 0:
            return None
        merged = family.merge_tiles(plan, [done[index] for index in range(len(jobs))])
        return self._convert(merged)

    def _gather_tiles(self, done: dict[int, torch.Tensor], shapes: list[tuple[int, ...]], dtype: torch.dtype) -> None:
        """Move every tile to rank 0, in tile order; shapes follow from the plan, so none are exchanged."""
        if self.rank == 0:
            buffers = [
                (owner, index, torch.empty(shapes[index], dtype=dtype, device=self._device))
                for index, owner in enumerate(self._plan.owners)
                if owner != 0
            ]
            self._communicator.exchange([], [(owner, buffer) for owner, _, buffer in buffers])
            done.update({index: buffer for _, index, buffer in buffers})
        else:
            self._communicator.exchange([(0, done[index].contiguous().to(dtype)) for index in sorted(done)], [])

    # Bringing the parts together

    @contextlib.contextmanager
    def _agreeing(self) -> Iterator[None]:
        """Work without collectives, then agree with all ranks on whether it succeeded before the next collective.

        Without it a rank that ran out of memory would leave its peers waiting in the gather. The tensors of a failed
        attempt are gone before anybody raises, because the error is raised outside the ``except``.
        """
        status, failure, bucket = _OK, "", ""
        try:
            yield
        except CompileFailedError as error:
            status, failure, bucket = _COMPILE_FAILED, str(error), error.bucket
        except Exception as error:  # noqa: BLE001 - raised again below, after the peers know
            status = _OUT_OF_MEMORY if is_out_of_memory(error) else _FAILED
            failure = f"{type(error).__name__}: {error}"
        statuses = self._communicator.agree(status) if self._plan.needs_group else [status]
        if status == _OUT_OF_MEMORY:
            raise RankOutOfMemoryError(failure)
        if status == _COMPILE_FAILED:
            raise CompileFailedError(failure, bucket)
        if status == _FAILED:
            raise RuntimeError(failure)
        if any(statuses):
            failed = [rank for rank, other in enumerate(statuses) if other]
            raise PeerFailedError(f"rank {', '.join(map(str, failed))} failed while decoding its part")

    @property
    def _parts_stay(self) -> bool:
        """Whether every rank hands over what it decoded."""
        return self._plan.collect == "shards" or not self._plan.needs_group

    def _collect(self, part: torch.Tensor | None) -> torch.Tensor | None:
        """Leave the parts where they are, or bring the whole picture to rank 0, or to every rank."""
        plan = self._plan
        if self._parts_stay:
            return part
        if plan.axis is not None:
            part = self._gather_parts(part, plan.axis)
        if plan.collect == "rank0":
            return part
        whole = part.contiguous() if part is not None else self._empty(None)
        self._communicator.broadcast(whole, 0)
        return whole

    def _gather_parts(self, part: torch.Tensor | None, axis: str) -> torch.Tensor | None:
        if self.rank != 0:
            if part is not None:
                self._communicator.exchange([(0, part.contiguous())], [])
            return None
        assert part is not None
        peers = [(rank, self._empty(band)) for rank, band in enumerate(self._plan.bands) if rank and band.size]
        self._communicator.exchange([], peers)
        return torch.cat([part, *(buffer for _, buffer in peers)], dim=axis_dim(axis, self._pixels))

    def _empty(self, band: Band | None) -> torch.Tensor:
        """A buffer for the pixels of ``band``, or for the whole picture."""
        plan, spec = self._plan, self._family.spec
        extents = [
            plan.latent_shape[0],
            spec.output_channels,
            plan.output_frames,
            plan.output_height,
            plan.output_width,
        ]
        if band is not None:
            index = {"batch": 0, "height": 3, "width": 4}[str(plan.axis)]
            extents[index] = band.size * (1 if plan.axis == "batch" else spec.spatial_ratio)
        return torch.empty(
            pixel_shape(extents, self._pixels), dtype=TORCH_DTYPES[self._pixels.dtype], device=self._device
        )


@contextlib.contextmanager
def _cast_up(family: Family) -> Iterator[None]:
    """The model in float32 for the length of the context; half-precision weights come back bit by bit."""
    own = {name: parameter.dtype for name, parameter in family.vae.named_parameters()}
    try:
        # Within the try: where memory ends half-way, some weights are float32 already.
        family.vae.float()
        yield
    finally:
        for name, parameter in family.vae.named_parameters():
            parameter.data = parameter.data.to(own[name])


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
