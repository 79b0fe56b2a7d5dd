"""A Gated DeltaNet layer in the manner of Qwen3-Next, alone on a device or with its sequence split over ranks.

Order of the channels of `in_proj_qkvz`: q | k | v | z, each head by head; of `in_proj_ba`: b | a, one per value head.
The convolution runs over q | k | v, so its output rows are packed and q, k, v are views of them.

Parameter gradients are this rank's partial sums over its own tokens: nothing is reduced inside. With a loss whose
gradients add up over the ranks (`token_mean_loss`) the full gradient is their *sum* over the group: a plain all-reduce
sums; DDP and FSDP2 average, so the loss is multiplied by the number of ranks that they average over. docs/usage.md has
the three loops.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cp_gdn import library
from cp_gdn.column_gradients import ColumnGradients, split_columns
from cp_gdn.comm import Comm
from cp_gdn.context import Context, build_context
from cp_gdn.conv import causal_conv1d, convolve_part
from cp_gdn.entries import chunk_gated_delta_rule
from cp_gdn.handles import RecomputeHandle, handle_here
from cp_gdn.layer_ops import gated_norm, gates
from cp_gdn.layout import partition
from cp_gdn.packing import packed_qkv_views
from cp_gdn.transport import CopyTransport, CopyWorld

DT_RANGE = (1e-3, 0.1)
"""Time steps softplus(dt_bias) at the start, log-uniform: with A < 16 a token keeps exp(-1.6) to all of the state."""


ROWS = 16
"""Projections get a multiple of this many rows: CPU libraries sum the last few rows in another order, so that a row's
bits would depend on how many tokens its rank holds."""


class GatedDeltaNet(nn.Module):
    """Projections, short convolution, gates, the gated delta rule, a gated RMS norm per value head, output projection.

    Args:
        hidden_size: channels of the input and the output.
        heads: (H, HV), q/k heads and value heads; HV is a multiple of H. As in `build_context`.
        head_dims: (K, V), channels of a q/k head and of a value head. As in `build_context`.
        conv_width: taps of the causal convolution.
        allow_neg_eigval: beta in (0, 2) instead of (0, 1), so that a token may flip the sign of a direction.
        norm_eps: added to the mean square in the output norm.

    `A_log` and `dt_bias` are fp32 and should stay so: the gates are computed in fp32 (fp64 for fp64 inputs).
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        heads: tuple[int, int],
        head_dims: tuple[int, int],
        conv_width: int = 4,
        allow_neg_eigval: bool = False,
        norm_eps: float = 1e-6,
    ) -> None:
        super().__init__()
        _check_sizes(hidden_size, heads, head_dims, conv_width)
        self.hidden_size, self.heads, self.head_dims = hidden_size, heads, head_dims
        self.conv_width, self.allow_neg_eigval, self.norm_eps = conv_width, allow_neg_eigval, norm_eps
        key_channels, value_channels = heads[0] * head_dims[0], heads[1] * head_dims[1]
        self.conv_channels = 2 * key_channels + value_channels
        self.in_proj_qkvz = nn.Linear(hidden_size, self.conv_channels + value_channels, bias=False)
        self.in_proj_ba = nn.Linear(hidden_size, 2 * heads[1], bias=False)
        self.conv_weight = nn.Parameter(torch.empty(self.conv_channels, conv_width))
        self.A_log = nn.Parameter(torch.empty(heads[1], dtype=torch.float32))
        self.dt_bias = nn.Parameter(torch.empty(heads[1], dtype=torch.float32))
        self.norm_weight = nn.Parameter(torch.empty(head_dims[1]))
        self.out_proj = nn.Linear(value_channels, hidden_size, bias=False)
        self.reset_own_parameters()

    @torch.no_grad()
    def reset_own_parameters(self) -> None:
        """Fill the parameters outside the linears: A ~ U(0, 16), softplus(dt_bias) log-uniform in `DT_RANGE`."""
        self.conv_weight.uniform_(-(self.conv_width**-0.5), self.conv_width**-0.5)
        # A = 0 would make A_log infinite.
        self.A_log.uniform_(0.0, 16.0).clamp_(min=2.0**-10).log_()
        dt = self.dt_bias.uniform_(math.log(DT_RANGE[0]), math.log(DT_RANGE[1])).exp_()
        # The inverse of softplus: dt + log(1 - exp(-dt)).
        self.dt_bias.copy_(dt + torch.log(-torch.expm1(-dt)))
        self.norm_weight.fill_(1.0)

    @property
    def conv(self) -> tuple[int, int]:
        """(channels, width) of the convolution, as `build_context` takes it."""
        return self.conv_channels, self.conv_width

    def forward(
        self,
        x: Tensor,
        ctx: Context | None = None,
        cu_seqlens: Sequence[int] | Tensor | None = None,
        recompute: RecomputeHandle | None = None,
    ) -> Tensor:
        """x [1, T, hidden] under a context, T this rank's tokens; result like x.

        Without a context the layer runs alone, whatever process groups exist: x is [B, T, hidden] with one document per
        row, or [1, T, hidden] with the documents of `cu_seqlens`. A context is then planned in every call; a model of
        many layers builds one itself and passes it.

        A recompute under `torch.utils.checkpoint` sends nothing: with ``use_reentrant=False`` by itself, otherwise with
        a handle that was made outside of the checkpointed function.
        """
        comm = Comm(CopyTransport(CopyWorld(1), 0)) if ctx is None else ctx.comm
        with comm.guard("GatedDeltaNet"):
            self._check_rows(x, ctx, cu_seqlens)
            rows = x.reshape(1, -1, self.hidden_size)
            padded, tokens = _pad_rows(rows), rows.shape[1]
            qkvz, ba = (linear(padded)[:, :tokens] for linear in (self.in_proj_qkvz, self.in_proj_ba))
            if ctx is None:
                length = x.shape[1]
                bounds = [row * length for row in range(len(x) + 1)] if cu_seqlens is None else cu_seqlens
                ctx = self._context_alone(comm, bounds, qkvz)
            mixed = self._mix(qkvz, ba, ctx, handle_here(ctx, recompute))
            return self.out_proj(_pad_rows(mixed))[:, :tokens].view(x.shape)

    def _check_rows(self, x: Tensor, ctx: Context | None, cu_seqlens: Sequence[int] | Tensor | None) -> None:
        if x.dim() != 3 or x.shape[2] != self.hidden_size:
            raise ValueError(f"x: got shape {list(x.shape)}, expected [1, T, {self.hidden_size}]")
        if ctx is not None and cu_seqlens is not None:
            raise ValueError("cu_seqlens: got it beside ctx, which has the boundaries already; pass one of them")
        if len(x) != 1 and (ctx is not None or cu_seqlens is not None):
            what = "ctx" if cu_seqlens is None else "cu_seqlens"
            raise ValueError(
                f"x: got a batch of {len(x)} rows beside {what}; expected [1, T, hidden], documents packed"
            )

    def _context_alone(self, comm: Comm, cu_seqlens: Sequence[int] | Tensor, qkvz: Tensor) -> Context:
        return build_context(
            partition(cu_seqlens, 1),
            comm,
            device=qkvz.device,
            heads=self.heads,
            head_dims=self.head_dims,
            dtype=qkvz.dtype,
            conv=self.conv,
        )

    def _mix(self, qkvz: Tensor, ba: Tensor, ctx: Context, handle: RecomputeHandle | None) -> Tensor:
        """From the projections [1, T, ...] to the gated norm's output [1, T, HV * V]."""
        widths = (self.conv_channels, self.out_proj.in_features)
        if library.is_wanted():
            room, (qkv, z) = None, qkvz.split(widths, dim=-1)
            qkv = causal_conv1d(qkv, self.conv_weight, None, ctx=ctx, recompute=handle)
        else:
            room = ColumnGradients(widths)
            qkv, z = split_columns(qkvz, room)
            qkv = convolve_part(qkv, self.conv_weight, ctx, handle, room)
        q, k, v = packed_qkv_views(qkv, self.heads, self.head_dims)
        g, beta = gates(ba, self.A_log, self.dt_bias, 2.0 if self.allow_neg_eigval else 1.0, ctx)
        o, _ = chunk_gated_delta_rule(q, k, v, g, beta, ctx=ctx, use_qk_l2norm_in_kernel=True, recompute=handle)
        return gated_norm(o, z.unflatten(-1, o.shape[-2:]), self.norm_weight, self.norm_eps, ctx, room).flatten(-2)

    def extra_repr(self) -> str:
        return f"heads={self.heads}, head_dims={self.head_dims}, conv_width={self.conv_width}"


def _pad_rows(rows: Tensor) -> Tensor:
    """[1, T, any] with zero rows up to a multiple of `ROWS`; the tensor itself if that is none, except for a compiler,
    which would make a graph for either case."""
    missing = -rows.shape[1] % ROWS
    return F.pad(rows, (0, 0, 0, missing)) if torch.compiler.is_compiling() or missing else rows


def _check_sizes(hidden_size: int, heads: tuple[int, int], head_dims: tuple[int, int], conv_width: int) -> None:
    sizes = {"hidden_size": (hidden_size,), "heads": heads, "head_dims": head_dims, "conv_width": (conv_width,)}
    for name, values in sizes.items():
        if any(int(value) != value or value < 1 for value in values):
            raise ValueError(f"{name}: got {values}, expected integers of at least 1")
    if len(heads) != 2 or heads[1] % heads[0]:
        raise ValueError(f"heads: got {heads}, expected (H, HV) with HV a multiple of H")
    if len(head_dims) != 2:
        raise ValueError(f"head_dims: got {head_dims}, expected (K, V)")
