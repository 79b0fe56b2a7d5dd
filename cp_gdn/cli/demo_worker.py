"""One rank of the demo's training run, started by torchrun; rank 0 prints one line of JSON per step."""

import argparse
import itertools
import json
import sys
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import cp_gdn
from cp_gdn.cli.arguments import EXCHANGES, LAYOUTS
from cp_gdn.cli.demo_data import Pack, packs
from cp_gdn.cli.demo_model import HEADS, ByteModel, build_model
from cp_gdn.cli.ranks import start_group
from cp_gdn.loss import global_mean

IGNORED = -100
DTYPE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}
LEARNING_RATE = 4e-3
WARMUP_STEPS = 10
MAX_GRAD_NORM = 1.0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--layout", choices=LAYOUTS, required=True)
    parser.add_argument("--exchange", choices=EXCHANGES, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--backend", choices=("gloo", "nccl"), required=True)
    return parser.parse_args(argv)


def make_context(pack: Pack, comm: cp_gdn.Comm, model: ByteModel, args: argparse.Namespace) -> cp_gdn.Context:
    part = cp_gdn.partition(pack.cu_seqlens, comm.size, layout=args.layout)
    return cp_gdn.build_context(
        part,
        comm,
        device=next(model.parameters()).device,
        heads=HEADS,
        head_dims=model.head_dims,
        dtype=model.dtype,
        conv=model.conv,
        exchange=args.exchange,
    )


def loss_of(model: ByteModel, pack: Pack, ctx: cp_gdn.Context) -> tuple[Tensor, Tensor]:
    """This rank's share of the mean loss over the pack's trained tokens, to back-propagate, and the mean itself."""
    # Labels are shifted before the split: a fragment's last token is predicted against another rank's first.
    labels = cp_gdn.shift_labels(pack.tokens, pack.cu_seqlens, ignore_index=IGNORED)
    ids = cp_gdn.shard(pack.tokens[None].to(ctx.device), ctx, dim=1)
    labels = cp_gdn.shard(labels[None].to(ctx.device), ctx, dim=1)
    logits = model(ids, ctx)
    loss_sum = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
    trained = (labels != IGNORED).sum()
    return cp_gdn.token_mean_loss(loss_sum, trained, ctx.comm), global_mean(loss_sum, trained, ctx.comm)


def sum_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Add up every rank's partial gradients, in one message."""
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    flat = torch.cat([grad.flatten() for grad in grads])
    dist.all_reduce(flat)
    for grad, total in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(total.view_as(grad))


def train(args: argparse.Namespace, device: torch.device) -> None:
    comm = cp_gdn.Comm()
    model = build_model(args.seed, device)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARMUP_STEPS))
    for step, pack in enumerate(itertools.islice(packs(args.seed, args.tokens), args.steps)):
        start = time.perf_counter()
        ctx = make_context(pack, comm, model, args)
        share, loss = loss_of(model, pack, ctx)
        optimizer.zero_grad()
        share.backward()
        sum_gradients(parameters)
        nn.utils.clip_grad_norm_(parameters, MAX_GRAD_NORM)
        optimizer.step()
        schedule.step()
        row: dict[str, object] = {"step": step, "loss": loss.item(), "documents": len(pack.cu_seqlens) - 1}
        row |= {"dtype": DTYPE_NAMES[model.dtype], "backend": ctx.taken.kind, "backend_reason": ctx.taken.reason}
        row["tokens_per_s"] = round(args.tokens / (time.perf_counter() - start), 1)
        if comm.rank == 0:
            print(json.dumps(row), flush=True)
    comm.close()


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    device = start_group(args.backend, args.device, dist.get_node_local_rank())
    train(args, device)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
