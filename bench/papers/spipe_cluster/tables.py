"""SPipe's numbers beside ours (Ryu et al., SC 2025), in the order of the page."""

from __future__ import annotations

from bench.papers import rollback
from bench.papers.page import PaperTable, claims_table
from bench.papers.spipe_cluster.batches import batch_table
from bench.papers.spipe_cluster.claims import claims
from bench.papers.spipe_cluster.figures import averages_table, figure_9_table, memory_table
from bench.papers.spipe_cluster.ours_tables import ours_tables
from bench.papers.spipe_cluster.schedules import ablation_table, units


def tables() -> tuple[PaperTable, ...]:
    """Returns all tables."""
    return (
        claims_table("SPipe", claims()),
        units(),
        figure_9_table(),
        averages_table(),
        memory_table(),
        batch_table(),
        ablation_table(),
        *ours_tables(),
        *rollback.tables(),
    )
