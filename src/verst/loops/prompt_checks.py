"""What is asked before a run samples anything: of its prompts and its guidance, by rewards, family and engine."""

from __future__ import annotations

from collections.abc import Sequence

from verst.config.recipe import RlRecipe
from verst.engine.images import check_number
from verst.errors import ConfigError, PromptError, RequestError
from verst.families import Family, recognise
from verst.families.base import without_guidance
from verst.rewards.preflight import check_rewards
from verst.rollout.engines import EnginePool
from verst.rollout.prompts import Prompt
from verst.rollout.rows import check_rows, probe_requests


def check_prompts(recipe: RlRecipe, train: Sequence[Prompt], heldout: Sequence[Prompt]) -> None:
    """Without a process. Raises PromptError, with file:line, for a row that cannot be sampled or scored; ConfigError for
    guidance that the algorithm must do without."""
    prompts = [*train, *heldout]
    check_rows(recipe, train, heldout)
    check_rewards(recipe.judges, [p.text for p in prompts], [p.metadata for p in prompts])
    family = recognise(recipe.model.path)
    _check_guidance(recipe, family)
    for prompt in prompts:
        if prompt.audio is not None:
            raise PromptError(f"{prompt.where}: `audio`: {family.name} takes no sound to start from; leave it out")
        try:
            check_number(family, len(prompt.images))
        except RequestError as error:
            raise PromptError(f"{prompt.where}: `image`: {error}") from None


def _check_guidance(recipe: RlRecipe, family: Family) -> None:
    """What the recipe alone cannot tell: some families guide from 0 on."""
    scale, none = recipe.sampling.guidance_scale, without_guidance(family)
    if recipe.algorithm.needs_stochastic_steps or scale == none or scale <= family.unguided_scale:
        return
    raise ConfigError(
        f"sampling.guidance_scale = {scale:g} guides {family.name}, and {recipe.algorithm.label} samples and trains without "
        f"guidance; use {none:g}"
    )


async def ask_engine(recipe: RlRecipe, engines: EnginePool, train: Sequence[Prompt], heldout: Sequence[Prompt]) -> None:
    """Raises PromptError for a prompt that an encoder cannot take whole, and a row of a size that the model cannot make."""
    if recipe.model.long_prompts == "refuse":
        texts = sorted({prompt.text for prompt in (*train, *heldout)})
        problems = await engines.check_prompts(texts, max_sequence_length=recipe.model.max_sequence_length)
        if problems:
            raise PromptError(
                f"{len(problems)} prompts do not fit the text encoders: {'; '.join(problems[:3])}. Shorten them, raise "
                "model.max_sequence_length, or set model.long_prompts = truncate"
            )
    probes = probe_requests(recipe, train, heldout)
    answers = await engines.check_requests([probe.request for probe in probes])
    for probe, problem in zip(probes, answers, strict=True):
        if problem is None:
            continue
        if probe.prompt.overrides.sampling():
            raise PromptError(f"{probe.prompt.where}: {problem}")
        raise ConfigError(f"[sampling] asks for what the model cannot make: {problem}")
