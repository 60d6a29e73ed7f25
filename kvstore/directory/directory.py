"""The directory: who is in the cluster, and what every node says of its blocks. One contract, two implementations.

Membership.  A member joins under its id and is given an epoch, larger than any before under that id, also when the
directory has lost its memory since. It is there for `lease_s` after its last renewal, or until it leaves. Whatever
comes with an older epoch than the latest one under the same id is refused (`FencedError`): a process that was taken
for dead and started anew elsewhere cannot speak for its successor.

Blocks.  A node numbers its changes 1, 2, 3, ... from its start; (node, epoch, sequence) names one. The directory
keeps the latest ones of all nodes, in order of publication. A change may be published twice, when the answer to the
first try was lost. Whoever follows is told by a `Gap` that it may have missed any number of them, first of all at its
start, and after each interruption. Gaps that a node itself made show in its sequence. Either way the node is asked
for a snapshot: the directory tells of changes, the nodes are the truth.

Every method raises `AwayError` while the directory cannot be reached, except `changes`, which waits.
"""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvstore.core.blocks import BlockHash, NodeId, Tier
from kvstore.directory.membership import Member

CHANGES_KEPT = 100_000
"""Of all nodes together, about. A follower that is further behind has a gap."""


class AwayError(ConnectionError):
    """The directory does not answer, or not in time."""


class FencedError(Exception):
    """A later start under the same id has joined: this process speaks for nobody any more."""


@dataclass(frozen=True, slots=True)
class BlockChange:
    """A node holds these blocks in `tier` now, at best, or, where that is None, nowhere any more."""

    sequence: int
    tier: Tier | None
    hashes: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True)
class Published:
    """A change as followers see it."""

    node: NodeId
    epoch: int
    change: BlockChange


@dataclass(frozen=True, slots=True)
class Gap:
    """Changes may have been missed, of every node."""


@dataclass(frozen=True, slots=True)
class Roster:
    """All present members in order of id. `memory` differs from the last one when all was forgotten in between: who
    is absent then may just not have renewed its lease yet.
    """

    memory: str
    members: tuple[Member, ...]


class Directory(Protocol):
    async def join(self, member: Member) -> Member:
        """The member with its epoch. It fences earlier ones at once, and is in the roster from its first renewal."""
        ...

    async def renew(self, member: Member) -> None:
        """Makes the member present for a lease's time from now. Raises FencedError."""
        ...

    async def leave(self, member: Member) -> None:
        """Takes the member out, unless a later one has its place."""
        ...

    async def roster(self) -> Roster: ...

    async def publish(self, member: Member, changes: Sequence[BlockChange]) -> None:
        """Raises FencedError; then nothing was published."""
        ...

    def changes(self) -> AsyncGenerator[Published | Gap, None]:
        """Begins with a Gap; everything published after it was returned follows, or another Gap. Never ends."""
        ...
