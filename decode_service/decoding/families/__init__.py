"""The families that this service knows, by the diffusers classes they decode."""

from __future__ import annotations

from decode_service.decoding.families.allegro import AllegroFamily
from decode_service.decoding.families.autoencoder_kl import AutoencoderKLFamily
from decode_service.decoding.families.base import Family
from decode_service.decoding.families.cogvideox import CogVideoXFamily
from decode_service.decoding.families.magvit import MagvitFamily
from decode_service.decoding.families.minimax_h3 import MiniMaxH3Family
from decode_service.decoding.families.mochi import MochiFamily
from decode_service.decoding.families.qwen_image import QwenImageFamily
from decode_service.decoding.families.qwen_image21 import QwenImage21Family
from decode_service.decoding.families.temporal_decoder import TemporalDecoderFamily
from decode_service.decoding.families.wan import WanFamily

FAMILIES: dict[str, type[Family]] = {
    class_name: family
    for family in (
        AutoencoderKLFamily,
        WanFamily,
        QwenImageFamily,
        QwenImage21Family,
        MiniMaxH3Family,
        CogVideoXFamily,
        MochiFamily,
        TemporalDecoderFamily,
        MagvitFamily,
        AllegroFamily,
    )
    for class_name in family.class_names
}

__all__ = ["FAMILIES", "Family"]
