"""The unit files of one node as values.

``penstock-node@.service`` is the same for all nodes of all runs: start, end, watchdog, sandbox. Its
instance is ``RUN.NODE``. A drop-in of the instance has the differences: user, command, paths,
cores. So a machine can have nodes of several runs, and an upgrade of the template reaches all.
``penstock-run@RUN.target`` starts and stops the nodes of a run on this machine.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from penstock.deploy import fill
from penstock.host.errors import ConfigError

OWN_USER = "penstock"
"""System user that the installation makes; other users must exist."""
HIDDEN = (Path("/tmp"), Path("/var/tmp"))
"""Folders that ``PrivateTmp=`` hides from a service."""
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
    """One node of a run on this machine. All paths are absolute; relative paths of the
    configuration start at ``folder``.

    ``gpus``: True if the workers open NVIDIA devices. ``keys``: the node's folder of keys, or None.
    ``cores``: a list such as ``0-7,16``, or empty for all cores. ``targets``: the folder that
    Prometheus reads targets from, or None.
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
            raise ConfigError(f"--cores {self.cores}: expected a list such as 0-7,16-23")
        for path in self.paths:
            if not str(path).isprintable():
                raise ConfigError(f"{path!r}: units cannot name paths with control characters")
            if any(path.is_relative_to(place) for place in HIDDEN):
                raise ConfigError(
                    f"{path}: a service has a private /tmp and /var/tmp; move it to another folder"
                )

    @property
    def paths(self) -> tuple[Path, ...]:
        """Returns the paths that must exist when the node starts."""
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
        """Returns the text of each file, by path below the root of the system."""
        texts = {_UNITS / name: (_HERE / name).read_text(encoding="utf-8") for name in _TEMPLATES}
        texts[self._drop_in] = fill(_HERE / _DROP_IN, self._values())
        if self.user == OWN_USER:
            sysusers = fill(_HERE / "penstock.sysusers", {"USER": OWN_USER})
            texts[Path("etc/sysusers.d/penstock.conf")] = sysusers
        return texts

    def links(self) -> Mapping[Path, str]:
        """Returns the target of each symbolic link: the run's target wants the node's service."""
        return {self._link: "../penstock-node@.service"}

    def own_paths(self) -> tuple[Path, ...]:
        """Returns the paths of this node alone, which its removal deletes."""
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
            # With "-", the node also starts without the folder.
            "TARGETS": "" if self.targets is None else f" -{path_word(self.targets)}",
            "RUN_WORD": command_word(self.run_dir),
            "MOUNTS": " ".join(path_word(path) for path in self.paths),
            "DEVICES": _GPU_DEVICES if self.gpus else "PrivateDevices=yes",
            "CORES": f"CPUAffinity={self.cores}" if self.cores else "# CPUAffinity=: all cores",
        }


def path_word(path: Path) -> str:
    """Returns a path as one word of a setting with several words."""
    text = str(path).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{_specifiers_escaped(text)}"'


def command_word(path: Path) -> str:
    """Returns a path as one word of a command line, where systemd also expands variables."""
    return path_word(path).replace("$", "$$")


def _specifiers_escaped(text: str) -> str:
    return text.replace("%", "%%")
