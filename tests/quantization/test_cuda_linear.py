"""Linear layers in int8 and float8 with a scale per row: error, rows, and which layers a model has in them."""

from pathlib import Path
from typing import Any

import deployments
import numpy as np
import pytest
import torch
import zoo
from torch import nn

from profiling_agent.errors import QuantizationError
from profiling_agent.quantization.layers import RowwiseLinear
from profiling_agent.quantization.quantize import quantize_rowwise
from profiling_agent.runtimes.artifact import Recipe, open_session, write_artifact
from profiling_agent.runtimes.registry import noise_batch, recommend, runtime
from profiling_agent.runtimes.torch_artifact import load_module, read_source, save_model
from profiling_agent.schemas import Deployment, Scheme

# Each with its largest error.
DTYPES: dict[Any, float] = {"qint8": 0.02, "float8": 0.06}
gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
DEVICES = ["cpu", pytest.param("cuda", marks=gpu)]


def layer(num_inputs: int = 192, num_outputs: int = 176, *, bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(num_inputs, num_outputs, bias=bias)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("num_rows", [1, 8, 17, 33])
@pytest.mark.parametrize(("dtype", "most"), DTYPES.items())
def test_a_layer_is_near_its_float_one(dtype: Any, most: float, num_rows: int, bias: bool, device: str):
    linear = layer(bias=bias)
    # Rows of other sizes, each with its own scale.
    x = torch.randn(num_rows, 192) * torch.logspace(-2, 2, num_rows)[:, None]
    quantized = RowwiseLinear.from_linear(linear, dtype).to(device)

    found = quantized(x.to(device, torch.bfloat16))

    expected = linear.double()(x.bfloat16().double()).detach()
    assert found.shape == (num_rows, 176)
    assert found.dtype == torch.bfloat16
    assert found.isfinite().all()
    errors = (found.cpu().double() - expected).norm(dim=1) / expected.norm(dim=1)
    assert float(errors.max()) < most


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_more_dimensions_are_rows_and_zeros_and_the_largest_numbers_stay_numbers(dtype: Any, device: str):
    linear = layer()
    with torch.no_grad():
        linear.weight[3] = 0
    quantized, x = RowwiseLinear.from_linear(linear, dtype).to(device), torch.randn(2, 5, 192, device=device)
    extreme = torch.zeros(40, 192, device=device, dtype=torch.bfloat16)
    extreme[1], extreme[2] = 3e4, -3e4

    assert quantized(x).shape == (2, 5, 176)
    assert quantized(x).dtype == torch.float32
    torch.testing.assert_close(quantized(x)[1], quantized(x[1]))
    assert quantized(extreme).isfinite().all()


@pytest.mark.parametrize(
    ("scheme", "pattern", "dtype"),
    [("dynamic", "all", "qint8"), ("float8", "all", "float8"), ("float8", "fc1", "float8")],
)
def test_linear_layers_that_a_pattern_hits_are_quantized_but_not_the_classifier(
    scheme: Scheme, pattern: str, dtype: str
):
    model = zoo.vit()

    quantized = quantize_rowwise(model, recommend(scheme, pattern))

    linear = [name for name, module in model.named_modules() if type(module) is nn.Linear and name != "classifier"]
    made = {name: module.dtype for name, module in quantized.named_modules() if isinstance(module, RowwiseLinear)}
    assert made == {name: dtype for name in linear if pattern == "all" or name.endswith(pattern)} != {}
    assert quantized.get_submodule("classifier").out_features == len(zoo.LABELS)


def test_a_model_without_such_layers_is_refused_in_one_line():
    for model, chosen in (
        (zoo.resnet(), recommend("dynamic")),
        (zoo.vit(intermediate_size=250), recommend("float8", "fc1")),
    ):
        with pytest.raises(QuantizationError, match="besides the classifier, has widths that are multiples of 16"):
            quantize_rowwise(model, chosen)


@pytest.mark.parametrize("scheme", ["dynamic", "float8", "bfloat16"])
def test_what_is_saved_for_cuda_opens_on_the_cpu_with_its_logits(scheme: Scheme, tmp_path: Path):
    save_model(zoo.vit(), tmp_path / "source", spec=zoo.SPEC, processor=zoo.processor(), base_model="zoo")
    source = read_source(tmp_path / "source", noise_batch(zoo.SPEC, 8), batch_size=4, device="cuda")
    deployment, executor = Deployment(runtime="graphed", scheme=scheme), runtime("graphed")

    def golden(folder: Path, recipe: Recipe) -> tuple[Any, Any]:
        images = noise_batch(zoo.SPEC, 2).astype(np.float16)
        session = executor.open(folder, recipe, device="cpu", num_threads=1)
        return images, session.run(images.astype(np.float32))

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
    assert deployments.distance(found, deployments.float_logits(source, images)) < 0.2
