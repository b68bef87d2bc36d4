"""Which calls of the decoder the ranks run compiled: decided here, and the same on all of them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from decode_service.engine.protocol import RankError, RankGroup, RankPixels
from decode_service.engine.status import Status
from decode_service.planning.compiled_shapes import CompiledShapes

logger = logging.getLogger("decode_service.engine")


class Compiled:
    """The buckets that ranks measured, and those that are in use. See ``decode_service.planning.compiled_shapes``."""

    def __init__(self, group: RankGroup, status: Status) -> None:
        self._group = group
        self._status = status
        self._off: str | None = None
        self._shapes = CompiledShapes()
        self._in_use: frozenset[str] = frozenset()

    @property
    def off(self) -> bool:
        """Whether compilation has failed as a whole."""
        return self._off is not None

    @property
    def any(self) -> bool:
        """Whether any call of the decoder runs compiled."""
        return bool(self._in_use)

    def add(self, ranks: Sequence[int], parts: Sequence[RankPixels]) -> None:
        """Note what ``ranks`` have measured in a run."""
        for rank, part in zip(ranks, parts, strict=True):
            self._shapes.add(rank, part.measured)

    async def tell(self) -> None:
        """Tell all ranks what runs compiled. None of them may decode meanwhile.

        Raises:
            RankError: if a rank could not be told. Others may have been.
        """
        kept = self._shapes.kept()
        await self._group.use_compiled(kept)
        self._in_use = kept

    def forget(self) -> None:
        """The ranks are new processes: nothing is compiled there."""
        self._shapes.forget()
        self._in_use = frozenset()

    async def give_up(self, broke: RankError) -> None:
        """Decode eagerly from now on, on all ranks, what was compiled when ``broke`` happened.

        Raises:
            RankError: if a rank could not be told.
        """
        if self.off:
            return
        if broke.bucket:
            logger.error("a compiled decoder failed; its bucket %s is eager for good: %s", broke.bucket, broke.message)
            self._status.warnings.append(
                f"decoder calls of bucket {broke.bucket} are not compiled any more: {broke.message}"
            )
            self._shapes.fail(broke.bucket, broke.message)
            self._in_use = self._shapes.kept()
            await self._group.use_compiled(self._in_use)
            return
        self._off = broke.message
        self._in_use = frozenset()
        logger.error("torch.compile failed and is off for good, on all ranks: %s", broke.message)
        self._status.warnings.append(f"compilation is off: {broke.message}")
        await self._group.set_compile(False, broke.message)

    def describe(self, unable: str | None, *, cold: bool) -> dict[str, Any]:
        """Whether any call of the decoder runs compiled, why none does, and what was measured of each.

        Args:
            unable: why the ranks cannot compile their decoder at all, or None.
            cold: whether they are new processes that were not warmed up yet.
        """
        reason = self._off or unable
        if not reason and not self._in_use:
            reason = "no call of the decoder was faster compiled; shapes has what was measured"
            if not self._shapes:
                reason = "nothing has been compiled: only what decoding the shapes in warmup.shapes calls is"
            if cold:
                reason = "the ranks were started anew and are not warm yet"
        active = not reason and bool(self._in_use)
        return {"active": active, "reason": reason or None, "shapes": self._shapes.public()}
