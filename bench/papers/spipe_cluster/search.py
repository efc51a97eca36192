"""``python -m bench.papers.spipe_cluster.search``: our fastest plans for figure 9's workloads.

Writes ``data/spipe_ours.json``, which the page shows. Takes minutes.
"""

from __future__ import annotations

import sys
from concurrent.futures import ProcessPoolExecutor

from bench.papers.spipe_cluster.measured import Workload, measured
from bench.papers.spipe_cluster.ours import Found, find, record


def _search(case: tuple[Workload, bool]) -> Found:
    workload, blocking = case
    one = find(workload, blocking=blocking)
    sys.stderr.write(
        f"{workload.billions}B, {workload.sequence},"
        f" {'blocking' if blocking else 'not blocking'}: {one.best},"
        f" {one.mobius_s / one.best_s:.3f}\n"
    )
    return one


def main() -> int:
    """Searches all workloads, with blocking transfers and without, on all cores."""
    cases = [(workload, blocking) for blocking in (True, False) for workload in measured()]
    with ProcessPoolExecutor() as pool:
        record(tuple(pool.map(_search, cases)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
