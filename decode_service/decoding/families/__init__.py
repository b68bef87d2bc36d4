"""The families that this service knows, by the diffusers classes they decode."""

from __future__ import annotations

from decode_service.decoding.families.autoencoder_kl import AutoencoderKLFamily
from decode_service.decoding.families.base import Family
from decode_service.decoding.families.hunyuan_video import HunyuanVideoFamily
from decode_service.decoding.families.hunyuan_video15 import HunyuanVideo15Family
from decode_service.decoding.families.ltx2_video import LTX2VideoFamily
from decode_service.decoding.families.ltx_video import LTXVideoFamily
from decode_service.decoding.families.minimax_h3 import MiniMaxH3Family
from decode_service.decoding.families.qwen_image import QwenImageFamily
from decode_service.decoding.families.wan import WanFamily

FAMILIES: dict[str, type[Family]] = {
    class_name: family
    for family in (
        AutoencoderKLFamily,
        WanFamily,
        QwenImageFamily,
        HunyuanVideoFamily,
        HunyuanVideo15Family,
        LTXVideoFamily,
        LTX2VideoFamily,
        MiniMaxH3Family,
    )
    for class_name in family.class_names
}

__all__ = ["FAMILIES", "Family"]
