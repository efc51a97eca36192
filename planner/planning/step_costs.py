"""With which costs a run's steps are judged: those that it was given, or those that it showed."""

from __future__ import annotations

from penstock.config.schema import Config
from penstock.planner.planning.configured import config_prices, optimizer_of
from penstock.planner.traces.critical_path import CriticalPath, critical_path
from penstock.planner.traces.fitted import Fit
from penstock.planner.traces.measured import MeasuredAttempt
from penstock.planner.traces.what_if import CostSource, Pricing, Savings, savings
from penstock.protocol.run.rundir import RunDirectory


def given_pricing(run: RunDirectory) -> Pricing | None:
    """Returns the costs of ``schedule.profile``, or of the emulated cluster; None without either.

    Raises:
        ConfigError: the profile cannot be read, or is of another model.
    """
    config = run.config
    profile = config.schedule.profile
    if profile is None and not config.cluster.platform.simulated_clock:
        return None
    prices = config_prices(config, run.table)
    return Pricing(
        costs=prices.costs,
        cluster=prices.cluster,
        optimizer=optimizer_of(config),
        source=CostSource.EMULATED if profile is None else CostSource.PROFILE,
    )


def fitted_pricing(config: Config, fit: Fit) -> Pricing:
    """Returns costs that were fitted to attempts of the run."""
    return Pricing.of_fit(fit, optimizer_of(config).start)


def judge_step(
    config: Config, given: Pricing | None, attempt: MeasuredAttempt
) -> tuple[CriticalPath, Savings]:
    """Returns where a step went, and what would be saved: by costs fitted to this very attempt, as
    a profile knows nothing of its day; by those that an emulated cluster runs on.
    """
    fit = Fit.of([attempt], config.cluster.workers)
    path = critical_path(attempt, fit)
    if given is None or given.source is not CostSource.EMULATED:
        given = fitted_pricing(config, fit)
    return path, savings(attempt.plan, given, path)
