"""Runs with faults, one after the other, until there were enough of them."""

from __future__ import annotations

import json
import random
import shutil
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from penstock.chaos.checks import Trained, check, check_nothing_left
from penstock.chaos.command import TrainCommand
from penstock.chaos.disks import Disk, own_disks
from penstock.chaos.faulted_run import DisturbedRun, Suffered
from penstock.chaos.faults import Cast, FaultKind, draw, draw_last
from penstock.config.schema import Config
from penstock.daemons.node.endpoint import NodeSettings
from penstock.daemons.node.main import child_specs
from penstock.daemons.node.run_lock import remove_memory, wait_until_dead
from penstock.host.errors import ConfigError, LostMemberError, PenstockError
from penstock.protocol.run.names import node_member_name
from penstock.protocol.run.rundir import RunDirectory

SHM_SPARE_BYTES = 1 << 30
_DISK_SPARE_BYTES = 64 << 20
_STATES_ON_DISK = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What a campaign is to do. ``run``: only this one of the runs that ``seed`` gives; None: as
    many as ``faults`` or ``minutes`` take. ``finished``: an undisturbed run to compare with.
    """

    config: Path
    settings: tuple[str, ...]
    kinds: frozenset[FaultKind]
    processes: frozenset[str]
    seed: int
    faults: int
    minutes: float | None
    run: int | None
    gap_steps: int
    patience_s: float
    finished: Path | None
    out: Path


@dataclass(slots=True, kw_only=True)
class Campaign:
    """Runs of one configuration. ``say`` is told each event."""

    wish: Wish
    config: Config
    say: Callable[[str], None]
    suffered: list[Suffered] = field(default_factory=list)
    undisturbed_s: float | None = None
    _blows: int = 0

    def carry_out(self) -> None:
        """Trains undisturbed, then with faults until there were enough, and checks each run.

        Raises:
            LostMemberError: something is not as it should be: says what, and where it is kept.
            PenstockError: the undisturbed run fails.
        """
        reference = self.wish.finished or self._undisturbed()
        trained = Trained.of(reference, self.config.train.steps)
        disks, place = self._disks(reference)
        began_s = time.monotonic()
        number = 1 if self.wish.run is None else self.wish.run
        while self._enough(began_s) is False:
            self._one(number, reference, trained, disks, place)
            if self.wish.run is not None:
                return
            number += 1

    def _enough(self, began_s: float) -> bool:
        minutes = self.wish.minutes
        if minutes is not None and time.monotonic() - began_s >= 60.0 * minutes:
            return True
        return minutes is None and len(self.suffered) >= self.wish.faults

    def _undisturbed(self) -> Path:
        command = self._command(self.wish.out / "undisturbed", "undisturbed")
        self.say("undisturbed run")
        began_s = time.monotonic()
        process = command.start()
        try:
            code = process.wait()
        except BaseException:
            process.kill()
            process.wait()
            self._give_memory_back(command.run_dir)
            raise
        if code != 0:
            raise LostMemberError(f"undisturbed, the run ends with {code}:\n{command.said()}")
        self.undisturbed_s = time.monotonic() - began_s
        check_nothing_left(command.run_dir)
        return command.run_dir

    def _give_memory_back(self, run_dir: Path) -> None:
        """Removes what a killed run has in shared memory, where nobody looks for a reason."""
        if not (run_dir / "run.json").exists():
            return  # it was being prepared
        run_id = RunDirectory(run_dir).run_id
        for node in self.config.cluster.nodes:
            wait_until_dead(run_dir, node.name)
            remove_memory(run_id, node.name)

    def _disks(self, reference: Path) -> tuple[Mapping[str, Disk], Path]:
        """Returns what can be filled, and where runs have their directories."""
        if not self.wish.kinds & {FaultKind.DISK, FaultKind.SHM}:
            return {}, self.wish.out
        sizes = [p.stat().st_size for p in reference.rglob("*") if p.is_file()]
        place = self.wish.out / "disk"
        memory = _STATES_ON_DISK * sum(sizes) + SHM_SPARE_BYTES
        disk, shm = own_disks(place, _STATES_ON_DISK * sum(sizes) + _DISK_SPARE_BYTES, memory)
        return {"disk": disk, "shm": shm}, place

    def _one(
        self, number: int, reference: Path, trained: Trained, disks: Mapping[str, Disk], place: Path
    ) -> None:
        wish, train = self.wish, self.config.train
        command = self._command(place / f"run-{number}", f"run-{number}")
        prepared(reference, command.run_dir)
        source = random.Random(f"{wish.seed}/{number}")
        cast = cast_of(self.config, command.run_dir, wish.gap_steps, wish.processes)
        kinds = cast.possible(wish.kinds)
        run = DisturbedRun(
            command=command,
            number=number,
            steps=train.steps,
            cast=cast,
            source=random.Random(f"{wish.seed}/{number}/instants"),
            disks=disks,
            patience_s=wish.patience_s,
            eval_every=train.eval_every or train.steps,
            say=self.say,
        )
        last = draw_last(random.Random(f"{wish.seed}/{number}/end"), cast, kinds)
        run.start()
        began_s = time.monotonic()
        try:
            while not self._enough_in(run, began_s):
                if run.near_end or not run.suffer(draw(source, cast, kinds)):
                    break
            if last is not None:
                run.suffer(last)
            run.finish()
            check(command.run_dir, trained)
        except PenstockError as error:
            run.kill()
            kept = self._keep(command, run)
            raise LostMemberError(f"run {number}: {error}\nkept: {kept}") from error
        except KeyboardInterrupt:
            run.kill()
            self._give_memory_back(command.run_dir)
            raise
        finally:
            run.kill()
            self.suffered += run.suffered
            self._record(run)
        shutil.rmtree(command.run_dir)

    def _enough_in(self, run: DisturbedRun, began_s: float) -> bool:
        """Returns whether a run needs no more faults; a replayed one has as many as fit in."""
        wish = self.wish
        if wish.minutes is not None:
            return time.monotonic() - began_s >= 60.0 * wish.minutes
        return len(self.suffered) + len(run.suffered) >= wish.faults

    def _command(self, run_dir: Path, name: str) -> TrainCommand:
        return TrainCommand(
            config=self.wish.config,
            settings=self.wish.settings,
            run_dir=run_dir,
            output=self.wish.out / f"{name}.txt",
        )

    def _keep(self, command: TrainCommand, run: DisturbedRun) -> Path:
        """Keeps what tells about a failure; returns where."""
        place = self.wish.out / f"failed-{run.number}"
        shutil.copytree(command.run_dir, place, dirs_exist_ok=True)
        (place / "history.txt").write_text("\n".join(run.history) + "\n")
        shutil.copy(command.output, place / "output.txt")
        return place

    def _record(self, run: DisturbedRun) -> None:
        with (self.wish.out / "faults.jsonl").open("a") as file:
            for entry in run.suffered:
                file.write(json.dumps(entry.to_dict()) + "\n")


def cast_of(config: Config, run_dir: Path, gap_steps: int, processes: Collection[str] = ()) -> Cast:
    """Returns who can be struck in runs of a configuration; of ``processes`` only, if there are
    any.

    Raises:
        ConfigError: a run has no such process.
    """
    names: list[str] = ["train"]
    for index, node in enumerate(config.cluster.nodes):
        settings = NodeSettings(
            run_dir=run_dir, node=node.name, scheduler="127.0.0.1:1", hosts=index == 0
        )
        names.append(node_member_name(node.name))
        names += [spec.name for spec in child_specs(config, settings)]
    present = {name.partition(".")[0] for name in names}
    if not present.issuperset(processes):
        given, accepted = ",".join(sorted(processes)), ", ".join(sorted(present))
        raise ConfigError(f"--processes {given}: of this run are {accepted}")
    return Cast(
        names=tuple(n for n in names if not processes or n.partition(".")[0] in processes),
        heartbeat_timeout_s=config.cluster.heartbeat_timeout_s,
        gap_steps=gap_steps,
        evaluates=bool(config.train.eval_every),
        saves=bool(config.train.save_every),
    )


def prepared(source: Path, run_dir: Path) -> None:
    """Makes a run directory that was never started, with the model and data of another run:
    preparing them anew takes seconds.
    """
    run_dir.mkdir()
    for name in ("model", "data"):
        shutil.copytree(source / name, run_dir / name)
    shutil.copy(source / "table.json", run_dir / "table.json")
