"""The public API: values of wrong types are refused in one line, as everything else that a user gets wrong."""

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest

import attncalc as package
from attncalc import AttncalcError, Conventions, EngineOptions, Formats
from attncalc.capacity import Memory, fit

MODEL = package.load("llama-3.1-8b")


def wrong(name: str, where: str, *values: object) -> list[tuple[str, object, str]]:
    return [(name, value, where) for value in values]


@pytest.mark.parametrize(
    ("name", "value", "where"),
    [
        *wrong("options", "options", {}, 3, "vllm", []),
        *wrong("engine", "engine", 3, None, ["vllm"], {}),
        *wrong("formats", "formats", "fp8", {}, 0),
        *wrong("tp", "tp", 1.5, None, (1,)),
        *wrong("batch", "batch", "x", 1.5),
        *wrong("context", "context", 10.0, "10"),
        *wrong("form", "--form", 3),
    ],
)
def test_a_wrong_argument_of_cache(name: str, value: object, where: str) -> None:
    check(MODEL.cache, {"context": 10} | {name: value}, where)


@pytest.mark.parametrize(
    ("name", "value", "where"),
    [
        *wrong("options", "options", {}, 3),
        *wrong("engine", "engine", 3),
        *wrong("conventions", "conventions", 3, {}, "dense"),
    ],
)
def test_a_wrong_argument_of_flops(name: str, value: object, where: str) -> None:
    check(MODEL.flops, {"context": 10, name: value}, where)


@pytest.mark.parametrize(
    ("name", "value", "where"),
    [
        *wrong("pp", "--pp", 1.5, 2, "2", (1.5,), ("2",), (True,), ()),
        *wrong("swa_ratio", "--swa-ratio", "0.8", 0.8, 2, Fraction(-1, 2)),
        *wrong("version", "--engine-version", 5.14),
        *wrong("block_size", "--block-size", "16", 1.0, []),
        *wrong("prefix_caching", "--prefix-caching", "yes", 1),
    ],
)
def test_a_wrong_option_of_an_engine(name: str, value: object, where: str) -> None:
    check(EngineOptions, {name: value}, where)


@pytest.mark.parametrize("name", ["tp", "batch", "context"])
def test_a_truth_value_is_no_number(name: str) -> None:
    check(MODEL.cache, {"context": 10} | {name: True}, name)
    check(EngineOptions, {"block_size": True}, "--block-size")
    check(EngineOptions, {"swa_ratio": True}, "--swa-ratio")


@pytest.mark.parametrize("kind", ["kv", "weight", "activation", "state", "conv", "index"])
def test_a_wrong_format(kind: str) -> None:
    check(Formats, {kind: 3}, f"--{kind}-dtype")


@pytest.mark.parametrize(("name", "value"), [("formats", "fp8"), ("count", 3), ("head_tokens", None), ("mtp", "yes")])
def test_a_wrong_convention(name: str, value: object) -> None:
    check(Conventions, {name: value}, name)


@pytest.mark.parametrize(
    ("given", "where"),
    [
        ({}, "memory"),
        ({"cache": 1, "total": 2}, "memory"),
        ({"cache": "8GiB"}, "memory cache"),
        ({"total": -1}, "memory total"),
        ({"total": 1, "fraction": 0.9}, "memory fraction"),
        ({"total": 1, "fraction": 2}, "memory fraction"),
        ({"total": 1, "reserve": 0.5}, "memory reserve"),
    ],
)
def test_a_wrong_memory(given: dict[str, object], where: str) -> None:
    check(Memory, given, where)
    check(fit, {"model": MODEL, "context": 10, "memory": 10**9}, "memory")


def test_what_is_no_model() -> None:
    for value in (3, None, ["deepseek-v3"]):
        check(package.load, {"model": value}, "model")


def check(call: Callable[..., object], arguments: dict[str, Any], where: str) -> None:
    with pytest.raises(AttncalcError) as refused:
        call(**arguments)
    assert refused.value.where == where
    assert len(str(refused.value).splitlines()) == 1
