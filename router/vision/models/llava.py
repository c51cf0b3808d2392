"""LLaVA 1.5: one square view, the middle of the picture at the processor's size."""

from __future__ import annotations

from router.faults import Fault, Reason
from router.vision.files import ModelFiles
from router.vision.geometry import Box, Draw, whole
from router.vision.models.image_only import SquareSpec, encoder_patch, one_tile, view_tokens
from router.vision.plan import ItemPlan
from router.vision.settings import Reader, model_token

# The whole picture is resized before its middle is cut out; this is as much as a worker's
# own loader takes for a picture.
_MOST_PIXELS = 178_956_970


class Llava(SquareSpec):
    """LLaVA 1.5 checkpoints with a CLIP processor."""

    family = "llava"

    def __init__(self, files: ModelFiles) -> None:
        token = model_token(files.config, files.token_ids, "image_token_index", "<image>")
        super().__init__(token, "<image>")
        read = Reader(files.preprocessor_config, files.image_file)
        self._size = read.target("size")
        self._side = read.side("crop_size")
        if self._side > min(self._size):
            raise ValueError(f"{files.image_file}: crop_size is over size")
        read.only("do_resize", True)
        read.only("do_center_crop", True)
        read.only("do_pad", False)
        read.only("resample", 3)
        self.normalization = read.normalization()
        self.warnings = read.warnings()
        self._tokens = view_tokens(files.config, self._side // encoder_patch(files.config, 14))

    def _plan(self, index: int, source: tuple[int, int], size: tuple[int, int]) -> ItemPlan:
        width, height = source
        if len(self._size) == 1:  # the shorter side
            short = self._size[0]
            long = int(short * max(source) / min(source))
            if short * long > _MOST_PIXELS:
                raise Fault.of_item(
                    Reason.MEDIA_ASPECT_RATIO,
                    index,
                    f"{width}x{height} is too narrow for {self.family}: with a shorter side of "
                    f"{short} it has more than {_MOST_PIXELS} pixels",
                    width=width,
                    height=height,
                    limit=_MOST_PIXELS,
                )
            new_width, new_height = (short, long) if width <= height else (long, short)
        else:
            new_height, new_width = self._size
        window = Box(
            (new_width - self._side) // 2, (new_height - self._side) // 2, self._side, self._side
        )
        draw = Draw(
            crop=whole(width, height),
            height=new_height,
            width=new_width,
            window=window,
            filter="bicubic",
            rule="torch",
            layout=one_tile(self._side),
        )
        return ItemPlan(
            modality="image",
            index=index,
            source_width=width,
            source_height=height,
            width=self._side,
            height=self._side,
            grid=(1, 1),
            draws=(draw,),
            output_shape=(1, 3, self._side, self._side),
            feature_tokens=self._tokens,
            prompt_tokens=self._tokens,
        )
