"""TensorRT-LLM: whole blocks, a fraction of the free memory, and what is not known of it."""

from fractions import Fraction

import pytest

import attncalc as package
from attncalc import AttncalcError, Formats
from attncalc.capacity import Memory, fit
from attncalc.engines.options import EngineOptions
from attncalc.presets import ids

LLAMA = package.load("llama-2-7b")
TOKEN = 32 * 2 * 32 * 128 * 2


@pytest.mark.parametrize(
    ("context", "block", "tokens"), [(1, None, 32), (32, None, 32), (33, None, 64), (1000, 64, 1024), (1000, 128, 1024)]
)
def test_whole_blocks(context: int, block: int | None, tokens: int) -> None:
    made = LLAMA.cache(context, batch=3, engine="tensorrt-llm", options=EngineOptions(block_size=block))
    assert made.bytes_total == 3 * tokens * TOKEN
    assert sum(r.bytes for r in made.reasons) == 3 * (tokens - context) * TOKEN
    (pool,) = made.pools
    assert (pool.block_bytes, pool.blocks(context)) == ((block or 32) * TOKEN, tokens // (block or 32))


def test_latents_are_replicated_and_heads_split() -> None:
    v3 = package.load("deepseek-v3")
    assert v3.cache(64, engine="tensorrt-llm", tp=8).bytes_total == 61 * 576 * 2 * 64
    assert LLAMA.cache(64, engine="tensorrt-llm", tp=8).bytes_total == 8 * TOKEN


def test_the_fraction_is_of_what_is_free_and_blocks_are_rounded_up() -> None:
    memory = Memory(total=24 * 10**9, fraction=Fraction(9, 10), reserve=10**9)
    made = fit(LLAMA, 1000, memory, engine="tensorrt-llm")
    assert made.full.bytes_weights == 2 * LLAMA.parameters()
    free = 24 * 10**9 - 2 * LLAMA.parameters() - 10**9
    blocks = -(-(free * 9 // 10) // (32 * TOKEN))
    assert made.log
    assert (made.log.blocks, made.tokens) == (blocks, 32 * blocks)
    assert made.full.bytes_budget == blocks * 32 * TOKEN
    assert made.longest == 32 * blocks
    # Nothing is rounded up to a block where the weights alone do not fit.
    small = fit(LLAMA, 1000, Memory(total=10**9), engine="tensorrt-llm")
    assert (small.full.bytes_budget, small.tokens) == (10**9 - 2 * LLAMA.parameters(), 0)
    # A budget is what it is.
    given = fit(LLAMA, 1000, Memory(cache=100 * 32 * TOKEN - 1), engine="tensorrt-llm")
    assert (given.tokens, given.longest) == (99 * 32, 99 * 32)


def test_the_line_of_the_log() -> None:
    made = fit(LLAMA, 1000, Memory(cache=2**30), engine="tensorrt-llm")
    assert made.log
    assert made.log.lines == ("[MemUsageChange] Allocated 1.00 GiB for max tokens in paged KV cache (2048).",)


@pytest.mark.parametrize("preset", ids("models"))
def test_windows_and_states_are_refused(preset: str) -> None:
    model = package.load(preset)
    known = {"mha", "gqa", "mqa", "mla"}
    plain = all(
        (g.attention is None or (g.attention.variant in known and g.reach.kind == "full"))
        and not (g.ffn and g.ffn.cache())
        for g in model.groups
    )
    if plain:
        # 4,097 tokens take 129 blocks of 32 in every layer: what 4,128 take by definition.
        made, logical = (
            model.cache(4097, engine="tensorrt-llm", formats=Formats()),
            model.cache(4128, formats=Formats()),
        )
        assert made.bytes_total == logical.bytes_total
        assert sum(r.bytes for r in made.reasons) * 4128 == logical.bytes_total * 31
    else:
        with pytest.raises(AttncalcError, match="tensorrt-llm"):
            model.cache(4096, engine="tensorrt-llm", formats=Formats())


@pytest.mark.parametrize(("kv", "row"), [("fp16", 1152), ("fp8", 576)])
def test_formats_of_latents(kv: str, row: int) -> None:
    made = package.load("deepseek-v3").cache(100, engine="tensorrt-llm", formats=Formats(kv=kv))
    assert made.bytes_total == 61 * row * 128


@pytest.mark.parametrize("kv", ["int8", "nvfp4", "fp8_ds_mla"])
def test_formats_of_heads_are_none_of_latents(kv: str) -> None:
    with pytest.raises(AttncalcError, match="tensorrt-llm keeps latents in bf16, fp16, fp8"):
        package.load("deepseek-v3").cache(100, engine="tensorrt-llm", formats=Formats(kv=kv))


@pytest.mark.parametrize("kv", ["fp32", "q8_0", "mxfp8", "bf16/fp8"])
def test_formats_of_other_engines_are_refused(kv: str) -> None:
    with pytest.raises(AttncalcError, match="tensorrt-llm keeps K and V in"):
        LLAMA.cache(10, engine="tensorrt-llm", formats=Formats(kv=kv))
