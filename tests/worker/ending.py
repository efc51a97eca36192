"""How waits and attempts end: helpers of tests that break them off."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import pytest

from tests.worker.cluster import Cluster


def ended_by(work: Callable[[], Any]) -> Exception:
    """What the work raises."""
    with pytest.raises(Exception) as caught:  # the caller looks at it
        work()
    return caught.value


@contextmanager
def aborting(cluster: Cluster, sender: Any, sends: int) -> Iterator[None]:
    """The abort comes from inside, right before so many sends of a channel or transport."""
    send, numbers = sender.send, count(1)

    def abort_and_send(*arguments: Any) -> None:
        if next(numbers) == sends:
            cluster.abort_all()
        send(*arguments)

    sender.send = abort_and_send
    yield
    del sender.send
