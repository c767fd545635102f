"""A vision-language model as judge, behind an OpenAI-compatible service: one request a sample."""

from __future__ import annotations

import asyncio
import json
import math
import re
from pathlib import Path
from typing import Any

import httpx

from verst.config.rewards import OpenaiReward, reward_name
from verst.errors import ConfigError, RewardError
from verst.rewards.base import RewardBatch, Score
from verst.rewards.frames import chosen_frames
from verst.rewards.service import base64_text, check_status, excerpt, png, secret, transport_error, unset

_NUMBER = re.compile(r"\s*(?:score\s*[:=]\s*)?([-+]?\d+(?:\.\d+)?)\s*", re.IGNORECASE)
"""The whole of an unstructured answer: a number that stands among other words could be any number."""
_PLACE = "{prompt}"


class VisionJudge:
    """Shows the judge the rubric and the frames; its score, mapped from `score_range` to [0, 1].

    An answer that cannot be read or is out of range is a failure of that sample, never a number.
    """

    def __init__(self, config: OpenaiReward) -> None:
        """Raises ConfigError for a rubric that cannot be read or has no {prompt}, or a key that is not set."""
        self.name = reward_name(config)
        self._config = config
        self._rubric = read_rubric(config.rubric)
        self._headers = {}
        if config.api_key_env is not None:
            self._headers["Authorization"] = f"Bearer {secret(config.api_key_env, key='api_key_env')}"
        self._url = config.base_url.rstrip("/") + "/chat/completions"

    def score(self, batch: RewardBatch) -> list[Score]:
        """See Reward.score; a sample that failed has its error in its place."""
        return asyncio.run(self._all(batch))

    async def _all(self, batch: RewardBatch) -> list[Score]:
        places = asyncio.Semaphore(self._config.concurrency)
        async with httpx.AsyncClient(headers=self._headers, timeout=self._config.request_timeout_s) as client:

            async def one(row: int) -> Score:
                async with places:
                    try:
                        return await self._ask(client, self._body(batch, row))
                    except RewardError as error:
                        return error

            return list(await asyncio.gather(*(one(row) for row in range(len(batch)))))

    async def _ask(self, client: httpx.AsyncClient, body: dict[str, Any]) -> float:
        try:
            async with asyncio.timeout(self._config.request_timeout_s):
                response = await client.post(self._url, json=body)
        except httpx.HTTPError as error:
            raise transport_error(error, self._url) from error
        except TimeoutError:
            raise RewardError(f"{self._url}: no answer within {self._config.request_timeout_s:g} s") from None
        check_status(response)
        return read_answer(answer_text(response), self._config)

    def _body(self, batch: RewardBatch, row: int) -> dict[str, Any]:
        clip = batch.media[row].cpu().numpy()
        urls = [
            f"data:image/png;base64,{base64_text(png(clip[i]))}" for i in chosen_frames(len(clip), self._config.frames)
        ]
        text = self._rubric.replace(_PLACE, batch.prompts[row])
        content = [{"type": "text", "text": text}]
        content += [{"type": "image_url", "image_url": {"url": url}} for url in urls]  # type: ignore[dict-item]
        config = self._config
        body = {
            "model": config.model,
            "messages": [{"role": "user", "content": content}],
            "temperature": config.temperature,
            "max_tokens": config.max_tokens,
            **config.extra,
        }
        return {**body, "response_format": _response_format(config)} if config.structured else body


def needs(config: OpenaiReward) -> list[str]:
    """One line for each thing that is missing: the rubric, the key."""
    lines = [] if config.api_key_env is None else unset({"api_key_env": config.api_key_env})
    try:
        read_rubric(config.rubric)
    except ConfigError as error:
        lines.append(str(error))
    return lines


def read_rubric(path: Path) -> str:
    """Raises ConfigError for a file that is not there, or that never says where the prompt goes."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"rewards.rubric = {str(path)!r} cannot be read: {error}") from error
    if _PLACE not in text:
        raise ConfigError(f"rewards.rubric = {str(path)!r} has no {_PLACE}, so the judge would not see the prompt")
    return text


def answer_text(response: httpx.Response) -> str:
    """The first choice's message. Raises RewardError for an answer of another form, or one that was cut off."""
    try:
        choice = response.json()["choices"][0]
        text, reason = choice["message"]["content"], choice.get("finish_reason")
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise RewardError(f"the judge's answer is no chat completion: {excerpt(response.text)}") from error
    if reason == "length":
        raise RewardError(f"the judge's answer was cut off; raise rewards.max_tokens: {excerpt(str(text))}")
    if not isinstance(text, str):
        raise RewardError(f"the judge's answer has no text: {excerpt(response.text)}")
    return text


def read_answer(text: str, config: OpenaiReward) -> float:
    """The score in [0, 1]. Raises RewardError for what cannot be read and for a number out of range."""
    value = _structured(text) if config.structured else _plain(text)
    low, high = config.score_range
    if value is None or not math.isfinite(value):
        raise RewardError(f"no score can be read from the judge's answer: {excerpt(text)}")
    if not low <= value <= high:
        raise RewardError(f"the judge's score {value:g} is outside of score_range = [{low:g}, {high:g}]")
    return (value - low) / (high - low)


def _structured(text: str) -> float | None:
    try:
        answer = json.loads(text)
    except ValueError:
        return None
    value = answer.get("score") if isinstance(answer, dict) else None
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _plain(text: str) -> float | None:
    match = _NUMBER.fullmatch(text)
    return float(match[1]) if match else None


def _response_format(config: OpenaiReward) -> dict[str, Any]:
    low, high = config.score_range
    # The reason comes first, so that the score follows from it.
    schema = {
        "type": "object",
        "properties": {
            "reason": {"type": "string"},
            "score": {"type": "number", "minimum": low, "maximum": high},
        },
        "required": ["reason", "score"],
        "additionalProperties": False,
    }
    return {"type": "json_schema", "json_schema": {"name": "verdict", "strict": True, "schema": schema}}
