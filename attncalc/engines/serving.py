"""What serving engines have in common: the form of a step, and the account of bytes that differ from the logical."""

from attncalc.allocation import Reason
from attncalc.attention.base import Attention
from attncalc.attention.dsa import DSA
from attncalc.attention.kda import KDA
from attncalc.engines.base import Execution
from attncalc.engines.options import EngineOptions
from attncalc.errors import AttncalcError
from attncalc.workload import Workload


def served(
    engine: str, attention: Attention, workload: Workload, form: str | None, options: EngineOptions
) -> Execution:
    """MLA absorbed up to 1 + draft tokens, else on K and V; state layers in chunks, if they have them.

    A whole prompt is `decompressed`; where context came earlier, it is expanded too, once in the step (`expanded`).
    Kernels that select rows of DSA work on latents, so that K and V are made only where all rows are selected.

    Raises:
        AttncalcError: another form is wished for.
    """
    own = attention.forms[0]
    if "absorbed" in attention.forms:
        selects = isinstance(attention, DSA) and workload.context > attention.index_topk
        if workload.new_tokens > 1 + (options.draft_tokens or 0) and not selects:
            own = "decompressed" if workload.new_tokens == workload.context else "expanded"
    elif "chunked" in attention.forms:
        own = attention.default_form(workload)
    if form is not None and form != own:
        raise AttncalcError("--form", f"{engine} computes {attention.variant} {own} in such a step", got=form)
    return Execution(own, attention.forms[0])


def check_square(engine: str, attention: Attention) -> None:
    """Refuse a state of KDA whose keys and values differ in width: the engine's shapes know one width."""
    if isinstance(attention, KDA) and attention.head_k_dim != attention.head_v_dim:
        got = f"{attention.head_k_dim} and {attention.head_v_dim}"
        raise AttncalcError("--engine", f"{engine} keeps states of KDA with keys and values of one width", got=got)


class Ledger:
    """Bytes above (or below) the logical cache, by the rule that makes them; the order is that of the rules."""

    def __init__(self) -> None:
        self._bytes: dict[str, int] = {}

    def add(self, rule: str, amount: int) -> None:
        """Put `amount` to the account of a rule."""
        if amount:
            self._bytes[rule] = self._bytes.get(rule, 0) + amount

    @property
    def reasons(self) -> tuple[Reason, ...]:
        """Rules whose bytes do not cancel."""
        return tuple(Reason(rule, amount) for rule, amount in self._bytes.items() if amount)
