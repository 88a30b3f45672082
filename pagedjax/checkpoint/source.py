"""From what the user calls a model to a checkpoint: `demo`, a folder, a GGUF file, or a hub id."""

import re
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)

from pagedjax.checkpoint.checkpoint import Checkpoint, has_tokenizer, open_folder
from pagedjax.checkpoint.conversion import Progress, converted_gguf
from pagedjax.checkpoint.demo import demo_folder
from pagedjax.config import UserError

LOAD_FORMATS = ("auto", "safetensors", "gguf", "orbax", "dummy")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_TOKENIZER_PATTERNS = ["*.json", "*.jinja", "tokenizer.model", "merges.txt"]
# Weights in other layouts that some repositories carry as well.
_NOT_OURS = ["consolidated*", "original/*", "onnx/*", "*/*"]


def open_checkpoint(
    model: str,
    load_format: str = "auto",
    *,
    dtype: str = "bfloat16",
    tokenizer: str | None = None,
    progress: Progress | None = None,
) -> Checkpoint:
    """Finds, if need be downloads or converts, checks and opens a model; reads no tensor yet.

    `model`: `demo`, a folder, a `.gguf` file, or a hub id. `load_format`: one of `LOAD_FORMATS`. `dtype`:
    what a GGUF file is converted to, `bfloat16` or `float32`; other checkpoints keep theirs. `tokenizer`: a
    folder, a `tokenizer.json` or a hub id to take the tokenizer from instead. `progress` is told (bytes done,
    bytes in all) of a conversion; without it there is a bar on standard error. Raises UserError in one line
    for everything that the user can put right.
    """
    if load_format not in LOAD_FORMATS:
        raise UserError(f"unknown load format {load_format!r}; choose one of {', '.join(LOAD_FORMATS)}")
    if load_format == "orbax":
        raise UserError("load format 'orbax' is not supported yet; use a safetensors or GGUF checkpoint")
    tokenizer_dir = _tokenizer_folder(tokenizer) if tokenizer is not None else None
    path = Path(model).expanduser()
    gguf = _gguf_file(path, load_format)
    if model == "demo" or gguf is not None:
        if load_format == "safetensors":
            raise UserError(f"{model} is a GGUF model; leave out --load-format safetensors")
        # A tokenizer given in its place may be the way around one that cannot be converted.
        own = tokenizer_dir is None
        if gguf is None:
            folder = demo_folder(dtype, with_tokenizer=own, progress=progress)
        else:
            folder = converted_gguf(gguf, dtype, with_tokenizer=own, progress=progress)
        opened = open_folder(folder, "demo" if gguf is None else gguf.stem, dummy=False, tokenizer_dir=tokenizer_dir)
        if load_format == "dummy":
            return replace(opened, is_dummy=True, tensors=MappingProxyType({}))
        return opened
    if load_format == "gguf":
        raise UserError(f"{model} is not a GGUF file; leave out --load-format gguf or give the path of a .gguf file")
    if path.is_dir():
        folder, name = path, path.resolve().name
    else:
        folder, name = _from_hub(model, weights=load_format != "dummy"), model
    return open_folder(folder, name, dummy=load_format == "dummy", tokenizer_dir=tokenizer_dir)


def _gguf_file(path: Path, load_format: str) -> Path | None:
    """The GGUF file that `path` is or, as the only model in it, holds; None for anything else."""
    if path.is_file():
        return path
    if path.suffix == ".gguf" and not path.is_dir():
        raise UserError(f"{path} does not exist; give the path of a GGUF file")
    if not path.is_dir() or load_format not in ("auto", "gguf") or (path / "config.json").is_file():
        return None
    found = sorted(path.glob("*.gguf"))
    if len(found) > 1:
        raise UserError(f"{path} holds {len(found)} GGUF files; give the path of one, such as {found[0]}")
    return found[0] if found else None


def _tokenizer_folder(tokenizer: str) -> Path:
    path = Path(tokenizer).expanduser()
    folder = path.parent if path.name == "tokenizer.json" else path
    if not folder.is_dir():
        folder = _from_hub(tokenizer, weights=False)
    if not has_tokenizer(folder):
        raise UserError(f"{tokenizer} holds no tokenizer; give a folder with a tokenizer.json to --tokenizer")
    return folder


def _from_hub(model: str, *, weights: bool) -> Path:
    """Downloads, or finds in the hub's cache, configuration and tokenizer, with `weights` the tensors too."""
    if not _HUB_ID.fullmatch(model):
        raise UserError(f"{model} does not exist; give a folder, a .gguf file, a hub id (owner/name) or demo")
    patterns = [*_TOKENIZER_PATTERNS, *(["*.safetensors"] if weights else [])]
    try:
        return Path(snapshot_download(model, allow_patterns=patterns, ignore_patterns=_NOT_OURS))
    except GatedRepoError:
        raise UserError(
            f"{model} is gated; accept its terms on huggingface.co and log in with `hf auth login`"
        ) from None
    except (RepositoryNotFoundError, HFValidationError):
        raise UserError(f"{model} is neither here nor on the Hugging Face hub; check the name or path") from None
    except LocalEntryNotFoundError:
        raise UserError(
            f"{model} is neither a folder here nor in the hub's cache, and the hub cannot be reached; "
            "check the path or the network, or use the model demo"
        ) from None
    except Exception as error:
        # The hub's transport library has changed before, and its errors share no base that the hub promises.
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"cannot download {model}: {reason}") from error
