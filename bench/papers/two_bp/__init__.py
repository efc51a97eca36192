"""2BP's numbers beside ours (Rae, Lee, Richings 2024), and the models that they were taken with."""

from __future__ import annotations

from bench.papers.page import PaperTable
from bench.papers.two_bp.theory import figure_5, measured_gains, other_schemes, table_1


def tables() -> tuple[PaperTable, ...]:
    """Returns all tables of the paper's section."""
    return (table_1(), measured_gains(), figure_5(), other_schemes())
