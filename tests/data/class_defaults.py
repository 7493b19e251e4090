"""Makes `class_defaults.json`: what every causal language model type of transformers gives with its default values.

usage: python tests/data/class_defaults.py [TYPE ...]     (all types if none is named; needs transformers)

For each `model_type` of MODEL_FOR_CAUSAL_LM_MAPPING_NAMES: the configuration as its class defines it (`config`, every field
written out), run on the meta device in bf16 with eager attention at two contexts. What has no cache unless `is_decoder` is
true is run so, and its `config` says so. A type that cannot run has `error` instead of `runs`.
"""

import json
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SMALL = 24
SECONDS = 240
WORKERS = 2
PART = 12
WINDOWS = ("window", "chunk_size", "compress", "local")
# Fields that every configuration has and that no model is built from.
COMMON = (
    "_name_or_path", "architectures", "chunk_size_feed_forward", "id2label", "label2id", "output_attentions",
    "output_hidden_states", "problem_type", "return_dict", "transformers_version", "use_cache",
)  # fmt: skip


def fields(config: Any) -> dict[str, Any]:
    """All fields of a configuration as JSON has them, without what is common to all."""

    def clean(value: Any) -> Any:
        if isinstance(value, dict):
            return {
                k: clean(v) for k, v in value.items() if k not in COMMON and (k, v) != ("is_encoder_decoder", False)
            }
        return value

    made: dict[str, Any] = clean(json.loads(config.to_json_string(use_diff=False)))
    return made


def above_windows(config: dict[str, Any]) -> int:
    """A context that fills every window, chunk and block of a configuration."""
    found = [SMALL]
    for name, value in config.items():
        if any(word in name for word in WINDOWS):
            values = value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]
            found += [v for v in values if isinstance(v, int) and not isinstance(v, bool) and v <= 16_384]
    return max(found) + 37


def derive(name: str) -> dict[str, Any]:
    """What one type gives."""
    from attncalc.errors import AttncalcError
    from attncalc.measure.reference import built, configured, text_of

    configs: Any = import_module("transformers.models.auto.configuration_auto").CONFIG_MAPPING
    record: dict[str, Any] = {}
    try:
        whole = configs[name]()
        record["config"] = fields(whole)
        reference = built(text_of(whole), name)
        record |= _sizes(reference)
        try:
            runs = [reference.run(SMALL)]
        except AttncalcError:
            if record["config"].get("is_decoder") is not False:
                raise
            record["config"]["is_decoder"] = True
            reference = built(configured(record["config"], name), name)
            record |= _sizes(reference)
            runs = [reference.run(SMALL)]
        runs.append(reference.run(above_windows(json.loads(reference.model.config.to_json_string(use_diff=False)))))
        record["runs"] = [
            {
                "context": r.prefill.context,
                "cache_bytes": r.prefill.cache_bytes,
                "prefill_attention_flops": r.prefill.total,
                "decode_attention_flops": r.decode.total,
            }
            for r in runs
        ]
        cache = runs[-1].prefill.cache
        record["layout"] = [[t.tensor, list(t.shape), t.dtype, t.count] for t in cache][:40]
        softmax = {t.tensor for t in cache} <= {"keys", "values"}
        record["flops_comparable"] = softmax and runs[-1].prefill.flops is not None
    except Exception as error:  # noqa: BLE001
        said = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        record["error"] = said if isinstance(error, AttncalcError) else f"{type(error).__name__}: {said}"[:200]
    return record


def _sizes(reference: Any) -> dict[str, Any]:
    return {
        "class": type(reference.model).__name__,
        "text_type": reference.model_type,
        "parameters": reference.parameters,
        "buffers": reference.buffers,
    }


def some(names: list[str]) -> None:
    """Print what each of these types gives, a line each; a loop over tokens is Python, which an alarm interrupts."""
    sys.path.insert(0, str(HERE.parents[1]))
    signal.signal(signal.SIGALRM, _late)
    for name in names:
        signal.alarm(SECONDS)
        made = derive(name)
        signal.alarm(0)
        print(json.dumps([name, made]), flush=True)
        print(name, made.get("error", "ok"), file=sys.stderr, flush=True)


def _late(*_: object) -> None:
    raise TimeoutError(f"no result in {SECONDS} seconds")


def in_process(names: list[str]) -> dict[str, dict[str, Any]]:
    """`some` in a process of its own."""
    command = [sys.executable, __file__, "--some", *names]
    ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, cwd=HERE.parents[1])
    made = dict(json.loads(line) for line in ran.stdout.splitlines() if line.startswith("["))
    return {name: made.get(name, {"error": f"exit status {ran.returncode}"}) for name in names}


def main(names: list[str]) -> None:
    """Write the file."""
    import torch
    import transformers

    types = import_module("transformers.models.auto.modeling_auto").MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    path = HERE / "class_defaults.json"
    chosen = names or list(types)
    with ThreadPoolExecutor(WORKERS) as pool:
        made = {
            name: record
            for part in pool.map(in_process, (chosen[i : i + PART] for i in range(0, len(chosen), PART)))
            for name, record in part.items()
        }
    old = json.loads(path.read_text(encoding="utf-8"))["types"] if names and path.exists() else {}
    about = {
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "method": "class defaults on the meta device, bf16, eager attention, batch 1; made by class_defaults.py",
    }
    lines = [f"  {json.dumps(n)}: {json.dumps(r, separators=(',', ':'))}" for n, r in sorted((old | made).items())]
    text = f'{{\n "about": {json.dumps(about)},\n "types": {{\n' + ",\n".join(lines) + "\n }\n}\n"
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    some(sys.argv[2:]) if sys.argv[1:2] == ["--some"] else main(sys.argv[1:])
