"""A job that was told to end has not failed."""

from ftmon.protocol.intent import read_intent, write_intent


def test_a_request_for_the_whole_run_explains_any_end(run):
    write_intent(run, "kill", "cli")
    intent = read_intent(run)
    assert intent is not None
    assert intent.explains(-9, intent.time + 10_000)
    assert intent.explains(0, intent.time)
    assert intent.text() == "killed on request"


def test_a_killed_rank_explains_a_failure_soon_after_and_nothing_else(run):
    intent = write_intent(run, "kill", "cli", [1])
    assert intent.explains(1, intent.time + 30)
    assert not intent.explains(0, intent.time + 30)
    assert not intent.explains(1, intent.time + 3_000)
    assert intent.text() == "ended after rank 1 was killed on request"


def test_a_killed_rank_does_not_hide_that_the_run_was_stopped(run):
    write_intent(run, "stop")
    write_intent(run, "kill", ranks=[0])
    intent = read_intent(run)
    assert intent is not None
    assert (intent.verb, intent.ranks) == ("stop", [])


def test_no_request_and_a_damaged_one_read_as_none(run):
    assert read_intent(run) is None
    (run.path / "intent.json").write_text("{")
    assert read_intent(run) is None
