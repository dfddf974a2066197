import json

from ftmon.tui.model.run import RunModel, status
from streams import Stream


def test_a_status_is_plain_json_with_every_rank_in_it() -> None:
    model = RunModel()
    for frame in Stream(ranks=3, steps=50, finished=False).frames():
        model.apply(frame)
    told = json.loads(json.dumps(status(model)))
    assert told["step"] == 50
    assert told["total_steps"] == 50
    assert [rank["rank"] for rank in told["ranks"]] == [0, 1, 2]
    assert told["rank_states"] == {"training": 3}
    assert told["peak"]["bytes"] == max(rank["peak"]["bytes"] for rank in told["ranks"])
    assert told["ranks"][0]["device"]["kind"] == "gpu"
    assert abs(sum(told["ranks"][0]["shares"].values()) - 1) < 1e-6


def test_a_run_nothing_is_known_of_has_a_status_too() -> None:
    told = json.loads(json.dumps(status(RunModel())))
    assert told["state"] == "starting"
    assert told["peak"] is None
    assert told["ranks"] == []
