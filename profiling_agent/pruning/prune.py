"""Pruning of a model: its attention heads, surgery on a copy, and the check against the model with masked channels."""

import copy
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch_pruning as tp
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]

from profiling_agent.errors import PruningError
from profiling_agent.lib.logs import third_party_errors
from profiling_agent.lib.modules import device_of, preserving_state, random_batch
from profiling_agent.pruning.criteria import expanded, largest_weights
from profiling_agent.pruning.tracing import is_response_norm
from profiling_agent.schemas import Cut, InputSpec, Unit, UnitKind

# One layer may compute all three; the rows of q then come before those of k and v.
PROJECTIONS = (("q_proj", "k_proj", "v_proj"), ("query", "key", "value"), ("q", "k", "v"), ("qkv",))
# The output layer is a child, or lies in a module next to the one that holds the projections.
OUTPUTS, SIBLING_OUTPUT = ("o_proj", "out_proj", "proj"), "output.dense"
HEAD_COUNTS, HEAD_DIMS = ("num_attention_heads", "num_heads"), ("head_dim", "attention_head_size")
# Attributes that forward passes read as well: the width of all heads, and the count and width of the heads of k and v.
WIDTHS, KEY_COUNT, KEY_WIDTH = ("all_head_size", "attn_dim"), "num_kv_heads", "kv_dim"
# Parameters with one entry per head, and the dimension that counts heads; a network whose last layer computes one.
HEAD_TABLES, TABLE_NETWORK = {"relative_position_bias_table": -1, "logit_scale": 0}, "continuous_position_bias_mlp"


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """An attention module by its attributes: (heads * head_dim) rows of q, k and v, as many columns of o; or why not.

    One layer that computes q, k and v together has three `stacks`. A table's value is the dimension that counts heads.
    `refusal` is a sentence that starts with a code; `consumer` is empty if there is none, `head_dim` 0 if unknown.
    """

    producers: tuple[str, ...]
    consumer: str
    stacks: int
    num_heads: int
    head_dim: int
    tables: Mapping[str, int] = field(default_factory=dict[str, int])
    refusal: str | None = None

    @property
    def projections(self) -> tuple[str, ...]:
        """Return the names of q, k, v and the output layer, if there is one."""
        return (*self.producers, self.consumer) if self.consumer else self.producers


def find_attention(model: nn.Module) -> dict[str, Attention]:
    """Return every attention module, keyed by the name of the module that holds its q, k and v."""
    modules: dict[str, Any] = dict(model.named_modules(remove_duplicate=False))
    holders = {name: children for name, module in model.named_modules() if (children := _projections(module))}
    tables = _head_tables(model, holders)
    found: dict[str, Attention] = {}
    for holder, children in holders.items():
        parent, prefix = holder.rpartition(".")[0], f"{holder}.".lstrip(".")
        producers = tuple(prefix + child for child in children)
        outputs = (*(prefix + child for child in OUTPUTS), f"{parent}.{SIBLING_OUTPUT}".lstrip("."))
        consumer = next((name for name in outputs if isinstance(modules.get(name), nn.Linear)), "")
        stacks = 3 // len(producers)
        rows = modules[producers[0]].out_features // stacks
        head_dim = _head_dim(modules[holder], rows)
        refusal = None
        if not consumer:
            refusal = "unknown_heads: no layer is found that reads what attention makes"
        elif not head_dim:
            refusal = f"unknown_heads: no number and size of heads is stated that makes the {rows} outputs of q"
        elif {*(modules[name].out_features // stacks for name in producers), modules[consumer].in_features} != {rows}:
            refusal = "unequal_heads: q, k, v and o don't have the same heads"
        found[holder] = Attention(
            producers=producers,
            consumer=consumer,
            stacks=stacks,
            num_heads=rows // head_dim if head_dim else 0,
            head_dim=head_dim,
            tables=tables[holder],
            refusal=refusal,
        )
    return found


def _projections(holder: nn.Module) -> tuple[str, ...]:
    """Return the names of the layers that compute q, k and v in `holder`, empty if it has none."""
    for names in PROJECTIONS:
        if all(isinstance(getattr(holder, name, None), nn.Linear) for name in names):
            return names
    return ()


def _head_dim(holder: nn.Module, rows: int) -> int:
    """Return the rows per head for the `rows` of q, from the module's attributes; 0 if they don't fit."""

    def first_positive_int(names: Collection[str]) -> int | None:
        values = (getattr(holder, name, None) for name in names)
        return next((value for value in values if isinstance(value, int) and value > 0), None)

    num_heads, head_dim = first_positive_int(HEAD_COUNTS), first_positive_int(HEAD_DIMS)
    if head_dim is None:
        head_dim = rows // num_heads if num_heads else 0
    return head_dim if head_dim and rows % head_dim == 0 and num_heads in (None, rows // head_dim) else 0


def _head_tables(model: nn.Module, holders: Collection[str]) -> dict[str, dict[str, int]]:
    """Return, for each attention, the parameters with an entry per head and the dimension that counts heads.

    A table outside of any attention belongs to the nearest one, or to all that are equally near.
    """
    tables: dict[str, dict[str, int]] = {holder: {} for holder in holders}
    for path, _ in model.named_parameters():
        scope, _, leaf = path.rpartition(".")
        if leaf in HEAD_TABLES and holders:
            # The dot keeps `layer.1` out of `layer.10`.
            while not (served := [name for name in holders if f"{name}.".startswith(f"{scope}." if scope else "")]):
                scope = scope.rpartition(".")[0]
            for name in served:
                tables[name][path] = HEAD_TABLES[leaf]
    for name in holders:
        if isinstance(network := getattr(model.get_submodule(name), TABLE_NETWORK, None), nn.Module):
            *_, (last, _layer) = network.named_children()
            tables[name][f"{name}.{TABLE_NETWORK}.{last}.weight".lstrip(".")] = 0
    return tables


def set_head_attributes_(model: nn.Module, attention: Mapping[str, Attention]) -> None:
    """Set the attributes that state the number of heads to what the layers have, for `attention` before a cut.

    Some forward passes read them; other readers are people, exports and third-party code.
    """
    for name, heads in attention.items():
        holder, layer = model.get_submodule(name), cast("nn.Linear", model.get_submodule(heads.producers[0]))
        rows = layer.out_features // heads.stacks
        counts = (*HEAD_COUNTS, KEY_COUNT)
        for attribute in (*counts, *WIDTHS, KEY_WIDTH) if heads.head_dim else ():
            if hasattr(holder, attribute):
                setattr(holder, attribute, rows // heads.head_dim if attribute in counts else rows)


# Torch-Pruning's types name all layers that its functions take.
SURGERY: Any = tp


def cut_units(model: nn.Module, cuts: Sequence[Cut], keep: Mapping[str, Sequence[int]]) -> nn.Module:
    """Return a copy of `model` that keeps the channels or heads `keep[unit.name]` of every cut unit.

    Indices are those of `model`, even if one layer ends one unit and begins the next. `head_dim` and attention's
    scaling stay.
    """
    pruned = copy.deepcopy(model)
    attention = find_attention(model)
    for cut in cuts:
        unit, dropped = cut.unit, sorted(set(range(cut.unit.width)) - set(keep[cut.unit.name]))
        for name in unit.producers:
            producer = pruned.get_submodule(name)
            _cut_rows_(producer, unit.rows_of(dropped, len(producer.get_parameter("weight"))))
        for name in unit.inner:
            inner: Any = pruned.get_submodule(name)
            # A response norm's weight has its channels last, after ones.
            size = inner.num_features if isinstance(inner, _BatchNorm) else len(inner.weight.squeeze())
            _cut_rows_(inner, expanded(dropped, size // unit.width))
        for name in (unit.consumer, *unit.side_readers):
            reader = pruned.get_submodule(name)
            columns = expanded(dropped, reader.get_parameter("weight").shape[1] // unit.width)
            is_conv = isinstance(reader, nn.Conv2d)
            (SURGERY.prune_conv_in_channels if is_conv else SURGERY.prune_linear_in_channels)(reader, columns)
        if unit.kind is UnitKind.HEADS:
            for name, dim in attention[unit.name].tables.items():
                owner, _, leaf = name.rpartition(".")
                # A table that a layer computes is cut with that layer's rows.
                if not isinstance(pruned.get_submodule(owner), nn.Linear):
                    _drop_(pruned.get_submodule(owner), leaf, dim, dropped)
            set_head_attributes_(pruned, {unit.name: attention[unit.name]})
    return pruned


def _cut_rows_(module: Any, rows: Sequence[int]) -> None:
    if isinstance(module, _BatchNorm):
        SURGERY.prune_batchnorm_out_channels(module, rows)
    elif isinstance(module, nn.Linear):
        SURGERY.prune_linear_out_channels(module, rows)
    elif isinstance(module, nn.Conv2d):
        size, groups = module.out_channels, module.groups
        SURGERY.prune_conv_out_channels(module, rows)
        if groups > 1:
            # Whole groups go, so each remaining filter reads the remaining channels of its own group.
            module.groups = groups * module.out_channels // size
            module.in_channels = module.weight.shape[1] * module.groups
    else:
        for leaf in dict(module.named_parameters(recurse=False)):
            _drop_(module, leaf, -1, rows)


def _drop_(owner: nn.Module, leaf: str, dim: int, indices: Sequence[int]) -> None:
    parameter = owner.get_parameter(leaf).detach()
    kept = torch.tensor(sorted(set(range(parameter.shape[dim])) - set(indices)), device=parameter.device)
    setattr(owner, leaf, nn.Parameter(parameter.index_select(dim, kept)))


def masked_parameters(model: nn.Module, unit: Unit, kept: Sequence[int]) -> dict[str, Tensor]:
    """Return, by parameter name, new values that make `model` ignore the channels of `unit` that aren't `kept`.

    The columns of readers that read a cut channel are zero. A global response norm on the way divides by a mean over
    all channels: there the producers' rows are zero as well, and the norm's weight is scaled by the remaining share.
    """
    readers = [f"{name}.weight" for name in (unit.consumer, *unit.side_readers)]
    rows, norms = list[str](), list[str]()
    if not unit.mask_exact:
        rows = [f"{name}.{leaf}" for name in unit.producers for leaf, _ in model.get_submodule(name).named_parameters()]
        norms = [f"{name}.weight" for name in unit.inner if is_response_norm(model.get_submodule(name))]
    masked = {name: model.get_parameter(name).detach() * (len(kept) / unit.width) for name in norms}
    for name, dim, stacks in (*((name, 1, 1) for name in readers), *((name, 0, unit.stacks) for name in rows)):
        tensor = model.get_parameter(name).detach()
        mask = torch.zeros(unit.width, dtype=tensor.dtype, device=tensor.device)
        mask[list(kept)] = 1
        # A head has as many consecutive rows or columns as it has channels.
        mask = mask.repeat_interleave(tensor.shape[dim] // unit.width // stacks).repeat(stacks)
        masked[name] = tensor * mask.view(-1, *(1 for _ in tensor.shape[dim + 1 :]))
    return masked


# Correct surgery differs by the order of fp32 sums, 1e-7 to 1e-6; one wrong index, head or batch-norm mean by 4e-4 and
# more.
MAX_MASK_ERROR = 1e-4


def mask_error(
    baseline: nn.Module, pruned: nn.Module, cuts: Sequence[Cut], keep: Mapping[str, Sequence[int]], images: Tensor
) -> float:
    """Return how far the logits of `pruned` are from those of `baseline` with the cut channels masked.

    The largest difference of a logit over the norm of the image's logits, the worst of `images` (b, c, h, w), nan if a
    logit isn't finite. Both models run in eval mode and are unchanged.
    """
    masked: dict[str, Tensor] = {}
    for cut in cuts:
        masked |= masked_parameters(baseline, cut.unit, keep[cut.unit.name])
    with preserving_state(baseline), preserving_state(pruned), torch.inference_mode():
        output: Any = functional_call(baseline.eval(), masked, (), {"pixel_values": images})
        expected = output.logits.float()
        logits = pruned.eval()(pixel_values=images).logits.float()
    norms = expected.norm(dim=1).clamp_min(torch.finfo(torch.float32).tiny)
    # An infinite logit in both gives nan, which amax propagates.
    return float(((logits - expected).abs().amax(dim=1) / norms).amax())


# Calibration images that go through the gate, or noise images if there are none.
NUM_GATE_IMAGES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruned:
    """A pruned model, its distance to the masked baseline, and the kept channels or heads of each unit by name."""

    model: nn.Module
    mask_error: float
    keep: dict[str, list[int]]


def prune_model(
    model: nn.Module,
    cuts: Sequence[Cut],
    *,
    spec: InputSpec,
    images: Tensor | None = None,
    keep: Mapping[str, Sequence[int]] | None = None,
) -> Pruned:
    """Return a pruned copy of `model`, which is unchanged.

    `keep` has the kept indices by unit name, `cut.keep` ascending ones per cut, by default those with the largest
    weights. `images` (b, c, h, w) go through the gate, by default noise of the model's input shape.

    Example:
        >>> from transformers import ViTConfig, ViTForImageClassification
        >>> from profiling_agent.pruning.units import find_units
        >>> config = ViTConfig(image_size=32, patch_size=8, hidden_size=48, num_hidden_layers=1)
        >>> model = ViTForImageClassification(config)
        >>> spec = InputSpec(channels=3, height=32, width=32, source="example")
        >>> mlp = next(unit for unit in find_units(model, spec, {}).units if unit.kind is UnitKind.MLP)
        >>> pruned = prune_model(model, [Cut(unit=mlp, keep=1536, requested_ratio=0.5)], spec=spec)
        >>> pruned.model.vit.layers[0].mlp.fc1
        Linear(in_features=48, out_features=1536, bias=True)
        >>> pruned.mask_error < 1e-5
        True

    Raises:
        PruningError: the surgery failed, or the pruned model isn't the masked one.
    """
    units = f"{', '.join(cut.unit.name for cut in cuts[:3])} ({len(cuts)} units)"
    # Torch-Pruning, and a model that it left half cut, raise arbitrary exceptions.
    with third_party_errors(lambda error: PruningError(f"cutting {units} failed with {error}; leave some alone")):
        kept = {
            cut.unit.name: list(keep[cut.unit.name]) if keep else largest_weights(model, cut.unit, cut.keep)
            for cut in cuts
        }
        pruned = cut_units(model, cuts, kept)
        batch = random_batch(spec, NUM_GATE_IMAGES) if images is None else images
        error = mask_error(model, pruned, cuts, kept, batch.to(device_of(model)))
    if not math.isfinite(error):
        raise PruningError("the pruned model or the masked baseline gives logits that aren't finite; check the weights")
    if error > MAX_MASK_ERROR:
        raise PruningError(
            f"the pruned model doesn't compute what the masked baseline does: its logits differ by {error!r} of "
            f"their norm, at most {MAX_MASK_ERROR:g} is allowed; leave these units alone"
        )
    return Pruned(model=pruned, mask_error=error, keep=kept)
