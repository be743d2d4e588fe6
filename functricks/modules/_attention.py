"""Attention written out: with dropout from a key, and under ``vmap``.

torch's kernels draw inside, and have no batching rule: ``vmap`` would call them lane by lane.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from functricks import random
from functricks.modules._keyed import Keyed, Rate, have_lanes, under_transform


def attend(
    key: Tensor | None,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    rate: Rate,
    *,
    causal: bool = False,
    scale: float | None = None,
    grouped: bool = False,
) -> Tensor:
    """Compute :func:`torch.nn.functional.scaled_dot_product_attention` and drop weights by a key, if given."""
    if grouped:
        keys, values = (t.repeat_interleave(query.shape[-3] // t.shape[-3], -3) for t in (keys, values))
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = (query * factor) @ keys.transpose(-2, -1)
    if causal:
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~allowed, -math.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    weights = _softmax(scores)
    return (weights if key is None else random.dropout(key, weights, rate)) @ values


def _softmax(scores: Tensor) -> Tensor:
    """Return the softmax, and zeros for a row in which nothing is allowed, as torch's kernel does."""
    blocked = (scores == -math.inf).all(-1, keepdim=True)
    return scores.masked_fill(blocked, 0.0).softmax(-1).masked_fill(blocked, 0.0)


class KeyedAttention(Keyed, nn.MultiheadAttention):
    """MultiheadAttention that draws from a key in training mode; torch's own where there is nothing to drop."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        draw = self.next_draw()
        lanes = under_transform() and have_lanes((query, key, value, *self._parameters.values()))
        if draw is None and not lanes:
            return super().forward(
                query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
            )
        if is_causal and attn_mask is None:
            raise ValueError("MultiheadAttention: is_causal=True needs attn_mask, of which it is a hint")
        batched = query.dim() == 3
        if not batched:
            query, key, value = query[None], key[None], value[None]
            key_padding_mask = None if key_padding_mask is None else key_padding_mask[None]
        elif not self.batch_first:
            query, key, value = (t.transpose(0, 1) for t in (query, key, value))
        q, k, v = (self._by_head(t) for t in self._project(query, key, value))
        weights = q * math.sqrt(1.0 / q.shape[-1]) @ k.transpose(-2, -1)
        mask = self._mask(attn_mask, key_padding_mask, weights)
        if mask is not None:
            weights = weights + mask
        weights = weights.softmax(-1) if need_weights else _softmax(weights)  # torch takes different kernels too
        weights = weights if draw is None else random.dropout(draw.key, weights, draw.rate)
        output = self.out_proj((weights @ v).transpose(1, 2).flatten(2))
        shown = (weights.mean(1) if average_attn_weights else weights) if need_weights else None
        if not batched:
            return output[0], None if shown is None else shown[0]
        return output if self.batch_first else output.transpose(0, 1), shown

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        own: Any = self
        split = (own.q_proj_weight, own.k_proj_weight, own.v_proj_weight)
        weights = own.in_proj_weight.chunk(3) if own._qkv_same_embed_dim else split
        biases = (None, None, None) if own.in_proj_bias is None else own.in_proj_bias.chunk(3)
        q, k, v = (F.linear(t, w, b) for t, w, b in zip((query, key, value), weights, biases, strict=True))
        if own.bias_k is not None:
            k, v = (torch.cat((t, b.expand(len(t), 1, -1)), 1) for t, b in ((k, own.bias_k), (v, own.bias_v)))
        if own.add_zero_attn:
            k, v = (torch.cat((t, torch.zeros_like(t[:, :1])), 1) for t in (k, v))
        return q, k, v

    def _by_head(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], self.num_heads, self.head_dim).transpose(1, 2)

    def _mask(self, attn_mask: Tensor | None, padding: Tensor | None, weights: Tensor) -> Tensor | None:
        """Return the sum of both masks, as numbers to add to [batch, heads, targets, sources]."""
        masks = []
        if attn_mask is not None:
            by_head = attn_mask if attn_mask.dim() == 2 else attn_mask.view(*weights.shape[:2], *attn_mask.shape[1:])
            masks.append(_additive(by_head, weights))
        if padding is not None:
            masks.append(_additive(padding[:, None, None], weights))
        if not masks:
            return None
        mask = masks[0] if len(masks) == 1 else masks[0] + masks[1]
        return F.pad(mask, (0, weights.shape[-1] - mask.shape[-1]))  # bias_k and the zero are always seen


def _additive(mask: Tensor, weights: Tensor) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(weights.dtype)
    return torch.zeros(mask.shape, dtype=weights.dtype, device=mask.device).masked_fill(mask, -math.inf)


class LanesEncoder(nn.TransformerEncoder):
    """TransformerEncoder that makes no nested tensor, which no transform takes, of a padded batch in evaluation."""

    def forward(self, src: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not under_transform():
            return super().forward(src, *args, **kwargs)
        kept, self.use_nested_tensor = self.use_nested_tensor, False
        try:
            return super().forward(src, *args, **kwargs)
        finally:
            self.use_nested_tensor = kept


class LanesEncoderLayer(nn.TransformerEncoderLayer):
    """TransformerEncoderLayer without torch's kernel for inference where ``vmap`` would call that lane by lane."""

    def forward(self, src: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not (under_transform() and have_lanes((src, *self.parameters()))):
            return super().forward(src, *args, **kwargs)
        kept: Any = self.activation_relu_or_gelu
        self.activation_relu_or_gelu = 0  # "neither": which no kernel takes
        try:
            return super().forward(src, *args, **kwargs)
        finally:
            self.activation_relu_or_gelu = kept
