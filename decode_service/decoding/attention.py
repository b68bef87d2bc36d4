"""Attention within bounds: causal over frames without a mask, and in blocks of queries.

A frame-causal mask lets a token see every token of its own and of earlier frames. Within one frame all rows of the mask are
the same and say "all keys of frames 0 to t", so attention frame by frame over ever more keys needs no mask. A mask of a
5-frame clip of 720p latents would be 72000^2 elements, 10 GB in bfloat16.

Blocks of queries keep the scores small: every row of queries has a softmax of its own, so rows can be computed some at a
time. A picture of 4096 x 4096 pixels has 512^2 tokens in the middle of most decoders, and 2^36 scores.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

# B batch, N heads, T frames, S tokens of one frame, Q queries, K keys, D head channels.

#: Scores of one call at most: head sizes without a fused kernel (these decoders have 384 to 1024 channels in one head)
#: write them out, in float32, and their softmax beside them.
MAX_SCORES = 2**26


class QueryBlocks(TorchFunctionMode):
    """While active in this thread, no ``scaled_dot_product_attention`` has more than ``MAX_SCORES`` scores at a time.

    It is entered outside ``ShardedFrame``, which then has gathered the keys and values of all bands before the queries of
    this band are cut into blocks.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is F.scaled_dot_product_attention:
            return attention_in_blocks(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def query_blocks(latent_shape: Sequence[int]) -> AbstractContextManager[Any]:
    """``QueryBlocks`` where attention over all positions of ``latent_shape`` (B,C,T,H,W) would be beyond the bound.

    Smaller decodes are spared its look at every operation.
    """
    tokens = math.prod(latent_shape[2:])
    return QueryBlocks() if tokens**2 > MAX_SCORES else contextlib.nullcontext()


def attention_in_blocks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> torch.Tensor:
    """``F.scaled_dot_product_attention`` with at most ``MAX_SCORES`` scores at a time (but at least one row of them).

    Args:
        query: (..., Q, D); ``key`` and ``value`` (..., K, D).
        attn_mask: (..., Q, K), or with 1 for Q.
        options: ``scale`` and ``enable_gqa``.
    """
    queries, keys = query.shape[-2], key.shape[-2]
    rows = max(1, MAX_SCORES // max(1, query.shape[:-2].numel() * keys))
    if queries <= rows:
        return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, **options)
    output = query.new_empty((*query.shape[:-1], value.shape[-1]))
    for start in range(0, queries, rows):
        block = query.narrow(-2, start, min(rows, queries - start))
        mask = attn_mask
        if is_causal:
            seen = torch.arange(start, start + block.shape[-2], device=query.device).unsqueeze(1)
            mask = torch.arange(keys, device=query.device) <= seen
        elif mask is not None and mask.dim() > 1 and mask.shape[-2] != 1:
            mask = mask.narrow(-2, start, block.shape[-2])
        output.narrow(-2, start, block.shape[-2]).copy_(
            F.scaled_dot_product_attention(block, key, value, mask, dropout_p, **options)
        )
    return output


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
    outputs = []
    for t in range(query_BNTSD.shape[2]):
        key = key_BNTSD[:, :, : t + 1].flatten(2, 3)
        value = value_BNTSD[:, :, : t + 1].flatten(2, 3)
        outputs.append(attention_in_blocks(query_BNTSD[:, :, t], key, value))
    return torch.stack(outputs, dim=2)
