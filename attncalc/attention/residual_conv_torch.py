"""A short convolution that is added to its input, in torch. Shapes: B batch, T new tokens, D channels, W taps."""

from torch import Tensor

from attncalc.attention.conv_torch import convolve
from attncalc.attention.residual_conv import ResidualConv
from attncalc.attention.state_torch import StateLayer
from attncalc.attention.torch_base import Cache


class Layer(StateLayer[ResidualConv]):
    """One layer of `spec`; the cache is `conv_state` [B, 1, W - 1, D] in the dtype of x."""

    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        """[B, T, D] -> [B, T, D]; the new tokens continue what `cache` has seen."""
        out = x + convolve(x, self.get_parameter("conv1d.weight"), cache, silu=False)
        if cache is not None:
            cache.advance(x.shape[1])
        return out
