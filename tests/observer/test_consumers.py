"""What observerd's threads do when a consumer fails, or does not come to an end."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, field

import pytest

from penstock.config.schema import Config, parse_config
from penstock.daemons.monitor.observer import consumer
from penstock.daemons.monitor.observer.consumer import is_observed, run_consumers
from penstock.host.stopping import StopSignal


@dataclass
class Failing:
    """Fails as often as it is told, then works until the end."""

    failures: int
    works: threading.Event = field(default_factory=threading.Event)
    name: str = "failing"

    def run(self, stop: StopSignal) -> None:
        if self.failures:
            self.failures -= 1
            raise OSError("the disk is gone")
        self.works.set()
        stop.wait(600.0)


@dataclass
class Slow:
    """Takes no notice of the end for a while."""

    over: threading.Event = field(default_factory=threading.Event)
    name: str = "slow"

    def run(self, stop: StopSignal) -> None:
        self.over.wait(3600.0)


def test_a_consumer_that_fails_begins_anew_and_a_slow_one_is_left(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(consumer, "AGAIN_S", 0.01)
    stop, failing, slow = StopSignal(), Failing(failures=2), Slow()
    with caplog.at_level(logging.WARNING):
        keywords = {"finish_s": 0.1}
        observer = threading.Thread(
            target=run_consumers, args=([failing, slow], stop), kwargs=keywords
        )
        observer.start()
        assert failing.works.wait(600.0), "it worked at the third time"
        stop.set()
        observer.join(120.0)
    assert not observer.is_alive(), "nobody waits for the slow one"
    slow.over.set()
    said = [record.getMessage() for record in caplog.records]
    assert said == ["failing failed"] * 2 + ["slow is not done 0.1 s after the end of the run"]


def observed(**observability: int) -> Config:
    return parse_config(
        {
            "model": {"hf": {"model_type": "llama"}},
            "data": {"path": "@stdlib"},
            "train": {"steps": 40},
            "observability": observability,
        }
    )


def test_a_run_has_an_observer_where_attempts_may_be_sampled() -> None:
    assert [is_observed(observed(sample_every=n)) for n in (0, 1, 40, 41)] == [
        *(False, True, True, False)
    ]
