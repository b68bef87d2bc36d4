"""The Ray Serve applications that ``deploy/*.yaml`` import.

``build`` is a model: one deployment, one replica per group of ranks. ``build_status`` answers ``/healthz`` and ``/readyz``
while models still load. Replicas import neither torch nor the decoder: only the ranks do.
"""

# No `from __future__ import annotations` here: Serve turns a YAML's `args` into the builder's pydantic model only where the
# annotation is the class itself. It doesn't look into strings, and would silently hand over a dict.

import asyncio
import logging
import time
from typing import Any, Literal

from ray import serve
from ray.serve.exceptions import RayServeException
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from decode_service.config import Section, ServiceConfig
from decode_service.engine.engine import DecodeEngine
from decode_service.engine.ray_group import RayGroup
from decode_service.http import create_app
from decode_service.http.request_id import sane_request_id
from decode_service.telemetry import RayMetrics

try:
    # What requests come by that reach the replica's own HTTP server. Serve says so nowhere else.
    from ray.serve._private.direct_ingress_http_util import ASGIDIReceiveProxy
except ImportError:
    ASGIDIReceiveProxy = None

logger = logging.getLogger("decode_service.app")

HEALTH_CHECK_PERIOD_S = 5.0
STATUS_CACHE_S = 1.0
READINESS_LIMIT_S = 2.0


# No argument: the routes need the engine, which only exists once the replica runs.
@serve.ingress()
class DecodeService:
    """The replica: coordinator of one group and HTTP ingress in one process.

    A second deployment for the ingress would cost copies of every latent and every picture, and Serve's own
    back-pressure would then apply to the ingress only.
    """

    async def __init__(self, config: ServiceConfig) -> None:  # type: ignore[misc]  # Serve awaits it
        _log_like_serve()
        self._engine = DecodeEngine(RayGroup(config), config, RayMetrics(config.model.name))
        try:
            await self._engine.start()
        except Exception as error:
            # Serve says no more than "failed to update the deployments"; the cause must be found in one line.
            logger.error("%s could not be started: %s: %s", config.model.name, type(error).__name__, error)
            await self._engine.close()
            raise

    def __serve_build_asgi_app__(self) -> Any:
        """The routes; Serve calls this after the constructor."""
        app = create_app(self._engine, chunk_type="memoryview")
        app.add_middleware(PicklableReplies)
        return app

    def readiness(self) -> str:
        """The engine's state, for the ``/readyz`` probe; ``ready`` where it decodes."""
        return self._engine.readiness().state

    def check_health(self) -> None:
        """Serve replaces the replica after three failures in a row.

        Raises:
            RuntimeError: once the engine has given its group up.
        """
        if not self._engine.healthy():
            raise RuntimeError("the group of ranks was given up")

    async def __del__(self) -> None:
        # Ray ends the ranks together with the replica in any case; this ends them before their placement group goes. Serve
        # calls it on what is half built, too: where not even the engine could be made, there is nothing to end.
        engine: DecodeEngine | None = getattr(self, "_engine", None)
        if engine is not None:
            await engine.close()


def deployment_options(config: ServiceConfig) -> dict[str, Any]:
    """The deployment options that follow from the settings, so that nobody writes bundles by hand."""
    return {
        "name": "DecodeService",
        # The replica only coordinates. It reserves nothing, so it fits into the bundle of rank 0, and it has no GPU.
        "ray_actor_options": {"num_cpus": 0, "num_gpus": 0},
        "placement_group_bundles": config.group.placement_bundles(),
        "placement_group_strategy": config.group.placement,
        # Far above our own bound: the engine answers a full queue with JSON and Retry-After, Serve with a line of text.
        "max_ongoing_requests": 4 * config.limits.max_queued + 64,
        "max_queued_requests": -1,
        # Serve's default is 20, which can mean hours of loading before anybody hears of a wrong setting.
        "max_constructor_retry_count": 2,
        "health_check_period_s": HEALTH_CHECK_PERIOD_S,
        "health_check_timeout_s": 30.0,
        "graceful_shutdown_wait_loop_s": 1.0,
        "graceful_shutdown_timeout_s": 60.0,
    }


def build(args: ServiceConfig) -> serve.Application:
    """The application that serves one model. ``args`` come from the application's ``args`` in the YAML."""
    return serve.deployment(DecodeService).options(**deployment_options(args)).bind(args)


# ---- probes --------------------------------------------------------------------------------------------------------


class StatusConfig(Section):
    """The ``args`` of a probe.

    Attributes:
        probe: ``healthz`` (the server answers) or ``readyz`` (all other applications decode).
    """

    probe: Literal["healthz", "readyz"]


class Probe:
    """Answers for the whole cluster, from a process of its own.

    A replica answers nothing before its constructor ends, and Serve's own ``/-/healthz`` is 200 while applications still
    load and when they have failed. This one starts in seconds and knows neither torch nor the models.
    """

    def __init__(self, config: StatusConfig) -> None:
        self._probe = config.probe
        self._own_name = serve.get_replica_context().app_name
        self._lock = asyncio.Lock()
        self._states: dict[str, str] = {}
        self._known_at = float("-inf")

    async def __call__(self, request: Request) -> JSONResponse:
        if self._probe == "healthz":
            return JSONResponse({"status": "ok"})
        states = await self._application_states()
        waiting = {name: state for name, state in states.items() if state != "ready"}
        if states and not waiting:
            return JSONResponse({"status": "ready", "applications": states})
        listed = ", ".join(f"{name} is {state}" for name, state in waiting.items()) or "no model is deployed"
        request_id = sane_request_id(request.headers.get("x-request-id"))
        error = {
            "type": "not_ready",
            "message": f"not all models are ready: {listed}",
            "param": None,
            "request_id": request_id,
        }
        headers = {"Retry-After": "5", "X-Request-Id": request_id}
        return JSONResponse({"error": error, "applications": states}, status_code=503, headers=headers)

    async def readiness(self) -> str:
        """So that one probe can ask the other like a model."""
        return "ready"

    async def _application_states(self) -> dict[str, str]:
        """State of every other application, at most about a second old: ``ready``, or what stands in the way.

        An application that runs for Serve may not decode at the moment, because its group is being rebuilt: it is asked.
        """
        async with self._lock:
            if time.monotonic() - self._known_at > STATUS_CACHE_S:
                # It asks the controller and waits, so not on the event loop.
                status = await asyncio.to_thread(serve.status)
                self._states = {
                    name: str(getattr(application.status, "value", application.status))
                    for name, application in status.applications.items()
                    if name != self._own_name
                }
                running = [name for name, state in self._states.items() if state == "RUNNING"]
                answers = await asyncio.gather(*(_ask_readiness(name) for name in running))
                self._states.update(zip(running, answers, strict=True))
                self._known_at = time.monotonic()
            return self._states


async def _ask_readiness(application: str) -> str:
    """What the ingress of ``application`` says of itself."""
    try:
        # It asks the controller and waits, too.
        handle = await asyncio.to_thread(serve.get_app_handle, application)
        return str(await asyncio.wait_for(handle.readiness.remote(), READINESS_LIMIT_S))
    except TimeoutError:
        return "does not answer"
    except Exception as error:
        # Somebody else's application in the same cluster need not know the question.
        return "ready" if isinstance(error, RayServeException) else f"failed: {type(error).__name__}"


def build_status(args: StatusConfig) -> serve.Application:
    """A probe for the whole cluster, as an application of its own with ``route_prefix: /healthz`` or ``/readyz``."""
    options = {
        "name": "Probe",
        "ray_actor_options": {"num_cpus": 0},
        "max_ongoing_requests": 100,
        # Probes come every few seconds, from everywhere.
        "logging_config": {"enable_access_log": False},
        "graceful_shutdown_timeout_s": 5.0,
    }
    return serve.deployment(Probe).options(**options).bind(args)


# ---- the process ---------------------------------------------------------------------------------------------------


class PicklableReplies:
    """ASGI middleware: to Serve's own proxy, which pickles what it gets, bodies are sent as bytes.

    An HTTP server in the replica (HAProxy mode, direct ingress) takes memoryviews without a copy, and a memoryview cannot be
    pickled. Which of both asks is told request by request: HAProxy, too, falls back to Serve's proxy while it does not know of a
    replica yet.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if ASGIDIReceiveProxy is not None and isinstance(receive, ASGIDIReceiveProxy):
            await self._app(scope, receive, send)
            return

        async def send_bytes(message: Message) -> None:
            if isinstance(message.get("body"), memoryview):
                message = {**message, "body": bytes(message["body"])}
            await send(message)

        await self._app(scope, receive, send_bytes)


def _log_like_serve() -> None:
    """Send our log lines where the replica's own go, in the same format: Serve only sets up its own logger."""
    ours, serves = logging.getLogger("decode_service"), logging.getLogger("ray.serve")
    ours.setLevel(logging.INFO)
    ours.handlers = list(serves.handlers)
    ours.propagate = not ours.handlers
