"""A tiny random Wan VAE in diffusers layout, its undivided decode as the reference, and engines on ranks that fail on demand."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from decode_client.wire import WireTensor

from decode_service.config import ServiceConfig
from decode_service.engine.engine import DecodeEngine
from decode_service.engine.local_group import LocalGroup
from decode_service.engine.places import RankPlace
from decode_service.engine.protocol import DecodeJob, DecodeObserver, RankFailure, RankPixels, RankTask
from decode_service.engine.rank_worker import RankWorker
from decode_service.planning.plan import PixelFormat

CHANNELS = 4
FLOAT = PixelFormat("float32", "model")


@dataclass(frozen=True)
class TinyWan:
    """A tiny Wan VAE on disk and in memory."""

    folder: Path
    vae: Any

    def latents(self, *extents: int, seed: int = 0) -> np.ndarray:
        """Random latents (1, C, T, H, W) for ``extents`` (T, H, W)."""
        return np.random.default_rng(seed).standard_normal((1, CHANNELS, *extents), np.float32)

    def decode(self, latents: np.ndarray) -> np.ndarray:
        """What diffusers makes of them, on one device: (B, C, F, H, W)."""
        with torch.inference_mode():
            return self.vae.decode(torch.from_numpy(latents)).sample.numpy()

    def config(self, **sections: Any) -> ServiceConfig:
        """Two CPU ranks that serve this model; ``sections`` replace what they name."""
        values: dict[str, Any] = {
            "model": {"name": "tiny", "source": str(self.folder), "dtype": "float32"},
            "group": {"ranks": 2, "threads": 1, "collective_timeout_s": 20, "abort_grace_s": 5},
            "policy": {"direct_max_pixels": 64 * 64},
            # Modes follow from the rules, and faults meet the decodes that they are meant for.
            "calibration": {"enabled": False},
        }
        for name, section in sections.items():
            values[name] = {**values.get(name, {}), **section}
        return ServiceConfig.model_validate(values)


@pytest.fixture(scope="session")
def tiny_wan(tmp_path_factory: pytest.TempPathFactory) -> TinyWan:
    torch.manual_seed(3)
    vae = diffusers.AutoencoderKLWan(
        base_dim=8, z_dim=CHANNELS, num_res_blocks=1, latents_mean=[0.0] * 4, latents_std=[1.0] * 4
    )
    vae.eval().requires_grad_(False)
    folder = tmp_path_factory.mktemp("tiny-wan")
    vae.save_pretrained(folder)
    return TinyWan(folder, vae)


def job(latents: np.ndarray, **wishes: Any) -> DecodeJob:
    """A job for float32 pixels as the model returns them."""
    return DecodeJob(WireTensor("float32", latents.shape, latents.tobytes()), **{"pixels": FLOAT, **wishes})


Fault = Callable[[RankTask], None]


@dataclass
class Faults:
    """What goes wrong, rank by rank, one fault per decode; shared by all ranks of an in-process group.

    Attributes:
        pending: for each rank the faults of its next decodes.
        tasks: the tasks that each rank was given.
        joined: how often workers were built.
    """

    pending: dict[int, list[Fault]] = field(default_factory=dict)
    tasks: list[tuple[int, RankTask]] = field(default_factory=list)
    built: int = 0

    def on(self, rank: int, *faults: Fault) -> None:
        self.pending.setdefault(rank, []).extend(faults)

    def make_worker(self, config: ServiceConfig, place: RankPlace) -> RankWorker:
        self.built += 1
        return FaultyWorker(config, place, self)


class FaultyWorker(RankWorker):
    """A rank that decodes as usual, except where ``Faults`` say otherwise."""

    def __init__(self, config: ServiceConfig, place: RankPlace, faults: Faults) -> None:
        super().__init__(config, place)
        self.faults = faults

    def decode(self, task: RankTask, latents: np.ndarray, dtype: str) -> RankPixels | RankFailure:
        self.faults.tasks.append((self.place.rank, task))
        waiting = self.faults.pending.get(self.place.rank)
        fault = waiting.pop(0) if waiting else None
        if fault is not None:
            from decode_service.engine.failures import describe_failure

            if fault is not_a_number:
                answer = super().decode(task, latents, dtype)
                assert isinstance(answer, RankPixels)
                return replace(answer, finite=False)
            try:
                fault(task)
            except Exception as error:
                return describe_failure(error)
        return super().decode(task, latents, dtype)


def not_a_number(task: RankTask) -> None:
    """The fault of a decode whose pixels hold NaN."""


def raising(error: Exception) -> Fault:
    """The fault of a rank that raises ``error`` instead of decoding, while its peers wait for it."""

    def fault(task: RankTask) -> None:
        raise error

    return fault


@pytest.fixture
def faults() -> Faults:
    return Faults()


@asynccontextmanager
async def serving(
    config: ServiceConfig, faults: Faults | None = None, observer: DecodeObserver | None = None
) -> AsyncIterator[DecodeEngine]:
    group = LocalGroup(config, faults.make_worker) if faults else LocalGroup(config)
    engine = DecodeEngine(group, config, observer)
    await engine.start()
    if faults:
        faults.tasks.clear()
    try:
        yield engine
    finally:
        await engine.close()


async def held_until(engine: DecodeEngine, faults: Faults, *, rank: int, waiting: int) -> None:
    """Let the decode that ``rank`` does next last until so many requests wait."""
    enough = threading.Event()
    faults.on(rank, lambda task: within(30, enough))
    while engine.describe()["queue"]["waiting"] < waiting:
        await asyncio.sleep(0.005)
    enough.set()


def within(seconds: float, event: threading.Event) -> None:
    assert event.wait(seconds)


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        await asyncio.wait_for(test(), 120)

    asyncio.run(limited())
