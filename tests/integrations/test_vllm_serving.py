"""vLLM serves a tiny model with experts, data- and expert-parallel on CPUs: token for token what transformers says."""

from __future__ import annotations

import importlib.util
import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers_models import tiny_model

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

PROMPTS = [[[5, 17, 33, 2], [90, 1]], [[60, 61, 62, 63, 64, 65, 66], [8]]]  # of each rank


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def test_two_ranks_serve_a_model(tmp_path: Path) -> None:
    model = tiny_model("qwen3_moe", hidden_size=64, head_dim=32).eval()  # widths that vLLM has kernels for
    model.save_pretrained(tmp_path)
    port, rank = free_port(), Path(__file__).with_name("vllm_rank.py")
    logs = [tmp_path / f"rank{number}.log" for number in range(len(PROMPTS))]  # pipes would fill while others are read
    ranks = [
        subprocess.Popen(
            [sys.executable, str(rank), str(number), "2", str(port), str(tmp_path), json.dumps(prompts)],
            stdout=logs[number].open("w"), stderr=subprocess.STDOUT,
        )  # fmt: skip
        for number, prompts in enumerate(PROMPTS)
    ]
    try:
        codes = [process.wait(timeout=500) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    for code, prompts, log in zip(codes, PROMPTS, logs):
        printed = log.read_text()
        assert code == 0, printed[-4000:]
        assert "Using EpcommPrepareAndFinalize" in printed
        tokens_of = next(json.loads(line) for line in printed.splitlines() if line.startswith("[["))
        for prompt, tokens in zip(prompts, tokens_of):
            with torch.no_grad():
                whole = model.generate(torch.tensor([prompt]), max_new_tokens=6, min_new_tokens=6, do_sample=False)
            assert tokens == whole[0, len(prompt) :].tolist()
