"""A preset document as the YAML text that the loader reads back to an equal model."""

import re
from typing import Any

_PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9 ._/()-]*(?<! )")
_WORDS = {"null", "true", "false", "yes", "no", "on", "off", "y", "n"}


def document_yaml(document: dict[str, Any]) -> str:
    """The document in the order of its fields, small mappings on a line."""
    import yaml

    class Dumper(yaml.SafeDumper):
        """No anchors, which the loader refuses, and quotes around every text that could be something else."""

        def ignore_aliases(self, data: object) -> bool:  # noqa: ARG002
            return True

    def text(dumper: Any, value: str) -> Any:
        plain = _PLAIN.fullmatch(value) and value.lower() not in _WORDS
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=None if plain else '"')

    Dumper.add_representer(str, text)
    return yaml.dump(document, Dumper=Dumper, sort_keys=False, default_flow_style=None, width=110, allow_unicode=True)
