"""CUDA graphs of calls: a graph's bits are the function's own, for every layout and backend, and no byte stays."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import cp_gdn
from cp_gdn import Comm, Context, GraphCache, GraphResults, recompute
from tests.cases import LAYOUTS
from tests.gpu.op_cases import NAMES, context, inputs

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
BACKENDS = ["torch", pytest.param("hopper", marks=pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU"))]
LENGTHS, OTHERS = (300, 0, 64, 5, 700), (500, 569)
DRAWS: dict[tuple[tuple[int, ...], int], dict[str, Tensor]] = {}


def drawn(lengths: tuple[int, ...], seed: int) -> dict[str, Tensor]:
    return DRAWS.setdefault((lengths, seed), inputs(lengths, "slow", 3, seed=seed))


def context_of(comm: Comm, lengths: tuple[int, ...], layout: str, **asked: Any) -> Context:
    return context(comm, drawn(lengths, 0), [0, *torch.tensor(lengths).cumsum(0).tolist()], layout, **asked)


def tensors_of(ctx: Context, x: dict[str, Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """This rank's leaves, and the gradients of o and of the final states."""
    leaves = [x[name][ctx.token_ids] for name in NAMES] + [x["initial"][list(ctx.entry_docs)]]
    given = [x["dout"][ctx.token_ids], x["dfinal"][list(ctx.exit_docs)]]
    return [t.clone().requires_grad_() for t in leaves], given


def op(ctx: Context, *tensors: Tensor) -> tuple[Tensor, Tensor | None]:
    *tokens, initial = tensors
    how = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    return cp_gdn.chunk_gated_delta_rule(*tokens, ctx=ctx, initial_state=initial, **how)


def eager(fn: Callable[..., Any], ctx: Context, leaves: list[Tensor], given: list[Tensor]) -> list[Tensor]:
    outputs = fn(ctx, *leaves)
    grads = torch.autograd.grad(outputs, [x for x in leaves if x.requires_grad], given)
    return [*(o.detach() for o in outputs), *grads]


def flat(results: GraphResults) -> list[Tensor]:
    return [x for x in (*results.outputs, *results.gradients, *results.parameter_gradients) if x is not None]


def assert_same(got: list[Tensor], want: list[Tensor]) -> None:
    assert len(got) == len(want)
    for i, (ours, theirs) in enumerate(zip(got, want, strict=True)):
        assert torch.equal(ours, theirs), i


def check_against_eager(ctx: Context, seeds: tuple[int, ...] = (0, 1, 0)) -> None:
    """A forward's graph and a step's, run on several draws."""
    cache = GraphCache(op)
    for seed in seeds:
        leaves, given = tensors_of(ctx, drawn(LENGTHS, seed))
        want = eager(op, ctx, leaves, given)
        assert_same(flat(cache.forward(ctx, *leaves)), want[:2])
        assert_same(flat(cache.step(ctx, leaves, given)), want)
    assert len(cache) == 2


@pytest.mark.parametrize("segments", [1, 3, "grid:1"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_graph_has_the_bits_of_the_call_in_every_layout(backend: str, layout: str, segments: Any) -> None:
    check_against_eager(context_of(Comm.alone(), LENGTHS, layout, segments=segments, backend=backend))


@pytest.mark.parametrize(
    "options",
    [{"save": "full"}, {"save": "light"}, {"boundary": "recompute"}, {"save_transfer": False}],
    ids=str,
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_graph_has_the_bits_of_the_call_whatever_is_kept(backend: str, options: dict[str, Any]) -> None:
    asked = {"segments": 2, "backend": backend, "options": cp_gdn.Options(**options)}
    check_against_eager(context_of(Comm.alone(), LENGTHS, "contiguous", **asked), seeds=(0, 1))


@pytest.mark.parametrize("backend", BACKENDS)
def test_packs_take_turns_on_any_stream_and_a_pack_of_a_known_shape_captures_nothing(backend: str) -> None:
    """Graphs of a cache share their temporaries, so one must wait for the other."""
    cache, packs = GraphCache(op, capacity=2), []
    for lengths in (LENGTHS, OTHERS):
        ctx = context_of(Comm.alone(), lengths, "contiguous", segments=2, backend=backend)
        leaves, given = tensors_of(ctx, drawn(lengths, 0))
        packs.append((lengths, leaves, given, eager(op, ctx, leaves, given), torch.cuda.Stream()))
        cache.step(ctx, leaves, given)
    graphs = {id(graph) for graph in cache._graphs.values()}
    for _ in range(3):
        torch.cuda.synchronize()
        found = []
        for lengths, leaves, given, want, stream in packs:
            again = context_of(Comm.alone(), lengths, "contiguous", segments=2, backend=backend)
            with torch.cuda.stream(stream):
                found.append(([x.clone() for x in flat(cache.step(again, leaves, given))], want))
        torch.cuda.synchronize()
        for got, want in found:
            assert_same(got, want)
    assert {id(graph) for graph in cache._graphs.values()} == graphs


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_checkpointed_region_is_captured_without_handing_tapes_on(backend: str) -> None:
    ctx = context_of(Comm.alone(), LENGTHS, "contiguous", segments=2, backend=backend)

    def region(ctx: Context, *tensors: Tensor) -> tuple[Tensor, ...]:
        # the state of a random generator cannot be read inside of a capture
        return checkpoint(op, ctx, *tensors, use_reentrant=False, preserve_rng_state=False)  # type: ignore[no-any-return]

    leaves, given = tensors_of(ctx, drawn(LENGTHS, 0))
    want = eager(region, ctx, leaves, given)
    assert ctx.last_call["tapes"] == "kept"
    assert_same(flat(GraphCache(region).step(ctx, leaves, given)), want)
    assert (ctx.last_call["tapes"], ctx.last_call["tapes_reason"]) == ("rerun", recompute.CAPTURED)


def test_a_layer_gives_gradients_of_its_parameters_and_reads_them_where_they_lie() -> None:
    torch.manual_seed(0)
    heads = (2, 6)
    layer = cp_gdn.GatedDeltaNet(256, heads=heads, head_dims=(128, 128)).cuda().bfloat16()
    layer.A_log.data, layer.dt_bias.data = layer.A_log.data.float(), layer.dt_bias.data.float()
    part, parameters = cp_gdn.partition([0, 300, 1000], 1), list(layer.parameters())
    ctx = cp_gdn.build_context(part, Comm.alone(), device="cuda", heads=heads, conv=layer.conv)
    x, dy = (torch.randn(1, 1000, 256, device="cuda").bfloat16() for _ in range(2))
    cache = GraphCache(lambda ctx, x: layer(x, ctx), parameters=parameters)

    def called() -> list[Tensor]:
        y = layer(x, ctx)  # its graph ends with this function: no capture may meet it
        return [y.detach(), *torch.autograd.grad(y, parameters, dy)]

    alive = layer(x, ctx)
    with pytest.raises(RuntimeError, match=r"parameters\[0\]: got one that an earlier call still holds"):
        cache.step(ctx, [x], [dy])
    del alive
    for _ in range(2):
        want = called()
        assert_same(flat(cache.step(ctx, [x], [dy])), want)
        with torch.no_grad():
            for parameter in parameters:
                parameter.mul_(1.25)
    assert len(cache) == 1


# ---- memory ----------------------------------------------------------------------------------------------------------


def allocated(pool: Any = None) -> int:
    """Bytes of live tensors, or of those outside of a pool."""
    gc.collect()
    torch.cuda.synchronize()
    if pool is None:
        return torch.cuda.memory_allocated()
    segments = torch.cuda.memory_snapshot()
    return sum(s["allocated_size"] for s in segments if tuple(s["segment_pool_id"]) != tuple(pool))


@pytest.fixture
def another_graph() -> Iterator[None]:
    """A graph of next to nothing. From a process's first graph to its last torch's generator keeps a seed and an offset
    on the device, two blocks of 512 bytes outside of all pools: with this graph they are there before and after."""
    one, graph = torch.zeros(1, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        one.add_(1)
    yield
    graph.reset()


@pytest.mark.usefixtures("another_graph")
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_graph_keeps_no_byte_outside_of_its_pool_and_none_at_all_once_it_is_gone(backend: str) -> None:
    ctx = context_of(Comm.alone(), LENGTHS, "contiguous", segments=3, backend=backend)
    leaves, given = tensors_of(ctx, drawn(LENGTHS, 0))
    GraphCache(op).step(ctx, leaves, given)  # libraries take scratch memory of their own, once
    torch.cuda.synchronize()
    before = allocated()
    cache = GraphCache(op)
    results = cache.step(ctx, leaves, given)
    assert allocated(cache._place._pool) == before
    assert allocated() > before
    cache.step(ctx, leaves, given)
    assert allocated(cache._place._pool) == before
    cache.clear()
    assert allocated() > before  # results are the caller's
    del results
    assert allocated() == before


def test_a_dropped_graph_gives_its_memory_back() -> None:
    """To the byte of what was asked for: blocks of a pool that was used before may be larger."""
    cache, sizes = GraphCache(op, capacity=1), []
    for lengths in (LENGTHS, OTHERS) * 3:
        ctx = context_of(Comm.alone(), lengths, "contiguous", segments=2, backend="torch")
        leaves, given = tensors_of(ctx, drawn(lengths, 0))
        cache.step(ctx, leaves, given)
        allocated()
        sizes.append(torch.cuda.memory_stats()["requested_bytes.all.current"])
        assert len(cache) == 1
    assert sizes[4:] == sizes[2:4]  # the first two find no graph to drop


# ---- messages --------------------------------------------------------------------------------------------------------


def on_rank(rank: int, folder: str) -> None:
    """Every layout and exchange over NCCL; gloo is refused."""
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{folder}/nccl", rank=rank, world_size=2)
    comm, compared = Comm(dist.group.WORLD), 0
    for backend in ("torch", "hopper") if HOPPER else ("torch",):
        for layout in LAYOUTS:
            for exchange in ("ring", "a2a"):
                asked = {"segments": 2, "exchange": exchange, "backend": backend}
                check_against_eager(context_of(comm, LENGTHS, layout, **asked), seeds=(0, 1))
                compared += 1
    gc.collect()  # graphs before their communicator
    gloo = Comm(dist.new_group(backend="gloo"))
    ctx = context_of(gloo, LENGTHS, "zigzag", segments=2, backend="torch")
    with pytest.raises(Exception, match="messages that go by gloo, through the host"):
        GraphCache(op).forward(ctx, *tensors_of(ctx, drawn(LENGTHS, 0))[0])
    comm.close()
    dist.destroy_process_group()
    (Path(folder) / f"rank{rank}").write_text(str(compared))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_ranks_capture_their_messages_over_nccl_and_gloo_is_refused() -> None:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(on_rank, (folder,), nprocs=2)  # raises what a rank raised
        compared = [int((Path(folder) / f"rank{rank}").read_text()) for rank in range(2)]
    assert compared == [2 * len(LAYOUTS) * (1 + HOPPER)] * 2
