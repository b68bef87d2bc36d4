"""Loading the decoder side of a VAE: from a hub id, a diffusers folder, a single safetensors file, or the built-in demo.

Weights are read by diffusers from safetensors only; nothing is unpickled, and no code comes with a model.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import json
import logging
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import torch
from safetensors.torch import load_file
from torch import nn

from decode_service.decoding.families import FAMILIES, Family, UnlistedFamily, family_class
from decode_service.decoding.families.unlisted import unlisted_problem
from decode_service.errors import ConfigError
from decode_service.planning.spec import StrideTiles
from decode_service.planning.tiles import TileSpan

logger = logging.getLogger(__name__)

BUILTIN_PREFIX = "builtin:"

# Parts of an autoencoder that only encoding uses.
_ENCODER_PARTS = ("encoder", "quant_conv")

# While diffusers loads a model it exchanges methods of nn.Module for all threads. Two loads at once put them back in the
# wrong order, and from then on every module of this process is made on the meta device.
_loading = threading.Lock()

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a model comes from; see ``decode_service.config.ModelConfig`` for the fields."""

    name: str
    source: str
    subfolder: str | None = None
    dtype: str = "float32"
    class_name: str | None = None
    revision: str | None = None


def load_family(source: ModelSource, *, device: torch.device, tiles: StrideTiles | None = None) -> Family:
    """Load the decoder of ``source`` onto ``device``, in eval mode and without gradients.

    Raises:
        ConfigError: the source does not exist, is not a VAE that this service knows, or does not match its weights;
            the message says what would be right.
    """
    dtype = _DTYPES.get(source.dtype)
    if dtype is None:
        raise ConfigError(f"model.dtype must be one of {', '.join(_DTYPES)}, got {source.dtype!r}")
    with _loading:
        vae = _load(source, dtype)
    reason = ""
    if dtype == torch.float16 and _config_of(vae).get("force_upcast"):
        # Such a model (SDXL) overflows in float16 and gives a black picture. float32 holds the same weights exactly.
        reason = "configured as float16, but the model must not run in it (force_upcast in its config)"
        vae.float()
    family = family_class(type(vae).__name__)
    removed = {part: getattr(vae, part) for part in _ENCODER_PARTS if hasattr(vae, part)}
    for part in removed:
        setattr(vae, part, None)
    if family is not UnlistedFamily:
        removed.clear()
    gc.collect()
    vae.requires_grad_(False).eval().to(device)
    try:
        made = _family_of(vae, source, tiles, removed)
    except ConfigError as error:
        if family is not UnlistedFamily or dtype == torch.float32 or reason:
            raise
        # Its decode is measured by running it, which fails where the machine lacks a kernel for the dtype.
        for part in removed:
            setattr(vae, part, None)
        vae.float()
        made = _family_of(vae, source, tiles, removed)
        reason = f"configured as {source.dtype}, but cannot be decoded in it on this machine: {error}"
    if not reason and device.type == "cpu" and made.dtype() != torch.float32:
        problem = problem_in_half(made)
        if problem:
            reason = f"configured as {source.dtype}, but this CPU cannot decode in it: {problem}"
            vae.float()
            made = _family_of(vae, source, tiles, removed)
    if reason:
        logger.warning("%s is decoded in float32: %s", source.name, reason)
    made.spec = dataclasses.replace(
        made.spec, dtype=str(made.dtype()).removeprefix("torch."), dtype_reason=reason or "as configured"
    )
    return made


def _family_of(vae: nn.Module, source: ModelSource, tiles: StrideTiles | None, removed: dict[str, nn.Module]) -> Family:
    """The family of ``vae``, which has lost the parts ``removed``; they come back where its decode needs them."""
    family = family_class(type(vae).__name__)
    try:
        return family(vae, source.name, tiles)
    except ConfigError:
        if not removed:
            raise
    # The decode of a class that nobody knows may use its encoder.
    first = next(vae.parameters())
    for part, module in removed.items():
        setattr(vae, part, module)
    vae.requires_grad_(False).eval().to(first.device, first.dtype)
    return family(vae, source.name, tiles)


def problem_in_half(family: Family) -> str | None:
    """Why a tiny decode in the family's own dtype fails on this machine, or None where it works.

    Operations that have no kernel for a dtype raise; some that have one give NaN. Both depend on the machine and on torch
    alone, so all ranks of a node find the same.
    """
    spec = family.spec
    valid = (t for t in range(1, 65) if spec.frame_rule is None or spec.frame_rule.problem(t) is None)
    frames = 1 if spec.frame_rule is None else list(itertools.islice(valid, 2))[-1]
    cells = spec.fixed_cells or max(4, spec.min_cells)
    generator = torch.Generator().manual_seed(0)
    shape = (1, spec.latent_channels, frames, cells, cells)
    latents = torch.randn(shape, generator=generator).to(family.dtype())
    span = TileSpan(0, cells, 0, cells)
    try:
        with torch.inference_mode():
            if not spec.no_denormalize_reason:
                latents = family.denormalize(latents)
            passes = [family.decode_tile(latents, 0, span, span, 1)] if spec.tile_only else family.decode(latents, 1)
            finite = all(bool(torch.isfinite(pixels).all()) for pixels in passes)
    except (RuntimeError, NotImplementedError, TypeError) as error:
        return str(error).split("\n", 1)[0]
    return None if finite else "a tiny decode gives NaN or Inf"


def _config_of(vae: nn.Module) -> dict[str, Any]:
    config: Any = vae.config
    return dict(config)


def _load(source: ModelSource, dtype: torch.dtype) -> nn.Module:
    local_file = source.source.endswith(".safetensors")
    if source.subfolder and (local_file or source.source.startswith(BUILTIN_PREFIX)):
        raise ConfigError(f"model.subfolder goes with a folder or a hub id, not with {source.source!r}; remove it")
    if source.source.startswith(BUILTIN_PREFIX):
        return _load_pretrained(str(_builtin(source.source)), source, dtype, subfolder=None)
    path = Path(source.source).expanduser()
    if path.suffix == ".safetensors":
        if not path.is_file():
            raise ConfigError(f"model.source {source.source!r} is not a file")
        return _load_single_file(path, source, dtype)
    if path.is_dir():
        return _load_pretrained(str(path), source, dtype, subfolder=source.subfolder)
    if path.is_absolute() or source.source.startswith((".", "~")) or source.source.count("/") != 1:
        raise ConfigError(
            f"model.source {source.source!r} is neither a folder, a .safetensors file, a hub id (owner/name) nor builtin:demo"
        )
    return _load_pretrained(source.source, source, dtype, subfolder=source.subfolder)


def _builtin(source: str) -> Path:
    name = source.removeprefix(BUILTIN_PREFIX)
    if name != "demo":
        raise ConfigError(f"model.source {source!r} is unknown; the built-in model is builtin:demo")
    from decode_service.demo import DEMO_VAE_DIR

    return Path(DEMO_VAE_DIR)


def _load_pretrained(location: str, source: ModelSource, dtype: torch.dtype, *, subfolder: str | None) -> nn.Module:
    """Load a diffusers folder or hub repository."""
    where = f"{location} (subfolder {subfolder})" if subfolder else location
    options: dict[str, Any] = {"subfolder": subfolder} if subfolder else {}
    if source.revision:
        options["revision"] = source.revision
    try:
        # Any model class reads a config.json; which one the weights need is what it says.
        config = diffusers.AutoencoderKL.load_config(location, **options)
    except (OSError, ValueError) as error:
        raise ConfigError(_explain_missing(location, subfolder, error)) from error
    cls = _vae_class(_class_name(config, source, where), where, config)
    try:
        with family_class(cls.__name__).building():
            return cls.from_pretrained(location, torch_dtype=dtype, use_safetensors=True, **options)
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"cannot load {cls.__name__} from {where}: {error}") from error


def _explain_missing(location: str, subfolder: str | None, error: Exception) -> str:
    folder = Path(location)
    if folder.is_dir() and not subfolder:
        inner = [child.name for child in sorted(folder.iterdir()) if (child / "config.json").is_file()]
        if "vae" in inner:
            return f"{location} holds a whole pipeline; set model.subfolder to 'vae'"
        if inner:
            return f"{location} has no config.json; folders in it that have one: {', '.join(inner)} (model.subfolder)"
    return f"cannot read a VAE's config.json from {location}{f'/{subfolder}' if subfolder else ''}: {error}"


def _load_single_file(path: Path, source: ModelSource, dtype: torch.dtype) -> nn.Module:
    """Load one safetensors file: in diffusers' own layout with a ``config.json`` beside it, or in an original layout
    that diffusers' single-file loader recognises."""
    sidecar = path.with_name("config.json")
    if sidecar.is_file():
        config = json.loads(sidecar.read_text())
        cls = _vae_class(_class_name(config, source, str(sidecar)), str(sidecar), config)
        state = load_file(str(path))
        with family_class(cls.__name__).building():
            model: nn.Module = cls.from_config(config)
        decoder = {key for key in model.state_dict() if key.startswith("decoder.")}
        # Original checkpoints have a decoder, too, but by other names.
        if len(decoder & state.keys()) * 2 > len(decoder):
            return _from_state(model, state, dtype, path)
        return _from_single_file(cls, path, dtype, config=str(path.parent))
    if source.class_name is None:
        raise ConfigError(
            f"{path} has no config.json beside it; put the VAE's there, or set model.class_name "
            f"(one of {', '.join(sorted(FAMILIES))})"
        )
    return _from_single_file(_vae_class(source.class_name, str(path), {}), path, dtype)


def _from_state(model: nn.Module, state: dict[str, torch.Tensor], dtype: torch.dtype, path: Path) -> nn.Module:
    """Fill the decoder side of ``model`` from ``state``, which has diffusers' names."""
    wanted = {key for key in model.state_dict() if not key.startswith(tuple(f"{part}." for part in _ENCODER_PARTS))}
    missing = sorted(wanted - state.keys())
    if missing:
        raise ConfigError(
            f"{path} lacks {len(missing)} decoder tensors of {type(model).__name__}, for example {missing[0]}"
        )
    try:
        model.load_state_dict({key: value for key, value in state.items() if key in wanted}, strict=False)
    except RuntimeError as error:
        raise ConfigError(f"{path} does not fit its config.json: {error}") from error
    pinned = tuple(getattr(model, "_keep_in_fp32_modules", None) or ())
    for name, parameter in model.named_parameters():
        if not any(part in name.split(".") for part in pinned):
            parameter.data = parameter.data.to(dtype)
    return model


def _from_single_file(cls: type[nn.Module], path: Path, dtype: torch.dtype, **options: Any) -> nn.Module:
    if not hasattr(cls, "from_single_file"):
        raise ConfigError(f"{cls.__name__} cannot be read from a single file in this layout; use a diffusers folder")
    try:
        return cls.from_single_file(str(path), torch_dtype=dtype, **options)
    except Exception as error:  # noqa: BLE001 - diffusers raises many kinds here, all of them about the file
        raise ConfigError(f"cannot load {cls.__name__} from {path}: {error}") from error


def _class_name(config: dict[str, Any], source: ModelSource, where: str) -> str | None:
    """The class that a config names, or the setting where it names none.

    Raises:
        ConfigError: if both name one and disagree.
    """
    named = config.get("_class_name")
    if named and source.class_name and named != source.class_name:
        raise ConfigError(f"{where} is a {named}, but model.class_name says {source.class_name}; remove the setting")
    return named or source.class_name


def _vae_class(class_name: str | None, where: str, config: dict[str, Any]) -> Any:
    """What diffusers has under ``class_name``: a family's class, or another that decodes latents to pictures."""
    if class_name is None:
        raise ConfigError(f"{where} does not say its class; set model.class_name")
    cls = getattr(diffusers, class_name, None)
    if cls is None:
        raise ConfigError(
            f"{where} is a {class_name}, which the installed diffusers {diffusers.__version__} does not have; install a newer one"
        )
    problem = None if class_name in FAMILIES else unlisted_problem(cls, config)
    if problem:
        raise ConfigError(
            f"{where} is a {class_name}, {problem}; known VAEs are {', '.join(sorted(FAMILIES))}, and any other class of "
            "diffusers whose decode(z) makes pictures or videos of latents runs untested"
        )
    return cls
