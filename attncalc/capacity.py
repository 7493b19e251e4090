"""What fits: the inverse of the cache. How many tokens, and how many sequences, a memory holds beside the weights.

The answer is the largest n such that every m <= n fits, for curves with steps (pages, padded cells), plateaus (windows)
and drops (an unfinished block that is folded into an entry); it is found by evaluating the allocation itself.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from attncalc.allocation import Allocation, Request, allocate, model_formats, own_form
from attncalc.dtypes import Formats
from attncalc.engines import engine as find_engine
from attncalc.engines.blocks import pad
from attncalc.engines.log import FRACTION_OF_FREE, Logged, block_bytes, logged
from attncalc.engines.options import EngineOptions
from attncalc.engines.stages import within
from attncalc.errors import AttncalcError, check_type, shown
from attncalc.model import LayerGroup, Model
from attncalc.search import largest
from attncalc.units import MAX_COUNT
from attncalc.weights import bytes_on_gpu

if TYPE_CHECKING:
    from fractions import Fraction


@dataclass(frozen=True)
class Memory:
    """The memory of one GPU: all of it (`total`), what a model leaves `free`, or what the `cache` may take.

    One of the three is given. An engine takes the `fraction` of the total, or of what is free (TensorRT-LLM);
    `reserve` is for what is not modelled.
    """

    total: int | None = None
    free: int | None = None
    cache: int | None = None
    fraction: "Fraction | int" = 1
    reserve: int = 0

    def __post_init__(self) -> None:
        from fractions import Fraction

        ways = {"total": self.total, "free": self.free, "cache": self.cache}
        given = [name for name, value in ways.items() if value is not None]
        if len(given) != 1:
            raise AttncalcError("memory", "must be one of total, free and cache", got=" and ".join(given) or "none")
        for name, value in (*((n, ways[n]) for n in given), ("reserve", self.reserve)):
            check_type(value, int, f"memory {name}", "must be a whole number of bytes")
            if value is None or value < 0:
                raise AttncalcError(f"memory {name}", "must not be below 0", got=shown(value))
        check_type(self.fraction, (int, Fraction), "memory fraction", "must be a Fraction or 1")
        if not 0 < self.fraction <= 1:
            raise AttncalcError("memory fraction", "must be above 0 and at most 1", got=shown(str(self.fraction)))

    def budget(self, weights: int, engine: str) -> int:
        """Bytes for the cache; below zero where the weights alone do not fit.

        total:    floor(fraction * total) - weights - reserve, or floor(fraction * (total - weights - reserve))
        free:     free - reserve, or floor(fraction * (free - reserve))
        cache:    as given
        """
        if self.cache is not None:
            return self.cache
        f, of_free = self.fraction, engine in FRACTION_OF_FREE
        if self.free is not None:
            free = self.free - self.reserve
        elif of_free:
            free = (self.total or 0) - weights - self.reserve
        else:
            return (self.total or 0) * f.numerator // f.denominator - weights - self.reserve
        return free * f.numerator // f.denominator if of_free else free


class Room(NamedTuple):
    """One GPU of those that hold the same layers: its weights (None where not known), and what the cache may take."""

    layers: tuple[int, ...]
    bytes_weights: int | None
    bytes_budget: int


class Capacity(NamedTuple):
    """What a memory holds of one model under one engine.

    `rooms`: of every pipeline stage. `longest`: tokens of the longest single sequence, None where none that is
    counted is too long (`constant`: since the cache does not grow); it takes `bytes_used` of the room that is full, and
    one token more would take `bytes_next`. `formats` and `settings`: those that the engine keeps and has.
    """

    model: Model
    engine: str
    request: Request
    rooms: tuple[Room, ...]
    full: Room
    longest: int | None
    bytes_used: int
    bytes_next: int | None
    longest_of_batch: int | None
    sequences: int | None
    log: Logged | None
    replicated: tuple[str, ...]
    formats: Formats
    settings: EngineOptions
    constant: bool

    @property
    def tokens(self) -> int | None:
        """What the pool of one replica holds, as the engine logs it; without a log the longest sequence."""
        return self.log.tokens if self.log else self.longest

    @property
    def tokens_one_sequence(self) -> int | None:
        """Not above the model's published maximum."""
        return self._capped(self._share(self.longest))

    @property
    def context_of_batch(self) -> int | None:
        """The longest context of `batch` sequences, not above the model's published maximum."""
        return self._capped(self._share(self.longest_of_batch))

    @property
    def limiting(self) -> str | None:
        """What keeps a sequence from being longer; `slots` where they keep more sequences away."""
        longest, maximum = self._share(self.longest), self.model.max_position_embeddings
        if longest is None or (maximum and longest >= maximum):
            return "model_maximum" if maximum else None
        slots = self.request.options.slots
        return "slots" if slots and self.sequences == slots else "memory"

    def _share(self, tokens: int | None) -> int | None:
        """Of the tokens that all slots have together, those of one."""
        slots, shared = self.request.options.slots, self.request.options.kv_unified
        return tokens if tokens is None or not slots or shared else tokens // slots

    def _capped(self, tokens: int | None) -> int | None:
        maximum = self.model.max_position_embeddings
        return tokens if not maximum else maximum if tokens is None else min(tokens, maximum)


def longest(fits: Callable[[int], bool], period: int = 1, limit: int = MAX_COUNT) -> int:
    """The largest n <= `limit` such that every m from 1 to n fits; 0 if 1 does not.

    Precondition: what fits at m + `period` fits at m. Then numbers that are equal modulo the period fit up to one of
    them and no further, and so do whole blocks of `period` numbers, which are searched by halving.
    """
    fits = cache(fits)

    def clean(block: int) -> bool:
        return all(fits(n) for n in range(block * period, (block - 1) * period, -1))

    last = _last(lambda block: fits(block * period), limit // period)
    n = period * _last_below(clean, last)
    while n < limit and fits(n + 1):
        n += 1
    return n


def _last(holds: Callable[[int], bool], limit: int) -> int:
    """The largest k <= limit with holds(k), where holds(k + 1) implies holds(k); 0 if there is none."""
    low, high = 0, 1
    while high <= limit and holds(high):
        low, high = high, 2 * high
    return largest(holds, low, min(high, limit + 1))


def _last_below(holds: Callable[[int], bool], top: int) -> int:
    """The same, found from `top` downwards: it is near."""
    low, high, step = top, top + 1, 1
    while low > 0 and not holds(low):
        low, high, step = max(0, low - step), low, 2 * step
    return largest(holds, low, high)


def fit(
    model: Model,
    context: int,
    memory: Memory,
    *,
    batch: int = 1,
    engine: str = "logical",
    form: str | None = None,
    tp: int = 1,
    mtp: bool = False,
    formats: Formats | None = None,
    options: EngineOptions | None = None,
) -> Capacity:
    """What `memory` holds of `model`: the longest sequence, and how many of `context` tokens.

    Raises:
        AttncalcError: the engine, the form, the formats, the options or the split do not fit the model.
    """
    check_type(memory, Memory, "memory", "must be Memory", "Write Memory(total=80 * 10**9)")
    options = EngineOptions() if options is None else options
    formats = model_formats(model) if formats is None else formats
    # Refuses what `cache` refuses.
    allocate(model, context, batch=batch, engine=engine, form=form, tp=tp, mtp=mtp, formats=formats, options=options)
    request = Request(context, batch, formats, form, tp, mtp, options)
    rooms, profile = tuple(_rooms(model, engine, request, memory)), find_engine(engine)

    @cache
    def kept(n: int, sequences: int) -> Allocation:
        return profile.allocate(model, replace(request, context=n, batch=sequences))

    def fits(n: int, sequences: int) -> bool:
        return all(taken <= r.bytes_budget for taken, r in zip(_taken(kept(n, sequences)), rooms, strict=True))

    every = replace(request, options=replace(options, pp=None))
    period = profile.allocate(model, every).period
    found = longest(lambda n: fits(n, 1), period)
    sequences = _in_slots(options, found, context) if options.slots else longest(lambda b: fits(context, b))
    of_batch = found if batch == 1 else longest(lambda n: fits(n, batch), period)
    beyond = [None for _ in rooms] if found == MAX_COUNT else _taken(kept(found + 1, 1))
    full = next((i for i, (n, r) in enumerate(zip(beyond, rooms, strict=True)) if n and n > r.bytes_budget), 0)
    used = _taken(kept(found, 1))[full] if found else 0
    asked = kept(context, 1)
    log = logged(engine, asked, [r.bytes_budget for r in rooms], lambda n: kept(n, 1), found)
    return Capacity(
        model,
        engine,
        request,
        rooms,
        rooms[full],
        _finite(found),
        used,
        beyond[full],
        _finite(of_batch),
        _finite(sequences),
        log,
        asked.replicated,
        asked.formats,
        asked.settings,
        found == MAX_COUNT and _taken(kept(found, 1)) == _taken(kept(found // 2, 1)),
    )


def _in_slots(options: EngineOptions, tokens: int, context: int) -> int:
    """Sequences of `context` tokens that slots hold which have so many tokens together."""
    slots = options.slots or 1
    if options.kv_unified:
        return min(slots, tokens // context)
    return slots if tokens // slots >= context else 0


def _taken(made: Allocation) -> list[int]:
    """Bytes of every stage."""
    return [stage.bytes_total for stage in made.stages] or [made.bytes_total]


def _finite(n: int) -> int | None:
    """None where nothing was too much."""
    return None if n == MAX_COUNT else n


def _rooms(model: Model, engine: str, request: Request, memory: Memory) -> Iterator[Room]:
    """Every pipeline stage with its own layers, weights and budget; one where there is no pipeline."""
    groups, options, tp = model.layer_groups(mtp=request.mtp), request.options, request.tp
    made = find_engine(engine).allocate(model, replace(request, batch=1))
    stages = [stage.layers for stage in made.stages] or [tuple(sorted({i for g in groups for i in g.indices}))]
    if model.partial and memory.total is not None:
        rule, missing = f"the weights of {model.id} are known only in part", "; ".join(model.partial)
        raise AttncalcError("--device", rule, got=f"without {missing}", hint="Give --memory or --free-memory")
    unplaced = _unplaced(model, groups) if len(stages) > 1 else ""
    if unplaced and memory.total is not None:
        rule = f"the stage of some weights of {model.id} is not known"
        raise AttncalcError("--pp", rule, got=unplaced, hint="Give --memory")
    heads = tp // (options.dp or 1) if options.dp_attention else tp
    for i, stage in enumerate(stages):
        here = tuple(part for g in groups if (part := within(g, stage)))
        weights = bytes_on_gpu(
            model,
            here,
            request.formats,
            form=_form(here, request.form),
            tp=tp,
            attention_tp=heads,
            first=i == 0,
            last=i + 1 == len(stages),
            mtp=request.mtp,
        )
        budget = memory.budget(weights, engine)
        if engine in FRACTION_OF_FREE and memory.cache is None and budget > 0:
            budget = pad(budget, block_bytes(made)[i])
        yield Room(stage, None if unplaced else weights, budget)


def _unplaced(model: Model, groups: tuple[LayerGroup, ...]) -> str:
    """Weights of layers of which a model does not say which layers have them."""
    if any(g.joined and g.joined.weight_copies for g in groups):
        return "layers that share weights"
    return ", ".join(w.name for w in model.extra_weights if w.place in ("attention", "ffn"))


def _form(groups: tuple[LayerGroup, ...], form: str | None) -> str | None:
    return next((f for g in groups if (f := own_form(g, form))), None)
