"""GQA with an indexer that picks blocks, in torch, as masks over dense products (MiniMax-M3).

Shapes: B batch, T new tokens, S keys, D hidden size, H query heads, G KV heads and index heads, i index width.
"""

import torch
from torch import Tensor, nn

from attncalc.attention import gqa_torch
from attncalc.attention.gqa_index import IndexedGQA
from attncalc.attention.rotary import Rotary
from attncalc.attention.torch_base import (
    Cache,
    KernelPath,
    allowed_blocks,
    attend_masked,
    choose_path,
    initialise,
    largest,
    linear,
    make_parameters,
    operation,
    rms_norm,
    split_heads,
)
from attncalc.reach import FULL, Reach


class Layer(gqa_torch.Layer):
    """One layer of `indexed`, whose `spec` is the GQA in it: every product is computed for all pairs, then masked.

    Parameters are `indexed.weights(form)`. The cache is that of GQA and `index_k` [B, 1, S, i] (normed and rotated).
    """

    def __init__(
        self,
        spec: IndexedGQA,
        reach: Reach = FULL,
        form: str = "direct",
        *,
        cached: str | None = None,
        path: KernelPath | None = None,
        rotary: Rotary | None = None,
        softmax_scale: float | None = None,
        eps: float = 1e-6,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if reach != FULL:
            raise ValueError(f"this layer says itself what a query attends to: reach {reach.text} does not apply")
        super().__init__(
            spec.gqa,
            FULL,
            form,
            cached=cached,
            path="reference",
            rotary=rotary,
            softmax_scale=softmax_scale,
            eps=eps,
            device=device,
            dtype=dtype,
        )
        self.indexed, self.path = spec, choose_path(path, ("reference",), "this layer has no other")
        make_parameters(self, spec.index_weights(), device=device, dtype=dtype)
        initialise(self)

    @classmethod
    def paths(cls, spec: object) -> tuple[KernelPath, ...]:  # noqa: ARG003
        """The ways to compute it."""
        return ("reference",)

    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        """[B, T, D] -> [B, T, D]; the new tokens come after the `cache.length` that the cache has seen."""
        cache = Cache() if cache is None else cache
        spec, start, new_tokens = self.indexed, cache.length, x.shape[1]
        table = self.rotary.table(start, new_tokens, spec.rope_dim, x.device) if spec.rope_dim else None
        q, (k, v) = self._query(x, table), self._key_value(x, table)
        index_q, index_k = (
            rms_norm(
                split_heads(linear(self, f"indexer.{side}_proj", x, f"index_{side}_proj"), heads),
                self.get_parameter(f"indexer.{side}_norm.weight"),
                self.eps,
            )
            for side, heads in (("q", spec.num_kv_heads), ("k", 1))
        )
        if table is not None:
            index_q, index_k = self.rotary.rotate(index_q, table), self.rotary.rotate(index_k, table)
        k, v = cache.append("k", k, FULL), cache.append("v", v, FULL)
        index_k = cache.append("index_k", index_k, FULL)
        cache.advance(new_tokens)
        allowed = allowed_blocks(self._pick(index_q, index_k, start), spec.block_size, start, k.shape[2])
        allowed = allowed.repeat_interleave(spec.num_heads // spec.num_kv_heads, dim=1)
        out, _ = attend_masked(q, k, v, allowed, self.softmax_scale, names=("score", "value"))
        return linear(self, "o_proj", out.transpose(1, 2).flatten(2))

    def _pick(self, q: Tensor, k: Tensor, start: int) -> Tensor:
        """[B, G, T, blocks]: of each query the blocks with the largest index score, its own ones always."""
        spec, (batch, heads, new_tokens, width), keys = self.indexed, q.shape, k.shape[2]
        with operation("index_score"):
            scores = q.reshape(batch, 1, heads * new_tokens, width) @ k.transpose(2, 3)
        scores = scores.view(batch, heads, new_tokens, keys)
        query = torch.arange(start, start + new_tokens, device=q.device)[:, None]
        scores = scores.masked_fill(torch.arange(keys, device=q.device) > query, -torch.inf)
        blocks = -(-keys // spec.block_size)
        scores = nn.functional.pad(scores, (0, blocks * spec.block_size - keys), value=-torch.inf)
        best = torch.unflatten(scores, 3, (blocks, spec.block_size)).amax(-1)
        block, own = torch.arange(blocks, device=q.device), query // spec.block_size
        best = best.masked_fill((block > own - spec.local_blocks) & (block <= own), torch.inf)
        return largest(best, spec.blocks)
