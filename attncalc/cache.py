"""What a layer keeps between steps: cache tensors, and how each grows.

Stored and read are different things: a window stores W tokens and reads them, a recurrent state is constant and
is read and written at each step, a layer that borrows a cache stores nothing and reads it. This module knows what
is stored; what is read stands in the operations.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from attncalc.axes import Dim
from attncalc.dtypes import Formats, whole_bytes
from attncalc.reach import ratio

if TYPE_CHECKING:
    from fractions import Fraction


class Growth(Protocol):
    """How many rows are kept, and how many the next token adds; a `Reach`, or a rule that only an engine has."""

    def stored(self, context: int) -> int:
        """Rows at this context."""

    def growth(self, context: int) -> "int | Fraction":
        """Rows that the next token adds, averaged over one period of the rule."""

    @property
    def tokens_per_row(self) -> int:
        """Tokens that share a row."""

    @property
    def period(self) -> int:
        """Tokens after which there are never fewer rows than before; 1 where rows are only added."""

    @property
    def stored_formula(self) -> str:
        """How `stored` is computed; empty where it is the context."""


class Tensor(NamedTuple):
    """A cache tensor at a given context: its shape with the batch, its format, its bytes."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int


class CacheTensor(NamedTuple):
    """One tensor that one layer keeps for each sequence: [heads, tokens, width].

    `reach` says how the token axis grows, by a row for each token or for each block of tokens; None is a constant of
    `rows`. `kind` picks the storage format.
    """

    name: str
    kind: str
    heads: Dim
    width: Dim
    reach: Growth | None
    rows: int = 0

    @property
    def elements_per_token(self) -> "int | Fraction":
        """Elements that one token adds while the tensor grows, its share of a row; 0 for a constant."""
        return 0 if self.reach is None else ratio(self.heads.size * self.width.size, self.reach.tokens_per_row)

    def bits_per_token(self, formats: Formats) -> "int | Fraction":
        """Bits that one token adds while the tensor grows; 0 for a constant."""
        return 0 if self.reach is None else ratio(self.row_bits(formats), self.reach.tokens_per_row)

    def tokens(self, context: int) -> int:
        """Rows of the token axis."""
        return self.rows if self.reach is None else self.reach.stored(context)

    def row_bits(self, formats: Formats) -> int:
        """Bits of one row in all heads."""
        return self.heads.size * formats.row(self.kind, self.width.size)

    def at(self, context: int, batch: int, formats: Formats) -> Tensor:
        """The tensor as it stands when `batch` sequences hold `context` tokens each."""
        shape = (batch, self.heads.size, self.tokens(context), self.width.size)
        bits = batch * self.tokens(context) * self.row_bits(formats)
        name = formats.of(self.kind, self.width.size).name
        return Tensor(self.name, shape, name, whole_bytes(bits, f"cache tensor {self.name}"))

    def grows(self, context: int) -> bool:
        """Whether later tokens add rows."""
        return self.reach is not None and self.reach.growth(context) > 0

    def growth_bits(self, context: int, formats: Formats) -> "int | Fraction":
        """Bits that the next token of one sequence adds at this context, averaged over a period."""
        return 0 if self.reach is None else self.reach.growth(context) * self.row_bits(formats)


def total_bytes(tensors: tuple[Tensor, ...]) -> int:
    """Sum of their bytes."""
    return sum(t.bytes for t in tensors)


def growing(tensors: Sequence[CacheTensor], context: int) -> list[CacheTensor]:
    """The tensors that one token's record is made of: those that still grow; where none does, all that ever did.

    A full window beside entries of the whole context is part of no later token's record.
    """
    still = [t for t in tensors if t.grows(context)]
    return still or [t for t in tensors if t.reach is not None]
