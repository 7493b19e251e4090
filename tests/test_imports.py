"""Start-up: which modules a command loads. Modules are checked, not clocks."""

import subprocess
import sys
from pathlib import Path

import pytest

from attncalc.engines import ENGINES

HEAVY = ("torch", "pydantic", "transformers", "numpy")
JOBS = [
    (("--help",), (*HEAVY, "rich", "yaml", "attncalc.model", "attncalc.presets")),
    (("--version",), (*HEAVY, "rich", "yaml", "attncalc.model", "attncalc.presets")),
    (("cache", "--help"), (*HEAVY, "rich", "yaml", "attncalc.model", "attncalc.presets")),
    (("cache", "--model", "deepseek-v3", "--json"), (*HEAVY, "rich", "fractions", "decimal")),
    (("cache", "--model", "deepseek-v3", "--format", "csv"), (*HEAVY, "rich")),
    (("cache", "--model", "deepseek-v3"), HEAVY),
    (("cache", "deepseek-v3", "--engine", "all", "--json"), (*HEAVY, "rich")),
    (("flops", "deepseek-v3", "--json"), (*HEAVY, "rich")),
    (("fit", "deepseek-v3", "--device", "h200", "--json"), (*HEAVY, "rich")),
    (("compare", "mha", "gqa", "mla", "--json"), (*HEAVY, "rich", "yaml")),
    (("explain", "mla", "--json"), (*HEAVY, "rich", "yaml")),
    (("models", "deepseek-v3", "--json"), (*HEAVY, "rich")),
    (("variants", "--json"), (*HEAVY, "rich", "yaml")),
    (("devices", "--json"), (*HEAVY, "rich")),
]


def loaded(*words: str) -> set[str]:
    code = (
        "import sys\nfrom attncalc.cli import run\n"
        f"status = run({list(words)!r})\n"
        "print(*sys.modules, file=sys.stderr)\nsys.exit(status)"
    )
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(made.stderr.split())


OWN = ("attncalc.hf_config", "attncalc.flops", "attncalc.weights", "attncalc.device", "attncalc.compare")
SHARED = {"base", "layered", "logical", "options", "stages"}
"""Modules of `attncalc.engines` that every cache needs."""


@pytest.mark.parametrize("engine", ["logical", "vllm"])
def test_a_cache_loads_no_reader_no_flops_and_one_engine(engine: str) -> None:
    made = loaded("cache", "--model", "deepseek-v3", "--engine", engine, "--json")
    assert not {name for name in made if name.startswith(OWN)}
    others = {path for name, path in ENGINES.items() if name not in ("logical", engine)}
    assert not made & others
    if engine == "logical":
        folder = Path(__file__).parents[1] / "attncalc" / "engines"
        every = {path.stem for path in folder.glob("*.py")} - {"__init__"}
        assert len(every) > len(SHARED) + len(ENGINES) - 1
        assert not {f"attncalc.engines.{stem}" for stem in every - SHARED} & made


@pytest.mark.parametrize(("words", "banned"), JOBS, ids=lambda x: " ".join(x)[:40])
def test_a_command_loads_only_what_it_needs(words: tuple[str, ...], banned: tuple[str, ...]) -> None:
    assert not loaded(*words) & set(banned)


def test_the_check_can_fail() -> None:
    assert {"rich", "yaml", "attncalc.model"} <= loaded("cache", "--model", "deepseek-v3")
    every = loaded("cache", "--model", "deepseek-v3", "--engine", "all", "--json")
    assert set(ENGINES.values()) <= every
    config = Path(__file__).parent / "data" / "configs" / "llama-3.1-8b.json"
    assert {"attncalc.hf_config", "attncalc.flops"} <= loaded("flops", str(config), "--json")


def test_importing_the_package_imports_nothing() -> None:
    code = "import sys; import attncalc; print(*(m for m in sys.modules if m.startswith('attncalc')))"
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert made.stdout.split() == ["attncalc"]
