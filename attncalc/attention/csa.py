"""Compressed attention of DeepSeek-V4: a sliding window beside entries that each stand for a block of m tokens.

One KV head whose row is K and V, c = RMSNorm(x W_KV), the last `rope_dim` values rotated; the output is rotated back
at the position of its query. Beside the window (the layer's reach) a query attends to compressed entries. Entry i is
RoPE(RMSNorm(sum_j softmax_j(z_j + b_j) * c_j)) over the tokens of block i, per channel, with c = x W_C, z = x W_Z;
the query at position t (from 1) sees the first floor(t / m). One softmax, with a learned sink for each head, over both.

* hca (heavily compressed): m = 128, every entry is attended to.
* csa (compressed sparse): m = 4; c and z have two halves, and an entry pools the first halves of the block before its
  own and the second halves of its own (overlap). An indexer with pooled keys of its own picks the top k entries:
  score = sum_h w_h relu(q_h . k).
* tied-mqa: no entries (ratio 0), the window alone.

The output projection is low-rank in groups of heads. Source: DeepSeek-V4, section 2.3, as in transformers 5.24
`models/deepseek_v4`; parameter names are those of transformers.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

from attncalc.attention.base import Attention, HeadShape, Step, check_tp, require
from attncalc.axes import Dim, Weight
from attncalc.cache import CacheTensor
from attncalc.errors import AttncalcError
from attncalc.ops import (
    RMS_NORM,
    ROTATION,
    SOFTMAX,
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

POOLING = 8  # bias of the position, softmax (5), product and sum
SINK = 4  # subtraction, exponential, addition to the sum; the maximum


@dataclass(frozen=True)
class CSA:
    """Dimensions.

    `rope_dim`: the last values of a row, of an entry, of an index key that are rotated. `o_groups` groups of heads
    are each projected to `o_lora_rank`. `compress_ratio`: m, 0 for no entries. `index_heads`, `index_head_dim`,
    `index_topk`: the indexer, all 0 without one; with it the blocks overlap.
    """

    hidden_size: int
    num_heads: int
    head_dim: int
    rope_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    compress_ratio: int
    index_heads: int = 0
    index_head_dim: int = 0
    index_topk: int = 0

    forms: ClassVar[tuple[str, ...]] = ("direct",)
    source: ClassVar[str] = "DeepSeek-V4 section 2.3; transformers 5.24 models/deepseek_v4"
    score_block: ClassVar[int] = 512
    """Queries whose scores the torch layer holds at a time; no fused kernel has sinks and entries."""

    def __post_init__(self) -> None:
        require(self, "hidden_size", "num_heads", "head_dim", "q_lora_rank", "o_groups", "o_lora_rank")
        require(self, "rope_dim", "compress_ratio", "index_heads", "index_head_dim", "index_topk", minimum=0)
        if self.num_heads % self.o_groups:
            raise AttncalcError("o_groups", f"must divide num_heads {self.num_heads}", got=self.o_groups)
        if self.rope_dim > self.head_dim or self.rope_dim % 2:
            rule = f"must be even and at most head_dim {self.head_dim}"
            raise AttncalcError("rope_dim", rule, got=self.rope_dim)
        names = ("index_heads", "index_head_dim", "index_topk")
        for name in names:
            if bool(getattr(self, name)) != self.sparse:
                raise AttncalcError(name, f"must be 0 or not 0 as {names[0]} is", got=getattr(self, name))
        if self.sparse and not self.compress_ratio:
            raise AttncalcError("index_heads", "must be 0 where there are no entries to index", got=self.index_heads)
        if self.sparse and self.rope_dim > self.index_head_dim:
            raise AttncalcError("rope_dim", f"must be at most index_head_dim {self.index_head_dim}", got=self.rope_dim)

    @property
    def variant(self) -> str:
        """csa, hca or tied-mqa."""
        if not self.compress_ratio:
            return "tied-mqa"
        return "csa" if self.sparse else "hca"

    @property
    def sparse(self) -> bool:
        """Whether an indexer picks entries."""
        return self.index_heads > 0

    @property
    def blocks_pooled(self) -> int:
        """Blocks that one entry pools, and halves of c and z: 2 where they overlap."""
        return 2 if self.sparse else 1

    @property
    def entries(self) -> Reach:
        """Which entries a query attends to."""
        return Reach("compressed", self.index_topk, self.compress_ratio)

    @property
    def indexed(self) -> Reach:
        """Which entries the indexer scores: all."""
        return Reach("compressed", 0, self.compress_ratio)

    def default_form(self, workload: Workload) -> str:  # noqa: ARG002
        """There is one form."""
        return "direct"

    @property
    def _axes(self) -> dict[str, Dim]:
        H, c, g, m = self.num_heads, self.head_dim, self.o_groups, self.compress_ratio
        halves = "2 * " if self.sparse else ""
        both = "(head_dim + index_head_dim)" if self.sparse else "head_dim"
        return {
            "D": Dim(self.hidden_size, "hidden_size"),
            "h": Dim(H, "num_heads"),
            "d": Dim(c, "head_dim"),
            "p": Dim(self.rope_dim, "rope_dim"),
            "q": Dim(self.q_lora_rank, "q_lora_rank"),
            "g": Dim(g, "o_groups"),
            "f": Dim(H * c // g, "num_heads / o_groups * head_dim"),
            "r": Dim(self.o_lora_rank, "o_lora_rank"),
            "m": Dim(m, "compress_ratio"),
            "o": Dim(self.blocks_pooled * m, f"{halves}compress_ratio"),
            "e": Dim(self.blocks_pooled * c, f"{halves}head_dim"),
            "i": Dim(self.index_heads, "index_heads"),
            "k": Dim(self.index_head_dim, "index_head_dim"),
            "l": Dim(self.blocks_pooled * self.index_head_dim, f"{halves}index_head_dim"),
            # c and z of a token, the indexer's beside them.
            "y": Dim(2 * self.blocks_pooled * (c + self.index_head_dim), f"2 * {halves}{both}"),
            "one": Dim(1, ""),
        }

    def weights(self, form: str) -> tuple[Weight, ...]:  # noqa: ARG002
        """D*Q + Q + Q*H*c + D*c + c + H + H*c*R + g*R*D; with o = 2 (csa) or 1 (hca): 2*o*D*c + o*m*c + c.

        Indexer of I heads of width K: 4*D*K + 2*m*K + K + Q*I*K + D*I. Linear weights are [out, in].
        """
        shapes = {
            "sinks": "h",
            "q_a_proj.weight": "q D",
            "q_a_norm.weight": "q",
            "q_b_proj.weight": "(h d) q",
            "kv_proj.weight": "d D",
            "kv_norm.weight": "d",
            "o_a_proj.weight": "(g r) f",
            "o_b_proj.weight": "D (g r)",
        }
        if self.compress_ratio:
            shapes |= _compressor("compressor", "e", "d")
        if self.sparse:
            shapes |= _compressor("compressor.indexer", "l", "k")
            shapes["compressor.indexer.q_b_proj.weight"] = "(i k) q"
            shapes["compressor.indexer.scorer.weights_proj.weight"] = "i D"
        axes = self._axes
        return tuple(Weight(name, shape, axes) for name, shape in shapes.items())

    def cache(self, reach: Reach, form: str) -> tuple[CacheTensor, ...]:  # noqa: ARG002
        """Window rows c, entries floor(S / m) of c and, with an indexer, of its key; the compressor's state, constant.

        The state holds c and z of the last o*m tokens: what the next entry may need.
        """
        axes, one = self._axes, self._axes["one"]
        out = [CacheTensor("window_kv", "shared_kv", one, axes["d"], reach)]
        if self.compress_ratio:
            out.append(CacheTensor("compressed_kv", "shared_kv", one, axes["d"], self.indexed))
        if self.sparse:
            out.append(CacheTensor("index_k", "index", one, axes["k"], self.indexed))
        if self.compress_ratio:
            out.append(CacheTensor("compressor_state", "state", one, axes["y"], None, axes["o"].size))
        return tuple(out)

    def ops(self, step: Step, form: str, *, cached: str) -> Ops:  # noqa: ARG002
        """Projections, the indexer 2*B*I*K*N over all entries, and the core 4*B*H*c*N over window and chosen entries.

        N attended pairs; `dense` scores every entry and masks, as transformers does. A row is read once for scores
        and values. The state's rows of the new tokens are written; those of earlier tokens are read by a step that
        completes an entry.
        """
        axes = self._axes | step.axes | self._step_axes(step)
        x, q_a = activation("x", "b t D"), activation("q_a", "b t q")
        new_row = Part("window_kv", "b t d", "cache_write", "shared_kv")
        products = [
            product("q_a_proj", x, weight("q_a_proj", "q D"), q_a, axes),
            product("q_b_proj", q_a, weight("q_b_proj", "h d q"), activation("q", "b t h d"), axes),
            product("kv_proj", x, weight("kv_proj", "d D"), new_row, axes),
        ]
        if self.compress_ratio:
            entry = Part("compressed_kv", "b n d", "cache_write", "shared_kv")
            products += self._compress("compressor_kv_proj", "compressor_gate_proj", "e", entry, axes)
        if self.sparse:
            entry = Part("index_k", "b n k", "cache_write", "index")
            products += self._compress("index_k_proj", "index_gate_proj", "l", entry, axes)
            products += self._index(step, axes)
        rows = [Part("window_kv", "b w d", "cache", "shared_kv")]
        if self.compress_ratio:
            rows.append(Part("compressed_kv", "b c d", "cache", "shared_kv"))
        q, attn = Term("b t h d", (activation("q", "b t h d"),)), Term("b t h d", (activation("attn", "b t h d"),))
        scores, read = Term("b t h s", (on_chip("scores", "b t h s"),)), Term("b s d", (on_chip("kv", "b s d"),))
        pairs = self._pairs(step)
        o_a, y = activation("o_a", "b t g r"), activation("y", "b t D")
        products += [
            Contraction("score", q, Term("b s d", tuple(rows)), scores, axes, *pairs),
            Contraction("value", scores, read, attn, axes, *pairs),
            product("o_a_proj", activation("attn", "b t g f"), weight("o_a_proj", "g r f"), o_a, axes),
            product("o_b_proj", o_a, weight("o_b_proj", "D (g r)"), y, axes),
        ]
        return Ops(tuple(products), self._rowwise(step, axes))

    def _step_axes(self, step: Step) -> dict[str, Dim]:
        w, m = step.workload, self.compress_ratio
        window = step.axes["s"]
        if not m:
            return {"w": window}
        before, rows = w.context - w.new_tokens, self.blocks_pooled * m
        made, read = w.context // m - before // m, self.entries.keys(w.new_tokens, w.context, step.count)
        # The first new entry pools from this token on.
        first = max(0, (before // m - self.blocks_pooled + 1) * m)
        return {
            "w": window,
            "c": Dim(read, "entries"),
            "s": Dim(window.size + read, f"{window.label} + entries"),
            "n": Dim(made, "new_entries"),
            "u": Dim(min(w.new_tokens, rows), "new_state_rows"),
            "a": Dim(max(0, w.new_tokens - rows), "new_tokens - new_state_rows"),
            "z": Dim(before - first if made else 0, "earlier_state_rows"),
        }

    def _pairs(self, step: Step) -> tuple[int, str]:
        """Of the window and of the entries."""
        w, count = step.workload, step.count
        formula = step.reach.pairs_formula(count)
        if not self.compress_ratio:
            return step.pairs, formula
        entries = self.entries.pairs(w.new_tokens, w.context, count)
        return step.pairs + entries, f"{formula}; plus, of entries, {self.entries.pairs_formula(count)}"

    def _compress(self, kv: str, gate: str, width: str, entry: Part, axes: dict[str, Dim]) -> list[Contraction]:
        """Products c and z of the new tokens: state rows, and with z the entries that are complete now."""

        def projection(name: str, earlier: tuple[Part, ...], made: tuple[Part, ...]) -> Contraction:
            state = Part("compressor_state", f"b u {width}", "cache_write", "state")
            left = Term("b t D", (activation("x", "b t D"), *earlier))
            out = Term(f"b t {width}", (state, activation("compressor", f"b a {width}"), *made))
            return product(name, left, weight(name, f"{width} D"), out, axes)

        earlier = Part("compressor_state", f"b z {width}", "cache", "state")
        return [projection(kv, (earlier,), ()), projection(gate, (earlier,), (entry,))]

    def _index(self, step: Step, axes: dict[str, Dim]) -> list[Contraction]:
        """Queries from the query latent, a weight for each head, and a score for every entry."""
        w, q_a, x = step.workload, activation("q_a", "b t q"), activation("x", "b t D")
        q = activation("index_q", "b t i k")
        all_entries = self.indexed.keys(w.new_tokens, w.context, "dense")
        axes = axes | {"s": Dim(all_entries, "context div compress_ratio")}
        pairs = self.indexed.pairs(w.new_tokens, w.context, step.count), self.indexed.pairs_formula(step.count)
        keys = Term("b s k", (Part("index_k", "b s k", "cache", "index"),))
        scores = Term("b t i s", (on_chip("index_scores", "b t i s"),))
        return [
            product("index_q_proj", q_a, weight("index_q_proj", "i k q"), q, axes),
            product("index_weights_proj", x, weight("index_weights_proj", "i D"), activation("index_w", "b t i"), axes),
            Contraction("index_score", Term("b t i k", (q,)), keys, scores, axes, *pairs),
        ]

    def _rowwise(self, step: Step, axes: dict[str, Dim]) -> tuple[Rowwise, ...]:
        out = [
            Rowwise("q_a_norm", "b t q", RMS_NORM, axes),
            Rowwise("q_b_norm", "b t h d", RMS_NORM - 1, axes),  # no weight
            Rowwise("kv_norm", "b t d", RMS_NORM, axes),
            Rowwise("q_rope", "b t h p", ROTATION, axes),
            Rowwise("kv_rope", "b t p", ROTATION, axes),
        ]
        if self.compress_ratio:
            out += _pooling("compressor", "d", axes)
        if self.sparse:
            w = step.workload
            scored = self.indexed.pairs(w.new_tokens, w.context, step.count), self.indexed.pairs_formula(step.count)
            out += [
                *_pooling("index", "k", axes),
                Rowwise("index_q_rope", "b t i p", ROTATION, axes),
                Rowwise("index_head_sum", "b i", 3, axes, *scored),  # ReLU, product with the head's weight, sum
                Rowwise("index_top_k", "b", 1, axes, *scored),  # one comparison for each scored entry
            ]
        out += [
            Rowwise("softmax", "b h", SOFTMAX, axes, *self._pairs(step)),
            Rowwise("sink", "b h t", SINK, axes),
            Rowwise("output_rope", "b t h p", ROTATION, axes),
        ]
        return tuple(out)

    def heads(self, form: str) -> HeadShape:  # noqa: ARG002
        """H query heads on one KV head."""
        return HeadShape(self.num_heads, 1, self.head_dim, self.head_dim)

    def query_heads(self) -> int:
        """H."""
        return self.num_heads

    def shard(self, tp: int) -> "CSA":
        """H / tp heads and o_groups / tp groups; the down-projections, compressors, indexer and caches replicated."""
        check_tp(tp, self.num_heads)
        if self.o_groups % tp:
            raise AttncalcError("--tp", f"must divide the {self.o_groups} output groups", got=tp)
        return replace(self, num_heads=self.num_heads // tp, o_groups=self.o_groups // tp)

    def with_kv_heads(self, kv_heads: int) -> Attention | None:
        """An attention of the same heads and widths with K and V apart."""
        from attncalc.attention.gqa import GQA

        return GQA(self.hidden_size, self.num_heads, kv_heads, self.head_dim, self.head_dim, self.rope_dim)


def _compressor(place: str, wide: str, width: str) -> dict[str, str]:
    return {
        f"{place}.kv_proj.weight": f"{wide} D",
        f"{place}.gate_proj.weight": f"{wide} D",
        f"{place}.position_bias": f"m {wide}",
        f"{place}.kv_norm.weight": width,
    }


def _pooling(name: str, width: str, axes: dict[str, Dim]) -> list[Rowwise]:
    """Of the entries that the step completes."""
    return [
        Rowwise(f"{name}_pool", f"b n o {width}", POOLING, axes),
        Rowwise(f"{name}_norm", f"b n {width}", RMS_NORM, axes),
        Rowwise(f"{name}_rope", "b n p", ROTATION, axes),
    ]
