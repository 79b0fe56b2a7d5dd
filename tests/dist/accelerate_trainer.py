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

    def __init__(self, count: int = ROWS) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

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


def make_trainer(case: Case, folder: str, **options: Any) -> Any:
    """A Trainer over a case's ranks; options: its own, and arguments of its TrainingArguments."""
    from transformers import Trainer, TrainingArguments

    sizes = {}
    if case.world > 1:
        sizes["parallelism_config"] = config_class(fsdp_plugin(case))(dp_shard_size=case.dp, cp_size=case.cp)
    own = {name: options.pop(name) for name in ("data_collator",) if name in options}
    arguments = TrainingArguments(
        output_dir=folder, use_cpu=True, report_to=[], disable_tqdm=True, logging_steps=1,
        per_device_train_batch_size=3, per_device_eval_batch_size=3, adam_epsilon=1e-5, save_strategy="no", seed=0,
        lr_scheduler_type="constant", max_grad_norm=1e9, **options, **sizes,
    )  # fmt: skip
    return Trainer(model=build(case.family), args=arguments, train_dataset=Rows(), eval_dataset=Rows(), **own)


def trained(rank: int, world: int, folder: str, packed: bool) -> dict[str, Any]:
    """Losses of every step, the loss of an evaluation, the weights, and the batches that were packed."""
    case, collator = Case(cp=world), PaddingFree() if packed else None
    with environment(case, rank):
        trainer = make_trainer(
            case,
            folder,
            data_collator=collator,
            gradient_accumulation_steps=1 if packed else 2,
            max_steps=3,
            learning_rate=1e-3,
        )
        trainer.train()
        evaluated = float(trainer.evaluate()["eval_loss"]) if splits_evaluations() else 0.0
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        weights = {name: whole(parameter) for name, parameter in trainer.model.named_parameters()}
    seen = collator.seen[:3] if collator else []
    return {"losses": losses, "evaluated": evaluated, "weights": weights, "seen": seen}


def predicted(rank: int, world: int, folder: str, dp: int, count: int) -> tuple[Any, Any]:
    """What `predict` gives of rows with labels, and of rows without them on whole sequences."""
    from cp_gdn import unsharded

    case = Case(dp=dp, cp=world // dp)
    with environment(case, rank):
        trainer = make_trainer(case, folder, max_steps=1, learning_rate=0.0)
        trainer.train()
        labelled = trainer.predict(Rows(count))
        with unsharded(trainer.model):
            return labelled, trainer.predict([{"input_ids": Rows()[index]["input_ids"]} for index in range(count)])


def splits_evaluations() -> bool:
    """Whether this release of Trainer splits rows in an evaluation."""
    from transformers import Trainer

    return "_prepare_context_parallel_inputs" in inspect.getsource(Trainer.prediction_step)


def packed_alone(_rank: int, _world: int, batches: list[dict[str, Tensor]]) -> Run:
    return train_alone(Case(), [[batch] for batch in batches])
