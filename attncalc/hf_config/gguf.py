"""The header of a GGUF file becomes a preset document: metadata gives the sizes, tensors prove them.

Every tensor that llama.cpp loads for the architecture must be there with the shape that the metadata gives, and no
other may be: biases, norms, sinks and an own output are what the tensors show, so that the parameters of the document
are those of the file. Source: llama.cpp as in llama-cpp-python 0.3.36, `src/llama-model.cpp`, `src/models/`,
`conversion/`.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from attncalc.errors import AttncalcError, shown, suggestion
from attncalc.hf_config import Reading
from attncalc.hf_config.config import MAX_POSITIONS, Access, Config
from attncalc.hf_config.gguf_header import Length, read_header
from attncalc.hf_config.layers import Layer, Row, dense, gqa, groups, moe, window

_NO_EFFECT = re.compile(
    r"rope\.(freq_base(_swa)?|scaling\..*)"
    r"|attention\.(layer_norm(_rms)?_epsilon|scale|causal)"
    r"|expert_(weights_scale|weights_norm|gating_func|group_count|group_used_count)"
)
"""Keys that change no number: frequencies, constants of elementwise formulas, how experts are scored."""
_NO_WEIGHTS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Frequencies of RoPE, which llama.cpp stores and the architectures derive."""


class Architecture(NamedTuple):
    """What llama.cpp knows of an architecture and no file says.

    `pattern`: of so many layers the last one is full, where there is a window. `window`: its size where the key is
    absent; 0: none; None: it must be there. `tied`: it has no output of its own.
    """

    pattern: int = 0
    window: int | None = 0
    tied: bool = False
    qk_norm: bool = False
    sinks: bool = False
    post_norms: tuple[str, ...] = ()
    softcap: bool = False
    experts: bool = False
    latent: bool = False


ARCHITECTURES = {
    "llama": Architecture(experts=True),
    "qwen2": Architecture(),
    "qwen3": Architecture(qk_norm=True),
    "qwen3moe": Architecture(qk_norm=True, experts=True),
    "gemma": Architecture(tied=True),
    "gemma2": Architecture(
        pattern=2, window=4096, tied=True, post_norms=("post_attention_norm", "post_ffw_norm"), softcap=True
    ),
    "gemma3": Architecture(pattern=6, qk_norm=True, post_norms=("post_attention_norm", "post_ffw_norm")),
    "gpt-oss": Architecture(pattern=2, window=None, sinks=True, experts=True),
    "deepseek2": Architecture(experts=True, latent=True),
}


class Tensors:
    """The shapes of a file, each to be claimed once, by one that expects it."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], where: str) -> None:
        self.left, self.where = dict(shapes), where

    def __contains__(self, name: str) -> bool:
        return name in self.left

    def take(self, name: str, *shape: int) -> None:
        """Claim a tensor.

        Raises:
            AttncalcError: it is not there, or has another shape.
        """
        found = self.left.pop(name, None)
        if found is None:
            raise AttncalcError(self.where, f"must have a tensor {name}", hint=suggestion(name, self.left))
        if found != shape:
            raise AttncalcError(self.where, f"tensor {name} must have the shape {list(shape)}", got=list(found))

    def optional(self, name: str, *shape: int) -> bool:
        """Claim a tensor if it is there."""
        if name in self.left:
            self.take(name, *shape)
            return True
        return False

    def finish(self) -> None:
        """Refuse what nobody claimed."""
        for name in self.left:
            raise AttncalcError(self.where, "has a tensor that the reader does not understand", got=shown(name))


def read_gguf(path: Path, where: str, name: str) -> Reading:
    """The preset document of a GGUF file; `name` becomes its id.

    Raises:
        AttncalcError: the architecture, a key or a tensor is not understood.
        OSError: the file cannot be read.
    """
    header = read_header(path, where)
    fields = header.fields
    kind = fields.get("general.architecture")
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        hint = f"Known: {', '.join(ARCHITECTURES)}"
        raise AttncalcError(f"{where}: general.architecture", "is one that no reader knows", got=shown(kind), hint=hint)
    if fields.get("general.type", "model") != "model":
        raise AttncalcError(f"{where}: general.type", "must be model", got=shown(fields["general.type"]))
    parts = fields.get("split.count", 0)
    if parts not in (0, 1):
        rule = f"is one of {parts} parts, each with some of the tensors"
        raise AttncalcError(where, rule, hint="llama-gguf-split --merge makes one file of them")
    log: list[Access] = []
    own = {key.removeprefix(f"{kind}."): value for key, value in fields.items() if key.startswith(f"{kind}.")}
    c = Config(own, f"{where}: {kind}", log=log)
    tensors = Tensors(header.tensors, where)
    document = _document(c, tensors, ARCHITECTURES[kind], fields.get("tokenizer.ggml.tokens"))
    c.ignore(*(key for key in own if _NO_EFFECT.fullmatch(key)))
    c.finish()
    tensors.finish()
    source = {"where": f"GGUF header of {kind}, read by {__name__}", "date": "of the file", "status": "own"}
    identity = {"id": name, "hf_id": None, "model_type": None, "source": source}
    return Reading({**identity, **document}, __name__, tuple(log))


def _document(c: Config, t: Tensors, a: Architecture, tokens: object) -> Row:
    width, total = c.count("embedding_length"), c.count("block_count", maximum=10_000)
    c.only("nextn_predict_layers", 0)
    vocab = _vocabulary(c, t, width, tokens)
    t.take("output_norm.weight", width)
    tied = a.tied or not t.optional("output.weight", width, vocab)
    for name in _NO_WEIGHTS:
        t.left.pop(name, None)
    if a.latent:
        layers = _latent_layers(c, t, total)
    else:
        windows = _windows(c, a, total)
        layers = [Layer(_softmax(c, t, a, i), _ffn(c, t, a, i), _norms(t, a, i, width), w) for i, w in windows]
    capped = a.softcap or ("final_logit_softcapping" in c.names() and c.number("final_logit_softcapping") != 0)
    if a.softcap:
        c.ignore("final_logit_softcapping", "attn_logit_softcapping")
    return {
        "hidden_size": width,
        "num_hidden_layers": total,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
        "max_position_embeddings": c.count("context_length", maximum=MAX_POSITIONS),
        "norm": "rms",
        "final_norm": True,
        "final_logit_softcap": capped,
        "kv_cache_dtype": None,
        "layers": groups(layers),
        "mtp": None,
        "extra_weights": [],
    }


def _vocabulary(c: Config, t: Tensors, width: int, tokens: object) -> int:
    """The rows of the embedding, which the key and the tokenizer must agree with where they are there."""
    shape = t.left.get("token_embd.weight", ())
    if len(shape) != 2:
        raise AttncalcError(t.where, "must have a tensor token_embd.weight of two axes")
    t.take("token_embd.weight", width, shape[1])
    stated = {"tokenizer.ggml.tokens": tokens.count if isinstance(tokens, Length) else None}
    stated["vocab_size"] = None if c.null("vocab_size") else c.count("vocab_size", maximum=2**24)
    for name, count in stated.items():
        if count not in (None, shape[1]):
            rule = f"{name} must have the {shape[1]} entries of token_embd.weight"
            raise AttncalcError(t.where, rule, got=count)
    return shape[1]


def _of_layer(c: Config, name: str, i: int, **options: Any) -> int:
    """A size that is given once, or for each layer."""
    value = c.value(name, **options)
    if isinstance(value, list):
        if len(value) != c.count("block_count", maximum=10_000):
            raise AttncalcError(c.path(name), "must have one entry for each layer", got=len(value))
        value = value[i]
    return c.whole(name, value)


def _heads(c: Config, i: int) -> tuple[int, int, int, int]:
    """Query heads, KV heads, key and value width of a layer."""
    heads = _of_layer(c, "attention.head_count", i)
    first, width = _of_layer(c, "attention.head_count", 0), c.count("embedding_length")
    absent: Any = width // first if width % first == 0 else None
    key = c.count("attention.key_length", absent=absent)
    value = c.count("attention.value_length", absent=absent)
    return heads, _of_layer(c, "attention.head_count_kv", i, absent=heads), key, value


def _softmax(c: Config, t: Tensors, a: Architecture, i: int) -> Row:
    width, (heads, kv_heads, key, value) = c.count("embedding_length"), _heads(c, i)
    rope = c.count("rope.dimension_count", absent=key)
    if rope != key:
        raise AttncalcError(c.path("rope.dimension_count"), f"must be the key length {key}", got=rope)
    at = f"blk.{i}.attn"
    rows = {"q": heads * key, "k": kv_heads * key, "v": kv_heads * value}
    bias = ""
    if f"{at}_qkv.weight" in t:
        t.take(f"{at}_qkv.weight", width, sum(rows.values()))
        bias = "qkv" if t.optional(f"{at}_qkv.bias", sum(rows.values())) else ""
    else:
        for letter, size in rows.items():
            t.take(f"{at}_{letter}.weight", width, size)
    for letter, size in rows.items():
        bias += letter if t.optional(f"{at}_{letter}.bias", size) else ""
    t.take(f"{at}_output.weight", heads * value, width)
    bias += "o" if t.optional(f"{at}_output.bias", width) else ""
    if a.qk_norm:
        t.take(f"{at}_q_norm.weight", key)
        t.take(f"{at}_k_norm.weight", key)
    if a.sinks:
        t.take(f"{at}_sinks.weight", heads)
    qk_norm = "head" if a.qk_norm else "none"
    options = {"bias": bias, "qk_norm": qk_norm, "sinks": a.sinks, "logit_softcap": a.softcap}
    return gqa(heads, kv_heads, key, v_head_dim=value, **options)


def _norms(t: Tensors, a: Architecture, i: int, width: int) -> int:
    """Norms of the hidden size; gpt-oss calls the one before its experts after the attention."""
    names = ("attn_norm", "post_attention_norm" if a.sinks else "ffn_norm", *a.post_norms)
    for name in names:
        t.take(f"blk.{i}.{name}.weight", width)
    return len(names)


def _ffn(c: Config, t: Tensors, a: Architecture, i: int) -> Row:
    width, at = c.count("embedding_length"), f"blk.{i}.ffn"
    if not a.experts or f"{at}_gate_inp.weight" not in t:
        size = _of_layer(c, "feed_forward_length", i)
        found = _projections(t, at, "", width, size, ())
        if a.experts and c.has("expert_count"):
            c.count("expert_count", minimum=0)
            c.ignore("expert_used_count")
        return dense(size, bias=found)
    experts, used = c.count("expert_count"), _of_layer(c, "expert_used_count", i)
    if c.has("expert_feed_forward_length"):
        size = _of_layer(c, "expert_feed_forward_length", i)
        c.ignore("feed_forward_length")  # of dense layers, which this architecture need not have
    else:
        size = _of_layer(c, "feed_forward_length", i)
    t.take(f"{at}_gate_inp.weight", width, experts)
    router_bias = t.optional(f"{at}_gate_inp.bias", experts)
    bias = _projections(t, at, "_exps", width, size, (experts,))
    corrected = t.optional(f"blk.{i}.exp_probs_b.bias", experts)
    shared = 0
    if a.latent:
        shared = size * c.count("expert_shared_count")
        _projections(t, at, "_shexp", width, shared, ())
    options = {"bias": bias, "router_bias": router_bias, "router_correction": "buffer" if corrected else "none"}
    return moe(experts, used, size, shared_intermediate_size=shared, **options)


def _projections(t: Tensors, at: str, kind: str, width: int, size: int, experts: tuple[int, ...]) -> bool:
    """Gate, up and down of a feed-forward; whether they have biases, which are of all three or of none."""
    if f"{at}_gate_up{kind}.weight" in t:
        t.take(f"{at}_gate_up{kind}.weight", width, 2 * size, *experts)
    else:
        t.take(f"{at}_gate{kind}.weight", width, size, *experts)
        t.take(f"{at}_up{kind}.weight", width, size, *experts)
    t.take(f"{at}_down{kind}.weight", size, width, *experts)
    if not t.optional(f"{at}_down{kind}.bias", width, *experts):
        return False
    t.take(f"{at}_gate{kind}.bias", size, *experts)
    t.take(f"{at}_up{kind}.bias", size, *experts)
    return True


def _windows(c: Config, a: Architecture, total: int) -> list[tuple[int, Any]]:
    """The reach of each layer; a window counts the current token."""
    if not a.pattern:
        c.only("attention.sliding_window", 0)
        return [(i, "full") for i in range(total)]
    absent: Any = {} if a.window is None else {"absent": a.window}
    size = c.count("attention.sliding_window", minimum=0, **absent)
    pattern = c.value("attention.sliding_window_pattern", absent=a.pattern)
    if not size:
        return [(i, "full") for i in range(total)]
    if isinstance(pattern, list):
        if len(pattern) != total or any(not isinstance(slides, bool) for slides in pattern):
            rule = f"must be a number, or true or false for each of {total} layers"
            raise AttncalcError(c.path("attention.sliding_window_pattern"), rule, got=f"{len(pattern)} entries")
        return [(i, window(size if slides else None)) for i, slides in enumerate(pattern)]
    every = c.whole("attention.sliding_window_pattern", pattern, 0)
    return [(i, window(size if not every or i % every < every - 1 else None)) for i in range(total)]


def _latent_layers(c: Config, t: Tensors, total: int) -> list[Layer]:
    """MLA. The key and value lengths of the cache, 576 and 512, are of one head; `_mla` has those of a query head."""
    width, leading = c.count("embedding_length"), c.count("leading_dense_block_count", minimum=0, absent=0)
    merged = c.has("attention.key_length_mla")  # W_UK and W_UV as the absorbed form takes them
    heads, rank = c.count("attention.head_count"), c.count("attention.kv_lora_rank")
    rope = c.count("rope.dimension_count")
    key = c.count("attention.key_length_mla" if merged else "attention.key_length")
    value = c.count("attention.value_length_mla" if merged else "attention.value_length")
    kept = {"attention.key_length": rank + rope, "attention.value_length": rank} if merged else {}
    for name, size in kept.items():
        if c.has(name) and c.count(name) != size:
            raise AttncalcError(c.path(name), f"must be that of the latent, {size}", got=c.count(name))
    c.ignore("attention.head_count_kv")  # 1 where the latent is cached, else as many as there are query heads
    if key <= rope:
        raise AttncalcError(c.path("rope.dimension_count"), f"must be below the key length {key}", got=rope)
    has_q_lora = "blk.0.attn_q_a.weight" in t
    q_rank = c.count("attention.q_lora_rank") if has_q_lora else None
    if not has_q_lora:
        c.only("attention.q_lora_rank", 0)
    sizes = {"q_lora_rank": q_rank, "kv_lora_rank": rank, "qk_nope_head_dim": key - rope, "qk_rope_head_dim": rope}
    fixed = {"rotated": True, "gate": "none", "bias": False, "latent_norm": True}
    attention = {"variant": "mla", "num_heads": heads, **sizes, "v_head_dim": value, **fixed}
    a, out = ARCHITECTURES["deepseek2"], []
    for i in range(total):
        at = f"blk.{i}.attn"
        if q_rank is None:
            t.take(f"{at}_q.weight", width, heads * key)
        else:
            t.take(f"{at}_q_a.weight", width, q_rank)
            t.take(f"{at}_q_a_norm.weight", q_rank)
            t.take(f"{at}_q_b.weight", q_rank, heads * key)
        t.take(f"{at}_kv_a_mqa.weight", width, rank + rope)
        t.take(f"{at}_kv_a_norm.weight", rank)
        if merged:
            t.take(f"{at}_k_b.weight", key - rope, rank, heads)
            t.take(f"{at}_v_b.weight", rank, value, heads)
        else:
            t.take(f"{at}_kv_b.weight", rank, heads * (key - rope + value))
        t.take(f"{at}_output.weight", heads * value, width)
        if (f"blk.{i}.ffn_gate_inp.weight" in t) == (i < leading):
            rule = f"layer {i} must be {'dense' if i < leading else 'of experts'}, as leading_dense_block_count says"
            raise AttncalcError(t.where, rule)
        out.append(Layer(attention, _ffn(c, t, a, i), _norms(t, a, i, width)))
    return out
