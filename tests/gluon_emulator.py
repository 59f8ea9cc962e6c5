"""Runs the source of Gluon and Triton kernels on the CPU: a kernel module's functions over numpy stand-ins.

One thread a partition of a warp-specialised kernel. Everything asynchronous happens as late as the program
allows: a copy lands when somebody waits for its barrier or arrives for the next phase, a matrix product is
computed when somebody waits for it. Shared memory starts as NaN, and a buffer becomes NaN when a copy into
it starts. Reading too early therefore shows in the result. Not modelled: memory order, proxies, layouts, the
text of inline assembly.
"""

import importlib.util
import threading
from pathlib import Path
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import torch
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

HANGS = "deadlock: nobody completes this phase"


class Crew:
    """The partitions that run, and what each of them waits for; one lock for all barriers.

    A deadlock is a fact, whatever time it takes to get there: everybody waits, and nobody for what has come
    or is on its way.
    """

    def __init__(self):
        self.changed = threading.Condition()
        self.running, self.waits, self.failed = 1, {}, False

    def begin(self, size):
        self.running, self.failed = size, False

    def leave(self, failed):
        with self.changed:
            self.running -= 1
            self.failed |= failed
            self.changed.notify_all()

    def is_stuck(self):
        return len(self.waits) == self.running and all(
            barrier.is_in(parity) and not barrier.copies for barrier, parity in self.waits.values()
        )


CREW = Crew()


class Array(np.ndarray):
    """A block of values: float32, int64 or bool, whatever type the kernel gives it."""

    dtype_name = None

    @property
    def type(self):
        return SimpleNamespace(layout=None)

    def to(self, dtype, bitcast=False):
        if bitcast:
            return array(np.asarray(self, np.float32).view(np.int32).astype(np.int64))
        if dtype in (torch.bfloat16, torch.float16):
            return array(torch.from_numpy(np.array(self)).to(dtype).to(torch.float32).numpy())
        if dtype == torch.float32:
            return array(self.astype(np.float32))
        return array(self.astype(np.int64))

    def permute(self, order):
        return array(self.transpose(order))

    def split(self):
        return array(self[..., 0]), array(self[..., 1])


def array(x):
    """``x`` as a block, a scalar as a scalar."""
    if isinstance(x, np.ndarray) and x.ndim:
        return x.view(Array)
    value = x.item() if isinstance(x, np.ndarray | np.generic) else x
    return Scalar(value) if isinstance(value, int) else value


class Scalar(int):
    """An integer with the methods of a kernel's scalar. Division and remainder truncate, like the GPU's."""

    def to(self, dtype):
        return self


def _operator(name):
    def apply(self, other):
        result = getattr(int, name)(self, other)
        return Scalar(result) if isinstance(result, int) and not isinstance(result, bool) else result

    return apply


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "floordiv", "mod", "and", "xor"):
    setattr(Scalar, f"__{_name}__", _operator(f"__{_name}__"))


class Pointer:
    """Flat memory of one tensor, from its first element on, and an offset or a block of offsets."""

    def __init__(self, memory, offset=0):
        self.memory, self.offset = memory, offset
        self.dtype = SimpleNamespace(element_ty=memory.dtype)

    def __add__(self, offset):
        return Pointer(self.memory, self.offset + offset)

    def __sub__(self, offset):
        return Pointer(self.memory, self.offset - offset)

    def __getitem__(self, key):
        return Pointer(self.memory, self.offset[key])


def pointer(tensor):
    """Pointer to a tensor's first element; reaching outside its storage raises."""
    length = tensor.untyped_storage().nbytes() // tensor.itemsize - tensor.storage_offset()
    return Pointer(torch.as_strided(tensor, (length,), (1,), tensor.storage_offset()))


def _load(p, mask=None, other=None, cache_modifier=None):
    offset = np.asarray(p.offset, dtype=np.int64)
    live = (
        np.ones(offset.shape, bool)
        if mask is None
        else np.broadcast_to(mask, np.broadcast_shapes(offset.shape, np.shape(mask)))
    )
    offset = np.broadcast_to(offset, live.shape)
    assert (offset[live] >= 0).all(), "load before the tensor"
    read = p.memory[torch.from_numpy(np.ascontiguousarray(offset[live]))]
    wide = read.to(torch.float32 if read.is_floating_point() else torch.int64).numpy()
    result = np.zeros(live.shape, wide.dtype) if other is None else np.full(live.shape, other, wide.dtype)
    result[live] = wide
    return array(result)


def _store(p, value, mask=None):
    shape = np.broadcast_shapes(
        np.shape(p.offset), np.shape(value), np.shape(mask) if mask is not None else ()
    )
    offset = np.broadcast_to(np.asarray(p.offset, dtype=np.int64), shape)
    live = np.ones(shape, bool) if mask is None else np.broadcast_to(mask, shape)
    assert (offset[live] >= 0).all(), "store before the tensor"
    values = torch.from_numpy(np.ascontiguousarray(np.broadcast_to(value, shape)[live]))
    p.memory[torch.from_numpy(np.ascontiguousarray(offset[live]))] = values.to(p.memory.dtype)


def _atomic_add(p, value):
    old = _load(p)
    _store(p, old + value)
    return old


def discarded(p_line, m):
    """What these lines of 32 floats hold becomes NaN."""
    lines = np.broadcast_to(np.asarray(p_line.offset), np.shape(m))[np.asarray(m)]
    assert (lines % 32 == 0).all(), "not the beginning of a line"
    p_line.memory[torch.from_numpy((lines[:, None] + np.arange(32)).ravel())] = np.nan


class Shared:
    """A view of shared memory."""

    def __init__(self, values, dtype):
        self.values, self.dtype = values, dtype

    @property
    def shape(self):
        return self.values.shape

    def index(self, i):
        return Shared(self.values[int(i)], self.dtype)

    def slice(self, start, length, dim=0):
        return Shared(self.values[(slice(None),) * dim + (slice(start, start + length),)], self.dtype)

    def permute(self, order):
        return Shared(self.values.transpose(order), self.dtype)

    def _reinterpret(self, dtype, shape, layout):
        if dtype == torch.uint8 and self.dtype == torch.bfloat16:
            return Bytes.of(self.values, shape)
        view = self.values.view()
        view.shape = tuple(shape)  # raises rather than copy
        return Shared(view, dtype)

    def load(self, layout):
        return array(self.values.copy())

    def store(self, value):
        assert value.shape == self.values.shape, f"store of {value.shape} to {self.values.shape}"
        self.put(value)

    def put(self, value):
        self.values[...] = value


class Bytes(Shared):
    """The bytes of a tile of bfloat16 values: a write to either changes the other.

    values: the bytes of the view. The tile's all: ``memory``, which is only as true as ``tile`` still holds
    what they mean. touched: a mark for every byte, of which this view sees its own.
    """

    POISON = 0xFF  # of bfloat16 and e4m3 alike
    known: ClassVar[dict[int, tuple[np.ndarray, np.ndarray]]] = {}

    def __init__(self, values, touched, tile, memory, marks):
        super().__init__(values, torch.uint8)
        self.touched, self.tile, self.memory, self.marks = touched, tile, memory, marks

    @classmethod
    def of(cls, tile, shape):
        address = tile.__array_interface__["data"][0]
        if address not in cls.known or cls.known[address][0] is not tile.base:
            memory = np.full((*tile.shape[:-1], 2 * tile.shape[-1]), cls.POISON, np.uint8)
            cls.known[address] = tile.base, memory
        memory = cls.known[address][1]
        marks = np.zeros(memory.shape, bool)
        return cls(memory.reshape(shape), marks.reshape(shape), tile, memory, marks)

    def _view(self, change):
        return Bytes(change(self.values), change(self.touched), self.tile, self.memory, self.marks)

    def index(self, i):
        return self._view(lambda x: x[int(i)])

    def slice(self, start, length, dim=0):
        return self._view(lambda x: x[(slice(None),) * dim + (slice(start, start + length),)])

    def _reinterpret(self, dtype, shape, layout):
        def reshaped(x):
            view = x.view()
            view.shape = tuple(shape)
            return view

        return self._view(reshaped)

    def _meaning(self):
        bits = self.memory.view(np.uint16).astype(np.uint32) << 16
        return bits.view(np.float32)

    def load(self, layout):
        meaning = self._meaning()
        same = (meaning == self.tile) | (np.isnan(meaning) & np.isnan(self.tile))
        self.memory[~np.repeat(same, 2, axis=-1)] = self.POISON
        return array(self.values.astype(np.int64))

    def put(self, value):
        self.values[...] = self.POISON if np.isnan(value).all() else value
        self.touched[...] = True
        touched = self.marks.reshape(*self.tile.shape, 2).any(-1)
        self.touched[...] = False
        self.tile[touched] = self._meaning()[touched]


class Barrier:
    """An mbarrier: a phase ends when every arrival and every expected byte is in."""

    def __init__(self):
        self.count = self.pending = self.bytes = self.phase = 0
        self.copies = []

    def index(self, i):
        return self

    def is_in(self, parity):
        return (self.phase & 1) == parity

    def _check(self):
        if self.pending == 0 and self.bytes == 0:
            self.phase, self.pending = self.phase + 1, self.count
        CREW.changed.notify_all()

    def _land(self):
        for copy in self.copies:
            self.bytes -= copy()
        self.copies.clear()
        self._check()

    def arrive(self, count, expected=0):
        with CREW.changed:
            if self.copies and self.pending < count:  # nobody has waited for this phase, and yet it is over
                self._land()
            self.bytes += expected
            self.pending -= count
            assert self.pending >= 0, "more arrivals than the barrier's count"
            self._check()

    def copied(self, copy):
        """``copy`` is on its way to whoever waits here."""
        with CREW.changed:
            self.copies.append(copy)
            CREW.changed.notify_all()

    def wait(self, parity):
        me = threading.get_ident()
        with CREW.changed:
            while self.is_in(parity):
                if self.copies:
                    self._land()
                    continue
                CREW.waits[me] = self, parity
                try:
                    if CREW.failed or CREW.is_stuck():
                        raise RuntimeError(HANGS)
                    CREW.changed.wait()
                finally:
                    del CREW.waits[me]


class Barriers:
    """Barriers in shared memory."""

    def __init__(self, n):
        self.all = [Barrier() for _ in range(n)]

    def index(self, i):
        return self.all[int(i)]


def _barrier(bar):
    return bar.all[0] if isinstance(bar, Barriers) else bar


def _init(bar, count):
    bar = _barrier(bar)
    bar.count = bar.pending = count


def _arrive(bar, count=1, pred=True):
    if pred:
        _barrier(bar).arrive(count)


def _expect(bar, num_bytes, pred=True):
    if pred:
        _barrier(bar).arrive(1, num_bytes)


def _wait(bar, parity, pred=True):
    if pred:
        _barrier(bar).wait(int(parity))


class Descriptor:
    """A tensor as the copy engine sees it."""

    def __init__(self, desc):
        self.tensor = torch.as_strided(
            desc.base, tuple(desc.shape), tuple(desc.strides), desc.base.storage_offset()
        )
        self.block_shape, self.dtype, self.layout = list(desc.block_shape), desc.base.dtype, desc.layout
        size = desc.base.itemsize
        assert desc.base.data_ptr() % 16 == 0, "copy engine: address"
        assert all(s * size % 16 == 0 for s in desc.strides[:-1]), "copy engine: strides"

    def read(self, coord):
        """The box at ``coord``; zeros outside the tensor."""
        box = np.zeros(self.block_shape, np.float32)
        start = [max(c, 0) for c in coord]
        stop = [min(c + n, s) for c, n, s in zip(coord, self.block_shape, self.tensor.shape, strict=True)]
        if all(a < b for a, b in zip(start, stop, strict=True)):
            part = self.tensor[tuple(slice(a, b) for a, b in zip(start, stop, strict=True))]
            where = tuple(slice(a - c, b - c) for a, b, c in zip(start, stop, coord, strict=True))
            box[where] = part.to(torch.float32).numpy()
        return box


def _copy(desc, coord, bar, destination, pred=True):
    if not pred:
        return
    assert list(destination.values.shape) == desc.block_shape, "box and destination differ"
    destination.put(np.float32(np.nan))

    def land():
        destination.put(desc.read([int(c) for c in coord]))
        return destination.values.size * desc.tensor.itemsize

    _barrier(bar).copied(land)


class Product:
    """A matrix product that nobody has waited for."""

    def __init__(self, a, b, acc, use_acc):
        self.parts, self.value = (a, b, acc, use_acc), None

    def compute(self):
        a, b, acc, use_acc = self.parts
        left = a.values if isinstance(a, Shared) else a
        product = np.matmul(np.asarray(left, np.float32), np.asarray(b.values, np.float32))
        start = acc.value if isinstance(acc, Product) else acc
        self.value = array(product + start if use_acc else product)


_in_flight = threading.local()


def _mma(a, b, acc, use_acc=True, is_async=False):
    product = Product(a, b, acc, use_acc)
    if not is_async:
        product.compute()
        return product.value
    _in_flight.products.append(product)
    return product


def _mma_wait(num_outstanding, deps):
    while len(_in_flight.products) > num_outstanding:
        _in_flight.products.pop(0).compute()
    done = tuple(d.value if isinstance(d, Product) and d.value is not None else d for d in deps)
    return done[0] if len(done) == 1 else done


def _warp_specialize(functions_and_args, worker_num_warps, worker_num_regs):
    errors = []

    def run(function, args):
        _in_flight.products = []
        failed = True
        try:
            with np.errstate(all="ignore"):
                function(*args)
            assert not _in_flight.products, "products still in flight at the end"
            failed = False
        except BaseException as error:  # raised again below, in the caller's thread
            errors.append(error)
        finally:
            CREW.leave(failed)

    CREW.begin(len(functions_and_args))
    threads = [threading.Thread(target=run, args=fa, daemon=True) for fa in functions_and_args]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    CREW.begin(1)
    if errors:
        raise errors[0]


def _allocate(dtype, shape, layout):
    if dtype == torch.int64:
        return Barriers(shape[0])
    if dtype == torch.int32:
        return Shared(np.full(shape, -(2**31), np.int64), dtype)
    return Shared(np.full(shape, np.nan, np.float32), dtype)


def _single(x):
    return np.float32(x) if isinstance(x, float) else x


def _pick(function):
    return lambda *args: array(function(*args))


def _reduce(function):
    return lambda x, axis=None: array(function(np.asarray(x), axis=axis))


_program = threading.local()


def _layout(*args, **kwargs):
    return None


_layout.get_default_for = _layout


def _full(shape, value, dtype, layout=None):
    return array(np.full(shape, value, np.int64 if dtype in (torch.int32, torch.int64) else np.float32))


LANGUAGE = SimpleNamespace(
    constexpr=lambda x: x,
    float32=torch.float32, bfloat16=torch.bfloat16, float16=torch.float16,
    int32=torch.int32, int64=torch.int64, uint8=torch.uint8,
    NVMMADistributedLayout=_layout, SliceLayout=_layout, DotOperandLayout=_layout, BlockedLayout=_layout,
    SwizzledSharedLayout=_layout, DistributedLinearLayout=_layout, NVMMASharedLayout=_layout,
    allocate_shared_memory=_allocate, warp_specialize=_warp_specialize, static_range=range,
    program_id=lambda axis: Scalar(_program.ids[axis]),
    num_programs=lambda axis: Scalar(_program.grid[axis]),
    load=_load, store=_store, atomic_add=_atomic_add,
    arange=lambda a, b, layout=None: array(np.arange(a, b)),
    zeros=lambda shape, dtype, layout=None: array(np.zeros(shape, np.float32)),
    full=_full,
    zeros_like=_pick(np.zeros_like),
    convert_layout=lambda x, layout: x,
    join=_pick(lambda a, b: np.stack((a, b), -1)),
    where=_pick(lambda m, a, b: np.where(m, _single(a), _single(b))),
    maximum=_pick(np.maximum), minimum=_pick(np.minimum),
    exp2=_pick(lambda x: np.exp2(np.asarray(x, np.float32))),
    log2=_pick(lambda x: np.log2(np.asarray(x, np.float32))),
    max=_reduce(np.max), min=_reduce(np.min), sum=_reduce(np.sum),
    cumsum=lambda x, axis=0: array(np.cumsum(np.asarray(x), axis=axis)),
    gather=_pick(lambda x, index, axis: np.take_along_axis(np.asarray(x), np.asarray(index), axis)),
    debug_barrier=lambda: None, thread_barrier=lambda: None,
)  # fmt: skip

STAND_INS: dict[str, Any] = {
    "gl": LANGUAGE,
    "tl": LANGUAGE,
    "mbarrier": SimpleNamespace(
        init=_init, arrive=_arrive, expect=_expect, wait=_wait, MBarrierLayout=_layout
    ),
    "tma": SimpleNamespace(async_copy_global_to_shared=_copy),
    # By every thread of four warps.
    "async_copy": SimpleNamespace(mbarrier_arrive=lambda bar, increment_count: _arrive(bar, 128)),
    "warpgroup_mma": _mma,
    "warpgroup_mma_wait": _mma_wait,
    "fence_async_shared": lambda: None,
    "gdc_wait": lambda: None,
    "gdc_launch_dependents": lambda: None,
}


class Emulated:
    """A kernel of ``module`` that runs here: ``Emulated(module, "kernel", asm={...})[grid](*args)``.

    asm: plain functions that take the place of those that are inline assembly.
    """

    def __init__(self, module: ModuleType, name: str, asm: dict[str, Any] | None = None):
        space: dict[str, Any] = {"__builtins__": __builtins__}
        functions = [x for x in vars(module).values() if isinstance(x, JITFunction | InterpretedFunction)]
        named = [*(x.fn.__globals__ for x in functions), vars(module)]
        for key, value in [item for names in named for item in names.items()]:
            if isinstance(value, JITFunction | InterpretedFunction):
                space[key] = FunctionType(value.fn.__code__, space, key, value.fn.__defaults__)
            elif type(value).__name__ == "constexpr":
                space[key] = value.value
        self.run = space[name]
        space.update(STAND_INS)
        space.update(asm or {})

    def __getitem__(self, grid):
        def launch(*args, **options):
            held = [
                pointer(a) if isinstance(a, torch.Tensor) else Descriptor(a) if hasattr(a, "block_shape") else
                Scalar(a) if type(a) is int else a
                for a in args
            ]  # fmt: skip
            for ids in np.ndindex(*grid):
                _program.ids, _program.grid = (*ids, 0, 0), (*grid, 1, 1)
                self.run(*held)

        return launch


def edited(module: ModuleType, good: str, bad: str, folder: Path) -> ModuleType:
    """A kernel module with a bug: ``bad`` where its source has ``good``."""
    source = Path(module.__file__).read_text(encoding="utf-8")
    assert good in source, "the kernel no longer has the line in which the bug is planted"
    path = folder / "planted_kernel.py"
    path.write_text(source.replace(good, bad), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    planted = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(planted)
    return planted
