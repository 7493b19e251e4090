"""The one kind of error that a user can cause, and how its line is built."""

from collections.abc import Iterable


class AttncalcError(ValueError):
    """Something that the user named is not understood or not possible.

    `str(error)` is one line: `where: rule, got value. hint`. The command line prints it and exits with 2;
    whatever else is raised is a bug of this program.
    """

    def __init__(self, where: str, rule: str, *, got: object = None, hint: str = "") -> None:
        self.where, self.rule, self.got, self.hint = where, rule, got, hint
        line = f"{where}: {rule}" if where else rule
        if got is not None:
            line += f", got {got}"
        if hint:
            line += f". {hint}"
        super().__init__(one_line(line))

    def at(self, where: str) -> "AttncalcError":
        """The same error with `where` put before its place."""
        place = f"{where}: {self.where}" if self.where else where
        return AttncalcError(place, self.rule, got=self.got, hint=self.hint)


def one_line(text: str, limit: int = 400) -> str:
    """`text` with control characters escaped and its middle cut, so that no input can break the line."""
    if len(text) > 4 * limit:
        text = text[: 2 * limit] + text[-2 * limit :]
    clean = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return clean if len(clean) <= limit else f"{clean[: limit - 60]} ... {clean[-50:]}"


def shown(value: object, limit: int = 60) -> str:
    """`value` as an error message quotes it: its repr, cut at `limit` characters."""
    if isinstance(value, (dict, list)):
        return f"a {type(value).__name__}"
    # Cut before anything is made of it: a file can hold one text of 16 MiB.
    text = repr(value[: limit + 1] if isinstance(value, (str, bytes)) else value)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def check_type(value: object, kind: type | tuple[type, ...], where: str, rule: str, hint: str = "") -> None:
    """Refuse a value of another type; a truth value is no number.

    Raises:
        AttncalcError: it has another type.
    """
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise AttncalcError(where, rule, got=shown(value), hint=hint)


def suggestion(word: str, known: Iterable[str], otherwise: str = "") -> str:
    """A hint that names the nearest known word, or `otherwise`."""
    from difflib import get_close_matches
    from itertools import islice

    near = get_close_matches(word[:100].lower(), list(islice(known, 5000)), n=1, cutoff=0.6)
    return f"Did you mean {near[0]!r}?" if near else otherwise
