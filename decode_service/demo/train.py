"""Trains the demo VAE from nothing and writes everything the folder ships. Run it as a module:

    python -m decode_service.demo.train --work-dir /some/scratch/folder

It overfits its three photographs on purpose: the result is a fixture and a demonstration, not a VAE to use. The stages
run in order, about forty minutes in all on two CPU cores:

1. `stills`: encoder and decoder on single frames, as a 2-D network (see network.py). Most of the quality comes from
   here.
2. `clips`: the decoder's temporal kernels, on crops of the moving samples. Their latents are trained along with it
   instead of coming from the encoder, which is cheaper and lets them say what moves. Stills go on in between.
3. `latents`: all sample latents, by gradient descent through the decoder as it is shipped, frozen and rounded.
4. The export: float16 weights, latent statistics into config.json, the sample latents, and the PSNR of each.

A checkpoint (safetensors) is written to the work folder every minute and a second run goes on from it; each stage ends
at its own number of seconds of training.

Seeded, but not bitwise repeatable: the stages end by the clock.

Shape suffixes: B batch, C channels, T latent frames, F frames, H/W height and width.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKLWan
from safetensors.torch import load_file, save_file
from torch import Tensor

from decode_service.demo import CAMERA_MOVES, DEMO_VAE_DIR, SAMPLES, original_frames
from decode_service.demo.network import TrainableVAE, start_as_a_crossfade

SEED = 0
CHECKPOINT_SECONDS = 60.0
STILLS_LR, CLIPS_LR, LATENTS_LR = 4e-3, 1.5e-3, 2e-2
STILL_CROP_PIXELS = 128
CLIP_CROP_PIXELS = 96
LOG_VARIANCE = -12.0
"""What the encoder reports for every latent: it is trained without noise, so a sample should be its mean."""

Source = dict[str, Tensor]
"""Per sample: frames as pixels in [-1, 1], (1, 3, F, H, W), or latents, (1, C, T, H, W)."""


def new_vae() -> AutoencoderKLWan:
    """The Wan 2.1 architecture, one sixth as wide."""
    torch.manual_seed(SEED)
    return AutoencoderKLWan(base_dim=16, z_dim=16)


def load_pixels() -> Source:
    """The original frames of every sample, ready for the network."""
    source = {}
    for name in CAMERA_MOVES:
        frames_FHWC = torch.from_numpy(original_frames(name)).float() / 127.5 - 1
        source[name] = frames_FHWC.permute(3, 0, 1, 2).unsqueeze(0).contiguous()
    return source


class MuonAdam(torch.optim.Optimizer):
    """Muon for kernels, Adam for vectors; on this task it takes far fewer steps than Adam alone.

    Muon (Jordan et al. 2024) replaces a kernel's momentum, flattened to (out, in x taps), by the nearest
    semi-orthogonal matrix; the 0.2 sqrt(max(out, in)) scale makes one learning rate serve both rules (Liu et al. 2025).
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter], lr: float = 1e-3) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(steps=0, mean=torch.zeros_like(p), square=torch.zeros_like(p))
                state["steps"] += 1
                # Gammas are (C, 1, 1): vectors, whatever their number of dims.
                if p.ndim >= 2 and p.numel() > p.shape[0]:
                    state["mean"].mul_(0.95).add_(p.grad)
                    direction = (p.grad + 0.95 * state["mean"]).flatten(1)
                    update = orthogonalize(direction) * (0.2 * math.sqrt(max(direction.shape)))
                    p.add_(update.view_as(p), alpha=-group["lr"])
                else:
                    state["mean"].lerp_(p.grad, 0.1)
                    state["square"].lerp_(p.grad.square(), 0.01)
                    mean = state["mean"] / (1 - 0.9 ** state["steps"])
                    square = state["square"] / (1 - 0.99 ** state["steps"])
                    p.addcdiv_(mean, square.sqrt().add_(1e-8), value=-group["lr"])


def orthogonalize(matrix: Tensor) -> Tensor:
    """Pushes all singular values towards 1 by five Newton-Schulz steps, with the coefficients of the Muon report."""
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.T if tall else x


class Clock:
    """Seconds of training a stage has had, over all runs, and the learning rate that follows from them."""

    def __init__(self, total_seconds: float, spent_seconds: float) -> None:
        self.total_seconds = total_seconds
        self._spent_before = spent_seconds
        self._started = time.monotonic()

    @property
    def spent_seconds(self) -> float:
        return self._spent_before + time.monotonic() - self._started

    @property
    def over(self) -> bool:
        return self.spent_seconds >= self.total_seconds

    @property
    def lr_share(self) -> float:
        """Share of the peak learning rate: ten seconds of warm-up, then a half cosine to zero."""
        share = min(self.spent_seconds / self.total_seconds, 1.0)
        return min(self.spent_seconds / 10.0 + 0.01, 1.0) * 0.5 * (1 + math.cos(math.pi * share))


def still_losses(net: TrainableVAE, source: Source, batch: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Autoencodes crops of single frames; every sixteenth step is one whole frame, for the global attention."""
    names = list(source)
    # By area, not by number of frames: the frames of a clip are one photograph, and the still is another.
    shares = torch.tensor([0.2, 0.4, 0.4])
    step = 0
    while True:
        step += 1
        picks = [names[i] for i in torch.multinomial(shares, batch, replacement=True, generator=generator)]
        frames = [source[name][:, :, _below(source[name].shape[2], generator)].unsqueeze(2) for name in picks]
        if step % 16 == 0:
            pixels = frames[0]
        else:
            # Any pixel offset, not only multiples of 8: a VAE should not care where its grid lies.
            pixels = torch.cat([_random_crop(frame, STILL_CROP_PIXELS, generator) for frame in frames])
        yield (net.decode(net.encode(pixels)) - pixels).square().mean()


def clip_losses(net: TrainableVAE, source: Source, latents: Source, generator: torch.Generator) -> Iterator[Tensor]:
    """Decodes crops of the moving samples' latents, all frames, in turn; every fourth step goes to the stills."""
    moving = [name for name, pixels in source.items() if pixels.shape[2] > 1]
    stills = still_losses(net, source, 3, generator)
    cells = CLIP_CROP_PIXELS // 8
    step = 0
    while True:
        step += 1
        if step % 4 == 0:
            yield next(stills)
            continue
        name = moving[step % len(moving)]
        top, left = (_below(size - cells + 1, generator) for size in latents[name].shape[-2:])
        crop = latents[name][..., top : top + cells, left : left + cells]
        pixels = source[name][..., 8 * top : 8 * (top + cells), 8 * left : 8 * (left + cells)]
        yield (net.decode(crop) - pixels).square().mean()


def _below(limit: int, generator: torch.Generator) -> int:
    return int(torch.randint(limit, (1,), generator=generator))


def _random_crop(pixels: Tensor, size: int, generator: torch.Generator) -> Tensor:
    top, left = (_below(n - size + 1, generator) for n in pixels.shape[-2:])
    return pixels[..., top : top + size, left : left + size]


def train_stage(
    losses: Iterator[Tensor],
    optimizers: dict[torch.optim.Optimizer, float],
    clock: Clock,
    checkpoint: Callable[[], None],
) -> None:
    """Minimises the mean squared error, which is what PSNR measures, until the clock runs out.

    `optimizers` maps each to its peak learning rate.
    """
    last_checkpoint, running, step = clock.spent_seconds, 0.0, 0
    while not clock.over:
        for optimizer, peak_lr in optimizers.items():
            optimizer.zero_grad()
            optimizer.param_groups[0]["lr"] = peak_lr * clock.lr_share
        loss = next(losses)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        step += 1
        running = loss.item() if step == 1 else running + 0.05 * (loss.item() - running)
        if step % 25 == 0:
            print(f"  {clock.spent_seconds:6.0f} s  step {step:5d}  {psnr_of_mse(running):.2f} dB", flush=True)
        if clock.spent_seconds - last_checkpoint > CHECKPOINT_SECONDS:
            last_checkpoint = clock.spent_seconds
            checkpoint()
    checkpoint()


def psnr_of_mse(mse: float) -> float:
    """PSNR in dB of a mean squared error between pixels in [-1, 1]."""
    return 10 * math.log10(4.0 / mse)


@torch.no_grad()
def check_against_diffusers(vae: AutoencoderKLWan) -> None:
    """Refuses to train a network that is not the one diffusers runs."""
    net = TrainableVAE(vae)
    clip = torch.rand(1, 3, 9, 32, 48, generator=torch.Generator().manual_seed(SEED)) * 2 - 1
    for pixels in (clip[:, :, :1], clip):
        latents = vae.encode(pixels).latent_dist.mode()
        torch.testing.assert_close(net.encode(pixels), latents, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(net.decode(latents).clamp(-1, 1), vae.decode(latents).sample, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def latents_of(vae: AutoencoderKLWan, source: Source) -> Source:
    """The encoder's mean latents of every sample."""
    return {name: vae.encode(pixels).latent_dist.mode() for name, pixels in source.items()}


def polish_latents(vae: AutoencoderKLWan, source: Source, latents: Source, clock: Clock, peak_lr: float) -> Source:
    """Moves each sample's latents to where the frozen decoder does best. Whole frames, Adam, samples in turn.

    Latents are data: nothing says that they must come from this encoder.
    """
    net = TrainableVAE(vae).requires_grad_(False)
    polished = {name: value.clone().requires_grad_(True) for name, value in latents.items()}
    optimizers = {name: torch.optim.Adam([value], betas=(0.9, 0.95), eps=1e-14) for name, value in polished.items()}
    step = 0
    while not clock.over:
        for name, optimizer in optimizers.items():
            optimizer.param_groups[0]["lr"] = peak_lr * clock.lr_share
            loss = (net.decode(polished[name]) - source[name]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(f"  {clock.spent_seconds:6.0f} s  {step:3d} {name:10s} {psnr_of_mse(loss.item()):.2f} dB", flush=True)
        step += 1
    return {name: value.detach() for name, value in polished.items()}


@torch.no_grad()
def finish_vae(vae: AutoencoderKLWan) -> AutoencoderKLWan:
    """Fixes the reported variance and rounds the weights to float16.

    Returns it in float32: what a service that decodes in float32 will load.
    """
    vae.quant_conv.weight[vae.z_dim :] = 0
    vae.quant_conv.bias[vae.z_dim :] = LOG_VARIANCE
    return vae.half().float()


def latent_statistics(latents: Source) -> dict[str, list[float]]:
    """Mean and standard deviation per channel, each sample counting once, however many frames it has."""
    means = torch.stack([value.mean(dim=(0, 2, 3, 4)) for value in latents.values()])
    squares = torch.stack([value.square().mean(dim=(0, 2, 3, 4)) for value in latents.values()])
    mean = means.mean(dim=0)
    std = (squares.mean(dim=0) - mean.square()).sqrt()
    return {
        "latents_mean": [round(v, 4) for v in mean.tolist()],
        "latents_std": [round(v, 4) for v in std.tolist()],
    }


def save_samples(latents: Source) -> None:
    """One safetensors file per sample, float16: rounds far more finely than an 8-bit pixel does, at half the size."""
    for name, value in latents.items():
        SAMPLES[name].parent.mkdir(parents=True, exist_ok=True)
        metadata = {
            "latents": "raw: as AutoencoderKLWan.decode takes them; do not apply latents_mean and latents_std",
            "layout": "B C T H W",
            "frames": str(1 + 4 * (value.shape[2] - 1)),
            "height": str(8 * value.shape[3]),
            "width": str(8 * value.shape[4]),
        }
        save_file({"latents": value.half().contiguous()}, SAMPLES[name], metadata=metadata)
        SAMPLES[name].chmod(0o644)


def save_vae(vae: AutoencoderKLWan, latents: Source) -> None:
    """diffusers layout, float16. The config has the samples' statistics and no machine's paths."""
    vae.register_to_config(**latent_statistics(latents))
    vae.half().save_pretrained(DEMO_VAE_DIR)
    for file in DEMO_VAE_DIR.iterdir():
        file.chmod(0o644)  # safetensors writes files that only their owner can read
    config_file = DEMO_VAE_DIR / "config.json"
    config = {k: v for k, v in json.loads(config_file.read_text()).items() if k != "_name_or_path"}
    config_file.write_text(json.dumps(config, indent=2) + "\n")


def report() -> dict[str, float]:
    """PSNR in dB of each sample as shipped: the files, decoded by diffusers in float32, against the original frames."""
    vae = AutoencoderKLWan.from_pretrained(DEMO_VAE_DIR, torch_dtype=torch.float32)
    result = {}
    for name, path in SAMPLES.items():
        with torch.inference_mode():
            pixels_FHWC = vae.decode(load_file(path)["latents"].float()).sample[0].permute(1, 2, 3, 0).numpy()
        error = np.round((pixels_FHWC + 1) * 127.5) - original_frames(name)
        psnr_F = 10 * np.log10(255.0**2 / np.square(error).mean(axis=(1, 2, 3)))
        result[name] = float(psnr_F.mean())
        print(f"{name:10s} {psnr_F.mean():.2f} dB (worst frame {psnr_F.min():.2f})")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--work-dir", type=Path, required=True, help="for checkpoints; outside the repository")
    parser.add_argument("--stills-seconds", type=float, default=900.0)
    parser.add_argument("--clips-seconds", type=float, default=1200.0)
    parser.add_argument("--latents-seconds", type=float, default=300.0)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    args.work_dir.mkdir(parents=True, exist_ok=True)
    weights_file, latents_file = args.work_dir / "vae.safetensors", args.work_dir / "latents.safetensors"
    progress_file = args.work_dir / "progress.json"

    vae, source = new_vae(), load_pixels()
    check_against_diffusers(vae)
    start_as_a_crossfade(vae)
    progress = {"stills": 0.0, "clips": 0.0}
    if progress_file.exists():
        vae.load_state_dict(load_file(weights_file))
        progress = json.loads(progress_file.read_text())
        print("going on from", progress)
    net = TrainableVAE(vae)
    # Another seed after a resume, or it would see the same crops again.
    generator = torch.Generator().manual_seed(SEED + int(sum(progress.values())))

    clock = Clock(args.stills_seconds, progress["stills"])
    if not clock.over and not progress["clips"]:
        print("stills")

        def checkpoint_stills() -> None:
            progress["stills"] = clock.spent_seconds
            save_file(vae.state_dict(), weights_file)
            progress_file.write_text(json.dumps(progress))

        losses = still_losses(net, source, 8, generator)
        train_stage(losses, {MuonAdam(vae.parameters()): STILLS_LR}, clock, checkpoint_stills)

    latents = load_file(latents_file) if progress["clips"] else latents_of(vae, source)
    clips_clock = Clock(args.clips_seconds, progress["clips"])
    if not clips_clock.over:
        print("clips")

        def checkpoint_clips() -> None:
            progress["clips"] = clips_clock.spent_seconds
            save_file(vae.state_dict(), weights_file)
            save_file({name: value.detach() for name, value in latents.items()}, latents_file)
            progress_file.write_text(json.dumps(progress))

        moving = [value.requires_grad_(True) for value in latents.values() if value.shape[2] > 1]
        optimizers = {
            MuonAdam(vae.parameters()): CLIPS_LR,
            torch.optim.Adam(moving, betas=(0.5, 0.95), eps=1e-14): LATENTS_LR,
        }
        train_stage(clip_losses(net, source, latents, generator), optimizers, clips_clock, checkpoint_clips)

    print("latents")
    vae = finish_vae(vae)
    latents = {name: value.detach() for name, value in latents.items()}
    # The still's were taken before the decoder went on learning.
    latents["still"] = latents_of(vae, {"still": source["still"]})["still"]
    latents = polish_latents(vae, source, latents, Clock(args.latents_seconds, 0.0), LATENTS_LR)
    save_samples(latents)
    save_vae(vae, latents)
    report()


if __name__ == "__main__":
    main()
