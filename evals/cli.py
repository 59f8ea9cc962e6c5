"""``python -m evals`` and ``mla-verify gate``: parse, call, print."""

import json
import os
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer
from typer.exceptions import Abort, TyperException

from oracles.exits import first_line, printable, said, unread
from oracles.whole_file import write_whole

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,  # the last line of an error is then the error
    help="gsm8k: paired decisions and what they can see.",
)

REFUSED, INTERRUPTED = 3, 130
FLOATING = ("float32", "bfloat16", "float16")
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
        str,
        typer.Option("--filter", help="Whose answers decide: flexible-extract, or the only filter there is."),
    ] = "",
    metric: Annotated[str, typer.Option(help="Of the samples: exact_match, else acc.")] = "",
    margin: Annotated[float, typer.Option(help="The largest loss that is accepted, as a share.")] = 0.02,
    flips: Annotated[int, typer.Option(min=0, help="How many flipped questions to list.")] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of tables.")] = False,
) -> None:
    """Pair two lm_eval runs question by question and decide.

    Exit code: 0 PASS, 1 FAIL, 2 INCONCLUSIVE, 3 if the runs cannot be read or compared.
    """
    from evals.parity import compare, deciding, finite, report
    from evals.runs import load, why_one
    from evals.statistics import check_margin

    with _refusing("gate"):
        check_margin(margin)
        one, other = load(baseline, task, metric), load(candidate, task, metric)
        if reason := why_one(one, other):
            raise ValueError(reason)
        first = compare(one, other, deciding(one, answers), margin)
        others = [compare(one, other, name, margin) for name in one.answers if name != first.filter]
    if as_json:
        found = finite({c.filter: asdict(c) for c in (first, *others)})
        typer.echo(json.dumps(found, indent=2, allow_nan=False))
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

    with _refusing("published"):
        typer.echo(published_table(churn))


Folder = Annotated[str, typer.Argument(help="mini, geom, or a checkpoint's folder.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1 …")]
ModelDtype = Annotated[str, typer.Option(help="Of everything but attention: float32, bfloat16, float16.")]
PATH_HELP = "As printed: 'decode=mla_ref.absorbed prefill=mla_ref.chunked chunk=128'; else the reference."


@app.command()
def trial(
    checkpoint: Folder,
    path: Annotated[str, typer.Option(help=PATH_HELP)],
    questions: Annotated[int, typer.Option(min=0, help="Asked through lm_eval; 0 leaves tier 3 out.")] = 60,
    margin: Annotated[float, typer.Option(help="The largest loss of accuracy that is accepted.")] = 0.05,
    out: Annotated[Path | None, typer.Option(help="Keep lm_eval's runs here; they resume.")] = None,
    device: Device = "cpu",
    model_dtype: ModelDtype = "float32",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of tables.")] = False,
) -> None:
    """Hold an attention path to the definition of MLA: its layers, its logits, its answers.

    Exit code: 0 PASS, 1 FAIL, 2 INCONCLUSIVE, 3 if it cannot run.
    """
    from evals import trial as trials
    from evals.path import parse
    from evals.statistics import check_margin

    with _refusing("trial"), _folder_or_temporary(out) as folder:
        result = trials.judge(
            _checkpoint(checkpoint),
            parse(path),
            questions,
            folder,
            check_margin(margin),
            _device(device),
            _floating(model_dtype),
        )
    typer.echo(trials.as_json(result) if as_json else "\n".join(trials.report(result)))
    raise typer.Exit(EXIT[result.outcome])


@app.command()
def check(checkpoint: Folder = "mini") -> None:
    """Show that the gate is alive: right paths pass on the CPU, planted bugs fail.

    Exit code: 0 if every path comes out as it should, 1 if not, 3 if it cannot run.
    """
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported
    from evals import check as checks

    wrong = 0
    with _refusing("check"), TemporaryDirectory() as out:
        for row in checks.rows(_checkpoint(checkpoint), Path(out)):
            wrong += row.outcome not in ("", row.expected)
            typer.echo(
                f"{row.name:36} expected {row.expected:4}  {row.outcome or 'not run':12}  {row.detail}"
            )
    if wrong:
        typer.echo(f"check: {wrong} paths did not come out as expected", err=True)
        raise typer.Exit(1)


@app.command()
def bugs(
    out: Annotated[Path, typer.Option(help="lm_eval's runs; an interrupted command resumes.")],
    checkpoint: Folder = "mini",
    questions: Annotated[int, typer.Option(min=1, help="Asked of each path through lm_eval.")] = 200,
    jobs: Annotated[int, typer.Option(min=1, help="Processes.")] = 1,
    device: Device = "cpu",
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the rows here.")] = None,
) -> None:
    """Show which tier sees which of the planted bugs, and that right paths pass.

    Exit code: 0 if T1 or T2 sees every bug and no tier fails a right path, 1 if not, 3 if it cannot run.
    """
    from evals import sight

    with _refusing("bugs"):
        folder = _checkpoint(checkpoint)
        rows = list(sight.sights(folder, questions, out, jobs, _device(device)))
        if json_file is not None:
            _write(json_file, sight.record(rows, folder))
    typer.echo(sight.markdown(rows))
    if wrong := sight.unseen(rows):
        typer.echo(f"bugs: not as it must be: {', '.join(wrong)}", err=True)
        raise typer.Exit(1)


@app.command()
def codes(
    checkpoint: Folder,
    path: Annotated[str, typer.Option(help=PATH_HELP)],
    device: Device = "cpu",
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the record here.")] = None,
) -> None:
    """Show whether a path over a cache that rounds parts from the definition by its codes alone."""
    from evals import codes as written
    from evals.path import parse

    with _refusing("codes"):
        record = written.codes(_checkpoint(checkpoint), parse(path), _device(device))
        if json_file is not None:
            _write(json_file, record)
    typer.echo(written.markdown(record))


@app.command()
def reach(
    checkpoint: Folder = "mini",
    jobs: Annotated[int, typer.Option(min=1, help="Processes.")] = 1,
    device: Device = "cpu",
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the record here.")] = None,
) -> None:
    """Show how far beyond the limits each planted bug is, over every cache format and in 16 bits.

    Exit code: 0 if T1 or T2 sees every bug everywhere, 1 if not, 3 if it cannot run.
    """
    from evals import reach as reaches
    from evals.trial import measured_noise

    with _refusing("reach"):
        folder = _checkpoint(checkpoint)
        noise = measured_noise(folder)
        rows = reaches.reaches(folder, noise, _device(device), jobs)
        record = reaches.record(rows, folder, noise, device)
        if json_file is not None:
            _write(json_file, record)
    typer.echo(f"{reaches.markdown(record, noise)}\n\n{reaches.summary(record, noise)}")
    if faint := reaches.unseen(record, noise):
        typer.echo(f"reach: within every limit: {', '.join(faint)}", err=True)
        raise typer.Exit(1)


@app.command()
def survey(
    checkpoint: Folder,
    out: Annotated[Path, typer.Option(help="lm_eval's runs; an interrupted command resumes.")],
    questions: Annotated[int, typer.Option(min=1, help="Asked of each path through lm_eval.")] = 400,
    only: Annotated[
        list[str] | None, typer.Option(help="One of the paths by its name; repeatable. All, without it.")
    ] = None,
    margin: Annotated[float, typer.Option(help="The largest loss of accuracy that is accepted.")] = 0.05,
    device: Device = "cpu",
    jobs: Annotated[int, typer.Option(min=1, help="Paths on trial at a time.")] = 1,
    seconds: Annotated[float, typer.Option(help="The longest that one path may take.")] = 600.0,
    model_dtype: ModelDtype = "float32",
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the record here.")] = None,
) -> None:
    """Try every fast path, each in a process of its own; print lm_eval's tables and the paired decisions.

    Cut short, by Ctrl-C or SIGTERM, it prints what it has.
    Exit code: 0 if every path that ran passes, 1 if one fails, 2 if one is inconclusive, 3 if none ran, 130
    if it was cut short.
    """
    from evals import survey as surveys
    from evals.statistics import check_margin

    record, stopped = None, False
    with _refusing("survey"):
        chosen = _chosen(surveys.PATHS, only or [])
        running = surveys.survey(
            _checkpoint(checkpoint),
            chosen,
            questions,
            out,
            device=_device(device),
            model_dtype=_floating(model_dtype),
            margin=check_margin(margin),
            jobs=jobs,
            seconds=seconds,
        )
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # `timeout` gets its table, too
        try:
            for record in running:
                ended = sum(row.get("reason") != surveys.PENDING for row in record["paths"])
                typer.echo(f"{ended} of {len(chosen)} paths", err=True)
                if json_file is not None:
                    _write(json_file, record)
        except KeyboardInterrupt:
            stopped = True
        finally:
            signal.signal(signal.SIGTERM, before)
    if record is not None:
        typer.echo(f"{surveys.about(record)}\n\n{surveys.markdown(record)}")
    if stopped or record is None:
        typer.echo("survey: interrupted; the same command goes on", err=True)
        raise typer.Exit(INTERRUPTED)
    raise typer.Exit(_code(record))


@app.command()
def rejudge(
    record_file: Annotated[Path, typer.Argument(metavar="RECORD", help="What survey --json wrote.")],
    checkpoint: Folder,
    measure: Annotated[bool, typer.Option("--measure", help="Measure T1 and T2 anew, on --device.")] = False,
    device: Device = "cpu",
    jobs: Annotated[int, typer.Option(min=1, help="Paths measured at a time.")] = 1,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the record here.")] = None,
) -> None:
    """Hold what a survey found to the limits that the checkpoint has now; T3 is as it was.

    Exit code: as that of survey.
    """
    from evals import survey as surveys

    with _refusing("rejudge"):
        folder = _checkpoint(checkpoint)
        was = _read(record_file)
        # Refuses a file that is no record, before anything is measured.
        record = surveys.again(was, folder)
        if measure:
            found = surveys.remeasured(was, folder, device=_device(device), jobs=jobs)
            record = surveys.again(found, folder)
        if json_file is not None:
            _write(json_file, record)
    typer.echo(f"{surveys.about(record)}\n\n{surveys.markdown(record)}")
    raise typer.Exit(_code(record))


def _read(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError
        raise ValueError(f"{file}: not JSON: {error}") from None


def _write(file: Path, record: dict[str, Any]) -> None:
    write_whole(file, f"{json.dumps(record, indent=1, allow_nan=False)}\n")


def _code(record: dict[str, Any]) -> int:
    """The worst outcome's."""
    found = {row["outcome"] for row in record["paths"] if "outcome" in row}
    worst = next((outcome for outcome in ("FAIL", "INCONCLUSIVE", "PASS") if outcome in found), "")
    return EXIT[worst] if worst else REFUSED


def _chosen(paths: dict[str, str], only: list[str]) -> dict[str, str]:
    """The reference and those that are asked for."""
    if unknown := [name for name in only if name not in paths]:
        raise ValueError(f"path {unknown[0]!r} is not one of {', '.join(paths)}")
    return {name: path for name, path in paths.items() if not only or name in only or not path}


@app.command()
def calibrate(checkpoint: Folder, device: Device = "cpu", model_dtype: ModelDtype = "float32") -> None:
    """Measure the noise of right paths again; store it beside the checkpoint with its hash."""
    from evals import calibration

    with _refusing("calibrate"):
        calibration.calibrate(_checkpoint(checkpoint), typer.echo, _device(device), _floating(model_dtype))


@app.command()
def evaluate(
    checkpoint: Folder,
    out: Annotated[Path, typer.Option(help="Results, samples and token ids; an interrupted run resumes.")],
    path: Annotated[str, typer.Option(help=PATH_HELP)] = "",
    data: Annotated[
        Path | None,
        typer.Option(help="Folder of gsm8k's train.jsonl and test.jsonl; else template problems."),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="The most questions.")] = 1319,
    batch_size: Annotated[int, typer.Option(min=1)] = 20,
    device: Device = "cpu",
    model_dtype: ModelDtype = "float32",
    chat: Annotated[bool, typer.Option(help="Prompts through the chat template, shots as turns.")] = False,
) -> None:
    """Run lm_eval's stock gsm8k with one attention path and print its table; `gate` reads what it writes."""
    from evals.lm import evaluate as run
    from evals.path import parse
    from evals.task import gsm8k_rows, template_rows

    with _refusing("evaluate"):
        rows = gsm8k_rows(data) if data else template_rows(limit)
        typer.echo(
            run(
                _checkpoint(checkpoint),
                parse(path),
                rows,
                out,
                limit=limit,
                batch_size=batch_size,
                device=_device(device),
                model_dtype=_floating(model_dtype),
                chat=chat,
            )
        )


@app.command()
def matrix(
    checkpoint: Folder,
    backend: Annotated[
        list[str] | None, typer.Option(help="decode or decode+prefill, by name; repeatable.")
    ] = None,
    formats: Annotated[str, typer.Option(help="Cache formats.")] = "fp32,bf16,fp8_e4m3,fp8_ds_mla",
    chunks: Annotated[str, typer.Option(help="Prompt tokens of a step; 0: whole prompts.")] = "0,96",
    thresholds: Annotated[str, typer.Option(help="The most new tokens that are decoded.")] = "1",
    block_sizes: Annotated[str, typer.Option(help="Tokens of a block.")] = "16",
    dtypes: Annotated[str, typer.Option(help="Of queries and up-projections.")] = "float32",
    questions: Annotated[int, typer.Option(min=1, help="Of each set: stories, lists of 5, 10, 20.")] = 2,
    page: Annotated[Path | None, typer.Option("--html", help="Also write the table as a page.")] = None,
) -> None:
    """Every combination of the axes: accuracy, equal texts, divergence, time, as markdown."""
    from evals import matrix as tables

    def numbers(name: str, text: str) -> list[int]:
        try:
            return [int(word) for word in text.split(",")]
        except ValueError:
            raise ValueError(f"{name}: {text!r} are no integers, such as 0,96") from None

    with _refusing("matrix"):
        pairs = [name.partition("+") for name in backend or ["mla_ref.absorbed+mla_ref.chunked"]]
        asked = tables.paths(
            [(decode, prefill or decode) for decode, _, prefill in pairs],
            formats.split(","),
            numbers("chunks", chunks),
            numbers("thresholds", thresholds),
            numbers("block sizes", block_sizes),
            dtypes.split(","),
        )
        rows = list(tables.cells(_checkpoint(checkpoint), asked, questions))
        if page is not None:
            write_whole(page, tables.page(rows, f"{checkpoint}: attention paths"))
    typer.echo(tables.markdown(rows))


@contextmanager
def _refusing(command: str) -> Iterator[None]:
    """What is wrong with files, names or settings is one line, and exit code 3."""
    try:
        yield
    except BrokenPipeError:  # of what is printed
        raise
    except (ValueError, OSError) as error:
        raise typer.Exit(_complain(command, said(error))) from None


def _complain(command: str, message: str) -> int:
    typer.echo(f"{command}: {printable(' '.join(message.split()))}", err=True)
    return REFUSED


@contextmanager
def _folder_or_temporary(folder: Path | None) -> Iterator[Path]:
    if folder is not None:
        yield folder
        return
    with TemporaryDirectory() as made:
        yield Path(made)


def _device(name: str) -> str:
    """Raises: ValueError if torch has no such device."""
    import torch

    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {name!r}: {first_line(error)}") from None
    return name


def _floating(name: str) -> str:
    """Raises: ValueError if the name is of no type that a model is computed in."""
    if name not in FLOATING:
        raise ValueError(f"model dtype {name!r} is not one of {', '.join(FLOATING)}")
    return name


def _checkpoint(name: str) -> Path:
    here = Path(__file__).resolve().parent / "checkpoints" / name
    folder = here if here.is_dir() else Path(name)
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"checkpoint {name!r}: neither one of evals/checkpoints nor a folder with config.json"
        )
    return folder


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. What is wrong with its words is code 3: 2 is a verdict."""
    words = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    try:
        code = int(app(words, prog_name="python -m evals", standalone_mode=False) or 0)
        sys.stdout.flush()
    except TyperException as error:
        return _complain(words[0], error.format_message())
    except (BrokenPipeError, SystemExit):  # the latter is rich's, and for the same reason
        return unread()
    except (Abort, KeyboardInterrupt):
        code = INTERRUPTED
    except Exception as error:  # code 1 is a verdict
        traceback.print_exc()
        return _complain(words[0], f"a defect of its own: {type(error).__name__}: {error}")
    if code == INTERRUPTED:
        typer.echo(f"{words[0]}: interrupted", err=True)
    return code
