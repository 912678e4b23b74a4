"""Plans as XML of MSCCL, which NCCL's and RCCL's MSCCL executors run, and other compilers write.

    <algo name proto nchannels nchunksperloop ngpus coll inplace outofplace minBytes maxBytes>
      <gpu id i_chunks o_chunks s_chunks>
        <tb id send recv chan>
          <step s type srcbuf srcoff dstbuf dstoff cnt depid deps hasdep/>

A <tb> is a program with at most one peer to send to and one to receive from. A step waits for one step at most, so more
dependencies become steps of type nop before it. Source: github.com/microsoft/msccl (msccl_interpreter.h, MIT).

A trap: the executor adds the message to what *its own* rank has at srcbuf, srcoff. MSCCL's compiler writes there where
the *sender's* data was. Its plans are right where both are the same; to read one as its compiler meant it, where the
result always adds to what is at dstbuf, dstoff, ask for `local_operand="dst"`.
"""

from __future__ import annotations

from epcomm.collectives.plan.conditions import COLLECTIVES, Collective
from epcomm.collectives.plan.msccl_programs import split_by_peers
from epcomm.collectives.plan.plan import BUFFERS, FIFO_DEPTH, Dependency, Location, Op, Plan, Program, Step
from epcomm.errors import ConfigError
from epcomm.kernels.protocol.lines import LL, LL128, SIMPLE
from epcomm.xml_elements import Element, parse_xml

_OP_OF_TYPE = {
    "nop": Op.NOP, "s": Op.SEND, "r": Op.RECV, "cpy": Op.COPY, "re": Op.REDUCE, "rcs": Op.RECV_COPY_SEND,
    "rrc": Op.RECV_REDUCE_COPY, "rrs": Op.RECV_REDUCE_SEND, "rrcs": Op.RECV_REDUCE_COPY_SEND,
}  # fmt: skip
_TYPE_OF_OP = {op: name for name, op in _OP_OF_TYPE.items()}
_BUFFER_OF_LETTER = {buffer[0]: buffer for buffer in BUFFERS}
#: MSCCL's names of collectives that have another one here.
_KIND_OF_COLL = {"reducescatter": "reduce_scatter", "reduce_scatter": "reduce_scatter"}
_COLL_OF_KIND = {"reduce_scatter": "reducescatter"}
_PROTO_OF_PROTOCOL = {SIMPLE: "Simple", LL: "LL", LL128: "LL128"}
_PROTOCOL_OF_PROTO = {proto: protocol for protocol, proto in _PROTO_OF_PROTOCOL.items()}


def from_msccl(
    text: str, where: str = "plan", *, root: int = 0, fifo_depth: int = FIFO_DEPTH, local_operand: str = "src"
) -> Plan:
    """The plan of an MSCCL document; ConfigError with the line and the reason if it is none.

    What the document doesn't say: the root of a broadcast or reduce, the FIFO depth, and the meaning of the trap above.
    """
    if local_operand not in ("src", "dst"):
        raise ConfigError(f"local_operand: wanted 'src' or 'dst', got {local_operand!r}")
    algo = parse_xml(text, where)
    if algo.tag != "algo":
        algo.wrong("wanted <algo>")
    num_ranks, coll = algo.integer("ngpus"), algo.text("coll")
    gpus = {gpu.integer("id"): gpu for gpu in algo.find("gpu")}
    if sorted(gpus) != list(range(num_ranks)) or len(list(algo.find("gpu"))) != num_ranks:
        algo.wrong(f"wanted <gpu> with ids 0 to {num_ranks - 1}, once each")
    in_place, out_of_place = algo.integer("inplace", 0) > 0, algo.integer("outofplace", 1) > 0
    if root not in gpus:
        raise ConfigError(f"{where}: root: wanted a rank below {num_ranks}, got {root}")
    kind = _KIND_OF_COLL.get(coll, coll)
    if kind not in COLLECTIVES:
        algo.wrong(f"coll: wanted one of {', '.join(COLLECTIVES)}, got {coll!r}")
    if (proto := algo.text("proto", "Simple")) not in _PROTOCOL_OF_PROTO:
        algo.wrong(f"proto: wanted one of {', '.join(_PROTOCOL_OF_PROTO)}, got {proto!r}")
    collective = Collective(kind, num_ranks, _num_chunks(algo, kind, gpus[root]), root)
    programs = tuple(_programs(gpus[rank], local_operand) for rank in range(num_ranks))
    scratch = max(gpu.integer("s_chunks", 0) for gpu in gpus.values())
    name, protocol = algo.text("name"), _PROTOCOL_OF_PROTO[proto]
    try:
        return Plan(name, collective, programs, scratch, fifo_depth, in_place, out_of_place, protocol)
    except ConfigError as error:
        algo.wrong(str(error))


def _num_chunks(algo: Element, kind: str, gpu: Element) -> int:
    """Chunks of the collective's unit, from whichever buffer the document gives a size (in place one has none)."""
    num_ranks = algo.integer("ngpus")
    sizes = (
        (gpu.integer("i_chunks"), num_ranks if kind in ("reduce_scatter", "alltoall") else 1),
        (gpu.integer("o_chunks"), num_ranks if kind in ("allgather", "alltoall") else 1),
    )
    for size, blocks in sizes:
        if size > 0:
            if size % blocks:
                gpu.wrong(f"{size} chunks are not {blocks} blocks of one size")
            return size // blocks
    gpu.wrong("has neither input nor output chunks")


def _programs(gpu: Element, local_operand: str) -> tuple[Program, ...]:
    blocks = {block.integer("id"): block for block in gpu.find("tb")}
    if sorted(blocks) != list(range(len(list(gpu.find("tb"))))):
        gpu.wrong("wanted <tb> with ids from 0 on, once each")
    return tuple(_program(blocks[number], local_operand) for number in range(len(blocks)))


def _program(block: Element, local_operand: str) -> Program:
    steps = list(block.find("step"))
    if [step.integer("s") for step in steps] != list(range(len(steps))):
        block.wrong("wanted steps with s from 0 on, in order")
    channel, found = block.integer("chan"), tuple(_step(block, step, local_operand) for step in steps)
    try:
        return Program(channel, found)
    except ConfigError as error:
        block.wrong(f"chan: {error}")


def _step(block: Element, step: Element, local_operand: str) -> Step:
    name = step.text("type")
    op = _OP_OF_TYPE.get(name)
    if op is None:
        step.wrong(f"type: wanted one of {', '.join(_OP_OF_TYPE)}, got {name!r}")
    src = _location(step, "src") if op.reads else None
    dst = _location(step, "dst") if op.writes else None
    if op.receives and op.reduces and local_operand == "dst":
        src = _location(step, "dst")
    receive_from = block.integer("recv") if op.receives else None
    send_to = block.integer("send") if op.sends else None
    waits = step.integer("depid", -1) >= 0
    after = (Dependency(step.integer("depid"), step.integer("deps")),) if waits else ()
    try:
        return Step(op, src, dst, step.integer("cnt") if op is not Op.NOP else 1, receive_from, send_to, after)
    except ConfigError as error:
        step.wrong(str(error))


def _location(step: Element, end: str) -> Location:
    letter = step.text(f"{end}buf")
    if letter not in _BUFFER_OF_LETTER:
        step.wrong(f"{end}buf: wanted one of {', '.join(_BUFFER_OF_LETTER)}, got {letter!r}")
    return Location(_BUFFER_OF_LETTER[letter], step.integer(f"{end}off"))


def to_msccl(plan: Plan, *, min_bytes: int = 0, max_bytes: int = 0) -> str:
    """The plan as an MSCCL document, of local operands as the executor reads them.

    `min_bytes`, `max_bytes`: the sizes an executor is to take it for (0: no limit).
    Programs with several peers become several <tb>; ConfigError naming the step if that can't be (MSCCL has one peer to
    send to and one to receive from).
    """
    collective, split = plan.collective, split_by_peers(plan)
    lines = [
        f'<algo name="{_escaped(plan.name)}" proto="{_PROTO_OF_PROTOCOL[plan.protocol]}" '
        f'nchannels="{plan.num_channels}" '
        f'nchunksperloop="{max(collective.input_chunks(collective.root), collective.output_chunks(collective.root))}" '
        f'ngpus="{plan.num_ranks}" coll="{_COLL_OF_KIND.get(collective.kind, collective.kind)}" '
        f'inplace="{int(plan.in_place)}" outofplace="{int(plan.out_of_place)}" '
        f'minBytes="{min_bytes}" maxBytes="{max_bytes}">'
    ]
    for rank, programs in enumerate(split.programs):
        i_chunks, o_chunks, s_chunks = (plan.buffer_chunks(buffer, rank) for buffer in BUFFERS)
        lines.append(f'  <gpu id="{rank}" i_chunks="{i_chunks}" o_chunks="{o_chunks}" s_chunks="{s_chunks}">')
        awaited = {dependency for program in programs for step in program.steps for dependency in step.after}
        for number, program in enumerate(programs):
            send = next((step.send_to for step in program.steps if step.op.sends), -1)
            receive = next((step.receive_from for step in program.steps if step.op.receives), -1)
            lines.append(f'    <tb id="{number}" send="{send}" recv="{receive}" chan="{program.channel}">')
            lines += [
                _step_text(index, step, Dependency(number, index) in awaited)
                for index, step in enumerate(program.steps)
            ]
            lines.append("    </tb>")
        lines.append("  </gpu>")
    return "\n".join([*lines, "</algo>", ""])


def _step_text(index: int, step: Step, is_awaited: bool) -> str:
    # What a type doesn't use is still there, and means nothing.
    src, dst = step.src or step.dst or Location("input", 0), step.dst or step.src or Location("output", 0)
    depid, deps = step.after[0] if step.after else (-1, -1)
    return (
        f'      <step s="{index}" type="{_TYPE_OF_OP[step.op]}" srcbuf="{src.buffer[0]}" srcoff="{src.offset}" '
        f'dstbuf="{dst.buffer[0]}" dstoff="{dst.offset}" cnt="{step.count if step.op is not Op.NOP else 0}" '
        f'depid="{depid}" deps="{deps}" hasdep="{int(is_awaited)}"/>'
    )


def _escaped(text: str) -> str:
    for character, entity in (("&", "&amp;"), ("<", "&lt;"), ('"', "&quot;")):
        text = text.replace(character, entity)
    return text
