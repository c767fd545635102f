"""Run folders as a run writes them, through the classes that it writes them with, without a run."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np

from verst.obs.events import EventLog
from verst.obs.groups import add_group
from verst.obs.metrics import MetricsLog
from verst.obs.samples import ShownSample, save_samples
from verst.obs.spans import Spans, lane_of

RECIPE = """[run]
name = "{name}"
iterations = 100
seed = {seed}

[[rewards]]
type = "ocr"
weight = 1.0
"""


class WrittenRun:
    """A run that is going on: each call of `iterate` writes what one iteration leaves behind."""

    def __init__(self, path: Path, *, seed: int = 0) -> None:
        path.mkdir(parents=True)
        self.path = path
        self._random = np.random.default_rng(seed)
        self._metrics = MetricsLog(path / "metrics.jsonl")
        self._logs = {kind: EventLog(path / "events" / f"{kind}.jsonl") for kind in ("alarms", "groups", "spans")}
        self._spans = Spans(self._logs["spans"])
        self._clock = time.monotonic() - 1000
        self.iteration = -1
        (path / "recipe.toml").write_text(RECIPE.format(name=path.name, seed=seed))
        (path / "run.json").write_text(json.dumps({"started": 1.8e9, "git": "0" * 40, "command": ["verst"]}))

    def iterate(self, *, clip: bool = False, groups: int = 3, prompt: str = "a 7") -> None:
        self.iteration += 1
        heldout = {"reward/heldout": 0.4 + 0.01 * self.iteration} if self.iteration % 2 == 0 else {}
        values = {
            "reward/train_mean": 0.3 + 0.01 * self.iteration,
            "reward/ocr/mean": 0.3 + 0.01 * self.iteration,
            "policy/ratio_max_deviation": 0.0,
            "perf/reward/ocr/utilisation": 0.5,
            "perf/host/memory_bytes": 12.3e9,
            "perf/iteration_s": 2.0,
        }
        if heldout:
            save_samples(self.path / "samples", "heldout", self.iteration, self._samples(clip, prompt), keep=50)
        self._rollout(groups, prompt)
        self._logs["spans"].flush()
        self._metrics.append(self.iteration, values | heldout)

    def alarm(self, text: str) -> None:
        self._logs["alarms"].event("alarm", iteration=self.iteration, type="reward_drop", text=text, action="notify")
        self._logs["alarms"].flush()

    def microgroups(self, num: int, *, at_once: int = 8) -> None:
        """`num` of them through one engine, a parser and a reward, some milliseconds each."""
        for i in range(num):
            start = self._clock + (i // at_once) * 0.1 + (i % at_once) * 0.01
            of = {"rollout": self.iteration, "group": i // 4, "index": i % 4 * 4}
            self._spans.add("generate", start_s=start, end_s=start + 0.06, **of)
            self._spans.add("denoise", start_s=start + 0.02, end_s=start + 0.05, lane=lane_of("engine", 0), **of)
            self._spans.add("deserialize", start_s=start + 0.06, end_s=start + 0.065, **of)
            self._spans.add("parse", start_s=start + 0.061, end_s=start + 0.064, lane=lane_of("parser", 0), **of)
            self._spans.add("reward", start_s=start + 0.065, end_s=start + 0.085, **of)
            scored = {"samples": 4, "reward": "ocr"}
            self._spans.add(
                "score", start_s=start + 0.07, end_s=start + 0.08, lane=lane_of("reward/ocr", 0), **of, **scored
            )
        self._clock += (num // at_once + 1) * 0.1
        self._logs["spans"].flush()

    def close(self) -> None:
        self._metrics.close()
        for log in self._logs.values():
            log.close()

    def _rollout(self, groups: int, prompt: str) -> None:
        begin = self._clock
        self.microgroups(groups * 4)
        for name, lane, low, high in (("train", "trainer", 0.1, 0.5), ("sync", "driver", 0.5, 0.6)):
            start, end = self._clock + low, self._clock + high
            self._spans.add(name, start_s=start, end_s=end, lane=lane_of(lane, 0), iteration=self.iteration)
        self._clock += 0.7
        self._spans.add("iteration", start_s=begin, end_s=self._clock, lane="driver:0", iteration=self.iteration)
        for group in range(groups):
            rewards = self._random.uniform(0, 1, 4).round(3).tolist()
            add_group(
                self._logs["groups"],
                iteration=self.iteration,
                group=group,
                prompt=prompt,
                rewards=rewards,
                by_reward={"ocr": rewards},
                dropped_by=None,
            )
        self._logs["groups"].flush()
        extremes = [
            ShownSample(
                media=self._random.integers(0, 256, (1, 16, 24, 3), dtype=np.uint8),
                prompt=prompt,
                seed=group,
                reward=float(rank == "best"),
                rewards={"ocr": float(rank == "best")},
                place={"rank": rank, "group": group, "index": 0},
            )
            for group in range(groups)
            for rank in ("best", "worst")
        ]
        save_samples(self.path / "samples", "rollout", self.iteration, extremes, keep=50)

    def _samples(self, clip: bool, prompt: str) -> list[ShownSample]:
        frames = 12 if clip else 1
        media = self._random.integers(0, 256, (4, frames, 32, 48, 3), dtype=np.uint8)
        wave = np.sin(np.arange(24_000) / 24_000 * 2 * np.pi * 440).astype(np.float32)[None]
        sound = {"fps": 8.0, "audio": wave, "sample_rate": 16_000} if clip else {}
        return [
            ShownSample(media=m, prompt=f"{prompt} {i}", seed=i, reward=0.5, rewards={"ocr": 0.5}, **sound)
            for i, m in enumerate(media)
        ]
