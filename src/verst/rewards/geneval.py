"""GenEval (arXiv 2310.11513): are the objects of the prompt there, in number, colour and place? A detector and CLIP look.

What a prompt asks for is in its metadata, a row of GenEval's JSONL: `tag`, `include` and `exclude`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from verst.config.rewards import GenEvalReward, reward_name
from verst.errors import RewardError
from verst.rewards import geneval_rules
from verst.rewards.base import RewardBatch
from verst.rewards.clip import NEEDS, Clip
from verst.rewards.frozen import (
    PROCESSOR,
    WEIGHTS,
    chunks,
    device_of,
    folder_of,
    image_processor,
    lacking,
    pictures,
    pretrained,
    processed,
    refuse,
)
from verst.rewards.geneval_rules import COLORS, Found

_THRESHOLD, _COUNTING_THRESHOLD = 0.3, 0.9
"""Confidence from which an object counts; higher where objects are counted."""
_MAX_OBJECTS = 16
"""Of a class and picture."""
_GREY = 0x99
"""Around the object whose colour is asked for."""
_TEMPLATES = ("a photo of a {color} {name}", "a photo of a {color}-colored {name}", "a photo of a {color} object")
_ALIASES = {
    "mouse": "computer mouse",
    "remote": "tv remote",
    "keyboard": "computer keyboard",
    "motorbike": "motorcycle",
    "aeroplane": "airplane",
    "sofa": "couch",
    "pottedplant": "potted plant",
    "diningtable": "dining table",
    "tvmonitor": "tv",
}
"""COCO names of published detectors -> GenEval's."""
_RULES = {"strict": geneval_rules.strict, "soft": geneval_rules.soft}


class GenEval:
    """strict: 1 or 0; soft: mean of partial credits, at most 1 and negative where far too many objects are found."""

    def __init__(self, config: GenEvalReward) -> None:
        """Loads detector and CLIP. Raises ConfigError."""
        self.name = reward_name(config)
        self._config = config
        self._rule = _RULES[config.rule]
        refuse(config, needs(config))
        self._colors = ColorReader(Clip(config.clip, config))
        self._detector = detector_of(config)

    def score(self, batch: RewardBatch) -> list[float]:
        """See Reward.score. Raises RewardError for a sample without GenEval's metadata."""
        frames = pictures(batch)
        for prompt, metadata in zip(batch.prompts, batch.metadata, strict=True):
            problem = geneval_rules.clause_problem(metadata, self._detector.classes)
            if problem:
                raise RewardError(f"reward {self.name}: metadata of prompt {prompt[:60]!r} {problem}")
        scores: list[float] = []
        for rows in chunks(len(frames), self._config.batch_size):
            found = self._detector.detect(frames[rows])
            for frame, objects, metadata in zip(frames[rows], found, batch.metadata[rows], strict=True):
                scores.append(self._score_one(frame, objects, metadata))
        return scores

    def _score_one(self, frame: Tensor, objects: Mapping[str, list[Found]], metadata: Mapping[str, Any]) -> float:
        def colors_of(found: Sequence[Found], name: str) -> list[str]:
            return self._colors.read(frame, found, name)

        return self._rule(metadata, kept(objects, counting=metadata["tag"] == "counting"), colors_of)


def needs(config: GenEvalReward) -> list[str]:
    """What the two folders lack."""
    lines = lacking(config.path, ("config.json", *PROCESSOR, *WEIGHTS))
    return lines + lacking(config.clip, (*NEEDS, *WEIGHTS), key="clip")


def prompt_problems(config: GenEvalReward, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> list[str]:
    """One line for each prompt without usable metadata; reads the detector's config alone."""
    classes = set(_names(folder_of(config.path)).values())
    rows = zip(prompts, metadata, strict=True)
    problems = ((prompt, geneval_rules.clause_problem(row, classes)) for prompt, row in rows)
    return [f"metadata of prompt {prompt[:60]!r} {problem}" for prompt, problem in problems if problem]


def kept(objects: Mapping[str, Sequence[Found]], *, counting: bool) -> dict[str, list[Found]]:
    """The objects that count, at most 16 of a class, the most confident first."""
    threshold = _COUNTING_THRESHOLD if counting else _THRESHOLD
    out: dict[str, list[Found]] = {}
    for name, found in objects.items():
        confident = sorted((one for one in found if one.score > threshold), key=lambda one: -one.score)
        if confident:
            out[name] = confident[:_MAX_OBJECTS]
    return out


class ColorReader:
    """Which of ten colours an object has: CLIP's nearest, over three sentences for each colour."""

    def __init__(self, clip: Clip) -> None:
        self._clip = clip
        self._vectors: dict[str, Tensor] = {}

    def read(self, frame: Tensor, found: Sequence[Found], name: str) -> list[str]:
        """One colour an object; frame: uint8 [H, W, 3]."""
        if name not in self._vectors:
            sentences = [t.format(color=color, name=name) for color in COLORS for t in _TEMPLATES]
            vectors = self._clip.sentences(sentences).reshape(len(COLORS), len(_TEMPLATES), -1)
            self._vectors[name] = normalize(vectors.mean(dim=1), dim=-1)
        # One by one: crops differ in size.
        images = torch.cat([self._clip.images(cut_out(frame, one)[None]) for one in found])
        return [COLORS[int(i)] for i in (images @ self._vectors[name].T).argmax(dim=-1)]


def cut_out(frame: Tensor, found: Found) -> Tensor:
    """uint8 [h, w, 3]: the object's box, rounded and at least a pixel wide, with grey where the mask says it is not."""
    height, width, _ = frame.shape
    left, top, right, bottom = (round(value) for value in found.box)
    left, top = min(max(left, 0), width - 1), min(max(top, 0), height - 1)
    right, bottom = min(max(right, left + 1), width), min(max(bottom, top + 1), height)
    if found.mask is not None:
        mask = torch.from_numpy(found.mask).to(frame.device)
        frame = torch.where(mask[..., None], frame, torch.full_like(frame, _GREY))
    return frame[top:bottom, left:right]


class Detector(Protocol):
    """Finds objects of GenEval's classes."""

    classes: set[str]

    def detect(self, frames: Tensor) -> list[dict[str, list[Found]]]:
        """Class -> objects of each of uint8 [N, H, W, 3], from a confidence of 0.3."""


def detector_of(config: GenEvalReward) -> Detector:
    """Mask2Former, GenEval's own, or boxes of any detector of AutoModelForObjectDetection. Raises ConfigError."""
    folder = folder_of(config.path)
    kind = json.loads((folder / "config.json").read_text()).get("model_type")
    return InstanceDetector(folder, config) if kind == "mask2former" else BoxDetector(folder, config)


def _names(folder: Path) -> dict[int, str]:
    labels = json.loads((folder / "config.json").read_text()).get("id2label", {})
    return {int(number): _ALIASES.get(name, name) for number, name in labels.items()}


class InstanceDetector:
    """Mask2Former for instances: objects with masks, boxes around the masks."""

    def __init__(self, folder: Path, config: GenEvalReward) -> None:
        from transformers import Mask2FormerForUniversalSegmentation

        self._names = _names(folder)
        self.classes = set(self._names.values())
        self._device = device_of(config)
        self._processor = image_processor(folder, config)
        self._model = pretrained(Mask2FormerForUniversalSegmentation, folder, config)

    @torch.no_grad()
    def detect(self, frames: Tensor) -> list[dict[str, list[Found]]]:
        """See Detector.detect."""
        inputs = processed(self._processor, frames, self._device)
        outputs = self._model(
            pixel_values=inputs["pixel_values"].to(self._model.dtype), pixel_mask=inputs["pixel_mask"]
        )
        results = self._processor.post_process_instance_segmentation(
            outputs,
            threshold=_THRESHOLD,
            target_sizes=[tuple(frames.shape[1:3])] * len(frames),
            return_binary_maps=True,
        )
        return [self._objects(result) for result in results]

    def _objects(self, result: Mapping[str, Any]) -> dict[str, list[Found]]:
        objects: dict[str, list[Found]] = {}
        for segment in result["segments_info"]:
            mask = result["segmentation"][segment["id"]].cpu().numpy().astype(bool)
            rows, columns = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
            box = (float(columns[0]), float(rows[0]), float(columns[-1] + 1), float(rows[-1] + 1))
            name = self._names[int(segment["label_id"])]
            objects.setdefault(name, []).append(Found(box=box, score=float(segment["score"]), mask=mask))
        return objects


class BoxDetector:
    """A detector of boxes, for example DETR: an object's colour is read with its surroundings."""

    def __init__(self, folder: Path, config: GenEvalReward) -> None:
        from transformers import AutoModelForObjectDetection

        self._names = _names(folder)
        self.classes = set(self._names.values())
        self._device = device_of(config)
        self._processor = image_processor(folder, config)
        self._model = pretrained(AutoModelForObjectDetection, folder, config)

    @torch.no_grad()
    def detect(self, frames: Tensor) -> list[dict[str, list[Found]]]:
        """See Detector.detect."""
        inputs = processed(self._processor, frames, self._device)
        outputs = self._model(**{**inputs, "pixel_values": inputs["pixel_values"].to(self._model.dtype)})
        sizes = torch.tensor([frames.shape[1:3]] * len(frames), device=self._device)
        results = self._processor.post_process_object_detection(outputs, threshold=_THRESHOLD, target_sizes=sizes)
        return [self._objects(result) for result in results]

    def _objects(self, result: Mapping[str, Tensor]) -> dict[str, list[Found]]:
        objects: dict[str, list[Found]] = {}
        for score, label, box in zip(result["scores"], result["labels"], result["boxes"], strict=True):
            left, top, right, bottom = box.tolist()
            found = Found(box=(left, top, right, bottom), score=float(score))
            objects.setdefault(self._names[int(label)], []).append(found)
        return objects
