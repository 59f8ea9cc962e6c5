"""``mla-verify probe``: the conventions of a kernel that nobody described, and an adapter to paste."""

import importlib
import json
import sys
from collections.abc import Iterator
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer

from oracles.adapter_text import Manner, source
from oracles.call_spec import DECIDED, ROLES, Spec, specs
from oracles.conventions import QUESTIONS, Answer, Bench, Died, Geometry, first_contact, put
from oracles.exits import UsageError, said
from oracles.rotations import probe_rotation, rotates
from oracles.terminal import to_stdout, write
from oracles.verify import named_module

UNANSWERED = 1
FIRST = -1  # the question how the kernel is called at all


class State(NamedTuple):
    """What a process needs to go on where another one died. at: the next question."""

    target: str
    ways: list[Spec]
    device: str
    geometry: Geometry | None
    at: int = FIRST
    bench: Bench | None = None
    manner: Manner | None = None


def kernel_named(target: str) -> Any:
    """The callable called "module:name". Raises: ValueError in one line."""
    _, colon, path = target.partition(":")
    if not colon or not path:
        raise ValueError(f"kernel {target!r}: expected module:callable")
    try:
        found: Any = importlib.import_module(named_module(target))
    except (ImportError, ValueError) as error:
        raise ValueError(f"kernel {target!r}: {error}") from None
    except (Exception, SystemExit) as error:
        raise ValueError(f"kernel {target!r}: its import raised {type(error).__name__}: {error}") from None
    for part in path.split("."):
        try:
            found = getattr(found, part)
        except AttributeError as error:
            raise ValueError(f"kernel {target!r}: {error}") from None
    if not callable(found):
        raise ValueError(f"kernel {target!r}: is {type(found).__name__}, which cannot be called")
    return found


def step(state: State) -> tuple[list[Answer], State]:
    """The answers to the next question, and what is known after it. Raises: Died."""
    if state.at == FIRST:
        answers, bench, manner = first_contact(state.target, state.ways, state.device, state.geometry)
        after = 0 if manner is not None else len(QUESTIONS)
        return answers, state._replace(at=after, bench=bench, manner=manner)
    assert state.bench is not None
    assert state.manner is not None
    answers, manner = put(QUESTIONS[state.at], state.bench, state.manner)
    return answers, state._replace(at=state.at + 1, manner=manner)


def lost(state: State, reason: str) -> tuple[list[Answer], State]:
    """The answer to a question of which the kernel's process died."""
    if state.at == FIRST or state.manner is None:
        answer = Answer("call", "undetermined", f"its process {reason}", known=False)
        return [answer], state._replace(at=len(QUESTIONS))
    question = QUESTIONS[state.at]
    answer = Answer(question.name, "ends its process", f"it {reason}")
    return [answer], state._replace(at=state.at + 1, manner=question.crashed(state.manner))


def interrogated(state: State, seconds: float) -> Iterator[tuple[list[Answer], State]]:
    """Answers as they come, asked in a process that may die: a new one goes on with the next question.

    seconds: the longest that one question may take.
    """
    context = get_context("spawn")
    while state.at < len(QUESTIONS):
        ours, theirs = context.Pipe()
        child = context.Process(target=_ask_on, args=(list(sys.path), state, theirs), daemon=True)
        child.start()
        theirs.close()
        reason = ""
        while not reason and state.at < len(QUESTIONS):
            try:
                message = ours.recv() if ours.poll(seconds) else f"took more than {seconds:.0f} s"
            except EOFError:
                child.join()
                message = f"ended with exit code {child.exitcode}"
            if isinstance(message, str):
                reason = message
                break
            answers, state = message
            yield answers, state
        child.kill()
        child.join()
        if reason:
            answers, state = lost(state, reason)
            yield answers, state


def _ask_on(path: list[str], state: State, pipe: Connection) -> None:
    """In the child: every question from the state's own on."""
    sys.path[:] = path
    torch.set_num_threads(1)
    while state.at < len(QUESTIONS):
        try:
            answers, state = step(state)
        except Died as error:
            pipe.send(f"died: {error}")
            return
        pipe.send((answers, state))


def _list_roles(wanted: bool) -> None:
    if wanted:
        for name, text in ROLES.items():
            typer.echo(f"{name:24} {text}")
        typer.echo(f"{', '.join(DECIDED)}: the probe decides in each call")
        raise typer.Exit


def probe(
    kernel: Annotated[str, typer.Argument(help="module:callable, looked up in the working directory too.")],
    arg: Annotated[
        list[str] | None, typer.Option(help="PARAMETER=ROLE, or an expression; repeatable. See --roles.")
    ] = None,
    device: Annotated[str, typer.Option(help="Where it runs: cpu, cuda.")] = "cpu",
    latent: Annotated[int, typer.Option(min=0, help="Latent channels; 0: what it accepts.")] = 0,
    rope: Annotated[int, typer.Option(min=0, help="Rope channels, with --latent.")] = 64,
    heads: Annotated[int, typer.Option(min=1, help="Heads, with --latent.")] = 16,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens of a block, with --latent.")] = 64,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16, float32; with --latent.")] = "bfloat16",
    adapter: Annotated[
        Path | None, typer.Option(help="Write the adapter here instead of printing it.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    _: Annotated[
        bool, typer.Option("--roles", help="List the roles and end.", callback=_list_roles, is_eager=True)
    ] = False,
    seconds: Annotated[float, typer.Option(min=1, help="The longest that one question may take.")] = 120.0,
) -> int:
    """Find out what an unknown kernel takes and returns, and print an adapter to paste.

    Exit codes: 0 every question has an answer or is said not to apply; 1 no call was understood.
    """
    if adapter is not None and (adapter.is_dir() or not adapter.parent.is_dir()):
        what = "is a directory" if adapter.is_dir() else f"there is no directory {adapter.parent}"
        raise UsageError(f"--adapter {adapter}: {what}")
    try:
        torch.empty(0, device=device)
        fn = kernel_named(kernel)
        rotation = not arg and rotates(fn)
        ways = [] if rotation else specs(fn, arg or [])
    except (ValueError, RuntimeError, AssertionError) as error:
        raise UsageError(said(error)) from None
    formats = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
    if dtype not in formats:
        raise UsageError(f"--dtype {dtype!r} is not one of {', '.join(formats)}")
    geometry = Geometry(latent, rope, heads, block_size, dtype, formats[dtype]) if latent else None
    answers: list[Answer] = probe_rotation(fn, device) if rotation else []
    manner: Manner | None = None
    first = State(kernel, ways, torch.device(device).type, geometry)
    for more, state in interrogated(first, seconds) if not rotation else ():
        answers += more
        manner = state.manner
    text = source(manner) if manner is not None else ""
    if as_json:
        typer.echo(json.dumps({"kernel": kernel, "answers": [a._asdict() for a in answers], "adapter": text}))
    else:
        write(to_stdout(), *lines(answers))
    if text and adapter is not None:
        adapter.write_text(text, encoding="utf-8")
    elif text and not as_json:
        typer.echo(f"\n{text}", nl=False)
    return 0 if answers[0].known else UNANSWERED


def lines(answers: list[Answer]) -> Iterator[str]:
    """Question, answer, and what it rests on, in columns."""
    rows = [("question", "answer", "evidence"), *(answer[:3] for answer in answers)]
    widths = [max(len(row[i]) for row in rows) for i in range(2)]
    for question, value, evidence in rows:
        yield f"{question:{widths[0]}}  {value:{widths[1]}}  {evidence}".rstrip()
