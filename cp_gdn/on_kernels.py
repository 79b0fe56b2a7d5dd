"""The op on the Hopper kernels: what `op` does in torch, stage by stage, as calls of a context's kernels."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from cp_gdn.backends.hopper import Entered, HopperBackend
from cp_gdn.backends.hopper_backward import Boundary, HopperKernels, gradients_like
from cp_gdn.backends.hopper_walk import WalkInputs
from cp_gdn.backends.launch import on_device
from cp_gdn.backends.torch_chunked import Inputs
from cp_gdn.context import Context
from cp_gdn.saved import InputGradients, Manner, Saved, Tapes, owned_maps
from cp_gdn.workspace import Room, Workspace, bind


def forward_on_kernels(
    ctx: Context, kernels: HopperKernels, x: Inputs, initial_state: Tensor | None, manner: Manner
) -> tuple[Tensor, Tensor, Saved]:
    """`op.run_forward` on the kernels."""
    options, forward, carried = ctx.options, kernels.forward, manner.carried
    asked = manner.final or initial_state is not None
    scratch = bind(ctx, "forward", manner.workspace, kept=manner.tapes, document_states=asked)
    with no_grad(), on_device(forward.device), scratch as room:
        tape = kernels.new_tape() if manner.tapes else None
        inputs = forward.prepare(x, None, room.take("prepared") if tape is None else tape)
        if carried is None:
            entered = forward.enter(ctx.comm, inputs, initial_state, "STATE", room)
        else:
            found = forward.summarized(inputs, None, room) if options.keeps_maps else None
            entered = Entered(states=carried.states, found=found, exchange=None)
        final = forward.new_states(forward.tables.num_exits if manner.final else 0)
        if manner.output:
            forward.replay(inputs, entered, final if manner.final else None, initial=initial_state is not None)
        else:
            forward.settle(entered)
        if manner.final:
            _pass_empty(forward, final, initial_state)
    saved = Saved(
        inputs=x,
        states=entered.states if options.keeps_states else None,
        maps=entered.maps if options.keeps_maps else None,
        owned=owned_maps(entered.exchange, carried) if options.keeps_maps else None,
        has_initial=initial_state is not None,
        initial=None if options.keeps_states else initial_state,
        tapes=None if tape is None else Tapes(tape=tape, states=None),
    )
    return inputs.out, final, saved


def backward_on_kernels(
    ctx: Context,
    kernels: HopperKernels,
    given: tuple[Tensor | None, Tensor | None],
    saved: Saved,
    workspace: Workspace | None,
) -> InputGradients:
    """`op.run_backward` on the kernels; ``given``: gradients of o and of the final states."""
    x, asked = saved.inputs, saved.has_initial or given[1] is not None
    tape = None if saved.tapes is None else saved.tapes.tape
    scratch = bind(ctx, "backward", workspace, kept=tape is not None, document_states=asked)
    with no_grad(), on_device(kernels.forward.device), scratch as room:
        memory = room.take("prepared") if tape is None else tape
        inputs = kernels.forward.prepare(x, x.v, memory, made=tape is not None)  # the next walk has no output
        boundary = _boundary(ctx, kernels.forward, inputs, saved, room)
        first = kernels.first_states(inputs, boundary, given[1], room)
        grads = gradients_like(x)
        dinitial = kernels.backward(ctx.comm, first, (given[0], grads), room)
    return InputGradients(
        q=grads.q,
        k=grads.k,
        v=grads.v,
        g=_in_dtype(grads.g, x.g.dtype),
        beta=_in_dtype(grads.beta, x.beta.dtype),
        initial_state=dinitial if saved.has_initial else None,
    )


def no_grad() -> AbstractContextManager[None]:
    """`torch.no_grad` where it is not so already, as it is inside of an autograd function."""
    return torch.no_grad() if torch.is_grad_enabled() else nullcontext()


def _in_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x if x.dtype == dtype else x.to(dtype)


def _pass_empty(forward: HopperBackend, final: Tensor, initial_state: Tensor | None) -> None:
    """Documents without tokens end where they start."""
    entry, exits = forward.schedule.empty.data
    if exits.numel():
        final[exits] = 0.0 if initial_state is None else initial_state[entry]


def _boundary(ctx: Context, forward: HopperBackend, x: WalkInputs, saved: Saved, room: Room) -> Boundary:
    """Entry states and maps, whatever the forward kept: its first half runs again, its messages too, or maps alone."""
    if saved.states is None:
        entered = forward.enter(ctx.comm, x, saved.initial, "STATE_AGAIN", room)
        forward.settle(entered)
        owned = owned_maps(entered.exchange, None) if ctx.options.save_transfer else None
        saved = replace(saved, states=entered.states, maps=entered.maps, owned=owned)
    elif saved.maps is None:
        saved = replace(saved, maps=forward.summarized(x, None, room).maps)
    assert saved.states is not None
    assert saved.maps is not None
    return Boundary(states=saved.states, initial=saved.has_initial, maps=saved.maps, owned=saved.owned)
