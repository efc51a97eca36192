"""Commands for saved states: ``snapshots``, ``rollback``, ``export``, ``generate``, ``eval``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from penstock.client.cli import JsonOption, errors_explained, exchange_errors_explained
from penstock.host.errors import ConfigError
from penstock.host.stopping import interrupted_by_stop_signals


def snapshots(
    run: Annotated[
        Path, typer.Argument(metavar="RUN_DIR", help="Directory of the run, such as runs/tiny.")
    ],
    action: Annotated[
        str, typer.Argument(help="Action: list, verify (reads every byte), or delete.")
    ] = "list",
    steps: Annotated[
        list[int] | None,
        typer.Argument(
            metavar="[STEP]...", help="Saved steps. Default: all; delete needs at least one."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Lists, verifies or deletes the saved states of a run.

    A damaged state ends with exit code 2.
    """
    damaged = False
    with errors_explained():
        from penstock.client import states

        if action not in ("list", "verify", "delete"):
            raise ConfigError(f"{action!r}: expected list, verify or delete")
        every_byte = action == "verify"
        if every_byte:
            states.mend_base(run, lambda line: typer.echo(line, err=True), every_byte=True)
        if action == "delete":
            reports = states.delete_states(run, steps or ())
        else:
            reports = states.report_states(run, steps or (), every_byte=every_byte)
        text = states.to_text(reports, every_byte=every_byte)
        typer.echo(json.dumps(states.to_dicts(reports), indent=1) if as_json else text)
        damaged = action != "delete" and any(report.damage for report in reports)
    raise typer.Exit(2 if damaged else 0)


def rollback(
    run: Annotated[
        Path, typer.Argument(metavar="RUN_DIR", help="Directory of the run, such as runs/tiny.")
    ],
    to: Annotated[
        int,
        typer.Option(
            "--to", metavar="STEP", help="Saved step to go back to; penstock snapshots lists them."
        ),
    ],
    delete: Annotated[
        bool,
        typer.Option(
            "--delete", help="Deletes newer states. Default: moves them to RUN_DIR/state/aside."
        ),
    ] = False,
) -> None:
    """Sets a stopped run back to a saved step.

    The next start continues from that step, with the bytes that were saved.
    """
    with errors_explained():
        from penstock.client import states

        aside = states.rollback(run, to, delete=delete)
        kept = "" if aside is None else f"; newer states, journal and metrics are in {aside}"
        typer.echo(f"{run}: the next start resumes from step {to}{kept}")


NamesOption = Annotated[
    str,
    typer.Option(
        metavar="TRAINER",
        help="Names and order of rows of --format dcp: transformers, or torchtitan for its llama3"
        " and qwen3.",
    ),
]


def export(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="Directory of the run, such as runs/tiny.")
    ],
    output: Annotated[
        Path, typer.Argument(metavar="OUT", help="Directory to write; must not exist or be empty.")
    ],
    form: Annotated[
        str,
        typer.Option(
            "--format",
            metavar="FORMAT",
            help="hf: a Hugging Face model, with a run's adapter merged into its weights. peft: the"
            " adapter alone, in the files of PEFT. dcp: weights and optimizer for"
            " torch.distributed.checkpoint. universal: weights and Adam's state for DeepSpeed.",
        ),
    ] = "hf",
    step: Annotated[
        int | None, typer.Option(metavar="STEP", help="Saved step. Default: the newest.")
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="TYPE",
            help="Type of the weights: fp32, bf16 or fp16. Default: model.dtype for hf, else fp32."
            " The optimizer's state is in fp32.",
        ),
    ] = None,
    names: NamesOption = "transformers",
    whole: Annotated[
        bool,
        typer.Option(
            "--whole",
            help="Also writes the untrained parts of a multimodal model.",
        ),
    ] = False,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify", help="Reads the files back, and compares every tensor with the state."
        ),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Lists the tensors, and writes nothing.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Writes a saved state as a Hugging Face model directory, its adapter alone, or weights and
    optimizer for another trainer.
    """
    with exchange_errors_explained(as_json), interrupted_by_stop_signals():
        from penstock.client import export as exports

        options = exports.ExportOptions(
            form=form, dtype=dtype, whole=whole, verify=verify, dry_run=dry_run, names=names
        )
        report = exports.export(run, output, step, options)
        typer.echo(json.dumps(report, indent=1) if as_json else exports.to_text(report))


def weights(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="Directory of the active run, such as runs/tiny.")
    ],
    to: Annotated[
        Path,
        typer.Option(
            "--to",
            metavar="DIR",
            help="Folder to write: new, empty, or an older copy, which is replaced at once.",
        ),
    ],
    latest: Annotated[
        bool, typer.Option("--latest", help="Copies the newest committed step. Needed.")
    ] = False,
    form: Annotated[
        str, typer.Option("--format", metavar="FORMAT", help="hf or peft, as of penstock export.")
    ] = "hf",
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="TYPE",
            help="Type of the tensors: fp32, bf16 or fp16. Default: model.dtype; fp32 for peft.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Copies the weights of a run that trains into a folder for transformers or vLLM.

    Training goes on. The folder has one committed step, also after a kill.
    """
    with errors_explained(), interrupted_by_stop_signals():
        from penstock.client.export import ExportOptions
        from penstock.client.weights.copying import copy_latest

        if not latest:
            raise ConfigError("give --latest; penstock export writes an older, saved step")
        copy = copy_latest(run, to, ExportOptions(form=form, dtype=dtype))
        typer.echo(json.dumps(copy.to_dict(), indent=1) if as_json else copy.to_text(run))


ModelArgument = Annotated[
    Path,
    typer.Argument(
        metavar="RUN|FOLDER",
        help="Directory of a run with a saved state, or a Hugging Face folder such as an export.",
    ),
]
StepOption = Annotated[
    int | None, typer.Option(metavar="STEP", help="Saved step of the run. Default: the newest.")
]


def generate(
    model: ModelArgument,
    max_new: Annotated[
        int,
        typer.Option(
            "--max-new",
            metavar="N",
            help="Most tokens to generate; text that ends earlier has fewer.",
        ),
    ] = 256,
    prompt: Annotated[
        str | None, typer.Option("--prompt", metavar="TEXT", help="Text to continue.")
    ] = None,
    messages: Annotated[
        Path | None,
        typer.Option(
            "--messages",
            metavar="FILE",
            help="JSON file with messages to answer. The run's chat template renders them.",
        ),
    ] = None,
    temperature: Annotated[
        float,
        typer.Option(metavar="T", help="Temperature of the drawn tokens; 0: the likeliest ones."),
    ] = 0.0,
    seed: Annotated[int, typer.Option(metavar="S", help="Seed of the drawn tokens.")] = 0,
    step: StepOption = None,
    as_json: JsonOption = False,
) -> None:
    """Generates text with a saved state or a model folder.

    transformers computes, on the first GPU if it has room for the model, else on the host.
    """
    with errors_explained(), interrupted_by_stop_signals():
        from penstock.client.inference import tools

        request = tools.GenerationRequest(
            prompt=prompt, messages=messages, max_new=max_new, temperature=temperature, seed=seed
        )
        result = tools.generate(model, step, request, _say, _ignore if as_json else _write)
        typer.echo(tools.to_json(result) if as_json else "")


def evaluate(
    model: ModelArgument,
    data: Annotated[
        str,
        typer.Option("--data", metavar="FILE", help="File, folder or glob, as data.path takes it."),
    ],
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            metavar="FILE",
            help="Configuration that says how data are read, for a folder. Default: all defaults.",
        ),
    ] = None,
    step: StepOption = None,
    as_json: JsonOption = False,
) -> None:
    """Computes the loss of a saved state or a model folder on data.

    Makes rows of the file as the run's training does. The model computes on the first GPU if it has
    room, else on the host, by transformers.
    """
    with errors_explained(), interrupted_by_stop_signals():
        from penstock.client.inference import tools

        result = tools.evaluate(model, step, data, config, _say)
        typer.echo(tools.to_json(result) if as_json else tools.to_text(result))


def _say(message: str) -> None:
    typer.echo(message, err=True)


def _write(piece: str) -> None:
    typer.echo(piece, nl=False)


def _ignore(piece: str) -> None:
    """Drops a piece of text that the result holds, too."""


def register(app: typer.Typer) -> None:
    """Adds the commands to ``penstock``."""
    app.command(epilog="Example: penstock snapshots runs/tiny verify 400 800")(snapshots)
    app.command(epilog="Example: penstock rollback runs/tiny --to 400")(rollback)
    app.command(
        epilog="\b\nExamples:\n  penstock export runs/tiny --format hf tiny-hf\n"
        "  penstock export runs/tiny tiny-dcp --format dcp --verify"
    )(export)
    app.command(epilog="Example: penstock weights runs/tiny --latest --to tiny-now")(weights)
    app.command(
        epilog="\b\nExamples:\n  penstock generate runs/tiny --prompt 'def '\n"
        "  penstock generate mine-hf --messages chat.json --temperature 0.7 --max-new 500"
    )(generate)
    app.command(
        "eval",
        epilog="\b\nExamples:\n  penstock eval runs/mine --data held-out.jsonl\n"
        "  penstock eval mine-hf --data held-out.jsonl --config mine.yaml --json",
    )(evaluate)
