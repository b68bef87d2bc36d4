"""What the ranks of a group must have in common although each finds it out for itself: with which rewrites its decoder runs.

Every rank compares the exact rewrites with the modules that they stand in for when it loads the model, and leaves off what
differs or fails there. A convolution that is rewritten may ask its neighbours for other rows than the original does, so where
some ranks have it and some have not, messages do not match and nothing can be shared. Such a rewrite is left off on all.

No Ray and no torch here.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from decode_service.engine.protocol import GroupInfo

#: Rewrites that leave what ranks exchange as it is: each rank runs those that work there. (Their layout in memory, and with it
#: the fused norms, follow on CUDA from what each rank has timed.) Tests share decodes between ranks that differ in them.
MAY_DIFFER = ("channels_last", "norm_activation", "packed_weights", "residual")

Load = Callable[[frozenset[str]], Awaitable[Sequence[GroupInfo]]]


class Agreement:
    """What the ranks of one group have agreed on; ranks that are started anew later begin with it."""

    def __init__(self) -> None:
        # By name, where each rewrite that all do without could not run.
        self._without: dict[str, str] = {}

    async def load(self, load: Load) -> GroupInfo:
        """Load the model on all ranks, and once more without the rewrites on which they must agree and do not.

        Args:
            load: loads it on every rank without the rewrites that it is given, and returns what each rank says.

        Returns:
            what rank 0 says, with warnings of what differs.
        """
        while True:
            ranks = await load(frozenset(self._without))
            differing = {name: where for name, where in _off_on_some(ranks).items() if name not in self._without}
            must_agree = {name: where for name, where in differing.items() if name not in MAY_DIFFER}
            if not must_agree:
                break
            # Every round leaves more of them off, on all ranks, so there is a last one.
            self._without |= must_agree
        warnings = []
        if self._without:
            warnings.append(
                "rewrites are left off on all ranks, because not all can run them and they change what ranks exchange: "
                + _listed(self._without)
            )
        if differing:
            warnings.append(
                "the ranks run different rewrites, so that their pixels may differ in rounding and decodes that they share "
                f"take as long as the slowest: {_listed(differing)}"
            )
        description = dict(ranks[0].description)
        description["rewrites"] = {
            name: {**rewrite, "reason": f"{name} is {self._without[name]}"} if name in self._without else rewrite
            for name, rewrite in description["rewrites"].items()
        }
        return GroupInfo(ranks[0].spec, description, tuple(warnings))


def _off_on_some(ranks: Sequence[GroupInfo]) -> dict[str, str]:
    """Of each rewrite that is on for some ranks and off for others, where it is off and why."""
    found = {}
    for name in ranks[0].description["rewrites"]:
        told = [rank.description["rewrites"][name] for rank in ranks]
        off = [number for number, rewrite in enumerate(told) if not rewrite["active"]]
        if off and len(off) < len(ranks):
            where = f"rank {off[0]}" if len(off) == 1 else f"ranks {', '.join(map(str, off))}"
            found[name] = f"off on {where} of {len(ranks)} ({told[off[0]]['reason']})"
    return found


def _listed(rewrites: dict[str, str]) -> str:
    return "; ".join(f"{name} is {where}" for name, where in rewrites.items())
