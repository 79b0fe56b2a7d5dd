"""`Trainer` and a script of somebody else on a few ranks, and on one."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from tests.dist.accelerate_world import config_class, environment, fsdp_plugin, whole
from tests.dist.hybrid_models import LENGTH, VOCAB, Case, Run, build, train_alone

ROWS = 12  # full batches only: Trainer weighs a last, smaller one differently under context parallelism
DOCUMENTS = (0, 37, 38, 80)


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Fixed rows of one length, of which the first tokens are not trained: ranks train unequal numbers of them."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.randint(VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(index))
        labels = ids.clone()
        labels[: 11 + 17 * (index % 4)] = -100
        return {"input_ids": ids, "labels": labels}


@dataclass
class PaddingFree:
    """Makes one row of documents of a few rows' first tokens, as a padding-free collator does, and remembers it."""

    seen: list[dict[str, Any]] = field(default_factory=list)

    def __call__(self, rows: list[dict[str, Tensor]]) -> dict[str, Any]:
        lengths = [b - a for a, b in pairwise(DOCUMENTS)]
        ids = torch.cat([row["input_ids"][:n] for row, n in zip(rows, lengths, strict=True)])[None]
        bounds, labels = torch.tensor(DOCUMENTS, dtype=torch.int32), ids.clone()
        labels[:, bounds[:-1].long()] = -100
        self.seen.append({"input_ids": ids, "labels": labels, "cu_seq_lens_q": bounds})
        positions = torch.cat([torch.arange(n) for n in lengths])[None]
        others = {"cu_seq_lens_k": bounds, "max_length_q": max(lengths), "max_length_k": max(lengths)}
        return {**self.seen[-1], "position_ids": positions, **others}


def trained(rank: int, world: int, folder: str, packed: bool) -> dict[str, Any]:
    """Losses of every step, the loss of an evaluation, the weights, and the batches that were packed."""
    from transformers import Trainer, TrainingArguments

    case = Case(cp=world)
    rows, steps, collator = (3, 1, PaddingFree()) if packed else (3, 2, None)
    with environment(case, rank):
        sizes = {} if world == 1 else {"parallelism_config": config_class(fsdp_plugin(case))(cp_size=world)}
        arguments = TrainingArguments(
            output_dir=folder, use_cpu=True, report_to=[], disable_tqdm=True, logging_steps=1, max_steps=3,
            per_device_train_batch_size=rows, per_device_eval_batch_size=rows, gradient_accumulation_steps=steps,
            learning_rate=1e-3, adam_epsilon=1e-5, save_strategy="no", seed=0, lr_scheduler_type="constant",
            max_grad_norm=1e9, **sizes,
        )  # fmt: skip
        model = build(case.family)
        trainer = Trainer(
            model=model, args=arguments, train_dataset=Rows(), eval_dataset=Rows(), data_collator=collator
        )
        trainer.train()
        evaluated = evaluate(trainer)
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        weights = {name: whole(parameter) for name, parameter in trainer.model.named_parameters()}
    seen = collator.seen[:3] if collator else []
    return {"losses": losses, "evaluated": evaluated, "weights": weights, "seen": seen}


def evaluate(trainer: Any) -> float:
    """The loss of an evaluation, 0 where this release of Trainer does not split rows there: then it is no such loss."""
    from transformers import Trainer

    splits = "_prepare_context_parallel_inputs" in inspect.getsource(Trainer.prediction_step)
    return float(trainer.evaluate()["eval_loss"]) if splits else 0.0


def packed_alone(_rank: int, _world: int, batches: list[dict[str, Tensor]]) -> Run:
    return train_alone(Case(), [[batch] for batch in batches])
