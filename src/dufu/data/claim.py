"""Files under construction: one writer at a time, complete under their own name or not there at all.

A file is written as `NAME.part` and renamed when it is complete. The part is locked while its writer lives; one that a killed writer left
behind carries no lock, and the next writer takes it over.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from dufu.errors import DataError

# What a file system without locks answers; a writer then goes on unlocked, and the rename alone keeps the result whole.
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}


def part_of(path: str | Path) -> Path:
    """Return the name under which a file is written."""
    return Path(f"{path}.part")


def claim(path: str | Path, wait: bool = False) -> BinaryIO:
    """Open `PATH.part`, empty, for this process alone.

    Args:
        path: the name of the finished file; its folder is made.
        wait: whether to wait for another writer of the same file, or to refuse.

    Raises:
        DataError: another process is writing the file, or the place cannot be written.
    """
    part = part_of(path)
    with disk_errors(part):
        part.parent.mkdir(parents=True, exist_ok=True)
        while True:
            # Not truncated before the lock is held: until then it may be another writer's.
            file = os.fdopen(os.open(part, os.O_RDWR | os.O_CREAT, 0o666), "r+b")
            if not _lock(file.fileno(), wait):
                file.close()
                raise DataError(f"{path}: another process is writing it")
            try:
                still_there = os.path.samestat(os.fstat(file.fileno()), part.stat())
            except FileNotFoundError:
                still_there = False
            if still_there:
                file.truncate(0)
                return file
            file.close()  # its writer has renamed or removed it meanwhile


def _lock(handle: int, wait: bool) -> bool:
    try:
        import fcntl
    except ImportError:  # a system without POSIX locks
        return True
    try:
        fcntl.flock(handle, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    return True


def release(file: BinaryIO) -> None:
    """Close a file, whatever the disk says: a full one refuses what is left in the buffer of a file that is being given up."""
    with suppress(OSError):
        file.close()


def sync(file: BinaryIO) -> None:
    """Wait until a file's content lies on the disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Wait until a folder's names lie on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def disk_errors(path: str | Path) -> Iterator[None]:
    """Turn what the system says of a file (disk full, no permission, …) into one line that names it."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{path}: cannot be written ({error.strerror or error})") from error
