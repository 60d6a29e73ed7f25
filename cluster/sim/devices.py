"""What nodes and engines are, as far as time goes: tiers of blocks, a network card, a prefill engine, a decode engine.

No policy: each does what it was given, in its order. Approximations, all on purpose:
- A transfer takes its sender and its receiver whole; who comes later waits (shares of a link end at the same time).
- A decode engine admits a request when the KV of its whole answer has room, so that none is ever preempted.
- What a step computes of prompts adds to the step; the two share no read of the weights.
- Steps between two changes of the batch are one event: their durations grow evenly with the context.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import ceil, sqrt
from typing import Protocol

from cluster.core.cost import fetch_s
from cluster.core.events import BlockRemoved, BlockStored, Event
from cluster.sim.clock import Clock
from cluster.sim.profiles import Profile
from kvstore.core.blocks import BlockHash, NodeId, RequestId, Tier
from kvstore.core.tiers import (
    Asked,
    Command,
    Demote,
    Drop,
    Promote,
    ReadDone,
    Stored,
    TierConfig,
    TierLimits,
    TierMachine,
    WriteDone,
)


@dataclass(slots=True)
class Job:
    """One request on its way. `slowness` is what its prefill takes over what a profile says."""

    request: RequestId
    tokens: int
    output_tokens: int
    chain: tuple[BlockHash, ...]
    arrived_s: float
    slowness: float = 1.0
    attempt: int = 1
    cached_tokens: int = 0
    over: bool = False
    """The conductor has ended it: nothing more happens to it."""

    @property
    def computed_tokens(self) -> int:
        return self.tokens - self.cached_tokens


# -- a node's memory, disk and network ------------------------------------------------------------------------------


class Node:
    """The blocks of one machine, on the real placement machine; tells every change as the events of a live node."""

    def __init__(
        self, name: NodeId, profile: Profile, eviction: str, clock: Clock, tell: Callable[[Event], None]
    ) -> None:
        self.id = name
        self.profile = profile
        self.sends_until_s = self.receives_until_s = self._disk_until_s = 0.0
        self._clock, self._tell = clock, tell
        self._sequence = 0
        disk = profile.ssd_blocks > 0
        self.machine = TierMachine(
            TierConfig(
                ssd=TierLimits(blocks=profile.ssd_blocks or None, eviction=eviction),
                dram=TierLimits(blocks=profile.dram_blocks, eviction=eviction),
                writes_max=2 if disk else 0,
                reads_max=4096 if disk else 0,
                queue_max=4096 if disk else 0,
            )
        )

    @property
    def sequence(self) -> int:
        """Of its last change."""
        return self._sequence

    def prefix(self, chain: Sequence[BlockHash]) -> int:
        """How many of the chain's first blocks lie in DRAM."""
        has = self.machine.has
        for depth, name in enumerate(chain):
            if not has(name, Tier.DRAM):
                return depth
        return len(chain)

    def ask(self, chain: Sequence[BlockHash]) -> tuple[int, float]:
        """A request uses the chain: (blocks of it that are here, when they are all in DRAM)."""
        blocks, ready_s = self.prefix(chain), self._clock.now
        for command in self.machine.handle(Asked(chain), self._clock.now):
            if isinstance(command, Promote):
                blocks, ready_s = len(command.chain), self._promote(command)
            else:
                self._obey([command])
        return blocks, ready_s

    def store(self, chain: Sequence[BlockHash]) -> None:
        """The chain's blocks are here now; the end of it is told first, as nodes do."""
        has, now = self.machine.has, self._clock.now
        new = [depth for depth, name in enumerate(chain) if not has(name, Tier.DRAM)]
        commands: list[Command] = []
        for depth in reversed(new):
            commands += self.machine.handle(
                Stored(chain[depth], chain[depth - 1] if depth else None, depth), now
            )
        stays = tuple(chain[depth] for depth in new if has(chain[depth], Tier.DRAM))
        if stays:
            self._sequence += 1
            self._tell(BlockStored(node=self.id, hashes=stays, sequence=self._sequence))
        self._obey(commands)

    def _obey(self, commands: Sequence[Command]) -> None:
        gone: list[BlockHash] = []
        on_disk: list[BlockHash] = []
        for command in commands:
            if isinstance(command, Demote):
                end_s = self._disk_end_s(1)
                self._clock.at(end_s, lambda name=command.name: self._written(name))  # type: ignore[misc]
            elif isinstance(command, Drop) and command.tier is Tier.DRAM:
                if not self.machine.has(command.name, Tier.DRAM):
                    (on_disk if self.machine.has(command.name) else gone).append(command.name)
            elif isinstance(command, Drop) and not self.machine.has(command.name, Tier.DRAM):
                gone.append(command.name)
        if on_disk:
            self._sequence += 1
            self._tell(
                BlockStored(node=self.id, hashes=tuple(on_disk), sequence=self._sequence, tier=Tier.SSD)
            )
        if gone:
            self._sequence += 1
            self._tell(BlockRemoved(node=self.id, hashes=tuple(gone), sequence=self._sequence))

    def _disk_end_s(self, blocks: int) -> float:
        start_s = max(self._clock.now, self._disk_until_s)
        self._disk_until_s = start_s + fetch_s(blocks * self.profile.block_bytes, self.profile.ssd)
        return self._disk_until_s

    def _written(self, name: BlockHash) -> None:
        self._obey(self.machine.handle(WriteDone(name), self._clock.now))

    def _promote(self, command: Promote) -> float:
        end_s = self._disk_end_s(len(command.names))
        self._clock.at(end_s, lambda: self._read(command.names))
        return end_s

    def _read(self, names: tuple[BlockHash, ...]) -> None:
        for name in reversed(names):
            self._obey(self.machine.handle(ReadDone(name), self._clock.now))
        here = tuple(name for name in names if self.machine.has(name, Tier.DRAM))
        if here:
            self._sequence += 1
            self._tell(BlockStored(node=self.id, hashes=here, sequence=self._sequence))


def transfer(now: float, sender: Node, receiver: Node, kv_bytes: int) -> float:
    """When `kv_bytes` that may leave from now on are there."""
    if sender is receiver or not kv_bytes:
        return now
    start_s = max(now, sender.sends_until_s, receiver.receives_until_s)
    end_s = start_s + fetch_s(kv_bytes, sender.profile.network)
    sender.sends_until_s = receiver.receives_until_s = end_s
    return end_s


# -- engines ----------------------------------------------------------------------------------------------------


class Listener(Protocol):
    """Who wants to know what an engine does."""

    def prefill_started(self, job: Job) -> None: ...
    def prefilled(self, job: Job, seconds: float) -> None: ...
    def first_token(self, job: Job) -> None: ...
    def finished(self, job: Job, gaps: Gaps) -> None: ...


class PrefillEngine:
    """One prompt at a time, in the order given. A prompt whose cached blocks are late ends with the last of them."""

    def __init__(self, profile: Profile, clock: Clock, listener: Listener) -> None:
        self._profile, self._clock, self._listener = profile, clock, listener
        self._queue: deque[tuple[Job, float]] = deque()
        self._busy = False
        self.busy_s = 0.0

    def prefill(self, job: Job, fetched_s: float, step_s_max: float | None = None) -> None:
        assert step_s_max is None, "a prefill engine has no steps"
        self._queue.append((job, fetched_s))
        if not self._busy:
            self._next()

    def _next(self) -> None:
        while self._queue:
            job, fetched_s = self._queue.popleft()
            if not job.over:
                break
        else:
            self._busy = False
            return
        self._busy = True
        self._listener.prefill_started(job)
        seconds = job.slowness * prompt_s(self._profile, job.cached_tokens, job.computed_tokens)
        load_s = fetch_s(job.cached_tokens * self._profile.kv_bytes_per_token, self._profile.memory)
        end_s = max(self._clock.now + load_s + seconds, fetched_s)
        self.busy_s += end_s - self._clock.now
        self._clock.at(end_s, lambda: self._end(job, seconds))

    def _end(self, job: Job, seconds: float) -> None:
        self._listener.prefilled(job, seconds)
        self._next()


def prompt_s(profile: Profile, cached_tokens: int, new_tokens: int) -> float:
    c = profile.coefficients
    return (
        c.prefill_base_s
        + c.prefill_token_s * new_tokens
        + c.prefill_pair_s * new_tokens * (cached_tokens + new_tokens / 2)
    )


@dataclass(slots=True)
class Gaps:
    """The times between one answer's tokens: runs of (seconds, how many)."""

    runs: list[tuple[float, int]]

    @property
    def count(self) -> int:
        return sum(many for _, many in self.runs)

    @property
    def mean_s(self) -> float | None:
        count = self.count
        return sum(seconds * many for seconds, many in self.runs) / count if count else None

    def slowest_s(self, share: float) -> float | None:
        """Mean of that share of them, one at least; None where there is no gap."""
        wanted = left = ceil(self.count * share)
        if not wanted:
            return None
        total = 0.0
        for seconds, many in sorted(self.runs, reverse=True):
            taken = min(many, left)
            total += taken * seconds
            left -= taken
            if not left:
                break
        return total / wanted


@dataclass(slots=True)
class _Stream:
    job: Job
    context_tokens: int
    left: int
    since: int | None
    """Number of the engine's run from which on its gaps count; None before its first token."""


@dataclass(slots=True)
class _Prompt:
    """A prompt that this engine computes itself, in chunks beside the steps of its batch."""

    job: Job
    loaded_s: float
    step_s_max: float | None
    done_tokens: int
    started: bool = False


@dataclass(slots=True)
class _Run:
    start_s: float
    steps: int
    first_s: float
    growth_s: float
    chunk: int = 0

    def end_s(self) -> float:
        return self.start_s + self.steps * self.first_s + self.growth_s * self.steps * (self.steps - 1) / 2

    def steps_until(self, when_s: float) -> int:
        """The first step boundary at or after that time, in steps."""
        passed_s, slope = max(0.0, when_s - self.start_s), self.first_s - self.growth_s / 2
        root = sqrt(slope * slope + 2 * self.growth_s * passed_s)
        return max(1, ceil(2 * passed_s / (slope + root) - 1e-9))


@dataclass(slots=True)
class DecodeEngine:
    """Continuous batching. `chunk_tokens` bounds what a step computes of a prompt, where the placement says nothing."""

    profile: Profile
    clock: Clock
    listener: Listener
    chunk_tokens: int
    chunk_tokens_min: int = 64
    """Where a placement's bound leaves no time at all, so that no prompt waits for ever."""
    busy_s: float = 0.0
    steps: int = 0
    _joining: deque[Job] = field(default_factory=deque)
    _prompts: deque[_Prompt] = field(default_factory=deque)
    _streams: list[_Stream] = field(default_factory=list)
    _context_tokens: int = 0
    _room_tokens: int = field(init=False)
    _run: _Run | None = None
    _version: int = 0
    _log: list[tuple[float, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._room_tokens = self.profile.capacity.kv_tokens_max

    def join(self, job: Job) -> None:
        """Its KV is here."""
        self._joining.append(job)
        self._kick()

    def prefill(self, job: Job, fetched_s: float, step_s_max: float | None = None) -> None:
        """It comes as a prompt. With `step_s_max` no step takes longer because of it."""
        loaded_s = fetched_s + fetch_s(
            job.cached_tokens * self.profile.kv_bytes_per_token, self.profile.memory
        )
        self._prompts.append(_Prompt(job, loaded_s, step_s_max, job.cached_tokens))
        self.clock.at(loaded_s, self._kick)

    # -- a run of steps ---------------------------------------------------------------------------------------

    def _kick(self) -> None:
        """Something came: begin, or end the present run with the step that is under way."""
        run = self._run
        if run is None:
            self._plan()
        elif run.steps > 1 and (self._may_join() or self._prompt_ready()):
            steps = run.steps_until(self.clock.now)
            if steps < run.steps:
                run.steps = steps
                self._schedule(run)

    def _schedule(self, run: _Run) -> None:
        self._version += 1
        version = self._version
        self.clock.at(run.end_s(), lambda: self._end(version))

    def _fits(self, job: Job) -> bool:
        whole = job.tokens + job.output_tokens
        busy = len(self._streams) + sum(prompt.started for prompt in self._prompts)
        return busy < self.profile.capacity.batch_max and (whole <= self._room_tokens or not busy)

    def _may_join(self) -> bool:
        return bool(self._joining) and self._fits(self._joining[0])

    def _prompt_ready(self) -> bool:
        if not self._prompts:
            return False
        head = self._prompts[0]
        return head.started or (head.loaded_s <= self.clock.now and self._fits(head.job))

    def _plan(self) -> None:
        """At a step's boundary: who joins, and how far the next run goes."""
        self._run = None
        while self._joining and (self._joining[0].over or self._fits(self._joining[0])):
            job = self._joining.popleft()
            if not job.over:
                self._take_room(job)
                self._enter(job, None)
        while self._prompts and self._prompts[0].job.over:
            self._prompts.popleft()
        c, batch = self.profile.coefficients, len(self._streams)
        first_s = (
            c.step_base_s + c.step_stream_s * batch + c.step_token_s * self._context_tokens if batch else 0.0
        )
        chunk, chunk_s = self._chunk(first_s) if self._prompt_ready() else (0, 0.0)
        if not batch and not chunk:
            return
        steps = 1
        if not chunk and all(stream.since is not None for stream in self._streams):
            steps = min(stream.left for stream in self._streams)
        self._run = _Run(self.clock.now, steps, first_s + chunk_s, c.step_token_s * batch, chunk)
        self._schedule(self._run)

    def _chunk(self, step_s: float) -> tuple[int, float]:
        """(tokens of the first prompt to compute in this step, seconds that adds to it)."""
        prompt, c = self._prompts[0], self.profile.coefficients
        job, done, slow = prompt.job, prompt.done_tokens, prompt.job.slowness
        seconds = 0.0
        if not prompt.started:
            prompt.started = True
            self._take_room(job)
            self.listener.prefill_started(job)
            seconds = slow * c.prefill_base_s
        chunk = self.chunk_tokens
        if prompt.step_s_max is not None:
            left_s, a, p = (prompt.step_s_max - step_s - seconds) / slow, c.prefill_token_s, c.prefill_pair_s
            a += p * done
            chunk = int((sqrt(a * a + 2 * p * left_s) - a) / p if p else left_s / a) if left_s > 0 else 0
            chunk = max(chunk, self.chunk_tokens_min)
        chunk = min(chunk, job.tokens - done)
        seconds += slow * (c.prefill_token_s * chunk + c.prefill_pair_s * chunk * (done + chunk / 2))
        return chunk, seconds

    def _end(self, version: int) -> None:
        run = self._run
        if version != self._version or run is None:
            return
        self.busy_s += self.clock.now - run.start_s
        self.steps += run.steps
        self._log.append(((self.clock.now - run.start_s) / run.steps, run.steps))
        self._context_tokens += run.steps * len(self._streams)
        over: list[_Stream] = []
        for stream in self._streams:
            stream.left -= run.steps
            stream.context_tokens += run.steps
            if stream.since is None:
                stream.since = len(self._log)
                self.listener.first_token(stream.job)
            if stream.left <= 0:
                over.append(stream)
        if over:
            self._streams = [stream for stream in self._streams if stream.left > 0]
        if run.chunk:
            self._computed(run.chunk)
        for stream in over:
            self._leave(stream)
        self._plan()

    def _computed(self, tokens: int) -> None:
        """Part of the first prompt; the step that computes the last of it gives the first token too."""
        prompt = self._prompts[0]
        prompt.done_tokens += tokens
        job = prompt.job
        if prompt.done_tokens < job.tokens:
            return
        self._prompts.popleft()
        self.listener.prefilled(
            job, job.slowness * prompt_s(self.profile, job.cached_tokens, job.computed_tokens)
        )
        self.listener.first_token(job)
        stream = self._enter(job, len(self._log))
        stream.left -= 1
        if stream.left <= 0:
            self._streams.remove(stream)
            self._leave(stream)

    def _take_room(self, job: Job) -> None:
        self._room_tokens -= job.tokens + job.output_tokens

    def _enter(self, job: Job, since: int | None) -> _Stream:
        stream = _Stream(job, job.tokens, job.output_tokens, since)
        self._streams.append(stream)
        self._context_tokens += job.tokens
        return stream

    def _leave(self, stream: _Stream) -> None:
        job = stream.job
        self._context_tokens -= stream.context_tokens
        self._room_tokens += job.tokens + job.output_tokens
        self.listener.finished(job, Gaps(self._log[stream.since :]))
