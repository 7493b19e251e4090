"""llama.cpp: cells, slots, sliding layers, states and latents, by hand."""

from pathlib import Path
from typing import Any

import pytest

import attncalc as package
from attncalc import AttncalcError, Formats
from attncalc.capacity import Memory, fit
from attncalc.engines.options import EngineOptions
from attncalc.presets import ids
from tests.conftest import Command

SMALL = package.load(Path(__file__).parent / "data" / "models" / "gemma-3-270m.yaml")
MiB = 2**20


def kept(model: Any, context: int, batch: int = 1, kv: str = "fp16", **options: Any) -> Any:
    made = EngineOptions(**options)
    return model.cache(context, batch=batch, engine="llamacpp", formats=Formats(kv=kv), options=made)


def cells(full: int, sliding: int) -> int:
    """3 full and 15 sliding layers of one head of 256, K and V of 2 bytes."""
    return (3 * full + 15 * sliding) * 2 * 256 * 2


@pytest.mark.parametrize(
    ("context", "options", "full", "sliding"),
    [
        (1, {}, 256, 256),
        (256, {}, 256, 256),
        (257, {}, 512, 512),
        (4096, {}, 4096, 1024),
        (4096, {"ubatch": 513}, 4096, 1280),
        (4096, {"ubatch": 8192}, 4096, 4096),
        (4096, {"slots": 4}, 4096, 4 * 1024),
        (4096, {"slots": 8}, 4096, 8 * 512),
        # 1,024 cells among three slots are 341 each, rounded up to 512: more than four slots take
        (1000, {"slots": 3}, 3 * 512, 3 * 512),
        (1000, {"slots": 4}, 4 * 256, 4 * 256),
        (4096, {"slots": 4, "kv_unified": True}, 4096, 4 * 512 + 512),
        (4096, {"slots": 2, "kv_unified": True}, 4096, 2 * 512 + 512),
    ],
)
def test_cells(context: int, options: dict[str, Any], full: int, sliding: int) -> None:
    assert kept(SMALL, context, **options).bytes_total == cells(full, sliding)


def test_sequences_without_slots_have_the_whole_context_each() -> None:
    assert kept(SMALL, 4000, batch=3).bytes_total == 3 * kept(SMALL, 4000).bytes_total
    assert kept(SMALL, 4000, batch=3, kv_unified=True).bytes_total == cells(12_032, 3 * 512 + 512)


def test_states_are_one_for_every_slot_in_f32() -> None:
    """Qwen3.5-27B: 48 layers of 48 heads of 128 x 128 and three columns of 10,240 channels."""
    model = package.load("qwen3.5-27b")
    state = 48 * (48 * 128 * 128 + 3 * 10_240) * 4
    for slots in (1, 4):
        made = kept(model, 8192, slots=slots)
        assert made.bytes_fixed == slots * state
        assert made.bytes_total == slots * state + 16 * 8192 * 4 * 512 * 2
    with pytest.raises(AttncalcError, match="states in fp32"):
        model.cache(10, engine="llamacpp", formats=Formats(state="bf16"))


@pytest.mark.parametrize(("month", "width"), [(None, 576), ("2026-01", 576), ("2026-11", 576), ("2025-12", 576 + 512)])
def test_mla_over_time(month: str | None, width: int) -> None:
    made = kept(package.load("deepseek-v3"), 1024, version=month)
    assert made.bytes_total == 61 * width * 2 * 1024
    assert made.bytes_per_token == 61 * width * 2


@pytest.mark.parametrize("month", ["2025-11", "2024-01", "2027-01", "2026-13", "b4500", "0.33", ""])
def test_other_versions_are_refused(month: str) -> None:
    with pytest.raises(AttncalcError, match="--engine-version"):
        kept(SMALL, 10, version=month)


@pytest.mark.parametrize(
    ("kv", "row"), [("q8_0", 2 * 272), ("q4_0", 2 * 144), ("q8_0/q4_0", 272 + 144), ("q4_0/q1_0", 144 + 36)]
)
def test_block_formats(kv: str, row: int) -> None:
    """256 values: 8 blocks of 32, or 2 of 128."""
    assert kept(SMALL, 256, kv=kv).bytes_total == 18 * 256 * row


@pytest.mark.parametrize("kv", ["fp8", "int8", "nvfp4", "fp8_ds_mla"])
def test_formats_of_other_engines_are_refused(kv: str) -> None:
    with pytest.raises(AttncalcError, match="llamacpp keeps K and V in"):
        kept(SMALL, 10, kv=kv)


KNOWN = {"none", "mha", "gqa", "mqa", "mla", "kda", "gdn", "mamba", "mamba2", "rwkv7", "short-conv"}


@pytest.mark.parametrize("preset", ids("models"))
def test_reasons_explain_the_whole_difference(preset: str) -> None:
    model = package.load(preset)
    unknown = {g.variant for g in model.groups} - KNOWN
    for options in ({}, {"slots": 3}, {"kv_unified": True, "slots": 2}):
        if unknown:
            with pytest.raises(AttncalcError, match="not known how llamacpp keeps this attention, got") as refused:
                kept(model, 5000, kv="bf16", **options)
            assert refused.value.got in unknown
            continue
        made = kept(model, 5000, kv="bf16", **options)
        logical = model.cache(5000, formats=Formats()).bytes_total
        assert sum(r.bytes for r in made.reasons) == made.bytes_total - logical


def test_gpus_divide_the_layers() -> None:
    model, options = package.load("llama-3.1-8b"), EngineOptions(pp=(12, 20))
    made = model.cache(1000, engine="llamacpp", options=options)
    assert [stage.bytes_total for stage in made.stages] == [12 * 1024 * 4096, 20 * 1024 * 4096]
    assert made.bytes_total == 20 * 1024 * 4096
    assert sum(r.bytes for r in made.reasons) == 20 * 24 * 4096


def test_what_is_refused(attncalc: Command) -> None:
    def error(*words: str) -> str:
        made = attncalc(*words, "--engine", "llamacpp")
        assert made.status == 2
        return made.err

    assert error("cache", "llama-3.1-8b", "--tp", "2").startswith("--tp: llamacpp divides layers")
    assert error("cache", "llama-3.1-8b", "--slots", "2", "-b", "2").startswith("--slots: ")
    assert error("cache", "llama-3.1-8b", "--slots", "257", "-c", "256").startswith("--slots: must not exceed")
    assert error("cache", "deepseek-v3.2").startswith("--engine: ")
    assert error("cache", "deepseek-v3", "--form", "decompressed").startswith("--form: ")
    assert error("fit", "llama-3.1-8b", "--slots", "2", "-b", "2", "--memory", "1GiB").startswith("--slots: ")


def test_mla_is_absorbed_in_prefill_too() -> None:
    step = package.load("deepseek-v3").flops(100, 100, engine="llamacpp")
    assert {x.form for x in step.layers} == {"absorbed"}


# What fits.


def test_cells_that_fit_come_in_steps() -> None:
    budget = cells(2560, 1024) + 100
    made = fit(SMALL, 512, Memory(cache=budget), engine="llamacpp", formats=Formats(kv="fp16"))
    assert (made.longest, made.bytes_used, made.bytes_next) == (2560, cells(2560, 1024), cells(2816, 1024))
    assert made.sequences == budget // cells(512, 512)


def test_slots_limit_the_sequences() -> None:
    def found(budget: int, context: int, **options: Any) -> Any:
        settings, formats = EngineOptions(slots=4, **options), Formats(kv="fp16")
        return fit(SMALL, context, Memory(cache=budget), engine="llamacpp", formats=formats, options=settings)

    budget = cells(8192, 4 * 1024)
    made = found(budget, 2000)
    assert (made.tokens, made.tokens_one_sequence, made.sequences, made.limiting) == (8192, 2048, 4, "slots")
    long = found(budget, 2049)
    assert (long.sequences, long.limiting) == (0, "memory")
    unified = found(budget, 5000, kv_unified=True)
    assert unified.tokens_one_sequence == unified.tokens > 8192
    assert unified.sequences == unified.tokens // 5000


def test_the_lines_of_the_log() -> None:
    made = fit(SMALL, 4096, Memory(cache=42 * MiB), engine="llamacpp", options=EngineOptions(slots=2))
    assert made.log
    assert made.log.lines == (
        (
            "llama_kv_cache: size =   12.00 MiB (  2048 cells,   3 layers,  2/2 seqs), "
            "K (bf16):    6.00 MiB, V (bf16):    6.00 MiB"
        ),
        (
            "llama_kv_cache: size =   30.00 MiB (  1024 cells,  15 layers,  2/2 seqs), "
            "K (bf16):   15.00 MiB, V (bf16):   15.00 MiB"
        ),
    )
    hybrid = fit(
        package.load("qwen3.5-27b"),
        8192,
        Memory(cache=16_384 * MiB + 598 * MiB + MiB // 2),
        engine="llamacpp",
        formats=Formats(kv="fp16"),
        options=EngineOptions(slots=4, kv_unified=True),
    )
    assert hybrid.log
    assert hybrid.log.lines == (
        (
            "llama_kv_cache: size = 16384.00 MiB (262144 cells,  16 layers,  4/1 seqs), "
            "K (f16): 8192.00 MiB, V (f16): 8192.00 MiB"
        ),
        (
            "llama_memory_recurrent: size =  598.50 MiB (     4 cells,  64 layers,  4 seqs), "
            "R (f32):   22.50 MiB, S (f32):  576.00 MiB"
        ),
    )
