"""Which families SGLang-Diffusion's pipelines stand for here, and how theirs differ."""

from __future__ import annotations

from dataclasses import dataclass

from verst.errors import ModelError
from verst.families.base import Family


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """SGLang's side of one family."""

    name: str
    """Class that /model_info names."""
    model_id: str
    """By which the package knows a local folder's kind."""
    text_encoders: int
    sequence_length: int
    """Tokens to which it pads the long encoder's; it has no parameter for it."""
    clip_tokens: int
    """Of the sequence, before the long encoder's."""
    conditioning: tuple[str, ...]
    """Names of the transformer's arguments that depend on the prompt, as the family's own conditioning has them."""
    sequence: str
    """Which of these is the token sequence."""


PIPELINES: dict[str, Pipeline] = {
    "sd3": Pipeline(
        name="StableDiffusion3Pipeline",
        model_id="stable-diffusion-3.5-medium",
        text_encoders=3,
        sequence_length=256,
        clip_tokens=77,
        conditioning=("encoder_hidden_states", "pooled_projections"),
        sequence="encoder_hidden_states",
    )
}
"""Family -> pipeline. What is not here has not been compared with verst's own forward, and is refused."""


def pipeline_of(family: Family) -> Pipeline:
    """Raises ModelError for a family that only verst's own engine makes."""
    found = PIPELINES.get(family.name)
    if found is None:
        raise ModelError(
            f"engine.type = sglang: verst maps {', '.join(PIPELINES)} to a pipeline of SGLang-Diffusion, and this model is of "
            f"the family {family.name}; use engine.type = native"
        )
    return found
