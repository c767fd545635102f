"""What rewards behind HTTP have in common: pictures as bytes, what a status means, secrets from the environment."""

from __future__ import annotations

import base64
import email.utils
import io
import os
import time
from collections.abc import Mapping

import httpx
import numpy as np
from PIL import Image

from verst.errors import ConfigError, RewardError

RETRIED = frozenset({408, 425, 429, *range(500, 600)})
"""Statuses after which the same request may be answered."""
_EXCERPT = 300
"""Characters of an answer that a message quotes."""


def png(picture: np.ndarray) -> bytes:
    """uint8 [H, W, 3] as a PNG file."""
    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()


def npy(array: np.ndarray) -> bytes:
    """As a .npy file."""
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return buffer.getvalue()


def base64_text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def unset(names: Mapping[str, str]) -> list[str]:
    """One line for each environment variable that is not there. names: key of the recipe -> variable."""
    return [
        f"{key} = {name!r}: this environment variable is not set"
        for key, name in names.items()
        if not os.environ.get(name)
    ]


def secret(name: str, *, key: str) -> str:
    """The value of an environment variable. Raises ConfigError."""
    value = os.environ.get(name)
    if not value:
        raise ConfigError(f"rewards.{key} = {name!r}: this environment variable is not set")
    return value


def transport_error(error: httpx.HTTPError, url: str) -> RewardError:
    """A request without an answer; worth another try."""
    return RewardError(f"{url}: {type(error).__name__}: {error}")


def check_status(response: httpx.Response) -> None:
    """Raises RewardError for anything but 200: permanent for what another try cannot mend."""
    if response.status_code == 200:
        return
    url = str(response.request.url)
    error = RewardError(f"{url} answered {response.status_code}: {excerpt(response.text)}")
    error.permanent = response.status_code not in RETRIED
    error.retry_after_s = retry_after_s(response.headers.get("retry-after"), now=time.time())
    raise error


def retry_after_s(header: str | None, *, now: float) -> float:
    """Seconds that a Retry-After header asks for (a number, or an HTTP date; now: Unix time); 0 without a usable one."""
    if header is None:
        return 0.0
    if header.strip().isdecimal():
        return float(header)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(header).timestamp() - now)
    except ValueError:
        return 0.0


def excerpt(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _EXCERPT else text[:_EXCERPT] + "..."
