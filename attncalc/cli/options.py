"""Options that several commands share, as types. All numbers arrive as text: units are ours to read."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attncalc.engines import ALL, ENGINES

if TYPE_CHECKING:
    from attncalc.engines.options import EngineOptions

Models = Annotated[
    list[str] | None,
    typer.Argument(metavar="[MODEL]...", show_default=False, help="Preset id, hf_id or file."),
]
ModelOption = Annotated[
    list[str] | None, typer.Option("--model", "-m", help="A model: preset id, hf_id or file; repeatable.")
]
Context = Annotated[
    str | None,
    typer.Option(
        "--context",
        "-c",
        help="Tokens per sequence, new ones included; 128k = 131072. [default: 131072, or the model's maximum]",
    ),
]
Batch = Annotated[str, typer.Option("--batch", "-b", help="Sequences.")]
NewTokens = Annotated[str | None, typer.Option("--new-tokens", "-q", help="Tokens computed in this step. [default: 1]")]
Phase = Annotated[str | None, typer.Option("--phase", help="prefill (all tokens are new) or decode (one is).")]
KVDtype = Annotated[
    str | None,
    typer.Option("--kv-dtype", help="Cache format, or K/V. [default: bf16, or what the checkpoint declares]"),
]
WeightDtype = Annotated[str, typer.Option("--weight-dtype", help="Format of the weights in memory.")]
ActivationDtype = Annotated[str, typer.Option("--activation-dtype", help="Format of activations in memory.")]
StateDtype = Annotated[
    str | None, typer.Option("--state-dtype", help="Format of recurrent states. [default: fp32, or the engine's]")
]
IndexDtype = Annotated[
    str | None, typer.Option("--index-dtype", help="Format of index keys: fp8 is 132 B per 128. [default: the cache's]")
]
Form = Annotated[
    str | None,
    typer.Option("--form", help="How a variant is computed; `attncalc variants` lists the forms."),
]
Split = Annotated[str, typer.Option("--tp", help="Tensor-parallel GPUs; numbers are of the one that holds most.")]
Engine = Annotated[
    list[str] | None,
    typer.Option("--engine", help=f"{', '.join(ENGINES)}, or {ALL}; repeatable. [default: logical]"),
]
EngineVersion = Annotated[
    str | None, typer.Option("--engine-version", help="Follow an older version, where rules changed.")
]
BlockSize = Annotated[str | None, typer.Option("--block-size", help="Tokens of a block or page.")]
MaxBatchedTokens = Annotated[
    str | None,
    typer.Option("--max-batched-tokens", help="Tokens scheduled and not yet settled; sliding layers keep them too."),
]
PrefixCaching = Annotated[bool, typer.Option("--prefix-caching", help="Keep states for prefixes: one page more each.")]
NoHybridManager = Annotated[
    bool, typer.Option("--no-hybrid-manager", help="Sliding and chunked layers take blocks for the whole context.")
]
DraftTokens = Annotated[str | None, typer.Option("--draft-tokens", help="Tokens of a draft that a step verifies.")]
Slots = Annotated[str | None, typer.Option("--slots", help="Slots that share --context and its cells.")]
Ubatch = Annotated[str | None, typer.Option("--ubatch", help="Tokens of a physical batch.")]
KvUnified = Annotated[bool, typer.Option("--kv-unified", help="Slots share one stream of cells.")]
SwaRatio = Annotated[
    str | None, typer.Option("--swa-ratio", help="Tokens of the sliding pool for each of the full one, such as 0.8.")
]
Pipeline = Annotated[
    str | None, typer.Option("--pp", help="Pipeline stages, or the layers of each: 2, or 16,32. The largest decides.")
]
ContextParallel = Annotated[
    str | None, typer.Option("--dcp", help="Decode context parallelism: GPUs of tp that share a cache's tokens.")
]
Replicas = Annotated[str | None, typer.Option("--dp", help="Replicas that share the sequences.")]
DpAttention = Annotated[
    bool, typer.Option("--dp-attention", help="The replicas of --dp lie within tp and hold whole sequences.")
]
Count = Annotated[
    str,
    typer.Option("--count", help="causal (exact pairs) or dense (what an eager implementation computes)."),
]
Mtp = Annotated[bool, typer.Option("--mtp", help="Add the multi-token-prediction layers.")]
Export = Annotated[
    bool,
    typer.Option("--export", help="Write the model file of one model or config.json, to keep and edit."),
]
Logits = Annotated[str, typer.Option("--logits", help="all or last: new tokens that go through the head.")]
Device = Annotated[str | None, typer.Option("--device", help="Accelerator; `attncalc devices` lists them.")]
Format = Annotated[str | None, typer.Option("--format", help="table, json, csv or markdown. [default: table]")]
Json = Annotated[bool, typer.Option("--json", help="Short for --format json.")]
Output = Annotated[
    str | None, typer.Option("--output", "-o", metavar="FILE", help="Write to a file instead of printing.")
]


def engine_settings(arguments: Mapping[str, Any]) -> "EngineOptions":
    """The engine's options among the arguments of a command, each under its own name."""
    from dataclasses import fields

    from attncalc.engines.options import EngineOptions, read_options

    names = {f.name: "engine_version" if f.name == "version" else f.name for f in fields(EngineOptions)}
    return read_options(**{name: arguments[said] for name, said in names.items() if said in arguments})
