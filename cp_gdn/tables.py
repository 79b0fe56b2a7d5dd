"""All tables of a context: those of the plan, the routes and the halo, and of the kernels where they run."""

from dataclasses import dataclass

import torch

from cp_gdn.backends.hopper_hops import chainwise
from cp_gdn.backends.hopper_tables import KernelTables, kernel_tables
from cp_gdn.chains import build_rows, hop_columns
from cp_gdn.exchange import Routes, build_routes
from cp_gdn.halo import Halo, build_halo
from cp_gdn.hops import stepwise
from cp_gdn.layout import Partition
from cp_gdn.page import Page
from cp_gdn.plan import Plan
from cp_gdn.schedule import Schedule, build_schedule


@dataclass(frozen=True, kw_only=True)
class ContextTables:
    """All tables of a context and the page that they lie on."""

    schedule: Schedule
    routes: Routes
    halo: Halo | None
    kernels: KernelTables | None
    page: Page

    def upload(self, device: torch.device) -> None:
        """Move them to the device in one copy, and make those that have an entry per token there: on a GPU now, and
        not first inside of a graph capture."""
        self.page.upload(device)
        if device.type == "cpu":
            return
        self.schedule.tokens.make(rows=self.kernels is None)
        if self.halo is not None:
            self.halo.make()


def build_tables(
    part: Partition, plan: Plan, exchange: str, heads: tuple[int, int], *, on_kernels: bool, width: int | None
) -> ContextTables:
    """The tables of a plan, not yet uploaded. ``exchange``: "ring", "a2a" or "none". ``width``: of the convolution,
    None without one."""
    page, rows = Page(), build_rows(plan, starts_last=on_kernels)
    columns = hop_columns(plan, rows, steps_on=exchange == "ring")
    made = rows, (chainwise if on_kernels else stepwise)(columns, page), page
    return ContextTables(
        schedule=build_schedule(part, plan, made, walks=not on_kernels),
        routes=build_routes(exchange, part, plan, made, kernel_heads=heads[1] if on_kernels else None),
        halo=None if width is None else build_halo(part, plan.rank, width, page),
        kernels=kernel_tables(plan, rows, heads, page) if on_kernels else None,
        page=page,
    )
