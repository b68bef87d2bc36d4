"""One run of a real group per group size decodes every case of ``test_exactness``: starting ranks is what costs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from decode_service.planning.plan import PixelFormat
from decode_service.planning.spec import StrideTiles
from tests.decoding import models
from tests.decoding.harness import Answer, Case, RankProcesses, latents_of, run_group

SMALL_TILES = StrideTiles(size_px=64, stride_px=48)

# Uneven extents on purpose: no axis divides by 2, 3 or 4.
SHAPES: dict[str, tuple[int, ...]] = {
    "autoencoder_kl": (1, 4, 11, 17),
    "autoencoder_dc": (1, 4, 11, 17),
    "wan21": (1, 4, 3, 11, 17),
    "wan22": (1, 4, 3, 5, 7),
    "qwen_image": (1, 4, 1, 11, 17),
    "minimax_h3": (1, 4, 12, 17, 21),
}
EXACT = ("autoencoder_kl", "wan21", "wan22", "qwen_image")

# None is the family's own: AutoencoderKL takes it from the config's sample_size.
TILES = {
    "autoencoder_kl": None,
    "wan21": SMALL_TILES,
    "wan22": StrideTiles(64, 32),
    "qwen_image": SMALL_TILES,
}


class Zoo:
    """The tiny models: their folders, and diffusers' own instances to compare with."""

    def __init__(self, root: Path) -> None:
        self.folders = {name: root / name for name in models.BUILDERS}
        self.references = {name: models.save(name, folder) for name, folder in self.folders.items()}
        #: What diffusers decodes, by the names of ``cases_of``: the same for every group size.
        self.expected: dict[str, torch.Tensor] = {}

    def case(self, name: str, mode: str, *, shape: tuple[int, ...] | None = None, **options: object) -> Case:
        return Case(self.folders[name], latents_of(shape or SHAPES[name]), mode, **options)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def weights_do_not_depend_on_the_tests_before() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    return Zoo(tmp_path_factory.mktemp("models"))


def cases_of(zoo: Zoo) -> dict[str, Case]:
    """Every case by a readable name."""
    cases: dict[str, Case] = {}
    for name in EXACT:
        for mode in ("direct", "spatial_shard_height", "spatial_shard_width"):
            cases[f"{name} {mode}"] = zoo.case(name, mode)
        cases[f"{name} tile"] = zoo.case(name, "tile", tiles=TILES[name])
    for name in ("wan21", "wan22", "qwen_image"):
        cases[f"{name} one tile"] = zoo.case(name, "tile")
    for chunk in (2, 5):
        cases[f"wan21 spatial_shard_height chunk {chunk}"] = zoo.case(
            "wan21", "spatial_shard_height", chunk=chunk, shape=(1, 4, 5, 5, 6)
        )
        cases[f"wan22 direct chunk {chunk}"] = zoo.case("wan22", "direct", chunk=chunk, shape=(1, 4, 5, 4, 5))
        cases[f"wan21 tile chunk {chunk}"] = zoo.case(
            "wan21", "tile", chunk=chunk, shape=(1, 4, 5, 9, 10), tiles=SMALL_TILES
        )
    cases["minimax_h3 auto"] = zoo.case("minimax_h3", "auto")
    cases["minimax_h3 model range"] = zoo.case("minimax_h3", "auto", pixels=PixelFormat("float32", "model"))
    for collect in ("rank0", "broadcast"):
        for mode in ("direct", "batch", "tile", "spatial_shard_height", "spatial_shard_width"):
            cases[f"wan21 {mode} {collect}"] = zoo.case(
                "wan21", mode, collect=collect, shape=(3, 4, 2, 5, 7), tiles=SMALL_TILES
            )
    for mode in ("spatial_shard_height", "spatial_shard_width"):
        cases[f"autoencoder_dc {mode}"] = zoo.case("autoencoder_dc", mode)
    cases["wan21 batch"] = zoo.case("wan21", "batch", shape=(3, 4, 2, 5, 7))
    cases["wan21 batch of two"] = zoo.case("wan21", "auto", shape=(2, 4, 2, 5, 7))
    for mode in ("spatial_shard_height", "spatial_shard_width"):
        cases[f"wan21 {mode} uint8"] = zoo.case("wan21", mode, pixels=PixelFormat("uint8"), shape=(2, 4, 2, 5, 7))
        cases[f"qwen_image {mode} 4-D"] = zoo.case("qwen_image", mode, shape=(2, 4, 7, 9), pixels=PixelFormat("uint8"))
    cases["autoencoder_kl denormalize"] = zoo.case("autoencoder_kl", "spatial_shard_width", denormalize=True)
    cases["autoencoder_kl batch"] = zoo.case("autoencoder_kl", "batch", shape=(3, 4, 5, 6))
    cases["wan21 denormalize"] = zoo.case("wan21", "spatial_shard_width", denormalize=True)
    cases["minimax_h3 denormalize"] = zoo.case("minimax_h3", "auto", denormalize=True, shape=(1, 4, 7, 4, 5))
    cases["hot qwen_image tile"] = Case(
        zoo.folders["qwen_image"], latents_of((1, 4, 1, 11, 17)) * 50, "tile", tiles=SMALL_TILES
    )
    return cases


@pytest.fixture(scope="session")
def rank_processes() -> Iterator[RankProcesses]:
    processes = RankProcesses()
    yield processes
    processes.close()


@pytest.fixture(scope="session", params=(2, 3, 4), ids=lambda ranks: f"{ranks} ranks")
def group_answers(
    request: pytest.FixtureRequest, zoo: Zoo, rank_processes: RankProcesses
) -> tuple[int, dict[str, Case], dict[str, Answer]]:
    """The group's size, the cases and what the group answered to each."""
    torch.set_num_threads(1)  # as the ranks: the number of threads changes the last bits of a convolution
    cases = cases_of(zoo)
    if request.param == 4:
        # Four ranks check splits, not every family again.
        cases = {
            key: case for key, case in cases.items() if key.startswith(("wan21 spatial", "minimax", "wan21 batch"))
        }
    answers = run_group(rank_processes, request.param, list(cases.values()))
    return request.param, cases, dict(zip(cases, answers, strict=True))
