"""Writing files so that nothing half-written is ever found, and saying plainly when the disk will not have them.

Everything is written beside its destination under a hidden temporary name, flushed to the disk, and renamed into place
at the end; the rename is atomic on one file system. A failure or a Ctrl-C removes the temporary.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from edgekv.errors import StorageError
from edgekv.units import MIB, format_bytes

_CHUNK = 4 * MIB


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path; when the block ends without an error, it becomes `path`.

    Raises:
        StorageError: the disk is full, read-only or not permitted; `path` is as it was.
    """
    with _storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
        os.close(handle)
        part = Path(name)
        try:
            yield part
            _flush(part)
            part.chmod(0o666 & ~_umask())
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)


@contextmanager
def atomic_directory(path: Path) -> Iterator[Path]:
    """Yield a temporary directory; when the block ends without an error, it becomes `path`, replacing what was there.

    Raises:
        StorageError: the disk is full, read-only or not permitted; `path` is as it was.
    """
    with _storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent))
        try:
            yield part
            for file in part.iterdir():
                _flush(file)
            part.chmod(0o777 & ~_umask())
            if path.exists():
                old = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".old", dir=path.parent))
                os.replace(path, old / "old")
                os.replace(part, path)
                shutil.rmtree(old, ignore_errors=True)
            else:
                os.replace(part, path)
        finally:
            shutil.rmtree(part, ignore_errors=True)


def sha256_file(path: Path, progress: Callable[[int], None] = lambda done: None) -> str:
    """The SHA-256 of a file, in hex; `progress` is told how many more bytes were read."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            progress(len(chunk))
    return digest.hexdigest()


@contextmanager
def _storage_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG):
            raise
        raise StorageError(
            f"Could not write {path}: {error.strerror} ({_free_space(path)}); nothing was changed."
        ) from None


def _free_space(path: Path) -> str:
    folder = next(parent for parent in (path, *path.resolve().parents) if parent.exists())
    return f"{format_bytes(shutil.disk_usage(folder).free)} free on that disk"


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
