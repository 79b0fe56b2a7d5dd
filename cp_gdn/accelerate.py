"""`import cp_gdn.accelerate`: the plugin for Hugging Face Accelerate (integrations/accelerate.py)."""

from cp_gdn.integrations.accelerate import (
    ParallelismConfig,
    count_tokens,
    disable,
    enable,
    shard,
    token_mean_loss,
    unsharded,
)

__all__ = ["ParallelismConfig", "count_tokens", "disable", "enable", "shard", "token_mean_loss", "unsharded"]
