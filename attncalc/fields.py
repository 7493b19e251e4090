"""Reading plain data with its path: every refusal names the field.

`Fields` reads one mapping; `read_spec` reads a dataclass from its own fields, so that there is no second list of names
to keep in step. Every field must be given: no dropped line can pass for a default.
"""

from collections.abc import Mapping
from dataclasses import fields
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin

from attncalc.errors import AttncalcError, shown, suggestion
from attncalc.units import MAX_COUNT

T = TypeVar("T")
COUNT_BITS = MAX_COUNT.bit_length() - 1


class Fields:
    """One mapping of a document: typed access, and a refusal of what nobody asked for."""

    def __init__(self, data: object, where: str) -> None:
        if not isinstance(data, Mapping):
            raise AttncalcError(where, "must be a mapping", got=shown(data))
        self._data, self.where, self._seen = data, where, set[str]()
        for key in data:
            if not isinstance(key, str):
                raise AttncalcError(where, "keys must be text", got=shown(key))

    def path(self, name: str) -> str:
        """Where a field stands, for messages."""
        return f"{self.where}{'.' if ': ' in self.where else ': '}{name}"

    def stated(self, name: str) -> bool:
        """Whether the field, which must be there, is not null."""
        return self._raw(name) is not None

    def is_text(self, name: str) -> bool:
        """Whether the field, which must be there, is text."""
        return isinstance(self._raw(name), str)

    def absent(self, name: str) -> bool:
        """Whether the field, which need not be there, is not."""
        return name not in self._data

    def _raw(self, name: str) -> object:
        self._seen.add(name)
        if name not in self._data:
            others = [k for k in self._data if k not in self._seen]
            near = suggestion(name, others).removeprefix("Did you mean ").removesuffix("?")
            hint = (
                f"{near} is no field here" if near else "Every field must be given; null, false, none or [] is for none"
            )
            raise AttncalcError(self.path(name), "is missing", hint=hint)
        return self._data[name]

    def get(self, name: str, kind: Any, bits: int = COUNT_BITS) -> Any:
        """The field as `kind`: int (up to 2^bits), bool, str, a Literal, or one of these or None."""
        return self._checked(name, self._raw(name), kind, bits)

    def _checked(self, name: str, value: object, kind: Any, bits: int) -> object:
        if get_origin(kind) is Literal:
            if value not in get_args(kind) or isinstance(value, bool):
                rule = f"must be one of {', '.join(map(str, get_args(kind)))}"
                raise AttncalcError(self.path(name), rule, got=shown(value))
            return value
        if isinstance(kind, UnionType):
            if value is None and NoneType in get_args(kind):
                return None
            (kind,) = (k for k in get_args(kind) if k is not NoneType)
        words = {int: "a whole number", bool: "true or false", str: "text"}
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise AttncalcError(self.path(name), f"must be {words[kind]}", got=shown(value))
        if isinstance(value, str) and not value.isprintable():
            raise AttncalcError(self.path(name), "must be printable text", got=shown(value))
        if kind is int and not 0 <= value <= 2**bits:
            raise AttncalcError(self.path(name), f"must be between 0 and 2^{bits}", got=shown(value))
        return value

    def names(self) -> tuple[str, ...]:
        """All field names."""
        return tuple(self._data)

    def text(self, name: str) -> str:
        """Text that is not empty."""
        value: str = self.get(name, str)
        if not value.strip():
            raise AttncalcError(self.path(name), "must not be empty", got=shown(value))
        return value

    def optional_text(self, name: str) -> str | None:
        """Text that is not empty, or null."""
        return self.text(name) if self.stated(name) else None

    def positive(self, name: str, bits: int = COUNT_BITS) -> int:
        """A whole number of at least 1."""
        value: int = self.get(name, int, bits)
        if value < 1:
            raise AttncalcError(self.path(name), "must be at least 1", got=value)
        return value

    def child(self, name: str) -> "Fields":
        """A mapping inside this one."""
        return Fields(self._raw(name), self.path(name))

    def items(self, name: str) -> list[object]:
        """A list inside this one."""
        value = self._raw(name)
        if not isinstance(value, list):
            raise AttncalcError(self.path(name), "must be a list", got=shown(value))
        return value

    def children(self, name: str) -> list["Fields"]:
        """A list of mappings."""
        return [Fields(item, f"{self.path(name)}[{i}]") for i, item in enumerate(self.items(name))]

    def finish(self) -> None:
        """Refuse fields that were not read."""
        for key in self._data:
            if key not in self._seen:
                known = sorted(self._seen - set(self._data)) or sorted(self._seen)
                raise AttncalcError(self.path(key), "is not a known field here", hint=suggestion(key, known))


def read_spec(cls: type[T], node: Fields, **given: Any) -> T:
    """An instance of the dataclass `cls` from the fields of `node` that are not `given`."""
    values = dict(given)
    for f in fields(cls):  # type: ignore[arg-type]
        if f.name not in given:
            values[f.name] = node.get(f.name, f.type)
    node.finish()
    try:
        return cls(**values)
    except AttncalcError as error:
        place = node.path(error.where) if error.where else node.where
        raise AttncalcError(place, error.rule, got=error.got, hint=error.hint) from None
