"""RWKV-7's time mixing in torch, token by token (arXiv 2503.14456).

Shapes: B batch, T new tokens, D hidden size, H heads, K and V their widths.
"""

from math import exp
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from attncalc.attention.rwkv7 import MIXED, RWKV7
from attncalc.attention.state_torch import StateLayer
from attncalc.attention.torch_base import Cache, linear, operation

DECAY = -exp(-0.5)


def recurrent_core(
    r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """S <- Diag(exp w) S + b (a^T S) + k v^T, o = S^T r: o [B, H, T, V] and the new state [B, H, K, V].

    r, log-decay w, k, a and b [B, H, T, K], v [B, H, T, V]. a^T S reads the state before its decay.
    """
    out = []
    for t in range(r.shape[2]):
        r_t, k_t, v_t, a_t, b_t = (x[:, :, t : t + 1] for x in (r, k, v, a, b))
        with operation("state_update"):
            predicted = a_t @ state
        state = state * w[:, :, t, :, None].exp()
        with operation("state_update"):
            state = state + b_t.mT @ predicted + k_t.mT @ v_t
        with operation("state_update"):
            out.append(r_t @ state)
    return torch.cat(out, dim=2), state


class Layer(StateLayer[RWKV7]):
    """One layer of `spec`, token by token; all that came before stands in the cache.

    Parameters are `spec.weights(form)`. The cache is `shift_state` [B, 1, 1, D] in the dtype of x and
    `recurrent_state` [B, H, K, V] in float32 (float64 where x is). The group norm's epsilon is V * `eps`.
    """

    default_eps: ClassVar[float] = 1e-5

    def forward(self, x: Tensor, cache: Cache | None = None, v_first: Tensor | None = None) -> Tensor:
        """[B, T, D] -> [B, T, D]; the new tokens continue what `cache` has seen.

        `v_first` [B, T, H * V]: v of the model's first layer for the same tokens; None mixes a layer's v with itself.
        """
        spec = self.spec
        batch, new_tokens, _ = x.shape
        H, K, V = spec.num_heads, spec.head_k_dim, spec.head_v_dim
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        mixed = self._shifted(x, cache)

        def heads(values: Tensor) -> Tensor:
            return values.to(wide).view(batch, new_tokens, H, -1).transpose(1, 2)

        def vector(name: str) -> Tensor:
            return self.get_parameter(name).to(wide).view(H, 1, -1)

        r, k = heads(linear(self, "r_proj", mixed["r"])), heads(linear(self, "k_proj", mixed["k"]))
        v = linear(self, "v_proj", mixed["v"])
        if spec.v_rank is not None:
            rate = torch.sigmoid(self._low_rank("v", mixed["v"]))
            v = torch.lerp(v, v if v_first is None else v_first, rate)
        v = heads(v)
        w = DECAY * torch.sigmoid(heads(self._low_rank("w", mixed["w"])))
        a = torch.sigmoid(heads(self._low_rank("a", mixed["a"])))
        kk = functional.normalize(k * vector("k_k"), dim=-1)
        k = k + k * (a - 1) * vector("k_a")
        state = cache.buffers.get("recurrent_state") if cache is not None else None
        if state is None:
            state = torch.zeros(batch, H, K, V, dtype=wide, device=x.device)
        o, state = recurrent_core(r, w, k, v, -kk, kk * a, state)
        if cache is not None:
            cache.buffers["recurrent_state"] = state
            cache.advance(new_tokens)
        o = functional.layer_norm(o, (V,), eps=V * self.eps) * vector("g_norm.weight") + vector("g_norm.bias")
        o = o + (r * vector("r_k") * k).sum(-1, keepdim=True) * v
        o = o.transpose(1, 2).reshape(batch, new_tokens, H * V).to(x.dtype)
        return linear(self, "o_proj", o * self._low_rank("g", mixed["g"]))

    def _shifted(self, x: Tensor, cache: Cache | None) -> dict[str, Tensor]:
        """X + (x_{t-1} - x) * mix for each projection; 0 comes before the first token."""
        past = cache.buffers.get("shift_state") if cache is not None else None
        first = torch.zeros_like(x[:, :1]) if past is None else past[:, 0]
        difference = torch.cat((first, x[:, :-1]), dim=1) - x
        if cache is not None:
            cache.buffers["shift_state"] = x[:, None, -1:].clone()
        return {name: x + difference * self.get_parameter(f"x_{name}") for name in MIXED}

    def _low_rank(self, name: str, x: Tensor) -> Tensor:
        """The two matrices of w (tanh between), a, v, or g (sigmoid between)."""
        low = linear(self, f"{name}_lora.lora.0", x, f"{name}_lora_down")
        if name in "wg":
            low = torch.tanh(low) if name == "w" else torch.sigmoid(low)
        return linear(self, f"{name}_lora.lora.2", low, f"{name}_lora_up")
