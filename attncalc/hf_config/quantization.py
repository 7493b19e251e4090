"""What a checkpoint declares about the format of its cache; how its weights are quantised changes nothing here.

Sources: compressed-tensors 0.12 `kv_cache_scheme`; ModelOpt `kv_cache_quant_algo`, also in a file beside the
configuration, and its export as `kv_cache_scheme`; Quark 0.9 `kv_cache_quant_config`, `export.kv_cache_group` and
`output_tensors` of the projections to K and V.
"""

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from attncalc.errors import AttncalcError, shown
from attncalc.hf_config.config import Config, as_json

FIELDS = ("quantization_config", "compression_config", "quantization")
"""The last is that of MLX and of Mistral's `params.json`."""

_ABOUT_CACHE = re.compile(r"kv|cache|key|value|attn|attention", re.IGNORECASE)
_SAYS_CACHE = re.compile(r"kv[_ -]?cache", re.IGNORECASE)
_ATTENTION_ITSELF = re.compile(r"(?:attention|attn)\$?$", re.IGNORECASE)
_OUTPUTS = ("output_activations", "output_tensors")
"""Formats of what a linear layer puts out: of K and V, where it projects to them."""
_OF_A_MODULE = re.compile(r"[.*:]|_proj")
"""A name of modules, or a pattern of them, as the key of how their weights are quantised."""
_WITHOUT_EFFECT = ("min_kv_scale",)
"""A bound of scales, where nothing says that the cache has any."""
_ALGORITHMS = {"FP8": "fp8", "NVFP4": "nvfp4", "INT8": "int8"}


class Declared(NamedTuple):
    """A format of the cache, or None where it is said to have none of its own, and the field that says so."""

    format: str | None
    where: str


def declared_format(c: Config) -> Declared | None:
    """What the quantisation fields of a configuration declare of the cache; None where they say nothing of it.

    Raises:
        AttncalcError: they say something of the cache that is not understood, or contradict each other.
    """
    found = None
    for name in FIELDS:
        if c.has(name) and not c.null(name):
            found = agreed(found, _stated(c.inner(name, how="ignored")))
    if found is None:
        c.note("quantization_config.kv_cache_scheme", None, "defaulted")
    return found


def declared_beside(c: Config) -> Declared | None:
    """What ModelOpt's `hf_quant_config.json` declares of the cache.

    Raises:
        AttncalcError: it is no such file, or says something of the cache that is not understood.
    """
    c.value("quantization")
    c.inner("quantization", how="ignored")
    return _stated(c)


def agreed(one: Declared | None, other: Declared | None) -> Declared | None:
    """The one thing that two places say of the cache.

    Raises:
        AttncalcError: they contradict each other; which one an engine follows is its own matter.
    """
    if one and other and one.format != other.format:
        rule = f"must equal {one.where.rpartition(': ')[2]}, which declares {as_json(one.format)} for the cache"
        raise AttncalcError(other.where, rule, got=as_json(other.format))
    return one or other


def _stated(q: Config) -> Declared | None:
    found = None
    for field in q.names():
        if field == "kv_cache_scheme":
            found = agreed(found, Declared(_scheme(q), q.path(field)))
        elif field == "kv_cache_quant_algo":
            found = agreed(found, Declared(_algorithm(q), q.path(field)))
        elif field == "quantization" and isinstance(q.data[field], dict):
            found = agreed(found, _stated(q.inner(field, how="ignored")))
        else:
            _check_silent(field, q.data[field], q.path(field))
            q.ignore(field)
    return found


def _check_silent(field: str, value: object, where: str) -> None:
    """Refuse a field that says something of the cache, at any depth.

    Names of modules may stand as fields and in lists: their weights are quantised, or left. What those modules put
    out is what the cache keeps, and a scheme whose target is the attention itself is of the cache too.
    """
    for name, inner, place in _within(field, value, where):
        named = name in _OUTPUTS or _SAYS_CACHE.search(name)
        about = _ABOUT_CACHE.search(name) and not _OF_A_MODULE.search(name) and name not in _WITHOUT_EFFECT
        text = inner if isinstance(inner, str) else ""
        says = _SAYS_CACHE.search(text) or (name == "targets" and _ATTENTION_ITSELF.search(text))
        if (named or about or says) and inner is not None and inner not in ({}, []):
            rule = "says something of the cache that the reader does not understand"
            raise AttncalcError(place, rule, got=shown(inner))


def _within(field: str, value: object, where: str) -> Iterator[tuple[str, Any, str]]:
    """A field, and every field and entry within it; entries of a list go by the name of the list."""
    todo = [(field, value, where)]
    while todo:  # no recursion: a file may nest as deep as it likes
        name, inner, place = todo.pop()
        yield name, inner, place
        if isinstance(inner, dict):
            todo += [(str(k), v, f"{place}.{k}") for k, v in reversed(inner.items())]
        elif isinstance(inner, list):
            todo += [(name, v, f"{place}[{i}]") for i, v in reversed(list(enumerate(inner)))]


def _scheme(q: Config) -> str | None:
    """`{num_bits: 8, type: float, dynamic: false}`: one scale for a whole tensor, so 1 byte for each value."""
    if q.null("kv_cache_scheme"):
        return None
    scheme = q.inner("kv_cache_scheme")
    bits, kind = scheme.count("num_bits"), scheme.choice("type", ("float", "int"))
    scheme.only("strategy", "tensor", None)
    scheme.only("group_size", None)
    scheme.only("block_structure", None)
    if bits != 8:
        raise AttncalcError(scheme.path("num_bits"), "is understood only as 8", got=bits)
    scheme.ignore("dynamic", "symmetric", "observer", "observer_kwargs", "actorder", "scale_dtype", "zp_dtype")
    scheme.finish()
    return "fp8" if kind == "float" else "int8"


def _algorithm(q: Config) -> str | None:
    if q.null("kv_cache_quant_algo"):
        return None
    return _ALGORITHMS[q.choice("kv_cache_quant_algo", _ALGORITHMS)]
