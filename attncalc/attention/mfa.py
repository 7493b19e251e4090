"""Multi-matrix factorisation attention: MQA with many wide heads, whose query is made through a low rank.

q = RMSNorm(x W_S) W_Q of H heads of d, k = x W_K and v = x W_V of one head of d; RoPE on q and k, scores scaled by
d^-1/2. Cached elements per token: 2*d. Sources: arXiv 2412.19255 (the matrix S that all heads share is the
first factor of the query); Step-3 (arXiv 2507.19427): D 7168, 64 heads of 256, rank 2048, RMSNorm between the factors.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

from attncalc.attention.base import Attention, HeadShape, Step, check_tp, require
from attncalc.axes import Dim, Weight
from attncalc.cache import CacheTensor
from attncalc.errors import AttncalcError
from attncalc.ops import RMS_NORM, ROTATION, Ops, Part, Rowwise, activation, on_chip, product, weight
from attncalc.reach import Reach
from attncalc.workload import Workload


@dataclass(frozen=True)
class MFA:
    """Dimensions. `rope_dim`: rotated values of a head, 0 for NoPE. `q_norm`: RMSNorm between the query's factors."""

    hidden_size: int
    num_heads: int
    q_lora_rank: int
    head_dim: int
    rope_dim: int
    q_norm: bool = True

    forms: ClassVar[tuple[str, ...]] = ("direct",)
    source: ClassVar[str] = "arXiv 2412.19255; arXiv 2507.19427"

    def __post_init__(self) -> None:
        require(self, "hidden_size", "num_heads", "q_lora_rank", "head_dim")
        require(self, "rope_dim", minimum=0)
        if self.rope_dim > self.head_dim or self.rope_dim % 2:
            rule = f"must be even and at most head_dim {self.head_dim}"
            raise AttncalcError("rope_dim", rule, got=self.rope_dim)

    @property
    def variant(self) -> str:
        """The id in the registry."""
        return "mfa"

    def default_form(self, workload: Workload) -> str:  # noqa: ARG002
        """There is one form."""
        return "direct"

    @property
    def _axes(self) -> dict[str, Dim]:
        return {
            "D": Dim(self.hidden_size, "hidden_size"),
            "h": Dim(self.num_heads, "num_heads"),
            "q": Dim(self.q_lora_rank, "q_lora_rank"),
            "d": Dim(self.head_dim, "head_dim"),
            "p": Dim(self.rope_dim, "rope_dim"),
            "one": Dim(1, ""),
        }

    def weights(self, form: str) -> tuple[Weight, ...]:  # noqa: ARG002
        """D*(Q + 2*d) + Q + Q*H*d + H*d*D. Linear weights are [out, in]."""
        shapes = {"q_a_proj.weight": "q D"}
        if self.q_norm:
            shapes["q_a_layernorm.weight"] = "q"
        shapes |= {"q_b_proj.weight": "(h d) q", "k_proj.weight": "d D", "v_proj.weight": "d D"}
        shapes["o_proj.weight"] = "D (h d)"
        axes = self._axes
        return tuple(Weight(name, shape, axes) for name, shape in shapes.items())

    def cache(self, reach: Reach, form: str) -> tuple[CacheTensor, ...]:  # noqa: ARG002
        """K [B, 1, S, d] and V [B, 1, S, d]."""
        axes = self._axes
        return (
            CacheTensor("k", "key", axes["one"], axes["d"], reach),
            CacheTensor("v", "value", axes["one"], axes["d"], reach),
        )

    def ops(self, step: Step, form: str, *, cached: str) -> Ops:  # noqa: ARG002
        """Projections, scores and values 2*B*H*d*N each, output; N attended pairs."""
        axes = self._axes | step.axes
        x, q_a = activation("x", "b t D"), activation("q_a", "b t q")
        q, o, scores = activation("q", "b h t d"), activation("attn", "b h t d"), on_chip("scores", "b h t s")
        new_k, new_v = Part("k", "b t d", "cache_write", "key"), Part("v", "b t d", "cache_write", "value")
        products = (
            product("q_a_proj", x, weight("q_a_proj", "q D"), q_a, axes),
            product("q_b_proj", q_a, weight("q_b_proj", "h d q"), q, axes),
            product("k_proj", x, weight("k_proj", "d D"), new_k, axes),
            product("v_proj", x, weight("v_proj", "d D"), new_v, axes),
            step.coupled("score", q, Part("k", "b s d", "cache", "key"), scores, axes),
            step.coupled("value", scores, Part("v", "b s d", "cache", "value"), o, axes),
            product("o_proj", o, weight("o_proj", "D h d"), activation("y", "b t D"), axes),
        )
        rowwise = [Rowwise("q_a_norm", "b t q", RMS_NORM, axes)] if self.q_norm else []
        if self.rope_dim:
            rowwise += [Rowwise("q_rope", "b t h p", ROTATION, axes), Rowwise("k_rope", "b t p", ROTATION, axes)]
        return Ops(products, (*rowwise, step.softmax(axes, "h")))

    def heads(self, form: str) -> HeadShape:  # noqa: ARG002
        """H query heads on one KV head."""
        return HeadShape(self.num_heads, 1, self.head_dim, self.head_dim)

    def query_heads(self) -> int:
        """H."""
        return self.num_heads

    def shard(self, tp: int) -> "MFA":
        """H / tp heads; the KV head, its cache and the query's first factor are replicated."""
        check_tp(tp, self.num_heads)
        return replace(self, num_heads=self.num_heads // tp)

    def with_kv_heads(self, kv_heads: int) -> Attention | None:
        """A GQA of the same widths."""
        from attncalc.attention.gqa import GQA

        return GQA(self.hidden_size, self.num_heads, kv_heads, self.head_dim, self.head_dim, self.rope_dim)
