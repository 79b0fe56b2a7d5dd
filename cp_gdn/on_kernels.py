"""The op on the Hopper kernels: what `op` does in torch, stage by stage, as calls of a context's kernels."""

from dataclasses import replace

import torch
from torch import Tensor

from cp_gdn.backends.hopper import HopperBackend
from cp_gdn.backends.hopper_backward import Boundary, HopperKernels
from cp_gdn.backends.launch import on_device
from cp_gdn.backends.torch_chunked import Inputs
from cp_gdn.context import Context
from cp_gdn.saved import InputGradients, Manner, Saved, owned_maps


def forward_on_kernels(
    ctx: Context, kernels: HopperKernels, x: Inputs, initial_state: Tensor | None, manner: Manner
) -> tuple[Tensor, Tensor, Saved]:
    """`op.run_forward` on the kernels, which keep no tapes yet."""
    options, forward = ctx.options, kernels.forward
    with torch.no_grad(), on_device(forward.device):
        ran = forward.forward(ctx.comm, x, initial_state, manner.carried, output=manner.output, final=manner.final)
        maps = ran.entered.maps
        if options.keeps_maps and maps is None:  # the states were carried here
            maps = forward.maps(ran.chunked)
    saved = Saved(
        inputs=x,
        states=ran.entered.states if options.keeps_states else None,
        maps=maps if options.keeps_maps else None,
        owned=owned_maps(ran.entered.exchange, manner.carried) if options.keeps_maps else None,
        has_initial=initial_state is not None,
        initial=None if options.keeps_states else initial_state,
    )
    return ran.o, ran.final, saved


def backward_on_kernels(
    ctx: Context, kernels: HopperKernels, given: tuple[Tensor | None, Tensor | None], saved: Saved
) -> InputGradients:
    """`op.run_backward` on the kernels; ``given``: gradients of o and of the final states."""
    x = saved.inputs
    with torch.no_grad(), on_device(kernels.forward.device):
        boundary = _boundary(ctx, kernels.forward, saved)
        grads, dinitial = kernels.backward(ctx.comm, x, given, boundary, initial=saved.has_initial)
    return InputGradients(
        q=grads.q,
        k=grads.k,
        v=grads.v,
        g=grads.g.to(x.g.dtype),
        beta=grads.beta.to(x.beta.dtype),
        initial_state=dinitial if saved.has_initial else None,
    )


def _boundary(ctx: Context, forward: HopperBackend, saved: Saved) -> Boundary:
    """Entry states and maps, whatever the forward kept: its first half runs again, its messages too, or maps alone."""
    if saved.states is None:
        entered = forward.enter(ctx.comm, forward.prepare(saved.inputs), saved.initial, "STATE_AGAIN")
        forward.settle(entered)
        owned = owned_maps(entered.exchange, None) if ctx.options.save_transfer else None
        saved = replace(saved, states=entered.states, maps=entered.maps, owned=owned)
    elif saved.maps is None:
        saved = replace(saved, maps=forward.maps(forward.prepare(saved.inputs)))
    assert saved.states is not None
    assert saved.maps is not None
    return Boundary(states=saved.states, maps=saved.maps, owned=saved.owned)
