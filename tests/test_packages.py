"""The archive of the sources and the metadata of packages.

:mod:`tests.integration.test_wheel` builds and installs a wheel.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from pathlib import Path, PurePosixPath

import pytest
from packaging.metadata import Metadata

ROOT = Path(__file__).parents[1]
PACKAGE = PurePosixPath("src/penstock")
TOP = {"CHANGELOG.md", "CMakeLists.txt", "LICENSE", "PKG-INFO", "README.md", "pyproject.toml"}
LEFT_OUT = {"site.css", "pictures", "__pycache__"}
"""Names in the package's folders that packages leave out."""
LARGEST_BYTES = 3_000_000


@pytest.fixture(name="archive", scope="module")
def _archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the archive of the sources, made without a compiler on PATH."""
    pytest.importorskip("scikit_build_core", reason="pip install 'penstock[dev]'")
    folder = tmp_path_factory.mktemp("archive")
    program = (
        "import sys; from scikit_build_core.build import build_sdist; build_sdist(sys.argv[1])"
    )
    subprocess.run(
        [sys.executable, "-c", program, folder],
        cwd=ROOT,
        env={**os.environ, "PATH": str(folder)},
        check=True,
        capture_output=True,
        timeout=600.0,
    )
    (archive,) = folder.glob("penstock-*.tar.gz")
    return archive


def contents(archive: Path) -> dict[str, tarfile.TarInfo]:
    """Returns the members of an archive by their paths below its folder."""
    with tarfile.open(archive) as tar:
        return {member.name.partition("/")[2]: member for member in tar if not member.isdir()}


def sources() -> set[str]:
    """Returns the paths of all files that the package and its C++ module are made of."""
    places = set(TOP) - {"PKG-INFO"}
    for link in (ROOT / PACKAGE).iterdir():
        files = link.resolve().rglob("*") if link.is_dir() else [link.resolve()]
        for path in (path for path in files if path.is_file()):
            place = PurePosixPath(link.name) / path.relative_to(link.resolve())
            if not LEFT_OUT & {*place.parts}:
                places.add(str(PACKAGE / place))
    return places | {f"native/{path.name}" for path in (ROOT / "native").iterdir()}


def test_the_archive_has_the_sources_each_once_and_nothing_else(archive: Path) -> None:
    members = contents(archive)
    assert {*members} - {"PKG-INFO"} == sources()
    assert [name for name, member in members.items() if not member.isfile()] == []
    assert archive.stat().st_size < LARGEST_BYTES


def test_the_metadata_is_valid(archive: Path) -> None:
    with tarfile.open(archive) as tar:
        (member,) = (
            member
            for member in tar
            if member.name.count("/") == 1 and member.name.endswith("/PKG-INFO")
        )
        file = tar.extractfile(member)
        assert file is not None
        metadata = Metadata.from_email(file.read(), validate=True)
    assert (metadata.name, metadata.license_expression) == ("penstock", "Apache-2.0")
    assert metadata.license_files == ["LICENSE"]
    assert metadata.description_content_type == "text/markdown"
    assert metadata.description == (ROOT / "README.md").read_text(encoding="utf-8")
    # Package indexes refuse a licence classifier together with a licence expression.
    assert not [line for line in metadata.classifiers or () if line.startswith("License")]
    requirements = metadata.requires_dist or ()
    extras = {extra for line in requirements if line.name == "penstock" for extra in line.extras}
    assert extras <= {*(metadata.provides_extra or ())}
    assert [str(line) for line in requirements if line.url] == []


def test_packages_contain_no_kernels_of_the_building_processor() -> None:
    """Kernels of each instruction set are files of their own, chosen when a process starts."""
    text = (ROOT / "CMakeLists.txt").read_text(encoding="utf-8")
    flags = {word.strip(")") for word in text.split() if word.startswith("-m")}
    assert flags == {"-mavx2", "-mf16c", "-mavx512f", "-mavx512bw", "-mprefer-vector-width=512"}
