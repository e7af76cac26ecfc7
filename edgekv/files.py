"""Writing files so that nothing half-written is ever found, and saying plainly when the disk will not have them.

Everything is written beside its destination under a hidden temporary name, flushed to the disk, and renamed into place
at the end; the rename is atomic on one file system. A failure or a Ctrl-C removes the temporary; what a killed process
left is removed by `remove_leftovers`, under the lock that shows that nobody is writing.
"""

from __future__ import annotations

import errno
import glob
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

_ROOM = "Free some space there, or choose another place."
_RIGHTS = "Choose a place that you may write to."
_OTHER = "Choose another place."
_REMEDIES = {
    errno.ENOSPC: _ROOM, errno.EDQUOT: _ROOM, errno.EFBIG: _ROOM,
    errno.EROFS: _RIGHTS, errno.EACCES: _RIGHTS, errno.EPERM: _RIGHTS,
    errno.ENOTDIR: _OTHER, errno.EISDIR: _OTHER, errno.EEXIST: _OTHER, errno.ENOENT: _OTHER,
    errno.ENAMETOOLONG: "Choose a shorter name.",
}  # fmt: skip
"""What to do about each error that is the disk's or the user's doing; any other is passed on."""


@contextmanager
def atomic_file(path: Path, *, private: bool = False) -> Iterator[Path]:
    """Yield a temporary path; when the block ends without an error, it becomes `path`.

    Args:
        private: only its owner may read it.

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
            if not private:  # as mkstemp made it
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
            _replace_directory(part, path)
        finally:
            shutil.rmtree(part, ignore_errors=True)


def expanded(path: str | os.PathLike[str]) -> Path:
    """A path with `~` as shells read it: what begins with ~ and names no user's home stays as it is."""
    return Path(os.path.expanduser(path))


def check_writable(path: Path) -> None:
    """Refuse a file that cannot be written, before a long run would find out at its end. Nothing is left behind.

    Raises:
        StorageError: the disk is full, read-only or not permitted, or the path is a folder.
    """
    with _storage_errors(path):
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        folder = next(parent for parent in path.resolve().parents if parent.exists())
        with tempfile.TemporaryFile(dir=folder):
            pass


@contextmanager
def exclusive(lock: Path, waiting: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Keep other processes out while the block runs; `waiting` is called once if another one is in.

    The system frees the lock of a process that ends in any way, so nobody waits for the dead.

    Raises:
        StorageError: the lock file cannot be made.
    """
    import filelock

    held = filelock.FileLock(lock)
    with _storage_errors(lock):
        lock.parent.mkdir(parents=True, exist_ok=True)
        try:
            held.acquire(timeout=0)
        except filelock.Timeout:
            waiting()
            held.acquire()
    try:
        yield
    finally:
        held.release()


def remove_leftovers(path: Path) -> None:
    """Remove the temporaries of `path` that a killed process left. The caller holds the lock of all who write it."""
    for left in path.parent.glob(f".{glob.escape(path.name)}.*"):
        if left.suffix == ".part" and left.is_file():
            left.unlink()
        elif left.suffix in (".part", ".old"):
            shutil.rmtree(left, ignore_errors=True)


def called(path: Path) -> str:
    """What people call a model at this place: a folder's whole name, or a file's without its suffix. A link to a file
    is called as it is: hubs keep files under their hashes."""
    return path.resolve().name if path.is_dir() else path.absolute().stem


def folder_size(folder: Path) -> int:
    """Bytes of all files in a folder."""
    return sum(file.stat().st_size for file in folder.iterdir() if file.is_file())


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
        if error.errno not in _REMEDIES or not _concerns(error, path):
            raise
        raise StorageError(
            f"Could not write {path}: {error.strerror} ({_free_space(path)}); nothing was changed. "
            f"{_REMEDIES[error.errno]}"
        ) from None


def _concerns(error: OSError, path: Path) -> bool:
    """Whether the error is about what is written, and not about a file that was read meanwhile."""
    if not isinstance(error.filename, str):
        return True
    named = Path(error.filename)
    return path.is_relative_to(named) or named.is_relative_to(path.parent)


def _replace_directory(part: Path, path: Path) -> None:
    """Put a directory in a place that may be taken; what was there comes back if that fails."""
    if not path.exists():
        os.replace(part, path)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".old", dir=path.parent))
    try:
        os.replace(path, old / "old")
        os.replace(part, path)
    except BaseException:
        if (old / "old").exists() and not path.exists():
            os.replace(old / "old", path)
        raise
    finally:
        shutil.rmtree(old, ignore_errors=True)


def _free_space(path: Path) -> str:
    folder = next(parent for parent in (path, *path.resolve().parents) if parent.exists())
    return f"{format_bytes(shutil.disk_usage(folder).free)} free on that disk"


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)  # Windows flushes what may be written
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
