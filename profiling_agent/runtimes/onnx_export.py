"""ONNX export of a model to one file, whose logits in ONNX Runtime have to match torch's.

Attention is exported as two products and a softmax, without a mask if nothing is masked. The exporter's own translation
of torch's fused attention takes four dimensions only, and Hiera's windows have five. Under tracing transformers can't
check for padding, and builds a mask of ones for every encoder. Each layer of the exported graph then fills it, adds it
and checks for NaN rows, which costs ONNX Runtime 12% on ViT-B. Images have no padding.

Patches are cut and joined by reshaping: the exporter would write gathers by computed indices, on which OpenVINO fails
among int8 layers (MobileViTV2's).

DINOv2 with registers resizes its position embeddings to the size of the images, bicubic with antialiasing. OpenVINO
computes that without antialiasing and without a warning, its logits are 1 to 3% from torch's: resizes of weights are
computed ahead.
"""

import copy
import inspect
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import fold, scaled_dot_product_attention, unfold
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import bidirectional_mask_function, sdpa_mask

from profiling_agent.errors import ArtifactError
from profiling_agent.lib.logs import muted, third_party_errors
from profiling_agent.lib.modules import logits_of, random_batch, relative_distance
from profiling_agent.runtimes.onnx_runtime import OnnxSession, write_bare
from profiling_agent.runtimes.registry import INPUT, OUTPUT, missing
from profiling_agent.schemas import InputSpec

# The first opset with Gelu as one operator.
OPSET = 20
# Relative distance of the logits. Float32 sums in another order are 1e-7 to 1e-6 apart on every family we tried.
TOLERANCE = 1e-4
# A trace of one image would fix the batch dimension at one.
TRACED_IMAGES = 2
CHECKED_BATCHES = (1, 3)
# Name of our attention in transformers.
PLAIN_ATTENTION = "profiling_agent_plain"


def export_onnx(model: nn.Module, path: Path, *, spec: InputSpec, is_bare: bool = False) -> float:
    """Write `model` to the ONNX file `path`; return the relative distance of ONNX Runtime's logits from torch's.

    The input `pixel_values` is (batch, channels, height, width) float32 with a dynamic batch, the output `logits`
    (batch, classes). The distance is ||onnx - torch|| / ||torch||, the largest over the batches that are checked.
    `model` isn't changed. `is_bare` drops the exporter's metadata of each node, which identifies the node's layer but
    also holds source lines of this machine. ArtifactError if the extra `onnx` isn't installed, the model can't be
    exported, or the logits are 1e-4 apart.
    """
    write_graph(model, path, spec=spec)
    if is_bare:
        import onnx

        write_bare(onnx.load(path), path)
    distance = 0.0
    for size in CHECKED_BATCHES:
        batch = random_batch(spec, size, seed=size)
        with third_party_errors(
            lambda message: ArtifactError(f"ONNX Runtime can't run the exported model ({message})")
        ):
            logits = torch.from_numpy(OnnxSession(str(path), num_threads=1).run(batch.numpy()))
        distance = max(distance, apart := relative_distance(logits, logits_of(model, batch)))
        # `not <=` so that a NaN fails.
        if not apart <= TOLERANCE:
            raise ArtifactError(
                f"ONNX Runtime's logits are {apart:.2g} from torch's (relative), {TOLERANCE:g} is allowed: "
                "deploy the saved folder instead"
            )
    return distance


def write_graph(model: nn.Module, path: Path, *, spec: InputSpec) -> None:
    """Write `model`, float32 or static int8, to ONNX without comparing its output; ArtifactError if torch can't."""
    if line := missing("onnxruntime"):
        raise ArtifactError(f"a model can't be exported to ONNX: {line}")
    wrapper, batch = _Logits(copy.deepcopy(model)).cpu().eval(), random_batch(spec, TRACED_IMAGES)
    # A model without a choice of attention stays as it is.
    if callable(set_attention := getattr(wrapper.model, "set_attn_implementation", None)):
        with muted("transformers"):
            set_attention(PLAIN_ATTENTION)
    _fit_pools_(wrapper, batch)

    def refuse(message: str) -> ArtifactError:
        return ArtifactError(f"torch can't export the model to ONNX ({message}): deploy the saved folder instead")

    with third_party_errors(refuse):
        # Fused attention that functions of torch call inside is decomposed too: its output has another layout than its
        # decomposition's, on which the exporter fails if the number of heads is odd.
        with muted("torch.onnx"), sdpa_kernel(SDPBackend.MATH), PlainOperators():
            program: Any = torch.onnx.export(
                wrapper,
                (batch,),
                dynamo=True,
                verbose=False,
                opset_version=OPSET,
                input_names=[INPUT],
                output_names=[OUTPUT],
                dynamic_shapes={INPUT: {0: "batch"}},
            )
            program.save(str(path), external_data=False)
        _fold_resizes(path)


class _Logits(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.model(pixel_values=pixel_values).logits


def _fold_resizes(path: Path) -> None:
    """Replace every antialiased resize that depends on no image by its result."""
    import onnx
    from onnx.utils import Extractor
    from onnxscript import optimizer

    model = onnx.load(path)
    for node in [node for node in model.graph.node if node.op_type == "Resize"]:
        if any(option.name == "antialias" and option.i for option in node.attribute):
            (name,) = node.output
            part = Extractor(model).extract_model([], [name])
            if not any(INPUT in inner.input for inner in part.graph.node):
                (resized,) = OnnxSession(part.SerializeToString(), num_threads=1).session.run([name], {})
                model.graph.initializer.append(onnx.numpy_helper.from_array(resized, name))
                model.graph.node.remove(node)
                optimizer.remove_unused_nodes(model)
                onnx.save(model, path)


def _fit_pools_(model: nn.Module, batch: Tensor) -> None:
    """Shrink pooling windows that are larger than their input to its size; OpenVINO refuses larger ones.

    transformers' EfficientNet ends with a window as wide as it has channels, which torch cuts to the image.
    """

    def fit(pool: Any, inputs: tuple[Tensor, ...]) -> None:
        if _as_pair(pool.padding) == (0, 0):
            pool.kernel_size = tuple(map(min, _as_pair(pool.kernel_size), inputs[0].shape[-2:]))

    pools = [module for module in model.modules() if isinstance(module, (nn.AvgPool2d, nn.MaxPool2d))]
    handles = [module.register_forward_pre_hook(fit) for module in pools]
    if handles:
        with torch.inference_mode():
            model(batch)
    for handle in handles:
        handle.remove()


def _as_pair(sides: Any) -> tuple[int, int]:
    first, second = (sides, sides) if isinstance(sides, int) else sides
    return first, second


class PlainOperators(TorchFunctionMode):
    """Mode with plain attention, and `unfold` and `fold` that reshape and permute if patches adjoin and fill the image."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keywords = dict(kwargs or {})
        if func is scaled_dot_product_attention:
            return _attention(*args, **keywords)
        if func not in (unfold, fold):
            return func(*args, **keywords)
        bound = inspect.signature(func).bind(*args, **keywords)
        bound.apply_defaults()
        options, is_fold = bound.arguments, func is fold
        image: Tensor = options["input"]
        sides = {name: _as_pair(options[name]) for name in ("kernel_size", "stride", "padding", "dilation")}
        rows, columns = sides["kernel_size"]
        height, width = _as_pair(options["output_size"]) if is_fold else image.shape[-2:]
        is_plain = [*sides.values()] == [(rows, columns), (rows, columns), (0, 0), (1, 1)]
        if not is_plain or image.dim() != (3 if is_fold else 4) or height % rows or width % columns:
            return func(*args, **keywords)
        down, across, channels = height // rows, width // columns, image.shape[1]
        if is_fold:
            channels = channels // (rows * columns)
            parts = image.reshape(-1, channels, rows, columns, down, across).permute(0, 1, 4, 2, 5, 3)
            return parts.reshape(-1, channels, height, width)
        parts = image.reshape(-1, channels, down, rows, across, columns).permute(0, 1, 3, 5, 2, 4)
        return parts.reshape(-1, channels * rows * columns, down * across)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,  # noqa: ARG001 - of training
    is_causal: bool = False,  # noqa: FBT001, FBT002 - torch's signature
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return softmax(QK'·scale + mask)V for inputs (..., heads, tokens, width), as torch's fused attention does."""
    if enable_gqa:
        key, value = (each.repeat_interleave(query.shape[-3] // each.shape[-3], -3) for each in (key, value))
    if is_causal:
        attn_mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril()
    scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, torch.finfo(scores.dtype).min)
    elif attn_mask is not None:
        scores = scores + attn_mask
    return scores.softmax(dim=-1) @ value


def _attend(
    module: nn.Module,  # noqa: ARG001
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Return plain attention, (batch, tokens, heads, width), for inputs (batch, heads, tokens, width)."""
    return _attention(query, key, value, attention_mask, scale=scaling).transpose(1, 2).contiguous(), None


def _mask(
    *,
    mask_function: Any,
    attention_mask: Tensor | None = None,
    allow_is_bidirectional_skip: bool = False,
    **options: Any,
) -> Tensor | None:
    # Not allowed if the model adds another mask to this one.
    if allow_is_bidirectional_skip and mask_function is bidirectional_mask_function and attention_mask is None:
        return None
    return sdpa_mask(mask_function=mask_function, attention_mask=attention_mask, **options)


AttentionInterface.register(PLAIN_ATTENTION, _attend)
AttentionMaskInterface.register(PLAIN_ATTENTION, _mask)
