"""Fills a node's memory from a saved state, or with initial weights from the loader process.

Order: a saved state is verified completely before memory changes. Then the incarnation becomes 0
(no model in memory), the bytes are written, and the new incarnation is written last. A memoryd that
is killed in between leaves incarnation 0, and the scheduler orders the restore again.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from penstock import _native
from penstock.daemons.memory import snapshot
from penstock.daemons.memory.bases.sharing import Sharing, filling_bases, verified
from penstock.daemons.memory.tensorfile import CancelledError
from penstock.daemons.preload.client import ChildProcess, NotForkedError, Preloader, spawn
from penstock.daemons.preload.fork_request import PYTHON_MODULE, ForkRequest
from penstock.host import world
from penstock.host.errors import ExitCode, PenstockError, failure_code
from penstock.host.stopping import StoppedDetector
from penstock.protocol.plan.step import WEIGHTS_DTYPES
from penstock.shm.control import INVALID_VERSION, CommitRecord
from penstock.shm.layout import WEIGHT_SLOTS
from penstock.shm.memory import NodeMemory
from penstock.shm.table import BlockSpec, padded

_POLL_S = 0.05
_STDERR_BYTES = 2000
_WARM_WITHIN_S = 1.0
"""It was forked from one that was ready."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Filling:
    """Source and version of a restore. ``source`` None: initial weights."""

    incarnation: int
    version: int
    source: Path | None


class LoaderError(PenstockError):
    """The loader process failed; carries its exit code where that means something."""

    def __init__(self, message: str, exit_code: ExitCode) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def restore(
    memory: NodeMemory,
    filling: Filling,
    load_initial: Callable[[Callable[[], bool]], None],
    cancelled: Callable[[], bool],
    cores: Sequence[int],
    sharing: Sharing | None = None,
) -> None:
    """Fills the memory of all blocks the node owns.

    ``load_initial(cancelled)`` writes master and frozen weights of a new model, at version 0.
    ``cores``: those of the optimizer's threads, which have nothing to do meanwhile; the pages of
    each one's part are near it. ``sharing``: of memory with bases.

    Raises:
        StateError: the saved state is damaged or of another model; nothing was touched. Or a base
            cannot be used.
        CapacityError: there is no room for a base.
        LoaderError: initial weights could not be made; memory holds no model then.
        CancelledError: on request; memory may hold no model then.
    """
    files: Mapping[int, snapshot.CheckedFiles] = {}
    if filling.source is not None:
        files = snapshot.check(memory, filling.source, filling.version, cancelled)
    invalidate(memory)
    initial = filling.source is None
    with filling_bases(memory, sharing, cancelled, initial=initial) as cancelled:
        if initial:
            _zero_state(memory, filling.version)
            load_initial(cancelled)
        for block, checked in files.items():
            if cancelled():
                raise CancelledError
            with verified(memory, block):
                snapshot.load_block(memory, block, filling.version, checked)
    memory.control.set_generation(0)
    memory.control.set_lost_attempt(0)
    finish(memory, CommitRecord.of_restore(filling.version, filling.incarnation), cores)


def run_loader(
    run_dir: Path,
    node: str,
    command: Sequence[str],
    cancelled: Callable[[], bool],
    stopping: Callable[[], bool],
    silence_s: float,
    preloader: Preloader | None = None,
) -> None:
    """Runs the process that writes initial weights; it dies with this process.

    A ``preloader`` forks it if possible (``command`` is ``python -m MODULE`` then), and is ended
    afterwards: initial weights are written once. A call of ``cancelled`` counts as progress, so it
    is called only if the loader has computed, read or written since the last call. ``stopping``,
    which does not count, is called otherwise. A loader that a signal stops for ``silence_s`` is
    killed and started again.

    Raises:
        LoaderError: the loader failed; the message ends with its last output.
        CancelledError: cancelled on request; the loader is dead then.
    """
    arguments = ["--config", str(run_dir / "resolved.yaml"), "--node", node]
    words = [*command, *arguments, "--parent-pid", str(os.getpid())]
    with open(os.memfd_create("stderr"), "w+b") as errors, open(os.devnull, "r+b") as nothing:
        streams = (nothing.fileno(), nothing.fileno(), errors.fileno())
        process = _start(words, streams, preloader)
        while (code := _code_of(process, cancelled, stopping, silence_s)) is None:
            process = spawn(words, os.environ, streams)
        errors.seek(max(0, errors.seek(0, os.SEEK_END) - _STDERR_BYTES))
        output = errors.read().decode(errors="replace").strip()
    if code:
        reason = f"exit code {code}" if code > 0 else signal.Signals(-code).name
        refusal = output.removeprefix("penstock: ")
        cause = f"the loader failed ({reason}): {output}" if refusal == output else refusal
        raise LoaderError(f"initial weights of node {node}: {cause}", failure_code(code))


def _code_of(
    process: ChildProcess,
    cancelled: Callable[[], bool],
    stopping: Callable[[], bool],
    silence_s: float,
) -> int | None:
    """Waits for the end of the process that writes initial weights, and returns its exit code;
    None: a signal had stopped the process for ``silence_s``, and it is dead.
    """
    stopped_detector, done = StoppedDetector(silence_s), b""
    try:
        while not process.ended(_POLL_S):
            names = frozenset({"loader"}) if process.stopped else frozenset()
            if stopped_detector.look(names, world.monotonic()):
                _log.warning("the loader is stopped for %g s: killing it", silence_s)
                return None
            before, done = done, _work_of(process.pid)
            if cancelled() if done != before else stopping():
                raise CancelledError
    finally:
        process.signal(signal.SIGKILL)
        code = process.reap()
    return code


def _work_of(pid: int) -> bytes:
    """Returns what the kernel counts of a process's work: time on CPUs, and bytes moved."""
    try:
        times = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[11:13]
        moved = Path(f"/proc/{pid}/io").read_bytes()
    except (OSError, ValueError):
        return b""
    return b" ".join(times) + moved


def _start(
    words: Sequence[str], streams: Sequence[int], preloader: Preloader | None
) -> ChildProcess:
    if preloader is not None:
        module, *arguments = words[len(PYTHON_MODULE) :]
        try:
            preloader.warm(_WARM_WITHIN_S)
            return preloader.fork(ForkRequest.here(module, arguments, os.environ), streams)
        except NotForkedError as error:
            _log.warning("the loader was not forked: %s", error)
        finally:
            preloader.end()
    return spawn(words, os.environ, streams)


def invalidate(memory: NodeMemory) -> None:
    """Marks the memory as having no model, and discards work in progress."""
    control = memory.control
    # First: from now on, even after a kill, every reader finds no model.
    control.set_incarnation(0)
    for block in memory.owned_blocks():
        control.set_slot_version(block, 0, INVALID_VERSION)
        control.set_slot_version(block, 1, INVALID_VERSION)
        control.begin_frozen(block)
    control.clear_history()


def _zero_state(memory: NodeMemory, version: int) -> None:
    for block in memory.owned_blocks():
        for name in memory.spec.table.state_arrays:
            memory.state(block, name, version)[:] = 0


def finish(memory: NodeMemory, record: CommitRecord, cores: Sequence[int]) -> None:
    """Derives the weights from master, then sets versions and record; the incarnation is set last,
    because it declares the model valid.
    """
    control, version = memory.control, record.version
    blocks = memory.owned_blocks()
    with _native.Pool(list(cores)) as pool:
        for block in blocks:
            _zero_padding(memory, memory.spec.table.blocks[block], version)
            _cast(pool, memory, block, version)
    for block in blocks:
        control.set_state_version(block, version)
        control.set_slot_version(block, version % 2, version)
        control.end_frozen(block)
    control.write_record(record)
    # The record before the version it belongs to, the incarnation last: it says that all is there.
    control.set_committed(version)
    control.set_incarnation(record.incarnation)


def _cast(pool: _native.Pool, memory: NodeMemory, block: int, version: int) -> None:
    """Casts weights from master, rounded as in the optimizer's sweeps. Weights that are the
    master's upper half are already in place.
    """
    weights = memory.weights(block, version % WEIGHT_SLOTS)
    if weights.size and not memory.split_master:
        _native.cast_weights(
            pool,
            master=memory.state(block, "master", version),
            weights=weights.view(np.uint16) if weights.dtype == np.float16 else weights,
            weights_dtype=WEIGHTS_DTYPES[memory.spec.table.weight_dtype],
        )


def _zero_padding(memory: NodeMemory, block: BlockSpec, version: int) -> None:
    """Sets padding to zero: it takes part in sweeps and norms, and may hold anything."""
    names = memory.spec.table.state_arrays
    arrays = [memory.state(block.index, name, version) for name in names]
    if memory.split_master:
        halves = memory.halves(block.index, version)
        arrays += [halves.high, halves.low]
    else:
        arrays.append(memory.state(block.index, "master", version))
    for tensor in block.tensors:
        end = tensor.offset + tensor.num_elements
        gap = slice(end, tensor.offset + padded(tensor.num_elements))
        if tensor.trainable:
            for array in arrays:
                array[gap] = 0
        elif not memory.has_complete_base(block.index):
            memory.frozen(block.index)[gap] = 0
