"""What a context may be asked to do differently: one frozen dataclass, all of it in the plan digest."""

from dataclasses import dataclass

import torch

_LATER = {
    "save": ("light", "full"),
    "boundary": ("saved", "recompute"),
    "reuse_recompute_tapes": (False, True, "auto"),
    "recompute_output": ("always", "auto"),
}
"""Per field the value that works today, then those whose work comes with the memory modes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Choices of a context.

    Attributes:
        save: ``"light"`` keeps the entry state of every segment for the backward and runs the rest again.
        boundary: ``"saved"`` keeps what the exchange brought, so that a backward sends adjoints only.
        save_transfer: keep the segment maps M of the forward (and, with a2a, the owner's) for the backward;
            False computes and, with a2a, sends them again: less memory, more work.
        reuse_recompute_tapes, recompute_output: what a recompute under ``torch.utils.checkpoint`` hands on.
        decay_cutoff: log of the decay below which a segment's map counts as zero. ``"default"`` is -17 for
            16-bit inputs (the state changes by at most 2**-24 of itself) and None for fp32 and fp64; None
            drops nothing.
    """

    save: str = "light"
    boundary: str = "saved"
    save_transfer: bool = True
    reuse_recompute_tapes: bool | str = False
    recompute_output: str = "always"
    decay_cutoff: float | str | None = "default"

    def __post_init__(self) -> None:
        for name, values in _LATER.items():
            got = getattr(self, name)
            if got == values[0] and isinstance(got, type(values[0])):
                continue
            if any(got is v or (isinstance(v, str) and got == v) for v in values):
                raise NotImplementedError(f"Options({name}={got!r}) is not there yet; use {name}={values[0]!r}")
            raise ValueError(f"Options({name}={got!r}): expected one of {values}")
        if not isinstance(self.save_transfer, bool):
            raise ValueError(f"Options(save_transfer={self.save_transfer!r}): expected True or False")
        cutoff = self.decay_cutoff
        if cutoff is None or cutoff == "default":
            return
        if isinstance(cutoff, (str, bool)) or not cutoff < 0:
            raise ValueError(f"Options(decay_cutoff={cutoff!r}): expected None, 'default' or a negative number")

    def cutoff(self, dtype: torch.dtype) -> float | None:
        """The decay cutoff that inputs of ``dtype`` get."""
        if self.decay_cutoff == "default":
            return -17.0 if dtype in (torch.bfloat16, torch.float16) else None
        return None if self.decay_cutoff is None else float(self.decay_cutoff)
