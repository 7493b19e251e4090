"""What NSA and MoBA share in torch: construction, the rows of Q, K and V, and the entries that a step completes.

Shapes: B batch, T new tokens, S keys, D hidden size, H query heads, G KV heads.
"""

from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from attncalc.attention.base import check_form
from attncalc.attention.moba import MoBA
from attncalc.attention.nsa import NSA
from attncalc.attention.rotary import Rotary
from attncalc.attention.torch_base import (
    Cache,
    KernelPath,
    choose_path,
    initialise,
    linear,
    make_parameters,
    split_heads,
)
from attncalc.reach import FULL, Reach

S = TypeVar("S", NSA, MoBA)


def new_entries(rows: Tensor, entries: Reach, start: int, new_tokens: int) -> Tensor:
    """Of rows [B, G, S, width], those of the entries that the step completes: [B, G, n, entries.pooled, width]."""
    first, count = entries.stored(start), entries.stored(start + new_tokens) - entries.stored(start)
    if not count:
        return rows.new_empty(*rows.shape[:2], 0, entries.pooled, rows.shape[3])
    return rows[:, :, first * entries.block :].unfold(2, entries.pooled, entries.block)[:, :, :count].mT


class SelectingLayer(nn.Module, Generic[S]):
    """One layer of `spec`, which says itself what a query attends to; parameters are `spec.weights(form)`.

    `softmax_scale` None is d^-1/2. `eps` is there for the signature that all layers share.

    Raises:
        AttncalcError: the variant has no such form.
        ValueError: a reach that is not full, or a path that the layer has not.
    """

    def __init__(
        self,
        spec: S,
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
        self.spec: S = spec
        self.reach, self.form, self.cached = reach, check_form(spec, form), cached or form
        if reach != FULL:
            raise ValueError(f"this layer says itself what a query attends to: reach {reach.text} does not apply")
        self.path = choose_path(path, self.paths(spec), "this layer has no other")
        self.rotary = rotary or Rotary()
        self.softmax_scale = spec.head_dim**-0.5 if softmax_scale is None else softmax_scale
        self.eps = eps
        make_parameters(self, spec.weights(form), device=device, dtype=dtype)
        initialise(self)

    @classmethod
    def paths(cls, spec: S) -> tuple[KernelPath, ...]:  # noqa: ARG003
        """The ways to compute it."""
        return ("reference",)

    def rows(self, x: Tensor, cache: Cache) -> tuple[Tensor, Tensor, Tensor]:
        """Q [B, H, T, d] of the new tokens, K [B, G, S, d] and V [B, G, S, e] of all; Q and K are rotated."""
        spec = self.spec
        q = split_heads(linear(self, "q_proj", x), spec.num_heads)
        k, v = (split_heads(linear(self, f"{side}_proj", x), spec.num_kv_heads) for side in "kv")
        if spec.rope_dim:
            table = self.rotary.table(cache.length, x.shape[1], spec.rope_dim, x.device)
            q, k = self.rotary.rotate(q, table), self.rotary.rotate(k, table)
        return q, cache.append("k", k, FULL), cache.append("v", v, FULL)
