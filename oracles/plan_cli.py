"""``mla-verify plan``: what fits in a GPU's memory, and two settings side by side."""

import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from typer.main import get_command

from mla_ref.capacity import GIB, PREFILLS, Device, Plan, Setting
from mla_ref.capacity import plan as plan_for
from mla_ref.chunk_plan import CAP
from mla_ref.config import MLAConfig
from mla_ref.formats import cache_format
from mla_ref.layout import CacheLayout
from mla_ref.presets import preset as find_preset
from oracles.exits import UsageError, said

# Bytes that torch reports for a whole card: vLLM's logs in its pull request 12126; for an H200 the one total
# that explains both sums printed in 12639 at a utilisation of 0.9.
GPUS = {"h100-80gb": Fraction("79.22") * GIB, "h200": Fraction("139.81") * GIB}

UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9}

_settings = typer.Typer(add_completion=False, rich_markup_mode=None)


def size(text: str) -> int:
    """Bytes: "4GiB", "512 MiB", "22.0568GiB", "23683350528". Raises: ValueError that shows the text."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMG]?I?B)?", text.strip().upper())
    if match is None:
        raise ValueError(f"size {text!r} is no number of bytes, such as 4GiB or 512MB")
    return int(Fraction(match[1]) * UNITS[match[2] or ""])


def share(text: str) -> Fraction:
    """An exact share: "0.9". Raises: ValueError that shows the text."""
    if not re.fullmatch(r"0?\.\d+|1(\.0*)?", text):
        raise ValueError(f"utilization {text!r} is no number from 0 to 1, such as 0.9")
    return Fraction(text)


def gpu_bytes(name: str) -> int:
    """Memory of a known card, of this machine's own ("cuda", "cuda:1"), or as a size."""
    if name in GPUS:
        return int(GPUS[name])
    if name.startswith("cuda"):
        if not torch.cuda.is_available():
            raise ValueError(f"gpu {name!r}: torch sees no CUDA device")
        return int(torch.cuda.get_device_properties(name).total_memory)
    try:
        return size(name)
    except ValueError:
        raise ValueError(f"gpu {name!r} is not one of {', '.join(GPUS)}, cuda or a size") from None


@_settings.command()
def _setting(
    preset: Annotated[str, typer.Option(help="A model of `mla-verify list presets`.")] = "deepseek-r1",
    config: Annotated[Path | None, typer.Option(help="A Hugging Face config.json instead.")] = None,
    tp: Annotated[int, typer.Option(help="Tensor-parallel ranks; they divide heads, never the latent.")] = 1,
    format_: Annotated[str, typer.Option("--format", help="How an entry is stored.")] = "bf16",
    align: Annotated[int, typer.Option(min=0, help="Bytes an entry is rounded up to; 0: none.")] = 0,
    block_align: Annotated[int, typer.Option(min=0, help="Bytes a block is rounded up to; 0: none.")] = 0,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens of a block.")] = 64,
    budget: Annotated[str, typer.Option(help="Bytes for the cache, such as 22GiB; else from --gpu.")] = "",
    gpu: Annotated[str, typer.Option(help=f"{', '.join(GPUS)}, cuda, or a size.")] = "h200",
    utilization: Annotated[str, typer.Option(help="The share of the GPU that may be used.")] = "0.9",
    weights: Annotated[str, typer.Option(help="Bytes of weights on this rank.")] = "0",
    other: Annotated[str, typer.Option(help="Bytes that torch does not see: libraries, graphs.")] = "0",
    host: Annotated[str, typer.Option(help="Host memory for blocks that are swapped out.")] = "4GiB",
    max_model_len: Annotated[int, typer.Option(min=0, help="Longest request; 0: the model's.")] = 0,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Most requests of a step.")] = 256,
    workspace_cap: Annotated[int, typer.Option(min=1, help="Most rows of context expanded at once.")] = CAP,
    prefill: Annotated[str, typer.Option(help=f"What is alive then: {', '.join(PREFILLS)}.")] = "profile",
    step_tokens: Annotated[int, typer.Option(min=1, help="New tokens of a step.")] = 2048,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> tuple[Setting, bool]:
    """What fits. ``--compare`` and further options put a changed setting beside the one before it."""
    model = find_preset(preset) if config is None else MLAConfig.from_hf(config)
    card = Device(
        total=gpu_bytes(gpu), utilization=share(utilization), weights=size(weights), other=size(other)
    )
    setting = Setting(
        config=model,
        tp=tp,
        cache_format=cache_format(format_),
        layout=CacheLayout(entry_align=align or 1, block_align=block_align or 1),
        block_size=block_size,
        budget=size(budget) if budget else card,
        host_budget=size(host),
        max_model_len=max_model_len or model.max_position,
        max_num_seqs=max_num_seqs,
        workspace_cap=workspace_cap,
        prefill=prefill,
        step_tokens=step_tokens,
    )
    return setting, as_json


def plan(context: typer.Context) -> int:
    """What fits in a GPU's memory: blocks, tokens, padding, and the peak of chunked prefill."""
    words: list[list[str]] = [[]]
    for word in context.args:
        if word == "--compare":
            words.append(list(words[-1]))
        else:
            words[-1].append(word)
    parsed = [_parse(options) for options in words]
    settings = [found[0] for found in parsed if found is not None]
    if len(settings) < len(words):
        return 0
    try:
        plans = [plan_for(setting) for setting in settings]
    except ValueError as error:
        raise UsageError(said(error)) from None
    if any(found is not None and found[1] for found in parsed):
        rows = [
            {"setting": _summary(setting), "plan": asdict(planned)}
            for setting, planned in zip(settings, plans, strict=True)
        ]
        typer.echo(json.dumps(rows if len(rows) > 1 else rows[0], indent=2))
    else:
        Console(highlight=False, width=120).print(table(settings, plans))
    return 0


def _parse(words: Sequence[str]) -> tuple[Setting, bool] | None:
    """One setting; None where help was asked for. Of an option given twice, the last counts."""
    try:
        result = get_command(_settings)(list(words), prog_name="mla-verify plan", standalone_mode=False)
    except ValueError as error:
        raise UsageError(said(error)) from None
    return result if isinstance(result, tuple) else None


def _summary(setting: Setting) -> dict[str, Any]:
    budget = setting.budget
    return {
        "model": setting.config.name,
        "tp": setting.tp,
        "format": setting.cache_format.name,
        "align": setting.layout.entry_align,
        "block_size": setting.block_size,
        "max_model_len": setting.max_model_len,
        "budget": budget
        if isinstance(budget, int)
        else {**asdict(budget), "utilization": float(budget.utilization)},
    }


def _binary(value: int) -> str:
    """Bytes as a person reads them: 1,280 B, 4.77 MiB, 22.058 GiB."""
    for unit, digits in (("GiB", 3), ("MiB", 2)):
        scale = UNITS[unit.upper()]
        if abs(value) >= scale:
            return f"{value / scale:,.{digits}f} {unit}"
    return f"{value:,} B"


def _cells(setting: Setting, planned: Plan) -> dict[str, str]:
    """One column of the table."""
    return {
        "model": f"{setting.config.name}, tp {setting.tp}",
        "cache": f"{setting.cache_format.name}, blocks of {setting.block_size}",
        "entry": f"{planned.entry_bytes} B in {planned.entry_stride}",
        "token, all layers": f"{planned.token_bytes:,} B",
        "block, all layers": f"{planned.block_bytes:,} B",
        "budget": _binary(planned.budget),
        "blocks": f"{planned.num_blocks:,}",
        "tokens": f"{planned.num_tokens:,}",
        "concurrency": f"{planned.concurrency:.2f}x at {setting.max_model_len:,}",
        "host blocks": f"{planned.num_host_blocks:,} of {_binary(setting.host_budget)}",
        "lost to padding": _binary(planned.padding_bytes),
        "left over": _binary(planned.unused_bytes),
        "workspace": f"{planned.workspace_rows:,} rows",
        **{f"  {name}": _binary(part) for name, part in planned.prefill.items()},
        "peak of prefill": _binary(planned.prefill_bytes),
    }


def table(settings: Sequence[Setting], plans: Sequence[Plan]) -> Table:
    """One column a setting; the parts of prefill below the cache."""
    grid = Table(box=None, show_header=False, pad_edge=False)
    columns = [_cells(setting, planned) for setting, planned in zip(settings, plans, strict=True)]
    longest = max(columns, key=len)
    titles: dict[str, None] = dict.fromkeys(title for column in [longest, *columns] for title in column)
    titles["peak of prefill"] = titles.pop("peak of prefill")
    for title in titles:
        grid.add_row(title, *(column.get(title, "-") for column in columns))
    return grid
