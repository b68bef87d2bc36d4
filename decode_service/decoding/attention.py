"""Attention over positions and frames, within bounds, in forms that bands of a frame can take part in.

``attention_over_time`` is attention over the frames of each position by itself.

``frame_causal_attention``, of all tokens of a video, is what a video decoder's (THW)^2 mask says, without a mask. A
frame-causal mask lets a token see every token of its own and of earlier frames. Within one frame all rows of the mask are the
same and say "all keys of frames 0 to t", so attention frame by frame over ever more keys needs no mask. A mask of a 5-frame
clip of 720p latents would be 72000^2 elements, 10 GB in bfloat16.

``kernel_attention`` is the linear attention of DC-AE, whose keys and values count only by a small sum over all positions.

``ShardedFrame`` reinterprets the last two.

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

from decode_service.decoding.overridable import overridable

# B batch, N heads, T frames, S tokens of one frame, D head channels, P positions of the frame (B x H x W), K keys (or frames
# of keys), Q queries, H height, W width, E = D + 1.

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


def query_blocks(latent_shape: Sequence[int], items: int = 1) -> AbstractContextManager[Any]:
    """``QueryBlocks`` where attention over all positions of ``latent_shape`` (B,C,T,H,W) would be beyond the bound,
    of ``items`` at once.

    Smaller decodes are spared its look at every operation.
    """
    tokens = math.prod(latent_shape[2:])
    return QueryBlocks() if items * tokens**2 > MAX_SCORES else contextlib.nullcontext()


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


#: Positions of one call of ``attention_over_time`` at most: CUDA's fused kernels take 65535 sequences times heads.
MAX_POSITIONS = 2**15


@overridable
def attention_over_time(query_PNTD: torch.Tensor, key_PNKD: torch.Tensor, value_PNKD: torch.Tensor) -> torch.Tensor:
    """Attention over the frames of each position by itself, causal; shape of ``query_PNTD``.

    The queries are those of the last T of K frames; each sees its own frame and the earlier ones. Positions do not meet,
    so ``ShardedFrame`` leaves this function as it is: a band has all that its positions need.
    """
    arguments = (query_PNTD, key_PNKD, value_PNKD)
    frames, keys = query_PNTD.shape[2], key_PNKD.shape[2]
    mask_TK = None
    if frames > 1:
        mask_TK = torch.ones(frames, keys, dtype=torch.bool, device=query_PNTD.device).tril(keys - frames)
    blocks = [
        F.scaled_dot_product_attention(query, key, value, attn_mask=mask_TK)
        for query, key, value in zip(*(x.split(MAX_POSITIONS) for x in arguments), strict=True)
    ]
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks)


@overridable
def frame_causal_attention(
    query_BNTSD: torch.Tensor, key_BNTSD: torch.Tensor, value_BNTSD: torch.Tensor
) -> torch.Tensor:
    """Attention in which the tokens of frame t see all tokens of frames 0 to t; shape of ``query_BNTSD``.

    Keys may have another number of tokens per frame than queries, and in any order within a frame: that is how a band of
    the frame keeps its own queries and sees the keys of all bands. ``ShardedFrame`` reinterprets this function as a whole,
    so that keys and values travel once and not once per frame.
    """
    outputs = []
    for t in range(query_BNTSD.shape[2]):
        key = key_BNTSD[:, :, : t + 1].flatten(2, 3)
        value = value_BNTSD[:, :, : t + 1].flatten(2, 3)
        outputs.append(attention_in_blocks(query_BNTSD[:, :, t], key, value))
    return torch.stack(outputs, dim=2)


@overridable
def kernel_attention(
    query_BNDHW: torch.Tensor, key_BNDHW: torch.Tensor, value_BNDHW: torch.Tensor, eps: float
) -> torch.Tensor:
    """Attention whose weight of a position is the product of query and key, neither negative, over the sum of all weights.

    Without a softmax the products can be taken in either order, so frames of more positions than head channels go by the
    sums of keys times values, in float32: linear in the number of positions. Smaller ones go by the weights. The two round
    differently in half precision, and which one it is follows from the positions of the whole frame, not of one band.

    Source: ``SanaMultiscaleLinearAttention`` and its processor in diffusers 0.42.

    Args:
        query_BNDHW, key_BNDHW: after their nonlinearity, which leaves nothing negative.
        eps: added to the sum of weights.

    Returns:
        (B,N,D,H,W), in float32 where it went by sums.
    """
    channels, height, width = query_BNDHW.shape[2:]
    if goes_by_sums(height * width, channels):
        return attend_by_sums(query_BNDHW, key_value_sums(key_BNDHW, value_BNDHW), eps)
    return attend_by_weights(query_BNDHW, key_BNDHW, value_BNDHW, eps)


def goes_by_sums(positions: int, channels: int) -> bool:
    """Whether ``kernel_attention`` over a frame of ``positions`` with heads of ``channels`` is linear."""
    return positions > channels


def key_value_sums(key_BNDHW: torch.Tensor, value_BNDHW: torch.Tensor) -> torch.Tensor:
    """Sums over all positions of key times value, and in the last row of the keys: (B,N,E,D), float32.

    Those of a frame are the sums of its bands'.
    """
    key_BNDS, value_BNDS = key_BNDHW.flatten(3).float(), value_BNDHW.flatten(3).float()
    # A row of ones makes the sums of the keys come out of the same product, as in the source.
    value_BNES = F.pad(value_BNDS, (0, 0, 0, 1), value=1.0)
    return value_BNES @ key_BNDS.transpose(2, 3)


def attend_by_sums(query_BNDHW: torch.Tensor, sums_BNED: torch.Tensor, eps: float) -> torch.Tensor:
    """What queries make of ``key_value_sums``: (B,N,D,H,W), float32."""
    weighted_BNES = sums_BNED @ query_BNDHW.flatten(3).float()
    y_BNDS = weighted_BNES[:, :, :-1] / (weighted_BNES[:, :, -1:] + eps)
    return y_BNDS.unflatten(3, query_BNDHW.shape[3:])


def attend_by_weights(
    query_BNDHW: torch.Tensor, key_BNDHW: torch.Tensor, value_BNDHW: torch.Tensor, eps: float
) -> torch.Tensor:
    """The same with the weight of every pair of positions; keys and values may have more positions than queries."""
    weights_BNSS = (key_BNDHW.flatten(3).transpose(2, 3) @ query_BNDHW.flatten(3)).float()
    weights_BNSS = weights_BNSS / (weights_BNSS.sum(dim=2, keepdim=True) + eps)
    y_BNDS = value_BNDHW.flatten(3) @ weights_BNSS.to(value_BNDHW.dtype)
    return y_BNDS.unflatten(3, query_BNDHW.shape[3:])
