"""The memory of a run before it starts: trainer ranks and engines of a recipe, from its model's config files."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from verst.algorithms import make_algorithm
from verst.algorithms.base import Follows
from verst.config import sections as s
from verst.config.plan import batch_plan
from verst.config.recipe import Recipe, RlRecipe, SftRecipe
from verst.errors import ConfigError, ModelError
from verst.families import recognise
from verst.families.base import TakesImages
from verst.families.skeleton import Skeletons
from verst.loops.memory_sft import sft_items
from verst.loops.memory_shapes import prepare, stored_bytes
from verst.rollout.prompts import read_prompts
from verst.trainer.estimate import WORKSPACE, Copies, HeldGradient, Item, Sizes, peak_of, trainer_items
from verst.trainer.footprint import inputs_of, trace_forward, trace_tile
from verst.trainer.forward import Forward
from verst.trainer.rl import DTYPES
from verst.types import Conditioning, Geometry, Latents


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    trainer: list[Item]
    """Of one rank, or of the one process of a supervised run."""
    engine: list[Item]
    """Of one engine; empty where there is none."""

    @property
    def trainer_peak_bytes(self) -> int:
        """The most that one rank has on its GPU at a time."""
        return peak_of(self.trainer)

    @property
    def engine_peak_bytes(self) -> int:
        return peak_of(self.engine)


def memory_plan(recipe: Recipe) -> MemoryPlan:
    """Traces one tile and one forward of an engine, which a supervised run has none of.

    Raises ModelError for a family whose shapes depend on values, ConfigError for layers that are cut over ranks.
    """
    family = recognise(recipe.model.path, fp32_modules=recipe.model.fp32_modules)
    if isinstance(family, TakesImages) and family.num_images > 0:
        raise ModelError(f"{family.name} takes condition images, whose share of memory --memory cannot tell")
    tensor = recipe.trainer.parallel.tensor
    if tensor > 1:
        raise ConfigError(
            f"trainer.parallel.tensor = {tensor}: --memory cannot tell what a rank keeps of layers that are cut by heads; plan "
            "with tensor = 1, whose weights take as much and whose activations take more"
        )
    try:
        if isinstance(recipe, SftRecipe):
            return MemoryPlan(trainer=sft_items(recipe), engine=[])
        return _Planner(recipe).plan()
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise ModelError(
            f"{family.name} computes shapes from values, so that --memory cannot trace it without running it: {error}"
        ) from error


class _Planner:
    def __init__(self, recipe: RlRecipe) -> None:
        self._recipe = recipe
        self._family = recognise(recipe.model.path, fp32_modules=recipe.model.fp32_modules)
        self._dtype = DTYPES[recipe.model.dtype]
        self._skeletons = Skeletons()
        self._components = self._skeletons.load(
            self._family, recipe.model.path, parts=("transformer", "text", "autoencoder"), dtype=self._dtype
        )
        self._geometry = self._sized()
        self._conditioning = self._one_row()

    def plan(self) -> MemoryPlan:
        # The engine first: its module carries a LoRA merged, as a rule.
        return MemoryPlan(engine=self._engine(), trainer=self._trainer())

    def _sized(self) -> Geometry:
        sampling = self._recipe.sampling
        default = self._family.sampling_defaults(self._components).geometry
        return Geometry(
            height=sampling.height or default.height,
            width=sampling.width or default.width,
            num_frames=sampling.num_frames,
            fps=sampling.fps,
        )

    def _one_row(self) -> Conditioning:
        """Of the longest prompt."""
        recipe, family = self._recipe, self._family
        longest = max((prompt.text for prompt in read_prompts(recipe.prompts.train)), key=len)
        encode = functools.partial(
            family.encode_prompts,
            self._components,
            max_sequence_length=recipe.model.max_sequence_length,
            geometry=self._geometry,
        )
        guided = recipe.sampling.guidance_scale > family.unguided_scale
        negative = encode([recipe.sampling.negative_prompt or ""], negative=True) if guided else None
        return Conditioning(positive=encode([longest]), negative=negative, geometry=self._geometry)

    def _engine(self) -> list[Item]:
        recipe, family = self._recipe, self._family
        modules = self._components.modules
        rows = recipe.rollout.microgroup_size
        encoders = [m for name, m in modules.items() if isinstance(m, nn.Module) and not name.startswith("transformer")]
        shapes = family.latent_shapes(self._components, self._geometry)

        def decode() -> None:
            with self._skeletons.mode, self._skeletons.watch:
                family.decode_pixels(self._components, {n: torch.zeros(rows, *shape) for n, shape in shapes.items()})

        return [
            Item(name="transformer", bytes=stored_bytes([self._components.transformer])),
            Item(name="text encoders and autoencoder", bytes=stored_bytes(encoders)),
            Item(name="forward", bytes=self._forward(rows), phase="tile"),
            Item(
                name="decoding",
                bytes=trace_forward(decode, skeletons=self._skeletons, fused=True),
                phase="step",
            ),
            Item(name="kernels' workspaces", bytes=WORKSPACE),
        ]

    def _forward(self, rows: int) -> int:
        if not self._recipe.run.deterministic:
            rows = max(rows, self._recipe.engine.max_batch)
        return trace_forward(self._velocity(rows), skeletons=self._skeletons, fused=True)

    def _velocity(self, rows: int) -> functools.partial[Latents]:
        shapes = self._family.latent_shapes(self._components, self._geometry)
        x, sigmas, conditioning = inputs_of(shapes, rows=rows, conditioning=self._conditioning)
        forward = Forward.of(
            self._recipe.sampling, self._family, self._dtype, two_passes=self._recipe.guides_in_two_passes
        )
        return functools.partial(forward, self._components.transformer, x, sigmas, conditioning)

    def _trainer(self) -> list[Item]:
        recipe, module = self._recipe, self._components.transformer
        config, algorithm = recipe.trainer, recipe.algorithm
        prepare(module, self._skeletons, recipe, self._family)
        kind = algorithm.reference if algorithm.needs_reference else None
        copies = Copies(
            average=config.ema_decay is not None,
            old=isinstance(make_algorithm(algorithm, sampling=recipe.sampling, seed=0).old, Follows),
            frozen=isinstance(kind, s.FrozenReference),
        )
        tiles = batch_plan(recipe).tiles_per_rank
        lora = isinstance(recipe.model.finetune, s.LoraFinetune)
        itemsize = 4 if config.precision.master == "float32" else self._dtype.itemsize
        velocity = self._velocity(config.tile_size)
        tile = trace_tile(
            velocity,
            [p for p in module.parameters() if p.requires_grad],
            skeletons=self._skeletons,
            fused=True,
            held=HeldGradient(config, tiles=tiles, grad_itemsize=itemsize),
            # A reference's forward comes while the policy's activations wait for their backward.
            between=None if kind is None or isinstance(kind, s.EmaReference) else torch.no_grad()(velocity),
        )
        islands = () if self._dtype == torch.float32 else self._family.fp32_modules
        sizes = Sizes.of(module, self._family.fsdp_blocks, islands)
        return trainer_items(sizes, tile, config, dtype=self._dtype, lora=lora, tiles=tiles, copies=copies)
