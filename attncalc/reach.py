"""Reach: which earlier tokens a query attends to, and how many of them a layer keeps.

Two exact functions say it all: `seen(n)`, the (query, key) pairs among the first n tokens of a sequence, and
`stored(context)`. New tokens at the positions context - T + 1 .. context attend to
`seen(context) - seen(context - T)` pairs, the token itself included. Derivation: a query at position i (from 1)
sees i keys (full), min(i, W) (window), ((i - 1) mod C) + 1 (chunk, Llama 4), min(floor((i - l) / m) + 1, k) entries
that stand for l tokens each, one every m tokens (compressed), or the tokens so far of k blocks, its own among them
(blocks); `seen` is the closed form of the sum.
"""

from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from fractions import Fraction

Count = Literal["causal", "dense"]


class Reach(NamedTuple):
    """`kind` and its `size`: the window W (current token included), the chunk C, the k of top-k; 0 for full.

    Top-k attends to min(i, k) of i keys and keeps all of them. `compressed`: an entry every `block` tokens, which
    stands for `span` tokens (0: for `block`); the keys are the entries, of which a query attends to `size` at most, or
    to all where that is 0. `blocks`: `size` blocks of `block` tokens, of which the last is the token's own; all tokens
    are kept.
    """

    kind: Literal["full", "window", "chunk", "top_k", "compressed", "blocks"] = "full"
    size: int = 0
    block: int = 1
    span: int = 0

    @property
    def tokens_per_row(self) -> int:
        """Tokens that add one row of the cache."""
        return self.block if self.kind == "compressed" else 1

    def seen(self, n: int) -> int:
        """Pairs among the first `n` tokens."""
        if self.kind == "compressed":  # the entry j of e is seen from token m * j + l - m on
            m, entries = self.block, self._attended(n)
            return entries * (n - self._late + 1) - m * entries * (entries + 1) // 2
        whole = self.size * self.block  # tokens up to which all are attended to
        if self.kind == "full" or n <= whole:
            return n * (n + 1) // 2  # of two neighbours one is even
        first = whole * (whole + 1) // 2
        if self.kind in ("window", "top_k"):
            return first + (n - whole) * whole
        if self.kind == "blocks":
            own, rest = divmod(n - whole, self.block)
            in_own = own * self.block * (self.block + 1) // 2 + rest * (rest + 1) // 2
            return first + (n - whole) * (whole - self.block) + in_own
        chunks, rest = divmod(n, self.size)
        return chunks * first + rest * (rest + 1) // 2

    @property
    def pooled(self) -> int:
        """Tokens that an entry stands for."""
        return self.span or self.block

    @property
    def _late(self) -> int:
        """Tokens by which an entry comes later than the end of its block."""
        return self.pooled - self.block

    def _entries(self, context: int) -> int:
        """Whole entries."""
        return max(0, (context - self._late) // self.block)

    def _attended(self, context: int) -> int:
        """Entries that the last of `context` tokens attends to."""
        return min(self._entries(context), self.size) if self.size else self._entries(context)

    def pairs(self, new_tokens: int, context: int, count: Count) -> int:
        """(query, key) pairs of one sequence and head: exact, or what a dense implementation computes."""
        if count == "dense":
            return new_tokens * self.keys(new_tokens, context, count)
        return self.seen(context) - self.seen(context - new_tokens)

    def keys(self, new_tokens: int, context: int, count: Count) -> int:
        """Distinct keys that a step reads; `dense`: a window with the new tokens before it, a chunk alike."""
        if not self.bounded:
            every = self.stored(context)
            if self.kind == "full" or count == "dense":
                return every  # an eager implementation masks the scores of all keys
            return min(every, self.pairs(new_tokens, context, count))  # a row for each pair, but no row twice
        if self.kind == "chunk" and count == "causal":
            return context - (context - new_tokens) // self.size * self.size
        return min(context, self.size + new_tokens - 1)

    def stored(self, context: int) -> int:
        """Rows that a later step can need, at most: all, min(S, W), min(S, C), or the whole entries."""
        if self.kind == "compressed":
            return self._entries(context)
        return min(context, self.size) if self.bounded else context

    @property
    def bounded(self) -> bool:
        """Whether what is kept stops growing."""
        return self.kind in ("window", "chunk")

    def growth(self, context: int) -> "int | Fraction":
        """Rows that the next token adds at this context, averaged over the tokens of a row."""
        if self.bounded:
            return self.stored(context + 1) - self.stored(context)
        return ratio(1, self.tokens_per_row)

    @property
    def period(self) -> int:
        """Rows are only added."""
        return 1

    @property
    def stored_formula(self) -> str:
        """How `stored` is computed; empty where it is the context."""
        if self.bounded:
            return f"min(context, {self.size}), the {self.kind}"
        if self.kind != "compressed":
            return ""
        if not self._late:
            return f"floor(context / {self.block}), one for each block"
        return f"max(0, floor((context - {self.span}) / {self.block}) + 1), entries of {self.span} tokens"

    def covers(self, other: "Reach") -> bool:
        """Whether a cache of this reach holds what a query of the other reach attends to."""
        return self.kind == "full" or (self.kind == other.kind and self.size >= other.size)

    @property
    def text(self) -> str:
        """`full`, `window 128`, `chunk 8192`, `compressed 32 / 16`, `compressed 4 top-k 512`, `blocks 16 x 64`."""
        if self.kind == "blocks":
            return f"blocks {self.size} x {self.block}"
        if self.kind == "compressed":
            every = f"{self.span} / {self.block}" if self._late else str(self.block)
            return f"compressed {every}" + (f" top-k {self.size}" if self.size else "")
        return self.kind if self.kind == "full" else f"{self.kind.replace('_', '-')} {self.size}"

    def pairs_formula(self, count: Count) -> str:
        """How `pairs` is computed, in T (new tokens) and S (context)."""
        w, m = self.size, self.block
        if self.kind == "compressed":
            n, late = "S" if count == "dense" else "n", self._late
            shifted = f"{n} {'-' if late > 0 else '+'} {abs(late)}" if late else n
            entries = f"max(0, floor(({shifted}) / {m}))" if late else f"floor({n} / {m})"
            if count == "dense":
                return f"T * {entries}"
            entries = f"min({entries}, {w})" if w else entries
            return f"g(S) - g(S - T), g(n) = e * ({shifted} + 1) - {m} * e * (e + 1) / 2 with e = {entries}"
        if count == "dense":
            return f"T * min(S, {w} + T - 1)" if self.bounded else "T * S"
        if self.kind == "full":
            return "S * (S + 1) / 2 - (S - T) * (S - T + 1) / 2"
        tail = {
            "top_k": f"f(n) = n * (n + 1) / 2 up to n = {w}, then {w} * {w + 1} / 2 + (n - {w}) * {w}",
            "window": f"f(n) = n * (n + 1) / 2 up to n = {w}, then {w} * {w + 1} / 2 + (n - {w}) * {w}",
            "blocks": f"f(n) sums i to {w * m}, then {(w - 1) * m} + (i - 1) mod {m} + 1, up to n",
            "chunk": f"f(n) = n div {w} * {w} * {w + 1} / 2 + r * (r + 1) / 2 with r = n mod {w}",
        }[self.kind]
        return f"f(S) - f(S - T), {tail}"


FULL = Reach()


def ratio(numerator: int, denominator: int) -> "int | Fraction":
    """The exact quotient, an int where it is whole: `fractions` costs start-up time."""
    whole, rest = divmod(numerator, denominator)
    if not rest:
        return whole
    from fractions import Fraction

    return Fraction(numerator, denominator)
