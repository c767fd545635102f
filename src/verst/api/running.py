"""`verst.train`: a run from the first iteration, or the newest checkpoint, to its end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from verst.api.recipe import with_rewards
from verst.api.result import Result
from verst.config import RlRecipe, SftRecipe

if TYPE_CHECKING:
    from verst.loops.run_folder import RunFolder

T = TypeVar("T")
Rewards = Mapping[str, Callable[..., Any]]
"""Name -> function `f(media, prompts)` or class, at the top level of a module."""


def train(
    recipe: RlRecipe | SftRecipe, *, quiet: bool = False, resume: bool = True, rewards: Rewards | None = None
) -> Result:
    """Train, and wait for it. What `verst train` does.

    resume: go on with what the run folder holds; a complete run returns at once. False moves it out of the way. rewards:
    see `with_rewards`. quiet: no progress and no summary.

    Ctrl-C ends the run at the next safe point, with a checkpoint and `complete = False`; a second one at once, as
    KeyboardInterrupt. In a notebook the run has a thread of its own; in a program that serves an event loop use `stream`,
    which does not block it. Raises ConfigError, ModelError, PromptError, DataError or RewardError before any training for
    what cannot work, and any VerstError that ends the run.
    """
    recipe, folder = begin(recipe, resume=resume, rewards=rewards)
    try:
        if folder.summary() is None:
            _train(recipe, folder, quiet=quiet)
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    finally:
        folder.close()
    return Result.of(folder.path)


def begin(
    recipe: RlRecipe | SftRecipe, *, resume: bool, rewards: Rewards | None
) -> tuple[RlRecipe | SftRecipe, RunFolder]:
    """The recipe as it runs, and its folder, which is to be closed. Raises ConfigError."""
    from verst.loops.run_folder import RunFolder
    from verst.loops.start import with_files

    if rewards is not None:
        recipe = with_rewards(recipe, rewards)
    recipe = with_files(recipe)
    return recipe, RunFolder(recipe, resume=resume)


def _train(recipe: RlRecipe | SftRecipe, folder: RunFolder, *, quiet: bool) -> None:
    from verst.loops.start import run_recipe

    if not in_event_loop():
        run_recipe(recipe, folder, quiet=quiet)
        return
    run = Background(recipe, folder, quiet=quiet)
    while run.alive:
        try:
            run.join()
        except KeyboardInterrupt:
            run.stop()
    run.check()


class Background:
    """A run in a thread with an event loop of its own; it begins at once."""

    def __init__(self, recipe: RlRecipe | SftRecipe, folder: RunFolder, *, quiet: bool) -> None:
        from verst.loops.start import run_recipe
        from verst.loops.stop import Asked

        self._asked = Asked()
        self._error: BaseException | None = None

        def work() -> None:
            try:
                run_recipe(recipe, folder, quiet=quiet, asked=self._asked)
            except BaseException as error:  # noqa: BLE001  (raised again by `check`, in the thread that waits)
                self._error = error

        # Daemon: a program that ends does not wait for it, and the run goes on from its newest checkpoint.
        self._thread = threading.Thread(target=work, name="verst run", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def stop(self) -> None:
        """At the next safe point, with a checkpoint; an RL run that is asked twice at once."""
        self._asked.ask()

    def join(self) -> None:
        self._thread.join()

    def check(self) -> None:
        """Raises what ended the run, where it has failed."""
        if self._error is not None:
            raise self._error


def in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def wait_for(make: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """The result of a coroutine, inside a notebook's event loop too."""
    if not in_event_loop():
        return asyncio.run(make())
    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(lambda: asyncio.run(make())).result()
