"""Commands that need numbers only: cache, compare, flops, explain."""

from typing import Annotated

import typer

from attncalc.cli import options as o


def cache(
    models: o.Models = None,
    model: o.ModelOption = None,
    context: o.Context = None,
    batch: o.Batch = "1",
    kv_dtype: o.KVDtype = None,
    state_dtype: o.StateDtype = None,
    index_dtype: o.IndexDtype = None,
    form: o.Form = None,
    tp: o.Split = "1",
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
    """Cache bytes per token, layer, sequence and GPU, beside the same heads as MHA, GQA-8 and MQA."""
    settings = o.engine_settings(locals())
    from attncalc import commands
    from attncalc.inputs import Options
    from attncalc.render import chosen_format, deliver

    wanted = chosen_format(format, json, output)
    asked = Options(
        context,
        batch,
        kv_dtype=kv_dtype,
        state_dtype=state_dtype,
        index_dtype=index_dtype,
        form=form,
        tp=tp,
        mtp=mtp,
        engine=settings,
    )
    deliver(commands.cache(models or [], model or [], engine or ["logical"], asked), wanted, output)


def compare(
    names: Annotated[list[str] | None, typer.Argument(metavar="[VARIANT|MODEL]...", show_default=False)] = None,
    model: o.ModelOption = None,
    like: Annotated[str | None, typer.Option("--like", help="Take the dimensions of this model's attention.")] = None,
    hidden_size: Annotated[
        str | None, typer.Option("--hidden-size", help="D. [default: 7168, or heads x head_dim where these are given]")
    ] = None,
    heads: Annotated[str | None, typer.Option("--heads", help="Query heads H. [default: 128]")] = None,
    kv_heads: Annotated[str | None, typer.Option("--kv-heads", help="KV heads of gqa and gta. [default: 8]")] = None,
    head_dim: Annotated[str | None, typer.Option("--head-dim", help="Width of a head. [default: 128]")] = None,
    v_head_dim: Annotated[
        str | None, typer.Option("--v-head-dim", help="Width of a value. [default: the head's]")
    ] = None,
    kv_lora_rank: Annotated[str | None, typer.Option("--kv-lora-rank", help="MLA latent. [default: 512]")] = None,
    q_lora_rank: Annotated[str | None, typer.Option("--q-lora-rank", help="0 for none. [default: 1536]")] = None,
    qk_nope_head_dim: Annotated[str | None, typer.Option("--qk-nope-head-dim", help="[default: the head's]")] = None,
    qk_rope_head_dim: Annotated[str | None, typer.Option("--qk-rope-head-dim", help="[default: 64]")] = None,
    context: o.Context = None,
    batch: o.Batch = "1",
    new_tokens: o.NewTokens = None,
    phase: o.Phase = None,
    kv_dtype: o.KVDtype = None,
    state_dtype: o.StateDtype = None,
    index_dtype: o.IndexDtype = None,
    form: o.Form = None,
    tp: o.Split = "1",
    count: o.Count = "causal",
    device: o.Device = None,
    format: o.Format = None,  # noqa: A002
    json: o.Json = False,
    output: o.Output = None,
) -> None:
    """Variants at equal dimensions, or models, in one table: cache, score GEMM, FLOPs, intensity."""
    from attncalc import commands
    from attncalc.inputs import Options
    from attncalc.render import chosen_format, deliver

    wanted = chosen_format(format, json, output)
    sizes = {
        "hidden_size": hidden_size,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "v_head_dim": v_head_dim,
        "kv_lora_rank": kv_lora_rank,
        "q_lora_rank": q_lora_rank,
        "qk_nope_head_dim": qk_nope_head_dim,
        "qk_rope_head_dim": qk_rope_head_dim,
    }
    asked = Options(
        context,
        batch,
        new_tokens,
        phase,
        kv_dtype,
        state_dtype=state_dtype,
        index_dtype=index_dtype,
        form=form,
        tp=tp,
        count=count,
    )
    deliver(commands.compare((names or []) + (model or []), like, sizes, asked, device), wanted, output)


def flops(
    models: o.Models = None,
    model: o.ModelOption = None,
    context: o.Context = None,
    batch: o.Batch = "1",
    new_tokens: o.NewTokens = None,
    phase: o.Phase = None,
    kv_dtype: o.KVDtype = None,
    weight_dtype: o.WeightDtype = "bf16",
    activation_dtype: o.ActivationDtype = "bf16",
    state_dtype: o.StateDtype = None,
    index_dtype: o.IndexDtype = None,
    form: o.Form = None,
    tp: o.Split = "1",
    engine: o.Engine = None,
    engine_version: o.EngineVersion = None,
    draft_tokens: o.DraftTokens = None,
    count: o.Count = "causal",
    logits: o.Logits = "all",
    mtp: o.Mtp = False,
    format: o.Format = None,  # noqa: A002
    json: o.Json = False,
    output: o.Output = None,
) -> None:
    """FLOPs and bytes of one step, by operation, layer group and model."""
    settings = o.engine_settings(locals())
    from attncalc import commands
    from attncalc.inputs import Options
    from attncalc.render import chosen_format, deliver

    wanted = chosen_format(format, json, output)
    asked = Options(
        context=context,
        batch=batch,
        new_tokens=new_tokens,
        phase=phase,
        kv_dtype=kv_dtype,
        weight_dtype=weight_dtype,
        activation_dtype=activation_dtype,
        state_dtype=state_dtype,
        index_dtype=index_dtype,
        form=form,
        tp=tp,
        count=count,
        mtp=mtp,
        logits=logits,
        engine=settings,
    )
    deliver(commands.flops(models or [], model or [], engine or ["logical"], asked), wanted, output)


def explain(
    variant: Annotated[str | None, typer.Argument(metavar="[VARIANT|MODEL]", show_default=False)] = None,
    model: o.ModelOption = None,
    context: o.Context = None,
    batch: o.Batch = "1",
    new_tokens: o.NewTokens = None,
    phase: o.Phase = None,
    kv_dtype: o.KVDtype = None,
    state_dtype: o.StateDtype = None,
    index_dtype: o.IndexDtype = None,
    form: o.Form = None,
    count: o.Count = "causal",
    format: o.Format = None,  # noqa: A002
    json: o.Json = False,
    output: o.Output = None,
) -> None:
    """Formula, substituted values, result and source of every number of a layer."""
    from attncalc import commands
    from attncalc.inputs import Options
    from attncalc.render import chosen_format, deliver

    wanted = chosen_format(format, json, output)
    asked = Options(
        context,
        batch,
        new_tokens,
        phase,
        kv_dtype,
        state_dtype=state_dtype,
        index_dtype=index_dtype,
        form=form,
        count=count,
    )
    deliver(commands.explain(variant, model or [], asked), wanted, output)
