"""The page of metrics that a process of a run hands out."""

from __future__ import annotations

import time

from penstock.daemons.monitor.metrics.scrape import scrape
from penstock.protocol.run.metrics_socket import metrics_address


def page_of(run_id: str, member: str, within_s: float = 10.0) -> str:
    """The page, as soon as the process has one."""
    deadline = time.monotonic() + within_s
    while True:
        answer = scrape({member: metrics_address(run_id, member)}, 5.0)[member]
        if answer.page is not None:
            return answer.page.decode()
        assert time.monotonic() < deadline, f"{member} hands out no page: {answer}"
        time.sleep(0.05)
