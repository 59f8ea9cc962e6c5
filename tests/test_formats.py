"""Cache formats against bytes worked out by hand, and the rounding of each element against its neighbours."""

import math
import struct

import pytest
import torch

from mla_ref.formats import CacheFormat, cache_format, formats
from mla_ref.values import bell, integers

NAN = float("nan")
INF = float("inf")
NO_SCALE = torch.tensor(NAN)
FORMATS = pytest.mark.parametrize("fmt", formats().values(), ids=str)
TILED = [fmt for fmt in formats().values() if fmt.dtype == torch.uint8]
PLAIN = [fmt for fmt in formats().values() if fmt.dtype.itemsize > 1]
C, R = 256, 64


def scale_for(fmt: CacheFormat, value: float = 1.0) -> torch.Tensor:
    return torch.tensor(value) if fmt.per_tensor_scale else NO_SCALE


def written(name: str, latent: list[float], rope: list[float], scale: torch.Tensor = NO_SCALE) -> str:
    """The bytes of one entry, in hex, in address order."""
    entry = cache_format(name).encode(torch.tensor([latent]), torch.tensor([rope]), scale)
    return bytes(entry.view(torch.uint8).flatten().tolist()).hex(" ")


def tile(*head: float) -> list[float]:
    """A tile of 128 channels that starts with ``head`` and goes on with zeros."""
    return [*head, *[0.0] * (128 - len(head))]


def same_bits(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Equal as numbers, with -0 apart from 0 and NaN equal to any NaN."""
    nan = want.isnan()
    return (
        got.dtype == want.dtype
        and torch.equal(got.isnan(), nan)
        and torch.equal(got[~nan], want[~nan])
        and torch.equal(got[~nan].signbit(), want[~nan].signbit())
    )


def e4m3_value(code: int) -> float:
    """The number that a code stands for, by the definition of the type."""
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = code >> 3 & 0xF, code & 7
    if exponent == 15 and mantissa == 7:
        return NAN
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


E4M3_TABLE = torch.tensor([e4m3_value(code) for code in range(256)], dtype=torch.float64)

# Code 0x38 is exponent 7 (bias 7), mantissa 0: 1. Codes step by 1/8 within a binade, by 2⁻⁹ below 2⁻⁶.
E4M3_GOLDEN = [
    (0.0, 0x00),
    (-0.0, 0x80),
    (1.0, 0x38),
    (-1.0, 0xB8),
    (1.5, 0x3C),  # mantissa 4/8
    (0.3125, 0x2A),  # 1.25 · 2⁻²: exponent 5, mantissa 2
    (448.0, 0x7E),  # 1.75 · 2⁸: exponent 15, mantissa 6
    (2.0**-6, 0x08),  # smallest normal
    (7 * 2.0**-9, 0x07),  # largest subnormal
    (2.0**-9, 0x01),  # smallest subnormal
    (1.0625, 0x38),  # halfway from 0x38 to 0x39
    (1.1875, 0x3A),  # halfway from 0x39 to 0x3a
    (2.0**-10, 0x00),  # halfway from 0x00 to 0x01
    (3 * 2.0**-10, 0x02),  # halfway from 0x01 to 0x02
    (7.5 * 2.0**-9, 0x08),  # halfway from the largest subnormal to the smallest normal
    (464.0, 0x7E),  # halfway to the 480 that would be next, were 0x7f not NaN
    (1e6, 0x7E),
    (-1e6, 0xFE),
    (INF, 0x7E),
    (-INF, 0xFE),
    (NAN, 0x7F),
]


@pytest.mark.parametrize(("value", "code"), E4M3_GOLDEN)
def test_e4m3_golden_code(value: float, code: int) -> None:
    one = torch.tensor(1.0)
    assert written("fp8_e4m3", [value], [value], one) == f"{code:02x} {code:02x}"


def test_e4m3_divides_by_the_scale() -> None:
    # 3 / 2 = 1.5 and 0.5 / 2 = 0.25 (exponent 5); 3 / 0.5 = 6 (exponent 9, mantissa 4), 0.5 / 0.5 = 1.
    assert written("fp8_e4m3", [3.0], [0.5], torch.tensor(2.0)) == "3c 28"
    assert written("fp8_e4m3", [3.0], [0.5], torch.tensor(0.5)) == "4c 38"


def test_e4m3_divides_where_a_reciprocal_would_round_twice() -> None:
    # 10.9375 / 7 = 1.5625, halfway from 3c to 3d; float32(1/7) is too large and would give 3d.
    assert written("fp8_e4m3", [10.9375], [-10.9375], torch.tensor(7.0)) == "3c bc"


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_e4m3_rounds_to_nearest_even_at_every_decision_point(sign: float) -> None:
    fmt, one = cache_format("fp8_e4m3"), torch.tensor(1.0)
    low, high = E4M3_TABLE[:0x7E].float(), E4M3_TABLE[1:0x7F].float()
    code = torch.arange(0x7E)
    middle = (low + high) / 2  # exact: five bits
    offset = 0 if sign > 0 else 0x80
    for value, want in (
        (middle, code + code % 2),
        (torch.nextafter(middle, low), code),
        (torch.nextafter(middle, high), code + 1),
    ):
        got = fmt.encode(sign * value, torch.empty(0), one).view(torch.uint8).long()
        assert torch.equal(got, want + offset)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1.0, 0.75, 3.0])
def test_every_e4m3_code_decodes(dtype: torch.dtype, scale: float) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    kv_c, k_pe = cache_format("fp8_e4m3").decode(codes, 192, 64, torch.tensor(scale), dtype)
    want = (E4M3_TABLE * scale).to(dtype)  # four bits times two: exact in every one of these types
    assert same_bits(torch.cat([kv_c, k_pe]), want)


@pytest.mark.parametrize("fmt", TILED, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_every_e4m3_code_decodes_in_tiles(fmt: CacheFormat, dtype: torch.dtype) -> None:
    scales = struct.pack("<2f", 0.75, 3.0)
    entry = torch.tensor([*range(256), *scales], dtype=torch.uint8)
    kv_c, k_pe = fmt.decode(entry, 256, 0, NO_SCALE, dtype)
    want = torch.cat([E4M3_TABLE[:128] * 0.75, E4M3_TABLE[128:] * 3.0]).to(dtype)
    assert same_bits(kv_c, want)
    assert k_pe.shape == (0,)


def test_plain_golden_bytes() -> None:
    # Sign, exponent, mantissa: bf16 1|8|7, fp16 1|5|10, fp32 1|8|23; the low byte comes first.
    assert written("bf16", [1.0, -2.0], [0.5]) == "80 3f 00 c0 00 3f"
    assert written("fp16", [1.0, -2.0], [0.5]) == "00 3c 00 c0 00 38"
    assert written("fp32", [1.0, -2.0], [0.5]) == "00 00 80 3f 00 00 00 c0 00 00 00 3f"


def test_plain_ties_go_to_even() -> None:
    # bf16 steps by 2⁻⁷ above 1: 1 + 2⁻⁸ lies between 3f80 and 3f81, 1 + 3·2⁻⁸ between 3f81 and 3f82.
    assert written("bf16", [1 + 2.0**-8, 1 + 3 * 2.0**-8], []) == "80 3f 82 3f"
    assert written("fp16", [1 + 2.0**-11, 1 + 3 * 2.0**-11], []) == "00 3c 02 3c"


def test_plain_saturates() -> None:
    # The largest finite numbers: bf16 7f7f, fp16 7bff, fp32 7f7fffff.
    assert written("bf16", [INF, -INF, 3.4e38], []) == "7f 7f 7f ff 7f 7f"
    assert written("fp16", [1e6, -1e6], [65520.0]) == "ff 7b ff fb ff 7b"
    assert written("fp32", [INF, -INF], []) == "ff ff 7f 7f ff ff 7f ff"


def test_fp16_saturates_for_inputs_that_cannot_hold_its_limit() -> None:
    kv_c = torch.tensor([65536.0, INF], dtype=torch.bfloat16)
    entry = cache_format("fp16").encode(kv_c, kv_c[:0], NO_SCALE)
    assert entry.tolist() == [65504.0, 65504.0]


def test_tiles_golden_entry() -> None:
    # amax 336: 336 / 448 = 0.75, so 336 → 448 (7e), 0.75 → 1 (38), -1.5 → -2 (c0), zeros stay.
    # 0.75 = 1.1b · 2⁻¹: exponent 126, 3f40 0000. Rope 1 and -2 in bf16.
    latent = tile(336.0, 0.75, -1.5)
    zeros = " ".join(["00"] * 125)
    assert written("fp8_ds_mla", latent, [1.0, -2.0]) == f"7e 38 c0 {zeros} 00 00 40 3f 80 3f 00 c0"
    # The power of two above 0.75 is 1: 336 is halfway from 320 (7a) to 352 (7b), 0.75 is 34, -1.5 is bc.
    assert written("fp8_ds_mla_pow2", latent, [1.0, -2.0]) == f"7a 34 bc {zeros} 00 00 80 3f 80 3f 00 c0"


@pytest.mark.parametrize(
    ("amax", "exact", "pow2"),
    [
        (448.0, "00 00 80 3f", "00 00 80 3f"),  # 1 in both: the boundary itself
        (224.0, "00 00 00 3f", "00 00 00 3f"),  # 2⁻¹
        (450.0, "49 92 80 3f", "00 00 00 40"),  # 1 + 1/224: mantissa round(2²³ / 224) = 9249; 2
        (448.0 + 2.0**-15, "01 00 80 3f", "00 00 00 40"),  # the next float32: the least mantissa; 2
        (447.75, "6e db 7f 3f", "00 00 80 3f"),  # 1 - 1/1792: round(2²⁴ - 2²⁴ / 1792) = ffdb6e, below 1; 1
        (448.0 * 2**-13, "00 00 00 39", "00 00 00 39"),  # 2⁻¹³, exponent 114: where the floor starts
        (448.0 * 2**-14, "00 00 80 38", "00 00 00 39"),  # 2⁻¹⁴ against the floor
        (0.0, "00 00 80 00", "00 00 00 39"),  # the floors: 2⁻¹²⁶, exponent 1, and 2⁻¹³
    ],
)
def test_tile_scale_bytes(amax: float, exact: str, pow2: str) -> None:
    for name, want in (("fp8_ds_mla", exact), ("fp8_ds_mla_pow2", pow2)):
        got = written(name, tile(0.0, -amax), []).split()
        assert " ".join(got[128:]) == want
        assert got[0] == "00"


@pytest.mark.parametrize("fmt", TILED, ids=str)
def test_tile_layout_at_deepseek_dims(fmt: CacheFormat) -> None:
    # Tile i has amax 448 · 2^i at its last channel, so its scale is 2^i (3f80, 4000, 4080, 4100).
    latent = torch.zeros(512)
    latent[127::128] = torch.tensor([448.0, 896.0, 1792.0, 3584.0])
    rope = torch.zeros(64)
    rope[0], rope[63] = 1.0, -2.0
    entry = fmt.encode(latent, rope, NO_SCALE).tolist()
    assert len(entry) == fmt.entry_bytes(512, 64) == 656
    assert [i for i, byte in enumerate(entry[:512]) if byte] == [127, 255, 383, 511]
    assert bytes(entry[512:528]).hex(" ") == "00 00 80 3f 00 00 00 40 00 00 80 40 00 00 00 41"
    assert bytes(entry[528:530]).hex(" ") == "80 3f"
    assert bytes(entry[654:]).hex(" ") == "00 c0"


@pytest.mark.parametrize("fmt", TILED, ids=str)
def test_a_nan_channel_spoils_only_itself(fmt: CacheFormat) -> None:
    latent = torch.tensor([tile(448.0, NAN, 1.0)])
    kv_c, _ = fmt.decode(fmt.encode(latent, torch.empty(1, 0), NO_SCALE), 128, 0, NO_SCALE, torch.float32)
    assert same_bits(kv_c, latent)


@pytest.mark.parametrize("fmt", TILED, ids=str)
def test_an_infinite_channel_saturates(fmt: CacheFormat) -> None:
    latent = torch.tensor([tile(INF, -INF)])
    kv_c, _ = fmt.decode(fmt.encode(latent, torch.empty(1, 0), NO_SCALE), 128, 0, NO_SCALE, torch.float32)
    assert kv_c.isfinite().all()
    assert kv_c[0, 0] == -kv_c[0, 1] == 2.0**127


@FORMATS
def test_numbers_that_fit_survive(fmt: CacheFormat) -> None:
    # Small integers fit every type; 448 in each tile makes its scale 1.
    kv_c = (torch.arange(3 * C) % 17.0).reshape(3, C) - 8.0
    kv_c[:, ::128] = 448.0
    k_pe = torch.arange(3.0 * R).reshape(3, R) % 16
    for dtype in (torch.float16, torch.float64, torch.bfloat16, torch.float32):
        entries = fmt.encode(kv_c.to(dtype), k_pe.to(dtype), scale_for(fmt))
        assert entries.shape == (3, fmt.entry_width(C, R))
        assert entries.dtype == fmt.dtype
        for got, want in zip(fmt.decode(entries, C, R, scale_for(fmt), dtype), (kv_c, k_pe), strict=True):
            assert same_bits(got, want.to(dtype))


@FORMATS
@pytest.mark.parametrize("shape", [(), (0,), (2, 0), (2, 3)], ids=str)
def test_any_leading_shape_and_no_rope(fmt: CacheFormat, shape: tuple[int, ...]) -> None:
    for r in (R, 0):
        entries = fmt.encode(torch.ones(*shape, C), torch.ones(*shape, r), scale_for(fmt))
        assert entries.shape == (*shape, fmt.entry_width(C, r))
        kv_c, k_pe = fmt.decode(entries, C, r, scale_for(fmt), torch.float32)
        assert (kv_c.shape, k_pe.shape) == ((*shape, C), (*shape, r))


@FORMATS
def test_poison_is_nan(fmt: CacheFormat) -> None:
    poison = torch.full((2, fmt.entry_bytes(C, R)), 0xFF, dtype=torch.uint8).view(fmt.dtype)
    kv_c, k_pe = fmt.decode(poison, C, R, scale_for(fmt), torch.float32)
    assert kv_c.isnan().all()
    assert k_pe.isnan().all()


@FORMATS
def test_quantising_again_changes_nothing(fmt: CacheFormat, seed: int) -> None:
    kv_c, k_pe = latents(seed)
    scale = scale_for(fmt, 0.0371)
    for dtype in (torch.float32, torch.float64):
        once = fmt.decode(fmt.encode(kv_c.to(dtype), k_pe.to(dtype), scale), C, R, scale, dtype)
        twice = fmt.decode(fmt.encode(*once, scale), C, R, scale, dtype)
        for got, want in zip(twice, once, strict=True):
            assert same_bits(got, want)


@FORMATS
def test_latent_error_within_the_roundoff_of_its_tile(fmt: CacheFormat, seed: int) -> None:
    kv_c, k_pe = latents(seed)
    # Powers of two: the largest code times the scale is at least every channel, so none saturates.
    scale = scale_for(fmt, 2.0 ** math.ceil(math.log2(kv_c.abs().max() / 448)))
    got, _ = fmt.decode(fmt.encode(kv_c, k_pe, scale), C, R, scale, torch.float64)
    error = (got - kv_c.double()).abs().unflatten(-1, (-1, 128))
    largest = kv_c.double().abs().unflatten(-1, (-1, 128)).amax((1, 2) if fmt.per_tensor_scale else 2)
    largest = largest.max() if fmt.per_tensor_scale else largest[..., None]
    assert (error <= fmt.latent_roundoff * largest).all()


@pytest.mark.parametrize("fmt", PLAIN, ids=str)
def test_plain_channels_are_the_nearest(fmt: CacheFormat, seed: int) -> None:
    kv_c, k_pe = latents(seed)
    entries = fmt.encode(kv_c, k_pe, NO_SCALE)
    want = torch.cat([kv_c, k_pe], dim=-1).double()
    integer = {2: torch.int16, 4: torch.int32}[fmt.dtype.itemsize]
    error = (entries.double() - want).abs()
    assert error.isfinite().all()
    for step in (-1, 1):  # the next number towards zero (NaN where there is none) and away from it
        neighbour = (entries.view(integer) + step).view(fmt.dtype)
        assert not ((neighbour.double() - want).abs() < error).any()


@pytest.mark.parametrize("fmt", [f for f in formats().values() if f not in PLAIN], ids=str)
def test_fp8_channels_are_the_nearest_to_the_quotient(fmt: CacheFormat, seed: int) -> None:
    kv_c, k_pe = latents(seed)
    scale = scale_for(fmt, 0.0371)
    entries = fmt.encode(kv_c, k_pe, scale)
    raw = entries.view(torch.uint8)
    if fmt in TILED:
        scales = raw[:, C : C + C // 32].clone().view(torch.float32).repeat_interleave(128, dim=1)
        quotient = (kv_c / scales).double()
    else:
        quotient = (kv_c / scale).double()
    finite = E4M3_TABLE[~E4M3_TABLE.isnan()]
    distance = (quotient[..., None] - finite).abs().amin(-1)
    assert torch.equal((quotient - E4M3_TABLE[raw[:, :C].long()]).abs(), distance)


@pytest.mark.parametrize("name", ["fp8_ds_mla", "fp8_ds_mla_pow2"])
def test_tile_scales_follow_their_rule(name: str, seed: int) -> None:
    kv_c, k_pe = latents(seed)
    raw = cache_format(name).encode(kv_c, k_pe, NO_SCALE)
    scales = raw[:, C : C + C // 32].clone().view(torch.float32)
    amax = kv_c.unflatten(-1, (-1, 128)).abs().amax(-1)
    for scale, largest in zip(scales.flatten().tolist(), amax.flatten().tolist(), strict=True):
        if name == "fp8_ds_mla":  # correctly rounded: 448 · scale misses amax by at most half a unit
            unit = math.ldexp(1.0, math.frexp(scale)[1] - 24)
            assert abs(scale * 448 - largest) <= 448 * unit / 2
        else:
            assert math.frexp(scale)[0] == 0.5
            assert scale / 2 < largest / 448 <= scale or scale == 2.0**-13


@pytest.mark.parametrize("fmt", TILED, ids=str)
@pytest.mark.parametrize("offset", [0, 1, 2, 3])
@pytest.mark.parametrize("gap", [0, 1, 6])
def test_tiles_decode_at_any_address(fmt: CacheFormat, offset: int, gap: int, seed: int) -> None:
    kv_c, k_pe = latents(seed)
    entries = fmt.encode(kv_c, k_pe, NO_SCALE)
    n, width = entries.shape
    pool = torch.full((offset + n * (width + gap),), 0xFF, dtype=torch.uint8)
    view = pool.as_strided((n, width), (width + gap, 1), offset)
    view.copy_(entries)
    want = fmt.decode(entries, C, R, NO_SCALE, torch.float32)
    for rows in (slice(None), slice(0, 1), slice(5, 6), slice(1, None, 3)):
        got = fmt.decode(view[rows], C, R, NO_SCALE, torch.float32)
        assert all(same_bits(a, b[rows]) for a, b in zip(got, want, strict=True))
    got = fmt.decode(view[7], C, R, NO_SCALE, torch.float32)
    assert all(same_bits(a, b[7]) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("fmt", TILED, ids=str)
def test_tiles_need_whole_tiles(fmt: CacheFormat) -> None:
    assert fmt.why_not_dims(512, 64) is None
    assert fmt.why_not_dims(320, 64) == f"{fmt.name} needs c to be a multiple of 128, got 320"


def test_bytes_of_a_deepseek_token() -> None:
    assert {name: fmt.entry_bytes(512, 64) for name, fmt in formats().items()} == {
        "bf16": 1152,
        "fp16": 1152,
        "fp32": 2304,
        "fp8_ds_mla": 656,
        "fp8_ds_mla_pow2": 656,
        "fp8_e4m3": 576,
    }


def test_an_unknown_format_is_named() -> None:
    with pytest.raises(ValueError, match=r"cache format 'int4' is not one of bf16, fp16, fp32, fp8_ds_mla"):
        cache_format("int4")


def latents(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """24 tokens whose tiles of 128 channels range over thirty binades, some channels -0."""
    exponent = integers(seed, "exponent", 30, 24, C // 128).double() - 15.0
    kv_c = bell(seed, "kv_c", 24, C) * torch.exp2(exponent).repeat_interleave(128, dim=1)
    kv_c[integers(seed, "zero", 16, 24, C) == 0] = -0.0
    return kv_c.float(), bell(seed, "k_pe", 24, R).float()
