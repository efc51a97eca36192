"""What goes wrong in a seed, and when: kinds of faults, themes, and the plan that the seed decides.

What each kind does is in :mod:`tests.simulation.faults`.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from tests.simulation.endings import ENDINGS

KINDS = {
    "kill": 30,
    "kill at a step": 45,
    "kill at a commit": 16,
    "cut a sweep": 12,
    "kill several": 6,
    "kill a node": 4,
    "kill in a restore": 4,
    "lose a machine": 3,
    "switch off": 3,
    "switch off in a save": 1,
    "lose two machines": 1,
    "lose a machine at a cut": 2,
    "lose a machine at a commit": 1,
    "spare": 1,
    "stop": 4,
    "stop for long": 2,
    "stop for ever": 2,
    "hang": 3,
    "hang in a restore": 1,
    "hang in a save": 2,
    "close a connection": 6,
    "half-open stream": 3,
    "cut the network": 5,
    "cut one way": 3,
    "slow machine": 2,
    "slow network": 2,
    "full disk": 2,
    "stop and kill": 14,
    "late Hello": 3,
    "second scheduler": 1,
    "replace the journal": 1,
    "jump of the clock": 1,
    "stranger": 1,
    "save": 3,
    "stop the run": 1,
    "stop a node": 1,
    "stop in a recovery": 1,
    "insist": 1,
    "stop in a hurry": 1,
    "pause": 1,
    "strike at the end": 2,
    "away at the end": 1,
    "one after the other": 2,
    "drain at work": 24,
    "lose a message": 10,
}
"""Kind -> weight."""
ONLY_BY_NAME = {"stop a newborn": 6}
"""Kind -> weight where kinds are asked for by name: plans of all other seeds stay as they are."""
ONLY_SEVERAL_NODES = (
    *("cut the network", "cut one way", "lose two machines", "lose a machine at a cut", "spare"),
    *("lose a machine at a commit", "away at the end"),
)
WITH_PARTNERS = {
    "lose a machine": 12,
    "switch off": 6,
    "lose two machines": 4,
    "spare": 8,
    "cut a sweep": 12,
    "strike in a re-seed": 10,
    "lose a machine at a commit": 8,
    "strike behind a refill": 10,
}
"""Kind -> weight where memory outlives a machine."""
DEATHS = (
    *("kill", "kill at a step", "cut a sweep", "kill several", "kill a node", "kill in a restore"),
    *("lose a machine", "lose a machine at a cut", "lose a machine at a commit", "save"),
    *("strike in a re-seed", "strike behind a refill"),
    *("kill at a commit", "switch off", "switch off in a save", "lose two machines", "spare"),
)
"""Of these nobody stands still."""
REPLACED = {
    "spare": 4,
    "lose a machine": 2,
    "strike in a re-seed": 2,
    "strike behind a refill": 4,
    "kill": 3,
    "kill at a commit": 1,
    "cut a sweep": 1,
    "save": 1,
}
"""Kind -> weight where partners fill the memory of one node after the other."""
RESTORES = (
    *("kill", "cut a sweep", "kill in a restore"),
    *("lose a machine", "lose a machine at a cut", "save"),
)
"""What is often met where memory is filled again and again."""
ALONE = 24
"""Faults of a seed in which each comes alone: more do not find room in a run's steps."""
ALONE_BELOW = 0.3
PAIRS_BELOW = 0.2
"""Of the seeds in which faults come alone, those in which each strikes at a named point."""
AT_POINTS = {
    "one after the other": 4,
    "drain at work": 5,
    "lose a message": 3,
    "strike behind a refill": 3,
}
"""Kind -> weight in these."""
STORM = 250
"""Faults of a storm: about ten come in each step, most of them while others are still mended."""
STORMS_BELOW = 0.5
ABOUT_THE_END = (*ENDINGS, "kill", "kill at a step", "kill a node")


@dataclass(frozen=True, slots=True)
class Fault:
    """``after_s`` the fault before and ``decisions`` decided attempts later; ``patient``: however
    long those take; ``number`` decides all else.
    """

    kind: str
    after_s: float
    decisions: int
    patient: bool
    number: int


def is_storm(seed: int) -> bool:
    """Returns whether the faults of a seed come as a storm: of each five seeds one does."""
    return ALONE_BELOW <= random.Random(f"faults {seed}").random() < STORMS_BELOW


def draw(
    seed: int, *, several_nodes: bool, partners: bool = False, kinds: tuple[str, ...] = ()
) -> tuple[Fault, ...]:
    """Returns the faults of a seed.

    In some seeds each comes *alone*, when the run has got over the one before by itself: what the
    next fault would have mended by chance shows there. In two thirds of those each strikes at
    a named point: two rare ones, the second in the recovery from the first, and others like them.
    Among many others a fault is no rescue for who would never go on, either, if it comes late; a
    few do. In a *storm* ten come in each step: processes die that have just come, or are about to
    join, again and again.
    """
    dice = random.Random(f"faults {seed}")
    weights = {
        kind: weight
        for kind, weight in (
            KINDS | (WITH_PARTNERS if partners else {}) | (ONLY_BY_NAME if kinds else {})
        ).items()
        if (several_nodes or kind not in ONLY_SEVERAL_NODES) and (not kinds or kind in kinds)
    }
    weather = dice.random()  # first, as is_storm knows
    alone = weather < ALONE_BELOW
    if alone:
        count, spacing = ALONE, (1, 1, 2)
    elif weather < STORMS_BELOW:
        count, spacing = STORM, (*[0] * 9, 1)
    else:
        count = dice.choice((8, 30, 60, 80, 80, 80))
        spacing = dice.choice(((0, 1, 1, 2), (0, 0, 1), (0, 0, 0, 1)))
    pace = dice.choice((0.001, 0.003, 0.01, 0.03))
    if not kinds and weather < PAIRS_BELOW:
        weights = {kind: weight for kind, weight in AT_POINTS.items() if kind in weights}
    elif not kinds:
        weights = _alike(weights, partners) if alone else _themed(weights, dice)
    chosen = dice.choices(list(weights), list(weights.values()), k=count)
    return tuple(
        Fault(
            kind=kind,
            after_s=dice.expovariate(1.0) * pace,
            decisions=dice.choice(spacing),
            patient=alone or dice.random() < 0.25,
            number=dice.getrandbits(32),
        )
        for kind in chosen
    )


def _alike(weights: dict[str, int], partners: bool) -> dict[str, int]:
    """Returns all kinds, each as likely as another, but for those that partners are there for."""
    return {kind: 3 if partners and kind in WITH_PARTNERS else 1 for kind in weights}


def _themed(weights: dict[str, int], dice: random.Random) -> dict[str, int]:
    """Returns the kinds of a seed: all, or deaths alone, or what memory is filled for, or those
    about the end, or a few, each then as likely as another: what is rare among all kinds is often
    met where it has few beside it. Where nodes have partners, those fill it.
    """
    theme = dice.random()
    is_mirrored = "strike in a re-seed" in weights
    if theme < (0.3 if is_mirrored else 0.4):
        return weights
    if theme < (0.4 if is_mirrored else 0.55):
        return {kind: weight for kind, weight in weights.items() if kind in DEATHS}
    restores = [kind for kind in weights if kind in RESTORES]
    if theme < 0.7:
        return REPLACED if is_mirrored else {**dict.fromkeys(restores, 2), "kill": 1}
    if theme < 0.85:
        return {kind: 1 + (kind in ENDINGS) for kind in weights if kind in ABOUT_THE_END}
    few = dice.sample(sorted(weights), 3)
    return {**dict.fromkeys(few, 1), "kill": 1}
