"""How the worker says no."""

from __future__ import annotations

import grpc


class Refused(Exception):
    """A call ends with `status`; `trailers` go out as trailing metadata."""

    def __init__(
        self,
        status: grpc.StatusCode,
        message: str,
        trailers: tuple[tuple[str, str], ...] = (),
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.trailers = trailers


def invalid(message: str) -> Refused:
    """The caller's own mistake."""
    return Refused(grpc.StatusCode.INVALID_ARGUMENT, message)
