"""``penstock data``: the rows of the first pass, as the model will see them.

The data are prepared in a temporary folder, which is removed at the end. Two processes of their own
prepare the data and read the rows.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import typer

from penstock.client.views.output import KEPT, behind
from penstock.client.views.progress import Working
from penstock.config.schema import Config
from penstock.daemons.node.preparing.fitting.emulated import write_model
from penstock.daemons.node.preparing.hub import TOKENIZER, fetched_config
from penstock.daemons.node.preparing.places import with_absolute_paths
from penstock.daemons.node.preparing.prepare import check_early
from penstock.daemons.node.preparing.tool import run_tool
from penstock.daemons.preload.starting import Starter
from penstock.host.errors import ConfigError
from penstock.host.files import write_atomically
from penstock.host.limits.scratch import scratch_folder
from penstock.host.trust import printable
from penstock.planner.cost.emulation import Emulation
from penstock.protocol.plan.positions import position_warning
from penstock.protocol.run.data_size import CUTS, epochs
from penstock.protocol.run.rundir import RunDirectory

_SHOWN_ROWS = 3
_OPEN, _CLOSE = "\u27e6", "\u27e7"


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRange:
    """The rows ``first`` to ``end - 1`` of the first pass; ``end`` None: all from ``first`` on."""

    first: int = 0
    end: int | None = None


def chosen_rows(text: str | None) -> RowRange | None:
    """Returns the rows that ``--rows`` names; None where it is not given.

    Raises:
        ConfigError: the text names no rows.
    """
    if text is None:
        return None
    match = re.fullmatch(r"(\d*):(\d*)", text)
    if match is None:
        raise ConfigError(f"--rows {text!r}: give rows as A:B, such as 0:10, 5: or :3")
    first, end = (int(number) if number else None for number in match.groups())
    if end is not None and end <= (first or 0):
        raise ConfigError(f"--rows {text!r}: has no rows; B must be greater than A")
    return RowRange(first=first or 0, end=end)


def show_json(config: Config, rows: RowRange | None) -> None:
    """Prints the summary and the rows as JSON lines.

    Raises:
        PenstockError: the data cannot be prepared.
    """
    read_rows(config, rows or RowRange(), typer.echo)


def show_text(config: Config, rows: RowRange | None) -> None:
    """Prints the summary and the rows for people.

    Raises:
        PenstockError: the data cannot be prepared.
    """
    in_colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    out = behind(sys.stdout)  # all texts of the lines are escaped one by one
    sources: list[Mapping[str, Any]] = []

    def show(line: str) -> None:
        fields = json.loads(line)
        if sources:
            typer.echo("\n".join(_row_lines(fields, sources, in_colour=in_colour)), out)
            return
        sources.extend(fields["sources"])
        typer.echo("\n".join(_summary_lines(fields, config, in_colour=in_colour)), out)

    with Working("preparing the data", sys.stderr, _say) as progress:

        def take(line: str) -> None:
            progress.close()  # the rows go to the same terminal
            show(line)

        read_rows(config, rows or RowRange(end=_SHOWN_ROWS), take, "--text", progress=progress)


def _say(line: str) -> None:
    typer.echo(line, err=True)


def read_rows(
    config: Config,
    rows: RowRange,
    take: Callable[[str], None],
    *options: str,
    progress: Callable[[str], None] = _say,
    starter: Starter | None = None,
) -> None:
    """Prepares the data, and gives ``take`` each line about them. ``progress`` gets the messages of
    the preparation. ``starter`` starts the processes; None spawns them.

    Raises:
        PenstockError: the data cannot be prepared.
    """
    if (warning := position_warning(config)) is not None:
        progress(warning)
    silence_s = config.cluster.heartbeat_timeout_s
    end = () if rows.end is None else ("--end", str(rows.end))
    with scratch_folder("data") as run_dir:
        RunDirectory.create(run_dir)
        config = with_absolute_paths(fetched_config(config, progress, model=TOKENIZER))
        write_atomically(run_dir / "resolved.yaml", config.to_yaml())
        if config.cluster.platform.builtin_model:
            write_model(Emulation.of(config), run_dir)
        check_early(config, run_dir)
        run_tool(
            "penstock.models.prepare",
            str(run_dir),
            "--data-only",
            progress=progress,
            silence_s=silence_s,
            starter=starter,
        )
        try:
            run_tool(
                "penstock.workers.first_pass",
                *(str(run_dir), "--first", str(rows.first), *end, *options),
                progress=take,
                silence_s=silence_s,
                starter=starter,
            )
        except BrokenPipeError:
            # A reader such as head needs no more; the last flush must not fail, either.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _summary_lines(summary: Mapping[str, Any], config: Config, *, in_colour: bool) -> Iterator[str]:
    records, lengths, steps = summary["records"], summary["lengths"], summary["steps"]
    if records is not None:
        cuts = [f"{words}: {summary[name]:,}" for name, words in CUTS.items() if summary[name]]
        yield f"records  {records:,}, {summary['duplicates']:,} duplicates"
        yield f"samples  {summary['samples']:,}; {', '.join(cuts) or 'none cut or left out'}"
        yield "lengths  " + ", ".join(f"{name} {value:,}" for name, value in lengths.items())
    yield (
        f"rows     {summary['rows']:,} of {config.data.sequence_length:,} tokens,"
        f" {summary['padding_share']:.1%} padding"
    )
    yield (
        f"tokens   {summary['tokens']:,}, {summary['counted_tokens']:,}"
        f" ({summary['counted_tokens'] / summary['tokens']:.1%}) count in the loss"
    )
    passes = epochs(steps * config.train.global_batch / summary["rows_per_epoch"])
    yield f"steps    {steps:,} of {config.train.global_batch} rows: {passes} epochs"
    for source in summary["sources"]:
        name, path = printable(source["source"]), printable(source["path"])
        yield f"source   {name}: {path}, {source['samples']:,} samples"
    marks = _span("tokens that count", in_colour=in_colour)
    yield f"\nRows in training order; {marks} are {'in colour' if in_colour else 'in brackets'}."


def _row_lines(
    row: Mapping[str, Any], sources: list[Mapping[str, Any]], *, in_colour: bool
) -> Iterator[str]:
    samples = row["samples"]
    size = sum(sample["tokens"] for sample in samples)
    yield f"\nrow {row['row']}: {size:,} tokens, {len(samples)} sample{'s' * (len(samples) > 1)}"
    for sample, spans in zip(samples, row["spans"], strict=True):
        path, record = sources[sample["source"]]["path"], sample["record"]
        place = path if record is None else f"{path}, record {record}"
        yield f"-- {printable(place)}: {sample['tokens']:,} tokens"
        yield "".join(
            _span(text, in_colour=in_colour) if counts else printable(text, KEPT)
            for counts, text in spans
        )


def _span(text: str, *, in_colour: bool) -> str:
    """Returns the text of tokens that count."""
    if in_colour:
        return typer.style(printable(text, KEPT), fg=typer.colors.GREEN, bold=True)
    return f"{_OPEN}{printable(text, KEPT)}{_CLOSE}"
