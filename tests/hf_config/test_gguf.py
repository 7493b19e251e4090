"""GGUF headers, written here from the tensor lists of llama.cpp, against the shipped presets; and hostile ones."""

import os
import struct
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attncalc import presets
from attncalc.attention.gqa import GQA
from attncalc.attention.mla import MLA
from attncalc.errors import AttncalcError
from attncalc.ffn import Dense, MoE
from attncalc.hf_config.gguf_header import MAX_HEADER, read_header
from attncalc.model import LayerGroup, Model

# --------------------------------------------------------------------------------------------------------------------
# A writer

U32, F32, BOOL, STRING, ARRAY, U64 = 4, 6, 7, 8, 9, 10
FORMS = {U32: "<I", F32: "<f", BOOL: "<?", U64: "<Q"}
Tensors = dict[str, tuple[int, ...]]


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def typed(value: Any) -> tuple[int, bytes]:
    if isinstance(value, bool):
        return BOOL, struct.pack("<?", value)
    if isinstance(value, int):
        return U32, struct.pack("<I", value)
    if isinstance(value, float):
        return F32, struct.pack("<f", value)
    if isinstance(value, str):
        return STRING, text(value)
    inner = [typed(v) for v in value]
    kind = inner[0][0] if inner else U32
    return ARRAY, struct.pack("<IQ", kind, len(inner)) + b"".join(raw for _, raw in inner)


def gguf(fields: Mapping[str, Any], tensors: Tensors, version: int = 3) -> bytes:
    out = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(fields))
    for key, value in fields.items():
        kind, raw = typed(value)
        out += text(key) + struct.pack("<I", kind) + raw
    for name, shape in tensors.items():
        out += (
            text(name)
            + struct.pack("<I", len(shape))
            + struct.pack(f"<{len(shape)}Q", *shape)
            + struct.pack("<IQ", 1, 0)
        )
    return out


# --------------------------------------------------------------------------------------------------------------------
# What llama.cpp writes of a model: names and shapes as its `create_tensor` calls have them, the contiguous axis first


def softmax_tensors(g: GQA, at: str) -> Tensors:
    D, H, G, d, e = g.hidden_size, g.num_heads, g.num_kv_heads, g.head_dim, g.v_head_dim
    out: Tensors = {
        f"{at}.attn_q.weight": (D, H * d),
        f"{at}.attn_k.weight": (D, G * d),
        f"{at}.attn_v.weight": (D, G * e),
    }
    out[f"{at}.attn_output.weight"] = (H * e, D)
    rows = {"q": H * d, "k": G * d, "v": G * e, "o": D}
    out |= {f"{at}.attn_{'output' if b == 'o' else b}.bias": (rows[b],) for b in g.bias}
    if g.qk_norm == "head":
        out |= {f"{at}.attn_q_norm.weight": (d,), f"{at}.attn_k_norm.weight": (d,)}
    if g.sinks:
        out[f"{at}.attn_sinks.weight"] = (H,)
    return out


def latent_tensors(m: MLA, at: str, *, merged: bool) -> Tensors:
    D, H, key = m.hidden_size, m.num_heads, m.qk_nope_head_dim + m.qk_rope_head_dim
    out: Tensors = {
        f"{at}.attn_kv_a_mqa.weight": (D, m.kv_lora_rank + m.qk_rope_head_dim),
        f"{at}.attn_kv_a_norm.weight": (m.kv_lora_rank,),
        f"{at}.attn_output.weight": (H * m.v_head_dim, D),
    }
    if merged:
        out[f"{at}.attn_k_b.weight"] = (m.qk_nope_head_dim, m.kv_lora_rank, H)
        out[f"{at}.attn_v_b.weight"] = (m.kv_lora_rank, m.v_head_dim, H)
    else:
        out[f"{at}.attn_kv_b.weight"] = (m.kv_lora_rank, H * (m.qk_nope_head_dim + m.v_head_dim))
    if m.q_lora_rank is None:
        return out | {f"{at}.attn_q.weight": (D, H * key)}
    return out | {
        f"{at}.attn_q_a.weight": (D, m.q_lora_rank),
        f"{at}.attn_q_a_norm.weight": (m.q_lora_rank,),
        f"{at}.attn_q_b.weight": (m.q_lora_rank, H * key),
    }


def ffn_tensors(f: Any, at: str) -> Tensors:
    D = f.hidden_size
    if isinstance(f, Dense):
        W = f.intermediate_size
        return {f"{at}.ffn_gate.weight": (D, W), f"{at}.ffn_up.weight": (D, W), f"{at}.ffn_down.weight": (W, D)}
    assert isinstance(f, MoE)
    E, W, S = f.num_experts, f.moe_intermediate_size, f.shared_intermediate_size
    out: Tensors = {f"{at}.ffn_gate_inp.weight": (D, E)}
    out |= {
        f"{at}.ffn_gate_exps.weight": (D, W, E),
        f"{at}.ffn_up_exps.weight": (D, W, E),
        f"{at}.ffn_down_exps.weight": (W, D, E),
    }
    if f.bias:
        out |= {
            f"{at}.ffn_gate_exps.bias": (W, E),
            f"{at}.ffn_up_exps.bias": (W, E),
            f"{at}.ffn_down_exps.bias": (D, E),
        }
    if f.router_bias:
        out[f"{at}.ffn_gate_inp.bias"] = (E,)
    if f.router_correction != "none":
        out[f"{at}.exp_probs_b.bias"] = (E,)
    if S:
        out |= {
            f"{at}.ffn_gate_shexp.weight": (D, S),
            f"{at}.ffn_up_shexp.weight": (D, S),
            f"{at}.ffn_down_shexp.weight": (S, D),
        }
    return out


NORMS = {2: ("attn_norm", "ffn_norm"), 4: ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")}


def tensors_of(model: Model, *, merged: bool = True) -> Tensors:
    D, V = model.hidden_size, model.vocab_size
    assert V
    out: Tensors = {"token_embd.weight": (D, V), "output_norm.weight": (D,)}
    if not model.tie_word_embeddings:
        out["output.weight"] = (D, V)
    for group in model.groups:
        for i in group.indices:
            at, a = f"blk.{i}", group.attention
            out |= latent_tensors(a, at, merged=merged) if isinstance(a, MLA) else softmax_tensors(a, at)  # type: ignore[arg-type]
            out |= ffn_tensors(group.ffn, at)
            names = ("attn_norm", "post_attention_norm") if getattr(a, "sinks", False) else NORMS[group.norms]
            out |= {f"{at}.{name}.weight": (D,) for name in names}
    return out


def common(model: Model, arch: str) -> dict[str, Any]:
    first = model.groups[0].attention
    assert first
    sizes = {
        "block_count": len([i for g in model.groups for i in g.indices]),
        "context_length": model.max_position_embeddings,
        "embedding_length": model.hidden_size,
        "attention.head_count": first.num_heads,  # type: ignore[attr-defined]
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 10000.0,
    }
    tokens = ["t"] * 3 + ["token"] * ((model.vocab_size or 0) - 3)
    fields = {"general.architecture": arch, "general.type": "model", "general.name": "A model", "general.file_type": 1}
    return fields | {f"{arch}.{k}": v for k, v in sizes.items()} | {"tokenizer.ggml.tokens": tokens}


def of_kind(groups: tuple[LayerGroup, ...], kind: type) -> Any:
    return next(g.ffn for g in groups if isinstance(g.ffn, kind))


def softmax_fields(model: Model, arch: str, **more: Any) -> dict[str, Any]:
    a = model.groups[0].attention
    assert isinstance(a, GQA)
    own = {
        "attention.head_count_kv": a.num_kv_heads,
        "attention.key_length": a.head_dim,
        "attention.value_length": a.v_head_dim,
    }
    own["rope.dimension_count"] = a.rope_dim
    return common(model, arch) | {f"{arch}.{k}": v for k, v in (own | more).items()}


def dense_fields(model: Model, arch: str, **more: Any) -> dict[str, Any]:
    return softmax_fields(model, arch, feed_forward_length=of_kind(model.groups, Dense).intermediate_size, **more)


def expert_fields(model: Model, arch: str, **more: Any) -> dict[str, Any]:
    f = of_kind(model.groups, MoE)
    own = {
        "expert_count": f.num_experts,
        "expert_used_count": f.top_k,
        "expert_feed_forward_length": f.moe_intermediate_size,
    }
    return softmax_fields(model, arch, **own, **more)


def mixtral_fields(model: Model, arch: str) -> dict[str, Any]:
    f = of_kind(model.groups, MoE)
    return softmax_fields(
        model, arch, expert_count=f.num_experts, expert_used_count=f.top_k, feed_forward_length=f.moe_intermediate_size
    )


def latent_fields(model: Model, arch: str, *, merged: bool) -> dict[str, Any]:
    a, f = model.groups[0].attention, of_kind(model.groups, MoE)
    assert isinstance(a, MLA)
    key, latent = a.qk_nope_head_dim + a.qk_rope_head_dim, a.kv_lora_rank + a.qk_rope_head_dim
    own = {
        "feed_forward_length": of_kind(model.groups, Dense).intermediate_size,
        "leading_dense_block_count": sum(len(g.indices) for g in model.groups if isinstance(g.ffn, Dense)),
        "vocab_size": model.vocab_size,
        "attention.kv_lora_rank": a.kv_lora_rank,
        "attention.head_count_kv": 1 if merged else a.num_heads,
        "attention.key_length": latent if merged else key,
        "attention.value_length": a.kv_lora_rank if merged else a.v_head_dim,
        "rope.dimension_count": a.qk_rope_head_dim,
        "expert_count": f.num_experts,
        "expert_used_count": f.top_k,
        "expert_feed_forward_length": f.moe_intermediate_size,
        "expert_shared_count": f.shared_intermediate_size // f.moe_intermediate_size,
        "expert_weights_scale": 2.5,
    }
    if a.q_lora_rank:
        own["attention.q_lora_rank"] = a.q_lora_rank
    if merged:
        own |= {"attention.key_length_mla": key, "attention.value_length_mla": a.v_head_dim}
    return common(model, arch) | {f"{arch}.{k}": v for k, v in own.items()}


Make = Callable[[Model], tuple[dict[str, Any], Tensors]]


def plain(
    arch: str, more: Mapping[str, Any] | None = None, fields: Callable[..., dict[str, Any]] = dense_fields
) -> Make:
    return lambda model: (fields(model, arch, **more or {}), tensors_of(model))


MODELS: dict[str, Make] = {
    "llama-3.1-8b": plain("llama"),
    "llama-3.2-1b": plain("llama"),
    "mistral-7b-v0.3": plain("llama"),
    "mixtral-8x7b": plain("llama", fields=mixtral_fields),
    "qwen2.5-7b": plain("qwen2"),
    "qwen3-32b": plain("qwen3"),
    "qwen3-0.6b": plain("qwen3"),
    "qwen3-30b-a3b": plain("qwen3moe", fields=expert_fields),
    "gemma-2b": plain("gemma"),
    "gemma-2-27b": plain(
        "gemma2", {"attention.sliding_window": 4096, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    ),
    "gemma-3-1b": plain("gemma3", {"attention.sliding_window": 512}),
    "gemma-3-27b": plain("gemma3", {"attention.sliding_window": 1024, "attention.sliding_window_pattern": 6}),
    "gpt-oss-20b": plain("gpt-oss", {"attention.sliding_window": 128}, expert_fields),
    "deepseek-v3": lambda m: (latent_fields(m, "deepseek2", merged=True), tensors_of(m)),
    "deepseek-v2-lite": lambda m: (latent_fields(m, "deepseek2", merged=False), tensors_of(m, merged=False)),
}


def written(folder: Path, fields: Mapping[str, Any], tensors: Tensors, **options: Any) -> Path:
    path = folder / "model.gguf"
    path.write_bytes(gguf(fields, tensors, **options))
    return path


SAMPLE = ("llama-3.2-1b", "qwen3-30b-a3b", "deepseek-v2-lite")
"""In the fast run: vocabularies of a quarter of a million words take seconds to write and to read."""


@pytest.mark.parametrize("name", [pytest.param(m, marks=() if m in SAMPLE else pytest.mark.slow) for m in MODELS])
def test_a_header_gives_the_shipped_preset(name: str, tmp_path: Path) -> None:
    shipped = presets.load(name)
    fields, tensors = MODELS[name](shipped)
    made = presets.load(written(tmp_path, fields, tensors | {"rope_freqs.weight": (64,)}))
    same = {
        k: getattr(shipped, k)
        for k in ("id", "hf_id", "model_type", "source", "notes", "path", "reading", "mtp", "kv_cache_dtype")
    }
    assert replace(made, **same) == shipped
    # By a second route: what the file holds, buffers (a router's correction) included.
    elements = sum(prod(shape) for shape in tensors.values())
    assert made.parameters() + made.parameter_parts()["buffers"] == elements


# --------------------------------------------------------------------------------------------------------------------
# One small model of each kind, by hand

TINY = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.context_length": 64,
    "llama.embedding_length": 8,
    "llama.feed_forward_length": 12,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}
TINY_TENSORS: Tensors = {
    "token_embd.weight": (8, 10),
    "output_norm.weight": (8,),
    **{
        f"blk.{i}.{name}.weight": shape
        for i in range(2)
        for name, shape in {
            "attn_norm": (8,), "attn_q": (8, 8), "attn_k": (8, 4), "attn_v": (8, 4), "attn_output": (8, 8),
            "ffn_norm": (8,), "ffn_gate": (8, 12), "ffn_up": (8, 12), "ffn_down": (12, 8),
        }.items()
    },
}  # fmt: skip


def test_a_file_without_an_output_is_tied_and_biases_are_those_of_the_tensors(tmp_path: Path) -> None:
    made = presets.load(written(tmp_path, TINY, TINY_TENSORS))
    assert made.tie_word_embeddings
    assert (made.id, made.vocab_size) == ("model", 10)
    assert made.cache(64).bytes_total == 2 * 2 * 2 * 2 * 64 * 2  # layers, K and V, heads, width, tokens, bytes
    biased = TINY_TENSORS | {
        f"blk.{i}.attn_{n}.bias": (w,) for i in range(2) for n, w in (("q", 8), ("k", 4), ("v", 4))
    }
    assert presets.load(written(tmp_path, TINY, biased)).parameters() == made.parameters() + 2 * 16


def test_sizes_of_each_layer(tmp_path: Path) -> None:
    fields = TINY | {"llama.attention.head_count_kv": [2, 1], "llama.feed_forward_length": [12, 16]}
    shapes = {"attn_k": (8, 2), "attn_v": (8, 2), "ffn_gate": (8, 16), "ffn_up": (8, 16), "ffn_down": (16, 8)}
    tensors = TINY_TENSORS | {f"blk.1.{name}.weight": shape for name, shape in shapes.items()}
    made = presets.load(written(tmp_path, fields, tensors))
    assert made.cache(64).bytes_total == (2 + 1) * 2 * 2 * 64 * 2
    with pytest.raises(AttncalcError, match="one entry for each layer, got 3"):
        presets.load(written(tmp_path, TINY | {"llama.attention.head_count_kv": [2, 1, 1]}, tensors))


def test_fused_projections_have_the_same_parameters(tmp_path: Path) -> None:
    kept = {
        n: s for n, s in TINY_TENSORS.items() if not n.endswith(("attn_q.weight", "attn_k.weight", "attn_v.weight"))
    }
    fused = kept | {f"blk.{i}.attn_qkv.weight": (8, 16) for i in range(2)}
    made, plain_one = (presets.load(written(tmp_path, TINY, t)) for t in (fused, TINY_TENSORS))
    assert replace(made, path="") == replace(plain_one, path="")


@pytest.mark.slow
def test_windows_of_a_pattern_and_of_a_list(tmp_path: Path) -> None:
    shipped = presets.load("gemma-3-1b")
    fields, tensors = MODELS["gemma-3-1b"](shipped)
    slides = [i % 3 == 0 for i in range(26)]
    listed = presets.load(written(tmp_path, fields | {"gemma3.attention.sliding_window_pattern": slides}, tensors))
    assert listed.groups[0].indices == tuple(range(0, 26, 3))
    assert listed.groups[0].reach.size == 512
    everywhere = presets.load(written(tmp_path, fields | {"gemma3.attention.sliding_window_pattern": 0}, tensors))
    assert [(g.reach.kind, len(g.indices)) for g in everywhere.groups] == [("window", 26)]
    del fields["gemma3.attention.sliding_window"]
    assert [g.reach.kind for g in presets.load(written(tmp_path, fields, tensors)).groups] == ["full"]


def changed(tensors: Tensors, **new: tuple[int, ...]) -> Tensors:
    return tensors | {name.replace("__", "."): shape for name, shape in new.items()}


def without(data: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {k: v for k, v in data.items() if k not in names}


REFUSED = {
    "architecture": (TINY | {"general.architecture": "rwkv6"}, TINY_TENSORS, "is one that no reader knows, got 'rwkv6'"),
    "no architecture": (without(TINY, "general.architecture"), TINY_TENSORS, "no reader knows, got None"),
    "adapter": (TINY | {"general.type": "adapter"}, TINY_TENSORS, "must be model, got 'adapter'"),
    "parts": (TINY | {"split.count": 3, "split.no": 0}, TINY_TENSORS, "is one of 3 parts"),
    "unknown key": (TINY | {"llama.attention.new_thing": 1}, TINY_TENSORS, "attention.new_thing: is a field that the reader"),
    "missing key": (without(TINY, "llama.block_count"), TINY_TENSORS, "block_count: is missing"),
    "window": (TINY | {"llama.attention.sliding_window": 16}, TINY_TENSORS, "sliding_window: is understood only as 0, got 16"),
    "mtp": (TINY | {"llama.nextn_predict_layers": 1}, TINY_TENSORS, "nextn_predict_layers: is understood only as 0"),
    "partial rope": (TINY | {"llama.rope.dimension_count": 1}, TINY_TENSORS, "must be the key length 2, got 1"),
    "head width": (TINY | {"llama.attention.head_count": 3}, TINY_TENSORS, "key_length"),
    "float": (TINY | {"llama.block_count": 2.0}, TINY_TENSORS, "must be a whole number, got 2.0"),
    "infinity": (TINY | {"llama.embedding_length": float("inf")}, TINY_TENSORS, "must be a whole number, got inf"),
    "text": (TINY | {"llama.block_count": "2"}, TINY_TENSORS, "must be a whole number, got '2'"),
    "layers": (TINY | {"llama.block_count": 3}, TINY_TENSORS, "must have a tensor blk.2.attn_q.weight"),
    "fewer layers": (TINY | {"llama.block_count": 1}, TINY_TENSORS, "does not understand, got 'blk.1.attn_norm.weight'"),
    "shape": (TINY, changed(TINY_TENSORS, blk__0__attn_k__weight=(8, 8)), "must have the shape [8, 4], got [8, 8]"),
    "unknown tensor": (TINY, changed(TINY_TENSORS, blk__0__attn_q_norm__weight=(2,)), "got 'blk.0.attn_q_norm.weight'"),
    "no embedding": (TINY, without(TINY_TENSORS, "token_embd.weight"), "must have a tensor token_embd.weight"),
    "vocabulary": (TINY | {"llama.vocab_size": 11}, TINY_TENSORS, "must have the 10 entries of token_embd.weight, got 11"),
    "tokens": (TINY | {"tokenizer.ggml.tokens": ["a"] * 9}, TINY_TENSORS, "tokenizer.ggml.tokens must have the 10 entries"),
    "no tensors": (TINY, {}, "must have a tensor token_embd.weight"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_understood_is_refused(case: str, tmp_path: Path) -> None:
    fields, tensors, line = REFUSED[case]
    with pytest.raises(AttncalcError) as raised:
        presets.load(written(tmp_path, fields, tensors))
    assert line in str(raised.value)


# --------------------------------------------------------------------------------------------------------------------
# Hostile headers

WHOLE = gguf(TINY, TINY_TENSORS)


def begun(tensors: int, keys: int, rest: bytes = b"", version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys) + rest


def key(kind: int, raw: bytes) -> bytes:
    return begun(0, 1, text("k") + struct.pack("<I", kind) + raw)


HOSTILE = {
    "empty": (b"", "does not begin with GGUF"),
    "not gguf": (b"GGML" + bytes(100), "does not begin with GGUF"),
    "version 1": (begun(0, 0, version=1), "must be of version 2 or 3, got 1"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "is big-endian, which is not read"),
    "tensors": (begun(2**60, 0), "must have at most 131072 tensors"),
    "keys": (begun(0, 2**63), "must have at most 16384 keys"),
    "a key's length": (begun(0, 1, struct.pack("<Q", 2**62)), "must have at most 65536 bytes in a key"),
    "a text's length": (key(STRING, struct.pack("<Q", 2**62)), "bytes in the value of 'k'"),
    "an array's length": (key(ARRAY, struct.pack("<IQ", U32, 2**62)), "elements in 'k'"),
    "an array that is not there": (key(ARRAY, struct.pack("<IQ", U32, 2**20)), "ends within its header"),
    "strings that are not there": (key(ARRAY, struct.pack("<IQ", STRING, 2**20)), "ends within its header"),
    "a string beyond the end": (key(ARRAY, struct.pack("<IQQ", STRING, 1, 2**63)), "ends within its header"),
    "too many strings": (key(ARRAY, struct.pack("<IQ", STRING, 2**40)), "elements in 'k'"),
    "nested arrays": (key(ARRAY, struct.pack("<IQ", ARRAY, 1) * 1000), "must be an array of numbers or strings"),
    "a type": (key(99, b""), "must have a type from 0 to 12, got 99"),
    "a key twice": (begun(0, 2, (text("k") + struct.pack("<II", U32, 1)) * 2), "a key is given twice, got 'k'"),
    "no text": (begun(0, 1, struct.pack("<Q", 2) + b"\xff\xfe"), "a key must be UTF-8 text"),
    "axes": (begun(1, 0, text("t") + struct.pack("<I", 2**31)), "must have 1 to 4 axes"),
    "elements": (begun(1, 0, text("t") + struct.pack("<IQQ", 2, 2**40, 2**40)), "must have from 1 to 2^53 elements"),
    "no elements": (begun(1, 0, text("t") + struct.pack("<IQ", 1, 0)), "must have from 1 to 2^53 elements"),
    "a tensor twice": (begun(2, 0, (text("t") + struct.pack("<IQIQ", 1, 1, 0, 0)) * 2), "a tensor is given twice"),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_header_is_refused(case: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(HOSTILE[case][0])
    with pytest.raises(AttncalcError) as raised:
        presets.load(path)
    assert HOSTILE[case][1] in str(raised.value)
    assert "\n" not in str(raised.value)


@given(st.integers(0, len(WHOLE) - 1))
def test_a_header_that_ends_anywhere_is_refused(end: int) -> None:
    with pytest.raises(AttncalcError, match=r"ends within|does not begin"):
        presets.load(_file(WHOLE[:end]))


@given(st.integers(0, len(WHOLE) - 1), st.integers(0, 255))
def test_a_changed_byte_is_read_or_refused(at: int, value: int) -> None:
    try:
        presets.load(_file(WHOLE[:at] + bytes([value]) + WHOLE[at + 1 :]))
    except AttncalcError as error:
        assert "\n" not in str(error)  # noqa: PT017


def _file(data: bytes) -> Path:
    path = Path(tempfile.gettempdir()) / f"attncalc-{os.getpid()}.gguf"
    path.write_bytes(data)
    return path


def test_only_the_header_of_a_large_file_is_read(tmp_path: Path) -> None:
    path = written(tmp_path, TINY, TINY_TENSORS)
    with path.open("r+b") as file:
        file.truncate(200 * 2**30)  # sparse: weights of 200 GiB
    tracemalloc.start()
    start = time.perf_counter()
    assert presets.load(path).num_layers == 2
    assert time.perf_counter() - start < 5
    assert tracemalloc.get_traced_memory()[1] < 3 * MAX_HEADER
    tracemalloc.stop()


def test_a_header_beyond_the_limit_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(key(STRING, struct.pack("<Q", MAX_HEADER - 1)))
    with path.open("r+b") as file:
        file.truncate(2 * MAX_HEADER)
    with pytest.raises(AttncalcError, match="must have a header of at most 64 MiB"):
        presets.load(path)


def test_version_2_and_the_values_of_every_type(tmp_path: Path) -> None:
    made = read_header(
        written(tmp_path, {"a": 1, "b": True, "c": "text", "d": 0.5, "e": [1, 2]}, {"t": (3, 2)}, version=2), "f"
    )
    assert made.fields == {"a": 1, "b": True, "c": "text", "d": 0.5, "e": [1, 2]}
    assert made.tensors == {"t": (3, 2)}


def test_the_command_line_reads_it_and_a_wrong_name_is_one_line(attncalc: Any, tmp_path: Path) -> None:
    path = written(tmp_path, TINY, TINY_TENSORS)
    made = attncalc("cache", str(path), "--context", "64", "--json")
    assert made.record["results"][0]["bytes_total"] == 2 * 2 * 2 * 2 * 64 * 2
    assert made.record["inputs"]["models"][0]["read_by"] == "attncalc.hf_config.gguf"
    shown = attncalc("models", str(path))
    assert shown.status == 0
    assert "block_count" in shown.out
    exported = attncalc("models", "--export", str(path))
    (tmp_path / "model.yaml").write_text(exported.out)
    assert presets.load(tmp_path / "model.yaml") == presets.load(path)
    missing = attncalc("cache", str(tmp_path / "none.gguf"))
    assert (missing.status, len(missing.err.splitlines())) == (2, 1)
