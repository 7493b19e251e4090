"""The torch layer of `attncalc.attention.gqa`: MHA, GQA and MQA with every option of the specification."""

import torch
from torch import Tensor, nn

from attncalc.attention.gqa import GQA
from attncalc.attention.rotary import Rotary, Table
from attncalc.attention.torch_base import (
    Cache,
    KernelPath,
    attend,
    attend_reference,
    choose_path,
    initialise,
    linear,
    make_parameters,
    rms_norm,
    split_heads,
)
from attncalc.reach import FULL, Reach


class Layer(nn.Module):
    """Causal attention of H query heads on G KV heads.

    Parameters are `spec.weights(form)`, the cache is K [B, G, S, d] (normed and rotated) and V [B, G, S, e].
    `softmax_scale` None is d^-1/2; `softcap` matters where the specification has a logit softcap. Where K and V are
    another layer's (`own_kv` false), the layer keeps nothing: after that layer's step it is given that layer's cache.
    Sources: arXiv 1706.03762 section 3.2; arXiv 1911.02150; arXiv 2305.13245; arXiv 2405.12981 (sharing).
    """

    def __init__(
        self,
        spec: GQA,
        reach: Reach = FULL,
        form: str = "direct",
        *,
        cached: str | None = None,
        path: KernelPath | None = None,
        rotary: Rotary | None = None,
        softmax_scale: float | None = None,
        softcap: float = 50.0,
        eps: float = 1e-6,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if form not in spec.forms or cached not in (None, form):
            raise ValueError(f"form {form!r}, cached {cached!r}: this layer has only the form {spec.forms[0]!r}")
        self.spec, self.reach, self.form, self.cached = spec, reach, form, form
        self.path = choose_path(path, self.paths(spec), "no fused kernel has sinks or a logit softcap")
        self.rotary = rotary or Rotary()
        self.softmax_scale = spec.head_dim**-0.5 if softmax_scale is None else softmax_scale
        self.softcap = softcap if spec.logit_softcap else None
        self.eps = eps
        make_parameters(self, spec.weights(form), device=device, dtype=dtype)
        initialise(self)

    @classmethod
    def paths(cls, spec: GQA) -> tuple[KernelPath, ...]:
        """The ways to compute it, the preferred first."""
        return ("reference",) if spec.sinks or spec.logit_softcap else ("fast", "reference")

    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        """[B, T, D] -> [B, T, D]; the new tokens come after the `cache.length` that the cache has seen.

        Raises:
            ValueError: the layer has no K and V of its own, and `cache` does not hold those that it needs.
        """
        spec, new_tokens = self.spec, x.shape[1]
        cache = Cache() if cache is None else cache
        start = cache.length if spec.own_kv else cache.length - new_tokens
        if start < 0:
            raise ValueError(f"the cache of another layer must hold the {new_tokens} new tokens, got {cache.length}")
        table = self.rotary.table(start, new_tokens, spec.rope_dim, x.device) if spec.rope_dim else None
        q = self._query(x, table)
        if spec.own_kv:
            k, v = self._key_value(x, table)
            k, v = cache.append("k", k, self.reach), cache.append("v", v, self.reach)
            cache.advance(new_tokens)
        else:
            keys = self.reach.keys(new_tokens, cache.length, "dense")
            k, v = cache.lent("k", keys), cache.lent("v", keys)
        if self.path == "fast":
            out = attend(q, k, v, self.reach, start, self.softmax_scale)
        else:
            sinks = self.get_parameter("sinks") if spec.sinks else None
            out = attend_reference(q, k, v, self.reach, start, self.softmax_scale, softcap=self.softcap, sinks=sinks)
        out = out.transpose(1, 2)
        if spec.gate != "none":
            # [B, T, H, e], or [B, T, H, 1] where a head has one gate.
            gate = linear(self, "gate_proj", x).view(*out.shape[:3], -1)
            out = out * torch.sigmoid(gate)
        return linear(self, "o_proj", out.flatten(2))

    def _query(self, x: Tensor, table: Table | None) -> Tensor:
        """Of the new tokens: q [B, H, T, d]."""
        q = self._heads("q", linear(self, "q_proj", x), self.spec.num_heads)
        return q if table is None else self.rotary.rotate(q, table)

    def _key_value(self, x: Tensor, table: Table | None) -> tuple[Tensor, Tensor]:
        """Of the new tokens: k [B, G, T, d], v [B, G, T, e]."""
        spec = self.spec
        made = linear(self, "k_proj", x)
        k = self._heads("k", made, spec.num_kv_heads)
        v = split_heads(made if spec.shared_kv_weight else linear(self, "v_proj", x), spec.num_kv_heads)
        if spec.v_norm:
            v = rms_norm(v, None, self.eps)
        return (k if table is None else self.rotary.rotate(k, table)), v

    def _heads(self, side: str, x: Tensor, heads: int) -> Tensor:
        """[B, T, heads * d] -> [B, heads, T, d], with the norm of q or k."""
        norm = self.spec.qk_norm
        if norm == "full":
            x = self._norm(side, x)
        x = x.view(*x.shape[:2], heads, -1)
        return (x if norm in ("none", "full") else self._norm(side, x)).transpose(1, 2)

    def _norm(self, side: str, x: Tensor) -> Tensor:
        """The norm of q or k over the last axis, a head's width or (`full`) all heads'."""
        if self.spec.qk_norm == "unweighted":
            return rms_norm(x, None, self.eps)
        weight = self.get_parameter(f"{side}_norm.weight")
        if self.spec.qk_norm in ("per_head", "head_bias"):
            wide = x if x.dtype == torch.float64 else x.float()
            normed = nn.functional.layer_norm(wide, wide.shape[-1:], eps=self.eps).to(x.dtype) * weight
            return normed + self.get_parameter(f"{side}_norm.bias") if self.spec.qk_norm == "head_bias" else normed
        return rms_norm(x, weight, self.eps)
