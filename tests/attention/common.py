"""What the layer tests of several variants share: running a layer, and the contract with its specification."""

import math
from collections import Counter
from collections.abc import Iterable
from fractions import Fraction
from itertools import product
from typing import Any

import torch

from attncalc.attention.base import Attention, Step, input_size
from attncalc.attention.torch_base import Cache, CountOperations
from attncalc.dtypes import Formats
from attncalc.ops import Contraction
from attncalc.reach import FULL, Reach
from attncalc.workload import Workload

torch.set_num_threads(1)  # tiny tensors: two threads wait for each other longer than they compute

REACHES = [FULL, Reach("window", 5), Reach("chunk", 5)]
TOKENS = 13
BATCH = 2


def make(cls: Any, spec: Any, reach: Reach = FULL, form: str | None = None, **options: Any) -> Any:
    """A float64 layer whose parameters are all random, norms too; the same in every form with the same weights."""
    torch.manual_seed(0)
    layer = cls(spec, reach, form or spec.forms[0], dtype=torch.float64, **options)
    with torch.no_grad():
        for name, p in layer.named_parameters():
            if "norm" in name:
                p.normal_(mean=1.0, std=0.5)
    return layer


def sequence(spec: Any, tokens: int = TOKENS, batch: int = BATCH) -> Any:
    torch.manual_seed(1)
    return torch.randn(batch, tokens, input_size(spec), dtype=torch.float64)


def run(layer: Any, x: Any, *splits: int, cache: Cache | None = None) -> Any:
    cache = cache or Cache()
    with torch.inference_mode():
        out = [layer(part, cache) for part in x.split(splits or x.shape[1], dim=1)]
    assert cache.length == x.shape[1]
    return torch.cat(out, dim=1)


def close(got: Any, expected: Any) -> bool:
    return bool((got - expected).abs().max() < 1e-12 * expected.abs().max())


def check_splits(layer: Any, x: Any, capacity: int, *runs: list[int]) -> None:
    """Whatever the steps, their outputs are those of one prompt."""
    for splits in runs:
        cache = Cache(capacity=capacity)
        with torch.no_grad():
            got = torch.cat([layer(part, cache) for part in x.split(splits, dim=1)], dim=1)
            assert close(got, layer(x))


def assert_equal(got: Any, expected: Any) -> None:
    assert got.shape == expected.shape
    assert (got - expected).abs().max() < 1e-12 * expected.abs().max()


def check_steps(cls: Any, spec: Any, reach: Reach) -> None:
    """Every form and path, in any split and with room reserved, gives what one prompt gives."""
    x = sequence(spec)
    whole = run(make(cls, spec, reach, path="reference"), x)
    for form, path in product(spec.forms, cls.paths(spec)):
        layer = make(cls, spec, reach, form, path=path)
        assert_equal(run(layer, x), whole)
        assert_equal(run(layer, x, 1, 2, 7, 1, 1, 1), whole)
        assert_equal(run(layer, x, 7, 3, 1, 2, cache=Cache(capacity=20)), whole)


def check_definition(cls: Any, spec: Any, reach: Reach, heads: Any) -> None:
    """Every form and path equals a softmax over keys, one token, head and key at a time.

    `heads(weights, token, position)` gives q, k and v of all H heads and the scale, from the definition.
    """
    x = sequence(spec, 8)
    layer = make(cls, spec, reach)
    w = {name: p.detach() for name, p in layer.named_parameters()}
    expected = x.new_zeros(*x.shape[:2], spec.hidden_size)
    for b, row in enumerate(x):
        made = [heads(w, token, t) for t, token in enumerate(row)]
        for t in range(len(row)):
            out = []
            for h in range(spec.num_heads):
                total: Any = 0.0
                weighted: Any = 0.0
                for s in range(t + 1):
                    if sees(reach, t, s):
                        weight = (made[t][0][h] @ made[s][1][h] * made[t][3]).exp()
                        total, weighted = total + weight, weighted + weight * made[s][2][h]
                out.append(weighted / total)
            expected[b, t] = w["o_proj.weight"] @ torch.cat(out)
    for form, path in product(spec.forms, cls.paths(spec)):
        assert_equal(run(make(cls, spec, reach, form, path=path), x), expected)


def sees(reach: Reach, query: int, key: int) -> bool:
    size = reach.size
    near = {"full": True, "window": query - key < size, "chunk": size and query // size == key // size}
    return key <= query and bool(near[reach.kind])


def rotated(row: Any, position: int, first: int, width: int) -> Any:
    """`width` values from `first` on, turned as complex numbers of values half the width apart."""
    out, half = row.clone(), width // 2
    for i in range(half):
        angle = position * 10000 ** (-2 * i / width)
        a, b = first + i, first + i + half
        z = complex(row[a], row[b]) * complex(math.cos(angle), math.sin(angle))
        out[a], out[b] = z.real, z.imag
    return out


def rms(layer_eps: float, row: Any, weight: Any) -> Any:
    return row / (row.square().mean() + layer_eps).sqrt() * weight


def check_contract(cls: Any, spec: Attention, reach: Reach) -> None:
    """On the meta device: parameters, cache tensors and counted products are those of the specification.

    Up to the edge of a window, over it with a chunk, then one by one; and over it at once.
    """
    edge = reach.size or 40
    kept = [(f, f) for f in spec.forms] + ([("decompressed", "absorbed")] if "decompressed" in spec.forms else [])
    for (form, cached), path in product(kept, cls.paths(spec)):
        layer = cls(spec, reach, form, cached=cached, path=path, device="meta", dtype=torch.bfloat16)
        tensors = {name: tuple(tensor.shape) for name, tensor in layer.state_dict().items()}
        assert tensors == {w.name: w.sizes for w in spec.weights(form)}
        whole_prompt_only = form == "decompressed" and cached != "decompressed"
        for steps in ([edge - 2, 5, 1], [edge + 3], [1, 1]):
            cache, context = Cache(), 0
            for new_tokens in [n for n in steps[:1] if n > 1] if whole_prompt_only else steps:
                context += new_tokens
                x = torch.empty(BATCH, new_tokens, input_size(spec), dtype=torch.bfloat16, device="meta")
                with CountOperations() as counted, torch.inference_mode():
                    out = layer(x, cache)
                assert out.shape == (BATCH, new_tokens, spec.hidden_size)
                assert (out.dtype, cache.length) == (x.dtype, context)
                check_cache(cache, spec, reach, cached, context)
                step = Step(Workload(context, new_tokens, BATCH), reach, "dense")
                expected = by_name(spec.ops(step, form, cached=cached).contractions)
                if path == "reference":
                    assert counted.flops == expected
                assert counted.total == expected.total()


def check_cache(cache: Cache, spec: Attention, reach: Reach, cached: str, context: int) -> None:
    expected = spec.cache(reach, cached)
    shapes = {name: tuple(tensor.shape) for name, tensor in cache.tensors.items()}
    assert shapes == {t.name: (BATCH, t.heads.size, t.tokens(context), t.width.size) for t in expected}
    assert all(tensor.dtype == torch.bfloat16 for tensor in cache.tensors.values())
    elements = sum(BATCH * t.heads.size * t.tokens(context) * t.width.size for t in expected)
    assert cache.storage_bytes == 2 * elements


def elements(spec: Attention, form: str | None = None) -> int | Fraction:
    """Cached elements per token and layer."""
    return sum(t.elements_per_token for t in spec.cache(FULL, form or spec.forms[0]))


def core_flops(spec: Attention, form: str, context: int) -> int:
    """Score and value products of one decode step."""
    ops = spec.ops(Step(Workload(context)), form, cached=spec.forms[0]).contractions
    return sum(op.flops for op in ops if op.name in ("score", "value"))


def by_name(ops: Iterable[Contraction]) -> Counter[str]:
    """FLOPs of each operation, summed where a name comes more than once."""
    out = Counter[str]()
    for op in ops:
        out[op.name] += op.flops
    return out


def check_masked_contract(cls: Any, spec: Any, *runs: list[int]) -> None:
    """`check_contract` for a variant without a reach, whose entries are not one for each token."""
    layer = cls(spec, device="meta", dtype=torch.bfloat16)
    assert {n: tuple(p.shape) for n, p in layer.named_parameters()} == {w.name: w.sizes for w in spec.weights("")}
    for run in runs:
        cache = Cache()
        for new in run:
            with CountOperations() as counted, torch.inference_mode():
                layer(torch.empty(2, new, spec.hidden_size, device="meta", dtype=torch.bfloat16), cache)
            step = Step(Workload(cache.length, new, 2), FULL, "dense")
            contractions = spec.ops(step, "direct", cached="direct").contractions
            expected = by_name(contractions)
            assert len(expected) == len(contractions)
            assert dict(counted.flops) == dict(expected)
            assert counted.total == expected.total()
            kept = [t.at(cache.length, 2, Formats()) for t in spec.cache(FULL, "direct")]
            assert {n: tuple(t.shape) for n, t in cache.tensors.items()} == {t.name: t.shape for t in kept}
            assert cache.storage_bytes == sum(t.bytes for t in kept)


def make_scattered(cls: Any, spec: Any) -> Any:
    """A float64 layer all of whose parameters are normal with a deviation of 0.5, so that selections differ."""
    torch.manual_seed(0)
    layer = cls(spec, dtype=torch.float64)
    with torch.no_grad():
        for p in layer.parameters():
            p.normal_(std=0.5)
    return layer


def check_state_contract(cls: Any, spec: Any) -> None:
    """`check_contract` for a variant whose cache is constant: its states are in float32."""
    layer = cls(spec, device="meta", dtype=torch.bfloat16)
    assert {n: tuple(p.shape) for n, p in layer.named_parameters()} == {w.name: w.sizes for w in spec.weights("")}
    cache, form = Cache(), spec.forms[0]
    for new in (6, 1, 3):
        x = torch.empty(BATCH, new, spec.hidden_size, device="meta", dtype=torch.bfloat16)
        with CountOperations() as counted, torch.inference_mode():
            out = layer(x, cache)
        assert (out.shape, out.dtype) == (x.shape, x.dtype)
        ops = spec.ops(Step(Workload(cache.length, new, BATCH)), form, cached=form).contractions
        assert counted.flops == by_name(ops)
        assert counted.total == counted.flops.total()
        kept = [t.at(cache.length, BATCH, Formats()) for t in spec.cache(FULL, form)]
        held = {n: (tuple(t.shape), t.nbytes) for n, t in cache.tensors.items()}
        assert held == {t.name: (t.shape, t.bytes) for t in kept}
        assert cache.storage_bytes == sum(t.bytes for t in kept)


def check_state_bytes(spec: Any, vectors: set[str]) -> None:
    """A prompt costs the sum of its parts, states move once in a step, and products read all but `vectors`."""
    form = spec.forms[0]

    def products(context: int, new: int) -> tuple[Contraction, ...]:
        return spec.ops(Step(Workload(context, new, 3)), form, cached=form).contractions  # type: ignore[no-any-return]

    one = sum(op.flops for op in products(9, 1))
    for new in (1, 2, 9):
        ops = products(9, new)
        assert sum(op.flops for op in ops) == new * one
        assert all(2 * math.prod(op.gemm.values()) == op.flops for op in ops)
        moved = [op.bytes(Formats()) for op in ops]
        held = sum(t.at(9, 3, Formats()).bytes for t in spec.cache(FULL, form))
        assert sum(b["cache"] for b in moved) == sum(b["cache_write"] for b in moved) == held
        read = [w for w in spec.weights(form) if w.name not in vectors]
        assert sum(b["weight"] for b in moved) == 2 * sum(w.elements for w in read)
