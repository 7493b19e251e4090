"""The torch layers against the same layers written in the straightforward way, on a CPU: time and peak memory.

Run: python tests/benchmarks/layers.py [--quick]. Needs torch; under 3 minutes on two free cores, --quick under 1. Exit
status 1 if an output differs by 1e-4 of the largest value or more, or if absorbed MLA decode is not more than 5 times
as fast as expanded MLA decode at 8,192 tokens.

What is compared, with the same weights, input and cache, in float32 and without gradients:

- ours: `Layer` of `attncalc.attention.*_torch` in each form, on its default path (and on `fast` where that is not the
  default), with a cache that has room for the context;
- straightforward: the functions `plain_*` below, written as teaching code writes them. K and V are repeated for all
  query heads, K and V of MLA are made from all cached latents in each step, the mask is a full [T, S] matrix, scores
  and weights are tensors in memory, the cache grows by torch.cat, a recurrent state takes one token at a time. Where
  ours keeps K and V of MLA (decompressed), so does it.

Time: median over repeats after a warm-up; all forms over one cache and the straightforward one take turns, so that a
busy machine slows all. `at best` compares the least times instead: with two threads on two cores, a neighbour's load
can decide a median. Prefill is a whole prompt, decode one token at the end of the context.

Peak memory: the most that torch's CPU allocator had given out during one step beyond what it held before, from the
allocations that torch.profiler records. Weights, input and the cache before the step are held before and do not
count; a new copy of the cache does, and so does the room that our cache reserves in a prefill. Scratch memory that a
BLAS takes from the system is not seen, on either side.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

from attncalc.attention import mla_split_torch, mla_torch
from attncalc.attention.base import cached_form
from attncalc.attention.gdn import GDN
from attncalc.attention.gqa import GQA
from attncalc.attention.kda import KDA
from attncalc.attention.lightning import Lightning
from attncalc.attention.linear_state import LinearState
from attncalc.attention.mla import MLA
from attncalc.attention.mla_split import MLASplit
from attncalc.attention.retnet import RetNet
from attncalc.attention.torch_base import Cache
from attncalc.compare import Layer, layers_of
from attncalc.measure.plan import FILL_CHUNK, SMALL, Case
from attncalc.measure.run import build
from attncalc.reach import FULL
from attncalc.workload import Workload

TOLERANCE = 1e-4
CHECKED_CONTEXT = 8192
REQUIRED_RATIO = 5.0
DEEPSEEK_LIKE = MLA(2048, 16, None, 512, 128, 64, 128)

Weights = dict[str, Tensor]

# The variants that have a straightforward version here.
COMPARED = ("mha", "gqa", "mqa", "mla", "mla-split", "kda", "gdn", "lightning", "retnet", "linear-state")
Past = dict[str, Tensor]
"""What came before; a step puts its own in."""


def grow(past: Past, name: str, new: Tensor) -> Tensor:
    """All rows so far, [B, heads, S, width], in a new tensor."""
    past[name] = torch.cat((past[name], new), dim=2) if name in past else new
    return past[name]


def seen(past: Past) -> int:
    """Tokens in a cache with a row for each."""
    return next(iter(past.values())).shape[2] if past else 0


def split(x: Tensor, heads: int) -> Tensor:
    """[B, T, heads * width] -> [B, heads, T, width]."""
    return x.view(x.shape[0], x.shape[1], heads, -1).transpose(1, 2)


def norm(x: Tensor, weight: Tensor) -> Tensor:
    """RMSNorm."""
    return x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


def rotate(x: Tensor, start: int) -> Tensor:
    """RoPE; angles in float64, because float32 is off by more than the tolerance at the end of the context."""
    width, tokens = x.shape[-1], x.shape[-2]
    frequencies = 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angles = torch.arange(start, start + tokens, dtype=torch.float64)[:, None] * frequencies
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, width: int) -> Tensor:
    """q, k, v [B, H, T or S, width] -> [B, T, H * width]."""
    new_tokens, keys = q.shape[2], k.shape[2]
    mask = torch.ones(new_tokens, keys, dtype=torch.bool).tril(keys - new_tokens)
    scores = q @ k.transpose(2, 3) / width**0.5
    scores = scores.masked_fill(~mask, float("-inf"))
    return (torch.softmax(scores, dim=-1) @ v).transpose(1, 2).flatten(2)


def plain_gqa(spec: GQA, w: Weights, x: Tensor, past: Past) -> Tensor:
    """MHA, GQA and MQA."""
    start, group = seen(past), spec.num_heads // spec.num_kv_heads
    q = rotate(split(x @ w["q_proj.weight"].T, spec.num_heads), start)
    k = grow(past, "k", rotate(split(x @ w["k_proj.weight"].T, spec.num_kv_heads), start))
    v = grow(past, "v", split(x @ w["v_proj.weight"].T, spec.num_kv_heads))
    if group > 1:
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    return softmax_attention(q, k, v, spec.head_dim) @ w["o_proj.weight"].T


def plain_mla(spec: MLA, w: Weights, x: Tensor, past: Past, *, keep_kv: bool) -> Tensor:
    """MLA in head space, over cached latents or over cached K and V."""
    start, heads, nope, rope = seen(past), spec.num_heads, spec.qk_nope_head_dim, spec.qk_rope_head_dim
    if spec.q_lora_rank is None:
        q = x @ w["q_proj.weight"].T
    else:
        q = norm(x @ w["q_a_proj.weight"].T, w["q_a_layernorm.weight"]) @ w["q_b_proj.weight"].T
    q_nope, q_pe = split(q, heads).split([nope, rope], dim=-1)
    q = torch.cat((q_nope, rotate(q_pe, start)), dim=-1)
    c_kv, k_pe = (x @ w["kv_a_proj_with_mqa.weight"].T).unsqueeze(1).split([spec.kv_lora_rank, rope], dim=-1)
    c_kv, k_pe = norm(c_kv, w["kv_a_layernorm.weight"]), rotate(k_pe, start)
    if not keep_kv:
        c_kv, k_pe = grow(past, "c_kv", c_kv), grow(past, "k_pe", k_pe)
    k, v = split(c_kv.squeeze(1) @ w["kv_b_proj.weight"].T, heads).split([nope, spec.v_head_dim], dim=-1)
    k = torch.cat((k, k_pe.repeat_interleave(heads, dim=1)), dim=-1)
    if keep_kv:
        k, v = grow(past, "k", k), grow(past, "v", v)
    return softmax_attention(q, k, v, nope + rope) @ w["o_proj.weight"].T


def plain_mla_split(spec: MLASplit, w: Weights, x: Tensor, past: Past, *, keep_kv: bool) -> Tensor:
    """The same with a latent for each of K and V, and no RoPE key."""
    q = split(x @ w["q_proj.weight"].T, spec.num_heads)
    c_k, c_v = (x @ w["kv_a_proj.weight"].T).unsqueeze(1).split([spec.k_lora_rank, spec.v_lora_rank], dim=-1)
    if not keep_kv:
        c_k, c_v = grow(past, "c_k", c_k), grow(past, "c_v", c_v)
    k = split(c_k.squeeze(1) @ w["k_b_proj.weight"].T, spec.num_heads)
    v = split(c_v.squeeze(1) @ w["v_b_proj.weight"].T, spec.num_heads)
    if keep_kv:
        k, v = grow(past, "k", k), grow(past, "v", v)
    return softmax_attention(q, k, v, spec.head_dim) @ w["o_proj.weight"].T


def plain_kda(spec: KDA, w: Weights, x: Tensor, past: Past) -> Tensor:
    """KDA with a short convolution, low-rank decay and gate; as many value heads as q/k heads."""
    batch, new_tokens, _ = x.shape
    heads, width = spec.num_heads, spec.head_k_dim
    mixed = torch.cat([x @ w[f"{n}_proj.weight"].T for n in "qkv"], dim=-1)
    kernel = torch.cat([w[f"{n}_conv1d.weight"] for n in "qkv"])
    f = (x @ w["f_a_proj.weight"].T @ w["f_b_proj.weight"].T + w["dt_bias"]).view(batch, new_tokens, heads, width)
    decay = torch.exp(-w["A_log"].exp()[:, None] * functional.softplus(f))
    beta = torch.sigmoid(x @ w["b_proj.weight"].T)
    o = plain_delta(convolved(mixed, kernel, past), decay, beta, heads, width, past)
    gate = torch.sigmoid(x @ w["g_a_proj.weight"].T @ w["g_b_proj.weight"].T)
    return (norm(o, w["o_norm.weight"]).flatten(2) * gate) @ w["o_proj.weight"].T


def plain_gdn(spec: GDN, w: Weights, x: Tensor, past: Past) -> Tensor:
    """Gated DeltaNet with a short convolution and a gate; as many value heads as q/k heads."""
    mixed = convolved(x @ w["in_proj_qkv.weight"].T, w["conv1d.weight"], past)
    decay = torch.exp(-w["A_log"].exp() * functional.softplus(x @ w["in_proj_a.weight"].T + w["dt_bias"]))
    beta = torch.sigmoid(x @ w["in_proj_b.weight"].T)
    o = plain_delta(mixed, decay[..., None], beta, spec.num_heads, spec.head_k_dim, past)
    gate = functional.silu(x @ w["in_proj_z.weight"].T)
    return (norm(o, w["norm.weight"]).flatten(2) * gate) @ w["out_proj.weight"].T


def convolved(mixed: Tensor, kernel: Tensor, past: Past) -> Tensor:
    """SiLU of the short convolution of [B, T, channels]."""
    batch, new_tokens, channels = mixed.shape
    before = past["conv_state"][:, 0] if past else mixed.new_zeros(batch, kernel.shape[2] - 1, channels)
    mixed = torch.cat((before, mixed), dim=1)
    past["conv_state"] = mixed[:, None, new_tokens:].clone()
    return functional.silu(functional.conv1d(mixed.transpose(1, 2), kernel, groups=len(kernel))).transpose(1, 2)


def plain_delta(mixed: Tensor, decay: Tensor, beta: Tensor, heads: int, width: int, past: Past) -> Tensor:
    """The delta rule token by token: q, k, v side by side, decay [B, T, H, K or 1], beta [B, T, H]."""
    batch, new_tokens, _ = mixed.shape
    q, k, v = (part.view(batch, new_tokens, heads, -1) for part in mixed.split(heads * width, dim=-1))
    q = q / torch.sqrt(q.pow(2).sum(-1, keepdim=True) + 1e-6) / width**0.5
    k = k / torch.sqrt(k.pow(2).sum(-1, keepdim=True) + 1e-6)
    state = past.get("recurrent_state", mixed.new_zeros(batch, heads, width, v.shape[-1]))
    out = []
    for t in range(new_tokens):
        state = decay[:, t, :, :, None] * state
        u = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], state))
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], u)
        out.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    past["recurrent_state"] = state
    return torch.stack(out, dim=1)


def plain_lightning(spec: Lightning, w: Weights, x: Tensor, past: Past) -> Tensor:
    """Lightning attention."""
    heads = spec.num_heads
    q, k, v = functional.silu(x @ w["qkv_proj.weight"].T).view(*x.shape[:2], heads, -1).chunk(3, dim=-1)
    decay = torch.exp(-(2 ** (-8 / heads * torch.arange(1, heads + 1))))
    o = norm(plain_retention(q, k, v, decay, past).flatten(2), w["norm.weight"])
    return (o * torch.sigmoid(x @ w["output_gate.weight"].T)) @ w["out_proj.weight"].T


def plain_retnet(spec: RetNet, w: Weights, x: Tensor, past: Past, start: int) -> Tensor:
    """Multi-scale retention with a gate, after `start` tokens."""
    q, k, v = (split(x @ w[f"{n}_proj.weight"].T, spec.num_heads) for n in "qkv")
    q, k = rotate(q, start) / spec.head_k_dim**0.5, rotate(k, start)
    decay = 1 - 2.0 ** (-5 - torch.arange(spec.num_heads))
    o = plain_retention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), decay, past)
    gate = functional.silu(x @ w["g_proj.weight"].T)
    return (norm(o, w["g_norm_swish_gate.weight"]).flatten(2) * gate) @ w["o_proj.weight"].T


def plain_retention(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, past: Past) -> Tensor:
    """Token by token: [B, T, H, width] each, decay [H]."""
    state = past.get("recurrent_state", q.new_zeros(q.shape[0], *q.shape[2:], v.shape[-1]))
    out = []
    for t in range(q.shape[1]):
        state = decay[:, None, None] * state + torch.einsum("bhk,bhv->bhkv", k[:, t], v[:, t])
        out.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    past["recurrent_state"] = state
    return torch.stack(out, dim=1)


def plain_linear_state(spec: LinearState, w: Weights, x: Tensor, past: Past) -> Tensor:
    """A gated linear recurrence."""
    q, k, v, decay = (x @ w[f"{name}_proj.weight"].T for name in ("q", "k", "v", "decay"))
    decay = torch.sigmoid(decay)
    state = past["recurrent_state"][:, 0] if past else x.new_zeros(x.shape[0], spec.state_dim, spec.state_dim)
    out = []
    for t in range(x.shape[1]):
        state = decay[:, t, :, None] * state + torch.einsum("bk,bv->bkv", k[:, t], v[:, t])
        out.append(torch.einsum("bk,bkv->bv", q[:, t], state))
    past["recurrent_state"] = state[:, None]
    return torch.stack(out, dim=1) @ w["o_proj.weight"].T


def plain(spec: Any, w: Weights, x: Tensor, past: Past, start: int, *, keep_kv: bool) -> Tensor:
    """The straightforward step of any specification, after `start` tokens."""
    if isinstance(spec, MLA):
        return plain_mla(spec, w, x, past, keep_kv=keep_kv)
    if isinstance(spec, MLASplit):
        return plain_mla_split(spec, w, x, past, keep_kv=keep_kv)
    if isinstance(spec, KDA):
        return plain_kda(spec, w, x, past)
    if isinstance(spec, GDN):
        return plain_gdn(spec, w, x, past)
    if isinstance(spec, Lightning):
        return plain_lightning(spec, w, x, past)
    if isinstance(spec, RetNet):
        return plain_retnet(spec, w, x, past, start)
    return plain_linear_state(spec, w, x, past) if isinstance(spec, LinearState) else plain_gqa(spec, w, x, past)


Run = Callable[[], Tensor]


class Group(NamedTuple):
    """One step in the straightforward way and in ours, by form; same weights, input and cache in each call."""

    phase: str
    straight: Run
    ours: dict[str, Run]


def filled(layer: nn.Module, hidden_size: int, tokens: int, capacity: int) -> Cache:
    """A cache that has seen so many random tokens."""
    cache = Cache(capacity=capacity)
    for start in range(0, tokens, FILL_CHUNK):
        layer(torch.randn(1, min(FILL_CHUNK, tokens - start), hidden_size), cache)
    return cache


def step_of(layer: nn.Module, x: Tensor, cache: Cache) -> Run:
    """A call of the layer that leaves `cache` as it is: it writes to the same row each time."""

    def run() -> Tensor:
        out: Tensor = layer(x, replace(cache, buffers=dict(cache.buffers), parts=dict(cache.parts)))
        return out

    return run


def plain_step_of(spec: Any, weights: Weights, x: Tensor, cache: Cache, *, keep_kv: bool) -> Run:
    """The same of the straightforward way, on a copy of the cache."""
    past = {key: value.clone() for key, value in cache.tensors.items()}
    return lambda: plain(spec, weights, x, dict(past), cache.length, keep_kv=keep_kv)


def forms_of(spec: Any, source: Any) -> Iterator[tuple[str, str, nn.Module]]:
    """Name, kept form and layer of every form, with the weights of `source` or products of them."""
    for form in spec.forms:
        name, layer = f"{spec.variant}:{form}" if len(spec.forms) > 1 else spec.variant, source
        if isinstance(spec, MLA | MLASplit):
            module: Any = mla_torch if isinstance(spec, MLA) else mla_split_torch
            layer = module.convert(source, form, cached=cached_form(spec, form))
        elif form != spec.forms[0]:
            layer = build(
                Case(Layer(spec.variant, spec, FULL, form), Workload(1, 1, 1), ""), None, "cpu", torch.float32
            )
            layer.load_state_dict(source.state_dict())
        yield name, cached_form(spec, form), layer
        if form == "chunked" and "fast" in source.paths(spec):
            case = Case(Layer(spec.variant, spec, FULL, form), Workload(1, 1, 1), "")
            fast = build(case, "fast", "cpu", torch.float32)
            fast.load_state_dict(source.state_dict())
            yield f"{name} (fast)", cached_form(spec, form), fast


def groups(prompt: int, context: int) -> Iterator[Group]:
    """Every variant as a prompt of `prompt` tokens and as the last token of `context`; one group for each cache."""
    for base in (layers_of(name, SMALL, None)[0] for name in COMPARED):
        spec: Any = base.attention
        torch.manual_seed(0)
        source = build(Case(base, Workload(1, 1, 1), ""), None, "cpu", torch.float32)
        kept: dict[bool, dict[str, nn.Module]] = {}
        for name, cached, layer in forms_of(spec, source):
            kept.setdefault(cached == "decompressed", {})[name] = layer
        for keep_kv, layers in kept.items():
            for phase, tokens, new in (("prefill", prompt, prompt), ("decode", context, 1)):
                x = torch.randn(1, new, spec.hidden_size)
                cache = filled(list(layers.values())[1 % len(layers)], spec.hidden_size, tokens - new, tokens)
                straight = plain_step_of(spec, dict(source.state_dict()), x, cache, keep_kv=keep_kv)
                yield Group(phase, straight, {name: step_of(layer, x, cache) for name, layer in layers.items()})


class Times(NamedTuple):
    """Seconds of one step over its repeats."""

    median: float
    least: float


def times(runs: Iterable[Run], repeat: int) -> list[Times]:
    """Of all, which take turns; they have run before."""
    taken: list[tuple[Run, list[float]]] = [(run, []) for run in runs]
    for _ in range(repeat):
        for run, seconds in taken:
            start = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - start)
    return [Times(statistics.median(seconds), min(seconds)) for _, seconds in taken]


@contextmanager
def quiet_stderr() -> Iterator[None]:
    """Nothing reaches the descriptor: the profiler's library writes there and cannot be told otherwise."""
    kept, sink = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(sink)


def peak_bytes(run: Run) -> tuple[int, Tensor]:
    """Most bytes that torch's CPU allocator held during the call beyond those before it, and the result."""
    with quiet_stderr(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        out = run()
    results: Any = record.profiler
    held = peak = 0
    for event in results.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak, out


def shown_time(seconds: float) -> str:
    """Three digits."""
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def shown_ratio(ratio: float) -> str:
    """Three digits, or all before the point."""
    return f"{ratio:,.0f}x" if ratio >= 100 else f"{ratio:.3g}x"


def difference(got: Tensor, expected: Tensor) -> float:
    """Largest difference relative to the largest expected value."""
    return float((got - expected).abs().max() / expected.abs().max())


HEADER = ("layer", "phase", "ours", "straight", "faster", "at best", "ours", "straight", "less", "error")
ROW = "{:25}{:9}{:>9}{:>10}{:>9}{:>9}{:>13}{:>13}{:>8}{:>10}"


def table(prompt: int, context: int, repeat: dict[str, int]) -> bool:
    """Measure and print all pairs; whether all outputs agree."""
    print(f"prefill {prompt:,} tokens; decode 1 token at {context:,}; float32, {torch.get_num_threads()} threads")
    print(ROW.format(*HEADER))
    agreed = True
    for phase, straight, ours in groups(prompt, context):
        straight_peak, expected = peak_bytes(straight)
        tried = {name: peak_bytes(run) for name, run in ours.items()}  # the warm-up as well
        straight_times, *our_times = times((straight, *ours.values()), repeat[phase])
        for (name, (peak, got)), taken in zip(tried.items(), our_times, strict=True):
            error = difference(got, expected)
            agreed &= error < TOLERANCE
            cells = (
                *(shown_time(t.median) for t in (taken, straight_times)),
                *(shown_ratio(s / t) for s, t in zip(straight_times, taken, strict=True)),
                *(f"{size / 1e6:,.2f} MB" for size in (peak, straight_peak)),
                shown_ratio(straight_peak / peak),
                f"{error:.1e}",
            )
            print(ROW.format(name, phase, *cells), flush=True)
    return agreed


def check(repeat: int) -> bool:
    """Absorbed against expanded decode, both ours, at a DeepSeek-like size; whether it is as much faster as required.

    By the least time of each: a neighbour that holds one of the cores only adds time.
    """
    spec = DEEPSEEK_LIKE
    absorbed = mla_torch.Layer(spec)
    expanded = mla_torch.convert(absorbed, "expanded")
    cache = filled(expanded, spec.hidden_size, CHECKED_CONTEXT - 1, CHECKED_CONTEXT)
    x = torch.randn(1, 1, spec.hidden_size)
    first, second = step_of(absorbed, x, cache), step_of(expanded, x, cache)
    error = difference(first(), second())
    fast, slow = times((first, second), repeat)
    ratio = slow.least / fast.least
    ok = ratio > REQUIRED_RATIO and error < TOLERANCE
    print(
        f"\nMLA decode at {CHECKED_CONTEXT:,} tokens, {spec.num_heads} heads of {spec.qk_nope_head_dim} +"
        f" {spec.qk_rope_head_dim}, latent {spec.kv_lora_rank}, error {error:.1e}"
        f"\nmedian: absorbed {shown_time(fast.median)}, expanded {shown_time(slow.median)},"
        f" {shown_ratio(slow.median / fast.median)}"
        f"\nleast:  absorbed {shown_time(fast.least)}, expanded {shown_time(slow.least)}, {shown_ratio(ratio)};"
        f" required more than {REQUIRED_RATIO:g}x: {'ok' if ok else 'FAILED'}"
    )
    return ok


def main() -> int:
    """Print the table, then the required check."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="shorter contexts and fewer repeats")
    quick = parser.parse_args().quick
    torch.set_num_threads(2)
    with torch.no_grad():
        agreed = (
            table(512, 1024, {"prefill": 3, "decode": 7}) if quick else table(2048, 4096, {"prefill": 3, "decode": 15})
        )
        fast = check(7 if quick else 15)
    if not agreed:
        print(f"FAILED: an error is not below {TOLERANCE:g}")
    return 0 if agreed and fast else 1


if __name__ == "__main__":
    raise SystemExit(main())
