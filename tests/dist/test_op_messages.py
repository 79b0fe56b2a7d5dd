"""What the op and the convolution post on a process group: alike on both ends, everything waited for, nothing kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import cp_gdn
from cp_gdn import Comm, Context, Partition, build_context, partition, twin
from cp_gdn.comm import Message
from tests.cases import cut
from tests.dist import pool
from tests.pack import differences
from tests.test_twin import assert_lists_match

pytestmark = pytest.mark.dist

# A state [16, 16] of the one value head has as many elements as the 4 rows of history of 64 channels.
SHAPE: dict[str, Any] = {"heads": (1, 1), "head_dims": (16, 16), "conv": (64, 5)}
Tensors = dict[str, Tensor]


class Posted:
    """What a step gave and what it posted."""

    def __init__(self, tensors: Tensors, messages: list[Message]) -> None:
        self.tensors, self.messages = tensors, messages


def make_context(comm: Comm, part: Partition, exchange: str, dtype: torch.dtype = torch.float64) -> Context:
    return build_context(part, comm, dtype=dtype, segments=1, exchange=exchange, **SHAPE)


def rows_of(ctx: Context) -> Tensors:
    """This rank's rows of the pack: 64 channels for the convolution, gates; weights [64, 5]."""
    gen = torch.Generator().manual_seed(0)
    total, ids = ctx.partition.num_tokens, ctx.token_ids
    x = torch.randn(total, 64, generator=gen, dtype=ctx.dtype)[ids]
    g, beta = torch.rand(2, total, 1, generator=gen, dtype=ctx.dtype)[:, ids]
    weight = torch.randn(64, 5, generator=gen, dtype=ctx.dtype)
    return {"x": x, "g": -g, "beta": beta, "weight": weight}


def mix(ctx: Context, leaves: Tensors) -> Tensor:
    """The convolution, then the op on its first 48 channels."""
    y = cp_gdn.causal_conv1d(leaves["x"], leaves["weight"], ctx=ctx)
    q, k, v = cp_gdn.packed_qkv_views(y[:, :48], (1, 1), (16, 16))
    return cp_gdn.chunk_gated_delta_rule(q, k, v, leaves["g"], leaves["beta"], ctx=ctx, use_qk_l2norm_in_kernel=True)[0]


def step(ctx: Context) -> Posted:
    leaves = {name: x.requires_grad_() for name, x in rows_of(ctx).items()}
    with ctx.comm.record() as messages:
        o = mix(ctx, leaves)
        grads = torch.autograd.grad((o * o).sum(), list(leaves.values()))
    named = dict(zip((f"d{name}" for name in leaves), grads, strict=True))
    return Posted({"o": o.detach(), **named}, messages)


PARTS: dict[str, Callable[[int], Partition]] = {
    "one document, zigzag": lambda world: partition([0, 200], world, "zigzag"),
    "a rank in the middle without tokens": lambda world: cut((1, 150, 2), world, "contiguous", align=100),
    "documents of few tokens": lambda world: cut((5, 0, 1, 2, 70), world, "zigzag_per_document"),
    "neighbours on one rank": lambda world: cut((130,), world, "explicit"),
    "every document ends on an edge": lambda world: partition([20 * r for r in range(world + 1)], world, "contiguous"),
}


@contextmanager
def watched(comm: Comm, counts: dict[str, int]) -> Iterator[None]:
    """Count what reaches the backend of a process group, and the handles waited for; nothing may go around it."""
    backends = getattr(comm._link, "_backends", {})
    real = dict(backends)

    class Work:
        def __init__(self, work: Any) -> None:
            self.work = work

        def wait(self, *args: Any) -> Any:
            counts["waited"] += 1
            return self.work.wait(*args)

    class Gloo:
        def send(self, tensors: list[Tensor], peer: int, tag: int) -> Work:
            return self.post("sent", tensors, peer, real["gloo"].send(tensors, peer, tag))

        def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Work:
            return self.post("received", tensors, peer, real["gloo"].recv(tensors, peer, tag))

        def post(self, name: str, tensors: list[Tensor], peer: int, work: Any) -> Work:
            assert peer != comm.rank
            assert tensors[0].numel() > 0
            counts[name] += 1
            return Work(work)

    try:
        if real:
            backends["gloo"] = Gloo()
        with patch.multiple(dist, **dict.fromkeys(("isend", "irecv", "batch_isend_irecv", "all_to_all_single"))):
            yield
    finally:
        backends.update(real)


def all_parts(rank: int, world: int, exchange: str) -> dict[str, tuple[Posted, dict[str, int]]]:
    comm, results = Comm(), {}
    for name, part in PARTS.items():
        counts = {"sent": 0, "received": 0, "waited": 0}
        ctx = make_context(comm, part(world), exchange)
        with watched(comm, counts):
            results[name] = (step(ctx), counts)
    comm.close()
    return results


@pytest.mark.parametrize("exchange", ["ring", "a2a"])
@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_lists_are_equal_on_both_ends_every_handle_is_waited_for_and_bits_are_the_twins(
    world: int, exchange: str
) -> None:
    got = pool.run(world, all_parts, exchange)
    for name, part in PARTS.items():
        expected = twin(world, lambda comm, p=part: step(make_context(comm, p(comm.size), exchange)))
        posted = [of_rank[name][0] for of_rank in got]
        assert_lists_match(posted)
        for rank, (ours, counts) in enumerate(of_rank[name] for of_rank in got):
            assert differences(ours.tensors, expected[rank].tensors) == [], (name, rank)
            assert ours.messages == expected[rank].messages
            sent, received = (sum(m.direction == way for m in ours.messages) for way in ("send", "recv"))
            assert counts == {"sent": sent, "received": received, "waited": sent + received}
        if name == "every document ends on an edge" or world == 1:
            assert [p.messages for p in posted] == [[]] * world


@pytest.mark.parametrize("world", [2, 3])
def test_a_state_and_a_history_of_one_size_to_one_peer_do_not_change_places(world: int) -> None:
    name = "one document, zigzag"
    got = [of_rank[name][0] for of_rank in pool.run(world, all_parts, "ring")]
    sizes = {(m.purpose, m.numel) for p in got for m in p.messages}
    assert {("STATE", 256), ("ADJOINT", 256), ("HALO", 256), ("HALO_GRAD", 256)} <= sizes
    (alone,) = twin(1, lambda comm: step(make_context(comm, PARTS[name](1), "ring")))
    whole = make_order(PARTS[name](world))
    for tensor in ("o", "dx", "dg", "dbeta"):
        torch.testing.assert_close(
            torch.cat([p.tensors[tensor] for p in got])[whole], alone.tensors[tensor], rtol=1e-9, atol=1e-11
        )
    total = sum(p.tensors["dweight"] for p in got)
    torch.testing.assert_close(total, alone.tensors["dweight"], rtol=1e-9, atol=1e-11)


def make_order(part: Partition) -> Tensor:
    return torch.cat([torch.tensor(part.token_ids(rank)) for rank in range(part.world_size)]).argsort()


# ---- groups that not all ranks join ----------------------------------------------------------------------------------

# Fragments of the members (0, 1): a state goes from the first to the second only; the first holds everything.
MEMBERS = {
    "one member sends nothing": [[(0, 0, 90)], [(0, 90, 40), (1, 0, 30)]],
    "one member without tokens": [[], [(0, 0, 130), (1, 0, 30)]],
    "nothing of a document where it is sent from": [[(0, 0, 90), (1, 0, 30)], [(0, 90, 40)]],
}


def members_part(name: str) -> Partition:
    return partition([0, 130, 160], 2, fragments=MEMBERS[name])


def in_a_subgroup(rank: int, world: int, name: str, exchange: str) -> Posted | None:
    """Ranks 1 and 3 of 4, the group new and nothing sent on it before."""
    group = dist.new_group([1, 3])
    if rank not in (1, 3):
        return None
    comm = Comm(group)
    result = step(make_context(comm, members_part(name), exchange))
    comm.close()
    return result


@pytest.mark.parametrize("exchange", ["ring", "a2a"])
@pytest.mark.parametrize("name", MEMBERS)
def test_a_subgroup_of_a_larger_world_has_the_bits_of_the_twin(name: str, exchange: str) -> None:
    got = [posted for posted in pool.run(4, in_a_subgroup, name, exchange) if posted is not None]
    expected = twin(2, lambda comm: step(make_context(comm, members_part(name), exchange)))
    assert_lists_match(got)
    for ours, theirs in zip(got, expected, strict=True):
        assert differences(ours.tensors, theirs.tensors) == []
        assert ours.messages == theirs.messages
        assert {m.peer for m in ours.messages} <= {0, 1}  # ranks inside the group


EDGES = [[(0, 0, 50)], [(1, 0, 40)], [], [(1, 40, 30), (2, 0, 20)]]


def on_the_edges(rank: int, world: int, exchange: str) -> Posted:
    """The first thing on a new group of all ranks: rank 0 has nothing to send, rank 2 owns no token."""
    comm = Comm(dist.new_group(list(range(world))))
    result = step(make_context(comm, partition([0, 50, 120, 140], world, fragments=EDGES), exchange))
    comm.close()
    return result


@pytest.mark.parametrize("exchange", ["ring", "a2a"])
def test_ranks_with_nothing_to_send_or_no_token_take_part_from_the_first_call_on(exchange: str) -> None:
    got = pool.run(4, on_the_edges, exchange)
    assert_lists_match(got)
    assert {m.purpose for p in got for m in p.messages} >= {"STATE", "ADJOINT", "HALO", "HALO_GRAD"}
    if exchange == "ring":
        assert [len(got[rank].messages) for rank in (0, 2)] == [0, 0]
