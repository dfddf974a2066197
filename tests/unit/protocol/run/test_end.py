"""A job that ended on request has not failed."""

from ftmon.protocol.run.end import read_end_request, write_end_request


def test_a_request_for_the_whole_run_explains_any_end_and_is_not_replaced_by_one_for_a_rank(run):
    assert read_end_request(run) is None
    (run.path / "intent.json").write_text("{")
    assert read_end_request(run) is None
    write_end_request(run, "kill", "cli")
    write_end_request(run, "kill", ranks=[0])
    end_request = read_end_request(run)
    assert (end_request.verb, end_request.ranks) == ("kill", [])
    assert end_request.explains(-9, end_request.time + 10_000)
    assert end_request.explains(0, end_request.time)
    assert end_request.text() == "killed on request"


def test_a_killed_rank_explains_a_failure_soon_after_and_nothing_else(run):
    end_request = write_end_request(run, "kill", "cli", [1])
    assert end_request.explains(1, end_request.time + 30)
    assert not end_request.explains(0, end_request.time + 30)
    assert not end_request.explains(1, end_request.time + 3_000)
    assert end_request.text() == "ended after rank 1 was killed on request"
