"""Reach: which earlier tokens a query attends to, and how many of them a layer keeps.

Two exact functions say it all: `seen(n)`, the (query, key) pairs among the first n tokens of a sequence, and
`stored(context)`. New tokens at the positions context - T + 1 .. context attend to
`seen(context) - seen(context - T)` pairs, the token itself included. Derivation: a query at position i (from 1)
sees i keys (full), min(i, W) (window), ((i - 1) mod C) + 1 (chunk, Llama 4); `seen` is the closed form of the sum.
"""

from typing import Literal, NamedTuple

Count = Literal["causal", "dense"]


class Reach(NamedTuple):
    """`kind` and its `size`: the window W (current token included), the chunk C, the k of top-k; 0 for full.

    Top-k attends to min(i, k) of i keys and keeps all of them.
    """

    kind: Literal["full", "window", "chunk", "top_k"] = "full"
    size: int = 0

    def seen(self, n: int) -> int:
        """Pairs among the first `n` tokens."""
        if self.kind == "full" or n <= self.size:
            return n * (n + 1) // 2  # of two neighbours one is even
        whole = self.size * (self.size + 1) // 2
        if self.kind in ("window", "top_k"):
            return whole + (n - self.size) * self.size
        chunks, rest = divmod(n, self.size)
        return chunks * whole + rest * (rest + 1) // 2

    def pairs(self, new_tokens: int, context: int, count: Count) -> int:
        """(query, key) pairs of one sequence and head: exact, or what a dense implementation computes."""
        if count == "dense":
            return new_tokens * self.keys(new_tokens, context, count)
        return self.seen(context) - self.seen(context - new_tokens)

    def keys(self, new_tokens: int, context: int, count: Count) -> int:
        """Distinct keys that a step reads; `dense`: a window with the new tokens before it, a chunk alike."""
        if self.kind == "full" or (self.kind == "top_k" and count == "dense"):
            return context  # an eager implementation masks the scores of all keys
        if self.kind == "top_k":  # a row for each selected pair, but no row twice
            return min(context, self.pairs(new_tokens, context, count))
        if self.kind == "chunk" and count == "causal":
            return context - (context - new_tokens) // self.size * self.size
        return min(context, self.size + new_tokens - 1)

    def stored(self, context: int) -> int:
        """Tokens that a later step can need, at most: all, min(S, W), min(S, C)."""
        return context if self.kind in ("full", "top_k") else min(context, self.size)

    def covers(self, other: "Reach") -> bool:
        """Whether a cache of this reach holds what a query of the other reach attends to."""
        return self.kind == "full" or (self.kind == other.kind and self.size >= other.size)

    @property
    def text(self) -> str:
        """`full`, `window 128`, `chunk 8192`."""
        return self.kind if self.kind == "full" else f"{self.kind.replace('_', '-')} {self.size}"

    def pairs_formula(self, count: Count) -> str:
        """How `pairs` is computed, in T (new tokens) and S (context)."""
        w = self.size
        if count == "dense":
            return "T * S" if self.kind in ("full", "top_k") else f"T * min(S, {w} + T - 1)"
        if self.kind == "full":
            return "S * (S + 1) / 2 - (S - T) * (S - T + 1) / 2"
        tail = {
            "top_k": f"f(n) = n * (n + 1) / 2 up to n = {w}, then {w} * {w + 1} / 2 + (n - {w}) * {w}",
            "window": f"f(n) = n * (n + 1) / 2 up to n = {w}, then {w} * {w + 1} / 2 + (n - {w}) * {w}",
            "chunk": f"f(n) = n div {w} * {w} * {w + 1} / 2 + r * (r + 1) / 2 with r = n mod {w}",
        }[self.kind]
        return f"f(S) - f(S - T), {tail}"


FULL = Reach()
