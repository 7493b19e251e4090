"""How much of a head RoPE rotates, the only thing in its settings that changes a number."""

from attncalc.errors import AttncalcError, suggestion
from attncalc.hf_config.config import Config
from attncalc.hf_config.ignored import without_effect

_PART = "partial_rotary_factor"
_LAYERS = ("full_attention", "sliding_attention", "chunked_attention", "main", "compress")


def rotated(
    c: Config, head_dim: int, kind: str = "full_attention", *, part: float | None = None, by_kind: bool = False
) -> int:
    """Rotated values of a head in layers of this kind: int(head_dim * partial_rotary_factor), as the code has it.

    `part`: the architecture's own factor where none is given; None where it has none and all of a head is rotated.
    `by_kind`: rope_parameters, where given, must have settings for this kind of layers.
    """
    if by_kind and not c.null("rope_parameters"):
        given = c.inner("rope_parameters", how="ignored")
        if given.null(kind) or given.data[kind] == {}:
            raise AttncalcError(given.path(kind), "must be given")
    factor = _stated(c, kind)
    if part is None and factor is not None and factor != 1:
        raise AttncalcError(c.path(_PART), "must be absent or 1 in this architecture", got=factor)
    if factor is None:
        factor = 1.0 if part is None else part
        if part is not None:
            nested = isinstance(c.data.get("rope_parameters"), dict) and kind in c.data["rope_parameters"]
            c.note(f"rope_parameters.{kind}.{_PART}" if nested else _PART, part, "defaulted")
    if not 0 < factor <= 1:
        raise AttncalcError(c.path(_PART), "must be above 0 and at most 1", got=factor)
    return int(head_dim * factor)


def _stated(c: Config, kind: str) -> float | None:
    """The factor in the mapping of the layers' kind, in the mapping for all, or beside it."""
    found = None
    for name in ("rope_parameters", "rope_scaling"):  # the second, older one prevails where it is not empty
        if c.null(name):
            continue
        mapping = c.inner(name, how="ignored")
        kinds = [inner for inner in mapping.names() if inner in _LAYERS]
        if kinds and kind not in kinds and "main" not in kinds:
            raise AttncalcError(mapping.path(kind), "is missing beside the settings of other layers")
        for inner in kinds:
            factor = _of_mapping(mapping.inner(inner, how="ignored"))
            if inner == kind and factor is not None:
                found = factor
        factor = _of_mapping(mapping)
        found = factor if factor is not None else found
    if found is not None or c.null(_PART):
        c.ignore(_PART)
        return found
    return c.number(_PART)


def _of_mapping(mapping: Config) -> float | None:
    for name in mapping.names():
        if name == _PART or name in _LAYERS:
            continue
        if not without_effect(name, "rope"):
            hint = suggestion(name, (_PART,))
            raise AttncalcError(mapping.path(name), "is a field that the reader does not understand", hint=hint)
        mapping.ignore(name)
    return None if mapping.null(_PART) else mapping.number(_PART)
