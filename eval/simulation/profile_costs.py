"""A profile as the cost model of a simulation: any model and GPU that has one, TP, MoE and MLA too.

The same tables make the times of the emulation (``eval/emulation``), so that the two can be
compared. The link is given beside the profile.
"""

from __future__ import annotations

import math

from ..profiles import profile as profiles
from ..profiles.profile import Profile, Step
from .cost_model import Extend


class ProfileCosts:
    """What steps and transfers take by a profile; one of the ``Costs``.

    Args:
        link_gbps: gigabits a second of a worker's link.
        overlap: of steps; None: as the profile has it.
    """

    def __init__(
        self,
        profile: Profile,
        link_gbps: float,
        *,
        overlap: bool | None = None,
    ) -> None:
        host = profile.file.host
        self.overlap = host.overlap if overlap is None else overlap
        self.profile = profile
        self.request_ms = host.request_ms
        self.handover_ms = host.handover_ms
        self.transfer_ms = profile.transfer_ms(1, link_gbps)

    @property
    def kv_capacity_tokens(self) -> int:
        """The tokens of KV that fit a worker."""
        return self.profile.kv_pool_tokens

    def step_ms(self, sequences: int, context_tokens: int, extends: list[Extend]) -> float:
        """Return the milliseconds of one forward.

        Args:
            sequences: that decode.
            context_tokens: that these hold together.
            extends: prefills in the same forward.

        Raises:
            OutsideProfileError: the shape lies beyond twice the range of the profile.
        """
        new = tuple(profiles.Extend(one.tokens, one.context) for one in extends)
        return self.profile.step_ms(Step(new, sequences, context_tokens + sequences))

    def decode_ms(self, steps: int, sequences: int, context_tokens: int) -> float:
        """Return the milliseconds of ``steps`` decode steps; each adds a token to every context.

        The step in the middle stands for all: a step's time is linear in the context but for the
        kinks at the points of the table.
        """
        return steps * self._middle_ms(steps, sequences, context_tokens)

    def decode_steps(self, ms: float, sequences: int, context_tokens: int) -> int:
        """The least number of decode steps that take ``ms`` or longer; at least one."""
        ms -= 1e-6

        def are_enough(steps: int) -> bool:
            return self.decode_ms(steps, sequences, context_tokens) >= ms

        # Mostly a step takes longer the more context there is. Then so many first steps are enough,
        # and fewer than so many of the steps in the middle are not.
        most = max(1, math.ceil(ms / self._middle_ms(1, sequences, context_tokens)))
        while not are_enough(most):
            most += 1
        least = max(1, math.ceil(ms / self._middle_ms(most, sequences, context_tokens)))
        least = min(least, most)
        while least > 1 and are_enough(least - 1):
            least -= 1
        while least < most:
            middle = (least + most) // 2
            if are_enough(middle):
                most = middle
            else:
                least = middle + 1
        return least

    def _middle_ms(self, steps: int, sequences: int, context_tokens: int) -> float:
        """What the step in the middle of some decode steps takes."""
        middle_tokens = context_tokens + round(sequences * (steps - 1) / 2)
        return self.profile.decode_step_ms(sequences, middle_tokens + sequences)
