"""Writing into the cache in plain Triton: judged, and byte for byte what the encoder gives."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from compiling import SHARED_BYTES, by_capability
from triton.runtime import interpreter
from triton.runtime.interpreter import TensorHandle

from mla_fast import _triton_copy_kernels
from mla_fast.triton_cache_write import BACKEND
from mla_ref.cache_write import cache_write
from mla_ref.case import DTYPES, Case
from mla_ref.config import MLAConfig
from mla_ref.formats import cache_format, formats
from mla_ref.layout import CacheLayout
from mla_ref.problems.cache_write import PROBLEM, CacheWriteInputs
from mla_ref.values import bell, integers
from oracles.coverage import draw
from oracles.oracle import private_copy, storage_bytes
from oracles.verdict import PASS, UNSUPPORTED
from oracles.verify import judge

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VARIANTS = {"default": BACKEND.fn, **BACKEND.variants}
FAR = 2**40 // 3 // 4 * 4  # bytes between two blocks


def case_of(**changes: Any) -> Case:
    """New tokens of four requests, one idle, one with more tokens than it has cached."""
    config = MLAConfig(
        name="writes", hidden_size=64, num_heads=2, q_lora_rank=None, kv_lora_rank=256,
        qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16,
    )  # fmt: skip
    return Case(
        **{
            "problem": "cache_write", "config": config, "q_lens": (5, 1, 0, 9), "kv_lens": (21, 1, 7, 6),
            "block_size": 16, "kv_scale": 0.0173, **changes,
        }
    )  # fmt: skip


def stored_bytes(fn: Any, inputs: CacheWriteInputs) -> torch.Tensor:
    private = private_copy(inputs)
    fn(*private)
    return storage_bytes(private.kv_cache)


@pytest.mark.parametrize("fmt", sorted(formats()))
def test_every_claim_about_every_format(fmt: str, seed: int) -> None:
    layout = CacheLayout(entry_align=64, block_gap=128, offset=32)
    verdicts = judge(BACKEND, case_of(cache_format=fmt, layout=layout, seed=seed), device=DEVICE.type)
    assert {v.variant for v in verdicts} == set(VARIANTS)
    assert [f"{v.variant} {v.oracle}: {v.detail}" for v in verdicts if v.status != PASS] == []


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fmt", sorted(formats()))
@pytest.mark.parametrize("variant", VARIANTS)
def test_bytes_are_the_encoders(fmt: str, dtype: str, variant: str, seed: int) -> None:
    for regime in ("tiles", "tiny", "outlier"):
        case = case_of(cache_format=fmt, dtype=dtype, regime=regime, seed=seed, block_size=3)
        inputs = PROBLEM.materialize(case, DEVICE)
        assert torch.equal(stored_bytes(VARIANTS[variant], inputs), stored_bytes(cache_write, inputs))


def test_judged_on_random_cases(seed: int) -> None:
    alone = replace(BACKEND, variants={})
    for i in range(25):
        case = draw("cache_write", seed, i, BACKEND.supports)
        for verdict in judge(alone, case, device=DEVICE.type, oracles=("stored",)):
            assert verdict.status == PASS, f"{verdict.detail} {case.to_json()}"


def entry_of(x: torch.Tensor, fmt: str, c: int, scale: float = 1.0) -> CacheWriteInputs:
    """A cache of as many slots as there are rows of c channels in ``x``, all of them written."""
    kv_c = x.reshape(-1, c)
    t, layout = len(kv_c), cache_format(fmt)
    return CacheWriteInputs(
        kv_c=kv_c.to(DEVICE),
        k_pe=kv_c[:, :8].to(DEVICE),
        kv_cache=torch.zeros(t, 1, layout.entry_width(c, 8), dtype=layout.dtype, device=DEVICE),
        slot_mapping=torch.arange(t, device=DEVICE),
        cache_format=layout,
        kv_scale=torch.tensor(scale, device=DEVICE),
    )


def near_every_code() -> torch.Tensor:
    """Every finite e4m3 value and every midpoint, what lies next to each in float32, and what is beyond."""
    codes = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middles = torch.cat([(codes[1:] + codes[:-1]) / 2.0, torch.tensor([464.0, 2.0**-10])])
    exact = torch.cat([codes, middles])
    size = torch.cat([exact, exact.nextafter(torch.tensor(torch.inf)), exact.nextafter(torch.tensor(0.0))])
    beyond = torch.tensor([1e-45, 1e-38, 480.0, 1e6, 3e38, torch.inf])
    size = torch.cat([size, beyond])
    return torch.cat([size, -size])


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("scale", [1.0, 0.0173, 2.0**-140, 3.0e38])
def test_every_code_and_every_tie(variant: str, scale: float) -> None:
    x = near_every_code() * scale
    x = torch.cat([x, torch.full((-len(x) % 16,), torch.nan)])
    inputs = entry_of(x, "fp8_e4m3", 16, scale)
    assert torch.equal(stored_bytes(VARIANTS[variant], inputs), stored_bytes(cache_write, inputs))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("fmt", ["fp8_ds_mla", "fp8_ds_mla_pow2"])
def test_scales_of_tiles_of_any_size(variant: str, fmt: str) -> None:
    """Tiles whose largest magnitude runs through every binade, next to a power of two, and 0 and infinity."""
    powers = torch.exp2(torch.arange(-149.0, 128.0))
    above = powers.nextafter(torch.tensor(torch.inf))
    tops = torch.cat([powers * 448.0, powers, above, torch.tensor([0.0, torch.inf])])
    inputs = entry_of(tops[:, None] * torch.linspace(-1.0, 1.0, 128), fmt, 128)
    assert torch.equal(stored_bytes(VARIANTS[variant], inputs), stored_bytes(cache_write, inputs))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("fmt", sorted(formats()))
def test_a_nan_stays_one_and_spoils_no_other_channel(variant: str, fmt: str) -> None:
    x = torch.linspace(-3.0, 5.0, 256)
    x[[3, 200]] = torch.nan
    inputs = entry_of(x, fmt, 256, 0.0173)
    stored = VARIANTS[variant](*private_copy(inputs)).kv_cache, cache_write(*private_copy(inputs)).kv_cache
    got, want = (inputs.cache_format.decode(y[0], 256, 8, inputs.kv_scale, torch.float32) for y in stored)
    for part, expected in zip(got, want, strict=True):
        assert part.isnan().any()
        assert torch.equal(part.nan_to_num(nan=9e9), expected.nan_to_num(nan=9e9))


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The arithmetic of a GPU: the interpreter's multiply-add, rounded once, and no division in its place."""
    if DEVICE.type == "cuda":
        return
    wide = np.longdouble  # a product of two float32 is exact in it, and a sum with a third is next to it

    def fma(self: object, x: Any, y: Any, z: Any) -> Any:
        total = x.data.astype(wide) * y.data.astype(wide) + z.data.astype(wide)
        return TensorHandle(total.astype(np.float32), z.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_fma", fma)
    monkeypatch.setattr(_triton_copy_kernels, "INTERPRETED", tl.constexpr(False))


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """What each interpreted program found of its tiles: whether all of them are ordinary."""
    answers: list[bool] = []
    asked = _triton_copy_kernels._ordinary

    def ordinary(largest: Any) -> Any:
        answers.append(bool(asked(largest)))
        return answers[-1]

    monkeypatch.setattr(_triton_copy_kernels, "_ordinary", ordinary)
    return answers


on_the_host = pytest.mark.skipif(
    DEVICE.type == "cuda", reason="a compiled kernel does not say where it branched"
)


@on_the_host
@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("fmt", ["fp8_ds_mla", "fp8_ds_mla_pow2"])
@pytest.mark.parametrize("exponent", [-50, 66])
def test_where_tiles_begin_and_cease_to_be_ordinary(fmt: str, exponent: int, seen: list[bool]) -> None:
    edge, beyond = torch.tensor(2.0**exponent), torch.tensor(0.0 if exponent < 0 else torch.inf)
    for top in (edge, edge.nextafter(beyond)):
        inputs = entry_of(
            torch.stack([top, torch.tensor(3.0)])[:, None] * torch.linspace(-1.0, 1.0, 128), fmt, 128
        )
        assert torch.equal(stored_bytes(BACKEND.fn, inputs), stored_bytes(cache_write, inputs))
    assert seen == [True, False]


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("fmt", ["fp8_ds_mla", "fp8_ds_mla_pow2"])
@pytest.mark.parametrize("exponent", [-50, 0, 66])
def test_the_smallest_channels_of_ordinary_tiles(
    fmt: str, exponent: int, seed: int, seen: list[bool]
) -> None:
    """Quotients down to where the least code, remainders, and products with a reciprocal underflow."""
    x = bell(seed, "small", 64, 128) * torch.exp2(-integers(seed, "depth", 90, 64, 128))
    x[:, ::9] *= 0.0
    x[:, 0] = 1.0
    inputs = entry_of(x.clamp(-1.0, 1.0) * 2.0**exponent, fmt, 128)
    assert torch.equal(stored_bytes(BACKEND.fn, inputs), stored_bytes(cache_write, inputs))
    assert seen == [True] or DEVICE.type == "cuda"


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("scale", [1.0, 0.0173, 447.99997, 2.0**-140, 2.0**-120, 3.0e38])
def test_quotients_of_the_tensor_are_those_of_a_division(scale: float) -> None:
    test_every_code_and_every_tie("default", scale)


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_quotients_of_tiles_are_those_of_a_division(dtype: torch.dtype, seed: int, seen: list[bool]) -> None:
    """Random channels of tiles of every magnitude, and channels that are a tie of their tile's scale."""
    test_scales_of_tiles_of_any_size("default", "fp8_ds_mla")
    x = bell(seed, "tiles", 600, 128).to(dtype)
    x[:300] *= torch.exp2(integers(seed, "binades", 200, 300, 1) - 100.0).to(dtype)
    scale = x.abs().amax(-1, keepdim=True).float() / 448.0
    ties = (near_every_code()[:120] * scale).to(dtype)
    x[:, 4:124] = torch.where(ties.abs() <= x.abs().amax(-1, keepdim=True), ties, x[:, 4:124])
    for part in (x[:300], x[300:]):
        inputs = entry_of(part, "fp8_ds_mla", 128)
        assert torch.equal(stored_bytes(BACKEND.fn, inputs), stored_bytes(cache_write, inputs))
    assert seen[-2:] == [False, True] or DEVICE.type == "cuda"


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("path", ["ordinary", pytest.param("any", marks=on_the_host)])
@pytest.mark.parametrize(("dtype", "binades"), [(torch.bfloat16, 20), (torch.float16, 2)])
def test_quotients_of_all_mantissas(
    dtype: torch.dtype, binades: int, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every mantissa of a channel under every mantissa of its tile's largest."""
    if path == "any":
        monkeypatch.setattr(_triton_copy_kernels, "_ordinary", lambda largest: False)
    steps = round(1.0 / torch.finfo(dtype).eps)
    mantissa = 1.0 + torch.arange(steps) / steps
    binade = torch.exp2(-torch.arange(0.0, binades))
    for tops in mantissa.split(128):
        x = (mantissa * binade[:, None]).flatten().expand(len(tops), -1).reshape(len(tops), -1, steps)
        tiles = torch.cat([x[..., i : i + 127] for i in range(0, steps, 127)], -1)
        tiles = torch.nn.functional.pad(tiles, (0, -tiles.shape[-1] % 127)).reshape(-1, 127)
        top = (2.0 * tops).repeat_interleave(len(tiles) // len(tops))
        inputs = entry_of(torch.cat([top[:, None], tiles], -1).to(dtype), "fp8_ds_mla", 128)
        assert torch.equal(stored_bytes(BACKEND.fn, inputs), stored_bytes(cache_write, inputs))


def test_a_448th_is_a_product_and_its_remainder() -> None:
    """Of every mantissa: what the last multiply-add rounds is no tie, and becomes what the division does."""
    top = (0x3F800000 + torch.arange(2**23, dtype=torch.int32)).view(torch.float32)
    inverse = _triton_copy_kernels.OVER_448.value
    product = top * torch.tensor(inverse)
    remainder = top.double() - 448.0 * product.double()
    assert torch.equal(remainder, remainder.float().double())
    total = product.double() + remainder * inverse
    assert torch.equal(total.float(), top / 448.0)
    assert ((total.view(torch.int64) & (2**29 - 1)) != 2**28).all()


def test_no_quotient_of_16_bits_is_near_a_change_of_its_code() -> None:
    """S · 2ⁱ the scale's 24 bits, X the channel's 11, M the 25 bits where rounding to a tie of codes begins.

    X / S is within 2⁻⁴⁴ of such an M only if M · S is within 64 of a multiple of 2³⁷. One S is, all ones,
    and that is no 448th: it would take an A with A · 2ⁱ within 3.5 of 7 · (2²⁴ - 1).
    """
    near = set()
    for tie in range(1, 32, 2):
        shift = 25 - tie.bit_length()
        for boundary in (tie * 2**shift - 1, tie * 2**shift + 1, tie * 2 ** (shift + 1) - 1):
            inverse = pow(boundary, -1, 2**37)
            found = ((t * inverse) % 2**37 for t in range(-64, 65))
            near |= {scale for scale in found if 2**23 <= scale < 2**24}
    assert near == {2**24 - 1}
    multiple = 2 ** ((7 * (2**24 - 1)).bit_length() - 11)
    assert min(-(7 * (2**24 - 1)) % multiple, (7 * (2**24 - 1)) % multiple) > 4


@pytest.mark.parametrize("fmt", ["bf16", "fp8_ds_mla"])
def test_slots_beyond_32_bits(fmt: str, tmp_path: Path) -> None:
    """Three blocks, a third of a terabyte apart, in a file with holes."""
    if DEVICE.type != "cpu":
        pytest.skip("the file is memory of the host")
    case = case_of(cache_format=fmt, q_lens=(9,), kv_lens=(11,), block_size=4)
    inputs = PROBLEM.materialize(case, DEVICE)
    n, k, e = inputs.kv_cache.shape
    size = inputs.kv_cache.element_size()
    pool = torch.from_file(str(tmp_path / "pool"), shared=True, size=n * FAR, dtype=torch.uint8)
    far = pool.view(inputs.kv_cache.dtype).as_strided((n, k, e), (FAR // size, e, 1))
    far.copy_(inputs.kv_cache)
    BACKEND.fn(*inputs._replace(kv_cache=far))
    cache_write(*inputs)
    assert torch.equal(far.view(torch.uint8), inputs.kv_cache.view(torch.uint8))


def test_channels_of_any_stride(seed: int) -> None:
    inputs = PROBLEM.materialize(case_of(cache_format="fp8_ds_mla", seed=seed), DEVICE)
    want = stored_bytes(BACKEND.fn, inputs)
    turned = inputs._replace(kv_c=inputs.kv_c.T.contiguous().T, k_pe=inputs.k_pe.T.contiguous().T)
    assert torch.equal(stored_bytes(BACKEND.fn, turned), want)


def test_unaligned_scales_are_declined() -> None:
    case = case_of(cache_format="fp8_ds_mla", layout=CacheLayout(offset=2))
    assert {v.status for v in judge(BACKEND, case, device=DEVICE.type)} == {UNSUPPORTED}
    assert BACKEND.supports(case) == "the offset of 2 bytes is no multiple of 4"
    with pytest.raises(ValueError, match=r"address is \d+ bytes, must be a multiple of 4"):
        BACKEND.fn(*PROBLEM.materialize(case, DEVICE))


def test_no_tokens_at_all() -> None:
    inputs = PROBLEM.materialize(case_of(q_lens=(0,), kv_lens=(3,)), DEVICE)
    before = inputs.kv_cache.clone()
    assert BACKEND.fn(*inputs).kv_cache is inputs.kv_cache
    assert torch.equal(inputs.kv_cache.view(torch.uint8), before.view(torch.uint8))


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    return by_capability("compiled_copy_kernels", tmp_path_factory.mktemp("triton"))


@pytest.mark.parametrize("capability", SHARED_BYTES)
def test_copying_kernels_compile_without_spilling(
    capability: int, compiled: dict[int, list[dict[str, Any]]]
) -> None:
    """And with accesses of 16 bytes: every one but the scales, slots and rope of few rows at 512 channels.

    Which product of a rotation is rounded is said: the compiler chose by the alignment of the cache, so that
    queries of float64 depended on its layout.
    """
    kernels = compiled[capability]
    assert len(kernels) == 21
    for kernel in kernels:
        assert kernel["STACK"] == 0, kernel
        assert kernel["shared"] <= SHARED_BYTES[capability], kernel
        assert kernel["rounded_either_way"] == 0 or kernel["case"][0] != "rope_cache_write", kernel
        if kernel["case"][3] == 512:
            for kind in ("loads", "stores"):
                assert "16" in kernel[kind], kernel
                assert kernel[kind].get("1", 0) == 0, kernel
