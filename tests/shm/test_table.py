"""Block tables: JSON both ways, and every broken invariant is named."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from penstock.shm.table import BlockTable, padded


def damage(table: BlockTable, block: int, **changes: Any) -> BlockTable:
    blocks = list(table.blocks)
    blocks[block] = dataclasses.replace(blocks[block], **changes)
    return dataclasses.replace(table, blocks=tuple(blocks))


def test_round_trip(table: BlockTable) -> None:
    assert BlockTable.from_json(table.to_json()) == table


def test_padding_reaches_whole_vectors() -> None:
    assert [padded(n) for n in (0, 1, 16, 17)] == [0, 16, 16, 32]


@pytest.mark.parametrize(
    ("block", "changes", "message"),
    [
        (0, {"index": 3}, "block 'embed' has index 3, stands at 0"),
        (0, {"contributions": 13}, "13 gradient contributions, expected 1 to 12"),
        (0, {"trainable_elements": 64}, "tensors end at 48, array at 64"),
        (0, {"contributions": 1}, "block 'head': bad contribution 1"),
        (1, {"trainable_elements": 0}, "tensors end at 16, array at 0"),
    ],
)
def test_broken_blocks_are_named(
    table: BlockTable, block: int, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        damage(table, block, **changes).validate()


def test_misplaced_tensor_is_named(table: BlockTable) -> None:
    first, second, *rest = table.blocks[0].tensors
    moved = dataclasses.replace(second, offset=16)
    with pytest.raises(ValueError, match=r"'embed.bias' starts at element 16, expected 32"):
        damage(table, 0, tensors=(first, moved, *rest)).validate()


@pytest.mark.parametrize("owner", [-1, 2])
def test_borrowing_from_nowhere_is_named(table: BlockTable, owner: int) -> None:
    borrowed = dataclasses.replace(table.blocks[1].borrows[0], owner=owner)
    with pytest.raises(ValueError, match=f"borrows from block {owner}, there are 2"):
        damage(table, 1, borrows=(borrowed,)).validate()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"blocks": 3}', '{"blocks": [{}]}', "nan"])
def test_other_text_is_no_table(text: str) -> None:
    with pytest.raises(ValueError):
        BlockTable.from_json(text)


def test_unknown_field_is_refused(table: BlockTable) -> None:
    data = json.loads(table.to_json()) | {"colour": "red"}
    with pytest.raises(ValueError, match="colour"):
        BlockTable.from_json(json.dumps(data))
