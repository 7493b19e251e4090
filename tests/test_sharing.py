"""Layers that read another layer's cache: they store nothing, read it again, and have no K or V projection."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

import attncalc
from attncalc import AttncalcError
from attncalc.allocation import baselines
from attncalc.model import Model
from tests.conftest import Command

Row = dict[str, Any]

GQA: Row = {
    "variant": "gqa",
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "v_head_dim": 8,
    "rope_dim": 16,
    "bias": "qkv",
    "qk_norm": "head",
    "v_norm": True,
    "gate": "none",
    "sinks": False,
    "logit_softcap": False,
    "shared_kv_weight": False,
}
MLA: Row = {
    "variant": "mla",
    "num_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "rotated": True,
    "gate": "none",
    "bias": False,
    "latent_norm": True,
}


def group(indices: str, attention: Row | None = None, *, reach: Any = "full", source: Any = None) -> Row:
    return {
        "indices": indices,
        "reach": reach,
        "cache_from": source,
        "attention": GQA if attention is None else attention,
        "ffn": None,
        "norms": 0,
    }


def document(*layers: Row, mtp: Row | None = None) -> Row:
    count = sum(len(x["indices"].split(",")) for x in layers)
    made = {
        "id": "sharing",
        "hf_id": None,
        "model_type": None,
        "source": {"where": "a test", "date": "2026-11-30", "status": "own"},
        "hidden_size": 32,
        "num_hidden_layers": count,
        "vocab_size": None,
        "tie_word_embeddings": False,
        "max_position_embeddings": None,
        "norm": "none",
        "final_norm": False,
        "final_logit_softcap": False,
        "kv_cache_dtype": None,
        "layers": list(layers),
        "mtp": mtp,
        "extra_weights": [],
    }
    return copy.deepcopy(made)


def load(*layers: Row, mtp: Row | None = None) -> Model:
    return attncalc.load(document(*layers, mtp=mtp))


# Layers 0 (full) and 1 (window 6) keep; 2 and 4 read layer 0, 3 reads layer 1.
SHARED = (
    group("0"),
    group("1", reach={"window": 6}),
    group("2, 4", source=[0, 0]),
    group("3", reach={"window": 6}, source=[1]),
)
OWN = (group("0"), group("1", reach={"window": 6}), group("2, 4"), group("3", reach={"window": 6}))


def test_the_cache_is_the_owners_alone() -> None:
    kept = load(*SHARED).cache(20, batch=3)
    # 2 heads of 16 + 8 values in bf16: 96 B per token; 20 tokens in layer 0, 6 in layer 1, 3 sequences
    assert kept.bytes_total == 3 * 96 * (20 + 6) == 7_488
    assert [x.bytes for x in kept.layers] == [3 * 96 * 20, 3 * 96 * 6, 0, 0]
    assert [x.tensors for x in kept.layers[2:]] == [(), ()]
    assert kept.elements_per_token == 48  # layer 0; the window of layer 1 is full
    assert kept.bytes_per_token == 96
    # without sharing: three full layers and two windows
    assert load(*OWN).cache(20, batch=3).bytes_total == 3 * 96 * (3 * 20 + 2 * 6)


def test_a_borrower_reads_the_owners_cache_and_writes_none() -> None:
    shared, own = load(*SHARED).flops(20, 2, batch=3), load(*OWN).flops(20, 2, batch=3)
    # every layer reads: 3 full ones 20 tokens, 2 windows 6 + 2 - 1 = 7 tokens
    assert shared.bytes_cache_read == own.bytes_cache_read == 3 * 96 * (3 * 20 + 2 * 7)
    # two owners write 2 new tokens of 3 sequences
    assert shared.bytes_cache_write == 2 * 3 * 2 * 96
    assert own.bytes_cache_write == 5 * 3 * 2 * 96


def test_a_borrower_has_no_key_or_value_projection() -> None:
    owner, _, borrower, _ = load(*SHARED).flops(20, 2).layers
    assert [op.name for op in owner.contractions] == ["q_proj", "k_proj", "v_proj", "score", "value", "o_proj"]
    assert [op.name for op in borrower.contractions] == ["q_proj", "score", "value", "o_proj"]
    found = {op.name for op in borrower.attention.rowwise}
    assert found == {"q_bias", "q_norm", "q_rope", "softmax"}
    assert {op.name for op in owner.attention.rowwise} == found | {"k_bias", "v_bias", "k_norm", "v_norm", "k_rope"}
    assert borrower.group.attention
    names = {w.name for w in borrower.group.attention.weights("direct")}
    assert names == {"q_proj.weight", "q_proj.bias", "q_norm.weight", "o_proj.weight"}


def test_parameters_of_borrowers() -> None:
    # k 2 * 16 * 32 + bias 32, v 2 * 8 * 32 + bias 16, k_norm 16: 1,600 fewer in each of three borrowers
    assert load(*OWN).parameters() - load(*SHARED).parameters() == 3 * (1_024 + 32 + 512 + 16 + 16) == 4_800
    assert load(*OWN).flops(20).bytes_weights - load(*SHARED).flops(20).bytes_weights == 2 * 4_800


def test_flops_of_borrowers() -> None:
    # K and V of 2 new tokens: 2 * 2 * 32 * (32 + 16) in each of three borrowers
    assert load(*OWN).flops(20, 2).total - load(*SHARED).flops(20, 2).total == 3 * 6_144


def test_baselines_of_sharing_models_keep_the_owners_alone() -> None:
    mha, _, mqa = (b.allocation for b in baselines(load(*SHARED).cache(20)))
    assert mha
    assert mqa
    # 4 heads in place of 2, and 1
    assert mha.bytes_total == 2 * 96 * 26
    assert mqa.bytes_total == 96 * 26 // 2


def test_sharing_under_tensor_parallelism() -> None:
    # one KV head of two
    assert load(*SHARED).cache(20, tp=2).bytes_total == 48 * 26
    # every GPU of 4 holds one too
    assert load(*SHARED).cache(20, tp=4).bytes_total == 48 * 26
    assert load(*SHARED).flops(20, 2, tp=2).bytes_cache_read == 48 * (3 * 20 + 2 * 7)


def test_sharing_under_transformers() -> None:
    # the window keeps one token fewer
    assert load(*SHARED).cache(20, engine="transformers").bytes_total == 96 * (20 + 5)


def test_the_command_line_says_whose_cache_is_read(attncalc: Command, tmp_path: Path) -> None:
    path = tmp_path / "sharing.json"
    path.write_text(json.dumps(document(*SHARED)), encoding="utf-8")
    (row,) = attncalc("cache", str(path), "-c", "20", "--json").record["results"]
    assert row["layers"][2]["cache_from"] == [0, 0]
    assert row["layers"][2]["bytes"] == 0
    assert row["bytes_total"] == 96 * 26
    assert "reads 0" in attncalc("cache", str(path), "-c", "20").out


def test_a_wider_reach_can_be_read() -> None:
    """What a window attends to, a full cache holds."""
    model = load(group("0"), group("1", reach={"window": 6}, source=[0]))
    assert model.cache(20).bytes_total == 96 * 20
    # 20 tokens in layer 0, the last 6 in layer 1
    assert model.flops(20).bytes_cache_read == 96 * 26
    assert load(group("0", reach={"window": 8}), group("1", reach={"window": 6}, source=[0])).cache(20)


HEADS = GQA | {"num_kv_heads": 1, "variant": "mqa"}
REFUSED: dict[str, tuple[Row, ...]] = {
    "other KV heads": (group("0"), group("1", HEADS, source=[0])),
    "other key width": (group("0"), group("1", GQA | {"head_dim": 32}, source=[0])),
    "other value width": (group("0"), group("1", GQA | {"v_head_dim": 16}, source=[0])),
    "a window for a full reader": (group("0", reach={"window": 6}), group("1", source=[0])),
    "a narrower window": (group("0", reach={"window": 5}), group("1", reach={"window": 6}, source=[0])),
    "a window for a chunk": (group("0", reach={"window": 6}), group("1", reach={"chunk": 6}, source=[0])),
    "a later source": (group("0", source=[1]), group("1")),
    "itself": (group("0"), group("1", source=[1])),
    "a borrowed source": (group("0"), group("1", source=[0]), group("2", source=[1])),
    "a source that is not there": (group("0"), group("1", source=[2])),
    "a negative source": (group("0"), group("1", source=[-1])),
    "true": (group("0"), group("1", source=[True])),
    "text": (group("0"), group("1", source=["0"])),
    "too few sources": (group("0"), group("1, 2", source=[0])),
    "too many sources": (group("0"), group("1", source=[0, 0])),
    "no list": (group("0"), group("1", source=0)),
    "an empty list": (group("0"), group("1", source=[])),
    "MLA as reader": (group("0", MLA), group("1", MLA, source=[0])),
    "MLA reading GQA": (group("0"), group("1", MLA, source=[0])),
    "GQA reading MLA": (group("0", MLA), group("1", source=[0])),
    "own_kv written out": (group("0", GQA | {"own_kv": False}),),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_shared_is_refused(name: str) -> None:
    with pytest.raises(AttncalcError) as caught:
        load(*REFUSED[name])
    assert "layers" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_refusals_say_what_is_wrong() -> None:
    for name, words in (
        ("other KV heads", "heads, widths and reach"),
        ("a narrower window", "heads, widths and reach"),
        ("a later source", "an earlier layer with a cache of its own"),
        ("a borrowed source", "an earlier layer with a cache of its own"),
        ("MLA as reader", "cannot read another layer's cache"),
        ("too few sources", "one layer for each of the 2"),
    ):
        with pytest.raises(AttncalcError, match=words):
            load(*REFUSED[name])


def mtp(*layers: Row) -> Row:
    count = sum(1 if x["indices"] == "all" else len(x["indices"].split(",")) for x in layers)
    return {"num_layers": count, "layers": list(layers), "extra_weights": []}


def test_mtp_layers_may_read_an_earlier_layer() -> None:
    model = load(group("0"), mtp=mtp(group("0", source=[0])))
    assert model.cache(20, mtp=True).bytes_total == model.cache(20).bytes_total == 96 * 20


@pytest.mark.parametrize("source", [1, 2, 7])
def test_an_mtp_source_out_of_range_is_refused(source: int) -> None:
    """The MTP layer is layer 1: it cannot read itself or what comes after."""
    with pytest.raises(AttncalcError, match=f"cache_from {source}"):
        load(group("0"), mtp=mtp(group("0", source=[source])))


def test_a_layer_cannot_read_an_mtp_layer() -> None:
    with pytest.raises(AttncalcError, match="earlier layer"):
        load(group("0"), group("1", source=[2]), mtp=mtp(group("0")))
