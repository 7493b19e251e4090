"""Mamba: a selective state of N values for each channel, decaying by a factor of its own in every one of them.

in_proj gives x and z (gate); x passes a short convolution and SiLU; x_proj gives dt (of rank R), B and C. With dt =
softplus(dt_proj(dt) + bias) and A = -exp(A_log) [inner, N], the state S [inner, N] is

    S_t = exp(dt A) S_{t-1} + (dt x) B^T,  y = S_t C + D x,

output y * SiLU(z), then out_proj. Source: arXiv 2312.00752 section 3; norms on dt, B and C: Jamba, arXiv 2403.19887
section 6.4, and without weights transformers 5.24 `models/falcon_mamba`; parameter names as in `models/jamba` and
`models/mamba` there.
"""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from attncalc.attention.base import Attention, HeadShape, Step, check_form, require
from attncalc.attention.conv import conv_axes, conv_cache, conv_product, conv_rowwise
from attncalc.axes import Dim, Weight
from attncalc.cache import CacheTensor
from attncalc.errors import AttncalcError
from attncalc.ops import (
    BIAS,
    GATED_ACTIVATION,
    RMS_NORM,
    Ops,
    Part,
    Rowwise,
    Term,
    activation,
    on_chip,
    product,
    weight,
)
from attncalc.reach import Reach
from attncalc.workload import Workload

SOFTPLUS = 4  # bias of dt_proj, exponential, addition, logarithm
SKIP = 2  # product with D, addition


@dataclass(frozen=True)
class Mamba:
    """Dimensions and options.

    inner_size channels with state_size N values each; dt_rank R; W = conv_kernel. `norms`: RMSNorm on dt, B and C with
    weights (`rms`, Jamba) or without (`unweighted`, FalconMamba). `bias`: on in_proj and out_proj. There is one form: a
    prefill scans all new tokens.
    """

    hidden_size: int
    inner_size: int
    state_size: int
    dt_rank: int
    conv_kernel: int = 4
    conv_bias: bool = True
    bias: bool = False
    norms: Literal["none", "rms", "unweighted"] = "none"

    forms: ClassVar[tuple[str, ...]] = ("recurrent",)
    source: ClassVar[str] = "arXiv 2312.00752 section 3"

    def __post_init__(self) -> None:
        require(self, "hidden_size", "inner_size", "state_size", "dt_rank", "conv_kernel")

    @property
    def variant(self) -> str:
        """The id in the registry."""
        return "mamba"

    def default_form(self, workload: Workload) -> str:  # noqa: ARG002
        """There is one form."""
        return "recurrent"

    @property
    def _axes(self) -> dict[str, Dim]:
        return {
            "D": Dim(self.hidden_size, "hidden_size"),
            "m": Dim(2 * self.inner_size, "2 * inner_size"),
            "k": Dim(self.state_size, "state_size"),
            "r": Dim(self.dt_rank, "dt_rank"),
            "q": Dim(self.dt_rank + 2 * self.state_size, "dt_rank + 2 * state_size"),
            "one": Dim(1, "1"),
        } | conv_axes(Dim(self.inner_size, "inner_size"), self.conv_kernel)

    def weights(self, form: str) -> tuple[Weight, ...]:  # noqa: ARG002
        """2*D*I + (W + 1)*I + I*(R + 2*N) + R*I + I + I*N + I + I*D, norms R + 2*N. Linear weights are [out, in]."""
        shapes = {"in_proj.weight": "m D"}
        if self.bias:
            shapes["in_proj.bias"] = "m"
        shapes["conv1d.weight"] = "c one w"
        if self.conv_bias:
            shapes["conv1d.bias"] = "c"
        shapes |= {"x_proj.weight": "q c", "dt_proj.weight": "c r", "dt_proj.bias": "c", "A_log": "c k", "D": "c"}
        if self.norms == "rms":
            shapes |= {"dt_layernorm.weight": "r", "b_layernorm.weight": "k", "c_layernorm.weight": "k"}
        shapes["out_proj.weight"] = "D c"
        if self.bias:
            shapes["out_proj.bias"] = "D"
        axes = self._axes
        return tuple(Weight(name, shape, axes) for name, shape in shapes.items())

    def cache(self, reach: Reach, form: str) -> tuple[CacheTensor, ...]:  # noqa: ARG002
        """Constant: conv_state [B, 1, W - 1, I], recurrent_state [B, 1, I, N]."""
        axes = self._axes
        state = CacheTensor("recurrent_state", "state", Dim(1, ""), axes["k"], None, self.inner_size)
        return (*conv_cache(axes), state)

    def ops(self, step: Step, form: str, *, cached: str) -> Ops:  # noqa: ARG002
        """Projections, a depthwise convolution 2*B*T*W*I, `state_update` 4*B*T*I*N: x B^T and S C.

        The decay of every value of the state is elementwise. The state is read and written once in a step, and so are
        the columns of the convolution.
        """
        check_form(self, form)
        axes = self._axes | step.axes
        x = Term("b t c", (activation("x", "b t c"), activation("dt", "b t c")))
        state = Part("recurrent_state", "b c k", "cache", "state")
        new_state = Part("recurrent_state", "b c k", "cache_write", "state")
        B, C, dt = (activation(n, s) for n, s in (("B", "b t k"), ("C", "b t k"), ("dt_low", "b t r")))
        o, y = activation("attn", "b t c"), activation("y", "b t D")
        products = (
            product("in_proj", activation("x", "b t D"), weight("in_proj", "m D"), activation("xz", "b t m"), axes),
            conv_product(axes),
            product("x_proj", activation("x", "b t c"), weight("x_proj", "q c"), activation("dt_bc", "b t q"), axes),
            product("dt_proj", dt, weight("dt_proj", "c r"), activation("dt", "b t c"), axes),
            product(
                "state_update", x, B, Term("b c k", (state, Part("A_log", "c k", "weight", "vector"), new_state)), axes
            ),
            product("state_update", C, on_chip("recurrent_state", "b c k"), activation("o", "b t c"), axes),
            product("out_proj", o, weight("out_proj", "D c"), y, axes),
        )
        rowwise = list(conv_rowwise(axes, bias=self.conv_bias))
        if self.norms != "none":
            norms = {"dt_layernorm": "b t r", "b_layernorm": "b t k", "c_layernorm": "b t k"}
            each = RMS_NORM if self.norms == "rms" else RMS_NORM - 1
            rowwise += [Rowwise(name, shape, each, axes) for name, shape in norms.items()]
        rowwise += [
            Rowwise("dt", "b t c", SOFTPLUS, axes),
            Rowwise("dt_x", "b t c", 1, axes),
            Rowwise("decay_exp", "b t c k", 2, axes),  # product with A, exponential
            Rowwise("state_decay", "b t c k", 1, axes),
            Rowwise("skip", "b t c", SKIP, axes),
            Rowwise("gate", "b t c", GATED_ACTIVATION, axes),  # SiLU of z, product with y
        ]
        if self.bias:
            rowwise += [Rowwise("in_proj_bias", "b t m", BIAS, axes), Rowwise("out_proj_bias", "b t D", BIAS, axes)]
        return Ops(products, tuple(rowwise))

    def heads(self, form: str) -> HeadShape:  # noqa: ARG002
        """Every channel is a head of width 1 with keys of width N; none are cached."""
        return HeadShape(self.inner_size, None, self.state_size, 1)

    def query_heads(self) -> int:
        """I: every channel is a head of width 1 (arXiv 2405.21060 section 7.2)."""
        return self.inner_size

    def shard(self, tp: int) -> "Mamba":
        """I / tp channels with their state; dt, B and C are sums over all GPUs, and so replicated with their norms."""
        if self.inner_size % tp:
            raise AttncalcError("--tp", f"must divide the {self.inner_size} channels", got=tp)
        return replace(self, inner_size=self.inner_size // tp)

    def with_kv_heads(self, kv_heads: int) -> Attention | None:  # noqa: ARG002
        """No keys or values are cached."""
        return None
