"""file: references, from under one configured root and nowhere else.

The path is walked one component at a time from a descriptor of the root, never
following a link, so that what was checked is what gets opened, whoever renames
directories meanwhile. A link inside the root is refused as well: only regular
files and plain directories count.
"""

from __future__ import annotations

import os
import stat
from io import BufferedReader
from pathlib import Path

from router.faults import Fault, Reason
from router.media.url import MediaUrl

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# O_NONBLOCK: opening a FIFO would otherwise wait for a writer.
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def size(root: Path | None, url: MediaUrl, *, index: int) -> int:
    """The size in bytes of the file a reference names. Blocks.

    Raises Fault FILE_FORBIDDEN for anything that may not be read (and does not
    say whether it exists), MEDIA_NOT_FOUND for a missing file under the root.
    """
    with _opened(root, url, index) as file:
        return os.fstat(file.fileno()).st_size


def read(root: Path | None, url: MediaUrl, *, size: int, index: int) -> bytes:
    """The whole file, which must still have `size` bytes. Blocks.

    Raises as `size`, and MEDIA_FETCH_FAILED when the file has changed its size.
    """
    with _opened(root, url, index) as file:
        data = file.read(size + 1)
    if len(data) != size:
        raise Fault.of_item(Reason.MEDIA_FETCH_FAILED, index, "the file changed while it was read")
    return data


def _opened(root: Path | None, url: MediaUrl, index: int) -> BufferedReader:
    if root is None:
        raise Fault.of_item(Reason.FILE_FORBIDDEN, index, "file URLs are not enabled")
    below = _below(root, url.path)
    if not below:
        raise _forbidden(index)
    directory = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in below[:-1]:
            inner = os.open(part, _DIRECTORY, dir_fd=directory)
            os.close(directory)
            directory = inner
        file = os.open(below[-1], _FILE, dir_fd=directory)
    except FileNotFoundError:
        raise Fault.of_item(Reason.MEDIA_NOT_FOUND, index, "the file does not exist") from None
    except OSError:
        raise _forbidden(index) from None
    finally:
        os.close(directory)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise _forbidden(index)
    return os.fdopen(file, "rb")


def _below(root: Path, path: bytes) -> list[bytes]:
    """The components of `path` under the root; empty where it is not under it."""
    parts = [part for part in path.split(b"/") if part not in (b"", b".")]
    if b".." in parts:
        return []
    for spelling in (root, root.resolve()):
        base = [part for part in os.fsencode(spelling).split(b"/") if part]
        if parts[: len(base)] == base:
            return parts[len(base) :]
    return []


def _forbidden(index: int) -> Fault:
    return Fault.of_item(Reason.FILE_FORBIDDEN, index, "the file may not be read")
