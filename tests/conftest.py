"""Shared fixtures: the command line in process, and as a program."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from hypothesis import settings

from attncalc.cli import run

# No test reaches beyond this machine; those of the hub have a server of their own.
os.environ["HF_HUB_OFFLINE"] = "1"
settings.register_profile("default", deadline=None)
settings.load_profile("default")


class Outcome(NamedTuple):
    """What a command did."""

    status: int
    out: str
    err: str

    @property
    def record(self) -> dict[str, Any]:
        loaded = json.loads(self.out)
        assert isinstance(loaded, dict)
        return loaded


Command = Callable[..., Outcome]


@pytest.fixture
def attncalc(capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs a command in this process."""

    def call(*arguments: str) -> Outcome:
        capsys.readouterr()
        status = run(list(arguments))
        captured = capsys.readouterr()
        return Outcome(status, captured.out, captured.err)

    return call


@pytest.fixture
def program() -> Command:
    """Runs a command as a program of its own."""

    def call(*arguments: str) -> Outcome:
        made = subprocess.run(
            [sys.executable, "-m", "attncalc", *arguments], capture_output=True, text=True, check=False
        )
        return Outcome(made.returncode, made.stdout, made.stderr)

    return call
