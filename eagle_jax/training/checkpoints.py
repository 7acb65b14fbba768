"""Checkpoints of a run, by orbax: parameters, optimiser and step, and what the host keeps about evaluations."""

from pathlib import Path
from typing import Any

import jax

from eagle_jax.training.step import TrainState


class Checkpoints:
    """The last checkpoints of a run in a folder. A checkpoint appears only when it is complete."""

    def __init__(self, folder: Path, *, keep: int = 2):
        import orbax.checkpoint as ocp

        self._ocp = ocp
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, create=True)
        self._manager = ocp.CheckpointManager(folder.resolve(), options=options, item_names=("state", "host"))

    @property
    def latest(self) -> int | None:
        """Step of the newest checkpoint; None if there is none."""
        return self._manager.latest_step()

    def save(self, state: TrainState, host: dict[str, Any]) -> None:
        """Writes a checkpoint unless there is one of this step; `host` is plain JSON."""
        step = int(state.step)
        if step in self._manager.all_steps():
            return
        args = self._ocp.args
        self._manager.save(step, args=args.Composite(state=args.StandardSave(_tree(state)), host=args.JsonSave(host)))
        self._manager.wait_until_finished()

    def restore(self, like: TrainState) -> tuple[TrainState, dict[str, Any]]:
        """The newest checkpoint; `like` gives structure, shapes, dtypes and placement."""
        abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), _tree(like))
        args = self._ocp.args
        done = self._manager.restore(
            self.latest, args=args.Composite(state=args.StandardRestore(abstract), host=args.JsonRestore())
        )
        return TrainState(**done["state"]), done["host"]

    def close(self) -> None:
        """Ends orbax's threads."""
        self._manager.close()


def _tree(state: TrainState) -> dict[str, Any]:
    return {"parameters": state.parameters, "optimizer": state.optimizer, "step": state.step}
