"""Multi-scale retention (RetNet): linear attention with rotated q and k, whose state fades by gamma_h in head h.

S [K, V] per head, from rotated q (scaled by K^-1/2) and k [K], and v [V]:

    S_t = gamma_h S_{t-1} + k v^T,  o = S_t^T q,  gamma_h = 1 - 2^(-5 - h), h from 0,

output RMSNorm(o) for each head * SiLU(x W_g), then o_proj. Source: arXiv 2307.08621 section 2, which norms each head
by GroupNorm; rotation, RMSNorm and parameter names as in flash-linear-attention's multiscale_retention, where
V = expand_v * D / H with expand_v 2.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

from attncalc.attention.base import Attention, HeadShape, Step, check_form, check_tp, require
from attncalc.attention.state import kept, retention_chunked, retention_recurrent
from attncalc.axes import Dim, Weight
from attncalc.cache import CacheTensor
from attncalc.errors import AttncalcError
from attncalc.ops import GATED_ACTIVATION, RMS_NORM, ROTATION, Ops, Rowwise, activation, product, weight
from attncalc.reach import Reach
from attncalc.workload import Workload


@dataclass(frozen=True)
class RetNet:
    """H = num_heads heads, K = head_k_dim, V = head_v_dim. `gate`: the output gate. `chunk_size`: C when chunked."""

    hidden_size: int
    num_heads: int
    head_k_dim: int
    head_v_dim: int
    gate: bool = True
    chunk_size: int = 64

    forms: ClassVar[tuple[str, ...]] = ("recurrent", "chunked")
    source: ClassVar[str] = "arXiv 2307.08621 section 2"

    def __post_init__(self) -> None:
        require(self, "hidden_size", "num_heads", "head_k_dim", "head_v_dim", "chunk_size")
        if self.head_k_dim % 2:
            raise AttncalcError("head_k_dim", "must be even to be rotated", got=self.head_k_dim)

    @property
    def variant(self) -> str:
        """The id in the registry."""
        return "retnet"

    def default_form(self, workload: Workload) -> str:
        """Recurrent for one new token, chunked for more."""
        return "recurrent" if workload.new_tokens == 1 else "chunked"

    @property
    def _axes(self) -> dict[str, Dim]:
        return {
            "D": Dim(self.hidden_size, "hidden_size"),
            "h": Dim(self.num_heads, "num_heads"),
            "k": Dim(self.head_k_dim, "head_k_dim"),
            "v": Dim(self.head_v_dim, "head_v_dim"),
        }

    def weights(self, form: str) -> tuple[Weight, ...]:  # noqa: ARG002
        """2*D*H*K for q and k, D*H*V for v, gate and output each, V norm; [out, in]."""
        shapes = {"q_proj.weight": "(h k) D", "k_proj.weight": "(h k) D", "v_proj.weight": "(h v) D"}
        if self.gate:
            shapes["g_proj.weight"] = "(h v) D"
        shapes["g_norm_swish_gate.weight" if self.gate else "g_norm.weight"] = "v"
        shapes["o_proj.weight"] = "D (h v)"
        axes = self._axes
        return tuple(Weight(name, shape, axes) for name, shape in shapes.items())

    def cache(self, reach: Reach, form: str) -> tuple[CacheTensor, ...]:  # noqa: ARG002
        """Constant: recurrent_state [B, H, K, V]."""
        return kept(self._axes, "h")

    def ops(self, step: Step, form: str, *, cached: str) -> Ops:  # noqa: ARG002
        """Projections, and `retention_recurrent` or `retention_chunked` of the module `state`."""
        check_form(self, form)
        axes = self._axes | step.axes
        core = retention_chunked(step, axes, self.chunk_size) if form == "chunked" else retention_recurrent(axes)
        x, attn = activation("x", "b t D"), activation("attn", "b t h v")
        products = [
            product("q_proj", x, weight("q_proj", "h k D"), activation("q", "b t h k"), axes),
            product("k_proj", x, weight("k_proj", "h k D"), activation("k", "b t h k"), axes),
            product("v_proj", x, weight("v_proj", "h v D"), activation("v", "b t h v"), axes),
            *core.contractions,
        ]
        if self.gate:
            gate = activation("gate", "b t h v")
            products.append(product("g_proj", x, weight("g_proj", "h v D"), gate, axes))
        products.append(product("o_proj", attn, weight("o_proj", "D (h v)"), activation("y", "b t D"), axes))
        rowwise = [
            Rowwise("q_rope", "b t h k", ROTATION, axes),
            Rowwise("k_rope", "b t h k", ROTATION, axes),
            Rowwise("q_scale", "b t h k", 1, axes),
            *core.rowwise,
            Rowwise("norm", "b t h v", RMS_NORM, axes),
        ]
        if self.gate:
            rowwise.append(Rowwise("gate", "b t h v", GATED_ACTIVATION, axes))
        return Ops(tuple(products), tuple(rowwise))

    def heads(self, form: str) -> HeadShape:  # noqa: ARG002
        """H heads, no cached keys."""
        return HeadShape(self.num_heads, None, self.head_k_dim, self.head_v_dim)

    def query_heads(self) -> int:
        """H."""
        return self.num_heads

    def shard(self, tp: int) -> "RetNet":
        """H / tp heads with their state; the norm replicated."""
        check_tp(tp, self.num_heads)
        return replace(self, num_heads=self.num_heads // tp)

    def with_kv_heads(self, kv_heads: int) -> Attention | None:  # noqa: ARG002
        """No keys or values are cached."""
        return None
