"""What a checkpoint declares about the format of its cache; how its weights are quantised changes nothing here.

Sources: compressed-tensors 0.12 `kv_cache_scheme`; ModelOpt `kv_cache_quant_algo` and its export as `kv_cache_scheme`;
Quark `kv_cache_quant_config`.
"""

import re

from attncalc.errors import AttncalcError, shown
from attncalc.hf_config.config import Config

_ABOUT_CACHE = re.compile(r"kv|cache|key|value|attn|attention")
_ALGORITHMS = {"FP8": "fp8", "NVFP4": "nvfp4", "INT8": "int8"}


def declared_format(c: Config) -> str | None:
    """The KV format that `quantization_config` declares, or None.

    Raises:
        AttncalcError: it says something of the cache that is not understood.
    """
    found = None
    for name in ("quantization_config", "compression_config"):
        if not c.has(name) or c.null(name):
            continue
        q = c.inner(name, how="ignored")
        for field in q.names():
            if field == "kv_cache_scheme":
                found = _scheme(q) or found
            elif field == "kv_cache_quant_algo":
                found = _algorithm(q) or found
            elif _ABOUT_CACHE.search(field) and not q.null(field) and q.value(field) not in ({}, []):
                rule = "says something of the cache that the reader does not understand"
                raise AttncalcError(q.path(field), rule, got=shown(q.value(field)))
            else:
                q.ignore(field)
    if found is None:
        c.note("quantization_config.kv_cache_scheme", None, "defaulted")
    return found


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
