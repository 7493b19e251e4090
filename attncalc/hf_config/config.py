"""One mapping of a config.json: access is typed, follows the defaults of the architecture's own code, and is logged.

What a key that is absent or null means is a fact of each architecture: its configuration class has a default for it,
or derives it from other fields, or fails. `Facts` holds the defaults; a reader states the derivations where it asks.
A field that nobody asked for and that is not known to be without effect is refused, so that no misspelt name passes.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

from attncalc.errors import AttncalcError, shown, suggestion
from attncalc.fields import Fields
from attncalc.hf_config.ignored import without_effect
from attncalc.units import MAX_COUNT

# Bounds that no published model comes near: a number above them is a mistake.
MAX_DIMENSION = 2**20
MAX_VOCABULARY = 2**24
MAX_POSITIONS = 2**27
MAX_SOFTCAP = 2**16

How = Literal["read", "defaulted", "derived", "ignored"]


class Access(NamedTuple):
    """A field, its value, and where that came from.

    `defaulted`: the file leaves it out or has null, and the architecture's own code has this value for it, null if it
    has none. `derived`: that code computes it from other fields. `ignored`: it stands there and changes no number.
    """

    field: str
    value: Any
    how: How


class Facts(NamedTuple):
    """What the configuration class of an architecture says.

    The defaults of its fields, which of them may be null, their other names, and the model classes that it configures.
    """

    defaults: Mapping[str, Any] = {}
    nullable: frozenset[str] = frozenset()
    names: Mapping[str, list[str]] = {}
    architectures: tuple[str, ...] = ()


NO_FACTS = Facts()


def as_json(value: object) -> str:
    """A value as the file has it: null, true, false."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


class Required:
    """No value: the field must be given."""


REQUIRED = Required()


class Config(Fields):
    """One mapping of a config.json, with the facts of its architecture and the log of what was read."""

    def __init__(
        self,
        data: object,
        where: str,
        facts: Facts = NO_FACTS,
        log: list[Access] | None = None,
        *,
        tie: bool | None = None,
    ) -> None:
        super().__init__(data, where)
        self.facts, self.log, self.tie = facts, [] if log is None else log, tie

    @property
    def data(self) -> Mapping[str, Any]:
        """The mapping itself."""
        return self._data

    def note(self, name: str, value: Any, how: How) -> None:
        """Keep what became of a field."""
        field = self.path(name).partition(": ")[2]
        access = Access(field, value, how)
        if access not in self.log:
            self.log.append(access)

    def has(self, name: str) -> bool:
        """Whether the field is given, be it null, by its own or another name."""
        return any(n in self._data for n in self._names(name))

    def declares(self, name: str) -> bool:
        """Whether the class of the architecture has the field."""
        return self._own(name) in self.facts.defaults

    def null(self, name: str) -> bool:
        """Whether the field is absent or null; it counts as asked for."""
        names = self._names(name)
        self._seen.update(names)
        if any(self._data.get(n) is not None for n in names):
            return False
        for given in (n for n in names if n in self._data):
            self.note(given, None, "defaulted")
        return True

    def _own(self, name: str) -> str:
        """The name that the class stores a field under."""
        return next((own for own, others in self.facts.names.items() if name in others), name)

    def _names(self, name: str) -> list[str]:
        own = self._own(name)
        return [own, *self.facts.names.get(own, ())]

    def value(self, name: str, *, absent: Any = REQUIRED, null: Any = REQUIRED) -> Any:
        """The field, untyped.

        `absent`: what the code takes where the key is missing, if not the default of the class. `null`: what it takes
        where the value, given or the default, is null.

        Raises:
            AttncalcError: it is missing and has no default, or null without a meaning, or two names disagree.
        """
        names = [n for n in self._names(name) if n in self._data]
        self._seen.update(self._names(name))
        name = own = self._own(name)
        if names:
            value, how = self._data[names[0]], "read"
            for other in names[1:]:
                if type(self._data[other]) is not type(value) or self._data[other] != value:
                    rule = f"is another name of {names[0]} and must equal it"
                    raise AttncalcError(self.path(other), rule, got=shown(self._data[other]))
            name = names[0]
        elif not isinstance(absent, Required):
            value, how = absent, "derived"
        elif name in self.facts.defaults:
            value, how = self.facts.defaults[name], "defaulted"
        else:
            unread = [k for k in self._data if k not in self._seen]
            raise AttncalcError(self.path(name), "is missing", hint=suggestion(name, unread))
        if value is None and how == "read" and own in self.facts.defaults and own not in self.facts.nullable:
            raise AttncalcError(self.path(name), "must not be null: the architecture's own code refuses it")
        if value is None:
            value, how = (None, "defaulted") if isinstance(null, Required) else (null, "derived")
        self.note(name, value, how)  # type: ignore[arg-type]
        return value

    def count(
        self,
        name: str,
        *,
        minimum: int = 1,
        maximum: int = MAX_DIMENSION,
        absent: int | Required | None = REQUIRED,
        null: int | Required = REQUIRED,
    ) -> int:
        """A whole number within bounds that no published model comes near."""
        value = self.value(name, absent=absent, null=null)
        return self.whole(name, value, minimum, maximum)

    def whole(self, name: str, value: object, minimum: int = 1, maximum: int = MAX_DIMENSION) -> int:
        """`value`, which stands in the field, if it is a whole number within bounds."""
        if not isinstance(value, int) or isinstance(value, bool):
            raise AttncalcError(self.path(name), "must be a whole number", got=shown(value))
        if not minimum <= value <= maximum:
            raise AttncalcError(self.path(name), f"must be from {minimum} to {maximum}", got=shown(value))
        return value

    def maybe(
        self,
        name: str,
        *,
        minimum: int = 1,
        maximum: int = MAX_DIMENSION,
        absent: int | Required | None = REQUIRED,
    ) -> int | None:
        """A whole number, or null where null means that the model has no such thing."""
        value = self.value(name, absent=absent)
        return None if value is None else self.whole(name, value, minimum, maximum)

    def flag(self, name: str, *, absent: bool | Required = REQUIRED, null: bool | Required = REQUIRED) -> bool:
        """True or false."""
        value = self.value(name, absent=absent, null=null)
        if not isinstance(value, bool):
            raise AttncalcError(self.path(name), "must be true or false", got=shown(value))
        return value

    def number(self, name: str, *, absent: Any = REQUIRED, null: Any = REQUIRED) -> float:
        """A finite number."""
        value = self.value(name, absent=absent, null=null)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not -MAX_COUNT <= value <= MAX_COUNT:
            raise AttncalcError(self.path(name), "must be a finite number", got=shown(value))
        return value

    def given_number(self, name: str) -> bool:
        """Whether a number is given where null means none, as a softcap."""
        if self.value(name) is None:
            return False
        if not 0 < self.number(name) <= MAX_SOFTCAP:
            rule = f"must be null, or above 0 and at most {MAX_SOFTCAP}"
            raise AttncalcError(self.path(name), rule, got=shown(self._data.get(name)))
        return True

    def choice(self, name: str, values: Iterable[str], *, absent: Any = REQUIRED, null: Any = REQUIRED) -> str:
        """One of these words."""
        value = self.value(name, absent=absent, null=null)
        known = list(values)
        if not isinstance(value, str) or value not in known:
            raise AttncalcError(self.path(name), f"must be one of {', '.join(known)}", got=shown(value))
        return value

    def listed(
        self, name: str, length: int | None = None, *, absent: Any = REQUIRED, null: Any = REQUIRED
    ) -> list[Any]:
        """A list, one entry for each layer where `length` is their number."""
        value = self.value(name, absent=absent, null=null)
        if not isinstance(value, list):
            raise AttncalcError(self.path(name), "must be a list", got=shown(value))
        if length is not None and len(value) != length:
            raise AttncalcError(self.path(name), f"must have {length} entries, one for each layer", got=len(value))
        return value

    def words(
        self, name: str, length: int, known: Iterable[str], *, absent: Any = REQUIRED, null: Any = REQUIRED
    ) -> list[str]:
        """A list of known words, one for each layer."""
        out, allowed = self.listed(name, length, absent=absent, null=null), tuple(known)
        for i, word in enumerate(out):
            if word not in allowed:
                raise AttncalcError(self.path(f"{name}[{i}]"), f"must be one of {', '.join(allowed)}", got=shown(word))
        return out

    def only(self, name: str, *values: Any) -> None:
        """Refuse another value: the reader does not know what it would change. Absent is the default or the first."""
        self._seen.update(self._names(name))
        if not self.has(name) and not self.declares(name):
            self.note(name, values[0], "defaulted")
            return
        value = self.value(name)
        if not any(type(value) is type(v) and value == v for v in values):
            words = " or ".join(
                "null" if v is None else str(v).lower() if isinstance(v, bool) else str(v) for v in values
            )
            raise AttncalcError(self.path(name), f"is understood only as {words}", got=shown(value))

    def inner(self, name: str, how: How | None = None) -> "Config":
        """A mapping inside this one; `how`: what became of it, if it was not simply read."""
        value = self.value(name) if how is None else self._data[name]
        made = Config(value, self.path(name), log=self.log)
        if how is not None:
            self._seen.add(name)
            self.note(name, value, how)
        return made

    def ignore(self, *names: str) -> None:
        """Fields that change nothing in this architecture, whatever they hold."""
        for name in names:
            if name in self._data and name not in self._seen:
                self._seen.add(name)
                self.note(name, self._data[name], "ignored")

    def finish(self) -> None:
        """Refuse every field that was not read and is not known to be without effect."""
        self.ignore(*(name for name in self._data if without_effect(name)))
        for name, value in self._data.items():
            if name not in self._seen:
                known = (self._seen | set(self.facts.defaults)) - set(self._data)
                raise AttncalcError(
                    self.path(name),
                    "is a field that the reader does not understand",
                    got=shown(value),
                    hint=suggestion(name, known),
                )
