"""Ridge: second moments damped by a share of their mean, and divided by; for all who let columns stand in for others."""

import torch
from scipy.linalg import LinAlgError, cho_factor, cho_solve
from torch import Tensor

# Share of the columns' mean second moment, so that the noise of few images isn't fitted (docs/facts.md, "Calibration
# images and ridge").
RIDGE = 1e-2
SingularError = torch.linalg.LinAlgError  # pyright: ignore[reportPrivateImportUsage]


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
