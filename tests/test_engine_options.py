"""Options of engines: what each has, how it is typed, stages and replicas."""

from fractions import Fraction

import pytest

import attncalc
from attncalc import AttncalcError
from attncalc.engines import ENGINES, engine
from attncalc.engines.options import EngineOptions, option, read_options, read_version
from attncalc.engines.stages import pipeline, stage_layers, stage_sizes, within
from tests.conftest import Command
from tests.test_sharing import group, load

TYPED = {
    "version": "0.21",
    "block_size": "16",
    "max_batched_tokens": "2k",
    "prefix_caching": True,
    "no_hybrid_manager": True,
    "draft_tokens": "3",
    "slots": "4",
    "ubatch": "512",
    "swa_ratio": "0.8",
    "pp": "2",
    "dcp": "2",
    "dp": "2",
    "dp_attention": True,
}


VLLM = {
    "version": "0.33",
    "block_size": 16,
    "max_batched_tokens": 2048,
    "prefix_caching": False,
    "no_hybrid_manager": False,
    "draft_tokens": None,
    "pp": [1],
    "dcp": 1,
    "dp": 1,
}
SGLANG = {"block_size": 1, "draft_tokens": None, "swa_ratio": "4/5", "pp": [1], "dp": 1, "dp_attention": False}


def test_options_are_read_as_typed() -> None:
    made = read_options(**TYPED)
    assert made.given == tuple(TYPED)
    assert (made.max_batched_tokens, made.swa_ratio, made.pp) == (2048, Fraction(4, 5), (2,))
    assert read_options(pp=" 16, 32", draft_tokens="0") == EngineOptions(pp=(16, 32), draft_tokens=0)
    assert read_options(version=None, prefix_caching=False) == EngineOptions()
    assert made.record()["pp"] == [2]
    assert made.record()["swa_ratio"] == "4/5"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("block_size", "0"),
        ("pp", "2,"),
        ("pp", ""),
        ("dcp", "-1"),
        ("dp", "1.5"),
        ("slots", "many"),
        ("swa_ratio", "0"),
        ("swa_ratio", "1.5"),
        ("swa_ratio", "1e-1"),
        ("swa_ratio", "1/0"),
    ],
)
def test_nonsense_is_refused(attncalc: Command, name: str, text: str) -> None:
    made = attncalc("cache", "llama-3.1-8b", "--engine", "all", option(name), text)
    assert (made.status, made.out) == (2, "")
    assert made.err.startswith(option(name))
    assert len(made.err.splitlines()) == 1


def test_a_zero_is_given() -> None:
    assert EngineOptions(draft_tokens=0).given == ("draft_tokens",)
    with pytest.raises(AttncalcError, match="--draft-tokens: logical has no such option"):
        attncalc.load("llama-3.1-8b").cache(100, options=EngineOptions(draft_tokens=0))


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("given", TYPED)
def test_an_option_that_an_engine_lacks_is_refused(attncalc: Command, given: str, name: str) -> None:
    if given in engine(name).options:
        return
    value = TYPED[given]
    words = [option(given)] if value is True else [option(given), str(value)]
    if given == "dp_attention":
        words += ["--dp", "2"]
    made = attncalc("cache", "llama-3.1-8b", "--engine", name, *words)
    assert made.status == 2
    assert f"{name} has no such option" in made.err


def test_attention_replicas_need_a_number(attncalc: Command) -> None:
    assert "--dp-attention: needs the replicas" in attncalc("cache", "llama-3.1-8b", "--dp-attention").err


@pytest.mark.parametrize(("text", "found"), [(None, (5, 24)), ("5.14", (5, 14)), ("v5.15.1", (5, 15, 1))])
def test_a_version_is_read(text: str | None, found: tuple[int, ...]) -> None:
    assert read_version(text, "transformers", (5, 0), (5, 24)) == found


@pytest.mark.parametrize("text", ["", "5", "5.x", "4.57", "5.25", "5.1.2.3", "-5.1", "latest"])
def test_an_unknown_version_is_refused(text: str) -> None:
    with pytest.raises(AttncalcError, match="--engine-version"):
        read_version(text, "transformers", (5, 0), (5, 24))


def test_transformers_kept_k_and_v_of_every_head_up_to_5_14() -> None:
    model = attncalc.load("deepseek-v3")
    old = EngineOptions(version="5.14")
    # 61 layers, 128 heads of 128 + 64 and 128 values in bf16
    kept = model.cache(1000, engine="transformers", options=old)
    assert kept.bytes_total == 61 * 128 * (192 + 128) * 2 * 1000
    assert [r.bytes for r in kept.reasons] == [kept.bytes_total - 61 * 576 * 2 * 1000]
    assert model.cache(1000, engine="transformers", options=EngineOptions(version="5.15")).bytes_total == (
        61 * 576 * 2 * 1000
    )
    step = model.flops(1000, engine="transformers", options=old)
    assert {x.form for x in step.layers} == {"decompressed"}
    assert step.bytes_cache_read == kept.bytes_total


@pytest.mark.parametrize(
    ("pp", "layers", "extra", "sizes"),
    [
        ((16, 32), 48, "", (16, 32)),
        ((2,), 48, "", (24, 24)),
        ((1,), 5, "", (5,)),
        ((4,), 61, "last", (15, 15, 15, 16)),
        ((4,), 63, "last", (15, 16, 16, 16)),
        ((4,), 61, "before_last", (15, 15, 16, 15)),
        ((4,), 63, "before_last", (16, 16, 16, 15)),
    ],
)
def test_layers_are_shared_out_to_stages(pp: tuple[int, ...], layers: int, extra: str, sizes: tuple[int, ...]) -> None:
    assert stage_sizes(pp, layers, "engine", extra=extra) == sizes


@pytest.mark.parametrize(("pp", "match"), [((16, 31), "add up to 48"), ((49,), "at most 48"), ((5,), "no rule")])
def test_stages_that_do_not_fit_are_refused(pp: tuple[int, ...], match: str) -> None:
    with pytest.raises(AttncalcError, match=match):
        stage_sizes(pp, 48, "engine")


def test_the_largest_stage_decides(attncalc: Command) -> None:
    words = ("cache", "deepseek-v3", "-c", "1000", "-b", "3", "--pp", "31,30", "--json")
    record = attncalc(*words).record
    (row,) = record["results"]
    assert row["bytes_total"] == 31 * 576 * 2 * 1000 * 3
    assert [(s["layers"], s["bytes_total"]) for s in row["stages"]] == [
        (list(range(31)), 31 * 576 * 2 * 1000 * 3),
        (list(range(31, 61)), 30 * 576 * 2 * 1000 * 3),
    ]
    assert record["inputs"]["engine_options"] == {"pp": [31, 30]}
    assert any("31 layers" in note for note in record["notes"])


def test_mtp_layers_lie_on_the_last_stage() -> None:
    model = attncalc.load("deepseek-v3")
    kept = model.cache(1000, mtp=True, options=EngineOptions(pp=(30, 31)))
    assert kept.bytes_total == 32 * 576 * 2 * 1000


def test_a_stage_holds_what_its_layers_read() -> None:
    model = load(group("0"), group("1"), group("2", source=[0]), group("3", source=[1]))
    (every,) = stage_layers(range(4), (4,))
    assert [within(g, every) for g in model.groups] == list(model.groups)
    first, _ = stage_layers(range(4), (2, 2))
    assert [g and g.indices for g in (within(g, first) for g in model.groups)] == [(0,), (1,), None, None]
    with pytest.raises(AttncalcError, match="layer 2 reads the cache of a layer of its own stage, got layer 0"):
        pipeline((2,), model.groups, 4, "engine")


@pytest.mark.parametrize("name", [name for name in ENGINES if name != "tensorrt-llm"])  # which has no such model
@pytest.mark.parametrize(
    ("preset", "pp", "reader", "source"),
    [
        ("gemma-4-e2b", (17, 18), 17, 13),  # the last 20 of 35 layers read layers 13 and 14
        ("gemma-3n-e4b", (25, 10), 25, 18),  # the last 15 of 35 read layers 18 and 19
        ("gemma-3n-e4b", (2, 17, 16), 20, 18),  # the stage that holds most is not the one that reads
    ],
)
def test_no_stage_reads_the_cache_of_another(
    name: str, preset: str, pp: tuple[int, ...], reader: int, source: int
) -> None:
    model = attncalc.load(preset)
    refused = f"--pp: layer {reader} reads the cache of a layer of its own stage, got layer {source}"
    with pytest.raises(AttncalcError, match=refused):
        model.cache(1000, engine=name, options=EngineOptions(pp=pp))
    own = model.cache(1000, engine=name, options=EngineOptions(pp=(8, 27)))
    assert [len(stage.layers) for stage in own.stages] == [8, 27]


@pytest.mark.parametrize(
    ("preset", "tp", "notes"),
    [
        # Columns of the hidden state are whole on each GPU; those of 8 or 16 heads are divided.
        ("inkling", 2, ["in 66 layers of conv (0 to 65), conv_state is held 2 times over by the 2 GPUs"]),
        # 4 KV heads in the 9 full layers, 8 in the sliding ones
        (
            "mimo-v2-flash",
            8,
            [f"in 9 layers of gqa (0 to 47), {side} is held 2 times over by the 8 GPUs" for side in "kv"],
        ),
        # All of them
        ("deepseek-v3", 8, [f"{name} is held 8 times over by the 8 GPUs" for name in ("c_kv", "k_pe")]),
    ],
)
def test_copies_name_the_layers_that_have_them(preset: str, tp: int, notes: list[str]) -> None:
    assert list(attncalc.load(preset).cache(1000, tp=tp).replicated) == notes


def test_replicas_share_the_sequences(attncalc: Command) -> None:
    record = attncalc("cache", "llama-3.1-8b", "-c", "1000", "-b", "5", "--dp", "2", "--json").record
    (row,) = record["results"]
    assert row["bytes_total"] == 3 * 131_072 * 1000
    assert row["bytes_per_sequence"] == 131_072 * 1000
    assert any("3 of 5 sequences" in note for note in record["notes"])


def test_replicas_within_tp_are_none_on_gpus_of_their_own(attncalc: Command) -> None:
    """An engine without them shares the heads of all sequences: not half the sequences, as replicas would."""
    words = ("cache", "llama-3.1-8b", "-c", "1000", "-b", "4", "--tp", "4", "--engine", "all", "--json")
    record = attncalc(*words, "--dp", "2", "--dp-attention").record
    plain = attncalc(*words).record["results"]
    assert len(plain) == 5  # llamacpp splits no heads
    for row, without in zip(record["results"], plain, strict=True):
        if row["engine"] == "sglang":
            # 2 sequences with 8 / 2 heads, and a spare token
            assert row["bytes_total"] == 32 * 2 * 4 * 128 * 2 * (2 * 1000 + 1)
        else:
            assert row["bytes_total"] == without["bytes_total"]
    others = "logical, transformers, vllm, tensorrt-llm, llamacpp: no such option"
    assert f"--dp within --tp changes nothing in {others}" in record["notes"]
    assert f"--dp-attention changes nothing in {others}" in record["notes"]


def test_bytes_of_a_sequence_are_exact(attncalc: Command) -> None:
    """Three slots of 512 cells (1,000 in three, padded to 256); a sliding pool of four fifths of 7 * 1,001 tokens."""
    words = ("cache", "llama-3.1-8b", "--engine", "llamacpp", "-c", "1000", "--slots", "3", "--json")
    (row,) = attncalc(*words).record["results"]
    assert row["bytes_total"] == 3 * row["bytes_per_sequence"] == 3 * 512 * 131_072
    assert not any("replica" in note for note in attncalc(*words).record["notes"])
    shared = ("cache", "gpt-oss-20b", "--engine", "sglang", "-c", "1001", "-b", "7", "--json")
    (row,) = attncalc(*shared).record["results"]
    # 12 full layers of 7,007 tokens, 12 sliding ones of floor(5,605.6), K and V of 8 heads of 64
    held = 12 * (7007 + 5605) * 2048
    assert row["bytes_total"] - row["bytes_overhead"] == held
    assert held % 7
    assert row["bytes_per_sequence"] == f"{held}/7"


def test_all_puts_every_engine_side_by_side(attncalc: Command) -> None:
    record = attncalc("cache", "gpt-oss-20b", "-c", "8192", "--engine", "all", "--pp", "12,12", "--json").record
    assert [r["engine"] for r in record["results"]][:2] == ["logical", "transformers"]
    assert record["inputs"]["engines"] == list(ENGINES)


def test_a_refusal_is_a_note_of_all_and_an_error_alone(attncalc: Command) -> None:
    words = ("cache", "llama-3.1-8b", "--kv-dtype", "int8", "-c", "1000")
    record = attncalc(*words, "--engine", "all", "--json").record
    assert "transformers" not in [r["engine"] for r in record["results"]]
    assert sum("transformers keeps its cache in" in note for note in record["notes"]) == 1
    assert attncalc(*words, "--engine", "transformers").status == 2


def test_all_says_which_engines_lack_an_option(attncalc: Command) -> None:
    record = attncalc("cache", "deepseek-v3", "-c", "1000", "--engine", "all", "--dp", "2", "-b", "2", "--json").record
    assert sum("--dp changes nothing in" in note for note in record["notes"]) == 1


@pytest.mark.parametrize(
    ("words", "follows", "settings"),
    [
        (("llama-3.1-8b", "logical"), "the definitions", {"pp": [1], "dp": 1}),
        (("llama-3.1-8b", "logical", "--pp", "16,16"), "the definitions", {"pp": [16, 16], "dp": 1}),
        (("llama-3.1-8b", "transformers"), "transformers 5.24", {"version": "5.24", "pp": [1]}),
        (
            ("llama-3.1-8b", "tensorrt-llm"),
            "tensorrt-llm 1.0",
            {"block_size": 32, "draft_tokens": None, "pp": [1], "dp": 1},
        ),
        (
            ("llama-3.1-8b", "llamacpp"),
            "llama.cpp of 2026",
            {"version": "2026-11", "slots": None, "ubatch": 512, "kv_unified": False, "pp": [1]},
        ),
        (("gpt-oss-20b", "vllm"), "vllm 0.33", VLLM),
        (("kimi-k3", "vllm"), "vllm 0.33", VLLM | {"block_size": 5760}),
        (
            ("gpt-oss-20b", "vllm", "--engine-version", "0.20", "--draft-tokens", "0", "--no-hybrid-manager"),
            "vllm 0.33",
            VLLM | {"version": "0.20", "no_hybrid_manager": True, "draft_tokens": 0},
        ),
        (("gpt-oss-20b", "sglang"), "sglang 0.5.23", SGLANG),
        (("deepseek-v3.2", "sglang"), "sglang 0.5.23", SGLANG | {"block_size": 64, "swa_ratio": None}),
    ],
)
def test_json_spells_every_default_out(
    attncalc: Command, words: tuple[str, ...], follows: str, settings: dict[str, object]
) -> None:
    model, name, *rest = words
    for command in (("cache",), ("fit", "--memory", "40GB")):
        (row,) = attncalc(*command, model, "--engine", name, *rest, "-c", "1000", "--json").record["results"]
        assert row["follows"] == follows
        assert row["engine_options"] == settings


def test_bytes_of_one_of_several_replicas_say_so(attncalc: Command) -> None:
    whole, one = (attncalc("cache", "llama-3.1-8b", "-c", "4096", "-b", n, *more) for n, more in REPLICAS)
    assert whole.out.count("bytes of one replica") == 0
    assert "note: llama-3.1-8b, vllm: bytes of one replica, which holds 2 of the 8" in one.out
    assert "1.07 GB (1 GiB)" in whole.out
    assert "1.08 GB (1 GiB)" in one.out  # with the null block


REPLICAS = (("2", ()), ("8", ("--engine", "vllm", "--dp", "4")))


def test_every_engine_stands_beside_the_logical_cache(attncalc: Command) -> None:
    """Also where that is not asked for: kimi-k3 has 4,073,250,816 B, vLLM keeps 4,299,816,960 B."""
    made = attncalc("cache", "kimi-k3", "--engine", "vllm", "--engine", "llamacpp").out
    (vllm,) = (line for line in made.splitlines() if line.startswith("vllm") and "x" in line.split()[-1])
    assert vllm.split()[-1] == "1.06x"
