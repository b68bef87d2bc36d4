"""Where ranks run: what a rank is told, and what it finds. Knows neither Ray nor torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

#: glibc's, by their names in the environment of a process. One arena, because those of other threads cannot grow beyond
#: 64 MiB and take a mapping of its own for every larger tensor; feature maps of up to 1 GiB out of memory that the process has
#: already, of which it keeps 4 GiB.
_ALLOCATOR = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(4 << 30),
}


def allocator_variables(device: str, present: Mapping[str, str]) -> dict[str, str]:
    """What the environment of a rank must say for it to keep memory that it has freed, instead of giving it back.

    The kernel hands out zeroed pages: writing a feature map to new ones takes longer than computing many a layer that makes
    it, and by default glibc asks for new ones for every large map.

    Args:
        device: type of the rank's device; on CUDA torch keeps the device's memory by itself, and nothing is set.
        present: the environment that it starts from. Where that chooses an allocator, or its settings, it stands.
    """
    chosen = [name for name in present if name.startswith("MALLOC_") or name in ("LD_PRELOAD", "GLIBC_TUNABLES")]
    return dict(_ALLOCATOR) if device == "cpu" and not chosen else {}


@dataclass(frozen=True, slots=True)
class RankPlace:
    """What a rank is told of its place.

    Attributes:
        rank: this rank, 0-based.
        size: ranks in the group.
        ranks_on_node: ranks of the group on the same machine; they share its cores.
    """

    rank: int
    size: int
    ranks_on_node: int


@dataclass(frozen=True, slots=True)
class RankEnvironment:
    """What a rank finds.

    Attributes:
        pid: its process; 0 until it is known.
        node_id: Ray's name of its machine.
        visible_devices: CUDA_VISIBLE_DEVICES, or None where Ray gave it no device.
    """

    pid: int = 0
    node_id: str = ""
    visible_devices: str | None = None
