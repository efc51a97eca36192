"""The bytes that words of shared memory vouch for: always those of the undisturbed run.

State of a version, weights of a committed version and gradients of an attempt follow from the
configuration alone. The undisturbed run leaves a checksum of each under a key. In every other run
an array is compared with its key as soon as a word vouches for it, and again at each audit: at
decisions, at the beginnings of epochs and at deaths. So bytes in flight count (replicas, refills,
pulled gradients), and bytes that change without a word.

The sum of squares of a block's gradients is computed here, too, in the order that
``native/kernel.h`` documents. Runs whose steps are taken back by arithmetic are left out: rounding
errors stay there.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from penstock.shm.control import INVALID_VERSION
from penstock.shm.layout import WEIGHT_SLOTS, SegmentKind
from penstock.shm.memory import MemorySpec, NodeMemory
from penstock.shm.segment import SHM_ROOT, SegmentError
from penstock.shm.table import DType

Key = tuple[str, int, int, int]
"""What an array holds; its version, or of gradients the first sample; block; contribution."""

LANES = 16
"""Partial sums of squares of a chunk; no block here has more than one chunk."""


@dataclass(slots=True)
class _Mapped:
    """A memory that this process has mapped; ``inode``: of its control segment."""

    inode: int
    memory: NodeMemory


class Vouched:
    """``known``: checksums by key that an undisturbed run left; ``seen``: those of this run."""

    def __init__(
        self, nodes: Sequence[MemorySpec], kept: Mapping[int, MemorySpec], known: Mapping[Key, int]
    ) -> None:
        self.seen: dict[Key, int] = {}
        self._known = known
        self._nodes = nodes
        self._kept = kept
        self._mapped: dict[str, _Mapped] = {}
        self._attempts: dict[int, tuple[int, int]] = {}
        """Attempt -> its first sample, and the version that its gradients lead to."""
        self._skipped: set[int] = set()
        self._whole: dict[tuple[int, int, int, int], tuple[int, int]] = {}
        """Node, block, copy, contribution -> attempt whose gradients are whole there, and inode of
        that memory.
        """

    # ---- what happens ----

    def begins(self, attempt: int, first_sample: int, version: int) -> None:
        """An attempt that leads to a version is announced."""
        self._attempts[attempt] = first_sample, version

    def skipped(self, attempt: int) -> None:
        """The scheduler skips an attempt: no commit reads its gradients.

        The next attempt leads to the same version, so its owner overwrites them. A replica may copy
        them just then, before the decision arrives, and say that it holds the skipped attempt. It
        pulls the gradients of the next attempt before it says that it holds these.
        """
        self._skipped.add(attempt)

    def stored(
        self, node: int, kind: str, name: str, args: tuple[Any, ...], named: Mapping[str, Any]
    ) -> Iterator[str]:
        """A process of ``kind`` stored a word on a node; yields what the word is wrong about."""
        if name == "begin_gradients":
            self._whole.pop((node, args[0], args[1], args[2]), None)
            return
        if name == "clear_history" and kind == "memoryd":
            self._forget(node)
        check = _CHECKS.get((kind, name))
        if check is not None:
            yield from check(self, node, args, named)

    def audit(self) -> Iterator[str]:
        """Yields the arrays of all memory and replicas that differ from what a word says."""
        for node in range(len(self._nodes)):
            yield from self._audit_memory(node)
        for node in self._kept:
            yield from self._audit_replica(node)

    def squares(self, attempt: int, block: int) -> float | None:
        """Returns the sum of squares of a block's summed gradients; None if some are not there."""
        arrays = []
        for contribution in range(self._nodes[0].layout.contributions[block]):
            array = self._gradients_of(attempt, block, contribution)
            if array is None:
                return None
            arrays.append(array)
        return sum_of_squares(arrays) if arrays else None

    def close(self) -> None:
        """Unmap all memory."""
        for mapped in self._mapped.values():
            mapped.memory.close()
        self._mapped.clear()

    # ---- single words ----

    def _state_set(self, node: int, args: tuple[Any, ...], named: Any) -> Iterator[str]:
        memory = self._memory(self._nodes[node])
        if memory is not None:
            yield from self._state(memory, args[0], args[1], owner=True)

    def _replica_set(self, node: int, args: tuple[Any, ...], named: Any) -> Iterator[str]:
        replica = self._memory(self._kept[node])
        if replica is not None and args[1] != INVALID_VERSION:
            yield from self._state(replica, args[0], args[1], owner=False)

    def _held_set(self, node: int, args: tuple[Any, ...], named: Any) -> Iterator[str]:
        replica = self._memory(self._kept[node])
        if replica is not None and args[3]:
            yield from self._held(replica, *args)

    def _slot_set(self, node: int, args: tuple[Any, ...], named: Any) -> Iterator[str]:
        memory = self._memory(self._nodes[node])
        if memory is not None:
            yield from self._weights(memory, args[0], args[1])

    def _flipped(self, node: int, args: tuple[Any, ...], named: Any) -> Iterator[str]:
        """The weights of the committed version are readable from now on."""
        memory = self._memory(self._nodes[node])
        if memory is not None:
            for block in memory.owned_blocks():
                yield from self._weights(memory, block, args[0] % WEIGHT_SLOTS)

    def _filled(self, node: int, args: tuple[Any, ...], named: Any) -> Iterator[str]:
        """The incarnation's word goes last: all that it vouches for is there."""
        if args[0]:
            yield from self._audit_memory(node)

    def _swept(self, node: int, args: tuple[Any, ...], named: Any) -> Iterator[str]:
        """No sweep is under way: all words of the state count again."""
        yield from self._audit_memory(node)

    def _settled(self, node: int, args: tuple[Any, ...], named: Any) -> Iterator[str]:
        yield from self._audit_replica(node)

    def _ready_set(self, node: int, args: tuple[Any, ...], named: Any) -> Iterator[str]:
        memory, (block, contribution) = self._memory(self._nodes[node]), args
        attempt = named["attempt"]
        if memory is None or attempt not in self._attempts:
            return
        _, version = self._attempts[attempt]
        copy = version % memory.spec.layout.gradient_copies[block]
        self._whole[node, block, copy, contribution] = attempt, self._inode(node)
        array = memory.grads(block, copy, contribution)
        yield from self._gradients(memory, attempt, block, contribution, array)

    # ---- audits ----

    def _audit_memory(self, node: int) -> Iterator[str]:
        memory = self._memory(self._nodes[node])
        if memory is None or not memory.control.incarnation:
            self._forget(node)
            return
        control = memory.control
        for block in memory.owned_blocks():
            if memory.spec.table.blocks[block].trainable_elements and not _is_swept(control, block):
                yield from self._state(memory, block, control.state_version(block), owner=True)
            for slot in range(WEIGHT_SLOTS):
                yield from self._weights(memory, block, slot)
            yield from self._frozen(memory, block)
        for (at, block, copy, contribution), (attempt, inode) in list(self._whole.items()):
            if at == node and inode == self._inode(node):
                array = memory.grads(block, copy, contribution)
                yield from self._gradients(memory, attempt, block, contribution, array)

    def _audit_replica(self, node: int) -> Iterator[str]:
        replica = self._memory(self._kept[node])
        if replica is None or not replica.control.incarnation:
            return
        control, layout = replica.control, replica.spec.layout
        for block in replica.spec.table.blocks:
            index = block.index
            if (index, "master", 0, 0) not in layout.arrays or not block.trainable_elements:
                continue
            version = control.state_version(index)
            if version != INVALID_VERSION and not _is_swept(control, index):
                yield from self._state(replica, index, version, owner=False)
            for copy in range(layout.gradient_copies[index]):
                for contribution in range(layout.contributions[index]):
                    attempt = control.held(index, copy, contribution)
                    if attempt:
                        yield from self._held(replica, index, copy, contribution, attempt)

    def _forget(self, node: int) -> None:
        """Memory without a model vouches for no gradients."""
        for key in [key for key in self._whole if key[0] == node]:
            del self._whole[key]

    # ---- comparing ----

    def _state(self, memory: NodeMemory, block: int, version: int, *, owner: bool) -> Iterator[str]:
        if not memory.spec.table.blocks[block].trainable_elements:
            return
        names = memory.spec.table.state_arrays
        arrays = [memory.load_master(block, version) if owner else memory.state(block, "master")]
        arrays += [memory.state(block, name, version if owner else 0) for name in names]
        yield from self._same(memory, ("state", version, block, 0), arrays)

    def _weights(self, memory: NodeMemory, block: int, slot: int) -> Iterator[str]:
        """Weights beyond the commit are of an attempt, which may be clipped or skipped yet."""
        version = memory.control.slot_version(block, slot)
        if version <= memory.control.committed and version % WEIGHT_SLOTS == slot:
            yield from self._same(
                memory, ("weights", version, block, 0), [memory.weights(block, slot)]
            )

    def _frozen(self, memory: NodeMemory, block: int) -> Iterator[str]:
        frozen = memory.spec.table.blocks[block].frozen_elements
        if frozen and memory.control.frozen_sequence(block) % 2 == 0:
            yield from self._same(memory, ("frozen", 0, block, 0), [memory.frozen(block)])

    def _held(
        self, replica: NodeMemory, block: int, copy: int, contribution: int, attempt: int
    ) -> Iterator[str]:
        if attempt in self._skipped:
            return
        array = replica.grads(block, copy, contribution)
        yield from self._gradients(replica, attempt, block, contribution, array)

    def _gradients(
        self, memory: NodeMemory, attempt: int, block: int, contribution: int, array: Any
    ) -> Iterator[str]:
        if attempt in self._attempts:
            key = ("gradients", self._attempts[attempt][0], block, contribution)
            yield from self._same(memory, key, [array])

    def _same(self, memory: NodeMemory, key: Key, arrays: Iterable[Any]) -> Iterator[str]:
        checksum = 0
        for array in arrays:
            checksum = zlib.crc32(np.ascontiguousarray(array).view(np.uint8), checksum)
        expected = self._known.get(key)
        if expected is None:
            expected = self.seen.setdefault(key, checksum)
        else:
            self.seen[key] = expected
        if checksum != expected:
            what, version, block, contribution = key
            yield (
                f"{memory.spec.name(SegmentKind.CONTROL).split('-', 2)[-1]}: {what} of {version},"
                f" block {block}, contribution {contribution}: other bytes than a word vouches for"
            )

    def _gradients_of(self, attempt: int, block: int, contribution: int) -> Any:
        """Returns fp32 gradients of a contribution, wherever its worker published them."""
        for (node, at, copy, number), (whose, inode) in self._whole.items():
            if (at, number, whose) != (block, contribution, attempt):
                continue
            memory = self._memory(self._nodes[node])
            if memory is None or not memory.control.incarnation or inode != self._inode(node):
                return None
            array = memory.grads(block, copy, contribution)
            if memory.spec.table.grad_dtype is DType.BF16:
                return (array.astype(np.uint32) << 16).view(np.float32)
            return array.astype(np.float32)
        return None

    def _inode(self, node: int) -> int:
        return self._mapped[self._nodes[node].name(SegmentKind.CONTROL)].inode

    def _memory(self, spec: MemorySpec) -> NodeMemory | None:
        """Returns the memory under a name, mapped once as long as it is the same one."""
        name = spec.name(SegmentKind.CONTROL)
        mapped = self._mapped.get(name)
        try:
            inode = Path(SHM_ROOT / name.removeprefix("/")).stat().st_ino
            if mapped is not None and mapped.inode == inode:
                return mapped.memory
            memory = NodeMemory.attach(spec)
        except (FileNotFoundError, SegmentError):
            return None
        if mapped is not None:
            mapped.memory.close()
        self._mapped[name] = _Mapped(inode, memory)
        return memory


def sum_of_squares(contributions: Sequence[Any]) -> float:
    """Returns the squares of summed gradients as sweeps sum them: contributions in order, in
    float32; then in float64 each lane over all vectors, and the lanes in order.
    """
    total = contributions[0]
    for array in contributions[1:]:
        total = total + array
    with np.errstate(invalid="ignore", over="ignore"):
        lanes = np.zeros(LANES)
        for vector in np.square(total.astype(np.float64)).reshape(-1, LANES):
            lanes += vector
        found = 0.0
        for lane in lanes:
            found += float(lane)
    return found


def _is_swept(control: Any, block: int) -> bool:
    intent = control.interrupted_sweep
    return intent is not None and intent.block == block


_CHECKS = {
    ("optimizerd", "set_state_version"): Vouched._state_set,
    ("optimizerd", "set_slot_version"): Vouched._slot_set,
    ("optimizerd", "set_committed"): Vouched._flipped,
    ("optimizerd", "end_sweep"): Vouched._swept,
    ("mirrord", "end_sweep"): Vouched._settled,
    ("memoryd", "set_incarnation"): Vouched._filled,
    ("mirrord", "set_state_version"): Vouched._replica_set,
    ("mirrord", "set_held"): Vouched._held_set,
    ("worker", "set_ready"): Vouched._ready_set,
}
"""Kind of the process and name of the word -> what is looked at when it is stored."""
