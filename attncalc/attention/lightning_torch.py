"""Lightning attention in torch, one step at a time and in chunks (MiniMax-01, arXiv 2501.08313).

Shapes: B batch, T new tokens, D hidden size, H heads, d their width, C chunk size.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from attncalc.attention.lightning import Lightning
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
)
from attncalc.reach import FULL, Reach


class Layer(StateLayer[Lightning]):
    """One layer of `spec`, in the form `recurrent` or `chunked`; all that came before stands in the cache.

    Parameters are `spec.weights(form)`. The cache is `recurrent_state` [B, H, d, d] in float32 (float64 where x is),
    the same in both forms. `slope_factor` multiplies the slopes of all heads, as deeper layers of MiniMax-01 do.
    """

    def __init__(
        self,
        spec: Lightning,
        reach: Reach = FULL,
        form: str = "recurrent",
        *,
        slope_factor: float = 1.0,
        **settings: Any,
    ) -> None:
        super().__init__(spec, reach, form, **settings)
        self.slope_factor = slope_factor

    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        """[B, T, D] -> [B, T, D]; the new tokens continue what `cache` has seen."""
        H, d = self.spec.num_heads, self.spec.head_dim
        qkv = functional.silu(linear(self, "qkv_proj", x).to(wide(x)))
        q, k, v = qkv.view(*x.shape[:2], H, 3, d).permute(3, 0, 2, 1, 4)
        head = torch.arange(1, H + 1, dtype=wide(x), device=x.device)
        g = -self.slope_factor * torch.exp2(-8 / H * head)
        arguments = (q, k, v, g, kept_state(cache, v, d))
        if self.form == "chunked":
            o, state = retention_chunked(*arguments, size=self.spec.chunk_size)
        else:
            o, state = retention_recurrent(*arguments)
        keep_state(cache, state, x.shape[1])
        o = rms_norm(o.transpose(1, 2).flatten(2), self.get_parameter("norm.weight").to(wide(x)), self.eps)
        o = o * torch.sigmoid(linear(self, "output_gate", x).to(wide(x)))
        return linear(self, "out_proj", o.to(x.dtype))
