"""Real ranks for tests: processes joined by gloo that carry out plans on tiny random models.

A test hands over what to decode; every rank loads the same model from a folder and returns its part.
"""

from __future__ import annotations

import functools
import queue
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from decode_service.decoding.communicator import join_group
from decode_service.decoding.loading import ModelSource
from decode_service.decoding.rank import RankDecoder, RankPart
from decode_service.planning.plan import DecodePlan, PixelFormat
from decode_service.planning.planner import Policy, make_plan
from decode_service.planning.spec import StrideTiles

FLOAT = PixelFormat("float32")


@dataclass(frozen=True)
class Case:
    """One decode: what ``make_plan`` and ``RankDecoder.decode`` are asked."""

    folder: Path
    latents: torch.Tensor
    mode: str = "auto"
    collect: str = "shards"
    chunk: int = 1
    pixels: PixelFormat = FLOAT
    denormalize: bool = False
    direct_max_pixels: int = 0
    tiles: StrideTiles | None = None


@dataclass
class Answer:
    """What the group answered: the plan, the assembled picture and every rank's part."""

    plan: DecodePlan
    picture: np.ndarray
    parts: list[RankPart]


def latents_of(shape: Sequence[int], seed: int = 0) -> torch.Tensor:
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed))


def run_group(ranks: int, cases: Sequence[Case]) -> list[Answer]:
    """Decode ``cases`` one after the other on ``ranks`` fresh processes, over one process group."""
    outcomes = on_processes(ranks, functools.partial(_decode_all, list(cases)))
    answers = []
    for index, case in enumerate(cases):
        plan = outcomes[0][index][0]
        parts = [outcome[index][1] for outcome in outcomes]
        answers.append(Answer(plan, assemble(plan, parts, case.pixels), parts))
    return answers


def on_processes(ranks: int, work: Callable[..., Any]) -> list[Any]:
    """``work(rank, size, ports)`` on ``ranks`` fresh processes at once; what each returned, in rank order.

    ``ports`` is a queue by which rank 0 tells the others the port of its store, so that no free port has to be guessed.
    """
    context = mp.get_context("spawn")
    ports, results = context.Queue(), context.Queue()
    processes = [
        context.Process(target=_process_main, args=(work, rank, ranks, ports, results)) for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    collected: dict[int, Any] = {}
    try:
        while len(collected) < ranks:
            try:
                rank, outcome, failure = results.get(timeout=1)
            except queue.Empty:
                dead = [rank for rank, process in enumerate(processes) if process.exitcode and rank not in collected]
                assert not dead, f"rank {dead} died before it answered"
                continue
            assert not failure, f"rank {rank} failed:\n{failure}"
            collected[rank] = outcome
    finally:
        for process in processes:
            process.join(timeout=20 if len(collected) == ranks else 0)
            if process.is_alive():
                process.kill()
    return [collected[rank] for rank in range(ranks)]


def assemble(plan: DecodePlan, parts: Sequence[RankPart], pixels: PixelFormat) -> np.ndarray:
    arrays = [part.array for part in parts if part.array is not None]
    if len(arrays) == 1:
        return arrays[0]
    from_end = {"height": -2, "width": -1} if pixels.dtype != "uint8" else {"height": -3, "width": -2}
    return np.concatenate(arrays, axis=0 if plan.axis == "batch" else from_end[str(plan.axis)])


def _process_main(work: Callable[..., Any], rank: int, size: int, ports: Any, results: Any) -> None:
    try:
        results.put((rank, work(rank, size, ports), ""))
    except BaseException:  # noqa: BLE001 - the parent shows it
        results.put((rank, None, traceback.format_exc()))


def _decode_all(cases: list[Case], rank: int, size: int, ports: Any) -> list[tuple[DecodePlan, RankPart]]:
    torch.set_num_threads(1)
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, size, is_master=True, wait_for_workers=False)
        for _ in range(size - 1):
            ports.put(store.port)
    else:
        store = dist.TCPStore("127.0.0.1", ports.get(), size, is_master=False)
    communicator = join_group(store, rank, size, torch.device("cpu"), generation=0, timeout_s=60)
    decoders: dict[Any, RankDecoder] = {}
    outcome = []
    for case in cases:
        key = (case.folder, case.tiles)
        if key not in decoders:
            decoders[key] = RankDecoder.load(ModelSource("tiny", str(case.folder)), device="cpu", tiles=case.tiles)
            decoders[key].attach(communicator)
        outcome.append(_decode(decoders[key], case, rank, size))
    # Rank 0 hosts the store, so nobody leaves before all are done.
    communicator.agree(0)
    communicator.close()
    return outcome


def _decode(decoder: RankDecoder, case: Case, rank: int, size: int) -> tuple[DecodePlan, RankPart]:
    plan = make_plan(
        decoder.spec,
        tuple(case.latents.shape),
        group_size=size,
        policy=Policy(direct_max_pixels=case.direct_max_pixels),
        mode=case.mode,
        collect=case.collect,
        chunk=case.chunk,
    )
    if not plan.needs_group and rank != 0:
        return plan, RankPart(None, True, "", {}, False)
    part = decoder.decode(plan, case.latents.numpy(), "float32", denormalize=case.denormalize, pixels=case.pixels)
    return plan, part
