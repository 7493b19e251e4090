"""DSA: its numbers, and its layer in float64 against the definition, against MLA, and step by step."""

import math
from dataclasses import fields, replace
from itertools import product
from typing import Any

import pytest

torch = pytest.importorskip("torch")
torch.set_num_threads(1)  # tiny tensors: two threads wait for each other longer than they compute

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from attncalc import load, presets, verify  # noqa: E402
from attncalc.attention import dsa_torch, mla_torch  # noqa: E402
from attncalc.attention.base import Step  # noqa: E402
from attncalc.attention.dsa import DSA, INDEXER  # noqa: E402
from attncalc.attention.mla import MLA  # noqa: E402
from attncalc.attention.rotary import Rotary  # noqa: E402
from attncalc.attention.torch_base import Cache, CountOperations  # noqa: E402
from attncalc.compare import Layer, measure_layer  # noqa: E402
from attncalc.dimensions import BUILD, Dimensions  # noqa: E402
from attncalc.document import read_model  # noqa: E402
from attncalc.dtypes import Formats  # noqa: E402
from attncalc.errors import AttncalcError  # noqa: E402
from attncalc.measure.plan import Case, Settings, memory_needed, predict  # noqa: E402
from attncalc.model import LayerGroup, Model  # noqa: E402
from attncalc.reach import FULL, Reach  # noqa: E402
from attncalc.workload import Conventions, Workload  # noqa: E402

INDEX = {"index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048}
V32 = DSA(7168, 128, 1536, 512, 128, 64, 128, **INDEX)  # type: ignore[arg-type]
BASE = DSA(24, 3, 10, 12, 6, 4, 5, index_n_heads=4, index_head_dim=7, index_topk=5)
FEATURES = {
    "plain": BASE,
    "unrotated, gate": replace(BASE, rotated=False, gate="full"),
    "no rope key, biases": replace(BASE, qk_rope_head_dim=0, bias=True),
    "no latent norm": replace(BASE, latent_norm=False),
    "selection of another layer": replace(BASE, own_indexer=False),
    "one key": replace(BASE, index_topk=1),
}
FORMS, PATHS, TOKENS = DSA.forms, ("fast", "reference"), 13


def mla_of(spec: DSA) -> MLA:
    return MLA(**{f.name: getattr(spec, f.name) for f in fields(MLA)})


def flops(spec: Any, workload: Workload, form: str = "absorbed", count: Any = "causal") -> dict[str, int]:
    cached = "decompressed" if form == "decompressed" else "absorbed"
    ops = spec.ops(Step(workload, FULL, count), form, cached=cached)
    return {op.name: op.flops for op in ops.contractions}


# Numbers.


def test_parameters_of_a_layer_of_deepseek_v3_2() -> None:
    shapes = {w.name: w.sizes for w in V32.weights("absorbed") if w.name.startswith("indexer")}
    assert shapes == {
        "indexer.wq_b.weight": (8192, 1536),
        "indexer.wk.weight": (128, 7168),
        "indexer.k_norm.weight": (128,),
        "indexer.k_norm.bias": (128,),
        "indexer.weights_proj.weight": (64, 7168),
    }
    indexer = 1536 * 64 * 128 + 7168 * 128 + 2 * 128 + 7168 * 64
    assert sum(w.elements for w in V32.weights("absorbed")) == 187_107_328 + indexer == 201_066_752


@pytest.mark.parametrize(
    ("formats", "expected"),
    [
        (Formats(kv="fp8_ds_mla"), 656 + 132),
        (Formats(kv="fp8_ds_mla", index="fp4"), 656 + 68),
        (Formats(kv="nvfp4_ds_mla"), 352 + 132),
        (Formats(), 2 * (512 + 64 + 128)),
        (Formats(index="fp8"), 2 * (512 + 64) + 132),
    ],
)
def test_bytes_per_token_and_layer(formats: Formats, expected: int) -> None:
    assert sum(t.row_bits(formats) for t in V32.cache(FULL, "absorbed")) == 8 * expected
    without = replace(V32, own_indexer=False).cache(FULL, "absorbed")
    assert without == mla_of(V32).cache(FULL, "absorbed")


@pytest.mark.parametrize(
    ("preset", "index", "expected"),
    [
        ("deepseek-v3.2", "fp8", 10_266_083_328),  # 61 x (1152 + 132) x 131,072
        ("deepseek-v3.2", None, 11_257_511_936),
        ("glm-5.2", "fp8", 12_140_937_216),  # (78 x 1152 + 21 x 132) x 131,072
        ("glm-5.2", None, 12_482_248_704),
    ],
)
def test_cache_of_131_072_tokens(preset: str, index: str | None, expected: int) -> None:
    assert load(preset).cache(131_072, formats=Formats(index=index)).bytes_total == expected


@pytest.mark.parametrize(("context", "indexer"), [(32_768, 536_870_912), (131_072, 2_147_483_648)])
def test_indexer_against_core(context: int, indexer: int) -> None:
    made = flops(V32, Workload(context))
    assert made["index_score"] == indexer == 2 * 64 * 128 * context
    assert made["score"] + made["value"] == 570_425_344 == 2 * 128 * 2048 * (512 + 64 + 512)
    assert made["index_q_proj"] == 2 * 1536 * 64 * 128
    assert made["index_k_proj"] == 2 * 7168 * 128
    assert made["index_weights_proj"] == 2 * 7168 * 64
    dense = flops(V32, Workload(context), count="dense")
    assert dense["score"] + dense["value"] == 278_528 * context
    assert dense["index_score"] == indexer
    assert {k: v for k, v in dense.items() if k not in INDEXER} == flops(mla_of(V32), Workload(context))


def test_stored_read_and_computed_stay_apart() -> None:
    context, formats = 131_072, Formats(kv="fp8_ds_mla")
    stored = {t.name: t.at(context, 1, formats).bytes for t in V32.cache(FULL, "absorbed")}
    assert stored == {"c_kv": 528 * context, "k_pe": 128 * context, "index_k": 132 * context}
    ops = V32.ops(Step(Workload(context)), "absorbed", cached="absorbed")
    read = {op.name: op.bytes(formats)["cache"] for op in ops.contractions if op.bytes(formats)["cache"]}
    assert read == {"index_score": 132 * context, "score": 656 * 2048}
    written = {op.name: op.bytes(formats)["cache_write"] for op in ops.contractions if op.bytes(formats)["cache_write"]}
    assert written == {"index_k_proj": 132, "kv_a_proj": 656}
    rows = {op.name: op.flops for op in ops.rowwise}
    assert rows["index_relu_and_sum"] == 3 * 64 * context
    assert rows["index_k_norm"] == 7 * 128
    assert (rows["index_q_rope"], rows["index_k_rope"]) == (3 * 64 * 64, 3 * 64)
    assert rows["softmax"] == 5 * 128 * 2048


@pytest.mark.parametrize("form", FORMS)
def test_a_layer_without_an_indexer_costs_mla_over_k_keys(form: str) -> None:
    shared = replace(V32, own_indexer=False)
    made = flops(V32, Workload(10_000), form)
    assert flops(shared, Workload(10_000), form) == {k: v for k, v in made.items() if k not in INDEXER}
    assert flops(shared, Workload(2000), form) == flops(mla_of(V32), Workload(2000), form)
    ops = shared.ops(Step(Workload(10_000)), form, cached=form).rowwise
    assert not [op for op in ops if op.name.startswith("index")]


def test_a_split_replicates_the_indexer() -> None:
    part = V32.shard(8)
    assert part == replace(V32, num_heads=16)
    assert part.cache(FULL, "absorbed") == V32.cache(FULL, "absorbed")
    whole, split = flops(V32, Workload(5000)), flops(part, Workload(5000))
    assert all(split[name] == whole[name] for name in INDEXER)
    assert split["score"] * 8 == whole["score"]


@pytest.mark.parametrize("spec", [V32, replace(BASE, index_topk=50, index_n_heads=1), replace(V32, own_indexer=False)])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("new_tokens", [1, 7, None], ids=["decode", "extend", "prompt"])
def test_the_length_from_which_sparse_is_cheaper(spec: DSA, form: str, new_tokens: int | None) -> None:
    dense = mla_of(spec)

    def saved(context: int) -> int:
        w = Workload(context, new_tokens or context)
        core = sum(flops(dense, w, form)[n] for n in ("score", "value"))
        return core - sum(v for n, v in flops(spec, w, form).items() if n in ("score", "value", *INDEXER))

    found = spec.sparse_beats_dense_from(Workload(20_000, new_tokens or 20_000), form)
    assert found is not None
    assert saved(found) > 0 >= saved(found - 1)
    step = max(1, found // 40)
    assert all(saved(n) <= 0 for n in range(new_tokens or 1, found, step))
    assert all(saved(n) > 0 for n in range(found, 3 * found, step))


def test_the_length_by_hand_and_where_there_is_none() -> None:
    # 278,528 S = 570,425,344 + 16,384 S + 27,918,336 at 2282.5; without an indexer, from the first token left out.
    assert V32.sparse_beats_dense_from(Workload(1), "absorbed") == 2283
    assert replace(V32, own_indexer=False).sparse_beats_dense_from(Workload(1), "absorbed") == 2049
    assert replace(V32, index_n_heads=2000).sparse_beats_dense_from(Workload(1), "absorbed") is None
    layer = Layer("dsa", V32, FULL, "absorbed")
    assert measure_layer(layer, Workload(1), Conventions()).sparse_from == 2283
    assert measure_layer(layer, Workload(1), Conventions(count="dense")).sparse_from is None
    assert measure_layer(layer._replace(attention=mla_of(V32)), Workload(1), Conventions()).sparse_from is None


def test_compare_builds_deepseek_v3_2() -> None:
    assert BUILD["dsa"](Dimensions()) == V32
    assert BUILD["dsa"](Dimensions(q_lora_rank=None)) == V32  # its indexer needs a query latent


@pytest.mark.parametrize(
    ("wrong", "rule"),
    [
        ({"q_lora_rank": None}, "q_lora_rank: must be given"),
        ({"index_head_dim": 2}, "qk_rope_head_dim: must not exceed the 2 values of an index head"),
        ({"index_topk": 0}, "index_topk: must be a whole number of at least 1"),
    ],
)
def test_dimensions_that_cannot_be(wrong: dict[str, Any], rule: str) -> None:
    with pytest.raises(AttncalcError, match=rule):
        replace(BASE, **wrong)


def test_no_window_over_a_selection() -> None:
    window = Reach("window", 5)
    with pytest.raises(AttncalcError, match="must be full"):
        BASE.cache(window, "absorbed")
    with pytest.raises(AttncalcError, match="must be full"):
        BASE.ops(Step(Workload(5), window), "absorbed", cached="absorbed")
    with pytest.raises(ValueError, match="all earlier tokens"):
        dsa_torch.Layer(BASE, window)


# The layer.


def make(spec: DSA, form: str = "expanded", **options: Any) -> Any:
    """A layer whose parameters are all random; other forms are converted from it."""
    torch.manual_seed(0)
    cached = options.pop("cached", None)
    layer = dsa_torch.Layer(spec, FULL, "expanded", dtype=torch.float64, **options)
    with torch.no_grad():
        for name, p in layer.named_parameters():
            if p.ndim == 1:
                p.normal_(mean=float("norm" in name and "bias" not in name), std=0.5)
    return mla_torch.convert(layer, form, cached=cached)


def sequence(spec: DSA, tokens: int = TOKENS, batch: int = 2) -> Any:
    torch.manual_seed(1)
    return torch.randn(batch, tokens, spec.hidden_size, dtype=torch.float64)


def run(layer: Any, x: Any, *splits: int, cache: Cache | None = None) -> Any:
    cache = cache or Cache()
    with torch.inference_mode():
        out = [layer(part, cache) for part in x.split(splits or x.shape[1], dim=1)]
    return torch.cat(out, dim=1)


def assert_equal(got: Any, expected: Any) -> None:
    assert got.shape == expected.shape
    assert (got - expected).abs().max() < 1e-12 * expected.abs().max()


def definition(layer: Any, x: Any) -> Any:
    """One token, one head and one key at a time; of equal scores the earlier key."""
    spec, w = layer.spec, dict(layer.named_parameters())
    zero, R, P = torch.zeros(1, dtype=x.dtype), spec.qk_rope_head_dim, spec.qk_nope_head_dim

    def project(name: str, row: Any) -> Any:
        return w[f"{name}.weight"] @ row + w.get(f"{name}.bias", zero)

    def normed(name: str, row: Any) -> Any:
        if f"{name}.weight" not in w:
            return row
        return row / (row.square().mean() + layer.eps).sqrt() * w[f"{name}.weight"]

    def rotated(row: Any, position: int) -> Any:
        out = row.clone()
        for i in range(R // 2 * spec.rotated):
            angle = position * 10000 ** (-2 * i / R)
            z = complex(row[i], row[i + R // 2]) * complex(math.cos(angle), math.sin(angle))
            out[i], out[i + R // 2] = z.real, z.imag
        return out

    def index_key(token: Any, s: int) -> Any:
        row = project("indexer.wk", token)
        row = (row - row.mean()) / (row.var(unbiased=False) + 1e-6).sqrt()
        return rotated(row * w["indexer.k_norm.weight"] + w["indexer.k_norm.bias"], s)

    def chosen(row: Any, t: int, q_a: Any, index_keys: Any) -> list[int]:
        if not spec.own_indexer:
            return list(range(max(0, t + 1 - spec.index_topk), t + 1))
        heads = project("indexer.wq_b", q_a).view(spec.index_n_heads, -1)
        share = project("indexer.weights_proj", row[t])
        scores = [
            sum(float(share[j]) * max(0.0, float(rotated(h, t) @ index_keys[s])) for j, h in enumerate(heads))
            for s in range(t + 1)
        ]
        return sorted(range(t + 1), key=lambda s: -scores[s])[: spec.index_topk]

    out = torch.zeros_like(x)
    for b, row in enumerate(x):
        index_keys = [index_key(token, s) for s, token in enumerate(row)] if spec.own_indexer else []
        kv = []
        for s, token in enumerate(row):
            c, k_pe = project("kv_a_proj_with_mqa", token).split([spec.kv_lora_rank, R])
            up = project("kv_b_proj", normed("kv_a_layernorm", c)).view(spec.num_heads, -1)
            kv.append([(torch.cat((h[:P], rotated(k_pe, s))), h[P:]) for h in up])
        for t, token in enumerate(row):
            q_a = normed("q_a_layernorm", project("q_a_proj", token))
            queries = project("q_b_proj", q_a).view(spec.num_heads, P + R)
            keys, heads = chosen(row, t, q_a, index_keys), []
            for h, q in enumerate(queries):
                query = torch.cat((q[:P], rotated(q[P:], t)))
                total = weighted = zero
                for s in keys:
                    k, v = kv[s][h]
                    weight = (query @ k * (P + R) ** -0.5).exp()
                    total, weighted = total + weight, weighted + weight * v
                heads.append(weighted / total)
            joined = torch.cat(heads)
            if spec.gate == "full":
                joined = joined * torch.sigmoid(project("gate_proj", token))
            out[b, t] = project("o_proj", joined)
    return out


features = pytest.mark.parametrize("spec", FEATURES.values(), ids=FEATURES)


@features
def test_every_form_equals_the_definition(spec: DSA) -> None:
    x = sequence(spec, 9, 1)
    with torch.no_grad():
        expected = definition(make(spec), x)
    for form, path in product(FORMS, PATHS):
        assert_equal(run(make(spec, form, path=path), x), expected)


@features
def test_steps_equal_one_prefill(spec: DSA) -> None:
    x = sequence(spec)
    whole = run(make(spec, path="reference"), x)
    for form, path in product(FORMS, PATHS):
        layer = make(spec, form, path=path)
        assert_equal(run(layer, x, 1, 2, 7, 1, 1, 1), whole)
        assert_equal(run(layer, x, 7, 3, 1, 2, cache=Cache(capacity=20)), whole)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("path", PATHS)
def test_a_selection_of_everything_is_mla(form: str, path: Any) -> None:
    x = sequence(BASE)
    for k, equal in ((TOKENS, True), (TOKENS + 3, True), (TOKENS - 1, False)):
        layer = make(replace(BASE, index_topk=k), form, path=path)
        dense: Any = mla_torch.Layer(mla_of(BASE), FULL, form, path=path, dtype=torch.float64)
        dense.load_state_dict({n: p for n, p in layer.state_dict().items() if not n.startswith("indexer")})
        got, expected = run(layer, x, 9, 1, 3) if form != "decompressed" else run(layer, x), run(dense, x)
        if equal:
            assert_equal(got, expected)
        else:
            assert (got - expected).abs().max() > 1e-6


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_any_split_of_any_shape(data: Any) -> None:
    size, rope = st.integers(1, 6), data.draw(st.integers(0, 2)) * 2
    # A normed key of one or two values, or one made from a single value, is the same for all tokens but for rounding.
    wide = st.integers(3, 6)
    spec = replace(
        BASE,
        hidden_size=data.draw(wide),
        num_heads=data.draw(size),
        q_lora_rank=data.draw(size),
        kv_lora_rank=data.draw(size),
        qk_nope_head_dim=data.draw(size),
        qk_rope_head_dim=rope,
        v_head_dim=data.draw(size),
        index_n_heads=data.draw(size),
        index_head_dim=rope + data.draw(wide),
        index_topk=data.draw(size),
        own_indexer=data.draw(st.booleans()),
    )
    splits = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=5))
    x = sequence(spec, sum(splits), data.draw(st.integers(1, 3)))
    whole = run(make(spec, path="reference"), x)
    for form in FORMS:
        assert_equal(run(make(spec, form), x, *splits), whole)


def test_few_queries_at_a_time_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    x, layer = sequence(BASE), make(BASE, "absorbed")
    expected = run(layer, x, 6, 7)
    monkeypatch.setattr(dsa_torch, "MAX_ELEMENTS", 1)
    assert_equal(run(layer, x, 6, 7), expected)


@pytest.mark.parametrize("path", PATHS)
def test_a_later_layer_reuses_a_selection(path: Any) -> None:
    x, owner = sequence(BASE), make(BASE, "absorbed", path=path)
    later = make(replace(BASE, own_indexer=False), "absorbed", path=path)
    later.load_state_dict({n: p for n, p in owner.state_dict().items() if "indexer" not in n})
    first, second = Cache(), Cache()
    for part in x.split((8, 4, 1), dim=1):
        with torch.inference_mode():
            expected, selected = owner.step(part, first)
            got, same = later.step(part, second, selected)
        assert selected.shape == (2, part.shape[1], min(5, first.length))
        assert torch.equal(selected, same)
        assert_equal(got, expected)
    assert set(second.tensors) == {"c_kv", "k_pe"}


def test_the_indexer_rotates_as_it_is_told() -> None:
    interleaved = Rotary(interleaved=True)
    layer = make(BASE, "absorbed", rotary=interleaved)
    assert not layer.index_rotary.interleaved  # DeepSeek-V3.2 interleaves the queries of the core alone
    both = make(BASE, "merged", rotary=interleaved, index_rotary=interleaved)
    assert both.index_rotary.interleaved
    x = sequence(BASE)
    assert (run(layer, x) - run(both, x)).abs().max() > 1e-6


def test_initial_norms_are_identities() -> None:
    layer = dsa_torch.Layer(BASE)
    assert layer.get_parameter("indexer.k_norm.weight").eq(1).all()
    assert layer.get_parameter("indexer.k_norm.bias").eq(0).all()


# At full size on the meta device; `test_layer_contract` holds the contexts below the top k.


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("spec", [V32, replace(V32, own_indexer=False)], ids=["indexer", "selection of another layer"])
def test_flops_beyond_the_top_k_at_full_size(spec: DSA, form: str, path: Any) -> None:
    layer = dsa_torch.Layer(spec, form=form, path=path, device="meta", dtype=torch.bfloat16)
    cache, context = Cache(), 0
    for new_tokens in (2047, 3, 1, 5, 900):
        context += new_tokens
        x = torch.empty(2, new_tokens, 7168, dtype=torch.bfloat16, device="meta")
        with CountOperations() as counted, torch.inference_mode():
            assert layer(x, cache).shape == x.shape
        workload = Workload(context, new_tokens, 2)
        # The fast path reads min(i, k) latents where every query has k: the sparse count, by a real layer.
        sparse = path == "fast" and form in ("absorbed", "merged") and context - new_tokens >= 2048
        assert spec.gathers(workload, form) == (form in ("absorbed", "merged") and context - new_tokens >= 2048)
        expected = flops(spec, workload, form, "causal" if sparse else "dense")
        exact_pairs = flops(spec, workload, form, "dense")
        if sparse and spec.own_indexer:
            expected["index_score"] = exact_pairs["index_score"]  # scores of later tokens are computed and masked
        assert counted.total == sum(expected.values())
        if path == "reference" or sparse:
            assert dict(counted.flops) == expected
        shapes = {name: tuple(t.shape) for name, t in cache.tensors.items()}
        kept = spec.cache(FULL, form)
        assert shapes == {t.name: (2, t.heads.size, context, t.width.size) for t in kept}
        assert cache.storage_bytes == sum(2 * 2 * t.heads.size * context * t.width.size for t in kept)


def test_measure_predicts_what_the_chosen_path_computes() -> None:
    def case(form: str, context: int, new_tokens: int) -> Case:
        return Case(Layer("dsa", V32, FULL, form), Workload(context, new_tokens), "decode")

    def predicted(path: str | None, *what: Any) -> int:
        return predict(case(*what), Settings("meta", "bf16", 1, 1, 1, 0, 0, path)).flops

    fast = sum(flops(V32, Workload(8192)).values())
    assert predicted(None, "absorbed", 8192, 1) == fast < predicted("reference", "absorbed", 8192, 1)
    some, every = flops(V32, Workload(8192, 5)), flops(V32, Workload(8192, 5), count="dense")
    mixed = some | {"index_score": every["index_score"]}
    assert predicted(None, "absorbed", 8192, 5) == sum(mixed.values())
    assert predicted(None, "expanded", 8192, 1) == predicted("reference", "expanded", 8192, 1)
    needed = [memory_needed(case("absorbed", n, 1), Settings("cpu", "bf16", n, 1, 1, 0, 0, None)) for n in (64, 8192)]
    assert 0 < needed[0] < needed[1]


# In documents and on the command line.


def glm() -> Any:
    document = presets.read_document(presets.folder("models") / "glm-5.2.yaml")
    assert isinstance(document, dict)
    return document


def test_glm_5_2_has_21_indexers() -> None:
    model = read_model(glm(), "glm")
    own = [i for g in model.groups for i in g.indices if getattr(g.attention, "own_indexer", False)]
    assert sorted(own) == [0, 1, 2, *range(6, 78, 4)]


def test_a_document_whose_selection_comes_from_nowhere_is_refused() -> None:
    document = glm()
    document["layers"][0]["attention"]["own_indexer"] = False
    with pytest.raises(AttncalcError, match="layer 0 has no indexer and none before it to reuse"):
        read_model(document, "glm")


def test_a_document_with_a_window_over_a_selection_is_refused() -> None:
    document = glm()
    document["layers"][0]["reach"] = {"window": 64}
    with pytest.raises(AttncalcError, match=r"layers\[0\]\.reach: must be full"):
        read_model(document, "glm")


def test_compare_says_where_the_sparse_form_is_cheaper(attncalc: Any) -> None:
    record = attncalc("compare", "mla:absorbed", "dsa:absorbed", "--json").record
    assert [r["sparse_beats_dense_from"] for r in record["results"]] == [None, 2283]
    text = " ".join(attncalc("compare", "dsa:absorbed").out.split())
    assert "dsa:absorbed: indexer and core cost fewer FLOPs than a core over all keys from a context of 2,283" in text
    dense = attncalc("compare", "dsa:absorbed", "--count", "dense", "--json").record["results"]
    assert dense[0]["sparse_beats_dense_from"] is None


def test_compare_like_a_model_takes_its_indexer(attncalc: Any) -> None:
    (own, *_), (like,) = (
        attncalc("compare", *words, "--form", "absorbed", "--json").record["results"]
        for words in (("glm-5",), ("dsa", "--like", "glm-5"))
    )
    names = ("parameters", "flops_attention", "sparse_beats_dense_from", "cache_elements_per_token_per_layer")
    assert [own[n] for n in names] == [like[n] for n in names]
    wide = attncalc("compare", "dsa", "--qk-rope-head-dim", "256")
    assert (wide.status, wide.out) == (2, "")
    assert wide.err.startswith("--qk-rope-head-dim: must not exceed the 128 values")


def test_engine_transformers(attncalc: Any) -> None:
    command = ("cache", "deepseek-v3.2", "-c", "1000", "--engine", "transformers", "--json")
    assert attncalc(*command).record["results"][0]["bytes_total"] == 61 * 1000 * 2 * (512 + 64 + 128)
    assert attncalc(*command, "--index-dtype", "bf16").status == 0
    refused = attncalc(*command, "--index-dtype", "fp8")
    assert refused.status == 2
    assert "transformers keeps index keys in the dtype of its cache" in refused.err


@pytest.mark.parametrize("claim", ["top-k", "decode"])
def test_verify_a_model_with_an_indexer_on_some_layers(claim: str) -> None:
    small = Model("small", 24, tuple(LayerGroup((i,), s, None) for i, s in enumerate(FEATURES.values())))
    rows = verify.run([claim], [small], 0)
    assert rows
    assert all(row["ok"] for row in rows)
