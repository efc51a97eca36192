"""Deep Optimizer States' numbers beside ours (Maurya et al., Middleware 2024).

:mod:`.rates` has equation 1 and what follows from it, :mod:`.iteration` whole iterations of
DeepSpeed, TwinFlow and Deep Optimizer States on the paper's node, :mod:`.forms` the paper's form of
updates on devices beside ours, and :mod:`.claims` every figure, table and claim.
"""

from __future__ import annotations

from bench.papers.deep_optimizer_states.claims import claims
from bench.papers.deep_optimizer_states.forms import forms
from bench.papers.deep_optimizer_states.iteration import figures, gradients
from bench.papers.deep_optimizer_states.rates import (
    equation_1,
    figure_10,
    figure_16,
    ours,
    strides_on_v100,
)
from bench.papers.page import PaperTable


def tables() -> tuple[PaperTable, ...]:
    """Returns all tables: the claims, then those that they come from."""
    return (
        claims(),
        equation_1(),
        figure_16(),
        strides_on_v100(),
        gradients(),
        figures(),
        figure_10(),
        ours(),
        *forms(),
    )
