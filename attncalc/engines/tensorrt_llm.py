"""TensorRT-LLM 1.0: one pool of blocks of all layers, for models whose layers all keep the whole context.

Sources: NVIDIA/TensorRT-LLM `tensorrt_llm/llmapi/llm_args.py` (KvCacheConfig: 32 tokens per block, a fraction of the
free memory), `tensorrt_llm/models/modeling_utils.py` (QuantConfig: formats of K and V),
`cpp/tensorrt_llm/batch_manager/kvCacheManager.cpp` (blocks of the memory, rounded up).
"""

from dataclasses import replace
from typing import NamedTuple

from attncalc.allocation import Allocation, Pool, PoolGroup, Request
from attncalc.attention.base import Attention
from attncalc.cache import CacheTensor
from attncalc.dtypes import Formats
from attncalc.engines.base import Execution
from attncalc.engines.blocks import pad
from attncalc.engines.layered import Layered
from attncalc.engines.options import EngineOptions
from attncalc.engines.serving import served
from attncalc.errors import AttncalcError
from attncalc.model import LayerGroup, Model
from attncalc.workload import Workload

BLOCK = 32
"""Tokens of a block, where `--block-size` does not say."""

VARIANTS = ("mha", "gqa", "mqa", "mla")
HEAD_FORMATS = ("bf16", "fp16", "fp8", "int8", "nvfp4")
LATENT_FORMATS = ("bf16", "fp16", "fp8")
"""MLA's kernels take a latent in the model's format or in fp8; of other formats no latent is known."""


class Blocks(NamedTuple):
    """Rows in whole blocks: ceil(S / b) * b."""

    block: int
    tokens_per_row: int = 1
    period: int = 1

    def stored(self, context: int) -> int:
        """Rows of the blocks that hold the context."""
        return pad(context, self.block)

    def growth(self, context: int) -> int:  # noqa: ARG002
        """A row for every token, averaged over a block."""
        return 1

    @property
    def stored_formula(self) -> str:
        """How `stored` is computed."""
        return f"ceil(context / {self.block}) * {self.block}, whole blocks"


class TensorRTLLM(Layered):
    """Blocks of all layers together; MLA absorbed in decode, decompressed in prefill, its latent cached."""

    name = "tensorrt-llm"
    follows = "tensorrt-llm 1.0"
    options = ("block_size", "draft_tokens", "pp", "dp")

    def formats(self, model: Model, formats: Formats) -> Formats:
        """Those of its kernels."""
        latent = any(g.variant == "mla" for g in model.groups)
        known, what = (LATENT_FORMATS, "latents") if latent else (HEAD_FORMATS, "K and V")
        if formats.kv not in known:
            raise AttncalcError("--kv-dtype", f"tensorrt-llm keeps {what} in {', '.join(known)}", got=formats.kv)
        return formats

    def execution(
        self, attention: Attention, workload: Workload, form: str | None, options: EngineOptions
    ) -> Execution:
        """MLA: absorbed up to 1 + draft tokens, else decompressed, earlier context expanded once in the step."""
        return served(self.name, attention, workload, form, options)

    def __init__(self, block: int = BLOCK) -> None:
        self.block = block

    def cache(self, model: Model, group: LayerGroup, form: str, tp: int) -> tuple[CacheTensor, ...]:
        """The variant's tensors in whole blocks."""
        return tuple(t._replace(reach=Blocks(self.block)) for t in super().cache(model, group, form, tp))

    def settings(self, options: EngineOptions) -> EngineOptions:
        """Its own blocks, where none are named."""
        return replace(options, block_size=self.block)

    def rule(self, model: Model, group: LayerGroup, request: Request) -> str:  # noqa: ARG002
        """Why a group's cache differs from the logical one."""
        return f"a sequence takes whole blocks of {self.block} tokens"

    def check(self, model: Model, request: Request) -> None:
        """Layers that keep the whole context."""
        for group in model.layer_groups(mtp=request.mtp):
            if group.attention and (group.attention.variant not in VARIANTS or group.reach.kind != "full"):
                kind = f"{group.attention.variant} {group.reach.text}"
                raise AttncalcError("--engine", "it is not known how tensorrt-llm keeps this attention", got=kind)
            if group.ffn and group.ffn.cache():
                raise AttncalcError("--engine", f"tensorrt-llm does not run {model.id}")

    def allocate(self, model: Model, request: Request) -> Allocation:
        """Every layer in blocks, which a sequence takes in all layers at once."""
        sized = TensorRTLLM(request.options.block_size or BLOCK)
        made = Layered.allocate(sized, model, request)
        blocks = made.sequences * pad(request.context, sized.block) // sized.block
        layers = tuple(sorted({i for layer in made.layers for i in layer.group.indices}))
        group_of_all = PoolGroup(layers, sized.block, lambda n: pad(n, sized.block) // sized.block)
        return made._replace(pools=(Pool("blocks", made.bytes_total // blocks, (group_of_all,)),))


PROFILE = TensorRTLLM()
