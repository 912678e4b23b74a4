"""vLLM serves a tiny model with experts, data- and expert-parallel on CPUs: token for token what transformers says."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers_models import tiny_model

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

PROMPTS = [[[5, 17, 33, 2], [90, 1]], [[60, 61, 62, 63, 64, 65, 66], [8]]]  # of each rank


def test_two_ranks_serve_a_model(tmp_path: Path, port: int) -> None:
    model = tiny_model("qwen3_moe", hidden_size=64, head_dim=32).eval()  # widths that vLLM has kernels for
    model.save_pretrained(tmp_path)
    rank = Path(__file__).with_name("vllm_rank.py")
    ranks = [
        subprocess.Popen(
            [sys.executable, str(rank), str(number), "2", str(port), str(tmp_path), json.dumps(prompts)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        for number, prompts in enumerate(PROMPTS)
    ]
    try:
        printed = [process.communicate(timeout=500) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    for process, prompts, (out, log) in zip(ranks, PROMPTS, printed):
        assert process.returncode == 0, log[-4000:]
        assert "EpcommPrepareAndFinalize" in out + log
        for prompt, tokens in zip(prompts, json.loads(out.splitlines()[-1])):
            with torch.no_grad():
                whole = model.generate(torch.tensor([prompt]), max_new_tokens=6, min_new_tokens=6, do_sample=False)
            assert tokens == whole[0, len(prompt) :].tolist()
