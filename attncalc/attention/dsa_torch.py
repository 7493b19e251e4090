"""The torch layer of `attncalc.attention.dsa`: MLA over the keys that an indexer selects."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from attncalc.attention import mla_torch
from attncalc.attention.dsa import DSA, MAX_ELEMENTS
from attncalc.attention.rotary import Rotary
from attncalc.attention.torch_base import (
    Cache,
    KernelPath,
    attend,
    attend_reference,
    linear,
    operation,
    split_heads,
)
from attncalc.reach import FULL, Reach
from attncalc.workload import Workload

INDEX_EPS = 1e-6  # of the LayerNorm of index keys, whatever the model's own is


class Layer(mla_torch.Layer):
    """MLA over selected keys (arXiv 2512.02556 section 2.1), with the options of the specification.

    The cache is that of MLA and index_k [B, 1, S, d_I]. `reference` computes all scores and masks those that are not
    selected, as transformers does; `fast` gathers the selected latents where `spec.gathers`, and is a fused kernel
    with that mask elsewhere. Of equal scores the earlier token wins. The indexer rotates the first R values of its
    heads by `index_rotary`; None is `rotary` on halves (DeepSeek-V3.2; GLM-5 interleaves). A layer without an indexer
    is given an earlier layer's selection in `step`; run alone, by `forward`, it takes the last k tokens.
    """

    spec: DSA

    def __init__(
        self,
        spec: DSA,
        reach: Reach = FULL,
        form: str = "absorbed",
        *,
        cached: str | None = None,
        path: KernelPath | None = None,
        rotary: Rotary | None = None,
        softmax_scale: float | None = None,
        eps: float = 1e-6,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        index_rotary: Rotary | None = None,
    ) -> None:
        if reach != FULL:
            raise ValueError(f"reach {reach.text}: the indexer selects among all earlier tokens")
        super().__init__(
            spec,
            reach,
            form,
            cached=cached,
            path=path,
            rotary=rotary,
            softmax_scale=softmax_scale,
            eps=eps,
            device=device,
            dtype=dtype,
        )
        self.index_rotary = index_rotary or replace(self.rotary, interleaved=False)

    def _settings(self) -> dict[str, Any]:
        return super()._settings() | {"index_rotary": self.index_rotary}

    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        """[B, T, D] -> [B, T, D]; the new tokens come after the `cache.length` that the cache has seen."""
        return self.step(x, Cache() if cache is None else cache)[0]

    def step(self, x: Tensor, cache: Cache, selected: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The output, and the key positions [B, T, min(S, k)] that were chosen, for layers without an indexer.

        `selected` is such a choice of an earlier layer; one with an indexer of its own ignores it.
        """
        start, new_tokens = cache.length, x.shape[1]
        source = self.query_source(x)
        if self.spec.own_indexer:
            selected = self.select(x, source, cache)
        elif selected is None:
            selected = recent(self.spec.index_topk, start, new_tokens, x.device).expand(x.shape[0], -1, -1)
        q = self.query(source, start)
        k, v = self.present(x, cache)
        cache.advance(new_tokens)
        scale, context = self.softmax_scale, start + new_tokens
        if self.path == "reference":
            allowed = selection_mask(selected, start, context)
            out = attend_reference(q, k, v, self.reach, start, scale, allowed=allowed)
        elif context <= self.spec.index_topk:  # every key is selected
            out = attend(q, k, v, self.reach, start, scale)
        elif self.spec.gathers(Workload(context, new_tokens), self.form):
            out = attend_gathered(q, k, v, selected, scale)
        else:
            out = attend_fused(q, k, v, selection_mask(selected, start, context), scale)
        return self.output(x, out), selected

    def select(self, x: Tensor, source: Tensor, cache: Cache) -> Tensor:
        """The positions [B, T, min(S, k)] of the keys of largest score; the last of a short prefix are masked later."""
        spec, start, new_tokens = self.spec, cache.length, x.shape[1]
        q = self._rotated(split_heads(linear(self, "indexer.wq_b", source, "index_q_proj"), spec.index_n_heads), start)
        norm = self.get_submodule("indexer.k_norm")
        new = linear(self, "indexer.wk", x, "index_k_proj")
        new = nn.functional.layer_norm(
            new, (spec.index_head_dim,), norm.get_parameter("weight"), norm.get_parameter("bias"), INDEX_EPS
        )
        keys = cache.append("index_k", self._rotated(new.unsqueeze(1), start), self.reach)
        weights = linear(self, "indexer.weights_proj", x, "index_weights_proj")
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        keys, weights = keys.to(wide), weights.to(wide) * (spec.index_n_heads * spec.index_head_dim) ** -0.5
        context = start + new_tokens
        kept = min(spec.index_topk, context)
        position = torch.arange(context, device=x.device)
        chosen = []
        for part in _turns(new_tokens, x.shape[0] * spec.index_n_heads * context):
            with operation("index_score"):
                scores = q[:, :, part].to(wide) @ keys.transpose(2, 3)
            # Written as a sum of products: a matrix product here would count as FLOPs of the indexer's scores.
            scores = (scores.relu() * weights[:, part].transpose(1, 2).unsqueeze(-1)).sum(dim=1)
            later = position > position[start:][part, None]
            order = scores.masked_fill(later, -torch.inf).sort(dim=-1, descending=True, stable=True).indices
            chosen.append(order[..., :kept])
        return torch.cat(chosen, dim=1)

    def _rotated(self, x: Tensor, start: int) -> Tensor:
        width = self.spec.qk_rope_head_dim
        if not (self.spec.rotated and width):
            return x
        return self.index_rotary.rotate(x, self.index_rotary.table(start, x.shape[2], width, x.device))


def recent(count: int, start: int, new_tokens: int, device: torch.device) -> Tensor:
    """[1, T, min(S, count)]: the last tokens of each prefix; positions after the query stand for what is missing."""
    kept = min(count, start + new_tokens)
    end = torch.arange(start, start + new_tokens, device=device).clamp(min=kept - 1)
    return (end[:, None] - torch.arange(kept, device=device)).unsqueeze(0)


def selection_mask(selected: Tensor, start: int, keys: int) -> Tensor:
    """[B, 1, T, S] booleans: the key is selected and not after the query."""
    batch, new_tokens, _ = selected.shape
    allowed = torch.zeros(batch, new_tokens, keys, dtype=torch.bool, device=selected.device)
    allowed = allowed.scatter(2, selected, value=True)
    query = torch.arange(start, start + new_tokens, device=selected.device)
    return (allowed & (torch.arange(keys, device=selected.device) <= query[:, None])).unsqueeze(1)


def attend_gathered(q: Tensor, k: Tensor, v: Tensor, selected: Tensor, scale: float) -> Tensor:
    """Attention that reads the selected rows of K and V of one head alone, q [B, H, T, d] -> [B, H, T, e]."""
    batch, heads, new_tokens, width = q.shape
    kept = selected.shape[2]
    out = []
    for part in _turns(new_tokens, batch * kept * max(width, heads)):
        rows = selected[:, part].reshape(batch, -1, 1)
        keys = k[:, 0].gather(1, rows.expand(-1, -1, width)).view(-1, kept, width)
        values = v[:, 0].gather(1, rows.expand(-1, -1, v.shape[3])).view(-1, kept, v.shape[3])
        queries = q[:, :, part].transpose(1, 2).reshape(-1, heads, width)
        with operation("score"):
            logits = queries @ keys.transpose(1, 2)
        logits = logits * scale
        weights = (logits if logits.dtype == torch.float64 else logits.float()).softmax(dim=-1).to(v.dtype)
        with operation("value"):
            made = weights @ values
        out.append(made.view(batch, -1, heads, v.shape[3]).transpose(1, 2))
    return torch.cat(out, dim=2)


def attend_fused(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, scale: float) -> Tensor:
    """One fused kernel over all keys, with a mask; K and V of one head are views for every head."""
    heads = q.shape[1]
    k, v = k.expand(-1, heads, -1, -1), v.expand(-1, heads, -1, -1)
    return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=allowed, scale=scale)


def _turns(new_tokens: int, elements: int) -> Iterator[slice]:
    """Slices of the new tokens, so that `elements` for each of them stay below the limit."""
    step = max(1, MAX_ELEMENTS // elements)
    return (slice(i, min(i + step, new_tokens)) for i in range(0, new_tokens, step))
