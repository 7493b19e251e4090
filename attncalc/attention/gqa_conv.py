"""GQA whose K and V pass a short convolution, with a learned bias by distance instead of a rotation (Inkling).

k' = k + conv(k), v' = v + conv(v), causal depthwise convolutions over W tokens; RMSNorm on q and on k' in each head;
scores (q . k') / d + b. The bias b mixes learned profiles over distances: the query token's relative state, R values
for each head (r_proj), times a matrix R x E gives a value for each of E distances; beyond them it is zero. Kept beside
K and V are the last W - 1 columns of k and v before their convolutions. Source: transformers 5.24 `models/inkling`.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

from attncalc.attention.base import Attention, HeadShape, Step, require
from attncalc.attention.conv import conv_axes, conv_cache, conv_product
from attncalc.attention.gqa import GQA
from attncalc.axes import Axes, Dim, Weight
from attncalc.cache import CacheTensor
from attncalc.ops import Contraction, Ops, Part, Rowwise, Term, activation, on_chip, product, term, weight
from attncalc.reach import Reach
from attncalc.workload import Workload


@dataclass(frozen=True)
class ConvGQA:
    """`conv_kernel` W taps; `rel_dim` R values of a head's relative state, `rel_extent` E distances with a bias."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    conv_kernel: int
    rel_dim: int
    rel_extent: int

    forms: ClassVar[tuple[str, ...]] = ("direct",)
    source: ClassVar[str] = "transformers 5.24 models/inkling"

    def __post_init__(self) -> None:
        require(self, "conv_kernel", "rel_dim", "rel_extent")
        _ = self.gqa  # checks the rest

    @property
    def variant(self) -> str:
        """The id in the registry."""
        return "gqa-conv"

    def default_form(self, workload: Workload) -> str:  # noqa: ARG002
        """There is one form."""
        return "direct"

    @property
    def gqa(self) -> GQA:
        """The attention without convolutions and bias."""
        return GQA(self.hidden_size, self.num_heads, self.num_kv_heads, self.head_dim, self.v_head_dim, qk_norm="head")

    @property
    def _axes(self) -> dict[str, Dim]:
        G = self.num_kv_heads
        channels = Dim(G * (self.head_dim + self.v_head_dim), "num_kv_heads * (head_dim + v_head_dim)")
        return {
            "D": Dim(self.hidden_size, "hidden_size"),
            "h": Dim(self.num_heads, "num_heads"),
            "g": Dim(G, "num_kv_heads"),
            "d": Dim(self.head_dim, "head_dim"),
            "e": Dim(self.v_head_dim, "v_head_dim"),
            "r": Dim(self.rel_dim, "rel_dim"),
            "x": Dim(self.rel_extent, "rel_extent"),
            "one": Dim(1, "1"),
        } | conv_axes(channels, self.conv_kernel)

    def extra_weights(self) -> tuple[Weight, ...]:
        """D*H*R + R*E + W*G*(d + e): what GQA has not."""
        shapes = {
            "r_proj.weight": "(h r) D",
            "k_sconv.conv1d.weight": "(g d) one w",
            "v_sconv.conv1d.weight": "(g e) one w",
            "rel_logits_proj.proj": "r x",
        }
        return tuple(Weight(name, shape, self._axes) for name, shape in shapes.items())

    def weights(self, form: str) -> tuple[Weight, ...]:
        """Those of GQA with norms of q and k, of the convolutions and of the bias."""
        return self.gqa.weights(form) + self.extra_weights()

    def cache(self, reach: Reach, form: str) -> tuple[CacheTensor, ...]:
        """K [B, G, S, d], V [B, G, S, e] and, constant, conv_state [B, 1, W - 1, G*(d + e)]."""
        return (*self.gqa.cache(reach, form), *conv_cache(self._axes))

    def ops(self, step: Step, form: str, *, cached: str) -> Ops:
        """GQA, convolutions 2*B*T*W*G*(d + e), and the bias over all its distances, 2*B*T*H*R*E."""
        inner, axes = self.gqa.ops(step, form, cached=cached), self._axes | step.axes
        x, relative = activation("x", "b t D"), activation("relative", "b h t r")
        q_proj, k_proj, v_proj, *rest = inner.contractions
        products = (
            q_proj,
            # It is the convolution that writes K and V.
            k_proj._replace(out=term(activation("k", "b g t d"))),
            v_proj._replace(out=term(activation("v", "b g t e"))),
            self._convolution(axes),
            product("r_proj", x, weight("r_proj", "h r D"), relative, axes),
            product("rel_bias", relative, weight("rel_logits_proj", "r x"), on_chip("bias", "b h t x"), axes),
            *rest,
        )
        rowwise = (
            Rowwise("conv_input", "b t c", 1, axes),  # added to what the convolution gives
            Rowwise("rel_bias_add", "b h", 1, axes, step.pairs, step.reach.pairs_formula(step.count)),
        )
        return Ops(products, rowwise + inner.rowwise)

    @staticmethod
    def _convolution(axes: Axes) -> Contraction:
        """Of k and v together: it reads the columns that are kept, and writes K and V."""
        op = conv_product(dict(axes))
        kept = tuple(p for p in op.out.parts if p.role == "cache_write")
        keys, values = Part("k", "b g t d", "cache_write", "key"), Part("v", "b g t e", "cache_write", "value")
        return op._replace(out=Term(op.out.shape, (keys, values, *kept)))

    def heads(self, form: str) -> HeadShape:
        """H query heads on G KV heads."""
        return self.gqa.heads(form)

    def query_heads(self) -> int:
        """H."""
        return self.num_heads

    def shard(self, tp: int) -> "ConvGQA":
        """H / tp query heads and max(1, G / tp) KV heads with their channels; the bias profiles are replicated."""
        part = self.gqa.shard(tp)
        return replace(self, num_heads=part.num_heads, num_kv_heads=part.num_kv_heads)

    def with_kv_heads(self, kv_heads: int) -> Attention | None:
        """The same layer with another number of KV heads."""
        return replace(self, num_kv_heads=kv_heads)
