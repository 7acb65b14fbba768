"""`eagle-jax inspect`: what a checkpoint is and how it would be loaded."""

import argparse
import json
from collections.abc import Mapping
from typing import Any

from eagle_jax.cli.options import add, add_head_reading_options, add_switch
from eagle_jax.cli.runtime import select_device
from eagle_jax.cli.session import find_head
from eagle_jax.decoding.attention import AttentionShape
from eagle_jax.loading import inspect_checkpoint
from pallas_kernels.backends import Device

DESCRIPTION = (
    "Say what a checkpoint is, its shapes, what would be used, and why it would not load. No weight is loaded. "
    "Exit code 1 if it would not load."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds what the command takes."""
    add(
        parser,
        "path",
        "a folder, a .gguf file, a repository of the model hub, or the name of a released head",
        metavar="PATH",
    )
    add_head_reading_options(parser)
    add_switch(parser, "--json", "print the report as JSON")


def run(options: argparse.Namespace) -> int:
    """Prints the report; 1 if the checkpoint would not load."""

    # Sizes are computed, nothing is placed: an accelerator that another process holds must not matter.
    select_device("cpu")
    report = inspect_checkpoint(
        find_head(options.path), options.target, layer_id_convention=options.layer_id_convention
    )
    attention = attention_by_device(report.geometry) if report.loads else {}
    if options.json:
        print(json.dumps(report.to_dict() | {"attention": attention}, indent=2))
    else:
        print(report.to_text())
        if attention:
            print("  attention     " + ", ".join(f"{name} on {device}" for device, name in attention.items()))
    return 0 if report.loads else 1


def attention_by_device(geometry: Mapping[str, Any]) -> dict[str, str]:
    """The backend that verifies a usual draft tree with heads of this geometry, by kind of device."""

    devices = {
        "TPU": (Device("tpu", "TPU v6 lite"), "bfloat16"),
        "Hopper GPU": (Device("cuda", "NVIDIA H200", "9.0"), "bfloat16"),
        "other GPU": (Device("cuda", "NVIDIA A100", "8.0"), "bfloat16"),
        "CPU": (Device("cpu"), "float32"),
    }
    sizes = {"heads": "num_attention_heads", "kv_heads": "num_key_value_heads", "head_dim": "head_dim"}
    heads = {name: geometry[key] for name, key in sizes.items()}
    return {
        name: AttentionShape(slots=1, tokens=60, capacity=2048, dtype=dtype, tree=True, **heads).choice(device).name
        for name, (device, dtype) in devices.items()
    }
