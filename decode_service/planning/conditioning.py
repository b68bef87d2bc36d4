"""What some decoders are given besides latents: a timestep, and noise that is mixed into the latents.

They are part of a request, not of its plan: they change the pixels and not how they are made.
"""

from __future__ import annotations

from dataclasses import dataclass

from decode_service.errors import InvalidRequestError
from decode_service.planning.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Conditioning:
    """The inputs of a decoder with timestep conditioning.

    Attributes:
        timestep: 0 to 1 (a pipeline's ``decode_timestep``).
        noise_scale: 0 to 1, the share of noise in the latents (``decode_noise_scale``).
        seed: of the noise, 0 to 2**64 - 1.
    """

    timestep: float
    noise_scale: float
    seed: int


def conditioning_of(
    spec: ModelSpec, timestep: float | None, noise_scale: float | None, seed: int | None
) -> Conditioning | None:
    """What a request asks for, completed as the pipelines do it; None for decoders without timestep conditioning.

    The timestep is the one at which the pipeline decodes by default, and the noise has the weight of the timestep. The
    seed is 0, so that the same request gives the same pixels.

    Raises:
        InvalidRequestError: a value is given to a decoder that takes none, or is out of range.
    """
    given = {"timestep": timestep, "noise_scale": noise_scale, "seed": seed}
    if spec.default_timestep is None:
        for name, value in given.items():
            if value is not None:
                raise InvalidRequestError(
                    f"{spec.name} ({spec.class_name}) has no timestep conditioning, so that {name} would change nothing: "
                    "leave it out",
                    param=name,
                )
        return None
    for name, value in given.items():
        most = 2**64 - 1 if name == "seed" else 1
        if value is not None and not 0 <= value <= most:
            raise InvalidRequestError(f"{name} must be from 0 to {most}, got {value}", param=name)
    at = spec.default_timestep if timestep is None else timestep
    return Conditioning(at, at if noise_scale is None else noise_scale, seed or 0)
