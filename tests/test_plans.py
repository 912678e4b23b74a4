"""Plans as data: what a step may be, JSON and MSCCL's XML both ways, what malformed documents are told, the table."""

from __future__ import annotations

import json
import pickle
import re
from dataclasses import replace
from pathlib import Path

import pytest
from plan_checks import assert_runs_right, wrong_ranks
from plan_mutations import sources
from rich.console import Console
from typer.testing import CliRunner

from epcomm.cli.main import app
from epcomm.collectives.algorithms import ALGORITHMS
from epcomm.collectives.plan import Collective, Location, Op, Plan, Program, Step
from epcomm.collectives.plan.json_format import from_json, to_json
from epcomm.collectives.plan.lower import prove
from epcomm.collectives.plan.msccl import from_msccl, to_msccl
from epcomm.collectives.plan.reference import execute
from epcomm.collectives.plan.table import print_plan
from epcomm.collectives.plan.verify import verify
from epcomm.errors import ConfigError, PlanError
from epcomm.kernels.protocol.lines import PROTOCOLS

MSCCL_FILES = sorted((Path(__file__).parent / "data" / "msccl").glob("*.xml"))


@pytest.mark.parametrize(
    "fields",
    [
        {"op": Op.SEND, "src": Location("input", 0)},
        {"op": Op.SEND, "send_to": 1},
        {"op": Op.RECV, "dst": Location("output", 0), "receive_from": 0, "send_to": 1},
        {"op": Op.COPY, "src": Location("input", 0)},
        {"op": Op.COPY, "src": Location("input", -1), "dst": Location("output", 0)},
        {"op": Op.COPY, "src": Location("in", 0), "dst": Location("output", 0)},
        {"op": Op.COPY, "src": Location("input", 0), "dst": Location("output", 0), "count": 0},
        {"op": Op.COPY, "src": Location("input", 0), "dst": Location("output", 0), "count": 2**62},
        {"op": Op.COPY, "src": Location("input", 2**63 - 1), "dst": Location("output", 0)},
        {"op": Op.SEND, "src": Location("input", 0), "send_to": 2**64},
        {"op": Op.NOP, "src": Location("input", 0)},
    ],
)
def test_a_step_has_what_its_operation_uses(fields):
    with pytest.raises(ConfigError):
        Step(**fields)


def test_a_plan_has_programs_for_each_rank():
    with pytest.raises(ConfigError, match="wanted 2 ranks', got 1"):
        Plan("test", Collective("allreduce", 2, 1), ((),))
    with pytest.raises(ConfigError, match="in place, out of place"):
        Plan("test", Collective("allreduce", 1, 1), ((),), in_place=False, out_of_place=False)
    with pytest.raises(ConfigError, match="fifo_depth"):
        Plan("test", Collective("allreduce", 1, 1), ((),), fifo_depth=0)
    with pytest.raises(ConfigError, match="protocol: wanted one of simple, ll, ll128, got 'LL'"):
        Plan("test", Collective("allreduce", 1, 1), ((),), protocol="LL")
    wrong = (("sum", 2, 1), ("allreduce", 0, 1), ("allreduce", 2, 0), ("reduce", 2, 1, 2), ("reduce", True, 1))
    for arguments in wrong:
        with pytest.raises(ConfigError):
            Collective(*arguments)


def test_equal_plans_are_one_key():
    """Also in another process, where the same words have other hashes."""
    plan, same = (ALGORITHMS["ring"].plan("allreduce", 3) for _ in range(2))
    assert {plan: 1}[same] == 1 and plan is not same
    sent = pickle.loads(pickle.dumps(plan))
    assert sent == plan and "_hash" in vars(plan) and "_hash" not in vars(sent)


@pytest.mark.parametrize("plan", sources(), ids=lambda plan: f"{plan.name} {plan.num_ranks}")
def test_round_trips(plan):
    """By JSON a plan comes back equal; by XML with programs that have fewer peers, and as right as before."""
    assert from_json(to_json(plan)) == plan
    assert from_json(json.dumps(json.loads(to_json(plan)))) == plan
    read = from_msccl(to_msccl(plan), root=plan.collective.root)
    assert (read.collective, read.in_place, read.out_of_place) == (plan.collective, plan.in_place, plan.out_of_place)
    assert verify(read) == verify(plan)
    assert_runs_right(read)
    assert from_msccl(to_msccl(read), root=plan.collective.root) == read


@pytest.mark.parametrize("protocol, proto", [("simple", "Simple"), ("ll", "LL"), ("ll128", "LL128")])
def test_protocols_are_kept(protocol, proto):
    plan = ALGORITHMS["ring"].plan("allreduce", 3, protocol=protocol)
    assert plan.protocol == protocol and (plan == ALGORITHMS["ring"].plan("allreduce", 3)) == (protocol == "simple")
    assert from_json(to_json(plan)) == plan
    document = to_msccl(plan)
    assert f' proto="{proto}" ' in document and from_msccl(document).protocol == protocol
    with pytest.raises(ConfigError, match="line 1: <algo>: proto: wanted one of Simple, LL, LL128, got 'll'"):
        from_msccl(document.replace(f'proto="{proto}"', 'proto="ll"'))
    assert len({prove(replace(plan, protocol=other)).fingerprint for other in PROTOCOLS}) == len(PROTOCOLS)


LINES = """\
{"format": "epcomm-plan/1", "name": "test", "collective": "broadcast", "num_ranks": 2, "num_chunks": 1, "root": 0,
 "scratch_chunks": 0, "fifo_depth": 8, "in_place": true, "out_of_place": true,
 "ranks": [
  [{"channel": 0, "steps": [
     {"op": "copy", "src": ["input", 0], "dst": ["output", 0]},
     {"op": "send", "src": ["input", 0], "to": 1}]}],
  [{"channel": 0, "steps": [
     {"op": "recv", "dst": ["output", 0], "from": 0, "after": []}]}]]}
"""


@pytest.mark.parametrize(
    "old, new, line, reason",
    [
        ('"to": 1}', '"to": 1', 6, "not JSON"),
        ('"to": 1', '"to": "1"', 6, "`to`: wanted an integer"),
        ('"to": 1', '"to": -1', 6, "`to`: wanted an integer >= 0"),
        ('"to": 1', '"to": true', 6, "`to`: wanted an integer"),
        (', "to": 1', "", 6, "needs `send_to`"),
        ('"to": 1', '"to": 1, "from": 1', 6, "has no `receive_from`"),
        ('"op": "send"', '"op": "sent"', 6, "wanted one of nop, send"),
        ('"op": "send", ', "", 6, "misses op"),
        ('"op": "recv"', '"op": "recv", "peer": 3', 8, "unknown: peer"),
        ('["output", 0], "from"', '["output"], "from"', 8, "`dst`: wanted pairs"),
        ('["output", 0], "from"', '["result", 0], "from"', 8, "a location is in input, output, scratch"),
        ('"to": 1', f'"to": {2**70}', 6, "a peer is a rank"),
        ('"to": 1', f'"to": 1, "count": {2**62}', 6, "needs a count from 1 to"),
        ('["input", 0], "to"', f'["input", {2**63 - 1}], "to"', 6, "at an offset from 0 to"),
        ('"scratch_chunks": 0', f'"scratch_chunks": {2**40}', 1, "wanted up to 16777216 chunks on a rank"),
        ('"channel": 0, "steps": [\n     {"op": "recv"', f'"channel": {2**64}, "steps": [\n     {{"op": "recv"', 7,
         "a program's channel is an integer from 0 to"),
        ('"after": []', '"after": [[0]]', 8, "`after`: wanted pairs"),
        ('"after": []', '"after": {}', 8, "`after`: wanted a list"),
        ('[{"channel": 0, "steps": [\n     {"op": "recv"', '[{"steps": [\n     {"op": "recv"', 7, "misses channel"),
        ('"num_ranks": 2', '"num_ranks": 3', 1, "wanted 3 ranks', got 2"),
        ('"num_ranks": 2', '"num_ranks": 2.5', 1, "`num_ranks`: wanted an integer"),
        ('"collective": "broadcast"', '"collective": "scatter"', 1, "wanted one of allreduce"),
        ('"in_place": true', '"in_place": 1', 1, "`in_place`: wanted true or false"),
        ('"in_place": true', '"protocol": "LL", "in_place": true', 1, "protocol: wanted one of simple, ll, ll128"),
        ('"in_place": true', '"protocol": 8, "in_place": true', 1, "`protocol`: wanted a text"),
        ('"format": "epcomm-plan/1"', '"format": "epcomm-plan/2"', 1, "`format`"),
        ('"ranks": [', '"ranks": [[],', 1, "wanted 2 ranks', got 3"),
        ('"ranks": [', '"ranks": [7,', 1, "wanted a list, got 7"),
    ],
)
def test_malformed_json(old, new, line, reason):
    assert verify(from_json(LINES)).num_messages == 1 and from_json(LINES).protocol == "simple"
    assert old in LINES
    with pytest.raises(ConfigError, match=rf"mine, line {line}:") as caught:
        from_json(LINES.replace(old, new), "mine")
    assert reason in str(caught.value)


@pytest.mark.parametrize("text", ["", "[]", "null", '{"format": 1}', "[" * 100000])
def test_json_that_is_no_plan(text):
    with pytest.raises(ConfigError, match="plan"):
        from_json(text)


@pytest.mark.parametrize("path", MSCCL_FILES, ids=lambda path: path.stem)
def test_plans_that_others_wrote(path):
    plan = from_msccl(path.read_text(), path.name)
    proof = verify(plan)
    assert proof.same_bits
    assert_runs_right(plan)
    assert from_msccl(to_msccl(plan)) == plan
    assert from_json(to_json(plan)) == plan


def test_there_are_plans_that_others_wrote():
    assert len(MSCCL_FILES) == 4


def test_a_plan_that_others_wrote_with_a_dependency_less_is_refused():
    text = next(path for path in MSCCL_FILES if "allreduce_tree" in path.name).read_text()
    waits = re.search(r'depid="\d+" deps="\d+"', text).group()
    with pytest.raises(PlanError):
        verify(from_msccl(text.replace(waits, 'depid="-1" deps="-1"')))


XML = """\
<algo name="test" proto="Simple" nchannels="1" nchunksperloop="1" ngpus="2" coll="reduce" inplace="0" outofplace="1">
  <gpu id="0" i_chunks="1" o_chunks="1" s_chunks="0">
    <tb id="0" send="-1" recv="1" chan="0">
      <step s="0" type="rrc" srcbuf="i" srcoff="0" dstbuf="o" dstoff="0" cnt="1" depid="-1" deps="-1" hasdep="0"/>
    </tb>
  </gpu>
  <gpu id="1" i_chunks="1" o_chunks="0" s_chunks="0">
    <tb id="0" send="0" recv="-1" chan="0">
      <step s="0" type="s" srcbuf="i" srcoff="0" dstbuf="o" dstoff="0" cnt="1" depid="-1" deps="-1" hasdep="0"/>
    </tb>
  </gpu>
</algo>
"""


@pytest.mark.parametrize(
    "old, new, line, reason",
    [
        ("</algo>", "", 13, "not XML"),
        ('<algo name="test"', "<algo", 1, "misses the attribute name"),
        ("<algo", "<!DOCTYPE algo><algo", 1, "a DOCTYPE has no place here"),
        ('ngpus="2"', 'ngpus="3"', 1, "wanted <gpu> with ids 0 to 2"),
        ('ngpus="2"', 'ngpus="two"', 1, "ngpus: wanted an integer, got 'two'"),
        ('coll="reduce"', 'coll="scan"', 1, "wanted one of allreduce"),
        ('<gpu id="1"', '<gpu id="0"', 1, "wanted <gpu> with ids 0 to 1"),
        ('i_chunks="1" o_chunks="1"', 'i_chunks="0" o_chunks="0"', 2, "neither input nor output"),
        ('<tb id="0" send="0"', '<tb id="1" send="0"', 7, "wanted <tb> with ids from 0 on"),
        ('send="0" recv="-1" chan="0"', 'send="0" recv="-1" chan="-1"', 8, "chan: a program's channel is"),
        ('send="0" recv="-1" chan="0"', f'send="0" recv="-1" chan="{2**70}"', 8, "chan: a program's channel is"),
        ('type="s" srcbuf="i" srcoff="0"', f'type="s" srcbuf="i" srcoff="{2**63 - 1}"', 9, "at an offset from 0 to"),
        ('o_chunks="0" s_chunks="0"', f'o_chunks="0" s_chunks="{2**60}"', 1, "wanted up to 16777216 chunks on a rank"),
        ('type="rrc"', 'type="rrr"', 4, "type: wanted one of nop, s, r"),
        ('type="rrc" srcbuf="i"', 'type="rrc" srcbuf="x"', 4, "srcbuf: wanted one of i, o, s"),
        ('dstbuf="o" dstoff="0" cnt="1" depid="-1" deps="-1" hasdep="0"/>\n    </tb>\n  </gpu>\n  <gpu id="1"',
         'dstbuf="o" dstoff="0" cnt="0" depid="-1" deps="-1" hasdep="0"/>\n    </tb>\n  </gpu>\n  <gpu id="1"',
         4, "a count from 1 to"),
        ('<step s="0" type="s"', '<step s="1" type="s"', 8, "wanted steps with s from 0 on"),
        ('srcoff="0" dstbuf="o" dstoff="0" cnt="1" depid="-1" deps="-1" hasdep="0"/>\n    </tb>\n  </gpu>\n</algo>',
         'dstbuf="o" dstoff="0" cnt="1" depid="-1" deps="-1" hasdep="0"/>\n    </tb>\n  </gpu>\n</algo>',
         9, "misses the attribute srcoff"),
    ],
)  # fmt: skip
def test_malformed_xml(old, new, line, reason):
    verify(from_msccl(XML))
    assert old in XML
    with pytest.raises(ConfigError, match=rf"mine, line {line}:") as caught:
        from_msccl(XML.replace(old, new, 1), "mine")
    assert reason in str(caught.value)


def test_peers_that_a_document_misses_are_refused():
    """-1 is MSCCL's "no peer"; whether a peer exists is for the proof to say, as in any plan."""
    with pytest.raises(PlanError, match="another rank below 2"):
        verify(from_msccl(XML.replace('send="0"', 'send="-1"')))


def test_the_local_operand():
    """MSCCL's compiler writes where the sender's data was; its executor reads its own rank there. They may differ."""
    text = XML.replace('nchunksperloop="1"', 'nchunksperloop="2"').replace('chunks="1"', 'chunks="2"')
    one = '<step s="0" type="{0}" srcbuf="i" srcoff="{1}" dstbuf="{2}" dstoff="{3}" cnt="1" depid="-1" deps="-1"/>'
    receive = "\n".join([
        one.format("cpy", 0, "o", 0), one.format("cpy", 1, "o", 1).replace('s="0"', 's="1"', 1),
        one.format("rrc", 1, "o", 0).replace('s="0"', 's="2"', 1),
        one.format("rrc", 0, "o", 1).replace('s="0"', 's="3"', 1),
    ])  # fmt: skip
    send = "\n".join([one.format("s", 0, "o", 0), one.format("s", 1, "o", 1).replace('s="0"', 's="1"', 1)])
    lines = text.splitlines()
    document = "\n".join([*lines[:3], receive, *lines[4:8], send, *lines[9:]])
    error = pytest.raises(PlanError, verify, from_msccl(document)).value
    assert error.kind == "result" and wrong_ranks(from_msccl(document), in_place=False) == [0]
    meant = from_msccl(document, local_operand="dst")
    verify(meant)
    assert_runs_right(meant)
    verify(from_msccl(to_msccl(meant)))  # what is written is for the executor
    with pytest.raises(ConfigError, match="local_operand"):
        from_msccl(document, local_operand="remote")
    with pytest.raises(ConfigError, match="root: wanted a rank below 2"):
        from_msccl(document, root=2)


def test_a_step_with_peers_that_msccl_cannot_have_in_one_program():
    """Rank 0 passes messages on from 1 to 2 and from 1 to 3: two peers to send to for one to receive from."""
    def passes_on(chunk: int, to: int) -> Step:
        return Step(Op.RECV_COPY_SEND, None, Location("output", chunk), 1, 1, to)

    send = [Step(Op.SEND, Location("input", chunk), send_to=0) for chunk in range(2)]
    plan = Plan("star", Collective("broadcast", 4, 2, root=1), (
        (Program(0, (passes_on(0, 2), passes_on(1, 3))),), (Program(0, tuple(send)),),
        (Program(0, (Step(Op.RECV, None, Location("output", 0), 1, 0),)),),
        (Program(0, (Step(Op.RECV, None, Location("output", 1), 1, 0),)),),
    ))  # fmt: skip
    with pytest.raises(ConfigError, match=r"rank 0, channel 0, step 1 .*ties its peers to others"):
        to_msccl(plan)


def test_the_table():
    plan = replace(ALGORITHMS["bruck"].plan("alltoall", 3, channels=2), name="mine [bold]")
    console = Console(width=120, record=True, file=open("/dev/null", "w"))
    print_plan(plan, console)
    text = console.export_text()
    assert "mine [bold]: alltoall of 3 ranks" in text and "rounds nothing" in text
    assert all(f" {step} " in text for _, step in plan.steps())
    proof = verify(plan)
    assert f"{plan.num_steps} steps, {proof.num_messages} messages of {proof.num_chunks_sent} chunks" in text
    print_plan(ALGORITHMS["ring"].plan("allreduce", 5), console)
    assert "rounds 4 times, the same bits on all ranks" in console.export_text()
    first, *others = plan.programs[0]
    shorter = replace(first, steps=first.steps[:-1])
    broken = replace(plan, programs=((shorter, *others), *plan.programs[1:]))
    print_plan(broken, console)
    assert "wrong (" in console.export_text()


def test_show(capsys):
    ALGORITHMS["ring"].plan("broadcast", 2).show()
    assert "proven at a FIFO depth of 8" in capsys.readouterr().out


def test_runs_check_their_inputs():
    plan = ALGORITHMS["ring"].plan("broadcast", 2)
    with pytest.raises(ConfigError, match=r"inputs\[1\]: wanted 0 chunks, got 1"):
        execute(plan, [[[1]], [[1]]])
    with pytest.raises(ConfigError, match="inputs: wanted 2 arrays, got 1"):
        execute(plan, [[[1]]])


def command(*words: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["plan", *map(str, words)], env={"COLUMNS": "200"})
    return result.exit_code, " ".join(result.output.split())


def test_commands(tmp_path):
    json_file, xml_file = tmp_path / "plan.json", tmp_path / "plan.xml"
    code, printed = command("make", "hierarchical", "reduce", "--ranks", 4, "--ranks-per-node", 2, "--root", 3)
    assert code == 0 and "proven at a FIFO depth of 8" in printed
    assert "hierarchical reduce: reduce of 4 ranks, 1 chunks, root 3" in printed
    options = ("--ranks", 3, "--channels", 2, "--protocol", "ll128")
    code, printed = command("make", "ring", "allreduce", *options, "--out", json_file)
    assert code == 0 and "proven at a FIFO depth of 8; rounds 2 times" in printed
    assert from_json(json_file.read_text()) == ALGORITHMS["ring"].plan("allreduce", 3, channels=2, protocol="ll128")
    assert command("show", json_file, "--out", xml_file)[0] == 0
    assert verify(from_msccl(xml_file.read_text())).roundings == 2
    options = ("--ranks", 3, "--wide-sums", "--out", json_file)
    code, printed = command("make", "ring", "allreduce", *options)
    assert code == 0 and "rounds once" in printed and from_json(json_file.read_text()).wide_sums
    code, printed = command("show", xml_file)
    assert code == 0 and "recv_reduce_send from 2 to 1" in printed and "protocol ll128" in printed


def test_commands_say_what_is_wrong(tmp_path):
    file = tmp_path / "plan.json"
    file.write_text(LINES.replace('"op": "recv", "dst": ["output", 0], "from": 0', '"op": "nop"'))
    code, printed = command("show", file)
    assert code == 1 and "wrong (message)" in printed
    code, printed = command("show", file, "--out", tmp_path / "other.json")
    assert code == 1 and not (tmp_path / "other.json").exists()
    file.write_text("{}")
    assert command("show", file)[0] == 2 and "plan.json, line 1: misses format" in command("show", file)[1]
    assert "No such file" in command("show", tmp_path / "none.json")[1]
    for words, problem in (
        (("make", "rings", "reduce", "--ranks", 2), "algorithm: wanted one of ring"),
        (("make", "ring", "alltoall", "--ranks", 2), "ring does allreduce"),
        (("make", "ring", "reduce", "--ranks", 2, "--ranks-per-node", 1), "unknown options ranks_per_node"),
        (("make", "ring", "reduce", "--ranks", 2, "--out", tmp_path), "Is a directory"),
    ):
        code, printed = command(*words)
        assert code == 2 and problem in printed.replace("│ ", ""), printed
