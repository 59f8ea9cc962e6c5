"""How a model in training is examined: five-shot prompts of held-out problems, answered greedily."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from tokenizers import Tokenizer

from evals.gsm8k import Row
from evals.templates import HELD_OUT, TRAIN, Draws, problem, problems
from evals.train.tokenizer import Encoder, question_text

SHOTS = 5
LISTS = (5, 10, 20)
ROWS = 64  # prompts in one forward pass

Forward = Callable[[torch.Tensor], torch.Tensor]  # tokens [b s] -> logits [b s vocab]


class Question(NamedTuple):
    """A prompt and the tokens that answer it, up to the line break after the last number."""

    kind: str
    prompt: list[int]
    answer: list[int]


def held_out(encode: Encoder, seed: int, count: int) -> dict[str, list[Question]]:
    """``count`` questions of each set: stories, and lists of ``LISTS`` entries; shots as in training."""
    sets = {"stories": problems(HELD_OUT, seed, count, entries=0)}
    sets |= {f"lists of {n}": problems(HELD_OUT, seed, count, entries=n) for n in LISTS}
    examined = {}
    for name, made in sets.items():
        draws = Draws(seed, f"shots/{name}")
        shots = [[problem(draws, TRAIN) for _ in range(SHOTS)] for _ in made]
        examined[name] = [
            _question(
                encode, one.kind, [Row(s.question, s.answer) for s in few], Row(one.question, one.answer)
            )
            for one, few in zip(made, shots, strict=True)
        ]
    return examined


def gsm8k(encode: Encoder, seed: int, shots: list[Row], questions: list[Row]) -> list[Question]:
    """gsm8k's own questions, five random ones of its training split before each."""
    draws = Draws(seed, "shots/gsm8k")
    return [_question(encode, "gsm8k", draws.sample(shots, SHOTS), row) for row in questions]


def _question(encode: Encoder, kind: str, shots: list[Row], row: Row) -> Question:
    before = "".join(f"{question_text(shot.question)} {shot.answer}\n\n" for shot in shots)
    return Question(kind, encode(before + question_text(row.question)), encode(f" {row.answer}\n\nQ")[:-2])


@torch.no_grad()
def teacher_forced(forward: Forward, questions: list[Question], device: torch.device) -> list[bool]:
    """Whether the greedy answer is the wanted one word for word, found in one pass per ``ROWS`` questions.

    Greedy decoding writes the wanted text exactly if every one of its tokens is the likeliest after the ones
    before it. An answer right in other words counts as wrong, so this bounds the accuracy from below.
    """
    right = []
    for start in range(0, len(questions), ROWS):
        part = questions[start : start + ROWS]
        tokens = _padded([q.prompt + q.answer for q in part], device)
        best = forward(tokens).argmax(-1)
        for i, q in enumerate(part):
            at = slice(len(q.prompt) - 1, len(q.prompt) + len(q.answer) - 1)
            right.append(best[i, at].tolist() == q.answer)
    return right


@torch.no_grad()
def greedy(
    forward: Forward, question: list[Question], most: int, stop: int, device: torch.device
) -> list[list[int]]:
    """The tokens that follow each prompt, cut before ``stop``; every step repeats the whole row."""
    written: list[list[int]] = []
    for start in range(0, len(question), ROWS):
        part = question[start : start + ROWS]
        rows = [list(q.prompt) for q in part]
        open_rows = set(range(len(part)))
        for _ in range(most):
            asked = sorted(open_rows)
            tokens = _padded([rows[i] for i in asked], device)
            last = torch.tensor([len(rows[i]) - 1 for i in asked], device=device)
            best = forward(tokens)[torch.arange(len(asked), device=device), last].argmax(-1).tolist()
            for i, token in zip(asked, best, strict=True):
                rows[i].append(token)
                if token == stop:
                    open_rows.discard(i)
            if not open_rows:
                break
        written += [row[len(q.prompt) :] for row, q in zip(rows, part, strict=True)]
    return [tokens[:-1] if tokens and tokens[-1] == stop else tokens for tokens in written]


def strict_match(tokenizer: Tokenizer, written: list[int], wanted: list[int]) -> bool:
    """Whether the numbers after ``####`` are the same, commas aside, as in lm_eval's strict-match."""
    got, want = (_result(tokenizer.decode(tokens)) for tokens in (written, wanted))
    return got is not None and got == want


def _result(text: str) -> str | None:
    _, mark, rest = text.partition("#### ")
    number = "".join(c for c in rest.split("\n")[0] if c in "-0123456789.")
    return number.rstrip(".") if mark and number else None


def _padded(rows: list[list[int]], device: torch.device) -> torch.Tensor:
    longest = max(len(row) for row in rows)
    return torch.tensor([row + [0] * (longest - len(row)) for row in rows], device=device)
