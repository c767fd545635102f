"""Does the picture say what the prompt asked for: a real text recogniser as reward.

Score = max(0, 1 - edit distance / length of the target), spaces and case ignored (Flow-GRPO's OCR reward, arXiv 2505.05470).
The models are those inside the `rapidocr` wheel; nothing is downloaded.
"""

from __future__ import annotations

import importlib.util
import os
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from PIL import Image

from verst.config.rewards import OcrReward, reward_name
from verst.errors import RewardError
from verst.rewards.base import RewardBatch

_RECOGNISER = "PP-OCRv6_rec_small.onnx"
_HEIGHT = 48
"""Input height of the recogniser, in pixels."""
_CHUNK = 16
"""Pictures of one call; a larger batch is no faster on a CPU."""


class Ocr:
    """Reads each picture and compares with the prompt (or its quoted part); in [0, 1], 1 = exactly the text."""

    def __init__(self, config: OcrReward) -> None:
        """Loads the recogniser (line) or detector and recogniser (scene). Raises RewardError where they are missing."""
        self.name = reward_name(config)
        self._target = config.target
        make: Callable[[int], LineReader | SceneReader] = LineReader if config.mode == "line" else SceneReader
        self._reader = make(config.threads or len(os.sched_getaffinity(0)))

    def score(self, batch: RewardBatch) -> list[float]:
        """See Reward.score. Raises RewardError for a prompt without a text to compare with."""
        pictures = batch.pictures()
        targets = [target_text(prompt, self._target) for prompt in batch.prompts]
        texts = self._reader.read(list(pictures))
        return [similarity(text, target) for text, target in zip(texts, targets, strict=True)]


def prompt_problems(config: OcrReward, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> list[str]:
    """One line for each prompt that has no text to compare with; needs no model."""
    problems = []
    for prompt in prompts:
        try:
            target_text(prompt, config.target)
        except RewardError as error:
            problems.append(str(error))
    return problems


def target_text(prompt: str, target: str) -> str:
    """What should be read, normalised: the whole prompt, or the texts between its double quotes. Raises RewardError."""
    text = prompt if target == "prompt" else " ".join(re.findall(r'["“]([^"“”]*)["”]', prompt))
    if not normalise(text):
        where = "text in double quotes" if target == "quoted" else "text"
        raise RewardError(f"reward ocr: prompt {prompt!r} has no {where} to compare with")
    return normalise(text)


def normalise(text: str) -> str:
    """NFKC (the recogniser knows full-width digits), lower case, no white space."""
    return "".join(unicodedata.normalize("NFKC", text).lower().split())


def similarity(read: str, target: str) -> float:
    """max(0, 1 - edit distance / len(target)) of two normalised texts."""
    return max(0.0, 1.0 - edit_distance(read, target) / len(target))


def edit_distance(a: str, b: str) -> int:
    """Levenshtein distance: insertions, deletions and substitutions cost 1."""
    previous = list(range(len(b) + 1))
    for i, x in enumerate(a, start=1):
        row = [i]
        for j, y in enumerate(b, start=1):
            row.append(min(previous[j] + 1, row[-1] + 1, previous[j - 1] + (x != y)))
        previous = row
    return previous[-1]


class LineReader:
    """The recogniser alone: a picture is one line of text, resized to 48 pixels high in its own proportions.

    32 x 64 pixels become 48 x 96. 48 x 64 is a third cheaper, but its 8 output columns cannot hold a blank between
    the equal neighbours of `2222` (read as `222`), nor six characters.
    """

    def __init__(self, num_threads: int) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = num_threads
        options.inter_op_num_threads = 1
        # Spinning threads starve torch, which computes on the same cores.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        self._session = onnxruntime.InferenceSession(
            str(recogniser_path()), options, providers=["CPUExecutionProvider"]
        )
        dictionary = self._session.get_modelmeta().custom_metadata_map["character"].split("\n")
        self._characters = ["", *dictionary, " "]

    def read(self, pictures: Sequence[np.ndarray]) -> list[str]:
        """The normalised text of each uint8 [H, W, 3] picture; all of one size."""
        texts: list[str] = []
        for start in range(0, len(pictures), _CHUNK):
            batch = np.stack([_line_input(picture) for picture in pictures[start : start + _CHUNK]])
            (probabilities,) = self._session.run(None, {"x": batch})
            texts += [self._decode(best) for best in probabilities.argmax(axis=-1)]
        return texts

    def _decode(self, best: np.ndarray) -> str:
        """Greedy CTC of the best class of each column: repeats merge, class 0 is the blank."""
        starts = np.concatenate([[True], best[1:] != best[:-1]])
        return normalise("".join(self._characters[i] for i in best[starts & (best != 0)]))


def recogniser_path() -> Path:
    """The recogniser inside the installed `rapidocr`, which is not imported (it would load OpenCV)."""
    spec = importlib.util.find_spec("rapidocr")
    folders = spec.submodule_search_locations if spec else None
    for folder in folders or []:
        path = Path(folder) / "models" / _RECOGNISER
        if path.exists():
            return path
    raise RewardError(f"reward ocr: {_RECOGNISER} is not in the installed rapidocr; install rapidocr>=3.10")


def _line_input(picture: np.ndarray) -> np.ndarray:
    """fp32 [3, 48, W'] in [-1, 1], BGR as the recogniser was trained, W' a multiple of 8."""
    height, width, _ = picture.shape
    columns = max(2, round(_HEIGHT * width / height / 8))
    resized = Image.fromarray(picture).resize((8 * columns, _HEIGHT), Image.Resampling.BILINEAR)
    array = np.asarray(resized, dtype=np.float32) / 127.5 - 1
    return np.ascontiguousarray(array[:, :, ::-1].transpose(2, 0, 1))


class SceneReader:
    """Detector and recogniser: text anywhere in a picture, boxes joined in reading order."""

    def __init__(self, num_threads: int) -> None:
        from rapidocr import RapidOCR

        # Any: its call returns one of four types, by options that are fixed here.
        self._engine: Any = RapidOCR(
            params={
                "Global.log_level": "error",
                "Global.use_cls": False,
                "EngineConfig.onnxruntime.intra_op_num_threads": num_threads,
                "EngineConfig.onnxruntime.inter_op_num_threads": 1,
            }
        )

    def read(self, pictures: Sequence[np.ndarray]) -> list[str]:
        """The normalised text of each uint8 [H, W, 3] picture; empty where none was found."""
        return [self._read_one(picture) for picture in pictures]

    def _read_one(self, picture: np.ndarray) -> str:
        result = self._engine(np.ascontiguousarray(picture[:, :, ::-1]))
        if result.boxes is None or result.txts is None:
            return ""
        return normalise(" ".join(result.txts[i] for i in reading_order(np.asarray(result.boxes))))


def reading_order(boxes: np.ndarray) -> list[int]:
    """Indices of boxes [N, 4 corners, xy] line by line from the top, left to right within a line.

    A box belongs to the line above it when its centre is less than half its height below that line's first centre.
    """
    centres, heights = boxes[:, :, 1].mean(axis=1), np.ptp(boxes[:, :, 1], axis=1)
    lines: list[list[int]] = []
    for i in np.argsort(centres, kind="stable").tolist():
        if lines and centres[i] - centres[lines[-1][0]] < heights[i] / 2:
            lines[-1].append(i)
        else:
            lines.append([i])
    return [i for line in lines for i in sorted(line, key=lambda j: float(boxes[j, :, 0].min()))]
