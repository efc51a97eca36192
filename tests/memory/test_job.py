"""What memoryd's heartbeats say of the job under way."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from penstock.daemons.memory.effects import JobThread
from penstock.daemons.memory.machine.events import Event, JobCancelled, Restored


def test_a_jobs_progress_is_how_often_it_asked_whether_it_goes_on() -> None:
    jobs, told = JobThread(), threading.Semaphore(0)
    assert jobs.doing().waiting and not jobs.doing().activity

    def job(cancelled: Callable[[], bool]) -> Event:
        while not cancelled():
            assert told.acquire(timeout=600.0)
        return Restored()

    jobs.start("restore", job)
    for count in range(1, 4):
        deadline_s = time.monotonic() + 600.0
        while jobs.doing().progress < count:
            assert time.monotonic() < deadline_s
            time.sleep(0.001)
        found = jobs.doing()
        assert (found.activity, found.waiting, found.progress) == ("restore", False, count)
        told.release()
    jobs.cancel()
    told.release()
    jobs.join()
    assert jobs.answer() == Restored()
    assert jobs.doing().waiting


def test_who_waits_for_others_makes_no_progress() -> None:
    """Else nobody notices an optimizerd that hangs as it settles while a save waits for it."""
    jobs, seen = JobThread(), []

    def job(cancelled: Callable[[], bool]) -> JobCancelled:
        for _ in range(5):
            cancelled()
            seen.append(jobs.doing().progress)
            jobs.wait()
        cancelled()
        cancelled()
        return JobCancelled()

    jobs.start("save", job)
    jobs.join()
    assert seen == [1, 1, 1, 1, 1]
    assert jobs.doing().progress == 2
