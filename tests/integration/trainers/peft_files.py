"""Files of PEFT, merged models and logits, as PEFT makes them; runs where PEFT is.

``python -m tests.integration.trainers.peft_files SETTINGS`` reads a JSON file of a list of tasks,
and prints a JSON list of their answers. Each task has ``model`` (a folder of transformers),
``dtype`` (default "fp32"), ``out``, and one of

* ``make``: keywords of ``LoraConfig``; all trained tensors get random numbers of ``seed`` (0), and
  ``out`` is the folder of the adapter.
* ``merge``: a folder of an adapter; ``out`` is the folder of the merged model, of the base's type.
* ``logits``: a folder of an adapter or null; ``out`` is the ``.npy`` file of the logits of ``ids``.

The answer has ``warnings`` of PEFT, and ``error`` where PEFT refuses.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM

from tests.integration.trainers.peft_loop import DTYPES


def make(base: Any, task: dict[str, Any]) -> None:
    model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **task["make"]))
    torch.manual_seed(task.get("seed", 0))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(task["out"])


def merge(base: Any, task: dict[str, Any]) -> None:
    PeftModel.from_pretrained(base, task["merge"]).merge_and_unload().save_pretrained(task["out"])


def logits(base: Any, task: dict[str, Any]) -> None:
    adapter = task["logits"]
    model = base if adapter is None else PeftModel.from_pretrained(base, adapter)
    with torch.no_grad():
        values = model.eval()(input_ids=torch.tensor(task["ids"])).logits
    np.save(task["out"], values.float().numpy())


def main(tasks: list[dict[str, Any]]) -> None:
    torch.set_num_threads(1)
    answers = []
    for task in tasks:
        dtype = DTYPES[task.get("dtype", "fp32")]
        base = AutoModelForCausalLM.from_pretrained(task["model"], dtype=dtype)
        answer: dict[str, Any] = {}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                (work,) = (f for f in (make, merge, logits) if f.__name__ in task)
                work(base, task)
            except (ValueError, TypeError, RuntimeError) as error:
                answer["error"] = str(error)
        answers.append({**answer, "warnings": [str(w.message) for w in caught]})
    print(json.dumps(answers))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
