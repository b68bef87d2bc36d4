"""Whatever a caller holds latents in, as a ``WireTensor``. Torch is used only where the caller has imported it."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from decode_client._safetensors import read_tensor
from decode_client.wire import LATENT_DTYPES, WireError, WireTensor

if TYPE_CHECKING:
    import torch

Latents: TypeAlias = "torch.Tensor | np.ndarray[Any, Any] | str | os.PathLike[str] | WireTensor"


def latents_tensor(latents: Latents) -> WireTensor:
    """Latents as the wire carries them; values and dtype are never changed.

    Args:
        latents: a torch tensor (any device and strides, also one that requires grad), a numpy array (any strides and
            byte order), the path of a .safetensors file with one tensor or one called ``latents``, or a ``WireTensor``.

    Raises:
        ValueError: if the dtype is not float32, float16 or bfloat16, an extent is zero, or the file is not right.
        TypeError: if it is something else altogether.
        OSError: if the file cannot be read.
    """
    tensor = _tensor(latents)
    if tensor.dtype not in LATENT_DTYPES:
        raise WireError(f"latents must be one of {', '.join(LATENT_DTYPES)}, got {tensor.dtype}", param="latents.dtype")
    return tensor


def _tensor(latents: Any) -> WireTensor:
    if isinstance(latents, WireTensor):
        return latents
    if isinstance(latents, (str, os.PathLike)):
        return read_tensor(latents, "latents")
    torch = sys.modules.get("torch")
    try:
        if torch is not None and isinstance(latents, torch.Tensor):
            return _from_torch(torch, latents)
        if isinstance(latents, (np.ndarray, np.generic)):
            return WireTensor.from_array(latents)
    except WireError as error:
        raise error.under("latents") from None
    raise TypeError(
        "latents must be a torch tensor, a numpy array, the path of a .safetensors file or a WireTensor, "
        f"got {type(latents).__name__}"
    )


def _from_torch(torch: Any, tensor: Any) -> WireTensor:
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in LATENT_DTYPES:
        raise WireError(
            f"latents must be one of {', '.join(LATENT_DTYPES)}, got {name}: convert them, for example by "
            ".to(torch.float32)",
            param="dtype",
        )
    contiguous = tensor.detach().cpu().contiguous()
    # Viewing the bytes works for every dtype, also for those that numpy does not have.
    data = contiguous.reshape(-1).view(torch.uint8).numpy()
    return WireTensor(name, tuple(tensor.shape), data.data)
