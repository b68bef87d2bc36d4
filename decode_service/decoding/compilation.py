"""``torch.compile`` of a decoder: in warm-up only, where it measured faster, and never inside a request.

Every kind of call (a *bucket*, see ``planning.compiled_shapes``) has a compiled callable of its own, for its shapes alone.
Buckets are compiled, checked and timed while the decoder is told to measure. Whether one is used is decided outside, once for
all ranks. Any other call runs eagerly: a request never waits for the compiler.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import logging
import os
import stat
import statistics
import threading
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack

from decode_service.decoding.arguments import UnknownArgumentError, copied, described, digest, is_memory, tensors
from decode_service.decoding.collectives import WatchedCommunicator
from decode_service.decoding.memory import is_out_of_memory
from decode_service.decoding.sharded_compilation import compile_sharded, is_part, sharded_key
from decode_service.decoding.sharding import ShardedFrame
from decode_service.errors import ConfigError
from decode_service.planning.compiled_shapes import BucketMeasurement

logger = logging.getLogger(__name__)

Forward = Callable[..., Any]

#: Eager and compiled calls in turn: at least so many of each, and more while they take less than this time in all.
MIN_ROUNDS, MAX_ROUNDS, MEASURING_S = 3, 15, 2.0

#: Largest accepted difference of a compiled call: the maximum and the rms one, relative to the eager call's maximum (at least
#: 1) and rms. In float32 what every exact mode keeps; in half precision either is off the exact answer by about 2 % rms.
_TOLERANCE = {torch.float32: (1e-5, 1e-4), torch.bfloat16: (0.1, 0.05), torch.float16: (0.1, 0.05)}


class CompileFailedError(RuntimeError):
    """A compiled call failed. The whole group must go on without that bucket.

    Attributes:
        bucket: its key; empty where all of compilation is meant.
    """

    def __init__(self, message: str, bucket: str = "") -> None:
        super().__init__(message)
        self.bucket = bucket


def compile_whole(forward: Forward) -> Forward:
    """``forward`` compiled for the shapes of its first call, as one graph or not at all.

    One graph: a call that would have to be compiled anew is refused before any of it has run, so that it can still run
    eagerly. Isolated: compiled forms of one function would share a bounded cache otherwise, and be tried one after the other.
    """
    return _compile(forward)


def compile_with_cuda_graphs(forward: Forward) -> Forward:
    """As ``compile_whole``, launched as CUDA graphs: what a call gives lies in memory that the next call writes to."""
    return _compile(forward, options={"triton.cudagraphs": True})


def _compile(forward: Forward, **options: Any) -> Forward:
    if "isolate_recompiles" in inspect.signature(torch.compile).parameters:
        options["isolate_recompiles"] = True
    return torch.compile(forward, fullgraph=True, dynamic=False, **options)


def use_cache_dir(configured: str | None) -> Path:
    """Make the folder in which compiled code outlives the process, and name it to torch; before anything is compiled.

    Without a configured one it is what ``TORCHINDUCTOR_CACHE_DIR`` says, or ``decode-service/compiled`` in the user's cache.

    Raises:
        ConfigError: if it cannot be used, or others may write into it: torch runs the code that it finds there.
    """
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    default = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or f"{base}/decode-service/compiled"
    folder = Path(configured or default).expanduser().absolute()
    advice = "set compile.cache_dir to a folder of the service's own"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError("it is not writable")
    except OSError as error:
        raise ConfigError(f"compiled code cannot be kept in {folder} ({error}); {advice}") from error
    if status.st_mode & stat.S_IWOTH or status.st_uid not in (os.geteuid(), 0):
        raise ConfigError(f"compiled code must not be kept in {folder}, which others can write to; {advice}")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
    return folder


class CompilableDecoder:
    """A decoder's forward that runs compiled where the group decided so.

    A compiled call that fails does not fall back here: all ranks of a group must decode alike, so they leave the attempt and
    start again together. ``CompileFailedError`` tells the engine to see to that.

    Under the halo rule (``ShardedFrame``) a call is one of all ranks, and so is its bucket. They meet a bucket together, agree
    after every step that can fail, and compile, check and time it side by side; a request then needs no agreement.

    Args:
        forward: the decoder; nothing about its modules changes later.
        enabled: whether it may be compiled.
        synchronize: waits for the device, so that times are those of the work.
        cuda_graphs: whether compiled calls are launched as CUDA graphs. What they give is copied out of the graph's memory.

    Attributes:
        active: whether it may be compiled.
        reason: why not, where it may not.
        paused: whether calls run eagerly for now.
        measuring: whether buckets that are met for the first time are compiled and timed.
        calls: calls so far; ``compiled_calls`` of them ran compiled.
    """

    def __init__(
        self,
        forward: Forward,
        *,
        enabled: bool,
        synchronize: Callable[[], None] = lambda: None,
        cuda_graphs: bool = False,
    ) -> None:
        self._eager = forward
        self.cuda_graphs = cuda_graphs
        self._synchronize = synchronize
        self._compiled: dict[str, Forward] = {}
        self._seen: set[str] = set()
        self._measurements: list[BucketMeasurement] = []
        self._in_use: frozenset[str] = frozenset()
        self._refused: set[str] = set()
        # From a rank's own key of a call on its band to that of the call of all ranks.
        self._group_keys: dict[str, str] = {}
        self.active = enabled
        self.reason = "" if enabled else "switched off in the config"
        self.paused = False
        self.measuring = False
        self.calls = 0
        self.compiled_calls = 0

    def disable(self, reason: str) -> None:
        """Run eagerly from now on."""
        if self.active:
            logger.warning("compilation is off for this model from now on: %s", reason)
        self.active = False
        self.reason = reason
        self._compiled.clear()

    def use(self, keys: Collection[str]) -> None:
        """Run these buckets compiled, as far as they have been compiled here, and no others. What is dropped is freed."""
        self._in_use = frozenset(keys)
        self._compiled = {key: compiled for key, compiled in self._compiled.items() if key in self._in_use}

    def take_measurements(self) -> tuple[BucketMeasurement, ...]:
        """What was measured since the last time."""
        taken, self._measurements = tuple(self._measurements), []
        return taken

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        if not self.active or self.paused:
            return self._eager(*args, **kwargs)
        frame = ShardedFrame.current()
        if frame is not None:
            return self._call_sharded(frame, args, kwargs)
        # The frames of one pass, of a long video or of a short one, are the same bucket when they do not lie in the whole.
        args = tuple(_apart(argument) for argument in args)
        key = bucket_key(args, kwargs)
        if key is None:
            return self._eager(*args, **kwargs)
        if key in self._in_use and key in self._compiled:
            return self._run_compiled(key, args, kwargs)
        if self.measuring and key not in self._seen:
            self._seen.add(key)
            measurement = self._measure(key, args, kwargs)
            self._measurements.append(measurement)
            if measurement.worthwhile:
                # As requests will: what a compiled pass leaves to the next one can lie otherwise in memory than what an eager
                # one leaves, and is another bucket then.
                return self._run_compiled(key, args, kwargs)
        return self._eager(*args, **kwargs)

    def _run_compiled(self, key: str, args: Any, kwargs: Any) -> Any:
        with _STANCE.serving() as may_serve:
            if may_serve:
                try:
                    output = self._call_compiled(self._compiled[key], args, kwargs)
                except Exception as error:
                    # Lack of memory is no reason to give compilation up.
                    if is_out_of_memory(error):
                        raise
                    # Whatever else a compiled call raises is laid to the compiler, which raises plain AssertionErrors, too.
                    # If it was the model after all, the eager call that follows says so.
                    if not _is_refused(error):
                        raise CompileFailedError(f"{type(error).__name__}: {error}", key) from error
                    self._warn_of_refusal(key, error)
                else:
                    self.compiled_calls += 1
                    return output
        return self._eager(*args, **kwargs)

    def _call_compiled(self, compiled: Forward, args: Any, kwargs: Any) -> Any:
        """What a compiled call gives, and what it leaves in its arguments, in memory of their own."""
        if not self.cuda_graphs:
            return _compacted(compiled(*args, **kwargs), args, kwargs)
        # Held until the end: the memory of one that the call drops could be that of a new one.
        given = list(tensors((args, kwargs)))
        torch.compiler.cudagraph_mark_step_begin()
        output = compiled(*args, **kwargs)
        return _out_of_the_graph(output, args, kwargs, given)

    def _warn_of_refusal(self, key: str, error: Exception) -> None:
        if key not in self._refused:
            self._refused.add(key)
            logger.warning("bucket %s runs eagerly, because it would have to be compiled anew: %s", key, error)

    def _measure(self, key: str, args: Any, kwargs: Any) -> BucketMeasurement:
        """Compile a bucket, compare it with the eager call, and time both in turn, on copies of what the call changes."""
        first = next(tensors((args, kwargs)), None)
        shape, dtype = ((), "") if first is None else (tuple(first.shape), str(first.dtype).removeprefix("torch."))
        eager_ms, compiled_ms, compile_s, problem = None, None, None, ""
        try:
            compiled = (compile_with_cuda_graphs if self.cuda_graphs else compile_whole)(self._eager)
            began = time.perf_counter()
            with _STANCE.compiling():
                if self.cuda_graphs:
                    # The first call runs the kernels, the second records them, the third is what requests will get.
                    for _ in range(3):
                        got = _outcome(lambda *a, **k: self._call_compiled(compiled, a, k), args, kwargs)
                else:
                    got = _outcome(compiled, args, kwargs)
                self._synchronize()
            compile_s = time.perf_counter() - began
            with _STANCE.serving(wait=True):
                problem = _difference(got, _outcome(self._eager, args, kwargs))
                del got
                if not problem:

                    def as_served(*args: Any, **kwargs: Any) -> Any:
                        bucket_key(args, kwargs)
                        with _STANCE.serving():
                            return self._call_compiled(compiled, args, kwargs)

                    eager_ms, compiled_ms = self._time_in_turn([self._eager, as_served], args, kwargs)
                    self._compiled[key] = compiled
        except Exception as error:  # noqa: BLE001 - a bucket that cannot be compiled runs eagerly
            problem = _why_not_compiled(error)
            logger.warning("compiling the decoder for %s failed", list(shape), exc_info=error)
        return BucketMeasurement(key, shape, dtype, eager_ms, compiled_ms, compile_s, problem)

    def _time_in_turn(
        self,
        contenders: list[Forward],
        args: Any,
        kwargs: Any,
        agree: Callable[[int], list[int]] = lambda status: [status],
    ) -> list[float]:
        """Median milliseconds of a call of each.

        Args:
            agree: for calls of several ranks, which make as many as rank 0 finds enough, and begin each together.
        """
        times: list[list[float]] = [[] for _ in contenders]
        began = time.perf_counter()
        while agree(
            len(times[0]) < MIN_ROUNDS or (len(times[0]) < MAX_ROUNDS and time.perf_counter() - began < MEASURING_S)
        )[0]:
            for contender, taken in zip(contenders, times, strict=True):
                copies = copied(args), copied(kwargs)
                self._synchronize()
                agree(0)
                start = time.perf_counter()
                contender(*copies[0], **copies[1])
                self._synchronize()
                taken.append((time.perf_counter() - start) * 1e3)
        return [statistics.median(taken) for taken in times]

    # Calls on one band of a frame, which all ranks make together

    def _call_sharded(self, frame: ShardedFrame, args: Any, kwargs: Any) -> Any:
        if not self.measuring and not self._compiled:
            return self._eager(*args, **kwargs)
        key = self._group_key(frame, args, kwargs)
        if key in self._in_use and key in self._compiled:
            return self._run_sharded(self._compiled[key], key, frame, args, kwargs)
        if self.measuring and key and key not in self._seen:
            self._seen.add(key)
            measurement = self._measure_sharded(key, frame, args, kwargs)
            self._measurements.append(measurement)
            # As requests will, if all do: what they leave to the next pass is what requests find there.
            if all(_agree(frame, measurement.worthwhile)):
                return self._run_sharded(self._compiled[key], key, frame, args, kwargs)
        return self._eager(*args, **kwargs)

    def _group_key(self, frame: ShardedFrame, args: Any, kwargs: Any) -> str:
        """The key of this call of all ranks; empty if it is unknown to them, or one of them cannot describe it.

        While the ranks measure they tell each other what they call their parts of it. Requests find what was told.
        """
        own = sharded_key(frame, args, kwargs)
        if self.measuring:
            # Without the last bit, since a status is signed.
            everybodys = _agree(frame, int(own, 16) >> 1 if own else 0)
            if own and all(everybodys):
                self._group_keys[own] = digest(everybodys)
        return self._group_keys.get(own or "", "")

    def _run_sharded(self, compiled: Forward, key: str, frame: ShardedFrame, args: Any, kwargs: Any) -> Any:
        output, _ = self._watched(compiled, key, frame, args, kwargs)
        self.compiled_calls += 1
        return output

    def _watched(
        self, compiled: Forward, key: str, frame: ShardedFrame, args: Any, kwargs: Any
    ) -> tuple[Any, WatchedCommunicator]:
        """The outcome of a compiled call and what it exchanged.

        Raises:
            CompileFailedError: it failed by itself, not by lack of memory or because a peer was gone.
        """
        communicator = WatchedCommunicator(frame.communicator)
        try:
            with frame.communicating_by(communicator):
                return compiled(*args, **kwargs), communicator
        except Exception as error:
            if communicator.failure is not None:
                raise communicator.failure from None
            if is_out_of_memory(error):
                raise
            raise CompileFailedError(f"{type(error).__name__}: {error}", key) from error

    def _measure_sharded(self, key: str, frame: ShardedFrame, args: Any, kwargs: Any) -> BucketMeasurement:
        """As ``_measure``, with all ranks: none makes a call that the others do not make."""
        first = next(tensors((args, kwargs)))
        problem, compiled = "", self._eager
        began = time.perf_counter()
        try:
            # One at a time of the ranks that share a process: the tracer changes modules' methods for all of it.
            with _STANCE.compiling():
                compiled = compile_sharded(self._eager, args, kwargs)
        except Exception as error:  # noqa: BLE001 - a bucket that cannot be compiled runs eagerly
            problem = _why_not_compiled(error)
            logger.warning("compiling the decoder for a band of %s failed", list(first.shape), exc_info=error)
        measurement = BucketMeasurement(
            key,
            tuple(first.shape),
            str(first.dtype).removeprefix("torch."),
            compile_s=time.perf_counter() - began,
            problem=problem,
            axis=frame.axis,
            bands=frame.sizes,
        )
        if any(_agree(frame, bool(problem))):
            return measurement

        def watched(*args: Any, **kwargs: Any) -> Any:
            return self._watched(compiled, key, frame, args, kwargs)[0]

        ours, eager = WatchedCommunicator(frame.communicator), WatchedCommunicator(frame.communicator)
        with frame.communicating_by(ours):
            got = _outcome(watched, args, kwargs)
        with frame.communicating_by(eager):
            expected = _outcome(self._eager, args, kwargs)
        with torch._C.DisableTorchFunction():
            problem = _difference(got, expected)
        del got, expected
        if ours.made != eager.made:
            # A peer that decodes eagerly would wait for another message.
            problem = problem or "compiled it exchanges other messages"
        measurement = dataclasses.replace(measurement, problem=problem)
        if any(_agree(frame, bool(problem))):
            return measurement

        def as_served(*args: Any, **kwargs: Any) -> Any:
            sharded_key(frame, args, kwargs)
            return watched(*args, **kwargs)

        eager_ms, compiled_ms = self._time_in_turn(
            [self._eager, as_served], args, kwargs, agree=lambda status: _agree(frame, status)
        )
        self._compiled[key] = compiled
        return dataclasses.replace(measurement, eager_ms=eager_ms, compiled_ms=compiled_ms)


def _agree(frame: ShardedFrame, status: int) -> list[int]:
    """What each rank says, in rank order."""
    with torch._C.DisableTorchFunction():
        return frame.communicator.agree(int(status))


def _why_not_compiled(error: Exception) -> str:
    why = "out of memory" if is_out_of_memory(error) else f"{type(error).__name__}: {error}".splitlines()[0]
    return f"compiling it failed: {why}"


class _Stance:
    """torch's stance towards compiling, which belongs to the whole process; ranks that are threads share it.

    While compiled calls are served, nothing is compiled; while something is compiled, none is served.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._serving = 0
        self._compiling = False
        self._refusing: Any = None

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._serving and not self._compiling)
            self._compiling = True
        try:
            yield
        finally:
            with self._changed:
                self._compiling = False
                self._changed.notify_all()

    @contextlib.contextmanager
    def serving(self, *, wait: bool = False) -> Iterator[bool]:
        """A context in which calls that would be compiled anew raise instead.

        Yields:
            whether compiled calls may run: not while another rank of this process compiles, unless that is waited for.
        """
        with self._changed:
            if wait:
                self._changed.wait_for(lambda: not self._compiling)
            may_serve = not self._compiling
            if may_serve:
                if self._serving == 0:
                    self._refusing = torch.compiler.set_stance("fail_on_recompile")
                self._serving += 1
        try:
            yield may_serve
        finally:
            if may_serve:
                with self._changed:
                    self._serving -= 1
                    if self._serving == 0:
                        self._refusing.__exit__(None, None, None)
                        self._changed.notify_all()


_STANCE = _Stance()


def _is_refused(error: Exception) -> bool:
    """Whether torch refused to compile anew. It has no class of its own for that."""
    return isinstance(error, RuntimeError) and "'fail_on_recompile'" in str(error)


# ---- arguments -----------------------------------------------------------------------------------------------------


def bucket_key(args: Any, kwargs: Any) -> str | None:
    """The bucket of a call, the same in every process; None where an argument cannot be described."""
    modes = [type(mode).__name__ for mode in _get_current_function_mode_stack()]
    try:
        return digest((modes, described(args), described(kwargs)))
    except UnknownArgumentError:
        return None


def _compacted(output: Any, args: Any, kwargs: Any) -> Any:
    """``output``, and what a compiled call left in its arguments, with the memory that the eager call would leave.

    Where a decoder copies the last frames of a chunk, to be kept for the next pass, the compiler returns a part of the chunk: all
    of that would stay, and the next pass, whose input lies otherwise in memory, would be another bucket.
    """
    for argument in (*args, *kwargs.values()):
        if not isinstance(argument, torch.Tensor):
            _replace(argument, _apart_if_part)
    return output if isinstance(output, torch.Tensor) else _replace(output, _apart_if_part)


def _out_of_the_graph(output: Any, args: Any, kwargs: Any, given: list[torch.Tensor]) -> Any:
    """As ``_compacted``, of a call whose results lie in a CUDA graph's memory: all but what was ``given`` to it is copied."""
    outside = {tensor.untyped_storage().data_ptr() for tensor in given}

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() in outside:
            return _apart_if_part(tensor)
        return tensor.clone()

    for argument in (*args, *kwargs.values()):
        if not isinstance(argument, torch.Tensor):
            _replace(argument, copied)
    return _replace(output, copied)


def _apart(argument: Any) -> Any:
    return argument.contiguous() if isinstance(argument, torch.Tensor) and is_part(argument) else argument


def _apart_if_part(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone() if is_part(tensor) else tensor


def _replace(value: Any, replacement: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """``value``, where it can be changed in place, with the ``replacement`` of every tensor in it."""
    if isinstance(value, torch.Tensor):
        return replacement(value)
    if isinstance(value, list):
        value[:] = [_replace(entry, replacement) for entry in value]
    elif isinstance(value, tuple):
        return type(value)(_replace(entry, replacement) for entry in value)
    elif isinstance(value, dict):
        for key, entry in value.items():
            # A dict of ours may refuse what its convolutions would remember.
            dict.__setitem__(value, key, _replace(entry, replacement))
    elif is_memory(value):
        _replace(vars(value), replacement)
    return value


def _outcome(forward: Forward, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """What a call returns, and what it leaves in its arguments, which themselves stay as they are."""
    args, kwargs = copied(args), copied(kwargs)
    output = forward(*args, **kwargs)
    return list(tensors((output, args, kwargs)))


def _difference(got: list[torch.Tensor], expected: list[torch.Tensor]) -> str:
    """Why a compiled call is not the eager one at the precision of its dtype; empty if it is."""
    if [tensor.shape for tensor in got] != [tensor.shape for tensor in expected]:
        return "compiled it returns other shapes"
    for ours, eager in zip(got, expected, strict=True):
        if not eager.is_floating_point() or not eager.numel():
            continue
        most, rms_most = _TOLERANCE.get(eager.dtype, _TOLERANCE[torch.float32])
        reference = eager.float()
        error = (ours.float() - reference).abs_()
        largest = max(1.0, float(reference.abs().max()))
        worst = float(error.max()) / largest
        rms = float(error.square_().mean().sqrt()) / max(1e-6, float(reference.square().mean().sqrt()))
        # Written so that NaN is a difference.
        if not (worst <= most and rms <= rms_most):
            return f"compiled it differs by {worst:.1e} of the largest value (allowed {most:g}), {rms:.1e} rms ({rms_most:g})"
    return ""
