"""``group_norm`` in two steps, between which a band's statistics are merged with those of the other bands.

Both steps are torch's kernels for batch norm: statistics of channels, and one pass that scales and shifts channels. They
read a feature map in the layout that it has, in half precision too, with sums in float32 or wider, and take no memory
but the result's. Where the channels come first in memory, statistics come from the kernel for group norm instead. Written
out with ``var_mean`` and products, the same takes 20 to 40 times as long on a CPU: more than the convolutions that follow.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from decode_service.decoding.tracing import is_traced

# B batch, C channels, G groups, N positions (frames, rows and columns).


def group_moments(x: torch.Tensor, groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and biased variance of every group of channels: (B,G) each, float32.

    Args:
        x: (B,C,...), 3-D to 5-D, of any layout.
        groups: into how many equal groups of neighbouring channels ``C`` is divided.
    """
    if is_traced(x):
        # No kernel is called, code is written from the formula.
        variance_BG, mean_BG = torch.var_mean(x.float().reshape(x.shape[0], groups, -1), dim=-1, correction=0)
        return mean_BG, variance_BG
    # In half precision that kernel gives statistics in float32 on the CPU alone; elsewhere it would round or refuse them.
    if x.is_contiguous() and (x.dtype == torch.float32 or x.device.type in ("cpu", "meta")):
        return _of_rows(x, groups)
    if x.is_meta:
        # The kernel below does not know such tensors, of which only the memory is counted: it takes none.
        return x.new_empty((x.shape[0], groups), dtype=torch.float32), x.new_empty(
            (x.shape[0], groups), dtype=torch.float32
        )
    moments = [_of_channels(item, groups) for item in _items(x)]
    return torch.stack([mean for mean, _ in moments]), torch.stack([variance for _, variance in moments])


def normalize_groups(
    x: torch.Tensor,
    mean_BG: torch.Tensor,
    variance_BG: torch.Tensor,
    weight_C: torch.Tensor | None,
    bias_C: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    """``group_norm`` of ``x`` with statistics that are known: a new tensor of its shape and dtype, in its layout."""
    channels = x.shape[1]
    per_group = channels // mean_BG.shape[1]
    mean_BC, variance_BC = (values.repeat_interleave(per_group, 1) for values in (mean_BG, variance_BG))
    weight, bias = (None if values is None else values.float() for values in (weight_C, bias_C))
    items = [
        F.batch_norm(item, mean, variance, weight, bias, training=False, eps=eps)
        for item, mean, variance in zip(_items(x), mean_BC, variance_BC, strict=True)
    ]
    normalized = items[0] if len(items) == 1 else torch.cat(items)
    return normalized.view(x.shape) if x.dim() == 3 else normalized


def _items(x: torch.Tensor) -> list[torch.Tensor]:
    """The items (1,C,...) of a batch, 4-D or 5-D, each dense in memory: its channels first or last."""
    if x.dim() == 3:
        x = x.unsqueeze(-1)
    last = torch.channels_last if x.dim() == 4 else torch.channels_last_3d
    dense = x.is_contiguous() or x.is_contiguous(memory_format=last)
    return list((x if dense else x.contiguous()).split(1))


def _of_rows(x: torch.Tensor, groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    """With the channels first a group is one row of memory, whose moments the kernel for group norm returns.

    It writes the normalized map, too, which is thrown away: still a third of what the statistics of channels take here.
    """
    batch, channels = x.shape[:2]
    ones = torch.ones(channels, dtype=torch.float32, device=x.device)
    # eps only keeps the root finite. It is subtracted again, so it has to be small beside the variances that matter.
    eps = 1e-12
    _, mean, rstd = torch.native_group_norm(
        x, ones, torch.zeros_like(ones), batch, channels, x[0, 0].numel(), groups, eps
    )
    # On torch's ``meta`` device they are of the dtype of ``x``.
    return mean.float(), (rstd.float().square().reciprocal() - eps).clamp_min(0.0)


def _of_channels(item: torch.Tensor, groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    """With the channels last each has moments of its own, from which those of a group follow.

    Source: Chan, Golub and LeVeque (1979), for parts of one size.
    """
    unused = torch.zeros(item.shape[1], dtype=torch.float32, device=item.device)
    mean_C, variance_C = torch.batch_norm_update_stats(item, unused, unused.clone(), 0.0)
    mean_GC, variance_GC = mean_C.double().view(groups, -1), variance_C.double().view(groups, -1)
    variance_between, mean_G = torch.var_mean(mean_GC, dim=1, correction=0)
    return mean_G.float(), (variance_GC.mean(1) + variance_between).float()
