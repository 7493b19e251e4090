"""The torch layer of `attncalc.attention.gta`: grouped-tied attention."""

import torch
from torch import Tensor, nn

from attncalc.attention.gta import GTA
from attncalc.attention.rotary import Rotary
from attncalc.attention.torch_base import (
    Cache,
    KernelPath,
    attend_beside,
    choose_path,
    initialise,
    linear,
    make_parameters,
    split_heads,
)
from attncalc.reach import FULL, Reach


class Layer(nn.Module):
    """Causal attention of H query heads on G tied states and one RoPE key (arXiv 2505.21487).

    Parameters are `spec.weights(form)`, the cache is kv [B, G, S, d] and k_pe [B, 1, S, R] (rotated, never repeated).
    `softmax_scale` None is d^-1/2. `eps` is there for the signature that all layers share.
    """

    def __init__(
        self,
        spec: GTA,
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
    def paths(cls, spec: GTA) -> tuple[KernelPath, ...]:  # noqa: ARG003
        """The ways to compute it, the preferred first."""
        return ("fast", "reference")

    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        """[B, T, D] -> [B, T, D]; the new tokens come after the `cache.length` that the cache has seen."""
        cache = Cache() if cache is None else cache
        spec, start = self.spec, cache.length
        plain = spec.head_dim - spec.rope_dim
        q = split_heads(linear(self, "q_proj", x), spec.num_heads)
        v = cache.append("kv", split_heads(linear(self, "kv_proj", x), spec.num_kv_heads), self.reach)
        shared = None
        if spec.rope_dim:
            table = self.rotary.table(start, x.shape[1], spec.rope_dim, x.device)
            k_pe = self.rotary.rotate(linear(self, "k_pe_proj", x).unsqueeze(1), table)
            shared = self.rotary.rotate(q[..., plain:], table), cache.append("k_pe", k_pe, self.reach)
        cache.advance(x.shape[1])
        own = q[..., :plain], v[..., :plain]
        out = attend_beside(self.path, own, shared, v, self.reach, start, self.softmax_scale)
        return linear(self, "o_proj", out.transpose(1, 2).flatten(2))
