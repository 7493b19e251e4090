"""Kimi Delta Attention: a delta rule whose state decays per key channel, with grouped value heads (GVA).

S [K, V] per value head, from q, k [K] (short convolution, SiLU, L2 norm; q scaled by K^-1/2), v [V] (convolution,
SiLU), log-decay g [K] and beta = sigmoid(x W_b):

    S_t = (I - beta k k^T) Diag(exp g) S_{t-1} + beta k v^T,  o = S_t^T q,

output RMSNorm(o) * sigmoid(gate), then o_proj. Written as products: S <- Diag(exp g) S; u = beta (v - S^T k);
S <- S + k u^T; o = S^T q. Value head i reads q/k head i // (HV / H). Source: Kimi Linear (arXiv 2510.26692)
sections 3 and 4; parameter names as in moonshotai/Kimi-Linear-48B-A3B.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from attncalc.attention.base import CoreCount, Step, check_form, require
from attncalc.attention.state import (
    L2_NORM,
    SOFTPLUS_DECAY,
    DeltaRule,
    chunks,
    convolution,
    delta_chunked,
    delta_recurrent,
)
from attncalc.axes import Dim, Weight
from attncalc.errors import AttncalcError
from attncalc.ops import ACTIVATION, BIAS, GATE, RMS_NORM, Ops, Rowwise, activation, product, weight
from attncalc.workload import Workload

BOUNDED_DECAY = 4  # dt_bias, product with exp(A_log), sigmoid, product with the bound


@dataclass(frozen=True)
class KDA(DeltaRule):
    """Dimensions and options.

    H = num_heads q/k heads, HV = num_v_heads value heads, K = head_k_dim, V = head_v_dim, W = conv_kernel; W = 0: no
    short convolution, W = 1: one that keeps no column. `decay`: f = x W_a W_b of rank decay_rank (`low_rank`) or one
    matrix (`full`); g = -exp(A_log) softplus(f + dt_bias), or with `lower_bound` (Kimi K3) g = bound *
    sigmoid(exp(A_log) (f + dt_bias)), which changes elementwise FLOPs only. `gate`: the output gate, alike; its
    `gate_bias` stands on the last matrix (flash-linear-attention has it, Kimi has not). Ranks are null where unused.
    `chunk_size`: C of the chunked form.
    """

    conv_kernel: int = 4
    decay: Literal["low_rank", "full"] = "full"
    decay_rank: int | None = None
    gate: Literal["none", "low_rank", "full"] = "none"
    gate_rank: int | None = None
    gate_bias: bool = False
    lower_bound: bool = False
    chunk_size: int = 64

    source: ClassVar[str] = "arXiv 2510.26692 sections 3 and 4"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, kind, rank in (("decay", self.decay, self.decay_rank), ("gate", self.gate, self.gate_rank)):
            if kind == "low_rank":
                require(self, f"{name}_rank")
            elif rank is not None:
                raise AttncalcError(f"{name}_rank", f"must be null where {name} is {kind}", got=rank)
        if self.gate_bias and self.gate == "none":
            raise AttncalcError("gate_bias", "must be false where there is no gate")

    @property
    def variant(self) -> str:
        """The id in the registry."""
        return "kda"

    @property
    def _axes(self) -> dict[str, Dim]:
        return super()._axes | {
            "r": Dim(self.decay_rank or 0, "decay_rank"),
            "e": Dim(self.gate_rank or 0, "gate_rank"),
        }

    def weights(self, form: str) -> tuple[Weight, ...]:  # noqa: ARG002
        """2*D*H*K + 2*D*HV*V + D*HV, W*(2*H*K + HV*V), decay, gate, HV + HV*K + V. Linear weights are [out, in].

        Decay: D*r + r*HV*K, or D*HV*K; output gate: D*e + e*HV*V, or D*HV*V.
        """
        shapes = {"q_proj.weight": "(h k) D", "k_proj.weight": "(h k) D", "v_proj.weight": "(n v) D"}
        if self.conv_kernel:
            shapes |= {
                "q_conv1d.weight": "(h k) one w",
                "k_conv1d.weight": "(h k) one w",
                "v_conv1d.weight": "(n v) one w",
            }
        if self.decay == "low_rank":
            shapes |= {"f_a_proj.weight": "r D", "f_b_proj.weight": "(n k) r"}
        else:
            shapes["f_proj.weight"] = "(n k) D"
        shapes |= {"A_log": "n", "dt_bias": "(n k)", "b_proj.weight": "n D"}
        if self.gate == "low_rank":
            shapes |= {"g_a_proj.weight": "e D", "g_b_proj.weight": "(n v) e"}
        elif self.gate == "full":
            shapes["g_proj.weight"] = "(n v) D"
        if self.gate_bias:
            shapes["g_b_proj.bias" if self.gate == "low_rank" else "g_proj.bias"] = "(n v)"
        shapes |= {"o_norm.weight": "v", "o_proj.weight": "D (n v)"}
        axes = self._axes
        return tuple(Weight(name, shape, axes) for name, shape in shapes.items())

    def ops(self, step: Step, form: str, *, cached: str) -> Ops:  # noqa: ARG002
        """Projections, a depthwise convolution 2*B*T*W*channels, and the core.

        The core is `delta_recurrent` or `delta_chunked` of the module `state`; `core_counts` says how others count it.
        """
        check_form(self, form)
        axes = self._axes | step.axes
        decay = activation("f", "b t h j k")
        core = delta_chunked(step, axes, self.chunk_size, decay) if form == "chunked" else delta_recurrent(axes, decay)
        x = activation("x", "b t D")
        products = [
            product("q_proj", x, weight("q_proj", "h k D"), activation("q", "b t h k"), axes),
            product("k_proj", x, weight("k_proj", "h k D"), activation("k", "b t h k"), axes),
            product("v_proj", x, weight("v_proj", "h j v D"), activation("v", "b t h j v"), axes),
            *convolution(axes, self.conv_kernel),
        ]
        if self.decay == "low_rank":
            f_a = activation("f_a", "b t r")
            products.append(product("f_a_proj", x, weight("f_a_proj", "r D"), f_a, axes))
            up = weight("f_b_proj", "h j k r")
            products.append(product("f_b_proj", f_a, up, activation("f", "b t h j k"), axes))
        else:
            f = activation("f", "b t h j k")
            products.append(product("f_proj", x, weight("f_proj", "h j k D"), f, axes))
        products.append(product("b_proj", x, weight("b_proj", "h j D"), activation("beta", "b t h j"), axes))
        products += core.contractions
        gate = activation("gate", "b t h j v")
        if self.gate == "low_rank":
            g_a = activation("g_a", "b t e")
            products.append(product("g_a_proj", x, weight("g_a_proj", "e D"), g_a, axes))
            products.append(product("g_b_proj", g_a, weight("g_b_proj", "h j v e"), gate, axes))
        elif self.gate == "full":
            products.append(product("g_proj", x, weight("g_proj", "h j v D"), gate, axes))
        attn, y = activation("attn", "b t h j v"), activation("y", "b t D")
        products.append(product("o_proj", attn, weight("o_proj", "D (h j v)"), y, axes))
        return Ops(tuple(products), self._rowwise(axes, core.rowwise))

    def core_counts(self, workload: Workload) -> tuple[CoreCount, ...]:
        """The core by every convention: a prompt in chunks, of the new tokens or else of the context, and one token.

        Per value head, T tokens in chunks of C: Kimi Linear's paper 6*T*d^2 + 3*T*C*d + T*C^2 (K = V = d); FlashInfer
        6*T*K*V, decode 8*K*V; here dense 6*C^2*K + 4*C^2*V + 6*C*K*V for each chunk, causal without the zeros of
        its triangles, decode 6*K*V. Convolution, projections and elementwise work are in none of them.
        """
        B, HV, K, V, C = workload.batch, self.num_v_heads, self.head_k_dim, self.head_v_dim, self.chunk_size
        prompt = workload.new_tokens > 1
        T = workload.new_tokens if prompt else workload.context
        per_head = {"batch": B, "num_v_heads": HV}
        widths = {"head_k_dim": K, "head_v_dim": V}
        tokens = per_head | {"tokens": T}
        said = f"tokens = {'new_tokens' if prompt else 'context'}"
        lead, state = "batch * num_v_heads", "head_k_dim * head_v_dim"
        flashinfer, own = "FlashInfer, benchmark routines of KDA", f"attncalc, after {self.source}"
        steps = {count: Step(Workload(T, T, B), count=count) for count in ("dense", "causal")}
        dense, causal = (chunks(step, self._axes | step.axes, C) for step in steps.values())
        counted = {count: self._core_flops(step, "chunked") for count, step in steps.items()}
        out = []
        if K == V:
            paper = "6 * tokens * head_dim ** 2 + 3 * tokens * chunk_size * head_dim + tokens * chunk_size ** 2"
            flops = B * HV * (6 * T * K * K + 3 * T * C * K + T * C * C)
            values = tokens | {"head_dim": K, "chunk_size": C}
            source = "Kimi Linear (arXiv 2510.26692), FLOPs of KDA per head"
            out.append(CoreCount("core of a prompt, paper", f"{lead} * ({paper})", values, flops, said, source))
        formula = f"{lead} * tokens * 6 * {state}"
        out.append(
            CoreCount(
                "core of a prompt, FlashInfer", formula, tokens | widths, B * HV * T * 6 * K * V, said, flashinfer
            )
        )
        formula = (
            f"{lead} * chunks * (6 * chunk_size ** 2 * head_k_dim + 4 * chunk_size ** 2 * head_v_dim"
            f" + 6 * chunk_size * {state})"
        )
        values = per_head | {"chunks": dense.axes["z"].size, "chunk_size": C} | widths
        where = f"chunks = ceil(tokens / chunk_size); {said}"
        out.append(CoreCount("core of a prompt, dense", formula, values, counted["dense"], where, own))
        formula = (
            f"{lead} * (2 * below * head_k_dim + 4 * inclusive * (head_k_dim + head_v_dim) + 6 * tokens * {state})"
        )
        values = tokens | {"below": causal.below[0], "inclusive": causal.inclusive[0]} | widths
        where = (
            "below, inclusive: pairs of all chunks without and with their diagonals, T div C * f(C) + f(T mod C) with"
            f" f(n) = n * (n - 1) / 2 and n * (n + 1) / 2; C = {C}, T = {said}"
        )
        out.append(CoreCount("core of a prompt, causal", formula, values, counted["causal"], where, own))
        values = per_head | widths
        flops, where = B * HV * 8 * K * V, "one token; 2 of the 8 are the decay of the state"
        out.append(CoreCount("core of a token, FlashInfer", f"{lead} * 8 * {state}", values, flops, where, flashinfer))
        decode = self._core_flops(Step(Workload(T, 1, B)), "recurrent")
        where = "one token; the decay of the state is elementwise"
        out.append(CoreCount("core of a token", f"{lead} * 6 * {state}", values, decode, where, own))
        return tuple(out)

    def _core_flops(self, step: Step, form: str) -> int:
        names = {"state_update", "chunk_kk", "chunk_qk", "chunk_w", "chunk_u", "chunk_value"}
        return sum(op.flops for op in self.ops(step, form, cached=form).contractions if op.name in names)

    def _rowwise(self, axes: dict[str, Dim], core: tuple[Rowwise, ...]) -> tuple[Rowwise, ...]:
        out = [Rowwise("conv_silu", "b t c", ACTIVATION, axes)] if self.conv_kernel else []
        out += [
            Rowwise("q_norm", "b t h k", L2_NORM, axes),
            Rowwise("k_norm", "b t h k", L2_NORM, axes),
            Rowwise("q_scale", "b t h k", 1, axes),
            Rowwise("decay_gate", "b t h j k", BOUNDED_DECAY if self.lower_bound else SOFTPLUS_DECAY, axes),
            Rowwise("beta", "b t h j", 1, axes),
            *core,
            Rowwise("o_norm", "b t h j v", RMS_NORM, axes),
        ]
        if self.gate_bias:
            out.append(Rowwise("gate_bias", "b t h j v", BIAS, axes))
        if self.gate != "none":
            out.append(Rowwise("gate", "b t h j v", GATE, axes))
        return tuple(out)
