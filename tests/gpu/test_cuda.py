"""The torch backend on one CUDA device: against fp64, by bits between exchanges, and without a synchronizing call."""

import pytest
import torch

import cp_gdn
from cp_gdn.reference import gated_delta_rule

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

LENGTHS = (300, 0, 64, 5, 700, 37)
HEADS, DIMS = (2, 4), (32, 48)
NAMES = ("o", "final_state", "dq", "dk", "dv", "dg", "dbeta", "dinitial_state")
LAYOUTS = ("contiguous", "zigzag", "zigzag_per_document")
BOUNDS = [0, *torch.tensor(LENGTHS).cumsum(0).tolist()]


def inputs(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    gen, tokens, docs = torch.Generator().manual_seed(3), sum(LENGTHS), len(LENGTHS)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=gen, dtype=torch.float64)

    state = (docs, HEADS[1], *DIMS)
    tensors = {
        "q": torch.nn.functional.normalize(normal(tokens, HEADS[0], DIMS[0]), dim=-1),
        "k": torch.nn.functional.normalize(normal(tokens, HEADS[0], DIMS[0]), dim=-1),
        "v": normal(tokens, HEADS[1], DIMS[1]),
        "g": -torch.nn.functional.softplus(normal(tokens, HEADS[1]) - 3),
        "beta": normal(tokens, HEADS[1]).sigmoid(),
        "initial_state": normal(*state),
        "dout": normal(tokens, HEADS[1], DIMS[1]),
        "dfinal": normal(*state),
    }
    return {name: x.to("cuda", dtype) for name, x in tensors.items()}


def run_rank(comm: cp_gdn.Comm, x: dict[str, torch.Tensor], layout: str, **asked: object) -> dict[str, torch.Tensor]:
    """One rank's outputs and gradients, scattered into global tensors (zeros where another rank owns them)."""
    align = 64 if str(asked.get("segments", "")).startswith("grid") else 1
    part = cp_gdn.partition(BOUNDS, comm.size, layout, align=align)
    ctx = cp_gdn.build_context(part, comm, device="cuda", heads=HEADS, head_dims=DIMS, dtype=x["q"].dtype, **asked)  # type: ignore[arg-type]
    rows, entry, exit_ = ctx.token_ids, list(ctx.entry_docs), list(ctx.exit_docs)
    tokens = [x[n][rows] for n in ("q", "k", "v", "g", "beta")]
    o, final, saved = cp_gdn.forward(*tokens, ctx=ctx, initial_state=x["initial_state"][entry], output_final_state=True)
    grads = cp_gdn.backward(x["dout"][rows], x["dfinal"][exit_], saved, ctx=ctx)
    places = (rows, exit_, rows, rows, rows, rows, rows, entry)
    values = (o, final, grads.q, grads.k, grads.v, grads.g, grads.beta, grads.initial_state)
    shapes = ("v", "dfinal", "q", "k", "v", "g", "beta", "initial_state")
    found = {}
    for name, place, value, like in zip(NAMES, places, values, shapes, strict=True):
        assert value is not None
        found[name] = torch.zeros_like(x[like])
        found[name][place] = value
    return found


def run_twin(world: int, x: dict[str, torch.Tensor], layout: str, **asked: object) -> dict[str, torch.Tensor]:
    ranks = cp_gdn.twin(world, lambda comm: run_rank(comm, x, layout, **asked))
    return {name: sum(r[name] for r in ranks) for name in NAMES}  # type: ignore[misc]


def oracle(x: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    leaves = [x[n].double().cpu().requires_grad_() for n in ("q", "k", "v", "g", "beta", "initial_state")]
    o, final = gated_delta_rule(*leaves[:5], BOUNDS, initial_state=leaves[5])
    loss = (o * x["dout"].double().cpu()).sum() + (final * x["dfinal"].double().cpu()).sum()
    return dict(zip(NAMES, (o.detach(), final.detach(), *torch.autograd.grad(loss, leaves)), strict=True))


def relative_error_per_head(got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest relative L2 error over heads; dim 1 of every tensor here is the head."""
    got, want = (t.double().cpu().transpose(0, 1).flatten(1) for t in (got, want))
    return float(((got - want).norm(dim=1) / want.norm(dim=1)).max())


def test_every_output_and_gradient_matches_the_fp64_oracle_per_head() -> None:
    for dtype, budget, gate_budget in ((torch.float64, 1e-10, 1e-8), (torch.float32, 1e-5, 1e-4)):
        x = inputs(dtype)
        want = oracle(x)
        for world, segments in ((1, 1), (1, 3), (4, 2)):
            got = run_twin(world, x, "zigzag_per_document", segments=segments)
            errors = {name: relative_error_per_head(got[name], want[name]) for name in NAMES}
            over = {n: e for n, e in errors.items() if not e <= (gate_budget if n == "dg" else budget)}
            assert not over, (dtype, world, segments, over)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("segments", [1, 3, "grid:1"])
def test_ring_and_all_to_all_have_the_same_bits(layout: str, segments: object) -> None:
    x = inputs(torch.float32)
    ring, a2a = (run_twin(4, x, layout, segments=segments, exchange=e) for e in ("ring", "a2a"))
    for name in NAMES:
        assert torch.equal(ring[name], a2a[name]), name


def test_tables_on_the_device_equal_those_built_on_the_cpu() -> None:
    part = cp_gdn.partition(BOUNDS, 1)
    schedules = [
        cp_gdn.build_context(part, cp_gdn.Comm.alone(), device=d, heads=HEADS, head_dims=DIMS).schedule
        for d in ("cpu", "cuda")
    ]
    for name in ("rows", "back", "token_ids", "positions"):
        cpu, cuda = (getattr(s, name) for s in schedules)
        assert cuda.is_cuda
        assert torch.equal(cpu, cuda.cpu()), name


def test_a_whole_step_makes_no_synchronizing_call() -> None:
    x = inputs(torch.float32)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        part = cp_gdn.partition(BOUNDS, 1)
        asked = {"device": "cuda", "heads": HEADS, "head_dims": DIMS, "dtype": torch.float32, "segments": 2}
        ctx = cp_gdn.build_context(part, cp_gdn.Comm.alone(), **asked)  # type: ignore[arg-type]
        tokens = [x[n].clone().requires_grad_() for n in ("q", "k", "v", "g", "beta")]
        o, _ = cp_gdn.chunk_gated_delta_rule(*tokens, ctx=ctx, use_qk_l2norm_in_kernel=True)
        o.backward(x["dout"])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(t.grad is not None and t.grad.isfinite().all() for t in tokens)


def test_tf32_switches_change_no_bit_and_are_restored() -> None:
    x = inputs(torch.float32)
    plain = run_twin(1, x, "contiguous", segments=2)
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        switched = run_twin(1, x, "contiguous", segments=2)
        assert torch.backends.cuda.matmul.allow_tf32
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    for name in NAMES:
        assert torch.equal(plain[name], switched[name]), name
