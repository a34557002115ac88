"""timm's own preparation of images, as an image processor that transformers has for everybody: saved, and read without timm.

transformers' processor of timm models writes no file, and carries timm's transforms, which are torchvision's. What these do to a
picture is a resize by Pillow, a crop in the middle and a scale, as CLIP's processor does it. Both give the same pixels, to the
rounding of float32, where what is cut off an edge is even. Of an odd margin the one rounds the half down and the other to even,
so that timm's crop may lie one pixel lower or further right.
"""

import math
from typing import Annotated, Any, Literal

from PIL.Image import Resampling
from pydantic import Field, ValidationError
from transformers import CLIPImageProcessorPil

from profiling_agent.documents import first_problem
from profiling_agent.foreign import Refuse
from profiling_agent.records import Record

Edge = Annotated[int, Field(gt=0, le=8192)]
Channels = tuple[float, float, float]


class _Evaluation(Record):
    """What timm does to a picture before a model is evaluated on it; the defaults are timm's."""

    input_size: tuple[Literal[3], Edge, Edge] = (3, 224, 224)
    interpolation: Literal["nearest", "box", "bilinear", "hamming", "bicubic", "lanczos"] = "bicubic"
    mean: Channels = (0.485, 0.456, 0.406)
    std: Channels = (0.229, 0.224, 0.225)
    crop_pct: float = Field(default=0.875, gt=0, le=1)
    # `border` would keep the whole picture and paint its surroundings.
    crop_mode: Literal["center", "squash"] = "center"


def processor_of_timm(pretrained_cfg: Any, refuse: Refuse) -> CLIPImageProcessorPil:
    """Return the image processor that does what a timm checkpoint's `pretrained_cfg` says; raises `refuse` where none does."""
    if not isinstance(pretrained_cfg, dict):
        raise refuse("pretrained_cfg is no JSON object")
    said = {name: pretrained_cfg.get(name) for name in _Evaluation.model_fields}
    try:
        how = _Evaluation.model_validate({name: value for name, value in said.items() if value is not None})
    except ValidationError as error:
        raise refuse(f"pretrained_cfg.{first_problem(error)}") from error
    height, width = how.input_size[1:]
    scaled = {"height": math.floor(height / how.crop_pct), "width": math.floor(width / how.crop_pct)}
    if how.crop_mode == "center" and height != width:
        raise refuse(
            f"pretrained_cfg.input_size: {height}x{width} is no square, which crop_mode 'center' doesn't make of a picture"
        )
    return CLIPImageProcessorPil(
        size=scaled if how.crop_mode == "squash" else {"shortest_edge": scaled["height"]},
        resample=Resampling[how.interpolation.upper()],
        crop_size={"height": height, "width": width},
        image_mean=list(how.mean),
        image_std=list(how.std),
    )
