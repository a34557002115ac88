import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from profiling_agent.modules.complexity import counted_matmuls, matmul_macs, sdpa_macs


@pytest.mark.parametrize(
    ("first", "second"),
    [((3, 4), (4, 5)), ((2, 3, 4), (4, 5)), ((2, 3, 4), (2, 4, 5)), ((6, 1, 3, 4), (2, 4, 5))],
)
def test_a_matrix_product_counts_as_torch_counts_it(first, second):
    left, right = torch.ones(first), torch.ones(second)
    with FlopCounterMode(display=False) as counter:
        _ = left @ right

    assert matmul_macs(left, right) == counter.get_total_flops() // 2


@pytest.mark.parametrize(("first", "second", "macs"), [((4,), (4, 5), 20), ((3, 4), (4,), 12), ((4,), (4,), 4)])
def test_a_product_with_a_vector_counts_every_multiplication(first, second, macs):
    assert matmul_macs(torch.ones(first), torch.ones(second)) == macs


def test_attention_counts_both_products():
    query, key, value = torch.ones(2, 3, 5, 8), torch.ones(2, 3, 7, 8), torch.ones(2, 3, 7, 4)

    assert sdpa_macs(query, key, value) == 2 * 3 * (5 * 7 * 8 + 5 * 7 * 4)


class Attends(nn.Module):
    def __init__(self, product):
        super().__init__()
        self.inner = nn.Identity()
        self.product = product

    def forward(self, pixels):
        return self.product(self.inner(pixels), pixels.transpose(-2, -1))


PRODUCTS = {
    "operator": lambda first, second: first @ second,
    "function": torch.matmul,
    "keywords": lambda first, second: torch.bmm(input=first, mat2=second),
    "method": lambda first, second: first.bmm(second),
    "fused": lambda first, second: F.scaled_dot_product_attention(first, first, first[..., :0]),
}


@pytest.mark.parametrize("product", PRODUCTS)
def test_a_product_belongs_to_the_module_that_calls_it(product):
    model = nn.Sequential(nn.Identity(), Attends(PRODUCTS[product]))
    with counted_matmuls(model) as macs:
        model(torch.ones(2, 3, 4))

    assert macs == {"1": 2 * 3 * 4 * 3}


def test_products_outside_the_model_are_not_counted():
    with counted_matmuls(nn.Identity()) as macs:
        _ = torch.ones(2, 2) @ torch.ones(2, 2)

    assert not macs
