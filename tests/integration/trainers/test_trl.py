"""TRL in an environment of its own: losses, ids and labels, and the settings of its files."""

from __future__ import annotations

import json
import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.client.convert.conversion import convert
from penstock.config.schema import parse_config
from penstock.daemons.scheduler.machine.activities.learning_rates import learning_rate
from penstock.models.data.chat.published.variants import training_text
from tests.client.test_convert import TRL as FILE
from tests.data.dpo import make as dpo
from tests.data.preferences import make as preferences
from tests.data.sft import make
from tests.integration.trainers.environments import TRL, answer, environment, ran
from tests.models.test_masks import DATA, compare

pytestmark = pytest.mark.integration

LOSSES = Path(make.__file__).parent / "losses.json"
TOLERANCE = 1e-6
SHIPPED = ("llama3", "llama3_1", "llama3_2", "gemma", "gemma3")
"""Templates that TRL ships and that the tests may not hold."""


@pytest.fixture(scope="module")
def trl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with TRL."""
    return environment(tmp_path_factory.mktemp("trl"), TRL)


def test_the_stored_losses_are_those_of_trl(trl: Path, tmp_path: Path) -> None:
    ran(trl, "tests.data.sft.make", str(tmp_path))
    made = json.loads((tmp_path / "losses.json").read_text())["losses"]
    stored = json.loads(LOSSES.read_text())["losses"]
    assert made.keys() == stored.keys()
    for name, losses in made.items():
        assert losses == pytest.approx(stored[name], rel=TOLERANCE), name


def test_the_stored_losses_of_pairs_are_those_of_trl(trl: Path, tmp_path: Path) -> None:
    ran(trl, "tests.data.dpo.make", str(tmp_path))
    made = json.loads((tmp_path / "losses.json").read_text())
    stored = json.loads((Path(dpo.__file__).parent / "losses.json").read_text())
    assert made.keys() == stored.keys()
    for kind in dpo.LENGTHS:
        assert made[kind]["losses"] == pytest.approx(stored[kind]["losses"], abs=1e-5), kind
        assert made[kind]["eval"] == pytest.approx(stored[kind]["eval"], abs=1e-5), kind


def test_the_stored_losses_without_a_reference_are_those_of_trl(trl: Path, tmp_path: Path) -> None:
    ran(trl, "tests.data.preferences.make", str(tmp_path))
    made = json.loads((tmp_path / "losses.json").read_text())
    stored = json.loads((Path(preferences.__file__).parent / "losses.json").read_text())
    assert made.keys() == stored.keys()
    for kind in preferences.KINDS:
        assert made[kind]["losses"] == pytest.approx(stored[kind]["losses"], abs=1e-5), kind
        assert made[kind]["eval"] == pytest.approx(stored[kind]["eval"], abs=1e-5), kind


def test_the_stored_digests_are_those_of_trl(trl: Path, tmp_path: Path) -> None:
    out = tmp_path / "masks.json"
    ran(trl, "tests.data.chat.masks", str(DATA), str(out))
    assert json.loads(out.read_text()) == json.loads((DATA / "masks.json").read_text())


def test_ids_and_labels_equal_those_of_trl_with_the_templates_that_it_ships(
    trl: Path, tmp_path: Path
) -> None:
    """TRL has no training variant of Llama 3.1 and 3.2. There Penstock's variant is the template
    that TRL reads.
    """
    (shipped,) = trl.parents[1].glob("lib/*/site-packages/trl/chat_templates")
    folder = tmp_path / "templates"
    folder.mkdir()
    texts = {name: (shipped / f"{name}.jinja").read_text(encoding="utf-8") for name in SHIPPED}
    for name in ("llama3_1", "llama3_2"):
        texts[f"{name}-variant"] = str(training_text(texts[name]))
    for name, text in texts.items():
        (folder / f"{name}.jinja").write_text(text, encoding="utf-8")
    out = tmp_path / "masks.json"
    ran(trl, "tests.data.chat.masks", str(DATA), str(out), str(folder))
    for name, modes in json.loads(out.read_text())["templates"].items():
        for mode, digests in modes.items():
            if mode == "assistant" and f"{name}-variant" in texts:
                assert set(digests.split()) == {"-"}, "TRL has a variant now: compare with it"
                continue
            counts = compare(texts[name], mode, digests.split())
            print(name, mode, dict(counts))
            assert counts["equal"] > 300 and not counts["refused here alone"]


FILES: dict[str, dict[str, Any]] = {
    "example": {"packing": False},
    "defaults": {},
    "steps": {"max_steps": 30, "warmup_steps": 3, "lr_scheduler_type": "linear"},
    "share": {"warmup_steps": 0.1, "num_train_epochs": 2.5},
    "constant": {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 7},
    "stable": {
        "lr_scheduler_type": "warmup_stable_decay",
        "lr_scheduler_kwargs": {"num_decay_steps": 9, "min_lr_ratio": 0.1},
        "warmup_steps": 4,
    },
    "cosine": {
        "lr_scheduler_type": "cosine_with_min_lr",
        "lr_scheduler_kwargs": {"min_lr": 1e-6},
        "learning_rate": 3e-4,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
    },
    "uneven": {"per_device_train_batch_size": 7, "gradient_accumulation_steps": 3},
}
RECORDS = 160


def test_converted_files_have_the_settings_that_trl_reads(
    trl: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chats.jsonl").write_text('{"messages": []}\n' * RECORDS)
    smallest = {"model_name_or_path": "m", "dataset_name": "chats.jsonl", "bf16": False}
    smallest |= {"output_dir": "out", "use_cpu": True, "report_to": "none"}
    # This pair of versions ignores warmup_ratio.
    share = {"warmup_ratio": None, "warmup_steps": 0.03}
    example = yaml.safe_load(FILE) | share | {"use_cpu": True, "bf16": False, "report_to": "none"}
    paths = []
    for name, keys in FILES.items():
        paths.append(tmp_path / f"{name}.yaml")
        base = example if name == "example" else smallest
        kept = {key: value for key, value in (base | keys).items() if value is not None}
        paths[-1].write_text(yaml.safe_dump(kept))
    module = "tests.integration.trainers.trl_settings"
    theirs = answer(trl, module, str(RECORDS), *map(str, paths))
    for path, expected in zip(paths, theirs, strict=True):
        conversion = convert("trl", path, 1)
        config = parse_config(dict(conversion.config))
        train, optimizer, data = config.train, config.optimizer, config.data
        steps = train.steps
        if train.epochs is not None:
            rows = Fraction(str(train.epochs)) * RECORDS
            steps = math.ceil(rows / train.global_batch)
        uneven = path.stem == "uneven"
        # 160 records at a batch of 21 leave a smaller batch at the end of each pass.
        assert conversion.changes_result is uneven, (path.stem, conversion.dropped)
        assert train.global_batch == expected["batch"]
        assert (steps == expected["steps"]) is not uneven
        length = expected["length"]
        rates = [learning_rate(optimizer, expected["steps"], n + 1) for n in range(length)]
        known = expected["rates"]
        assert rates[: len(known)] == pytest.approx(known, rel=1e-12, abs=0), path.stem
        assert data.sequence_length == length
        assert (data.packing == "best-fit") is expected["packing"]
        assert (train.clip_grad_norm, optimizer.weight_decay) == (
            expected["clip"],
            expected["decay"],
        )
        assert [*optimizer.betas, optimizer.eps] == [*expected["betas"], expected["eps"]]
        assert (data.train_on == "assistant") is expected["assistant"]
        assert (config.model.dtype == "bf16") is expected["bf16"]
        assert config.run.seed == expected["seed"]
