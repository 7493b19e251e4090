"""The torch layer of `attncalc.attention.mfa`: multi-matrix factorisation attention."""

import torch
from torch import Tensor, nn

from attncalc.attention.mfa import MFA
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
    split_heads,
)
from attncalc.reach import FULL, Reach


class Layer(nn.Module):
    """Causal attention of H wide query heads on one KV head (arXiv 2412.19255).

    Parameters are `spec.weights(form)`, the cache is K [B, 1, S, d] (rotated) and V [B, 1, S, d]. `softmax_scale` None
    is d^-1/2.
    """

    def __init__(
        self,
        spec: MFA,
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
        if form not in spec.forms or cached not in (None, form):
            raise ValueError(f"form {form!r}, cached {cached!r}: this layer has only the form {spec.forms[0]!r}")
        self.spec, self.reach, self.form, self.cached, self.eps = spec, reach, form, form, eps
        self.path = choose_path(path, self.paths(spec), "no such path")
        self.rotary = rotary or Rotary()
        self.softmax_scale = spec.head_dim**-0.5 if softmax_scale is None else softmax_scale
        make_parameters(self, spec.weights(form), device=device, dtype=dtype)
        initialise(self)

    @classmethod
    def paths(cls, spec: MFA) -> tuple[KernelPath, ...]:  # noqa: ARG003
        """The ways to compute it, the preferred first."""
        return ("fast", "reference")

    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        """[B, T, D] -> [B, T, D]; the new tokens come after the `cache.length` that the cache has seen."""
        cache = Cache() if cache is None else cache
        spec, start = self.spec, cache.length
        q_a = linear(self, "q_a_proj", x)
        if spec.q_norm:
            q_a = rms_norm(q_a, self.get_parameter("q_a_layernorm.weight"), self.eps)
        q = split_heads(linear(self, "q_b_proj", q_a), spec.num_heads)
        k, v = (linear(self, f"{name}_proj", x).unsqueeze(1) for name in "kv")
        if spec.rope_dim:
            table = self.rotary.table(start, x.shape[1], spec.rope_dim, x.device)
            q, k = self.rotary.rotate(q, table), self.rotary.rotate(k, table)
        k, v = cache.append("k", k, self.reach), cache.append("v", v, self.reach)
        cache.advance(x.shape[1])
        kernel = attend if self.path == "fast" else attend_reference
        out = kernel(q, k, v, self.reach, start, self.softmax_scale)
        return linear(self, "o_proj", out.transpose(1, 2).flatten(2))
