"""Every number of small layers and of one whole small model, counted by hand.

n tokens of B sequences; in bf16 an element has 2 bytes; a multiply-add counts 2.
"""

import copy
from typing import Any

import pytest

import attncalc
from attncalc import AttncalcError
from attncalc.attention.base import Step
from attncalc.attention.gqa import GQA
from attncalc.dtypes import Formats
from attncalc.ffn import Dense, MoE
from attncalc.flops import LayerCost, StepCost
from attncalc.model import Model
from attncalc.ops import Contraction, Ops
from attncalc.presets import ids
from attncalc.workload import Conventions, Workload
from tests.conftest import Command

BF16 = Formats()
SIX = Workload(context=5, new_tokens=3, batch=2)  # n = 2 * 3 = 6
TWO = Workload(context=5, new_tokens=1, batch=2)  # n = 2 * 1 = 2


def counts(ops: Ops) -> dict[str, int]:
    """FLOPs by operation; every name here stands once."""
    assert len({op.name for op in ops.contractions}) == len(ops.contractions)
    return {op.name: op.flops for op in ops.contractions}


def elementwise(ops: Ops) -> dict[str, int]:
    assert len({op.name for op in ops.rowwise}) == len(ops.rowwise)
    return {op.name: op.flops for op in ops.rowwise}


def moved(contractions: tuple[Contraction, ...], role: str) -> dict[str, int]:
    """Bytes of one role by operation, those that have none left out."""
    found = {op.name: {str(k): v for k, v in op.bytes(BF16).items()}[role] for op in contractions}
    return {name: n for name, n in found.items() if n}


# Dense: D 8, I 12, n 6. One matrix: 2 * 6 * 8 * 12 = 1152 FLOPs, 8 * 12 * 2 = 192 B.


def test_gated_dense() -> None:
    ops = Dense(8, 12, gated=True).ops(SIX)
    assert counts(ops) == {"ffn_gate_proj": 1152, "ffn_up_proj": 1152, "ffn_down_proj": 1152}
    assert moved(ops.contractions, "weight") == {"ffn_gate_proj": 192, "ffn_up_proj": 192, "ffn_down_proj": 192}
    # x 6 * 8 * 2 = 96, the middle 6 * 12 * 2 = 144: one in, the other out
    assert moved(ops.contractions, "activation") == {"ffn_gate_proj": 240, "ffn_up_proj": 240, "ffn_down_proj": 240}
    # sigmoid, product with the input, product with up: 3 * 6 * 12
    assert elementwise(ops) == {"ffn_activation": 216}
    # 3 * 96 elements
    assert sum(w.elements for w in Dense(8, 12, gated=True).weights()) == 288


def test_plain_dense() -> None:
    ops = Dense(8, 12, gated=False).ops(SIX)
    assert counts(ops) == {"ffn_up_proj": 1152, "ffn_down_proj": 1152}
    assert moved(ops.contractions, "weight") == {"ffn_up_proj": 192, "ffn_down_proj": 192}
    # 2 * 6 * 12
    assert elementwise(ops) == {"ffn_activation": 144}
    assert sum(w.elements for w in Dense(8, 12, gated=False).weights()) == 192


def test_biases_of_dense() -> None:
    # one addition for each output: 6 * 12 = 72 and 6 * 8 = 48
    assert elementwise(Dense(8, 12, gated=True, bias=True).ops(SIX)) == {
        "ffn_activation": 216,
        "ffn_gate_proj_bias": 72,
        "ffn_up_proj_bias": 72,
        "ffn_down_proj_bias": 48,
    }
    plain = Dense(8, 12, gated=False, bias=True)
    assert elementwise(plain.ops(SIX)) == {"ffn_activation": 144, "ffn_up_proj_bias": 72, "ffn_down_proj_bias": 48}
    # matrices as without; 12 + 12 + 8 and 12 + 8 elements more
    assert counts(plain.ops(SIX)) == {"ffn_up_proj": 1152, "ffn_down_proj": 1152}
    assert sum(w.elements for w in Dense(8, 12, gated=True, bias=True).weights()) == 288 + 32
    assert sum(w.elements for w in plain.weights()) == 192 + 20


# D 8, E 6 experts of 4, top 2, a shared one of 12 with its gate; n 2 tokens take 4 rows and reach 4 experts.
MOE = MoE(
    8,
    6,
    2,
    4,
    gated=True,
    shared_intermediate_size=12,
    bias=True,
    router_bias=True,
    router_correction="buffer",
    shared_gate=True,
)


def test_moe_with_a_shared_expert() -> None:
    ops = MOE.ops(TWO)
    assert counts(ops) == {
        "router": 192,  # 2 * 2 * 8 * 6
        "expert_gate_proj": 256,  # 2 * 4 * 8 * 4
        "expert_up_proj": 256,
        "expert_down_proj": 256,
        "shared_gate_proj": 384,  # 2 * 2 * 8 * 12
        "shared_up_proj": 384,
        "shared_down_proj": 384,
        "shared_gate": 32,  # 2 * 2 * 8 * 1
    }
    assert moved(ops.contractions, "weight") == {
        "router": 96,  # 6 * 8 * 2
        "expert_gate_proj": 256,  # 4 experts of 6 * 8 * 4 * 2
        "expert_up_proj": 256,
        "expert_down_proj": 256,
        "shared_gate_proj": 192,  # 8 * 12 * 2
        "shared_up_proj": 192,
        "shared_down_proj": 192,
        "shared_gate": 16,  # 8 * 2
    }
    assert moved(ops.contractions, "activation") == {
        "router": 56,  # 2 * 8 * 2 + 2 * 6 * 2
        "expert_gate_proj": 96,  # 4 * 8 * 2 + 4 * 4 * 2
        "expert_up_proj": 96,
        "expert_down_proj": 96,
        "shared_gate_proj": 80,  # 2 * 8 * 2 + 2 * 12 * 2
        "shared_up_proj": 80,
        "shared_down_proj": 80,
        "shared_gate": 36,  # 2 * 8 * 2 + 2 * 1 * 2
    }


def test_elementwise_counts_of_moe() -> None:
    found = elementwise(MOE.ops(TWO))
    del found["shared_gate"], found["shared_gate_sigmoid"]  # have a test of their own
    assert found == {
        "router_scores": 12,  # 2 * 6
        "router_bias": 12,
        "router_correction": 12,
        "expert_activation": 48,  # 3 * 4 * 4
        "expert_combine": 64,  # weight and sum: 2 * 4 * 8
        "expert_gate_proj_bias": 16,  # 4 * 4
        "expert_up_proj_bias": 16,
        "expert_down_proj_bias": 32,  # 4 * 8
        "shared_activation": 72,  # 3 * 2 * 12
    }


def test_a_scalar_gate_on_the_shared_expert() -> None:
    # a sigmoid (1) for each of 2 tokens, a product for each of 2 * 8 values
    found = elementwise(MOE.ops(TWO))
    assert (found["shared_gate_sigmoid"], found["shared_gate"]) == (2, 16)


def test_a_gate_for_each_head() -> None:
    spec = GQA(8, 2, 1, 4, 4, gate="head")
    # a sigmoid for each of 6 * 2 heads, a product for each of 6 * 2 * 4 values
    found = elementwise(spec.ops(Step(SIX), "direct", cached="direct"))
    assert (found["gate_sigmoid"], found["gate"]) == (12, 48)


def test_weights_of_moe() -> None:
    # router 48, its bias 6; 6 experts of 3 * 32 = 576, their biases 6 * (8 + 8) = 96; shared 3 * 96 = 288; gate 8
    assert sum(w.elements for w in MOE.weights() if not w.buffer) == 48 + 6 + 576 + 96 + 288 + 8 == 1022
    assert sum(w.elements for w in MOE.weights() if w.buffer) == 6
    # two tokens reach 4 of the 6 experts: 192 and 32 elements fewer
    assert sum(w.elements for w in MOE.read_weights(TWO)) == 1022 + 6 - 192 - 32
    # a token does not use 4 experts of 96 + 16
    assert MOE.inactive_parameters == 448


@pytest.mark.parametrize(
    ("width", "of_one", "flops"),
    # 16 / 8 = 2; 12 / 8 is rounded up to 2; 17 / 8 to 3. n 6, D 8: 2 * 6 * 8 * of_one
    [(16, 2, 192), (12, 2, 192), (17, 3, 288)],
)
def test_dense_on_one_gpu_of_eight(width: int, of_one: int, flops: int) -> None:
    part = Dense(8, width, gated=True).shard(8)
    assert part.intermediate_size == of_one
    assert counts(part.ops(SIX)) == {"ffn_gate_proj": flops, "ffn_up_proj": flops, "ffn_down_proj": flops}


def test_one_gpu_has_an_eighth_of_a_feed_forward() -> None:
    dense = Dense(8, 16, gated=True)
    assert 8 * sum(counts(dense.shard(8).ops(SIX)).values()) == sum(counts(dense.ops(SIX)).values()) == 3 * 1536
    moe = MoE(8, 6, 2, 16, gated=True, shared_intermediate_size=24)
    whole, part = counts(moe.ops(SIX)), counts(moe.shard(8).ops(SIX))
    assert part.pop("router") == whole.pop("router")  # replicated
    assert {k: 8 * v for k, v in part.items()} == whole


# A whole model: D 64, V 100, a window of 4 with every option of GQA, MLA over a mixture, one MTP layer.
DOCUMENT: dict[str, Any] = {
    "id": "tiny",
    "hf_id": None,
    "model_type": None,
    "source": {"where": "a test", "date": "2026-11-30", "status": "own"},
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "vocab_size": 100,
    "tie_word_embeddings": False,
    "max_position_embeddings": None,
    "norm": "rms",
    "final_norm": True,
    "final_logit_softcap": True,
    "kv_cache_dtype": None,
    "layers": [
        {
            "indices": "0",
            "reach": {"window": 4},
            "cache_from": None,
            "attention": {
                "variant": "gqa",
                "num_heads": 8,
                "num_kv_heads": 2,
                "head_dim": 16,
                "v_head_dim": 32,
                "rope_dim": 8,
                "bias": "qkvo",
                "qk_norm": "head",
                "v_norm": False,
                "gate": "full",
                "sinks": True,
                "logit_softcap": True,
                "shared_kv_weight": False,
            },
            "ffn": {"kind": "dense", "intermediate_size": 256, "gated": True, "bias": True},
            "norms": 2,
        },
        {
            "indices": "1",
            "reach": "full",
            "cache_from": None,
            "attention": {
                "variant": "mla",
                "num_heads": 8,
                "q_lora_rank": 32,
                "kv_lora_rank": 64,
                "qk_nope_head_dim": 16,
                "qk_rope_head_dim": 32,
                "v_head_dim": 32,
                "rotated": True,
                "gate": "none",
                "bias": True,
                "latent_norm": True,
            },
            "ffn": {
                "kind": "moe",
                "num_experts": 4,
                "top_k": 2,
                "moe_intermediate_size": 32,
                "gated": True,
                "shared_intermediate_size": 96,
                "bias": True,
                "router_bias": True,
                "router_correction": "buffer",
                "shared_gate": True,
            },
            "norms": 2,
        },
    ],
    "mtp": {
        "num_layers": 1,
        "layers": [
            {
                "indices": "all",
                "reach": "full",
                "cache_from": None,
                "attention": {
                    "variant": "mha",
                    "num_heads": 8,
                    "num_kv_heads": 8,
                    "head_dim": 16,
                    "v_head_dim": 16,
                    "rope_dim": 0,
                    "bias": "",
                    "qk_norm": "none",
                    "v_norm": False,
                    "gate": "none",
                    "sinks": False,
                    "logit_softcap": False,
                    "shared_kv_weight": False,
                },
                "ffn": {"kind": "dense", "intermediate_size": 128, "gated": False, "bias": False},
                "norms": 2,
            }
        ],
        "extra_weights": [
            {
                "name": "eh_proj.weight",
                "shape": [64, 128],
                "indices": None,
                "operation": "linear",
                "place": "ffn",
                "buffer": False,
            }
        ],
    },
    "extra_weights": [],
}


def tiny(**changes: object) -> Model:
    return attncalc.load(copy.deepcopy(DOCUMENT) | changes)


def cost_of(model: Model, *, tp: int = 1, **conventions: Any) -> StepCost:
    """B 2, S 9, T 3: n = 6 tokens."""
    return model.flops(9, 3, batch=2, tp=tp, conventions=Conventions(**conventions))


COST = cost_of(tiny())
GQA_LAYER, MLA_LAYER = COST.layers


def every(layer: LayerCost) -> dict[str, int]:
    return counts(Ops(layer.contractions, ()))


def test_a_weight_that_each_token_passes_twice() -> None:
    router: dict[str, object] = {"name": "router", "shape": [4, 64], "indices": "all", "place": "ffn", "buffer": False}
    once, twice = (cost_of(tiny(extra_weights=[router | {"operation": use}])) for use in ("linear", "linear_twice"))
    # n = 6 tokens in 2 layers; x 64 and y 4 values of 2 bytes move twice, 256 weights once
    assert once.total - COST.total == 2 * 2 * 6 * 64 * 4
    assert twice.total - once.total == 2 * 2 * 6 * 64 * 4
    assert twice.bytes_activations - once.bytes_activations == 2 * 6 * (64 + 4) * 2
    assert twice.bytes_weights == once.bytes_weights == COST.bytes_weights + 2 * 256 * 2


def test_flops_of_a_windowed_gqa_layer() -> None:
    # pairs: tokens 7, 8 and 9 see 4 keys each, 12
    assert every(GQA_LAYER) == {
        "q_proj": 98_304,  # 2 * 6 * 64 * 8 * 16
        "k_proj": 24_576,  # 2 * 6 * 64 * 2 * 16
        "v_proj": 49_152,  # 2 * 6 * 64 * 2 * 32
        "score": 6_144,  # 2 * 2 * 8 * 16 * 12
        "value": 12_288,  # 2 * 2 * 8 * 32 * 12
        "gate_proj": 196_608,  # 2 * 6 * 64 * 8 * 32
        "o_proj": 196_608,  # 2 * 6 * 8 * 32 * 64
        "ffn_gate_proj": 196_608,  # 2 * 6 * 64 * 256
        "ffn_up_proj": 196_608,
        "ffn_down_proj": 196_608,
    }
    assert (GQA_LAYER.flops_attention, GQA_LAYER.flops_ffn) == (583_680, 589_824)  # sums of the above


def test_bytes_of_a_windowed_gqa_layer() -> None:
    assert moved(GQA_LAYER.contractions, "weight") == {
        "q_proj": 16_384,  # 128 * 64 * 2
        "k_proj": 4_096,  # 32 * 64 * 2
        "v_proj": 8_192,  # 64 * 64 * 2
        "gate_proj": 32_768,  # 256 * 64 * 2
        "o_proj": 32_768,
        "ffn_gate_proj": 32_768,
        "ffn_up_proj": 32_768,
        "ffn_down_proj": 32_768,
    }
    # keys read: 4 + 3 - 1 = 6 of 2 sequences and 2 heads, of 16 and 32 values: 2 * 2 * 6 * 16 * 2, and twice that
    assert moved(GQA_LAYER.contractions, "cache") == {"score": 768, "value": 1_536}
    # 6 tokens of 2 heads: 6 * 2 * 16 * 2, and twice that
    assert moved(GQA_LAYER.contractions, "cache_write") == {"k_proj": 384, "v_proj": 768}
    # x 6 * 64 * 2 = 768; q 6 * 128 * 2 = 1,536; attn, gate and the middle 6 * 256 * 2 = 3,072
    assert moved(GQA_LAYER.contractions, "activation") == {
        "q_proj": 2_304,
        "k_proj": 768,
        "v_proj": 768,
        "score": 1_536,
        "value": 3_072,
        "gate_proj": 3_840,
        "o_proj": 3_840,
        "ffn_gate_proj": 3_840,
        "ffn_up_proj": 3_840,
        "ffn_down_proj": 3_840,
    }


def test_elementwise_counts_of_a_gqa_layer() -> None:
    found = elementwise(Ops((), GQA_LAYER.attention.rowwise + GQA_LAYER.ffn.rowwise + GQA_LAYER.rowwise))
    assert found == {
        "q_bias": 768,  # 6 * 128
        "k_bias": 192,  # 6 * 32
        "v_bias": 384,  # 6 * 64
        "o_bias": 384,  # 6 * 64
        "q_norm": 3_072,  # square, sum, scale, weight: 4 * 6 * 128
        "k_norm": 768,  # 4 * 6 * 32
        "q_rope": 1_152,  # two products and a sum: 3 * 6 * 8 * 8
        "k_rope": 288,  # 3 * 6 * 2 * 8
        "softcap": 576,  # division, tanh, product: 3 * 2 * 8 * 12
        "softmax": 960,  # 5 * 2 * 8 * 12
        "sink": 192,  # a logit without a value: maximum, difference, exponential, sum: 4 * 2 * 8 * 3
        "gate": 3_072,  # sigmoid and product: 2 * 6 * 256
        "ffn_activation": 4_608,  # 3 * 6 * 256
        "ffn_gate_proj_bias": 1_536,  # 6 * 256
        "ffn_up_proj_bias": 1_536,
        "ffn_down_proj_bias": 384,  # 6 * 64
        "norm": 3_072,  # two norms: 2 * 4 * 6 * 64
        "residual": 768,  # two sums: 2 * 6 * 64
    }


def test_flops_of_an_mla_layer_over_a_mixture() -> None:
    assert MLA_LAYER.form == "absorbed"
    # pairs: tokens 7, 8 and 9 see 7 + 8 + 9 = 24 keys
    assert every(MLA_LAYER) == {
        "q_a_proj": 24_576,  # 2 * 6 * 64 * 32
        "q_b_proj": 147_456,  # 2 * 6 * 32 * 8 * (16 + 32)
        "kv_a_proj": 73_728,  # 2 * 6 * 64 * (64 + 32)
        "absorb_q": 98_304,  # 2 * 6 * 8 * 16 * 64
        "score": 73_728,  # 2 * 2 * 8 * (64 + 32) * 24
        "value": 49_152,  # 2 * 2 * 8 * 64 * 24
        "absorb_v": 196_608,  # 2 * 6 * 8 * 64 * 32
        "o_proj": 196_608,  # 2 * 6 * 8 * 32 * 64
        "router": 3_072,  # 2 * 6 * 64 * 4
        "expert_gate_proj": 49_152,  # 12 rows: 2 * 12 * 64 * 32
        "expert_up_proj": 49_152,
        "expert_down_proj": 49_152,
        "shared_gate_proj": 73_728,  # 2 * 6 * 64 * 96
        "shared_up_proj": 73_728,
        "shared_down_proj": 73_728,
        "shared_gate": 768,  # 2 * 6 * 64
    }


def test_bytes_of_an_mla_layer_over_a_mixture() -> None:
    assert moved(MLA_LAYER.contractions, "weight") == {
        "q_a_proj": 4_096,  # 32 * 64 * 2
        "q_b_proj": 24_576,  # 8 * 48 * 32 * 2
        "kv_a_proj": 12_288,  # 96 * 64 * 2
        "absorb_q": 16_384,  # 8 * 16 * 64 * 2
        "absorb_v": 32_768,  # 8 * 32 * 64 * 2
        "o_proj": 32_768,  # 64 * 256 * 2
        "router": 512,  # 4 * 64 * 2
        "expert_gate_proj": 16_384,  # min(4, 12) experts * 64 * 32 * 2
        "expert_up_proj": 16_384,
        "expert_down_proj": 16_384,
        "shared_gate_proj": 12_288,  # 64 * 96 * 2
        "shared_up_proj": 12_288,
        "shared_down_proj": 12_288,
        "shared_gate": 128,  # 64 * 2
    }
    # the scores read all 9 records of 2 sequences, 2 * 9 * 96 * 2; the values are in them
    assert moved(MLA_LAYER.contractions, "cache") == {"score": 3_456}
    assert moved(MLA_LAYER.contractions, "cache_write") == {"kv_a_proj": 1_152}  # 6 * 96 * 2
    assert moved(MLA_LAYER.contractions, "activation") == {
        "q_a_proj": 1_152,  # 6 * 64 * 2 + 6 * 32 * 2
        "q_b_proj": 4_992,  # 6 * 32 * 2 + 6 * 8 * 48 * 2
        "kv_a_proj": 768,  # 6 * 64 * 2
        "absorb_q": 7_680,  # 6 * 8 * 16 * 2 + 6 * 8 * 64 * 2
        "score": 9_216,  # 6 * 8 * (64 + 32) * 2
        "value": 6_144,  # 6 * 8 * 64 * 2
        "absorb_v": 9_216,  # 6 * 8 * 64 * 2 + 6 * 8 * 32 * 2
        "o_proj": 3_840,  # 6 * 256 * 2 + 6 * 64 * 2
        "router": 816,  # 6 * 64 * 2 + 6 * 4 * 2
        "expert_gate_proj": 2_304,  # 12 * 64 * 2 + 12 * 32 * 2
        "expert_up_proj": 2_304,
        "expert_down_proj": 2_304,
        "shared_gate_proj": 1_920,  # 6 * 64 * 2 + 6 * 96 * 2
        "shared_up_proj": 1_920,
        "shared_down_proj": 1_920,
        "shared_gate": 780,  # 6 * 64 * 2 + 6 * 2
    }


def test_elementwise_counts_of_an_mla_layer() -> None:
    found = elementwise(Ops((), MLA_LAYER.attention.rowwise + MLA_LAYER.rowwise))
    assert found == {
        "q_a_norm": 768,  # 4 * 6 * 32
        "kv_a_norm": 1_536,  # 4 * 6 * 64
        "q_a_bias": 192,  # 6 * 32
        "kv_a_bias": 576,  # 6 * 96
        "o_bias": 384,  # 6 * 64
        "q_rope": 4_608,  # 3 * 6 * 8 * 32
        "k_rope": 576,  # 3 * 6 * 32
        "softmax": 1_920,  # 5 * 2 * 8 * 24
        "norm": 3_072,
        "residual": 768,
    }


def test_head_of_the_model() -> None:
    assert counts(COST.head) == {"lm_head": 76_800}  # 2 * 6 * 64 * 100
    assert moved(COST.head.contractions, "weight") == {"lm_head": 12_800}  # 100 * 64 * 2
    assert moved(COST.head.contractions, "activation") == {"lm_head": 1_968}  # 6 * 64 * 2 + 6 * 100 * 2
    # 4 * 6 * 64, 3 * 6 * 100
    assert elementwise(COST.head) == {"final_norm": 1_536, "final_softcap": 1_800}


def test_logits_of_the_last_token() -> None:
    last = cost_of(tiny(), head_tokens="last")
    assert counts(last.head) == {"lm_head": 25_600}  # 2 * 2 * 64 * 100
    assert moved(last.head.contractions, "activation") == {"lm_head": 656}  # 2 * 64 * 2 + 2 * 100 * 2
    assert elementwise(last.head)["final_softcap"] == 600  # 3 * 2 * 100
    assert last.bytes_weights == COST.bytes_weights  # the same head, the same 6 rows of the table
    assert last.flops_attention == COST.flops_attention


def test_totals_of_the_model() -> None:
    # the sums of the tables above
    assert COST.flops_attention == 583_680 + 860_160
    assert COST.flops_ffn == 589_824 + 372_480
    assert COST.flops_head == 76_800
    assert COST.total == 2_482_944
    assert COST.bytes_cache_read == 768 + 1_536 + 3_456 == 5_760
    assert COST.bytes_cache_write == 384 + 768 + 1_152 == 2_304
    # GQA 27,648; MLA 43,008 and its mixture 14,268; head 1,968
    assert COST.bytes_activations == 27_648 + 43_008 + 14_268 + 1_968 == 86_892


def test_mtp_layers_and_their_logits() -> None:
    more = cost_of(tiny(), mtp=True)
    assert [op.flops for op in more.head.contractions] == [76_800, 76_800]
    assert more.flops_head == 153_600
    # one head, read once
    assert sum(op.bytes(BF16)["weight"] for op in more.head.contractions) == 12_800
    # q, k, v, o 4 * 2 * 6 * 64 * 128 = 393,216; score and value 2 * 2 * 8 * 16 * 24 = 12,288 each
    assert more.flops_attention - COST.flops_attention == 417_792
    # up and down 2 * 2 * 6 * 64 * 128 = 196,608; eh_proj 2 * 6 * 64 * 128 = 98,304
    assert more.flops_ffn - COST.flops_ffn == 294_912
    # 4 * 64 * 128 + 2 * 64 * 128 + two norms of 64 + eh_proj 64 * 128 = 57,472 elements, no second head
    assert more.bytes_weights - COST.bytes_weights == 2 * 57_472
    # K and V of 8 heads of 16 each: 2 * 9 * 256 * 2, 6 * 256 * 2
    assert more.bytes_cache_read - COST.bytes_cache_read == 9_216
    assert more.bytes_cache_write - COST.bytes_cache_write == 3_072


def test_mtp_logits_of_the_last_token() -> None:
    assert cost_of(tiny(), mtp=True, head_tokens="last").flops_head == 2 * 25_600


def test_one_gpu_of_eight() -> None:
    part = cost_of(tiny(), tp=8)
    gqa, mla = part.layers
    # one query head, and one of the two KV heads, which 4 GPUs each hold
    assert every(gqa) == {
        "q_proj": 12_288,  # 2 * 6 * 64 * 16
        "k_proj": 12_288,
        "v_proj": 24_576,  # 2 * 6 * 64 * 32
        "score": 768,  # 2 * 2 * 16 * 12
        "value": 1_536,  # 2 * 2 * 32 * 12
        "gate_proj": 24_576,  # 2 * 6 * 64 * 32
        "o_proj": 24_576,
        "ffn_gate_proj": 24_576,  # 2 * 6 * 64 * 32
        "ffn_up_proj": 24_576,
        "ffn_down_proj": 24_576,
    }
    assert 8 * gqa.flops_ffn == GQA_LAYER.flops_ffn
    assert every(mla) == {
        "q_a_proj": 24_576,  # replicated
        "q_b_proj": 18_432,  # 2 * 6 * 32 * 48
        "kv_a_proj": 73_728,  # replicated
        "absorb_q": 12_288,  # 2 * 6 * 16 * 64
        "score": 9_216,  # 2 * 2 * 96 * 24
        "value": 6_144,  # 2 * 2 * 64 * 24
        "absorb_v": 24_576,  # 2 * 6 * 64 * 32
        "o_proj": 24_576,
        "router": 3_072,  # replicated
        "expert_gate_proj": 6_144,  # 2 * 12 * 64 * 4
        "expert_up_proj": 6_144,
        "expert_down_proj": 6_144,
        "shared_gate_proj": 9_216,  # 2 * 6 * 64 * 12
        "shared_up_proj": 9_216,
        "shared_down_proj": 9_216,
        "shared_gate": 768,  # replicated
    }
    # 100 / 8 is rounded up to 13 words: 2 * 6 * 64 * 13
    assert part.flops_head == 9_984
    # one KV head 2 * 6 * (16 + 32) * 2 = 1,152, the whole latent 3,456
    assert part.bytes_cache_read == 4_608
    # 6 * 48 * 2 = 576, 1,152
    assert part.bytes_cache_write == 1_728


def test_weights_on_one_gpu_of_eight() -> None:
    # GQA: q, k 1,024; v, gate, o 2,048; the middle 32: 3 * 2,048 = 14,336. Vectors: biases 16 + 16 + 32 + 64, norms
    # 32, a sink, biases of the middle 32 + 32 + 64, norms 128 = 417.
    # MLA: q_a 2,048; q_b 48 * 32 = 1,536; kv_a 6,144; kv_b 48 * 64 = 3,072; o 2,048; router 256; experts 3 * 4 * 64
    # * 4 = 3,072; shared 3 * 64 * 12 = 2,304; its gate 64 = 20,544. Vectors: 288, router 4 + 4, experts 4 * (8 + 64)
    # = 288, norms 128 = 712.
    # Head 13 * 64 = 832, final norm 64, 6 rows of the table 384.
    elements = 14_336 + 417 + 20_544 + 712 + 832 + 64 + 384
    assert cost_of(tiny(), tp=8).bytes_weights == 2 * elements == 74_578


# Matrices: GQA 8,192 + 2,048 + 4,096 + 2 * 16,384 + 3 * 16,384 = 96,256; MLA 2,048 + 12,288 + 6,144 + 24,576 + 16,384
# = 61,440; mixture 256 + 24,576 + 18,432 + 64 = 43,328; head 6,400; 6 rows of the table 384.
MATRICES = 96_256 + 61_440 + 43_328 + 6_400 + 384
# Vectors: GQA biases 128 + 32 + 64 + 64, norms 32, sinks 8, biases of the middle 576, norms 128 = 1,032; MLA biases
# 32 + 96 + 64, norms 32 + 64 = 288; mixture 4 + 4 + 4 * 64 + 4 * 64 = 520; norms 128; final norm 64.
VECTORS = 1_032 + 288 + 520 + 128 + 64


@pytest.mark.parametrize(
    ("name", "matrices", "vector"),
    [
        ("bf16", 2 * MATRICES, 2),
        ("fp32", 4 * MATRICES, 4),
        ("fp8", MATRICES, 2),
        ("q8_0", MATRICES * 34 // 32, 2),  # 32 values and a scale of 2 bytes
        ("mxfp4", MATRICES * 17 // 32, 2),  # 32 halves of a byte and a scale of 1
    ],
)
@pytest.mark.parametrize("tied", [False, True])
def test_weight_bytes_are_the_operations_the_vectors_and_the_rows(
    name: str, matrices: int, vector: int, tied: bool
) -> None:
    assert (MATRICES, VECTORS) == (207_808, 2_032)
    formats = Formats(weight=name)
    cost = cost_of(tiny(tie_word_embeddings=tied), formats=formats)
    rows = matrices * 384 // MATRICES
    assert rows * MATRICES == matrices * 384
    # a tied table is read whole by the head
    assert cost.bytes_weights == matrices + vector * VECTORS - (rows if tied else 0)
    of_products = sum(op.bytes(formats)["weight"] for x in cost.layers for op in x.contractions)
    of_products += sum(op.bytes(formats)["weight"] for op in cost.head.contractions)
    assert of_products == matrices - rows


def test_parameters_of_the_model() -> None:
    # 207,808 - 384 + 2,032 less the buffer of 4, and the table of 6,400
    assert tiny().parameters() == 207_808 - 384 + 2_032 - 4 + 6_400
    assert tiny(tie_word_embeddings=True).parameters() == 207_808 - 384 + 2_032 - 4
    # two experts of 4: 2 * 3 * 64 * 32, and biases 2 * (64 + 64)
    assert tiny().parameters() - tiny().active_parameters() == 12_288 + 256


@pytest.mark.parametrize("preset", ids("models"))
def test_a_prompt_reads_no_more_weights_than_there_are(preset: str) -> None:
    model = attncalc.load(preset)
    for tokens in (1, 4096):
        read = model.flops(tokens, tokens).bytes_weights
        assert read <= 2 * sum(model.parameter_parts().values())
    if model.mtp:
        read = model.flops(4096, 4096, conventions=Conventions(mtp=True)).bytes_weights
        assert read <= 2 * sum(model.parameter_parts(mtp=True).values())


def test_a_long_prompt_of_a_tied_model_reads_every_parameter_once() -> None:
    for preset in ("llama-3.2-1b", "gemma-2b", "falcon-7b"):
        model = attncalc.load(preset)
        assert model.tie_word_embeddings
        assert model.flops(4096, 4096).bytes_weights == 2 * model.parameters()


def test_taps_and_decays_of_a_recurrent_layer_are_never_quantised() -> None:
    model = attncalc.load("kimi-linear-48b-a3b")
    bf16 = model.flops(1000).bytes_weights
    fp8 = model.flops(1000, conventions=Conventions(formats=Formats(weight="fp8"))).bytes_weights
    # 20 KDA layers: taps 4 * 12,288, A_log 32, dt_bias 4,096, o_norm 128; 7 MLA layers: a norm of 512; 55 norms of
    # 2,304; 26 mixtures: a correction of 256
    vectors = 20 * 53_408 + 7 * 512 + 55 * 2_304 + 26 * 256
    # matrices M and vectors v: 2 * (M + 2 * v) - (2 * M + 2 * v)
    assert 2 * fp8 - bf16 == 2 * vectors == 2_410_240


def test_vectors_are_never_quantised() -> None:
    for name in ("fp8", "q8_0", "mxfp4", "nvfp4", "int4"):
        assert Formats(weight=name).row("vector", 7) == 7 * 16
    assert Formats(weight="fp32").row("vector", 7) == 7 * 32
    assert Formats(weight="fp16").row("vector", 7) == 7 * 16


@pytest.mark.parametrize("name", ["int8_per_token_head", "int4_per_token_head", "fp8_ds_mla"])
def test_a_cache_format_is_no_weight_format(attncalc: Command, name: str) -> None:
    with pytest.raises(AttncalcError, match="--weight-dtype"):
        Formats(weight=name)
    made = attncalc("flops", "gpt2", "--weight-dtype", name)
    assert (made.status, made.out) == (2, "")
    assert "--weight-dtype" in made.err


def test_the_command_line_says_the_same(attncalc: Command, tmp_path: Any) -> None:
    import json

    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(DOCUMENT), encoding="utf-8")
    words = ("flops", str(path), "-c", "9", "-q", "3", "-b", "2", "--json")
    (row,) = attncalc(*words).record["results"]
    assert (row["flops_total"], row["bytes_weights"]) == (2_482_944, 2 * (207_808 + 2_032))
    assert (row["bytes_cache_read"], row["bytes_cache_write"], row["bytes_activations"]) == (5_760, 2_304, 86_892)
    (row,) = attncalc(*words, "--mtp", "--logits", "last", "--tp", "8").record["results"]
    # 13 words, 2 tokens, twice: 2 * 2 * 2 * 64 * 13
    assert row["flops_head"] == 6_656
