"""Functions that are exact on one band of a frame for some arguments, and refused for all others.

What is exact whatever its arguments is in ``local_operations``; what needs the neighbours is in ``sharding``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from decode_service.decoding.band_exchange import BandExchange, TensorMap, UnshardableOperation
from decode_service.decoding.communicator import Communicator
from decode_service.decoding.norm_activation import rms_norm_silu
from decode_service.decoding.pixel_norm import pixel_rms_norm
from decode_service.planning.bands import Band

# B batch, C channels, T frames, H height, W width, S sequence.


class BandOperations(BandExchange):
    """One rank's band of a frame, with functions that look at their arguments before they act on it.

    Each takes the function that a decoder called, and its arguments as they were given, and raises ``UnshardableOperation`` for
    those with which that function would not be exact.
    """

    def __init__(self, communicator: Communicator, axis: str, bands: Sequence[Band]) -> None:
        super().__init__(communicator, axis, bands)
        # Outputs of F.pad that carry halo rows, and how many: a convolution without padding of its own is right on
        # these and wrong on everything else.
        self._halos = TensorMap()
        # Bands whose channels were moved to the end, (B,H,W,C) or (B,T,H,W,C), for a norm over the last dimension.
        self._channels_last = TensorMap()

    def _carry_halo(self, source: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
        """``result``, remembered to hold the halo of ``source``: for functions that leave the sharded axis alone.

        Decoders cut a padded clip into shorter ones before they convolve it; each part still has its neighbours' rows.
        """
        halo = self._halos.get(source, 0)
        if halo and result is not source:
            self._halos[result] = halo
        return result

    def _is_axis(self, x: torch.Tensor, dim: int) -> bool:
        """Whether ``dim`` of ``x`` is the sharded axis, as far as the number of dimensions tells."""
        return dim % x.dim() == x.dim() + self.dim

    def _chunk(self, func: Callable[..., Any], input: torch.Tensor, chunks: int, dim: int = 0) -> tuple[Any, ...]:
        parts = func(input, chunks, dim)
        return parts if self._is_axis(input, dim) else tuple(self._carry_halo(input, part) for part in parts)

    def _cat(
        self, func: Callable[..., Any], tensors: Sequence[torch.Tensor], dim: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        joined: torch.Tensor = func(tensors, dim, **kwargs)
        halos = {self._halos.get(x, 0) for x in tensors}
        if len(halos) == 1 and not self._is_axis(joined, dim):
            return self._carry_halo(tensors[0], joined)
        return joined

    def _interpolate(
        self,
        func: Callable[..., Any],
        input: torch.Tensor,
        size: Any = None,
        scale_factor: Any = None,
        mode: str = "nearest",
        align_corners: bool | None = None,
        recompute_scale_factor: bool | None = None,
        antialias: bool = False,
    ) -> torch.Tensor:
        spatial = input.dim() - 2
        index = spatial + self.dim
        if index < 0:
            raise UnshardableOperation("resizing a sequence has no sharded axis of its own")
        if size is None:
            factors = scale_factor if isinstance(scale_factor, (tuple, list)) else [scale_factor] * spatial
            factor = float(factors[index] or 0.0)
        elif isinstance(size, torch.Size):
            # The extents of another band. A size given as numbers would be that of the frame, and wrong on every band.
            factor = size[index] / input.shape[input.dim() + self.dim]
            self.extents(size[index])
        else:
            factor = 0.0
        # Along the other axes every mode is local. Along this one nearest is, for the whole factors whose reciprocal is
        # exact: others may round to the row before, depending on where in the frame a band begins.
        nearest = mode in ("nearest", "nearest-exact") and factor.is_integer() and factor >= 1
        exact = nearest and (size is None or int(factor) & (int(factor) - 1) == 0)
        if not exact and not (factor == 1.0 and mode in ("linear", "bilinear", "trilinear")):
            raise UnshardableOperation(f"{mode} resizing to {size or scale_factor} mixes rows of neighbouring bands")
        return func(
            input,
            size=size,
            scale_factor=scale_factor,
            mode=mode,
            align_corners=align_corners,
            recompute_scale_factor=recompute_scale_factor,
            antialias=antialias,
        )

    def _normalize(
        self,
        func: Callable[..., Any],
        input: torch.Tensor,
        p: float = 2.0,
        dim: int = 1,
        eps: float = 1e-12,
        out: Any = None,
    ) -> torch.Tensor:
        tokens = input.dim() == 3 and dim in (-1, 2)
        bands = input.dim() >= 4 and dim == 1
        if not tokens and not bands:
            raise UnshardableOperation(f"normalizing over dimension {dim} is local only over channels")
        return func(input, p=p, dim=dim, eps=eps)

    def _pixel_rms_norm(
        self, func: Callable[..., Any], x: torch.Tensor, scale: float, gamma_C: torch.Tensor
    ) -> torch.Tensor:
        if x.dim() < 4:
            raise UnshardableOperation(f"an RMS norm over dimension 1 of {x.dim()}-D tokens may run over positions")
        return func(x, scale, gamma_C)

    def _linear(
        self, func: Callable[..., Any], input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Weights of the model have the frame's extents or none: on the sharded axis they would not fit a band.

        So a linear layer that accepts a band acts on another dimension. Of a tensor computed meanwhile that is not known.
        """
        if input.dim() > 3 and not isinstance(weight, torch.nn.Parameter) and not self._is_channels_last(input):
            raise UnshardableOperation(f"a product of {input.dim()}-D bands may run over the sharded axis")
        return func(input, weight, bias)

    def _last_dim(self, func: Callable[..., Any], input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Functions of the last dimension: channels for tokens (B,S,C), or where they were moved there, else the width."""
        if input.dim() > 3 and not self._is_channels_last(input):
            raise UnshardableOperation(f"{name_of(func)} on {input.dim()}-D bands may run over the sharded axis")
        return func(input, *args, **kwargs)

    def _mean(
        self, func: Callable[..., Any], input: torch.Tensor, dim: Any = None, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        tokens = input.dim() == 3
        channels = input.dim() - 1 if tokens or self._is_channels_last(input) else 1
        dims = dim if isinstance(dim, (tuple, list)) else (dim,)
        if input.dim() < 3 or any(d is None or d % input.dim() != channels for d in dims):
            raise UnshardableOperation(
                f"a mean over dimension {dim} of {input.dim()}-D bands is local only over channels"
            )
        output = func(input, dim, *args, **kwargs)
        if self._is_channels_last(input) and output.dim() == input.dim():
            self._channels_last[output] = True
        return output

    def _movedim(self, func: Callable[..., Any], input: torch.Tensor, source: int, destination: int) -> torch.Tensor:
        output = func(input, source, destination)
        if input.dim() >= 4 and not self._is_channels_last(input) and source == 1 and destination == -1:
            self._channels_last[output] = True
        return output

    def _is_channels_last(self, x: Any) -> bool:
        return isinstance(x, torch.Tensor) and x in self._channels_last

    def _repeat(self, func: Callable[..., Any], input: torch.Tensor, *sizes: Any, **kwargs: Any) -> torch.Tensor:
        repeats = sizes[0] if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)) else sizes
        if input.dim() < 4 or kwargs or repeats[self.dim] != 1:
            raise UnshardableOperation(f"repeating {input.dim()}-D bands by {list(repeats)} is not covered")
        return func(input, *sizes)

    def _batch_norm(
        self,
        func: Callable[..., Any],
        input: torch.Tensor,
        running_mean: torch.Tensor | None,
        running_var: torch.Tensor | None,
        weight: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> torch.Tensor:
        if training:
            raise UnshardableOperation("batch norm takes statistics of its input here; put the model in eval mode")
        return func(input, running_mean, running_var, weight, bias, training, momentum, eps)

    def _dropout(
        self,
        func: Callable[..., Any],
        input: torch.Tensor,
        p: float = 0.5,
        training: bool = True,
        inplace: bool = False,
    ) -> torch.Tensor:
        if training and p:
            raise UnshardableOperation("dropout draws different numbers on every rank; put the model in eval mode")
        return input

    def _getitem(self, func: Callable[..., Any], x: torch.Tensor, index: Any) -> torch.Tensor:
        entries = index if isinstance(index, tuple) else (index,)
        # None adds a dimension, and a tensor may take several: such indices are left to the self-test.
        plain = not any(entry is None or isinstance(entry, torch.Tensor) for entry in entries)
        if x.dim() >= 4 and plain and len(entries) <= x.dim() + 1:
            if Ellipsis in entries:
                at = entries.index(Ellipsis)
                entries = entries[:at] + (slice(None),) * (x.dim() - len(entries) + 1) + entries[at + 1 :]
            position = x.dim() + self.dim
            if position < len(entries) and entries[position] != slice(None):
                raise UnshardableOperation(
                    f"slicing the sharded axis by {entries[position]} would lose rows of the band"
                )
        result = func(x, index)
        # Only plain slices keep the dimensions, so only of them is it known which one the halo is in.
        return self._carry_halo(x, result) if all(isinstance(entry, slice) for entry in entries) else result

    def _setitem(self, func: Callable[..., Any], x: torch.Tensor, index: Any, value: Any) -> None:
        """Writing into a band: whole rows of it, from a number or from a band with as many rows."""
        entries = index if isinstance(index, tuple) else (index,)
        plain = all(type(entry) in (int, slice) or entry is Ellipsis for entry in entries)
        if x.dim() < 4 or not plain:
            raise UnshardableOperation(f"writing to {x.dim()}-D bands at {index} is not covered")
        if Ellipsis in entries:
            at = entries.index(Ellipsis)
            entries = entries[:at] + (slice(None),) * (x.dim() - len(entries) + 1) + entries[at + 1 :]
        rest = entries[x.dim() + self.dim :]
        if any(entry != slice(None) for entry in rest):
            raise UnshardableOperation(f"writing to a part of the sharded axis, {rest[0]}, is not covered")
        if isinstance(value, torch.Tensor) and value.dim():
            same_rows = value.dim() >= 4 and value.shape[self.dim :] == x.shape[self.dim :]
            if not same_rows or self._halos.get(value, 0) != self._halos.get(x, 0):
                raise UnshardableOperation(f"writing {list(value.shape)} to a band {list(x.shape)} is not covered")
        func(x, index, value)


def name_of(func: Callable[..., Any]) -> str:
    """What a message calls ``func``."""
    return str(getattr(func, "__name__", func))


#: What looks at the arguments of which function.
CONDITIONAL: dict[Any, Callable[..., Any]] = {
    F.interpolate: BandOperations._interpolate,
    F.normalize: BandOperations._normalize,
    pixel_rms_norm: BandOperations._pixel_rms_norm,
    rms_norm_silu: BandOperations._pixel_rms_norm,
    F.linear: BandOperations._linear,
    F.layer_norm: BandOperations._last_dim,
    F.rms_norm: BandOperations._last_dim,
    F.batch_norm: BandOperations._batch_norm,
    F.dropout: BandOperations._dropout,
    torch.Tensor.__getitem__: BandOperations._getitem,
    torch.Tensor.__setitem__: BandOperations._setitem,
    torch.chunk: BandOperations._chunk,
    torch.Tensor.chunk: BandOperations._chunk,
    torch.cat: BandOperations._cat,
    torch.concat: BandOperations._cat,
    torch.concatenate: BandOperations._cat,
    torch.Tensor.movedim: BandOperations._movedim,
    torch.movedim: BandOperations._movedim,
    torch.Tensor.mean: BandOperations._mean,
    torch.mean: BandOperations._mean,
    torch.Tensor.repeat: BandOperations._repeat,
}
