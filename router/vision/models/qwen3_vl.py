"""Qwen3-VL (and the Qwen3.5/3.6 models that see): as Qwen2-VL, with its own sizes.

The only family here whose anchors a vLLM worker expands by itself exactly as
the chat template writes them, for images and for videos.
"""

from __future__ import annotations

from router.vision.files import ModelFiles
from router.vision.models.qwen2_vl import Qwen2VL
from router.vision.plan import Modality


class Qwen3VL(Qwen2VL):
    """Images of Qwen3-VL checkpoints."""

    family = "qwen3_vl"
    worker_expandable: frozenset[Modality] = frozenset({"image", "video"})

    def __init__(self, files: ModelFiles) -> None:
        super().__init__(files)
