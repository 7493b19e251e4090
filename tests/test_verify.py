"""`verify`: every claim holds, is named and selectable, and fails when the thing that it is about is broken."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.conftest import Command

torch = pytest.importorskip("torch")
torch.set_num_threads(1)  # tiny tensors: two threads wait for each other longer than they compute

from attncalc.attention import (  # noqa: E402
    dsa_torch,
    gla_torch,
    gqa_torch,
    kda_torch,
    latent_torch,
    linear_state_torch,
    mla_split_torch,
    mla_torch,
    state_torch,
    torch_base,
)
from attncalc.attention.gqa import GQA  # noqa: E402
from attncalc.attention.kda import KDA  # noqa: E402
from attncalc.attention.linear_state import LinearState  # noqa: E402
from attncalc.attention.mla import MLA  # noqa: E402
from attncalc.attention.rotary import Rotary  # noqa: E402
from attncalc.verify import CLAIMS, figures  # noqa: E402
from attncalc.verify.proof import figure, same  # noqa: E402

KEYS = {"claim", "text", "source", "expected", "observed", "error", "ok"}
SECONDS = 30.0


def test_everything_is_proven_in_time(attncalc: Command) -> None:
    start = time.process_time()
    made = attncalc("verify", "--json")
    assert time.process_time() - start < SECONDS
    assert (made.status, made.err) == (0, "")
    rows = made.record["results"]
    assert [r for r in rows if r["ok"] is not True] == []
    assert list(dict.fromkeys(r["claim"] for r in rows)) == list(CLAIMS)
    assert len(rows) > 80
    assert len({r["text"] for r in rows}) == len(rows)


def test_contract(attncalc: Command) -> None:
    record = attncalc("verify", "figures", "toy", "--json").record
    assert (record["schema"], record["command"]) == (1, "verify")
    assert record["inputs"] == {"claims": ["figures", "toy"], "models": [], "seed": 0}
    for row in record["results"]:
        assert set(row) >= KEYS
        assert row["ok"] is True
        assert row["source"]
        assert row["error"] >= 0
    found = {r["text"]: (r["expected"], r["observed"]) for r in record["results"] if r["claim"] == "figures"}
    # two of 128 x 128; a latent of 512 and a key of 64; 576 + 512 against 256
    assert found["MHA, 128 heads of 128: elements per token, layer"] == (32_768, 32_768)
    assert found["MLA of DeepSeek-V3: elements per token, layer"] == (576, 576)
    assert found["absorbed MLA against MQA: core FLOPs"] == (4.25, 4.25)


@pytest.mark.parametrize("claim", ["latent-first", "toy", "bias", "errors"])
def test_one_claim(attncalc: Command, claim: str) -> None:
    made = attncalc("verify", claim, "--json")
    assert made.status == 0
    assert {r["claim"] for r in made.record["results"]} == {claim}


def test_seeds_change_numbers_and_no_verdict(attncalc: Command) -> None:
    first, again, other = (
        [r["observed"] for r in attncalc("verify", "latent-first", "--seed", s, "--json").record["results"]]
        for s in ("1", "1", "2")
    )
    assert first == again != other


def test_an_unknown_claim_is_one_line(attncalc: Command) -> None:
    made = attncalc("verify", "absorbed")
    assert (made.status, made.out) == (2, "")
    assert made.err.count("\n") == 1
    assert "'absorb'" in made.err
    assert "latent-first" in attncalc("verify", "zzz").err


def test_a_claim_about_other_layers_is_refused(attncalc: Command) -> None:
    made = attncalc("verify", "absorb", "--model", "llama-3.2-1b")
    assert (made.status, made.out) == (2, "")
    assert "other layers" in made.err


@pytest.mark.parametrize(
    ("preset", "claims"),
    [
        ("minicpm3-4b", {"decode", "absorb", "merge"}),
        ("llama-3.2-1b", {"decode", "gqa-as-mla"}),
        # a gigabyte of weights in float64, four times over
        pytest.param("kimi-linear-48b-a3b", {"decode", "absorb", "merge", "kda"}, marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_layers_of_models(attncalc: Command, preset: str, claims: set[str]) -> None:
    made = attncalc("verify", "--model", preset, "--json")
    assert made.status == 0
    rows = made.record["results"]
    assert {r["model"] for r in rows} == {preset}
    assert all(r["ok"] for r in rows)
    assert {r["claim"] for r in rows} == claims


def test_the_table_says_the_verdict(attncalc: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "FAILED" not in attncalc("verify", "figures").out
    monkeypatch.setattr(figures, "V3", replace(figures.V3, qk_rope_head_dim=32))
    made = attncalc("verify", "figures")
    assert made.status == 1
    assert "FAILED" in made.out


def test_a_proof_fails_beyond_its_limit() -> None:
    one = torch.ones(2, 3, dtype=torch.float64)
    assert same("", "", one, one).ok
    assert same("", "", one, one + 5e-13).ok
    assert not same("", "", one, one + 2e-12).ok
    assert not same("", "", one, torch.full_like(one, torch.nan)).ok
    assert figure("", "", 576, 576).ok
    assert not figure("", "", 576, 577).ok
    assert not figure("", "", 0, 1).ok
    assert not figure("", "", 10**15, 10**15 + 1).ok


# Breaks: each changes one thing that a layer or a formula does.

Break = Callable[[pytest.MonkeyPatch], None]


def norm(patch: pytest.MonkeyPatch) -> None:
    """A norm that depends on how many tokens a step has."""

    def by_length(x: Any, weight: Any, eps: float) -> Any:
        normed = x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + eps + x.shape[1])
        return normed if weight is None else normed * weight

    patch.setattr(mla_torch, "rms_norm", by_length)


def table(patch: pytest.MonkeyPatch) -> None:
    """Positions that begin again in each step."""
    made = Rotary.table
    patch.setattr(Rotary, "table", lambda self, _, *rest, **options: made(self, 0, *rest, **options))


def rotation(patch: pytest.MonkeyPatch) -> None:
    """A matrix that is no rotation."""

    def stretched(self: Rotary, x: Any, at: Any) -> Any:
        return x * at.cos.to(x.dtype).repeat_interleave(2, -1)

    patch.setattr(Rotary, "rotate", stretched)


def absorbing(patch: pytest.MonkeyPatch) -> None:
    """Each head's latent query is that of the next."""
    right = latent_torch.head_product

    def next_head(name: str, x: Any, weight: Any) -> Any:
        return right(name, x, weight.roll(1, 0) if name == "absorb_q" else weight)

    patch.setattr(mla_torch, "head_product", next_head)


def group_latents(patch: pytest.MonkeyPatch) -> None:
    """As above, in grouped latent attention."""
    right = latent_torch.head_product

    def next_head(name: str, x: Any, weight: Any) -> Any:
        return right(name, x, weight.roll(1, 0) if name == "absorb_q" else weight)

    patch.setattr(gla_torch, "head_product", next_head)


def un_absorbing(patch: pytest.MonkeyPatch) -> None:
    right = latent_torch.head_product

    def doubled(name: str, x: Any, weight: Any) -> Any:
        return right(name, x, weight) * (2 if name == "absorb_v" else 1)

    patch.setattr(mla_split_torch, "head_product", doubled)


def merging(patch: pytest.MonkeyPatch) -> None:
    """The output matrix of another head."""
    right = mla_torch._merge

    def wrong(layer: Any, state: Any) -> None:
        right(layer, state)
        state["q_merged_proj.weight"] = state["q_merged_proj.weight"].flip(0)

    patch.setattr(mla_torch, "_merge", wrong)


def delta(patch: pytest.MonkeyPatch) -> None:
    """The recurrent core learns less than it should."""
    right = state_torch.delta_recurrent

    def weaker(q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any) -> Any:
        return right(q, k, v, g, beta * 0.9, state)

    patch.setattr(kda_torch, "delta_recurrent", weaker)


def lost_state(patch: pytest.MonkeyPatch) -> None:
    """Each step begins with an empty state."""
    right = state_torch.delta_chunked

    def empty(q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any, **options: Any) -> Any:
        return right(q, k, v, g, beta, torch.zeros_like(state), **options)

    patch.setattr(kda_torch, "delta_chunked", empty)


def mask(patch: pytest.MonkeyPatch) -> None:
    """One key more than the window has."""
    right = torch_base.attention_mask

    def wider(reach: Any, *rest: Any) -> Any:
        return right(reach._replace(size=reach.size + 1) if reach.kind == "window" else reach, *rest)

    patch.setattr(torch_base, "attention_mask", wider)


def forgetting(patch: pytest.MonkeyPatch) -> None:
    """The first token of a step comes into the cache as zeros."""
    right = torch_base.Cache.append

    def forget(cache: Any, name: str, new: Any, *rest: Any) -> Any:
        new = new.clone()
        new[:, :, 0] = 0
        return right(cache, name, new, *rest)

    patch.setattr(torch_base.Cache, "append", forget)


def selection(patch: pytest.MonkeyPatch) -> None:
    """An indexer selects one key fewer than it should."""
    right = dsa_torch.selection_mask
    patch.setattr(dsa_torch, "selection_mask", lambda selected, *rest: right(selected[..., 1:], *rest))


def groups(patch: pytest.MonkeyPatch) -> None:
    """Heads of a group are those that are far apart."""
    right = torch_base.attend_reference

    def far(q: Any, k: Any, v: Any, *rest: Any, **options: Any) -> Any:
        return right(q.flip(1), k, v, *rest, **options)

    patch.setattr(gqa_torch, "attend_reference", far)


def fading(patch: pytest.MonkeyPatch) -> None:
    """A decay that depends on how many tokens a step has."""
    right = torch_base.linear

    def by_length(module: Any, name: str, x: Any, *rest: Any) -> Any:
        out = right(module, name, x, *rest)
        return out * x.shape[1] if name == "decay_proj" else out

    patch.setattr(linear_state_torch, "linear", by_length)


def value_bias(patch: pytest.MonkeyPatch) -> None:
    """The absorbed form forgets the bias of the value up-projection."""
    patch.setattr(mla_split_torch, "bias_of", lambda _: None)


def as_mla(patch: pytest.MonkeyPatch) -> None:
    """The construction of an MLA takes the scale of its own width."""
    right = mla_torch.Layer

    def scaled(*arguments: Any, softmax_scale: float | None = None, **options: Any) -> Any:
        return right(*arguments, softmax_scale=softmax_scale and softmax_scale * 1.1, **options)

    patch.setattr(mla_torch, "Layer", scaled)


def cached_elements(patch: pytest.MonkeyPatch) -> None:
    """A latent cache without its RoPE key."""
    kept = MLA.cache
    patch.setattr(MLA, "cache", lambda *a: kept(*a)[:1])


def key_heads(patch: pytest.MonkeyPatch) -> None:
    """K alone."""
    kept = GQA.cache
    patch.setattr(GQA, "cache", lambda *a: kept(*a)[:1])


def growing_state(patch: pytest.MonkeyPatch) -> None:
    """A state that grows with the tokens."""
    kept = LinearState.cache
    patch.setattr(LinearState, "cache", lambda self, reach, form: (kept(self, reach, form)[0]._replace(reach=reach),))


def key_shape(patch: pytest.MonkeyPatch) -> None:
    """The decay has as many heads as q and k."""
    made = KDA.weights

    def narrow(self: KDA, form: str) -> Any:
        return tuple(w._replace(shape="(h k) D") if w.name == "f_proj.weight" else w for w in made(self, form))

    patch.setattr(KDA, "weights", narrow)


BREAKS: list[tuple[Break, str]] = [
    (norm, "decode"),
    (table, "decode"),
    (forgetting, "decode"),
    (mask, "decode"),
    (lost_state, "decode"),
    (fading, "decode"),
    (rotation, "rope"),
    (selection, "top-k"),
    (absorbing, "absorb"),
    (group_latents, "forms"),
    (un_absorbing, "absorb"),
    (value_bias, "absorb"),
    (merging, "merge"),
    (delta, "kda"),
    (groups, "groups"),
    (as_mla, "gqa-as-mla"),
    (cached_elements, "figures"),
    (key_heads, "figures"),
    (growing_state, "figures"),
    (key_shape, "shapes"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("how", "claim"), BREAKS, ids=[b.__name__ for b, _ in BREAKS])
def test_a_break_is_caught_by_a_named_claim(
    attncalc: Command, monkeypatch: pytest.MonkeyPatch, how: Break, claim: str
) -> None:
    how(monkeypatch)
    made = attncalc("verify", claim, "--json")
    monkeypatch.undo()
    assert made.status == 1
    assert [r["claim"] for r in made.record["results"] if not r["ok"]]


def test_every_claim_that_runs_layers_can_fail() -> None:
    # constructions of their own, and arithmetic on what `figures` breaks
    apart = {"intensity", "latent-first", "toy", "gva", "bias", "errors"}
    assert {claim for _, claim in BREAKS} | apart == set(CLAIMS)
