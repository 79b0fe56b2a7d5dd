"""The stage protocol on torch: what the op asks of a backend, in the op's terms (chunk buffers in token order, walks,
states)."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from cp_gdn.backends import torch_adjoint as adjoint_stages
from cp_gdn.backends import torch_chunked as stages
from cp_gdn.backends import torch_kept as kept
from cp_gdn.backends.torch_adjoint import Adjoints, AdjointTape, Gradients
from cp_gdn.backends.torch_chunked import Inputs, States, Tape
from cp_gdn.backends.torch_kept import Shapes
from cp_gdn.plan import CHUNK
from cp_gdn.schedule import Schedule
from cp_gdn.walks import DEPENDENT, INDEPENDENT, TRANSFER, Walk, Walks
from cp_gdn.workspace import Untyped


@dataclass(frozen=True, kw_only=True, slots=True)
class TorchBackend:
    """Stages of one call. ``schedule`` holds the uploaded tables of this rank, ``cutoff`` the decay cutoff or None."""

    schedule: Schedule
    cutoff: float | None

    @property
    def walks(self) -> Walks:
        walks = self.schedule.walks
        assert walks is not None
        return walks

    def prepare(self, x: Inputs) -> Tape:
        return stages.prepare(x, self.schedule.rows, self.cutoff)

    def summarize(self, tape: Tape, walk: Walk, start: Tensor) -> Tensor:
        return stages.summarize(tape, walk, start, self.cutoff)

    def transfer(self, tape: Tape) -> Tensor:
        return stages.transfer(tape, self.walks.of(TRANSFER), self.cutoff)

    def buffers(self, phase: str, state: tuple[int, int, int], *, kept: bool) -> list[Untyped]:
        """What the op holds for this backend in a phase: name, shape (all in the dtype of states), lifetime.

        Args:
            state: [HV, K, V] as stored. kept: whether the states of every chunk come from a tape.
        """
        chunks, (value_heads, _, value_dim) = self.schedule.tokens.num_chunks, state
        states, rows = (chunks, *state), (chunks, value_heads, CHUNK, value_dim)
        if phase == "forward":
            return [("out", rows, ("replay", "replay"))]
        walked = ("adjoint replay", "gradients")
        found: list[Untyped] = [("after", states, walked), ("values", rows, walked)]
        if not kept:
            found += [("before", states, ("prepare", "gradients")), ("residual", rows, ("prepare", "gradients"))]
        return found

    def replay(
        self, tape: Tape, x: Inputs, walk: Walk, start: Tensor, out: Tensor | None, into: States | None = None
    ) -> Tensor:
        """O of a replay's chunks into ``out`` [N, HV, C, V], their states ``into``; returns the end states."""
        chunks = walk.chunks
        states, end = stages.replay(tape, walk, start)
        if into is not None:
            into.before[chunks], into.residual[chunks] = states.before, states.residual
        if out is not None:
            out[chunks] = stages.outputs(tape, walk, states, x.scale)
        return end

    def states(self, tape: Tape, x: Inputs, start: Tensor, into: States) -> None:
        """States of every chunk, in token order, run again from the entry states of all segments: the very walks of the
        forward, for a library may pick its algorithm by how many segments walk together."""
        for part in (INDEPENDENT, DEPENDENT):
            walk = self.walks.of(part)
            self.replay(tape, x, walk, start[walk.segments], None, into)

    def new_states(self, tape: Tape) -> States:
        """Memory for the states of every chunk, to be kept with the tape."""
        shape = (*tape.u.shape[:2], tape.k.shape[-1], tape.u.shape[-1])
        return States(before=tape.u.new_empty(shape), residual=tape.u.new_empty(tape.u.shape))

    def kept_shapes(self, heads: int, state: tuple[int, int, int], *, l2norm: bool) -> Shapes:
        """Shapes of the tensors of `kept_tensors`, by name."""
        chunks = self.schedule.tokens.num_chunks
        return kept.kept_shapes(chunks, heads, state, l2norm=l2norm, bound=self.cutoff is not None)

    def kept_tensors(self, tape: Tape, states: States) -> list[Tensor]:
        return kept.kept_tensors(tape, states)

    def from_kept(self, tensors: Sequence[Tensor], x: Inputs) -> tuple[Tape, States]:
        return kept.from_kept(tensors, x, self.schedule.rows, bound=self.cutoff is not None)

    def outputs(self, out: Tensor, x: Inputs) -> Tensor:
        """[N, HV, C, V] back to [T, HV, V] in the inputs' dtype."""
        return stages.from_chunks(out, self.schedule.back, x.v.shape[2], x.q.dtype)

    def adjoint_prepare(self, tape: Tape, x: Inputs, dout: Tensor) -> AdjointTape:
        return adjoint_stages.adjoint_prepare(tape, dout, self.schedule.rows, x.scale)

    def adjoint_summarize(self, tape: Tape, adjoint: AdjointTape, walk: Walk, start: Tensor) -> Tensor:
        return adjoint_stages.adjoint_summarize(tape, adjoint, walk, start, self.cutoff)

    def adjoint_replay(self, tape: Tape, adjoint: AdjointTape, walk: Walk, start: Tensor, out: Adjoints) -> Tensor:
        """Adjoints of a replay's chunks into ``out``, in token order; returns the entry adjoints."""
        found, end = adjoint_stages.adjoint_replay(tape, adjoint, walk, start)
        out.after[walk.chunks], out.values[walk.chunks] = found.after, found.values
        return end

    def gradients(self, tape: Tape, adjoint: AdjointTape, states: States, adjoints: Adjoints, x: Inputs) -> Gradients:
        return adjoint_stages.gradients(tape, adjoint, states, adjoints, x, self.schedule.back)
