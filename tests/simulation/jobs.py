"""What memoryds do for long: they fill memory and write saved states. They may die at each step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import penstock.daemons.memory.saving as saving_module
import penstock.daemons.memory.snapshot as snapshot_module
from penstock.daemons.memory.tensorfile import CancelledError
from penstock.daemons.scheduler.machine.activities.save import Save
from penstock.host import world

LONG, LONG_S, ASKS_S = 0.02, 12.0, 0.5
"""How often a file or a loader takes how long, and how often it asks meanwhile whether to stop."""


_real_write_tensors = saving_module.write_tensors


def write_tensors(
    file: Any, name: str, tensors: Any, stopped: Callable[[], bool], port: Any
) -> Any:
    """A file of a saved state."""
    found = _here()
    found.process.kernel.point("saves")
    takes_a_while(2e-3, stopped)
    written = _real_write_tensors(file, name, tensors, stopped, port)
    found.process.kernel.point("written")
    return written


_real_saved = Save.saved


def saved(save: Save, member: str, body: Any) -> Any:
    """A memoryd says how its part of a save ended."""
    if body.error:
        _here().cluster.history.save_failed(member, body.error)
    return _real_saved(save, member, body)


_real_load_block = snapshot_module.load_block


def load_block(*args: Any) -> None:
    """A block's files of a saved state."""
    _here().process.kernel.point("reads a state")
    takes_a_while(2e-3)
    _real_load_block(*args)
    _here().process.kernel.point("has read a state")


def takes_a_while(usual_s: float, cancelled: Callable[[], bool] | None = None) -> None:
    """At times longer than a process takes to come back, as with models of many GB: orders of the
    next epoch come meanwhile. What asks whether it is ``cancelled`` takes longer at times than an
    attempt may: that it asks is its progress. Where nobody disturbs nothing takes long.
    """
    process = _here().process
    dice = process.kernel.random
    if _here().cluster.history.undisturbed:
        _here().sleep(dice.random() * usual_s)
        return
    left_s = dice.random() * dice.choice((usual_s, usual_s, 50e-3, 0.5)) * process.machine.slow
    if cancelled is not None and dice.random() < LONG:
        left_s = LONG_S
    while left_s > 0.0:
        _here().sleep(min(left_s, ASKS_S))
        left_s -= ASKS_S
        if cancelled is not None and cancelled():
            raise CancelledError


def _here() -> Any:
    return world.here()


def load_initial(run: Any, node: int) -> Callable[[Any], None]:
    """Returns what fills memory with the initial weights of a run, as the emulated loader does."""

    def load(cancelled: Callable[[], bool]) -> None:
        memory = _here().cluster.memory_of(node)
        try:
            for block in memory.owned_blocks():
                _here().process.kernel.point("loads")
                count = run.table.blocks[block].trainable_elements
                numbers = np.random.Generator(np.random.Philox([run.config.run.seed, block]))
                values = numbers.standard_normal(count, dtype=np.float32)
                memory.store_master(block, 0, values * np.float32(0.02))
                memory.frozen(block).view(np.uint8)[:] = 1 + block
                takes_a_while(1e-3, cancelled)
        finally:
            memory.close()

    return load
