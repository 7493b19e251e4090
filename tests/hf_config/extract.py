"""Writes attncalc/hf_config/defaults.json: what the configuration classes of transformers say of absent and null fields.

    python tests/hf_config/extract.py > attncalc/hf_config/defaults.json

Facts alone: for each model_type that a reader knows, the defaults of its fields (those that change no number left out),
which of them may be null, their other names, and the model classes that they configure.
"""

import json
import sys
from dataclasses import MISSING, fields
from typing import Any

import transformers
from transformers import PreTrainedConfig
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from attncalc.hf_config import READERS
from attncalc.hf_config.ignored import without_effect

_BASE = {f.name for f in fields(PreTrainedConfig)}
_TASKS = (
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES",
)


def _plain(value: object) -> object:
    return json.loads(json.dumps(value))


def _nullable(cls: type, name: str) -> bool:
    """Whether the class takes null for the field: it checks types, and what it derives from a null must not fail."""
    try:
        made = cls(**{name: None})
    except Exception:  # noqa: BLE001 - whatever the class does with a null that it does not take
        return False
    return name != "num_key_value_heads" or getattr(made, name) is not None  # heads are divided by it


def architecture(model_type: str) -> dict[str, Any]:
    """The facts of one class."""
    cls = CONFIG_MAPPING[model_type]
    defaults, nullable = {}, []
    for f in fields(cls):
        name = cls.attribute_map.get(f.name, f.name)
        if f.name in _BASE or without_effect(name):
            continue
        value = f.default if f.default is not MISSING else None
        if f.default_factory is not MISSING:
            value = f.default_factory()
        try:
            defaults[name] = _plain(value)
        except TypeError:
            continue
        if _nullable(cls, f.name):
            nullable.append(name)
    names: dict[str, list[str]] = {}
    for other, own in cls.attribute_map.items():
        if not without_effect(own):
            names.setdefault(own, []).append(other)
    found: set[str] = set()
    for task in _TASKS:
        entry = getattr(modeling_auto, task, {}).get(model_type, ())
        found |= {entry} if isinstance(entry, str) else set(entry)
    return {
        "class": cls.__name__,
        "architectures": sorted(found),
        "names": names,
        "defaults": defaults,
        "nullable": nullable,
    }


def extract() -> dict[str, Any]:
    """The facts of all classes that the readers know and transformers has."""
    known = sorted(k for k in READERS if k in CONFIG_MAPPING)
    return {"source": f"transformers {transformers.__version__}", "architectures": {k: architecture(k) for k in known}}


def lines(data: dict[str, Any]) -> str:
    """One architecture on a line, so that a difference is one line."""
    rows = [f"    {json.dumps(k)}: {json.dumps(v)}" for k, v in data["architectures"].items()]
    return f'{{\n  "source": {json.dumps(data["source"])},\n  "architectures": {{\n' + ",\n".join(rows) + "\n  }\n}\n"


if __name__ == "__main__":
    sys.stdout.write(lines(extract()))
