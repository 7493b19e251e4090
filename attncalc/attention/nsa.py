"""Native Sparse Attention: three branches on one K and V, of which a decode step reads little (arXiv 2502.11089).

Compression: one entry for every l tokens, one each d tokens, made of K and of V by a mean or a small MLP; a query
attends to all entries that are complete. Selection: n blocks of l' tokens for each KV head; the first blocks and the
query's own and last ones always, the others by the attention that the compressed entries of their tokens get, summed
over the heads of a KV head (equations 8 to 12). Window: the last w tokens. A sigmoid gate for each head and branch
weighs the three outputs.

The branches read the same K and V, as in flash-linear-attention; the paper's own projections for each branch are not
modelled. Keys are rotated before they are compressed.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

from attncalc.attention.base import Attention, HeadShape, Step, check_tp, require
from attncalc.attention.gqa import GQA
from attncalc.axes import Dim, Weight
from attncalc.cache import CacheTensor
from attncalc.errors import AttncalcError
from attncalc.ops import (
    ACTIVATION,
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
from attncalc.reach import FULL, Reach
from attncalc.workload import Workload

BRANCHES = ("compress", "select", "window")


def check_full(variant: str, reach: Reach) -> None:
    """Refuse a reach: a block-sparse layer says itself what a query attends to."""
    if reach != FULL:
        raise AttncalcError("reach", f"must be full, {variant} has its own", got=reach.text)


def unread_rows(reach: Reach, start: int, new_tokens: int) -> int:
    """Rows from before the step of which it makes compressed entries; 0 where none is completed."""
    made = reach.stored(start + new_tokens) - reach.stored(start)
    return start - reach.block * reach.stored(start) if made else 0


@dataclass(frozen=True)
class NSA:
    """l `compress_size`, d `compress_stride`, l' `block_size`, n `blocks` (forced ones included), w `window`.

    `compress_hidden` is the width of the MLP that makes an entry of l positions, with an embedding of the position
    within the block; 0 is the mean. The paper does not state a width. `initial_blocks` and `local_blocks` are always
    selected.
    """

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    rope_dim: int = 0
    compress_size: int = 32
    compress_stride: int = 16
    compress_hidden: int = 0
    block_size: int = 64
    blocks: int = 16
    initial_blocks: int = 1
    local_blocks: int = 2
    window: int = 512

    forms: ClassVar[tuple[str, ...]] = ("direct",)
    source: ClassVar[str] = "arXiv 2502.11089 sections 3.2 and 3.3; flash-linear-attention layers/nsa.py"

    def __post_init__(self) -> None:
        require(self, "hidden_size", "num_heads", "num_kv_heads", "head_dim", "v_head_dim", "window")
        require(self, "compress_size", "compress_stride", "block_size", "blocks", "local_blocks")
        require(self, "rope_dim", "compress_hidden", "initial_blocks", minimum=0)
        if self.num_heads % self.num_kv_heads:
            raise AttncalcError("num_kv_heads", f"must divide num_heads {self.num_heads}", got=self.num_kv_heads)
        if self.rope_dim > self.head_dim or self.rope_dim % 2:
            raise AttncalcError("rope_dim", f"must be even and at most head_dim {self.head_dim}", got=self.rope_dim)
        for name in ("compress_size", "block_size"):
            if getattr(self, name) % self.compress_stride:
                rule = f"must be a multiple of compress_stride {self.compress_stride}"
                raise AttncalcError(name, rule, got=getattr(self, name))
        if self.initial_blocks + self.local_blocks > self.blocks:
            raise AttncalcError("blocks", "must hold the initial and the local ones", got=self.blocks)

    @property
    def variant(self) -> str:
        """The id in the registry."""
        return "nsa"

    def default_form(self, workload: Workload) -> str:  # noqa: ARG002
        """There is one form."""
        return "direct"

    @property
    def reaches(self) -> dict[str, Reach]:
        """What a query attends to, by branch."""
        return {
            "compress": Reach("compressed", block=self.compress_stride, span=self.compress_size),
            "select": Reach("blocks", self.blocks, self.block_size),
            "window": Reach("window", self.window),
        }

    def tokens_read(self, context: int) -> int:
        """Rows that one KV head reads in a decode step: floor((S - l) / d) + 1 entries, the blocks, the window."""
        return sum(r.pairs(1, context, "causal") for r in self.reaches.values())

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
            "c": Dim(len(BRANCHES), "branches"),
            "l": Dim(self.compress_size, "compress_size"),
            "m": Dim(self.compress_hidden, "compress_hidden"),
        }

    def weights(self, form: str) -> tuple[Weight, ...]:  # noqa: ARG002
        """D*H*d + D*G*(d + e) + H*e*D of GQA, 3*D*H of the gates; with an MLP l*(d + e) + M*(l + 1)*(d + e)."""
        axes = self._axes
        shapes = {
            "q_proj.weight": "(g j d) D",
            "k_proj.weight": "(g d) D",
            "v_proj.weight": "(g e) D",
            "o_proj.weight": "D (g j e)",
            "gate_proj.weight": "(g j c) D",
        }
        if self.compress_hidden:
            for side, width in (("k", "d"), ("v", "e")):
                shapes |= {
                    f"compress_{side}.position": f"l {width}",
                    f"compress_{side}.up.weight": f"m (l {width})",
                    f"compress_{side}.down.weight": f"{width} m",
                }
        return tuple(Weight(name, shape, axes) for name, shape in shapes.items())

    def cache(self, reach: Reach, form: str) -> tuple[CacheTensor, ...]:  # noqa: ARG002
        """K [B, G, S, d], V [B, G, S, e] and their entries, floor((S - l) / d) + 1 of each."""
        check_full(self.variant, reach)
        axes, entries = self._axes, self.reaches["compress"]
        return (
            CacheTensor("k", "key", axes["g"], axes["d"], FULL),
            CacheTensor("v", "value", axes["g"], axes["e"], FULL),
            CacheTensor("compressed_k", "key", axes["g"], axes["d"], entries),
            CacheTensor("compressed_v", "value", axes["g"], axes["e"], entries),
        )

    def ops(self, step: Step, form: str, *, cached: str) -> Ops:  # noqa: ARG002
        """Projections, entries, and for each branch scores 2*B*H*d*N and values 2*B*H*e*N; N its attended pairs."""
        check_full(self.variant, step.reach)
        w, branches = step.workload, {n: Step(step.workload, r, step.count) for n, r in self.reaches.items()}
        entries, start = self.reaches["compress"], step.workload.context - step.workload.new_tokens
        axes: dict[str, Dim] = {
            **self._axes,
            **step.axes,
            "n": Dim(entries.stored(w.context) - entries.stored(start), "new entries"),
            "r": Dim(unread_rows(entries, start, w.new_tokens), "rows of new entries"),
        }
        x = activation("x", "b t D")
        q, gate = activation("q", "b g j t d"), activation("gate", "b g j c t")
        products: list[Contraction] = [product("q_proj", x, weight("q_proj", "g j d D"), q, axes)]
        for side, width, kind in (("k", "d", "key"), ("v", "e", "value")):
            # The rows of earlier tokens that new entries are made of are read again; the entries are written.
            made = (
                Part(side, f"b g t {width}", "cache_write", kind),
                Part(f"{side}_of_entries", f"b g r {width}", "cache", kind),
                Part(f"compressed_{side}", f"b g n {width}", "cache_write", kind),
            )
            out = Term(f"b g t {width}", made)
            products.append(product(f"{side}_proj", x, weight(f"{side}_proj", f"g {width} D"), out, axes))
            if self.compress_hidden:
                products += self._mlp(side, width, axes)
        for name, branch in branches.items():
            of = axes | branch.axes
            k, v = ("compressed_k", "compressed_v") if name == "compress" else ("k", "v")
            scores = on_chip("scores", "b g j t s")
            k_part, v_part = Part(k, "b g s d", "cache", "key"), Part(v, "b g s e", "cache", "value")
            out_part = activation("attn", "b g j t e") if name == "window" else on_chip("attn", "b g j t e")
            products += [
                branch.coupled(f"{name}_score", q if name == "compress" else on_chip("q", q.shape), k_part, scores, of),
                branch.coupled(f"{name}_value", scores, v_part, out_part, of),
            ]
        products += [
            product("gate_proj", x, weight("gate_proj", "g j c D"), gate, axes),
            product(
                "o_proj",
                activation("attn", "b g j t e"),
                weight("o_proj", "D (g j e)"),
                activation("y", "b t D"),
                axes,
            ),
        ]
        return Ops(tuple(products), self._rowwise(branches, axes))

    def _mlp(self, side: str, width: str, axes: dict[str, Dim]) -> list[Contraction]:
        """An entry of l rows: (l * width) -> M -> width; what goes in and out is counted with the projection."""
        rows, mid = on_chip("rows", f"b g n l {width}"), on_chip("mid", "b g n m")
        up, down = weight(f"compress_{side}.up", f"m (l {width})"), weight(f"compress_{side}.down", f"{width} m")
        return [
            product(f"compress_{side}_up", rows, up, mid, axes),
            product(f"compress_{side}_down", mid, down, on_chip(f"compressed_{side}", f"b g n {width}"), axes),
        ]

    def _rowwise(self, branches: dict[str, Step], axes: dict[str, Dim]) -> tuple[Rowwise, ...]:
        out = []
        if self.rope_dim:
            out += [Rowwise("q_rope", "b t h p", ROTATION, axes), Rowwise("k_rope", "b t g p", ROTATION, axes)]
        if self.compress_hidden:
            out += [Rowwise(f"compress_{s}_position", f"b g n l {w}", 1, axes) for s, w in (("k", "d"), ("v", "e"))]
            out += [Rowwise(f"compress_{s}_activation", "b g n m", ACTIVATION, axes) for s in "kv"]
        else:
            # l - 1 sums and a product for each value.
            l = self.compress_size  # noqa: E741
            out += [Rowwise(f"compress_{s}_mean", f"b g n {w}", l, axes) for s, w in (("k", "d"), ("v", "e"))]
        for name, branch in branches.items():
            formula = branch.reach.pairs_formula(branch.count)
            out.append(Rowwise(f"{name}_softmax", "b h", SOFTMAX, axes | branch.axes, branch.pairs, formula))
        # The attention of an entry is summed over the heads, added to each of its l / d pieces, and a block sums its
        # own; then each block that a query could select is compared.
        entries, each = branches["compress"], self.compress_size // self.compress_stride
        formula = entries.reach.pairs_formula(entries.count)
        out.append(Rowwise("head_sum", "b h", 1, axes | entries.axes, entries.pairs, formula))
        out.append(Rowwise("block_sum", "b g", each, axes | entries.axes, entries.pairs, formula))
        seen = Step(entries.workload, Reach("compressed", block=self.block_size, span=1), entries.count)
        out.append(Rowwise("block_top_k", "b g", 1, axes | seen.axes, seen.pairs, seen.reach.pairs_formula(seen.count)))
        out.append(Rowwise("gate_sigmoid", "b t h c", 1, axes))
        out.append(Rowwise("gate", "b t h e", 2 * len(BRANCHES) - 1, axes))
        return tuple(out)

    def sparse_from_context(self) -> int:
        """The smallest context at which a decode step costs fewer FLOPs than full attention of the same heads.

        Score and value products save 2*H*(d + e) for each row that is not read; the gates cost 2*D*3H, and the MLP's
        products are shared out over the d steps in which one entry is made.
        """
        width = self.head_dim + self.v_head_dim
        mlp = 2 * self.num_kv_heads * self.compress_hidden * (self.compress_size + 1) * width
        gates = 2 * self.hidden_size * len(BRANCHES) * self.num_heads
        context = self.window  # below the window and the blocks alone read more than there is
        while (
            2 * self.num_heads * width * (context - self.tokens_read(context)) * self.compress_stride
            <= gates * self.compress_stride + mlp
        ):
            context += 1
        return context

    def heads(self, form: str) -> HeadShape:  # noqa: ARG002
        """H query heads on G KV heads."""
        return HeadShape(self.num_heads, self.num_kv_heads, self.head_dim, self.v_head_dim)

    def query_heads(self) -> int:
        """H."""
        return self.num_heads

    def shard(self, tp: int) -> "NSA":
        """H / tp query heads and max(1, G / tp) KV heads; what makes entries is replicated."""
        check_tp(tp, self.num_heads, self.num_kv_heads)
        return replace(self, num_heads=self.num_heads // tp, num_kv_heads=max(1, self.num_kv_heads // tp))

    def with_kv_heads(self, kv_heads: int) -> Attention | None:
        """Full attention of the same heads."""
        return GQA(self.hidden_size, self.num_heads, kv_heads, self.head_dim, self.v_head_dim, self.rope_dim)
