"""The torch layer of `attncalc.attention.gqa`: MHA, GQA and MQA with every option of the specification."""

import torch
from torch import Tensor, nn

from attncalc.attention.gqa import GQA
from attncalc.attention.rotary import Rotary
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
)
from attncalc.reach import FULL, Reach


class Layer(nn.Module):
    """Causal attention of H query heads on G KV heads.

    Parameters are `spec.weights(form)`, the cache is K [B, G, S, d] (normed and rotated) and V [B, G, S, e].
    `softmax_scale` None is d^-1/2. `softcap` matters where the specification has a logit softcap. Sources: arXiv
    1706.03762 section 3.2; arXiv 1911.02150; arXiv 2305.13245.
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
        if not spec.own_kv:
            raise NotImplementedError("a layer that reads another layer's K and V has no torch layer of its own")
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
        """[B, T, D] -> [B, T, D]; the new tokens come after the `cache.length` that the cache has seen."""
        cache = Cache() if cache is None else cache
        spec, start = self.spec, cache.length
        q, k, v = self._qkv(x, start)
        k, v = cache.append("k", k, self.reach), cache.append("v", v, self.reach)
        cache.advance(x.shape[1])
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

    def _qkv(self, x: Tensor, start: int) -> tuple[Tensor, Tensor, Tensor]:
        """Of the new tokens: q [B, H, T, d], k [B, G, T, d], v [B, G, T, e]."""
        spec = self.spec
        q, k = linear(self, "q_proj", x), linear(self, "k_proj", x)
        v = k if spec.shared_kv_weight else linear(self, "v_proj", x)
        if spec.qk_norm == "full":
            q, k = self._norm("q", q), self._norm("k", k)
        q = q.view(*q.shape[:2], spec.num_heads, -1)
        k, v = (side.view(*side.shape[:2], spec.num_kv_heads, -1) for side in (k, v))
        if spec.qk_norm not in ("none", "full"):
            q, k = self._norm("q", q), self._norm("k", k)
        if spec.v_norm:
            v = rms_norm(v, None, self.eps)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if spec.rope_dim:
            table = self.rotary.table(start, x.shape[1], spec.rope_dim, x.device)
            q, k = self.rotary.rotate(q, table), self.rotary.rotate(k, table)
        return q, k, v

    def _norm(self, side: str, x: Tensor) -> Tensor:
        """The norm of q or k over the last axis, a head's width or (`full`) all heads'."""
        if self.spec.qk_norm == "unweighted":
            return rms_norm(x, None, self.eps)
        weight = self.get_parameter(f"{side}_norm.weight")
        if self.spec.qk_norm == "per_head":
            wide = x if x.dtype == torch.float64 else x.float()
            return nn.functional.layer_norm(wide, wide.shape[-1:], eps=self.eps).to(x.dtype) * weight
        return rms_norm(x, weight, self.eps)
