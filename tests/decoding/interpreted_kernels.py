"""Runs the Triton kernels in Triton's interpreter and prints how far they are off, as JSON; a program of its own.

The interpreter is chosen when Triton is imported (``TRITON_INTERPRET=1``), for the whole process.
"""

from __future__ import annotations

import json
import sys

import torch
import torch.nn.functional as F

from decode_service.decoding import norm_activation, triton_kernels
from decode_service.decoding.group_norm import group_moments
from decode_service.decoding.pixel_norm import EPSILON

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

#: Shapes whose positions and channels fit no block: primes, one, powers of two, more than a block has, none.
SHAPES = [
    (1, 1, 1, 1),
    (1, 3, 1, 5),
    (2, 7, 5, 3),
    (1, 32, 8, 8),
    (1, 96, 2, 3, 5),
    (2, 100, 2, 7, 11),
    (1, 130, 1, 37),
    (1, 257, 3, 3),
    (3, 384, 1, 2, 3),
    (1, 1031, 3, 2),
    (1, 4097, 1, 3),
    (0, 8, 2, 2),
    (1, 8, 0, 2),
]


def numbers(shape: tuple[int, ...], dtype: torch.dtype, *, scale: float = 1.0, mean: float = 0.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(shape) + sum(shape))
    x = (torch.randn(shape, generator=generator) * scale + mean).to(dtype)
    return x.contiguous(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)


def off(got: torch.Tensor, x: torch.Tensor, exact: torch.Tensor) -> float:
    """The largest difference, relative to what may be: the rounding of the dtype at the value, and some in float32."""
    assert got.shape == x.shape and got.dtype == x.dtype
    if not got.numel():
        return 0.0
    assert got.movedim(1, -1).is_contiguous(), got.stride()
    assert got.data_ptr() != x.data_ptr()
    allowed = exact.abs() * torch.finfo(x.dtype).eps + 1e-5 * exact.abs().max().clamp_min(1e-3)
    return float(((got.double() - exact).abs() / allowed).max())


def rms(x: torch.Tensor) -> float:
    channels = x.shape[1]
    # Every second number of another tensor: parameters need not be dense.
    gamma = (torch.rand(channels, 2, generator=torch.Generator().manual_seed(1)) + 0.5).to(x.dtype)[:, 0]
    if x.numel():
        # Positions without a direction.
        x[..., 0] = 0
    got = triton_kernels.rms_norm_silu(x, channels**0.5, gamma, EPSILON)
    factor = gamma.double().view(-1, *[1] * (x.dim() - 2)) * channels**0.5
    exact = F.silu(F.normalize(x.double(), dim=1) * factor)
    assert not x.numel() or (got[..., 0] == 0).all()
    return max(off(got, x, exact), off(norm_activation.rms_norm_silu(x, channels**0.5, gamma), x, exact))


def group(x: torch.Tensor, groups: int) -> float:
    """The kernel in the place where CUDA has it, with statistics as given there."""
    channels = x.shape[1]
    generator = torch.Generator().manual_seed(2)
    weight, bias = (torch.rand(channels, generator=generator).to(x.dtype) + 0.5, torch.rand(channels).to(x.dtype) - 0.5)
    if not x.numel():
        mean = variance = torch.zeros(x.shape[0], groups)
        exact = x.double()
    else:
        mean, variance = group_moments(x, groups)
        # Not ``F.group_norm``, which refuses a single value.
        x_BGN = x.double().reshape(x.shape[0], groups, -1)
        variances, means = torch.var_mean(x_BGN, dim=2, correction=0, keepdim=True)
        normalized = ((x_BGN - means) / (variances + 1e-6).sqrt()).view(x.shape)
        ones = [1] * (x.dim() - 2)
        exact = F.silu(normalized * weight.double().view(-1, *ones) + bias.double().view(-1, *ones))
    reference = norm_activation.normalize_groups_silu(x, mean, variance, weight, bias, 1e-6)
    deviation = torch.rsqrt(variance + 1e-6)
    mean_BC, factor_BC = (values.repeat_interleave(channels // groups, 1) for values in (mean, deviation))
    got = triton_kernels.scaled_silu(x, mean_BC, factor_BC * weight.float(), bias.float())
    return max(off(got, x, exact), off(reference, x, exact))


def main() -> None:
    found: dict[str, float] = {}
    for name, dtype in DTYPES.items():
        for shape in SHAPES:
            found[f"rms {name} {shape}"] = rms(numbers(shape, dtype))
            groups = next(n for n in (32, 10, 7, 5, 1) if shape[1] % n == 0)
            found[f"group {name} {shape}"] = group(numbers(shape, dtype, mean=3.0), groups)
        found[f"rms {name} large"] = rms(numbers((1, 20, 3, 3), dtype, scale=1000.0))
        found[f"rms {name} small"] = rms(numbers((1, 20, 3, 3), dtype, scale=1e-4))
        # Of a norm around the least by which ``F.normalize`` divides; zero in float16.
        found[f"rms {name} least"] = rms(numbers((1, 20, 3, 3), dtype, scale=EPSILON / 4))
    refused = {}
    wide = torch.zeros(1, triton_kernels.MOST_CHANNELS + 1, 1, 1)
    for name, x in (("contiguous", torch.zeros(1, 4, 3, 3)), ("wide", wide)):
        try:
            triton_kernels.rms_norm_silu(x, 1.0, torch.ones(x.shape[1]), EPSILON)
        except ValueError as error:
            refused[name] = str(error)
    bad = numbers((1, 4, 2, 2), torch.float32)
    bad[0, 1, 0, 0] = torch.nan
    bad[0, 1, 1, 1] = torch.inf
    kept = triton_kernels.rms_norm_silu(bad, 2.0, torch.ones(4), EPSILON).isfinite()
    ones = torch.ones(1, 4)
    shifted = triton_kernels.scaled_silu(bad, ones, ones, ones[0]).isfinite()
    # Nothing can be divided by a norm that is no number; by an infinite one the others can, and are zero.
    lost = (not kept[0, :, 0, 0].any(), not kept[0, 1, 1, 1])
    broken = [lost[y] and bool(kept[0, :, y, 1 - y].all()) for y in (0, 1)]
    json.dump(
        {
            "off": found,
            "refused": refused,
            "broken": broken,
            "shifted": [not shifted[0, 1, 0, 0], bool(shifted[0, 0].all())],
        },
        sys.stdout,
    )


if __name__ == "__main__":
    main()
