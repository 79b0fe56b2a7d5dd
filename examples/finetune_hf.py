"""Train a small Qwen3-Next or Qwen3.5 with the sequence split over ranks, in a training loop of one's own.

    accelerate launch --config_file YAML examples/finetune_hf.py --packed
    accelerate launch --config_file YAML examples/finetune_hf.py --resume example-output/step-10

The YAML says how many ranks a sequence is split over (parallelism_config_cp_size). A checkpoint that was written with
one size is read with any other.
"""

import argparse
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker, on_main_process
from text_rows import arguments, build_model, make_rows, row_of_documents, rows_of_one_document
from torch.utils.data import DataLoader
from tqdm import tqdm

import cp_gdn.accelerate


class Jsonl(GeneralTracker):
    """Metrics as lines of JSON; any tracker of Accelerate (tensorboard, wandb, ..) goes in its place."""

    name = "jsonl"
    requires_logging_directory = False

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    @property
    def tracker(self) -> Path:
        return self.path

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")


def main() -> None:
    args = arguments(__doc__.splitlines()[0]).parse_args()
    out = Path(args.out)
    accelerator = Accelerator(gradient_accumulation_steps=args.accumulate, log_with=Jsonl(out / "metrics.jsonl"))
    cp_gdn.accelerate.enable(accelerator, on_one_rank=args.on_one_rank or None)
    accelerator.init_trackers("finetune_hf", config=vars(args))

    model = build_model(args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    ways = accelerator.num_processes  # at most so many ranks have batches of their own
    training = make_loader(args, args.steps * args.accumulate * args.rows * ways, seed=1)
    held_out = make_loader(args, 4 * args.rows, seed=2)
    model, optimizer, training, held_out = accelerator.prepare(model, optimizer, training, held_out)

    start = 0
    if args.resume:
        accelerator.load_state(args.resume)
        start = int(Path(args.resume).name.removeprefix("step-"))
    batches = itertools.islice(training, start * args.accumulate, None)
    for step in tqdm(range(start, args.steps), disable=not accelerator.is_main_process, desc="steps"):
        model.train()
        accelerator.log(train_step(accelerator, model, optimizer, batches), step=step + 1)
        if (step + 1) % args.save_every == 0:
            accelerator.save_state(str(out / f"step-{step + 1}"))

    loss = evaluate(accelerator, model, held_out)
    accelerator.log({"eval_loss": loss}, step=args.steps)
    accelerator.print(f"held-out loss {loss:.4f}")
    state = accelerator.get_state_dict(model)
    accelerator.unwrap_model(model).save_pretrained(
        out / "model", state_dict=state, is_main_process=accelerator.is_main_process
    )
    accelerator.end_training()


def make_loader(args: argparse.Namespace, count: int, seed: int) -> DataLoader:
    collate = row_of_documents if args.packed else rows_of_one_document
    return DataLoader(make_rows(args, count, seed), batch_size=args.rows, collate_fn=collate)


def train_step(accelerator: Accelerator, model: Any, optimizer: Any, batches: Iterator[Any]) -> dict[str, float]:
    """One optimizer step over the accumulated batches, each trained token of all ranks counting the same."""
    steps = accelerator.gradient_accumulation_steps
    group = list(itertools.islice(batches, steps))
    items = cp_gdn.accelerate.count_tokens(accelerator, group)
    mean = 0.0
    for batch in group:
        with accelerator.accumulate(model), cp_gdn.accelerate.shard(accelerator, batch):
            loss = cp_gdn.accelerate.token_mean_loss(accelerator, model, batch, num_items=items)
            accelerator.backward(loss)
        mean += float(accelerator.reduce(loss.detach(), "mean")) / steps
    norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return {"loss": mean, "grad_norm": float(norm), "tokens": int(items)}


@torch.no_grad()
def evaluate(accelerator: Accelerator, model: Any, batches: Any) -> float:
    """The mean loss of the held-out tokens."""
    model.eval()
    total, tokens = 0.0, 0
    for batch in batches:
        items = int(cp_gdn.accelerate.count_tokens(accelerator, [batch]))
        with cp_gdn.accelerate.shard(accelerator, batch):
            loss = cp_gdn.accelerate.token_mean_loss(accelerator, model, batch)
        total += float(accelerator.reduce(loss, "mean")) * items
        tokens += items
    return total / tokens


if __name__ == "__main__":
    main()
