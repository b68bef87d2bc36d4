"""Trains the demo VAE from nothing and writes everything the folder ships. Run it as a module:

    python -m decode_service.demo.train --work-dir /some/scratch/folder

It overfits its three photographs on purpose: the result is a fixture and a demonstration, not a VAE to use. The stages
run in order, about forty minutes in all on two CPU cores:

1. `stills`: single frames, as a 2-D network (see network.py). Most of the quality comes from here.
2. `clips`: short crops of the moving samples; trains the temporal kernels.
3. `latents`: the samples' latents themselves, by gradient descent through the rounded, frozen decoder.
4. The export: float16 weights, latent statistics into config.json, the sample latents, and the PSNR of each.

A checkpoint (safetensors) is written to the work folder every minute and a second run goes on from it; each stage ends
at its own number of seconds of training. `--export-only` writes the files from the latest checkpoint.

Seeded, but not bitwise repeatable: the stages end by the clock.

Shape suffixes: B batch, C channels, T latent frames, F frames, H/W height and width.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKLWan
from safetensors.torch import load_file, save_file
from torch import Tensor

from decode_service.demo import CAMERA_MOVES, DEMO_VAE_DIR, SAMPLES, original_frames
from decode_service.demo.network import TrainableVAE, start_as_a_slideshow

SEED = 0
CHECKPOINT_SECONDS = 60.0
CROP_PIXELS = {"stills": 128, "clips": 96}
LOG_VARIANCE = -12.0
"""What the encoder reports for every latent: it is trained without noise, so a sample should be its mean."""

Source = dict[str, Tensor]
"""Per sample, the frames as pixels in [-1, 1], (1, 3, F, H, W)."""


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

    def __init__(self, parameters: list[torch.nn.Parameter], lr: float) -> None:
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
    wide = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if wide else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.T if wide else x


class Clock:
    """Seconds of training a stage has had, over all runs, and the learning rate that follows from them."""

    def __init__(self, total_seconds: float, spent_seconds: float, peak_lr: float) -> None:
        self.total_seconds = total_seconds
        self.peak_lr = peak_lr
        self._spent_before = spent_seconds
        self._started = time.monotonic()

    @property
    def spent_seconds(self) -> float:
        return self._spent_before + time.monotonic() - self._started

    @property
    def over(self) -> bool:
        return self.spent_seconds >= self.total_seconds

    @property
    def lr(self) -> float:
        """Ten seconds of warm-up, then a half cosine to zero."""
        share = min(self.spent_seconds / self.total_seconds, 1.0)
        return self.peak_lr * min(self.spent_seconds / 10.0 + 0.01, 1.0) * 0.5 * (1 + math.cos(math.pi * share))


def still_batches(source: Source, generator: torch.Generator) -> Iterator[Tensor]:
    """Eight crops (8, 3, 1, 128, 128) a batch; every sixteenth batch is one whole frame, for the global attention."""
    names = list(source)
    # By area, not by number of frames: the frames of a clip are one photograph, and the still is another.
    shares = torch.tensor([0.2, 0.4, 0.4])
    step = 0
    while True:
        step += 1
        picks = [names[i] for i in torch.multinomial(shares, 8, replacement=True, generator=generator)]
        frames = [_random_frame(source[name], generator) for name in picks]
        if step % 16 == 0:
            yield frames[0]
        else:
            yield torch.cat([_random_crop(frame, CROP_PIXELS["stills"], generator) for frame in frames])


def clip_batches(source: Source, generator: torch.Generator) -> Iterator[Tensor]:
    """Two crops a batch, (2, 3, F, 96, 96), one of each moving sample, all its frames.

    Every eighth batch is instead a few frames uncropped, for the global attention, and every eighth one is the still,
    which would be forgotten otherwise.
    """
    moving = [name for name, pixels in source.items() if pixels.shape[2] > 1]
    still = next(name for name in source if name not in moving)
    step = 0
    while True:
        step += 1
        if step % 8 == 4:
            pixels = source[moving[step // 8 % len(moving)]]
            first = int(torch.randint(pixels.shape[2] - 4, (1,), generator=generator))
            yield pixels[:, :, first : first + 5]
        elif step % 8 == 0:
            yield source[still]
        else:
            yield torch.cat([_random_crop(source[name], CROP_PIXELS["clips"], generator) for name in moving])


def _random_frame(pixels: Tensor, generator: torch.Generator) -> Tensor:
    frame = int(torch.randint(pixels.shape[2], (1,), generator=generator))
    return pixels[:, :, frame : frame + 1]


def _random_crop(pixels: Tensor, size: int, generator: torch.Generator) -> Tensor:
    # Any pixel offset, not only multiples of 8: the samples are encoded on one grid, but a VAE should not care.
    top, left = (int(torch.randint(n - size + 1, (1,), generator=generator)) for n in pixels.shape[-2:])
    return pixels[..., top : top + size, left : left + size]


def train_stage(
    net: TrainableVAE, batches: Iterator[Tensor], clock: Clock, checkpoint: Callable[[float], None], compile_: bool
) -> None:
    """Minimises the mean squared error until the clock runs out; PSNR is what the samples are judged by."""

    def loss_of(pixels: Tensor) -> Tensor:
        return (net.decode(net.encode(pixels)) - pixels).square().mean()

    crops_loss = torch.compile(loss_of) if compile_ else loss_of
    crop_shape = None
    optimizer = MuonAdam([p for p in net.parameters() if p.requires_grad], clock.peak_lr)
    last_checkpoint, running, step = clock.spent_seconds, 0.0, 0
    while not clock.over:
        for group in optimizer.param_groups:
            group["lr"] = clock.lr
        pixels = next(batches)
        crop_shape = crop_shape or pixels.shape
        # The rare whole frames come in several shapes: compiling each would cost more than it saves.
        loss = (crops_loss if pixels.shape == crop_shape else loss_of)(pixels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        running = loss.item() if step == 1 else running + 0.05 * (loss.item() - running)
        if step % 25 == 0:
            print(f"  {clock.spent_seconds:6.0f} s  step {step:5d}  {psnr_of_mse(running):.2f} dB", flush=True)
        if clock.spent_seconds - last_checkpoint > CHECKPOINT_SECONDS:
            last_checkpoint = clock.spent_seconds
            net.write_back()
            checkpoint(clock.spent_seconds)
    net.write_back()
    checkpoint(clock.total_seconds)


def psnr_of_mse(mse: float) -> float:
    """PSNR in dB of a mean squared error between pixels in [-1, 1]."""
    return 10 * math.log10(4.0 / mse)


def check_against_diffusers(vae: AutoencoderKLWan) -> None:
    """Refuses to train a network that is not the one diffusers runs."""
    generator = torch.Generator().manual_seed(SEED)
    clip = torch.rand(1, 3, 9, 32, 48, generator=generator) * 2 - 1
    for planar, pixels in ((True, clip[:, :, :1]), (False, clip)):
        net = TrainableVAE(vae, planar)
        with torch.no_grad():
            latents = vae.encode(pixels).latent_dist.mode()
            torch.testing.assert_close(net.encode(pixels), latents, atol=1e-4, rtol=1e-4)
            decoded = net.decode(latents).clamp(-1, 1)
            torch.testing.assert_close(decoded, vae.decode(latents).sample, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def latents_of(vae: AutoencoderKLWan, source: Source) -> Source:
    """The encoder's mean latents of every sample."""
    return {name: vae.encode(pixels).latent_dist.mode() for name, pixels in source.items()}


def polish_latents(vae: AutoencoderKLWan, source: Source, latents: Source, clock: Clock) -> Source:
    """Moves each sample's latents to where the frozen decoder does best, starting from the encoder's.

    Latents are data: nothing says that they must come from this encoder. The update is Adam's; samples take turns.
    """
    vae.requires_grad_(False)
    net = TrainableVAE(vae, planar=False).requires_grad_(False)
    polished = {name: value.clone().requires_grad_(True) for name, value in latents.items()}
    optimizers = {name: torch.optim.Adam([value], betas=(0.9, 0.95)) for name, value in polished.items()}
    step = 0
    while not clock.over:
        for name, value in polished.items():
            optimizers[name].param_groups[0]["lr"] = clock.lr
            loss = (net.decode(value) - source[name]).square().mean()
            optimizers[name].zero_grad()
            loss.backward()
            optimizers[name].step()
            if step % 5 == 0:
                print(f"  {clock.spent_seconds:6.0f} s  {name:10s} {psnr_of_mse(loss.item()):.2f} dB", flush=True)
        step += 1
    return {name: value.detach() for name, value in polished.items()}


@torch.no_grad()
def finish_vae(vae: AutoencoderKLWan, latents: Source) -> AutoencoderKLWan:
    """Fixes the reported variance, rounds the weights to float16 and records the latents' statistics.

    Each sample counts once in the statistics, however many frames it has. Returns a float32 VAE whose weights are the
    float16 ones: what a service that decodes in float32 will load.
    """
    vae.quant_conv.weight[vae.z_dim :] = 0
    vae.quant_conv.bias[vae.z_dim :] = LOG_VARIANCE
    means = torch.stack([value.mean(dim=(0, 2, 3, 4)) for value in latents.values()])
    squares = torch.stack([value.square().mean(dim=(0, 2, 3, 4)) for value in latents.values()])
    mean = means.mean(dim=0)
    std = (squares.mean(dim=0) - mean.square()).sqrt()
    vae.register_to_config(
        latents_mean=[round(v, 4) for v in mean.tolist()], latents_std=[round(v, 4) for v in std.tolist()]
    )
    return vae.half().float()


def save_samples(latents: Source) -> None:
    """One safetensors file per sample, float16: a tenth of the rounding of an 8-bit pixel, half the size."""
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


def save_vae(vae: AutoencoderKLWan) -> None:
    """diffusers layout, float16. The config names every setting and no machine's paths."""
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
            pixels = vae.decode(load_file(path)["latents"].float()).sample[0].permute(1, 2, 3, 0).numpy()
        frames = np.round((pixels + 1) * 127.5)
        mse_F = np.square(frames - original_frames(name)).mean(axis=(1, 2, 3))
        psnr_F = 10 * np.log10(255.0**2 / mse_F)
        result[name] = float(psnr_F.mean())
        print(f"{name:10s} {psnr_F.mean():.2f} dB (worst frame {psnr_F.min():.2f})")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work-dir", type=Path, required=True, help="for checkpoints; outside the repository")
    parser.add_argument("--stills-seconds", type=float, default=900.0)
    parser.add_argument("--clips-seconds", type=float, default=1200.0)
    parser.add_argument("--latents-seconds", type=float, default=240.0)
    parser.add_argument("--stills-lr", type=float, default=4e-3)
    parser.add_argument("--clips-lr", type=float, default=2e-3)
    parser.add_argument("--latents-lr", type=float, default=2e-2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--compile", action="store_true", help="torch.compile the training step (needs a C++ compiler)")
    parser.add_argument("--export-only", action="store_true", help="skip training; write from the latest checkpoint")
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    args.work_dir.mkdir(parents=True, exist_ok=True)
    weights_file, progress_file = args.work_dir / "vae.safetensors", args.work_dir / "progress.json"

    vae, source = new_vae(), load_pixels()
    check_against_diffusers(vae)
    start_as_a_slideshow(vae)
    progress = {"stills": 0.0, "clips": 0.0}
    if weights_file.exists():
        vae.load_state_dict(load_file(weights_file))
        progress = json.loads(progress_file.read_text())
        print("going on from", progress)

    stages = (("stills", True, still_batches, args.stills_seconds), ("clips", False, clip_batches, args.clips_seconds))
    for name, planar, batches, seconds in stages:
        if args.export_only or progress[name] >= seconds:
            continue
        print(name)

        def checkpoint(spent_seconds: float, name: str = name) -> None:
            progress[name] = spent_seconds
            save_file(vae.state_dict(), weights_file)
            progress_file.write_text(json.dumps(progress))

        clock = Clock(seconds, progress[name], getattr(args, f"{name}_lr"))
        # Another seed after a resume, or it would see the same crops again.
        generator = torch.Generator().manual_seed(SEED + int(clock.spent_seconds))
        train_stage(TrainableVAE(vae, planar), batches(source, generator), clock, checkpoint, args.compile)

    vae = finish_vae(vae, latents_of(vae, source))
    print("latents")
    clock = Clock(args.latents_seconds, 0.0, args.latents_lr)
    latents = polish_latents(vae, source, latents_of(vae, source), clock)
    save_samples(latents)
    save_vae(vae)
    report()


if __name__ == "__main__":
    main()
