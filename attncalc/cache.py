"""What a layer keeps between steps: cache tensors, and how each grows.

Stored and read are different things: a window stores W tokens and reads them, a recurrent state is constant and
is read and written at each step, a layer that borrows a cache stores nothing and reads it. This module knows what
is stored; what is read stands in the operations.
"""

from typing import TYPE_CHECKING, NamedTuple

from attncalc.axes import Dim
from attncalc.dtypes import Formats, whole_bytes
from attncalc.reach import Reach

if TYPE_CHECKING:
    from fractions import Fraction


class Tensor(NamedTuple):
    """A cache tensor at a given context: its shape with the batch, its format, its bytes."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int


class CacheTensor(NamedTuple):
    """One tensor that one layer keeps for each sequence: [heads, tokens, width].

    `reach` says how the token axis grows; None is a constant of `rows`. `kind` picks the storage format.
    """

    name: str
    kind: str
    heads: Dim
    width: Dim
    reach: Reach | None
    rows: int = 0

    @property
    def elements_per_token(self) -> "int | Fraction":
        """Elements that one token adds while the tensor grows, on average over a row; 0 for a constant."""
        return 0 if self.reach is None else _shared_out(self.heads.size * self.width.size, self.reach)

    def bits_per_token(self, formats: Formats) -> "int | Fraction":
        """Bits that one token adds while the tensor grows, on average over a row; 0 for a constant."""
        return 0 if self.reach is None else _shared_out(self.row_bits(formats), self.reach)

    def tokens(self, context: int) -> int:
        """Rows of the token axis."""
        return self.rows if self.reach is None else self.reach.stored(context)

    def row_bits(self, formats: Formats) -> int:
        """Bits of one token in all heads."""
        return self.heads.size * formats.row(self.kind, self.width.size)

    def at(self, context: int, batch: int, formats: Formats) -> Tensor:
        """The tensor as it stands when `batch` sequences hold `context` tokens each."""
        shape = (batch, self.heads.size, self.tokens(context), self.width.size)
        bits = batch * self.tokens(context) * self.row_bits(formats)
        name = formats.of(self.kind, self.width.size).name
        return Tensor(self.name, shape, name, whole_bytes(bits, f"cache tensor {self.name}"))

    def growth_bits(self, context: int, formats: Formats) -> "int | Fraction":
        """Bits that the next token of one sequence adds at this context; compressed rows on average."""
        if self.reach and self.reach.kind == "compressed":
            return self.bits_per_token(formats)
        return (self.tokens(context + 1) - self.tokens(context)) * self.row_bits(formats)


def _shared_out(row: int, reach: Reach) -> "int | Fraction":
    """What each of the tokens adds that share a row of the cache."""
    tokens = reach.stride or 1
    if row % tokens == 0:
        return row // tokens
    from fractions import Fraction

    return Fraction(row, tokens)


def total_bytes(tensors: tuple[Tensor, ...]) -> int:
    """Sum of their bytes."""
    return sum(t.bytes for t in tensors)
