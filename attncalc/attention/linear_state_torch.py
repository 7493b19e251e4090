"""The linear-state layer in torch. Shapes: B batch, T new tokens, D hidden size, s state width."""

import torch
from torch import Tensor

from attncalc.attention.linear_state import LinearState
from attncalc.attention.state_torch import StateLayer
from attncalc.attention.torch_base import Cache, linear, operation


class Layer(StateLayer[LinearState]):
    """One layer of `spec`, token by token; all that came before stands in the cache.

    Parameters are `spec.weights(form)`. The cache is `recurrent_state` [B, 1, s (key), s (value)] in float32
    (float64 where x is). `eps` is there for the signature that all layers share.
    """

    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        """[B, T, D] -> [B, T, D]; the new tokens continue what `cache` has seen."""
        batch, new_tokens, _ = x.shape
        size = self.spec.state_dim
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        q, k, v, decay = (linear(self, f"{name}_proj", x).to(wide) for name in ("q", "k", "v", "decay"))
        decay = torch.sigmoid(decay)
        kept = cache.buffers.get("recurrent_state") if cache is not None else None
        state = torch.zeros(batch, size, size, dtype=wide, device=x.device) if kept is None else kept[:, 0]
        out = []
        for t in range(new_tokens):
            now = slice(t, t + 1)
            with operation("state_update"):
                state = decay[:, t, :, None] * state + k[:, now].mT @ v[:, now]
            with operation("state_update"):
                out.append(q[:, now] @ state)
        if cache is not None:
            cache.buffers["recurrent_state"] = state[:, None]
            cache.advance(new_tokens)
        return linear(self, "o_proj", torch.cat(out, dim=1).to(x.dtype))
