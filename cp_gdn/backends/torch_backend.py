"""The stage protocol on torch: what the op asks of a backend, in the op's terms (chunk buffers in token order, walks,
states)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from cp_gdn.backends import torch_adjoint as adjoint_stages
from cp_gdn.backends import torch_chunked as stages
from cp_gdn.backends.torch_adjoint import Adjoints, AdjointTape, Gradients
from cp_gdn.backends.torch_chunked import Inputs, States, Tape
from cp_gdn.plan import SegmentSet
from cp_gdn.schedule import Replay, Schedule


@dataclass(frozen=True, kw_only=True, slots=True)
class TorchBackend:
    """Stages of one call. ``schedule`` holds the uploaded tables of this rank, ``cutoff`` the decay cutoff or None."""

    schedule: Schedule
    cutoff: float | None

    def prepare(self, x: Inputs) -> Tape:
        return stages.prepare(x, self.schedule.rows, self.cutoff)

    def summarize(self, tape: Tape, walk: SegmentSet, start: Tensor) -> Tensor:
        return stages.summarize(tape, walk, start, self.cutoff)

    def transfer(self, tape: Tape) -> Tensor:
        return stages.transfer(tape, self.schedule.transfer, self.cutoff)

    def replay(self, tape: Tape, x: Inputs, replay: Replay, start: Tensor, out: Tensor) -> Tensor:
        """O of a replay's chunks into ``out`` [N, HV, C, V]; returns the end states."""
        states, end = stages.replay(tape, replay.walk, start)
        out[replay.walk.chunks] = stages.outputs(tape, replay.walk, states, x.scale)
        return end

    def states(self, tape: Tape, start: Tensor) -> States:
        """States of every chunk, in token order, run again from the entry states of all segments."""
        walk = self.schedule.everything
        states, _ = stages.replay(tape, walk, start[walk.segments])
        before, residual = torch.empty_like(states.before), torch.empty_like(states.residual)
        before[walk.chunks], residual[walk.chunks] = states.before, states.residual
        return States(before=before, residual=residual)

    def outputs(self, out: Tensor, x: Inputs) -> Tensor:
        """[N, HV, C, V] back to [T, HV, V] in the inputs' dtype."""
        return stages.from_chunks(out, self.schedule.back, x.v.shape[2], x.q.dtype)

    def adjoint_prepare(self, tape: Tape, x: Inputs, dout: Tensor) -> AdjointTape:
        return adjoint_stages.adjoint_prepare(tape, dout, self.schedule.rows, x.scale)

    def adjoint_summarize(self, tape: Tape, adjoint: AdjointTape, walk: SegmentSet, start: Tensor) -> Tensor:
        return adjoint_stages.adjoint_summarize(tape, adjoint, walk, start, self.cutoff)

    def adjoint_replay(self, tape: Tape, adjoint: AdjointTape, replay: Replay, start: Tensor, out: Adjoints) -> Tensor:
        """Adjoints of a replay's chunks into ``out``, in token order; returns the entry adjoints."""
        found, end = adjoint_stages.adjoint_replay(tape, adjoint, replay.walk, start)
        out.after[replay.walk.chunks], out.values[replay.walk.chunks] = found.after, found.values
        return end

    def gradients(self, tape: Tape, adjoint: AdjointTape, states: States, adjoints: Adjoints, x: Inputs) -> Gradients:
        return adjoint_stages.gradients(tape, adjoint, states, adjoints, x, self.schedule.back)
