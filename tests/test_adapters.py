"""The adapters: to libraries that run on a CPU themselves, and to others their own conversions alone.

What FlashMLA, FlashAttention-3 and FlashInfer compute is judged on a Hopper GPU. Here stand-ins behave as
those document themselves, and what is judged is what the adapters make of it.
"""

import contextlib
import functools
import importlib
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from inspect import unwrap
from itertools import accumulate
from pathlib import Path
from types import ModuleType

import pytest
import torch

import mla_fast
from mla_fast import (
    _installed,
    flash_attn_2,
    flash_attn_3,
    flash_attn_3_paged,
    flash_attn_3_varlen,
    flash_attn_4,
    flash_mla,
    flashinfer,
    gluon_decode,
    sdpa_cudnn,
    transformers_layer,
    triton_decode,
)
from mla_ref.backend import Backend, available, missing
from mla_ref.case import Case
from mla_ref.config import MLAConfig
from mla_ref.layout import CacheLayout
from mla_ref.presets import preset
from mla_ref.problem import problem
from oracles.verdict import FAIL, PASS, UNSUPPORTED
from oracles.verify import judge

FOLDER, OURS = Path(mla_fast.__file__).parent, ("gluon_", "triton_")
CONFIG = MLAConfig(
    name="wide", hidden_size=64, num_heads=3, q_lora_rank=None, kv_lora_rank=512,
    qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
)  # fmt: skip
UNIFORM = Case(problem="latent_attention", config=CONFIG, q_lens=(2, 2, 2), kv_lens=(130, 1, 0))
RAGGED = replace(UNIFORM, q_lens=(1, 0, 3), kv_lens=(130, 64, 2), block_size=16)
EXPANDED = replace(UNIFORM, problem="attention")
ORACLES = ("value", "lse", "empty_rows", "poison", "inputs_unchanged")
VARLEN = (
    {},
    {"q_lens": (1, 0, 3), "kv_lens": (130, 64, 2)},
    {"q_lens": (7, 7), "kv_lens": (7, 19)},
    {"kv_lens": (0, 0, 0)},
    {"q_lens": (0, 0, 0)},
)


def attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, empty: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """One request: [s h d], [j d], [j v] → out [s h v], lse [h s]; ``empty`` where a row sees nothing."""
    s, j = query.shape[0], keys.shape[0]
    seen = torch.arange(j) <= torch.arange(s)[:, None] + (j - s)
    scores = scale * torch.einsum("shd,jd->hsj", query.float(), keys.float())
    scores = scores.masked_fill(~seen, -torch.inf)
    weights = torch.softmax(scores, -1).nan_to_num(0.0) if j else scores
    lse = torch.logsumexp(scores, -1) if j else scores.new_full(scores.shape[:2], -torch.inf)
    out = torch.einsum("hsj,jv->shv", weights, values.float()).to(query.dtype)
    return out, lse.masked_fill(lse == -torch.inf, empty)


# The device that ``calling`` makes current, for as long as it lasts.
current: list[torch.device] = []


@contextlib.contextmanager
def recorded(device: torch.device) -> Iterator[None]:
    current.append(device)
    try:
        yield
    finally:
        current.pop()


def adapters() -> dict[str, str]:
    """Name -> text of the modules that call a library, neither torch nor a kernel of this package."""
    texts = {path.stem: path.read_text(encoding="utf-8") for path in FOLDER.glob("[!_]*.py")}
    others = {"sdpa", "chunked_sdpa", "routing", *(name for name in texts if name.startswith(OURS))}
    return {name: text for name, text in texts.items() if name not in others}


@pytest.fixture(autouse=True)
def recorded_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in adapters():
        monkeypatch.setattr(importlib.import_module(f"mla_fast.{name}"), "calling", recorded, raising=False)


def on_its_device(library: Callable[..., object]) -> Callable[..., object]:
    """A stand-in's function that ends as a library may where its tensors' GPU is not the current one."""

    @functools.wraps(library)
    def called(*args: object, **options: object) -> object:
        (tensor, *_) = (x for x in (*args, *options.values()) if isinstance(x, torch.Tensor))
        assert current == [tensor.device], "CUDA error: invalid resource handle"
        return library(*args, **options)

    return called


def install(monkeypatch: pytest.MonkeyPatch, name: str, **members: Callable[..., object]) -> None:
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    vars(module).update({member: on_its_device(fn) for member, fn in members.items()})
    monkeypatch.setitem(sys.modules, name, module)


def test_every_adapter_calls_its_library_where_its_tensors_are() -> None:
    found = adapters()
    assert {"flash_mla", "flashinfer", "flash_attn_4", "transformers_layer"} < found.keys()
    # flash_attn_3_paged calls by flash_attn_3.attend
    assert {name for name, text in found.items() if " calling(" not in text} == {"flash_attn_3_paged"}


def test_the_gpu_of_a_call_is_current_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = []
    monkeypatch.setattr(torch.cuda, "device", lambda device: gpus.append(device) or contextlib.nullcontext())
    for device in (torch.device("cuda:1"), torch.device("cpu")):
        with _installed.calling(device):
            pass
    assert gpus == [torch.device("cuda:1")]


@pytest.fixture(params=["2025-02", "2026-01"])
def stand_in_flash_mla(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Paged, [b s h 576] queries, lse [b h s] and +inf on a row without a key, 576^-0.5 by default."""

    def flash_mla_with_kvcache(
        q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits=None,
        softmax_scale=None, causal=False,
    ):  # fmt: skip
        assert causal
        if request.param == "2025-02":
            lengths, rows, heads = tile_scheduler_metadata
            assert torch.equal(lengths, cache_seqlens)
            assert (rows, heads, num_splits) == (q.shape[1] * q.shape[2], 1, len(cache_seqlens))
        else:
            assert (tile_scheduler_metadata, num_splits) == ("metadata", None)
        assert k_cache.shape[1:] == (64, 1, 576)
        scale = softmax_scale or q.shape[-1] ** -0.5
        results = []
        for query, table, length in zip(q, block_table, cache_seqlens.tolist(), strict=True):
            keys = k_cache[table[: -(-length // 64)].long(), :, 0].flatten(0, 1)[:length]
            results.append(attend(query, keys, keys[:, :head_dim_v], scale, torch.inf))
        return tuple(torch.stack(parts) for parts in zip(*results, strict=True))

    def get_mla_metadata(cache_seqlens, num_heads_per_head_k, num_heads_k):
        if request.param == "2025-02":
            return (cache_seqlens, num_heads_per_head_k, num_heads_k), len(cache_seqlens)
        return "metadata", None

    install(
        monkeypatch,
        "flash_mla",
        get_mla_metadata=get_mla_metadata,
        flash_mla_with_kvcache=flash_mla_with_kvcache,
    )


def stand_in_flash_attn(
    q, k_cache, v_cache, qv, cache_seqlens, page_table, cu_seqlens_q, max_seqlen_q, softmax_scale, causal,
    num_splits, return_softmax_lse,
):  # fmt: skip
    """Packed queries, lse [h t], -inf on a row without a key; contiguous where no page table is given."""
    assert causal
    assert return_softmax_lse
    offsets, block_size = cu_seqlens_q.tolist(), k_cache.shape[1]
    out, lse = torch.empty_like(qv), torch.empty(qv.shape[1], qv.shape[0], dtype=torch.float32)
    for i, length in enumerate(cache_seqlens.tolist()):
        rows = slice(offsets[i], offsets[i + 1])
        pages = torch.tensor([i]) if page_table is None else page_table[i, : -(-length // block_size)].long()
        k, v = (cache[pages, :, 0].flatten(0, 1)[:length] for cache in (k_cache, v_cache))
        if page_table is None:
            assert k_cache[i].isfinite().all(), "weights of 0 multiply dead rows too"
        query = torch.cat([qv[rows], q[rows]], -1)
        out[rows], lse[:, rows] = attend(query, torch.cat([v, k], -1), v, softmax_scale, -torch.inf)
    return out, lse, None


@pytest.fixture(params=[flash_attn_3.PAGED, flash_attn_3.CONTIGUOUS])
def flash_attn_module(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    install(monkeypatch, request.param, flash_attn_with_kvcache=stand_in_flash_attn)
    return request.param


def stand_in_varlen(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal, return_attn_probs
):  # fmt: skip
    """Everything packed, lse [h t]; +inf instead of -inf where there is no key at all."""
    assert causal
    assert return_attn_probs
    starts, key_starts = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    assert (max_seqlen_q, max_seqlen_k) == (max(cu_seqlens_q.diff()), max(cu_seqlens_k.diff()))
    out, lse = q.new_empty(*q.shape[:2], v.shape[2]), torch.empty(q.shape[1], len(q), dtype=torch.float32)
    for i in range(len(starts) - 1):
        rows, row_keys = slice(*starts[i : i + 2]), slice(*key_starts[i : i + 2])
        for h in range(q.shape[1]):
            empty = -torch.inf if len(k) else torch.inf
            query = q[rows, h : h + 1]
            out[rows, h : h + 1], lse[h : h + 1, rows] = attend(
                query, k[row_keys, h], v[row_keys, h], softmax_scale, empty
            )
    return out, lse


def test_flash_attn_3_varlen(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    install(monkeypatch, flash_attn_3.CONTIGUOUS, flash_attn_varlen_func=stand_in_varlen)
    for lens in VARLEN:
        case = replace(EXPANDED, seed=seed, **lens)
        assert verdicts(flash_attn_3_varlen.BACKEND, case) == {}


def stand_in_flash_attn_2(q, k, v, cu_q, cu_k, max_q, max_k, dropout, causal, debug, scale):
    """One width for keys and values, lse [h t], +inf on a row without a key; no blocks, no launch."""
    assert causal
    assert k.shape == v.shape
    if not max_q or not max_k:
        raise RuntimeError("CUDA error: invalid argument")
    out, lse = stand_in_varlen(q, k, v, cu_q, cu_k, max_q, max_k, scale, True, True)
    return out, lse.masked_fill(lse == -torch.inf, torch.inf), None, None, None


def test_flash_attn_2_of_torch(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", on_its_device(stand_in_flash_attn_2))
    for lens in VARLEN:
        case = replace(EXPANDED, seed=seed, **lens)
        assert verdicts(flash_attn_2.BACKEND, case) == {}


def test_flash_attn_2_of_its_own_package(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    def flash_attn_varlen_func(*args, softmax_scale, causal, return_attn_probs):
        assert return_attn_probs
        return stand_in_flash_attn_2(*args, 0.0, causal, False, softmax_scale)[:3]

    install(monkeypatch, "flash_attn")
    install(monkeypatch, flash_attn_2.MODULE, flash_attn_varlen_func=flash_attn_varlen_func)
    assert verdicts(flash_attn_2.BACKEND, replace(EXPANDED, seed=seed)) == {}


def stand_in_cudnn(q, k, v, bias, compute_lse, dropout, causal, debug, scale):
    """[b h s d] queries, lse [b h s 1]; top-left where it is causal, and no row without a key."""
    assert compute_lse
    assert bias is None or (bias.dtype == q.dtype and bias.stride(-2) * bias.element_size() % 16 == 0)
    scores = scale * (q.float() @ k.float().transpose(-1, -2)) + (0.0 if bias is None else bias.float())
    if causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
    lse = torch.logsumexp(scores, -1, keepdim=True)
    assert lse.isfinite().all()
    return (torch.softmax(scores, -1) @ v.float()).to(q.dtype), lse, None


def test_sdpa_cudnn(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_cudnn_attention", on_its_device(stand_in_cudnn))
    for lens in VARLEN:
        case = replace(EXPANDED, seed=seed, **lens)
        assert verdicts(sdpa_cudnn.BACKEND, case) == {}


def test_what_torch_says_of_its_own_kernels() -> None:
    """Its schemas and shapes, which it knows on any machine, are the stand-ins'."""
    with torch.device("meta"):
        q, k, v = (torch.empty(1, 3, j, x, dtype=torch.bfloat16) for j, x in ((5, 192), (9, 192), (9, 128)))
        bias, cu_k = torch.empty(1, 3, 5, 9, dtype=torch.bfloat16), torch.empty(3, dtype=torch.int32)
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            q, k, v, bias, True, 0.0, False, False, scale=0.1
        )
        assert (out.shape, lse.shape) == ((1, 3, 5, 128), (1, 3, 5, 1))
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, k))
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, cu_k, cu_k, 5, 9, 0.0, True, False, scale=0.1
        )
        assert (out.shape, lse.shape) == ((5, 3, 192), (3, 5))


def test_flash_attn_4(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """lse [h t]; its own answer where there is no key, and none where there is no token."""

    def flash_attn_varlen_func(q, k, v, **options):
        assert options.pop("return_lse")
        if not len(q):
            raise RuntimeError("CUDA error: invalid argument")
        out, lse = stand_in_varlen(q, k, v, return_attn_probs=True, **options)
        return out, lse if len(k) else torch.full_like(lse, -torch.inf)

    install(monkeypatch, "flash_attn")
    install(monkeypatch, "flash_attn.cute", flash_attn_varlen_func=flash_attn_varlen_func)
    for lens in (*VARLEN, {"q_lens": (0, 0, 0), "kv_lens": (0, 0, 0)}):
        case = replace(EXPANDED, seed=seed, **lens)
        assert verdicts(flash_attn_4.BACKEND, case) == {}


@pytest.mark.parametrize("fmt", ["bf16", "fp8_ds_mla"])
@pytest.mark.parametrize("module", [flash_attn_3_varlen, sdpa_cudnn])
def test_prepared(module: ModuleType, fmt: str, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """What is left to a layer is right as well, the second time too."""
    install(monkeypatch, flash_attn_3.CONTIGUOUS, flash_attn_varlen_func=stand_in_varlen)
    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_cudnn_attention", on_its_device(stand_in_cudnn))

    def twice(*args: object) -> object:
        inputs = problem("attention").inputs(*args)
        prepared = module.prepare(inputs)
        prepared.run()
        return prepared.finish(prepared.run())

    backend = replace(module.BACKEND, fn=twice)
    for lens in ({}, {"q_lens": (1, 0, 3), "kv_lens": (130, 64, 2)}, {"kv_lens": (0, 0, 0)}):
        assert verdicts(backend, replace(EXPANDED, seed=seed, cache_format=fmt, block_size=16, **lens)) == {}


@pytest.mark.parametrize(
    ("module", "case"),
    [
        (flash_mla, UNIFORM),
        (flash_attn_3, RAGGED),
        (flash_attn_3_paged, replace(RAGGED, problem="paged_attention")),
        (flashinfer, RAGGED),
        (flash_attn_2, EXPANDED),
        (flash_attn_3_varlen, EXPANDED),
        (flash_attn_4, EXPANDED),
        (sdpa_cudnn, EXPANDED),
    ],
)
def test_judged_where_its_library_runs(module: ModuleType, case: Case, seed: int) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if reason := missing(module.BACKEND, device):
        pytest.skip(f"{module.BACKEND.name}: {reason}")
    judged = judge(module.BACKEND, replace(case, seed=seed), device=device)
    assert {v.status for v in judged} <= {PASS, UNSUPPORTED}, [v.detail for v in judged]
    assert PASS in {v.status for v in judged}


def verdicts(backend: Backend, case: Case, oracles: tuple[str, ...] = ORACLES) -> dict[str, str]:
    """Problems of a backend that claims to be available: "variant oracle" -> what was found."""
    judged = judge(replace(backend, requires=available), case, oracles=oracles)
    return {f"{v.variant} {v.oracle}": f"{v.status} {v.detail} {v.worst}" for v in judged if v.status != PASS}


def test_flash_mla(stand_in_flash_mla: None, seed: int) -> None:
    assert verdicts(flash_mla.BACKEND, replace(UNIFORM, seed=seed)) == {}


def test_flash_attn_3(flash_attn_module: str, seed: int) -> None:
    for case in (UNIFORM, RAGGED):
        assert verdicts(flash_attn_3.BACKEND, replace(case, seed=seed)) == {}


def test_flash_attn_3_is_not_asked_where_there_is_no_request(
    flash_attn_module: str, monkeypatch, seed: int
) -> None:
    def asked(*_: object, **__: object) -> None:
        raise AssertionError("FlashAttention-3 was called")

    install(monkeypatch, flash_attn_module, flash_attn_with_kvcache=asked)
    for backend, case in (
        (flash_attn_3.BACKEND, UNIFORM),
        (flash_attn_3_paged.BACKEND, replace(UNIFORM, problem="paged_attention")),
    ):
        assert verdicts(backend, replace(case, q_lens=(), kv_lens=(), seed=seed)) == {}


class StandInFlashInfer:
    """Planned on the host from packed pages; lse [t h] in base 2, and -5e4 where a row sees nothing."""

    def __init__(self, workspace: torch.Tensor, backend: str) -> None:
        assert backend in ("auto", "fa2")

    @on_its_device
    def plan(
        self, qo_indptr, kv_indptr, kv_indices, kv_len_arr, num_heads, head_dim_ckv, head_dim_kpe, page_size,
        causal, sm_scale, q_data_type, kv_data_type,
    ):  # fmt: skip
        assert causal
        assert (head_dim_ckv, head_dim_kpe, q_data_type, kv_data_type) == (512, 64, *[torch.bfloat16] * 2)
        assert int(qo_indptr[-1]) * num_heads // len(kv_len_arr) >= 0
        lists = (x.tolist() for x in (qo_indptr, kv_indptr, kv_len_arr))
        self.planned = *lists, kv_indices, page_size, sm_scale

    @on_its_device
    def run(self, q_nope, q_pe, ckv_cache, kpe_cache, return_lse):
        assert return_lse
        offsets, first, lengths, pages, page_size, scale = self.planned
        assert ckv_cache.shape[1] == kpe_cache.shape[1] == page_size
        out, lse = torch.empty_like(q_nope), torch.empty(q_nope.shape[:2])
        for i, length in enumerate(lengths):
            rows, own = slice(*offsets[i : i + 2]), pages[first[i] : first[i + 1]].long()
            latent, rope = (x[own].flatten(0, 1)[:length] for x in (ckv_cache, kpe_cache))
            query, key = torch.cat([q_nope[rows], q_pe[rows]], -1), torch.cat([latent, rope], -1)
            part, part_lse = attend(query, key, latent, scale, -5e4 * math.log(2))
            out[rows], lse[rows] = part, part_lse.T / math.log(2)
        return out, lse


def test_flashinfer(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    install(monkeypatch, "flashinfer")
    install(monkeypatch, "flashinfer.mla")
    sys.modules["flashinfer.mla"].BatchMLAPagedAttentionWrapper = StandInFlashInfer
    flashinfer.wrapper.cache_clear()
    for case in (UNIFORM, RAGGED, replace(UNIFORM, q_lens=(), kv_lens=())):
        assert verdicts(flashinfer.BACKEND, replace(case, seed=seed)) == {}
    flashinfer.wrapper.cache_clear()


@pytest.mark.parametrize("wrong", ["scale", "order", "layout", "infinity"])
def test_a_wrong_conversion_is_caught(wrong: str, stand_in_flash_mla: None, seed: int) -> None:
    def fn(*args):
        inputs = problem(UNIFORM.problem).inputs(*args)
        if wrong == "scale":
            inputs = inputs._replace(softmax_scale=576**-0.5)
        if wrong == "order":
            inputs = inputs._replace(ql_nope=inputs.ql_nope.roll(64, -1))
        out, lse = flash_mla.BACKEND.fn(*inputs)
        if wrong == "layout":
            lse = lse.reshape(3, 3, 2).transpose(1, 2).reshape(6, 3)
        if wrong == "infinity":
            lse = lse.masked_fill(lse == -torch.inf, torch.inf)
        return out, lse

    (lse,) = judge(replace(flash_mla.BACKEND, fn=fn, requires=available), UNIFORM, oracles=["lse"])
    assert lse.status == FAIL


@pytest.mark.parametrize(
    ("backend", "case", "reason"),
    [
        (flash_mla.BACKEND, RAGGED, "one positive length"),
        (flash_mla.BACKEND, replace(UNIFORM, q_lens=(0,) * len(UNIFORM.q_lens)), "one positive length"),
        (flash_mla.BACKEND, replace(UNIFORM, block_size=16), "takes 64"),
        (flash_mla.BACKEND, replace(UNIFORM, cache_format="fp8_e4m3"), "bf16 or fp16 throughout"),
        (flash_mla.BACKEND, replace(UNIFORM, layout=CacheLayout(offset=2)), "offset of 2 bytes"),
        (flash_mla.BACKEND, replace(UNIFORM, config=replace(CONFIG, qk_rope_head_dim=32)), "r=32"),
        (flashinfer.BACKEND, replace(UNIFORM, dtype="float16", cache_format="fp16"), "bfloat16 alone"),
        (flashinfer.BACKEND, replace(UNIFORM, layout=CacheLayout(offset=2)), "offset of 2 bytes"),
        (flashinfer.BACKEND, replace(UNIFORM, config=replace(CONFIG, kv_lora_rank=256)), "c=256"),
        (
            flash_attn_3_varlen.BACKEND,
            replace(EXPANDED, config=replace(CONFIG, v_head_dim=64)),
            "x=192, v=64",
        ),
        (flash_attn_3_varlen.BACKEND, replace(EXPANDED, dtype="float32"), "float32 queries"),
        (flash_attn_3_varlen.BACKEND, replace(EXPANDED, q_lens=(), kv_lens=()), "without requests"),
        (flash_attn_2.BACKEND, replace(EXPANDED, config=replace(CONFIG, v_head_dim=200)), "x=192, v=200"),
        (
            flash_attn_2.BACKEND,
            replace(EXPANDED, config=replace(CONFIG, qk_nope_head_dim=200)),
            "x=264, v=128",
        ),
        (flash_attn_2.BACKEND, replace(EXPANDED, dtype="float32"), "float32 queries"),
        (flash_attn_2.BACKEND, replace(EXPANDED, q_lens=(), kv_lens=()), "without requests"),
        (flash_attn_4.BACKEND, replace(EXPANDED, config=replace(CONFIG, v_head_dim=264)), "x=192, v=264"),
        (flash_attn_4.BACKEND, replace(EXPANDED, dtype="float32"), "float32 queries"),
        (flash_attn_4.BACKEND, replace(EXPANDED, q_lens=(), kv_lens=()), "without requests"),
        (sdpa_cudnn.BACKEND, replace(EXPANDED, config=replace(CONFIG, v_head_dim=264)), "x=192, v=264"),
        (sdpa_cudnn.BACKEND, replace(EXPANDED, config=replace(CONFIG, qk_nope_head_dim=124)), "x=188, v=128"),
        (sdpa_cudnn.BACKEND, replace(EXPANDED, dtype="float32"), "float32 queries"),
        (sdpa_cudnn.BACKEND, replace(EXPANDED, q_lens=(), kv_lens=()), "without requests"),
        (flash_attn_3.BACKEND, replace(UNIFORM, config=replace(CONFIG, qk_rope_head_dim=0)), "r=0"),
        (flash_attn_3.BACKEND, replace(UNIFORM, dtype="float32"), "float32 queries"),
        (flash_attn_3.BACKEND, replace(UNIFORM, dtype="float16", cache_format="fp16"), "without float16"),
    ],
)
def test_unsupported_says_why(backend: Backend, case: Case, reason: str) -> None:
    assert reason in (backend.supports(case) or "")
    assert {v.status for v in judge(replace(backend, requires=available), case)} == {UNSUPPORTED}


class Broken(MetaPathFinder, Loader):
    """Finds what is named, and raises where it is loaded; the libraries that are not named are not there."""

    def __init__(self, names: dict[str, BaseException | None]) -> None:
        self.names = names

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        if name in self.names:
            return ModuleSpec(name, self, is_package=True)
        if name.partition(".")[0] in LIBRARIES:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        if (error := self.names[module.__name__]) is not None:
            raise error


LIBRARIES = (
    "triton",
    "flash_mla",
    "flash_attn",
    "flash_attn_interface",
    "fa3_fwd_interface",
    "flashinfer",
    "transformers",
)
FA2, FA3 = flash_attn_2.MODULE, flash_attn_3.CONTIGUOUS
# An adapter, and what it imports, outermost first.
IMPORTS = (
    (flash_mla, ("flash_mla",)),
    (flashinfer, ("flashinfer", "flashinfer.mla")),
    (flash_attn_2, ("flash_attn", FA2)),
    (flash_attn_4, ("flash_attn", "flash_attn.cute")),
    (flash_attn_3, (FA3,)),
    (flash_attn_3, (flash_attn_3.PAGED,)),
    (flash_attn_3_paged, (FA3,)),
    (flash_attn_3_varlen, (FA3,)),
    (transformers_layer, ("transformers",)),
)
# So do the kernels of this package.
KERNELS = (
    (triton_decode, ("triton",)),
    (gluon_decode, tuple(accumulate(gluon_decode.GLUON.split("."), "{}.{}".format))),
)
Give = Callable[[dict[str, BaseException | None]], None]


@pytest.fixture
def give(monkeypatch: pytest.MonkeyPatch) -> Iterator[Give]:
    """On a Hopper GPU with these libraries alone: name -> what its import raises, or None."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    imported = dict(sys.modules)

    def forget() -> None:
        for name in [n for n in sys.modules if n.partition(".")[0] in LIBRARIES]:
            del sys.modules[name]

    def so(names: dict[str, BaseException | None]) -> None:
        forget()
        monkeypatch.setattr(sys, "meta_path", [Broken(names), *sys.meta_path])

    yield so
    forget()
    sys.modules.update(imported)


@pytest.mark.parametrize(("module", "names"), IMPORTS + KERNELS)
@pytest.mark.parametrize(
    "error",
    [
        ImportError("libcuda.so.1: cannot open shared object file\nand more"),
        ModuleNotFoundError("No module named 'einops'", name="einops"),
        OSError("undefined symbol"),
        AttributeError("module 'torch' has no attribute 'nowhere'"),
        RuntimeError(),
        SystemExit(1),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_library_that_does_not_load_is_a_reason(
    module: ModuleType, names: tuple[str, ...], error: BaseException, give: Give
) -> None:
    told = f"does not load: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
    for i in range(len(names)):
        give(dict.fromkeys(names[:i]) | {names[i]: error})
        assert (unwrap(module.BACKEND.requires)("cuda") or "").endswith(told)


@pytest.mark.parametrize(("module", "names"), IMPORTS + KERNELS)
def test_a_library_that_is_not_there_is_a_reason(
    module: ModuleType, names: tuple[str, ...], give: Give
) -> None:
    give({})
    assert (unwrap(module.BACKEND.requires)("cuda") or "").endswith(" installed")


@pytest.mark.parametrize(("module", "names"), IMPORTS)
def test_a_library_of_another_version_is_a_reason(
    module: ModuleType, names: tuple[str, ...], give: Give
) -> None:
    give(dict.fromkeys(names))
    assert f"{names[-1]} has no " in (module.BACKEND.requires("cuda") or "")


@pytest.mark.parametrize(
    ("module", "least", "most"),
    [
        (flash_attn_2, (8, 0), None),
        (flash_attn_3, (9, 0), (9, 0)),
        (flash_attn_4, (9, 0), (9, 0)),
        (flash_mla, (9, 0), (9, 0)),
        (triton_decode, (8, 0), None),
        (gluon_decode, (9, 0), (9, 0)),
        (sdpa_cudnn, (8, 0), None),
    ],
)
def test_a_gpu_of_another_capability_is_a_reason(
    module: ModuleType,
    least: tuple[int, int],
    most: tuple[int, int] | None,
    give: Give,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    give({"triton": None})
    named = f"compute capability {least[0]}.{least[1]}"
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    for capability in ((7, 5), (8, 0), (8, 9), (9, 0), (10, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda here=capability: here)
        enough = capability >= least and (most is None or capability <= most)
        assert (named in (unwrap(module.BACKEND.requires)("cuda") or "")) is not enough


def test_the_cudnn_of_torch_is_asked_for(give: Give, monkeypatch: pytest.MonkeyPatch) -> None:
    def another() -> int:
        raise RuntimeError("cuDNN version incompatibility: compiled against (9, 19, 0)\nbut found (8, 9, 2)")

    for version, reason in (
        (lambda: 91900, None),
        (lambda: None, "torch was built without cuDNN"),
        (
            another,
            "cuDNN does not load: RuntimeError: cuDNN version incompatibility: compiled against (9, 19, 0)",
        ),
    ):
        monkeypatch.setattr(torch.backends.cudnn, "version", version)
        assert sdpa_cudnn.requires("cuda") == reason
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    assert "8.0" in (sdpa_cudnn.requires("cuda") or "")


def test_torchs_own_flash_attention_is_one(give: Give, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for where the package is not there, and not where another one of its name is."""
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    for names in ({}, {"flash_attn": None}):
        give(names)
        assert flash_attn_2.requires("cuda") is None
    give({"flash_attn": OSError("broken")})
    assert "does not load" in (flash_attn_2.requires("cuda") or "")


LAYERS = ("deepseek-v3", "deepseek-v2-lite", "moonlight-16b-a3b", "minicpm3-4b", "glm-4.7-flash")


def layer_case(name: str, seed: int, **changes: object) -> Case:
    """A model's layer with few heads and narrow projections, its latent and scales untouched."""
    config = preset(name)
    config = replace(config, num_heads=2, hidden_size=72, q_lora_rank=config.q_lora_rank and 56)
    case = Case(
        problem="layer", config=config, q_lens=(4, 2, 0, 1), kv_lens=(2, 33, 5, 1), dtype="float32",
        cache_format="fp32", block_size=16, seed=seed,
    )  # fmt: skip
    return replace(case, **changes)


@pytest.mark.parametrize("name", LAYERS)
def test_transformers_layer(name: str, seed: int) -> None:
    pytest.importorskip("transformers", reason="judges transformers' own layer")
    verdicts = judge(transformers_layer.BACKEND, layer_case(name, seed))
    assert {v.status for v in verdicts} == {PASS}, [v.detail for v in verdicts if v.status != PASS]


def test_their_layer_is_built_without_memory_or_random_numbers(seed: int) -> None:
    pytest.importorskip("transformers", reason="builds transformers' own layer")
    transformers_layer.modules.cache_clear()
    before = torch.get_rng_state()
    layer, _ = transformers_layer.modules(layer_case("deepseek-v3", seed).config)
    assert all(weight.is_meta for weight in layer.parameters())
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("wrong", ["order", "mask", "context"])
def test_a_wrong_conversion_of_the_layer_is_caught(
    wrong: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers", reason="judges transformers' own layer")
    if wrong == "order":
        monkeypatch.setattr(transformers_layer, "reordered", lambda k_pe, to_theirs, interleaved: k_pe)
    if wrong == "mask":
        causal = transformers_layer.causal_mask
        monkeypatch.setattr(transformers_layer, "causal_mask", lambda *args: torch.ones_like(causal(*args)))
    if wrong == "context":
        gather = transformers_layer.gather
        monkeypatch.setattr(transformers_layer, "gather", lambda *args: gather(*args) * 1.01)
    case = layer_case("deepseek-v3", seed)  # with so few channels that bounds are sharp
    narrow = replace(case.config, kv_lora_rank=24, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16)
    case = replace(case, config=narrow)
    verdicts = judge(transformers_layer.BACKEND, case, oracles=["value", "stored"])
    assert FAIL in {v.status for v in verdicts}


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("deepseek-v3", {"dtype": "bfloat16", "cache_format": "bf16"}, "float32 throughout"),
        ("longcat-flash", {}, "no scales of its latents"),
        ("kimi-linear-48b", {}, "rotates by DeepSeek's own tables"),
    ],
)
def test_the_layer_says_what_it_declines(
    name: str, changes: dict[str, object], reason: str, seed: int
) -> None:
    assert reason in (transformers_layer.supports(layer_case(name, seed, **changes)) or "")
