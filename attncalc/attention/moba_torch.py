"""Mixture of Block Attention in torch, as masks over dense products (arXiv 2502.13189).

Shapes: B batch, T new tokens, S keys, D hidden size, H query heads, G KV heads.
"""

import torch
from torch import Tensor, nn

from attncalc.attention.base import check_form
from attncalc.attention.moba import MoBA
from attncalc.attention.nsa_torch import new_entries
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
    split_heads,
)
from attncalc.reach import FULL, Reach


class Layer(nn.Module):
    """One layer of `spec`: every product is computed for all pairs, and masks leave what a query attends to.

    Parameters are `spec.weights(form)`. The cache is K [B, G, S, d] (rotated), V [B, G, S, e] and the mean keys of
    whole blocks [B, G, floor(S / C), d]. `eps` is there for the signature that all layers share.
    """

    def __init__(
        self,
        spec: MoBA,
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
        super().__init__()
        self.spec, self.reach, self.form, self.cached = spec, reach, check_form(spec, form), cached or form
        if reach != FULL:
            raise ValueError(f"this layer says itself what a query attends to: reach {reach.text} does not apply")
        self.path = choose_path(path, self.paths(spec), "this layer has no other")
        self.rotary = rotary or Rotary()
        self.softmax_scale = spec.head_dim**-0.5 if softmax_scale is None else softmax_scale
        self.eps = eps
        make_parameters(self, spec.weights(form), device=device, dtype=dtype)
        initialise(self)

    @classmethod
    def paths(cls, spec: MoBA) -> tuple[KernelPath, ...]:  # noqa: ARG003
        """The ways to compute it."""
        return ("reference",)

    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        """[B, T, D] -> [B, T, D]; the new tokens come after the `cache.length` that the cache has seen."""
        cache = Cache() if cache is None else cache
        spec, start, new_tokens = self.spec, cache.length, x.shape[1]
        q = split_heads(linear(self, "q_proj", x), spec.num_heads)
        k, v = (split_heads(linear(self, f"{side}_proj", x), spec.num_kv_heads) for side in "kv")
        if spec.rope_dim:
            table = self.rotary.table(start, new_tokens, spec.rope_dim, x.device)
            q, k = self.rotary.rotate(q, table), self.rotary.rotate(k, table)
        k, v = cache.append("k", k, FULL), cache.append("v", v, FULL)
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
