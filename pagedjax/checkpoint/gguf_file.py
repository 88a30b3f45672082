"""A small strict reader of GGUF files (version 2 and 3, little endian): metadata and where the tensors lie.

The `gguf` package's own reader makes several NumPy objects per vocabulary entry, which takes half a minute
for a vocabulary of 262,144 words; walking the bytes with `struct` takes a fraction of a second.
"""

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType
from gguf.quants import dequantize

from pagedjax.config import UserError

MAGIC = b"GGUF"
_SCALARS: Mapping[GGUFValueType, np.dtype[Any]] = {
    GGUFValueType.UINT8: np.dtype("<u1"),
    GGUFValueType.INT8: np.dtype("<i1"),
    GGUFValueType.UINT16: np.dtype("<u2"),
    GGUFValueType.INT16: np.dtype("<i2"),
    GGUFValueType.UINT32: np.dtype("<u4"),
    GGUFValueType.INT32: np.dtype("<i4"),
    GGUFValueType.FLOAT32: np.dtype("<f4"),
    GGUFValueType.BOOL: np.dtype("?"),
    GGUFValueType.UINT64: np.dtype("<u8"),
    GGUFValueType.INT64: np.dtype("<i8"),
    GGUFValueType.FLOAT64: np.dtype("<f8"),
}
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One tensor as it lies in the file: `nbytes` from byte `start` on, `shape` slowest axis first."""

    name: str
    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """The head of a GGUF file. Metadata values are int, float, bool, str, list (of str) or NumPy arrays."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GGUFTensor]

    def get[T](self, key: str, kind: type[T]) -> T | None:
        """One metadata value, None where there is none. Raises UserError when it is not of type `kind`."""
        value = self.metadata.get(key)
        if value is not None and type(value) is not kind:
            raise UserError(f"{self.path}: {key} is no {kind.__name__}; convert the model to GGUF again")
        return value


class _Damaged(Exception):
    """The bytes make no sense; the message says where."""


def read_gguf(path: Path) -> GGUFFile:
    """Reads everything but the tensors' values.

    Raises UserError, naming the file, when it cannot be read, is no GGUF file, is truncated or damaged, is
    one part of a split model, or holds a tensor type that the `gguf` package cannot dequantise.
    """
    try:
        with path.open("rb") as file:
            if file.read(4) != MAGIC:
                raise UserError(f"{path} is no GGUF file (it does not begin with the letters GGUF)")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                metadata, tensors = _parse(_Cursor(data, 4), path)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    except (_Damaged, UnicodeDecodeError) as error:
        raise UserError(f"{path} is truncated or damaged ({error}); download or copy it again") from error
    opened = GGUFFile(path, metadata, tensors)
    if (opened.get("split.count", int) or 1) > 1:
        raise UserError(f"{path} is one part of a split model; join them with `llama-gguf-split --merge` first")
    return opened


class _Cursor:
    """A position in the mapped file; every step is checked against the file's end."""

    def __init__(self, data: mmap.mmap, position: int) -> None:
        self.data = data
        self.position = position
        self.end = len(data)

    def skip(self, count: int) -> int:
        """Moves on by `count` bytes and returns where they begin."""
        start = self.position
        if count > self.end - start:
            raise _Damaged(f"it ends at byte {self.end}, inside something that begins at byte {start}")
        self.position = start + count
        return start

    def array(self, dtype: np.dtype[Any], count: int) -> np.ndarray[Any, np.dtype[Any]]:
        start = self.skip(count * dtype.itemsize)
        # A copy: a view would keep the mapping alive.
        return np.frombuffer(self.data[start : self.position], dtype)

    def integer(self, dtype: str) -> int:
        return int(self.array(np.dtype(dtype), 1)[0])

    def string(self) -> str:
        count = self.integer("<u8")
        start = self.skip(count)
        return self.data[start : self.position].decode("utf-8")

    def strings(self, count: int) -> list[str]:
        """`count` strings; the hot loop of a large vocabulary, so without a call of ours per string."""
        if count * 8 > self.end - self.position:
            raise _Damaged(f"a list of {count} strings does not fit in the file")
        data, position, end = self.data, self.position, self.end
        unpack = _LENGTH.unpack_from
        found: list[str] = []
        for _ in range(count):
            if position + 8 > end:
                raise _Damaged("it ends inside a list of strings")
            start = position + 8
            position = start + unpack(data, position)[0]
            if position > end:
                raise _Damaged("it ends inside a list of strings")
            found.append(data[start:position].decode("utf-8"))
        self.position = position
        return found


def _value(cursor: _Cursor) -> Any:
    """One metadata value, preceded by its type."""
    kind = _value_type(cursor)
    if kind is GGUFValueType.STRING:
        return cursor.string()
    if kind is not GGUFValueType.ARRAY:
        return cursor.array(_SCALARS[kind], 1)[0].item()
    inner, count = _value_type(cursor), cursor.integer("<u8")
    if inner is GGUFValueType.STRING:
        return cursor.strings(count)
    if inner is GGUFValueType.ARRAY:
        raise _Damaged("it holds a list of lists")
    return cursor.array(_SCALARS[inner], count)


def _value_type(cursor: _Cursor) -> GGUFValueType:
    code = cursor.integer("<u4")
    try:
        return GGUFValueType(code)
    except ValueError:
        raise _Damaged(f"unknown value type {code}") from None


def _parse(cursor: _Cursor, path: Path) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
    version = cursor.integer("<u4")
    if version not in (2, 3):
        raise UserError(
            f"{path}: GGUF version {version} cannot be read (2 and 3, little endian, can); convert it again"
        )
    tensor_count, value_count = cursor.integer("<u8"), cursor.integer("<u8")
    metadata: dict[str, Any] = {}
    for _ in range(value_count):
        key = cursor.string()
        if key in metadata:
            raise _Damaged(f"the key {key!r} stands twice")
        metadata[key] = _value(cursor)
    described = [_describe(cursor) for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise _Damaged(f"alignment {alignment} is no power of two")
    base = -(-cursor.position // alignment) * alignment
    tensors: dict[str, GGUFTensor] = {}
    for name, code, shape, offset in described:
        if name in tensors:
            raise _Damaged(f"the tensor {name!r} stands twice")
        kind = _tensor_type(path, name, code)
        tensor = GGUFTensor(name, kind, shape, base + offset, _stored_bytes(name, kind, shape))
        if offset % alignment or tensor.start + tensor.nbytes > cursor.end:
            raise _Damaged(f"tensor {name!r} reaches byte {tensor.start + tensor.nbytes} of {cursor.end}")
        tensors[name] = tensor
    return metadata, tensors


def _describe(cursor: _Cursor) -> tuple[str, int, tuple[int, ...], int]:
    """A tensor's name, type code, shape (slowest axis first, unlike in the file) and offset."""
    name = cursor.string()
    rank = cursor.integer("<u4")
    if not 1 <= rank <= 4:
        raise _Damaged(f"tensor {name!r} has {rank} axes")
    shape = tuple(int(size) for size in reversed(cursor.array(np.dtype("<u8"), rank)))
    return name, cursor.integer("<u4"), shape, cursor.integer("<u8")


def _tensor_type(path: Path, name: str, code: int) -> GGMLQuantizationType:
    try:
        kind = GGMLQuantizationType(code)
        # Trying one block of zeros is the only public way to ask. It also fills the lookup tables of the IQ
        # types before any thread needs them.
        dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except (ValueError, KeyError, NotImplementedError):
        raise UserError(
            f"{path}: tensor {name!r} has GGUF type {code}, which cannot be read; use another quantisation"
        ) from None
    return kind


def _stored_bytes(name: str, kind: GGMLQuantizationType, shape: tuple[int, ...]) -> int:
    block, block_bytes = GGML_QUANT_SIZES[kind]
    if shape[-1] % block or 0 in shape:
        raise _Damaged(f"tensor {name!r} of shape {shape} is not made of blocks of {block}")
    return math.prod(shape) // block * block_bytes
