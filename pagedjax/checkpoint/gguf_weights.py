"""GGUF tensors as Hugging Face knows them: their names, and all that was done to the values undone."""

import os
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from gguf.quants import dequantize

from pagedjax.checkpoint.gguf_file import GGUFFile, GGUFTensor
from pagedjax.checkpoint.tensor_file import DTYPES
from pagedjax.config import UserError

Array = np.ndarray[Any, np.dtype[Any]]

# Dequantised elements per piece of work: small enough for the caches, large enough that NumPy's cost per call
# is lost.
CHUNK_ELEMENTS = 1 << 18
WORKERS = 2

_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Gemma 3 has a norm before and after both halves of a layer.
_GEMMA3_LAYER = _LAYER | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
# Not a weight: it says how llama3 stretches its rotary frequencies, and becomes `rope_scaling` in the config.
ROPE_FACTORS = "rope_freqs.weight"


@dataclass(frozen=True, slots=True)
class ConvertedTensor:
    """One tensor of the converted checkpoint, its source, and what has to be undone.

    `rotary_dim`: the head size whose rotary pairs stand interleaved, row by row, in the file (0: not
    permuted). `offset`: what the file has added to every value.
    """

    name: str
    source: GGUFTensor
    rotary_dim: int = 0
    offset: float = 0.0


def plan_tensors(file: GGUFFile, config: Mapping[str, Any]) -> list[ConvertedTensor]:
    """Every tensor of the checkpoint to be, in file order; `config` is the one made from the same file.

    Raises UserError naming a tensor that has no place in the model family.
    """
    architecture = file.metadata["general.architecture"]
    gemma = architecture == "gemma3"
    layer_names = _GEMMA3_LAYER if gemma else _LAYER
    planned = []
    for name, tensor in file.tensors.items():
        if name == ROPE_FACTORS:
            continue
        match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
        stem = match and (layer_names if match[1] else _OUTER).get(match[2])
        if match is None or stem is None:
            raise UserError(f"{file.path}: tensor {name!r} is not known in a {architecture} model and cannot be loaded")
        layer = f"model.layers.{match[1]}." if match[1] else ""
        rotary_dim = config["head_dim"] if architecture == "llama" and match[2] in ("attn_q", "attn_k") else 0
        if rotary_dim and (rotary_dim % 2 or tensor.shape[0] % rotary_dim or tensor.nbytes % tensor.shape[0]):
            raise UserError(f"{file.path}: tensor {name!r} does not divide into heads of {rotary_dim}")
        offset = 1.0 if gemma and match[2].endswith("norm") else 0.0
        planned.append(ConvertedTensor(f"{layer}{stem}.{match[3]}", tensor, rotary_dim, offset))
    return planned


def converted_chunks(
    file: GGUFFile, planned: list[ConvertedTensor], dtype: str, on_bytes: Callable[[int], None]
) -> Iterator[Array]:
    """The planned tensors' values, in order, in pieces of about `CHUNK_ELEMENTS`, as `dtype` (BF16 or F32).

    `on_bytes` is told how many bytes of the file each piece took. Memory stays bounded whatever the model's
    size. Raises UserError if the file becomes unreadable on the way.
    """
    try:
        descriptor = os.open(file.path, os.O_RDONLY)
    except OSError as error:
        raise UserError(f"cannot read {file.path}: {error.strerror or error}") from error
    waiting: deque[tuple[Future[Array], int]] = deque()
    try:
        # NumPy lets go of the interpreter lock while it works, so threads share the work.
        with ThreadPoolExecutor(WORKERS) as pool:
            for tensor in planned:
                for start, count in _pieces(tensor):
                    waiting.append((pool.submit(_convert, descriptor, tensor, start, count, dtype), count))
                    if len(waiting) > 2 * WORKERS:
                        yield _next(waiting, file, on_bytes)
            while waiting:
                yield _next(waiting, file, on_bytes)
    finally:
        os.close(descriptor)


def _next(waiting: deque[tuple[Future[Array], int]], file: GGUFFile, on_bytes: Callable[[int], None]) -> Array:
    future, count = waiting.popleft()
    try:
        values = future.result()
    except OSError as error:
        raise UserError(f"cannot read {file.path}: {error.strerror or error}") from error
    on_bytes(count)
    return values


def _pieces(tensor: ConvertedTensor) -> Iterator[tuple[int, int]]:
    """(first byte, bytes) of pieces made of whole rows and, where rows are permuted, of whole heads."""
    source = tensor.source
    # A vector is one row, unless its single elements have to be put in another order.
    rows = source.shape[0] if len(source.shape) > 1 or tensor.rotary_dim else 1
    elements = int(np.prod(source.shape)) // rows
    unit = tensor.rotary_dim or 1
    step = max(1, CHUNK_ELEMENTS // (elements * unit)) * unit
    row_bytes = source.nbytes // rows
    for row in range(0, rows, step):
        yield source.start + row * row_bytes, min(step, rows - row) * row_bytes


def _convert(descriptor: int, tensor: ConvertedTensor, start: int, count: int, dtype: str) -> Array:
    raw = np.empty(count, np.uint8)
    if os.preadv(descriptor, [memoryview(raw)], start) != count:
        raise OSError("the file became shorter while it was being read")
    if tensor.rotary_dim:
        # GGUF puts the two halves of a head's rotary pairs next to each other: row (i, half) -> row (half,
        # i).
        row_bytes = tensor.source.nbytes // tensor.source.shape[0]
        raw = raw.reshape(-1, tensor.rotary_dim // 2, 2, row_bytes).swapaxes(1, 2).reshape(-1)
    # One long row: the package would otherwise work on 16 rows at a time, which is slow for narrow ones.
    values = dequantize(raw.reshape(1, -1), tensor.source.kind)
    if tensor.offset:
        values = values - np.float32(tensor.offset)
    return values.astype(DTYPES[dtype], copy=False)
