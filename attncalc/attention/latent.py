"""The attention core over cached latents, in the forms that the same weights allow.

K_i = c_k W_UK,i and V_i = c_v W_UV,i for head i, where c_k and c_v are one latent (MLA) or two (mla-split).

* absorbed: q_i W_UK,i^T is compared with the latent itself; W_UV,i is applied after the weighting.
* merged: as absorbed, with W_UQ W_UK^T and W_UV W_O multiplied offline.
* expanded: K and V of all keys are rebuilt from the latent in each step.
* decompressed: K and V of the new tokens are built once, and cached (or, for a whole prompt, only used).

Equal outputs by A(BC) = (AB)C; DeepSeek-V2 (arXiv 2405.04434) section 2.1.2 and appendix C.
"""

from typing import NamedTuple

from attncalc.attention.base import Step
from attncalc.axes import Axes
from attncalc.cache import CacheTensor
from attncalc.errors import AttncalcError
from attncalc.ops import Contraction, Part, Term, activation, on_chip, product, weight
from attncalc.reach import Reach
from attncalc.workload import Workload

FORMS = ("absorbed", "expanded", "decompressed", "merged")


class Latent(NamedTuple):
    """A cached latent: its tensor name, the letter of its width, and the kind that picks its format."""

    name: str
    letter: str
    kind: str

    def part(self, token_axis: str, role: str) -> Part:
        """The latent of the new tokens (`t`) or of all keys (`s`)."""
        if role in ("activation", "on_chip"):
            return Part(self.name, f"b {token_axis} {self.letter}", role, "activation")  # type: ignore[arg-type]
        return Part(self.name, f"b {token_axis} {self.letter}", role, self.kind)  # type: ignore[arg-type]


class LatentCore(NamedTuple):
    """The core of one variant. Axes: n non-rotated and p rotated widths of a key (e together), v of a value.

    `record` is the letter of the key latent together with the RoPE key. `rope` is whether a RoPE key exists.
    """

    axes: Axes
    key: Latent
    value: Latent
    record: str
    rope: bool

    @property
    def shared(self) -> bool:
        """K and V come from the same latent."""
        return self.key == self.value

    def new_latents(self, cached: str) -> tuple[Part, ...]:
        """What the down-projection makes of the new tokens: cache rows, or activations where K and V are kept."""
        role = "activation" if cached == "decompressed" else "cache_write"
        parts = [self.key.part("t", role)]
        if not self.shared:
            parts.append(self.value.part("t", role))
        if self.rope:
            parts.append(Part("k_pe", "b t p", role, "activation" if role == "activation" else "rope_key"))  # type: ignore[arg-type]
        return tuple(parts)

    def products(self, step: Step, form: str, cached: str) -> list[Contraction]:
        """From the query (`b h t e`, or `b h t l` and `b h t p` if merged) to the output of the weighting."""
        if cached == "decompressed" and form != "decompressed":
            raise AttncalcError("--form", f"{form} reads latents, which are not kept where K and V are")
        if form == "decompressed" and cached != "decompressed" and step.workload.new_tokens < step.workload.context:
            rule = "decompressed needs K and V of all earlier tokens in the cache"
            raise AttncalcError("--form", rule, hint="Use expanded, which rebuilds them from the latent")
        if form in ("absorbed", "merged"):
            return self._latent_space(step, form)
        return self._head_space(step, form, cached)

    def _latent_space(self, step: Step, form: str) -> list[Contraction]:
        axes, k, v, r = self.axes, self.key.letter, self.value.letter, self.record
        out: list[Contraction] = []
        q_latent = activation("q_latent", f"b h t {k}")
        if form == "absorbed":
            up = weight(self._up("k"), f"h n {k}")
            out.append(product("absorb_q", activation("q_nope", "b h t n"), up, q_latent, axes))
        q_parts: tuple[Part, ...] = (q_latent,)
        k_parts: tuple[Part, ...] = (self.key.part("s", "cache"),)
        if self.rope:
            q_parts += (activation("q_pe", "b h t p"),)
            k_parts += (Part("k_pe", "b s p", "cache", "rope_key"),)
        scores = on_chip("scores", "b h t s")
        values = self.value.part("s", "on_chip" if self.shared else "cache")
        weighted = activation("attn_latent", f"b h t {v}")
        out += [
            step.coupled("score", Term(f"b h t {r}", q_parts), Term(f"b s {r}", k_parts), scores, axes),
            step.coupled("value", scores, values, weighted, axes),
        ]
        return out

    def _head_space(self, step: Step, form: str, cached: str) -> list[Contraction]:
        axes = self.axes
        kept = cached == "decompressed"
        rebuilt = "s" if form == "expanded" else "t"
        role = "cache_write" if kept else "activation"
        wide_k = "e" if kept and self.rope else "n"  # a cached K holds a copy of the RoPE key in each head
        k_new = Part("k", f"b h {rebuilt} {wide_k}", role, "key" if kept else "activation")  # type: ignore[arg-type]
        v_new = Part("v", f"b h {rebuilt} v", role, "value" if kept else "activation")  # type: ignore[arg-type]
        source = "cache" if form == "expanded" else "activation"
        if self.shared:
            up = weight("kv_b_proj", f"h x {self.key.letter}")
            both = Term(f"b h {rebuilt} x", (k_new, v_new))
            out = [product("kv_b_proj", self.key.part(rebuilt, source), up, both, axes)]
        else:
            out = [
                product(f"{side}_b_proj", latent.part(rebuilt, source), weight(f"{side}_b_proj", shape), new, axes)
                for side, latent, shape, new in (
                    ("k", self.key, f"h n {self.key.letter}", k_new),
                    ("v", self.value, f"h v {self.value.letter}", v_new),
                )
            ]
        if kept:
            k_parts: tuple[Part, ...] = (Part("k", f"b h s {wide_k}", "cache", "key"),)
            values = Part("v", "b h s v", "cache", "value")
        else:
            k_parts = (activation("k", "b h s n"),)
            if self.rope:
                k_parts += (Part("k_pe", "b s p", "cache", "rope_key"),)
            values = activation("v", "b h s v")
        scores, e = on_chip("scores", "b h t s"), "e" if self.rope else "n"
        q = activation("q", f"b h t {e}")
        out += [
            step.coupled("score", q, Term(f"b h s {e}", k_parts), scores, axes),
            step.coupled("value", scores, values, activation("attn", "b h t v"), axes),
        ]
        return out

    def un_absorb(self) -> Contraction:
        """W_UV after the weighting."""
        v = self.value.letter
        up, out = weight(self._up("v"), f"h v {v}"), activation("attn", "b h t v")
        return product("absorb_v", activation("attn_latent", f"b h t {v}"), up, out, self.axes)

    def _up(self, side: str) -> str:
        return f"kv_b_proj[{side}]" if self.shared else f"{side}_b_proj"

    def cache(self, reach: Reach, form: str) -> tuple[CacheTensor, ...]:
        """Latents and RoPE key; decompressed: K and V of all heads, with a copy of the RoPE key in each."""
        axes, one = self.axes, self.axes["one"]
        if form == "decompressed":
            k = axes["e" if self.rope else "n"]
            return (
                CacheTensor("k", "key", axes["h"], k, reach),
                CacheTensor("v", "value", axes["h"], axes["v"], reach),
            )
        latents = (self.key,) if self.shared else (self.key, self.value)
        out = [CacheTensor(x.name, x.kind, one, axes[x.letter], reach) for x in latents]
        if self.rope:
            out.append(CacheTensor("k_pe", "rope_key", one, axes["p"], reach))
        return tuple(out)


def default_form(workload: Workload) -> str:
    """Absorbed; for a whole prompt K and V are built once, which costs fewer FLOPs."""
    return "decompressed" if workload.phase == "prefill" else "absorbed"
