"""Options of the planning commands: what they are called, and what their values mean."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Literal, cast, get_args

import typer

from penstock.host.errors import ConfigError
from penstock.protocol.plan.instructions import RecomputeAfter

if TYPE_CHECKING:
    from penstock.client.planning.described import MachineOptions

RecomputeMode = Literal["none", "full", "selective"]

OptionalConfig = Annotated[
    Path | None,
    typer.Argument(metavar="[CONFIG.yaml]", help="Configuration file. Without one, give --scheme."),
]
TunedArgument = Annotated[
    Path | None,
    typer.Argument(
        metavar="[CONFIG.yaml]", help="Configuration file. Without one, give --model and --gpu."
    ),
]
PlanArgument = Annotated[
    Path,
    typer.Argument(
        metavar="PLAN.json|ACTIONS.csv",
        help="Plan from plan --out or plan --torch-csv, or action text of torch.",
    ),
]


def _small(text: str | None) -> str | None:
    """Returns names of schemes in small letters; people write 1F1B."""
    return None if text is None else text.lower()


SchemeOption = Annotated[
    str | None,
    typer.Option(
        "--scheme",
        metavar="NAME",
        callback=_small,
        help="Name of the scheme; penstock plan --list shows all.",
    ),
]
DevicesOption = Annotated[
    int | None, typer.Option("--devices", metavar="P", min=1, help="Number of devices. Default: 4.")
]
MicroBatchesOption = Annotated[
    int | None,
    typer.Option("--micro-batches", metavar="M", min=1, help="Micro-batches a step. Default: 2 P."),
]
StagesPerDeviceOption = Annotated[
    int | None,
    typer.Option(
        "--stages-per-device",
        metavar="V",
        min=1,
        help="Forward stages of a pipeline replica on each device.",
    ),
]
ForwardStagesOption = Annotated[
    int | None,
    typer.Option(
        "--forward-stages",
        metavar="F",
        min=1,
        help="Forward stages of a pipeline replica, on all devices.",
    ),
]
BackwardStagesOption = Annotated[
    int | None,
    typer.Option(
        "--backward-stages",
        metavar="B",
        min=1,
        help="Backward stages of a pipeline replica, on all devices.",
    ),
]
RecomputeOption = Annotated[
    str | None,
    typer.Option(
        "--recompute",
        metavar="MODE",
        help="Recomputation of activations: auto, none, full or selective.",
    ),
]
RecomputeAfterOption = Annotated[
    str,
    typer.Option(
        "--recompute-after",
        metavar="WHAT",
        help="Event that a recomputation waits for: gradient (it has arrived, as in the papers'"
        " baselines), or checkpoint (the stage's input is on the device).",
    ),
]
DropOption = Annotated[
    str | None,
    typer.Option(
        "--drop",
        metavar="OPS",
        help="Operators that selective recomputation repeats, or sets of operators (cmb, mlp,"
        " attention, core), separated by commas.",
    ),
]
PassesOption = Annotated[
    str | None,
    typer.Option(
        "--passes",
        metavar="A,B,…",
        help="Passes to apply, in this order; penstock plan --list shows all.",
    ),
]
CostsOption = Annotated[
    str | None,
    typer.Option(
        "--costs",
        metavar="COSTS",
        help="Costs of instructions: unit[:f=1,b=2,p1=1,p2=1,r=1,o=0], in times of a forward stage"
        " (b = p1 + p2; the default); or analytic:GPU:MODEL[:sequence_length=2048,micro_batch=1,…]"
        " (penstock plan --list shows GPUs and models); or a file of penstock profile.",
    ),
]
ProfileOption = Annotated[
    Path | None,
    typer.Option("--profile", metavar="p.json", help="Measured costs; same as --costs p.json."),
]
MeasuredOption = Annotated[
    Path | None,
    typer.Option(
        "--profile", metavar="p.json", help="File of penstock profile with measured costs."
    ),
]
MemoryOption = Annotated[
    str | None,
    typer.Option("--memory", metavar="SIZE", help="Memory limit of one device, such as 40G."),
]
OptimizerOption = Annotated[
    str,
    typer.Option(
        "--optimizer",
        metavar="KIND",
        help="Mode of the CPU optimizer: advance, preview-settle, in-place or synchronous.",
    ),
]
ShowOption = Annotated[
    str | None,
    typer.Option(
        "--show", metavar="instructions", help="Also prints the instructions of all devices."
    ),
]
SearchOption = Annotated[
    float | None,
    typer.Option(
        "--search",
        metavar="SECONDS",
        min=0.001,
        help="Seconds to search for the fastest order of the same instructions. The report says how"
        " far the plan is from that order.",
    ),
]
SvgOption = Annotated[
    Path | None,
    typer.Option("--svg", metavar="FILE", help="File for a picture of the schedule as SVG."),
]
PngOption = Annotated[
    Path | None,
    typer.Option("--png", metavar="FILE", help="File for a picture of the schedule as PNG."),
]
PlanFileOption = Annotated[
    Path | None, typer.Option("--out", metavar="plan.json", help="File for the plan.")
]
TorchOption = Annotated[
    Path | None,
    typer.Option(
        "--torch-csv",
        metavar="FILE",
        help="File for the order as action text of torch.distributed.pipelining.",
    ),
]


def _list_names(wanted: bool) -> None:
    if wanted:
        from penstock.client.planning.plan_command import names_known

        typer.echo(names_known())
        raise typer.Exit


ListOption = Annotated[
    bool,
    typer.Option(
        "--list",
        help="Lists schemes, passes, GPUs and models, and exits.",
        callback=_list_names,
        is_eager=True,
    ),
]


ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="MODEL",
        help="Model folder with a config.json, or the name of a model such as llama2-7b; penstock"
        " plan --list shows all.",
    ),
]
GpuOption = Annotated[
    str | None,
    typer.Option(
        "--gpu",
        metavar="GPU",
        help="Name of a GPU to plan for, such as A100-40; penstock plan --list shows all. Default:"
        " the devices of this machine.",
    ),
]
HostMemoryOption = Annotated[
    str | None,
    typer.Option(
        "--host-memory",
        metavar="SIZE",
        help="Memory of a machine to plan for, such as 128G. Default with --gpu: no limit.",
    ),
]
ShmOption = Annotated[
    str | None,
    typer.Option(
        "--shm",
        metavar="SIZE",
        help="Size of its /dev/shm. Default: half of --host-memory, as Linux mounts it.",
    ),
]
DeviceMemoryOption = Annotated[
    str | None,
    typer.Option(
        "--device-memory",
        "--memory",
        metavar="SIZE",
        help="Memory limit of a device, such as 40G. Default: what the device has.",
    ),
]
WorkersOption = Annotated[
    int,
    typer.Option(
        "--workers", "--devices", metavar="N", min=1, help="Number of workers (devices) in all."
    ),
]
WorkersPerNodeOption = Annotated[
    int,
    typer.Option(
        "--workers-per-node",
        "--devices-per-node",
        metavar="K",
        min=1,
        help="Most workers of one machine.",
    ),
]
GlobalBatchOption = Annotated[
    int | None,
    typer.Option("--global-batch", metavar="G", min=1, help="Sequences of all replicas in a step."),
]
SequenceLengthOption = Annotated[
    int | None,
    typer.Option(
        "--sequence-length",
        metavar="T",
        min=1,
        help="Length of a sequence, in tokens. Default: 2048, or what the model has positions for.",
    ),
]
MicroBatchOption = Annotated[
    str | None,
    typer.Option("--micro-batch", metavar="B", help="Sequences of a micro-batch."),
]
DtypeOption = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        metavar="TYPE",
        help="Type of the weights: fp32, bf16 or fp16. Default: the type in config.json.",
    ),
]
SchemesOption = Annotated[
    str | None,
    typer.Option(
        "--schemes",
        metavar="A,B,…",
        callback=_small,
        help="Schemes to search, separated by commas. Default: all.",
    ),
]
TuneDropOption = Annotated[
    str | None,
    typer.Option(
        "--drop",
        metavar="SETS",
        help="Sets of operators (cmb, mlp, attention, core) to try selective recomputation of.",
    ),
]
EverythingOption = Annotated[
    bool,
    typer.Option(
        "--all", help="With CONFIG.yaml: also searches schedules that train cannot run yet."
    ),
]
KeepOption = Annotated[
    int, typer.Option("--keep", metavar="COUNT", min=1, help="Number of schedules to show.")
]
TunedFileOption = Annotated[
    Path | None,
    typer.Option(
        "--out",
        metavar="tuned.yaml",
        help="File for the configuration with the keys of the fastest schedule.",
    ),
]
ProfileFileOption = Annotated[
    Path, typer.Option("--out", metavar="p.json", help="File for the profile.")
]


ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="Folder with a Hugging Face config.json, the file, or a name such as llama2-7b.",
    ),
]


def names(text: str | None) -> tuple[str, ...]:
    """Returns the names in ``a,b,c``; none where nothing was given."""
    return tuple(word.strip() for word in (text or "").split(",") if word.strip())


_OPTION_AND_KEY = MappingProxyType(
    {
        "scheme": ("--scheme", "schedule.scheme"),
        "num_devices": ("--devices", "cluster.workers"),
        "num_microbatches": ("--micro-batches", "train.micro_batch"),
        "stages_per_device": ("--stages-per-device", "schedule.forward_stages"),
        "forward_stages": ("--forward-stages", "schedule.forward_stages"),
        "backward_stages": ("--backward-stages", "schedule.backward_stages"),
        "recompute": ("--recompute", "schedule.recompute"),
        "drop": ("--drop", "schedule.recompute"),
        "passes": ("--passes", "schedule.passes"),
        "memory": ("--memory", "memory.device_limit"),
    }
)


def require_nothing(wanted: Mapping[str, object]) -> None:
    """Refuses options that repeat keys of a given configuration.

    Raises:
        ConfigError: an option was given; names it, and the key to set instead.
    """
    for field, value in wanted.items():
        if value not in (None, ()):
            option, key = _OPTION_AND_KEY[field]
            raise ConfigError(f"{option}: with a configuration write --set {key}=…")


def require_no_configuration(settings: list[str] | None, *machine: str | None) -> None:
    """Refuses options that change or place a configuration, where none is given.

    Raises:
        ConfigError: one was given.
    """
    if settings:
        raise ConfigError("--set changes a configuration; without one there are options")
    if any(machine):
        raise ConfigError(
            "--gpu, --host-memory, --shm: go with CONFIG.yaml; with --scheme write"
            " --costs analytic:GPU:MODEL and --memory"
        )


def required_model(model: str | None) -> str:
    """Returns the model to tune.

    Raises:
        ConfigError: neither a model nor a configuration was given.
    """
    if model is None:
        raise ConfigError(
            "give a configuration (penstock tune examples/tiny.yaml), or --model, such as"
            " --model llama2-7b --gpu RTX4090 --host-memory 128G"
        )
    return model


def recompute_mode(text: str | None) -> RecomputeMode | Literal["auto"] | None:
    """Returns the value of ``--recompute``.

    Raises:
        ConfigError: no such mode.
    """
    accepted = ("auto", *get_args(RecomputeMode))
    if text is not None and text not in accepted:
        raise ConfigError(f"--recompute {text!r}: accepted: {', '.join(accepted)}")
    return cast(RecomputeMode | Literal["auto"] | None, text)


def recompute_after(text: str) -> RecomputeAfter:
    """Returns the value of ``--recompute-after``.

    Raises:
        ConfigError: something else.
    """
    try:
        return RecomputeAfter(text)
    except ValueError as error:
        accepted = ", ".join(RecomputeAfter)
        raise ConfigError(f"--recompute-after {text!r}: accepted: {accepted}") from error


def machine_options(
    gpu: str | None,
    device_memory: str | None,
    host_memory: str | None,
    shm: str | None,
) -> MachineOptions:
    """Returns the machine that options describe.

    Raises:
        ConfigError: an unknown GPU, or no size.
    """
    from penstock.client.planning.described import MachineOptions

    return MachineOptions(
        gpu=gpu,
        device_bytes=size("--device-memory", device_memory),
        host_bytes=size("--host-memory", host_memory),
        shm_bytes=size("--shm", shm),
    )


def size(option: str, text: str | None) -> int | None:
    """Returns the bytes that a text such as ``40G`` says.

    Raises:
        ConfigError: no size, or nothing.
    """
    from penstock.config.values import parse_size

    if text is None:
        return None
    try:
        num_bytes = parse_size(text)
    except ValueError as error:
        raise ConfigError(f"{option} {text!r}: {error}") from error
    if num_bytes == 0:
        raise ConfigError(f"{option} {text!r}: give more than 0 bytes, such as 20G")
    return num_bytes


def optimizer_name(text: str) -> str:
    """Returns the value of ``--optimizer``.

    Raises:
        ConfigError: no such optimizer.
    """
    from penstock.planner.planning.pipeline import OPTIMIZER_WAYS

    if text not in OPTIMIZER_WAYS:
        raise ConfigError(f"--optimizer {text!r}: accepted: {', '.join(OPTIMIZER_WAYS)}")
    return text


def shows_instructions(show: str | None) -> bool:
    """Returns whether ``--show`` asks for them.

    Raises:
        ConfigError: it asks for something else.
    """
    if show not in (None, "instructions"):
        raise ConfigError(f"--show {show!r}: accepted is instructions")
    return show is not None


def profile_path(costs: str | None) -> Path | None:
    """Returns the profile that ``--costs`` names for a configuration.

    Raises:
        ConfigError: other costs, which do not fit a configuration's model.
    """
    if costs is None:
        return None
    if not costs.endswith(".json"):
        raise ConfigError(
            f"--costs {costs!r}: with a configuration accepted is a profile.json (penstock profile"
            " makes it)"
        )
    return Path(costs)


def costs_text(costs: str | None, profile: Path | None) -> str:
    """Returns the value of ``--costs`` or ``--profile``, of which one may be given.

    Raises:
        ConfigError: both are.
    """
    if costs is not None and profile is not None:
        raise ConfigError("--profile and --costs: give one of them")
    return str(profile) if profile is not None else costs or "unit"
