"""What is measured with the best and the last model of a run, after training, and the short table that is printed."""

from bnrnn.layers.population import batch_statistics, has_batch_norm, has_step_statistics, shared_statistics
from bnrnn.training.loop import Trainer

ROWS = (  # split, suffix of the metric's name, statistics that a model with batch normalization used
    ("valid", "", "of the batch"),
    ("valid", "_population_statistics", "of the population"),
    ("test", "_batch_statistics", "of the batch"),
    ("test", "", "of the population"),
)


def measure(trainer: Trainer) -> dict[str, float]:
    """Restore the best weights, and measure validation and test with every kind of statistics.

    `valid/<metric>` is measured with batch statistics, which also selected the model, and `test/<metric>` with
    population statistics. The suffixes `_batch_statistics`, `_population_statistics` and `_shared_statistics`
    (population statistics averaged over time) name the other measurements. The suffix `_chosen_by_population` names
    those of the model that validation with population statistics selected; they exist only if the recipe sets
    `population_every`. The suffix `_last` names those of the model after the last update, with population
    statistics, if another model was selected.
    """
    model, best, best_population = trainer.model, trainer.state.best, trainer.state.best_population
    assert best is not None
    metrics: dict[str, float] = {}
    if best["update"] < trainer.state.update:
        if has_batch_norm(model):
            trainer.estimate_population_statistics()
        metrics |= _named(trainer.evaluate("valid") | trainer.evaluate("test"), "last")
    if best_population is not None:
        model.load_state_dict(best_population["model"])
        metrics |= _named(best_population["metrics"] | trainer.evaluate("test"), "chosen_by_population")
    model.load_state_dict(best["model"])
    metrics |= best["metrics"]
    if has_batch_norm(model):
        with batch_statistics(model):
            metrics |= _named(trainer.evaluate("test"), "batch_statistics")
        trainer.estimate_population_statistics()
        metrics |= _named(trainer.evaluate("valid"), "population_statistics")
        if has_step_statistics(model):
            with shared_statistics(model):
                metrics |= _named(trainer.evaluate("valid") | trainer.evaluate("test"), "shared_statistics")
    return metrics | trainer.evaluate("test") | trainer.evaluate_extra() | trainer.evaluate_generated()


def _named(metrics: dict[str, float], suffix: str) -> dict[str, float]:
    return {f"{name}_{suffix}": value for name, value in metrics.items()}


def measure_best_again(trainer: Trainer) -> None:
    """Evaluate the best model of a resumed run again: the evaluations of this run are now in another order."""
    model, best = trainer.model, trainer.state.best
    if best is None:
        return
    present = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict(best["model"])
    with batch_statistics(model):
        best["metrics"] = trainer.evaluate("valid")
    model.load_state_dict(present)
    trainer.log.say(f"evaluation is now in {trainer.order} order: {trainer.summary()}")


def last_lines(status: str, update: int, best: int, metrics: dict[str, float], metric: str) -> list[str]:
    """The status of a run and, if it has metrics, the loss and the main metric of validation and test.

    Args:
        update, best: the last update, and that of the selected model.
        metrics: of result.json; {} if the run has diverged.
        metric: the main metric of the data, such as accuracy.
    """
    if not metrics:
        return [f"{status} at update {update:,}"]
    normalized = "valid/loss_population_statistics" in metrics
    header = ["split", *(["statistics"] if normalized else []), "loss", metric]
    rows = [
        [split, *([kind] if normalized else []), *(f"{metrics[f'{split}/{m}{suffix}']:.4f}" for m in ("loss", metric))]
        for split, suffix, kind in ROWS
        if f"{split}/loss{suffix}" in metrics
    ]
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = ["  ".join(f"{text:<{width}}" for text, width in zip(row, widths, strict=True)) for row in (header, *rows)]
    shown = 2 * len(rows)
    more = f"; {len(metrics) - shown} more numbers in result.json" if len(metrics) > shown else ""
    return [f"{status} at update {update:,}; the model of update {best:,} has{more}:", *(f"  {line}" for line in lines)]
