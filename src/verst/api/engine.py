"""`verst.Engine`: a model in this process that samples as the engines of a run do."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from PIL import Image
from torch import Tensor

from verst.engine.wire import encode_response, to_microgroup
from verst.errors import RequestError
from verst.loops.local_engine import generate, open_worker, save_made
from verst.types import Microgroup, Sample, SampleKey


class Engine:
    """Samples pictures, clips and their trajectories. One request at a time; use it as a context manager, or close it."""

    def __init__(
        self, model: str | Path, *, device: str = "auto", dtype: str | None = None, checkpoint: str | int = "newest"
    ) -> None:
        """model: a folder in the diffusers layout, or a run folder, whose `checkpoint` (newest, best or an iteration) and
        sampling parameters are then taken. dtype: float32, bfloat16 or float16; unset: the run's, else float32.

        Raises ModelError for a folder without a model, ConfigError for one that is not there or a wrong value.
        """
        self.worker, self._defaults = open_worker(Path(model), device=device, dtype=dtype, checkpoint=str(checkpoint))
        self._numbers = itertools.count()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def weight_version(self) -> int:
        """-1 until weights are loaded for the first time."""
        return self.worker.weight_version

    def generate(
        self, prompts: str | Sequence[str], *, seed: int = 0, rollout: bool = False, **sampling: Any
    ) -> list[Sample]:
        """One sample a prompt, in one batch; repeat a prompt for several of it. Sample i has the seed `seed + i`.

        rollout: with stochastic steps, and in `Sample.streams` the trajectory: latents, sigmas, log-probs. sampling: fields
        of a request, e.g. height, width, num_inference_steps, guidance_scale, rollout_noise_level; docs/serving.md.
        Raises RequestError for a wrong one, PromptError for a prompt that is too long, EngineError for numbers that
        are not finite.
        """
        return list(self.microgroup(prompts, seed=seed, rollout=rollout, **sampling).samples)

    def microgroup(
        self, prompts: str | Sequence[str], *, seed: int = 0, rollout: bool = True, **sampling: Any
    ) -> Microgroup:
        """As `generate`, with what the transformer was conditioned on, for a trainer."""
        texts = (prompts,) if isinstance(prompts, str) else tuple(prompts)
        if not texts:
            raise RequestError("prompts is empty: give at least one")
        values = {
            "prompts": texts,
            "seeds": tuple(range(seed, seed + len(texts))),
            "rollout": rollout,
            "rollout_return_dit_trajectory": rollout,
            "rollout_return_denoising_env": rollout,
            "share_denoising_env": rollout,
            "media_format": "uint8",
            **self._defaults,
            **sampling,
        }
        records = generate(self.worker, values)
        number = next(self._numbers)
        return to_microgroup(
            encode_response(records), [SampleKey(rollout=number, group=0, index=i) for i in range(len(records))]
        )

    def load_weights(self, source: str | Path | Mapping[str, Tensor], *, module: str = "transformer") -> int:
        """Copy weights into a module: all of `<source>/<module>/*.safetensors`, or some tensors by name.

        Returns the new weight version. Raises SyncError, before anything is changed, where names, shapes or values do not
        fit; RequestError for an unknown module.
        """
        if isinstance(source, Mapping):
            self.worker.update_from_tensors(source, module=module)
        else:
            self.worker.update_from_folder(Path(source), modules=[module])
        return self.worker.weight_version

    def close(self) -> None:
        """Twice is no fault."""
        self.worker.close()


def save(sample: Sample, path: str | Path) -> Path:
    """A picture as PNG, a clip with its sound as WebM; the file. path: without the ending, which is put behind it."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    return save_made(
        target.parent,
        target.name,
        sample.media,
        fps=sample.fps,
        audio=sample.audio,
        sample_rate=sample.sample_rate,
    )


def picture(sample: Sample, frame: int = 0) -> Image.Image:
    """One frame of a sample, to look at."""
    return Image.fromarray(sample.media[frame].cpu().numpy())
