"""lm_eval's own gsm8k task on local questions: its prompt, filters, metric and seeds."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from evals.gsm8k import Row, rows
from evals.templates import HELD_OUT, NOT_LEARNT, TRAIN, problems

TASK = "gsm8k"
LISTS = (0, 5, 10, 20)  # entries of the template problems that are asked; 0: stories
SHOTS = 5  # of the stock task
SHOTS_SEED, QUESTIONS_SEED = 31, 30
NUM_SHOTS = 400  # template problems from which lm_eval draws its five shots


def stock_file() -> Path:
    """The task's yaml inside the installed lm_eval."""
    import lm_eval

    return Path(lm_eval.__file__).parent / "tasks" / "gsm8k" / "gsm8k.yaml"


def template_rows(count: int) -> dict[str, list[Row]]:
    """Held-out problems, stories and lists in turn, and problems of the training split to draw shots from."""
    share = -(-count // len(LISTS))
    sets = [problems(HELD_OUT, QUESTIONS_SEED, share, entries=n, without=NOT_LEARNT) for n in LISTS]
    asked = [made for group in zip(*sets, strict=True) for made in group][:count]
    shots = problems(TRAIN, SHOTS_SEED, NUM_SHOTS)
    return {
        "train": [Row(made.question, made.answer) for made in shots],
        "test": [Row(made.question, made.answer) for made in asked],
    }


def gsm8k_rows(data: Path | None = None) -> dict[str, list[Row]]:
    """gsm8k's own two splits, from a folder.

    Raises: ValueError that names a file which is missing, not as it must be, or too short to draw shots from.
    """
    splits = {split: rows(split, data) for split in ("train", "test")}
    if (count := len(splits["train"])) < SHOTS:
        raise ValueError(f"gsm8k: train.jsonl holds {count} questions, and {SHOTS} shots are drawn from them")
    return splits


def stock_task(data: Mapping[str, Sequence[Row]]) -> dict[str, Any]:
    """The stock task's settings, its two splits replaced by ``data`` and nothing else changed."""
    import datasets
    from lm_eval.tasks._yaml_loader import load_yaml

    task = dict(load_yaml(stock_file()))
    for source in ("dataset_path", "dataset_name"):
        del task[source]
    splits = {name: [row._asdict() for row in split] for name, split in data.items()}
    task["custom_dataset"] = lambda **_: {
        name: datasets.Dataset.from_list(split) for name, split in splits.items()
    }
    return task
