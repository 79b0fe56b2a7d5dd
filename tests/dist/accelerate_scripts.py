"""Scripts as users start them, on ranks of the pool: `python -m cp_gdn.run SCRIPT ..`, but on gloo."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from tests.dist.accelerate_world import config_class, environment, fsdp_plugin
from tests.dist.hybrid_models import Case
from tests.dist.logged import logged


def scripts(rank: int, _world: int, case: Case, calls: list[list[str]], variables: dict[str, str]) -> list[str]:
    """Run scripts with their arguments one after the other; what cp_gdn logged."""
    from cp_gdn.integrations.run import main

    with logged() as lines:
        for call in calls:
            with environment(case, rank), on_cpu(case), mock.patch.dict(os.environ, variables):
                assert main(call) == 0
    return lines


@contextmanager
def on_cpu(case: Case) -> Iterator[None]:
    """Accelerators and configs that scripts make are the tests' own; what `main` changes is changed back."""
    import accelerate
    import transformers.trainer  # noqa: F401 - it keeps the Accelerator that it finds when it is imported

    import cp_gdn.accelerate

    plugin = fsdp_plugin(case)
    config = config_class(plugin)

    class OnCpu(accelerate.Accelerator):
        def __init__(self, **arguments: Any) -> None:
            not_enabled = config(dp_shard_size=case.dp, cp_size=case.cp)
            not_enabled.enabled = False
            sizes = {} if case.world == 1 else {"parallelism_config": not_enabled, "fsdp_plugin": plugin}
            super().__init__(cpu=True, **sizes, **arguments)

    def sizes(**_: Any) -> Any:
        return config(dp_shard_size=case.dp, cp_size=case.cp)

    with (
        mock.patch.object(accelerate, "Accelerator", OnCpu),
        mock.patch.object(cp_gdn.accelerate, "ParallelismConfig", sizes),
        mock.patch.object(sys, "argv", list(sys.argv)),
        mock.patch.object(sys, "path", list(sys.path)),
        mock.patch.object(OnCpu.__base__, "prepare", OnCpu.prepare),
    ):
        yield


def held_out_loss(_rank: int, _world: int, call: list[str], folder: str) -> float:
    """The loss of a model that the loop example saved, on its held-out rows, in one process without cp_gdn."""
    import torch
    import transformers

    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
    try:
        from text_rows import arguments, make_rows, rows_of_one_document
    finally:
        del sys.path[0]
    args = arguments("").parse_args(call)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        losses = [model(**rows_of_one_document([row])).loss for row in make_rows(args, 4 * args.rows, seed=2)]
    return float(torch.stack(losses).mean())
