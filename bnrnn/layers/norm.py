"""Batch normalization of sequences with separate statistics at every time step.

Cooijmans et al. 2016 (arXiv:1603.09025), section 3: training uses minibatch statistics, evaluation uses population
statistics. Both are kept per time step, because activations in the first steps differ from those in later steps.
"""

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from bnrnn.errors import BnrnnError, check_number, check_size
from bnrnn.layers.average import PopulationAverage, counted_steps
from bnrnn.scan import linear, normalize_over_time, normalize_sequence
from bnrnn.scan.tracing import values_known


class TooFewSequences(BnrnnError):
    """A batch has no variance to normalize with."""


def check_batch(size: int) -> None:
    """Raise TooFewSequences, a BnrnnError, for a batch of fewer than two sequences, which has no variance."""
    if size < 2:
        raise TooFewSequences(
            f"batch statistics need at least 2 sequences, got a batch of {size}: use a larger batch, drop an "
            "incomplete last one, or switch to population statistics with model.eval()"
        )


def check_modes(*norms: "SequenceBatchNorm | None") -> None:
    """Raise BnrnnError if some norms of a scan use the statistics of the batch and others those of the population."""
    if len({norm.uses_batch for norm in norms if norm is not None and not norm.over_time}) > 1:
        raise BnrnnError("some norms of a layer are in training and some in evaluation: call layer.train() or .eval()")


def t_max_of_input(input_statistics: str, t_max: int | None) -> int | None:
    """The t_max for the norm of an input product. Raises BnrnnError if it is missing or `input_statistics` unknown."""
    if input_statistics not in ("frame", "sequence"):
        raise BnrnnError(f"input_statistics={input_statistics!r} is unknown: use 'frame' or 'sequence'")
    if input_statistics == "sequence":
        return None
    check_size("t_max", t_max)
    return t_max


class SequenceBatchNorm(nn.Module):
    """Batch normalization over the batch axis, separately at every time step; gamma and beta are shared over time.

    Args:
        num_features: F, the number of features.
        t_max: number of time steps that have their own population statistics; later steps use the last ones, as in the
            paper. None selects sequence-wise normalization: one mean and one variance over batch and time, without
            padding (Laurent et al. 2015, arXiv:1510.01378, eqs. 20-21).
        gamma_init: initial gamma. Cooijmans et al. use 0.1, which keeps the input of tanh in the range where gradients
            do not vanish.
        eps: added to the variance.
        beta: whether there is a trainable shift.
        statistics: where population statistics come from. "exact": `estimate_population_statistics`, after training;
            "running": a moving average over the batches of training, at each time step, as in torch.nn.BatchNorm1d.
        momentum: weight of the newest batch in the moving average; the first 1 / momentum batches that reach a step
            have equal weights. With 0, all batches have equal weights.

    The buffers `pop_mean` and `pop_var` have shape (t_max, F), or (1, F) for sequence-wise normalization. They are NaN
    until `estimate_population_statistics` fills them. Running statistics begin with 0 and 1 instead, and the buffer
    `num_batches_tracked` (t_max,) counts the batches that reached each step. Raises BnrnnError for t_max below 1, an
    unknown `statistics`, and numbers that are not finite or out of range.
    """

    pop_mean: Tensor
    pop_var: Tensor
    num_batches_tracked: Tensor

    def __init__(
        self,
        num_features: int,
        t_max: int | None,
        gamma_init: float = 0.1,
        eps: float = 1e-5,
        beta: bool = False,
        statistics: str = "exact",
        momentum: float = 0.1,
    ) -> None:
        super().__init__()
        if t_max is not None:
            check_size("t_max", t_max)
        check_number("gamma_init", gamma_init)
        check_number("eps", eps, low=0.0)
        check_number("momentum", momentum, low=0.0, high=1.0)
        if statistics not in ("exact", "running"):
            raise BnrnnError(f"statistics={statistics!r} is unknown: use 'exact' or 'running'")
        self.over_time, self.t_max, self.eps = t_max is None, t_max or 1, eps
        self.gamma_init = float(gamma_init)
        self.gamma = nn.Parameter(torch.empty(num_features))
        self.beta = nn.Parameter(torch.empty(num_features)) if beta else None
        self.running, self.momentum = statistics == "running", momentum
        for name in ("pop_mean", "pop_var"):
            self.register_buffer(name, torch.empty(self.t_max, num_features))
        if self.running:
            self.register_buffer("num_batches_tracked", torch.empty(self.t_max, dtype=torch.long))
        self.reset_parameters()
        self.use_batch_statistics = False  # whether evaluation uses them; see `batch_statistics`
        self.average: PopulationAverage | None = None  # set while population statistics are estimated
        self.register_load_state_dict_pre_hook(_check_stored)
        self._complete = (0, 0)  # id and version of pop_var when it was last seen without NaN

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set gamma and beta to their initial values, and discard the population statistics."""
        self.gamma.fill_(self.gamma_init)
        if self.beta is not None:
            self.beta.zero_()
        self.pop_mean.fill_(0.0 if self.running else torch.nan)
        self.pop_var.fill_(1.0 if self.running else torch.nan)
        if self.running:
            self.num_batches_tracked.zero_()

    def extra_repr(self) -> str:
        options = {"t_max": None if self.over_time else self.t_max, "eps": self.eps}
        if self.running:
            options |= {"statistics": "'running'", "momentum": self.momentum}
        return ", ".join([str(len(self.gamma)), *(f"{name}={value}" for name, value in options.items())])

    @property
    def collecting(self) -> bool:
        """Whether population statistics are being estimated."""
        return self.average is not None

    @property
    def uses_batch(self) -> bool:
        """Whether the layer normalizes with the statistics of the current batch."""
        return self.training or self.use_batch_statistics or self.collecting

    def population(self, t_start: int, num_steps: int) -> tuple[Tensor, Tensor] | None:
        """The population means and variances (num_steps, F) from step t_start on, or None if batch statistics are used.

        In training this also invalidates the stored estimates. Raises BnrnnError in evaluation if there are none.
        """
        if self.training:
            if not self.running:
                # The coming update changes the weights, so earlier estimates become invalid.
                self.pop_var.fill_(torch.nan)
            return None
        if self.uses_batch:
            return None
        if num_steps == 1:
            t_start = min(t_start, self.t_max - 1)
        if t_start + num_steps <= self.t_max:
            mean, var = (buffer.narrow(0, t_start, num_steps) for buffer in (self.pop_mean, self.pop_var))
        else:
            steps = torch.arange(t_start, t_start + num_steps, device=self.pop_mean.device).clamp_max(self.t_max - 1)
            mean, var = self.pop_mean[steps], self.pop_var[steps]
        if not self.running and values_known() and self._is_missing(var):
            lost = not math.isnan(self.pop_mean.sum().item())  # training invalidates the variances alone
            why = "a forward pass in training mode has discarded them" if lost else "none were estimated"
            raise BnrnnError(
                f"evaluation needs population statistics, and {why}: call "
                "bnrnn.estimate_population_statistics(model, training_inputs) after the last pass in training mode, "
                "evaluate inside bnrnn.batch_statistics(model), or build the model with statistics='running'"
            )
        return mean, var

    def _is_missing(self, var: Tensor) -> bool:
        """Whether there is no estimate for these steps. A buffer that was complete is looked at again when it changes.

        This saves half of the time of `population` in calls of one time step.
        """
        buffer = self.pop_var
        if buffer.is_inference():  # it does not count its changes
            return math.isnan(var.sum().item())
        state = id(buffer), buffer._version
        if self._complete != state:
            if math.isnan(buffer.sum().item()):
                return math.isnan(var.sum().item())
            self._complete = state
        return False

    def collect(
        self, t_start: int, mean: Tensor | None, var: Tensor | None, batch_sizes: list[int] | None = None
    ) -> None:
        """Add the statistics (T, F) of one batch, from step t_start on, to the estimate or the moving average."""
        if mean is None or var is None:
            return
        if self.average is not None:
            self.average.add(t_start, mean, var, batch_sizes)
        elif self.training and self.running:
            self._follow(t_start, mean, var, batch_sizes)

    @torch.no_grad()
    def _follow(self, t_start: int, mean: Tensor, var: Tensor, batch_sizes: list[int] | None) -> None:
        """Move the running averages towards the statistics of a batch."""
        steps = counted_steps(t_start, min(len(mean), self.t_max - t_start), batch_sizes)
        kept, end = steps.stop - steps.start, steps.stop
        if kept <= 0:
            return
        self.num_batches_tracked[steps] += 1
        weight = self.num_batches_tracked[steps, None].to(self.pop_mean.dtype).reciprocal().clamp_min(self.momentum)
        for average, value in ((self.pop_mean, mean), (self.pop_var, var)):
            value = value[:kept].to(average.dtype)
            # Not lerp alone: a state_dict without an estimate has brought a NaN.
            average[steps] = torch.where(weight == 1, value, average[steps].lerp(value, weight))
            if end < self.t_max:  # steps that no batch has reached yet repeat the last one
                first = self.num_batches_tracked[end] == 0
                average[end:] = torch.where(first, average[end - 1], average[end:])

    def forward(
        self,
        x: Float[Tensor, "T B F"],
        t_start: int = 0,
        shift: Float[Tensor, " F"] | None = None,
        batch_sizes: list[int] | None = None,
    ) -> Float[Tensor, "T B F"]:
        """Normalize a whole sequence that begins at step t_start.

        Args:
            shift: added instead of this module's beta, for a layer whose bias takes the place of beta.
            batch_sizes: for a padded batch, longest sequence first: only the first batch_sizes[t] rows of step t are
                normalized and counted. The values of the other rows are undefined.
        """
        if self.over_time:
            size = sum(batch_sizes) if batch_sizes else x.shape[0] * x.shape[1]
            normalize, population = normalize_over_time, self.population(0, 1)
        else:
            size = x.shape[1]
            normalize, population = normalize_sequence, self.population(t_start, len(x))
        if population is None:
            check_batch(size)
        beta = self.beta if shift is None else shift
        y, mean, var = normalize(x, self.gamma, beta, self.eps, population, batch_sizes)
        if self.over_time:
            self.collect(0, mean, var)
        else:
            self.collect(t_start, mean, var, batch_sizes)
        return y

    def before_scan(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, t_start: int, batch_sizes: list[int] | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, tuple[Tensor, Tensor] | None]:
        """Return (x, weight, gamma, bias, population), the arguments of a scan that computes and normalizes x W^T.

        Sequence-wise normalization is applied here, before the scan. Then the returned x is the normalized product plus
        bias, and the other four are None.
        """
        if self.over_time:
            x_proj = linear(x, weight)  # (T, B, F)
            return self(x_proj, t_start, bias, batch_sizes).to(x_proj.dtype), None, None, None, None
        return x, weight, self.gamma, bias, self.population(t_start, len(x))


def _check_stored(norm: SequenceBatchNorm, state_dict: dict[str, Tensor], prefix: str, *_: Any) -> None:
    """Raise BnrnnError for stored statistics of another t_max, before they are loaded."""
    found = state_dict.get(f"{prefix}pop_mean", norm.pop_mean)
    if found.shape[1:] == norm.pop_mean.shape[1:] and len(found) != norm.t_max:
        raise BnrnnError(
            f"{prefix}pop_mean has statistics of {len(found)} time steps, and this layer has t_max={norm.t_max}: build "
            f"it with t_max={len(found)}, as the stored one was"
        )
