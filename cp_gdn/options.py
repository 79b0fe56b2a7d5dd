"""What a context may be asked to do differently: one frozen dataclass, all of it in the plan digest."""

from dataclasses import dataclass

import torch

_CHOICES: dict[str, tuple[bool | str, ...]] = {
    "save": ("auto", "light", "full"),
    "boundary": ("saved", "recompute"),
    "save_transfer": (True, False),
    "reuse_recompute_tapes": ("auto", True, False),
    "recompute_output": ("auto", "always"),
}

_REFUSED: dict[tuple[tuple[str, bool | str], tuple[str, bool | str]], str] = {
    (("save", "full"), ("boundary", "recompute")): "one keeps tapes, the other keeps nothing",
    (("save", "full"), ("reuse_recompute_tapes", True)): "saved tapes leave nothing to hand on; use 'auto'",
    (("boundary", "recompute"), ("reuse_recompute_tapes", True)): (
        "the backward runs the whole forward again, its messages included; use 'auto'"
    ),
}
"""Pairs that contradict each other, and why; every other pair is allowed (docs/memory.md has the table)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Choices of a context; none of them changes a bit but ``decay_cutoff``.

    Attributes:
        save: ``"light"`` keeps the entry state of every segment for the backward and runs the rest again; ``"full"``
            keeps the tapes too; ``"auto"`` does so on the kernels, whose tapes are small, outside of checkpoints.
        boundary: ``"saved"`` keeps what the exchange brought, so that a backward sends adjoints only; ``"recompute"``
            keeps the inputs alone, and a backward runs the forward again, its messages included.
        save_transfer: keep the segment maps M of the forward (and, with a2a, the owner's) for the backward;
            False computes and, with a2a, sends them again: less memory, more work.
        reuse_recompute_tapes: whether a recompute under ``torch.utils.checkpoint(use_reentrant=False)`` hands its tapes
            to the backward that asked for it. ``"auto"``: where the checkpoint proves that they cannot raise the peak.
        recompute_output: ``"auto"`` leaves o out of a recompute where the same proof shows that nobody reads it.
        decay_cutoff: log of the decay below which a segment's map counts as zero. ``"default"`` is -17 for
            16-bit inputs (the state changes by at most 2**-24 of itself) and None for fp32 and fp64; None
            drops nothing.

    Raises:
        ValueError: a value is unknown, or two of them contradict each other.
    """

    save: str = "auto"
    boundary: str = "saved"
    save_transfer: bool = True
    reuse_recompute_tapes: bool | str = "auto"
    recompute_output: str = "auto"
    decay_cutoff: float | str | None = "default"

    def __post_init__(self) -> None:
        for name, values in _CHOICES.items():
            if not self._is(name, *values):
                raise ValueError(f"Options({name}={getattr(self, name)!r}): expected one of {values}")
        for (one, other), why in _REFUSED.items():
            if self._is(*one) and self._is(*other):
                raise ValueError(f"Options({one[0]}={one[1]!r}, {other[0]}={other[1]!r}): {why}")
        cutoff = self.decay_cutoff
        if cutoff is None or cutoff == "default":
            return
        if isinstance(cutoff, (str, bool)) or not cutoff < 0:
            raise ValueError(f"Options(decay_cutoff={cutoff!r}): expected None, 'default' or a negative number")

    def _is(self, name: str, *values: bool | str) -> bool:
        got = getattr(self, name)
        return any(type(got) is type(value) and got == value for value in values)

    @property
    def keeps_states(self) -> bool:
        """Whether a backward finds the entry states of its forward."""
        return self.boundary == "saved"

    @property
    def keeps_maps(self) -> bool:
        """Whether a backward finds the maps of its forward."""
        return self.save_transfer and self.keeps_states

    @property
    def keeps_tapes(self) -> bool:
        """Whether every forward saves its tapes."""
        return self.save == "full"

    def cutoff(self, dtype: torch.dtype) -> float | None:
        """The decay cutoff that inputs of ``dtype`` get."""
        if self.decay_cutoff == "default":
            return -17.0 if dtype in (torch.bfloat16, torch.float16) else None
        return None if self.decay_cutoff is None else float(self.decay_cutoff)
