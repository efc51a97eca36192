"""The command ``penstock chaos``."""

from __future__ import annotations

import json
import random
import shlex
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.client.cli import (
    Command,
    ConfigArgument,
    JsonOption,
    SetOption,
    errors_explained,
    load,
    terminal_width,
)
from penstock.host.errors import ConfigError, ExitCode, PenstockError

if TYPE_CHECKING:
    from penstock.chaos.campaign import Campaign, CampaignOptions
    from penstock.chaos.faults import FaultKind
    from penstock.config.schema import Config

WIDTH = 120
PATIENCE_S = 300.0
MOST_GAP_STEPS = 10


FaultsOption = Annotated[int, typer.Option(metavar="N", min=1, help="Number of faults to inject.")]
MinutesOption = Annotated[
    float | None,
    typer.Option(metavar="M", min=0.0, help="Minutes to inject faults for, instead of --faults."),
]
SeedOption = Annotated[
    int | None,
    typer.Option(
        metavar="S", help="Seed of the random faults; the same seed draws the same faults."
    ),
]
KindsOption = Annotated[
    str | None,
    typer.Option(
        metavar="A,B",
        help="Kinds of faults: kill, several, recovery, sweep, pause, stop, term, closed,"
        " half-open, disk, shm, second, lost. Default: all that this user may inject and that"
        " cost no step. See penstock docs CHAOS.",
    ),
]
ProcessesOption = Annotated[
    str | None,
    typer.Option(
        metavar="A,B",
        help="Kinds of processes to fault: worker, memoryd, optimizerd, schedulerd, node,"
        " train … Default: all.",
    ),
]
RunOption = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, help="Number of the only run of --seed to repeat."),
]
GapOption = Annotated[
    int | None,
    typer.Option(
        metavar="STEPS",
        min=0,
        help="Largest number of steps between two faults. Default: a 40th of train.steps, at"
        " most 10.",
    ),
]
PatienceOption = Annotated[
    float,
    typer.Option(
        metavar="SECONDS", min=1.0, help="Seconds without a step after which a run has hung."
    ),
]
ReferenceOption = Annotated[
    Path | None,
    typer.Option(
        metavar="RUN",
        help="Directory of a finished run of the same configuration, to compare with. Default:"
        " a new run without faults.",
    ),
]
OutOption = Annotated[
    Path, typer.Option("--out", metavar="DIR", help="New directory for the runs.")
]


def chaos(
    config: ConfigArgument,
    settings: SetOption = None,
    faults: FaultsOption = 100,
    minutes: MinutesOption = None,
    seed: SeedOption = None,
    kinds: KindsOption = None,
    processes: ProcessesOption = None,
    run: RunOption = None,
    gap: GapOption = None,
    patience: PatienceOption = PATIENCE_S,
    reference: ReferenceOption = None,
    out: OutOption = Path("chaos"),
    as_json: JsonOption = False,
) -> None:
    """Trains with injected faults, and compares every byte.

    Kills and stops processes, closes connections and fills disks. The bytes must equal those of a
    run without faults.
    """
    code = 0
    with errors_explained():
        from penstock.chaos.campaign import Campaign, CampaignOptions

        loaded = load(config, settings)
        chosen = _seed() if seed is None else seed
        options = CampaignOptions(
            config=config,
            settings=tuple(settings or ()),
            kinds=_kinds(kinds, loaded),
            processes=_names(processes),
            seed=chosen,
            faults=faults,
            minutes=minutes,
            run=run,
            gap_steps=min(MOST_GAP_STEPS, loaded.train.steps // 40) if gap is None else gap,
            patience_s=patience,
            finished=reference,
            out=out.absolute(),
        )
        code = _run(Campaign(options=options, config=loaded, say=_say), as_json=as_json)
    raise typer.Exit(code)


class InterruptedCampaignError(PenstockError):
    """Ctrl-C or SIGTERM interrupted the campaign. Exit code 130."""

    exit_code = ExitCode.INTERRUPTED


def _run(campaign: Campaign, *, as_json: bool) -> int:
    """Runs a campaign and shows its faults, also after a failure; returns the exit code.

    Raises:
        ConfigError: the run has no such processes, or the directory exists.
    """
    from penstock.chaos.campaign import targets_of

    options = campaign.options
    targets_of(campaign.config, options.out, options.gap_steps, options.processes)
    _make(options.out)
    failure: PenstockError | None = None
    began_s = time.monotonic()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the runs end with this process
    try:
        campaign.carry_out()
    except PenstockError as error:
        failure = error
    except KeyboardInterrupt:
        failure = InterruptedCampaignError("interrupted; the current run was not checked")
    _show(campaign, failure, time.monotonic() - began_s, as_json=as_json)
    if failure is None:
        return 0
    replay = _replay(options)
    sys.stderr.write(f"penstock: {failure}\nreplay: {replay}\n")
    return int(failure.exit_code)


def _show(
    campaign: Campaign, failure: PenstockError | None, seconds: float, *, as_json: bool
) -> None:
    from penstock.chaos.table import tables_of
    from penstock.client.views.console import Console

    entries = [entry.to_dict() for entry in campaign.injected]
    actions = sum(len(entry["strikes"]) for entry in entries)
    if as_json:
        report = {
            "seed": campaign.options.seed,
            "seconds": round(seconds, 1),
            "undisturbed_seconds": campaign.undisturbed_s,
            "blows": actions,
            "failure": None if failure is None else str(failure),
            "faults": entries,
        }
        typer.echo(json.dumps(report))
        return
    console = Console(width=max(WIDTH, terminal_width()))
    for table in tables_of(entries):
        console.print(table, "")
    verdict = "equal bytes, no step lost or repeated, nothing left over"
    if failure is not None:
        interrupted = failure.exit_code is ExitCode.INTERRUPTED
        verdict = "interrupted" if interrupted else "failed"
    typer.echo(
        f"{len(entries)} faults ({actions} actions) in {seconds:.0f} s, seed"
        f" {campaign.options.seed}: {verdict}"
    )


def _replay(options: CampaignOptions) -> str:
    words = ["penstock", "chaos", str(options.config), "--seed", str(options.seed)]
    words += [word for setting in options.settings for word in ("--set", setting)]
    words += ["--kinds", ",".join(sorted(options.kinds)), "--gap", str(options.gap_steps)]
    words += ["--processes", ",".join(sorted(options.processes))] if options.processes else []
    words += (
        ["--faults", str(options.faults)] if options.run is None else ["--run", str(options.run)]
    )
    return shlex.join([*words, "--out", f"{options.out}-again"])


def _kinds(words: str | None, config: Config) -> frozenset[FaultKind]:
    """Returns the chosen kinds of faults. Default: all that this user may inject and that lose no
    step.
    """
    from penstock.chaos.disks import may_mount
    from penstock.chaos.faults import FaultKind

    mounted = frozenset((FaultKind.DISK, FaultKind.SHM))
    if words is None:
        kinds = frozenset(FaultKind)
        if not may_mount():
            _say("without disk and shm: only root may mount private file systems")
            kinds -= mounted
        return kinds if config.mirrors else kinds - {FaultKind.LOST}
    try:
        return frozenset(FaultKind(word.strip()) for word in words.split(","))
    except ValueError as error:
        raise ConfigError(f"--kinds {words}: accepted are {', '.join(FaultKind)}") from error


def _names(words: str | None) -> frozenset[str]:
    return frozenset(word.strip() for word in words.split(",")) if words else frozenset()


def _make(out: Path) -> None:
    try:
        out.mkdir(parents=True)
    except FileExistsError as error:
        raise ConfigError(f"--out {out}: exists; name another directory") from error
    except OSError as error:
        raise ConfigError(f"--out {out}: cannot make it: {error.strerror}") from error


def _seed() -> int:
    return random.SystemRandom().randrange(10**6)


def _say(words: str) -> None:
    sys.stderr.write(f"{words}\n")


def register(app: typer.Typer) -> None:
    """Adds the command to ``penstock``."""
    app.command(
        cls=Command,
        epilog="Exit codes: 0 the bytes of all runs are equal; 4 a run differs or hangs. That run"
        " is kept, and the command that repeats it is printed. Example: penstock chaos tiny.yaml"
        " --faults 50 --set train.steps=200",
    )(chaos)
