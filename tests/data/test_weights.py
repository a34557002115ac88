"""Every part of a model's folder is read, named in a note, or refused: prefixes, shards, copies, adapters; settings of how to run are ignored."""

import json
import shutil

import pytest
import torch
import zoo
from data.test_models import refusal, rewrite_config, split_weights
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageClassification

from profiling_agent.data.models import check_processor, load_model
from profiling_agent.runtimes.torch_artifact import config_of, load_module, save_model

IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
QUERY = "vit.layers.0.attention.q_proj"
PATCHES = "vit.embeddings.patch_embeddings.projection"
# The name of the same layer in files, which is that of transformers 4.
OLD_QUERY = "vit.encoder.layer.0.attention.attention.query"


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    return zoo.save(zoo.vit(), tmp_path_factory.mktemp("weights") / "vit")


@pytest.fixture
def folder(written, tmp_path):
    return shutil.copytree(written, tmp_path / "vit")


def logits(model):
    with torch.inference_mode():
        return model(pixel_values=IMAGES).logits


def expected(folder, **changes):
    """Return the logits of the folder's model with some tensors changed, as transformers itself computes them."""
    model = AutoModelForImageClassification.from_pretrained(folder)
    state = model.state_dict()
    for name, change in changes.items():
        state[name].copy_(change)
    return logits(model.eval())


def change_weights(folder, change, file="model.safetensors"):
    save_file(change(load_file(folder / file)), folder / file, metadata={"format": "pt"})


def write_adapter(folder, tensors, **settings):
    plain = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "init_lora_weights": True}
    (folder / "adapter_config.json").write_text(json.dumps(plain | settings))
    tensors = {f"base_model.model.{name}": tensor.contiguous() for name, tensor in tensors.items()}
    save_file(tensors, folder / "adapter_model.safetensors")


def low_rank(layer, *shape_of_a, out=64, rank=4):
    return {
        f"{layer}.lora_A.weight": torch.randn(rank, *shape_of_a) * 0.3,
        f"{layer}.lora_B.weight": torch.randn(out, rank, *[1] * (len(shape_of_a) - 1)) * 0.3,
    }


class TestHowToRun:
    @pytest.mark.parametrize(
        "settings",
        [
            {"_attn_implementation": "flash_attention_2", "attn_implementation": "flash_attention_2"},
            {"attn_implementation": "flex_attention"},
            {"attn_implementation": "kernels-community/flash-attn"},
            {"_attn_implementation": "eager"},
            {"return_dict": False, "output_attentions": True},
            {"output_attentions": True, "_attn_implementation": "sdpa"},
            {"output_hidden_states": True, "torchscript": True},
            {"return_dict": "no", "use_return_dict": False},
            {"chunk_size_feed_forward": 5, "gradient_checkpointing": True},
            {"hidden_dropout_prob": 0.5, "attention_probs_dropout_prob": 0.5},
            {"torch_dtype": "float16", "dtype": "bfloat16"},
            {"dtype": "auto"},
        ],
    )
    def test_a_setting_of_how_to_run_changes_nothing_in_the_model_nor_in_what_is_saved(
        self, folder, settings, tmp_path
    ):
        plain = load_model(str(folder))
        rewrite_config(folder, **settings)

        loaded = load_model(str(folder))
        spec = check_processor(loaded.model, loaded.processor)
        assert spec is not None
        save_model(loaded.model, tmp_path / "saved", spec=spec, processor=loaded.processor, base_model="x")

        assert loaded.notes == ()
        assert torch.equal(logits(loaded.model), logits(plain.model))
        assert torch.equal(logits(load_module(tmp_path / "saved")), logits(plain.model))
        is_dropout = "hidden_dropout_prob" in settings
        assert is_dropout or config_of(loaded.model) == config_of(plain.model) | {"_name_or_path": str(folder)}

    def test_such_a_setting_of_a_part_of_the_model_is_ignored_too(self, tmp_path):
        from transformers import SiglipConfig, SiglipForImageClassification

        sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
        config = SiglipConfig(vision_config=sizes | {"image_size": 32, "patch_size": 8}, id2label=zoo.LABELS)
        folder = zoo.save(zoo.randomised(SiglipForImageClassification(config)), tmp_path / "siglip")
        vision = json.loads((folder / "config.json").read_text())["vision_config"]
        answers = logits(load_model(str(folder)).model)

        rewrite_config(
            folder, vision_config=vision | {"return_dict": False, "attn_implementation": "flash_attention_2"}
        )

        assert torch.equal(logits(load_model(str(folder)).model), answers)

    @pytest.mark.parametrize(
        ("settings", "cause"),
        [
            ({"num_labels": 7}, "has 7 classes by its config.json, which names 5"),
            ({"num_labels": 7, "id2label": None, "label2id": None}, "it names 7 classes by id2label or num_labels"),
            ({"intermediate_size": 128}, "of (128,): these are of different models"),
        ],
    )
    def test_a_config_that_contradicts_itself_or_the_weights_is_refused_with_the_cause(self, folder, settings, cause):
        rewrite_config(folder, **settings)
        assert cause in refusal(folder)


class TestNames:
    @pytest.mark.parametrize(
        "prefix", ["module.", "_orig_mod.", "_orig_mod.module.", "base_model.model.", "base_model."]
    )
    def test_what_a_wrapper_put_before_every_name_is_taken_off_and_noted(self, folder, prefix):
        answers = expected(folder)
        change_weights(folder, lambda weights: {prefix + name: tensor for name, tensor in weights.items()})

        loaded = load_model(str(folder))

        assert torch.equal(logits(loaded.model), answers)
        note = f"a wrapper's prefixes are left out of the names of weights, as in '{prefix}classifier.bias'"
        assert loaded.notes == (note,)

    def test_a_part_that_was_compiled_alone_is_read(self, folder):
        answers = expected(folder)
        change_weights(
            folder, lambda weights: {name.replace("vit.", "vit._orig_mod."): each for name, each in weights.items()}
        )
        loaded = load_model(str(folder))
        assert torch.equal(logits(loaded.model), answers)
        assert "as in 'vit._orig_mod.embeddings.cls_token'" in loaded.notes[0]

    def test_a_tensor_with_and_without_a_prefix_is_refused(self, folder):
        change_weights(folder, lambda weights: weights | {"module.classifier.bias": torch.zeros(5)})
        assert "hold a tensor twice" in refusal(folder)

    def test_names_under_an_unknown_prefix_are_refused_with_both_names(self, folder):
        change_weights(folder, lambda weights: {f"net.{name}": tensor for name, tensor in weights.items()})
        message = refusal(folder)
        assert "lack 'classifier.bias' and " in message
        assert "and have 'net.classifier.bias' and " in message

    def test_weights_that_lack_a_tensor_are_refused_with_its_name(self, folder):
        change_weights(
            folder, lambda weights: {name: each for name, each in weights.items() if name != f"{OLD_QUERY}.bias"}
        )
        assert f"lack '{QUERY}.bias'" in refusal(folder)

    def test_tensors_that_the_model_does_not_use_are_noted_unless_they_change_nothing(self, folder):
        answers = expected(folder)
        harmless = {"vit.embeddings.position_ids": torch.arange(17), "vit.total_ops": torch.zeros(1)}
        change_weights(folder, lambda weights: weights | harmless)
        assert load_model(str(folder)).notes == ()

        change_weights(folder, lambda weights: weights | {"vit.pooler.dense.bias": torch.zeros(64)})
        loaded = load_model(str(folder))

        assert loaded.notes == ("a ViTForImageClassification does not use 'vit.pooler.dense.bias' of the weights",)
        assert torch.equal(logits(loaded.model), answers)

    def test_counters_that_old_batch_norms_lack_are_no_missing_weights(self, tmp_path):
        folder = zoo.save(zoo.resnet(), tmp_path / "resnet")
        answers = expected(folder)
        change_weights(folder, lambda weights: {n: each for n, each in weights.items() if "num_batches" not in n})
        assert torch.equal(logits(load_model(str(folder)).model), answers)

    @pytest.mark.parametrize(
        ("change", "cause"),
        [
            (lambda tensor: (tensor * 100).to(torch.int8), "quantized already"),
            (lambda tensor: tensor.to(torch.float8_e4m3fn), "quantized already"),
            (lambda tensor: tensor / 0, "weights that are not finite: 'vit.layers.0.attention.q_proj.weight'"),
        ],
    )
    def test_weights_that_are_no_numbers_of_the_model_are_refused(self, folder, change, cause):
        change_weights(
            folder, lambda weights: weights | {f"{OLD_QUERY}.weight": change(weights[f"{OLD_QUERY}.weight"])}
        )
        assert cause in refusal(folder)

    def test_python_code_next_to_a_known_model_is_noted(self, folder):
        rewrite_config(folder, auto_map={"AutoModelForImageClassification": "mine.Mine"})
        assert load_model(str(folder)).notes == (
            "the model's own Python code is not run: it is a ViTForImageClassification of transformers",
        )


class TestFiles:
    def test_other_weights_in_the_folder_are_named_and_a_trainers_files_are_not(self, folder):
        for name in ("training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state_0.pth", "README.md"):
            (folder / name).write_bytes(b"")
        assert load_model(str(folder)).notes == ()

        for name in ("pytorch_model.bin", "model.fp16.safetensors"):
            (folder / name).write_bytes(b"")

        assert load_model(str(folder)).notes == (
            "the weights are those in 'model.safetensors'; not read: 'model.fp16.safetensors' and 1 more",
        )

    def test_whole_weights_are_read_and_shards_next_to_them_named(self, folder):
        split_weights(shutil.copytree(folder, folder.parent / "split"))
        change_weights(folder, lambda weights: weights | {"classifier.bias": torch.ones(5)})
        answers = expected(folder)
        for file in (folder.parent / "split").glob("model*"):
            shutil.copy(file, folder)

        loaded = load_model(str(folder))

        assert torch.equal(logits(loaded.model), answers)
        assert "'model.safetensors'; not read: 'model-00001-of-00002.safetensors' and 1 more" in loaded.notes[0]

    def test_a_shard_that_the_index_lacks_is_named_and_one_that_is_not_there_refused(self, folder):
        answers = expected(folder)
        split_weights(folder)
        shutil.copy(folder / "model-00001-of-00002.safetensors", folder / "model-00003-of-00003.safetensors")
        loaded = load_model(str(folder))
        assert torch.equal(logits(loaded.model), answers)
        assert "; not read: 'model-00003-of-00003.safetensors'" in loaded.notes[0]

        (folder / "model-00002-of-00002.safetensors").unlink()

        assert "'model-00002-of-00002.safetensors' is not there; not read: " in refusal(folder)

    @pytest.mark.parametrize(
        ("name", "others"), [("model.fp16.safetensors", "; not read: 'model.fp16.safetensors'"), ("x.txt", "")]
    )
    def test_a_folder_without_the_expected_file_is_refused_with_what_is_there(self, folder, name, others):
        (folder / "model.safetensors").rename(folder / name)
        assert f"model.safetensors' is not there{others}: save it as safetensors" in refusal(folder)


class TestAdapters:
    @pytest.mark.parametrize("query", [QUERY, OLD_QUERY])
    @pytest.mark.parametrize(("settings", "scale"), [({}, 8 / 4), ({"use_rslora": True}, 8 / 2)])
    def test_an_adapter_is_merged_by_its_formula_whatever_release_named_its_layers(
        self, folder, query, settings, scale
    ):
        weight = load_file(folder / "model.safetensors")[f"{OLD_QUERY}.weight"]
        adapter = low_rank(query, 64)
        write_adapter(folder, adapter, **settings)
        delta = scale * adapter[f"{query}.lora_B.weight"] @ adapter[f"{query}.lora_A.weight"]
        wanted = expected(folder, **{f"{QUERY}.weight": weight + delta})

        loaded = load_model(str(folder))

        assert torch.allclose(logits(loaded.model), wanted, atol=1e-5)
        assert not torch.allclose(logits(loaded.model), expected(folder), atol=1e-2)
        assert loaded.notes == ("an adapter (adapter_model.safetensors) is merged into 1 layers",)

    def test_a_convolution_is_adapted_and_a_saved_classifier_replaces_one_of_other_classes(self, folder):
        weight = load_file(folder / "model.safetensors")[f"{PATCHES}.weight"]
        head = {"classifier.weight": torch.randn(5, 64), "classifier.bias": torch.randn(5)}
        adapter = low_rank(PATCHES, 3, 8, 8)
        a, b = (adapter[f"{PATCHES}.lora_{part}.weight"].flatten(1) for part in "AB")
        wanted = expected(folder, **{f"{PATCHES}.weight": weight + 2 * (b @ a).view_as(weight)}, **head)
        pretrained = {"classifier.weight": torch.randn(9, 64), "classifier.bias": torch.randn(9)}
        change_weights(folder, lambda weights: weights | pretrained)
        write_adapter(folder, adapter | {f"classifier.modules_to_save.{n[11:]}": each for n, each in head.items()})

        loaded = load_model(str(folder))

        assert torch.allclose(logits(loaded.model), wanted, atol=1e-5)
        assert "merged into 1 layers and replaces 2 tensors" in loaded.notes[0]

    @pytest.mark.parametrize(
        ("settings", "extra", "cause"),
        [
            ({"alpha_pattern": {"q_proj": 2}}, {}, "more than low-rank matrices of one scale: merge it with PEFT"),
            ({"init_lora_weights": "pissa"}, {}, "more than low-rank matrices"),
            ({"peft_type": "LOHA"}, {}, "more than low-rank matrices"),
            ({}, {f"{QUERY}.lora_magnitude_vector": torch.ones(64)}, "more than low-rank matrices"),
            ({}, low_rank("swin.layers.0.q", 64), "its adapter is of another model"),
            ({}, {"head.bias": torch.ones(5)}, "its adapter is of another model, with 'head.bias'"),
        ],
    )
    def test_an_adapter_that_is_no_plain_one_of_this_model_is_refused(self, folder, settings, extra, cause):
        write_adapter(folder, low_rank(QUERY, 64) | extra, **settings)
        assert cause in refusal(folder)

    @pytest.mark.parametrize("part", ["adapter_config.json", "adapter_model.safetensors"])
    def test_half_of_an_adapter_is_refused(self, folder, part):
        write_adapter(folder, low_rank(QUERY, 64))
        (folder / part).unlink()
        assert part in refusal(folder)

    def test_an_adapter_without_its_model_is_refused_with_the_way_to_merge_it(self, folder):
        write_adapter(folder, low_rank(QUERY, 64))
        (folder / "model.safetensors").unlink()
        assert "is an adapter without its model: merge it with PEFT (PeftModel.from_pretrained" in refusal(folder)
        (folder / "config.json").unlink()
        assert "is an adapter without its model" in refusal(folder)

    def test_an_adapter_inside_the_weights_is_refused(self, folder):
        change_weights(folder, lambda weights: weights | low_rank(f"base_model.model.{QUERY}", 64))
        assert "hold an adapter that is not merged" in refusal(folder)

    def test_an_adapter_in_a_folder_of_its_own_is_named(self, folder):
        (folder / "pets").mkdir()
        write_adapter(folder / "pets", low_rank(QUERY, 64))
        assert "; not read: 'pets/adapter_config.json'" in load_model(str(folder)).notes[0]
