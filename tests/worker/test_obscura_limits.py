"""Obscura under limits on real small models: plans are accepted and run, no device goes above the
limit, and each device's planned peak is at most 3 % above what is measured, and never below.

    python -m tests.worker.test_obscura_limits [--rounds 5]

does the same with larger models and micro-batches, times attempts under the three limits in turns,
and records them in ``bench/papers/data/obscura_runs.json`` for ``docs/evidence/PAPERS.md``.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.papers.obscura.runs import keep, row_of
from penstock.config.schema import Config
from penstock.models.surgery.hf import resolve_hf_config
from penstock.models.surgery.table import build_table
from penstock.planner.memory.footprint import device_peaks
from penstock.planner.planning.configured import trainable_plan
from penstock.planner.planning.pricing import config_prices
from penstock.protocol.plan.instructions import Forward, Keep, SwapOut
from penstock.protocol.plan.plan import Plan
from penstock.protocol.plan.profile import KindProfile, LinearFit, Profile, to_json
from penstock.shm.table import BlockTable
from tests.worker import cluster
from tests.worker.test_peaks import TOO_HIGH, profile_of, use_plan

SHARES = (0.7, 0.42, 0.25)
"""Of the way from full recomputation to none. The first asks for the CMB strategy on the first
device, the second for early forwards and swaps there, the third for early forwards on two devices.
"""

MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"model_type": "gpt2", "n_embd": 64, "n_layer": 8, "n_head": 4, "n_positions": 64},
    "llama": {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 176,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "tie_word_embeddings": False,
    },
    "qwen3": {
        "model_type": "qwen3",
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "tie_word_embeddings": True,
    },
}
"""Three families; GPT-2 has dropouts, Qwen3 norms of queries and keys, and a tied head."""
WIDTHS = ("n_embd", "hidden_size", "intermediate_size", "head_dim")
OBSCURA = {"recompute": "none", "passes": ["obscura"]}
OPERATOR_S = 5e-5


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as found:
        yield found


class Limited:
    """One model on four devices, with its profile; ``width``: how much wider than in ``MODELS``,
    ``micro_batch``: sequences in one, ``budget_s``: of each quantity that is profiled. Where it
    is 0, times are even, only the bytes are measured, and plans are the same on each machine.
    """

    def __init__(
        self,
        model: str,
        folder: Path,
        *,
        width: int = 1,
        micro_batch: int = 2,
        budget_s: float = 0.0,
    ) -> None:
        hf = {"vocab_size": cluster.LLAMA["vocab_size"], **MODELS[model]}
        widths = {key: width * hf[key] for key in WIDTHS if key in hf}
        self._hf, self._micro_batch = {**hf, **widths}, micro_batch
        config = self.config({"recompute": "none"}, None)
        file = folder / f"{model}.json"
        measured = profile_of(config, budget_s)
        file.write_text(to_json(measured if budget_s else with_even_times(measured)))
        self._profile = {"profile": str(file)}
        hf_config = resolve_hf_config(config, tokenizer_vocab_size=None, eos=None)
        self.table: BlockTable = build_table(config, hf_config)

    def config(self, schedule: dict[str, Any], limit: int | None) -> Config:
        """Eight micro-batches, 1F1B."""
        keys = {**schedule, **getattr(self, "_profile", {})}
        made = cluster.make_config(workers=4, micro_batches=8, schedule=keys)
        memory = made.memory.model_copy(update={"device_limit": limit})
        model = made.model.model_copy(update={"hf": self._hf})
        sizes = {"micro_batch": self._micro_batch, "global_batch": 8 * self._micro_batch}
        train = made.train.model_copy(update=sizes)
        return made.model_copy(update={"memory": memory, "model": model, "train": train})

    def peaks(self, config: Config, plan: Plan) -> list[float]:
        """Planned bytes of each device."""
        costs = config_prices(config, self.table).costs
        return [peak.total_bytes for peak in device_peaks(plan, costs)]

    def limit(self, share: float) -> int:
        """Bytes: ``share`` of the way from the least to the most that the fullest device needs."""
        least, most = (
            max(self.peaks(config, trainable_plan(config, self.table)))
            for config in (self.config({"recompute": mode}, None) for mode in ("full", "none"))
        )
        return int(least + share * (most - least))


def with_even_times(profile: Profile) -> Profile:
    """The same bytes. An operator takes a twentieth of a millisecond, a block's backward as long as
    its forward, a fifth of it for the weights: about what these small models take.
    """

    def even(kind: KindProfile) -> KindProfile:
        operators = tuple(replace(one, forward_s=constant(1.0)) for one in kind.operators)
        count = max(1, len(operators))
        return replace(
            kind,
            operators=operators,
            forward_s=constant(count),
            recompute_s=constant(count),
            backward_input_s=constant(0.8 * count),
            backward_weight_s=constant(0.2 * count),
        )

    def constant(operators: float) -> LinearFit:
        return LinearFit(slope=0.0, intercept=OPERATOR_S * operators)

    return replace(profile, kinds={name: even(kind) for name, kind in profile.kinds.items()})


def check(stack: ExitStack, limited: Limited, share: float) -> Plan:
    """Plan and run within a limit; returns the plan."""
    limit = limited.limit(share)
    config = limited.config(OBSCURA, limit)
    made = cluster.build_cluster(stack, config)
    meters = use_plan(made, made.plan)
    for attempt in (1, 2):  # the first fills caches
        made.train(made.job(attempt=attempt))
    for planned, meter in zip(limited.peaks(config, made.plan), meters, strict=True):
        assert meter.peak is not None
        assert meter.peak.num_bytes <= planned <= limit
        assert planned <= (1.0 + TOO_HIGH) * meter.peak.num_bytes
    return made.plan


def relaxes(plan: Plan) -> bool:
    """Whether the first device runs more forwards than 1F1B before its first backward."""
    kinds = [i for i in plan.programs[0] if str(i).startswith(("F ", "B "))]
    return next(n for n, i in enumerate(kinds) if not isinstance(i, Forward)) > plan.num_devices


def swaps(plan: Plan) -> bool:
    """Whether any device swaps."""
    return any(isinstance(i, SwapOut) for program in plan.programs for i in program)


def drops(plan: Plan) -> bool:
    """Whether any forward leaves operators' outputs out."""
    return any(
        isinstance(i, Forward) and i.keep is Keep.SELECTIVE
        for program in plan.programs
        for i in program
    )


def test_three_limits(stack: ExitStack, tmp_path: Path) -> None:
    limited = Limited("gpt2", tmp_path)
    plans = [check(stack, limited, share) for share in SHARES]
    assert all(map(drops, plans))
    assert any(map(relaxes, plans)) and any(map(swaps, plans))


@pytest.mark.slow
@pytest.mark.parametrize("model", [name for name in MODELS if name != "gpt2"])
def test_three_limits_of_other_families(stack: ExitStack, tmp_path: Path, model: str) -> None:
    limited = Limited(model, tmp_path)
    plans = [check(stack, limited, share) for share in SHARES]
    assert all(map(drops, plans))
    assert any(map(relaxes, plans)) and any(map(swaps, plans))


def record(model: str, folder: Path, rounds: int) -> list[dict[str, Any]]:
    """Returns a row a limit, with a run a round: attempts under the three limits in turns."""
    limited = Limited(model, folder, width=3, micro_batch=20, budget_s=0.2)
    limits = [limited.limit(share) for share in SHARES]
    configs = [limited.config(OBSCURA, limit) for limit in limits]
    with ExitStack() as stack:
        made = [cluster.build_cluster(stack, config) for config in configs]
        meters = [use_plan(one, one.plan) for one in made]
        rows = [
            row_of(model, config, limited.table, one.plan)
            for config, one in zip(configs, made, strict=True)
        ]
        for attempt in range(1, rounds + 2):  # the first fills caches
            for one, meter, row in zip(made, meters, rows, strict=True):
                job = one.job(attempt=attempt)
                started_s = time.perf_counter()
                one.train(job)
                step_s = time.perf_counter() - started_s
                peak = max(m.peak.num_bytes for m in meter if m.peak is not None)
                if attempt > 1:
                    row["runs"].append({"peak": peak, "step_s": step_s})
    return rows


def main() -> None:
    """Record all models."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        for model in MODELS:
            rows = record(model, Path(folder), options.rounds)
            keep(model, rows)
            for row in rows:
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
