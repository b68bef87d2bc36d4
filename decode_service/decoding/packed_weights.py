"""Weights of convolutions in the order in which oneDNN's kernels read them, on the CPU.

PyTorch puts a weight in that order at every call: on the small maps at the bottom of a decoder that takes a tenth to a third of a
convolution, and a band of a frame needs as much of it as the frame. Here the first call of each shape does it. Which order a
kernel reads depends on the shape of its operand: given another one, oneDNN would take a kernel that is ten times as slow.
Most shapes have an order in common, which is then kept once.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

logger = logging.getLogger(__name__)

_DTYPES = (torch.float32, torch.bfloat16)
#: Elements below which a weight is put in order in no time.
SMALLEST = 1 << 14
#: Orders in which one weight is kept at most; what wants another one is left to torch.
MOST_ORDERS = 2
# Shapes whose order is remembered, of one weight.
_MOST_SHAPES = 256


class _Entry:
    """What is kept of one weight: where it was in memory, and it in the orders of the shapes that it has met."""

    def __init__(self, weight: torch.Tensor, channels_last: bool, transposed: bool) -> None:
        self.place = _place(weight)
        last = torch.channels_last if weight.dim() == 4 else torch.channels_last_3d
        self.layout = last if channels_last else torch.contiguous_format
        self.transposed = transposed
        self._orders: dict[bytes, torch.Tensor] = {}
        self._by_shape: dict[Hashable, torch.Tensor | None] = {}

    def packed(self, weight: torch.Tensor, shape: Sequence[int], how: tuple[Any, ...]) -> torch.Tensor | None:
        """``weight`` in the order that the kernel for an operand of this shape reads; None for one order too many."""
        key = (tuple(shape), how)
        try:
            return self._by_shape[key]
        except KeyError:
            pass
        if self.transposed:
            reorder = torch.ops.mkldnn._reorder_convolution_transpose_weight
        else:
            reorder = torch.ops.mkldnn._reorder_convolution_weight
        try:
            packed = reorder(weight.detach(), *how, list(shape))
        except RuntimeError as error:
            # No kernel of oneDNN's for this shape on this machine: torch may have another.
            logger.warning("a weight %s is not kept for operands %s: %s", list(weight.shape), list(shape), error)
            self._by_shape[key] = None
            return None
        order = _order(packed)
        if order not in self._orders and len(self._orders) < MOST_ORDERS:
            self._orders[order] = packed
        if len(self._by_shape) >= _MOST_SHAPES:
            self._by_shape.clear()
        kept = self._by_shape[key] = self._orders.get(order)
        return kept


# By the weight itself, so that copies of a model, its casts and its shadows without data have none.
_entries: WeakIdKeyDictionary = WeakIdKeyDictionary()


def can_be_packed(weight: torch.Tensor) -> bool:
    """Whether ``weight`` (O,C,...) of a 2-D or 3-D convolution of one group is one that is worth it."""
    return (
        torch.backends.mkldnn.is_available()
        and weight.device.type == "cpu"
        and weight.dtype in _DTYPES
        and weight.dim() in (4, 5)
        and weight.numel() >= SMALLEST
    )


def keep_packed(weight: torch.Tensor, *, channels_last: bool, transposed: bool = False) -> None:
    """From now on convolutions with ``weight`` keep it in their own order, too: as much memory again, at times twice as much.

    Args:
        channels_last: the layout of their operands; others are left to torch. Half precision has its own, and float32 must not
            slip into it, whose kernels round worse: the layout of an output is that of most operations after it.
        transposed: whether ``weight`` (C,O,...) is that of transposed convolutions.
    """
    _entries[weight] = _Entry(weight, channels_last, transposed)


def forget_packed(weight: torch.Tensor) -> None:
    """Let go of what was kept of ``weight``, and keep no more of it."""
    _entries.pop(weight, None)


def is_kept(weight: torch.Tensor) -> bool:
    """Whether convolutions with ``weight`` keep it in their own order."""
    return weight in _entries


def kept_bytes(weights: Iterable[torch.Tensor]) -> int:
    """Bytes that ``weights`` take once more in one order, when all of them have been used."""
    return sum(x.numel() * x.element_size() for x in weights if is_kept(x))


def packed_convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias_O: torch.Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> torch.Tensor | None:
    """The convolution of ``x``, 4-D or 5-D, if ``weight`` is one of those kept; otherwise None, for torch to do it.

    The kernel is the one that oneDNN has for this layout of ``x``, so the result is the same to the bit as with its own order.
    """
    entry = _entry_for(x, weight)
    if entry is None or groups != 1:
        return None
    how = (tuple(padding), tuple(stride), tuple(dilation), groups)
    packed = entry.packed(weight, x.shape, how)
    if packed is None:
        return None
    output: torch.Tensor
    if entry.layout != torch.contiguous_format:
        output = torch.ops.mkldnn._convolution_pointwise(x, packed, bias_O, *how, "none", [], "")
    else:
        output = torch.mkldnn_convolution(x, packed, bias_O, *how)
    return output


def packed_convolution_transpose(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias_O: torch.Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
) -> torch.Tensor | None:
    """The transposed convolution of ``x``, if ``weight`` is one of those kept; otherwise None, for torch to do it."""
    entry = _entry_for(x, weight)
    if entry is None:
        return None
    zeros, ones = (0,) * len(stride), (1,) * len(stride)
    how = (tuple(padding), zeros, tuple(stride), ones, 1)
    packed = entry.packed(weight, x.shape, how)
    if packed is None:
        return None
    output: torch.Tensor = torch.ops.mkldnn._convolution_transpose_pointwise(x, packed, bias_O, *how, "none", [], "")
    # oneDNN has this one for channels last alone, and torch brings the result back, too.
    return output.contiguous(memory_format=entry.layout)


def _entry_for(x: torch.Tensor, weight: torch.Tensor) -> _Entry | None:
    """What is kept of ``weight``, if it is as it was then and ``x`` of the layout that it is kept for."""
    if not torch.backends.mkldnn.enabled:
        return None
    entry: _Entry | None = _entries.get(weight)
    # A model that is cast up for one decode has other numbers in the same weights meanwhile.
    if entry is None or x.dtype != weight.dtype or entry.place != _place(weight):
        return None
    return entry if x.is_contiguous(memory_format=entry.layout) else None


def _order(packed: torch.Tensor) -> bytes:
    """oneDNN's description of how ``packed`` lies in memory: equal for equal orders."""
    description = bytearray(torch.ops.mkldnn._get_mkldnn_serialized_md(packed).tolist())
    # Its number of dimensions (4 bytes, 4 more for alignment), 12 extents of 8 and the dtype (4) are followed by 4 bytes that nobody
    # sets. Were they others, orders would be told apart wrongly, which costs memory or time and no exactness.
    description[108:112] = bytes(4)
    return bytes(description)


def _place(weight: torch.Tensor) -> tuple[int, torch.dtype, int]:
    """Where ``weight`` is in memory, what it is there, and how often it was written to.

    Inference tensors do not count that, nor do writes through ``.data``, which nobody makes after loading.
    """
    return weight.data_ptr(), weight.dtype, 0 if weight.is_inference() else weight._version
