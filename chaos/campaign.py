"""A campaign: runs with faults, one after the other, up to a number of faults or a time."""

from __future__ import annotations

import json
import random
import shutil
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from penstock.chaos.checks import Trained, check, check_nothing_left
from penstock.chaos.disks import Disk, own_disks
from penstock.chaos.faulted_run import FaultedRun, InjectedFault
from penstock.chaos.faults import FaultKind, Targets, draw, draw_last
from penstock.chaos.processes import TrainCommand
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
class CampaignOptions:
    """Options of a campaign.

    ``run`` is the only run of the seed to repeat, or None for all. The campaign ends after
    ``faults`` faults, or after ``minutes``. ``finished`` is the undisturbed run to compare with;
    None trains one.
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
    """Runs of one configuration. ``say`` gets each event."""

    options: CampaignOptions
    config: Config
    say: Callable[[str], None]
    injected: list[InjectedFault] = field(default_factory=list)
    undisturbed_s: float | None = None
    _count: int = 0

    def carry_out(self) -> None:
        """Trains without faults, then with faults, and checks each run.

        Raises:
            LostMemberError: a run differs, hangs or leaves something behind; names the copy.
            PenstockError: the undisturbed run fails.
        """
        reference = self.options.finished or self._undisturbed()
        trained = Trained.of(reference, self.config.train.steps)
        disks, place = self._disks(reference)
        began_s = time.monotonic()
        number = 1 if self.options.run is None else self.options.run
        while self._enough(began_s) is False:
            self._one(number, reference, trained, disks, place)
            if self.options.run is not None:
                return
            number += 1

    def _enough(self, began_s: float) -> bool:
        minutes = self.options.minutes
        if minutes is not None and time.monotonic() - began_s >= 60.0 * minutes:
            return True
        return minutes is None and len(self.injected) >= self.options.faults

    def _undisturbed(self) -> Path:
        command = self._command(self.options.out / "undisturbed", "undisturbed")
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
            raise LostMemberError(f"the undisturbed run ended with {code}:\n{command.text()}")
        self.undisturbed_s = time.monotonic() - began_s
        check_nothing_left(command.run_dir)
        return command.run_dir

    def _give_memory_back(self, run_dir: Path) -> None:
        """Frees the shared memory of a killed run that needs no diagnosis."""
        if not (run_dir / "run.json").exists():
            return  # the run was not prepared yet
        run_id = RunDirectory(run_dir).run_id
        for node in self.config.cluster.nodes:
            wait_until_dead(run_dir, node.name)
            remove_memory(run_id, node.name)

    def _disks(self, reference: Path) -> tuple[Mapping[str, Disk], Path]:
        """Returns the disks that faults can fill, and the folder for run directories."""
        if not self.options.kinds & {FaultKind.DISK, FaultKind.SHM}:
            return {}, self.options.out
        sizes = [p.stat().st_size for p in reference.rglob("*") if p.is_file()]
        place = self.options.out / "disk"
        memory = _STATES_ON_DISK * sum(sizes) + SHM_SPARE_BYTES
        disk, shm = own_disks(place, _STATES_ON_DISK * sum(sizes) + _DISK_SPARE_BYTES, memory)
        return {"disk": disk, "shm": shm}, place

    def _one(
        self, number: int, reference: Path, trained: Trained, disks: Mapping[str, Disk], place: Path
    ) -> None:
        options, train = self.options, self.config.train
        command = self._command(place / f"run-{number}", f"run-{number}")
        prepare(reference, command.run_dir)
        source = random.Random(f"{options.seed}/{number}")
        targets = targets_of(self.config, command.run_dir, options.gap_steps, options.processes)
        kinds = targets.possible(options.kinds)
        run = FaultedRun(
            command=command,
            number=number,
            steps=train.steps,
            targets=targets,
            source=random.Random(f"{options.seed}/{number}/instants"),
            disks=disks,
            patience_s=options.patience_s,
            eval_every=train.eval_every or train.steps,
            say=self.say,
        )
        last = draw_last(random.Random(f"{options.seed}/{number}/end"), targets, kinds)
        run.start()
        began_s = time.monotonic()
        try:
            while not self._enough_in(run, began_s):
                if run.near_end or not run.inject(draw(source, targets, kinds)):
                    break
            if last is not None:
                run.inject(last)
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
            self.injected += run.injected
            self._record(run)
        shutil.rmtree(command.run_dir)

    def _enough_in(self, run: FaultedRun, began_s: float) -> bool:
        """Returns whether the campaign has enough faults."""
        options = self.options
        if options.minutes is not None:
            return time.monotonic() - began_s >= 60.0 * options.minutes
        return len(self.injected) + len(run.injected) >= options.faults

    def _command(self, run_dir: Path, name: str) -> TrainCommand:
        return TrainCommand(
            config=self.options.config,
            settings=self.options.settings,
            run_dir=run_dir,
            output=self.options.out / f"{name}.txt",
        )

    def _keep(self, command: TrainCommand, run: FaultedRun) -> Path:
        """Copies the directory, history and output of a failed run; returns the copy."""
        place = self.options.out / f"failed-{run.number}"
        shutil.copytree(command.run_dir, place, dirs_exist_ok=True)
        (place / "history.txt").write_text("\n".join(run.history) + "\n")
        shutil.copy(command.output, place / "output.txt")
        return place

    def _record(self, run: FaultedRun) -> None:
        with (self.options.out / "faults.jsonl").open("a") as file:
            for entry in run.injected:
                file.write(json.dumps(entry.to_dict()) + "\n")


def targets_of(
    config: Config, run_dir: Path, gap_steps: int, processes: Collection[str] = ()
) -> Targets:
    """Returns the processes that faults may target, limited to the kinds in ``processes`` if any.

    Raises:
        ConfigError: the run has no processes of such a kind.
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
        raise ConfigError(f"--processes {given}: this run has {accepted}")
    return Targets(
        names=tuple(n for n in names if not processes or n.partition(".")[0] in processes),
        heartbeat_timeout_s=config.cluster.heartbeat_timeout_s,
        gap_steps=gap_steps,
        evaluates=bool(config.train.eval_every),
        saves=bool(config.train.save_every),
    )


def prepare(source: Path, run_dir: Path) -> None:
    """Makes a new run directory with the prepared model and data of another run.

    Preparing them again would take seconds.
    """
    run_dir.mkdir()
    for name in ("model", "data"):
        shutil.copytree(source / name, run_dir / name)
    shutil.copy(source / "table.json", run_dir / "table.json")
