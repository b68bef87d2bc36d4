"""Weights kept in the order of their kernels give what torch's own convolutions give, to the bit, and are kept no longer."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from decode_service.decoding import packed_weights
from decode_service.decoding.dense_convolution import dense_conv2d, dense_conv3d, dense_conv_transpose2d
from decode_service.decoding.families import FAMILIES
from decode_service.decoding.packed_weights import (
    forget_packed,
    keep_packed,
    kept_bytes,
    packed_convolution,
    packed_convolution_transpose,
)
from decode_service.decoding.rewrites import apply_rewrites
from tests.decoding import models
from tests.decoding.family_checks import check_exact_modes, reference
from tests.decoding.harness import latents_of

LAYOUTS = {4: torch.channels_last, 5: torch.channels_last_3d}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For every convolution that could have been one with a packed weight, whether it was."""
    answers: list[bool] = []

    def watched(*args: Any) -> torch.Tensor | None:
        output = packed_convolution(*args)
        answers.append(output is not None)
        return output

    monkeypatch.setattr("decode_service.decoding.dense_convolution.packed_convolution", watched)
    return answers


def weight_of(dims: int, dtype: torch.dtype, channels_last: bool, channels: int = 64) -> torch.Tensor:
    weight = (latents_of((channels, channels, *[3] * (dims - 2))) / 24).to(dtype)
    return weight.contiguous(memory_format=LAYOUTS[dims]) if channels_last else weight


@pytest.mark.parametrize("dims", [4, 5])
@pytest.mark.parametrize(
    ("dtype", "channels_last"), [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)]
)
def test_every_shape_gets_the_bits_of_the_kernel(
    asked: list[bool], dims: int, dtype: torch.dtype, channels_last: bool
) -> None:
    weight = weight_of(dims, dtype, channels_last)
    bias = latents_of((64,)).to(dtype)
    ones = [1] * (dims - 2)
    own, ours = (F.conv2d, dense_conv2d) if dims == 4 else (F.conv3d, dense_conv3d)
    keep_packed(weight, channels_last=channels_last)
    for extents in ((16, 16), (16, 10), (7, 5), (64, 64), (16, 16)):
        for padding in (ones, [0, *ones[1:]], [*ones[:-1], 0]):
            x = latents_of((1, 64, *[3] * (dims - 4), *extents)).to(dtype)
            if channels_last:
                x = x.contiguous(memory_format=LAYOUTS[dims])
            expected = own(x, weight, bias, 1, padding)
            output = ours(x, weight, bias, ones, padding, ones, 1)
            assert output.dtype == expected.dtype and output.stride() == expected.stride()
            # For small operands torch takes a kernel that is not oneDNN's.
            assert (output - expected).abs().max() <= (1e-5 if dtype == torch.float32 else 2**-5)
            assert torch.equal(output, torch.mkldnn_convolution(x, weight, bias, padding, ones, ones, 1))
    assert asked.count(True) >= 12, "orders that many shapes have in common are kept"


@pytest.mark.parametrize(
    ("dtype", "channels_last"), [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)]
)
def test_transposed_convolutions_get_the_bits_of_torchs(dtype: torch.dtype, channels_last: bool) -> None:
    weight = (latents_of((64, 32, 4, 4)) / 24).to(dtype)
    bias = latents_of((32,)).to(dtype)
    if channels_last:
        weight = weight.contiguous(memory_format=torch.channels_last)
    keep_packed(weight, channels_last=channels_last, transposed=True)
    for extents in ((16, 16), (16, 10), (7, 5), (64, 64)):
        for padding in ([1, 1], [1, 3], [3, 1]):
            x = latents_of((1, 64, *extents)).to(dtype)
            if channels_last:
                x = x.contiguous(memory_format=torch.channels_last)
            expected = F.conv_transpose2d(x, weight, bias, 2, padding)
            packed = packed_convolution_transpose(x, weight, bias, [2, 2], padding)
            assert packed is not None and torch.equal(packed, expected) and packed.stride() == expected.stride()
            assert torch.equal(dense_conv_transpose2d(x, weight, bias, [2, 2], padding), expected)


def test_no_more_orders_are_kept_than_agreed_and_the_rest_is_right(
    asked: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_weights, "MOST_ORDERS", 0)
    weight = weight_of(4, torch.float32, channels_last=False)
    keep_packed(weight, channels_last=False)
    x = latents_of((1, 64, 9, 9))
    for _ in range(2):
        assert torch.equal(dense_conv2d(x, weight, None, [1, 1], [1, 1], [1, 1], 1), F.conv2d(x, weight, padding=1))
    assert asked == [False, False]


def test_where_no_kernel_takes_a_shape_torch_does_and_the_log_says_so_once(
    asked: list[bool], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*args: Any) -> torch.Tensor:
        raise RuntimeError("could not create a primitive descriptor")

    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_convolution_weight", refuse)
    weight = weight_of(4, torch.float32, channels_last=False)
    keep_packed(weight, channels_last=False)
    x = latents_of((1, 64, 9, 9))
    for _ in range(2):
        assert torch.equal(dense_conv2d(x, weight, None, [1, 1], [1, 1], [1, 1], 1), F.conv2d(x, weight, padding=1))
    assert asked == [False, False] and caplog.text.count("could not create a primitive descriptor") == 1


def test_what_is_kept_belongs_to_one_weight_as_it_was(asked: list[bool]) -> None:
    conv = nn.Conv2d(64, 64, 3, padding=1).requires_grad_(False)
    keep_packed(conv.weight, channels_last=False)
    x = latents_of((1, 64, 8, 8))

    def convolved(module: nn.Conv2d, x: torch.Tensor) -> bool:
        output = dense_conv2d(x, module.weight, module.bias, [1, 1], [1, 1], [1, 1], 1)
        assert (output - F.conv2d(x, module.weight, module.bias, padding=1)).abs().max() < 1e-6
        return asked.pop()

    assert convolved(conv, x)
    assert not convolved(copy.deepcopy(conv), x)
    assert not convolved(conv, x.transpose(2, 3)), "a layout that is neither"
    # Cast up and down again, as for a decode in another precision: other memory, and other numbers in it.
    conv.double()
    assert not convolved(conv, x.double())
    conv.float()
    conv.weight.mul_(2)
    assert not convolved(conv, x)
    forget_packed(conv.weight)
    assert kept_bytes(conv.parameters()) == 0


def test_float32_does_not_slip_into_another_layout(asked: list[bool]) -> None:
    """As what an attention returns: a picture of tokens, which a 1x1 convolution brings back to the layout of the rest."""
    weight = latents_of((64, 64, 1, 1))
    tokens = latents_of((1, 16 * 16, 64)).transpose(1, 2).unflatten(2, (16, 16))
    expected = F.conv2d(tokens, weight)
    keep_packed(weight, channels_last=False)
    output = dense_conv2d(tokens, weight, None, [1, 1], [0, 0], [1, 1], 1)
    assert output.is_contiguous() and torch.equal(output, expected) and asked == [False]


def test_a_model_that_goes_takes_what_was_kept_with_it() -> None:
    gc.collect()
    before = len(packed_weights._entries)
    conv = nn.Conv2d(64, 64, 3)
    keep_packed(conv.weight, channels_last=False)
    assert kept_bytes(conv.parameters()) == conv.weight.numel() * 4
    assert len(packed_weights._entries) == before + 1
    del conv
    gc.collect()
    assert len(packed_weights._entries) == before


@pytest.mark.parametrize("name", ["autoencoder_kl", "wan21"])
def test_decoders_with_packed_weights_are_exact_in_every_mode(
    name: str, asked: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_weights, "SMALLEST", 1)
    vae = models.tiny(name)
    packing = apply_rewrites(copy.deepcopy(vae), FAMILIES[type(vae).__name__].structure)[-1]
    assert packing.name == "packed_weights" and packing.active and packing.modules > 5
    latents = latents_of((1, 4, 5, 7) if name == "autoencoder_kl" else (1, 4, 3, 5, 7))
    asked.clear()
    check_exact_modes(vae, latents, reference(vae, latents), ranks=(2,))
    assert asked.count(True) > 10
