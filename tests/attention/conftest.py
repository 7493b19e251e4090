"""Layers take most of the time: the fast set keeps those of softmax attention, the rest is `slow`."""

from pathlib import Path

import pytest

FAST = ("test_gqa_torch",)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent and item.path.stem not in FAST:
            item.add_marker(pytest.mark.slow)
