"""
Sliding windows release the blocks that no token can see any more. In some models, every
layer has a sliding window. For example, in Mistral 7B v0.1 a token sees only the last 4,096 tokens.
A running text then only needs the blocks in its last window. The scheduler calls `Window.slide`
after each commit. Without this file, the answers would be the same, but a text would keep all of
its blocks until its end.

    position        0  1  2  3    4  5  6  7    8  9 10 11   12 13 14 15
    block table  [      7    ] [      2    ] [      9    ] [      4    ]   all 16 tokens computed
                 [      7    ] [      7    ] [      9    ] [      4    ]   with a window of 6 or 7

A block table is indexed by position, so it cannot be shortened. Instead, the entries of released
blocks point to the text's first block, which is therefore kept. The allocator counts a reference
for each entry, as with any shared block. Kernels never read the block through these entries.
"""

from engine.step import Stage
from paged import Request


class Window(Stage):
    """Releases the blocks that no layer of the model can see any more."""

    def __init__(self, engine):
        super().__init__(engine)
        windows = engine.config.windows
        self.size = max(windows)  # size in tokens of the largest window in any layer
        self.allocator = engine.scheduler.block_allocator
        if 0 not in windows:  # 0: a layer that sees the whole text
            engine.scheduler.after_commit = self.slide

    def slide(self, request: Request):
        """
        Release the blocks that the request's last computed token cannot see. (A fork may compute
        this token again.) These blocks are committed, so the prefix cache has them. A running step
        may still read them for earlier tokens. This is safe, because the next step that writes to
        them runs after it on the same stream.
        """
        first_seen = max(0, request.num_computed_slots - self.size) // self.allocator.block_size
        table = request.block_table
        start = first_seen
        while start > 1 and table[start - 1] != table[0]:
            start -= 1
        unseen = table[start:first_seen]
        table[start:first_seen] = table[:1] * len(unseen)
        self.allocator.share(table[start:first_seen])
        self.allocator.free_blocks_for_request(unseen)
