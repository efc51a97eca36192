"""The runs that the dashboards are looked at with: undisturbed ones, and ones with planted faults.

On each side one runs on this machine's CPUs, as two nodes, and one on emulated GPUs, for what only
these have: memory limits, a known peak. In one more gradients overflow again and again.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.integration.prometheus import Prometheus
from tests.system.conftest import Runner, TrainProcess, merge, metrics

SCRAPE_S = 1.0
WINDOW_S = 10
MINE = ("PenstockMemberLost", "PenstockRestartsInARow", "PenstockSaveFailing")
RULES = Path(__file__).parents[3] / "grafana" / "alerts" / "penstock.rules.yml"
CLI = (sys.executable, "-m", "penstock.client.main")

COMMON: dict[str, Any] = {
    "data": {"passes": 1000},
    "train": {"steps": 100_000, "eval_every": 15, "eval_batches": 2, "save_every": 30},
    "observability": {"sample_every": 5, "trackers": ["tensorboard"]},
    "cluster": {"heartbeat_timeout_s": 600.0},  # nobody is lost because the machine is busy
}
TWO_NODES: dict[str, Any] = {
    "train": {"clip_grad_norm": 100.0, "global_batch": 16, "save_every": 5},
    "cluster": {"workers": 1, "nodes": [{"name": "alpha"}, {"name": "beta"}]},
    "schedule": {"scheme": "chimera"},  # each block has two routes: nodes fetch from each other
    "optimizer": {"threads": 1},
}
EMULATED: dict[str, Any] = {
    "model": {"hf": None, "dtype": "fp16"},
    "data": {"sequence_length": 256},
    "train": {"global_batch": 16, "clip_grad_norm": 100.0, "save_every": 20, "eval_every": 15},
    "optimizer": {"grad_dtype": "bf16"},
    "cluster": {
        "workers": 1,
        "nodes": [{"name": "alpha"}, {"name": "beta"}],
        "device": "emulated:analytic:V100-32:gpt3-1.3b",
    },
    "emulation": {"scale": "1/1000", "time_scale": 0.2},
    "observability": {"sample_every": 3},
}


@dataclass(frozen=True, kw_only=True)
class Seen:
    """A run that Prometheus has scraped, from its first sample to its last."""

    name: str
    run_dir: Path
    start_s: float
    end_s: float

    def lines(self, phase: str = "train") -> list[dict[str, Any]]:
        """Its lines of metrics.jsonl."""
        return metrics(self.run_dir, phase)


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A run to be: what differs in its configuration, and what is done to it meanwhile."""

    name: str
    changes: Mapping[str, Any]
    disturb: Callable[[TrainProcess], None]


def planned(seconds: float) -> tuple[tuple[Planned, ...], ...]:
    """Returns the runs, those together that go side by side. All are stopped: undisturbed ones
    after so many seconds of steps, others when their faults are over.
    """

    def for_a_while(run: TrainProcess) -> None:
        go_on(run, seconds, steps=50)
        order(run, "stop")

    two_nodes, emulated = merge(COMMON, TWO_NODES), merge(COMMON, EMULATED)
    # Preloaded processes are back between two scrapes.
    slowly = {
        "train": {"clip_grad_norm": 0.05, "save_every": 30},
        "cluster": {"preload": False, "heartbeat_timeout_s": 30.0},
    }
    overflowing = {
        "model": {"dtype": "fp16"},
        # Each fourth step or so overflows: the scale doubles until it does.
        "optimizer": {
            "grad_dtype": "fp16",
            "initial_loss_scale": 2.0**24,
            "loss_scale_growth_interval": 3,
        },
    }
    clean = (
        Planned(name="clean", changes=two_nodes, disturb=for_a_while),
        Planned(name="clean-emulated", changes=emulated, disturb=for_a_while),
    )
    faulty = (
        Planned(name="faulty", changes=merge(two_nodes, slowly), disturb=plague),
        Planned(name="faulty-emulated", changes=emulated, disturb=kill_a_worker),
    )
    overflows = Planned(
        name="faulty-overflows", changes=merge(COMMON, overflowing), disturb=for_a_while
    )
    return clean, faulty, (overflows,)


def rules_of_members(folder: Path) -> Path:
    """Writes the rules without alerts that others on the machine can cause, who take its cores, its
    memory or its disk.
    """
    rules = yaml.safe_load(RULES.read_text())
    for group in rules["groups"]:
        group["rules"] = [rule for rule in group["rules"] if rule.get("alert", MINE[0]) in MINE]
    path = folder / "rules.yml"
    path.write_text(yaml.safe_dump(rules))
    return path


class Watching:
    """Runs beside a Prometheus that finds them by the files that they write."""

    def __init__(self, folder: Path, runner: Runner, rules: list[Path]) -> None:
        """Files of Prometheus and of runs lie in ``folder``."""
        self._runner = runner
        self._targets = folder / "targets"
        self._targets.mkdir()
        job = {
            "job_name": "penstock",
            "honor_labels": True,
            "file_sd_configs": [
                {"files": [str(self._targets / "*.json")], "refresh_interval": "1s"}
            ],
        }
        self.prometheus = Prometheus(folder / "prometheus", [job], interval_s=SCRAPE_S, rules=rules)

    def watch(self, plans: Iterable[Planned], timeout_s: float = 600.0) -> dict[str, Seen]:
        """Let runs go side by side to their ends; returns what there is to see, by name."""
        plans = tuple(plans)
        told = {"observability": {"targets": str(self._targets)}}
        begun_s = time.time()
        started = {}
        for plan in plans:
            config = self._runner.configure(plan.name, merge(dict(plan.changes), told))
            started[plan.name] = self._runner.start(config)
        for plan in plans:
            plan.disturb(started[plan.name])
        seen = {}
        for name, run in started.items():
            code, output = run.wait(timeout_s)
            assert code in (0, 5), f"{name}: exit code {code}\n{output}"
            seen[name] = self._seen(name, run.run_dir, begun_s)
        return seen

    def _seen(self, name: str, run_dir: Path, begun_s: float) -> Seen:
        """The time in which Prometheus knows the run's step; its marks of the end need a scrape."""
        time.sleep(2 * SCRAPE_S)
        (known,) = self.prometheus.query_range(
            f'max(penstock_step{{run="{name}"}})', begun_s, time.time(), 0.5
        )
        times = [at_s for at_s, _ in known.points]
        return Seen(name=name, run_dir=run_dir, start_s=times[0], end_s=times[-1])


def ask(run: TrainProcess, command: str) -> bool:
    """``penstock COMMAND``, to a run; returns whether it did as asked."""
    argv = [*CLI, command, "--run-dir", str(run.run_dir)]
    return subprocess.run(argv, check=False, capture_output=True, timeout=600).returncode == 0


def order(run: TrainProcess, command: str, timeout_s: float = 600.0) -> None:
    """``penstock COMMAND``, to a run, until it does as asked: it may be busy with a fault."""
    deadline = time.monotonic() + timeout_s
    while not ask(run, command):
        assert run.process.poll() is None, f"{run.run_dir.name} ended"
        assert time.monotonic() < deadline, f"{run.run_dir.name}: no {command} in {timeout_s} s"


def go_on(run: TrainProcess, seconds: float, *, steps: int = 10, timeout_s: float = 1200.0) -> None:
    """Wait until so many more steps are decided, and so many seconds from then on."""
    path = run.run_dir / "metrics.jsonl"

    def decided() -> int:
        return len(metrics(run.run_dir)) if path.exists() else 0

    last, deadline = decided() + steps, time.monotonic() + timeout_s
    while decided() < last:
        assert run.process.poll() is None, f"{run.run_dir.name} ended"
        assert time.monotonic() < deadline, f"{run.run_dir.name}: no {steps} steps in {timeout_s} s"
        time.sleep(0.1)
    time.sleep(seconds)


def hit(run: TrainProcess, member: str, number: signal.Signals) -> None:
    """Send a member a signal, if it lives."""
    with suppress(ProcessLookupError):
        os.kill(run.members()[member], number)


def plague(run: TrainProcess) -> None:
    """Faults one after the other: a killed worker, a stopped one, a killed optimizer, a pause, and
    saves that fail. Then the run is stopped.
    """
    go_on(run, 12.0)
    hit(run, "worker.0", signal.SIGKILL)
    go_on(run, 5.0)
    hit(run, "worker.1", signal.SIGSTOP)  # fenced, once it has been silent for long enough
    go_on(run, 5.0)
    hit(run, "optimizerd.alpha", signal.SIGKILL)
    go_on(run, 5.0)
    order(run, "pause")
    time.sleep(4.0)
    order(run, "resume")
    state = run.run_dir / "state"
    state.rename(state.with_name("state-away"))
    state.write_text("in the way of saves")
    ask(run, "snapshot")
    go_on(run, 6.0)
    state.unlink()
    state.with_name("state-away").rename(state)
    ask(run, "snapshot")
    go_on(run, 5.0)
    order(run, "stop")


def kill_a_worker(run: TrainProcess) -> None:
    """A killed worker; then the run is stopped."""
    go_on(run, 5.0)
    hit(run, "worker.0", signal.SIGKILL)
    go_on(run, 8.0)
    order(run, "stop")
