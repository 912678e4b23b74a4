"""Experts against their formula, row by row in float64, and their weights out of checkpoints of all formats."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from epcomm.errors import ConfigError
from epcomm.moe.experts import Experts, grouped_mm_works
from epcomm.moe.state_dict import DenseBlock

CPU = torch.device("cpu")
#: By dtype, how far a result may be off, relative to the largest one.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}
SIZES = {"aligned": (16, 24), "unaligned": (7, 5), "intermediate_unaligned": (8, 12)}
COUNTS = {"uneven": [3, 0, 5], "one": [0, 0, 1], "even": [4, 4, 4], "none": [0, 0, 0], "no_experts": []}

Values = dict[str, torch.Tensor]


def made(counts: Sequence[int], sizes: str, dtype: torch.dtype, **options: Any) -> Experts:
    hidden, intermediate = SIZES[sizes]
    experts = Experts(len(counts), hidden, intermediate, dtype=dtype, **options)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / math.sqrt(parameter.shape[-1]))
    return experts


def rows_of(shape: Sequence[int], dtype: torch.dtype, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def offsets_of(counts: Sequence[int]) -> torch.Tensor:
    return torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)


ACTIVATIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "silu": lambda gate, up: gate / (1 + (-gate).exp()) * up,
    "gelu": lambda gate, up: gate * (1 + torch.erf(gate / math.sqrt(2))) / 2 * up,
    "gelu_tanh": lambda gate, up: (
        gate * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) / 2 * up
    ),
    "relu": lambda gate, up: torch.where(gate > 0, gate, 0.0) * up,
    "clamped_swiglu": lambda gate, up: (
        (torch.clamp(up, -7, 7) + 1) * torch.clamp(gate, max=7) / (1 + (-1.702 * torch.clamp(gate, max=7)).exp())
    ),
}


def exact(experts: Experts, rows: torch.Tensor, expert_of: Sequence[int], activation: str = "silu") -> tuple[Any, Any]:
    """float64: the result for rows [n, hidden] of these experts, and the parameters and rows that it comes from."""
    leaves = {name: value.detach().double().requires_grad_() for name, value in experts.named_parameters()}
    leaves["rows"] = rows.detach().double().requires_grad_()
    results = [leaves["rows"][:0]]
    for row, expert in zip(leaves["rows"], expert_of):
        inner = leaves["gate_up_proj"][expert] @ row
        if "gate_up_bias" in leaves:
            inner = inner + leaves["gate_up_bias"][expert]
        half = len(inner) // 2
        result = leaves["down_proj"][expert] @ ACTIVATIONS[activation](inner[:half], inner[half:])
        if "down_bias" in leaves:
            result = result + leaves["down_bias"][expert]
        results.append(result[None])
    return torch.cat(results), leaves


def expert_of_rows(counts: Sequence[int]) -> list[int]:
    return [expert for expert, count in enumerate(counts) for _ in range(count)]


def close(what: str, got: torch.Tensor | None, wanted: torch.Tensor | None, dtype: torch.dtype) -> None:
    assert got is not None, f"{what} is None"
    wanted = torch.zeros_like(got) if wanted is None else wanted
    assert got.dtype == dtype and got.shape == wanted.shape, (what, got.dtype, got.shape, wanted.shape)
    if got.numel():
        error, largest = (got.double() - wanted.double()).abs().max().item(), wanted.abs().max().item()
        assert error <= TOLERANCE[dtype] * max(largest, 1.0), f"{what}: off by {error} where the largest is {largest}"


def check_gradients(experts: Experts, rows: torch.Tensor, leaves: Values, dtype: torch.dtype) -> None:
    close("gradient of rows", rows.grad, leaves["rows"].grad, dtype)
    for name, parameter in experts.named_parameters():
        close(f"gradient of {name}", parameter.grad, leaves[name].grad, dtype)


@pytest.mark.parametrize("grouped", [True, False], ids=["grouped", "loop"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("bias", [False, True], ids=["no_bias", "bias"])
@pytest.mark.parametrize("counts", COUNTS)
def test_contiguous(counts: str, bias: bool, sizes: str, dtype: torch.dtype, grouped: bool):
    numbers = COUNTS[counts]
    experts = made(numbers, sizes, dtype, bias=bias, grouped=grouped)
    rows = rows_of((sum(numbers), experts.hidden), dtype).requires_grad_()
    wanted, leaves = exact(experts, rows, expert_of_rows(numbers))
    offsets = offsets_of(numbers)
    result = experts(rows, offsets)
    close("result", result, wanted, dtype)
    factors = rows_of(result.shape, dtype, seed=2)
    result.backward(factors)
    wanted.backward(factors.double())
    check_gradients(experts, rows, leaves, dtype)
    with torch.no_grad():
        close("result without gradients", experts(rows, offsets.tolist()), wanted, dtype)
        out = torch.full_like(rows, torch.nan)
        assert experts(rows, offsets, out=out) is out
        close("result in out", out, wanted, dtype)
    rows.grad = None
    experts.zero_grad()
    out = torch.full_like(rows, torch.nan).detach()
    result = experts(rows, offsets, out=out)
    assert result.data_ptr() == out.data_ptr() and result.requires_grad
    close("result in out, with gradients", result, wanted, dtype)
    result.backward(factors)
    check_gradients(experts, rows, leaves, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["no_bias", "bias"])
@pytest.mark.parametrize("counts", COUNTS)
def test_padded(counts: str, bias: bool, dtype: torch.dtype):
    """What lies past the counts is NaN, and changes nothing."""
    numbers = COUNTS[counts]
    experts = made(numbers, "aligned", dtype, bias=bias)
    is_real = torch.arange(6) < torch.tensor(numbers, dtype=torch.int64)[:, None]
    rows = rows_of((len(numbers), 6, experts.hidden), dtype).masked_fill(~is_real[..., None], torch.nan)
    rows.requires_grad_()
    wanted, leaves = exact(experts, rows[is_real], expert_of_rows(numbers))
    result = experts(rows, expert_counts=numbers)
    close("result", result[is_real], wanted, dtype)
    factors = rows_of(result.shape, dtype, seed=2).masked_fill(~is_real[..., None], torch.nan)
    result.backward(factors)
    wanted.backward(factors[is_real].double())
    assert rows.grad is not None and not rows.grad[~is_real].any()
    close("gradient of rows", rows.grad[is_real], leaves["rows"].grad, dtype)
    for name, parameter in experts.named_parameters():
        close(f"gradient of {name}", parameter.grad, leaves[name].grad, dtype)
    with torch.no_grad():
        out = torch.zeros_like(rows)
        assert experts(rows, expert_counts=torch.tensor(numbers), out=out) is out
        close("result in out", out[is_real], wanted, dtype)
        close("result for all rows", experts(rows)[is_real], wanted, dtype)
        assert experts(rows, out=out) is out
        close("result for all rows in out", out[is_real], wanted, dtype)


def test_capacity_of_no_rows():
    experts = made([0, 0], "aligned", torch.float32)
    experts(torch.zeros(2, 0, 16), expert_counts=[0, 0]).sum().backward()
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in experts.parameters())


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation: str):
    experts = made([5, 5], "aligned", torch.float64, activation=activation, bias=True)
    with torch.no_grad():
        experts.gate_up_proj.mul_(8)  # into the clamps
    rows = rows_of((10, 16), torch.float64).requires_grad_()
    wanted, leaves = exact(experts, rows, expert_of_rows([5, 5]), activation)
    result = experts(rows, [0, 5, 10])
    close("result", result, wanted, torch.float64)
    result.sum().backward()
    wanted.sum().backward()
    close("gradient of rows", rows.grad, leaves["rows"].grad, torch.float64)


def test_own_activation():
    experts = made([5], "aligned", torch.float64, activation=lambda gate, up: gate.sigmoid() * up)
    silu = made([5], "aligned", torch.float64)
    rows = rows_of((5, 16), torch.float64)
    assert not torch.equal(experts(rows, [0, 5]), silu(rows, [0, 5]))


@pytest.mark.parametrize("grouped", [True, False], ids=["grouped", "loop"])
def test_padding_rows_and_rows_past_the_end(grouped: bool):
    """Groups padded with zeros to a multiple of 4, and memory behind the last one that holds NaN."""
    counts, dtype = [3, 0, 5], torch.float32
    experts = made(counts, "aligned", dtype, bias=True, grouped=grouped)
    offsets, is_real = [0, 4, 4, 12], [True] * 3 + [False] + [True] * 5 + [False] * 6
    rows = torch.zeros(15, 16, dtype=dtype)
    rows[torch.tensor(is_real)] = rows_of((8, 16), dtype)
    rows[12:] = torch.nan
    wanted, leaves = exact(experts, rows[torch.tensor(is_real)], expert_of_rows(counts))
    result = experts(rows.requires_grad_(), offsets)
    assert result.shape == rows.shape
    close("result", result[torch.tensor(is_real)], wanted, dtype)
    factors = rows_of((8, 16), dtype, seed=2)
    all_factors = torch.zeros(15, 16)
    all_factors[torch.tensor(is_real)] = factors
    result.backward(all_factors)
    wanted.backward(factors.double())
    for name, parameter in experts.named_parameters():
        close(f"gradient of {name}", parameter.grad, leaves[name].grad, dtype)


def test_grouped_mm_is_probed():
    assert not grouped_mm_works(torch.float64, CPU) and not grouped_mm_works(torch.int32, CPU)
    with torch.inference_mode():
        grouped_mm_works.cache_clear()
        assert grouped_mm_works(torch.float32, CPU) in (True, False)


@pytest.mark.skipif(not grouped_mm_works(torch.bfloat16, CPU), reason="this torch has no grouped_mm on CPUs")
def test_grouped_mm_is_used_where_it_works(monkeypatch: pytest.MonkeyPatch):
    assert grouped_mm_works(torch.bfloat16, CPU)  # a cached answer is not counted
    calls: list[int] = []
    grouped_mm = F.grouped_mm
    monkeypatch.setattr(F, "grouped_mm", lambda *args, **kwargs: calls.append(1) or grouped_mm(*args, **kwargs))

    def num_calls(sizes: str, start: int = 0, **options: Any) -> int:
        experts = made([3, 4], sizes, torch.bfloat16, **options)
        memory = rows_of((7 * experts.hidden + start,), torch.bfloat16)
        calls.clear()
        experts(memory[start:].view(7, experts.hidden), [0, 3, 7]).sum().backward()  # sum: a gradient of stride 0
        return len(calls)

    assert num_calls("aligned") == 2
    assert num_calls("aligned", bias=True) == 2
    assert num_calls("aligned", grouped=False) == 0
    assert num_calls("aligned", start=1) == 0
    assert num_calls("unaligned") == num_calls("intermediate_unaligned") == 0


def test_frozen_experts_write_into_out():
    experts = made([3, 4], "aligned", torch.float32).requires_grad_(False)
    rows = rows_of((7, 16), torch.float32)
    out = torch.zeros_like(rows)
    assert not experts.needs_grad(rows) and experts(rows, [0, 3, 7], out=out) is out
    assert experts.needs_grad(rows.requires_grad_())


def test_copies():
    experts = made([3, 4], "aligned", torch.float32)
    rows = rows_of((7, 16), torch.float32)
    for copied in (copy.deepcopy(experts), pickle.loads(pickle.dumps(experts))):
        assert torch.equal(copied(rows, [0, 3, 7]), experts(rows, [0, 3, 7]))
    assert "2 local, hidden=16, intermediate=24, silu" in repr(experts)


GOOD_ROWS = torch.zeros(7, 16)


@pytest.mark.parametrize(
    "rows, options, texts",
    [
        (torch.zeros(7, 15), {}, ["`rows`", "[rows, 16] or [2, capacity, 16]", "(7, 15)"]),
        (torch.zeros(16), {}, ["`rows`", "(16,)"]),
        (torch.zeros(3, 4, 16), {"expert_counts": [1, 1, 1]}, ["`rows`", "(3, 4, 16)"]),
        (GOOD_ROWS.double(), {"expert_offsets": [0, 3, 7]}, ["`rows`", "torch.float32", "torch.float64"]),
        (GOOD_ROWS.to("meta"), {"expert_offsets": [0, 3, 7]}, ["`rows`", "on meta"]),
        (GOOD_ROWS, {}, ["`expert_offsets`", "3 integers", "None"]),
        (GOOD_ROWS, {"expert_offsets": [0, 7]}, ["`expert_offsets`", "3 integers", "got 2"]),
        (GOOD_ROWS, {"expert_offsets": [0, 3, 7], "expert_counts": [3, 4]}, ["`expert_counts`", "None in contiguous"]),
        (torch.zeros(2, 4, 16), {"expert_counts": [1, 1, 1]}, ["`expert_counts`", "2 integers", "got 3"]),
        (torch.zeros(2, 4, 16), {"expert_offsets": [0, 1, 1]}, ["`expert_offsets`", "None in padded"]),
        (torch.zeros(2, 4, 16), {"expert_counts": [1, 1], "out": torch.zeros(2, 4, 16)}, ["`out`", "None where grad"]),
    ],
    ids=str,
)
def test_wrong_arguments(rows: torch.Tensor, options: dict[str, Any], texts: list[str]):
    with pytest.raises(ConfigError) as raised:
        made([3, 4], "aligned", torch.float32)(rows, **options)
    assert all(text in str(raised.value) for text in ["wanted", "got", *texts]), raised.value


@torch.no_grad()
def test_wrong_out():
    with pytest.raises(ConfigError, match=r"`out`: wanted torch.float32 \(7, 16\).*got torch.float32 \(8, 16\)"):
        made([3, 4], "aligned", torch.float32)(GOOD_ROWS, [0, 3, 7], out=torch.zeros(8, 16))


@pytest.mark.parametrize(
    "changes, texts",
    [
        ({"num_local": -1}, ["`num_local`", "got -1"]),
        ({"hidden": 0}, ["`hidden`", "got 0"]),
        ({"intermediate": 2.5}, ["`intermediate`", "got 2.5"]),
        ({"activation": "swish"}, ["`activation`", "silu", "got 'swish'"]),
    ],
    ids=str,
)
def test_wrong_settings(changes: dict[str, Any], texts: list[str]):
    with pytest.raises(ConfigError) as raised:
        Experts(**{"num_local": 2, "hidden": 16, "intermediate": 24, **changes})
    assert all(text in str(raised.value) for text in ["wanted", *texts]), raised.value


# ---- weights out of state dicts

NUM_EXPERTS, HIDDEN, INTERMEDIATE, SHARED = 5, 6, 4, 3


def matrices(seed: int = 0) -> Values:
    """A dense block: gate, up [E, I, H], down [E, H, I], biases, router, shared expert."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "router": (NUM_EXPERTS, HIDDEN),
        "gate": (NUM_EXPERTS, INTERMEDIATE, HIDDEN),
        "up": (NUM_EXPERTS, INTERMEDIATE, HIDDEN),
        "down": (NUM_EXPERTS, HIDDEN, INTERMEDIATE),
        "gate_bias": (NUM_EXPERTS, INTERMEDIATE),
        "up_bias": (NUM_EXPERTS, INTERMEDIATE),
        "down_bias": (NUM_EXPERTS, HIDDEN),
        "shared_gate": (SHARED, HIDDEN),
        "shared_up": (SHARED, HIDDEN),
        "shared_down": (HIDDEN, SHARED),
    }
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def per_expert(dense: Values, gate: str, up: str, down: str) -> Values:
    names = {gate: "gate", up: "up", down: "down"}
    return {
        f"experts.{expert}.{theirs}.weight": dense[ours][expert]
        for expert in range(NUM_EXPERTS)
        for theirs, ours in names.items()
    }


def alternating(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """gate and up by turns along dimension 1."""
    return torch.stack([gate, up], dim=2).flatten(1, 2)


def deepseek(dense: Values) -> Values:
    shared = {f"shared_experts.{name}_proj.weight": dense[f"shared_{name}"] for name in ("gate", "up", "down")}
    router = {"gate.weight": dense["router"], "gate.e_score_correction_bias": dense["router"][:, 0]}
    return {**router, **per_expert(dense, "gate_proj", "up_proj", "down_proj"), **shared}


def qwen2(dense: Values) -> Values:
    shared = {f"shared_expert.{name}_proj.weight": dense[f"shared_{name}"] for name in ("gate", "up", "down")}
    shared["shared_expert_gate.weight"] = dense["shared_gate"][:1]
    return {"gate.weight": dense["router"], **per_expert(dense, "gate_proj", "up_proj", "down_proj"), **shared}


def mixtral(dense: Values) -> Values:
    block = {"gate.weight": dense["router"], **per_expert(dense, "w1", "w3", "w2")}
    return {f"model.layers.7.block_sparse_moe.{name}": value for name, value in block.items()}


def fused(dense: Values) -> Values:
    gate_up = torch.cat([dense["gate"], dense["up"]], dim=1)
    return {"gate.weight": dense["router"], "experts.gate_up_proj": gate_up, "experts.down_proj": dense["down"]}


def llama4(dense: Values) -> Values:
    gate_up = torch.cat([dense["gate"], dense["up"]], dim=1).transpose(1, 2)
    return {
        "feed_forward.router.weight": dense["router"],
        "feed_forward.experts.gate_up_proj": gate_up,
        "feed_forward.experts.down_proj": dense["down"].transpose(1, 2),
    }


def gpt_oss(dense: Values) -> Values:
    return {
        "router.weight": dense["router"],
        "router.bias": dense["router"][:, 0],
        "experts.gate_up_proj": alternating(dense["gate"], dense["up"]).transpose(1, 2),
        "experts.gate_up_proj_bias": alternating(dense["gate_bias"], dense["up_bias"]),
        "experts.down_proj": dense["down"].transpose(1, 2),
        "experts.down_proj_bias": dense["down_bias"],
    }


FORMATS = [deepseek, qwen2, mixtral, fused, llama4, gpt_oss]


@pytest.mark.parametrize("expert_ids", [[0, 1, 2, 3, 4], [3, 1], [4], []], ids=str)
@pytest.mark.parametrize("style", FORMATS, ids=lambda style: style.__name__)
def test_experts_of_a_state_dict(style: Callable[[Values], Values], expert_ids: list[int]):
    dense = matrices()
    block = DenseBlock(style(dense))
    assert (block.num_experts, block.hidden, block.intermediate) == (NUM_EXPERTS, HIDDEN, INTERMEDIATE)
    assert block.dtype == torch.float32
    found = block.experts(expert_ids, dtype=torch.float64)
    wanted = {
        "gate_up_proj": torch.cat([dense["gate"], dense["up"]], dim=1)[expert_ids],
        "down_proj": dense["down"][expert_ids],
    }
    if style is gpt_oss:
        wanted["gate_up_bias"] = torch.cat([dense["gate_bias"], dense["up_bias"]], dim=1)[expert_ids]
        wanted["down_bias"] = dense["down_bias"][expert_ids]
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        assert tensor.is_contiguous() and torch.equal(tensor, wanted[name].double()), name
    assert torch.equal(block.router()["weight"], dense["router"])
    bias_name = {deepseek: "correction_bias", gpt_oss: "bias"}.get(style)
    if bias_name:
        assert torch.equal(block.router()[bias_name], dense["router"][:, 0])
    assert block.router().keys() == {"weight", bias_name} - {None}


@pytest.mark.parametrize("style", FORMATS, ids=lambda style: style.__name__)
def test_shared_expert_of_a_state_dict(style: Callable[[Values], Values]):
    dense = matrices()
    block = DenseBlock(style(dense))
    if style not in (deepseek, qwen2):
        assert block.shared_intermediate == 0 and block.shared_expert() == block.shared_gate() == {}
        return
    assert block.shared_intermediate == SHARED and bool(block.shared_gate()) == (style is qwen2)
    found = block.shared_expert()
    assert torch.equal(found["gate_up_proj"][0], torch.cat([dense["shared_gate"], dense["shared_up"]]))
    assert torch.equal(found["down_proj"][0], dense["shared_down"])


def test_fused_weights_that_could_be_either_way_round():
    """hidden = intermediate, and hidden = 2 * intermediate: one of the two tensors is square, the other tells."""
    for hidden, intermediate in ((4, 4), (8, 4)):
        gate_up, down = torch.randn(2, 2 * intermediate, hidden), torch.randn(2, hidden, intermediate)
        plain = {"gate.weight": torch.zeros(2, hidden), "experts.gate_up_proj": gate_up, "experts.down_proj": down}
        turned = {name: tensor.transpose(1, 2) if tensor.dim() == 3 else tensor for name, tensor in plain.items()}
        for state_dict in (plain, turned):
            found = DenseBlock(state_dict).experts([0, 1])
            assert torch.equal(found["gate_up_proj"], gate_up) and torch.equal(found["down_proj"], down)


def test_a_part_of_the_experts_is_enough():
    state_dict = {name: value for name, value in mixtral(matrices()).items() if ".0." not in name and ".1." not in name}
    found = DenseBlock(state_dict).experts([2, 4])
    assert torch.equal(found["down_proj"], matrices()["down"][[2, 4]])
    with pytest.raises(ConfigError, match=r"keys model.layers.7.block_sparse_moe.experts.1.w[123].weight"):
        DenseBlock(state_dict).experts([1, 2])


def test_one_block_of_a_model():
    model = {f"layers.{layer}.mlp.{name}": value for layer in (3, 4) for name, value in fused(matrices(layer)).items()}
    with pytest.raises(ConfigError, match=r"one MoE block.*got 2 blocks: 'layers.3.mlp.', 'layers.4.mlp.'"):
        DenseBlock(model)
    assert torch.equal(DenseBlock(model, "layers.4.").experts([2])["down_proj"], matrices(4)["down"][2:3])
    assert DenseBlock(model, "layers.3.mlp.").prefix == "layers.3.mlp."


def test_results_are_copies():
    state_dict = qwen2(matrices())
    block = DenseBlock(state_dict)
    for tensor in (*block.experts(range(NUM_EXPERTS)).values(), *block.shared_gate().values()):
        tensor.zero_()
    assert all(value.any() for value in state_dict.values())


def without(*names: str) -> Callable[[Values], Values]:
    return lambda values: {name: value for name, value in values.items() if name not in names}


def changed(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Values], Values]:
    return lambda values: {**values, name: change(values[name])}


@pytest.mark.parametrize(
    "style, spoil, texts",
    [
        (deepseek, without("gate.weight"), ["gate.weight"]),
        (deepseek, without("experts.3.up_proj.weight"), ["keys experts.3.up_proj.weight"]),
        (deepseek, without("shared_experts.down_proj.weight"), ["keys shared_experts.down_proj.weight"]),
        (
            deepseek,
            without("experts.1.gate_proj.weight", "experts.2.down_proj.weight"),
            ["experts.1.gate_proj.weight, experts.2.down_proj.weight"],
        ),
        (deepseek, changed("experts.2.down_proj.weight", lambda x: x.t()), ["experts.2.down_proj", "(6, 4)", "(4, 6)"]),
        (deepseek, changed("experts.0.down_proj.weight", lambda x: x.byte()), ["not quantised", "torch.uint8"]),
        (deepseek, changed("gate.e_score_correction_bias", lambda x: x[1:]), ["correction_bias` (5,)", "(4,)"]),
        (qwen2, changed("shared_expert_gate.weight", lambda x: x[0]), ["shared_expert_gate.weight` (1, 6)", "(6,)"]),
        (fused, without("experts.down_proj"), ["experts.down_proj"]),
        (fused, changed("experts.gate_up_proj", lambda x: x[:, 1:]), ["experts.gate_up_proj [5, 2 * ", "(5, 7, 6)"]),
        (fused, changed("experts.gate_up_proj", lambda x: x[1:]), ["experts.gate_up_proj` (5, 8, 6)", "(4, 8, 6)"]),
        (gpt_oss, without("experts.down_proj_bias"), ["experts.down_proj_bias"]),
        (gpt_oss, changed("router.weight", lambda x: x[0]), ["[num_experts, hidden]", "(6,)"]),
    ],
)
def test_wrong_state_dict(style: Callable[[Values], Values], spoil: Callable[[Values], Values], texts: list[str]):
    with pytest.raises(ConfigError) as raised:
        block = DenseBlock(spoil(style(matrices())))
        block.router(), block.experts(range(NUM_EXPERTS)), block.shared_expert(), block.shared_gate()
    assert all(text in str(raised.value) for text in ["`state_dict`", "wanted", "got", *texts]), raised.value


def test_wrong_expert_ids():
    with pytest.raises(ConfigError, match="`expert_ids`: wanted 0 to 4, got 5, -1"):
        DenseBlock(fused(matrices())).experts([0, 5, -1])


def test_no_block():
    with pytest.raises(ConfigError, match="one MoE block.*got 0 blocks: embed.weight"):
        DenseBlock({"embed.weight": torch.zeros(1)})
