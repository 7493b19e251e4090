"""Published configurations with one field spoilt: refused, or read as the architecture's own code would.

Whatever is done to a field, the outcome is one of four: one line that refuses it; the same model, where the field has no
effect; the model of the default, where the architecture's own code has one and the field is listed as defaulted; and for
a flag turned round, which is no mistake, the model that the other value means. Never a traceback, never another model.
"""

import copy
import json
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from attncalc import presets
from attncalc.errors import AttncalcError
from attncalc.hf_config import READERS
from attncalc.model import Model

FOLDER = Path(__file__).parents[1] / "data" / "configs"
ABSURD: tuple[Any, ...] = (-1, 10**9, 10**12, 2**70, 1e308, float("inf"), float("nan"), "", {}, [[]], {"a": {}})
KINDS = ("drop", "misspell", "negate", "null", "string", "float", "list", "absurd")


@cache
def config(name: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return data


FILES = [p.stem for p in sorted(FOLDER.glob("*.json")) if config(p.stem).get("model_type", "") in ("", *READERS)]


@cache
def original(name: str) -> Model:
    return presets.build(config(name), "config.json", "x")


def paths(data: dict[str, Any], at: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in data.items():
        yield (*at, key)
        if isinstance(value, dict):
            yield from paths(value, (*at, key))


def misspelt(word: str, rng: random.Random) -> str:
    i = rng.randrange(len(word))
    return rng.choice((word[:i] + word[i + 1 :], word[:i] + word[i] + word[i:], word + "s", word[:i] + "x" + word[i:]))


def mutate(data: dict[str, Any], path: tuple[str, ...], kind: str, rng: random.Random) -> dict[str, Any]:
    """A copy with one field spoilt."""
    *outer, key = path
    made = copy.deepcopy(data)
    node = made
    for step in outer:
        node = node[step]
    old = node[key]
    if kind in ("drop", "misspell"):
        del node[key]
        if kind == "misspell":
            name = next(n for n in iter(lambda: misspelt(key, rng), None) if n not in node)
            node[name] = old
        return made
    if kind == "negate":
        node[key] = (not old) if isinstance(old, bool) else -old if isinstance(old, (int, float)) else not old
    elif kind == "null":
        node[key] = None
    elif kind == "string":
        node[key] = str(old)
    elif kind == "float":
        node[key] = float(old) if isinstance(old, (int, float)) else -0.5
    elif kind == "list":
        node[key] = [old]
    else:
        node[key] = rng.choice(ABSURD)
    return made


def outcome(name: str, path: tuple[str, ...], kind: str, seed: int) -> str:
    """What came of it, or an error that says what must not come of it."""
    data = mutate(config(name), path, kind, random.Random(seed))
    place, field = f"{name}: {'.'.join(path)} {kind} {seed}", ".".join(path)
    model, line = build(data)
    if model is None:
        assert "\n" not in line, place
        assert len(line) <= 400, place
        return "refused"
    before, after = listing(original(name)), listing(model)
    old = value_at(config(name), path)
    turned = kind == "negate" and type(old) is bool
    if replace(model, reading=None) == replace(original(name), reading=None):
        silent = any(before.get(".".join(path[: i + 1])) == "ignored" for i in range(len(path)))
        unread = field not in after or after[field] in ("ignored", "defaulted", "derived")
        equal = kind not in ("drop", "misspell") and value_at(data, path) == old
        assert silent or unread or equal or turned, place
        return "the same model"
    if turned:
        return "the other value of a flag"
    assert kind in ("drop", "misspell", "null"), place
    assert model.reading
    assert set(model.reading.defaulted) - set(defaulted(name)), f"{place}: no default is listed"
    return "the default, listed"


def defaulted(name: str) -> list[str]:
    reading = original(name).reading
    assert reading
    return reading.defaulted


def build(data: object) -> tuple[Model | None, str]:
    try:
        return presets.build(data, "config.json", "x"), ""
    except AttncalcError as error:
        return None, str(error)


def listing(model: Model) -> dict[str, str]:
    assert model.reading
    return {a.field: a.how for a in model.reading.log}


def value_at(data: Any, path: tuple[str, ...]) -> Any:
    for step in path:
        data = data[step]
    return data


def cases(number: int, seed: int) -> list[tuple[str, tuple[str, ...], str, int]]:
    rng = random.Random(seed)
    out = []
    for i in range(number):
        name = rng.choice(FILES)
        path = rng.choice([p for p in paths(config(name)) if p[0] not in ("vision_config", "audio_config")])
        out.append((name, path, rng.choice(KINDS), i))
    return out


def count(number: int, seed: int) -> Counter[str]:
    return Counter(outcome(*case) for case in cases(number, seed))


def test_a_sample_of_spoilt_configurations() -> None:
    seen = count(600, 1)
    assert sum(seen.values()) == 600
    assert set(seen) >= {"refused", "the same model", "the default, listed"}


@pytest.mark.slow
def test_ten_thousand_spoilt_configurations() -> None:
    seen = count(10_000, 2)
    assert sum(seen.values()) == 10_000
    assert seen["refused"] > 3_000
    assert seen["the default, listed"] > 100
