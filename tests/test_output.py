"""The edges of the program: where output goes, how text is read, and what is refused before anything is computed."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import attncalc as package
from attncalc import AttncalcError, units
from attncalc.dtypes import Formats
from attncalc.presets import read_document
from attncalc.workload import Conventions, Workload
from tests.conftest import Command
from tests.test_hand_counts import DOCUMENT

PROGRAM = [sys.executable, "-m", "attncalc"]
CACHE = ("cache", "gpt2", "--json")


def shell(words: tuple[str, ...], redirection: str) -> subprocess.CompletedProcess[str]:
    line = f'"$@" {redirection}'
    return subprocess.run(["sh", "-c", line, "sh", *PROGRAM, *words], capture_output=True, text=True, check=False)


# Where standard output goes.

full = pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")


@full
@pytest.mark.parametrize("form", ["table", "json", "csv", "markdown"])
def test_a_full_disk_is_one_line_and_status_2(form: str) -> None:
    made = shell(("cache", "gpt2", "--format", form), ">/dev/full")
    assert made.returncode == 2
    assert made.stderr.count("\n") == 1
    assert made.stderr.startswith("output: cannot be written")


@full
@pytest.mark.parametrize("word", ["--help", "--version"])
def test_a_full_disk_under_help_and_version(word: str) -> None:
    made = shell((word,), ">/dev/full")
    assert made.returncode == 2
    assert made.stderr.count("\n") == 1


def test_a_closed_standard_output_is_one_line_and_status_2() -> None:
    made = shell(CACHE, ">&-")
    assert made.returncode == 2
    assert made.stderr == "output: standard output is closed\n"


def test_a_closed_standard_error_changes_no_result() -> None:
    made = shell(CACHE, "2>&-")
    assert made.returncode == 0
    assert json.loads(made.stdout)["results"][0]["model"] == "gpt2"
    assert shell(("cache", "no-such"), "2>&-").returncode == 2


@pytest.mark.parametrize("form", ["table", "json", "csv", "markdown"])
def test_an_ascii_locale_gets_ascii(form: str) -> None:
    made = subprocess.run(
        [*PROGRAM, "cache", "gpt2", "--format", form],
        capture_output=True,
        check=False,
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
    )
    assert (made.returncode, made.stderr) == (0, b"")
    text = made.stdout.decode("ascii")
    # 2 * 12 heads * 64 * 12 layers * 2 B * 1,024 tokens
    assert "37748736" in text or "37.7 MB" in text
    assert "\\u" not in text  # lines of tables have an ASCII form, not an escaped one


def test_an_ascii_locale_gets_escaped_errors() -> None:
    made = subprocess.run(
        [*PROGRAM, "cache", "modèle"], capture_output=True, check=False, env=os.environ | {"PYTHONIOENCODING": "ascii"}
    )
    assert made.returncode == 2
    assert b"le'" in made.stderr
    assert made.stderr.isascii()
    assert made.stderr.count(b"\n") == 1


@pytest.mark.skipif(shutil.which("script") is None, reason="`script` is not installed")
@pytest.mark.parametrize("columns", ["0", "1", "30", "80"])
def test_a_terminal_of_any_width(columns: str) -> None:
    import shlex

    line = shlex.join([*PROGRAM, "cache", "gpt2"])
    made = subprocess.run(
        ["script", "-qec", line, "/dev/null"],
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
        env=os.environ | {"COLUMNS": columns, "TERM": "xterm"},
    )
    assert made.returncode == 0, made.stdout
    for figure in ("1,536 elements", "37.7 MB (36 MiB)", "36,864"):
        assert figure in made.stdout
    assert "Traceback" not in made.stdout


# Files.


def test_a_file_is_replaced_whole(attncalc: Command, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    path.write_text("old\n" * 100_000, encoding="utf-8")
    assert attncalc(*CACHE, "-o", str(path)).status == 0
    assert json.loads(path.read_text(encoding="utf-8"))["command"] == "cache"
    assert os.listdir(tmp_path) == ["out.json"]  # noqa: PTH208


def test_a_bad_command_leaves_the_file(attncalc: Command, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    path.write_text("old", encoding="utf-8")
    assert attncalc("cache", "gpt2", "--tp", "5", "-o", str(path)).status == 2
    assert path.read_text(encoding="utf-8") == "old"
    assert os.listdir(tmp_path) == ["out.json"]  # noqa: PTH208


@pytest.mark.parametrize("old", ["old", None])
def test_a_disk_that_fills_up_keeps_the_old_file(tmp_path: Path, old: str | None) -> None:
    """The write fails half-way: what was there stays, and nothing else appears."""
    path = tmp_path / "out.json"
    if old:
        path.write_text(old, encoding="utf-8")
    # files of at most 512 B
    line = ["sh", "-c", 'ulimit -f 1; exec "$@"', "sh", *PROGRAM, *CACHE, "-o", str(path)]
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    made = subprocess.run(line, capture_output=True, text=True, check=False, env=environment)
    assert (made.returncode, made.stdout) == (2, "")
    assert made.stderr.startswith("--output: cannot write")
    assert made.stderr.count("\n") == 1
    assert os.listdir(tmp_path) == (["out.json"] if old else [])  # noqa: PTH208
    assert not old or path.read_text(encoding="utf-8") == old


def test_a_replacement_that_fails_leaves_no_temporary_file(
    attncalc: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out.json"
    path.write_text("old", encoding="utf-8")

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "replace", refuse)
    monkeypatch.setattr(os, "replace", refuse)
    made = attncalc(*CACHE, "-o", str(path))
    monkeypatch.undo()
    assert (made.status, made.out) == (2, "")
    assert path.read_text(encoding="utf-8") == "old"
    assert os.listdir(tmp_path) == ["out.json"]  # noqa: PTH208


def test_a_folder_is_no_output(attncalc: Command, tmp_path: Path) -> None:
    made = attncalc(*CACHE, "-o", str(tmp_path))
    assert (made.status, made.out) == (2, "")
    assert os.listdir(tmp_path) == []  # noqa: PTH208


def test_a_device_is_written_to(attncalc: Command) -> None:
    made = attncalc(*CACHE, "-o", "/dev/null")
    assert (made.status, made.out, made.err) == (0, "", "")
    assert not Path("/dev/null").is_file()
    assert not list(Path("/dev").glob(".null*"))


# Reading: YAML 1.2, every key once, printable text.


def read(tmp_path: Path, text: str) -> object:
    path = tmp_path / "a.yaml"
    path.write_text(text, encoding="utf-8")
    return read_document(path)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("050257", "050257"),
        ("0o17", "0o17"),
        ("0x1F", "0x1F"),
        ("13:57", "13:57"),
        ("1_000", "1_000"),
        ("+5", "+5"),
        ("yes", "yes"),
        ("No", "No"),
        ("on", "on"),
        ("OFF", "OFF"),
        ("True", "True"),
        ("2026-11-30", "2026-11-30"),
        ("true", True),
        ("false", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("50257", 50257),
        ("-1", -1),
        ("0", 0),
        ("1.5", 1.5),
        ('"5"', "5"),
    ],
)
def test_scalars_are_those_of_yaml_1_2(tmp_path: Path, text: str, value: object) -> None:
    found = read(tmp_path, f"a: {text}\n")
    assert isinstance(found, dict)
    assert found == {"a": value}
    assert type(found["a"]) is type(value)


@pytest.mark.parametrize(
    "text",
    [
        "a: 1\nb: {c: 1, d: 2, c: 3}\n",
        "a: 1\na: 1\n",
        "a: 1\n'a': 2\n",
        "a: 1\n? a\n: 2\n",
        "- {a: 1, a: 1}\n",
        "a: &x {b: 1}\nc: *x\n",
        "a: &x {b: 1}\nc: {<<: *x}\n",
    ],
)
def test_repeated_keys_and_aliases_are_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(AttncalcError, match=r"given twice|aliases"):
        read(tmp_path, text)


@pytest.mark.parametrize("text", ["<<: {a: 1}\nb: 2\n", "!!merge <<: {a: 1}\nb: 2\n", "b: 2\n<<: [{a: 1}]\n"])
def test_nothing_is_merged(tmp_path: Path, text: str) -> None:
    try:
        found = read(tmp_path, text)
    except AttncalcError:
        return
    assert isinstance(found, dict)
    assert "a" not in found


@pytest.mark.parametrize("text", ["!!int '1:30'", "!!int 0b11", "!!int 1_0", "!!bool yes", "!!bool on"])
def test_a_tag_brings_no_yaml_1_1_back(tmp_path: Path, text: str) -> None:
    """None of these is such a value in YAML 1.2."""
    with pytest.raises(AttncalcError):
        read(tmp_path, f"a: {text}\n")


def test_a_tagged_number_is_decimal(tmp_path: Path) -> None:
    try:
        found = read(tmp_path, "a: !!int 010\n")
    except AttncalcError:
        return
    assert found == {"a": 10}


def as_yaml(tmp_path: Path, old: str, new: str) -> str:
    """gpt2's preset with one text replaced."""
    from attncalc.presets import folder

    text = (folder("models") / "gpt2.yaml").read_text(encoding="utf-8")
    assert text.count(old) == 1
    path = tmp_path / "mine.yaml"
    path.write_text(text.replace(old, new), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("old", "new", "field"),
    [
        ("vocab_size: 50257", "vocab_size: 050257", "vocab_size"),
        ("vocab_size: 50257", "vocab_size: 13:57", "vocab_size"),
        ("vocab_size: 50257", "vocab_size: 50257.0", "vocab_size"),
        ("vocab_size: 50257", "vocab_size: 5e4", "vocab_size"),
        ("tie_word_embeddings: true", "tie_word_embeddings: yes", "tie_word_embeddings"),
        ("tie_word_embeddings: true", "<<: {tie_word_embeddings: true}", "tie_word_embeddings"),
    ],
)
def test_yaml_1_1_values_are_refused_where_they_matter(
    attncalc: Command, tmp_path: Path, old: str, new: str, field: str
) -> None:
    assert attncalc("cache", as_yaml(tmp_path, old, old)).status == 0
    made = attncalc("cache", as_yaml(tmp_path, old, new))
    assert (made.status, made.out) == (2, "")
    assert made.err.count("\n") == 1
    assert field in made.err


def with_text(place: str, text: str) -> dict[str, Any]:
    document = json.loads(json.dumps(DOCUMENT))
    if place == "source":
        document["source"]["where"] = text
    elif place == "notes":
        document["notes"] = [text]
    else:
        document[place] = text
    assert isinstance(document, dict)
    return document


@pytest.mark.parametrize("place", ["id", "hf_id", "model_type", "source", "notes"])
@pytest.mark.parametrize("text", ["a\x07b", "a\nb", "\x1b[31m", "a\ud800", "a\u202eb", "a\x00", "a\u2028b", ""])
def test_text_that_no_terminal_should_see_is_refused(attncalc: Command, tmp_path: Path, place: str, text: str) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(with_text(place, "fine")), encoding="utf-8")
    assert attncalc("cache", str(path)).status == 0
    path.write_text(json.dumps(with_text(place, text)), encoding="utf-8")
    made = attncalc("cache", str(path), "--json")
    assert (made.status, made.out) == (2, "")
    assert made.err.count("\n") == 1
    assert place in made.err
    assert made.err[:-1].isprintable()


# Units.


@pytest.mark.parametrize(
    ("value", "decimal"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1_000, "1 kB"),
        (999_499, "999 kB"),
        (999_500, "1 MB"),
        (999_499_999, "999 MB"),
        (999_999_999, "1 GB"),
        (999_999_999_999, "1 TB"),
        (9_210_691_584, "9.21 GB"),
        (10**15, "1,000 TB"),
        (10**18, "1,000,000 TB"),
    ],
)
def test_decimal_units_are_chosen_after_rounding(value: int, decimal: str) -> None:
    assert units.decimal_bytes(value) == decimal


@pytest.mark.parametrize(
    ("value", "binary"),
    [
        (0, {"0 B"}),
        (1023, {"1,023 B"}),
        (1024, {"1 KiB"}),
        (1000 * 2**20, {"1,000 MiB"}),
        (1008 * 2**20, {"1,008 MiB"}),
        (2**30, {"1 GiB"}),
        # 1023.99 of a unit: four digits of it or one of the next
        (2**20 - 10, {"1,024 KiB", "1 MiB"}),
        (2**30 - 10_486, {"1,024 MiB", "1 GiB"}),
        (2**40 - 10_737_418, {"1,024 GiB", "1 TiB"}),
        (2**50, {"1,024 TiB", "1 PiB"}),
    ],
)
def test_binary_units(value: int, binary: set[str]) -> None:
    assert units.binary_bytes(value) in binary


def test_no_unit_has_an_exponent() -> None:
    for power in range(61):
        for value in (2**power - 1, 2**power, 2**power + 1, 10 ** (power // 3), 10 ** (power // 3) - 1):
            for text in (units.decimal_bytes(value), units.binary_bytes(value), units.flops_text(value)):
                assert "e" not in text.partition(" ")[0]
    assert units.flops_text(999) == "999 FLOP"
    assert units.flops_text(999_999_999) == "1 GFLOP"


# What is refused, and what is not.


@pytest.mark.parametrize(
    ("words", "where"),
    [
        (("explain", "mha", "--form", "junk"), "--form"),
        (("explain", "mla", "--form", ""), "--form"),
        (("explain", "mla:"), "variant"),
        (("explain", "mla:junk"), "--form"),
        (("explain", "--model", "gpt2", "--form", "absorbed"), "--form"),
        (("compare", "mha", "--kv-lora-rank", "512"), "--kv-lora-rank"),
        (("compare", "mla", "--kv-heads", "8"), "--kv-heads"),
        (("compare", "gpt2", "--heads", "8"), "--heads"),
        (("compare", "gpt2", "--like", "llama-3.1-8b"), "--like"),
        (("compare", "mla", "--device", ""), "--device"),
        (("compare", "mla", "--like", ""), "--model"),
        (("compare", "mla", "--form", ""), "--form"),
        (("compare", "mla:"), "variant"),
        (("compare", "mla", "mla:"), "variant"),
        (("compare", "mla-split", "--kv-lora-rank", "511"), "--kv-lora-rank"),
        (("flops", "deepseek-v3", "--form", ""), "--form"),
        (("cache", "deepseek-v3", "--form", ""), "--form"),
        (("cache", "deepseek-v3", "--engine", ""), "--engine"),
    ],
    ids=lambda x: " ".join(x)[:50] if isinstance(x, tuple) else "",
)
def test_what_is_refused(attncalc: Command, words: tuple[str, ...], where: str) -> None:
    made = attncalc(*words)
    assert (made.status, made.out) == (2, "")
    assert made.err.startswith(f"{where}: ")
    assert made.err.count("\n") == 1


def test_neighbours_of_what_is_refused(attncalc: Command) -> None:
    rows = attncalc("compare", "mla-split", "--kv-lora-rank", "510", "--json").record["results"]
    # two latents of 255
    assert {r["cache_elements_per_token_per_layer"] for r in rows if r["form"] != "decompressed"} == {510}
    assert attncalc("compare", "gqa", "--kv-heads", "4").status == 0
    assert attncalc("compare", "mla", "--kv-lora-rank", "511").status == 0


def test_explain_takes_a_form_after_a_colon(attncalc: Command) -> None:
    rows = attncalc("explain", "mla:decompressed", "-c", "100", "--json").record["results"]
    found = {r["name"]: r["result"] for r in rows}
    # K of 128 heads of 128 + 64, V of 128, 100 tokens in bf16
    assert found["cache k"] == 128 * 192 * 100 * 2
    assert found["cache v"] == 128 * 128 * 100 * 2
    assert "cache c_kv" not in found
    same = attncalc("explain", "mla", "--form", "decompressed", "-c", "100", "--json").record["results"]
    assert {r["name"]: r["result"] for r in same} == found


@pytest.mark.parametrize(
    ("call", "where"),
    [
        (lambda: Workload("128k"), "context"),  # type: ignore[arg-type]
        (lambda: Workload(1.0), "context"),  # type: ignore[arg-type]
        (lambda: Workload(context=True), "context"),
        (lambda: Workload(0), "context"),
        (lambda: Workload(10, 11), "new_tokens"),
        (lambda: Workload(10, 0), "new_tokens"),
        (lambda: Workload(10, 1, 0), "batch"),
        (lambda: Conventions(count="Dense"), "count"),  # type: ignore[arg-type]
        (lambda: Conventions(head_tokens="first"), "head_tokens"),
        (lambda: package.load("gpt2").cache(10, tp=0), "tp"),
        (lambda: package.load("gpt2").flops(10, tp=0), "tp"),
        (lambda: package.load("gpt2").cache(10, tp=-1), "tp"),
        (lambda: package.load("gpt2").cache(10, batch=0), "batch"),
        (lambda: package.load("gpt2").cache("10"), "context"),  # type: ignore[arg-type]
        (lambda: Formats(kv="bfloat16"), "--kv-dtype"),
        (lambda: Formats(kv=""), "--kv-dtype"),
        (lambda: Formats(activation="fp9"), "--activation-dtype"),
    ],
)
def test_what_the_api_refuses(call: Callable[[], object], where: str) -> None:
    with pytest.raises(AttncalcError) as caught:
        call()
    assert str(caught.value).startswith(f"{where}: ")
