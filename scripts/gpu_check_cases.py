"""What the sections of the GPU check are made of, and how a kernel's time is taken."""

import dataclasses
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.shapes import BLOCK_SIZE, ModelShape

Result = dict[str, Any]
Run = Callable[[], Result]

# An H200 has 60 MB of L2: what is touched between two looks at the same bytes has to be far more.
BEYOND_L2 = 256 << 20
MAX_ELEMENTS = 2**31 - 1  # of an array: a kernel's offsets are int32
MAX_GROUPS = 16
IN_FLIGHT = 4  # programs whose results are in memory
TOY = ModelShape(4, 2, 64, window=24, sinks=True, products=((256, 128),))


class Case(Protocol):
    """One thing to check or to measure."""

    @property
    def name(self) -> str:
        """Unique in its section; what is done is known by it when a run goes on."""

    @property
    def is_trial(self) -> bool:
        """Whether it may fail: tiles that are tried, other people's kernels."""

    def build(self) -> Run:
        """Everything slow that needs no device to itself, such as compiling. Cases are built in parallel."""


@dataclass
class Pools:
    """A cache of random keys and values, the same for all cases of a model. One at a time is in memory."""

    _spec: jax.ShapeDtypeStruct | None = None
    _arrays: tuple[jax.Array, ...] = ()

    def get(self, spec: jax.ShapeDtypeStruct) -> tuple[jax.Array, ...]:
        """Keys, values and, if ``spec`` is a quantised cache's, the scales of both."""
        if spec != self._spec:
            self.drop()
            k, v = (random_array(spec.shape, spec.dtype, seed) for seed in range(2))
            scales: tuple[jax.Array, ...] = ()
            if spec.dtype.itemsize == 1:
                scales = tuple(random_array(spec.shape[:3], jnp.float32, seed) for seed in range(2))
            self._spec, self._arrays = spec, (k, v, *scales)
        return self._arrays

    def drop(self) -> None:
        """Give the memory back, which a next pool or another section needs."""
        self._spec, self._arrays = None, ()


@dataclass(frozen=True)
class Setup:
    """What all cases have to know.

    Attributes:
        arch: the entry of the kernels' tables, ``sm_80`` or ``sm_90``.
        memory: bytes that the arrays of a case may take, with all that lies beside them.
        interpret: toy sizes on the CPU; no time means anything then.
        pools: where keys and values come from.
    """

    arch: str
    memory: int
    interpret: bool = False
    pools: Pools = field(default_factory=Pools)

    def pool_blocks(self, model: ModelShape) -> int:
        """Blocks of a cache to measure with: a quarter of the memory in bfloat16, 4 GiB at most."""
        if self.interpret:
            return 32
        numbers = model.kv_heads * BLOCK_SIZE * model.head_dim
        return min(min(self.memory // 4, 4 << 30) // (4 * numbers), MAX_ELEMENTS // numbers)


@dataclass(frozen=True)
class Timing:
    """Time of one call among several that run back to back in one program, on arrays that are not in L2.

    Attributes:
        function: of ``fixed`` and a group, which is a list: a call for each of its members.
        arguments: ``fixed`` and one group, as `jax.ShapeDtypeStruct`.
        make: gives ``fixed`` and all groups, as arrays; they take turns.
        facts: what stands in the result beside the time: ``bytes`` and ``flops`` of a call, which shape it has.
    """

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, list[Any]]
    make: Callable[[], tuple[Any, Sequence[list[Any]]]]
    facts: Result
    is_trial: bool = False
    is_quick: bool = False

    def build(self) -> Run:
        """Compile."""
        return partial(self._run, jax.jit(self.function).lower(*self.arguments).compile())

    def _run(self, compiled: Callable[..., Any]) -> Result:
        fixed, groups = jax.device_put(self.make())
        calls = len(self.arguments[1])
        return self.facts | times(
            lambda turn: compiled(fixed, groups[turn % len(groups)]), calls, is_quick=self.is_quick
        )


def times(call: Callable[[int], Any], calls: int, *, is_quick: bool = False) -> Result:
    """Median and least of the microseconds that one of ``calls`` takes, over samples of some 20 ms each.

    A sample keeps several programs in flight, so that the device is never without work and what the host does is
    hidden; not more, for the results of each take memory. 50 ms of the same go before, in which the clocks rise.

    Args:
        call: dispatches a program; gets its number.
        calls: in a program.
        is_quick: take one sample of one program.
    """
    jax.block_until_ready(call(0))
    programs, seconds = 1, 0.0
    while not is_quick and seconds < 0.05:
        start = time.perf_counter()
        _dispatch(call, programs)
        seconds = time.perf_counter() - start
        programs *= 2
    programs = 1 if is_quick else max(1, round(0.02 * (programs / 2) / seconds))
    samples = []
    for _ in range(1 if is_quick else 7):
        start = time.perf_counter()
        _dispatch(call, programs)
        samples.append(1e6 * (time.perf_counter() - start) / (programs * calls))
    return {"us": statistics.median(samples), "least_us": min(samples)}


def _dispatch(call: Callable[[int], Any], programs: int) -> None:
    waiting: deque[Any] = deque()
    for turn in range(programs):
        waiting.append(call(turn))
        if len(waiting) > IN_FLIGHT:
            jax.block_until_ready(waiting.popleft())
    jax.block_until_ready(list(waiting))


def group_sizes(moved: int, largest: int = 16) -> tuple[int, int]:
    """How many calls a program has, and how many groups of arrays take turns, if a call moves so many bytes.

    Short calls need many in a program, for dispatching one takes the host some 30 us.
    """
    calls = min(max(BEYOND_L2 // max(moved, 1), 4), largest)
    return calls, min(max(-(-BEYOND_L2 // max(moved * calls, 1)), 1), MAX_GROUPS)


def neighbours(tiles: Any, limits: dict[str, tuple[int, int]]) -> Iterator[Any]:
    """The tiles themselves, and all that differ in one number: halved or doubled, or a stage more or less.

    Args:
        tiles: a dataclass of integers.
        limits: the least and the greatest of each number that may change.
    """
    yield tiles
    for name, (least, greatest) in limits.items():
        value = getattr(tiles, name)
        for other in (value - 1, value + 1) if name == "num_stages" else (value // 2, value * 2):
            if least <= other <= greatest:
                yield dataclasses.replace(tiles, **{name: other})


def describe(tiles: Any) -> str:
    """Tiles in a few words."""
    return " ".join(f"{name.removeprefix('num_')}={value}" for name, value in vars(tiles).items())


def random_array(shape: Sequence[int], dtype: Any, seed: int = 0) -> jax.Array:
    """Normal numbers of the dtype's range, made on the device, where they repeat after a million of them.

    Random, for zeros let a GPU run at higher clocks. float32 is for scales: small and above zero.
    """
    bank = np.random.default_rng(seed).standard_normal(1 << 20, np.float32)
    return _spread(bank, tuple(shape), jnp.dtype(dtype))


@partial(jax.jit, static_argnames=("shape", "dtype"))
def _spread(bank: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    if dtype == jnp.float32:
        bank = jnp.abs(bank) * 0.01 + 1e-3
    elif dtype in (jnp.int8, jnp.uint8):
        bank = jnp.clip(jnp.round(bank * 40), -127, 127).astype(jnp.int8)
        bank = lax.bitcast_convert_type(bank, dtype)
    size = math.prod(shape)
    repeated = jnp.broadcast_to(bank.astype(dtype), (-(-size // bank.size), bank.size))
    return repeated.reshape(-1)[:size].reshape(shape)
