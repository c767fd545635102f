"""Which groups of a rollout are trained on: the filters of the rollout table."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from verst.config.basis import Section


class NoFilter(Section):
    type: Literal["none"] = "none"


class ZeroVarianceFilter(Section):
    type: Literal["zero_variance"] = "zero_variance"
    """Drop groups whose samples all got the same reward: they carry no signal."""


FilterConfig = Annotated[NoFilter | ZeroVarianceFilter, Field(discriminator="type")]
