"""The `config.json` of a repository on Hugging Face, from the local cache or over the network.

With it comes the one file beside it that changes a number, ModelOpt's `hf_quant_config.json`, where there is one.

The only importer of huggingface_hub, whose settings hold: HF_ENDPOINT, HF_TOKEN, HF_HOME, HF_HUB_OFFLINE.
"""

import re
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from attncalc.errors import AttncalcError, shown

FILE, BESIDE = "config.json", "hf_quant_config.json"
MAX_BYTES = 16 * 2**20
INSTALL = 'pip install "attncalc[hub]"'


def is_id(name: str) -> bool:
    """Whether a name is written as `org/name`."""
    return re.fullmatch(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", name, re.ASCII) is not None


def fetch(name: str, *, quantization: bool = True) -> Path:
    """`config.json` of the repository `org/name` in the local cache.

    `quantization`: have `hf_quant_config.json` of the same commit beside it, or know that the repository has none.

    Raises:
        AttncalcError: the extra is missing, or a file cannot be had: offline, unknown, private or gated, no such
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
        path = _had(hub, name, FILE)
    except AttncalcError:
        raise
    except Exception as error:  # noqa: BLE001 - the client raises errors of its own and of the HTTP library beneath it
        raise _refusal(name, FILE, error) from None
    if quantization:
        _have_beside(hub, name, path)
    return path


def _had(hub: Any, name: str, file: str, commit: str | None = None) -> Path:
    path = hub.try_to_load_from_cache(name, file, revision=commit)
    if not isinstance(path, str):
        url = hub.hf_hub_url(name, file, revision=commit)
        size = hub.get_hf_file_metadata(url, token=hub.get_token()).size
        if size is not None and size > MAX_BYTES:
            raise AttncalcError(f"{name}: {file}", "must be at most 16 MiB", got=f"{size} bytes")
        path = hub.hf_hub_download(name, file, revision=commit)
    return Path(path)


def _have_beside(hub: Any, name: str, path: Path) -> None:
    """The other file, of the commit of the one at `path`; that there is none is kept in the cache too."""
    commit = path.parent.name
    try:
        if hub.try_to_load_from_cache(name, BESIDE, revision=commit) is None:  # neither there nor known not to be
            _had(hub, name, BESIDE, commit)
    except AttncalcError:
        raise
    except Exception as error:  # noqa: BLE001 - as above
        if _has_no_such_file(error):
            with suppress(Exception):
                hub.hf_hub_download(name, BESIDE, revision=commit)  # which keeps that in the cache
            return
        line = _refusal(name, BESIDE, error)
        hint = f"{line.hint}. {path.parent} is its folder in the cache" if line.hint else ""
        raise AttncalcError(line.where, line.rule, got=line.got, hint=hint) from None


def _has_no_such_file(error: Exception) -> bool:
    raised = _names(error)
    if raised & {"RepositoryNotFoundError", "RevisionNotFoundError", "GatedRepoError"}:
        return False
    return "RemoteEntryNotFoundError" in raised or type(error).__name__ == "EntryNotFoundError" or _status(error) == 404


def _names(error: Exception) -> set[str]:
    """Of the classes of what was raised, which differ between versions of the client."""
    return {cls.__name__ for cause in _causes(error) for cls in type(cause).__mro__}


def _status(error: Exception) -> object:
    return getattr(getattr(error, "response", None), "status_code", None)


def _refusal(name: str, file: str, error: Exception) -> AttncalcError:
    """One line for what the client raised."""
    raised = _names(error)
    constants = import_module("huggingface_hub.constants")
    where, endpoint = f"--model {name}", str(constants.ENDPOINT)
    if "OfflineModeIsEnabled" in raised or constants.HF_HUB_OFFLINE:
        rule = "no such file, preset or hf_id, and the Hugging Face cache does not hold it"
        if file == BESIDE:
            rule = f"the Hugging Face cache has its {FILE} and does not say whether it has an {BESIDE}"
        return AttncalcError(where, rule, hint=f"HF_HUB_OFFLINE is set: unset it to fetch its {file}")
    if "GatedRepoError" in raised:
        hint = f"Accept its terms on {endpoint}/{name} and set HF_TOKEN"
        return AttncalcError(where, f"is gated: its {file} needs access that your token has not", hint=hint)
    if "RepositoryNotFoundError" in raised:
        rule = f"no such file, preset or hf_id, and {endpoint} has no such repository, or a private one"
        return AttncalcError(where, rule, hint="HF_TOKEN gives access to private ones")
    if _has_no_such_file(error):
        return AttncalcError(where, f"its repository on {endpoint} has no {file}")
    status = _status(error)
    if isinstance(status, int):
        return AttncalcError(where, f"{endpoint} refuses its {file}", got=f"status {status}")
    if any("Timeout" in cls for cls in raised):
        hint = "HF_HUB_ETAG_TIMEOUT and HF_HUB_DOWNLOAD_TIMEOUT set the seconds to wait"
        return AttncalcError(where, f"{endpoint} did not answer in time", hint=hint)
    if any("Connect" in cls or "Network" in cls or "Transport" in cls for cls in raised):
        return AttncalcError(where, f"{endpoint} cannot be reached", hint="HF_ENDPOINT names another server")
    said = next(iter(str(error).strip().splitlines()), "")
    return AttncalcError(where, f"its {file} cannot be had from {endpoint}", got=f"{type(error).__name__}: {said}")


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    for _ in range(8):
        if error is None:
            return
        yield error
        error = error.__cause__ or error.__context__
