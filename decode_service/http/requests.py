"""From a body to a validated job: what the wire says, checked against the model before anything is queued."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from decode_client.wire import DTYPES, MAX_BIN_BYTES, MAX_DIMS, DecodeRequest, OutputSpec, WireError, unpack_request
from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, ValidationError

from decode_service.engine.off_loop import over_bytes
from decode_service.engine.protocol import DecodeJob, DecodeService
from decode_service.errors import (
    DeadlineExceededError,
    DecodeServiceError,
    InvalidLatentsError,
    InvalidRequestError,
    MalformedRequestError,
    ModelNotFoundError,
    NonFiniteLatentsError,
    OutputTooLargeError,
)
from decode_service.http.stages import Stages
from decode_service.media.formats import check_installed, check_output
from decode_service.planning.layouts import Layout
from decode_service.planning.plan import DecodePlan, PixelFormat

Extent = Annotated[StrictInt, Field(ge=1, lt=2**31)]


class PlanOutput(BaseModel):
    """``output`` of a ``PlanRequest``; see ``OutputSpec``, which checks what goes with what."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal["tensor", "png", "jpeg", "webp", "mp4"] = "tensor"
    dtype: Literal["uint8", "float16", "bfloat16", "float32"] = "uint8"
    range: Literal["unit", "model"] = "unit"
    fps: Annotated[float, Field(strict=True, gt=0)] | None = None
    quality: Annotated[StrictInt, Field(ge=1, le=100)] | None = None


class PlanRequest(BaseModel):
    """The JSON body of ``POST /plan``; the fields mean the same as in ``POST /decode``.

    Attributes:
        shape: of the latents, as they would be sent.
        model, layout, height, width, frames, layers, denormalize, mode, strict, collect, chunk, output: see
            ``DecodeRequest``.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    shape: Annotated[tuple[Extent, ...], Field(min_length=1, max_length=MAX_DIMS)]
    model: str | None = None
    layout: Literal["auto", "BCHW", "CHW", "BCTHW", "CTHW", "BTCHW", "TCHW", "packed", "patchified"] = "auto"
    height: Extent | None = None
    width: Extent | None = None
    frames: Extent | None = None
    layers: Extent | None = None
    denormalize: StrictBool = False
    mode: Literal["auto", "direct", "batch", "tile", "spatial_shard_height", "spatial_shard_width"] = "auto"
    strict: StrictBool | None = None
    collect: Literal["shards", "rank0", "broadcast"] | None = None
    chunk: Annotated[StrictInt, Field(ge=1, lt=2**31)] | None = None
    output: PlanOutput | None = None

    def output_spec(self) -> OutputSpec:
        """What the pixels would come back as.

        Raises:
            InvalidRequestError: a field does not go with the others.
        """
        try:
            return OutputSpec(**self.output.model_dump()) if self.output else OutputSpec()
        except WireError as error:
            raise _from_wire(error.under("output")) from None


def parse_plan(values: Any) -> PlanRequest:
    """The checked fields of ``POST /plan``.

    Raises:
        InvalidRequestError: a field is missing, unknown, of the wrong type or out of range.
    """
    if not isinstance(values, dict):
        raise InvalidRequestError('the body must be a JSON object such as {"shape": [1, 16, 21, 60, 104]}')
    known = list(PlanRequest.model_fields)
    for key in values:
        if key not in known:
            near = difflib.get_close_matches(key[:64].lower(), known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"known fields are {', '.join(known)}"
            raise InvalidRequestError(f"unknown field {key[:64]!r}: {hint}", param=key[:64])
    try:
        return PlanRequest.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        param = ".".join(str(part) for part in first["loc"])
        raise InvalidRequestError(f"{param}: {first['msg']}", param=param) from None


def plan_for(wanted: PlanRequest | DecodeRequest, shape: tuple[int, ...], service: DecodeService) -> DecodePlan:
    """The plan of what is wanted of latents of ``shape``, whose pixels fit the reply that is wanted.

    Raises:
        DecodeServiceError: of 4xx, with the field at fault.
    """
    output = wanted.output_spec() if isinstance(wanted, PlanRequest) else wanted.output
    plan = service.plan(
        shape,
        layout=layout_of(wanted),
        mode=wanted.mode,
        strict=wanted.strict,
        collect=wanted.collect,
        chunk=wanted.chunk,
        denormalize=wanted.denormalize,
        pixels=pixel_format_of(output),
    )
    _check_reply(output, plan, service.spec.output_channels)
    return plan


def pixel_format_of(output: OutputSpec) -> PixelFormat:
    """What ranks return for a reply."""
    return PixelFormat(dtype=output.dtype, range=output.range)


def layout_of(wanted: PlanRequest | DecodeRequest) -> Layout:
    """What a request says of how its latents lie."""
    return Layout(wanted.layout, wanted.height, wanted.width, wanted.frames, wanted.layers)


#: Query parameters of ``GET /v1/models/{name}``.
SIZE_PARAMETERS = ("height", "width", "frames", "batch")


def parse_size(query: Mapping[str, str]) -> dict[str, int] | None:
    """The size that ``GET /v1/models/{name}`` is asked about, or None where it is asked about none.

    Raises:
        InvalidRequestError: a parameter is unknown, no whole number above 0, or height comes without width.
    """
    size = {}
    for key, value in query.items():
        if key not in SIZE_PARAMETERS:
            raise InvalidRequestError(
                f"unknown parameter {key[:64]!r}: known ones are {', '.join(SIZE_PARAMETERS)}", param=key[:64]
            )
        if not (value.isascii() and value.isdigit() and 0 < int(value[:12]) < 2**31 and len(value) < 12):
            raise InvalidRequestError(f"{key} must be a whole number from 1 on, got {value[:64]!r}", param=key)
        size[key] = int(value)
    for key in ("height", "width"):
        if size and key not in size:
            raise InvalidRequestError(f"{key} is missing: a size is height=...&width=..., in pixels", param=key)
    return size or None


def check_model(name: str | None, service: DecodeService) -> None:
    """Make sure that ``name`` is the model served; None is whichever is.

    Raises:
        ModelNotFoundError: it is another; the message names the one served.
    """
    if name is not None and name != service.spec.name:
        raise ModelNotFoundError(f"no model {name[:128]!r} here: this is {service.spec.name!r}", param="model")


async def parse_decode(
    body: memoryview, service: DecodeService, request_id: str, stages: Stages
) -> tuple[DecodeJob, OutputSpec]:
    """The job that a body asks for, and what its pixels shall become. Cheap checks come first.

    Raises:
        DecodeServiceError: of 4xx, with the field at fault; ``DeadlineExceededError`` where receiving took too long.
    """
    # Nothing is copied and no value but the tensor's bytes is large, so this takes microseconds whatever the body's size.
    wanted = _unpack(body)
    check_model(wanted.model, service)
    plan_for(wanted, wanted.latents.shape, service)
    if not await over_bytes(wanted.latents.nbytes, wanted.latents.is_finite):
        raise NonFiniteLatentsError(
            "the latents hold NaN or infinite values, which decode to a black picture: look for an overflow in the "
            "denoiser, commonly float16 where bfloat16 or float32 is needed",
            param="latents.data",
        )
    job = DecodeJob(
        latents=wanted.latents,
        layout=layout_of(wanted),
        denormalize=wanted.denormalize,
        timestep=wanted.timestep,
        noise_scale=wanted.noise_scale,
        seed=wanted.seed,
        mode=wanted.mode,
        strict=wanted.strict,
        collect=wanted.collect,
        chunk=wanted.chunk,
        pixels=pixel_format_of(wanted.output),
        deadline_s=_remaining_s(wanted.deadline_ms, stages),
        request_id=request_id,
    )
    return job, wanted.output


def _unpack(body: memoryview) -> DecodeRequest:
    try:
        return unpack_request(body)
    except WireError as error:
        raise _from_wire(error) from None


def _from_wire(error: WireError) -> DecodeServiceError:
    if error.malformed:
        return MalformedRequestError(error.message, param=error.param)
    about_latents = error.param is not None and error.param.split(".")[0] == "latents"
    return (InvalidLatentsError if about_latents else InvalidRequestError)(error.message, param=error.param)


def _check_reply(output: OutputSpec, plan: DecodePlan, channels: int) -> None:
    """Refuse what the reply could not hold, before a device is kept busy with it."""
    batch = plan.latent_shape[0]
    frames, height, width = plan.output_frames, plan.output_height, plan.output_width
    if output.format != "tensor":
        check_output(
            output.format,
            batch=batch,
            frames=frames,
            height=height,
            width=width,
            channels=channels,
            fps=output.fps,
        )
        check_installed(output.format)
        return
    nbytes = math.prod((batch, frames, height, width, channels)) * DTYPES[output.dtype].itemsize
    if nbytes > MAX_BIN_BYTES:
        raise OutputTooLargeError(
            f"{nbytes} bytes of {output.dtype} pixels do not fit one tensor reply (4 GiB): ask for dtype uint8, for mp4, or "
            "for fewer frames at a time",
            param="output.dtype",
        )


def _remaining_s(deadline_ms: float | None, stages: Stages) -> float | None:
    """Seconds left of a deadline that began when the request's head arrived."""
    if deadline_ms is None:
        return None
    left_s = deadline_ms / 1000 - stages.elapsed_s()
    if left_s <= 0:
        raise DeadlineExceededError(
            f"the deadline of {deadline_ms:g} ms passed while the request was received: it needs more time, or a faster link",
            param="deadline_ms",
        )
    return left_s
