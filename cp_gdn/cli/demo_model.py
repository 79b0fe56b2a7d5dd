"""The demo's byte-level language model: Gated DeltaNet and SwiGLU blocks between an embedding and a head."""

import torch
from torch import Tensor, nn

from cp_gdn.context import Context
from cp_gdn.gates import silu
from cp_gdn.layer import GatedDeltaNet

NUM_BYTES = 256
HIDDEN = 96
NUM_BLOCKS = 2
HEADS = (2, 4)
HEAD_DIMS = (32, 32)
GPU_HEAD_DIMS = (128, 128)
"""What the kernels take."""


class SwiGLU(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(hidden, 4 * hidden, bias=False)
        self.down = nn.Linear(2 * hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(silu(gate) * up)


class Block(nn.Module):
    def __init__(self, hidden: int, head_dims: tuple[int, int]) -> None:
        super().__init__()
        self.mixer_norm, self.mlp_norm = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.mixer = GatedDeltaNet(hidden, heads=HEADS, head_dims=head_dims)
        self.mlp = SwiGLU(hidden)

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        x = x + self.mixer(self.mixer_norm(x), ctx)
        return x + self.mlp(self.mlp_norm(x))


class ByteModel(nn.Module):
    """ids [1, T] of this rank's tokens -> fp32 logits [1, T, 256]; only the mixers look at other tokens, through `ctx`.

    Parameters are fp32. ``dtype`` is what the mixers compute in; bf16 is autocast's.
    """

    def __init__(self, head_dims: tuple[int, int] = HEAD_DIMS, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.head_dims, self.dtype = head_dims, dtype
        self.embedding = nn.Embedding(NUM_BYTES, HIDDEN)
        self.blocks = nn.ModuleList(Block(HIDDEN, head_dims) for _ in range(NUM_BLOCKS))
        self.norm = nn.RMSNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, NUM_BYTES, bias=False)

    @property
    def conv(self) -> tuple[int, int]:
        """(channels, width) of the mixers' convolutions, for `build_context`."""
        block = self.blocks[0]
        assert isinstance(block, Block)
        return block.mixer.conv

    def forward(self, ids: Tensor, ctx: Context) -> Tensor:
        with torch.autocast(ids.device.type, self.dtype, enabled=self.dtype != torch.float32):
            x = self.embedding(ids)
            for block in self.blocks:
                x = block(x, ctx)
            return self.head(self.norm(x)).float()


def build_model(seed: int, device: torch.device) -> ByteModel:
    """The same parameters on every rank and for every world size: drawn on the CPU from the seed. On a GPU the mixers
    fit the kernels."""
    torch.manual_seed(seed)
    model = ByteModel(GPU_HEAD_DIMS, torch.bfloat16) if device.type == "cuda" else ByteModel()
    return model.to(device)
