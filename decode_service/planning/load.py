"""What else a group has to do when a request is about to start, and whether that makes it decode one request per rank.

On an idle group one request is soonest done by all ranks together. Of n requests, the last is done after n shared decodes where
all ranks decode one after the other, and after one decode of a single rank where each has its own: that is no later once n is
what sharing makes a decode faster by. With at least as many requests as ranks it always is, since ranks that share a frame also
wait for each other.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Load:
    """What a group has to do besides one request, as far as it matters for that request.

    Work is measured in decoded pixels (batch x frames x height x width), which are known exactly beforehand, and times
    are predicted at best. Requests that only all ranks together can decode do not count: they leave no rank to anybody.

    Attributes:
        waiting: requests that wait for a rank and are at least half as large. Smaller ones are no reason to decode a
            large request on one rank: they are done soon after it has been decoded on all.
        running: requests of at least that size that hold one rank each.
        outlasting: requests at least twice as large that hold one rank each. Until all ranks are idle takes longer than
            decoding on one that is idle now.
    """

    waiting: int = 0
    running: int = 0
    outlasting: int = 0

    @classmethod
    def beside(cls, pixels: int, *, waiting: Iterable[int], running: Iterable[int]) -> Load:
        """The load for a request of ``pixels``.

        Args:
            waiting: pixels of the other requests that wait and that one rank can decode.
            running: pixels of the requests that hold one rank each.
        """
        held = list(running)
        return cls(
            waiting=sum(2 * other >= pixels for other in waiting),
            running=sum(2 * other >= pixels for other in held),
            outlasting=sum(other >= 2 * pixels for other in held),
        )

    def one_rank_each(self, ranks: int, gain: float | None = None) -> str | None:
        """Why a group of ``ranks`` decodes the request on one of them, for people; None where all of them should.

        Args:
            gain: how many times as fast all ranks together decode it as one, as far as that is predicted. None where it is
                not: then as many times as there are ranks.
        """
        if ranks == 1:
            return None
        requests = self.waiting + self.running + 1
        if requests > 1 and requests >= (ranks if gain is None else min(gain, ranks)):
            others = [f"{_requests(self.waiting)} wait{'s' if self.waiting == 1 else ''}"] if self.waiting else []
            if self.running:
                others.append(f"{_requests(self.running)} run{'s' if self.running == 1 else ''}")
            why = "" if requests >= ranks else f"; sharing is predicted to make one only {gain:.1f} times as fast"
            return f"{' and '.join(others)}: one rank each{why}"
        if self.outlasting:
            return "a larger request holds a rank: one that is idle now is sooner than all of them"
        return None


def full(ranks: int) -> Load:
    """The load at which requests are decoded on one rank each, by a group of ``ranks``."""
    return Load(waiting=ranks)


def _requests(count: int) -> str:
    return f"{count} request{'' if count == 1 else 's'}"
