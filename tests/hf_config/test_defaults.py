"""The extracted defaults are those of the installed transformers."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from attncalc import hf_config

HERE = Path(__file__).parent


def extractor() -> ModuleType:
    spec = importlib.util.spec_from_file_location("extract", HERE / "extract.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_defaults_are_those_of_the_classes() -> None:
    extract = extractor()
    text = (Path(hf_config.__file__).parent / "defaults.json").read_text(encoding="utf-8")
    assert text == extract.lines(extract.extract())


@pytest.mark.parametrize("model_type", hf_config.READERS)
def test_every_reader_is_where_the_registry_says(model_type: str) -> None:
    from importlib import import_module

    readers = import_module(f"attncalc.hf_config.{hf_config.READERS[model_type]}").READERS
    assert callable(readers[model_type])
    hf_config.facts(model_type)
