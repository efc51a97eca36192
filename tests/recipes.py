"""The files and commands of ``docs/RECIPES.md``, a page of training recipes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "RECIPES.md"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A section of the page: configurations by file name, and commands in their order."""

    title: str
    files: dict[str, str]
    commands: tuple[str, ...]


def recipes() -> dict[str, Recipe]:
    """Returns the recipes of the page by their titles."""
    sections = PAGE.read_text(encoding="utf-8").split("\n## ")[1:]
    return {recipe.title: recipe for recipe in map(_recipe, sections)}


def _recipe(section: str) -> Recipe:
    files = re.findall(r"^`([\w-]+\.yaml)`\n\n```yaml\n(.*?)^```", section, re.M | re.S)
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", section, re.M | re.S)
    lines = [line for language, text in blocks if not language for line in text.splitlines()]
    return Recipe(
        title=section.partition("\n")[0],
        files=dict(files),
        commands=tuple(line for line in lines if not line.startswith("#")),
    )
