"""The halo rule, operation by operation: bands with neighbours against the undivided frame."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL
from torch import nn

from decode_service.decoding.attention import frame_causal_attention, kernel_attention
from decode_service.decoding.band_exchange import AXIS_DIM, UnshardableOperation
from decode_service.decoding.causal_conv3d import CausalKernel, ChannelNorm, activated_conv3d, continued_conv3d
from decode_service.decoding.communicator import Communicator, Messages
from decode_service.decoding.norm_activation import silu_over
from decode_service.decoding.sharding import ShardedFrame
from decode_service.planning.bands import split
from tests.decoding.harness import latents_of
from tests.decoding.threads import on_ranks

Operation = Callable[[torch.Tensor], torch.Tensor]


def sharded(operation: Operation, x: torch.Tensor, axis: str, ranks: int) -> torch.Tensor:
    """``operation`` on bands of ``x``, put together again."""
    dim = AXIS_DIM[axis]
    bands = split(x.shape[dim], ranks)

    def work(communicator: Communicator) -> torch.Tensor:
        band = bands[communicator.rank]
        local = x.narrow(dim, band.start, band.size).contiguous()
        with ShardedFrame(communicator, axis, bands):
            return operation(local)

    return torch.cat(on_ranks(ranks, work), dim)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3)) + 0.5


EMBEDDING = torch.linspace(-1, 1, 32).view(8, 4)
BOX_3D = torch.ones(2, 3, 3, 3, 3) / 27
BOX_2D = torch.ones(2, 3, 3, 3)
BOX_2X2 = torch.ones(2, 3, 2, 2)
CHANNEL_MIX = nn.Linear(3, 5)


def by_two_passes(x: torch.Tensor) -> torch.Tensor:
    """A causal convolution over three frames, then over the rest with the last padded frames of the first three."""
    before, outputs = None, []
    for frames in (x[:, :, :3], x[:, :, 3:]):
        padded = F.pad(frames, (1, 1, 1, 1, 0, 0), mode="replicate")
        if before is None:
            before = padded[:, :, :1].expand(-1, -1, 2, -1, -1)
        output = torch.empty(1, 2, *frames.shape[2:], dtype=x.dtype, device=x.device)
        output[:, :, :2] = F.conv3d(torch.cat([before, padded[:, :, :2]], 2), BOX_3D)
        if frames.shape[2] > 2:
            output[:, :, 2:] = F.conv3d(padded, BOX_3D)
        before = torch.clone(padded[:, :, -2:])
        written = torch.empty_like(output)
        written[...] = output
        outputs.append(written.contiguous())
    return torch.cat(outputs, 2)


BLOCK_CONV = nn.Conv2d(4, 3, 3, padding=1)
WIDE_KERNEL = torch.ones(2, 4, 5, 5) / 50


def with_a_channel_doubled(x: torch.Tensor) -> torch.Tensor:
    normalized = F.group_norm(x, 2)
    normalized[:, :1].mul_(2.0)
    return normalized


OPERATIONS: dict[str, tuple[tuple[int, ...], Operation]] = {
    "conv2d": ((1, 3, 7, 9), nn.Conv2d(3, 4, 3, padding=1)),
    "conv2d 5x5": ((1, 3, 8, 9), nn.Conv2d(3, 4, 5, padding=2)),
    "conv2d dilated": ((1, 3, 8, 9), nn.Conv2d(3, 4, 3, padding=2, dilation=2)),
    "conv2d 1x1": ((1, 3, 7, 9), nn.Conv2d(3, 4, 1)),
    "conv2d grouped": ((1, 4, 7, 9), nn.Conv2d(4, 8, 3, padding=1, groups=2)),
    "conv2d that pads by replicating": ((1, 3, 7, 9), nn.Conv2d(3, 4, 3, padding=1, padding_mode="replicate")),
    "conv2d that pads by reflecting": ((1, 3, 8, 9), nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect")),
    "conv2d that reflects bands of one row": ((1, 3, 3, 3), nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect")),
    "conv3d": ((1, 3, 4, 7, 9), nn.Conv3d(3, 4, 3, padding=1)),
    "pad with a value, then conv": ((1, 3, 7, 9), lambda x: F.conv2d(F.pad(x, (1, 1, 1, 1), value=2.0), BOX_2D)),
    "asymmetric pad, then conv": ((1, 3, 7, 9), lambda x: F.conv2d(F.pad(x, (1, 0, 0, 1)), BOX_2X2)),
    "causal pad, then conv3d": (
        (1, 3, 4, 7, 9),
        lambda x: F.conv3d(F.pad(x, (1, 1, 1, 1, 2, 0)), BOX_3D),
    ),
    "replicate pad of a clip, then conv3d": (
        (1, 3, 4, 7, 9),
        lambda x: F.conv3d(F.pad(x, (1, 1, 1, 1, 2, 0), mode="replicate"), BOX_3D),
    ),
    "group norm of images": ((2, 8, 7, 9), nn.GroupNorm(4, 8)),
    "group norm of clips": ((2, 8, 3, 7, 9), nn.GroupNorm(4, 8)),
    "group norm, silu, conv2d": ((2, 4, 7, 9), lambda x: BLOCK_CONV(F.silu(F.group_norm(x, 2)))),
    "group norm, silu in place, conv2d": ((1, 4, 7, 9), lambda x: BLOCK_CONV(F.silu(F.group_norm(x, 2), inplace=True))),
    "group norm, silu in place, reflected": (
        (1, 4, 7, 9),
        lambda x: F.conv2d(F.pad(F.silu(F.group_norm(x, 2), True), (1, 1, 1, 1), mode="reflect"), BLOCK_CONV.weight),
    ),
    "group norm, channels last, silu, conv2d": (
        (1, 4, 7, 9),
        lambda x: BLOCK_CONV(F.silu(F.group_norm(x.contiguous(memory_format=torch.channels_last), 2), True)),
    ),
    "group norm, conv2d 5x5": ((1, 4, 8, 9), lambda x: F.conv2d(F.group_norm(x, 2), WIDE_KERNEL, padding=2)),
    "group norm, changed in place, conv2d": ((1, 4, 7, 9), lambda x: BLOCK_CONV(F.group_norm(x, 2).add_(1.0))),
    "group norm, a view of it changed, conv2d": ((1, 4, 7, 9), lambda x: BLOCK_CONV(with_a_channel_doubled(x))),
    "group norm, silu and something else, conv2d": (
        (1, 4, 7, 9),
        lambda x: BLOCK_CONV(F.silu(F.group_norm(x, 2), inplace=True).mul_(2.0)),
    ),
    "group norm of bfloat16": ((2, 8, 7, 9), lambda x: F.group_norm(x.bfloat16(), 4).float()),
    "group norm far from zero": ((1, 4, 7, 9), lambda x: F.group_norm(x + 3000.0, 2, eps=1e-6)),
    "channel norm": ((1, 8, 3, 7, 9), lambda x: F.normalize(x, dim=1)),
    "norms of channels moved to the end": (
        (1, 8, 3, 7, 9),
        lambda x: (
            F.layer_norm((x.movedim(1, -1) * torch.rsqrt(x.movedim(1, -1).pow(2).mean(-1, keepdim=True))), (8,))
            .movedim(-1, 1)
            .mul(x.square().mean(1, keepdim=True))
        ),
    ),
    "repeated frames, then conv3d": (
        (1, 3, 4, 7, 9),
        lambda x: F.conv3d(torch.concatenate([x[:, :, :1].repeat((1, 1, 2, 1, 1)), x], 2), BOX_3D, padding=(0, 1, 1)),
    ),
    "scaling by an embedded timestep": (
        (2, 8, 3, 7, 9),
        lambda x: x * (1 + F.linear(torch.sin(torch.arange(4).type_as(x)), EMBEDDING).view(1, 8, 1, 1, 1)),
    ),
    "nearest upsampling": ((1, 3, 7, 9), nn.Upsample(scale_factor=2, mode="nearest")),
    "nearest-exact upsampling": ((1, 3, 7, 9), nn.Upsample(scale_factor=(2.0, 2.0), mode="nearest-exact")),
    "nearest resizing to the extents of another band": (
        (1, 3, 2, 7, 9),
        lambda x: F.interpolate(x, size=F.interpolate(x, scale_factor=(3.0, 4.0, 4.0)).shape[-3:]),
    ),
    "linear upsampling in time only": ((1, 3, 2, 7, 9), nn.Upsample(scale_factor=(2, 1, 1), mode="trilinear")),
    "linear layer over the channels of clips": (
        (1, 3, 4, 7, 9),
        lambda x: CHANNEL_MIX(x.permute(0, 2, 3, 4, 1)).permute(0, 4, 1, 2, 3),
    ),
    "padded clip cut in time, then conv3d": (
        (1, 3, 8, 7, 9),
        lambda x: torch.cat(
            [F.conv3d(part, BOX_3D) for part in F.pad(x, (1, 1, 1, 1, 1, 0), mode="replicate").chunk(3, dim=2)], 2
        ),
    ),
    "padded clip cut and joined in time, then conv3d": (
        (1, 3, 6, 7, 9),
        lambda x: F.conv3d(
            torch.cat([part[:, :, 1:] for part in torch.chunk(F.pad(x, (1, 1, 1, 1)), 2, dim=2)], 2), BOX_3D
        ),
    ),
    "channels moved into pixels": (
        (1, 8, 3, 5),
        lambda x: F.conv2d(F.pixel_shuffle(x.repeat_interleave(2, dim=1), 2)[:, :3], BOX_2D, padding=1),
    ),
    "padded frames kept and joined with the next, written to a clip": ((1, 3, 5, 7, 9), lambda x: by_two_passes(x)),
    "batch norm of known statistics": ((2, 8, 7, 9), nn.BatchNorm2d(8).eval()),
    "pixel-wise functions": ((1, 3, 7, 9), lambda x: (F.silu(x) * 2 + x.clamp(-1, 1)).to(torch.float64).float()),
}


def test_a_variance_beyond_float32_is_not_hidden_behind_ordinary_pixels() -> None:
    """Its root would be the scale 0, which makes a finite picture of nothing but the bias."""
    x = normal(1, 8, 7, 9) * 1e25
    assert not torch.isfinite(sharded(lambda y: F.group_norm(y, 2), x, "height", 2)).any()


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("axis", ["height", "width"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_on_bands_is_the_operation_on_the_frame(name: str, axis: str, ranks: int) -> None:
    shape, operation = OPERATIONS[name]
    x = normal(*shape)
    with torch.inference_mode():
        expected = operation(x)
    actual = sharded(operation, x, axis, ranks)
    assert actual.shape == expected.shape
    tolerance = 2e-3 if "far from zero" in name else 2e-2 if "bfloat16" in name else 1e-5
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=1e-5)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("axis", ["height", "width"])
def test_attention_keeps_queries_and_gathers_keys_and_values(axis: str, ranks: int) -> None:
    def attention(x: torch.Tensor) -> torch.Tensor:
        batch, channels, height, width = x.shape
        tokens = x.reshape(batch, 1, channels, height * width).permute(0, 1, 3, 2)
        y = F.scaled_dot_product_attention(tokens, tokens * 0.5, tokens + 1)
        return y.permute(0, 1, 3, 2).reshape(batch, channels, height, width)

    x = normal(2, 8, 7, 9)
    torch.testing.assert_close(sharded(attention, x, axis, ranks), attention(x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("axis", ["height", "width"])
def test_a_token_that_all_ranks_share_is_gathered_once(axis: str, ranks: int) -> None:
    shared = normal(2, 1, 1, 8)

    def attention(x: torch.Tensor) -> torch.Tensor:
        tokens = torch.cat([shared, x.flatten(2).transpose(1, 2).unsqueeze(1)], 2)
        frame = ShardedFrame.current()
        with frame.sharing_tokens(1) if frame else contextlib.nullcontext():
            y = F.scaled_dot_product_attention(tokens, tokens * 0.5, tokens + 1)
        y = y.squeeze(1)
        # The shared token saw all others on every rank, so each position may add what came of it.
        return (y[:, 1:] + y[:, :1]).transpose(1, 2).reshape(x.shape)

    x = normal(2, 8, 7, 9)
    assert ShardedFrame.current() is None
    torch.testing.assert_close(sharded(attention, x, axis, ranks), attention(x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("axis", ["height", "width"])
def test_frame_causal_attention_gathers_the_keys_of_every_frame(axis: str, ranks: int) -> None:
    """Bands of a frame hold different numbers of tokens, and rank order is not frame order."""

    def attention(x: torch.Tensor) -> torch.Tensor:
        tokens = x.permute(0, 2, 3, 4, 1).flatten(2, 3).unsqueeze(1)
        y = frame_causal_attention(tokens, tokens * 0.5, tokens + 1)
        return y.squeeze(1).unflatten(2, x.shape[3:]).permute(0, 4, 1, 2, 3)

    x = normal(2, 8, 4, 7, 9)
    torch.testing.assert_close(sharded(attention, x, axis, ranks), attention(x), atol=1e-5, rtol=1e-5)


# Heads of 12 channels: a frame of 4 x 6 is linear although no band on 3 ranks would be; one of 3 x 4 is not.
@pytest.mark.parametrize(("extents", "linear"), [((7, 9), True), ((4, 6), True), ((3, 4), False)])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("axis", ["height", "width"])
def test_kernel_attention_takes_the_form_that_the_frame_takes(
    axis: str, ranks: int, extents: tuple[int, int], linear: bool
) -> None:
    def attention(x: torch.Tensor) -> torch.Tensor:
        heads = x.unflatten(1, (2, 12))
        return kernel_attention(heads.relu(), (heads - 0.3).relu(), heads.sin(), 1e-15).flatten(1, 2)

    x = normal(2, 24, *extents)
    torch.testing.assert_close(sharded(attention, x, axis, ranks), attention(x), atol=1e-5, rtol=1e-5)
    # The linear form answers in float32 whatever it was given.
    half = x.bfloat16()
    expected = attention(half)
    assert expected.dtype == (torch.float32 if linear else torch.bfloat16)
    actual = sharded(attention, half, axis, ranks)
    assert actual.dtype == expected.dtype
    torch.testing.assert_close(actual, expected, atol=1e-5 if linear else 1e-2, rtol=1e-5 if linear else 1e-2)


@pytest.mark.parametrize("axis", ["height", "width"])
def test_a_group_norm_decoder_with_attention_runs_unmodified(axis: str) -> None:
    """AutoencoderKL: GroupNorm everywhere, and attention in the middle."""
    torch.manual_seed(5)
    vae = AutoencoderKL(
        block_out_channels=(8, 16, 16),
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        layers_per_block=1,
        norm_num_groups=4,
    ).eval()
    z = normal(1, 4, 7, 11)
    with torch.inference_mode():
        expected = vae.decode(z).sample
    actual = sharded(lambda band: vae.decoder(vae.post_quant_conv(band)), z, axis, 3)
    assert (actual - expected).abs().max() < 1e-5


def written(x: torch.Tensor, index: Any, value: Any) -> torch.Tensor:
    x = x.clone()
    x[index] = value
    return x


UNCOVERED: dict[str, tuple[tuple[int, ...], Operation]] = {
    "strided convolution": ((1, 3, 8, 8), nn.Conv2d(3, 4, 3, stride=2, padding=1)),
    "convolution without padding": ((1, 3, 8, 8), nn.Conv2d(3, 4, 3)),
    "transposed convolution": ((1, 3, 8, 8), nn.ConvTranspose2d(3, 4, 2, stride=2)),
    "pooling": ((1, 3, 8, 8), nn.AvgPool2d(2)),
    "global mean": ((1, 3, 8, 8), lambda x: x - x.mean(dim=(2, 3), keepdim=True)),
    "softmax": ((1, 3, 8, 8), lambda x: x.softmax(-1)),
    "matrix product": ((1, 3, 8, 8), lambda x: x @ x.transpose(-1, -2)),
    "bilinear resizing": ((1, 3, 8, 8), lambda x: F.interpolate(x, scale_factor=2, mode="bilinear")),
    "resizing to a size": ((1, 3, 8, 8), lambda x: F.interpolate(x, size=(16, 16))),
    "resizing to a size from a shape, by another factor": (
        (1, 3, 8, 8),
        lambda x: F.interpolate(x, size=torch.Size([24, 24])),
    ),
    "resizing to a smaller size": ((1, 3, 8, 8), lambda x: F.interpolate(x, size=torch.Size([2, 2]))),
    "trilinear resizing": ((1, 3, 2, 8, 8), nn.Upsample(scale_factor=2, mode="trilinear")),
    "product with what was computed": ((1, 3, 8, 8), lambda x: F.linear(x, x[0, 0])),
    "padded, then joined with what is not": (
        (1, 3, 8, 8),
        lambda x: F.conv2d(torch.cat([F.pad(x[:, :1], (1, 1, 1, 1)), F.pad(x[:, 1:], (1, 1, 1, 1)) * 2], 1), BOX_2D),
    ),
    "padded, then computed with": ((1, 3, 8, 8), lambda x: F.conv2d(F.pad(x, (1, 1, 1, 1)) + 1, BOX_2D)),
    "flip": ((1, 3, 8, 8), lambda x: x.flip(-1).flip(-2)),
    "roll": ((1, 3, 8, 8), lambda x: x.roll(1, dims=(-1, -2))),
    "slicing the axis": ((1, 3, 8, 8), lambda x: x[:, :, 1:, 1:]),
    "slicing the axis from the end": ((1, 3, 8, 8), lambda x: x[..., 1:, 1:]),
    "normalizing over tokens": ((1, 3, 8, 8), lambda x: F.normalize(x.flatten(2).transpose(1, 2), dim=1)),
    "masked attention": ((1, 3, 8, 8), lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True)),
    "batch norm of its own statistics": ((1, 3, 8, 8), nn.BatchNorm2d(3)),
    "circular padding": ((1, 3, 8, 8), nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular")),
    "layer norm over the picture": ((1, 3, 8, 8), lambda x: F.layer_norm(x, x.shape[-2:])),
    "mean over the last axes": ((1, 3, 8, 8), lambda x: x - x.mean(-1, keepdim=True).mean(-2, keepdim=True)),
    "mean over an axis behind moved channels": ((1, 3, 8, 8), lambda x: x.movedim(1, -1).square().mean((1, 2))),
    "convolution while channels are last": ((1, 8, 8, 8), lambda x: nn.Conv2d(8, 8, 3, padding=1)(x.movedim(1, -1))),
    "repeating the picture": ((1, 3, 8, 8), lambda x: x.repeat(1, 1, 2, 2)),
    "adding positions": (
        (1, 3, 8, 8),
        lambda x: x + torch.arange(x.shape[-1]).to(x) + torch.arange(x.shape[-2]).unsqueeze(1),
    ),
    "adding positions to tokens": (
        (1, 8, 8, 8),
        lambda x: x.flatten(2).transpose(1, 2) + torch.arange(x.shape[-1] * x.shape[-2]).view(1, -1, 1),
    ),
    "appending positions as channels": (
        (1, 3, 8, 8),
        lambda x: torch.cat([x, torch.arange(x.shape[-2]).view(1, 1, -1, 1).expand_as(x).to(x)], 1),
    ),
    "writing to a part of the axis": ((1, 3, 8, 8), lambda x: written(x, (..., slice(1, 3), slice(1, 3)), 0.0)),
    "writing to rows by number": ((1, 3, 8, 8), lambda x: written(x, (0, 0, 1, 1), 0.0)),
    "writing where a mask says": ((1, 3, 8, 8), lambda x: written(x, x > 0, 0.0)),
    "writing one row to all": ((1, 3, 8, 8), lambda x: written(x, ..., torch.zeros(1, 3, 1, 1))),
    "writing what is padded to what is not": (
        (1, 3, 8, 8),
        lambda x: written(torch.empty(1, 3, *F.pad(x, (1, 1, 1, 1)).shape[2:]), ..., F.pad(x, (1, 1, 1, 1))),
    ),
    "normalizing over the picture": ((1, 3, 8, 8), lambda x: F.normalize(F.normalize(x, dim=-1), dim=-2)),
}


@pytest.mark.parametrize("axis", ["height", "width"])
@pytest.mark.parametrize("name", UNCOVERED)
def test_an_uncovered_operation_raises_instead_of_giving_a_wrong_picture(name: str, axis: str) -> None:
    shape, operation = UNCOVERED[name]
    with pytest.raises(UnshardableOperation):
        sharded(operation, normal(*shape), axis, 2)


def test_a_halo_wider_than_a_band_is_refused() -> None:
    with pytest.raises(UnshardableOperation, match="use fewer ranks"):
        sharded(nn.Conv2d(3, 4, 7, padding=3), normal(1, 3, 4, 8), "height", 2)


def test_bands_must_fit_the_group() -> None:
    def work(communicator: Communicator) -> None:
        with pytest.raises(ValueError, match="as many bands"):
            ShardedFrame(communicator, "height", split(8, 3))
        with pytest.raises(ValueError, match="at least one latent cell"):
            ShardedFrame(communicator, "height", split(1, 2))

    on_ranks(2, work)


def test_rows_beside_a_band_travel_with_the_statistics_of_its_group_norm() -> None:
    x, bands = normal(1, 4, 6, 5), split(6, 2)

    def work(communicator: Communicator) -> tuple[int, int]:
        band = bands[communicator.rank]
        local = x.narrow(-2, band.start, band.size)
        with ShardedFrame(communicator, "height", bands) as frame:
            activated = F.silu(F.group_norm(local, 2), inplace=True)
            BLOCK_CONV(activated)
            together = frame.exchanges
            BLOCK_CONV(activated.mul_(1.0))
            return together, frame.exchanges

    assert on_ranks(2, work) == [(1, 2), (1, 2)]


CAUSAL_WEIGHT = latents_of((5, 3, 3, 3, 3), seed=8) / 9
FLAT_WEIGHT = CAUSAL_WEIGHT.transpose(1, 2).flatten(1, 2)


@pytest.mark.parametrize("flat", [None, FLAT_WEIGHT], ids=["3-D", "2-D"])
@pytest.mark.parametrize(("axis", "ranks"), [("height", 2), ("width", 3)])
def test_rows_of_frames_before_travel_once(axis: str, ranks: int, flat: torch.Tensor | None) -> None:
    kernel = CausalKernel(CAUSAL_WEIGHT, flat, torch.arange(5.0), (1, 1, 1), (0, 1, 1), (1, 1, 1), 1)
    x, dim, passes = normal(1, 3, 7, 7, 9), AXIS_DIM[axis], (1, 1, 3, 2)
    expected = F.conv3d(F.pad(x, (0, 0, 0, 0, 2, 0)), CAUSAL_WEIGHT, torch.arange(5.0), padding=(0, 1, 1))
    bands = split(x.shape[dim], ranks)

    def work(communicator: Communicator) -> tuple[torch.Tensor, list[int], list[int]]:
        band = bands[communicator.rank]
        sent, kept, outputs = [], [], []
        begin = communicator.begin_exchange

        def spy(sends: Messages, receives: Messages) -> Callable[[], None]:
            sent.append(sends[0][1].shape[2])
            return begin(sends, receives)

        communicator.begin_exchange = spy  # type: ignore[method-assign]
        before: torch.Tensor | None = None
        parts = x.narrow(dim, band.start, band.size).split(passes, 2)
        with ShardedFrame(communicator, axis, bands):
            for frames in parts:
                output, before = continued_conv3d(before, frames, kernel)
                outputs.append(output)
                kept.append(before.shape[2])
        return torch.cat(outputs, 2), sent, kept

    parts = on_ranks(ranks, work)
    assert (torch.cat([part for part, _, _ in parts], dim) - expected).abs().max() < 1e-5
    # Three in the first pass, in which zeros stand before the frame: they are made on the band.
    assert all((sent, kept) == ([3, 1, 3, 2], [1, 2, 2, 2]) for _, sent, kept in parts)


@pytest.mark.parametrize("flat", [None, FLAT_WEIGHT], ids=["3-D", "2-D"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_norm_is_written_to_where_the_convolution_takes_it(ranks: int, flat: torch.Tensor | None) -> None:
    kernel = CausalKernel(CAUSAL_WEIGHT, flat, None, (1, 1, 1), (0, 1, 1), (1, 1, 1), 1)
    x, norm = normal(1, 3, 6, 7, 9), ChannelNorm(3**0.5, torch.tensor([0.5, -1.0, 2.0]))
    activated = F.silu(F.normalize(x, dim=1) * 3**0.5 * norm.gamma_C.view(3, 1, 1, 1))
    expected = F.conv3d(F.pad(activated, (0, 0, 0, 0, 2, 0)), CAUSAL_WEIGHT, padding=(0, 1, 1))

    def passes(x: torch.Tensor) -> torch.Tensor:
        before, outputs = None, []
        for frames in (x[:, :, :1], x[:, :, 1:4], x[:, :, 4:]):
            output, before = activated_conv3d(before, frames, norm, kernel)
            outputs.append(output)
        return torch.cat(outputs, 2)

    given = x.clone()
    actual = passes(x) if ranks == 1 else sharded(passes, x, "width", ranks)
    assert (actual - expected).abs().max() < 1e-5
    assert torch.equal(x, given)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_kernel_of_one_frame_looks_back_at_none(ranks: int) -> None:
    kernel = CausalKernel(CAUSAL_WEIGHT[:, :, :1], None, None, (1, 1, 1), (0, 1, 1), (1, 1, 1), 1)
    x = normal(1, 3, 3, 7, 9)

    def passes(x: torch.Tensor) -> torch.Tensor:
        first, before = continued_conv3d(None, x[:, :, :2], kernel)
        assert before.shape[2] == 0
        return torch.cat([first, continued_conv3d(before, x[:, :, 2:], kernel)[0]], 2)

    actual = passes(x) if ranks == 1 else sharded(passes, x, "height", ranks)
    assert (actual - F.conv3d(x, CAUSAL_WEIGHT[:, :, :1], padding=(0, 1, 1))).abs().max() < 1e-5


def test_a_convolution_that_would_change_a_bands_extent_is_refused_with_frames_before_it() -> None:
    kernel = CausalKernel(CAUSAL_WEIGHT, None, None, (1, 2, 1), (0, 1, 1), (1, 1, 1), 1)
    with pytest.raises(UnshardableOperation, match="stride 2"):
        sharded(lambda x: continued_conv3d(None, x, kernel)[0], normal(1, 3, 2, 8, 8), "height", 2)


def test_what_padding_returns_may_be_written_to() -> None:
    """The SiLU after a group norm leaves room for a convolution's halo; ``F.pad`` promises its caller a tensor of its own."""
    x, weight = latents_of((1, 4, 4, 5)), latents_of((4, 4, 3, 3)) / 6
    activated = F.silu(F.group_norm(x, 2))
    expected, bands = F.conv2d(activated, weight, padding=1), split(4, 2)

    def work(communicator: Communicator) -> torch.Tensor:
        band = bands[communicator.rank]
        own = x.narrow(-2, band.start, band.size)
        with ShardedFrame(communicator, "height", bands):
            activated = silu_over(F.group_norm(own, 2))
            F.pad(activated, (0, 0, 1, 1)).mul_(2)
            return F.conv2d(activated, weight, padding=1)

    assert (torch.cat(on_ranks(2, work), -2) - expected).abs().max() < 1e-5
