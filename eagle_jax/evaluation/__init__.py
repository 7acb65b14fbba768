"""Measures acceptance as the field does: datasets, the loop with its rows file, statistics, reports, regression tests."""

from eagle_jax.evaluation.datasets import Dataset as Dataset
from eagle_jax.evaluation.datasets import Question as Question
from eagle_jax.evaluation.datasets import find_datasets as find_datasets
from eagle_jax.evaluation.divergence import Divergence as Divergence
from eagle_jax.evaluation.divergence import first_divergences as first_divergences
from eagle_jax.evaluation.report import Report as Report
from eagle_jax.evaluation.rounds import TracedRound as TracedRound
from eagle_jax.evaluation.rounds import trace_rounds as trace_rounds
from eagle_jax.evaluation.rows import RowsFile as RowsFile
from eagle_jax.evaluation.run import Evaluation as Evaluation
from eagle_jax.evaluation.run import evaluate as evaluate
from eagle_jax.evaluation.settings import Configuration as Configuration
from eagle_jax.evaluation.settings import EvaluationSettings as EvaluationSettings
from eagle_jax.evaluation.tree_picture import tree_svg as tree_svg
