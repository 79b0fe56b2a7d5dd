"""Models in fp64 that ask for fp32 inside."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class InDouble(TorchFunctionMode):
    """Takes every request for fp32 as one for fp64, so that layers which compute in fp32 inside compute in fp64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def wide(x: Any) -> Any:
            return torch.float64 if x is torch.float32 else x

        func = torch.Tensor.double if func is torch.Tensor.float else func
        return func(*map(wide, args), **{name: wide(x) for name, x in (kwargs or {}).items()})
