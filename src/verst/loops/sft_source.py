"""Where a supervised run's batches come from, wired: drawn text lines, or files with caches and bad-file log."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from verst.config.data import FilesData, TextLinesData
from verst.config.supervised import SftRecipe
from verst.data.bad_files import BadFiles
from verst.data.cache import TensorCache
from verst.data.dataset import FileDataset
from verst.data.encode import Encoder
from verst.data.text_lines import TextLines
from verst.errors import ConfigError, PromptError
from verst.families import Components
from verst.families.base import ANY_IMAGES
from verst.loops.heldout_loss import HeldOutLoss
from verst.loops.sft_data import Batches, DrawnBatches, FileBatches
from verst.obs.waiting import Tell, nobody
from verst.rewards.preflight import check_rewards
from verst.rollout.prompts import Prompt, read_prompts
from verst.types import Geometry


@dataclass(frozen=True, kw_only=True)
class Source:
    recipe: SftRecipe
    components: Components
    batches: Batches
    drawn: TextLines | None = None
    """Of data.type = text_lines."""
    files: FileDataset | None = None
    """Of any other."""
    bad: BadFiles | None = None

    @property
    def captions(self) -> list[str]:
        """Of the files, held-out ones included; of drawn lines they are known before."""
        return [] if self.files is None else self.files.captions

    @property
    def prefetch(self) -> int:
        """Batches made ahead; drawn pictures cost nothing worth a thread."""
        return self.recipe.data.prefetch if isinstance(self.recipe.data, FilesData) else 0

    def heldout_loss(self, tell: Tell = nobody) -> HeldOutLoss | None:
        if self.files is None or not isinstance(self.recipe.data, FilesData) or not self.recipe.data.heldout:
            return None
        return HeldOutLoss(self.components, self.files, self.recipe, tell=tell)

    def facts(self) -> dict[str, float]:
        """What was found before the first step; names of docs/metrics.md."""
        if self.files is None or self.bad is None:
            return {}
        counts = {"items": self.files.num_items, "dropped": self.files.num_dropped, "bad_files": len(self.bad)}
        return {f"data/{name}": float(value) for name, value in counts.items()}

    def resume_at(self, step: int) -> None:
        if self.bad is not None:
            self.bad.resume_at(step)


def open_source(recipe: SftRecipe, components: Components, folder: Path, captions: Sequence[str]) -> Source:
    """folder: the run's. Raises ConfigError, DataError or PromptError."""
    data, size = recipe.data, recipe.sampling
    if isinstance(data, TextLinesData):
        family = components.family
        if family.streams != ("visual",) or family.num_images not in (0, ANY_IMAGES):
            raise ConfigError(
                f"model.path: family {family.name}, which needs sound or condition images; data.type = text_lines "
                "has pictures of text and nothing else"
            )
        family.check_geometry(components, Geometry(height=size.height, width=size.width))
        lines = TextLines(captions, data.fonts, height=size.height, width=size.width)
        return Source(
            recipe=recipe, components=components, drawn=lines, batches=DrawnBatches(components, lines, recipe)
        )
    caches = {
        kind: TensorCache(data.cache.folder / kind)
        for kind in ("latents", "text")
        if data.cache.folder is not None and getattr(data.cache, kind)
    }
    encoder = Encoder(
        components,
        max_sequence_length=recipe.model.max_sequence_length,
        latents=caches.get("latents"),
        text=caches.get("text"),
        first_frame_as_condition=data.first_frame_as_condition,
    )
    bad = BadFiles(folder / "bad_files.jsonl", data.on_bad_file)
    files = FileDataset(
        data,
        components,
        bad,
        size=(size.height, size.width),
        num_frames=size.num_frames,
        fps=size.fps,
        batch_size=recipe.algorithm.batch_size,
        seed=recipe.run.seed,
        encoder=encoder,
        caches=list(caches.values()),
    )
    if recipe.algorithm.caption_dropout > 0 and not recipe.trainer.train_text_encoders:
        files.check_empty_caption()
    batches = FileBatches(components, files, recipe, bad)
    return Source(recipe=recipe, components=components, batches=batches, files=files, bad=bad)


def read_captions(recipe: SftRecipe) -> list[str]:
    """Captions to draw; of files none, which are read with them. Raises PromptError."""
    if not isinstance(recipe.data, TextLinesData):
        return []
    return [prompt.text for prompt in read_prompts(recipe.data.prompts)]


def read_heldout(recipe: SftRecipe) -> list[Prompt]:
    """The prompts that are sampled and scored. Raises PromptError or RewardError for one that a reward cannot score."""
    if recipe.prompts is None:
        return []
    heldout = read_prompts(recipe.prompts.heldout)[: recipe.eval.num_prompts]
    check_rewards(recipe.rewards, [p.text for p in heldout], [p.metadata for p in heldout])
    return heldout


def refuse_shared(recipe: SftRecipe, captions: Sequence[str]) -> None:
    """Raises PromptError when a caption that is trained on is among the held-out prompts, scored or not."""
    if recipe.prompts is None:
        return
    shared = sorted(set(captions) & {prompt.text for prompt in read_prompts(recipe.prompts.heldout)})
    if shared:
        where = f"drawn from {recipe.data.prompts}" if isinstance(recipe.data, TextLinesData) else "captions of [data]"
        raise PromptError(
            f"{len(shared)} held-out prompts of {recipe.prompts.heldout} are also {where}, e.g. {shared[0]!r}: their "
            "reward would say nothing"
        )


def check_prompts(
    recipe: SftRecipe, components: Components, *, captions: Sequence[str], prompts: Sequence[str]
) -> dict[str, float]:
    """How many distinct captions and held-out prompts the encoders cut, as metrics, where the recipe allows it.

    Raises PromptError for any that is too long where it does not.
    """
    check = functools.partial(
        components.family.check_prompts, components, max_sequence_length=recipe.model.max_sequence_length
    )
    if recipe.model.long_prompts == "truncate":
        kinds = {"data/truncated_captions": captions, "eval/truncated_prompts": prompts}
        return {name: float(sum(bool(check([text])) for text in set(texts))) for name, texts in kinds.items()}
    problems = check([*captions, *prompts])
    if problems:
        raise PromptError(
            f"{len(problems)} prompts do not fit the text encoders: {'; '.join(problems[:3])}. Shorten them, raise "
            "model.max_sequence_length, or set model.long_prompts = truncate"
        )
    return {}
