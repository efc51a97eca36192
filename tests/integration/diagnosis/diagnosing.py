"""Plants a fault and sees what people are told; and lets a run live its whole life without one."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from pathlib import Path

from tests.integration.diagnosis.faults import Fault
from tests.integration.diagnosis.runs import FaultyRun, Settings
from tests.integration.diagnosis.watching import OF_THE_MACHINE, Message, Watch

ROOT = Path(__file__).parents[3]
GROUP_WAIT_S = 30.0
"""Alertmanager's, from alertmanager.yml."""
HANG_S = 600.0
"""Nothing takes so long, until the first attempt or until an alert, but what hangs."""
HEALTHY_S = 15.0
"""A run is watched so long before its fault."""
LONGER_S = 45.0
"""After the message so much longer, for those that should not come: another group_interval."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """``delay_s``: what the fault's grace and the runbook promise. ``after_s``: when it fired
    after the fault; None: it did not. ``told``: what people were told of; ``silenced``: what
    fired beside it, and was inhibited. ``summary``: of the right message.
    """

    fault: Fault
    delay_s: float
    after_s: float | None
    told: tuple[str, ...]
    silenced: tuple[str, ...]
    summary: str

    @property
    def right(self) -> bool:
        """Whether exactly the right alert came, in time."""
        in_time = self.after_s is not None and self.after_s <= self.delay_s
        return in_time and self.told == (self.fault.alert,)


def promised_s(alert: str) -> float:
    """The longest delay of an alert that docs/RUNBOOK.md states: with scrapes every 15 s."""
    text = (ROOT / "docs" / "RUNBOOK.md").read_text()
    found = re.search(rf"^\| \[{alert}\][^|]*\|[^|]*\|([^|]*)\|", text, re.MULTILINE)
    assert found is not None, f"docs/RUNBOOK.md has no row of {alert}"
    return max(float(seconds) for seconds in re.findall(r"(\d+) s", found[1]))


def diagnose(fault: Fault, watch: Watch, folder: Path) -> Finding:
    """Plant a fault into a run of its own; returns what came of it."""
    delay_s = fault.grace_s + promised_s(fault.alert)
    with FaultyRun(fault.name, folder, watch.targets, fault.settings) as run:
        begun_s = time.time()
        run.start()
        if fault.step:
            run.wait_for_step(fault.step)
            time.sleep(HEALTHY_S)
            early = [m for m in watch.told(fault.name) if m.alert not in OF_THE_MACHINE]
            assert not early, f"before its fault: {early}"
        with fault.strike(run):
            if not fault.step:
                asked = (
                    f'penstock_phase{{run="{fault.name}", phase=~"running|deciding|amending"}} == 1'
                )
                watch.prometheus.wait_for(asked, HANG_S)
            struck_s = time.time()
            fired_s = _fires(watch, fault, begun_s)
            time.sleep(LONGER_S)
            fired = watch.fired(fault.name, begun_s)
        told = watch.told(fault.name)
    return _finding(fault, delay_s, None if fired_s is None else fired_s - struck_s, fired, told)


def _fires(watch: Watch, fault: Fault, begun_s: float) -> float | None:
    """Waits until people are told by the right alert; returns when it fired, None if it hangs."""
    deadline = time.monotonic() + HANG_S
    while time.monotonic() < deadline:
        fired = watch.fired(fault.name, begun_s)
        if fault.alert in fired and fault.alert in {m.alert for m in watch.told(fault.name)}:
            return fired[fault.alert]
        time.sleep(1.0)
    return None


def _finding(
    fault: Fault,
    delay_s: float,
    after_s: float | None,
    fired: dict[str, float],
    told: list[Message],
) -> Finding:
    names = tuple(sorted({message.alert for message in told}))
    return Finding(
        fault=fault,
        delay_s=delay_s,
        after_s=after_s,
        told=names,
        silenced=tuple(sorted(set(fired) - set(names))),
        summary=next((m.summary for m in told if m.alert == fault.alert), ""),
    )


LIFE = Settings(changes={"train": {"steps": 60, "save_every": 20, "eval_every": 15}})


def clean(watch: Watch, folder: Path, seconds: float) -> list[Message]:
    """Runs live their whole lives, one after the other: start, saves, evaluations, a pause, the
    end. Returns what people were told: nothing.
    """
    deadline, number = time.monotonic() + seconds, 0
    while time.monotonic() < deadline:
        name = f"clean-{number}"
        with FaultyRun(name, folder, watch.targets, LIFE) as run:
            run.start()
            run.wait_for_step(25)
            with run.control() as control:
                control.pause()
                time.sleep(min(20.0 * (number % 5), 80.0))
                control.resume()
            assert set(run.wait(HANG_S).values()) == {0}, run.said()
        number += 1
    time.sleep(GROUP_WAIT_S + LONGER_S)
    return [m for n in range(number) for m in watch.told(f"clean-{n}")]
