"""Two GPUs through NCCL: the same bits as gloo beside the GPUs and as the twin, the convolution's halo included."""

import os
import tempfile

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import cp_gdn
from tests.gpu.test_cuda import BOUNDS, LAYOUTS, NAMES, inputs, run_rank, run_twin

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")]

CASES = [
    (layout, exchange, segments) for layout in LAYOUTS for exchange in ("ring", "a2a") for segments in (2, "grid:1")
]


def _conv(comm: cp_gdn.Comm, layout: str) -> list[torch.Tensor]:
    part = cp_gdn.partition(BOUNDS, comm.size, layout)
    ctx = cp_gdn.build_context(
        part, comm, device="cuda", heads=(1, 1), head_dims=(16, 16), dtype=torch.float32, conv=(96, 4)
    )
    gen = torch.Generator().manual_seed(1)
    x, dy = (torch.randn(BOUNDS[-1], 96, generator=gen).cuda()[ctx.token_ids] for _ in range(2))
    weight = torch.randn(96, 4, generator=gen).cuda()
    x.requires_grad_()
    y = cp_gdn.causal_conv1d(x, weight, None, ctx=ctx, activation="silu")
    y.backward(dy)
    assert x.grad is not None
    return [y.detach(), x.grad]


def _worker(rank: int, backend: str, folder: str) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method=f"file://{folder}/{backend}", rank=rank, world_size=2)
    comm = cp_gdn.Comm(dist.group.WORLD)
    x = inputs(torch.float32)
    found = {case: run_rank(comm, x, case[0], exchange=case[1], segments=case[2]) for case in CASES}
    conv = {layout: _conv(comm, layout) for layout in LAYOUTS}
    cpu = [{n: t.cpu() for n, t in found[case].items()} for case in CASES]
    torch.save((cpu, {k: [t.cpu() for t in v] for k, v in conv.items()}), f"{folder}/{backend}-{rank}.pt")
    comm.close()
    dist.destroy_process_group()


def _processes(backend: str, folder: str) -> tuple[list[dict[str, torch.Tensor]], list[dict[str, list[torch.Tensor]]]]:
    """Global tensors per case (the sum over ranks of what each scattered), and the convolution per rank."""
    mp.spawn(_worker, (backend, folder), nprocs=2)
    ranks = [torch.load(os.path.join(folder, f"{backend}-{r}.pt")) for r in range(2)]
    cases = [{n: ranks[0][0][i][n] + ranks[1][0][i][n] for n in NAMES} for i in range(len(CASES))]
    return cases, [r[1] for r in ranks]


def test_nccl_gloo_and_the_twin_have_the_same_bits() -> None:
    x = inputs(torch.float32)
    with tempfile.TemporaryDirectory() as folder:
        (nccl, nccl_conv), (gloo, gloo_conv) = _processes("nccl", folder), _processes("gloo", folder)
    for i, (layout, exchange, segments) in enumerate(CASES):
        twin = run_twin(2, x, layout, exchange=exchange, segments=segments)
        for name in NAMES:
            assert torch.equal(nccl[i][name], gloo[i][name]), (CASES[i], name, "nccl != gloo")
            assert torch.equal(nccl[i][name], twin[name].cpu()), (CASES[i], name, "nccl != twin")
    for rank in range(2):
        for layout in LAYOUTS:
            for a, b in zip(nccl_conv[rank][layout], gloo_conv[rank][layout], strict=True):
                assert torch.equal(a, b), (layout, "convolution")
