"""Lightning attention: linear attention whose state fades by a fixed factor for each head.

S [d (key), d (value)] per head, from q, k, v = SiLU(x W_qkv), without a scale, a rotation or a norm on q and k:

    S_t = exp(-s) S_{t-1} + k v^T,  o = S_t^T q,

output RMSNorm over all heads * sigmoid(x W_gate), then out_proj. The slope of head h is s = 2^(-8 (h + 1) / H), in
deeper layers times 1 - layer / (layers - 1) + 1e-5. Sources: arXiv 2401.04658 section 3; MiniMax-01
(arXiv 2501.08313) section 2.2; parameter names as in transformers 5.24 models/minimax, whose decay tables are
constants and no parameters.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

from attncalc.attention.base import Attention, HeadShape, Step, check_form, check_tp, require
from attncalc.attention.state import kept, retention_chunked, retention_recurrent
from attncalc.axes import Dim, Weight
from attncalc.cache import CacheTensor
from attncalc.ops import ACTIVATION, GATE, RMS_NORM, Ops, Rowwise, Term, activation, product, weight
from attncalc.reach import Reach
from attncalc.workload import Workload


@dataclass(frozen=True)
class Lightning:
    """H = num_heads heads of width d = head_dim for q, k and v alike. `chunk_size`: C of the chunked form."""

    hidden_size: int
    num_heads: int
    head_dim: int
    chunk_size: int = 256

    forms: ClassVar[tuple[str, ...]] = ("recurrent", "chunked")
    source: ClassVar[str] = "arXiv 2401.04658 section 3; arXiv 2501.08313 section 2.2"

    def __post_init__(self) -> None:
        require(self, "hidden_size", "num_heads", "head_dim", "chunk_size")

    @property
    def variant(self) -> str:
        """The id in the registry."""
        return "lightning"

    def default_form(self, workload: Workload) -> str:
        """Recurrent for one new token, chunked for more."""
        return "recurrent" if workload.new_tokens == 1 else "chunked"

    @property
    def _axes(self) -> dict[str, Dim]:
        d = Dim(self.head_dim, "head_dim")
        return {
            "D": Dim(self.hidden_size, "hidden_size"),
            "h": Dim(self.num_heads, "num_heads"),
            "p": Dim(3, "3"),
            "k": d,
            "v": d,
        }

    def weights(self, form: str) -> tuple[Weight, ...]:  # noqa: ARG002
        """3*D*H*d for q, k and v, side by side in each head; H*d norm; D*H*d gate; H*d*D output; [out, in]."""
        shapes = {
            "qkv_proj.weight": "(h p k) D",
            "norm.weight": "(h v)",
            "output_gate.weight": "(h v) D",
            "out_proj.weight": "D (h v)",
        }
        axes = self._axes
        return tuple(Weight(name, shape, axes) for name, shape in shapes.items())

    def cache(self, reach: Reach, form: str) -> tuple[CacheTensor, ...]:  # noqa: ARG002
        """Constant: recurrent_state [B, H, d, d]."""
        return kept(self._axes, "h")

    def ops(self, step: Step, form: str, *, cached: str) -> Ops:  # noqa: ARG002
        """Projections, and `retention_recurrent` or `retention_chunked` of the module `state`."""
        check_form(self, form)
        axes = self._axes | step.axes
        core = retention_chunked(step, axes, self.chunk_size) if form == "chunked" else retention_recurrent(axes)
        x, y = activation("x", "b t D"), activation("y", "b t D")
        gate, attn = activation("gate", "b t h v"), activation("attn", "b t h v")
        made = Term("b t h p k", tuple(activation(n, "b t h k") for n in "qkv"))
        products = (
            product("qkv_proj", x, weight("qkv_proj", "h p k D"), made, axes),
            *core.contractions,
            product("output_gate", x, weight("output_gate", "h v D"), gate, axes),
            product("out_proj", attn, weight("out_proj", "D (h v)"), y, axes),
        )
        rowwise = (
            Rowwise("qkv_silu", "b t h p k", ACTIVATION, axes),
            *core.rowwise,
            Rowwise("norm", "b t h v", RMS_NORM, axes),
            Rowwise("gate", "b t h v", GATE, axes),
        )
        return Ops(products, rowwise)

    def heads(self, form: str) -> HeadShape:  # noqa: ARG002
        """H heads of width d, no cached keys."""
        return HeadShape(self.num_heads, None, self.head_dim, self.head_dim)

    def query_heads(self) -> int:
        """H."""
        return self.num_heads

    def shard(self, tp: int) -> "Lightning":
        """H / tp heads with their state; the norm over all heads is split with them."""
        check_tp(tp, self.num_heads)
        return replace(self, num_heads=self.num_heads // tp)

    def with_kv_heads(self, kv_heads: int) -> Attention | None:  # noqa: ARG002
        """No keys or values are cached."""
        return None
