"""Functions of ours that a ``TorchFunctionMode`` sees as it sees those of torch: the halo rule gives them a meaning on bands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

from torch.overrides import wrap_torch_function

Function = TypeVar("Function", bound=Callable[..., Any])


def overridable(function: Function) -> Function:
    """``function``, handed whole to the mode that is active where it is called; without one it runs as it stands."""
    return cast(Function, wrap_torch_function(_first)(function))


def _first(*args: Any, **kwargs: Any) -> Sequence[Any]:
    # Modes see every call; tensors of a subclass, which would have a say too, there are none.
    return args[:1]
