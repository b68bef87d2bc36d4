"""Every error that a caller of the service can see; each class carries its HTTP status and its public type.

The message says what would be right, because it is all that a caller gets. This module knows nothing of HTTP libraries:
``decode_service.http`` turns an error into ``{"error": {"type", "message", "param", "request_id"}}``.
"""

from __future__ import annotations


class DecodeServiceError(Exception):
    """Base of all errors that are answered to a caller.

    Attributes:
        status: HTTP status code.
        type: stable, machine-readable name; part of the public protocol.
        param: the request field at fault, dotted (``latents.shape``), or None.
        retry_after_s: seconds after which the same request may succeed, or None where it cannot.
    """

    status: int = 500
    type: str = "internal_error"
    retry_after_s: float | None = None

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if retry_after_s is not None:
            self.retry_after_s = retry_after_s


class MalformedRequestError(DecodeServiceError):
    """The body is not what its content type says (truncated msgpack, not a map, ...)."""

    status = 400
    type = "malformed_request"


class UnsupportedMediaTypeError(DecodeServiceError):
    """The content type is not one that the route reads."""

    status = 415
    type = "unsupported_media_type"


class PayloadTooLargeError(DecodeServiceError):
    """The body is larger than ``limits.max_body_bytes``."""

    status = 413
    type = "payload_too_large"


class ModelNotFoundError(DecodeServiceError):
    """The application does not serve a model of that name."""

    status = 404
    type = "model_not_found"


class InvalidRequestError(DecodeServiceError):
    """A field is unknown, of the wrong type or out of range."""

    status = 422
    type = "invalid_request"


class InvalidLatentsError(InvalidRequestError):
    """The latents do not fit the model: channels, dimensions, extents, dtype or size."""

    type = "invalid_latents"


class NonFiniteLatentsError(InvalidLatentsError):
    """The latents hold NaN or Inf; decoding them could only give a black picture."""

    type = "non_finite_latents"


class OutputTooLargeError(InvalidRequestError):
    """The decoded pixels would exceed ``limits.max_output_pixels``."""

    type = "output_too_large"


class UnsupportedModeError(InvalidRequestError):
    """The forced mode cannot decode this request, and the request or the model does not allow another."""

    type = "unsupported_mode"


class UnsupportedOutputError(InvalidRequestError):
    """The output format cannot hold these pixels (several images in one PNG, alpha in JPEG, ...)."""

    type = "unsupported_output"


class QueueFullError(DecodeServiceError):
    """Too many requests wait, or their bodies take too much memory; nothing was started for this one."""

    status = 503
    type = "queue_full"
    retry_after_s = 2.0


class NotReadyError(DecodeServiceError):
    """The model is still loading or warming up, or its group is being rebuilt."""

    status = 503
    type = "not_ready"
    retry_after_s = 5.0


class DeadlineExceededError(DecodeServiceError):
    """The request's deadline passed before its pixels were ready."""

    status = 504
    type = "deadline_exceeded"


class OutOfMemoryError(DecodeServiceError):
    """The decode does not fit the device's memory, also with the cheapest plan."""

    status = 507
    type = "out_of_memory"


class NonFiniteOutputError(DecodeServiceError):
    """Finite latents decoded to NaN or Inf, in float32 too."""

    type = "non_finite_output"


class GroupFailedError(DecodeServiceError):
    """A rank raised, died or stalled, and the retry failed as well."""

    status = 503
    type = "group_failed"
    retry_after_s = 10.0


class ConfigError(ValueError):
    """The configuration cannot work; raised before anything is started."""
