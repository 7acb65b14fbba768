"""What goes wrong in an evaluation."""


class EvaluationError(ValueError):
    """A dataset, a rows file or an expectation that is missing, cannot be read or does not fit."""
