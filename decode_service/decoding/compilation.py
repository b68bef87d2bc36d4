"""``torch.compile`` of a decoder, with one way back: to eager, for good."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from decode_service.decoding.memory import is_out_of_memory
from decode_service.decoding.sharding import ShardedFrame

logger = logging.getLogger(__name__)


class CompileFailedError(RuntimeError):
    """Setting up compilation failed, or compiling did at a call. The whole group must go on eagerly."""


class CompilableDecoder:
    """A decoder's forward that runs compiled until the group decides otherwise.

    A failure does not fall back here: all ranks of a group must decode alike, so they leave the attempt and start again
    together. ``CompileFailedError`` tells the engine to see to that.

    Under the halo rule calls run eagerly: the tracer cannot follow ``ShardedFrame``'s checks of what each operation is.

    Attributes:
        active: whether calls that can run compiled do.
        reason: why not, where they do not.
        paused: whether they do not for now.
        compiled_calls: calls that ran compiled so far.
    """

    def __init__(self, forward: Callable[..., torch.Tensor], *, enabled: bool) -> None:
        self._eager = forward
        self._compiled: Callable[..., torch.Tensor] | None = None
        self.active = enabled
        self.reason = "" if enabled else "switched off in the config"
        self.paused = False
        self.compiled_calls = 0

    def disable(self, reason: str) -> None:
        """Run eagerly from now on."""
        if self.active:
            logger.warning("compilation is off for this model from now on: %s", reason)
        self.active = False
        self.reason = reason
        self._compiled = None

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not self.active or self.paused or ShardedFrame.is_active():
            return self._eager(*args, **kwargs)
        try:
            if self._compiled is None:
                self._compiled = torch.compile(self._eager)
            output = self._compiled(*args, **kwargs)
            self.compiled_calls += 1
            return output
        except Exception as error:
            # Lack of memory is no reason to give compilation up.
            if is_out_of_memory(error):
                raise
            # Whatever else a compiled call raises is laid to the compiler, which raises plain AssertionErrors, too. If it was
            # the model after all, the eager call that follows says so.
            raise CompileFailedError(f"{type(error).__name__}: {error}") from error
