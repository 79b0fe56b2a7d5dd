"""A training script that knows nothing of cp_gdn: Accelerate's context parallelism as its documentation shows it."""

import json
import sys
from pathlib import Path

from accelerate import Accelerator

from tests.dist.hybrid_models import STEPS, Case, batches_of, build, make_optimizer


def main() -> None:
    case = Case()
    accelerator = Accelerator()
    model = build(case.family)
    model, optimizer = accelerator.prepare(model, make_optimizer(model))
    losses = []
    for step in range(STEPS):
        (batch,) = batches_of(case, step, 0)
        ids, labels = (batch[name].to(accelerator.device) for name in ("input_ids", "labels"))
        shifted = labels.roll(-1, 1)
        shifted[:, -1] = -100
        positions = ids.new_tensor(range(ids.shape[1]))[None]
        count = int((shifted != -100).sum())
        buffers = [ids, labels, shifted, positions]
        with accelerator.maybe_context_parallel(buffers, [1, 1, 1, 1], set(buffers)):
            inputs = {"input_ids": ids, "labels": labels, "shift_labels": shifted, "position_ids": positions}
            share = model(**inputs, num_items_in_batch=count).loss
            accelerator.backward(share * accelerator.num_processes)
        losses.append(float(accelerator.reduce(share.detach(), "sum")))
        optimizer.step()
        optimizer.zero_grad()
    if accelerator.is_main_process:
        Path(sys.argv[1]).write_text(json.dumps(losses))


if __name__ == "__main__":
    main()
