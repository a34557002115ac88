import pytest
import torch

from profiling_agent.pruning.compensation import second_moment


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_second_moment_is_the_product_with_itself_both_halves_of_it(dtype):
    rows = torch.tensor([[1.0, 2.0, -1.0], [3.0, 0.5, 0.0]], dtype=dtype)

    expected = torch.tensor([[10.0, 3.5, -1.0], [3.5, 4.25, -2.0], [-1.0, -2.0, 1.0]], dtype=dtype)
    assert torch.equal(second_moment(rows), expected)


def test_the_second_moment_of_columns_that_lie_apart_in_memory_is_theirs():
    rows = torch.randn(40, 9, generator=torch.Generator().manual_seed(0))
    apart = rows.T.contiguous().T[:, ::2]

    assert torch.allclose(second_moment(apart), apart.T @ apart, rtol=1e-5, atol=1e-5)
