"""A rank as the service has it: a decoder in a process of its own, with the environment that the service gives it."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.memory import peak_memory
from decode_service.decoding.loading import ModelSource
from decode_service.decoding.rank import RankDecoder
from decode_service.engine.places import allocator_variables
from decode_service.planning.plan import DecodePlan, PixelFormat
from decode_service.planning.spec import ModelSpec


class RankProcess:
    """``RankDecoder`` behind a pipe. What it decodes stays there until somebody asks for it.

    Attributes:
        spec: of the loaded model.
    """

    def __init__(
        self, folder: Path, dtype_name: str, device: torch.device, threads: int, *, compile_enabled: bool
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        arguments = (theirs, str(folder), dtype_name, str(device), threads, compile_enabled)
        self._process = context.Process(target=_serve, args=arguments, daemon=True)
        with environment_of_ranks(device.type):
            self._process.start()
        theirs.close()
        self.spec: ModelSpec = self._answer()

    def prepare(self, plan: DecodePlan, carrier: np.ndarray, pixels: PixelFormat, *, compiled: bool) -> None:
        """From now on decode ``carrier`` by ``plan``, and compile for it where ``compiled`` says so."""
        self._ask("prepare", plan, carrier, pixels, compiled)

    def decode(self) -> None:
        """Decode once, and return when it is done."""
        self._ask("decode")

    def pixels(self) -> np.ndarray:
        """What the last decode returned."""
        array: np.ndarray = self._ask("pixels")
        return array

    def peak_bytes(self) -> int:
        """Decode once more, and say what it took at the peak; see ``peak_memory``."""
        peak: int = self._ask("peak_bytes")
        return peak

    def close(self) -> None:
        """End the process."""
        self._pipe.close()
        self._process.join(timeout=10)
        self._process.kill()

    def _ask(self, *request: Any) -> Any:
        self._pipe.send(request)
        return self._answer()

    def _answer(self) -> Any:
        try:
            outcome, problem = self._pipe.recv()
        except EOFError:
            self._process.join(timeout=10)
            raise RuntimeError(f"the rank died with exit status {self._process.exitcode}") from None
        if problem:
            raise RuntimeError(f"the rank failed:\n{problem}")
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


def _serve(
    pipe: Connection, folder: str, dtype_name: str, device_name: str, threads: int, compile_enabled: bool
) -> None:
    device = torch.device(device_name)
    try:
        rank = RankDecoder.load(
            ModelSource("benchmark", folder, dtype=dtype_name),
            device=device_name,
            threads=threads,
            compile_enabled=compile_enabled,
        )
    except Exception:
        pipe.send((None, traceback.format_exc()))
        return
    pipe.send((rank.spec, ""))
    job: tuple[DecodePlan, np.ndarray, PixelFormat] | None = None
    array: Any = None

    def decode() -> Any:
        assert job is not None
        plan, carrier, pixels = job
        return rank.decode(plan, carrier, "float32", denormalize=False, pixels=pixels).array

    while True:
        try:
            request, *arguments = pipe.recv()
        except EOFError:
            return
        answer: Any = None
        try:
            if request == "prepare":
                *rest, compiled = arguments
                job = (rest[0], rest[1], rest[2])
                if compiled:
                    rank.compile_alone(job[0], job[1], "float32")
            elif request == "decode":
                array = None
                array = decode()
            elif request == "pixels":
                answer = array
            elif request == "peak_bytes":
                answer = peak_memory(decode, device)[1]
            pipe.send((answer, ""))
        except Exception:
            pipe.send((None, traceback.format_exc()))
