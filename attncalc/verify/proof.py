"""One proof: what was expected, what was observed, how far apart."""

from fractions import Fraction
from typing import Any, NamedTuple

from torch import Tensor

TOLERANCE = 1e-12
"""Of an identity in float64, relative to the largest expected magnitude."""

Value = int | float | str


class Proof(NamedTuple):
    """`error` is relative to the largest expected magnitude; `limit` the largest that passes."""

    text: str
    source: str
    expected: Value
    observed: Value
    error: float
    limit: float = 0.0
    differs: bool = False

    @property
    def ok(self) -> bool:
        """Within the limit; where the claim is that two things differ, beyond it."""
        return self.error > self.limit if self.differs else self.error <= self.limit

    def row(self, claim: str) -> dict[str, Any]:
        """The row as JSON has it."""
        return {
            "claim": claim,
            "text": self.text,
            "source": self.source,
            "expected": self.expected,
            "observed": self.observed,
            "error": self.error,
            "must_differ": self.differs,
            "ok": self.ok,
        }


Number = int | float | Fraction


def figure(text: str, source: str, expected: Number, observed: Number) -> Proof:
    """Two exact numbers; a published ratio that is rounded is compared as it is printed."""
    error = abs(float(observed - expected)) / abs(float(expected)) if expected else float(observed != expected)
    return Proof(text, source, _plain(expected), _plain(observed), error)


def _plain(value: Number) -> int | float:
    if isinstance(value, Fraction):
        return value.numerator if value.denominator == 1 else float(value)
    return value


def same(text: str, source: str, expected: Tensor, observed: Tensor, limit: float = TOLERANCE) -> Proof:
    """Two tensors that must be equal; shown are their norms."""
    error = float((observed - expected).abs().max() / expected.abs().max())
    return Proof(text, source, float(expected.norm()), float(observed.norm()), error, limit)


def different(text: str, source: str, expected: Tensor, observed: Tensor, limit: float = 1e-3) -> Proof:
    """Two tensors that must not be equal."""
    return same(text, source, expected, observed, limit)._replace(differs=True)
