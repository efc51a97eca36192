"""The unit files of one node, as values: which files there are, and what is in them.

``penstock-node@.service`` has what is the same for all nodes of all runs: how a node starts, ends,
is watched and confined. Its instance is ``RUN.NODE``; what differs (user, command, paths, cores) is
a drop-in of the instance, so that one machine can have nodes of several runs, and an upgrade of the
template reaches all. ``penstock-run@RUN.target`` starts and stops a run's nodes on this machine.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from penstock.deploy.templates import fill
from penstock.host.errors import ConfigError

OWN_USER = "penstock"
"""The system user that the files bring along; other users must exist."""
HIDDEN = (Path("/tmp"), Path("/var/tmp"))
"""PrivateTmp= hides what others have there."""
_HERE = Path(__file__).parent
_UNITS = Path("etc/systemd/system")
_TEMPLATES = ("penstock-node@.service", "penstock-run@.target")
_DROP_IN = "10-node.conf"
_GPU_DEVICES = """DevicePolicy=closed
DeviceAllow=char-nvidia rw
DeviceAllow=char-nvidia-uvm rw
DeviceAllow=char-nvidia-frontend rw
DeviceAllow=char-nvidia-caps rw"""
_CORES = re.compile(r"\d+(-\d+)?(,\d+(-\d+)?)*")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeUnit:
    """One node of a run on this machine. All paths are absolute; ``folder`` is where relative paths
    of the configuration begin. ``gpus``: its workers open NVIDIA devices. ``keys``: the node's own
    folder of keys, if it has one. ``cores``: such as ``0-7,16``; empty: all of the machine's.
    ``targets``: the folder for Prometheus, if there is one.
    """

    run: str
    node: str
    user: str
    python: Path
    config: Path
    run_dir: Path
    folder: Path
    gpus: bool
    keys: Path | None = None
    cores: str = ""
    targets: Path | None = None

    def __post_init__(self) -> None:
        if self.cores and not _CORES.fullmatch(self.cores):
            raise ConfigError(f"--cores {self.cores}: accepted are lists such as 0-7,16-23")
        for path in self.paths:
            if not str(path).isprintable():
                raise ConfigError(f"{path!r}: units cannot name paths with control characters")
            if any(path.is_relative_to(place) for place in HIDDEN):
                raise ConfigError(
                    f"{path}: every service has a /tmp and a /var/tmp of its own; put it elsewhere"
                )

    @property
    def paths(self) -> tuple[Path, ...]:
        """Returns what must be there when the node starts."""
        known = (self.run_dir, self.config, self.folder, self.python, self.keys)
        return tuple(dict.fromkeys(path for path in known if path is not None))

    @property
    def service(self) -> str:
        """The name of the node's service."""
        return f"penstock-node@{self.run}.{self.node}.service"

    @property
    def target(self) -> str:
        """The name of the target of the run's nodes on this machine."""
        return f"penstock-run@{self.run}.target"

    def files(self) -> Mapping[Path, str]:
        """Returns what to write, by path below the root of the system."""
        found = {_UNITS / name: (_HERE / name).read_text(encoding="utf-8") for name in _TEMPLATES}
        found[self._drop_in] = fill(_HERE / _DROP_IN, self._values())
        if self.user == OWN_USER:
            sysusers = fill(_HERE / "penstock.sysusers", {"USER": OWN_USER})
            found[Path("etc/sysusers.d/penstock.conf")] = sysusers
        return found

    def links(self) -> Mapping[Path, str]:
        """Returns the symbolic links to make, with what they point to: the target wants the node's
        service.
        """
        return {self._link: "../penstock-node@.service"}

    def own_paths(self) -> tuple[Path, ...]:
        """Returns the paths that are of this node alone, and go with it."""
        return (self._link, self._drop_in)

    @property
    def _link(self) -> Path:
        return _UNITS / f"{self.target}.wants" / self.service

    @property
    def _drop_in(self) -> Path:
        return _UNITS / f"{self.service}.d" / _DROP_IN

    def _values(self) -> dict[str, str]:
        return {
            "RUN": self.run,
            "NODE": self.node,
            "TARGET": self.target,
            "USER": self.user,
            "PYTHON": command_word(self.python),
            "CONFIG": command_word(self.config),
            "FOLDER": _specifiers_escaped(str(self.folder)),
            "RUN_DIR": path_word(self.run_dir),
            # With "-": the node goes on where nobody made that folder.
            "TARGETS": "" if self.targets is None else f" -{path_word(self.targets)}",
            "RUN_WORD": command_word(self.run_dir),
            "MOUNTS": " ".join(path_word(path) for path in self.paths),
            "DEVICES": _GPU_DEVICES if self.gpus else "PrivateDevices=yes",
            "CORES": f"CPUAffinity={self.cores}" if self.cores else "# CPUAffinity=: all cores",
        }


def path_word(path: Path) -> str:
    """Returns a path as one word of a setting that takes several."""
    text = str(path).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{_specifiers_escaped(text)}"'


def command_word(path: Path) -> str:
    """Returns a path as one word of a command line, which also expands variables."""
    return path_word(path).replace("$", "$$")


def _specifiers_escaped(text: str) -> str:
    return text.replace("%", "%%")
