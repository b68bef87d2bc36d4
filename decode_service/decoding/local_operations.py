"""The functions that are exact on one band of a frame as they stand: the allow-list of ``sharding``.

A function belongs here if it acts on each position by itself, or only moves or makes elements, whatever its arguments. One
that does so for some arguments is in ``conditional_operations``, which looks at them; everything else is refused by ``sharding``.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from decode_service.decoding.attention import attention_over_time
from decode_service.decoding.norm_activation import silu_over


def _resolve(names: str) -> set[Any]:
    """The functions of these names in ``torch``, ``torch.Tensor`` (in-place forms too) and ``torch.nn.functional``."""
    found: set[Any] = set()
    for name in names.split():
        for owner in (torch, torch.Tensor, F):
            for form in (name, f"{name}_", f"__{name}__", f"__r{name}__", f"__i{name}__"):
                function = getattr(owner, form, None)
                if callable(function):
                    found.add(function)
    return found


#: Each output element depends on the input elements at the same position only.
POINTWISE = _resolve(
    "abs add addcmul addcdiv bool clamp clamp_max clamp_min clip clone contiguous copy cos detach div double eq elu exp "
    "float ge gelu gt half hardsigmoid hardswish isfinite le leaky_relu log lt maximum minimum mish mul ne neg pow relu "
    "relu6 rsqrt rsub sigmoid silu sin softplus sqrt square sub tanh to truediv true_divide type type_as where bfloat16"
) | {silu_over}
# Elements move or are created, none is computed from another position. Slicing has a check of its own.
_LAYOUT = _resolve(
    "broadcast_to empty empty_like expand expand_as flatten full_like new_empty new_full new_ones "
    "new_zeros ones_like permute pixel_shuffle repeat_interleave reshape reshape_as split squeeze stack swapaxes "
    "transpose unbind unflatten unsqueeze view view_as zeros_like"
)
#: What asks about a tensor and does nothing to it.
QUERIES = _resolve("dim element_size get_device is_complex is_contiguous is_floating_point numel size stride")
QUERIES |= {
    getattr(torch.Tensor, name).__get__
    for name in (
        "shape",
        "dtype",
        "device",
        "ndim",
        "is_cuda",
        "requires_grad",
        "layout",
        "is_nested",
        "is_mps",
        "is_cpu",
    )
}
#: What is exact on one band of a frame as it stands. ``attention_over_time`` is over the frames of each position.
LOCAL = frozenset(POINTWISE | _LAYOUT | QUERIES | {attention_over_time})
