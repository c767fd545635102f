"""The router of a run as a process: started, watched by what it answers, brought back."""

from __future__ import annotations

from collections.abc import Callable

from verst.cluster.actors import RouterActor
from verst.cluster.calls import result_of
from verst.cluster.comeback import Comeback
from verst.cluster.processes import Processes
from verst.cluster.supervisor import Supervisor, Watched
from verst.config.recipe import RlRecipe
from verst.engine.client import EngineClient
from verst.errors import EngineError
from verst.rollout.routed import Route

NAME = "router"


class RunRouter:
    """The `RouterOwner` of `route`."""

    def __init__(
        self,
        recipe: RlRecipe,
        processes: Processes,
        supervisor: Supervisor,
        *,
        client: Callable[[str], EngineClient],
        token: str | None,
    ) -> None:
        """client: makes that of a URL. token: that clients show the router, and the router shows engines."""
        self._recipe, self._processes, self._supervisor = recipe, processes, supervisor
        self._client, self._token = client, token
        self.route: Route | None = None
        """After `start`."""
        self._comeback = Comeback(
            process=NAME,
            kind="router",
            begin=self._begin,
            end=self._end,
            start_s=recipe.supervision.start_s,
            processes=processes,
            supervisor=supervisor,
        )

    async def start(self) -> Route | None:
        """None where the recipe wants no router."""
        if not self._recipe.engine.router.enabled:
            return None
        owner = self if self._supervisor.enabled else None
        self.route = Route(await self._comeback.up(self._begin), owner=owner)
        return self.route

    async def replace(self, error: EngineError) -> EngineClient:
        """See `RouterOwner`. Raises ProcessDied with a diagnosis after too many faults."""
        return await self._comeback.back(str(error))

    async def _begin(self) -> EngineClient:
        actor = self._processes.spawn(NAME, RouterActor, "router")
        await self._processes.know(NAME)
        url = await result_of(actor.start.remote(self._recipe, self._token), role=NAME)
        watched = Watched(
            limit_s=self._recipe.supervision.router_s,
            key="supervision.router_s",
            has_work=lambda: self.route is not None and self.route.has_work,
            progress=lambda: self.route and self.route.num_heard,
            end=lambda: self._processes.end(NAME),
        )
        self._supervisor.watch(NAME, watched)
        return self._client(url)

    async def _end(self) -> None:
        self._supervisor.forget(NAME)
        self._processes.end(NAME)
