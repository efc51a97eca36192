"""The design's rules about the code: who imports whom, what stays light, what is generated."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import TypeGuard

import pytest

from penstock.config.platforms import PLATFORMS
from tests.tidy import PRODUCT as FOLDERS

ROOT = Path(__file__).parents[1]
MAY_IMPORT = {
    "host": set(),
    "shm": {"host"},
    "config": {"host", "shm"},
    "protocol": {"host", "shm", "config"},
    "planner": {"host", "shm", "config", "protocol"},
    "models": {"host", "shm", "config", "protocol"},
    "daemons": {"host", "shm", "config", "protocol", "planner"},
    "workers": {"host", "shm", "config", "protocol", "planner", "models"},
    "deploy": {"host", "shm", "config", "protocol"},
    "grafana": {"host", "config", "protocol"},
    "client": {
        "host",
        "shm",
        "config",
        "protocol",
        "planner",
        "daemons",
        "deploy",
        "grafana",
    },
    "chaos": {"host", "shm", "config", "protocol", "daemons", "client"},
}
"""Packages that each package may import, beside itself. The client starts the packages that need
torch (workers, models) as processes.
"""

FLOORS = {
    "protocol": """plan security
        metrics
        run
        wire""",
    "planner": """cost
        schedule
        schemes memory
        orders validate simulate
        passes render traces
        planning""",
    "models": """torch_internals
        attention data device_facts step gpu
        torch_device
        loss
        pair_losses
        adapters
        surgery
        binding
        checkpoints compiled saved_activations split_backward
        kernels forward_storage
        runtime
        apart
        prepare
        profiling inference exchange hub""",
    "daemons": """kit preload
        memory fetch monitor
        node optimizer scheduler
        mirror""",
    "workers": """device waiting data
        telemetry first_pass
        state channels
        epoch
        attempt
        handlers
        platforms
        compiling
        interpreter
        peers session
        epoch_builder
        main""",
    "grafana": """files dashboards.colors
        dashboards.panels
        dashboards.frame
        dashboards.tables""",
    "client": """convert views.output
        cli launch importing views.progress views.run_view views.console weights.folder
        planning views.display placement capacity states
        views
        views.trace views.screen
        views.report
        doctor export supervision exchange
        train inference weights
        api configuration
        commands
        main""",
}
"""The rooms (folders, and files beside them) of each package, from the ground up: a room imports
from floors below its own, never from its own floor or from above. A part of a room that lies on
another floor is named by itself.
"""

MAX_LOOSE_FILES = 14
CROWDED_ROOMS = {"planner/schemes": "one file for each scheme: they are the examples"}

LIGHT_MODULES = (
    "penstock",
    "penstock.client.launch",
    "penstock.client.main",
    "penstock.client.api",
    "penstock.client.doctor",
    "penstock.client.views.control",
    "penstock.client.views.screen.screen",
    "penstock.client.planning.run_report",
    "penstock.client.export",
    "penstock.client.inference.tools",
    "penstock.daemons.memory.main",
    "penstock.daemons.fetch.main",
    "penstock.daemons.monitor.metrics.main",
    "penstock.daemons.node.main",
    "penstock.daemons.monitor.observer.main",
    "penstock.daemons.node.preparing.prepare",
    "penstock.daemons.optimizer.main",
    "penstock.daemons.scheduler.main",
    "penstock.planner.planning.configured",
    "penstock.planner.simulate",
    "penstock.protocol.wire.control",
    "penstock.protocol.wire.member",
    "penstock.shm.memory",
)

MAX_FUNCTION_LINES = 60
MAX_FILE_LINES = 600


@cache
def sources() -> Mapping[Path, ast.Module]:
    """Every Python file of the package but the generated ones, and the papers' tables, parsed."""
    return {
        path.relative_to(ROOT): ast.parse(path.read_text(encoding="utf-8"))
        for folder in (*FOLDERS, "bench/papers", "bench/gpu")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if "generated" not in path.parts
    }


def module_of(path: Path) -> str:
    """The dotted name of a file: ``planner.cost.costs``."""
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


@cache
def imports_between_files() -> Mapping[str, frozenset[str]]:
    """By dotted name, the files of ours that a file imports, also inside functions."""
    modules = {module_of(path): tree for path, tree in sources().items()}
    found: dict[str, frozenset[str]] = {}
    for module, tree in modules.items():
        named: set[str] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                named.update(alias.name.removeprefix("penstock.") for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                base = node.module.removeprefix("penstock.")
                whole = {f"{base}.{alias.name}" for alias in node.names} & modules.keys()
                named.update(whole)
                if len(whole) < len(node.names):
                    named.add(base)
        found[module] = frozenset(named & modules.keys()) - {module}
    return found


def imported(tree: ast.Module) -> Iterator[str]:
    """Names of all modules that a file imports, also inside functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module


def test_every_folder_is_linked_into_the_package() -> None:
    for folder in FOLDERS:
        link = ROOT / "src" / "penstock" / folder
        assert link.is_symlink() and link.resolve() == ROOT / folder


def test_an_archive_of_the_sources_has_each_once_and_its_licence_by_name() -> None:
    """Links become files in an sdist, so what they point to is left out of it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    links = {path.name for path in (ROOT / "src" / "penstock").iterdir() if path.is_symlink()}
    assert links == {*FOLDERS, "docs", "examples"}
    assert {f"/{name}" for name in links} <= set(
        project["tool"]["scikit-build"]["sdist"]["exclude"]
    )
    assert project["project"]["license"] == "Apache-2.0"
    for name in project["project"]["license-files"]:
        assert (ROOT / name).is_file()


def test_imports_follow_the_dependency_direction() -> None:
    wrong = []
    for path, tree in sources().items():
        folder = path.parts[0]
        for name in imported(tree) if folder in MAY_IMPORT else ():
            words = name.split(".")
            if words[0] != "penstock" or len(words) < 2 or words[1] == "_native":
                continue
            if words[1] != folder and words[1] not in MAY_IMPORT[folder]:
                wrong.append(f"{path} imports {name}")
    assert not wrong, wrong


def test_no_files_import_each_other_in_a_circle() -> None:
    try:
        TopologicalSorter(imports_between_files()).prepare()
    except CycleError as circle:
        pytest.fail(" imports ".join(circle.args[1][::-1]))


def test_rooms_import_only_from_floors_below() -> None:
    wrong = []
    for module, imports in imports_between_files().items():
        package = module.split(".")[0]
        for other in imports if package in FLOORS else ():
            if other.split(".")[0] == package:
                (own, own_room), (its, its_room) = floor(module), floor(other)
                if own_room != its_room and its >= own:
                    wrong.append(f"{module} (floor {own}) imports {other} (floor {its})")
    assert not wrong, f"see FLOORS: {wrong}"
    there = {room for name in imports_between_files() for room in (name, name.rpartition(".")[0])}
    named = {f"{package}.{room}" for package, rooms in FLOORS.items() for room in rooms.split()}
    assert named <= there, f"no such room: {named - there}"


def floor(module: str) -> tuple[int, str]:
    """The floor that a module lies on, counted from 0, and its room as ``FLOORS`` names it."""
    package, _, name = module.partition(".")
    floors = [line.split() for line in FLOORS.get(package, "").splitlines()]
    rooms = {room: index for index, line in enumerate(floors) for room in line}
    while name and name not in rooms:
        name = name.rpartition(".")[0]
    assert name or module in FOLDERS, f"{module} is in no room of FLOORS"
    return rooms.get(name, -1), name


MAY_KNOW_PLATFORMS = (
    "config/",
    "workers/platforms/",
    "models/gpu.py",
    "models/torch_device.py",
    "bench/gpu/",
)
"""Who may tell platforms apart: what describes them, the configuration, what they are, and what
measures one of them.
"""


def test_nobody_else_asks_which_platform_it_is() -> None:
    """Others ask for a capability (:mod:`penstock.config.platforms`)."""
    platforms = re.compile(r"^(Cpu|Cuda|Gpu|Host|Emulated)[A-Z]")
    wrong = []
    for path, tree in sources().items():
        if str(path).startswith(MAY_KNOW_PLATFORMS):
            continue
        folders = tuple(f"penstock.workers.platforms.{name}" for name in PLATFORMS)
        wrong += [f"{path} imports {n}" for n in imported(tree) if n.startswith(folders)]
        for node in ast.walk(tree):
            kinds: set[object] = set()
            if isinstance(node, (ast.Compare, ast.MatchValue)) or is_call(node, "startswith"):
                kinds = {n.value for n in ast.walk(node) if isinstance(n, ast.Constant)}
                kinds = {k for k in kinds if isinstance(k, str) and k.strip(":") in PLATFORMS}
            if is_call(node, "isinstance"):
                names = (n.id for n in ast.walk(node) if isinstance(n, ast.Name))
                kinds = {name for name in names if platforms.match(name)}
            if isinstance(node, ast.Attribute) and node.attr in ("is_cuda", "is_cpu"):
                kinds = {node.attr}
            if kinds:
                wrong.append(f"{path}:{getattr(node, 'lineno', 0)} {kinds}")
    assert not wrong, wrong


PRIVATE_TORCH = {
    "models/torch_internals.py": "the place for it",
    "models/torch_device.py": "torch._C._DisableTorchDispatch, for host_memory",
    "workers/channels/nccl.py": "options._timeout of ProcessGroupNCCL",
}
"""Files that may use names of torch that begin with an underscore, and what for."""

NOT_TORCHS = {
    "_asdict": "of named tuples",
    "_exit": "of os: how a fork ends",
    "_get_dtype_plan": "what transformers keeps in fp32",
    "_init_weights": "how transformers initializes a module",
}
"""Names with an underscore that neither we nor torch define."""


def test_what_torch_does_not_promise_is_used_in_one_place() -> None:
    """Names of torch's modules, and attributes of objects, that begin with an underscore and that
    nothing of ours defines. nn.Module's ``_parameters``, ``_buffers`` and ``_modules`` are names of
    ours, too, and not found: they are as old as torch.
    """
    trees = {p: tree for p, tree in sources().items() if p.parts[0] in ("models", "workers")}
    nodes = [node for tree in trees.values() for node in ast.walk(tree)]
    ours = {n.attr for n in nodes if isinstance(n, ast.Attribute) and is_of_self(n)}
    ours |= {n.name for n in nodes if isinstance(n, (ast.FunctionDef, ast.ClassDef))}
    ours |= {n.target.id for n in nodes if isinstance(n, ast.AnnAssign) if is_name(n.target)}
    used: dict[str, set[str]] = {}
    for path, tree in trees.items():
        names = {name for name in imported(tree) if name.startswith("torch.") and "._" in name}
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and re.match("_[a-zA-Z]", node.attr):
                if not is_of_self(node) and node.attr not in ours | NOT_TORCHS.keys():
                    names.add(ast.unparse(node))
        if names:
            used[str(path)] = names
    wrong = {path: names for path, names in used.items() if path not in PRIVATE_TORCH}
    assert not wrong, f"let models/torch_internals.py name it: {wrong}"


def is_of_self(node: ast.Attribute) -> bool:
    """Whether it is an attribute of ``self`` or ``cls``."""
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def is_name(node: ast.AST) -> TypeGuard[ast.Name]:
    """Whether it is a name and nothing else."""
    return isinstance(node, ast.Name)


def is_call(node: ast.AST, name: str) -> bool:
    """Whether a node calls a function or method of that name."""
    function = node.func if isinstance(node, ast.Call) else None
    return name in (getattr(function, "id", None), getattr(function, "attr", None))


def test_no_class_name_stands_in_more_than_two_modules() -> None:
    homes: dict[str, list[str]] = {}
    for path, tree in sources().items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(module_of(path))
    shared = {name: modules for name, modules in homes.items() if len(modules) > 2}
    assert not shared, shared


def test_rooms_say_what_they_hold() -> None:
    silent = [
        str(path)
        for path, tree in sources().items()
        if path.name == "__init__.py" and " " not in (ast.get_docstring(tree) or "")
    ]
    assert not silent, silent


def test_rooms_are_not_crowded() -> None:
    count = Counter(path.parent.as_posix() for path in sources() if path.stem != "__init__")
    crowded = {room: files for room, files in count.items() if files > MAX_LOOSE_FILES}
    assert crowded.keys() == CROWDED_ROOMS.keys(), crowded


PURE_KIT = tuple(Path(f"daemons/kit/{name}.py") for name in ("events", "messages", "story"))
"""What machines share."""


def is_pure(path: Path) -> bool:
    """Whether a file belongs to the machine of a daemon, or to what all machines share."""
    return path in PURE_KIT or (path.parts[0] == "daemons" and "machine" in path.parts)


def test_machines_are_pure() -> None:
    """No clock, socket, thread or file; of the daemons' modules only those of machines."""
    libraries = {
        "grpc",
        "os",
        "pathlib",
        "socket",
        "sqlite3",
        "subprocess",
        "threading",
        "time",
        "zmq",
    }
    ours = {"penstock.host.files", "penstock.protocol.run.rundir"}

    def acts(name: str) -> bool:
        daemons = name.startswith("penstock.daemons.")
        impure = daemons and not is_pure(Path(*name.split(".")[1:]).with_suffix(".py"))
        return impure or name in ours or name.split(".")[0] in libraries

    wrong = [
        f"{path} imports {name}"
        for path, tree in sources().items()
        if is_pure(path)
        for name in imported(tree)
        if acts(name)
    ]
    assert not wrong, wrong


def test_functions_and_files_stay_small() -> None:
    long: list[str] = []
    for path, tree in sources().items():
        lines = len((ROOT / path).read_text(encoding="utf-8").splitlines())
        if lines > MAX_FILE_LINES:
            long.append(f"{path}: {lines} lines")
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > MAX_FUNCTION_LINES:
                    long.append(f"{path}:{node.lineno} {node.name}: {lines} lines")
    assert not long, long


def test_nothing_unfinished_and_nothing_printed() -> None:
    wrong = []
    for path, tree in sources().items():
        text = (ROOT / path).read_text(encoding="utf-8")
        wrong += [f"{path}: {word}" for word in re.findall(r"\b(?:TODO|FIXME|XXX|HACK)\b", text)]
        wrong += [
            f"{path}:{node.lineno} print"
            for node in ast.walk(tree)
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id == "print"
        ]
    assert not wrong, wrong


def test_light_modules_import_no_torch() -> None:
    """One module after the other, so that the message names the first that does. Workers need
    torch; what builds a model they import when they build one, emulated workers never.
    """
    program = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "    heavy = {'torch', 'transformers', 'scipy', 'matplotlib'} & sys.modules.keys()\n"
        "    assert not heavy, f'{name} imports {heavy}'\n"
        "import penstock.workers.main as worker\n"
        "heavy = {'transformers', 'scipy', 'matplotlib'} & sys.modules.keys()\n"
        "assert not heavy, f'{worker.__name__} imports {heavy}'\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *LIGHT_MODULES],
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr


def test_benchmarks_import() -> None:
    """Nobody runs them daily: what they use of the project is still there under its name."""
    names = [f"bench.{path.stem}" for path in sorted((ROOT / "bench").glob("*.py"))]
    program = "import importlib, sys; [importlib.import_module(name) for name in sys.argv[1:]]"
    done = subprocess.run(
        [sys.executable, "-c", program, *names],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["scheduler_pb2.py", "scheduler_pb2.pyi", "scheduler_pb2_grpc.py"])
def test_generated_code_is_what_protoc_writes(name: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "grpc_tools.protoc"]
    generated = "penstock/protocol/generated"
    done = subprocess.run(
        [
            *command,
            f"-I{generated}={ROOT / 'protocol'}",
            f"--python_out={tmp_path}",
            f"--pyi_out={tmp_path}",
            f"--grpc_python_out={tmp_path}",
            f"{generated}/scheduler.proto",
        ],
        capture_output=True,
        text=True,
        timeout=500,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    expected = (tmp_path / generated / name).read_text(encoding="utf-8")
    assert (ROOT / "protocol" / "generated" / name).read_text(encoding="utf-8") == expected
