"""The halo rule: an unmodified decoder runs on one band of the frame, because padding means neighbour.

On the sharded axis three functions are reinterpreted while a ``ShardedFrame`` is active:

* padding (of a convolution, or ``F.pad``) by p asks for p rows of the neighbouring bands; only the outermost ranks see
  the original padding. The convolution then runs valid on that axis.
* ``group_norm`` merges the statistics of all bands.
* ``scaled_dot_product_attention`` and ``frame_causal_attention`` keep their queries and gather keys and values;
  ``kernel_attention`` adds up the bands' sums of keys times values.

Everything that acts on each position by itself passes through. Whatever else could mix positions raises
``UnshardableOperation``: an uncovered operation must never fall through to a wrong picture. Code that only moves elements
(views, slices, concatenation) is let through where it leaves the sharded axis alone; what a check of arguments cannot
see, the start-up self-test (a sharded decode against an undivided one) does.

Tensors meet in 4-D (B,C,H,W) and 5-D (B,C,T,H,W) inside one decoder, so the axis is counted from the end: height is -2,
width is -1. What bands pass to each other is in ``band_exchange``.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from decode_service.decoding.attention import (
    attend_by_sums,
    attend_by_weights,
    frame_causal_attention,
    goes_by_sums,
    kernel_attention,
    key_value_sums,
)
from decode_service.decoding.band_exchange import (
    RowsBeside,
    TensorMap,
    UnshardableOperation,
    memory_format_of,
)
from decode_service.decoding.causal_conv3d import (
    CausalKernel,
    ChannelNorm,
    activated_conv3d,
    causal_conv3d,
    continued_conv3d,
    front,
    last_frames,
    seen_again,
)
from decode_service.decoding.communicator import Communicator
from decode_service.decoding.conditional_operations import CONDITIONAL, BandOperations, name_of
from decode_service.decoding.dense_convolution import dense_conv2d, dense_conv3d, dense_conv_transpose2d
from decode_service.decoding.group_norm import group_moments, normalize_groups
from decode_service.decoding.local_operations import LOCAL, POINTWISE, QUERIES
from decode_service.decoding.norm_activation import group_norm_silu, normalize_groups_silu, silu_over
from decode_service.decoding.pixel_norm import normalized_format
from decode_service.decoding.tracing import is_traced
from decode_service.planning.bands import Band

# B batch, C channels, T latent frames, H height, W width, S sequence, D head channels, G groups, N elements of a group.

_active = threading.local()

#: What a frame knows of a tensor besides its shape: the halo rows that it carries, whether its channels are the last
#: dimension, and whether it is a constant.
Marks = tuple[int, bool, bool]


class ShardedFrame(BandOperations, TorchFunctionMode):
    """While active in this thread, tensors hold one band of the frame and operations see their neighbours.

    Arguments and attributes are those of ``BandExchange``.
    """

    def __init__(self, communicator: Communicator, axis: str, bands: Sequence[Band]) -> None:
        BandOperations.__init__(self, communicator, axis, bands)
        TorchFunctionMode.__init__(self)
        self._shared_tokens = 0
        # Tensors made from numbers alone, the same on every rank.
        self._constants = TensorMap()

    def __enter__(self) -> ShardedFrame:
        _active.frames = [*getattr(_active, "frames", ()), self]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        _active.frames = _active.frames[:-1]

    @staticmethod
    def is_active() -> bool:
        """Whether the halo rule holds in this thread."""
        return ShardedFrame.current() is not None

    @staticmethod
    def current() -> ShardedFrame | None:
        """The frame whose band this thread decodes, or None where it decodes a whole frame."""
        frames: Sequence[ShardedFrame] = getattr(_active, "frames", ())
        return frames[-1] if frames else None

    def marks(self, x: torch.Tensor) -> Marks:
        """What this frame knows of ``x`` from the operations that made it."""
        return self._halos.get(x, 0), x in self._channels_last, x in self._constants

    def mark(self, x: torch.Tensor, marks: Marks) -> None:
        """Know of ``x`` what ``marks`` say: something else made it than operations under this frame."""
        halo, channels_last, constant = marks
        if halo:
            self._halos[x] = halo
        if channels_last:
            self._channels_last[x] = True
        if constant:
            self._constants[x] = True

    @contextlib.contextmanager
    def sharing_tokens(self, count: int) -> Iterator[None]:
        """While it lasts, the first ``count`` tokens of an attention are no part of the frame: every rank has the same."""
        self._shared_tokens = count
        try:
            yield
        finally:
            self._shared_tokens = 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in QUERIES:
            return func(*args, **(kwargs or {}))
        kwargs = kwargs or {}
        if self.beside and func not in _KEEP_ROWS_BESIDE:
            # It may write to the tensor, or to a view of it that it makes.
            for x in _tensors((*args, *kwargs.values())):
                self.beside.pop(x, None)
        constant = func is torch.arange or (bool(self._constants) and self._is_constant(func, args, kwargs))
        output = func(*args, **kwargs) if func is torch.arange else self._reinterpret(func, args, kwargs)
        if constant:
            for x in _tensors((output,)):
                self._constants[x] = True
        return output

    def _reinterpret(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if func in _SILUS and args and args[0] in self.beside:
            return self._silu_of_norm(func, *args, **kwargs)
        if func in LOCAL:
            output = func(*args, **kwargs)
            marks = self._channels_last and func in POINTWISE and isinstance(output, torch.Tensor)
            if marks and any(map(self._is_channels_last, args)):
                self._channels_last[output] = True
            if func in _SAME_ELEMENTS and args and args[0].shape[self.dim :] == output.shape[self.dim :]:
                self._carry_halo(args[0], output)
            return output
        handler = _HANDLERS.get(func)
        if handler is None:
            raise UnshardableOperation(
                f"{name_of(func)} is not known to be exact on one band of a frame; decode this model with mode direct or tile"
            )
        if self._channels_last and func not in _CHANNELS_LAST and any(map(self._is_channels_last, args)):
            raise UnshardableOperation(f"{name_of(func)} is not covered while channels are the last dimension")
        return handler(self, func, *args, **kwargs)

    def _is_constant(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """Whether ``func`` makes a constant again: its tensors are constants and weights, and no band.

        Constants (timestep embeddings) begin with ``torch.arange``, which gives every rank the same numbers. That is right
        unless they count positions of the picture, so a constant may meet a band only if it has one value per item,
        channel, or both.
        """
        tensors = _tensors((*args, *kwargs.values()))
        constants = [x for x in tensors if x in self._constants]
        if not constants:
            return False
        if func not in _OF_CONSTANTS:
            raise UnshardableOperation(
                f"{name_of(func)} of numbers that may count positions of the frame is not covered"
            )
        if func in _CASTS:
            return tensors[0] in self._constants
        # Weights have up to two dimensions that matter; tokens have three, bands four and more.
        bands = [x for x in tensors if x not in self._constants and x.dim() >= 3]
        for band in bands:
            free = {3: (-3, -1), 4: (-4, -3)}.get(band.dim(), tuple(range(-band.dim(), -3)))
            for x in constants:
                varying = [dim for dim in range(-x.dim(), 0) if x.shape[dim] != 1 and dim not in free]
                if varying or self._is_channels_last(band):
                    raise UnshardableOperation(
                        f"{name_of(func)} of a band {list(band.shape)} and numbers {list(x.shape)} that may count its positions"
                    )
        return not bands

    # The three functions that see neighbours

    def _pad(
        self,
        func: Callable[..., Any],
        input: torch.Tensor,
        pad: Sequence[int],
        mode: str = "constant",
        value: float | None = None,
    ) -> torch.Tensor:
        pads = list(pad)
        index = 2 * (-1 - self.dim)
        before, after = pads[index : index + 2] if index + 1 < len(pads) else (0, 0)
        if not before and not after:
            return func(input, pads, mode=mode, value=value)
        if input.dim() < 4 or before < 0 or after < 0 or mode not in ("constant", "replicate", "reflect"):
            raise UnshardableOperation(f"padding {pads} of mode {mode} on {input.dim()}-D bands is not covered")
        x = self.with_halo(input, before, after, mode, value or 0.0)
        pads[index] = pads[index + 1] = 0
        if any(pads):
            x = func(x, pads, mode=mode, value=value)
        self._halos[x] = before + after
        return x

    def _conv(
        self,
        func: Callable[..., Any],
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        stride: int | Sequence[int] = 1,
        padding: int | str | Sequence[int] = 0,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
    ) -> torch.Tensor:
        spatial = weight.dim() - 2
        index = spatial + self.dim
        strides, dilations = _per_dim(stride, spatial), _per_dim(dilation, spatial)
        if isinstance(padding, str):
            raise UnshardableOperation(f"convolution padding {padding!r} is not covered; give it as numbers")
        paddings = _per_dim(padding, spatial)
        if index < 0:
            raise UnshardableOperation("a 1-D convolution has no sharded axis of its own")
        reach = dilations[index] * (weight.shape[2 + index] - 1)
        if strides[index] != 1:
            raise UnshardableOperation(f"a convolution with stride {strides[index]} on the sharded axis is not covered")
        own = 2 * paddings[index]
        if own + self._halos.get(input, 0) != reach:
            raise UnshardableOperation(
                f"a convolution that reaches over {reach} rows with padding {own} would change the band's extent"
            )
        if own:
            # Nobody but the convolution sees what it is padded to.
            input = self.joined_with_halo([input], paddings[index], paddings[index], lend=True)
            paddings[index] = 0
        return func(input, weight, bias, strides, paddings, dilations, groups)

    def _causal_conv(
        self, func: Callable[..., Any], parts: Sequence[torch.Tensor], kernel: CausalKernel
    ) -> torch.Tensor:
        rows = self._reach_of(kernel)
        if not rows:
            return causal_conv3d(parts, kernel)
        return self._convolve_haloed(self.joined_with_halo(parts, rows, rows), kernel)

    def _continued_conv(
        self, func: Callable[..., Any], before: torch.Tensor | None, x: torch.Tensor, kernel: CausalKernel
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows = self._reach_of(kernel)
        if not rows:
            return continued_conv3d(before, x, kernel)
        # The frames before hold their neighbours' rows already, as this function has left them.
        real = [x] if before is None else [before, x]
        joined = self.joined_with_halo([*front(real, kernel), *real], rows, rows)
        return self._convolve_haloed(joined, kernel), last_frames([joined], seen_again(real, kernel))

    def _activated_conv(
        self,
        func: Callable[..., Any],
        before: torch.Tensor | None,
        x: torch.Tensor,
        norm: ChannelNorm,
        kernel: CausalKernel,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows = self._reach_of(kernel)
        if not rows:
            return activated_conv3d(before, x, norm, kernel)
        real = [x] if before is None else [before, x]
        joined = self.joined_with_halo(
            [*front(real, kernel), *real],
            rows,
            rows,
            write=lambda own: norm.activated(x, own),
            memory_format=normalized_format(x),
        )
        return self._convolve_haloed(joined, kernel), last_frames([joined], seen_again(real, kernel))

    def _reach_of(self, kernel: CausalKernel) -> int:
        """Rows of either neighbour that a causal convolution sees."""
        rows = kernel.padding[self.dim]
        width = kernel.dilation[self.dim] * (kernel.weight_OCTHW.shape[self.dim] - 1)
        if rows and (kernel.stride[self.dim] != 1 or 2 * rows != width):
            raise UnshardableOperation(
                f"a convolution with stride {kernel.stride[self.dim]} and padding {rows} on the sharded axis is not covered"
            )
        return rows

    def _convolve_haloed(self, joined: torch.Tensor, kernel: CausalKernel) -> torch.Tensor:
        left = list(kernel.padding)
        left[self.dim] = 0
        return causal_conv3d([joined], kernel._replace(padding=left))

    def _conv_transpose(
        self,
        func: Callable[..., Any],
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        stride: int | Sequence[int] = 1,
        padding: int | Sequence[int] = 0,
        output_padding: int | Sequence[int] = 0,
        groups: int = 1,
        dilation: int | Sequence[int] = 1,
    ) -> torch.Tensor:
        """Exact where the input carries a halo and ``padding`` crops all outputs that miss some of their inputs."""
        spatial = weight.dim() - 2
        index = spatial + self.dim
        if index < 0:
            raise UnshardableOperation("a 1-D convolution has no sharded axis of its own")
        steps, crops, kernel = _per_dim(stride, spatial), _per_dim(padding, spatial), weight.shape[2 + index]
        plain = _per_dim(dilation, spatial)[index] == 1 and _per_dim(output_padding, spatial)[index] == 0
        # Output rows of the input without its halo, and those that are left of the input with it.
        missing = steps[index] * (self._halos.get(input, 0) - 1) + kernel - 2 * crops[index]
        if not plain or crops[index] < kernel - 1 or missing:
            raise UnshardableOperation(
                f"a transposed convolution of kernel {kernel}, stride {steps[index]} and padding {crops[index]} on the sharded "
                "axis is covered only over a halo that it crops again"
            )
        if func is dense_conv_transpose2d:
            return dense_conv_transpose2d(input, weight, bias, steps, crops)
        return func(input, weight, bias, steps, crops, output_padding, groups, dilation)

    def _group_norm(
        self,
        func: Callable[..., Any],
        input: torch.Tensor,
        num_groups: int,
        weight: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        eps: float = 1e-5,
    ) -> torch.Tensor:
        if input.dtype == torch.float32:
            # As torch's own kernel: float32 decoders keep this layout, whose convolutions round better.
            input = input.contiguous()
        moments = torch.stack(group_moments(input, num_groups))
        # A band's outermost rows go along with its statistics: a convolution usually follows, which would ask for them.
        rows = 1 if input.dim() >= 4 else 0
        beside = self.begin_rows_beside([input], rows, rows, moments)()
        mean, variance = self.merged_moments(beside.moments, input[0].numel() // num_groups)
        # The root of an overflow would be 0, and the picture without contents and finite: it must be seen to be none.
        variance = variance.masked_fill(variance.isinf(), math.nan)
        activates = func is group_norm_silu

        def normalized(x: torch.Tensor) -> torch.Tensor:
            # The kernel for both is for channels-last memory, which a float32 band, of a decode that is cast up, has just left.
            if activates and weight is not None and bias is not None and x.dtype != torch.float32:
                return normalize_groups_silu(x, mean, variance, weight, bias, eps)
            output = normalize_groups(x, mean, variance, weight, bias, eps)
            return F.silu(output, inplace=True) if activates else output

        output = normalized(input)
        if rows:
            layout = memory_format_of(input)
            self.beside[output] = beside.each(lambda x: normalized(x.contiguous(memory_format=layout)))
        return output

    def _attention(
        self,
        func: Callable[..., Any],
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        if attn_mask is not None or is_causal:
            raise UnshardableOperation("masked attention needs the geometry of its mask, which is not covered")
        # One message for both: keys and values have the same shape in every decoder here, but need not.
        if key.shape == value.shape:
            both, shared = torch.stack([key, value]), self._shared_tokens
            gathered = self.gather(both[..., shared:, :], key.dim() - 1)
            key, value = torch.cat([both[..., :shared, :], gathered], -2) if shared else gathered
        elif self._shared_tokens:
            raise UnshardableOperation("attention with shared tokens needs keys and values of one shape")
        else:
            key, value = self.gather(key, key.dim() - 2), self.gather(value, value.dim() - 2)
        return func(query, key, value, dropout_p=dropout_p, scale=scale, enable_gqa=enable_gqa)

    def _frame_causal_attention(
        self, func: Callable[..., Any], query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        # Tokens (B,N,T,S,D) know their frame by dimension 2, so gathering those of each frame keeps the causal order.
        key, value = self.gather(torch.stack([key, value]), 4).unbind(0)
        return func(query, key, value)

    def _kernel_attention(
        self, func: Callable[..., Any], query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, eps: float
    ) -> torch.Tensor:
        band = query.shape[self.dim]
        positions = sum(self.extents(band)) * (query.shape[-2] * query.shape[-1] // band)
        if goes_by_sums(positions, query.shape[2]):
            # Added up in rank order, so that all ranks get the same bits.
            first, *others = self._communicator.all_gather(key_value_sums(key, value).contiguous())
            self.exchanges += 1
            for sums in others:
                first = first + sums
            return attend_by_sums(query, first, eps)
        key, value = self.gather(torch.stack([key, value]), 6 + self.dim).unbind(0)
        return attend_by_weights(query, key, value, eps)

    def _silu_of_norm(self, func: Callable[..., Any], input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """A SiLU of what a group norm has made, and of the rows beside it."""
        beside: RowsBeside = self.beside.pop(input)
        if is_traced(input) or func is not silu_over:
            output: torch.Tensor = func(input, *args, **kwargs)
        else:
            # The convolution that follows needs a row on either side: with room for them the band is not copied again.
            dim, shape = input.dim() + self.dim, list(input.shape)
            shape[dim] += 2
            room = torch.empty(shape, dtype=input.dtype, device=input.device, memory_format=memory_format_of(input))
            output = room.narrow(dim, 1, input.shape[dim])
            torch.ops.aten.silu.out(input, out=output)
            self.roomy[output] = room
        self.beside[output] = beside.each(F.silu)
        return output


def _per_dim(value: int | Sequence[int], count: int) -> list[int]:
    return [value] * count if isinstance(value, int) else list(value) * (count if len(value) == 1 else 1)


def _tensors(values: Iterable[Any]) -> list[torch.Tensor]:
    """The tensors among ``values`` and in the lists and tuples among them."""
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found.extend(x for x in value if isinstance(x, torch.Tensor))
    return found


_HANDLERS: dict[Any, Callable[..., Any]] = {
    F.pad: ShardedFrame._pad,
    torch.conv1d: ShardedFrame._conv,
    torch.conv2d: ShardedFrame._conv,
    torch.conv3d: ShardedFrame._conv,
    causal_conv3d: ShardedFrame._causal_conv,
    continued_conv3d: ShardedFrame._continued_conv,
    activated_conv3d: ShardedFrame._activated_conv,
    dense_conv2d: ShardedFrame._conv,
    dense_conv3d: ShardedFrame._conv,
    F.conv_transpose2d: ShardedFrame._conv_transpose,
    dense_conv_transpose2d: ShardedFrame._conv_transpose,
    F.group_norm: ShardedFrame._group_norm,
    group_norm_silu: ShardedFrame._group_norm,
    F.scaled_dot_product_attention: ShardedFrame._attention,
    frame_causal_attention: ShardedFrame._frame_causal_attention,
    kernel_attention: ShardedFrame._kernel_attention,
    **CONDITIONAL,
}
# Local functions whose result holds the elements of their first argument where they were, halo rows included.
_SAME_ELEMENTS = frozenset(
    {torch.clone, torch.Tensor.clone, torch.Tensor.contiguous, torch.Tensor.expand, torch.Tensor.squeeze}
)
_SILUS = frozenset({F.silu, silu_over})
# What neither writes to the output of a group norm nor makes a view of it; of a SiLU it is known what it writes.
_KEEP_ROWS_BESIDE = frozenset(
    {*_SILUS, F.pad, torch.conv2d, torch.conv3d, dense_conv2d, dense_conv3d, F.dropout, *QUERIES}
)
# What may see bands whose channels are the last dimension, besides functions of each position.
_CHANNELS_LAST = frozenset(
    {
        torch.Tensor.movedim,
        torch.movedim,
        torch.Tensor.mean,
        torch.mean,
        F.linear,
        F.layer_norm,
        F.rms_norm,
        F.dropout,
    }
)
# What may see constants. Casts take their dtype from the other tensor, not its values.
_OF_CONSTANTS = frozenset(
    LOCAL
    | {F.linear, torch.Tensor.__getitem__, torch.cat, torch.concat, torch.concatenate, torch.chunk, torch.Tensor.chunk}
)
_CASTS = frozenset({torch.Tensor.to, torch.Tensor.type_as})
