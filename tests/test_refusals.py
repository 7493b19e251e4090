"""What an engine does not run has neither a cache nor a step under it, and a version is one whose rules are known."""

from collections.abc import Callable

import pytest

import attncalc as package
from attncalc import AttncalcError
from attncalc.dtypes import Formats
from attncalc.engines import ENGINES
from attncalc.engines import engine as find_engine
from attncalc.engines.options import EngineOptions
from attncalc.presets import ids
from attncalc.workload import Conventions
from tests.conftest import Command


def refusal(compute: Callable[..., object], *arguments: object, **options: object) -> str | None:
    try:
        compute(*arguments, **options)
    except AttncalcError as error:
        return str(error)
    return None


SETTINGS = ((1, "bf16", 1), (8, "bf16", 100), (1, "fp8", 1), (1, "q4_0", 1))
"""GPUs, format of the cache, new tokens."""


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_a_step_is_refused_where_the_cache_is(engine: str) -> None:
    found = set[bool]()
    for preset in ids("models"):
        model = package.load(preset)
        for tp, kv, new in SETTINGS:
            formats, shared = Formats(kv=kv), {"tp": tp, "engine": engine}
            kept = refusal(model.cache, 100, formats=formats, **shared)
            assert refusal(model.flops, 100, new, conventions=Conventions(formats=formats), **shared) == kept, preset
            found.add(kept is None)
    assert found == {True, False}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("gpt-oss-20b", "--engine", "tensorrt-llm"), "not known how tensorrt-llm keeps"),
        (("rwkv7-goose-1.4b-pile", "--engine", "vllm"), "not known how vllm keeps"),
        (("jamba-v0.1", "--engine", "sglang"), "not known how sglang keeps"),
        (("deepseek-v3.2", "--engine", "llamacpp"), "not known how llamacpp keeps"),
        (("llama-3.1-8b", "--engine", "llamacpp", "--tp", "8"), "--tp: llamacpp divides layers"),
        (
            ("llama-3.1-8b", "--engine", "transformers", "--engine-version", "foo"),
            "transformers takes a version such as 5.",
        ),
        (
            ("llama-3.1-8b", "--engine", "vllm", "--engine-version", "foo"),
            "vllm takes a version such as 0.33, got 'foo'",
        ),
        (("llama-3.1-8b", "--engine", "llamacpp", "--engine-version", "foo"), "--engine-version: llamacpp takes"),
        (("llama-3.1-8b", "--engine", "llamacpp", "--engine-version", "2026-12"), "known from 2025-12 to 2026-11"),
        (("kimi-k3", "--engine", "vllm", "--engine-version", "0.11"), "vllm's rules for kda are known from 0.33"),
        (("deepseek-v4-flash", "--engine", "vllm", "--engine-version", "0.32"), "are known from 0.33"),
        (("deepseek-v3", "--engine", "vllm", "--engine-version", "0.11"), "rules for mla are known from 0.32"),
        (("qwen3-next-80b-a3b", "--engine", "vllm", "--engine-version", "0.18"), "rules for gdn are known from 0.19"),
        (("gemma-3-27b", "--engine", "vllm", "--engine-version", "0.19"), "side by side are known from 0.20"),
        (("llama-4-scout", "--engine", "vllm", "--engine-version", "0.32"), "are known from 0.33"),
        (("deepseek-v4-flash", "--engine", "transformers", "--engine-version", "5.0"), "are known from 5.24"),
        (("mimo-v2-flash", "--engine", "transformers", "--engine-version", "5.0"), "mimo_v2_flash are known from 5.24"),
        (("qwen3.5-27b", "--engine", "llamacpp", "--engine-version", "2026-01"), "for gdn are known from 2026-11"),
    ],
)
@pytest.mark.parametrize("command", ["cache", "flops"])
def test_both_commands_say_so(attncalc: Command, command: str, words: tuple[str, ...], says: str) -> None:
    made = attncalc(command, *words, "-c", "1000")
    assert (made.status, made.out) == (2, "")
    assert says in made.err


@pytest.mark.parametrize(
    ("preset", "engine", "version"),
    [
        ("gpt-oss-20b", "vllm", "0.11"),
        ("gemma-3-27b", "vllm", "0.20"),
        ("qwen3-next-80b-a3b", "vllm", "0.20"),
        ("deepseek-v3", "vllm", "0.32"),
        ("mistral-7b-v0.1", "transformers", "5.0"),
        ("deepseek-v4-flash", "transformers", "5.24.1"),
        ("gpt-oss-20b", "llamacpp", "2025-12"),
    ],
)
def test_rules_that_did_not_change_give_the_same_bytes(preset: str, engine: str, version: str) -> None:
    model = package.load(preset)
    old = model.cache(5000, engine=engine, options=EngineOptions(version=version))
    assert old.layers == model.cache(5000, engine=engine).layers


def test_one_version_is_of_one_engine(attncalc: Command) -> None:
    words = ("deepseek-v3", "-c", "1000", "--engine", "vllm", "--engine-version", "0.33")
    for command in ("cache", "flops", "fit"):
        memory = ("--memory", "1GB") if command == "fit" else ()
        made = attncalc(command, *words, *memory, "--engine", "llamacpp")
        assert (made.status, made.out) == (2, "")
        assert made.err.startswith("--engine-version: must be of one engine, and vllm and llamacpp each have their own")
    assert attncalc("cache", *words).status == 0


def test_a_refusal_of_flops_is_a_note_of_all(attncalc: Command) -> None:
    record = attncalc("flops", "gpt-oss-20b", "--engine", "all", "-c", "1000", "--json").record
    assert "tensorrt-llm" not in [r["engine"] for r in record["results"]]
    assert sum("not known how tensorrt-llm keeps" in note for note in record["notes"]) == 1


@pytest.mark.parametrize("options", [{"block_size": 16}, {"pp": (2,)}, {"dp": 2}, {"prefix_caching": True}])
def test_an_option_that_changes_no_step_is_refused(options: dict[str, object]) -> None:
    model = package.load("llama-3.1-8b")
    for engine in ENGINES:
        says = "nothing that flops counts" if set(options) <= set(find_engine(engine).options) else "no such option"
        with pytest.raises(AttncalcError, match=says):
            model.flops(100, engine=engine, options=EngineOptions(**options))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("preset", "formats", "says"),
    [
        ("llama-3.1-8b", {"state": "fp32"}, "--state-dtype: no layer of llama-3.1-8b keeps states"),
        ("deepseek-v3", {"index": "fp8"}, "--index-dtype: no layer of deepseek-v3 keeps index keys"),
        ("gpt-oss-20b", {"conv": "bf16"}, "--conv-dtype: no layer of gpt-oss-20b keeps columns"),
    ],
)
def test_a_format_of_what_no_layer_keeps_is_refused(preset: str, formats: dict[str, str], says: str) -> None:
    model = package.load(preset)
    wished = Formats(**formats)
    assert (refusal(model.cache, 100, formats=wished) or "").startswith(says)
    assert (refusal(model.flops, 100, conventions=Conventions(formats=wished)) or "").startswith(says)


@pytest.mark.parametrize(
    ("words", "idle"),
    [
        (
            "llama-3.1-8b --engine vllm --prefix-caching --no-hybrid-manager",
            ("--prefix-caching", "--no-hybrid-manager"),
        ),
        ("llama-3.1-8b --engine vllm --max-batched-tokens 4096 --draft-tokens 3 --engine-version 0.20", ("all",)),
        ("gpt-oss-20b --engine vllm --no-hybrid-manager --max-batched-tokens 512", ("--max-batched-tokens",)),
        ("gpt-oss-20b --engine vllm --max-batched-tokens 512", ()),
        ("qwen3.5-27b --engine vllm --prefix-caching --draft-tokens 2", ()),
        ("llama-3.1-8b --engine llamacpp --ubatch 2048", ("--ubatch",)),
        ("gpt-oss-20b --engine llamacpp --ubatch 2048", ()),
        ("llama-3.1-8b --engine vllm --block-size 16", ("--block-size",)),
        ("llama-3.1-8b --engine vllm --block-size 128", ()),
        ("deepseek-v3 --engine transformers --engine-version 5.14", ()),
        ("deepseek-v3 --engine transformers --engine-version 5.15", ("--engine-version",)),
        ("llama-3.1-8b --engine sglang --dp 2 --dp-attention --tp 2 -b 2", ()),
    ],
)
def test_an_option_that_changes_nothing_is_noted(attncalc: Command, words: str, idle: tuple[str, ...]) -> None:
    every = words.split()
    if idle == ("all",):
        idle = tuple(word for word in every[3:] if word.startswith("--"))
    made = attncalc("cache", *every, "-c", "5000", "--json").record
    expected = [f"{every[0]}, {every[2]}: {name} changes nothing here" for name in idle]
    found = [note for note in made["notes"] if "changes nothing here" in note]
    assert sorted(found) == sorted(expected)


def test_fit_and_flops_note_it_too(attncalc: Command) -> None:
    text = "llama-3.1-8b, vllm: {} changes nothing here"
    shared = ("llama-3.1-8b", "--engine", "vllm", "-c", "5000", "--json")
    fits = attncalc("fit", *shared, "--memory", "9GB", "--prefix-caching", "--engine-version", "0.20").record["notes"]
    assert [n for n in fits if "changes nothing" in n] == [text.format("--prefix-caching")]
    step = attncalc("flops", *shared, "--draft-tokens", "3", "--engine-version", "0.20").record["notes"]
    idle = [text.format(o) for o in ("--engine-version", "--draft-tokens")]
    assert [n for n in step if "changes nothing" in n] == idle
    chunk = attncalc("flops", "deepseek-v3", *shared[1:], "-q", "4", "--draft-tokens", "3").record["notes"]
    assert not [n for n in chunk if "changes nothing" in n]


def test_baselines_drop_formats_that_they_have_no_use_for(attncalc: Command) -> None:
    """A state of DeepSeek-V4's compressors is gone where its layers have K and V of heads."""
    words = ("cache", "deepseek-v4-flash", "--state-dtype", "fp32", "--index-dtype", "fp8", "-c", "1000", "--json")
    (row,) = attncalc(*words).record["results"]
    assert all(row["baselines"].values())
