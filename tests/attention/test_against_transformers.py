"""The layers against the attention modules of transformers, with the same weights, in float32."""

import warnings
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
torch.set_num_threads(1)  # tiny tensors: two threads wait for each other longer than they compute
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from attncalc.attention import dsa_torch, gqa_index_torch, gqa_torch, mla_torch  # noqa: E402
from attncalc.attention.dsa import DSA  # noqa: E402
from attncalc.attention.gqa import GQA  # noqa: E402
from attncalc.attention.gqa_index import IndexedGQA  # noqa: E402
from attncalc.attention.mla import MLA  # noqa: E402
from attncalc.attention.rotary import Rotary  # noqa: E402
from attncalc.attention.torch_base import Cache  # noqa: E402
from attncalc.reach import FULL, Reach  # noqa: E402

TOKENS, BATCH = 19, 2
SHARED: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "attn_implementation": "eager",
}
MLA_SHARED: dict[str, Any] = {
    **SHARED,
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 8,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
    "mscale": 0.7,
    "mscale_all_dim": 0.5,
}


def build(name: str, text: str = "", **options: Any) -> tuple[Any, Any]:
    """A tiny model with random weights, its norms and biases too, and its configuration."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of names that transformers will rename
        config = getattr(transformers, f"{name}{text}Config")(**options)
        torch.manual_seed(0)
        model = getattr(transformers, f"{name}{text}Model")(config).eval()
    with torch.no_grad():
        for key, p in model.named_parameters():
            if "self_attn" in key:
                p.normal_(mean=float("norm" in key), std=p.shape[-1] ** -0.5 if p.ndim > 1 else 0.5)
    return model, config


def theirs(model: Any, layer: int) -> tuple[Any, Any]:
    """What goes into an attention module of the model and what comes out: its own masks, positions and tables."""
    seen = {}

    def look(_: Any, args: Any, kwargs: Any, out: Any) -> None:
        seen["x"], seen["out"] = args[0] if args else kwargs["hidden_states"], out[0]

    hook = model.layers[layer].self_attn.register_forward_hook(look, with_kwargs=True)
    torch.manual_seed(2)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # With all hidden states asked for, no layer leaves out tokens that the last logits do not need.
        model(inputs_embeds=torch.randn(BATCH, TOKENS, 32), use_cache=False, output_hidden_states=True)
    hook.remove()
    return seen["x"], seen["out"]


def compare(model: Any, layer: int, ours: Any) -> None:
    """The outputs of a whole prompt, and of a prompt with tokens after it."""
    x, expected = theirs(model, layer)
    for splits in ((TOKENS,), (10, 7, 1, 1)):
        cache = Cache()
        with torch.no_grad():
            got = torch.cat([ours(part, cache) for part in x.split(splits, dim=1)], dim=1)
        assert (got - expected).abs().max() < 1e-5 * expected.abs().max()


def load(ours: Any, model: Any, layer: int, *, norm_offset: int = 0) -> Any:
    state = {n: p + norm_offset * ("norm" in n) for n, p in model.layers[layer].self_attn.state_dict().items()}
    ours.load_state_dict(state)
    return ours


@pytest.mark.parametrize(
    ("name", "rotary", "options"),
    [
        (
            "DeepseekV3",
            Rotary(factor=40, mscale=1.0, mscale_all_dim=1.0),
            {"beta_fast": 32, "beta_slow": 1, "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0},
        ),
        ("GptOss", Rotary(150000.0, factor=32, truncate=False), {"factor": 32.0, "truncate": False}),
        ("Llama", Rotary(1e6, factor=8, beta_fast=16, beta_slow=2), {"factor": 8.0, "beta_fast": 16, "beta_slow": 2}),
    ],
)
def test_yarn_frequencies(name: str, rotary: Rotary, options: dict[str, Any]) -> None:
    rope = {"rope_type": "yarn", "rope_theta": rotary.theta, "original_max_position_embeddings": 4096, **options}
    widths = {"qk_rope_head_dim": 64} if name == "DeepseekV3" else {"head_dim": 64}
    scaled = {"rope_parameters": rope, "max_position_embeddings": int(4096 * options["factor"])}
    experts = {"GptOss": {"num_local_experts": 2}}.get(name, {})
    model, _ = build(name, **{**(MLA_SHARED if name == "DeepseekV3" else SHARED), **widths, **scaled, **experts})
    torch.testing.assert_close(rotary.inverse_frequencies(64).float(), model.rotary_emb.inv_freq, rtol=1e-5, atol=0)
    assert rotary.magnitude == pytest.approx(model.rotary_emb.attention_scaling)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("path", ["fast", "reference"])
def test_llama(bias: bool, path: Any) -> None:
    model, _ = build("Llama", attention_bias=bias, **SHARED)
    spec = GQA(32, 4, 2, 8, 8, rope_dim=8, bias="qkvo" if bias else "")
    compare(model, 0, load(gqa_torch.Layer(spec, path=path), model, 0))


def test_llama_with_yarn() -> None:
    model, _ = build("Llama", rope_parameters=YARN, max_position_embeddings=32, **SHARED)
    rotary = Rotary(factor=4, original_max_position=8, beta_fast=4, mscale=0.7, mscale_all_dim=0.5)
    spec = GQA(32, 4, 2, 8, 8, rope_dim=8)
    compare(model, 0, load(gqa_torch.Layer(spec, rotary=rotary), model, 0))


@pytest.mark.parametrize("path", ["fast", "reference"])
def test_qwen3(path: Any) -> None:
    model, config = build("Qwen3", head_dim=16, **SHARED)
    spec = GQA(32, 4, 2, 16, 16, rope_dim=16, qk_norm="head")
    compare(model, 0, load(gqa_torch.Layer(spec, path=path, eps=config.rms_norm_eps), model, 0))


@pytest.mark.parametrize(("layer", "reach"), [(0, Reach("window", 6)), (1, FULL)], ids=["window", "full"])
def test_gpt_oss(layer: int, reach: Reach) -> None:
    rope = {**YARN, "mscale": None, "mscale_all_dim": None, "truncate": False}
    model, _ = build(
        "GptOss",
        head_dim=8,
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention"],
        num_local_experts=2,
        num_experts_per_tok=1,
        rope_parameters=rope,
        max_position_embeddings=32,
        **SHARED,
    )
    rotary = Rotary(factor=4, original_max_position=8, beta_fast=4, truncate=False)
    spec = GQA(32, 4, 2, 8, 8, rope_dim=8, bias="qkvo", sinks=True)
    compare(model, layer, load(gqa_torch.Layer(spec, reach, rotary=rotary), model, layer))


@pytest.mark.parametrize("path", ["fast", "reference"])
@pytest.mark.parametrize(("layer", "reach"), [(0, Reach("window", 6)), (1, FULL)], ids=["window", "full"])
def test_gemma3(layer: int, reach: Reach, path: Any) -> None:
    rope = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
    }
    model, config = build(
        "Gemma3",
        "Text",
        head_dim=16,
        query_pre_attn_scalar=20,
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters=rope,
        **SHARED,
    )
    spec = GQA(32, 4, 2, 16, 16, rope_dim=16, qk_norm="head")
    rotary = Rotary(theta=1e6 if layer else 10000.0)
    ours = gqa_torch.Layer(spec, reach, path=path, rotary=rotary, softmax_scale=20**-0.5, eps=config.rms_norm_eps)
    # Gemma multiplies by 1 + w.
    compare(model, layer, load(ours, model, layer, norm_offset=1))


def test_minimax_m3() -> None:
    """Blocks of 4 tokens, of which an index head picks 3 for each KV head."""
    model, config = build(
        "MiniMaxM3VL",
        "Text",
        **SHARED,
        head_dim=8,
        dense_intermediate_size=16,
        layer_types=["full_attention", "minimax_m3_sparse"],
        mlp_layer_types=["dense", "dense"],
        index_n_heads=2,
        index_head_dim=8,
        index_block_size=4,
        index_topk_blocks=3,
        rope_parameters={"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5},
    )
    spec = IndexedGQA(32, 4, 2, 8, 8, 4, index_dim=8, block_size=4, blocks=3)
    ours = gqa_index_torch.Layer(spec, rotary=Rotary(theta=5e6), eps=config.rms_norm_eps)
    # Gemma's norms multiply by 1 + w.
    compare(model, 1, load(ours, model, 1, norm_offset=1))


LAYER_TYPES = ["sliding_attention", "full_attention"]
SHARING: dict[str, Any] = {
    **SHARED,
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": LAYER_TYPES * 2,
    "sliding_window": 6,
    "head_dim": 16,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
    },
}
SHARING_OF: dict[str, dict[str, Any]] = {
    "Gemma3n": {
        "intermediate_size": [16] * 4,
        "activation_sparsity_pattern": [0.0] * 4,
        "vocab_size_per_layer_input": 32,
        "hidden_size_per_layer_input": 8,
    },
    "Gemma4": {"global_head_dim": 24, "hidden_size_per_layer_input": 0},
}


@pytest.mark.parametrize("path", ["fast", "reference"])
@pytest.mark.parametrize("kind", [0, 1], ids=["window", "full"])
@pytest.mark.parametrize("name", SHARING_OF)
def test_a_layer_that_reads_the_cache_of_another(name: str, kind: int, path: Any) -> None:
    """Layers 2 and 3 have no K and V: they read those of layers 0 and 1."""
    model, config = build(name, "Text", **{**SHARING, **SHARING_OF[name]})
    d = 24 if name == "Gemma4" and kind == 1 else 16
    spec = GQA(32, 4, 2, d, d, rope_dim=d, qk_norm="head", v_norm=True)
    reach = FULL if kind else Reach("window", 6)
    options: dict[str, Any] = {"path": path, "softmax_scale": 1.0, "eps": config.rms_norm_eps}
    options["rotary"] = Rotary(theta=1e6 if kind else 10000.0)
    owner = load(gqa_torch.Layer(spec, reach, **options), model, kind)
    layer = load(gqa_torch.Layer(replace(spec, own_kv=False), reach, **options), model, kind + 2)
    (of_owner, first), (of_layer, expected) = theirs(model, kind), theirs(model, kind + 2)
    for splits in ((TOKENS,), (10, 7, 1, 1)):
        cache, out = Cache(lends=True), []
        with torch.no_grad():
            for x, y in zip(of_owner.split(splits, dim=1), of_layer.split(splits, dim=1), strict=True):
                out.append((owner(x, cache), layer(y, cache)))
        for got, wanted in zip(map(torch.cat, zip(*out, strict=True), (1, 1)), (first, expected), strict=True):
            assert (got - wanted).abs().max() < 1e-5 * wanted.abs().max()


@pytest.mark.parametrize("layer", [0, 1])
def test_gemma2_softcap(layer: int) -> None:
    model, _ = build(
        "Gemma2",
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=6,
        attn_logit_softcapping=2.0,
        layer_types=["sliding_attention", "full_attention"],
        **SHARED,
    )
    spec = GQA(32, 4, 2, 16, 16, rope_dim=16, logit_softcap=True)
    reach = FULL if layer else Reach("window", 6)
    compare(model, layer, load(gqa_torch.Layer(spec, reach, softcap=2.0), model, layer))


@pytest.mark.parametrize("form", MLA.forms)
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("yarn", [False, True], ids=["plain", "yarn"])
@pytest.mark.parametrize("q_lora_rank", [None, 20], ids=["no q-lora", "q-lora"])
def test_deepseek_v3(q_lora_rank: int | None, yarn: bool, bias: bool, form: str) -> None:
    options = {**MLA_SHARED, "q_lora_rank": q_lora_rank, "attention_bias": bias, "first_k_dense_replace": 2}
    if yarn:
        options |= {"rope_parameters": YARN, "max_position_embeddings": 32}
    model, _ = build("DeepseekV3", **options)
    rotary = Rotary(interleaved=True)
    if yarn:
        rotary = Rotary(
            interleaved=True, factor=4, original_max_position=8, beta_fast=4, mscale=0.7, mscale_all_dim=0.5
        )
    spec = MLA(32, 4, q_lora_rank, 16, 8, 4, 8, bias=bias)
    published = load(mla_torch.Layer(spec, form="expanded", rotary=rotary), model, 0)
    compare(model, 0, mla_torch.convert(published, form))


@pytest.mark.parametrize("form", MLA.forms)
@pytest.mark.parametrize("longrope", [False, True], ids=["plain", "longrope"])
def test_minicpm3(longrope: bool, form: str) -> None:
    options = dict(MLA_SHARED)
    rotary = Rotary()
    if longrope:
        rope = {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0, 1.5],
            "long_factor": [1.0, 1.5],
            "factor": 4.0,
            "original_max_position_embeddings": 8,
        }
        options |= {"rope_parameters": rope, "max_position_embeddings": 32}
        # sqrt(1 + ln(factor) / ln(original)), as LongRoPE has it: ln 4 / ln 8 = 2 / 3.
        rotary = Rotary(divisors=(1.0, 1.5), attention_factor=(1 + 2 / 3) ** 0.5)
    model, _ = build("MiniCPM3", **options)
    published = load(mla_torch.Layer(MLA(32, 4, 20, 16, 8, 4, 8), form="expanded", rotary=rotary), model, 0)
    compare(model, 0, mla_torch.convert(published, form))


DSA_SHARED: dict[str, Any] = {**MLA_SHARED, "index_n_heads": 6, "index_head_dim": 10, "index_topk": 5}
SPARSE = DSA(32, 4, 20, 16, 8, 4, 8, index_n_heads=6, index_head_dim=10, index_topk=5)


def sparse_steps(model: Any, layers: int, splits: tuple[int, ...]) -> tuple[Any, Any]:
    """What goes into the attention modules of the model and comes out, step by step with its own cache."""
    seen: list[tuple[Any, Any]] = [([], []) for _ in range(layers)]

    def look(layer: int) -> Any:
        def hook(_: Any, args: Any, kwargs: Any, out: Any) -> None:
            seen[layer][0].append(args[0] if args else kwargs["hidden_states"])
            seen[layer][1].append(out[0])

        return hook

    hooks = [model.layers[i].self_attn.register_forward_hook(look(i), with_kwargs=True) for i in range(layers)]
    torch.manual_seed(2)
    x, cache = torch.randn(BATCH, TOKENS, 32), transformers.DynamicCache(config=model.config)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for part in x.split(splits, dim=1):
            model(inputs_embeds=part, past_key_values=cache, use_cache=True)
    for hook in hooks:
        hook.remove()
    return seen, cache


@pytest.mark.parametrize("splits", [(TOKENS,), (10, 7, 1, 1)], ids=["prefill", "decode"])
@pytest.mark.parametrize("form", DSA.forms)
@pytest.mark.parametrize("path", ["fast", "reference"])
@pytest.mark.parametrize("yarn", [False, True], ids=["plain", "yarn"])
def test_deepseek_v3_2(yarn: bool, path: Any, form: str, splits: tuple[int, ...]) -> None:
    options, rotary = dict(DSA_SHARED), Rotary(interleaved=True)
    if yarn:
        options |= {"rope_parameters": YARN, "max_position_embeddings": 32}
        rotary = Rotary(
            interleaved=True, factor=4, original_max_position=8, beta_fast=4, mscale=0.7, mscale_all_dim=0.5
        )
    model, _ = build("DeepseekV32", first_k_dense_replace=2, **options)
    ours = mla_torch.convert(load(dsa_torch.Layer(SPARSE, form="expanded", path=path, rotary=rotary), model, 0), form)
    compare(model, 0, ours)
    (steps, *_), _ = sparse_steps(model, 2, splits)
    cache = Cache()
    with torch.no_grad():
        for x, expected in zip(*steps, strict=True):
            assert (ours(x, cache) - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize("splits", [(TOKENS,), (10, 7, 1, 1)], ids=["prefill", "decode"])
@pytest.mark.parametrize("path", ["fast", "reference"])
def test_glm_moe_dsa(path: Any, splits: tuple[int, ...]) -> None:
    kinds = ["full", "shared", "shared", "full"]
    options = {**DSA_SHARED, "num_hidden_layers": 4, "indexer_types": kinds, "first_k_dense_replace": 4}
    model, _ = build("GlmMoeDsa", mlp_layer_types=["dense"] * 4, **options)
    rotary = Rotary(interleaved=True)
    steps, theirs_kept = sparse_steps(model, 4, splits)
    caches, selections = [Cache() for _ in kinds], [None for _ in splits]
    for layer, kind in enumerate(kinds):
        spec = replace(SPARSE, own_indexer=kind == "full")
        form = "absorbed" if path == "fast" else "expanded"
        published = dsa_torch.Layer(spec, form="expanded", path=path, rotary=rotary, index_rotary=rotary)
        ours = mla_torch.convert(load(published, model, layer), form)
        for i, (x, expected) in enumerate(zip(*steps[layer], strict=True)):
            with torch.no_grad():
                got, selections[i] = ours.step(x, caches[layer], selections[i])
            assert (got - expected).abs().max() < 1e-5 * expected.abs().max()
        kept, own = theirs_kept.layers[layer], caches[layer].tensors
        assert (kept.keys.shape, kept.values.shape) == (own["c_kv"].shape, own["k_pe"].shape)
        assert ("index_k" in own) == (kind == "full")
        if kind == "full":
            # An interleaved rotation leaves the pairs as halves there: another order of the same values.
            key = own["index_k"].squeeze(1)[..., [0, 2, 1, 3, *range(4, 10)]]
            torch.testing.assert_close(key, kept.indexer_keys, rtol=1e-5, atol=1e-5)
