"""The models that are measured: real architectures at real size, with random weights.

Speed does not depend on the weights' values, and the real ones need a network. Accuracy does a little: the weights are
scaled so that the picture has the spread of a real one, and errors are reported relative to it, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

#: Standard deviation of the decoded pixels before they are clamped. Photographs in [-1, 1] have about as much.
OUTPUT_STD = 0.4


@dataclass(frozen=True, slots=True)
class Model:
    """One architecture.

    Attributes:
        name: as commands name it.
        title: as tables name it.
        build: makes the diffusers model; its argument says whether a narrow one is wanted.
        ratio: pixels per latent cell.
        size: height and width of the picture that is decoded by default, in pixels.
        frames: latent frames of the clips that are decoded by default; None for models of pictures, with 4-D latents.
    """

    name: str
    title: str
    build: Callable[[bool], nn.Module]
    ratio: int
    size: int
    frames: tuple[int, ...] | None

    def latent_shape(self, channels: int, size: int, frames: int) -> tuple[int, ...]:
        """Latents of a picture or clip of ``size`` x ``size`` pixels.

        Raises:
            ValueError: if ``size`` is not a whole number of latent cells.
        """
        if size < self.ratio or size % self.ratio:
            raise ValueError(
                f"{self.name} decodes multiples of {self.ratio} pixels, not {size}; try {max(1, size // self.ratio) * self.ratio}"
            )
        cells = size // self.ratio
        return (1, channels, cells, cells) if self.frames is None else (1, channels, frames, cells, cells)


def _autoencoder_kl(narrow: bool) -> nn.Module:
    """FLUX.1's: 16 channels, a shift, no quant convolutions."""
    widths = (8, 16, 16, 16) if narrow else (128, 256, 512, 512)
    model: nn.Module = diffusers.AutoencoderKL(
        block_out_channels=widths,
        down_block_types=("DownEncoderBlock2D",) * len(widths),
        up_block_types=("UpDecoderBlock2D",) * len(widths),
        layers_per_block=1 if narrow else 2,
        norm_num_groups=4 if narrow else 32,
        latent_channels=4 if narrow else 16,
        sample_size=1024,
        scaling_factor=0.3611,
        shift_factor=0.1159,
        use_quant_conv=False,
        use_post_quant_conv=False,
        force_upcast=True,
    )
    return model


_NARROW_CAUSAL: dict[str, Any] = {
    "base_dim": 8,
    "z_dim": 4,
    "num_res_blocks": 1,
    "latents_mean": [0.0] * 4,
    "latents_std": [1.0] * 4,
}


def _qwen_image(narrow: bool) -> nn.Module:
    model: nn.Module = diffusers.AutoencoderKLQwenImage(**(_NARROW_CAUSAL if narrow else {}))
    return model


def _wan21(narrow: bool) -> nn.Module:
    model: nn.Module = diffusers.AutoencoderKLWan(**(_NARROW_CAUSAL if narrow else {}))
    return model


def _wan22(narrow: bool) -> nn.Module:
    """Wan 2.2 5B's residual form. Only the decoder has its real width (the encoder is not used)."""
    sizes: dict[str, Any] = (
        {**_NARROW_CAUSAL, "decoder_base_dim": 8}
        if narrow
        else {
            "base_dim": 16,
            "decoder_base_dim": 256,
            "z_dim": 48,
            "latents_mean": [0.0] * 48,
            "latents_std": [1.0] * 48,
        }
    )
    model: nn.Module = diffusers.AutoencoderKLWan(
        **sizes,
        is_residual=True,
        patch_size=2,
        in_channels=12,
        out_channels=12,
        scale_factor_spatial=16,
    )
    return model


MODELS = {
    model.name: model
    for model in (
        Model("autoencoder_kl", "AutoencoderKL (FLUX.1)", _autoencoder_kl, 8, 256, None),
        Model("qwen_image", "Qwen-Image", _qwen_image, 8, 256, (1,)),
        Model("wan21", "Wan 2.1", _wan21, 8, 128, (1, 3)),
        Model("wan22", "Wan 2.2 5B", _wan22, 16, 192, (1,)),
    )
}


def write(model: Model, folder: Path, *, narrow: bool = False) -> int:
    """Write ``model`` with random weights to ``folder``, as diffusers lays models out, and return its latent channels.

    The last convolution is scaled so that its output has the standard deviation ``OUTPUT_STD``: with initial weights it
    is often near zero, where any error would look small.
    """
    torch.manual_seed(7)
    vae: Any = model.build(narrow).eval().requires_grad_(False)
    channels = latent_channels(vae)
    deviations: list[float] = []
    hook = vae.decoder.conv_out.register_forward_hook(
        lambda module, args, output: deviations.append(float(output.std()))
    )
    vae.decode(random_latents(model.latent_shape(channels, 8 * model.ratio, 1)))
    hook.remove()
    with torch.no_grad():
        for parameter in vae.decoder.conv_out.parameters():
            parameter.mul_(OUTPUT_STD / deviations[0])
    vae.save_pretrained(folder)
    return channels


def load(folder: Path, dtype: torch.dtype, device: torch.device) -> Any:
    """The model in ``folder`` as a user of diffusers loads it."""
    config = diffusers.AutoencoderKL.load_config(str(folder))
    cls = getattr(diffusers, config["_class_name"])
    return cls.from_pretrained(str(folder), torch_dtype=dtype, local_files_only=True).to(device).eval()


def latent_channels(vae: Any) -> int:
    """Channels of the latents that a diffusers model decodes."""
    config = vae.config
    return int(config["z_dim"] if "z_dim" in config else config["latent_channels"])


def random_latents(shape: Sequence[int]) -> torch.Tensor:
    """Latents (float32) as a denoiser leaves them: of unit variance, and the same every time."""
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(11))


def count_flops(model: Model, shape: Sequence[int], *, narrow: bool = False) -> int:
    """Arithmetic of diffusers' own decode of latents of ``shape``: two for each multiplication and addition.

    Counted by torch's flop counter on tensors without data. Convolutions, matrix products and attention count; the rest
    is not arithmetic of a size that matters.
    """
    with torch.device("meta"):
        vae: Any = model.build(narrow).eval()
        latents = torch.empty(tuple(shape))
    # The counter knows no formula for some kernels of fused attention; spelt out, it is matrix products.
    with torch.no_grad(), FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        vae.decode(latents)
    return int(counter.get_total_flops())
