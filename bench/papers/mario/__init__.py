"""Mario's numbers beside ours (Liu et al., PPoPP 2025).

The passes on unit costs are in :mod:`.steps`; the runs of section 6, which take minutes, are
recorded by ``python -m bench.papers.mario`` (:mod:`.recording`) and shown by :mod:`.evaluation`.
"""

from __future__ import annotations

from bench.papers.mario.claims import claims
from bench.papers.mario.evaluation import figure_6, figures_8_and_9, table_5_memory, table_5_rates
from bench.papers.mario.recording import load
from bench.papers.mario.steps import figure_2, other_schemes, table_1
from bench.papers.mario.tuner import figure_11
from bench.papers.page import PaperTable


def tables() -> tuple[PaperTable, ...]:
    """Returns the claims, then figure 2, table 1, and section 6."""
    recorded = load()
    steps, memory = figure_2(), table_1()
    return (
        claims(recorded, steps, memory),
        steps,
        other_schemes(),
        memory,
        table_5_rates(recorded),
        figure_6(recorded),
        table_5_memory(recorded),
        figures_8_and_9(recorded),
        figure_11(recorded),
    )
