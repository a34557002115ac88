"""timm's checkpoints, as timm writes them: read, prepared as timm prepares images, saved, and refused in one line."""

import json
import shutil
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import numpy as np
import pytest
import torch
import transformers as hf
import zoo
from conftest import World
from data.test_models import refusal
from PIL import Image
from pruning.families import TIMM_FAMILIES
from safetensors.torch import load_file, save_file
from skips import TIMM
from world import fitted, pictures, write_data

from profiling_agent import load, optimize
from profiling_agent.data.models import check_timm, load_model, resolve_input_shape
from profiling_agent.errors import AcquisitionError, ArtifactError
from profiling_agent.runtimes.torch_artifact import load_module, load_processor, save_model
from profiling_agent.schemas import Outcome

SETTINGS = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 1, "num_heads": 4}
PREPARED = {
    "input_size": [3, 32, 32],
    "crop_pct": 0.875,
    "crop_mode": "center",
    "interpolation": "bicubic",
    "mean": [0.485, 0.456, 0.406],
    "std": [0.229, 0.224, 0.225],
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Write a folder as timm does: no model_type, weights by timm's own names, and how images are prepared in config.json."""
    folder = tmp_path_factory.mktemp("timm") / "vit"
    config = hf.TimmWrapperConfig(architecture="vit_tiny_patch16_224", model_args=SETTINGS, id2label=zoo.LABELS)
    zoo.randomised(hf.TimmWrapperForImageClassification(config)).save_pretrained(folder)
    rewrite(folder, model_type=None, pretrained_cfg=PREPARED)
    weights = {name.removeprefix("timm_model."): held for name, held in load_file(folder / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture
def folder(checkpoint, tmp_path):
    return shutil.copytree(checkpoint, tmp_path / "vit")


def rewrite(folder, **changes):
    path = folder / "config.json"
    said = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in said.items() if value is not None}))


class TestRead:
    pytestmark = TIMM

    def test_a_checkpoint_is_read_with_its_names_and_its_size(self, folder):
        loaded = load_model(str(folder))

        assert type(loaded.model) is hf.TimmWrapperForImageClassification
        assert zoo.inside(loaded.model).config.id2label == zoo.LABELS
        assert resolve_input_shape(loaded.model, loaded.processor).batch(1) == (1, 3, 32, 32)

    @pytest.mark.parametrize("family", list(TIMM_FAMILIES))
    def test_a_folder_that_timm_itself_writes_is_read(self, family, tmp_path):
        from timm.models import save_for_hf  # pyright: ignore[reportMissingImports] - make test-timm has it

        model = TIMM_FAMILIES[family]()
        names = [f"fruit {number}" for number in range(model.config.num_labels)]
        save_for_hf(model.timm_model, tmp_path / "net", model_config={"label_names": names}, safe_serialization=True)
        said = json.loads((tmp_path / "net" / "config.json").read_text())
        images = torch.randn(2, 3, 32, 32)

        loaded = zoo.inside(load_model(str(tmp_path / "net")).model)

        # What transformers alone can't read: it passes the number of classes by itself too.
        assert said["model_args"]["num_classes"] == said["num_classes"] == len(names)
        assert list(loaded.config.id2label.values()) == names
        with torch.inference_mode():
            assert torch.allclose(
                loaded(pixel_values=images).logits, model.eval()(pixel_values=images).logits, atol=1e-5
            )

    def test_a_checkpoint_of_timms_comes_to_its_verdict_pruned_and_loads(self, tmp_path):
        from timm.models import save_for_hf  # pyright: ignore[reportMissingImports] - make test-timm has it

        torch.manual_seed(0)
        settings = SETTINGS | {"embed_dim": 128, "depth": 2, "mlp_ratio": 8}
        config = hf.TimmWrapperConfig(architecture="vit_tiny_patch16_224", model_args=settings, id2label=zoo.LABELS)
        model = fitted(hf.TimmWrapperForImageClassification(config))
        names = list(zoo.LABELS.values())
        save_for_hf(model.timm_model, tmp_path / "net", model_config={"label_names": names}, safe_serialization=True)
        rewrite(tmp_path / "net", pretrained_cfg=PREPARED | {"crop_pct": 1.0, "mean": [0.5] * 3, "std": [0.5] * 3})
        world = World(tmp_path / "net", write_data(tmp_path / "data"))
        asked = {"runtimes": "eager,onnxruntime", "quantize_dtype": "auto", "batch_size": 4, "max_iterations": 2}

        report = optimize(world.request(tmp_path / "runs", run_id="timm", max_accuracy_drop=0.03, **asked))

        assert report.verdict.outcome is Outcome.MET, report.verdict.explanation
        cuts = [cut for attempt in report.attempts if attempt.dry_run for cut in attempt.dry_run.cuts]
        assert {cut.unit.kind.value for cut in cuts} == {"heads", "mlp"}
        best = load(tmp_path / "runs" / "timm" / "best")
        images, labels = pictures(20, 3)
        assert sum(each.label == names[label] for each, label in zip(best.predict(images), labels, strict=True)) >= 18

    def save(self, loaded, folder):
        spec = resolve_input_shape(loaded.model, loaded.processor)
        save_model(loaded.model, folder, spec=spec, processor=loaded.processor, base_model="x")

    def test_what_was_read_is_saved_and_comes_back_without_timms_own_processor(self, folder, tmp_path):
        loaded = load_model(str(folder))
        self.save(loaded, tmp_path / "saved")
        again, images = load_module(tmp_path / "saved"), torch.randn(2, 3, 32, 32)

        with torch.inference_mode():
            assert torch.equal(again(pixel_values=images).logits, loaded.model(pixel_values=images).logits)
        assert zoo.inside(again).config.id2label == zoo.LABELS
        assert load_processor(tmp_path / "saved").to_dict() == loaded.processor.to_dict()

    def test_timms_own_linear_layers_are_torchs(self, tmp_path):
        config = hf.TimmWrapperConfig(architecture="mobilenetv3_small_050", id2label=zoo.LABELS)
        hf.TimmWrapperForImageClassification(config).save_pretrained(tmp_path / "net")
        rewrite(tmp_path / "net", pretrained_cfg=PREPARED)
        loaded = load_model(str(tmp_path / "net"))
        self.save(loaded, tmp_path / "saved")

        for model in (loaded.model, load_module(tmp_path / "saved")):
            assert type(zoo.inside(model).timm_model.classifier) is torch.nn.Linear

    def test_a_saved_model_that_names_an_architecture_elsewhere_is_refused(self, folder, tmp_path):
        loaded = load_model(str(folder))
        zoo.inside(loaded.model).config.architecture = "hf-hub:other/model"
        self.save(loaded, tmp_path / "saved")

        with pytest.raises(ArtifactError, match="never fetched"):
            load_module(tmp_path / "saved")

    @pytest.mark.parametrize(
        ("changes", "size"),
        [
            ({}, (40, 52)),
            ({}, (200, 90)),
            ({"crop_mode": "squash"}, (40, 50)),
            ({"crop_pct": 1.0, "interpolation": "bilinear"}, (64, 64)),
            ({"crop_mode": "squash", "input_size": [3, 32, 48]}, (70, 41)),
        ],
    )
    def test_images_are_prepared_to_the_pixel_as_timm_does(self, folder, changes, size):
        rewrite(folder, pretrained_cfg=PREPARED | changes)
        image = picture(size)

        ours = load_model(str(folder)).processor(images=[image], return_tensors="pt")["pixel_values"]

        assert torch.allclose(ours, timms(folder, image), atol=1e-6)

    @pytest.mark.parametrize(
        ("changes", "said"),
        [
            ({"pretrained_cfg": PREPARED | {"crop_mode": "border"}}, "crop_mode 'border'"),
            ({"pretrained_cfg": PREPARED | {"interpolation": "random"}}, "RANDOM"),
            (
                {"pretrained_cfg": PREPARED | {"input_size": [3, 32, 48]}},
                "an input_size of 32x48 with crop_mode 'center'",
            ),
            ({"architecture": "resnet5o"}, "Unknown model (resnet5o)"),
            ({"model_args": {"checkpoint_path": "/etc/passwd"}}, "set 'checkpoint_path', which is no setting"),
            ({"model_args": {"pretrained": True}}, "set 'pretrained', which is no setting"),
            ({"model_args": {"no_such": 1}}, "no_such"),
            ({"model_args": SETTINGS | {"embed_dim": 128}}, "of (64,), and by its config.json of (128,)"),
            ({"num_classes": 4, "label_names": ["a", "b", "c", "d"]}, "it names 4 classes by"),
            ({"label_names": [1, 2, 3, 4, 5]}, "names of classes"),
        ],
    )
    def test_a_configuration_that_timm_has_nothing_for_is_one_line(self, folder, changes, said):
        rewrite(folder, **changes)

        assert said in refusal(folder)


@pytest.mark.parametrize(("missing", "other"), [("timm", "torchvision"), ("torchvision", "timm")])
def test_without_timm_a_checkpoint_says_what_to_install(missing, other, monkeypatch):
    there = ModuleType(other)
    there.__spec__ = ModuleSpec(other, None)
    monkeypatch.setitem(sys.modules, other, there)
    monkeypatch.setitem(sys.modules, missing, None)

    with pytest.raises(AcquisitionError, match=rf"{missing} isn't installed: pip install 'profiling-agent\[timm\]'"):
        check_timm({"architecture": "resnet50"}, AcquisitionError)


def picture(size):
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8))


def timms(folder, image):
    return hf.AutoImageProcessor.from_pretrained(folder)([image])["pixel_values"]
