"""The README: its commands are run and their output compared, its Python is executed, its model file is read.

`python tests/test_readme.py` rewrites the output blocks.
"""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import attncalc as package
from attncalc.cli import app

README = Path(__file__).parent.parent / "README.md"
CONSOLE = re.compile(r"^```console\n\$ attncalc (.*)\n((?:.*\n)*?)```$", re.MULTILINE)


def output(arguments: str) -> str:
    words = [sys.executable, "-m", "attncalc", *shlex.split(arguments)]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout


def blocks() -> list[tuple[str, str]]:
    return CONSOLE.findall(README.read_text(encoding="utf-8"))


@pytest.mark.parametrize(("arguments", "expected"), blocks(), ids=[b[0] for b in blocks()])
def test_output_blocks_are_real(arguments: str, expected: str) -> None:
    assert expected.strip()
    assert output(arguments) == expected


def test_there_are_blocks() -> None:
    assert len(blocks()) >= 3


def test_python_block_runs() -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```$", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    namespace: dict[str, object] = {}
    lines = [line for line in code.splitlines() if line]
    exec("\n".join(lines[:2]), namespace)
    for line in lines[2:]:
        expression, _, comment = line.partition("  # ")
        value = eval(expression, namespace)
        assert value == eval(comment)


def test_the_names_of_the_api_are_exported() -> None:
    text = README.read_text(encoding="utf-8")
    section = text[text.index("\n## Python\n") : text.index("\n## JSON\n")]
    named = set(re.findall(r"\battncalc\.([A-Za-z]\w*)", section)) | set(re.findall(r"\b([A-Z]\w+)\(", section))
    assert {"load", "EngineOptions", "Formats", "Conventions", "AttncalcError"} <= named
    for name in named:
        assert name in package.__all__
    for name in package.__all__:
        assert getattr(package, name) is not None


def test_model_file_is_read(tmp_path: Path) -> None:
    (text,) = re.findall(r"^```yaml\n(.*?)^```$", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    model = package.load(yaml.safe_load(text))
    # 8 full layers of 576 elements, 24 windows of 2 x 8 x 128
    assert model.cache(10_000).bytes_total == 2 * (8 * 576 * 10_000 + 24 * 2048 * 4096)


def test_every_command_is_in_the_readme() -> None:
    text = README.read_text(encoding="utf-8")
    for command in app.registered_commands:
        assert command.callback
        assert f"`attncalc {command.callback.__name__}`" in text
        assert command.callback.__doc__
    table = re.findall(r"^\| `attncalc (\w+)` \|", text, re.MULTILINE)
    assert table == [c.callback.__name__ for c in app.registered_commands if c.callback], "the order of --help"


def rewrite() -> None:
    """Put the real output into every console block."""
    text = README.read_text(encoding="utf-8")
    README.write_text(
        CONSOLE.sub(lambda m: f"```console\n$ attncalc {m[1]}\n{output(m[1])}```", text), encoding="utf-8"
    )


if __name__ == "__main__":
    rewrite()
