"""What the launchers of plain Triton share: where they run, how keys are split, and how the parts are merged.

Compiled on CUDA devices of compute capability 8.0 and up; interpreted on the CPU where TRITON_INTERPRET=1 was
set before triton was imported.
"""

import contextlib
import functools
import importlib.metadata
import os
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from mla_fast._installed import found, why_not

LOG2_E = 1.4426950408889634
MAX_SPLITS = 128
MIN_TILES = 2


class Tile(NamedTuple):
    """Query rows and keys of one step, warps that share it, and steps that are loaded ahead.

    scattered: keys of a step where no block holds a whole number of tiles and every key has an address of its
    own, for which there may be no registers; 0: as many.
    """

    rows: int
    keys: int
    warps: int
    stages: int
    scattered: int = 0


class Device(NamedTuple):
    """What the launch needs to know about a device.

    num_units: programs that run at a time. merge_elements: partial results that one merging program holds.
    """

    num_units: int
    merge_elements: int


class Schedule(NamedTuple):
    """How the work is divided, where it is not left to the defaults.

    num_splits: splits of every request's keys, however short; None: by the size of the launch.
    tile: of every launch; None: by the number of rows.
    rows_by_heads: choose the tile for one token's heads, whatever the batch holds.
    """

    num_splits: int | None = None
    tile: Tile | None = None
    rows_by_heads: bool = False


def requires(device: str) -> str | None:
    """What is missing to run on this type of device."""
    if not found("triton"):
        return "triton is not installed"
    interpret = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")
    if device == "cpu":
        if not interpret:
            return "on the CPU triton needs TRITON_INTERPRET=1, set before it is imported"
        return why_not("triton") or _why_not_interpreted()
    if device != "cuda":
        return f"written for cuda, not for {device}"
    if interpret:
        return "TRITON_INTERPRET is set: kernels would be interpreted on the CPU"
    if not torch.cuda.is_available():
        return "no CUDA device"
    capability = torch.cuda.get_device_capability()
    if capability < (8, 0):
        return f"needs compute capability 8.0, this device has {capability}"
    return why_not("triton")


def _why_not_interpreted() -> str | None:
    import triton
    from triton.runtime.interpreter import InterpretedFunction

    numpy = importlib.metadata.version("numpy")
    if not isinstance(triton.language.sum, InterpretedFunction):
        return "triton was imported before TRITON_INTERPRET=1 was set"
    if _version(triton.__version__) < (3, 7) and _version(numpy) >= (2, 4):
        return f"triton {triton.__version__}'s interpreter needs numpy < 2.4, found {numpy}"
    return None


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2])


@functools.cache
def device_of(device: torch.device) -> Device:
    """What is known of a device; the interpreter's programs run one after another."""
    if device.type == "cpu":
        return Device(4, 2**20)
    return Device(torch.cuda.get_device_properties(device).multi_processor_count, 2**13)


def choose_splits(num_programs: int, max_tiles: int, num_units: int) -> int:
    """The fewest splits that keep ``num_units`` about as busy as any number of splits could."""
    limit = min(MAX_SPLITS, max(1, max_tiles // MIN_TILES))
    waves = [num_programs * splits / num_units for splits in range(1, limit + 1)]
    busy = [wave / -(-wave // 1) for wave in waves]
    return next(i for i, share in enumerate(busy, start=1) if share >= 0.9 * max(busy))


@contextlib.contextmanager
def launching(device: torch.device) -> Iterator[None]:
    """Kernels go to ``device``, which need not be the current one."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            yield
        return
    with warnings.catch_warnings(), _no_idle_work():
        # The interpreter's loop bounds are arrays of one element, which numpy before 2.4 deprecates.
        warnings.filterwarnings("ignore", "Conversion of an array with ndim > 0", DeprecationWarning)
        yield


@contextlib.contextmanager
def _no_idle_work() -> Iterator[None]:
    """Triton's interpreter leaves out what changes no result, and is half of a launch.

    It patches its language once a launch and module, not whenever a kernel calls a jitted function; it does
    not compute in 64 bits whether sums of integers fit where nobody is told, which is without ``debug``; and
    it describes each shape once, not each tensor's.
    """
    from triton.language import core
    from triton.runtime import interpreter

    patch: Any = getattr(interpreter, "_patch_lang", None)
    builder: Any = getattr(interpreter, "interpreter_builder", None)
    options: Any = getattr(builder, "options", None)
    type_of: Any = getattr(core, "_type_for_tuple_values", None)
    if patch is None or type_of is None or not hasattr(options, "sanitize_overflow") or options.debug:
        yield
        return
    scopes: dict[int, Any] = {}

    def patch_once(fn: Any) -> Any:
        launch = next(iter(scopes.values()), None)
        if not getattr(launch, "_changes", None):  # restored at the end of its launch, or none yet
            scopes.clear()
        module = id(fn.__globals__)
        if module not in scopes:
            scopes[module] = patch(fn)
        return scopes[module]

    type_of_shape = functools.cache(lambda *sizes: type_of(sizes))

    def type_once(values: Any, fields: Any = None) -> Any:
        sizes = [x.value if type(x) is core.constexpr else x for x in values]
        if fields is None and all(type(x) is int for x in sizes):
            return type_of_shape(*sizes)
        return type_of(values, fields)

    interpreter._patch_lang, builder.options = patch_once, replace(options, sanitize_overflow=False)
    core._type_for_tuple_values = type_once
    try:
        yield
    finally:
        interpreter._patch_lang, builder.options = patch, options
        core._type_for_tuple_values = type_of


class PartialResults(NamedTuple):
    """Of each split and row: the mixture before it is divided, its largest score in base 2, its denominator.

    out: [i n c] float32. max, sum: [i n] float32. Without elements where nothing is split.
    """

    out: torch.Tensor
    max: torch.Tensor
    sum: torch.Tensor


def partial_results(num_splits: int, num_rows: int, channels: int, device: torch.device) -> PartialResults:
    """Room for what splits leave to ``merge``."""
    shape = (num_splits, num_rows) if num_splits > 1 else (0, 0)
    out, largest, total = (
        torch.empty(size, dtype=torch.float32, device=device) for size in ((*shape, channels), shape, shape)
    )
    return PartialResults(out, largest, total)


def merge(out: torch.Tensor, lse: torch.Tensor, partial: PartialResults) -> None:
    """Write ``out`` and ``lse`` of all rows from their splits; nothing to do where nothing was split."""
    num_splits, num_rows, channels = partial.out.shape
    if num_splits == 0:
        return
    from mla_fast._triton_decode_kernel import _merge_splits_kernel

    splits, rows, width = _merge_tile(num_splits, channels, device_of(out.device).merge_elements)
    _merge_splits_kernel[(-(-num_rows // rows), -(-channels // width))](
        out,
        lse,
        *partial,
        num_rows,
        num_splits,
        C=channels,
        SPLITS_PADDED=splits,
        ROWS=rows,
        CHANNELS=width,
        num_warps=4,
    )


def _merge_tile(num_splits: int, c: int, elements: int) -> tuple[int, int, int]:
    """Splits (padded), rows and channels of one merging program: all partial results of a channel at once."""
    splits = 1 << (num_splits - 1).bit_length()
    channels = min(max(16, 1 << (c - 1).bit_length()), max(16, elements // splits))
    return splits, max(1, elements // 2 // (splits * channels)), channels
