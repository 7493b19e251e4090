"""Lightning attention in torch, one step at a time and in chunks (MiniMax-01, arXiv 2501.08313).

Shapes: B batch, T new tokens, D hidden size, H heads, d their width, C chunk size.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from attncalc.attention.base import check_form
from attncalc.attention.lightning import Lightning
from attncalc.attention.state_torch import keep_state, kept_state, retention_chunked, retention_recurrent, wide
from attncalc.attention.torch_base import (
    Cache,
    KernelPath,
    choose_path,
    initialise,
    linear,
    make_parameters,
    rms_norm,
)
from attncalc.reach import FULL, Reach


class Layer(nn.Module):
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
        cached: str | None = None,
        path: KernelPath | None = None,
        eps: float = 1e-6,
        slope_factor: float = 1.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.spec, self.reach, self.form, self.cached = spec, reach, check_form(spec, form), cached or form
        if reach != FULL:
            raise ValueError(f"a state holds all that came before: reach {reach.text} does not apply")
        self.path = choose_path(path, self.paths(spec), "this layer has no other")
        self.eps, self.slope_factor = eps, slope_factor
        make_parameters(self, spec.weights(form), device=device, dtype=dtype)
        initialise(self)

    @classmethod
    def paths(cls, spec: Lightning) -> tuple[KernelPath, ...]:  # noqa: ARG003
        """The ways to compute it."""
        return ("reference",)

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
