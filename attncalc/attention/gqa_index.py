"""GQA whose KV heads attend to blocks of tokens that an indexer picks (MiniMax-M3).

The indexer has one head for each KV head and one key for each token. The product of a query with every earlier index
key is taken, a block of C tokens gets the largest of its own, and the KV head's queries attend to the k best blocks,
of which the last ones, their own among them, are always. Index queries and keys are normed and rotated as q and k
are; there is no index value, so that an index key is all that the indexer stores.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

from attncalc.attention.base import Attention, HeadShape, Step, require
from attncalc.attention.gqa import GQA
from attncalc.attention.nsa import check_full
from attncalc.axes import Axes, Dim, Weight
from attncalc.cache import CacheTensor
from attncalc.errors import AttncalcError
from attncalc.ops import RMS_NORM, ROTATION, Ops, Part, Rowwise, activation, on_chip, product, weight
from attncalc.reach import FULL, Reach
from attncalc.workload import Workload


@dataclass(frozen=True)
class IndexedGQA:
    """`index_dim` of the index heads; `blocks` of `block_size` tokens, the `local_blocks` included.

    q and k have an RMSNorm of one weight for all heads, and so have index queries and keys.
    """

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    rope_dim: int
    index_dim: int
    block_size: int
    blocks: int
    local_blocks: int = 1

    forms: ClassVar[tuple[str, ...]] = ("direct",)
    source: ClassVar[str] = "transformers 5.24 models/minimax_m3_vl; config.json of MiniMaxAI/MiniMax-M3"

    def __post_init__(self) -> None:
        require(self, "index_dim", "block_size", "blocks", "local_blocks")
        _ = self.gqa  # checks the rest
        if self.rope_dim > self.index_dim:
            raise AttncalcError("rope_dim", f"must be at most index_dim {self.index_dim}", got=self.rope_dim)
        if self.local_blocks > self.blocks:
            raise AttncalcError("blocks", "must hold the local ones", got=self.blocks)

    @property
    def variant(self) -> str:
        """The id in the registry."""
        return "gqa-index"

    def default_form(self, workload: Workload) -> str:  # noqa: ARG002
        """There is one form."""
        return "direct"

    @property
    def gqa(self) -> GQA:
        """The attention without its indexer."""
        return GQA(
            self.hidden_size,
            self.num_heads,
            self.num_kv_heads,
            self.head_dim,
            self.v_head_dim,
            self.rope_dim,
            qk_norm="head",
        )

    @property
    def attended(self) -> Reach:
        """The own block, and the others that were picked."""
        return Reach("blocks", self.blocks, self.block_size)

    @property
    def _axes(self) -> dict[str, Dim]:
        return {
            "D": Dim(self.hidden_size, "hidden_size"),
            "g": Dim(self.num_kv_heads, "num_kv_heads"),
            "i": Dim(self.index_dim, "index_dim"),
            "p": Dim(self.rope_dim, "rope_dim"),
        }

    def index_weights(self) -> tuple[Weight, ...]:
        """D*G*i + D*i + 2*i."""
        shapes = {"q_proj": "(g i) D", "k_proj": "i D", "q_norm": "i", "k_norm": "i"}
        return tuple(Weight(f"indexer.{name}.weight", shape, self._axes) for name, shape in shapes.items())

    def weights(self, form: str) -> tuple[Weight, ...]:
        """Those of GQA with norms of q and k, and of the indexer."""
        return self.gqa.weights(form) + self.index_weights()

    def cache(self, reach: Reach, form: str) -> tuple[CacheTensor, ...]:
        """K [B, G, S, d], V [B, G, S, e] and the index key [B, 1, S, i]."""
        check_full(self.variant, reach)
        return (
            *self.gqa.cache(FULL, form),
            CacheTensor("index_k", "index", Dim(1, ""), self._axes["i"], FULL),
        )

    def ops(self, step: Step, form: str, *, cached: str) -> Ops:
        """GQA on the picked blocks, and the indexer: projections, and scores 2*B*G*i for every earlier token."""
        check_full(self.variant, step.reach)
        inner = self.gqa.ops(Step(step.workload, self.attended, step.count), form, cached=cached)
        axes: Axes = self._axes | step.axes
        x, q = activation("x", "b t D"), activation("index_q", "b g t i")
        key = Part("index_k", "b t i", "cache_write", "index")
        products = (
            product("index_q_proj", x, weight("index_q_proj", "g i D"), q, axes),
            product("index_k_proj", x, weight("index_k_proj", "i D"), key, axes),
            step.coupled(
                "index_score",
                q,
                Part("index_k", "b s i", "cache", "index"),
                on_chip("index_scores", "b g t s"),
                axes,
            ),
        )
        rowwise = [
            Rowwise("index_q_norm", "b t g i", RMS_NORM, axes),
            Rowwise("index_k_norm", "b t i", RMS_NORM, axes),
        ]
        if self.rope_dim:
            rowwise += [Rowwise("index_q_rope", "b t g p", ROTATION, axes), Rowwise("index_k_rope", "b t p", 3, axes)]
        # A comparison for each token in its block, and one for each block that a query could pick.
        formula = step.reach.pairs_formula(step.count)
        rowwise.append(Rowwise("block_max", "b g", 1, axes, step.pairs, formula))
        seen = Step(step.workload, Reach("compressed", block=self.block_size, span=1), step.count)
        formula = seen.reach.pairs_formula(seen.count)
        rowwise.append(Rowwise("block_top_k", "b g", 1, axes, seen.pairs, formula))
        return Ops(inner.contractions + products, inner.rowwise + tuple(rowwise))

    def heads(self, form: str) -> HeadShape:
        """H query heads on G KV heads."""
        return self.gqa.heads(form)

    def query_heads(self) -> int:
        """H."""
        return self.num_heads

    def shard(self, tp: int) -> "IndexedGQA":
        """H / tp query heads, max(1, G / tp) KV heads with their index heads; the index key is replicated."""
        part = self.gqa.shard(tp)
        return replace(self, num_heads=part.num_heads, num_kv_heads=part.num_kv_heads)

    def with_kv_heads(self, kv_heads: int) -> Attention | None:
        """The same heads without an indexer."""
        return self.gqa.with_kv_heads(kv_heads)
