"""Gated DeltaNet: a delta rule whose state decays by one factor per value head, with grouped value heads (GVA).

S [K, V] per value head, from q, k [K] (short convolution, SiLU, L2 norm; q scaled by K^-1/2), v [V] (convolution,
SiLU), a scalar log-decay g = -exp(A_log) softplus(x W_a + dt_bias) and beta = sigmoid(x W_b):

    S_t = exp(g) (I - beta k k^T) S_{t-1} + beta k v^T,  o = S_t^T q,

output RMSNorm(o) * SiLU(z) with z = x W_z, then out_proj. Value head i reads q/k head i // (HV / H). Sources:
arXiv 2412.06464 sections 3 and 4; Qwen3-Next and Qwen3.5 in transformers 5.24. Parameter names are Qwen3.5's;
Qwen3-Next stores the same rows in two matrices, in_proj_qkvz and in_proj_ba, interleaved by q/k head.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

from attncalc.attention.base import Attention, HeadShape, Step, check_form, check_tp, require
from attncalc.attention.state import L2_NORM, SOFTPLUS_DECAY, convolution, delta_chunked, delta_recurrent, kept
from attncalc.axes import Dim, Weight
from attncalc.cache import CacheTensor
from attncalc.errors import AttncalcError
from attncalc.ops import ACTIVATION, GATED_ACTIVATION, RMS_NORM, Ops, Rowwise, activation, product, weight
from attncalc.reach import Reach
from attncalc.workload import Workload


@dataclass(frozen=True)
class GDN:
    """Dimensions and options.

    H = num_heads q/k heads, HV = num_v_heads value heads, K = head_k_dim, V = head_v_dim, W = conv_kernel; W = 0: no
    short convolution, W = 1: one that keeps no column. `gate`: the output gate z. `chunk_size`: C of the chunked form.
    """

    hidden_size: int
    num_heads: int
    num_v_heads: int
    head_k_dim: int
    head_v_dim: int
    conv_kernel: int
    gate: bool = True
    chunk_size: int = 64

    forms: ClassVar[tuple[str, ...]] = ("recurrent", "chunked")
    source: ClassVar[str] = "arXiv 2412.06464 sections 3 and 4; transformers 5.24 models/qwen3_next, models/qwen3_5"

    def __post_init__(self) -> None:
        require(self, "hidden_size", "num_heads", "num_v_heads", "head_k_dim", "head_v_dim", "chunk_size")
        require(self, "conv_kernel", minimum=0)
        if self.num_v_heads % self.num_heads:
            rule = f"must be a multiple of num_heads {self.num_heads}"
            raise AttncalcError("num_v_heads", rule, got=self.num_v_heads)

    @property
    def variant(self) -> str:
        """The id in the registry."""
        return "gdn"

    def default_form(self, workload: Workload) -> str:
        """Recurrent for one new token, chunked for more."""
        return "recurrent" if workload.new_tokens == 1 else "chunked"

    @property
    def conv_channels(self) -> int:
        """2*H*K + HV*V: q, k and v."""
        return 2 * self.num_heads * self.head_k_dim + self.num_v_heads * self.head_v_dim

    @property
    def _axes(self) -> dict[str, Dim]:
        H, HV, W = self.num_heads, self.num_v_heads, self.conv_kernel
        channels = "2 * num_heads * head_k_dim + num_v_heads * head_v_dim"
        return {
            "D": Dim(self.hidden_size, "hidden_size"),
            "h": Dim(H, "num_heads"),
            "n": Dim(HV, "num_v_heads"),
            "j": Dim(HV // H, "num_v_heads / num_heads"),
            "k": Dim(self.head_k_dim, "head_k_dim"),
            "v": Dim(self.head_v_dim, "head_v_dim"),
            "c": Dim(self.conv_channels, channels),
            "w": Dim(W, "conv_kernel"),
            "u": Dim(max(0, W - 1), "conv_kernel - 1"),
            "one": Dim(1, "1"),
        }

    def weights(self, form: str) -> tuple[Weight, ...]:  # noqa: ARG002
        """D*(2*H*K + HV*V), D*HV*V for z and for the output, 2*D*HV, W*(2*H*K + HV*V), 2*HV + V; [out, in]."""
        shapes = {"in_proj_qkv.weight": "c D"}
        if self.gate:
            shapes["in_proj_z.weight"] = "(n v) D"
        shapes |= {"in_proj_b.weight": "n D", "in_proj_a.weight": "n D"}
        if self.conv_kernel:
            shapes["conv1d.weight"] = "c one w"
        shapes |= {"dt_bias": "n", "A_log": "n", "norm.weight": "v", "out_proj.weight": "D (n v)"}
        axes = self._axes
        return tuple(Weight(name, shape, axes) for name, shape in shapes.items())

    def cache(self, reach: Reach, form: str) -> tuple[CacheTensor, ...]:  # noqa: ARG002
        """Constant: conv_state [B, 1, W - 1, 2*H*K + HV*V] and recurrent_state [B, HV, K, V]."""
        return kept(self._axes, "n", self.conv_kernel)

    def ops(self, step: Step, form: str, *, cached: str) -> Ops:  # noqa: ARG002
        """Projections, a depthwise convolution 2*B*T*W*channels, and the core.

        The core is `delta_recurrent` or `delta_chunked` of the module `state`. transformers solves the triangular
        system for u and w instead of inverting it, which spares two products: 4*C^2*K + 2*C^2*V + 6*C*K*V.
        """
        check_form(self, form)
        axes = self._axes | step.axes
        decay = activation("a", "b t h j")
        core = delta_chunked(step, axes, self.chunk_size, decay) if form == "chunked" else delta_recurrent(axes, decay)
        x, y, attn = activation("x", "b t D"), activation("y", "b t D"), activation("attn", "b t h j v")
        products = [product("in_proj_qkv", x, weight("in_proj_qkv", "c D"), activation("qkv", "b t c"), axes)]
        if self.gate:
            z = activation("z", "b t h j v")
            products.append(product("in_proj_z", x, weight("in_proj_z", "h j v D"), z, axes))
        products += [
            product("in_proj_b", x, weight("in_proj_b", "h j D"), activation("beta", "b t h j"), axes),
            product("in_proj_a", x, weight("in_proj_a", "h j D"), decay, axes),
            *convolution(axes, self.conv_kernel),
            *core.contractions,
            product("out_proj", attn, weight("out_proj", "D (h j v)"), y, axes),
        ]
        rowwise = [Rowwise("conv_silu", "b t c", ACTIVATION, axes)] if self.conv_kernel else []
        rowwise += [
            Rowwise("q_norm", "b t h k", L2_NORM, axes),
            Rowwise("k_norm", "b t h k", L2_NORM, axes),
            Rowwise("q_scale", "b t h k", 1, axes),
            Rowwise("decay_gate", "b t h j", SOFTPLUS_DECAY, axes),
            Rowwise("beta", "b t h j", 1, axes),
            *core.rowwise,
            Rowwise("norm", "b t h j v", RMS_NORM, axes),
        ]
        if self.gate:
            rowwise.append(Rowwise("gate", "b t h j v", GATED_ACTIVATION, axes))
        return Ops(tuple(products), tuple(rowwise))

    def heads(self, form: str) -> HeadShape:  # noqa: ARG002
        """H q/k heads of width K, no cached keys, values of width V."""
        return HeadShape(self.num_heads, None, self.head_k_dim, self.head_v_dim)

    def query_heads(self) -> int:
        """H."""
        return self.num_heads

    def shard(self, tp: int) -> "GDN":
        """H / tp and HV / tp heads with their state, channels and rows of every projection; the norm replicated."""
        check_tp(tp, self.num_heads)
        return replace(self, num_heads=self.num_heads // tp, num_v_heads=self.num_v_heads // tp)

    def with_kv_heads(self, kv_heads: int) -> Attention | None:  # noqa: ARG002
        """No keys or values are cached."""
        return None
