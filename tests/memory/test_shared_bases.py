"""Runs that share bases: room for a start, saved states that do not fit, lost nodes. Memoryds are
killed while they adopt a base or leave it.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from prometheus_client import CollectorRegistry

from penstock.daemons.fetch.serving import SERVED, Serving
from penstock.daemons.memory import effects, saving, segments
from penstock.daemons.memory.bases.sharing import Sharing
from penstock.daemons.memory.machine.events import ReplicaSource, Restored, StartRestore
from penstock.daemons.memory.metrics import MemoryMetrics
from penstock.daemons.memory.pinning import PinnedVersion
from penstock.daemons.memory.refill import Partner
from penstock.daemons.memory.restore import Filling, restore
from penstock.daemons.memory.segments import acquire, reclaim
from penstock.daemons.node.preparing.fitting.capacity import MachineMemory, memory_demands
from penstock.host.errors import CapacityError, StateError
from penstock.host.limits.cgroup import MemoryLimit
from penstock.planner.memory.table import MemoryKind, MemoryRow
from penstock.protocol.run.bases.base_identity import expected_bases, present_bytes
from penstock.protocol.run.rundir import RunDirectory
from penstock.protocol.wire.sockets import OPEN
from penstock.shm.base_users import missing_bytes, sweep
from penstock.shm.bases import base_name
from penstock.shm.control import CommitRecord
from penstock.shm.layout import SegmentKind
from penstock.shm.memory import MemorySpec, NodeMemory
from penstock.shm.segment import list_segments, path_of, unlink

CORES = [min(os.sched_getaffinity(0))]
BLOCKS = range(3)


def never() -> bool:
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class User:
    """A run that shares the bases of a test."""

    run: RunDirectory

    @property
    def spec(self) -> MemorySpec:
        spec = self.run.memory_spec(0)
        return replace(spec, bases=expected_bases(self.run, spec))

    @property
    def sharing(self) -> Sharing:
        return Sharing(run=self.run, node="a")

    def start(self) -> NodeMemory:
        """Does what memoryd does until the memory holds the initial model."""
        memory = acquire(self.spec)

        if not memory.control.incarnation:
            filling = Filling(incarnation=1, version=0, source=None)
            load = partial(load_initial, memory)
            restore(memory, filling, load, never, CORES, self.sharing)
        return memory

    def check(self, memory: NodeMemory) -> None:
        """Checks that the memory holds the model, with frozen weights in bases."""
        assert memory.control.incarnation == 1 and memory.spec.bases
        for block in BLOCKS:
            assert memory.has_complete_base(block)
            assert set(memory.frozen(block)[:3].tolist()) == {7 + block}
            assert set(memory.state(block, "master")[:5].tolist()) == {block}


def load_initial(memory: NodeMemory, cancelled: Callable[[], bool] = never) -> None:
    """Writes the initial model, as the loader does."""
    for block in BLOCKS:
        memory.state(block, "master")[:] = block
        if not memory.has_complete_base(block):
            memory.frozen(block)[:3] = 7 + block


def leave(memory: NodeMemory) -> None:
    memory.unlink()
    memory.close()


@pytest.fixture
def make_user(make_run: Any) -> Iterator[Callable[[], User]]:
    """Runs of one model that no other test has; their bases are removed."""
    model, users = secrets.token_hex(8), list[User]()

    def make() -> User:
        run: RunDirectory = make_run()
        (run.path / "model").mkdir()
        (run.path / "model" / "config.json").write_text(json.dumps({"model_type": model}))
        users.append(User(run=run))
        return users[-1]

    yield make
    for user in users:
        reclaim(user.spec)
    for _, digest in users[0].spec.bases:
        unlink(base_name(digest))


def names(*users: User) -> list[str]:
    """Names in /dev/shm of the users' memory and bases."""
    bases = {base_name(digest) for user in users for _, digest in user.spec.bases}
    listed = [name for user in users for name in list_segments(f"/penstock-{user.run.run_id}")]
    return [*listed, *(name for name in list_segments("/penstock-base-") if name[:93] in bases)]


def test_a_start_needs_the_room_of_bases_that_nobody_has(
    make_user: Callable[[], User], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = make_user(), make_user()
    arrays = sum(first.spec.sizes().values())
    base = missing_bytes(first.spec.base_sizes())
    assert base >= 3 * 4096

    def leave_free(count: int) -> None:
        limit = MemoryLimit(owner="/dev/shm", limit=1 << 30, available=count)
        monkeypatch.setattr(segments, "room", lambda: limit)

    leave_free(arrays + base - 1)
    with pytest.raises(CapacityError, match="/dev/shm has"):
        acquire(first.spec)
    assert names(first) == []
    leave_free(arrays + base)
    memory = first.start()
    leave_free(arrays - 1)
    with pytest.raises(CapacityError, match="/dev/shm has"):
        acquire(second.spec)
    leave_free(arrays)
    other = second.start()
    second.check(other)
    leave(memory)
    leave(other)
    assert names(first, second) == []


def test_the_check_before_a_start_counts_bases_that_other_runs_have(
    make_user: Callable[[], User],
) -> None:
    first, second = make_user(), make_user()
    config = second.run.config
    needed = sum(second.spec.sizes().values()) + missing_bytes(second.spec.base_sizes())
    rows = [MemoryRow(place="node a", resource=MemoryKind.SHM, use="all", num_bytes=needed)]

    def is_short() -> bool:
        """Returns whether a machine with room for the run's own arrays has too little."""
        held = present_bytes(second.run, config, "a")
        free = sum(second.spec.sizes().values())
        machine = MachineMemory(ram_available=1 << 40, shm_free=free, held=held, memlock=None)
        shm = memory_demands(config, rows, machine, [0])[0]
        assert shm.needed == needed
        return shm.short

    assert is_short()
    memory = first.start()
    assert not is_short()
    leave(memory)
    assert is_short()


def test_a_saved_state_with_other_frozen_weights_than_the_base_is_refused(
    make_user: Callable[[], User], make_run: Any, helpers: Any
) -> None:
    """No run loses anything: the base, the other run and all saved states are as before."""
    user, other = make_user(), make_user()
    memory, neighbour = user.start(), other.start()
    kept, changed = (user.run.state_dir / f"step-0000000{step}" for step in (7, 8))

    def save(saved: NodeMemory, state: Path, version: int) -> None:
        helpers.commit(saved, version)
        files = saving.save(PinnedVersion(saved, version), state, never)
        helpers.manifest(memory, state, version, files)

    save(memory, kept, 7)
    strange = NodeMemory.create(make_run().memory_spec(0))
    helpers.fill(strange)
    save(strange, changed, 8)
    strange.close()
    before = {path: path.read_bytes() for path in user.run.state_dir.rglob("*.safetensors")}
    bases = [path_of(base_name(digest)) for _, digest in memory.spec.bases]
    contents = [path.read_bytes() for path in bases]

    def load(state: Path, version: int) -> None:
        filling = Filling(incarnation=1, version=version, source=state)
        restore(memory, filling, lambda cancelled: None, never, CORES, user.sharing)

    with pytest.raises(StateError) as refused:
        load(changed, 8)
    assert "frozen weights of block0 in the saved state are not those of" in str(refused.value)
    assert "memory.share_base: never" in str(refused.value)
    assert memory.control.incarnation == 0, "the memory has no model"
    assert [path.read_bytes() for path in bases] == contents
    other.check(neighbour)
    load(kept, 7)
    user.check(memory)
    after = {path: path.read_bytes() for path in user.run.state_dir.rglob("*.safetensors")}
    assert after == before
    leave(memory)
    leave(neighbour)


@pytest.mark.parametrize("saved", [True, False], ids=["saved state", "model"])
def test_a_lost_node_is_filled_from_its_replica_and_has_its_base_again(
    make_user: Callable[[], User], helpers: Any, monkeypatch: pytest.MonkeyPatch, saved: bool
) -> None:
    """Its base is lost, too, and then adopted again by the next filling."""
    user = make_user()
    memory = user.start()
    frozen = [bytes(memory.raw((block, "frozen", 0, 0))) for block in BLOCKS]
    helpers.commit(memory, 7)
    if saved:
        state = user.run.state_dir / "step-00000007"
        files = saving.save(PinnedVersion(memory, 7), state, never)
        helpers.manifest(memory, state, 7, files)
    leave(memory)
    assert names(user) == []
    monkeypatch.setattr(effects, "refill", lambda *arguments: arguments[5](never))
    for _ in range(2):
        memory, stub = acquire(user.spec), Mock()
        jobs = effects.JobThread()
        memoryd = effects.MemoryEffects(
            memory=memory,
            link=stub,
            metrics=MemoryMetrics(CollectorRegistry()),
            load_initial=partial(load_initial, memory),
            cores=CORES,
            jobs=jobs,
            state_dir=user.run.state_dir,
            partner=Partner(node="b", run_id="", access=OPEN),
            sharing=user.sharing,
        )
        replica = ReplicaSource(address="", record=CommitRecord.of_restore(7, 1), generation=2)
        memoryd.carry_out([StartRestore(incarnation=1, source="", version=7, replica=replica)])
        jobs.join()
        assert jobs.answer() == Restored()
        assert all(memory.has_complete_base(block) for block in BLOCKS)
        assert [bytes(memory.raw((block, "frozen", 0, 0))) for block in BLOCKS] == frozen
        memory.close()
    reclaim(user.spec)
    assert names(user) == []


def test_a_fetchd_maps_the_memory_again_once_other_bases_are_named(
    make_user: Callable[[], User],
) -> None:
    user, agent = make_user(), Mock(metadata=b"")
    memory = user.start()
    mapped = NodeMemory.attach(replace(user.spec, bases=()), SERVED, writable=False)
    serving = Serving(agent, mapped, 3)
    places = dict((kind, size) for kind, _, size in serving.offer.segments)
    assert places["frozen"] == memory.spec.layout.sizes[SegmentKind.FROZEN]
    (regions,) = agent.register.call_args.args
    assert [size for _, size in regions[1:]] == list(places.values())
    assert serving.is_current
    memory.rename_bases(tuple((block, secrets.token_bytes(32)) for block in BLOCKS))
    assert not serving.is_current
    serving.close()
    memory.rename_bases(user.spec.bases)
    leave(memory)


def killed(at: int, prepare: Callable[[], Any], act: Callable[[Any], None]) -> bool:
    """Kills a process at its call number ``at`` (from 1) of the kernel in ``act``; False: it has
    fewer calls, and has ended.
    """
    child = os.fork()
    if child:
        status = os.waitpid(child, 0)[1]
        assert status in (0, signal.SIGKILL), status
        return bool(status)
    try:
        prepared, calls = prepare(), 0

        def watch(event: str, arguments: Any) -> None:
            nonlocal calls
            if event == "open" or event.startswith(("os.", "fcntl.", "mmap.", "ctypes.")):
                calls += 1
                if calls == at:
                    signal.raise_signal(signal.SIGKILL)

        sys.addaudithook(watch)
        act(prepared)
        os._exit(0)
    finally:
        os._exit(1)


EACH = pytest.param(1, marks=pytest.mark.slow)


@pytest.mark.parametrize("step", [11, EACH])
@pytest.mark.parametrize("first", [True, False], ids=["fills", "adopts"])
def test_a_memoryd_killed_at_any_call_of_its_start_disturbs_no_other(
    make_user: Callable[[], User], first: bool, step: int
) -> None:
    """The gate takes some of the calls."""
    user, other = make_user(), make_user()
    memory = None if first else other.start()
    at = 1
    while killed(at, lambda: None, lambda _: user.start().close()):
        if memory is not None:
            other.check(memory)
        successor = user.start()
        user.check(successor)
        leave(successor)
        assert names(user) == ([] if memory is None else names(other)[-3:])
        at += step
    assert at > 30
    reclaim(user.spec)  # of the last one, which was not killed
    if memory is not None:
        other.check(memory)
        leave(memory)
    assert names(user, other) == []


@pytest.mark.parametrize("step", [2, EACH])
@pytest.mark.parametrize("last", [True, False], ids=["last", "not last"])
def test_a_memoryd_killed_at_any_call_of_its_end_leaves_whole_memory_or_none(
    make_user: Callable[[], User], last: bool, step: int
) -> None:
    user, other = make_user(), make_user()
    memory = None if last else other.start()
    at = 1
    while killed(at, user.start, leave):
        if memory is not None:
            other.check(memory)
        sweep()
        successor = user.start()
        user.check(successor)
        leave(successor)
        assert names(user) == ([] if memory is None else names(other)[-3:])
        at += step
    assert at > 10
    if memory is not None:
        other.check(memory)
        leave(memory)
    assert names(user, other) == []
