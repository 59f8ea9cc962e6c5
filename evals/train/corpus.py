"""Training rows: problems one after the other in lm_eval's few-shot format, the same on every machine."""

import multiprocessing
from collections.abc import Generator
from multiprocessing.queues import Queue
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from evals.gsm8k import Row, rows
from evals.templates import MOST_ENTRIES, TRAIN, Draws, problem
from evals.train.tokenizer import Encoder, question_text

ANSWER = np.uint16(1 << 15)  # set on the tokens of an answer and of the separator after it
BLOCK = 64  # rows that one worker makes at a time
GSM8K_ROWS = 16  # one row in this many holds gsm8k's own training questions
SEPARATOR = "\n\nQuestion:"
AHEAD = 8  # blocks that a worker may be ahead of the training


CURRICULUM = 600  # blocks after which lists have their full length


def most_entries(index: int) -> int:
    """The longest list in block ``index``: 3 at first, ``MOST_ENTRIES`` from block ``CURRICULUM`` on.

    Binding a value to its key is learnt on short lists; begun on long ones it is not learnt at all.
    """
    return min(MOST_ENTRIES, 3 + index * (MOST_ENTRIES - 3) // CURRICULUM)


class Writer:
    """Turns problems into rows of ``length`` tokens with the answers flagged."""

    def __init__(self, tokenizer: Tokenizer, questions: list[Row], length: int) -> None:
        self._encode = Encoder(tokenizer)
        self._questions = questions
        self._length = length
        self._separator = self._encode(SEPARATOR)
        self._opening = self._encode("Question:")

    def row(self, draws: Draws, longest: int) -> NDArray[np.uint16]:
        """[length] uint16. It opens with a question and is cut where it is full."""
        real = bool(self._questions) and draws.below(GSM8K_ROWS) == 0
        tokens: list[int] = list(self._opening)
        flags: list[int] = [0] * len(tokens)
        while len(tokens) < self._length:
            made = draws.pick(self._questions) if real else problem(draws, TRAIN, most_entries=longest)
            # "Question:" is already there, as the separator of the problem before.
            question = self._encode(question_text(made.question).removeprefix("Question:"))
            answer = self._encode(f" {made.answer}") + self._separator
            tokens += question + answer
            flags += [0] * len(question) + [1] * len(answer)
        row = np.array(tokens[: self._length], dtype=np.uint16)
        row[np.array(flags[: self._length], dtype=bool)] |= ANSWER
        return row

    def block(self, seed: int, index: int) -> NDArray[np.uint16]:
        """[BLOCK length]: block ``index`` of the stream of ``seed``."""
        draws, longest = Draws(seed, f"corpus/{index}"), most_entries(index)
        return np.stack([self.row(draws, longest) for _ in range(BLOCK)])


def _work(
    queue: "Queue[NDArray[np.uint16]]",
    tokenizer_file: str,
    data: Path | None,
    length: int,
    seed: int,
    first: int,
    step: int,
) -> None:
    writer = Writer(Tokenizer.from_file(tokenizer_file), rows("train", data), length)
    index = first
    while True:
        queue.put(writer.block(seed, index))
        index += step


def blocks(
    tokenizer_file: Path, data: Path | None, length: int, seed: int, workers: int
) -> Generator[NDArray[np.uint16], None, None]:
    """Blocks 0, 1, 2, … made by ``workers`` processes ahead of time; their order does not depend on them."""
    context = multiprocessing.get_context("spawn")
    queues: list[Queue[NDArray[np.uint16]]] = [context.Queue(AHEAD) for _ in range(workers)]
    processes = [
        context.Process(
            target=_work, args=(queue, str(tokenizer_file), data, length, seed, i, workers), daemon=True
        )
        for i, queue in enumerate(queues)
    ]
    for process in processes:
        process.start()
    try:
        while True:
            for queue in queues:
                yield queue.get()
    finally:
        for process in processes:
            process.kill()  # they wait on full queues
