"""The layer of MHA, GQA and MQA in float64, against a loop over tokens and heads written from the definition."""

import math
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
torch.set_num_threads(1)  # tiny tensors: two threads wait for each other longer than they compute

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from attncalc.attention.gqa import GQA  # noqa: E402
from attncalc.attention.gqa_torch import Layer  # noqa: E402
from attncalc.attention.rotary import Rotary  # noqa: E402
from attncalc.attention.torch_base import Cache  # noqa: E402
from attncalc.reach import FULL, Reach  # noqa: E402

BASE = GQA(24, 6, 2, 8, 8, rope_dim=8)
FEATURES = {
    "gqa": BASE,
    "mha": replace(BASE, num_kv_heads=6),
    "mqa": replace(BASE, num_kv_heads=1),
    "no rope": replace(BASE, rope_dim=0),
    "partial rope": replace(BASE, rope_dim=4),
    "wider v": replace(BASE, v_head_dim=10),
    "biases": replace(BASE, bias="qkvo"),
    "bias of q and k": replace(BASE, bias="qk"),
    "norm of a head": replace(BASE, qk_norm="head"),
    "norm of all heads": replace(BASE, qk_norm="full"),
    "norm for each head": replace(BASE, qk_norm="per_head"),
    "norm of a head with a bias": replace(BASE, qk_norm="head_bias"),
    "norm without a weight": replace(BASE, qk_norm="unweighted"),
    "norm of v": replace(BASE, v_norm=True),
    "gate": replace(BASE, gate="full", v_head_dim=10),
    "gate of a head": replace(BASE, gate="head"),
    "sinks": replace(BASE, sinks=True),
    "softcap": replace(BASE, logit_softcap=True),
    "v made by k_proj": replace(BASE, shared_kv_weight=True, qk_norm="head", v_norm=True, bias="qk"),
    "v is k": replace(BASE, shared_kv_weight=True, rope_dim=0),
    "all": replace(BASE, bias="qkvo", qk_norm="head", v_norm=True, gate="full", sinks=True, logit_softcap=True),
}
REACHES = [FULL, Reach("window", 5), Reach("chunk", 5)]
TOKENS = 13
SOFTCAP = 2.0  # low enough to bend

# These run always with every reach, the others with full reach.
EVERY_TIME = ("gqa", "sinks", "all")
layers = pytest.mark.parametrize(
    ("spec", "reach"),
    [
        pytest.param(
            spec,
            reach,
            id=f"{name}-{reach.text}",
            marks=() if name in EVERY_TIME or reach == FULL else pytest.mark.slow,
        )
        for name, spec in FEATURES.items()
        for reach in REACHES
    ],
)


def make(spec: GQA, reach: Reach = FULL, **options: Any) -> Any:
    """A layer whose parameters are all random, norms and biases too."""
    torch.manual_seed(0)
    layer = Layer(spec, reach, softcap=SOFTCAP, dtype=torch.float64, **options)
    with torch.no_grad():
        for name, p in layer.named_parameters():
            if p.ndim == 1 or "norm" in name:
                p.normal_(mean=float("norm" in name), std=0.5)
    return layer


def sequence(spec: GQA, tokens: int = TOKENS, batch: int = 2) -> Any:
    torch.manual_seed(1)
    return torch.randn(batch, tokens, spec.hidden_size, dtype=torch.float64)


def run(layer: Layer, x: Any, *splits: int, capacity: int = 0) -> Any:
    cache = Cache(capacity=capacity)
    with torch.inference_mode():
        out = [layer(part, cache) for part in x.split(splits or x.shape[1], dim=1)]
    assert cache.length == x.shape[1]
    return torch.cat(out, dim=1)


def assert_equal(got: Any, expected: Any) -> None:
    assert got.shape == expected.shape
    assert (got - expected).abs().max() < 1e-12 * expected.abs().max()


def definition(layer: Layer, x: Any) -> Any:
    """One token, one head and one key at a time."""
    spec, w = layer.spec, dict(layer.named_parameters())
    zero = torch.zeros(1, dtype=x.dtype)

    def project(name: str, row: Any) -> Any:
        return w[f"{name}.weight"] @ row + w.get(f"{name}.bias", zero)

    def rms(row: Any, weight: Any = 1.0) -> Any:
        return row / (row.square().mean() + layer.eps).sqrt() * weight

    def normed(side: str, heads: list[Any]) -> list[Any]:
        weight = w.get(f"{side}_norm.weight")
        if spec.qk_norm == "none":
            return heads
        if spec.qk_norm == "full":
            return list(rms(torch.cat(heads), weight).split(spec.head_dim))
        if spec.qk_norm == "per_head":
            assert weight is not None
            return [
                (h - h.mean()) / (h.var(unbiased=False) + layer.eps).sqrt() * each
                for h, each in zip(heads, weight, strict=True)
            ]
        if spec.qk_norm == "head_bias":
            bias = w[f"{side}_norm.bias"]
            return [(h - h.mean()) / (h.var(unbiased=False) + layer.eps).sqrt() * weight + bias for h in heads]
        return [rms(h, 1.0 if weight is None else weight) for h in heads]

    def rotated(row: Any, position: int) -> Any:
        out, half = row.clone(), spec.rope_dim // 2
        for i in range(half):
            angle = position * 10000 ** (-2 * i / spec.rope_dim)
            z = complex(row[i], row[i + half]) * complex(math.cos(angle), math.sin(angle))
            out[i], out[i + half] = z.real, z.imag
        return out

    def sees(query: int, key: int) -> bool:
        size = layer.reach.size
        near = {"full": True, "window": query - key < size, "chunk": size and query // size == key // size}
        return key <= query and bool(near[layer.reach.kind])

    out = torch.zeros_like(x)
    for b, row in enumerate(x):
        q, k, v = [], [], []
        for t, token in enumerate(row):
            k_row = project("k_proj", token)
            v_row = k_row if spec.shared_kv_weight else project("v_proj", token)
            q_heads = normed("q", list(project("q_proj", token).split(spec.head_dim)))
            k_heads = normed("k", list(k_row.split(spec.head_dim)))
            q.append([rotated(h, t) for h in q_heads])
            k.append([rotated(h, t) for h in k_heads])
            v.append([rms(h) if spec.v_norm else h for h in v_row.split(spec.v_head_dim)])
        for t, token in enumerate(row):
            heads = []
            for h in range(spec.num_heads):
                g = h // (spec.num_heads // spec.num_kv_heads)
                total = weighted = zero
                for s in range(len(row)):
                    if sees(t, s):
                        logit = q[t][h] @ k[s][g] * spec.head_dim**-0.5
                        logit = SOFTCAP * torch.tanh(logit / SOFTCAP) if spec.logit_softcap else logit
                        total, weighted = total + logit.exp(), weighted + logit.exp() * v[s][g]
                if spec.sinks:
                    total = total + w["sinks"][h].exp()
                heads.append(weighted / total)
            if spec.gate != "none":
                gates = torch.sigmoid(project("gate_proj", token)).split(spec.v_head_dim if spec.gate == "full" else 1)
                heads = [h * gate for h, gate in zip(heads, gates, strict=True)]
            out[b, t] = project("o_proj", torch.cat(heads))
    return out


@layers
def test_equals_the_definition(spec: GQA, reach: Reach) -> None:
    x = sequence(spec, 8)
    for path in Layer.paths(spec):
        layer = make(spec, reach, path=path)
        with torch.no_grad():
            assert_equal(run(layer, x), definition(layer, x))


@layers
def test_steps_equal_one_prefill(spec: GQA, reach: Reach) -> None:
    x = sequence(spec)
    for path in Layer.paths(spec):
        layer = make(spec, reach, path=path)
        whole = run(layer, x)
        assert_equal(run(layer, x, 1, 2, 7, 1, 1, 1), whole)
        assert_equal(run(layer, x, 7, 3, 1, 2, capacity=20), whole)


@layers
def test_fast_equals_reference(spec: GQA, reach: Reach) -> None:
    if "fast" not in Layer.paths(spec):
        with pytest.raises(ValueError, match="no fused kernel"):
            make(spec, reach, path="fast")
        return
    x = sequence(spec)
    for splits in ((), (4, 6, 1, 1, 1)):
        fast, reference = (run(make(spec, reach, path=path), x, *splits) for path in ("fast", "reference"))
        assert_equal(fast, reference)


@pytest.mark.parametrize("spec", [FEATURES[name] for name in EVERY_TIME], ids=EVERY_TIME)
@pytest.mark.parametrize("kind", ["window", "chunk"])
def test_a_reach_of_the_whole_context_is_full(spec: GQA, kind: Any) -> None:
    x = sequence(spec)
    full = run(make(spec), x)
    for size in (TOKENS, TOKENS + 3):
        assert_equal(run(make(spec, Reach(kind, size)), x, 9, 1, 3), full)
    assert (run(make(spec, Reach(kind, TOKENS - 1)), x) - full).abs().max() > 1e-6


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_split_of_any_shape(data: Any) -> None:
    groups, per_group = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    d, e = data.draw(st.integers(1, 4)) * 2, data.draw(st.integers(1, 7))
    spec = GQA(
        data.draw(st.integers(1, 9)), groups * per_group, groups, d, e, rope_dim=data.draw(st.sampled_from([0, d]))
    )
    kind = data.draw(st.sampled_from(["full", "window", "chunk"]))
    reach = FULL if kind == "full" else Reach(kind, data.draw(st.integers(1, 12)))
    splits = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=5))
    x = sequence(spec, sum(splits), data.draw(st.integers(1, 3)))
    whole = run(make(spec, reach, path="reference"), x)
    for path in Layer.paths(spec):
        assert_equal(run(make(spec, reach, path=path), x, *splits), whole)


def test_gqa_is_mha_with_repeated_heads() -> None:
    small, large = make(BASE), make(replace(BASE, num_kv_heads=BASE.num_heads))
    state = small.state_dict()
    for name in ("k_proj.weight", "v_proj.weight"):
        heads = state[name].view(BASE.num_kv_heads, BASE.head_dim, -1)
        state[name] = heads.repeat_interleave(BASE.num_heads // BASE.num_kv_heads, dim=0).flatten(0, 1)
    large.load_state_dict(state)
    x = sequence(BASE)
    assert_equal(run(small, x, 6, 1, 6), run(large, x, 6, 1, 6))


def test_a_sink_takes_weight_and_gives_no_value() -> None:
    spec = replace(BASE, sinks=True)
    layer, plain = make(spec), make(BASE)
    plain.load_state_dict({n: p for n, p in layer.state_dict().items() if n != "sinks"})
    x = sequence(spec)
    with torch.no_grad():
        layer.sinks.fill_(-torch.inf)
        assert_equal(run(layer, x), run(plain, x))
        # The first token sees itself alone: with a sink of its own logit it would get half; here, with q = 0, 1/2.
        layer.q_proj.weight.zero_()
        plain.q_proj.weight.zero_()
        layer.sinks.zero_()
        assert_equal(run(layer, x)[:, 0] * 2, run(plain, x)[:, 0])


def test_the_same_seed_gives_the_same_layer() -> None:
    states = []
    for _ in range(2):
        torch.manual_seed(7)
        states.append(Layer(FEATURES["all"]).state_dict())
    assert all(torch.equal(states[0][n], states[1][n]) for n in states[0])
    assert torch.equal(states[0]["q_norm.weight"], torch.ones(8))
    torch.manual_seed(7)
    assert Layer(GQA(1024, 8, 8, 64, 64)).get_parameter("q_proj.weight").std().item() == pytest.approx(
        1024**-0.5, rel=0.02
    )


def test_gradients_flow_through_a_whole_prompt() -> None:
    for name in ("gqa", "all"):
        layer = make(FEATURES[name], Reach("window", 5))
        layer(sequence(BASE)).sum().backward()
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in layer.parameters())


@given(start=st.integers(0, 10**6), distance=st.integers(0, 1000), interleaved=st.booleans())
def test_rotated_scores_depend_on_the_distance(start: int, distance: int, interleaved: bool) -> None:
    rotary = Rotary(interleaved=interleaved)
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 16, dtype=torch.float64)

    def score(first: int) -> Any:
        turned = rotary.rotate(q, rotary.table(first + distance, 1, 16, q.device))
        return (turned * rotary.rotate(k, rotary.table(first, 1, 16, k.device))).sum()

    assert abs(score(start) - score(0)) < 1e-8
    assert rotary.rotate(q, rotary.table(start, 1, 16, q.device)).norm() == pytest.approx(q.norm())


def test_interleaved_is_a_permutation() -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 16, dtype=torch.float64)
    halves, pairs = Rotary(), Rotary(interleaved=True)
    table = halves.table(3, 5, 16, x.device)
    order = torch.arange(16).view(2, 8).T.flatten()
    assert_equal(pairs.rotate(x[:, order], table), halves.rotate(x, table)[:, order])


def test_yarn_constants_of_deepseek_v3() -> None:
    rotary = Rotary(factor=40, original_max_position=4096, mscale=1.0, mscale_all_dim=1.0)
    assert rotary.magnitude == 1
    assert rotary.softmax_factor == pytest.approx(1.368888**2, abs=1e-6)
    plain, turned = Rotary().inverse_frequencies(64), rotary.inverse_frequencies(64)
    assert turned[0] == plain[0]  # fast frequencies stay
    assert turned[-1] == pytest.approx(plain[-1].item() / 40)  # slow ones are stretched


def test_only_one_form() -> None:
    with pytest.raises(ValueError, match="only the form 'direct'"):
        Layer(BASE, FULL, "absorbed")


# The reach of a layer without K and V, and that of the layer whose it reads.
PAIRS = [
    *((reach, reach) for reach in REACHES),
    (Reach("window", 5), FULL),
    (Reach("chunk", 5), FULL),
    (Reach("window", 3), Reach("window", 5)),
]


def as_one_layer(owner: Layer, borrower: Layer) -> Layer:
    """The pair as a layer of its own: it reads [x of the borrower, x of the owner] and writes the borrower's output."""
    spec = replace(borrower.spec, hidden_size=2 * borrower.spec.hidden_size, own_kv=True, bias=owner.spec.bias)
    one = Layer(spec, borrower.reach, softcap=SOFTCAP, path="reference", dtype=torch.float64)
    state = dict(borrower.state_dict())
    for name, p in owner.state_dict().items():
        if name[0] in "kv":
            state[name] = torch.cat((torch.zeros_like(p), p), dim=-1) if name.endswith("proj.weight") else p
    for name in ("q_proj.weight", "gate_proj.weight"):
        if name in state:
            state[name] = torch.cat((state[name], torch.zeros_like(state[name])), dim=-1)
    for name in ("o_proj.weight", "o_proj.bias"):
        if name in state:
            state[name] = torch.cat((state[name], torch.zeros_like(state[name])), dim=0)
    one.load_state_dict(state)
    return one


def run_pair(owner: Layer, borrower: Layer, x: Any, y: Any, *splits: int, capacity: int = 0) -> Any:
    cache, out = Cache(capacity=capacity, lends=True), []
    with torch.inference_mode():
        for of_owner, of_borrower in zip(x.split(splits, dim=1), y.split(splits, dim=1), strict=True):
            owner(of_owner, cache)
            held = cache.storage_bytes, cache.length
            out.append(borrower(of_borrower, cache))
            assert (cache.storage_bytes, cache.length) == held
    return torch.cat(out, dim=1)


@pytest.mark.parametrize(
    "spec",
    [pytest.param(s, id=n, marks=() if n in EVERY_TIME else pytest.mark.slow) for n, s in FEATURES.items()],
)
@pytest.mark.parametrize(("reach", "owner_reach"), PAIRS, ids=lambda r: r.text)
def test_a_layer_that_borrows_its_cache(spec: GQA, reach: Reach, owner_reach: Reach) -> None:
    """Steps of owner and borrower equal one layer that has the projections of both."""
    x = sequence(spec)
    y = x.flip(0) + 1
    for path in Layer.paths(spec):
        owner = make(spec, owner_reach, path=path)
        borrower = make(replace(spec, own_kv=False), reach, path=path)
        with torch.no_grad():
            for p in borrower.parameters():
                p.mul_(0.9)
        expected = run(as_one_layer(owner, borrower), torch.cat((y, x), dim=-1))[..., : spec.hidden_size]
        assert_equal(run_pair(owner, borrower, x, y, TOKENS), expected)
        assert_equal(run_pair(owner, borrower, x, y, 7, 3, 1, 2, capacity=20), expected)
        assert_equal(run_pair(owner, borrower, x, y, 1, 2, 7, 1, 1, 1), expected)


def test_a_borrower_without_what_it_needs() -> None:
    owner, borrower = make(BASE, Reach("window", 5)), make(replace(BASE, own_kv=False), Reach("window", 5))
    x, cache = sequence(BASE), Cache()
    with pytest.raises(ValueError, match="must hold the 13 new tokens"):
        make(replace(BASE, own_kv=False))(x)
    owner(x, cache)  # the window holds 5 rows, the prompt needs 13
    with pytest.raises(ValueError, match="lends"):
        borrower(x, cache)
    owner(x[:, :1], cache)
    assert borrower(x[:, :1], cache).shape == x[:, :1].shape  # one token needs no more than is stored
