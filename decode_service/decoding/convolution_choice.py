"""How 3-D convolutions in half precision run fastest on this device: memory layout, and with cuDNN or without.

cuDNN differs too much between versions for a rule. torch 2.9 with cuDNN before 9.15 ran bfloat16 3-D convolutions several times
slower than float32 ones, with a multiple of the memory (pytorch issue 166643). So a few convolutions with the model's own
weights are timed when it is loaded, and the model decodes with what was fastest. Measuring knows a device and a timer,
deciding knows times alone.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from decode_service.decoding.arguments import tensors
from decode_service.decoding.causal_conv3d import activated_conv3d, causal_conv3d, continued_conv3d
from decode_service.decoding.dense_convolution import dense_conv3d
from decode_service.decoding.tracing import is_traced

logger = logging.getLogger(__name__)

# B batch, C channels, T frames, H height, W width, O output channels.

Layout = Literal["contiguous", "channels_last_3d"]

_FORMATS = {"contiguous": torch.contiguous_format, "channels_last_3d": torch.channels_last_3d}
_HALF = (torch.bfloat16, torch.float16)

#: Another way than the usual one (channels last, with cuDNN) must take at most so much of its time.
LAYOUT_GAIN = 0.95
CUDNN_GAIN = 0.8
#: Half precision that takes more than so many times what float32 takes, in time or in memory, is worth a warning.
SLOWER, LARGER = 1.0, 1.5

#: Elements of the operand of a timed convolution, and how often it runs.
ELEMENTS = 1 << 23
ROUNDS = 5


@dataclass(frozen=True, slots=True)
class ConvolutionTime:
    """What some 3-D convolutions take in one way of running them.

    Attributes:
        dtype: of operands and weights.
        layout: their layout in memory.
        cudnn: whether cuDNN may be used.
        seconds: time of all of them; infinite where they failed.
        extra_bytes: device memory at the peak beyond operands and weights, of the one that needs most: its output, workspace and
            copies. None where the device does not say.
        problem: why they failed; empty where they did not.
    """

    dtype: str
    layout: Layout
    cudnn: bool
    seconds: float
    extra_bytes: int | None = None
    problem: str = ""

    def describe(self) -> dict[str, Any]:
        return {
            "dtype": self.dtype,
            "layout": self.layout,
            "cudnn": self.cudnn,
            "ms": round(self.seconds * 1e3, 3) if math.isfinite(self.seconds) else None,
            "extra_bytes": self.extra_bytes,
            "problem": self.problem,
        }


@dataclass(frozen=True, slots=True)
class ConvolutionChoice:
    """How the 3-D convolutions of a model run.

    Attributes:
        layout: that of weights and activations; None where nothing was measured, and the decoder keeps its usual one.
        cudnn: whether cuDNN may be used.
        reason: why, for people.
        warning: what the operator should know; empty where all is well.
        measured: the times behind it.
    """

    layout: Layout | None
    cudnn: bool
    reason: str
    warning: str = ""
    measured: tuple[ConvolutionTime, ...] = ()

    def describe(self) -> dict[str, Any]:
        """As ``/v1/models/{name}`` shows it."""
        return {
            "layout": self.layout,
            "cudnn": self.cudnn,
            "reason": self.reason,
            "warning": self.warning,
            "measured": [time.describe() for time in self.measured],
        }

    def applied(self) -> AbstractContextManager[Any]:
        """A context for decodes; to be entered outside the halo rule, whose convolutions it then sees."""
        return contextlib.nullcontext() if self.cudnn else WithoutCudnn()


def choose(measured: Sequence[ConvolutionTime], dtype: str) -> ConvolutionChoice:
    """The way to run convolutions of ``dtype``, from the times of some ways.

    The usual way is channels last with cuDNN, or contiguous where that was all that was tried. Another layout must be 5 % faster
    than it. Leaving cuDNN out must be 20 % faster than the better layout with it and take no more memory, because without it
    torch may write operands out for a matrix product, 27 times as large for a kernel of 3 x 3 x 3.
    """
    ours = [way for way in measured if way.dtype == dtype and math.isfinite(way.seconds)]
    with_cudnn = [way for way in ours if way.cudnn]
    without = [way for way in ours if not way.cudnn]
    if not ours:
        problems = "; ".join(dict.fromkeys(way.problem for way in measured if way.dtype == dtype and way.problem))
        reason = f"no 3-D convolution in {dtype} could be timed: {problems or 'none was tried'}"
        return ConvolutionChoice(None, True, reason, reason, tuple(measured))
    best = min(without, key=_seconds) if not with_cudnn else _usual(with_cudnn)
    for way in sorted(with_cudnn, key=_seconds):
        if way.seconds < LAYOUT_GAIN * best.seconds:
            best = way
    for way in sorted(without, key=_seconds):
        frugal = way.extra_bytes is None or best.extra_bytes is None or way.extra_bytes <= best.extra_bytes
        if way.seconds < CUDNN_GAIN * best.seconds and frugal:
            best = way
    others = [f"{_named(way)} {_ms(way)}" for way in sorted(ours, key=_seconds) if way is not best]
    reason = f"{_named(best)} took {_ms(best)} for a few 3-D convolutions in {dtype}"
    if others:
        reason += f"; {', '.join(others)}"
    return ConvolutionChoice(best.layout, best.cudnn, reason, _warning(best, measured), tuple(measured))


def _usual(ways: Sequence[ConvolutionTime]) -> ConvolutionTime:
    last = [way for way in ways if way.layout == "channels_last_3d"]
    return last[0] if last else ways[0]


def _warning(best: ConvolutionTime, measured: Sequence[ConvolutionTime]) -> str:
    """What is odd about half precision on this device, compared with the best way in float32."""
    full = [way for way in measured if way.dtype == "float32" and math.isfinite(way.seconds)]
    if best.dtype == "float32" or not full:
        return ""
    reference = min(full, key=_seconds)
    odd = []
    if best.seconds > SLOWER * reference.seconds:
        odd.append(f"take {best.seconds / reference.seconds:.1f} times as long as in float32")
    if best.extra_bytes and reference.extra_bytes and best.extra_bytes > LARGER * reference.extra_bytes:
        odd.append(f"need {best.extra_bytes / reference.extra_bytes:.1f} times as much memory as in float32")
    if not odd:
        return ""
    return (
        f"3-D convolutions in {best.dtype} {' and '.join(odd)} on this device, at their best ({_named(best)}): "
        "install a cuDNN of 9.15 or later, or set model.dtype to float32"
    )


def _seconds(way: ConvolutionTime) -> float:
    return way.seconds


def _named(way: ConvolutionTime) -> str:
    return f"{way.layout} {'with' if way.cudnn else 'without'} cuDNN"


def _ms(way: ConvolutionTime) -> str:
    return f"{way.seconds * 1e3:.3g} ms"


# ---- measuring -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Timer:
    """How a device tells time and memory.

    Attributes:
        synchronize: waits for the device.
        clock: seconds.
        start_peak: begins to watch the peak of memory; ``peak`` is what it was beyond then, or None.
    """

    synchronize: Callable[[], None] = lambda: None
    clock: Callable[[], float] = time.perf_counter
    start_peak: Callable[[], None] = lambda: None
    peak: Callable[[], int | None] = lambda: None

    @classmethod
    def of(cls, device: torch.device) -> Timer:
        if device.type != "cuda":
            return cls()
        before = 0

        def start_peak() -> None:
            nonlocal before
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)

        return cls(
            synchronize=lambda: torch.cuda.synchronize(device),
            start_peak=start_peak,
            peak=lambda: torch.cuda.max_memory_allocated(device) - before,
        )


def representatives(model: nn.Module, most: int = 2) -> list[nn.Conv3d]:
    """Convolutions that stand for all 3-D ones of ``model`` whose kernel spans space.

    The one with the largest weight and the one whose shape comes up most often in the rest.
    """
    convolutions = [module for module in model.modules() if isinstance(module, nn.Conv3d)]
    convolutions = [conv for conv in convolutions if conv.kernel_size[-1] > 1 and conv.groups == 1]
    by_shape: dict[tuple[int, ...], list[nn.Conv3d]] = {}
    for conv in convolutions:
        by_shape.setdefault(tuple(conv.weight.shape), []).append(conv)
    if not by_shape:
        return []
    largest = max(by_shape, key=math.prod)
    often = sorted((shape for shape in by_shape if shape != largest), key=lambda shape: -len(by_shape[shape]))
    return [by_shape[shape][0] for shape in [largest, *often[: most - 1]]]


def measure(
    convolutions: Sequence[nn.Conv3d],
    device: torch.device,
    *,
    layouts: Sequence[Layout] = ("channels_last_3d", "contiguous"),
    timer: Timer | None = None,
    elements: int = ELEMENTS,
    rounds: int = ROUNDS,
) -> tuple[ConvolutionTime, ...]:
    """Times of ``convolutions`` (already on ``device``) in their own dtype and in float32, in each of ``layouts``.

    On CUDA in their own dtype without cuDNN, too. All ways run in turn, so that a change of the machine's pace touches all.

    Args:
        elements: of the operand of each, about.
        rounds: timed calls of each, after one that is not timed; the median counts.
    """
    timer = timer or Timer.of(device)
    own = convolutions[0].weight.dtype
    ways = [(dtype, layout, True) for dtype in dict.fromkeys((own, torch.float32)) for layout in layouts]
    if device.type == "cuda":
        ways += [(own, layout, False) for layout in layouts]
    seconds = [0.0] * len(ways)
    extra: list[int | None] = [None] * len(ways)
    problems = [""] * len(ways)
    with torch.inference_mode():
        for conv in convolutions:
            runs = [_Run(conv, device, *way, elements) for way in ways]
            taken: list[list[float]] = [[] for _ in ways]
            for turn, (index, run) in itertools.product(range(rounds + 1), enumerate(runs)):
                if problems[index]:
                    continue
                try:
                    if turn == 0:
                        extra[index] = _most(extra[index], run.peak(timer))
                    else:
                        taken[index].append(run.time(timer))
                except Exception as error:  # noqa: BLE001 - a way that fails is not chosen, and said so
                    problems[index] = f"{type(error).__name__}: {error}".splitlines()[0]
            for index, times in enumerate(taken):
                seconds[index] += statistics.median(times) if times and not problems[index] else math.inf
            del runs
    return tuple(
        ConvolutionTime(str(dtype).removeprefix("torch."), layout, cudnn, taken_s, peak, problem)
        for (dtype, layout, cudnn), taken_s, peak, problem in zip(ways, seconds, extra, problems, strict=True)
    )


def _most(one: int | None, other: int | None) -> int | None:
    known = [value for value in (one, other) if value is not None]
    return max(known) if known else None


class _Run:
    """One convolution in one way. Its operands are made at each use: those of all ways at once might not fit."""

    def __init__(
        self, conv: nn.Conv3d, device: torch.device, dtype: torch.dtype, layout: Layout, cudnn: bool, elements: int
    ) -> None:
        self._conv, self._device, self._dtype, self._cudnn = conv, device, dtype, cudnn
        self._format = _FORMATS[layout]
        frames = conv.kernel_size[0] + 1
        side = max(conv.kernel_size[-1] + 1, math.isqrt(max(1, elements // (conv.in_channels * frames))))
        self._shape = (1, conv.in_channels, frames, side, side)

    def _operands(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        x = torch.ones(self._shape, dtype=self._dtype, device=self._device).contiguous(memory_format=self._format)
        weight = self._conv.weight.detach().to(self._dtype).contiguous(memory_format=self._format)
        bias = None if self._conv.bias is None else self._conv.bias.detach().to(self._dtype)
        return x, weight, bias

    def peak(self, timer: Timer) -> int | None:
        operands = self._operands()
        timer.synchronize()
        timer.start_peak()
        self._convolve(*operands)
        timer.synchronize()
        return timer.peak()

    def time(self, timer: Timer) -> float:
        operands = self._operands()
        timer.synchronize()
        start = timer.clock()
        self._convolve(*operands)
        timer.synchronize()
        return timer.clock() - start

    def _convolve(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        conv = self._conv
        padding = (0, *(extent // 2 for extent in conv.kernel_size[1:]))
        with contextlib.nullcontext() if self._cudnn else _CUDNN.off():
            F.conv3d(x, weight, bias, conv.stride, padding, conv.dilation)


def measured_choice(
    decoder: nn.Module, device: torch.device, *, keeps_channels_last: bool, **options: Any
) -> ConvolutionChoice:
    """How the 3-D convolutions of ``decoder`` (on ``device``, in its dtype) should run, by measurement where it pays.

    Never raises: a model that cannot be measured decodes as usual, and says so.

    Args:
        keeps_channels_last: whether its activations stay channels last all the way; without, that layout is not tried.
        options: of ``measure``.
    """
    dtype = next(decoder.parameters()).dtype
    convolutions = representatives(decoder)
    if not convolutions:
        return ConvolutionChoice(None, True, "not measured: the decoder has no 3-D convolution")
    if dtype not in _HALF:
        return ConvolutionChoice(None, True, "not measured: float32 keeps its layout, for exactness")
    layouts: tuple[Layout, ...] = ("channels_last_3d", "contiguous") if keeps_channels_last else ("contiguous",)
    try:
        measured = measure(convolutions, device, layouts=layouts, **options)
    except Exception as error:  # noqa: BLE001 - loading must not fail of a measurement
        reason = f"timing 3-D convolutions failed: {type(error).__name__}: {error}"
        choice = ConvolutionChoice(None, True, reason, reason)
    else:
        choice = choose(measured, str(dtype).removeprefix("torch."))
    logger.info("3-D convolutions: %s", choice.reason)
    if choice.warning:
        logger.warning("%s", choice.warning)
    return choice


# ---- carrying it out -----------------------------------------------------------------------------------------------


class _CudnnSwitch:
    """torch's switch of cuDNN, which belongs to the whole process; ranks that are threads share it.

    It is off while anybody wants it off, and then what it was before the first of them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wanted_off = 0
        self._before = True

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        # Not ``torch.backends.cudnn.flags``, which sets TF32 and all other flags too.
        with self._lock:
            if self._wanted_off == 0:
                self._before = torch.backends.cudnn.enabled
                torch.backends.cudnn.enabled = False
            self._wanted_off += 1
        try:
            yield
        finally:
            with self._lock:
                self._wanted_off -= 1
                if self._wanted_off == 0:
                    torch.backends.cudnn.enabled = self._before


_CUDNN = _CudnnSwitch()


# Functions of ours that the halo rule knows by name call torch's where this mode no longer sees it.
_CONVOLUTIONS = frozenset({torch.conv3d, dense_conv3d, causal_conv3d, continued_conv3d, activated_conv3d})


class WithoutCudnn(TorchFunctionMode):
    """While active in this thread, 3-D convolutions run without cuDNN; 2-D ones keep it, but for those that other threads of the
    process make meanwhile.

    Entered outside ``ShardedFrame``, it sees the convolutions that the halo rule has made of the decoder's. While a compiler
    follows the decoder it does nothing: compiled calls call cuDNN, and are kept only where they are faster.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in _CONVOLUTIONS and not any(map(is_traced, tensors(args))):
            with _CUDNN.off():
                return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))
