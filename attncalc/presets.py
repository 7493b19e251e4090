"""Finding, parsing and building models and devices from files. yaml is imported here and in `export` alone."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from attncalc.errors import AttncalcError, check_type, shown, suggestion

if TYPE_CHECKING:
    from attncalc.device import Device
    from attncalc.model import Model

MAX_BYTES = 16 * 2**20
MAX_YAML = 2**19
"""Characters; and this many events: the parser takes seconds and gigabytes for what JSON holds in no time."""
MAX_EVENTS = 100_000
MAX_VALUES = 2**18
MAX_DEPTH = 24
SUFFIXES = (".json", ".yaml", ".yml", ".gguf")
_CACHED = re.compile(r"/models--(?P<org>[\w.-]+)--(?P<name>[\w.-]+)/snapshots/(?P<revision>[0-9a-f]{40})(/|$)")
"""Where the cache of Hugging Face keeps a file of `org/name` at a commit."""


def folder(kind: str) -> Path:
    """Where presets of a kind (`models`, `devices`) lie: inside the installed package, else beside it."""
    package = Path(__file__).parent
    inside = package / "presets" / kind
    return inside if inside.is_dir() else package.parent / "presets" / kind


def ids(kind: str) -> list[str]:
    """All preset ids of a kind, sorted; nothing is parsed."""
    return sorted(p.stem for p in folder(kind).glob("*.yaml"))


def find_model(name: str) -> tuple[Path, str]:
    """The file that `name` means, and which rule found it: path, preset, hf_id or hub.

    Raises:
        AttncalcError: nothing has that name, or the path cannot be read.
    """
    looks_like_path = "/" in name or "\\" in name or name.lower().endswith(SUFFIXES)
    if looks_like_path and _exists(name):
        return Path(name), "path"
    preset = folder("models") / f"{name.lower()}.yaml"
    if "/" not in name and "\x00" not in name and len(name) < 128 and preset.is_file():
        return preset, "preset"
    if name.count("/") == 1:
        for path in sorted(folder("models").glob("*.yaml")):
            if _hf_id(path) == name.lower():
                return path, "hf_id"
        from attncalc import hub

        if hub.is_id(name) and not name.lower().endswith(SUFFIXES):
            try:
                return hub.fetch(name), "hub"
            except AttncalcError as error:
                if _bare(name) not in ids("models"):
                    raise
                hint = ". ".join(filter(None, (error.hint, f"A preset is called {_bare(name)}")))
                raise AttncalcError(error.where, error.rule, got=error.got, hint=hint) from None
    from attncalc.attention import VARIANTS

    hint = suggestion(_bare(name), ids("models"), "`attncalc models` lists all")
    if name.partition(":")[0] in VARIANTS:
        hint = f"{name} is a variant: `attncalc compare {name}`"
    if not looks_like_path and _exists(name):
        hint = f"A file or folder here is named by ./{name}"
    rule = "no such file, preset or hf_id" if looks_like_path else "no such preset"
    raise AttncalcError("--model", rule, got=shown(name), hint=hint)


def _bare(name: str) -> str:
    """A model's name without its owner and what kind of checkpoint it is."""
    return re.sub(r"-(instruct|base|chat|it|hf|fp8|\d{4})\b", "", name.lower().rpartition("/")[2])


def _exists(name: str) -> bool:
    import os

    try:
        return os.path.lexists(name)  # a link to nothing, or to itself, is there and cannot be read
    except (OSError, ValueError):
        return False


def _hf_id(path: Path, *, as_written: bool = False) -> str:
    # A line of the file, not a parse of all files: `hf_id` stands on a line of its own in every preset.
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("hf_id:"):
            name = line.partition(":")[2].strip().strip("'\"")
            return name if as_written else name.lower()
    return ""


def load(model: str | Path | Mapping[str, Any]) -> "Model":
    """The model of a preset id, an `hf_id`, a path to a model file or a config.json, or either as a mapping.

    Raises:
        AttncalcError: it is not found, or a field of it is not understood.
    """
    if isinstance(model, Mapping):
        return build(model, "document", "document")
    check_type(model, (str, Path), "model", "must be an id, a path or a mapping")
    path = model if isinstance(model, Path) else find_model(model)[0]
    where = _name(path)
    if path.suffix.lower() != ".gguf":
        return build(read_document(path), where, _own_name(path), _beside(path))
    from attncalc.document import read_model
    from attncalc.hf_config.gguf import read_gguf

    with _refusing(where):
        _check_regular(path, where)
        reading = read_gguf(path, where, _own_name(path))
    return replace(read_model(reading.document, where), reading=reading)


def _beside(path: Path) -> tuple[object, str] | None:
    """What ModelOpt writes beside a config.json, and where it stands."""
    file = path / "config.json" if path.is_dir() else path
    beside = file.with_name("hf_quant_config.json")
    if file.name != "config.json" or not _exists(str(beside)):
        return None
    return read_document(beside), str(beside)


def build(data: object, where: str, name: str, beside: tuple[object, str] | None = None) -> "Model":
    """The model that a preset document describes, or a configuration, which has no id and takes `name`.

    `beside`: the content and the place of an `hf_quant_config.json` that belongs to the configuration.

    Raises:
        AttncalcError: a field is missing, unknown, of the wrong type, or contradicts another.
    """
    from attncalc.document import read_model

    # A preset document has layers and an id, and no configuration has either.
    if not isinstance(data, Mapping) or not data or {"layers", "id"} & set(data):
        return read_model(data, where)
    from attncalc.hf_config import read_config

    reading = read_config(data, where, name, beside)
    return replace(read_model(reading.document, where), reading=reading)


def configuration(name: str) -> tuple[dict[str, Any], str, Path]:
    """The fields of the config.json that `name` means, where they stand, and the file of the model.

    A preset has none of its own: that of the repository which it names is read, from the cache or over the network.

    Raises:
        AttncalcError: there is no config.json, or it cannot be had.
    """
    path, found_by = find_model(name)
    file = path
    if found_by in ("preset", "hf_id"):
        from attncalc import hub

        repository = _hf_id(path, as_written=True)
        if not hub.is_id(repository):
            raise AttncalcError(f"--model {name}", "is a preset of no repository", hint="Name its config.json")
        file = hub.fetch(repository, quantization=False)  # the preset says what is kept
    data = None if file.suffix.lower() == ".gguf" else read_document(file)
    if not isinstance(data, dict) or {"layers", "id"} & set(data):
        raise AttncalcError(_name(file), "is no config.json, which transformers needs")
    return data, _name(file), path


def document(path: Path) -> dict[str, Any]:
    """The preset document of a model file, or the one that a reader builds from a configuration.

    Raises:
        AttncalcError: the model is not understood.
    """
    reading = load(path).reading
    return reading.document if reading else dict(read_document(path))  # type: ignore[call-overload]


def _own_name(path: Path) -> str:
    """The name of a file, or of its folder where the file is a config.json."""
    file = path / "config.json" if path.is_dir() else path
    cached = _CACHED.search(file.as_posix())
    if cached:
        return cached["name"]
    return file.resolve().parent.name or file.stem if file.name == "config.json" else file.stem


def load_device(name: str) -> "Device":
    """The accelerator of a preset id or of another name that a preset states: `a100` is `a100-80gb`.

    Raises:
        AttncalcError: no such device; the nearest one is suggested.
    """
    from attncalc.device import read_device

    path = folder("devices") / f"{name.lower()}.yaml"
    if not name.replace("-", "").replace(".", "").isalnum() or not path.is_file():
        aliases = {alias: p for p in sorted(folder("devices").glob("*.yaml")) for alias in _aliases(p)}
        if name.lower() not in aliases:
            known = ids("devices")
            hint = suggestion(name, (*known, *aliases), f"Known: {', '.join(known)}")
            raise AttncalcError("--device", "no such device", got=shown(name), hint=hint)
        path = aliases[name.lower()]
    return read_device(read_document(path), _name(path))


def _aliases(path: Path) -> list[str]:
    # A line of the file, as with `hf_id`.
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("aliases:"):
            return [word.strip() for word in line.partition(":")[2].strip(" []").split(",") if word.strip()]
    return []


def revision(path: Path) -> str | None:
    """The commit that a file in the cache of Hugging Face is of."""
    cached = _CACHED.search(path.as_posix())
    return cached["revision"] if cached else None


def _name(path: Path) -> str:
    cached = _CACHED.search(path.as_posix())
    if cached:
        return f"{cached['org']}/{cached['name']}/{path.name}"
    return f"{path.parent.name}/{path.name}" if path.parent.parent.name == "presets" else str(path)


def read_document(path: Path) -> object:
    """The data in a YAML or JSON file.

    Raises:
        AttncalcError: it is too large, no text, no YAML or JSON, nested too deeply, or uses aliases.
    """
    where = _name(path)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise AttncalcError(where, "is a folder without a config.json")
        path = path / "config.json"
        where = str(path)
    with _refusing(where):
        size = _check_regular(path, where)
        if size > MAX_BYTES:
            raise AttncalcError(where, "must be at most 16 MiB", got=f"{size} bytes")
        # A byte order mark changes no value: editors that write one are no reason to refuse a file.
        text = path.read_bytes().decode("utf-8-sig")
    return _json(text, where) if path.suffix.lower() == ".json" else _yaml(text, where)


def _check_regular(path: Path, where: str) -> int:
    """The size of a file; a pipe or a device would never end."""
    if path.is_symlink() and not path.exists():
        raise AttncalcError(where, "is a link to nothing that exists")
    if not path.is_file():
        raise AttncalcError(where, "is not a regular file")
    return path.stat().st_size


@contextmanager
def _refusing(where: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise AttncalcError(where, "cannot be read", got=error.strerror or "an error") from None
    except UnicodeDecodeError as error:
        raise AttncalcError(where, "must be UTF-8 text", got=f"byte {error.start} is not") from None


def _json(text: str, where: str) -> object:
    import json

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        out: dict[str, object] = {}
        for key, value in pairs:
            if key in out:
                raise AttncalcError(where, "a field is given twice", got=key)
            out[key] = value
        return out

    # Before anything is built: 16 MiB of empty lists would take half a gigabyte.
    values = text.count(",") + text.count("[") + text.count("{")
    if values > MAX_VALUES:
        raise AttncalcError(where, f"must have at most {MAX_VALUES} values", got=f"about {values}")
    try:
        return json.loads(text, object_pairs_hook=unique)
    except AttncalcError:
        raise
    except (ValueError, RecursionError) as error:
        what = (
            f"line {error.lineno}: {error.msg}" if isinstance(error, json.JSONDecodeError) else "too deep or too long"
        )
        raise AttncalcError(where, "is not JSON", got=what) from None


def _yaml(text: str, where: str) -> object:
    import yaml

    if len(text) > MAX_YAML:
        rule = f"must be at most {MAX_YAML // 1024} KiB as YAML"
        raise AttncalcError(where, rule, got=f"{len(text)} characters", hint="JSON may be larger")
    loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    depth = events = 0
    try:
        # Events first: an alias bomb or deep nesting is refused before anything is built from it.
        for event in yaml.parse(text, Loader=loader):
            if isinstance(event, yaml.AliasEvent):
                raise AttncalcError(where, "aliases are not allowed", got=f"*{event.anchor}")
            events += 1
            if events > MAX_EVENTS:
                raise AttncalcError(where, f"must have at most {MAX_EVENTS} values as YAML", hint="JSON may have more")
            tag = getattr(event, "tag", None)
            if tag:
                raise AttncalcError(where, "tags are not allowed", got=tag)
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > MAX_DEPTH:
                raise AttncalcError(where, f"must not nest deeper than {MAX_DEPTH}")
        return yaml.load(text, Loader=_loader(loader, where))  # noqa: S506
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f"line {mark.line + 1}: " if mark else ""
        problem = getattr(error, "problem", None) or "a character that YAML does not allow"
        raise AttncalcError(where, "is not YAML", got=f"{line}{problem}") from None
    except (ValueError, RecursionError) as error:
        if isinstance(error, AttncalcError):
            raise
        raise AttncalcError(where, "is not YAML", got="a value out of range") from None


def _loader(base: Any, where: str) -> Any:
    class Loader(base):  # type: ignore[misc]
        """Plain data as YAML 1.2 reads it, with every key once.

        YAML 1.1 would read `050257` as an octal number, `13:57` in base 60, `yes` as true, and the last of two equal
        keys; here the first three stay text, which no number field accepts.
        """

        yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            seen = set[object]()
            for key, _ in node.value:
                name = key.value if isinstance(key.value, str) else id(key)
                if name in seen:
                    line = key.start_mark.line + 1
                    raise AttncalcError(f"{where}: line {line}", "a field is given twice", got=name)
                seen.add(name)
            return super().construct_mapping(node, deep)

    tags = (
        ("null", r"~|null|", ["~", "n", ""]),
        ("bool", r"true|false", list("tf")),
        ("int", r"-?(?:0|[1-9][0-9]*)", list("-0123456789")),
        ("float", r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|[-+]?\.inf|\.nan", list("-+.0123456789")),
    )
    for name, pattern, first in tags:
        Loader.add_implicit_resolver(f"tag:yaml.org,2002:{name}", re.compile(f"(?:{pattern})$"), first)
    return Loader
