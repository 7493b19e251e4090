"""Grouped latent attention: each of h_c latents serves H / h_c heads, beside one RoPE key for all.

c_c = RMSNorm(x W_DKV,c) for latent c, k_pe = RoPE(x W_KR); head i of latent c = i // (H / h_c):
q_i = [q_nope; RoPE(q_pe)], k_i = [c_c W_UK,i; k_pe], v_i = c_c W_UV,i, scores scaled by (P + R)^-1/2. With h_c = 1 it
is MLA; unlike MLA's, its cache can be split, h_c / tp latents on each GPU. Cached elements per token: h_c*L + R.
Source: arXiv 2505.21487 (GLA-2: two latents of 2d, R = d/2). The published code norms a latent after it
reads the cache; here it is normed before it is stored, which gives the same output.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

from attncalc.attention import latent
from attncalc.attention.base import Attention, HeadShape, Step, check_tp, require
from attncalc.axes import Dim, Weight
from attncalc.cache import CacheTensor
from attncalc.errors import AttncalcError
from attncalc.ops import (
    RMS_NORM,
    ROTATION,
    Contraction,
    Ops,
    Part,
    Role,
    Rowwise,
    Term,
    activation,
    on_chip,
    product,
    weight,
)
from attncalc.reach import Reach
from attncalc.workload import Workload


@dataclass(frozen=True)
class GLA:
    """Dimensions and options.

    `num_latents` h_c latents of `kv_lora_rank` L. `q_lora_rank` None: the query has no low-rank path.
    `qk_rope_head_dim` 0: no RoPE key. `latent_norm`: RMSNorm on the query's latent and on each of the h_c.
    """

    hidden_size: int
    num_heads: int
    num_latents: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    latent_norm: bool = True

    forms: ClassVar[tuple[str, ...]] = ("absorbed", "expanded", "decompressed")
    source: ClassVar[str] = "arXiv 2505.21487"

    def __post_init__(self) -> None:
        require(self, "hidden_size", "num_heads", "num_latents", "kv_lora_rank", "v_head_dim")
        require(self, "qk_nope_head_dim")
        require(self, "qk_rope_head_dim", minimum=0)
        if self.num_heads % self.num_latents:
            rule = f"must be a multiple of num_latents {self.num_latents}"
            raise AttncalcError("num_heads", rule, got=self.num_heads)
        if self.q_lora_rank is not None:
            require(self, "q_lora_rank")
        if self.qk_rope_head_dim % 2:
            raise AttncalcError("qk_rope_head_dim", "must be even to be rotated", got=self.qk_rope_head_dim)

    @property
    def variant(self) -> str:
        """The id in the registry."""
        return "gla"

    def default_form(self, workload: Workload) -> str:
        """Absorbed, but decompressed for a whole prompt."""
        return latent.default_form(workload)

    @property
    def _axes(self) -> dict[str, Dim]:
        L, P, R, V = self.kv_lora_rank, self.qk_nope_head_dim, self.qk_rope_head_dim, self.v_head_dim
        return {
            "D": Dim(self.hidden_size, "hidden_size"),
            "h": Dim(self.num_heads, "num_heads"),
            "c": Dim(self.num_latents, "num_latents"),
            "j": Dim(self.num_heads // self.num_latents, "num_heads / num_latents"),
            "q": Dim(self.q_lora_rank or 0, "q_lora_rank"),
            "l": Dim(L, "kv_lora_rank"),
            "n": Dim(P, "qk_nope_head_dim"),
            "p": Dim(R, "qk_rope_head_dim"),
            "v": Dim(V, "v_head_dim"),
            "e": Dim(P + R, "qk_nope_head_dim + qk_rope_head_dim"),
            "r": Dim(L + R, "kv_lora_rank + qk_rope_head_dim"),
            "x": Dim(P + V, "qk_nope_head_dim + v_head_dim"),
            "one": Dim(1, ""),
        }

    def weights(self, form: str) -> tuple[Weight, ...]:  # noqa: ARG002
        """D*Q + Q + Q*H*(P+R) (or D*H*(P+R)) + D*(h_c*L + R) + h_c*L + L*H*(P+V) + H*V*D."""
        shapes = {}
        if self.q_lora_rank is not None:
            shapes["q_a_proj.weight"] = "q D"
            if self.latent_norm:
                shapes["q_a_layernorm.weight"] = "q"
            shapes["q_b_proj.weight"] = "(c j e) q"
        else:
            shapes["q_proj.weight"] = "(c j e) D"
        shapes["kv_a_proj.weight"] = "(c l) D"
        if self.qk_rope_head_dim:
            shapes["k_pe_proj.weight"] = "p D"
        if self.latent_norm:
            shapes["kv_a_layernorm.weight"] = "c l"
        shapes["kv_b_proj.weight"] = "(c j x) l"
        shapes["o_proj.weight"] = "D (c j v)"
        axes = self._axes
        return tuple(Weight(name, shape, axes) for name, shape in shapes.items())

    def cache(self, reach: Reach, form: str) -> tuple[CacheTensor, ...]:
        """c_kv [B, h_c, S, L] and k_pe [B, 1, S, R]; decompressed K [B, H, S, P+R] and V [B, H, S, V]."""
        axes = self._axes
        if form == "decompressed":
            return (
                CacheTensor("k", "key", axes["h"], axes["e"], reach),
                CacheTensor("v", "value", axes["h"], axes["v"], reach),
            )
        latents = CacheTensor("c_kv", "latent", axes["c"], axes["l"], reach)
        if not self.qk_rope_head_dim:
            return (latents,)
        return (latents, CacheTensor("k_pe", "rope_key", axes["one"], axes["p"], reach))

    def ops(self, step: Step, form: str, *, cached: str) -> Ops:
        """Absorbed core: 2*B*H*N*((L + R) + L); in head space 2*B*H*N*(P + R + V); N attended pairs."""
        axes = self._axes | step.axes
        x, y = activation("x", "b t D"), activation("y", "b t D")
        kept = cached == "decompressed"
        if kept and form != "decompressed":
            raise AttncalcError("--form", f"{form} reads latents, which are not kept where K and V are")
        if form == "decompressed" and not kept and step.workload.new_tokens < step.workload.context:
            rule = "decompressed needs K and V of all earlier tokens in the cache"
            raise AttncalcError("--form", rule, hint="Use expanded, which rebuilds them from the latent")
        q = activation("q", "b c j t e")
        products: list[Contraction] = []
        if self.q_lora_rank is not None:
            q_a = activation("q_a", "b t q")
            products.append(product("q_a_proj", x, weight("q_a_proj", "q D"), q_a, axes))
            products.append(product("q_b_proj", q_a, weight("q_b_proj", "c j e q"), q, axes))
        else:
            products.append(product("q_proj", x, weight("q_proj", "c j e D"), q, axes))
        role: Role = "activation" if kept else "cache_write"
        new = Part("c_kv", "b c t l", role, "activation" if kept else "latent")
        products.append(product("kv_a_proj", x, weight("kv_a_proj", "c l D"), new, axes))
        if self.qk_rope_head_dim:
            new_pe = Part("k_pe", "b t p", role, "activation" if kept else "rope_key")
            products.append(product("k_pe_proj", x, weight("k_pe_proj", "p D"), new_pe, axes))
        if form == "absorbed":
            products += self._latent_space(step, axes)
        else:
            products += self._head_space(step, form, axes, kept=kept)
        attn = activation("attn", "b c j t v")
        products.append(product("o_proj", attn, weight("o_proj", "D c j v"), y, axes))
        return Ops(tuple(products), self._rowwise(step, axes))

    def _rope_key(self) -> tuple[Part, ...]:
        return (Part("k_pe", "b s p", "cache", "rope_key"),) if self.qk_rope_head_dim else ()

    def _latent_space(self, step: Step, axes: dict[str, Dim]) -> list[Contraction]:
        q_latent, weighted = activation("q_latent", "b c j t l"), activation("attn_latent", "b c j t l")
        q_parts: tuple[Part, ...] = (q_latent,)
        if self.qk_rope_head_dim:
            q_parts += (activation("q_pe", "b c j t p"),)
        key = Term("b c s r", (Part("c_kv", "b c s l", "cache", "latent"), *self._rope_key()))
        scores = on_chip("scores", "b c j t s")
        w_uk, w_uv = weight("kv_b_proj[k]", "c j n l"), weight("kv_b_proj[v]", "c j v l")
        return [
            product("absorb_q", activation("q_nope", "b c j t n"), w_uk, q_latent, axes),
            step.coupled("score", Term("b c j t r", q_parts), key, scores, axes),
            step.coupled("value", scores, on_chip("c_kv", "b c s l"), weighted, axes),
            product("absorb_v", weighted, w_uv, activation("attn", "b c j t v"), axes),
        ]

    def _head_space(self, step: Step, form: str, axes: dict[str, Dim], *, kept: bool) -> list[Contraction]:
        rebuilt = "s" if form == "expanded" else "t"
        role: Role = "cache_write" if kept else "activation"
        wide = "e" if kept else "n"  # a cached K holds a copy of the RoPE key in each head
        k_new = Part("k", f"b c j {rebuilt} {wide}", role, "key" if kept else "activation")
        v_new = Part("v", f"b c j {rebuilt} v", role, "value" if kept else "activation")
        source = Part("c_kv", "b c s l", "cache", "latent") if form == "expanded" else activation("c_kv", "b c t l")
        both = Term(f"b c j {rebuilt} x", (k_new, v_new))
        if kept:
            key = Term("b c j s e", (Part("k", "b c j s e", "cache", "key"),))
            value = Part("v", "b c j s v", "cache", "value")
        else:
            key = Term("b c j s e", (activation("k", "b c j s n"), *self._rope_key()))
            value = activation("v", "b c j s v")
        scores = on_chip("scores", "b c j t s")
        return [
            product("kv_b_proj", source, weight("kv_b_proj", "c j x l"), both, axes),
            step.coupled("score", activation("q", "b c j t e"), key, scores, axes),
            step.coupled("value", scores, value, activation("attn", "b c j t v"), axes),
        ]

    def _rowwise(self, step: Step, axes: dict[str, Dim]) -> tuple[Rowwise, ...]:
        out = []
        if self.latent_norm:
            if self.q_lora_rank is not None:
                out.append(Rowwise("q_a_norm", "b t q", RMS_NORM, axes))
            out.append(Rowwise("kv_a_norm", "b t c l", RMS_NORM, axes))
        if self.qk_rope_head_dim:
            out += [Rowwise("q_rope", "b t h p", ROTATION, axes), Rowwise("k_rope", "b t p", ROTATION, axes)]
        return (*out, step.softmax(axes, "h"))

    def heads(self, form: str) -> HeadShape:
        """Absorbed GLA is a GQA of h_c KV heads, widths L + R and L; in head space an MHA of P + R and V."""
        L, R = self.kv_lora_rank, self.qk_rope_head_dim
        if form == "absorbed":
            return HeadShape(self.num_heads, self.num_latents, L + R, L)
        return HeadShape(self.num_heads, self.num_heads, self.qk_nope_head_dim + R, self.v_head_dim)

    def query_heads(self) -> int:
        """H."""
        return self.num_heads

    def shard(self, tp: int) -> "GLA":
        """H / tp heads on max(1, h_c / tp) latents; the RoPE key is replicated, a latent once tp exceeds h_c."""
        check_tp(tp, self.num_heads, self.num_latents, "latents")
        return replace(self, num_heads=self.num_heads // tp, num_latents=max(1, self.num_latents // tp))

    def with_kv_heads(self, kv_heads: int) -> Attention | None:
        """An attention of the same heads without a RoPE part: K width P, V width V."""
        from attncalc.attention.gqa import GQA

        return GQA(self.hidden_size, self.num_heads, kv_heads, self.qk_nope_head_dim, self.v_head_dim)
