"""A checkpoint folder in Hugging Face's layout: configuration, tensors by name, and the tokenizer's place."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from pagedjax.checkpoint.tensor_file import StoredTensor, read_header, read_tensor
from pagedjax.config import UserError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_PICKLED = (".bin", ".pt", ".pth", ".ckpt")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model on disk, checked and ready to be read tensor by tensor.

    `name`: what to call the model. `config`: `config.json` as it stands there, in either style of Hugging
    Face. `generation_config`: `generation_config.json`, or {}. `tokenizer_dir`: the folder with
    `tokenizer.json`, `tokenizer_config.json` and perhaps a chat template, None if there is no tokenizer.
    `is_dummy`: there are no tensors, the caller fills in random weights.
    """

    name: str
    config: Mapping[str, Any]
    generation_config: Mapping[str, Any]
    tokenizer_dir: Path | None
    is_dummy: bool = False
    tensors: Mapping[str, StoredTensor] = field(default_factory=lambda: MappingProxyType({}), repr=False)

    def names(self) -> frozenset[str]:
        """The names of all tensors."""
        return frozenset(self.tensors)

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Each tensor's shape, by name."""
        return {name: tensor.shape for name, tensor in self.tensors.items()}

    def read(self, name: str) -> np.ndarray[Any, np.dtype[Any]]:
        """One tensor, [*shape], in the dtype as stored (`ml_dtypes.bfloat16` for bfloat16), in memory of its
        own.

        Safe to call from several threads. Raises KeyError for a name that is not in `names()`, UserError when
        the file has gone or become shorter since it was opened.
        """
        return read_tensor(self.tensors[name])


def open_folder(folder: Path, name: str, *, dummy: bool, tokenizer_dir: Path | None = None) -> Checkpoint:
    """Opens a folder with `config.json` and safetensors (a single file, or shards and their index).

    With `dummy`, tensors are not looked for. `tokenizer_dir` replaces the folder's own tokenizer. Every
    file's header is checked here, so that a later `read` can only fail if the files change. Raises UserError
    naming file and remedy.
    """
    config = read_json(folder / "config.json")
    if not dummy and config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "an unknown method")
        raise UserError(f"{folder} is quantised ({method}), which cannot be loaded; use the unquantised checkpoint")
    generation = folder / "generation_config.json"
    return Checkpoint(
        name=name,
        config=config,
        generation_config=read_json(generation) if generation.is_file() else {},
        tokenizer_dir=tokenizer_dir or (folder if has_tokenizer(folder) else None),
        is_dummy=dummy,
        tensors=MappingProxyType({} if dummy else _tensors(folder)),
    )


def has_tokenizer(folder: Path) -> bool:
    """Whether the folder holds a tokenizer of any kind that Hugging Face writes."""
    return any((folder / name).is_file() for name in _TOKENIZER_FILES)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises UserError, naming the file, if there is none."""
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise UserError(
            f"{path} is missing; give a folder in Hugging Face's layout (config.json, *.safetensors)"
        ) from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise UserError(f"{path} is no JSON ({error}); download or copy it again") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} is no JSON object; download or copy it again")
    return content


def _tensors(folder: Path) -> dict[str, StoredTensor]:
    if (folder / INDEX).is_file():
        return _sharded(folder)
    files = sorted(folder.glob("*.safetensors"))
    # Some publishers add the same weights in their own layout (consolidated.safetensors): Hugging Face's name
    # wins.
    if (folder / SINGLE).is_file():
        return read_header(folder / SINGLE)
    if len(files) == 1 and not (folder / "adapter_config.json").is_file():
        return read_header(files[0])
    if (folder / "adapter_config.json").is_file():
        raise UserError(f"{folder} holds an adapter (LoRA), not a model; merge it into its base model first")
    if files:
        raise UserError(f"{folder} has {len(files)} safetensors files but no {INDEX}; download the index too")
    pickled = sorted(path.name for path in folder.iterdir() if path.suffix in _PICKLED)
    if pickled:
        raise UserError(
            f"{folder / pickled[0]} is a pickle, and loading a pickle runs whatever code is in it: "
            "convert it to safetensors"
        )
    raise UserError(f"{folder} has no safetensors files; download them, or use --load-format dummy for random weights")


def _sharded(folder: Path) -> dict[str, StoredTensor]:
    index = read_json(folder / INDEX).get("weight_map")
    if not isinstance(index, dict) or not all(isinstance(file, str) for file in index.values()):
        raise UserError(f"{folder / INDEX} has no weight_map; download or copy it again")
    tensors: dict[str, StoredTensor] = {}
    for file in sorted(set(index.values())):
        path = folder / file
        # The index is data from elsewhere: it must not lead out of the folder.
        if Path(file).name != file:
            raise UserError(f"{folder / INDEX} names {file!r}, which is not a file of this folder; download it again")
        if not path.is_file():
            raise UserError(f"{path} is missing, and {INDEX} names it; download or copy it")
        tensors |= read_header(path)
    for name, file in index.items():
        if name not in tensors or tensors[name].path.name != file:
            raise UserError(f"{folder / file} lacks tensor {name!r}, which {INDEX} says it has; download both again")
    return tensors
