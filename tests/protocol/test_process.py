"""What processes do at birth: logs, the parent's death, stop signals, exit codes."""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.host.errors import CapacityError
from penstock.host.process_identity import start_ticks
from penstock.host.stopping import StopSignal
from penstock.protocol.run.process import configure_logging, run_main


@pytest.fixture
def root_logger() -> Iterator[logging.Logger]:
    """The root logger, put back as it was."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    root.handlers[:] = []
    yield root
    for handler in root.handlers:
        handler.close()
    root.handlers[:] = handlers
    root.setLevel(level)


def test_logs_are_json_lines(tmp_path: Path, root_logger: logging.Logger) -> None:
    configure_logging("memoryd.a", tmp_path, "info")
    begun_s = time.time()
    logging.getLogger("x").info("saved %d", 3, extra={"version": 7, "path": Path("p")})
    logging.getLogger("x").debug("not shown")
    try:
        raise ValueError("broken")
    except ValueError:
        logging.getLogger("x").exception("ended")
    lines = (tmp_path / "logs" / "memoryd.a.jsonl").read_text().splitlines()
    first, second = map(json.loads, lines)
    assert begun_s - 1e-3 <= first.pop("time") <= time.time() + 1e-3
    assert first == {
        "level": "info",
        "process": "memoryd.a",
        "logger": "x",
        "message": "saved 3",
        "version": 7,
        "path": "p",
    }
    assert second["level"] == "error"
    assert "ValueError: broken" in second["exception"]


def test_stop_signal_wakes_every_waiter(own_signals: None) -> None:
    stop = StopSignal().install(None)
    woken = [threading.Thread(target=stop.wait, args=(30.0,)) for _ in range(3)]
    for thread in woken:
        thread.start()
    assert not stop.wait(0.01)
    os.kill(os.getpid(), signal.SIGTERM)
    assert stop.wait(600.0)
    for thread in woken:
        thread.join(timeout=600.0)
        assert not thread.is_alive()
    assert stop.is_set


def test_stop_signal_never_deadlocks_with_its_handler(own_signals: None) -> None:
    """A handler that runs inside wait() must not wait for a lock that wait() holds."""
    signal.signal(signal.SIGALRM, lambda number, frame: stop.set())
    for _ in range(200):
        stop = StopSignal()
        signal.setitimer(signal.ITIMER_REAL, 0.0005)
        assert stop.wait(600.0)


def test_children_die_with_their_parent() -> None:
    child = (
        "import os, sys, time;"
        "from penstock.protocol.run.process import die_with_parent, parent_to_die_with;"
        "assert parent_to_die_with() is None; die_with_parent(int(sys.argv[1]));"
        "assert parent_to_die_with() == os.getppid();"
        "print('up', flush=True); time.sleep(60)"
    )
    parent = (
        "import os, subprocess, sys;"
        f"p = subprocess.Popen([sys.executable, '-c', {child!r}, str(os.getpid())]);"
        "print(p.pid, flush=True); p.wait()"
    )
    process = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdout is not None
        lines = sorted([process.stdout.readline().strip(), process.stdout.readline().strip()])
        assert lines[1] == "up"
        process.kill()
    deadline = time.monotonic() + 600.0
    while start_ticks(int(lines[0])) is not None:
        assert time.monotonic() < deadline, "the child outlived its parent by 5 s"
        time.sleep(0.01)


def test_a_child_whose_parent_is_gone_exits() -> None:
    code = "from penstock.protocol.run.process import die_with_parent; die_with_parent(1)"
    assert subprocess.run([sys.executable, "-c", code], timeout=600).returncode == 1


def test_errors_for_the_user_become_exit_codes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> int:
        raise CapacityError("too small")

    def crash() -> int:
        raise KeyError("bug")

    def fill() -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    assert run_main(lambda: None, tmp_path) == 0
    assert run_main(lambda: 130, tmp_path) == 130
    assert run_main(fail, tmp_path) == 3
    assert capsys.readouterr().err == "penstock: too small\n"
    assert run_main(fill, tmp_path) == 3
    assert f"penstock: {tmp_path}: no space left on its disk" in capsys.readouterr().err
    with pytest.raises(KeyError):
        run_main(crash, tmp_path)
