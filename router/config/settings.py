"""Every setting of the router once, typed: the sections together, and what holds among them."""

from __future__ import annotations

from pydantic import model_validator
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from router.config.attempts import Attempts
from router.config.deciding import Deciding
from router.config.faces import Faces, Security, Telling
from router.config.fleet import Fleet
from router.config.media import Media

# Fields that are tables, which no flag can give.
TABLES = frozenset({"models"})


# The last of the bases comes first, in help and everywhere else.
class Settings(Telling, Media, Attempts, Deciding, Fleet, Security, Faces, BaseSettings):
    """The router's settings. Durations are in seconds, sizes in bytes."""

    model_config = SettingsConfigDict(env_prefix="MMROUTER_", extra="forbid", frozen=True)

    @model_validator(mode="after")
    def _certificates_have_keys(self) -> Settings:
        for prefix in ("", "worker_"):
            certificate, key = f"{prefix}tls_cert", f"{prefix}tls_key"
            if bool(getattr(self, certificate)) != bool(getattr(self, key)):
                flags = [f"--{name.replace('_', '-')}" for name in (certificate, key)]
                raise ValueError(f"{flags[0]} and {flags[1]} go together")
        if self.tls_client_ca and not self.tls_cert:
            raise ValueError("--tls-client-ca needs --tls-cert and --tls-key")
        return self

    @model_validator(mode="after")
    def _processes_can_share(self) -> Settings:
        if self.processes > 1 and self.sim:
            raise ValueError(
                "--sim runs workers inside a router, so --processes cannot have them; "
                "start them with `mmrouter sim`"
            )
        if self.processes > 1 and self.listen.startswith("unix:"):
            raise ValueError("--processes share a port, so --listen has to be HOST:PORT")
        return self

    @model_validator(mode="after")
    def _discovery_is_complete(self) -> Settings:
        needed = {"file": "discovery_file", "dns": "dns_name", "kubernetes": "kube_service"}
        for kind, name in needed.items():
            if (self.discovery == kind) != bool(getattr(self, name)):
                flag = f"--{name.replace('_', '-')}"
                raise ValueError(f"--discovery {kind} and {flag} go together")
        return self

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings, env_settings)
