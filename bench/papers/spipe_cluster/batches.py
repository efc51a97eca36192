"""Figures 12 and 14: other sizes of micro-batches and mini-batches, for all eight models.

``python -m bench.papers.spipe_cluster.batches`` simulates them (minutes) and writes
``data/spipe_batches.json``, which the page shows.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from functools import lru_cache
from statistics import fmean

from bench.papers.page import PaperTable
from bench.papers.spipe_cluster.measured import DATA, Workload, measured, write_rows
from bench.papers.spipe_cluster.systems import SYSTEMS, predict

RECORD = DATA / "spipe_batches.json"
MICRO_BATCHES = (1, 2, 4, 8)
SCALES = (1, 2, 3, 4)
"""Multiples of figure 14's smallest mini-batch, 8 sequences a node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speedups:
    """SPipe over Mobius of one model: whole iteration, GPUs, CPU step; ``fits``: both do."""

    figure: int
    billions: int
    size: int
    total: float
    gpu: float
    cpu: float
    fits: bool


PAPER = {
    12: {
        1: (1.14, 1.00, 3.68),
        2: (1.17, 1.03, 3.66),
        4: (1.21, 1.07, 3.67),
        8: (1.26, 1.12, 3.61),
    },
    14: {
        1: (1.36, 1.16, 2.38),
        2: (1.28, 1.08, 3.07),
        3: (1.23, 1.04, 3.22),
        4: (1.18, 1.02, 3.68),
    },
}
"""The averages that section 5.3 prints: total, GPU and CPU speed-up over Mobius, by size."""


def _models() -> tuple[tuple[int, int], ...]:
    """Returns sizes of models and their nodes."""
    return tuple(dict.fromkeys((one.billions, one.nodes) for one in measured()))


def simulate_all() -> tuple[Speedups, ...]:
    """Simulates both figures."""
    found = []
    for billions, nodes in _models():
        sizes = [(12, size, size, 32 * nodes) for size in MICRO_BATCHES]
        sizes += [(14, scale, 2, 8 * scale * nodes) for scale in SCALES]
        for figure, size, micro_batch, mini_batch in sizes:
            workload = Workload(
                billions=billions,
                sequence=1024,
                nodes=nodes,
                micro_batch=micro_batch,
                mini_batch=mini_batch,
            )
            mobius, spipe = (predict(SYSTEMS[name], workload) for name in ("Mobius", "SPipe"))
            found.append(
                Speedups(
                    figure=figure,
                    billions=billions,
                    size=size,
                    total=mobius.iteration_s / spipe.iteration_s,
                    gpu=mobius.gpu_s / spipe.gpu_s,
                    cpu=mobius.tail_s / spipe.tail_s,
                    fits=mobius.fits and spipe.fits,
                )
            )
            sys.stderr.write(f"{billions}B, figure {figure}, {size}\n")
    return tuple(found)


@lru_cache(maxsize=1)
def recorded() -> tuple[Speedups, ...]:
    """Returns what was simulated last."""
    return tuple(Speedups(**row) for row in json.loads(RECORD.read_text(encoding="utf-8")))


def average(figure: int, size: int, what: str) -> float:
    """Returns the mean speed-up over the models that fit."""
    return fmean(
        getattr(one, what)
        for one in recorded()
        if (one.figure, one.size) == (figure, size) and one.fits
    )


def batch_table() -> PaperTable:
    """Returns the averages of figures 12 and 14."""
    rows = []
    for figure, sizes in PAPER.items():
        for size, printed in sizes.items():
            cells = [
                cell
                for what, value in zip(("total", "gpu", "cpu"), printed, strict=True)
                for cell in (f"{value:.2f}", f"{average(figure, size, what):.2f}")
            ]
            fitting = sum(
                one.fits for one in recorded() if (one.figure, one.size) == (figure, size)
            )
            name = f"{size} a micro-batch" if figure == 12 else f"{8 * size} a node"
            rows.append((f"figure {figure}", name, *cells, str(fitting)))
    return PaperTable(
        title="SPipe: sizes of micro-batches and mini-batches, figures 12 and 14",
        text=(
            "Average speed-ups of SPipe over Mobius, of the whole iteration, of the GPUs and of the"
            " CPU step after them: what section 5.3 prints, and simulated, over the models of which"
            " both fit (how many of eight). A part of figure 12's runs is among those that the"
            " constants are fitted to; figure 14's are not. Recorded by `python -m"
            " bench.papers.spipe_cluster.batches`."
        ),
        columns=(
            "",
            "sequences",
            "total, paper",
            "here",
            "GPU, paper",
            "here",
            "CPU, paper",
            "here",
            "models",
        ),
        rows=tuple(rows),
    )


def main() -> int:
    """Simulates and records."""
    write_rows(RECORD, map(asdict, simulate_all()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
