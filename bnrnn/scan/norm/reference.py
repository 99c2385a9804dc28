"""The reference for batch normalization of one time step and of a whole sequence (Ioffe and Szegedy 2015)."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from bnrnn.scan.transfer import to_device


def normalize(
    x: Float[Tensor, "B F"],
    gamma: Float[Tensor, " F"],
    beta: Float[Tensor, " F"] | None,
    eps: float,
    mean: Float[Tensor, " F"] | None = None,
    var: Float[Tensor, " F"] | None = None,
) -> tuple[Float[Tensor, "B F"], Float[Tensor, " F"], Float[Tensor, " F"]]:
    """BN(x; gamma, beta), and the mean and biased variance that were used: the given ones or, for None, the batch's."""
    if mean is not None and var is not None:
        if x.shape[0] == 0:  # the backward pass of native_batch_norm divides by the number of rows
            return gamma * standardize(x, mean, var, eps, False) + (0 if beta is None else beta), mean, var
        return torch.native_batch_norm(x, gamma, beta, mean, var, False, 0.0, eps)[0], mean, var
    y, mean, rstd = torch.native_batch_norm(x, gamma, beta, None, None, True, 0.0, eps)
    return y, mean.detach(), variance(rstd, eps)


def variance(rstd: Tensor, eps: float) -> Tensor:
    """The variance, computed from rstd = 1 / sqrt(var + eps) as native_batch_norm returns it; detached."""
    return (rstd.detach() ** -2 - eps).clamp_min(0.0)


# native_batch_norm and its backward fuse several operations: on a CPU they take about a tenth of the time of var_mean.
def standardize(v: Tensor, mean: Tensor, var: Tensor, eps: float, batch: bool) -> Tensor:
    """(v - mean) / sqrt(var + eps). If `batch`, first write the statistics of the batch into mean and var."""
    if not batch:
        return (v - mean) * (var + eps).rsqrt()
    v, mean_now, rstd = torch.native_batch_norm(v, None, None, None, None, True, 0.0, eps)
    mean.copy_(mean_now)
    var.copy_(variance(rstd, eps))
    return v


def through_norm(
    dv: Tensor, v: Tensor, gamma: Tensor, var: Tensor, eps: float, batch: bool, dgamma: Tensor, dbeta: Tensor | None
) -> Tensor:
    """Backpropagate through batch normalization, and add to dgamma and dbeta.

    Args:
        dv: gradient of the output, after scale and shift.
        v: the normalized values, before scale and shift.

    Returns the gradient of the values before normalization.
    """
    zero, one = torch.zeros_like(var), torch.ones_like(var)
    dx, sum_v, total = torch.ops.aten.native_batch_norm_backward(
        dv, v, gamma, zero, one, zero, one, batch, 0.0, [True, True, True]
    )
    dgamma += sum_v
    if dbeta is not None:
        dbeta += total
    return dx * (var + eps).rsqrt()


def normalize_sequence(
    x: Float[Tensor, "T B F"],
    gamma: Float[Tensor, " F"],
    beta: Float[Tensor, " F"] | None,
    eps: float,
    population: tuple[Float[Tensor, "T F"], Float[Tensor, "T F"]] | None = None,
    batch_sizes: list[int] | None = None,
) -> tuple[Float[Tensor, "T B F"], Float[Tensor, "T F"], Float[Tensor, "T F"]]:
    """Apply `normalize` at every time step, with the means and variances of `population` or, for None, of the batch.

    At step t only the first batch_sizes[t] sequences are counted and normalized; the outputs of the others are 0.
    """
    means, variances = population or ([None] * len(x), [None] * len(x))
    sizes = batch_sizes or [x.shape[1]] * len(x)
    # One batch_norm per step is five times faster on a CPU than var_mean over a middle axis.
    steps = zip(x.unbind(0), sizes, means, variances, strict=True)
    done = [normalize(x_t[:n], gamma, beta, eps, mean, var) for x_t, n, mean, var in steps]
    ys, means, variances = zip(*done, strict=True)
    ys = [F.pad(y, (0, 0, 0, x.shape[1] - len(y))) if len(y) < x.shape[1] else y for y in ys]
    return torch.stack(ys), torch.stack(means), torch.stack(variances)


def normalize_over_time(
    x: Float[Tensor, "T B F"],
    gamma: Float[Tensor, " F"],
    beta: Float[Tensor, " F"] | None,
    eps: float,
    population: tuple[Float[Tensor, "1 F"], Float[Tensor, "1 F"]] | None = None,
    batch_sizes: list[int] | None = None,
) -> tuple[Float[Tensor, "T B F"], Float[Tensor, "1 F"], Float[Tensor, "1 F"]]:
    """`normalize_sequence` with one mean and one variance over batch and time, without padding.

    Laurent et al. 2015 (arXiv:1510.01378), eqs. 20-21.
    """
    T, B, num_features = x.shape
    rows, counted = x.flatten(0, 1), None
    if batch_sizes is not None and min(batch_sizes) < B:
        counted = torch.cat([torch.arange(t * B, t * B + n, device="cpu") for t, n in enumerate(batch_sizes)])
        counted = to_device(counted, x.device)
        rows = rows[counted]
    y, mean, var = normalize(rows, gamma, beta, eps, *(v[0] for v in population or ()))
    if counted is not None:
        y = y.new_zeros(T * B, num_features).index_copy(0, counted, y)
    return y.view_as(x), mean[None], var[None]
