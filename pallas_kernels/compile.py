"""Compile every kernel that is shipped, on a machine without a GPU, and print what the compiler made of it.

    python -m pallas_kernels.compile [--arch sm_80 sm_90] [--kernel NAME ...]

Needs the triton package: pip install 'pagedjax[kernels]'.
"""

import argparse
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from pallas_kernels import shapes, tuning
from pallas_kernels.kv_cache_write import kv_cache_write
from pallas_kernels.kv_tiles import power_of_two
from pallas_kernels.offline import ARCHITECTURES, CompiledKernel, LoweredKernel, compile_kernel, lower
from pallas_kernels.paged_decode import paged_decode
from pallas_kernels.quant_matmul import quant_matmul
from pallas_kernels.ragged_paged_attention import ragged_paged_attention

KERNELS = ("ragged_paged_attention", "paged_decode", "kv_cache_write", "quant_matmul")
_SCALE = 0.1  # a number in the code, whatever it is
_PREFILL = (16, 2048, 32_768)  # sequences, tokens, context of the lowered shape
_MATMUL = (4096, 4096)

# Bytes/s and bfloat16 FLOP/s from NVIDIA's data sheets (A100 80 GB SXM, H100 SXM, H200 SXM).
CHIPS = {"A100": (2.039e12, 312e12), "H100": (3.35e12, 989e12), "H200": (4.8e12, 989e12)}


@dataclass(frozen=True)
class Configuration:
    """A kernel as it is shipped: what it works on, and its tiles.

    Attributes:
        kernel: one of `KERNELS`.
        label: model or kind of weights, and type of the cache.
        function: of arrays.
        arguments: those, by name, as `jax.ShapeDtypeStruct`.
        tiles: from `tuning`.
        work: bytes that have to move, and operations, of a typical shape; 0 where it does not count.
    """

    kernel: str
    label: str
    function: Callable[..., Any]
    arguments: dict[str, Any]
    tiles: Any
    work: tuple[int, int] = (0, 0)

    def call(self, arrays: dict[str, Any]) -> Any:
        """The function, on its arrays."""
        return self.function(**arrays)


def configurations(arch: str, kernels: Sequence[str] = KERNELS) -> Iterator[Configuration]:
    """Everything that is shipped for an architecture."""
    makers = {
        "ragged_paged_attention": _prefills,
        "paged_decode": _decodes,
        "kv_cache_write": _writes,
        "quant_matmul": _matmuls,
    }
    for kernel in kernels:
        yield from makers[kernel](arch)


def _prefills(arch: str) -> Iterator[Configuration]:
    for model in shapes.attention_kinds():
        for dtype in shapes.cache_dtypes(arch):
            tiles = tuning.prefill_tiles(arch, model.head_dim, model.group, dtype)
            function = partial(ragged_paged_attention, scale=_SCALE, softcap=model.softcap, tiles=tiles)
            work = (0, shapes.prefill_flops(model, 2048, 0))
            arguments = shapes.prefill_arguments(model, dtype, *_PREFILL)
            yield Configuration("ragged_paged_attention", _label(model, dtype), function, arguments, tiles, work)


def _decodes(arch: str) -> Iterator[Configuration]:
    for model in shapes.attention_kinds():
        for dtype in shapes.cache_dtypes(arch):
            for sequences, context in ((64, 4096), (1, 131_072)):
                tiles = tuning.decode_tiles(arch, model.head_dim, dtype, sequences, model.kv_heads, context)
                function = partial(paged_decode, scale=_SCALE, softcap=model.softcap, tiles=tiles)
                work = (shapes.decode_bytes(model, dtype, [context] * sequences), 0)
                arguments = shapes.attention_arguments(model, dtype, sequences, sequences, context)
                label = f"{_label(model, dtype)} {sequences} x {context}"
                yield Configuration("paged_decode", label, function, arguments, tiles, work)


def _writes(arch: str) -> Iterator[Configuration]:
    models = {power_of_two(model.head_dim): model for model in shapes.attention_kinds()}
    for model in models.values():
        for dtype in shapes.cache_dtypes(arch):
            tiles = tuning.write_tiles(model.head_dim)
            arguments = shapes.write_arguments(model, dtype, 2048)
            function = partial(kv_cache_write, tiles=tiles)
            yield Configuration("kv_cache_write", _label(model, dtype), function, arguments, tiles)


def _matmuls(arch: str) -> Iterator[Configuration]:
    for kind in shapes.weight_kinds(arch):
        for rows in (16, 2048):
            arguments = shapes.matmul_arguments(kind, rows, *_MATMUL)
            tiles = tuning.matmul_tiles(arch, rows, arguments["w"].dtype)
            moved = arguments["w"].size + 2 * rows * sum(_MATMUL)
            function = partial(quant_matmul, tiles=tiles)
            work = (moved, 2 * rows * _MATMUL[0] * _MATMUL[1])
            yield Configuration("quant_matmul", f"{kind} {rows} rows", function, arguments, tiles, work)


def _label(model: shapes.ModelShape, dtype: str) -> str:
    name = next(name for name, one in shapes.MODELS.items() if one == model)
    return f"{name}, {dtype}"


@dataclass(frozen=True)
class Result:
    """A configuration's kernel, compiled. A split `paged_decode` has `reduce_segments` beside it."""

    arch: str
    kernel: str
    label: str
    tiles: Any
    work: tuple[int, int]
    grid: tuple[int, int, int]
    compiled: CompiledKernel


def compile_all(archs: Sequence[str], kernels: Sequence[str] = KERNELS) -> list[Result]:
    """Compile what is shipped, in as many processes as there are processors. Equal code is compiled once."""
    wanted = [
        (arch, configuration, kernel)
        for arch in archs
        for configuration in configurations(arch, kernels)
        for kernel in lower(configuration.call, configuration.arguments, arch=arch)
    ]
    jobs = list(dict.fromkeys((arch, _code(kernel)) for arch, _, kernel in wanted))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), mp_context=context) as pool:
        done = dict(zip(jobs, pool.map(_compile, jobs), strict=True))
    return [
        Result(arch, kernel.name, c.label, c.tiles, c.work, kernel.grid, done[arch, _code(kernel)])
        for arch, c, kernel in wanted
    ]


def _code(kernel: LoweredKernel) -> LoweredKernel:
    """The kernel without its grid, which is no part of its code."""
    return LoweredKernel(kernel.name, kernel.bytecode, kernel.num_warps, kernel.num_stages, (0, 0, 0))


def _compile(job: tuple[str, LoweredKernel]) -> CompiledKernel:
    arch, kernel = job
    return compile_kernel(kernel, arch)


def table(results: Sequence[Result]) -> str:
    """A line for each, in Markdown."""
    lines = [
        "| arch | kernel | configuration | tiles | registers | spilled | shared KiB | buffers | dots | opcodes "
        "| programs/SM | floor us, " + " / ".join(CHIPS) + " |",
        "|" + "---|" * 12,
    ]
    for result in results:
        c = result.compiled
        lines.append(
            f"| {result.arch} | {result.kernel} | {result.label} | {_tiles(result.tiles)} | {c.registers} "
            f"| {c.stack_bytes} | {c.shared_bytes / 1024:.0f} | {min(c.buffers, default='')} "
            f"| {' '.join(sorted(set(c.dots)))} | {' '.join(c.opcodes)} | {c.programs_per_sm} | {_floor(result)} |"
        )
    return "\n".join(lines)


def _tiles(tiles: Any) -> str:
    return " ".join(f"{name.removeprefix('num_')}={value}" for name, value in vars(tiles).items())


def _floor(result: Result) -> str:
    moved, operations = result.work
    if not moved and not operations:
        return ""
    return " / ".join(f"{1e6 * max(moved / rate, operations / flops):.1f}" for rate, flops in CHIPS.values())


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m pallas_kernels.compile", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--arch", nargs="+", choices=list(ARCHITECTURES), default=list(ARCHITECTURES))
    parser.add_argument("--kernel", nargs="+", choices=KERNELS, default=KERNELS)
    options = parser.parse_args(arguments)
    print(table(compile_all(options.arch, options.kernel)))


if __name__ == "__main__":
    main()
