"""The built-in demo VAE: what the service decodes when nobody has given it a model.

A small trained `AutoencoderKLWan` in the diffusers layout, three latents that decode to recognisable pictures, and the
frames they were made from. Everything is a few megabytes and lies in this folder, so that a laptop without a network,
a test and a first `serve run` all have something real to decode.

Importing this module reads no file and imports neither torch nor numpy nor Pillow; each helper imports what it needs.
It knows nothing about decoding: it hands out paths and arrays.

Shape suffixes: B batch, C channels, T latent frames, F frames, H/W height and width (latent cells for latents, pixels
for frames).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

_FOLDER = Path(__file__).resolve().parent

DEMO_VAE_DIR: Path = _FOLDER / "vae"
"""diffusers layout: `AutoencoderKLWan.from_pretrained(DEMO_VAE_DIR)`."""

PHOTOS_DIR: Path = _FOLDER / "photos"
"""The photographs that the sample frames are cut from (see README.md for their sources)."""

SAMPLES: dict[str, Path] = {
    name: _FOLDER / "samples" / f"{name}.safetensors" for name in ("still", "landscape", "portrait")
}
"""Raw latents, key `latents`, (1, C, T, H, W): what `vae.decode` takes."""


@dataclass(frozen=True, slots=True)
class CameraMove:
    """A straight pan and zoom over one photograph.

    `start` and `end` are (left, top, width) of the visible box in photograph pixels; the box has the shape of the
    output, so its height follows. Frames lie evenly between the two.
    """

    photo: str
    start: tuple[float, float, float]
    end: tuple[float, float, float]
    frames: int
    height: int
    width: int

    def __post_init__(self) -> None:
        if self.frames % 4 != 1:
            raise ValueError(f"frames must be 1 + 4n for a VAE that packs four frames into one, not {self.frames}")
        if self.height % 8 or self.width % 8:
            raise ValueError(f"height and width must be multiples of 8 pixels, not {self.height}x{self.width}")

    def boxes(self) -> list[tuple[float, float, float, float]]:
        """(left, top, right, bottom) of each frame, in photograph pixels."""
        boxes = []
        for frame in range(self.frames):
            share = frame / max(self.frames - 1, 1)
            left, top, width = (a + (b - a) * share for a, b in zip(self.start, self.end, strict=True))
            boxes.append((left, top, left + width, top + width * self.height / self.width))
        return boxes


CAMERA_MOVES: dict[str, CameraMove] = {
    "still": CameraMove("coffee.jpg", (85, 0, 400), (85, 0, 400), frames=1, height=256, width=256),
    "landscape": CameraMove("rocket.jpg", (30, 70, 580), (50, 94, 540), frames=17, height=240, width=416),
    "portrait": CameraMove("astronaut.jpg", (70, 0, 290), (80, 3, 280), frames=17, height=416, width=240),
}


def load_sample(name: str) -> np.ndarray:
    """The raw latents of a sample, float32 (1, C, T, H, W).

    Raises KeyError for a name that is not in `SAMPLES`.
    """
    from safetensors.numpy import load_file

    return load_file(SAMPLES[name])["latents"].astype("float32")


def original_frames(name: str) -> np.ndarray:
    """The frames that a sample was made from, uint8 RGB (F, H, W, 3), cut afresh from the stored photograph.

    Raises KeyError for a name that is not in `SAMPLES`.
    """
    import numpy as np
    from PIL import Image

    move = CAMERA_MOVES[name]
    with Image.open(PHOTOS_DIR / move.photo) as file:
        photo = file.convert("RGB")
    frames = [
        photo.resize((move.width, move.height), Image.Resampling.LANCZOS, box=box, reducing_gap=None)
        for box in move.boxes()
    ]
    return np.stack([np.asarray(frame) for frame in frames])
