"""Lanes that slow each other down, by hand; and what a paced pair of threads makes of it."""

from __future__ import annotations

import threading
import time

import pytest

from oled.live.backends.pacing import PPM, Job, Pacer, Rival

HALF = PPM // 2


def test_alone_a_job_takes_its_work():
    link, _ = Rival.pair(HALF, HALF)
    assert link.begin(1000, 300).earliest_end(10_000) == 1300


def test_time_beside_the_other_counts_for_its_rate():
    """100 of work from 0, the other at work from 20 to 60: 20 alone, 20 of 40 beside, 60 alone."""
    link, cpu = Rival.pair(HALF, HALF)
    cpu.begin(20, 20).close(60)
    assert link.begin(0, 100).earliest_end(1000) == 120


def test_each_lane_has_its_own_rate():
    """100 of work each from 0. At 3/4 and 1/4: the first ends at 134, the other has done 33."""
    link, cpu = Rival.pair(PPM * 3 // 4, PPM // 4)
    first, second = link.begin(0, 100), cpu.begin(0, 100)
    assert first.earliest_end(1000) == 134
    first.close(134)
    assert second.earliest_end(1000) == 201  # 134 beside at 1/4: 33.5; 66.5 alone


def test_it_may_end_while_the_other_works():
    link, cpu = Rival.pair(HALF, HALF)
    cpu.begin(20, 500)  # still at work
    job = link.begin(0, 40)
    assert job.earliest_end(30) == 45  # 20 alone, 10 beside (5 of work), 15 of work left
    assert job.earliest_end(60) == 60  # 20 alone, 40 beside
    assert job.earliest_end(500) == 60


def test_jobs_that_have_not_begun_or_were_over_count_for_nothing():
    link, cpu = Rival.pair(HALF, HALF)
    cpu.begin(0, 10).close(10)
    cpu.begin(900, 100)
    assert link.begin(10, 100).earliest_end(500) == 110


def test_several_jobs_of_the_other_in_a_row():
    link, cpu = Rival.pair(PPM // 4, PPM // 4)
    for start in (0, 100, 200):
        cpu.begin(start, 10).close(start + 40)
    # beside 0..40: 10; alone 40..100: 60; beside 100..140: 10; alone: 20 more
    assert link.begin(0, 100).earliest_end(10_000) == 160


def test_without_contention_nothing_slows_down():
    link, cpu = Rival.pair(PPM, PPM)
    cpu.begin(0, 100).close(100)
    assert link.begin(0, 70).earliest_end(1000) == 70


@pytest.mark.parametrize("rate", [PPM, HALF])
def test_two_threads_keep_the_times_that_follow(rate):
    """Both have 40 ms of work, the second begins 20 ms later; whatever the machine does."""
    link, cpu = Rival.pair(rate, rate)
    begin = time.perf_counter_ns() + 5_000_000
    jobs = [link.begin(begin, 40_000_000), cpu.begin(begin + 20_000_000, 40_000_000)]
    ends: dict[int, tuple[int, int]] = {}

    def work(index: int, job: Job) -> None:
        ends[index] = Pacer(True).finish(job)

    threads = [threading.Thread(target=work, args=pair) for pair in enumerate(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    nominal = [ends[index][1] - begin for index in range(2)]
    # at half speed: 20 alone and 20 of the next 40 beside end the first at 60; the second has
    # done 20 by then and needs 20 more alone
    expected = [60_000_000, 80_000_000] if rate == HALF else [40_000_000, 60_000_000]
    for found, wanted in zip(nominal, expected, strict=True):
        assert wanted <= found  # never too soon; the machine may be late
    actual = [ends[index][0] - begin for index in range(2)]
    assert all(a >= n for a, n in zip(actual, nominal, strict=True))


def test_unpaced_jobs_last_as_long_as_they_last():
    link, _ = Rival.pair(PPM, PPM)
    job = link.begin(0, 10**15)
    actual, nominal = Pacer(False).finish(job)
    assert actual == nominal == job.end_ns
