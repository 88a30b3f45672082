"""Compiles kernels for GPUs on a machine that has none, to see what the compiler makes of them.

JAX lowers a kernel to Triton IR for an abstract device; the `triton` package compiles that to machine code and brings
NVIDIA's disassembler along. XLA does the same on a machine with a GPU, with its own copy of Triton.
"""

import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.sharding import AbstractDevice, AbstractMesh

try:
    import triton
    from triton._C.libtriton import ir as triton_ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "compiling kernels without a GPU needs the triton package: pip install 'pagedjax[kernels]'"
    ) from error

_WARP = 32
_TENSOR_CORE_OPCODES = ("HGMMA", "IGMMA", "QGMMA", "HMMA", "IMMA")


@dataclass(frozen=True)
class Architecture:
    """What limits a kernel on GPUs of one compute capability.

    Attributes:
        device: name of a device of this kind, as XLA has it.
        capability: compute capability times ten.
        num_sms: streaming multiprocessors.
        shared_bytes: shared memory that one program may take, and that an SM has for all, less 1 KiB for each.
    """

    device: str
    capability: int
    num_sms: int
    shared_bytes: int


# NVIDIA's Ampere and Hopper tuning guides: 163 and 227 KiB for one program, 64 warps and 65,536 registers in each SM.
ARCHITECTURES = {
    "sm_80": Architecture("NVIDIA A100", 80, 108, 163 * 1024),
    "sm_90": Architecture("NVIDIA H100", 90, 132, 227 * 1024),
}
_MAX_WARPS, _MAX_PROGRAMS, _REGISTERS = 64, 32, 65536


@dataclass(frozen=True)
class LoweredKernel:
    """A kernel in Triton IR."""

    name: str
    bytecode: bytes
    num_warps: int
    num_stages: int
    grid: tuple[int, int, int]


@dataclass(frozen=True)
class CompiledKernel:
    """What became of a kernel.

    Attributes:
        registers: of a thread.
        stack_bytes: of a thread; registers that were spilled lie there, and nothing else does.
        shared_bytes: of a program.
        buffers: for every load that the pipeliner took, how many tiles of it are in shared memory at once.
        dots: for every product, ``wgmma``, ``mma``, or ``fma`` where no tensor core takes part.
        opcodes: the tensor-core instructions in the machine code.
        programs_per_sm: how many programs run on an SM at once.
    """

    registers: int
    stack_bytes: int
    shared_bytes: int
    buffers: tuple[int, ...]
    dots: tuple[str, ...]
    opcodes: tuple[str, ...]
    programs_per_sm: int


def lower(function: Callable[..., Any], *arguments: Any, arch: str) -> list[LoweredKernel]:
    """The kernels that a function of arrays calls, in order.

    Args:
        function: traced, not run.
        arguments: pytrees of arrays or `jax.ShapeDtypeStruct`.
        arch: a key of `ARCHITECTURES`.
    """
    architecture = ARCHITECTURES[arch]
    device = AbstractDevice(architecture.device, architecture.num_sms, "gpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        module = jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).compiler_ir()
    found: list[LoweredKernel] = []
    _collect(module.operation, found)
    return found


def _collect(operation: Any, found: list[LoweredKernel]) -> None:
    for region in operation.regions:
        for block in region:
            for inner in block:
                if inner.operation.name == "stablehlo.custom_call" and "triton" in str(
                    inner.attributes["call_target_name"]
                ):
                    config = inner.attributes["mhlo.backend_config"]
                    found.append(
                        LoweredKernel(
                            name=config["name"].value,
                            bytecode=config["ir"].value_bytes,
                            num_warps=config["num_warps"].value,
                            num_stages=config["num_stages"].value,
                            grid=tuple(config[f"grid_{axis}"].value for axis in "xyz"),
                        )
                    )
                _collect(inner.operation, found)


def compile_kernel(kernel: LoweredKernel, arch: str) -> CompiledKernel:
    """Compile for ``arch``, a key of `ARCHITECTURES`. Takes 1 to 5 seconds.

    Raises:
        RuntimeError: Triton or the assembler refuses the kernel.
    """
    architecture = ARCHITECTURES[arch]
    target = GPUTarget("cuda", architecture.capability, _WARP)
    options = {"num_warps": kernel.num_warps, "num_stages": kernel.num_stages, "enable_fp_fusion": True}
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ttir"
        source.write_text(_optimized(kernel, target, options, source))
        compiled = triton.compile(str(source), target=target, options=options)
        binary = Path(folder) / "kernel.cubin"
        binary.write_bytes(compiled.asm["cubin"])
        usage = _tool("cuobjdump", "-res-usage", str(binary))
        machine_code = _tool("nvdisasm", str(binary))
    resources = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    if resources is None:
        raise RuntimeError(f"cuobjdump does not tell the registers of {kernel.name}: {usage}")
    registers, stack_bytes = map(int, resources.groups())
    shared_bytes = compiled.metadata.shared
    graph = compiled.asm["ttgir"]
    # Only what is mutable is a pipeline's; its first dimension is the number of its buffers.
    buffers = re.findall(r"ttg\.local_alloc : \(\) -> !ttg\.memdesc<(\d+)x\d+x\d+x", graph)
    return CompiledKernel(
        registers=registers,
        stack_bytes=stack_bytes,
        shared_bytes=shared_bytes,
        buffers=tuple(map(int, buffers)),
        dots=tuple(_dot_kinds(graph)),
        opcodes=tuple(code for code in _TENSOR_CORE_OPCODES if re.search(rf"\b{code}\b", machine_code)),
        programs_per_sm=_programs_per_sm(architecture, kernel.num_warps, registers, shared_bytes),
    )


def _optimized(kernel: LoweredKernel, target: Any, options: dict[str, Any], path: Path) -> str:
    """The kernel after Triton's first passes, which `triton.compile` leaves out for IR that it is given."""
    context = triton_ir.context()
    triton_ir.load_dialects(context)
    backend = make_backend(target)
    backend.load_dialects(context)
    path.write_bytes(kernel.bytecode)
    module = triton_ir.parse_mlir_module(str(path), context)
    module.context = context
    return str(backend.make_ttir(module, {}, backend.parse_options(options), target.arch))


def _dot_kinds(graph: str) -> list[str]:
    layouts = dict(re.findall(r"^(#\w+) = #ttg\.(\w+)", graph, re.MULTILINE))
    kinds = []
    for operation, layout in re.findall(r"(ttng\.warp_group_dot|tt\.dot) .*-> tensor<[^>]*, (#\w+)>", graph):
        is_mma = layouts[layout] == "nvidia_mma"
        kinds.append("wgmma" if operation == "ttng.warp_group_dot" else "mma" if is_mma else "fma")
    return kinds


def _programs_per_sm(architecture: Architecture, num_warps: int, registers: int, shared_bytes: int) -> int:
    # Registers are given out in units of 256 for each warp.
    by_registers = _REGISTERS // (-(-registers * _WARP // 256) * 256 * num_warps)
    by_shared = (architecture.shared_bytes + 1024) // (shared_bytes + 1024)
    return min(by_registers, by_shared, _MAX_WARPS // num_warps, _MAX_PROGRAMS)


def _tool(name: str, *arguments: str) -> str:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    done = subprocess.run([str(tool), *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{name} failed: {done.stderr.strip()}")
    return done.stdout
