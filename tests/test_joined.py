"""Blocks that join the layers of another group: attention beside Mamba, and weights that several layers share."""

import pytest

import attncalc
from attncalc import AttncalcError
from tests.test_sharing import GQA, Row, document, group

MAMBA2: Row = {
    "variant": "mamba2",
    "num_heads": 4,
    "head_dim": 8,
    "n_groups": 1,
    "state_size": 16,
    "conv_kernel": 4,
    "conv_bias": True,
    "bias": False,
    "chunk_size": 16,
    "gated_norm": False,
}
FFN: Row = {"kind": "dense", "intermediate_size": 48, "gated": True, "bias": False}


def joined(indices: str, attention: Row | None, copies: int | None = None, **others: object) -> Row:
    return group(indices, attention) | {"joined": {"weight_copies": copies}} | others


def build(*layers: Row, count: int, **others: object) -> attncalc.Model:
    return attncalc.load(document(*layers) | {"num_hidden_layers": count} | others)


def test_a_layer_keeps_and_computes_what_all_its_blocks_do() -> None:
    both = build(group("0, 1, 2"), joined("0, 1, 2", MAMBA2), count=3)
    alone = build(group("0, 1, 2"), count=3), build(group("0, 1, 2", MAMBA2), count=3)
    assert both.num_layers == 3
    assert both.parameters() == sum(m.parameters() for m in alone)
    assert both.cache(50, batch=2).bytes_total == sum(m.cache(50, batch=2).bytes_total for m in alone)
    assert both.flops(50, 7).total == sum(m.flops(50, 7).total for m in alone)
    # K and V of 2 heads of 16 and 8; 3 columns of 4 * 8 + 2 * 16 channels in bf16, 4 states of 8 x 16 in fp32
    assert both.cache(50).bytes_total == 3 * (50 * 2 * 24 * 2 + 3 * 64 * 2 + 4 * 8 * 16 * 4)


def test_layers_that_share_weights_have_them_once_and_compute_and_keep_each() -> None:
    own, shared = (
        build(
            group("0:9", MAMBA2),
            joined("1::2", GQA, copies, ffn=FFN, norms=2),
            count=9,
            norm="rms",
        )
        for copies in (None, 2)
    )
    # q, o and biased k and v of 4 and 2 heads of 16 and 8, QK-norm; 3 matrices; 2 norms
    attention = 32 * 4 * (16 + 8) + 32 * 2 * (16 + 8) + 4 * 16 + 2 * (16 + 8) + 2 * 16
    block = attention + 3 * 32 * 48 + 2 * 32
    assert own.parameters() - shared.parameters() == (4 - 2) * block
    assert own.cache(50).bytes_total == shared.cache(50).bytes_total
    assert own.flops(50, 7).total == shared.flops(50, 7).total
    assert own.flops(50, 7).bytes_weights - shared.flops(50, 7).bytes_weights == (4 - 2) * block * 2


@pytest.mark.parametrize(
    ("layers", "rule"),
    [
        ((group("0, 1"), group("1", MAMBA2)), "must name each layer once"),
        ((group("0"), joined("1", MAMBA2)), "must name layers of groups before it"),
        ((joined("0, 1", MAMBA2), group("0, 1")), "must name layers of groups before it"),
        ((group("0, 1"), joined("0, 1", MAMBA2, 3)), "must not exceed the 2 layers joined"),
        ((group("0, 1"), joined("0, 1", MAMBA2, 0)), "must be at least 1"),
        ((group("0, 1"), group("0, 1", MAMBA2) | {"joined": {}}), "weight_copies: is missing"),
        ((group("0, 1"), group("0, 1", MAMBA2) | {"joined": None}), "must be a mapping"),
    ],
)
def test_refused(layers: tuple[Row, ...], rule: str) -> None:
    with pytest.raises(AttncalcError, match=rule):
        build(*layers, count=2)


def test_a_borrower_finds_the_block_that_keeps_its_cache() -> None:
    reader = group("2", source=[1])
    made = build(group("0, 1", MAMBA2), joined("0, 1", GQA), reader, count=3)
    assert (
        made.cache(50).bytes_total == build(group("0, 1", MAMBA2), joined("0, 1", GQA), count=2).cache(50).bytes_total
    )


def test_attention_and_state_of_falcon_h1_stand_in_every_layer() -> None:
    model = attncalc.load("falcon-h1-7b")
    made = model.cache(1000)
    assert model.num_layers == 44
    # 2 KV heads of 128; 24 heads of 128 x 256 in fp32; 3 columns of 3,072 + 2 * 256 channels
    assert made.bytes_fixed == 44 * (24 * 128 * 256 * 4 + 3 * (3072 + 512) * 2)
    assert made.bytes_total == made.bytes_fixed + 44 * 1000 * 2 * 2 * 128 * 2
