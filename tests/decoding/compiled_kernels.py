"""Compiles the Triton kernels to machine code of several NVIDIA generations, which needs no device; a program of its own."""

from __future__ import annotations

import json
import re
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from decode_service.decoding import triton_kernels

#: Ampere and Hopper.
CAPABILITIES = (80, 90)

KERNELS = {
    "rms": (
        triton_kernels._rms_norm_silu,
        {
            "x": "*{}",
            "gamma_C": "*{}",
            "y": "*{}",
            "positions": "i64",
            "channels": "i32",
            "scale": "fp32",
            "eps": "fp32",
        },
        {"BLOCK_N": 32, "BLOCK_C": 128},
    ),
    "scaled": (
        triton_kernels._scaled_silu,
        {
            "x": "*{}",
            "mean_BC": "*fp32",
            "factor_BC": "*fp32",
            "bias_C": "*fp32",
            "y": "*{}",
            "positions": "i32",
            "channels": "i32",
        },
        {"BLOCK_N": 16, "BLOCK_C": 256},
    ),
}


def main() -> None:
    told = {}
    for name, (kernel, types, blocks) in KERNELS.items():
        for capability, dtype in ((CAPABILITIES[0], "fp16"), (CAPABILITIES[1], "bf16")):
            signature = {key: value.format(dtype) for key, value in types.items()} | dict.fromkeys(blocks, "constexpr")
            source = ASTSource(fn=kernel, signature=signature, constexprs=blocks)
            compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32))
            told[f"{name} {dtype} sm_{capability}"] = {
                "bytes": len(compiled.asm["cubin"]),
                # The places of a block of a feature map, which may have more than 2^31 elements.
                "offsets": re.findall(r"tt\.addptr .*, tensor<\d+x\d+x(i\d+)>", compiled.asm["ttir"]),
            }
    json.dump(told, sys.stdout)


if __name__ == "__main__":
    main()
