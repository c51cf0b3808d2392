"""The one reading of a media reference, for the check and for the use alike.

Two parsers that read one string differently are how a checker sees a public
host while the client dials an internal one. So a reference is parsed here,
once, strictly, and what is dialled, opened or decoded is the parsed object.
Whatever another reader might take for something else is refused: backslashes,
whitespace, control and invisible characters, user names, percent signs in the
host, dotless or octal or hexadecimal IPv4, a trailing dot, odd ports.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv6Address, ip_address
from urllib.parse import quote, unquote_to_bytes, urljoin

import idna

from router.faults import Fault, Reason

SCHEMES = ("http", "https", "data", "file")
MAX_URL_LENGTH = 16 * 1024
# The longest registered one has 33 characters.
_MAX_SCHEME = 64
# A data: header is a media type and a few parameters.
MAX_DATA_HEADER = 1024

_SCHEME = re.compile(r"([a-zA-Z][a-zA-Z0-9+.\-]*):")
_HIERARCHY = re.compile(r"//([^/?#]*)([^?#]*)(\?[^#]*)?(?:#.*)?", re.DOTALL)
_AUTHORITY = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^:\[\]]+)(?::([0-9]+))?")
_LABEL = re.compile(r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?")
_ENDS_IN_NUMBER = re.compile(r"(?:.*\.)?(?:[0-9]+|0x[0-9a-f]*)")
# RFC 3986 pchar, "/" and "?", and "%" since the reference is already encoded.
_AS_IS = "!$&'()*+,-./:;=?@_~%"
_DEFAULT_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class MediaUrl:
    """A parsed reference.

    http(s): `host` is the ASCII name to resolve, or the canonical text of
    `address`, which is set when the reference names an IP address itself;
    `target` is the path and query to send, escaped, never normalised (a
    signature covers it). data: `media_type`, `base64` and `payload_start`, the
    offset of the payload in `text`. file: `path`, decoded.

    The repr and `redacted` show scheme and host alone, so that a reference
    that lands in a log leaks neither a signature nor a picture.
    """

    text: str
    scheme: str
    host: str = ""
    port: int = 0
    target: str = ""
    address: IPv4Address | IPv6Address | None = None
    ascii_host: bool = True
    media_type: str = ""
    base64: bool = False
    payload_start: int = 0
    path: bytes = field(default=b"")

    @property
    def redacted(self) -> str:
        """Scheme and host, for logs and messages."""
        return f"{self.scheme}://{self.netloc}" if self.is_remote else f"{self.scheme}:"

    @property
    def is_remote(self) -> bool:
        """Whether a host has to be asked for it."""
        return self.scheme in _DEFAULT_PORTS

    @property
    def netloc(self) -> str:
        """Host and, where it is not the scheme's own, port: the Host header."""
        host = f"[{self.host}]" if isinstance(self.address, IPv6Address) else self.host
        return host if self.port == _DEFAULT_PORTS[self.scheme] else f"{host}:{self.port}"

    @property
    def dialled(self) -> str:
        """The absolute URL as it is sent, without the fragment."""
        return f"{self.scheme}://{self.netloc}{self.target}"

    def __repr__(self) -> str:
        return f"MediaUrl({self.redacted}, {len(self.text)} characters)"


def parse(url: str, *, index: int) -> MediaUrl:
    """Reads one reference.

    Raises Fault MEDIA_URL_INVALID or MEDIA_SCHEME_UNSUPPORTED, and
    FILE_FORBIDDEN for a file reference that names a host.
    """
    # The rest may be tens of megabytes, of which none needs to be a colon.
    match = _SCHEME.match(url, 0, _MAX_SCHEME)
    if match is None:
        raise _invalid(index, "the URL has no scheme" if url else "the URL is empty")
    scheme = match[1].lower()
    if scheme == "data":
        return _parse_data(url, match.end(), index)
    if scheme not in SCHEMES:
        raise Fault.of_item(
            Reason.MEDIA_SCHEME_UNSUPPORTED,
            index,
            f"URLs of this scheme are not supported; use one of {', '.join(SCHEMES)}",
            schemes=",".join(SCHEMES),
        )
    if len(url) > MAX_URL_LENGTH:
        raise _invalid(index, f"the URL is longer than {MAX_URL_LENGTH} characters")
    _refuse_characters(url, index)
    hierarchy = _HIERARCHY.fullmatch(url, match.end())
    if hierarchy is None:
        raise _invalid(index, f"the URL does not start with {scheme}://")
    authority, path, query = hierarchy[1], hierarchy[2], hierarchy[3] or ""
    if scheme == "file":
        return _parse_file(url, authority, path, query, index)
    return _parse_http(url, scheme, authority, path, query, index)


def join(base: MediaUrl, location: str, *, index: int) -> MediaUrl:
    """The URL a redirect from `base` names, judged like a fresh one.

    Raises Fault as `parse`, and MEDIA_SCHEME_UNSUPPORTED where a redirect
    leaves http and https.
    """
    _refuse_characters(location, index)
    try:
        joined = urljoin(base.dialled, location)
    except ValueError as error:
        raise _invalid(index, "a redirect names an invalid URL") from error
    target = parse(joined, index=index)
    if not target.is_remote:
        raise Fault.of_item(
            Reason.MEDIA_SCHEME_UNSUPPORTED, index, "a redirect leaves http and https"
        )
    return target


def _parse_http(
    url: str, scheme: str, authority: str, path: str, query: str, index: int
) -> MediaUrl:
    if "@" in authority:
        raise _invalid(index, "the URL carries a user name or password")
    if not authority:
        raise _invalid(index, "the URL has no host")
    match = _AUTHORITY.fullmatch(authority)
    if match is None:
        raise _invalid(index, "the host or port of the URL is malformed")
    host, address = _host(match[1], index)
    return MediaUrl(
        text=url,
        scheme=scheme,
        host=host,
        port=_port(match[2], scheme, index),
        target=quote(path or "/", safe=_AS_IS) + quote(query, safe=_AS_IS),
        address=address,
        ascii_host=match[1].isascii(),
    )


def _port(text: str | None, scheme: str, index: int) -> int:
    if text is None:
        return _DEFAULT_PORTS[scheme]
    if len(text) > 5 or text.startswith("0") or int(text) > 65535:
        raise _invalid(index, "the port of the URL is not a number from 1 to 65535")
    return int(text)


def _host(text: str, index: int) -> tuple[str, IPv4Address | IPv6Address | None]:
    if text.startswith("["):
        try:
            v6 = IPv6Address(text[1:-1])
        except ValueError as error:
            raise _invalid(index, "the IPv6 address of the URL is malformed") from error
        return str(v6), v6
    if "%" in text:
        raise _invalid(index, "the host of the URL is percent-encoded")
    if text.endswith("."):
        raise _invalid(index, "the host of the URL ends in a dot")
    name = text.lower() if text.isascii() else _to_ascii(text, index)
    if _ENDS_IN_NUMBER.fullmatch(name):
        # Browsers, libc and libraries disagree about 127.1, 0x7f.1 or 017700000001.
        try:
            v4 = ip_address(name)
        except ValueError as error:
            raise _invalid(index, "the IPv4 address is not four decimal numbers") from error
        return str(v4), v4
    if len(name) > 253 or not all(_LABEL.fullmatch(label) for label in name.split(".")):
        raise _invalid(index, "the host of the URL is not a valid name")
    return name, None


def _to_ascii(text: str, index: int) -> str:
    if any(dot in text for dot in "\u3002\uff0e\uff61"):
        raise _invalid(index, "the labels of the host are not separated by plain dots")
    try:
        # No UTS 46 mapping: a host that needs mapping is one that readers map differently.
        return idna.encode(text.lower()).decode("ascii").lower()
    except (idna.IDNAError, UnicodeError) as error:
        raise _invalid(index, "the host of the URL is not a valid international name") from error


def _parse_file(url: str, authority: str, path: str, query: str, index: int) -> MediaUrl:
    if authority:
        raise Fault.of_item(
            Reason.FILE_FORBIDDEN, index, "a file URL may not name a host; write file:///path"
        )
    if query or "#" in url:
        raise _invalid(index, "a file URL has neither query nor fragment")
    decoded = unquote_to_bytes(path)
    if not decoded.startswith(b"/") or b"\0" in decoded or b"\\" in decoded:
        raise _invalid(index, "the path of the file URL is malformed")
    return MediaUrl(text=url, scheme="file", path=decoded)


def _parse_data(url: str, start: int, index: int) -> MediaUrl:
    # Only the header is looked at; the payload may be tens of megabytes.
    comma = url.find(",", start, start + MAX_DATA_HEADER)
    if comma < 0:
        raise _invalid(index, "the data: URL has no comma after its media type")
    media_type, *parameters = (part.strip(" ") for part in url[start:comma].split(";"))
    return MediaUrl(
        text=url,
        scheme="data",
        media_type=media_type.lower() or "text/plain",
        base64=bool(parameters) and parameters[-1].lower() == "base64",
        payload_start=comma + 1,
    )


def _refuse_characters(text: str, index: int) -> None:
    if text.isascii():
        if text.isprintable() and " " not in text and "\\" not in text:
            return
    elif "\\" not in text and not any(unicodedata.category(c)[0] in "CZ" for c in text):
        return
    raise _invalid(
        index, "the URL contains whitespace, a backslash or a control or invisible character"
    )


def _invalid(index: int, message: str) -> Fault:
    return Fault.of_item(Reason.MEDIA_URL_INVALID, index, message)
