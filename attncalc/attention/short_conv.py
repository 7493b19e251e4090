"""A gated short convolution: the only mixing of tokens in most layers of LFM2 and LFM3.

in_proj gives B, C and x of I channels each; with a causal depthwise convolution over W tokens,

    y = out_proj(C * conv(B * x)).

What is kept is the last W - 1 columns of B * x. Source, parameter names too: transformers 5.24 `models/lfm2`,
`models/lfm2_moe`, `models/lfm3`.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

from attncalc.attention.base import Attention, HeadShape, Step, check_form, require
from attncalc.attention.conv import conv_axes, conv_cache, conv_product, conv_rowwise
from attncalc.axes import Dim, Weight
from attncalc.cache import CacheTensor
from attncalc.errors import AttncalcError
from attncalc.ops import BIAS, Ops, Rowwise, activation, product, weight
from attncalc.reach import Reach
from attncalc.workload import Workload


@dataclass(frozen=True)
class ShortConv:
    """`inner_size` I channels, `conv_kernel` W taps of each. `bias`: on both projections and the convolution."""

    hidden_size: int
    inner_size: int
    conv_kernel: int
    bias: bool = False

    forms: ClassVar[tuple[str, ...]] = ("direct",)
    source: ClassVar[str] = "transformers 5.24 models/lfm2, models/lfm2_moe, models/lfm3"

    def __post_init__(self) -> None:
        require(self, "hidden_size", "inner_size", "conv_kernel")

    @property
    def variant(self) -> str:
        """The id in the registry."""
        return "short-conv"

    def default_form(self, workload: Workload) -> str:  # noqa: ARG002
        """There is one form."""
        return "direct"

    @property
    def _axes(self) -> dict[str, Dim]:
        return {
            "D": Dim(self.hidden_size, "hidden_size"),
            "m": Dim(3 * self.inner_size, "3 * inner_size"),
            "one": Dim(1, "1"),
        } | conv_axes(Dim(self.inner_size, "inner_size"), self.conv_kernel)

    def weights(self, form: str) -> tuple[Weight, ...]:  # noqa: ARG002
        """3*D*I + W*I + I*D, biases 4*I + D. Linear weights are [out, in]."""
        shapes = {}
        for name, shape in (("in_proj", "m D"), ("conv", "c one w"), ("out_proj", "D c")):
            shapes[f"{name}.weight"] = shape
            if self.bias:
                shapes[f"{name}.bias"] = shape[0]
        axes = self._axes
        return tuple(Weight(name, shape, axes) for name, shape in shapes.items())

    def cache(self, reach: Reach, form: str) -> tuple[CacheTensor, ...]:  # noqa: ARG002
        """Constant: conv_state [B, 1, W - 1, I]."""
        return conv_cache(self._axes)

    def ops(self, step: Step, form: str, *, cached: str) -> Ops:  # noqa: ARG002
        """Projections 8*B*T*D*I, a depthwise convolution 2*B*T*W*I; its columns are read and written once in a step."""
        check_form(self, form)
        axes = self._axes | step.axes
        x, y = activation("x", "b t D"), activation("y", "b t D")
        products = (
            product("in_proj", x, weight("in_proj", "m D"), activation("bcx", "b t m"), axes),
            conv_product(axes),
            product("out_proj", activation("mixed", "b t c"), weight("out_proj", "D c"), y, axes),
        )
        rowwise = [
            Rowwise("input_gate", "b t c", 1, axes),
            *conv_rowwise(axes, bias=self.bias, silu=False),
            Rowwise("output_gate", "b t c", 1, axes),
        ]
        if self.bias:
            rowwise += [Rowwise("in_proj_bias", "b t m", BIAS, axes), Rowwise("out_proj_bias", "b t D", BIAS, axes)]
        return Ops(products, tuple(rowwise))

    def heads(self, form: str) -> HeadShape:  # noqa: ARG002
        """Every channel is a head of width 1 with W fixed weights; no keys are cached."""
        return HeadShape(self.inner_size, None, self.conv_kernel, 1)

    def query_heads(self) -> int:
        """I: every channel is a head of width 1."""
        return self.inner_size

    def shard(self, tp: int) -> "ShortConv":
        """I / tp channels with their columns."""
        if self.inner_size % tp:
            raise AttncalcError("--tp", f"must divide the {self.inner_size} channels", got=tp)
        return replace(self, inner_size=self.inner_size // tp)

    def with_kv_heads(self, kv_heads: int) -> Attention | None:  # noqa: ARG002
        """No keys or values are cached."""
        return None
