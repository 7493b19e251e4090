"""The torch layer of `attncalc.attention.tpa`: tensor-product attention, factored and expanded."""

import torch
from torch import Tensor, nn

from attncalc.attention.rotary import Rotary
from attncalc.attention.torch_base import (
    Cache,
    KernelPath,
    attend,
    attend_reference,
    attention_mask,
    choose_path,
    initialise,
    linear,
    make_parameters,
    operation,
    split_heads,
)
from attncalc.attention.tpa import TPA
from attncalc.reach import FULL, Reach

QUERIES = 64
"""New tokens whose scores exist at a time on the fast path of the factored form."""


class Layer(nn.Module):
    """TPA (arXiv 2501.06425); both forms have the same parameters and the same cache.

    Parameters are `spec.weights(form)`, the cache is a_k [B, r_k, S, H], b_k [B, r_k, S, d] (rotated), a_v and b_v.
    `softmax_scale` None is d^-1/2; the ranks are apart. The fast path is SDPA where K and V are built, and else the
    same products for a few new tokens at a time.
    """

    def __init__(
        self,
        spec: TPA,
        reach: Reach = FULL,
        form: str = "factored",
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
        cached = cached or form
        if form not in spec.forms or cached not in spec.forms:
            raise ValueError(f"form {form!r}, cached {cached!r}: the forms are {', '.join(spec.forms)}")
        self.spec, self.reach, self.form, self.cached, self.eps = spec, reach, form, cached, eps
        self.path = choose_path(path, self.paths(spec), "no such path")
        self.rotary = rotary or Rotary()
        self.softmax_scale = spec.head_dim**-0.5 if softmax_scale is None else softmax_scale
        make_parameters(self, spec.weights(form), device=device, dtype=dtype)
        initialise(self)

    @classmethod
    def paths(cls, spec: TPA) -> tuple[KernelPath, ...]:  # noqa: ARG003
        """The ways to compute it, the preferred first."""
        return ("fast", "reference")

    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        """[B, T, D] -> [B, T, D]; the new tokens come after the `cache.length` that the cache has seen."""
        cache = Cache() if cache is None else cache
        start = cache.length
        query = self._query(x, start)
        (a_k, b_k), (a_v, b_v) = (self._factors(side, x) for side in "kv")
        b_k = self._rotate(b_k, start)
        named = {"a_k": a_k, "b_k": b_k, "a_v": a_v, "b_v": b_v}
        a_k, b_k, a_v, b_v = (cache.append(name, new, self.reach) for name, new in named.items())
        cache.advance(x.shape[1])
        core = self._factored if self.form == "factored" else self._expanded
        out = core(query, (a_k, b_k), (a_v, b_v), start) / self.spec.v_rank
        return linear(self, "o_proj", out.transpose(1, 2).flatten(2))

    def _query(self, x: Tensor, start: int) -> tuple[Tensor | None, Tensor]:
        """A_q [B, T, H, r_q] and B_q [B, r_q, T, d]; of a plain query None and q [B, H, T, d]. Rotated."""
        spec = self.spec
        if spec.q_rank is None:
            return None, self._rotate(split_heads(linear(self, "q_proj", x), spec.num_heads), start)
        a_q = linear(self, "a_q_proj", x).view(*x.shape[:2], spec.num_heads, spec.q_rank)
        return a_q, self._rotate(split_heads(linear(self, "b_q_proj", x), spec.q_rank), start)

    def _factors(self, side: str, x: Tensor) -> tuple[Tensor, Tensor]:
        """A [B, r, T, H] and B [B, r, T, d] of the new tokens; the weight of A has the ranks of a head together."""
        rank = self.spec.k_rank if side == "k" else self.spec.v_rank
        a = linear(self, f"a_{side}_proj", x).view(*x.shape[:2], -1, rank).permute(0, 3, 1, 2)
        return a, split_heads(linear(self, f"b_{side}_proj", x), rank)

    def _rotate(self, x: Tensor, start: int) -> Tensor:
        width = self.spec.rope_dim
        return self.rotary.rotate(x, self.rotary.table(start, x.shape[2], width, x.device)) if width else x

    def _scale(self) -> float:
        return self.softmax_scale / (self.spec.k_rank * (self.spec.q_rank or 1))

    def _expanded(
        self, query: tuple[Tensor | None, Tensor], key: tuple[Tensor, Tensor], value: tuple[Tensor, Tensor], start: int
    ) -> Tensor:
        """[B, H, T, d] with K and V of all heads built, without the ranks' divisors."""
        a_q, q = query
        if a_q is not None:
            with operation("expand_q"):
                q = (a_q @ q.transpose(1, 2)).transpose(1, 2)
        k, v = (_expand(f"expand_{side}", *factors) for side, factors in (("k", key), ("v", value)))
        kernel = attend if self.path == "fast" else attend_reference
        return kernel(q, k, v, self.reach, start, self._scale())

    def _factored(
        self, query: tuple[Tensor | None, Tensor], key: tuple[Tensor, Tensor], value: tuple[Tensor, Tensor], start: int
    ) -> Tensor:
        """[B, H, T, d] from the factors alone, without the ranks' divisors."""
        a_q, b_q = query
        new_tokens, keys = b_q.shape[2], key[1].shape[2]
        mask = attention_mask(self.reach, new_tokens, keys, start, b_q.device)
        out = []
        size = QUERIES if self.path == "fast" else new_tokens
        for first in range(0, new_tokens, size):
            some = slice(first, first + size)
            of_a = None if a_q is None else a_q[:, some]
            out.append(self._some(of_a, b_q[:, :, some], key, value, mask if mask is None else mask[some]))
        return torch.cat(out, dim=2)

    def _some(
        self,
        a_q: Tensor | None,
        b_q: Tensor,
        key: tuple[Tensor, Tensor],
        value: tuple[Tensor, Tensor],
        mask: Tensor | None,
    ) -> Tensor:
        """The output of some new tokens, [B, H, T, d]."""
        (a_k, b_k), (a_v, b_v) = key, value
        batch, _, new_tokens, width = b_q.shape
        keys = b_k.shape[2]
        with operation("score"):
            rows = b_q if a_q is None else b_q.transpose(1, 2)
            found = rows.reshape(batch, 1, -1, width) @ b_k.mT
        if a_q is None:
            by_rank = found.view(batch, -1, self.spec.num_heads, new_tokens, keys)
        else:
            with operation("score"):
                by_rank = a_q.unsqueeze(1) @ found.view(batch, -1, new_tokens, b_q.shape[1], keys)
            by_rank = by_rank.transpose(2, 3)
        # [B, r_k, H, T, S], weighted by A_k [B, r_k, H, 1, S].
        logits = (by_rank * a_k.mT.unsqueeze(3)).sum(dim=1) * self._scale()
        if mask is not None:
            logits = logits.masked_fill(~mask, -torch.inf)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        weights = logits.softmax(dim=-1).to(b_v.dtype)
        # [B, H, T, r_v, S] with A_v [B, H, 1, r_v, S]: ranks and keys are contracted together.
        weighted = weights.unsqueeze(3) * a_v.permute(0, 3, 1, 2).unsqueeze(2)
        with operation("value"):
            out = weighted.flatten(3).flatten(1, 2) @ b_v.flatten(1, 2)
        return out.view(batch, self.spec.num_heads, new_tokens, width)


def _expand(name: str, a: Tensor, b: Tensor) -> Tensor:
    """A [B, r, S, H] and B [B, r, S, d] -> [B, H, S, d], one product for each token."""
    with operation(name):
        built = a.permute(0, 2, 3, 1) @ b.transpose(1, 2)
    return built.transpose(1, 2)
