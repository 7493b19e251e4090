"""vLLM: pages, groups and states, against values that were counted by hand, logged, or published."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import attncalc
from attncalc import AttncalcError
from attncalc.allocation import Allocation
from attncalc.dtypes import Formats
from attncalc.engines.blocks import Cache, Group, Spec, grouped, promote
from attncalc.engines.options import EngineOptions
from attncalc.presets import ids
from attncalc.workload import Conventions
from tests.conftest import Command
from tests.test_sharing import MLA, group, load

GiB = 2**30
ROW = 2 * 8 * 64 * 2
"""K and V of gpt-oss: 8 heads of 64 in bf16."""


def kept(model: str, context: int, *, formats: Formats | None = None, **words: Any) -> Allocation:
    """The allocation; words that are no parameter of `cache` are engine options."""
    mine = {k: words.pop(k) for k in ("batch", "tp", "mtp") if k in words}
    loaded = attncalc.load(model)
    return loaded.cache(context, engine="vllm", formats=formats, options=EngineOptions(**words), **mine)


def ceil(a: int, b: int) -> int:
    return -(-a // b)


@pytest.mark.parametrize(
    ("words", "blocks", "printed"),
    [
        # 12 full layers of 512 blocks; 12 sliding ones of 127 + 2,048 tokens and a block more
        ((), 12 * 512 + 12 * (ceil(127 + 2048, 16) + 1), 7.61),
        (("--max-batched-tokens", "8192"), 12 * 512 + 12 * (512 + 1), 12.01),
        (("--no-hybrid-manager",), 24 * 512, 12.00),
    ],
)
def test_gpt_oss_by_policy(attncalc: Command, words: tuple[str, ...], blocks: int, printed: float) -> None:
    """Which bytes are right depends on the policy, and each is printed with its rule."""
    record = attncalc("cache", "gpt-oss-20b", "-c", "8192", "-b", "32", "--engine", "vllm", *words, "--json").record
    (row,) = record["results"]
    assert row["bytes_per_sequence"] == blocks * 16 * ROW
    assert row["bytes_total"] == 32 * blocks * 16 * ROW + row["bytes_overhead"]
    assert row["bytes_overhead"] == row["block_bytes"]  # the null block
    assert round(row["bytes_total"] / GiB, 2) == printed
    logical = (12 * 8192 + 12 * 128) * ROW * 32
    assert sum(r["bytes"] for r in row["reasons"]) == row["bytes_total"] - logical
    rule = "without the hybrid manager" if "--no-hybrid-manager" in words else "a sliding layer holds its window"
    assert sum(rule in note for note in record["notes"]) == 1


@pytest.mark.parametrize(
    ("model", "state", "tp", "tokens", "page"),
    [
        # a page of KDA: 3 * 3 * heads * 128 * 2 B + heads * 128 * 128 * 4 B; a token of MLA: 1,152 B; by 128 tokens
        ("kimi-linear-48b-a3b", None, 1, 1920, 1920 * 1152),
        ("kimi-linear-48b-a3b", None, 2, 1024, 1024 * 1152),
        ("kimi-linear-48b-a3b", None, 4, 512, 512 * 1152),
        ("kimi-linear-48b-a3b", None, 8, 256, 256 * 1152),
        ("kimi-linear-48b-a3b", "bf16", 1, 1024, 1024 * 1152),
        ("kimi-linear-48b-a3b", "bf16", 8, 128, 128 * 1152),
        ("kimi-k3", None, 1, 5760, 5760 * 1152),
        ("kimi-k3", None, 8, 768, 768 * 1152),
        ("kimi-k3", None, 16, 384, 384 * 1152),
        # GDN in bf16: 1,097,728 B; a token of 2 heads of 256: 2,048 B; one head from tp 2 on
        ("qwen3-next-80b-a3b", None, 1, 544, 544 * 2048),
        ("qwen3-next-80b-a3b", None, 2, 544, 544 * 1024),
        ("qwen3-next-80b-a3b", None, 4, 272, 272 * 1024),
        ("qwen3-next-80b-a3b", None, 8, 144, 144 * 1024),
        ("qwen3-next-80b-a3b", "fp32", 1, 1056, 1056 * 2048),
        ("qwen3-next-80b-a3b", "fp32", 8, 272, 272 * 1024),
    ],
)
def test_attention_blocks_are_as_large_as_a_state(
    model: str, state: str | None, tp: int, tokens: int, page: int
) -> None:
    made = kept(model, 8192, tp=tp, formats=Formats(state=state))
    assert {g.block_tokens for g in made.pools[0].groups} == {0, tokens}
    assert made.state_page_bytes == page
    for layer in made.layers:
        if layer.group.variant in ("kda", "gdn"):
            assert layer.bytes == layer.layers * page == layer.layers * layer.bytes_fixed
        else:
            assert layer.bytes == layer.layers * ceil(8192, tokens) * page


def test_kimi_linear_has_a_phantom_layer() -> None:
    """20 KDA layers in groups of 7 beside 7 MLA layers: 3 groups, of which one is a layer short."""
    made = kept("kimi-linear-48b-a3b", 8192, batch=3)
    (pool,) = made.pools
    assert sorted(len(g.layers) for g in pool.groups) == [6, 7, 7, 7]
    assert pool.block_bytes == 7 * 1920 * 1152
    assert made.bytes_overhead == 3 * 1920 * 1152 + pool.block_bytes
    assert made.bytes_total == (3 * (3 + ceil(8192, 1920)) + 1) * pool.block_bytes


def test_mtp_beside_gpt_oss_fills_groups_up() -> None:
    """12 sliding and 13 full layers make groups of 13, not of 12: 13 is below one and a half times 12."""
    sliding, full = Spec("sliding", 16, 32_768, 32_768, 128), Spec("full", 16, 32_768, 32_768)
    caches = [Cache(sliding, i, 0) for i in range(12)] + [Cache(full, i, 1) for i in range(12, 25)]
    assert [len(g.caches) for g in grouped(caches)] == [12, 13]
    caches += [Cache(full, i, 1) for i in range(25, 30)]
    assert [len(g.caches) for g in grouped(caches)] == [12, 9, 9]


def test_the_cheaper_layers_have_larger_blocks() -> None:
    """Gemma-4-31B: 50 sliding layers of 16 heads of 256, 10 full ones of 4 heads of 512, half the bytes a token."""
    made = kept("gemma-4-31b", 262_144, max_batched_tokens=8192)
    (pool,) = made.pools
    assert [(len(g.layers), g.block_tokens) for g in pool.groups] == [(10, 16)] * 5 + [(10, 32)]
    assert pool.block_bytes == 10 * 16 * 16 * 512 * 2
    assert pool.blocks(262_144) == 8192 + 5 * (ceil(1023 + 8192, 16) + 1) == 11_077
    # inside the window a token costs a full layer as much as a sliding one costs for two
    assert kept("gemma-4-31b", 512).bytes_per_token == 50 * 16 * 512 * 2 + 10 * 4 * 1024 * 2 == 901_120


@pytest.mark.parametrize(
    ("drafts", "caching", "mamba", "delta"),
    [(None, False, 1, 1), (None, True, 3, 2), (2, False, 3, 3), (2, True, 5, 4)],
)
def test_states_of_drafts_and_of_prefix_caching(drafts: int | None, caching: bool, mamba: int, delta: int) -> None:
    for model, states in (("nemotron-h-8b", mamba), ("qwen3-next-80b-a3b", delta)):
        made = kept(model, 100, draft_tokens=drafts, prefix_caching=caching)
        (states_layer, *_) = [x for x in made.layers if x.bytes_fixed]
        assert states_layer.bytes == states_layer.layers * states * (made.state_page_bytes or 0)


@pytest.mark.parametrize(("version", "states"), [("0.33", 3), ("0.33.1", 3), ("0.32", 2), (None, 3)])
def test_a_checkpoint_inside_a_prefill_came_with_0_33(version: str | None, states: int) -> None:
    made = kept("nemotron-h-8b", 100, version=version, prefix_caching=True)
    assert [p.blocks for x in made.layers for p in x.pages if x.bytes_fixed] == [states]


def test_keys_and_values_of_kda_have_one_width() -> None:
    model = attncalc.load("kimi-linear-48b-a3b")
    kda: Any = next(g for g in model.groups if g.variant == "kda")
    wide = replace(model, groups=(kda._replace(attention=replace(kda.attention, head_v_dim=256), indices=(0,)),))
    assert wide.cache(100).bytes_total
    for engine in ("vllm", "sglang"):
        with pytest.raises(AttncalcError, match="of one width"):
            wide.cache(100, engine=engine)


def test_draft_tokens_lengthen_the_convolution() -> None:
    for drafts in (0, 3):
        made = kept("qwen3-next-80b-a3b", 100, draft_tokens=drafts)
        shapes = {t.name: t.shape for t in made.layers[0].tensors}
        assert shapes["conv_state"] == (1, 1, 3 + drafts, 8192)


@pytest.mark.parametrize(("model", "dtype"), [("qwen3-next-80b-a3b", "bf16"), ("qwen3.5-27b", "fp32")])
@pytest.mark.parametrize(("asked", "then"), [(None, None), ("fp32", "fp32"), ("bf16", "bf16")])
def test_the_state_has_the_models_format_unless_one_is_named(
    model: str, dtype: str, asked: str | None, then: str | None
) -> None:
    made = kept(model, 100, formats=Formats(state=asked))
    assert made.formats.state == (then or dtype)
    assert attncalc.load("kimi-linear-48b-a3b").cache(100, engine="vllm").layers[0].tensors[1].dtype == "fp32"


# Bytes of one GPU: 80 layers of K and V of 8 heads of 128; 94 of 4 heads; 61 latents of 576; all in bf16.
SPLIT = [
    *(("llama-3.1-70b", tp, 80 * 2 * max(1, 8 // tp) * 128 * 2) for tp in (1, 2, 4, 8, 16)),
    *(("qwen3-235b-a22b", tp, 94 * 2 * max(1, 4 // tp) * 128 * 2) for tp in (1, 2, 4, 8, 16)),
    *(("deepseek-v3", tp, 61 * 576 * 2) for tp in (1, 2, 4, 8, 16)),
]


@pytest.mark.parametrize(("model", "tp", "token"), SPLIT)
def test_bytes_of_one_gpu(attncalc: Command, model: str, tp: int, token: int) -> None:
    words = ("cache", model, "-c", "1000", "-b", "3", "--tp", str(tp), "--engine", "vllm", "--json")
    record = attncalc(*words).record
    (row,) = record["results"]
    assert row["bytes_per_token"] == token
    assert row["bytes_per_sequence"] == ceil(1000, 16) * 16 * token
    heads = {"llama-3.1-70b": 8, "qwen3-235b-a22b": 4, "deepseek-v3": 1}[model]
    copies = [n for n in record["notes"] if "times over" in n]
    assert bool(copies) == (tp > heads)
    assert all(f"{tp // heads} times over by the {tp} GPUs" in n for n in copies)


@pytest.mark.parametrize(("model", "tp"), [("kimi-k3", t) for t in (1, 2, 4, 8, 16)] + [("qwen3-next-80b-a3b", 8)])
def test_states_are_divided_and_latents_are_not(model: str, tp: int) -> None:
    whole, part = kept(model, 100), kept(model, 100, tp=tp)
    for a, b in zip(whole.layers, part.layers, strict=True):
        for x, y in zip(a.tensors, b.tensors, strict=True):
            if x.name.endswith("state"):
                assert y.bytes * tp == x.bytes
            elif x.name in ("c_kv", "k_pe"):
                assert y.shape[3] == x.shape[3]


@pytest.mark.parametrize(
    ("model", "tp"), [("llama-3.1-70b", 3), ("llama-3.1-70b", 128), ("kimi-k3", 64), ("qwen3-next-80b-a3b", 32)]
)
def test_an_impossible_split_is_refused(attncalc: Command, model: str, tp: int) -> None:
    made = attncalc("cache", model, "--tp", str(tp), "--engine", "vllm")
    assert (made.status, made.out) == (2, "")
    assert made.err.startswith("--tp:")


@pytest.mark.parametrize(("model", "tp", "dcp", "most"), [("qwen3-235b-a22b", 8, 4, 2), ("llama-3.1-70b", 8, 2, 1)])
def test_context_parallelism_divides_copies_only(model: str, tp: int, dcp: int, most: int) -> None:
    with pytest.raises(AttncalcError, match=f"--dcp: must be at most {most}"):
        kept(model, 100, tp=tp, dcp=dcp)


def test_context_parallelism_shares_the_tokens() -> None:
    whole, shared = kept("deepseek-v3", 8000, tp=8), kept("deepseek-v3", 8000, tp=8, dcp=8)
    assert whole.bytes_per_sequence == 500 * 16 * 61 * 1152
    assert shared.bytes_per_sequence == ceil(1000, 16) * 16 * 61 * 1152
    assert (len(whole.replicated), shared.replicated) == (2, ())
    assert kept("qwen3-235b-a22b", 8192, tp=8, dcp=2).bytes_per_sequence == 94 * 512 * 4096
    for model, tp, dcp in (("gpt-oss-20b", 16, 2), ("deepseek-v3", 8, 3)):
        with pytest.raises(AttncalcError, match="--dcp"):
            kept(model, 100, tp=tp, dcp=dcp)


def test_the_largest_stage_decides() -> None:
    """Layers left over lie in the middle stages, the last one has none."""
    made = kept("llama-3.1-8b", 16, pp=(3,))
    assert [len(s.layers) for s in made.stages] == [11, 11, 10]
    assert made.bytes_per_sequence == 11 * 16 * 4096
    made = kept("gpt-oss-20b", 8192, pp=(8, 16))
    assert made.pools[0].block_bytes == 8 * 16 * ROW
    assert [s.bytes_total for s in made.stages] == [(512 + 137 + 1) * n * 16 * ROW for n in (4, 8)]


def test_replicas_hold_whole_sequences() -> None:
    assert kept("llama-3.1-8b", 100, batch=5, dp=2).bytes_total == (3 * 7 + 1) * 16 * 131_072


@pytest.mark.parametrize(
    ("kv", "index", "row", "key"),
    [
        ("bf16", None, 1152, 132),
        ("fp8_ds_mla", None, 656, 132),
        ("fp8", None, 656, 132),
        ("nvfp4_ds_mla", None, 352, 132),
        ("fp8_ds_mla", "fp4", 656, 68),
    ],
)
def test_sparse_rows_are_records(kv: str, index: str | None, row: int, key: int) -> None:
    """Blocks of 64 tokens, index keys always in fp8 or fp4."""
    made = kept("deepseek-v3.2", 6400, formats=Formats(kv=kv, index=index))
    assert made.bytes_per_token == 61 * (row + key)
    assert made.pools[0].block_bytes == 64 * 61 * (row + key)


def test_pages_of_deepseek_v4() -> None:
    """vLLM blog, 2026-04-24: pages of 256 tokens, in records of 584 and 132 B, rounded up to 576 B."""
    made = kept("deepseek-v4-pro", 1_048_576, formats=Formats(kv="fp8_ds_mla"))
    pages = {(x.group.variant, p.tensors): (p.bytes, p.block_tokens) for x in made.layers for p in x.pages}
    assert pages == {
        ("csa", ("window_kv",)): (37_440, 64),
        ("csa", ("compressed_kv",)): (37_440, 256),
        ("csa", ("index_k",)): (8_640, 256),
        ("csa", ("compressor_state",)): (32_832, 4),
        ("csa", ("index_compressor_state",)): (8_640, 4),
        ("hca", ("window_kv",)): (37_440, 64),
        ("hca", ("compressed_kv",)): (1_728, 256),
        ("hca", ("compressor_state",)): (32_832, 8),
    }
    (pool,) = made.pools
    # All pages of 256 tokens lie in one group, the widest: 30 of entries and keys, 31 of entries of 128 tokens.
    assert pool.block_bytes == 30 * (37_440 + 8_640) + 31 * 1_728
    assert [g.block_tokens for g in pool.groups].count(64) == 2  # 61 windows in groups of 31 at most


@pytest.mark.parametrize(
    ("model", "formats", "option"),
    [
        ("llama-3.1-8b", {"kv": "q8_0"}, "--kv-dtype"),
        ("llama-3.1-8b", {"kv": "fp8/bf16"}, "--kv-dtype"),
        ("llama-3.1-8b", {"kv": "fp8_ds_mla"}, "--kv-dtype"),
        ("deepseek-v3", {"kv": "nvfp4"}, "--kv-dtype"),
        ("deepseek-v3.2", {"index": "bf16"}, "--index-dtype"),
        ("kimi-linear-48b-a3b", {"state": "fp16"}, "--state-dtype"),
        ("mimo-v2-flash", {"kv": "nvfp4"}, "--kv-dtype"),
        ("deepseek-v4-flash", {"kv": "int8_per_token_head"}, "--kv-dtype"),
    ],
)
def test_a_format_that_vllm_lacks_is_refused(model: str, formats: dict[str, str], option: str) -> None:
    with pytest.raises(AttncalcError, match=option):
        kept(model, 100, formats=Formats(**formats))


@pytest.mark.parametrize(
    ("model", "kv"),
    [
        *((m, kv) for m in ("deepseek-v3", "kimi-k3") for kv in ("fp8_ds_mla", "nvfp4_ds_mla", "nvfp4", "int8")),
        *(("deepseek-v3.2", kv) for kv in ("fp8_e5m2", "nvfp4")),
        *(("deepseek-v4-flash", kv) for kv in ("nvfp4_ds_mla", "fp16")),
    ],
)
def test_records_are_those_of_kernels_that_select(model: str, kv: str) -> None:
    with pytest.raises(AttncalcError, match="--kv-dtype: vllm keeps"):
        kept(model, 100, formats=Formats(kv=kv))


@pytest.mark.parametrize(("kv", "record"), [("fp8_ds_mla", 656), ("nvfp4_ds_mla", 352)])
def test_records_of_selected_rows(kv: str, record: int) -> None:
    """61 layers of 2 blocks of 64 tokens, each with an index key of 132 B."""
    assert kept("deepseek-v3.2", 100, formats=Formats(kv=kv)).bytes_per_sequence == 61 * 128 * (record + 132)


def test_states_have_the_format_that_a_configuration_names() -> None:
    """fp32 in Nemotron-H, named or not; in Qwen3.5 where it is named, else the model's."""
    for preset in ("nemotron-h-8b", "nemotron-h-56b", "qwen3.5-27b"):
        assert "fp32" in {t.dtype for layer in kept(preset, 100).layers for t in layer.tensors}
    file = Path(__file__).parent / "data" / "configs" / "qwen3.5-27b.json"
    config = json.loads(file.read_text())
    text = config.get("text_config", config)
    assert text.pop("mamba_ssm_dtype") == "float32"
    formats = {"fp32": attncalc.load(file), "bf16": attncalc.load(config)}
    for name, model in formats.items():
        layers = model.cache(100, engine="vllm").layers
        assert {t.dtype for layer in layers for t in layer.tensors if t.name == "recurrent_state"} == {name}


@pytest.mark.parametrize(
    ("kv", "row"), [("fp8", 256), ("nvfp4", 144), ("int8_per_token_head", 264), ("fp8_per_token_head", 264)]
)
def test_head_formats(kv: str, row: int) -> None:
    """K and V of 8 heads of 128: one byte a value; 4 bits and a scale of 16; one byte, and a scale of 4 B each."""
    assert kept("llama-3.1-8b", 16, formats=Formats(kv=kv)).bytes_per_token == 32 * 8 * row


def test_blocks_are_whole_kernel_blocks() -> None:
    assert kept("llama-3.1-8b", 100, block_size=128).bytes_per_sequence == 128 * 131_072
    for model, size in (("llama-3.1-8b", 8), ("deepseek-v3.2", 16), ("deepseek-v4-flash", 64)):
        with pytest.raises(AttncalcError, match="--block-size"):
            kept(model, 100, block_size=size)


@pytest.mark.parametrize(("version", "known"), [("0.11", True), ("0.20.1", True), ("0.34", False), ("0.9", False)])
def test_versions(version: str, known: bool) -> None:
    if known:
        # 7 blocks of 16 tokens, and the null block: 32 layers, K and V of 8 heads of 128 in bf16
        assert kept("llama-3.1-8b", 100, version=version).bytes_total == 8 * 16 * 32 * 2 * 8 * 128 * 2
    else:
        with pytest.raises(AttncalcError, match="--engine-version"):
            kept("llama-3.1-8b", 100, version=version)


def test_mla_is_absorbed_for_few_tokens_and_expanded_for_many() -> None:
    model = attncalc.load("deepseek-v3")

    def form(new: int, drafts: int | None = None) -> set[str]:
        step = model.flops(1000, new, engine="vllm", options=EngineOptions(draft_tokens=drafts))
        return {x.form for x in step.layers}

    assert (form(1), form(2), form(1000)) == ({"absorbed"}, {"expanded"}, {"decompressed"})
    assert (form(4, 3), form(5, 3)) == ({"absorbed"}, {"expanded"})
    # what came earlier is expanded once: 2 * 900 * 512 * 128 * (128 + 128) FLOPs in each of 61 layers
    chunk = model.flops(1000, 100, engine="vllm")
    plain = model.flops(1000, 100, conventions=Conventions(form="decompressed"))
    assert chunk.total - plain.total == 61 * 2 * 900 * 512 * 128 * 256
    with pytest.raises(AttncalcError, match="vllm computes mla absorbed"):
        model.flops(1000, engine="vllm", conventions=Conventions(form="merged"))


def test_sparse_kernels_work_on_latents() -> None:
    model = attncalc.load("deepseek-v3.2")
    for context, form in ((2048, "decompressed"), (2049, "absorbed")):
        assert {x.form for x in model.flops(context, context, engine="vllm").layers} == {form}


@pytest.mark.parametrize("preset", ids("models"))
def test_reasons_explain_the_whole_difference(preset: str) -> None:
    model = attncalc.load(preset)
    for context, tp, options in (
        (1, 1, EngineOptions()),
        (20_000, 2, EngineOptions(draft_tokens=2, prefix_caching=True, max_batched_tokens=512)),
        (20_000, 1, EngineOptions(no_hybrid_manager=True)),
        (300, 1, EngineOptions(pp=(model.num_layers - 1, 1)) if model.num_layers > 1 else EngineOptions()),
    ):
        try:
            made = model.cache(context, batch=2, tp=tp, engine="vllm", options=options)
            logical = model.cache(context, batch=2, tp=tp, options=options.limited(("pp", "dp")))
        except AttncalcError as error:
            assert error.where in ("--engine", "--tp", "--draft-tokens", "--pp", "--kv-dtype", "--no-hybrid-manager")  # noqa: PT017
            continue
        assert sum(r.bytes for r in made.reasons) == made.bytes_total - logical.bytes_total
        assert made.bytes_total == sum(x.bytes for x in made.layers) + made.bytes_overhead
        (pool,) = made.pools
        assert made.bytes_total == (2 * pool.blocks(context) + pool.spare_blocks) * pool.block_bytes
        for layer in made.layers:
            assert layer.padding >= 0
            assert layer.bytes == 2 * layer.layers * sum(p.bytes * p.blocks for p in layer.pages)


@given(
    window=st.integers(1, 300), context=st.integers(1, 2000), in_flight=st.integers(1, 600), first=st.integers(0, 2000)
)
def test_a_sliding_layer_never_needs_more_than_its_blocks(
    window: int, context: int, in_flight: int, first: int
) -> None:
    """Whatever the chunk of a prefill, the blocks that hold window and chunk are at most those reserved."""
    spec = Spec("sliding", 16, 1, 1, window)
    start = min(first, context - 1)
    end = min(start + in_flight, context)
    lowest = max(0, start - (window - 1))
    assert (end - 1) // 16 - lowest // 16 + 1 <= spec.blocks(context, in_flight)


@given(st.lists(st.sampled_from([4096, 8192, 16_384, 12_288]), min_size=2, max_size=12), st.integers(1, 3))
def test_blocks_of_all_groups_are_equal(pages: list[int], kinds: int) -> None:
    """No layer is lost, and every page of a group is the largest."""
    caches = [
        Cache(Spec("sliding" if i % (kinds + 1) else "full", 16, p, p, 64 * (i % (kinds + 1))), i, i)
        for i, p in enumerate(pages)
    ]
    made = grouped(caches)
    assert sorted(c.layer for g in made for c in g.caches) == list(range(len(pages)))
    if len(made) > 1:
        assert {c.spec.page for g in made for c in g.caches} == {max(pages)}


def test_pages_of_latents_are_not_padded() -> None:
    latent = Spec("full", 16, 1152 * 16, 1152 * 16, latent=True)
    head = Spec("sliding", 16, 2000 * 16, 2000 * 16, 64)
    with pytest.raises(AttncalcError, match="cannot make the pages"):
        grouped([Cache(latent, 0, 0), Cache(head, 1, 1)])
    assert [g.block_tokens for g in grouped([Cache(head, 0, 0), Cache(head._replace(kind="full", size=0), 1, 1)])]


def test_the_hybrid_manager_off_promotes_beside_full_layers_only() -> None:
    sliding, chunk = Spec("sliding", 16, 1, 1, 64), Spec("chunk", 16, 1, 1, 64)
    full = Spec("full", 16, 1, 1)
    assert promote([Cache(sliding, 0, 0)]) == [Cache(sliding, 0, 0)]
    with pytest.raises(AttncalcError, match="--no-hybrid-manager"):
        kept("qwen3-next-80b-a3b", 100, no_hybrid_manager=True)
    assert promote([Cache(s, i, i) for i, s in enumerate((sliding, chunk, full))]) == [
        Cache(full, i, i) for i in range(3)
    ]


def test_what_vllm_does_not_run_is_refused(attncalc: Command) -> None:
    for model in ("rwkv7-goose-1.4b-pile", "seed-mla"):
        made = attncalc("cache", model, "--engine", "vllm")
        assert made.status == 2
        record = attncalc("cache", model, "--engine", "all", "--json").record
        assert "vllm" not in [r["engine"] for r in record["results"]]
        assert any(f"{model}, vllm: " in note for note in record["notes"])


def test_a_cache_of_one_kind_is_one_group() -> None:
    model = load(group("0", MLA), group("1", MLA))
    made = model.cache(100, engine="vllm")
    assert len(made.pools[0].groups) == 1
    assert isinstance(grouped([Cache(Spec("full", 16, 1, 1), 0, 0)])[0], Group)


def test_json_names_the_formats_that_vllm_keeps(attncalc: Command) -> None:
    for command in ("cache", "flops"):
        record = attncalc(command, "qwen3-next-80b-a3b", "-c", "100", "--engine", "vllm", "--json").record
        assert record["conventions"]["state_dtype"] == "bf16"
        record = attncalc(
            command, "deepseek-v3.2", "-c", "100", "--engine", "vllm", "--kv-dtype", "fp8", "--json"
        ).record
        assert record["conventions"]["kv_dtype"] == "fp8_ds_mla"
        assert record["conventions"]["index_dtype"] == "fp8"
    two = attncalc(
        "cache", "qwen3-next-80b-a3b", "-c", "100", "--engine", "vllm", "--engine", "logical", "--json"
    ).record
    assert two["conventions"]["state_dtype"] == ["bf16", "fp32"]
    assert sum(r["bytes"] for r in two["results"][0]["reasons"] if "own format" in r["rule"]) == (
        -36 * 32 * 128 * 128 * 2
    )


def test_picked_blocks_are_pages() -> None:
    """MiniMax-M3: 60 layers of K and V of 4 heads of 128; an index key of 128 in 57, the model's format whatever K's."""
    for kv, size in (("bf16", 2), ("fp8", 1)):
        made = kept("minimax-m3", 200, formats=Formats(kv=kv))
        assert made.pools[0].block_bytes == 128 * (60 * 2 * 4 * 128 * size + 57 * 128 * 2)
        assert made.pools[0].blocks(200) == 2
