"""What every family is held to, on ranks that are threads: quick enough for many families and shapes.

What they measure is in the README's support matrix (``measurements``). Real processes and gloo are what ``test_exactness`` uses; the arithmetic is the same.
"""

from __future__ import annotations

import copy
from collections.abc import Collection
from typing import Any

import numpy as np
import torch

from decode_service.decoding.communicator import Communicator, SoloCommunicator
from decode_service.decoding.families import family_class
from decode_service.decoding.rank import RankDecoder, RankPart
from decode_service.decoding.rewrites import NAMES, apply_rewrites
from decode_service.planning.conditioning import Conditioning
from decode_service.planning.layouts import Layout, arrange
from decode_service.planning.plan import DecodePlan, PixelFormat
from decode_service.planning.planner import Policy, make_plan
from decode_service.planning.spec import StrideTiles
from tests.decoding import measurements
from tests.decoding.harness import assemble
from tests.decoding.threads import on_ranks

CPU = torch.device("cpu")

#: As the model's own ``decode`` returns them, so that a reference needs no conversion.
MODEL_RANGE = PixelFormat("float32", "model")


def decoded(
    vae: Any,
    latents: torch.Tensor,
    mode: str,
    *,
    ranks: int = 1,
    tiles: StrideTiles | None = None,
    pixels: PixelFormat = MODEL_RANGE,
    denormalize: bool = False,
    layout: Layout | None = None,
    conditioning: Conditioning | None = None,
    rewrites: Collection[str] = NAMES,
    **wish: Any,
) -> tuple[DecodePlan, torch.Tensor]:
    """``latents`` decoded by a group of ``ranks`` threads that share a copy of ``vae``, with the ``rewrites`` as served."""
    family = family_class(type(vae).__name__)
    vae = rewritten(vae, rewrites)
    spec = family(vae, "tiny", tiles).spec
    arrangement = arrange(spec, tuple(latents.shape), layout or Layout())
    plan = make_plan(spec, arrangement.latent_shape, group_size=ranks, policy=Policy(), mode=mode, strict=True, **wish)

    def work(communicator: Communicator) -> RankPart:
        decoder = RankDecoder(family(vae, "tiny", tiles), device=CPU)
        decoder.attach(communicator if ranks > 1 else SoloCommunicator())
        return decoder.decode(
            plan,
            latents.numpy(),
            "float32",
            denormalize=denormalize,
            pixels=pixels,
            arrangement=arrangement,
            conditioning=conditioning,
        )

    if plan.needs_group:
        parts = on_ranks(ranks, work)
    else:
        parts = [work(SoloCommunicator())]
    assert all(part.finite for part in parts)
    return plan, torch.from_numpy(np.ascontiguousarray(assemble(plan, parts, pixels)))


def rewritten(vae: Any, rewrites: Collection[str] = NAMES) -> Any:
    """A copy of ``vae`` with those of the ``rewrites`` that fit it; the original stays the reference. Without any, itself."""
    if not rewrites:
        return vae
    vae = copy.deepcopy(vae)
    for rewrite in apply_rewrites(vae, family_class(type(vae).__name__).structure, enabled=rewrites):
        assert "differs" not in rewrite.reason, rewrite
    return vae


def is_varied(pixels: torch.Tensor) -> bool:
    """Whether a wrong halo, blend or place would show in ``pixels`` (...,H,W): 3000 times as far off as the tolerance.

    What differs between channels or frames alone does not count.
    """
    return bool(pixels.std(dim=(-2, -1)).mean() >= 0.03)


def check_exact_modes(
    vae: Any, latents: torch.Tensor, expected: torch.Tensor, *, ranks: tuple[int, ...] = (2, 3), tolerance: float = 1e-5
) -> None:
    """``direct`` and every axis that the family declares exact give ``expected``, on every group size.

    ``latents`` should have extents that no group size divides.
    """
    assert is_varied(expected), "a flat reference would prove nothing"
    spec = family_class(type(vae).__name__)(vae, "tiny", None).spec
    served = rewritten(vae)
    wrong, found = [], []
    runs = [("direct", 1)] + [(f"spatial_shard_{axis}", size) for axis in spec.exact_axes for size in ranks]
    for mode, size in runs:
        plan, picture = decoded(served, latents, mode, ranks=size, rewrites=())
        assert plan.mode == mode and plan.ranks == size
        assert picture.shape == expected.shape, (mode, size, picture.shape, expected.shape)
        difference = (picture - expected).abs().max().item()
        found.append((mode, size, difference))
        if not difference <= tolerance:
            wrong.append(f"{mode} on {size}: {difference:.2e}")
    assert not wrong, "; ".join(wrong)
    for mode, size, difference in found:
        measurements.judge(type(vae).__name__, mode, size, difference, tolerance)


def check_batch(vae: Any, latents: torch.Tensor, *, ranks: int = 2, tolerance: float = 1e-5) -> None:
    """``batch`` gives every item the pixels that ``direct``, which other checks compare with diffusers, gives it alone."""
    served = rewritten(vae)
    items = [decoded(served, item.unsqueeze(0), "direct", rewrites=())[1] for item in latents]
    assert (items[0] - items[1]).abs().max() > 1e-2, "items that are alike would not show which is which"
    plan, pictures = decoded(served, latents, "batch", ranks=ranks, rewrites=())
    assert plan.mode == "batch" and plan.ranks == ranks
    difference = (pictures - torch.cat(items)).abs().max().item()
    assert difference <= tolerance, f"batch on {ranks}: {difference:.2e}"
    measurements.judge(type(vae).__name__, "batch", ranks, difference, tolerance)


def check_tiles(
    vae: Any,
    latents: torch.Tensor,
    expected: torch.Tensor,
    *,
    tiles: StrideTiles | None = None,
    ranks: tuple[int, ...] = (1, 2, 3),
    tolerance: float = 1e-5,
) -> None:
    """``tile`` gives ``expected`` (the reference's own tiled decode) on every group size, with several tiles."""
    assert is_varied(expected), "a flat reference would prove nothing"
    served = rewritten(vae)
    for size in ranks:
        plan, picture = decoded(served, latents, "tile", ranks=size, tiles=tiles, rewrites=())
        assert plan.tiles is not None and plan.tiles.count > 1, "one tile would prove nothing"
        assert picture.shape == expected.shape, (size, picture.shape, expected.shape)
        difference = (picture - expected).abs().max().item()
        assert difference <= tolerance, f"tile on {size}: {difference:.2e}"
        measurements.judge(type(vae).__name__, "tile", size, difference, tolerance)
