"""One rank: nothing of a request stays on the model, bad numbers are noticed, and compilation has one way back."""

from __future__ import annotations

import contextlib
import functools
import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.memory import peak_memory
from decode_service.decoding.attempt import PeerFailedError, RankOutOfMemoryError
from decode_service.decoding.communicator import Communicator
from decode_service.decoding.families import FAMILIES
from decode_service.decoding.loading import ModelSource, load_family
from decode_service.decoding.rank import RankDecoder, RankPart, _cast_up
from decode_service.planning.plan import DecodePlan, PixelFormat
from decode_service.planning.planner import Policy, make_plan
from tests.decoding.conftest import Zoo
from tests.decoding.harness import FLOAT, latents_of
from tests.decoding.threads import on_ranks
from tests.decoding.tiny_models import TINY

CPU = torch.device("cpu")


def load(zoo: Zoo, name: str, **options: Any) -> RankDecoder:
    return RankDecoder.load(ModelSource("tiny", str(zoo.folders[name]), **options), device="cpu")


def plan_for(
    decoder: RankDecoder, latents: torch.Tensor, mode: str = "direct", size: int = 1, **wish: Any
) -> DecodePlan:
    return make_plan(decoder.spec, tuple(latents.shape), group_size=size, policy=Policy(), mode=mode, **wish)


def decode(decoder: RankDecoder, latents: torch.Tensor, pixels: PixelFormat = FLOAT, **options: Any) -> RankPart:
    return decoder.decode(
        plan_for(decoder, latents), latents.numpy(), "float32", denormalize=False, pixels=pixels, **options
    )


def fail_at(decoder: RankDecoder, call: int) -> None:
    """Let one call of the model's decoder raise, counted from 1."""
    family, calls = decoder._family, itertools.count(1)

    def failing(*args: Any, **kwargs: Any) -> torch.Tensor:
        if next(calls) == call:
            raise RuntimeError("injected")
        pixels: torch.Tensor = family.vae.decoder(*args, **kwargs)
        return pixels

    family.call_decoder = failing


@pytest.mark.parametrize("name", ["wan21", "wan22", "qwen_image"])
def test_two_decodes_interleaved_on_one_model_give_what_each_gives_alone(zoo: Zoo, name: str) -> None:
    """diffusers keeps its feature cache on the model: there, 20 of 20 concurrent Wan decodes are wrong."""
    family = load_family(ModelSource("tiny", str(zoo.folders[name])), device=CPU)
    first, second = latents_of((1, 4, 3, 4, 5), seed=1), latents_of((1, 4, 4, 5, 4), seed=2)
    with torch.inference_mode():
        alone = [torch.cat(list(family.decode(z, 1)), 2) for z in (first, second)]
        passes = [family.decode(first, 1), family.decode(second, 1)]
        chunks: list[list[torch.Tensor]] = [[], []]
        while any(passes):
            for index, running in enumerate(passes):
                if running is not None:
                    chunk = next(running, None)
                    if chunk is None:
                        passes[index] = None  # type: ignore[call-overload]
                    else:
                        chunks[index].append(chunk)
    for mixed, single in zip(chunks, alone, strict=True):
        assert torch.equal(torch.cat(mixed, 2), single)


@pytest.mark.parametrize("class_name", ["AutoencoderKL", "AutoencoderKLFlux2", "AutoencoderKLCosmos", "AutoencoderRAE"])
@pytest.mark.parametrize("fails", [False, True])
def test_a_model_that_was_cast_up_is_the_one_it_was(class_name: str, fails: bool) -> None:
    vae: Any = TINY[class_name]().bfloat16()

    def state() -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in (*vae.named_parameters(), *vae.named_buffers())}

    before, places = state(), {name: x.data_ptr() for name, x in vae.named_parameters()}
    with contextlib.suppress(ValueError), _cast_up(FAMILIES[class_name](vae, "tiny")):
        assert {tensor.dtype for tensor in state().values() if tensor.is_floating_point()} == {torch.float32}
        if fails:
            raise ValueError
    after = state()
    assert after.keys() == before.keys()
    for name, tensor in after.items():
        assert tensor.dtype == before[name].dtype and torch.equal(tensor, before[name]), name
    # Where they were: what was prepared of them, or shares their memory, is known by that.
    assert {name: x.data_ptr() for name, x in vae.named_parameters()} == places


def test_two_threads_on_one_model_give_what_each_gives_alone(zoo: Zoo) -> None:
    family = load_family(ModelSource("tiny", str(zoo.folders["wan21"])), device=CPU)

    def run(seed: int) -> torch.Tensor:
        with torch.inference_mode():
            return torch.cat(list(family.decode(latents_of((1, 4, 3, 4, 4), seed), 1)), 2)

    # In a thread of a pool, too: torch divides its sums otherwise in the main thread.
    with ThreadPoolExecutor(1) as pool:
        alone = list(pool.map(run, range(4)))
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(run, range(4)))
    for a, b in zip(alone, together, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0)


def test_a_failed_decode_leaves_no_tensors_behind(zoo: Zoo) -> None:
    decoder = load(zoo, "wan21")
    family = decoder._family
    fail_at(decoder, 2)
    z = latents_of((1, 4, 3, 4, 4))
    with pytest.raises(RuntimeError, match="injected"):
        decode(decoder, z)
    assert not [t for t in getattr(family.vae, "_feat_map", []) if t is not None]
    family.call_decoder = family.vae.decoder
    expected = zoo.references["wan21"].decode(z).sample
    np.testing.assert_allclose(decode(decoder, z).array, expected, atol=1e-5)


@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("name", ["wan21", "wan22"])
def test_any_chunk_length_gives_the_same_pixels(zoo: Zoo, name: str, chunk: int) -> None:
    decoder = load(zoo, name)
    z = latents_of((1, 4, 6, 4, 5))
    part = decoder.decode(plan_for(decoder, z, chunk=chunk), z.numpy(), "float32", denormalize=False, pixels=FLOAT)
    assert part.array is not None
    np.testing.assert_allclose(part.array, zoo.references[name].decode(z).sample, atol=1e-5)


def test_a_still_keeps_no_temporal_cache(zoo: Zoo) -> None:
    decoder = load(zoo, "qwen_image")
    caches = []
    forward = decoder._family.call_decoder

    def watching(x: torch.Tensor, feat_cache: Any, **kwargs: Any) -> torch.Tensor:
        caches.append(feat_cache)
        return forward(x, feat_cache=feat_cache, **kwargs)

    decoder._family.call_decoder = watching
    z = latents_of((1, 4, 1, 5, 6))
    np.testing.assert_allclose(decode(decoder, z).array, zoo.references["qwen_image"].decode(z).sample, atol=1e-5)
    assert caches == [None]


def test_a_long_clip_takes_the_decoder_no_more_memory_than_a_short_one(zoo: Zoo) -> None:
    decoder = load(zoo, "wan21")
    # What the first decode keeps for all others, weights in the order of their kernels, is not of one clip.
    decode(decoder, latents_of((1, 4, 5, 6, 7)))
    beyond_pixels = {}
    for latent_frames in (5, 21):  # 17 and 81 frames
        z = latents_of((1, 4, latent_frames, 6, 7))
        part, peak = peak_memory(functools.partial(decode, decoder, z), CPU)
        assert part.array.shape[2] == 4 * latent_frames - 3
        beyond_pixels[latent_frames] = peak - part.array.nbytes
    # What is left of the difference: the latents, which are held twice while they are put in the model's dtype.
    assert abs(beyond_pixels[21] - beyond_pixels[5]) <= 2 * 4 * 4 * 16 * 6 * 7 < 0.05 * beyond_pixels[5]


@pytest.mark.parametrize("name", ["wan21", "wan22", "qwen_image", "minimax_h3"])
def test_only_decoder_weights_are_kept(zoo: Zoo, name: str) -> None:
    family = load_family(ModelSource("tiny", str(zoo.folders[name])), device=CPU)
    names = [key for key, _ in family.vae.named_parameters()]
    assert names and all(key.startswith(("decoder.", "post_quant_conv.")) for key in names)


def test_the_switch_for_cuda_graphs_reaches_the_decoder(zoo: Zoo) -> None:
    source = ModelSource("tiny", str(zoo.folders["autoencoder_kl"]))
    decoder = RankDecoder.load(source, device="cpu", compile_enabled=True, cuda_graphs=True)
    assert decoder.describe()["compile"]["cuda_graphs"]


class TestNumbers:
    def test_bfloat16_is_as_close_to_float32_as_diffusers_is(self, zoo: Zoo) -> None:
        z = latents_of((1, 4, 3, 6, 7))
        reference = zoo.references["wan21"].decode(z).sample
        decoder = load(zoo, "wan21", dtype="bfloat16")
        ours = torch.from_numpy(decode(decoder, z).array)
        theirs = type(zoo.references["wan21"]).from_pretrained(zoo.folders["wan21"], torch_dtype=torch.bfloat16)
        error = (theirs.decode(z.bfloat16()).sample.float() - reference).abs().mean()
        assert (ours - reference).abs().mean() <= 1.1 * error

    def test_float32_precision_on_a_half_precision_model_and_back(self, zoo: Zoo) -> None:
        z = latents_of((1, 4, 2, 4, 4))
        decoder = load(zoo, "wan21", dtype="bfloat16")
        before = decode(decoder, z).array
        raised = decode(decoder, z, precision="float32").array
        exact = zoo.references["wan21"].decode(z).sample.numpy()
        assert np.abs(raised - exact).mean() < np.abs(before - exact).mean()
        np.testing.assert_array_equal(decode(decoder, z).array, before)
        assert decoder.describe()["dtype"] == "bfloat16"

    def test_a_cast_that_runs_out_of_memory_half_way_leaves_the_model_as_it_was(
        self, zoo: Zoo, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        z = latents_of((1, 4, 2, 4, 4))
        decoder = load(zoo, "wan21", dtype="bfloat16")
        before = decode(decoder, z).array

        def half_way(vae: torch.nn.Module) -> torch.nn.Module:
            vae.decoder.conv_in.to(torch.float32)
            raise torch.OutOfMemoryError("CUDA out of memory")

        monkeypatch.setattr(type(decoder._family.vae), "float", half_way)
        with pytest.raises(RankOutOfMemoryError):
            decode(decoder, z, precision="float32")
        np.testing.assert_array_equal(decode(decoder, z).array, before)

    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    @pytest.mark.parametrize("mode", ["direct", "tile"])
    def test_infinite_pixels_are_reported_not_clamped_away(self, zoo: Zoo, mode: str, value: float) -> None:
        decoder = load(zoo, "wan21")
        z = latents_of((1, 4, 1, 4, 4))
        assert decode(decoder, z).finite
        with torch.no_grad():
            decoder._family.vae.decoder.conv_out.bias[0] = value
        plan = plan_for(decoder, z, mode)
        assert not decoder.decode(plan, z.numpy(), "float32", denormalize=False, pixels=FLOAT).finite

    def test_half_precision_pixels_are_the_float_pixels_rounded(self, zoo: Zoo) -> None:
        decoder = load(zoo, "wan21")
        z = latents_of((1, 4, 2, 4, 4))
        exact = torch.from_numpy(decode(decoder, z).array)
        half = decode(decoder, z, PixelFormat("float16")).array
        brain = decode(decoder, z, PixelFormat("bfloat16")).array
        assert half is not None and brain is not None and brain.dtype == np.uint16
        assert torch.equal(torch.from_numpy(half), exact.half())
        assert torch.equal(torch.from_numpy(brain.view(np.int16)).view(torch.bfloat16), exact.bfloat16())


class TestGroup:
    """Ranks that are threads: what happens when one of them fails."""

    def decode_on(self, zoo: Zoo, ranks: int, mode: str, broken: int, error: Exception) -> list[str]:
        """The kind of error that every rank sees when rank ``broken`` fails in its decoder."""
        z = latents_of((1, 4, 2, 40, 36))

        def work(communicator: Communicator) -> str:
            decoder = load(zoo, "wan21")
            decoder.attach(communicator)
            plan = plan_for(decoder, z, mode, ranks)
            if communicator.rank == broken:

                def failing(*args: Any, **kwargs: Any) -> torch.Tensor:
                    raise error

                decoder._family.call_decoder = failing
            try:
                decoder.decode(plan, z.numpy(), "float32", denormalize=False, pixels=FLOAT)
            except Exception as seen:  # noqa: BLE001 - its kind is what is asked
                return type(seen).__name__
            return "decoded"

        return on_ranks(ranks, work)

    def test_out_of_memory_on_one_rank_is_agreed_before_the_gather(self, zoo: Zoo) -> None:
        seen = self.decode_on(zoo, 2, "tile", 1, torch.OutOfMemoryError("injected"))
        assert seen == [PeerFailedError.__name__, RankOutOfMemoryError.__name__]

    def test_a_rank_that_fails_under_a_shard_frees_the_others_at_once(self, zoo: Zoo) -> None:
        seen = self.decode_on(zoo, 3, "spatial_shard_width", 1, ValueError("injected"))
        assert seen[1] == "ValueError"
        assert {seen[0], seen[2]} == {"CommunicatorAborted"}
