"""Which engine a request goes to: states, weights, room, shapes. No network."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from loop_fixtures import on_a_loop

from verst.router.dispatch import Dispatcher, Full, Late, Never
from verst.router.pool import Member, Policy, Pool, Probe
from verst.web.terms import ANY, Terms

HD, SQUARE = ("720", "1280"), ("512", "512")


def pool_of(*versions: int | None, **policy: int) -> tuple[Pool, list[Member]]:
    """Engines e0, e1, ... that are ready."""
    pool = Pool(Policy(**policy))
    members = [pool.add(f"http://e{i}") for i in range(len(versions))]
    for member, version in zip(members, versions, strict=True):
        pool.probed(member, Probe(version=version))
    return pool, members


def chosen(pool: Pool, shape: object, terms: Terms = ANY) -> str | None:
    member = pool.choose(shape, terms)
    return None if member is None else member.url[-2:]


def test_idle_engines_first_and_then_those_that_batch_the_shape() -> None:
    pool, _ = pool_of(0, 0, 0)
    assert [chosen(pool, HD), chosen(pool, SQUARE)] == ["e0", "e1"]
    assert chosen(pool, HD) == "e2"  # idle goes before batching
    assert [chosen(pool, SQUARE) for _ in range(2)] == ["e1", "e1"]  # two more than the others: for its shape's sake
    assert chosen(pool, SQUARE) in ("e0", "e2")  # three more would be too many
    assert chosen(pool, HD) in ("e0", "e2")


def test_requests_of_one_shape_are_shared_out_evenly() -> None:
    pool, members = pool_of(0, 0, 0)
    for _ in range(12):
        pool.choose(HD, ANY)
    assert [member.in_flight for member in members] == [4, 4, 4]


def test_an_idle_engine_that_made_the_shape_last_is_taken_again() -> None:
    pool, members = pool_of(0, 0)
    for shape in (HD, SQUARE):
        assert pool.choose(shape, ANY) is not None
    for member, shape in zip(members, (HD, SQUARE), strict=True):
        pool.done(member, shape)
    assert [chosen(pool, SQUARE), chosen(pool, HD)] == ["e1", "e0"]
    assert [member.num_served for member in members] == [1, 1]


def test_an_engine_has_no_more_requests_than_it_may() -> None:
    pool = Pool(Policy(per_engine=3))
    for url, queue_size in (("http://e0", 2), ("http://e1", None), ("http://e2", 64)):
        pool.probed(pool.add(url), Probe(queue_size=queue_size))
    taken = [chosen(pool, HD) for _ in range(9)]
    assert {url: taken.count(url) for url in taken} == {"e0": 2, "e1": 3, "e2": 3, None: 1}
    assert not pool.has_room
    assert pool.why_none(ANY).startswith("http://e0: has 2 requests and no room for more; http://e1: has 3 requests")


def test_an_engine_that_refuses_gets_no_more_until_it_is_looked_at() -> None:
    pool, (one, two) = pool_of(0, 0)
    assert [chosen(pool, HD) for _ in range(3)] == ["e0", "e1", "e0"]
    pool.refused(one, HD)
    assert [chosen(pool, HD) for _ in range(3)] == ["e1"] * 3
    pool.done(one, HD)
    pool.refused(two, HD)
    pool.probed(one, Probe(version=0))
    assert chosen(pool, HD) == "e0"


def test_a_new_engine_serves_after_its_first_good_look() -> None:
    pool = Pool(Policy())
    member = pool.add("http://e0")
    assert chosen(pool, HD) is None
    pool.probed(member, Probe(problem="loading the model", loading=True))
    assert (member.state, member.reason) == ("starting", "loading the model")
    pool.probed(member, Probe())
    assert chosen(pool, HD) == "e0"
    pool.probed(member, Probe(asleep=True))
    assert chosen(pool, HD) is None
    assert pool.add("http://e0") is member


def test_failures_put_an_engine_aside_and_good_looks_bring_it_back() -> None:
    pool, (one, _) = pool_of(4, 4, failures=3, good_probes=2)
    for _ in range(2):
        pool.probed(one, Probe(problem="no answer"))
    assert one.state == "ready"  # twice may be chance
    pool.probed(one, Probe(version=4))
    for _ in range(3):
        pool.probed(one, Probe(problem="no answer"))
    assert (one.state, one.reason, one.num_quarantines) == ("quarantined", "no answer", 1)
    assert [chosen(pool, HD) for _ in range(2)] == ["e1", "e1"]
    pool.probed(one, Probe(version=4))
    pool.probed(one, Probe(problem="no answer"))
    pool.probed(one, Probe(version=4))
    assert one.state == "quarantined"  # not two in a row
    pool.probed(one, Probe(version=4))
    assert one.state == "ready"
    assert chosen(pool, HD) == "e0"
    pool.done(one, HD, problem="cannot be reached", at_once=True)
    assert (one.state, one.num_quarantines) == ("quarantined", 2)


def test_requests_without_an_outcome_are_no_proof_of_health() -> None:
    """Clients that give up, and refusals: else an engine that hangs would stay for as long as somebody asks it."""
    pool, (one,) = pool_of(4, failures=3)
    for _ in range(3):
        pool.put_back(_taken(pool, "e0"), HD)
        pool.probed(one, Probe(problem="no answer"))
    assert (one.state, one.num_served, one.in_flight) == ("quarantined", 0, 0)
    pool, (one,) = pool_of(4, failures=2)
    for _ in range(3):
        _taken(pool, "e0")
    pool.done(one, HD, problem="answers with HTTP 500")
    pool.refused(one, HD)
    pool.done(one, HD, problem="answers with HTTP 500")
    assert one.state == "quarantined"


def test_a_removed_engine_finishes_what_it_has() -> None:
    pool, (one, two) = pool_of(None, None)
    assert chosen(pool, HD) == "e0"
    assert pool.remove("http://e0") == 1
    assert chosen(pool, HD) == "e1"
    assert list(pool.members) == ["http://e0", "http://e1"]
    pool.done(one, HD)
    assert list(pool.members) == ["http://e1"]
    assert pool.remove("http://e0") is None
    assert pool.remove("http://e1") == 1
    assert pool.add("http://e1") is two  # it stays after all
    assert two.state == "starting"


def test_an_engine_behind_the_bound_gets_nothing() -> None:
    pool, (one, two, _) = pool_of(5, 5, 5, max_staleness=1)
    pool.probed(one, Probe(version=6))
    assert pool.current == 6
    assert {chosen(pool, HD) for _ in range(3)} == {"e0", "e1", "e2"}  # one behind is within the bound
    pool.probed(one, Probe(version=7))
    pool.probed(two, Probe(version=6))
    assert {chosen(pool, HD) for _ in range(6)} == {"e0", "e1"}
    assert chosen(pool, HD, Terms(version=6)) == "e1"
    assert chosen(pool, HD, Terms(min_version=7)) == "e0"
    assert pool.never(Terms(version=5)) == (
        "it wants weights of version 5; the newest are 7 and 6 the oldest that may be used (max_staleness)"
    )
    assert pool.never(Terms(version=8)) is None  # it may come
    pool.probed(two, Probe(version=7))
    assert "no engine holds any more" in (pool.never(Terms(version=6)) or "")


@pytest.mark.parametrize(
    "probe",
    [Probe(version=-1), Probe(version=9), Probe(version=5, invalid=True), Probe(version=None)],
    ids=["base weights", "another run's", "broken off", "says nothing"],
)
def test_an_engine_that_comes_back_with_other_weights_stays_out_until_it_is_updated(probe: Probe) -> None:
    pool, (one, two) = pool_of(5, 5, good_probes=1)
    pool.done(_taken(pool, "e0"), HD, problem="gone", at_once=True)
    pool.probed(one, probe)
    assert one.state == "ready"
    assert pool.current == 5
    assert [chosen(pool, HD) for _ in range(3)] == ["e1"] * 3
    pool.done(two, HD)
    for member in pool.begin_update():
        assert chosen(pool, HD) is None  # none while it takes new weights
        pool.end_update(member, version=6)
    pool.handed_out(6)
    assert chosen(pool, HD) == "e0"


def test_a_run_that_begins_anew_on_old_engines_is_what_the_newest_weights_are() -> None:
    pool, members = pool_of(37, 37)
    for member in pool.begin_update():
        pool.end_update(member, version=0)
    pool.handed_out(0)
    assert pool.current == 0
    assert {chosen(pool, HD, Terms(version=0)) for _ in members} == {"e0", "e1"}


def test_engines_that_say_nothing_of_weights_serve_who_asks_for_none() -> None:
    pool, _ = pool_of(None, None)
    assert chosen(pool, HD) == "e0"
    assert chosen(pool, HD, Terms(min_version=0)) is None
    for member in pool.begin_update():
        pool.end_update(member, version=1)
    pool.handed_out(1)
    assert chosen(pool, HD, Terms(version=1)) == "e1"


def test_shared_memory_is_of_one_host() -> None:
    pool, (one, two) = pool_of(0, 0)
    assert pool.shared_host is None
    pool.probed(one, Probe(host="a"))
    assert pool.shared_host is None
    pool.probed(two, Probe(host="a"))
    assert pool.shared_host == "a"
    pool.probed(two, Probe(host="b"))
    assert pool.shared_host is None


def _taken(pool: Pool, name: str) -> Member:
    member = pool.choose(HD, ANY)
    assert member is not None
    assert member.url.endswith(name)
    return member


class PoolMachine(RuleBasedStateMachine):
    """Whatever happens in whatever order: room is kept, and no request reaches weights outside of the bound."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = Pool(Policy(per_engine=2, max_staleness=1, failures=2, good_probes=2))
        self.taken: list[tuple[Member, str]] = []

    urls = st.sampled_from(["http://a", "http://b", "http://c"])
    versions = st.none() | st.integers(0, 4)

    @rule(url=urls)
    def add(self, url: str) -> None:
        self.pool.add(url)

    @rule(url=urls)
    def remove(self, url: str) -> None:
        self.pool.remove(url)

    @rule(url=urls, version=versions, invalid=st.booleans(), problem=st.sampled_from([None, None, "bad"]))
    def probe(self, url: str, version: int | None, invalid: bool, problem: str | None) -> None:
        if url in self.pool.members:
            probe = Probe(version=version, invalid=invalid, problem=problem)
            self.pool.probed(self.pool.members[url], probe)

    @rule(version=st.integers(0, 4), refused=st.booleans())
    def update(self, version: int, refused: bool) -> None:
        for member in self.pool.begin_update():
            assert self.pool.choose("x", ANY) is not member
            self.pool.end_update(member, version=None if refused else version)
        if not refused:
            self.pool.handed_out(version)
        # What `choose` handed out above is given back.
        for member in self.pool.members.values():
            while member.shapes["x"]:
                self.pool.put_back(member, "x")

    @rule(shape=st.sampled_from(["s", "t"]), exact=versions, least=versions)
    def choose(self, shape: str, exact: int | None, least: int | None) -> None:
        terms = Terms(version=exact, min_version=least)
        member = self.pool.choose(shape, terms)
        if member is None:
            assert self.pool.why_none(terms)
            return
        self.taken.append((member, shape))
        assert member.state == "ready"
        assert terms.admits(member.version)
        assert self.pool.never(terms) is None
        if self.pool.current is not None:
            assert member.version is not None
            assert 0 <= self.pool.current - member.version <= 1

    @precondition(lambda self: self.taken)
    @rule(problem=st.sampled_from([None, "bad"]), at_once=st.booleans())
    def done(self, problem: str | None, at_once: bool) -> None:
        member, shape = self.taken.pop(0)
        self.pool.done(member, shape, problem=problem, at_once=at_once)

    @invariant()
    def room_is_kept(self) -> None:
        counted: dict[Member, int] = {}
        for member, _ in self.taken:
            counted[member] = counted.get(member, 0) + 1
        for member in self.pool.members.values():
            assert member.in_flight == counted.get(member, 0) == member.shapes.total() <= 2
        # One that is gone has nothing left to do.
        assert set(counted) <= set(self.pool.members.values())


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
test_any_order_of_events = PoolMachine.TestCase


@on_a_loop
async def test_requests_wait_in_order_and_no_more_than_may() -> None:
    pool, (one,) = pool_of(0, per_engine=1)
    dispatcher = Dispatcher(pool, queue_size=2)
    until = asyncio.get_running_loop().time() + 60
    assert await dispatcher.take(HD, ANY, until=until) is one
    order: list[int] = []

    async def wait(number: int) -> None:
        await dispatcher.take(HD, ANY, until=until)
        order.append(number)

    jobs = [asyncio.create_task(wait(number)) for number in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(Full, match="2 requests are waiting"):
        await dispatcher.take(HD, ANY, until=until)
    for _ in jobs:
        dispatcher.done(one, HD)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    await asyncio.gather(*jobs)
    assert order == [0, 1]
    assert (dispatcher.num_waiting, one.in_flight) == (0, 1)


@on_a_loop
async def test_a_request_that_is_given_up_in_the_moment_of_its_turn_gives_the_engine_back() -> None:
    pool, (one,) = pool_of(0, per_engine=1)
    dispatcher = Dispatcher(pool, queue_size=2)
    until = asyncio.get_running_loop().time() + 60
    await dispatcher.take(HD, ANY, until=until)
    job = asyncio.create_task(dispatcher.take(HD, ANY, until=until))
    await asyncio.sleep(0)
    dispatcher.done(one, HD)
    assert one.in_flight == 1  # the waiting one's, which has not been told yet
    job.cancel()
    await asyncio.wait({job})
    assert one.in_flight == 0


@on_a_loop
async def test_waiting_ends_with_the_deadline_and_with_hope() -> None:
    pool, (one,) = pool_of(3)
    dispatcher = Dispatcher(pool, queue_size=8)
    now = asyncio.get_running_loop().time()
    with pytest.raises(Late, match=r"no engine for weights of version 9 .* http://e0: holds weights of version 3"):
        await dispatcher.take(HD, Terms(version=9), until=now + 0.02)
    with pytest.raises(Never, match="max_staleness"):
        await dispatcher.take(HD, Terms(version=2), until=now + 60)
    next_one = asyncio.create_task(dispatcher.take(HD, Terms(version=4), until=now + 60))
    other = asyncio.create_task(dispatcher.take(HD, Terms(version=5), until=now + 60))
    await asyncio.sleep(0)
    assert dispatcher.wanting.is_set()
    pool.probed(one, Probe(version=5))
    dispatcher.weights_changed()
    assert await other is one
    with pytest.raises(Never):
        await next_one
