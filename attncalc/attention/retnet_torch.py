"""Multi-scale retention in torch, one step at a time and in chunks (arXiv 2307.08621).

Shapes: B batch, T new tokens, D hidden size, H heads, K and V their widths, C chunk size.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from attncalc.attention.retnet import RetNet
from attncalc.attention.rotary import Rotary
from attncalc.attention.state_torch import (
    StateLayer,
    keep_state,
    kept_state,
    retention_chunked,
    retention_recurrent,
    wide,
)
from attncalc.attention.torch_base import (
    Cache,
    linear,
    rms_norm,
    split_heads,
)
from attncalc.reach import FULL, Reach


class Layer(StateLayer[RetNet]):
    """One layer of `spec`, in the form `recurrent` or `chunked`; all that came before stands in the cache.

    Parameters are `spec.weights(form)`. The cache is `recurrent_state` [B, H, K, V] in float32 (float64 where x is),
    the same in both forms.
    """

    def __init__(
        self,
        spec: RetNet,
        reach: Reach = FULL,
        form: str = "recurrent",
        *,
        rotary: Rotary | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(spec, reach, form, **settings)
        self.rotary = rotary or Rotary()

    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        """[B, T, D] -> [B, T, D]; the new tokens continue what `cache` has seen."""
        spec, new_tokens = self.spec, x.shape[1]
        H, K = spec.num_heads, spec.head_k_dim
        q, k, v = (split_heads(linear(self, f"{n}_proj", x).to(wide(x)), H) for n in "qkv")
        table = self.rotary.table(cache.length if cache is not None else 0, new_tokens, K, x.device)
        q, k = self.rotary.rotate(q, table) * K**-0.5, self.rotary.rotate(k, table)
        head = torch.arange(H, dtype=wide(x), device=x.device)
        arguments = (q, k, v, torch.log1p(-torch.exp2(-5 - head)), kept_state(cache, v, K))
        if self.form == "chunked":
            o, state = retention_chunked(*arguments, size=spec.chunk_size)
        else:
            o, state = retention_recurrent(*arguments)
        keep_state(cache, state, new_tokens)
        norm = "g_norm_swish_gate.weight" if spec.gate else "g_norm.weight"
        o = rms_norm(o.transpose(1, 2), self.get_parameter(norm).to(wide(x)), self.eps)
        if spec.gate:
            o = o * functional.silu(linear(self, "g_proj", x).to(wide(x))).view(o.shape)
        return linear(self, "o_proj", o.flatten(2).to(x.dtype))
