"""What partners' replicas are worth, and what may be lost all the same (``memory.mirror``).

A model of its own, told by the journal's rows and by words and bytes of the segments. A replica
counts as *whole* from the first decision on at which every block of it is, or can be brought, to
the journal's version; then it must stay so until its machine is lost, or a restore begins a new
filling. While every memory that is lost has a whole replica, no committed step may go.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.protocol.run.names import mirrored_by, ownership, partner_of
from penstock.shm.control import INVALID_VERSION
from penstock.shm.memory import MemorySpec, NodeMemory
from penstock.shm.segment import SegmentError

SEEDED_WITHIN = 20
"""Some replica has all blocks after so many attempts that nobody disturbs. Not all have: where
attempts take less than it takes to read a block, it is read again and again (docs/NODES.md).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """The journal's last commit. ``attempt_before``: that led to the version before."""

    version: int = 0
    attempt: int = 0
    attempt_before: int = 0
    incarnation: int = 0


class Partners:
    """Replicas by the node (index) whose state they are; empty where the run has no mirror."""

    def __init__(self, run: Any, kept: dict[int, MemorySpec]) -> None:
        config, table = run.config, run.table
        self.mirrors = bool(kept)
        self.committed = Committed()
        self._names = [node.name for node in config.cluster.nodes]
        nodes = range(len(self._names))
        self._replicas = {mirrored_by(config, keeper): spec for keeper, spec in kept.items()}
        self._partner = {owner: partner_of(config, owner) for owner in nodes}
        self._memories = [run.memory_spec(index) for index in nodes]
        owners = ownership(config, table, run.plan)
        self._blocks: dict[int, list[int]] = {owner: [] for owner in nodes}
        self._sources: dict[int, set[int]] = {owner: set() for owner in nodes}
        for block in table.blocks:
            owner = owners.owner[block.index]
            self._sources[owner] |= {*owners.computed_on[block.index]} - {owner}
            if block.trainable_elements:
                self._blocks[owner].append(block.index)
        self._lost: dict[int, int] = {}
        self._bereft: set[int] = set()  # whose gradients of the last commit went with their memory
        self.whole: set[int] = set()
        """Nodes whose replicas must be good for all that is committed."""
        self._attempts = 0

    # ---- what happens ----

    def decided(self, epoch: int, record: Any, *, undisturbed: bool) -> Iterator[str]:
        """A decision was journaled; yields what is wrong. ``undisturbed``: nothing goes wrong in
        this run. In others an owner may sweep a block more often than it can be read: steps take
        a few milliseconds, and requests half a one.
        """
        name, now = record.decision.name, self.committed
        if name == "RESTORE":
            self.whole.clear()
            self.committed = Committed(
                version=record.version, attempt=record.attempt, incarnation=record.incarnation
            )
        elif name != "SKIP":
            self.committed = Committed(
                version=record.version,
                attempt=record.attempt,
                attempt_before=now.attempt,
                incarnation=record.incarnation,
            )
        # A memory that was lost before this epoch began has been filled since.
        self._lost = {owner: lost for owner, lost in self._lost.items() if lost >= epoch}
        if name != "SKIP":
            self._bereft = {*self._lost}
        if not self.mirrors or name == "RESTORE":
            return
        yield from self.look()
        # Blocks that joined behind an attempt's last gradients are not in its commit; from the next
        # attempt on nothing is committed without them.
        self.whole |= {owner for owner in self._replicas if not self._objection(owner)}
        self._attempts += 1
        if undisturbed and self._attempts > SEEDED_WITHIN and not self.whole:
            yield f"no replica is whole after {self._attempts} attempts"
        for owner in self._replicas:
            yield from self._compare(owner)

    def look(self) -> Iterator[str]:
        """Look at all replicas; yields those that were whole and are not any more."""
        for owner in sorted(self.whole):
            objection = self._objection(owner)
            if objection:
                self.whole.discard(owner)
                yield f"the replica of {self._name(owner)} was whole: {objection}"

    def run_ended(self) -> None:
        """All is saved, and memory is given back."""
        self.whole.clear()
        self.committed = Committed()

    def machine_lost(self, node: int, epoch: int) -> None:
        """A machine is about to lose its memory."""
        self._lost[node] = epoch
        self._bereft.add(node)
        self.whole -= self.kept_by(node)

    def given_up(self, node: int, epoch: int, new: set[int]) -> bool:
        """The memory of ``node`` is declared void, as a restore begins with; returns whether it may
        be. ``new``: nodes whose optimizerds took part in no attempt yet.
        """
        if node in self._lost:
            return True
        wanted = self._wanted(new)
        allowed = bool(wanted) and (node in wanted or not wanted <= self.whole)
        self._lost[node] = epoch
        self._bereft.add(node)
        return allowed

    def may_restore(self, new: set[int]) -> bool:
        """Returns whether committed steps may go; ``new`` as in :meth:`given_up`."""
        wanted = self._wanted(new)
        return bool(wanted) and not wanted <= self.whole

    # ---- looking ----

    @property
    def lost(self) -> frozenset[int]:
        """Nodes whose memory was lost, and is not known to be filled again."""
        return frozenset(self._lost)

    @property
    def num_reseeded(self) -> int:
        """How many replicas are not whole."""
        return len(self._replicas.keys() - self.whole)

    def kept_by(self, node: int) -> set[int]:
        """Returns the nodes whose replicas are in the memory of ``node``."""
        return {owner for owner in self._replicas if self._partner[owner] == node}

    def _wanted(self, new: set[int]) -> set[int]:
        """Memory that has to be filled: what is lost, and what lacks gradients that are."""
        wanted = set(self._lost)
        while True:
            gone = wanted | self._bereft
            more = {n for n in new - gone if self._sources[n] & gone}
            if not more:
                return wanted
            wanted |= more

    def _name(self, node: int) -> str:
        return f"node {self._names[node]}"

    def _objection(self, owner: int) -> str:
        """Returns why a replica cannot be brought to what is committed; empty if it can."""
        now = self.committed
        with _attached(self._replicas[owner]) as replica:
            if replica is None:
                return "there is none"
            control, layout = replica.control, replica.spec.layout
            if not now.incarnation or control.incarnation != now.incarnation:
                return f"it is of filling {control.incarnation}, the journal's is {now.incarnation}"
            at = control.committed
            attempts = {now.version: now.attempt, now.version - 1: now.attempt_before}
            if at not in attempts:
                return f"it is at version {at}, the journal at {now.version}"
            for block in self._blocks[owner]:
                state = control.state_version(block)
                # One step may lack and no more: an attempt is mirrored behind the settle of the one
                # before.
                if state not in (at, now.version - 1):
                    return f"block {block} is at version {state} of {at}"
                for version in range(state + 1, now.version + 1):
                    held = {
                        control.held(block, version % 2, k)
                        for k in range(layout.contributions[block])
                    }
                    if held != {attempts.get(version)}:
                        return (
                            f"block {block} is at version {state} of {now.version}, and holds"
                            f" gradients of {sorted(held)}, not of {attempts.get(version)}"
                        )
        return ""

    def _compare(self, owner: int) -> Iterator[str]:
        """Yields blocks whose state differs from the owner's of the same version."""
        with (
            _attached(self._replicas[owner]) as replica,
            _attached(self._memories[owner]) as memory,
        ):
            if replica is None or memory is None:
                return
            now = self.committed.incarnation
            if replica.control.incarnation != now or memory.control.incarnation != now:
                return
            for block in self._blocks[owner]:
                version = memory.control.state_version(block)
                same = replica.control.state_version(block) == version != INVALID_VERSION
                sweeps = [c.interrupted_sweep for c in (replica.control, memory.control)]
                if not same or any(sweep and sweep.block == block for sweep in sweeps):
                    continue
                if not _equal(replica, memory, block, version):
                    yield f"the replica of {self._name(owner)}: block {block} has other bytes"


def _equal(replica: NodeMemory, memory: NodeMemory, block: int, version: int) -> bool:
    """Returns whether a replica's block has the owner's bytes."""
    if not np.array_equal(replica.state(block, "master"), memory.load_master(block, version)):
        return False
    return all(
        np.array_equal(replica.state(block, name), memory.state(block, name, version))
        for name in replica.spec.table.state_arrays
    )


@contextmanager
def _attached(spec: MemorySpec) -> Iterator[NodeMemory | None]:
    """Yields the memory; None where there is none, or not to the end."""
    try:
        memory = NodeMemory.attach(spec)
    except SegmentError:
        memory = None
    try:
        yield memory
    finally:
        if memory is not None:
            memory.close()
