"""What every family is held to, on ranks that are threads: quick enough for many families and shapes.

What they measure is in the README's support matrix (``measurements``). Real processes and gloo are what ``test_exactness`` uses; the arithmetic is the same.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from decode_service.decoding.communicator import Communicator, SoloCommunicator
from decode_service.decoding.families import Family, family_class
from decode_service.decoding.rank import RankDecoder, RankPart
from decode_service.decoding.rewrites import NAMES, apply_rewrites
from decode_service.planning.conditioning import Conditioning
from decode_service.planning.layouts import Layout, arrange
from decode_service.planning.plan import DecodePlan, PixelFormat
from decode_service.planning.planner import Policy, make_plan
from decode_service.planning.spec import StrideTiles
from decode_service.planning.temporal import CausalFrames
from tests.decoding import measurements
from tests.decoding.harness import assemble
from tests.decoding.threads import on_ranks

CPU = torch.device("cpu")

Reference = Callable[[Any, torch.Tensor], torch.Tensor]

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
    precision: str | None = None,
    **wish: Any,
) -> tuple[DecodePlan, torch.Tensor]:
    """``latents`` decoded by a group of ``ranks`` threads that share a copy of ``vae``, with the ``rewrites`` as served.

    With ``precision`` float32 each has a copy of its own, which it casts.
    """
    family = family_class(type(vae).__name__)
    original, vae = vae, rewritten(vae, rewrites)
    spec = family(vae, "tiny", tiles).spec
    arrangement = arrange(spec, tuple(latents.shape), layout or Layout())
    plan = make_plan(spec, arrangement.latent_shape, group_size=ranks, policy=Policy(), mode=mode, strict=True, **wish)

    def work(communicator: Communicator) -> RankPart:
        own = rewritten(original, rewrites) if precision == "float32" else vae
        decoder = RankDecoder(family(own, "tiny", tiles), device=CPU)
        decoder.attach(communicator if ranks > 1 else SoloCommunicator())
        return decoder.decode(
            plan,
            latents.numpy(),
            "float32",
            denormalize=denormalize,
            pixels=pixels,
            arrangement=arrangement,
            conditioning=conditioning,
            precision=precision,
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


def reference(vae: Any, latents: torch.Tensor) -> torch.Tensor:
    """What diffusers decodes; its blends in place need tensors that may change, hence not in inference mode."""
    with torch.no_grad():
        pixels: torch.Tensor = vae.decode(latents).sample
    return pixels


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


def check_tiles_of_uneven_strides(vae: Any, latents: torch.Tensor) -> None:
    """A quarter of a tile of 9 cells of 4 px is 2.25 cells but 9 px: diffusers steps by 6 cells, keeps 27 px of each and repeats
    rows. With a third, which is the same 6 cells, it keeps 24, and makes the tiles that a decode should have."""
    size = torch.Size(extent * 4 for extent in latents.shape[-2:])
    own_overlap = vae.tile_overlap_factor
    vae.enable_tiling()
    assert reference(vae, latents).shape[-2:] != size, "diffusers got it right: compare with it instead"
    vae.tile_overlap_factor = 1 / 3
    expected = reference(vae, latents)
    vae.tile_overlap_factor = own_overlap
    vae.disable_tiling()
    assert expected.shape[-2:] == size
    check_tiles(vae, latents, expected)


def check_causal_ratios(vae: Any, latents: torch.Tensor, expected: torch.Tensor, spatial: int, temporal: int) -> None:
    """The family finds the ratios that ``expected`` shows, and decodes to it."""
    spec = family_class(type(vae).__name__)(vae, "tiny", None).spec
    assert (spec.spatial_ratio, spec.frame_rule) == (spatial, CausalFrames(temporal))
    assert expected.shape[2:] == spec.output_extents(tuple(latents.shape))
    check_exact_modes(vae, latents, expected, ranks=(3,))


def check_interleaved(
    vae: Any, videos: Sequence[torch.Tensor], reference: Reference = reference, *, chunk: int = 1
) -> None:
    """Decodes on one model that take turns, pass by pass, beside one that was given up, are what each is alone."""
    family = family_class(type(vae).__name__)(vae, "tiny")
    alone = [reference(vae, video) for video in videos]
    with torch.inference_mode():
        given_up = family.decode(videos[0], chunk)
        next(given_up)
        passes = zip(*(family.decode(video, chunk) for video in videos), strict=True)
        mixed = [torch.cat(parts, 2) for parts in zip(*passes, strict=True)]
    for expected, actual in zip(alone, mixed, strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=0)


def check_half_precision(vae: Any, latents: torch.Tensor, reference: Reference = reference) -> None:
    """In bfloat16 the root-mean-square error against float32 is no larger than diffusers' own, within a tenth."""
    exact = reference(vae, latents)
    half = copy.deepcopy(vae).bfloat16()
    theirs = reference(half, latents.bfloat16()).float()
    _, ours = decoded(half, latents, "direct")
    assert (ours - exact).square().mean().sqrt() <= 1.1 * (theirs - exact).square().mean().sqrt()


def check_compiles_whole(vae: Any, latents: torch.Tensor, expected: torch.Tensor) -> None:
    """No graph break: neither the passes nor the attention hide anything from the compiler."""
    family = family_class(type(vae).__name__)(vae, "tiny")
    family.call_decoder = torch.compile(family.call_decoder, fullgraph=True, backend="eager")
    with torch.inference_mode():
        video = torch.cat(list(family.decode(latents, 1)), dim=2)
    torch.testing.assert_close(video, expected, atol=1e-5, rtol=0)


def largest_operand(family: Family, latents: torch.Tensor, chunk: int) -> int:
    """Elements of the largest tensor that any operation of a decode makes."""
    with torch.inference_mode(), _LargestTensor() as largest:
        list(family.decode(latents, chunk))
    return largest.elements


class _LargestTensor(TorchFunctionMode):
    elements = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if isinstance(output, torch.Tensor):
            self.elements = max(self.elements, output.numel())
        return output
