"""Settings of files of ``trl sft --config`` as TRL's own parser reads them; runs where TRL is.

``python -m tests.integration.trainers.trl_settings RECORDS FILE …`` prints batch, steps, rates of
the first 40 steps, and other values of each file, for data of RECORDS rows on one device.
"""

from __future__ import annotations

import json
import math
import sys
from typing import Any

import torch
from transformers import get_scheduler
from trl.scripts.sft import make_parser

MOST_RATES = 40


def settings(path: str, records: int) -> dict[str, Any]:
    """Returns the settings of one file."""
    parsed = make_parser().parse_args_and_config(
        args=["--config", path], fail_with_unknown_args=False
    )
    arguments = parsed[1]
    batch, gathered = arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps
    a_pass = max(1, math.ceil(math.ceil(records / batch) / gathered))
    steps = arguments.max_steps
    if steps < 0:
        steps = math.ceil(arguments.num_train_epochs * a_pass)
    stepper = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=arguments.learning_rate)
    scheduler = get_scheduler(
        arguments.lr_scheduler_type,
        stepper,
        arguments.get_warmup_steps(steps),
        steps,
        arguments.lr_scheduler_kwargs or None,
    )
    rates = []
    for _ in range(min(steps, MOST_RATES)):
        rates.append(float(stepper.param_groups[0]["lr"]))
        stepper.step()
        scheduler.step()
    return {
        "batch": batch * gathered,
        "steps": steps,
        "rates": rates,
        "length": arguments.max_length,
        "packing": arguments.packing,
        "clip": arguments.max_grad_norm,
        "decay": arguments.weight_decay,
        "betas": [arguments.adam_beta1, arguments.adam_beta2],
        "eps": arguments.adam_epsilon,
        "assistant": arguments.assistant_only_loss,
        "bf16": arguments.bf16,
        "seed": arguments.seed,
    }


if __name__ == "__main__":
    made = [settings(path, int(sys.argv[1])) for path in sys.argv[2:]]
    print(json.dumps(made))
