"""Tests with real process groups share one pool of workers, so pytest-xdist keeps them together on one of its own."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("dist"):
            item.add_marker(pytest.mark.xdist_group("processes"))
