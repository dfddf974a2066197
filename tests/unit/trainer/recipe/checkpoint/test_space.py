"""What a run will have on its disk, by configuration."""

import pytest
from ftmon.trainer.recipe.checkpoint import space
from ftmon.trainer.recipe.config.load import load

GIB = 2**30


def planned(words: list[str], steps: range = range(1, 101), model: int = GIB) -> space.Plan:
    return space.plan(load(None, ["model.name=m", *words]).config, steps, 4 * GIB, model)


@pytest.mark.parametrize(
    ("words", "saves", "most", "least"),
    [
        (["checkpoint={every: 10, keep: 2}"], 10, (3, False), (2, False)),
        (["checkpoint={every: 60, keep: 2}"], 1, (1, True), (1, True)),
        (["checkpoint={every: 30, at_end: true, keep: 5}"], 4, (4, True), (2, False)),
        (["checkpoint={every: 50, at_end: true, keep: 5}"], 2, (2, True), (2, False)),
        (["checkpoint.at_end=true"], 1, (1, True), (1, True)),
        ([], 0, (0, True), (0, True)),
        (["checkpoint={every: 10, keep: 2}", "evaluation={share: 0.1, every: 50}"], 13, (4, False), (2, False)),
        # Only best evaluations write: the best is the newest.
        (["checkpoint.keep=2", "evaluation={share: 0.1, every: 10}"], 11, (3, False), (2, False)),
        (["checkpoint={keep: 2, keep_best: false}", "evaluation={share: 0.1, every: 10}"], 0, (0, True), (0, True)),
    ],
)
def test_what_a_run_has_on_the_disk(words, saves, most, least):
    found = planned(words)
    assert (found.saves, found.most, found.least) == (saves, most, least)


def test_the_steps_that_are_left_are_counted_and_for_a_large_model_the_checkpoint_being_written():
    assert planned(["checkpoint.every=10"], range(96, 101)).saves == 1
    assert planned(["checkpoint.every=10"], range(91, 101)).saves == 1
    assert planned(["checkpoint.every=10"], range(90, 101)).saves == 2
    found = planned(["checkpoint={every: 10, keep: 2}"], model=20 * GIB)
    assert found.words(found.most) == "2 checkpoints of 4.0 GiB and the final model of 20.0 GiB take 28.0 GiB"
    assert found.words(found.least) == "a checkpoint of 4.0 GiB and the final model of 20.0 GiB take 24.0 GiB"
    assert found.words(space.Amount(1, model=False)) == "a checkpoint takes 4.0 GiB"


def test_a_reserved_file_has_its_size_and_one_too_large_for_the_disk_is_an_error(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"x")
    space.reserve(path, 5 << 20)
    assert path.stat().st_size == 5 << 20
    with pytest.raises(OSError, match=r"File too large|No space"):
        space.reserve(path, 1 << 62)
