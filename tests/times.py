"""Times of the gate: a plugin of pytest that notes them, and a table of where they go.

``python -m pytest -p tests.times --times FILE`` appends a line of JSON for each test: its file,
wall time and CPU time, in seconds. CPU time is that of the process and of its ended children, so
that other work of the machine changes it little. ``python -m tests.times FILE`` prints a table.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

MOST_FILES = 40
"""Files that the table names; the others are added up."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the option that names the file."""
    parser.addoption("--times", metavar="FILE", help="append the times of each test to FILE")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Notes the times of a test with its fixtures."""
    path = item.config.getoption("--times")
    wall_s, cpu_s = time.monotonic(), _cpu_s()
    yield
    if path is not None:
        row = [item.nodeid, time.monotonic() - wall_s, _cpu_s() - cpu_s]
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def _cpu_s() -> float:
    """Returns the CPU seconds of this process and of its children that have ended."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def table(lines: list[str]) -> str:
    """Returns a Markdown table of files: tests, CPU and wall seconds, the largest first."""
    files: dict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
    for line in lines:
        name, wall_s, cpu_s = json.loads(line)
        row = files[name.partition("::")[0]]
        row[0], row[1], row[2] = row[0] + 1, row[1] + wall_s, row[2] + cpu_s
    total = [sum(column) for column in zip(*files.values(), strict=True)]
    ordered = sorted(files.items(), key=lambda item: -item[1][2])
    others = [
        sum(column) for column in zip([0, 0, 0], *(r for _, r in ordered[MOST_FILES:]), strict=True)
    ]
    rows = [*ordered[:MOST_FILES], ("other files", others), ("all", total)]
    head = ["| file | tests | CPU s | share | wall s |", "| --- | --- | --- | --- | --- |"]
    return "\n".join(
        head
        + [
            f"| {name} | {tests:.0f} | {cpu_s:.0f} | {cpu_s / total[2]:.1%} | {wall_s:.0f} |"
            for name, (tests, wall_s, cpu_s) in rows
        ]
    )


if __name__ == "__main__":
    print(table(Path(sys.argv[1]).read_text(encoding="utf-8").splitlines()))
