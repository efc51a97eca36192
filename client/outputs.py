"""Files of the planning commands: plans and pictures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from penstock.planner.render import Caption, png, svg
from penstock.planner.schedule import schedule_of
from penstock.planner.simulate import Simulation
from penstock.planner.torch_actions import actions_of_schedule, format_actions
from penstock.protocol.errors import ConfigError, ProtocolError, reason
from penstock.protocol.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    """Where to write what; ``None``: nowhere."""

    plan: Path | None = None
    svg: Path | None = None
    png: Path | None = None
    torch_csv: Path | None = None

    def write(self, simulation: Simulation, caption: Caption) -> None:
        """Make and write the files that were asked for.

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
    """Write one file.

    Raises:
        ConfigError: it cannot be written; names the path and says why.
    """
    try:
        path.write_bytes(content)
    except OSError as error:
        raise ConfigError(f"{path}: cannot write it: {reason(error)}") from error


def read_plan(path: Path) -> Plan:
    """Read a plan file; its programs are not validated here.

    Raises:
        ConfigError: it cannot be read, or is no plan.
    """
    try:
        return Plan.from_json(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path}: cannot read it: {reason(error)}") from error
    except (ProtocolError, ConfigError) as error:
        raise ConfigError(f"{path}: {error}") from error
