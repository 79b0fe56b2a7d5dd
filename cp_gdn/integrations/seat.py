"""Where the layers of a taken-over model find the pack of the running step.

Every taken-over layer holds a reference to its model's seat: neither a context variable nor a thread-local, so that an
activation checkpoint's recompute, which autograd may run in another thread, finds the same pack.
Legend: B rows of the batch, S tokens of a row, N global and T local tokens, W ranks.
"""

import weakref
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from cp_gdn.comm import Comm
from cp_gdn.context import Context
from cp_gdn.integrations.pack import LayerShape, Pack, ShapeOf
from cp_gdn.layout import partition

SEAT = "_cp_gdn_seat"
"""Attribute of a taken-over module that holds its seat; in no state dict."""

BUILD_OPTIONS = ("segments", "exchange", "backend", "options")
KEPT_PACKS = 8
"""Packs whose contexts are kept: a fixed-length run plans once, and a compiled model sees the same contexts."""


class Seat:
    """One per taken-over model, or per `GDNContextParallel`: its group, its options and the pack of the running step.

    Args:
        comm: the context-parallel group. on_one_rank: use cp_gdn's operators on a group of one rank too, where the
            original forward runs otherwise. options: segments, exchange, backend, options of `build_context`.

    Attributes:
        pack: of the running step, or of the last one: a backward that runs after `hold` may recompute its forward.
        active: inside `hold`. suspended: inside `unsharded`. retired: given up by `Takeover.disable`.
        layer_types: entries of a config's layer_types that run sharded. layers: those that were taken over.
        dtype: of their queries, where mixed precision makes it another one than the weights'; only to plan ahead.
    """

    def __init__(self, comm: Comm, *, on_one_rank: bool = False, **options: Any) -> None:
        unknown = sorted(set(options) - set(BUILD_OPTIONS))
        if unknown:
            raise TypeError(f"options: got {', '.join(unknown)}, expected only on_one_rank, {', '.join(BUILD_OPTIONS)}")
        self.comm, self.on_one_rank, self.options = comm, on_one_rank, options
        self.pack: Pack | None = None
        self.active = self.suspended = self.retired = False
        self.layer_types = {"linear_attention", "full_attention"}
        self.layers: weakref.WeakKeyDictionary[nn.Module, ShapeOf] = weakref.WeakKeyDictionary()
        self.dtype: torch.dtype | None = None
        self._packs: OrderedDict[tuple[Any, ...], Pack] = OrderedDict()
        self._shapes: dict[LayerShape, None] = {}
        self._said: set[str] = set()

    # A copy of a model trains in the same group; a file or another process knows no group.
    def __deepcopy__(self, memo: dict[int, Any]) -> "Seat":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _no_seat, ()

    @property
    def original(self) -> bool:
        """Whether layers run the forward that they had before."""
        return self.suspended or self.retired or (self.comm.size == 1 and not self.on_one_rank)

    def rows(self, batch: int, length: int, *, device: torch.device | str = "cpu") -> Pack:
        """The pack of a batch [B, S]: every row a document, cut per document in 2 W pieces; local [B, S / W].

        Raises:
            ValueError: the length is not a multiple of 2 W, on several ranks.
        """
        pieces = 2 * self.comm.size if self.comm.size > 1 else 1
        if length % pieces:
            raise ValueError(
                f"length: got {length} tokens, expected a multiple of 2 * {self.comm.size} ranks = {pieces}; "
                f"pad every row to {-(-length // pieces) * pieces} on the right (pad_to_multiple_of={pieces})"
            )
        bounds = [row * length for row in range(batch + 1)]
        return self._plan(bounds, "zigzag_per_document", (batch, length // self.comm.size), torch.device(device))

    def packed(
        self, cu_seqlens: Sequence[int] | Tensor, *, layout: str = "zigzag", device: torch.device | str = "cpu"
    ) -> Pack:
        """The pack of one row [1, N] of documents; cu_seqlens are its global boundaries, layout as in `partition`."""
        return self._plan(cu_seqlens, layout, None, torch.device(device))

    def _plan(self, bounds: Any, layout: str, batch_shape: tuple[int, int] | None, device: torch.device) -> Pack:
        part = partition(bounds, self.comm.size, layout=layout)
        shape = batch_shape or (1, part.local_tokens(self.comm.rank))
        key = (part.doc_bounds, layout, batch_shape, device)
        # Once per step: peers that got different batches must not meet in the layers.
        self.comm.agree("batch", {"doc_bounds": _short(part.doc_bounds), "layout": layout, "rows": str(batch_shape)})
        pack = self._packs.pop(key, None) or Pack(
            partition=part, comm=self.comm, device=device, batch_shape=shape, options=self.options, said=self._said
        )
        self._packs[key] = pack
        if len(self._packs) > KEPT_PACKS:
            self._packs.popitem(last=False)
        return pack

    @contextmanager
    def hold(self, pack: Pack) -> Iterator[Pack]:
        """Run forwards, and backwards if you like, of ``pack`` inside."""
        outer = (self.pack, True) if self.active else (pack, False)
        self.keep(pack)
        try:
            yield pack
        finally:
            self.pack, self.active = outer

    def keep(self, pack: Pack) -> None:
        """Run what follows on ``pack``, until another one is kept."""
        if pack.comm is not self.comm:
            raise ValueError(
                "pack: it belongs to another group than this seat; make it with this seat's rows or packed"
            )
        self._refuse_replaced_forwards()
        # Plans are agreed here, outside of compiled code: for the layer shapes that steps before have met.
        for shape in self._shapes or self._expected_shapes(pack.device):
            pack.context(**shape._asdict())
        self.pack, self.active = pack, True

    @contextmanager
    def unsharded(self) -> Iterator[None]:
        """Run the original forward on whole sequences inside: evaluation, generation."""
        before, self.suspended = self.suspended, True
        try:
            yield
        finally:
            self.suspended = before

    def pack_for(self, hidden_states: Tensor) -> Pack:
        """The pack of these hidden states [B, S_local, hidden].

        Raises:
            RuntimeError: no batch is sharded. ValueError: the hidden states are not those of the sharded batch.
        """
        pack = self.pack
        if pack is None or not (self.active or _in_backward()):
            raise RuntimeError(
                f"cp_gdn: a Gated DeltaNet layer ran on {self.comm.size} context-parallel ranks without a sharded "
                "batch. Wrap the step in `with cp_gdn.accelerate.shard(accelerator, batch)` (or `with seat.hold(pack)`"
                "); for evaluation or generation on whole sequences use `with cp_gdn.unsharded(model)`"
            )
        if tuple(hidden_states.shape[:2]) != pack.batch_shape:
            way_out = "shard every input of the model"
            if _in_backward():
                way_out = "an activation checkpoint recomputes an earlier batch: call backward before sharding the next"
            raise ValueError(
                f"hidden_states: got shape {list(hidden_states.shape)}, expected {[*pack.batch_shape, '..']}, this "
                f"rank's share of the sharded batch of {pack.partition.num_tokens} tokens; {way_out}"
            )
        return pack

    def context_for(self, pack: Pack, shape: LayerShape) -> Context:
        """The context of a layer's shape in ``pack``; later packs get theirs when they are held."""
        self._shapes.setdefault(shape)
        return pack.context(**shape._asdict())

    def _expected_shapes(self, device: torch.device) -> dict[LayerShape, None]:
        """What layers will ask for in the first step; a wrong guess of the dtype costs a plan and a graph break."""
        dtype = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else self.dtype
        return dict.fromkeys(shape_of(layer, dtype=dtype) for layer, shape_of in self.layers.items())

    def _refuse_replaced_forwards(self) -> None:
        for layer in self.layers:
            if "forward" in vars(layer) and "_hf_hook" not in vars(layer):
                raise RuntimeError(
                    f"cp_gdn: the forward of a {type(layer).__name__} was replaced after it was taken over, so it "
                    "would run on its shard alone; load hub kernels (use_kernels, kernelize) before cp_gdn takes over"
                )


def seats_of(model: nn.Module) -> list[Seat]:
    """The seats of a model's taken-over layers, without repeats; empty if there are none."""
    found = (module.__dict__.get(SEAT) for module in model.modules())
    return list(dict.fromkeys(seat for seat in found if seat is not None))


def seat_of(model: nn.Module) -> Seat:
    """The one seat of a model. Raises ValueError if its layers were not taken over, or by several seats."""
    seats = seats_of(model)
    if len(seats) != 1:
        raise ValueError(
            f"model: got {type(model).__name__} with {len(seats)} seats, expected one; take its Gated DeltaNet layers "
            "over once, with cp_gdn.accelerate.enable or one cp_gdn.parallelize_plan"
        )
    return seats[0]


@contextmanager
def unsharded(model: nn.Module) -> Iterator[None]:
    """Run the original forward of the model's Gated DeltaNet layers inside, on whole sequences."""
    with ExitStack() as stack:
        for seat in seats_of(model):
            stack.enter_context(seat.unsharded())
        yield


def _in_backward() -> bool:
    """Whether autograd is running a backward in this thread: a forward in there is a checkpoint's recompute."""
    return torch._C._current_graph_task_id() != -1


def _no_seat() -> None:
    return None


def _short(bounds: tuple[int, ...]) -> str:
    text = ", ".join(map(str, bounds[:12]))
    return text if len(bounds) <= 12 else f"{text}, .. {len(bounds) - 1} documents, hash {hash(bounds):x}"
