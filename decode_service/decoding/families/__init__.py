"""The families that this service knows, by the diffusers classes they decode."""

from __future__ import annotations

from decode_service.decoding.families.allegro import AllegroFamily
from decode_service.decoding.families.asymmetric_autoencoder_kl import AsymmetricAutoencoderKLFamily
from decode_service.decoding.families.autoencoder_dc import AutoencoderDCFamily
from decode_service.decoding.families.autoencoder_kl import AutoencoderKLFamily
from decode_service.decoding.families.autoencoder_tiny import AutoencoderTinyFamily
from decode_service.decoding.families.base import Family
from decode_service.decoding.families.cogvideox import CogVideoXFamily
from decode_service.decoding.families.cosmos import CosmosFamily
from decode_service.decoding.families.flux2 import Flux2Family
from decode_service.decoding.families.hunyuan_image import HunyuanImageFamily
from decode_service.decoding.families.hunyuan_image_refiner import HunyuanImageRefinerFamily
from decode_service.decoding.families.hunyuan_video import HunyuanVideoFamily
from decode_service.decoding.families.hunyuan_video15 import HunyuanVideo15Family
from decode_service.decoding.families.kvae import KVAEFamily
from decode_service.decoding.families.kvae_video import KVAEVideoFamily
from decode_service.decoding.families.ltx2_video import LTX2VideoFamily
from decode_service.decoding.families.ltx_video import LTXVideoFamily
from decode_service.decoding.families.magvit import MagvitFamily
from decode_service.decoding.families.minimax_h3 import MiniMaxH3Family
from decode_service.decoding.families.mochi import MochiFamily
from decode_service.decoding.families.qwen_image import QwenImageFamily
from decode_service.decoding.families.qwen_image21 import QwenImage21Family
from decode_service.decoding.families.rae import RAEFamily
from decode_service.decoding.families.temporal_decoder import TemporalDecoderFamily
from decode_service.decoding.families.unlisted import UnlistedFamily
from decode_service.decoding.families.vidtok import VidTokFamily
from decode_service.decoding.families.wan import WanFamily

FAMILIES: dict[str, type[Family]] = {
    class_name: family
    for family in (
        AutoencoderKLFamily,
        WanFamily,
        QwenImageFamily,
        QwenImage21Family,
        CogVideoXFamily,
        CosmosFamily,
        MochiFamily,
        TemporalDecoderFamily,
        MagvitFamily,
        KVAEVideoFamily,
        AllegroFamily,
        Flux2Family,
        HunyuanImageFamily,
        HunyuanImageRefinerFamily,
        AutoencoderDCFamily,
        AutoencoderTinyFamily,
        AsymmetricAutoencoderKLFamily,
        KVAEFamily,
        RAEFamily,
        HunyuanVideoFamily,
        HunyuanVideo15Family,
        LTXVideoFamily,
        LTX2VideoFamily,
        MiniMaxH3Family,
        VidTokFamily,
    )
    for class_name in family.class_names
}


def family_class(class_name: str) -> type[Family]:
    """The family that decodes the diffusers class of this name: the one that lists it, or else ``UnlistedFamily``."""
    return FAMILIES.get(class_name, UnlistedFamily)


__all__ = ["FAMILIES", "Family", "UnlistedFamily", "family_class"]
