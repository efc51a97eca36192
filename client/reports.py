"""What the reports of a configuration's plan and of a schedule by name have in common."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.protocol.plan import Plan, StageRange


def stages_text(ranges: Sequence[StageRange]) -> str:
    """Blocks and devices of stages on one line; of many the first and the last."""
    shown = [f"{s.start}-{s.stop - 1}@{s.device}" for s in ranges]
    if len(shown) > 16:
        shown = [*shown[:12], "…", *shown[-2:]]
    return "  ".join(shown) + "   (blocks@device)"


def blocks_text(blocks: Sequence[int]) -> str:
    """Ascending numbers of blocks, neighbours as ranges."""
    ranges: list[list[int]] = []
    for block in blocks:
        if ranges and ranges[-1][-1] == block - 1:
            ranges[-1][1:] = [block]
        else:
            ranges.append([block])
    return "  ".join("-".join(map(str, ends)) for ends in ranges) + "   (blocks)" if ranges else "-"


def heading(plan: Plan, passes: Sequence[str] = ()) -> str:
    """A schedule in one line."""
    through = f" + {', '.join(passes)}" if passes else ""
    cut = (len(plan.forward_stages), len(plan.backward_stages))
    same = cut[0] == cut[1]
    stages = f"{cut[0]} stages" if same else f"{cut[0]} forward, {cut[1]} backward stages"
    return (
        f"{plan.scheme}{through}: {plan.num_devices} devices, {plan.num_microbatches}"
        f" micro-batches, {stages}"
    )
