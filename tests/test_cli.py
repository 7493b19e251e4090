"""The command line: its contract in JSON, its formats, and every kind of bad input."""

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

import attncalc as package
from attncalc.presets import folder, ids
from tests.conftest import Command

V3 = yaml.safe_load((folder("models") / "deepseek-v3.yaml").read_text(encoding="utf-8"))


def test_cache_contract(attncalc: Command) -> None:
    made = attncalc("cache", "--model", "deepseek-v3", "--json")
    assert made.status == 0
    assert made.err == ""
    record = made.record
    assert (record["schema"], record["command"]) == (1, "cache")
    assert record["inputs"]["models"] == [{"given": "deepseek-v3", "model": "deepseek-v3", "found_by": "preset"}]
    assert (record["inputs"]["context"], record["inputs"]["batch"], record["inputs"]["tp"]) == (131072, 1, 1)
    (row,) = record["results"]
    assert row["bytes_total"] == 9210691584
    assert row["bytes_per_token"] == 70272
    assert row["bytes_per_sequence"] == 9210691584
    assert (row["bytes_overhead"], row["bytes_fixed"]) == (0, 0)
    assert row["elements_per_token"] == 61 * 576
    assert row["baselines"]["mha"]["bytes_total"] == 523986010112
    assert row["baselines"]["mha"]["elements_per_token_per_layer"] == 32768
    assert row["baselines"]["mha"]["ratio"] == 523986010112 / 9210691584
    first = row["layers"][0]
    assert first["indices"] == [0, 1, 2]
    assert [t["name"] for t in first["tensors"]] == ["c_kv", "k_pe"]
    assert first["tensors"][0]["shape"] == [1, 1, 131072, 512]
    assert sum(x["bytes"] for x in row["layers"]) == row["bytes_total"]


def test_tables_say_the_figures(attncalc: Command) -> None:
    text = attncalc("cache", "--model", "deepseek-v3").out
    for figure in ("576", "32,768", "70,272", "9.21 GB (8.58 GiB)", "524 GB", "56.9x"):
        assert figure in text
    assert "\x1b" not in text
    assert all(line == line.rstrip() for line in text.splitlines())


def test_width_of_tables(attncalc: Command) -> None:
    commands = (
        ("cache", "deepseek-v3"),
        ("compare", "mha", "gqa", "mqa", "mla"),
        ("compare", "gta", "gla", "mfa", "tpa"),
        ("flops", "gpt-oss-20b"),
        ("fit", "gpt-oss-20b", "deepseek-v3", "--device", "h200", "-b", "2"),
        ("models", "deepseek-v3"),
        ("variants",),
        ("devices",),
    )
    for command in commands:
        assert max(map(len, attncalc(*command).out.splitlines())) <= 80, command


def test_flops_contract(attncalc: Command) -> None:
    row = attncalc("flops", "deepseek-v3", "--json").record["results"][0]
    assert row["flops_total"] == row["flops_attention"] + row["flops_ffn"] + row["flops_head"]
    assert row["flops_head"] == 2 * 7168 * 129280
    assert row["phase"] == "decode"
    moved = sum(row[k] for k in ("bytes_weights", "bytes_cache_read", "bytes_cache_write", "bytes_activations"))
    assert row["intensity"] == row["flops_total"] / moved
    op = next(op for op in row["layers"][1]["ops"] if op["name"] == "score")
    assert op["expression"] == "b h t r, b s r -> b h t s"
    assert (op["m"], op["n"], op["k"], op["gemm_batch"]) == (128, 131072, 576, 1)
    assert op["axes"] == {"b": 1, "h": 128, "t": 1, "r": 576, "s": 131072}
    assert row["layers"][1]["flops"] == 58 * sum(op["flops"] for op in row["layers"][1]["ops"])
    assert row["layers"][0]["form"] == "absorbed"


def test_phase_sets_new_tokens_and_form(attncalc: Command) -> None:
    record = attncalc("flops", "deepseek-v3", "--phase", "prefill", "-c", "4k", "--json").record
    assert record["inputs"]["new_tokens"] == record["inputs"]["context"] == 4096
    assert record["results"][0]["layers"][0]["form"] == "decompressed"
    assert attncalc("flops", "deepseek-v3", "--phase", "decode", "-q", "2").status == 2


def test_logits_of_the_last_token(attncalc: Command) -> None:
    every = attncalc("flops", "gpt2", "-c", "64", "-q", "64", "-b", "2", "--json").record["results"][0]
    last = attncalc("flops", "gpt2", "-c", "64", "-q", "64", "-b", "2", "--logits", "last", "--json").record["results"][
        0
    ]
    assert every["flops_head"] == 64 * last["flops_head"] == 2 * 2 * 64 * 768 * 50257


def test_compare_contract(attncalc: Command) -> None:
    rows = attncalc("compare", "mha", "gqa", "mqa", "mla", "--json").record["results"]
    assert [(r["variant"], r["form"]) for r in rows] == [
        ("mha", "direct"),
        ("gqa", "direct"),
        ("mqa", "direct"),
        ("mla", "absorbed"),
        ("mla", "expanded"),
        ("mla", "decompressed"),
        ("mla", "merged"),
    ]
    assert [r["cache_elements_per_token_per_layer"] for r in rows[:4]] == [32768, 2048, 256, 576]
    assert [r["score_gemm"]["k"] for r in rows[:5]] == [128, 128, 128, 576, 192]
    assert rows[3]["parameters"] == 187107328
    assert rows[3]["expand_from_new_tokens"] == 171
    assert rows[3]["cache_ratio_to_mha"] == 32768 / 576


def test_compare_names_models_and_forms(attncalc: Command) -> None:
    rows = attncalc("compare", "mla:absorbed", "gpt-oss-20b", "deepseek-v3", "--json").record["results"]
    assert [r.get("model") for r in rows] == [None, "gpt-oss-20b", "gpt-oss-20b", *["deepseek-v3"] * 4]
    assert rows[1]["reach"] == "window 128"
    assert rows[1]["score_gemm"]["n"] == 128


def test_compare_takes_dimensions(attncalc: Command) -> None:
    toy = ("--heads", "2", "--head-dim", "2", "--kv-lora-rank", "2", "--qk-rope-head-dim", "0")
    record = attncalc("compare", "mha", "mqa", "mla:absorbed", *toy, "--json").record
    assert [r["cache_elements_per_token_per_layer"] for r in record["results"]] == [8, 4, 2]
    assert record["inputs"]["dimensions"]["hidden_size"] == 4
    like = attncalc("compare", "mha", "gqa", "--like", "llama-3.1-8b", "--json").record
    assert [r["cache_elements_per_token_per_layer"] for r in like["results"]] == [8192, 2048]


def test_compare_with_a_device_says_the_bound(attncalc: Command) -> None:
    rows = attncalc("compare", "mha", "mla:absorbed", "--device", "h100", "--json").record["results"]
    assert rows[0]["ridge"] == 989.4e12 / 3.35e12
    assert [r["bound"] for r in rows] == ["memory", "memory"]
    many = ("--new-tokens", "4", "--device", "h100", "--json")
    assert attncalc("compare", "mla:absorbed", *many).record["results"][0]["bound"] == "compute"


def test_explain_is_made_of_the_numbers(attncalc: Command) -> None:
    rows = attncalc("explain", "--model", "deepseek-v3", "--json").record["results"]
    ops = attncalc("flops", "deepseek-v3", "--json").record["results"][0]["layers"][0]["ops"]
    explained = {r["name"]: r["result"] for r in rows}
    attention = [op for op in ops if not op["name"].startswith("ffn")]
    assert len(attention) == 8
    for op in attention:
        assert explained[op["name"]] == op["flops"]
    assert explained["cache c_kv"] == 131072 * 512 * 2
    assert all(r["source"] for r in rows)
    assert sum(r["result"] for r in rows if r["unit"] == "parameters") == 187107328


@pytest.mark.parametrize(
    "name",
    [
        *("mha", "gqa", "mqa", "mla", "mla:expanded", "mla:merged", "mla-split"),
        *("gta", "gla", "gla:expanded", "mfa", "tpa", "tpa:expanded"),
    ],
)
def test_explained_formulas_evaluate_to_their_results(attncalc: Command, name: str) -> None:
    for row in attncalc("explain", name, "--context", "5000", "--new-tokens", "7", "--json").record["results"]:
        names = {f"v{i}": value for i, value in enumerate(row["symbols"].values())}
        formula = row["formula"]
        for i, label in sorted(enumerate(row["symbols"]), key=lambda x: -len(x[1])):
            formula = formula.replace(label, f"v{i}")
        assert eval(formula, {"__builtins__": {}}, names) == row["result"], row["name"]


def test_every_preset_in_one_list(attncalc: Command) -> None:
    record = attncalc("models", "--json").record
    assert [r["model"] for r in record["results"]] == ids("models")


def test_models_shows_sizes(attncalc: Command) -> None:
    (row,) = attncalc("models", "deepseek-v3", "--json").record["results"]
    assert row["parameters_total"] == 671026404352
    assert row["parameters_active"] == 37552282624
    assert row["parameters_attention"] == 61 * 187107328
    assert row["buffers_total"] == 14848
    assert sum(row["parameters_by_part"].values()) == row["parameters_total"]
    more = attncalc("models", "deepseek-v3", "--mtp", "--json").record["results"][0]
    assert more["parameters_total"] > row["parameters_total"]


def test_partial_totals_say_so(attncalc: Command, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(V3 | {"id": "mine", "partial": ["a gate", "a bias"]}), encoding="utf-8")
    for command in (("models",), ("flops", "-c", "1000")):
        record = attncalc(command[0], str(path), "deepseek-v3", *command[1:], "--json").record
        assert [r["partial"] for r in record["results"]] == [["a gate", "a bias"], []]
        assert [n for n in record["notes"] if "partial" in n] == ["mine: totals are partial: a gate; a bias"]
        assert "note: mine: totals are partial: a gate; a bias" in attncalc(command[0], str(path), *command[1:]).out
    assert "partial" not in attncalc("models", "deepseek-v3").out


@pytest.mark.parametrize("partial", ["a gate", [1], [""], ["a\nb"], {"a": "b"}, None])
def test_what_is_missing_must_be_texts(attncalc: Command, tmp_path: Path, partial: object) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(V3 | {"partial": partial}), encoding="utf-8")
    made = attncalc("models", str(path))
    assert (made.status, made.out) == (2, "")
    assert ": partial" in made.err


def test_models_by_hf_id_and_by_path(attncalc: Command, tmp_path: Path) -> None:
    assert attncalc("cache", "DeepSeek-AI/deepseek-v3", "--json").record["inputs"]["models"][0]["found_by"] == "hf_id"
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(V3 | {"id": "mine"}), encoding="utf-8")
    record = attncalc("cache", str(path), "--json").record
    assert record["inputs"]["models"] == [{"given": str(path), "model": "mine", "found_by": "path"}]
    assert record["results"][0]["bytes_total"] == 9210691584
    as_json = tmp_path / "mine.json"
    as_json.write_text(json.dumps(V3), encoding="utf-8")
    assert attncalc("cache", str(as_json), "--json").record["results"][0]["bytes_total"] == 9210691584


def test_variants_and_devices(attncalc: Command) -> None:
    assert {"mha", "gqa", "mqa", "mla", "mla-split", "gta", "gla", "mfa", "tpa"} <= {
        r["variant"] for r in attncalc("variants", "--json").record["results"]
    }
    devices = attncalc("devices", "--json").record["results"]
    assert {d["device"] for d in devices} >= {"h100", "h200"}
    called = [name for d in devices for name in (d["device"], *d["aliases"])]
    assert len(called) == len(set(called))
    for d in devices:
        rates = d["dense_flops_per_s"]
        assert rates["bf16"] == rates["fp16"] > rates["fp32"]
        assert rates.get("fp8", 2 * rates["bf16"]) == pytest.approx(2 * rates["bf16"], rel=0.02)


@pytest.mark.parametrize(
    ("given", "device"), [("a100", "a100-80gb"), ("A100", "a100-80gb"), ("H100-SXM", "h100"), ("b200", "b200")]
)
def test_a_device_has_other_names(attncalc: Command, given: str, device: str) -> None:
    """The plain names mean the SXM part, of A100 the one with 80 GB; `inputs` says which."""
    assert attncalc("compare", "mha", "--device", given, "--json").record["inputs"]["device"] == device


def test_csv_and_markdown_hold_the_rows(attncalc: Command) -> None:
    rows = list(csv.DictReader(io.StringIO(attncalc("cache", "deepseek-v3", "--format", "csv").out)))
    assert [r["stored_as"] for r in rows] == ["mla", "as mha", "as gqa-8", "as mqa"]
    assert rows[1]["bytes_total"] == "523986010112"
    lines = attncalc("compare", "gqa", "mla", "--format", "markdown").out.splitlines()
    assert len(lines) == 2 + 5
    assert {line.count("|") for line in lines} == {lines[0].count("|")}


def test_output_goes_to_a_file(attncalc: Command, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    made = attncalc("cache", "gpt2", "--json", "-o", str(path))
    assert (made.status, made.out) == (0, "")
    assert json.loads(path.read_text(encoding="utf-8"))["results"][0]["model"] == "gpt2"


def test_context_above_the_maximum_is_noted(attncalc: Command) -> None:
    record = attncalc("cache", "qwen3-32b", "-c", "128k", "--json").record
    assert record["results"][0]["bytes_total"] == 34359738368
    assert any("40,960" in note for note in record["notes"])
    assert attncalc("cache", "qwen3-32b", "--json").record["inputs"]["context"] == 40960


def test_declared_cache_dtype_is_taken_and_noted(attncalc: Command) -> None:
    record = attncalc("cache", "gemma-4-31b-nvfp4", "--json").record
    assert record["results"][0]["kv_dtype"] == "fp8"
    assert any("declares" in note for note in record["notes"])
    wide = attncalc("cache", "gemma-4-31b-nvfp4", "--kv-dtype", "bf16", "--json").record["results"][0]
    assert wide["bytes_total"] == 2 * record["results"][0]["bytes_total"]


def test_an_index_format_leaves_the_baselines_alone(attncalc: Command) -> None:
    plain = attncalc("cache", "deepseek-v3.2", "--json").record["results"][0]
    made = attncalc("cache", "deepseek-v3.2", "--index-dtype", "fp8", "--json").record["results"][0]
    assert made["bytes_total"] == 10_266_083_328 < plain["bytes_total"]
    for name in ("mha", "gqa-8", "mqa"):
        assert made["baselines"][name]["bytes_total"] == plain["baselines"][name]["bytes_total"]
    assert "index keys fp8" in attncalc("cache", "deepseek-v3.2", "--index-dtype", "fp8").out
    every = attncalc("cache", "qwen3.5-35b-a3b", "kimi-k3", "--engine", "all").out
    assert "convolution states bf16 or fp32" in " ".join(every.split())
    assert "[" not in every.rpartition("note: cache")[2].partition("note:")[0]
    assert attncalc("cache", "gpt2", "--index-dtype", "fp8").status == 2


def test_engines_side_by_side(attncalc: Command) -> None:
    made = attncalc("cache", "gpt-oss-20b", "--engine", "logical", "--engine", "transformers", "--json").record
    logical, kept = made["results"]
    assert (logical["engine"], kept["engine"]) == ("logical", "transformers")
    difference = kept["bytes_total"] - logical["bytes_total"]
    assert difference == -12 * 2048 == kept["reasons"][0]["bytes"]


def test_counts_with_units(attncalc: Command) -> None:
    totals = {
        text: attncalc("cache", "gpt2", "-c", text, "--json").record["results"][0]["context"]
        for text in ("1024", "1k", "1_024", "1,024", "1M")
    }
    assert totals == {"1024": 1024, "1k": 1024, "1_024": 1024, "1,024": 1024, "1M": 2**20}


def test_help_and_version(attncalc: Command) -> None:
    assert "cache" in attncalc().out
    assert attncalc("--help").status == 0
    assert attncalc("--version").out.startswith("attncalc ")
    for command in ("cache", "compare", "flops", "fit", "explain", "models", "variants", "devices", "convert"):
        assert attncalc(command, "--help").status == 0


BAD = [
    ("cache", "--model", "deepseek-v9000"),
    ("cache", "--model", "deepseekv3"),
    ("cache", "no/such"),
    ("cache", "./nothing.yaml"),
    ("cache",),
    ("cache", "gpt2", "no-such-one"),
    *(
        ("cache", "deepseek-v3", "--context", c)
        for c in ("0", "-1", "1.5", str(2**53 + 1), "1e6", "1.5k", "", "x", "1,2")
    ),
    *(("cache", "deepseek-v3", "--batch", c) for c in ("0", "-3", "2.0", "9" * 400)),
    *(("cache", "deepseek-v3", "--tp", c) for c in ("3", "0", "256", "-1", "two")),
    ("cache", "llama-3.1-8b", "--tp", "64"),
    ("cache", "deepseek-v3", "--kv-dtype", "fp9"),
    ("cache", "deepseek-v3", "--kv-dtype", "q8_0/q4_0"),
    ("cache", "llama-3.1-8b", "--kv-dtype", "fp8_ds_mla"),
    ("cache", "minicpm3-4b", "--kv-dtype", "fp8_ds_mla"),
    ("cache", "gpt2", "--kv-dtype", "q1_0"),
    ("cache", "gpt2", "--kv-dtype", "a/b/c"),
    ("cache", "gpt2", "--kv-dtype", ""),
    ("cache", "deepseek-v3", "--engine", "vlm"),
    ("cache", "deepseek-v3", "--engine", "transformers", "--kv-dtype", "fp8"),
    ("cache", "deepseek-v3", "--engine", "transformers", "--form", "absorbed"),
    ("cache", "deepseek-v3", "--form", "folded"),
    ("cache", "gpt2", "--form", "absorbed"),
    ("cache", "gpt2", "--mtp"),
    ("cache", "deepseek-v3", "--json", "--format", "csv"),
    ("cache", "deepseek-v3", "--format", "xml"),
    ("cache", "deepseek-v3", "--frobnicate"),
    ("cache", "deepseek-v3", "--context"),
    ("cache", "deepseek-v3", "-o", "/nonexistent/folder/file"),
    ("flops", "deepseek-v3", "--count", "half"),
    ("flops", "deepseek-v3", "--phase", "training"),
    ("flops", "deepseek-v3", "-c", "10", "-q", "11"),
    ("flops", "deepseek-v3", "--logits", "some"),
    ("flops", "deepseek-v3", "-c", "4096", "-q", "7", "--weight-dtype", "fp3"),
    ("compare",),
    ("compare", "mla:folded"),
    ("compare", "mqqa"),
    ("compare", "gqa", "--kv-heads", "7"),
    ("compare", "gqa", "--form", "absorbed"),
    ("compare", "gqa", "--device", "h1000"),
    ("compare", "gqa", "--device", "../models/gpt2"),
    ("compare", "mla", "--heads", "0"),
    ("compare", "gta", "--head-dim", "6"),
    ("compare", "gta", "--kv-heads", "7"),
    ("compare", "gla", "--heads", "7"),
    ("compare", "gla", "--tp", "3"),
    ("compare", "tpa:absorbed"),
    ("explain",),
    ("explain", "mla", "--model", "gpt2"),
    ("explain", "mlaa"),
    ("models", "nothing-like-this"),
    ("models", "--mtp"),
    ("frobnicate",),
    ("--frobnicate",),
]


@pytest.mark.parametrize("words", BAD, ids=lambda w: " ".join(w)[:60])
def test_bad_input_is_one_line_and_status_2(attncalc: Command, words: tuple[str, ...]) -> None:
    made = attncalc(*words)
    assert made.status == 2, made
    assert made.out == ""
    assert made.err.count("\n") == 1
    assert made.err.strip()
    assert "Traceback" not in made.err
    assert len(made.err) <= 420


def test_suggestions(attncalc: Command) -> None:
    assert "deepseek-v3" in attncalc("cache", "deepseekv3").err
    assert "'mla'" in attncalc("compare", "mlaa").err
    assert "fp8" in attncalc("cache", "gpt2", "--kv-dtype", "fp9").err


def damaged() -> list[tuple[str, Any]]:
    """Every field of a document dropped, misspelt, negated, turned into text, a boolean, null, a float or a list."""
    out: list[tuple[str, Any]] = []

    def walk(value: Any, path: tuple[Any, ...]) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                out.append((f"drop {path} {key}", (*path, key, "drop")))
                out.append((f"misspell {path} {key}", (*path, key, "misspell")))
                walk(inner, (*path, key))
        elif isinstance(value, list):
            for i, inner in enumerate(value):
                walk(inner, (*path, i))
        if path and not isinstance(value, (dict, list)):
            changes: tuple[Any, ...] = (-1, "text", True, 1.5, [], {}, -(10**30), 10**30)
            for change in changes:
                if isinstance(value, str) and isinstance(change, str):
                    continue
                if isinstance(value, bool) and isinstance(change, bool):
                    continue
                out.append((f"{path} = {change!r}", (*path, "set", change)))

    walk(V3, ())
    return [(name, how) for name, how in out if how[0] not in ("source", "notes") and name != "drop () notes"]


@pytest.mark.parametrize("how", [how for _, how in damaged()], ids=[name for name, _ in damaged()])
def test_damaged_preset_is_refused(tmp_path: Path, how: tuple[Any, ...]) -> None:
    data = json.loads(json.dumps(V3))
    path, change = (how[:-2], how[-1]) if how[-2] == "set" else (how[:-1], how[-1])
    node = data
    for step in path[:-1]:
        node = node[step]
    if change == "drop":
        del node[path[-1]]
    elif change == "misspell":
        node[path[-1] + "x"] = node.pop(path[-1])
    else:
        node[path[-1]] = change
    file = tmp_path / "damaged.json"
    file.write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(package.AttncalcError) as refusal:
        package.load(file)
    assert str(refusal.value).startswith(f"{file}: ")
    assert "\n" not in str(refusal.value)


def test_damaged_preset_on_the_command_line(attncalc: Command, tmp_path: Path) -> None:
    file = tmp_path / "damaged.json"
    file.write_text(json.dumps(V3 | {"hidden_size": "7168"}), encoding="utf-8")
    made = attncalc("cache", str(file))
    assert (made.status, made.out) == (2, "")
    assert made.err == f"{file}: hidden_size: must be a whole number, got '7168'\n"


FILES = {
    "bomb.yaml": b"a: &a [x, x]\nb: &b [*a, *a]\nc: &c [*b, *b]\n",
    "deep.yaml": b"[" * 5000,
    "deep.json": b"[" * 100_000,
    "binary.yaml": bytes(range(256)),
    "binary.json": b"\xff\xfe\x00\x01",
    "empty.yaml": b"",
    "empty.json": b"",
    "list.yaml": b"- 1\n",
    "text.yaml": b"just text",
    "tab.yaml": b"a:\n\t- b",
    "twice.yaml": b"id: a\nid: b\n",
    "twice.json": b'{"id": "a", "id": "b"}',
    "infinite.json": b'{"hidden_size": Infinity}',
    "nan.json": b'{"hidden_size": NaN}',
    "digits.json": b'{"hidden_size": ' + b"9" * 5000 + b"}",
    "digits.yaml": b"hidden_size: " + b"9" * 5000,
    "date.yaml": b"hidden_size: 2026-99-99",
    "tag.yaml": b"id: !!python/object/apply:os.system ['true']",
    "control.yaml": b"id: \x07",
    "model.gguf": b"GGUF\x03\x00\x00\x00",
    "hf.json": b'{"model_type": "llama-next", "hidden_size": 4096}',
    "keys.yaml": b"1: 2\n",
    "complex.yaml": b"? {a: b}\n: c\n",
}


@pytest.mark.parametrize("name", FILES)
def test_bad_files(attncalc: Command, tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(FILES[name])
    made = attncalc("cache", str(path))
    assert made.status == 2
    assert made.out == ""
    assert made.err.count("\n") == 1
    assert str(path) in made.err


def test_folder_without_config_and_large_file(attncalc: Command, tmp_path: Path) -> None:
    made = attncalc("cache", f"{tmp_path}/")
    assert made.status == 2
    assert "config.json" in made.err
    path = tmp_path / "large.yaml"
    with path.open("wb") as file:
        file.truncate(17 * 2**20)
    assert "16 MiB" in attncalc("cache", str(path)).err


def test_names_that_are_no_file_names(attncalc: Command) -> None:
    for name in (
        "a\x00b",
        "a\nb.yaml",
        "x" * 5000,
        "x" * 5000 + ".yaml",
        "../" * 40 + "etc/passwd",
        "~",
        ".",
        "/",
        "\x1b[31m",
    ):
        made = attncalc("cache", name)
        assert made.status == 2, name
        assert made.err.count("\n") == 1
        assert "\x1b" not in made.err


def test_a_closed_pipe_is_no_crash(program: Command) -> None:
    import subprocess
    import sys

    made = subprocess.run(
        f"{sys.executable} -m attncalc models --json | head -1", shell=True, capture_output=True, text=True, check=False
    )
    assert made.stdout.strip() == "{"
    assert made.stderr == ""


def test_as_a_program(program: Command) -> None:
    assert program("cache", "gpt2", "--json").record["results"][0]["bytes_total"] == 1024 * 36864
    assert program("cache", "nothing").status == 2


def test_a_hybrid_lends_the_dimensions_of_its_attention(attncalc: Command) -> None:
    record = attncalc("compare", "mha", "gqa", "--like", "nemotron-h-56b", "--json").record
    assert [r["cache_elements_per_token_per_layer"] for r in record["results"]] == [2 * 64 * 128, 2 * 8 * 128]
    # Of Mamba-2's fixed inner width only some hidden sizes are made.
    refused = attncalc("compare", "mamba2", "--hidden-size", "1000")
    assert refused.status == 2
    assert refused.err.startswith("--hidden-size: must be a multiple of 256")


def test_a_split_of_mamba2_repeats_its_groups(attncalc: Command) -> None:
    """16 GPUs of 16 heads x 64 and one of 8 groups: 16 x (1024 + 2 x 256) channels x 3 columns, 20,480 x 3 unsplit."""
    out = attncalc("cache", "nemotron-h-56b", "--tp", "16").out
    assert "conv_state takes 147,456 B on 16 GPUs, 122,880 B on one" in " ".join(out.split())
    assert "54 of 0-116" in out


@pytest.mark.parametrize(("phase", "core"), [("prefill", "chunk_value"), ("decode", "state_update")])
def test_transformers_runs_prompts_in_chunks(attncalc: Command, phase: str, core: str) -> None:
    for model in ("nemotron-h-56b", "kimi-linear-48b-a3b"):
        options = ("--engine", "transformers", "--context", "512", "--phase", phase, "--json")
        (result,) = attncalc("flops", model, *options).record["results"]
        names = {op["name"] for op in result["layers"][0]["ops"]}
        assert core in names
        assert ("chunk_value" in names) == (phase == "prefill")
