"""A transformers model with layers that its config can't describe, by torch and transformers alone.

`profiling-agent export` puts this very file beside a model that was cut unevenly or quantized: `layers.json` says what stands
where, `weights.safetensors` has the numbers. The layers compute what the deployment does, from the same integers and scales.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.ao.quantization.fx._decomposed  # registers the operators  # pyright: ignore[reportUnusedImport]
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoConfig, AutoModelForImageClassification

# How a convolution moves; a stranger's code may read any of them, and what the float layer says of its widths.
MOVES = ("stride", "padding", "dilation", "groups")
OPS: Any = torch.ops.quantized_decomposed
PACKED: Any = torch.ops.quantized


def plain_attributes(module: nn.Module) -> dict[str, Any]:
    """Return what a module says of itself that is neither a tensor nor a module, nor does anything."""
    return {name: held for name, held in vars(module).items() if not name.startswith("_") and not callable(held)}


def border(conv: Any) -> tuple[tuple[int, int], tuple[int, int, int, int]]:
    """Return the border of a convolution that has it by name: what is on both sides, and what is on one; compilers' int8 kernels want numbers."""
    if conv.padding == "valid":
        return (0, 0), (0, 0, 0, 0)
    height, width = (step * (size - 1) for size, step in zip(conv.kernel_size, conv.dilation, strict=True))
    return (height // 2, width // 2), (0, width % 2, 0, height % 2)


class Folded(nn.Module):
    """What stands in the place of a norm whose work a convolution does: it answers as a norm that changes nothing, and keeps what is in it."""

    num_features: int
    affine: bool

    def __init__(self, like: nn.Module) -> None:
        super().__init__()
        vars(self).update(plain_attributes(like) | dict(like.named_children()))
        rest = (module for module in like.children() if not isinstance(module, nn.Identity))
        for number, module in enumerate(rest):
            self.add_module(str(number), module)

    @property
    def running_mean(self) -> Tensor:
        """Return a mean of nothing."""
        return torch.zeros(self.num_features)

    @property
    def running_var(self) -> Tensor:
        """Return a variance of one."""
        return torch.ones(self.num_features)

    @property
    def weight(self) -> Tensor | None:
        """Return scales of one, where the norm had any."""
        return self.running_var if self.affine else None

    @property
    def bias(self) -> Tensor | None:
        """Return shifts of nothing, where the norm had any."""
        return self.running_mean if self.affine else None

    def forward(self, x: Tensor) -> Tensor:
        """Return the input, or its activation."""
        for module in self.children():
            x = module(x)
        return x


class Layer(nn.Module):
    """What stands in the place of a linear layer or a convolution; it answers the plain attributes of that."""

    def __init__(self, like: nn.Module, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        vars(self).update(plain_attributes(like))
        self.moves: dict[str, Any] = {name: held for name in MOVES if (held := getattr(like, name, None)) is not None}
        self.uneven = (0, 0, 0, 0)
        if isinstance(self.moves.get("padding"), str):
            self.moves["padding"], self.uneven = border(like)
        self.steps: Tensor
        self.scale: Tensor | None
        self.bias: Tensor | None
        for name, leaf in (("steps", "weight"), ("scale", "scale"), ("bias", "bias")):
            self.register_buffer(name, tensors.get(leaf), persistent=False)

    @property
    def weight(self) -> Tensor:
        """Return the weight that it computes with, in float32."""
        weight = self.steps.float()
        return weight if self.scale is None else weight * self.scale.view(-1, *[1] * (weight.dim() - 1))

    def padded(self, x: Tensor) -> Tensor:
        """Return the input with as much of its border as lies on one side alone; rounded later, since zero stays zero."""
        return functional.pad(x, self.uneven) if any(self.uneven) else x

    def computed(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the product or the convolution."""
        return functional.conv2d(x, weight, bias, **self.moves) if self.moves else functional.linear(x, weight, bias)


class Dynamic(Layer):
    """Weights in int8 with a scale for each row, and inputs quantized as they come; or weights in float16."""

    def __init__(self, like: nn.Module, tensors: Mapping[str, Tensor], *, reduce_range: bool, **_: Any) -> None:
        super().__init__(like, tensors)
        # Without VNNI sums of two products saturate in 16 bits, wherever the model was made.
        self.options = () if self.scale is None else (reduce_range or not torch.cpu._is_vnni_supported(),)  # pyright: ignore[reportPrivateUsage]
        if self.scale is None:
            self.packed = PACKED.linear_prepack_fp16(self.weight, self.bias)
            self.run = PACKED.linear_dynamic_fp16
            return
        zeros = torch.zeros(len(self.scale), dtype=torch.long)
        integers = torch._make_per_channel_quantized_tensor(self.steps, self.scale.double(), zeros, 0)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
        self.packed, self.run = PACKED.linear_prepack(integers, self.bias), PACKED.linear_dynamic

    def forward(self, x: Tensor) -> Tensor:
        """Return x W^T + b."""
        return self.run(x, self.packed, *self.options)


class Static(Layer):
    """Weights in int8 with a scale for each output channel, and inputs on one grid of 256 steps, or of 128."""

    def __init__(self, like: nn.Module, tensors: Mapping[str, Tensor], *, reduce_range: bool, **_: Any) -> None:
        super().__init__(like, tensors)
        scale, zero = float(tensors["input_scale"]), int(tensors["input_zero_point"])
        self.grid = (scale, zero, 0, 127 if reduce_range else 255, torch.uint8)
        self.register_buffer("zeros", torch.zeros(len(tensors["scale"]), dtype=torch.int64), persistent=False)
        # A model may cast its images to the type of its first parameter, and there may be no other.
        self.typed = nn.Parameter(torch.empty(0), requires_grad=False)

    @property
    def weight(self) -> Tensor:
        """Return the weight as the steps stand for it; as an operator, which compilers make int8 products of."""
        return OPS.dequantize_per_channel.default(self.steps, self.scale, self.zeros, 0, -128, 127, torch.int8)

    def forward(self, x: Tensor) -> Tensor:
        """Return what the float layer would, from rounded inputs and weights."""
        steps = OPS.quantize_per_tensor.default(self.padded(x), *self.grid)
        return self.computed(OPS.dequantize_per_tensor.default(steps, *self.grid), self.weight, self.bias)


class Cast(Layer):
    """Weights in bfloat16, which its inputs are cast to; the output has the input's type again."""

    def __init__(self, like: nn.Module, tensors: Mapping[str, Tensor], **_: Any) -> None:
        super().__init__(like, tensors)

    def forward(self, x: Tensor) -> Tensor:
        """Return what the float layer would, computed in bfloat16."""
        return self.computed(self.padded(x).to(torch.bfloat16), self.steps, self.bias).to(x.dtype)


KINDS: dict[str, type[Layer]] = {"dynamic": Dynamic, "static": Static, "cast": Cast}


def build(described: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> nn.Module:
    """Return the model that `layers.json` describes, in eval mode.

    `config` is transformers' own, `attributes` are numbers that modules state of themselves, `identities` names norms that don't normalise any more, `layers` says
    which aren't float, and `tied` under which other name a tensor is stored.
    """
    model = AutoModelForImageClassification.from_config(AutoConfig.for_model(**described["config"]))
    for name, stated in described["attributes"].items():
        for attribute, value in stated.items():
            setattr(model.get_submodule(name), attribute, tuple(value) if isinstance(value, list) else value)
    for name in described["identities"]:
        model.set_submodule(name, Folded(model.get_submodule(name)))
    left = dict(tensors)
    for name, said in described["layers"].items():
        own = {leaf: left.pop(leaf) for leaf in list(left) if leaf.rpartition(".")[0] == name}
        plain = {leaf.rpartition(".")[2]: tensor for leaf, tensor in own.items()}
        model.set_submodule(name, KINDS[said["kind"]](model.get_submodule(name), plain, **said))
    for name, first in described["tied"].items():
        left[name] = tensors[first]
    for name, tensor in left.items():
        owner, _, leaf = name.rpartition(".")
        module = model.get_submodule(owner)
        is_weight = leaf in dict(module.named_parameters(recurse=False))
        setattr(module, leaf, nn.Parameter(tensor, requires_grad=False) if is_weight else tensor)
    return model.eval()
