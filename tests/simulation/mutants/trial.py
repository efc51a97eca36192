"""The simulation against one mutant, in a forked process with a budget of CPU time.

The process that forks has imported what the simulation needs of other packages, and nothing of the
package itself (:func:`prepare`): so a mutant pays neither those imports nor undisturbed runs.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import pickle
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from tests.simulation.many import FOLDER, undisturbed_runs, work
from tests.simulation.mutants import overlay
from tests.simulation.mutants.mutant import Mutant
from tests.simulation.mutants.reach import Probes

SLACK_S = 60
"""CPU seconds that a simulation may take beyond its budget: to end its last seed."""
PATIENCE = 10.0
"""How many times its CPU time it may take by the clock, on a machine that others use."""
LOOK_EVERY_S = 0.02
UNDISTURBED = 8
"""At most so many shapes are run without faults; each takes 0.3 s."""
SHARED_MEMORY = Path("/dev/shm")
_SAID_LETTERS = 300
_SEED = re.compile(r"\bseed\W{1,2}(\d+)", re.IGNORECASE)
_SAID = re.compile(r"\bseed\W{1,2}\d+|, undisturbed: ", re.IGNORECASE)
_LIVES = re.compile(r"^(\d+) lives$", re.MULTILINE)
_VIOLATION, _FELL_OVER = 1, 2


class Verdict(StrEnum):
    """``FOUND``: a violation was reported. ``CRASHED``: the simulation itself fell over, as where
    the module cannot be imported. ``STUCK``: it did not end. ``MISSED``: all seeds passed.
    ``UNCLEAN``: the seed that found it fails without it, too, so nothing is known.
    """

    FOUND = "found"
    CRASHED = "crashed"
    STUCK = "stuck"
    MISSED = "missed"
    UNCLEAN = "unclean"

    @property
    def is_found(self) -> bool:
        """Whether nobody could overlook it."""
        return self in (Verdict.FOUND, Verdict.CRASHED, Verdict.STUCK)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """How a mutant fared. ``seed``: that found it, if one did and the simulation said so;
    ``lives``: how many seeds passed; ``cpu_s``: of this trial; ``said``: the violation, or the last
    line.
    """

    mutant: str
    origin: str
    verdict: Verdict
    cpu_s: float
    lives: int = 0
    seed: int | None = None
    said: str = ""

    def to_fields(self) -> dict[str, Any]:
        """Returns a JSON object."""
        return asdict(self)

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Trial:
        """Returns what :meth:`to_fields` gave."""
        return cls(**{**fields, "verdict": Verdict(fields["verdict"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class Laboratory:
    """Where mutants are tried. ``undisturbed``: what the shapes leave without faults, pickled, as
    its classes belong to modules that a mutant may change; ``shapes``: by mutant, those that reach
    what it changes, which come often; ``cpu_s``: the budget of each.
    """

    undisturbed: bytes
    shapes: Mapping[str, frozenset[str]]
    cpu_s: float

    def live(self, first_seed: int, lives: int, mutant: str) -> int:
        """Run some of the shapes that reach the mutant without faults, then seeds, after the first
        ``lives`` of them, until one violates something; returns the exit code.
        """
        from tests.simulation.configurations import seeds_by_shape

        shapes = sorted(self.shapes[mutant])
        seeds = islice(seeds_by_shape(first_seed, self.shapes[mutant]), lives, None)
        return self._run(seeds, shapes[:: 1 + len(shapes) // UNDISTURBED])

    def live_once(self, seed: int) -> int:
        """Run one seed; returns the exit code."""
        return self._run([seed])

    def _run(self, seeds: Iterable[int], first: Collection[str] = ()) -> int:
        totals = work(
            seeds,
            self.cpu_s / 60.0,
            stop_at_first=True,
            clock=time.process_time,
            undisturbed=pickle.loads(self.undisturbed),
            first=first,
        )
        print(f"{max(0, totals.seeds - len(totals.failed))} lives")
        return _VIOLATION if totals.failed else 0


def prepare(cpu_s: float, mutants: Sequence[Mutant]) -> Laboratory:
    """Import all that the simulation imports of other packages, and run every shape, undisturbed
    and once under faults.

    Raises:
        RuntimeError: this process has imported the package, or an undisturbed run failed.
    """
    if overlay.is_package_imported():
        raise RuntimeError("the package is imported here: a mutant would come too late")
    with tempfile.TemporaryFile() as file:
        code, said, _ = _forked(partial(_survey, file.fileno(), mutants), 10 * SLACK_S)
        if code != 0:
            raise RuntimeError(f"the shapes fail without a fault: {said}")
        file.seek(0)
        names, undisturbed, shapes = pickle.load(file)
    for name in names:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    return Laboratory(undisturbed=undisturbed, shapes=shapes, cpu_s=cpu_s)


def try_mutant(
    mutant: Mutant, live: Callable[[], int], budget_s: float, *, lives: int = 0
) -> Trial:
    """Call ``live`` in a forked process which has the fault; ``lives``: those that were lived in
    earlier trials.

    Raises:
        OutdatedError, SyntaxError: it cannot be planted.
    """
    source = mutant.source()

    def mutated() -> int:
        overlay.plant(mutant.module, source)
        return live()

    code, said, cpu_s = _forked(mutated, budget_s + SLACK_S)
    found, passed = _SEED.search(said), _LIVES.search(said)
    verdict, lines = _verdict(code, said), said.strip().splitlines() or [""]
    return Trial(
        mutant=mutant.name,
        origin=mutant.origin,
        verdict=verdict,
        cpu_s=round(cpu_s, 1),
        lives=lives + (int(passed[1]) if passed else 0),
        seed=int(found[1]) if found and code == _VIOLATION else None,
        said=lines[0 if verdict is Verdict.FOUND else -1][:_SAID_LETTERS],
    )


def passes_without(seed: int, laboratory: Laboratory) -> bool:
    """Returns whether the simulation has nothing to say of a seed when no fault is planted."""
    code, _, _ = _forked(partial(laboratory.live_once, seed), SLACK_S)
    return code == 0


def _survey(descriptor: int, mutants: Sequence[Mutant]) -> int:
    probes = Probes()
    probes.plant(mutants)
    undisturbed = undisturbed_runs(probes.enter)
    _run_each_under_faults(probes, undisturbed)
    shapes = {mutant.name: probes.shapes(mutant) for mutant in mutants}
    ours = (overlay.PACKAGE, "tests", "__main__")
    names = sorted(name for name in sys.modules if name.partition(".")[0] not in ours)
    with os.fdopen(os.dup(descriptor), "wb") as file:
        pickle.dump((names, pickle.dumps(undisturbed), shapes), file)
    return 0


def _run_each_under_faults(probes: Probes, undisturbed: Any) -> None:
    from tests.simulation.configurations import SHAPES, drawn_shape, seeds_by_shape

    for seed in islice(seeds_by_shape(0), len(SHAPES)):
        probes.enter(drawn_shape(seed).name)
        work([seed], undisturbed=undisturbed)


def _verdict(code: int | None, said: str) -> Verdict:
    if code is None:
        return Verdict.STUCK
    if code == 0:
        return Verdict.MISSED
    return Verdict.FOUND if code == _VIOLATION and _SAID.search(said) else Verdict.CRASHED


# ---- processes ----


def _forked(live: Callable[[], int], cpu_s: float) -> tuple[int | None, str, float]:
    """Returns exit code (None: it did not end in ``cpu_s``), output, and CPU seconds."""
    with tempfile.TemporaryFile() as output:
        pid = os.fork()
        if pid == 0:
            _be_child(live, output.fileno(), round(cpu_s))
        with _killed_at_the_end(pid):
            status, used = _waited(pid, time.monotonic() + PATIENCE * cpu_s)
        output.seek(0)
        said = output.read().decode(errors="replace")
    code = None if status is None else os.waitstatus_to_exitcode(status)
    return None if code == -signal.SIGXCPU else code, said, used


def _be_child(live: Callable[[], int], output: int, cpu_s: int) -> None:
    code = _FELL_OVER
    try:
        os.setsid()
        os.dup2(output, 1)
        os.dup2(output, 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))
        sys.stdout = sys.stderr = os.fdopen(1, "w", closefd=False)
        code = live()
    except BaseException:  # whatever a mutant does, it must not go on as the parent
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        os._exit(code)


def _waited(pid: int, until_s: float) -> tuple[int | None, float]:
    while time.monotonic() < until_s:
        ended, status, usage = os.wait4(pid, os.WNOHANG)
        if ended:
            return status, usage.ru_utime + usage.ru_stime
        time.sleep(LOOK_EVERY_S)
    return None, 0.0


@contextlib.contextmanager
def _killed_at_the_end(pid: int) -> Iterator[None]:
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)
        _clean_up(pid)


def _clean_up(pid: int) -> None:
    """Remove what a killed simulation left in shared memory: its folder and its runs' segments."""
    for folder in SHARED_MEMORY.glob(f"{FOLDER}{pid}-*"):
        for file in folder.glob("*/run.json"):
            with contextlib.suppress(ValueError, KeyError):  # killed while it was written
                run_id = json.loads(file.read_text(encoding="utf-8"))["run_id"]
                for segment in SHARED_MEMORY.glob(f"*{run_id}*"):
                    segment.unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
