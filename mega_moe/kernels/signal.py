"""Tickets: how resident programs agree on who does what, without talking to each other."""

import triton
import triton.language as tl


# --8<-- [start:draw]
@triton.jit
def draw(ticket_ptr):
    """The next ticket: 0, 1, 2, ... over all programs of a launch, each drawn once.

    Which program gets which ticket varies from run to run; what is computed for a ticket does not. Nothing is ordered
    by it (relaxed): a ticket is a number, not a message.
    """
    return tl.atomic_add(ticket_ptr, 1, sem="relaxed")


# --8<-- [end:draw]
