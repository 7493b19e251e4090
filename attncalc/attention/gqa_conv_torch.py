"""GQA with convolved K and V and a bias by distance, in torch (Inkling).

Shapes: B batch, T new tokens, S keys, H query heads, G KV heads, R values of a relative state, E distances.
"""

import torch
from torch import Tensor

from attncalc.attention import gqa_torch
from attncalc.attention.conv_torch import convolve
from attncalc.attention.gqa_conv import ConvGQA
from attncalc.attention.torch_base import (
    Cache,
    KernelPath,
    attend_reference,
    choose_path,
    initialise,
    linear,
    make_parameters,
    operation,
    rms_norm,
    split_heads,
)
from attncalc.reach import FULL, Reach


class Layer(gqa_torch.Layer):
    """One layer of `convolved`, whose `spec` is the GQA in it.

    Parameters are `convolved.weights(form)`. The cache is K [B, G, S, d] (convolved and normed), V [B, G, S, e]
    (convolved) and `conv_state` [B, 1, W - 1, G*(d + e)]. `softmax_scale` None is 1/d.
    """

    def __init__(
        self,
        spec: ConvGQA,
        reach: Reach = FULL,
        form: str = "direct",
        *,
        cached: str | None = None,
        path: KernelPath | None = None,
        softmax_scale: float | None = None,
        eps: float = 1e-6,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            spec.gqa,
            reach,
            form,
            cached=cached,
            path="reference",
            softmax_scale=1 / spec.head_dim if softmax_scale is None else softmax_scale,
            eps=eps,
            device=device,
            dtype=dtype,
        )
        self.convolved, self.path = spec, choose_path(path, ("reference",), "no fused kernel adds the bias")
        make_parameters(self, spec.extra_weights(), device=device, dtype=dtype)
        initialise(self)

    @classmethod
    def paths(cls, spec: object) -> tuple[KernelPath, ...]:  # noqa: ARG003
        """The ways to compute it."""
        return ("reference",)

    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        """[B, T, D] -> [B, T, D]; the new tokens come after the `cache.length` that the cache has seen."""
        cache = Cache() if cache is None else cache
        spec, start, new_tokens = self.convolved, cache.length, x.shape[1]
        q = self._query(x, None)
        raw = torch.cat((linear(self, "k_proj", x), linear(self, "v_proj", x)), dim=-1)
        taps = torch.cat([self.get_parameter(f"{side}_sconv.conv1d.weight") for side in "kv"])
        made = raw + convolve(raw, taps, cache, silu=False)
        keys, values = torch.split(made, [spec.num_kv_heads * w for w in (spec.head_dim, spec.v_head_dim)], dim=-1)
        k = rms_norm(split_heads(keys, spec.num_kv_heads), self.get_parameter("k_norm.weight"), self.eps)
        k, v = cache.append("k", k, self.reach), cache.append("v", split_heads(values, spec.num_kv_heads), self.reach)
        cache.advance(new_tokens)
        bias = self._bias(x, start, k.shape[2])
        out = attend_reference(q, k, v, self.reach, start, self.softmax_scale, bias=bias)
        return linear(self, "o_proj", out.transpose(1, 2).flatten(2))

    def _bias(self, x: Tensor, start: int, keys: int) -> Tensor:
        """[B, H, T, S]: of each query the value of its profile at the distance of each key present, or 0 beyond E."""
        spec, new_tokens = self.convolved, x.shape[1]
        relative = split_heads(linear(self, "r_proj", x), spec.num_heads)
        with operation("rel_bias"):
            profile = relative @ self.get_parameter("rel_logits_proj.proj")
        query = torch.arange(start, start + new_tokens, device=x.device)[:, None]
        distance = query - torch.arange(start + new_tokens - keys, start + new_tokens, device=x.device)
        near = distance.clamp(0, spec.rel_extent - 1).expand(*profile.shape[:2], -1, -1)
        return profile.gather(-1, near).masked_fill((distance < 0) | (distance >= spec.rel_extent), 0)
