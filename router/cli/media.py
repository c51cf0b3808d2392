"""Pictures and videos named on the command line, as media references."""

from __future__ import annotations

import argparse
import base64
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from router.cli.call import CommandError
from router.wire import common, engine

Kind = Literal["image", "video"]

_URL_SCHEMES = ("http://", "https://", "data:", "file:")
_MODALITIES = {"image": common.IMAGE, "video": common.VIDEO}

# Type, offset, and the bytes there.
_SIGNATURES = (
    ("image/jpeg", 0, b"\xff\xd8\xff"),
    ("image/png", 0, b"\x89PNG\r\n\x1a\n"),
    ("image/gif", 0, b"GIF8"),
    ("image/webp", 8, b"WEBP"),
    ("image/bmp", 0, b"BM"),
    ("image/tiff", 0, b"II*\0"),
    ("image/tiff", 0, b"MM\0*"),
    ("image/avif", 4, b"ftypavif"),
    ("video/webm", 0, b"\x1a\x45\xdf\xa3"),
    ("video/x-msvideo", 8, b"AVI "),
    ("video/mp4", 4, b"ftyp"),
)


@dataclass(frozen=True)
class Attachment:
    """One `--image` or `--video`; `source` is a URL or the path of a local file."""

    kind: Kind
    source: str


class AttachAction(argparse.Action):
    """Collects --image and --video into one list, in the order they were given."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[object] | None,
        option_string: str | None = None,
    ) -> None:
        attachments = [*getattr(namespace, self.dest), Attachment(self.const, str(values))]
        setattr(namespace, self.dest, attachments)


def media_ref(
    attachment: Attachment, hints: engine.MediaHints | None, *, inline: bool
) -> engine.MediaRef:
    """The reference to send; a local file's bytes travel in it.

    They go as a data: URL that every server of the wire reads, or, with
    `inline`, as they are in `MediaRef.data`, a third smaller, which mmrouter
    alone reads. Raises CommandError when a file cannot be read.
    """
    ref = engine.MediaRef(modality=_MODALITIES[attachment.kind], hints=hints)
    if attachment.source.startswith(_URL_SCHEMES):
        ref.url = attachment.source
        return ref
    if not attachment.source:
        raise CommandError(f"--{attachment.kind} names no file and no URL")
    try:
        content = Path(attachment.source).read_bytes()
    except OSError as error:
        raise CommandError(f"cannot read {attachment.source}: {error.strerror}") from error
    if inline:
        ref.data = content
    else:
        ref.url = f"data:{mime_type(content)};base64,{base64.b64encode(content).decode()}"
    return ref


def mime_type(content: bytes) -> str:
    """The media type by the first bytes; what they do not tell is the server's to judge."""
    for mime, offset, signature in _SIGNATURES:
        if content.startswith(signature, offset):
            return mime
    return "application/octet-stream"
