"""What is known of a worker before anybody has asked it: where it is, and what it is for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType


class Role(Enum):
    BOTH = "both"
    PREFILL = "prefill"
    DECODE = "decode"
    ENCODE = "encode"


@dataclass(frozen=True)
class Endpoint:
    """One worker as a source of workers describes it.

    `address` is HOST:PORT. `model` is the model that it is meant to serve, by
    its served name or its path; empty for whichever it serves.
    """

    address: str
    role: Role = Role.BOTH
    model: str = ""
    labels: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    def same_purpose(self, other: Endpoint) -> bool:
        """Whether the two differ in labels at most, which a running worker can take on."""
        return (self.address, self.role, self.model) == (other.address, other.role, other.model)


def role_named(name: str) -> Role:
    """The role of a name as people write it. Raises ValueError."""
    try:
        return Role(name.strip().lower())
    except ValueError:
        names = ", ".join(role.value for role in Role)
        raise ValueError(f"not a role: {name!r} (one of {names})") from None
