"""Files that nobody should have to read: each is one line and 200 MB of memory, and no work to speak of.

The clock of the processor, which a busy machine does not stop, is read by a slow test alone, beside a bare start.
"""

import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from attncalc import presets
from attncalc.errors import AttncalcError
from tests.conftest import Command

SECONDS, MEGABYTES = 3.0, 200
"""A second of work, and room for slow processors: what is caught is work that grows beyond the file."""
LARGEST = presets.MAX_BYTES - 64
LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 100, "tie_word_embeddings": True,
    "max_position_embeddings": 64, "attention_bias": False, "mlp_bias": False,
}  # fmt: skip


def sparse(size: int) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        with path.open("wb") as file:
            file.truncate(size)

    return write


def holding(text: str) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        path.write_text(text, encoding="utf-8", newline="")

    return write


def gguf_of_strings(path: Path) -> None:
    """As many empty strings as a header may hold: the most work that one can make."""
    count = 2**21
    array = struct.pack("<IIQ", 9, 8, count) + bytes(8 * count)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"k" + array)


LARGE: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "100 MB": ("m.json", sparse(100_000_000), "must be at most 16 MiB, got 100000000 bytes"),
    "100 MB of YAML": ("m.yaml", sparse(100_000_000), "must be at most 16 MiB, got 100000000 bytes"),
    "nested lists": ("m.json", holding("[" * 2**18), "is not JSON, got too deep or too long"),
    "nested mappings": ("m.json", holding('{"a":' * 2**18), "is not JSON, got too deep or too long"),
    "many lists": ("m.json", holding("[" + "[]," * (LARGEST // 3) + "[]]"), "must have at most 262144 values"),
    "many fields": ("m.json", holding("{" + ",".join(f'"k{i}":{{}}' for i in range(2**17 - 1)) + "}"), "is missing"),
    "a long text": ("m.json", holding('{"model_type":"' + "x" * (LARGEST - 64) + '"}'), "no reader knows"),
    "a long name": ("m.json", holding('{"model_type":"llama","' + "x" * (LARGEST - 64) + '":1}'), "xxx"),
    "escapes": ("m.json", holding('{"model_type":"' + "\\u0007" * (LARGEST // 6 - 20) + '"}'), "no reader knows"),
    "a long number": ("m.json", holding('{"model_type":"llama","hidden_size":' + "9" * 10**6 + "}"), "is not JSON"),
    "YAML": ("m.yaml", holding("k: 1\n" * 2**17), "must be at most 512 KiB as YAML"),
    "many YAML values": ("m.yaml", holding("a: {" + "a," * 2**17 + "}"), "must have at most 100000 values as YAML"),
    "nested YAML": ("m.yaml", holding("[" * 2**18), "is not YAML"),
    "GGUF without a header": ("m.gguf", sparse(100_000_000_000), "does not begin with GGUF"),
    "GGUF of strings": ("m.gguf", gguf_of_strings, "general.architecture: is one that no reader knows"),
}


def read_in_a_process(path: Path) -> tuple[subprocess.CompletedProcess[str], float, float]:
    """What a command said of a file, the seconds of the processor and the megabytes that it took."""
    code = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from attncalc import presets\n"
        "from attncalc.cli import run\n"
        "start = time.process_time()\n"
        "status = run(sys.argv[1:])\n"
        # Not ru_maxrss, which a new program inherits from the one that started it.
        "lines = Path('/proc/self/status').read_text().splitlines() if sys.platform == 'linux' else []\n"
        "peak = next((int(line.split()[1]) for line in lines if line.startswith('VmHWM')), 0)\n"
        "print(status, time.process_time() - start, peak / 1000)\n"
    )
    words = [sys.executable, "-c", code, "cache", str(path)]
    made = subprocess.run(words, capture_output=True, text=True, check=True)
    status, seconds, megabytes = made.stdout.split()
    assert status == "2"
    return made, float(seconds), float(megabytes)


@pytest.mark.slow
@pytest.mark.parametrize("case", LARGE)
def test_size_and_depth(case: str, tmp_path: Path) -> None:
    name, write, line = LARGE[case]
    write(tmp_path / name)
    made, _, megabytes = read_in_a_process(tmp_path / name)
    assert len(made.stderr.splitlines()) == 1
    assert len(made.stderr) < 500
    assert line in made.stderr
    assert megabytes < MEGABYTES


@pytest.mark.slow
@pytest.mark.parametrize("case", LARGE)
def test_size_and_depth_take_no_time(case: str, tmp_path: Path) -> None:
    name, write, _ = LARGE[case]
    write(tmp_path / name)
    (tmp_path / "bare.json").write_text("{}")
    _, bare, _ = read_in_a_process(tmp_path / "bare.json")
    _, seconds, _ = read_in_a_process(tmp_path / name)
    assert seconds - bare < SECONDS


def refused(attncalc: Command, path: str | Path) -> str:
    made = attncalc("cache", "--model", str(path))
    assert (made.status, made.out) == (2, "")
    assert len(made.err.splitlines()) == 1
    return made.err


CONTENT = {
    "nothing": (b"", "is not JSON"),
    "no text": (bytes(range(128, 256)), "must be UTF-8 text, got byte 0 is not"),
    "UTF-16": (json.dumps(LLAMA).encode("utf-16"), "must be UTF-8 text, got byte 0 is not"),
    "UTF-16 without a mark": (json.dumps(LLAMA).encode("utf-16-le"), "is not JSON"),
    "UTF-32": (json.dumps(LLAMA).encode("utf-32-be"), "is not JSON"),
    "a list": (b"[]", "must be a mapping"),
    "a number": (b"7", "must be a mapping"),
    "null": (b"null", "must be a mapping"),
    "twice": (b'{"model_type":"llama","hidden_size":64,"hidden_size":128}', "a field is given twice, got hidden_size"),
    "twice, inside": (b'{"model_type":"llama","rope_scaling":{"factor":8,"factor":1}}', "a field is given twice"),
    "two values": (b"{}{}", "is not JSON"),
    "half": (json.dumps(LLAMA).encode()[:-10], "is not JSON"),
    "a comment": (b'{"model_type":"llama"} // mine', "is not JSON"),
    "a character of control": (b'{"model_type":"lla\x07ma"}', "is not JSON"),
    "a surrogate": (b'{"model_type":"\\ud800"}', "no reader knows"),
    "a line break in a name": (b'{"model_type":"llama","a\\nb":1}', "a\\nb"),
}


@pytest.mark.parametrize("case", CONTENT)
def test_content(attncalc: Command, case: str, tmp_path: Path) -> None:
    content, line = CONTENT[case]
    (tmp_path / "config.json").write_bytes(content)
    assert line in refused(attncalc, tmp_path)


def with_value(name: str, text: str) -> str:
    return json.dumps(LLAMA | {name: "HERE"}).replace('"HERE"', text)


@pytest.mark.parametrize(
    "value",
    ["NaN", "Infinity", "-Infinity", "1e400", "64.0", "6.4e1", "-64", "0", '"64"', "true", "[64]", "{}", "1" * 30],
)
@pytest.mark.parametrize("name", ["hidden_size", "num_hidden_layers", "num_key_value_heads", "head_dim", "vocab_size"])
def test_a_dimension_is_a_whole_number(attncalc: Command, name: str, value: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(with_value(name, value))
    assert f"{name}: must be" in refused(attncalc, tmp_path)


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity"])
def test_a_field_without_effect_may_hold_what_it_likes(value: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(with_value("initializer_range", value))
    assert presets.load(tmp_path).hidden_size == 64


def test_a_byte_order_mark_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"\xef\xbb\xbf" + json.dumps(LLAMA).encode())
    assert presets.load(tmp_path).hidden_size == 64
    (tmp_path / "config.json").write_bytes(b"\xef\xbb\xbf" * 2 + json.dumps(LLAMA).encode())
    with pytest.raises(AttncalcError, match="is not JSON"):
        presets.load(tmp_path)


def test_links_pipes_and_devices(attncalc: Command, tmp_path: Path) -> None:
    loop, gone, pipe = tmp_path / "loop.json", tmp_path / "gone.json", tmp_path / "pipe.json"
    loop.symlink_to(loop)
    gone.symlink_to(tmp_path / "nowhere")
    os.mkfifo(pipe)
    assert "link to nothing" in refused(attncalc, loop)
    assert "link to nothing" in refused(attncalc, gone)
    for path in (pipe, Path("/dev/zero"), Path("/dev/stdin")):
        assert "regular file" in refused(attncalc, path)
    for name in ("model.gguf", "model.yaml"):
        (tmp_path / name).symlink_to("/dev/zero")
        assert "is not a regular file" in refused(attncalc, tmp_path / name)


def test_folders(attncalc: Command, tmp_path: Path) -> None:
    assert "is a folder without a config.json" in refused(attncalc, tmp_path)
    (tmp_path / "config.json").symlink_to("/dev/zero")
    assert "is a folder without a config.json" in refused(attncalc, tmp_path)
    (tmp_path / "a.json").mkdir()
    (tmp_path / "a.gguf").mkdir()
    assert "is a folder without a config.json" in refused(attncalc, tmp_path / "a.json")
    refused(attncalc, tmp_path / "a.gguf")


def test_names(attncalc: Command, tmp_path: Path) -> None:
    for name in (
        "../models/llama-3.1-8b",
        "..",
        ".",
        "",
        "a\nb",
        "a\nb/c.json",
        "\x00",
        "x" * 10_000,
        "/" * 5000,
        "~/x.json",
    ):
        refused(attncalc, name)
    path = tmp_path / "a\nb"
    path.mkdir()
    (path / "config.json").write_text("{")
    assert "a\\nb" in refused(attncalc, path)
    (path / "config.json").write_text(json.dumps(LLAMA))
    assert "id: must be printable text, got 'a\\nb'" in refused(attncalc, path)


def test_a_file_that_may_not_be_read(attncalc: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    for name in ("m.json", "m.yaml", "m.gguf"):
        path = tmp_path / name
        path.write_text("{}")
        path.chmod(0)
        with monkeypatch.context() as patch:
            if os.access(path, os.R_OK):  # root may read everything
                patch.setattr(Path, "read_bytes", denied)
                patch.setattr(Path, "open", denied)
            assert "cannot be read, got Permission denied" in refused(attncalc, path)
