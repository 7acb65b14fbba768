"""Training on several devices is training on one."""

import dataclasses
import json

import numpy as np
import pytest
import runs

from eagle_jax.training.conversations import Conversation
from eagle_jax.training.trainer import train


def course(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(row["loss"], *row["accuracy"], row["gradient_norm"]) for row in rows if row["kind"] == "train"]


@pytest.mark.slow
@pytest.mark.parametrize(("data", "model"), [(4, 1), (1, 2), (2, 2)])
def test_batches_and_weights_can_be_split(tmp_path, data, model):
    rng = np.random.default_rng(0)
    conversations = [
        Conversation(rng.integers(0, 97, 60).astype(np.int32), np.arange(60) > 5, str(i), 0.0) for i in range(8)
    ]
    config = dataclasses.replace(runs.config(batch_rows=4), total_steps=3)
    options = {"log_every": 1, "tensorboard": False, "picture": False, "say": runs.silent}
    train(runs.target(), conversations, tmp_path / "one", config, **options)
    train(runs.target(), conversations, tmp_path / "many", config, data_parallel=data, model_parallel=model, **options)
    np.testing.assert_allclose(course(tmp_path / "many"), course(tmp_path / "one"), rtol=2e-4)


def test_what_cannot_be_split_is_refused(tmp_path):
    with pytest.raises(ValueError, match="batch_rows 1 is no multiple of data_parallel 2"):
        train(runs.target(), [runs.conversation()], tmp_path, runs.config(), data_parallel=2, say=runs.silent)
    with pytest.raises(ValueError, match="needs 99 devices, and there are 8"):
        train(runs.target(), [runs.conversation()], tmp_path, runs.config(), data_parallel=99, say=runs.silent)
