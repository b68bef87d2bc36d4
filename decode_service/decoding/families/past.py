"""What later passes of one decode look back at, kept by the decode and not on the model."""

from __future__ import annotations

import torch


class Past:
    """What the modules of one decode have seen, in the order in which they run. A family passes it along and rewinds it."""

    def __init__(self) -> None:
        self._seen: list[torch.Tensor | None] = []
        self._next = 0

    def rewind(self) -> None:
        """Begin another pass over the modules."""
        self._next = 0

    def lengthen(self, x: torch.Tensor, keep: int | None, fill: torch.Tensor | None = None) -> torch.Tensor:
        """``x`` after what the same call got in the passes before; of both together, ``keep`` frames stay for the next.

        Args:
            x: its dimension 2 is that of the frames.
            keep: None for all.
            fill: what comes before ``x`` where nothing did.
        """
        before = self._seen[self._next] if self._next < len(self._seen) else None
        before = fill if before is None else before
        x = x if before is None else torch.cat([before, x], dim=2)
        # A copy, so that the whole chunk is not kept for its last frames.
        self._remember(x if keep is None else x[:, :, -keep:].clone())
        return x

    def skip(self) -> None:
        """Stand for a call of ``lengthen`` in a pass that the next one does not look back at."""
        self._remember(None)

    def _remember(self, x: torch.Tensor | None) -> None:
        if self._next < len(self._seen):
            self._seen[self._next] = x
        else:
            self._seen.append(x)
        self._next += 1
