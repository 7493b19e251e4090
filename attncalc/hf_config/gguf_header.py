"""The header of a GGUF file: its key-value metadata, and the names and shapes of its tensors. No weight is read.

Layout, all little-endian: magic `GGUF`, version (u32), number of tensors and of keys (u64 each); for each key its name,
a value type (u32) and the value, strings as length (u64) and bytes, arrays as element type, length and elements; for
each tensor its name, number of axes (u32), axes (u64 each, the contiguous one first), storage type (u32), offset (u64).
Source: ggml `docs/gguf.md`, versions 2 and 3.
"""

import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from attncalc.errors import AttncalcError, shown
from attncalc.units import MAX_COUNT

MAGIC = b"GGUF"
MAX_HEADER = 64 * 2**20
MAX_KEYS = 2**14
MAX_TENSORS = 2**17
MAX_NAME = 2**16
MAX_STRINGS = 2**21
"""In all arrays together: a tokenizer of 262,144 tokens and 514,906 merges has 777,050."""
KEPT = 2**13
"""Arrays of numbers up to this length are kept: one entry for each layer is what a model needs."""

_NUMBERS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class Length:
    """An array of which only the length was read."""

    count: int

    def __repr__(self) -> str:
        return f"an array of {self.count}"


class Header(NamedTuple):
    """Metadata by key, and shapes by tensor name, the contiguous axis first."""

    fields: dict[str, Any]
    tensors: dict[str, tuple[int, ...]]


class _Reader:
    """Takes values from the first bytes of a file, and refuses to take what is not there."""

    def __init__(self, data: bytes, where: str, *, whole: bool) -> None:
        self.data, self.where, self.whole = data, where, whole
        self.at = self.strings = 0

    def short(self) -> AttncalcError:
        if self.whole:
            return AttncalcError(self.where, "ends within its header", got=f"{len(self.data)} bytes")
        return AttncalcError(self.where, f"must have a header of at most {MAX_HEADER // 2**20} MiB")

    def number(self, form: str) -> Any:
        try:
            (value,) = struct.unpack_from(form, self.data, self.at)
        except struct.error:
            raise self.short() from None
        self.at += struct.calcsize(form)
        return value

    def count(self, what: str, maximum: int) -> int:
        value: int = self.number("<Q")
        if value > maximum:
            raise AttncalcError(self.where, f"must have at most {maximum} {what}", got=value)
        return value

    def text(self, what: str, maximum: int = MAX_HEADER) -> str:
        size = self.count(f"bytes in {what}", maximum)
        raw = self.data[self.at : self.at + size]
        if len(raw) < size:
            raise self.short()
        self.at += size
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise AttncalcError(self.where, f"{what} must be UTF-8 text") from None

    def value(self, key: str) -> Any:
        kind = self.number("<I")
        if kind in _NUMBERS:
            return self.number(_NUMBERS[kind])
        if kind == _STRING:
            return self.text(f"the value of {shown(key)}")
        if kind == _ARRAY:
            return self.array(key)
        raise AttncalcError(self.where, f"the value of {shown(key)} must have a type from 0 to 12", got=kind)

    def array(self, key: str) -> Any:
        kind = self.number("<I")
        what = f"elements in {shown(key)}"
        if kind == _STRING:
            count = self.count(what, MAX_STRINGS)
            self.strings += count
            if self.strings > MAX_STRINGS:
                raise AttncalcError(self.where, f"must have at most {MAX_STRINGS} strings in its arrays")
            self.skip_strings(count)
            return Length(count)
        if kind not in _NUMBERS:
            rule = f"{shown(key)} must be an array of numbers or strings"
            raise AttncalcError(self.where, rule, got=f"type {kind}")
        form = _NUMBERS[kind]
        size = struct.calcsize(form)
        count = self.count(what, MAX_HEADER)
        if self.at + count * size > len(self.data):
            raise self.short()
        start, self.at = self.at, self.at + count * size
        if count > KEPT:
            return Length(count)
        return list(struct.unpack_from(f"<{count}{form[1]}", self.data, start))

    def skip_strings(self, count: int) -> None:
        data, at, end = self.data, self.at, len(self.data) - 8
        unpack = struct.Struct("<Q").unpack_from
        for _ in range(count):
            if at > end:
                raise self.short()
            at += 8 + unpack(data, at)[0]
        if at > len(data):
            raise self.short()
        self.at = at


def read_header(path: Path, where: str) -> Header:
    """The header of a GGUF file; at most `MAX_HEADER` bytes are read, however large the file is.

    Raises:
        AttncalcError: it is no GGUF of version 2 or 3, ends early, or has sizes that no model has.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        data = file.read(MAX_HEADER + 1)
    whole = len(data) <= MAX_HEADER
    if not data.startswith(MAGIC):
        raise AttncalcError(where, "is not a GGUF file: it does not begin with GGUF")
    r = _Reader(data[:MAX_HEADER], where, whole=whole)
    r.at = len(MAGIC)
    version = r.number("<I")
    if version not in (2, 3):
        rule = "is big-endian, which is not read" if version in (2 << 24, 3 << 24) else "must be of version 2 or 3"
        raise AttncalcError(where, rule, got=None if "big" in rule else version)
    tensors, keys = r.count("tensors", MAX_TENSORS), r.count("keys", MAX_KEYS)
    fields: dict[str, Any] = {}
    for _ in range(keys):
        key = r.text("a key", MAX_NAME)
        if key in fields:
            raise AttncalcError(where, "a key is given twice", got=shown(key))
        fields[key] = r.value(key)
    return Header(fields, _tensors(r, tensors))


def _tensors(r: _Reader, count: int) -> dict[str, tuple[int, ...]]:
    out: dict[str, tuple[int, ...]] = {}
    for _ in range(count):
        name = r.text("the name of a tensor", MAX_NAME)
        if name in out:
            raise AttncalcError(r.where, "a tensor is given twice", got=shown(name))
        axes = r.number("<I")
        if not 1 <= axes <= 4:
            raise AttncalcError(r.where, f"tensor {shown(name)} must have 1 to 4 axes", got=axes)
        shape = tuple(r.number("<Q") for _ in range(axes))
        if not 1 <= prod(shape) <= MAX_COUNT:
            raise AttncalcError(r.where, f"tensor {shown(name)} must have from 1 to 2^53 elements", got=shown(shape))
        r.number("<I")
        r.number("<Q")
        out[name] = shape
    return out
