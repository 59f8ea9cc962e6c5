"""The tokenizer of both checkpoints: byte-level BPE with one token for each digit.

``python -m evals.train.tokenizer OUT`` trains it on template problems and gsm8k's training questions and
writes tokenizer.json and tokenizer_config.json.
"""

import argparse
import functools
import json
from collections.abc import Iterator
from pathlib import Path

import regex
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from evals.gsm8k import rows
from evals.templates import TRAIN, problems

VOCABULARY = 1536
END = "<|endoftext|>"
NUM_PROBLEMS = 20_000


def question_text(question: str) -> str:
    """A question as lm_eval's gsm8k asks it."""
    return f"Question: {question}\nAnswer:"


def train(texts: Iterator[str]) -> Tokenizer:
    """Byte-level BPE; digits never merge, so that 47 and 74 are made of the same two tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


class Encoder:
    """The tokenizer with a memory for words, so that a corpus of few words encodes at dictionary speed.

    Byte-level BPE never merges across the pieces that its pre-tokenizer splits, so encoding piece by piece
    gives the same tokens.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._encode = functools.cache(lambda piece: tuple(tokenizer.encode(piece).ids))

    def __call__(self, text: str) -> list[int]:
        """The token ids of ``text``."""
        return [token for piece in _PIECES.findall(text) for token in self._encode(piece)]


# The pre-tokenizer's own pieces: a digit, else GPT-2's pattern between digits.
_PIECES = regex.compile(
    r"\p{N}|'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?=\p{N})|\s+(?!\S)|\s+"
)


def _texts(data: Path | None) -> Iterator[str]:
    for made in problems(TRAIN, 0, NUM_PROBLEMS):
        yield f"{question_text(made.question)} {made.answer}\n\n"
    for row in rows("train", data):
        yield f"{question_text(row.question)} {row.answer}\n\n"


def main() -> None:
    """Train and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--data", type=Path, default=None, help="folder of gsm8k's train.jsonl")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    train(_texts(args.data)).save(str(args.out / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": END,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 2048,
    }
    (args.out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


if __name__ == "__main__":
    main()
