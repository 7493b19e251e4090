"""Tensor-product attention: q, k and v of all heads are sums of products of a factor over heads and one over widths.

For a token, k of all heads [H, d] = 1/r_k sum_r A_k[r] (x) B_k[r] with A_k [r_k, H] and B_k [r_k, d], both linear in
x; v alike, and q alike or (`q_rank` None) a plain projection. RoPE turns B_q and B_k, which turns q and k. Cached are
the factors: (r_k + r_v) * (H + d) elements per token. Source: arXiv 2501.06425.

* factored: K and V are never built. Scores are A_q (B_q B_k), weighted by A_k; values are weighted by A_v and then
  meet B_v (FlashTPA).
* expanded: K and V of all keys are built from the factors in each step.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

from attncalc.attention.base import Attention, HeadShape, Step, check_form, check_tp, require
from attncalc.axes import Dim, Weight
from attncalc.cache import CacheTensor
from attncalc.errors import AttncalcError
from attncalc.ops import ROTATION, Contraction, Ops, Part, Rowwise, Term, activation, on_chip, product, weight
from attncalc.reach import Reach
from attncalc.workload import Workload


@dataclass(frozen=True)
class TPA:
    """Dimensions. `q_rank` None: the query is not factored. `rope_dim`: rotated values of a head, 0 for NoPE."""

    hidden_size: int
    num_heads: int
    head_dim: int
    q_rank: int | None
    k_rank: int
    v_rank: int
    rope_dim: int

    forms: ClassVar[tuple[str, ...]] = ("factored", "expanded")
    source: ClassVar[str] = "arXiv 2501.06425"

    def __post_init__(self) -> None:
        require(self, "hidden_size", "num_heads", "head_dim", "k_rank", "v_rank")
        require(self, "rope_dim", minimum=0)
        if self.q_rank is not None:
            require(self, "q_rank")
        if self.rope_dim > self.head_dim or self.rope_dim % 2:
            rule = f"must be even and at most head_dim {self.head_dim}"
            raise AttncalcError("rope_dim", rule, got=self.rope_dim)

    @property
    def variant(self) -> str:
        """The id in the registry."""
        return "tpa"

    def default_form(self, workload: Workload) -> str:
        """Factored, but expanded for a whole prompt, where K and V are built once."""
        return "expanded" if workload.phase == "prefill" else "factored"

    @property
    def _axes(self) -> dict[str, Dim]:
        return {
            "D": Dim(self.hidden_size, "hidden_size"),
            "h": Dim(self.num_heads, "num_heads"),
            "d": Dim(self.head_dim, "head_dim"),
            "q": Dim(self.q_rank or 0, "q_rank"),
            "k": Dim(self.k_rank, "k_rank"),
            "m": Dim(self.k_rank - 1, "k_rank - 1"),
            "v": Dim(self.v_rank, "v_rank"),
            "p": Dim(self.rope_dim, "rope_dim"),
        }

    def weights(self, form: str) -> tuple[Weight, ...]:  # noqa: ARG002
        """D*r_q*(H + d) (or D*H*d) + D*(r_k + r_v)*(H + d) + H*d*D. Linear weights are [out, in]."""
        if self.q_rank is None:
            shapes = {"q_proj.weight": "(h d) D"}
        else:
            shapes = {"a_q_proj.weight": "(h q) D", "b_q_proj.weight": "(q d) D"}
        for side in "kv":
            shapes |= {f"a_{side}_proj.weight": f"(h {side}) D", f"b_{side}_proj.weight": f"({side} d) D"}
        shapes["o_proj.weight"] = "D (h d)"
        axes = self._axes
        return tuple(Weight(name, shape, axes) for name, shape in shapes.items())

    def cache(self, reach: Reach, form: str) -> tuple[CacheTensor, ...]:  # noqa: ARG002
        """a_k [B, r_k, S, H], b_k [B, r_k, S, d], a_v [B, r_v, S, H] and b_v [B, r_v, S, d], in both forms."""
        axes = self._axes
        return (
            CacheTensor("a_k", "key", axes["k"], axes["h"], reach),
            CacheTensor("b_k", "key", axes["k"], axes["d"], reach),
            CacheTensor("a_v", "value", axes["v"], axes["h"], reach),
            CacheTensor("b_v", "value", axes["v"], axes["d"], reach),
        )

    def ops(self, step: Step, form: str, *, cached: str) -> Ops:  # noqa: ARG002
        """Factored core: 2*B*N*(r_k*r_q*(d + H) + r_v*H*d), or 2*B*N*H*d*(r_k + r_v) with a plain query.

        What A_k and A_v weight is elementwise and stands apart. Expanded: 2*B*S*(r_k + r_v)*H*d to build K and V, then
        scores and values of 2*B*H*d*N each; N attended pairs.
        """
        check_form(self, form)
        axes = self._axes | step.axes
        x, y, q = activation("x", "b t D"), activation("y", "b t D"), activation("q", "b h t d")
        products: list[Contraction] = []
        if self.q_rank is None:
            products.append(product("q_proj", x, weight("q_proj", "h d D"), q, axes))
        else:
            a_q, b_q = activation("a_q", "b h t q"), activation("b_q", "b t q d")
            products.append(product("a_q_proj", x, weight("a_q_proj", "h q D"), a_q, axes))
            products.append(product("b_q_proj", x, weight("b_q_proj", "q d D"), b_q, axes))
        for side, kind in (("k", "key"), ("v", "value")):
            for factor, width in (("a", "h"), ("b", "d")):
                name = f"{factor}_{side}"
                new = Part(name, f"b {side} t {width}", "cache_write", kind)
                shape = f"h {side} D" if factor == "a" else f"{side} d D"
                products.append(product(f"{name}_proj", x, weight(f"{name}_proj", shape), new, axes))
        products += self._factored(step, axes) if form == "factored" else self._expanded(step, axes)
        attn = activation("attn", "b h t d")
        products.append(product("o_proj", attn, weight("o_proj", "D h d"), y, axes))
        return Ops(tuple(products), self._rowwise(step, form, axes))

    def _factored(self, step: Step, axes: dict[str, Dim]) -> list[Contraction]:
        a_k, b_k = Part("a_k", "b k s h", "cache", "key"), Part("b_k", "b k s d", "cache", "key")
        a_v, b_v = Part("a_v", "b v s h", "cache", "value"), Part("b_v", "b v s d", "cache", "value")
        # A_k weights the scores of each of its ranks as they leave the product, A_v the softmax as it enters.
        by_rank = Term("b k h t s", (on_chip("scores", "b h t s"), a_k))
        weighted = Term("b v h t s", (on_chip("scores", "b h t s"), a_v))
        if self.q_rank is None:
            scores = [step.coupled("score", activation("q", "b h t d"), b_k, by_rank, axes)]
        else:
            of_factors = on_chip("scores", "b k t q s")
            scores = [
                step.coupled("score", activation("b_q", "b t q d"), b_k, of_factors, axes),
                step.coupled("score", activation("a_q", "b h t q"), of_factors, by_rank, axes),
            ]
        return [*scores, step.coupled("value", weighted, b_v, activation("attn", "b h t d"), axes)]

    def _expanded(self, step: Step, axes: dict[str, Dim]) -> list[Contraction]:
        q, k, v = activation("q", "b h t d"), activation("k", "b h s d"), activation("v", "b h s d")
        out: list[Contraction] = []
        if self.q_rank is not None:
            a_q, b_q = activation("a_q", "b h t q"), activation("b_q", "b t q d")
            out.append(product("expand_q", a_q, b_q, q, axes))
        for side, kind, built in (("k", "key", k), ("v", "value", v)):
            a = Part(f"a_{side}", f"b {side} s h", "cache", kind)
            b = Part(f"b_{side}", f"b {side} s d", "cache", kind)
            out.append(product(f"expand_{side}", a, b, built, axes))
        scores = on_chip("scores", "b h t s")
        return [
            *out,
            step.coupled("score", q, k, scores, axes),
            step.coupled("value", scores, v, activation("attn", "b h t d"), axes),
        ]

    def _rowwise(self, step: Step, form: str, axes: dict[str, Dim]) -> tuple[Rowwise, ...]:
        out = []
        if self.rope_dim:
            rotated = "b t h p" if self.q_rank is None else "b t q p"
            out += [Rowwise("q_rope", rotated, ROTATION, axes), Rowwise("k_rope", "b t k p", ROTATION, axes)]
        if form == "factored":
            pairs, formula = step.pairs, step.reach.pairs_formula(step.count)
            out.append(Rowwise("weight_by_a_k", "b k h", 1, axes, pairs, formula))
            if self.k_rank > 1:
                out.append(Rowwise("sum_over_k_rank", "b m h", 1, axes, pairs, formula))
            out.append(Rowwise("weight_by_a_v", "b v h", 1, axes, pairs, formula))
        # 1 / (r_q r_k) is part of the softmax scale; 1 / r_v scales the output.
        return (*out, step.softmax(axes, "h"), Rowwise("rank_scale", "b t h d", 1, axes))

    def heads(self, form: str) -> HeadShape:  # noqa: ARG002
        """Each head has a K and a V of its own, made from the factors."""
        return HeadShape(self.num_heads, self.num_heads, self.head_dim, self.head_dim)

    def query_heads(self) -> int:
        """H."""
        return self.num_heads

    def shard(self, tp: int) -> "TPA":
        """H / tp heads, so that the factors A are split; the factors B and their projections are replicated."""
        check_tp(tp, self.num_heads)
        return replace(self, num_heads=self.num_heads // tp)

    def with_kv_heads(self, kv_heads: int) -> Attention | None:
        """A GQA of the same widths."""
        from attncalc.attention.gqa import GQA

        return GQA(self.hidden_size, self.num_heads, kv_heads, self.head_dim, self.head_dim, self.rope_dim)
