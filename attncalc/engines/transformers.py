"""Hugging Face transformers 5.24: what its cache objects keep, and the form that its modules execute.

Sources: transformers 5.24.0 `cache_utils.py` (DynamicSlidingWindowLayer), `masking_utils.py`,
`models/deepseek_v3/modeling_deepseek_v3.py`, `models/mimo_v2_flash`, `models/falcon`.
"""

from attncalc.attention.base import Attention
from attncalc.cache import CacheTensor
from attncalc.dtypes import Formats
from attncalc.engines.base import Execution
from attncalc.errors import AttncalcError
from attncalc.model import LayerGroup, Model
from attncalc.reach import Reach
from attncalc.workload import Workload

DTYPES = ("fp32", "bf16", "fp16")


def _one_less(reach: Reach) -> Reach:
    return reach if reach.kind == "full" else Reach("window", reach.size - 1)


class Transformers:
    """Windows keep W - 1 tokens, chunks count as windows, MLA keeps the latent and expands it in each step."""

    name = "transformers"
    follows = "transformers 5.24"

    def check_formats(self, formats: Formats) -> None:
        """A cache has the dtype of the computation."""
        if formats.kv not in DTYPES:
            rule = f"transformers keeps its cache in {', '.join(DTYPES)}"
            raise AttncalcError("--kv-dtype", rule, got=formats.kv)

    def execution(self, attention: Attention, workload: Workload, form: str | None) -> Execution:  # noqa: ARG002
        """MLA: expanded, from a cached latent (since 5.15)."""
        own = "expanded" if "expanded" in attention.forms else attention.forms[0]
        if form and form != own:
            raise AttncalcError("--form", f"transformers computes {attention.variant} {own}", got=form)
        return Execution(own, attention.forms[0])

    def attended(self, model: Model, group: LayerGroup) -> Reach:
        """MiMo-V2 counts its window without the current token; a chunk is masked exactly."""
        if model.model_type == "mimo_v2_flash" and group.reach.kind == "window":
            return Reach("window", group.reach.size + 1)
        return group.reach

    def cache(self, model: Model, group: LayerGroup, form: str) -> tuple[CacheTensor, ...]:
        """The layer's tensors; Falcon's new decoder broadcasts K and V to all query heads before caching."""
        attention = group.attention
        if attention is None:
            return ()
        if self._broadcasts(model, group):
            attention = attention.with_kv_heads(attention.query_heads()) or attention
        return attention.cache(_one_less(self.attended(model, group)), form)

    def rule(self, model: Model, group: LayerGroup) -> str:
        """Why this group's cache differs from the logical one."""
        if self._broadcasts(model, group):
            return "Falcon broadcasts K and V to all query heads before caching"
        if group.reach.kind == "window" and model.model_type == "mimo_v2_flash":
            return "MiMo-V2's window leaves out the current token: as many are kept, one more is attended"
        if group.reach.kind == "window":
            return "a sliding layer keeps window - 1 tokens, without the current one"
        if group.reach.kind == "chunk":
            return "a chunked layer is kept as a sliding one: chunk - 1 tokens"
        return ""

    @staticmethod
    def _broadcasts(model: Model, group: LayerGroup) -> bool:
        return model.model_type == "falcon" and group.variant == "gqa"


PROFILE = Transformers()
