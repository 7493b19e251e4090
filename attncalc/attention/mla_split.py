"""MLA with separate latents for K and V, and no RoPE key.

[c_k; c_v] = x W_DKV; K_i = c_k W_UK,i, V_i = c_v W_UV,i. Cached elements per token: k_lora_rank + v_lora_rank.
The layer that the name "MLA" stands for in some teaching code. A bias on the key up-projection adds the same
logit to every key of a query, so it cancels in the softmax and the absorbed form leaves it out; one on the value
up-projection adds to the output, since the weights sum to 1.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

from attncalc.attention import latent
from attncalc.attention.base import Attention, HeadShape, Step, check_tp, require
from attncalc.attention.latent import Latent, LatentCore
from attncalc.axes import Dim, Weight
from attncalc.cache import CacheTensor
from attncalc.ops import BIAS, Ops, Rowwise, Term, activation, product, weight
from attncalc.reach import Reach
from attncalc.workload import Workload


@dataclass(frozen=True)
class MLASplit:
    """Dimensions; `bias`: every projection has one."""

    hidden_size: int
    num_heads: int
    head_dim: int
    v_head_dim: int
    k_lora_rank: int
    v_lora_rank: int
    bias: bool = False

    forms: ClassVar[tuple[str, ...]] = latent.FORMS
    source: ClassVar[str] = "arXiv 2405.04434 section 2.1.2, one latent for each of K and V"

    def __post_init__(self) -> None:
        names = ("hidden_size", "num_heads", "head_dim", "v_head_dim", "k_lora_rank", "v_lora_rank")
        require(self, *names)

    @property
    def variant(self) -> str:
        """The id in the registry."""
        return "mla-split"

    def default_form(self, workload: Workload) -> str:
        """Absorbed, but decompressed for a whole prompt."""
        return latent.default_form(workload)

    @property
    def _axes(self) -> dict[str, Dim]:
        return {
            "D": Dim(self.hidden_size, "hidden_size"),
            "h": Dim(self.num_heads, "num_heads"),
            "n": Dim(self.head_dim, "head_dim"),
            "v": Dim(self.v_head_dim, "v_head_dim"),
            "k": Dim(self.k_lora_rank, "k_lora_rank"),
            "u": Dim(self.v_lora_rank, "v_lora_rank"),
            "r": Dim(self.k_lora_rank + self.v_lora_rank, "k_lora_rank + v_lora_rank"),
            "one": Dim(1, ""),
        }

    def _core(self, axes: dict[str, Dim]) -> LatentCore:
        key, value = Latent("c_k", "k", "key"), Latent("c_v", "u", "value")
        return LatentCore(axes, key, value, record="k", rope=False)

    def weights(self, form: str) -> tuple[Weight, ...]:
        """D*H*n + D*(Lk + Lv) + Lk*H*n + Lv*H*v + H*v*D; merged D*H*Lk and H*Lv*D in place of four of them."""
        shapes = (
            {"q_merged_proj": "(h k) D", "kv_a_proj": "r D", "o_merged_proj": "D (h u)"}
            if form == "merged"
            else {
                "q_proj": "(h n) D",
                "kv_a_proj": "r D",
                "k_b_proj": "(h n) k",
                "v_b_proj": "(h v) u",
                "o_proj": "D (h v)",
            }
        )
        axes, out = self._axes, []
        for name, shape in shapes.items():
            out.append(Weight(f"{name}.weight", shape, axes))
            if self.bias:
                rows = shape.partition(")")[0] + ")" if shape.startswith("(") else shape.split()[0]
                out.append(Weight(f"{name}.bias", rows, axes))
        return tuple(out)

    def cache(self, reach: Reach, form: str) -> tuple[CacheTensor, ...]:
        """c_k [B, 1, S, Lk] and c_v [B, 1, S, Lv]; decompressed K and V of all heads."""
        return self._core(self._axes).cache(reach, form)

    def ops(self, step: Step, form: str, *, cached: str) -> Ops:
        """Absorbed core: 2*B*H*N*(Lk + Lv); in head space 2*B*H*N*(n + v); N attended pairs."""
        axes = self._axes | step.axes
        core = self._core(axes)
        x, y = activation("x", "b t D"), activation("y", "b t D")
        down = Term("b t r", core.new_latents(cached))
        merged = form == "merged"
        q_name, width = ("q_merged_proj", "k") if merged else ("q_proj", "n")
        q = activation("q_latent" if merged else "q", f"b h t {width}")
        products = [
            product(q_name, x, weight(q_name, f"h {width} D"), q, axes),
            product("kv_a_proj", x, weight("kv_a_proj", "r D"), down, axes),
            *core.products(step, form, cached),
        ]
        if merged:
            out = weight("o_merged_proj", "D (h u)")
            products.append(product("o_merged_proj", activation("attn_latent", "b h t u"), out, y, axes))
        else:
            if form == "absorbed":
                products.append(core.un_absorb())
            products.append(product("o_proj", activation("attn", "b h t v"), weight("o_proj", "D (h v)"), y, axes))
        return Ops(tuple(products), self._rowwise(step, form, axes))

    def _rowwise(self, step: Step, form: str, axes: dict[str, Dim]) -> tuple[Rowwise, ...]:
        out = [step.softmax(axes, "h")]
        if self.bias:
            rebuilt = "s" if form == "expanded" else "t"
            shapes = {
                "absorbed": {"q": "b t h n", "kv_a": "b t r", "v_b": "b t h v", "o": "b t D"},
                "merged": {"q": "b t h k", "kv_a": "b t r", "o": "b t D"},
            }.get(
                form,
                {
                    "q": "b t h n",
                    "kv_a": "b t r",
                    "k_b": f"b {rebuilt} h n",
                    "v_b": f"b {rebuilt} h v",
                    "o": "b t D",
                },
            )
            out += [Rowwise(f"{name}_bias", shape, BIAS, axes) for name, shape in shapes.items()]
        return tuple(out)

    def heads(self, form: str) -> HeadShape:
        """Absorbed: one KV head of widths Lk and Lv; in head space H of widths n and v."""
        if form in ("absorbed", "merged"):
            return HeadShape(self.num_heads, 1, self.k_lora_rank, self.v_lora_rank)
        return HeadShape(self.num_heads, self.num_heads, self.head_dim, self.v_head_dim)

    def query_heads(self) -> int:
        """H."""
        return self.num_heads

    def shard(self, tp: int) -> "MLASplit":
        """H / tp heads; the down-projection and the latent cache are replicated."""
        check_tp(tp, self.num_heads)
        return replace(self, num_heads=self.num_heads // tp)

    def with_kv_heads(self, kv_heads: int) -> Attention | None:
        """An attention of the same heads that caches K and V."""
        from attncalc.attention.gqa import GQA

        return GQA(self.hidden_size, self.num_heads, kv_heads, self.head_dim, self.v_head_dim)
