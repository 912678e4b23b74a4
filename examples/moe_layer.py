"""A mixture-of-experts layer whose experts live on different ranks: `python examples/moe_layer.py`."""

import torch

import epcomm

NUM_EXPERTS, TOPK, HIDDEN, INTERMEDIATE, TOKENS = 8, 2, 256, 512, 128


class MoELayer(torch.nn.Module):
    """Router, expert-parallel dispatch, this rank's experts as MLPs, weighted combine."""

    def __init__(self, comm):
        super().__init__()
        self.ep = comm.expert_parallel(num_experts=NUM_EXPERTS, topk=TOPK, hidden=HIDDEN, max_tokens=TOKENS)
        num_local = len(self.ep.local_experts)
        self.router = torch.nn.Linear(HIDDEN, NUM_EXPERTS, bias=False, dtype=torch.bfloat16)
        self.up = torch.randn(num_local, HIDDEN, INTERMEDIATE, dtype=torch.bfloat16) / HIDDEN**0.5
        self.down = torch.randn(num_local, INTERMEDIATE, HIDDEN, dtype=torch.bfloat16) / INTERMEDIATE**0.5

    @torch.no_grad()
    def forward(self, x):
        weights, experts = self.router(x).float().softmax(-1).topk(TOPK)
        routing = self.ep.route(experts)
        received = self.ep.dispatch(x, routing)  # rows grouped by local expert
        y = received.output_buffer()  # combine reads it in place
        start = 0
        for expert, end in enumerate(received.grouped_mm_offs.tolist()):
            rows = received.x[start:end]
            torch.mm(torch.nn.functional.silu(rows @ self.up[expert]), self.down[expert], out=y[start:end])
            start = end
        return self.ep.combine(y, received, weights)


def main():
    with epcomm.init() as comm:
        torch.manual_seed(comm.rank)
        out = MoELayer(comm)(torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16))
        return f"rank {comm.rank} of {comm.size}: {tuple(out.shape)}, mean magnitude {out.float().abs().mean():.3f}"


if __name__ == "__main__":
    print("\n".join(epcomm.launch(main, 2)))
