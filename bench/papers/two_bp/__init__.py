"""2BP's numbers beside ours (Rae, Lee, Richings 2024), and the models that they were taken with."""

from __future__ import annotations

from bench.papers.page import PaperTable


def tables() -> tuple[PaperTable, ...]:
    """Returns all tables of the paper's section."""
    # Imported here: workers that train the paper's ResNet import this package, and no tables.
    from bench.papers.two_bp import claims, figures, theory

    return (
        claims.claims(),
        theory.table_1(),
        figures.figures_3_and_4(),
        figures.figures_6_and_7(),
        figures.table_3_rates(),
        figures.stages_table(),
        figures.runs_table(),
        theory.figure_5(),
        theory.other_schemes(),
    )
