"""A Hugging Face config.json becomes a preset document: one reader for each architecture, found by its model_type.

A reader asks for the fields that it uses, says which it may ignore, and knows what its architecture's code does where
one is absent or null. Everything else is refused. The registry is a literal table, imported on use.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from attncalc.hf_config.config import Access, Config, as_json
from attncalc.hf_config.quantization import agreed, declared_beside
from attncalc.hf_config.registry import READERS, facts, model_type, read_as

__all__ = ["READERS", "Access", "Reading", "facts", "read_config"]


class Reading(NamedTuple):
    """A preset document, the reader that built it, and every field that it read, derived, defaulted or ignored."""

    document: dict[str, Any]
    reader: str
    log: tuple[Access, ...]

    @property
    def defaulted(self) -> list[str]:
        """Fields that the file leaves out or has as null, with the values of the architecture's own code."""
        return [f"{a.field} = {as_json(a.value)}" for a in self.log if a.how in ("defaulted", "derived")]

    @property
    def defaulted_sizes(self) -> list[str]:
        """Those of them that are numbers of something, which a reader of results should see."""
        sizes = [a for a in self.log if a.how == "defaulted" and type(a.value) is int and a.value]
        return [f"{a.field} = {a.value}" for a in sizes]


def read_config(data: object, where: str, name: str, beside: tuple[object, str] | None = None) -> Reading:
    """The preset document of a configuration; `name` becomes its id.

    `beside`: the content and the place of an `hf_quant_config.json` in the same folder.

    Raises:
        AttncalcError: the architecture, a field or a value is not understood, or the two files contradict each other.
    """
    log: list[Access] = []
    kind = _reference(data) or model_type(Config(data, where, log=log))
    document = read_as(kind, data, where, log)
    stated = document["kv_cache_dtype"]
    if beside is not None:
        stated = agreed(stated, declared_beside(Config(*beside, log=log)))
    document["kv_cache_dtype"] = stated.format if stated else None
    module = f"attncalc.hf_config.{READERS[kind]}"
    source = {"where": f"config.json of {kind}, read by {module}", "date": "of the file", "status": "own"}
    return Reading({"id": name, "hf_id": None, "source": source, **document}, module, tuple(log))


def _reference(data: object) -> str | None:
    """Configurations of reference implementations have no model_type; they are known by their fields."""
    if not isinstance(data, Mapping) or "model_type" in data or not {"dim", "n_layers", "n_heads"} <= set(data):
        return None
    return "deepseek-inference" if "kv_lora_rank" in data else "mistral-inference"
