"""The digest of a context: what every rank of a group must have alike."""

import hashlib
from typing import TYPE_CHECKING

import numpy as np

from cp_gdn._version import __version__
from cp_gdn.recompute import release

if TYPE_CHECKING:
    from cp_gdn.context import Context


def digest_fields(ctx: "Context") -> dict[str, str]:
    """What must be equal on every rank for messages and bits to fit, in readable form; long values as a hash."""
    part = ctx.partition
    return {
        "version": __version__,
        "doc_bounds": _digest(part.bounds),
        "layout": f"{part.layout}, align={part.align}",
        "fragments": _digest(*part.cuts.given),
        "heads": str(ctx.heads),
        "head_dims": str(ctx.head_dims),
        "dtype": str(ctx.dtype),
        "conv": str(ctx.conv),
        "segments": _short(ctx.segments.agreed),
        "exchange": ctx.choice.kind,
        "backend": ctx.taken.kind,
        "options": str(ctx.options),
        "torch": release(),
    }


def _digest(*columns: np.ndarray) -> str:
    """Short columns as a reader wants them, of long ones the start and a hash of all."""
    if sum(map(len, columns)) <= 16:
        return " ".join(str(column.tolist()) for column in columns)
    hashed = hashlib.sha256(b"".join(column.tobytes() for column in columns)).hexdigest()[:16]
    return f"{' '.join(str(column[:4].tolist()) for column in columns)}... of {len(columns[0])}, sha256 {hashed}"


def _short(text: str) -> str:
    """``text`` if a reader can take it in, else its start and a hash of all of it."""
    return text if len(text) <= 80 else f"{text[:60]}... sha256 {hashlib.sha256(text.encode()).hexdigest()[:16]}"
