"""Calls under the halo rule run compiled with the pixels of diffusers, on all ranks or on none."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters
from torch.overrides import TorchFunctionMode

from decode_service.decoding import compilation, sharded_compilation
from decode_service.decoding.arguments import copied, put_back
from decode_service.decoding.communicator import Communicator, CommunicatorAborted, ThreadCommunicator
from decode_service.decoding.compilation import CompilableDecoder, CompileFailedError
from decode_service.decoding.families.past import Past
from decode_service.decoding.sharded_compilation import compile_sharded, is_part, sharded_key
from decode_service.decoding.sharding import Marks, ShardedFrame
from decode_service.planning import compiled_shapes
from decode_service.planning.bands import split
from decode_service.planning.compiled_shapes import BucketMeasurement, CompiledShapes
from tests.decoding.conftest import Zoo
from tests.decoding.harness import RankProcesses, assemble, latents_of
from tests.decoding.sharded_compilation_ranks import RAW, Warm, run, without_code
from tests.decoding.threads import on_ranks

TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def compiling_processes() -> Iterator[RankProcesses]:
    """Processes of this module's own, because what runs in them changes how they compile."""
    processes = RankProcesses()
    yield processes
    processes.close()


class TestModels:
    @pytest.mark.slow
    @pytest.mark.parametrize("ranks", [2, 3])
    def test_a_warm_shape_runs_compiled_on_all_ranks_also_after_they_joined_anew(
        self, zoo: Zoo, compiling_processes: RankProcesses, ranks: int
    ) -> None:
        torch.set_num_threads(1)
        warm = {
            "autoencoder_kl": Warm(zoo.folders["autoencoder_kl"], latents_of((1, 4, 4, 3)), "height"),
            "qwen_image": Warm(zoo.folders["qwen_image"], latents_of((1, 4, 1, 3, 4)), "width"),
            # The first pass, the second, and the later ones, which see two frames of the past.
            "wan21": Warm(zoo.folders["wan21"], latents_of((1, 4, 3, 4, 3)), "height"),
            "in half precision": Warm(zoo.folders["autoencoder_kl"], latents_of((1, 4, 4, 3)), "height", "bfloat16"),
        }
        if ranks > 2:
            del warm["in half precision"]
        outcomes = compiling_processes.run(ranks, functools.partial(run, list(warm.values())))
        for index, (name, model) in enumerate(warm.items()):
            seen = [outcome[index] for outcome in outcomes]
            keys = [[each.key for each in one.measured] for one in seen]
            assert all(own == keys[0] for own in keys) and len(set(keys[0])) == (3 if name == "wan21" else 1)
            for one in seen:
                assert not any(each.problem for each in one.measured), one.measured
                assert one.compiled.compiled and one.rejoined.compiled
                assert {each.bands for each in one.measured} == {tuple(band.size for band in one.plan.bands)}
            if name == "in half precision":
                continue
            expected = zoo.references[name].decode(model.latents).sample
            for parts in ([one.compiled for one in seen], [one.rejoined for one in seen]):
                picture = assemble(seen[0].plan, parts, RAW)
                np.testing.assert_allclose(picture, expected, atol=TOLERANCE, rtol=0, err_msg=name)


# ---- a small decoder, on ranks that are threads --------------------------------------------------------------------


class Layers(nn.Module):
    """What meets neighbours, and a memory of the pass before."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.norm = nn.GroupNorm(2, 4)

    def forward(self, x: torch.Tensor, memory: list[Any] | None = None) -> torch.Tensor:
        x = F.silu(self.norm(self.conv(x)))
        if memory is not None:
            before, memory[0] = memory[0], x.clone()
            x = x if before is None else x + before
        return x


class Spread(Layers):
    """Another one, which asks for more than it uses, first and last."""

    def forward(self, x: torch.Tensor, memory: list[Any] | None = None) -> torch.Tensor:
        frame = ShardedFrame.current()
        if frame is not None:
            frame.gather(x, 2)
        x = super().forward(x, memory)
        if frame is not None:
            frame.gather(x, 2)
        return x


class Ahead(nn.Module):
    """Pads what it will convolve in the pass after, so that a band is kept with its neighbour's rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(4, 4, 3)

    def forward(self, x: torch.Tensor, memory: list[Any]) -> torch.Tensor:
        before, memory[0] = memory[0], F.pad(x, (1, 1, 1, 1))
        output: torch.Tensor = self.conv(memory[0] if before is None else before)
        return output


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation, "MIN_ROUNDS", 1)
    monkeypatch.setattr(compilation, "MEASURING_S", 0.0)
    monkeypatch.setattr(sharded_compilation, "compile_graph", without_code)
    monkeypatch.setattr(compiled_shapes, "MIN_SPEEDUP", 0.0)


CELLS, RANKS = 5, 2


def band_of(x: torch.Tensor, communicator: Communicator) -> torch.Tensor:
    band = split(CELLS, communicator.size)[communicator.rank]
    return x.narrow(2, band.start, band.size).contiguous()


def frame_of(communicator: Communicator) -> ShardedFrame:
    return ShardedFrame(communicator, "height", split(CELLS, communicator.size))


def warmed(
    decoder: CompilableDecoder, communicator: Communicator, x: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor, BucketMeasurement]:
    """The outcome of the call that measures, and the measurement."""
    decoder.measuring = True
    band = band_of(x, communicator)
    with frame_of(communicator):
        output = decoder(band, *rest)
    decoder.measuring = False
    (measurement,) = decoder.take_measurements()
    return output, measurement


def decided(measured: Sequence[BucketMeasurement]) -> frozenset[str]:
    shapes = CompiledShapes()
    for rank, measurement in enumerate(measured):
        shapes.add(rank, [measurement])
    return shapes.kept()


def test_the_graph_uses_the_weights_where_they_are_and_keeps_what_nobody_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Spread().requires_grad_(False), latents_of((1, 4, CELLS, 6))
    weights = {parameter.data_ptr() for parameter in model.parameters()}

    def compile_graph(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        held = [tensor.data_ptr() for tensor in (*graph.parameters(), *graph.buffers())]
        assert len(held) == len(weights) and set(held) == weights
        return without_code(graph, inputs)

    monkeypatch.setattr(sharded_compilation, "compile_graph", compile_graph)

    def work(communicator: Communicator) -> tuple[torch.Tensor, int, int]:
        decoder = CompilableDecoder(model, enabled=True)
        _, measurement = warmed(decoder, communicator, x)
        assert not measurement.problem, measurement.problem
        decoder.use([measurement.key])
        counted, band = [], band_of(x, communicator)
        for decoder.paused in (True, False):
            with frame_of(communicator) as frame:
                output = decoder(band)
            counted.append(frame.exchanges)
        # One in warm-up, as requests, and this one.
        assert decoder.compiled_calls == 2
        return output, *counted

    parts = on_ranks(RANKS, work)
    assert [part[1:] for part in parts] == [(4, 4)] * RANKS
    with torch.inference_mode():
        assert (torch.cat([part[0] for part in parts], 2) - model(x)).abs().max() <= TOLERANCE


def test_what_a_pass_remembers_is_the_same_compiled_and_other_bands_are_other_buckets() -> None:
    model, x = Layers().requires_grad_(False), latents_of((1, 4, CELLS, 6))

    def work(communicator: Communicator) -> list[torch.Tensor]:
        decoder = CompilableDecoder(model, enabled=True)
        band = band_of(x, communicator)
        keys = [warmed(decoder, communicator, x, [before])[1].key for before in (None, band)]
        assert len(set(keys)) == 2
        # Nothing is measured twice, and nobody has decided yet.
        decoder.measuring = True
        with frame_of(communicator):
            decoder(band, [None])
        decoder.measuring = False
        assert decoder.take_measurements() == () and decoder.compiled_calls == 2
        decoder.use(keys)
        memory: list[Any] = [None]
        with frame_of(communicator):
            outputs = [decoder(band, memory) for _ in range(2)]
        assert decoder.compiled_calls == 4
        # The whole frame, here, and the same band on another axis: nobody has measured these.
        decoder(x, [None])
        turned = band.transpose(2, 3).contiguous()
        with ShardedFrame(communicator, "width", split(CELLS, communicator.size)):
            decoder(turned, [None])
        assert decoder.compiled_calls == 4
        return [*outputs, memory[0]]

    parts = on_ranks(RANKS, work)
    memory: list[Any] = [None]
    with torch.inference_mode():
        expected = [model(x, memory), model(x, memory), memory[0]]
    for index, whole in enumerate(expected):
        assert (torch.cat([part[index] for part in parts], 2) - whole).abs().max() <= TOLERANCE


def test_what_the_frame_knows_of_a_tensor_outlives_the_pass() -> None:
    model = Ahead().requires_grad_(False)
    passes = [latents_of((1, 4, CELLS, 6), seed) for seed in range(2)]

    def work(communicator: Communicator) -> list[torch.Tensor]:
        decoder = CompilableDecoder(model, enabled=True)
        bands = [band_of(x, communicator) for x in passes]
        for decoder.measuring in (True, False):
            memory: list[Any] = [None]
            with frame_of(communicator):
                outputs = [decoder(band, memory) for band in bands]
            if decoder.measuring:
                measured = decoder.take_measurements()
                assert len(measured) == 2 and not any(each.problem for each in measured), measured
                decoder.use([each.key for each in measured])
        # Those that measured, as requests, and these.
        assert decoder.compiled_calls == 4
        return outputs

    parts = on_ranks(RANKS, work)
    memory: list[Any] = [None]
    with torch.inference_mode():
        for index, x in enumerate(passes):
            whole = torch.cat([part[index] for part in parts], 2)
            assert (whole - model(x, memory)).abs().max() <= TOLERANCE


def test_a_call_is_known_by_all_that_its_code_depends_on() -> None:
    ranks, x = ThreadCommunicator.create(2), latents_of((1, 4, 2, 2))

    class Around(TorchFunctionMode):
        pass

    def key(
        x: torch.Tensor = x,
        *more: Any,
        rank: int = 0,
        axis: str = "height",
        cells: int = 4,
        marks: Marks = (0, False, False),
        around: bool = False,
        **kwargs: Any,
    ) -> str | None:
        with ShardedFrame(ranks[rank], axis, split(cells, 2)) as frame, Around() if around else nullcontext():
            frame.mark(x, marks)
            return sharded_key(frame, (x, *more), kwargs)

    found = [
        key(),
        key(rank=1),
        key(axis="width"),
        key(cells=5),
        key(marks=(2, False, False)),
        key(marks=(0, True, False)),
        key(marks=(0, False, True)),
        key(around=True),
        key(x.double()),
        key(x.transpose(2, 3)),
        key(x[:, :3]),
        key(x, 1),
        key(first=True),
    ]
    assert key() == found[0] and len({*found}) == len(found) and all(found)
    assert key(x, object()) is None


def test_one_rank_traces_without_its_peers_and_what_is_kept_is_no_part_of_more() -> None:
    class Part(Layers):
        def forward(self, x: torch.Tensor, memory: list[Any] | None = None) -> torch.Tensor:
            assert memory is not None
            x = self.conv(x)
            memory[0] = x[:, :1]
            return x

    class Beside(Layers):
        def forward(self, x: torch.Tensor, memory: list[Any] | None = None) -> torch.Tensor:
            assert memory is not None
            memory[0] = (x * 2)[:, :1]
            return x

    meets_neighbours, stays_inside = Part().requires_grad_(False), Beside()
    band = latents_of((1, 4, 2, 6))
    with pytest.raises(ValueError, match="on a band"):
        compile_sharded(stays_inside, (band, [None]), {})
    with ShardedFrame(ThreadCommunicator.create(2)[0], "height", split(4, 2)) as frame, torch.inference_mode():
        with pytest.raises(ValueError, match="at least one tensor"):
            compile_sharded(stays_inside, (), {})
        # Nobody answers this rank.
        compile_sharded(meets_neighbours, (band, [None]), {})
        assert frame.exchanges == 0
        run, memory = compile_sharded(stays_inside, (band, [None]), {}), [None]
        assert run(band, memory) is band
    kept: Any = memory[0]
    assert torch.equal(kept, band[:, :1] * 2) and not is_part(kept)


@pytest.mark.parametrize("how", ["is not compiled", "differs"])
def test_what_one_rank_cannot_compile_all_decode_eagerly(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Layers().requires_grad_(False), latents_of((1, 4, CELLS, 6))
    problem = {"is not compiled": "no compiler here", "differs": "differs by"}[how]

    def compile_graph(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        # Bands of 3 and of 2 rows: this is rank 1.
        if inputs[0].shape[2] == 2:
            if how == "differs":
                return doubled(graph)
            raise AssertionError("no compiler here")
        return without_code(graph, inputs)

    monkeypatch.setattr(sharded_compilation, "compile_graph", compile_graph)

    def work(communicator: Communicator) -> tuple[torch.Tensor, BucketMeasurement, int]:
        decoder = CompilableDecoder(model, enabled=True)
        return *warmed(decoder, communicator, x), decoder.compiled_calls

    parts = on_ranks(RANKS, work)
    measured = [part[1] for part in parts]
    assert measured[0].problem == "" and problem in measured[1].problem
    assert measured[0].key == measured[1].key and not decided(measured) and not any(part[2] for part in parts)
    # Nobody has timed what not all can use.
    assert measured[0].compiled_ms is measured[1].compiled_ms is None
    with torch.inference_mode():
        assert (torch.cat([part[0] for part in parts], 2) - model(x)).abs().max() <= TOLERANCE


def test_what_one_rank_cannot_describe_is_measured_by_none() -> None:
    class Told(Layers):
        def forward(self, x: torch.Tensor, memory: list[Any] | None = None, word: Any = None) -> torch.Tensor:
            return super().forward(x, memory)

    model, x = Told().requires_grad_(False), latents_of((1, 4, CELLS, 6))

    def work(communicator: Communicator) -> torch.Tensor:
        decoder = CompilableDecoder(model, enabled=True)
        decoder.measuring = True
        band = band_of(x, communicator)
        with frame_of(communicator):
            output: torch.Tensor = decoder(band, None, object() if communicator.rank else None)
        assert decoder.take_measurements() == () and decoder.compiled_calls == 0
        return output

    parts = on_ranks(RANKS, work)
    with torch.inference_mode():
        assert (torch.cat(parts, 2) - model(x)).abs().max() <= TOLERANCE


def doubled(graph: torch.fx.GraphModule, inputs: Any = None) -> Callable[..., Any]:
    """Code that is wrong."""

    def call(*args: torch.Tensor) -> Any:
        token, *rest = graph(*args)
        return token, *(x * 2 for x in rest)

    return call


def test_compiled_code_with_other_exchanges_or_pixels_is_never_used(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Layers().requires_grad_(False), latents_of((1, 4, CELLS, 6))

    def twice(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        def call(*args: torch.Tensor) -> Any:
            graph(*args)
            return graph(*args)

        return call

    for compile_graph, problem in ((twice, "other messages"), (doubled, "differs")):
        monkeypatch.setattr(sharded_compilation, "compile_graph", compile_graph)

        def work(communicator: Communicator) -> str:
            return warmed(CompilableDecoder(model, enabled=True), communicator, x)[1].problem

        assert all(problem in found for found in on_ranks(RANKS, work))


@pytest.mark.parametrize("error", [AssertionError("a guard broke"), torch.OutOfMemoryError("CUDA out of memory")])
def test_a_rank_that_fails_names_the_bucket_and_its_peers_are_not_to_blame(error: Exception) -> None:
    model, x = Layers().requires_grad_(False), latents_of((1, 4, CELLS, 6))

    def work(communicator: Communicator) -> tuple[CompilableDecoder, str]:
        decoder = CompilableDecoder(model, enabled=True)
        key = warmed(decoder, communicator, x)[1].key
        decoder.use([key])
        return decoder, key

    ranks = on_ranks(RANKS, work)

    def broken(*args: Any) -> Any:
        raise error

    ranks[1][0]._compiled[ranks[1][1]] = broken
    errors: dict[int, Exception] = {}

    def fail(communicator: Communicator) -> None:
        band = band_of(x, communicator)
        try:
            with frame_of(communicator):
                ranks[communicator.rank][0](band)
        except Exception as raised:  # noqa: BLE001 - looked at below
            errors[communicator.rank] = raised
            communicator.abort()

    on_ranks(RANKS, fail)
    if isinstance(error, AssertionError):
        assert isinstance(errors[1], CompileFailedError) and errors[1].bucket == ranks[1][1] == ranks[0][1]
    else:
        assert errors[1] is error, "lack of memory is no reason to give a bucket up"
    assert isinstance(errors[0], CommunicatorAborted)


def test_all_ranks_must_have_measured_a_call_on_bands() -> None:
    found = BucketMeasurement("k", (1, 2), "float32", 3.0, 2.0, 1.0, axis="height", bands=(3, 2))
    assert decided([found, found]) == {"k"} and not decided([found])
    shapes = CompiledShapes()
    shapes.add(0, [found])
    (shown,) = shapes.public()
    assert "rank 1 has not" in shown["reason"] and shown["axis"] == "height" and shown["bands"] == [3, 2]


def test_what_a_call_leaves_goes_into_the_containers_of_its_caller() -> None:
    inner: list[Any] = [1]
    past = Past()
    memory = {"list": inner, "gone": 0, "past": past, "kind": [1]}
    left = copied(past)
    left.lengthen(torch.ones(1, 1, 2), 1)
    assert not past._seen and past._next == 0, "a copy is one of its own"
    result = put_back((memory, 3), ({"list": [2, 3], "new": (4,), "past": left, "kind": (1, 2)}, 5))
    assert result == (memory, 5) and list(memory) == ["list", "new", "past", "kind"]
    assert memory["list"] is inner and inner == [2, 3] and memory["kind"] == (1, 2)
    assert memory["past"] is past and len(past._seen) == 1 and past._next == 1


@pytest.mark.slow
def test_with_the_real_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(compiled_shapes, "MIN_SPEEDUP", 0.0)
    model, x = Spread().requires_grad_(False), latents_of((1, 4, CELLS, 6))

    def work(communicator: Communicator) -> tuple[torch.Tensor, torch.Tensor, int]:
        decoder = CompilableDecoder(model, enabled=True)
        memory: list[Any] = [None]
        output, measurement = warmed(decoder, communicator, x, memory)
        assert not measurement.problem, measurement.problem
        return output, memory[0], decoder.compiled_calls

    bypassed = counters["inductor"]["fxgraph_cache_bypass"]
    parts = on_ranks(RANKS, work)
    assert counters["inductor"]["fxgraph_cache_bypass"] == bypassed, "its code must be kept on disk"
    memory: list[Any] = [None]
    with torch.inference_mode():
        expected = model(x, memory), memory[0]
    for index, whole in enumerate(expected):
        assert (torch.cat([part[index] for part in parts], 2) - whole).abs().max() <= TOLERANCE
    assert [part[2] for part in parts] == [1, 1]
