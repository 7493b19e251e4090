"""Softmax attention that reads more than the hidden state: Zamba's shared block, over it beside the embedding.

q, k, v (and a gate) are made of `input_size` values, the output has the hidden size; in Zamba and Zamba2 the input is
the hidden state and the first layer's, 2*D wide, and scores are scaled by (d/2)^-1/2. Sources: arXiv 2405.16712
section 3 (Zamba); arXiv 2411.15242 (Zamba2); transformers 5.24 `models/zamba2`.
"""

from dataclasses import dataclass, field
from typing import ClassVar

from attncalc.attention.base import require
from attncalc.attention.gqa import GQA
from attncalc.axes import Dim


@dataclass(frozen=True)
class ConcatGQA(GQA):
    """GQA with q, k and v of `input_size` values."""

    input_size: int = field(kw_only=True)

    source: ClassVar[str] = "arXiv 2405.16712 section 3; arXiv 2411.15242"
    input_axis: ClassVar[str] = "i"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "input_size")

    @property
    def variant(self) -> str:
        """The id in the registry, for any number of KV heads."""
        return "gqa-concat"

    @property
    def _axes(self) -> dict[str, Dim]:
        return super()._axes | {"i": Dim(self.input_size, "input_size")}
