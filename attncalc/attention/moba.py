"""Mixture of Block Attention: each query head attends to a few blocks of tokens (arXiv 2502.13189).

The context is cut into blocks of C tokens. A query attends to its own block, causally, and to the k - 1 earlier
blocks whose mean key has the largest product with it; every query head chooses for itself. There are no weights
besides those of GQA. Means are of rotated keys, and are kept: a decode step would otherwise read every key.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

from attncalc.attention.base import Attention, HeadShape, Step, check_tp, require
from attncalc.attention.gqa import GQA
from attncalc.attention.nsa import check_full, unread_rows
from attncalc.axes import Dim, Weight
from attncalc.cache import CacheTensor
from attncalc.errors import AttncalcError
from attncalc.ops import ROTATION, Ops, Part, Rowwise, Term, activation, on_chip, product, weight
from attncalc.reach import FULL, Reach
from attncalc.workload import Workload


@dataclass(frozen=True)
class MoBA:
    """C `block_size`, k `blocks` with the own one."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    rope_dim: int = 0
    block_size: int = 256
    blocks: int = 4

    forms: ClassVar[tuple[str, ...]] = ("direct",)
    source: ClassVar[str] = "arXiv 2502.13189 section 2.2; flash-linear-attention layers/moba.py"

    def __post_init__(self) -> None:
        require(self, "hidden_size", "num_heads", "num_kv_heads", "head_dim", "v_head_dim", "block_size", "blocks")
        require(self, "rope_dim", minimum=0)
        if self.num_heads % self.num_kv_heads:
            raise AttncalcError("num_kv_heads", f"must divide num_heads {self.num_heads}", got=self.num_kv_heads)
        if self.rope_dim > self.head_dim or self.rope_dim % 2:
            raise AttncalcError("rope_dim", f"must be even and at most head_dim {self.head_dim}", got=self.rope_dim)

    @property
    def variant(self) -> str:
        """The id in the registry."""
        return "moba"

    def default_form(self, workload: Workload) -> str:  # noqa: ARG002
        """There is one form."""
        return "direct"

    @property
    def means(self) -> Reach:
        """One mean key for each whole block."""
        return Reach("compressed", block=self.block_size)

    @property
    def gated(self) -> Reach:
        """The means that a query is compared with: of blocks that ended before its own."""
        return Reach("compressed", block=self.block_size, span=self.block_size + 1)

    @property
    def attended(self) -> Reach:
        """The own block, and k - 1 whole ones."""
        return Reach("blocks", self.blocks, self.block_size)

    @property
    def _axes(self) -> dict[str, Dim]:
        G = self.num_kv_heads
        return {
            "D": Dim(self.hidden_size, "hidden_size"),
            "h": Dim(self.num_heads, "num_heads"),
            "g": Dim(G, "num_kv_heads"),
            "j": Dim(self.num_heads // G, "num_heads / num_kv_heads"),
            "d": Dim(self.head_dim, "head_dim"),
            "e": Dim(self.v_head_dim, "v_head_dim"),
            "p": Dim(self.rope_dim, "rope_dim"),
        }

    def weights(self, form: str) -> tuple[Weight, ...]:  # noqa: ARG002
        """D*H*d + D*G*(d + e) + H*e*D, as GQA."""
        shapes = {"q": "(g j d) D", "k": "(g d) D", "v": "(g e) D", "o": "D (g j e)"}
        return tuple(Weight(f"{name}_proj.weight", shape, self._axes) for name, shape in shapes.items())

    def cache(self, reach: Reach, form: str) -> tuple[CacheTensor, ...]:  # noqa: ARG002
        """K [B, G, S, d], V [B, G, S, e] and the mean keys of whole blocks [B, G, floor(S / C), d]."""
        check_full(self.variant, reach)
        axes = self._axes
        return (
            CacheTensor("k", "key", axes["g"], axes["d"], FULL),
            CacheTensor("v", "value", axes["g"], axes["e"], FULL),
            CacheTensor("mean_k", "key", axes["g"], axes["d"], self.means),
        )

    def ops(self, step: Step, form: str, *, cached: str) -> Ops:  # noqa: ARG002
        """Projections, gate 2*B*H*d for each earlier block of a query, scores 2*B*H*d*N, values 2*B*H*e*N.

        The own block needs no score; implementations that compute it anyway count one more for each query. Rows are
        read for each KV head: where its query heads choose different blocks, more are.
        """
        check_full(self.variant, step.reach)
        w, start = step.workload, step.workload.context - step.workload.new_tokens
        core, gate = Step(w, self.attended, step.count), Step(w, self.gated, step.count)
        axes: dict[str, Dim] = {
            **self._axes,
            **core.axes,
            "n": Dim(self.means.stored(w.context) - self.means.stored(start), "new means"),
            "r": Dim(unread_rows(self.means, start, w.new_tokens), "rows of new means"),
        }
        x, q, o = activation("x", "b t D"), activation("q", "b g j t d"), activation("attn", "b g j t e")
        scores, gates = on_chip("scores", "b g j t s"), on_chip("gate_scores", "b g j t s")
        # The rows of earlier tokens of which new means are made are read again; the means are written.
        new_k = (
            Part("k", "b g t d", "cache_write", "key"),
            Part("k_of_means", "b g r d", "cache", "key"),
            Part("mean_k", "b g n d", "cache_write", "key"),
        )
        products = (
            product("q_proj", x, weight("q_proj", "g j d D"), q, axes),
            product("k_proj", x, weight("k_proj", "g d D"), Term("b g t d", new_k), axes),
            product("v_proj", x, weight("v_proj", "g e D"), Part("v", "b g t e", "cache_write", "value"), axes),
            gate.coupled("gate_score", q, Part("mean_k", "b g s d", "cache", "key"), gates, axes | gate.axes),
            core.coupled("score", on_chip("q", q.shape), Part("k", "b g s d", "cache", "key"), scores, axes),
            core.coupled("value", scores, Part("v", "b g s e", "cache", "value"), o, axes),
            product("o_proj", o, weight("o_proj", "D (g j e)"), activation("y", "b t D"), axes),
        )
        rowwise = []
        if self.rope_dim:
            rowwise += [Rowwise("q_rope", "b t h p", ROTATION, axes), Rowwise("k_rope", "b t g p", ROTATION, axes)]
        rowwise += [
            Rowwise("mean", "b g n d", self.block_size, axes),
            Rowwise("block_top_k", "b h", 1, axes, gate.pairs, gate.reach.pairs_formula(gate.count)),
            core.softmax(axes, "h"),
        ]
        return Ops(products, tuple(rowwise))

    def sparse_from_context(self) -> int:
        """The smallest context at which a decode step costs fewer FLOPs than full attention of the same heads.

        Of S - N rows not read, score and value products save 2*H*(d + e) each; each gate score costs 2*H*d.
        """
        context = 1
        while (self.head_dim + self.v_head_dim) * (
            context - self.attended.pairs(1, context, "causal")
        ) <= self.head_dim * self.gated.pairs(1, context, "causal"):
            context += 1
        return context

    def heads(self, form: str) -> HeadShape:  # noqa: ARG002
        """H query heads on G KV heads."""
        return HeadShape(self.num_heads, self.num_kv_heads, self.head_dim, self.v_head_dim)

    def query_heads(self) -> int:
        """H."""
        return self.num_heads

    def shard(self, tp: int) -> "MoBA":
        """H / tp query heads and max(1, G / tp) KV heads."""
        check_tp(tp, self.num_heads, self.num_kv_heads)
        return replace(self, num_heads=self.num_heads // tp, num_kv_heads=max(1, self.num_kv_heads // tp))

    def with_kv_heads(self, kv_heads: int) -> Attention | None:
        """Full attention of the same heads."""
        return GQA(self.hidden_size, self.num_heads, kv_heads, self.head_dim, self.v_head_dim, self.rope_dim)
