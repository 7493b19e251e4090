"""Mamba-2 in torch, one step at a time and in chunks (arXiv 2405.21060).

Shapes: B batch, T new tokens, D hidden size, H heads, G groups, p head width, N state width, C chunk size.
"""

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from attncalc.attention.conv_torch import convolve
from attncalc.attention.mamba2 import Mamba2
from attncalc.attention.state_torch import StateLayer
from attncalc.attention.torch_base import (
    Cache,
    bias_of,
    linear,
    operation,
)


def recurrent_core(x: Tensor, g: Tensor, b: Tensor, c: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Token by token: y [B, H, T, p] and the new state [B, H, p, N].

    x [B, H, T, p] times dt, log-decay g [B, H, T], b and c [B, G, T, N].
    """
    repeat, out = x.shape[1] // b.shape[1], []
    for t in range(x.shape[2]):
        now = slice(t, t + 1)
        b_t, c_t = (a[:, :, now].repeat_interleave(repeat, dim=1) for a in (b, c))
        with operation("state_update"):
            state = state * g[:, :, t, None, None].exp() + x[:, :, now].mT @ b_t
        with operation("state_update"):
            out.append((state @ c_t.mT).mT)
    return torch.cat(out, dim=2), state


def chunked_core(x: Tensor, g: Tensor, b: Tensor, c: Tensor, state: Tensor, *, size: int) -> tuple[Tensor, Tensor]:
    """In chunks of `size` tokens; arguments and results as of `recurrent_core`.

    With G the cumulative g in the chunk: y = exp(G) c S^T + (c_t b_s exp(G_t - G_s)) x for s <= t, where c b^T is
    computed once for each group; S <- exp(G_C) S + (exp(G_C - G) x)^T b. The last chunk is padded with tokens that
    change nothing.
    """
    new_tokens, repeat = x.shape[2], x.shape[1] // b.shape[1]
    pad = -new_tokens % size
    x, b, c = (functional.pad(a, (0, 0, 0, pad)) for a in (x, b, c))
    g = functional.pad(g, (0, pad))
    lower = torch.ones(size, size, dtype=torch.bool, device=x.device).tril()
    out = []
    for start in range(0, new_tokens + pad, size):
        xc, gc, bc, cc = (a[:, :, start : start + size] for a in (x, g, b, c))
        total = gc.cumsum(2).unsqueeze(-1)
        with operation("chunk_qk"):
            scores = cc @ bc.mT
        decay = (total - total.mT).masked_fill(~lower, float("-inf")).exp()
        bc, cc, scores = (a.repeat_interleave(repeat, dim=1) for a in (bc, cc, scores))
        with operation("state_update"):
            read = cc @ state.mT
        with operation("chunk_value"):
            out.append(total.exp() * read + (scores * decay) @ xc)
        last = total[:, :, -1:]
        with operation("state_update"):
            state = state * last.exp() + (xc * (last - total).exp()).mT @ bc
    return torch.cat(out, dim=2)[:, :, :new_tokens], state


class Layer(StateLayer[Mamba2]):
    """One layer of `spec`, in the form `recurrent` or `chunked`; all that came before stands in the cache.

    Parameters are `spec.weights(form)`. The cache is `conv_state` [B, 1, W - 1, channels] in the dtype of x and
    `recurrent_state` [B, H, p, N] in float32 (float64 where x is); it has the same tensors in both forms. dt is not
    clamped (transformers clamps NemotronH's to `time_step_min` in prompts alone).
    """

    default_eps: ClassVar[float] = 1e-5

    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        """[B, T, D] -> [B, T, D]; the new tokens continue what `cache` has seen."""
        spec = self.spec
        batch, new_tokens, _ = x.shape
        H, G, p, N, inner = spec.num_heads, spec.n_groups, spec.head_dim, spec.state_size, spec.inner_size
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        gate, mixed, dt = torch.split(linear(self, "in_proj", x), [inner, spec.conv_channels, H], dim=-1)
        conv = self.get_submodule("conv1d")
        mixed = convolve(mixed, conv.get_parameter("weight"), cache, bias_of(conv)).to(wide)
        values, b, c = torch.split(mixed, [inner, G * N, G * N], dim=-1)

        def heads(part: Tensor, count: int) -> Tensor:
            return part.view(batch, new_tokens, count, -1).transpose(1, 2)

        dt = functional.softplus(dt.to(wide) + self.get_parameter("dt_bias").to(wide)).transpose(1, 2)
        g = -self.get_parameter("A_log").to(wide).exp()[:, None] * dt
        values, b, c = heads(values, H), heads(b, G), heads(c, G)
        state = cache.buffers.get("recurrent_state") if cache is not None else None
        if state is None:
            state = torch.zeros(batch, H, p, N, dtype=wide, device=x.device)
        arguments = (values * dt.unsqueeze(-1), g, b, c, state)
        if self.form == "chunked":
            y, state = chunked_core(*arguments, size=spec.chunk_size)
        else:
            y, state = recurrent_core(*arguments)
        if cache is not None:
            cache.buffers["recurrent_state"] = state
            cache.advance(new_tokens)
        y = y + self.get_parameter("D").to(wide)[:, None, None] * values
        y = y.transpose(1, 2).reshape(batch, new_tokens, inner) * functional.silu(gate.to(wide))
        if spec.gated_norm:
            grouped = y.view(batch, new_tokens, G, -1)
            y = (grouped * torch.rsqrt(grouped.pow(2).mean(-1, keepdim=True) + self.eps)).flatten(2)
            y = y * self.get_parameter("norm.weight").to(wide)
        return linear(self, "out_proj", y.to(x.dtype))
