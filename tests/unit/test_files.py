"""Files appear whole or not at all, and a disk that refuses them is told about with numbers and a remedy."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from edgekv import files
from edgekv.errors import StorageError
from edgekv.files import atomic_directory, atomic_file, sha256_file

Writer = Callable[[Path], AbstractContextManager[Path]]


def write_in(part: Path, text: str) -> None:
    """Write into what atomic_file or atomic_directory gave."""
    (part / "inside" if part.is_dir() else part).write_text(text, "utf-8")


def content(path: Path) -> str:
    return (path / "inside" if path.is_dir() else path).read_text("utf-8")


def names(folder: Path) -> list[str]:
    """Everything in a folder, hidden files too."""
    return sorted(os.listdir(folder))


@pytest.fixture(params=[atomic_file, atomic_directory])
def atomic(request: pytest.FixtureRequest) -> Writer:
    """Both of them."""
    return request.param


@pytest.fixture(params=["new", "replacing"])
def target(request: pytest.FixtureRequest, tmp_path: Path, atomic: Writer) -> Path:
    """A destination that is free, and one that is taken."""
    path = tmp_path / "target"
    if request.param == "replacing":
        with atomic(path) as part:
            write_in(part, "old")
    return path


def expect_untouched(target: Path, before: list[str]) -> None:
    assert names(target.parent) == before
    if before:
        assert content(target) == "old"


def test_success_replaces_whole(atomic: Writer, target: Path) -> None:
    """The new content is there under its name only; the temporary was beside it, so that the rename is atomic."""
    with atomic(target) as part:
        assert part.parent == target.parent
        assert part.name.startswith(".")
        write_in(part, "new")
        if target.exists():
            assert content(target) == "old"
    assert content(target) == "new"
    assert names(target.parent) == ["target"]


@pytest.mark.parametrize("error", [ValueError("x"), KeyboardInterrupt(), SystemExit(3), OSError(errno.EIO, "io")])
def test_any_exception_leaves_the_old(atomic: Writer, target: Path, error: BaseException) -> None:
    """A failure in the block passes through as it is, and nothing half-written is left."""
    before = names(target.parent)
    with pytest.raises(type(error)) as caught, atomic(target) as part:  # noqa: PT012
        write_in(part, "half")
        raise error
    assert caught.value is error
    expect_untouched(target, before)


@pytest.mark.parametrize("step", ["_flush", "_umask"])
def test_interrupted_while_finishing(atomic: Writer, target: Path, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C after the block, before the rename."""
    before = names(target.parent)

    def interrupt(*arguments: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(files, step, interrupt)
    with pytest.raises(KeyboardInterrupt), atomic(target) as part:
        write_in(part, "new")
    expect_untouched(target, before)


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), KeyboardInterrupt()])
@pytest.mark.parametrize("failing_call", [1, 2])
def test_a_directory_comes_back_if_its_replacement_fails(
    tmp_path: Path, error: BaseException, failing_call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replacing a directory takes two renames; a failure of either leaves the old one in its place."""
    target, replace, calls = tmp_path / "target", os.replace, []
    with atomic_directory(target) as part:
        write_in(part, "old")

    def failing(source: Path, destination: Path) -> None:
        calls.append(source)
        if len(calls) == failing_call:
            raise error
        replace(source, destination)

    monkeypatch.setattr(os, "replace", failing)
    with pytest.raises((StorageError, KeyboardInterrupt)), atomic_directory(target) as part:
        write_in(part, "new")
    expect_untouched(target, ["target"])


def test_parents_are_made(atomic: Writer, tmp_path: Path) -> None:
    """A destination in a folder that does not exist yet."""
    with atomic(tmp_path / "a" / "b" / "target") as part:
        write_in(part, "new")
    assert content(tmp_path / "a" / "b" / "target") == "new"


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o000])
def test_permissions_follow_umask(atomic: Writer, tmp_path: Path, mask: int) -> None:
    """mkstemp makes files for their owner alone; the result is as open as any other file the user makes."""
    before = os.umask(mask)
    try:
        with atomic(tmp_path / "target") as part:
            write_in(part, "x")
        found = stat.S_IMODE((tmp_path / "target").stat().st_mode)
        whole = 0o777 if (tmp_path / "target").is_dir() else 0o666
        assert found == whole & ~mask
        assert os.umask(mask) == mask
    finally:
        os.umask(before)


@contextmanager
def refusing(monkeypatch: pytest.MonkeyPatch, number: int) -> Iterator[None]:
    """Make the flush fail the way a disk does."""

    def fail(path: Path) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(files, "_flush", fail)
        yield


@pytest.mark.parametrize("name", ["ENOSPC", "EDQUOT", "EFBIG", "EROFS", "EACCES", "EPERM"])
def test_disk_errors_say_what_to_do(atomic: Writer, target: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Path, reason, free space and a remedy in one message; what was there is untouched."""
    before = names(target.parent)
    number = getattr(errno, name)
    with refusing(monkeypatch, number), pytest.raises(StorageError) as caught, atomic(target) as part:
        write_in(part, "new")
    message = str(caught.value)
    assert str(target) in message
    assert os.strerror(number) in message
    assert " free on that disk" in message
    assert any(unit in message for unit in (" MiB free", " GiB free", " TiB free", " KiB free", " B free"))
    assert ("Free some space" in message) == (name in ("ENOSPC", "EDQUOT", "EFBIG"))
    assert "hoose" in message
    assert "\n" not in message
    expect_untouched(target, before)


def test_a_really_full_device(atomic: Writer, target: Path) -> None:
    """/dev/full refuses every byte with ENOSPC, as a full disk does."""
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    before = names(target.parent)
    with pytest.raises(StorageError, match="No space left"), atomic(target) as part:  # noqa: PT012
        write_in(part, "half")
        Path("/dev/full").write_bytes(b"x")
    expect_untouched(target, before)


def test_errors_of_reading_are_not_blamed_on_the_destination(atomic: Writer, target: Path, tmp_path: Path) -> None:
    """A source that may not be read is another file than the one that is written."""
    source = str(tmp_path.parent / "elsewhere" / "source")
    with pytest.raises(PermissionError) as caught, atomic(target):
        raise PermissionError(errno.EACCES, "Permission denied", source)
    assert not isinstance(caught.value, StorageError)
    assert caught.value.filename == source


def test_a_parent_that_is_a_file(atomic: Writer, tmp_path: Path) -> None:
    """The parent of the destination is a file: a sentence, not a NotADirectoryError."""
    (tmp_path / "file").write_text("x")
    with pytest.raises(StorageError, match="Choose another place"), atomic(tmp_path / "file" / "target") as part:
        write_in(part, "new")
    assert names(tmp_path) == ["file"]


def test_a_storage_error_inside_passes_through(tmp_path: Path) -> None:
    """A nested atomic_file reports its own path."""
    inner = StorageError("Could not write inner")
    with pytest.raises(StorageError) as caught, atomic_directory(tmp_path / "target"):
        raise inner
    assert caught.value is inner
    assert names(tmp_path) == []


LIMITED = """
import resource, sys
from pathlib import Path
from edgekv.errors import StorageError
from edgekv.files import atomic_directory, atomic_file
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
target = Path(sys.argv[2])
try:
    with {"file": atomic_file, "directory": atomic_directory}[sys.argv[1]](target) as part:
        (part / "inside" if part.is_dir() else part).write_bytes(bytes(200_000))
except StorageError as error:
    print(error)
    sys.exit(2)
"""


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_a_limit_on_file_size(kind: str, tmp_path: Path) -> None:
    """The system refuses in the middle of a file (RLIMIT_FSIZE): exit with the sentence, nothing left."""
    target = tmp_path / "target"
    done = subprocess.run([sys.executable, "-c", LIMITED, kind, target], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (2, "")
    assert "File too large" in done.stdout
    assert "nothing was changed" in done.stdout
    assert names(tmp_path) == []


def test_sha256_reports_all_bytes(tmp_path: Path) -> None:
    """The hash is that of hashlib, and the progress adds up, over more than one chunk."""
    data = bytes(range(256)) * (5 << 12)  # 5 MiB
    (tmp_path / "x").write_bytes(data)
    seen: list[int] = []
    assert sha256_file(tmp_path / "x", seen.append) == hashlib.sha256(data).hexdigest()
    assert sum(seen) == len(data)
    assert len(seen) > 1
