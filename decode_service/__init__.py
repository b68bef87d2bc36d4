"""Latents in, pixels out: VAE decode as a service of its own, on a group of ranks.

The package is layered, and imports go one way only:
``decode_client.wire <- planning <- decoding <- engine <- http <- app``.
Importing a layer never pulls in a later one, so ``decode_service.decoding`` works without Ray and FastAPI.
"""

__version__ = "0.1.0"
