"""The recurrent block of Griffin in torch. Shapes: B batch, T new tokens, D hidden size, R channels, H blocks."""

import torch
from torch import Tensor
from torch.nn import functional

from attncalc.attention.conv_torch import convolve
from attncalc.attention.rg_lru import RGLRU
from attncalc.attention.state_torch import StateLayer, wide
from attncalc.attention.torch_base import Cache, bias_of, linear, operation

DECAY = -8.0
"""c of arXiv 2402.19427 section 2.4: a = exp(-c r softplus(Lambda))."""


class Layer(StateLayer[RGLRU]):
    """One layer of `spec`, token by token; parameters are `spec.weights(form)`.

    The cache is `conv_state` [B, 1, W - 1, R] in the dtype of x and `recurrent_state` [B, 1, 1, R] in float32 (float64
    where x is).
    """

    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        """[B, T, D] -> [B, T, D]; the new tokens continue what `cache` has seen."""
        branch = functional.gelu(linear(self, "linear_y", x), approximate="tanh")
        conv = self.get_submodule("conv_1d")
        mixed = linear(self, "linear_x", x)
        mixed = convolve(mixed, conv.get_parameter("weight"), cache, bias_of(conv), silu=False)
        state = cache.buffers.get("recurrent_state") if cache is not None else None
        entering = mixed * self._gate("input_gate", mixed)
        lasting = functional.softplus(self.get_parameter("rg_lru.recurrent_param"))
        decay = (DECAY * self._gate("recurrent_gate", mixed) * lasting).to(wide(x)).exp()
        scale = (1 - decay.square()).sqrt()
        if state is None:
            # Nothing came before: the first token enters whole.
            scale = torch.cat((torch.ones_like(scale[:, :1]), scale[:, 1:]), dim=1)
            state = torch.zeros_like(scale[:, None, :1])
        entering = entering * scale
        out, held = [], state[:, 0, 0]
        for t in range(x.shape[1]):
            held = decay[:, t] * held + entering[:, t]
            out.append(held)
        if cache is not None:
            cache.buffers["recurrent_state"] = held[:, None, None]
            cache.advance(x.shape[1])
        return linear(self, "linear_out", torch.stack(out, dim=1).to(x.dtype) * branch)

    def _gate(self, name: str, x: Tensor) -> Tensor:
        """The sigmoid of a block-diagonal linear of [B, T, R]."""
        weight, bias = (self.get_parameter(f"rg_lru.{name}_{part}") for part in ("weight", "bias"))
        blocks = x.reshape(-1, *weight.shape[:2]).transpose(0, 1)
        with operation(name):
            made = blocks @ weight
        return torch.sigmoid((made.transpose(0, 1) + bias).reshape(x.shape))
