"""Train a small Qwen3-Next or Qwen3.5 with the sequence split over ranks, with transformers' Trainer.

    accelerate launch --config_file YAML examples/finetune_trainer.py --packed
    accelerate launch --config_file YAML examples/finetune_trainer.py --resume example-output/checkpoint-10

One argument differs from any other script: `parallelism_config`. Its sizes come from the YAML. (A script that cannot
be changed runs as it is: `accelerate launch --config_file YAML -m cp_gdn.run SCRIPT ..`.)
"""

import json
from pathlib import Path
from typing import Any

import torch
from text_rows import arguments, build_model, make_rows, row_of_documents, rows_of_one_document
from transformers import Trainer, TrainerCallback, TrainingArguments

import cp_gdn.accelerate


class Jsonl(TrainerCallback):
    """Metrics as lines of JSON; any `report_to` of Trainer goes in its place."""

    def on_log(self, args: TrainingArguments, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if state.is_world_process_zero:
            folder = Path(args.output_dir)
            folder.mkdir(parents=True, exist_ok=True)
            with (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": state.global_step, **logs}) + "\n")


def main() -> None:
    args = arguments(__doc__.splitlines()[0]).parse_args()
    training = TrainingArguments(
        output_dir=args.out,
        parallelism_config=cp_gdn.accelerate.ParallelismConfig(gdn={"on_one_rank": args.on_one_rank or None}),
        use_cpu=not torch.cuda.is_available(),
        max_steps=args.steps,
        learning_rate=args.lr,
        per_device_train_batch_size=args.rows,
        per_device_eval_batch_size=args.rows,
        gradient_accumulation_steps=args.accumulate,
        logging_steps=1,
        save_steps=args.save_every,
        report_to=[],
        remove_unused_columns=False,  # the boundaries of documents are for the collator
    )
    trainer = Trainer(
        model=build_model(args),
        args=training,
        train_dataset=make_rows(args, args.steps * args.accumulate * args.rows * training.world_size, seed=1),
        eval_dataset=make_rows(args, 4 * args.rows, seed=2),
        data_collator=row_of_documents if args.packed else rows_of_one_document,
        callbacks=[Jsonl()],
    )
    trainer.train(resume_from_checkpoint=args.resume)
    loss = trainer.evaluate()["eval_loss"]
    trainer.accelerator.print(f"held-out loss {loss:.4f}")
    trainer.save_model(str(Path(args.out) / "model"))


if __name__ == "__main__":
    main()
