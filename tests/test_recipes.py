"""``docs/RECIPES.md``: each configuration is accepted, each command names files of its recipe."""

from __future__ import annotations

import pytest
import yaml

from penstock.config.schema import parse_config
from tests.recipes import recipes

RECIPES = recipes()


def test_the_page_has_these_recipes() -> None:
    assert {title: list(recipe.files) for title, recipe in RECIPES.items()} == {
        "LoRA of 7 B on a 24 GB GPU": ["lora.yaml"],
        "SFT, then DPO": ["sft.yaml", "dpo.yaml"],
        "Going on from a Trainer": ["trainer.yaml"],
        "Long rows": ["long.yaml"],
        "Two machines": ["two.yaml"],
    }


@pytest.mark.parametrize("title", RECIPES)
def test_configurations_are_accepted_and_commands_name_them(title: str) -> None:
    recipe = RECIPES[title]
    configs = {name: parse_config(yaml.safe_load(text)) for name, text in recipe.files.items()}
    words = " ".join(recipe.commands).split()
    assert {word for word in words if word.endswith(".yaml")} == set(configs)
    run_dirs = {str(config.run_dir) for config in configs.values()}
    assert run_dirs == {f"runs/{name.removesuffix('.yaml')}" for name in configs}
    assert {word for word in words if word.startswith("runs/")} <= run_dirs
    # a model is a folder of the Hub, or an export of an earlier command
    models = {str(config.model.path) for config in configs.values()}
    assert {word for word in words if word.startswith("models/")} <= models
    assert {model for model in models if not model.startswith("models/")} <= set(words)
