"""Identities, proven by running layers and short constructions in float64."""

from collections.abc import Iterator
from dataclasses import fields, replace
from importlib import import_module
from typing import Any, cast

import torch
from torch import Tensor, nn

from attncalc.attention import gqa_torch, mla_split_torch, mla_torch, state_torch
from attncalc.attention.base import Attention, cached_form, input_size
from attncalc.attention.convert_torch import mla_of
from attncalc.attention.csa import CSA
from attncalc.attention.dsa import DSA
from attncalc.attention.gdn import GDN
from attncalc.attention.gla import GLA
from attncalc.attention.gqa import GQA
from attncalc.attention.gqa_concat import ConcatGQA
from attncalc.attention.gqa_conv import ConvGQA
from attncalc.attention.gqa_index import IndexedGQA
from attncalc.attention.gta import GTA
from attncalc.attention.kda import KDA
from attncalc.attention.lightning import Lightning
from attncalc.attention.linear_state import LinearState
from attncalc.attention.mamba import Mamba
from attncalc.attention.mamba2 import Mamba2
from attncalc.attention.mfa import MFA
from attncalc.attention.mla import MLA
from attncalc.attention.mla_split import MLASplit
from attncalc.attention.moba import MoBA
from attncalc.attention.nsa import NSA
from attncalc.attention.residual_conv import ResidualConv
from attncalc.attention.retnet import RetNet
from attncalc.attention.rg_lru import RGLRU
from attncalc.attention.rotary import Rotary
from attncalc.attention.rwkv7 import RWKV7
from attncalc.attention.short_conv import ShortConv
from attncalc.attention.torch_base import Cache
from attncalc.attention.tpa import TPA
from attncalc.reach import FULL, Reach
from attncalc.verify.proof import Proof, different, same

TOKENS = 12

SMALL = MLA(48, 4, 20, 16, 12, 8, 10)
MLAS = {
    "q-LoRA and RoPE": SMALL,
    "without q-LoRA": replace(SMALL, q_lora_rank=None),
    "NoPE": replace(SMALL, rotated=False),
    "no RoPE key": replace(SMALL, qk_rope_head_dim=0),
    "output gate": replace(SMALL, gate="full"),
    "without latent norms": replace(SMALL, latent_norm=False),
}
SPLIT = MLASplit(48, 4, 12, 10, 16, 14, bias=True)
GLA2 = GLA(48, 4, 2, 20, 16, 12, 8, 10)
TENSOR_PRODUCT = TPA(48, 4, 8, 3, 2, 2, 8)
SPARSE = DSA(48, 4, 20, 16, 12, 8, 10, index_n_heads=6, index_head_dim=10, index_topk=5)
KDAS = {
    "HV = H": KDA(40, 2, 2, 8, 8, decay="low_rank", decay_rank=4, gate="low_rank", gate_rank=4, chunk_size=4),
    "HV = 2 H": KDA(40, 2, 4, 8, 6, gate="full", chunk_size=4),
}
STATES: dict[str, GDN | Lightning | RetNet] = {
    "gdn": GDN(40, 2, 4, 8, 6, conv_kernel=4, chunk_size=4),
    "lightning": Lightning(40, 4, 8, chunk_size=4),
    "retnet": RetNet(40, 4, 8, 16, chunk_size=4),
}
MLA_SOURCE = "arXiv 2405.04434 section 2.1.2; documents 000, 002, 004"


DSA_SOURCE = "arXiv 2512.02556 section 2.1"


def layer_of(spec: Attention, reach: Reach, form: str, **options: Any) -> nn.Module:
    """The torch layer of a specification in float64, every vector random too, so that none can hide."""
    module = import_module(f"{type(spec).__module__}_torch")
    made: nn.Module = module.Layer(spec, reach, form, dtype=torch.float64, **options)
    for name, parameter in made.named_parameters():
        if parameter.ndim == 1 or name.endswith("bias"):
            torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.3)
    return made


def inputs(spec: Attention, tokens: int = TOKENS) -> Tensor:
    """[2, T, D], or what the layer reads beside D."""
    return torch.randn(2, tokens, input_size(spec), dtype=torch.float64)


def convert(layer: nn.Module, form: str) -> nn.Module:
    """The same layer in another form."""
    spec = layer.spec
    if isinstance(spec, MLASplit):
        return mla_split_torch.convert(cast("mla_split_torch.Layer", layer), form)
    return mla_torch.convert(cast("mla_torch.Layer", layer), form)


def forms_agree(text: str, spec: Attention, forms: tuple[str, ...]) -> Iterator[Proof]:
    """Each of the forms against `expanded`, with converted weights."""
    expanded = layer_of(spec, FULL, "expanded")
    x = inputs(spec)
    expected = expanded(x)
    for form in forms:
        observed = convert(expanded, form)(x)
        yield same(f"{form} = expanded, {text}", MLA_SOURCE, expected, observed)


def absorb() -> Iterator[Proof]:
    """Expanded, absorbed and decompressed MLA give the same output."""
    for text, spec in MLAS.items():
        yield from forms_agree(text, spec, ("absorbed", "decompressed"))
    yield from forms_agree("separate latents with biases", SPLIT, ("absorbed", "decompressed"))


def merge() -> Iterator[Proof]:
    """Weights multiplied offline equal the absorbed form."""
    for text, spec in MLAS.items():
        yield from forms_agree(text, spec, ("merged",))
    yield from forms_agree("separate latents with biases", SPLIT, ("merged",))


def forms() -> Iterator[Proof]:
    """The forms of grouped latent and tensor-product attention give the same output, from the same weights."""
    for text, spec in (
        ("GLA", GLA2),
        ("GLA without q-LoRA, no RoPE key", replace(GLA2, q_lora_rank=None, qk_rope_head_dim=0)),
        ("TPA", TENSOR_PRODUCT),
        ("TPA with a plain query", replace(TENSOR_PRODUCT, q_rank=None)),
    ):
        yield from same_weights(text, spec)
    mla = replace(SMALL, latent_norm=False)
    one = layer_of(replace(GLA2, num_latents=1, latent_norm=False), FULL, "absorbed")
    state = {name: weight.clone() for name, weight in one.state_dict().items()}
    down = torch.cat((state.pop("kv_a_proj.weight"), state.pop("k_pe_proj.weight")))
    other = layer_of(mla, FULL, "absorbed")
    other.load_state_dict(state | {"kv_a_proj_with_mqa.weight": down})
    x = inputs(mla)
    yield same("GLA with one latent is MLA", "arXiv 2505.21487", one(x), other(x))


def same_weights(text: str, spec: Attention) -> Iterator[Proof]:
    """Every form against `expanded`."""
    expanded, x = layer_of(spec, FULL, "expanded"), inputs(spec)
    expected = expanded(x)
    for form in spec.forms:
        if form != "expanded":
            layer = layer_of(spec, FULL, form)
            layer.load_state_dict(expanded.state_dict())
            yield same(f"{form} = expanded, {text}", spec.source, expected, layer(x))


def rope() -> Iterator[Proof]:
    """A rotation between W_UQ and W_UK depends on the distance, so that no fixed matrix can be absorbed."""
    width = 8
    w_uq, w_uk = (torch.randn(width, 6, dtype=torch.float64) for _ in range(2))
    rotary, at = Rotary(interleaved=True), torch.eye(width, dtype=torch.float64)

    def rotation(position: int) -> Tensor:
        table = rotary.table(position, 1, width, torch.device("cpu"))
        return torch.stack([rotary.rotate(row.view(1, 1, 1, -1), table).flatten() for row in at], dim=1)

    def merged(query: int, key: int) -> Tensor:
        return (rotation(query) @ w_uq).T @ (rotation(key) @ w_uk)

    source = "document 002 section 8"
    near, far = merged(5, 4), merged(5, 2)
    yield different("RoPE on up-projected keys: the merged matrix differs between two distances", source, near, far)
    yield same("the same distance elsewhere: it is the same matrix", source, near, merged(9, 8), 1e-6)
    yield from forms_agree("decoupled RoPE restores the identity", SMALL, ("absorbed",))


def groups() -> Iterator[Proof]:
    """GQA at its ends."""
    source = "arXiv 2305.13245 section 2.2"
    spec = GQA(32, 4, 4, 8, 8, 8)
    for text, groups_, name in (("as many groups as heads is MHA", 4, "mha"), ("one group is MQA", 1, "mqa")):
        layer = cast("gqa_torch.Layer", layer_of(replace(spec, num_kv_heads=groups_), FULL, "direct", path="reference"))
        x = inputs(spec)
        yield same(f"GQA with {text}", source, _by_definition(layer, x, name), layer(x))


def _by_definition(layer: "gqa_torch.Layer", x: Tensor, variant: str) -> Tensor:
    """MHA or MQA token by token and head by head, from the layer's weights."""
    spec, weight = layer.spec, layer.get_parameter
    table = layer.rotary.table(0, x.shape[1], spec.rope_dim, x.device)
    q, k, v = ((x @ weight(f"{n}_proj.weight").T).view(*x.shape[:2], -1, spec.head_dim).transpose(1, 2) for n in "qkv")
    q, k = layer.rotary.rotate(q, table), layer.rotary.rotate(k, table)
    out = torch.zeros(*x.shape[:2], spec.num_heads, spec.v_head_dim, dtype=x.dtype)
    for head in range(spec.num_heads):
        kv = head if variant == "mha" else 0
        for i in range(x.shape[1]):
            logits = (k[:, kv, : i + 1] @ q[:, head, i, :, None]).squeeze(-1) * layer.softmax_scale
            out[:, i, head] = (logits.softmax(-1)[:, None] @ v[:, kv, : i + 1]).squeeze(1)
    return out.flatten(2) @ weight("o_proj.weight").T


def gqa_as_mla() -> Iterator[Proof]:
    """Any GQA is an exact MLA."""
    for heads, kv_heads in ((4, 4), (6, 3), (4, 1)):
        spec = GQA(32, heads, kv_heads, 8, 8)
        text = f"{heads} heads, {kv_heads} KV heads"
        yield from as_mla(spec, text)


def as_mla(spec: GQA, text: str) -> Iterator[Proof]:
    """A GQA layer against the MLA made of its weights, without and with RoPE."""
    source = "arXiv 2502.07864 (TransMLA) section 4; document 002"
    for rotated in (False, True):
        spec = replace(spec, rope_dim=spec.head_dim if rotated else 0)
        layer = cast("gqa_torch.Layer", layer_of(spec, FULL, "direct", path="reference"))
        made = mla_of(layer)
        x = inputs(spec)
        label = "RoPE" if rotated else "NoPE"
        yield same(f"GQA as MLA, {label}, {text}", source, layer(x), made(x))


def gva() -> Iterator[Proof]:
    """Gradients of grouped value attention: the sum over a group, and the scale of q."""
    source, G, K = "document 003", 2, 8
    with torch.enable_grad():
        q, k = (torch.randn(2, 3, 5, K, dtype=torch.float64, requires_grad=True) for _ in range(2))
        v, g = torch.randn(2, 6, 5, 4, dtype=torch.float64), -torch.rand(2, 6, 5, K, dtype=torch.float64)
        beta, state = torch.rand(2, 6, 5, dtype=torch.float64), torch.zeros(2, 6, K, 4, dtype=torch.float64)
        wide_q = (q.repeat_interleave(G, dim=1) * K**-0.5).detach().requires_grad_()
        wide_k = k.repeat_interleave(G, dim=1).detach().requires_grad_()
        weights = torch.randn(2, 6, 5, 4, dtype=torch.float64)
        whole, _ = state_torch.delta_recurrent(
            q.repeat_interleave(G, dim=1) * K**-0.5, k.repeat_interleave(G, dim=1), v, g, beta, state
        )
        torch.autograd.backward((whole * weights).sum())
        apart, _ = state_torch.delta_recurrent(wide_q, wide_k, v, g, beta, state)
        torch.autograd.backward((apart * weights).sum())
    if q.grad is None or k.grad is None or wide_q.grad is None or wide_k.grad is None:
        raise RuntimeError("no gradient")
    q_groups, k_groups = (x.grad.view(2, 3, G, 5, K) for x in (wide_q, wide_k) if x.grad is not None)
    yield same("gradient of k: the sum over its value heads", source, k.grad, k_groups.sum(2))
    yield different("and not their mean", source, k.grad, k_groups.mean(2))
    yield same("gradient of q: the sum, times K^-1/2", source, q.grad, q_groups.sum(2) * K**-0.5)


def kda() -> Iterator[Proof]:
    """Recurrent and chunked forms agree, for every variant that has both."""
    for text, spec in (KDAS | STATES).items():
        yield from chunked(spec, text)


def chunked(spec: KDA | GDN | Lightning | RetNet, text: str) -> Iterator[Proof]:
    """The chunked form against the recurrent one."""
    recurrent = layer_of(spec, FULL, "recurrent")
    x = inputs(spec, 2 * spec.chunk_size + 3)
    chunked = layer_of(spec, FULL, "chunked")
    chunked.load_state_dict(recurrent.state_dict())
    yield same(f"chunked = recurrent, {text}", spec.source, recurrent(x), chunked(x), 1e-11)


def decode() -> Iterator[Proof]:
    """A prompt, a chunk and single tokens give what one prompt gives, for every layer with a cache."""
    specs: dict[str, tuple[Attention, Reach]] = {
        "mha": (GQA(32, 4, 4, 8, 8, 8), FULL),
        "gqa, biases, QK-norm, gate, sinks": (
            GQA(32, 4, 2, 8, 6, 4, "qkvo", "head", gate="full", sinks=True),
            FULL,
        ),
        "mqa, window 5": (GQA(32, 4, 1, 8, 8, 8), Reach("window", 5)),
        "gqa, chunk 4": (GQA(32, 4, 2, 8, 8), Reach("chunk", 4)),
        "gqa-concat": (ConcatGQA(32, 4, 2, 8, 6, input_size=48), FULL),
        "gqa-conv, window 5": (ConvGQA(32, 4, 2, 8, 6, 3, 4, 5), Reach("window", 5)),
        "mla": (SMALL, FULL),
        "mla, gate": (replace(SMALL, gate="full"), FULL),
        "dsa": (SPARSE, FULL),
        "dsa, selection of an earlier layer": (replace(SPARSE, own_indexer=False), FULL),
        "mla-split": (SPLIT, FULL),
        "gta": (GTA(32, 4, 2, 8, 4), FULL),
        "gta, window 5": (GTA(32, 4, 2, 8, 4), Reach("window", 5)),
        "gla": (GLA2, FULL),
        "mfa": (MFA(32, 4, 20, 12, 12), FULL),
        "tpa": (TENSOR_PRODUCT, FULL),
        "kda": (KDAS["HV = 2 H"], FULL),
        **{text: (spec, FULL) for text, spec in STATES.items()},
        "linear-state": (LinearState(24, 10), FULL),
        "mamba2": (Mamba2(24, 6, 4, 2, 5, chunk_size=4), FULL),
        "mamba": (Mamba(24, 20, 5, 3, norms="rms"), FULL),
        "rwkv7": (RWKV7(24, 3, 6, 4, 5, 4, 3, 6), FULL),
        "rg-lru": (RGLRU(24, 20, 4, 3), FULL),
        "short-conv": (ShortConv(24, 20, 3), FULL),
        "conv": (ResidualConv(24, 3), FULL),
        "nsa": (NSA(32, 4, 2, 8, 6, 4, 4, 2, 0, 4, 2, 1, 1, 3), FULL),
        "nsa, MLP": (NSA(32, 4, 2, 8, 6, 4, 4, 2, 5, 4, 2, 1, 1, 3), FULL),
        "gqa-index": (IndexedGQA(32, 4, 2, 8, 6, 4, 6, 3, 2), FULL),
        "moba": (MoBA(32, 4, 2, 8, 6, 4, 3, 2), FULL),
        "csa, window 3, top 2": (CSA(32, 4, 16, 4, 12, 2, 6, 2, 3, 8, 2), Reach("window", 3)),
        "hca, window 3": (CSA(32, 4, 16, 4, 12, 2, 6, 3), Reach("window", 3)),
        "tied-mqa, window 3": (CSA(32, 4, 16, 4, 12, 2, 6, 0), Reach("window", 3)),
    }
    for text, (spec, reach) in specs.items():
        for form in spec.forms:
            yield stepwise(spec, reach, form, f"{text} {form}" if len(spec.forms) > 1 else text)
    for reach in (FULL, Reach("window", 5)):
        yield _stepwise_shared(GQA(32, 4, 2, 8, 8, 8, qk_norm="head"), reach)


def _stepwise_shared(spec: GQA, reach: Reach) -> Proof:
    """A layer without K and V of its own, beside the layer whose cache it reads."""
    owner, layer = layer_of(spec, reach, "direct"), layer_of(replace(spec, own_kv=False), reach, "direct")
    x, y = inputs(spec), inputs(spec)

    def run(*splits: int) -> Tensor:
        cache, out, sizes = Cache(lends=True), [], list(splits)
        for of_owner, of_layer in zip(torch.split(x, sizes, dim=1), torch.split(y, sizes, dim=1), strict=True):
            owner(of_owner, cache)
            out.append(layer(of_layer, cache))
        return torch.cat(out, dim=1)

    source = "arXiv 2405.12981 (cross-layer attention)"
    text = f"prompt, chunk, tokens = one prompt: gqa that reads another layer's cache, {reach.text}"
    return same(text, source, run(TOKENS), run(5, 3, *[1] * (TOKENS - 8)), 1e-11)


def stepwise(spec: Attention, reach: Reach, form: str, text: str) -> Proof:
    """A prompt, a chunk and single tokens against one prompt."""
    layer = layer_of(spec, reach, form, cached=cached_form(spec, form))
    x = inputs(spec)
    cache, out = Cache(), []
    for start, stop in ((0, 5), (5, 8), *((i, i + 1) for i in range(8, TOKENS))):
        out.append(layer(x[:, start:stop], cache))
    source = "definition of a causal cache"
    return same(f"prompt, chunk, tokens = one prompt: {text}", source, layer(x), torch.cat(out, dim=1), 1e-11)


def top_k() -> Iterator[Proof]:
    """DSA is MLA where k covers the context, and differs where it does not."""
    source = DSA_SOURCE
    dense = layer_of(SMALL, FULL, "absorbed")
    x = inputs(SMALL)
    for k, claim in ((TOKENS, same), (TOKENS + 3, same), (TOKENS - 1, different)):
        text = f"top-k of {k} over {TOKENS} tokens is {'' if claim is same else 'not '}full attention"
        sparse = layer_of(replace(SPARSE, index_topk=k), FULL, "absorbed")
        sparse.load_state_dict(dense.state_dict(), strict=False)
        yield claim(text, source, dense(x), sparse(x))
    for form in ("absorbed", "merged"):
        gathered = layer_of(SPARSE, FULL, form, path="fast")
        masked = layer_of(SPARSE, FULL, form, path="reference")
        masked.load_state_dict(gathered.state_dict())
        caches, out = (Cache(), Cache()), []
        for start, stop in ((0, 6), (6, TOKENS)):
            out = [layer(x[:, start:stop], cache) for layer, cache in zip((masked, gathered), caches, strict=True)]
        yield same(f"gathering the selected latents = masking all others, {form}", source, *out)


def all_selected(spec: DSA, text: str) -> Iterator[Proof]:
    """A DSA over no more tokens than it selects, against MLA with its weights."""
    sparse = layer_of(spec, FULL, "absorbed")
    dense = mla_torch.Layer(MLA(**{f.name: getattr(spec, f.name) for f in fields(MLA)}), dtype=torch.float64)
    dense.load_state_dict(sparse.state_dict(), strict=False)
    x = inputs(spec, min(TOKENS, spec.index_topk))
    yield same(f"top-k >= context is full attention, {text}", DSA_SOURCE, dense(x), sparse(x))


def bias() -> Iterator[Proof]:
    """Biases of the two up-projections."""
    source = "document 001; A softmax is unchanged by a constant"
    layer = layer_of(SPLIT, FULL, "expanded")
    x = inputs(SPLIT)
    expected = layer(x)
    without = {k: v.clone() for k, v in layer.state_dict().items()}
    without["k_b_proj.bias"].zero_()
    other = layer_of(SPLIT, FULL, "expanded")
    other.load_state_dict(without)
    yield same("a bias on the key up-projection cancels", source, expected, other(x))
    without["v_b_proj.bias"].zero_()
    other.load_state_dict(without)
    added = layer.get_parameter("o_proj.weight") @ layer.get_parameter("v_b_proj.bias")
    yield same("a bias on the value up-projection adds W_O b_V", source, expected, other(x) + added)
