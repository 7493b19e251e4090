"""Softmax attention with G key/value heads for H query heads: MHA (G = H), GQA, MQA (G = 1).

Query head i reads KV head i // (H / G). Sources: Vaswani et al. 2017 section 3.2; Shazeer 2019
(arXiv 1911.02150, MQA); Ainslie et al. 2023 (arXiv 2305.13245, GQA).
"""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

from attncalc.attention.base import Attention, HeadShape, Step, check_tp, require
from attncalc.axes import Axes, Dim, Weight
from attncalc.cache import CacheTensor
from attncalc.errors import AttncalcError
from attncalc.ops import (
    BIAS,
    GATE,
    LAYER_NORM,
    RMS_NORM,
    ROTATION,
    SOFTCAP,
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


@dataclass(frozen=True)
class GQA:
    """Dimensions and options.

    `rope_dim`: rotated values of a head, 0 for NoPE. `bias`: which of q, k, v, o have one. `qk_norm`: RMSNorm with
    one weight for all heads (`head`), over all heads together (`full`), without a weight (`unweighted`), or
    LayerNorm with a weight for each head (`per_head`), or with weight and bias for all of them (`head_bias`).
    `v_norm` has no weight. `gate`: a sigmoid on the output, for each value (`full`) or head (`head`). `sinks`: a
    learned logit for each head that takes no value (gpt-oss). `shared_kv_weight`: V is made by the K projection
    (Gemma 4), which saves weights, not cache. `own_kv` false: K and V are another layer's.
    """

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    rope_dim: int = 0
    bias: str = ""
    qk_norm: Literal["none", "head", "full", "per_head", "head_bias", "unweighted"] = "none"
    v_norm: bool = False
    gate: Literal["none", "full", "head"] = "none"
    sinks: bool = False
    logit_softcap: bool = False
    shared_kv_weight: bool = False
    own_kv: bool = True

    forms: ClassVar[tuple[str, ...]] = ("direct",)
    source: ClassVar[str] = "arXiv 1706.03762 section 3.2; arXiv 1911.02150; arXiv 2305.13245"
    input_axis: ClassVar[str] = "D"

    def __post_init__(self) -> None:
        require(self, "hidden_size", "num_heads", "num_kv_heads", "head_dim", "v_head_dim")
        require(self, "rope_dim", minimum=0)
        if self.num_heads % self.num_kv_heads:
            rule = f"must divide num_heads {self.num_heads}"
            raise AttncalcError("num_kv_heads", rule, got=self.num_kv_heads)
        if self.rope_dim > self.head_dim or self.rope_dim % 2:
            rule = f"must be even and at most head_dim {self.head_dim}"
            raise AttncalcError("rope_dim", rule, got=self.rope_dim)
        if "".join(sorted(set(self.bias), key="qkvo".find)) != self.bias or set(self.bias) - set("qkvo"):
            raise AttncalcError("bias", "must name projections in the order qkvo, or be empty", got=repr(self.bias))
        if self.shared_kv_weight and "v" in self.bias:
            raise AttncalcError("bias", "must not name v where K and V share a projection", got=repr(self.bias))
        if self.shared_kv_weight and self.head_dim != self.v_head_dim:
            raise AttncalcError("v_head_dim", "must equal head_dim where K and V share a projection")

    @property
    def variant(self) -> str:
        """mha, gqa or mqa, by the number of KV heads."""
        if self.num_kv_heads == self.num_heads:
            return "mha"
        return "mqa" if self.num_kv_heads == 1 else "gqa"

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
            "e": Dim(self.v_head_dim, "v_head_dim"),
            "p": Dim(self.rope_dim, "rope_dim"),
        }

    def weights(self, form: str) -> tuple[Weight, ...]:  # noqa: ARG002
        """D*H*d + D*G*(d + e) + H*e*D, and what the options add. Linear weights are [out, in]."""
        i = self.input_axis
        shapes = {"q_proj.weight": f"(g j d) {i}"}
        if self.own_kv:
            shapes["k_proj.weight"] = f"(g d) {i}"
            if not self.shared_kv_weight:
                shapes["v_proj.weight"] = f"(g e) {i}"
        shapes["o_proj.weight"] = "D (g j e)"
        biases = {"q": "(g j d)", "k": "(g d)", "v": "(g e)", "o": "D"}
        shapes |= {f"{p}_proj.bias": biases[p] for p in self.bias if f"{p}_proj.weight" in shapes}
        norms = {
            "head": ("d", "d"),
            "full": ("(g j d)", "(g d)"),
            "per_head": ("h d", "g d"),
            "head_bias": ("d", "d"),
        }
        if self.qk_norm in norms:
            shapes["q_norm.weight"], k_norm = norms[self.qk_norm]
            if self.own_kv:
                shapes["k_norm.weight"] = k_norm
        if self.qk_norm == "head_bias":
            shapes |= {f"{p}_norm.bias": "d" for p in "qk" if f"{p}_norm.weight" in shapes}
        if self.gate != "none":
            shapes["gate_proj.weight"] = f"(g j e) {i}" if self.gate == "full" else f"(g j) {i}"
        if self.sinks:
            shapes["sinks"] = "h"
        axes = self._axes
        return tuple(Weight(name, shape, axes) for name, shape in shapes.items())

    def cache(self, reach: Reach, form: str) -> tuple[CacheTensor, ...]:  # noqa: ARG002
        """K [B, G, S, d] and V [B, G, S, e]."""
        if not self.own_kv:
            return ()
        axes = self._axes
        return (
            CacheTensor("k", "key", axes["g"], axes["d"], reach),
            CacheTensor("v", "value", axes["g"], axes["e"], reach),
        )

    def ops(self, step: Step, form: str, *, cached: str) -> Ops:  # noqa: ARG002
        """Projections, scores 2*B*H*d*N, values 2*B*H*e*N, output; N attended pairs."""
        axes: Axes = self._axes | step.axes
        i = self.input_axis
        x, q, o = activation("x", f"b t {i}"), activation("q", "b g j t d"), activation("attn", "b g j t e")
        scores = on_chip("scores", "b g j t s")
        products: list[Contraction] = [product("q_proj", x, weight("q_proj", f"g j d {i}"), q, axes)]
        if self.own_kv:
            new_k = Part("k", "b g t d", "cache_write", "key")
            new_v = Part("v", "b g t e", "cache_write", "value")
            made_by_k = (new_k, new_v) if self.shared_kv_weight else (new_k,)
            k_out = Term("b g t d", made_by_k)
            products.append(product("k_proj", x, weight("k_proj", f"g d {i}"), k_out, axes))
            if not self.shared_kv_weight:
                products.append(product("v_proj", x, weight("v_proj", f"g e {i}"), new_v, axes))
        products += [
            step.coupled("score", q, Part("k", "b g s d", "cache", "key"), scores, axes),
            step.coupled("value", scores, Part("v", "b g s e", "cache", "value"), o, axes),
        ]
        if self.gate == "full":
            gate = activation("gate", "b g j t e")
            products.append(product("gate_proj", x, weight("gate_proj", f"g j e {i}"), gate, axes))
        elif self.gate == "head":
            gate = activation("gate", "b g j t")
            products.append(product("gate_proj", x, weight("gate_proj", f"g j {i}"), gate, axes))
        products.append(product("o_proj", o, weight("o_proj", "D (g j e)"), activation("y", "b t D"), axes))
        return Ops(tuple(products), self._rowwise(step, axes))

    def _rowwise(self, step: Step, axes: Axes) -> tuple[Rowwise, ...]:
        shapes = {"q": "b t h d", "k": "b t g d", "v": "b t g e", "o": "b t D"}
        kept = [p for p in "qkvo" if self.own_kv or p not in "kv"]
        out = [Rowwise(f"{p}_bias", shapes[p], BIAS, axes) for p in self.bias if p in kept]
        if self.qk_norm != "none":
            each = {"per_head": LAYER_NORM - 1, "head_bias": LAYER_NORM}.get(self.qk_norm, RMS_NORM)
            out += [Rowwise(f"{p}_norm", shapes[p], each, axes) for p in "qk" if p in kept]
        if self.v_norm and self.own_kv:
            out.append(Rowwise("v_norm", shapes["v"], RMS_NORM - 1, axes))  # no weight
        if self.rope_dim:
            rotated = {"q": "b t h p", "k": "b t g p"}
            out += [Rowwise(f"{p}_rope", rotated[p], ROTATION, axes) for p in "qk" if p in kept]
        if self.logit_softcap:
            out.append(Rowwise("softcap", "b h", SOFTCAP, axes, step.pairs, step.reach.pairs_formula(step.count)))
        out.append(step.softmax(axes, "h"))
        if self.sinks:
            out.append(Rowwise("sink", "b h t", 4, axes))
        if self.gate == "full":
            out.append(Rowwise("gate", "b t h e", GATE, axes))
        elif self.gate == "head":
            out += [Rowwise("gate_sigmoid", "b t h", 1, axes), Rowwise("gate", "b t h e", 1, axes)]
        return tuple(out)

    def heads(self, form: str) -> HeadShape:  # noqa: ARG002
        """H query heads on G KV heads."""
        return HeadShape(self.num_heads, self.num_kv_heads, self.head_dim, self.v_head_dim)

    def query_heads(self) -> int:
        """H."""
        return self.num_heads

    def shard(self, tp: int) -> Self:
        """H / tp query heads and max(1, G / tp) KV heads: a KV head is replicated once tp exceeds G.

        A QK-norm over all heads is split with them.
        """
        check_tp(tp, self.num_heads, self.num_kv_heads)
        return replace(self, num_heads=self.num_heads // tp, num_kv_heads=max(1, self.num_kv_heads // tp))

    def with_kv_heads(self, kv_heads: int) -> Attention | None:
        """The same layer with another number of KV heads."""
        return replace(self, num_kv_heads=kv_heads)
