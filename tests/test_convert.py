"""`attncalc convert`: its contract, its refusals, and that a broken construction is found."""

import builtins
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
torch.set_num_threads(1)

from attncalc.attention import convert_torch, gqa_torch  # noqa: E402
from attncalc.attention.convert import mla_spec_of  # noqa: E402
from attncalc.attention.convert_torch import mla_of  # noqa: E402
from attncalc.attention.gqa import GQA  # noqa: E402
from attncalc.attention.rotary import Rotary  # noqa: E402
from attncalc.attention.torch_base import Cache  # noqa: E402
from attncalc.errors import AttncalcError  # noqa: E402
from attncalc.reach import FULL, Reach  # noqa: E402
from attncalc.verify import conversion  # noqa: E402
from tests.conftest import Command  # noqa: E402

SMALL = ("--heads", "6", "--kv-heads", "3", "--head-dim", "8")
H, G, D = 6, 3, 8


@pytest.mark.parametrize(
    ("option", "latent", "rope", "core"),
    [
        # core per key: without RoPE 2 H (2 G d + 2 G d), with it 2 H (2 G d + G d); before 2 H (d + d)
        ("--no-rope", 2 * G * D, 0, 2 * H * 4 * G * D),
        ("--rope", G * D, G * D, 2 * H * 3 * G * D),
    ],
)
def test_contract(attncalc: Command, option: str, latent: int, rope: int, core: int) -> None:
    made = attncalc("convert", "gqa", "mla", *SMALL, option, "--context", "1k", "--json")
    assert (made.status, made.err) == (0, "")
    record = made.record
    assert record["command"] == "convert"
    assert (record["inputs"]["from"], record["inputs"]["to"], record["inputs"]["context"]) == ("gqa", "mla", 1024)
    assert record["inputs"]["dimensions"]["hidden_size"] == H * D
    (row,) = record["results"]
    assert (row["from"], row["to"], row["ok"]) == ("gqa", "mla", True)
    assert (row["kv_lora_rank"], row["qk_rope_head_dim"]) == (latent, rope)
    before, after = (row[f"cache_elements_per_token_per_layer_{x}"] for x in ("before", "after"))
    assert before == after == 2 * G * D
    assert row["core_flops_before"] == 2 * H * 2 * D * 1024
    assert row["core_flops_after"] == core * 1024
    assert row["core_flops_ratio"] == core / (4 * H * D)
    assert row["flops_attention_after"] > row["flops_attention_before"] > row["core_flops_before"]
    assert row["proven_on"]["num_kv_heads"] == G
    assert len(row["proofs"]) == 4
    assert all(p["ok"] and p["error"] <= 1e-12 for p in row["proofs"])
    assert row["error"] == max(p["error"] for p in row["proofs"])
    assert "tiled" in " ".join(row["construction"]) or option == "--no-rope"


def test_the_table_says_that_it_is_not_cheaper(attncalc: Command) -> None:
    made = attncalc("convert", "gqa", "mla", *SMALL)
    assert "exact, not cheaper: the same cache, 4.5 times the core FLOPs" in " ".join(made.out.split())
    assert max(map(len, made.out.splitlines())) <= 80
    assert "24" in made.out
    rows = attncalc("convert", "gqa", "mla", *SMALL, "--format", "csv").out.splitlines()
    assert rows[0] == "what,before,after"


def test_dimensions_of_a_model(attncalc: Command) -> None:
    (row,) = attncalc("convert", "gqa", "mla", "--like", "llama-3.1-8b", "--json").record["results"]
    assert (row["q_heads"], row["kv_heads_before"], row["kv_lora_rank"], row["qk_rope_head_dim"]) == (32, 8, 1024, 1024)
    record = attncalc("convert", "gqa", "mla", "--like", "qwen3-32b", "--no-rope", "--json").record
    assert record["results"][0]["kv_lora_rank"] == 2 * 8 * 128
    assert any("norms" in note for note in record["notes"])
    # Half of each head is rotated: the latent holds the other half of K, and V.
    (row,) = attncalc("convert", "gqa", "mla", "--like", "chatglm3-6b", "--json").record["results"]
    assert (row["rope_dim"], row["kv_lora_rank"], row["qk_rope_head_dim"]) == (64, 2 * (64 + 128), 2 * 64)
    assert row["ok"]


def test_the_ends_of_gqa(attncalc: Command) -> None:
    for source, groups in (("mha", 4), ("mqa", 1)):
        sizes = ("--heads", "4", "--head-dim", "8", "--json")
        (row,) = attncalc("convert", source, "mla", *sizes).record["results"]
        assert (row["from"], row["kv_heads_before"], row["ok"]) == (source, groups, True)


BAD = [
    ("convert",),
    ("convert", "gqa"),
    ("convert", "gqqa", "mla"),
    ("convert", "gqa", "mlaa"),
    ("convert", "mla", "gqa"),
    ("convert", "gqa", "gta"),
    ("convert", "gqa", "mla", "--kv-heads", "7"),
    ("convert", "mqa", "mla", "--kv-heads", "7"),
    ("convert", "gqa", "mla", "--heads", "0"),
    ("convert", "gqa", "mla", "--head-dim", "7"),
    ("convert", "gqa", "mla", "--head-dim", "1.5"),
    ("convert", "gqa", "mla", "--context", "0"),
    ("convert", "gqa", "mla", "--seed", "x"),
    ("convert", "gqa", "mla", "--like", "no-such-model"),
    ("convert", "gqa", "mla", "--like", "deepseek-v3"),
    ("convert", "gqa", "mla", "--json", "--format", "csv"),
]


@pytest.mark.parametrize("words", BAD, ids=" ".join)
def test_refusals_are_one_line(attncalc: Command, words: tuple[str, ...]) -> None:
    made = attncalc(*words)
    assert (made.status, made.out, made.err.count("\n")) == (2, "", 1), made
    assert "Traceback" not in made.err


def test_without_torch_one_line_says_how_to_get_it(attncalc: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def none(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "torch":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", none)
    made = attncalc("convert", "gqa", "mla", *SMALL)
    assert (made.status, made.out) == (2, "")
    assert made.err.count("\n") == 1
    assert 'pip install "attncalc[torch]"' in made.err


def test_a_plain_rope_of_that_width_is_found_wrong(attncalc: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convert_torch.TiledRotary, "inverse_frequencies", Rotary.inverse_frequencies)
    made = attncalc("convert", "gqa", "mla", *SMALL, "--json")
    assert made.status == 1
    (row,) = made.record["results"]
    assert not row["ok"]
    assert [p["ok"] for p in row["proofs"]] == [False, False, True, True]
    assert "FAILED" in attncalc("convert", "gqa", "mla", *SMALL).out
    assert attncalc("convert", "gqa", "mla", *SMALL, "--no-rope").status == 0


def test_the_scale_of_a_deepseek_layer_is_found_wrong(attncalc: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(layer: Any) -> Any:
        made = mla_of(layer)
        made.softmax_scale = (made.spec.qk_nope_head_dim + made.spec.qk_rope_head_dim) ** -0.5
        return made

    monkeypatch.setattr(convert_torch, "mla_of", broken)
    assert attncalc("convert", "gqa", "mla", *SMALL).status == 1


@pytest.mark.parametrize("rope", [0, 4, 8])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("reach", [FULL, Reach("window", 4)], ids=lambda r: r.text)
@pytest.mark.parametrize("path", ["fast", "reference"])
def test_the_layer_is_the_same_function(rope: int, interleaved: bool, reach: Reach, path: Any) -> None:
    torch.manual_seed(0)
    spec = GQA(24, 6, 3, 8, 5, rope)
    rotary = Rotary(5000.0, interleaved=interleaved, factor=4, original_max_position=8, beta_fast=4)
    layer = gqa_torch.Layer(spec, reach, path=path, rotary=rotary, softmax_scale=0.3, dtype=torch.float64)
    made, x = mla_of(layer), torch.randn(2, 11, 24, dtype=torch.float64)
    with torch.no_grad():
        cache, expected = Cache(), layer(x)
        steps = torch.cat([made(part, cache) for part in x.split([4, 3, 1, 1, 2], dim=1)], dim=1)
    assert (steps - expected).abs().max() < 1e-12 * expected.abs().max()
    assert sum(t.shape[1] * t.shape[3] for t in cache.tensors.values()) == 3 * (8 + 5)


@pytest.mark.parametrize("option", [{"bias": "qkv"}, {"qk_norm": "head"}, {"gate": "full"}, {"sinks": True}])
def test_what_the_construction_leaves_out_is_refused(option: dict[str, Any]) -> None:
    with pytest.raises(AttncalcError, match="plain GQA"):
        mla_spec_of(replace(GQA(24, 6, 3, 8, 5), **option))


def test_a_large_layer_is_proven_on_fewer_groups() -> None:
    large = GQA(16384, 128, 128, 128, 128, 128)
    made = conversion.proven_on(large)
    assert 1 < made.num_kv_heads < 128
    assert (made.head_dim, made.num_heads, made.rope_dim) == (128, made.num_kv_heads, 128)
    with pytest.raises(AttncalcError, match="MiB"):
        conversion.proven_on(GQA(64, 2, 2, 2**20, 2**20))
