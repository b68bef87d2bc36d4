"""What the OpenAPI document says of bodies that FastAPI cannot derive from types: msgpack, files and errors.

The names of dtypes, modes and formats are the wire format's own, so that the document cannot drift from it.
"""

from __future__ import annotations

from typing import Any

from decode_client.wire import (
    COLLECTS,
    FORMATS,
    LATENT_DTYPES,
    LAYOUTS,
    MAX_SEED,
    MODES,
    MSGPACK_CONTENT_TYPE,
    PIXEL_DTYPES,
    RANGES,
)

from decode_service.http.requests import SIZE_PARAMETERS, PlanRequest
from decode_service.media.formats import FORMATS as FILE_FORMATS

Schema = dict[str, Any]


def _tensor(dtypes: tuple[str, ...], shapes: str) -> Schema:
    return {
        "type": "object",
        "required": ["dtype", "shape", "data"],
        "properties": {
            "dtype": {"type": "string", "enum": list(dtypes)},
            "shape": {"type": "array", "items": {"type": "integer", "minimum": 1}, "description": shapes},
            "data": {
                "type": "string",
                "format": "binary",
                "description": "msgpack bin: little-endian elements in C order, exactly as many as the shape has.",
            },
        },
    }


_DECODE_SCHEMA: Schema = {
    "type": "object",
    "required": ["latents"],
    "additionalProperties": False,
    "properties": {
        "latents": _tensor(
            LATENT_DTYPES,
            "(B,C,H,W), or (B,C,T,H,W) with a time axis; the same without B, for a batch of 1; or as `layout` says.",
        ),
        "model": {"type": "string", "description": "The model's name; left out, the one that is served."},
        "layout": {
            "type": "string",
            "enum": list(LAYOUTS),
            "default": "auto",
            "description": "How the latents lie. auto: told from the shape, an error where two readings fit; frames before "
            "channels are never guessed. packed: a sequence of tokens (B,N,C*p*p), as pipelines of FLUX, Qwen-Image and LTX "
            "hold them; it needs height and width, and frames of a video. patchified: (B,C*p*p,H/p,W/p), FLUX.2.",
        },
        **{
            name: {"type": "integer", "minimum": 1, "maximum": 2**31 - 1, "description": description}
            for name, description in (
                ("height", "Of the decoded picture, in pixels. packed needs it; elsewhere it is checked."),
                ("width", "Of the decoded picture, in pixels. packed needs it; elsewhere it is checked."),
                ("frames", "Pixel frames of the decoded video. packed needs it for videos; elsewhere it is checked."),
                ("layers", "Pictures that each packed item gives, of Qwen-Image-Layered: the pipeline's `layers`."),
            )
        },
        "denormalize": {
            "type": "boolean",
            "default": False,
            "description": "true: the latents are as a denoiser produces them, apply the model's own statistics first. "
            "false: they are as the VAE's decode takes them.",
        },
        "timestep": {
            "type": "number",
            "minimum": 0,
            "maximum": 1,
            "description": "Of decoders with timestep conditioning (LTX): a pipeline's decode_timestep. Left out, the "
            "pipeline's default, 0.",
        },
        "noise_scale": {
            "type": "number",
            "minimum": 0,
            "maximum": 1,
            "description": "Share of noise mixed into latents of such decoders: decode_noise_scale. Left out, the timestep.",
        },
        "seed": {"type": "integer", "minimum": 0, "maximum": MAX_SEED, "default": 0, "description": "Of that noise."},
        "mode": {"type": "string", "enum": list(MODES), "default": "auto"},
        "strict": {"type": "boolean", "description": "Whether a mode that cannot run is an error, not a fallback."},
        "collect": {"type": "string", "enum": list(COLLECTS), "description": "How pixels come back from the ranks."},
        "chunk": {"type": "integer", "minimum": 1, "description": "Latent frames per decoder pass after the first."},
        "output": {
            "type": "object",
            "additionalProperties": False,
            "properties": {
                "format": {"type": "string", "enum": list(FORMATS), "default": "tensor"},
                "dtype": {
                    "type": "string",
                    "enum": list(PIXEL_DTYPES),
                    "default": "uint8",
                    "description": "Of a tensor: uint8 is channels last, float dtypes are channels first.",
                },
                "range": {
                    "type": "string",
                    "enum": list(RANGES),
                    "default": "unit",
                    "description": "Of a float tensor: [-1, 1], or the values exactly as the model gives them.",
                },
                "fps": {"type": "number", "exclusiveMinimum": 0, "default": 16, "description": "Of mp4."},
                "quality": {
                    "type": "integer",
                    "minimum": 1,
                    "maximum": 100,
                    "description": "Of jpeg, webp (100 is lossless; both 95 by default) and mp4 (x264 CRF "
                    "1 + (100 - quality) / 2; CRF 18 by default).",
                },
            },
        },
        "deadline_ms": {
            "type": "number",
            "exclusiveMinimum": 0,
            "description": "Milliseconds from the request's arrival after which nobody waits for the pixels.",
        },
    },
}

_TENSOR_REPLY_SCHEMA: Schema = {
    "type": "object",
    "required": ["plan", "timings", "model", "request_id", "pixels"],
    "properties": {
        "plan": {"type": "object", "description": "The plan that ran, why, and whether the model's family is tested."},
        "timings": {"type": "object", "additionalProperties": {"type": "number"}, "description": "Milliseconds."},
        "compiled": {"type": "boolean", "description": "Whether every call of the decoder ran compiled."},
        "model": {"type": "string"},
        "request_id": {"type": "string"},
        "digests": {"type": "array", "items": {"type": "string"}, "description": "One per rank, with broadcast."},
        "pixels": _tensor(PIXEL_DTYPES, "uint8: [B,H,W,C] or [B,F,H,W,C]; floats: [B,C,H,W] or [B,C,F,H,W]."),
    },
}

_ERROR_SCHEMA: Schema = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["type", "message", "param", "request_id"],
            "properties": {
                "type": {"type": "string", "description": "Stable name of the kind of error."},
                "message": {"type": "string", "description": "What was wrong, and what would be right."},
                "param": {"type": ["string", "null"], "description": "The field at fault, dotted."},
                "request_id": {"type": "string"},
            },
        }
    },
}

_REPLY_HEADERS: Schema = {
    name: {"schema": {"type": "string"}, "description": description}
    for name, description in (
        ("X-Request-Id", "The request's id: the caller's own where it sent a sane one."),
        ("X-Decode-Plan", "The plan that ran, as compact JSON; long lists are left out."),
        ("X-Decode-Compiled", "Whether every call of the decoder ran compiled: true or false."),
        ("X-Decode-Model", "The model's name."),
        ("X-Decode-Shape", "Shape of the decoded pixels, as JSON."),
        ("X-Decode-Dtype", "Dtype of the decoded pixels."),
        ("X-Decode-Video", "With mp4: codec, pixel format, colour matrix, size, frames and rate."),
        ("Server-Timing", "Where the time went: stage;dur=milliseconds."),
    )
}

DECODE_REQUEST: Schema = {
    "parameters": [
        {
            "name": "X-Client-Id",
            "in": "header",
            "required": False,
            "schema": {"type": "string", "maxLength": 128},
            "description": "Who asks: callers take turns in the queue. Left out, it is the caller's address.",
        }
    ],
    "requestBody": {"required": True, "content": {MSGPACK_CONTENT_TYPE: {"schema": _DECODE_SCHEMA}}},
}

MODEL_PARAMETERS: Schema = {
    "parameters": [
        {
            "name": name,
            "in": "query",
            "required": False,
            "schema": {"type": "integer", "minimum": 1},
            "description": description,
        }
        for name, description in zip(
            SIZE_PARAMETERS,
            (
                "Pixels. With width: the reply's `for_size` tells the latents that decode to this size, or 422 the nearest.",
                "Pixels.",
                "Pixel frames of a clip; left out, a picture or the shortest clip.",
                "Items; 1 by default.",
            ),
            strict=True,
        )
    ]
}

PLAN_REQUEST: Schema = {
    "requestBody": {"required": True, "content": {"application/json": {"schema": PlanRequest.model_json_schema()}}}
}

DECODE_RESPONSES: dict[int | str, Schema] = {
    200: {
        "description": "The pixels, as `output.format` asked.",
        "headers": _REPLY_HEADERS,
        "content": {
            MSGPACK_CONTENT_TYPE: {"schema": _TENSOR_REPLY_SCHEMA},
            **{
                file_format.media_type: {"schema": {"type": "string", "format": "binary"}}
                for file_format in FILE_FORMATS.values()
            },
        },
    }
}

ERROR_RESPONSES: dict[int | str, Schema] = {
    "default": {"description": "Any error.", "content": {"application/json": {"schema": _ERROR_SCHEMA}}}
}
