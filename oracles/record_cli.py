"""``mla-verify record``: real inputs of attention from a Hugging Face checkpoint."""

from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from mla_ref.config import MLAConfig
from oracles.exits import UsageError, said
from oracles.recorded import STAGES, record, write
from oracles.verify import use_device

MISSING = "needs transformers and safetensors: pip install 'mla-verify[record]'"


def record_command(
    model: Annotated[Path, typer.Argument(help="A folder with config.json, weights and a tokenizer.")],
    out: Annotated[Path, typer.Option(help="The folder for the recordings, one case a file.")],
    prompt: Annotated[list[str] | None, typer.Option(help="A text; repeatable. Each is a request.")] = None,
    prompts: Annotated[Path | None, typer.Option(help="A file of texts, one a line.")] = None,
    layer: Annotated[
        list[int] | None, typer.Option(help="Only this layer; repeatable. First, middle, last.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="What the model computes in.")] = "bfloat16",
    device: Annotated[str, typer.Option(help="Where the model runs.")] = "cpu",
) -> int:
    """Store what a model's attention is given while texts pass: prefill, a chunk, two drafts, one token.

    ``mla-verify run --case FILE`` and ``mla-verify replay FILE`` judge backends on it.
    """
    try:
        use_device(device)
        texts = [*(prompt or []), *(_lines_of(prompts) if prompts else [])]
        if not texts:
            raise ValueError("nothing to record: give --prompt TEXT or --prompts FILE")
        config = MLAConfig.from_hf(model)
        middle = sorted({0, config.num_layers // 2, config.num_layers - 1})
        chosen = list(dict.fromkeys(layer or middle))
        for index in chosen:
            if not 0 <= index < config.num_layers:
                raise ValueError(f"--layer {index}: {config.name} has {config.num_layers} layers, from 0")
        if out.exists() and not out.is_dir():
            raise ValueError(f"--out {out}: is a file, must be a directory")
        loaded, ids = _loaded(model, texts, dtype, device)
        out.mkdir(parents=True, exist_ok=True)
        for index, stage, case, tensors, source in record(loaded, config, ids, chosen):
            path = out / f"{config.name}-layer{index}-{stage}.safetensors"
            write(path, case, tensors, source)
            lengths = " ".join(f"{q}/{kv}" for q, kv in zip(case.q_lens, case.kv_lens, strict=True))
            typer.echo(f"{path}: {len(ids)} requests, new/cached tokens {lengths}")
    except ImportError as error:
        raise UsageError(f"record: {MISSING} ({error})") from None
    except (ValueError, OSError) as error:
        raise UsageError(f"record: {said(error)}") from None
    typer.echo(f"{len(chosen) * len(STAGES)} recordings of {config.name} in {dtype}")
    return 0


def _lines_of(file: Path) -> list[str]:
    """Raises: ValueError naming a file that is no text."""
    try:
        return file.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: {error}") from None


def _loaded(folder: Path, texts: list[str], dtype: str, device: str) -> tuple[Any, list[list[int]]]:
    """transformers' causal model, and the token ids of each text."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # type: ignore[no-untyped-call]
    if dtype not in ("bfloat16", "float16", "float32"):
        raise ValueError(f"--dtype {dtype!r} is not one of bfloat16, float16, float32")
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), local_files_only=True)
    loaded.train(False).to(torch.device(device))
    return loaded, [tokenizer(text)["input_ids"] for text in texts]
