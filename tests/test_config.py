"""Settings: what is refused, what is derived, and that every shipped deployment file is right."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
import yaml
from pydantic import BaseModel, ValidationError

from decode_service.config import ServiceConfig

ROOT = Path(__file__).resolve().parents[1]
MODEL = {"name": "demo", "source": "builtin:demo"}


def config(**sections: Any) -> ServiceConfig:
    return ServiceConfig.model_validate({"model": MODEL, **sections})


@pytest.mark.parametrize(
    ("sections", "hint"),
    [
        ({"grup": {}}, "did you mean 'group'"),
        ({"group": {"rank": 2}}, "did you mean 'ranks'"),
        ({"policy": {"direct_max_pixel": 1}}, "did you mean 'direct_max_pixels'"),
        ({"limits": {"zzz": 1}}, "known keys are max_body_bytes"),
    ],
)
def test_an_unknown_key_is_refused_and_the_nearest_named(sections: dict[str, Any], hint: str) -> None:
    with pytest.raises(ValidationError, match=hint):
        config(**sections)


@pytest.mark.parametrize("value", ["true", "false", "on", "1", 1, 0])
def test_a_switch_that_only_looks_boolean_is_refused(value: Any) -> None:
    with pytest.raises(ValidationError, match="true or false without quotes"):
        config(compile={"enabled": value})
    with pytest.raises(ValidationError, match="true or false without quotes"):
        config(policy={"strict": value})


def test_real_switches_are_taken() -> None:
    assert config(compile={"enabled": True}).compile_enabled()
    assert not config(compile={"enabled": False}, group={"device": "cuda"}).compile_enabled()
    assert config(group={"device": "cuda"}).compile_enabled()
    assert not config().compile_enabled()


def test_tiles_with_gaps_are_refused() -> None:
    with pytest.raises(ValidationError, match=r"stride_px \(256\) must not exceed size_px \(128\)"):
        config(policy={"tile": {"size_px": 128, "stride_px": 256}})


@pytest.mark.parametrize("shape", [[1, 16, 2], [1, 16, 0, 8, 8], [1, 1, 1, 1, 1, 1]])
def test_a_warm_up_shape_has_four_or_five_positive_extents(shape: list[int]) -> None:
    with pytest.raises(ValidationError, match="positive extents"):
        config(warmup={"shapes": [shape]})


def test_there_is_always_room_for_one_body() -> None:
    assert config().limits.total_body_bytes() == 1 << 30
    assert config(limits={"max_body_bytes": 1 << 20}).limits.total_body_bytes() == 1 << 30
    assert config(limits={"max_body_bytes": 1 << 30}).limits.total_body_bytes() == 4 << 30
    one = {"max_body_bytes": 4096, "max_total_body_bytes": 4096}
    assert config(limits=one).limits.total_body_bytes() == 4096
    with pytest.raises(
        ValidationError, match=r"max_total_body_bytes \(4095\) must be at least max_body_bytes \(4096\)"
    ):
        config(limits={**one, "max_total_body_bytes": 4095})


def test_settings_cannot_be_changed_later() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        config().group.ranks = 3  # type: ignore[misc]


def test_the_dtype_follows_the_device() -> None:
    assert config().torch_dtype_name() == "float32"
    assert config(group={"device": "cuda"}).torch_dtype_name() == "bfloat16"
    assert config(model={**MODEL, "dtype": "float16"}, group={"device": "cuda"}).torch_dtype_name() == "float16"


def test_each_rank_gets_a_bundle_of_exactly_its_size() -> None:
    assert config(group={"ranks": 3}).group.placement_bundles() == [{"CPU": 0.25}] * 3
    assert config(group={"ranks": 2, "device": "cuda"}).group.placement_bundles() == [{"CPU": 1.0, "GPU": 1}] * 2
    assert config(group={"device": "cuda", "cpus_per_rank": 0}).group.placement_bundles() == [{"GPU": 1}]
    with pytest.raises(ValidationError, match="must be positive where device is cpu"):
        config(group={"cpus_per_rank": 0})


# ---- deploy/*.yaml -------------------------------------------------------------------------------------------------


def serve_files() -> list[Path]:
    return sorted((ROOT / "deploy").glob("config*.yaml"))


def unknown_keys(values: Any, model: Any, where: str) -> list[str]:
    """Keys of ``values`` that ``model`` has no field for, at any depth."""
    if get_origin(model) is not None:
        arguments = [argument for argument in get_args(model) if argument is not type(None)]
        if isinstance(values, list):
            return [key for i, value in enumerate(values) for key in unknown_keys(value, arguments[0], f"{where}[{i}]")]
        models = [argument for argument in arguments if isinstance(argument, type) and issubclass(argument, BaseModel)]
        return unknown_keys(values, models[0], where) if models else []
    if not (isinstance(values, dict) and isinstance(model, type) and issubclass(model, BaseModel)):
        return []
    found = []
    for key, value in values.items():
        if key not in model.model_fields:
            found.append(f"{where}.{key}")
        else:
            found += unknown_keys(value, model.model_fields[key].annotation, f"{where}.{key}")
    return found


def test_unknown_keys_are_found_at_any_depth() -> None:
    from ray.serve.schema import ServeDeploySchema

    values = {
        "http_options": {"prot": 8000},
        "applications": [{"name": "a", "wrong": 1, "deployments": [{"name": "d", "max_ongoing_request": 1}]}],
    }
    # Serve takes all three without a word, which is why this test exists.
    ServeDeploySchema.model_validate({**values, "applications": [{**values["applications"][0], "import_path": "a:b"}]})  # type: ignore[index,dict-item]
    assert unknown_keys(values, ServeDeploySchema, "") == [
        ".http_options.prot",
        ".applications[0].wrong",
        ".applications[0].deployments[0].max_ongoing_request",
    ]


@pytest.mark.parametrize("path", serve_files(), ids=lambda path: path.name)
def test_every_deployment_file_is_right(path: Path) -> None:
    import importlib
    import inspect

    from ray.serve.schema import ServeDeploySchema

    values = yaml.safe_load(path.read_text())
    ServeDeploySchema.model_validate(values)
    assert unknown_keys(values, ServeDeploySchema, path.name) == []
    applications = values["applications"]
    assert applications[0]["import_path"] == "decode_service.app:build", "the model comes first"
    assert {application["route_prefix"] for application in applications} >= {"/healthz", "/readyz"}
    for application in applications:
        module, _, name = application["import_path"].partition(":")
        builder = getattr(importlib.import_module(module), name)
        (parameter,) = inspect.signature(builder).parameters.values()
        # A string here would mean that Serve hands over a dict and validates nothing.
        assert isinstance(parameter.annotation, type)
        args = parameter.annotation.model_validate(application["args"])
        builder(args)
        if isinstance(args, ServiceConfig):
            # Serve must not answer a deadline before we do.
            assert values["http_options"]["request_timeout_s"] > args.limits.default_deadline_s
            assert all(len(shape) == 5 and shape[2] >= 2 for shape in args.warmup.shapes)


def test_there_is_a_deployment_file_for_each_case() -> None:
    names = {path.name for path in serve_files()}
    assert names >= {"config.yaml", "config.cuda.yaml", "config.several.yaml"}


@pytest.mark.parametrize(
    "sections",
    [
        {"group": {"ranks": True}},
        {"group": {"ranks": "2"}},
        {"group": {"threads": True}},
        {"policy": {"chunk": True}},
        {"limits": {"default_deadline_s": True}},
        {"warmup": {"shapes": [[1, 16, 2, True, 8]]}},
    ],
)
def test_yes_and_quoted_numbers_are_no_numbers(sections: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="number"):
        ServiceConfig.model_validate({"model": {"name": "m", "source": "builtin:demo"}, **sections})


def test_cuda_graphs_are_refused_where_they_would_do_nothing() -> None:
    model = {"name": "demo", "source": "builtin:demo"}
    for sections in ({}, {"group": {"device": "cuda"}, "compile": {"enabled": False, "cuda_graphs": True}}):
        sections = {"compile": {"cuda_graphs": True}, **sections}
        with pytest.raises(ValueError, match=r"compile\.cuda_graphs needs group.device: cuda"):
            ServiceConfig(model=model, **sections)
    on = ServiceConfig(model=model, group={"device": "cuda"}, compile={"cuda_graphs": True})
    assert on.compile.cuda_graphs and not ServiceConfig(model=model, group={"device": "cuda"}).compile.cuda_graphs
