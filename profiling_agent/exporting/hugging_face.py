"""Plain export: a pruned model as an ordinary Hugging Face folder, where a config can say what was cut."""

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
from profiling_agent.lib.third_party import ALONE, foreign_code, quiet
from profiling_agent.modules.inference import logits_of, random_batch
from profiling_agent.quantization.layers import DynamicLinear
from profiling_agent.runtimes.artifact import appearing
from profiling_agent.runtimes.torch_artifact import config_of
from profiling_agent.schemas import Cut, InputSpec, UnitKind

# What a config calls these, over all families; which field does it is found by trying.
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
# Relative distance of the logits: the same weights in the same layers, at most through another attention kernel.
TOLERANCE = 1e-6
# The same where all that lies between layers is rounded to half precision too; bfloat16 has steps of 0.8%.
HALF_TOLERANCE = 2e-2

Fields = dict[str, Any]
Structure = dict[str, tuple[tuple[int, ...], str]]


def plain_config(model: nn.Module, cuts: Sequence[Cut]) -> Fields | str:
    """Return the config from which transformers itself builds `model`, or why there is none, as a phrase.

    `cuts` say from which widths the model's came. Found by trying: fields of the original config that count heads or
    widths are scaled as the cuts were, and a config is the answer if the model that is built from it (without weights)
    has a state dict of the same names, shapes and shared tensors.
    """
    if any(isinstance(module, DynamicLinear) for module in model.modules()):
        return "the model is quantized, and only float32 models can be exported"
    if uneven := _uneven(cuts):
        return uneven
    config: Any = model.config
    original = config_of(model)
    wanted = structure_of(model)
    nearest: list[str] | None = None
    for fields in _candidates(original, model, cuts):
        try:
            built = build(fields)
        except BUILD_ERRORS:
            continue
        found = structure_of(built)
        if found == wanted:
            return fields
        differing = [name for name in wanted | found if wanted.get(name) != found.get(name)]
        nearest = differing if nearest is None or len(differing) < len(nearest) else nearest
    place = f" (of {nearest[0]!r}, for one)" if nearest else ""
    return f"no {type(config).__name__} has fields for the widths of this model{place}"


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

    Where no config can say what was cut, nothing is written, and why is returned as a phrase. The folder appears
    complete or not at all, after it was loaded and gave the model's logits for two images. In `half` precision it is written
    as a whole; `model` then has the numbers of one whose layers alone are, and `golden` says how far logits are from that one's.

    Raises:
        ArtifactError: `folder` exists, transformers can't write and load the model, or the loaded model's logits are more than
            1e-6 apart (relative), in half precision more than 2e-2.
    """
    fields = plain_config(model, cuts)
    if isinstance(fields, str):
        return fields
    plain: Any = build(fields)
    held = {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}
    if half is not None:
        held = {name: tensor.to(half) if tensor.is_floating_point() else tensor for name, tensor in held.items()}
    plain.load_state_dict(held, assign=True)
    plain.tie_weights()
    with appearing(folder) as temporary, quiet():
        loaded = _written(plain, processor, temporary)
        if golden is None:
            batch, allowed = random_batch(spec, NUM_IMAGES), TOLERANCE
            expected = logits_of(model, batch)
            distance = float((logits_of(loaded, batch) - expected).norm() / expected.norm())
        else:
            allowed = HALF_TOLERANCE
            distance = golden(lambda images: logits_of(loaded, torch.from_numpy(images).to(half)).float().numpy())
        # `not <=` so that a NaN fails.
        if not distance <= allowed:
            raise ArtifactError(
                f"the model that transformers loads from its config computes logits {distance:.2g} apart (relative), "
                f"{allowed:g} is allowed: run it with `profiling_agent.load`, or pick another candidate"
            )
    return None


def _written(plain: Any, processor: Any, folder: Path) -> nn.Module:
    """Write a model and its processor as transformers does, and return what transformers loads again."""

    def refuse(said: str) -> ArtifactError:
        return ArtifactError(f"transformers can't write and load the model ({said}): deploy the saved folder instead")

    # Transformers builds what it loads without initialisers, of which it takes all threads'.
    with ALONE, foreign_code(refuse):
        plain.save_pretrained(folder)
        processor.save_pretrained(folder)
        return AutoModelForImageClassification.from_pretrained(
            folder,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
        )


def build(fields: Fields) -> nn.Module:
    """Return the model of a config on the meta device: names and shapes without weights."""
    kinds = {name: value for name, value in fields.items() if name != "model_type"}
    with ALONE, torch.random.fork_rng(devices=[]), torch.device("meta"), no_init_weights(), quiet():
        config = AutoConfig.for_model(fields["model_type"], **kinds)
        return AutoModelForImageClassification.from_config(config, trust_remote_code=False)


def structure_of(model: nn.Module) -> Structure:
    """Return the shape of every tensor that is saved, and the first name under which it is held."""
    first: dict[int, str] = {}
    held = model.state_dict(keep_vars=True)
    return {name: (tuple(tensor.shape), first.setdefault(id(tensor), name)) for name, tensor in held.items()}


def _uneven(cuts: Iterable[Cut]) -> str | None:
    """Say which layers of equal width were cut differently; a config has one number for them."""
    kept: dict[tuple[UnitKind, int], int] = {}
    for cut in cuts:
        kind, width = cut.unit.kind, cut.unit.width
        if (other := kept.setdefault((kind, width), cut.keep)) != cut.keep:
            what = "attention heads" if kind is UnitKind.HEADS else "channels"
            return f"layers of {width} {what} keep different numbers of them ({other} and {cut.keep})"
    return None


def _candidates(original: Fields, model: nn.Module, cuts: Sequence[Cut]) -> Generator[Fields]:
    """Yield every config that might say what was cut: each field of heads with each field of widths."""
    heads = [cut for cut in cuts if cut.unit.kind is UnitKind.HEADS]
    widths = [cut for cut in cuts if cut.unit.kind is not UnitKind.HEADS]
    tensors = dict(model.named_parameters())
    sizes = {tensors[f"{cut.unit.consumer}.weight"].shape[1] // cut.keep for cut in heads}
    # A head keeps its size, which transformers otherwise takes from the number of heads.
    stated = [{"head_dim": sizes.pop()}, {}] if len(sizes) == 1 else [{}]
    for place in (
        None,
        *(name for name, value in original.items() if isinstance(value, dict) and "model_type" in value),
    ):
        fields = original if place is None else original[place]
        for counted, size, scaled in itertools.product(
            _scaled(fields, HEAD_FIELDS, heads), stated, _scaled(fields, WIDTH_FIELDS, widths)
        ):
            changed = fields | counted | size | scaled
            yield changed if place is None else original | {place: changed}


def _scaled(fields: Fields, words: Sequence[str], cuts: Sequence[Cut]) -> list[Fields]:
    """Return the changes that scale one of the fields whose name has one of the words as the cuts scaled widths."""
    if not cuts:
        return [{}]
    # In network order, so that they fit a list of one entry a stage.
    shares = list({cut.unit.width: Fraction(cut.keep, cut.unit.width) for cut in cuts}.values())
    named = {name: value for name, value in fields.items() if any(word in name for word in words)}
    return [{name: value} for name in named for value in _values(named[name], shares)]


def _values(value: Any, shares: Sequence[Fraction]) -> Generator[Any]:
    """Yield what a field may be after the cuts: for a number one, for a list one a stage, as integers and as floats."""
    if isinstance(value, list) and len(value) != len(shares):
        shares = [shares[0]] * len(value) if len(set(shares)) == 1 else []
    elif not isinstance(value, list):
        shares = shares[:1] if len(set(shares)) == 1 else []
    entries = value if isinstance(value, list) else [value]
    if not shares or not all(isinstance(entry, int | float) and not isinstance(entry, bool) for entry in entries):
        return
    exact = [Fraction(entry) * share for entry, share in zip(entries, shares, strict=True)]
    # A ratio times a width is cut down to an integer: the next float above makes up for what rounding took.
    above = [math.nextafter(float(entry), math.inf) for entry in exact]
    for scaled in ([int(entry) for entry in exact], [float(entry) for entry in exact], above):
        yield scaled if isinstance(value, list) else scaled[0]
