"""One data-parallel rank of vLLM, which prints the tokens of its prompts.

    python vllm_rank.py RANK NUM_RANKS PORT MODEL PROMPTS_AS_JSON
"""

import json
import os
import sys


def main() -> None:
    rank, ranks, port, model, prompts = sys.argv[1:]
    os.environ.update(
        VLLM_DP_RANK=rank,
        VLLM_DP_RANK_LOCAL=rank,
        VLLM_DP_SIZE=ranks,
        VLLM_DP_MASTER_IP="127.0.0.1",
        VLLM_DP_MASTER_PORT=port,
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        OMP_NUM_THREADS="1",
        VLLM_LOGGING_LEVEL="INFO",  # it says what it uses
    )
    from vllm import LLM, SamplingParams

    llm = LLM(
        model, dtype="float32", enforce_eager=True, enable_expert_parallel=True, skip_tokenizer_init=True,
        max_model_len=64, max_num_seqs=4, max_num_batched_tokens=64, seed=0,
    )  # fmt: skip
    # every rank is as long at it: an engine that is done would no longer take part in its peers' steps
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in json.loads(prompts)], params, use_tqdm=False)
    print(json.dumps([list(output.outputs[0].token_ids) for output in outputs]))


if __name__ == "__main__":
    main()
