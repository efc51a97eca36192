"""The planning commands: ``plan``, ``simulate``, ``profile``, ``tune`` and ``estimate``.

Each only reads its options; what they do is in :mod:`penstock.client.planning.run_report` (a
configuration), :mod:`penstock.client.planning.plan_command` (schemes and costs by name),
:mod:`penstock.client.planning.profiling`, :mod:`penstock.client.planning.tuning` and
:mod:`penstock.client.planning.estimate`.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

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
from penstock.client.planning import options

if TYPE_CHECKING:
    from penstock.client.planning.outputs import Outputs
    from penstock.client.planning.plan_command import Conditions, PlanReport
    from penstock.client.planning.run_report import RunReport


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
    gpu: options.GpuOption = None,
    host_memory: options.HostMemoryOption = None,
    shm: options.ShmOption = None,
    optimizer: options.OptimizerOption = "advance",
    as_json: JsonOption = False,
    show: options.ShowOption = None,
    search: options.SearchOption = None,
    svg: options.SvgOption = None,
    png: options.PngOption = None,
    out: options.PlanFileOption = None,
    torch_csv: options.TorchOption = None,
    _list_names: options.ListOption = False,
) -> None:
    """Shows the schedule of a configuration or of a named scheme.

    Shows a picture, step time, bubbles, memory and the distance from a lower bound.
    """
    with errors_explained():
        from penstock.client.planning import outputs, plan_command, run_report

        request: dict[str, Any] = {
            "scheme": scheme,
            "num_devices": devices,
            "num_microbatches": micro_batches,
            "stages_per_device": stages_per_device,
            "forward_stages": forward_stages,
            "backward_stages": backward_stages,
            "recompute": options.recompute_mode(recompute),
            "drop": options.names(drop),
            "passes": options.names(passes),
        }
        report: PlanReport | RunReport
        if config is not None:
            options.require_nothing({**request, "memory": memory})
            machine = options.machine_options(gpu, None, host_memory, shm)
            profiled = options.profile_path(costs)
            report = run_report.make_run_report(load(config, settings), profiled, machine)
        else:
            options.require_no_configuration(settings, gpu, host_memory, shm)
            request["recompute_after"] = options.recompute_after(recompute_after)
            conditions = _conditions(costs, optimizer, memory, search)
            report = plan_command.make_plan_report(plan_command.request_of(**request), conditions)
        files = outputs.Outputs(plan=out, svg=svg, png=png, torch_csv=torch_csv)
        _finish(report, files, as_json, show)


def simulate(
    plan_file: options.PlanArgument,
    costs: options.CostsOption = None,
    profile: options.ProfileOption = None,
    passes: options.PassesOption = None,
    memory: options.MemoryOption = None,
    optimizer: options.OptimizerOption = "advance",
    as_json: JsonOption = False,
    show: options.ShowOption = None,
    search: options.SearchOption = None,
    svg: options.SvgOption = None,
    png: options.PngOption = None,
    out: options.PlanFileOption = None,
    torch_csv: options.TorchOption = None,
) -> None:
    """Validates a plan and simulates its step time.

    Shows where devices wait. --passes improves the plan first.
    """
    with errors_explained():
        from penstock.client.planning.outputs import Outputs
        from penstock.client.planning.plan_command import make_simulation_report

        conditions = _conditions(options.costs_text(costs, profile), optimizer, memory, search)
        report = make_simulation_report(plan_file, options.names(passes), conditions)
        outputs = Outputs(plan=out, svg=svg, png=png, torch_csv=torch_csv)
        _finish(report, outputs, as_json, show)


def profile(
    config: ConfigArgument,
    out: options.ProfileFileOption,
    settings: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measures the costs of a model on this machine."""
    with errors_explained():
        from penstock.client.planning.profiling import measure, summary
        from penstock.client.views.console import Console

        console = Console(stderr=True)
        with console.status("starting") as status:
            measured = measure(config, tuple(settings or ()), out, status.update)
        if as_json:
            typer.echo(out.read_text(encoding="utf-8"))
        else:
            typer.echo(summary(measured, out))


def tune(
    config: options.TunedArgument = None,
    settings: SetOption = None,
    model: options.ModelOption = None,
    gpu: options.GpuOption = None,
    workers: options.WorkersOption = 1,
    workers_per_node: options.WorkersPerNodeOption = 8,
    global_batch: options.GlobalBatchOption = None,
    sequence_length: options.SequenceLengthOption = None,
    dtype: options.DtypeOption = None,
    schemes: options.SchemesOption = None,
    drop: options.TuneDropOption = None,
    device_memory: options.DeviceMemoryOption = None,
    host_memory: options.HostMemoryOption = None,
    shm: options.ShmOption = None,
    costs: options.CostsOption = None,
    optimizer: options.OptimizerOption = "advance",
    everything: options.EverythingOption = False,
    keep: options.KeepOption = 20,
    as_json: JsonOption = False,
    out: options.TunedFileOption = None,
) -> None:
    """Searches for the fastest schedule that fits in memory.

    Varies scheme, stages, micro-batches, recomputation and passes.
    """
    with errors_explained():
        from penstock.client.planning import tuning
        from penstock.client.planning.described import Description

        tune_options = tuning.TuneOptions(
            machine=options.machine_options(gpu, device_memory, host_memory, shm),
            schemes=options.names(schemes),
            drop=options.names(drop),
            profile=options.profile_path(costs),
            optimizer=options.optimizer_name(optimizer),
            everything=everything,
            keep=keep,
        )
        with tuning.searching() as advance:
            if config is not None:
                report = tuning.tune_config(load(config, settings), tune_options, advance)
            else:
                named = Description(
                    model=options.required_model(model),
                    machine=tune_options.machine,
                    workers=workers,
                    workers_per_node=workers_per_node,
                    sequence_length=sequence_length,
                    global_batch=global_batch,
                    dtype=dtype,
                    settings=tuple(settings or ()),
                )
                report = tuning.tune_model(named, tune_options, advance)
        tuning.write_tuned(report, out, config, tuple(settings or ()))
        if as_json:
            typer.echo(tuning.to_json(report))
        else:
            report.show(max(120, terminal_width()))


def estimate(
    model: options.ModelArgument,
    workers: options.WorkersOption = 1,
    workers_per_node: options.WorkersPerNodeOption = 8,
    sequence_length: options.SequenceLengthOption = None,
    micro_batch: options.MicroBatchOption = None,
    global_batch: options.GlobalBatchOption = None,
    dtype: options.DtypeOption = None,
    gpu: options.GpuOption = None,
    device_memory: options.DeviceMemoryOption = None,
    host_memory: options.HostMemoryOption = None,
    shm: options.ShmOption = None,
    profile: options.MeasuredOption = None,
    settings: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Estimates memory, disk space and step time of a model, and says whether it fits.

    Reads config.json of a Hugging Face model. Needs no weights, no data and no GPU. Plans for this
    machine, or for the one that --gpu, --host-memory and --shm describe.
    """
    with errors_explained():
        from penstock.client.planning.described import Description
        from penstock.client.planning.estimate import estimate as make_estimate
        from penstock.client.planning.tuning import searching

        described = Description(
            model=model,
            machine=options.machine_options(gpu, device_memory, host_memory, shm),
            workers=workers,
            workers_per_node=workers_per_node,
            sequence_length=sequence_length,
            micro_batch=micro_batch,
            global_batch=global_batch,
            dtype=dtype,
            profile=profile,
            settings=tuple(settings or ()),
        )
        with searching() as advance:
            report = make_estimate(described, advance)
        typer.echo(json.dumps(report.to_dict(), indent=1) if as_json else report.to_text())


def register(app: typer.Typer) -> None:
    """Adds the commands to ``penstock``."""
    app.command(cls=Command, epilog=_PLAN_EXAMPLES)(plan)
    app.command(epilog=_SIMULATE_EXAMPLES)(simulate)
    app.command(cls=Command, epilog=_PROFILE_EXAMPLES)(profile)
    app.command(cls=Command, epilog=_TUNE_EXAMPLES)(tune)
    app.command(cls=Command, epilog=_ESTIMATE_EXAMPLES)(estimate)


_PLAN_EXAMPLES = """\b
Examples:
  penstock plan --list
  penstock plan --scheme 1f1b --devices 4 --micro-batches 8
  penstock plan --scheme chimera --devices 4 --micro-batches 4 --png chimera.png
  penstock plan --scheme hanayo --devices 4 --micro-batches 8 --search 10
  penstock plan --scheme 1f1b --recompute full --passes mario --devices 8
      --costs analytic:A100-40:llama2-7b --memory 40G
  penstock plan --scheme spipe --forward-stages 8 --backward-stages 16
      --micro-batches 4 --costs unit:f=1,b=1,r=1 --json
  penstock plan examples/tiny.yaml --set schedule.scheme=1f1b --svg plan.svg

Starts no process of a run, and writes only the named files."""

_SIMULATE_EXAMPLES = """\b
Examples:
  penstock plan --scheme zb-h1 --devices 4 --micro-batches 8 --out plan.json
  penstock simulate plan.json --costs unit:f=1,p1=1,p2=0.5 --svg plan.svg
  penstock simulate runs/tiny/plan.json --profile p.json --json
  penstock simulate actions.csv --passes 2bp --out better.json"""

_PROFILE_EXAMPLES = """\b
Examples:
  penstock profile examples/tiny.yaml --out p.json
  penstock plan examples/tiny.yaml --costs p.json
  penstock tune examples/tiny.yaml --costs p.json

Runs each kind of block, the copies and the passes of the optimizer in turn.
Keep the machine idle during the measurement. Nothing is trained."""

_ESTIMATE_EXAMPLES = """\b
Examples:
  penstock estimate models/Qwen3-0.6B-Base
  penstock estimate llama2-7b --gpu RTX4090 --host-memory 128G
  penstock estimate models/Qwen3-0.6B-Base/config.json --gpu H100
      --sequence-length 4096 --global-batch 16 --micro-batch 2
  penstock estimate models/Qwen3-0.6B-Base --set optimizer.master=split --json

--set sets keys that have no option; all other keys have their defaults. The last line
says whether the run fits. The keys above it make the same plan in penstock train."""

_TUNE_EXAMPLES = """\b
Examples:
  penstock tune examples/tiny.yaml --out tuned.yaml
  penstock tune --model llama2-7b --gpu A100-40 --workers 8 --global-batch 64
  penstock tune --model gpt3-13b --gpu V100-32 --workers 4 --global-batch 16
      --host-memory 500G --schemes mobius,spipe --json

Simulates a grid of schedules, without those that cannot fit or cannot be faster
than the last row shown. Then tries passes on the fastest. --out writes CONFIG with
the keys of the fastest schedule, for penstock train; with --model, only the keys."""


def _conditions(
    costs: str | None, optimizer: str, memory: str | None, search_s: float | None
) -> Conditions:
    """Returns the conditions that the options of a command name.

    Raises:
        ConfigError: no such optimizer, or no size.
    """
    from penstock.client.planning.plan_command import Conditions

    return Conditions(
        costs=costs or "unit",
        optimizer=options.optimizer_name(optimizer),
        memory_limit_bytes=options.size("--memory", memory),
        search_s=search_s,
    )


def _finish(
    report: PlanReport | RunReport, outputs: Outputs, as_json: bool, show: str | None
) -> None:
    """Writes the files that were asked for, and prints the report."""
    outputs.write(report.simulation, report.caption)
    instructions = options.shows_instructions(show)
    if as_json:
        typer.echo(json.dumps(report.to_dict()))
    else:
        typer.echo(report.to_text(terminal_width(), instructions=instructions))
