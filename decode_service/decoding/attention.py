"""Attention that is causal over frames.

``frame_causal_attention``, of all tokens of a video, needs no mask: what a decoder's (THW)^2 mask says comes at no cost.

A frame-causal mask lets a token see every token of its own and of earlier frames. Within one frame all rows of the mask are
the same and say "all keys of frames 0 to t", so attention frame by frame over ever more keys needs no mask. A mask of a
5-frame clip of 720p latents would be 72000^2 elements, 10 GB in bfloat16.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

# B batch, N heads, T frames, S tokens of one frame, D head channels, P positions of the frame (B x H x W), K frames of keys.

#: Scores of one call at most: head sizes without a fused kernel (these decoders have 512 and 1024 channels in one head)
#: write them out, in float32.
MAX_SCORES = 2**28

#: Positions of one call of ``attention_over_time`` at most: CUDA's fused kernels take 65535 sequences times heads.
MAX_POSITIONS = 2**15


def attention_over_time(query_PNTD: torch.Tensor, key_PNKD: torch.Tensor, value_PNKD: torch.Tensor) -> torch.Tensor:
    """Attention over the frames of each position by itself, causal; shape of ``query_PNTD``.

    The queries are those of the last T of K frames; each sees its own frame and the earlier ones. Positions do not meet,
    so ``ShardedFrame`` leaves this function as it is: a band has all that its positions need.
    """
    arguments = (query_PNTD, key_PNKD, value_PNKD)
    if torch.overrides.has_torch_function(arguments):
        return torch.overrides.handle_torch_function(attention_over_time, arguments, *arguments)
    frames, keys = query_PNTD.shape[2], key_PNKD.shape[2]
    mask_TK = None
    if frames > 1:
        mask_TK = torch.ones(frames, keys, dtype=torch.bool, device=query_PNTD.device).tril(keys - frames)
    blocks = [
        F.scaled_dot_product_attention(query, key, value, attn_mask=mask_TK)
        for query, key, value in zip(*(x.split(MAX_POSITIONS) for x in arguments), strict=True)
    ]
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks)


def frame_causal_attention(
    query_BNTSD: torch.Tensor, key_BNTSD: torch.Tensor, value_BNTSD: torch.Tensor
) -> torch.Tensor:
    """Attention in which the tokens of frame t see all tokens of frames 0 to t; shape of ``query_BNTSD``.

    Keys may have another number of tokens per frame than queries, and in any order within a frame: that is how a band of
    the frame keeps its own queries and sees the keys of all bands. ``ShardedFrame`` reinterprets this function as a whole,
    so that keys and values travel once and not once per frame.
    """
    arguments = (query_BNTSD, key_BNTSD, value_BNTSD)
    if torch.overrides.has_torch_function(arguments):
        return torch.overrides.handle_torch_function(frame_causal_attention, arguments, *arguments)
    frames = query_BNTSD.shape[2]
    outputs = []
    for t in range(frames):
        key = key_BNTSD[:, :, : t + 1].flatten(2, 3)
        value = value_BNTSD[:, :, : t + 1].flatten(2, 3)
        rows = max(1, MAX_SCORES // (key.shape[0] * key.shape[1] * key.shape[2]))
        blocks = [
            F.scaled_dot_product_attention(block, key, value) for block in query_BNTSD[:, :, t].split(rows, dim=2)
        ]
        outputs.append(blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=2))
    return torch.stack(outputs, dim=2)
