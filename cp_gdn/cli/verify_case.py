"""The pack that `verify` runs: its inputs, drawn from a seed, and one rank's results on it."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import cp_gdn
from cp_gdn.backends.choice import BackendChoice

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "none": torch.zeros_like,
    "mild": lambda noise: torch.full_like(noise, -1e-3),
    "model": lambda noise: -torch.nn.functional.softplus(noise - 3.0),
    "slow": lambda noise: -1e-4 * torch.nn.functional.softplus(noise - 3.0),
    "strong": lambda noise: torch.full_like(noise, -20.0),
}
"""Log decays from standard normal noise."""

TOKEN_TENSORS = ("o", "dq", "dk", "dv", "dg", "dbeta")
"""Results with one row per token; the other two have one per document."""
TENSORS = ("o", "final_state", "dq", "dk", "dv", "dg", "dbeta", "dinitial_state")
INPUTS = ("q", "k", "v", "g", "beta", "initial_state")

Results = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """What the user asked for. `segments` is an int or "grid:N", `backend` the op's."""

    cu_seqlens: tuple[int, ...]
    layout: str
    world: int
    align: int
    heads: tuple[int, int]
    head_dims: tuple[int, int]
    segments: int | str
    device: str
    backend: str
    dtype: str
    gate: str
    seed: int

    @property
    def is_grid(self) -> bool:
        return isinstance(self.segments, str)

    @property
    def place(self) -> torch.device:
        """The device of the tensors of this process."""
        return torch.device(self.device, torch.cuda.current_device()) if self.device == "cuda" else torch.device("cpu")

    def partition(self, world: int) -> cp_gdn.Partition:
        return cp_gdn.partition(self.cu_seqlens, world, layout=self.layout, align=self.align)

    def context(self, comm: cp_gdn.Comm, exchange: str) -> cp_gdn.Context:
        return cp_gdn.build_context(
            self.partition(comm.size),
            comm,
            device=self.place,
            heads=self.heads,
            head_dims=self.head_dims,
            dtype=DTYPES[self.dtype],
            segments=self.segments,
            exchange=exchange,
            backend=self.backend,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class RankResults:
    """What one rank computed.

    Attributes:
        tensors: `TENSORS` on the CPU, and which tokens and documents their rows are. taken: the backend they are of.
    """

    tensors: Results
    taken: BackendChoice


def draw_inputs(case: Case) -> Results:
    """The inputs of the whole pack and the gradients of its outputs on the CPU, the same in every process."""
    gen = torch.Generator().manual_seed(case.seed)
    (num_heads, num_values), (key_dim, value_dim) = case.heads, case.head_dims
    tokens, documents = case.cu_seqlens[-1], len(case.cu_seqlens) - 1

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen, dtype=torch.float64)

    wide = torch.float64 if case.dtype == "fp64" else torch.float32
    state = (documents, num_values, key_dim, value_dim)
    drawn = {
        "q": torch.nn.functional.normalize(noise(1, tokens, num_heads, key_dim), dim=-1),
        "k": torch.nn.functional.normalize(noise(1, tokens, num_heads, key_dim), dim=-1),
        "v": noise(1, tokens, num_values, value_dim),
        "do": noise(1, tokens, num_values, value_dim),
    }
    rows = {name: value.to(DTYPES[case.dtype]) for name, value in drawn.items()}
    gates = {"g": GATES[case.gate](noise(1, tokens, num_values)), "beta": noise(1, tokens, num_values).sigmoid()}
    states = {"initial_state": noise(*state), "dfinal_state": noise(*state)}
    return rows | {name: value.to(wide) for name, value in (gates | states).items()}


def run_rank(case: Case, comm: cp_gdn.Comm, exchange: str) -> RankResults:
    """This rank's o, final states and gradients."""
    ctx = case.context(comm, exchange)
    whole = {name: value.to(ctx.device) for name, value in draw_inputs(case).items()}
    entry, exits = (torch.tensor(docs, dtype=torch.int64) for docs in (ctx.entry_docs, ctx.exit_docs))
    local = {name: whole[name][:, ctx.token_ids] for name in ("q", "k", "v", "g", "beta", "do")}
    local["initial_state"] = whole["initial_state"][entry]
    inputs = [local[name].requires_grad_() for name in INPUTS]
    o, final_state = cp_gdn.chunk_gated_delta_rule(
        *inputs[:5], ctx=ctx, initial_state=inputs[5], output_final_state=True
    )
    assert final_state is not None
    grads = torch.autograd.grad([o, final_state], inputs, [local["do"], whole["dfinal_state"][exits]])
    results = dict(zip((f"d{name}" for name in INPUTS), grads, strict=True))
    results |= {"o": o.detach(), "final_state": final_state.detach()}
    results |= {"token_ids": ctx.token_ids, "entry_docs": entry, "exit_docs": exits}
    return RankResults(tensors={name: value.cpu() for name, value in results.items()}, taken=ctx.taken)


def rows_of(name: str, results: RankResults) -> Tensor:
    """One tensor of a rank's results as [tokens or documents, heads, ...]."""
    return results.tensors[name][0] if name in TOKEN_TENSORS else results.tensors[name]


def index_of(name: str, results: RankResults) -> Tensor:
    """Which token or document of the pack each row of `rows_of` is."""
    if name in TOKEN_TENSORS:
        return results.tensors["token_ids"]
    return results.tensors["exit_docs" if name == "final_state" else "entry_docs"]
