"""Files of the planning commands: plans and pictures.

What the reports of a configuration's plan and of a schedule by name have in common.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.config.schema import Config
from penstock.host.errors import ConfigError, ProtocolError, reason
from penstock.host.inputs import read_bytes
from penstock.planner.planning.torch_actions import actions_of_schedule, format_actions
from penstock.planner.render import Caption, png, svg
from penstock.planner.schedule.schedule import schedule_of
from penstock.planner.simulate import Simulation
from penstock.protocol.plan.plan import MAX_PLAN_BYTES, Plan, StageRange


@dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    """The paths of files to write; ``None``: the file is not written."""

    plan: Path | None = None
    svg: Path | None = None
    png: Path | None = None
    torch_csv: Path | None = None

    def write(self, simulation: Simulation, caption: Caption) -> None:
        """Makes and writes the requested files.

        Raises:
            ConfigError: a file cannot be written, or the action text has no word for something.
        """
        contents: tuple[tuple[Path | None, Callable[[], bytes]], ...] = (
            (self.plan, lambda: (simulation.plan.to_json() + "\n").encode()),
            (self.svg, lambda: svg(simulation, caption).encode()),
            (self.png, lambda: png(simulation, caption)),
            (self.torch_csv, lambda: _actions(simulation.plan).encode()),
        )
        for path, make in contents:
            if path is not None:
                write_file(path, make())


def _actions(plan: Plan) -> str:
    return format_actions(actions_of_schedule(schedule_of(plan)))


def write_file(path: Path, content: bytes) -> None:
    """Writes one file.

    Raises:
        ConfigError: it cannot be written; names the path and says why.
    """
    try:
        path.write_bytes(content)
    except OSError as error:
        raise ConfigError(f"{path}: cannot write it: {reason(error)}") from error


def read_plan(path: Path) -> Plan:
    """Reads a plan file; its programs are not validated here.

    Raises:
        ConfigError: the file cannot be read, or is no plan.
    """
    try:
        return Plan.from_json(read_bytes(path, MAX_PLAN_BYTES))
    except OSError as error:
        raise ConfigError(f"{path}: cannot read it: {reason(error)}") from error
    except (ProtocolError, ConfigError) as error:
        raise ConfigError(f"{path}: {error}") from error


def rates_of(config: Config) -> str:
    """Describes where the rates of a configuration's simulation come from."""
    if config.schedule.profile is not None:
        return "with measured costs"
    if config.cluster.platform.simulated_clock:
        return "with the costs of the emulated cluster"
    return "default rates, not measured on this machine"


def stages_text(ranges: Sequence[StageRange]) -> str:
    """Returns blocks and devices of stages on one line; of many stages the first and the last."""
    shown = [f"{s.start}-{s.stop - 1}@{s.device}" for s in ranges]
    if len(shown) > 16:
        shown = [*shown[:12], "…", *shown[-2:]]
    return "  ".join(shown) + "   (blocks@device)"


def blocks_text(blocks: Sequence[int]) -> str:
    """Returns ascending numbers of blocks as text, neighbours as ranges."""
    ranges: list[list[int]] = []
    for block in blocks:
        if ranges and ranges[-1][-1] == block - 1:
            ranges[-1][1:] = [block]
        else:
            ranges.append([block])
    return "  ".join("-".join(map(str, ends)) for ends in ranges) + "   (blocks)" if ranges else "-"


def heading(plan: Plan, passes: Sequence[str] = ()) -> str:
    """Describes a schedule in one line."""
    through = f" + {', '.join(passes)}" if passes else ""
    cut = (len(plan.forward_stages), len(plan.backward_stages))
    same = cut[0] == cut[1]
    stages = f"{cut[0]} stages" if same else f"{cut[0]} forward, {cut[1]} backward stages"
    return (
        f"{plan.scheme}{through}: {plan.num_devices} devices, {plan.num_microbatches}"
        f" micro-batches, {stages}"
    )
