"""What only a CUDA device can show: ``pytest -m gpu``. Elsewhere these are skipped, and the same code is tested on the CPU."""

from __future__ import annotations

import copy
import gc
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from decode_service.decoding import norm_activation
from decode_service.decoding.compilation import use_cache_dir
from decode_service.decoding.convolution_choice import measured_choice
from decode_service.decoding.host_copies import HostCopies
from decode_service.decoding.loading import ModelSource
from decode_service.decoding.pixels import to_numpy
from decode_service.decoding.rank import RankDecoder
from decode_service.planning import compiled_shapes
from decode_service.planning.plan import PixelFormat
from tests.decoding.conftest import Zoo
from tests.decoding.harness import latents_of
from tests.decoding.test_rank import plan_for

pytestmark = pytest.mark.gpu

MODEL_RANGE = PixelFormat("float32", "model")


def load(zoo: Zoo, name: str, dtype: str, **options: Any) -> RankDecoder:
    return RankDecoder.load(ModelSource("tiny", str(zoo.folders[name]), dtype=dtype), device="cuda", **options)


def decode(decoder: RankDecoder, latents: torch.Tensor, pixels: PixelFormat = MODEL_RANGE) -> np.ndarray:
    plan = plan_for(decoder, latents, chunk=1)
    part = decoder.decode(plan, latents.numpy(), "float32", denormalize=False, pixels=pixels)
    assert part.array is not None
    return part.array


def test_pixels_are_copied_to_pinned_memory_beside_the_work_of_the_device() -> None:
    copies = HostCopies.of(torch.device("cuda"))
    assert copies is not None and copies.describe() == {"pinned": True, "problem": ""}
    with copies.transfer((8, 1 << 20), torch.uint8) as transfer:
        for index in range(8):
            # Each source is made late on the device, and its memory is free for the next one as soon as nobody holds it.
            work = torch.randn(2048, 2048, device="cuda")
            for _ in range(4):
                work = work @ work * 1e-3
            transfer.copy(
                transfer.target[index], (work.flatten()[: 1 << 20] * 0 + index).nan_to_num(index).to(torch.uint8)
            )
        got = transfer.finish()
    assert (got == np.arange(8, dtype=np.uint8)[:, None]).all()
    held = got[3:].copy()
    copies.fetch(torch.full((8, 1 << 20), 99, dtype=torch.uint8, device="cuda"))
    np.testing.assert_array_equal(got[3:], held)
    for dtype in (torch.float32, torch.bfloat16):
        pixels = torch.randn(2, 3, 4, 5, device="cuda").to(dtype)
        np.testing.assert_array_equal(copies.fetch(pixels), to_numpy(pixels))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 96, 3, 17, 13), (2, 130, 31, 7), (1, 1031, 1, 3), (1, 384, 2, 128, 128)])
def test_the_kernels_give_what_torch_gives(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    last = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
    x = torch.randn(shape, device="cuda").to(dtype).contiguous(memory_format=last)
    x[..., 0] = 0
    channels = shape[1]
    groups = next(n for n in (32, 10, 1) if channels % n == 0)
    gamma, weight, bias = (torch.rand(channels, device="cuda").to(dtype) for _ in range(3))
    wide = x.double()
    factor = gamma.double().view(-1, *[1] * (x.dim() - 2)) * channels**0.5
    for got, exact in (
        (norm_activation.rms_norm_silu(x, channels**0.5, gamma), nn.functional.normalize(wide, dim=1) * factor),
        (
            norm_activation.group_norm_silu(x, groups, weight, bias, 1e-6),
            nn.functional.group_norm(wide, groups, weight.double(), bias.double(), 1e-6),
        ),
    ):
        exact = nn.functional.silu(exact)
        assert got.dtype == dtype and got.stride() == x.stride()
        assert ((got.double() - exact).abs() <= exact.abs() * torch.finfo(dtype).eps * 0.55 + 1e-5).all()


@pytest.mark.parametrize("name", ["wan21", "autoencoder_kl"])
def test_bfloat16_with_the_rewrites_of_cuda_is_as_close_to_float32_as_diffusers_is(zoo: Zoo, name: str) -> None:
    z = latents_of((1, 4, 3, 8, 12) if name == "wan21" else (1, 4, 16, 24))
    # First: loading switches TF32 off, for the reference too.
    decoder = load(zoo, name, "bfloat16")
    reference = copy.deepcopy(zoo.references[name]).cuda()
    with torch.inference_mode():
        exact = reference.float().decode(z.cuda()).sample.cpu()
        theirs = reference.bfloat16().decode(z.cuda().bfloat16()).sample.float().cpu()
    shown = decoder.describe()
    if (
        decoder._family.structure.keeps_channels_last(torch.bfloat16)
        and shown["convolutions"]["layout"] != "contiguous"
    ):
        assert shown["rewrites"]["norm_activation"]["active"], shown["rewrites"]
    ours = torch.from_numpy(decode(decoder, z))
    assert (ours - exact).square().mean().sqrt() <= 1.1 * (theirs - exact).square().mean().sqrt()


@pytest.mark.parametrize("name", ["wan21", "qwen_image", "autoencoder_kl"])
def test_float32_is_that_of_diffusers(zoo: Zoo, name: str) -> None:
    z = latents_of({"wan21": (1, 4, 3, 5, 7), "qwen_image": (1, 4, 1, 5, 7)}.get(name, (1, 4, 5, 7)))
    decoder = load(zoo, name, "float32")
    with torch.inference_mode():
        expected = copy.deepcopy(zoo.references[name]).cuda().decode(z.cuda()).sample.cpu()
    assert np.abs(decode(decoder, z) - expected.numpy()).max() < 1e-5


def test_a_reply_that_is_still_held_is_not_written_over(zoo: Zoo) -> None:
    decoder, z = load(zoo, "wan21", "bfloat16"), latents_of((1, 4, 4, 6, 7))
    first = decode(decoder, z, PixelFormat("uint8"))
    held = first.copy()
    for seed in range(3):
        decode(decoder, latents_of((1, 4, 4, 6, 7), seed + 1), PixelFormat("uint8"))
        gc.collect()
    np.testing.assert_array_equal(first, held)
    np.testing.assert_array_equal(decode(decoder, z, PixelFormat("uint8")), held)


def test_every_way_of_convolving_is_timed() -> None:
    convolutions = nn.Sequential(nn.Conv3d(96, 96, 3), nn.Conv3d(384, 384, 3)).cuda().bfloat16()
    choice = measured_choice(convolutions, torch.device("cuda"), keeps_channels_last=True)
    assert choice.layout is not None and len(choice.measured) == 6, choice
    with_cudnn = [way for way in choice.measured if way.cudnn]
    assert all(math.isfinite(way.seconds) and way.extra_bytes for way in with_cudnn), choice


def test_passes_as_cuda_graphs_leave_pixels_and_caches_alone(
    zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_cache_dir(str(tmp_path))
    monkeypatch.setattr(compiled_shapes, "MIN_SPEEDUP", 0.0)
    decoder = load(zoo, "wan21", "float32", compile_enabled=True, cuda_graphs=True)
    z = latents_of((1, 4, 5, 5, 6))
    shapes = decoder.compile_alone(plan_for(decoder, z, chunk=1), z.numpy(), "float32")
    assert len(shapes.kept()) == len(shapes) == 3, shapes.public()
    with torch.inference_mode():
        expected = copy.deepcopy(zoo.references["wan21"]).cuda().decode(z.cuda()).sample.cpu()
    first = decode(decoder, z)
    decode(decoder, -z)
    assert np.abs(first.clip(-1, 1) - expected.numpy()).max() < 1e-4
    np.testing.assert_array_equal(decode(decoder, z), first)
