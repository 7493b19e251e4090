"""Kimi Delta Attention: golden values, the count against a loop, and the layer against its definition."""

import json
from dataclasses import replace
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")

import torch
from torch import Tensor, nn

from attncalc.attention.base import Step
from attncalc.attention.kda import KDA
from attncalc.attention.kda_torch import Layer
from attncalc.attention.mla import MLA
from attncalc.attention.mla_torch import Layer as MLALayer
from attncalc.attention.state_torch import delta_recurrent
from attncalc.attention.torch_base import Cache, CountOperations
from attncalc.cli import run
from attncalc.dtypes import Formats
from attncalc.errors import AttncalcError
from attncalc.ops import Contraction
from attncalc.reach import FULL, Count, Reach
from attncalc.workload import Workload
from tests.attention.common import by_name

KIMI = KDA(2304, 32, 32, 128, 128, 4, "low_rank", 128, "low_rank", 128)
K3 = KDA(7168, 96, 96, 128, 128, 4, "low_rank", 128, "full", lower_bound=True)
# Full-rank decay, no convolution, no gate, four value heads for each q/k head.
GROUPED = KDA(512, 4, 16, 128, 64, 0, "full", None, "none", chunk_size=32)
BIASED = KDA(96, 2, 6, 16, 8, 1, "full", None, "low_rank", 8, gate_bias=True, chunk_size=16)
SPECS = {"kimi": KIMI, "k3": K3, "grouped": GROUPED, "biased": BIASED}
TINY = KDA(20, 2, 6, 8, 4, 4, "low_rank", 5, "low_rank", 3, gate_bias=True, chunk_size=16)
FORMATS = Formats()
CORE = ("state_update", "chunk_kk", "chunk_qk", "chunk_w", "chunk_u", "chunk_value")


def products(
    spec: KDA, form: str, context: int, new: int, batch: int = 1, count: Count = "causal"
) -> list[Contraction]:
    step = Step(Workload(context, new, batch), FULL, count)
    return list(spec.ops(step, form, cached=form).contractions)


def total(spec: KDA, form: str, new: int, count: Count = "causal") -> int:
    return sum(op.flops for op in products(spec, form, new, new, count=count))


def layer(spec: KDA, form: str = "recurrent", like: nn.Module | None = None, **options: object) -> Layer:
    made = Layer(spec, form=form, **options)  # type: ignore[arg-type]
    if like is not None:
        made.load_state_dict(like.state_dict())
        return made
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(std=0.5)
    return made


def relative(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).abs().max() / expected.abs().max())


# The specification


def test_kimi_linear() -> None:
    """arXiv 2510.26692, moonshotai/Kimi-Linear-48B-A3B: D 2304, 32 heads x 128, kernel 4, rank 128."""
    conv, state = (t.at(131_072, 1, FORMATS) for t in KIMI.cache(FULL, "recurrent"))
    assert (conv.shape, conv.bytes) == ((1, 1, 3, 12_288), 73_728)
    assert (state.shape, state.dtype, state.bytes) == ((1, 32, 128, 128), "fp32", 2_097_152)
    D, P, d = 2304, 32 * 128, 128
    parameters = sum(w.elements for w in KIMI.weights("recurrent"))
    assert parameters == 4 * D * P + 2 * (D * d + d * P) + D * 32 + 3 * 4 * P + 32 + P + d == 39_514_272
    decode = by_name(products(KIMI, "recurrent", 131_072, 1))
    assert decode["conv"] == 2 * 4 * 12_288
    assert decode["state_update"] == 6 * 128 * 128 * 32
    # 6C^2K + 4C^2V + 6CKV for each head and chunk of 64: 180,224 for each token and head.
    dense = by_name(products(KIMI, "chunked", 640, 640, count="dense"))
    assert sum(dense[name] for name in CORE) == 180_224 * 640 * 32


CONVENTIONS = {
    # For each head and token, d = 128 and C = 64: 6d^2 + 3Cd + C^2; 6KV; 6CK + 4CV + 6KV; 8KV; 6KV.
    "core of a prompt, paper": 126_976 * 640 * 32,
    "core of a prompt, FlashInfer": 98_304 * 640 * 32,
    "core of a prompt, dense": 180_224 * 640 * 32,
    # 10 chunks: 2016 pairs of 2K, 2080 of 4K + 4V; and 6KV for each token.
    "core of a prompt, causal": 32 * (10 * (2016 * 256 + 2080 * 1024) + 640 * 98_304),
    "core of a token, FlashInfer": 131_072 * 32,
    "core of a token": 98_304 * 32,
}


def test_conventions_of_the_core() -> None:
    for new, batch in ((640, 1), (1, 1), (1, 3)):
        found = KIMI.core_counts(Workload(640, new, batch))
        assert {c.name: c.flops for c in found} == {name: batch * flops for name, flops in CONVENTIONS.items()}
        assert len({c.source for c in found}) == 3


@given(context=st.integers(1, 200), new=st.integers(1, 200), batch=st.integers(1, 3))
def test_conventions_are_their_formulas_and_the_products_that_are_counted(context: int, new: int, batch: int) -> None:
    for spec in SPECS.values():
        workload = Workload(max(context, new), new, batch)
        found = {c.name: c for c in spec.core_counts(workload)}
        assert ("core of a prompt, paper" in found) == (spec.head_k_dim == spec.head_v_dim)
        for c in found.values():
            assert eval(c.formula, {"__builtins__": {}}, dict(c.symbols)) == c.flops
        tokens = new if new > 1 else workload.context
        counts: tuple[Count, ...] = ("dense", "causal")
        for count in counts:
            ops = by_name(products(spec, "chunked", tokens, tokens, batch, count))
            assert found[f"core of a prompt, {count}"].flops == sum(ops[name] for name in CORE)
        assert found["core of a token"].flops == by_name(products(spec, "recurrent", 9, 1, batch))["state_update"]


def test_explain_lists_the_conventions(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["explain", "kimi-linear-48b-a3b", "-c", "640", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["results"]
    found = [r for r in rows if r["of"].endswith("its core by every convention")]
    assert {r["name"]: r["result"] for r in found} == CONVENTIONS
    assert run(["explain", "kda", "-c", "640"]) == 0
    text = capsys.readouterr().out
    for name in ("Kimi Linear (arXiv 2510.26692)", "FlashInfer", "core of a prompt, causal"):
        assert name in text


def test_shapes_of_grouped_values() -> None:
    """The projections of grouped value attention: q, k [H*K, D]; v, decay over HV heads; beta [HV, D]; o [D, HV*V]."""
    shapes = {w.name: w.sizes for w in GROUPED.weights("recurrent")}
    assert shapes == {
        "q_proj.weight": (4 * 128, 512),
        "k_proj.weight": (4 * 128, 512),
        "v_proj.weight": (16 * 64, 512),
        "f_proj.weight": (16 * 128, 512),
        "A_log": (16,),
        "dt_bias": (16 * 128,),
        "b_proj.weight": (16, 512),
        "o_norm.weight": (64,),
        "o_proj.weight": (512, 16 * 64),
    }
    (state,) = (t.at(7, 3, FORMATS) for t in GROUPED.cache(FULL, "chunked"))
    assert state.shape == (3, 16, 128, 64)


def test_nothing_grows() -> None:
    for spec in SPECS.values():
        assert sum(t.elements_per_token for t in spec.cache(FULL, "recurrent")) == 0
        assert spec.with_kv_heads(8) is None
        assert spec.heads("recurrent").kv_heads is None
        assert [spec.default_form(Workload(9, n)) for n in (1, 2, 9)] == ["recurrent", "chunked", "chunked"]


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"num_v_heads": 48}, "num_v_heads"),
        ({"decay_rank": None}, "decay_rank"),
        ({"decay": "full"}, "decay_rank"),
        ({"gate": "none"}, "gate_rank"),
        ({"gate": "none", "gate_rank": None, "gate_bias": True}, "gate_bias"),
        ({"conv_kernel": -1}, "conv_kernel"),
        ({"chunk_size": 0}, "chunk_size"),
    ],
)
def test_dimensions_that_contradict_each_other(change: dict[str, object], where: str) -> None:
    with pytest.raises(AttncalcError) as caught:
        replace(KIMI, **change)  # type: ignore[arg-type]
    assert caught.value.where == where


def test_a_form_it_does_not_have() -> None:
    with pytest.raises(AttncalcError):
        products(KIMI, "absorbed", 4, 1)


def test_tensor_parallel() -> None:
    part = GROUPED.shard(4)
    assert (part.num_heads, part.num_v_heads) == (1, 4)
    assert total(part, "recurrent", 3) * 4 == total(GROUPED, "recurrent", 3)
    whole, one = (sum(t.at(1, 1, FORMATS).bytes for t in s.cache(FULL, "recurrent")) for s in (KIMI, KIMI.shard(32)))
    assert one * 32 == whole
    split = {w.name: w.sizes for w in KIMI.shard(8).weights("")}
    replicated = {w.name for w in KIMI.weights("") if split[w.name] == w.sizes}
    assert replicated == {"f_a_proj.weight", "g_a_proj.weight", "o_norm.weight"}
    # 8 divides the 16 value heads of GROUPED, but not its 4 q/k heads.
    for spec, tp in ((KIMI, 3), (KIMI, 64), (GROUPED, 8)):
        with pytest.raises(AttncalcError):
            spec.shard(tp)


@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=5), kernel=st.integers(0, 4))
def test_a_prompt_costs_the_sum_of_its_parts(lengths: list[int], kernel: int) -> None:
    spec = replace(TINY, conv_kernel=kernel)
    whole = sum(lengths)
    decode = sum(op.flops for i in range(whole) for op in products(spec, "recurrent", i + 1, 1))
    parts = sum(total(spec, "recurrent", n) for n in lengths)
    assert total(spec, "recurrent", whole) == parts == decode
    # Chunks begin at a step's first token: parts of whole chunks cost what the prompt costs, and only the rest differs.
    aligned = [n * spec.chunk_size for n in lengths]
    assert total(spec, "chunked", sum(aligned)) == sum(total(spec, "chunked", n) for n in aligned)


@given(new=st.integers(1, 50), size=st.integers(1, 20))
def test_chunked_core_equals_a_loop(new: int, size: int) -> None:
    """Causal counts the entries of the lower triangles that are not zero by definition, dense whole squares."""
    spec = replace(TINY, chunk_size=size)
    HV, K, V = spec.num_v_heads, spec.head_k_dim, spec.head_v_dim
    chunks = [min(size, new - start) for start in range(0, new, size)]
    strict = sum(1 for n in chunks for c in range(n) for i in range(n) if i < c)
    lower = sum(1 for n in chunks for c in range(n) for i in range(n) if i <= c)
    triples = sum(1 for n in chunks for c in range(n) for m in range(c) for i in range(m))
    found = by_name(products(spec, "chunked", new, new))
    expected = {"chunk_kk": strict * K, "chunk_qk": lower * K, "chunk_w": lower * K}
    expected |= {"chunk_u": lower * V, "chunk_value": lower * V, "state_update": 3 * new * K * V}
    assert {name: found[name] for name in CORE} == {name: 2 * HV * n for name, n in expected.items()}
    step = Step(Workload(new, new))
    inverse = next(op for op in spec.ops(step, "chunked", cached="").rowwise if op.name == "triangular_inverse")
    assert inverse.flops == 2 * HV * triples
    found = by_name(products(spec, "chunked", new, new, count="dense"))
    C, rows = size, size * len(chunks)
    assert (
        sum(found[name] for name in CORE) == HV * len(chunks) * (6 * C * C * K + 4 * C * C * V) + HV * rows * 6 * K * V
    )


@given(new=st.integers(1, 70), batch=st.integers(1, 4), count=st.sampled_from(["causal", "dense"]))
def test_the_state_is_read_and_written_once(new: int, batch: int, count: Count) -> None:
    for spec in SPECS.values():
        held = sum(t.at(new, batch, FORMATS).bytes for t in spec.cache(FULL, "recurrent"))
        for form in spec.forms:
            ops = products(spec, form, new, new, batch, count)
            assert sum(op.bytes(FORMATS)["cache"] for op in ops) == held
            assert sum(op.bytes(FORMATS)["cache_write"] for op in ops) == held
            matrices = [w for w in spec.weights(form) if "proj.weight" in w.name or "conv1d" in w.name]
            assert sum(op.bytes(FORMATS)["weight"] for op in ops) == 2 * sum(w.elements for w in matrices)
            # Padding is computed, not stored.
            stored = products(spec, form, new, new, batch, "causal")
            assert [op.bytes(FORMATS) for op in ops] == [op.bytes(FORMATS) for op in stored]


@given(new=st.integers(1, 70))
def test_gemm_and_formula_say_what_flops_say(new: int) -> None:
    for spec in SPECS.values():
        for form in spec.forms:
            for op in products(spec, form, new, new, 2, "dense"):
                assert 2 * prod(op.gemm.values()) == op.flops
            for op in products(spec, form, new, new, 2):
                factors = [f.strip("()") for f in op.formula.split(" * ")] if "(" not in op.formula else []
                if factors and len(op.symbols) == len(factors) - 1:
                    assert 2 * prod(op.symbols[f] for f in factors[1:]) == op.flops


# The layer at full size, without memory


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize(("form", "new"), [("recurrent", 1), ("recurrent", 5), ("chunked", 1), ("chunked", 150)])
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
        assert {t.dtype for n, t in cache.tensors.items() if n == "recurrent_state"} == {torch.float32}
    assert cache.length == new + 3


def test_a_reach_does_not_apply() -> None:
    with pytest.raises(ValueError, match="window 4"):
        Layer(TINY, Reach("window", 4))


# The layer against its definition


def from_definition(made: Layer, x: Tensor) -> Tensor:
    """Every value head and token by itself: S_t = (I - beta k k^T) Diag(exp g) S_{t-1} + beta k v^T."""
    spec, w = made.spec, dict(made.named_parameters())
    H, HV, K, V, W = spec.num_heads, spec.num_v_heads, spec.head_k_dim, spec.head_v_dim, spec.conv_kernel
    out = torch.zeros_like(x)

    def convolved(name: str, sequence: Tensor, t: int) -> Tensor:
        raw = sequence @ w[f"{name}_proj.weight"].T
        if not W:
            return raw[t]
        taps = w[f"{name}_conv1d.weight"][:, 0]
        mixed = sum((taps[:, W - 1 - j] * raw[t - j] for j in range(W) if j <= t), torch.zeros_like(raw[0]))
        return mixed * torch.sigmoid(mixed)

    for b, sequence in enumerate(x):
        states = [torch.zeros(K, V, dtype=x.dtype) for _ in range(HV)]
        for t, token in enumerate(sequence):
            q, k, v = (convolved(name, sequence, t) for name in "qkv")
            if spec.decay == "low_rank":
                f = w["f_b_proj.weight"] @ (w["f_a_proj.weight"] @ token)
            else:
                f = w["f_proj.weight"] @ token
            f = f + w["dt_bias"]
            heads = []
            for i in range(HV):
                qk = slice(i // (HV // H) * K, (i // (HV // H) + 1) * K)
                q_i, k_i = (a[qk] / (a[qk].square().sum() + 1e-6).sqrt() for a in (q, k))
                rate, f_i = w["A_log"][i].exp(), f[i * K : (i + 1) * K]
                g = -5 * torch.sigmoid(rate * f_i) if spec.lower_bound else -rate * torch.log1p(f_i.exp())
                beta = torch.sigmoid(w["b_proj.weight"][i] @ token)
                move = (torch.eye(K, dtype=x.dtype) - beta * torch.outer(k_i, k_i)) @ torch.diag(g.exp())
                states[i] = move @ states[i] + beta * torch.outer(k_i, v[i * V : (i + 1) * V])
                o = states[i].T @ q_i / K**0.5
                heads.append(o / (o.square().mean() + made.eps).sqrt() * w["o_norm.weight"])
            joined = torch.cat(heads)
            if spec.gate == "low_rank":
                joined = joined * torch.sigmoid(
                    w["g_b_proj.weight"] @ (w["g_a_proj.weight"] @ token) + w.get("g_b_proj.bias", torch.zeros(()))
                )
            elif spec.gate == "full":
                joined = joined * torch.sigmoid(w["g_proj.weight"] @ token)
            out[b, t] = w["o_proj.weight"] @ joined
    return out


VARIATIONS = {
    "low rank": TINY,
    "equal heads": replace(TINY, num_heads=3, num_v_heads=3),
    "full": replace(TINY, decay="full", decay_rank=None, gate="full", gate_rank=None, gate_bias=False),
    "bare": replace(TINY, conv_kernel=0, gate="none", gate_rank=None, gate_bias=False, chunk_size=7),
    "bounded": replace(TINY, conv_kernel=1, lower_bound=True),
    "long chunk": replace(TINY, chunk_size=40),
}


@pytest.mark.parametrize("name", VARIATIONS)
def test_every_form_equals_the_definition(name: str) -> None:
    torch.manual_seed(0)
    made = layer(VARIATIONS[name], dtype=torch.float64)
    x = torch.randn(2, 37, made.spec.hidden_size, dtype=torch.float64)
    with torch.no_grad():
        expected = from_definition(made, x)
        assert relative(made(x), expected) < 1e-12
        for path in Layer.paths(made.spec):
            assert relative(layer(made.spec, "chunked", made, path=path, dtype=torch.float64)(x), expected) < 1e-12


@pytest.mark.parametrize("name", VARIATIONS)
@pytest.mark.parametrize("form", KDA.forms)
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
    """A channel that forgets everything in one token: exp of the negative sum alone would be infinite."""
    torch.manual_seed(2)
    spec = replace(TINY, chunk_size=64)
    made = layer(spec)
    with torch.no_grad():
        made.get_parameter("dt_bias").fill_(20.0)
        made.get_parameter("A_log").fill_(2.0)
        x = torch.randn(1, 70, 20)
        expected = made(x)
        assert expected.isfinite().all()
        for path in Layer.paths(spec):
            assert relative(layer(spec, "chunked", made, path=path)(x), expected) < 1e-4


def core_inputs(heads: int, width: int, tokens: int = 9) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64)

    q, k = (nn.functional.normalize(normal(2, heads, tokens, width), dim=-1) for _ in "qk")
    g, beta = -normal(2, heads, tokens, width).exp(), torch.sigmoid(normal(2, heads, tokens))
    return q, k, normal(2, heads, tokens, 4), g, beta, normal(2, heads, width, 4)


def test_one_decay_for_a_head_is_the_gated_delta_rule() -> None:
    """Gated DeltaNet (arXiv 2412.06464): S_t = a_t (I - beta k k^T) S_{t-1} + beta k v^T.

    With a decay for each channel the order of the two factors matters.
    """
    q, k, v, g, beta, start = core_inputs(3, 8)

    def gated_delta(g: Tensor) -> Tensor:
        state, out = start, []
        for t in range(q.shape[2]):
            move = torch.eye(8, dtype=q.dtype) - beta[:, :, t, None, None] * k[:, :, t, :, None] * k[:, :, t, None]
            written = beta[:, :, t, None, None] * k[:, :, t, :, None] * v[:, :, t, None]
            state = g[:, :, t, :, None].exp() * (move @ state) + written
            out.append((q[:, :, t, None] @ state).squeeze(2))
        return torch.stack(out, dim=2)

    same = g[..., :1].expand_as(g)
    assert relative(delta_recurrent(q, k, v, same, beta, start)[0], gated_delta(same)) < 1e-12
    assert relative(delta_recurrent(q, k, v, g, beta, start)[0], gated_delta(g)) > 1e-2


def test_gradient_of_repetition_is_the_sum_over_the_group() -> None:
    """q [H, K] is scaled by K^-1/2 and repeated to HV heads: its gradient is K^-1/2 times the sum over each group."""
    group, width = 3, 8
    _, _, v, g, beta, start = core_inputs(2 * group, width)
    q, k = (a.requires_grad_() for a in core_inputs(2, width)[:2])
    q_repeated = (q * width**-0.5).repeat_interleave(group, dim=1)
    k_repeated = k.repeat_interleave(group, dim=1)
    for repeated in (q_repeated, k_repeated):
        repeated.retain_grad()
    delta_recurrent(q_repeated, k_repeated, v, g, beta, start)[0].square().sum().backward()
    for one, repeated, scale in ((q, q_repeated, width**-0.5), (k, k_repeated, 1.0)):
        assert one.grad is not None
        assert repeated.grad is not None
        grouped = repeated.grad.view(2, 2, group, -1, width)
        assert relative(one.grad, grouped.sum(2) * scale) < 1e-12
        assert relative(one.grad, grouped.mean(2) * scale) > 0.1


@pytest.mark.parametrize("form", KDA.forms)
def test_shared_heads_learn_the_sum_of_what_separate_heads_would(form: str) -> None:
    """A layer of HV value heads on H q/k heads against one of HV on HV whose q/k weights are copies."""
    torch.manual_seed(4)
    group = TINY.num_v_heads // TINY.num_heads
    shared = layer(TINY, form, dtype=torch.float64)
    apart = Layer(replace(TINY, num_heads=TINY.num_v_heads), form=form, dtype=torch.float64)

    def copies(name: str, value: Tensor) -> Tensor:
        if name[:2] not in ("q_", "k_"):
            return value
        return value.view(TINY.num_heads, -1, *value.shape[1:]).repeat_interleave(group, dim=0).flatten(0, 1)

    apart.load_state_dict({name: copies(name, value) for name, value in shared.state_dict().items()})
    x = torch.randn(2, 19, 20, dtype=torch.float64)
    for made in (shared, apart):
        made(x).square().sum().backward()
    separate = {name: parameter.grad for name, parameter in apart.named_parameters()}
    for name, parameter in shared.named_parameters():
        expected = separate[name]
        assert expected is not None
        assert parameter.grad is not None
        if name[:2] in ("q_", "k_"):
            expected = expected.view(TINY.num_heads, group, -1, *expected.shape[1:]).sum(1).flatten(0, 1)
        assert relative(parameter.grad, expected) < 1e-10


@pytest.mark.parametrize("path", Layer.paths(TINY))
def test_both_forms_have_the_same_gradients(path: str) -> None:
    torch.manual_seed(5)
    made = layer(TINY, dtype=torch.float64)
    chunks = layer(TINY, "chunked", made, path=path, dtype=torch.float64)
    x = torch.randn(2, 23, 20, dtype=torch.float64)
    for one in (made, chunks):
        one(x).square().sum().backward()
    for (name, a), b in zip(made.named_parameters(), chunks.parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        assert relative(b.grad, a.grad) < 1e-10, name


# Against transformers


def kimi_linear(**dimensions: object) -> tuple[object, object]:
    """The module of its modeling file, and a configuration of two layers."""
    module = pytest.importorskip(
        "transformers.models.kimi_linear.modeling_kimi_linear", reason="needs transformers 5.24"
    )
    config = module.KimiLinearConfig(
        hidden_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        linear_head_dim=16,
        linear_num_heads=4,
        layer_types=["linear_attention", "full_attention"],
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        attn_implementation="eager",
        **dimensions,
    )
    return module, config


@pytest.mark.parametrize("form", KDA.forms)
def test_equals_transformers(form: str) -> None:
    """Prefill, single tokens and a later prefill of KimiLinearDeltaAttention with the same weights, in float32."""
    module, config = kimi_linear()
    cache_utils = pytest.importorskip("transformers.cache_utils")
    theirs = module.KimiLinearDeltaAttention(config, 0)  # type: ignore[attr-defined]
    torch.manual_seed(6)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(std=0.1)
    spec = KDA(96, 4, 4, 16, 16, 4, "low_rank", 16, "low_rank", 16)
    ours = Layer(spec, form=form, eps=config.rms_norm_eps)  # type: ignore[attr-defined]
    weights = {n.removeprefix("forget_gate."): p.detach() for n, p in theirs.named_parameters()}
    q, k, v = weights.pop("conv1d.weight").chunk(3)
    weights |= {"q_conv1d.weight": q, "k_conv1d.weight": k, "v_conv1d.weight": v, "A_log": weights["A_log"].flatten()}
    ours.load_state_dict(weights)
    parameters = sum(w.elements for w in spec.weights(form))
    assert parameters == sum(p.numel() for p in theirs.parameters()) == 30_932
    their_cache, our_cache = cache_utils.DynamicCache(config=config), Cache()
    for length in (70, 1, 1, 66, 1):
        x = torch.randn(2, length, 96)
        with torch.no_grad():
            assert relative(ours(x, our_cache), theirs(x, cache=their_cache)) < 1e-5
    kept = their_cache.layers[0]
    # Theirs has a column more, and channels before columns.
    assert relative(our_cache.buffers["conv_state"][:, 0].mT, kept.conv_states[0][..., 1:]) < 1e-5
    assert relative(our_cache.buffers["recurrent_state"], kept.recurrent_states[0]) < 1e-5


@pytest.mark.parametrize("form", ["absorbed", "expanded"])
def test_the_full_attention_of_kimi_linear_is_mla_without_rotation(form: str) -> None:
    module, config = kimi_linear(kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12)
    theirs = module.KimiLinearAttention(config, 1)  # type: ignore[attr-defined]
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(std=0.2)
    spec = MLA(96, 4, None, 32, 16, 8, 12, rotated=False)
    ours = MLALayer(spec, form=form)
    ours.load_state_dict(theirs.state_dict())
    cache, x = Cache(), torch.randn(2, 20, 96)
    mask = torch.full((20, 20), float("-inf")).triu(1)[None, None]
    with torch.no_grad():
        expected = theirs(x, mask)[0]
        got = torch.cat([ours(part, cache) for part in torch.split(x, [15, 1, 4], dim=1)], dim=1)
    assert relative(got, expected) < 1e-5
