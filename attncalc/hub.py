"""The `config.json` of a repository on Hugging Face: from the local cache, or that one file over the network.

The only importer of huggingface_hub, whose settings hold: HF_ENDPOINT, HF_TOKEN, HF_HOME, HF_HUB_OFFLINE.
"""

import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from attncalc.errors import AttncalcError, shown

FILE = "config.json"
MAX_BYTES = 16 * 2**20
INSTALL = 'pip install "attncalc[hub]"'


def is_id(name: str) -> bool:
    """Whether a name is written as `org/name`."""
    return re.fullmatch(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", name, re.ASCII) is not None


def fetch(name: str) -> Path:
    """`config.json` of the repository `org/name` in the local cache; nothing else of it is read.

    Raises:
        AttncalcError: the extra is missing, or the file cannot be had: offline, unknown, private or gated, no such
            file in it, too large, no answer.
    """
    try:
        hub: Any = import_module("huggingface_hub")
    except ImportError:
        rule = "no such file, preset or hf_id, and reading it from Hugging Face needs huggingface_hub"
        raise AttncalcError("--model", rule, got=shown(name), hint=INSTALL) from None
    import_module("huggingface_hub.utils").disable_progress_bars()
    import_module("huggingface_hub.utils.logging").set_verbosity_error()
    try:
        path = hub.try_to_load_from_cache(name, FILE)
        if not isinstance(path, str):
            _check_size(name, hub.get_hf_file_metadata(hub.hf_hub_url(name, FILE), token=hub.get_token()).size)
            path = hub.hf_hub_download(name, FILE)
    except AttncalcError:
        raise
    except Exception as error:  # noqa: BLE001 - the client raises errors of its own and of the HTTP library beneath it
        raise _refusal(name, error) from None
    return Path(path)


def _check_size(name: str, size: int | None) -> None:
    if size is not None and size > MAX_BYTES:
        raise AttncalcError(f"{name}: {FILE}", "must be at most 16 MiB", got=f"{size} bytes")


def _refusal(name: str, error: Exception) -> AttncalcError:
    """One line for what the client raised. Its classes differ between versions: their names say what happened."""
    raised = {cls.__name__ for cause in _causes(error) for cls in type(cause).__mro__}
    constants = import_module("huggingface_hub.constants")
    where, endpoint = f"--model {name}", str(constants.ENDPOINT)
    if "OfflineModeIsEnabled" in raised or constants.HF_HUB_OFFLINE:
        rule = "no such file, preset or hf_id, and the Hugging Face cache does not hold it"
        return AttncalcError(where, rule, hint="HF_HUB_OFFLINE is set: unset it to fetch its config.json")
    if "GatedRepoError" in raised:
        hint = f"Accept its terms on {endpoint}/{name} and set HF_TOKEN"
        return AttncalcError(where, "is gated: its config.json needs access that your token has not", hint=hint)
    if "RepositoryNotFoundError" in raised:
        rule = f"no such file, preset or hf_id, and {endpoint} has no such repository, or a private one"
        return AttncalcError(where, rule, hint="HF_TOKEN gives access to private ones")
    if "RemoteEntryNotFoundError" in raised or type(error).__name__ == "EntryNotFoundError":
        return AttncalcError(where, f"its repository on {endpoint} has no config.json")
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(status, int):
        return AttncalcError(where, f"{endpoint} refuses its config.json", got=f"status {status}")
    if any("Timeout" in cls for cls in raised):
        hint = "HF_HUB_ETAG_TIMEOUT and HF_HUB_DOWNLOAD_TIMEOUT set the seconds to wait"
        return AttncalcError(where, f"{endpoint} did not answer in time", hint=hint)
    if any("Connect" in cls or "Network" in cls or "Transport" in cls for cls in raised):
        return AttncalcError(where, f"{endpoint} cannot be reached", hint="HF_ENDPOINT names another server")
    said = next(iter(str(error).strip().splitlines()), "")
    return AttncalcError(where, f"its config.json cannot be had from {endpoint}", got=f"{type(error).__name__}: {said}")


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    for _ in range(8):
        if error is None:
            return
        yield error
        error = error.__cause__ or error.__context__
