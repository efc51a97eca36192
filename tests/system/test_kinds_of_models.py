"""Models of other kinds than decoders of attention layers through real daemons: the plain loop's
losses and weights, and the same bytes whether the backward is split or not. The gate has those
without pictures in ``tests/worker/test_kinds.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save_file
from torch import nn
from transformers import ResNetConfig, ResNetForImageClassification
from transformers.utils.logging import disable_progress_bar

from bench.papers.two_bp import pictures, resnet
from penstock.models.surgery.hf import load_run_config
from tests.folders import start_from_folder
from tests.system import conftest as H
from tests.system.reference import ReferenceLoop, reference_loop
from tests.system.test_parity import check_parity_of

ROOT = Path(__file__).parents[2]

KINDS: dict[str, dict[str, Any]] = {
    "mamba": {
        "model": {"hf": {"model_type": "mamba", "hidden_size": 32, "state_size": 4}},
    },
    "bert": {
        "model": {
            "hf": {
                "model_type": "bert",
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_attention_heads": 4,
                "max_position_embeddings": 32,
                "hidden_dropout_prob": 0.0,
                "attention_probs_dropout_prob": 0.0,
            }
        },
        "data": {"objective": "masked"},
    },
}
"""Without dropout, since a plain loop draws other numbers."""

PICTURES = "resnet"
"""ResNet with the depths of so many bottlenecks; the others have so many layers."""
DEPTHS = {4: [1, 1, 1, 1], 50: [3, 8, 36, 3]}


class PicturesLoop(ReferenceLoop):
    """transformers' own ResNet, with its four stages and its running means and variances."""

    def load_model(self, folder: Path) -> Any:
        hf_config = load_run_config(self.run_dir)
        self.shown = partial(
            resnet.shown,
            side=hf_config.side,
            shown_side=hf_config.shown_side,
            levels=hf_config.vocab_size,
        )
        return ResNetForImageClassification.from_pretrained(folder / "theirs")

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Both models have them in the same order, under other names."""
        return by_our_names(load_run_config(self.run_dir), self.model)

    def logits(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.model(self.shown(inputs)).logits[:, None]


def by_our_names(hf_config: Any, theirs: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of transformers' own ResNet by the names of the one that is cut into blocks,
    which has them in the same order.
    """
    names = [name for name, _ in resnet.ResNetBlocksForClassification(hf_config).named_parameters()]
    return dict(zip(names, theirs.parameters(), strict=True))


def save_pictures(folder: Path, hf: dict[str, Any], seed: int) -> None:
    """A folder with transformers' own ResNet, and the same weights under our names beside it."""
    disable_progress_bar()
    hf_config = resnet.ResNetBlocksConfig(**hf)
    fields = ("num_channels", "embedding_size", "hidden_sizes", "depths", "num_labels")
    torch.manual_seed(seed)
    theirs = ResNetForImageClassification(
        ResNetConfig(**{name: getattr(hf_config, name) for name in fields})
    )
    theirs.save_pretrained(folder / "theirs")
    hf_config.save_pretrained(folder)
    named = by_our_names(hf_config, theirs)
    save_file({name: value.detach() for name, value in named.items()}, folder / "model.safetensors")


def configured(runner: H.Runner, kind: str, changes: dict[str, Any], layers: int) -> Path:
    """The configuration of a run of one kind, with so many layers."""
    path = runner.configure(changes["run"]["name"], changes)
    fields = yaml.safe_load(path.read_text())
    if kind == PICTURES:
        pictures.write_digits(runner.root / "digits.bin")
        hf = {"hidden_sizes": [16, 32, 64, 128], "embedding_size": 8, "depths": DEPTHS[layers]}
        folder = path.with_name(f"{path.stem}-model")
        save_pictures(folder, {"vocab_size": pictures.LEVELS, **hf}, fields["run"]["seed"])
        imports = {"imports": ["bench.papers.two_bp.resnet"], "import_path": str(ROOT)}
        fields["model"] = {**imports, "path": str(folder)}
        fields["data"] = {
            "tokens": str(runner.root / "digits.bin"),
            "sequence_length": pictures.SEQUENCE_LENGTH,
            "objective": "bench.papers.two_bp.pictures:digits",
        }
        fields["train"] |= {"global_batch": 32, "micro_batch": 8}
    else:
        fields["model"]["hf"] = {**KINDS[kind]["model"]["hf"], "num_hidden_layers": layers}
        fields["data"] |= KINDS[kind].get("data", {})
    path.write_text(yaml.safe_dump(fields))
    return path if kind == PICTURES else start_from_folder(path)


def trained(runner: H.Runner, kind: str, passes: list[str], steps: int, layers: int) -> Path:
    """The directory of a finished run."""
    name = f"{kind}-{'-'.join(passes) or 'unsplit'}"
    changes = {
        "run": {"name": name, "dir": str(runner.root / name)},
        "train": {"steps": steps},
        "schedule": {"scheme": "1f1b", "passes": passes},
    }
    return runner.train(configured(runner, kind, changes, layers))


def loop_of(kind: str) -> Callable[[Path], ReferenceLoop]:
    """The plain loop of a kind."""
    return PicturesLoop if kind == PICTURES else ReferenceLoop


@pytest.mark.parametrize(
    "kind", [PICTURES, *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS)]
)
def test_a_split_run_is_the_plain_loop(runner: H.Runner, kind: str) -> None:
    """Four steps: rounding errors of a ResNet grow, by processor to 4e-5 in the sixth step."""
    layers = 4 if kind == PICTURES else 2
    split = trained(runner, kind, ["split-backward"], steps=4, layers=layers)
    assert "BW" in (split / "plan.json").read_text()
    check_parity_of(split, clip=False, make=loop_of(kind))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", [*KINDS, PICTURES])
def test_split_or_not_the_bytes_are_the_same(runner: H.Runner, kind: str) -> None:
    """ResNet with the depth of ResNet-152.

    In a plain loop of that ResNet, weights that change by 1e-7 change the second loss by 3 %.
    Only its first two losses are compared with ours; fewer layers are in
    ``test_a_split_run_is_the_plain_loop``.
    """
    layers = 50 if kind == PICTURES else 6
    unsplit, split = (
        trained(runner, kind, passes, steps=60, layers=layers)
        for passes in ([], ["split-backward"])
    )
    assert H.state_bytes(split) == H.state_bytes(unsplit)
    if kind == PICTURES:
        losses = [line["loss"] for line in H.metrics(unsplit)][:2]
        assert losses == pytest.approx(reference_loop(unsplit, 2, PicturesLoop).losses, rel=1e-5)
    else:
        check_parity_of(unsplit, clip=False, make=loop_of(kind))
