"""
Sliding windows give blocks back. If every layer of a model slides (Mistral 7B v0.1: a token sees
the last 4,096), a running text needs only the blocks of its last window. The scheduler calls
`Window.slide` after each commit, and nothing else knows of it: without this file the answers are
the same, and a text keeps all of its blocks until it ends.

    position        0  1  2  3    4  5  6  7    8  9 10 11   12 13 14 15
    block table  [      7    ] [      2    ] [      9    ] [      4    ]   all 16 tokens computed
                 [      7    ] [      7    ] [      9    ] [      4    ]   with a window of 6 or 7

A block table is indexed by position, so it cannot become shorter. The text's first block therefore
stands in for the blocks that were given back: it is one block more than the window needs, and the
allocator counts it once for each of its entries, like any shared block. No kernel reads it there.
"""

from engine.step import Stage
from paged import Request


class Window(Stage):
    """Has the scheduler of an engine give back what its model's layers no longer see."""

    def __init__(self, engine):
        super().__init__(engine)
        windows = engine.config.windows
        self.size = max(windows)  # in tokens: the layer that sees most
        self.allocator = engine.scheduler.block_allocator
        if 0 not in windows:  # else a layer sees the whole text
            engine.scheduler.after_commit = self.slide

    def slide(self, request: Request):
        """
        Give back the blocks that the request's last computed token does not see (a fork may compute
        this token again). They are committed by now, so the prefix cache has them. A running step
        may still read them for earlier tokens: the next step that writes there is launched after
        it, on the same stream.
        """
        first_seen = max(0, request.num_computed_slots - self.size) // self.allocator.block_size
        table = request.block_table
        start = first_seen
        while start > 1 and table[start - 1] != table[0]:
            start -= 1
        left = table[start:first_seen]
        table[start:first_seen] = table[:1] * len(left)
        self.allocator.share(table[start:first_seen])
        self.allocator.free_blocks_for_request(left)
