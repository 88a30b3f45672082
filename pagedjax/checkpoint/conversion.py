"""A GGUF file becomes, once, a folder of safetensors, `config.json` and `tokenizer.json` in the cache."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tqdm import tqdm

from pagedjax.checkpoint.cache import file_digest, folder_in_cache
from pagedjax.checkpoint.gguf_config import generation_config, model_config
from pagedjax.checkpoint.gguf_file import read_gguf
from pagedjax.checkpoint.gguf_tokenizer import write_tokenizer
from pagedjax.checkpoint.gguf_weights import converted_chunks, plan_tensors
from pagedjax.checkpoint.tensor_file import read_header, write_tensors
from pagedjax.config import UserError

# Part of the folder's name: raise it when a conversion would come out differently than before.
CONVERSION = 1
WEIGHTS = "model.safetensors"
_STORED_AS = {"bfloat16": "BF16", "float32": "F32"}

# Told (bytes of the file done, bytes in all) while a file is converted.
Progress = Callable[[int, int], None]


def converted_gguf(path: Path, dtype: str, *, with_tokenizer: bool = True, progress: Progress | None = None) -> Path:
    """The cache folder with the converted `path`; converts it on first use.

    `dtype` is `bfloat16` or `float32`. Without a `progress` callable, a bar on standard error shows the
    conversion. Raises UserError as `read_gguf`, `model_config`, `plan_tensors` and `write_tokenizer` do, and
    when the cache cannot be written.
    """
    name = cache_name(path.stem, file_digest(path), dtype, with_tokenizer)
    return folder_in_cache(name, is_whole, lambda folder: convert_gguf(path, folder, dtype, with_tokenizer, progress))


def cache_name(stem: str, digest: str, dtype: str, with_tokenizer: bool = True) -> str:
    """The cache folder's name: readable, and different for whatever changes its content."""
    if dtype not in _STORED_AS:
        raise UserError(f"a GGUF file converts to {' or '.join(_STORED_AS)}, not to {dtype!r}")
    bare = "" if with_tokenizer else "-bare"
    return f"gguf/{stem}-{digest[:16]}-{dtype}{bare}-v{CONVERSION}"


def is_whole(folder: Path) -> bool:
    """Whether the cache folder is there and its files are as long as they say."""
    if not folder.is_dir():
        return False
    try:
        json.loads((folder / "config.json").read_bytes())
        read_header(folder / WEIGHTS)
    except (OSError, ValueError, UserError):
        return False
    return True


def convert_gguf(
    path: Path, folder: Path, dtype: str, with_tokenizer: bool = True, progress: Progress | None = None
) -> None:
    """Converts the GGUF file `path` into files in `folder`, in memory that does not grow with the model."""
    file = read_gguf(path)
    # What can be refused is refused before the long part.
    config = model_config(file, dtype)
    planned = plan_tensors(file, config)
    if with_tokenizer:
        write_tokenizer(file, folder)
    _write_json(folder / "generation_config.json", generation_config(file))
    _write_json(folder / "config.json", config)
    code = _STORED_AS[dtype]
    layout = {tensor.name: (code, tensor.source.shape) for tensor in planned}
    total = sum(tensor.source.nbytes for tensor in planned)
    with tqdm(
        total=total, desc=f"converting {path.name}", unit="B", unit_scale=True, disable=progress is not None
    ) as bar:
        done = 0

        def advance(count: int) -> None:
            nonlocal done
            done += count
            bar.update(count)
            if progress is not None:
                progress(done, total)

        write_tensors(folder / WEIGHTS, layout, converted_chunks(file, planned, code, advance))


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False), encoding="utf-8")
