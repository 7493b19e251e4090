"""The gated short convolution in torch. Shapes: B batch, T new tokens, D hidden size, I channels, W taps."""

import torch
from torch import Tensor

from attncalc.attention.conv_torch import convolve
from attncalc.attention.short_conv import ShortConv
from attncalc.attention.state_torch import StateLayer
from attncalc.attention.torch_base import Cache, bias_of, linear


class Layer(StateLayer[ShortConv]):
    """One layer of `spec`; parameters are `spec.weights(form)`.

    The cache is `conv_state` [B, 1, W - 1, I], the last columns of B * x, in the dtype of x.
    """

    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        """[B, T, D] -> [B, T, D]; the new tokens continue what `cache` has seen."""
        into, out, values = torch.split(linear(self, "in_proj", x), self.spec.inner_size, dim=-1)
        conv = self.get_submodule("conv")
        mixed = convolve(into * values, conv.get_parameter("weight"), cache, bias_of(conv), silu=False)
        if cache is not None:
            cache.advance(x.shape[1])
        return linear(self, "out_proj", out * mixed)
