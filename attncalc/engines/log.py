"""What engines print at start about the memory of their cache: the tokens that they count, and the lines.

An engine that is not named here prints nothing of the kind.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from attncalc.allocation import Allocation, LayerCache
from attncalc.cache import Tensor
from attncalc.engines.options import read_version
from attncalc.engines.printed import vllm_concurrency, vllm_gib
from attncalc.search import largest
from attncalc.units import MAX_COUNT

FRACTION_OF_FREE = ("tensorrt-llm",)
"""Engines that take a fraction of what is free after the weights, in blocks rounded up; else it is of the whole."""


class Logged(NamedTuple):
    """The tokens that an engine says it has room for, its lines, and the blocks of its pool, if it has one."""

    tokens: int
    lines: tuple[str, ...]
    blocks: int | None = None


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


ONE_LINE, NULL_BLOCK = (0, 25), (0, 32)
"""From which version vLLM prints its two facts as one line (0.24 is the last one known to print two), and checks for a
request beside the null block (older checks are not known)."""


def _vllm(start: Start) -> Logged:
    """Tokens: int(max_model_len * concurrency); before 0.21 blocks // groups * the smallest block.

    It starts where one request fits beside the null block, which belongs to no sequence.
    Source: vLLM 0.33 `v1/core/kv_cache_planning.py`, `v1/core/kv_cache_utils.py` of versions before.
    """
    made, (pool,) = start.made, start.made.pools
    length, blocks, version = made.context, _blocks(start), made.options.version
    concurrency, tokens = vllm_concurrency(blocks, pool.blocks(length), length)
    if _before(version, (0, 21)):
        smallest = min(g.block_tokens for g in pool.groups if g.block_tokens)
        tokens = blocks // len(pool.groups) * smallest * (made.options.dcp or 1)
    if blocks - 1 < pool.blocks(length):
        return Logged(tokens, () if _before(version, NULL_BLOCK) else (_no_start(start),), blocks)
    size = f"GPU KV cache size: {tokens:,} tokens"
    requests = f"Maximum concurrency for {length:,} tokens per request: {concurrency}x"
    return Logged(tokens, (size, requests) if _before(version, ONE_LINE) else (f"{size}, {requests}",), blocks)


def _no_start(start: Start) -> str:
    """The refusal of the first GPU on which not even one request fits, with the longest that would."""
    made, (pool,) = start.made, start.made.pools
    needed = pool.blocks(made.context)
    left = ((budget - n, n) for budget, n in zip(start.budgets, block_bytes(made), strict=True))
    available, each = next((free, n) for free, n in left if free < needed * n)
    if available <= 0:
        return "No available memory for the cache blocks."
    longest = largest(lambda n: pool.blocks(n) * each <= available, 0, made.context)
    line = (
        f"To serve at least one request with the model's max seq len ({made.context}), "
        f"({vllm_gib(needed * each)} GiB KV cache is needed, which is larger than the available KV cache memory "
        f"({vllm_gib(available)} GiB)."
    )
    if not longest:
        return line
    return f"{line} Based on the available memory, the estimated maximum model length is {longest}."


def _sglang(start: Start) -> Logged | None:
    """Tokens of the full pool: spare pages come on top of the budget, and sizes are said with them, in GiB.

    Where states take a part the tokens depend on how many requests may run, which nothing here says.
    Source: SGLang 0.5.23 `srt/model_executor/pool_configurator.py`, `srt/mem_cache/memory_pool.py`.
    """
    pools = {pool.name: pool for pool in start.made.pools}
    if not 0 < start.longest < MAX_COUNT or not set(pools) <= {"full", "sliding"}:
        return None
    page = start.made.pools[0].groups[0].block_tokens

    def fits(n: int) -> bool:
        made = start.at(n)
        taken = [s.bytes_total - s.bytes_overhead for s in made.stages] or [made.bytes_total - made.bytes_overhead]
        return all(bytes_ <= budget for bytes_, budget in zip(taken, start.budgets, strict=True))

    tokens = start.longest // page * page
    while fits(tokens + page):
        tokens += page
    made = start.at(tokens)
    if "sliding" not in pools:
        line, _, _ = _sglang_pool("", made.layers, page)
        return Logged(tokens, (*filter(None, [line]), f"max_total_num_tokens={tokens}"))
    sides = [[layer for layer in made.layers if layer.group.reach.bounded == bounded] for bounded in (False, True)]
    (full, size, taken), (swa, swa_size, swa_taken) = map(_sglang_pool, ("Full ", "SWA "), sides, (page, page))
    total = f"SWAKVPool mem usage: {decimals(taken + swa_taken, GIB)} GB, swa size: {swa_size}, full size: {size}"
    # A stage of a pipeline may have layers of one kind alone; its lines are not known.
    lines = (full, swa, total) if full and swa else ()
    return Logged(tokens, (*lines, f"max_total_num_tokens={tokens}"))


TORCH = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp8": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
    "mxfp8": "float8_e4m3fn",
    "nvfp4": "float4_e2m1fn_x2",
}
"""What PyTorch calls the elements of a format."""


def _sglang_pool(label: str, layers: Sequence[LayerCache], page: int) -> tuple[str, int, int]:
    """The line of one pool (none of records with index keys), its tokens, and its bytes with the spare page."""
    sides: dict[str, int] = {}
    held = [(layer.layers, t) for layer in layers for t in layer.tensors]
    rows = 0
    for count, t in held:
        rows = t.shape[0] * t.shape[2]
        sides[t.name] = sides.get(t.name, 0) + count * t.bytes // rows * (rows + page)
    taken = sum(sides.values())
    if set(sides) == {"k", "v"}:
        sizes = f"K size: {decimals(sides['k'], GIB)} GB, V size: {decimals(sides['v'], GIB)} GB"
    elif set(sides) == {"c_kv", "k_pe"}:
        sizes = f"KV size: {decimals(taken, GIB)} GB"
    else:
        return "", rows, taken
    dtype = f"torch.{TORCH[held[0][1].dtype]}"
    return f"{label}KV Cache is allocated. dtype: {dtype}, #tokens: {rows}, {sizes}", rows, taken


def _tensorrt_llm(start: Start) -> Logged:
    """Tokens of all blocks. Source: `cpp/tensorrt_llm/batch_manager/kvCacheManager.cpp`."""
    (pool,), blocks = start.made.pools, _blocks(start)
    tokens = blocks * pool.groups[0].block_tokens
    taken = decimals(blocks * block_bytes(start.made)[0], GIB)
    line = f"[MemUsageChange] Allocated {taken} GiB for max tokens in paged KV cache ({tokens})."
    return Logged(tokens, (line,), blocks)


def _llamacpp(start: Start) -> Logged | None:
    """The buffers of a context as long as fits: full layers, sliding layers, states.

    Source: ggml-org/llama.cpp `src/llama-kv-cache.cpp`, `src/llama-memory-recurrent.cpp`.
    """
    if not 0 < start.longest < MAX_COUNT:
        return None
    made = start.at(start.longest)
    full = [layer for layer in made.layers if layer.group.reach.kind == "full"]
    sliding = [layer for layer in made.layers if layer not in full]
    lines = (_cells(made, full), _cells(made, sliding), _states(made))
    return Logged(start.longest, tuple(filter(None, lines)))


STATES = {"conv_state": "R", "shift_state": "R", "ffn_shift_state": "R", "recurrent_state": "S"}
"""What llama.cpp counts as R and S."""
GGML = {"fp32": "f32", "fp16": "f16"}
"""Formats that ggml names otherwise."""

Held = list[tuple[int, Tensor]]
"""Tensors, each with the number of layers that have it."""


def _cells(made: Allocation, layers: Sequence[LayerCache]) -> str:
    """The cells of K and V, if these layers have any."""
    held = [(layer.layers, t) for layer in layers for t in layer.tensors if t.name not in STATES]
    if not held:
        return ""
    (streams, _, cells, _), value = held[0][1].shape, [x for x in held if x[1].name == "v"]
    key = [x for x in held if x not in value]
    count = sum(layer.layers for layer in layers if any(t.name not in STATES for t in layer.tensors))
    where = f"{cells:6} cells, {count:3} layers, {_slots(made):2}/{streams} seqs"
    return (
        f"llama_kv_cache: size = {_mib(held)} MiB ({where}), "
        f"K ({_ggml(key)}): {_mib(key)} MiB, V ({_ggml(value or key)}): {_mib(value)} MiB"
    )


def _states(made: Allocation) -> str:
    """The states of every slot, if there are any."""
    held = [(layer.layers, t) for layer in made.layers for t in layer.tensors if t.name in STATES]
    if not held:
        return ""
    slots, (r, s) = _slots(made), ([x for x in held if STATES[x[1].name] == side] for side in "RS")
    return (
        f"llama_memory_recurrent: size = {_mib(held)} MiB ({slots:6} cells, {made.model.num_layers:3} layers, "
        f"{slots:2} seqs), R (f32): {_mib(r)} MiB, S (f32): {_mib(s)} MiB"
    )


def _slots(made: Allocation) -> int:
    return made.options.slots or made.batch


def _mib(held: Held) -> str:
    return decimals(sum(n * t.bytes for n, t in held), 2**20).rjust(7)


def _ggml(held: Held) -> str:
    dtype = held[0][1].dtype
    return GGML.get(dtype, dtype)


def block_bytes(made: Allocation) -> list[int]:
    """Bytes of a block of the pool, on a GPU of every stage."""
    (pool,) = made.pools
    held = pool.held(made.context, made.sequences)
    return [n // held for n in [s.bytes_total for s in made.stages] or [made.bytes_total]]


def _blocks(start: Start) -> int:
    """Blocks of the pool: those of the stage that has fewest."""
    return max(0, min(b // n for b, n in zip(start.budgets, block_bytes(start.made), strict=True)))


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


PRINTERS: dict[str, Callable[[Start], Logged | None]] = {
    "vllm": _vllm,
    "sglang": _sglang,
    "tensorrt-llm": _tensorrt_llm,
    "llamacpp": _llamacpp,
}
