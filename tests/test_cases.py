"""Numbers that others have published, each with the command that gives it.

Logs of engines, reports about wrong calculators, tables of papers and posts: a row names the case, where it stands, the
words that are run, the number in the JSON, and the published value with the precision that it was printed in. A wrong
number that a source corrects is in no row. Models without a preset are files in `data/models/`, made from what the
source says of their attention. What no command can express is in no row: a draft model beside its target, a fork's
record of 432 B, a scale of a row that no engine keeps, a branch that was never released.
"""

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.conftest import Command

MODELS = Path(__file__).parent / "data" / "models"
KiB, MiB, GiB = 2**10, 2**20, 2**30
KB, GB = 10**3, 10**9

Row = dict[str, Any]
Value = Callable[[Row], Any]


class Case(NamedTuple):
    """`words` run; `value` of their first result, divided by `unit`, is `expected` up to `tolerance`."""

    id: str
    source: str
    words: str
    value: str | Value
    expected: float
    unit: int = 1
    tolerance: float = 0


def kept(*names: str) -> Value:
    """Bytes of the tensors of these names in all layers."""
    return lambda row: sum(
        x["num_layers"] * t["bytes"] for x in row["layers"] for t in x["tensors"] if t["name"] in names
    )


def one(name: str, layer: int = 0) -> Value:
    """Bytes of a tensor in one layer of a group."""
    return lambda row: next(t["bytes"] for t in row["layers"][layer]["tensors"] if t["name"] == name)


HF_MEM, OFFLOAD = "alvarobartt/hf-mem", "vLLM blog, 2026-01-08, KV offloading connector"
V2_TABLE_9, INSIGHTS = "DeepSeek-V2 report, Table 9", "Insights into DeepSeek-V3 (arXiv 2505.09343), Table 1"
V4_POST = "vLLM blog, 2026-04-24, DeepSeek-V4"
AIC_TESTS = "ai-dynamo/aiconfigurator, test_memory_estimation.py"
HF_48566 = "huggingface/transformers#48566"
BLOG_2345, PUZZLETRON = "huggingface/blog#2345", "NVIDIA/Model-Optimizer#2482"
GLM_FORK = "local-inference-lab/vllm#82"

DEFINITIONS = (
    # At one token a sliding layer costs as much as a full one.
    Case("S-002", f"{HF_MEM}#60", "cache gpt-oss-120b -c 1", "bytes_total", 73_728),
    # 79 layers of 656 B and 22 index keys of 132 B: of the 78 layers 21 have an indexer, the MTP layer too.
    Case("S-012", GLM_FORK, "cache glm-5.2 --mtp --kv-dtype fp8_ds_mla", "bytes_per_token", 54_728),
    Case("S-014", HF_48566, "cache qwen3-32b --tp 4 -c 834048", "bytes_total", 50.91, GiB, 0.01),
    Case("S-014", HF_48566, "cache qwen3-32b -c 208384", "bytes_total", 50.87, GiB, 0.01),
    Case("S-028", f"{HF_MEM}#70", "cache gpt-oss-20b -c 8192 -b 32", "bytes_total", 6.09, GiB, 0.005),
    Case("S-029", "gpustack/gguf-parser-go#31", "cache lfm2-1.2b.yaml -c 32k --kv-dtype fp16", "bytes_total", 384, MiB),
    Case("S-030", "gpustack/gguf-parser-go#28", "cache qwen3.6-35b-a3b --kv-dtype fp16", "bytes_per_token", 20_480),
    Case("S-031", "lablup/mlxcel#172", "cache gemma-3-1b -c 32k --kv-dtype fp16", "bytes_total", 139, MiB),
    Case(
        "S-032",
        "aiconfigurator bd8c1cef",
        "cache gpt-oss-120b -c 65936 --kv-dtype fp8",
        "bytes_total",
        1.1341,
        GiB,
        1e-4,
    ),
    Case("S-033", "aiconfigurator#912", "cache kimi-k2.5 --tp 4", "elements_per_token_per_layer", 576),
    Case("S-035", AIC_TESTS, "cache llama-3.1-70b --tp 16", "bytes_per_token", 40_960),
    Case("S-035", AIC_TESTS, "cache llama-3.1-70b --tp 4", "bytes_per_token", 81_920),
    Case("S-035", AIC_TESTS, "cache llama-3.1-70b", "bytes_per_token", 327_680),
    Case("S-036", AIC_TESTS, "cache deepseek-v3", "bytes_per_token", 70_272),
    Case("S-036", AIC_TESTS, "cache deepseek-v3 --tp 8", "bytes_per_token", 70_272),
    Case("S-037", "LMCache/LMCache#694", "cache deepseek-v3", "bytes_per_token", 70_272),
    Case("S-038", PUZZLETRON, "cache mistral-small-24b", "bytes_per_token", 163_840),
    Case("S-039", PUZZLETRON, "cache gpt-oss-20b -c 1", "bytes_total", 49_152),
    Case("S-040", "jranaraki/vllm-fit#2", "cache llama-2-7b --kv-dtype fp16", "bytes_per_token", 524_288),
    Case("S-041", BLOG_2345, "cache llama-3.1-405b -c 128000", "bytes_total", 61.52, GiB, 0.005),
    Case("S-041", BLOG_2345, "cache llama-3.1-405b-16-kv-heads.yaml -c 128000", "bytes_total", 123.05, GiB, 0.005),
    Case("S-041", BLOG_2345, "cache llama-3.1-405b-16-kv-heads.yaml -c 1k", "bytes_total", 0.984, GiB, 0.001),
    Case("S-042", BLOG_2345, "cache llama-3.1-8b -c 128000", "bytes_total", 15.62, GiB, 0.006),
    Case("S-042", BLOG_2345, "cache llama-3.1-8b -c 1k", "bytes_total", 0.125, GiB),
    Case("S-042", BLOG_2345, "cache llama-3.1-8b -c 128k", "bytes_total", 16, GiB),
    Case("S-043", "raullenchai/Rapid-MLX#1423", "cache gemma-4-12b.yaml", "bytes_per_token", 16_384),
    Case("S-044", "guoqingbao/xinfer#195", "cache qwen3-vl-32b -c 256k -b 2", "bytes_total", 131_072, MiB),
    Case("S-045", "TensorDirect/KVDirect#2", "cache llama-3.1-70b --tp 8 -c 16k", "bytes_total", 640, MiB),
    Case("S-045", "TensorDirect/KVDirect#2", "cache llama-3.1-70b --tp 8 -c 16", one("k"), 4_096),
    Case("S-045", "TensorDirect/KVDirect#2", "cache llama-3.1-70b --tp 8 -c 16k", "bytes_total", 163_840, 4_096),
    # One head of the eight: 64 B of values and 8 B of scales, as vLLM and TensorRT-LLM keep it.
    Case("S-046", "FlashML-org/FreeToken#408", "cache llama-3.1-8b -c 1 --kv-dtype nvfp4", one("k"), 72, 8),
    Case("S-047", "microscale.academy, local-global", "cache local-global-30.yaml", "bytes_total", 2.6, GiB, 0.005),
    Case("S-048", "DeepSeek-V2 report, Table 1", "cache deepseek-v2", "elements_per_token", 34_560),
    Case(
        "S-048", "DeepSeek-V2 report, Table 1", "cache deepseek-v2", lambda r: 1 / r["baselines"]["mqa"]["ratio"], 2.25
    ),
    Case("S-049", V2_TABLE_9, "cache deepseek-v2-lite", "elements_per_token", 15.6, KB, 0.05),
    Case(
        "S-049",
        V2_TABLE_9,
        "cache deepseek-v2-lite",
        lambda r: r["baselines"]["mha"]["bytes_per_token"] / 2,
        110.6,
        KB,
        0.05,
    ),
    Case("S-049", V2_TABLE_9, "cache deepseek-v2", "elements_per_token", 34.6, KB, 0.05),
    Case("S-049", V2_TABLE_9, "cache deepseek-v2-table-9-mha.yaml", "elements_per_token", 860.2, KB, 0.05),
    Case("S-051", INSIGHTS, "cache deepseek-v3", "bytes_per_token", 70.272, KB),
    Case("S-052", INSIGHTS, "cache qwen2.5-72b", "bytes_per_token", 327.68, KB),
    Case("S-053", INSIGHTS, "cache llama-3.1-405b", "bytes_per_token", 516.096, KB),
    # The latents alone, without index keys; 62 layers with the one of MTP.
    Case(
        "S-054",
        "FlashMLA docs, 2025-09-29",
        "cache deepseek-v3.2 -c 128k --mtp",
        kept("c_kv", "k_pe"),
        8.72,
        GiB,
        0.005,
    ),
    Case("S-054", "FlashMLA docs, 2025-09-29", "cache deepseek-v3.2 -c 128k", kept("c_kv", "k_pe"), 8.58, GiB, 0.005),
    # Entries, index keys and windows; the post leaves out the state of the compressor.
    Case(
        "S-055", V4_POST, "cache deepseek-v4-pro -c 1M", kept("window_kv", "compressed_kv", "index_k"), 9.62, GiB, 0.006
    ),
    Case("S-056", V4_POST, "cache deepseek-v3.2 -c 1M", "bytes_total", 83.9, GiB, 0.05),
    Case(
        "S-059",
        OFFLOAD,
        "cache deepseek-v2-lite -c 64",
        lambda r: r["layers"][0]["bytes"] / r["layers"][0]["num_layers"],
        72,
        KiB,
    ),
    Case("S-059", OFFLOAD, "cache deepseek-v2-lite -c 64", "bytes_total", 1.9, MiB, 0.005),
    Case("S-060", OFFLOAD, "cache llama-3.1-70b --tp 4 -c 16", one("k"), 8, KiB),
    Case("S-060", OFFLOAD, "cache llama-3.1-70b --tp 4 -c 16", "bytes_total", 1.25, MiB),
    Case("S-061", OFFLOAD, "cache qwen3-8b -c 16", one("k"), 32, KiB),
    Case("S-061", OFFLOAD, "cache qwen3-8b -c 16", "bytes_total", 2.25, MiB),
    Case("S-062", OFFLOAD, "cache qwen3-0.6b -c 16", "bytes_total", 1.75, MiB),
    Case(
        "S-063", "PagedAttention (arXiv 2309.06180)", "cache opt-13b.yaml --kv-dtype fp16", "bytes_per_token", 800, KiB
    ),
    Case(
        "S-063", "PagedAttention (arXiv 2309.06180)", "cache opt-13b.yaml --kv-dtype fp16", "bytes_total", 1.5625, GiB
    ),
    Case(
        "S-063",
        "PagedAttention (arXiv 2309.06180)",
        "cache opt-13b.yaml --kv-dtype fp16",
        "bytes_total",
        1.68,
        GB,
        0.005,
    ),
)


def page(*names: str) -> Value:
    """Bytes of the part of a block in which these tensors of one layer lie."""
    return lambda row: next(
        p["page_bytes"] for x in row["layers"] for p in x["pages"] if set(names) <= set(p["tensors"])
    )


def padded(row: Row) -> float:
    """By how much, in percent, a state page is padded."""
    held = next(sum(t["bytes"] for t in x["tensors"]) for x in row["layers"] if x["variant"] == "gdn")
    found: float = 100 * (row["state_page_bytes"] - held) / held
    return found


def first_stage(row: Row) -> Any:
    """What the sequences take of the first pipeline stage."""
    return row["stages"][0]["bytes_total"] - row["stages"][0]["bytes_overhead"]


QWEN_3090, VLLM_34076 = "syv-ai/qwen38-27b-rtx3090#102", "vllm-project/vllm#34076"
VLLM_40691, VLLM_27508 = "vllm-project/vllm#40691", "vllm-project/vllm#27508"
DRAFTS_15 = "cache qwen3.8-27b --engine vllm --state-dtype bf16 --draft-tokens 15"
DRAFTS_7 = "cache qwen3.8-27b --engine vllm --state-dtype bf16 --draft-tokens 7 --kv-dtype int8_per_token_head"
STAGES = "cache qwen3-30b-a3b --engine vllm -c 262144 --pp 16,32"
MIMO = "cache mimo-v2-flash --engine sglang --tp 4 --block-size 64 --swa-ratio 1 -c 300288"
V4 = "cache deepseek-v4-pro --engine vllm --kv-dtype fp8_ds_mla"


def sliding(name: str) -> Value:
    """Bytes of a tensor in all sliding layers."""
    return lambda row: sum(
        x["num_layers"] * t["bytes"]
        for x in row["layers"]
        for t in x["tensors"]
        if x["reach"].startswith("window") and t["name"] == name
    )


UNDER_ENGINES = (
    # A state of 3,207,168 B and tokens of 4,096 B: 783 tokens, whole kernel blocks of 16.
    Case("S-005", VLLM_40691, "cache qwen3.5-27b --engine vllm -c 32768", "block_tokens", 784),
    Case(
        "S-006",
        VLLM_27508,
        "cache gpt-oss-120b --engine vllm -c 131072 --max-batched-tokens 1024",
        "bytes_per_sequence",
        4.54,
        GiB,
        0.005,
    ),
    Case("S-008", VLLM_34076, STAGES, first_stage, 8, GiB),
    Case("S-008", VLLM_34076, STAGES, "bytes_per_sequence", 16, GiB),
    Case("S-009", QWEN_3090, DRAFTS_15, "block_tokens", 480),
    Case("S-009", QWEN_3090, DRAFTS_15, padded, 1.27, 1, 0.005),
    Case("S-010", QWEN_3090, DRAFTS_7, "block_tokens", 864),
    Case("S-010", QWEN_3090, DRAFTS_7, padded, 1.09, 1, 0.005),
    Case("S-012", GLM_FORK, "cache glm-5.2 --mtp --kv-dtype fp8_ds_mla --engine vllm", "bytes_per_token", 54_728),
    Case("S-012", GLM_FORK, "cache glm-5.2 --mtp --kv-dtype fp8_ds_mla --engine sglang", "bytes_per_token", 54_728),
    Case("S-015", "sgl-project/sglang#18039", MIMO, sliding("k"), 8.38, GiB, 0.005),
    Case("S-015", "sgl-project/sglang#18039", MIMO, sliding("v"), 5.59, GiB, 0.006),
    Case(
        "S-028",
        f"{HF_MEM}#70",
        "cache gpt-oss-20b -c 8192 -b 32 --engine vllm --no-hybrid-manager",
        "bytes_total",
        12,
        GiB,
        0.005,
    ),
    Case("S-035", AIC_TESTS, "cache llama-3.1-70b --tp 16 --engine vllm", "bytes_per_token", 40_960),
    Case("S-035", AIC_TESTS, "cache llama-3.1-70b --tp 16 --engine sglang", "bytes_per_token", 40_960),
    Case("S-036", AIC_TESTS, "cache deepseek-v3 --tp 8 --engine vllm", "bytes_per_token", 70_272),
    Case("S-036", AIC_TESTS, "cache deepseek-v3 --tp 8 --engine sglang", "bytes_per_token", 70_272),
    Case(
        "S-045",
        "TensorDirect/KVDirect#2",
        "cache llama-3.1-70b --tp 8 -c 16k --engine vllm",
        "bytes_per_sequence",
        640,
        MiB,
    ),
    Case("S-057", V4_POST, V4, page("window_kv"), 37_440),
    Case("S-057", V4_POST, V4.replace("pro", "flash"), page("index_k"), 8_640),
    Case("S-057", V4_POST, V4, lambda r: min(p["page_bytes"] for x in r["layers"] for p in x["pages"]), 1_728),
    Case("S-059", OFFLOAD, "cache deepseek-v2-lite --engine vllm --block-size 64", page("c_kv"), 72, KiB),
    Case("S-059", OFFLOAD, "cache deepseek-v2-lite --engine vllm --block-size 64", "block_bytes", 1.9, MiB, 0.005),
    Case("S-060", OFFLOAD, "cache llama-3.1-70b --tp 4 --engine vllm", page("k", "v"), 2 * 8, KiB),
    Case("S-060", OFFLOAD, "cache llama-3.1-70b --tp 4 --engine vllm", "block_bytes", 1.25, MiB),
    Case("S-061", OFFLOAD, "cache qwen3-8b --engine vllm", page("k", "v"), 2 * 32, KiB),
    Case("S-061", OFFLOAD, "cache qwen3-8b --engine vllm", "block_bytes", 2.25, MiB),
    Case("S-062", OFFLOAD, "cache qwen3-0.6b --engine vllm", "block_bytes", 1.75, MiB),
)


CONFIGIQ, LMSTUDIO = (
    "redhat-performance/configiq#112",
    "lmstudio-bug-tracker#1862",
)
LLAMACPP_21551, UNSLOTH_5225, IK_1607 = "ggml-org/llama.cpp#21551", "unslothai/unsloth#5225", "ik_llama.cpp#1607"
GEMMA_4 = "fit {} --engine vllm -c 256k --max-batched-tokens 8192 --kv-dtype bf16 --memory {}"
QWEN = "fit qwen3.5-27b --engine vllm -c 32k --memory 76402393088B --engine-version {}"  # 1,487 blocks of 16 layers
LLAMA = "cache {} --engine llamacpp --kv-dtype {}"
GEMMA_270M = "cache gemma-3-270m.yaml -c {} --slots {} --ubatch 512 --engine llamacpp --kv-dtype fp16"
GEMMA_4_UBATCH = "cache gemma-4-31b -c {} --ubatch 1024 --engine llamacpp --kv-dtype fp16"
TRT = "{} --engine tensorrt-llm --block-size 64 --kv-dtype fp16"
FULL_WIDTH = 10 * 2 * 4 * 512 * 2 + 50 * 2 * 16 * 256 * 2
"""Bytes of a token in all layers of Gemma 4 31B."""


def said(pattern: str) -> Value:
    """A number in the lines that the engine would log."""
    return lambda row: float(
        next(m[1] for line in row["log_lines"] if (m := re.search(pattern, line))).replace(",", "")
    )


BUDGETS = (
    # The rule before 0.21; 9,798 blocks, which are 5.38 GiB.
    Case(
        "S-001",
        f"{HF_MEM}#60",
        "fit gpt-oss-120b --engine vllm --engine-version 0.20 --memory 5.38221GiB",
        "tokens",
        78_384,
    ),
    Case("S-001", f"{HF_MEM}#60", "fit gpt-oss-120b --engine vllm --memory 5.38221GiB", "blocks", 9_798),
    Case("S-003", CONFIGIQ, GEMMA_4.format("gemma-4-31b", "64.68GiB"), "tokens", 626_949),
    # 42,564 blocks: 103.92 GiB as printed.
    Case("S-004", CONFIGIQ, GEMMA_4.format("gemma-4-31b-nvfp4", "103.9161GiB"), "tokens", 1_007_303),
    Case("S-005", VLLM_40691, QWEN.format("0.19"), "tokens", 290_864),
    Case("S-005", VLLM_40691, QWEN.format("0.19"), said("request: (.*)x"), 33.04, tolerance=0.005),
    Case("S-005", VLLM_40691, QWEN.format("0.21"), "tokens", 1_082_800, tolerance=1),
    Case(
        "S-006",
        VLLM_27508,
        "fit gpt-oss-120b --engine vllm --max-batched-tokens 1024 --memory 4GiB",
        said("([0-9.]+) GiB KV cache is needed"),
        4.54,
        tolerance=0.005,
    ),
    # The estimate of a stage of 16 layers.
    Case(
        "S-008",
        VLLM_34076,
        "fit qwen3-30b-a3b --engine vllm --pp 16,16,16 -c 256k --memory 3.18GiB",
        lambda row: row["blocks"] * 16,
        104_192,
    ),
    # One block less, which belongs to no sequence.
    Case(
        "S-008",
        VLLM_34076,
        "fit qwen3-30b-a3b --engine vllm --pp 16,16,16 -c 256k --memory 3.18GiB",
        said("model length is ([0-9]+)"),
        104_192 - 16,
    ),
    Case(
        "S-016",
        LMSTUDIO,
        LLAMA.format("qwen3.5-27b -c 256k --slots 4 --kv-unified", "fp16"),
        kept("k", "v"),
        16_384,
        MiB,
    ),
    Case(
        "S-017", LMSTUDIO, LLAMA.format("qwen3.5-27b -c 256k --slots 4 --kv-unified", "fp16"), "bytes_fixed", 598.5, MiB
    ),
    Case("S-017", LMSTUDIO, LLAMA.format("qwen3.5-27b", "fp16"), "bytes_fixed", 149.625, MiB),
    Case("S-018", "ollama/ollama#17037", LLAMA.format("gemma-3-4b -c 128k", "fp16"), "bytes_total", 2_734, MiB),
    # Its parts; the branch also kept a transposed copy of the latent, which no release has.
    Case("S-019", "ggml-org/llama.cpp#11446", LLAMA.format("deepseek-r1 -c 32k", "fp16"), kept("k_pe"), 244, MiB),
    Case("S-019", "ggml-org/llama.cpp#11446", LLAMA.format("deepseek-r1 -c 32k", "fp16"), kept("c_kv"), 1_952, MiB),
    Case("S-020", LLAMACPP_21551, LLAMA.format("qwen3-8b -c 2560", "q8_0"), "bytes_total", 191.25, MiB),
    Case("S-020", LLAMACPP_21551, LLAMA.format("qwen3-8b -c 2560", "q4_0"), "bytes_total", 101.25, MiB),
    Case("S-020", LLAMACPP_21551, LLAMA.format("qwen3-8b -c 2560", "q4_0/q1_0"), "bytes_total", 63.28, MiB, 0.005),
    Case("S-020", LLAMACPP_21551, LLAMA.format("qwen3-8b -c 2560", "q8_0/q1_0"), "bytes_total", 108.28, MiB, 0.005),
    Case("S-021", LLAMACPP_21551, LLAMA.format("mistral-small-24b -c 6656", "q8_0"), "bytes_total", 552.5, MiB),
    Case("S-021", LLAMACPP_21551, LLAMA.format("mistral-small-24b -c 6656", "fp16"), "bytes_total", 1_040, MiB),
    Case("S-021", LLAMACPP_21551, LLAMA.format("mistral-small-24b -c 6656", "q4_0"), "bytes_total", 292.5, MiB),
    Case(
        "S-021",
        LLAMACPP_21551,
        LLAMA.format("mistral-small-24b -c 6656", "q4_0/q1_0"),
        "bytes_total",
        182.81,
        MiB,
        0.005,
    ),
    Case("S-022", UNSLOTH_5225, GEMMA_270M.format(4096, 2), "bytes_total", 42, MiB),
    Case("S-022", UNSLOTH_5225, GEMMA_270M.format(4096, 1), "bytes_total", 27, MiB),
    Case("S-022", UNSLOTH_5225, GEMMA_270M.format(4096, 4), "bytes_total", 72, MiB),
    Case("S-022", UNSLOTH_5225, GEMMA_270M.format(4096, 8), "bytes_total", 72, MiB),
    Case("S-022", UNSLOTH_5225, GEMMA_270M.format(8192, 2), "bytes_total", 54, MiB),
    # A checkpoint, which has a header of 1 kB.
    Case("S-023", "lmstudio-bug-tracker#1563", LLAMA.format("qwen3.5-9b", "fp16"), "bytes_fixed", 50.251, MiB, 0.002),
    Case("S-024", IK_1607, GEMMA_4_UBATCH.format("8k"), "bytes_total", 32, FULL_WIDTH * 8192 // 100, 0.5),
    Case("S-024", IK_1607, GEMMA_4_UBATCH.format("32k"), "bytes_total", 15, FULL_WIDTH * 32_768 // 100, 0.5),
    Case("S-024", IK_1607, GEMMA_4_UBATCH.format("256k"), "bytes_total", 10, FULL_WIDTH * 262_144 // 100, 0.5),
    Case(
        "S-025",
        "unsloth, test_kv_cache_estimation.py",
        LLAMA.format("kimi-k3 -c 8k", "fp16"),
        "bytes_fixed",
        464_633_856,
    ),
    Case("S-026", "NVIDIA/TensorRT-LLM#1400", TRT.format("cache llama-2-7b -c 132608"), "bytes_total", 69_524_783_104),
    Case("S-027", "NVIDIA/TensorRT-LLM#2268", TRT.format("fit qwen1.5-7b.yaml --free-memory 21.89GiB"), "blocks", 631),
)


def run(attncalc: Command, case: Case) -> float:
    """The number that the command gives."""
    words = [str(MODELS / w) if w.endswith(".yaml") else w for w in shlex.split(case.words)]
    made = attncalc(*words, "--json")
    assert made.status == 0, made.err
    row = made.record["results"][0]
    found: float = row[case.value] if isinstance(case.value, str) else case.value(row)
    return found / case.unit


@pytest.mark.parametrize("case", [*DEFINITIONS, *UNDER_ENGINES, *BUDGETS], ids=lambda c: f"{c.id} {c.words}")
def test_a_published_number(attncalc: Command, case: Case) -> None:
    assert abs(run(attncalc, case) - case.expected) <= case.tolerance


def total(attncalc: Command, words: str, key: str = "bytes_total") -> float:
    return run(attncalc, Case("", "", words, key, 0))


def test_s_050_the_saving_needs_a_cache_of_six_bits(attncalc: Command) -> None:
    """DeepSeek-V2 report, abstract: 93.3 % less than DeepSeek 67B, whose cache has 16 bits; at equal formats 82.2 %."""
    elements = [total(attncalc, f"cache {m}", "elements_per_token") for m in ("deepseek-v2", "deepseek-67b.yaml")]
    small, large = elements
    assert abs(100 * (1 - small * 6 / (large * 16)) - 93.3) <= 0.05
    assert abs(100 * (1 - small / large) - 82.2) <= 0.05


@pytest.mark.parametrize(("model", "copies"), [("qwen3-235b-a22b", 2), ("deepseek-v3", 8)])
def test_s_065_copies_of_what_eight_gpus_share(attncalc: Command, model: str, copies: int) -> None:
    """vLLM blog, 2026-08-07, decode context parallelism: 4 KV heads on 8 GPUs are held twice, a latent 8 times."""
    assert 8 * total(attncalc, f"cache {model} --tp 8") == copies * total(attncalc, f"cache {model}")


def test_s_007_a_new_rule_of_the_log_is_no_memory(attncalc: Command) -> None:
    """vllm-project/vllm#43308: the same 50 GB print about 9.5 times the tokens from 0.21 on."""
    words = "fit gemma-4-31b --engine vllm -c 128k --memory 50GB --engine-version "
    old, new = (total(attncalc, words + version, "tokens") for version in ("0.20", "0.21"))
    assert abs(new / old - 9.5) <= 0.35
