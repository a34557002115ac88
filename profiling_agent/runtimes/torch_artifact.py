"""Saved models of torch and of every deployment: written, read without pickle or remote code, and called alike."""

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, overload

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]
from transformers import AutoConfig, AutoImageProcessor, AutoModelForImageClassification
from transformers.initialization import no_init_weights

from profiling_agent.data import TIMM
from profiling_agent.data.images import to_processor_channels
from profiling_agent.data.pixels import upright_rgb
from profiling_agent.errors import ArtifactError, CorruptImageError, RequestError
from profiling_agent.lib import modules
from profiling_agent.lib.inference import Folded
from profiling_agent.lib.io import first_line, parse_json
from profiling_agent.lib.logs import SETTINGS_LOCK, muted, third_party_errors
from profiling_agent.lib.machine import environment
from profiling_agent.pruning.prune import find_attention, set_head_attributes_
from profiling_agent.quantization.layers import CLASSES, QuantizedModule, quantized_modules
from profiling_agent.runtimes import artifact
from profiling_agent.runtimes.artifact import PROCESSOR, WEIGHTS, QuantizedLayer, Recipe, load_recipe
from profiling_agent.runtimes.registry import Batch, ModelSession, Source, runtime
from profiling_agent.schemas import Cut, Deployment, Environment, InputSpec, RuntimeName, Scheme

HALVES: dict[Scheme, torch.dtype] = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def load_processor(path: str | Path) -> Any:
    """Return the processor that a folder's preprocessor_config.json describes, on its PIL backend, or ArtifactError."""
    problem = f"{str(path)!r} has no image processor that can be read"
    with (
        muted("transformers"),
        third_party_errors(lambda text: ArtifactError(f"{problem} ({text}): save the model again")),
    ):
        return AutoImageProcessor.from_pretrained(
            path,
            # By default the processor would be read from a timm model's config.
            image_processor_filename=PROCESSOR,
            backend="pil",
            local_files_only=True,
            trust_remote_code=False,
        )


def load_module(path: str | Path, *, verify: bool = True) -> nn.Module:
    """Return a saved model in eval mode on the CPU: `load_module(path)(pixel_values=batch).logits`.

    `verify` compares every file with its sha256, and the logits of two images with those at saving. ArtifactError if a
    file is missing or damaged, or the model doesn't compute what it did.
    """
    folder = Path(path).resolve()
    recipe = load_recipe(folder, verify=verify)
    model = _read_model(folder, recipe, dequantize=False)
    if not verify:
        return model
    with modules.preserving_state(model):
        artifact.check_golden(lambda images: modules.logits_of(model, torch.from_numpy(images)).numpy(), folder, recipe)
    return model


def load_dequantized(path: str | Path) -> nn.Module:
    """Return the saved model in float32 at its own widths, dequantized; ArtifactError if its weights don't fit."""
    folder = Path(path).resolve()
    return _read_model(folder, load_recipe(folder), dequantize=True).float()


def _read_model(folder: Path, recipe: Recipe, *, dequantize: bool) -> nn.Module:
    path = folder / WEIGHTS
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ArtifactError(f"{str(path)!r} is damaged ({first_line(error)}): save the model again") from error

    def refuse(problem: str) -> ArtifactError:
        return ArtifactError(
            f"the weights in {str(folder)!r} don't fit {recipe.architecture} ({problem}): save the model again with the "
            "installed libraries"
        )

    with third_party_errors(refuse):
        model = _build_architecture(recipe)
        attention = find_attention(model)
        for norm in recipe.folded:
            model.set_submodule(norm, Folded(model.get_submodule(norm)), strict=True)
        for layer in recipe.quantized:
            prefix = f"{layer.name}."
            stored = {name.removeprefix(prefix): tensors.pop(name) for name in list(tensors) if name.startswith(prefix)}
            original = model.get_submodule(layer.name)
            module = CLASSES[layer.kind](stored, original, reduce_range=layer.reduce_range)
            if dequantize:
                module = module.dequantized()
                tensors |= {prefix + leaf: tensor for leaf, tensor in module.state_dict().items()}
            model.set_submodule(layer.name, module, strict=True)
        _fit_widths_(model, tensors)
        model.load_state_dict(tensors, strict=True, assign=True)
        set_head_attributes_(model, attention)
        _halve_buffers_(model)
    return model.eval()


def _build_architecture(recipe: Recipe) -> nn.Module:
    """Build the model that the config describes on the CPU, with arbitrary weights, all of which are replaced.

    Not on the meta device: buffers that aren't saved (Swin's position index) are computed in building.
    """
    fields = dict(recipe.config)
    name = str(fields.pop("model_type", ""))
    if name == TIMM:
        from profiling_agent.data.models import check_timm

        check_timm(fields, lambda problem: ArtifactError(f"{recipe.base_model!r} can't be built: {problem}"))
    # Transformers removes torch's initialisers for all threads, which share torch's generator too.
    with SETTINGS_LOCK, torch.random.fork_rng(devices=[]), no_init_weights():
        config = AutoConfig.for_model(name, **fields)
        model = AutoModelForImageClassification.from_config(config, trust_remote_code=False)
    if name == TIMM:
        from profiling_agent.data.models import make_plain_

        make_plain_(model)
    return model


def _halve_buffers_(model: nn.Module) -> None:
    """Convert unsaved buffers, as Swin v2's table of coordinates, if the whole model is in one half precision."""
    dtypes = {parameter.dtype for parameter in model.parameters()}
    if dtypes in ({torch.bfloat16}, {torch.float16}):
        (dtype,) = dtypes
        for module in model.modules():
            for name, buffer in list(module.named_buffers(recurse=False)):
                if not isinstance(module, QuantizedModule) and buffer.is_floating_point():
                    setattr(module, name, buffer.to(dtype))


def _fit_widths_(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Replace tensors with another shape in `tensors` by ones on the meta device; update the modules' widths."""
    resized: set[nn.Module] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name in tensors and tensors[name].shape != tensor.shape:
            owner_name, _, leaf = name.rpartition(".")
            owner = model.get_submodule(owner_name)
            empty = torch.empty_like(tensors[name], device="meta")
            setattr(owner, leaf, nn.Parameter(empty) if isinstance(tensor, nn.Parameter) else empty)
            resized.add(owner)
    for module in resized:
        if isinstance(module, nn.Linear):
            module.out_features, module.in_features = module.weight.shape
        elif isinstance(module, nn.Conv2d):
            if module.groups > 1:
                # Whole groups are cut, so each keeps its number of filters.
                module.groups = module.groups * module.weight.shape[0] // module.out_channels
            module.out_channels, module.in_channels = module.weight.shape[0], module.weight.shape[1] * module.groups
        elif isinstance(module, _BatchNorm):
            module.num_features = module.weight.shape[0]
        elif isinstance(module, nn.LayerNorm):
            module.normalized_shape = tuple(module.weight.shape)


def save_model(
    model: nn.Module,
    folder: Path,
    *,
    spec: InputSpec,
    processor: Any,
    base_model: str,
    base_revision: str | None = None,
    cuts: Sequence[Cut] = (),
) -> Recipe:
    """Write `model` and its image processor to `folder`, complete or not at all; return its recipe.

    `model` is a Hugging Face image classifier, pruned or quantized or neither. `cuts` are those that gave its widths.
    Weights keep their live names; quantized layers are stored as plain int8 or fp16 tensors. ArtifactError if `folder`
    exists.
    """
    description = Recipe(
        base_model=base_model,
        base_revision=base_revision,
        architecture=type(model).__name__,
        config=config_of(model),
        input=spec,
        cuts=tuple(cuts),
    )
    return artifact.write_artifact(
        description,
        folder,
        processor=processor,
        write_model=lambda temporary: write_weights(model, temporary),
        golden=lambda _folder, _recipe, images: modules.logits_of(model, torch.from_numpy(images)).numpy(),
    )


def write_weights(
    model: nn.Module, folder: Path, *, folded: Sequence[str] = (), dtype: torch.dtype | None = None
) -> dict[str, Any]:
    """Write `weights.safetensors`, in `dtype` except quantized layers; return the recipe's fields."""
    tensors, layers = dict[str, Tensor](), quantized_modules(model)
    for name, tensor in model.state_dict().items():
        is_cast = dtype is not None and tensor.is_floating_point() and name.rpartition(".")[0] not in layers
        # A clone, because safetensors refuses tensors that share memory.
        clone = tensor.cpu().clone().contiguous()
        tensors[name] = clone.to(dtype) if is_cast else clone
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    return {"quantized": quantized_rows(model), "folded": tuple(folded)}


def quantized_rows(model: nn.Module) -> tuple[QuantizedLayer, ...]:
    """Return the recipe's rows of a model's quantized layers."""
    return tuple(
        QuantizedLayer(name=name, kind=module.kind, dtype=module.dtype, reduce_range=module.reduce_range)
        for name, module in quantized_modules(model).items()
    )


def config_of(model: nn.Module) -> dict[str, Any]:
    """Return the Hugging Face config as JSON data, with the model's class and all names of classes."""
    config: Any = model.config
    # A timm config has the names only as a list, which only transformers' reading of a config.json understands.
    written = parse_json(config.to_json_string(use_diff=False))
    names = {str(index): name for index, name in config.id2label.items()}
    return written | {"architectures": [type(model).__name__], "id2label": names}


def read_source(
    folder: Path, calibration: Batch, *, batch_size: int, onnx: Path | None = None, device: str = "cpu"
) -> Source:
    """Return the saved float32 torch model in `folder` as a source of deployments."""
    saved: Any = {"module": load_module(folder), "recipe": load_recipe(folder), "processor": load_processor(folder)}
    return Source(**saved, calibration=calibration, batch_size=batch_size, onnx=onnx, device=device)


def save_deployed(source: Source, deployment: Deployment, folder: Path, *, num_threads: int | None = None) -> Recipe:
    """Convert `source` for `deployment` and write it to `folder` with a model card; return its recipe.

    The opened model's logits of two images are stored with it, and params and MACs of the float32 model. Raises what
    `Runtime.convert` and `write_artifact` do.
    """
    from profiling_agent.lib.costs import count_complexity

    executor = runtime(deployment.runtime)
    rows = count_complexity(source.module, source.recipe.input).values()

    def golden(written: Path, recipe: Recipe, images: Batch) -> Batch:
        return executor.open(written, recipe, device=source.device, num_threads=num_threads).run(images)

    return artifact.write_artifact(
        source.recipe.model_copy(update={"deployment": deployment}),
        folder,
        processor=source.processor,
        write_model=lambda temporary: executor.convert(source, deployment, temporary),
        golden=golden,
        complexity=(sum(row.params for row in rows), sum(row.macs for row in rows)),
    )


class Answer(NamedTuple):
    """Output of a model for a batch: `logits`, float32 (n, classes), on the CPU."""

    logits: Tensor


class Prediction(NamedTuple):
    """The likeliest class of one image; a multi-label model's other ones are in `Deployed.probabilities`."""

    label: str
    class_id: int
    probability: float


class Deployed:
    """A saved model, opened in its runtime."""

    def __init__(self, folder: Path, recipe: Recipe, session: ModelSession) -> None:
        self.folder, self.recipe, self.session = folder, recipe, session
        self._processor: Any = None

    @property
    def runtime(self) -> RuntimeName:
        """Return the name of the runtime."""
        return self.recipe.deployment.runtime

    def __call__(self, pixel_values: Tensor | NDArray[Any]) -> Answer:
        """Return the `logits`, float32 (n, classes) on the CPU, of prepared images (n, channels, height, width)."""
        array = pixel_values.detach().cpu().numpy() if isinstance(pixel_values, Tensor) else pixel_values
        batch = np.ascontiguousarray(array, dtype=np.float32)
        expected = self.recipe.input.batch(1)[1:]
        if batch.ndim != 4 or batch.shape[1:] != expected or not len(batch):
            raise ArtifactError(
                f"the model takes pixel_values of shape (n, {', '.join(map(str, expected))}), not {batch.shape!r}: "
                "prepare images with its processor"
            )
        return Answer(logits=torch.from_numpy(self.session.run(batch)))

    @overload
    def predict(self, images: Image.Image) -> Prediction: ...

    @overload
    def predict(self, images: Sequence[Image.Image]) -> list[Prediction]: ...

    def predict(self, images: Image.Image | Sequence[Image.Image]) -> Prediction | list[Prediction]:
        """Return the likeliest class of a PIL image, or of each of several images, which run as one batch.

        Images are prepared as for measuring accuracy: turned upright by their EXIF orientation, and 16 bits scaled to
        8. CorruptImageError if one is damaged.
        """
        if isinstance(images, Image.Image):
            return self.predict([images])[0]
        if not images:
            return []
        likelihoods, classes = self.probabilities(images).max(dim=-1)
        names = self.recipe.config.get("id2label", {})
        return [
            Prediction(label=str(names.get(str(class_id), class_id)), class_id=class_id, probability=probability)
            for class_id, probability in zip(classes.tolist(), likelihoods.tolist(), strict=True)
        ]

    def probabilities(self, images: Sequence[Image.Image]) -> Tensor:
        """Return the probability of each class, (n, classes), of PIL images, prepared as for `predict`, which run as one batch.

        They add up to 1, except those of a multi-label model, each of which is the sigmoid of a logit.
        """
        logits = self(self._prepared(images)).logits
        return logits.sigmoid() if self.recipe.is_multi_label else logits.softmax(dim=-1)

    def _prepared(self, images: Sequence[Image.Image]) -> NDArray[Any]:
        processor = self._processor = self._processor or load_processor(self.folder)
        with third_party_errors(lambda message: CorruptImageError(f"an image can't be read: {message}")):
            pictures = [to_processor_channels(upright_rgb(image), processor) for image in images]
        return processor(images=pictures, return_tensors="np")["pixel_values"]


def load(path: str | Path, *, verify: bool = True, device: str = "cpu", num_threads: int | None = None) -> Deployed:
    """Return a saved model that is called as `model(pixel_values).logits` whatever its runtime.

    `verify` compares every file with its sha256, and the logits of two images with those at saving. `num_threads` is
    the number of CPU threads, in torch of the whole process. By default ONNX Runtime and OpenVINO take one for each
    core that a container's quota has time for, and torch keeps those of the process. Warns if the model was made on
    another type of CPU: another deployment may be faster here, or int8 sums saturate. ArtifactError if a file is
    missing or damaged, the model doesn't compute what it did, or its runtime isn't installed; RequestError if
    `num_threads` isn't 1 or more.
    """
    if num_threads is not None and num_threads < 1:
        raise RequestError(f"num_threads is {num_threads}: give 1 or more, or None for as many as there are cores")
    folder = Path(path).resolve()
    recipe = load_recipe(folder, verify=verify)
    session = artifact.open_session(folder, device=device, num_threads=num_threads)
    if note := cpu_note(folder, recipe, environment()):
        warnings.warn(note, stacklevel=2)
    if verify:
        artifact.check_golden(session.run, folder, recipe)
    return Deployed(folder, recipe, session)


def cpu_note(folder: Path, recipe: Recipe, here: Environment) -> str | None:
    """Return a warning about running a saved model on the machine `here`, or None if its CPU gives no reason."""
    cpus = f"{str(folder)!r} was made on {recipe.cpu}, this is {here.cpu}"
    executor = runtime(recipe.deployment.runtime)
    # By flags only: a cloud has one name for processors with different instructions.
    if (needed := executor.needed_instructions(recipe.quantized)) and not executor.has_vnni(here.cpu_flags):
        lacks = f"{cpus}, which has no {' or '.join(needed)}"
        return f"{lacks}: its int8 sums may saturate here; `profiling-agent run` makes a model for this machine"
    if recipe.cpu != here.cpu:
        return (
            f"{cpus}: it computes the same, but another deployment may be faster; `profiling-agent benchmark` finds out"
        )
    return None
