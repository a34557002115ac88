"""Saved models come back as they were, in halves too; what was damaged is refused in one line that names the file."""

import json
import pickle
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zoo
from deployments import distance, float_logits, pruned, resign
from pruning.families import FAMILIES, TIMM_FAMILIES, processor_of, spec_of
from safetensors.torch import load_file, save_file
from torch import nn

from profiling_agent.errors import ArtifactError
from profiling_agent.lib.costs import count_complexity
from profiling_agent.lib.modules import floating_dtype, logits_of, random_batch
from profiling_agent.quantization.layers import DynamicLinear, QuantizedModule, StaticLayer, parameter_bytes
from profiling_agent.quantization.quantize import Quantized, quantize_model
from profiling_agent.runtimes.artifact import model_bytes, open_session, write_artifact
from profiling_agent.runtimes.registry import noise_batch, runtime
from profiling_agent.runtimes.torch_artifact import (
    load,
    load_dequantized,
    load_module,
    load_processor,
    load_recipe,
    read_source,
    save_deployed,
    save_model,
)
from profiling_agent.schemas import Cut, Deployment, QuantizationRecommendation

EVERYTHING = QuantizationRecommendation(layer="all", dtype="qint8")
STATIC = QuantizationRecommendation(layer="all", quantization_type="static", dtype="qint8")
BFLOAT16 = QuantizationRecommendation(layer="all", quantization_type="cast", dtype="bfloat16")
# Some layers of every kind, and one that stays as it is.
MIXED = (
    STATIC,
    QuantizationRecommendation(layer="fc1|stages.1.layers.0", quantization_type="cast", dtype="bfloat16"),
    QuantizationRecommendation(layer="classifier", dtype="qint8"),
    QuantizationRecommendation(layer="o_proj|shortcut", quantization_type="cast", dtype="float32"),
)


def save(model: nn.Module, folder: Path, cuts: Sequence[Cut] = ()) -> Path:
    save_model(model, folder, spec=zoo.SPEC, processor=zoo.processor(), base_model="zoo", cuts=cuts)
    return folder


def quantized(model: nn.Module, folder: Path, plan: Sequence[Any], cuts: Sequence[Cut] = ()) -> Quantized:
    """Quantize a model by a plan, and save it as the deployment of this plan in `folder`."""
    source = read_source(save(model, folder.parent / "float", cuts), noise_batch(zoo.SPEC, 8), batch_size=8)
    deployment = Deployment(runtime="eager", scheme="static" if plan else "float32", recommendations=tuple(plan))
    save_deployed(source, deployment, folder, num_threads=1)
    return quantize_model(model, plan, calibration=[torch.from_numpy(source.calibration)])


def say(model: nn.Module) -> torch.Tensor:
    return logits_of(model, random_batch(zoo.SPEC, 3, seed=7))


VARIANTS = {
    "pruned": (True, ()),
    "both": (True, (EVERYTHING,)),
    "static": (False, (STATIC,)),
    "bfloat16": (False, (BFLOAT16,)),
    "mixed": (True, MIXED),
}


@pytest.mark.slow
@pytest.mark.parametrize("variant", list(VARIANTS))
@pytest.mark.parametrize("family", list(zoo.FAMILIES))
def test_a_saved_model_computes_what_it_did_and_loading_leaves_the_seed(tmp_path: Path, family: str, variant: str):
    is_small, plan = VARIANTS[variant]
    whole = zoo.FAMILIES[family]()
    model, cuts = pruned(whole, 0.5) if is_small else (whole, ())
    made = quantized(model, tmp_path / "model", plan, cuts)
    before = torch.random.get_rng_state()

    loaded = load_module(tmp_path / "model")

    assert torch.equal(before, torch.random.get_rng_state())
    torch.testing.assert_close(say(loaded), say(made.model), rtol=1e-5, atol=1e-5)


def test_a_loaded_model_states_its_widths_and_heads_and_can_be_saved_again(tmp_path: Path):
    model, cuts = pruned(zoo.swin(), 0.5)
    folder = save(model, tmp_path / "model", cuts)

    loaded = load_module(folder)

    attention = next(zoo.inside(m) for m in loaded.modules() if hasattr(m, "q_proj"))
    assert attention.num_attention_heads == 1
    assert (attention.q_proj.out_features, attention.o_proj.in_features) == (16, 16)
    assert next(m.out_features for n, m in loaded.named_modules() if n.endswith("mlp.fc1")) == 64
    assert torch.equal(say(loaded), say(model))
    assert load_recipe(save(loaded, tmp_path / "again", cuts)) == load_recipe(folder)

    model, cuts = pruned(zoo.resnet(), 0.5)
    block = zoo.inside(load_module(save(model, tmp_path / "convnet", cuts))).resnet.encoder.stages[0].layers[0].layer
    assert block[0].normalization.num_features == 16
    assert (block[0].convolution.out_channels, block[1].convolution.in_channels) == (16, 16)


def test_quantized_weights_are_stored_as_int8_under_their_live_names_and_half_precision_comes_back_equal(
    tmp_path: Path,
):
    half = QuantizationRecommendation(layer=r"layers\.1\.mlp", dtype="float16")
    model = quantize_model(zoo.vit(), [EVERYTHING, half]).model
    folder = save(model, tmp_path / "model")

    tensors, loaded = load_file(folder / "weights.safetensors"), zoo.inside(load_module(folder))

    assert tensors["vit.layers.0.mlp.fc1.weight"].dtype == torch.int8
    assert tensors["vit.layers.0.mlp.fc1.scale"].shape == (256,)
    assert {layer.name for layer in load_recipe(folder).quantized} >= {"classifier", "vit.layers.0.mlp.fc1"}
    assert isinstance(loaded.classifier, DynamicLinear)
    assert (loaded.vit.layers[1].mlp.fc1.dtype, loaded.classifier.dtype) == ("float16", "qint8")
    assert torch.equal(say(loaded), say(model))

    recipe = json.loads((folder / "recipe.json").read_text())
    recipe["quantized"][0]["name"] = "vit.layernorm"
    (folder / "recipe.json").write_text(json.dumps(recipe))
    with pytest.raises(ArtifactError, match="don't fit ViTForImageClassification"):
        load_module(folder)


@pytest.mark.parametrize("family", ["vit", "resnet"])
def test_static_layers_and_folded_norms_come_back_bit_by_bit_and_a_skeleton_has_them_in_float(
    family: str, tmp_path: Path
):
    model, folder = zoo.FAMILIES[family](), tmp_path / "model"
    made = quantized(model, folder, [STATIC])

    loaded, tensors = load_module(folder), load_file(folder / "weights.safetensors")
    skeleton = load_dequantized(folder)

    assert torch.equal(say(loaded), say(made.model))
    assert load_recipe(folder).folded == made.folded
    assert {layer.kind for layer in load_recipe(folder).quantized} == {"static"}
    assert all(tensors[f"{name}.weight"].dtype == torch.int8 for name in made.layers)
    assert not any("running_mean" in name for name in tensors)
    assert type(loaded.get_submodule(made.layers[0])) is StaticLayer
    assert parameter_bytes(loaded) == parameter_bytes(made.model) < 0.4 * parameter_bytes(model)
    assert not any(isinstance(module, (nn.BatchNorm2d, QuantizedModule)) for module in skeleton.modules())
    assert distance(say(skeleton).numpy(), say(model).numpy()) < 0.05


def test_parameters_that_share_memory_are_saved_one_by_one(tmp_path: Path):
    model, whole = zoo.vit(), torch.randn(128, 64)
    model.vit.layers[1].mlp.fc1.weight = model.vit.layers[0].mlp.fc1.weight
    for index, layer in enumerate(model.vit.layers):
        layer.attention.q_proj.weight = nn.Parameter(whole[64 * index : 64 * (index + 1)])

    assert torch.equal(say(load_module(save(model, tmp_path / "model"))), say(model))


def test_the_processor_is_saved_with_the_model_whose_mode_stays(tmp_path: Path):
    model, folder = zoo.vit().train(), tmp_path / "model"

    processor = load_processor(save(model, folder))

    assert processor.size["height"] == 32
    assert list(processor.image_mean) == [0.5, 0.5, 0.5]
    assert model.training
    assert not load_module(folder).training
    # A model weighs what its weights do, and the names of the tensors; not labels, settings and what it said of images.
    assert model_bytes(folder) == (folder / "weights.safetensors").stat().st_size
    assert 0 < model_bytes(folder) - parameter_bytes(model) < 5_000


# One that casts its images by itself, one that doesn't, and one with a table of coordinates that isn't saved.
QUICK = ("vit", "resnet", "swinv2")


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=() if family in QUICK else pytest.mark.slow)
        for family in FAMILIES
        if family not in TIMM_FAMILIES
    ],
)
def test_a_model_in_half_precision_as_a_whole_opens_answers_and_is_counted(family: str, tmp_path: Path):
    model = FAMILIES[family]()
    spec = spec_of(model)
    images = random_batch(spec, 2)
    expected = logits_of(model, images)

    def macs(module: Any) -> dict[str, int]:
        return {name: row.macs for name, row in count_complexity(module, spec).items()}

    before = macs(model)
    # What a model in eval mode keeps of float32 (LeViT its attention biases), training mode lets go.
    half = model.to(torch.bfloat16).train().eval()
    save_model(half, tmp_path / "model", spec=spec, processor=processor_of(spec), base_model="tiny")
    loaded, skeleton = load_module(tmp_path / "model"), load_dequantized(tmp_path / "model")

    assert floating_dtype(loaded) is torch.bfloat16
    # Eight significant bits, through all layers of a network of random weights.
    assert distance(logits_of(loaded, images).numpy(), expected.numpy()) < 0.1
    assert floating_dtype(skeleton) is torch.float32
    assert macs(skeleton) == before


@pytest.mark.parametrize("scheme", ["dynamic", "float8", "bfloat16"])
def test_what_is_saved_for_cuda_opens_on_the_cpu_with_its_logits(scheme: Any, tmp_path: Path):
    save_model(zoo.vit(), tmp_path / "source", spec=zoo.SPEC, processor=zoo.processor(), base_model="zoo")
    source = read_source(tmp_path / "source", noise_batch(zoo.SPEC, 8), batch_size=4, device="cuda")
    deployment, executor = Deployment(runtime="graphed", scheme=scheme), runtime("graphed")

    def golden(folder: Path, recipe: Any, images: np.ndarray) -> np.ndarray:
        return executor.open(folder, recipe, device="cpu", num_threads=1).run(images)

    recipe = write_artifact(
        source.recipe.model_copy(update={"deployment": deployment}),
        tmp_path / "model",
        processor=source.processor,
        write_model=lambda folder: executor.convert(source, deployment, folder),
        golden=golden,
    )

    kinds = {(row.kind, row.dtype) for row in recipe.quantized}
    assert kinds == {"dynamic": {("rowwise", "qint8")}, "float8": {("rowwise", "float8")}, "bfloat16": set()}[scheme]
    module = load_module(tmp_path / "model", verify=True)
    assert {parameter.dtype for parameter in module.parameters()} == {torch.bfloat16}
    images = torch.randn(zoo.SPEC.batch(3)).numpy()
    found = open_session(tmp_path / "model").run(images)
    assert distance(found, float_logits(source, images)) < 0.2


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def link_out(path: Path) -> None:
    path.rename(path.parents[1] / path.name)
    path.symlink_to(path.parents[1] / path.name)


@pytest.mark.parametrize(
    ("name", "damage", "verify", "says"),
    [
        ("weights.safetensors", cut_short, True, "sha256 differs"),
        ("weights.safetensors", Path.unlink, False, "is missing"),
        ("weights.safetensors", cut_short, False, "is damaged"),
        ("recipe.json", cut_short, False, "is damaged"),
        ("preprocessor_config.json", link_out, False, "leads out of"),
    ],
)
def test_a_damaged_file_is_named(folder: Path, name: str, damage: Callable[[Path], None], verify: bool, says: str):
    damage(folder / name)

    with pytest.raises(ArtifactError, match=rf"{re.escape(name)}.*{says}"):
        load_module(folder, verify=verify)


def test_other_files_are_ignored_and_a_folder_and_the_hubs_cache_load_through_links(folder: Path):
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({}))
    (folder.parent / "best").symlink_to("model", target_is_directory=True)
    load_module(folder.parent / "best")

    snapshot = folder.parent / "models--me--x" / "snapshots" / "c0ffee"
    (snapshot.parents[1] / "blobs").mkdir(parents=True)
    snapshot.parent.mkdir()
    folder.rename(snapshot)
    (snapshot / "preprocessor_config.json").rename(snapshot.parents[1] / "blobs" / "1")
    (snapshot / "preprocessor_config.json").symlink_to("../../blobs/1")
    load_module(snapshot)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        *(({"files": {name: "0" * 64}}, "folder itself") for name in ("../a.json", "/etc/a.json", "sub/a.json")),
        ({"schema_version": 99}, "schema_version: Input should be 4"),
    ],
)
def test_a_recipe_of_files_outside_the_folder_or_of_another_version_is_refused(folder: Path, fields: Any, says: str):
    recipe = json.loads((folder / "recipe.json").read_text())
    (folder / "recipe.json").write_text(json.dumps(recipe | fields))

    with pytest.raises(ArtifactError, match=says):
        load_module(folder)


def test_an_ordinary_folder_is_refused(tmp_path: Path):
    with pytest.raises(ArtifactError, match=r"recipe\.json"):
        load_module(zoo.save(zoo.vit(), tmp_path / "plain"))


def add(tensors: dict[str, torch.Tensor]) -> None:
    tensors["classifier.bias"] += 0.5


def rename(tensors: dict[str, torch.Tensor]) -> None:
    tensors["head.bias"] = tensors.pop("classifier.bias")


@pytest.mark.parametrize(
    ("change", "says"), [(add, "doesn't compute what it did"), (rename, "don't fit ViTForImageClassification")]
)
def test_weights_that_compute_something_else_are_refused_though_their_hash_fits(folder: Path, change, says: str):
    tensors = load_file(folder / "weights.safetensors")
    change(tensors)
    save_file(tensors, folder / "weights.safetensors")
    resign(folder)

    for opened in (load, load_module):
        with pytest.raises(ArtifactError, match=says):
            opened(folder)


def test_a_folder_that_exists_is_never_overwritten(folder: Path):
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    with pytest.raises(ArtifactError, match="exists already"):
        save_model(zoo.deit(), folder, spec=zoo.SPEC, processor=zoo.processor(), base_model="zoo")

    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
