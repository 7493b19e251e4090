"""Mixture of Block Attention in torch, as masks over dense products (arXiv 2502.13189).

Shapes: B batch, T new tokens, S keys, D hidden size, H query heads, G KV heads.
"""

import torch
from torch import Tensor, nn

from attncalc.attention.moba import MoBA
from attncalc.attention.selecting_torch import SelectingLayer, new_entries
from attncalc.attention.torch_base import (
    Cache,
    allowed_blocks,
    attend_masked,
    largest,
    linear,
    operation,
)


class Layer(SelectingLayer[MoBA]):
    """One layer of `spec`: every product is computed for all pairs, and masks leave what a query attends to.

    Parameters are `spec.weights(form)`. The cache is K [B, G, S, d] (rotated), V [B, G, S, e] and the mean keys of
    whole blocks [B, G, floor(S / C), d].
    """

    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        """[B, T, D] -> [B, T, D]; the new tokens come after the `cache.length` that the cache has seen."""
        cache = Cache() if cache is None else cache
        spec, start, new_tokens = self.spec, cache.length, x.shape[1]
        q, k, v = self.rows(x, cache)
        means = cache.extend("mean_k", new_entries(k, spec.means, start, new_tokens).mean(dim=3))
        cache.advance(new_tokens)
        allowed = allowed_blocks(self._choose(q, means, start, k.shape[2]), spec.block_size, start, k.shape[2])
        out, _ = attend_masked(q, k, v, allowed, self.softmax_scale, names=("score", "value"))
        return linear(self, "o_proj", out.transpose(1, 2).flatten(2))

    def _choose(self, q: Tensor, means: Tensor, start: int, keys: int) -> Tensor:
        """[B, H, T, blocks]: the own block of each query, and the best of the whole ones before it."""
        spec, (batch, heads, new_tokens, _) = self.spec, q.shape
        earlier = spec.gated.keys(new_tokens, keys, "dense")
        with operation("gate_score"):
            scores = q.reshape(batch, means.shape[1], -1, q.shape[-1]) @ means[:, :, :earlier].transpose(2, 3)
        scores = scores.view(batch, heads, new_tokens, earlier)
        own = torch.arange(start, start + new_tokens, device=q.device)[:, None] // spec.block_size
        block = torch.arange(-(-keys // spec.block_size), device=q.device)
        scores = nn.functional.pad(scores, (0, len(block) - earlier))
        scores = scores.masked_fill(block == own, torch.inf).masked_fill(block > own, -torch.inf)
        return largest(scores, spec.blocks)
