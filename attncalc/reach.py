"""Reach: which earlier tokens a query attends to, and how many of them a layer keeps.

Two exact functions say it all: `seen(n)`, the (query, key) pairs among the first n tokens of a sequence, and
`stored(context)`. New tokens at the positions context - T + 1 .. context attend to
`seen(context) - seen(context - T)` pairs, the token itself included. Derivation: a query at position i (from 1)
sees i keys (full), min(i, W) (window), ((i - 1) mod C) + 1 (chunk, Llama 4), floor((i - l) / d) + 1 entries that
stand for l tokens each, one every d tokens (compressed), or the tokens so far of n blocks, its own among them
(blocks); `seen` is the closed form of the sum.
"""

from typing import Literal, NamedTuple

Count = Literal["causal", "dense"]


class Reach(NamedTuple):
    """`kind` and its `size`: the window W (current token included), the chunk C, the k of top-k; 0 for full.

    Top-k attends to min(i, k) of i keys and keeps all of them. `compressed`: entries of `size` tokens, one every
    `stride` tokens. `blocks`: that many blocks of `size` tokens, of which the last is the token's own; all are kept.
    """

    kind: Literal["full", "window", "chunk", "top_k", "compressed", "blocks"] = "full"
    size: int = 0
    stride: int = 0
    blocks: int = 0

    def seen(self, n: int) -> int:
        """Pairs among the first `n` tokens."""
        if self.kind == "compressed":
            groups, rest = divmod(max(0, n - self.size + 1), self.stride)
            return self.stride * groups * (groups + 1) // 2 + rest * (groups + 1)
        if self.kind == "full" or n <= self.size * (self.blocks or 1):
            return n * (n + 1) // 2  # of two neighbours one is even
        if self.kind == "blocks":
            whole = self.size * self.blocks
            own, rest = divmod(n - whole, self.size)
            in_own = own * self.size * (self.size + 1) // 2 + rest * (rest + 1) // 2
            return whole * (whole + 1) // 2 + (n - whole) * (whole - self.size) + in_own
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
        if self.kind == "compressed":
            return self.stored(context)
        if self.kind == "full" or (self.kind in ("top_k", "blocks") and count == "dense"):
            return context  # an eager implementation masks the scores of all keys
        if self.kind in ("top_k", "blocks"):  # a row for each selected pair, but no row twice
            return min(context, self.pairs(new_tokens, context, count))
        if self.kind == "chunk" and count == "causal":
            return context - (context - new_tokens) // self.size * self.size
        return min(context, self.size + new_tokens - 1)

    def stored(self, context: int) -> int:
        """Tokens that a later step can need, at most: all, min(S, W), min(S, C); or the entries of them."""
        if self.kind == "compressed":
            return max(0, (context - self.size) // self.stride + 1)
        return context if self.kind in ("full", "top_k", "blocks") else min(context, self.size)

    def covers(self, other: "Reach") -> bool:
        """Whether a cache of this reach holds what a query of the other reach attends to."""
        return self.kind == "full" or (self.kind == other.kind and self.size >= other.size)

    @property
    def text(self) -> str:
        """`full`, `window 128`, `chunk 8192`, `compressed 32 / 16`, `blocks 16 x 64`."""
        if self.kind == "blocks":
            return f"blocks {self.blocks} x {self.size}"
        if self.kind == "compressed":
            return f"compressed {self.size} / {self.stride}"
        return self.kind if self.kind == "full" else f"{self.kind.replace('_', '-')} {self.size}"

    def pairs_formula(self, count: Count) -> str:
        """How `pairs` is computed, in T (new tokens) and S (context)."""
        w = self.size
        if self.kind == "compressed":
            entries = f"((n - {w}) div {self.stride} + 1)"
            if count == "dense":
                return f"T * f(S), f(n) = {entries} from n = {w}, else 0"
            return f"sum of f(n) for n = S - T + 1 .. S, f(n) = {entries} from n = {w}, else 0"
        if count == "dense":
            return "T * S" if self.kind in ("full", "top_k", "blocks") else f"T * min(S, {w} + T - 1)"
        if self.kind == "full":
            return "S * (S + 1) / 2 - (S - T) * (S - T + 1) / 2"
        tail = {
            "top_k": f"f(n) = n * (n + 1) / 2 up to n = {w}, then {w} * {w + 1} / 2 + (n - {w}) * {w}",
            "window": f"f(n) = n * (n + 1) / 2 up to n = {w}, then {w} * {w + 1} / 2 + (n - {w}) * {w}",
            "blocks": f"f(n) sums i to {w * self.blocks}, then {w * (self.blocks - 1)} + (i - 1) mod {w} + 1, up to n",
            "chunk": f"f(n) = n div {w} * {w} * {w + 1} / 2 + r * (r + 1) / 2 with r = n mod {w}",
        }[self.kind]
        return f"f(S) - f(S - T), {tail}"


FULL = Reach()
