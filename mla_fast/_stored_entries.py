"""A paged cache as plain Triton kernels address it: a typed start for each part of an entry, steps in bytes.

Steps are in bytes for all parts alike: the kernels divide them by the size of what they read, so that a step
known to be a multiple of 16 bytes is one for every type.
"""

import functools
from typing import Any, NamedTuple

import torch

from mla_ref.case import Case
from mla_ref.formats import CacheFormat, cache_format
from mla_ref.formats import fp8_ds_mla as amax_scales
from mla_ref.formats import fp8_ds_mla_pow2 as pow2_scales

TILE = 128  # channels under one scale
SCALE_BYTES = 4  # of a tile's float32 scale, which is read and written at an aligned address


class Scaling(NamedTuple):
    """How codes are scaled: not at all, by one scale for the tensor, or by one for each tile.

    floor, pow2: of a tile's scale when it is written.
    """

    kind: str
    floor: float = 0.0
    pow2: bool = False


SCALINGS = {
    "bf16": Scaling("none"),
    "fp16": Scaling("none"),
    "fp32": Scaling("none"),
    "fp8_e4m3": Scaling("tensor"),
    "fp8_ds_mla": Scaling("tile", amax_scales.FLOOR),
    "fp8_ds_mla_pow2": Scaling("tile", pow2_scales.FLOOR, pow2=True),
}


class Entries(NamedTuple):
    """latent, rope, scales: views [n k …] of the parts of every entry; e4m3 codes are bytes.

    block_bytes, slot_bytes: from one block, and from one slot, to the next.
    """

    latent: torch.Tensor
    rope: torch.Tensor
    scales: torch.Tensor
    block_bytes: int
    slot_bytes: int


class Channels(NamedTuple):
    """The constants of a kernel that handles c + r channels as (tiles, channels of a tile), and r.

    C, R: how many there are. TILES, TILE, R_PADDED: powers of two that hold them.
    """

    C: int
    R: int
    TILES: int
    TILE: int
    R_PADDED: int


def supports(case: Case) -> str | None:
    """Why a case is outside what these kernels address."""
    fmt, config = cache_format(case.cache_format), case.config
    if reason := why_not(fmt):
        return reason
    if SCALINGS[fmt.name].kind == "tile":
        width = fmt.entry_bytes(config.kv_lora_rank, config.qk_rope_head_dim)
        return case.layout.why_not_aligned(width, case.block_size, SCALE_BYTES)
    return None


def why_not(fmt: CacheFormat) -> str | None:
    """Why entries of this format are not addressed."""
    return None if fmt.name in SCALINGS else f"cache format {fmt.name} is not one of {', '.join(SCALINGS)}"


def entries(kv_cache: torch.Tensor, fmt: CacheFormat, c: int, r: int) -> Entries:
    """The parts of a cache [n k e].

    Raises: ValueError on another format, and where the scales of tiles are not aligned.
    """
    if reason := why_not(fmt):
        raise ValueError(reason)
    scaling = SCALINGS[fmt.name].kind
    size = kv_cache.element_size()
    steps = (kv_cache.stride(0) * size, kv_cache.stride(1) * size)
    if scaling == "none":
        return Entries(kv_cache[..., :c], kv_cache[..., c : c + r], kv_cache, *steps)
    codes = kv_cache.view(torch.uint8)
    if scaling == "tensor":
        return Entries(codes[..., :c], codes[..., c : c + r], codes, *steps)
    places = {"address": kv_cache.data_ptr(), "block stride": steps[0], "entry stride": steps[1]}
    for name, step in places.items():
        if step % SCALE_BYTES:
            raise ValueError(f"kv_cache: {name} is {step} bytes, must be a multiple of {SCALE_BYTES}")
    rope = c + SCALE_BYTES * (c // TILE)
    return Entries(
        latent=codes[..., :c],
        rope=codes[..., rope : rope + 2 * r].view(torch.bfloat16),
        scales=codes[..., c:rope].view(torch.float32),
        block_bytes=steps[0],
        slot_bytes=steps[1],
    )


def channels(c: int, r: int, scaling: str) -> Channels:
    """Tiles as they are stored, or one as wide as the latent."""
    tile = TILE if scaling == "tile" else _power_of_two(c)
    return Channels(c, r, _power_of_two(-(-c // tile)), tile, _power_of_two(r))


def constants(widths: Channels, scaling: Scaling, block_size: int, native: bool) -> dict[str, Any]:
    """What a kernel that stores entries is compiled for. native: use instructions for e4m3."""
    return widths._asdict() | {
        "BLOCK_SIZE": block_size,
        "SCALING": scaling.kind,
        "FLOOR": scaling.floor,
        "POW2": scaling.pow2,
        "NATIVE": native,
    }


def _power_of_two(count: int) -> int:
    """The smallest that holds ``count``."""
    return 1 << (max(count, 1) - 1).bit_length()


@functools.cache
def converts_e4m3(device: torch.device) -> bool:
    """Whether the device has instructions from and to e4m3; elsewhere its bits are taken apart."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)
