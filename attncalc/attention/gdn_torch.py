"""Gated DeltaNet in torch, one step at a time and in chunks (arXiv 2412.06464).

Shapes: B batch, T new tokens, D hidden size, H q/k heads, HV value heads, K and V their widths, C chunk size.
"""

import torch
from torch import Tensor
from torch.nn import functional

from attncalc.attention.conv_torch import convolve
from attncalc.attention.gdn import GDN
from attncalc.attention.state_torch import (
    StateLayer,
    delta_chunked,
    delta_recurrent,
    keep_state,
    kept_state,
    l2_norm,
    wide,
)
from attncalc.attention.torch_base import (
    Cache,
    linear,
    rms_norm,
    split_heads,
)


class Layer(StateLayer[GDN]):
    """One layer of `spec`, in the form `recurrent` or `chunked`; all that came before stands in the cache.

    Parameters are `spec.weights(form)`. The cache is `conv_state` [B, 1, W - 1, channels] in the dtype of x and
    `recurrent_state` [B, HV, K, V] in float32 (float64 where x is); it has the same tensors in both forms.
    """

    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        """[B, T, D] -> [B, T, D]; the new tokens continue what `cache` has seen."""
        spec = self.spec
        H, HV, K, V = spec.num_heads, spec.num_v_heads, spec.head_k_dim, spec.head_v_dim
        mixed = linear(self, "in_proj_qkv", x)
        if spec.conv_kernel:
            mixed = convolve(mixed, self.get_parameter("conv1d.weight"), cache)
        q, k, v = torch.split(mixed.to(wide(x)), [H * K, H * K, HV * V], dim=-1)
        q, k = (l2_norm(split_heads(a, H)).repeat_interleave(HV // H, dim=1) for a in (q, k))
        v = split_heads(v, HV)
        a = linear(self, "in_proj_a", x).to(wide(x)) + self.get_parameter("dt_bias").to(wide(x))
        g = -self.get_parameter("A_log").to(wide(x)).exp() * functional.softplus(a)
        beta = torch.sigmoid(linear(self, "in_proj_b", x).to(wide(x)))
        arguments = (q * K**-0.5, k, v, g.mT.unsqueeze(-1), beta.mT, kept_state(cache, v, K))
        if self.form == "chunked":
            o, state = delta_chunked(*arguments, size=spec.chunk_size)
        else:
            o, state = delta_recurrent(*arguments)
        keep_state(cache, state, x.shape[1])
        o = rms_norm(o.transpose(1, 2), self.get_parameter("norm.weight").to(wide(x)), self.eps)
        if spec.gate:
            o = o * functional.silu(linear(self, "in_proj_z", x).to(wide(x))).view(o.shape)
        return linear(self, "out_proj", o.flatten(2).to(x.dtype))
