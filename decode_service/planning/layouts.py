"""Layouts: from latents as callers hold them to latents as ``vae.decode`` takes them, as pure arithmetic on shapes.

Latents of one model come unbatched, with frames before channels, or packed into tokens, depending on the pipeline that
made them. What is here says which permutation of elements undoes that, from the shape and what the request says of it,
before anything is computed. No values are looked at, and nothing is guessed: where two readings of a shape fit, ``auto``
is an error that names both.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Any

import numpy as np
from decode_client.wire import LAYOUTS

from decode_service.errors import InvalidLatentsError, InvalidRequestError
from decode_service.planning.spec import ModelSpec, Packing
from decode_service.planning.temporal import FrameRule

# B batch, C channels, T latent frames, H and W latent rows and columns, N tokens, P side of a patch.

_VIDEO_LAYOUTS = ("BCTHW", "CTHW", "BTCHW", "TCHW")
_PICTURE_LAYOUTS = ("BCHW", "CHW")


@dataclass(frozen=True, slots=True)
class Layout:
    """What a request says of how its latents lie; see ``decode_client.wire.DecodeRequest`` for the fields."""

    name: str = "auto"
    height: int | None = None
    width: int | None = None
    frames: int | None = None
    layers: int | None = None


@dataclass(frozen=True, slots=True)
class Arrangement:
    """The permutation that turns latents as sent into latents as ``vae.decode`` takes them.

    Attributes:
        split: the extents as sent, with packed dimensions taken apart.
        order: the dimensions of ``split`` in the order in which the result has them.
        latent_shape: the result's shape, (B,C,H,W) or (B,C,T,H,W).
        skip: leading entries of dimension 1 of ``split`` that are left out.
    """

    split: tuple[int, ...]
    order: tuple[int, ...]
    latent_shape: tuple[int, ...]
    skip: int = 0

    def apply(self, latents: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """The latents in ``latent_shape``; a view where no element moves."""
        parts = latents.reshape(self.split)[:, self.skip :]
        return parts.transpose(self.order).reshape(self.latent_shape)


def layouts(spec: ModelSpec) -> tuple[str, ...]:
    """The layouts that a model takes, besides ``auto``."""
    pictures = _PICTURE_LAYOUTS if 4 in spec.latent_ndims() else ()
    videos = _VIDEO_LAYOUTS if 5 in spec.latent_ndims() else ()
    packing = spec.packing
    packed = () if packing is None else ("packed", "patchified") if packing.grid else ("packed",)
    return (*pictures, *videos, *packed)


def arrange(spec: ModelSpec, shape: tuple[int, ...], layout: Layout) -> Arrangement:
    """How latents of ``shape`` become those that ``vae.decode`` of the model takes.

    ``auto`` reads 5-D latents as (B,C,T,H,W) and never otherwise; 4-D ones as (B,C,H,W), (C,T,H,W) or patchified, and 3-D
    ones as (C,H,W) or packed, whichever the model takes and the number of channels fits. Unbatched latents become a batch
    of 1. Whether the model can decode the result is for ``validate_latents`` to say.

    Raises:
        InvalidRequestError: the layout is not one of the model's, an extent in pixels is missing or does not fit, or two
            layouts fit; the message says what would be right.
        InvalidLatentsError: the shape does not fit the layout.
    """
    name = layout.name
    if name not in LAYOUTS:
        raise InvalidRequestError(f"layout must be one of {', '.join(LAYOUTS)}, got {name!r}", param="layout")
    taken = layouts(spec)
    if name != "auto" and name not in taken:
        raise InvalidRequestError(
            f"{spec.name} ({spec.class_name}) does not take layout {name}: it takes {_listed(('auto', *taken), 'or')}",
            param="layout",
        )
    if name == "auto":
        name = _recognised(spec, shape, layout)
    if layout.layers is not None and (name != "packed" or not (spec.packing and spec.packing.layers)):
        raise InvalidRequestError(
            f"layers goes with packed latents of a model whose pipeline packs several pictures into one sequence, not with "
            f"layout {name or 'auto'} of {spec.name} ({spec.class_name})",
            param="layers",
        )
    if name == "packed":
        assert spec.packing is not None
        return _packed(spec, spec.packing, shape, layout)
    if name == "":
        # No reading fits: as it stands it is refused by ``validate_latents``, which knows what would be right.
        return Arrangement(shape, tuple(range(len(shape))), shape)
    made = (
        _patchified(spec, shape) if name == "patchified" else _plain(spec, shape, name, explicit=layout.name != "auto")
    )
    if made.latent_shape[1] == spec.latent_channels:
        _check_extents(spec, made.latent_shape, layout)
    return made


def _recognised(spec: ModelSpec, shape: tuple[int, ...], layout: Layout) -> str:
    """The layout that ``auto`` is for latents of ``shape``, or nothing where ``validate_latents`` has the better words.

    Raises:
        InvalidRequestError, InvalidLatentsError: two layouts fit, or none.
    """
    if len(shape) == 5 and 5 in spec.latent_ndims():
        return "BCTHW"
    if len(shape) == 4:
        return _recognised_4d(spec, shape)
    if len(shape) == 3:
        return _recognised_3d(spec, shape, layout)
    return ""


def _recognised_4d(spec: ModelSpec, shape: tuple[int, ...]) -> str:
    channels, taken = spec.latent_channels, layouts(spec)
    leading = shape[0] == channels and spec.frame_rule is not None and spec.frame_rule.problem(shape[1]) is None
    if shape[1] == channels:
        if leading:
            likely = [name for name in taken if name in ("BCHW", "CTHW", "TCHW")]
            raise InvalidRequestError(
                f"{list(shape)} has {channels} in dimensions 0 and 1, so that each of them could be the channels: say which "
                f"by layout {_listed(likely, 'or')}",
                param="layout",
            )
        if "BCHW" in taken:
            return "BCHW"
    elif leading:
        return "CTHW"
    packing = spec.packing
    if packing is not None and packing.grid and shape[1] in _token_channels(spec, packing):
        return "patchified"
    if "BCHW" in taken:
        return ""
    hint = "; frames of one video, channels second, are layout TCHW" if shape[1] == channels else ""
    raise InvalidLatentsError(
        f"{spec.name} ({spec.class_name}) takes 5-D (B,C,T,H,W) latents with {channels} channels, or 4-D (C,T,H,W) ones of "
        f"one video, got 4 dimensions {list(shape)}{hint}",
        param="latents.shape",
    )


def _recognised_3d(spec: ModelSpec, shape: tuple[int, ...], layout: Layout) -> str:
    channels, taken, ratio = spec.latent_channels, layouts(spec), spec.spatial_ratio
    tokens = spec.packing is not None and shape[2] in _token_channels(spec, spec.packing)
    sized = layout.height is not None or layout.width is not None
    picture = "CHW" in taken and shape[0] == channels
    if picture and tokens and sized:
        # A square of tokens that happens to look like a picture, or the reverse: the extents in pixels tell them apart.
        picture = layout.height in (None, shape[1] * ratio) and layout.width in (None, shape[2] * ratio)
    if picture:
        return "CHW"
    if tokens:
        return "packed"
    forms = [f"{ndim}-D {form}" for ndim, form in ((4, "(B,C,H,W)"), (5, "(B,C,T,H,W)")) if ndim in spec.latent_ndims()]
    if "CHW" in taken:
        forms.append("3-D (C,H,W)")
    if spec.packing is not None:
        sides = _listed([str(count) for count in _token_channels(spec, spec.packing)], "or")
        forms.append(f"packed (B,tokens,{sides})")
    raise InvalidLatentsError(
        f"{spec.name} ({spec.class_name}) takes {_listed(forms, 'or')} latents with {channels} channels, got 3 dimensions "
        f"{list(shape)}",
        param="latents.shape",
    )


def _plain(spec: ModelSpec, shape: tuple[int, ...], name: str, *, explicit: bool) -> Arrangement:
    """Dimensions in another order, or without a batch."""
    if len(shape) != len(name):
        raise InvalidLatentsError(
            f"layout {name} has {len(name)} dimensions, got {len(shape)}: {list(shape)}", param="latents.shape"
        )
    channels = shape[name.index("C")]
    if explicit and channels != spec.latent_channels:
        raise InvalidLatentsError(
            f"{spec.name} ({spec.class_name}) has {spec.latent_channels} latent channels, but in layout {name} "
            f"{list(shape)} has {channels} (dimension {name.index('C')})",
            param="latents.shape",
        )
    split, letters = (shape, name) if "B" in name else ((1, *shape), "B" + name)
    order = tuple(letters.index(letter) for letter in ("BCTHW" if "T" in name else "BCHW"))
    return Arrangement(split, order, tuple(split[index] for index in order))


def _patchified(spec: ModelSpec, shape: tuple[int, ...]) -> Arrangement:
    """(B,C*P*P,H/P,W/P): ``_unpatchify_latents`` of ``Flux2Pipeline``."""
    assert spec.packing is not None
    counts = _token_channels(spec, spec.packing)
    if len(shape) != 4 or shape[1] not in counts:
        wanted = _listed([f"(B,{count},rows,columns)" for count in counts], "or")
        raise InvalidLatentsError(
            f"patchified latents of {spec.name} ({spec.class_name}) are {wanted}, got {list(shape)}",
            param="latents.shape",
        )
    batch, _, rows, columns = shape
    side = counts[shape[1]]
    return Arrangement(
        (batch, spec.latent_channels, side, side, rows, columns),
        (0, 1, 4, 2, 5, 3),
        (batch, spec.latent_channels, rows * side, columns * side),
    )


def _packed(spec: ModelSpec, packing: Packing, shape: tuple[int, ...], layout: Layout) -> Arrangement:
    """(B,N,C*P*P), row by row and frame by frame: ``_unpack_latents`` of the pipelines."""
    video = "BCHW" not in layouts(spec)
    counts = _token_channels(spec, packing)
    if len(shape) != 3 or shape[2] not in counts:
        wanted = _listed(
            [f"(B,tokens,{count}), a token being {side}x{side} latent cells" for count, side in counts.items()], "or"
        )
        raise InvalidLatentsError(
            f"packed latents of {spec.name} ({spec.class_name}) are {wanted}; got {list(shape)}", param="latents.shape"
        )
    side = counts[shape[2]]
    height, width = _needed(layout.height, "height"), _needed(layout.width, "width")
    rows, columns = (_tokens_along(spec, side, *extent) for extent in ((height, "height"), (width, "width")))
    batch, tokens, _ = shape
    pictures = 1
    if video:
        assert spec.frame_rule is not None
        pictures = _latent_frames(spec, spec.frame_rule, _needed(layout.frames, "frames"))
    elif layout.frames not in (None, 1):
        raise InvalidRequestError(
            f"packed latents of {spec.name} ({spec.class_name}) are pictures of 1 frame, not of {layout.frames}; send a "
            "video as (B,C,T,H,W)",
            param="frames",
        )
    elif layout.layers is not None:
        # The pipeline's own count: the picture that is taken apart comes first, and is not one of the layers.
        pictures = layout.layers + 1
    expected = pictures * rows * columns
    if tokens != expected:
        of_what = (
            f"{layout.frames} frames of " if video else f"1 + {layout.layers} pictures of " if layout.layers else ""
        )
        times = f"{pictures} x " if pictures > 1 else ""
        raise InvalidLatentsError(
            f"{of_what}{height} x {width} px are {times}{rows} x {columns} = {expected} tokens of "
            f"{side * spec.spatial_ratio} px, got {tokens} in {list(shape)}",
            param="latents.shape",
        )
    extents = (rows * side, columns * side)
    split = (batch, pictures, rows, columns, spec.latent_channels, side, side)
    if video:
        return Arrangement(split, (0, 4, 1, 2, 5, 3, 6), (batch, spec.latent_channels, pictures, *extents))
    skip = int(layout.layers is not None)
    return Arrangement(split, (0, 1, 4, 2, 5, 3, 6), (batch * (pictures - skip), spec.latent_channels, *extents), skip)


def _token_channels(spec: ModelSpec, packing: Packing) -> dict[int, int]:
    """Sides of a patch by the channels that a token of such patches has."""
    return {spec.latent_channels * side**2: side for side in packing.patches}


def _needed(extent: int | None, name: str) -> int:
    if extent is None:
        what = "pixel frames of the decoded video" if name == "frames" else f"{name} of the decoded picture in pixels"
        raise InvalidRequestError(f"packed latents do not tell their extents: {name} is needed, the {what}", param=name)
    return extent


def _tokens_along(spec: ModelSpec, side: int, extent: int, name: str) -> int:
    """Tokens along one axis of ``extent`` pixels."""
    unit = spec.spatial_ratio * side
    if extent % unit:
        # Pipelines round such sizes down by themselves, and the picture is smaller than was asked for.
        near = [count for count in (extent - extent % unit, extent - extent % unit + unit) if count]
        raise InvalidRequestError(
            f"{name} must be a multiple of the {unit} px of a token ({side}x{side} cells of {spec.spatial_ratio} px), got "
            f"{extent}: {_listed([str(count) for count in near], 'or')} would be, and pipelines round down",
            param=name,
        )
    return extent // unit


def _latent_frames(spec: ModelSpec, rule: FrameRule, frames: int) -> int:
    """Latent frames of ``frames`` pixel frames; frame rules never decrease."""
    count = bisect_left(range(1, frames + 1), frames, key=rule.frames) + 1
    if rule.frames(count) != frames:
        near = [rule.frames(other) for other in (count - 1, count) if other >= 1]
        raise InvalidRequestError(
            f"{spec.name} ({spec.class_name}) decodes {rule.describe()} frames, never {frames}: "
            f"{_listed([str(other) for other in near], 'or')} would be, and pipelines round down",
            param="frames",
        )
    return count


def _check_extents(spec: ModelSpec, latent_shape: tuple[int, ...], layout: Layout) -> None:
    """Extents in pixels that were given although the shape tells them must be those of the shape."""
    rule = spec.frame_rule
    frames = 1
    if len(latent_shape) == 5 and rule is not None:
        if rule.problem(latent_shape[2]) is not None:
            return
        frames = rule.frames(latent_shape[2])
    told = {
        "height": latent_shape[-2] * spec.spatial_ratio,
        "width": latent_shape[-1] * spec.spatial_ratio,
        "frames": frames,
    }
    for name, extent in told.items():
        given = getattr(layout, name)
        if given is not None and given != extent:
            raise InvalidRequestError(
                f"{name} is {given}, but these latents decode to {name} {extent}; leave it out, or say the layout if the "
                f"latents are packed",
                param=name,
            )


def _listed(options: list[str] | tuple[str, ...], conjunction: str) -> str:
    return options[0] if len(options) == 1 else f"{', '.join(options[:-1])} {conjunction} {options[-1]}"
