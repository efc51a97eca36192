"""The world that a simulated process lives in, and what of production it replaces.

Replaced are: the port (:class:`SimWorld`), the scheduler's gRPC server, members' channels, metric
pages, logs, pinning, and the model (numbers that follow from weights and tokens, as on emulated
devices). Words of shared memory and sweeps are the real ones, with a point before each store at
which the process may die.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

import penstock.daemons.memory.main as memory_main
import penstock.daemons.memory.restore as restore_module
import penstock.daemons.memory.saving as saving_module
import penstock.daemons.memory.server as server_module
import penstock.daemons.memory.snapshot as snapshot_module
import penstock.daemons.mirror.main as mirror_main
import penstock.daemons.node.effects as node_effects_module
import penstock.daemons.node.run_lock as home_module
import penstock.daemons.optimizer.main as optimizer_main
import penstock.daemons.optimizer.pulls as pulls_module
import penstock.daemons.scheduler.effects as scheduler_effects_module
import penstock.daemons.scheduler.journal as journal_module
import penstock.daemons.scheduler.main as scheduler_main
import penstock.protocol.metrics.registry as registry_module
import penstock.protocol.run.hardware.placement as placement_module
import penstock.protocol.run.process as process_module
import penstock.protocol.wire.blocks as blocks_module
import penstock.protocol.wire.member as member_module
import penstock.protocol.wire.sockets as sockets_module
import penstock.shm.control as control_module
import penstock.shm.inventory as inventory_module
import penstock.shm.memory as memory_module
import penstock.shm.segment as segment_module
import penstock.workers.epoch_builder as epoch_builder_module
import penstock.workers.main as worker_main
from penstock import _native
from penstock.daemons.mirror.sweeps import ReplicaSweeps
from penstock.daemons.optimizer.kernels import Kernels
from penstock.daemons.optimizer.machine.sweeps import GradientStatus
from penstock.daemons.scheduler.machine.activities.save import Save
from penstock.daemons.scheduler.machine.history import BreakCause
from penstock.daemons.scheduler.machine.machine import SchedulerMachine
from penstock.host import world
from penstock.host.limits.cgroup import MemoryLimit
from penstock.protocol.wire.member import MemberLink
from penstock.protocol.wire.sockets import OpenAccess
from penstock.shm.control import ControlView
from penstock.shm.pages import HugePages
from penstock.workers.epoch_builder import EpochBuilder
from penstock.workers.session import Session
from tests.scheduler.transitions import Observer, unknown
from tests.simulation.cuts import cut
from tests.simulation.devices import SimPlatform
from tests.simulation.files import replace_files
from tests.simulation.jobs import load_block, saved, takes_a_while, write_tensors
from tests.simulation.kernel import Process
from tests.simulation.network import Network
from tests.simulation.orders import close_link, hear_stops, heeds_drains, notes_drains
from tests.simulation.promises import lets_go
from tests.simulation.quiet import before_word, behind_word, replace_links, writes
from tests.simulation.rare import PULLED
from tests.simulation.rows import replace_rows
from tests.simulation.streams import SimAccess, SimControlClient, SimServer
from tests.simulation.threads import Condition, Event, Executor, Lock, Queue, Thread
from tests.simulation.zeromq import Context, Poller

WALL_S = 1.7e9
LOOK_AGAIN_S = 0.02
RANGE_BYTES = 48
"""Of which an array has more than are asked for at once."""
_WHOLE_ARRAYS = blocks_module.MAX_RANGE_BYTES
ENDS = 0.3
"""How many of the sweeps that are to be cut come to their end, and no word says so."""
UNTOUCHED = 0.2
"""How many are cut ahead of their first byte."""


class SimWorld(world.World):
    """See :class:`penstock.host.world.World`."""

    guards_sockets = False

    def __init__(self, process: Process, network: Network, cluster: Any) -> None:
        self.process = process
        self.network = network
        self.cluster = cluster
        self._kernel = process.kernel
        self.skew_s = 0.0

    def monotonic(self) -> float:
        return self._kernel.now

    def perf_counter(self) -> float:
        return self._kernel.now

    def wall(self) -> float:
        return WALL_S + self._kernel.now + self.skew_s

    def sleep(self, seconds: float) -> None:
        deadline = self._kernel.now + seconds
        while (left := deadline - self._kernel.now) > 0.0:
            self._kernel.park(left)

    def look_again(self, since_s: float) -> bool:
        machine, task = self.process.machine, self._kernel.current
        assert task is not None
        machine.watchers.append(task)
        if not self._kernel.park(LOOK_AGAIN_S) and task in machine.watchers:
            machine.watchers.remove(task)
        return True

    def pid(self) -> int:
        return self.process.pid

    def random_bits(self, count: int) -> int:
        return self._kernel.random.getrandbits(count)

    def thread(self, target: Callable[..., object], **options: Any) -> Any:
        return Thread(self.process, target, **options)

    def current_thread(self) -> Any:
        return SimpleNamespace(join=lambda timeout=None: None)

    def event(self) -> Any:
        return Event(self._kernel)

    def lock(self) -> Any:
        return Lock(self._kernel)

    def condition(self) -> Any:
        return Condition(self._kernel)

    def queue(self) -> Any:
        return Queue(self._kernel)

    def executor(self, max_workers: int, name: str) -> Any:
        return Executor(self.process, max_workers, name)

    def sockets(self) -> Any:
        return Context(self.process, self.network)

    def poller(self) -> Any:
        return Poller(self.process)

    def database(self, path: Path, *, timeout_s: float) -> Any:
        return self.cluster.disk.database(self.process, path)


def here() -> SimWorld:
    """Returns the world of the running task."""
    found = world.here()
    assert isinstance(found, SimWorld)
    return found


# ---- shared memory: a point before every store, and whoever looks at words is woken ----


def _pointed(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: ControlView, *args: Any, **named: Any) -> Any:
        found = world.here()
        if not isinstance(found, SimWorld):
            return method(self, *args, **named)
        process = found.process
        process.kernel.point(name)
        history = found.cluster.history
        history.complain(before_word(self, process.kind, name, args))
        result = method(self, *args, **named)
        history.complain(behind_word(self, process, name, args, history.announced))
        history.stored(process, name, args, named)
        watchers = process.machine.watchers
        while watchers:
            process.kernel.wake(watchers.pop())
        return result

    return call


_real_store = _native.store_u64


def _store(buffer: Any, offset: int, value: int) -> None:
    found = world.here()
    if isinstance(found, SimWorld):
        found.process.kernel.point("word")
    _real_store(buffer, offset, value)


def _write_record(self: ControlView, record: Any) -> None:
    """In two halves: a kill between them leaves a wrong checksum."""
    start = control_module._RECORDS + (record.version % 2) * control_module._RECORD_BYTES
    data = record.pack()
    half = len(data) // 2
    self._buffer[start : start + half] = data[:half]
    found = world.here()
    if isinstance(found, SimWorld):
        found.process.kernel.point("half a record")
    self._buffer[start + half : start + len(data)] = data[half:]


_WORDS = (
    *("set_incarnation", "set_epoch", "set_committed", "begin_sweep", "end_sweep"),
    *("set_state_version", "set_slot_version", "set_ready", "begin_gradients", "end_gradients"),
    *("clear_history", "set_held", "set_generation", "set_lost_attempt", "set_pin"),
)


# ---- sweeps ----


def _cut(kernels: Any, work: Any, run: Callable[..., Any], process: Process) -> tuple[bool, Any]:
    """A sweep whose process is to die of it; returns whether it does, and else the status."""
    fate = process.world.cluster.cuts.pop(process.name)
    if fate < ENDS:
        run(kernels, work)
        process.last_point = "swept"
        return True, None
    if fate < ENDS + UNTOUCHED:
        return True, None
    was_cut, status = cut(kernels, work, run, process.kernel.random)
    if was_cut:
        process.last_point = "cut"
    return was_cut, status


def _swept(run: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a sweep that takes its time, and that a kill may cut short."""

    def call(self: Any, work: Any) -> Any:
        found = world.here()
        if not isinstance(found, SimWorld):
            return run(self, work)
        process = found.process
        kernel = process.kernel
        kernel.point("sweep")
        writes(process, f"sweep of {work}")
        cluster = found.cluster
        of_replica = isinstance(self, ReplicaSweeps)
        longest_s = cluster.settle_s if of_replica else kernel.random.choice(cluster.sweep_s)
        found.sleep(kernel.random.random() * longest_s * process.machine.slow)
        if process.name in found.cluster.cuts and not isinstance(work, GradientStatus):
            was_cut, status = _cut(self, work, run, process)
            if was_cut:
                process.kill()
                found.cluster.history.cut()
                kernel.park_forever()
            return status
        result = run(self, work)
        writes(process, f"sweep of {work}")
        kernel.point("swept")
        return result

    return call


# ---- gradients of other nodes ----

_real_fetch = pulls_module.Puller._fetch


def _fetch(self: Any, *asked: Any) -> bool:
    """One contribution: whoever pulls it may die before and after."""
    found = here()
    found.process.kernel.point("pulls")
    arrived = _real_fetch(self, *asked)
    if arrived:
        found.cluster.history.rare[PULLED] += 1
        found.process.kernel.point("pulled")
    return arrived


# ---- models ----


def _batches(self: EpochBuilder, data_position: int) -> Any:
    """The batches of a position, made once: they follow from it and from their size alone."""
    cluster = here().cluster
    key = data_position, cluster.run.config.train.micro_batch
    if key not in cluster.batches:
        cluster.batches[key] = _real_batches(self, data_position)
    return cluster.batches[key]


_real_batches = EpochBuilder.batches


# ---- what production does to its process and machine ----


class _NoPage:
    def close(self) -> None:
        """Nobody asks."""


class _LocalAccess(OpenAccess):
    """Sockets without keys; addresses are believed."""

    def check(self, address: str, node: str) -> None:
        """Whose it is."""

    def connect(self, socket: Any, address: str) -> None:
        socket.connect(address)


@cache
def _thread() -> Any:
    """The one thread that all sweeps of this interpreter run on. Where the interpreter stays on one
    core, too (`many.stay_on_core`), handing a sweep over is a switch on it, however busy others
    are.
    """
    return _native.Pool([min(os.sched_getaffinity(0))])


@contextmanager
def _pool(cores: Any) -> Iterator[Any]:
    yield _thread(), frozenset()


@contextmanager
def _replica_pool(cores: Any) -> Iterator[Any]:
    yield _thread()


def _access(*_: Any) -> SimAccess:
    found = here()
    return SimAccess(found.process, found.network)


def _server(
    events: Any, host: str, port: int, homes: Any, admission: Any, *, is_held: bool
) -> SimServer:
    found = here()
    return SimServer(found.process, found.network, f"{host}:{port}", events)


def _machine(*args: Any) -> SchedulerMachine:
    """The real one; the cluster looks at what it is up to when somebody dies."""
    found = here()
    machine = found.cluster.scheduler = SchedulerMachine(*args)
    found.cluster.scheduler_process = found.process
    found.cluster.history.scheduler_begins(machine)
    real, handle, observer = machine._break_epoch, machine.handle, Observer(machine)

    def break_epoch(cause: BreakCause, reason: str, now_s: float) -> None:
        found.cluster.hangs_in_a_row = machine.hangs.in_a_row
        found.cluster.history.broke(cause, reason)
        real(cause, reason, now_s)

    def heard(event: Any, now_s: float) -> Any:
        effects = handle(event, now_s)
        found.cluster.history.complain(lets_go(machine))
        odd = [step for step in observer.steps(event) if unknown(step)]
        found.cluster.history.complain([f"not in the table of states: {step}" for step in odd])
        return effects

    machine._break_epoch = break_epoch  # type: ignore[method-assign]
    machine.handle = heard  # type: ignore[method-assign]
    return machine


def _nothing(*_: Any, **__: Any) -> None:
    """In the place of what concerns the real process."""


class _Identity:
    """See :class:`penstock.host.process_identity.ProcessIdentity`, of simulated processes."""

    def __init__(self, process: Process) -> None:
        self._process = process

    @classmethod
    def of(cls, pid: int) -> _Identity | None:
        found = [p for p in here().cluster.living if p.pid == pid]
        return cls(found[0]) if found else None

    def alive(self) -> bool:
        return self._process.alive


_real_cast = restore_module._cast
_real_leave_word = scheduler_effects_module.write_run_result


def _leave_word(run_dir: Path, end: Any) -> None:
    """The run ends: its scheduler may die before it says so, and before it tells anybody."""
    found = here()
    found.process.kernel.point("before the note of the end")
    _real_leave_word(run_dir, end)
    found.cluster.history.ends()
    found.process.kernel.point("noted the end")


def _cast(pool: Any, memory: Any, block: int, version: int) -> None:
    """On the shared thread."""
    here().process.kernel.point("casts")
    takes_a_while(1e-3)
    _real_cast(_thread(), memory, block, version)


_real_inventory = home_module.inventory


def _inventory() -> tuple[Any, ...]:
    """As a node sees it whose children are dead: only this process has their memory mapped."""
    return tuple(replace(found, in_use=False) for found in _real_inventory())


_room = MemoryLimit(owner="nobody", limit=1 << 40, available=1 << 40)


def _peers_once(find: Callable[[Any, int], Any]) -> Callable[[Any, int], Any]:
    """They follow from a shape's plan: a worker that comes back need not find them again."""
    known: dict[tuple[Path, int], Any] = {}

    def peers(files: Any, device: int) -> Any:
        key = files.path, device
        if key not in known:
            known[key] = find(files, device)
        return known[key]

    return peers


_torch = SimpleNamespace(set_num_threads=_nothing, set_num_interop_threads=_nothing)


def _replace_points(put: Callable[[Any, str, Any], None]) -> None:
    """Where a process may die, between a word and its bytes, and what the history is told of."""
    replace_rows(put)
    replace_links(put)
    put(pulls_module.Puller, "_fetch", _fetch)
    for sweeps in (Kernels, ReplicaSweeps):
        put(sweeps, "run", _swept(sweeps.run))
    put(control_module, "store_u64", _store)
    put(ControlView, "write_record", _pointed("write_record", _write_record))
    for name in _WORDS:
        put(ControlView, name, _pointed(name, getattr(ControlView, name)))


def divide_arrays(*, into_ranges: bool) -> None:
    """Choose what a run's arrays travel in. Replicas are whole sooner in one piece."""
    blocks_module.MAX_RANGE_BYTES = RANGE_BYTES if into_ranges else _WHOLE_ARRAYS


@contextmanager
def replaced() -> Iterator[None]:
    """Everything above is in the place of production's parts."""
    with ExitStack() as stack:

        def put(target: Any, name: str, value: Any) -> None:
            stack.enter_context(mock.patch.object(target, name, value))

        local = _LocalAccess()
        for name in ("__init__", "add", "set", "observe", "say", "ask", "refreshed_by", "forget"):
            put(registry_module.MetricRegistry, name, _nothing)
        for module in (process_module, scheduler_main):
            put(module, "configure_logging", _nothing)
            put(module, "serve_metrics", lambda *_: _NoPage())
        put(member_module, "member_credentials", _access)
        for module in (memory_main, mirror_main, optimizer_main, worker_main):
            put(module, "socket_access", lambda *_: local)
        put(optimizer_main, "open_pool", _pool)
        put(mirror_main, "_native", SimpleNamespace(Pool=_replica_pool))
        put(node_effects_module, "boot_id", lambda: here().process.machine.boot)
        put(node_effects_module, "ControlClient", SimControlClient)
        put(scheduler_effects_module, "write_run_result", _leave_word)
        put(home_module, "inventory", _inventory)
        put(inventory_module, "_mapped_names", frozenset)
        put(restore_module, "_cast", _cast)
        put(snapshot_module, "load_block", load_block)
        put(memory_module, "huge_bytes", Counter)
        put(segment_module, "_populate", _nothing)
        put(segment_module, "allowed_huge_pages", lambda *_: HugePages.NEVER)
        put(segment_module, "tightest_memory", lambda: _room)
        put(snapshot_module, "usable_cpus", lambda: 2)
        put(saving_module, "write_tensors", write_tensors)
        put(Save, "saved", saved)
        put(worker_main, "usable_cpus", lambda: 2)
        put(worker_main, "fence_listener", heeds_drains(worker_main.fence_listener))
        put(Session, "_drain", notes_drains(Session._drain))
        put(optimizer_main, "ceiling_of", _nothing)
        put(optimizer_main, "local_ratio", lambda *_: 1.0)
        put(scheduler_main, "SchedulerServer", _server)
        put(scheduler_main, "scheduler_admission", _nothing)
        put(scheduler_main, "make_room_for_streams", _nothing)
        put(scheduler_main, "SchedulerMachine", _machine)
        put(scheduler_main, "_hear_stops", hear_stops)
        put(MemberLink, "close", close_link)
        put(journal_module, "check_locks", _nothing)
        put(placement_module, "cpu_limit", cache(placement_module.cpu_limit))
        put(placement_module.Topology, "read", cache(placement_module.Topology.read))
        put(worker_main, "torch", _torch)
        put(worker_main, "_peers", _peers_once(worker_main._peers))
        put(worker_main, "RunDirectory", lambda path: here().cluster.run)
        put(worker_main, "open_platform", SimPlatform)
        put(EpochBuilder, "batches", _batches)
        put(worker_main, "os", SimpleNamespace(sched_setaffinity=_nothing))
        put(epoch_builder_module, "checked_places", lambda config, access, found: found)
        put(sockets_module, "refuse_foreign_owner", _nothing)
        put(blocks_module, "MAX_RANGE_BYTES", RANGE_BYTES)
        put(server_module, "ProcessIdentity", _Identity)
        _replace_points(put)
        replace_files(put)
        torch.set_num_threads(1)
        yield
