"""Layouts of copies: with a run's numbers in their places, the files are those of an export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.models.checkpoints.export import export_hf
from penstock.models.checkpoints.exports.tensors import ExportedTensors
from penstock.models.checkpoints.initial import unpack
from penstock.models.checkpoints.layout import NoLayoutError, write_hf_files
from penstock.models.surgery.skeleton import build_skeleton
from penstock.shm.published import PublishedLayout, pieces, source_of
from penstock.shm.table import DType
from tests.models.test_runtime import ALSO, EXPERTS, LISTS, OTHERS, TESTED

TYPES = (*TESTED, *ALSO, *EXPERTS, *LISTS, *OTHERS)


def constants_of(case: Any) -> dict[str, torch.Tensor]:
    """Numbers for the persistent buffers of a model."""
    values = {}
    for name, (value, _) in build_skeleton(case.hf_config).constants().items():
        numbers = torch.arange(1, value.numel() + 1, dtype=torch.float32)
        values[name] = numbers.reshape(value.shape).to(value.dtype)
    return values


def copied(case: Any, out: Path, dtype: DType, constants: Any, shard_bytes: int) -> None:
    """Makes a layout, and writes the tensors of all blocks as memoryd does."""
    source = ExportedTensors.of(
        case.hf_config, case.table, lambda block: {}, dtype=dtype, constants=constants
    )
    out.mkdir()
    owners = dict.fromkeys(range(len(case.table.blocks)), 0)
    files = write_hf_files(source, out, dtype, owners, shard_bytes)
    layout = PublishedLayout(table_digest=case.table.digest, files=tuple(files))
    assert PublishedLayout.from_json(layout.to_json().encode(), case.table, "here") == layout
    for file in layout.files:
        with (out / file.name).open("r+b") as opened:
            for tensor in file.tensors:
                spec = source_of(tensor, case.table)
                arrays = case.weights if spec.trainable else case.frozen
                flat = arrays[tensor.block].numpy()[spec.offset : spec.offset + spec.num_elements]
                opened.seek(tensor.start)
                for piece in pieces(tensor, flat, DType.FP32):
                    opened.write(piece)


def exported(case: Any, out: Path, dtype: DType, constants: Any, shard_bytes: int) -> None:
    def read_block(block: int) -> dict[str, Any]:
        return unpack(
            case.table.blocks[block], case.weights[block].numpy(), case.frozen[block].numpy()
        )

    export_hf(
        case.hf_config,
        case.table,
        read_block,
        out,
        dtype=dtype,
        carried={},
        constants=constants,
        shard_bytes=shard_bytes,
    )


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("model_type", TYPES)
@pytest.mark.parametrize(("dtype", "shard_bytes"), [(DType.BF16, 2**30), (DType.FP32, 20_000)])
def test_the_files_of_a_copy_are_those_of_an_export(
    model_type: str, dtype: DType, shard_bytes: int, tmp_path: Path, make_case: Any
) -> None:
    case = make_case(model_type, freeze=("norm",) if model_type == "llama" else ())
    constants = constants_of(case)
    exported(case, tmp_path / "export", dtype, constants, shard_bytes)
    copied(case, tmp_path / "copy", dtype, constants, shard_bytes)
    expected, actual = contents(tmp_path / "export"), contents(tmp_path / "copy")
    assert actual.keys() == expected.keys()
    for name in expected:
        assert actual[name] == expected[name], name


def test_fp16(tmp_path: Path, make_case: Any) -> None:
    case = make_case("llama")
    exported(case, tmp_path / "export", DType.FP16, {}, 2**30)
    copied(case, tmp_path / "copy", DType.FP16, {}, 2**30)
    assert contents(tmp_path / "copy") == contents(tmp_path / "export")


def test_a_file_has_blocks_of_one_owner(tmp_path: Path, make_case: Any) -> None:
    case = make_case("llama")
    source = ExportedTensors.of(
        case.hf_config, case.table, lambda block: {}, dtype=DType.BF16, constants={}
    )
    count = len(case.table.blocks)
    files = write_hf_files(source, tmp_path, DType.BF16, {b: b % 2 for b in range(count)})
    assert [{tensor.block for tensor in file.tensors} for file in files] == [
        {block} for block in range(count)
    ]


def test_a_computed_tensor_has_no_layout(tmp_path: Path, make_case: Any, monkeypatch: Any) -> None:
    """Transformers converts by views today; a type that computes is exported from a state."""
    case = make_case("llama")
    source = ExportedTensors.of(
        case.hf_config, case.table, lambda block: {}, dtype=DType.BF16, constants={}
    )
    monkeypatch.setattr(
        "penstock.models.checkpoints.layout.published_views",
        lambda model, tensors: {name: value + 1 for name, value in tensors.items()},
    )
    with pytest.raises(NoLayoutError, match="is computed"):
        write_hf_files(source, tmp_path, DType.BF16, dict.fromkeys(range(9), 0))
