"""Which exchange a pack takes, by a stated model of bytes and hops, and the exchange objects of a call."""

from dataclasses import dataclass

from cp_gdn.a2a.exchange import OwnerExchange
from cp_gdn.a2a.routes import OwnerRoutes, draft_owner, owner_routes
from cp_gdn.backends.hopper_exchange import PackedExchange, PackedRoutes, kernel_routes
from cp_gdn.calibration import H200_MODEL, Times
from cp_gdn.chains import Rows
from cp_gdn.comm import Comm
from cp_gdn.flow import Exchange, Flow
from cp_gdn.hops import HopLists, stepwise
from cp_gdn.layout import Partition
from cp_gdn.page import Page
from cp_gdn.plan import Plan
from cp_gdn.ring.exchange import RingExchange
from cp_gdn.ring.routes import NO_RING, RingRoutes, build_ring

EXCHANGES = ("auto", "ring", "a2a")
HOP_US = H200_MODEL.times.exchange / 1e3
COLLECTIVE_US = H200_MODEL.times.collective / 1e3
BYTES_PER_US = (1 << 20) * 1e3 / H200_MODEL.times.link_mib
"""What a CPU plans with, as `calibration.Times` has it for the H200."""
MOST_OWNER_BYTES = 8 << 30
"""What may pass an owner in one exchange by the choice of "auto": it is all in memory at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """The exchange of a pack, the same on every rank, and why. ``none`` where no chain crosses ranks."""

    kind: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Bytes of one state and of one map of all ``heads`` value heads."""

    heads: int
    state: int
    square: int

    @classmethod
    def of(cls, heads: int, head_dims: tuple[int, int], itemsize: int) -> "Sizes":
        key, value = head_dims
        return cls(heads=heads, state=heads * key * value * itemsize, square=heads * key * key * itemsize)


def choose_exchange(
    asked: str, part: Partition, heads: int, head_dims: tuple[int, int], *, grid: bool, itemsize: int
) -> Choice:
    """Resolve ``exchange=`` by the links of an H200; see `choose`."""
    return choose(asked, part, Sizes.of(heads, head_dims, itemsize), H200_MODEL.times, grid=grid)


def choose(asked: str, part: Partition, sizes: Sizes, times: Times, *, grid: bool) -> Choice:
    """Resolve ``exchange=``: as asked, or by modelled microseconds of one direction.

    ring: per hop between ranks a message and the states of its busiest pair of ranks; a2a: two collectives and the
        bytes of the busiest rank, as the holder of fragments or as the owner of heads (of at least one head, where
        ranks are more than heads).
    Grid mode ships every segment's map with a2a, so it takes ring; so does what would fill an owner's memory.
    """
    if asked not in EXCHANGES:
        raise ValueError(f"exchange: got {asked!r}, expected one of {EXCHANGES}")
    if not part.crosses:
        return Choice(kind="none", reason="no document crosses ranks, nothing is sent")
    if asked != "auto":
        return Choice(kind=asked, reason="asked for")
    if grid:
        return Choice(kind="ring", reason="grid mode: a2a would ship the map of every segment")
    load, owned = part.cuts.link_load(), -(-sizes.heads // part.world_size)
    shipped = (load.fragments * (2 * sizes.state) + load.middles * sizes.square).tolist()
    passed = sum(shipped) * owned // sizes.heads  # bytes into and out of an owner
    sent = max(*shipped, passed)
    us_per_byte = times.link_mib / 1e3 / (1 << 20)
    ring = len(load.busiest) * times.exchange / 1e3 + sum(load.busiest.tolist()) * sizes.state * us_per_byte
    a2a = 2 * times.collective / 1e3 + sent * us_per_byte
    kind = "ring" if ring <= a2a or passed > MOST_OWNER_BYTES else "a2a"
    return Choice(kind=kind, reason=f"modelled us per direction: ring {ring:.0f}, a2a {a2a:.0f}")


@dataclass(frozen=True, kw_only=True)
class Routes:
    """Messages of one rank in both directions, uploaded; which of the fields are used follows from the kind.

    Attributes:
        hops: of this rank; a ring steps by some of them. owners: forward and mirrored.
    """

    kind: str
    hops: HopLists
    ring: RingRoutes
    owners: tuple[OwnerRoutes, OwnerRoutes] | None

    def exchange(self, comm: Comm, flow: Flow) -> Exchange:
        """The exchange object of one direction of one call."""
        if self.owners is None:
            return RingExchange(comm, self.ring, self.hops, flow)
        owner = self.owners[flow.adjoint]
        return (
            PackedExchange(comm, owner, flow) if isinstance(owner, PackedRoutes) else OwnerExchange(comm, owner, flow)
        )


def build_routes(
    kind: str, part: Partition, plan: Plan, made: tuple[Rows, HopLists, Page], *, kernel_heads: int | None = None
) -> Routes:
    """Routes of ``kind`` ("none" has none), forward and mirrored. ``kernel_heads``: value heads of a context on the
    kernels, None on torch."""
    rows, hops, page = made
    ring = build_ring(part, plan, rows, hops, page) if kind == "ring" else NO_RING
    owners = None
    if kind == "a2a":
        draft = draft_owner(part, plan, rows)
        if kernel_heads is None:
            owners = owner_routes(draft, page, stepwise)
        else:
            owners = kernel_routes(draft, page, kernel_heads)
    return Routes(kind=kind, hops=hops, ring=ring, owners=owners)
