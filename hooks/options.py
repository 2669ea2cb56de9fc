"""Types of options that hooks and writers share; ``check_options`` keeps to their bounds."""

from __future__ import annotations

import sys
from typing import Annotated

from msgspec import Meta

PositiveInt = Annotated[int, Meta(ge=1)]
NonNegativeInt = Annotated[int, Meta(ge=0)]
Finite = Annotated[float, Meta(ge=-sys.float_info.max, le=sys.float_info.max, description="a finite number")]
Distance = Annotated[float, Meta(ge=0, le=sys.float_info.max, description="a finite number of at least 0")]
Share = Annotated[float, Meta(gt=0, lt=1)]
Name = Annotated[str, Meta(min_length=1, description="a text that is not empty")]
