"""Mamba-2 (SSD): a state with one decay per head, read and written by keys that a group of heads shares.

One projection gives z (gate), x, B, C and dt; x, B and C pass a short convolution and SiLU. With dt =
softplus(dt + dt_bias) and A = -exp(A_log), the state of each head S [p, N] is

    S_t = exp(dt A) S_{t-1} + (dt x) B^T,  y = S_t C + D x,

output RMSNorm(y * SiLU(z)) with one mean for each group, then out_proj. Head i reads B and C of group
i // (heads / groups). Source: arXiv 2405.21060 sections 6 and 7; parameter names as in transformers 5.24
`models/mamba2` and `models/nemotron_h`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

from attncalc.attention.base import Attention, HeadShape, Step, check_form, check_tp, require
from attncalc.attention.conv import conv_axes, conv_cache, conv_product, conv_rowwise
from attncalc.axes import Dim, Weight
from attncalc.cache import CacheTensor
from attncalc.errors import AttncalcError
from attncalc.ops import (
    BIAS,
    GATED_ACTIVATION,
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

SOFTPLUS = 4  # dt_bias, exponential, addition, logarithm
SKIP = 2  # product with D, addition


@dataclass(frozen=True)
class Mamba2:
    """Dimensions and options.

    num_heads of width head_dim p make the inner width; n_groups of keys B and C of width state_size N; W =
    conv_kernel. `bias`: on in_proj and out_proj. `chunk_size`: C of the chunked form.
    `gated_norm`: an RMSNorm over each group after the gate (Falcon-H1 has the gate alone).
    """

    hidden_size: int
    num_heads: int
    head_dim: int
    n_groups: int
    state_size: int
    conv_kernel: int = 4
    conv_bias: bool = True
    bias: bool = False
    chunk_size: int = 256
    gated_norm: bool = True

    forms: ClassVar[tuple[str, ...]] = ("recurrent", "chunked")
    source: ClassVar[str] = "arXiv 2405.21060 sections 6 and 7"

    def __post_init__(self) -> None:
        require(self, "hidden_size", "num_heads", "head_dim", "n_groups", "state_size", "conv_kernel", "chunk_size")
        if self.num_heads % self.n_groups:
            raise AttncalcError("n_groups", f"must divide num_heads {self.num_heads}", got=self.n_groups)

    @property
    def variant(self) -> str:
        """The id in the registry."""
        return "mamba2"

    def default_form(self, workload: Workload) -> str:
        """Recurrent for one new token, chunked for more."""
        return "recurrent" if workload.new_tokens == 1 else "chunked"

    @property
    def inner_size(self) -> int:
        """Width of x, z and y: heads * p."""
        return self.num_heads * self.head_dim

    @property
    def conv_channels(self) -> int:
        """x, B and C: heads * p + 2 * groups * N."""
        return self.inner_size + 2 * self.n_groups * self.state_size

    @property
    def _axes(self) -> dict[str, Dim]:
        n, G = self.num_heads, self.n_groups
        keys = "num_heads * head_dim + 2 * n_groups * state_size"
        channels = Dim(self.conv_channels, keys)
        return {
            "D": Dim(self.hidden_size, "hidden_size"),
            "n": Dim(n, "num_heads"),
            "g": Dim(G, "n_groups"),
            "j": Dim(n // G, "num_heads / n_groups"),
            "p": Dim(self.head_dim, "head_dim"),
            "k": Dim(self.state_size, "state_size"),
            "m": Dim(self.inner_size + self.conv_channels + n, f"num_heads * head_dim + {keys} + num_heads"),
            "one": Dim(1, "1"),
        } | conv_axes(channels, self.conv_kernel)

    def weights(self, form: str) -> tuple[Weight, ...]:  # noqa: ARG002
        """D*(2*n*p + 2*G*N + n) + (W + 1)*(n*p + 2*G*N) + 3*n + n*p + n*p*D. Linear weights are [out, in]."""
        shapes = {"in_proj.weight": "m D"}
        if self.bias:
            shapes["in_proj.bias"] = "m"
        shapes["conv1d.weight"] = "c one w"
        if self.conv_bias:
            shapes["conv1d.bias"] = "c"
        shapes |= {"dt_bias": "n", "A_log": "n", "D": "n"}
        if self.gated_norm:
            shapes["norm.weight"] = "(n p)"
        shapes["out_proj.weight"] = "D (n p)"
        if self.bias:
            shapes["out_proj.bias"] = "D"
        axes = self._axes
        return tuple(Weight(name, shape, axes) for name, shape in shapes.items())

    def cache(self, reach: Reach, form: str) -> tuple[CacheTensor, ...]:  # noqa: ARG002
        """Constant: conv_state [B, 1, W - 1, channels], recurrent_state [B, n, p, N]."""
        axes = self._axes
        state = CacheTensor("recurrent_state", "state", axes["n"], axes["k"], None, self.head_dim)
        return (*conv_cache(axes), state)

    def ops(self, step: Step, form: str, *, cached: str) -> Ops:  # noqa: ARG002
        """Projections, a depthwise convolution 2*B*T*W*channels, and the core.

        Recurrent core: `state_update`, 4*B*T*n*p*N: x B^T and S C.
        Chunked core, as kernels compute it (`dense`, T padded to C): for each token 2*C*N for a group (C B^T is
        computed once for its heads), 2*C*p and 4*p*N for a head; the last term is `state_update`. `causal` counts
        C*(C+1)/2 pairs of the C x C products, the last chunk being as long as it is. Chunks begin at the step's first
        new token. The state is read and written once in a step, and so are the columns of the convolution.
        """
        check_form(self, form)
        axes = self._axes | step.axes
        core = self._chunked(step, axes) if form == "chunked" else self._recurrent(axes)
        x, projected = activation("x", "b t D"), activation("projected", "b t m")
        y, out = Term("b t g j p", (activation("attn", "b t n p"),)), activation("y", "b t D")
        products = (
            product("in_proj", x, weight("in_proj", "m D"), projected, axes),
            conv_product(axes),
            *core.contractions,
            product("out_proj", y, Term("D g j p", (weight("out_proj", "D (n p)"),)), out, axes),
        )
        rowwise = [
            *conv_rowwise(axes, bias=self.conv_bias),
            Rowwise("dt", "b t n", SOFTPLUS, axes),
            Rowwise("dt_x", "b t n p", 1, axes),
            *core.rowwise,
            Rowwise("skip", "b t n p", SKIP, axes),
            Rowwise("gate", "b t n p", GATED_ACTIVATION, axes),  # SiLU of z, product with y
        ]
        if self.gated_norm:
            rowwise.append(Rowwise("norm", "b t n p", RMS_NORM, axes))
        if self.bias:
            rowwise += [Rowwise("in_proj_bias", "b t m", BIAS, axes), Rowwise("out_proj_bias", "b t D", BIAS, axes)]
        return Ops(products, tuple(rowwise))

    def _recurrent(self, axes: dict[str, Dim]) -> Ops:
        x = Term("b t g j p", (activation("x", "b t n p"), activation("dt", "b t n")))
        kept = on_chip("recurrent_state", "b n p k")
        state, new_state = self._state()
        y = Term("b t g j p", (activation("o", "b t n p"),))
        products = (
            product("state_update", x, activation("B", "b t g k"), Term("b g j p k", (state, new_state)), axes),
            product("state_update", activation("C", "b t g k"), Term("b g j p k", (kept,)), y, axes),
        )
        rowwise = (
            Rowwise("decay_exp", "b t n", 2, axes),  # product with A, exponential
            Rowwise("state_decay", "b t n p k", 1, axes),
        )
        return Ops(products, rowwise)

    @staticmethod
    def _state() -> tuple[Part, Part]:
        shape = "b n p k"
        return Part("recurrent_state", shape, "cache", "state"), Part("recurrent_state", shape, "cache_write", "state")

    def _chunked(self, step: Step, axes: dict[str, Dim]) -> Ops:
        T, C, dense = step.workload.new_tokens, self.chunk_size, step.count == "dense"
        chunks, rest = -(-T // C), T % C
        # i: the new tokens as they are stored; t: as they are computed.
        computed = Dim(chunks * C, "new_tokens padded to chunk_size") if dense else axes["t"]
        axes = axes | {"i": axes["t"], "t": computed, "s": Dim(C, "chunk_size"), "z": Dim(chunks, "chunks")}
        half: Callable[[int], int] = lambda n: n * (n + 1) // 2  # noqa: E731
        formula = f"T div C * f(C) + f(T mod C), f(n) = n * (n + 1) / 2, C = {C}"
        pairs = (T // C * half(C) + half(rest), formula)
        if dense:
            pairs = chunks * C * C, f"ceil(T / C) * C * C, C = {C}"

        def intra(name: str, left: Term, right: Term, out: Term) -> Contraction:
            if dense:
                return product(name, left, right, out, axes)
            return Contraction(name, left, right, out, axes, *pairs)

        queries, keys = (Term(f"b g {a} k", (activation(n, "b i g k"),)) for n, a in (("C", "t"), ("B", "s")))
        x = Term("b g j s p", (activation("x", "b i n p"), activation("dt", "b i n")))
        y = Term("b g j t p", (activation("o", "b i n p"),))
        group_scores = Term("b g t s", (on_chip("scores", "b g t s"),))
        scores = Term("b g j t s", (on_chip("scores", "b n t s"),))
        state, new_state = (Term("b g j p k", (part,)) for part in self._state())
        read, kept_x = (Term("b g j t p", (on_chip(n, "b i n p"),)) for n in ("read", "x"))
        kept_c, kept_b = (Term("b g t k", (on_chip(n, "b i g k"),)) for n in ("C", "B"))
        products = (
            intra("chunk_qk", queries, keys, group_scores),
            intra("chunk_value", scores, x, y),
            product("state_update", kept_c, state, read, axes),
            product("state_update", kept_x, kept_b, new_state, axes),
        )
        rowwise = (
            # Product with A and cumulative sum, its exponential, and for the state's x a difference and another.
            Rowwise("decay_rows", "b t n", 5, axes),
            Rowwise("decay_pairs", "b n", 3, axes, *pairs),  # difference, exponential, product with C B^T
            Rowwise("decay_values", "b t n p", 2, axes),  # of what the state gives and of x that it takes
            Rowwise("output_sum", "b t n p", 1, axes),
            Rowwise("state_decay_exp", "b z n", 1, axes),
            Rowwise("state_decay", "b z n p k", 2, axes),  # decay, and the sum with the chunk's product
        )
        return Ops(products, rowwise)

    def heads(self, form: str) -> HeadShape:  # noqa: ARG002
        """Heads with keys of width N and values of width p; none are cached."""
        return HeadShape(self.num_heads, None, self.state_size, self.head_dim)

    def query_heads(self) -> int:
        """num_heads."""
        return self.num_heads

    def shard(self, tp: int) -> "Mamba2":
        """Heads / tp and groups / tp; where tp exceeds the groups, they are repeated so that every GPU has one."""
        check_tp(tp, self.num_heads)
        if self.n_groups % tp and tp % self.n_groups:
            rule = f"must divide the {self.n_groups} groups or be a multiple of them"
            raise AttncalcError("--tp", rule, got=tp)
        return replace(self, num_heads=self.num_heads // tp, n_groups=max(1, self.n_groups // tp))

    def with_kv_heads(self, kv_heads: int) -> Attention | None:  # noqa: ARG002
        """No keys or values are cached."""
        return None
