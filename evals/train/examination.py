"""How a model is examined: five-shot prompts of held-out problems, answered greedily.

``python -m evals.train.examination geom`` examines a committed checkpoint, one JSON object a line.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import Tokenizer

from evals.gsm8k import Row
from evals.templates import HELD_OUT, NOT_LEARNT, TRAIN, Draws, problem, problems
from evals.train.model import load, logits, rotary_tables
from evals.train.tokenizer import Encoder, question_text

SHOTS = 5
LISTS = (5, 10, 20)
ROWS = 32  # prompts in one forward pass

Forward = Callable[[torch.Tensor], torch.Tensor]  # tokens [b s] -> logits [b s vocab]


class Question(NamedTuple):
    """A prompt and the tokens that answer it, up to the line break after the last number."""

    kind: str
    prompt: list[int]
    answer: list[int]


def held_out(
    encode: Callable[[str], list[int]],
    seed: int,
    count: int,
    without: Sequence[str] = (),
    num_shots: int = SHOTS,
) -> dict[str, list[Question]]:
    """``count`` questions of each set: stories, and lists of ``LISTS`` entries; shots as in training.

    No question is of a kind in ``without``; shots are of all kinds.
    """
    lengths = {"stories": 0} | {f"lists of {n}": n for n in LISTS}
    sets = {name: problems(HELD_OUT, seed, count, entries=n, without=without) for name, n in lengths.items()}
    examined = {}
    for name, made in sets.items():
        draws = Draws(seed, f"shots/{name}")
        shots = [[problem(draws, TRAIN) for _ in range(num_shots)] for _ in made]
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


def _question(encode: Callable[[str], list[int]], kind: str, shots: list[Row], row: Row) -> Question:
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


def examine(
    tokenizer: Tokenizer, forward: Forward, questions: list[Question], device: torch.device
) -> list[bool]:
    """Strict-match of each greedy answer.

    An answer that is the wanted one word for word is found in one pass; only the others are written out.
    """
    right = teacher_forced(forward, questions, device)
    rest = [i for i, ok in enumerate(right) if not ok]
    stop = Encoder(tokenizer)("Question:")[0]
    written = greedy(forward, [questions[i] for i in rest], 96, stop, device)
    for i, tokens in zip(rest, written, strict=True):
        right[i] = strict_match(tokenizer, tokens, questions[i].answer)
    return right


def main() -> None:
    """Examine a checkpoint in evals/checkpoints."""
    checkpoints = Path(__file__).resolve().parents[1] / "checkpoints"
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("name", choices=sorted(p.name for p in checkpoints.iterdir() if p.is_dir()))
    parser.add_argument("--count", type=int, default=200, help="questions of each set")
    parser.add_argument("--seed", type=int, default=21, help="of the questions; training was watched on 20")
    parser.add_argument("--every-kind", action="store_true", help="those that were not learnt as well")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    folder = checkpoints / args.name
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    model = load(folder).to(device)
    without = () if args.every_kind else NOT_LEARNT
    kinds: dict[str, list[bool]] = {}
    for name, questions in held_out(Encoder(tokenizer), args.seed, args.count, without).items():
        cos, sin = rotary_tables(model, max(len(q.prompt) for q in questions) + 200)

        def forward(tokens: torch.Tensor, cos: torch.Tensor = cos, sin: torch.Tensor = sin) -> torch.Tensor:
            return logits(model, tokens, cos[: tokens.shape[1]], sin[: tokens.shape[1]])

        right = examine(tokenizer, forward, questions, device)
        for question, ok in zip(questions, right, strict=True):
            kinds.setdefault(question.kind, []).append(ok)
        print(json.dumps({"set": name, "n": len(right), "right": sum(right)}), flush=True)
    print(json.dumps({kind: [sum(right), len(right)] for kind, right in sorted(kinds.items())}))


if __name__ == "__main__":
    main()
