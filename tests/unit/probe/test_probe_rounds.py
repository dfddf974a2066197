"""Rounds of training loops with several optimizers, told from real loops: the loops below are what is judged."""

import sys

import pytest
from ftmon.trainer.probe.phases.rounds import Rounds, call_site


class Loop:
    """Optimizers that only say where they update."""

    def __init__(self):
        self.rounds = Rounds()
        self.entries = []
        self.outside = len(call_site(sys._getframe(2)))
        """Number of frames around the script: the test runner's."""
        self.exhausted = self.fetched = False

    def step(self, name):
        site = call_site(sys._getframe(1))[self.outside :]
        self.entries.append(self.rounds.note(ord(name), site, self.exhausted, fetched=self.fetched))
        self.exhausted = self.fetched = False

    def batches(self, count):
        for number in range(count):
            self.fetched = True
            yield number
        self.exhausted = True

    def found(self):
        return ["".join(chr(entry.key) for entry in entries) for entries in self.rounds.split(self.entries)]


def alternating(loop):
    for _ in loop.batches(4):
        loop.step("a")
        loop.step("b")
    return ["ab"] * 4


def every_third_from_the_first_on(loop):
    for number in range(7):
        loop.step("a")
        if number % 3 == 0:
            loop.step("b")
    return ["ab", "a", "a", "ab", "a", "a", "ab"]


def every_third_from_the_third_on(loop):
    for number in range(1, 7):
        loop.step("a")
        if number % 3 == 0:
            loop.step("b")
    return ["a", "a", "ab"] * 2


def critic_in_an_inner_loop(loop):
    for _ in range(3):
        for _ in range(5):
            loop.step("a")
        loop.step("b")
    return ["aaaaab"] * 3


def critic_in_a_function_with_its_own_loop(loop):
    def train_critic():
        turn = 0
        while turn < 2:
            loop.step("a")
            turn += 1

    def train_generator():
        loop.step("b")

    def one_round():
        train_critic()
        train_generator()

    for _ in range(3):
        one_round()
    return ["aab"] * 3


def both_in_inner_loops(loop):
    for _ in range(3):
        for _ in range(3):
            loop.step("a")
        for _ in range(2):
            loop.step("b")
    return ["aaabb"] * 3


def two_together_then_a_third(loop):
    for _ in range(2):
        for _ in range(2):
            loop.step("a")
            loop.step("b")
        loop.step("c")
    return ["ababc"] * 2


def a_list_of_optimizers(loop):
    for _ in range(3):
        for name in "abc":
            loop.step(name)
    return ["abc"] * 3


def warm_up_of_one_before_both(loop):
    for _ in range(4):
        loop.step("a")
    for _ in range(2):
        loop.step("a")
        loop.step("b")
    return ["a"] * 4 + ["ab"] * 2


def alternating_epochs(loop):
    for _ in range(2):
        for _ in loop.batches(3):
            loop.step("a")
        for _ in loop.batches(3):
            loop.step("b")
    return ["a", "a", "a", "b", "b", "b"] * 2


def dispatched_by_a_table(loop):
    def first():
        loop.step("a")

    def second():
        loop.step("b")

    for _ in range(2):
        for train in (first, second):
            train()
    return ["ab"] * 2


def twice_in_a_round(loop):
    for _ in range(2):
        loop.step("a")
        loop.step("b")
        loop.step("a")
    return ["aba"] * 2


def regularised_now_and_then(loop):
    for number in range(9):
        loop.step("a")
        if number == 0:
            loop.step("a")
        loop.step("b")
        if number % 4 == 0:
            loop.step("b")
    return ["aabb", "ab", "ab", "ab", "abb", "ab", "ab", "ab", "abb"]


def branches_in_turn(loop):
    for number in range(6):
        if number % 2:
            loop.step("a")
        else:
            loop.step("b")
    return ["b", "a"] * 3


def branches_in_turn_over_epochs_of_data(loop):
    for _ in range(2):
        for number in loop.batches(4):
            if number % 2 == 0:
                loop.step("a")
                continue
            loop.step("b")
    return ["a", "b"] * 4


def branches_of_a_function_called_for_each_batch(loop):
    def train(number):
        if number % 3 == 0:
            loop.step("a")
        elif number % 3 == 1:
            loop.step("b")
        else:
            loop.step("c")

    for _ in range(2):
        for number in loop.batches(6):
            train(number)
    return ["a", "b", "c"] * 4


def branches_in_a_loop_over_phases_of_a_batch(loop):
    for _ in loop.batches(3):
        for phase in ("critic", "actor"):
            if phase == "critic":
                loop.step("a")
            else:
                loop.step("b")
    return ["ab"] * 3


def branch_then_both(loop):
    for number in loop.batches(4):
        if number % 2:
            loop.step("a")
        else:
            loop.step("b")
        loop.step("c")
    return ["bc", "ac"] * 2


def critic_in_an_inner_loop_that_an_exception_ends(loop):
    for _ in range(3):
        batches = loop.batches(3)
        while True:
            try:
                next(batches)
            except StopIteration:
                break
            loop.step("a")
            if len(loop.entries) % 4 == 3:
                break
        loop.step("b")
    return ["aaab"] * 3


@pytest.mark.parametrize(
    "script",
    [
        branches_in_turn,
        branches_in_turn_over_epochs_of_data,
        branches_of_a_function_called_for_each_batch,
        branches_in_a_loop_over_phases_of_a_batch,
        branch_then_both,
        critic_in_an_inner_loop_that_an_exception_ends,
        alternating,
        every_third_from_the_first_on,
        every_third_from_the_third_on,
        critic_in_an_inner_loop,
        critic_in_a_function_with_its_own_loop,
        both_in_inner_loops,
        two_together_then_a_third,
        a_list_of_optimizers,
        warm_up_of_one_before_both,
        alternating_epochs,
        dispatched_by_a_table,
        twice_in_a_round,
        regularised_now_and_then,
    ],
)
def test_one_round_of_the_loop_is_one_step(script):
    loop = Loop()
    assert script(loop) == loop.found()


def test_a_round_is_known_to_be_over_once_it_has_been_so_twice_and_no_longer_one_was_seen():
    loop = Loop()
    every_third_from_the_first_on(loop)
    for entries in loop.rounds.split(loop.entries):
        for entry in entries:
            loop.rounds.add(entry)
        loop.rounds.close([len(entries)])
    loop.rounds.add(loop.entries[0])
    assert not loop.rounds.is_whole()
    loop.rounds.add(loop.entries[1])
    assert loop.rounds.is_whole()


def test_a_round_is_not_over_where_it_may_go_on_to_a_regulariser():
    loop = Loop()
    regularised_now_and_then(loop)
    found = []
    for entry in loop.entries[:-1]:
        over = loop.rounds.over(entry)
        found += over
        loop.rounds.close(over)
        loop.rounds.add(entry)
        if loop.rounds.is_whole():
            found.append(len(loop.rounds.keys))
            loop.rounds.close(found[-1:])
    assert found == [4, 2, 2, 2, 3, 2, 2, 2]
