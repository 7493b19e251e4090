"""What fits: the search against brute force, the weights against parameters, the budget by hand, the command."""

import re
from itertools import accumulate
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import attncalc as package
from attncalc import AttncalcError
from attncalc.capacity import Memory, fit, longest
from attncalc.dtypes import Formats
from attncalc.engines import ENGINES
from attncalc.engines.log import decimals
from attncalc.engines.options import EngineOptions
from attncalc.presets import ids
from attncalc.units import MAX_COUNT
from attncalc.weights import bytes_on_gpu
from tests.conftest import Command

GiB = 2**30


def scan(curve: list[int], budget: int) -> int:
    """How many of the first values fit, up to one that does not."""
    return next((i for i, kept in enumerate(curve) if kept > budget), len(curve))


# The search.


@given(
    steps=st.lists(st.integers(0, 5), min_size=1, max_size=60),
    saw=st.lists(st.integers(0, 20), min_size=1, max_size=7),
    budget=st.integers(0, 120),
    limit=st.integers(1, 200),
)
def test_the_search_finds_what_a_scan_finds(steps: list[int], saw: list[int], budget: int, limit: int) -> None:
    """A growing curve plus a saw of some period: never less than a period before."""
    growing = list(accumulate(steps))
    period = len(saw)
    curve = [growing[min(n, len(growing) - 1)] + saw[n % period] for n in range(limit + 2)]
    assert longest(lambda n: curve[n] <= budget, period, limit) == scan(curve[1 : limit + 1], budget)


def test_the_search_asks_little() -> None:
    asked = []

    def fits(n: int) -> bool:
        asked.append(n)
        return n <= 123_456_789

    assert longest(fits) == 123_456_789
    assert len(asked) < 60
    assert longest(lambda _: True) == MAX_COUNT
    assert longest(lambda _: False) == 0


# Every model under every engine: one token more would be too much.

SAMPLE = (
    "deepseek-v3.2",
    "gpt-oss-20b",
    "kimi-linear-48b-a3b",
    "mimo-v2-flash",
)
BUDGETS = (3 * 10**8, 4 * 10**9, 123_456_789_012)


def check(preset: str, engine: str, budget: int, batch: int = 1) -> None:
    """The answer and its neighbours, by the allocation that `cache` prints."""
    model = package.load(preset)

    def kept(n: int, sequences: int = batch) -> int:
        return model.cache(n, engine=engine, batch=sequences).bytes_total

    try:
        kept(1000)
    except AttncalcError as error:
        # The model does not run, or the format that its checkpoint declares is not the engine's.
        refused = ("--engine", "--kv-dtype") if model.kv_cache_dtype else ("--engine",)
        assert error.where in refused  # noqa: PT017
        with pytest.raises(AttncalcError, match=f"^{re.escape(str(error))}$"):
            fit(model, 1000, Memory(cache=budget), engine=engine, batch=batch)
        return
    found = fit(model, 1000, Memory(cache=budget), engine=engine, batch=batch)
    n = found.longest if batch == 1 else found.longest_of_batch
    if n is None:  # the cache does not grow
        assert kept(MAX_COUNT) <= budget
    else:
        # deepseek-v4 under transformers: an unfinished block has up to 127 tokens
        before = range(max(1, n - 128), n + 1) if preset.startswith("deepseek-v4") else [n][: bool(n)]
        assert max(map(kept, before), default=0) <= budget < kept(n + 1)
    b = found.sequences
    assert b is not None
    assert (kept(1000, b) if b else 0) <= budget < kept(1000, b + 1)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("preset", SAMPLE)
def test_one_token_more_is_too_much(preset: str, engine: str) -> None:
    check(preset, engine, BUDGETS[0])
    check(preset, engine, BUDGETS[2], batch=3)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("preset", ids("models"))
def test_one_token_more_is_too_much_for_every_model(preset: str, engine: str) -> None:
    for budget in BUDGETS:
        check(preset, engine, budget)
    check(preset, engine, BUDGETS[1], batch=3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "every"),
    [("deepseek-v4-flash", 400), pytest.param("deepseek-v4-pro", 23, marks=pytest.mark.slow)],
)
def test_a_cache_that_shrinks_now_and_then_is_scanned(preset: str, every: int) -> None:
    """transformers folds every 4 or 128 tokens into an entry: after 127 tokens the cache is larger than after 128."""
    model = package.load(preset)
    curve = [model.cache(n, engine="transformers").bytes_total for n in range(1, 400)]
    assert sorted(curve) != curve
    for budget in (*curve[::every], curve[126] - 1, max(curve[:300])):
        if scan(curve, budget) < len(curve):
            assert fit(model, 10, Memory(cache=budget), engine="transformers").longest == scan(curve, budget)


def test_a_constant_cache_has_room_for_any_length() -> None:
    model = package.load("rwkv7-goose-1.4b-pile")
    one = model.cache(1).bytes_total
    made = fit(model, 1000, Memory(cache=5 * one + 1))
    assert (made.longest, made.tokens, made.tokens_one_sequence, made.sequences) == (None, None, None, 5)
    assert made.limiting is None
    none = fit(model, 1000, Memory(cache=one - 1))
    assert (none.longest, none.sequences, none.limiting) == (0, 0, "memory")


def test_the_published_maximum_limits_a_sequence_and_no_pool() -> None:
    model = package.load("llama-3.1-8b")
    made = fit(model, 131_072, Memory(cache=40 * GiB), batch=2)
    assert made.tokens == 40 * GiB // 131_072 == 327_680
    assert (made.tokens_one_sequence, made.limiting) == (131_072, "model_maximum")
    assert (made.sequences, made.context_of_batch) == (2, 131_072)


# The weights.


@pytest.mark.parametrize("preset", ids("models"))
def test_weights_of_one_gpu_are_the_parameters(preset: str) -> None:
    model = package.load(preset)
    for mtp in {False, model.mtp is not None}:
        parts = model.parameter_parts(mtp=mtp)
        assert bytes_on_gpu(model, model.layer_groups(mtp=mtp), Formats(), mtp=mtp) == 2 * sum(parts.values())


def test_weights_of_eight_gpus() -> None:
    """DeepSeek-V3: what is split and what every GPU holds, from the published dimensions."""
    model, tp = package.load("deepseek-v3"), 8
    D, H = 7168, 128
    whole = 61 * (1536 * D + 1536 + 576 * D + 512)  # down-projections of q and kv, their norms
    whole += 61 * 2 * D + D + 58 * (256 * D + 256)  # norms, routers, corrections
    split = 61 * (H * 192 * 1536 + H * 256 * 512 + D * H * 128)
    split += 3 * 3 * D * 18_432 + 58 * 257 * 3 * D * 2048 + 2 * 129_280 * D
    assert (whole + split) * 2 == bytes_on_gpu(model, model.groups, Formats())
    assert (whole + split // tp) * 2 == bytes_on_gpu(model, model.groups, Formats(), tp=tp)
    # fp8 matrices; norms and corrections stay in 16 bits
    vectors = 61 * (1536 + 512 + 2 * D) + D + 58 * 256
    fp8 = bytes_on_gpu(model, model.groups, Formats(weight="fp8"), tp=tp)
    assert fp8 == whole + split // tp + vectors


def test_key_value_heads_are_repeated_beyond_their_number() -> None:
    """llama-3.1-8b on 16 GPUs: 2 query heads each, and one of the 8 KV heads."""
    model = package.load("llama-3.1-8b")
    layer = 2 * 2 * 128 * 4096 + 2 * 128 * 4096 + 3 * 4096 * 14_336 // 16 + 2 * 4096
    tables = 2 * 128_256 // 16 * 4096
    assert bytes_on_gpu(model, model.groups, Formats(), tp=16) == 2 * (32 * layer + tables + 4096)


def test_stages_share_the_weights() -> None:
    model = package.load("llama-3.2-1b")  # its embedding and head are one table
    first, last = (
        model.groups[0]._replace(indices=tuple(range(6))),
        model.groups[0]._replace(indices=tuple(range(6, 16))),
    )
    a = bytes_on_gpu(model, (first,), Formats(), last=False)
    b = bytes_on_gpu(model, (last,), Formats(), first=False)
    assert a + b == bytes_on_gpu(model, model.groups, Formats()) + 2 * 128_256 * 2048


def test_the_stage_with_least_room_decides() -> None:
    model = package.load("llama-3.1-8b")
    options, memory = EngineOptions(pp=(8, 24)), Memory(total=24 * 10**9)
    made = fit(model, 1000, memory, options=options)
    small, large = made.rooms
    assert [len(room.layers) for room in made.rooms] == [8, 24]
    assert made.full == large
    assert made.longest == large.bytes_budget // (24 * 4096) < small.bytes_budget // (8 * 4096)
    # Where the weights are the same, the stage with more layers decides.
    even = fit(model, 1000, Memory(cache=10**9), options=options)
    assert even.longest == 10**9 // (24 * 4096)


def test_a_stage_of_unknown_weights_is_refused() -> None:
    model, options = package.load("deepseek-v4-flash"), EngineOptions(pp=(20, 23))
    with pytest.raises(AttncalcError, match="the stage of some weights"):
        fit(model, 1000, Memory(total=10**11), options=options)
    made = fit(model, 1000, Memory(cache=10**9), options=options)
    assert [room.bytes_weights for room in made.rooms] == [None, None]
    assert made.longest


@pytest.mark.parametrize("preset", [name for name in ids("models") if package.load(name).partial])
def test_what_weights_leave_is_refused_where_some_are_not_known(attncalc: Command, preset: str) -> None:
    made = attncalc("fit", preset, "--device", "h200")
    assert (made.status, made.out) == (2, "")
    assert made.err.startswith(f"--device: the weights of {preset} are known only in part, got without ")
    assert made.err.endswith(". Give --memory or --free-memory\n")
    for words in (("--memory", "10GiB"), ("--free-memory", "10GiB")):
        r = row(attncalc, preset, *words)
        assert r["bytes_budget"] == 10 * GiB
        assert r["longest"]


def test_the_last_stage_has_what_mtp_adds() -> None:
    model = package.load("deepseek-v3")
    options, memory = EngineOptions(pp=(30, 31)), Memory(total=10**12)
    plain, mtp = (fit(model, 1000, memory, options=options, mtp=x).rooms for x in (False, True))
    assert plain[0] == mtp[0]
    added = model.parameters(mtp=True) - model.parameters()
    weights = [room.bytes_weights for room in (plain[1], mtp[1])]
    assert None not in weights
    assert weights[1] == (weights[0] or 0) + 2 * (added + 256)  # and the buffer of its router


# The budget.


def test_budgets() -> None:
    from fractions import Fraction

    memory = Memory(total=1001, fraction=Fraction(9, 10), reserve=100)
    assert memory.budget(300, "logical") == 900 - 300 - 100
    assert memory.budget(300, "tensorrt-llm") == 540  # nine tenths of 601
    assert Memory(free=601, fraction=Fraction(9, 10)).budget(300, "tensorrt-llm") == 540
    assert Memory(free=601, reserve=1).budget(300, "vllm") == 600
    assert Memory(cache=7).budget(300, "vllm") == 7


# What engines log.


def row(attncalc: Command, *words: str) -> dict[str, Any]:
    made = attncalc("fit", *words, "--json")
    assert made.status == 0, made.err
    (only,) = made.record["results"]
    assert isinstance(only, dict)
    return only


def test_sglang_says_its_pools_with_their_spare_pages(attncalc: Command) -> None:
    """sgl-project/sglang#18039: 300,288 tokens of 39 sliding layers print as 8.38 and 5.59, which needs the page.

    That version named no pools; 0.5.23 logs the full one first, with labels, and both together.
    """
    token = 9 * 1 * (192 + 128) * 2 + 39 * 2 * (192 + 128) * 2
    words = ("mimo-v2-flash", "--engine", "sglang", "--tp", "4", "--block-size", "64", "--swa-ratio", "1")
    r = row(attncalc, *words, "--memory", f"{300_288 * token + 63 * token}B")
    allocated = "KV Cache is allocated. dtype: torch.bfloat16, #tokens: 300288,"
    full = [f"{300_352 * 9 * width * 2 / GiB:.2f}" for width in (192, 128)]
    total = f"{300_352 * token / GiB:.2f}"
    assert r["log_lines"][:3] == [
        f"Full {allocated} K size: {full[0]} GB, V size: {full[1]} GB",
        f"SWA {allocated} K size: 8.38 GB, V size: 5.59 GB",
        f"SWAKVPool mem usage: {total} GB, swa size: 300288, full size: 300288",
    ]
    assert r["log_lines"][-1] == "max_total_num_tokens=300288"
    # Spare pages are on top of what the budget was divided by, and belong to no sequence.
    assert (r["tokens"], r["longest"]) == (300_288, 300_288 - 64)
    latent = row(attncalc, "deepseek-v3", "--engine", "sglang", "--memory", "10GiB")
    assert latent["tokens"] == 10 * GiB // (61 * 1152) == latent["longest"] + 1
    line = f"KV Cache is allocated. dtype: torch.bfloat16, #tokens: {latent['tokens']}, KV size: 10.00 GB"
    assert latent["log_lines"] == [line, f"max_total_num_tokens={latent['tokens']}"]
    fp8 = row(attncalc, "llama-3.1-8b", "--engine", "sglang", "--kv-dtype", "fp8", "--memory", "10GiB")
    assert fp8["log_lines"][0].startswith("KV Cache is allocated. dtype: torch.float8_e4m3fn, #tokens: 163840,")


def test_sglang_says_less_of_a_stage_without_full_layers(attncalc: Command) -> None:
    words = ("gpt-oss-20b", "--engine", "sglang", "--memory", "10GiB", "--pp", "1,1,22")
    assert len(row(attncalc, *words)["log_lines"]) == 4
    alone = row(attncalc, *words[:-1], ",".join("1" * 24))
    assert alone["log_lines"] == [f"max_total_num_tokens={alone['tokens']}"]


# One block of Llama 3.1 8B: 16 tokens of 128 KiB.
BLOCK = 16 * 131_072


def vllm_log(attncalc: Command, memory: int, context: int, *words: str) -> list[str]:
    words = (*words, "--memory", f"{memory}B", "-c", str(context))
    lines = row(attncalc, "llama-3.1-8b", "--engine", "vllm", *words)["log_lines"]
    assert isinstance(lines, list)
    return lines


@pytest.mark.parametrize(
    ("blocks", "needed", "available", "longest"),
    [
        (4096, "16.0", "8.0", 65_520),  # 131,072 tokens take 16 GiB; one block of 4,096 is the null block
        (8192, "16.0", "16.0", 131_056),  # as many as one request needs, and none for the null block
        (100, "16.0", "0.19", 1584),
        (2, "16.0", "0.0", 16),
    ],
)
def test_vllm_says_what_is_missing(attncalc: Command, blocks: int, needed: str, available: str, longest: int) -> None:
    (line,) = vllm_log(attncalc, blocks * BLOCK, 131_072)
    assert f"({needed} GiB KV cache is needed" in line
    assert f"memory ({available} GiB). " in line
    assert line.endswith(f"maximum model length is {longest}.")
    r = row(attncalc, "llama-3.1-8b", "--engine", "vllm", "--memory", f"{blocks * BLOCK}B")
    assert (r["tokens_one_sequence"], r["sequences"]) == (longest, 0)


def test_vllm_says_no_length_where_none_fits(attncalc: Command) -> None:
    for memory in (0, BLOCK - 1, BLOCK):  # nothing is left beside the null block
        assert vllm_log(attncalc, memory, 8192) == ["No available memory for the cache blocks."]
    (line,) = vllm_log(attncalc, BLOCK + 1, 8192)
    assert line.endswith("available KV cache memory (0.0 GiB).")


def test_vllm_starts_with_one_block_more_than_a_request_takes(attncalc: Command) -> None:
    assert vllm_log(attncalc, 512 * BLOCK, 8192)[0].startswith("To serve at least one request")
    assert vllm_log(attncalc, 513 * BLOCK, 8192)[0].startswith("GPU KV cache size: 8,208 tokens")
    # What older versions check is not known.
    assert vllm_log(attncalc, 512 * BLOCK, 8192, "--engine-version", "0.31") == []


@pytest.mark.parametrize(
    ("blocks", "context", "tokens", "concurrency"),
    [
        (642, 10_000, "10,271", "1.03"),  # 642 / 625 * 10,000 is 10,272, and a float just below it
        (203, 3200, "3,247", "1.01"),  # 203 / 200: a float just below 1.015, and of 3,248
        (207, 3200, "3,311", "1.03"),
        (229, 3200, "3,664", "1.15"),
    ],
)
def test_vllm_prints_floats(attncalc: Command, blocks: int, context: int, tokens: str, concurrency: str) -> None:
    size = f"GPU KV cache size: {tokens} tokens"
    requests = f"Maximum concurrency for {context:,} tokens per request: {concurrency}x"
    memory = blocks * BLOCK
    assert vllm_log(attncalc, memory, context) == [f"{size}, {requests}"]
    assert vllm_log(attncalc, memory, context, "--engine-version", "0.25") == [f"{size}, {requests}"]
    assert vllm_log(attncalc, memory, context, "--engine-version", "0.24") == [size, requests]


def test_vllm_counts_blocks_of_the_stage_that_has_fewest(attncalc: Command) -> None:
    words = ("llama-3.1-8b", "--engine", "vllm", "--pp", "8,24", "--memory", "3GiB", "-c", "8k")
    assert row(attncalc, *words)["blocks"] == 3 * GiB // (16 * 4096 * 24)


@pytest.mark.parametrize(
    ("n", "unit", "text"),
    [
        (0, 8, "0.00"),
        (1, 8, "0.12"),
        (3, 8, "0.38"),
        (5, 8, "0.62"),
        (1, 3, "0.33"),
        (2, 3, "0.67"),
        (1999, 2000, "1.00"),
    ],
)
def test_decimals_are_printfs(n: int, unit: int, text: str) -> None:
    assert decimals(n, unit) == text == f"{n / unit:.2f}"


# The command.


def test_the_contract(attncalc: Command) -> None:
    words = ("deepseek-v3", "--device", "h200", "--gpus", "8", "--memory-fraction", "0.9", "--weight-dtype", "fp8")
    made = attncalc("fit", *words, "--reserve", "4GB", "--json").record
    assert made["command"] == "fit"
    inputs = made["inputs"]
    assert (inputs["tp"], inputs["pp"], inputs["dp"], inputs["dcp"], inputs["gpus"]) == (8, 1, 1, 1, 8)
    assert (inputs["device"], inputs["device_memory_bytes"]) == ("h200", 150_754_820_096)
    assert (inputs["memory_fraction"], inputs["reserve_bytes"]) == (0.9, 4 * 10**9)
    (r,) = made["results"]
    # One byte a weight, two of a norm or bias. Of 128 heads 16; down-projections, router and norms whole.
    attention = 7168 * (1536 + 576) + 16 * (192 * 1536 + 256 * 512 + 128 * 7168) + 2 * (1536 + 512)
    dense, expert = 3 * 7168 * 18_432 // 8, 3 * 7168 * 2048 // 8
    moe = (256 + 1) * expert + 256 * 7168 + 2 * 256
    both_tables = 2 * 129_280 // 8 * 7168
    assert r["bytes_weights"] == 61 * (attention + 2 * 2 * 7168) + 3 * dense + 58 * moe + both_tables + 2 * 7168
    assert r["bytes_budget"] == 150_754_820_096 * 9 // 10 - r["bytes_weights"] - 4 * 10**9
    assert r["tokens"] == r["longest"] == r["bytes_budget"] // 70_272
    assert (r["tokens_one_sequence"], r["limiting"]) == (163_840, "model_maximum")
    assert r["sequences"] == r["bytes_budget"] // (70_272 * 131_072)
    assert r["log_lines"] == []
    assert r["bytes_used"] <= r["bytes_budget"] < r["bytes_one_token_more"]
    assert any("--reserve" in note for note in made["notes"])
    account = (
        f"0.9 * 150,754,820,096 - {r['bytes_weights']:,} (weights) - 4,000,000,000 (reserve): {r['bytes_budget']:,} B"
    )
    assert any(account in note for note in made["notes"])


def test_a_budget_of_its_own(attncalc: Command) -> None:
    r = row(attncalc, "llama-3.1-8b", "--memory", "5.38GiB")
    assert r["bytes_budget"] == int(538 * GiB // 100)
    assert r["tokens"] == r["tokens_one_sequence"] == 538 * GiB // 100 // 131_072
    assert (r["limiting"], r["sequences"]) == ("memory", 0)
    assert row(attncalc, "llama-3.1-8b", "--memory", "5.38GiB", "-c", "10000")["sequences"] == 4
    assert row(attncalc, "llama-3.1-8b", "--memory", "5.38GiB", "-b", "4")["context_of_batch"] == r["tokens"] // 4


def test_any_is_explained(attncalc: Command) -> None:
    """A cache that does not grow is another reason than a memory of more tokens than are counted."""
    constant = "so a sequence may have any length"
    counted = "any is 2^53 or more, the most that is counted"

    def notes(*words: str) -> tuple[object, list[bool]]:
        made = attncalc("fit", *words, "--json").record
        (r,) = made["results"]
        return r["longest"], [any(text in note for note in made["notes"]) for text in (constant, counted)]

    assert notes("rwkv7-goose-1.4b-pile", "--memory", "1TB") == (None, [True, False])
    assert notes("llama-3.1-8b", "--memory", f"{2**53 * 131_072}B") == (None, [False, True])
    assert notes("llama-3.1-8b", "--memory", f"{2**53 * 131_072 - 1}B") == (2**53 - 1, [False, False])
    assert notes("rwkv7-goose-1.4b-pile", "--memory", "99999999999999999999TB") == (None, [True, True])


def test_mtp_takes_weights_and_cache(attncalc: Command) -> None:
    plain, mtp = (row(attncalc, "deepseek-v3", "--memory", "8GiB", *w) for w in ((), ("--mtp",)))
    assert (plain["tokens"], mtp["tokens"]) == (8 * GiB // (61 * 1152), 8 * GiB // (62 * 1152))
    assert mtp["bytes_weights"] > plain["bytes_weights"]


def test_sequences_of_all_replicas(attncalc: Command) -> None:
    words = ("llama-3.1-8b", "--device", "h100", "-c", "8k")
    one, four = row(attncalc, *words), row(attncalc, *words, "--gpus", "4", "--dp", "4")
    assert four["tokens"] == one["tokens"]
    assert four["sequences"] == 4 * one["sequences"]


def test_memory_that_the_weights_exceed(attncalc: Command) -> None:
    made = attncalc("fit", "deepseek-v3", "--device", "h100", "--json").record
    (r,) = made["results"]
    assert r["bytes_budget"] < 0
    assert (r["tokens"], r["sequences"], r["limiting"]) == (0, 0, "memory")
    assert any("more than may be used of a GPU's memory" in note for note in made["notes"])


def test_the_table(attncalc: Command) -> None:
    text = attncalc("fit", "deepseek-v3", "--device", "h200", "--gpus", "8", "--weight-dtype", "fp8").out
    assert "one GPU of tp 8" in text
    assert "163,840" in text
    assert max(map(len, text.splitlines())) <= 80
    assert re.search(r"weights fp8", text)


@pytest.mark.parametrize(
    ("words", "where"),
    [
        ((), "fit"),
        (("--memory", "1GB", "--device", "h100"), "--memory"),
        (("--free-memory", "1GB", "--device", "h100"), "--free-memory"),
        (("--memory", "1GB", "--reserve", "1GB"), "--reserve"),
        (("--memory", "1GB", "--memory-fraction", "0.9"), "--memory-fraction"),
        (("--free-memory", "1GB", "--memory-fraction", "0.9"), "--memory-fraction"),
        (("--memory", "1"), "--memory"),
        (("--memory", "-1GB"), "--memory"),
        (("--device", "h100", "--memory-fraction", "90%"), "--memory-fraction"),
        (("--device", "h100", "--memory-fraction", "1.5"), "--memory-fraction"),
        (("--device", "h100", "--memory-fraction", "0"), "--memory-fraction"),
        (("--device", "h1000"), "--device"),
        (("--device", "h100", "--gpus", "0"), "--gpus"),
        (("--device", "h100", "--gpus", "8", "--tp", "4"), "--gpus"),
        (("--device", "h100", "--gpus", "8", "--pp", "2"), "--gpus"),
        (("--device", "h100", "--gpus", "3"), "--tp"),
        (("--device", "h100", "--gpus", "8", "--tp", "8", "--dcp", "3", "--engine", "vllm"), "--dcp"),
        (("--memory", "1GB", "--form", "absorbed"), "--form"),
        (("--memory", "1GB", "--slots", "2"), "--slots"),
    ],
)
def test_what_is_refused(attncalc: Command, words: tuple[str, ...], where: str) -> None:
    made = attncalc("fit", "llama-3.1-8b", *words)
    assert (made.status, made.out) == (2, "")
    assert made.err.startswith(f"{where}: ")
    assert made.err.count("\n") == 1


def test_the_hint_names_the_split(attncalc: Command) -> None:
    assert "Give --tp 4" in attncalc("fit", "llama-3.1-8b", "--device", "h100", "--gpus", "8", "--pp", "2").err
