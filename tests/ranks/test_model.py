"""No order of steps breaks the protocol of ranks; and each of its rules is needed."""

from collections import Counter

import pytest
from model import Deadlock, Protocol, Stale, run

SEEDS = 4000


def outcomes(seeds: range, protocol: Protocol) -> Counter:
    """How many runs went wrong, by what."""
    found = Counter()
    for seed in seeds:
        try:
            run(seed, protocol)
        except (Stale, Deadlock) as wrong:
            found[type(wrong)] += 1
    return found


@pytest.mark.parametrize("part", range(4))
def test_no_order_of_steps_breaks_the_protocol(part):
    for seed in range(part * SEEDS // 4, (part + 1) * SEEDS // 4):
        run(seed, Protocol())  # raises what is wrong; the seed is in the traceback's locals


@pytest.mark.parametrize(
    "protocol, wrong",
    [
        # A rank without rows for a peer comes to its next call while that peer still reads its routing of this one.
        (Protocol(buffers=1), Stale),
        # Peers write into one buffer and read from the other.
        (Protocol(parity_of_publish=1), Stale),
        # A peer that is faster through the barrier has counted already, and waits for what is gone.
        (Protocol(zero_counters="plan"), Deadlock),
        # The second call finds the flags of the first.
        (Protocol(flags="stay"), Stale),
        # A peer has arrived in the next call, and its flag is taken down with those of this one.
        (Protocol(flags="taken down"), Deadlock),
        # Behind the largest number every flag is smaller than the call that it was raised for.
        (Protocol(wrapped=False), Stale),
        # A flag is raised while another program of the same rank still publishes.
        (Protocol(arrive_waits=False), Stale),
        # The arrive tile writes the call number, and this program reads it before, or behind: it cannot know.
        (Protocol(plan_knows_call=False), Stale),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else None,
)
def test_every_rule_is_needed(protocol, wrong):
    assert outcomes(range(150), protocol)[wrong] >= 3
