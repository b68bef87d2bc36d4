"""Telling lack of memory from other failures: there is one error for it on CUDA, and words on the CPU."""

from __future__ import annotations

import torch

# The CPU's allocator raises plain RuntimeErrors; these are the words by which they can be told.
_WORDS = ("out of memory", "can't allocate memory", "not enough memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` says that memory could not be had, on the device or on the host."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in _WORDS)
