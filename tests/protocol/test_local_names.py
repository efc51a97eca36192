"""Names of local sockets: one living process each, in a folder that no other user can take."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import zmq

from penstock.host.errors import ConfigError, LostMemberError, StateError
from penstock.protocol.run.names import ipc_address, socket_folder
from penstock.protocol.wire import local_names
from penstock.protocol.wire.local_names import (
    LocalName,
    left_folders,
    prepare_folder,
    remove_folder,
)
from penstock.protocol.wire.sockets import OPEN


@pytest.fixture
def run_id() -> Iterator[str]:
    found = secrets.token_hex(6)
    yield found
    remove_folder(found, "a")
    assert not socket_folder(found, "a").exists()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_names, "PATIENCE_S", 0.0)
    monkeypatch.setattr(local_names, "FOREIGN_PATIENCE_S", 0.0)


def listen(address: str) -> socket.socket:
    found = socket.socket(socket.AF_UNIX)
    found.bind(address.removeprefix("ipc://"))
    found.listen()
    return found


@pytest.mark.usefixtures("impatient")
def test_a_name_belongs_to_one_living_process(run_id: str) -> None:
    address = ipc_address(run_id, "a", "memory")
    first = LocalName.take(address, "memoryd")
    with closing(listen(address)):
        with pytest.raises(StateError, match="another memoryd of this run is alive"):
            LocalName.take(address, "memoryd")
    first.release()
    assert not socket_folder(run_id, "a").exists(), "nothing is left of the last name"
    LocalName.take(address, "memoryd").release()


def test_the_name_of_a_killed_process_is_taken_again(run_id: str) -> None:
    """Its socket and its lock are still in the folder."""
    address = ipc_address(run_id, "a", "memory")
    pid = os.fork()
    if pid == 0:
        LocalName.take(address, "memoryd")
        listen(address)
        os._exit(9)
    os.waitpid(pid, 0)
    assert {path.name for path in socket_folder(run_id, "a").iterdir()} == {"memory", "memory.lock"}
    name = LocalName.take(address, "memoryd")
    with closing(listen(address)):
        pass
    name.release()


def test_the_folder_is_the_users_alone(run_id: str) -> None:
    name = prepare_folder(run_id, "a")
    status = socket_folder(run_id, "a").stat()
    assert (status.st_mode & 0o777, status.st_uid) == (0o700, os.geteuid())
    name.release()


def test_folders_of_dead_nodes_are_told_from_those_of_living_ones(run_id: str) -> None:
    folder = socket_folder(run_id, "a")
    (pid := os.fork()) or (prepare_folder(run_id, "a"), os._exit(9))
    os.waitpid(pid, 0)
    assert folder in left_folders()
    name = prepare_folder(run_id, "a")
    assert folder not in left_folders()
    name.release()
    assert folder not in left_folders() and not folder.exists()


def open_to_all(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o777)


def linked(folder: Path) -> None:
    folder.symlink_to("/tmp")


def in_the_way(folder: Path) -> None:
    folder.write_text("")


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("taken", [open_to_all, linked, in_the_way])
def test_a_folder_that_others_could_write_to_is_refused(run_id: str, taken: object) -> None:
    """At the start of a node, exit code 2; while the run goes on a daemon waits."""
    folder = socket_folder(run_id, "a")
    taken(folder)  # type: ignore[operator]
    try:
        with pytest.raises(ConfigError, match=rf"{folder}: is a .* of user {os.geteuid()}"):
            prepare_folder(run_id, "a")
        with pytest.raises(LostMemberError, match=rf"{folder}: is a "):
            LocalName.take(ipc_address(run_id, "a", "memory"), "memoryd")
    finally:
        folder.rmdir() if folder.is_dir() and not folder.is_symlink() else folder.unlink()


def test_a_daemon_waits_until_the_folder_is_free(
    run_id: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = socket_folder(run_id, "a")
    folder.write_text("")
    monkeypatch.setattr(local_names.world, "sleep", lambda seconds: folder.unlink(missing_ok=True))
    LocalName.take(ipc_address(run_id, "a", "memory"), "memoryd").release()
    assert f"{folder}: is a file of user {os.geteuid()}" in caplog.text and "waiting" in caplog.text


def test_a_socket_of_another_user_is_not_connected_to(
    run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = ipc_address(run_id, "a", "memory")
    name = LocalName.take(address, "memoryd")
    monkeypatch.setattr("penstock.protocol.security.token.peer_process", lambda _: (5, 12345))
    with closing(listen(address)), zmq.Context() as context, context.socket(zmq.DEALER) as client:
        with pytest.raises(LostMemberError, match="process 5 of user 12345 listens there"):
            OPEN.connect(client, address)
    name.release()
