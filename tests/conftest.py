"""What tests of several folders share."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def shared_cache_folder() -> Iterator[Path]:
    """A folder for converted models and compiled steps that lives as long as the test session."""
    with tempfile.TemporaryDirectory(prefix="pagedjax-tests-") as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def step_cache(shared_cache_folder: Path) -> Iterator[Path]:
    """Lets the engines that a module starts, also in processes, use steps that are compiled already."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PAGEDJAX_CACHE", os.fspath(shared_cache_folder))
        yield shared_cache_folder
