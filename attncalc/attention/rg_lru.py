"""The recurrent block of Griffin and RecurrentGemma: a gated linear recurrence with one state value for each channel.

Two branches of R channels: y = GELU(linear_y x), and x' = conv(linear_x x), a causal depthwise convolution over W
tokens. The real-gated linear recurrent unit (RG-LRU) runs over x'; its gates are block-diagonal, H blocks of width
k = R / H:

    r = sigmoid(W_a x' + b_a),  i = sigmoid(W_x x' + b_x),  a = exp(-8 r softplus(Lambda)),
    h_t = a h_{t-1} + sqrt(1 - a^2) (i x'),  output linear_out(y * h).

The first token of a sequence enters without sqrt(1 - a^2). Sources: arXiv 2402.19427 section 2.4 (Griffin); the first
token and parameter names: transformers 5.24 `models/recurrent_gemma`.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

from attncalc.attention.base import Attention, HeadShape, Step, check_form, check_tp, require
from attncalc.attention.conv import conv_axes, conv_cache, conv_product, conv_rowwise
from attncalc.axes import Dim, Weight
from attncalc.cache import CacheTensor
from attncalc.errors import AttncalcError
from attncalc.ops import BIAS, GATED_ACTIVATION, Ops, Part, Rowwise, Term, activation, product, weight
from attncalc.reach import Reach
from attncalc.workload import Workload


@dataclass(frozen=True)
class RGLRU:
    """`lru_width` R channels; `num_heads` H blocks of the gates; W = conv_kernel. Every linear has a bias.

    There is one form: a prompt runs the recurrence over all new tokens.
    """

    hidden_size: int
    lru_width: int
    num_heads: int
    conv_kernel: int = 4

    forms: ClassVar[tuple[str, ...]] = ("recurrent",)
    source: ClassVar[str] = "arXiv 2402.19427 section 2.4"

    def __post_init__(self) -> None:
        require(self, "hidden_size", "lru_width", "num_heads", "conv_kernel")
        if self.lru_width % self.num_heads:
            raise AttncalcError("num_heads", f"must divide lru_width {self.lru_width}", got=self.num_heads)

    @property
    def variant(self) -> str:
        """The id in the registry."""
        return "rg-lru"

    def default_form(self, workload: Workload) -> str:  # noqa: ARG002
        """There is one form."""
        return "recurrent"

    @property
    def _axes(self) -> dict[str, Dim]:
        block = Dim(self.lru_width // self.num_heads, "lru_width / num_heads")
        return {
            "D": Dim(self.hidden_size, "hidden_size"),
            "h": Dim(self.num_heads, "num_heads"),
            "k": block,
            "v": block,
            "one": Dim(1, "1"),
        } | conv_axes(Dim(self.lru_width, "lru_width"), self.conv_kernel)

    def weights(self, form: str) -> tuple[Weight, ...]:  # noqa: ARG002
        """3*D*R + 2*R*R/H + W*R + 6*R + D. Linear weights are [out, in], blocks of the gates [in, out]."""
        shapes = {
            "linear_y.weight": "c D",
            "linear_y.bias": "c",
            "linear_x.weight": "c D",
            "linear_x.bias": "c",
            "conv_1d.weight": "c one w",
            "conv_1d.bias": "c",
            "rg_lru.recurrent_param": "c",
            "rg_lru.input_gate_weight": "h k v",
            "rg_lru.input_gate_bias": "h v",
            "rg_lru.recurrent_gate_weight": "h k v",
            "rg_lru.recurrent_gate_bias": "h v",
            "linear_out.weight": "D c",
            "linear_out.bias": "D",
        }
        axes = self._axes
        return tuple(Weight(name, shape, axes) for name, shape in shapes.items())

    def cache(self, reach: Reach, form: str) -> tuple[CacheTensor, ...]:  # noqa: ARG002
        """Constant: conv_state [B, 1, W - 1, R] and recurrent_state [B, 1, 1, R]."""
        axes = self._axes
        return (*conv_cache(axes), CacheTensor("recurrent_state", "state", Dim(1, ""), axes["c"], None, 1))

    def ops(self, step: Step, form: str, *, cached: str) -> Ops:  # noqa: ARG002
        """Projections 6*B*T*D*R, a depthwise convolution 2*B*T*W*R, gates 4*B*T*R*R/H; the recurrence is elementwise.

        The state, which the recurrent gate fades, is read and written once in a step, and so are the columns of the
        convolution.
        """
        check_form(self, form)
        axes = self._axes | step.axes
        x, y = activation("x", "b t D"), activation("y", "b t D")
        mixed = Term("b t h k", (activation("mixed", "b t c"),))
        state = Part("recurrent_state", "b c", "cache", "state")
        new_state = Part("recurrent_state", "b c", "cache_write", "state")
        hidden = Term("b t h v", (state, activation("hidden", "b t c"), new_state))
        products = (
            product("linear_y", x, weight("linear_y", "c D"), activation("branch", "b t c"), axes),
            product("linear_x", x, weight("linear_x", "c D"), activation("mixed", "b t c"), axes),
            conv_product(axes),
            product(
                "input_gate", mixed, weight("input_gate", "h k v"), Term("b t h v", (activation("i", "b t c"),)), axes
            ),
            product("recurrent_gate", mixed, weight("recurrent_gate", "h k v"), hidden, axes),
            product("linear_out", activation("gated", "b t c"), weight("linear_out", "D c"), y, axes),
        )
        biased = ("linear_y", "linear_x", "input_gate", "recurrent_gate")
        rowwise = (
            *(Rowwise(f"{name}_bias", "b t c", BIAS, axes) for name in biased),
            *conv_rowwise(axes, bias=True, silu=False),
            Rowwise("gate_sigmoid", "b t c", 2, axes),
            Rowwise("decay_exp", "b t c", 2, axes),  # product with -8 softplus(Lambda), exponential
            Rowwise("input_scale", "b t c", 5, axes),  # a^2, difference, square root, two products
            Rowwise("state_decay", "b t c", 2, axes),  # product with a, addition
            Rowwise("gate", "b t c", GATED_ACTIVATION, axes),  # GELU of y, product with h
            Rowwise("linear_out_bias", "b t D", BIAS, axes),
        )
        return Ops(products, rowwise)

    def heads(self, form: str) -> HeadShape:  # noqa: ARG002
        """Every channel is a head of width 1 with one state value; no keys are cached."""
        return HeadShape(self.lru_width, None, 1, 1)

    def query_heads(self) -> int:
        """R: every channel is a head of width 1."""
        return self.lru_width

    def shard(self, tp: int) -> "RGLRU":
        """H / tp blocks with their channels, columns and state."""
        check_tp(tp, self.num_heads)
        return replace(self, lru_width=self.lru_width // tp, num_heads=self.num_heads // tp)

    def with_kv_heads(self, kv_heads: int) -> Attention | None:  # noqa: ARG002
        """No keys or values are cached."""
        return None
