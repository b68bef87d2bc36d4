"""The application: which routes there are, and the life of one request from body to reply."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from decode_service import __version__
from decode_service.engine.protocol import DecodeService
from decode_service.errors import DecodeServiceError, NotReadyError
from decode_service.http import openapi
from decode_service.http.bodies import BodyMemory, read_json, read_msgpack
from decode_service.http.callers import caller_of
from decode_service.http.disconnect import unless_disconnected
from decode_service.http.errors import error_response, install_error_handlers
from decode_service.http.replies import ChunkType, file_reply, tensor_reply
from decode_service.http.request_id import RequestIdMiddleware, request_id_of
from decode_service.http.requests import check_model, parse_decode, parse_plan, parse_size, plan_for
from decode_service.http.stages import Stages
from decode_service.planning.geometry import latents_for


def create_app(service: DecodeService, *, chunk_type: ChunkType = "bytes") -> FastAPI:
    """The HTTP application that serves one model.

    Args:
        service: decodes, plans and describes; see ``DecodeService``.
        chunk_type: what replies are streamed as. ``memoryview`` saves one copy of the pixels, but only where the server
            takes the chunks in the same process: Ray Serve's default proxy pickles them, which a memoryview refuses.
    """
    if chunk_type not in ("bytes", "memoryview"):
        raise ValueError(f"chunk_type must be 'bytes' or 'memoryview', got {chunk_type!r}")
    app = FastAPI(
        title="Decode service",
        version=__version__,
        summary="VAE decode as a service: latents in, pixels out.",
        # A redirect would make clients send a large body twice, or drop it.
        redirect_slashes=False,
        responses=openapi.ERROR_RESPONSES,
    )
    install_error_handlers(app)
    app.add_middleware(RequestIdMiddleware)
    bodies = app.state.bodies = BodyMemory(service.max_total_body_bytes)

    @app.post("/decode/", include_in_schema=False)
    @app.post("/decode", openapi_extra=openapi.DECODE_REQUEST, responses=openapi.DECODE_RESPONSES)
    async def decode(request: Request) -> Response:
        """Decode latents. `output.format` decides what comes back: a msgpack map with the pixels, or a file."""
        stages = Stages()
        request_id = request_id_of(request.scope)
        # A model that is still loading has no spec and answers so before anything is uploaded.
        model_name = service.spec.name
        body = await read_msgpack(request, service.max_body_bytes, bodies)
        stages.lap("recv")
        job, output = await parse_decode(body, service, request_id, stages)
        # Only the job keeps the body alive from here on.
        del body
        job = replace(job, caller=caller_of(request))
        stages.lap("parse")
        work = service.decode(job)
        # And from here on only the decode.
        del job
        outcome = await unless_disconnected(request, work)
        stages.add(outcome.timings_ms)
        stages.restart()
        if output.format == "tensor":
            return tensor_reply(outcome, model_name, request_id, stages, chunk_type)
        return await file_reply(outcome, output, model_name, request_id, stages, chunk_type)

    @app.post("/plan", openapi_extra=openapi.PLAN_REQUEST)
    async def plan(request: Request) -> Response:
        """How latents of a shape would be decoded, without decoding them."""
        wanted = parse_plan(await read_json(request))
        check_model(wanted.model, service)
        try:
            made = plan_for(wanted, wanted.shape, service)
        except DecodeServiceError as error:
            # Here the shape is a field of its own.
            error.param = error.param.removeprefix("latents.") if error.param else None
            raise
        return JSONResponse({"plan": made.public()})

    @app.get("/v1/models/", include_in_schema=False)
    @app.get("/v1/models")
    async def models() -> Response:
        """The models that this application serves: one."""
        return JSONResponse({"models": [service.describe()]})

    @app.get("/v1/models/{name:path}", openapi_extra=openapi.MODEL_PARAMETERS)
    async def model(name: str, request: Request) -> Response:
        """One model: VAE config, compression ratios, statistics, frame rule, limits, modes, memory. Names may contain slashes.

        With `height` and `width` (and `frames`, `batch`) it also tells the latents that decode to pictures of that size.
        """
        check_model(name, service)
        size = parse_size(request.query_params)
        described = service.describe()
        if size is not None:
            described = {**described, "for_size": latents_for(service.spec, **size)}
        return JSONResponse(described)

    @app.get("/healthz")
    async def healthz() -> Response:
        """Whether the process lives: 200 from the start. See `/readyz` for whether it decodes."""
        return JSONResponse({"status": "ok"})

    @app.get("/readyz")
    async def readyz(request: Request) -> Response:
        """Whether the model decodes now: 200, or 503 with `Retry-After` while it loads, warms up or recovers."""
        readiness = service.readiness()
        state: dict[str, Any] = {
            "ready": readiness.ready,
            "state": readiness.state,
            "warnings": list(readiness.warnings),
        }
        if readiness.ready:
            return JSONResponse(state)
        reasons = "".join(f"; {warning}" for warning in readiness.warnings)
        error = NotReadyError(f"not ready: {readiness.state}{reasons}")
        return error_response(error, request_id_of(request.scope), extra=state)

    return app
