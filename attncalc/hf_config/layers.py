"""From a list of layers to the groups and the rest of a preset document."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from attncalc.hf_config.config import MAX_POSITIONS, MAX_VOCABULARY, Config

Row = dict[str, Any]


class Layer(NamedTuple):
    """One layer, in the words of a preset document."""

    attention: Row | None
    ffn: Row | None
    norms: int
    reach: str | Row | None = "full"
    cache_from: int | None = None


def window(size: int | None) -> str | Row:
    """The reach of a window, or of none."""
    return "full" if size is None else {"window": size}


def gqa(num_heads: int, num_kv_heads: int, head_dim: int, **options: Any) -> Row:
    """Softmax attention; options as of the variant, of which a plain one has none."""
    kind = "mha" if num_kv_heads == num_heads else "mqa" if num_kv_heads == 1 else "gqa"
    sizes = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim, "v_head_dim": head_dim}
    plain = {
        "rope_dim": head_dim,
        "bias": "",
        "qk_norm": "none",
        "v_norm": False,
        "gate": "none",
        "sinks": False,
        "logit_softcap": False,
        "shared_kv_weight": False,
    }
    return {"variant": kind, **sizes, **plain, **options}


def dense(intermediate_size: int, *, gated: bool = True, bias: bool = False) -> Row:
    """One feed-forward for every token."""
    return {"kind": "dense", "intermediate_size": intermediate_size, "gated": gated, "bias": bias}


def moe(num_experts: int, top_k: int, moe_intermediate_size: int, **options: Any) -> Row:
    """Experts; options as of the feed-forward, of which a plain one has none."""
    plain = {
        "gated": True,
        "shared_intermediate_size": 0,
        "bias": False,
        "router_bias": False,
        "router_correction": "none",
        "shared_gate": False,
    }
    kind = "latent_moe" if "latent_size" in options else "moe"
    sizes = {"num_experts": num_experts, "top_k": top_k, "moe_intermediate_size": moe_intermediate_size}
    return {"kind": kind, **sizes, **plain, **options}


def weight(
    name: str,
    shape: Sequence[int],
    indices: Iterable[int] | None = None,
    total: int = 0,
    *,
    operation: str = "none",
    place: str = "ffn",
    buffer: bool = False,
) -> Row:
    """An extra weight of these layers of `total`, or of the model."""
    where = None if indices is None else indices_text(indices, total)
    return {
        "name": name,
        "shape": list(shape),
        "indices": where,
        "operation": operation,
        "place": place,
        "buffer": buffer,
    }


def indices_text(indices: Iterable[int], total: int) -> str:
    """Layer numbers as a preset writes them: `all`, or indices and slices."""
    left = sorted(indices)
    if left == list(range(total)):
        return "all"
    present, parts = set(left), []
    for first in left:
        if first in present:
            run = max((_run(present, first, step, total) for step in range(1, 13)), key=len)
            present.difference_update(run)
            step = run[1] - run[0] if len(run) > 1 else 1
            end = "" if run[-1] + step >= total else str(run[-1] + 1)
            parts.append(str(first) if len(run) == 1 else f"{first}:{end}" + (f":{step}" if step > 1 else ""))
    return ", ".join(parts)


def _run(present: set[int], first: int, step: int, total: int) -> list[int]:
    """The longest run of this step from a layer on; of less than three layers only neighbours count."""
    run = [first]
    while run[-1] + step in present and run[-1] + step < total:
        run.append(run[-1] + step)
    return run if step == 1 or len(run) > 2 else run[:1]


def groups(layers: Sequence[Layer]) -> list[Row]:
    """Equal layers together, in the order of their first."""
    found: dict[str, tuple[Layer, list[int]]] = {}
    for i, layer in enumerate(layers):
        like = layer._replace(cache_from=None if layer.cache_from is None else 0)
        found.setdefault(repr(like), (like, []))[1].append(i)
    return [
        {
            "indices": indices_text(indices, len(layers)),
            "reach": like.reach,
            "cache_from": None if like.cache_from is None else [layers[i].cache_from for i in indices],
            "attention": like.attention,
            "ffn": like.ffn,
            "norms": like.norms,
        }
        for like, indices in found.values()
    ]


def document(
    c: Config,
    layers: Sequence[Layer],
    *,
    norm: str = "rms",
    softcap: bool = False,
    **rest: Any,
) -> Row:
    """A preset document without its identity; `rest` replaces what most models have."""
    if "hidden_size" not in rest:
        rest["hidden_size"] = c.count("hidden_size")
    if "vocab_size" not in rest:
        rest["vocab_size"] = c.count("vocab_size", maximum=MAX_VOCABULARY)
    if "max_position_embeddings" not in rest:
        rest["max_position_embeddings"] = c.count("max_position_embeddings", maximum=MAX_POSITIONS)
    if "tie_word_embeddings" not in rest:
        rest["tie_word_embeddings"] = c.flag("tie_word_embeddings") if c.tie is None else c.tie
    return {
        "hidden_size": None,
        "num_hidden_layers": len(layers),
        "vocab_size": None,
        "tie_word_embeddings": False,
        "max_position_embeddings": None,
        "norm": norm,
        "final_norm": True,
        "final_logit_softcap": softcap,
        "kv_cache_dtype": None,
        "layers": groups(layers),
        "mtp": None,
        "extra_weights": [],
        **rest,
    }


def mtp(c: Config, layer: Layer, count: int) -> Row | None:
    """Layers that predict further tokens (DeepSeek-V3): a projection of two states to one, three norms, and a layer."""
    if not count:
        return None
    D = c.count("hidden_size")
    extra = [weight("eh_proj.weight", (D, 2 * D), range(count), count, operation="linear")]
    extra += [weight(n, (D,), range(count), count) for n in ("enorm.weight", "hnorm.weight", "shared_head.norm.weight")]
    return {"num_layers": count, "layers": groups([layer] * count), "extra_weights": extra}
