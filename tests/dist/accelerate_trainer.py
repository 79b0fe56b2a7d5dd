"""`Trainer` and a script of somebody else on a few ranks, and on one."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from tests.dist.accelerate_world import config_class, environment, fsdp_plugin, whole
from tests.dist.hybrid_models import BOUNDS, LENGTH, VOCAB, Case, build

ROWS = 8


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Fixed rows of one length; every second one trains only its second half."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.randint(VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(index))
        labels = ids.clone()
        labels[: LENGTH // 2 * (index % 2)] = -100
        return {"input_ids": ids, "labels": labels}


def packed(rows: list[dict[str, Tensor]]) -> dict[str, Any]:
    """One row of documents as a padding-free collator makes it; rows are cut to the documents' lengths."""
    lengths = [b - a for a, b in pairwise(BOUNDS)]
    ids = torch.cat([row["input_ids"][:n] for row, n in zip(rows, lengths, strict=True)])[None, :128]
    bounds = torch.tensor([*BOUNDS[:-1], 128], dtype=torch.int32)
    labels = ids.clone()
    labels[:, bounds[:-1].long()] = -100
    positions = torch.cat([torch.arange(b - a) for a, b in pairwise(bounds.tolist())])[None]
    longest = int(bounds.diff().max())
    return {
        "input_ids": ids, "labels": labels, "position_ids": positions,
        "cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest,
    }  # fmt: skip


def trained(rank: int, world: int, folder: str, **changes: Any) -> dict[str, Any]:
    """Losses of every step, the loss of an evaluation, and the weights."""
    from transformers import Trainer, TrainingArguments

    case = Case(cp=world)
    with environment(case, rank):
        sizes = {} if world == 1 else {"parallelism_config": config_class(fsdp_plugin(case))(cp_size=world)}
        arguments = TrainingArguments(
            output_dir=folder, use_cpu=True, report_to=[], disable_tqdm=True, logging_steps=1, max_steps=4,
            per_device_train_batch_size=2, per_device_eval_batch_size=2, gradient_accumulation_steps=2,
            learning_rate=1e-3, adam_epsilon=1e-5, save_strategy="no", seed=0, lr_scheduler_type="constant",
            **sizes, **changes,
        )  # fmt: skip
        model = build(case.family)
        trainer = Trainer(model=model, args=arguments, train_dataset=Rows(), eval_dataset=Rows())
        trainer.train()
        evaluated = trainer.evaluate()["eval_loss"]
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        weights = {name: whole(parameter) for name, parameter in trainer.model.named_parameters()}
    return {"losses": losses, "evaluated": evaluated, "weights": weights}
