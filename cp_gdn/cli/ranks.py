"""Where the ranks that a command starts run, and how their messages go."""

from typing import Any

import torch
import torch.distributed as dist


def group_backend(device: str, world: int) -> str:
    """gloo, or nccl where every rank has a GPU of its own, as it must have."""
    return "nccl" if device == "cuda" and world <= torch.cuda.device_count() else "gloo"


def device_of_rank(device: str, rank: int) -> torch.device:
    """The device of a rank of this machine, made the current one; ranks share the GPUs in turn."""
    if device == "cpu":
        return torch.device("cpu")
    found = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(found)
    return found


def start_group(backend: str, device: str, local_rank: int, **store: Any) -> torch.device:
    """Join the process group from the device of a rank of this machine; ``store``: of `init_process_group`."""
    found = device_of_rank(device, local_rank)
    dist.init_process_group(backend, device_id=found if backend == "nccl" else None, **store)
    return found
