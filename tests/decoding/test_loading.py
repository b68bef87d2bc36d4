"""Where models come from: folders, subfolders of pipelines, single files, the built-in demo; and what is said if not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from decode_service.decoding.families import Family
from decode_service.decoding.loading import ModelSource, load_family
from decode_service.errors import ConfigError
from decode_service.planning.spec import StrideTiles
from tests.decoding.conftest import Zoo
from tests.decoding.harness import latents_of
from tests.decoding.models import autoencoder_kl

CPU = torch.device("cpu")
WEIGHTS = "diffusion_pytorch_model.safetensors"


def load(source: Path | str, **options: str) -> Family:
    return load_family(ModelSource("tiny", str(source), **options), device=CPU)


def decoded(family: Family) -> torch.Tensor:
    with torch.inference_mode():
        return family.to_model_range(torch.cat(list(family.decode(latents_of((1, 4, 2, 3, 4)), 1)), 2))


@pytest.fixture
def expected(zoo: Zoo) -> torch.Tensor:
    return zoo.references["wan21"].decode(latents_of((1, 4, 2, 3, 4))).sample


def test_a_diffusers_folder(zoo: Zoo, expected: torch.Tensor) -> None:
    torch.testing.assert_close(decoded(load(zoo.folders["wan21"])), expected, atol=1e-5, rtol=0)


def test_the_vae_of_a_pipeline_folder(zoo: Zoo, tmp_path: Path, expected: torch.Tensor) -> None:
    shutil.copytree(zoo.folders["wan21"], tmp_path / "vae")
    torch.testing.assert_close(decoded(load(tmp_path, subfolder="vae")), expected, atol=1e-5, rtol=0)
    with pytest.raises(ConfigError, match=r"set model\.subfolder to 'vae'"):
        load(tmp_path)


def test_a_single_file_with_its_config_beside_it(zoo: Zoo, expected: torch.Tensor) -> None:
    torch.testing.assert_close(decoded(load(zoo.folders["wan21"] / WEIGHTS)), expected, atol=1e-5, rtol=0)


def test_a_single_file_of_decoder_weights_alone(zoo: Zoo, tmp_path: Path, expected: torch.Tensor) -> None:
    state = load_file(zoo.folders["wan21"] / WEIGHTS)
    save_file({k: v for k, v in state.items() if k.startswith(("decoder", "post"))}, tmp_path / "decoder.safetensors")
    shutil.copy(zoo.folders["wan21"] / "config.json", tmp_path)
    torch.testing.assert_close(decoded(load(tmp_path / "decoder.safetensors")), expected, atol=1e-5, rtol=0)


def test_the_dtype_asked_for_is_the_dtype_of_the_weights(zoo: Zoo) -> None:
    for source in (zoo.folders["wan21"], zoo.folders["wan21"] / WEIGHTS):
        family = load(source, dtype="bfloat16")
        assert {parameter.dtype for parameter in family.vae.parameters()} == {torch.bfloat16}


def test_what_a_model_keeps_in_float32_stays_there(zoo: Zoo) -> None:
    for source in (zoo.folders["minimax_h3"], zoo.folders["minimax_h3"] / WEIGHTS):
        dtypes = {name: p.dtype for name, p in load(source, dtype="bfloat16").vae.named_parameters()}
        assert dtypes["decoder.norm_out.weight"] == torch.float32
        assert dtypes["decoder.transformer_blocks.0.attn.to_q.weight"] == torch.bfloat16


class TestMistakes:
    def test_a_missing_file(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="is not a file"):
            load(tmp_path / "vae.safetensors")

    def test_a_missing_folder_is_not_taken_for_a_hub_id(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="neither a folder"):
            load(tmp_path / "nothing")

    def test_an_unknown_builtin(self) -> None:
        with pytest.raises(ConfigError, match="builtin:demo"):
            load("builtin:wan")

    def test_a_single_file_without_a_config(self, zoo: Zoo, tmp_path: Path) -> None:
        shutil.copy(zoo.folders["wan21"] / WEIGHTS, tmp_path / "vae.safetensors")
        with pytest.raises(ConfigError, match=r"config.json beside it.*model.class_name"):
            load(tmp_path / "vae.safetensors")

    def test_a_file_that_does_not_fit_its_config(self, zoo: Zoo, tmp_path: Path) -> None:
        state = load_file(zoo.folders["wan21"] / WEIGHTS)
        shutil.copy(zoo.folders["wan21"] / "config.json", tmp_path)
        state.pop("decoder.conv_in.weight")
        save_file(state, tmp_path / "vae.safetensors")
        with pytest.raises(ConfigError, match=r"lacks 1 decoder tensors.*conv_in"):
            load(tmp_path / "vae.safetensors")
        state["decoder.conv_in.weight"] = torch.zeros(1, 2, 3, 3, 3)
        save_file(state, tmp_path / "vae.safetensors")
        with pytest.raises(ConfigError, match=r"does not fit its config\.json"):
            load(tmp_path / "vae.safetensors")

    def test_a_model_that_is_no_known_vae(self, zoo: Zoo, tmp_path: Path) -> None:
        config = json.loads((zoo.folders["wan21"] / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**config, "_class_name": "UNet2DModel"}))
        with pytest.raises(
            ConfigError, match=r"is a UNet2DModel, which has no decode; known VAEs are .*AutoencoderKLWan"
        ):
            load(tmp_path)

    def test_settings_that_would_be_ignored(self, zoo: Zoo) -> None:
        with pytest.raises(ConfigError, match=r"model\.subfolder goes with a folder"):
            load(zoo.folders["wan21"] / WEIGHTS, subfolder="vae")
        with pytest.raises(ConfigError, match=r"model\.subfolder goes with a folder"):
            load("builtin:demo", subfolder="vae")
        with pytest.raises(ConfigError, match="is a AutoencoderKLWan, but"):
            load(zoo.folders["wan21"], class_name="AutoencoderKLQwenImage")

    def test_tiles_that_do_not_fit_the_model(self, zoo: Zoo) -> None:
        with pytest.raises(ConfigError, match="multiples"):
            load_family(ModelSource("tiny", str(zoo.folders["wan22"])), device=CPU, tiles=StrideTiles(250, 192))
        with pytest.raises(ConfigError, match="part of the model"):
            load_family(ModelSource("tiny", str(zoo.folders["minimax_h3"])), device=CPU, tiles=StrideTiles(128, 96))


class TestPrecision:
    def test_a_model_that_overflows_in_float16_is_decoded_in_float32_and_says_so(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        autoencoder_kl(force_upcast=True).save_pretrained(tmp_path)
        family = load(str(tmp_path), dtype="float16")
        assert family.dtype() == torch.float32 and family.spec.dtype == "float32"
        assert "force_upcast" in family.spec.dtype_reason and "force_upcast" in caplog.text
        family = load(str(tmp_path), dtype="bfloat16")
        assert (family.spec.dtype, family.spec.dtype_reason) == ("bfloat16", "as configured")

    @pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
    def test_half_precision_that_works_here_is_left_alone(self, tmp_path: Path, dtype: str) -> None:
        autoencoder_kl().save_pretrained(tmp_path)
        family = load(str(tmp_path), dtype=dtype)
        assert (family.spec.dtype, family.spec.dtype_reason) == (dtype, "as configured")

    def test_a_half_precision_that_gives_nan_is_replaced(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        autoencoder_kl().save_pretrained(tmp_path)
        real = torch.nn.functional.group_norm

        def broken(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            return real(x, *args, **kwargs) * (1.0 if x.dtype == torch.float32 else float("nan"))

        monkeypatch.setattr(torch.nn.functional, "group_norm", broken)
        spec = load(str(tmp_path), dtype="bfloat16").spec
        assert spec.dtype == "float32" and "a tiny decode gives NaN or Inf" in spec.dtype_reason
