"""``python -m tests.integration.diagnosis [--only NAME …] [--jobs N] [--clean SECONDS]``."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.integration.diagnosis.diagnosing import Finding, clean, diagnose
from tests.integration.diagnosis.faults import FAULTS, Fault
from tests.integration.diagnosis.watching import Watch

_OWN_NETWORK = 'ip link set lo up && exec "$@"'
HEAD = """| fault | alert | after | promised | silenced | right |
| --- | --- | --- | --- | --- | --- |"""


def row(finding: Finding) -> str:
    """Returns a row of the table."""
    short = [name.removeprefix("Penstock") for name in finding.told]
    silenced = ", ".join(name.removeprefix("Penstock") for name in finding.silenced)
    after = "never" if finding.after_s is None else f"{finding.after_s:.0f} s"
    cells = (
        finding.fault.text,
        ", ".join(short) or "none",
        after,
        f"{finding.delay_s:.0f} s",
        silenced,
        "yes" if finding.right else f"no: {finding.fault.alert.removeprefix('Penstock')}",
    )
    return f"| {' | '.join(cells)} |"


def main(arguments: Sequence[str] | None = None) -> int:
    """Plant faults, or none; returns 0 if exactly the right alerts came."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", help="names of faults", default=[])
    parser.add_argument("--jobs", type=int, default=3, help="so many faults at once")
    parser.add_argument("--clean", type=float, metavar="SECONDS", help="runs without a fault")
    parser.add_argument("--folder", type=Path, help="for what runs leave (default: removed)")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    if not asked.inside:
        again = [sys.executable, "-m", __spec__.name, "--inside", *(arguments or sys.argv[1:])]
        os.execvp("unshare", ["unshare", "--net", "sh", "-c", _OWN_NETWORK, "sh", *again])
    if asked.folder is not None:
        asked.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=asked.folder, prefix="diagnosis-") as name:
        with Watch(Path(name)) as watch:
            if asked.clean is not None:
                told = clean(watch, Path(name), asked.clean)
                print(f"{asked.clean:g} s of clean runs: {len(told)} alerts", *told, sep="\n")
                return bool(told)
            chosen = [f for f in FAULTS if not asked.only or f.name in asked.only]
            print(HEAD, flush=True)
            with ThreadPoolExecutor(asked.jobs) as pool:
                results = pool.map(lambda fault: _tried(fault, watch, Path(name)), chosen)
            return 0 if all(results) else 1


def _tried(fault: Fault, watch: Watch, folder: Path) -> bool:
    """Plant one fault and print its row."""
    try:
        finding = diagnose(fault, watch, folder)
    except Exception:
        print(f"| {fault.name}: could not be planted |", flush=True)
        traceback.print_exc()
        return False
    print(row(finding), flush=True)
    print(f"{fault.name}: {finding.summary}", file=sys.stderr, flush=True)
    return finding.right


if __name__ == "__main__":
    sys.exit(main())
