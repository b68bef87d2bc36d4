"""One place of a decoder where a rewrite stands in for a module: putting it there, taking it back, comparing both."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn


class Site(ABC):
    """A module and what would stand in for it."""

    @abstractmethod
    def install(self) -> None:
        """Put the rewrite in place."""

    @abstractmethod
    def undo(self) -> None:
        """Leave the module as it was."""

    @abstractmethod
    def outputs(self, generator: torch.Generator) -> list[torch.Tensor]:
        """What the module answers on small random input, in all the ways in which decoders call it."""


class ClassSite(Site):
    """A module whose class is exchanged for a subclass that overrides ``forward``.

    Parameters, attributes and the tree of modules stay what they are, so everything that looks at the model's structure
    still finds it; rewrites of one module stack by inheritance.

    Args:
        module: the module.
        mixin: the class that comes before the module's own.
        calls: functions that call the module on random input.
        prepared: attributes for the rewrite, made at load; none of them a parameter.
    """

    def __init__(
        self,
        module: nn.Module,
        mixin: type,
        calls: Sequence[Callable[[nn.Module, torch.Generator], torch.Tensor]],
        prepared: dict[str, Any] | None = None,
    ) -> None:
        self._module = module
        self._mixin = mixin
        self._calls = calls
        self._prepared = prepared or {}
        self._original: type = type(module)

    def install(self) -> None:
        for name, value in self._prepared.items():
            setattr(self._module, name, value)
        self._module.__class__ = _stacked(self._mixin, self._original)

    def undo(self) -> None:
        self._module.__class__ = self._original
        for name in self._prepared:
            delattr(self._module, name)

    def outputs(self, generator: torch.Generator) -> list[torch.Tensor]:
        return [call(self._module, generator) for call in self._calls]


def prepared_tensors(model: nn.Module) -> Iterator[torch.Tensor]:
    """The tensors that rewrites keep on the modules of ``model``: they take memory as parameters and buffers do."""
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, tuple):
                yield from (x for x in value if isinstance(x, torch.Tensor) and not isinstance(x, nn.Parameter))


@functools.cache
def _stacked(mixin: type, original: type) -> type:
    return type(f"{mixin.__name__}{original.__name__}", (mixin, original), {"__module__": mixin.__module__})


def random_input(module: nn.Module, shape: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    """Normally distributed numbers of the dtype and on the device of the module's parameters."""
    parameter = next(module.parameters())
    return torch.randn(tuple(shape), generator=generator).to(parameter.device, parameter.dtype)
