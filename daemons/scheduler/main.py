"""``penstock schedulerd``: opens the run's files, listens, and runs the machine on one thread."""

from __future__ import annotations

import ctypes
import logging
import os
import queue
import resource
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from penstock.daemons.kit.events import StopAsked, Tick
from penstock.daemons.kit.loop import Loop
from penstock.daemons.kit.story import FlightRecorder
from penstock.daemons.kit.waits import WaitNote
from penstock.daemons.scheduler.effect_times import EffectTimes
from penstock.daemons.scheduler.effects import DiskThread, SchedulerEffects, write_run_result
from penstock.daemons.scheduler.intake import EventQueue
from penstock.daemons.scheduler.journal import Journal, JournalInUseError
from penstock.daemons.scheduler.machine.events import Event, Joined, NoteEnd, abridged, is_routine
from penstock.daemons.scheduler.machine.machine import SchedulerMachine
from penstock.daemons.scheduler.machine.membership import Membership
from penstock.daemons.scheduler.machine.mirror import JournalMirror
from penstock.daemons.scheduler.machine.rules import Rules, member_specs, saved_bytes
from penstock.daemons.scheduler.machine.status import status_reply
from penstock.daemons.scheduler.metrics import SchedulerMetrics
from penstock.daemons.scheduler.metrics_file import MetricsFile
from penstock.daemons.scheduler.saved import SavedStates, saved_at_s
from penstock.daemons.scheduler.service import SchedulerServer
from penstock.daemons.scheduler.trace import DecisionTrace
from penstock.host import world
from penstock.host.errors import ConfigError, ExitCode, PenstockError, StateError
from penstock.host.logs import Complaints
from penstock.host.stopping import Demand, Grace, StopRequests
from penstock.protocol.generated import scheduler_pb2 as pb
from penstock.protocol.run.checksums import checksums_digest
from penstock.protocol.run.data_size import TrainingData
from penstock.protocol.run.metrics_socket import serve_metrics
from penstock.protocol.run.names import (
    SCHEDULERD,
    expected_members,
    memoryd_name,
    optimizerd_name,
    ownership,
    place_of_member,
)
from penstock.protocol.run.process import configure_logging, die_with_parent, monotonic_s, run_main
from penstock.protocol.run.run_result import RunEnd, forget_end
from penstock.protocol.run.rundir import RunDirectory
from penstock.protocol.run.trace import TraceLog
from penstock.protocol.security.admission import scheduler_admission
from penstock.protocol.wire.addresses import HomeAddress
from penstock.shm.layout import Ownership

TICK_S = 0.05
STATUS_INTERVAL_S = 1.0
PORT_RETRY_S = 1.0
"""Seconds between two tries to listen on a port that another process has."""
SPARE_FILES = 256
"""Descriptors for files, libraries and control clients, in addition to members' connections."""
_M_ARENA_MAX = -8
"""Parameter of mallopt(3) in malloc.h."""

_log = logging.getLogger("penstock.scheduler")


def main(
    run_dir: Path, port: int, parent_pid: int | None, grace_seconds: float | None = None
) -> int:
    """Runs the scheduler of the prepared run in ``run_dir`` on ``port``; returns the exit code.

    ``grace_seconds`` replaces ``cluster.stop_grace_s``.
    """
    if parent_pid is not None:
        die_with_parent(parent_pid)
    run, codes = RunDirectory(run_dir.absolute()), list[int]()
    code = run_main(lambda: codes.append(_run(run, port, parent_pid, grace_seconds)), run.path)
    return code or codes[0]


def _run(run: RunDirectory, port: int, parent_pid: int | None, grace_seconds: float | None) -> int:
    config = run.config
    configure_logging(SCHEDULERD, run.path, config.observability.log_level)
    events = EventQueue()
    _hear_stops(
        events, Grace.of(grace_seconds or config.cluster.stop_grace_s, os.environ), parent_pid
    )
    rules = read_rules(run)
    make_room_for_streams(len(rules.members))
    keep_one_heap()
    with ExitStack() as stack:
        admission = scheduler_admission(config, run.path, _log.warning)
        homes = {m: place_of_member(config, m)[0] for m in expected_members(config)}
        serve = partial(
            SchedulerServer, events, config.cluster.nodes[0].host, port, homes, admission
        )
        service: SchedulerServer | None
        if parent_pid is None:
            service = serve()
        else:
            note = WaitNote(run.path, SCHEDULERD)
            service = _await_port(partial(serve, is_held=True), events, note)
        if service is None:
            return _stopped_early(run.path, port)
        stack.callback(service.close)
        service.start()
        _log.info("listening", extra={"port": service.port})
        try:
            data = TrainingData.of(run.path, config)
            rules = replace(rules, data_samples=None if data is None else data.samples)
            loop = _open(run, rules, service, events, stack, alone=parent_pid is None)
        except JournalInUseError:
            raise  # the members belong to the other scheduler
        except PenstockError as error:
            _turn_away(run.path, rules, service, events, error)
            raise
        except Exception as error:
            # A restart would fail in the same way: only these files have been read so far.
            _log.exception("cannot open the run's files")
            complaint = StateError(f"{run.path}: cannot open the run's files: {error!r}")
            _turn_away(run.path, rules, service, events, complaint)
            raise complaint from error
        return loop.run(HomeAddress(config.cluster.nodes[0].host))


def _await_port(
    serve: Callable[[], SchedulerServer], events: EventQueue, note: WaitNote
) -> SchedulerServer | None:
    """Returns the server as soon as it can listen; None after a stop. The node found the port free,
    so a process that has taken it since delays the run, and does not end it. Members wait as for a
    scheduler that starts, and ``note`` shows the reason.
    """
    complaints = Complaints(_log)
    try:
        while True:
            try:
                return serve()
            except ConfigError as error:
                complaints.say(f"waiting: {error}")
                note.renew(f"waiting: {error}")
            try:
                events.get(timeout=PORT_RETRY_S)  # no member can connect: it is a stop
            except queue.Empty:
                continue
            return None
    finally:
        note.clear()


def _stopped_early(run_dir: Path, port: int) -> int:
    """Writes the result of a run that ends before its scheduler could listen; returns the exit
    code.
    """
    reason = (
        f"stopped by a signal while the scheduler waited for port {port}; steps that are not saved"
        " stay in memory for the next start"
    )
    _log.warning("%s", reason)
    end = NoteEnd(reason=reason, code=ExitCode.INTERRUPTED, keep_memory=True, failed=False)
    write_run_result(run_dir, end)
    return ExitCode.INTERRUPTED


def keep_one_heap() -> None:
    """Makes all threads of this process allocate from one heap, if the allocator is glibc's.

    Otherwise each of gRPC's threads keeps a heap that never shrinks. Twenty floods of headers, one
    after the other, enlarged a server by 64 MiB, and by 37 MiB with one heap.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)


def make_room_for_streams(num_members: int) -> None:
    """Raises the limit of open files to two connections for each member, since lost members may
    return before their old connections end. A hundred nodes exceed the usual limit of 1,024.
    """
    needed = 2 * num_members + SPARE_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= needed:
        return
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(needed, hard), hard))
    if hard < needed:
        _log.warning(
            "%d members may need %d open files, and the limit is %d: raise it (ulimit -Hn,"
            " LimitNOFILE= of systemd)",
            num_members,
            needed,
            hard,
        )


def read_rules(run: RunDirectory) -> Rules:
    """Reads the constants of a run from its prepared directory.

    Raises:
        ConfigError: the model has no trainable parameter.
    """
    blocks = tuple(b.index for b in run.table.blocks if b.trainable_elements)
    if not blocks:
        train = run.config.train
        key, patterns = ("only", train.only) if train.only else ("freeze", train.freeze)
        raise ConfigError(f"train.{key} = {list(patterns)} leaves no trainable parameter")
    nodes = run.config.cluster.nodes
    owners = ownership(run.config, run.table, run.plan)
    return Rules(
        run_id=run.run_id,
        config=run.config,
        members=member_specs(run.config),
        blocks=blocks,
        owners=tuple(optimizerd_name(nodes[node].name) for node in owners.owner),
        plan_digest=run.plan_digest,
        plan_scheme=run.plan.scheme,
        state_dir=str(run.state_dir.absolute()),
        state_bytes=saved_bytes(run.table),
        numerics=run.numerics,
        since_1970_s=world.wall() - monotonic_s(),
        contributors=_contributors(owners, [memoryd_name(node.name) for node in nodes]),
    )


def _contributors(owners: Ownership, memoryds: Sequence[str]) -> dict[str, frozenset[str]]:
    """Returns the other memoryds with gradients of a memoryd's blocks, by memoryd."""
    sources: dict[str, set[str]] = {}
    for owner, computed_on in zip(owners.owner, owners.computed_on, strict=True):
        elsewhere = {memoryds[node] for node in computed_on if node != owner}
        sources.setdefault(memoryds[owner], set()).update(elsewhere)
    return {memoryd: frozenset(others) for memoryd, others in sources.items() if others}


def _hear_stops(events: EventQueue, grace: Grace, parent_pid: int | None) -> None:
    """Turns stop signals into events, with the seconds that are left then."""

    def heard(demand: Demand) -> None:
        within_s = grace.left_s(world.wall())
        events.put(StopAsked(again=demand is Demand.NOW, within_s=within_s))

    StopRequests(heard, parent_pid).install()


def _open(
    run: RunDirectory,
    rules: Rules,
    service: SchedulerServer,
    events: EventQueue,
    stack: ExitStack,
    *,
    alone: bool,
) -> SchedulerLoop:
    """Opens and checks the run's files; ``stack`` closes them. ``alone``: this process was started
    without a node.

    Raises:
        JournalInUseError: another scheduler of the run is alive.
        StateError: journal or saved state are damaged or of another run; no file was changed.
    """
    saved_states = _saved_states(run)
    newest = saved_states.newest()
    journal = Journal(run.path / "journal.sqlite", run.run_id)
    stack.callback(journal.close)
    if alone:  # otherwise the node has done so
        forget_end(run.path)
    facts = journal.load()
    metrics = SchedulerMetrics(rules.config, rules.data_samples)
    trained = journal.newest_line("train")
    metrics.recall(trained, facts.scores, saved_at_s(newest), facts.position)
    stack.callback(serve_metrics(metrics.registry, run, SCHEDULERD).close)
    metrics_file = MetricsFile(run.path / "metrics.jsonl", journal)
    stack.callback(metrics_file.close)
    metrics_file.reconcile()
    saved_states.remove_temporary()
    disk_thread = DiskThread(events.put)
    stack.callback(disk_thread.close)
    effects = SchedulerEffects(
        run_dir=run.path,
        service=service,
        journal=journal,
        saved=saved_states,
        disk_thread=disk_thread,
        metrics_file=metrics_file,
        metrics=metrics,
        myself=pb.MemberStatus(member=SCHEDULERD, state="ready", pid=world.pid()),
        inputs=checksums_digest(run.path) or "",
        times=EffectTimes(metrics),
        trace=DecisionTrace(
            TraceLog.of_run(run.path, SCHEDULERD, run.config.observability.traced_every)
        ),
    )
    mirror = JournalMirror(rules, facts, newest, _draw_incarnation)
    machine = SchedulerMachine(
        rules, mirror, Membership(rules, facts.pids), monotonic_s(), RunEnd.read(run.path)
    )
    return SchedulerLoop(machine, effects, events, metrics)


def _saved_states(run: RunDirectory) -> SavedStates:
    """Returns the saved states of a run, as its configuration has them kept."""
    return SavedStates(
        run.state_dir,
        run_id=run.run_id,
        table_digest=run.table.digest,
        num_blocks=len(run.table.blocks),
        keep=run.config.train.keep_snapshots,
        keep_every=run.config.train.keep_every,
        numerics=run.numerics_digest,
    )


def _turn_away(
    run_dir: Path, rules: Rules, service: SchedulerServer, events: EventQueue, error: PenstockError
) -> None:
    """Sends Shutdown to members as they join, for a while: the run cannot start."""
    _log.error("cannot start: %s", error)
    end = NoteEnd(reason=str(error), code=error.exit_code, keep_memory=True, failed=True)
    write_run_result(run_dir, end)
    ending = pb.Shutdown(keep_memory=True, reason=str(error), exit_code=int(error.exit_code))
    shutdown = pb.SchedulerMessage(shutdown=ending)
    awaited = {member.name for member in rules.members}
    deadline_s = monotonic_s() + rules.deadlines.shutdown_s
    while awaited and (left_s := deadline_s - monotonic_s()) > 0:
        try:
            event = events.get(timeout=left_s)
        except queue.Empty:
            break
        if isinstance(event, Joined) and event.hello.member in awaited:
            service.accept(event.stream, event.hello.member)
            service.send(event.hello.member, shutdown)
            awaited.discard(event.hello.member)


class SchedulerLoop:
    """Feeds the machine: events as they come, ticks in between."""

    def __init__(
        self,
        machine: SchedulerMachine,
        effects: SchedulerEffects,
        events: EventQueue,
        metrics: SchedulerMetrics,
    ) -> None:
        self._machine = machine
        self._effects = effects
        self._loop = Loop(
            machine, effects, story=FlightRecorder(routine=is_routine, abridged=abridged)
        )
        self._events = events
        self._metrics = metrics

    def run(self, home: HomeAddress) -> int:
        """Runs until the machine ends; returns the exit code.

        If the host's address has changed, the code is that of an interruption. The node then starts
        the scheduler again, since gRPC cannot listen on another address.
        """
        tick_due_s = status_due_s = monotonic_s()
        while self._loop.exit is None:
            event = self._next(tick_due_s - monotonic_s())
            if event is not None:
                self._loop.feed(event)
            now_s = monotonic_s()
            if now_s >= tick_due_s:
                tick_due_s = now_s + TICK_S
                self._loop.feed(Tick())
            if now_s >= status_due_s:
                status_due_s = now_s + STATUS_INTERVAL_S
                self._metrics.update(self._machine, status_reply(self._machine, now_s), now_s)
                if home.moved():
                    return ExitCode.INTERRUPTED
        ended = self._loop.exit
        now_s = monotonic_s()
        self._metrics.update(self._machine, status_reply(self._machine, now_s), now_s)
        self._effects.bid_farewell(status_reply(self._machine, now_s))
        if ended.reason:
            _log.error("stopping: %s", ended.reason)
            sys.stderr.write(f"penstock: {ended.reason}\n")
        return ended.code

    def _next(self, timeout_s: float) -> Event | None:
        try:
            return self._events.get(timeout=max(0.0, timeout_s))
        except queue.Empty:
            return None


def _draw_incarnation() -> int:
    return world.random_bits(63) or 1
