"""Which job each rank belongs to, and what each job came to."""

from collections.abc import Sequence

import pytest
from ftmon.protocol.messages.control import RankState
from ftmon.protocol.messages.hosts import Job
from ftmon.protocol.messages.telemetry import Closing, DeviceInfo, Failure, Goodbye, Hello, PhaseRecord, Span, Step
from ftmon.protocol.messages.wire import Message
from ftmon.trainer.hub.jobs import LATE_S, REFRESH_S, JobTable
from ftmon.trainer.hub.ranks import identity_of
from msgspec import structs

MIB = 2**20


class Driver:
    """Ranks that report to a table of jobs, and whether their processes live."""

    def __init__(self) -> None:
        self.dead: set[int] = set()
        self.table = JobTable(self.lives)
        self.now = 1000.0

    def lives(self, hello: Hello) -> bool:
        return hello.pid not in self.dead

    def start(self, pid: int, world: int = 2, words: Sequence[str] = ("a",)) -> list[Hello]:
        """Start ranks with the pids from ``pid`` on, launched by ``pid - 1``."""
        self.now += 1
        hellos = [
            Hello(
                *(rank, rank, world, "node-1", pid + rank, pid * 10),
                *(DeviceInfo("cuda", rank, "NVIDIA H200", 150_000_000_000), "cuda", self.now),
                argv=["train.py", *words],
                launch=f"{pid - 1}-{pid * 10 - 1}",
            )
            for rank in range(world)
        ]
        for hello in hellos:
            self.table.hello(hello, self.now)
        return hellos

    def train(self, hellos: Sequence[Hello], steps: range, peak: int = 100, host_us: int = 1000) -> list[int]:
        """Let every rank report its steps; return the steps that began a job of their own."""
        began: list[int] = []
        for number in steps:
            for hello in hellos:
                step = step_of(hello.rank, number, peak + number, host_us)
                if identity_of(hello) in self.table.off_stream:
                    self.table.add(identity_of(hello), step)
                elif self.table.step(identity_of(hello), step):
                    began.append(number)
                    self.table.follow(self.now)
                    self.table.step(identity_of(hello), step)
        return began

    def trained(self, steps: range) -> list[Hello]:
        ranks = self.start(100)
        self.train(ranks, steps)
        return ranks

    def finish(self, hellos: Sequence[Hello], step: int) -> None:
        for hello in hellos:
            self.table.add(identity_of(hello), Goodbye(rank=hello.rank, time=self.now, step=step, reason="finished"))
            self.table.state(RankState(rank=hello.rank, state="finished", time=self.now, pid=hello.pid, exit_code=0))
            self.dead.add(hello.pid)

    def fail(self, hello: Hello, error: str) -> None:
        failure = Failure(rank=hello.rank, step=3, phase="forward", time=self.now, error=error)
        self.table.add(identity_of(hello), failure)

    def die(self, *hellos: Hello) -> list[Job]:
        """End the processes of ranks with exit code 1; return the jobs to report."""
        for hello in hellos:
            self.table.state(RankState(hello.rank, "gone", self.now, pid=hello.pid, exit_code=1))
            self.dead.add(hello.pid)
        return self.table.poll(self.now)

    def restarted(self, recorded: Sequence[Message]) -> None:
        self.table = JobTable(self.lives)
        self.table.restore(recorded)

    def described(self) -> list[Job]:
        return [self.table.describe(job, self.now) for job in self.table.jobs.values()]


def step_of(rank: int, number: int, peak: int, host_us: int) -> Step:
    span = Span(MIB, MIB, peak * MIB)
    phases = [PhaseRecord("forward", 0, host_us // 2, span, Span(0, 0, 2 * peak * MIB))]
    return Step(rank=rank, step=number, started=1000.0 + number, host_us=host_us, phases=phases, loss=1.0 / number)


@pytest.fixture
def driver() -> Driver:
    return Driver()


def senders(hellos: Sequence[Hello]) -> set[str]:
    return {identity_of(hello) for hello in hellos}


def figures(jobs: Sequence[Job]) -> list[tuple[int, str, int, int]]:
    return [(job.number, job.state, job.steps, job.allocated_peak // MIB) for job in jobs]


def test_each_start_of_a_driver_script_is_a_job_with_its_own_steps_and_peaks(driver):
    first = driver.start(100, words=("--batch", "32"))
    driver.train(first, range(1, 7), peak=500)
    driver.finish(first, 6)
    assert [job.state for job in driver.table.poll(driver.now)] == ["finished"]
    # Another hub between the two jobs keeps the first.
    before = driver.described()
    driver.restarted([*before, *first])
    assert (driver.described(), driver.table.poll(driver.now + 60)) == (before, [])
    driver.train(driver.start(200, words=("--batch", "16")), range(1, 4), peak=200)
    assert figures(driver.described()) == [(1, "finished", 6, 506), (2, "training", 3, 203)]
    assert [job.loss for job in driver.described()] == [pytest.approx(1 / 6), pytest.approx(1 / 3)]
    assert driver.table.shown is driver.table.jobs[2]
    assert driver.table.off_stream == senders(first), "their late messages are no part of job 2"


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (1, 2, 0)])
def test_a_rank_that_starts_the_others_is_of_their_job(order):
    driver = Driver()
    hellos = [
        structs.replace(hello, launch="99-1" if hello.rank == 0 else f"{hello.pid - hello.rank}-{hello.start_ticks}")
        for hello in Driver().start(100, world=3)
    ]
    for rank in order:
        driver.table.hello(hellos[rank], driver.now)
    assert [sorted(job.ranks) for job in driver.table.jobs.values()] == [[0, 1, 2]]


def test_a_restart_by_torchrun_is_a_job_and_the_attempt_before_failed(driver):
    first = driver.start(100)
    driver.train(first, range(1, 4))
    driver.fail(first[1], "RuntimeError: bad batch\nin a worker")
    driver.die(*reversed(first))
    # The agent that launches the second attempt is the same process.
    second = [structs.replace(hello, pid=hello.pid + 100, restart=1) for hello in first]
    for hello in second:
        driver.table.hello(hello, driver.now)
    driver.train(second, range(1, 6))
    driver.finish(second, 5)
    driver.table.poll(driver.now)
    jobs = driver.described()
    assert [(job.state, job.steps, job.restart) for job in jobs] == [("failed", 3, 0), ("finished", 5, 1)]
    assert jobs[0].text == "rank 1: RuntimeError: bad batch"
    assert [rank.exit_code for rank in jobs[0].ranks] == [1, 1]


def test_a_job_that_runs_beside_another_is_counted_and_comes_into_the_stream_after_it(driver):
    first = driver.start(100)
    driver.train(first, range(1, 3))
    second = driver.start(200)
    assert driver.table.off_stream == senders(second)
    for number in range(1, 5):
        assert driver.train(second, range(number, number + 1), peak=300) == []
        driver.train(first, range(number + 2, number + 3))
    assert figures(driver.described()) == [(1, "training", 6, 106), (2, "training", 4, 304)]
    assert driver.table.next_concurrent() is None, "the job in the stream goes on"
    driver.finish(first, 6)
    driver.table.poll(driver.now)
    assert driver.table.next_concurrent() is driver.table.jobs[2]
    assert driver.table.off_stream == senders(first)
    assert [job.shown for job in driver.described()] == [True, True]
    driver.dead.update(hello.pid for hello in driver.start(300))
    told = {job.number: job for job in driver.table.poll(driver.now)}
    assert (told[3].state, told[3].text) == ("ended", "its processes are gone")


def test_ranks_that_count_their_steps_anew_begin_a_job(driver):
    ranks = driver.start(100)
    assert driver.train(ranks, range(1, 6), peak=500) == []
    began = driver.train(ranks, range(1, 4), peak=200)
    assert began == [1], "the second rank's first step is of the job that has begun"
    assert figures(driver.described()) == [(1, "finished", 5, 505), (2, "training", 3, 203)]
    driver.finish(ranks, 3)
    driver.table.poll(driver.now)
    assert figures(driver.described()) == [(1, "finished", 5, 505), (2, "finished", 3, 203)]


@pytest.mark.parametrize(("begins_at", "models"), [(1, ["small", "large"]), (6, ["large"])])
def test_a_model_introduced_between_two_trainings_is_that_of_the_second(driver, begins_at, models):
    small, large = ([structs.replace(hello, model=name) for hello in driver.start(100)] for name in ("small", "large"))
    for hellos, steps in ((small, range(1, 6)), (large, range(begins_at, begins_at + 3))):
        for hello in hellos:
            driver.table.hello(hello, driver.now)
        driver.train(hellos, steps)
    assert [job.model for job in driver.described()] == models


def test_a_training_that_resumes_at_a_later_step_is_the_same_job_and_a_rank_started_again_alone_stays_in_it(driver):
    ranks = driver.start(100)
    assert driver.train(ranks, range(100, 104)) == []
    assert driver.train(ranks, range(110, 112)) == []
    assert [(job.first_step, job.step, job.steps) for job in driver.described()] == [(100, 111, 6)]
    driver.dead.add(ranks[1].pid)
    again = structs.replace(ranks[1], pid=150, start_ticks=1500)
    assert driver.table.hello(again, driver.now) == (driver.table.jobs[1], False)
    assert list(driver.table.jobs) == [1]


def test_what_comes_after_the_last_step_counts_for_the_peaks(driver):
    ranks = driver.trained(range(1, 3))
    save = [PhaseRecord("save", 0, 10, Span(0, 0, 900 * MIB), Span(0, 0, 901 * MIB))]
    closing = Closing(rank=1, step=2, started=driver.now, host_us=10, phases=save)
    driver.table.add(identity_of(ranks[1]), closing)
    job = driver.described()[0]
    assert (job.steps, job.peak, job.reserved_peak) == (2, 900 * MIB, 901 * MIB)
    assert (job.peak_rank.rank, job.peak_rank.peak_phase.name) == (1, "save")


def test_a_rank_that_never_reported_fails_its_job(driver):
    ranks = driver.start(100, world=2)
    alone = Driver()
    alone.table.hello(ranks[0], alone.now)
    alone.finish(ranks[:1], 0)
    assert [job for job in alone.table.poll(alone.now) if job.ended is not None] == []
    told = alone.table.poll(alone.now + LATE_S)
    assert [(job.state, job.text) for job in told] == [("failed", "1 of 2 ranks never reported")]


def test_a_rank_that_reports_after_another_has_finished_is_of_the_same_job(driver):
    early, late = (structs.replace(rank, launch="") for rank in driver.start(100, world=2))
    alone = Driver()
    alone.table.hello(early, alone.now)
    alone.finish([early], 0)
    alone.table.poll(alone.now)
    assert alone.table.hello(late, alone.now + 1.0) == (alone.table.jobs[1], False)
    alone.finish([late], 0)
    assert [(job.number, job.state) for job in alone.table.poll(alone.now + 1.0)] == [(1, "finished")]


def test_a_job_that_steps_is_described_every_few_seconds_and_at_its_end(driver):
    ranks = driver.start(100)
    driver.table.describe(driver.table.jobs[1], driver.now)
    driver.train(ranks, range(1, 3))
    assert driver.table.poll(driver.now + REFRESH_S / 2) == []
    assert [job.steps for job in driver.table.poll(driver.now + REFRESH_S)] == [2]
    assert driver.table.poll(driver.now + 2 * REFRESH_S) == [], "nothing changed"
    driver.finish(ranks, 2)
    assert [job.state for job in driver.table.poll(driver.now + 2 * REFRESH_S)] == ["finished"]


@pytest.mark.parametrize("beside", [False, True])
def test_another_hub_goes_on_counting_a_job_where_the_first_left_off(driver, beside):
    if beside:
        driver.train(driver.start(300), range(1, 3))
    ranks = driver.start(100)
    driver.train(ranks, range(1, 2), host_us=900_000, peak=500)
    driver.train(ranks, range(2, 5), host_us=10_000)
    assert driver.described()[-1].step_us == 10_000, "the mean is without the first step"
    # The introductions of a job beside another are not in the recording.
    driver.restarted([*driver.described(), *([] if beside else ranks)])
    for hello in ranks:
        assert driver.table.hello(hello, driver.now)[0].shown != beside
    driver.train(ranks, range(5, 7), host_us=10_000)
    job = driver.described()[-1]
    assert (job.number, job.state, job.steps, job.step, job.step_us) == (1 + beside, "training", 6, 6, 10_000)
    assert job.allocated_peak == 501 * MIB
    driver.finish(ranks, 6)
    assert (driver.table.poll(driver.now)[-1].state, len(driver.table.jobs)) == ("finished", 1 + beside)


def test_how_a_rank_ended_is_known_to_the_next_hub(driver):
    ranks = driver.trained(range(1, 3))
    driver.finish(ranks[:1], 2)
    driver.fail(ranks[1], "ValueError: no labels")
    driver.restarted([*driver.described(), *ranks])
    told = driver.die(ranks[1])
    assert [(job.state, job.text) for job in told] == [("failed", "rank 1: ValueError: no labels")]
    assert [(rank.state, rank.exit_code) for rank in told[0].ranks] == [("finished", 0), ("gone", 1)]


def failed(driver: Driver, errors: dict[int, str]) -> tuple[Job, list[Hello]]:
    ranks = driver.trained(range(1, 3))
    for rank, error in errors.items():
        driver.fail(ranks[rank], error)
    (job,) = driver.die(*ranks)
    return job, ranks


def test_a_rank_that_lost_its_peer_is_not_the_first_to_fail_though_its_message_is_the_first(driver):
    job, _ = failed(driver, {0: "RuntimeError: Connection closed by peer", 1: "ValueError: no labels"})
    assert (job.failed_rank, job.text) == (1, "rank 1: ValueError: no labels")


def test_which_rank_failed_first_is_known_to_the_next_hub(driver):
    before, ranks = failed(driver, {1: "ValueError: of rank 1", 0: "ValueError: of rank 0"})
    assert (before.failed_rank, before.text) == (1, "rank 1: ValueError: of rank 1")
    driver.restarted([before, *ranks])
    assert driver.described() == [before]


def test_a_job_whose_processes_went_on_to_another_stays_finished_for_the_next_hub(driver):
    ranks = driver.trained(range(1, 5))
    driver.train(ranks, range(1, 3))
    before = driver.described()
    driver.restarted([*before, *ranks])
    assert driver.described() == before
    driver.train(ranks, range(3, 5))
    assert [job.steps for job in driver.described()] == [4, 4]
