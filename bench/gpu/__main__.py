"""The command line; see the package. Until the project is installed only the standard library is
there.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from bench.gpu import install

GUARD = "PENSTOCK_GPU_ENVIRONMENT"


def main() -> int:
    """Returns the exit code: 0 also where measurements failed, since what was found counts."""
    if len(sys.argv) > 1 and sys.argv[1] in ("wheels", "page"):
        return _wheels(sys.argv[2:]) if sys.argv[1] == "wheels" else _page(sys.argv[2:])
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description="See bench/gpu.")
    parser.add_argument("parts", nargs="*", metavar="PART", help="all, unless some are named")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="toy sizes: tries the code")
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", help="of measurements")
    parser.add_argument("--patience", type=float, default=1.0, metavar="TIMES", help="of deadlines")
    parser.add_argument("--no-pin", action="store_true", help="where the driver refuses to pin")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or "build/gpu"))
    options = parser.parse_args()
    if not install.is_installed() and GUARD not in os.environ:
        return _again_installed()
    return _measure(options, parser)


def _again_installed() -> int:
    try:
        python = install.install()
    except install.InstallError as error:
        sys.stderr.write(f"install: {error}\n")
        return 2
    os.environ[GUARD] = str(python)
    install.keep_bytecode(python)
    os.execv(python, [str(python), "-m", "bench.gpu", *sys.argv[1:]])


def _measure(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    from bench.gpu.parts import PARTS, gpu_name, run_part

    unknown = [name for name in options.parts if name not in PARTS]
    if unknown:
        parser.error(f"no part {', '.join(unknown)}; there are {', '.join(PARTS)}")
    gpu = gpu_name() if options.device == "cuda" else None
    if options.device == "cuda" and gpu is None:
        sys.stdout.write("no GPU here (torch finds none): nothing measured\n")
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.parts or PARTS:
        run_part(
            name,
            options.out,
            device=options.device,
            tiny=options.tiny,
            gpu=gpu,
            only=set(options.only),
            patience=options.patience,
            pins=not options.no_pin,
        )
    return 0


def _wheels(arguments: list[str]) -> int:
    there = Path(arguments[0]) if arguments else install.THERE
    try:
        complaints = install.fetch_wheels(there)
    except install.InstallError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    for line in complaints:
        sys.stdout.write(f"without {line}\n")
    sys.stdout.write(f"{len(list(install.WHEELS.glob('*.whl')))} wheels in {install.WHEELS}\n")
    return 0


def _page(arguments: list[str]) -> int:
    from bench.gpu.page import main as page

    return page(arguments)


if __name__ == "__main__":
    sys.exit(main())
