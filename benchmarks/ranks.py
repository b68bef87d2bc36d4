"""Processes with one model each, joined into a group, that decode on command: alone, all together, or each for itself."""

from __future__ import annotations

import contextlib
import multiprocessing
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.memory import peak_memory
from benchmarks.rank_process import environment_of_ranks
from decode_service.decoding.loading import ModelSource
from decode_service.decoding.process_group import join_group
from decode_service.decoding.rank import RankDecoder
from decode_service.planning.plan import DecodePlan, PixelFormat
from decode_service.planning.planner import Policy, make_plan

START_TIMEOUT_S = 300.0
DECODE_TIMEOUT_S = 600.0


class RankFailedError(RuntimeError):
    """A rank's process raised, died or did not answer in time."""


@dataclass(frozen=True, slots=True)
class Work:
    """What every rank of a pool decodes.

    Attributes:
        folder: the model, in diffusers' layout.
        dtype_name: dtype of weights, arithmetic and pixels.
        device: ``cpu``, or ``cuda`` for the device of the rank's number.
        threads: torch threads of each rank.
        latents: what is decoded, float32.
    """

    folder: Path
    dtype_name: str
    device: str
    threads: int
    latents: np.ndarray


class RankPool:
    """``size`` rank processes from entering to leaving a ``with``. None outlives it.

    The plans are the planner's: ``direct`` for a rank by itself, and for the group the exact sharding that ``auto``
    takes.

    Raises:
        RankFailedError: from every method, if a rank fails.
    """

    def __init__(self, size: int, work: Work) -> None:
        if size < 1:
            raise ValueError(f"a pool needs at least one rank, got {size}")
        self.size = size
        self._work = work
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []

    def __enter__(self) -> Self:
        context = multiprocessing.get_context("spawn")
        try:
            for rank in range(self.size):
                here, there = context.Pipe()
                # daemon: should this process end without its clean-up, multiprocessing ends them.
                process = context.Process(target=_rank_main, args=(there, rank, self.size, self._work), daemon=True)
                with environment_of_ranks(self._work.device):
                    process.start()
                there.close()
                self._processes.append(process)
                self._pipes.append(here)
            # Rank 0 hosts the store at a port that the system chose; the others are told.
            port = self._receive(0, START_TIMEOUT_S)
            for pipe in self._pipes[1:]:
                pipe.send(port)
            for rank in range(self.size):
                self._receive(rank, START_TIMEOUT_S)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the processes. Callable twice."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(("close", None))
        for process in self._processes:
            process.join(timeout=10)
            if process.is_alive():
                process.kill()
                process.join()
        for pipe in self._pipes:
            pipe.close()
        self._pipes, self._processes = [], []

    def one(self) -> None:
        """Rank 0 decodes everything, the others wait."""
        self._command("direct", 1)

    def together(self) -> None:
        """All ranks decode one request, divided."""
        self._command("sharded", self.size)

    def each(self) -> None:
        """Every rank decodes everything, at the same time and without a word to the others."""
        self._command("direct", self.size)

    def peaks(self, how: str) -> list[int]:
        """Peak activation memory in bytes of each rank that takes part: of rank 0 for ``direct``, of all for ``sharded``."""
        return [answer["peak"] for answer in self._command(how, 1 if how == "direct" else self.size, watched=True)]

    def pixels(self, how: str) -> np.ndarray:
        """The decoded picture or clip (B,C,F,H,W) or (B,C,H,W) in float32."""
        answers = self._command(how, 1 if how == "direct" else self.size, wanted=True)
        axis = {"height": -2, "width": -1}.get(str(self.plan(how).axis), -1)
        return np.concatenate([answer["pixels"] for answer in answers], axis=axis)

    def plan(self, how: str) -> DecodePlan:
        """The plan of a ``direct`` or ``sharded`` decode."""
        self._pipes[0].send(("plan", how))
        plan: DecodePlan = self._receive(0, DECODE_TIMEOUT_S)
        return plan

    def _command(self, how: str, ranks: int, *, watched: bool = False, wanted: bool = False) -> list[dict[str, Any]]:
        for pipe in self._pipes[:ranks]:
            pipe.send(("decode", (how, watched, wanted)))
        return [self._receive(rank, DECODE_TIMEOUT_S) for rank in range(ranks)]

    def _receive(self, rank: int, timeout_s: float) -> Any:
        pipe, deadline = self._pipes[rank], time.monotonic() + timeout_s
        try:
            # All of them, because a rank whose peer has failed waits for it.
            while not pipe.poll(0.5):
                for other, process in enumerate(self._processes):
                    if not process.is_alive() and not self._pipes[other].poll():
                        raise RankFailedError(f"rank {other} died with exit status {process.exitcode}")
                if time.monotonic() > deadline:
                    raise RankFailedError(f"rank {rank} did not answer within {timeout_s:.0f} s")
            outcome, failure = pipe.recv()
        except (EOFError, OSError) as error:
            raise RankFailedError(f"rank {rank} died: {type(error).__name__}") from error
        if failure:
            raise RankFailedError(f"rank {rank} failed:\n{failure}")
        return outcome


def _rank_main(pipe: Connection, rank: int, size: int, work: Work) -> None:
    try:
        _serve(pipe, rank, size, work)
    except (EOFError, KeyboardInterrupt):
        # The other side is gone, or is about to end us.
        return
    except BaseException:  # noqa: BLE001 - the parent shows it
        with contextlib.suppress(OSError):
            pipe.send((None, traceback.format_exc()))


def _serve(pipe: Connection, rank: int, size: int, work: Work) -> None:
    device = torch.device(work.device, rank) if work.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.set_num_threads(work.threads)
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, size, is_master=True, wait_for_workers=False)
        pipe.send((store.port, ""))
    else:
        store = dist.TCPStore("127.0.0.1", pipe.recv(), size, is_master=False)
    decoder = RankDecoder.load(
        ModelSource("benchmark", str(work.folder), dtype=work.dtype_name), device=str(device), threads=work.threads
    )
    communicator = join_group(store, rank, size, device, generation=0, timeout_s=DECODE_TIMEOUT_S)
    decoder.attach(communicator)
    # 0: sharded whatever the size of the frame.
    policy, shape = Policy(direct_max_pixels=0), tuple(work.latents.shape)
    plans = {
        "direct": make_plan(decoder.spec, shape, group_size=1, policy=policy, mode="direct", strict=True),
        "sharded": make_plan(decoder.spec, shape, group_size=size, policy=policy),
    }
    if not plans["sharded"].exact or plans["sharded"].ranks != size:
        raise ValueError(f"{size} ranks cannot shard latents {list(shape)} exactly: {plans['sharded'].reason}")
    pixels = PixelFormat(work.dtype_name, "model")
    wide = PixelFormat("float32", "model")

    def decode(how: str, wanted: PixelFormat) -> np.ndarray | None:
        return decoder.decode(plans[how], work.latents, "float32", denormalize=False, pixels=wanted).array

    pipe.send(("ready", ""))
    while True:
        command, argument = pipe.recv()
        if command == "close":
            break
        if command == "plan":
            pipe.send((plans[argument], ""))
            continue
        how, watched, wanted = argument
        answer: dict[str, Any] = {}
        if watched:
            _, answer["peak"] = peak_memory(lambda: decode(how, pixels), device)  # noqa: B023 - called at once
        else:
            array = decode(how, wide if wanted else pixels)
            if wanted:
                answer["pixels"] = array
        pipe.send((answer, ""))
    communicator.close()
