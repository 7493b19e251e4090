"""Gated DeltaNet: a delta rule whose state decays by one factor per value head, with grouped value heads (GVA).

S [K, V] per value head, from q, k [K] (short convolution, SiLU, L2 norm; q scaled by K^-1/2), v [V] (convolution,
SiLU), a scalar log-decay g = -exp(A_log) softplus(x W_a + dt_bias) and beta = sigmoid(x W_b):

    S_t = exp(g) (I - beta k k^T) S_{t-1} + beta k v^T,  o = S_t^T q,

output RMSNorm(o) * SiLU(z) with z = x W_z, then out_proj. Value head i reads q/k head i // (HV / H). Sources:
arXiv 2412.06464 sections 3 and 4; Qwen3-Next and Qwen3.5 in transformers 5.24. Parameter names are Qwen3.5's;
Qwen3-Next stores the same rows in two matrices, in_proj_qkvz and in_proj_ba, interleaved by q/k head.
"""

from dataclasses import dataclass
from typing import ClassVar

from attncalc.attention.base import Step, check_form
from attncalc.attention.state import L2_NORM, SOFTPLUS_DECAY, DeltaRule, convolution, delta_chunked, delta_recurrent
from attncalc.axes import Weight
from attncalc.ops import ACTIVATION, GATED_ACTIVATION, RMS_NORM, Ops, Rowwise, activation, product, weight


@dataclass(frozen=True)
class GDN(DeltaRule):
    """Dimensions and options.

    H = num_heads q/k heads, HV = num_v_heads value heads, K = head_k_dim, V = head_v_dim, W = conv_kernel; W = 0: no
    short convolution, W = 1: one that keeps no column. `gate`: the output gate z. `chunk_size`: C of the chunked form.
    """

    gate: bool = True
    chunk_size: int = 64

    source: ClassVar[str] = "arXiv 2412.06464 sections 3 and 4; transformers 5.24 models/qwen3_next, models/qwen3_5"

    @property
    def variant(self) -> str:
        """The id in the registry."""
        return "gdn"

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
