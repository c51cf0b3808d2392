"""Telling one engine from the next one at its address: pure."""

from __future__ import annotations

from dataclasses import dataclass

# Seconds by which two readings of the same start may differ.
_SLACK = 2.0


@dataclass(frozen=True)
class Identity:
    """What stays the same for as long as an engine process lives.

    `uptime` (seconds) is the engine's own, None where it does not say;
    `read_at` is when it said so, on the router's clock. `fingerprint` is of the
    model's files.
    """

    model_path: str
    model_type: str
    served_name: str
    kv_engine_id: str
    fingerprint: str
    uptime: float | None
    read_at: float

    @property
    def same_files_expected(self) -> tuple[str, str, str]:
        """Equal for readings whose model files need not be fetched again."""
        return self.model_path, self.model_type, self.served_name

    def replaced_by(self, later: Identity, *, reconnected: bool) -> str | None:
        """Why `later` is another engine's, or None when it is this one's.

        `reconnected` says whether the connection was lost in between: only then
        can a process have been started in between that has now been up for
        longer than the first had been.
        """
        if self.same_files_expected != later.same_files_expected:
            return f"it serves {later.served_name}, and {self.served_name} no more"
        if self.kv_engine_id != later.kv_engine_id:
            return "its kv_engine_id has changed"
        if self.fingerprint != later.fingerprint:
            return "its model's files have changed"
        if self.uptime is not None and later.uptime is not None:
            if later.uptime < self.uptime:
                return f"its uptime went back from {self.uptime:.0f}s to {later.uptime:.0f}s"
            began, begins = self.read_at - self.uptime, later.read_at - later.uptime
            if reconnected and begins > began + _SLACK:
                return f"it was started {later.uptime:.0f}s ago, after the connection was lost"
        return None
