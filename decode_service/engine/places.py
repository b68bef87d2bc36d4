"""Where ranks run: what a rank is told, and what it finds. Knows neither Ray nor torch."""

from __future__ import annotations

from dataclasses import dataclass


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
