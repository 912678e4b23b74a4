"""A Hugging Face model whose experts live on two ranks, each with a prompt of its own.

Run it as `python examples/transformers_generate.py`. The model is tiny and its weights are random, so what it writes
only has the shape of text.
"""

import os
import tempfile

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM, logging
from transformers.distributed import DistributedConfig

import epcomm
from epcomm.integrations import transformers

LETTERS = "abcdefghijklmnopqrstuvwxyz .,"
PROMPTS = ["the experts of this model", "tokens travel to where their experts are"]


def main(path):
    with epcomm.init() as comm:
        rank, size = comm.rank, comm.size
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))  # what transformers reads
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    dist.init_process_group("gloo", store=dist.FileStore(f"{path}/store", size), rank=rank, world_size=size)
    transformers.register()
    model = AutoModelForCausalLM.from_pretrained(
        path, distributed_config=DistributedConfig(fsdp_size=size, ep_size=size, ep_implementation="epcomm")
    )
    prompt = torch.tensor([[LETTERS.index(letter) for letter in PROMPTS[rank]]])
    # every rank takes part in every step of any: nobody may stop before the others
    ids = model.generate(prompt, max_new_tokens=24, do_sample=True, synced_gpus=True)
    dist.destroy_process_group()
    return "".join(LETTERS[index] for index in ids[0])


def save_model(path):
    logging.disable_progress_bar()
    config = AutoConfig.for_model(
        "qwen3_moe", hidden_size=64, moe_intermediate_size=32, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=8, num_experts_per_tok=2,
        vocab_size=len(LETTERS), bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(path)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as path:
        save_model(path)
        for rank, text in enumerate(epcomm.launch(main, 2, path)):
            print(f"rank {rank}: {text}")
