"""Engines: how bytes are laid out, and which form a step executes. `attention/` knows nothing of them."""

from importlib import import_module
from typing import TYPE_CHECKING

from attncalc.errors import AttncalcError, shown, suggestion

if TYPE_CHECKING:
    from attncalc.engines.base import Engine

ENGINES = {
    "logical": "attncalc.engines.logical",
    "transformers": "attncalc.engines.transformers",
}


def engine(name: str) -> "Engine":
    """The engine profile called `name`.

    Raises:
        AttncalcError: there is none; the nearest one is suggested.
    """
    if name not in ENGINES:
        hint = suggestion(name, ENGINES, f"Known: {', '.join(ENGINES)}")
        raise AttncalcError("--engine", "unknown engine", got=shown(name), hint=hint)
    profile: Engine = import_module(ENGINES[name]).PROFILE
    return profile
