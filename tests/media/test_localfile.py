"""Files come from under the root, or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from router.faults import Fault, Reason
from router.media import localfile
from router.media.url import parse


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "media"
    (root / "inner").mkdir(parents=True)
    (root / "inner" / "a b.png").write_bytes(b"picture")
    (tmp_path / "secret").write_bytes(b"secret")
    (root / "link").symlink_to(tmp_path / "secret")
    (root / "dirlink").symlink_to(tmp_path)
    (root / "inside").symlink_to(root / "inner")
    os.mkfifo(root / "fifo")
    return root


def read(root: Path | None, url: str) -> bytes:
    parsed = parse(url, index=1)
    size = localfile.size(root, parsed, index=1)
    return localfile.read(root, parsed, size=size, index=1)


def refused(root: Path | None, url: str) -> Fault:
    with pytest.raises(Fault) as caught:
        read(root, url)
    return caught.value


def test_a_file_under_the_root_is_read(root: Path) -> None:
    assert read(root, f"file://{root}/inner/a%20b.png") == b"picture"
    assert read(root, f"file://{root}//inner/./a%20b.png") == b"picture"


def test_without_a_root_no_file_is_read(root: Path) -> None:
    assert refused(None, f"file://{root}/inner/a%20b.png").reason is Reason.FILE_FORBIDDEN


@pytest.mark.parametrize(
    "path",
    [
        "/%2e%2e/secret", "/../secret", "/inner/../../secret", "/inner/%2e%2e/inner/a%20b.png",
        "/link", "/dirlink/secret", "/inside/a%20b.png", "/fifo", "/inner", "", "/",
        "x/../../etc/passwd",
    ],
)  # fmt: skip
def test_nothing_leads_out_of_the_root(root: Path, path: str) -> None:
    fault = refused(root, f"file://{root}{path}")
    assert fault.reason is Reason.FILE_FORBIDDEN
    assert str(root) not in fault.message


@pytest.mark.parametrize("url", ["file:///etc/passwd", "file:///dev/zero", "file:///proc/self/mem"])
def test_what_is_elsewhere_is_forbidden(root: Path, url: str) -> None:
    assert refused(root, url).reason is Reason.FILE_FORBIDDEN


def test_a_missing_file_is_not_found(root: Path) -> None:
    assert refused(root, f"file://{root}/inner/none.png").reason is Reason.MEDIA_NOT_FOUND


def test_a_host_part_is_forbidden() -> None:
    assert refused(Path("/srv"), "file://host/x.png").reason is Reason.FILE_FORBIDDEN


@pytest.mark.parametrize("url", ["file:///a%00b", "file:///a%5Cb", "file:///x?y", "file:///x#y"])
def test_a_malformed_path_is_refused(url: str) -> None:
    assert refused(Path("/"), url).reason is Reason.MEDIA_URL_INVALID


def test_a_file_that_grows_meanwhile_is_not_taken(root: Path) -> None:
    url = parse(f"file://{root}/inner/a%20b.png", index=0)
    with pytest.raises(Fault) as caught:
        localfile.read(root, url, size=3, index=0)
    assert caught.value.reason is Reason.MEDIA_FETCH_FAILED
