"""The figures that the program is known by, each derived by hand in a comment or published."""

from fractions import Fraction

import pytest

import attncalc
from attncalc.allocation import baselines
from attncalc.compare import layers_of, measure_layer
from attncalc.dimensions import Dimensions
from attncalc.dtypes import Formats
from attncalc.workload import Conventions, Workload

CONTEXT = 131_072
V3 = attncalc.load("deepseek-v3")


def test_deepseek_v3_cache_against_mha() -> None:
    kept = V3.cache(CONTEXT)
    # 61 layers x (512 + 64) elements x 2 bytes
    assert kept.bytes_per_token == 61 * 576 * 2 == 70_272
    assert kept.bytes_total == 70_272 * CONTEXT == 9_210_691_584
    assert kept.elements_per_token_per_layer == 576
    assert kept.elements_per_token == 61 * 576
    mha, gqa, mqa = (b.allocation for b in baselines(kept))
    assert mha
    assert gqa
    assert mqa
    # 128 heads x (128 + 128) elements
    assert mha.elements_per_token_per_layer == 32_768
    assert mha.bytes_total == 523_986_010_112
    assert round(mha.bytes_total / kept.bytes_total, 1) == 56.9
    assert (gqa.elements_per_token_per_layer, mqa.elements_per_token_per_layer) == (2048, 256)


def test_latent_is_replicated_under_tensor_parallelism() -> None:
    kept = V3.cache(CONTEXT, tp=8)
    assert kept.bytes_total == 9_210_691_584
    mha = baselines(kept)[0].allocation
    assert mha
    assert round(mha.bytes_total / kept.bytes_total, 2) == 7.11


@pytest.mark.parametrize(
    ("model", "context", "expected"),
    [
        ("llama-3.1-8b", CONTEXT, 17_179_869_184),  # 32 x 2 x 8 x 128 x 2 B = 131,072 B per token
        ("qwen3-32b", CONTEXT, 34_359_738_368),  # 64 x 2 x 8 x 128 x 2 B
        ("gpt-oss-120b", CONTEXT, 4_836_556_800),  # 18 full layers and 18 windows of 128, 2,048 B each
        ("gemma-4-26b-a4b", CONTEXT, 2_894_069_760),  # 5 x 4,096 B x S + 25 x 8,192 B x 1,024
        ("mimo-v2-flash", CONTEXT, 3_045_457_920),  # 9 x 4 x 320 x 2 B x S + 39 x 8 x 320 x 2 B x 128
        ("llama-4-scout", CONTEXT, 7_650_410_496),  # 7.125 GiB: 12 x 4,096 B x S + 36 x 4,096 B x 8,192
        ("gemma-3-1b", 32_768, 139 * 2**20),  # 4 x 1,024 B x S + 22 x 1,024 B x 512
    ],
)
def test_cache_of_one_sequence(model: str, context: int, expected: int) -> None:
    assert attncalc.load(model).cache(context).bytes_total == expected


def test_deepseek_v3_core_per_layer() -> None:
    def core(form: str, context: int) -> dict[str, int]:
        (layer,) = layers_of(f"mla:{form}", Dimensions(), None)
        cached = "decompressed" if form == "decompressed" else "absorbed"
        from attncalc.attention.base import Step

        ops = layer.attention.ops(Step(Workload(context)), form, cached=cached).contractions
        return {op.name: op.flops for op in ops}

    absorbed = core("absorbed", CONTEXT)
    # 2 x 128 heads x (576 + 512) x 131,072
    assert absorbed["score"] + absorbed["value"] == 36_507_222_016
    decompressed = core("decompressed", CONTEXT)
    assert decompressed["score"] + decompressed["value"] == 10_737_418_240  # 2 x 128 x (192 + 128) x S
    assert core("expanded", CONTEXT)["kv_b_proj"] == 4_398_046_511_104  # 2 x S x 512 x 128 x 256
    # At 4,096 tokens, as published for FlashMLA-sized decode.
    assert sum(core("absorbed", 4096)[n] for n in ("score", "value")) == 1_140_850_688
    assert core("expanded", 4096)["kv_b_proj"] == 137_438_953_472


def test_deepseek_v3_parameters() -> None:
    parts = V3.parameter_parts()
    assert parts["attention"] == 61 * (187_105_280 + 2_048)
    assert V3.parameters() == 671_026_404_352
    assert V3.active_parameters() == 37_552_282_624
    assert parts["buffers"] == 58 * 256 == 14_848


@pytest.mark.parametrize(
    ("name", "elements", "kv_heads", "k", "v"),
    [
        ("mha", 32_768, 128, 128, 128),
        ("gqa", 2_048, 8, 128, 128),
        ("mqa", 256, 1, 128, 128),
        ("mla:absorbed", 576, 1, 576, 512),
        ("mla:expanded", 576, 128, 192, 128),
        ("mla:merged", 576, 1, 576, 512),
        ("mla:decompressed", 40_960, 128, 192, 128),  # the RoPE key is copied into each head
    ],
)
def test_comparison_at_equal_dimensions(name: str, elements: int, kv_heads: int, k: int, v: int) -> None:
    (layer,) = layers_of(name, Dimensions(), None)
    f = measure_layer(layer, Workload(CONTEXT), Conventions())
    assert f.cache_elements == elements
    assert f.shape == (128, kv_heads, k, v)
    assert f.score
    assert f.score.gemm["k"] == k
    assert f.score.gemm["m"] * f.score.gemm["gemm_batch"] == 128
    assert f.score.gemm["n"] == CONTEXT


@pytest.mark.parametrize(
    ("name", "elements", "shape"),
    [
        ("gta", 8 * 128 + 64, (128, 8, 128, 128)),
        ("gla:absorbed", 2 * 256 + 64, (128, 2, 320, 256)),
        ("gla:expanded", 576, (128, 128, 192, 128)),
        ("gla:decompressed", 40_960, (128, 128, 192, 128)),
        ("mfa", 2 * 256, (128, 1, 256, 256)),
        ("tpa:factored", (2 + 2) * (128 + 128), (128, 128, 128, 128)),
        ("tpa:expanded", 1024, (128, 128, 128, 128)),
    ],
)
def test_other_variants_at_equal_dimensions(name: str, elements: int, shape: tuple[int, ...]) -> None:
    (layer,) = layers_of(name, Dimensions(), None)
    f = measure_layer(layer, Workload(CONTEXT), Conventions())
    assert (f.cache_elements, f.shape) == (elements, shape)


def test_absorbed_against_mqa_and_intensities() -> None:
    def figures(name: str, context: int = CONTEXT) -> tuple[int | Fraction, int, int, float]:
        (layer,) = layers_of(name, Dimensions(), None)
        f = measure_layer(layer, Workload(context), Conventions())
        return f.cache_elements, f.score_flops, f.core_flops, f.core_flops / f.core_bytes

    absorbed, mqa = figures("mla:absorbed"), figures("mqa")
    assert absorbed[1] == mqa[1] * 9 // 2  # 576 / 128 = 4.5
    assert absorbed[0] * 4 == mqa[0] * 9  # 576 / 256 = 2.25
    assert absorbed[2] * 256 == mqa[2] * 1088  # 4.25
    # 128 (2 x 512 + 64) / 576 = 241.8 in the limit
    expected = [(1024, 195.60), (4096, 228.30), (8192, 234.85), (32_768, 240.01), (CONTEXT, 241.33)]
    for context, value in expected:
        assert round(figures("mla:absorbed", context)[3], 2) == value
    assert 0.9999 < figures("mha")[3] < 1
    assert 15.9 < figures("gqa")[3] < 16
    assert round(figures("mla:decompressed", 1024)[3], 5) == 0.99902


@pytest.mark.parametrize(("context", "expected"), [(CONTEXT, 171), (4096, 168)])
def test_expanding_pays_from(context: int, expected: int) -> None:
    (layer,) = layers_of("mla:absorbed", Dimensions(), None)

    def cost(form: str, new_tokens: int) -> int:
        # From the definition, not from the operations: B = 1, H = 128, L = 512, P = V = 128, R = 64.
        pairs = sum(range(context - new_tokens + 1, context + 1))
        if form == "absorbed":
            return 2 * 128 * (new_tokens * 512 * 256 + pairs * (2 * 512 + 64))
        return 2 * 128 * (context * 512 * 256 + pairs * (128 + 64 + 128))

    found = measure_layer(layer, Workload(context), Conventions()).expand_from
    assert found == expected
    assert cost("expanded", expected) < cost("absorbed", expected)
    assert cost("expanded", expected - 1) >= cost("absorbed", expected - 1)


@pytest.mark.parametrize(
    ("kv_dtype", "per_token"),
    [
        ("bf16", 1152),
        ("fp8", 576),
        ("fp8_ds_mla", 656),  # 512 e4m3 + 4 fp32 scales + 64 bf16
        ("nvfp4_ds_mla", 352),  # 256 + 32 scales + 64
        ("int8_per_token_head", 584),  # 576 + 2 x 4
        ("int4_per_token_head", 296),
        ("fp32", 2304),
    ],
)
def test_record_formats_of_a_latent(kv_dtype: str, per_token: int) -> None:
    assert V3.cache(1, formats=Formats(kv=kv_dtype)).bytes_total == 61 * per_token


@pytest.mark.parametrize(
    ("kv_dtype", "per_side"),
    [
        ("q8_0", 34 * 4),
        ("q5_1", 24 * 4),
        ("q5_0", 22 * 4),
        ("q4_1", 20 * 4),
        ("q4_0", 18 * 4),
        ("iq4_nl", 18 * 4),
        ("q1_0", 18),  # of 128 values
        ("nvfp4", 72),  # 128 x 0.5625
        ("mxfp4", 68),
        ("mxfp8", 132),
        ("int4", 64),
        ("int8_per_token_head", 132),
        ("int4_per_token_head", 68),
    ],
)
def test_block_formats_of_a_head(kv_dtype: str, per_side: int) -> None:
    # Llama-3.1-8B: 32 layers, K and V of 8 heads x 128
    assert attncalc.load("llama-3.1-8b").cache(1, formats=Formats(kv=kv_dtype)).bytes_total == 32 * 2 * 8 * per_side


def test_two_formats_for_k_and_v() -> None:
    made = attncalc.load("llama-3.1-8b").cache(1, formats=Formats(kv="q8_0/q4_0"))
    assert made.bytes_total == 32 * 8 * (136 + 72)


def test_mtp_is_one_more_layer() -> None:
    assert V3.cache(CONTEXT, mtp=True).bytes_total * 61 == V3.cache(CONTEXT).bytes_total * 62
