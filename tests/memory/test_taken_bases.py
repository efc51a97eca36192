"""Bases with names that another user has taken, with damage, and of models that change."""

from __future__ import annotations

import json
import logging
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from penstock.config.schema import load_config
from penstock.daemons.memory.bases import sharing
from penstock.daemons.memory.restore import Filling, restore
from penstock.daemons.memory.segments import acquire, reclaim
from penstock.host import world
from penstock.host.errors import StateError
from penstock.host.files import write_atomically
from penstock.protocol.run.rundir import RunDirectory
from penstock.shm.base_users import base_uses, sweep
from penstock.shm.bases import FILLING, Base, base_name
from penstock.shm.memory import NodeMemory
from penstock.shm.segment import list_segments, path_of
from tests.memory.test_shared_bases import CORES, User, leave, load_initial, make_user, never

__all__ = ["make_user"]

MakeUser = Callable[[], User]
NOBODY = 65534
KINDS: dict[str, Callable[[Path], Any]] = {
    "file": lambda path: path.write_bytes(b"x"),
    "folder": lambda path: path.mkdir(),
    "link": lambda path: path.symlink_to("/dev/null"),
    "fifo": lambda path: os.mkfifo(path, 0o666),
}


def take(name: str, kind: str = "file") -> None:
    """Lets another user create a name in /dev/shm."""
    child = os.fork()
    if not child:
        code = 1
        try:
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            KINDS[kind](path_of(name))
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0


@pytest.fixture
def _as_root() -> None:
    if os.getuid() != 0:
        pytest.skip("only root can act as another user")


@pytest.fixture
def remove() -> Iterator[Callable[[str], None]]:
    """Removes names that a test has given to strangers, at its end."""
    taken: list[str] = []
    yield taken.append
    for name in taken:
        path = path_of(name)
        if path.is_dir():
            path.rmdir()
        else:
            path.unlink(missing_ok=True)


def own_names() -> set[str]:
    return set(list_segments(f"/penstock-base-{os.geteuid()}-"))


@pytest.mark.usefixtures("_as_root")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ending", ["", FILLING])
def test_a_name_that_another_user_has_stops_no_run(
    make_user: MakeUser,
    remove: Callable[[str], None],
    caplog: pytest.LogCaptureFixture,
    kind: str,
    ending: str,
) -> None:
    """The block alone has memory of its own, and the run leaves nothing of it."""
    before, first, second = own_names(), make_user(), make_user()
    (block, digest), *shared = first.spec.bases
    remove(base_name(digest) + ending)
    take(base_name(digest) + ending, kind)
    status = os.lstat(path_of(base_name(digest) + ending))
    with caplog.at_level(logging.WARNING):
        memories = [first.start(), second.start()]
    for user, memory in zip((first, second), memories, strict=True):
        user.check(memory)
        assert memory.control.bases == memory.spec.bases
        assert memory.spec.bases[1:] == tuple(shared) and memory.spec.bases[0] != (block, digest)
    assert memories[0].spec.bases[0] != memories[1].spec.bases[0]
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2
    for line in lines:
        assert str(path_of(base_name(digest) + ending)) in line
        assert line.endswith(
            "; the run takes memory of its own for the frozen weights of block0, which other runs"
            " do not share (memory.share_base)"
        )
    memories[0].close()
    again = acquire(first.spec)
    first.check(again)
    leave(again)
    leave(memories[1])
    assert os.path.samestat(status, os.lstat(path_of(base_name(digest) + ending)))
    assert own_names() - before <= {base_name(digest) + ending}


@pytest.mark.usefixtures("_as_root")
def test_a_name_that_is_taken_during_the_filling_stops_no_run(
    make_user: MakeUser, remove: Callable[[str], None], caplog: pytest.LogCaptureFixture
) -> None:
    before, user = own_names(), make_user()
    memory, digest = acquire(user.spec), user.spec.bases[1][1]
    remove(base_name(digest))

    def load(cancelled: Callable[[], bool]) -> None:
        load_initial(memory)
        take(base_name(digest))

    filling = Filling(incarnation=1, version=0, source=None)
    with caplog.at_level(logging.WARNING):
        restore(memory, filling, load, never, CORES, user.sharing)
    user.check(memory)
    assert memory.spec.bases[1] != user.spec.bases[1]
    assert memory.spec.bases[::2] == user.spec.bases[::2]
    (line,) = [record.getMessage() for record in caplog.records]
    assert "has mode" in line or "belongs to user nobody (uid 65534)" in line
    leave(memory)
    assert own_names() - before <= {base_name(digest)}


@pytest.mark.usefixtures("_as_root")
def test_a_stalled_filler_whose_other_name_is_taken_stops_no_run(
    make_user: MakeUser, remove: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharing, "STALLED_S", 0.0)
    user = make_user()
    places = user.run.memory_spec(0).frozen_places()
    block, digest = user.spec.bases[0]
    stalled = Base.claim(digest, places[block].num_bytes, "other-a")
    assert stalled is not None
    remove(base_name(digest) + ".stalled")
    take(base_name(digest) + ".stalled")
    memory = user.start()
    user.check(memory)
    leave(memory)
    stalled.close()


def flip(path: Path) -> None:
    path.chmod(0o600)
    with path.open("r+b") as file:
        file.seek(1)
        first = file.read(1)
        file.seek(1)
        file.write(bytes([first[0] ^ 1]))
    path.chmod(0o400)


def shorten(path: Path) -> None:
    path.chmod(0o600)
    os.truncate(path, path.stat().st_size - 4096)
    path.chmod(0o400)


HARMS: dict[str, Callable[[Path], Any]] = {
    "byte": flip,
    "size": shorten,
    "writable": lambda path: path.chmod(0o600),
    "readable": lambda path: path.chmod(0o444),
    "names": lambda path: os.link(path, path.with_name("penstock-other-name")),
    "link": lambda path: (path.unlink(), path.symlink_to("/dev/null")),
}


@pytest.fixture
def _without_other_name() -> Iterator[None]:
    yield
    Path("/dev/shm/penstock-other-name").unlink(missing_ok=True)


@pytest.mark.usefixtures("_without_other_name")
@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("is_used", [False, True])
def test_a_damaged_base_is_made_again_unless_a_run_uses_it(
    make_user: MakeUser, caplog: pytest.LogCaptureFixture, harm: str, is_used: bool
) -> None:
    first, second = make_user(), make_user()
    memory = first.start()
    block, digest = first.spec.bases[0]
    path = path_of(base_name(digest))
    if not is_used:  # a run that was killed, and lost its other memory
        memory.close()
        for name in list_segments(f"/penstock-{first.run.run_id}"):
            path_of(name).unlink()
    HARMS[harm](path)
    with caplog.at_level(logging.WARNING):
        other = second.start()
    second.check(other)
    (line,) = [record.getMessage() for record in caplog.records]
    assert str(path) in line
    if is_used and harm != "link":
        assert "; the run takes memory of its own for the frozen weights of block0" in line
        assert other.spec.bases[0][1] != digest and path.exists()
    else:
        assert line.endswith("; it is removed, and the frozen weights are read again")
        assert other.spec.bases[0] == (block, digest)
        assert stat.S_IMODE(path.stat().st_mode) == 0o400
    leave(other)
    if is_used:
        leave(memory)
    if path.is_symlink():
        path.unlink()


@pytest.mark.usefixtures("_without_other_name")
@pytest.mark.parametrize("harm", [name for name in HARMS if name != "link"])
def test_a_damaged_base_without_users_is_swept(make_user: MakeUser, harm: str) -> None:
    """So `penstock doctor --clean` removes it."""
    user = make_user()
    memory = user.start()
    digest = user.spec.bases[0][1]
    memory.close()
    HARMS[harm](path_of(base_name(digest)))
    (use,) = [use for use in base_uses() if use.digest == digest.hex()]
    assert use.in_use and base_name(digest) not in sweep()
    for name in list_segments(f"/penstock-{user.run.run_id}"):
        path_of(name).unlink()
    (use,) = [use for use in base_uses() if use.digest == digest.hex()]
    assert not use.in_use and base_name(digest) in sweep()


class Later(world.World):
    """A world in which every file is two minutes old."""

    def wall(self) -> float:
        """Returns a time in the future."""
        return super().wall() + 120.0


@pytest.fixture(params=["new", "settled"])
def _age(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.param == "settled":
        world.enter(Later())
    yield
    world.enter(world.REAL)


def with_folder(user: User, folder: Path) -> User:
    """Gives a run a model folder with one file of weights."""
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights of the model")
    path = user.run.path / "resolved.yaml"
    config = load_config(path)
    model = config.model.model_copy(update={"path": folder, "hf": None})
    write_atomically(path, config.model_copy(update={"model": model}).to_yaml())
    meta = {"weight_files": ["model.safetensors"]}
    (user.run.path / "model" / "meta.json").write_text(json.dumps(meta))
    return replace(user, run=RunDirectory(user.run.path))


def rewrite(path: Path) -> None:
    """Changes a file in place; its size stays, and its times are set back."""
    before = path.stat()
    while path.stat().st_ctime_ns == before.st_ctime_ns:
        path.write_bytes(path.read_bytes().upper())
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def exchange(path: Path) -> None:
    """Puts another file of the same size and times in the place of a file."""
    before, other = path.stat(), path.with_name("other")
    other.write_bytes(path.read_bytes().upper())
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.rename(path)


@pytest.mark.usefixtures("_age")
@pytest.mark.parametrize("change", [rewrite, exchange, lambda path: path.write_bytes(b"w")])
def test_a_model_that_changes_while_it_is_read_becomes_no_base(
    make_user: MakeUser, tmp_path: Path, change: Callable[[Path], None]
) -> None:
    before, user = own_names(), with_folder(make_user(), tmp_path / "model")
    memory, spec = acquire(user.spec), user.spec

    def load(memory: NodeMemory, cancelled: Callable[[], bool]) -> None:
        load_initial(memory)
        change(tmp_path / "model/model.safetensors")

    filling = Filling(incarnation=1, version=0, source=None)
    with pytest.raises(StateError, match="files with weights changed while they were read"):
        restore(memory, filling, partial(load, memory), never, CORES, user.sharing)
    assert memory.control.incarnation == 0 and own_names() == before
    restore(memory, filling, partial(load_initial, memory), never, CORES, user.sharing)
    assert memory.spec.bases != spec.bases, "another model has another base"
    user.check(memory)
    leave(memory)
    reclaim(user.spec)


@pytest.mark.usefixtures("_age")
def test_a_model_has_one_base_however_long_it_is_read(make_user: MakeUser, tmp_path: Path) -> None:
    """A minute passes while the files are read: they count by content before, and by times then."""
    user = with_folder(make_user(), tmp_path / "model")
    memory = acquire(user.spec)

    def load(cancelled: Callable[[], bool]) -> None:
        load_initial(memory)
        world.enter(Later())

    restore(
        memory, Filling(incarnation=1, version=0, source=None), load, never, CORES, user.sharing
    )
    user.check(memory)
    leave(memory)
