"""The one error for what a user can mend."""


class BnrnnError(ValueError):
    """Bad input, data or configuration. The message names the culprit, what was expected and what to do."""
