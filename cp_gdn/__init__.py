"""cp_gdn: context-parallel training of Gated DeltaNet layers on torch.distributed, bit for bit.

Start with `reference.py` (what is computed), then `layout.py` (who owns which tokens), `op.py` (the pipeline).
"""

from typing import Any

from cp_gdn._version import __version__
from cp_gdn.byte_counts import comm_bytes, saved_bytes
from cp_gdn.comm import Comm, CommFailed, PlanDisagreement
from cp_gdn.context import Context, build_context
from cp_gdn.conv import causal_conv1d
from cp_gdn.entries import backward, chunk_gated_delta_rule, forward
from cp_gdn.graphs import GraphCache, GraphResults
from cp_gdn.handles import RecomputeHandle
from cp_gdn.layer import GatedDeltaNet
from cp_gdn.layout import Fragment, Partition, partition
from cp_gdn.loss import token_mean_loss
from cp_gdn.options import Options
from cp_gdn.packing import packed_qkv_views
from cp_gdn.saved import InputGradients, Saved
from cp_gdn.sharding import positions, shard, shift_labels, unshard
from cp_gdn.twin import twin
from cp_gdn.workspace import Workspace, handoff_bytes, workspace_bytes, workspace_layout

__all__ = [
    "Comm",
    "CommFailed",
    "Context",
    "Fragment",
    "GDNContextParallel",
    "GatedDeltaNet",
    "GraphCache",
    "GraphResults",
    "InputGradients",
    "Options",
    "Partition",
    "PlanDisagreement",
    "RecomputeHandle",
    "Saved",
    "Workspace",
    "__version__",
    "backward",
    "build_context",
    "causal_conv1d",
    "chunk_gated_delta_rule",
    "comm_bytes",
    "forward",
    "gather_attention",
    "handoff_bytes",
    "packed_qkv_views",
    "parallelize_plan",
    "partition",
    "positions",
    "saved_bytes",
    "shard",
    "shift_labels",
    "token_mean_loss",
    "twin",
    "unshard",
    "unsharded",
    "workspace_bytes",
    "workspace_layout",
]

_INTEGRATIONS = {
    "GDNContextParallel": "parallel_style",
    "parallelize_plan": "parallel_style",
    "gather_attention": "attention",
    "unsharded": "seat",
}
"""Public names of the integrations and their modules, imported when they are first asked for."""


def __getattr__(name: str) -> Any:
    if name not in _INTEGRATIONS:
        raise AttributeError(f"module 'cp_gdn' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"cp_gdn.integrations.{_INTEGRATIONS[name]}"), name)
