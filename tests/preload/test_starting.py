"""What commands start with a preloader of their own, and what becomes of it."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.daemons.preload.client import Preloader
from penstock.daemons.preload.preloaders import VARIABLE, take_inherited
from penstock.daemons.preload.starting import Preloading, Spawning

DEADLINE_S = 600.0
STREAMS = (0, 1, 2)
NEWBORN = "tests.preload.newborn"


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is busy with other work may import for longer than a run would wait."""
    monkeypatch.setattr("penstock.daemons.preload.starting.WARM_UP_S", DEADLINE_S)


@pytest.fixture
def preloading() -> Iterator[Preloading]:
    with Preloading("plain", os.environ) as instance:
        yield instance


def test_a_tool_holds_what_it_is_to_hold_however_it_is_started(tmp_path: Path) -> None:
    with (tmp_path / "lock").open("w") as lock:
        child = Spawning().start(
            NEWBORN, (str(tmp_path / "view"), "3"), STREAMS, kept=(lock.fileno(),)
        )
        assert child.ended(DEADLINE_S) and child.reap() == 3
    assert str(tmp_path / "lock") in (tmp_path / "view").read_text()


def test_a_lost_preloader_holds_nobody_up_and_is_replaced(
    preloading: Preloading, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = preloading.process
    assert first is not None
    first.signal(signal.SIGKILL)
    assert first.ended(DEADLINE_S)
    child = preloading.start(NEWBORN, (str(tmp_path / "view"), "0"), STREAMS)
    assert child.ended(DEADLINE_S) and child.reap() == 0
    monkeypatch.setattr("penstock.daemons.preload.starting.RETRY_S", 0.0)
    preloading.look()
    preloading.look()
    assert preloading.process is not None
    assert preloading.process.pid != first.pid


def test_a_node_has_its_preloader_from_before(
    preloading: Preloading, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    process = preloading.process
    assert process is not None
    preloading.hand_over()
    [handle] = take_inherited(os.environ).values()
    assert VARIABLE not in os.environ
    preloader = Preloader.adopt(handle)
    assert preloader.process.pid == process.pid
    assert preloader.warm(DEADLINE_S)
    preloader.end()


def test_heirs_fork_for_whom_they_were_forked(preloading: Preloading, tmp_path: Path) -> None:
    owner = ("tests.preload.born_owner", (str(tmp_path),), STREAMS)
    child = preloading.start(*owner, inherits=("plain", "torch"))
    assert child.ended(80.0) and child.reap() == 0
    assert {path.name for path in tmp_path.iterdir()} == {"plain", "torch"}
    assert [has_torch(tmp_path / kind) for kind in ("plain", "torch")] == [False, True]


def test_who_needs_no_torch_is_forked_before_it_is_imported(tmp_path: Path) -> None:
    owner, newborn = (tmp_path / "inherits", tmp_path / "newborn")
    owner.mkdir()
    with Preloading("torch", os.environ) as preloading:
        early = preloading.start(NEWBORN, (str(newborn), "0"), STREAMS, needs="node")
        born_owner = ("tests.preload.born_owner", (str(owner),), STREAMS)
        with_heir = preloading.start(*born_owner, inherits=("torch",), needs="node")
        late = preloading.start(NEWBORN, (str(tmp_path / "late"), "0"), STREAMS)
        for child in (early, with_heir, late):
            assert child.ended(80.0) and child.reap() == 0
    paths = (newborn, owner / "torch", tmp_path / "late")
    assert [has_torch(path) for path in paths] == [False, True, True]
    # Of the hundreds that to import torch would bring about there were none, but some in children.
    assert max(json.loads(path.read_text())["collections"] for path in paths) < 150


def has_torch(view: Path) -> bool:
    return bool(json.loads(view.read_text())["has torch"])
