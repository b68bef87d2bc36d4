"""Compiled calls of a decoder under the halo rule.

What ``ShardedFrame`` checks and reinterprets is Python that torch.compile's own tracer cannot follow. It need not: for given
shapes it decides the same every time. So the decoder runs once on tensors without data, with the halo rule in force, and what
arrives at the dispatcher is written down: ATen's operations, and exchanges as operators (``collectives``). That graph is
compiled. Nothing is exchanged meanwhile, so that a rank where tracing fails leaves no other one waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch._inductor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.overrides import _get_current_function_mode_stack

from decode_service.decoding.arguments import UnknownArgumentError, copied, described, digest, put_back, tensors
from decode_service.decoding.collectives import TracedCommunicator
from decode_service.decoding.sharding import Marks, ShardedFrame


def sharded_key(frame: ShardedFrame, args: Any, kwargs: Any) -> str | None:
    """What a call on this rank's band is, the same in every process; None where an argument cannot be described.

    Ranks have different ones for one call: bands differ, and the outermost ones have no neighbour on one side.
    """
    with torch._C.DisableTorchFunction():
        modes = [type(mode).__name__ for mode in _get_current_function_mode_stack()]
        marks = [frame.marks(x) for x in tensors((args, kwargs))]
        try:
            call = (described(args), described(kwargs))
        except UnknownArgumentError:
            return None
    return digest((modes, frame.axis, frame.sizes, frame.communicator.rank, marks, *call))


@dataclass(frozen=True, slots=True)
class _Slot:
    """Where a tensor stood in the outcome of the traced call.

    Attributes:
        index: its number among the inputs and, after these, what the graph returns.
        marks: what the frame knew of it.
    """

    index: int
    marks: Marks


#: Weights have the layout in memory that suits them since they were loaded, and activations follow it. By itself the compiler
#: wants every convolution on the CPU with channels last, and would lay weights out anew in every call.
_OPTIONS = {"layout_optimization": False}


def compile_graph(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Sequence[torch.Tensor]]:
    """Code for ``graph`` by torch's compiler, for inputs like ``inputs``, which need have no data."""
    compiled: Callable[..., Sequence[torch.Tensor]] = torch._inductor.compile(graph, list(inputs), options=_OPTIONS)
    return compiled


def compile_sharded(forward: Callable[..., Any], args: Any, kwargs: Any) -> Callable[..., Any]:
    """``forward`` on this thread's band, compiled for the shapes of ``args`` and ``kwargs``, which stay as they are.

    The result takes arguments of the same shapes, exchanges what ``forward`` would, and leaves in its arguments what
    ``forward`` would leave there. It must be called on a band of the same frame, by any communicator. Parameters are used
    where they are; nothing is copied.

    Raises:
        Exception: whatever tracing or compiling raises.
    """
    frame = ShardedFrame.current()
    given = list(tensors((args, kwargs)))
    if frame is None or not given:
        raise ValueError("only calls on a band of a frame, of at least one tensor, can be compiled here")
    marks = [frame.marks(x) for x in given]
    exchanges = frame.exchanges
    outcome: Any = None

    def call(*traced: torch.Tensor) -> list[torch.Tensor]:
        nonlocal outcome
        standing = iter(traced)
        own_args, own_kwargs = copied((args, kwargs), lambda _: next(standing))
        for x, known in zip(traced, marks, strict=True):
            frame.mark(x, known)
        communicator = TracedCommunicator(frame.communicator.rank, frame.communicator.size, traced[0].device)
        try:
            with frame.communicating_by(communicator), torch._C._EnableTorchFunction():
                output = forward(*own_args, **own_kwargs)
        finally:
            # Nothing was exchanged.
            frame.exchanges = exchanges
        indices = {id(x): index for index, x in enumerate(traced)}
        returned: list[torch.Tensor] = []

        def slot(x: torch.Tensor) -> _Slot:
            if id(x) not in indices:
                indices[id(x)] = len(traced) + len(returned)
                returned.append(x)
            return _Slot(indices[id(x)], frame.marks(x))

        outcome = copied((output, own_args, own_kwargs), slot)
        return [communicator.token, *returned]

    # Inference tensors cannot be traced; the code runs on them all the same.
    with torch._C.DisableTorchFunction(), torch.inference_mode(False), torch.no_grad():
        # Parameters become tensors without data where they are met. Without an environment for symbolic shapes, though there
        # are none, torch would keep nothing on disk.
        with FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv(), static_shapes=True):
            stand_ins = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) for x in given]
            graph = make_fx(call)(*stand_ins)
        compiled = compile_graph(graph, stand_ins)
    output, left_args, left_kwargs = outcome

    def run(*args: Any, **kwargs: Any) -> Any:
        current = ShardedFrame.current()
        assert current is not None
        with torch._C.DisableTorchFunction():
            inputs = list(tensors((args, kwargs)))
            _, *returned = compiled(*inputs)
            values = [*inputs, *returned]

            def value_of(slot: _Slot) -> torch.Tensor:
                x = values[slot.index]
                # What is kept for the next pass must not be a part of a larger tensor, as ``compilation`` says.
                if slot is not output and slot.index >= len(inputs) and is_part(x):
                    x = values[slot.index] = x.clone()
                current.mark(x, slot.marks)
                return x

            put_back((args, kwargs), copied((left_args, left_kwargs), value_of, _Slot))
            return copied(output, value_of, _Slot)

    return run


def is_part(tensor: torch.Tensor) -> bool:
    """Whether other elements lie in the memory of ``tensor``, too."""
    return tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size()
