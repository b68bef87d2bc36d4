"""``DecodeClient`` and ``AsyncDecodeClient``: one surface, and for each the few lines that send and wait."""

from __future__ import annotations

import asyncio
import copy
import difflib
import inspect
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Self, TypedDict, TypeVar, Unpack

import httpx2

from decode_client import _protocol as protocol
from decode_client._protocol import Flow, Receiver, Send, Settings, Sleep, Timeout
from decode_client._replies import Reply
from decode_client.inputs import Latents
from decode_client.result import DecodeResult

T = TypeVar("T")
Method = TypeVar("Method", bound=Callable[..., Any])


class PlanOptions(TypedDict, total=False):
    """Keywords of ``plan``; ``decode`` has them too.

    Attributes:
        model: name of the model; needed only where the address serves several.
        layout: how the latents lie. ``auto`` tells from the shape, where only one reading fits. ``BCHW``, ``CHW``,
            ``BCTHW``, ``CTHW``, ``BTCHW`` (as CogVideoX and SVD pipelines hold them) and ``TCHW`` name the dimensions;
            ``packed`` is a sequence of tokens, [B,N,C*p*p] (FLUX, Qwen-Image, LTX); ``patchified`` is [B,C*p*p,H/p,W/p]
            (FLUX.2).
        height, width: of the decoded picture, in pixels: needed by ``packed``, elsewhere checked.
        frames: pixel frames of the decoded video: needed by ``packed`` latents of a video, elsewhere checked.
        layers: ``layers`` of a Qwen-Image-Layered pipeline: as many pictures come back for each packed item.
        denormalize: True where the latents are normalized (as a diffusion model leaves them) and the model's own
            statistics must be applied first.
        mode: ``auto``, ``direct``, ``batch``, ``tile``, ``spatial_shard_height`` or ``spatial_shard_width``.
        strict: whether a mode that cannot run is an error instead of a fallback; None takes the server's default.
        collect: ``shards``, ``rank0`` or ``broadcast``; None takes the server's default.
        chunk: latent frames per pass, at least 1; None takes the server's default.
        format: ``tensor``, or a file: ``png``, ``jpeg``, ``webp``, ``mp4``.
        dtype: of a tensor: ``uint8`` (0 to 255, channels last) or ``float16``, ``bfloat16``, ``float32`` (channels
            first).
        range: of a float tensor: ``unit`` for [-1, 1], ``model`` for the values as the model's ``decode`` returns them.
        fps: frames per second of mp4.
        quality: 1 to 100, of jpeg, webp and mp4.
        timeout: seconds that one attempt may take, instead of the client's.
    """

    model: str | None
    layout: str
    height: int | None
    width: int | None
    frames: int | None
    layers: int | None
    denormalize: bool
    mode: str
    strict: bool | None
    collect: str | None
    chunk: int | None
    format: str
    dtype: str
    range: str
    fps: float | None
    quality: int | None
    timeout: Timeout


class DecodeOptions(PlanOptions, total=False):
    """Keywords of ``decode``.

    Attributes:
        timestep: 0 to 1, for decoders with timestep conditioning (LTX): a pipeline's ``decode_timestep``; None takes the
            pipeline's default. Other models refuse it.
        noise_scale: 0 to 1, the share of noise mixed into latents of such decoders: ``decode_noise_scale``; None takes the
            timestep, as pipelines do.
        seed: of that noise; None is 0.
        deadline_s: seconds after which nobody waits for the pixels: the server is told, and the call ends by then,
            retries included.
        request_id: sent as ``X-Request-Id``, the same for every attempt; one is made up by default.
    """

    timestep: float | None
    noise_scale: float | None
    seed: int | None
    deadline_s: float | None
    request_id: str | None


class PixelSize(TypedDict, total=False):
    """Keywords of ``model``, for the latents of a size.

    Attributes:
        height, width: pixels; both or neither.
        frames: pixel frames of a clip; without them, a picture or the shortest clip.
        batch: items; 1 by default.
    """

    height: int | None
    width: int | None
    frames: int | None
    batch: int | None


def _keywords_of(flow: Callable[..., Any]) -> Callable[[Method], Method]:
    """Give a method the keywords of its flow, for ``help()`` and completion: ``Unpack`` helps type checkers only."""
    parameters = list(inspect.signature(flow).parameters.values())[1:]

    def mark(method: Method) -> Method:
        own = inspect.signature(method)
        this = own.parameters["self"]
        method.__signature__ = own.replace(parameters=[this, *parameters])  # type: ignore[attr-defined]
        return method

    return mark


def _refuse_unknown(method: str, options: Mapping[str, Any], known: type) -> None:
    """Name the method that was called, where Python would name the function behind it.

    Raises:
        TypeError: if an option is not one of the keys of ``known``.
    """
    keywords = known.__annotations__
    for name in options:
        if name not in keywords:
            nearest = difflib.get_close_matches(name, keywords, n=1)
            hint = f"did you mean {nearest[0]}?" if nearest else f"it has {', '.join(keywords)}"
            raise TypeError(f"{method}() got an unexpected keyword argument {name!r}; {hint}")


class _Client:
    """What the two clients have in common: their settings."""

    _settings: Settings
    _owns_http: bool

    def __init__(
        self,
        base_url: str | None,
        api_key: str | None,
        timeout: Timeout,
        max_retries: int,
        default_headers: Mapping[str, str] | None,
    ) -> None:
        address = base_url or os.environ.get("DECODE_SERVICE_URL")
        if not address:
            raise ValueError("say where the service is: base_url, or the environment variable DECODE_SERVICE_URL")
        self._settings = Settings(
            base_url=address,
            # A key from a file often ends in a newline; no key is an empty one.
            api_key=(api_key if api_key is not None else os.environ.get("DECODE_SERVICE_API_KEY", "")).strip() or None,
            timeout=timeout,
            max_retries=max_retries,
            default_headers=dict(default_headers or {}),
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._settings.shown_url!r})"

    @property
    def base_url(self) -> str:
        """Where the service is, without credentials."""
        return self._settings.shown_url

    def with_options(
        self,
        *,
        api_key: str | None = None,
        timeout: Timeout = None,
        max_retries: int | None = None,
        default_headers: Mapping[str, str] | None = None,
    ) -> Self:
        """A client that differs in what is given, and shares this one's connections; closing it closes nothing.

        ``default_headers`` are added to those of this client.
        """
        settings = self._settings
        headers = {**settings.default_headers, **(default_headers or {})}
        changes = {"api_key": api_key, "timeout": timeout, "max_retries": max_retries}
        given: dict[str, Any] = {name: value for name, value in changes.items() if value is not None}
        other = copy.copy(self)
        other._settings = replace(settings, default_headers=headers, **given)
        other._owns_http = False
        return other


class DecodeClient(_Client):
    """A client of one decode service.

    Args:
        base_url: ``http://host:port``, with the application's path prefix if it has one; default: the environment
            variable ``DECODE_SERVICE_URL``.
        api_key: sent as ``Authorization: Bearer``; default: the environment variable ``DECODE_SERVICE_API_KEY``.
        timeout: seconds that one attempt may take (checked while data arrives), or a ``httpx2.Timeout`` of its phases,
            or None for no limit.
        max_retries: attempts after the first, for connections that fail and for 408, 429, 500, 502, 503 and 504.
            ``Retry-After`` is honoured up to 60 s; where the server asks for longer there is no retry. A reply that
            does not come in time is not asked for again.
        default_headers: sent with every request.
        http_client: your own ``httpx2.Client``, for proxies, certificates or tests; it stays yours to close.

    Raises:
        ValueError: if there is no usable base URL, or a setting is out of range.
    """

    def __init__(
        self,
        base_url: str | None = None,
        *,
        api_key: str | None = None,
        timeout: Timeout = 300.0,
        max_retries: int = 2,
        default_headers: Mapping[str, str] | None = None,
        http_client: httpx2.Client | None = None,
    ) -> None:
        super().__init__(base_url, api_key, timeout, max_retries, default_headers)
        self._owns_http = http_client is None
        self._http = http_client if http_client is not None else httpx2.Client(follow_redirects=True)

    @_keywords_of(protocol.decode_flow)
    def decode(self, latents: Latents, **options: Unpack[DecodeOptions]) -> DecodeResult:
        """Decode latents.

        Args:
            latents: [B,C,H,W] or [B,C,T,H,W], the same without B, or as ``layout`` says, in float32, float16 or bfloat16:
                a torch tensor, a numpy array, the path of a .safetensors file, or a ``WireTensor``.
            options: see ``DecodeOptions``.

        Raises:
            ValueError, TypeError, OSError: if an argument is refused before anything is sent.
            DecodeError: by cause; see ``decode_client.errors``.
        """
        _refuse_unknown("decode", options, DecodeOptions)
        return self._run(protocol.decode_flow(self._settings, latents, **options))

    @_keywords_of(protocol.plan_flow)
    def plan(self, shape: Sequence[int], **options: Unpack[PlanOptions]) -> dict[str, Any]:
        """How latents of a shape would be decoded, without decoding: ``mode``, ``ranks``, ``reason``, ``output``, ...

        Args:
            shape: of the latents, as ``decode`` would get them.
            options: see ``PlanOptions``.

        Raises:
            DecodeError: by cause; a shape that the model cannot decode is an ``UnprocessableError``.
        """
        _refuse_unknown("plan", options, PlanOptions)
        return self._run(protocol.plan_flow(self._settings, shape, **options))

    def models(self) -> list[dict[str, Any]]:
        """The models served at this address.

        Raises:
            DecodeError: by cause.
        """
        return self._run(protocol.models_flow(self._settings))

    @_keywords_of(protocol.model_flow)
    def model(self, name: str, **size: Unpack[PixelSize]) -> dict[str, Any]:
        """One model's configuration, compression ratios, statistics, frame rule, modes, memory, limits and state.

        Args:
            size: see ``PixelSize``; with it, ``for_size`` holds the ``latent_shape`` that decodes to pictures of that size.

        Raises:
            ValueError: if only one of height and width is given.
            NotFoundError: if there is none of that name.
            UnprocessableError: if nothing decodes to that size; the message names the nearest.
            DecodeError: by cause.
        """
        return self._run(protocol.model_flow(self._settings, name, **size))

    def healthy(self) -> bool:
        """Whether the service answers at all; one short attempt.

        Raises:
            AuthError: if it wants another API key.
        """
        return self._run(protocol.probe_flow(self._settings, "/healthz"))

    def ready(self) -> bool:
        """Whether the service would decode now; one short attempt.

        Raises:
            AuthError: if it wants another API key.
        """
        return self._run(protocol.probe_flow(self._settings, "/readyz"))

    @_keywords_of(protocol.wait_until_ready_flow)
    def wait_until_ready(self, timeout_s: float, poll_s: float = protocol.PROBE_INTERVAL_S) -> None:
        """Return as soon as the service would decode.

        Raises:
            NotReadyError: if it would not within ``timeout_s`` seconds; the message says what stood in the way.
            AuthError: if it wants another API key.
        """
        self._run(protocol.wait_until_ready_flow(self._settings, timeout_s, poll_s))

    def close(self) -> None:
        """Close the connections, unless they are those of your own ``http_client``."""
        if self._owns_http:
            self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, flow: Flow[T]) -> T:
        outcome: Any = None
        failure: Exception | None = None
        while True:
            try:
                step = flow.throw(failure) if failure is not None else flow.send(outcome)
            except StopIteration as stop:
                result: T = stop.value
                return result
            outcome, failure = None, None
            try:
                if isinstance(step, Sleep):
                    time.sleep(step.seconds)
                else:
                    outcome = self._exchange(step)
            except httpx2.HTTPError as error:
                failure = error

    def _exchange(self, send: Send) -> Reply:
        with self._http.stream(
            send.method, send.url, content=send.content, headers=dict(send.headers), timeout=send.timeout
        ) as response:
            receiver = Receiver(send, response)
            for piece in response.iter_bytes():
                receiver.add(piece)
            return receiver.reply()


class AsyncDecodeClient(_Client):
    """``DecodeClient`` for asyncio: the same arguments, methods and errors, with ``await``.

    Args:
        http_client: your own ``httpx2.AsyncClient``; the rest as in ``DecodeClient``.
    """

    def __init__(
        self,
        base_url: str | None = None,
        *,
        api_key: str | None = None,
        timeout: Timeout = 300.0,
        max_retries: int = 2,
        default_headers: Mapping[str, str] | None = None,
        http_client: httpx2.AsyncClient | None = None,
    ) -> None:
        super().__init__(base_url, api_key, timeout, max_retries, default_headers)
        self._owns_http = http_client is None
        self._http = http_client if http_client is not None else httpx2.AsyncClient(follow_redirects=True)

    @_keywords_of(protocol.decode_flow)
    async def decode(self, latents: Latents, **options: Unpack[DecodeOptions]) -> DecodeResult:
        """As ``DecodeClient.decode``."""
        _refuse_unknown("decode", options, DecodeOptions)
        return await self._run(protocol.decode_flow(self._settings, latents, **options))

    @_keywords_of(protocol.plan_flow)
    async def plan(self, shape: Sequence[int], **options: Unpack[PlanOptions]) -> dict[str, Any]:
        """As ``DecodeClient.plan``."""
        _refuse_unknown("plan", options, PlanOptions)
        return await self._run(protocol.plan_flow(self._settings, shape, **options))

    async def models(self) -> list[dict[str, Any]]:
        """As ``DecodeClient.models``."""
        return await self._run(protocol.models_flow(self._settings))

    @_keywords_of(protocol.model_flow)
    async def model(self, name: str, **size: Unpack[PixelSize]) -> dict[str, Any]:
        """As ``DecodeClient.model``."""
        return await self._run(protocol.model_flow(self._settings, name, **size))

    async def healthy(self) -> bool:
        """As ``DecodeClient.healthy``."""
        return await self._run(protocol.probe_flow(self._settings, "/healthz"))

    async def ready(self) -> bool:
        """As ``DecodeClient.ready``."""
        return await self._run(protocol.probe_flow(self._settings, "/readyz"))

    @_keywords_of(protocol.wait_until_ready_flow)
    async def wait_until_ready(self, timeout_s: float, poll_s: float = protocol.PROBE_INTERVAL_S) -> None:
        """As ``DecodeClient.wait_until_ready``."""
        await self._run(protocol.wait_until_ready_flow(self._settings, timeout_s, poll_s))

    async def aclose(self) -> None:
        """Close the connections, unless they are those of your own ``http_client``."""
        if self._owns_http:
            await self._http.aclose()

    close = aclose

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    async def _run(self, flow: Flow[T]) -> T:
        outcome: Any = None
        failure: Exception | None = None
        while True:
            try:
                step = flow.throw(failure) if failure is not None else flow.send(outcome)
            except StopIteration as stop:
                result: T = stop.value
                return result
            outcome, failure = None, None
            try:
                if isinstance(step, Sleep):
                    await asyncio.sleep(step.seconds)
                else:
                    outcome = await self._exchange(step)
            except httpx2.HTTPError as error:
                failure = error

    async def _exchange(self, send: Send) -> Reply:
        async with self._http.stream(
            send.method, send.url, content=send.content, headers=dict(send.headers), timeout=send.timeout
        ) as response:
            receiver = Receiver(send, response)
            async for piece in response.aiter_bytes():
                receiver.add(piece)
            return receiver.reply()
