"""The command that asks what fits: fit."""

from typing import Annotated

import typer

from attncalc.cli import options as o


def fit(
    models: o.Models = None,
    model: o.ModelOption = None,
    device: o.Device = None,
    gpus: Annotated[str | None, typer.Option("--gpus", help="GPUs: tp of all, unless --tp, --pp or --dp say.")] = None,
    memory_fraction: Annotated[
        str | None,
        typer.Option("--memory-fraction", help="Of the memory (tensorrt-llm: of what is free). [default: 0.9]"),
    ] = None,
    reserve: Annotated[
        str | None, typer.Option("--reserve", help="Memory of a GPU for what is not modelled, such as 4GB.")
    ] = None,
    free_memory: Annotated[
        str | None, typer.Option("--free-memory", help="What the weights leave on a GPU, instead of --device.")
    ] = None,
    memory: Annotated[
        str | None, typer.Option("--memory", help="The cache's own budget on a GPU, instead of --device.")
    ] = None,
    context: o.Context = None,
    batch: o.Batch = "1",
    kv_dtype: o.KVDtype = None,
    weight_dtype: o.WeightDtype = "bf16",
    state_dtype: o.StateDtype = None,
    index_dtype: o.IndexDtype = None,
    form: o.Form = None,
    tp: Annotated[str | None, typer.Option("--tp", help="Tensor-parallel GPUs. [default: --gpus]")] = None,
    engine: o.Engine = None,
    engine_version: o.EngineVersion = None,
    block_size: o.BlockSize = None,
    max_batched_tokens: o.MaxBatchedTokens = None,
    prefix_caching: o.PrefixCaching = False,
    no_hybrid_manager: o.NoHybridManager = False,
    draft_tokens: o.DraftTokens = None,
    slots: o.Slots = None,
    ubatch: o.Ubatch = None,
    kv_unified: o.KvUnified = False,
    swa_ratio: o.SwaRatio = None,
    pp: o.Pipeline = None,
    dcp: o.ContextParallel = None,
    dp: o.Replicas = None,
    dp_attention: o.DpAttention = False,
    mtp: o.Mtp = False,
    format: o.Format = None,  # noqa: A002
    json: o.Json = False,
    output: o.Output = None,
) -> None:
    """Tokens and sequences that fit into a memory beside the weights, or into a given cache budget."""
    settings = o.engine_settings(locals())
    from attncalc import fitting
    from attncalc.inputs import Options
    from attncalc.render import chosen_format, deliver

    wanted = chosen_format(format, json, output)
    asked = Options(
        context,
        batch,
        kv_dtype=kv_dtype,
        weight_dtype=weight_dtype,
        state_dtype=state_dtype,
        index_dtype=index_dtype,
        form=form,
        mtp=mtp,
        engine=settings,
    )
    given = fitting.MemoryOptions(device, gpus, memory_fraction, reserve, free_memory, memory, tp)
    deliver(fitting.run(models or [], model or [], engine or ["logical"], asked, given), wanted, output)
