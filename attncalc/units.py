"""Numbers as people write and read them."""

import re
from typing import TYPE_CHECKING

from attncalc.errors import AttncalcError, shown

if TYPE_CHECKING:
    from fractions import Fraction

MAX_COUNT = 2**53
"""Largest count that JSON readers keep exact."""

_COUNT = re.compile(r"(\d+(?:_\d+)*|\d{1,3}(?:,\d{3})+)([kKM]?)")
_COUNT_SCALE = {"": 1, "k": 2**10, "K": 2**10, "M": 2**20}
_RATIO = re.compile(r"\d{1,9}(\.\d{1,9}|/[1-9]\d{0,8})?", re.ASCII)
_BYTES = re.compile(r"(\d+)(?:\.(\d+))?\s*(B|[kMGT]B|[KMGT]iB)")
_BYTE_SCALE = {"B": 1} | {
    f"{prefix}{suffix}": base**power
    for suffix, base, prefixes in (("B", 1000, "kMGT"), ("iB", 1024, "KMGT"))
    for power, prefix in enumerate(prefixes, 1)
}


def parse_count(text: str | int, where: str, *, minimum: int = 1) -> int:
    """A whole number: `131072`, `131_072`, `131,072`, `128k` (k = 2^10), `1M` (M = 2^20).

    Raises:
        AttncalcError: fractions, exponents, signs, and what is below `minimum` or above 2^53.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        value = text
    else:
        found = _COUNT.fullmatch(str(text).strip()) if len(str(text)) < 40 else None
        if not found:
            rule = f"must be a whole number of at least {minimum}, without a sign or a fraction"
            raise AttncalcError(where, rule, got=shown(text), hint="Write 131072, 131_072 or 128k")
        value = int(found[1].replace("_", "").replace(",", "")) * int(_COUNT_SCALE[found[2]])
    if not minimum <= value <= MAX_COUNT:
        raise AttncalcError(where, f"must be between {minimum} and 2^53", got=shown(text))
    return value


def parse_bytes(text: str, where: str) -> int:
    """A size in bytes: `80GB` (10^9), `5.38GiB` (2^30); a fraction of a byte is cut off.

    Raises:
        AttncalcError: no unit, an unknown unit, or a sign.
    """
    found = _BYTES.fullmatch(text.strip())
    if not found:
        hint = "GB is 10^9 bytes, GiB is 2^30"
        raise AttncalcError(where, "must be a size such as 80GB or 74.5GiB", got=shown(text), hint=hint)
    whole, fraction, unit = found[1], found[2] or "", found[3]
    scale: int = _BYTE_SCALE[unit]
    return int(whole + fraction) * scale // int(10 ** len(fraction))


def parse_ratio(text: str, where: str) -> "Fraction":
    """An exact number such as `0.9` or `1/4`.

    Raises:
        AttncalcError: a sign, an exponent, a percentage.
    """
    from fractions import Fraction

    if not _RATIO.fullmatch(text.strip()):
        raise AttncalcError(where, "must be a number such as 0.8 or 1/4", got=shown(text))
    return Fraction(text.strip())


def significant(value: float) -> str:
    """Three significant digits without an exponent: 9.21, 92.1, 921, 1,008."""
    if value >= 999.5:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _scaled(value: int, steps: tuple[tuple[int, str], ...]) -> str:
    base = steps[0][0] // steps[1][0]
    for scale, unit in steps:
        # 999,999,999 rounds to a whole GB: the unit is chosen after the rounding.
        if value >= scale or (base == 1000 and value / scale >= 0.9995):
            return f"{significant(value / scale)} {unit}"
    return f"{value:,} {steps[-1][1].lstrip('kK').replace('iB', 'B')}"


def decimal_bytes(value: int) -> str:
    """Bytes in powers of 1000: `9.21 GB`."""
    return _scaled(value, ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB")))


def binary_bytes(value: int) -> str:
    """Bytes in powers of 1024: `8.58 GiB`."""
    return _scaled(value, ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")))


def both_bytes(value: int) -> str:
    """Bytes in both units: `9.21 GB (8.58 GiB)`."""
    return f"{decimal_bytes(value)} ({binary_bytes(value)})"


def flops_text(value: int) -> str:
    """FLOPs in powers of 1000: `36.5 GFLOP`."""
    steps = tuple((10**p, f"{x}FLOP") for p, x in ((18, "E"), (15, "P"), (12, "T"), (9, "G"), (6, "M"), (3, "k")))
    return _scaled(value, steps) if value >= 1000 else f"{value} FLOP"
