"""Safetensors files, strictly: a header that is checked against the file's size, and tensors read by their
offset.

The format is 8 bytes of header length (little endian), that many bytes of JSON, then the tensors' bytes back
to back. It is read here with plain file offsets rather than through `safetensors.safe_open`, which maps the
whole file into memory: every page a load has touched would then count as resident until the file is closed.
"""

import json
import math
import os
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from pagedjax.config import UserError

DTYPES: Mapping[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "U16": np.dtype(np.uint16),
    "I16": np.dtype(np.int16),
    "U32": np.dtype(np.uint32),
    "I32": np.dtype(np.int32),
    "U64": np.dtype(np.uint64),
    "I64": np.dtype(np.int64),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
}

# The limit of the reference implementation; a damaged length field would otherwise ask for terabytes.
MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where one tensor lies: `shape` elements of `dtype` from byte `start` of `path` on."""

    path: Path
    start: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes on disk."""
        return math.prod(self.shape) * self.dtype.itemsize


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Every tensor of one safetensors file, by name.

    Raises UserError, naming the file, when it cannot be read, when the header is damaged or does not agree
    with the file's size, or when a tensor has a dtype that is not one of `DTYPES` (fp8 and other quantised
    forms).
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            if len(prefix) < 8:
                raise _damaged(path, f"only {size} bytes")
            (header_bytes,) = struct.unpack("<Q", prefix)
            if header_bytes > min(size - 8, MAX_HEADER_BYTES):
                raise _damaged(path, f"the header's length says {header_bytes} bytes, the file has {size}")
            raw = file.read(header_bytes)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    try:
        header = json.loads(raw)
    except ValueError as error:
        raise _damaged(path, "its header is no JSON") from error
    if not isinstance(header, dict):
        raise _damaged(path, "its header is no JSON object")
    header.pop("__metadata__", None)
    tensors = {name: _stored(path, name, entry, 8 + header_bytes) for name, entry in header.items()}
    _check_cover(path, tensors, 8 + header_bytes, size)
    return tensors


def _stored(path: Path, name: str, entry: object, base: int) -> StoredTensor:
    """One entry of the header, `{"dtype", "shape", "data_offsets"}`; `base` is the data's first byte."""
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise _damaged(path, f"the entry of tensor {name!r} is incomplete")
    code, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise _damaged(path, f"tensor {name!r} has a bad shape or bad offsets")
    if not isinstance(code, str):
        raise _damaged(path, f"tensor {name!r} has no dtype")
    if code not in DTYPES:
        raise UserError(
            f"{path}: tensor {name!r} is stored as {code}, which cannot be read; "
            "use a checkpoint in bfloat16, float16 or float32"
        )
    tensor = StoredTensor(path, base + offsets[0], DTYPES[code], tuple(shape))
    if tensor.nbytes != offsets[1] - offsets[0]:
        raise _damaged(path, f"tensor {name!r} takes {tensor.nbytes} bytes, its offsets say otherwise")
    return tensor


def _check_cover(path: Path, tensors: Mapping[str, StoredTensor], base: int, size: int) -> None:
    """The tensors must fill the file from `base` to its end, without a gap or an overlap."""
    position = base
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].nbytes)):
        if tensor.start != position:
            raise _damaged(path, f"tensor {name!r} begins at byte {tensor.start}, expected {position}")
        position += tensor.nbytes
    if position != size:
        raise _damaged(path, f"its tensors end at byte {position}, the file at byte {size}")


def _are_sizes(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _damaged(path: Path, why: str) -> UserError:
    return UserError(f"{path} is truncated or damaged ({why}); download or copy it again")


def read_tensor(tensor: StoredTensor) -> np.ndarray[Any, np.dtype[Any]]:
    """The tensor's values, [*shape] in the dtype as stored, in memory of their own.

    Raises UserError when the file has gone or become shorter since it was opened.
    """
    values = np.empty(tensor.shape, tensor.dtype)
    # uint8 first: the buffer protocol does not know bfloat16.
    buffer = memoryview(values.reshape(-1).view(np.uint8))
    try:
        with tensor.path.open("rb", buffering=0) as file:
            file.seek(tensor.start)
            filled = 0
            while filled < len(buffer):
                # One read returns at most 2 GiB on Linux.
                count = file.readinto(buffer[filled:])
                if not count:
                    raise _damaged(tensor.path, "it ended while it was being read")
                filled += count
    except OSError as error:
        raise UserError(f"cannot read {tensor.path}: {error.strerror or error}") from error
    return values


def write_tensors(
    path: Path,
    layout: Mapping[str, tuple[str, tuple[int, ...]]],
    chunks: Iterable[np.ndarray[Any, np.dtype[Any]]],
) -> None:
    """Writes a safetensors file in one pass and flushes it to the disk.

    `layout` gives each tensor's dtype (a key of `DTYPES`) and shape, in file order. `chunks` are the values,
    in the same order, cut anywhere. Raises ValueError if the chunks do not fill the layout exactly, OSError
    from the disk.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # Hugging Face loaders insist on the format
    position = 0
    for name, (code, shape) in layout.items():
        end = position + math.prod(shape) * DTYPES[code].itemsize
        header[name] = {"dtype": code, "shape": list(shape), "data_offsets": [position, end]}
        position = end
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)  # the data then begins aligned
    written = 0
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        for chunk in chunks:
            written += file.write(np.ascontiguousarray(chunk).reshape(-1).view(np.uint8))
        file.flush()
        os.fsync(file.fileno())
    if written != position:
        raise ValueError(f"{path}: {written} bytes written, the layout has {position}")
