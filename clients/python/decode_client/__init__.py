"""Client for a VAE decode service: latents in, pixels out."""
