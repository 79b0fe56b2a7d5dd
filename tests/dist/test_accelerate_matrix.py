"""Every family with every split of ranks, and both with every kind of batch.

In fp64 where nothing is recomputed, else in fp32.
Forty runs, some four minutes: CP_GDN_SLOW_TESTS=1, which launch/test_versions sets; `test_accelerate.py` has a few.
"""

from __future__ import annotations

import os
from itertools import product

import pytest
import torch
from torch import Tensor

from tests.dist import pool
from tests.dist.accelerate_world import together
from tests.dist.hybrid_models import FAMILIES, Case, alone
from tests.dist.test_accelerate import error
from tests.gdn_layers import needs

pytest.importorskip("accelerate")
pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(os.environ.get("CP_GDN_SLOW_TESTS") != "1", reason="slow; launch/test_versions runs it"),
]

SPLITS = ((1, 1), (1, 2), (2, 2), (1, 4))
"""dp and cp."""
BATCHES = ({"rows": 1}, {"rows": 3}, {"rows": 0}, {"rows": 0, "layout": "zigzag"})
CHECKPOINTING = ("", "fsdp", "model")
LIMIT, GATES_LIMIT = 1e-5, 5e-5
"""Relative L2 in fp32. What A_log and dt_bias get are sums over all tokens, in which most cancels."""


def make_cases() -> list[Case]:
    """Families and splits, each with each and two of the batches; checkpointing, accumulation and labels in turn."""
    cases = []
    for number, (family, (dp, cp), half) in enumerate(product(FAMILIES, SPLITS, (0, 1))):
        odd = (number // 2 + number // 8) % 2  # the other two batches in the next split, and in the next family
        batch = BATCHES[odd + 2 * half]
        turn = number + number // len(BATCHES)  # another one for a batch in every split
        checkpointing = CHECKPOINTING[turn % 3]
        case = Case(
            family=family,
            dp=dp,
            cp=cp,
            checkpointing=checkpointing,
            accumulate=(1, 3)[turn // 3 % 2],
            labels=("unequal", "all")[turn // 6 % 2],
            precision="no" if checkpointing else "fp64",
            options={"on_one_rank": True},
            **batch,
        )
        cases.append(case)
    return cases


def name_of(case: Case) -> str:
    batch = f"{case.rows} rows" if case.rows else f"packed {case.layout}"
    more = [case.checkpointing and f"checkpointed by {case.checkpointing}", f"accumulate {case.accumulate}"]
    return ", ".join([case.family, f"dp {case.dp}", f"cp {case.cp}", batch, *filter(None, more), case.precision])


CASES = [pytest.param(case, marks=needs(case.family), id=name_of(case)) for case in make_cases()]


@pytest.mark.parametrize("case", CASES)
def test_losses_gradients_and_weights_of_every_rank_are_those_of_one_process(case: Case) -> None:
    (want,) = pool.run(1, alone, case, timeout=180)
    exact = case.precision == "fp64"
    for (got,) in pool.run(case.world, together, [case], timeout=300):
        assert got.losses == pytest.approx(want.losses, rel=1e-12 if exact else LIMIT)
        assert got.norms == pytest.approx(want.norms, rel=1e-12 if exact else LIMIT)
        assert_close(got.grads, want.grads, exact)
        assert_close(got.weights, want.weights, exact)


def assert_close(got: dict[str, Tensor], want: dict[str, Tensor], exact: bool) -> None:
    assert got.keys() == want.keys()
    for name in want:
        if exact:
            torch.testing.assert_close(got[name], want[name], rtol=1e-9, atol=1e-9, msg=name)
        else:
            limit = GATES_LIMIT if name.endswith(("A_log", "dt_bias")) else LIMIT
            assert error(got[name], want[name]) < limit, name
