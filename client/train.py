"""``penstock train``: prepares a run, supervises its nodes on this machine, shows the progress.

One ``penstock node`` process runs for each cluster node, and dies with this process. This module
takes the lock, prepares the run, and reports the end. :mod:`penstock.client.supervision`
supervises.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from penstock.client.supervision import Interruptions, Supervision, console_path, empty_console
from penstock.client.views.display import Display
from penstock.client.views.programs import OnStep, Stepping
from penstock.client.views.progress import working
from penstock.client.views.run_view import (
    Metrics,
    Observer,
    StateFolder,
    all_metrics,
    early_end_of,
    numbers,
    saved_states,
)
from penstock.client.views.summary import Summary
from penstock.config.schema import Config
from penstock.daemons.node.endpoint import remove_endpoint
from penstock.daemons.node.main import PREVIOUS_NODE_WAIT_S
from penstock.daemons.node.preparing.prepare import is_complete, prepare_run
from penstock.daemons.node.run_lock import (
    RunLock,
    kept_words,
    node_lock_path,
    remove_empty_memory,
    train_lock_path,
)
from penstock.daemons.preload.preloaders import TORCH
from penstock.daemons.preload.starting import Preloading, Spawning, Starter
from penstock.host.errors import FAILURES, ExitCode
from penstock.host.requirements import check_torch
from penstock.host.stopping import Grace
from penstock.protocol.run.data_size import TrainingData, epochs, with_known_steps
from penstock.protocol.run.run_result import forget_end
from penstock.protocol.run.rundir import RunDirectory
from penstock.shm.inventory import inventory

_EXCEPTION = re.compile(r"[\w.]*(Error|Exception)\b")
"""Matches the last line of a traceback."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """The result of a training. ``metrics`` are all lines of the run's metrics file.

    ``exit_code`` is 0 if the last step is complete and saved, 5 after a stop by command
    (:class:`~penstock.host.errors.ExitCode`). ``first`` is the index in ``metrics`` of the first
    line of this start. ``seconds`` is the duration of this start with its preparation.
    """

    exit_code: int
    run_dir: Path
    metrics: tuple[Metrics, ...]
    error: str
    first: int = 0
    seconds: float = 0.0

    @property
    def summary(self) -> Summary:
        """Losses, evaluations and speed, as ``penstock train`` prints them."""
        return Summary.of(self.metrics, self.first)

    @property
    def state(self) -> StateFolder | None:
        """The newest saved state, or None."""
        states = saved_states(self.run_dir)
        return states[-1] if states else None

    def __repr__(self) -> str:
        """Returns the result in one line, without the thousands of metrics."""
        steps = [entry for entry in self.metrics if entry["phase"] == "train"]
        words = [f"exit_code={int(self.exit_code)}", f"run_dir={str(self.run_dir)!r}"]
        words += [f"steps={steps[-1]['step']}", f"loss={steps[-1].get('loss')}"] if steps else []
        words += [f"error={self.error!r}"] if self.error else []
        return f"TrainResult({', '.join(words)})"


def run_training(
    config: Config,
    run_dir: Path,
    display: Display,
    *,
    process_ends: bool = False,
    preloading: Preloading | None = None,
    on_step: OnStep | None = None,
) -> TrainResult:
    """Trains to the end, an interruption, or a failure.

    ``process_ends``: the process ends with the training, so late stop signals are ignored.
    ``preloading`` is a process that already imports torch; it is closed at the end. ``on_step``
    gets each committed step, and returns True to stop the run.

    Raises:
        PenstockError: nothing was started: bad configuration, no suitable torch, too little memory,
            or the run is in use.
    """
    check_torch()
    began_s = time.monotonic()
    run_dir = run_dir.absolute()
    RunDirectory(run_dir).check_shape()
    with (
        RunLock.acquire(train_lock_path(run_dir), wait_s=PREVIOUS_NODE_WAIT_S),
        starter_of(config, preloading) as starter,
    ):
        for node in config.cluster.nodes:  # processes and memory of a killed run must be gone
            RunLock.acquire(
                node_lock_path(run_dir, node.name), wait_s=PREVIOUS_NODE_WAIT_S
            ).release()
        with working("preparing the run", display) as say:
            directory = prepare_run(config, run_dir, say, starter=starter, rests=True)
        config = with_known_steps(config, run_dir)
        earlier = all_metrics(run_dir)
        if is_complete(directory, config.train.steps):
            _remove_remains(config, directory)
            display.say(
                f"{run_dir}: all {config.train.steps} steps are done and saved; raise"
                f" {config.train.length_key} to continue, or choose another run.dir"
            )
            return _result_of(run_dir, 0, earlier, began_s)
        with Interruptions().installed(process_ends=process_ends) as interruptions:
            if on_step is None:
                code = _supervise(config, run_dir, display, interruptions, starter)
            else:
                stepping = Stepping(display, on_step, interruptions.ask)
                code = _supervise(config, run_dir, stepping, interruptions, starter)
                code = stepping.code_of(code)
    result = _result_of(run_dir, code, earlier, began_s)
    held = any(entry.run_id == directory.run_id for entry in inventory())
    saved = max((state.version for state in saved_states(run_dir)), default=0)
    kept = kept_words(directory, saved)
    for line in closing_words(result, config, held=held, kept=kept):
        display.say(line)
    return result


def _remove_remains(config: Config, run: RunDirectory) -> None:
    """Removes files of the last start: it was killed behind its last step."""
    for node in config.cluster.nodes:
        remove_empty_memory(run.run_id, node.name)
    remove_endpoint(run.path)
    forget_end(run.path)


def _result_of(run_dir: Path, code: int, earlier: Sequence[Metrics], began_s: float) -> TrainResult:
    """Returns the result of a start; ``earlier`` are the metrics of earlier starts."""
    return TrainResult(
        exit_code=code,
        run_dir=run_dir,
        metrics=all_metrics(run_dir),
        error=complaints(run_dir) if code in FAILURES else "",
        first=len(earlier),
        seconds=time.monotonic() - began_s,
    )


@contextmanager
def starter_of(config: Config, preloading: Preloading | None) -> Iterator[Starter]:
    """Yields the starter of node processes.

    With ``cluster.preload``, processes are forked from ``preloading`` or from a new preloader.
    Otherwise they are spawned.
    """
    if config.cluster.preload:
        with preloading or Preloading(TORCH, os.environ) as starter:
            yield starter
    else:
        if preloading is not None:
            preloading.close()
        yield Spawning()


def _supervise(
    config: Config,
    run_dir: Path,
    display: Display,
    interruptions: Interruptions,
    starter: Starter,
) -> int:
    # Files of the last start would name its scheduler and its end as those of this start.
    empty_console(run_dir)
    (run_dir / "endpoint.json").unlink(missing_ok=True)
    forget_end(run_dir)
    data = TrainingData.of(run_dir, config)
    if data is not None:
        display.say(data.in_steps(config.train.steps, config.train.global_batch))
    display.say(f"training {config.run.name}: {config.train.steps} steps in {run_dir}")
    observer = Observer(run_dir, config.train.steps, past=display.wants_past)
    supervision = Supervision(
        run_dir,
        config,
        display,
        observer,
        interruptions,
        Grace.of(config.cluster.stop_grace_s, os.environ),
        starter,
    )
    try:
        code = supervision.run()
        display.show(observer.look())
        return code
    finally:
        supervision.close()
        observer.close()
        display.close()


def complaints(run_dir: Path) -> str:
    """Returns the error messages of a failed run's processes, each message once."""
    text = console_path(run_dir).read_text(encoding="utf-8", errors="replace")
    mark = "penstock: "
    messages = [line.removeprefix(mark) for line in text.splitlines() if line.startswith(mark)]
    supervisors = [line for line in text.splitlines() if line.startswith("node.")]
    crashes = [line for line in text.splitlines() if _EXCEPTION.match(line)]
    unique = list(dict.fromkeys(messages)) or [*supervisors[-3:], *crashes[-1:]]
    return "\n".join(unique) or f"see {run_dir / 'logs'}"


def closing_words(
    result: TrainResult, config: Config, *, held: bool = False, kept: str = ""
) -> list[str]:
    """Returns lines about the end of the training and its files.

    ``held``: True if shared memory still holds the state. ``kept`` describes the memory that a
    failed run leaves.
    """
    summary = result.summary
    step, steps = summary.step, config.train.steps
    if result.exit_code in FAILURES:
        logs = result.run_dir / "logs"
        failed = f"failed at step {step} (exit code {result.exit_code}); logs: {logs}"
        return [failed, *([f"  in memory      {kept}"] if kept else [])]
    trained = [entry for entry in result.metrics if entry["phase"] == "train"]
    passes = [epochs(done) for done in numbers(entry.get("data_epoch") for entry in trained[-1:])]
    words = [", ".join([f"done: {step} steps", *(f"{done} epochs" for done in passes)])]
    early = early_end_of(config, result.metrics, step)
    if result.exit_code == ExitCode.DONE and early:
        words = [", ".join([f"done: {early}", *(f"{done} epochs" for done in passes)])]
    elif result.exit_code != ExitCode.DONE or step < steps:
        place = ", ".join([f"step {step}/{steps}", *(f"epoch {done}" for done in passes)])
        words = [f"stopped at {place}; the same command resumes from there"]
    words += summary.lines(result.seconds)
    saved = result.state
    reached = saved.version if saved is not None else 0
    if held and reached < step:
        words.append(
            f"  in memory      steps {reached + 1} to {step} are not saved; the shared memory of"
            " this machine keeps them: start the same command before a reboot"
        )
    words += [
        f"  metrics        {result.run_dir / 'metrics.jsonl'}",
        f"  configuration  {result.run_dir / 'resolved.yaml'}",
        f"  saved state    {saved.path if saved is not None else 'none'}",
    ]
    exports = not config.cluster.platform.builtin_model  # emulated weights cannot be exported
    if saved is not None and exports:
        words.append(f"  export         penstock export {result.run_dir} --format hf OUT")
    return [*words, f"  report         penstock report {result.run_dir}"]
