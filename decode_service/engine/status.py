"""What a service says of itself: its state, and what its operator should know."""

from __future__ import annotations

from dataclasses import dataclass, field

from decode_service.errors import GroupFailedError, NotReadyError


@dataclass
class Status:
    """The parts of one engine share it.

    Attributes:
        state: ``starting``, ``self_test`` and ``warming`` on the way up, then ``ready``; ``rebuilding`` while the group is
            mended, ``failed`` once it was given up, and ``closed``.
        warnings: for people.
    """

    state: str = "starting"
    warnings: list[str] = field(default_factory=list)

    @property
    def healthy(self) -> bool:
        """False once the group is given up: only a new replica can help then."""
        return self.state not in ("failed", "closed")

    def refuse_unless_serving(self) -> None:
        """
        Raises:
            NotReadyError: if no request is taken, not yet or not any more.
        """
        if self.state in ("starting", "self_test", "warming"):
            raise NotReadyError(f"the model is not ready yet: {self.state}")
        if not self.healthy:
            raise NotReadyError(f"the model is not served any more: {self.state}", retry_after_s=10.0)

    def refuse_if_given_up(self) -> None:
        """
        Raises:
            GroupFailedError: if the group was given up before it was ready.
        """
        if not self.healthy:
            raise GroupFailedError(f"the ranks broke too often while starting: {'; '.join(self.warnings)}")
