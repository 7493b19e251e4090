"""`measure`: estimate beside measurement, its contract, and that it notices when they differ."""

import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from attncalc.attention import VARIANTS
from tests.conftest import Command

torch = pytest.importorskip("torch")
torch.set_num_threads(1)  # tiny tensors: two threads wait for each other longer than they compute

from torch import nn  # noqa: E402

from attncalc import load  # noqa: E402
from attncalc.attention import gqa_torch, linear_state_torch, mla_torch, torch_base  # noqa: E402
from attncalc.attention.gqa import GQA  # noqa: E402
from attncalc.attention.linear_state import LinearState  # noqa: E402
from attncalc.attention.torch_base import Cache, CountOperations  # noqa: E402
from attncalc.measure import hardware, plan  # noqa: E402
from attncalc.measure import run as measured  # noqa: E402
from attncalc.proof import need_torch  # noqa: E402
from attncalc.workload import Workload  # noqa: E402

PAIRS = ("parameters", "cache_bytes", "flops")
SMALL_RUN = ("--context", "64", "--repeat", "1")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peaks without the large GEMM and copy."""
    monkeypatch.setattr(measured, "measure_peaks", lambda *_: hardware.Peaks(1e10, 1e10))


def settings(**changes: Any) -> plan.Settings:
    values: dict[str, Any] = {
        "device": "meta",
        "dtype": "bf16",
        "context": 64,
        "batch": 1,
        "new_tokens": 1,
        "repeat": 0,
        "seed": 0,
    }
    return plan.Settings(**(values | {"path": None} | changes))


# What is predicted.


def test_plan_and_prediction_need_no_torch() -> None:
    code = (
        "import sys\n"
        "from attncalc.measure import plan\n"
        "s = plan.Settings('meta', 'bf16', 64, 1, 1, 0, 0, None)\n"
        "cases = plan.cases([], [], s, None)\n"
        "assert len(cases) > 10\n"
        "assert all(plan.predict(c, s).flops and plan.memory_needed(c, s) for c in cases)\n"
        "print(sorted(m for m in sys.modules if m.partition('.')[0] in ('torch', 'numpy', 'rich')))"
    )
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert made.stdout == "[]\n"


def test_prediction_by_hand() -> None:
    (prefill, decode) = plan.cases(["mha"], [], settings(device="cpu"), None)
    assert (prefill.phase, decode.phase) == ("prefill", "decode")
    # D 1,024, 16 heads of 64: four matrices of 1,024 x 1,024; K and V of 1,024 values, 64 tokens, 2 B
    for case, tokens in ((prefill, 64), (decode, 1)):
        made = plan.predict(case, settings(device="cpu"))
        assert made.parameters == 4 * 1024 * 1024
        assert made.cache_bytes == 2 * 1024 * 64 * 2
        # every pair: 64 keys for each new token, 2 * 2 * 16 * 64 of them
        assert made.flops == tokens * (2 * 4 * 1024 * 1024 + 4 * 1024 * 64)


def test_predicted_time_is_the_longer_of_two_for_each_operation() -> None:
    (case, _) = plan.cases(["mqa"], [], settings(), None)
    made = plan.predict(case, settings())
    each = [(op.flops, sum(op.bytes(made.formats).values())) for op in made.ops]
    assert made.seconds(1.0, 1e30) == pytest.approx(sum(f for f, _ in each))
    assert made.seconds(1e30, 1.0) == pytest.approx(sum(b for _, b in each))
    assert made.seconds(1.0, 100.0) == pytest.approx(sum(max(f, b / 100) for f, b in each))
    assert (made.bound(1.0, 1e30), made.bound(1e30, 1.0)) == ("compute", "memory")


def test_every_variant_is_measured() -> None:
    assert set(plan.VARIANTS) == set(VARIANTS)
    names = {c.layer.name for c in plan.cases([], [], settings(), None)}
    assert names == set(VARIANTS)


def test_recurrent_states_are_predicted_in_fp32() -> None:
    (case, _) = plan.cases(["linear-state"], [], settings(device="cpu"), None)
    # a state of 512 x 512, 4 B, whatever the layer's dtype; 8 B where that is fp64
    for dtype, size in (("bf16", 4), ("fp32", 4), ("fp64", 8)):
        assert plan.predict(case, settings(device="cpu", dtype=dtype)).cache_bytes == 512 * 512 * size


# What is measured on the meta device.


@pytest.mark.parametrize("preset", ["gpt-oss-20b", "deepseek-v3", "kimi-linear-48b-a3b", "gemma-3-1b"])
@pytest.mark.slow
def test_layers_of_models_have_what_is_predicted(attncalc: Command, preset: str) -> None:
    made = attncalc("measure", "--device", "meta", "--model", preset, "--context", "192", "--json")
    assert made.status == 0
    rows = made.record["results"]
    for row in rows:
        assert row["model"] == preset
        for pair in PAIRS:
            assert row[f"predicted_{pair}"] == row[f"measured_{pair}"] > 0
        assert row["ok"] is True
    model = load(preset)
    # each distinct layer in each of its forms, as a prompt and as a step
    layers = {(g.attention, g.reach): len(g.attention.forms) for g in model.groups if g.attention}
    assert len(rows) == 2 * sum(layers.values())


def test_measured_figures_of_a_model(attncalc: Command) -> None:
    words = ("measure", "mla:absorbed", "--device", "meta", "--model", "deepseek-v3", "--context", "128", "--json")
    prefill, decode = attncalc(*words).record["results"]
    for row in (prefill, decode):
        assert row["measured_parameters"] == 187_107_328
        assert row["measured_cache_bytes"] == 128 * 576 * 2
        assert row["cache_tensors"] == {"c_kv": [1, 1, 128, 512], "k_pe": [1, 1, 128, 64]}
        assert row["form"] == "absorbed"
    # every pair: 2 * 128 heads * (576 + 512) * 128 keys more for each token than the matrices
    # 7168 * 1536 + 1536 * 128 * 192 + 7168 * 576 + 128 * 128 * 512 * 2 + 128 * 128 * 7168
    matrices = 11_010_048 + 37_748_736 + 4_128_768 + 16_777_216 + 117_440_512
    assert decode["measured_flops"] == 2 * matrices + 2 * 128 * 1088 * 128
    assert prefill["measured_flops"] == 128 * decode["measured_flops"]


def test_contract_on_meta(attncalc: Command) -> None:
    made = attncalc("measure", "gqa", "--device", "meta", "--context", "64", "--json")
    record = made.record
    assert (record["schema"], record["command"]) == (1, "measure")
    assert record["inputs"]["context"] == 64
    assert record["inputs"]["device"] == "meta"
    assert [r["phase"] for r in record["results"]] == ["prefill", "decode"]
    for row in record["results"]:
        assert (row["variant"], row["form"]) == ("gqa", "direct")
        assert {f"{side}_{p}" for side in ("predicted", "measured") for p in (*PAIRS, "seconds")} <= set(row)
        for name in ("measured_seconds", "achieved_flops_per_s", "achieved_bytes_per_s", "max_abs_error"):
            assert row[name] is None
        assert row["ok"] is True
        assert (row["device"], row["context"], row["batch"]) == ("meta", 64, 1)
    assert [r["new_tokens"] for r in record["results"]] == [64, 1]


def test_progress_goes_to_stderr_only(attncalc: Command) -> None:
    made = attncalc("measure", "gqa", "mqa", "--device", "meta", "--context", "64", "--format", "csv")
    assert made.err.splitlines()
    assert all(line.startswith("measure: ") for line in made.err.splitlines())
    assert "measure:" not in made.out
    assert made.out.startswith("variant,")


# What is measured on this machine.


@pytest.mark.slow
def test_a_run_on_the_cpu(attncalc: Command) -> None:
    made = attncalc("measure", "gqa", "linear-state", *SMALL_RUN, "--json")
    assert made.status == 0
    rows = made.record["results"]
    assert [(r["variant"], r["phase"]) for r in rows] == [
        ("gqa", "prefill"),
        ("gqa", "decode"),
        ("linear-state", "prefill"),
        ("linear-state", "decode"),
    ]
    for row in rows:
        assert row["ok"] is True
        assert all(row[f"predicted_{p}"] == row[f"measured_{p}"] for p in PAIRS)
        assert 0 < row["measured_seconds"] < 60
        assert row["predicted_seconds"] > 0
        assert row["achieved_flops_per_s"] == row["measured_flops"] / row["measured_seconds"]
        assert row["achieved_bytes_per_s"] > 0
        assert 0 <= row["max_abs_error"] < 1e-3
        assert 0 < row["max_relative_error"] < 1e-4
        assert row["dtype"] == "fp32"
    assert "measure: peaks" in made.err


@pytest.mark.usefixtures("quick")
def test_table_of_a_run(attncalc: Command) -> None:
    made = attncalc("measure", "mqa", *SMALL_RUN)
    assert made.status == 0
    assert "2 of 2 runs as predicted" in made.out
    assert "exact" in made.out


# That it notices.


def broken_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    made = gqa_torch.Layer.__init__

    def wider(self: Any, *args: Any, **options: Any) -> None:
        made(self, *args, **options)
        self.extra = nn.Parameter(torch.zeros(1, device=options.get("device")))

    monkeypatch.setattr(gqa_torch.Layer, "__init__", wider)


def broken_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Cache.advance

    def more(self: Cache, new_tokens: int) -> None:
        self.buffers["copy"] = self.buffers["k"].clone()
        kept(self, new_tokens)

    monkeypatch.setattr(Cache, "advance", more)


def broken_flops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention that the counter does not see."""
    monkeypatch.setattr(torch_base, "_sdpa_flops", lambda *_, **__: 0)


def broken_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention over the values alone."""
    monkeypatch.setattr(gqa_torch, "attend", lambda q, *_: q)


def broken_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scale that is off in the fast path."""
    kernel = torch_base.attend

    def off(q: Any, k: Any, v: Any, reach: Any, length: int, scale: float) -> Any:
        return kernel(q, k, v, reach, length, scale * 1.5)

    monkeypatch.setattr(gqa_torch, "attend", off)


def broken_output(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = torch_base.attend
    monkeypatch.setattr(gqa_torch, "attend", lambda *a: kernel(*a) + 0.01)


Break = Callable[[pytest.MonkeyPatch], None]


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("how", "wrong"),
    [
        (broken_parameters, "parameters"),
        (broken_cache, "cache_bytes"),
        (broken_flops, "flops"),
        (broken_products, "flops"),
        (broken_kernel, None),
        (broken_output, None),
    ],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_a_broken_layer_fails(
    attncalc: Command, monkeypatch: pytest.MonkeyPatch, how: Break, wrong: str | None
) -> None:
    assert attncalc("measure", "gqa", *SMALL_RUN).status == 0
    how(monkeypatch)
    made = attncalc("measure", "gqa", *SMALL_RUN, "--json")
    monkeypatch.undo()
    assert made.status == 1
    rows = made.record["results"]
    assert not all(r["ok"] for r in rows)
    for row in rows:
        for pair in PAIRS:
            if wrong is not None and pair == wrong:
                assert row[f"predicted_{pair}"] != row[f"measured_{pair}"]
                assert row["ok"] is False
            elif wrong is None:
                assert row[f"predicted_{pair}"] == row[f"measured_{pair}"]
                assert row["ok"] is False


@pytest.mark.usefixtures("quick")
def test_a_broken_layer_is_named_in_the_table(attncalc: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    broken_parameters(monkeypatch)
    made = attncalc("measure", "gqa", *SMALL_RUN)
    assert made.status == 1
    assert "0 of 2 runs as predicted" in made.out
    assert "parameters:" in made.out
    assert "predicted" in made.out


# What is refused.


def test_what_does_not_fit_is_refused_with_the_number(attncalc: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "free_bytes", lambda _: 10**10)
    made = attncalc("measure", "mha", "--context", "64M", "--repeat", "1")
    assert (made.status, made.out) == (2, "")
    (line,) = made.err.splitlines()
    (case, _) = plan.cases(["mha"], [], settings(device="cpu", dtype="fp32", context=2**26), None)
    needed = plan.memory_needed(case, settings(device="cpu", dtype="fp32", context=2**26))
    # twice a cache of 64 M tokens * 2 * 1,024 values * 4 B is in it
    assert needed > 2 * 2**26 * 2048 * 4
    assert in_both_units(needed) in line
    assert "10 GB" in line
    assert "--context" in line


def in_both_units(value: int) -> str:
    from attncalc.units import both_bytes

    return both_bytes(value)


def test_nothing_runs_before_it_is_refused(attncalc: Command) -> None:
    """Against the memory of this machine: no layer is built, no peak measured."""
    made = attncalc("measure", "mha", "--context", "1024M")
    assert (made.status, made.out) == (2, "")
    assert made.err.count("\n") == 1
    assert "peaks" not in made.err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_no_cuda_is_one_line(attncalc: Command) -> None:
    made = attncalc("measure", "gqa", "--device", "cuda")
    assert (made.status, made.out) == (2, "")
    assert made.err.startswith("--device: ")
    assert "CUDA" in made.err
    assert made.err.count("\n") == 1


@pytest.mark.parametrize("command", ["measure", "verify"])
def test_without_torch_one_line_names_the_install_command(command: str) -> None:
    code = f"import sys; sys.modules['torch'] = None\nfrom attncalc.cli import main\nmain([{command!r}])"
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (made.returncode, made.stdout) == (2, "")
    assert made.stderr.count("\n") == 1
    assert 'pip install "attncalc[torch]"' in made.stderr


@pytest.mark.parametrize(
    "words",
    [
        ("--device", "tpu"),
        ("--device", ""),
        ("--dtype", "fp8"),
        ("--path", "slow"),
        ("--context", "0"),
        ("--new-tokens", "65"),
        ("--batch", "0"),
        ("--repeat", "-1"),
        ("--form", "junk"),
        ("mla:junk",),
        ("mlaa",),
        ("--model", "no-such"),
    ],
    ids=" ".join,
)
def test_bad_options_are_one_line(attncalc: Command, words: tuple[str, ...]) -> None:
    given = ("--context", "64") if "--context" not in words else ()
    made = attncalc("measure", "--device", "meta", *given, *words)
    assert (made.status, made.out) == (2, "")
    assert made.err.count("\n") == 1


# The counter.


def test_the_counter_sees_fused_attention_on_the_cpu() -> None:
    q, k, v = torch.randn(2, 3, 5, 8), torch.randn(2, 3, 7, 8), torch.randn(2, 3, 7, 8)
    with torch.no_grad(), CountOperations() as counter:
        nn.functional.scaled_dot_product_attention(q, k, v)
    # 2 sequences, 3 heads, 5 queries, 7 keys: 2 * (8 + 8) each
    assert counter.total == 2 * 3 * 5 * 7 * 2 * 16


def test_the_counter_sees_a_state_update() -> None:
    layer = linear_state_torch.Layer(LinearState(6, 4, bias=False))
    with torch.no_grad(), CountOperations() as counter:
        layer(torch.randn(2, 3, 6))
    # k v^T and S^T q for 2 sequences of 3 tokens: 2 * 2 * 4 * 4 each
    assert counter.flops["state_update"] == 2 * 3 * 2 * 2 * 16
    # and five matrices of 6 x 4
    assert counter.total == 2 * 3 * (2 * 2 * 16 + 2 * 5 * 24)


def test_the_counter_names_operations() -> None:
    layer = gqa_torch.Layer(GQA(6, 2, 1, 4, 4), path="reference")
    with torch.no_grad(), CountOperations() as counter:
        layer(torch.randn(1, 3, 6))
    # 3 tokens; every pair of the 9
    expected = {"q_proj": 288, "k_proj": 144, "v_proj": 144, "score": 144, "value": 144, "o_proj": 288}
    assert dict(counter.flops) == expected
    assert counter.total == sum(expected.values())


def test_a_layer_is_measured_as_it_is_built() -> None:
    """The real module: its parameters, its path, its form."""
    (case, _) = plan.cases(["mla:expanded"], [], settings(device="cpu"), None)
    layer = measured.build(case, None, "meta", torch.float32)
    assert isinstance(layer, mla_torch.Layer)
    assert (layer.form, layer.path) == ("expanded", "fast")
    assert measured.build(case, "reference", "meta", torch.float32).path == "reference"
    assert case.workload == Workload(64, 64)


@pytest.fixture
def cuda() -> Iterator[None]:
    yield
    torch.cuda.empty_cache()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.usefixtures("cuda")
def test_every_variant_on_a_gpu(attncalc: Command) -> None:
    made = attncalc("measure", "--device", "cuda", "--context", "2k", "--repeat", "3", "--json")
    rows = made.record["results"]
    assert {r["variant"] for r in rows} == set(VARIANTS)
    assert [(r["variant"], r["form"], r["phase"]) for r in rows if not r["ok"]] == []
    assert all(r["measured_seconds"] > 0 for r in rows)
    assert made.status == 0


def test_torch_without_numpy_says_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        need_torch("measure")
        warnings.warn("Failed to initialize NumPy: No module named 'numpy'", UserWarning, stacklevel=1)
