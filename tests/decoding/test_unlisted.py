"""Classes that no family describes: what is measured of them, what they decode to, and which are refused."""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import torch.nn.functional as F
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.autoencoders.vae import DecoderOutput
from diffusers.models.modeling_utils import ModelMixin
from torch import nn

from decode_service.decoding.families import UnlistedFamily, family_class
from decode_service.decoding.footprint import LiveMemory, clip_lengths, with_footprint
from decode_service.decoding.loading import ModelSource, load_family
from decode_service.decoding.pixels import convert
from decode_service.decoding.rank import RankDecoder
from decode_service.errors import ConfigError
from decode_service.planning.memory import memory_need
from decode_service.planning.plan import PixelFormat
from decode_service.planning.planner import Policy, make_plan
from decode_service.planning.spec import StrideTiles
from decode_service.planning.temporal import LinearFrames, SingleFrame
from tests.decoding import models, test_mochi
from tests.decoding.family_checks import decoded
from tests.decoding.harness import latents_of


def vq_model() -> Any:
    widths = (8, 16)
    return diffusers.VQModel(
        block_out_channels=widths,
        down_block_types=("DownEncoderBlock2D",) * len(widths),
        up_block_types=("UpDecoderBlock2D",) * len(widths),
        latent_channels=6,
        vq_embed_dim=4,
        norm_num_groups=4,
    )


def consistency_decoder() -> Any:
    return diffusers.ConsistencyDecoderVAE(
        encoder_block_out_channels=(8, 8),
        encoder_down_block_types=("DownEncoderBlock2D",) * 2,
        encoder_norm_num_groups=4,
        encoder_out_channels=8,
        encoder_layers_per_block=1,
        decoder_block_out_channels=(8, 8),
        decoder_down_block_types=("ResnetDownsampleBlock2D",) * 2,
        decoder_up_block_types=("ResnetUpsampleBlock2D",) * 2,
        decoder_layers_per_block=1,
        decoder_norm_num_groups=4,
    )


def kandinsky6_sr() -> Any:
    return diffusers.Kandinsky6SRVAE(
        latent_channels=4,
        encoder_block_out_channels=(4, 8, 8),
        decoder_block_out_channels=(4, 32, 32),
        layers_per_block=1,
        scaling_factor=0.5,
    )


MODELS: dict[str, tuple[Callable[[], Any], tuple[int, ...]]] = {
    "VQModel": (vq_model, (1, 4, 5, 7)),
    "ConsistencyDecoderVAE": (consistency_decoder, (1, 4, 6, 8)),
    "Kandinsky6SRVAE": (kandinsky6_sr, (1, 4, 6, 3, 5)),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_class_of_diffusers_decodes_from_a_folder_as_it_does_there(name: str, tmp_path: Path) -> None:
    build, shape = MODELS[name]
    torch.manual_seed(6)
    vae, latents = build().eval().requires_grad_(False), latents_of(shape)
    vae.save_pretrained(tmp_path)
    decoder = RankDecoder.load(ModelSource("tiny", str(tmp_path)), device="cpu", compile_enabled=True)
    spec = decoder.spec
    assert (spec.family, spec.class_name, spec.tested, spec.tiles) == ("unlisted", name, False, None)
    assert "tested families" in decoder.describe()["compile"]["reason"]
    rewrites = decoder.describe()["rewrites"].values()
    assert rewrites and not any(rewrite["active"] for rewrite in rewrites)
    assert all("its modules run as they are" in rewrite["reason"] for rewrite in rewrites)

    plan = make_plan(spec, shape, group_size=1, policy=Policy())
    assert plan.mode == "direct" and not plan.tested and f"untested: {name}" in plan.reason
    assert plan.public()["tested"] is False
    pixels = PixelFormat("float32", "model")
    part = decoder.decode(plan, latents.numpy(), "float32", denormalize=False, pixels=pixels)
    random = {"generator": torch.Generator().manual_seed(0)} if name == "ConsistencyDecoderVAE" else {}
    with torch.inference_mode():
        expected = vae.decode(latents, **random).sample
    assert part.array is not None and expected.std() > 1e-3
    torch.testing.assert_close(torch.from_numpy(part.array), expected, atol=1e-5, rtol=0)
    again = decoder.decode(plan, latents.numpy(), "float32", denormalize=False, pixels=pixels)
    assert again.array is not None and again.array.tobytes() == part.array.tobytes()
    frames, height, width = spec.output_extents(shape)
    assert expected.shape[-2:] == (height, width) and (expected.dim() == 4 or expected.shape[2] == frames)


def test_the_frame_rule_is_what_the_decoder_does_and_not_what_its_config_says() -> None:
    vae = kandinsky6_sr().eval()
    assert vae.config.temporal_compression_ratio == 4, "for which three levels have no room"
    assert UnlistedFamily(vae, "tiny").spec.frame_rule == LinearFrames(2, -1)
    assert LinearFrames(4, -3).describe() == "4 * T - 3" and LinearFrames(2, 0).describe() == "2 * T"
    assert LinearFrames(1, 2, 5).problem(4) == "at least 5 latent frames are needed"


@pytest.mark.parametrize("build", [*models.BUILDERS.values(), test_mochi.model])
def test_what_is_measured_of_listed_classes_is_what_their_families_say(build: Callable[[], Any]) -> None:
    vae = build().eval()
    if isinstance(vae, diffusers.AutoencoderKLMiniMaxH3):
        with pytest.raises(ConfigError, match="no straight line"):
            UnlistedFamily(vae, "tiny")
        return
    measured, known = UnlistedFamily(vae, "tiny").spec, family_class(type(vae).__name__)(vae, "tiny").spec
    for latent_frames in (1, 2, 5):
        shape = (1, 4, 4, 6) if known.frame_rule is None else (1, 4, latent_frames, 4, 6)
        assert measured.output_extents(shape) == known.output_extents(shape)
    names = ("latent_channels", "output_channels", "spatial_ratio")
    assert [getattr(measured, name) for name in names] == [getattr(known, name) for name in names]


class AutoencoderOwn(ModelMixin, ConfigMixin):
    """A VAE of a user's own: every picture is 2x, every odd thing that such classes do is a setting."""

    @register_to_config
    def __init__(
        self,
        channels: int = 3,
        answer: str = "output",
        video: bool = False,
        frames: str = "double",
        least: int = 1,
        growth: int = 0,
        keep_encoder: bool = False,
        latent_channels: int | None = 5,
        scaling_factor: float | None = None,
        shift_factor: float | None = None,
        latents_mean: list[float] | None = None,
        latents_std: list[float] | None = None,
    ) -> None:
        super().__init__()
        conv = nn.Conv3d if video else nn.Conv2d
        self.encoder = nn.Linear(1, 1)
        self.head = conv(5, channels, 3, padding=1)

    def decode(self, z: torch.Tensor, return_dict: bool = True) -> Any:
        config: Any = self.config
        if config.keep_encoder:
            z = z * self.encoder.weight.square().sum()
        if min(z.shape[-2:]) < config.least:
            raise ValueError("too small for its window")
        x = self.head(z)
        if config.video:
            times = {"odd": 1 + x.shape[2] % 2, "one": 1}.get(config.frames, 2)
            if config.frames == "one" and x.shape[2] != 1:
                raise ValueError("one frame only")
            x = F.interpolate(x, scale_factor=(times, 2, 2))
            x = x[:, :, :6] if config.frames == "six" else x
        else:
            x = F.interpolate(x, scale_factor=2)
        x = F.pad(x, (0, config.growth))
        return {"output": DecoderOutput(sample=x), "tuple": (x, None), "tensor": x, "dict": {"pixels": x}}[
            config.answer
        ]


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """``AutoencoderOwn`` as a class that this diffusers has: a newer one, or one that a user put there."""
    monkeypatch.setattr(diffusers, "AutoencoderOwn", AutoencoderOwn, raising=False)


def loaded(folder: Path, **config: Any) -> Any:
    torch.manual_seed(1)
    AutoencoderOwn(**config).save_pretrained(folder)
    return load_family(ModelSource("own", str(folder)), device=torch.device("cpu"))


def pictures(family: Any, latents: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return torch.cat(list(family.decode(latents, 1)), dim=2)


@pytest.mark.usefixtures("registered")
class TestAClassOfAUser:
    @pytest.mark.parametrize("answer", ["output", "tuple", "tensor"])
    def test_whatever_form_its_answer_has(self, answer: str, tmp_path: Path) -> None:
        family = loaded(tmp_path, answer=answer)
        latents = latents_of((1, 5, 1, 4, 6))
        expected = F.interpolate(family.vae.head(latents.squeeze(2)), scale_factor=2).unsqueeze(2)
        torch.testing.assert_close(pictures(family, latents), expected)
        assert family.vae.encoder is None

    def test_a_decode_that_needs_the_encoder_keeps_it(self, tmp_path: Path) -> None:
        family = loaded(tmp_path, keep_encoder=True)
        assert pictures(family, latents_of((1, 5, 1, 4, 6))).shape == (1, 3, 1, 8, 12)
        assert family.vae.encoder is not None

    def test_a_half_precision_in_which_it_cannot_be_measured_is_replaced(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        decode = AutoencoderOwn.decode

        def missing(self: Any, z: torch.Tensor, return_dict: bool = True) -> Any:
            if z.dtype != torch.float32:
                raise RuntimeError('"cdist" not implemented for "BFloat16"')
            return decode(self, z, return_dict)

        monkeypatch.setattr(AutoencoderOwn, "decode", missing)
        AutoencoderOwn().save_pretrained(tmp_path)
        family = load_family(ModelSource("own", str(tmp_path), dtype="bfloat16"), device=torch.device("cpu"))
        assert family.spec.dtype == "float32" and '"cdist" not implemented' in family.spec.dtype_reason
        assert family.vae.encoder is None
        monkeypatch.setattr(AutoencoderOwn, "decode", lambda self, z: 1)
        with pytest.raises(ConfigError, match="its decode cannot be used"):
            load_family(ModelSource("own", str(tmp_path), dtype="bfloat16"), device=torch.device("cpu"))

    def test_a_window_sets_the_least_size(self, tmp_path: Path) -> None:
        assert loaded(tmp_path / "a").spec.min_cells == 1
        assert loaded(tmp_path / "b", least=7).spec.min_cells == 8

    def test_frames(self, tmp_path: Path) -> None:
        assert loaded(tmp_path / "a", video=True).spec.frame_rule == LinearFrames(2, 0)
        assert loaded(tmp_path / "b", video=True, frames="one").spec.frame_rule == SingleFrame()
        with pytest.raises(ConfigError, match=r"\(1, 2, 3\) latent frames give \(2, 2, 6\) frames"):
            loaded(tmp_path / "c", video=True, frames="odd")

    def test_frames_that_follow_the_rule_no_further_are_not_made_up(self, tmp_path: Path) -> None:
        family = loaded(tmp_path, video=True, frames="six")
        assert pictures(family, latents_of((1, 5, 3, 4, 6))).shape[2] == 6
        with pytest.raises(RuntimeError, match=r"to \[1, 3, 6, 8, 12\] and not to \[1, 3, 8, 8, 12\]"):
            pictures(family, latents_of((1, 5, 4, 4, 6)))

    def test_what_is_no_picture_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"no picture of 1, 3 or 4 channels"):
            loaded(tmp_path / "a", channels=2)
        with pytest.raises(ConfigError, match=r"2 x 3 latent cells give 4 x 7 pixels"):
            loaded(tmp_path / "b", growth=1)
        with pytest.raises(ConfigError, match=r"answers a dict"):
            loaded(tmp_path / "c", answer="dict")
        with pytest.raises(ConfigError, match=r"none of latent_channels, z_channels"):
            loaded(tmp_path / "d", latent_channels=None)
        with pytest.raises(ConfigError, match=r"latents \[1, 6, 2, 3\] give RuntimeError"):
            loaded(tmp_path / "e", latent_channels=6)

    def test_tiles_are_refused(self, tmp_path: Path) -> None:
        AutoencoderOwn().save_pretrained(tmp_path)
        with pytest.raises(ConfigError, match=r"no tile mode; remove policy\.tile"):
            load_family(ModelSource("own", str(tmp_path)), device=torch.device("cpu"), tiles=StrideTiles())

    def test_a_group_divides_the_batch_and_nothing_else(self) -> None:
        vae = AutoencoderOwn().eval().requires_grad_(False)
        latents = latents_of((3, 5, 4, 6))
        plan, picture = decoded(vae, latents, "auto", ranks=2)
        assert plan.mode == "batch"
        torch.testing.assert_close(picture, vae.decode(latents).sample)
        assert UnlistedFamily(vae, "own").spec.modes(2) == ("direct", "batch")

    def test_denormalizing_follows_the_config(self, tmp_path: Path) -> None:
        latents = latents_of((1, 5, 1, 4, 6))
        mean, std = [0.1, 0.2, 0.3, 0.4, 0.5], [1.0, 2.0, 0.5, 1.5, 3.0]
        view = (torch.tensor(mean).view(1, 5, 1, 1, 1), torch.tensor(std).view(1, 5, 1, 1, 1))
        cases: list[tuple[dict[str, Any], torch.Tensor]] = [
            ({"scaling_factor": 0.5}, latents / 0.5),
            ({"scaling_factor": 0.5, "shift_factor": 0.1}, latents / 0.5 + 0.1),
            ({"latents_mean": mean, "latents_std": std}, latents * view[1] + view[0]),
            ({"latents_mean": mean, "latents_std": std, "scaling_factor": 0.5}, latents * view[1] / 0.5 + view[0]),
        ]
        for index, (config, expected) in enumerate(cases):
            family = loaded(tmp_path / str(index), **config)
            assert not family.spec.no_denormalize_reason
            formula = family.denormalization()
            assert all((key in formula) == (key in config) for key in family.statistics()), formula
            assert formula.startswith("latents") and "\n" not in formula
            torch.testing.assert_close(family.denormalize(latents), expected)

    def test_a_config_without_statistics_says_so(self, tmp_path: Path) -> None:
        family = loaded(tmp_path / "a")
        assert "neither a scaling_factor" in family.spec.no_denormalize_reason
        assert family.denormalization() == f"not possible: {family.spec.no_denormalize_reason}"
        packed = loaded(tmp_path / "b", latents_mean=[0.0], latents_std=[1.0])
        assert "one value for each of 5 channels" in packed.spec.no_denormalize_reason
        assert packed.statistics() == {}, "none that could be applied"

    def test_a_clip_needs_memory_for_all_its_frames(self, tmp_path: Path) -> None:
        """It is decoded in one pass, whatever its length; measured at one size without data, held against another with."""
        family = loaded(tmp_path, video=True)
        spec = with_footprint(family)
        for frames in (3, 12):
            shape = (1, 5, frames, 20, 22)
            latents, memory = latents_of(shape), LiveMemory()
            memory.know([latents, *family.vae.parameters()])
            with torch.inference_mode(), memory:
                for pixels in family.decode(latents, 1):
                    convert(family.to_unit_range(pixels), PixelFormat())
            need = memory_need(spec, shape, mode="direct", share=1.0, items=1, chunk=1)
            assert need is not None
            assert 0.85 * memory.peak <= need.activations <= 1.35 * memory.peak, (need.activations, memory.peak)

    def test_a_rule_that_begins_late_is_measured_where_it_begins(self) -> None:
        spec = UnlistedFamily(AutoencoderOwn(video=True).eval(), "own").spec
        assert clip_lengths(spec) == (1, 2, 3)
        assert clip_lengths(dataclasses.replace(spec, frame_rule=LinearFrames(2, 0, 5))) == (5, 6, 7)


def write_config(folder: Path, class_name: str) -> str:
    """A folder with the config.json that a model of the class would have, and no weights."""
    parameters = inspect.signature(getattr(diffusers, class_name)).parameters.values()
    config = {p.name: p.default for p in parameters if p.default is not p.empty and p.name != "self"}
    (folder / "config.json").write_text(json.dumps({"_class_name": class_name, **config}, default=str))
    return str(folder)


@pytest.mark.parametrize(
    "name",
    [
        "AutoencoderKLKVAEAudio",
        "AutoencoderKLLTX2Audio",
        "AutoencoderKLMiniMaxH3Audio",
        "AutoencoderOobleck",
        "AutoencoderSAME",
        "Cosmos3AVAEAudioTokenizer",
        "LongCatAudioDiTVae",
        "MMAudioVAE",
    ],
)
def test_sound_is_refused_before_its_weights_are_read(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"is a {name}, which makes sound; .* known VAEs are .*AutoencoderKLWan"):
        load_family(ModelSource("tiny", write_config(tmp_path, name)), device=torch.device("cpu"))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("RFD4ProteinaAutoencoder", r"needs more than latents: ca_coors_nm"),
        ("UNet2DModel", r"which has no decode"),
        ("EulerDiscreteScheduler", r"which has no decode"),
        ("utils", r"which has no decode"),
        (
            "AutoencoderOfTomorrow",
            rf"the installed diffusers {diffusers.__version__} does not have; install a newer one",
        ),
    ],
)
def test_what_cannot_be_decoded_is_refused_in_words(name: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"_class_name": name}))
    with pytest.raises(ConfigError, match=message):
        load_family(ModelSource("tiny", str(tmp_path)), device=torch.device("cpu"))
