"""What variants with a recurrent state share: short convolution, chunks, the delta rule, and retention.

Axes: b batch, t new tokens, h q/k heads, j value heads for each of them, k and v head widths, c channels of the
convolution. The state is read and written once in a step, and so are the columns of the convolution; what passes
between the products of a core stays on chip. Chunks begin at the step's first new token.

`causal` counts of C x C products what is not zero: C*(C-1)/2 pairs in k k^T of a delta rule, C*(C+1)/2 in the other
lower triangles, the last chunk being as long as it is. `dense` counts them as kernels compute them, whole squares of
T padded to C. A triangular inverse is elementwise.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple, Self

from attncalc.attention.base import Attention, HeadShape, Step, check_tp, require
from attncalc.axes import Dim
from attncalc.cache import CacheTensor
from attncalc.errors import AttncalcError
from attncalc.ops import Contraction, Ops, Part, Rowwise, Term, activation, on_chip, product
from attncalc.reach import Reach
from attncalc.workload import Workload

L2_NORM = 3  # square, sum, scale
SOFTPLUS_DECAY = 5  # dt_bias, exponential, addition, logarithm, product with -exp(A_log)


def convolution(axes: dict[str, Dim], kernel: int) -> tuple[Contraction, ...]:
    """The causal depthwise convolution of q, k and v, 2*B*T*W*channels; axes c, w = W and u = W - 1."""
    if not kernel:
        return ()
    read, written = [activation("qkv", "b t c")], [activation("qkv", "b t c")]
    if kernel > 1:
        read.append(Part("conv_state", "b u c", "cache", "conv"))
        written.append(Part("conv_state", "b u c", "cache_write", "conv"))
    taps = Part("conv1d", "c w", "weight", "vector")
    return (product("conv", Term("b t c w", tuple(read)), taps, Term("b t c", tuple(written)), axes),)


def kept(axes: dict[str, Dim], heads: str, kernel: int = 0) -> tuple[CacheTensor, ...]:
    """Constants: conv_state [B, 1, W - 1, channels] where W > 1, and recurrent_state [B, `heads`, K, V]."""
    state = CacheTensor("recurrent_state", "state", axes[heads], axes["v"], None, axes["k"].size)
    if kernel < 2:
        return (state,)
    return (CacheTensor("conv_state", "conv", Dim(1, ""), axes["c"], None, kernel - 1), state)


class Chunks(NamedTuple):
    """A step in chunks of C tokens: axes i (new tokens as stored), t (as computed), s (C) and z (chunks); and pairs.

    `below` and `inclusive`: pairs under a chunk's diagonal without and with it; `triples`: i < m < c.
    """

    axes: dict[str, Dim]
    dense: bool
    below: tuple[int, str]
    inclusive: tuple[int, str]
    triples: tuple[int, str]

    def product(self, name: str, left: Term, right: Term, out: Term, pairs: tuple[int, str]) -> Contraction:
        """A product inside each chunk, of which `pairs` count; dense, all that is computed."""
        if self.dense:
            return product(name, left, right, out, self.axes)
        return Contraction(name, left, right, out, self.axes, *pairs)


def chunks(step: Step, axes: dict[str, Dim], size: int) -> Chunks:
    """The chunks of a step."""
    T, C, dense = step.workload.new_tokens, size, step.count == "dense"
    number, rest = -(-T // C), T % C
    computed = Dim(number * C, "new_tokens padded to chunk_size") if dense else axes["t"]
    axes = axes | {"i": axes["t"], "t": computed, "s": Dim(C, "chunk_size"), "z": Dim(number, "chunks")}

    def over_chunks(of: Callable[[int], int], formula: str) -> tuple[int, str]:
        """The sum over all chunks, whole and last."""
        return T // C * of(C) + of(rest), f"T div C * f(C) + f(T mod C), f(n) = {formula}, C = {C}"

    if dense:
        square = number * C * C, f"ceil(T / C) * C * C, C = {C}"
        triples = number * C * (C - 1) * (C - 2) // 6, f"ceil(T / C) * C * (C - 1) * (C - 2) / 6, C = {C}"
        return Chunks(axes, dense, square, square, triples)
    return Chunks(
        axes,
        dense,
        below=over_chunks(lambda n: n * (n - 1) // 2, "n * (n - 1) / 2"),
        inclusive=over_chunks(lambda n: n * (n + 1) // 2, "n * (n + 1) / 2"),
        triples=over_chunks(lambda n: n * (n - 1) * (n - 2) // 6, "n * (n - 1) * (n - 2) / 6"),
    )


def delta_recurrent(axes: dict[str, Dim], decay: Part) -> Ops:
    """The delta rule token by token: `state_update`, 6*B*T*HV*K*V, S^T k, k u^T and S^T q.

    `decay`: what the log-decay comes from, one value for each head (`b t h j`) or key channel (`b t h j k`).
    """
    q, k = activation("q", "b t h k"), activation("k", "b t h k")
    state, again = Part("recurrent_state", "b h j k v", "cache", "state"), on_chip("recurrent_state", "b h j k v")
    # u = beta (v - S^T k); S^T k stays on chip.
    u = Term("b t h j v", (activation("v", "b t h j v"), activation("beta", "b t h j")))
    new_state = Part("recurrent_state", "b h j k v", "cache_write", "state")
    products = (
        product("state_update", k, Term("b h j k v", (state, decay)), on_chip("predicted", "b t h j v"), axes),
        product("state_update", on_chip("k", "b t h k"), u, new_state, axes),
        product("state_update", q, again, activation("o", "b t h j v"), axes),
    )
    rowwise = (
        Rowwise("decay_exp", decay.shape, 1, axes),
        Rowwise("state_decay", "b t h j k v", 1, axes),
        Rowwise("delta", "b t h j v", 2, axes),  # v - S^T k, product with beta
    )
    return Ops(products, rowwise)


def delta_chunked(step: Step, axes: dict[str, Dim], size: int, decay: Part) -> Ops:
    """The delta rule in chunks of C tokens; arguments as of `delta_recurrent`.

    Dense: 6*C^2*K + 4*C^2*V + 6*C*K*V for each value head and chunk; the last term is `state_update`. Kernels form
    k k^T for each value head even where its q/k head is shared.
    """
    made = chunks(step, axes, size)
    axes, below, inclusive = made.axes, made.below, made.inclusive
    stored = decay._replace(shape=decay.shape.replace("t", "i"))
    q = Term("b h j t k", (activation("q", "b i h k"),))
    k = Term("b h j t k", (activation("k", "b i h k"), stored))
    v = Term("b h j s v", (activation("v", "b i h j v"), activation("beta", "b i h j")))
    o = Term("b h j t v", (activation("o", "b i h j v"),))
    keys, corrected = (Term(f"b h j s {a}", (on_chip(n, f"b i h j {a}"),)) for n, a in (("k", "k"), ("u", "v")))
    lower = Term("b h j t s", (on_chip("scores", "b h j t s"),))
    left, right = (Term(f"b h j t {a}", (on_chip(n, f"b i h j {a}"),)) for n, a in (("w", "k"), ("u", "v")))
    state = Part("recurrent_state", "b h j k v", "cache", "state")
    new_state = Part("recurrent_state", "b h j k v", "cache_write", "state")
    again = on_chip("recurrent_state", "b h j k v")
    products = (
        made.product("chunk_kk", k, keys, lower, below),
        made.product("chunk_qk", q, keys, lower, inclusive),
        made.product("chunk_w", lower, keys, left, inclusive),
        made.product("chunk_u", lower, v, right, inclusive),
        product("state_update", left, state, right, axes),
        product("state_update", left, again, right, axes),
        made.product("chunk_value", lower, corrected, o, inclusive),
        product("state_update", left, right, new_state, axes),
    )
    if decay.shape.endswith("k"):
        decays: tuple[Rowwise, ...] = (
            # Cumulative sum, its exponential times q and k (3), and for the state's k a difference too (3).
            Rowwise("decay_rows", "b h j t k", 7, axes),
            # Difference, exponential and product that decay k for each query, as defined; kernels factor it.
            Rowwise("decay_pairs", "b h j k", 3, axes, *inclusive),
            Rowwise("state_decay_exp", "b z h j k", 1, axes),
        )
    else:
        decays = (
            # Cumulative sum and its exponential, and for the state's k the difference and its exponential.
            Rowwise("decay_sums", "b h j t", 4, axes),
            Rowwise("decay_rows", "b h j t k", 3, axes),  # q, k and the state's k
            Rowwise("decay_pairs", "b h j", 3, axes, *inclusive),  # difference, exponential, product with q k^T
            Rowwise("decay_kk", "b h j", 1, axes, *below),
            Rowwise("state_decay_exp", "b z h j", 1, axes),
        )
    rowwise = (
        *decays,
        Rowwise("beta_pairs", "b h j", 1, axes, *below),
        Rowwise("beta_rows", "b h j t k", 1, axes),
        Rowwise("beta_values", "b h j t v", 1, axes),
        # Row by row: x_ci = -(a_ci + sum of a_cm x_mi over i < m < c).
        Rowwise("triangular_inverse", "b h j", 2, axes, *made.triples),
        Rowwise("delta", "b h j t v", 2, axes),  # u - w S, and the sum of the two outputs
        Rowwise("state_decay", "b z h j k v", 2, axes),  # decay, and the sum with the chunk's product
    )
    return Ops(products, rowwise)


def retention_recurrent(axes: dict[str, Dim]) -> Ops:
    """S_t = a S_{t-1} + k v^T, o = S_t^T q with a fixed decay for each head: `state_update`, 4*B*T*H*K*V."""
    state = Part("recurrent_state", "b h k v", "cache", "state")
    new_state = Part("recurrent_state", "b h k v", "cache_write", "state")
    written = Term("b h k v", (state, new_state))
    products = (
        product("state_update", activation("k", "b t h k"), activation("v", "b t h v"), written, axes),
        product(
            "state_update",
            activation("q", "b t h k"),
            on_chip("recurrent_state", "b h k v"),
            activation("o", "b t h v"),
            axes,
        ),
    )
    return Ops(products, (Rowwise("state_decay", "b t h k v", 1, axes),))


def retention_chunked(step: Step, axes: dict[str, Dim], size: int) -> Ops:
    """The same in chunks of C tokens; dense: 2*C^2*(K + V) + 4*C*K*V for each head and chunk.

    The powers of a fixed decay are constants of the layer and cost nothing.
    """
    made = chunks(step, axes, size)
    axes = made.axes
    q, k = (Term(f"b h {t} k", (activation(n, "b i h k"),)) for n, t in (("q", "t"), ("k", "s")))
    v, o = (Term(f"b h {t} v", (activation(n, "b i h v"),)) for n, t in (("v", "s"), ("o", "t")))
    lower = Term("b h t s", (on_chip("scores", "b h t s"),))
    rows, values = (Term(f"b h t {a}", (on_chip(n, f"b i h {a}"),)) for n, a in (("k", "k"), ("v", "v")))
    state = Part("recurrent_state", "b h k v", "cache", "state")
    new_state = Part("recurrent_state", "b h k v", "cache_write", "state")
    products = (
        made.product("chunk_qk", q, k, lower, made.inclusive),
        product("state_update", rows, state, values, axes),
        made.product("chunk_value", lower, v, o, made.inclusive),
        product("state_update", rows, values, new_state, axes),
    )
    rowwise = (
        Rowwise("decay_rows", "b h t k", 2, axes),  # q and the state's k
        Rowwise("decay_pairs", "b h", 1, axes, *made.inclusive),
        Rowwise("output_sum", "b h t v", 1, axes),
        Rowwise("state_decay", "b z h k v", 2, axes),  # decay, and the sum with the chunk's product
    )
    return Ops(products, rowwise)


@dataclass(frozen=True)
class DeltaRule:
    """What delta rules with grouped value heads (GVA) share: dimensions, state, convolution and shards.

    H = num_heads q/k heads, HV = num_v_heads value heads, K = head_k_dim, V = head_v_dim, W = conv_kernel. A variant
    adds `chunk_size` C after its own options, weights and operations.
    """

    hidden_size: int
    num_heads: int
    num_v_heads: int
    head_k_dim: int
    head_v_dim: int
    conv_kernel: int

    forms: ClassVar[tuple[str, ...]] = ("recurrent", "chunked")

    def __post_init__(self) -> None:
        require(self, "hidden_size", "num_heads", "num_v_heads", "head_k_dim", "head_v_dim", "chunk_size")
        require(self, "conv_kernel", minimum=0)
        if self.num_v_heads % self.num_heads:
            rule = f"must be a multiple of num_heads {self.num_heads}"
            raise AttncalcError("num_v_heads", rule, got=self.num_v_heads)

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

    def cache(self, reach: Reach, form: str) -> tuple[CacheTensor, ...]:  # noqa: ARG002
        """Constant: conv_state [B, 1, W - 1, 2*H*K + HV*V] and recurrent_state [B, HV, K, V]."""
        return kept(self._axes, "n", self.conv_kernel)

    def heads(self, form: str) -> HeadShape:  # noqa: ARG002
        """H q/k heads of width K, no cached keys, values of width V."""
        return HeadShape(self.num_heads, None, self.head_k_dim, self.head_v_dim)

    def query_heads(self) -> int:
        """H."""
        return self.num_heads

    def shard(self, tp: int) -> Self:
        """H / tp and HV / tp heads with their state, channels and rows of projections; what has no heads replicated."""
        check_tp(tp, self.num_heads)
        return replace(self, num_heads=self.num_heads // tp, num_v_heads=self.num_v_heads // tp)

    def with_kv_heads(self, kv_heads: int) -> Attention | None:  # noqa: ARG002
        """No keys or values are cached."""
        return None
