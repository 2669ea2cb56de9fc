"""Types of numbers that are read from files. Their bounds keep arithmetic and dates from failing on a damaged number."""

from typing import Annotated, Final

from msgspec import Meta

LATEST: Final = 1e10
Time = Annotated[float, Meta(ge=0, le=LATEST)]  # seconds since 1970, until the year 2286
Count = Annotated[int, Meta(ge=0, le=2**53)]  # a number of things
Change = Annotated[int, Meta(ge=-(2**53), le=2**53)]  # the growth of a number of things
Number = Annotated[float, Meta(ge=-1e18, le=1e18)]  # a finite number, such as seconds or a share
