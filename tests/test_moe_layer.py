"""The MoE layer on several ranks against the dense block in float64, which every rank computes from its inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from ep_cases import check_raised, on_ranks
from torch.utils.checkpoint import checkpoint

import epcomm
from epcomm.errors import CapacityError, ConfigError
from epcomm.moe.layer import MoELayer
from epcomm.moe.received import Received
from epcomm.moe.router import MODELS
from epcomm.testing.routing import TOKENS

HIDDEN, INTERMEDIATE, SHARED, MAX_TOKENS = 16, 24, 8, 9
#: By dtype, how far results may be off, relative to the largest one; float64: routing weights are float32.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-5, torch.bfloat16: 4e-2}

Values = dict[str, torch.Tensor]


def softmax_routing(normalize: bool) -> Callable[[torch.Tensor, Values, int], tuple[torch.Tensor, torch.Tensor]]:
    def route(x: torch.Tensor, values: Values, topk: int) -> tuple[torch.Tensor, torch.Tensor]:
        powers = (x @ values["gate.weight"].t()).exp()
        probabilities = powers / powers.sum(dim=1, keepdim=True)
        weights, experts = probabilities.topk(topk, dim=1)
        return experts, weights / weights.sum(dim=1, keepdim=True) if normalize else weights

    return route


def grouped_sigmoid_routing(x: torch.Tensor, values: Values, topk: int) -> tuple[torch.Tensor, torch.Tensor]:
    """DeepSeek-V3's, for the best 2 of 3 groups."""
    scores = 1 / (1 + (-(x @ values["gate.weight"].t())).exp())
    choice = (scores + values["gate.e_score_correction_bias"]).detach()
    for token in choice:
        groups = token.view(3, -1)
        groups[groups.topk(2, dim=1).values.sum(dim=1).argmin()] = -torch.inf
    experts = choice.topk(topk, dim=1).indices
    weights = scores.gather(1, experts)
    return experts, 2.5 * weights / weights.sum(dim=1, keepdim=True)


def top1_sigmoid_routing(x: torch.Tensor, values: Values, topk: int) -> tuple[torch.Tensor, torch.Tensor]:
    logits, experts = (x @ values["gate.weight"].t()).topk(topk, dim=1)
    return experts, 1 / (1 + (-logits).exp())


@dataclass(frozen=True)
class Model:
    """A kind of MoE block."""

    route: Callable[[torch.Tensor, Values, int], tuple[torch.Tensor, torch.Tensor]]
    router: Any
    shared: str = ""
    weights_on_input: bool = False
    topk: int = 3


KINDS = {
    "mixtral": Model(softmax_routing(True), "mixtral"),
    "qwen2": Model(softmax_routing(False), {**MODELS["qwen2_moe"], "float32_logits": True}, "shared_expert"),
    "deepseek": Model(
        grouped_sigmoid_routing, {**MODELS["deepseek_v3"], "num_groups": 3, "topk_groups": 2}, "shared_experts"
    ),
    "llama4": Model(top1_sigmoid_routing, "llama4", "shared_expert", True, 1),
}


@dataclass(frozen=True)
class Case:
    kind: str = "mixtral"
    dtype: torch.dtype = torch.float64
    tokens: str = "full"
    num_experts: int = 6
    mode: str = "throughput"
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def model(self) -> Model:
        return KINDS[self.kind]

    def state_dict(self) -> Values:
        """The dense block's, the same on all ranks."""
        generator = torch.Generator().manual_seed(5)

        def matrix(rows: int, columns: int) -> torch.Tensor:
            return (torch.randn(rows, columns, generator=generator, dtype=torch.float64) / columns**0.5).to(self.dtype)

        mlps = [(f"experts.{expert}", INTERMEDIATE) for expert in range(self.num_experts)]
        if self.model.shared:
            mlps.append((self.model.shared, SHARED))
        values = {"gate.weight": 2 * matrix(self.num_experts, HIDDEN)}
        if self.kind == "deepseek":
            values["gate.e_score_correction_bias"] = matrix(1, self.num_experts)[0].float()
        if self.kind == "qwen2":
            values["shared_expert_gate.weight"] = matrix(1, HIDDEN)
        for name, intermediate in mlps:
            values[f"{name}.gate_proj.weight"] = matrix(intermediate, HIDDEN)
            values[f"{name}.up_proj.weight"] = matrix(intermediate, HIDDEN)
            values[f"{name}.down_proj.weight"] = matrix(HIDDEN, intermediate)
        return values

    def layer(self, comm: epcomm.Communicator) -> MoELayer:
        return MoELayer.from_state_dict(
            comm,
            self.state_dict(),
            topk=self.model.topk,
            max_tokens=MAX_TOKENS,
            router=self.model.router,
            weights_on_input=self.model.weights_on_input,
            mode=self.mode,
            **dict(self.options),
        )

    def inputs(self, size: int, step: int, seed: int = 0) -> list[torch.Tensor]:
        """All ranks' tokens."""
        inputs = []
        for rank in range(size):
            generator = torch.Generator().manual_seed(1000 * seed + 10 * step + rank)
            num_tokens = TOKENS[self.tokens](rank + step, MAX_TOKENS)
            inputs.append(torch.randn(num_tokens, HIDDEN, generator=generator, dtype=torch.float64).to(self.dtype))
        return inputs

    def dense(self, x: torch.Tensor, values: Values) -> torch.Tensor:
        """The block's output for tokens, of float64 tensors."""
        experts, weights = self.model.route(x, values, self.model.topk)
        out = []
        for token, row in enumerate(x):
            total = torch.zeros_like(row)
            for expert, weight in zip(experts[token].tolist(), weights[token]):
                if self.model.weights_on_input:
                    total = total + mlp(weight * row, values, f"experts.{expert}")
                else:
                    total = total + weight * mlp(row, values, f"experts.{expert}")
            if self.model.shared:
                shared = mlp(row, values, self.model.shared)
                if self.kind == "qwen2":
                    shared = shared / (1 + (-(values["shared_expert_gate.weight"] @ row)).exp())
                total = total + shared
            out.append(total)
        return torch.stack(out) if out else x * 1


def mlp(row: torch.Tensor, values: Values, name: str) -> torch.Tensor:
    gate = values[f"{name}.gate_proj.weight"] @ row
    return values[f"{name}.down_proj.weight"] @ (gate / (1 + (-gate).exp()) * (values[f"{name}.up_proj.weight"] @ row))


def close(what: str, got: torch.Tensor | None, wanted: torch.Tensor | None, dtype: torch.dtype) -> None:
    assert got is not None, f"{what} is None"
    wanted = torch.zeros_like(got) if wanted is None else wanted
    assert got.shape == wanted.shape, (what, got.shape, wanted.shape)
    if got.numel():
        error, largest = (got.double() - wanted.double()).abs().max().item(), wanted.abs().max().item()
        assert error <= TOLERANCE[dtype] * max(largest, 1.0), f"{what}: off by {error} where the largest is {largest}"


def run_forward(comm: epcomm.Communicator, cases: list[Case]) -> None:
    """Without and with gradients, on one layer, with other tokens each time."""
    for case in cases:
        layer = case.layer(comm)
        values = {name: value.double() for name, value in case.state_dict().items()}
        for step in range(3):
            x = case.inputs(comm.size, step)[comm.rank]
            with (torch.no_grad, torch.enable_grad, torch.inference_mode)[step]():
                out = layer(x)
            assert out.dtype == case.dtype
            close(f"rank {comm.rank}, {case}, step {step}: out", out, case.dense(x.double(), values), case.dtype)
        layer.close()


WORLDS = [1, 2, 3, 4]
FORWARD = [
    *(Case(kind) for kind in KINDS),
    *(Case(kind, mode="latency") for kind in ("mixtral", "deepseek")),
    *(Case(tokens=tokens) for tokens in ("uneven", "none_on_odd_ranks", "none")),
    Case("deepseek", tokens="none_on_even_ranks", mode="latency"),
    Case("deepseek", torch.bfloat16, "uneven"),
    Case("qwen2", torch.float32, mode="latency", tokens="uneven"),
    Case(num_experts=3, tokens="uneven"),  # of 4 ranks, one has none
    Case(options=(("alignment", 8),)),
    Case(options=(("layout", "padded"),)),
    Case(mode="latency", options=(("layout", "contiguous"),)),
]


@pytest.mark.parametrize("world", WORLDS)
def test_forward(world: int):
    on_ranks(world, run_forward, FORWARD)


def test_forward_with_placement():
    placements = [(2, 0, 1, 1, 0, 2), (1, 1, 1, 1, 1, 1)]
    cases = [Case(options=(("placement", placement),)) for placement in placements]
    on_ranks(3, run_forward, [*cases, Case("llama4", mode="latency", options=cases[0].options)])


def run_backward(comm: epcomm.Communicator, cases: list[Case]) -> None:
    """Gradients of tokens, router and shared expert from own tokens, of own experts from those of all ranks."""
    for case in cases:
        layer = case.layer(comm)
        for step in range(3):
            inputs, factors = case.inputs(comm.size, step), case.inputs(comm.size, step, seed=1)
            x = inputs[comm.rank].clone().requires_grad_()
            layer.zero_grad()
            out = layer(x)
            out.backward(factors[comm.rank])
            what = f"rank {comm.rank}, {case}, step {step}"
            of_all: Values = {}
            for rank in range(comm.size):
                values = {name: value.double().requires_grad_() for name, value in case.state_dict().items()}
                leaf = inputs[rank].double().requires_grad_()
                wanted = case.dense(leaf, values)
                wanted.backward(factors[rank].double())
                for name, value in values.items():
                    if value.grad is not None:
                        of_all[name] = of_all.get(name, torch.zeros_like(value)) + value.grad
                if rank == comm.rank:
                    close(f"{what}: out", out, wanted, case.dtype)
                    close(f"{what}: gradient of x", x.grad, leaf.grad, case.dtype)
                    check_replicated_gradients(what, case, layer, values)
            check_expert_gradients(what, case, layer, of_all)
        layer.close()


def check_replicated_gradients(what: str, case: Case, layer: MoELayer, values: Values) -> None:
    close(f"{what}: gradient of the router", layer.router.weight.grad, values["gate.weight"].grad, case.dtype)
    if layer.shared_expert is not None:
        gate, up, down = (values[f"{case.model.shared}.{name}_proj.weight"].grad for name in ("gate", "up", "down"))
        gate_up = None if gate is None or up is None else torch.cat([gate, up])[None]
        close(f"{what}: shared gate_up_proj", layer.shared_expert.gate_up_proj.grad, gate_up, case.dtype)
        down = None if down is None else down[None]
        close(f"{what}: shared down_proj", layer.shared_expert.down_proj.grad, down, case.dtype)
    if layer.shared_gate is not None:
        wanted = values["shared_expert_gate.weight"].grad
        close(f"{what}: shared gate", layer.shared_gate.weight.grad, wanted, case.dtype)


def check_expert_gradients(what: str, case: Case, layer: MoELayer, of_all: Values) -> None:
    gate_up_grad, down_grad = layer.experts.gate_up_proj.grad, layer.experts.down_proj.grad
    assert gate_up_grad is not None and down_grad is not None, what
    for number, expert in enumerate(layer.ep.local_expert_ids):
        gate, up, down = (of_all.get(f"experts.{expert}.{name}_proj.weight") for name in ("gate", "up", "down"))
        gate_up = None if gate is None or up is None else torch.cat([gate, up])
        close(f"{what}: gate_up_proj of {expert}", gate_up_grad[number], gate_up, case.dtype)
        close(f"{what}: down_proj of {expert}", down_grad[number], down, case.dtype)


BACKWARD = [
    *(Case(kind) for kind in KINDS),
    *(Case(tokens=tokens) for tokens in ("uneven", "none_on_odd_ranks", "none_on_even_ranks", "none")),
    Case("deepseek", torch.bfloat16, "uneven"),
    Case("qwen2", torch.float32, "none_on_odd_ranks"),
    Case(num_experts=3, tokens="uneven"),
    Case(options=(("alignment", 8),)),
    Case("deepseek", mode="latency", tokens="uneven"),
]


@pytest.mark.parametrize("world", WORLDS)
def test_backward(world: int):
    on_ranks(world, run_backward, BACKWARD)


def test_nodes() -> None:
    """Rows by way of carriers: forward and backward."""
    maps = ((0, 1, 0, 1), (0, 0, 0, 1))
    cases = [Case("deepseek", tokens="uneven", options=(("nodes", nodes),)) for nodes in maps]
    on_ranks(4, run_backward, cases)


def run_in_place(comm: epcomm.Communicator, mode: str) -> None:
    """The experts write where combine reads; with gradients if rows are contiguous."""
    case = Case(dtype=torch.bfloat16, mode=mode)
    layer = case.layer(comm)
    combine, output_buffer = layer.ep.combine, Received.output_buffer
    written, read = [], []

    def note_combine(y: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        read.append(y.data_ptr())
        return combine(y, *args, **kwargs)

    def note_output_buffer(received: Received) -> Any:
        buffer = output_buffer(received)
        written.append(buffer.data_ptr())
        return buffer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layer.ep, "combine", note_combine)
        patch.setattr(Received, "output_buffer", note_output_buffer)
        with torch.no_grad():
            layer(case.inputs(comm.size, 0)[comm.rank])
        assert len(written) == 1 and written == read
        layer(case.inputs(comm.size, 1)[comm.rank])
        in_place = 2 if mode == "throughput" else 1
        assert len(written) == in_place and (read[-1] == written[-1]) == (mode == "throughput")


@pytest.mark.parametrize("mode", ["throughput", "latency"])
def test_experts_write_where_combine_reads(mode: str):
    on_ranks(2, run_in_place, mode)


def run_shapes(comm: epcomm.Communicator) -> None:
    case = Case()
    layer = case.layer(comm)
    x = case.inputs(comm.size, 0)[comm.rank][:8]
    with torch.no_grad():
        flat = layer(x)
        for shape in ((2, 4, HIDDEN), (1, 8, HIDDEN)):
            assert torch.equal(layer(x.view(shape)), flat.view(shape))
        strided = torch.zeros(8, 2 * HIDDEN, dtype=x.dtype)[:, ::2].copy_(x)
        assert torch.equal(layer(strided), flat)
        one = layer(x[0] if comm.rank else x[:1])
        assert one.shape == ((HIDDEN,) if comm.rank else (1, HIDDEN))
        close("out of one token", one.view(-1), flat[0], x.dtype)
        assert layer(x[:0].view(0, 3, HIDDEN)).shape == (0, 3, HIDDEN)


def test_shapes():
    on_ranks(2, run_shapes)


def run_new_layer(comm: epcomm.Communicator) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(comm.rank)
    layer = MoELayer(
        comm,
        hidden=HIDDEN,
        intermediate=INTERMEDIATE,
        num_experts=6,
        topk=2,
        max_tokens=MAX_TOKENS,
        router={**MODELS["deepseek_v3"], "num_groups": 1, "topk_groups": 1},
        shared_intermediate=SHARED,
        shared_gate=True,
        activation="clamped_swiglu",
        expert_bias=True,
    )
    assert layer.router.weight.dtype == torch.float32 and layer.experts.gate_up_proj.dtype == torch.bfloat16
    assert layer(torch.ones(3, HIDDEN, dtype=torch.bfloat16)).shape == (3, HIDDEN)
    assert layer.shared_expert is not None and layer.shared_gate is not None
    layer.close()
    layer.close()
    replicated = layer.router.weight, layer.shared_expert.down_proj, layer.shared_gate.weight
    return *(tensor.detach() for tensor in replicated), layer.experts.down_proj.detach()


def test_new_layer_has_one_router_and_experts_of_its_own():
    *replicated, experts = zip(*on_ranks(3, run_new_layer))
    for mine, *others in replicated:
        assert mine.any() and all(torch.equal(mine, other) for other in others)
    assert len({tuple(tensor.flatten().tolist()) for tensor in experts}) == 3


def run_gpt_oss(comm: epcomm.Communicator) -> None:
    """Fused weights of alternating gate and up, biases everywhere."""
    generator = torch.Generator().manual_seed(3)
    shapes = {
        "router.weight": (4, HIDDEN),
        "router.bias": (4,),
        "experts.gate_up_proj": (4, HIDDEN, 2 * INTERMEDIATE),
        "experts.gate_up_proj_bias": (4, 2 * INTERMEDIATE),
        "experts.down_proj": (4, INTERMEDIATE, HIDDEN),
        "experts.down_proj_bias": (4, HIDDEN),
    }
    values = {
        f"mlp.{name}": torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()
    }
    layer = MoELayer.from_state_dict(
        comm, values, topk=2, max_tokens=MAX_TOKENS, router="gpt_oss", activation="clamped_swiglu"
    )
    x = Case().inputs(comm.size, 0)[comm.rank]
    router, bias, *experts = values.values()
    wanted = []
    for row in x:
        logits, chosen = (router @ row + bias).topk(2)
        outputs = []
        for gate_up, gate_up_bias, down, down_bias in (tuple(part[expert] for part in experts) for expert in chosen):
            inner = row @ gate_up + gate_up_bias
            gate, up = inner[::2].clamp(max=7.0), inner[1::2].clamp(-7.0, 7.0)
            outputs.append(((up + 1) * gate / (1 + (-1.702 * gate).exp())) @ down + down_bias)
        powers = (logits - logits.max()).exp()
        wanted.append((powers / powers.sum()) @ torch.stack(outputs))
    with torch.no_grad():
        close(f"rank {comm.rank}: out", layer(x), torch.stack(wanted), torch.float64)


def test_gpt_oss():
    on_ranks(2, run_gpt_oss)


def run_round_trip(comm: epcomm.Communicator) -> None:
    """A layer's own state dict restores it; frozen parameters stay out of the graph."""
    case = Case("deepseek", torch.float32)
    layer, other = case.layer(comm), Case("deepseek", torch.float32).layer(comm)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    other.load_state_dict(layer.state_dict())
    x = case.inputs(comm.size, 0)[comm.rank]
    assert torch.equal(layer(x), other(x))
    assert all(parameter.requires_grad for parameter in layer.parameters())
    assert "experts.gate_up_proj" in layer.state_dict() and "router.correction_bias" in layer.state_dict()


def test_state_dict_of_a_layer():
    on_ranks(2, run_round_trip)


# ---- what goes wrong


def run_wrong_tokens(comm: epcomm.Communicator) -> None:
    case = Case()
    layer = case.layer(comm)
    x = case.inputs(comm.size, 0)[comm.rank]
    values = {name: value.double() for name, value in case.state_dict().items()}
    for wrong, text in ((x[:, 1:], "(9, 15)"), (x.float(), "torch.float32"), (x.tolist(), "list")):
        given = wrong if comm.rank == 1 else x
        check_raised(comm, lambda given=given: layer(given), ConfigError, "`x`", text)
    too_many = torch.cat([x, x])
    check_raised(comm, lambda: layer(too_many if comm.rank == 1 else x), CapacityError, "max_tokens=9", "18")
    with torch.no_grad():
        close("out after errors", layer(x), case.dense(x, values), case.dtype)


def test_wrong_tokens():
    on_ranks(3, run_wrong_tokens)


def run_wrong_layers(comm: epcomm.Communicator) -> None:
    good: dict[str, Any] = dict(
        hidden=HIDDEN, intermediate=INTERMEDIATE, num_experts=6, topk=2, max_tokens=4, router="mixtral"
    )
    for wrong, texts in (
        ({"router": "gpt2"}, ["`model`", "'gpt2'"]),
        ({"router": {"sharpness": 3}}, ["`router`", "sharpness"]),
        ({"topk": 7}, ["`topk`", "7"]),
        ({"layout": "flat"}, ["`layout`", "'flat'"]),
        ({"intermediate": 0}, ["`intermediate`", "0"]),
        ({"activation": "swish"}, ["`activation`", "'swish'"]),
        ({"shared_intermediate": -1}, ["`shared_intermediate`", "-1"]),
        ({"shared_gate": True}, ["`shared_gate`", "True"]),
        ({"weights_on_input": True}, ["`weights_on_input`", "topk=2"]),
        ({"mode": "fast"}, ["`mode`", "'fast'"]),
    ):
        options = {**good, **wrong} if comm.rank == 1 else good
        check_raised(comm, lambda options=options: MoELayer(comm, **options), ConfigError, *texts)


def test_wrong_layers():
    on_ranks(2, run_wrong_layers)


def run_wrong_state_dict(comm: epcomm.Communicator) -> None:
    case = Case("deepseek")

    def load(spoil: Callable[[Values], Any], router: Any = case.model.router) -> MoELayer:
        state_dict = case.state_dict()
        if comm.rank == 1:
            spoil(state_dict)
        return MoELayer.from_state_dict(comm, state_dict, topk=3, max_tokens=4, router=router)

    key = "experts.5.up_proj.weight"  # of rank 1
    check_raised(comm, lambda: load(lambda values: values.pop(key)), ConfigError, key)
    check_raised(comm, lambda: load(lambda values: values.update({key: values[key].t()})), ConfigError, key, "(16, 24)")
    key = "gate.e_score_correction_bias"
    check_raised(
        comm, lambda: load(lambda values: values.pop(key)), ConfigError, f"lacks `{key}`", "correction_bias=False"
    )
    router = "mixtral" if comm.rank == 1 else case.model.router
    check_raised(comm, lambda: load(len, router), ConfigError, f"has `{key}`", "correction_bias=True")
    load(len).close()


def test_wrong_state_dict():
    on_ranks(2, run_wrong_state_dict)


def run_new_layers(comm: epcomm.Communicator) -> None:
    """A new layer by way of nodes; a first forward that is recomputed; autocast, with and without gradients."""
    sizes = dict(hidden=HIDDEN, intermediate=INTERMEDIATE, num_experts=4, topk=2, max_tokens=MAX_TOKENS)
    layer = MoELayer(comm, **sizes, dtype=torch.float32, nodes=[0] * comm.size)
    x = torch.randn(MAX_TOKENS, HIDDEN, generator=torch.Generator().manual_seed(comm.rank)).requires_grad_()
    checkpoint(layer, x, use_reentrant=False).sum().backward()
    assert x.grad is not None
    with torch.autocast("cpu", torch.bfloat16):
        trained = layer(x)
        with torch.no_grad():
            close("autocast", layer(x), trained.double(), torch.bfloat16)
        trained.sum().backward()


def test_new_layers():
    on_ranks(2, run_new_layers)
