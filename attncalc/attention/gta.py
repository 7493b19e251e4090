"""Grouped-tied attention: one state of each group is its value, and the part of its key that is not rotated.

State kv_g = x W_KV,g of d values; v_g = kv_g, k_g = [first d - R values of kv_g; k_pe], where the RoPE key
k_pe = RoPE(x W_KR) of R values is shared by all groups; query head i reads group i // (H / G), scores scaled by d^-1/2.
Cached elements per token: G*d + R, about half of a GQA's. Source: arXiv 2505.21487 (R = d/2).
"""

from dataclasses import dataclass, replace
from typing import ClassVar

from attncalc.attention.base import Attention, HeadShape, Step, check_tp, require
from attncalc.axes import Dim, Weight
from attncalc.cache import CacheTensor
from attncalc.errors import AttncalcError
from attncalc.ops import ROTATION, Ops, Part, Rowwise, Term, activation, on_chip, product, weight
from attncalc.reach import Reach
from attncalc.workload import Workload


@dataclass(frozen=True)
class GTA:
    """Dimensions. `rope_dim` R: values of a key that the shared RoPE key gives; 0: K is V."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_dim: int

    forms: ClassVar[tuple[str, ...]] = ("direct",)
    source: ClassVar[str] = "arXiv 2505.21487"

    def __post_init__(self) -> None:
        require(self, "hidden_size", "num_heads", "num_kv_heads", "head_dim")
        require(self, "rope_dim", minimum=0)
        if self.num_heads % self.num_kv_heads:
            rule = f"must divide num_heads {self.num_heads}"
            raise AttncalcError("num_kv_heads", rule, got=self.num_kv_heads)
        if self.rope_dim > self.head_dim or self.rope_dim % 2:
            rule = f"must be even and at most head_dim {self.head_dim}"
            raise AttncalcError("rope_dim", rule, got=self.rope_dim)

    @property
    def variant(self) -> str:
        """The id in the registry."""
        return "gta"

    def default_form(self, workload: Workload) -> str:  # noqa: ARG002
        """There is one form."""
        return "direct"

    @property
    def _axes(self) -> dict[str, Dim]:
        G = self.num_kv_heads
        return {
            "D": Dim(self.hidden_size, "hidden_size"),
            "h": Dim(self.num_heads, "num_heads"),
            "g": Dim(G, "num_kv_heads"),
            "j": Dim(self.num_heads // G, "num_heads / num_kv_heads"),
            "d": Dim(self.head_dim, "head_dim"),
            "p": Dim(self.rope_dim, "rope_dim"),
            "one": Dim(1, ""),
        }

    def weights(self, form: str) -> tuple[Weight, ...]:  # noqa: ARG002
        """D*H*d + D*G*d + D*R + H*d*D. Linear weights are [out, in]."""
        shapes = {"q_proj.weight": "(g j d) D", "kv_proj.weight": "(g d) D"}
        if self.rope_dim:
            shapes["k_pe_proj.weight"] = "p D"
        shapes["o_proj.weight"] = "D (g j d)"
        axes = self._axes
        return tuple(Weight(name, shape, axes) for name, shape in shapes.items())

    def cache(self, reach: Reach, form: str) -> tuple[CacheTensor, ...]:  # noqa: ARG002
        """The tied state kv [B, G, S, d], in one format for K and V, and k_pe [B, 1, S, R]."""
        axes = self._axes
        tied = CacheTensor("kv", "latent", axes["g"], axes["d"], reach)
        if not self.rope_dim:
            return (tied,)
        return (tied, CacheTensor("k_pe", "rope_key", axes["one"], axes["p"], reach))

    def ops(self, step: Step, form: str, *, cached: str) -> Ops:  # noqa: ARG002
        """Projections, scores and values 2*B*H*d*N each as in a GQA, output; N attended pairs.

        The tied state is read once: whole with the scores, and on chip for the values.
        """
        axes = self._axes | step.axes
        x, q, o = activation("x", "b t D"), activation("q", "b g j t d"), activation("attn", "b g j t d")
        scores = on_chip("scores", "b g j t s")
        new, kept = Part("kv", "b g t d", "cache_write", "latent"), Part("kv", "b g s d", "cache", "latent")
        products = [
            product("q_proj", x, weight("q_proj", "g j d D"), q, axes),
            product("kv_proj", x, weight("kv_proj", "g d D"), new, axes),
        ]
        key_parts: tuple[Part, ...] = (kept,)
        if self.rope_dim:
            new_pe = Part("k_pe", "b t p", "cache_write", "rope_key")
            products.append(product("k_pe_proj", x, weight("k_pe_proj", "p D"), new_pe, axes))
            key_parts += (Part("k_pe", "b s p", "cache", "rope_key"),)
        products += [
            step.coupled("score", q, Term("b g s d", key_parts), scores, axes),
            step.coupled("value", scores, on_chip("kv", "b g s d"), o, axes),
            product("o_proj", o, weight("o_proj", "D g j d"), activation("y", "b t D"), axes),
        ]
        rowwise = [step.softmax(axes, "h")]
        if self.rope_dim:
            rotated = {"q": "b t h p", "k": "b t p"}
            rowwise = [*(Rowwise(f"{n}_rope", shape, ROTATION, axes) for n, shape in rotated.items()), *rowwise]
        return Ops(tuple(products), tuple(rowwise))

    def heads(self, form: str) -> HeadShape:  # noqa: ARG002
        """H query heads on G KV heads."""
        return HeadShape(self.num_heads, self.num_kv_heads, self.head_dim, self.head_dim)

    def query_heads(self) -> int:
        """H."""
        return self.num_heads

    def shard(self, tp: int) -> "GTA":
        """H / tp query heads and max(1, G / tp) tied states; the RoPE key is replicated."""
        check_tp(tp, self.num_heads, self.num_kv_heads)
        return replace(self, num_heads=self.num_heads // tp, num_kv_heads=max(1, self.num_kv_heads // tp))

    def with_kv_heads(self, kv_heads: int) -> Attention | None:
        """A GQA of the same widths."""
        from attncalc.attention.gqa import GQA

        return GQA(self.hidden_size, self.num_heads, kv_heads, self.head_dim, self.head_dim, self.rope_dim)
