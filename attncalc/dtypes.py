"""Storage formats: how many bits a row of values takes, scales included.

A row is the last axis of a tensor (one token of one head, one latent, one line of a weight). Everything is
in whole bits; a row that a block format cannot hold is refused, never rounded.

Sources: OCP Microscaling spec 1.0 (mxfp8, mxfp4), ggml block formats (q8_0 ... q1_0), vLLM
`v1/attention/backends` (per-token-head, nvfp4, fp8_ds_mla, nvfp4_ds_mla), DeepSeek-V3.2 indexer cache.
"""

from dataclasses import dataclass
from typing import NamedTuple

from attncalc.errors import AttncalcError, check_type, shown, suggestion


class RowFormat(NamedTuple):
    """`bits` per value, `scale_bits` per `block` values, `row_bits` per row."""

    name: str
    bits: int
    block: int = 1
    scale_bits: int = 0
    row_bits: int = 0

    def row(self, width: int) -> int:
        """Bits of one row of `width` values: width * bits + width / block * scale_bits + row_bits."""
        if width % self.block:
            rule = f"{self.name} stores blocks of {self.block} values, which do not divide a row"
            raise AttncalcError("storage format", rule, got=f"a width of {width}")
        return width * self.bits + width // self.block * self.scale_bits + self.row_bits

    @property
    def text(self) -> str:
        """The rule in words: `8 bits per value + 16 per 32 values`."""
        out = f"{self.bits} bits per value"
        if self.scale_bits:
            out += f" + {self.scale_bits} per {self.block} values"
        return out + (f" + {self.row_bits} per row" if self.row_bits else "")


FORMATS = {
    f.name: f
    for f in (
        RowFormat("fp64", 64),
        RowFormat("fp32", 32),
        RowFormat("bf16", 16),
        RowFormat("fp16", 16),
        RowFormat("fp8", 8),
        RowFormat("fp8_e5m2", 8),
        RowFormat("int8", 8),
        RowFormat("int4", 4),
        RowFormat("mxfp8", 8, 32, 8),
        RowFormat("mxfp4", 4, 32, 8),
        RowFormat("nvfp4", 4, 16, 8),
        RowFormat("int8_per_token_head", 8, row_bits=32),
        RowFormat("fp8_per_token_head", 8, row_bits=32),
        RowFormat("int4_per_token_head", 4, row_bits=32),
        RowFormat("q8_0", 8, 32, 16),
        RowFormat("q5_1", 5, 32, 32),
        RowFormat("q5_0", 5, 32, 16),
        RowFormat("q4_1", 4, 32, 32),
        RowFormat("q4_0", 4, 32, 16),
        RowFormat("iq4_nl", 4, 32, 16),
        RowFormat("q1_0", 1, 128, 16),
    )
}
ALIASES = {
    "f16": "fp16",
    "float16": "fp16",
    "bfloat16": "bf16",
    "float32": "fp32",
    "f32": "fp32",
    "fp8_e4m3": "fp8",
}

FLOATS = ("fp64", "fp32", "bf16", "fp16")

CACHE_KINDS = ("key", "value", "latent", "rope_key", "shared_kv")

# A record format packs one token's latent and RoPE key; the numbers are its two parts.
RECORDS = {
    "fp8_ds_mla": {"latent": RowFormat("fp8_ds_mla", 8, 128, 32), "rope_key": RowFormat("bf16", 16)},
    "nvfp4_ds_mla": {"latent": RowFormat("nvfp4", 4, 16, 8), "rope_key": RowFormat("fp8", 8)},
}
RECORD_WIDTHS = {"latent": 512, "rope_key": 64}
# DeepSeek-V4 keeps K = V rows of 512 that hold their RoPE part: 448 e4m3, 64 bf16, 7 ue8m0 scales and 1 byte of pad.
V4_RECORD = RowFormat("fp8_ds_mla", 8, 512, (584 - 512) * 8)
# Index keys have formats of their own: e4m3 with an fp32 scale per 128 values; e2m1 with a ue8m0 scale per 32.
INDEX_FORMATS = {"fp8": RowFormat("fp8", 8, 128, 32), "fp4": RowFormat("fp4", 4, 32, 8)}


def plain_format(name: str, where: str) -> RowFormat:
    """The row format called `name`.

    Raises:
        AttncalcError: the name is not known; the nearest one is suggested.
    """
    found = FORMATS.get(name)
    if not found:
        known = (*FORMATS, *RECORDS)
        if name in ALIASES:
            raise AttncalcError(where, "unknown storage format", got=shown(name), hint=f"Write {ALIASES[name]}")
        hint = suggestion(name, known, f"Known: {', '.join(known)}")
        raise AttncalcError(where, "unknown storage format", got=shown(name), hint=hint)
    return found


def check_kv_format(name: str, where: str) -> None:
    """Refuse what is no cache format: one name, or two as K/V."""
    if name in RECORDS:
        return
    parts = name.split("/")
    if len(parts) > 2 or (len(parts) == 2 and set(parts) & set(RECORDS)):
        raise AttncalcError(where, "must be one format or K/V", got=shown(name))
    for part in parts:
        plain_format(part, where)


def check_index_format(name: str, where: str) -> None:
    """Refuse what is no format of an index key."""
    if name not in INDEX_FORMATS and plain_format(name, where).row_bits:
        raise AttncalcError(where, "must be a format of index keys", got=shown(name))


UNSTATED = {"state": "fp32", "conv": "bf16"}


@dataclass(frozen=True)
class Formats:
    """The storage format of everything that has bytes: by cache tensor kind, and weights and activations.

    States are in fp32 and columns of a convolution in bf16, where None leaves it to an engine.
    """

    kv: str = "bf16"
    weight: str = "bf16"
    activation: str = "bf16"
    state: str | None = None
    conv: str | None = None
    index: str | None = None

    def __post_init__(self) -> None:
        for kind in ("kv", "weight", "activation", "state", "conv", "index"):
            allowed = (str,) if kind in ("kv", "weight", "activation") else (str, type(None))
            check_type(getattr(self, kind), allowed, f"--{kind}-dtype", "must be the name of a format")
        check_kv_format(self.kv, "--kv-dtype")
        for kind in ("weight", "activation", "state", "conv"):
            name = getattr(self, kind)
            if name is None:
                continue
            if name in RECORDS or plain_format(name, f"--{kind}-dtype").row_bits:
                raise AttncalcError(f"--{kind}-dtype", "must not be a format of the cache alone", got=shown(name))

        if self.index is not None:
            check_index_format(self.index, "--index-dtype")

    def of(self, kind: str, width: int) -> RowFormat:
        """The row format of a tensor whose last axis is `width`.

        `kind`: weight, vector, activation, state, conv; key, value, latent, rope_key, shared_kv (a row that is K
        and V, its RoPE part inside) and index (an indexer's key) in the cache.

        Raises:
            AttncalcError: the format does not exist for such a tensor.
        """
        if kind == "vector":
            # Quantised checkpoints keep their norms, biases and sinks in 16 bits.
            return FORMATS[self.weight if self.weight in FLOATS else "bf16"]
        if kind in ("weight", "activation", "state", "conv"):
            return plain_format(getattr(self, kind) or UNSTATED[kind], f"--{kind}-dtype")
        if kind == "index":
            # A record fixes its index key too; an explicit format overrides that.
            name = self.index or ("fp8" if self.kv in RECORDS else self.kv)
            return INDEX_FORMATS.get(name) or plain_format(name, "--index-dtype")
        if self.kv == "fp8_ds_mla" and kind == "shared_kv" and width == 512:
            return V4_RECORD
        if self.kv in RECORDS:
            if kind not in RECORDS[self.kv] or width != RECORD_WIDTHS[kind]:
                rule = f"{self.kv} is a record of a 512-wide latent and a 64-wide RoPE key"
                raise AttncalcError("--kv-dtype", rule, got=f"a {kind.replace('_', ' ')} of width {width}")
            return RECORDS[self.kv][kind]
        first, _, second = self.kv.partition("/")
        if second and kind in ("latent", "rope_key", "shared_kv") and second != first:
            rule = f"a latent cache has no separate V, so the pair {self.kv} cannot apply"
            raise AttncalcError("--kv-dtype", rule, hint=f"Give one format, such as {first}")
        return plain_format(second if second and kind == "value" else first, "--kv-dtype")

    def row(self, kind: str, width: int) -> int:
        """Bits of a row of `width` values.

        Raises:
            AttncalcError: the format does not exist for such a tensor, or its blocks do not divide the row.
        """
        try:
            return self.of(kind, width).row(width)
        except AttncalcError as error:
            option = "--kv-dtype" if kind in CACHE_KINDS else f"--{kind}-dtype"
            raise AttncalcError(option, error.rule, got=error.got, hint=error.hint) from None


def whole_bytes(bits: int, where: str) -> int:
    """`bits` as bytes.

    Raises:
        AttncalcError: the bits are no whole number of bytes and no layout said how to pad them.
    """
    if bits % 8:
        raise AttncalcError(where, "must be a whole number of bytes", got=f"{bits} bits")
    return bits // 8
