"""What is computed: how many tokens of how many sequences, and under which conventions."""

from dataclasses import dataclass, field

from attncalc.dtypes import Formats
from attncalc.errors import AttncalcError, check_type, shown
from attncalc.reach import Count
from attncalc.units import parse_count


@dataclass(frozen=True)
class Workload:
    """`batch` sequences of `context` tokens, of which the last `new_tokens` are computed in this step.

    Prefill is new_tokens == context, decode is new_tokens == 1; chunked prefill and speculative verification
    lie between.
    """

    context: int
    new_tokens: int = 1
    batch: int = 1

    def __post_init__(self) -> None:
        for name in ("context", "batch", "new_tokens"):
            value = getattr(self, name)
            if not isinstance(value, int):
                raise AttncalcError(name, "must be a whole number", got=shown(value))
            parse_count(value, name)
        if self.new_tokens > self.context:
            rule = f"must not exceed the context of {self.context} tokens, which counts the new ones"
            raise AttncalcError("new_tokens", rule, got=self.new_tokens)

    @property
    def phase(self) -> str:
        """A label only; every formula takes the three numbers."""
        if self.new_tokens == 1:
            return "decode"
        return "prefill" if self.new_tokens == self.context else "extend"


@dataclass(frozen=True)
class Conventions:
    """Everything a number depends on besides model and workload; printed with every result."""

    count: Count = "causal"
    form: str | None = None
    head_tokens: str = "all"
    mtp: bool = False
    formats: Formats = field(default_factory=Formats)

    def __post_init__(self) -> None:
        check_type(self.formats, Formats, "formats", "must be Formats", 'Write Formats(kv="fp8")')
        check_type(self.mtp, bool, "mtp", "must be True or False")
        if self.count not in ("causal", "dense"):
            raise AttncalcError("count", "must be causal or dense", got=shown(self.count))
        if self.head_tokens not in ("all", "last"):
            raise AttncalcError("head_tokens", "must be all or last", got=shown(self.head_tokens))
