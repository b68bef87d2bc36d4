"""What the ranks of ``test_sharded_compilation`` do; a module of its own because other processes import it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch._functorch.aot_autograd import aot_module_simplified

from decode_service.decoding import compilation, sharded_compilation
from decode_service.decoding.loading import ModelSource
from decode_service.decoding.process_group import join_group
from decode_service.decoding.rank import RankDecoder, RankPart
from decode_service.planning import compiled_shapes
from decode_service.planning.compiled_shapes import MEASURING_ROUNDS, BucketMeasurement
from decode_service.planning.plan import DecodePlan, PixelFormat
from decode_service.planning.planner import Policy, make_plan
from tests.decoding.harness import meeting_store

RAW = PixelFormat("float32", "model")


@dataclass(frozen=True)
class Warm:
    """A model, the latents that are decoded in warm-up, and along which axis."""

    folder: Path
    latents: torch.Tensor
    axis: str
    dtype: str = "float32"


@dataclass(frozen=True)
class Seen:
    """What one rank saw of one model: what it measured, and its pixels, compiled and after the group was formed anew."""

    plan: DecodePlan
    measured: list[BucketMeasurement]
    compiled: RankPart
    rejoined: RankPart


def without_code(graph: torch.fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Callable[..., Any]:
    """What torch does to a graph before it writes code, which takes too long here: mutations go, and what nobody uses."""
    compiled: Callable[..., Any] = aot_module_simplified(graph, list(inputs), lambda module, _: module.forward)
    return compiled


def run(models: Sequence[Warm], rank: int, size: int, ports: Any) -> list[Seen]:
    torch.set_num_threads(1)
    sharded_compilation.compile_graph = without_code  # type: ignore[assignment]
    compilation.MIN_ROUNDS, compilation.MEASURING_S = 1, 0.0
    # Whatever is right, and not what is faster: without code nothing is.
    compiled_shapes.MIN_SPEEDUP = 0.0
    store = meeting_store(rank, size, ports)
    device = torch.device("cpu")
    group = join_group(store, rank, size, device, generation=0, timeout_s=60, agreement_timeout_s=120)
    decoders, found = [], []
    for model in models:
        source = ModelSource("tiny", str(model.folder), dtype=model.dtype)
        decoder = RankDecoder.load(source, device="cpu", compile_enabled=True)
        decoder.attach(group)
        mode, shape = f"spatial_shard_{model.axis}", tuple(model.latents.shape)
        plan = make_plan(decoder.spec, shape, group_size=size, policy=Policy(), mode=mode, strict=True)
        measured: list[BucketMeasurement] = []
        for _ in range(MEASURING_ROUNDS):
            new = decode(decoder, plan, model, measure=True).measured
            measured += new
            if not any(group.agree(len(new))):
                break
            decoder.use_compiled({each.key for each in measured if not each.problem})
        decoders.append((decoder, plan))
        found.append((measured, decode(decoder, plan, model)))
    group.close()
    group = join_group(store, rank, size, device, generation=1, timeout_s=60)
    seen = []
    for model, (decoder, plan), (measured, part) in zip(models, decoders, found, strict=True):
        decoder.attach(group)
        seen.append(Seen(plan, measured, part, decode(decoder, plan, model)))
    # Rank 0 hosts the store, so nobody leaves before all are done.
    group.agree(0)
    group.close()
    return seen


def decode(decoder: RankDecoder, plan: DecodePlan, model: Warm, *, measure: bool = False) -> RankPart:
    return decoder.decode(plan, model.latents.numpy(), "float32", denormalize=False, pixels=RAW, measure=measure)
