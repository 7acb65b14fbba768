"""Loading onto a mesh: each device gets its own part, in its own order, and what it shares is said by the sizes."""

from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from support import golden

from eagle_jax import LLM, SamplingParams, load_draft, load_target
from eagle_jax.loading.target import plan_target
from eagle_jax.parallel import make_mesh
from eagle_jax.parallel.partition import parameter_axes, stored_order

TARGET, HEAD = golden.FOLDER / "target_A", golden.FOLDER / "head_A_e3"


def parameters(module: Any) -> dict[str, jax.Array]:
    return {".".join(map(str, path)): v.get_value() for path, v in nnx.to_flat_state(nnx.state(module))}


def assert_spread(module: Any, whole: Any, shards: int) -> None:
    """Every parameter is that of one device in the order of the shards, and large ones take a device its share alone."""
    stored, reference, axes = parameters(module), parameters(whole), parameter_axes(module)
    for name, array in stored.items():
        if name in reference:
            wanted = stored_order(axes[name][0], np.asarray(reference[name]), whole.config, shards)
            assert np.array_equal(np.asarray(array), wanted), name
        if array.ndim == 2:
            assert array.addressable_shards[0].data.nbytes * shards == array.nbytes, name


def test_shards_of_target_and_head() -> None:
    mesh = make_mesh(4)
    read: list[tuple[int, int]] = []
    whole = golden.target("target_A")
    target = load_target(TARGET, dtype="float32", mesh=mesh, progress=lambda _, done, total: read.append((done, total)))
    assert read[-1][0] == read[-1][1]
    # Two key/value heads on four devices: each lies on two of them.
    assert target.model.layers[0].attention.qkv.weight.shape[0] == (4 + 2 * 4) * 16
    assert_spread(target.model, whole.model, 4)
    draft = load_draft(HEAD, target)
    assert draft.head.embed is None
    assert_spread(draft.head, golden.draft("head_A_e3", "target_A").head, 4)
    assert draft.config == golden.draft("head_A_e3", "target_A").config
    # Whole on every device, with a copy of the target's embedding.
    copy = load_draft(HEAD, target, tensor_parallel_size=1)
    assert_spread(copy.head, golden.draft("head_A_e3", "target_A").head, 1)
    assert np.array_equal(np.asarray(copy.head.embed.weight[...]), np.asarray(whole.model.embed.weight[...]))
    assert len(copy.head.fc.weight[...].sharding.device_set) == 4
    assert copy.config == draft.config
    with pytest.raises(ValueError, match="must be 1 or the target's tensor_parallel_size 4, got 2"):
        load_draft(HEAD, target, tensor_parallel_size=2)
    eagle1 = load_draft(golden.FOLDER / "head_A_e1", target, tensor_parallel_size=1).head
    lm_head = np.asarray(eagle1.lm_head.weight[...])
    assert np.array_equal(lm_head, np.asarray(whole.model.lm_head.weight[...]))


def test_only_the_rows_of_a_shard_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has one of four devices: a quarter of the file, but for norms and key/value heads."""
    plan = plan_target(TARGET)
    whole = sum(np.prod(plan.source.shape(n)) * plan.source.dtype(n).itemsize for n in plan.source.names())
    read: list[int] = []
    mesh = make_mesh(4)
    assert mesh is not None
    original = jax.make_array_from_callback

    def first_device_only(shape: Any, sharding: Any, callback: Any, **options: Any) -> jax.Array:
        index = sharding.devices_indices_map(shape)[mesh.devices.flat[0]]
        callback(index)
        return original(
            shape,
            sharding,
            lambda i: np.zeros([len(range(*s.indices(n))) for s, n in zip(i, shape, strict=True)], "float32"),
            **options,
        )

    monkeypatch.setattr(jax, "make_array_from_callback", first_device_only)
    load_target(TARGET, dtype="float32", mesh=mesh, progress=lambda _, done, total: read.append(done))
    assert read[-1] < 0.3 * whole


def test_a_mesh_of_one_changes_nothing() -> None:
    mesh = make_mesh(1, 1, devices=jax.devices()[:1])
    target = load_target(TARGET, dtype="float32", mesh=mesh)
    assert target.mesh is None
    assert target.model.norm.weight[...].sharding == golden.target("target_A").model.norm.weight[...].sharding


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((3, 1), r"num_attention_heads 4, which tensor_parallel_size 3 does not divide"),
        ((8, 1), r"num_attention_heads 4, which tensor_parallel_size 8 does not divide"),
        ((4, 4), r"tensor_parallel_size 4 x data_parallel_size 4 needs 16 devices, and there are 8"),
        ((0, 1), r"tensor_parallel_size must be an integer of at least 1, got 0"),
        ((1, True), r"data_parallel_size must be an integer of at least 1, got True"),
    ],
)
def test_sizes_that_cannot_be(sizes: tuple[int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LLM(TARGET, tensor_parallel_size=sizes[0], data_parallel_size=sizes[1])


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(2, None, 1), (4, 1, 2), (1, 1, 2)], ids=str)
@pytest.mark.parametrize("head", ["head_A_e3", "head_A_e1"])
def test_llm(sizes: tuple[int, int | None, int], head: str) -> None:
    tensor, draft, data = sizes
    prompts: list[Any] = [list(range(5 + i, 25 + 3 * i)) for i in range(5)]
    params = [SamplingParams(max_tokens=24), SamplingParams(max_tokens=20, temperature=0.8, seed=3, logprobs=2)]
    params = [params[i % 2] for i in range(5)]

    def run(**options: Any) -> list[Any]:
        speculative = {
            "model": str(golden.FOLDER / head), "num_speculative_tokens": 3,
            "draft_tensor_parallel_size": options.pop("draft", None),
        }  # fmt: skip
        llm = LLM(TARGET, dtype="float32", max_num_seqs=4, speculative_config=speculative, **options)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return [(o.outputs[0].token_ids, o.metrics.accepted_lengths) for o in outputs]

    got = run(tensor_parallel_size=tensor, data_parallel_size=data, draft=draft)
    assert got == run()
    assert max(length for _, lengths in got for length in lengths) > 2


def test_layouts_for_one_shard_are_the_files() -> None:
    values = np.arange(24.0).reshape(12, 2)
    config = golden.target("target_A").config
    for axis in ("qkv", "gate_up", "vocab"):
        assert np.array_equal(stored_order(axis, values, config, 1), values)
