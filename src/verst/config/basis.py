"""What every table of a recipe is made of: frozen models with strict numbers."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

CompileBackend = Literal["off", "inductor", "aot_eager"]
DType = Literal["float32", "bfloat16", "float16"]
# Strict: TOML has types, so `true` is no number, and neither is "7".
Number = Annotated[float, Field(strict=True)]
Flag = Annotated[bool, Field(strict=True)]
PositiveInt = Annotated[int, Field(gt=0, strict=True)]
NonNegativeInt = Annotated[int, Field(ge=0, strict=True)]
PositiveFloat = Annotated[float, Field(gt=0, strict=True)]
NonNegativeFloat = Annotated[float, Field(ge=0, strict=True)]
UnitFloat = Annotated[float, Field(ge=0.0, lt=1.0, strict=True)]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)
