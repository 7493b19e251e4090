"""Kimi Delta Attention: a delta rule whose state decays per key channel, with grouped value heads (GVA).

S [K, V] per value head, from q, k [K] (short convolution, SiLU, L2 norm; q scaled by K^-1/2), v [V] (convolution,
SiLU), log-decay g [K] and beta = sigmoid(x W_b):

    S_t = (I - beta k k^T) Diag(exp g) S_{t-1} + beta k v^T,  o = S_t^T q,

output RMSNorm(o) * sigmoid(gate), then o_proj. Written as products: S <- Diag(exp g) S; u = beta (v - S^T k);
S <- S + k u^T; o = S^T q. Value head i reads q/k head i // (HV / H). Source: Kimi Linear (arXiv 2510.26692)
sections 3 and 4; parameter names as in moonshotai/Kimi-Linear-48B-A3B.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from attncalc.attention.base import Attention, HeadShape, Step, check_form, check_tp, require
from attncalc.axes import Dim, Weight
from attncalc.cache import CacheTensor
from attncalc.errors import AttncalcError
from attncalc.ops import (
    ACTIVATION,
    BIAS,
    GATE,
    RMS_NORM,
    Contraction,
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

L2_NORM = 3  # square, sum, scale
SOFTPLUS_DECAY = 5  # dt_bias, exponential, addition, logarithm, product with -exp(A_log)
BOUNDED_DECAY = 4  # dt_bias, product with exp(A_log), sigmoid, product with the bound


@dataclass(frozen=True)
class KDA:
    """Dimensions and options.

    H = num_heads q/k heads, HV = num_v_heads value heads, K = head_k_dim, V = head_v_dim, W = conv_kernel; W = 0: no
    short convolution, W = 1: one that keeps no column. `decay`: f = x W_a W_b of rank decay_rank (`low_rank`) or one
    matrix (`full`); g = -exp(A_log) softplus(f + dt_bias), or with `lower_bound` (Kimi K3) g = bound *
    sigmoid(exp(A_log) (f + dt_bias)), which changes elementwise FLOPs only. `gate`: the output gate, alike; its
    `gate_bias` stands on the last matrix (flash-linear-attention has it, Kimi has not). Ranks are null where unused.
    `chunk_size`: C of the chunked form.
    """

    hidden_size: int
    num_heads: int
    num_v_heads: int
    head_k_dim: int
    head_v_dim: int
    conv_kernel: int = 4
    decay: Literal["low_rank", "full"] = "full"
    decay_rank: int | None = None
    gate: Literal["none", "low_rank", "full"] = "none"
    gate_rank: int | None = None
    gate_bias: bool = False
    lower_bound: bool = False
    chunk_size: int = 64

    forms: ClassVar[tuple[str, ...]] = ("recurrent", "chunked")
    source: ClassVar[str] = "arXiv 2510.26692 sections 3 and 4"

    def __post_init__(self) -> None:
        require(self, "hidden_size", "num_heads", "num_v_heads", "head_k_dim", "head_v_dim", "chunk_size")
        require(self, "conv_kernel", minimum=0)
        if self.num_v_heads % self.num_heads:
            rule = f"must be a multiple of num_heads {self.num_heads}"
            raise AttncalcError("num_v_heads", rule, got=self.num_v_heads)
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
            "r": Dim(self.decay_rank or 0, "decay_rank"),
            "e": Dim(self.gate_rank or 0, "gate_rank"),
            "one": Dim(1, "1"),
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

    def cache(self, reach: Reach, form: str) -> tuple[CacheTensor, ...]:  # noqa: ARG002
        """Constant: conv_state [B, 1, W - 1, 2*H*K + HV*V] and recurrent_state [B, HV, K, V]."""
        axes, K = self._axes, self.head_k_dim
        state = CacheTensor("recurrent_state", "state", axes["n"], axes["v"], None, K)
        if self.conv_kernel < 2:
            return (state,)
        return (CacheTensor("conv_state", "conv", Dim(1, ""), axes["c"], None, self.conv_kernel - 1), state)

    def ops(self, step: Step, form: str, *, cached: str) -> Ops:  # noqa: ARG002
        """Projections, a depthwise convolution 2*B*T*W*channels, and the core.

        Recurrent core: `state_update`, 6*B*T*HV*K*V: S^T k, k u^T and S^T q.
        Chunked core, as kernels compute it (`dense`, T padded to C): 6*C^2*K + 4*C^2*V + 6*C*K*V for each head and
        chunk; the last term is `state_update`. `causal` counts of C x C products what is not zero: C*(C-1)/2 pairs
        in k k^T, C*(C+1)/2 in the other lower triangles, the last chunk being as long as it is. The triangular
        inverse is elementwise. Kimi Linear's paper counts otherwise: 6*T*d^2 + 3*T*C*d + T*C^2.
        Chunks begin at the step's first new token. The state is read and written once in a step, and so are the
        columns of the convolution; what passes between the products of a core stays on chip.
        """
        check_form(self, form)
        axes = self._axes | step.axes
        core = self._chunked(step, axes) if form == "chunked" else self._recurrent(axes)
        x = activation("x", "b t D")
        products = [
            product("q_proj", x, weight("q_proj", "h k D"), activation("q", "b t h k"), axes),
            product("k_proj", x, weight("k_proj", "h k D"), activation("k", "b t h k"), axes),
            product("v_proj", x, weight("v_proj", "h j v D"), activation("v", "b t h j v"), axes),
            *self._conv(axes),
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

    def _conv(self, axes: dict[str, Dim]) -> tuple[Contraction, ...]:
        if not self.conv_kernel:
            return ()
        read, written = [activation("qkv", "b t c")], [activation("qkv", "b t c")]
        if self.conv_kernel > 1:
            read.append(Part("conv_state", "b u c", "cache", "conv"))
            written.append(Part("conv_state", "b u c", "cache_write", "conv"))
        taps = Part("conv1d", "c w", "weight", "vector")
        return (product("conv", Term("b t c w", tuple(read)), taps, Term("b t c", tuple(written)), axes),)

    def _recurrent(self, axes: dict[str, Dim]) -> Ops:
        q, k = activation("q", "b t h k"), activation("k", "b t h k")
        state, kept = Part("recurrent_state", "b h j k v", "cache", "state"), on_chip("recurrent_state", "b h j k v")
        # u = beta (v - S^T k); S^T k stays on chip.
        u = Term("b t h j v", (activation("v", "b t h j v"), activation("beta", "b t h j")))
        new_state = Part("recurrent_state", "b h j k v", "cache_write", "state")
        decay = activation("f", "b t h j k")
        products = (
            product("state_update", k, Term("b h j k v", (state, decay)), on_chip("predicted", "b t h j v"), axes),
            product("state_update", on_chip("k", "b t h k"), u, new_state, axes),
            product("state_update", q, kept, activation("o", "b t h j v"), axes),
        )
        rowwise = (
            Rowwise("decay_exp", "b t h j k", 1, axes),
            Rowwise("state_decay", "b t h j k v", 1, axes),
            Rowwise("delta", "b t h j v", 2, axes),  # v - S^T k, product with beta
        )
        return Ops(products, rowwise)

    def _chunked(self, step: Step, axes: dict[str, Dim]) -> Ops:
        T, C, dense = step.workload.new_tokens, self.chunk_size, step.count == "dense"
        chunks, rest = -(-T // C), T % C
        # i: the new tokens as they are stored; t: as they are computed.
        computed = Dim(chunks * C, "new_tokens padded to chunk_size") if dense else axes["t"]
        axes = axes | {"i": axes["t"], "t": computed, "s": Dim(C, "chunk_size"), "z": Dim(chunks, "chunks")}

        def over_chunks(of: Callable[[int], int], formula: str) -> tuple[int, str]:
            """The sum over all chunks, whole and last."""
            return T // C * of(C) + of(rest), f"T div C * f(C) + f(T mod C), f(n) = {formula}, C = {C}"

        square = chunks * C * C, f"ceil(T / C) * C * C, C = {C}"
        below = square if dense else over_chunks(lambda n: n * (n - 1) // 2, "n * (n - 1) / 2")
        inclusive = square if dense else over_chunks(lambda n: n * (n + 1) // 2, "n * (n + 1) / 2")
        triples = over_chunks(lambda n: n * (n - 1) * (n - 2) // 6, "n * (n - 1) * (n - 2) / 6")
        if dense:
            triples = chunks * C * (C - 1) * (C - 2) // 6, f"ceil(T / C) * C * (C - 1) * (C - 2) / 6, C = {C}"

        def intra(name: str, left: Term, right: Term, out: Term, pairs: tuple[int, str]) -> Contraction:
            if dense:
                return product(name, left, right, out, axes)
            return Contraction(name, left, right, out, axes, *pairs)

        q = Term("b h j t k", (activation("q", "b i h k"),))
        k = Term("b h j t k", (activation("k", "b i h k"), activation("f", "b i h j k")))
        v = Term("b h j s v", (activation("v", "b i h j v"), activation("beta", "b i h j")))
        o = Term("b h j t v", (activation("o", "b i h j v"),))
        keys, corrected = (Term(f"b h j s {a}", (on_chip(n, f"b i h j {a}"),)) for n, a in (("k", "k"), ("u", "v")))
        lower = Term("b h j t s", (on_chip("scores", "b h j t s"),))
        left, right = (Term(f"b h j t {a}", (on_chip(n, f"b i h j {a}"),)) for n, a in (("w", "k"), ("u", "v")))
        state = Part("recurrent_state", "b h j k v", "cache", "state")
        new_state = Part("recurrent_state", "b h j k v", "cache_write", "state")
        kept = on_chip("recurrent_state", "b h j k v")
        products = (
            intra("chunk_kk", k, keys, lower, below),
            intra("chunk_qk", q, keys, lower, inclusive),
            intra("chunk_w", lower, keys, left, inclusive),
            intra("chunk_u", lower, v, right, inclusive),
            product("state_update", left, state, right, axes),
            product("state_update", left, kept, right, axes),
            intra("chunk_value", lower, corrected, o, inclusive),
            product("state_update", left, right, new_state, axes),
        )
        rowwise = (
            # Cumulative sum, its exponential times q and k (3), and for the state's k a difference too (3).
            Rowwise("decay_rows", "b h j t k", 7, axes),
            # Difference, exponential and product that decay k for each query, as defined; kernels factor it.
            Rowwise("decay_pairs", "b h j k", 3, axes, *inclusive),
            Rowwise("beta_pairs", "b h j", 1, axes, *below),
            Rowwise("beta_rows", "b h j t k", 1, axes),
            Rowwise("beta_values", "b h j t v", 1, axes),
            # Row by row: x_ci = -(a_ci + sum of a_cm x_mi over i < m < c).
            Rowwise("triangular_inverse", "b h j", 2, axes, *triples),
            Rowwise("delta", "b h j t v", 2, axes),  # u - w S, and the sum of the two outputs
            Rowwise("state_decay_exp", "b z h j k", 1, axes),
            Rowwise("state_decay", "b z h j k v", 2, axes),  # decay, and the sum with the chunk's product
        )
        return Ops(products, rowwise)

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

    def heads(self, form: str) -> HeadShape:  # noqa: ARG002
        """H q/k heads of width K, no cached keys, values of width V."""
        return HeadShape(self.num_heads, None, self.head_k_dim, self.head_v_dim)

    def query_heads(self) -> int:
        """H."""
        return self.num_heads

    def shard(self, tp: int) -> "KDA":
        """H / tp and HV / tp heads with their state and channels; the first matrices of decay and gate replicated."""
        check_tp(tp, self.num_heads)
        return replace(self, num_heads=self.num_heads // tp, num_v_heads=self.num_v_heads // tp)

    def with_kv_heads(self, kv_heads: int) -> Attention | None:  # noqa: ARG002
        """No keys or values are cached."""
        return None
