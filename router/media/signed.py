"""Signed URLs: which part of the query names the object, and which only proves a right to it.

A signed URL changes with every request although the object stays the same.
The parameters are those of AWS (SigV4, SigV2, CloudFront), Google Cloud
Storage, Azure SAS and Alibaba OSS.
"""

from __future__ import annotations

from hashlib import blake2b

from router.media.url import MediaUrl

_PROOFS = frozenset({"x-amz-signature", "x-goog-signature", "x-oss-signature", "signature", "sig"})
_AROUND = frozenset(
    {
        *("x-amz-algorithm", "x-amz-credential", "x-amz-date", "x-amz-expires"),
        *("x-amz-security-token", "x-amz-signedheaders"),
        *("x-goog-algorithm", "x-goog-credential", "x-goog-date", "x-goog-expires"),
        "x-goog-signedheaders",
        *("x-oss-signature-version", "x-oss-credential", "x-oss-date", "x-oss-expires"),
        *("expires", "policy", "key-pair-id", "awsaccesskeyid", "googleaccessid", "ossaccesskeyid"),
        *("sv", "st", "se", "sr", "sp", "spr", "sip", "skoid", "sktid", "skt", "ske", "sks", "skv"),
    }
)

# Names are kept by the ten thousand, and a URL may have as many characters.
_LONGEST_NAME = 512


def without_signature(target: str) -> str:
    """Path and query without the parameters of a signature.

    A target that carries no signature comes back unchanged, whatever its other
    parameters are called: `?id=1` and `?id=2` differ, and so do `?sp=1` and `?sp=2`.
    """
    path, question, query = target.partition("?")
    if not question:
        return target
    parameters = query.split("&")
    names = [parameter.partition("=")[0].lower() for parameter in parameters]
    if _PROOFS.isdisjoint(names):
        return target
    kept = [
        parameter
        for parameter, name in zip(parameters, names, strict=True)
        if name not in _PROOFS and name not in _AROUND
    ]
    return path + question + "&".join(kept) if kept else path


def object_name(url: MediaUrl) -> str:
    """A remote reference without its signature: the same for the same object."""
    return short_name(f"{url.scheme}://{url.netloc}{without_signature(url.target)}")


def short_name(reference: str) -> str:
    """The reference itself, or what stands for one that is too long to be kept."""
    if len(reference) <= _LONGEST_NAME:
        return reference
    # No parsed reference has a fragment, so none is called like this.
    return f"#{blake2b(reference.encode(), digest_size=32).hexdigest()}"
