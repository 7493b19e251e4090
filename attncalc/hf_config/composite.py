"""Models of several modalities: the text model inside, whose head may be tied by the mapping around it."""

from collections.abc import Callable
from typing import Any

from attncalc.errors import AttncalcError
from attncalc.hf_config.config import Config
from attncalc.hf_config.registry import read_as

Row = dict[str, Any]


def text_model(
    *kinds: str, ignored: tuple[str, ...] = (), reads_as: str = "", tied_inside: bool = False
) -> Callable[[Config], Row]:
    """A reader of the text model, which is of one of these architectures; of the first where it says none.

    Whether embedding and head are one weight is what the mapping around it says, as the model class reads it there;
    false where that class has no such field. `reads_as`: the reader, where it is not that of the architecture.
    `tied_inside`: the text model's own field says it, as its class has embedding and head.
    """

    def read(c: Config) -> Row:
        c.ignore(*ignored)
        tie = None if tied_inside else _tied(c)
        c.ignore("tie_word_embeddings")
        text = c.inner("text_config")
        if not text.data:
            raise AttncalcError(text.where, "must state the text model", got="an empty mapping")
        kind = text.choice("model_type", kinds, absent=kinds[0])
        if tie is not None and text.has("tie_word_embeddings"):
            text.only("tie_word_embeddings", tie)
        return read_as(reads_as or kind, text.data, text.where, c.log, tie=tie)

    return read


def _tied(c: Config) -> bool:
    known = c.declares("tie_word_embeddings") or not c.facts.architectures
    return c.flag("tie_word_embeddings", **({} if known else {"absent": False}))
