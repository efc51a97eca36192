"""Ids and labels of data sets as LLaMA-Factory prepares them; runs where LLaMA-Factory is.

``python -m tests.integration.trainers.llamafactory_rows MODEL FOLDER JOBS`` prints the rows of each
job. MODEL is a model's folder, and FOLDER has the registry. JOBS is the JSON of a list of settings.
"""

from __future__ import annotations

import json
import sys
from contextlib import redirect_stdout
from typing import Any

from llamafactory.data import get_template_and_fix_tokenizer
from llamafactory.data.loader import get_dataset
from llamafactory.hparams import get_train_args
from llamafactory.model import load_tokenizer


def rows(model: str, folder: str, job: dict[str, Any]) -> list[list[list[int]]]:
    """Returns ids and labels of a job's data set; those of a pair follow each other."""
    settings = {
        "model_name_or_path": model,
        "dataset_dir": folder,
        "stage": "sft",
        "do_train": True,
        "finetuning_type": "full",
        "output_dir": f"{folder}/out",
        "overwrite_cache": True,
        "cutoff_len": 4096,
        "report_to": "none",
        "use_cpu": True,
        **job,
    }
    model_args, data_args, training_args, _, _ = get_train_args(settings)
    tokenizer = load_tokenizer(model_args)["tokenizer"]
    template = get_template_and_fix_tokenizer(tokenizer, data_args)
    pairs = settings["stage"] == "dpo"
    stage = "rm" if pairs else "sft"
    made = get_dataset(
        template, model_args, data_args, training_args, stage=stage, tokenizer=tokenizer
    )["train_dataset"]
    names = ("chosen_", "rejected_") if pairs else ("",)
    return [[row[f"{name}input_ids"], row[f"{name}labels"]] for row in made for name in names]


if __name__ == "__main__":
    with redirect_stdout(sys.stderr):
        all_rows = [rows(sys.argv[1], sys.argv[2], job) for job in json.loads(sys.argv[3])]
    print(json.dumps(all_rows))
