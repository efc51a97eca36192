"""What a bare machine without network lacks: wheels that travel, and their installation there.

Only the standard library is imported at the top: this module runs before anything is installed.

Wheels are those of ``pyproject.toml``'s requirements, and of theirs, that ``there.txt`` does not
have. On the machine an environment in ``build/gpu-env`` sees the packages of the Python that made
it, so pip installs only what is missing or too old, and the project itself, built from the tree.
"""

from __future__ import annotations

import email.parser
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
ENVIRONMENT = ROOT / "build" / "gpu-env"
BYTECODE = ROOT / "build" / "gpu-bytecode"
"""Compiled modules: images are often made without, and set so that none are written; then every
process takes some ten seconds to compile what it imports of torch and transformers."""
WHEELS = ROOT / ".whl"
THERE = Path(__file__).with_name("there.txt")
TARGET_PYTHON = "3.12"
PLATFORMS = ("2_28", "2_27", "2_26", "2_24", "2_17")
COMPARED = ("deepspeed>=0.18", "roundpipe>=0.1")
"""What :mod:`.measures.baselines` holds Penstock against, if it can be had. DeepSpeed is a source
package: its wheel is built without operators, which it compiles where it runs.
"""
SOURCES = "penstock.sources"
"""In the wheels' folder: fingerprint of the sources that the project's wheel was built of."""
COMMIT = "penstock.commit"
"""In the wheels' folder: the commit of the tree, for a machine that gets it without its history."""
_HEAVY = ("torch", "transformers", "sympy", "accelerate", "penstock")
"""Packages that are compiled ahead, where they are there; others, when they are imported first."""
TRAVEL_BYTES = 48 << 20
"""Wheels beyond this are too many for a machine that takes 64 MiB with the tree."""

_BUILD_TIMEOUT_S = 300


class InstallError(Exception):
    """Something that the ladder cannot do without; says what pip said."""


def requirements() -> list[str]:
    """Returns those of the project, as pyproject.toml has them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return list(project["project"]["dependencies"])


def commit() -> str:
    """Returns the commit of the tree as ``git describe`` prints it, with ``-dirty`` behind a tree
    that was changed since; empty where neither git nor the wheels' folder knows.
    """
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=7"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        answer = None
    if answer is not None and answer.returncode == 0:
        return answer.stdout.strip()
    kept = WHEELS / COMMIT
    return kept.read_text(encoding="utf-8").strip() if kept.exists() else ""


# Here, with network --------------------------------------------------------------------------


def packages_there(file: Path) -> dict[str, str | None]:
    """Returns name -> version, None where it is not known, of a list as ``pip list`` makes it."""
    from packaging.utils import canonicalize_name

    found: dict[str, str | None] = {}
    for line in file.read_text(encoding="utf-8").splitlines():
        words = line.partition("#")[0].strip()
        if words:
            name, _, version = words.partition("==")
            found[canonicalize_name(name)] = version or None
    return found


def fetch_wheels(there: Path = THERE, folder: Path = WHEELS) -> list[str]:
    """Downloads into a new ``folder``; returns a sentence for each missing file.

    Raises:
        InstallError: a requirement of the project cannot be had, or all of it is too large.
    """
    has = packages_there(there)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as fresh:  # what is there is ignored by git
        _download_all(requirements(), has, Path(fresh))
        complaints = []
        for text in COMPARED:
            try:
                _download_all([text], has, Path(fresh))
            except InstallError as error:
                complaints.append(f"{text}: {error}")
        complaints += _own_wheel(Path(fresh))
        size = sum(file.stat().st_size for file in Path(fresh).iterdir())
        if size > TRAVEL_BYTES:
            raise InstallError(f"{size >> 20} MiB of wheels; at most {TRAVEL_BYTES >> 20} travel")
        for old in [*folder.glob("*.whl"), *folder.glob(SOURCES)]:
            old.unlink()
        (folder / COMMIT).write_text(commit(), encoding="utf-8")
        for file in [*Path(fresh).glob("*.whl"), *Path(fresh).glob(SOURCES)]:
            shutil.move(file, folder / file.name)
    return complaints


def _download_all(wanted: list[str], has: dict[str, str | None], folder: Path) -> None:
    """Downloads the missing requirements, and their requirements."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    waiting, done = [Requirement(text) for text in wanted], set()
    while waiting:
        one = waiting.pop()
        name = canonicalize_name(one.name)
        version = has.get(name, "")
        if version is None or (version and one.specifier.contains(version)) or name in done:
            continue
        done.add(name)
        _download(str(one), folder)
        waiting += (Requirement(text) for text in _needs_of(_wheel_of(name, folder)))


def _download(requirement: str, folder: Path) -> None:
    """Downloads one wheel for the target. Without a wheel, builds one from the source, which
    must hold no machine code.
    """
    kind = ["--only-binary=:all:", "--implementation", "cp", "--python-version", TARGET_PYTHON]
    for glibc in PLATFORMS:
        kind += ["--platform", f"manylinux_{glibc}_x86_64"]
    kind += ["--platform", "manylinux2014_x86_64", "--platform", "manylinux1_x86_64"]
    pip = [sys.executable, "-m", "pip"]
    said = _run([*pip, "download", "-q", "--no-deps", *kind, "-d", str(folder), requirement])
    if said is None:
        return
    with tempfile.TemporaryDirectory() as built:
        again = _run([*pip, "wheel", "-q", "--no-deps", "-w", built, requirement])
        pure = list(Path(built).glob("*-none-any.whl"))
        if again is not None or not pure:
            raise InstallError(said)
        shutil.move(pure[0], folder / pure[0].name)


def _own_wheel(folder: Path) -> list[str]:
    """Returns the project's wheel, built here, so that the machine need not build it."""
    python = shutil.which(f"python{TARGET_PYTHON}")
    if python is None:
        return [f"no python{TARGET_PYTHON} here: the project is built on the machine only"]
    command = [python, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(folder), str(ROOT)]
    said = _run(command)
    if said is not None:
        return [f"the project was not built ahead: {said}"]
    (folder / SOURCES).write_text(_sources(), encoding="utf-8")
    return []


def _wheel_of(name: str, folder: Path) -> Path:
    from packaging.utils import parse_wheel_filename

    return next(w for w in folder.glob("*.whl") if parse_wheel_filename(w.name)[0] == name)


def _needs_of(wheel: Path) -> Iterator[str]:
    """Yields the requirements of a wheel on the target, without extras."""
    from packaging.requirements import Requirement

    target = {"python_version": TARGET_PYTHON, "python_full_version": f"{TARGET_PYTHON}.0"}
    target |= {"extra": "", "sys_platform": "linux", "platform_machine": "x86_64"}
    with zipfile.ZipFile(wheel) as archive:
        entry = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = email.parser.BytesParser().parsebytes(archive.read(entry), headersonly=True)
    for text in metadata.get_all("Requires-Dist", []):
        need = Requirement(text)
        if need.marker is None or need.marker.evaluate(target):
            need.marker = None
            yield str(need)


# There, without network ----------------------------------------------------------------------


def is_installed() -> bool:
    """Returns whether this Python can run the project."""
    try:
        importlib.metadata.version("penstock")
        return importlib.util.find_spec("penstock._native") is not None
    except (importlib.metadata.PackageNotFoundError, ModuleNotFoundError):
        return False


def install(environment: Path = ENVIRONMENT, wheels: Path = WHEELS) -> Path:
    """Makes the environment, unless it exists for these sources; returns its Python.

    Raises:
        InstallError: something of it failed.
    """
    python = environment / "bin" / "python"
    stamp, wanted = environment / "installed", _fingerprint(wheels)
    if stamp.exists() and stamp.read_text(encoding="utf-8") == wanted:
        return python
    if not python.exists():
        _must([sys.executable, "-m", "venv", "--without-pip", str(environment)])
        _see_packages_of_this_python(environment)
    pip = [str(python), "-m", "pip", "install", "-q", "--no-index", "--disable-pip-version-check"]
    found = ["--find-links", str(wheels)]
    said = _run([*pip, *found, *requirements()])
    if said is not None:  # a package here is too old, and its wheel did not travel: try without
        _say(f"not as pyproject.toml wants it: {said}")
        carried = _third_party(wheels)
        if not carried:
            raise InstallError(f"no wheels in {wheels}: make gpu-wheels, where there is a network")
        _must([*pip, "--no-deps", *map(str, carried)])
    for text in COMPARED:
        if (said := _run([*pip, *found, text])) is not None:
            _say(f"{text} was not installed: {said}")
    _install_project(pip, python, wheels)
    stamp.write_text(wanted, encoding="utf-8")
    return python


def _see_packages_of_this_python(environment: Path) -> None:
    """Adds the packages of this Python by a .pth file. If this Python is in an environment,
    ``--system-site-packages`` would add those of its base Python.
    """
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site = environment / "lib" / version / "site-packages"
    own = dict.fromkeys(sysconfig.get_path(key) for key in ("purelib", "platlib"))
    others = [p for p in sys.path if p.endswith(("site-packages", "dist-packages"))]
    lines = [path for path in dict.fromkeys([*own, *others]) if Path(path).is_dir()]
    (site / "packages_of_the_machine.pth").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _install_project(pip: list[str], python: Path, wheels: Path) -> None:
    """Installs the project's wheel if it was built from these sources and works; otherwise
    builds the tree.

    Raises:
        InstallError: neither.
    """
    ahead, built_of = sorted(wheels.glob("penstock-*.whl")), wheels / SOURCES
    if ahead and built_of.exists() and built_of.read_text(encoding="utf-8") == _sources():
        said = _run([*pip, "--no-deps", "--force-reinstall", str(ahead[-1])])
        said = said or _run([str(python), "-c", "import penstock._native"])
        if said is None:
            return
        _say(f"the wheel of the project does not run here, so it is built: {said}")
    options = ["--no-deps", "--no-build-isolation", "--force-reinstall"]
    options += ["-C", "cmake.define.PENSTOCK_WERROR=OFF"]  # a compiler that is new to us may warn
    _must([*pip, *options, str(ROOT)])


def keep_bytecode(python: Path) -> None:
    """Lets processes that this one starts write and read compiled modules. The first time,
    those of the largest packages are made on all cores: a process would make them on one.
    """
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ["PYTHONPYCACHEPREFIX"] = str(BYTECODE)
    if BYTECODE.exists():
        return
    program = f"""
import compileall, importlib.util
for name in {_HEAVY!r}:
    spec = importlib.util.find_spec(name)
    for place in (spec and spec.submodule_search_locations) or ():
        compileall.compile_dir(place, quiet=2, workers=0)
"""
    said = _run([str(python), "-c", program])
    if said is not None:
        _say(f"modules are compiled when they are imported: {said}")


def _third_party(wheels: Path) -> list[Path]:
    return [w for w in sorted(wheels.glob("*.whl")) if not w.name.startswith("penstock-")]


def _sources() -> str:
    """Returns a fingerprint of all that the project is built of."""
    digest = hashlib.sha256()
    listed = [ROOT / "pyproject.toml", ROOT / "CMakeLists.txt"]
    listed += sorted((ROOT / "native").iterdir())
    for place in sorted((ROOT / "src" / "penstock").iterdir()):
        listed += sorted(place.resolve().rglob("*.py")) if place.is_dir() else [place]
    for file in listed:
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def _fingerprint(wheels: Path) -> str:
    """Returns that of everything that is installed."""
    return "\n".join([_sources(), *sorted(wheel.name for wheel in wheels.glob("*.whl"))])


def _must(command: list[str]) -> None:
    said = _run(command)
    if said is not None:
        raise InstallError(f"{' '.join(command[:6])} …: {said}")


def _run(command: list[str]) -> str | None:
    """Returns the end of what a command said if it failed, else None."""
    environ = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_BUILD_TIMEOUT_S, env=environ
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return None if done.returncode == 0 else (done.stdout + done.stderr).strip()[-2000:]


def _say(line: str) -> None:
    sys.stdout.write(f"install: {line}\n")
    sys.stdout.flush()
