"""One rank fails, dies or stays away: every other rank ends in time, with that rank's number and reason."""

import os
import re
import time
from collections.abc import Callable

import pytest
import torch

from cp_gdn.comm import Batch, Comm, CommFailed
from tests.dist import pool
from tests.dist.round_trips import CPU

pytestmark = pytest.mark.dist
CULPRIT = 1
TIMEOUT = 4.0  # s; a dead rank breaks a message at once, in an agreement it is missed after this


def ring(comm: Comm) -> None:
    """Wait for the rank before: only one of the others waits for the culprit itself, the next one for that one."""
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    x = torch.ones(4)
    if comm.rank != CULPRIT:
        got = comm.post(Batch(purpose="STATE", sends=(), recvs=((before, (4,)),), dtype=x.dtype, device=CPU)).wait()
        x = got[0] + 1
    comm.post(Batch(purpose="STATE", sends=((after, x),), recvs=(), dtype=x.dtype, device=CPU)).wait()


def all_to_all(comm: Comm) -> None:
    comm.all_to_all("SUMMARY", torch.ones(comm.size), [1] * comm.size, [1] * comm.size).wait()


def all_gather(comm: Comm) -> None:
    comm.all_gather("ROWS", torch.ones(2, 3), [2] * comm.size)


def agree(comm: Comm) -> None:
    comm.agree("context", {"layout": "zigzag"})


CALLS: dict[str, Callable[[Comm], None]] = {f.__name__: f for f in (ring, all_to_all, all_gather, agree)}


def call_and_check(comm: Comm, name: str) -> None:
    """Make the call; if it fails, see that every later call is refused with the same reason."""
    try:
        CALLS[name](comm)
    except CommFailed as error:
        reason = str(error)
        for refused in (*CALLS.values(), lambda comm: comm.guard("forward").__enter__()):
            with pytest.raises(CommFailed, match=re.escape(reason)):
                refused(comm)
        raise


def one_rank_ends(rank: int, world: int, name: str, end: str) -> None:
    comm = Comm()
    comm._timeout = TIMEOUT  # from here on: making it may take longer where many processes start
    call_and_check(comm, name if name != "ring" else "all_gather")  # all is well at first
    with comm.guard("forward"):
        if rank == CULPRIT:
            time.sleep(0.5)  # the others are inside the call by then
            if end == "killed":
                os._exit(9)
            raise ValueError("a wrong dtype")
        call_and_check(comm, name)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("end", ["raises", "killed"])
def test_the_others_name_the_rank_and_its_reason(name: str, end: str) -> None:
    outcomes = pool.run_failing(4, one_rank_ends, name, end)
    reason = "forward: ValueError: a wrong dtype" if end == "raises" else "rank 1 gave no sign of life for 3 s"
    assert outcomes[CULPRIT].name == ("ValueError" if end == "raises" else "killed")
    for rank in (0, 2, 3):
        assert outcomes[rank].name == "CommFailed", outcomes[rank]
        assert f"by rank {CULPRIT}: {reason}" in outcomes[rank].text
    assert len({outcomes[rank].text for rank in (0, 2, 3)}) == 1


def fail_with_messages_under_way(rank: int, world: int) -> None:
    """The culprit has posted and not waited, and holds on to that: it must not keep the others waiting."""
    comm = Comm()
    keep = []
    try:
        with comm.guard("backward"):
            if rank != CULPRIT:
                all_to_all(comm)
            for peer in range(world):
                if peer != rank:
                    batch = Batch(purpose="B", sends=(), recvs=((peer, (3,)),), dtype=torch.float32, device=CPU)
                    keep.append(comm.post(batch))
            raise RuntimeError("out of memory")
    except RuntimeError:
        if rank == CULPRIT:
            time.sleep(8.0)
        raise


def test_messages_under_way_on_the_failing_rank_keep_nobody_waiting() -> None:
    outcomes = pool.run_failing(3, fail_with_messages_under_way)
    assert [o.name for o in outcomes] == ["CommFailed", "RuntimeError", "CommFailed"]
    for rank in (0, 2):
        assert "by rank 1: backward: RuntimeError: out of memory" in outcomes[rank].text
        assert outcomes[rank].seconds < outcomes[CULPRIT].seconds - 3


def one_rank_is_slow(rank: int, world: int, name: str) -> None:
    comm = Comm()
    comm._timeout = 1.5
    if rank == CULPRIT:
        time.sleep(5.0)
    call_and_check(comm, name)


@pytest.mark.parametrize("name", CALLS)
def test_a_slow_rank_is_named_with_the_way_to_give_it_time(name: str) -> None:
    """On itself too, when it arrives; and by those that wait for one that waits for it."""
    for outcome in pool.run_failing(4, one_rank_is_slow, name):
        assert outcome.name == "CommFailed", outcome
        assert "by rank 1: rank 1 did not arrive within 1.5 s" in outcome.text
        assert "Comm(group, timeout=...)" in outcome.text


def only_some_make_a_comm(rank: int, world: int) -> None:
    if rank == CULPRIT:
        os._exit(9)
    Comm(timeout=TIMEOUT)


def test_a_rank_that_dies_before_its_comm_is_named() -> None:
    outcomes = pool.run_failing(3, only_some_make_a_comm)
    assert outcomes[CULPRIT].name == "killed"
    for rank in (0, 2):
        assert outcomes[rank].name == "CommFailed", outcomes[rank]
        assert "by rank 1: rank 1 gave no sign of life" in outcomes[rank].text


def two_ranks_fail(rank: int, world: int) -> None:
    comm = Comm()
    with comm.guard("forward"):
        if rank < 2:
            time.sleep(rank)
            raise ValueError(f"reason of rank {rank}")
        all_gather(comm)


def test_only_the_first_failure_counts() -> None:
    outcomes = pool.run_failing(4, two_ranks_fail)
    assert [o.name for o in outcomes] == ["ValueError", "ValueError", "CommFailed", "CommFailed"]
    assert all("by rank 0: forward: ValueError: reason of rank 0" in outcomes[rank].text for rank in (2, 3))


def fail_while_a_peer_computes(rank: int, world: int) -> float:
    """Rank 2 waits for rank 0, which computes and has no wait that could break: its monitor must wake rank 2."""
    comm = Comm()
    start = time.monotonic()
    if rank == CULPRIT:
        comm.fail("stopped on purpose")
    elif rank == 0:
        time.sleep(8.0)
    else:
        batch = Batch(purpose="STATE", sends=(), recvs=((0, (1,)),), dtype=torch.float32, device=CPU)
        with pytest.raises(CommFailed, match="by rank 1: stopped on purpose"):
            comm.post(batch).wait()
    return time.monotonic() - start


def test_a_rank_that_waits_for_one_that_computes_hears_of_a_failure_at_once() -> None:
    outcomes = pool.run_failing(3, fail_while_a_peer_computes)
    assert [o.name for o in outcomes] == ["returned"] * 3, outcomes
    assert outcomes[2].value < outcomes[0].value


def fail_and_try_again(rank: int, world: int) -> list[float]:
    """A failure ends a Comm, not the group: the user's group still works, and so does a new Comm on it."""
    comm = Comm()
    if rank == CULPRIT:
        comm.fail("stopped on purpose")
    else:
        with pytest.raises(CommFailed):
            all_gather(comm)
    x = torch.ones(1)
    torch.distributed.all_reduce(x)
    second = Comm()
    y = second.all_reduce_sum("SUM", torch.ones(1))
    second.close()
    return [x.item(), y.item()]


def test_the_users_group_outlives_a_failure() -> None:
    assert pool.run(3, fail_and_try_again) == [[3.0, 3.0]] * 3
