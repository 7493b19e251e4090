"""Multi-head latent attention: the cache holds one latent and one RoPE key for all heads.

c_kv = RMSNorm(x W_DKV), k_pe = RoPE(x W_KR); head i: q_i = [q_nope; RoPE(q_pe)], k_i = [c_kv W_UK,i; k_pe],
v_i = c_kv W_UV,i, scores scaled by (P + R)^-1/2. Cached elements per token: kv_lora_rank + qk_rope_head_dim.
Source: DeepSeek-V2 (arXiv 2405.04434) section 2.1; parameter names as in deepseek-ai/DeepSeek-V3
`modeling_deepseek.py`. Output gate: Kimi Linear (arXiv 2510.26692) and Kimi K3.
"""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

from attncalc.attention import latent
from attncalc.attention.base import Attention, HeadShape, Step, check_tp, require
from attncalc.attention.latent import Latent, LatentCore
from attncalc.axes import Dim, Weight
from attncalc.cache import CacheTensor
from attncalc.errors import AttncalcError
from attncalc.ops import BIAS, GATE, RMS_NORM, ROTATION, Ops, Rowwise, Term, activation, product, weight
from attncalc.reach import Reach
from attncalc.workload import Workload


@dataclass(frozen=True)
class MLA:
    """Dimensions and options.

    `q_lora_rank` None: the query has no low-rank path. `qk_rope_head_dim` 0: no RoPE key at all; `rotated` false:
    the RoPE key exists and is cached but not rotated (NoPE, Kimi Linear). `gate`: sigmoid(x W_g) on the output of
    each head (Gated MLA). `bias`: on the two down-projections and the output, as Hugging Face's attention_bias.
    `latent_norm`: RMSNorm on both latents.
    """

    hidden_size: int
    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rotated: bool = True
    gate: Literal["none", "full"] = "none"
    bias: bool = False
    latent_norm: bool = True

    forms: ClassVar[tuple[str, ...]] = latent.FORMS
    source: ClassVar[str] = "arXiv 2405.04434 section 2.1"

    def __post_init__(self) -> None:
        require(self, "hidden_size", "num_heads", "kv_lora_rank", "v_head_dim")
        require(self, "qk_nope_head_dim", "qk_rope_head_dim", minimum=0)
        if not self.qk_nope_head_dim + self.qk_rope_head_dim:
            raise AttncalcError("qk_nope_head_dim", "must be at least 1 where there is no RoPE key", got=0)
        if self.q_lora_rank is not None:
            require(self, "q_lora_rank")
        if self.rotated and self.qk_rope_head_dim % 2:
            raise AttncalcError("qk_rope_head_dim", "must be even to be rotated", got=self.qk_rope_head_dim)

    @property
    def variant(self) -> str:
        """The id in the registry."""
        return "mla"

    def default_form(self, workload: Workload) -> str:
        """Absorbed, but decompressed for a whole prompt."""
        return latent.default_form(workload)

    @property
    def _axes(self) -> dict[str, Dim]:
        L, P, R, V = self.kv_lora_rank, self.qk_nope_head_dim, self.qk_rope_head_dim, self.v_head_dim
        return {
            "D": Dim(self.hidden_size, "hidden_size"),
            "h": Dim(self.num_heads, "num_heads"),
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

    def _core(self, axes: dict[str, Dim]) -> LatentCore:
        c_kv = Latent("c_kv", "l", "latent")
        return LatentCore(axes, c_kv, c_kv, record="r", rope=self.qk_rope_head_dim > 0)

    def weights(self, form: str) -> tuple[Weight, ...]:
        """As published, or with the products that `merged` multiplies offline.

        D*Q + Q + Q*H*(P+R) (or D*H*(P+R)) + D*(L+R) + L + L*H*(P+V) + H*V*D. Merged: Q*H*(L+R) for the query and,
        without a gate between them, H*L*D for value and output.
        """
        low_rank, merged = self.q_lora_rank is not None, form == "merged"
        q_in, shapes = "q" if low_rank else "D", {}
        if low_rank:
            shapes["q_a_proj.weight"] = "q D"
            if self.bias:
                shapes["q_a_proj.bias"] = "q"
            if self.latent_norm:
                shapes["q_a_layernorm.weight"] = "q"
        if merged:
            shapes["q_merged_proj.weight"] = f"(h l) {q_in}"
            if self.qk_rope_head_dim:
                shapes["q_pe_proj.weight"] = f"(h p) {q_in}"
        else:
            shapes["q_b_proj.weight" if low_rank else "q_proj.weight"] = f"(h e) {q_in}"
        shapes["kv_a_proj_with_mqa.weight"] = "r D"
        if self.bias:
            shapes["kv_a_proj_with_mqa.bias"] = "r"
        if self.latent_norm:
            shapes["kv_a_layernorm.weight"] = "l"
        if merged and self.gate == "none":
            shapes["o_merged_proj.weight"] = "D (h l)"
        else:
            shapes["v_b_proj.weight" if merged else "kv_b_proj.weight"] = "(h v) l" if merged else "(h x) l"
            shapes["o_proj.weight"] = "D (h v)"
        if self.bias:
            shapes["o_merged_proj.bias" if "o_merged_proj.weight" in shapes else "o_proj.bias"] = "D"
        if self.gate == "full":
            shapes["gate_proj.weight"] = "(h v) D"
        axes = self._axes
        return tuple(Weight(name, shape, axes) for name, shape in shapes.items())

    def cache(self, reach: Reach, form: str) -> tuple[CacheTensor, ...]:
        """c_kv [B, 1, S, L] and k_pe [B, 1, S, R]; decompressed K [B, H, S, P+R] and V [B, H, S, V]."""
        return self._core(self._axes).cache(reach, form)

    def ops(self, step: Step, form: str, *, cached: str) -> Ops:
        """Absorbed core: 2*B*H*N*((L + R) + L); in head space 2*B*H*N*(P + R + V); N attended pairs."""
        axes = self._axes | step.axes
        core = self._core(axes)
        x, y = activation("x", "b t D"), activation("y", "b t D")
        low_rank = self.q_lora_rank is not None
        q_in, d = (activation("q_a", "b t q"), "q") if low_rank else (x, "D")
        products = [product("q_a_proj", x, weight("q_a_proj", "q D"), q_in, axes)] if low_rank else []
        if form == "merged":
            up, out = weight("q_merged_proj", f"h l {d}"), activation("q_latent", "b h t l")
            products.append(product("q_merged_proj", q_in, up, out, axes))
            if self.qk_rope_head_dim:
                up, out = weight("q_pe_proj", f"h p {d}"), activation("q_pe", "b h t p")
                products.append(product("q_pe_proj", q_in, up, out, axes))
        else:
            name = "q_b_proj" if low_rank else "q_proj"
            products.append(product(name, q_in, weight(name, f"h e {d}"), activation("q", "b h t e"), axes))
        down = Term("b t r", core.new_latents(cached))
        products.append(product("kv_a_proj", x, weight("kv_a_proj_with_mqa", "r D"), down, axes))
        products += core.products(step, form, cached)
        attn = activation("attn", "b h t v")
        merged_output = form == "merged" and self.gate == "none"
        if form in ("absorbed", "merged") and not merged_output:
            products.append(core.un_absorb())
        if self.gate == "full":
            gate = activation("gate", "b h t v")
            products.append(product("gate_proj", x, weight("gate_proj", "h v D"), gate, axes))
        if merged_output:
            latent_out = activation("attn_latent", "b h t l")
            products.append(product("o_merged_proj", latent_out, weight("o_merged_proj", "D (h l)"), y, axes))
        else:
            products.append(product("o_proj", attn, weight("o_proj", "D (h v)"), y, axes))
        return Ops(tuple(products), self._rowwise(step, axes))

    def _rowwise(self, step: Step, axes: dict[str, Dim]) -> tuple[Rowwise, ...]:
        out = []
        if self.latent_norm:
            if self.q_lora_rank is not None:
                out.append(Rowwise("q_a_norm", "b t q", RMS_NORM, axes))
            out.append(Rowwise("kv_a_norm", "b t l", RMS_NORM, axes))
        if self.bias:
            if self.q_lora_rank is not None:
                out.append(Rowwise("q_a_bias", "b t q", BIAS, axes))
            out += [Rowwise("kv_a_bias", "b t r", BIAS, axes), Rowwise("o_bias", "b t D", BIAS, axes)]
        if self.rotated and self.qk_rope_head_dim:
            out += [Rowwise("q_rope", "b t h p", ROTATION, axes), Rowwise("k_rope", "b t p", ROTATION, axes)]
        out.append(step.softmax(axes, "h"))
        if self.gate == "full":
            out.append(Rowwise("gate", "b t h v", GATE, axes))
        return tuple(out)

    def heads(self, form: str) -> HeadShape:
        """Absorbed MLA is an MQA of widths L + R and L; in head space it is an MHA of widths P + R and V."""
        L, R = self.kv_lora_rank, self.qk_rope_head_dim
        if form in ("absorbed", "merged"):
            return HeadShape(self.num_heads, 1, L + R, L)
        return HeadShape(self.num_heads, self.num_heads, self.qk_nope_head_dim + R, self.v_head_dim)

    def query_heads(self) -> int:
        """H."""
        return self.num_heads

    def shard(self, tp: int) -> Self:
        """H / tp heads; down-projections, norms and the latent cache are replicated."""
        check_tp(tp, self.num_heads)
        return replace(self, num_heads=self.num_heads // tp)

    def with_kv_heads(self, kv_heads: int) -> Attention | None:
        """An attention of the same heads without a RoPE part: K width P (R where P is 0), V width V."""
        from attncalc.attention.gqa import GQA

        width = self.qk_nope_head_dim or self.qk_rope_head_dim
        return GQA(self.hidden_size, self.num_heads, kv_heads, width, self.v_head_dim)
