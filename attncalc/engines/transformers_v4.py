"""What transformers 5.24 keeps for DeepSeek-V4: unfinished blocks instead of a compressor state of constant size.

Sources: transformers 5.24.0 `models/deepseek_v4/modeling_deepseek_v4.py` (DeepseekV4HCACache, DeepseekV4CSACache) and
`cache_utils.py` (DynamicSlidingWindowLayer).
"""

from typing import TYPE_CHECKING, NamedTuple

from attncalc.attention.csa import CSA
from attncalc.axes import Dim
from attncalc.cache import CacheTensor
from attncalc.reach import Reach

if TYPE_CHECKING:
    from fractions import Fraction


class Pending(NamedTuple):
    """The tokens since the last whole block of `period`: S mod m, which over one period grows by nothing."""

    period: int
    tokens_per_row: int = 1

    def stored(self, context: int) -> int:
        """S mod m."""
        return context % self.period

    def growth(self, context: int) -> "int | Fraction":  # noqa: ARG002
        """None on average."""
        return 0

    @property
    def stored_formula(self) -> str:
        """How `stored` is computed."""
        return f"context mod {self.period}, the unfinished block"


class LastBlock(NamedTuple):
    """The last whole block of `period` tokens: m rows from S = m on."""

    period: int
    tokens_per_row: int = 1

    def stored(self, context: int) -> int:
        """Rows m, or none before the first block is whole."""
        return self.period if context >= self.period else 0

    def growth(self, context: int) -> "int | Fraction":
        """Rows m over the m tokens of the first block."""
        return 1 if context < self.period else 0

    @property
    def stored_formula(self) -> str:
        """How `stored` is computed."""
        return f"{self.period} from {self.period} tokens on, the last whole block"


def layout(spec: CSA, window: Reach) -> tuple[CacheTensor, ...]:
    """Every tensor of one layer; `window` is what the sliding part keeps.

    Without entries K and V are copies of each other; with them they are one tensor. Rows of an unfinished block hold
    c and z (KV and gate); where blocks overlap, the first halves of the last block are kept, its gate in float32.
    """
    one, width, m = Dim(1, ""), Dim(spec.head_dim, "head_dim"), spec.compress_ratio
    if not m:
        return tuple(CacheTensor(name, "shared_kv", one, width, window) for name in ("k", "v"))
    tensors = [CacheTensor("window_kv", "shared_kv", one, width, window)]
    branches = [("compressed_kv", "", "shared_kv", width)]
    if spec.sparse:
        branches.append(("index_k", "index_", "index", Dim(spec.index_head_dim, "index_head_dim")))
    for entries, prefix, kind, entry in branches:
        wide = Dim(spec.blocks_pooled * entry.size, f"{spec.blocks_pooled} * {entry.label}")
        tensors.append(CacheTensor(entries, kind, one, entry, spec.indexed))
        tensors += [CacheTensor(f"{prefix}pending_{x}", kind, one, wide, Pending(m)) for x in ("kv", "gate")]
        if spec.sparse:
            tensors.append(CacheTensor(f"{prefix}overlap_kv", kind, one, entry, LastBlock(m)))
            tensors.append(CacheTensor(f"{prefix}overlap_gate", "state", one, entry, LastBlock(m)))
    return tuple(tensors)


def rule(spec: CSA) -> str:
    """Why the layout differs from the logical one."""
    if not spec.compress_ratio:
        return "a sliding layer of DeepSeek-V4 keeps window - 1 tokens, K and V each"
    return "DeepSeek-V4 keeps window - 1 tokens, and of the compressor the unfinished block instead of a constant state"
