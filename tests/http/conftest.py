"""A service that decodes with numpy (nearest upsampling), and the application around it: in process, and as a real server."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import uvicorn
from decode_client.wire import DecodeRequest, OutputSpec, WireTensor, float32_to_bfloat16, pack_request
from starlette.testclient import TestClient

from decode_service.engine.protocol import DecodeJob, DecodeOutcome, Readiness
from decode_service.errors import InvalidLatentsError, NotReadyError, OutputTooLargeError, UnsupportedModeError
from decode_service.http import create_app
from decode_service.planning.bands import split
from decode_service.planning.layouts import Layout, arrange
from decode_service.planning.plan import MODES, DecodePlan, PixelFormat
from decode_service.planning.spec import ModelSpec, Packing, StrideTiles
from decode_service.planning.temporal import CausalFrames

RATIO = 8


@dataclass
class NumpyService:
    """A ``DecodeService`` of two ranks: pixels are the first latent channels, enlarged, and come back as two bands."""

    channels: int = 3
    max_body_bytes: int = 1 << 20
    max_total_body_bytes: int = 1 << 26
    max_output_pixels: int = 1 << 24
    delay_s: float = 0.0
    failure: BaseException | None = None
    loading: bool = False
    ready: Readiness = field(default_factory=lambda: Readiness(True, "ready"))
    jobs: list[DecodeJob] = field(default_factory=list)
    planned: list[tuple[bool, PixelFormat]] = field(default_factory=list)
    cancelled: threading.Event = field(default_factory=threading.Event)

    @property
    def spec(self) -> ModelSpec:
        if self.loading:
            raise NotReadyError("the model is still loading")
        return ModelSpec(
            name="lab/nearest",
            family="nearest",
            class_name="Nearest",
            latent_channels=4,
            output_channels=self.channels,
            spatial_ratio=RATIO,
            decoder_ratio=RATIO,
            frame_rule=CausalFrames(4),
            accepts_images=True,
            exact_axes=("height", "width"),
            tiles=StrideTiles(),
            packing=Packing((2,)),
        )

    def describe(self) -> dict[str, Any]:
        return {"name": self.spec.name, "family": self.spec.family, "modes": list(MODES)}

    def readiness(self) -> Readiness:
        return self.ready

    def plan(
        self,
        latent_shape: tuple[int, ...],
        *,
        layout: Layout | None = None,
        mode: str = "auto",
        strict: bool | None = None,
        collect: str | None = None,
        chunk: int | None = None,
        denormalize: bool = False,
        pixels: PixelFormat | None = None,
    ) -> DecodePlan:
        self.planned.append((denormalize, pixels or PixelFormat()))
        latent_shape = arrange(self.spec, latent_shape, layout or Layout()).latent_shape
        if len(latent_shape) not in (4, 5) or latent_shape[1] != 4:
            raise InvalidLatentsError(
                f"latents are (B,4,H,W) or (B,4,T,H,W), got {latent_shape}", param="latents.shape"
            )
        frames, height, width = self.spec.output_extents(latent_shape)
        if latent_shape[0] * frames * height * width > self.max_output_pixels:
            raise OutputTooLargeError("too many pixels", param="latents.shape")
        if mode == "tile":
            raise UnsupportedModeError("nearest upsampling has no tiles", param="mode")
        return DecodePlan(
            mode="spatial_shard_height",
            ranks=2,
            axis="height",
            bands=split(latent_shape[-2], 2),
            chunk=chunk or 1,
            collect="shards",
            reason="two ranks are free",
            fallback=None,
            exact=True,
            tiles=None,
            owners=(),
            latent_shape=latent_shape,
            output_frames=frames,
            output_height=height,
            output_width=width,
        )

    def pixels(self, latents: np.ndarray, output: PixelFormat) -> np.ndarray:
        """uint8 channels last, or float32 channels first."""
        frames = np.repeat(latents, 4, axis=2)[:, :, 3:] if latents.ndim == 5 else latents
        large = np.repeat(np.repeat(frames[:, : self.channels], RATIO, axis=-2), RATIO, axis=-1)
        if output.dtype != "uint8":
            return large.astype(np.float32)
        levels = np.clip(np.rint((large + 1) * 127.5), 0, 255).astype(np.uint8)
        return np.ascontiguousarray(np.moveaxis(levels, 1, -1))

    async def decode(self, job: DecodeJob) -> DecodeOutcome:
        self.jobs.append(job)
        try:
            await asyncio.sleep(self.delay_s)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        if self.failure is not None:
            raise self.failure
        plan = self.plan(job.latents.shape, layout=job.layout, mode=job.mode, chunk=job.chunk)
        arrangement = arrange(self.spec, job.latents.shape, job.layout)
        whole = self.pixels(arrangement.apply(job.latents.float32()), job.pixels)
        axis = whole.ndim - (3 if job.pixels.dtype == "uint8" else 2)
        rows = plan.bands[0].size * RATIO
        parts = [np.ascontiguousarray(part) for part in np.split(whole, [rows], axis=axis)]
        if job.pixels.dtype == "bfloat16":
            parts = [float32_to_bfloat16(part) for part in parts]
        return DecodeOutcome(
            plan=plan,
            dtype=job.pixels.dtype,
            shape=whole.shape,
            part_axis=axis,
            parts=parts,
            timings_ms={"queue": 0.5, "ranks": 1.25},
            # As if pictures were warm and videos not.
            compiled=len(job.latents.shape) == 4,
        )


def random_latents(*shape: int) -> np.ndarray:
    return np.random.default_rng(7).uniform(-1, 1, shape or (1, 4, 6, 10)).astype(np.float32)


def make_body(latents: np.ndarray | None = None, output: OutputSpec | None = None, **fields: Any) -> bytes:
    tensor = WireTensor.from_array(random_latents() if latents is None else latents)
    return pack_request(DecodeRequest(latents=tensor, output=output or OutputSpec(), **fields))


@pytest.fixture
def latents_of() -> Callable[..., np.ndarray]:
    return random_latents


@pytest.fixture
def body_of() -> Callable[..., bytes]:
    return make_body


@pytest.fixture
def service() -> NumpyService:
    return NumpyService()


@pytest.fixture
def client(service: NumpyService) -> Iterator[TestClient]:
    with TestClient(create_app(service), headers={"Content-Type": "application/msgpack"}) as client:
        yield client


@pytest.fixture
def chunk_type() -> str:
    return "bytes"


@pytest.fixture
def port(service: NumpyService, chunk_type: str) -> Iterator[int]:
    """The port of a real server in a thread."""
    config = uvicorn.Config(
        create_app(service, chunk_type=chunk_type), host="127.0.0.1", port=0, log_level="warning", lifespan="off"
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    until = time.monotonic() + 20
    while not server.started:
        assert thread.is_alive() and time.monotonic() < until
        time.sleep(0.01)
    yield server.servers[0].sockets[0].getsockname()[1]
    server.should_exit = True
    thread.join(timeout=20)
    assert not thread.is_alive()
