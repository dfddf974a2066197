"""The verbs of commands: their arguments on the wire, their defaults, and the refusals of wrong ones."""

import signal
from typing import Any

import pytest
from ftmon.protocol.errors import UsageError
from ftmon.protocol.messages import control, wire
from ftmon.protocol.messages.control import Command
from ftmon.protocol.messages.telemetry import PHASES, SelfDump

DUMP = SelfDump(10, 71, 4, "/run/stacks", "0x1", 71)
SENT_DUMP = {"signal": 10, "receiver": 71, "descriptor": 4, "path": "/run/stacks", "thread": "0x1", "training": 71}
FULL: list[tuple[control.Verb, dict[str, Any]]] = [
    (control.Kill([1], "TERM", True, "hung"), {"ranks": [1], "signal": "TERM", "on_gpu": True, "reason": "hung"}),
    (control.Stop(7, "SIGTERM"), {"step": 7, "reason": "SIGTERM"}),
    (
        control.Stacks([0], "hang", True, True, True, True),
        {"ranks": [0], "reason": "hang", "native": True, "calls": True, "activity": True, "quiet": True},
    ),
    (control.Snapshot([2], "spike"), {"ranks": [2], "reason": "spike"}),
    (control.Identify(), {}),
    (control.Ping(), {}),
    (control.Shutdown(), {}),
    (
        control.Arm([0], "backward", 3, 12, "leak"),
        {"ranks": [0], "phase": "backward", "steps": 3, "from_step": 12, "reason": "leak"},
    ),
    (control.Release([3]), {"ranks": [3]}),
    (control.Console("x", 3), {"code": "x", "rank": 3}),
    (control.Compose([0], "leak"), {"ranks": [0], "reason": "leak"}),
    (
        control.Look([(3, 71, 9, DUMP), (4, 72, 9, None)], [3]),
        {"targets": [[3, 71, 9, SENT_DUMP], [4, 72, 9, None]], "silent": [3]},
    ),
]
X39 = "x" * 39
VERBS = [verb for verb, _ in FULL]
NAMES = [verb.name for verb in VERBS]


def test_every_verb_is_tested_here():
    assert tuple(map(type, VERBS)) == control.ALL
    assert {*control.HUB, *control.RANK, *control.AGENT} == {*control.ALL}


@pytest.mark.parametrize(("verb", "args"), FULL, ids=NAMES)
def test_all_arguments_cross_the_wire(verb, args):
    command = wire.decode_body(wire.encode_body(verb.command("1")))
    assert command == Command("1", verb.name, args)
    assert control.decode(command, control.ALL) == verb


@pytest.mark.parametrize("verb", VERBS, ids=NAMES)
def test_absent_and_nil_arguments_have_their_defaults_and_unknown_ones_are_ignored(verb):
    required = {"code": "x"} if isinstance(verb, control.Console) else {}
    default = type(verb)(**required)
    assert default.command("1").args == required
    for args in ({}, dict.fromkeys(set(verb.__struct_fields__) - set(required)), {"since": 3}):
        assert control.decode(Command("1", verb.name, {**required, **args}), control.ALL) == default


@pytest.mark.parametrize(
    ("verb", "args", "words"),
    [
        ("kill", {"ranks": "all"}, "kill: ranks must be a list of numbers, not 'all'"),
        ("kill", {"signal": "HUP"}, "kill: signal must be INT, TERM or KILL, not 'HUP'"),
        ("kill", {"signal": "KILL\n"}, "kill: signal must be INT, TERM or KILL, not 'KILL\\n'"),
        ("stop", {"step": "soon"}, "stop: step must be a step's number, not 'soon'"),
        ("stacks", {"native": []}, "stacks: native must be true or false, not []"),
        ("snapshot", {"reason": 5}, "snapshot: reason must be text, not 5"),
        ("arm", {"phase": "lunch"}, f"arm: phase must be empty or one of {', '.join(PHASES)}, not 'lunch'"),
        ("arm", {"steps": 4}, "arm: steps must be 1, 2 or 3, not 4"),
        ("arm", {"from_step": -1}, "arm: from_step must be a step's number, not -1"),
        ("release", {"ranks": [None]}, "release: ranks must be a list of numbers, not [None]"),
        ("console", {"rank": 0}, "console: code must be text of at most 100,000 characters, not None"),
        ("console", {"code": "x" * 100_001}, f"console: code must be text of at most 100,000 characters, not '{X39}"),
        ("console", {"code": "1", "rank": "zero"}, "console: rank must be a rank's number, not 'zero'"),
        ("compose", {"ranks": {}}, "compose: ranks must be a list of numbers, not {}"),
        ("look", {"targets": [[1]]}, "look: targets must be a list of [rank, pid, start ticks, self dump], not [[1]]"),
        ("look", {"silent": 0}, "look: silent must be a list of numbers, not 0"),
    ],
)
def test_a_wrong_argument_is_refused_with_its_name_and_what_it_must_be(verb, args, words):
    with pytest.raises(UsageError) as refused:
        control.decode(Command("1", verb, args), control.ALL)
    assert str(refused.value) == words


def test_an_unknown_verb_is_refused_with_those_accepted_and_other_spellings_of_numbers_are_read():
    for verb in ("identify", "dance"):
        with pytest.raises(UsageError) as refused:
            control.decode(Command("1", verb), control.AGENT)
        assert str(refused.value) == f"unknown command '{verb}'; known here: kill, stop, ping, look"
    armed = control.decode(Command("1", "arm", {"steps": "2", "from_step": 8.0}), control.ALL)
    assert armed == control.Arm([], "", 2, 8)
    assert control.decode(Command("1", "stacks", {"native": 1}), control.ALL) == control.Stacks(native=True)


@pytest.mark.parametrize(
    ("name", "number"), [("", None), ("INT", signal.SIGINT), ("SIGTERM", signal.SIGTERM), ("KILL", signal.SIGKILL)]
)
def test_a_kill_names_its_signal_with_or_without_sig(name, number):
    assert control.decode(Command("1", "kill", {"signal": name}), control.HUB) == control.Kill(signal=name)
    assert control.Kill(signal=name).number == number
