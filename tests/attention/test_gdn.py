"""Gated DeltaNet: golden values, the layer against its definition, and against Qwen3-Next and Qwen3.5."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
torch.set_num_threads(1)  # tiny tensors: two threads wait for each other longer than they compute

from attncalc import presets  # noqa: E402
from attncalc.attention.base import Step  # noqa: E402
from attncalc.attention.gdn import GDN  # noqa: E402
from attncalc.attention.gdn_torch import Layer  # noqa: E402
from attncalc.attention.kda import KDA  # noqa: E402
from attncalc.attention.kda_torch import Layer as KDALayer  # noqa: E402
from attncalc.attention.torch_base import Cache  # noqa: E402
from attncalc.dtypes import Formats  # noqa: E402
from attncalc.errors import AttncalcError  # noqa: E402
from attncalc.reach import FULL, Count  # noqa: E402
from attncalc.workload import Workload  # noqa: E402

NEXT = GDN(2048, 16, 32, 128, 128, 4)
TINY = GDN(20, 2, 6, 8, 4, 4, chunk_size=16)
FORMATS = Formats()


def by_name(spec: GDN, form: str, new: int, count: Count = "causal") -> Counter[str]:
    out = Counter[str]()
    for op in spec.ops(Step(Workload(new, new), FULL, count), form, cached=form).contractions:
        out[op.name] += op.flops
    return out


def filled(spec: GDN, form: str = "recurrent") -> Layer:
    layer = Layer(spec, form=form, dtype=torch.float64)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=0.5)
    return layer


def relative(got: Any, expected: Any) -> float:
    return float((got - expected).abs().max() / expected.abs().max())


def test_qwen3_next() -> None:
    """Qwen/Qwen3-Next-80B-A3B: D 2048, 16 q/k heads and 32 value heads x 128, kernel 4."""
    conv, state = (t.at(131_072, 1, FORMATS) for t in NEXT.cache(FULL, "recurrent"))
    # 2 * 16 * 128 + 32 * 128 = 8,192 channels x 3 columns x 2 bytes; 32 x 128 x 128 x 4 bytes.
    assert (conv.shape, conv.dtype, conv.bytes) == ((1, 1, 3, 8192), "bf16", 49_152)
    assert (state.shape, state.dtype, state.bytes) == ((1, 32, 128, 128), "fp32", 2_097_152)
    D, HK, HV, V = 2048, 16 * 128, 32, 128
    parameters = D * (2 * HK + 2 * HV * V) + 2 * D * HV + 4 * (2 * HK + HV * V) + 2 * HV + V + HV * V * D
    assert sum(w.elements for w in NEXT.weights("recurrent")) == parameters == 33_718_464
    assert NEXT.heads("chunked") == (16, None, 128, 128)
    decode = by_name(NEXT, "recurrent", 1)
    assert decode["conv"] == 2 * 4 * 8192
    assert decode["state_update"] == 6 * 128 * 128 * 32
    # What torch counted in one token of transformers' layer, which convolves two positions and has no product in its core.
    assert sum(decode.values()) - decode["state_update"] + decode["conv"] == 67_502_080
    # 6C^2K + 4C^2V + 6CKV for each value head and chunk of 64: 180,224 for each token and head.
    core = ("state_update", "chunk_kk", "chunk_qk", "chunk_w", "chunk_u", "chunk_value")
    dense = by_name(NEXT, "chunked", 640, "dense")
    assert sum(dense[name] for name in core) == 180_224 * 640 * 32


def test_shapes_have_the_names_of_qwen3_5() -> None:
    assert {w.name: w.sizes for w in GDN(512, 4, 16, 128, 64, 4).weights("")} == {
        "in_proj_qkv.weight": (2 * 4 * 128 + 16 * 64, 512),
        "in_proj_z.weight": (16 * 64, 512),
        "in_proj_b.weight": (16, 512),
        "in_proj_a.weight": (16, 512),
        "conv1d.weight": (2 * 4 * 128 + 16 * 64, 1, 4),
        "dt_bias": (16,),
        "A_log": (16,),
        "norm.weight": (64,),
        "out_proj.weight": (512, 16 * 64),
    }


def test_qwen3_5_at_128k() -> None:
    """10 attention layers of 2 KV heads x 256; 30 Gated DeltaNet layers of 49,152 + 2,097,152 bytes."""
    kept = presets.load("qwen3.5-35b-a3b").cache(131_072)
    assert kept.bytes_total == 10 * 131_072 * 2 * 2 * 256 * 2 + 30 * 2_146_304 == 2_684_354_560 + 64_389_120


@pytest.mark.parametrize(
    ("change", "where"),
    [({"num_v_heads": 24}, "num_v_heads"), ({"conv_kernel": -1}, "conv_kernel"), ({"head_k_dim": 0}, "head_k_dim")],
)
def test_dimensions_that_contradict_each_other(change: dict[str, Any], where: str) -> None:
    with pytest.raises(AttncalcError) as caught:
        replace(NEXT, **change)
    assert caught.value.where == where


def from_definition(made: Layer, x: Any) -> Any:
    """Every value head and token by itself: S_t = exp(g) (I - beta k k^T) S_{t-1} + beta k v^T."""
    spec, w = made.spec, dict(made.named_parameters())
    H, HV, K, V, W = spec.num_heads, spec.num_v_heads, spec.head_k_dim, spec.head_v_dim, spec.conv_kernel
    out = torch.zeros_like(x)
    for b, sequence in enumerate(x):
        raw = sequence @ w["in_proj_qkv.weight"].T
        states = [torch.zeros(K, V, dtype=x.dtype) for _ in range(HV)]
        for t, token in enumerate(sequence):
            mixed = raw[t]
            if W:
                taps = w["conv1d.weight"][:, 0]
                mixed = sum((taps[:, W - 1 - j] * raw[t - j] for j in range(W) if j <= t), torch.zeros_like(raw[0]))
                mixed = mixed * torch.sigmoid(mixed)
            q, k, v = mixed[: H * K], mixed[H * K : 2 * H * K], mixed[2 * H * K :]
            heads = []
            for i in range(HV):
                group = slice(i // (HV // H) * K, (i // (HV // H) + 1) * K)
                q_i, k_i = (a[group] / (a[group].square().sum() + 1e-6).sqrt() for a in (q, k))
                a_i = w["in_proj_a.weight"][i] @ token + w["dt_bias"][i]
                g = -w["A_log"][i].exp() * torch.log1p(a_i.exp())
                beta = torch.sigmoid(w["in_proj_b.weight"][i] @ token)
                move = g.exp() * (torch.eye(K, dtype=x.dtype) - beta * torch.outer(k_i, k_i))
                states[i] = move @ states[i] + beta * torch.outer(k_i, v[i * V : (i + 1) * V])
                o = states[i].T @ q_i / K**0.5
                o = o / (o.square().mean() + made.eps).sqrt() * w["norm.weight"]
                if spec.gate:
                    z = w["in_proj_z.weight"][i * V : (i + 1) * V] @ token
                    o = o * z * torch.sigmoid(z)
                heads.append(o)
            out[b, t] = w["out_proj.weight"] @ torch.cat(heads)
    return out


@pytest.mark.parametrize("form", GDN.forms)
@pytest.mark.parametrize("spec", [TINY, replace(TINY, conv_kernel=0, gate=False, chunk_size=5)], ids=["full", "bare"])
def test_equals_the_definition(spec: GDN, form: str) -> None:
    torch.manual_seed(0)
    made, x = filled(spec, form), torch.randn(2, 19, 20, dtype=torch.float64)
    with torch.no_grad():
        assert relative(made(x), from_definition(made, x)) < 1e-12


def test_is_kda_whose_channels_decay_alike() -> None:
    """KDA with a decay matrix of K equal rows for each head, and its sigmoid gate left out of both."""
    torch.manual_seed(1)
    spec = replace(TINY, gate=False)
    ours = filled(spec)
    theirs = KDALayer(KDA(20, 2, 6, 8, 4, 4, "full", gate="none", chunk_size=16), dtype=torch.float64)
    w = {name: parameter.detach() for name, parameter in ours.named_parameters()}
    channels = [2 * 8, 2 * 8, 6 * 4]
    state = {f"{n}_proj.weight": p for n, p in zip("qkv", torch.split(w["in_proj_qkv.weight"], channels), strict=True)}
    state |= {f"{n}_conv1d.weight": p for n, p in zip("qkv", torch.split(w["conv1d.weight"], channels), strict=True)}
    state |= {"f_proj.weight": w["in_proj_a.weight"].repeat_interleave(8, 0), "A_log": w["A_log"]}
    state |= {"dt_bias": w["dt_bias"].repeat_interleave(8), "b_proj.weight": w["in_proj_b.weight"]}
    theirs.load_state_dict(state | {"o_norm.weight": w["norm.weight"], "o_proj.weight": w["out_proj.weight"]})
    x = torch.randn(2, 23, 20, dtype=torch.float64)
    with torch.no_grad():
        assert relative(ours(x), theirs(x)) < 1e-12


def test_strong_decay_does_not_overflow() -> None:
    torch.manual_seed(2)
    spec = replace(TINY, chunk_size=64)
    made, chunked = filled(spec), Layer(spec, form="chunked", dtype=torch.float64)
    with torch.no_grad():
        made.get_parameter("dt_bias").fill_(20.0)
        made.get_parameter("A_log").fill_(2.0)
        chunked.load_state_dict(made.state_dict())
        x = torch.randn(1, 70, 20, dtype=torch.float64)
        assert relative(chunked(x), made(x)) < 1e-12


# Against transformers

SIZES: dict[str, Any] = {
    "hidden_size": 96,
    "num_hidden_layers": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "vocab_size": 64,
}
SPEC = GDN(96, 2, 6, 16, 8, 4)


def qwen3_next() -> tuple[Any, Any]:
    module = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next", reason="needs transformers")
    config = module.Qwen3NextConfig(**SIZES)
    return module.Qwen3NextGatedDeltaNet(config, 0), config


def qwen3_5() -> tuple[Any, Any]:
    module = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5", reason="needs transformers 5")
    config = module.Qwen3_5TextConfig(**SIZES)
    return module.Qwen3_5GatedDeltaNet(config, 0), config


def qwen3_5_moe() -> tuple[Any, Any]:
    module = pytest.importorskip("transformers.models.qwen3_5_moe.modeling_qwen3_5_moe", reason="needs transformers 5")
    config = module.Qwen3_5MoeTextConfig(**SIZES)
    return module.Qwen3_5MoeGatedDeltaNet(config, 0), config


def weights_of(theirs: Any) -> dict[str, Any]:
    """The parameters under our names; Qwen3-Next's rows are q, k, v, z of one q/k head after the other, and b, a."""
    weights = {name: parameter.detach() for name, parameter in theirs.named_parameters()}
    if "in_proj_qkvz.weight" not in weights:
        return weights
    H, G = SPEC.num_heads, SPEC.num_v_heads // SPEC.num_heads
    K, V, D = SPEC.head_k_dim, SPEC.head_v_dim, SPEC.hidden_size
    rows = weights.pop("in_proj_qkvz.weight").view(H, -1, D)
    q, k, v, z = (part.flatten(0, 1) for part in torch.split(rows, [K, K, G * V, G * V], dim=1))
    b, a = (part.flatten(0, 1) for part in weights.pop("in_proj_ba.weight").view(H, -1, D).chunk(2, dim=1))
    names = {"qkv": torch.cat((q, k, v)), "z": z, "b": b, "a": a}
    return weights | {f"in_proj_{name}.weight": value for name, value in names.items()}


@pytest.mark.parametrize("form", GDN.forms)
@pytest.mark.parametrize("made", [qwen3_next, qwen3_5, qwen3_5_moe], ids=lambda f: f.__name__)
def test_equals_transformers(made: Any, form: str) -> None:
    """Prefill, single tokens and a later prefill with the same weights, in float32."""
    theirs, config = made()
    cache_utils = pytest.importorskip("transformers.cache_utils")
    torch.manual_seed(6)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(std=0.2)
    ours = Layer(SPEC, form=form, eps=config.rms_norm_eps)
    ours.load_state_dict(weights_of(theirs))
    assert sum(p.numel() for p in theirs.parameters()) == sum(w.elements for w in SPEC.weights(form))
    their_cache, our_cache = cache_utils.DynamicCache(config=config), Cache()
    for length in (70, 1, 1, 66, 1):
        x = torch.randn(2, length, 96)
        with torch.no_grad():
            assert relative(ours(x, our_cache), theirs(x, cache=their_cache)) < 1e-5
    kept = their_cache.layers[0]
    # Theirs has a column more, and channels before columns.
    assert relative(our_cache.buffers["conv_state"][:, 0].mT, kept.conv_states[0][..., 1:]) < 1e-5
    assert relative(our_cache.buffers["recurrent_state"], kept.recurrent_states[0]) < 1e-5
