"""Cost of moving a state with Adam's moments out and in, and of ``cp``: seconds and MB/s.

    python -m bench.moves [--hidden 1024] [--layers 8] [--rounds 3] [--folder DIR] [--json]

A run of one step leaves a saved state. Each round measures in turn, on the same disk: ``export``
to each format, ``cp -r`` of what it wrote (forced to disk by ``sync`` of each file), and ``import``
of it into a new run. Times are of whole commands, with the start of Python and of torch, and with
the preparation of the new run. ``start_s``: ``penstock import --dry-run``, which writes nothing.
Ratios compare medians of one call.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

from bench.weights import config as trained_config

FORMATS = ("dcp", "universal")


def penstock(*words: str | Path) -> float:
    """Runs a command to its end; returns seconds."""
    began_s = time.perf_counter()
    module = [sys.executable, "-m", "penstock.client.main"]
    subprocess.run([*module, *map(str, words)], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began_s


def bytes_of(folder: Path) -> int:
    """Returns the bytes of all files of a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def copy_seconds(source: Path, target: Path) -> float:
    """Copies a folder by ``cp``, forced to disk; returns seconds."""
    began_s = time.perf_counter()
    subprocess.run(["cp", "-r", str(source), str(target)], check=True)
    subprocess.run(["sync", *(str(path) for path in target.rglob("*"))], check=True)
    seconds = time.perf_counter() - began_s
    shutil.rmtree(target)
    return seconds


def measured(file: Path, run_dir: Path, form: str, folder: Path) -> dict[str, float]:
    """Returns the seconds of one round with a format."""
    out, other = folder / form, folder / "imported"
    row = {"export_s": penstock("export", run_dir, out, "--format", form)}
    row["num_bytes"] = bytes_of(out)
    row["cp_s"] = copy_seconds(out, folder / "cp")
    into = ("--config", file, "--run-dir", other)
    row["start_s"] = penstock("import", out, *into, "--dry-run")
    row["import_s"] = penstock("import", out, *into)
    shutil.rmtree(out)
    shutil.rmtree(other)
    return row


def rows(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Returns a row for each format, with medians of all rounds."""
    run_dir, file = folder / "run", folder / "run.yaml"
    fields = trained_config(options, run_dir)
    fields["train"] = {"steps": 1, "global_batch": 2, "micro_batch": 1}
    fields["cluster"].pop("preload")
    file.write_text(yaml.safe_dump(fields))
    penstock("train", file)
    results = []
    for form in FORMATS:
        rounds = [measured(file, run_dir, form, folder) for _ in range(options.rounds)]
        row = {key: statistics.median(each[key] for each in rounds) for key in rounds[0]}
        megabytes = row["num_bytes"] / 1e6
        results.append(
            {
                "format": form,
                **row,
                "export_mb_s": megabytes / row["export_s"],
                "import_mb_s": megabytes / row["import_s"],
                "cp_mb_s": megabytes / row["cp_s"],
                "export_over_cp": row["export_s"] / row["cp_s"],
                "import_over_cp": row["import_s"] / row["cp_s"],
            }
        )
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="folder of the files; default: a temporary one")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="moves-") as name:
        results = rows(options, Path(name))
    for row in results:
        if options.json:
            sys.stdout.write(json.dumps(row) + "\n")
            continue
        words = (f"{key} {value:,.2f}" for key, value in row.items() if key != "format")
        sys.stdout.write(f"{row['format']}: {', '.join(words)}\n")


if __name__ == "__main__":
    main()
