"""Lightning attention: golden values, the layer against its definition, and against MiniMax in transformers."""

from typing import Any

import pytest

torch = pytest.importorskip("torch")
torch.set_num_threads(1)  # tiny tensors: two threads wait for each other longer than they compute

from attncalc.attention.base import Step  # noqa: E402
from attncalc.attention.lightning import Lightning  # noqa: E402
from attncalc.attention.lightning_torch import Layer  # noqa: E402
from attncalc.attention.torch_base import Cache  # noqa: E402
from attncalc.dtypes import Formats  # noqa: E402
from attncalc.reach import FULL  # noqa: E402
from attncalc.workload import Workload  # noqa: E402

MINIMAX = Lightning(6144, 64, 128)
TINY = Lightning(20, 3, 8, chunk_size=16)


def relative(got: Any, expected: Any) -> float:
    return float((got - expected).abs().max() / expected.abs().max())


def core(form: str, new: int, count: Any = "causal") -> int:
    ops = MINIMAX.ops(Step(Workload(new, new), FULL, count), form, cached=form).contractions
    return sum(op.flops for op in ops if op.name.startswith(("state", "chunk")))


def test_minimax_01() -> None:
    """arXiv 2501.08313: D 6144, 64 heads x 128."""
    (state,) = (t.at(1_000_000, 1, Formats()) for t in MINIMAX.cache(FULL, "recurrent"))
    assert (state.shape, state.dtype, state.bytes) == ((1, 64, 128, 128), "fp32", 4_194_304)
    D, P = 6144, 64 * 128
    parameters = sum(w.elements for w in MINIMAX.weights("recurrent"))
    assert parameters == 3 * D * P + D * P + P * D + P == 251_666_432
    assert MINIMAX.heads("recurrent") == (64, None, 128, 128)
    # k v^T and S^T q: 4 d^2 for each token and head; in chunks of 256, 4 C d more.
    assert core("recurrent", 1) == 64 * 4 * 128 * 128
    assert core("chunked", 512, "dense") == 512 * 64 * (4 * 256 * 128 + 4 * 128 * 128)


def from_definition(made: Layer, x: Any) -> Any:
    """o_t = sum over i <= t of exp(-s (t - i)) (q_t . k_i) v_i, every head by itself."""
    w, H, d = dict(made.named_parameters()), made.spec.num_heads, made.spec.head_dim
    qkv = (x @ w["qkv_proj.weight"].T).view(*x.shape[:2], H, 3, d)
    qkv = qkv * torch.sigmoid(qkv)
    rows = []
    for t in range(x.shape[1]):
        heads = []
        for h in range(H):
            slope = made.slope_factor * 2 ** (-8 * (h + 1) / H)
            o = torch.zeros_like(qkv[:, 0, h, 2])
            for i in range(t + 1):
                score = (qkv[:, t, h, 0] * qkv[:, i, h, 1]).sum(-1, keepdim=True)
                o = o + torch.exp(torch.tensor(-slope * (t - i), dtype=x.dtype)) * score * qkv[:, i, h, 2]
            heads.append(o)
        o = torch.cat(heads, dim=-1)
        o = o / (o.square().mean(-1, keepdim=True) + made.eps).sqrt() * w["norm.weight"]
        rows.append((o * torch.sigmoid(x[:, t] @ w["output_gate.weight"].T)) @ w["out_proj.weight"].T)
    return torch.stack(rows, dim=1)


@pytest.mark.parametrize("form", Lightning.forms)
def test_equals_the_definition(form: str) -> None:
    torch.manual_seed(0)
    made = Layer(TINY, form=form, slope_factor=0.75, dtype=torch.float64)
    x = torch.randn(2, 19, 20, dtype=torch.float64)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(std=0.5)
        assert relative(made(x), from_definition(made, x)) < 1e-12


@pytest.mark.parametrize("form", Lightning.forms)
@pytest.mark.parametrize("index", [0, 2])
def test_equals_transformers(index: int, form: str) -> None:
    """Prefill over three blocks and single tokens, in the first and the third of four layers, in float32."""
    module = pytest.importorskip("transformers.models.minimax.modeling_minimax", reason="needs transformers 5")
    config = module.MiniMaxConfig(
        hidden_size=96,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        num_hidden_layers=4,
        block_size=32,
        hidden_act="silu",
        layer_types=["linear_attention", "full_attention"] * 2,
        vocab_size=64,
    )
    theirs = module.MiniMaxLightningAttention(config, index)
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(std=0.2)
    spec = Lightning(96, 6, 16, chunk_size=32)
    ours = Layer(spec, form=form, slope_factor=1 - index / (4 - 1 + 1e-5) + 1e-5)
    ours.load_state_dict({name: parameter.detach() for name, parameter in theirs.named_parameters()})
    assert sum(p.numel() for p in theirs.parameters()) == sum(w.elements for w in spec.weights(form))
    their_cache, our_cache = module.MiniMaxCache(), Cache()
    for length in (70, 1, 1, 5):
        x = torch.randn(2, length, 96)
        with torch.no_grad():
            expected = theirs(x, None, None, cache=their_cache)[0]
            assert relative(ours(x, our_cache), expected) < 1e-5
    assert relative(our_cache.buffers["recurrent_state"], their_cache.get_linear_cache(index)) < 1e-5
