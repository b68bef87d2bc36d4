"""How 3-D convolutions run is decided by what was measured; here by made-up times, and by real ones on the CPU."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from decode_service.decoding import convolution_choice, rank
from decode_service.decoding.causal_conv3d import CausalKernel, causal_conv3d, continued_conv3d
from decode_service.decoding.convolution_choice import (
    _CUDNN,
    ConvolutionChoice,
    ConvolutionTime,
    Layout,
    Timer,
    WithoutCudnn,
    _Run,
    choose,
    measure,
    measured_choice,
    representatives,
)
from decode_service.decoding.dense_convolution import dense_conv3d
from decode_service.decoding.families import FAMILIES
from decode_service.decoding.loading import ModelSource
from decode_service.decoding.rank import RankDecoder
from tests.decoding.conftest import Zoo
from tests.decoding.harness import latents_of
from tests.decoding.test_rank import decode

CPU = torch.device("cpu")
LAST: Layout = "channels_last_3d"
PLAIN: Layout = "contiguous"


def way(
    layout: Layout, ms: float, *, dtype: str = "bfloat16", cudnn: bool = True, mb: int | None = 100
) -> ConvolutionTime:
    problem = "" if math.isfinite(ms) else "RuntimeError: no kernel"
    return ConvolutionTime(dtype, layout, cudnn, ms / 1e3, None if mb is None else mb << 20, problem)


def full(ms: float, mb: int = 100) -> ConvolutionTime:
    return way(PLAIN, ms, dtype="float32", mb=mb)


@pytest.mark.parametrize(
    ("ways", "layout", "cudnn"),
    [
        pytest.param([way(LAST, 1.0), way(PLAIN, 2.0)], LAST, True, id="channels last is faster"),
        pytest.param([way(LAST, 1.0), way(PLAIN, 0.97)], LAST, True, id="a hair decides nothing"),
        pytest.param([way(LAST, 1.0), way(PLAIN, 0.8)], PLAIN, True, id="contiguous is faster"),
        pytest.param([way(PLAIN, 1.0)], PLAIN, True, id="a decoder that cannot be channels last"),
        pytest.param([way(LAST, 5.0), way(PLAIN, 5.0), way(PLAIN, 1.0, cudnn=False)], PLAIN, False, id="cuDNN is slow"),
        pytest.param([way(LAST, 1.0), way(PLAIN, 0.85, cudnn=False)], LAST, True, id="cuDNN is hardly slower"),
        pytest.param(
            [way(LAST, 5.0), way(PLAIN, 1.0, cudnn=False, mb=900)], LAST, True, id="faster without, but larger"
        ),
        pytest.param([way(LAST, math.inf), way(PLAIN, 3.0)], PLAIN, True, id="a layout fails"),
        pytest.param([way(LAST, math.inf), way(LAST, 3.0, cudnn=False)], LAST, False, id="cuDNN fails"),
        pytest.param(
            [way(PLAIN, math.inf), way(PLAIN, 3.0, cudnn=False), way(LAST, 2.8, cudnn=False)],
            LAST,
            False,
            id="cuDNN fails and the better layout without it is hardly better",
        ),
        pytest.param(
            [way(LAST, 2.0, mb=None), way(LAST, 1.0, cudnn=False, mb=None)], LAST, False, id="no memory known"
        ),
    ],
)
def test_the_fastest_way_is_chosen_where_it_is_clearly_faster(
    ways: Sequence[ConvolutionTime], layout: Layout, cudnn: bool
) -> None:
    # In whatever order they were measured.
    for order in (ways, list(reversed(ways))):
        choice = choose([*order, full(9.0, mb=900)], "bfloat16")
        assert (choice.layout, choice.cudnn, choice.warning) == (layout, cudnn, "")
        assert choice.reason.startswith(layout)
        # Each that worked is named once.
        named = [
            f"{each.layout} with{'' if each.cudnn else 'out'} cuDNN" for each in ways if math.isfinite(each.seconds)
        ]
        assert all(choice.reason.count(name) == 1 for name in named)


def test_half_precision_that_is_worse_than_float32_is_warned_of() -> None:
    slow = choose([way(LAST, 7.0), full(9.0), full(2.0), full(8.0)], "bfloat16")
    assert "3.5 times as long as in float32" in slow.warning and "cuDNN" in slow.warning
    large = choose([way(LAST, 1.0, mb=7270), full(2.0, mb=2510)], "bfloat16")
    assert "2.9 times as much memory" in large.warning and "times as long" not in large.warning
    # A layout or a way without cuDNN that helps is no reason to worry.
    assert not choose([way(LAST, 7.0), way(PLAIN, 1.0), full(2.0)], "bfloat16").warning
    assert not choose([way(LAST, 7.0), way(LAST, 1.0, cudnn=False), full(2.0)], "bfloat16").warning


def test_where_nothing_could_be_timed_the_model_decodes_as_usual_and_says_so() -> None:
    choice = choose([way(LAST, math.inf), full(1.0)], "bfloat16")
    assert choice.layout is None and choice.cudnn
    assert "no kernel" in choice.reason and choice.warning == choice.reason
    assert choice.describe()["measured"][0]["ms"] is None


def test_float32_and_bfloat16_convolutions_are_timed_for_real() -> None:
    convolutions = [nn.Conv3d(32, 32, 3), nn.Conv3d(8, 16, (1, 3, 3))]
    for conv in convolutions:
        conv.bfloat16()
    measured = measure(convolutions, CPU, elements=1 << 16, rounds=3)
    assert {(way.dtype, way.layout, way.cudnn) for way in measured} == {
        (dtype, layout, True) for dtype in ("bfloat16", "float32") for layout in (LAST, PLAIN)
    }
    assert all(0 < way.seconds < 60 and not way.problem and way.extra_bytes is None for way in measured)
    choice = choose(measured, "bfloat16")
    assert choice.layout in (LAST, PLAIN) and choice.cudnn and len(choice.describe()["measured"]) == 4


class Device:
    """One that works behind its caller's back: time passes when somebody waits for what has been asked of it.

    Making operands takes 100 s. A convolution takes what the next of ``costs`` says.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, costs: Sequence[float], peaks: Sequence[int]) -> None:
        self.now = self.asked = 0.0
        self._costs, self._peaks = iter(costs), iter(peaks)
        operands = _Run._operands

        def making(run: _Run) -> Any:
            self.asked += 100
            return operands(run)

        def convolving(*_: Any) -> None:
            self.asked += next(self._costs)

        monkeypatch.setattr(_Run, "_operands", making)
        monkeypatch.setattr(F, "conv3d", convolving)
        self.timer = Timer(self.wait, lambda: self.now, self.idle, lambda: self.idle() or next(self._peaks))

    def wait(self) -> None:
        self.now, self.asked = self.now + self.asked, 0.0

    def idle(self) -> None:
        assert not self.asked, "memory is looked at while the device works"


def test_times_and_memory_are_those_that_the_device_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first round is not timed, of the others the median counts; times add up, and the largest peak counts."""
    convolutions = [nn.Conv3d(2, 2, 3), nn.Conv3d(2, 4, 3)]
    device = Device(monkeypatch, [9.0, 1.0, 7.0, 2.0, 9.0, 0.5, 0.25, 4.0], [3000, 1000])
    ways = measure(convolutions, CPU, layouts=[LAST], timer=device.timer, elements=64, rounds=3)
    assert [(way.seconds, way.extra_bytes) for way in ways] == [(2.5, 3000)]


def test_on_cuda_half_precision_is_timed_without_cudnn_too(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[str, bool, bool]] = []

    def convolving(x: torch.Tensor, weight: torch.Tensor, *_: Any) -> None:
        assert weight.dtype == x.dtype
        last = [tensor.is_contiguous(memory_format=torch.channels_last_3d) for tensor in (x, weight)]
        assert last[0] == last[1] != x.is_contiguous()
        ran.append((str(x.dtype).removeprefix("torch."), last[0], torch.backends.cudnn.enabled))

    def ones(*shape: Any, device: torch.device, **options: Any) -> torch.Tensor:
        assert device.type == "cuda"
        return make(*shape, **options)

    make = torch.ones
    monkeypatch.setattr(F, "conv3d", convolving)
    monkeypatch.setattr(convolution_choice.torch, "ones", ones)
    conv = nn.Conv3d(4, 4, 3).bfloat16()
    ways = measure([conv], torch.device("cuda"), timer=Timer(), elements=1 << 10, rounds=1)
    expected = [("bfloat16", True), ("bfloat16", False), ("float32", True), ("float32", False)]
    expected = [(*way, True) for way in expected] + [("bfloat16", True, False), ("bfloat16", False, False)]
    assert [(way.dtype, way.layout == LAST, way.cudnn) for way in ways] == expected
    assert ran == expected * 2


def test_a_way_that_fails_is_reported_and_the_others_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    convolve = F.conv3d

    def failing(x: torch.Tensor, *args: Any) -> torch.Tensor:
        if x.dtype == torch.bfloat16 and not x.is_contiguous():
            raise RuntimeError("CUDNN_STATUS_NOT_SUPPORTED\nand a long trace")
        return convolve(x, *args)

    monkeypatch.setattr(F, "conv3d", failing)
    choice = measured_choice(nn.Conv3d(8, 8, 3).bfloat16(), CPU, keeps_channels_last=True, elements=1 << 12, rounds=1)
    assert choice.layout == PLAIN
    problems = {(way.dtype, way.layout): way.problem for way in choice.measured}
    assert problems.pop(("bfloat16", LAST)) == "RuntimeError: CUDNN_STATUS_NOT_SUPPORTED"
    assert set(problems.values()) == {""}


def test_measuring_that_fails_altogether_fails_no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **options: Any) -> None:
        raise RuntimeError("CUDA error: no device")

    monkeypatch.setattr(convolution_choice, "measure", broken)
    choice = measured_choice(nn.Conv3d(4, 4, 3).half(), CPU, keeps_channels_last=True)
    assert choice.layout is None and choice.cudnn and not choice.measured
    assert choice.warning == choice.reason == "timing 3-D convolutions failed: RuntimeError: CUDA error: no device"


def test_only_half_precision_decoders_with_3d_convolutions_are_measured() -> None:
    flat = measured_choice(nn.Conv2d(4, 4, 3).bfloat16(), CPU, keeps_channels_last=True)
    exact = measured_choice(nn.Conv3d(4, 4, 3), CPU, keeps_channels_last=True)
    assert flat.layout is exact.layout is None and not flat.measured and not exact.measured
    assert "no 3-D convolution" in flat.reason and "float32" in exact.reason
    narrow = measured_choice(nn.Conv3d(4, 4, 3).half(), CPU, keeps_channels_last=False, elements=1 << 10, rounds=1)
    assert {way.layout for way in narrow.measured} == {PLAIN}


def test_the_largest_and_the_most_frequent_convolution_stand_for_all(zoo: Zoo) -> None:
    model = nn.ModuleList([nn.Conv3d(4, 8, 3), *(nn.Conv3d(4, 4, 3) for _ in range(3)), nn.Conv3d(8, 8, 3)])
    model.extend([nn.Conv3d(64, 64, 1), nn.Conv3d(32, 32, 3, groups=8), nn.Conv2d(64, 64, 3)])
    assert [tuple(conv.weight.shape[:2]) for conv in representatives(model)] == [(8, 8), (4, 4)]
    assert len(representatives(zoo.references["wan21"].decoder)) == 2
    assert representatives(zoo.references["autoencoder_kl"].decoder) == []


class Seen(TorchFunctionMode):
    """The outermost look at convolutions: whether cuDNN was on for each."""

    def __init__(self) -> None:
        super().__init__()
        self.cudnn: dict[str, set[bool]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.conv2d, torch.conv3d, dense_conv3d, causal_conv3d, continued_conv3d):
            self.cudnn.setdefault(func.__name__, set()).add(torch.backends.cudnn.enabled)
        return func(*args, **(kwargs or {}))


def kernel_of(weight: torch.Tensor) -> CausalKernel:
    return CausalKernel(weight, None, None, (1, 1, 1), (0, 1, 1), (1, 1, 1), 1)


def test_without_cudnn_only_3d_convolutions_do_without_and_the_flag_comes_back() -> None:
    flat, deep = torch.ones(1, 2, 5, 5), torch.ones(1, 2, 3, 5, 5)
    with Seen() as seen, WithoutCudnn():
        F.conv2d(flat, torch.ones(2, 2, 3, 3))
        F.conv3d(deep, torch.ones(2, 2, 3, 3, 3))
        dense_conv3d(deep, torch.ones(2, 2, 3, 3, 3), None, (1, 1, 1), (0, 1, 1), (1, 1, 1), 1)
        causal_conv3d([deep], kernel_of(torch.ones(2, 2, 3, 3, 3)))
        continued_conv3d(None, deep, kernel_of(torch.ones(2, 2, 3, 3, 3)))
        with pytest.raises(RuntimeError):
            F.conv3d(deep, torch.ones(2, 9, 3, 3, 3))
    names = ("conv2d", "conv3d", "dense_conv3d", "causal_conv3d", "continued_conv3d")
    assert seen.cudnn == {name: {name == "conv2d"} for name in names}
    assert torch.backends.cudnn.enabled


def test_ranks_that_are_threads_leave_cudnn_as_it_was() -> None:
    with ExitStack() as second:
        with _CUDNN.off():
            second.enter_context(_CUDNN.off())
        assert not torch.backends.cudnn.enabled, "the second rank's convolution still runs"
    assert torch.backends.cudnn.enabled


def test_what_a_compiler_follows_is_left_to_its_own_code() -> None:
    with Seen() as seen, WithoutCudnn(), FakeTensorMode():
        F.conv3d(torch.empty(1, 2, 3, 5, 5), torch.empty(2, 2, 3, 3, 3))
        causal_conv3d([torch.empty(1, 2, 3, 5, 5)], kernel_of(torch.empty(2, 2, 3, 3, 3)))
    assert seen.cudnn == {"conv3d": {True}, "causal_conv3d": {True}}


@pytest.mark.parametrize("layout", [LAST, PLAIN])
def test_a_model_decodes_with_the_layout_that_was_faster(
    zoo: Zoo, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = PLAIN if layout == LAST else LAST

    def timed(*args: Any, layouts: Sequence[Layout], **options: Any) -> tuple[ConvolutionTime, ...]:
        assert set(layouts) == {LAST, PLAIN}
        return (way(layout, 3.0), way(other, 6.0), full(2.0))

    monkeypatch.setattr(convolution_choice, "measure", timed)
    source = ModelSource("tiny", str(zoo.folders["wan21"]), dtype="bfloat16")
    decoder = RankDecoder.load(source, device="cpu", measure_convolutions=True)
    shown = decoder.describe()
    assert (shown["convolutions"]["layout"], shown["convolutions"]["cudnn"]) == (layout, True)
    assert "1.5 times as long" in shown["convolutions"]["warning"]
    assert shown["rewrites"]["channels_last"]["active"] == (layout == LAST)
    if layout == PLAIN:
        assert "contiguous with cuDNN took 3 ms" in shown["rewrites"]["channels_last"]["reason"]
    weights = [m.weight for m in decoder._family.vae.decoder.modules() if isinstance(m, nn.Conv3d)]
    spread = [w for w in weights if w.shape[1] > 1 and w[0, 0].numel() > 1]
    assert all(w.is_contiguous() == (layout == PLAIN) for w in spread) and len(spread) > 5
    # Weights that a rewrite prepared follow.
    prepared = [m._one_frame[0] for m in decoder._family.vae.modules() if hasattr(m, "_one_frame")]
    spread = [w for w in prepared if w.shape[1] > 1 and w[0, 0].numel() > 1]
    assert all(w.is_contiguous() == (layout == PLAIN) for w in spread) and len(spread) > 5
    z = latents_of((1, 4, 3, 4, 5))
    with torch.inference_mode():
        exact = zoo.references["wan21"].decode(z).sample
        theirs = copy.deepcopy(zoo.references["wan21"]).bfloat16().decode(z.bfloat16()).sample.float()
    ours = torch.from_numpy(decode(decoder, z).array)
    assert (ours - exact).square().mean().sqrt() <= 1.1 * (theirs - exact).square().mean().sqrt()


def test_a_model_without_cudnn_decodes_so_but_not_where_it_is_cast_up(zoo: Zoo) -> None:
    family = FAMILIES["AutoencoderKLWan"](zoo.references["wan21"], "tiny")
    decoder = RankDecoder(family, device=CPU, convolutions=ConvolutionChoice(PLAIN, False, "made up"))
    z = latents_of((1, 4, 2, 4, 5))
    with Seen() as seen:
        usual = decode(decoder, z)
    assert seen.cudnn["conv3d"] == {False} and seen.cudnn["conv2d"] == {True}
    with Seen() as seen:
        cast = decode(decoder, z, precision="float32")
    assert seen.cudnn["conv3d"] == {True}
    assert (usual.array == cast.array).all()


def test_on_the_cpu_nothing_is_measured(zoo: Zoo) -> None:
    decoder = RankDecoder.load(ModelSource("tiny", str(zoo.folders["wan21"]), dtype="bfloat16"), device="cpu")
    assert decoder.describe()["convolutions"] == rank.NOT_MEASURED.describe()
