"""One strict reading of a reference."""

from __future__ import annotations

import string

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from yarl import URL

from router.faults import Fault, Reason
from router.media.url import join, parse

INVALID = Reason.MEDIA_URL_INVALID


def reason(url: str) -> Reason:
    with pytest.raises(Fault) as caught:
        parse(url, index=0)
    return caught.value.reason


@pytest.mark.parametrize(
    "url",
    [
        r"http://127.0.0.1:6666\@1.1.1.1/x.png",
        r"http://1.1.1.1\x.png",
        "http://127.0.0.%31/",
        "http://exa\tmple.com/",
        "http://example.com./x.png",
        "http://user@example.com/",
        "http://u:p@example.com/",
        "http://example.com/a b.png",
        " http://example.com/",
        "http://example.com/\r\nHost: internal",
        "http://example.com/x\u200b.png",
        "http://example.com/x\u202egnp",
        "http://example.com/\x00",
        "http://",
        "http:///x.png",
        "http:x.png",
        "http:/example.com/x.png",
        "http://example.com:0/",
        "http://example.com:080/",
        "http://example.com:65536/",
        "http://example.com:99999999999/",
        "http://example.com:/",
        "http://example.com:8x/",
        "http://2130706433/",
        "http://127.1/",
        "http://0x7f000001/",
        "http://0x7f.0.0.1/",
        "http://0177.0.0.1/",
        "http://127.0.0.01/",
        "http://1.2.3.4.5/",
        "http://256.0.0.1/",
        "http://[::1/",
        "http://[::1%25eth0]/",
        "http://[fe80::1%eth0]/",
        "http://[1.2.3.4]/",
        "http://::1/",
        "http://１２７.0.0.1/",
        "http://example。com/",
        "http://-a.example/",
        "http://a..b/",
        "http://.example.com/",
        "http://" + "a" * 64 + ".com/",
        "http://" + ".".join(["a" * 60] * 5) + "/",
        "http://example.com/" + "a" * 20000,
        "http://exa[mple.com/",
        "",
        "/etc/passwd",
        "example.com/x.png",
        "//example.com/x.png",
    ],
)
def test_what_two_readers_could_take_differently_is_refused(url: str) -> None:
    assert reason(url) is INVALID


@pytest.mark.parametrize("scheme", ["ftp", "gopher", "s3", "javascript", "blob", "unix", "dict"])
def test_other_schemes_are_named_unsupported(scheme: str) -> None:
    assert reason(f"{scheme}://example.com/x") is Reason.MEDIA_SCHEME_UNSUPPORTED


@pytest.mark.parametrize(
    ("url", "host", "port", "target"),
    [
        ("http://Example.COM", "example.com", 80, "/"),
        ("HTTPS://example.com/x.png?a=1&b=%2F", "example.com", 443, "/x.png?a=1&b=%2F"),
        ("http://example.com:8080/x#frag", "example.com", 8080, "/x"),
        ("https://example.com?q=1", "example.com", 443, "/?q=1"),
        ("https://bücher.example/ü.png", "xn--bcher-kva.example", 443, "/%C3%BC.png"),
        ("https://a_b.example/%2e%2E/x", "a_b.example", 443, "/%2e%2E/x"),
        ("http://1.2.3.4/x", "1.2.3.4", 80, "/x"),
        ("http://[2001:4860:4860::8888]:8080/x", "2001:4860:4860::8888", 8080, "/x"),
    ],
)
def test_a_plain_reference_keeps_its_meaning(url: str, host: str, port: int, target: str) -> None:
    parsed = parse(url, index=0)
    assert (parsed.host, parsed.port, parsed.target) == (host, port, target)
    assert parsed.text == url


def test_an_ip_literal_is_known_as_one() -> None:
    assert str(parse("http://[::ffff:10.0.0.1]/", index=0).address) == "::ffff:a00:1"
    assert str(parse("http://10.0.0.1/", index=0).address) == "10.0.0.1"
    assert parse("http://ten.example/", index=0).address is None


def test_neither_repr_nor_redacted_shows_more_than_scheme_and_host() -> None:
    parsed = parse("https://h.example/secret/path?token=SECRET", index=0)
    assert parsed.redacted == "https://h.example"
    for text in (repr(parsed), parsed.redacted, str(parsed)):
        assert "SECRET" not in text
        assert "path" not in text
    assert "AAAA" not in repr(parse("data:;base64,AAAA", index=0))


@pytest.mark.parametrize(
    ("location", "expected"),
    [
        ("/other.png", "https://a.example/other.png"),
        ("x.png?y=1", "https://a.example/dir/x.png?y=1"),
        ("http://b.example/z", "http://b.example/z"),
        ("//b.example:81/z", "https://b.example:81/z"),
    ],
)
def test_a_redirect_is_read_like_a_fresh_reference(location: str, expected: str) -> None:
    assert join(parse("https://a.example/dir/y", index=0), location, index=0).dialled == expected


@pytest.mark.parametrize(
    ("location", "expected"),
    [
        ("file:///etc/passwd", Reason.MEDIA_SCHEME_UNSUPPORTED),
        ("data:image/png;base64,AAAA", Reason.MEDIA_SCHEME_UNSUPPORTED),
        ("ftp://b.example/", Reason.MEDIA_SCHEME_UNSUPPORTED),
        (r"http://b.example\@c.example/", INVALID),
        ("http://u:p@b.example/", INVALID),
        ("http://[::1", INVALID),
    ],
)
def test_a_redirect_cannot_leave_the_rules(location: str, expected: Reason) -> None:
    with pytest.raises(Fault) as caught:
        join(parse("https://a.example/", index=0), location, index=5)
    assert caught.value.reason is expected
    assert caught.value.metadata["index"] == "5"


ODD = st.text(
    alphabet=st.sampled_from([*string.printable, "é", "。", "\u200b", "１", "\x7f", "\ud800"]),
    max_size=40,
)


@given(st.sampled_from(["http://", "https://", "HTTP://", "http:/", "http:\\\\", ""]), ODD, ODD)
@example("http://", "a@b", "")
@example("http://", "1.1.1.1 &@2.2.2.2# @3.3.3.3", "")
@example("http://", "127.0.0.1:80#@example.com", "/")
def test_what_is_accepted_is_dialled_as_it_was_judged(start: str, host: str, rest: str) -> None:
    """The HTTP client's own parser must see the same host, port and path as ours."""
    try:
        parsed = parse(start + host + rest, index=0)
    except Fault as fault:
        assert fault.reason in (INVALID, Reason.MEDIA_SCHEME_UNSUPPORTED)
        return
    theirs = URL(parsed.dialled, encoded=True)
    assert theirs.raw_host == parsed.host
    assert theirs.port == parsed.port
    assert theirs.scheme == parsed.scheme
    assert theirs.raw_path_qs == parsed.target
    assert theirs.user is None
    assert theirs.password is None
    again = parse(parsed.dialled, index=0)
    assert (again.host, again.port, again.target) == (parsed.host, parsed.port, parsed.target)


def test_a_scheme_is_looked_for_at_the_beginning_alone() -> None:
    # A walk over all of it would hold up the loop for a second.
    with pytest.raises(Fault) as caught:
        parse("a" * 100 + "://a.example/", index=0)
    assert caught.value.reason is INVALID
    assert "no scheme" in caught.value.message


@given(ODD)
def test_every_text_is_either_read_or_refused_with_a_client_fault(text: str) -> None:
    try:
        parse(text, index=0)
    except Fault as fault:
        assert "0" in fault.message
