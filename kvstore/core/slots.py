"""The DRAM tier's book-keeping: which slot holds what, who may write it, who may read it.

Pure: no memory is touched here, no clock is read. The node's driver owns the arena and tells this machine what
happened; the machine says which slots to use. The rules:

1. A slot is FREE, FILLING (one writer), COMMITTED (any number of readers) or DRAINING (given up while its writer
   may still be in the middle of a copy).
2. Each use of a slot has an epoch, larger than any before. A reader or writer with an older epoch is too late.
3. A FILLING or DRAINING slot becomes FREE only when its writer says that it has stopped (`writer_stopped`) or has
   died (`writer_died`); never by time alone, because no fence stops a memory copy.
4. Readers hold leases that end by `release` or by time (`expire`). Time is safe for them: a reader verifies epoch
   and checksum after its copy, so an outlived lease is a miss, never stale bytes.
5. A block is visible to other requests only when COMMITTED and not private. If two requests fill the same block,
   the first to commit is kept; the other's copy lives until its own readers are done.
6. Only COMMITTED slots without leases are victims, in the order of an eviction policy (`kvstore.core.eviction`). A
   just-written block is not the first; and of blocks written, asked for or released together the deepest in the
   chain is told first, because without its first block the rest of a chain cannot be found.

Conservation, checked by `check()`: free + filling + draining + committed = all; leases point at live slots.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from kvstore.core.blocks import BlockHash, RequestId, WorkerId
from kvstore.core.eviction import Eviction, eviction


class SlotState(Enum):
    FREE = "free"
    FILLING = "filling"
    COMMITTED = "committed"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class SlotRef:
    """One use of one slot. `filled` is true when the block was committed at the time of asking."""

    slot: int
    epoch: int
    hash: BlockHash
    filled: bool


@dataclass(frozen=True, slots=True)
class NoRoom:
    """Fewer slots could be freed than were asked for: all others are leased, being written, or needed by those."""

    wanted: int
    available: int


@dataclass(frozen=True, slots=True)
class Fenced:
    """The caller's epoch is over, or it holds nothing: what it wanted to commit or lease is not there."""

    reason: str


@dataclass(slots=True)
class _Slot:
    state: SlotState = SlotState.FREE
    epoch: int = 0
    hash: BlockHash = BlockHash(b"")
    parent: BlockHash | None = None
    depth: int = 0
    private: bool = False
    writer: WorkerId | None = None
    leases: int = 0

    @property
    def visible(self) -> bool:
        return self.state is SlotState.COMMITTED and not self.private


@dataclass(frozen=True, slots=True)
class _Filling:
    """What one request is filling; `slots` is empty where everything was cached."""

    writer: WorkerId
    slots: tuple[int, ...]


@dataclass(slots=True)
class _Lease:
    slots: list[tuple[int, int]]  # (slot, epoch)
    expires_s: float
    used: bool  # for a request; housekeeping makes no block younger


@dataclass(slots=True)
class SlotPool:
    """The slots of one arena; see the module's docstring for the rules. `eviction` is a key of `EVICTIONS`.

    Methods that free or store blocks append to `stored` and `removed`; the driver takes them with
    `take_changes` and publishes them.
    """

    size: int
    eviction: str = "cost_aware"
    _slots: list[_Slot] = field(init=False)
    _free: list[int] = field(init=False)
    _index: dict[BlockHash, int] = field(init=False, default_factory=dict)
    _visible: Eviction = field(init=False)  # the blocks of `_index`, pinned where they are leased
    _leases: dict[tuple[RequestId, str], _Lease] = field(init=False, default_factory=dict)
    _filling: dict[RequestId, _Filling] = field(init=False, default_factory=dict)
    _draining: dict[int, WorkerId] = field(init=False, default_factory=dict)
    _epoch: int = field(init=False, default=0)
    _stored: list[BlockHash] = field(init=False, default_factory=list)
    _removed: list[BlockHash] = field(init=False, default_factory=list)
    _freed: list[int] = field(init=False, default_factory=list)
    evictions: int = field(init=False, default=0)
    leases_expired: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"an arena has at least one slot, not {self.size}")
        self._visible = eviction(self.eviction, self.size)
        self._slots = [_Slot() for _ in range(self.size)]
        self._free = list(range(self.size - 1, -1, -1))

    # -- asking -------------------------------------------------------------------------------------------

    def match(self, hashes: Sequence[BlockHash]) -> int:
        """How many of the chain's first blocks are committed here. Changes nothing."""
        for count, name in enumerate(hashes):
            if name not in self._index:
                return count
        return len(hashes)

    def has(self, name: BlockHash) -> bool:
        """Is the block committed here, for everyone to see?"""
        return name in self._index

    def place(self, name: BlockHash) -> tuple[BlockHash | None, int]:
        """(parent, depth) of a block that is committed here: the one before it in its chain, how many are before it."""
        slot = self._slots[self._index[name]]
        return slot.parent, slot.depth

    def committed(self) -> list[BlockHash]:
        """The visible blocks, oldest commit first."""
        return list(self._index)

    def counts(self) -> dict[str, int]:
        """Slots by state, plus leased slots and leases."""
        found = {state.value: 0 for state in SlotState}
        for slot in self._slots:
            found[slot.state.value] += 1
        found["leased"] = sum(1 for slot in self._slots if slot.leases)
        found["leases"] = len(self._leases)
        return found

    def draining(self) -> list[tuple[int, int]]:
        """(slot, epoch) of given-up slots whose writer has not yet said that it stopped."""
        return [(number, self._slots[number].epoch) for number in self._draining]

    def holds(self, slot: int, epoch: int) -> bool:
        """Is (slot, epoch) still the slot's present use?"""
        return 0 <= slot < self.size and epoch > 0 and self._slots[slot].epoch == epoch

    def epochs(self) -> list[int]:
        """The epoch of each slot's present use, 0 where there is none or its writer has given up."""
        over = (SlotState.FREE, SlotState.DRAINING)
        return [0 if slot.state in over else slot.epoch for slot in self._slots]

    def unfinished(self, request: RequestId) -> list[tuple[int, int]]:
        """(slot, epoch) that `request` is filling."""
        filling = self._filling.get(request)
        return [(number, self._slots[number].epoch) for number in filling.slots] if filling else []

    # -- writers ------------------------------------------------------------------------------------------

    def reserve(
        self,
        request: RequestId,
        writer: WorkerId,
        hashes: Sequence[BlockHash],
        tail: BlockHash | None,
        expires_s: float,
    ) -> list[SlotRef] | NoRoom | Fenced:
        """Slots for a prompt: its longest committed prefix as it is, the rest and the tail to be filled.

        `hashes` are a chain from its first block on.

        `writer` gets a lease on all of them until `expires_s`, so that what it will load or has just written stays.
        Nothing changes when there is no room. A request that is already being filled is refused.
        """
        if request in self._filling or (request, writer) in self._leases:
            return Fenced(f"request {request} already has a reservation")
        found = self._prefix(hashes)
        wanted = len(hashes) - len(found) + (tail is not None)
        no_room = self._make_room(wanted, found)
        if no_room is not None:
            return no_room
        self._lease((request, writer), found, expires_s)
        self._asked(found)
        filling = [
            self._take(hashes[depth], writer, hashes[depth - 1] if depth else None, depth)
            for depth in range(len(found), len(hashes))
        ]
        if tail is not None:
            filling.append(self._take(tail, writer, private=True))
        self._filling[request] = _Filling(writer, tuple(ref.slot for ref in filling))
        self._lease((request, writer), filling, expires_s)
        return [*found, *filling]

    def commit(self, request: RequestId, writer: WorkerId, blocks: int | None = None) -> int | Fenced:
        """All that `request` was filling is complete: make it visible. Returns the number of blocks committed.

        With `blocks`, only so many of the first are; the rest is free, so its writing must be certain to be over.
        The caller has checked that each segment is there. A writer that holds no reservation is fenced.
        """
        filling = self._filling.get(request)
        if filling is None:
            return Fenced(f"request {request} is filling nothing")
        if filling.writer != writer:
            return Fenced(f"{writer} is not the writer of request {request}")
        del self._filling[request]
        whole = filling.slots[:blocks]
        for number in filling.slots[len(whole) :]:
            self._discard(number)
        for number in whole:
            slot = self._slots[number]
            slot.state = SlotState.COMMITTED
            slot.writer = None
            if slot.private or slot.hash in self._index:
                slot.private = True
            else:
                self._index[slot.hash] = number
                self._stored.append(slot.hash)
        for number in reversed(whole):  # rule 6
            self._committed(number)
        return len(whole)

    def abandon(self, request: RequestId, writer: WorkerId, stopped: bool) -> Fenced | None:
        """The writer gives up what it was filling (nothing, perhaps) and its lease.

        `stopped`: it is certain that it writes no more. Another's reservation is not for it to give up.
        """
        filling = self._filling.get(request)
        if filling is not None and filling.writer != writer:
            return Fenced(f"{writer} is not the writer of request {request}")
        for number in filling.slots if filling else ():
            if stopped:
                self._discard(number)
            else:
                self._slots[number].state = SlotState.DRAINING
                self._draining[number] = writer
        self._filling.pop(request, None)
        self.release(request, writer)
        return None

    def writer_stopped(self, slot: int, epoch: int) -> None:
        """The writer of this use of a draining slot says that it has stopped."""
        if slot in self._draining and self._slots[slot].epoch == epoch:
            self._discard(slot)

    def writer_died(self, writer: WorkerId) -> None:
        """The writer's processes are gone: what it was filling is free, its leases are void."""
        for request in [r for r, filling in self._filling.items() if filling.writer == writer]:
            self.abandon(request, writer, stopped=True)
        for number in [n for n, owner in self._draining.items() if owner == writer]:
            self._discard(number)
        for request, holder in [key for key in self._leases if key[1] == writer]:
            self.release(request, holder)

    # -- readers ------------------------------------------------------------------------------------------

    def lease(
        self, request: RequestId, holder: str, refs: Iterable[tuple[int, int]], expires_s: float
    ) -> list[SlotRef] | Fenced:
        """A lease on slots named by (slot, epoch), committed or still being filled (follow read).

        Asking again with the same request and holder renews and extends. Refused whole if one use is over.
        """
        found: list[SlotRef] = []
        for number, epoch in refs:
            if not self.holds(number, epoch) or self._slots[number].state in (
                SlotState.FREE,
                SlotState.DRAINING,
            ):
                return Fenced(f"slot {number} epoch {epoch} is no longer held")
            found.append(self._ref(number))
        self._lease((request, holder), found, expires_s)
        return found

    def acquire(
        self,
        request: RequestId,
        holder: str,
        hashes: Sequence[BlockHash],
        expires_s: float,
        used: bool = True,
    ) -> list[SlotRef]:
        """A lease on the longest committed prefix of the chain; empty when nothing is there.

        Not `used`: for housekeeping, such as a write-back, which is no sign that the blocks will be asked for again.
        """
        found = self._prefix(hashes)
        if found:
            self._lease((request, holder), found, expires_s, used)
        if used:
            self._asked(found)
        return found

    def release(self, request: RequestId, holder: str) -> bool:
        """The holder needs the slots no more. False if it held nothing (released before, or expired)."""
        lease = self._leases.pop((request, holder), None)
        if lease is None:
            return False
        for number, epoch in reversed(lease.slots):  # rule 6
            slot = self._slots[number]
            assert slot.epoch == epoch and slot.leases > 0, (number, epoch, slot)
            if lease.used and slot.visible:
                self._visible.touched(slot.hash, asked=False)
            slot.leases -= 1
            if not slot.leases:
                self._unleased(number)
        return True

    def expire(self, now: float) -> list[tuple[RequestId, str]]:
        """Ends the leases whose time is over, except a writer's on what it still fills. Returns their keys."""
        over = [
            (request, holder)
            for (request, holder), lease in self._leases.items()
            if lease.expires_s <= now and not self._fills(request, holder)
        ]
        for request, holder in over:
            self.release(request, holder)
        self.leases_expired += len(over)
        return over

    def drop(self, name: BlockHash) -> bool:
        """Forgets a committed block (it did not verify, or an operator asked). False if it is not here."""
        number = self._index.pop(name, None)
        if number is None:
            return False
        self._removed.append(name)
        self._visible.removed(name)
        slot = self._slots[number]
        slot.private = True
        if not slot.leases:
            self._discard(number)
        return True

    def take_changes(self) -> tuple[list[BlockHash], list[BlockHash]]:
        """(stored, removed) since the last call, each in order. A block may be in both."""
        changes = (self._stored, self._removed)
        self._stored, self._removed = [], []
        return changes

    def take_freed(self) -> list[int]:
        """Slots whose use ended since the last call (they may be in a new use already; see `holds`)."""
        freed, self._freed = self._freed, []
        return freed

    # -- inside -------------------------------------------------------------------------------------------

    def _prefix(self, hashes: Sequence[BlockHash]) -> list[SlotRef]:
        return [self._ref(self._index[name]) for name in hashes[: self.match(hashes)]]

    def _ref(self, number: int) -> SlotRef:
        slot = self._slots[number]
        return SlotRef(number, slot.epoch, slot.hash, filled=slot.state is SlotState.COMMITTED)

    def _asked(self, found: Sequence[SlotRef]) -> None:
        for ref in reversed(found):  # rule 6
            self._visible.touched(ref.hash, asked=True)

    def _lease(
        self, key: tuple[RequestId, str], refs: Iterable[SlotRef], expires_s: float, used: bool = True
    ) -> None:
        lease = self._leases.setdefault(key, _Lease([], expires_s, used))
        lease.expires_s = max(lease.expires_s, expires_s)
        lease.used |= used
        held = set(lease.slots)
        for ref in refs:
            if (ref.slot, ref.epoch) not in held:
                lease.slots.append((ref.slot, ref.epoch))
                slot = self._slots[ref.slot]
                slot.leases += 1
                if slot.leases == 1 and slot.visible:
                    self._visible.pinned(slot.hash)

    def _make_room(self, wanted: int, kept: Sequence[SlotRef]) -> NoRoom | None:
        """Evicts until `wanted` slots are free, but nothing of `kept`; all or nothing."""
        missing = wanted - len(self._free)
        if missing <= 0:
            return None
        kept_idle = [ref.hash for ref in kept if not self._slots[ref.slot].leases]
        available = self._visible.idle - len(kept_idle)
        victims: list[BlockHash] = []
        if missing <= available:
            for name in kept_idle:
                self._visible.pinned(name)
            victims = self._visible.victims(missing)
            for name in kept_idle:
                self._visible.unpinned(name)
            available = len(victims)
        if missing > available:
            return NoRoom(wanted=wanted, available=len(self._free) + available)
        for name in victims:
            self._discard(self._index[name])
        self.evictions += len(victims)
        return None

    def _take(
        self,
        name: BlockHash,
        writer: WorkerId,
        parent: BlockHash | None = None,
        depth: int = 0,
        private: bool = False,
    ) -> SlotRef:
        number = self._free.pop()
        self._epoch += 1
        slot = self._slots[number]
        assert slot.state is SlotState.FREE and slot.leases == 0, slot
        slot.state, slot.epoch, slot.hash, slot.private = SlotState.FILLING, self._epoch, name, private
        slot.parent, slot.depth, slot.writer = parent, depth, writer
        return SlotRef(number, slot.epoch, name, filled=False)

    def _committed(self, number: int) -> None:
        slot = self._slots[number]
        if slot.private:
            if not slot.leases:
                self._discard(number)
            return
        self._visible.add(slot.hash, slot.parent, slot.depth)
        if slot.leases:
            self._visible.pinned(slot.hash)

    def _unleased(self, number: int) -> None:
        """The last lease is over: a visible block may be a victim, a private one is gone."""
        slot = self._slots[number]
        if slot.visible:
            self._visible.unpinned(slot.hash)
        elif slot.state is SlotState.COMMITTED:
            self._discard(number)

    def _discard(self, number: int) -> None:
        slot = self._slots[number]
        if slot.leases:  # a follow reader of a writer that gave up: its lease is void
            self._void_leases(number)
        if slot.visible:
            del self._index[slot.hash]
            self._removed.append(slot.hash)
            self._visible.removed(slot.hash)
        self._draining.pop(number, None)
        self._epoch += 1
        self._slots[number] = _Slot(epoch=self._epoch)
        self._free.append(number)
        self._freed.append(number)

    def _void_leases(self, number: int) -> None:
        for lease in self._leases.values():
            lease.slots = [(n, e) for n, e in lease.slots if n != number]
        self._slots[number].leases = 0

    def _fills(self, request: RequestId, holder: str) -> bool:
        filling = self._filling.get(request)
        return filling is not None and filling.writer == holder

    def check(self) -> None:
        """Asserts conservation: each slot in exactly one place, leases counted, index and victims consistent."""
        leases = [0] * self.size
        for lease in self._leases.values():
            for number, epoch in lease.slots:
                assert self._slots[number].epoch == epoch, f"lease on an old epoch of slot {number}"
                leases[number] += 1
        filling = {number for one in self._filling.values() for number in one.slots}
        for request, one in self._filling.items():
            assert all(self._slots[number].writer == one.writer for number in one.slots), (
                f"{request}'s writer"
            )
        for number, slot in enumerate(self._slots):
            assert slot.leases == leases[number], (
                f"slot {number}: {slot.leases} leases, {leases[number]} found"
            )
            assert (slot.state is SlotState.FILLING) == (number in filling), f"slot {number} {slot.state}"
            assert (slot.state is SlotState.DRAINING) == (number in self._draining), (
                f"slot {number} {slot.state}"
            )
            indexed = self._index.get(slot.hash) == number
            assert slot.visible == indexed, f"slot {number} is not indexed rightly"
            assert slot.state is not SlotState.COMMITTED or slot.visible or slot.leases, (
                f"slot {number} leaked"
            )
        free = [number for number, slot in enumerate(self._slots) if slot.state is SlotState.FREE]
        assert sorted(self._free) == free, "the free list differs from the free slots"
        assert len(self._index) == sum(slot.visible for slot in self._slots)
        assert self._visible.idle == sum(slot.visible and not slot.leases for slot in self._slots), (
            "the eviction policy's pins are not the leases"
        )
        self._visible.check()
