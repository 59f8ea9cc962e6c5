"""The model class ``mla-verify`` of lm_eval, and runs with it that need no network and can be resumed."""

import fcntl
import hashlib
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import (
    Collator,
    handle_stop_sequences,
    normalize_gen_kwargs,
    postprocess_generated_text,
)

from evals.gsm8k import Row
from evals.model import greedy, load, load_tokenizer, teacher_forced
from evals.path import AttentionPath, layer_of
from evals.planted import Planted
from evals.task import TASK, stock_task
from oracles.whole_file import write_whole

LOG = logging.getLogger(__name__)
TOKENS = "tokens.jsonl"
FINISHED = "finished.json"


@register_model("mla-verify")
class MLAVerifyLM(TemplateLM):  # type: ignore[misc]
    """A checkpoint whose attention takes one path.

    pretrained: folder of config.json, tokenizer and safetensors.
    tokens: file to which the generated token ids are appended, one JSON object a line.
    max_length: tokens of a prompt and its answer; 0: the longest position of the model. A longer prompt loses
        its beginning, with a warning.
    model_dtype: of everything but attention, whose type is the path's ``dtype``.
    path: the fields of ``AttentionPath``.

    Requests are sorted by length and cut into batches by lm_eval, so every path sees the same batches.
    """

    def __init__(
        self,
        pretrained: str,
        batch_size: int | str = 20,
        device: str = "cpu",
        max_length: int = 0,
        max_gen_toks: int = 256,
        model_dtype: str = "float32",
        tokens: str = "",
        max_batch_size: int | None = None,
        **path: Any,
    ) -> None:
        super().__init__()
        known = {f.name for f in fields(AttentionPath)}
        if unknown := sorted(set(path) - known):
            raise ValueError(f"mla-verify: {unknown[0]} is unknown; a path has {', '.join(sorted(known))}")
        self.path = AttentionPath(**path)
        self.batch_size = int(batch_size)
        self.tokenizer = load_tokenizer(Path(pretrained))
        self.model = load(Path(pretrained), device, getattr(torch, model_dtype))
        self.max_length = int(max_length) or self.model.config.max_position
        self.max_gen_toks = int(max_gen_toks)
        self.layer = layer_of(self.path, self.model.config, torch.device(device).type)
        self.tokens = Path(tokens) if tokens else None
        self.ends = _ends(self.model.hf.generation_config.eos_token_id, self.tokenizer.eos_token_id)

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return int(self.tokenizer.eos_token_id)

    @property
    def tokenizer_name(self) -> str:
        """For lm_eval's caches."""
        return str(self.tokenizer.name_or_path)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Token ids with the special ones that the tokenizer adds, as lm_eval's own model class has them.

        None: unless the text begins with the token that begins texts, as one from a chat template does.
        """
        if add_special_tokens is None:
            begin = self.tokenizer.bos_token
            add_special_tokens = not (begin and string.startswith(begin))
        ids: list[int] = self.tokenizer.encode(string, add_special_tokens=add_special_tokens)
        return ids

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """The prompt that the tokenizer's template makes of messages."""
        text = self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )
        return str(text)

    def _loglikelihood_tokens(
        self, requests: Sequence[Any], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """(log probability, whether greedy decoding writes it) of each continuation."""
        found = []
        for start in range(0, len(requests), self.batch_size):
            part = requests[start : start + self.batch_size]
            prompts, answers = [list(r[1]) for r in part], [list(r[2]) for r in part]
            logits = teacher_forced(self.model, self.layer, self.path, prompts, answers)
            for rows, answer in zip(logits, answers, strict=True):
                wanted = torch.tensor(answer, device=rows.device)
                chance = rows.log_softmax(-1).gather(1, wanted[:, None]).sum()
                found.append((float(chance), bool((rows.argmax(-1) == wanted).all())))
        return found

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        """Not asked by gsm8k."""
        raise NotImplementedError("mla-verify scores continuations and generates; it has no rolling window")

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Greedy text of each request up to its first stop sequence."""
        end = self.tokenizer.decode([self.eot_token_id])
        collator = Collator(
            [(*request.args, request.doc_id) for request in requests],
            sort_fn=lambda item: (-len(self.tok_encode(item[0])), item[0]),
            group_by="gen_kwargs",
            group_fn=lambda item: item[1],
        )
        texts = []
        for part in collator.get_batched(n=self.batch_size):
            contexts, settings, doc_ids = zip(*part, strict=True)
            asked = dict(normalize_gen_kwargs(settings[0], self.max_gen_toks))
            until = handle_stop_sequences(asked.pop("until", None), eos=end)
            most = int(asked.pop("max_gen_toks"))
            if asked.get("do_sample"):
                raise ValueError("mla-verify: generates greedily, but the task asks for do_sample")
            prompts = [self._room(self.tok_encode(context), most) for context in contexts]
            written = greedy(
                self.model,
                self.layer,
                self.path,
                prompts,
                most,
                partial(self._stops, until=until),
            )
            for context, doc_id, ids in zip(contexts, doc_ids, written, strict=True):
                text = self.tokenizer.decode(ids, skip_special_tokens=True)
                text = postprocess_generated_text(text, until, None)
                texts.append(text)
                self._keep(doc_id, ids)
                # What is cached here is not asked again.
                self.cache_hook.add_partial("generate_until", (context, settings[0]), text)
        answers: list[str] = collator.get_original(texts)
        return answers

    def _room(self, prompt: list[int], most: int) -> list[int]:
        """The end of a prompt, where all of it and ``most`` new tokens are more than ``max_length``."""
        room = self.max_length - most
        if room < 1:
            raise ValueError(f"mla-verify: {most} new tokens leave no room in max_length={self.max_length}")
        if len(prompt) > room:
            LOG.warning("a prompt of %d tokens is cut to its last %d", len(prompt), room)
        return prompt[-room:]

    def _stops(self, ids: list[int], until: list[str]) -> bool:
        return ids[-1] in self.ends or any(stop in self.tokenizer.decode(ids) for stop in until)

    def _keep(self, doc_id: int, ids: list[int]) -> None:
        if self.tokens is not None:
            with self.tokens.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps({"doc_id": doc_id, "tokens": ids}) + "\n")


def _ends(*given: int | list[int] | None) -> set[int]:
    """The tokens that end a text: the checkpoint's, one or several, and the tokenizer's."""
    return {end for ids in given for end in (ids if isinstance(ids, list) else [ids]) if end is not None}


def evaluate(
    checkpoint: Path,
    path: AttentionPath,
    data: Mapping[str, Sequence[Row]],
    out: Path,
    *,
    limit: int | None = None,
    batch_size: int = 20,
    device: str = "cpu",
    model_dtype: str = "float32",
    max_gen_toks: int = 256,
    chat: bool = False,
    planted: Planted | None = None,
) -> str:
    """lm_eval's table of the stock gsm8k task; results and samples are written under ``out``.

    A run that was interrupted goes on after its last whole batch when it is started again with the same
    ``out``; one that was finished is not asked again, nor is the model loaded. Of several processes that are
    started with the same ``out`` one asks, and the others wait for its answers.

    data: {"train": rows to draw shots from, "test": the questions}. limit: the most questions.
    batch_size: requests of one batch. max_gen_toks: the most tokens of an answer.
    chat: prompts go through the tokenizer's chat template, shots as turns.
    planted: attends in the place of ``path``, for proof that a bug in it would show.

    Raises: ValueError if ``out`` holds a run with other settings, or the path cannot run.
    """
    out.mkdir(parents=True, exist_ok=True)
    with _alone(out):
        settings: dict[str, Any] = {
            "pretrained": str(checkpoint.resolve()),
            "model_dtype": model_dtype,
            "max_gen_toks": max_gen_toks,
        } | asdict(path)
        planted_too = {"planted": planted.name} if planted else {}
        asked = settings | {"batch_size": batch_size, "device": device, "chat": chat} | planted_too
        _same_settings(out / "settings.json", asked)
        questions = _digest(data["train"], data["test"][:limit])
        if (table := _finished(out, questions)) is not None:
            return table
        lm = MLAVerifyLM(batch_size=batch_size, device=device, tokens=str(out / TOKENS), **settings)
        if planted is not None:
            lm.layer = planted.layer(lm.model)
        table = _answered(lm, settings, data, out, limit, chat)
        write_whole(out / FINISHED, json.dumps({"questions": questions, "table": table}))
        return table


def _answered(
    lm: MLAVerifyLM,
    settings: Mapping[str, Any],
    data: Mapping[str, Sequence[Row]],
    out: Path,
    limit: int | None,
    chat: bool,
) -> str:
    """The table of the task, its results and samples written; what ``out`` has is not asked again."""
    from lm_eval import simple_evaluate
    from lm_eval.loggers import EvaluationTracker
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import make_table

    tracker = EvaluationTracker(output_path=str(out))
    results = simple_evaluate(
        model=lm,
        model_args=dict(settings),
        tasks=[stock_task(data)],
        batch_size=lm.batch_size,
        device=str(lm.model.device),
        limit=limit,
        use_cache=str(out / "answers"),
        task_manager=TaskManager(include_defaults=False),
        apply_chat_template=chat,
        fewshot_as_multiturn=chat,
        bootstrap_iters=1000,
        log_samples=True,
        evaluation_tracker=tracker,
    )
    samples = results.pop("samples")
    tracker.save_results_aggregated(results=results, samples=samples)
    tracker.save_results_samples(task_name=TASK, samples=samples[TASK])
    return str(make_table(results))


@contextmanager
def _alone(out: Path) -> Iterator[None]:
    """No other process is in here with the same folder; one that ends in any way lets the next one in."""
    with (out / "lock").open("w", encoding="utf-8") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield


def _digest(*splits: Sequence[Row]) -> str:
    """sha256 of questions and answers."""
    return hashlib.sha256(json.dumps([[*split] for split in splits]).encode()).hexdigest()


def _finished(out: Path, questions: str) -> str | None:
    """The table of the run in ``out`` if it ended, and these were its questions."""
    if not (out / FINISHED).is_file():
        return None
    try:
        ended = json.loads((out / FINISHED).read_text(encoding="utf-8"))
        return str(ended["table"]) if ended["questions"] == questions else None
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{out / FINISHED}: cannot be read; without it the run goes on") from None


def _same_settings(file: Path, settings: Mapping[str, Any]) -> None:
    """Answers of one path are never continued with another's."""
    text = json.dumps(settings, sort_keys=True)
    if file.is_file() and file.read_text(encoding="utf-8") != text:
        raise ValueError(f"{file.parent}: holds a run with other settings; choose another folder")
    write_whole(file, text)
