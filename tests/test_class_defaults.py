"""Every causal language model type of transformers with its default values: read exactly, or refused.

`data/class_defaults.json` has the configuration of each type, all fields written out, and what the model did with it on
the meta device: cache bytes at two contexts, parameters, FLOPs in its attention modules.
"""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from attncalc import presets
from attncalc.errors import AttncalcError
from attncalc.workload import Conventions

DATA = Path(__file__).parent / "data"
TYPES: dict[str, dict[str, Any]] = json.loads((DATA / "class_defaults.json").read_text(encoding="utf-8"))["types"]
RAN = [name for name, made in TYPES.items() if "runs" in made]
COUNTED_VARIANTS = {"mha", "gqa", "mqa", "mla"}
"""Attention whose FLOPs torch's counter sees whole: products alone."""
DENSE = Conventions(count="dense")


def differences(name: str, config: dict[str, Any]) -> list[str]:
    """What a reader makes of the configuration that transformers does not.

    Raises:
        AttncalcError: the reader refuses it.
    """
    made, model, out = TYPES[name], presets.build(config, "config.json", name), []

    def compare(what: str, ours: int, theirs: int) -> None:
        if ours != theirs:
            out.append(f"{name}: {what} {ours}, transformers {theirs}")

    compare("parameters", model.parameters(), made["parameters"])
    counted = made["flops_comparable"] and all(g.variant in COUNTED_VARIANTS for g in model.groups if g.attention)
    for run in made["runs"]:
        n = run["context"]
        compare(f"cache of {n}", model.cache(n, engine="transformers").bytes_total, run["cache_bytes"])
        for phase, new, context in (("prefill", n, n), ("decode", 1, n + 1)):
            theirs = run[f"{phase}_attention_flops"]
            if counted and theirs is not None:
                cost = model.flops(context=context, new_tokens=new, engine="transformers", conventions=DENSE)
                compare(f"FLOPs of {phase} {n}", cost.flops_attention, theirs)
    return out


def verdict(name: str, config: dict[str, Any]) -> str:
    """`exact`, or the line that refuses it; a difference fails."""
    try:
        wrong = differences(name, config)
    except AttncalcError as error:
        return str(error)
    assert not wrong, wrong
    return "exact"


@pytest.mark.parametrize("name", RAN[::8])
def test_a_type_is_exact_or_refused(name: str) -> None:
    assert verdict(name, TYPES[name]["config"])


@pytest.mark.slow
@pytest.mark.parametrize("name", RAN)
def test_every_type_is_exact_or_refused(name: str) -> None:
    assert verdict(name, TYPES[name]["config"])


@pytest.mark.slow
@pytest.mark.parametrize("name", RAN)
def test_a_type_alone_is_exact_or_refused(name: str) -> None:
    """A file as `save_pretrained` writes it: only what differs from the defaults."""
    decoder = {"is_decoder": True} if TYPES[name]["config"].get("is_decoder") else {}
    assert verdict(name, {"model_type": name} | decoder)


@pytest.mark.slow
def test_most_types_are_exact(capsys: pytest.CaptureFixture[str]) -> None:
    verdicts = {name: verdict(name, TYPES[name]["config"]) for name in RAN}
    refused = {name: line for name, line in verdicts.items() if line != "exact"}
    with capsys.disabled():
        print(f"\n{len(RAN) - len(refused)} of {len(TYPES)} types exact, {len(refused)} refused, rest cannot run:")
        print(*(f"  {name}: {line}" for name, line in refused.items()), sep="\n")
    assert len(RAN) - len(refused) >= 100


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma3", "deepseek_v3", "mamba", "jamba", "bert", "gpt_neo", "mllama"])
def test_what_is_stored_is_what_transformers_does(name: str) -> None:
    pytest.importorskip("transformers", reason="needs transformers")
    spec = importlib.util.spec_from_file_location("class_defaults", DATA / "class_defaults.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert json.loads(json.dumps(module.derive(name))) == TYPES[name]


def test_the_comparison_can_fail() -> None:
    wrong = TYPES["llama"]["config"] | {"num_key_value_heads": 8}
    assert len(differences("llama", wrong)) == 1 + 2 * 3
