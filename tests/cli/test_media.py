from pathlib import Path

import pytest

from router.cli.media import mime_type

IMAGES = Path(__file__).parents[1] / "data" / "images"


@pytest.mark.parametrize(
    ("name", "mime"),
    [
        ("photo_640x480.jpg", "image/jpeg"),
        ("palette_203x151.png", "image/png"),
        ("still_203x151.gif", "image/gif"),
        ("rgba_203x151.webp", "image/webp"),
        ("photo_203x151.bmp", "image/bmp"),
        ("photo_203x151.tif", "image/tiff"),
        ("photo_203x151.avif", "image/avif"),
        ("bad_text.jpg", "application/octet-stream"),
        ("bad_empty.jpg", "application/octet-stream"),
    ],
)
def test_the_type_is_read_from_the_content_not_the_name(name: str, mime: str) -> None:
    assert mime_type((IMAGES / name).read_bytes()) == mime


def test_an_mp4_file_is_a_video() -> None:
    assert mime_type(b"\0\0\0\x20ftypisom") == "video/mp4"
