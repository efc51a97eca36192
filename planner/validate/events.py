"""What devices wait for, by number: millions of steps need something cheap to hash."""

from __future__ import annotations

from penstock.planner.layout import StageLayout
from penstock.planner.tensors import Tensor, TensorKind

Event = int
"""A tensor that was sent, gradients that were offloaded or sent to their root, or a collective that
all have entered.
"""


class EventNumbers:
    """Numbers of events, and back."""

    def __init__(self, layout: StageLayout) -> None:
        self._count = count = layout.num_microbatches
        self._gradients = len(layout.forward) * count
        self._checkpoints = self._gradients + len(layout.backward) * count
        self._offloads = self._checkpoints + len(layout.backward) * count
        self._reductions = self._offloads + len(layout.backward)
        self._collectives = self._reductions + len(layout.backward)

    def activation(self, stage: int, micro_batch: int) -> Event:
        """The output of a forward stage."""
        return stage * self._count + micro_batch

    def gradient(self, stage: int, micro_batch: int) -> Event:
        """The input gradient of a backward stage."""
        return self._gradients + stage * self._count + micro_batch

    def checkpoint(self, stage: int, micro_batch: int) -> Event:
        """The input checkpoint of a backward stage."""
        return self._checkpoints + stage * self._count + micro_batch

    def tensor(self, kind: TensorKind, stage: int, micro_batch: int) -> Event:
        """Any of the three."""
        match kind:
            case TensorKind.ACTIVATION:
                return self.activation(stage, micro_batch)
            case TensorKind.GRADIENT:
                return self.gradient(stage, micro_batch)
            case TensorKind.CHECKPOINT:
                return self.checkpoint(stage, micro_batch)

    def offload(self, stage: int) -> Event:
        """The gradients of a backward stage are in host memory."""
        return self._offloads + stage

    def reduction(self, stage: int) -> Event:
        """The gradients of a backward stage are on their way to the stage that sums them."""
        return self._reductions + stage

    def collective(self, number: int) -> Event:
        """All devices have entered collective ``number``."""
        return self._collectives + number

    def tensor_of(self, event: Event) -> Tensor | None:
        """The tensor, unless the event is of another kind."""
        if event >= self._offloads:
            return None
        if event >= self._checkpoints:
            kind, first = TensorKind.CHECKPOINT, self._checkpoints
        elif event >= self._gradients:
            kind, first = TensorKind.GRADIENT, self._gradients
        else:
            kind, first = TensorKind.ACTIVATION, 0
        stage, micro_batch = divmod(event - first, self._count)
        return Tensor(kind=kind, stage=stage, micro_batch=micro_batch)

    def offload_of(self, event: Event) -> int | None:
        """The backward stage whose offload the event is."""
        return event - self._offloads if self._offloads <= event < self._reductions else None

    def reduction_of(self, event: Event) -> int | None:
        """The backward stage whose reduction the event is."""
        return event - self._reductions if self._reductions <= event < self._collectives else None

    def collective_of(self, event: Event) -> int | None:
        """The number of the collective that the event is."""
        return event - self._collectives if event >= self._collectives else None

    def describe(self, event: Event) -> str:
        """For messages."""
        stage, number = self.offload_of(event), self.collective_of(event)
        if stage is not None:
            return f"gradients of backward stage {stage} in host memory"
        stage = self.reduction_of(event)
        if stage is not None:
            return f"gradients of backward stage {stage}, to sum them"
        if number is not None:
            return f"collective {number}"
        return str(self.tensor_of(event))
