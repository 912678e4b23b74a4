"""A shared expert computed while rows travel: `python examples/overlap.py`.

The tokens of rank 0 all go to experts on rank 1, whose own tokens are mostly padding. So rank 1 waits for rows and is
waited for afterwards. With `split=True` it computes the shared expert instead of waiting.
"""

import statistics
import time

import torch

import epcomm

NUM_EXPERTS, TOPK, HIDDEN, SHARED_WIDTH, TOKENS, STEPS = 16, 8, 4096, 48, 2048, 30


def make_step(comm):
    """A layer's step on fixed tokens, with `overlap` or without."""
    torch.manual_seed(comm.rank)
    ep = comm.expert_parallel(num_experts=NUM_EXPERTS, topk=TOPK, hidden=HIDDEN, max_tokens=TOKENS)
    x = torch.randn(TOKENS, HIDDEN).bfloat16()
    topk_idx = (NUM_EXPERTS // 2 + torch.arange(TOPK)).repeat(TOKENS, 1)  # rank 1's experts
    if comm.rank == 1:
        topk_idx[TOKENS // 16 :] = -1
    weights = torch.rand(TOKENS, TOPK)
    up = torch.randn(HIDDEN, SHARED_WIDTH).bfloat16() / HIDDEN**0.5
    down = torch.randn(SHARED_WIDTH, HIDDEN).bfloat16() / SHARED_WIDTH**0.5
    scale = torch.rand(HIDDEN).bfloat16()

    def shared_expert():
        return torch.nn.functional.silu(x @ up) @ down

    def step(overlap):
        routing = ep.route(topk_idx)
        if overlap:
            sent = ep.dispatch(x, routing, split=True)  # returns once this rank's rows are on their way
            shared = shared_expert()
            received = sent.finish()
        else:
            received = ep.dispatch(x, routing)
            shared = shared_expert()
        y = torch.mul(received.x, scale, out=received.output_buffer())  # experts that cost little
        return ep.combine(y, received, weights) + shared

    return step


@torch.no_grad()
def main():
    torch.set_num_threads(1)
    with epcomm.init() as comm:
        step = make_step(comm)
        same = torch.equal(step(True), step(False))
        times = {True: [], False: []}
        for _ in range(STEPS):
            for overlap, samples in times.items():
                comm.barrier()
                start = time.perf_counter()
                step(overlap)
                comm.barrier()  # the slowest rank counts
                samples.append(time.perf_counter() - start)
        return same, {overlap: statistics.median(samples) * 1e3 for overlap, samples in times.items()}


if __name__ == "__main__":
    same, milliseconds = epcomm.launch(main, 2)[0]
    print(f"same results: {same}")
    print(f"one after the other {milliseconds[False]:.2f} ms, overlapped {milliseconds[True]:.2f} ms")
