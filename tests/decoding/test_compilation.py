"""Compilation happens in warm-up, is kept where it is faster and right, and never happens in a request."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from decode_service.decoding import compilation
from decode_service.decoding.compilation import (
    CompilableDecoder,
    CompileFailedError,
    bucket_key,
    compile_whole,
    use_cache_dir,
)
from decode_service.decoding.families.past import Past
from decode_service.decoding.rank import RankDecoder
from decode_service.errors import ConfigError
from decode_service.planning import compiled_shapes
from decode_service.planning.compiled_shapes import BucketMeasurement, CompiledShapes
from decode_service.planning.plan import PixelFormat
from tests.decoding import models
from tests.decoding.harness import latents_of
from tests.decoding.test_rank import plan_for
from tests.decoding.tiny_models import TINY, tiny_family

CPU = torch.device("cpu")
RAW = PixelFormat("float32", "model")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real tracer and its guards without code generation, and every bucket is kept."""

    def traced_only(forward: Any) -> Any:
        return torch.compile(forward, fullgraph=True, dynamic=False, isolate_recompiles=True, backend="eager")

    monkeypatch.setattr(compilation, "compile_whole", traced_only)
    monkeypatch.setattr(compiled_shapes, "MIN_SPEEDUP", 0.0)


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


class Slow(nn.Module):
    """A decoder that takes its time, and whose compiled form (``replace_compiler``) does not."""

    def forward(self, x: torch.Tensor, extra: Any = None) -> torch.Tensor:
        time.sleep(0.002)
        return x * 2


def replace_compiler(monkeypatch: pytest.MonkeyPatch, compiled: Callable[..., Any]) -> list[Any]:
    """``compiled`` is what compiling gives; returns what was compiled."""
    asked: list[Any] = []

    def compiler(forward: Any) -> Any:
        asked.append(forward)
        return compiled

    monkeypatch.setattr(compilation, "compile_whole", compiler)
    return asked


def measured(decoder: CompilableDecoder, *args: Any, **kwargs: Any) -> BucketMeasurement:
    """Meet a bucket in warm-up, and do what its measurement says."""
    decoder.measuring = True
    decoder(*args, **kwargs)
    decoder.measuring = False
    (measurement,) = decoder.take_measurements()
    shapes = CompiledShapes()
    shapes.add(0, [measurement])
    decoder.use(shapes.kept())
    return measurement


class TestBuckets:
    def test_what_is_faster_is_kept_for_its_shape_and_nothing_else_is_compiled(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked = replace_compiler(monkeypatch, lambda x, extra=None: x * 2)
        decoder = CompilableDecoder(Slow(), enabled=True)
        found = measured(decoder, torch.ones(2, 3))
        assert found.shape == (2, 3) and found.speedup is not None and found.speedup > 1.5 and not found.problem
        before = decoder.compiled_calls
        assert torch.equal(decoder(torch.ones(2, 3)), torch.full((2, 3), 2.0)) and decoder.compiled_calls == before + 1
        decoder(torch.ones(3, 2))
        decoder(torch.ones(2, 3, dtype=torch.float64))
        decoder(torch.ones(3, 2).T)
        decoder(torch.ones(2, 3), extra=[None])
        assert decoder.compiled_calls == before + 1 and decoder.calls == 6 and len(asked) == 1

    def test_what_is_slower_is_dropped_with_its_ratio(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def slower(x: torch.Tensor) -> torch.Tensor:
            time.sleep(0.006)
            return x * 2

        replace_compiler(monkeypatch, slower)
        decoder = CompilableDecoder(Slow(), enabled=True)
        found = measured(decoder, torch.ones(2, 3))
        assert found.speedup is not None and found.speedup < 0.9
        decoder(torch.ones(2, 3))
        assert decoder.compiled_calls == 0

    def test_what_gives_other_pixels_or_fails_is_never_used(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def no_compiler(x: torch.Tensor) -> torch.Tensor:
            raise AssertionError("no compiler here")

        for compiled, problem in ((lambda x: x * 2.0001, "differs"), (no_compiler, "no compiler here")):
            replace_compiler(monkeypatch, compiled)
            decoder = CompilableDecoder(Slow(), enabled=True)
            assert problem in measured(decoder, torch.ones(2, 3)).problem
            assert torch.equal(decoder(torch.ones(2, 3)), torch.full((2, 3), 2.0)) and decoder.compiled_calls == 0

    def test_lack_of_memory_is_no_failed_compilation(self, monkeypatch: pytest.MonkeyPatch) -> None:
        errors = [torch.OutOfMemoryError("CUDA out of memory"), ValueError("bug")]
        failing: list[Exception] = []

        def compiled(x: torch.Tensor) -> torch.Tensor:
            if failing:
                raise failing.pop()
            return x * 2

        replace_compiler(monkeypatch, compiled)
        decoder = CompilableDecoder(Slow(), enabled=True)
        found = measured(decoder, torch.ones(2, 3))
        failing.append(errors[0])
        with pytest.raises(torch.OutOfMemoryError):
            decoder(torch.ones(2, 3))
        failing.append(errors[1])
        with pytest.raises(CompileFailedError, match="ValueError: bug") as caught:
            decoder(torch.ones(2, 3))
        assert caught.value.bucket == found.key

    def test_a_key_tells_calls_apart_and_is_the_same_in_every_process(self) -> None:
        x, past = torch.zeros(1, 2, 3), Past()
        keys = [bucket_key((x, None), {}), bucket_key((x, past), {})]
        past.lengthen(x, 1)
        keys += [
            bucket_key((x, past), {}),
            bucket_key((x, [x]), {"first": True}),
            bucket_key((x, [x]), {"first": False}),
        ]
        assert len(set(keys)) == 5 and None not in keys
        assert bucket_key((x, past), {}) == keys[2]
        assert bucket_key((object(),), {}) is None
        assert bucket_key((torch.zeros(1, 4, 16, 16),), {}) == "625de3874b514262"

    def test_measuring_leaves_the_memory_of_the_passes_as_the_call_itself_does(self, traced: None) -> None:
        def forward(x: torch.Tensor, cache: list[Any], past: Past) -> torch.Tensor:
            cache[0] = x if cache[0] is None else cache[0] + x
            past.rewind()
            return past.lengthen(x, 1)[:, :, -2:] + cache[0]

        decoder = CompilableDecoder(forward, enabled=True)
        decoder.measuring = True
        cache: list[Any] = [None]
        past = Past()
        x = torch.ones(1, 1, 2)
        sums = [decoder(x, cache, past).sum().item() for _ in range(4)]
        assert sums == [4.0, 6.0, 8.0, 10.0] and cache[0].sum().item() == 8.0
        assert len(past._seen) == 1 and len(decoder.take_measurements()) == 3

    def test_what_is_kept_for_the_next_pass_is_no_part_of_something_larger(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The compiler leaves out the copy of the last frames: the whole chunk would be kept for them."""

        def eager(x: torch.Tensor, cache: list[Any], past: Past) -> tuple[torch.Tensor, dict[str, Any]]:
            time.sleep(0.002)
            cache[0] = x[:, :, -2:].clone()
            past.rewind()
            past.lengthen(x, 1)
            return x, {"conv": {"cache": x[:, :, -2:].clone()}}

        def compiled(x: torch.Tensor, cache: list[Any], past: Past) -> tuple[torch.Tensor, dict[str, Any]]:
            cache[0] = x[:, :, -2:]
            past._seen[:], past._next = [x[:, :, -1:]], 1
            return x, {"conv": {"cache": x[:, :, -2:]}}

        replace_compiler(monkeypatch, compiled)
        decoder = CompilableDecoder(eager, enabled=True)
        x = torch.arange(24.0).view(1, 2, 6, 2)
        assert measured(decoder, x, [None], Past()).problem == ""
        kept: dict[bool, list[torch.Tensor]] = {}
        for decoder.paused in (True, False):
            cache: list[Any] = [None]
            past = Past()
            _, returned = decoder(x, cache, past)
            kept[decoder.paused] = [cache[0], past._seen[0], returned["conv"]["cache"]]
        assert decoder.compiled_calls == 2
        for ours, theirs in zip(kept[False], kept[True], strict=True):
            assert torch.equal(ours, theirs) and ours.stride() == theirs.stride()
            assert ours.untyped_storage().nbytes() == theirs.untyped_storage().nbytes()


class TestDecision:
    def measurement(self, eager: float, compiled: float, problem: str = "", key: str = "k") -> BucketMeasurement:
        return BucketMeasurement(key, (1, 2), "float32", eager, compiled, 1.0, problem)

    def test_the_slowest_rank_decides(self) -> None:
        shapes = CompiledShapes()
        shapes.add(0, [self.measurement(3.0, 2.0)])
        assert shapes.kept() == {"k"}
        shapes.add(1, [self.measurement(2.02, 2.0)])
        assert not shapes.kept()
        (shown,) = shapes.public()
        assert shown["speedup"] == 1.01 and "not faster" in shown["reason"] and shown["ranks"] == [0, 1]

    def test_a_problem_on_one_rank_is_one_of_all(self) -> None:
        shapes = CompiledShapes()
        shapes.add(0, [self.measurement(3.0, 2.0)])
        shapes.add(1, [BucketMeasurement("k", (1, 2), "float32", problem="no compiler")])
        assert not shapes.kept() and shapes.public()[0]["reason"] == "rank 1: no compiler"

    def test_what_failed_once_stays_eager_also_after_new_measurements(self) -> None:
        shapes = CompiledShapes()
        shapes.add(0, [self.measurement(3.0, 2.0), self.measurement(3.0, 2.0, key="other")])
        shapes.fail("k", "crashed")
        assert shapes.kept() == {"other"}
        shapes.forget()
        assert not shapes.kept() and not len(shapes)
        shapes.add(0, [self.measurement(3.0, 2.0)])
        assert not shapes.kept() and shapes.public()[0]["reason"] == "crashed"


class TestModels:
    def test_a_warm_video_runs_compiled_whole_and_another_is_not_compiled(self, traced: None) -> None:
        vae = models.tiny("wan21")
        from decode_service.decoding.families import FAMILIES

        decoder = RankDecoder(FAMILIES["AutoencoderKLWan"](vae, "tiny"), device=CPU, compile_enabled=True)

        def decode(latents: torch.Tensor, **options: Any) -> Any:
            plan = plan_for(decoder, latents)
            return decoder.decode(plan, latents.numpy(), "float32", denormalize=False, pixels=RAW, **options)

        warm, other = latents_of((1, 4, 4, 5, 6)), latents_of((1, 4, 4, 6, 6))
        shapes = decoder.compile_alone(plan_for(decoder, warm), warm.numpy(), "float32")
        # The first pass, the second, and all later ones, which see two frames of the past.
        assert len(shapes) == len(shapes.kept()) == 3 and [entry["input"][2] for entry in shapes.public()] == [1, 1, 1]
        before = graphs()
        # The passes of a longer video are those of the warm one.
        longer = latents_of((1, 4, 6, 5, 6))
        for latents, compiled in ((warm, True), (other, False), (longer, True)):
            part = decode(latents)
            assert part.compiled is compiled and graphs() == before
            np.testing.assert_allclose(part.array, vae.decode(latents).sample, atol=1e-5)
        assert decode(warm, eager=True).compiled is False
        decoder.use_compiled(frozenset())
        assert decode(warm).compiled is False

    @pytest.mark.parametrize("class_name", ["AutoencoderKLCogVideoX", "AutoencoderRAE"])
    def test_decoders_that_return_more_than_pixels(self, traced: None, class_name: str) -> None:
        family = tiny_family(class_name)
        decoder = RankDecoder(family, device=CPU, compile_enabled=True)
        rule, cells = family.spec.frame_rule, family.spec.fixed_cells or 4
        frames = () if rule is None else (next(t for t in range(2, 20) if not rule.problem(t)),)
        latents = latents_of((1, family.spec.latent_channels, *frames, cells, cells))
        plan = plan_for(decoder, latents)
        shapes = decoder.compile_alone(plan, latents.numpy(), "float32")
        assert shapes.kept() and len(shapes.kept()) == len(shapes), shapes.public()
        part = decoder.decode(plan, latents.numpy(), "float32", denormalize=False, pixels=RAW)
        assert part.compiled
        with torch.inference_mode():
            expected = TINY[class_name]().decode(latents).sample
        np.testing.assert_allclose(part.array, expected, atol=1e-5)

    def test_what_the_guards_turn_away_runs_eagerly_and_is_not_compiled_anew(
        self, traced: None, caplog: pytest.LogCaptureFixture
    ) -> None:
        class Switched(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.factor = 2

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x * self.factor

        module = Switched()
        decoder = CompilableDecoder(module, enabled=True)
        measured(decoder, torch.ones(3))
        assert decoder(torch.ones(3)).sum() == 6 and decoder.compiled_calls == 2
        module.factor, before = 5, graphs()
        for _ in range(2):
            assert decoder(torch.ones(3)).sum() == 15
        assert decoder.compiled_calls == 2 and graphs() == before
        assert sum("compiled anew" in record.message for record in caplog.records) == 1
        # Nothing of that is left behind: the process compiles as before.
        assert torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1)) == 2 and graphs() == before + 1


class Graph:
    """A compiled call as CUDA graphs make it: what it gives lies in the graph's memory, which its next call writes over.

    ``marked`` are the calls of ``cudagraph_mark_step_begin`` so far, of which each call must have one of its own.
    """

    def __init__(self, forward: Callable[..., Any], marked: list[None]) -> None:
        self._forward, self._marked = forward, marked
        self._memory: list[torch.Tensor] = []
        self._used = self.calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        assert self._marked, "no new step for this call"
        self._marked.clear()
        for tensor in self._memory:
            tensor.fill_(torch.nan)
        self._used = 0
        given = list(compilation.tensors((args, kwargs)))
        output = self._forward(*args, **kwargs)
        for argument in (*args, *kwargs.values()):
            if not isinstance(argument, torch.Tensor):
                compilation._replace(argument, lambda x: x if any(x is own for own in given) else self._inside(x))
        return compilation._replace(output, self._inside)

    def _inside(self, x: torch.Tensor) -> torch.Tensor:
        self._used += 1
        if self._used > len(self._memory):
            self._memory.append(torch.empty_like(x))
        return self._memory[self._used - 1].copy_(x)


class TestCudaGraphs:
    """What is handed on is never memory that a following call writes to."""

    @pytest.fixture
    def graphs(self, monkeypatch: pytest.MonkeyPatch) -> list[Graph]:
        made: list[Graph] = []
        marked: list[None] = []

        def compiler(forward: Any) -> Graph:
            made.append(Graph(forward, marked))
            return made[-1]

        monkeypatch.setattr(compilation, "compile_with_cuda_graphs", compiler)
        monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: marked.append(None))
        monkeypatch.setattr(compiled_shapes, "MIN_SPEEDUP", 0.0)
        return made

    @pytest.mark.parametrize("name", ["wan21", "wan22"])
    def test_pixels_and_caches_of_a_video_survive_the_passes_after_them(self, graphs: list[Graph], name: str) -> None:
        from decode_service.decoding.families import FAMILIES

        vae = models.tiny(name)
        family = FAMILIES["AutoencoderKLWan"](vae, "tiny")
        decoder = RankDecoder(family, device=CPU, compile_enabled=True, cuda_graphs=True)
        assert decoder.describe()["compile"]["cuda_graphs"]
        latents = latents_of((1, 4, 5, 3, 4))
        plan = plan_for(decoder, latents)
        shapes = decoder.compile_alone(plan, latents.numpy(), "float32")
        assert len(shapes.kept()) == len(shapes) == len(graphs) == 3, shapes.public()
        calls, compiled_calls = decoder._decoder.calls, decoder._decoder.compiled_calls
        with torch.inference_mode():
            chunks = list(decoder._family.decode(latents, 1))
            # All chunks of a video are held, and another video is decoded after them.
            list(decoder._family.decode(-latents, 1))
            expected = vae.decode(latents).sample
        assert decoder._decoder.compiled_calls - compiled_calls == decoder._decoder.calls - calls == 2 * 5
        torch.testing.assert_close(torch.cat(chunks, 2).clamp(-1, 1), expected, atol=1e-5, rtol=0)

    def test_everything_that_a_call_makes_is_copied_and_what_it_was_given_is_not(self, graphs: list[Graph]) -> None:
        def forward(x: torch.Tensor, cache: list[Any], past: Past) -> tuple[torch.Tensor, dict[str, Any]]:
            time.sleep(0.002)
            cache[0] = x[:, :, -2:]
            past.rewind()
            past.lengthen(x, 1)
            return x * 2, {"conv": {"cache": x + 1}}

        decoder = CompilableDecoder(forward, enabled=True, cuda_graphs=True)
        x, kept = torch.arange(24.0).view(1, 2, 6, 2), torch.ones(3)
        found = measured(decoder, x, [None, kept], Past())
        assert not found.problem and graphs[0].calls >= 3 + compilation.MIN_ROUNDS
        cache, past = [None, kept], Past()
        output, returned = decoder(x, cache, past)
        assert decoder.compiled_calls > 0
        handed_on = [output, returned["conv"]["cache"], cache[0], past._seen[0]]
        before = [tensor.clone() for tensor in handed_on]
        inside = {tensor.untyped_storage().data_ptr() for tensor in graphs[0]._memory}
        assert not inside & {tensor.untyped_storage().data_ptr() for tensor in handed_on}
        assert cache[1] is kept
        decoder(-x, [None, kept], Past())
        for ours, then in zip(handed_on, before, strict=True):
            assert torch.equal(ours, then)

    def test_without_the_copies_the_next_call_would_write_over_them(self, graphs: list[Graph]) -> None:
        graph = Graph(lambda x: x * 2, [None])
        first = graph(torch.ones(2))
        graph._marked.append(None)
        graph(torch.zeros(2))
        assert not torch.equal(first, torch.full((2,), 2.0))

    def test_a_graph_that_goes_wrong_when_it_is_run_again_is_not_used(
        self, graphs: list[Graph], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its first two calls only run the kernels and record them: the third is what requests would get."""
        calls = 0

        def compiled(x: torch.Tensor) -> torch.Tensor:
            nonlocal calls
            calls += 1
            return x * (2 if calls < 3 else 3)

        monkeypatch.setattr(compilation, "compile_with_cuda_graphs", lambda forward: compiled)
        decoder = CompilableDecoder(Slow(), enabled=True, cuda_graphs=True)
        assert "differs" in measured(decoder, torch.ones(2, 3)).problem
        assert torch.equal(decoder(torch.ones(2, 3)), torch.full((2, 3), 2.0))

    def test_torch_knows_what_is_asked_of_it(self) -> None:
        torch.compiler.cudagraph_mark_step_begin()
        compiled = compilation.compile_with_cuda_graphs(lambda x: x)
        assert compiled(torch.ones(2)).sum() == 2


class TestDisk:
    def test_the_cache_is_the_services_own(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        folder = use_cache_dir(None)
        assert folder == tmp_path / "decode-service" / "compiled" and folder.stat().st_mode & 0o777 == 0o700
        assert use_cache_dir(str(tmp_path / "mine")) == tmp_path / "mine" and use_cache_dir(None) == tmp_path / "mine"
        (tmp_path / "open").mkdir()
        (tmp_path / "open").chmod(0o777)
        with pytest.raises(ConfigError, match="others can write"):
            use_cache_dir(str(tmp_path / "open"))
        (tmp_path / "file").write_text("")
        with pytest.raises(ConfigError, match=r"compile\.cache_dir"):
            use_cache_dir(str(tmp_path / "file"))

    @pytest.mark.slow
    def test_a_second_start_finds_what_the_first_compiled(self, tmp_path: Path) -> None:
        first, second = (self.start(tmp_path) for _ in range(2))
        assert (first["hits"], first["misses"]) == (0, 1)
        assert (second["hits"], second["misses"]) == (1, 0)
        assert not first["problem"] and not second["problem"]
        # The call after warm-up compiled nothing, whichever way it went.
        assert first["graphs"] == second["graphs"] == 1

    def start(self, folder: Path) -> dict[str, Any]:
        """A process with the real compiler; a convolution alone needs no C++ of its own, which takes a minute on a busy machine."""
        program = """if True:
            import json, sys, torch
            from torch._dynamo.utils import counters
            from decode_service.decoding.compilation import CompilableDecoder, use_cache_dir
            use_cache_dir(sys.argv[1])
            torch.manual_seed(0)
            decoder = CompilableDecoder(torch.nn.Conv2d(2, 4, 3), enabled=True)
            with torch.inference_mode():
                decoder.measuring = True
                decoder(torch.ones(1, 2, 8, 8))
                (found,) = decoder.take_measurements()
                decoder.measuring = False
                decoder.use([found.key])
                for _ in range(2):
                    decoder(torch.ones(1, 2, 8, 8))
            assert decoder.compiled_calls >= 2, found
            inductor = counters["inductor"]
            print(json.dumps({"hits": inductor["fxgraph_cache_hit"], "misses": inductor["fxgraph_cache_miss"],
                              "graphs": counters["stats"]["unique_graphs"], "problem": found.problem}))
        """
        ran = subprocess.run([sys.executable, "-c", program, str(folder)], capture_output=True, text=True, timeout=250)
        assert ran.returncode == 0, ran.stderr
        told: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
        return told


def test_compiling_takes_one_graph_or_fails() -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x

    with pytest.raises(torch._dynamo.exc.Unsupported):
        compile_whole(broken)(torch.ones(1))
