"""``Attempt``: one decode on one rank, from latents as they were sent to the pixels that this rank hands over."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from decode_service.decoding.attention import query_blocks
from decode_service.decoding.communicator import Communicator
from decode_service.decoding.compilation import CompileFailedError
from decode_service.decoding.families import Family
from decode_service.decoding.host_copies import HostCopies, Transfer
from decode_service.decoding.memory import is_out_of_memory
from decode_service.decoding.pixels import TORCH_DTYPES, axis_dim, convert, from_carrier, pixel_shape, to_numpy
from decode_service.decoding.sharding import ShardedFrame
from decode_service.planning.bands import Band
from decode_service.planning.conditioning import Conditioning
from decode_service.planning.layouts import Arrangement
from decode_service.planning.plan import DecodePlan, PixelFormat

# B batch, C channels, T latent frames, F pixel frames, H height, W width.

#: What ranks tell each other of how their work ended.
_OK, _OUT_OF_MEMORY, _COMPILE_FAILED, _FAILED = range(4)


class RankOutOfMemoryError(RuntimeError):
    """This rank, or a peer that it agreed with, ran out of device memory."""


class PeerFailedError(RuntimeError):
    """Another rank failed before the parts were brought together; its own error says why."""


class Attempt:
    """One decode on one rank. Leaves nothing on the model; to be run once.

    Args:
        family: the model, conditioned where the request is.
        communicator: the group that carries ``plan`` out.
        device: of the model.
        plan: made once, for all ranks.
        pixels: dtype and range of the result.
        arrangement: how the latents come into ``plan.latent_shape``; None where they have it.
        denormalize: whether to apply the model's own statistics first.
        seeds: of the noise of each item, where they are several requests'; otherwise ``conditioning`` has one for the whole.
        conditioning: timestep and noise; None for no noise.
        noise_dtype: that in which noise is drawn, whatever the weights are cast to.
        host: how pixels get into host memory; None where they are there.

    Attributes:
        finite: whether everything that this rank decoded was finite before clamping, known after ``run``.
        finite_items: the same of each item, where several were decoded together.
        digest: hex digest of the whole picture's bytes as this rank holds it, for broadcast plans, else empty.
        timings_ms: time by stage.
    """

    def __init__(
        self,
        family: Family,
        communicator: Communicator,
        *,
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
        self._communicator = communicator
        self._device = device
        self._plan = plan
        self._pixels = pixels
        self._arrangement = arrangement
        self._denormalize = denormalize
        self._seeds = seeds
        self._conditioning = conditioning
        self._noise_dtype = noise_dtype
        self._host = host
        self._transfer: Transfer | None = None
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
        """This rank's part of the pixels, C-contiguous, in the asked dtype and layout; None where it holds nothing.

        Args:
            latents: the whole request's, as they were sent; bfloat16 carried as uint16.
            dtype_name: wire dtype of ``latents``.

        Raises:
            RankOutOfMemoryError, CompileFailedError, RuntimeError: this rank failed; where parts are brought together, its
                peers know.
            PeerFailedError: a peer failed before the parts were brought together.
        """
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
