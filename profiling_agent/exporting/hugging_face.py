"""Export of a pruned model as an ordinary Hugging Face folder, if a config can express its cuts."""

import itertools
import math
from collections.abc import Callable, Generator, Iterable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub.errors import StrictDataclassError
from numpy.typing import NDArray
from torch import nn
from transformers import AutoConfig, AutoModelForImageClassification
from transformers.initialization import no_init_weights

from profiling_agent.errors import ArtifactError
from profiling_agent.lib.logs import SETTINGS_LOCK, quiet, third_party_errors
from profiling_agent.modules.inference import logits_of, random_batch
from profiling_agent.quantization.layers import DynamicLinear
from profiling_agent.runtimes.artifact import appearing
from profiling_agent.runtimes.torch_artifact import config_of
from profiling_agent.schemas import Cut, InputSpec, UnitKind

# Parts of field names over all model families; trying finds the field that counts.
HEAD_FIELDS = ("heads",)
WIDTH_FIELDS = ("intermediate_size", "ratio", "expan", "ffn_multiplier")
BUILD_ERRORS = (
    StrictDataclassError,
    ValueError,
    TypeError,
    RuntimeError,
    AssertionError,
    ArithmeticError,
    LookupError,
    AttributeError,
)
NUM_IMAGES = 2
# Relative distance of the logits: weights and layers are the same, at most the attention kernel is another.
TOLERANCE = 1e-6
# The same if everything between layers is rounded to half precision as well; bfloat16 has steps of 0.8%.
HALF_TOLERANCE = 2e-2

Fields = dict[str, Any]
Structure = dict[str, tuple[tuple[int, ...], str]]


def plain_config(model: nn.Module, cuts: Sequence[Cut]) -> Fields | str:
    """Return the config from which transformers itself builds `model`, or a phrase on why there is none.

    `cuts` have the widths before pruning. Fields of the original config that count heads or widths are scaled as the cuts
    were. A config is accepted if the model built from it (without weights) has a state dict of the same names, shapes and
    shared tensors.
    """
    if any(isinstance(module, DynamicLinear) for module in model.modules()):
        return "the model is quantized, and only float32 models can be exported"
    if reason := _uneven_cuts(cuts):
        return reason
    config: Any = model.config
    original = config_of(model)
    expected = structure_of(model)
    nearest: list[str] | None = None
    for fields in _candidate_configs(original, model, cuts):
        try:
            candidate = build(fields)
        except BUILD_ERRORS:
            continue
        structure = structure_of(candidate)
        if structure == expected:
            return fields
        mismatches = [name for name in expected | structure if expected.get(name) != structure.get(name)]
        nearest = mismatches if nearest is None or len(mismatches) < len(nearest) else nearest
    example = f" (of {nearest[0]!r}, for one)" if nearest else ""
    return f"no {type(config).__name__} has fields for the widths of this model{example}"


def save_plain(
    model: nn.Module,
    folder: Path,
    *,
    spec: InputSpec,
    processor: Any,
    cuts: Sequence[Cut] = (),
    half: torch.dtype | None = None,
    golden: Callable[[Callable[[NDArray[np.float32]], NDArray[Any]]], float] | None = None,
) -> str | None:
    """Write `model` so that `AutoModelForImageClassification.from_pretrained(folder)` loads it; None if written.

    If no config can express the cuts, nothing is written and the reason is returned as a phrase. The folder appears complete or
    not at all, after it was loaded and gave the model's logits for two images. With `half` the whole model is in that precision;
    `model` then has the weights of one with only its layers in it, and `golden` returns the distance of logits from that one's.

    Raises:
        ArtifactError: `folder` exists, transformers can't write and load the model, or the loaded model's logits are more than
            1e-6 apart (relative), in half precision more than 2e-2.
    """
    fields = plain_config(model, cuts)
    if isinstance(fields, str):
        return fields
    plain_model: Any = build(fields)
    tensors = {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}
    if half is not None:
        tensors = {name: tensor.to(half) if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    plain_model.load_state_dict(tensors, assign=True)
    plain_model.tie_weights()
    with appearing(folder) as temporary, quiet():
        loaded = _save_and_load(plain_model, processor, temporary)
        if golden is None:
            batch, tolerance = random_batch(spec, NUM_IMAGES), TOLERANCE
            expected = logits_of(model, batch)
            distance = float((logits_of(loaded, batch) - expected).norm() / expected.norm())
        else:
            tolerance = HALF_TOLERANCE
            distance = golden(lambda images: logits_of(loaded, torch.from_numpy(images).to(half)).float().numpy())
        # `not <=` so that a NaN fails.
        if not distance <= tolerance:
            raise ArtifactError(
                f"the model that transformers loads from its config computes logits {distance:.2g} apart (relative), "
                f"{tolerance:g} is allowed: run it with `profiling_agent.load`, or pick another candidate"
            )
    return None


def _save_and_load(model: Any, processor: Any, folder: Path) -> nn.Module:
    """Save a model and its processor with transformers, and return the model that transformers loads from there."""

    def refuse(cause: str) -> ArtifactError:
        return ArtifactError(f"transformers can't write and load the model ({cause}): deploy the saved folder instead")

    # While loading, transformers disables initialisers in all threads.
    with SETTINGS_LOCK, third_party_errors(refuse):
        model.save_pretrained(folder)
        processor.save_pretrained(folder)
        return AutoModelForImageClassification.from_pretrained(
            folder,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
        )


def build(fields: Fields) -> nn.Module:
    """Build the model of a config on the meta device: names and shapes without weights."""
    settings = {name: value for name, value in fields.items() if name != "model_type"}
    with SETTINGS_LOCK, torch.random.fork_rng(devices=[]), torch.device("meta"), no_init_weights(), quiet():
        config = AutoConfig.for_model(fields["model_type"], **settings)
        return AutoModelForImageClassification.from_config(config, trust_remote_code=False)


def structure_of(model: nn.Module) -> Structure:
    """Return the shape of every saved tensor, and the first of the names that share it."""
    first_names: dict[int, str] = {}
    tensors = model.state_dict(keep_vars=True)
    return {name: (tuple(tensor.shape), first_names.setdefault(id(tensor), name)) for name, tensor in tensors.items()}


def _uneven_cuts(cuts: Iterable[Cut]) -> str | None:
    """Return which layers of equal width were cut differently, or None; a config has one number for them."""
    keeps: dict[tuple[UnitKind, int], int] = {}
    for cut in cuts:
        kind, width = cut.unit.kind, cut.unit.width
        if (first_keep := keeps.setdefault((kind, width), cut.keep)) != cut.keep:
            what = "attention heads" if kind is UnitKind.HEADS else "channels"
            return f"layers of {width} {what} keep different numbers of them ({first_keep} and {cut.keep})"
    return None


def _candidate_configs(original: Fields, model: nn.Module, cuts: Sequence[Cut]) -> Generator[Fields]:
    """Yield every config that may express the cuts: each field of heads with each field of widths."""
    head_cuts = [cut for cut in cuts if cut.unit.kind is UnitKind.HEADS]
    width_cuts = [cut for cut in cuts if cut.unit.kind is not UnitKind.HEADS]
    tensors = dict(model.named_parameters())
    head_sizes = {tensors[f"{cut.unit.consumer}.weight"].shape[1] // cut.keep for cut in head_cuts}
    # Heads keep their size, which transformers otherwise derives from the number of heads.
    head_dims = [{"head_dim": head_sizes.pop()}, {}] if len(head_sizes) == 1 else [{}]
    for section in (
        None,
        *(name for name, value in original.items() if isinstance(value, dict) and "model_type" in value),
    ):
        fields = original if section is None else original[section]
        for head_change, size_change, width_change in itertools.product(
            _scale_fields(fields, HEAD_FIELDS, head_cuts), head_dims, _scale_fields(fields, WIDTH_FIELDS, width_cuts)
        ):
            changed_fields = fields | head_change | size_change | width_change
            yield changed_fields if section is None else original | {section: changed_fields}


def _scale_fields(fields: Fields, words: Sequence[str], cuts: Sequence[Cut]) -> list[Fields]:
    """Return a change for each field whose name contains one of `words`, scaled as the cuts scaled widths."""
    if not cuts:
        return [{}]
    # In network order, to fit lists of one entry per stage.
    shares = list({cut.unit.width: Fraction(cut.keep, cut.unit.width) for cut in cuts}.values())
    matches = {name: value for name, value in fields.items() if any(word in name for word in words)}
    return [{name: value} for name in matches for value in _scale_value(matches[name], shares)]


def _scale_value(value: Any, shares: Sequence[Fraction]) -> Generator[Any]:
    """Yield a field's values after the cuts, for a number one, for a list one per stage: integers, floats, next floats above."""
    if isinstance(value, list) and len(value) != len(shares):
        shares = [shares[0]] * len(value) if len(set(shares)) == 1 else []
    elif not isinstance(value, list):
        shares = shares[:1] if len(set(shares)) == 1 else []
    entries = value if isinstance(value, list) else [value]
    if not shares or not all(isinstance(entry, int | float) and not isinstance(entry, bool) for entry in entries):
        return
    exact = [Fraction(entry) * share for entry, share in zip(entries, shares, strict=True)]
    # Transformers truncates ratio times width to an integer; the next float above makes up for rounding.
    next_above = [math.nextafter(float(entry), math.inf) for entry in exact]
    for scaled in ([int(entry) for entry in exact], [float(entry) for entry in exact], next_above):
        yield scaled if isinstance(value, list) else scaled[0]
