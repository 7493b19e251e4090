"""Linear attention with one s x s state and elementwise decay, without a delta rule.

q, k, v, decay = sigmoid(.) are projections of x to s values each. The state S [s (key), s (value)] keeps the sum of
k v^T, and every key channel fades by its own factor:

    S_t = Diag(decay) S_{t-1} + k v^T,  o = S_t^T q,  y = o W_o.

The state is read by the key's index: without decay o is the sum of (q . k) v over the tokens so far. Reading it by
the value's index would give (q . v) k. One head, no scale, no norm. Source: linear attention as in arXiv 2006.16236
section 3.4, with the per-channel decay of arXiv 2312.06635 section 4.
"""

from dataclasses import dataclass
from typing import ClassVar

from attncalc.attention.base import Attention, HeadShape, Step, check_form, check_tp, require
from attncalc.axes import Dim, Weight
from attncalc.cache import CacheTensor
from attncalc.ops import BIAS, Ops, Part, Rowwise, Term, activation, on_chip, product, weight
from attncalc.reach import Reach
from attncalc.workload import Workload


@dataclass(frozen=True)
class LinearState:
    """`state_dim` s: width of q, k, v and decay. `bias`: on all five projections.

    There is one form: a prefill runs the recurrence over all new tokens.
    """

    hidden_size: int
    state_dim: int
    bias: bool = True

    forms: ClassVar[tuple[str, ...]] = ("recurrent",)
    source: ClassVar[str] = "arXiv 2006.16236 section 3.4; arXiv 2312.06635 section 4"

    def __post_init__(self) -> None:
        require(self, "hidden_size", "state_dim")

    @property
    def variant(self) -> str:
        """The id in the registry."""
        return "linear-state"

    def default_form(self, workload: Workload) -> str:  # noqa: ARG002
        """There is one form."""
        return "recurrent"

    @property
    def _axes(self) -> dict[str, Dim]:
        s = Dim(self.state_dim, "state_dim")
        return {"D": Dim(self.hidden_size, "hidden_size"), "k": s, "v": s}

    def weights(self, form: str) -> tuple[Weight, ...]:  # noqa: ARG002
        """5*D*s, and 4*s + D biases. Linear weights are [out, in]."""
        axes, shapes = self._axes, {}
        for name, shape in (("q", "k D"), ("k", "k D"), ("v", "v D"), ("decay", "k D"), ("o", "D v")):
            shapes[f"{name}_proj.weight"] = shape
            if self.bias:
                shapes[f"{name}_proj.bias"] = shape[0]
        return tuple(Weight(name, shape, axes) for name, shape in shapes.items())

    def cache(self, reach: Reach, form: str) -> tuple[CacheTensor, ...]:  # noqa: ARG002
        """Constant: recurrent_state [B, 1, s, s]."""
        return (CacheTensor("recurrent_state", "state", Dim(1, ""), self._axes["v"], None, self.state_dim),)

    def ops(self, step: Step, form: str, *, cached: str) -> Ops:  # noqa: ARG002
        """Projections, `state_update` 4*B*T*s^2 (k v^T and S^T q), output; the state is read and written once."""
        check_form(self, form)
        axes = self._axes | step.axes
        x, y = activation("x", "b t D"), activation("y", "b t D")
        q, k = activation("q", "b t k"), activation("k", "b t k")
        v, decay, o = activation("v", "b t v"), activation("decay", "b t k"), activation("o", "b t v")
        state = Part("recurrent_state", "b k v", "cache", "state")
        new_state = Part("recurrent_state", "b k v", "cache_write", "state")
        written = Term("b k v", (state, decay, new_state))
        products = (
            product("q_proj", x, weight("q_proj", "k D"), q, axes),
            product("k_proj", x, weight("k_proj", "k D"), k, axes),
            product("v_proj", x, weight("v_proj", "v D"), v, axes),
            product("decay_proj", x, weight("decay_proj", "k D"), decay, axes),
            product("state_update", k, v, written, axes),
            product("state_update", q, on_chip("recurrent_state", "b k v"), o, axes),
            product("o_proj", o, weight("o_proj", "D v"), y, axes),
        )
        rowwise = [Rowwise("decay_gate", "b t k", 1, axes), Rowwise("state_decay", "b t k v", 1, axes)]
        if self.bias:
            biased = {"q": "b t k", "k": "b t k", "v": "b t v", "decay": "b t k", "o": "b t D"}
            rowwise += [Rowwise(f"{name}_bias", shape, BIAS, axes) for name, shape in biased.items()]
        return Ops(products, tuple(rowwise))

    def heads(self, form: str) -> HeadShape:  # noqa: ARG002
        """One head of width s, no cached keys."""
        return HeadShape(1, None, self.state_dim, self.state_dim)

    def query_heads(self) -> int:
        """One."""
        return 1

    def shard(self, tp: int) -> "LinearState":
        """There is one head, so that only tp 1 divides it."""
        check_tp(tp, 1)
        return self

    def with_kv_heads(self, kv_heads: int) -> Attention | None:  # noqa: ARG002
        """No keys or values are cached."""
        return None
