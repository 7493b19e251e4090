"""How vLLM divides a pool of blocks among the caches of a model: pages, groups, and the blocks of a sequence.

Every block of the pool has the same bytes, and belongs at any time to one group of caches; a block of a group holds
`block_tokens` tokens of each of its caches. Sources: vLLM 0.33 `v1/kv_cache_interface.py` (pages, blocks of a request)
and `v1/core/kv_cache_planning.py` (groups).
"""

from collections.abc import Collection, Sequence
from typing import Literal, NamedTuple

from attncalc.errors import AttncalcError

Kind = Literal["full", "sliding", "chunk", "state"]


class Spec(NamedTuple):
    """A cache of one layer as the block manager sees it.

    `content`: bytes of the values of a block, `page`: bytes that it takes. `size`: of a window or chunk. `states`:
    blocks that a sequence takes of a `state`. `latent`: rows that kernels index whole, so that a page cannot be padded.
    `role` keeps caches apart that never share a group.
    """

    kind: Kind
    block_tokens: int
    content: int
    page: int
    size: int = 0
    states: int = 0
    latent: bool = False
    role: str = ""

    def blocks(self, context: int, in_flight: int, dcp: int = 1) -> int:
        """Blocks of one sequence.

        full:    ceil(S / bs), the tokens first divided among `dcp` GPUs
        sliding: ceil(min(W - 1 + in_flight, S) / bs) + 1, since the window may begin inside a block
        chunk:   ceil(min(C + in_flight, S) / bs)
        state:   a constant
        """
        if self.kind == "state":
            return self.states
        if self.kind == "full":
            return ceil_div(ceil_div(context, dcp), self.block_tokens)
        return ceil_div(self.tokens(context, in_flight), self.block_tokens) + int(self.kind == "sliding")

    def tokens(self, context: int, in_flight: int) -> int:
        """Tokens of one sequence that a sliding or chunked cache may have to hold at once."""
        return min(self.size - int(self.kind == "sliding") + in_flight, context)

    def grows(self, context: int, in_flight: int) -> bool:
        """Whether the next token may need another block."""
        if self.kind in ("full", "state"):
            return self.kind == "full"
        return self.tokens(context, in_flight) < self.tokens(context + 1, in_flight)


def ceil_div(a: int, b: int) -> int:
    """The quotient, rounded up."""
    return -(-a // b)


def pad(n: int, multiple: int) -> int:
    """`n` rounded up to a multiple."""
    return ceil_div(n, multiple) * multiple


class Cache(NamedTuple):
    """A cache, the number of its layer, and who asked for it."""

    spec: Spec
    layer: int
    owner: int


class Group(NamedTuple):
    """Caches that share a block table; each has its own page in a block."""

    caches: tuple[Cache, ...]

    @property
    def block_tokens(self) -> int:
        """Tokens of a block; 0 for states."""
        return self.caches[0].spec.block_tokens

    @property
    def specs(self) -> set[Spec]:
        """Of its caches."""
        return {cache.spec for cache in self.caches}

    def bytes(self, layers: Collection[int] | None = None) -> int:
        """Of a block that the caches of these layers (of all) use."""
        return sum(c.spec.page for c in self.caches if layers is None or c.layer in layers)

    def blocks(self, context: int, in_flight: int, dcp: int = 1) -> int:
        """Blocks of one sequence: those of the cache that needs most."""
        return max(spec.blocks(context, in_flight, dcp) for spec in self.specs)


def promote(caches: Sequence[Cache]) -> list[Cache]:
    """Sliding and chunked caches as full ones, where the model has full ones: the hybrid manager switched off.

    Raises:
        AttncalcError: caches of one kind they are not even then.
    """
    if uniform({c.spec for c in caches}):
        return list(caches)
    local, full = ("sliding", "chunk"), any(c.spec.kind == "full" for c in caches)
    made = [
        c._replace(spec=c.spec._replace(kind="full", size=0)) if full and c.spec.kind in local else c for c in caches
    ]
    if not uniform({c.spec for c in made}):
        raise AttncalcError("--no-hybrid-manager", "vllm cannot allocate these layers as one kind")
    return made


def uniform(specs: set[Spec]) -> bool:
    """Whether caches need the same blocks of a sequence, so that one group can hold all."""
    return len({(s.kind, s.block_tokens, s.size, s.states, s.page if s.kind == "state" else 0) for s in specs}) == 1


def grouped(caches: Sequence[Cache], *, packed: bool = False) -> list[Group]:
    """The groups of a model: one where all caches are alike, else as many as make blocks equal.

    `packed`: pages of different bytes lie side by side in a block (DeepSeek-V4), so that none is padded.

    Raises:
        AttncalcError: pages of latents that no block size makes equal to the others.
    """
    if uniform({c.spec for c in caches}):
        return [Group(tuple(caches))]
    if packed:
        return _packed(caches)
    alike: dict[Spec, list[Cache]] = {}
    for cache in _equal_pages(caches):
        alike.setdefault(cache.spec, []).append(cache)
    counts = [len(found) for found in alike.values()]
    # Groups of the smallest count, unless the largest is below one and a half times that.
    size = max(counts) if 2 * max(counts) < 3 * min(counts) else min(counts)
    return [
        Group(tuple(found[i :: ceil_div(len(found), size)]))
        for found in alike.values()
        for i in range(ceil_div(len(found), size))
    ]


def _equal_pages(caches: Sequence[Cache]) -> list[Cache]:
    """Pages of the same bytes: smaller blocks get more tokens, or padding where the largest page is no multiple."""
    largest = max(c.spec.page for c in caches)

    def grown(spec: Spec) -> Spec:
        times, rest = divmod(largest, spec.page)
        if spec.kind != "state" and not rest:
            tokens, content = spec.block_tokens * times, spec.content * times
            return spec._replace(block_tokens=tokens, content=content, page=largest)
        if spec.latent and rest:
            rule = "vllm cannot make the pages of these caches equal"
            raise AttncalcError("--engine", rule, got=f"{spec.page:,} and {largest:,} B")
        return spec._replace(page=largest)

    return [c._replace(spec=grown(c.spec)) for c in caches]


def _packed(caches: Sequence[Cache]) -> list[Group]:
    """Buckets of alike caches, split so that every group repeats the same pattern of pages about equally often.

    A bucket that has as many caches of one page size as of another is a pattern that repeats; the repeats of a group
    are chosen to leave the least padding, and not below those of the largest bucket that mixes page sizes.
    """
    buckets: list[list[Cache]] = []
    for cache in caches:
        for bucket in buckets:
            if uniform({cache.spec} | {c.spec for c in bucket}):
                bucket.append(cache)
                break
        else:
            buckets.append([cache])
    by_page: list[list[list[Cache]]] = []
    for bucket in buckets:
        pages: dict[int, list[Cache]] = {}
        for cache in bucket:
            pages.setdefault(cache.spec.page, []).append(cache)
        by_page.append(list(pages.values()))
    balanced = [len({len(found) for found in pages}) == 1 for pages in by_page]
    repeats = [len(pages[0]) for pages, even in zip(by_page, balanced, strict=True) if even]
    mixed = [len(pages[0]) for pages, even in zip(by_page, balanced, strict=True) if even and len(pages) > 1]
    if not mixed:
        raise AttncalcError("--engine", "vllm packs pages beside each other only where a pattern of them repeats")
    each = _least_padding(repeats, max(mixed))
    out: list[Group] = []
    for bucket, pages_, even in zip(buckets, by_page, balanced, strict=True):
        parts = ceil_div(len(pages_[0]), each) if even else 1
        if parts == 1:
            out.append(Group(tuple(bucket)))
            continue
        rows = list(zip(*pages_, strict=True))
        out += [Group(tuple(c for row in rows[i::parts] for c in row)) for i in range(parts)]
    return out


def _least_padding(values: list[int], lower: int) -> int:
    """The d from `lower` on that adds least when values are rounded up to a multiple of it; of equals the larger."""
    return min(range(lower, max(*values, lower) + 1), key=lambda d: (sum(pad(x, d) - x for x in values), -d))
