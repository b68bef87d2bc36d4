"""Weights of convolutions kept in the order of their kernels."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from decode_service.decoding.dense_convolution import dense_conv2d, dense_conv3d, dense_conv_transpose2d
from decode_service.decoding.packed_weights import can_be_packed, forget_packed, is_kept, keep_packed
from decode_service.decoding.rewrites.convolutions import prepared_weights
from decode_service.decoding.rewrites.site import ClassSite, Site
from decode_service.decoding.rewrites.structure import DecoderStructure
from decode_service.decoding.rewrites.upsampling import folded_weights


class DenseConvolution:
    """A convolution by ``dense_conv2d`` or ``dense_conv3d``, however its module pads."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def _conv_forward(self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        convolve = dense_conv2d if weight.dim() == 4 else dense_conv3d
        return convolve(input, weight, bias, self.stride, self.padding, self.dilation, self.groups)


class _PackingSite(Site):
    """A weight that is kept in the order of its kernel.

    Args:
        weight: of a convolution, or prepared for one by another rewrite.
        module: the module that must be told to convolve so; None where its forward is a rewrite that does already.
    """

    def __init__(
        self, weight: torch.Tensor, module: nn.Module | None, *, channels_last: bool, transposed: bool = False
    ) -> None:
        self._weight = weight
        self._channels_last, self._transposed = channels_last, transposed
        self._module = None if module is None else ClassSite(module, DenseConvolution, [])

    def install(self) -> None:
        self._keep()
        if self._module is not None:
            self._module.install()

    def undo(self) -> None:
        forget_packed(self._weight)
        if self._module is not None:
            self._module.undo()

    def outputs(self, generator: torch.Generator) -> list[torch.Tensor]:
        spatial = self._weight.dim() - 2
        channels = self._weight.shape[0 if self._transposed else 1]
        x = torch.randn(1, channels, *[5] * spatial, generator=generator).to(self._weight.dtype)
        if self._channels_last:
            x = x.contiguous(memory_format=torch.channels_last if spatial == 2 else torch.channels_last_3d)
        ones = [1] * spatial
        if self._transposed:
            output = dense_conv_transpose2d(x, self._weight, None, [2, 2], ones)
        else:
            convolve = dense_conv2d if spatial == 2 else dense_conv3d
            output = convolve(x, self._weight, None, ones, ones, ones, 1)
        if is_kept(self._weight):
            # From anew: the first real operand may want another order than this small one.
            self._keep()
        return [output]

    def _keep(self) -> None:
        keep_packed(self._weight, channels_last=self._channels_last, transposed=self._transposed)


def packing_sites(decoder: nn.Module, structure: DecoderStructure) -> Iterator[Site]:
    last = structure.keeps_channels_last(next(decoder.parameters()).dtype)
    for module in decoder.modules():
        if not isinstance(module, (nn.Conv2d, nn.Conv3d)) or isinstance(module.padding, str):
            continue
        weight = module.get_parameter("weight")
        if type(module)._conv_forward not in (nn.Conv2d._conv_forward, nn.Conv3d._conv_forward):
            continue
        if module.groups == 1 and module.padding_mode == "zeros" and can_be_packed(weight):
            yield _PackingSite(weight, module, channels_last=last)
    for prepared in prepared_weights(decoder):
        if can_be_packed(prepared):
            yield _PackingSite(prepared, None, channels_last=last)
    for folded in folded_weights(decoder):
        if can_be_packed(folded):
            yield _PackingSite(folded, None, channels_last=last, transposed=True)
