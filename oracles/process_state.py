"""What torch keeps for a whole process: types, flags, threads, the random stream. A call leaves it as it was.

The judge looks before and after every call, and puts back what was changed: a default type that a backend
leaves behind would else be the judge's own, in every later case. A process in which that cannot be done is
not used any more.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any, NamedTuple

import torch


class _Setting(NamedTuple):
    read: Callable[[], Any]
    write: Callable[[Any], Any]


# What nobody can put back, in the order in which it was noticed; workers are replaced for it.
BEYOND_REPAIR: list[str] = []


# A product with it is 0 where a processor flushes denormal numbers.
LEAST = 5e-324


# What scaled_dot_product_attention chooses from.
SDPA = ("flash", "mem_efficient", "math", "cudnn")


def _flushes_denormals(one: float = 1.0) -> bool:
    return LEAST * one == 0.0


def _device() -> torch.device:
    return torch.get_default_device()


def _use_device(device: torch.device) -> None:
    torch.set_default_device(None if device.type == "cpu" else device)


def _cudnn(name: str) -> _Setting:
    return _Setting(
        lambda: getattr(torch.backends.cudnn, name),
        lambda value: setattr(torch.backends.cudnn, name, value),
    )


def _precision(where: Any) -> _Setting:
    # Not get_float32_matmul_precision, which raises where somebody has used these.
    return _Setting(lambda: where.fp32_precision, lambda value: setattr(where, "fp32_precision", value))


def _reductions() -> tuple[bool, bool]:
    matmul = torch.backends.cuda.matmul
    return matmul.allow_fp16_reduced_precision_reduction, matmul.allow_bf16_reduced_precision_reduction


def _reduce(allowed: tuple[bool, bool]) -> None:
    matmul = torch.backends.cuda.matmul
    matmul.allow_fp16_reduced_precision_reduction, matmul.allow_bf16_reduced_precision_reduction = allowed


def _sdpa() -> tuple[bool, ...]:
    cuda: Any = torch.backends.cuda
    return tuple(getattr(cuda, f"{name}_sdp_enabled")() for name in SDPA)


def _use_sdpa(allowed: tuple[bool, ...]) -> None:
    cuda: Any = torch.backends.cuda
    for name, yes in zip(SDPA, allowed, strict=True):
        getattr(cuda, f"enable_{name}_sdp")(yes)


def _autocast(device: str) -> _Setting:
    return _Setting(
        lambda: torch.is_autocast_enabled(device), lambda value: torch.set_autocast_enabled(device, value)
    )


SETTINGS: dict[str, _Setting] = {
    "the default dtype": _Setting(torch.get_default_dtype, torch.set_default_dtype),
    "the default device": _Setting(_device, _use_device),
    "the gradient mode": _Setting(torch.is_grad_enabled, torch.set_grad_enabled),
    "whether algorithms are deterministic": _Setting(
        torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode
    ),
    "the precision of float32": _precision(torch.backends),
    "the precision of float32 matmuls on a GPU": _precision(torch.backends.cuda.matmul),
    "the precision of float32 matmuls on the CPU": _precision(attrgetter("mkldnn.matmul")(torch.backends)),
    "whether products in 16 bits are summed in them": _Setting(_reductions, _reduce),
    "which attention torch may choose": _Setting(_sdpa, _use_sdpa),
    "cudnn.benchmark": _cudnn("benchmark"),
    "cudnn.deterministic": _cudnn("deterministic"),
    "autocast on the CPU": _autocast("cpu"),
    "autocast on a GPU": _autocast("cuda"),
    "the number of threads": _Setting(torch.get_num_threads, torch.set_num_threads),
    "whether denormal numbers are flushed": _Setting(_flushes_denormals, torch.set_flush_denormal),
    "torch's random stream": _Setting(
        lambda: torch.get_rng_state().numpy().tobytes(),
        lambda raw: torch.set_rng_state(torch.frombuffer(bytearray(raw), dtype=torch.uint8)),
    ),
    "Python's random stream": _Setting(random.getstate, random.setstate),
}


def _current_gpu() -> int:
    """The first, as long as nobody has begun to use any."""
    return torch.cuda.current_device() if torch.cuda.is_initialized() else 0  # type: ignore[no-untyped-call]


def _gpu_queue() -> Any:
    """The stream that work goes to, on the current GPU; None as long as nobody has begun to use any."""
    return torch.cuda.current_stream() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]


def _gpu_streams() -> tuple[bytes, ...] | None:
    """Of each GPU, or None as long as nobody has begun to use any: asking would be a beginning."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    return tuple(state.numpy().tobytes() for state in torch.cuda.get_rng_state_all())


def _set_gpu_streams(raw: tuple[bytes, ...] | None) -> None:
    for index, state in enumerate(raw or ()):
        torch.cuda.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8), index)


# Likewise of GPUs.
ON_GPUS: dict[str, _Setting] = {
    "the current GPU": _Setting(_current_gpu, torch.cuda.set_device),
    "the GPU's current stream": _Setting(_gpu_queue, torch.cuda.set_stream),
    "a GPU's random stream": _Setting(_gpu_streams, _set_gpu_streams),
}


@contextmanager
def kept(changed: list[str]) -> Iterator[None]:
    """Every setting is afterwards as it was; what was changed meanwhile is appended, in words.

    What could not be read before, since no GPU was in use, is not compared.
    """
    settings = SETTINGS | ON_GPUS
    before = {name: setting.read() for name, setting in settings.items()}
    try:
        yield
    finally:
        for name, setting in settings.items():
            if before[name] is not None and (after := setting.read()) != before[name]:
                setting.write(before[name])
                changed.append(name if isinstance(after, (bytes, tuple)) else f"{name}: is {after}")
