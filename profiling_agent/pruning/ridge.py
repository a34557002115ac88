"""Ridge: second moments, damped by a share of their mean, and divided by; for all who let columns stand in for others."""

import numpy as np
import torch
from scipy.linalg import LinAlgError, cho_factor, cho_solve, get_blas_funcs
from torch import Tensor

# Share of the columns' mean second moment, so that the noise of few images isn't fitted (docs/facts.md, "Calibration
# images and ridge").
RIDGE = 1e-2
(SYRK,) = get_blas_funcs(("syrk",), dtype=np.float32)
SingularError = torch.linalg.LinAlgError  # pyright: ignore[reportPrivateImportUsage]


def second_moment(rows: Tensor) -> Tensor:
    """Return z'z for the rows z (positions, columns), (columns, columns).

    Torch computes both halves of what is symmetric: 1,576 rows of 3,072 columns take 144 ms so, by BLAS's own routine for it 66 (AMD EPYC,
    2 cores).
    """
    if rows.device.type != "cpu" or rows.dtype != torch.float32:
        return rows.T @ rows
    # It goes down columns, so that the lower half of the transpose is what it calls the upper one.
    lower = torch.from_numpy(SYRK(1.0, rows.detach().contiguous().numpy().T).T)
    return lower.tril().add_(lower.tril(-1).T)


def damp_(gram: Tensor, mean: Tensor, ridge: float = RIDGE) -> Tensor:
    """Add `ridge` times `mean`, of the diagonal that is meant, to the diagonal of `gram`; return it."""
    gram.diagonal().add_(ridge * mean)
    return gram


def divide_(rows: Tensor, gram: Tensor) -> Tensor:
    """Return rows gram^-1 for a symmetric `gram`, float64, in place of both: torch would hold three more of them.

    Raises:
        SingularError: `gram` isn't positive definite.
    """
    square, rest = gram.cpu().numpy(), rows.cpu().numpy()
    try:
        # LAPACK goes down columns: the transpose of a symmetric matrix is itself, and lies as it has to for that.
        factor = cho_factor(square.T, overwrite_a=True, check_finite=False)
    except LinAlgError as error:
        raise SingularError(str(error)) from error
    return torch.from_numpy(cho_solve(factor, rest.T, overwrite_b=True, check_finite=False).T).to(rows)


def damped_inverse(covariance: Tensor) -> Tensor:
    """Return (C + ridge m I)^-1, m the mean variance; columns that don't vary at all get a large finite number."""
    mean = covariance.diagonal().mean().clamp_min(torch.finfo(torch.float32).tiny)
    return torch.cholesky_inverse(torch.linalg.cholesky(damp_(covariance.clone(), mean)))
