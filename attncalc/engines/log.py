"""What engines print at start about the memory of their cache: the tokens that they count, and the lines.

An engine that is not named here prints nothing of the kind.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from attncalc.allocation import Allocation
from attncalc.engines.options import read_version

FRACTION_OF_FREE = ("tensorrt-llm",)
"""Engines whose memory fraction is one of what is free after the weights; elsewhere it is of the whole memory."""


class Logged(NamedTuple):
    """The tokens that an engine says it has room for, and its lines."""

    tokens: int
    lines: tuple[str, ...]


class Start(NamedTuple):
    """What an engine knows at start.

    `made`: one sequence of its maximum length. `budgets`: bytes for the cache on a GPU of every stage. `at`: what a
    sequence of n tokens takes; `longest`: the longest that fits.
    """

    made: Allocation
    budgets: Sequence[int]
    at: Callable[[int], Allocation]
    longest: int


def logged(
    engine: str, made: Allocation, budgets: Sequence[int], at: Callable[[int], Allocation], longest: int
) -> Logged | None:
    """What the engine prints, if it prints anything of the kind."""
    printer = PRINTERS.get(engine)
    return printer(Start(made, budgets, at, longest)) if printer else None


def _vllm(start: Start) -> Logged:
    """Tokens: int(max_model_len * concurrency); before 0.21 blocks // groups * the smallest block.

    Source: vLLM 0.33 `v1/core/kv_cache_planning.py`, `v1/core/kv_cache_utils.py` of versions before.
    """
    made, (pool,) = start.made, start.made.pools
    length, blocks = made.context, _blocks(start)
    needed = pool.blocks(length)
    if _before(made.options.version, (0, 21)):
        smallest = min(g.block_tokens for g in pool.groups if g.block_tokens)
        tokens = blocks // len(pool.groups) * smallest * (made.options.dcp or 1)
    else:
        tokens = blocks * length // needed
    if blocks < needed:
        return Logged(tokens, (_too_long(start, blocks),))
    lines = (
        f"GPU KV cache size: {tokens:,} tokens",
        f"Maximum concurrency for {length:,} tokens per request: {decimals(blocks, needed)}x",
    )
    return Logged(tokens, lines)


def _too_long(start: Start, blocks: int) -> str:
    """The refusal to start where not even one request fits, with the longest that would."""
    made, (pool,) = start.made, start.made.pools
    totals = [s.bytes_total for s in made.stages] or [made.bytes_total]
    each = [n // (pool.blocks(made.context) + pool.spare_blocks) for n in totals]
    stage = min(range(len(each)), key=lambda i: start.budgets[i] // each[i])
    low, high = 0, made.context
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if pool.blocks(middle) <= blocks else (low, middle)
    return (
        f"To serve at least one request with the model's max seq len ({made.context}), "
        f"({decimals(pool.blocks(made.context) * each[stage], GIB)} GiB KV cache is needed, which is larger than the "
        f"available KV cache memory ({decimals(max(0, start.budgets[stage]), GIB)} GiB). Based on the available "
        f"memory, the estimated maximum model length is {low}."
    )


def _blocks(start: Start) -> int:
    """Blocks of the pool: those of the stage that has fewest."""
    made, (pool,) = start.made, start.made.pools
    held = pool.blocks(made.context) + pool.spare_blocks
    totals = [s.bytes_total for s in made.stages] or [made.bytes_total]
    return max(0, min(b * held // n for b, n in zip(start.budgets, totals, strict=True)))


def _before(version: str | None, limit: tuple[int, int]) -> bool:
    """Whether rules of a version before `limit` are followed."""
    return version is not None and read_version(version, "", (0, 0), (9999, 0))[:2] < limit


GIB = 2**30


def decimals(n: int, unit: int, places: int = 2) -> str:
    """The quotient with so many decimals, rounded as printf does (half to even)."""
    whole, rest = divmod(n * 10**places, unit)
    whole += int(2 * rest > unit or (2 * rest == unit and whole % 2 == 1))
    text = str(whole).zfill(places + 1)
    return f"{text[:-places]}.{text[-places:]}"


PRINTERS: dict[str, Callable[[Start], Logged]] = {"vllm": _vllm}
