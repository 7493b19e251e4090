"""Mamba in torch, token by token (arXiv 2312.00752).

Shapes: B batch, T new tokens, D hidden size, I inner width, N state width, R rank of dt.
"""

import torch
from torch import Tensor
from torch.nn import functional

from attncalc.attention.conv_torch import convolve
from attncalc.attention.mamba import Mamba
from attncalc.attention.state_torch import StateLayer
from attncalc.attention.torch_base import (
    Cache,
    bias_of,
    linear,
    operation,
    rms_norm,
)


class Layer(StateLayer[Mamba]):
    """One layer of `spec`, token by token; all that came before stands in the cache.

    Parameters are `spec.weights(form)`. The cache is `conv_state` [B, 1, W - 1, I] in the dtype of x and
    `recurrent_state` [B, 1, I, N] in float32 (float64 where x is).
    """

    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        """[B, T, D] -> [B, T, D]; the new tokens continue what `cache` has seen."""
        spec = self.spec
        batch, new_tokens, _ = x.shape
        N = spec.state_size
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        values, gate = linear(self, "in_proj", x).chunk(2, dim=-1)
        conv = self.get_submodule("conv1d")
        values = convolve(values, conv.get_parameter("weight"), cache, bias_of(conv))
        dt, b, c = torch.split(linear(self, "x_proj", values), [spec.dt_rank, N, N], dim=-1)
        if spec.norms != "none":
            weights = [
                self.get_parameter(f"{name}_layernorm.weight") if spec.norms == "rms" else None
                for name in ("dt", "b", "c")
            ]
            dt, b, c = (rms_norm(part, w, self.eps) for part, w in zip((dt, b, c), weights, strict=True))
        dt = functional.softplus(linear(self, "dt_proj", dt).to(wide))
        values, b, c = values.to(wide), b.to(wide), c.to(wide)
        rate = -self.get_parameter("A_log").to(wide).exp()
        kept = cache.buffers.get("recurrent_state") if cache is not None else None
        state = torch.zeros(batch, spec.inner_size, N, dtype=wide, device=x.device) if kept is None else kept[:, 0]
        out = []
        for t in range(new_tokens):
            now = slice(t, t + 1)
            decay, written = (dt[:, t, :, None] * rate).exp(), (dt[:, now] * values[:, now]).mT
            with operation("state_update"):
                state = decay * state + written @ b[:, now]
            with operation("state_update"):
                out.append((state @ c[:, now].mT).mT)
        if cache is not None:
            cache.buffers["recurrent_state"] = state[:, None]
            cache.advance(new_tokens)
        y = torch.cat(out, dim=1) + self.get_parameter("D").to(wide) * values
        return linear(self, "out_proj", (y * functional.silu(gate.to(wide))).to(x.dtype))
