"""Fields dropped, nulled and turned round, read here and by transformers: the models that it builds have our parameters.

For one published configuration of each architecture that transformers has, on the meta device. A field that we refuse is
not compared; what we read must be what its classes make of the same file: parameters, and windows of the cache.
"""

import copy
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from attncalc import presets
from attncalc.errors import AttncalcError
from attncalc.model import Model
from tests.hf_config.test_mutations import FILES, config, listing, mutate, original

DEFAULTS = Path(__file__).parents[1] / "data" / "class_defaults.json"


def one_of_each_architecture() -> dict[str, str]:
    known = json.loads(DEFAULTS.read_text(encoding="utf-8"))["types"]  # of transformers' causal language models
    found: dict[str, str] = {}
    for name in FILES:
        kind = config(name).get("model_type", "")
        if kind in known and "text_config" not in config(name):
            found.setdefault(kind, name)
    return found


ARCHITECTURES = one_of_each_architecture()


def theirs(data: dict[str, Any]) -> tuple[int, list[int | None]]:
    """Parameters of the model that transformers builds, and the window of each layer of its cache."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.cache_utils import DynamicCache
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    made = CONFIG_MAPPING[data["model_type"]].from_dict(copy.deepcopy(data))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(made)
    model.tie_weights()
    parameters = sum(p.numel() for p in {id(p): p for p in model.parameters()}.values())
    return parameters, [getattr(layer, "sliding_window", None) for layer in DynamicCache(config=made).layers]


def windows(model: Model) -> list[int | None] | None:
    """The same of ours, for softmax attention in every layer."""
    groups = {i: g for g in model.groups for i in g.indices}
    if any(g.variant not in ("mha", "gqa", "mqa") or g.cache_from for g in model.groups):
        return None
    return [groups[i].reach.size if groups[i].reach.kind != "full" else None for i in range(len(groups))]


def spoilt(name: str) -> Iterator[tuple[dict[str, Any], str]]:
    read = listing(original(name))
    for field, value in config(name).items():
        if field in ("model_type", "architectures", "quantization_config") or read.get(field) == "ignored":
            continue
        for kind in ("drop", "null", "negate") if isinstance(value, bool) else ("drop", "null"):
            data = mutate(config(name), (field,), kind, random.Random(0))
            data.pop("quantization_config", None)
            yield data, f"{name}: {field} {kind}"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_what_transformers_makes_of_a_spoilt_field(kind: str) -> None:
    pytest.importorskip("torch", reason="needs torch")
    pytest.importorskip("transformers", reason="needs transformers")
    compared = 0
    for data, place in spoilt(ARCHITECTURES[kind]):
        try:
            ours = presets.build(data, "config.json", "x")
        except AttncalcError:
            continue
        try:
            parameters, kept = theirs(data)
        except AssertionError as error:
            if "Padding_idx" not in str(error):  # of torch: a padding token outside the default vocabulary
                raise
            continue
        assert ours.parameters() == parameters, place
        if windows(ours) is not None and kind != "mimo_v2_flash":  # whose class counts a window without the token
            assert windows(ours) == kept, place
        compared += 1
    assert compared > 3
