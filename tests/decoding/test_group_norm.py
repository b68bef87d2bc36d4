"""Group norm in two steps is group norm, in every layout that bands and frames have."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

from decode_service.decoding.group_norm import _of_channels, group_moments, normalize_groups

GROUPS, EPS = 8, 1e-6

#: Feature maps whose groups are far from zero, where sums of squares would cancel.
LAYOUTS = {
    "channels first": lambda: torch.randn(2, 64, 9, 7),
    "channels last": lambda: torch.randn(2, 64, 9, 7).to(memory_format=torch.channels_last),
    "frames, channels first": lambda: torch.randn(2, 64, 3, 5, 7),
    "frames, channels last": lambda: torch.randn(2, 64, 3, 5, 7).to(memory_format=torch.channels_last_3d),
    "tokens": lambda: torch.randn(2, 64, 33),
    "transposed tokens": lambda: torch.randn(2, 33, 64).transpose(1, 2),
    "a slice": lambda: torch.randn(1, 64, 8, 12)[..., 2:10],
}


def by_groups(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
    return normalize_groups(x, *group_moments(x, GROUPS), weight, bias, EPS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_rounds_no_worse_than_group_norm(layout: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = (LAYOUTS[layout]() * 3 + 5).to(dtype)
    weight, bias = torch.randn(64).to(dtype), torch.randn(64).to(dtype)
    exact = F.group_norm(x.double(), GROUPS, weight.double(), bias.double(), EPS)

    def error(y: torch.Tensor) -> float:
        return (y.double() - exact).square().mean().sqrt().item()

    normalized = by_groups(x, weight, bias)
    assert normalized.dtype == dtype and normalized.shape == x.shape
    assert error(normalized) <= 1.5 * error(F.group_norm(x, GROUPS, weight, bias, EPS)) + 1e-7 < 0.02


@pytest.mark.parametrize("layout", ["channels last", "frames, channels last", "frames, channels first"])
def test_the_result_keeps_the_layout(layout: str) -> None:
    x = LAYOUTS[layout]()
    assert by_groups(x, None, None).stride() == x.stride()


@pytest.mark.parametrize("layout", ["channels first", "channels last"])
def test_without_factors_and_of_constant_groups(layout: str) -> None:
    x = LAYOUTS[layout]()
    x[:, :8] = 4.0
    normalized = by_groups(x, None, None)
    assert (normalized - F.group_norm(x.double(), GROUPS, eps=EPS)).abs().max() < 1e-5
    assert (normalized[:, :8] == 0).all()


@pytest.mark.parametrize("layout", ["channels first", "channels last"])
def test_moments_of_large_means_do_not_cancel(layout: str) -> None:
    torch.manual_seed(0)
    x = LAYOUTS[layout]() + 300
    mean, variance = group_moments(x, GROUPS)
    exact_variance, exact_mean = torch.var_mean(x.double().reshape(2, GROUPS, -1), dim=-1, correction=0)
    assert (mean - exact_mean).abs().max() < 1e-4
    assert ((variance - exact_variance) / exact_variance).abs().max() < 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_moments_have_a_mantissa_of_float32_in_every_dtype(device: str, layout: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = (LAYOUTS[layout]() + 2).to(device, dtype)
    exact_variance, exact_mean = torch.var_mean(x.double().reshape(x.shape[0], GROUPS, -1), dim=-1, correction=0)
    mean, variance = group_moments(x, GROUPS)
    assert mean.dtype == variance.dtype == torch.float32
    assert (mean - exact_mean).abs().max() < 1e-5 and (variance - exact_variance).abs().max() < 1e-5


@pytest.mark.parametrize("layout", ["channels first", "channels last"])
def test_moments_of_small_numbers_are_theirs(layout: str) -> None:
    torch.manual_seed(0)
    x = LAYOUTS[layout]() * 1e-5
    _, variance = group_moments(x, GROUPS)
    exact = x.double().reshape(2, GROUPS, -1).var(dim=-1, correction=0)
    assert ((variance - exact) / exact).abs().max() < 1e-4


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_tracer_writes_the_formula_down_and_no_kernel(layout: str) -> None:
    x = LAYOUTS[layout]()
    graph = make_fx(lambda x: group_moments(x, GROUPS), tracing_mode="fake")(x)
    called = {str(node.target) for node in graph.graph.nodes if node.op == "call_function"}
    assert "aten.var_mean.correction" in called
    assert not any("norm" in name for name in called), called
    for found, expected in zip(graph(x), group_moments(x, GROUPS), strict=True):
        assert (found - expected).abs().max() < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_has_no_data_has_moments_of_the_right_shape(layout: str, dtype: torch.dtype) -> None:
    x = LAYOUTS[layout]().to("meta", dtype)
    assert {(tuple(m.shape), m.dtype, m.is_meta) for m in group_moments(x, GROUPS)} == {
        ((x.shape[0], GROUPS), torch.float32, True)
    }


def test_statistics_of_channels_serve_both_layouts() -> None:
    x = LAYOUTS["channels first"]()[:1]
    of_rows = group_moments(x, GROUPS)
    for found, expected in zip(_of_channels(x, GROUPS), of_rows, strict=True):
        assert (found - expected[0]).abs().max() < 1e-6


def test_what_overflows_is_seen_to_be_no_number() -> None:
    x = torch.randn(1, 64, 4, 4).to(memory_format=torch.channels_last)
    x[0, 0, 0, 0] = float("inf")
    assert not by_groups(x, None, None)[:, :8].isfinite().any()
