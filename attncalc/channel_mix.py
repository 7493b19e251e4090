"""RWKV-7's channel mixing: a feed-forward with a token shift, so a cache.

A module of its own, since few models have it and every command reads models.

    y = relu((x + (x_{t-1} - x) * x_k) W_key)^2 W_value: 2 * 2 * D * I FLOPs per token, as a plain feed-forward.

Source: arXiv 2503.14456 section 4; parameter names as in flash-linear-attention `models/rwkv7/modeling_rwkv7.py`.
"""

from dataclasses import dataclass, replace

from attncalc.attention.base import require
from attncalc.axes import Dim, Weight
from attncalc.cache import CacheTensor
from attncalc.ffn import token_axes
from attncalc.ops import Ops, Part, Rowwise, Term, activation, product, weight
from attncalc.workload import Workload


@dataclass(frozen=True)
class ChannelMix:
    """A feed-forward of width I over x mixed with the x of the token before, which it keeps."""

    hidden_size: int
    intermediate_size: int

    def __post_init__(self) -> None:
        require(self, "hidden_size", "intermediate_size")

    @property
    def _axes(self) -> dict[str, Dim]:
        return {
            "D": Dim(self.hidden_size, "hidden_size"),
            "I": Dim(self.intermediate_size, "intermediate_size"),
            "one": Dim(1, "1"),
        }

    def weights(self) -> tuple[Weight, ...]:
        """2*D*I, and the D rates of the token shift; linear weights are [out, in]."""
        shapes = {"x_k": "D", "key.weight": "I D", "value.weight": "D I"}
        return tuple(Weight(name, shape, self._axes) for name, shape in shapes.items())

    def read_weights(self, workload: Workload) -> tuple[Weight, ...]:  # noqa: ARG002
        """What a step reads: everything."""
        return self.weights()

    def cache(self) -> tuple[CacheTensor, ...]:
        """Constant: ffn_shift_state [B, 1, 1, D], the last x."""
        return (CacheTensor("ffn_shift_state", "conv", Dim(1, ""), self._axes["D"], None, 1),)

    def ops(self, workload: Workload) -> Ops:
        """2 * B * T * D * I for each matrix; the last x is read and written once in a step."""
        axes = self._axes | token_axes(workload)
        shifted = Term("b t D", (activation("x", "b t D"), Part("ffn_shift_state", "b one D", "cache", "conv")))
        kept = Part("ffn_shift_state", "b one D", "cache_write", "conv")
        mid = Term("b t I", (activation("ffn_key", "b t I"), kept))
        products = (
            product("ffn_key_proj", shifted, weight("ffn_key_proj", "I D"), mid, axes),
            product(
                "ffn_value_proj",
                activation("ffn_key", "b t I"),
                weight("ffn_value_proj", "D I"),
                activation("y", "b t D"),
                axes,
            ),
        )
        rowwise = (
            Rowwise("ffn_token_shift", "b t D", 3, axes),  # difference, product, sum
            Rowwise("ffn_activation", "b t I", 2, axes),  # relu, square
        )
        return Ops(products, rowwise)

    def shard(self, tp: int) -> "ChannelMix":
        """I / tp columns, rounded up; the token shift is replicated."""
        return replace(self, intermediate_size=-(-self.intermediate_size // tp))

    @property
    def inactive_parameters(self) -> int:
        """Every token uses all of it."""
        return 0
