"""A plan as the stages read it: index tables of one rank, forward and mirrored, ready to be uploaded."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from cp_gdn.chains import Rows
from cp_gdn.hops import HopLists
from cp_gdn.layout import Partition
from cp_gdn.page import Lists, Page, Table
from cp_gdn.plan import CHUNK, Plan
from cp_gdn.walks import Walks, build_walks


@dataclass(frozen=True, kw_only=True)
class TokenTables:
    """Tables with an entry per token, made where they are used, when they are first used, from tables with an entry per
    chunk or fragment.

    Attributes:
        num_tokens: T.
        chunks: [2, N] tokens of each chunk, and from their local row to their chunk row.
        fragments: [3, n] tokens of each fragment, and from their local row to their global index and to their offset in
            the document.
    """

    num_tokens: int
    chunks: Table
    fragments: Table

    # NOTE: not cached_property, whose lock a compiler cannot trace.

    @property
    def num_chunks(self) -> int:
        return int(self.chunks.data.shape[1])

    @property
    def rows(self) -> Tensor:
        """[N * 64] local row of each chunk row, T where it holds no token."""
        return self._made("rows", self._rows)

    @property
    def back(self) -> Tensor:
        """[T] chunk row of each local row."""
        return self._made("back", lambda: self._shifted(self.chunks, 1))

    @property
    def token_ids(self) -> Tensor:
        """[T] global index of each local row."""
        return self._made("token_ids", lambda: self._shifted(self.fragments, 1))

    @property
    def positions(self) -> Tensor:
        """[T] offset in its document of each local row."""
        return self._made("positions", lambda: self._shifted(self.fragments, 2))

    def make(self, *, rows: bool = True) -> None:
        """Make all of them now; ``rows``: those of chunks too, which only the torch backend reads."""
        _ = self.token_ids, self.positions
        if rows:
            _ = self.rows

    def _made(self, name: str, make: Callable[[], Tensor]) -> Tensor:
        key = f"_{name}_made"
        table: Tensor | None = self.__dict__.get(key)
        if table is None:
            with nullcontext() if torch.compiler.is_compiling() else _disable_current_modes():
                table = make()  # a table of this context, not one of a mode that happens to look on
            self.__dict__[key] = table
        return table

    def _rows(self) -> Tensor:
        back = self.back
        rows = torch.full((self.num_chunks * CHUNK,), self.num_tokens, dtype=torch.int64, device=back.device)
        return rows.scatter_(0, back, torch.arange(self.num_tokens, device=back.device))

    def _shifted(self, table: Table, row: int) -> Tensor:
        count, shift = torch.as_tensor(table.data[0]), torch.as_tensor(table.data[row])
        if shift.device.type != "cpu" or torch.compiler.is_compiling():
            return shifted_runs(torch.arange(self.num_tokens, device=shift.device), shift, count)
        shifted = shift.numpy().repeat(count.numpy())  # the same, some five times faster
        shifted += np.arange(self.num_tokens)
        return torch.from_numpy(shifted)


def shifted_runs(own: Tensor, shift: Tensor, count: Tensor) -> Tensor:
    """Local rows ``own`` plus the shift of the run that each is in; no synchronization, for the size is known."""
    return torch.repeat_interleave(shift, count, output_size=len(own)).add_(own)


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Everything one rank's stages look up; pairs are of the forward direction and its mirror.

    Attributes:
        tokens, hops: see there.
        walks: of the torch backend, None for the kernels.
        num_states, num_offsets, num_maps: rows of the buffers.
        starts: two lists [2, ..]: states that a document starts from, and their rows in the caller's tensor.
        empty: [2, e] rows of empty documents, whose states pass through, in the initial and in the final states.
    """

    tokens: TokenTables
    hops: HopLists
    walks: Walks | None
    num_states: tuple[int, int]
    num_offsets: tuple[int, int]
    num_maps: int
    starts: Lists
    empty: Table

    @property
    def rows(self) -> Tensor:
        return self.tokens.rows

    @property
    def back(self) -> Tensor:
        return self.tokens.back

    @property
    def token_ids(self) -> Tensor:
        return self.tokens.token_ids

    @property
    def positions(self) -> Tensor:
        return self.tokens.positions


def build_schedule(part: Partition, plan: Plan, made: tuple[Rows, HopLists, Page], *, walks: bool = True) -> Schedule:
    """Index tables of ``plan``. ``walks``: those of the torch backend too."""
    rows, hops, page = made
    of_documents, (start, segment) = plan.document_rows, (~plan.segments.around).nonzero()
    states = rows.state_of_segment.reshape(2, -1)[start, segment]
    forward = int(np.count_nonzero(start == 0))
    return Schedule(
        tokens=_token_tables(part, plan, page),
        hops=hops,
        walks=build_walks(plan, rows, page) if walks else None,
        num_states=(rows.num_states[0], rows.num_states[1]),
        num_offsets=(rows.num_offsets[0], rows.num_offsets[1]),
        num_maps=rows.num_maps,
        starts=page.put_lists(np.array((states, of_documents[start, segment])), [forward, len(start) - forward]),
        empty=page.put(np.array([docs.searchsorted(plan.empty_docs) for docs in (plan.entry_docs, plan.exit_docs)])),
    )


def _token_tables(part: Partition, plan: Plan, page: Page) -> TokenTables:
    own, chunks = plan.fragments, plan.chunks
    position_shift = own.offset - own.first_row
    return TokenTables(
        num_tokens=plan.num_tokens,
        chunks=page.put(np.array((chunks.count, np.arange(0, len(chunks) * CHUNK, CHUNK) - chunks.first_row))),
        fragments=page.put(np.array((own.length, position_shift + part.bounds[own.doc], position_shift))),
    )
