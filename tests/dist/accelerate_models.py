"""What becomes of models that users compile or train in bf16, and of the loss of every single token, on a few ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from cp_gdn.integrations.seat import seat_of
from tests.dist.accelerate_world import accelerator_of, whole
from tests.dist.hybrid_models import (
    IGNORED,
    Case,
    batches_of,
    build,
    documents,
    make_batch,
    make_optimizer,
    trained_of,
)

PATIENCE = 120.0  # s: compilers take their time, and not the same on every rank
COMPILER = "aot_eager"
Found = list[str]


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Reasons why graphs broke inside, filled in at the end; nothing that was compiled before or inside is kept."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    breaks: Counter[str] = Counter()
    try:
        yield breaks
    finally:
        breaks.update(counters["graph_break"])
        torch._dynamo.reset()


def differing(got: dict[str, Tensor], want: dict[str, Tensor], limit: float) -> Found:
    """Names of what differs by more than `limit`, relative L2."""
    assert got.keys() == want.keys()
    return [name for name in want if (got[name] - want[name]).norm() > limit * want[name].norm()]


def compiled(rank: int, _world: int, case: Case) -> tuple[Found, Counter[str], int]:
    """What a hybrid model that `prepare` compiled trains otherwise than an eager one; why its graphs broke how often;
    how many plans were made inside the forward."""
    with counted() as breaks:
        (got, late), (want, _) = (train_hybrid(replace(case, compiler=name), rank) for name in (COMPILER, ""))
    return differing(got, want, 1e-5), breaks, late


def train_hybrid(case: Case, rank: int) -> tuple[dict[str, Tensor], int]:
    """Loss and gradients of a model with a layer of each kind, and how many plans were made inside the forward."""
    import cp_gdn.accelerate as plugin

    with accelerator_of(case, rank) as accelerator:
        plugin.enable(accelerator, timeout=PATIENCE)
        model = build(case.family, num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])
        model, _ = accelerator.prepare(model, make_optimizer(model))
        seat = seat_of(model)
        (batch,) = batches_of(case, 0, 0)
        with plugin.shard(accelerator, batch):
            planned = len(seat.pack.contexts)
            loss = plugin.token_mean_loss(accelerator, model, batch)
            late = len(seat.pack.contexts) - planned
            accelerator.backward(loss)
        found = {name: whole(parameter.grad) for name, parameter in trained_of(model).items()}
    return {"loss": loss.detach(), **found}, late


def token_losses(rank: int, _world: int, cases: list[Case]) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Per case the tokens of this rank, by their place in the whole batch, their labels and their losses.

    And the losses of all tokens, as a metric gets them.
    """
    import cp_gdn.accelerate as plugin

    found = []
    for case in cases:
        with accelerator_of(case, rank) as accelerator:
            plugin.enable(accelerator, layout=case.layout)
            model = build(case.family)
            model, _ = accelerator.prepare(model, make_optimizer(model))
            batch = make_batch(case, 0, 0, 0)
            with plugin.shard(accelerator, batch), torch.no_grad():
                logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits
                place, labels = seat_of(model).pack.token_ids, batch["shift_labels"].flatten()
            losses = F.cross_entropy(logits.flatten(0, 1), labels, reduction="none")
            found.append((place, labels, losses, accelerator.gather_for_metrics(losses[None])))
    return found


@torch.no_grad()
def token_losses_alone(_rank: int, _world: int, case: Case) -> tuple[Tensor, Tensor]:
    """Labels and losses of all tokens of the batch, of one document after the other."""
    model, labels, losses = build(case.family), [], []
    for ids, own in documents(make_batch(case, 0, 0, 0)):
        labels.append(F.pad(own[0, 1:], (0, 1), value=IGNORED))
        losses.append(F.cross_entropy(model(input_ids=ids).logits[0], labels[-1], reduction="none"))
    return torch.cat(labels), torch.cat(losses)


def by_buffers(rank: int, _world: int, case: Case) -> float:
    """The loss of a row in a loop that knows Accelerate's context parallelism only; cp_gdn is enabled."""
    import cp_gdn.accelerate as plugin

    with accelerator_of(case, rank) as accelerator, torch.no_grad():
        plugin.enable(accelerator)
        model = build(case.family)
        model, _ = accelerator.prepare(model, make_optimizer(model))
        (batch,) = batches_of(case, 0, 0)
        ids, labels = batch["input_ids"], F.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED)
        count, positions = (labels != IGNORED).sum(), torch.arange(ids.shape[1])[None]
        buffers = [ids, labels, positions]
        with accelerator.maybe_context_parallel(buffers, [1, 1, 1], set(buffers)):
            inputs = {"input_ids": ids, "labels": labels, "shift_labels": labels, "position_ids": positions}
            return float(accelerator.reduce(model(**inputs, num_items_in_batch=count).loss, "sum"))


def gate_dtypes(rank: int, _world: int, case: Case) -> dict[str, set[torch.dtype]]:
    """Dtypes of A_log of a Gated DeltaNet layer in a step: in the layer's forward, of its weight, gradient and Adam."""
    import cp_gdn.accelerate as plugin

    seen: dict[str, set[torch.dtype]] = {"forward": set()}
    with accelerator_of(case, rank) as accelerator:
        plugin.enable(accelerator)
        model = build(case.family)
        model, optimizer = accelerator.prepare(model, make_optimizer(model))
        layer = model.model.layers[0].linear_attn

        def look(module: Any, _args: Any) -> None:
            seen["forward"].update({module.A_log.dtype, module.dt_bias.dtype})

        layer.register_forward_pre_hook(look)
        batch = make_batch(case, 0, 0, 0)
        with plugin.shard(accelerator, batch):
            accelerator.backward(plugin.token_mean_loss(accelerator, model, batch))
        optimizer.step()
        seen["weight"], seen["gradient"] = {layer.A_log.dtype}, {layer.A_log.grad.dtype}
        seen["adam"] = {x.dtype for x in optimizer.state[layer.A_log].values() if x.dim()}
    return seen


def one_graph(_rank: int, _world: int, family: str) -> tuple[Found, Counter[str]]:
    """What a compiled model without softmax attention trains otherwise than an eager one, and why its graphs broke."""
    from cp_gdn import Comm

    comm = Comm(timeout=PATIENCE)
    try:
        with counted() as breaks:
            got, want = (train_linear(family, comm, compiler) for compiler in (COMPILER, ""))
        return differing(got, want, 0.0), breaks
    finally:
        comm.close()


def train_linear(family: str, comm: Any, compiler: str) -> dict[str, Tensor]:
    """Losses and weights of two steps of a model whose one layer is a Gated DeltaNet, on this rank's tokens."""
    from cp_gdn.integrations.transformers import take_over

    case = Case(family=family, rows=2)
    model = build(family, num_hidden_layers=1, layer_types=["linear_attention"])
    seat = take_over(model, comm, on_one_rank=True).seat
    optimizer = make_optimizer(model)
    run = torch.compile(model, backend=compiler, fullgraph=True) if compiler else model
    losses = []
    for step in range(2):
        (batch,) = batches_of(case, step, 0)
        with seat.hold(seat.rows(*batch["input_ids"].shape)) as pack:
            ids, labels = pack.local(batch["input_ids"]), pack.local(batch["labels"])
            loss = run(input_ids=ids, labels=labels, shift_labels=labels, position_ids=pack.positions).loss
            loss.backward()
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": torch.stack(losses)} | {name: x.detach() for name, x in trained_of(model).items()}
