"""The same script on any number of processes: `python -m support.one_of_several TENSOR DRAFT DATA`; prints outputs as JSON.

Which processes there are is said by the environment (`eagle_jax.parallel.join_processes`).
"""

import json
import sys

from eagle_jax import LLM, SamplingParams
from support.golden import FOLDER


def main() -> None:
    tensor, draft, data = map(int, sys.argv[1:])
    llm = LLM(
        FOLDER / "target_A",
        dtype="float32",
        tensor_parallel_size=tensor,
        data_parallel_size=data,
        max_num_seqs=2,
        speculative_config={
            "model": str(FOLDER / "head_A_e3"),
            "num_speculative_tokens": 3,
            "draft_tensor_parallel_size": draft,
        },
    )
    prompts = [list(range(5 + i, 25 + 3 * i)) for i in range(4)]
    params = [
        SamplingParams(max_tokens=12, temperature=0.0 if i % 2 else 0.7, seed=i, logprobs=2 if i == 2 else None)
        for i in range(4)
    ]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    unseeded = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=6, temperature=1.0), use_tqdm=False)
    streamed = [token for delta in llm.stream([[4, 5, 6]], SamplingParams(max_tokens=9)) for token in delta.token_ids]
    import jax

    result = {
        "processes": jax.process_count(),
        "devices": [jax.local_device_count(), jax.device_count()],
        "tokens": [o.outputs[0].token_ids for o in outputs],
        "accepted": [o.metrics.accepted_lengths for o in outputs],
        "unseeded": unseeded[0].outputs[0].token_ids,
        "streamed": streamed,
        "metrics": {m.name: getattr(m, "value", None) for m in llm.get_metrics()},
    }
    print("RESULT " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
