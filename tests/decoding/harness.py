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

from decode_service.decoding.loading import ModelSource
from decode_service.decoding.process_group import join_group
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


class RankProcesses:
    """Processes that wait for work, as many as any of it has needed: starting them, with torch to import, is what costs.

    What they run closes its groups, so that nothing is left for later work to meet.
    """

    def __init__(self) -> None:
        self._context = mp.get_context("spawn")
        self._work: list[Any] = []
        self._processes: list[Any] = []
        self._ports, self._results = self._context.Queue(), self._context.Queue()

    def run(self, ranks: int, work: Callable[..., Any]) -> list[Any]:
        """``work(rank, size, ports)`` on ``ranks`` of the processes at once; what each returned, in rank order.

        ``ports`` is a queue by which rank 0 tells the others the port of its store, so that no free port has to be guessed.

        Raises:
            AssertionError: a rank failed or died. All processes end then, because the others may wait for it.
        """
        while len(self._processes) < ranks:
            self._work.append(self._context.Queue())
            arguments = (self._work[-1], self._ports, self._results)
            self._processes.append(self._context.Process(target=_process_main, args=arguments, daemon=True))
            self._processes[-1].start()
        for rank in range(ranks):
            self._work[rank].put((work, rank, ranks))
        collected: dict[int, Any] = {}
        try:
            while len(collected) < ranks:
                try:
                    rank, outcome, failure = self._results.get(timeout=1)
                except queue.Empty:
                    dead = [rank for rank in range(ranks) if not self._processes[rank].is_alive()]
                    assert not dead, f"rank {dead} died before it answered"
                    continue
                assert not failure, f"rank {rank} failed:\n{failure}"
                collected[rank] = outcome
        except BaseException:
            self.close()
            raise
        return [collected[rank] for rank in range(ranks)]

    def close(self) -> None:
        """End the processes; the next work starts others."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._work, self._processes = [], []
        self._ports, self._results = self._context.Queue(), self._context.Queue()


def run_group(processes: RankProcesses, ranks: int, cases: Sequence[Case]) -> list[Answer]:
    """Decode ``cases`` one after the other on ``ranks`` of the ``processes``, over one process group."""
    outcomes = processes.run(ranks, functools.partial(_decode_all, list(cases)))
    answers = []
    for index, case in enumerate(cases):
        plan = outcomes[0][index][0]
        parts = [outcome[index][1] for outcome in outcomes]
        answers.append(Answer(plan, assemble(plan, parts, case.pixels), parts))
    return answers


def assemble(plan: DecodePlan, parts: Sequence[RankPart], pixels: PixelFormat) -> np.ndarray:
    arrays = [part.array for part in parts if part.array is not None]
    if len(arrays) == 1:
        return arrays[0]
    from_end = {"height": -2, "width": -1} if pixels.dtype != "uint8" else {"height": -3, "width": -2}
    return np.concatenate(arrays, axis=0 if plan.axis == "batch" else from_end[str(plan.axis)])


def _process_main(work: Any, ports: Any, results: Any) -> None:
    while True:
        do, rank, size = work.get()
        try:
            results.put((rank, do(rank, size, ports), ""))
        except BaseException:  # noqa: BLE001 - the parent shows it
            results.put((rank, None, traceback.format_exc()))


def meeting_store(rank: int, size: int, ports: Any) -> dist.TCPStore:
    """The store of rank 0, by which all ``size`` processes meet; the others learn its port from ``ports``."""
    if rank != 0:
        return dist.TCPStore("127.0.0.1", ports.get(), size, is_master=False)
    store = dist.TCPStore("127.0.0.1", 0, size, is_master=True, wait_for_workers=False)
    for _ in range(size - 1):
        ports.put(store.port)
    return store


def _decode_all(cases: list[Case], rank: int, size: int, ports: Any) -> list[tuple[DecodePlan, RankPart]]:
    torch.set_num_threads(1)
    store = meeting_store(rank, size, ports)
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
