"""Ranks as the service has them: decoders in processes of their own, with the environment that the service gives them.

One by itself, or several that are joined into a group and decode on command: one of them, all together, or each for itself.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
import traceback
from collections.abc import Iterator
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
from decode_service.decoding.communicator import Communicator
from decode_service.decoding.loading import ModelSource
from decode_service.decoding.process_group import join_group
from decode_service.decoding.rank import RankDecoder
from decode_service.engine.places import allocator_variables
from decode_service.planning.plan import DecodePlan, PixelFormat
from decode_service.planning.spec import ModelSpec

START_TIMEOUT_S = 600.0
DECODE_TIMEOUT_S = 600.0
COMPILE_TIMEOUT_S = 3600.0


class RankFailedError(RuntimeError):
    """A rank's process raised, died or did not answer in time."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """What every rank loads.

    Attributes:
        folder: the model, in diffusers' layout.
        dtype_name: dtype of weights and arithmetic.
        device: ``cpu``, or ``cuda`` for the device of the rank's number.
        threads: torch threads of each rank.
        compile_enabled: whether its decoder can be compiled.
    """

    folder: Path
    dtype_name: str
    device: str
    threads: int
    compile_enabled: bool = False


class Ranks:
    """``size`` rank processes, until ``close`` or the end of a ``with``. None outlives it.

    What they decode stays with them until somebody asks for it. Once one has failed, all are ended.

    Attributes:
        size: how many; more than one are joined into a group.
        spec: of the loaded model.

    Raises:
        RankFailedError: from every method, if a rank fails.
    """

    def __init__(self, size: int, loaded: Loaded) -> None:
        if size < 1:
            raise ValueError(f"there must be at least one rank, got {size}")
        self.size = size
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        context = multiprocessing.get_context("spawn")
        try:
            for rank in range(size):
                here, there = context.Pipe()
                # daemon: should this process end without its clean-up, multiprocessing ends them.
                process = context.Process(target=_rank_main, args=(there, rank, size, loaded), daemon=True)
                with environment_of_ranks(loaded.device):
                    process.start()
                there.close()
                self._processes.append(process)
                self._pipes.append(here)
            if size > 1:
                # Rank 0 hosts the store at a port that the system chose; the others are told.
                port = self._receive(0, START_TIMEOUT_S)
                for rank in range(1, size):
                    self._send(rank, port)
            specs: list[ModelSpec] = [self._receive(rank, START_TIMEOUT_S) for rank in range(size)]
        except BaseException:
            self.close()
            raise
        self.spec = specs[0]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the processes. Callable twice."""
        for pipe in self._pipes:
            # Which is how a rank knows that there is no more to do.
            pipe.close()
        for process in self._processes:
            process.join(timeout=10)
            if process.is_alive():
                process.kill()
                process.join()
        self._pipes, self._processes = [], []

    def prepare(
        self, plan: DecodePlan, latents: np.ndarray, pixels: PixelFormat, *, name: str = "", compiled: bool = False
    ) -> None:
        """What ``decode(name)`` is from now on, on all ranks: ``latents`` (float32) by ``plan`` to ``pixels``.

        Args:
            compiled: whether to compile what it calls, where the ranks can.
        """
        limit_s = COMPILE_TIMEOUT_S if compiled else DECODE_TIMEOUT_S
        self._ask(self.size, "prepare", name, plan, latents, pixels, compiled, limit_s=limit_s)

    def decode(self, name: str = "", ranks: int | None = None) -> None:
        """Decode once on the first ``ranks`` (None: all) at the same time, and return when all are done."""
        self._ask(ranks, "decode", name)

    def pixels(self, ranks: int | None = None) -> list[np.ndarray]:
        """What the last decode of each rank gave."""
        return self._ask(ranks, "pixels")

    def peak_bytes(self, name: str = "", ranks: int | None = None) -> list[int]:
        """Decode once more, and say what it took at the peak on each rank; see ``peak_memory``."""
        return self._ask(ranks, "peak_bytes", name)

    def _ask(self, ranks: int | None, command: str, *arguments: Any, limit_s: float = DECODE_TIMEOUT_S) -> list[Any]:
        asked = range(self.size if ranks is None else ranks)
        try:
            for rank in asked:
                self._send(rank, (command, arguments))
            return [self._receive(rank, limit_s) for rank in asked]
        except RankFailedError:
            # Others wait for the one that failed, or have answers that nobody will read.
            self.close()
            raise

    def _send(self, rank: int, message: Any) -> None:
        try:
            self._pipes[rank].send(message)
        except OSError as error:
            raise RankFailedError(f"rank {rank} died: {type(error).__name__}") from error

    def _receive(self, rank: int, limit_s: float) -> Any:
        pipe, deadline = self._pipes[rank], time.monotonic() + limit_s
        try:
            # All of them, because a rank whose peer has failed waits for it.
            while not pipe.poll(0.5):
                for other, process in enumerate(self._processes):
                    if not process.is_alive() and not self._pipes[other].poll():
                        raise RankFailedError(f"rank {other} died with exit status {process.exitcode}")
                if time.monotonic() > deadline:
                    raise RankFailedError(f"rank {rank} did not answer within {limit_s:.0f} s")
            outcome, failure = pipe.recv()
        except (EOFError, OSError) as error:
            raise RankFailedError(f"rank {rank} died: {type(error).__name__}") from error
        if failure:
            raise RankFailedError(f"rank {rank} failed:\n{failure}")
        return outcome


@contextlib.contextmanager
def environment_of_ranks(device_type: str) -> Iterator[None]:
    """Processes that are started meanwhile have the environment that the service gives its ranks."""
    variables = allocator_variables(device_type, os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            del os.environ[name]


# ---- in the process of a rank ----------------------------------------------------------------------------------------


class _Commands:
    """What a rank does on command, by name."""

    def __init__(self, decoder: RankDecoder, device: torch.device) -> None:
        self._decoder = decoder
        self._device = device
        self._prepared: dict[str, tuple[DecodePlan, np.ndarray, PixelFormat]] = {}
        self._array: np.ndarray | None = None

    def prepare(self, name: str, plan: DecodePlan, latents: np.ndarray, pixels: PixelFormat, compiled: bool) -> None:
        self._prepared[name] = (plan, latents, pixels)
        if compiled:
            self._decoder.compile_alone(plan, latents, "float32")

    def decode(self, name: str) -> None:
        self._array = None
        self._array = self._decoded(name)

    def pixels(self) -> np.ndarray | None:
        return self._array

    def peak_bytes(self, name: str) -> int:
        return peak_memory(lambda: self._decoded(name), self._device)[1]

    def _decoded(self, name: str) -> np.ndarray | None:
        plan, latents, pixels = self._prepared[name]
        return self._decoder.decode(plan, latents, "float32", denormalize=False, pixels=pixels).array


def _rank_main(pipe: Connection, rank: int, size: int, loaded: Loaded) -> None:
    communicator: Communicator | None = None
    try:
        device = torch.device(loaded.device, rank) if loaded.device == "cuda" else torch.device(loaded.device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        store = _store(pipe, rank, size) if size > 1 else None
        decoder = RankDecoder.load(
            ModelSource("benchmark", str(loaded.folder), dtype=loaded.dtype_name),
            device=str(device),
            threads=loaded.threads,
            compile_enabled=loaded.compile_enabled,
        )
        if store is not None:
            communicator = join_group(store, rank, size, device, generation=0, timeout_s=DECODE_TIMEOUT_S)
            decoder.attach(communicator)
        pipe.send((decoder.spec, ""))
        commands = _Commands(decoder, device)
        while True:
            command, arguments = pipe.recv()
            try:
                answer = (getattr(commands, command)(*arguments), "")
            except Exception:
                answer = (None, traceback.format_exc())
            pipe.send(answer)
    except (EOFError, BrokenPipeError, KeyboardInterrupt):
        # The other side is done with us, or is about to end us.
        if communicator is not None:
            communicator.close()
    except BaseException:  # noqa: BLE001 - the parent shows it
        with contextlib.suppress(OSError):
            pipe.send((None, traceback.format_exc()))


def _store(pipe: Connection, rank: int, size: int) -> dist.TCPStore:
    """Where the ranks of a group meet: rank 0 hosts it."""
    if rank:
        return dist.TCPStore("127.0.0.1", pipe.recv(), size, is_master=False)
    store = dist.TCPStore("127.0.0.1", 0, size, is_master=True, wait_for_workers=False)
    pipe.send((store.port, ""))
    return store
