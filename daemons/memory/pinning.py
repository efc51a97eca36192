"""Pins a version of the state, so that a save can read it while training continues.

memoryd pins version ``v`` of every trained block before the next attempt begins. From then on no
sweep may overwrite that state (:mod:`penstock.daemons.optimizer.machine.pins`). Each block is read
after it has settled at ``v``, and is then released. Only memoryd writes pins, and they outlive it.
The next memoryd releases all of them before an epoch begins, since it reads none.

A read counts only if the block's words identify the version before and after it. The version must
be committed, settled, of the same filling, and not being advanced by a sweep.
"""

from __future__ import annotations

from penstock.host.errors import StateError
from penstock.shm.memory import NodeMemory


class PinnedVersion:
    """The blocks of a node's memory at one version, until each has been released."""

    def __init__(self, memory: NodeMemory, version: int) -> None:
        """Pins all blocks that train.

        Raises:
            StateError: memory has no model, or is not at this version or on the way to it.
        """
        self.version = version
        self.memory = memory
        self._incarnation = memory.control.incarnation
        if not self._incarnation:
            raise self._contradiction("there is nothing to save")
        if memory.control.committed not in (version - 1, version):
            raise self._contradiction("it cannot be read any more, or not soon")
        self._trained = frozenset(
            b for b in memory.owned_blocks() if memory.spec.table.blocks[b].trainable_elements
        )
        for block in self._trained:
            memory.control.set_pin(block, version)

    def is_there(self, block: int) -> bool:
        """Returns whether the block's state is at the version, and stays so while it is pinned.

        Raises:
            StateError: it went past the version, or the memory was filled again.
        """
        control = self.memory.control
        if control.incarnation != self._incarnation:
            raise self._contradiction("the memory was filled again")
        if control.committed < self.version:
            return False
        if block not in self._trained:
            return True
        if control.pin(block) != self.version:
            raise self._contradiction(f"the pin of block {block} is {control.pin(block)}")
        intent, state = control.interrupted_sweep, control.state_version(block)
        if intent is not None and intent.block == block and intent.state_version > self.version:
            if not self._two_copies(block):
                raise self._contradiction(
                    f"a sweep leads block {block} to {intent.state_version} in spite of its pin"
                )
        # Of two copies the next version is in the other one.
        if state == self.version or (state == self.version + 1 and self._two_copies(block)):
            return True
        if state > self.version:
            raise self._contradiction(f"the state of block {block} is at {state}")
        return False

    def check(self, block: int) -> None:
        """Checks that the bytes just read of a block belonged to the version throughout.

        Raises:
            StateError: it may not have been.
        """
        if not self.is_there(block):
            raise self._contradiction(f"block {block} changed while it was read")

    def let_go(self, block: int) -> None:
        """Releases a block after it has been read."""
        if block in self._trained:
            self.memory.control.set_pin(block, None)

    def close(self) -> None:
        """Releases all blocks."""
        for block in self._trained:
            self.let_go(block)

    def _two_copies(self, block: int) -> bool:
        return self.memory.spec.layout.state_copies[block] > 1

    def _contradiction(self, what: str) -> StateError:
        control = self.memory.control
        return StateError(
            f"cannot save version {self.version}: {what} (version {control.committed} of"
            f" incarnation {control.incarnation} is committed)"
        )


def let_go_of_all(memory: NodeMemory) -> None:
    """Releases the pins of a dead memoryd, which no process reads."""
    for block in memory.owned_blocks():
        memory.control.set_pin(block, None)
