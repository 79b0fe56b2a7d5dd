"""One step of the op on the kernels in a process of its own: prints a digest of every result."""

import hashlib

import torch

from tests.gpu.op_cases import PACKS, bounds_of, hopper, inputs


def digest() -> str:
    """Of o, final states and gradients of a pack in three segments."""
    x, found = inputs(PACKS["mixed"], "slow", 3), hashlib.sha256()
    for name, value in sorted(
        hopper(x, bounds_of("mixed"), 1, "contiguous", segments=3, initial=True, grads=True).items()
    ):
        found.update(name.encode())
        found.update(value.contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return found.hexdigest()


if __name__ == "__main__":
    print(digest())
