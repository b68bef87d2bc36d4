"""The arguments of a decoder's calls: tensors in containers, some of which a call changes for the next one."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import torch


class UnknownArgumentError(TypeError):
    """An argument that a key cannot tell from another."""


def digest(described: Any) -> str:
    """A key of what ``repr`` tells apart, the same in every process."""
    return hashlib.blake2b(repr(described).encode(), digest_size=8).hexdigest()


def described(value: Any) -> Any:
    """``value`` without the numbers in its tensors, in terms that ``repr`` writes alike in every process.

    Raises:
        UnknownArgumentError: if it holds anything else than tensors, containers and plain values.
    """
    if isinstance(value, torch.Tensor):
        return (tuple(value.shape), value.stride(), str(value.dtype), value.device.type, value.requires_grad)
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype)):
        return value
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, [described(entry) for entry in value])
    if isinstance(value, dict):
        return (type(value).__name__, [(key, described(entry)) for key, entry in value.items()])
    if is_memory(value):
        return (type(value).__name__, described(vars(value)))
    raise UnknownArgumentError(type(value).__name__)


def copied(value: Any, put: Callable[[Any], Any] = lambda tensor: tensor, kind: type = torch.Tensor) -> Any:
    """``value`` with containers of its own, so that a call which puts something else into them changes only the copy.

    Args:
        put: what stands in the copy for each ``kind``, in the order of ``tensors``.
    """
    if isinstance(value, kind):
        return put(value)
    if isinstance(value, (list, tuple)):
        return type(value)(copied(entry, put, kind) for entry in value)
    if isinstance(value, dict):
        return type(value)((key, copied(entry, put, kind)) for key, entry in value.items())
    if is_memory(value):
        twin = copy.copy(value)
        vars(twin).update(copied(vars(value), put, kind))
        return twin
    return value


def put_back(value: Any, left: Any) -> Any:
    """What ``value`` is after a call which made it ``left``: the containers of ``value``, with what those of ``left`` hold."""
    if type(value) is not type(left):
        return left
    if isinstance(value, list):
        value[:] = [put_back(*pair) for pair in zip(value, left, strict=False)] + left[len(value) :]
        return value
    if isinstance(value, tuple) and len(value) == len(left):
        return type(value)(put_back(*pair) for pair in zip(value, left, strict=True))
    if isinstance(value, dict):
        entries = {key: put_back(value[key], entry) if key in value else entry for key, entry in left.items()}
        dict.clear(value)
        for key, entry in entries.items():
            # A dict of ours may refuse what its convolutions would remember.
            dict.__setitem__(value, key, entry)
        return value
    if is_memory(value):
        put_back(vars(value), vars(left))
        return value
    return left


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in ``value``."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from tensors(entry)
    elif isinstance(value, dict):
        yield from tensors(list(value.values()))
    elif is_memory(value):
        yield from tensors(vars(value))


def is_memory(value: Any) -> bool:
    """Whether it is an object of ours in which a decode keeps what later passes look back at, as ``Past``."""
    return type(value).__module__.startswith("decode_service.") and hasattr(value, "__dict__")
