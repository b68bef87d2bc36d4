"""Attention in blocks of queries: the same picture, and never all scores at once."""

from __future__ import annotations

from typing import Any

import diffusers
import pytest
import torch
import torch.nn.functional as F
from diffusers.models.attention_processor import AttnProcessor, AttnProcessor2_0
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from decode_service.decoding import attention
from decode_service.decoding.attention import QueryBlocks, attention_in_blocks, query_blocks
from decode_service.decoding.families import FAMILIES
from tests.decoding import catalogue, models
from tests.decoding.family_checks import decoded
from tests.decoding.harness import latents_of

#: By families whose middle has attention.
ATTENTIVE = {
    "AutoencoderKL": 1,
    "AutoencoderKLWan, 2.1": 2,
    "AutoencoderKLQwenImage": 1,
    "AutoencoderKLQwenImage21": 1,
    "AutoencoderKLFlux2": 1,
    "AsymmetricAutoencoderKL": 1,
    "AutoencoderKLHunyuanImage": 1,
    "AutoencoderKLHunyuanImageRefiner": 2,
    "AutoencoderKLHunyuanVideo": 2,
    "AutoencoderKLHunyuanVideo15": 2,
}


class Scores(TorchDispatchMode):
    """Scores of the largest attention: queries times keys of one call."""

    largest = calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "scaled_dot_product" in str(func) and "attention" in str(func):
            query, key = [x for x in tree_leaves(args) if isinstance(x, torch.Tensor)][:2]
            self.calls += 1
            self.largest = max(self.largest, query.shape[:-1].numel() * key.shape[-2])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ATTENTIVE)
def test_no_decode_has_more_scores_at_a_time_than_allowed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """7 x 9 tokens of a frame have 3969 scores; with 500 allowed they come in nine blocks, undivided and in bands."""
    family = catalogue.family(name)
    frames = ATTENTIVE[name]
    shape = (1, family.spec.latent_channels, frames, 7, 9)
    latents = latents_of(shape if family.spec.frame_rule else (*shape[:2], 7, 9))
    with torch.inference_mode(), Scores() as scores:
        expected = decoded(family.vae, latents, "direct")[1]
    assert scores.largest > 2000, "no attention, no proof"
    monkeypatch.setattr(attention, "MAX_SCORES", 500)
    with Scores() as scores:
        pictures = {"direct": decoded(family.vae, latents, "direct")[1]}
    assert 0 < scores.largest <= 500
    pictures["bands"] = decoded(family.vae, latents, "spatial_shard_height", ranks=2)[1]
    for how, picture in pictures.items():
        assert (picture - expected).abs().max() <= 1e-5, how


def test_a_decode_in_blocks_is_that_of_diffusers(monkeypatch: pytest.MonkeyPatch) -> None:
    vae = models.autoencoder_kl().eval().requires_grad_(False)
    latents = latents_of((1, 4, 11, 13))
    expected = vae.decode(latents).sample
    monkeypatch.setattr(attention, "MAX_SCORES", 300)
    for mode, ranks in (("direct", 1), ("spatial_shard_width", 3)):
        picture = decoded(vae, latents, mode, ranks=ranks)[1]
        assert (picture - expected).abs().max() <= 1e-5, mode


@pytest.mark.parametrize("case", ["plain", "causal", "mask", "one mask for all rows", "scaled"])
def test_blocks_of_queries_give_the_rows_of_the_whole(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, value = (latents_of((2, 3, 10, 8), seed) for seed in range(3))
    options: dict[str, Any] = {
        "plain": {},
        "causal": {"is_causal": True},
        "mask": {"attn_mask": latents_of((10, 10), 4) > -1},
        "one mask for all rows": {"attn_mask": latents_of((1, 10), 4) > -1},
        "scaled": {"scale": 0.2},
    }[case]
    expected = F.scaled_dot_product_attention(query, key, value, **options)
    monkeypatch.setattr(attention, "MAX_SCORES", 3 * 60)
    with Scores() as scores:
        actual = attention_in_blocks(query, key, value, **options)
    assert scores.calls == 4 and scores.largest <= 180
    torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-5)


def test_the_mode_covers_what_calls_attention_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "MAX_SCORES", 40)
    x = latents_of((1, 1, 12, 4))
    with Scores() as scores, QueryBlocks():
        F.scaled_dot_product_attention(x, x, x)
    assert scores.largest <= 40
    assert isinstance(query_blocks((1, 4, 1, 7, 9)), QueryBlocks)
    monkeypatch.setattr(attention, "MAX_SCORES", 2**26)
    assert not isinstance(query_blocks((1, 4, 1, 90, 90)), QueryBlocks), "small decodes are spared the mode"


def test_the_compiler_sees_the_blocks_and_breaks_no_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "MAX_SCORES", 500)

    def attend(x: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(x, x, x)

    blocks = []

    def count(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        blocks.append(sum("scaled_dot_product" in str(node.target) for node in graph.graph.nodes))
        return graph.forward

    x = latents_of((1, 1, 63, 4))
    expected = attend(x)
    compiled = torch.compile(attend, fullgraph=True, backend=count)
    with torch.inference_mode(), QueryBlocks():
        actual = compiled(x)
    assert blocks == [9], "7 rows of 63 scores each are within 500"
    torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-5)


def test_the_older_processor_which_multiplies_matrices_is_replaced_by_the_same_function() -> None:
    vae = models.autoencoder_kl().eval().requires_grad_(False)
    attend = vae.decoder.mid_block.attentions[0]
    attend.set_processor(AttnProcessor())
    latents = latents_of((1, 4, 7, 9))
    with torch.inference_mode():
        expected = vae.decode(latents).sample
    FAMILIES["AutoencoderKL"](vae, "older")
    assert type(attend.processor) is AttnProcessor2_0
    assert (decoded(vae, latents, "direct")[1] - expected).abs().max() <= 1e-5


def test_the_largest_tensor_of_a_4k_picture_is_that_of_its_convolutions() -> None:
    """Without blocks the middle of a 4096 x 4096 picture would have 2^36 scores. On shapes alone, so in no time."""
    from decode_service.decoding.footprint import LiveMemory, without_data

    vae = models.autoencoder_kl(block_out_channels=(8, 16, 16, 16), down_block_types=("DownEncoderBlock2D",) * 4,
                                up_block_types=("UpDecoderBlock2D",) * 4)  # fmt: skip
    family = without_data(FAMILIES["AutoencoderKL"](vae.eval(), "x"))
    assert isinstance(family.vae, diffusers.AutoencoderKL)
    latents = torch.empty((1, 4, 1, 512, 512), device="meta")
    memory = LiveMemory()
    with torch.inference_mode(), query_blocks(latents.shape), memory:
        list(family.decode(latents, 1))
    assert memory.widest <= 16 * 4098 * 4098
