"""How much of a head RoPE rotates, the only thing in its settings that changes a number."""

from typing import Literal

from attncalc.errors import AttncalcError, shown, suggestion
from attncalc.hf_config.config import Config
from attncalc.hf_config.ignored import without_effect

_PART = "partial_rotary_factor"
_MAPPINGS = ("rope_parameters", "rope_scaling")
_LAYERS = ("full_attention", "sliding_attention", "chunked_attention", "main", "compress")


Nesting = Literal["", "allowed", "alone", "required"]
"""Whether the settings are keyed by kind of layer. `alone`: where given they must be, and the class reads no factor
beside them. `required`: where given they must be, and it reads that too."""


def rotated(
    c: Config, head_dim: int, kind: str = "full_attention", *, part: float | None = None, nesting: Nesting = ""
) -> int:
    """Rotated values of a head in layers of this kind: int(head_dim * partial_rotary_factor), as the code has it.

    `part`: the architecture's own factor where none is given; None where it has none and all of a head is rotated.
    """
    for name in _MAPPINGS if nesting in ("alone", "required") else ():
        if not c.null(name) and (c.data[name] != {} or name == "rope_parameters"):
            given = c.inner(name, how="ignored")
            if given.null(kind) or given.data[kind] == {}:
                raise AttncalcError(given.path(kind), "must be given")
    factor = _stated(c, kind, part, nesting)
    if part is None and factor is not None and factor != 1:
        raise AttncalcError(c.path(_PART), "must be absent or 1 in this architecture", got=factor)
    if factor is None:
        factor = 1.0 if part is None else part
        if part is not None:
            nested = isinstance(c.data.get("rope_parameters"), dict) and kind in c.data["rope_parameters"]
            c.note(f"rope_parameters.{kind}.{_PART}" if nested else _PART, part, "defaulted")
    if not 0 < factor <= 1:
        raise AttncalcError(c.path(_PART), "must be above 0 and at most 1", got=factor)
    # A product of floats, cut, because the architectures' own code has that: 80 * 0.7 is 56 there, though the number
    # that stands for 0.7 is below it and the exact product would be cut to 55.
    return int(head_dim * factor)


def _stated(c: Config, kind: str, part: float | None, nesting: Nesting) -> float | None:
    """The factor in the mapping of the layers' kind, in the mapping for all, or beside it.

    The older rope_scaling replaces rope_parameters whole where it is not empty.
    """
    found = None
    for name in _MAPPINGS:
        if c.null(name):
            continue
        mapping = c.inner(name, how="ignored")
        factor = _of_kind(mapping, kind, nesting)
        if mapping.data and (factor is not None or nesting != "allowed"):
            found = factor
    if found is not None or nesting == "alone" or not c.has(_PART):
        c.null(_PART)
        c.ignore(_PART)
        return found
    if c.null(_PART):
        if part is not None:
            raise AttncalcError(c.path(_PART), "must not be null: the code then rotates all of a head, or fails")
        return None
    return c.number(_PART)


def _of_kind(mapping: Config, kind: str, nesting: Nesting) -> float | None:
    """The factor of the layers' kind in a mapping, or of the mapping for all."""
    kinds = [inner for inner in mapping.names() if inner in _LAYERS]
    if kinds and not nesting:
        raise AttncalcError(mapping.path(kinds[0]), "must not be given: this architecture has one setting for all")
    if kinds and kind not in kinds and "main" not in kinds:
        raise AttncalcError(mapping.path(kind), "is missing beside the settings of other layers")
    found = None
    for inner in kinds:
        factor = _of_mapping(mapping.inner(inner, how="ignored"))
        if inner == kind:
            found = factor
    factor = _of_mapping(mapping)
    return found if kinds else factor


def _of_mapping(mapping: Config) -> float | None:
    for name in mapping.names():
        if name == _PART or name in _LAYERS:
            continue
        if not without_effect(name, "rope"):
            hint = suggestion(name, (_PART,))
            raise AttncalcError(mapping.path(name), "is a field that the reader does not understand", hint=hint)
        value = mapping.data[name]
        if name in ("rope_type", "type") and not (isinstance(value, str) and value):
            raise AttncalcError(mapping.path(name), "must name a type of RoPE", got=shown(value))
        mapping.ignore(name)
    if mapping.has(_PART) and mapping.null(_PART):
        raise AttncalcError(mapping.path(_PART), "must not be null: the architecture's own code fails")
    return mapping.number(_PART) if mapping.has(_PART) else None


def only_types(c: Config, *known: str) -> None:
    """Refuse settings of RoPE of another type."""
    for name in _MAPPINGS:
        if not c.null(name):
            given = c.inner(name, how="ignored")
            kind = "rope_type" if given.has("rope_type") else "type"
            if given.has(kind):
                given.choice(kind, known)
