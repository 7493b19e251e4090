"""Options that engines have: what a user can turn in one of them and what changes the bytes that it allocates."""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from attncalc.errors import AttncalcError, check_type, shown
from attncalc.units import parse_count, parse_ratio

if TYPE_CHECKING:
    from fractions import Fraction


@dataclass(frozen=True)
class EngineOptions:
    """Everything that can be set; None (or False) is not given, and the engine takes its own default.

    `version`: the version to follow, where its rules changed. `block_size`: tokens of a block (of a page).
    `max_batched_tokens`: tokens that a step may schedule, all batches in flight together. `draft_tokens`: tokens of a
    draft that a step verifies. `slots`, `ubatch`: sequences served at once, and tokens of a physical batch;
    `kv_unified`: the slots share one stream of cells.
    `swa_ratio`: tokens of the sliding pool for each of the full one. `pp`: the layers of each pipeline stage, or one
    number, the stages. `dcp`: GPUs that share the tokens of a replicated cache. `dp`: replicas that share the
    sequences; with `dp_attention` they lie within `tp` and hold whole sequences.
    """

    version: str | None = None
    block_size: int | None = None
    max_batched_tokens: int | None = None
    prefix_caching: bool = False
    no_hybrid_manager: bool = False
    draft_tokens: int | None = None
    slots: int | None = None
    ubatch: int | None = None
    kv_unified: bool = False
    swa_ratio: "Fraction | int | None" = None
    pp: tuple[int, ...] | None = None
    dcp: int | None = None
    dp: int | None = None
    dp_attention: bool = False

    def __post_init__(self) -> None:
        for name in COUNTS:
            value = getattr(self, name)
            if value is not None:
                check_type(value, int, option(name), "must be a whole number")
                parse_count(value, option(name), minimum=int(name != "draft_tokens"))
        for name in FLAGS:
            check_type(getattr(self, name), bool, option(name), "must be True or False")
        check_type(self.version, (str, type(None)), "--engine-version", 'must be text such as "0.21"')
        check_type(self.pp, (tuple, type(None)), "--pp", "must be a tuple such as (2,) or (16, 32)")
        for n in self.pp or ():
            check_type(n, int, "--pp", "must be whole numbers")
            parse_count(n, "--pp")
        if self.pp == ():
            raise AttncalcError("--pp", "needs at least one stage")
        if self.swa_ratio is not None:
            from fractions import Fraction  # slow to import, and rarely needed

            check_type(self.swa_ratio, (int, Fraction), "--swa-ratio", "must be a Fraction or 1")
            if not 0 < self.swa_ratio <= 1:
                raise AttncalcError("--swa-ratio", "must be above 0 and at most 1", got=shown(str(self.swa_ratio)))
        if self.dp_attention and self.dp is None:
            raise AttncalcError("--dp-attention", "needs the replicas of the attention", hint="Give --dp N")

    @property
    def given(self) -> tuple[str, ...]:
        """Names of the options that were set."""
        values = ((f.name, getattr(self, f.name)) for f in fields(self))
        return tuple(name for name, value in values if value is not None and value is not False)

    def record(self) -> dict[str, Any]:
        """What was set, as it stands in JSON."""
        plain = {"pp": list, "swa_ratio": str}
        return {name: plain.get(name, lambda v: v)(getattr(self, name)) for name in self.given}

    def without(self, name: str) -> "EngineOptions":
        """All others; replicas within tp go with their number."""
        left = [n for n in self.given if n != name and (n, name) != ("dp_attention", "dp")]
        return EngineOptions(**{n: getattr(self, n) for n in left})

    def every(self, known: Iterable[str]) -> dict[str, Any]:
        """All that an engine has, as it stands in JSON; null where a thing is not there."""
        found = self.record()
        unset = {"pp": [1], "dcp": 1, "dp": 1}
        return {name: found.get(name, unset.get(name, getattr(self, name))) for name in known}

    def limited(self, known: Iterable[str]) -> "EngineOptions":
        """Those that an engine has; replicas within tp are not replicas on GPUs of their own."""
        known = set(known)
        if self.dp_attention and "dp_attention" not in known:
            known.discard("dp")
        return EngineOptions(**{name: getattr(self, name) for name in self.given if name in known})


FLAGS = ("prefix_caching", "no_hybrid_manager", "kv_unified", "dp_attention")
COUNTS = ("block_size", "max_batched_tokens", "draft_tokens", "slots", "ubatch", "dcp", "dp")


def option(name: str) -> str:
    """The name that a user types."""
    return "--engine-version" if name == "version" else f"--{name.replace('_', '-')}"


def read_version(text: str | None, engine: str, oldest: tuple[int, ...], newest: tuple[int, ...]) -> tuple[int, ...]:
    """`5.14` or `5.14.1` as numbers; the newest where none is given.

    Raises:
        AttncalcError: it is no version, or one whose rules are not known.
    """
    if text is None:
        return newest
    parts = text.strip().removeprefix("v").split(".")
    if not 2 <= len(parts) <= 3 or not all(p.isascii() and p.isdigit() and len(p) < 5 for p in parts):
        example = ".".join(map(str, newest))
        raise AttncalcError("--engine-version", f"{engine} takes a version such as {example}", got=shown(text))
    version = tuple(int(p) for p in parts)
    if not oldest <= version[:2] <= newest:
        known = " to ".join(".".join(map(str, v)) for v in (oldest, newest))
        raise AttncalcError("--engine-version", f"{engine} is known from {known}", got=shown(text))
    return version


def check_since(
    engine: str, what: str, version: tuple[int, ...], first: tuple[int, ...], text: str | None, join: str = "."
) -> None:
    """Refuse a version older than the first one whose rules for `what` are known.

    Raises:
        AttncalcError: it is older.
    """
    if version < first:
        since = join.join(f"{part:02d}" if join == "-" else str(part) for part in first)
        rule = f"{engine}'s rules for {what} are known from {since}"
        raise AttncalcError("--engine-version", rule, got=shown(text))


def read_options(**text: Any) -> EngineOptions:
    """The options as typed: counts and ratios as text, None where not given."""
    values = {k: v for k, v in text.items() if v is not None and v is not False}
    for name in COUNTS:
        if name in values:
            values[name] = parse_count(values[name], option(name), minimum=int(name != "draft_tokens"))
    if "pp" in values:
        values["pp"] = tuple(parse_count(part.strip(), "--pp") for part in values["pp"].split(","))
    if "swa_ratio" in values:
        values["swa_ratio"] = parse_ratio(values["swa_ratio"], "--swa-ratio")
    return EngineOptions(**values)
