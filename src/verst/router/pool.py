"""Which engines there are, what each of them holds, and which one a request goes to. No clock, no network.

    starting ──probes are good──> ready <──> asleep        (what its own /health and /server_info say)
        ^                           │ failed, or did not answer probes
        │                           v
    (added)                    quarantined ──`good_probes` in a row──> ready
    any of them ──removed──> draining ──its last request is done──> (gone)

Weights: the pool follows the version that was handed out last. An engine takes part while it is at most `max_staleness`
versions behind that; one that holds another version, or does not say which, gets no request. So neither an engine that
was restarted with the checkpoint it began with, nor one that missed an update, makes a sample.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from verst.web.terms import Terms

State = Literal["starting", "ready", "asleep", "quarantined", "draining"]
Shape = Hashable
"""What requests of one batch have in common."""


@dataclass(frozen=True, kw_only=True)
class Probe:
    """What one look at an engine has found."""

    problem: str | None = None
    """Why it serves nothing; None = it does."""
    silent: bool = False
    """The problem is that it did not answer in time."""
    loading: bool = False
    """The problem is that it has not finished loading."""
    asleep: bool = False
    version: int | None = None
    """Of its weights; None = it does not say."""
    invalid: bool = False
    """Its weights are of no version: an update broke off."""
    host: str | None = None
    """Identity of its host, where its answers can come in shared memory."""
    queue_size: int | None = None


@dataclass(kw_only=True, eq=False)
class Member:
    """One engine as the router sees it."""

    url: str
    state: State = "starting"
    reason: str = "not probed yet"
    """Of its state, where that is not ready."""
    silent: bool = False
    """All that is known against it is that it did not answer in time."""
    version: int | None = None
    host: str | None = None
    room: int = 1
    """Requests that it may have at a time."""
    in_flight: int = 0
    shapes: Counter[Shape] = field(default_factory=Counter)
    """Requests in flight by shape."""
    last_shape: Shape = None
    updating: bool = False
    doubted: bool = False
    """It was seen to hold other weights than `version`; the next probe says which."""
    num_good: int = 0
    """Probes without a problem, in a row."""
    num_failed: int = 0
    """Requests and probes that failed, in a row."""
    num_served: int = 0
    num_quarantines: int = 0


@dataclass(frozen=True, kw_only=True)
class Policy:
    per_engine: int = 16
    """Requests at one engine at a time; more wait here, where they can still go to the engine that is free first."""
    max_staleness: int = 0
    """Weight versions that an engine may be behind the newest one."""
    slack: int = 2
    """Requests that an engine may get, for their shape's sake, beyond what another one has."""
    failures: int = 3
    """Failures in a row that put an engine into quarantine; a connection that is refused or lost before the
    answer begins does so at once."""
    good_probes: int = 2
    """Probes in a row that bring it back."""


class Pool:
    """Engines by URL, in the order in which they were added."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.members: dict[str, Member] = {}
        self.current: int | None = None
        """Version that was handed out last; None = no engine has said anything of versions."""

    def add(self, url: str) -> Member:
        """It gets requests after its first good probe. An engine that drains stays instead."""
        member = self.members.get(url)
        if member is None:
            member = self.members[url] = Member(url=url, room=self._policy.per_engine)
        elif member.state == "draining":
            member.state, member.reason, member.num_good = "starting", "added again", 0
        return member

    def remove(self, url: str) -> int | None:
        """It gets no more requests, and is gone with its last one: how many there are. None: there is no such engine."""
        member = self.members.get(url)
        if member is None:
            return None
        member.state, member.reason = "draining", "removed"
        self._let_go(member)
        return member.in_flight

    def replace(self, urls: Sequence[str], *, version: int | None) -> list[Member]:
        """These and no others, by the word of whoever gives them their weights: the version that they hold, None = whatever
        each says. They are to be asked next: each gets requests after one good probe, and what it says of its version, if
        anything, counts more."""
        for url in self.members.keys() - set(urls):
            self.remove(url)
        members = [self.add(url) for url in dict.fromkeys(urls)]
        for member in members:
            member.doubted = True
            member.version = member.version if version is None else version
            if member.state == "quarantined":
                member.state, member.reason = "starting", "named anew"
        if version is not None:
            self.current = version
        return members

    def choose(self, shape: Shape, terms: Terms) -> Member | None:
        """The engine for a request, which then counts as in flight there; None while there is none.

        An idle engine first. Else, among those with about the fewest requests, one that works on this shape: it can put
        them into one batch.
        """
        able = [member for member in self.members.values() if self._may_take(member, terms)]
        if not able:
            return None
        fewest = min(member.in_flight for member in able)
        near = [m for m in able if m.in_flight == fewest or (fewest and m.in_flight < fewest + self._policy.slack)]
        best = min(near, key=lambda m: (not m.shapes[shape], m.last_shape != shape, m.in_flight))
        best.in_flight += 1
        best.shapes[shape] += 1
        best.last_shape = shape
        return best

    def done(self, member: Member, shape: Shape, *, problem: str | None = None, at_once: bool = False) -> None:
        """The request is there no more. problem: what the engine did wrong; at_once: it is in no state to serve others."""
        if problem is None:
            member.num_served += 1
            member.num_failed = 0
        else:
            self._failed(member, problem, at_once=at_once)
        self.put_back(member, shape)

    def refused(self, member: Member, shape: Shape) -> None:
        """The engine has no room for the request. It gets no more than it has until the next good probe."""
        self.put_back(member, shape)
        member.room = member.in_flight

    def put_back(self, member: Member, shape: Shape) -> None:
        """The request is there no more, and says nothing of the engine: it has not begun, its client went away, or its time
        was up."""
        member.in_flight -= 1
        member.shapes[shape] -= 1
        if not member.shapes[shape]:
            del member.shapes[shape]
        self._let_go(member)

    def probed(self, member: Member, probe: Probe) -> None:
        """Take over what a probe has found."""
        if member.state == "draining":
            return
        if probe.problem is not None:
            self._found_bad(member, probe)
            return
        member.num_good += 1
        member.doubted = False
        member.host = probe.host
        member.room = min(self._policy.per_engine, probe.queue_size or self._policy.per_engine)
        if probe.invalid and not member.updating:
            member.version = None
        elif probe.version is not None and not member.updating:
            self._found_version(member, probe.version)
        if member.state == "quarantined" and member.num_good < self._policy.good_probes:
            return
        member.num_failed, member.silent = 0, False
        member.state = "asleep" if probe.asleep else "ready"
        member.reason = "its memory is released" if probe.asleep else ""

    def begin_update(self) -> list[Member]:
        """Those that take part in an update; none of them gets a request until `end_update`."""
        members = self.in_service
        for member in members:
            member.updating = True
        return members

    def end_update(self, member: Member, *, version: int | None) -> None:
        """version: that it has proved to hold now; None = nobody knows."""
        member.updating = member.doubted = False
        member.version = version

    def handed_out(self, version: int) -> None:
        """An update reached all that take part: this version is the newest, whatever was before."""
        self.current = version

    def saw_version(self, member: Member, version: int) -> None:
        """An answer said which weights made it."""
        if not member.updating:
            self._found_version(member, version)

    def never(self, terms: Terms) -> str | None:
        """Why no engine will ever take a request of these terms; None where one may."""
        if self.current is None or not terms.names_weights:
            return None
        floor = self.current - self._policy.max_staleness
        exact = terms.version
        if exact is None or exact > self.current:
            return None
        if exact < floor:
            return f"it wants {terms}; the newest are {self.current} and {floor} the oldest that may be used (max_staleness)"
        if exact < self.current and all(m.version != exact for m in self.members.values() if m.state != "draining"):
            return f"it wants {terms}, which no engine holds any more; the newest are {self.current}"
        return None

    def why_none(self, terms: Terms) -> str:
        """Why there is no engine for a request now, engine by engine."""
        lines = [f"{member.url}: {self._obstacle(member, terms)}" for member in self.members.values()]
        return "; ".join(lines) or "there are no engines: add one with POST /engines"

    def why_none_serves(self) -> str:
        """The state of each engine that is not in service."""
        lines = [f"{m.url} is {m.state} ({m.reason})" for m in self.members.values() if m.state != "ready"]
        return "; ".join(lines) or "there are no engines: add one with POST /engines"

    @property
    def in_service(self) -> list[Member]:
        """Those that are up, whether they make samples now or have given up their memory."""
        return [member for member in self.members.values() if member.state in ("ready", "asleep")]

    @property
    def has_room(self) -> bool:
        """Whether any engine could take any request."""
        return any(m.state == "ready" and not m.updating and m.in_flight < m.room for m in self.members.values())

    @property
    def shared_host(self) -> str | None:
        """The one host of all engines, where all of them can answer in its shared memory."""
        hosts = {member.host for member in self.members.values() if member.state != "draining"}
        return hosts.pop() if len(hosts) == 1 else None

    def _may_take(self, member: Member, terms: Terms) -> bool:
        return self._obstacle(member, terms) is None

    def _obstacle(self, member: Member, terms: Terms) -> str | None:
        if member.state != "ready":
            return f"{member.state} ({member.reason})"
        if member.updating or member.doubted:
            return "takes new weights"
        if self.current is not None:
            if member.version is None:
                return "does not say which weights it holds"
            if not 0 <= self.current - member.version <= self._policy.max_staleness:
                return f"holds weights of version {member.version}, the newest are {self.current}"
        if not terms.admits(member.version):
            return f"holds weights of version {member.version}"
        if member.in_flight >= member.room:
            return f"has {member.in_flight} requests and no room for more"
        return None

    def _found_version(self, member: Member, version: int) -> None:
        known, member.version = member.version, version
        # An engine that was seen to go on was updated past the router. One that went back was restarted, and one that
        # is new may come from another run: neither says what the newest weights are.
        went_on = known is not None and version > known
        if self.current is None or (went_on and version > self.current):
            self.current = version

    def _found_bad(self, member: Member, probe: Probe) -> None:
        problem = probe.problem or ""
        if member.state == "starting" or probe.loading:
            member.state, member.reason, member.num_good, member.version = "starting", problem, 0, None
        else:
            self._failed(member, problem, at_once=False)
        member.silent = probe.silent

    def _failed(self, member: Member, problem: str, *, at_once: bool) -> None:
        member.num_good, member.silent = 0, False
        member.num_failed += 1
        if member.state == "draining" or (not at_once and member.num_failed < self._policy.failures):
            return
        if member.state != "quarantined":
            member.num_quarantines += 1
        # What comes back may be another process: it proves its weights anew.
        member.state, member.reason, member.version = "quarantined", problem, None

    def _let_go(self, member: Member) -> None:
        if member.state == "draining" and member.in_flight == 0 and self.members.get(member.url) is member:
            del self.members[member.url]
