"""Exact rewrites: parts of a decoder that give the same function with less arithmetic or less traffic.

A rewrite stands in for single modules, whatever decoder they are in; a family describes its structure
(``DecoderStructure``) and copies nothing. Every rewrite is compared with the modules it stands in for when the model is
loaded, on that model's own weights, and left off where it differs.
"""

from decode_service.decoding.rewrites.apply import NAMES, Rewrite, apply_rewrites
from decode_service.decoding.rewrites.site import prepared_tensors
from decode_service.decoding.rewrites.structure import Activation, CausalConvolution, DecoderStructure, SpatialPadding

__all__ = [
    "NAMES",
    "Activation",
    "CausalConvolution",
    "DecoderStructure",
    "Rewrite",
    "SpatialPadding",
    "apply_rewrites",
    "prepared_tensors",
]
