"""Labels of spans, from the instructions that their tasks come from."""

from __future__ import annotations

from penstock.planner.simulate.columns import Columns
from penstock.planner.simulate.graph import Label
from penstock.planner.tensors import transferred


class Labels:
    """``F 3 0``, ``BW 3 0,1``, ``FW 3 forward``, ``activation 3 0``, ``U 3``, ``S 3``."""

    def __init__(self, columns: Columns) -> None:
        self._columns = columns

    def of(self, label: int, row: int) -> str:
        """Label of a task that comes from the instruction in a row."""
        instruction = self._columns.instructions[row]
        if label == Label.OPTIMIZER:
            return f"U {instruction.stage}"
        if label == Label.SETTLE:
            return f"S {instruction.stage}"
        if label == Label.TENSOR:
            tensor = transferred(instruction)
            return f"{tensor.kind} {tensor.stage} {tensor.micro_batch}"
        words = [instruction.opcode.value, str(self._columns.stages[row])]
        if hasattr(instruction, "micro_batch"):
            words.append(str(instruction.micro_batch))
        if hasattr(instruction, "micro_batches"):
            words.append(",".join(map(str, instruction.micro_batches)))
        if hasattr(instruction, "phase"):
            words.append(instruction.phase)
        return " ".join(words)
