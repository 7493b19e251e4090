"""DeepSeek sparse attention: MLA over the top k keys that a small indexer selects for each query.

Indexer: q_I,j = RoPE(q_a W_qI,j) for H_I heads, k_I = RoPE(LayerNorm(x W_kI)), one key for all heads, and
I(t, s) = sum_j w_j(t) relu(q_I,j(t) . k_I(s)) with w = x W_w; query t attends to the k keys of largest I(t, s).
The three numbers differ: all keys are stored, all index keys are read and scored, k latents are read by the core.
Sources: DeepSeek-V3.2 (arXiv 2512.02556) section 2.1; sharing a selection across layers: arXiv 2603.12201 (GLM-5).
Parameter names as in transformers `models/deepseek_v32` and `models/glm_moe_dsa`.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

from attncalc.attention.base import Step, cached_form, require
from attncalc.attention.mla import MLA
from attncalc.axes import Dim, Weight
from attncalc.cache import CacheTensor
from attncalc.errors import AttncalcError
from attncalc.ops import LAYER_NORM, ROTATION, Contraction, Ops, Part, Rowwise, activation, on_chip, product, weight
from attncalc.reach import FULL, Reach
from attncalc.search import largest
from attncalc.units import MAX_COUNT
from attncalc.workload import Workload

INDEXER = ("index_q_proj", "index_k_proj", "index_weights_proj", "index_score")
RELU_AND_SUM = 3  # relu, product with the head's weight, sum
MAX_ELEMENTS = 2**26
"""Elements of the torch layer's largest intermediate; more queries than that allows are computed in turns."""


@dataclass(frozen=True, kw_only=True)
class DSA(MLA):
    """MLA's dimensions and options, and those of the indexer.

    `own_indexer` false: the layer reuses the selection of an earlier layer and keeps no index keys.
    """

    index_n_heads: int
    index_head_dim: int
    index_topk: int
    own_indexer: bool = True

    source: ClassVar[str] = "arXiv 2512.02556 section 2.1"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "index_n_heads", "index_head_dim", "index_topk")
        if self.q_lora_rank is None:
            raise AttncalcError("q_lora_rank", "must be given: the indexer's queries are made from that latent")
        if self.index_head_dim < self.qk_rope_head_dim:
            rule = f"must not exceed the {self.index_head_dim} values of an index head, the first of which are rotated"
            raise AttncalcError("qk_rope_head_dim", rule, got=self.qk_rope_head_dim)

    @property
    def variant(self) -> str:
        """The id in the registry."""
        return "dsa"

    @property
    def selection(self) -> Reach:
        """What the core attends to."""
        return Reach("top_k", self.index_topk)

    @property
    def _axes(self) -> dict[str, Dim]:
        return super()._axes | {
            "i": Dim(self.index_n_heads, "index_n_heads"),
            "d": Dim(self.index_head_dim, "index_head_dim"),
        }

    def weights(self, form: str) -> tuple[Weight, ...]:
        """MLA's, and Q*H_I*d_I + D*d_I + 2*d_I + D*H_I where the layer has an indexer."""
        shapes = {
            "indexer.wq_b.weight": "(i d) q",
            "indexer.wk.weight": "d D",
            "indexer.k_norm.weight": "d",
            "indexer.k_norm.bias": "d",
            "indexer.weights_proj.weight": "i D",
        }
        axes = self._axes
        own = tuple(Weight(name, shape, axes) for name, shape in shapes.items()) if self.own_indexer else ()
        return super().weights(form) + own

    def cache(self, reach: Reach, form: str) -> tuple[CacheTensor, ...]:
        """MLA's tensors, and index_k [B, 1, S, d_I] where the layer has an indexer; every token stays."""
        self._check_reach(reach)
        axes, latents = self._axes, super().cache(reach, form)
        if not self.own_indexer:
            return latents
        return (*latents, CacheTensor("index_k", "index", axes["one"], axes["d"], reach))

    def ops(self, step: Step, form: str, *, cached: str) -> Ops:
        """MLA's over min(i, k) keys of the query at position i, and the indexer: 2*B*H_I*d_I*N over all pairs N.

        `dense`: the core over all keys, as an eager implementation masks them. Finding the k largest of the scores
        is comparisons and moves whose number depends on the algorithm: it counts 0.
        """
        self._check_reach(step.reach)
        core = super().ops(replace(step, reach=self.selection), form, cached=cached)
        if not self.own_indexer:
            return core
        axes = self._axes | step.axes
        made = core.contractions
        at = next(i for i, op in enumerate(made) if op.name == "kv_a_proj")
        return Ops((*made[:at], *self._indexer(step, axes), *made[at:]), core.rowwise + self._index_rows(step, axes))

    def _indexer(self, step: Step, axes: dict[str, Dim]) -> tuple[Contraction, ...]:
        x, q, key = activation("x", "b t D"), activation("index_q", "b i t d"), Part
        new, every = key("index_k", "b t d", "cache_write", "index"), key("index_k", "b s d", "cache", "index")
        return (
            product("index_q_proj", activation("q_a", "b t q"), weight("indexer.wq_b", "i d q"), q, axes),
            product("index_k_proj", x, weight("indexer.wk", "d D"), new, axes),
            product(
                "index_weights_proj",
                x,
                weight("indexer.weights_proj", "i D"),
                activation("index_weights", "b t i"),
                axes,
            ),
            step.coupled("index_score", q, every, on_chip("index_scores", "b i t s"), axes),
        )

    def _index_rows(self, step: Step, axes: dict[str, Dim]) -> tuple[Rowwise, ...]:
        out = [Rowwise("index_k_norm", "b t d", LAYER_NORM, axes)]
        if self.rotated and self.qk_rope_head_dim:
            out += [
                Rowwise("index_q_rope", "b t i p", ROTATION, axes),
                Rowwise("index_k_rope", "b t p", ROTATION, axes),
            ]
        formula = step.reach.pairs_formula(step.count)
        out.append(Rowwise("index_relu_and_sum", "b i", RELU_AND_SUM, axes, step.pairs, formula))
        return tuple(out)

    def _check_reach(self, reach: Reach) -> None:
        if reach != FULL:
            raise AttncalcError("reach", "must be full: the indexer selects among all earlier tokens", got=reach.text)

    def gathers(self, workload: Workload, form: str) -> bool:
        """Whether the fast path reads selected latents alone: where every new token has k or more before it."""
        return form in ("absorbed", "merged") and workload.context - workload.new_tokens >= self.index_topk

    def sparse_beats_dense_from(self, workload: Workload, form: str) -> int | None:
        """The smallest context at which core and indexer cost fewer FLOPs than MLA's core over all keys.

        For as many new tokens, or for whole prompts where the workload is one; causal pairs; the indexer with its
        projections. Saved FLOPs are c*(N - N_k) - i*N - P*T for c and i FLOPs per pair, N_k pairs of the core and
        projections P: negative up to k tokens, convex after, so that they change their sign once, if c > i. None
        where they never do.
        """
        names = ("score", "value", *INDEXER)
        cached = cached_form(self, form)
        dense_twin = replace(self, index_topk=MAX_COUNT, own_indexer=False)

        def saved(context: int) -> int:
            new_tokens = context if workload.phase == "prefill" else workload.new_tokens
            step = Step(Workload(context, new_tokens, workload.batch))
            dense, sparse = (
                sum(op.flops for op in spec.ops(step, form, cached=cached).contractions if op.name in names)
                for spec in (dense_twin, self)
            )
            return dense - sparse

        high = 1 if workload.phase == "prefill" else workload.new_tokens
        low = high - 1
        while saved(high) <= 0:
            low, high = high, 2 * high
            if high > MAX_COUNT // 2:
                return None
        return largest(lambda n: saved(n) <= 0, low, high) + 1
