"""The course of a run: a file of JSON lines, TensorBoard, lines for people, and a picture at the end."""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

METRICS = "metrics.jsonl"


class Recorder:
    """Takes down what a run measures.

    Args:
      folder: of the run; `metrics.jsonl` in it is continued, what it says beyond `first_step` is dropped.
      first_step: at which the run starts or goes on.
      tensorboard: whether to write event files too, into `tensorboard/`; needs tensorboardX.
      say: takes lines for people.
    """

    def __init__(self, folder: Path, *, first_step: int, tensorboard: bool, say: Callable[[str], None]):
        self.path = folder / METRICS
        kept = [row for row in read_metrics(self.path) if row["step"] <= first_step] if first_step else []
        text = "".join(json.dumps(row) + "\n" for row in kept)
        self.path.write_text(text, encoding="utf-8")
        self._file = self.path.open("a", encoding="utf-8")
        self._say = say
        self._board = None
        if tensorboard:
            from tensorboardX import SummaryWriter

            self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=first_step + 1 if first_step else None)

    def record(self, kind: str, step: int, values: dict[str, Any], line: str) -> None:
        """Keeps numbers, and lists of them, of one step, and says a line."""
        row = {"kind": kind, "step": step, "time": time.time(), **values}
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        self._say(line)
        if self._board is None:
            return
        for name, value in values.items():
            if isinstance(value, list):
                for index, one in enumerate(value):
                    self._board.add_scalar(f"{kind}/{name}/{index}", one, step)
            elif isinstance(value, int | float):
                self._board.add_scalar(f"{kind}/{name}", value, step)

    def close(self) -> None:
        """Ends the files."""
        self._file.close()
        if self._board is not None:
            self._board.close()


def say_on_stderr(line: str) -> None:
    """The usual `say`."""
    print(line, file=sys.stderr, flush=True)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics file; of one that was cut off, those that are whole."""
    rows = []
    if path.is_file():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                rows.append(json.loads(line))
            except ValueError:
                break
    return rows


def draw_course(metrics: Path, picture: Path) -> None:
    """Draws loss, accuracy of each step and accepted length over the steps of a run; needs matplotlib.

    Args:
      metrics: the `metrics.jsonl` of a run.
      picture: file to be written; its ending says the format.

    Raises:
      ValueError: nothing has been measured yet.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = read_metrics(metrics)
    train = [row for row in rows if row["kind"] == "train"]
    evaluations = [row for row in rows if row["kind"] == "evaluation"]
    if not train:
        raise ValueError(f"{metrics} has no training steps to draw")
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    loss, accuracy, length = figure.subplots(1, 3)
    steps = [row["step"] for row in train]
    loss.plot(steps, [row["loss"] for row in train])
    loss.set(title="loss", xlabel="step")
    for depth in range(len(train[0]["accuracy"])):
        accuracy.plot(steps, [row["accuracy"][depth] for row in train], label=f"draft {depth + 1}")
    accuracy.set(title="drafts that are the target's likeliest token", xlabel="step", ylim=(0, 1))
    accuracy.legend(fontsize="small", ncols=2)
    length.plot(steps, [row["simulated_length"] for row in train], label="in training, joint over steps", alpha=0.6)
    if evaluations:
        length.plot(
            [row["step"] for row in evaluations],
            [row["accepted_length"] for row in evaluations],
            marker="o",
            label="held out, rounds walked",
        )
    length.set(title="accepted length", xlabel="step", ylim=(1, None))
    length.legend(fontsize="small")
    figure.savefig(picture, dpi=120)
