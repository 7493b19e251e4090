"""Mamba-2: golden values, the count against a loop, and the layer against its definition and transformers."""

from dataclasses import replace
from math import prod
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")

import torch
from torch import Tensor, nn

from attncalc.attention.base import Step
from attncalc.attention.mamba2 import Mamba2
from attncalc.attention.mamba2_torch import Layer
from attncalc.attention.torch_base import Cache, CountOperations
from attncalc.dtypes import Formats
from attncalc.errors import AttncalcError
from attncalc.ops import Contraction
from attncalc.reach import FULL, Count, Reach
from attncalc.workload import Workload
from tests.attention.common import by_name

torch.set_num_threads(1)

NEMOTRON = Mamba2(8192, 256, 64, 8, 256, chunk_size=128)
DEFAULT = Mamba2(4096, 128, 64, 8, 128)
ONE_GROUP = Mamba2(512, 12, 32, 1, 16, conv_kernel=1, conv_bias=False, bias=True, chunk_size=32)
SPECS = {"nemotron-h-56b": NEMOTRON, "default": DEFAULT, "one group": ONE_GROUP}
TINY = Mamba2(20, 6, 4, 2, 5, chunk_size=16)
FORMATS = Formats()
CORE = ("state_update", "chunk_qk", "chunk_value")


def products(
    spec: Mamba2, form: str, context: int, new: int, batch: int = 1, count: Count = "causal"
) -> list[Contraction]:
    step = Step(Workload(context, new, batch), FULL, count)
    return list(spec.ops(step, form, cached=form).contractions)


def total(spec: Mamba2, form: str, new: int, count: Count = "causal") -> int:
    return sum(op.flops for op in products(spec, form, new, new, count=count))


def randomised(module: nn.Module, std: float = 0.5) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=std)


def layer(spec: Mamba2, form: str = "recurrent", like: nn.Module | None = None, **options: object) -> Layer:
    made = Layer(spec, form=form, **options)  # type: ignore[arg-type]
    if like is not None:
        made.load_state_dict(like.state_dict())
    else:
        randomised(made)
    return made


def relative(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).abs().max() / expected.abs().max())


# The specification


def test_nemotron_h_56b() -> None:
    """nvidia/Nemotron-H-56B: D 8192, 256 heads x 64, 8 groups, state 256, kernel 4; 54 such layers."""
    conv, state = (t.at(131_072, 1, FORMATS) for t in NEMOTRON.cache(FULL, "recurrent"))
    assert (conv.shape, conv.bytes) == ((1, 1, 3, 20_480), 122_880)
    assert (state.shape, state.dtype, state.bytes) == ((1, 256, 64, 256), "fp32", 16_777_216)
    assert 54 * (conv.bytes + state.bytes) == 912_605_184
    D, inner, keys, H = 8192, 256 * 64, 2 * 8 * 256, 256
    parameters = sum(w.elements for w in NEMOTRON.weights("recurrent"))
    assert parameters == D * (2 * inner + keys + H) + 5 * (inner + keys) + 3 * H + inner + inner * D == 438_424_320
    decode = by_name(products(NEMOTRON, "recurrent", 131_072, 1))
    assert decode["conv"] == 2 * 4 * 20_480
    assert decode["state_update"] == 4 * 256 * 64 * 256


def test_chunks_of_256() -> None:
    """For each token and head 2C (N G / H + p) + 4 p N: C B^T is computed once for a group."""
    dense = by_name(products(DEFAULT, "chunked", 2560, 2560, count="dense"))
    C, N, G, H, p = 256, 128, 8, 128, 64
    assert sum(dense[name] for name in CORE) == 2560 * (2 * C * (N * G + p * H) + 4 * p * N * H)
    assert dense["chunk_qk"] == 2560 * 2 * C * N * G


def test_shapes() -> None:
    shapes = {w.name: w.sizes for w in ONE_GROUP.weights("recurrent")}
    assert shapes == {
        "in_proj.weight": (2 * 384 + 2 * 16 + 12, 512),
        "in_proj.bias": (2 * 384 + 2 * 16 + 12,),
        "conv1d.weight": (384 + 32, 1, 1),
        "dt_bias": (12,),
        "A_log": (12,),
        "D": (12,),
        "norm.weight": (384,),
        "out_proj.weight": (512, 384),
        "out_proj.bias": (512,),
    }
    (state,) = (t.at(7, 3, FORMATS) for t in ONE_GROUP.cache(FULL, "chunked"))
    assert state.shape == (3, 12, 32, 16)


def test_nothing_grows() -> None:
    for spec in SPECS.values():
        assert sum(t.elements_per_token for t in spec.cache(FULL, "recurrent")) == 0
        assert spec.with_kv_heads(8) is None
        assert spec.heads("recurrent") == (spec.num_heads, None, spec.state_size, spec.head_dim)
        assert [spec.default_form(Workload(9, n)) for n in (1, 2, 9)] == ["recurrent", "chunked", "chunked"]


@pytest.mark.parametrize(
    ("change", "where"),
    [({"n_groups": 3}, "n_groups"), ({"conv_kernel": 0}, "conv_kernel"), ({"chunk_size": 0}, "chunk_size")],
)
def test_dimensions_that_contradict_each_other(change: dict[str, int], where: str) -> None:
    with pytest.raises(AttncalcError) as caught:
        replace(NEMOTRON, **change)  # type: ignore[arg-type]
    assert caught.value.where == where


def test_a_form_it_does_not_have() -> None:
    with pytest.raises(AttncalcError):
        products(NEMOTRON, "absorbed", 4, 1)


def test_tensor_parallel() -> None:
    """Groups are split; where there are fewer than GPUs, each GPU has one, and its convolution state grows."""
    part = NEMOTRON.shard(4)
    assert (part.num_heads, part.n_groups) == (64, 2)
    assert total(part, "recurrent", 3) * 4 == total(NEMOTRON, "recurrent", 3)
    whole, one = (sum(t.at(1, 1, FORMATS).bytes for t in s.cache(FULL, "")) for s in (NEMOTRON, NEMOTRON.shard(8)))
    assert one * 8 == whole
    part = NEMOTRON.shard(32)
    assert (part.num_heads, part.n_groups) == (8, 1)
    # 8 heads x 64 and one group's B and C: 32 parts have 32 groups where the layer has 8.
    assert part.conv_channels == 8 * 64 + 2 * 256
    # 3 and 512 do not divide the heads; 12 would leave two groups' heads on one GPU.
    for spec, tp in ((NEMOTRON, 3), (NEMOTRON, 512), (replace(NEMOTRON, num_heads=240), 12)):
        with pytest.raises(AttncalcError):
            spec.shard(tp)
    assert ONE_GROUP.shard(12).n_groups == 1


@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=5), kernel=st.integers(1, 4))
def test_a_prompt_costs_the_sum_of_its_parts(lengths: list[int], kernel: int) -> None:
    spec = replace(TINY, conv_kernel=kernel)
    whole = sum(lengths)
    decode = sum(op.flops for i in range(whole) for op in products(spec, "recurrent", i + 1, 1))
    parts = sum(total(spec, "recurrent", n) for n in lengths)
    assert total(spec, "recurrent", whole) == parts == decode
    # Chunks begin at a step's first token: parts of whole chunks cost what the prompt costs.
    aligned = [n * spec.chunk_size for n in lengths]
    assert total(spec, "chunked", sum(aligned)) == sum(total(spec, "chunked", n) for n in aligned)


@given(new=st.integers(1, 50), size=st.integers(1, 20))
def test_chunked_core_equals_a_loop(new: int, size: int) -> None:
    """Causal counts the entries of the lower triangles that are not zero by definition, dense whole squares."""
    spec = replace(TINY, chunk_size=size)
    H, G, N, p = spec.num_heads, spec.n_groups, spec.state_size, spec.head_dim
    chunks = [min(size, new - start) for start in range(0, new, size)]
    lower = sum(1 for n in chunks for c in range(n) for i in range(n) if i <= c)
    found = by_name(products(spec, "chunked", new, new))
    expected = {"chunk_qk": G * lower * N, "chunk_value": H * lower * p, "state_update": 2 * H * new * p * N}
    assert {name: found[name] for name in CORE} == {name: 2 * n for name, n in expected.items()}
    step = Step(Workload(new, new))
    pairs = next(op for op in spec.ops(step, "chunked", cached="").rowwise if op.name == "decay_pairs")
    assert pairs.flops == 3 * H * lower
    found = by_name(products(spec, "chunked", new, new, count="dense"))
    rows = size * len(chunks)
    assert sum(found[name] for name in CORE) == rows * (2 * size * (G * N + H * p) + 4 * H * p * N)


@given(new=st.integers(1, 70), batch=st.integers(1, 4), count=st.sampled_from(["causal", "dense"]))
def test_the_state_is_read_and_written_once(new: int, batch: int, count: Count) -> None:
    for spec in SPECS.values():
        held = sum(t.at(new, batch, FORMATS).bytes for t in spec.cache(FULL, "recurrent"))
        for form in spec.forms:
            ops = products(spec, form, new, new, batch, count)
            assert sum(op.bytes(FORMATS)["cache"] for op in ops) == held
            assert sum(op.bytes(FORMATS)["cache_write"] for op in ops) == held
            matrices = [w for w in spec.weights(form) if w.name.endswith(("proj.weight", "conv1d.weight"))]
            assert sum(op.bytes(FORMATS)["weight"] for op in ops) == 2 * sum(w.elements for w in matrices)
            # Padding is computed, not stored.
            stored = products(spec, form, new, new, batch, "causal")
            assert [op.bytes(FORMATS) for op in ops] == [op.bytes(FORMATS) for op in stored]


@given(new=st.integers(1, 70))
def test_gemm_says_what_flops_say(new: int) -> None:
    for spec in SPECS.values():
        for form in spec.forms:
            for op in products(spec, form, new, new, 2, "dense"):
                assert 2 * prod(op.gemm.values()) == op.flops


# The layer at full size, without memory


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize(("form", "new"), [("recurrent", 1), ("recurrent", 5), ("chunked", 1), ("chunked", 300)])
def test_layer_is_the_specification(name: str, form: str, new: int) -> None:
    spec = SPECS[name]
    made = Layer(spec, form=form, device="meta", dtype=torch.bfloat16)
    assert {n: tuple(p.shape) for n, p in made.named_parameters()} == {w.name: w.sizes for w in spec.weights(form)}
    cache = Cache()
    for length in (new, 3):
        x = torch.empty(2, length, spec.hidden_size, device="meta", dtype=torch.bfloat16)
        with CountOperations() as counter:
            assert made(x, cache).shape == x.shape
        expected = by_name(products(spec, form, cache.length, length, 2, "dense"))
        assert counter.flops == expected
        assert counter.total == sum(expected.values())
        kept = {t.name: t.at(cache.length, 2, FORMATS) for t in spec.cache(FULL, form)}
        assert {n: tuple(t.shape) for n, t in cache.tensors.items()} == {n: t.shape for n, t in kept.items()}
        assert {n: t.nbytes for n, t in cache.tensors.items()} == {n: t.bytes for n, t in kept.items()}
    assert cache.length == new + 3


def test_a_reach_does_not_apply() -> None:
    with pytest.raises(ValueError, match="window 4"):
        Layer(TINY, Reach("window", 4))


# The layer against its definition


def from_definition(made: Layer, x: Tensor) -> Tensor:
    """Every head and token by itself, from all tokens before it: y_t = sum_i exp(sum of dt A) (C_t . B_i) dt_i x_i."""
    spec, w = made.spec, dict(made.named_parameters())
    H, G, p, N, W, inner = (
        spec.num_heads,
        spec.n_groups,
        spec.head_dim,
        spec.state_size,
        spec.conv_kernel,
        spec.inner_size,
    )
    zero = torch.zeros((), dtype=x.dtype)
    out = torch.zeros_like(x)
    for n, sequence in enumerate(x):
        projected = sequence @ w["in_proj.weight"].T + w.get("in_proj.bias", zero)
        z, raw, dt = projected[:, :inner], projected[:, inner:-H], projected[:, -H:]
        mixed = torch.zeros_like(raw)
        for t in range(raw.shape[0]):
            for j in range(min(W, t + 1)):
                mixed[t] += w["conv1d.weight"][:, 0, W - 1 - j] * raw[t - j]
        mixed = mixed + w.get("conv1d.bias", zero)
        mixed = mixed * torch.sigmoid(mixed)
        dt = torch.log1p((dt + w["dt_bias"]).exp())
        for t in range(raw.shape[0]):
            y = torch.zeros(inner, dtype=x.dtype)
            for i in range(H):
                keys, group = slice(i * p, (i + 1) * p), i // (H // G)
                b = mixed[:, inner + group * N : inner + (group + 1) * N]
                c = mixed[t, inner + (G + group) * N : inner + (G + group + 1) * N]
                for s in range(t + 1):
                    fade = (-w["A_log"][i].exp() * dt[s + 1 : t + 1, i].sum()).exp()
                    y[keys] += fade * (c @ b[s]) * dt[s, i] * mixed[s, keys]
                y[keys] += w["D"][i] * mixed[t, keys]
            y = (y * z[t] * torch.sigmoid(z[t])).view(G, -1)
            y = (y / (y.square().mean(1, keepdim=True) + made.eps).sqrt()).flatten() * w["norm.weight"]
            out[n, t] = w["out_proj.weight"] @ y + w.get("out_proj.bias", zero)
    return out


VARIATIONS = {
    "two groups": TINY,
    "one group, biases": replace(TINY, n_groups=1, bias=True, conv_bias=False),
    "a group for each head": replace(TINY, n_groups=6, conv_kernel=1, chunk_size=7),
    "long chunk": replace(TINY, chunk_size=40),
}


@pytest.mark.parametrize("name", VARIATIONS)
def test_every_form_equals_the_definition(name: str) -> None:
    torch.manual_seed(0)
    made = layer(VARIATIONS[name], dtype=torch.float64)
    x = torch.randn(2, 19, made.spec.hidden_size, dtype=torch.float64)
    with torch.no_grad():
        expected = from_definition(made, x)
        assert relative(made(x), expected) < 1e-12
        assert relative(layer(made.spec, "chunked", made, dtype=torch.float64)(x), expected) < 1e-12


@pytest.mark.parametrize("name", VARIATIONS)
@pytest.mark.parametrize("form", Mamba2.forms)
def test_steps_from_the_cache_equal_one_prefill(name: str, form: str) -> None:
    """Prefill, a longer and a shorter extension, then single tokens in the recurrent form, whatever came before."""
    torch.manual_seed(1)
    made = layer(VARIATIONS[name], form, dtype=torch.float64)
    step = layer(made.spec, "recurrent", made, dtype=torch.float64)
    x = torch.randn(2, 45, made.spec.hidden_size, dtype=torch.float64)
    cache = Cache()
    with torch.no_grad():
        parts = [made(part, cache) for part in torch.split(x[:, :40], [2, 21, 17], dim=1)]
        parts += [step(x[:, t : t + 1], cache) for t in range(40, 45)]
        assert relative(torch.cat(parts, dim=1), made(x)) < 1e-12
    assert cache.length == 45
    assert {t.dtype for t in cache.tensors.values()} == {torch.float64}


def test_the_cache_holds_no_more_than_it_says() -> None:
    made, cache = layer(TINY, "chunked"), Cache()
    with torch.no_grad():
        made(torch.randn(2, 33, 20), cache)
    held = sum(t.at(33, 2, Formats(conv="fp32")).bytes for t in TINY.cache(FULL, "chunked"))
    assert cache.storage_bytes == held


def test_strong_decay_does_not_overflow() -> None:
    torch.manual_seed(2)
    made = layer(replace(TINY, chunk_size=64))
    with torch.no_grad():
        made.get_parameter("dt_bias").fill_(20.0)
        made.get_parameter("A_log").fill_(2.0)
        x = torch.randn(1, 70, 20)
        expected = made(x)
        assert expected.isfinite().all()
        assert relative(layer(made.spec, "chunked", made)(x), expected) < 1e-4


# The layer against transformers


@pytest.mark.parametrize("form", Mamba2.forms)
@pytest.mark.parametrize("which", ["mamba2", "nemotron_h"])
def test_equals_transformers(which: str, form: str) -> None:
    """Prefill, single tokens and a later prefill with the same weights, in float32."""
    module = pytest.importorskip(f"transformers.models.{which}.modeling_{which}", reason="needs transformers 5.24")
    cache_utils = pytest.importorskip("transformers.cache_utils")
    if which == "mamba2":
        config = module.Mamba2Config(
            hidden_size=24, num_heads=6, head_dim=8, n_groups=2, state_size=10, chunk_size=16, num_hidden_layers=1
        )
        theirs = module.Mamba2Mixer(config, 0)
    else:
        config = module.NemotronHConfig(
            hidden_size=24,
            mamba_num_heads=6,
            mamba_head_dim=8,
            n_groups=2,
            ssm_state_size=10,
            chunk_size=16,
            layers_block_type=["linear_attention", "full_attention"],
            time_step_min=0.0,  # it clamps dt to this in prompts alone
        )
        theirs = module.NemotronHMamba2Mixer(config, 0)
    torch.manual_seed(3)
    randomised(theirs, 0.3)
    theirs.eval()
    spec = Mamba2(24, 6, 8, 2, 10, chunk_size=16)
    ours = layer(spec, form, theirs, eps=config.layer_norm_epsilon)
    assert sum(w.elements for w in spec.weights(form)) == sum(p.numel() for p in theirs.parameters())
    their_cache, our_cache = cache_utils.DynamicCache(config=config), Cache()
    for length in (37, 1, 1, 20, 1):
        x = torch.randn(2, length, 24)
        with torch.no_grad():
            assert relative(ours(x, our_cache), theirs(x, cache=their_cache)) < 1e-5
    kept = their_cache.layers[0]
    # Theirs has a column more, and channels before columns.
    assert relative(our_cache.buffers["conv_state"][:, 0].mT, kept.conv_states[0][..., 1:]) < 1e-5
    assert relative(our_cache.buffers["recurrent_state"], kept.recurrent_states[0]) < 1e-5


@pytest.mark.parametrize("form", Mamba2.forms)
@pytest.mark.parametrize("which", ["bamba", "granitemoehybrid", "zamba2"])
def test_equals_the_mixers_of_hybrids(which: str, form: str) -> None:
    """The same with the mixers of Bamba, Granite 4 and Zamba2, whose options change no shape."""
    module = pytest.importorskip(f"transformers.models.{which}.modeling_{which}", reason="needs transformers 5.24")
    cache_utils = pytest.importorskip("transformers.cache_utils")
    spec = Mamba2(24, 6, 8, 2, 10, chunk_size=16)
    names = {"bamba": "Bamba", "granitemoehybrid": "GraniteMoeHybrid", "zamba2": "Zamba2"}
    mixers = {"bamba": "BambaMixer", "granitemoehybrid": "GraniteMoeHybridMambaLayer", "zamba2": "Zamba2MambaMixer"}
    options: dict[str, Any] = {"hidden_size": 24, "num_attention_heads": 4, "mamba_d_state": 10, "mamba_expand": 2}
    if which == "zamba2":
        options |= {"n_mamba_heads": 6, "mamba_ngroups": 2, "chunk_size": 16, "num_hidden_layers": 2}
        options |= {"layers_block_type": ["mamba", "hybrid"], "time_step_min": 0.0}  # it clamps dt in prompts alone
    else:
        options |= {"mamba_n_heads": 6, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_chunk_size": 16}
        options |= {"num_hidden_layers": 2, "num_key_value_heads": 2}
        options |= {"attn_layer_indices": [1]} if which == "bamba" else {"layer_types": ["mamba", "attention"]}
    config = getattr(module, f"{names[which]}Config")(**options)
    theirs = getattr(module, mixers[which])(config, 0)
    torch.manual_seed(5)
    randomised(theirs, 0.3)
    theirs.eval()
    ours = layer(spec, form, theirs, eps=1e-5 if which == "zamba2" else config.rms_norm_eps)
    their_cache, our_cache = cache_utils.DynamicCache(config=config), Cache()
    for length in (37, 1, 1, 20, 1):
        x = torch.randn(2, length, 24)
        with torch.no_grad():
            assert relative(ours(x, our_cache), theirs(x, cache=their_cache)) < 1e-5
    kept = their_cache.layers[0]
    assert relative(our_cache.buffers["conv_state"][:, 0].mT, kept.conv_states[0][..., 1:]) < 1e-5
    assert relative(our_cache.buffers["recurrent_state"], kept.recurrent_states[0]) < 1e-5


@pytest.mark.parametrize("form", Mamba2.forms)
@pytest.mark.parametrize("groups", [1, 2])
def test_equals_falcon_h1(groups: int, form: str) -> None:
    """The same with the mixer of Falcon-H1, whose multipliers of z, x, B, C, dt and of the input join in_proj's rows.

    They are powers of two, so the product is exact; the mixer norms after the gate, by a mean for each group, as
    `mamba_rms_norm` has it and `mamba_norm_before_gate` has not.
    """
    module = pytest.importorskip("transformers.models.falcon_h1.modeling_falcon_h1", reason="needs transformers 5.24")
    cache_utils = pytest.importorskip("transformers.cache_utils")
    spec = Mamba2(24, 6, 8, groups, 10, chunk_size=16)
    config = module.FalconH1Config(
        hidden_size=spec.hidden_size,
        mamba_d_ssm=spec.inner_size,
        mamba_n_heads=spec.num_heads,
        mamba_d_head=spec.head_dim,
        mamba_n_groups=groups,
        mamba_d_state=spec.state_size,
        mamba_chunk_size=spec.chunk_size,
        mamba_rms_norm=True,
        mamba_norm_before_gate=False,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        ssm_in_multiplier=2.0,
        ssm_multipliers=[0.5, 0.25, 1.0, 2.0, 0.5],
    )
    theirs = module.FalconH1Mixer(config, 0)
    scale = module.compute_mup_vector(config)
    theirs.register_buffer("mup_vector", scale, persistent=False)  # as its decoder layer does
    torch.manual_seed(4)
    randomised(theirs, 0.3)
    theirs.eval()
    ours = layer(spec, form, theirs, eps=config.rms_norm_eps)
    with torch.no_grad():
        ours.get_parameter("in_proj.weight").mul_(scale.view(-1, 1) * config.ssm_in_multiplier)
    their_cache, our_cache = cache_utils.DynamicCache(config=config), Cache()
    for length in (37, 1, 1, 20, 1):
        x = torch.randn(2, length, spec.hidden_size)
        with torch.no_grad():
            assert relative(ours(x, our_cache), theirs(x, cache=their_cache)) < 1e-5
    kept = their_cache.layers[0]
    assert relative(our_cache.buffers["conv_state"][:, 0].mT, kept.conv_states[0][..., 1:]) < 1e-5
    assert relative(our_cache.buffers["recurrent_state"], kept.recurrent_states[0]) < 1e-5
