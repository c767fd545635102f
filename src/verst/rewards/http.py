"""Any service as a reward: one POST a batch. docs/rewards.md has the protocol."""

from __future__ import annotations

import json
import math
from typing import Any

import httpx
import msgpack

from verst.config.rewards import HttpReward, reward_name
from verst.errors import RewardError
from verst.rewards.base import RewardBatch, Score
from verst.rewards.service import base64_text, check_status, excerpt, npy, png, secret, transport_error, unset


class Http:
    """POSTs each batch to `url`. Retries are the pool's: an error says whether and when another try is worth it."""

    def __init__(self, config: HttpReward) -> None:
        """Raises ConfigError where an environment variable of a header is not set."""
        self.name = reward_name(config)
        self._config = config
        headers = {header: secret(name, key="headers_env") for header, name in config.headers_env.items()}
        self._client = httpx.Client(headers=headers, timeout=config.timeout_s)

    def score(self, batch: RewardBatch) -> list[Score]:
        """See Reward.score. Raises RewardError, permanent for a request that the service refuses."""
        content, kind = encode_batch(batch, self._config.format)
        try:
            response = self._client.post(self._config.url, content=content, headers={"Content-Type": kind})
        except httpx.HTTPError as error:
            raise transport_error(error, self._config.url) from error
        check_status(response)
        return decode_scores(response.content, response.headers.get("content-type", ""), len(batch))


def needs(config: HttpReward) -> list[str]:
    """One line for each environment variable that is not set."""
    return unset({f"headers_env.{header}": name for header, name in config.headers_env.items()})


def encode_batch(batch: RewardBatch, form: str) -> tuple[bytes, str]:
    """Body and content type. Raises RewardError for metadata that the format cannot carry."""
    media = batch.media.cpu().numpy()
    audio = None if batch.audio is None else npy(batch.audio.cpu().numpy())
    body: dict[str, Any] = {
        "prompts": list(batch.prompts),
        "metadata": [dict(row) for row in batch.metadata],
        "fps": batch.fps,
        "sample_rate": batch.sample_rate,
    }
    try:
        if form == "msgpack":
            return msgpack.packb({**body, "media": npy(media), "audio": audio}), "application/msgpack"
        pictures = [[base64_text(png(frame)) for frame in clip] for clip in media] if form == "json_png" else None
        body["media"] = base64_text(npy(media)) if pictures is None else pictures
        body["audio"] = None if audio is None else base64_text(audio)
        return json.dumps(body, allow_nan=False).encode(), "application/json"
    except (TypeError, ValueError) as error:
        raise RewardError(f"the metadata of these prompts cannot be sent as {form}: {error}") from error


def decode_scores(content: bytes, kind: str, count: int) -> list[Score]:
    """The service's answer `{"scores": [...]}`, JSON or msgpack by its content type.

    An entry is a number, null (cannot judge: NaN), or {"error": text} (this sample failed). Raises RewardError for
    anything else and for another number of them.
    """
    shown = excerpt(content[:400].decode("utf-8", "replace"))
    try:
        answer = msgpack.unpackb(content) if kind.startswith("application/msgpack") else json.loads(content)
    except (ValueError, msgpack.UnpackException) as error:
        raise RewardError(f"the answer is neither JSON nor msgpack: {shown}") from error
    scores = answer.get("scores") if isinstance(answer, dict) else None
    if not isinstance(scores, list):
        raise RewardError(f'the answer is not of the form {{"scores": [...]}}: {shown}')
    if len(scores) != count:
        raise RewardError(f"gave {len(scores)} scores for {count} samples")
    return [_score(entry) for entry in scores]


def _score(entry: Any) -> Score:
    if entry is None:
        return math.nan
    if isinstance(entry, dict) and isinstance(entry.get("error"), str):
        return RewardError(excerpt(entry["error"]))
    if isinstance(entry, bool) or not isinstance(entry, int | float):
        return RewardError(f"{entry!r} is no score")
    return float(entry)
