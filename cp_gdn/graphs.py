"""Calls captured into CUDA graphs: one graph per pack shape, the latest few of them kept.

A graph is bound to addresses, so each has its own inputs, results and context, all in the memory pool of its cache.
What is captured belongs to a pack *shape*: a later context that was agreed with the same digest (boundaries, layout,
heads, options, ..) takes the same graph, whatever its tokens are.
"""

import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cp_gdn.comm import Comm
from cp_gdn.context import Context
from cp_gdn.digest import digest_fields

Outputs = Tensor | None | tuple[Tensor | None, ...]
Captured = Callable[..., Outputs]

MODE = "thread_local"
"""NCCL's watchdog and the monitor of a Comm ask for events in their threads, which "global" would take for a fault."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphResults:
    """What a graph gives, in its own memory: the cache's next call writes over it, so clone what must live longer.

    Attributes:
        outputs: of the function, always a tuple. gradients: of the tensors that came in, None where none is wanted or
            none flows; empty for `GraphCache.forward`. parameter_gradients: of `GraphCache`'s parameters, likewise.
    """

    outputs: tuple[Tensor | None, ...]
    gradients: tuple[Tensor | None, ...] = ()
    parameter_gradients: tuple[Tensor | None, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Call:
    """A function and what it is differentiated by beside its inputs."""

    fn: Captured
    parameters: tuple[Tensor, ...]

    def run(self, ctx: Context, tensors: Sequence[Tensor], given: Sequence[Tensor | None] | None) -> GraphResults:
        """Run it on ``tensors``; with ``given``, gradients of its outputs, its backward too."""
        with torch.set_grad_enabled(given is not None):
            returned = self.fn(ctx, *tensors)
            outputs = returned if isinstance(returned, tuple) else (returned,)
            if given is None:
                return GraphResults(outputs=outputs)
            if len(given) != len(outputs):
                raise ValueError(f"output_gradients: got {len(given)}, expected one or None per output, {len(outputs)}")
            taken = [(o, g) for o, g in zip(outputs, given, strict=True) if o is not None and g is not None]
            leaves = [x for x in (*tensors, *self.parameters) if x.requires_grad]
            grads = iter(torch.autograd.grad([o for o, _ in taken], leaves, [g for _, g in taken], allow_unused=True))
            own, others = (
                tuple(next(grads) if x.requires_grad else None for x in each) for each in (tensors, self.parameters)
            )
        outputs = tuple(None if o is None else o.detach() for o in outputs)
        return GraphResults(outputs=outputs, gradients=own, parameter_gradients=others)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Graph:
    """A captured call. ``ctx``: the tables that it reads. ``inputs``, ``given``: where it reads a call's tensors."""

    graph: torch.cuda.CUDAGraph
    ctx: Context
    inputs: tuple[Tensor, ...]
    given: tuple[Tensor | None, ...]
    results: GraphResults

    def run(self, tensors: Sequence[Tensor], given: Sequence[Tensor | None]) -> GraphResults:
        """Copy the tensors in and launch, on torch's current stream."""
        with torch.no_grad():
            for mine, theirs in zip((*self.inputs, *self.given), (*tensors, *given), strict=True):
                if mine is not None and theirs is not None:
                    mine.copy_(theirs)
        self.graph.replay()
        return self.results


class GraphCache:
    """Runs a function of a context and tensors, one op or a model of many layers, as a CUDA graph per pack shape.

    The first call of a shape runs the function once (which loads kernels and sends its messages), captures it and runs
    the graph; later ones copy their tensors in and launch. Bits are those of the function itself. Every rank of a group
    calls alike, so all capture in the same call. The graphs share one memory pool and follow each other.

    Args:
        fn: ``fn(ctx, *tensors)`` gives a tensor, or a tuple of tensors and None. What it reads beside its arguments is
            read where it lies (parameters) or as it was at the capture (all else).
        parameters: tensors whose gradients `step` returns too. No autograd graph of an earlier call (a loss that is
            still alive) may hold one when a step is captured.
        capacity: graphs that are kept, those used last; dropping one waits for the device.

    Close a `Comm` after the caches that used it: NCCL ends a communicator after the last graph captured with it.
    """

    def __init__(self, fn: Captured, *, parameters: Sequence[Tensor] = (), capacity: int = 4) -> None:
        if isinstance(capacity, bool) or not isinstance(capacity, int) or capacity < 1:
            raise ValueError(f"capacity: got {capacity!r}, expected a number of graphs of at least 1")
        if not callable(fn):
            raise TypeError(f"fn: got {type(fn).__name__}, expected a function of a context and tensors")
        self._call, self.capacity = _Call(fn=fn, parameters=tuple(parameters)), capacity
        self._graphs: OrderedDict[Hashable, _Graph] = OrderedDict()
        self._shapes: weakref.WeakKeyDictionary[Context, Hashable] = weakref.WeakKeyDictionary()
        self._place = _Place()

    def __len__(self) -> int:
        return len(self._graphs)

    def forward(self, ctx: Context, *tensors: Tensor) -> GraphResults:
        """The outputs of the function, without gradients.

        Raises:
            RuntimeError, ValueError, TypeError: this context's calls cannot be captured, or an argument is not a
                tensor on its device; nothing was sent.
        """
        return self._run(ctx, tensors, None)

    def step(self, ctx: Context, tensors: Sequence[Tensor], output_gradients: Sequence[Tensor | None]) -> GraphResults:
        """Forward and backward: gradients of every tensor that requires one and of the parameters, not accumulated.

        Args:
            tensors: the function's; their ``requires_grad`` counts. output_gradients: one or None per output.
        """
        if all(each is None for each in output_gradients):
            raise ValueError("output_gradients: got none, expected the gradient of an output; or call forward")
        return self._run(ctx, tensors, output_gradients)

    def clear(self) -> None:
        """Drop every graph; their memory is free when the results are dropped too."""
        if self._graphs:
            torch.cuda.synchronize()
        self._graphs.clear()

    def _run(self, ctx: Context, tensors: Sequence[Tensor], given: Sequence[Tensor | None] | None) -> GraphResults:
        if not isinstance(ctx, Context):
            raise TypeError(f"ctx: got {type(ctx).__name__}, expected the result of cp_gdn.build_context")
        with ctx.comm.guard("GraphCache"):
            _check(ctx, tensors, given or ())
            key = (self._shape_of(ctx), given is not None, *map(_signature, (*tensors, *(given or ()))), _autocast())
            graph = self._graphs.pop(key, None)
            if graph is None:
                if given is not None:
                    _check_free(self._call.parameters)
                self._make_room(ctx)
                graph = self._place.captured(self._call, ctx, tensors, given, fresh=not self._graphs)
            self._graphs[key] = graph  # the last of them is the one used last
            return self._place.in_turn(lambda: graph.run(tensors, given or ()), ctx.device)

    def _shape_of(self, ctx: Context) -> Hashable:
        """Equal for contexts whose plans are."""
        if ctx not in self._shapes:
            fields: tuple[tuple[str, str], ...] = tuple(digest_fields(ctx).items())
            group = id(ctx.comm) if ctx.comm.size > 1 else 0  # its graphs keep it alive
            self._shapes[ctx] = (fields, group, str(ctx.device))
        return self._shapes[ctx]

    def _make_room(self, ctx: Context) -> None:
        if len(self._graphs) < self.capacity:
            return
        torch.cuda.synchronize(ctx.device)  # one of them may be running
        while len(self._graphs) >= self.capacity:
            self._graphs.popitem(last=False)


class _Place:
    """The stream and the memory pool that graphs of a cache share; they run in turn, whatever stream calls."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._done: torch.cuda.Event | None = None
        self._pool: Any = None

    def captured(
        self,
        call: _Call,
        ctx: Context,
        tensors: Sequence[Tensor],
        given: Sequence[Tensor | None] | None,
        *,
        fresh: bool,
    ) -> _Graph:
        """Run the call once beside the current stream, then capture it; ``fresh``: there is no other graph."""
        with torch.cuda.device(ctx.device):
            if fresh:  # torch ends a pool with the last of its graphs
                self._pool = torch.cuda.graph_pool_handle()
            graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
            capture = torch.cuda.graph(graph, pool=self._pool, stream=self._beside(), capture_error_mode=MODE)
            beside = capture.capture_stream
            assert beside is not None
            beside.wait_stream(current)
            with torch.cuda.stream(beside):
                call.run(ctx, [x.detach().requires_grad_(x.requires_grad) for x in tensors], given)
            current.wait_stream(beside)
            with torch.cuda.stream(current), capture:  # a capture that fails does not put the stream back itself
                inputs = tuple(torch.empty_like(x).requires_grad_(x.requires_grad) for x in tensors)
                mine = tuple(None if x is None else torch.empty_like(x) for x in given or ())
                results = call.run(ctx, inputs, None if given is None else mine)
        return _Graph(graph=graph, ctx=ctx, inputs=inputs, given=mine, results=results)

    def _beside(self) -> torch.cuda.Stream | None:
        """The stream to capture on: torch's own (None), whose libraries have their scratch memory already."""
        shared = torch.cuda.graph.default_capture_stream
        if shared is not None and shared.device.index != torch.cuda.current_device():
            self._stream = self._stream or torch.cuda.Stream()
        return self._stream

    def in_turn(self, run: Callable[[], GraphResults], device: torch.device) -> GraphResults:
        """Run behind the graph before, which may have been launched on another stream: they share temporaries."""
        with torch.cuda.device(device):
            stream = torch.cuda.current_stream()
            if self._done is None:
                self._done = torch.cuda.Event()
            else:
                stream.wait_event(self._done)
            results = run()
            self._done.record(stream)
        return results


def _signature(x: Tensor | None) -> Hashable:
    return None if x is None else (tuple(x.shape), x.stride(), x.dtype, x.requires_grad)


def _autocast() -> Hashable:
    return torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda")


# ---- what cannot be captured -----------------------------------------------------------------------------------------


def _check(ctx: Context, tensors: Sequence[Tensor], given: Sequence[Tensor | None]) -> None:
    _check_place(ctx.device, ctx.comm, sends=ctx.exchange != "none")
    if ctx.options.reuse_recompute_tapes is True:
        raise ValueError(
            "ctx: got Options(reuse_recompute_tapes=True), which a graph cannot do: its launch has no checkpoint; use "
            "'auto' or False"
        )
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "GraphCache: got a call while a CUDA graph is being captured; call the function itself there"
        )
    if torch.is_autocast_enabled("cuda") and torch.is_autocast_cache_enabled():
        raise RuntimeError(
            "GraphCache: got a call under autocast with its cache of weights, which would keep a graph's memory; use "
            "torch.autocast(.., cache_enabled=False)"
        )
    for i, x in enumerate((*tensors, *given)):
        name = f"tensors[{i}]" if i < len(tensors) else f"output_gradients[{i - len(tensors)}]"
        if x is None and i >= len(tensors):
            continue
        if not isinstance(x, Tensor):
            raise TypeError(f"{name}: got {type(x).__name__}, expected a tensor")
        if x.device.type != ctx.device.type or (ctx.device.index is not None and x.device.index != ctx.device.index):
            raise ValueError(f"{name}: got device {x.device}, expected {ctx.device}")


def _check_free(parameters: Sequence[Tensor]) -> None:
    """Refuse parameters that another autograd graph holds: torch ends their gradients on the stream of that graph's
    call, which is not captured."""
    for i, x in enumerate(parameters):
        if x.requires_grad and x.is_leaf and _is_held(x):
            raise RuntimeError(
                f"parameters[{i}]: got one that an earlier call still holds, which would take its gradient to that "
                "call's stream, out of the capture; drop that call's outputs (a loss, or what DDP keeps) before"
            )


def _is_held(leaf: Tensor) -> bool:
    """Whether an autograd graph is alive that ends in ``leaf``: what is noted on its last node is then found again."""

    def notes() -> dict[Any, Any]:
        node: Any = torch.autograd.graph.get_gradient_edge(leaf).node  # torch's types take its property for a method
        found: dict[Any, Any] = node.metadata
        return found

    notes()["cp_gdn: is held"] = True
    return bool(notes().pop("cp_gdn: is held", False))


def _check_place(device: torch.device, comm: Comm, *, sends: bool) -> None:
    """Refuse a device without graphs, and messages that pass through the host."""
    if device.type != "cuda" or not torch.cuda.is_available():
        raise ValueError(
            f"ctx: got one for {device}, expected a CUDA device that is there: only its launches can be captured; call "
            "the function itself"
        )
    if sends and comm.size > 1 and "nccl" not in comm.kind:
        raise RuntimeError(
            f"ctx: got messages that go by {comm.kind}, through the host, which no graph can do; make the Comm of a "
            "nccl group, or call the function itself"
        )
