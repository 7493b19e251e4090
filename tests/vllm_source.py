"""Runs vLLM's own planning of its pool, without a GPU and without what it depends on.

Reads geometries as JSON from stdin and writes what vLLM makes of them: `test_vllm_source` compares it with the profile.
Its block manager is arithmetic on specifications; what it imports beside that is replaced by stand-ins.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock


class MultipleOf:
    """Kernel blocks of any multiple of `base` tokens."""

    def __init__(self, base: int) -> None:
        self.base = base


def divide(a: int, b: int) -> int:
    assert a % b == 0
    return a // b


@contextmanager
def nothing(*_: object) -> Iterator[None]:
    yield


STATE = SimpleNamespace(shapes=(), dtypes=())
MODEL = SimpleNamespace(
    get_mamba_state_shape_from_config=lambda _: STATE.shapes,
    get_mamba_state_dtype_from_config=lambda _: STATE.dtypes,
)
STAND_INS: dict[str, dict[str, Any]] = {
    "vllm.config": {"set_current_vllm_config": nothing, "get_kv_cache_dtype_handler": lambda _: None},
    "vllm.distributed": {"divide": divide},
    "vllm.model_executor.layers.mamba.abstract": {"get_mamba_prefill_checkpoint_alignment": lambda _: None},
    "vllm.model_executor.models": {"ModelRegistry": SimpleNamespace(resolve_model_cls=lambda *_, **__: (MODEL, ""))},
    "vllm.multimodal": {},
    "vllm.utils.mem_utils": {},
    "vllm.v1.attention.backend": {"MultipleOf": MultipleOf},
    "vllm.v1.core.kv_cache_utils": {},
    "vllm.v1.core.single_type_kv_cache_manager": {"register_all_kvcache_specs": lambda _: None},
    "vllm.v1.hisparse": {"get_hisparse_kv_cache_groups": lambda *_: None},
    "vllm.v1.request": {},
}


class StandIn(ModuleType):
    """A module with a few names of its own; every other is a mock."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=name)


class Finder(MetaPathFinder, Loader):
    """Finds the stand-ins, and whatever lies in them."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        found = any(name == known or name.startswith(f"{known}.") for known in STAND_INS)
        return ModuleSpec(name, self, is_package=True) if found else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = StandIn(spec.name)
        known = next(k for k in STAND_INS if spec.name == k or spec.name.startswith(f"{k}."))
        module.__dict__.update(STAND_INS[known])
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Everything is there."""


def main() -> None:
    sys.meta_path.insert(0, Finder())
    import torch

    kv: Any = import_module("vllm.v1.kv_cache_interface")
    planning: Any = import_module("vllm.v1.core.kv_cache_planning")
    layouts: Any = import_module("vllm.v1.kv_cache_layout").KVCacheLayout
    registry: Any = import_module("vllm.v1.kv_cache_spec_registry").KVCacheSpecRegistry
    shapes_of: Any = import_module("vllm.model_executor.layers.mamba.mamba_utils").MambaStateShapeCalculator
    platform: Any = import_module("vllm.platforms.interface").Platform

    for cls, base in (
        *((c, kv.FullAttentionSpec) for c in (kv.FullAttentionSpec, kv.MLAAttentionSpec)),
        *((c, c) for c in (kv.SlidingWindowSpec, kv.SlidingWindowMLASpec, kv.ChunkedLocalAttentionSpec, kv.MambaSpec)),
    ):
        registry.register(cls, object, base)
    dtypes = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp8": torch.float8_e4m3fn, "bytes": torch.uint8}
    families = {
        "gdn": shapes_of.gated_delta_net_state_shape,
        "kda": shapes_of.kda_state_shape,
        "mamba2": shapes_of.mamba2_state_shape,
    }

    def state_of(layer: dict[str, Any], case: dict[str, Any]) -> tuple[Any, Any]:
        shapes = families[layer["family"]](case["tp"], **layer["sizes"], num_spec=case["drafts"])
        return shapes, (torch.bfloat16, dtypes[layer["dtype"]])

    def run(case: dict[str, Any]) -> dict[str, Any]:
        layout = layouts.BLHNC if case["packed"] else layouts.LBNHC
        cache_config = SimpleNamespace(
            block_size=case["block"],
            cache_dtype=case["cache_dtype"],
            mamba_cache_mode="align" if case["caching"] else "none",
            mamba_page_size_padded=None,
            mamba_block_size=case["length"],
            num_gpu_blocks_override=None,
            get_resolved_kv_cache_layout=lambda: layout,
        )
        states = [x for x in case["layers"] if x["kind"] == "state"]
        others = [x for x in case["layers"] if x["kind"] != "state"]
        if states and others:
            STATE.shapes, STATE.dtypes = state_of(states[0], case)
            main_layer = others[0]
            mla = main_layer["kind"] == "mla"
            model_config = SimpleNamespace(
                dtype=torch.bfloat16,
                use_mla=mla,
                architecture="",
                get_num_kv_heads=lambda _: 1 if mla else main_layer["heads"],
                get_head_size=lambda: main_layer["k"],
            )
            backend = SimpleNamespace(
                get_supported_kernel_block_sizes=lambda: [MultipleOf(16)], customize_spec=lambda spec: spec
            )
            stub = SimpleNamespace(cache_config=cache_config, model_config=model_config, parallel_config=None)
            hybrid: Any = type("Hybrid", (platform,), {"_find_non_ssm_backends": classmethod(lambda *_: [backend])})
            hybrid._align_hybrid_block_size(stub, backend)
        config = SimpleNamespace(
            model_config=SimpleNamespace(max_model_len=case["length"]),
            parallel_config=SimpleNamespace(decode_context_parallel_size=case["dcp"]),
            cache_config=cache_config,
            scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=not case["hybrid"]),
            attention_config=SimpleNamespace(hisparse_config=None),
            max_in_flight_tokens=case["in_flight"],
        )
        block = cache_config.block_size

        def spec(x: dict[str, Any]) -> Any:
            kind = x["kind"]
            if kind == "state":
                shapes, formats = state_of(x, case)
                return kv.MambaSpec(
                    block_size=case["length"],
                    shapes=shapes,
                    dtypes=formats,
                    page_size_padded=cache_config.mamba_page_size_padded,
                    mamba_cache_mode=cache_config.mamba_cache_mode,
                    num_speculative_blocks=case["drafts"],
                    num_prefill_checkpoint_blocks=int(x["family"] == "mamba2"),
                )
            shared = {
                "block_size": x.get("block", block),
                "head_size": x["k"],
                "dtype": dtypes[x["dtype"]],
                "state_content_bytes": x.get("content"),
                "num_kv_heads": x.get("heads", 1),
            }
            if kind == "mla":
                role = kv.SparseCacheRole.INDEXER if x.get("index") else kv.SparseCacheRole.SPARSE
                more = {"alignment": x.get("alignment"), "tokens_per_state": x.get("every", 1)}
                return kv.MLAAttentionSpec(**shared, **more, cache_role=role)
            if kind == "mla_sliding":
                return kv.SlidingWindowMLASpec(**shared, sliding_window=x["size"], alignment=x["alignment"])
            if kind == "sliding":
                return kv.SlidingWindowSpec(**shared, head_size_v=x["v"], sliding_window=x["size"])
            if kind == "chunk":
                return kv.ChunkedLocalAttentionSpec(**shared, head_size_v=x["v"], attention_chunk_size=x["size"])
            return kv.FullAttentionSpec(**shared, head_size_v=x["v"])

        try:
            groups = planning.get_kv_cache_groups(config, {f"{i}": spec(x) for i, x in enumerate(case["layers"])})
        except (TypeError, ValueError) as error:
            return {"refused": str(error)}
        per_block = planning._get_kv_cache_bytes_per_block(groups, layout)
        needed = sum(
            -(-g.kv_cache_spec.max_memory_usage_bytes(config) // g.kv_cache_spec.page_size_bytes) for g in groups
        )
        return {
            "block_bytes": per_block,
            "blocks": needed,
            "groups": sorted(len(g.layer_names) for g in groups),
            "block_tokens": block,
        }

    json.dump([run(case) for case in json.load(sys.stdin)], sys.stdout)


if __name__ == "__main__":
    main()
