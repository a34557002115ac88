"""ONNX export of a model to one file, which appears only if ONNX Runtime's logits match torch's.

Attention is exported as two products and a softmax, without a mask if nothing is masked. Under tracing transformers
can't check for padding, and builds a mask of ones for every encoder. Each layer of the exported graph then fills it, adds
it and checks for NaN rows, which costs ONNX Runtime 12% on ViT-B. Images have no padding.

Patches are cut and joined by reshaping: the exporter would write gathers by computed indices, on which OpenVINO fails
among int8 layers (MobileViTV2's).
"""

import copy
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import fold, unfold
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import bidirectional_mask_function, sdpa_mask

from profiling_agent.errors import ArtifactError
from profiling_agent.lib.io import TEMPORARY
from profiling_agent.lib.logs import muted, third_party_errors
from profiling_agent.modules.inference import logits_of, random_batch, relative_distance
from profiling_agent.quantization.kinds import quantized_modules
from profiling_agent.runtimes.base import INPUT, OUTPUT
from profiling_agent.runtimes.onnx_runtime import one_thread
from profiling_agent.schemas import InputSpec


class PlainPatches(TorchFunctionMode):
    """Mode in which `unfold` and `fold` reshape and permute if patches adjoin and fill the image."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        keywords = dict(kwargs or {})
        if func not in (unfold, fold):
            return func(*args, **keywords)
        bound = inspect.signature(func).bind(*args, **keywords)
        bound.apply_defaults()
        arguments: dict[str, Any] = bound.arguments
        image: Tensor = arguments["input"]
        height, width = _as_pair(arguments["output_size"]) if func is fold else image.shape[-2:]
        rows, columns = sides = _as_pair(arguments["kernel_size"])
        is_plain = (
            _as_pair(arguments["stride"]) == sides
            and _as_pair(arguments["padding"]) == (0, 0)
            and _as_pair(arguments["dilation"]) == (1, 1)
        )
        if not is_plain or height % rows or width % columns or image.dim() != (3 if func is fold else 4):
            return func(*args, **keywords)
        grid_height, grid_width = height // rows, width // columns
        if func is fold:
            channels = image.shape[1] // (rows * columns)
            parts = image.reshape(-1, channels, rows, columns, grid_height, grid_width).permute(0, 1, 4, 2, 5, 3)
            return parts.reshape(-1, channels, height, width)
        channels = image.shape[1]
        parts = image.reshape(-1, channels, grid_height, rows, grid_width, columns).permute(0, 1, 3, 5, 2, 4)
        return parts.reshape(-1, channels * rows * columns, grid_height * grid_width)


def _as_pair(sides: Any) -> tuple[int, int]:
    first, second = (sides, sides) if isinstance(sides, int) else sides
    return first, second


# The first opset with Gelu as one operator.
OPSET = 20
# Relative distance of the logits. Float32 sums in another order are 1e-7 to 1e-6 apart on every family we tried.
TOLERANCE = 1e-4
# A trace of one image would fix the batch dimension at one.
TRACED_IMAGES = 2
CHECKED_BATCHES = (1, 3)
POOLS = (nn.AvgPool2d, nn.MaxPool2d)
# Name of our attention in transformers.
PLAIN_ATTENTION = "profiling_agent_plain"


class _Logits(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.model(pixel_values=pixel_values).logits


def export_onnx(
    model: nn.Module, path: Path, *, spec: InputSpec, batch_size: int | None = None, is_bare: bool = False
) -> float:
    """Write `model` to the ONNX file `path`; return the relative distance of ONNX Runtime's logits from torch's.

    The input `pixel_values` is (batch, channels, height, width) float32, the output `logits` (batch, classes). The
    batch dimension is dynamic, or `batch_size` if given. The distance is ||onnx - torch|| / ||torch||, the largest over
    the batches that are checked. `model` isn't changed. `is_bare` drops the exporter's metadata of each node, which
    identifies the node's layer but also holds source lines of this machine.

    Raises:
        ArtifactError: `path` exists, the extra `onnx` isn't installed, the model is quantized or can't be exported,
            or the logits are more than 1e-4 apart; nothing is left behind.
    """
    if path.exists() or path.is_symlink():
        raise ArtifactError(f"{str(path)!r} exists already: exports never overwrite, choose another file")
    if quantized_modules(model):
        raise ArtifactError(
            "the model is quantized, and only float32 models can be exported: export its float32 parent"
        )
    _check_installed()
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.parent / f"{TEMPORARY}{path.name}-{uuid4().hex}"
    try:
        write_graph(model, temporary, spec=spec, batch_size=batch_size)
        if is_bare:
            import onnx

            from profiling_agent.runtimes.onnx_graph import write_bare

            write_bare(onnx.load(temporary), temporary)
        checked = CHECKED_BATCHES if batch_size is None else (batch_size,)
        distance = max(_logits_distance(model, temporary, random_batch(spec, size, seed=size)) for size in checked)
        # `not <=` so that a NaN fails.
        if not distance <= TOLERANCE:
            raise ArtifactError(
                f"ONNX Runtime's logits are {distance:.2g} from torch's (relative), {TOLERANCE:g} is allowed: "
                "deploy the saved folder instead"
            )
        temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)
    return distance


def _check_installed() -> None:
    for name in ("onnx", "onnxruntime", "onnxscript"):
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise ArtifactError(
                f"an export to ONNX needs {name}, which isn't installed: pip install profiling-agent[onnx]"
            ) from error


def write_graph(model: nn.Module, path: Path, *, spec: InputSpec, batch_size: int | None = None) -> None:
    """Write `model`, float32 or statically quantized, to the ONNX file `path` without comparing its output.

    Raises:
        ArtifactError: an extra isn't installed, or torch can't export the model; with the reason and, if known, the operator.
    """
    _check_installed()
    wrapper, batch = _Logits(copy.deepcopy(model)).cpu().eval(), random_batch(spec, batch_size or TRACED_IMAGES)
    with muted("transformers"):
        attend_plainly(wrapper.model)
    _fit_pools_(wrapper, batch)
    is_dynamic = batch_size is None
    try:
        # Models that call torch's fused attention themselves are traced as products and softmax too: its output has another
        # layout than its decomposition's, on which the exporter fails if the number of heads is odd.
        with muted("torch.onnx"), sdpa_kernel(SDPBackend.MATH), PlainPatches():
            program: Any = torch.onnx.export(
                wrapper,
                (batch,),
                dynamo=True,
                verbose=False,
                opset_version=OPSET,
                input_names=[INPUT],
                output_names=[OUTPUT],
                dynamic_shapes={INPUT: {0: "batch"}} if is_dynamic else None,
            )
            from profiling_agent.runtimes.onnx_graph import fold_resizes_

            fold_resizes_(program.model)
            program.save(str(path), external_data=False)
    # A model above protobuf's 2 GB is a ValueError.
    except (torch.onnx.OnnxExporterError, RuntimeError, ValueError) as error:
        advice = "a fixed batch size may work" if is_dynamic else "deploy the saved folder instead"
        raise ArtifactError(f"torch can't export the model to ONNX ({_innermost_cause(error)}): {advice}") from error


def _fit_pools_(model: nn.Module, batch: Tensor) -> None:
    """Shrink pooling windows that are larger than their input to its size; OpenVINO refuses larger ones.

    transformers' EfficientNet ends with a window as wide as it has channels, which torch cuts to the image.
    """

    def fit(pool: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        assert isinstance(pool, POOLS), "others aren't watched"
        kernel, sides = _as_pair(pool.kernel_size), inputs[0].shape[-2:]
        if _as_pair(pool.padding) == (0, 0) and any(window > side for window, side in zip(kernel, sides, strict=True)):
            pool.kernel_size = (min(kernel[0], sides[0]), min(kernel[1], sides[1]))

    pools = [module for module in model.modules() if isinstance(module, POOLS)]
    handles = [pool.register_forward_pre_hook(fit) for pool in pools]
    if pools:
        with torch.inference_mode():
            model(batch)
    for handle in handles:
        handle.remove()


def _innermost_cause(error: BaseException) -> str:
    """Return the first line of the innermost cause: the outer ones are the exporter's advice to its developers."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200] if lines else ''}"


def _logits_distance(model: nn.Module, path: Path, batch: Tensor) -> float:
    def refuse(message: str) -> ArtifactError:
        advice = "a fixed batch size may work"
        return ArtifactError(f"ONNX Runtime can't run the exported model on {len(batch)} images ({message}): {advice}")

    with third_party_errors(refuse):
        exported_logits = torch.from_numpy(one_thread(str(path)).run([OUTPUT], {INPUT: batch.numpy()})[0])
    return relative_distance(exported_logits, logits_of(model, batch))


def _attend(
    module: nn.Module,  # noqa: ARG001
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Return softmax(QK'·scaling + mask)V, (batch, tokens, heads, width), for inputs (batch, heads, tokens, width)."""
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
    elif attention_mask is not None:
        scores = scores + attention_mask
    return (scores.softmax(dim=-1) @ value).transpose(1, 2).contiguous(), None


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


def attend_plainly(model: nn.Module) -> None:
    """Make a transformers model compute plain attention; a model without a choice of attention stays as it is."""
    if callable(set_attention := getattr(model, "set_attn_implementation", None)):
        set_attention(PLAIN_ATTENTION)
