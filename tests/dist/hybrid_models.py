"""Tiny hybrid models and what they train on, and the specification of their training: one process, one document at a
time.

Nothing here imports accelerate or transformers before a worker calls it: that takes each process many seconds.
"""

from __future__ import annotations

import re
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from tests.in_double import InDouble

VOCAB, LENGTH, STEPS = 256, 96, 4
BOUNDS = (0, 37, 38, 90, 131)
IGNORED = -100
Batch = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training run.

    rows: B of unpacked batches, 0 for packed ones. accumulate: micro-batches of a step. checkpointing: "fsdp" by
    Accelerate, "model" by the model, "" none. labels: which are ignored. padded: rows are padded on the right.
    precision: "no" and "bf16" are Accelerate's, "fp64" is all of the model. adapters: train PEFT's low-rank adapters
    alone. compiler: backend of torch.compile, "" to run eagerly.
    """

    family: str = "qwen3_next"
    dp: int = 1
    cp: int = 2
    rows: int = 1
    layout: str = "auto"
    checkpointing: str = ""
    accumulate: int = 1
    labels: str = "unequal"
    padded: bool = False
    precision: str = "no"
    adapters: bool = False
    compiler: str = ""
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def world(self) -> int:
        return self.dp * self.cp

    def running(self) -> AbstractContextManager[Any]:
        """Around forwards and backwards: in fp64, what a model computes in fp32 inside is computed in fp64, too."""
        return InDouble() if self.precision == "fp64" else nullcontext()


@dataclass(frozen=True, kw_only=True)
class Run:
    """What training gave: per step the mean loss and the gradient norm, gradients of step 0, weights at the end.

    evaluated: the mean loss of step 0's batches after training, as often as it was taken. lines: what was logged.
    grads, weights: of the parameters that were trained. keys: of the state dict.
    """

    losses: list[float]
    norms: list[float]
    evaluated: list[float]
    grads: dict[str, Tensor]
    weights: dict[str, Tensor]
    keys: list[str]
    lines: list[str]


SIZES: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "intermediate_size": 128, "vocab_size": VOCAB, "tie_word_embeddings": False, "use_cache": False,
    "layer_types": [*["linear_attention"] * 3, "full_attention"],
}  # fmt: skip
EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextForCausalLM", {"num_experts": 0, "mlp_only_layers": [0, 1, 2, 3]}),
    "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", {}),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", EXPERTS),
    "olmo_hybrid": ("OlmoHybridConfig", "OlmoHybridForCausalLM", {"linear_allow_neg_eigval": True, "pad_token_id": 0}),
    "lara_mini": ("LaraMiniConfig", "LaraMiniForCausalLM", EXPERTS),
}
"""Per family the classes of its config and model, and what its config wants beside the sizes. Not qwen4_exp: the
softmax layers of its models choose their keys by an index, and such layers are refused."""


def build(family: str, **changes: Any) -> Any:
    """A model of four layers, three of them Gated DeltaNet, the same weights in every process."""
    import transformers

    transformers.logging.set_verbosity_error()
    config, model, more = FAMILIES[family]
    torch.manual_seed(0)
    made = getattr(transformers, model)(getattr(transformers, config)(**SIZES | more | changes))
    return with_long_memory(made)


def model_of(case: Case) -> Any:
    """The model of a case, with adapters on its recurrent layers' projections if they are what is trained."""
    model = build(case.family)
    if case.precision == "fp64":
        model = model.double()
        model.config._experts_implementation = "eager"  # the grouped product of experts has no fp64
    if not case.adapters:
        return model
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    # Random ones, for at PEFT's own start, zeros, half of the gradients are zeros too.
    return get_peft_model(model, LoraConfig(r=4, target_modules=ADAPTED[case.family], init_lora_weights=False))


def trained_of(model: Any) -> dict[str, Any]:
    """The parameters that are trained, by the names that they have before anything is wrapped."""
    trained = ((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)
    return {re.sub(WRAPPERS, "", name): parameter for name, parameter in trained}


@torch.no_grad()
def with_long_memory(model: Any) -> Any:
    """Gates that keep states over many tokens; fresh ones forget them at once, and gradients of gates are rounding."""
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            parameter.copy_(torch.linspace(-4.0, -1.0, len(parameter)))
    return model


WRAPPERS = r"_checkpoint_wrapped_module\.|_orig_mod\."
ADAPTED = {
    "qwen3_next": ["in_proj_qkvz", "in_proj_ba", "out_proj"],
    "qwen3_5": ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"],
}


def make_batch(case: Case, step: int, dp_rank: int, micro: int) -> Batch:
    """A whole batch of one data-parallel rank; ranks and micro-batches train different numbers of tokens."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * dp_rank + micro)
    shape = (case.rows, LENGTH) if case.rows else (1, BOUNDS[-1])
    ids = torch.randint(VOCAB, shape, generator=generator)
    labels = ids.clone()
    if case.labels == "unequal":
        labels[:, : 11 * (micro + 1) + 7 * dp_rank] = IGNORED
    elif case.labels == "one rank":  # all that zigzag gives rank 0 of two
        labels[:, : LENGTH // 4 + 1] = IGNORED
        labels[:, 3 * LENGTH // 4 :] = IGNORED
    elif case.labels == "none":
        labels[:] = IGNORED
    batch = {"input_ids": ids, "labels": labels}
    if case.padded:
        batch["attention_mask"] = (
            torch.arange(LENGTH)[None] < torch.tensor([LENGTH - 9 * row for row in range(case.rows)])[:, None]
        )
        labels.masked_fill_(~batch["attention_mask"], IGNORED)
    if not case.rows:
        batch["cu_seq_lens_q"] = torch.tensor(BOUNDS, dtype=torch.int32)
    return batch


def batches_of(case: Case, step: int, dp_rank: int) -> list[Batch]:
    return [make_batch(case, step, dp_rank, micro) for micro in range(case.accumulate)]


def alone(_rank: int, _world: int, case: Case) -> Run:
    return train_alone(case, [step_batches(case, step) for step in range(STEPS)])


def step_batches(case: Case, step: int) -> list[Batch]:
    """All that the ranks of a case train in one step."""
    return [batch for dp_rank in range(case.dp) for batch in batches_of(case, step, dp_rank)]


def train_alone(case: Case, steps: list[list[Batch]]) -> Run:
    """The specification: every document by itself, the mean over all trained tokens of a step."""
    model = model_of(case)
    optimizer = make_optimizer(model)
    losses, norms, grads = [], [], {}
    for batches in steps:
        with case.running():
            loss = mean_loss(model, batches)
            loss.backward()
        grads = grads or {name: parameter.grad.clone() for name, parameter in trained_of(model).items()}
        losses.append(float(loss.detach()))
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)))
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad(), case.running():
        evaluated = [float(mean_loss(model, steps[0]))]
    weights = {name: parameter.detach().clone() for name, parameter in trained_of(model).items()}
    keys = list(model.state_dict())
    return Run(losses=losses, norms=norms, evaluated=evaluated, grads=grads, weights=weights, keys=keys, lines=[])


def mean_loss(model: Any, batches: list[Batch]) -> Tensor:
    """Mean loss of all trained tokens of a step: data-parallel ranks, micro-batches and documents."""
    pairs = [loss_sum(model, ids, labels) for batch in batches for ids, labels in documents(batch)]
    return torch.stack([part for part, _ in pairs]).sum() / max(1, sum(count for _, count in pairs))


def documents(batch: Batch) -> list[tuple[Tensor, Tensor]]:
    """Tokens and labels of each document, without padding."""
    ids, labels = batch["input_ids"], batch["labels"]
    if "cu_seq_lens_q" in batch:
        return [(ids[:, a:b], labels[:, a:b]) for a, b in pairwise(batch["cu_seq_lens_q"].tolist())]
    lengths = batch["attention_mask"].sum(1).tolist() if "attention_mask" in batch else [ids.shape[1]] * len(ids)
    return [(ids[row : row + 1, :n], labels[row : row + 1, :n]) for row, n in enumerate(lengths)]


def loss_sum(model: Any, ids: Tensor, labels: Tensor) -> tuple[Tensor, int]:
    """Sum of the losses of a document's trained tokens, and how many there are."""
    logits, targets = model(input_ids=ids, use_cache=False).logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    total = torch.nn.functional.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
    return total, int((targets != IGNORED).sum())


def make_optimizer(model: Any) -> Any:
    # NOTE: eps is large so that a gradient of rounding size does not become a step of full size.
    return torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-5, weight_decay=0.0)
