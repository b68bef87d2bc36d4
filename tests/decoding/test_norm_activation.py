"""A norm and its SiLU in one: the kernels in Triton's interpreter, and whole decoders with the same functions in torch."""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import WanRMS_norm
from torch import nn
from torch.overrides import TorchFunctionMode

from decode_service.decoding import norm_activation, sharded_compilation, sharding
from decode_service.decoding.communicator import ThreadCommunicator
from decode_service.decoding.families import FAMILIES
from decode_service.decoding.rewrites import Activation, apply, normalization
from decode_service.decoding.rewrites.layout import layout_sites
from decode_service.decoding.rewrites.structure import DecoderStructure
from decode_service.decoding.sharding import ShardedFrame
from decode_service.planning.bands import split
from decode_service.planning.plan import PixelFormat
from tests.decoding import models, tiny_models
from tests.decoding import test_qwen_image21 as qwen21
from tests.decoding.family_checks import decoded
from tests.decoding.harness import latents_of

MODELS: dict[str, tuple[Callable[[], Any], tuple[int, ...]]] = {
    "autoencoder_kl": (lambda: models.tiny("autoencoder_kl"), (1, 4, 5, 7)),
    "wan21": (lambda: models.tiny("wan21"), (1, 4, 3, 5, 7)),
    "wan22": (lambda: models.tiny("wan22"), (1, 4, 3, 5, 7)),
    "qwen_image": (lambda: models.tiny("qwen_image"), (1, 4, 2, 5, 7)),
    "hunyuan_image": (tiny_models.hunyuan_image, (1, 8, 5, 7)),
    "qwen_image21": (lambda: qwen21.model("residual"), (1, 4, 1, 5, 7)),
}


NEEDS_TRITON = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="Triton is not installed, which interprets and compiles the kernels",
)


def told_by(program: str, **environment: str) -> dict[str, Any]:
    """What a program of this folder prints, as JSON."""
    ran = subprocess.run(
        [sys.executable, "-m", f"tests.decoding.{program}"],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert ran.returncode == 0, ran.stderr
    told: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return told


@NEEDS_TRITON
def test_the_kernels_compile_for_devices(tmp_path: Path) -> None:
    told = told_by("compiled_kernels", TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path))
    assert len(told) == 4 and all(each["bytes"] > 1000 for each in told.values())
    # One is read, one is written.
    assert all(each["offsets"] == ["i64", "i64"] for each in told.values()), told


@NEEDS_TRITON
def test_the_kernels_give_the_norm_and_the_silu_in_the_interpreter() -> None:
    told = told_by("interpreted_kernels", TRITON_INTERPRET="1")
    # One rounding is half a unit in the last place; the interpreter cuts bfloat16 off, which is a whole one.
    allowed = {"float32": 0.1, "float16": 0.55, "bfloat16": 1.0}
    wrong = {case: off for case, off in told["off"].items() if not off <= allowed[case.split()[1]]}
    assert not wrong and len(told["off"]) > 80 and max(told["off"].values()) > 0.4
    assert "not last in memory" in told["refused"]["contiguous"] and "8193 channels" in told["refused"]["wide"]
    # What is not a number stays none, at its position alone.
    assert told["broken"] == told["shifted"] == [True, True]


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """The rewrites of CUDA on the CPU, in float32, whose pixels tell: with channels last, and the kernels' functions in torch.

    Counts norms that did their activation's work.
    """
    counts = {"fused": 0}

    def counted(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def call(*args: Any) -> torch.Tensor:
            counts["fused"] += 1
            return function(*args)

        return call

    for name in ("rms_norm_silu", "group_norm_silu"):
        monkeypatch.setattr(normalization, name, counted(getattr(norm_activation, name)))
    monkeypatch.setattr(DecoderStructure, "keeps_channels_last", lambda self, dtype: self.channels_last)
    kinds = {
        **apply._KINDS,
        "channels_last": apply._Kind(layout_sites),
        "norm_activation": apply._Kind(normalization.fused_sites),
    }
    monkeypatch.setattr(apply, "_KINDS", kinds)
    return counts


@pytest.mark.parametrize("name", MODELS)
def test_decoders_with_fused_norms_give_the_pixels_of_diffusers(fused: dict[str, int], name: str) -> None:
    build, shape = MODELS[name]
    vae, latents = build(), latents_of(shape)
    with torch.inference_mode():
        expected = vae.decode(latents).sample
    assert expected.std() > 1e-3
    for mode, ranks in (("direct", 1), ("spatial_shard_height", 2), ("spatial_shard_width", 3)):
        before = fused["fused"]
        plan, pixels = decoded(vae, latents, mode, ranks=ranks)
        assert plan.mode == mode and plan.ranks == ranks
        assert (pixels - expected).abs().max() < 1e-5, mode
        assert fused["fused"] - before > 10 * ranks


def test_a_divided_decode_that_is_cast_up_asks_no_kernel_for_a_layout_that_it_has_not(
    fused: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights in half precision are channels last, and stay so in float32, where bands are not."""
    reference = norm_activation.normalize_groups_silu

    def kernel(x: torch.Tensor, *rest: Any) -> torch.Tensor:
        assert x.movedim(1, -1).is_contiguous(), "the kernel reads positions, with their channels side by side"
        return reference(x, *rest)

    monkeypatch.setattr(norm_activation, "normalize_groups_silu", kernel)
    monkeypatch.setattr(sharding, "normalize_groups_silu", kernel)
    vae, latents = MODELS["autoencoder_kl"][0]().bfloat16(), latents_of((1, 4, 6, 7))
    with torch.inference_mode():
        expected = copy.deepcopy(vae).float().decode(latents).sample
    for mode, ranks in (("direct", 1), ("spatial_shard_height", 2), ("spatial_shard_width", 2)):
        _, pixels = decoded(vae, latents, mode, ranks=ranks, precision="float32")
        assert (pixels - expected).abs().max() < 1e-5, mode
        decoded(vae, latents, mode, ranks=ranks, pixels=PixelFormat("float32", "model"))


def test_no_kernel_meets_a_tensor_without_data_where_a_band_is_compiled(
    fused: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharded_compilation, "compile_graph", lambda graph, inputs: graph)
    vae = MODELS["autoencoder_kl"][0]()
    apply.apply_rewrites(vae, FAMILIES["AutoencoderKL"].structure)
    band, at_loading = latents_of((1, 4, 2, 3)), fused["fused"]
    with ShardedFrame(ThreadCommunicator.create(2)[0], "height", split(4, 2)), torch.inference_mode():
        sharded_compilation.compile_sharded(vae.decoder, (band,), {})
    assert fused["fused"] == at_loading > 0


@pytest.mark.parametrize("name", MODELS)
def test_every_norm_that_is_fused_is_followed_by_its_activation(fused: dict[str, int], name: str) -> None:
    """What a family declares: the norm's output goes into the activation, and nowhere else."""
    build, shape = MODELS[name]
    vae = build()
    applied = {rewrite.name: rewrite for rewrite in apply.apply_rewrites(vae, FAMILIES[type(vae).__name__].structure)}
    assert applied["norm_activation"].active, applied["norm_activation"]
    silus = [m for m in vae.decoder.modules() if isinstance(m, normalization.PassedSiLU)]
    norms = [m for m in vae.decoder.modules() if isinstance(m, normalization.FusedNorm)]
    assert len(norms) > len(silus) > 5
    pending: list[torch.Tensor] = []

    def watch(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        if isinstance(module, normalization.FusedNorm):
            assert not pending
            pending.append(output)
        else:
            assert pending.pop() is inputs[0] is output and not hasattr(output, normalization._ACTIVATED)

    for module in (*norms, *silus):
        module.register_forward_hook(watch)
    fused.update(fused=0)
    with torch.inference_mode():
        vae.decode(latents_of(shape))
    assert not pending and fused["fused"] > 10


def test_a_norm_in_another_layout_or_dtype_is_followed_by_the_silu_as_ever(fused: dict[str, int]) -> None:
    block = nn.Module()
    block.norm1, block.nonlinearity = nn.GroupNorm(2, 6), nn.SiLU()
    structure = DecoderStructure(channels_last=True, activations=(Activation(nn.Module, "nonlinearity"),))
    (site,) = normalization.fused_sites(block, structure)
    x = torch.randn(2, 6, 3, 4)
    expected = nn.functional.silu(block.norm1(x))
    site.install()
    fused.update(fused=0)
    for given, count in ((x, 0), (x.contiguous(memory_format=torch.channels_last), 1), (x.mT.contiguous().mT, 1)):
        torch.testing.assert_close(block.nonlinearity(block.norm1(given)), expected, atol=1e-6, rtol=0)
        assert fused["fused"] == count
    alone = torch.randn(3)
    torch.testing.assert_close(block.nonlinearity(alone.clone()), nn.functional.silu(alone))
    block.double()
    torch.testing.assert_close(
        block.nonlinearity(block.norm1(x.double().contiguous(memory_format=torch.channels_last))).float(),
        expected,
        atol=1e-6,
        rtol=0,
    )
    assert fused["fused"] == 1
    site.undo()
    assert type(block.norm1) is nn.GroupNorm and type(block.nonlinearity) is nn.SiLU


def test_what_is_more_than_a_norm_and_its_silu_is_left_alone() -> None:
    def fused_norms(channels_last: bool = True, **attributes: Any) -> list[int]:
        block = nn.Module()
        block.norm1, block.norm2, block.nonlinearity = WanRMS_norm(8, images=False), nn.GroupNorm(2, 8), nn.SiLU()
        for name, value in attributes.items():
            setattr(block, name, value)
        structure = DecoderStructure(
            rms_norms=(WanRMS_norm,), activations=(Activation(nn.Module, "nonlinearity"),), channels_last=channels_last
        )
        return [len(site._norms) for site in normalization.fused_sites(block.bfloat16(), structure)]  # type: ignore[attr-defined]

    assert fused_norms() == [2]
    assert fused_norms(norm1=WanRMS_norm(8, images=False, bias=True)) == [1]
    assert fused_norms(norm1=WanRMS_norm(8, images=False, channel_first=False)) == [1]
    assert fused_norms(norm2=nn.GroupNorm(2, 8, affine=False)) == [1]
    # Its second norm is scaled and shifted before it is activated.
    assert fused_norms(time_embedding_norm="scale_shift") == []
    assert fused_norms(nonlinearity=nn.ReLU()) == []
    assert fused_norms(channels_last=False) == []


def test_who_stands_around_a_decoder_sees_norm_and_silu_as_one_function() -> None:
    seen: list[Any] = []

    class Around(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    x, factors = torch.randn(1, 4, 3, 3).contiguous(memory_format=torch.channels_last), torch.ones(4)
    with Around():
        norm_activation.rms_norm_silu(x, 2.0, factors)
        norm_activation.group_norm_silu(x, 2, factors, factors, 1e-6)
    assert seen == [norm_activation.rms_norm_silu, norm_activation.group_norm_silu]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_rounded_once(dtype: torch.dtype) -> None:
    x = torch.randn(2, 96, 3, 5, 4).to(dtype).contiguous(memory_format=torch.channels_last_3d)
    gamma, weight, bias = torch.rand(96).to(dtype), torch.rand(96).to(dtype), torch.rand(96).to(dtype)
    wide = x.double()
    factor = gamma.double().view(-1, 1, 1, 1) * 96**0.5
    for got, exact in (
        (norm_activation.rms_norm_silu(x, 96**0.5, gamma), nn.functional.normalize(wide, dim=1) * factor),
        (
            norm_activation.group_norm_silu(x, 8, weight, bias, 1e-6),
            nn.functional.group_norm(wide, 8, weight.double(), bias.double(), 1e-6),
        ),
    ):
        exact = nn.functional.silu(exact)
        assert got.dtype == dtype and got.is_contiguous(memory_format=torch.channels_last_3d)
        assert ((got.double() - exact).abs() <= exact.abs() * torch.finfo(dtype).eps * 0.55 + 1e-5).all()


def test_where_the_kernels_do_not_run_the_rewrite_is_off_and_says_why(
    fused: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*args: Any) -> torch.Tensor:
        raise ModuleNotFoundError("No module named 'triton'")

    monkeypatch.setattr(normalization, "rms_norm_silu", missing)
    vae = MODELS["wan21"][0]()
    applied = {rewrite.name: rewrite for rewrite in apply.apply_rewrites(vae, FAMILIES["AutoencoderKLWan"].structure)}
    assert not applied["norm_activation"].active and "No module named 'triton'" in applied["norm_activation"].reason
    assert not any(isinstance(m, (normalization.FusedNorm, normalization.PassedSiLU)) for m in vae.modules())


def test_a_kernel_that_is_wrong_is_not_used(fused: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    right = norm_activation.rms_norm_silu
    monkeypatch.setattr(normalization, "rms_norm_silu", lambda *args: right(*args) * 1.001)
    vae = MODELS["wan21"][0]()
    applied = {rewrite.name: rewrite for rewrite in apply.apply_rewrites(vae, FAMILIES["AutoencoderKLWan"].structure)}
    assert not applied["norm_activation"].active and "off by" in applied["norm_activation"].reason


def test_on_cuda_the_rewrite_is_another_one_and_for_half_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    kind = apply._KINDS["norm_activation"]
    assert kind.on_cuda is normalization.fused_sites
    monkeypatch.setattr(apply, "_KINDS", {"norm_activation": apply._Kind(kind.sites, on_cuda=lambda *a: iter(asked))})

    def on(device: str, dtype: torch.dtype) -> str:
        parameter = SimpleNamespace(device=torch.device(device), dtype=dtype)
        model: Any = SimpleNamespace(parameters=lambda: iter([parameter]), modules=lambda: iter([]))
        (rewrite,) = apply.apply_rewrites(model, DecoderStructure(), enabled=["norm_activation"])
        return rewrite.reason

    assert "float32" in on("cuda", torch.float32)
    assert "no module that it fits" in on("cuda", torch.bfloat16)
