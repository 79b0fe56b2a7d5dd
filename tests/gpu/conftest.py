"""What every test on a GPU leaves behind: nothing, so that several processes share one."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def memory_given_back() -> Iterator[None]:
    """Memory that torch keeps in reserve goes back to the driver."""
    yield
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
