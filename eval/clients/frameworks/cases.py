"""What every framework is used for. The last line of a program is its count of requests."""

from __future__ import annotations

import json
import sys
from collections import Counter
from typing import Literal

from pydantic import BaseModel

MODEL = "default"
KEY = "any"
# Tokens of a text, and of a call or object. Some frameworks raise where a reply is cut off.
SHORT, ENOUGH = 200, 100
QUESTIONS = ("Is snow cold? Yes or no.", "Is fire cold? Yes or no.", "Is ice cold? Yes or no.")


class Weather(BaseModel):
    """The weather. Every value is short, so that a small model ends within its tokens."""

    wet: bool
    wind: Literal["none", "some", "much"]


def base_url() -> str:
    """Return the router's URL, which the command gives."""
    return sys.argv[1]


def require(holds: object, problem: str) -> None:
    """End the program with a message unless something holds."""
    if not holds:
        sys.exit(problem)


def report(requests: Counter[str]) -> None:
    """Print how many requests each case has sent."""
    print(json.dumps(requests))
