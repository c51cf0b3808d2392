"""Settings of media: what may be fetched, how much of it, and what it becomes."""

from __future__ import annotations

from typing import Literal

from pydantic import AliasChoices, BaseModel, Field

from router.config.values import Background, Domains, Duration, Size


class Media(BaseModel):
    """Sources, limits, memory and pixels."""

    media_allow_private_hosts: bool = Field(
        False, description="fetch media from loopback, private and link-local addresses too"
    )
    media_allowed_domains: Domains = Field(
        (), description="fetch media from these domains and their subdomains only"
    )
    media_local_root: str = Field("", description="serve file: URLs below this folder")
    media_max_bytes: Size = Field(256 << 20, gt=0, description="largest media item, encoded")
    image_max_input_bytes: Size | None = Field(
        None,
        gt=0,
        validation_alias=AliasChoices(
            "MMROUTER_IMAGE_MAX_INPUT_BYTES", "SMG_IMAGE_MAX_INPUT_BYTES"
        ),
        description="largest image, encoded, where it differs from --media-max-bytes",
    )
    video_max_input_bytes: Size | None = Field(
        None,
        gt=0,
        validation_alias=AliasChoices(
            "MMROUTER_VIDEO_MAX_INPUT_BYTES", "SMG_VIDEO_MAX_INPUT_BYTES"
        ),
        description="largest video, encoded, where it differs from --media-max-bytes",
    )
    media_max_pixels: int = Field(
        178_956_970, gt=0, description="most pixels of one picture, by its header"
    )
    media_background: Background = Field(
        "white",
        description="what transparent pictures are blended on: white or #RRGGBB; white is the "
        "workers' own unless they are started with another rgba_background_color",
    )
    media_budget_bytes: Size = Field(
        4 << 30,
        gt=0,
        description="memory for media at work in this process, half of it for files and tensors, "
        "half for decoded pixels",
    )
    media_request_bytes: Size | None = Field(
        None, gt=0, description="memory for the media of one request; by default half of the budget"
    )
    media_budget_wait: Duration = Field(
        0.05, ge=0, description="longest wait for room in the budget"
    )
    media_connect_timeout: Duration = Field(
        5.0, gt=0, description="longest wait for a connection to a media host"
    )
    media_image_timeout: Duration = Field(10.0, gt=0, description="longest download of an image")
    media_video_timeout: Duration = Field(30.0, gt=0, description="longest download of a video")
    media_fetch_retries: int = Field(
        2, ge=0, le=10, description="further tries of a download after a 5xx or a broken connection"
    )
    media_env_proxies: bool = Field(
        False, description="fetch media through the proxies that the environment names"
    )
    media_user_agent: str = Field("mmrouter", description="what media hosts are told of us")
    video_max_duration: Duration = Field(3600.0, gt=0, description="longest video")
    media_cache_bytes: Size = Field(
        512 << 20, ge=0, description="memory for fetched media and finished tensors; 0 for none"
    )
    shm: Literal["auto", "off"] = Field(
        "auto",
        description="give tensors through /dev/shm to workers that see the same one",
    )
    shm_min_bytes: Size = Field(
        1 << 20, gt=0, description="smaller tensors go in messages all the same"
    )
    media_threads: int = Field(
        0, ge=0, description="threads that decode and pack; 0 for one per CPU"
    )
    vision_backend: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="what resizes and packs pictures"
    )
