"""What must hold of the rows of a prompt file in a run, said before anything is sampled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from verst.config.load import parse_recipe
from verst.config.recipe import RlRecipe, reward_name
from verst.engine.wire import GenerateRequest
from verst.errors import ConfigError, PromptError
from verst.rollout.plan import plan_evaluation, plan_group
from verst.rollout.prompts import Prompt


def check_rows(recipe: RlRecipe, train: Sequence[Prompt], heldout: Sequence[Prompt]) -> None:
    """Raises PromptError, with file:line, for a row that names an unknown reward or breaks a rule of the recipe."""
    names = {reward_name(reward): reward.weight for reward in recipe.rewards}
    for prompt in (*train, *heldout):
        unknown = [name for name in prompt.overrides.reward or () if name not in names]
        if unknown:
            raise PromptError(
                f"{prompt.where}: `reward` names {', '.join(unknown)}; the recipe's rewards are {', '.join(names)}"
            )
    for prompt in train:
        chosen = prompt.overrides.reward
        if chosen is not None and all(names[name] == 0 for name in chosen):
            raise PromptError(
                f"{prompt.where}: the rewards of this row ({', '.join(chosen)}) have weight 0, so it teaches nothing"
            )
    tables = recipe.model_dump()
    for prompt in _one_of_each([p for p in train if p.overrides.sampling()]):
        changed = {**tables["sampling"], **prompt.overrides.sampling()}
        try:
            # The recipe's own rules, as if every row were like this one.
            parse_recipe({**tables, "sampling": changed})
        except ConfigError as error:
            values = ", ".join(f"{name} = {value!r}" for name, value in prompt.overrides.sampling().items())
            raise PromptError(f"{prompt.where}: with {values} of this row: {error}") from None


@dataclass(frozen=True, kw_only=True)
class Probe:
    """One row that stands for all of its kind, and a request for it."""

    prompt: Prompt
    request: GenerateRequest


def probe_requests(recipe: RlRecipe, train: Sequence[Prompt], heldout: Sequence[Prompt]) -> list[Probe]:
    """One probe for each kind of row: an engine that can carry these out can carry out all of them."""
    probes = [
        Probe(prompt=prompt, request=plan_group(recipe, prompt, rollout=0, group=0)[0].request)
        for prompt in _one_of_each(train)
    ]
    return probes + [
        Probe(prompt=prompt, request=plan_evaluation(recipe, [prompt])[0].request) for prompt in _one_of_each(heldout)
    ]


def _one_of_each(prompts: Sequence[Prompt]) -> Iterator[Prompt]:
    """The first row of each kind: size, steps, negative prompt, number of pictures."""
    seen = set()
    for prompt in prompts:
        kind = (tuple(prompt.overrides.sampling().items()), len(prompt.images))
        if kind not in seen:
            seen.add(kind)
            yield prompt
