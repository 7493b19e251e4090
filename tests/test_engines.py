"""Engines: what each keeps, reads and writes, and why it differs from the logical cache."""

from dataclasses import replace
from typing import Any

import pytest

import attncalc
from attncalc import AttncalcError
from attncalc.dtypes import Formats
from attncalc.presets import ids
from attncalc.workload import Conventions
from tests.conftest import Command
from tests.test_sharing import GQA, group, load

FALCON = attncalc.load("falcon-40b")
KIMI = attncalc.load("kimi-linear-48b-a3b")
TOKENS = 1000
ENGINES = ("logical", "transformers")


@pytest.mark.parametrize(("tp", "heads"), [(1, 128), (8, 16), (16, 8)])
def test_falcon_broadcasts_to_its_local_query_heads(tp: int, heads: int) -> None:
    kept = FALCON.cache(TOKENS, engine="transformers", tp=tp)
    # K and V of 64 values in bf16 for each local query head, 60 layers
    assert kept.bytes_total == heads * 2 * 64 * 2 * TOKENS * 60
    assert [t.shape for t in kept.layers[0].tensors] == [(1, heads, TOKENS, 64)] * 2
    step = FALCON.flops(TOKENS, engine="transformers", tp=tp)
    assert step.bytes_cache_read == kept.bytes_total
    assert step.bytes_cache_write == heads * 2 * 64 * 2 * 60


@pytest.mark.parametrize(("tp", "kv_heads"), [(1, 8), (8, 1), (16, 1)])
def test_falcon_needs_its_local_kv_heads_alone(tp: int, kv_heads: int) -> None:
    assert FALCON.cache(TOKENS, tp=tp).bytes_total == kv_heads * 2 * 64 * 2 * TOKENS * 60


def test_falcon_of_one_kv_head_broadcasts_nothing() -> None:
    # 32 layers, K and V of 64 values
    small = attncalc.load("falcon-7b")
    for engine in ENGINES:
        assert small.cache(TOKENS, engine=engine).bytes_total == 2 * 64 * 2 * TOKENS * 32
        assert small.cache(TOKENS, engine=engine).reasons == ()


def test_broadcasting_changes_bytes_and_no_flops() -> None:
    plain, wide = FALCON.flops(TOKENS), FALCON.flops(TOKENS, engine="transformers")
    assert plain.total == wide.total
    assert wide.bytes_cache_read == 16 * plain.bytes_cache_read
    assert plain.bytes_weights == wide.bytes_weights


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("tp", [1, 8])
@pytest.mark.parametrize("preset", ["llama-3.1-8b", "deepseek-v3", "falcon-40b", "kimi-linear-48b-a3b"])
def test_a_decode_step_reads_what_full_layers_keep(preset: str, tp: int, engine: str) -> None:
    """States and columns of a convolution are read whole, as tokens are."""
    model = attncalc.load(preset)
    kept = model.cache(TOKENS, batch=3, engine=engine, tp=tp)
    assert model.flops(TOKENS, batch=3, engine=engine, tp=tp).bytes_cache_read == kept.bytes_total


@pytest.mark.parametrize("engine", ENGINES)
def test_a_decode_step_reads_the_one_kv_head_of_falcon_7b(engine: str) -> None:
    model = attncalc.load("falcon-7b")
    assert model.flops(TOKENS, engine=engine).bytes_cache_read == model.cache(TOKENS, engine=engine).bytes_total


@pytest.mark.parametrize("engine", ENGINES)
def test_a_decode_step_writes_a_token_and_every_state(engine: str) -> None:
    """20 KDA layers of 32 heads of 128 x 128 in fp32, columns of (2 + 1) * 32 * 128 channels; 7 MLA layers of 576."""
    columns = {"logical": 3, "transformers": 4}[engine]
    states = 20 * 32 * 128 * 128 * 4
    convolutions = 20 * columns * 12_288 * 2
    kept = KIMI.cache(TOKENS, engine=engine)
    assert kept.bytes_fixed == states + convolutions
    assert kept.bytes_total == states + convolutions + 7 * 576 * 2 * TOKENS
    step = KIMI.flops(TOKENS, engine=engine)
    assert step.bytes_cache_write == states + convolutions + 7 * 576 * 2


def test_a_convolution_keeps_as_many_columns_as_its_kernel() -> None:
    for engine, columns in (("logical", 3), ("transformers", 4)):
        tensors = {t.name: t.shape for t in KIMI.cache(TOKENS, batch=2, engine=engine).layers[0].tensors}
        # 2 * 32 * 128 + 32 * 128 channels
        assert tensors == {"conv_state": (2, 1, columns, 12_288), "recurrent_state": (2, 32, 128, 128)}


def test_windows_and_chunks_keep_one_token_fewer() -> None:
    for reach in ({"window": 6}, {"chunk": 6}):
        model = load(group("0", reach=reach))
        for context, logical, kept in ((3, 3, 3), (5, 5, 5), (6, 6, 5), (20, 6, 5)):
            # 2 heads of 16 + 8 values in bf16: 96 B
            assert model.cache(context).bytes_total == 96 * logical
            assert model.cache(context, engine="transformers").bytes_total == 96 * kept


def test_mimo_counts_its_window_without_the_current_token() -> None:
    model = attncalc.load("mimo-v2-flash")
    logical, kept = (model.cache(TOKENS, engine=e) for e in ENGINES)
    windows = [x for x in logical.layers if x.group.reach.kind == "window"]
    assert windows
    assert kept.bytes_total == logical.bytes_total
    assert sum(r.bytes for r in kept.reasons) == 0
    a, b = (model.flops(TOKENS, engine=e) for e in ENGINES)
    # one pair more in each windowed layer: 2 * 64 heads * (192 + 128)
    assert b.total - a.total == sum(x.layers for x in windows) * 2 * 64 * (192 + 128)


def test_gpt_neo_keeps_all_keys_of_its_local_layers() -> None:
    model = replace(load(group("0", reach={"window": 8})), model_type="gpt_neo")
    full = load(group("0"))
    logical, kept = (model.cache(TOKENS, engine=e) for e in ENGINES)
    assert logical.bytes_total == model.cache(8).bytes_total
    assert kept.bytes_total == full.cache(TOKENS).bytes_total
    assert model.flops(TOKENS, engine="transformers").total == full.flops(TOKENS).total
    assert sum(r.bytes for r in kept.reasons) == kept.bytes_total - logical.bytes_total


def test_a_window_of_one_token_is_refused() -> None:
    model = load(group("0", reach={"window": 1}))
    assert model.cache(20).bytes_total == 96
    with pytest.raises(AttncalcError, match="a window of one token"):
        model.cache(20, engine="transformers")


@pytest.mark.parametrize("preset", ids("models"))
def test_reasons_explain_the_whole_difference(preset: str) -> None:
    model = attncalc.load(preset)
    formats = Formats()
    for context, tp in ((50, 1), (20_000, 1), (20_000, 2)):
        try:
            logical = model.cache(context, batch=2, tp=tp, formats=formats)
        except AttncalcError:  # heads that two GPUs cannot share
            continue
        kept = model.cache(context, batch=2, tp=tp, engine="transformers", formats=formats)
        assert sum(r.bytes for r in kept.reasons) == kept.bytes_total - logical.bytes_total
        assert logical.reasons == ()
        differing = [a.bytes != b.bytes for a, b in zip(logical.layers, kept.layers, strict=True)]
        assert bool(kept.reasons) or not any(differing)


def test_reasons_are_in_the_json_and_the_notes(attncalc: Command) -> None:
    words = ("cache", "falcon-40b", "kimi-linear-48b-a3b", "-c", "1000", "--engine", "transformers", "--json")
    record = attncalc(*words).record
    falcon, kimi = record["results"]
    # 120 heads more of 128 values; one column more of 12,288 channels
    assert [r["bytes"] for r in falcon["reasons"]] == [120 * 2 * 64 * 2 * 1000 * 60]
    assert [r["bytes"] for r in kimi["reasons"]] == [20 * 12_288 * 2]
    assert sum("broadcasts" in note for note in record["notes"]) == 1
    assert sum("convolution" in note for note in record["notes"]) == 1


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("preset", "tp"), [("falcon-40b", 8), ("llama-3.1-8b", 8), ("llama-3.1-8b", 32)])
def test_the_variant_is_the_whole_models(attncalc: Command, preset: str, tp: int, engine: str) -> None:
    """A GPU that holds one KV head computes an MQA, or an MHA; the model remains a GQA."""
    words = ("-c", "1000", "--tp", str(tp), "--engine", engine, "--json")
    for command in ("cache", "flops"):
        (row,) = attncalc(command, preset, *words).record["results"]
        assert {layer["variant"] for layer in row["layers"]} == {"gqa"}
        assert row["tp"] == tp


def test_transformers_expands_mla_and_refuses_other_forms() -> None:
    model = attncalc.load("deepseek-v3")
    for new_tokens in (1, 100):
        step = model.flops(100, new_tokens, engine="transformers")
        assert {x.form for x in step.layers} == {"expanded"}
    assert model.flops(100, 1).layers[0].form == "absorbed"
    assert model.flops(100, 100).layers[0].form == "decompressed"
    with pytest.raises(AttncalcError, match="transformers computes mla expanded"):
        model.flops(100, engine="transformers", conventions=Conventions(form="merged"))


@pytest.mark.parametrize("kv", ["fp8", "int8", "q8_0", "fp64", "bf16/fp8"])
def test_transformers_has_three_cache_formats(kv: str) -> None:
    with pytest.raises(AttncalcError, match="fp32, bf16, fp16"):
        FALCON.cache(10, engine="transformers", formats=Formats(kv=kv))
    with pytest.raises(AttncalcError, match="fp32, bf16, fp16"):
        FALCON.flops(10, engine="transformers", conventions=Conventions(formats=Formats(kv=kv)))
    assert FALCON.cache(10, formats=Formats(kv=kv)).bytes_total


def test_only_falcon_broadcasts() -> None:
    document: Any = load(group("0", GQA))
    assert document.model_type is None
    assert document.cache(20).bytes_total == document.cache(20, engine="transformers").bytes_total == 96 * 20


@pytest.mark.parametrize(("formats", "width"), [(None, 2), (Formats(kv="fp32"), 4), (Formats(state="fp32"), 4)])
def test_lightning_keeps_its_state_in_the_dtype_of_the_cache(formats: Formats | None, width: int) -> None:
    row = {"variant": "lightning", "num_heads": 3, "head_dim": 8, "chunk_size": 16}
    model = load(group("0, 1", row))
    assert model.cache(50, engine="transformers", formats=formats).bytes_total == 2 * 3 * 8 * 8 * width
    assert model.cache(50).bytes_total == 2 * 3 * 8 * 8 * 4
    kept = model.flops(50, engine="transformers", conventions=Conventions(formats=formats or Formats()))
    assert kept.bytes_cache_read == 2 * 3 * 8 * 8 * width
