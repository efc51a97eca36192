"""A preloaded process: imports, and forks on request until its owner hangs up or dies."""

from __future__ import annotations

import argparse
import socket
import sys
from collections.abc import Sequence

from penstock.daemons.preload.preloaders import STAGES
from penstock.daemons.preload.server import serve
from penstock.protocol.run.process import die_with_parent


def main(words: Sequence[str] | None = None) -> int:
    """Imports, and serves the owner's socket until it hangs up; returns the exit code."""
    parser = argparse.ArgumentParser(prog="penstock.daemons.preload.main", description=__doc__)
    parser.add_argument("--kind", choices=sorted(STAGES), required=True)
    parser.add_argument("--parent-pid", type=int, required=True)
    parser.add_argument("--socket", type=int, required=True)
    parser.add_argument("--room", help="room for the command lines of children")
    given = parser.parse_args(words)
    die_with_parent(given.parent_pid)
    serve(socket.socket(fileno=given.socket), given.kind)
    return 0


if __name__ == "__main__":
    sys.exit(main())
