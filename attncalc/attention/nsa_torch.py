"""Native Sparse Attention in torch, as masks over dense products (arXiv 2502.11089).

Shapes: B batch, T new tokens, S keys, D hidden size, H query heads, G KV heads, n compressed entries.
"""

import torch
from torch import Tensor
from torch.nn import functional

from attncalc.attention.nsa import NSA
from attncalc.attention.selecting_torch import SelectingLayer, new_entries
from attncalc.attention.torch_base import (
    Cache,
    allowed_blocks,
    attend_masked,
    attention_mask,
    largest,
    linear,
    operation,
)


class Layer(SelectingLayer[NSA]):
    """One layer of `spec`: every product is computed for all pairs, and masks leave what a query attends to.

    Parameters are `spec.weights(form)`. The cache is K [B, G, S, d] (rotated), V [B, G, S, e] and their compressed
    entries [B, G, n, d] and [B, G, n, e]. The MLP's activation is SiLU, which the paper does not state.
    """

    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        """[B, T, D] -> [B, T, D]; the new tokens come after the `cache.length` that the cache has seen."""
        cache = Cache() if cache is None else cache
        spec, start, new_tokens = self.spec, cache.length, x.shape[1]
        q, k, v = self.rows(x, cache)
        entries = spec.reaches["compress"]
        few_k = cache.extend("compressed_k", self._compress("k", new_entries(k, entries, start, new_tokens)))
        few_v = cache.extend("compressed_v", self._compress("v", new_entries(v, entries, start, new_tokens)))
        cache.advance(new_tokens)

        position = torch.arange(start, start + new_tokens, device=x.device)[:, None]
        ends = torch.arange(few_k.shape[2], device=x.device) * spec.compress_stride + spec.compress_size - 1
        compressed, weights = self._attend("compress", q, few_k, few_v, ends <= position)
        chosen = self._select(weights, position, k.shape[2])
        allowed = allowed_blocks(chosen, spec.block_size, start, k.shape[2])
        selected, _ = self._attend("select", q, k, v, allowed.repeat_interleave(spec.num_heads // k.shape[1], dim=1))
        near = spec.reaches["window"].keys(new_tokens, k.shape[2], "dense")
        mask = attention_mask(spec.reaches["window"], new_tokens, near, start, x.device)
        mask = torch.ones(new_tokens, near, dtype=torch.bool, device=x.device) if mask is None else mask
        local, _ = self._attend("window", q, k[:, :, -near:], v[:, :, -near:], mask)

        gate = torch.sigmoid(linear(self, "gate_proj", x)).view(*x.shape[:2], spec.num_heads, 3)
        out = torch.stack((compressed, selected, local), dim=-1).transpose(1, 2)  # [B, T, H, e, 3]
        return linear(self, "o_proj", (out * gate.unsqueeze(-2)).sum(-1).flatten(2))

    def _attend(self, name: str, q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor]:
        names = (f"{name}_score", f"{name}_value")
        return attend_masked(q, k, v, allowed, self.softmax_scale, names=names)

    def _compress(self, side: str, rows: Tensor) -> Tensor:
        """[B, G, n, l, width] -> [B, G, n, width]."""
        if not self.spec.compress_hidden:
            return rows.mean(dim=3)
        weight, name = self.get_parameter, f"compress_{side}"
        placed = (rows + weight(f"{name}.position")).flatten(3)
        with operation(f"{name}_up"):
            mid = functional.linear(placed, weight(f"{name}.up.weight"))
        with operation(f"{name}_down"):
            return functional.linear(functional.silu(mid), weight(f"{name}.down.weight"))

    def _select(self, weights: Tensor, position: Tensor, keys: int) -> Tensor:
        """[B, G, T, blocks]: the blocks of each query, alike for all heads of a KV head.

        An entry covers l / d pieces of d tokens, a block holds l' / d; a block gets what the entries give to its
        pieces, summed over heads.
        """
        spec, n = self.spec, weights.shape[3]
        blocks, each = -(-keys // spec.block_size), spec.block_size // spec.compress_stride
        shared = torch.unflatten(weights, 1, (spec.num_kv_heads, spec.num_heads // spec.num_kv_heads)).sum(2)
        pieces = shared.new_zeros(*shared.shape[:3], blocks * each)
        for i in range(spec.compress_size // spec.compress_stride):
            pieces[..., i : i + n] += shared
        scores = torch.unflatten(pieces, 3, (blocks, each)).sum(-1)
        block, own = torch.arange(blocks, device=weights.device), position // spec.block_size
        always = (block < spec.initial_blocks) | (block > own - spec.local_blocks)
        scores = scores.masked_fill(always, torch.inf).masked_fill(block > own, -torch.inf)
        return largest(scores, spec.blocks)
