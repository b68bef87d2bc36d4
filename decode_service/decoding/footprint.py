"""What a model needs of a device's memory, measured without decoding anything: on tensors that have shapes and no data.

The decoder runs on torch's ``meta`` device, as it will run on the real one (undivided, and on a band between two others),
and every tensor it makes is followed from its birth to its release. So the numbers are those of this very model, with its
widths, its dtype and whatever was rewritten in it, and they cost a fraction of a second at loading.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import logging
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from decode_service.decoding.attention import QueryBlocks
from decode_service.decoding.band_exchange import AXIS_DIM
from decode_service.decoding.communicator import Communicator, Messages
from decode_service.decoding.families.base import Family
from decode_service.decoding.packed_weights import kept_bytes
from decode_service.decoding.pixels import convert
from decode_service.decoding.rewrites import prepared_tensors
from decode_service.decoding.sharding import ShardedFrame
from decode_service.planning.bands import split
from decode_service.planning.memory import Activations, Footprint
from decode_service.planning.plan import PixelFormat
from decode_service.planning.spec import ModelSpec
from decode_service.planning.temporal import LinearFrames
from decode_service.planning.tiles import TileSpan

# B batch, C channels, T latent frames, F pixel frames, H height, W width.

logger = logging.getLogger(__name__)

_CELLS = 24
_BANDS = 3

_CONVOLUTIONS = frozenset(
    {
        torch.ops.aten.convolution.default,
        torch.ops.aten.conv2d.default,
        torch.ops.aten.conv3d.default,
        torch.ops.aten.mkldnn_convolution.default,
    }
)

# Models of one configuration have one footprint, and a process may load one several times.
_measured: dict[str, Footprint] = {}


class LiveMemory(TorchDispatchMode):
    """Follows the storages that operations make while it is active in this thread.

    Attributes:
        live: bytes of those that are still referred to.
        peak: most bytes at the end of any operation since ``peak`` was last set.
        widest: elements of the widest operand (input or output) of any operation.
        widest_name: that operation.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = self.widest = 0
        self.widest_name = ""
        self._known: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        made = [x for x in tree_leaves(output) if isinstance(x, torch.Tensor)]
        for x in made:
            self._follow(x)
        self.peak = max(self.peak, self.live + (self._workspace(args[0], output) if func in _CONVOLUTIONS else 0))
        for x in itertools.chain(made, tree_leaves((args, kwargs))):
            # Not weights, whose size has nothing to do with the picture's.
            if isinstance(x, torch.Tensor) and x.numel() > self.widest and not self._is_weight(x):
                self.widest, self.widest_name = x.numel(), str(func)
        return output

    @staticmethod
    def _workspace(x: torch.Tensor, output: torch.Tensor) -> int:
        """Bytes that a convolution's kernel takes beside its operands: both once more, in the layout it works on."""
        return (x.numel() + output.numel()) * x.element_size()

    def know(self, tensors: Iterable[torch.Tensor]) -> None:
        """Leave the model's own tensors out of account."""
        for x in tensors:
            self._known[x.untyped_storage()] = True

    def _is_weight(self, x: torch.Tensor) -> bool:
        return self._known.get(x.untyped_storage(), False)

    def _follow(self, x: torch.Tensor) -> None:
        storage = x.untyped_storage()
        if storage in self._known:
            return
        self._known[storage] = False
        nbytes = storage.nbytes()
        self.live += nbytes
        weakref.finalize(storage, self._released, nbytes).atexit = False

    def _released(self, nbytes: int) -> None:
        self.live -= nbytes


class Alone(Communicator):
    """One rank of several whose peers are not there: what it receives has a shape, which is all that is asked of it."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def begin_exchange(self, sends: Messages, receives: Messages) -> Callable[[], None]:
        return lambda: None

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return [torch.empty_like(tensor) for _ in range(self.size)]

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        return

    def agree(self, status: int) -> list[int]:
        return [status] * self.size

    def abort(self) -> None:
        return

    def close(self) -> None:
        return


def with_footprint(family: Family) -> ModelSpec:
    """The spec of a loaded model with its footprint, or without one where its decoder cannot run on shapes alone."""
    key = identity(family)
    if key not in _measured:
        begun = time.perf_counter()
        try:
            _measured[key] = measure(family)
        except Exception as error:
            logger.warning(
                "the memory that %s needs cannot be measured, and is not planned: %s", family.spec.name, error
            )
            return family.spec
        logger.info("measured the memory that %s needs in %.1f s", family.spec.name, time.perf_counter() - begun)
    return dataclasses.replace(family.spec, footprint=_measured[key])


def identity(family: Family) -> str:
    """What models have in common that take the same of memory and arithmetic."""
    parameters = {name: (tuple(x.shape), str(x.dtype)) for name, x in family.vae.state_dict().items()}
    # Rewrites change the modules' classes, and with them what is alive at a time.
    classes = [type(module).__name__ for module in family.vae.modules()]
    return json.dumps([family.config, parameters, classes], default=str, sort_keys=True)


def measure(family: Family) -> Footprint:
    """The footprint of a loaded model.

    Raises:
        Exception: whatever its decoder raises on tensors without data.
    """
    shadow = without_data(family)
    spec = shadow.spec
    tensors = [*family.vae.parameters(), *family.vae.buffers(), *prepared_tensors(family.vae)]
    banded = None
    if spec.exact_axes:
        banded = _activations(shadow, spec.exact_axes[-1])
    return Footprint(
        weight_bytes=sum(x.numel() * x.element_size() for x in tensors) + kept_bytes(tensors),
        itemsize=shadow.dtype().itemsize,
        whole=_activations(shadow, None),
        banded=banded,
    )


def without_data(family: Family) -> Family:
    """The same family around a copy of its model whose tensors have no data."""
    memo: dict[int, Any] = {}
    for parameter in family.vae.parameters():
        memo[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), requires_grad=False)
    for buffer in family.vae.buffers():
        memo[id(buffer)] = buffer.detach().to("meta")
    return type(family)(copy.deepcopy(family.vae, memo), family.spec.name)


def clip_lengths(spec: ModelSpec) -> tuple[int, int, int]:
    """Latent frames of three clips from which a model's need follows: a still (or the shortest), a clip, a longer one.

    The last two are of two and three frames where a pass takes all (or the first that the model takes), and of three and
    five where passes have one and two frames after the first: what the pass before has left must be there.
    """
    rule = spec.frame_rule
    if rule is None:
        return 1, 1, 1
    valid = [t for t in range(1, 65) if rule.problem(t) is None]
    if spec.tile_only:
        # One block or clip, whole.
        whole = max((t for t in valid if spec.tile_parts((1, 1, t, 1, 1)) == 1), default=valid[0])
        return valid[0], whole, whole
    if len(valid) == 1:
        return valid[0], valid[0], valid[0]
    if not spec.pass_frames:
        return 1, 3, 5
    # A rule that was measured may begin later than at 1, and then nothing shorter decodes.
    first = valid[0] if isinstance(rule, LinearFrames) else 1
    return first, first + 1, first + 2


def _activations(family: Family, axis: str | None) -> Activations:
    spec = family.spec
    short, middle, long = clip_lengths(spec)
    still, _ = _peak(family, short, 1, axis)
    if long == short:
        return Activations(still=still)
    clip, caches = _peak(family, middle, 1, axis)
    longer, _ = _peak(family, long, 2, axis) if long != middle else (clip, caches)
    per_frame = max(0.0, longer - clip) if spec.pass_frames or spec.chunked else 0.0
    # Frames of the pass after the first one.
    later = middle - 1 if spec.pass_frames else 1
    clip = max(0.0, max(clip, 0.0 if per_frame else longer) - per_frame * later)
    return Activations(still=still, clip=clip, per_frame=per_frame, caches=caches)


def _peak(family: Family, frames: int, chunk: int, axis: str | None) -> tuple[float, float]:
    """Bytes per output pixel of one frame, at the peak and between passes, of a clip of ``frames`` latent frames."""
    spec = family.spec
    height = width = measured_cells(spec)
    latents = torch.empty((1, spec.latent_channels, frames, height, width), dtype=family.dtype(), device="meta")
    memory = LiveMemory()
    memory.know([*family.vae.parameters(), *family.vae.buffers()])
    between = 0
    with torch.inference_mode(), QueryBlocks(), memory:
        if spec.tile_only:
            span_H, span_W = TileSpan(0, height, 0, height), TileSpan(0, width, 0, width)
            family.decode_tile(latents, 0, span_H, span_W, chunk)
        else:
            if axis is not None:
                bands = split(height, _BANDS)
                latents = latents.narrow(AXIS_DIM[axis], bands[1].start, bands[1].size)
                height, width = latents.shape[-2:]
            frame = ShardedFrame(Alone(1, _BANDS), axis, bands) if axis is not None else None
            passes = family.decode(latents, chunk)
            while True:
                if frame is not None:
                    with frame:
                        pixels = next(passes, None)
                else:
                    pixels = next(passes, None)
                if pixels is None:
                    break
                convert(family.to_unit_range(pixels), PixelFormat())
                del pixels
                if not between:
                    between = memory.live
    area = height * width * spec.spatial_ratio**2
    return memory.peak / area, (between / area if frames > 1 and not spec.pass_frames else 0.0)


def measured_cells(spec: ModelSpec) -> int:
    """Latent rows, and as many columns, of the frame that is measured."""
    if spec.fixed_cells:
        return spec.fixed_cells
    size = getattr(spec.tiles, "size_px", 0)
    return max(1, size // spec.spatial_ratio) if spec.tile_only else _CELLS
