"""Where converted models are kept, and how a folder there appears all at once or not at all."""

import fcntl
import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from pagedjax.config import UserError

_READ_BYTES = 1 << 20


def cache_root() -> Path:
    """`$PAGEDJAX_CACHE`, or `pagedjax` in the user's cache folder (`$XDG_CACHE_HOME`, else `~/.cache`)."""
    own = os.environ.get("PAGEDJAX_CACHE")
    if own:
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "pagedjax"


def file_digest(path: Path) -> str:
    """The file's SHA-256, in hex, computed once and remembered under its path, size and time of change.

    Safe enough: to be served an old conversion, someone would have to change a file's content and put back
    its exact size and its modification time to the nanosecond. Nothing that writes files does so by accident,
    and someone who does it on purpose could as well write into the cache. Raises UserError when the file
    cannot be read, or changes while it is.
    """
    try:
        before = _fingerprint(path)
        memory = cache_root() / "digests" / hashlib.sha256(before.encode()).hexdigest()
        if memory.is_file():
            known = memory.read_text().strip()
            if len(known) == 64:
                return known
        digest = _sha256(path)
        if _fingerprint(path) != before:
            raise UserError(f"{path} changed while it was being read; wait until it is complete and start again")
        memory.parent.mkdir(parents=True, exist_ok=True)
        _write_at_once(memory, digest)
    except OSError as error:
        raise UserError(f"cannot read {path} or write {cache_root()}: {error.strerror or error}") from error
    return digest


def _fingerprint(path: Path) -> str:
    status = path.stat()
    return json.dumps([str(path.resolve()), status.st_size, status.st_mtime_ns])


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            digest.update(block)
    return digest.hexdigest()


def _write_at_once(path: Path, text: str) -> None:
    descriptor, partial = tempfile.mkstemp(dir=path.parent, prefix=".partial-")
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    os.replace(partial, path)


def folder_in_cache(name: str, is_whole: Callable[[Path], bool], fill: Callable[[Path], None]) -> Path:
    """The folder `name` below the cache, made with `fill(empty folder)` unless it is there and `is_whole`.

    `fill` works in a folder beside the final one, which then takes its name in one step: whoever is killed
    half way leaves nothing that could be taken for a whole folder. One process at a time fills a name (a lock
    that the system lets go of when its holder dies); others wait, then use what it made. Raises UserError
    when the cache cannot be written, and whatever `fill` raises.
    """
    final = cache_root() / name
    if is_whole(final):
        return final
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        with _locked(final.with_name(f".{final.name}.lock"), final):
            if not is_whole(final):
                _make(final, fill)
    except OSError as error:
        raise UserError(
            f"cannot write the converted model to {final} ({error.strerror or error}); "
            "free some space there or set PAGEDJAX_CACHE to another folder"
        ) from error
    return final


def _make(final: Path, fill: Callable[[Path], None]) -> None:
    partial = final.with_name(f".{final.name}.partial")
    # Only the lock's holder makes it, so one that is there already was left by a process that was killed.
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir()
    try:
        fill(partial)
        for path in partial.iterdir():
            _flush(path)
        _flush(partial)
        if final.exists():  # there, but not whole: damaged after it was made
            shutil.rmtree(final)
        partial.rename(final)
        _flush(final.parent)
    except BaseException:
        if partial.exists():
            shutil.rmtree(partial)
        raise


def _flush(path: Path) -> None:
    """Has the system write a file, or a folder's list of names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _locked(lock: Path, final: Path) -> Iterator[None]:
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"pagedjax: waiting for another process that is making {final.name}", file=sys.stderr)
            fcntl.flock(file, fcntl.LOCK_EX)
        # Closing the file gives the lock back. The file stays: removing it would let two processes lock two
        # files.
        yield
