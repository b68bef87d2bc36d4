"""Whether code runs to be written down, and not for its numbers."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensor


def is_traced(x: torch.Tensor) -> bool:
    """Whether a compiler is following what happens to ``x``: its elements are not known then.

    It writes code of its own for plain formulas, so that choosing a kernel for the CPU is not worth it either.
    """
    return torch.compiler.is_compiling() or isinstance(x, FakeTensor)
