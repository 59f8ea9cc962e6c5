"""``python -m evals`` and ``mla-verify gate``: parse, call, print."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    add_completion=False, no_args_is_help=True, help="gsm8k: paired decisions and what they can see."
)

REFUSED = 3
EXIT = {"PASS": 0, "FAIL": 1, "INCONCLUSIVE": 2}


@app.callback()
def evals() -> None:
    """gsm8k: paired decisions and what they can see."""


@app.command()
def gate(
    baseline: Annotated[Path, typer.Option(help="Output of lm_eval --log_samples: folder or results file.")],
    candidate: Annotated[Path, typer.Option(help="The same, with the attention path on trial.")],
    task: Annotated[str, typer.Option(help="The task in both.")] = "gsm8k",
    answers: Annotated[
        str, typer.Option("--filter", help="Which filter's answers decide; the others are reported.")
    ] = "flexible-extract",
    margin: Annotated[float, typer.Option(help="The largest loss that is accepted, as a share.")] = 0.02,
    flips: Annotated[int, typer.Option(help="How many flipped questions to list.")] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of tables.")] = False,
) -> None:
    """Pair two lm_eval runs question by question and decide.

    Exit code: 0 PASS, 1 FAIL, 2 INCONCLUSIVE, 3 if the runs cannot be read or compared.
    """
    from evals.parity import compare, load, report

    try:
        one, other = load(baseline, task), load(candidate, task)
        first = compare(one, other, answers, margin)
        others = [compare(one, other, name, margin) for name in one.answers if name != answers]
    except (ValueError, OSError) as error:
        typer.echo(f"gate: {error}", err=True)
        raise typer.Exit(REFUSED) from None
    if as_json:
        typer.echo(json.dumps({c.filter: asdict(c) for c in (first, *others)}, indent=2))
    else:
        typer.echo(report(one, other, [first, *others], margin, flips))
    raise typer.Exit(EXIT[first.decision.outcome])


@app.command()
def published(
    churn: Annotated[
        float, typer.Option(help="Share of questions that flip between two good kernels.")
    ] = 0.05,
) -> None:
    """Published gsm8k figures of MLA changes, and the losses that they could have shown."""
    from evals.statistics import published_table

    typer.echo(published_table(churn))


def main() -> None:
    """Run the command line."""
    app()
