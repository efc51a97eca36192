"""The planning commands: ``plan``, ``simulate``, ``profile`` and ``tune``.

Each only reads its options; what they do is in :mod:`penstock.client.planning` (a configuration),
:mod:`penstock.client.laboratory` (schemes and costs by name), :mod:`penstock.client.profiling` and
:mod:`penstock.client.tuning`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from penstock.client import plan_options as options
from penstock.client.cli import JsonOption, SetOption, errors_explained, load, terminal_width
from penstock.protocol.errors import ConfigError

if TYPE_CHECKING:
    from penstock.client.laboratory import LabReport
    from penstock.client.outputs import Outputs


def plan(
    config: options.OptionalConfig = None,
    settings: SetOption = None,
    scheme: options.SchemeOption = None,
    devices: options.DevicesOption = None,
    micro_batches: options.MicroBatchesOption = None,
    stages_per_device: options.StagesPerDeviceOption = None,
    forward_stages: options.ForwardStagesOption = None,
    backward_stages: options.BackwardStagesOption = None,
    recompute: options.RecomputeOption = None,
    recompute_after: options.RecomputeAfterOption = "gradient",
    drop: options.DropOption = None,
    passes: options.PassesOption = None,
    costs: options.CostsOption = None,
    memory: options.MemoryOption = None,
    optimizer: options.OptimizerOption = "advance",
    as_json: JsonOption = False,
    show: options.ShowOption = None,
    svg: options.SvgOption = None,
    png: options.PngOption = None,
    out: options.PlanFileOption = None,
    list_names: options.ListOption = False,
) -> None:
    """Show a schedule: its picture, times, bubbles, memory, and distance from the best possible.

    Of a configuration (with the memory it needs and the machine has), or of a scheme by name.
    """
    with errors_explained():
        from penstock.client.laboratory import Wish, make_lab_report, names_known
        from penstock.client.outputs import Outputs

        outputs = Outputs(plan=out, svg=svg, png=png)
        if list_names:
            typer.echo(names_known())
            return
        wish = Wish(
            scheme=scheme,
            num_devices=devices,
            num_microbatches=micro_batches,
            stages_per_device=stages_per_device,
            forward_stages=forward_stages,
            backward_stages=backward_stages,
            recompute=options.recompute_mode(recompute),
            recompute_after=options.recompute_after(recompute_after),
            drop=options.names(drop),
            passes=options.names(passes),
            costs=costs,
            optimizer=optimizer,
            memory_limit_bytes=options.size("--memory", memory),
        )
        if config is not None:
            wish.require_nothing()
            _plan_config(config, settings, outputs, as_json, show)
            return
        if settings:
            raise ConfigError("--set changes a configuration; without one there are options")
        report = make_lab_report(wish)
        outputs.write(report.simulation, report.caption)
        _print(report, as_json, show)


def simulate(
    plan_file: options.PlanArgument,
    costs: options.CostsOption = None,
    profile: options.ProfileOption = None,
    memory: options.MemoryOption = None,
    optimizer: options.OptimizerOption = "advance",
    as_json: JsonOption = False,
    show: options.ShowOption = None,
    svg: options.SvgOption = None,
    png: options.PngOption = None,
) -> None:
    """Validate a plan, and show how long it takes and where it waits."""
    with errors_explained():
        from penstock.client.laboratory import Wish, make_simulation_report
        from penstock.client.outputs import Outputs, read_plan

        wish = Wish(
            costs=options.costs_text(costs, profile),
            optimizer=optimizer,
            memory_limit_bytes=options.size("--memory", memory),
        )
        report = make_simulation_report(read_plan(plan_file), wish)
        outputs = Outputs(svg=svg, png=png)
        outputs.write(report.simulation, report.caption)
        _print(report, as_json, show)


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command(epilog=_PLAN_EXAMPLES)(plan)
    app.command(epilog=_SIMULATE_EXAMPLES)(simulate)


_PLAN_EXAMPLES = """\b
Examples:
  penstock plan --list
  penstock plan --scheme 1f1b --devices 4 --micro-batches 8
  penstock plan --scheme chimera --devices 4 --micro-batches 4 --png chimera.png
  penstock plan --scheme 1f1b --recompute full --passes mario --devices 8
      --costs analytic:A100-40:llama2-7b --memory 40G
  penstock plan --scheme spipe --forward-stages 8 --backward-stages 16
      --micro-batches 4 --costs unit:f=1,b=1,r=1 --json
  penstock plan examples/tiny.yaml --set schedule.scheme=1f1b --svg plan.svg

Starts nothing and keeps nothing but the files asked for. An unknown GPU or model
in --costs lists those that are known."""

_SIMULATE_EXAMPLES = """\b
Examples:
  penstock plan --scheme zb-h1 --devices 4 --micro-batches 8 --out plan.json
  penstock simulate plan.json --costs unit:f=1,p1=1,p2=0.5 --svg plan.svg
  penstock simulate runs/tiny/plan.json --profile p.json --json"""


def _plan_config(
    config: Path, settings: list[str] | None, outputs: Outputs, as_json: bool, show: str | None
) -> None:
    from penstock.client.planning import make_report

    instructions = options.shows_instructions(show)
    report = make_report(load(config, settings))
    outputs.write(report.simulation, report.caption)
    if as_json:
        typer.echo(json.dumps(report.to_dict(), indent=1))
    else:
        typer.echo(report.to_text(terminal_width(), instructions=instructions))


def _print(report: LabReport, as_json: bool, show: str | None) -> None:
    instructions = options.shows_instructions(show)
    if as_json:
        typer.echo(json.dumps(report.to_dict()))
    else:
        typer.echo(report.to_text(terminal_width(), instructions=instructions))
