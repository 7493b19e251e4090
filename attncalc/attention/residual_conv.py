"""A short convolution that is added to its input, without projections: what follows each block of Inkling's layers.

y = x + conv(x), a causal depthwise convolution over W tokens of D channels; the last W - 1 columns of x are kept. The
addition is the residual of the block. Source: transformers 5.24 `models/inkling` (attn_sconv, mlp_sconv).
"""

from dataclasses import dataclass
from typing import ClassVar, Self

from attncalc.attention.base import Attention, HeadShape, Step, check_form, require
from attncalc.attention.conv import conv_axes, conv_cache, conv_product
from attncalc.axes import Dim, Weight
from attncalc.cache import CacheTensor
from attncalc.ops import Ops
from attncalc.reach import Reach
from attncalc.workload import Workload


@dataclass(frozen=True)
class ResidualConv:
    """`conv_kernel` W taps of each of the D channels."""

    hidden_size: int
    conv_kernel: int

    forms: ClassVar[tuple[str, ...]] = ("direct",)
    source: ClassVar[str] = "transformers 5.24 models/inkling"

    def __post_init__(self) -> None:
        require(self, "hidden_size", "conv_kernel")

    @property
    def variant(self) -> str:
        """The id in the registry."""
        return "conv"

    def default_form(self, workload: Workload) -> str:  # noqa: ARG002
        """There is one form."""
        return "direct"

    @property
    def _axes(self) -> dict[str, Dim]:
        return conv_axes(Dim(self.hidden_size, "hidden_size"), self.conv_kernel) | {"one": Dim(1, "1")}

    def weights(self, form: str) -> tuple[Weight, ...]:  # noqa: ARG002
        """W*D."""
        return (Weight("conv1d.weight", "c one w", self._axes),)

    def cache(self, reach: Reach, form: str) -> tuple[CacheTensor, ...]:  # noqa: ARG002
        """Constant: conv_state [B, 1, W - 1, D]."""
        return conv_cache(self._axes)

    def ops(self, step: Step, form: str, *, cached: str) -> Ops:  # noqa: ARG002
        """A depthwise convolution, 2*B*T*W*D; its columns are read and written once in a step."""
        check_form(self, form)
        return Ops((conv_product(self._axes | step.axes),), ())

    def heads(self, form: str) -> HeadShape:  # noqa: ARG002
        """Every channel is a head of width 1 with W fixed weights; no keys are cached."""
        return HeadShape(self.hidden_size, None, self.conv_kernel, 1)

    def query_heads(self) -> int:
        """D: every channel is a head of width 1."""
        return self.hidden_size

    def shard(self, tp: int) -> Self:  # noqa: ARG002
        """The hidden state is whole on every GPU, and so is the convolution over it."""
        return self

    def with_kv_heads(self, kv_heads: int) -> Attention | None:  # noqa: ARG002
        """No keys or values are cached."""
        return None
