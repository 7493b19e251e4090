"""Mamba: golden values, and the layer against its definition and transformers."""

from dataclasses import replace
from math import prod
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")

import torch
from torch import Tensor, nn

from attncalc.attention.base import Step
from attncalc.attention.mamba import Mamba
from attncalc.attention.mamba_torch import Layer
from attncalc.attention.torch_base import Cache, CountOperations
from attncalc.dtypes import Formats
from attncalc.errors import AttncalcError
from attncalc.ops import Contraction
from attncalc.reach import FULL, Reach
from attncalc.workload import Workload
from tests.attention.common import by_name

torch.set_num_threads(1)

JAMBA = Mamba(4096, 8192, 16, 256, norms="rms")
PLAIN = Mamba(2560, 5120, 16, 160)
BARE = Mamba(64, 96, 8, 5, conv_kernel=1, conv_bias=False, bias=True)
SPECS = {"jamba": JAMBA, "mamba-2.8b": PLAIN, "bare": BARE}
TINY = Mamba(12, 10, 5, 3, norms="rms")
FORMATS = Formats()
Norms = Literal["none", "rms", "unweighted"]


def products(spec: Mamba, context: int, new: int, batch: int = 1) -> list[Contraction]:
    step = Step(Workload(context, new, batch))
    return list(spec.ops(step, "recurrent", cached="recurrent").contractions)


def randomised(module: nn.Module, std: float = 0.5) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=std)


def relative(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).abs().max() / expected.abs().max())


def test_jamba() -> None:
    """ai21labs/Jamba-v0.1: D 4096, inner 8192, state 16, kernel 4, dt of rank 256, norms on dt, B and C."""
    conv, state = (t.at(131_072, 1, FORMATS) for t in JAMBA.cache(FULL, "recurrent"))
    assert (conv.shape, conv.bytes) == ((1, 1, 3, 8192), 49_152)
    assert (state.shape, state.dtype, state.bytes) == ((1, 1, 8192, 16), "fp32", 524_288)
    D, inner, N, R = 4096, 8192, 16, 256
    projections = 3 * D * inner + inner * (R + 2 * N) + R * inner
    vectors = 5 * inner + inner + inner * N + inner + R + 2 * N
    assert sum(w.elements for w in JAMBA.weights("recurrent")) == projections + vectors == 105_308_448
    decode = by_name(products(JAMBA, 131_072, 1))
    assert decode["conv"] == 2 * 4 * 8192
    assert decode["state_update"] == 4 * 8192 * 16
    assert sum(decode.values()) == 2 * projections + decode["conv"] + decode["state_update"]


def test_norms_without_weights() -> None:
    """FalconMamba: no parameters, an operation less for each value."""
    plain, bare = replace(JAMBA, norms="none"), replace(JAMBA, norms="unweighted")
    assert bare.weights("") == plain.weights("") != JAMBA.weights("")
    values = 256 + 2 * 16
    counts = [
        sum(row.flops for row in spec.ops(Step(Workload(9)), "recurrent", cached="").rowwise)
        for spec in (plain, bare, JAMBA)
    ]
    assert (counts[1] - counts[0], counts[2] - counts[0]) == (3 * values, 4 * values)


def test_shapes() -> None:
    assert {w.name: w.sizes for w in BARE.weights("recurrent")} == {
        "in_proj.weight": (192, 64),
        "in_proj.bias": (192,),
        "conv1d.weight": (96, 1, 1),
        "x_proj.weight": (5 + 2 * 8, 96),
        "dt_proj.weight": (96, 5),
        "dt_proj.bias": (96,),
        "A_log": (96, 8),
        "D": (96,),
        "out_proj.weight": (64, 96),
        "out_proj.bias": (64,),
    }
    assert {w.name: w.kind for w in JAMBA.weights("") if len(w.sizes) > 1 and w.kind == "vector"} == {
        "conv1d.weight": "vector",
        "A_log": "vector",
    }


def test_nothing_grows_and_channels_split() -> None:
    assert sum(t.elements_per_token for t in JAMBA.cache(FULL, "recurrent")) == 0
    assert JAMBA.with_kv_heads(1) is None
    assert JAMBA.heads("recurrent") == (8192, None, 16, 1)
    assert [JAMBA.default_form(Workload(9, n)) for n in (1, 9)] == ["recurrent", "recurrent"]
    whole, one = (sum(t.at(1, 1, FORMATS).bytes for t in s.cache(FULL, "")) for s in (JAMBA, JAMBA.shard(8)))
    assert one * 8 == whole
    split = {w.name: w.sizes for w in JAMBA.shard(8).weights("")}
    replicated = {w.name for w in JAMBA.weights("") if split[w.name] == w.sizes}
    assert replicated == {"dt_layernorm.weight", "b_layernorm.weight", "c_layernorm.weight"}
    for refused in (
        lambda: JAMBA.shard(3),
        lambda: JAMBA.ops(Step(Workload(1)), "chunked", cached="recurrent"),
        lambda: replace(JAMBA, state_size=0),
    ):
        with pytest.raises(AttncalcError):
            refused()


@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=5), batch=st.integers(1, 3))
def test_a_prompt_costs_the_sum_of_its_parts(lengths: list[int], batch: int) -> None:
    whole = sum(lengths)
    for spec in (TINY, BARE):
        ops = products(spec, whole, whole, batch)
        cost = sum(op.flops for op in ops)
        assert cost == sum(op.flops for n in lengths for op in products(spec, whole, n, batch))
        assert cost == whole * sum(op.flops for op in products(spec, whole, 1, batch))
        held = sum(t.at(whole, batch, FORMATS).bytes for t in spec.cache(FULL, ""))
        assert sum(op.bytes(FORMATS)["cache"] for op in ops) == held
        assert sum(op.bytes(FORMATS)["cache_write"] for op in ops) == held
        read = [w for w in spec.weights("") if len(w.sizes) > 1]
        assert sum(op.bytes(FORMATS)["weight"] for op in ops) == 2 * sum(w.elements for w in read)
        assert all(2 * prod(op.gemm.values()) == op.flops for op in ops)


@pytest.mark.parametrize("name", SPECS)
def test_layer_is_the_specification(name: str) -> None:
    spec = SPECS[name]
    made = Layer(spec, device="meta", dtype=torch.bfloat16)
    assert {n: tuple(p.shape) for n, p in made.named_parameters()} == {w.name: w.sizes for w in spec.weights("")}
    cache = Cache()
    for new in (6, 1):
        x = torch.empty(2, new, spec.hidden_size, device="meta", dtype=torch.bfloat16)
        with CountOperations() as counter:
            assert made(x, cache).shape == x.shape
        expected = by_name(products(spec, cache.length, new, 2))
        assert counter.flops == expected
        assert counter.total == sum(expected.values())
        kept = {t.name: t.at(cache.length, 2, FORMATS) for t in spec.cache(FULL, "")}
        assert {n: tuple(t.shape) for n, t in cache.tensors.items()} == {n: t.shape for n, t in kept.items()}
        assert {n: t.nbytes for n, t in cache.tensors.items()} == {n: t.bytes for n, t in kept.items()}
    assert cache.storage_bytes == sum(t.bytes for t in kept.values())


def test_a_reach_does_not_apply() -> None:
    with pytest.raises(ValueError, match="window 4"):
        Layer(TINY, Reach("window", 4))


def from_definition(made: Layer, x: Tensor) -> Tensor:
    """Every channel and token by itself, from all tokens before it: y = sum_s C exp(A sum of dt) B_s dt_s x_s + D x."""
    spec, w = made.spec, dict(made.named_parameters())
    inner, N, R, W = spec.inner_size, spec.state_size, spec.dt_rank, spec.conv_kernel
    zero = torch.zeros((), dtype=x.dtype)

    def norm(name: str, values: Tensor) -> Tensor:
        if spec.norms == "none":
            return values
        scale = (values.square().mean(-1, keepdim=True) + made.eps).sqrt()
        return values / scale * (w[f"{name}_layernorm.weight"] if spec.norms == "rms" else 1)

    out = torch.zeros_like(x)
    for n, sequence in enumerate(x):
        projected = sequence @ w["in_proj.weight"].T + w.get("in_proj.bias", zero)
        raw, z = projected[:, :inner], projected[:, inner:]
        u = torch.zeros_like(raw)
        for t in range(raw.shape[0]):
            for j in range(min(W, t + 1)):
                u[t] += w["conv1d.weight"][:, 0, W - 1 - j] * raw[t - j]
        u = u + w.get("conv1d.bias", zero)
        u = u * torch.sigmoid(u)
        low = u @ w["x_proj.weight"].T
        dt, b, c = norm("dt", low[:, :R]), norm("b", low[:, R : R + N]), norm("c", low[:, R + N :])
        dt = torch.log1p((dt @ w["dt_proj.weight"].T + w["dt_proj.bias"]).exp())
        for t in range(raw.shape[0]):
            y = w["D"] * u[t]
            for s in range(t + 1):
                fade = (-w["A_log"].exp() * dt[s + 1 : t + 1].sum(0)[:, None]).exp()
                y = y + (fade * c[t] * b[s]).sum(1) * dt[s] * u[s]
            out[n, t] = w["out_proj.weight"] @ (y * z[t] * torch.sigmoid(z[t])) + w.get("out_proj.bias", zero)
    return out


VARIATIONS = {
    "norms": TINY,
    "plain": replace(TINY, norms="none"),
    "norms without weights": replace(TINY, norms="unweighted"),
    "bare": replace(TINY, conv_kernel=1, conv_bias=False, bias=True),
}


@pytest.mark.parametrize("name", VARIATIONS)
def test_layer_equals_the_definition(name: str) -> None:
    torch.manual_seed(0)
    made, x = Layer(VARIATIONS[name], dtype=torch.float64), torch.randn(2, 17, 12, dtype=torch.float64)
    randomised(made)
    with torch.no_grad():
        assert relative(made(x), from_definition(made, x)) < 1e-12


@pytest.mark.parametrize("name", VARIATIONS)
def test_steps_from_the_cache_equal_one_prefill(name: str) -> None:
    torch.manual_seed(1)
    made, x, cache = Layer(VARIATIONS[name], dtype=torch.float64), torch.randn(2, 14, 12, dtype=torch.float64), Cache()
    randomised(made)
    with torch.no_grad():
        parts = [made(part, cache) for part in torch.split(x, [6, 2, 3, 1, 1, 1], dim=1)]
        assert relative(torch.cat(parts, dim=1), made(x)) < 1e-12
    assert cache.length == 14
    assert {t.dtype for t in cache.tensors.values()} == {torch.float64}


@pytest.mark.parametrize("which", ["jamba", "mamba", "falcon_mamba"])
def test_equals_transformers(which: str) -> None:
    """Prefill, single tokens and a later prefill with the same weights, in float32.

    Mamba's mixers take no step of several tokens after the first.
    """
    module = pytest.importorskip(f"transformers.models.{which}.modeling_{which}", reason="needs transformers 5.24")
    cache_utils = pytest.importorskip("transformers.cache_utils")
    if which == "jamba":
        config = module.JambaConfig(
            hidden_size=24, mamba_d_state=7, mamba_expand=2, mamba_dt_rank=5, num_hidden_layers=8, num_attention_heads=4
        )
        theirs, eps = module.JambaMambaMixer(config, 0), config.rms_norm_eps
    else:
        name = {"mamba": "Mamba", "falcon_mamba": "FalconMamba"}[which]
        sizes = {"hidden_size": 24, "state_size": 7, "time_step_rank": 5, "num_hidden_layers": 1}
        config = getattr(module, f"{name}Config")(**sizes)
        theirs, eps = getattr(module, f"{name}Mixer")(config, 0, initialize_mixer_weights=False), 1e-6
    torch.manual_seed(2)
    randomised(theirs, 0.3)
    theirs.eval()
    norms: Norms = {"jamba": "rms", "mamba": "none", "falcon_mamba": "unweighted"}[which]  # type: ignore[assignment]
    spec = Mamba(24, 48, 7, 5, norms=norms)
    ours = Layer(spec, eps=eps)
    ours.load_state_dict(theirs.state_dict())
    assert sum(w.elements for w in spec.weights("")) == sum(p.numel() for p in theirs.parameters())
    their_cache, our_cache = cache_utils.DynamicCache(config=config), Cache()
    for length in (19, 1, 1, 1):
        x = torch.randn(2, length, 24)
        with torch.no_grad():
            assert relative(ours(x, our_cache), theirs(x, cache=their_cache)) < 1e-5
    kept = their_cache.layers[0]
    # Theirs has a column more, and channels before columns.
    assert relative(our_cache.buffers["conv_state"][:, 0].mT, kept.conv_states[0][..., 1:]) < 1e-5
    assert relative(our_cache.buffers["recurrent_state"][:, 0], kept.recurrent_states[0]) < 1e-5
