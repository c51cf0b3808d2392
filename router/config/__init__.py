"""Every setting of the router once, typed.

Defaults < file (TOML) < environment (`MMROUTER_A_B`) < flags (`--a-b`). The
field `a_b` is all three: its key in the file, its variable and its flag.
"""

from router.config.deciding import ModelSettings
from router.config.flags import add_flags, flags_of
from router.config.settings import TABLES, Settings
from router.config.sources import ConfigError, load, unknown_variables
from router.config.values import worker_address

__all__ = [
    "TABLES",
    "ConfigError",
    "ModelSettings",
    "Settings",
    "add_flags",
    "flags_of",
    "load",
    "unknown_variables",
    "worker_address",
]
