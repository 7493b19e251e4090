"""Fields that change neither the cache nor a count of any architecture, whatever they hold.

Token ids, training, initialisation, generation settings, constants of elementwise formulas, frequencies of RoPE, names
of files and classes, and the encoders of other modalities: the text model alone is read. What changes a number in one
architecture is asked for by that reader and not looked up here; `Config.only` is for fields of which one value is safe.
"""

import re
from functools import cache
from pathlib import Path

_ENDINGS = re.compile(
    r"_(token_ids?|token_index|dropout|dropout_prob|dropout_rate|pdrop|eps|epsilon|theta|base_freq"
    r"|initializer_range|initializer_factor|init_std|loss_coef|loss_weight)$"
)


@cache
def _listed() -> dict[str, frozenset[str]]:
    text = (Path(__file__).parent / "ignored.txt").read_text(encoding="utf-8")
    everywhere, rope = text.split("[rope]")
    return {
        "": frozenset(line for line in everywhere.splitlines() if line and not line.startswith("#")),
        "rope": frozenset(rope.split()),
    }


def without_effect(name: str, section: str = "") -> bool:
    """Whether a field of this name changes no number in any architecture; `rope`: a field of RoPE settings."""
    return name in _listed()[section] or (not section and _ENDINGS.search(name) is not None)
