"""``penstock train``: prepare a run, supervise its nodes on this machine, show what happens.

One ``penstock node`` process per cluster node does the work; each dies with this process. Here are
only: the lock, preparation, starting and replacing nodes, signals, and the words at the end.
"""

from __future__ import annotations

import re
import signal
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

from penstock.client.display import Display
from penstock.client.nodes import Interruptions, NodeProcess, console_path
from penstock.client.saved import saved_states
from penstock.client.snapshots import Metrics, Observer, all_metrics
from penstock.daemons.node.lock import RunLock, node_lock_path, train_lock_path
from penstock.daemons.node.main import PREVIOUS_NODE_WAIT_S
from penstock.daemons.node.prepare import prepare_run
from penstock.protocol.config import Config
from penstock.protocol.errors import FAILURES, ExitCode, failure_code
from penstock.protocol.rundir import RunDirectory
from penstock.shm.inventory import inventory

_EXCEPTION = re.compile(r"[\w.]*(Error|Exception)\b")
"""The last line of a traceback."""

LOOK_INTERVAL_S = 0.5
LINGER_S = 90.0
"""How long the other nodes may take to end after one has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """How a training ended. ``metrics`` are all lines of the run's metrics file.

    ``exit_code``: 0 only when all steps are done and saved; 5 after a stop by command
    (:class:`~penstock.protocol.errors.ExitCode`).
    """

    exit_code: int
    run_dir: Path
    metrics: tuple[Metrics, ...]
    error: str


def run_training(config: Config, run_dir: Path, display: Display) -> TrainResult:
    """Train to the end, an interruption, or a failure.

    Raises:
        PenstockError: nothing was started: bad configuration, memory short, run in use.
    """
    run_dir = run_dir.absolute()
    with RunLock.acquire(train_lock_path(run_dir), wait_s=PREVIOUS_NODE_WAIT_S):
        for node in config.cluster.nodes:  # what a killed run left must be gone, its memory too
            RunLock.acquire(
                node_lock_path(run_dir, node.name), wait_s=PREVIOUS_NODE_WAIT_S
            ).release()
        directory = prepare_run(config, run_dir, display.say)
        if is_complete(directory, config.train.steps):
            display.say(
                f"{run_dir}: all {config.train.steps} steps are done and saved; raise train.steps"
                " to go on, or choose another run.dir"
            )
            return TrainResult(exit_code=0, run_dir=run_dir, metrics=all_metrics(run_dir), error="")
        interruptions = Interruptions()
        with interruptions.installed():
            code = _supervise(config, run_dir, display, interruptions)
    result = TrainResult(
        exit_code=code,
        run_dir=run_dir,
        metrics=all_metrics(run_dir),
        error=complaints(run_dir) if code in FAILURES else "",
    )
    for line in closing_words(result, config):
        display.say(line)
    return result


def _supervise(
    config: Config, run_dir: Path, display: Display, interruptions: Interruptions
) -> int:
    console_path(run_dir).parent.mkdir(exist_ok=True)
    console_path(run_dir).write_bytes(b"")
    (run_dir / "endpoint.json").unlink(missing_ok=True)
    steps = config.train.steps
    display.say(f"training {config.run.name}: {steps} steps in {run_dir}")
    nodes: list[NodeProcess] = []
    observer = Observer(run_dir, steps)
    try:
        for node in config.cluster.nodes:
            nodes.append(NodeProcess(run_dir, node.name, config.cluster.max_restarts))
        code = _watch(nodes, observer, display, interruptions)
        display.show(observer.look())
        return code
    finally:
        for process in nodes:
            process.kill()
        observer.close()
        display.close()


def _watch(
    nodes: list[NodeProcess], observer: Observer, display: Display, interruptions: Interruptions
) -> int:
    """Until all nodes have ended; their common exit code (:func:`_exit_code`)."""
    passed_on = 0
    deadline_s: float | None = None
    while True:
        if passed_on < interruptions.count:
            passed_on += 1
            display.say(_on_interruption(nodes, passed_on))
        codes = [node.poll(replace=passed_on == 0 and deadline_s is None) for node in nodes]
        ended = [code for code in codes if code is not None]
        if len(ended) == len(nodes):
            return _exit_code(ended, interrupted=passed_on > 0)
        if ended and deadline_s is None:
            deadline_s = time.monotonic() + LINGER_S
            if any(code not in (ExitCode.DONE, ExitCode.STOPPED) for code in ended):
                for node in nodes:
                    node.signal(signal.SIGTERM)
        if deadline_s is not None and time.monotonic() > deadline_s:
            display.say(f"other nodes did not end within {LINGER_S:g} s: killing them")
            for node in nodes:
                node.signal(signal.SIGKILL)
        display.show(observer.look())
        _doze(interruptions, passed_on)


def _on_interruption(nodes: list[NodeProcess], number: int) -> str:
    """Pass a signal on; what to tell the user."""
    if number == 1:
        nodes[0].signal(signal.SIGTERM)  # it hosts the scheduler, which stops everyone
        return "stopping: finishing the step under way and saving (Ctrl-C again: kill)"
    # The first node heard the first signal, so that this one makes it kill and tidy up. The others
    # are killed; their processes die with them.
    nodes[0].signal(signal.SIGTERM if number == 2 else signal.SIGKILL)
    for node in nodes[1:]:
        node.signal(signal.SIGKILL)
    return "killing all processes; the run's memory is kept, the same command goes on from it"


def _exit_code(codes: list[int], *, interrupted: bool) -> int:
    """The first failure of its own accord; else 0 for a finished run, 130 after an interruption, 4
    for what was killed, 5 for a run that was stopped by command.
    """
    well = (ExitCode.DONE, ExitCode.STOPPED, ExitCode.INTERRUPTED)
    failures = [failure_code(code) for code in codes if code > 0 and code not in well]
    if failures:
        return int(failures[0])
    if not any(codes):
        return int(ExitCode.DONE)
    if interrupted or ExitCode.INTERRUPTED in codes:
        return int(ExitCode.INTERRUPTED)
    killed = any(code < 0 for code in codes)
    return int(ExitCode.LOST_MEMBERS if killed else ExitCode.STOPPED)


def _doze(interruptions: Interruptions, passed_on: int) -> None:
    """Wait for the next look, but not past an interruption."""
    deadline_s = time.monotonic() + LOOK_INTERVAL_S
    while interruptions.count == passed_on and time.monotonic() < deadline_s:
        time.sleep(0.05)


def is_complete(directory: RunDirectory, steps: int) -> bool:
    """Whether the run has nothing left to do: all steps saved, and no memory to give back."""
    saved = saved_states(directory.path)
    held = any(entry.run_id == directory.run_id for entry in inventory())
    return bool(saved) and saved[-1].version >= steps and not held


def complaints(run_dir: Path) -> str:
    """What the processes of a failed run said for the user, each thing once."""
    text = console_path(run_dir).read_text(encoding="utf-8", errors="replace")
    said = [line.removeprefix("penstock: ") for line in text.splitlines() if "penstock: " in line]
    supervisors = [line for line in text.splitlines() if line.startswith("node.")]
    crashes = [line for line in text.splitlines() if _EXCEPTION.match(line)]
    unique = list(dict.fromkeys(said)) or [*supervisors[-3:], *crashes[-1:]]
    return "\n".join(unique) or f"see {run_dir / 'logs'}"


def closing_words(result: TrainResult, config: Config) -> list[str]:
    """How it ended, and where things are."""
    trained = [entry for entry in result.metrics if entry["phase"] == "train"]
    step, steps = (trained[-1]["step"] if trained else 0), config.train.steps
    if result.exit_code in FAILURES:
        logs = result.run_dir / "logs"
        return [f"failed at step {step} (exit code {result.exit_code}); logs: {logs}"]
    words = [f"done: {step} steps"]
    if result.exit_code != ExitCode.DONE or step < steps:
        words = [f"stopped at step {step}/{steps}; the same command goes on from there"]
    if trained:
        rate = statistics.median(entry["tokens_per_second"] for entry in trained)
        words[0] += f"; {rate:,.0f} tokens/s (median)"
        losses = [entry["loss"] for entry in trained if entry["loss"] is not None]
        words += [f"  loss           {losses[0]:.4f} -> {losses[-1]:.4f}"] if losses else []
    saved = saved_states(result.run_dir)
    return [
        *words,
        f"  metrics        {result.run_dir / 'metrics.jsonl'}",
        f"  configuration  {result.run_dir / 'resolved.yaml'}",
        f"  saved state    {saved[-1].path if saved else 'none'}",
        f"  export         penstock export {result.run_dir} --format hf OUT",
    ]
