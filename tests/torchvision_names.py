"""Names of the operators that importing torchvision asks for, and nothing behind them.

No torchvision on our index has operators that its torch can load. timm and transformers import it and call none of them.
"""

import torch

NAMES = torch.library.Library("torchvision", "DEF")
for box in ("nms", "qnms"):
    NAMES.define(f"{box}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
