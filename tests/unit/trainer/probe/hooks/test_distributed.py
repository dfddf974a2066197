from ftmon.trainer.probe.link.commands import agree_on_step


def test_ranks_agree_on_the_step_to_stop_after(tmp_path):
    first = agree_on_step(tmp_path / "stop-after", 40, 0.1)
    second = agree_on_step(tmp_path / "stop-after", 42, 0.2)
    assert first == second == 53
    assert sorted(path.name for path in tmp_path.iterdir()) == ["stop-after"]
