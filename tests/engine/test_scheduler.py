"""The scheduler alone: integers in, a schedule out, by hand and by many random steps."""

import random

import pytest

from eagle_jax import SamplingParams
from eagle_jax.engine.request import Request
from eagle_jax.engine.scheduler import FIRST_ROUNDS, ROUNDS_BEFORE_REFILL, UNBOUNDED, Scheduler
from eagle_jax.sampling import SamplingMode


def request(name, length=5, **fields):
    return Request(request_id=name, prompt_token_ids=[1] * length, max_new_tokens=3, **fields)


def names(schedule):
    return {slot: running.request.request_id for slot, running in schedule.running.items()}


def test_first_come_first_served():
    scheduler = Scheduler(2, 4)
    for name in "abc":
        scheduler.add(request(name))
    first = scheduler.schedule()
    assert names(first) == {0: "a", 1: "b"}
    assert [(chunk.start, chunk.is_last) for (chunk,) in first.prefills] == [(0, False), (4, True)] * 2
    assert (first.rounds, first.max_ended, first.ahead) == (UNBOUNDED, 1, False)
    second = scheduler.schedule()
    assert second.prefills == []
    assert (second.rounds, second.max_ended, second.ahead) == (UNBOUNDED, 1, False)
    scheduler.finish("a")
    third = scheduler.schedule()
    assert names(third) == {0: "c", 1: "b"}
    assert [chunk.running.request.request_id for (chunk,) in third.prefills] == ["c", "c"]
    assert third.running[0].generation != first.running[0].generation
    last = scheduler.schedule()
    assert (last.max_ended, last.ahead) == (UNBOUNDED, True)


def test_many_slots_are_refilled_a_few_at_a_time():
    scheduler = Scheduler(64, 8)
    for number in range(65):
        scheduler.add(request(str(number)))
    scheduler.schedule()
    assert scheduler.schedule().max_ended == 4


def test_what_is_said_of_an_earlier_occupant_belongs_to_nobody():
    scheduler = Scheduler(1, 4)
    scheduler.add(request("a"))
    [running] = scheduler.schedule().running.values()
    assert scheduler.owner(0, running.generation).request_id == "a"
    scheduler.finish("a")
    assert scheduler.owner(0, running.generation) is None
    scheduler.add(request("b"))
    scheduler.schedule()
    assert scheduler.owner(0, running.generation) is None


def test_a_waiting_request_can_be_taken_out():
    scheduler = Scheduler(1, 4)
    scheduler.add(request("a"))
    scheduler.add(request("b"))
    scheduler.finish("b")
    scheduler.finish("unknown")
    assert names(scheduler.schedule()) == {0: "a"}
    assert scheduler.schedule().max_ended == UNBOUNDED
    assert len(scheduler) == 1


def test_rounds_are_what_the_most_impatient_request_wants():
    scheduler = Scheduler(3, 8)
    scheduler.add(request("a"))
    scheduler.schedule()
    assert scheduler.schedule().rounds == UNBOUNDED
    scheduler.add(request("b", rounds_per_dispatch=7))
    scheduler.schedule()
    assert scheduler.schedule().rounds == 7
    scheduler.add(request("c", rounds_per_dispatch=3))
    scheduler.schedule()
    assert scheduler.schedule().rounds == 3


def test_the_number_of_rounds_that_fit_into_a_time():
    scheduler = Scheduler(1, 8)
    scheduler.add(request("a", seconds_per_dispatch=0.5))
    scheduler.schedule()
    rounds = [scheduler.schedule().rounds]
    for ran, seconds in ((4, 1.0), (4, 0.1), (4, 0.1), (10, 0.1), (0, 0.9), (8, 0.1), (8, 1.0)):
        scheduler.update(ran, seconds)
        rounds.append(scheduler.schedule().rounds)
    # Nothing is known of the first; four in a second; four in a tenth, but no more than twice as many as before; the same; no
    # round, which says nothing; eight in a tenth; eight in a second.
    assert rounds == [FIRST_ROUNDS, 2, 4, 8, 16, 16, 32, 4]
    fixed = Scheduler(1, 8, by_clock=False)
    fixed.add(request("a", seconds_per_dispatch=0.5))
    fixed.schedule()
    fixed.update(4, 0.1)
    assert fixed.schedule().rounds == FIRST_ROUNDS


def test_the_mode_is_the_least_that_covers_what_runs():
    scheduler = Scheduler(3, 8)
    for name, params in (("a", {}), ("b", {"temperature": 1.0}), ("c", {"logprobs": 1})):
        scheduler.add(request(name, params=SamplingParams(**params)))
    assert scheduler.schedule().mode is SamplingMode.FULL
    scheduler.finish("c")
    assert scheduler.schedule().mode is SamplingMode.SAMPLING
    scheduler.finish("b")
    assert scheduler.schedule().mode is SamplingMode.GREEDY


def test_data_parallel_groups_read_side_by_side():
    scheduler = Scheduler(4, 4, data_parallel_size=2)
    for name, length in (("a", 9), ("b", 2), ("c", 1)):
        scheduler.add(request(name, length))
    schedule = scheduler.schedule()
    assert names(schedule) == {0: "a", 2: "b", 1: "c"}
    seen = [
        tuple(None if c is None else (c.running.request.request_id, c.start) for c in row) for row in schedule.prefills
    ]
    assert seen == [(("a", 0), ("b", 0)), (("a", 4), None), (("a", 8), None), (("c", 0), None)]
    for name in "defg":
        scheduler.add(request(name))
    scheduler.schedule()
    assert scheduler.schedule().rounds == ROUNDS_BEFORE_REFILL


@pytest.mark.parametrize("seed", range(4))
def test_many_random_steps(seed):
    """Slots never have two owners, nobody starves or is lost, and generations never repeat."""
    draw = random.Random(seed)
    slots, groups = draw.choice([(1, 1), (4, 1), (16, 1), (8, 2)])
    scheduler = Scheduler(slots, 4, data_parallel_size=groups)
    waiting, running, generations, number = [], {}, set(), 0
    for _ in range(5000):
        for _ in range(draw.choice([0, 0, 1, 3])):
            waiting.append(str(number))
            scheduler.add(request(waiting[-1], draw.randint(1, 12)))
            number += 1
        for name in draw.sample([*waiting, *running], draw.choice([0, 0, 1]) if waiting or running else 0):
            scheduler.finish(name)
            running.pop(name, None)
            if name in waiting:
                waiting.remove(name)
        free = slots - len(running)
        schedule = scheduler.schedule()
        admitted, waiting = waiting[:free], waiting[free:]
        chunks = [chunk for row in schedule.prefills for chunk in row if chunk is not None]
        assert list(dict.fromkeys(sorted((c.running.request.request_id for c in chunks), key=int))) == admitted
        for chunk in chunks:
            if chunk.start == 0:
                assert chunk.running.generation not in generations
                generations.add(chunk.running.generation)
                running[chunk.running.request.request_id] = chunk.running.slot
        assert {r.request.request_id: slot for slot, r in schedule.running.items()} == running
        assert len(set(running.values())) == len(running) <= slots
        assert schedule.max_ended == (1 if waiting else UNBOUNDED)
        assert len(scheduler) == len(waiting) + len(running)
    assert number > 3000
