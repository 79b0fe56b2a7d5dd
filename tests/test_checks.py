"""Everything that is refused, by message: before anything is computed or sent, with the arguments left as they were."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import cp_gdn
from cp_gdn import Comm, Context, Options, build_context, partition, twin
from tests.test_entries import Watching

TOKENS = 40
BOUNDS = (0, 30, 30, TOKENS)
SHAPE: dict[str, Any] = {"heads": (2, 4), "head_dims": (8, 6), "dtype": torch.float32}
CULPRIT = 1

Values = dict[str, Any]
Change = Callable[[Values], Any]


def make_context(comm: Comm, **changes: Any) -> Context:
    return build_context(partition(BOUNDS, comm.size, "contiguous"), comm, **{**SHAPE, **changes})


def good_values(ctx: Context) -> Values:
    """Arguments of a call: what a case changes is refused, the rest is right."""
    t, docs = ctx.num_tokens, len(ctx.entry_docs)
    shapes = {"q": (t, 2, 8), "k": (t, 2, 8), "v": (t, 4, 6), "g": (t, 4), "beta": (t, 4)}
    tensors = {name: torch.full((1, *shape), 0.5) for name, shape in shapes.items()}
    return {**tensors, "initial_state": torch.full((docs, 4, 8, 6), 0.5), "ctx": ctx}


def tensors_in(value: Any) -> list[Tensor]:
    values = value.values() if isinstance(value, dict) else [value]
    return [x for x in values if isinstance(x, Tensor) and x.layout == torch.strided and x.device.type == "cpu"]


def assert_refused(call: Callable[[], Any], values: Values, error: type[Exception], said: str, comm: Comm) -> None:
    before = [(x.clone(), x._version) for x in tensors_in(values)]
    with comm.record() as messages, pytest.raises(error, match=said):
        call()
    assert messages == []
    for x, (copy, version) in zip(tensors_in(values), before, strict=True):
        assert torch.equal(x, copy)
        assert x._version == version


def on_one_rank(fn: Callable[[Comm], None]) -> None:
    """Run fn on one of two ranks: the refusal is that rank's own, the other one is not there to be waited for."""
    contexts: dict[int, Any] = {}

    def run(comm: Comm) -> None:
        contexts[comm.rank] = make_context(comm)
        if comm.rank == CULPRIT:
            fn(SimpleNamespace(comm=comm, ctx=contexts[comm.rank]))  # type: ignore[arg-type]

    twin(2, run)


# Per case: the argument, its value made of the good ones, the error, its text.
CALLS: dict[str, tuple[str, Change, type[Exception], str]] = {
    "device": ("k", lambda x: x["k"].to("meta"), ValueError, "k: got device meta, expected cpu; move it"),
    "layout": ("v", lambda x: x["v"].to_sparse(), TypeError, r"v: got layout torch.sparse_coo, expected a dense"),
    "dtype": ("q", lambda x: x["q"].double(), TypeError, "q: got dtype torch.float64, expected torch.float32 "),
    "16-bit values": ("v", lambda x: x["v"].bfloat16(), TypeError, "v: got dtype torch.bfloat16"),
    "narrow gates": ("g", lambda x: x["g"].half(), TypeError, "g: got dtype torch.float16, expected torch.float32"),
    "int strengths": ("beta", lambda x: x["beta"].int(), TypeError, "beta: got dtype torch.int32"),
    "too few heads": ("q", lambda x: x["q"][:, :, :1], ValueError, r"q: got shape .*, 1, 8\), expected .* 2, 8\)"),
    "heads of keys": ("k", lambda x: x["k"].repeat(1, 1, 2, 1), ValueError, r"k: got shape .* heads=\(2, 4\)"),
    "value heads": ("v", lambda x: x["v"][:, :, :2], ValueError, "v: got shape"),
    "value dim": ("v", lambda x: x["v"][..., :5], ValueError, r"v: got shape .* head_dims=\(8, 6\)"),
    "gates per query head": ("g", lambda x: x["g"][..., :2], ValueError, "g: got shape"),
    "strengths without heads": ("beta", lambda x: x["beta"][..., 0], ValueError, "beta: got shape"),
    "a token less": ("k", lambda x: x["k"][:, :-1], ValueError, "k: got shape .* this rank holds 20 of the pack's 40"),
    "the whole pack": ("q", lambda x: torch.zeros(1, TOKENS, 2, 8), ValueError, r"q: .*\(1, 20, 2, 8\): this rank"),
    "a batch": ("q", lambda x: x["q"].repeat(2, 1, 1, 1), ValueError, r"q: got shape \(2, 20, 2, 8\), expected \(1,"),
    "one without the 1": ("v", lambda x: x["v"][0], ValueError, r"v: got shape \(20, 4, 6\), expected \(1, 20, 4, 6\)"),
    "states of all documents": (
        "initial_state", lambda x: torch.zeros(3, 4, 8, 6), ValueError, r"initial_state: .* expected \(1, 4, 8, 6\)",
    ),
    "states transposed": ("initial_state", lambda x: x["initial_state"].mT, ValueError, "initial_state: got shape"),
    "16-bit states": ("initial_state", lambda x: x["initial_state"].half(), TypeError, "initial_state: got dtype"),
}  # fmt: skip

CHOICES: dict[str, tuple[str, Change, type[Exception], str]] = {
    "a list": ("q", lambda x: x["q"].tolist(), TypeError, "q: got list, expected a tensor"),
    "a list of states": ("initial_state", lambda x: [], TypeError, "initial_state: got list, expected a tensor"),
    "scale": ("scale", lambda x: torch.ones(1), TypeError, "scale: got Tensor, expected a number, or None"),
    "scale as a flag": ("scale", lambda x: True, TypeError, "scale: got bool"),
    "norm": ("use_qk_l2norm_in_kernel", lambda x: 1, TypeError, "use_qk_l2norm_in_kernel: got int"),
    "workspace": ("workspace", lambda x: x["q"], TypeError, "workspace: got Tensor, expected a cp_gdn.Workspace"),
    "no context": ("ctx", lambda x: None, TypeError, "ctx: got NoneType, expected the result of cp_gdn.build_context"),
}  # fmt: skip

WAYS = {
    "op": (cp_gdn.chunk_gated_delta_rule, nullcontext),
    "forward": (cp_gdn.forward, nullcontext),
    "operator": (cp_gdn.chunk_gated_delta_rule, Watching),
}


@pytest.mark.parametrize(
    ("way", "case"),
    [(way, case) for way in WAYS for case in (CALLS if way == "operator" else CALLS | CHOICES)],
)
def test_a_call_that_does_not_fit_its_context_is_refused_by_name(way: str, case: str) -> None:
    argument, change, error, said = (CALLS | CHOICES)[case]
    call, mode = WAYS[way]

    def run(rank: Any) -> None:
        values = good_values(rank.ctx)
        values[argument] = change(values)
        with mode():
            assert_refused(lambda: call(**values), values, error, said, rank.comm)

    on_one_rank(run)


def test_local_instead_of_global_boundaries_are_refused() -> None:
    """Each rank cuts its own half again: the tensors hold twice the tokens that the context expects."""

    def run(comm: Comm) -> None:
        ctx = build_context(partition((0, 20), comm.size, "contiguous"), comm, **SHAPE)
        values = {**good_values(make_context(comm)), "ctx": ctx, "initial_state": None}
        if comm.rank == CULPRIT:
            said = "this rank holds 10 of the pack's 20 tokens .boundaries are those of the whole pack"
            assert_refused(lambda: cp_gdn.chunk_gated_delta_rule(**values), values, ValueError, said, comm)

    twin(2, run)


BOUNDARIES: dict[str, Any] = {
    "list": list(BOUNDS),
    "int32 tensor": torch.tensor(BOUNDS, dtype=torch.int32),
    "int64 tensor": torch.tensor(BOUNDS),
    "int32 array": np.array(BOUNDS, dtype=np.int32),
    "int64 array": np.array(BOUNDS),
}
NO_BOUNDARIES: dict[str, tuple[Any, type[Exception], str]] = {
    "int16": (torch.tensor(BOUNDS, dtype=torch.int16), TypeError, "cu_seqlens: got dtype torch.int16"),
    "float": (torch.tensor(BOUNDS, dtype=torch.float32), TypeError, "cu_seqlens: got dtype torch.float32"),
    "flags": (torch.tensor([False, True]), TypeError, "cu_seqlens: got dtype torch.bool"),
    "two dims": (torch.tensor([BOUNDS]), ValueError, r"cu_seqlens: got shape \[1, 4\]"),
    "from 1 on": (torch.tensor([1, TOKENS]), ValueError, "cu_seqlens: starts at 1, expected 0"),
    "decreasing": (torch.tensor([0, 30, 20, TOKENS]), ValueError, "cu_seqlens: decreases from 30 to 20 at index 2"),
    "lengths": ({30, 10}, TypeError, "cu_seqlens: got set"),
}


def test_boundaries_in_int32_and_int64_of_any_kind_give_the_same_bits() -> None:
    outputs = []
    for bounds in BOUNDARIES.values():
        ctx = build_context(partition(bounds, 1), Comm.alone(), **SHAPE)
        values = {**good_values(ctx), "v": torch.arange(TOKENS * 24.0).view(1, TOKENS, 4, 6)}
        outputs.append(cp_gdn.chunk_gated_delta_rule(**values)[0])
    assert all(torch.equal(o, outputs[0]) for o in outputs)


@pytest.mark.parametrize("case", NO_BOUNDARIES)
def test_other_boundaries_are_refused_by_name(case: str) -> None:
    bounds, error, said = NO_BOUNDARIES[case]
    with pytest.raises(error, match=said):
        partition(bounds, 2)


@pytest.mark.parametrize("last", [TOKENS - 1, TOKENS + 1])
def test_boundaries_that_end_short_of_the_tensors_or_beyond_are_refused(last: int) -> None:
    comm = Comm.alone()
    ctx = build_context(partition([0, 30, last], 1), comm, **SHAPE)
    values = {**good_values(make_context(comm)), "initial_state": None, "ctx": ctx}
    said = f"this rank holds {last} of the pack's {last} tokens"
    assert_refused(lambda: cp_gdn.chunk_gated_delta_rule(**values), values, ValueError, said, comm)


BACKWARDS: dict[str, tuple[str, Change, type[Exception], str]] = {
    "dtype": ("dout", lambda x: x["dout"].double(), TypeError, "dout: got dtype torch.float64"),
    "shape": ("dout", lambda x: x["dout"][:, :-1], ValueError, "dout: got shape"),
    "documents": ("dfinal_state", lambda x: torch.zeros(4, 4, 8, 6), ValueError, "dfinal_state: got shape"),
    "saved": ("saved", lambda x: (), TypeError, "saved: got tuple, expected what cp_gdn.forward returned"),
    "context": ("ctx", lambda x: None, TypeError, "ctx: got NoneType"),
}


@pytest.mark.parametrize("case", BACKWARDS)
def test_gradients_that_do_not_fit_the_forward_are_refused_by_name(case: str) -> None:
    argument, change, error, said = BACKWARDS[case]
    comm = Comm.alone()
    ctx = make_context(comm)
    _, final, saved = cp_gdn.forward(**good_values(ctx), output_final_state=True)
    values: Values = {"dout": torch.ones(1, TOKENS, 4, 6), "dfinal_state": final, "saved": saved, "ctx": ctx}
    cp_gdn.backward(**values)
    values[argument] = change(values)
    assert_refused(lambda: cp_gdn.backward(**values), values, error, said, comm)


CONTEXTS: dict[str, tuple[Values, type[Exception], str]] = {
    "part": ({"part": BOUNDS}, TypeError, "part: got tuple, expected the result of cp_gdn.partition"),
    "world": ({"part": partition(BOUNDS, 3)}, ValueError, "part: made for world_size=3, but comm has 2 ranks"),
    "comm": ({"comm": None}, TypeError, r"comm: got NoneType, expected cp_gdn.Comm\(group\)"),
    "device": ({"device": "tpu7"}, ValueError, "device: got 'tpu7', expected a torch device"),
    "device type": ({"device": 1.5}, ValueError, "device: got 1.5"),
    "head groups": ({"heads": (3, 4)}, ValueError, r"heads: got \(3, 4\), expected the value heads to be a multiple"),
    "no heads": ({"heads": (0, 4)}, ValueError, r"heads: got \(0, 4\), expected two positive ints"),
    "one number": ({"heads": 4}, ValueError, r"heads: got 4, expected two positive ints \(H, HV\)"),
    "head dims": ({"head_dims": (8.0, 6)}, ValueError, r"head_dims: got \(8.0, 6\), expected two positive ints \(K"),
    "dtype": ({"dtype": torch.int64}, TypeError, "dtype: got torch.int64, expected torch.bfloat16 or"),
    "dtype by name": ({"dtype": "bf16"}, TypeError, "dtype: got bf16"),
    "conv width": ({"conv": (4, 9)}, ValueError, r"conv: got \(4, 9\), expected a width of 1 to 8"),
    "conv": ({"conv": 4}, ValueError, r"conv: got 4, expected two positive ints \(channels, width\)"),
    "no channels": ({"conv": (0, 4)}, ValueError, r"conv: got \(0, 4\)"),
    "segments": ({"segments": 0}, ValueError, "segments: got 0"),
    "segments per rank": ({"segments": [1, 1, 1]}, ValueError, "segments: got 3 numbers, expected one per rank, 2"),
    "segments type": ({"segments": 1.5}, TypeError, "segments: got 1.5"),
    "grid": ({"segments": "grid:x"}, ValueError, 'segments: got .grid:x., expected "grid:N"'),
    "off the grid": ({"segments": "grid:1"}, ValueError, "document 0 is cut at its token 20.* align=64"),
    "exchange": ({"exchange": "star"}, ValueError, "exchange: got 'star', expected one of"),
    "backend": ({"backend": "cuda"}, ValueError, "backend: got 'cuda', expected 'auto', 'torch' or 'hopper'"),
    "kernels": ({"backend": "hopper"}, RuntimeError, r'backend="hopper": .*; use backend="torch", or "auto"'),
    "options": ({"options": {"save": "light"}}, TypeError, "options: got dict, expected cp_gdn.Options"),
}


@pytest.mark.parametrize("case", CONTEXTS)
def test_a_context_is_refused_by_the_argument_that_is_wrong(case: str) -> None:
    changes, error, said = CONTEXTS[case]

    def run(rank: Any) -> None:
        values = {"part": partition(BOUNDS, 2, "contiguous"), "comm": rank.comm, **SHAPE, **changes}
        assert_refused(lambda: build_context(**values), values, error, said, rank.comm)

    on_one_rank(run)


OPTIONS: dict[str, tuple[Values, type[Exception], str]] = {
    "all and nothing": (
        {"save": "full", "boundary": "recompute"},
        ValueError,
        r"Options\(save='full', boundary='recompute'\): one keeps tapes, the other keeps nothing",
    ),
    "tapes twice": (
        {"save": "full", "reuse_recompute_tapes": True},
        ValueError,
        "save='full', reuse_recompute_tapes=True.* use 'auto'",
    ),
    "tapes of nothing": (
        {"boundary": "recompute", "reuse_recompute_tapes": True},
        ValueError,
        "boundary='recompute', reuse_recompute_tapes=True.* use 'auto'",
    ),
    "output": ({"recompute_output": False}, ValueError, r"recompute_output=False\): expected one of"),
    "unknown save": ({"save": "all"}, ValueError, r"Options\(save='all'\): expected one of"),
    "a number for a flag": ({"reuse_recompute_tapes": 0}, ValueError, "reuse_recompute_tapes=0"),
    "transfer": ({"save_transfer": 1}, ValueError, r"Options\(save_transfer=1\): expected one of \(True, False\)"),
    "cutoff above 0": ({"decay_cutoff": 3.0}, ValueError, r"decay_cutoff=3.0\): expected None"),
    "cutoff by name": ({"decay_cutoff": "none"}, ValueError, "decay_cutoff='none'"),
    "cutoff as a flag": ({"decay_cutoff": False}, ValueError, "decay_cutoff=False"),
    "cutoff as nothing": ({"decay_cutoff": float("nan")}, ValueError, "decay_cutoff=nan"),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_options_that_are_wrong_or_contradict_each_other_are_refused_by_name(case: str) -> None:
    changes, error, said = OPTIONS[case]
    with pytest.raises(error, match=said):
        Options(**changes)


def test_every_other_pair_of_options_is_allowed() -> None:
    for save, boundary, reuse, output in product(("light", "full"), ("saved", "recompute"), ("auto", False), ("auto",)):
        if (save, boundary) != ("full", "recompute"):
            Options(save=save, boundary=boundary, reuse_recompute_tapes=reuse, recompute_output=output)
    assert Options(reuse_recompute_tapes=True, save_transfer=False, recompute_output="always").keeps_states


def test_one_rank_alone_goes_on_after_a_refusal() -> None:
    values = good_values(make_context(Comm.alone()))
    with pytest.raises(TypeError, match="q: got dtype"):
        cp_gdn.chunk_gated_delta_rule(**{**values, "q": values["q"].double()})
    assert cp_gdn.chunk_gated_delta_rule(**values)[0].shape == (1, TOKENS, 4, 6)
