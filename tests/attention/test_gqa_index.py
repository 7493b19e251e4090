"""GQA with an indexer: what it stores, reads and computes, and the layer against its definition."""

from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
torch.set_num_threads(1)  # tiny tensors: two threads wait for each other longer than they compute

import attncalc  # noqa: E402
from attncalc.attention import gqa_torch  # noqa: E402
from attncalc.attention.base import Step  # noqa: E402
from attncalc.attention.gqa import GQA  # noqa: E402
from attncalc.attention.gqa_index import IndexedGQA  # noqa: E402
from attncalc.attention.gqa_index_torch import Layer  # noqa: E402
from attncalc.dtypes import Formats  # noqa: E402
from attncalc.errors import AttncalcError  # noqa: E402
from attncalc.reach import FULL, Reach  # noqa: E402
from attncalc.workload import Workload  # noqa: E402
from tests.attention.common import check_splits, close, sequence  # noqa: E402

M3 = IndexedGQA(6144, 64, 4, 128, 128, 64, index_dim=128, block_size=128, blocks=16)
TINY = IndexedGQA(20, 4, 2, 8, 6, 4, index_dim=6, block_size=5, blocks=3)
SPECS = {
    "three blocks": TINY,
    "two local ones": replace(TINY, blocks=4, local_blocks=2),
    "own block alone": replace(TINY, blocks=1),
    "no RoPE": replace(TINY, rope_dim=0, num_kv_heads=4),
}


def test_one_index_key_in_57_of_60_layers() -> None:
    model = attncalc.load("minimax-m3")
    plain = 60 * 2 * 4 * 128
    assert model.cache(4096).elements_per_token == plain + 57 * 128
    assert model.cache(4096).bytes_total == 4096 * 2 * (plain + 57 * 128)
    # An index key has a format of its own: e4m3 with a scale per 128 values.
    small = model.cache(4096, formats=Formats(index="fp8"))
    assert small.bytes_total == 4096 * (2 * plain + 57 * 132)
    # Replicated over GPUs, as K and V are divided.
    assert model.cache(4096, tp=4).bytes_total == 4096 * 2 * (plain // 4 + 57 * 128)


@pytest.mark.parametrize("context", [1, 128, 2048, 2049, 100_000])
def test_read_and_computed_in_a_decode_step(context: int) -> None:
    ops = {op.name: op for op in M3.ops(Step(Workload(context)), "direct", cached="direct").contractions}
    tokens = context if context <= 2048 else 15 * 128 + (context - 1) % 128 + 1
    assert ops["score"].flops == ops["value"].flops == 2 * 64 * 128 * tokens
    assert ops["index_score"].flops == 2 * 4 * 128 * context
    read = {n: ops[n].bytes(Formats())["cache"] for n in ("score", "value", "index_score")}
    assert read == {"score": 1024 * tokens, "value": 1024 * tokens, "index_score": 256 * context}


def make(spec: IndexedGQA) -> Any:
    torch.manual_seed(0)
    layer = Layer(spec, dtype=torch.float64)
    with torch.no_grad():
        for p in layer.parameters():
            p.normal_(mean=float(p.ndim == 1), std=0.5)
    return layer


def definition(layer: Any, x: Any) -> Any:
    """One query and one head at a time."""
    spec, w = layer.indexed, dict(layer.named_parameters())
    H, G, C = spec.num_heads, spec.num_kv_heads, spec.block_size
    table = layer.rotary.table(0, x.shape[1], spec.rope_dim, x.device)

    def made(row: Any, name: str, heads: int, norm: str = "") -> Any:
        out = (row @ w[f"{name}.weight"].T).view(len(row), heads, -1)
        if norm:
            out = out / (out.square().mean(-1, keepdim=True) + layer.eps).sqrt() * w[f"{norm}.weight"]
            return layer.rotary.rotate(out.transpose(0, 1), table)
        return out.transpose(0, 1)

    out = torch.zeros_like(x)
    for b, row in enumerate(x):
        q, k = made(row, "q_proj", H, "q_norm"), made(row, "k_proj", G, "k_norm")
        v = made(row, "v_proj", G)
        index_q = made(row, "indexer.q_proj", G, "indexer.q_norm")
        (index_k,) = made(row, "indexer.k_proj", 1, "indexer.k_norm")
        for t in range(len(row)):
            heads = []
            for h in range(H):
                g, own = h // (H // G), t // C
                best = dict[int, float]()
                for s in range(t + 1):
                    score = float(index_q[g, t] @ index_k[s])
                    best[s // C] = max(best.get(s // C, score), score)
                local = {j for j in best if j > own - spec.local_blocks}
                others = sorted(set(best) - local, key=best.__getitem__, reverse=True)
                chosen = local | set(others[: spec.blocks - spec.local_blocks])
                keys = [s for s in range(t + 1) if s // C in chosen]
                weights = (k[g, keys] @ q[h, t] * spec.head_dim**-0.5).softmax(0)
                heads.append(weights @ v[g, keys])
            out[b, t] = w["o_proj.weight"] @ torch.cat(heads)
    return out


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_equals_the_definition(spec: IndexedGQA) -> None:
    layer, x = make(spec), sequence(spec, 33)
    with torch.no_grad():
        assert close(layer(x), definition(layer, x))


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("capacity", [0, 60])
def test_steps_equal_one_prefill(spec: IndexedGQA, capacity: int) -> None:
    layer, x = make(spec), sequence(spec, 44)
    check_splits(layer, x, capacity, [44], [1, 2, 21, 17, 1, 1, 1], [31, *[1] * 13])


def test_as_many_blocks_as_the_context_has_is_gqa() -> None:
    layer, x = make(replace(TINY, blocks=9)), sequence(TINY, 45)
    plain = gqa_torch.Layer(TINY.gqa, dtype=torch.float64)
    plain.load_state_dict({n: p for n, p in layer.state_dict().items() if not n.startswith("indexer")})
    fewer = make(replace(TINY, blocks=8))
    fewer.load_state_dict(layer.state_dict())
    with torch.no_grad():
        assert close(layer(x), plain(x))
        assert (fewer(x) - plain(x)).abs().max() > 1e-6


def test_splits_over_gpus_and_what_it_refuses() -> None:
    assert M3.shard(8) == replace(M3, num_heads=8, num_kv_heads=1)
    assert M3.with_kv_heads(64) == GQA(6144, 64, 64, 128, 128, 64, qk_norm="head")
    for change in ({"num_kv_heads": 3}, {"rope_dim": 7}, {"index_dim": 32}, {"local_blocks": 17}, {"block_size": 0}):
        with pytest.raises(AttncalcError):
            replace(M3, **change)
    with pytest.raises(AttncalcError, match="reach"):
        M3.cache(Reach("window", 8), "direct")
    with pytest.raises(ValueError, match="window 8"):
        Layer(TINY, Reach("window", 8))
    assert M3.cache(FULL, "direct")[-1].name == "index_k"
