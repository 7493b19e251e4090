"""RWKV-7 (time mixing): a generalised delta rule whose removal key, rate and decay are free of each other.

Each input of a projection is x + (x_{t-1} - x) * mix. From r, k, v and rates w = -e^-1/2 sigmoid(.) (log-decay),
a = sigmoid(.), with kk = L2 norm of k * k_k in each head and k <- k (1 + (a - 1) k_a), the state S [K, V] of a head is

    S_t = Diag(exp w) S_{t-1} + (kk * a) (-kk^T S_{t-1}) + k v^T,  o = S_t^T r.

The prediction -kk^T S reads the state before its decay, unlike KDA's. Output: (group norm of o + (r . (r_k k)) v) *
gate, then o_proj. Every layer but the first mixes its v with the first layer's. Source: arXiv 2503.14456 section 4;
parameter names as in flash-linear-attention `layers/rwkv7.py`.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

from attncalc.attention.base import Attention, HeadShape, Step, check_form, check_tp, require
from attncalc.axes import Dim, Weight
from attncalc.cache import CacheTensor
from attncalc.ops import LAYER_NORM, Contraction, Ops, Part, Rowwise, Term, activation, on_chip, product, weight
from attncalc.reach import Reach
from attncalc.workload import Workload

L2_NORM = 3  # square, sum, scale
MIXED = ("r", "w", "k", "v", "a", "g")
"""Inputs that the token shift makes."""


@dataclass(frozen=True)
class RWKV7:
    """Dimensions: H = num_heads of widths K = head_k_dim and V = head_v_dim.

    Ranks of the low-rank projections: decay_rank (tanh between its matrices, bias on the last), a_rank (bias),
    v_rank (bias; null in the first layer, whose v the others mix in), gate_rank (sigmoid between, no bias). There is
    one form: a prefill runs the recurrence over all new tokens.
    """

    hidden_size: int
    num_heads: int
    head_k_dim: int
    head_v_dim: int
    decay_rank: int
    a_rank: int
    v_rank: int | None
    gate_rank: int

    forms: ClassVar[tuple[str, ...]] = ("recurrent",)
    source: ClassVar[str] = "arXiv 2503.14456 section 4"

    def __post_init__(self) -> None:
        require(self, "hidden_size", "num_heads", "head_k_dim", "head_v_dim", "decay_rank", "a_rank", "gate_rank")
        if self.v_rank is not None:
            require(self, "v_rank")

    @property
    def variant(self) -> str:
        """The id in the registry."""
        return "rwkv7"

    def default_form(self, workload: Workload) -> str:  # noqa: ARG002
        """There is one form."""
        return "recurrent"

    @property
    def _axes(self) -> dict[str, Dim]:
        return {
            "D": Dim(self.hidden_size, "hidden_size"),
            "h": Dim(self.num_heads, "num_heads"),
            "k": Dim(self.head_k_dim, "head_k_dim"),
            "v": Dim(self.head_v_dim, "head_v_dim"),
            "w": Dim(self.decay_rank, "decay_rank"),
            "a": Dim(self.a_rank, "a_rank"),
            "l": Dim(self.v_rank or 0, "v_rank"),
            "e": Dim(self.gate_rank, "gate_rank"),
            "one": Dim(1, "1"),
        }

    @property
    def _lora(self) -> dict[str, tuple[str, str]]:
        """Low-rank projections: the axis of the rank and that of the output."""
        out = {"w_lora": ("w", "k"), "a_lora": ("a", "k"), "v_lora": ("l", "v"), "g_lora": ("e", "v")}
        return {name: axes for name, axes in out.items() if name != "v_lora" or self.v_rank is not None}

    def weights(self, form: str) -> tuple[Weight, ...]:  # noqa: ARG002
        """2*D*H*K + 2*D*H*V, low ranks w and a r*(D + H*K) + H*K each, v r*(D + H*V) + H*V, gate r*(D + H*V).

        And the vectors: 6*D of the token shift, 3*H*K of k_k, k_a and r_k, 2*H*V of the group norm. Linear weights are
        [out, in].
        """
        shapes = {f"x_{name}": "one one D" for name in MIXED}
        shapes |= {"k_k": "(h k)", "k_a": "(h k)", "r_k": "h k"}
        shapes |= {"r_proj.weight": "(h k) D", "k_proj.weight": "(h k) D", "v_proj.weight": "(h v) D"}
        for name, (rank, width) in self._lora.items():
            shapes[f"{name}.lora.0.weight"] = f"{rank} D"
            shapes[f"{name}.lora.2.weight"] = f"(h {width}) {rank}"
            if name != "g_lora":
                shapes[f"{name}.lora.2.bias"] = f"(h {width})"
        shapes |= {"g_norm.weight": "(h v)", "g_norm.bias": "(h v)", "o_proj.weight": "D (h v)"}
        axes = self._axes
        return tuple(Weight(name, shape, axes) for name, shape in shapes.items())

    def cache(self, reach: Reach, form: str) -> tuple[CacheTensor, ...]:  # noqa: ARG002
        """Constant: shift_state [B, 1, 1, D], the last x, and recurrent_state [B, H, K, V]."""
        axes = self._axes
        return (
            CacheTensor("shift_state", "conv", Dim(1, ""), axes["D"], None, 1),
            CacheTensor("recurrent_state", "state", axes["h"], axes["v"], None, self.head_k_dim),
        )

    def ops(self, step: Step, form: str, *, cached: str) -> Ops:  # noqa: ARG002
        """Projections, `state_update` 8*B*T*H*K*V: kk^T S, its outer product, k v^T and S^T r; output.

        The state and the last x are read and written once in a step.
        """
        check_form(self, form)
        axes = self._axes | step.axes
        shifted = Term("b t D", (activation("x_r", "b t D"), Part("shift_state", "b one D", "cache", "conv")))
        r = Term("b t h k", (activation("r", "b t h k"), Part("shift_state", "b one D", "cache_write", "conv")))
        k, v = activation("k", "b t h k"), activation("v", "b t h v")
        products = [
            product("r_proj", shifted, weight("r_proj", "h k D"), r, axes),
            product("k_proj", activation("x_k", "b t D"), weight("k_proj", "h k D"), k, axes),
            product("v_proj", activation("x_v", "b t D"), weight("v_proj", "h v D"), v, axes),
        ]
        for name, (rank, width) in self._lora.items():
            low, out = activation(name, f"b t {rank}"), [activation(name[0], f"b t h {width}")]
            if name == "v_lora":
                out.append(activation("v_first", "b t h v"))
            down, up = weight(f"{name}_down", f"{rank} D"), weight(f"{name}_up", f"h {width} {rank}")
            products.append(product(f"{name}_down", activation(f"x_{name[0]}", "b t D"), down, low, axes))
            products.append(product(f"{name}_up", low, up, Term(f"b t h {width}", tuple(out)), axes))
        products += self._state_update(axes)
        attn, y = activation("attn", "b t h v"), activation("y", "b t D")
        products.append(product("o_proj", attn, weight("o_proj", "D (h v)"), y, axes))
        return Ops(tuple(products), self._rowwise(axes))

    @staticmethod
    def _state_update(axes: dict[str, Dim]) -> tuple[Contraction, ...]:
        # kk is made of k; -kk^T S and what it adds to the state stay on chip.
        k, rate, decay = (activation(n, "b t h k") for n in ("k", "a", "w"))
        v, r, o = activation("v", "b t h v"), activation("r", "b t h k"), activation("o", "b t h v")
        predicted, kept = on_chip("predicted", "b t h v"), on_chip("recurrent_state", "b h k v")
        state = Term("b h k v", (Part("recurrent_state", "b h k v", "cache", "state"), decay))
        new_state = Part("recurrent_state", "b h k v", "cache_write", "state")
        return (
            product("state_update", k, state, predicted, axes),
            product("state_update", rate, predicted, kept, axes),
            product("state_update", on_chip("k", "b t h k"), v, new_state, axes),
            product("state_update", r, kept, o, axes),
        )

    def _rowwise(self, axes: dict[str, Dim]) -> tuple[Rowwise, ...]:
        out = [
            Rowwise("token_shift", "b t D", 1 + 2 * len(MIXED), axes),  # a difference; product and sum for each input
            Rowwise("decay_tanh", "b t w", 1, axes),
            Rowwise("decay_gate", "b t h k", 4, axes),  # bias, sigmoid, product, exponential
            Rowwise("a_gate", "b t h k", 2, axes),  # bias, sigmoid
            Rowwise("gate_sigmoid", "b t e", 1, axes),
        ]
        if self.v_rank is not None:
            # Bias and sigmoid; difference, product and sum.
            out.append(Rowwise("v_mix", "b t h v", 5, axes))
        out += [
            Rowwise("kk_norm", "b t h k", 1 + L2_NORM, axes),  # product with k_k
            Rowwise("k_rate", "b t h k", 4, axes),  # a - 1, products with k_a and k, sum
            Rowwise("kk_rate", "b t h k", 2, axes),  # -kk and kk * a
            Rowwise("state_decay", "b t h k v", 1, axes),
            Rowwise("o_norm", "b t h v", LAYER_NORM, axes),
            Rowwise("bonus_score", "b t h k", 3, axes),  # r * r_k * k and its sum
            Rowwise("bonus", "b t h v", 2, axes),  # product with v, sum
            Rowwise("gate", "b t h v", 1, axes),
        ]
        return tuple(out)

    def heads(self, form: str) -> HeadShape:  # noqa: ARG002
        """H heads of widths K and V; nothing grows."""
        return HeadShape(self.num_heads, None, self.head_k_dim, self.head_v_dim)

    def query_heads(self) -> int:
        """H."""
        return self.num_heads

    def shard(self, tp: int) -> "RWKV7":
        """H / tp heads with their state; token shift and the first matrices of the low ranks replicated."""
        check_tp(tp, self.num_heads)
        return replace(self, num_heads=self.num_heads // tp)

    def with_kv_heads(self, kv_heads: int) -> Attention | None:  # noqa: ARG002
        """No keys or values are cached."""
        return None
