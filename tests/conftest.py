"""What tests of several folders share."""

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# A busy machine is no reason to fail.
_PROFILE = settings.get_profile(settings.get_current_profile_name())
settings.register_profile("without deadlines", _PROFILE, deadline=None)
settings.load_profile("without deadlines")


@pytest.fixture(scope="module", autouse=True)
def _compiled_code_goes_with_its_module() -> Iterator[None]:
    """Drop what a module's tests have compiled, and the runners they share.

    Each compiled function holds some memory mappings, and a process may have 65,530 of them (`vm.max_map_count`): all
    tests together would have more, and crash.
    """
    yield
    if "golden_models" in sys.modules:
        sys.modules["golden_models"].runner.cache_clear()
    if "jax" in sys.modules:
        sys.modules["jax"].clear_caches()


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
