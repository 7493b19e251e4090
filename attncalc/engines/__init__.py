"""Engines: how bytes are laid out, and which form a step executes. `attention/` knows nothing of them."""

from importlib import import_module
from typing import TYPE_CHECKING

from attncalc.errors import AttncalcError, check_type, shown, suggestion

if TYPE_CHECKING:
    from attncalc.engines.base import Engine
    from attncalc.engines.options import EngineOptions

ENGINES = {
    "logical": "attncalc.engines.logical",
    "transformers": "attncalc.engines.transformers",
    "vllm": "attncalc.engines.vllm",
    "sglang": "attncalc.engines.sglang",
    "tensorrt-llm": "attncalc.engines.tensorrt_llm",
    "llamacpp": "attncalc.engines.llamacpp",
}


ALL = "all"
"""Stands for every engine, on the command line."""


def engine(name: str) -> "Engine":
    """The engine profile called `name`.

    Raises:
        AttncalcError: there is none; the nearest one is suggested.
    """
    check_type(name, str, "engine", "must be the name of an engine", f"Known: {', '.join(ENGINES)}")
    if name not in ENGINES:
        hint = suggestion(name, ENGINES, f"Known: {', '.join(ENGINES)}, {ALL}")
        raise AttncalcError("--engine", "unknown engine", got=shown(name), hint=hint)
    profile: Engine = import_module(ENGINES[name]).PROFILE
    return profile


def check_options(profile: "Engine", settings: "EngineOptions") -> None:
    """Refuse what was set and the engine does not have: nothing is ignored."""
    from attncalc.engines.options import EngineOptions, option

    check_type(settings, EngineOptions, "options", "must be EngineOptions", "Write EngineOptions(block_size=16)")
    for name in settings.given:
        if name not in profile.options:
            having = [other for other in ENGINES if name in engine(other).options]
            hint = f"It is an option of {', '.join(having)}" if having else ""
            raise AttncalcError(option(name), f"{profile.name} has no such option", hint=hint)
