"""Commands that start training: ``init``, ``config``, ``data``, ``train`` and ``doctor``."""

from __future__ import annotations

import json
import os
import sys
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from penstock.client.cli import (
    Command,
    ConfigArgument,
    JsonOption,
    SetOption,
    begin_to_import,
    errors_explained,
    load,
    one_run,
)
from penstock.client.commands.nodes import GraceOption, StrictOption, strict_setting
from penstock.host.errors import ConfigError
from penstock.host.stopping import interrupted_by_stop_signals

TrainedRunOption = Annotated[
    Path | None,
    typer.Option(
        "--run-dir",
        metavar="DIR",
        help="Same as RUN.",
    ),
]
TrainedRunArgument = Annotated[
    Path | None,
    typer.Argument(
        metavar="RUN",
        help="Directory of the run. Default: run.dir of the configuration.",
        show_default=False,
    ),
]
ExaminedRunOption = Annotated[
    Path | None,
    typer.Option("--run-dir", metavar="DIR", help="Run to examine; goes with CONFIG, too."),
]
RowsOption = Annotated[
    str | None,
    typer.Option(
        "--rows",
        metavar="A:B",
        help="Rows A to B-1 of the first pass, from 0. Default: all with --json, else 0:3.",
        show_default=False,
    ),
]


ModelOption = Annotated[
    Path | None,
    typer.Option("--model", metavar="FOLDER", help="Model folder as the Hub has it, to fine-tune."),
]
DataOption = Annotated[
    str | None,
    typer.Option("--data", metavar="FILE", help="With --model: file, folder or glob of the data."),
]
ExampleOption = Annotated[
    str | None,
    typer.Option(
        "--example",
        metavar="NAME",
        help="Name of the example: tiny, chat, pretrain, emulated or two-machines. Default: tiny.",
        show_default=False,
    ),
]
LoraOption = Annotated[
    bool, typer.Option("--lora", help="With --model: trains adapters (LoRA) alone.")
]
ObjectiveOption = Annotated[
    str | None,
    typer.Option(
        "--objective",
        metavar="NAME",
        help="next-token, dpo, orpo or simpo. Default: dpo for records with chosen and rejected.",
        show_default=False,
    ),
]
EvalOption = Annotated[
    str | None,
    typer.Option("--eval", metavar="FILE", help="Held-out data to evaluate on, in training."),
]
OutputOption = Annotated[
    Path | None,
    typer.Option(
        "--out", metavar="FILE", help="File to write. Default: NAME.yaml in the current folder."
    ),
]


def init(
    model: ModelOption = None,
    data_path: DataOption = None,
    example: ExampleOption = None,
    lora: LoraOption = False,
    objective: ObjectiveOption = None,
    held_out: EvalOption = None,
    output: OutputOption = None,
) -> None:
    """Writes a configuration for a model and data, or an example.

    With --model and --data, prepares the data once and chooses length of rows, batch, passes and
    device; comments give the reasons. No file is overwritten.
    """
    with errors_explained(), interrupted_by_stop_signals():
        from penstock.client.cli import first_commands, write_example

        if model is None and data_path is None:
            if lora or objective or held_out:
                raise ConfigError("penstock init: --model and --data are missing; give both")
            typer.echo(first_commands(write_example(example or "tiny", output)))
            return
        if model is None or data_path is None:
            raise ConfigError("penstock init: --model and --data go together; give both")
        if example is not None:
            raise ConfigError("penstock init: give --example, or --model with --data")
        from penstock.client.planning.starting import Start, write_start
        from penstock.client.views.progress import Working

        start = Start(
            model=model,
            data=data_path,
            output=output,
            lora=lora,
            objective=objective,
            held_out=held_out,
        )
        say = partial(typer.echo, err=True)
        with begin_to_import() as starter, Working("reading", sys.stderr, say) as progress:
            written = write_start(start, progress, starter)
        typer.echo(f"{written} is written; penstock data {written} shows the rows")
        typer.echo(f"start with: penstock train {written}")


def train(
    config: ConfigArgument,
    run: TrainedRunArgument = None,
    settings: SetOption = None,
    run_dir: TrainedRunOption = None,
    grace_seconds: GraceOption = None,
    strict: StrictOption = False,
) -> None:
    """Trains on this machine, or resumes a run.

    Starts every process of the run, shows the progress, and returns at the end of the run.
    """
    with errors_explained(), interrupted_by_stop_signals(), ExitStack() as stack:
        from penstock.client.views.output import forgive_output

        forgive_output()  # first of all: the terminal may be gone while the run is saved
        run_dir = _new_run(one_run(run, run_dir))
        preloading = begin_to_import()
        stack.callback(preloading.close)
        from penstock.client.states import mend_base
        from penstock.daemons.memory.states import refuse_damage
        from penstock.protocol.run.rundir import run_of

        grace = [] if grace_seconds is None else [f"cluster.stop_grace_s={grace_seconds}"]
        resolved = load(config, [*(settings or []), *grace, *strict_setting(strict)])
        moved = any(setting.startswith("run.dir=") for setting in settings or ())
        directory = run_dir or (None if moved else run_of(config)) or resolved.run_dir
        mend_base(directory, lambda line: typer.echo(line, err=True))
        refuse_damage(directory, lambda warning: None)  # before all else is even imported

        from penstock.client.train import run_training
        from penstock.client.views.screen.following import facts_of
        from penstock.client.views.screen.screen import choose_display
        from penstock.daemons.node.joining.rendezvous import check_alone
        from penstock.protocol.wire.control import ControlClient

        advice = check_alone(os.environ)
        if advice is not None:
            sys.stderr.write(f"penstock: {advice}\n")
        display = choose_display(
            facts_of(resolved, directory.absolute(), leaves=False),
            lambda: ControlClient.for_run(directory),
        )
        result = run_training(
            resolved, directory, display, process_ends=True, preloading=preloading
        )
        if result.error:
            sys.stderr.write(f"penstock: {result.error}\n")
    raise typer.Exit(result.exit_code)


def _new_run(run: Path | None) -> Path | None:
    """Returns the directory of a run to train.

    Raises:
        ConfigError: the path is a second configuration.
    """
    if run is not None and (run.is_file() or run.suffix in (".yaml", ".yml")):
        raise ConfigError(f"{run}: expected the directory of the run; give one configuration")
    return run


def data(
    config: ConfigArgument,
    settings: SetOption = None,
    rows: RowsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Shows the training data as the model will see them.

    Prepares the data as penstock train does, in a temporary folder, and trains nothing. Shows
    sizes, cuts and skips, then rows in training order with marks for the tokens that count.
    """
    with errors_explained(), interrupted_by_stop_signals():
        from penstock.client.planning.data_rows import chosen_rows, show_json, show_text

        chosen = chosen_rows(rows)
        show = show_json if as_json else show_text
        show(load(config, settings), chosen)


def explain_keys(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="KEY|SECTION",
            help="Key or section, such as optimizer.lr, lr or optimizer. Default: all keys.",
            show_default=False,
        ),
    ] = None,
    schema: Annotated[
        bool, typer.Option("--json-schema", help="Prints a JSON schema for editors.")
    ] = False,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Prints all keys as Markdown.")
    ] = False,
) -> None:
    """Explains the configuration keys: values, units, defaults.

    Also says which keys may change when a run resumes.
    """
    with errors_explained():
        from penstock.client.cli import terminal_width
        from penstock.client.configuration import describe, json_schema, page

        if sum((name is not None, schema, markdown)) > 1:
            raise ConfigError("penstock config: give a name, --json-schema or --markdown")
        if schema or markdown:
            typer.echo(json_schema() if schema else page(), nl=schema)
        else:
            typer.echo(describe(name, terminal_width()))


def doctor(
    path: Annotated[
        Path | None,
        typer.Argument(
            metavar="CONFIG|RUN",
            help="Configuration to check for enough CPUs and memory on this machine; or directory"
            " of a run to examine. Default: all runs on this machine.",
            show_default=False,
        ),
    ] = None,
    run_dir: ExaminedRunOption = None,
    remove: Annotated[
        bool,
        typer.Option(
            "--clean",
            help="Removes shared memory, sockets, processes and partial saves of dead processes.",
        ),
    ] = False,
    force: Annotated[
        bool,
        typer.Option("--force", help="With --clean: also removes memory that holds unsaved steps."),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Checks this machine, and lists what dead runs left on it.

    Shows software, memory, limits, the placement of processes on CPU cores, and the shared memory
    of runs. With CONFIG, too few CPUs or too little memory end with exit code 2 or 3.
    """
    code = 0
    with errors_explained():
        from penstock.client.capacity import CapacityReport
        from penstock.client.doctor import clean, examine

        if force and not remove:
            raise ConfigError("--force: goes with --clean")
        is_run = path is not None and path.is_dir()
        run_dir = one_run(path if is_run else None, run_dir)
        config = None if is_run else path
        loaded = None if config is None else load(config, None)
        report = examine(run_dir, loaded)
        if config is not None and loaded is not None:
            report = replace(report, capacity=CapacityReport.of(config, loaded))
        if remove:
            report = clean(report, run_dir, force=force)
        typer.echo(json.dumps(report.to_dict(), indent=1) if as_json else report.to_text())
        code = report.exit_code
    raise typer.Exit(code)


def register(app: typer.Typer) -> None:
    """Adds the commands to ``penstock``."""
    app.command(
        epilog="\b\nExamples:\n  penstock init --example chat\n"
        "  penstock init --model models/Qwen3-0.6B-Base --data chats.jsonl --out mine.yaml\n"
        "  penstock init --model models/Qwen3-0.6B --data pairs.jsonl --lora --eval held-out.jsonl"
    )(init)
    app.command(
        cls=Command,
        epilog="The same command resumes a stopped or killed run. Ctrl-C, SIGTERM, SIGUSR1, SIGUSR2"
        " and SIGHUP (unless nohup ignores it) finish the current step and save the state. A second"
        " Ctrl-C kills the processes; the state stays in shared memory for the next start."
        "\n\nExample: penstock train tiny.yaml runs/short --set train.steps=50",
    )(train)
    app.command(
        "config",
        epilog="\b\nExamples:\n  penstock config\n  penstock config train\n"
        "  penstock config optimizer.settle\n"
        "  penstock config --json-schema > penstock.schema.json",
    )(explain_keys)
    app.command(
        cls=Command,
        epilog="A row holds sequence_length tokens: whole samples, or a piece of a text. Tokens"
        " that count in the loss are in colour, or in \u27e6 \u27e7 where the output has no"
        " colours. --json prints a JSON object a line: the summary, then each row with samples,"
        " input_ids, labels (of the same places; -100 does not count), position_ids and"
        " document_ids. Sources, records and rows are numbered from 0."
        "\n\n\b\nExamples:\n  penstock data chat.yaml\n"
        "  penstock data chat.yaml --rows 10:12 --set data.train_on=last\n"
        "  penstock data chat.yaml --json > rows.jsonl",
    )(data)
    app.command(
        epilog="--clean removes nothing of live processes, and prints the content of each entry."
        "\n\n\b\nExamples:\n  penstock doctor tiny.yaml\n"
        "  penstock doctor runs/tiny --clean"
    )(doctor)
