"""Which hidden states of the target a head reads: two conventions of layer numbers are in use, and many heads name none."""

import dataclasses
from typing import Any, Literal

from eagle_jax.loading.draft_format import LAYER_IDS
from eagle_jax.loading.errors import CheckpointError
from eagle_jax.models.eagle_config import default_capture_layers

Convention = Literal["input", "output"]
CONVENTIONS = ("input", "output")
"""What layer number k means: the state that enters layer k (vLLM, speculators), or that leaves it (SpecForge, ModelOpt)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Capture:
    """The hidden states that make the feature."""

    layers: tuple[int, ...]
    """As `DraftConfig.capture_layers`."""
    origin: str
    """Where they come from, in words."""
    named: bool = False
    """config.json names the layers."""
    last: bool = False
    """It is the last hidden state alone."""
    known: bool = True
    """False: they depend on a target that is not at hand, and `layers` are placeholders."""
    guess: str | None = None
    """What had to be guessed, and how to say otherwise; None if nothing."""


def last_state(target_layers: int | None) -> Capture:
    """The state after the target's final norm, which is what EAGLE-1/2 heads read."""
    return Capture(
        layers=(0 if target_layers is None else target_layers,),
        origin="the last hidden state, after the target's final norm",
        last=True,
        known=target_layers is not None,
    )


def default_layers(states: int, target_layers: int | None) -> Capture:
    """EAGLE-3's own choice, for heads that name no layers.

    Raises:
      CheckpointError: the head reads another number of states than three, or the target is too shallow.
    """
    if states != 3:
        raise CheckpointError(
            f"the head reads {states} hidden states of the target; its config.json must name them ({LAYER_IDS})"
        )
    if target_layers is None:
        return Capture(
            layers=(0, 1, 2),
            origin="EAGLE-3's default, which depends on the depth of the target",
            known=False,
            guess=f"config.json has no {LAYER_IDS}: the capture layers depend on the depth of the target",
        )
    try:
        layers = default_capture_layers(target_layers)
    except ValueError as error:
        raise CheckpointError(str(error)) from error
    return Capture(
        layers=layers,
        origin="EAGLE-3's default",
        guess=f"config.json has no {LAYER_IDS}: capture layers {list(layers)} are EAGLE-3's default for a target of "
        f"{target_layers} layers",
    )


def named_layers(ids: Any, key: str, convention: Convention | None, target_layers: int | None) -> Capture:
    """The layers that config.json names.

    Without a convention, numbers that begin as the output form of EAGLE-3's default does (1, N // 2 - 1) are taken as outputs,
    all others as inputs.

    Args:
      ids: the value of the key.
      key: its name, for messages.
      convention: what the numbers mean, if that is known.
      target_layers: N, None if the target is not at hand.

    Raises:
      CheckpointError: no list of layer numbers, or numbers that the target does not have.
    """
    if (
        not isinstance(ids, list | tuple)
        or not ids
        or not all(isinstance(i, int) and not isinstance(i, bool) for i in ids)
    ):
        raise CheckpointError(f"{key} must be a list of layer numbers, not {ids!r}")
    guess = None
    if convention is None:
        convention, guess = _guess_convention(list(ids), key, target_layers)
    if target_layers is not None:
        # Number N is the state after the final norm; the one that leaves the last layer before that norm is not captured.
        last = target_layers if convention == "input" else target_layers - 2
        if not all(0 <= i <= last for i in ids):
            raise CheckpointError(
                f"{key} {list(ids)} must lie in 0..{last}, as {convention}s of the {target_layers} layers of the target"
            )
    return Capture(
        layers=tuple(i + (convention == "output") for i in ids),
        origin=f"{key} {list(ids)}, {convention}s",
        named=True,
        guess=guess,
    )


def _guess_convention(ids: list[int], key: str, target_layers: int | None) -> tuple[Convention, str | None]:
    advice = "say which with layer_id_convention='input' or 'output'"
    # EAGLE-3's default, with or without further layers between; it tells the depth where the target is not at hand.
    depth = ids[-1] + 3 if target_layers is None else target_layers
    if (ids[0], ids[-1]) == (2, depth - 3) and depth // 2 in ids:
        return "input", None
    depth = ids[-1] + 4 if target_layers is None else target_layers
    if ids[:2] == [1, depth // 2 - 1]:
        return "output", (
            f"{key} {ids} are taken as outputs of these layers, the convention of SpecForge and ModelOpt, because EAGLE-3's "
            f"default layers begin with {ids[:2]} there: the head reads the inputs of {[i + 1 for i in ids]}. To be certain, "
            f"{advice}"
        )
    return "input", f"{key} {ids} are taken as inputs of these layers, vLLM's convention. To be certain, {advice}"
