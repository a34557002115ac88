"""One ONNX file: which processors it gives its logits on, and what else can be done where a model has none."""

import json
from pathlib import Path

import deployed
import pytest

from profiling_agent.errors import ArtifactError
from profiling_agent.exporting.export import export
from profiling_agent.runtimes.registry import Source
from profiling_agent.runtimes.save import save_deployed


def test_a_graph_of_eight_bits_says_on_which_processors_its_sums_may_saturate(source: Source, tmp_path: Path):
    saved = tmp_path / "saved"
    save_deployed(source, deployed.deployment("onnxruntime dynamic"), saved, num_threads=1)
    recipe, said = json.loads((saved / "recipe.json").read_text()), dict[bool, str]()

    for reduced in (False, True):
        # As it would have been noted on either kind of processor.
        layers = [layer | {"reduce_range": reduced} for layer in recipe["quantized"]]
        (saved / "recipe.json").write_text(json.dumps(recipe | {"quantized": layers}))
        said[reduced] = export(saved, "onnx", tmp_path / f"{reduced}.onnx")

    assert said[False].endswith(
        "logits here; on a processor without avx512_vnni or avx_vnni its int8 sums may saturate"
    )
    assert said[True].endswith("it gives the saved model's logits")


@pytest.mark.parametrize(
    ("name", "because"),
    [
        ("openvino float32", "whose graph is no ONNX file"),
        ("eager dynamic", "and quantized layers of torch have no place in an ONNX file"),
    ],
)
def test_a_model_that_is_no_onnx_file_is_refused_with_the_ways_to_one(
    source: Source, tmp_path: Path, name: str, because: str
):
    save_deployed(source, deployed.deployment(name), tmp_path / "saved", num_threads=1)

    with pytest.raises(ArtifactError) as caught:
        export(tmp_path / "saved", "onnx", tmp_path / "model.onnx")

    said = str(caught.value)
    assert f"is for {name}, {because}: use --format files, or pick another candidate" in said
    assert said.endswith("(`profiling-agent pick RUN`)")
    assert "\n" not in said
    assert not (tmp_path / "model.onnx").exists()
