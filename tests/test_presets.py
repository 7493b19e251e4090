"""Shipped models against what transformers builds, keeps and computes, and against published sizes.

`data/traces.json` holds what transformers really did with the published configurations, on the meta device: the
parameters of the model, the bytes in its cache, and the FLOPs that torch counted in its attention modules for
a whole prompt and for one token after it. Nothing here is rounded: every number must be equal.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from attncalc import presets
from attncalc.dtypes import Formats
from attncalc.flops import StepCost
from attncalc.model import Model
from attncalc.workload import Conventions, Workload

IDS = presets.ids("models")
SEEDS = [i for i in IDS if i.startswith("seed-")]
MODELS = [i for i in IDS if i not in SEEDS]
TRACES: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parent / "data" / "traces.json").read_text(encoding="utf-8")
)["models"]
RUNS = [(i, run) for i, trace in TRACES.items() for run in trace["runs"]]
COUNTED = [(i, run) for i, run in RUNS if TRACES[i]["flops_comparable"]]
DENSE = Conventions(count="dense")


def name(value: object) -> str:
    return f"{value['context']} tokens" if isinstance(value, dict) else str(value)


def document(preset: str) -> dict[str, Any]:
    data = presets.read_document(presets.folder("models") / f"{preset}.yaml")
    assert isinstance(data, dict)
    return data


def test_enough_models_ship() -> None:
    assert len(MODELS) >= 50
    assert SEEDS == ["seed-gqa", "seed-mha", "seed-mla", "seed-mqa"]


@pytest.mark.parametrize("preset", IDS)
def test_loads_under_its_own_name(preset: str) -> None:
    model = presets.load(preset)
    assert model.id == preset
    assert re.fullmatch(r"[a-z0-9][a-z0-9.-]*", preset)
    assert model.num_layers == document(preset)["num_hidden_layers"]


@pytest.mark.parametrize("preset", IDS)
def test_source_is_complete(preset: str) -> None:
    source = presets.load(preset).source
    assert len(source["where"]) > 20
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", source["date"])
    assert source["status"] in ({"document"} if preset in SEEDS else {"verified", "verified_secondhand"})


@pytest.mark.parametrize("preset", MODELS)
def test_hf_id_finds_the_preset(preset: str) -> None:
    hf_id = presets.load(preset).hf_id
    assert hf_id
    assert presets.find_model(hf_id.upper())[0].stem == preset


@pytest.mark.parametrize("preset", IDS)
def test_file_is_plain_data_of_the_repository(preset: str) -> None:
    text = (presets.folder("models") / f"{preset}.yaml").read_text(encoding="utf-8")
    assert not re.search(r"(?<![\w.])(/(?!/)|\.\./)\w", text), "names a path of a machine"
    assert max(map(len, text.splitlines())) <= 120
    if preset in MODELS:
        assert f"\nhf_id: {presets.load(preset).hf_id}\n" in text


def test_every_trace_has_its_preset() -> None:
    assert set(TRACES) <= set(MODELS)


@pytest.mark.parametrize("preset", [i for i, trace in TRACES.items() if trace["parameters"] is not None])
def test_parameters_equal_transformers(preset: str) -> None:
    assert presets.load(preset).parameters() == TRACES[preset]["parameters"]


@pytest.mark.parametrize(("preset", "run"), RUNS, ids=name)
def test_cache_equals_transformers(preset: str, run: dict[str, int]) -> None:
    # The traces are in bf16, whatever the checkpoint declares.
    kept = presets.load(preset).cache(run["context"], engine="transformers", formats=Formats())
    assert kept.bytes_total == run["cache_bytes"]


@pytest.mark.parametrize(("preset", "run"), COUNTED, ids=name)
def test_prefill_flops_equal_torch(preset: str, run: dict[str, int]) -> None:
    n = run["context"]
    cost = presets.load(preset).flops(n, n, engine="transformers", conventions=DENSE)
    assert cost.flops_attention == run["prefill_attention_flops"]


@pytest.mark.parametrize(("preset", "run"), COUNTED, ids=name)
def test_decode_flops_equal_torch(preset: str, run: dict[str, int]) -> None:
    cost = presets.load(preset).flops(run["context"] + 1, 1, engine="transformers", conventions=DENSE)
    assert cost.flops_attention == run["decode_attention_flops"]


# transformers writes an indexer's weighted sum over heads as a product, which torch counts; here it is elementwise.
SPARSE = [
    ("deepseek-v3.2", 61, 64, 1_594_505_035_776, 155_916_648_064, 272_758_113_280_000, 10_288_659_387_008),
    ("glm-5", 78, 32, 1_764_698_357_760, 174_144_926_592, 279_919_610_880_000, 11_506_439_597_952),
    ("glm-5.1", 78, 32, 1_764_698_357_760, 174_144_926_592, 279_919_610_880_000, 11_506_439_597_952),
    ("glm-5.2", 21, 32, 1_694_395_269_120, 173_045_970_240, 262_812_971_520_000, 11_503_017_799_488),
]


@pytest.mark.parametrize(("preset", "indexers", "heads", "prompt_64", "next_64", "prompt_5000", "next_5000"), SPARSE)
def test_flops_of_sparse_attention_equal_torch_but_for_the_sum_over_index_heads(
    preset: str, indexers: int, heads: int, prompt_64: int, next_64: int, prompt_5000: int, next_5000: int
) -> None:
    model = presets.load(preset)
    for n, prompt, step in ((64, prompt_64, next_64), (5000, prompt_5000, next_5000)):
        for context, new_tokens, counted in ((n, n, prompt), (n + 1, 1, step)):
            cost = model.flops(context, new_tokens, engine="transformers", conventions=DENSE)
            assert cost.flops_attention + 2 * indexers * heads * new_tokens * context == counted


@pytest.mark.parametrize("run", TRACES["zamba2-2.7b"]["runs"], ids=name)
def test_zamba2_equals_transformers_outside_its_mamba_layers(run: dict[str, int]) -> None:
    """With the options that the preset states; the trace has the FLOPs of the shared attention alone."""
    model, n = presets.load("zamba2-2.7b"), run["context"]
    assert model.parameters() == 2_662_214_560
    # Feed-forwards, adapters, linears and head: what torch counted outside attention and Mamba-2.
    others = {64: (112_029_859_840, 1_750_466_560), 5000: (8_752_332_800_000, 1_750_466_560)}[n]
    for cost, phase, rest in zip(steps(model, n), ("prefill", "decode"), others, strict=True):
        shared = sum(x.flops_attention for x in cost.layers if x.group.variant == "gqa-concat")
        assert shared == run[f"{phase}_attention_flops"]
        assert cost.flops_ffn + cost.flops_head == rest


@pytest.mark.parametrize(
    ("n", "kept", "prefill", "decode", "products"),
    [
        (64, 1_814_528, 15_179_186_176, 237_264_896, (221_606_051_840, 3_462_684_672)),
        (5000, 64_423_936, 3_409_838_080_000, 487_702_528, (19_536_936_960_000, 3_713_122_304)),
    ],
)
def test_lfm3_equals_transformers_but_for_its_convolutions(
    n: int, kept: int, prefill: int, decode: int, products: tuple[int, int]
) -> None:
    """The defaults of its class. Convolutions are run over padding too there, and for one token twice."""
    model = presets.load(Path(__file__).parent / "data" / "models" / "lfm3-defaults.yaml")
    assert model.parameters() == 1_728_801_536
    assert model.cache(n, engine="transformers").bytes_total == kept
    for cost, attention, counted in zip(steps(model, n), (prefill, decode), products, strict=True):
        assert sum(x.flops_attention for x in cost.layers if x.group.variant == "gqa") == attention
        convolved = [(x.layers, op) for x in cost.layers for op in x.contractions if op.name == "conv"]
        assert cost.total - sum(layers * op.flops for layers, op in convolved) == counted
        ((layers, conv),) = convolved
        assert layers * conv.flops == 13 * 2 * 7 * 2048 * cost.workload.new_tokens


@pytest.mark.parametrize("run", TRACES["inkling"]["runs"], ids=name)
def test_inkling_equals_transformers_but_for_its_convolutions(run: dict[str, int]) -> None:
    """The trace has the products of the attention modules; what was counted outside leaves out routed experts."""
    model, n = presets.load("inkling"), run["context"]
    assert model.parameter_parts()["buffers"] == 66 * 256
    whole = {64: (2_240_650_674_176, 35_012_329_472), 5000: (228_425_973_760_000, 37_597_102_080)}[n]
    for cost, phase, counted in zip(steps(model, n), ("prefill", "decode"), whole, strict=True):
        ops = [(x, op) for x in cost.layers for op in x.contractions]
        left = [(x, op) for x, op in ops if op.name != "conv" and not op.name.startswith("expert")]
        attention = sum(x.layers * op.flops for x, op in left if x.group.variant == "gqa-conv" and op in x.attention[0])
        assert attention == run[f"{phase}_attention_flops"]
        outside = cost.flops_head + sum(w.copies * op.flops for w, op in cost.extra)
        assert outside + sum(x.layers * op.flops for x, op in left) == counted
        # 55 layers of 16 and 11 of 8 KV heads; two convolutions over the hidden state in each of 66.
        convolved = sum(x.layers * op.flops for x, op in ops if op.name == "conv")
        assert convolved == 2 * 4 * (55 * 16 * 256 + 11 * 8 * 256 + 66 * 2 * 6144) * cost.workload.new_tokens


def test_convolutions_of_inkling_are_kept_in_fp32_by_transformers() -> None:
    model = presets.load("inkling")
    ours, theirs = (model.cache(1000, engine=e) for e in ("logical", "transformers"))
    channels = 55 * 16 * 256 + 11 * 8 * 256 + 66 * 2 * 6144
    assert (ours.bytes_fixed, theirs.bytes_fixed) == (channels * 3 * 2, channels * 4 * 4)
    bf16 = model.cache(1000, engine="transformers", formats=Formats(conv="bf16"))
    assert bf16.bytes_fixed == channels * 4 * 2


def steps(model: Model, context: int) -> tuple[StepCost, StepCost]:
    """A prompt and the token after it, as transformers computes them."""
    return (
        model.flops(context, context, engine="transformers", conventions=DENSE),
        model.flops(context + 1, 1, engine="transformers", conventions=DENSE),
    )


# All that torch counted in the whole model, of a prompt and of the token after it.
WHOLE = [(64, 575_544_850_432, 8_993_175_008), (5000, 52_040_691_040_000, 9_378_756_064)]


@pytest.mark.parametrize(("context", "prompt", "step"), WHOLE)
def test_all_flops_of_gemma_3n_equal_torch_but_for_the_mixing_of_its_streams(
    context: int, prompt: int, step: int
) -> None:
    for cost, counted in zip(steps(presets.load("gemma-3n-e4b"), context), (prompt, step), strict=True):
        assert cost.total + 35 * 2 * 4 * 4 * 2048 * cost.workload.new_tokens == counted


# What publishers say of models that no trace covers: (preset, billions, how far off, where, why not equal).
PUBLISHED = [
    ("qwen3-14b", 14.8, 0.05, "model card of Qwen/Qwen3-14B", "rounded"),
    ("deepseek-v2", 236, 0.5, "arXiv 2405.04434, abstract", "rounded"),
    ("glm-4.5", 355, 3.6, "README of zai-org/GLM-4.5", "with its MTP layer, which is left out here"),
    ("gemma-4-31b", 31, 0.5, "name", "rounded, text model alone"),
    ("gemma-4-31b-nvfp4", 31, 0.5, "name", "rounded, text model alone"),
    ("phi-2", 2.7, 0.1, "model card of microsoft/phi-2", "rounded down"),
    ("internlm2-7b", 7, 0.75, "name", "rounded down"),
    ("baichuan2-7b", 7, 0.75, "name", "rounded down"),
    ("chatglm3-6b", 6, 0.5, "name", "rounded"),
    ("jamba-1.5-large", 398, 0.6, "model card of ai21labs/AI21-Jamba-1.5-Large", "rounded"),
    ("nemotron-3-super-120b-a12b-nvfp4", 120, 0.7, "name", "cut"),
    ("internlm-7b", 7, 0.75, "name", "rounded down"),
    ("mimo-7b", 7, 0.75, "name", "rounded down"),
    ("rwkv7-goose-1.4b-pile", 1.47, 0.005, "arXiv 2503.14456, models trained on the Pile", "rounded"),
    ("step-3", 316, 0.5, "arXiv 2507.19427: 316B language model", "rounded"),
    ("grok-1", 314, 1.8, "README of xai-org/grok-1", "cut, without the embedding of 0.8B"),
    ("kimi-k3", 2800, 50, "collection page of moonshotai: 2.8T", "rounded, and partial"),
    ("llama-3.3-nemotron-super-49b", 49.87, 0.005, "model page: 49.9B", "rounded"),
]


@pytest.mark.parametrize(("preset", "billions", "tolerance", "where", "why"), PUBLISHED)
def test_parameters_match_the_published_size(
    preset: str, billions: float, tolerance: float, where: str, why: str
) -> None:
    assert abs(presets.load(preset).parameters() / 1e9 - billions) <= tolerance, f"{where}: {why}"


# The text model of Qwen3-VL is a Qwen3 of the same dimensions; GLM-4.7 is a GLM-4.5 trained further, DeepSeek-V3.2 a
# V3.2-Exp, Jamba 1.5 Mini a Jamba v0.1 and Qwen3.8-27B a Qwen3.5-27B. Others are quantised copies.
TWINS = [
    ("qwen3-vl-2b", "qwen3-1.7b"),
    ("qwen3-vl-4b", "qwen3-4b"),
    ("qwen3-vl-8b", "qwen3-8b"),
    ("qwen3-vl-32b", "qwen3-32b"),
    ("qwen3-vl-235b-a22b", "qwen3-235b-a22b"),
    ("glm-4.5", "glm-4.7"),
    ("deepseek-v3.2-exp", "deepseek-v3.2"),
    ("deepseek-v3-0324-nvfp4", "deepseek-v3"),
    ("glm-5-fp8", "glm-5"),
    ("qwen3-32b-fp8", "qwen3-32b"),
    ("qwen3-vl-32b-thinking", "qwen3-32b"),
    ("qwen3-vl-235b-a22b-thinking", "qwen3-235b-a22b"),
    ("jamba-1.5-mini", "jamba-v0.1"),
    ("qwen3.8-27b", "qwen3.5-27b"),
]


@pytest.mark.parametrize(("preset", "twin"), TWINS)
def test_parameters_equal_the_traced_twin(preset: str, twin: str) -> None:
    assert presets.load(preset).parameters() == TRACES[twin]["parameters"]


def test_every_model_is_traced_or_published() -> None:
    """Or says that its totals are partial, which no model does whose parameters equal a trace."""
    traced = {i for i, t in TRACES.items() if t["parameters"] is not None}
    partial = {i for i in MODELS if presets.load(i).partial}
    assert traced | {row[0] for row in PUBLISHED} | {row[0] for row in TWINS} | partial == set(MODELS)
    assert not traced & partial


# Billions that a token uses, as published: (preset, billions, rounding, with the embedding, where).
ACTIVE = [
    ("deepseek-v2", 21, 0.5, True, "arXiv 2405.04434, abstract"),
    (
        "deepseek-v3",
        37,
        0.6,
        True,
        "arXiv 2412.19437, abstract: 37B, which leaves out the embedding or is cut",
    ),
    ("qwen3-30b-a3b", 3.3, 0.06, True, "model card: 3.3B"),
    ("qwen3-235b-a22b", 22, 0.5, True, "model card: 22B"),
    ("step-3", 38, 0.9, True, "arXiv 2507.19427, abstract: 38B"),
    ("mixtral-8x7b", 12.9, 0.05, True, "announcement: 12.9B"),
    ("llama-4-scout", 17, 0.5, True, "name: 17B"),
    ("mimo-v2-flash", 15, 0.5, True, "model card: 15B"),
    ("jamba-v0.1", 12, 0.2, True, "arXiv 2403.19887, abstract: 12B"),
    ("jamba-1.5-large", 94, 0.5, True, "arXiv 2408.12570, abstract: 94B"),
    ("hunyuan-a13b", 13, 0.5, True, "name, model card: 13B"),
    ("qwen3.5-397b-a17b", 17, 0.5, True, "name: 17B"),
    ("jamba-1.5-mini", 12, 0.2, True, "arXiv 2408.12570, abstract: 12B"),
    ("ernie-4.5-21b-a3b", 3, 0.5, True, "name: 3B"),
    ("solar-open-100b", 12, 0.5, True, "table of models in llama.cpp: 102B.A12B"),
    ("gpt-oss-20b", 3.61, 0.005, False, "model card, arXiv 2508.10925: embedding not counted, head counted"),
    ("gpt-oss-120b", 5.13, 0.005, False, "model card, arXiv 2508.10925: embedding not counted, head counted"),
]


@pytest.mark.parametrize(("preset", "billions", "rounding", "embedding", "where"), ACTIVE)
def test_active_parameters_match_the_published_number(
    preset: str, billions: float, rounding: float, embedding: bool, where: str
) -> None:
    model = presets.load(preset)
    active = model.active_parameters() - (0 if embedding else model.hidden_size * (model.vocab_size or 0))
    assert abs(active / 1e9 - billions) <= rounding, where


def test_cache_of_nemotron_h_56b() -> None:
    """131,072 tokens: 10 attention layers of 8 heads x 128; 54 Mamba-2 layers of 256 x 64 x 256 and 3 x 20,480."""
    kept = presets.load("nemotron-h-56b").cache(131_072)
    grows, fixed = 10 * 2 * 8 * 128 * 2 * 131_072, 54 * (256 * 64 * 256 * 4 + 3 * 20_480 * 2)
    assert (grows, fixed) == (5_368_709_120, 912_605_184)
    assert (kept.bytes_total, kept.bytes_fixed) == (grows + fixed, fixed)


def test_layers_of_kimi_k3() -> None:
    """full_attn_layers 4, 8, ..., 92 and 93, counted from 1: 24 of MLA beside 69 of KDA; 131,072 tokens."""
    model = presets.load("kimi-k3")
    full = sorted(i for g in model.groups if g.variant == "mla" for i in g.indices)
    assert full == [*range(3, 92, 4), 92]
    kept = model.cache(131_072)
    # 512 + 64 elements of 2 B; 96 states 128 x 128 of 4 B and 3 columns of 3 x 96 x 128 channels of 2 B.
    grows, fixed = 24 * 576 * 2 * 131_072, 69 * (96 * 128 * 128 * 4 + 3 * 36_864 * 2)
    assert (grows, fixed) == (3_623_878_656, 449_372_160)
    assert (kept.bytes_total, kept.bytes_fixed) == (grows + fixed, fixed)
    D, P, E, L = 7168, 96 * 128, 896, 3584
    kda = 5 * D * P + D * 128 + 128 * P + D * 96 + 3 * 4 * P + 96 + P + 128
    mla = D * 1536 + 1536 + 1536 * 96 * 192 + D * 576 + 512 + 512 * 96 * 256 + 2 * D * P
    moe = D * E + E * 3 * L * 3072 + 3 * D * 6144 + 2 * D * L
    ends = 2 * 163_840 * D + (93 * 2 + 1) * D
    assert model.parameters() == 69 * kda + 24 * mla + 3 * D * 33_792 + 92 * moe + ends
    assert model.parameters() - model.active_parameters() == 92 * (E - 16) * 3 * L * 3072
    assert len(model.partial) == 4


def test_experts_over_a_latent() -> None:
    """Nemotron 3 Ultra: 512 experts of two matrices 2048 x 5120, of which a token uses 22, and two projections."""
    model = presets.load("nemotron-3-ultra-550b-a55b")
    (group,) = (g for g in model.groups if g.ffn)
    assert group.ffn is not None
    parts = {w.name: w.elements for w in group.ffn.weights()}
    assert parts["experts.up_proj.weight"] == parts["experts.down_proj.weight"] == 512 * 2048 * 5120
    assert parts["fc1_latent_proj.weight"] == parts["fc2_latent_proj.weight"] == 8192 * 2048
    assert model.parameters() - model.active_parameters() == 48 * (512 - 22) * 2 * 2048 * 5120
    flops = {op.name: op.flops for op in group.ffn.ops(Workload(10, 3)).contractions}
    assert flops["latent_down_proj"] == flops["latent_up_proj"] == 2 * 3 * 8192 * 2048
    assert flops["expert_up_proj"] == flops["expert_down_proj"] == 2 * 3 * 22 * 2048 * 5120
    assert flops["shared_up_proj"] == 2 * 3 * 8192 * 10_240
    # Transformers runs these too: its traced layer costs 411,041,792 for one token without experts.
    one = {op.name: op.flops for op in group.ffn.ops(Workload(10, 1)).contractions}
    assert sum(n for name, n in one.items() if not name.startswith("expert")) == 411_041_792


def test_active_parameters_of_deepseek_v3() -> None:
    """By hand: 671,026,404,352 - 58 layers x (256 - 8) experts x 3 x 7168 x 2048."""
    active = presets.load("deepseek-v3").active_parameters()
    assert active == 37_552_282_624 == 671_026_404_352 - 58 * 248 * 3 * 7168 * 2048


@pytest.mark.parametrize("preset", [i for i in MODELS if document(i)["mtp"]])
def test_mtp_layer_is_the_last_layer_and_what_joins_it(preset: str) -> None:
    """The projection of two hidden states to one, and three norms, beside a layer like the last."""
    model = presets.load(preset)
    assert model.mtp is not None
    (group,) = model.mtp.groups
    # GLM-5.2's last layer reuses a selection, which its MTP layer makes itself: it is as the last layer that does.
    makers = [i for g in model.groups for i in g.indices if getattr(g.attention, "own_indexer", True)]
    last = next(g for g in model.groups if max(makers) in g.indices)
    assert (group.attention, group.ffn, group.norms) == (last.attention, last.ffn, last.norms)
    D = model.hidden_size
    alone = Model("layer", D, (group,), norm=model.norm).parameters()
    assert model.parameters(mtp=True) - model.parameters() == alone + 2 * D * D + 3 * D


@pytest.mark.parametrize(
    ("preset", "parameters", "per_token"),
    [
        # 32 heads x 128 = 4096 on hidden 4096; a linear of n outputs has 4096 n + n parameters.
        ("seed-mha", 4 * (4096 * 4096 + 4096), 2 * 32 * 128),
        ("seed-mqa", 2 * (4096 * 4096 + 4096) + 2 * (4096 * 128 + 128), 2 * 128),
        ("seed-gqa", 2 * (4096 * 4096 + 4096) + 2 * (4096 * 512 + 512), 2 * 4 * 128),
        # q and o as above, one down-projection to 256 + 256, two up-projections from 256 to 4096.
        ("seed-mla", 2 * (4096 * 4096 + 4096) + 4096 * 512 + 512 + 2 * (256 * 4096 + 4096), 512),
    ],
)
def test_layers_of_the_source_document(preset: str, parameters: int, per_token: int) -> None:
    model = presets.load(preset)
    assert model.parameters() == parameters
    assert model.cache(1000).bytes_total == 1000 * per_token * 2
