"""What diffusers' pipelines do between their last denoising step and their pictures, run as it stands in their source.

Importing a pipeline needs its text encoders' packages. What is of interest here needs none: functions are compiled from
the installed source by themselves, and so is the end of ``__call__``, where ``output_type`` is not ``latent``.
"""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from diffusers.utils.torch_utils import randn_tensor

GLOBALS: dict[str, Any] = {
    "torch": torch,
    "inspect": inspect,
    "randn_tensor": randn_tensor,
    "is_compiled_module": lambda module: False,
    "get_module_execution_device": lambda module: torch.device("cpu"),
}


@functools.cache
def _class(module: str, name: str) -> ast.ClassDef:
    package = find_spec("diffusers")
    assert package is not None and package.origin is not None
    source = Path(package.origin).parent / "pipelines" / (module.replace(".", "/") + ".py")
    for node in ast.parse(source.read_text()).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return node
    raise AssertionError(f"{source} has no {name}")


def _function(module: str, class_name: str, name: str) -> ast.FunctionDef:
    for node in _class(module, class_name).body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return node
    raise AssertionError(f"{class_name} has no {name}")


def method(module: str, class_name: str, name: str) -> Callable[..., Any]:
    """A static method, or the function behind a method, of ``diffusers.pipelines.<module>.<class_name>``."""
    node = _function(module, class_name, name)
    # Annotations name types of packages that are not needed here.
    bare = ast.parse("from __future__ import annotations\n")
    bare.body.append(ast.FunctionDef(**{**{k: getattr(node, k, None) for k in node._fields}, "decorator_list": []}))
    namespace = dict(GLOBALS)
    exec(compile(ast.fix_missing_locations(bare), class_name, "exec"), namespace)
    function: Callable[..., Any] = namespace[name]
    return function


def finish(module: str, class_name: str, vae: Any, latents: torch.Tensor, **variables: Any) -> torch.Tensor:
    """The pixels that the pipeline makes of ``latents``, the result of its last step, before they are postprocessed.

    Args:
        variables: local variables of ``__call__``, and attributes of the pipeline as ``self_<name>``.
    """
    attributes = {name.removeprefix("self_"): value for name, value in variables.items() if name.startswith("self_")}
    shown = SimpleNamespace(postprocess=lambda image, **_: image, postprocess_video=lambda video=None, **_: video)
    pipeline: Any = SimpleNamespace(vae=vae, image_processor=shown, video_processor=shown, **attributes)
    for node in _class(module, class_name).body:
        if isinstance(node, ast.FunctionDef) and ("unpa" in node.name or "denormalize" in node.name):
            static = any(isinstance(mark, ast.Name) and mark.id == "staticmethod" for mark in node.decorator_list)
            function = method(module, class_name, node.name)
            setattr(pipeline, node.name, function if static else functools.partial(function, pipeline))
    for name in ("decode_latents",):
        if any(isinstance(node, ast.FunctionDef) and node.name == name for node in _class(module, class_name).body):
            setattr(pipeline, name, functools.partial(method(module, class_name, name), pipeline))
    namespace = {**GLOBALS, "self": pipeline, "latents": latents, "output_type": "pt", **variables}
    steps = [step for step in _ending(module, class_name) if "audio" not in ast.unparse(step)]
    with torch.inference_mode():
        exec(compile(ast.Module(steps, []), class_name, "exec"), namespace)
    pixels: torch.Tensor = namespace.get("image", namespace.get("video", namespace.get("frames")))
    return pixels


def _ending(module: str, class_name: str) -> list[ast.stmt]:
    """The end of ``__call__``: what comes after the denoising loop, with the branch that decodes."""
    body = _function(module, class_name, "__call__").body
    loop = max(index for index, step in enumerate(body) if isinstance(step, ast.With))
    steps: list[ast.stmt] = []
    for step in body[loop + 1 :]:
        if isinstance(step, ast.If) and "output_type" in ast.unparse(step.test):
            branch = step.body if ast.unparse(step.test).startswith("not ") else step.orelse
            return [*steps, *(inner for inner in branch if "vocoder" not in ast.unparse(inner))]
        if isinstance(step, ast.Assign) and "latents" in ast.unparse(step.targets[0]):
            steps.append(step)
    raise AssertionError(f"{class_name}.__call__ does not end as expected")
