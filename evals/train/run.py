"""Train one of the two checkpoints.

    python -m evals.train.run geom --seconds 430 --out DIR
    python -m evals.train.run geom --steps 6000 --out DIR

The stream of problems and the weights before the first step follow from the seed alone. With ``--seconds``
the learning rate follows the clock; ``curve.jsonl`` records the number of steps, and ``--steps`` with that
number repeats the run. A checkpoint is written every minute, so a run that is stopped loses little.
"""

import argparse
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import nn

from evals.gsm8k import rows
from evals.train.corpus import ANSWER, BLOCK, blocks
from evals.train.examination import greedy, gsm8k, held_out, strict_match, teacher_forced
from evals.train.model import CONFIGS, LENGTH, build, logits, rotary_tables
from evals.train.tokenizer import Encoder

CHECKPOINTS = Path(__file__).resolve().parents[1] / "checkpoints"
RATES = {"mini": 3e-3, "geom": 2e-3}
WARM_UP = 0.02  # share of the run over which the rate rises
DECAY = 0.5  # share of the run over which it falls to zero
QUESTION_WEIGHT = 0.1  # of a question's tokens in the loss, where an answer's weigh 1
EXAMINE_SEED = 20
LEAST_SECONDS = 30.0  # of training, however long it took to set up


def rate(progress: float) -> float:
    """The learning rate's factor: up, flat, and down to zero."""
    return min(1.0, progress / WARM_UP + 0.01, max(0.0, (1.0 - progress) / DECAY))


def loss(model: Any, block: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy of a block [b s+1] of flagged tokens, answers weighted 1."""
    tokens, answer = block & (int(ANSWER) - 1), block >= int(ANSWER)
    scores = logits(model, tokens[:, :-1], cos, sin)
    weight = torch.where(answer[:, 1:], 1.0, QUESTION_WEIGHT)
    each = F.cross_entropy(scores.flatten(0, 1).float(), tokens[:, 1:].flatten(), reduction="none")
    return (each * weight.flatten()).sum() / weight.sum()


def optimizer(model: nn.Module, peak: float, device: torch.device) -> torch.optim.Optimizer:
    """AdamW; matrices decay, norms do not."""
    weights = list(model.parameters())
    groups = [
        {"params": [w for w in weights if w.dim() >= 2], "weight_decay": 0.1},
        {"params": [w for w in weights if w.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.95), fused=device.type == "cuda")


def batches(stream: Iterable[Any], size: int, device: torch.device) -> Iterator[torch.Tensor]:
    """[size LENGTH+1] int64 batches of the stream of blocks."""
    for block in stream:
        whole = torch.from_numpy(block.astype("int64"))
        for part in whole.split(size):  # type: ignore[no-untyped-call]
            yield part.to(device, non_blocking=True)


def save(model: nn.Module, out: Path) -> None:
    """model.safetensors in bfloat16, written whole or not at all."""
    state = {k: v.detach().to(torch.bfloat16).contiguous() for k, v in model.state_dict().items()}
    del state["lm_head.weight"]  # tied to the embedding
    part = out / "model.safetensors.part"
    save_file(state, part, metadata={"format": "pt"})
    part.replace(out / "model.safetensors")


def forward_of(model: Any, device: torch.device) -> Callable[[torch.Tensor], torch.Tensor]:
    """tokens [b s] -> logits, in the precision in which the model is trained."""
    cos, sin = rotary_tables(model, LENGTH + 512)

    def forward(tokens: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            return logits(model, tokens, cos[: tokens.shape[1]], sin[: tokens.shape[1]])

    return forward


def descend(value: torch.Tensor, model: nn.Module, adam: torch.optim.Optimizer, lr: float) -> None:
    """One step down the gradient of a loss [], whose norm is clipped to 1; no gradient is left."""
    for group in adam.param_groups:
        group["lr"] = lr
    value.backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    adam.step()
    adam.zero_grad(set_to_none=True)


def train(args: argparse.Namespace) -> None:
    """Train until the time or the steps are used up, then examine and write."""
    begun = time.monotonic()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    folder, out = CHECKPOINTS / args.name, args.out
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    encode = Encoder(tokenizer)
    stream = blocks(folder / "tokenizer.json", args.data, args.length + 1, args.seed, args.workers)
    examined = held_out(encode, EXAMINE_SEED, args.examined)
    model = build(folder, args.seed).to(device)
    cos, sin = rotary_tables(model, args.length)
    adam = optimizer(model, RATES[args.name], device)
    run_loss = torch.compile(loss) if args.compile else loss
    record = partial(_record, (out / "curve.jsonl").open("w", encoding="utf-8"), args.name)
    data = batches(stream, args.rows, device)
    batch = next(data)
    with torch.autocast(device.type, torch.bfloat16):
        # Compiles before the clock of the schedule starts.
        run_loss(model, batch, cos, sin).backward()  # type: ignore[no-untyped-call]
    adam.zero_grad(set_to_none=True)
    started = last_saved = time.monotonic()
    total = max(args.seconds - (started - begun), LEAST_SECONDS)
    record(
        event="start",
        set_up_seconds=started - begun,
        parameters=sum(w.numel() for w in model.parameters()),
        device=torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        torch=torch.__version__,
        seed=args.seed,
    )
    step, running = 0, torch.zeros((), device=device)
    while True:
        elapsed = time.monotonic() - started
        progress = step / args.steps if args.steps else elapsed / total
        if progress >= 1.0:
            break
        with torch.autocast(device.type, torch.bfloat16):
            value = run_loss(model, batch, cos, sin)
        descend(value, model, adam, RATES[args.name] * rate(progress))
        running = 0.98 * running + 0.02 * value.detach() if step else value.detach()
        step += 1
        batch = next(data)
        if step % 20 == 0:
            value.item()  # the host may run ahead of the device, but not of the clock
        if time.monotonic() - last_saved > args.every:
            last_saved = time.monotonic()
            save(model, out)
            forward = forward_of(model, device)
            scores = {name: _share(teacher_forced(forward, q, device)) for name, q in examined.items()}
            spent = time.monotonic() - started
            tokens = step * args.rows * args.length
            record(event="examined", step=step, tokens=tokens, tokens_per_second=tokens / spent,
                   seconds=spent, loss=running.item(), rate=rate(progress), **scores)  # fmt: skip
    save(model, out)
    record(event="trained", step=step, tokens=step * args.rows * args.length,
           seconds=time.monotonic() - started, loss=running.item())  # fmt: skip
    stream.close()
    examine(args, model.to(torch.bfloat16).float(), tokenizer, examined, record, device)


def examine(
    args: argparse.Namespace,
    model: nn.Module,
    tokenizer: Tokenizer,
    examined: dict[str, Any],
    record: Callable[..., None],
    device: torch.device,
) -> None:
    """Strict-match of greedy answers: held-out problems by set and kind, then gsm8k's own questions."""
    encode, forward = Encoder(tokenizer), forward_of(model, device)
    stop = encode("Question:")[0]
    kinds: dict[str, list[bool]] = {}
    for name, questions in examined.items():
        written = greedy(forward, questions, 96, stop, device)
        right = [strict_match(tokenizer, w, q.answer) for w, q in zip(written, questions, strict=True)]
        for q, ok in zip(questions, right, strict=True):
            kinds.setdefault(q.kind, []).append(ok)
        record(event="strict_match", set=name, n=len(right), accuracy=_share(right))
    record(event="strict_match_by_kind", **{kind: _share(right) for kind, right in kinds.items()})
    if args.real:
        asked = gsm8k(encode, EXAMINE_SEED, rows("train", args.data), rows("test", args.data)[: args.real])
        written = greedy(forward, asked, 200, stop, device)
        right = [strict_match(tokenizer, w, q.answer) for w, q in zip(written, asked, strict=True)]
        record(event="gsm8k", n=len(right), accuracy=_share(right))


def _record(curve: TextIO, name: str, **fields: Any) -> None:
    """A line of the curve, printed too; floats to five places."""
    line = json.dumps({k: round(v, 5) if isinstance(v, float) else v for k, v in fields.items()})
    print(name, line, flush=True)
    curve.write(line + "\n")
    curve.flush()


def _share(right: list[bool]) -> float:
    return sum(right) / len(right)


def main() -> None:
    """Parse and train."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("name", choices=sorted(CONFIGS))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--data", type=Path, default=None, help="folder of gsm8k's train.jsonl and test.jsonl"
    )
    parser.add_argument(
        "--seconds", type=float, default=430.0, help="of the run up to its last step, set-up included"
    )
    parser.add_argument("--steps", type=int, default=0, help="train for so many steps instead")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--length", type=int, default=LENGTH, help="tokens of a row")
    parser.add_argument("--rows", type=int, default=BLOCK // 2, help="rows of a step")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) // 2 - 1))
    parser.add_argument("--every", type=float, default=60.0, help="seconds between checkpoints")
    parser.add_argument("--examined", type=int, default=64, help="questions of each held-out set")
    parser.add_argument("--real", type=int, default=256, help="of gsm8k's test questions, asked at the end")
    parser.add_argument("--compile", action="store_true")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
