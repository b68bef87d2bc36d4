"""A queue that is fair to callers: they take turns, one entry each, and entries of one caller leave in order.

However many entries one caller adds, each other caller has at most one of them before its next. What is urgent goes
before all turns. A plain data structure: it knows nothing of ranks, time or asyncio.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """Entries of any hashable kind, each of which is in the queue at most once."""

    def __init__(self) -> None:
        self._urgent: deque[T] = deque()
        # In the order of their turns. A caller is here exactly while it has entries.
        self._lines: dict[str, deque[T]] = {}

    def __len__(self) -> int:
        return len(self._urgent) + sum(len(line) for line in self._lines.values())

    def __iter__(self) -> Iterator[T]:
        """What is urgent, and then caller by caller."""
        yield from self._urgent
        for line in self._lines.values():
            yield from line

    @property
    def callers(self) -> int:
        """Callers with entries that are not urgent."""
        return len(self._lines)

    def add(self, entry: T, caller: str) -> None:
        """Put ``entry`` behind the others of ``caller``, whose turn is the last if it has none."""
        self._lines.setdefault(caller, deque()).append(entry)

    def add_urgent(self, entry: T, place: int) -> None:
        """Put ``entry`` before all turns, behind ``place`` other urgent entries."""
        self._urgent.insert(place, entry)

    def head(self) -> T | None:
        """What leaves next, or None."""
        if self._urgent:
            return self._urgent[0]
        return next(iter(self._lines.values()))[0] if self._lines else None

    def pop(self) -> T:
        """Take the head, which was its caller's turn.

        Raises:
            IndexError: nothing is queued.
        """
        if self._urgent:
            return self._urgent.popleft()
        if not self._lines:
            raise IndexError("the queue is empty")
        caller = next(iter(self._lines))
        line = self._lines.pop(caller)
        entry = line.popleft()
        if line:
            self._lines[caller] = line
        return entry

    def remove(self, entry: T) -> None:
        """Take ``entry`` out, wherever it is. It costs its caller no turn.

        Raises:
            ValueError: it is not queued.
        """
        if entry in self._urgent:
            self._urgent.remove(entry)
            return
        for caller, line in self._lines.items():
            if entry in line:
                line.remove(entry)
                if not line:
                    del self._lines[caller]
                return
        raise ValueError("the entry is not in the queue")

    def leading(self, alike: Callable[[T], bool]) -> Iterator[T]:
        """What is ``alike`` and has nothing else of its caller before it: one of each caller, then the next of each.

        Nothing urgent is among it.
        """
        lines = [iter(line) for line in self._lines.values()]
        while lines:
            going_on = []
            for line in lines:
                entry = next(line, None)
                if entry is not None and alike(entry):
                    yield entry
                    going_on.append(line)
            lines = going_on

    def newest(self, caller: str) -> T | None:
        """The entry of ``caller`` that would leave last, or None."""
        return self._lines[caller][-1] if caller in self._lines else None
