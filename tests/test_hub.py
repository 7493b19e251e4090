"""Models by their Hugging Face id, against a server on the loopback address."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from attncalc.errors import AttncalcError
from attncalc.hub import is_id

pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 1000,
    "hidden_act": "silu", "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    "attention_bias": False, "mlp_bias": False, "rope_theta": 10000.0,
}  # fmt: skip


class Hub(BaseHTTPRequestHandler):
    """What the client asks of a hub for a file: a HEAD and a GET of /org/name/resolve/REVISION/FILE."""

    asked: ClassVar[list[tuple[str, str, str]]] = []
    slow: ClassVar[threading.Event] = threading.Event()

    def answer(self, *, body: bool) -> None:
        self.asked.append((self.command, self.path, self.headers.get("Authorization") or ""))
        repository = self.path.strip("/").partition("/resolve/")[0]
        headers: dict[str, str] = {"X-Repo-Commit": COMMIT}
        status, content = 200, json.dumps(LLAMA).encode()
        if self.path.endswith("hf_quant_config.json"):
            if repository == "acme/modelopt":
                content = json.dumps({"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}).encode()
            elif repository == "acme/half":
                status = 500
            elif repository == "acme/mirror":
                status = 404
            else:
                status, headers["X-Error-Code"] = 404, "EntryNotFound"
        elif repository == "acme/gated":
            status, headers["X-Error-Code"] = 403, "GatedRepo"
        elif repository == "acme/private" and self.headers.get("Authorization") != "Bearer hf_secret":
            status, headers["X-Error-Code"] = 401, "RepoNotFound"
        elif repository == "acme/weights":
            status, headers["X-Error-Code"] = 404, "EntryNotFound"
        elif repository == "acme/broken":
            status = 500
        elif repository == "acme/slow":
            self.slow.wait(20)
        elif repository == "acme/large":
            headers["Content-Length"] = str(17 * 2**20)
        elif repository == "acme/page":
            content = b"<html>log in</html>"
        elif repository not in ("acme/tiny", "acme/private", "acme/modelopt", "acme/half", "acme/mirror"):
            status, headers["X-Error-Code"] = 404, "RepoNotFound"
        self.send_response(status)
        if status == 200:
            etag = self.path.strip("/").replace("/", "-")
            headers = {"ETag": f'"{etag}"', "Content-Length": str(len(content))} | headers
        else:
            content = b""
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(content)

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def endpoint() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.daemon_threads = True
    Hub.asked.clear()
    Hub.slow.clear()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    Hub.slow.set()
    server.shutdown()
    server.server_close()


def run(endpoint: str, home: Path, *words: str, **settings: str) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("HF_") and "proxy" not in k.lower()}
    env = kept | {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1"} | settings
    command = [sys.executable, "-m", "attncalc", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=env, timeout=60)


def cache(endpoint: str, home: Path, name: str, **settings: str) -> subprocess.CompletedProcess[str]:
    return run(endpoint, home, "cache", "--model", name, "--context", "100", "--json", **settings)


def test_a_configuration_is_fetched_once_and_its_commit_reported(endpoint: str, tmp_path: Path) -> None:
    made = cache(endpoint, tmp_path, "acme/tiny")
    assert (made.returncode, made.stderr) == (0, "")
    record = json.loads(made.stdout)
    # 3 layers x 2 (K and V) x 2 KV heads x 16 wide x 100 tokens x 2 bytes
    assert record["results"][0]["bytes_total"] == 3 * 2 * 2 * 16 * 100 * 2
    assert record["inputs"]["models"] == [
        {
            "given": "acme/tiny",
            "model": record["results"][0]["model"],
            "found_by": "hub",
            "revision": COMMIT,
            "read_by": "attncalc.hf_config.llama",
        }
    ]
    assert {path for _, path, _ in Hub.asked} == {
        "/acme/tiny/resolve/main/config.json",
        f"/acme/tiny/resolve/{COMMIT}/hf_quant_config.json",
    }
    asked = len(Hub.asked)
    again = cache(endpoint, tmp_path, "acme/tiny")
    assert again.stdout == made.stdout
    assert len(Hub.asked) == asked  # the local cache alone
    offline = cache(endpoint, tmp_path, "acme/tiny", HF_HUB_OFFLINE="1")
    assert offline.stdout == made.stdout


def test_what_stands_beside_the_configuration_is_fetched_too(endpoint: str, tmp_path: Path) -> None:
    """ModelOpt's file declares an FP8 cache: 1 byte where acme/tiny, without it, has 2."""
    for settings in ({}, {"HF_HUB_OFFLINE": "1"}):
        made = cache(endpoint, tmp_path, "acme/modelopt", **settings)
        assert (made.returncode, made.stderr) == (0, "")
        assert json.loads(made.stdout)["results"][0]["bytes_total"] == 3 * 2 * 2 * 16 * 100
    (folder,) = tmp_path.glob("hub/models--acme--modelopt/snapshots/*")
    assert cache(endpoint, tmp_path, str(folder)).stdout.count('"bytes_total": 19200') >= 1
    assert cache(endpoint, tmp_path, "acme/mirror").returncode == 0  # a 404 of a server that does not say why


def test_a_cached_configuration_alone_is_not_enough(endpoint: str, tmp_path: Path) -> None:
    """Whether the file beside it exists is not known then, and nothing is assumed."""
    made = cache(endpoint, tmp_path, "acme/half")
    assert (made.returncode, len(made.stderr.splitlines())) == (2, 1)
    assert "refuses its hf_quant_config.json, got status 500" in made.stderr
    offline = cache(endpoint, tmp_path, "acme/half", HF_HUB_OFFLINE="1")
    assert (offline.returncode, len(offline.stderr.splitlines())) == (2, 1)
    assert "does not say whether it has an hf_quant_config.json" in offline.stderr
    (folder,) = tmp_path.glob("hub/models--acme--half/snapshots/*")
    assert str(folder) in offline.stderr
    assert cache(endpoint, tmp_path, str(folder), HF_HUB_OFFLINE="1").returncode == 0


@pytest.mark.parametrize(
    "command",
    ["flops", *(pytest.param(c, marks=pytest.mark.slow) for c in ("models", "explain", "compare", "measure"))],
)
def test_every_command_that_takes_a_model(endpoint: str, tmp_path: Path, command: str) -> None:
    words = {"measure": ("acme/tiny", "--device", "meta"), "explain": ("--model", "acme/tiny")}
    made = run(endpoint, tmp_path, command, *words.get(command, ("acme/tiny",)), "--json")
    assert made.returncode == 0, made.stderr
    assert json.loads(made.stdout)["command"] == command


def test_a_token_opens_a_private_repository(endpoint: str, tmp_path: Path) -> None:
    assert cache(endpoint, tmp_path, "acme/private", HF_TOKEN="hf_secret").returncode == 0
    assert {token for _, _, token in Hub.asked} == {"Bearer hf_secret"}


REFUSALS = {
    "acme/gated": "is gated: its config.json needs access",
    "acme/private": "has no such repository, or a private one",
    "acme/nothing": "has no such repository, or a private one",
    "acme/weights": "has no config.json",
    "acme/broken": "refuses its config.json, got status 500",
    "acme/large": "must be at most 16 MiB, got 17825792 bytes",
    "acme/page": "is not JSON, got line 1",
    "acme/slow": "did not answer in time",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSALS)
def test_what_cannot_be_had_is_one_line(endpoint: str, tmp_path: Path, name: str) -> None:
    made = cache(endpoint, tmp_path, name, HF_HUB_ETAG_TIMEOUT="1", HF_HUB_DOWNLOAD_TIMEOUT="1")
    assert (made.returncode, made.stdout) == (2, "")
    assert len(made.stderr.splitlines()) == 1, made.stderr
    assert REFUSALS[name] in made.stderr
    assert name in made.stderr


def test_offline_and_unreachable(endpoint: str, tmp_path: Path) -> None:
    offline = cache(endpoint, tmp_path, "acme/tiny", HF_HUB_OFFLINE="1")
    assert (offline.returncode, offline.stdout, len(offline.stderr.splitlines())) == (2, "", 1)
    assert "HF_HUB_OFFLINE is set" in offline.stderr
    other = cache(endpoint, tmp_path, "meta-llama/Llama-3.1-8B-Instruct", HF_HUB_OFFLINE="1")
    assert (other.returncode, len(other.stderr.splitlines())) == (2, 1)
    assert other.stderr.rstrip().endswith("A preset is called llama-3.1-8b")
    assert not Hub.asked
    gone = cache("http://127.0.0.1:9", tmp_path, "acme/tiny")
    assert (gone.returncode, gone.stdout, len(gone.stderr.splitlines())) == (2, "", 1)
    assert "http://127.0.0.1:9 cannot be reached" in gone.stderr


def test_a_preset_with_that_id_needs_no_network(endpoint: str, tmp_path: Path) -> None:
    made = cache(endpoint, tmp_path, "deepseek-ai/DeepSeek-V3")
    assert json.loads(made.stdout)["inputs"]["models"][0]["found_by"] == "hf_id"
    assert not Hub.asked


def test_without_the_extra(attncalc: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    made = attncalc("cache", "acme/tiny")
    assert (made.status, made.out, len(made.err.splitlines())) == (2, "", 1)
    assert 'pip install "attncalc[hub]"' in made.err


@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        ("org/name", True),
        ("01-ai/Yi-1.5_x", True),
        ("/etc/passwd", False),
        ("../name", False),
        ("org/..", False),
        ("org/name/", False),
        ("org/na me", False),
        ("org/name\n", False),
        ("org/" + "n" * 97, False),
    ],
)
def test_what_is_an_id(name: str, is_one: bool) -> None:
    assert is_id(name) is is_one


def test_a_file_that_is_not_there_is_no_id(attncalc: Any) -> None:
    made = attncalc("cache", "configs/none.json")
    assert made.status == 2
    assert "no such file" in made.err
    assert isinstance(AttncalcError("", made.err), ValueError)
