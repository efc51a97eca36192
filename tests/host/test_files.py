"""Files on a full disk: whole or not at all, and an error that says what is missing."""

from __future__ import annotations

import json
import logging
import os
import re
import resource
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from penstock.host.errors import CapacityError, ConfigError, StateError
from penstock.host.files import (
    append_whole,
    make_directory,
    parse_json,
    preallocate,
    reserve,
    write_atomically,
)
from penstock.protocol.run.hardware.bandwidth_log import BandwidthLog
from penstock.protocol.run.metrics_socket import DroppedLines
from penstock.protocol.run.process import configure_logging


@contextmanager
def files_up_to(num_bytes: int) -> Iterator[None]:
    """No file of this process may grow beyond ``num_bytes``: for writers like a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


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


def test_a_torn_append_is_taken_back(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"one\n")
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
    try:
        with files_up_to(10), pytest.raises(OSError, match="File too large"):
            append_whole(descriptor, b"two, and too long\n")
        assert path.read_bytes() == b"one\n"
        append_whole(descriptor, b"three\n")
    finally:
        os.close(descriptor)
    assert path.read_bytes() == b"one\nthree\n"


def test_a_file_without_room_names_path_need_and_what_is_free(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text("old")
    with files_up_to(10), pytest.raises(CapacityError) as caught:
        write_atomically(path, "x" * 5000)
    assert f"{path}: no space left on its disk: at least 5,000 bytes" in str(caught.value)
    assert "are free" in str(caught.value)
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("plan.json", "old")]


def test_what_is_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "plan.json").mkdir()
    with pytest.raises(ConfigError, match=r"plan\.json: cannot write it: Is a directory"):
        write_atomically(tmp_path / "plan.json", "{}")
    (tmp_path / "logs").write_text("")
    for path in (tmp_path / "logs", tmp_path / "logs" / "more"):
        with pytest.raises(StateError, match="a file is where a directory is due"):
            make_directory(path)
    with pytest.raises(StateError, match=f"{path.parent}: a file is where a directory is due"):
        configure_logging("x", tmp_path, "info")


def test_reserved_room_takes_no_size(tmp_path: Path) -> None:
    with (tmp_path / "console").open("wb") as file:
        reserve(file.fileno(), 1 << 16)
        status = os.fstat(file.fileno())
        assert (status.st_size, status.st_blocks * 512) == (0, 1 << 16)


def test_files_that_are_mapped_have_all_their_room(tmp_path: Path) -> None:
    with files_up_to(1000), pytest.raises(CapacityError, match="no space left"):
        BandwidthLog(tmp_path / "emulated" / "traffic-a", 4)
    with (tmp_path / "board").open("wb") as file:
        preallocate(file.fileno(), 1 << 16)
        assert os.fstat(file.fileno()).st_blocks * 512 == 1 << 16


def test_json_that_is_nested_too_deeply_is_an_ordinary_error() -> None:
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_json("[" * 100_000)


def test_logs_that_cannot_be_written_are_dropped_and_counted(
    tmp_path: Path, root_logger: logging.Logger, capfd: pytest.CaptureFixture[str]
) -> None:
    configure_logging("memoryd.a", tmp_path, "info")
    log = logging.getLogger("x")
    log.info("before")
    path = tmp_path / "logs" / "memoryd.a.jsonl"
    with files_up_to(path.stat().st_size + 10):
        log.info("lost")
        log.info("lost, too")
    registry = CollectorRegistry()
    registry.register(DroppedLines())
    assert b"penstock_log_dropped_total 2.0" in generate_latest(registry)
    log.info("after")
    log.info("more")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    said = [line["message"] for line in lines]
    mention = "2 lines of this log were dropped (File too large)"
    assert said == ["before", mention, "after", "more"]
    assert (lines[1]["level"], lines[1]["dropped"]) == ("warning", 2)
    assert capfd.readouterr().err == ""


def test_a_log_that_cannot_even_be_opened_ends_nothing(
    tmp_path: Path, root_logger: logging.Logger
) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "x.jsonl").symlink_to("/dev/full")
    configure_logging("x", tmp_path, "info")
    logging.getLogger("x").error("lost")
    (tmp_path / "logs" / "y.jsonl").mkdir()
    with pytest.raises(StateError, match=r"y\.jsonl: a directory is where a log is due"):
        configure_logging("y", tmp_path, "info")


def test_a_pipe_that_nobody_reads_holds_no_process_up_and_later_says_what_is_missing() -> None:
    program = (
        "import os, sys\n"
        "from penstock.host.logs import forgive_streams\n"
        "forgive_streams()\n"
        "for number in range(200):\n"
        "    print('x' * 1000)\n"
        "    sys.stderr.write('y' * 1000 + chr(10))\n"
        "os.write(int(sys.argv[1]), b'alive')\n"
        "sys.stdin.read()\n"
        "print('read again')\n"
    )
    reading, writing = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(writing)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        pass_fds=[writing],
    )
    with process, open(reading, "rb") as alive:
        os.close(writing)
        assert process.stdin is not None and process.stdout is not None
        try:
            assert select.select([alive], [], [], 60)[0], "it waits for a reader"
            assert os.read(reading, 5) == b"alive"
            os.set_blocking(process.stdout.fileno(), False)
            before = process.stdout.read()
            os.set_blocking(process.stdout.fileno(), True)
            process.stdin.close()
            after = process.stdout.read()
        finally:
            process.kill()
    assert b"x" * 1000 in before and b"y" * 1000 in before and len(before) < 100_000
    assert re.fullmatch(rb"\n\(\d+ bytes could not be written here\)\nread again\n", after)


@pytest.mark.parametrize("sink", ["a full disk", "a pipe without reader"])
def test_streams_that_take_nothing_end_no_process(sink: str) -> None:
    program = (
        "import logging, os, sys, time\n"
        "from penstock.client.launch import leave\n"
        "from penstock.host.logs import forgive_streams\n"
        "forgive_streams()\n"
        "for number in range(3):\n"
        "    print('x' * 10_000, number)\n"
        "    sys.stderr.write(f'{number}: some words\\n')\n"
        "    sys.stderr.flush()\n"
        "logging.getLogger('x').error('no handler: to stderr')\n"
        "leave(7)\n"
    )
    if sink == "a full disk":
        with open("/dev/full", "w") as full:
            done = subprocess.run(
                [sys.executable, "-c", program], stdout=full, stderr=full, timeout=600
            )
    else:
        reading, writing = os.pipe()
        os.close(reading)
        done = subprocess.run(
            [sys.executable, "-c", program], stdout=writing, stderr=writing, timeout=600
        )
        os.close(writing)
    assert done.returncode == 7
