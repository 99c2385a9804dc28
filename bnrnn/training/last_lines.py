"""What a run prints at its end: a short table of its main numbers. All of them are in result.json."""

ROWS = (  # split, suffix of the metric's name, statistics that a model with batch normalization used
    ("valid", "", "of the batch"),
    ("valid", "_population_statistics", "of the population"),
    ("test", "_batch_statistics", "of the batch"),
    ("test", "", "of the population"),
)


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
