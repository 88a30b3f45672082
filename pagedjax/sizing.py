"""How large the cache and the batch are, from the bytes there are; and the start-up report."""

import os
from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path

import jax

from pagedjax.config import EngineConfig, ModelConfig, UserError
from pagedjax.kv_cache import MAX_ARRAY_ELEMENTS, block_bytes

MIB = 2**20
# What a CPU's cache takes unless told otherwise: a machine that serves does other things too.
CPU_KV_CACHE_BYTES = 2 * 2**30
_CPU_SHARE_OF_FREE = 0.6
_ACCELERATOR_UTILIZATION = 0.9


@dataclass(frozen=True)
class EngineSizes:
    """What the engine chose where the user did not. Tokens, blocks (on the device, in swap space), sequences."""

    max_model_len: int
    num_blocks: int
    block_size: int
    max_num_seqs: int
    token_budget: int
    swap_blocks: int = 0


def choose_sizes(config: EngineConfig, model: ModelConfig, dtype: str, weight_bytes: int) -> EngineSizes:
    """Sizes that fit the memory there is.

    Raises:
        UserError: what was asked for does not fit; the message says what would.
    """
    on_cpu = jax.default_backend() == "cpu"
    max_num_seqs = config.max_num_seqs or (64 if on_cpu else 256)
    token_budget = config.max_num_batched_tokens or max(512 if on_cpu else 2048, max_num_seqs)
    if token_budget < max_num_seqs:
        raise UserError(
            f"--max-num-batched-tokens {token_budget} is below --max-num-seqs {max_num_seqs}: "
            "each running sequence needs a token in every step"
        )
    longest = config.max_model_len or model.max_model_len
    if longest > model.max_model_len:
        raise UserError(
            f"--max-model-len {longest} is more than the {model.max_model_len} tokens the model is made for"
        )
    per_block = block_bytes(model, config.block_size, dtype)

    def most(tokens: int) -> int:
        return model.cache_layout.most_blocks(tokens, config.block_size, token_budget)

    blocks = _num_blocks(config, per_block, max_num_seqs * most(longest), weight_bytes, on_cpu)
    one_place = model.num_kv_heads * config.block_size * model.head_dim
    if config.num_kv_blocks is None:
        blocks = min(blocks, MAX_ARRAY_ELEMENTS // one_place)
    if blocks < most(longest):
        if config.max_model_len or blocks < most(1):
            need = most(longest)
            raise UserError(
                f"the KV cache holds {max(blocks, 0)} blocks of {config.block_size}, and one request of "
                f"{longest} tokens needs {need} ({need * per_block / MIB:.0f} MiB): "
                "give --kv-cache-memory more, or --max-model-len less"
            )
        # The greatest length of whole blocks that fits.
        longest = config.block_size * bisect_right(range(blocks + 1), blocks, key=lambda n: most(n * config.block_size))
        longest -= config.block_size
    return EngineSizes(
        longest, blocks, config.block_size, max_num_seqs, token_budget, _swap_blocks(config, blocks, per_block)
    )


def _swap_blocks(config: EngineConfig, blocks: int, per_block: int) -> int:
    """Blocks of swap space: as many as the cache has unless told otherwise."""
    if not config.swaps:
        return 0
    size = blocks * per_block if config.swap_space is None else int(config.swap_space)
    if size < per_block:
        raise UserError(f"--swap-space {size} holds no block of {per_block} bytes: give it more, or leave it out")
    if size > available_memory():
        raise UserError(
            f"--swap-space takes {size / MIB:.0f} MiB, and {available_memory() / MIB:.0f} MiB are free: give it less"
        )
    return size // per_block


def _num_blocks(config: EngineConfig, per_block: int, wanted: int, weight_bytes: int, on_cpu: bool) -> int:
    """Blocks as told, or as many as all requests could ever want and as there is memory for."""
    if config.num_kv_blocks is not None:
        if on_cpu and config.num_kv_blocks * per_block > available_memory():
            raise UserError(
                f"--num-kv-blocks {config.num_kv_blocks} takes {config.num_kv_blocks * per_block / MIB:.0f} MiB, "
                f"and {available_memory() / MIB:.0f} MiB are free: give it less"
            )
        return config.num_kv_blocks
    if config.kv_cache_memory is not None:
        if on_cpu and int(config.kv_cache_memory) > available_memory():
            raise UserError(
                f"--kv-cache-memory {int(config.kv_cache_memory) / MIB:.0f}MiB is more than the "
                f"{available_memory() / MIB:.0f} MiB that are free: give it less"
            )
        return int(config.kv_cache_memory) // per_block
    if on_cpu:
        if config.memory_utilization is not None:
            room = int(available_memory() * config.memory_utilization)
        else:
            room = min(CPU_KV_CACHE_BYTES, int(available_memory() * _CPU_SHARE_OF_FREE))
    else:
        share = config.memory_utilization or _ACCELERATOR_UTILIZATION
        limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit", 0)
        room = int(limit * share) - weight_bytes
    return min(wanted, room // per_block)


def available_memory(meminfo: Path = Path("/proc/meminfo"), control_group: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes of memory that this process may still take: the machine's, or its control group's if that is less.

    Args:
        meminfo: the system's account of the machine's memory; where there is none, the free pages count.
        control_group: folder of the process's control group (version 2); it may set no limit, or not be there.
    """
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if meminfo.exists():  # counts what the page cache would give back, which sysconf does not
        fields = dict(line.split(":", 1) for line in meminfo.read_text(encoding="ascii").splitlines())
        free = int(fields["MemAvailable"].split()[0]) * 1024
    limit, used = control_group / "memory.max", control_group / "memory.current"
    if limit.exists() and used.exists() and (text := limit.read_text(encoding="ascii").strip()) != "max":
        kept = int(used.read_text(encoding="ascii")) - _reclaimable(control_group / "memory.stat")
        free = min(free, int(text) - kept)
    return max(free, 0)


def _reclaimable(stat: Path) -> int:
    """Bytes that a control group counts as used and gives back when asked: pages of files read some time ago.

    Reading a checkpoint leaves as many of them as the file is long.
    """
    if not stat.exists():
        return 0
    fields = dict(line.split(" ", 1) for line in stat.read_text(encoding="ascii").splitlines())
    return int(fields.get("inactive_file", 0))


def resident_memory() -> tuple[int, int]:
    """Bytes of memory that this process holds now, and at the most so far; zeros where the system does not say."""
    status = Path("/proc/self/status")
    if not status.exists():
        return 0, 0
    fields = dict(line.split(":", 1) for line in status.read_text(encoding="ascii").splitlines() if ":" in line)
    now, most = (int(fields[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM"))
    return now, most


def startup_report(
    model: ModelConfig, sizes: EngineSizes, dtype: str, weight_bytes: int, temporary_bytes: int, backend: str
) -> list[str]:
    """What the engine is about to use, a line per subject. Call it when everything is loaded and compiled."""
    cache_bytes = sizes.num_blocks * block_bytes(model, sizes.block_size, dtype)
    parts = {
        "weights": weight_bytes,
        "KV cache": cache_bytes,
        "swap space": sizes.swap_blocks * block_bytes(model, sizes.block_size, dtype),
        "temporaries of the largest step": temporary_bytes,
    }
    now, most = resident_memory()
    # Steps have run on nothing so far, so their temporaries come on top; compiling may have taken more than they will.
    total = max(now + temporary_bytes, most, sum(parts.values()))
    parts["program and compiler"] = total - sum(parts.values())
    listed = ", ".join(f"{name} {size / MIB:,.0f} MiB" for name, size in parts.items() if size)
    layout = model.cache_layout
    full = sizes.num_blocks // layout.most_blocks(sizes.max_model_len, sizes.block_size, sizes.token_budget)
    layers = "" if layout.num_groups == 1 else f" in {layout.depth} of {model.num_layers} layers"
    device = jax.devices()[0]
    return [
        f"{model.family} in {dtype} on {device.device_kind} ({device.platform}), attention backend {backend}",
        f"memory: {listed}; {total / MIB:,.0f} MiB in all",
        f"KV cache: {sizes.num_blocks:,} blocks of {sizes.block_size} tokens{layers}; "
        f"{full} requests of {sizes.max_model_len:,} tokens fit at once",
        f"at most {sizes.max_num_seqs} sequences and {sizes.token_budget} tokens in a step",
    ]
