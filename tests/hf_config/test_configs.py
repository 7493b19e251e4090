"""Published config.json files against the shipped presets and against what transformers builds, keeps and computes.

A file in `data/configs` bears the name of the preset of its model; `TWINS` are other files of the same model.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from attncalc import presets
from attncalc.dtypes import Formats
from attncalc.errors import AttncalcError
from attncalc.export import document_yaml
from attncalc.workload import Conventions

DATA = Path(__file__).parents[1] / "data"
FILES = {p.stem: p for p in sorted((DATA / "configs").glob("*.json"))}
TWINS = {
    "deepseek-v3-inference-671b": "deepseek-v3",
    "deepseek-v3.1-inference": "deepseek-v3.1",
    "deepseek-v3.2-exp-inference": "deepseek-v3.2-exp",
    "qwen3-next-80b-a3b-maxtext": "qwen3-next-80b-a3b",
}
# What a file states and its preset does not, or the reverse, and why.
DIFFERENCES: dict[str, dict[str, Any]] = {
    "olmo-3-7b": {"max_position_embeddings": 8192},  # other copies of the file have another number
    "gemma-3-4b": {"max_position_embeddings": 163_840},  # as the copy has it; the family is published with 131072
    "falcon-7b": {"max_position_embeddings": 2048},  # the default of the class: the file states none
    "falcon-40b": {"max_position_embeddings": 2048},
    # Reference implementations state neither positions nor layers of prediction.
    "deepseek-v3-inference-671b": {"max_position_embeddings": None, "mtp": None},
    "deepseek-v3.1-inference": {"max_position_embeddings": None, "mtp": None},
    "deepseek-v3.2-exp-inference": {"max_position_embeddings": None, "mtp": None},
}
_TRACED = json.loads((DATA / "traces.json").read_text(encoding="utf-8"))
TRACES: dict[str, dict[str, Any]] = _TRACED["models"] | _TRACED["configs"]


def config(name: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(FILES[name].read_text(encoding="utf-8"))
    return data


UNREAD = {"rwkv5-3b": "rwkv5"}
READ = [name for name in FILES if name not in UNREAD]
DENSE = Conventions(count="dense")


IDS = set(presets.ids("models"))


def shipped(name: str) -> str | None:
    """The preset of the model that a file configures."""
    preset = TWINS.get(name, name)
    return preset if preset in IDS else None


def traced(name: str) -> Any:
    """A file that equals a preset need not be traced in the fast run: the presets are."""
    return pytest.param(name, marks=[pytest.mark.slow] if shipped(name) else [])


@pytest.mark.parametrize("name", [n for n in READ if shipped(n)])
def test_a_reader_builds_the_shipped_preset(name: str) -> None:
    model, preset = presets.load(FILES[name]), presets.load(shipped(name) or "")
    differences = DIFFERENCES.get(name, {})
    assert all(getattr(preset, k) != v for k, v in differences.items())
    assert model == replace(preset, id=name, hf_id=None, **differences)


def test_every_file_is_read_but_those_of_unknown_architectures() -> None:
    for name, kind in UNREAD.items():
        with pytest.raises(AttncalcError, match=f"model_type: is an architecture that no reader knows, got '{kind}'"):
            presets.load(FILES[name])


@pytest.mark.parametrize("name", [traced(n) for n in READ if n in TRACES])
def test_numbers_equal_those_of_transformers_and_torch(name: str) -> None:
    model, trace = presets.load(FILES[name]), TRACES[name]
    assert trace["parameters"] in (None, model.parameters())
    for run in trace["runs"]:
        n = run["context"]
        assert model.cache(n, engine="transformers", formats=Formats()).bytes_total == run["cache_bytes"]
        if trace["flops_comparable"]:
            prompt = model.flops(n, n, engine="transformers", conventions=DENSE)
            step = model.flops(n + 1, 1, engine="transformers", conventions=DENSE)
            assert prompt.flops_attention == run["prefill_attention_flops"]
            assert step.flops_attention == run["decode_attention_flops"]


def test_text_alone_passes_by_the_layers_that_read_an_image() -> None:
    """Llama 3.2 Vision: 32 of 40 layers, which torch counts; parameters of all, and 8 more rows of the embedding."""
    model, (short, _) = presets.load(FILES["llama-3.2-11b-vision"]), TRACES["llama-3.2-11b-vision"]["runs"]
    assert model.parameters() == 9_775_192_080
    assert model.flops(64, 64, conventions=DENSE).flops_attention == short["prefill_attention_flops"]


@pytest.mark.parametrize("name", READ)
def test_an_exported_model_file_is_read_back_to_an_equal_model(name: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(document_yaml(presets.document(FILES[name])), encoding="utf-8")
    assert presets.load(file) == presets.load(FILES[name])


def test_a_folder_and_a_mapping_are_read_alike(tmp_path: Path) -> None:
    folder = tmp_path / "My Llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config("llama-3.1-8b")), encoding="utf-8")
    of_file, of_folder = presets.load(FILES["llama-3.1-8b"]), presets.load(folder)
    assert of_folder.id == presets.load(folder / "config.json").id == "My Llama"
    assert replace(of_folder, id=of_file.id) == of_file
    assert replace(presets.load(config("llama-3.1-8b")), id=of_file.id) == of_file
