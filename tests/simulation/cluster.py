"""A simulated cluster: its machines, its processes as production wires them, and its operator."""

from __future__ import annotations

import errno
import random
import signal
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import penstock.daemons.memory.main as memory_main
import penstock.daemons.mirror.main as mirror_main
import penstock.daemons.optimizer.main as optimizer_main
import penstock.daemons.scheduler.main as scheduler_main
import penstock.workers.main as worker_main
from penstock.daemons.kit.events import RefusedByScheduler, StopAsked, Tick
from penstock.daemons.kit.loop import Loop
from penstock.daemons.kit.messages import event_of
from penstock.daemons.memory.segments import reclaim
from penstock.daemons.node.effects import LinkSettings, NodeEffects, NodeMetrics
from penstock.daemons.node.machine.events import EpochBegins, Exited, Watched
from penstock.daemons.node.machine.machine import NodeMachine
from penstock.daemons.node.main import _clean_up, _limits, _watch_for_end
from penstock.daemons.node.service import _EVENTS as NODE_EVENTS
from penstock.daemons.scheduler.machine.events import ControlCall
from penstock.host import world
from penstock.host.errors import ExitCode, PenstockError
from penstock.host.stopping import STOP_ORDER, StopSignal
from penstock.protocol.run.names import (
    SCHEDULERD,
    devices_of_node,
    memoryd_name,
    mirrord_name,
    mirrored_by,
    node_member_name,
    optimizerd_name,
    worker_name,
)
from penstock.protocol.run.process import Work, work_in_run
from penstock.protocol.run.run_result import EndWatch, RunEnd
from penstock.protocol.run.rundir import RunDirectory
from penstock.shm.layout import SegmentKind
from penstock.shm.memory import MemorySpec, NodeMemory
from penstock.shm.segment import SHM_ROOT, exists
from tests.simulation.announced import Announcements
from tests.simulation.configurations import Shape
from tests.simulation.disk import Disk
from tests.simulation.files import Files
from tests.simulation.history import History
from tests.simulation.jobs import load_initial
from tests.simulation.kernel import Kernel, Machine, Process
from tests.simulation.network import Network
from tests.simulation.orders import Obedience
from tests.simulation.partners import Partners
from tests.simulation.promises import Numbers, Restarts
from tests.simulation.simulated import SimWorld
from tests.simulation.streams import SimAccess
from tests.simulation.vouched import Key, Vouched

PORT = 7000
START_S = 0.05


class Cluster:
    """One run of a shape, from its first start to its end."""

    def __init__(
        self,
        kernel: Kernel,
        shape: Shape,
        run: RunDirectory,
        batches: dict[Any, Any],
        known: Mapping[Key, int],
    ) -> None:
        self.kernel, self.shape = kernel, shape
        self.run, self.batches = run, batches
        self.network = Network(kernel)
        self.history = History(kernel)
        self.disk = Disk(kernel, self.history)
        self.files = Files(run.path, kernel, self.history, self.disk)
        nodes = run.config.cluster.nodes
        self.machines = [Machine(node.name) for node in nodes]
        self.nodes: list[SimNode | None] = [None] * len(nodes)
        self.codes: dict[int, int] = {}
        self.cuts: dict[str, float] = {}
        lengths = random.Random(f"settle {kernel.seed}")
        self.settle_s = lengths.choice((4e-4, 4e-4, 8e-3))
        """The longest settle of a replica: in some runs longer than a step."""
        self.sweep_s = lengths.choice(((4e-4,), (*(4e-4,) * 30, 0.3)))
        """The longest sweeps of an optimizer: in some runs a few take longer than a process takes
        to come back, and orders of the next epoch come meanwhile.
        """
        self.sums_on_devices = lengths.random() < 0.5
        """Whether gradients are summed elsewhere than where they are published."""
        self.has_long_device_work = lengths.random() < 0.5
        self.doomed: dict[str, int] = {}
        self.newborns: dict[str, float] = {}
        """How long after its birth the next process of a name is stopped for ever; imports take
        :data:`START_S`.
        """
        self.changed_s = kernel.now
        """When a process was started, or died, for the last time."""
        self.beginnings = 0
        """How often the run was begun again while nodes of its last start were still ending."""
        self.history.cluster = self
        self.restart_nodes = True
        self.scheduler: Any = None
        self.hangs_in_a_row = 0
        """What the scheduler said of that which broke an epoch last: it may be dead by now."""
        self.scheduler_process: Process | None = None
        self.excused: set[int] = set()
        self._next_pid = 100
        self._end_before: RunEnd | None = None
        """How the run had ended when it last began again; the note may be there for a while."""
        self._insisted = False
        self._killed_s = float("inf")
        """When who signalled all nodes is going to kill everything."""
        self._specs = [run.memory_spec(index) for index in range(len(nodes))]
        self.kept = self._kept_specs()
        """By node: the replica in its memory, of another node's state, if it keeps one."""
        self.history.partners = Partners(run, self.kept)
        self.history.numbers = Numbers(run.config)
        self.vouched = Vouched(self._specs, self.kept, known)
        self.history.announced = Announcements(run.config, run.table, self.vouched.squares)
        if shape.keeps_bits:
            self.history.vouched = self.vouched

    # ---- processes ----

    def spawn(
        self, index: int, name: str, main: Callable[[Process], int], delay_s: float = START_S
    ) -> Process:
        """Start a process on a machine; it begins a moment later, as imports take their time."""
        kernel = self.kernel
        self.changed_s = kernel.now
        self._next_pid += 1
        process = Process(kernel, self.machines[index], name, self._next_pid)
        if name in self.doomed:
            process.doom(self.doomed.pop(name), self._fell)
        if name in self.newborns:
            kernel.after(self.newborns.pop(name), process.stop)
        kernel.processes.append(process)
        process.world = SimWorld(process, self.network, self)
        process.enter(process.world)
        kernel.note("starts", name, f"pid {process.pid}")

        def run() -> None:
            world.sleep(delay_s * (0.5 + kernel.random.random()) * process.machine.slow)
            try:
                code = int(main(process) or 0)
            except PenstockError as error:
                said = str(error).replace(f"{self.run.path}/", "")  # another one in each process
                kernel.note("stops", name, said[:200])
                code = int(error.exit_code)
                self.history.gave_up(name, str(error))
            process.last_point = "ended"
            process.kill(code)

        process.spawn(run, "main")
        return process

    def _fell(self) -> None:
        self.history.effective["kill after a loss"] += 1

    def run_beside(self, process: Process) -> int:
        """What another schedulerd of the run does, on a port that nobody else has."""
        return scheduler_main._run(self.run, PORT + process.pid, process.pid, None)

    def knows(self, process: Process) -> bool:
        """Returns whether a living scheduler has a stream of this very process."""
        if self.scheduler_process is None or not self.scheduler_process.alive:
            return False
        members = self.scheduler.members
        known = (process.name, process.pid) in members.pids()
        return known and process.name in members.present

    def process(self, name: str) -> Process | None:
        """Returns the living process of a name."""
        found = [p for p in self.kernel.processes if p.alive and p.name == name]
        return found[-1] if found else None

    @property
    def living(self) -> list[Process]:
        """All processes that live."""
        return [process for process in self.kernel.processes if process.alive]

    def start(self) -> None:
        """Start all nodes."""
        for index in range(len(self.nodes)):
            self.start_node(index)

    def start_node(self, index: int, delay_s: float = START_S) -> None:
        """The operator starts a node's supervisor."""
        node = SimNode(self, index)
        self.nodes[index] = node
        name = node_member_name(self.machines[index].name)
        process = self.spawn(index, name, node.main, delay_s)
        node.process = process
        process.at_death.append(node.children_die)
        process.on_exit = lambda: self._node_ended(index, process)

    def _node_ended(self, index: int, process: Process) -> None:
        self.kernel.look = True
        code = process.code or 0
        node = self.nodes[index]
        if code >= 0:
            self.history.node_ended(index)
        if code >= 0 and node is not None and node.beginning < self.beginnings:
            self.kernel.after(0.3, lambda: self._start_again(index))
        elif code >= 0:
            self.codes[index] = code
        elif self.restart_nodes:  # the same command again
            delay_s = 0.3 + self.kernel.random.random()
            self.kernel.after(delay_s, lambda: self._start_again(index))

    def _start_again(self, index: int) -> None:
        machine = self.machines[index]
        end = RunEnd.read(self.run.path)
        has_ended = end is not None and end != self._end_before
        self.kernel.look = True
        if self._insisted:
            self.codes[index] = int(ExitCode.INTERRUPTED)
        elif index and end is not None and has_ended:  # nobody starts one node of what ended
            self.codes[index] = int(end.code)
            if not end.keep_memory:
                self.lose_memory(index)
        elif machine.up:
            if has_ended:
                self.beginnings += 1
                self._end_before = end
            self.start_node(index)
            for other in [] if index else list(self.codes):  # the run begins again: all are needed
                del self.codes[other]
                self.start_node(other)
        else:
            self.kernel.after(0.5, lambda: self._start_again(index))

    def start_again(self) -> None:
        """The operator gives the same command again: all nodes."""
        self._end_before = RunEnd.read(self.run.path)
        self.codes.clear()
        self._insisted, self._killed_s = False, float("inf")
        self.excused = {3} if self.disk.full_beside else set()
        self.scheduler, self.hangs_in_a_row = None, 0
        self.start()

    def complete(self) -> bool:
        """Whether the last step is saved."""
        steps = self.run.config.train.steps
        return (self.run.path / "state" / f"step-{steps:08d}").exists()

    @property
    def ended(self) -> bool:
        """Whether all nodes have ended of their own accord."""
        return len(self.codes) == len(self.nodes)

    def state(self) -> str:
        """Returns what the run is up to, for people."""
        machine = self.scheduler
        living = ", ".join(f"{p.name}{' stopped' if p.stopped else ''}" for p in self.living)
        phase = (
            "" if machine is None else f"{machine.phase.value}, missing {machine.members.missing}"
        )
        return f"{phase}; alive: {living}"

    # ---- memory ----

    def memory_of(self, index: int) -> NodeMemory:
        """Map a node's memory."""
        return NodeMemory.attach(self._specs[index])

    def _kept_specs(self) -> dict[int, MemorySpec]:
        config = self.run.config
        if not config.mirrors:
            return {}
        return {
            index: self.run.replica_spec(mirrored_by(config, index))
            for index in range(len(self.machines))
        }

    def lose_memory(self, index: int) -> None:
        """The machine was switched off: its node's memory is gone, and the replica that it kept."""
        reclaim(self._specs[index])
        if index in self.kept:
            reclaim(self.kept[index])

    def copy_of_memory(self, index: int) -> dict[str, bytes]:
        """Returns the segments of a machine by name: what it still has while nobody reaches it."""
        specs = [self._specs[index], *([self.kept[index]] if index in self.kept else ())]
        names = [spec.name(kind) for spec in specs for kind in SegmentKind]
        return {name: _file(name).read_bytes() for name in names if exists(name)}

    def bring_back(self, segments: dict[str, bytes]) -> None:
        """A machine that was out of reach has what it had."""
        for name, content in segments.items():
            _file(name).touch(0o600)
            _file(name).write_bytes(content)

    def reclaim(self) -> None:
        """Remove all segments."""
        for index in range(len(self.machines)):
            self.lose_memory(index)

    # ---- what operators do ----

    def stop_node(self, index: int, *, again: bool = False, within_s: float | None = None) -> bool:
        """SIGTERM for a node; returns whether it is there to hear it."""
        node = self.nodes[index]
        if node is None or node.process is None or not node.process.alive or node.inbox is None:
            return False
        node.inbox.put(StopAsked(again=again, within_s=within_s))
        return True

    @property
    def left_s(self) -> float | None:
        """How long it is until everything is killed; None if nobody is going to do that."""
        left_s = self._killed_s - self.kernel.now
        return max(0.0, left_s) if left_s < float("inf") else None

    @property
    def server(self) -> Any:
        """The scheduler's side of all streams; None while nobody listens."""
        return self.network.listeners.get(f"{self.run.config.cluster.nodes[0].host}:{PORT}")

    def insist(self) -> None:
        """One more signal for all nodes."""
        self._signal_all(again=True)

    def stop_all(self, within_s: float) -> None:
        """A signal for all nodes by somebody who is going to kill them, as the end of a job's time
        does.
        """
        self._killed_s = self.kernel.now + within_s
        self._signal_all(within_s=within_s)

    def _signal_all(self, *, again: bool = False, within_s: float | None = None) -> None:
        """Nodes that cannot hear it are killed, and nobody starts nodes again until all have
        ended.
        """
        self._insisted = True
        for index, node in enumerate(self.nodes):
            heard = self.stop_node(index, again=again, within_s=within_s)
            if not heard and node is not None and node.process is not None:
                node.process.kill()

    def ask(self, call: str) -> bool:
        """A control client calls; returns whether there is a scheduler to hear it."""
        scheduler = self.process(SCHEDULERD)
        server = self.server
        if scheduler is None or server is None:
            return False
        server.ask(ControlCall(call))
        return True


class SimChildren:
    """See :class:`penstock.daemons.node.children.Children`."""

    def __init__(self, node: SimNode) -> None:
        self._node = node
        self.running: dict[str, Process] = {}
        self._obedience = Obedience()
        self.ordered: set[Process] = set()
        """Whom this node has had killed."""

    @property
    def stopped(self) -> frozenset[str]:
        return frozenset(name for name, process in self.running.items() if process.stopped)

    def start(self, name: str) -> int:
        node = self._node
        if node.cluster.kernel.random.random() < node.cluster.cuts.get("spawn fails", 0.0):
            raise OSError(errno.EAGAIN, "no process can be made")
        node.cluster.history.complain(node.restarts.starts(name))
        process = node.spawn(name)
        self.running[name] = process
        process.on_exit = lambda: node.child_ended(name, process)
        return process.pid

    def signal(self, name: str, number: signal.Signals) -> None:
        if number == signal.SIGKILL:
            self._node.restarts.killed(name)
        process = self.running.get(name)
        if process is None:
            return
        if number == signal.SIGKILL:
            self._obedience.killed(process)
            self.ordered.add(process)
            kernel = self._node.cluster.kernel
            kernel.after(kernel.random.random() * 1e-3, process.kill)
        elif number == STOP_ORDER:
            self._obedience.told(process)
            process.order_to_stop()
            if name == SCHEDULERD and self._node.process is not None:
                self._node.cluster.history.stop_heard(self._node.process)


class SimNode:
    """A node's supervisor: the real machine and effects over simulated children."""

    def __init__(self, cluster: Cluster, index: int) -> None:
        self.cluster = cluster
        self.index = index
        self.beginning = cluster.beginnings
        self.old_end = RunEnd.read(cluster.run.path)
        """What is there when the command is given."""
        self.name = cluster.machines[index].name
        self.process: Process | None = None
        self.children = SimChildren(self)
        self.inbox: Any = None
        self.restarts = Restarts(cluster.kernel, cluster.run.config.cluster.max_restarts)

    def main(self, process: Process) -> int:
        """The loop of :class:`penstock.daemons.node.service.Supervisor`."""
        cluster, run, config = self.cluster, self.cluster.run, self.cluster.run.config
        self.inbox = world.queue()
        names = self._names()
        machine = NodeMachine.create(names, _limits(config, hosts=self.index == 0))
        hosts = config.cluster.nodes[0].host
        effects = NodeEffects(
            children=self.children,  # type: ignore[arg-type]
            run_dir=run.path,
            hosts_scheduler=self.index == 0,
            link=LinkSettings(
                address=f"{hosts}:{PORT}",
                access=SimAccess(process, cluster.network),  # type: ignore[arg-type]
                run_id=run.run_id,
                member=node_member_name(self.name),
                heartbeat_interval_s=config.cluster.heartbeat_interval_s,
                silence_timeout_s=config.cluster.heartbeat_timeout_s,
            ),
            epoch=lambda: machine.epoch,
            announce=lambda: self.inbox.put("message"),
            metrics=NodeMetrics(names),
        )
        ending = _watch_for_end(run.path, self.old_end, starts_run=self.index == 0)
        loop = Loop(machine, effects)
        effects.open_link()
        loop.feed(Tick())
        while loop.exit is None:
            self._turn(machine, effects, loop, ending)
        effects.close_link()
        _clean_up(run, self.name, ending)
        return int(loop.exit.code)

    def _turn(self, machine: Any, effects: Any, loop: Loop, ending: EndWatch) -> None:
        due_s = machine.next_deadline_s()
        now_s = world.monotonic()
        sleep_s = 1.0 if due_s is None else min(max(0.0, due_s - now_s), 1.0)
        items = []
        if sleep_s > 0.0 or not self.inbox.empty():
            try:
                items.append(self.inbox.get(timeout=sleep_s))
            except Exception:  # queue.Empty
                items = []
        link = effects.link
        connected = link is not None and link.connected
        watched = Watched(
            stopped=self.children.stopped,
            heard_s=None if link is None else link.heard_s,
            ended=None if connected else ending.look(),
        )
        loop.feed(watched)
        for item in items:
            if item == "message":
                message = link.receive(1.0) if link is not None else None
                event = event_of(message, NODE_EVENTS) if message is not None else None
                if isinstance(event, EpochBegins):
                    self.restarts.begins(event.version)
                if isinstance(event, RefusedByScheduler):
                    self.restarts.refused()
                if event is not None:
                    loop.feed(event)
            else:
                loop.feed(item)
        loop.feed(Tick())
        self.cluster.history.complain(self.restarts.look(machine))

    def child_ended(self, name: str, process: Process) -> None:
        """SIGCHLD."""
        if self.children.running.get(name) is process:
            del self.children.running[name]
        if self.process is not None and self.process.alive and self.inbox is not None:
            code = -9 if process.code is None else process.code
            self.restarts.died(process, ordered=process in self.children.ordered)
            if self.restarts.used_up:
                self.cluster.excused.add(int(ExitCode.LOST_MEMBERS))
            self.inbox.put(Exited(name=name, pid=process.pid, code=code))

    def children_die(self) -> None:
        """The kernel's parent-death signal."""
        for process in list(self.children.running.values()):
            process.on_exit = lambda: None
            process.kill()
        self.children.running.clear()

    def spawn(self, name: str) -> Process:
        """Start a child."""
        return self.cluster.spawn(self.index, name, self._main_of(name))

    def _names(self) -> tuple[str, ...]:
        config = self.cluster.run.config
        names = [memoryd_name(self.name), optimizerd_name(self.name)]
        if config.mirrors:
            names.append(mirrord_name(self.name))
        if self.index == 0:
            names.insert(0, SCHEDULERD)
        names += [worker_name(device) for device in devices_of_node(config, self.index)]
        return tuple(names)

    def _main_of(self, name: str) -> Callable[[Process], int]:
        cluster, run = self.cluster, self.cluster.run
        address = f"{run.config.cluster.nodes[0].host}:{PORT}"
        kind, _, rest = name.partition(".")

        def main(process: Process) -> Any:
            if kind == SCHEDULERD:
                return scheduler_main._run(run, PORT, process.pid, None)
            stop = StopSignal()
            process.listen(stop.set)
            work: Work
            if kind == "memoryd":
                load = load_initial(run, self.index)
                work = partial(memory_main.memoryd, self.name, address, load)
            elif kind == "mirrord":
                work = partial(mirror_main.mirrord, self.name, address)
            elif kind == "optimizerd":
                work = partial(optimizer_main.optimizerd, self.name, address)
            else:
                assert kind == "worker"
                work = partial(worker_main.worker, int(rest), address)
            return work_in_run(run, name, work, stop)

        cluster.history.rare[f"starts {kind}"] += 1
        return main


def _file(segment: str) -> Path:
    return SHM_ROOT / segment.removeprefix("/")


def run_path(base: Path, shape: Shape) -> Path:
    """Returns where a shape's run directory is."""
    return base / shape.name
