"""Work that a person need not wait for: one task at a time, in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable

from edgekv.errors import EdgeKVError, StorageError


class Background:
    """What is under way. The next task, and `wait`, come after it."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: EdgeKVError | OSError | None = None

    def start(self, task: Callable[[], object]) -> None:
        """Begin a task.

        Raises:
            EdgeKVError, OSError: as `wait`, of the task before.
        """
        self.wait()
        self._thread = threading.Thread(target=self._run, args=(task,))  # no daemon: a process ends after it
        self._thread.start()

    def wait(self) -> None:
        """Until nothing is under way.

        Raises:
            EdgeKVError, OSError: what the task failed with, told once; any other failure as the cause of a
            StorageError.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self, task: Callable[[], object]) -> None:
        try:
            task()
        except (EdgeKVError, OSError) as error:
            self._error = error
        except Exception as error:  # a bug or no memory: whoever waits is to be told, and there is nobody here to tell
            self._error = StorageError(f"Saving ended with {error!r}.")
            self._error.__cause__ = error
