"""A context: partition, plan, routes and tables of one pack on this rank, built once and shared by all layers and
steps."""

import functools
import itertools
import logging
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from cp_gdn.backends.choice import TORCH, BackendChoice, choose_backend
from cp_gdn.backends.hopper import Uploaded
from cp_gdn.backends.hopper_backward import HopperKernels
from cp_gdn.backends.precision import state_dtype
from cp_gdn.backends.torch_backend import TorchBackend
from cp_gdn.backends.torch_chunked import padded
from cp_gdn.calibration import Calibration, calibration_for
from cp_gdn.checks import check_comm, check_context
from cp_gdn.comm import Comm
from cp_gdn.digest import digest_fields
from cp_gdn.exchange import Choice, Routes, Sizes, choose
from cp_gdn.halo import Halo
from cp_gdn.layout import Partition
from cp_gdn.options import Options
from cp_gdn.plan import Plan, build_plan
from cp_gdn.schedule import Schedule
from cp_gdn.segments import SegmentChoice, resolve_segments
from cp_gdn.tables import build_tables
from cp_gdn.traced import Traced, traced_of

log = logging.getLogger("cp_gdn")

CONTEXTS: "weakref.WeakValueDictionary[int, Context]" = weakref.WeakValueDictionary()
"""Contexts by the int handle that a `torch.library` operator can carry; entries die with their context."""
_SAID: set[tuple[str, int, str]] = set()
"""What this process has logged."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Context:
    """Everything that is fixed for a pack. Build it with `build_context`; its digest is agreed by all ranks.

    Attributes:
        heads: (H, HV). head_dims: (K, V). dtype: of q, k, v and o. conv: (channels, width) of the convolution, or None.
        segments, exchange, taken (the backend): what was chosen and why.
        backend: the stages of this rank in torch. kernels: those on the Hopper kernels, or None.
        plan, schedule, routes, halo: see their modules; tables are on ``device``.
        last_call: what the last call of the op on this context ran, and why (docs/design.md has the keys).
        handle: key of this context in `CONTEXTS`; a number is never used again, as an address would be.
        traced: what compilers read.
    """

    partition: Partition
    comm: Comm
    device: torch.device
    heads: tuple[int, int]
    head_dims: tuple[int, int]
    dtype: torch.dtype
    conv: tuple[int, int] | None
    options: Options
    segments: SegmentChoice
    choice: Choice
    plan: Plan
    schedule: Schedule
    routes: Routes
    halo: Halo | None
    taken: BackendChoice
    backend: TorchBackend
    kernels: HopperKernels | None
    asked: dict[str, Any]
    last_call: dict[str, Any] = field(default_factory=dict)
    handle: int = field(init=False, default_factory=itertools.count(1).__next__)
    traced: Traced = field(init=False)

    def __post_init__(self) -> None:
        CONTEXTS[self.handle] = self
        object.__setattr__(self, "traced", traced_of(self))

    @property
    def rank(self) -> int:
        return self.comm.rank

    @property
    def world_size(self) -> int:
        return self.comm.size

    @property
    def tape_store(self) -> TorchBackend | HopperKernels:
        """Whoever makes the tapes of this context's calls."""
        return self.backend if self.kernels is None else self.kernels

    @property
    def tape_dtype(self) -> torch.dtype:
        """Dtype of the tensors that a saved tape consists of."""
        return self.state_dtype if self.kernels is None else torch.uint8

    @property
    def exchange(self) -> str:
        """``"ring"``, ``"a2a"``, or ``"none"`` where nothing crosses ranks."""
        return self.choice.kind

    @property
    def num_tokens(self) -> int:
        """Tokens that this rank holds."""
        return self.plan.num_tokens

    @property
    def entry_docs(self) -> tuple[int, ...]:
        """Documents whose initial state this rank takes: row i of ``initial_state`` is document entry_docs[i]."""
        return tuple(self.plan.entry_docs.tolist())

    @property
    def exit_docs(self) -> tuple[int, ...]:
        """Documents whose final state this rank returns: row i of ``final_state`` is document exit_docs[i]."""
        return tuple(self.plan.exit_docs.tolist())

    @property
    def token_ids(self) -> Tensor:
        """Global index of each local token, int64 [T] on the device."""
        return self.schedule.token_ids

    @property
    def positions(self) -> Tensor:
        """Offset of each local token in its document, int64 [T] on the device."""
        return self.schedule.positions

    @property
    def state_dtype(self) -> torch.dtype:
        """Dtype of states, maps and messages."""
        return state_dtype(self.dtype)

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """(HV, K, V) of a state as it is stored and sent: head dims padded to a multiple of 16."""
        return (self.heads[1], padded(self.head_dims[0]), padded(self.head_dims[1]))

    def note_call(self, entry: str, direction: str, *, keeps: bool = True, **decided: str) -> None:
        """Write `last_call`. ``keeps``: whether this forward saved anything for a backward. ``decided``: see
        `recompute.Decision`."""
        saved = "full" if decided.get("tapes") == "saved" else "light"
        saved = saved if keeps and self.options.keeps_states else "nothing"
        self.last_call.clear()
        self.last_call.update(self._of_every_call, entry=entry, direction=direction, saved=saved, **decided)

    @functools.cached_property
    def _of_every_call(self) -> dict[str, Any]:
        """What `last_call` says whatever the call was."""
        segments = self.segments
        p: Any = segments.p_vector if segments.rule == "fixed" else self.plan.p
        return {
            "exchange": self.choice.kind,
            "exchange_reason": self.choice.reason,
            "segments": f"grid:{self.plan.grid}" if self.plan.grid else p,
            "segments_rule": segments.rule,
            "segments_note": segments.note,
            "backend": self.taken.kind,
            "backend_reason": self.taken.reason,
            "maps": "saved" if self.options.keeps_maps else "recomputed",
        }

    def with_heads(
        self, heads: tuple[int, int], head_dims: tuple[int, int] | None = None, conv: tuple[int, int] | None = None
    ) -> "Context":
        """A context of the same pack for layers of another shape; every rank must call it."""
        asked = {**self.asked, "heads": heads, "head_dims": head_dims or self.head_dims, "conv": conv}
        return build_context(self.partition, self.comm, **asked)


def build_context(
    part: Partition,
    comm: Comm,
    *,
    device: torch.device | str = "cpu",
    heads: tuple[int, int],
    head_dims: tuple[int, int] = (128, 128),
    dtype: torch.dtype = torch.bfloat16,
    conv: tuple[int, int] | None = None,
    segments: int | Sequence[int] | str = "auto",
    exchange: str = "auto",
    backend: str = "auto",
    options: Options = Options(),  # noqa: B008 - frozen
) -> Context:
    """Plan a pack and agree on it with every rank of ``comm``.

    Args:
        part: the partition of the whole pack. comm: its group; ``part.world_size`` ranks.
        device: where the call's tensors live. heads: (H, HV). head_dims: (K, V). dtype: of q, k and v.
        conv: (channels, width) of the layer's causal convolution, None without one.
        segments: P for all ranks, a P vector, "grid:N", a rule's name or "auto". exchange: "ring", "a2a" or "auto".
        backend: "hopper" (the kernels in ``kernels/``), "torch", or "auto": the kernels where every rank can run them.

    Raises:
        ValueError, TypeError: an argument is refused; nothing was sent.
        RuntimeError: ``backend="hopper"``, and the kernels do not fit the arguments or this machine.
        PlanDisagreement: ranks called with different arguments; every rank's value is listed, on every rank.
    """
    with check_comm(comm).guard("build_context"):
        asked: dict[str, Any] = {
            "device": device,
            "heads": heads,
            "head_dims": head_dims,
            "dtype": dtype,
            "conv": conv,
            "segments": segments,
            "exchange": exchange,
            "backend": backend,
            "options": options,
        }
        heads, head_dims = check_context(part, comm, asked)
        calibration, note = device_calibration(torch.device(device))
        picked = resolve_segments(segments, part, heads[1], calibration, note)
        sizes = Sizes.of(heads[1], head_dims, state_dtype(dtype).itemsize)
        choice = choose(exchange, part, sizes, calibration.times, grid=picked.grid > 0)
        taken = choose_backend(asked, comm)
        plan = build_plan(part, comm.rank, p_vector=picked.p_of(comm.rank), grid=picked.grid)
        ctx = assemble_context(part, comm, plan, picked, choice, {**asked, "taken": taken})
        comm.agree("context", digest_fields(ctx))
    said = (part.layout, comm.size, choice.kind)
    level = logging.DEBUG if said in _SAID else logging.INFO  # a run has a context per pack
    log.log(level, "cp_gdn: %s over %d ranks, exchange %s (%s)", *said, choice.reason)
    _SAID.add(said)
    return ctx


def device_calibration(device: torch.device) -> tuple[Calibration, str]:
    """Constants of the device, and what was assumed about it; asks the driver without a synchronization."""
    if device.type != "cuda":
        return calibration_for("cpu")
    sm_count = torch.cuda.get_device_properties(device).multi_processor_count
    return calibration_for(torch.cuda.get_device_name(device), sm_count)


def assemble_context(
    part: Partition, comm: Comm, plan: Plan, picked: SegmentChoice, choice: Choice, asked: dict[str, Any]
) -> Context:
    """Tables, routes and halo of a plan, uploaded in one copy; no message.

    Args:
        asked: arguments of `build_context`, and under "taken" the backend that was chosen, torch without it.
    """
    asked = dict(asked)
    taken, device, conv = asked.pop("taken", TORCH), torch.device(asked["device"]), asked["conv"]
    heads, cutoff, on_kernels = tuple(asked["heads"]), asked["options"].cutoff(asked["dtype"]), taken.kind == "hopper"
    width = None if conv is None else conv[1]
    tables = build_tables(part, plan, choice.kind, heads, on_kernels=on_kernels, width=width)
    tables.upload(device)
    kernels = None
    if tables.kernels is not None:
        uploaded = Uploaded(tables=tables.kernels, schedule=tables.schedule, routes=tables.routes)
        kernels = HopperKernels.of(uploaded, heads, cutoff, asked["options"])
    return Context(
        partition=part,
        comm=comm,
        device=device,
        heads=heads,
        head_dims=tuple(asked["head_dims"]),
        dtype=asked["dtype"],
        conv=None if conv is None else tuple(conv),
        options=asked["options"],
        segments=picked,
        choice=choice,
        plan=plan,
        schedule=tables.schedule,
        routes=tables.routes,
        halo=tables.halo,
        taken=taken,
        backend=TorchBackend(schedule=tables.schedule, cutoff=cutoff),
        kernels=kernels,
        asked=asked,
    )
