"""The KL divergence of answers: of one class among all, or of yes or no for each class of a multi-label model."""

import ast
from pathlib import Path

import pytest
import torch
import zoo
from torch.distributions import Bernoulli, Categorical, kl_divergence

import profiling_agent
from profiling_agent.lib.modules import divergences, mean_kl

EXPECTED, LOGITS = torch.randn(2, 6, 5, generator=torch.Generator().manual_seed(0)).double() * 3
ONE, SEVERAL = zoo.vit(num_hidden_layers=1), zoo.vit(num_hidden_layers=1, problem_type="multi_label_classification")


def test_it_is_that_of_the_class_or_the_sum_over_classes():
    of_class = kl_divergence(Categorical(logits=EXPECTED), Categorical(logits=LOGITS))
    of_set = kl_divergence(Bernoulli(logits=EXPECTED), Bernoulli(logits=LOGITS)).sum(1)
    assert torch.allclose(divergences(EXPECTED, LOGITS, ONE), of_class)
    assert torch.allclose(divergences(EXPECTED, LOGITS, SEVERAL), of_set)
    assert mean_kl(EXPECTED, LOGITS, SEVERAL) == pytest.approx(float(of_set.mean()))


def test_a_shift_of_all_logits_changes_sets_and_no_class():
    assert mean_kl(EXPECTED, EXPECTED + 2, ONE) == pytest.approx(0, abs=1e-12)
    assert mean_kl(EXPECTED, EXPECTED + 2, SEVERAL) > 0.5


def test_every_divergence_in_the_package_is_that_of_a_model():
    folder, num_calls = Path(profiling_agent.__file__).parent, 0
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            name = getattr(node.func, "attr", getattr(node.func, "id", "")) if isinstance(node, ast.Call) else ""
            if isinstance(node, ast.Call) and name in ("mean_kl", "divergences"):
                num_calls += 1
                assert ast.unparse(node.args[-1]) in ("model", "student", "quantized", "source.module"), ast.unparse(
                    node
                )
    assert num_calls > 8
