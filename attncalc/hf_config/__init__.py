"""A Hugging Face config.json becomes a preset document: one reader for each architecture, found by its model_type.

A reader asks for the fields that it uses, says which it may ignore, and knows what its architecture's code does where
one is absent or null. Everything else is refused. The registry is a literal table, imported on use.
"""

from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from attncalc.errors import AttncalcError, shown, suggestion
from attncalc.hf_config.config import NO_FACTS, Access, Config, Facts
from attncalc.hf_config.quantization import declared_format

Reader = Callable[[Config], dict[str, Any]]

READERS = {
    **dict.fromkeys(("cwm", "llama", "ministral3", "mistral", "olmo2", "olmo3", "phi3", "starcoder2"), "llama"),
}
"""model_type -> the module here whose `READERS` has it."""


class Reading(NamedTuple):
    """A preset document, the reader that built it, and every field that it read, derived, defaulted or ignored."""

    document: dict[str, Any]
    reader: str
    log: tuple[Access, ...]

    @property
    def defaulted(self) -> list[str]:
        """Fields that the file leaves out, with the values of the architecture's own code."""
        return [f"{a.field} = {a.value}" for a in self.log if a.how == "defaulted"]


def read_config(data: object, where: str, name: str) -> Reading:
    """The preset document of a configuration; `name` becomes its id.

    Raises:
        AttncalcError: the architecture, a field or a value is not understood.
    """
    log: list[Access] = []
    top = Config(data, where, log=log)
    kind = model_type(top)
    c = Config(data, where, facts(kind), log)
    c.ignore("model_type")
    declared = declared_format(c)
    document = read_as(kind, c)
    module = f"attncalc.hf_config.{READERS[kind]}"
    source = {"where": f"config.json of {kind}, read by {module}", "date": "of the file", "status": "own"}
    identity = {"id": name, "hf_id": None, "model_type": kind, "source": source}
    document = {**identity, **document}
    document["kv_cache_dtype"] = document["kv_cache_dtype"] or declared
    return Reading(document, module, tuple(log))


def read_as(kind: str, c: Config) -> dict[str, Any]:
    """The document of the mapping `c`, all of whose fields its reader understands."""
    _check_architectures(c)
    document = _reader(kind)(c)
    c.finish()
    return document


def model_type(c: Config) -> str:
    """The architecture of a mapping, of which there is a reader."""
    kind = c.value("model_type")
    if not isinstance(kind, str) or kind not in READERS:
        hint = suggestion(kind, READERS) if isinstance(kind, str) else ""
        raise AttncalcError(c.path("model_type"), "is an architecture that no reader knows", got=shown(kind), hint=hint)
    return kind


def _reader(kind: str) -> Reader:
    reader: Reader = import_module(f"attncalc.hf_config.{READERS[kind]}").READERS[kind]
    return reader


def _check_architectures(c: Config) -> None:
    """Refuse a model class that is not the whole decoder: classifiers and draft models have the same model_type."""
    if c.null("architectures") or not c.facts.architectures:
        return
    for name in c.listed("architectures"):
        if name not in c.facts.architectures:
            rule = f"is understood only as {' or '.join(c.facts.architectures)}"
            raise AttncalcError(c.path("architectures"), rule, got=shown(name))


def facts(kind: str) -> Facts:
    """What the architecture's own code says: of transformers, or of the module of its reader for other code."""
    own: Mapping[str, Facts] = getattr(import_module(f"attncalc.hf_config.{READERS[kind]}"), "FACTS", {})
    if kind in own:
        return own[kind]
    data = _published().get(kind)
    if data is None:
        return NO_FACTS
    return Facts(data["defaults"], frozenset(data["nullable"]), data["names"], tuple(data["architectures"]))


@cache
def _published() -> dict[str, Any]:
    import json

    text = (Path(__file__).parent / "defaults.json").read_text(encoding="utf-8")
    data: dict[str, Any] = json.loads(text)["architectures"]
    return data
