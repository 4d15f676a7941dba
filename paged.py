"""
Track who owns each KV block (allocator, prefix cache, requests, scheduler), and hold the pool that
stores the keys (K) and values (V).

    request.block_table     [logical block] -> physical block
    slot                    physical block * block_size + offset: where one token's K and V are

    Scheduler ── owns ──> BlockAllocator ── owns ──> BlockCache
        │ allocates, shares, frees                       ^ finds the block with a given text
        v                                                │
    Request.block_table ──────── full, computed blocks are committed

This works like paging in an operating system. A request's K and V are stored in blocks anywhere in
the pool, and its block table lists those blocks in text order. Requests that begin with the same
text can therefore share blocks.

Read this file from top to bottom: blocks, requests, the scheduler (which decides what each step
computes), and the pool. The last section has helpers from the blog post "Adding Paged Attention to
NanoGPT" ("the post" in comments) that serving no longer needs. Only `KVBlockPool` imports torch.
The scheduling policy is plain Python, so tests can run thousands of random schedules per second.
`Scheduler.check` lists the invariants. Run `python test_paged.py` to see everything at work.
"""

from array import array
from bisect import insort
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from hashlib import sha256
from numbers import Integral
from typing import ClassVar, NamedTuple

# --------------------------------------------------------------------------------------------------
# Blocks and the prefix cache


class CachedBlock(NamedTuple):
    """Identifies a committed block's content: K and V for `tokens`, after the prefix `parent`."""

    key: bytes
    parent: bytes
    tokens: tuple[int, ...]


def root_key(salt: str = "") -> bytes:
    """Return the parent key for first blocks. Requests with different salts never share blocks."""
    return sha256(salt.encode("utf-8", "surrogatepass")).digest()


def block_key(parent: bytes, tokens) -> bytes:
    """
    Return the sha256 hash of the parent block's key and this block's tokens. The keys form a hash
    chain, so each one identifies the whole text up to the end of its block.
    """
    return sha256(parent + array("q", tokens).tobytes()).digest()


class BlockCache:
    """The prefix cache, which finds a full block by its tokens and all the tokens before them."""

    def __init__(self):
        self.block_of: dict[bytes, int] = {}  # key -> physical block
        self.contents: dict[int, CachedBlock] = {}  # physical block -> its content

    def lookup(self, content: CachedBlock) -> int | None:
        """
        Return the block with this content, or None. The hash finds the block. The content is then
        compared to rule out a hash collision.
        """
        block = self.block_of.get(content.key)
        return block if self.contents.get(block) == content else None

    def insert(self, block: int, content: CachedBlock) -> bool:
        """
        Add a full block. If the cache already has a block with this key, do nothing and return
        False. The new block then stays private to its owner, and becomes free rather than idle when
        the owner releases it.
        """
        is_new = content.key not in self.block_of and block not in self.contents
        if is_new:
            self.block_of[content.key] = block
            self.contents[block] = content
        return is_new

    def forget(self, block: int):
        """Remove a block that is about to be reused."""
        content = self.contents.pop(block)
        del self.block_of[content.key]


class BlockAllocator:
    """
    Allocates and frees blocks 0..num_blocks-1, in O(1) time per block. Each block is always in
    exactly one of three states:

              allocate               last reference freed, block committed
        free ──────────> referenced ──────────────────────────────────────────> idle, cached
          ^               │      ^                                                 │
          └───────────────┘      └─────────────────────────────────────────────────┘
          last reference freed,  prefix hit; or evicted and reallocated if no block is free,
          block not committed    the least recently used (LRU) first

    >>> allocator = BlockAllocator(num_blocks=3)
    >>> table = allocator.allocate_n(2); table
    [0, 1]
    >>> allocator.free_blocks_for_request(table); allocator.num_free
    3
    """

    def __init__(self, num_blocks: int, block_size: int = 4):
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.ref_counts = [0] * num_blocks  # [block] -> number of block tables that contain it
        # Stack of blocks that are neither in a table nor committed. The block freed last is
        # allocated next.
        self.free = list(reversed(range(num_blocks)))
        # Committed blocks that are not in any table, the least recently used first. A value of n
        # means that the block was the n-th to become idle.
        self.idle: OrderedDict[int, int] = OrderedDict()
        self.num_idled = 0
        self.block_cache = BlockCache()
        self.evicted: list[int] = []  # blocks evicted for the current plan

    @property
    def num_free(self) -> int:
        """Number of blocks that can be allocated now: those that are free or idle."""
        return len(self.free) + len(self.idle)

    def allocate_one(self) -> int:
        """Allocate one block. Raises RuntimeError if every block is referenced."""
        return self.allocate_n(1)[0]

    def allocate_n(self, n: int) -> list[int]:
        """Allocate n blocks. Raises RuntimeError, without allocating any, if too few are left."""
        if n > self.num_free:
            raise RuntimeError(
                f"block pool exhausted: wanted {n}, available {self.num_free} of "
                f"{self.num_blocks}; free a request's blocks first, or make the pool larger "
                "(num_blocks, --kv-blocks)"
            )
        blocks = []
        for _ in range(n):
            block = self.free.pop() if self.free else self._evict()
            self.ref_counts[block] = 1
            blocks.append(block)
        return blocks

    def _evict(self) -> int:
        """
        Remove the least recently used idle block from the prefix cache, add the block to `evicted`,
        and return it.
        """
        block, _ = self.idle.popitem(last=False)
        self.block_cache.forget(block)
        self.evicted.append(block)
        return block

    def share(self, blocks: list[int]):
        """Add a reference to each block, after a prefix hit or when a running request is forked."""
        for block in blocks:
            if self.ref_counts[block] == 0:
                del self.idle[block]
            self.ref_counts[block] += 1

    def free_blocks_for_request(self, block_table: list[int]):
        """
        Drop one reference to each block, without changing the table itself. The tail is freed
        first, so that it is also evicted first. (Lookups start at the head, so if the head were
        evicted first, the tail could never be found.) Raises ValueError if a block has no
        references.
        """
        for block in reversed(block_table):
            if self.ref_counts[block] < 1:
                raise ValueError(f"block {block} is freed twice: it is not in any block table")
            self.ref_counts[block] -= 1
            if self.ref_counts[block] > 0:
                continue  # still in another table
            if block in self.block_cache.contents:
                self.num_idled += 1
                self.idle[block] = self.num_idled
            else:
                self.free.append(block)


# --------------------------------------------------------------------------------------------------
# Requests


# Placeholder in `generated_tokens` for a token that a running step is about to sample. The token
# itself stays on the device, where the next step reads it. The placeholder is enough for planning,
# which only needs to know how long texts are.
TO_COME = None


@dataclass(slots=True, eq=False)
class Request:
    """
    One text that is being continued. The blocks in `block_table` hold K and V for every token
    except the newest one, which the next step takes as its input.

        waiting ── admitted ──> prefilling ── prompt computed ──> active ── stop or length ──> done
           ^                        │                               │
           └───── preempted ────────┴───────────────────────────────┘

    There are two more states between active and done. A request is `finishing` while its last token
    is being computed. It is `paused` while an engine stage keeps it out of the steps; for example,
    engine/grammar.py pauses a request that is waiting for a mask.

    Several cursors move along a request's positions, and none ever passes the one listed below it.
    For example, here is the state between two steps, with blocks of 4 tokens, a prompt of 6 tokens
    and 4 known tokens of the answer:

        position        0  1  2  3    4  5  6  7    8  9 10 11
        block         [      7    ] [      2    ] [      9    ]
        committed  8   ────────────────────────>                 num_committed, in blocks
        filled     9   ─────────────────────────────>            num_filled_slots: have K and V
        allocated 12   ──────────────────────────────────────>   len(block_table), in blocks

    The newest of the 10 tokens, at position 9, is the input of the next step, which writes the
    token's K and V. With overlap, the next step is already running. The text then has 11 tokens,
    the last of which is TO_COME. Two cursors now differ: `filled` counts the slot that the step is
    writing, while `computed` does not.

        computed   9   ─────────────────────────────>            num_computed_slots: written
        filled    10   ────────────────────────────────>         num_filled_slots: or being written
    """

    # the post's eight fields
    id: int | str
    prompt_tokens: list[int]
    max_new_tokens: int
    generated_tokens: list[int | None] = field(default_factory=list)
    status: str = "waiting"
    # how many tokens, out of prefill_target, have been computed or found in the prefix cache
    prefill_cursor: int = 0
    block_table: list[int] = field(default_factory=list)
    num_filled_slots: int = 0  # tokens whose K and V exist or are being written

    # Fields for overlap, sampling and sharing. The caller may set these:
    arrival_time: float = 0.0  # in seconds; any unit works with policy fcfs
    priority: int = 0  # the lowest is served first
    cache_salt: str = ""  # only requests with the same salt share prefixes
    # return log-probabilities for the prompt's tokens, and for this many top tokens per position
    prompt_logprobs: int | None = None

    # The scheduler sets these:
    row: int | None = None  # index in the engine's device arrays, while the request runs
    arrival_number: int = 0  # breaks ties between equal arrival times
    # number of tokens to compute before sampling: the prompt, plus generated tokens if preempted
    prefill_target: int = 0
    num_hit_tokens: int = 0  # prompt tokens found in the prefix cache at the first admission
    num_preemptions: int = 0
    num_to_come: int = 0  # number of TO_COME tokens at the end of generated_tokens
    num_computed_slots: int = 0  # filled slots whose step has ended, so their K and V exist
    # number of leading full blocks that `commit_blocks` has either cached or skipped
    num_committed: int = 0
    block_keys: list[bytes] = field(default_factory=list)  # root key, then one key per full block
    finish_reason: str | None = None  # stop, length, abort or error, once done
    # tokens that end the answer; the engine's requests override it (engine/step.py)
    stop_token_ids: ClassVar[frozenset[int]] = frozenset()

    def __post_init__(self):
        self.prefill_target = self.prefill_target or len(self.prompt_tokens)
        self.block_keys = self.block_keys or [root_key(self.cache_salt)]

    @property
    def tokens_so_far(self) -> list[int | None]:
        return self.prompt_tokens + self.generated_tokens

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_tokens) + self.num_generated

    @property
    def num_tokens_in_cache(self) -> int:
        """The post's name for num_filled_slots. "Cache" means the pool, not the prefix cache."""
        return self.num_filled_slots

    @property
    def num_generated(self) -> int:
        return len(self.generated_tokens)

    @property
    def num_known(self) -> int:
        """Number of answer tokens that are not TO_COME."""
        return self.num_generated - self.num_to_come

    @property
    def is_done(self) -> bool:
        return self.status == "done" or self.num_generated >= self.max_new_tokens

    @property
    def is_fully_prefilled(self) -> bool:
        return self.prefill_cursor >= self.prefill_target

    def tokens_between(self, start: int, end: int) -> list[int | None]:
        """Return tokens start..end-1 of prompt plus answer, including TO_COME; copy only those."""
        P = len(self.prompt_tokens)
        generated = self.generated_tokens[max(start - P, 0) : max(end - P, 0)]
        return self.prompt_tokens[start:end] + generated

    def content_of(self, index: int, block_size: int) -> CachedBlock:
        """
        Return the content of logical block `index`. All tokens up to its end must be known. Call
        this method for a request's blocks in order, because each key is computed (once) from the
        previous block's key.
        """
        keys = self.block_keys
        tokens = tuple(self.tokens_between(index * block_size, (index + 1) * block_size))
        if index == len(keys) - 1:
            keys.append(block_key(keys[index], tokens))
        return CachedBlock(keys[index + 1], keys[index], tokens)

    def clear_cache(self, block_allocator: BlockAllocator):
        """Free the blocks and reset the cursors, but keep the tokens."""
        block_allocator.free_blocks_for_request(self.block_table)
        self.block_table = []
        self.prefill_cursor = 0
        self.num_filled_slots = 0
        self.num_computed_slots = 0
        self.num_committed = 0


def find_cached_prefix(request: Request, block_cache: BlockCache, block_size: int) -> list[int]:
    """
    Return the physical blocks of the longest cached prefix, without adding references. The block
    that contains the last token is never a hit. The reason is that choosing the next token requires
    the last token's logits, and that token alone cannot be recomputed in a shared, read-only block.
    For example, if all 8 tokens of a text are cached in blocks of 4, only (8 - 1) // 4 = 1 block is
    a hit. The other 4 tokens are recomputed in a new block.
    """
    hits = []
    for index in range((request.num_tokens - 1) // block_size):
        block = block_cache.lookup(request.content_of(index, block_size))
        if block is None:
            break
        hits.append(block)
    return hits


def commit_blocks(
    request: Request, block_cache: BlockCache, block_size: int, num_slots: int, ref_counts=None
) -> list[int]:
    """
    Commit the request's full blocks: add each block that lies within the first `num_slots` slots,
    whose K and V exist, to the prefix cache. Advance `num_committed` past these blocks. Return the
    blocks that were added. For example, with blocks of 4 and num_slots = 9, logical blocks 0 and 1
    are committed. Block 2 has only one token so far.

    If `ref_counts` is given, skip blocks that are shared, and never try them again. Even a full
    block may change while it is shared. With n > 1, the first answer may write token a into the
    shared last block while the second still holds the block. Once the first answer has ended, the
    second overwrites token a in place. Here is an example with a prompt of three tokens (p p p),
    two answers, blocks of 4, and overlap:

        block 5    references
        p p p -    1    step 1 has computed the prompt; step 2, already running, will write token a
        p p p -    2    step 1 is resolved: answer 2 is forked, and will recompute the last p
                        because it needs its logits to sample its own first token
        p p p a    2    step 2 is resolved: the block is full but shared, so it is skipped
        p p p a    1    answer 1 stops before answer 2 has decoded
        p p p b    1    answer 2 is now the only owner, and overwrites a in place

    >>> cache, first = BlockCache(), Request("first", [1, 2, 3], 9, generated_tokens=[50])
    >>> first.block_table = [5]
    >>> commit_blocks(first, cache, 4, num_slots=4, ref_counts=[0, 0, 0, 0, 0, 2])
    []
    >>> first.num_committed, cache.contents
    (1, {})
    """
    new = []
    for index in range(request.num_committed, num_slots // block_size):
        block = request.block_table[index]
        content = request.content_of(index, block_size)
        is_final = ref_counts is None or ref_counts[block] == 1
        if is_final and block_cache.insert(block, content):
            new.append(block)
        request.num_committed = index + 1
    return new


# --------------------------------------------------------------------------------------------------
# The order in which requests are served
#
# Requests are sorted by arrival time plus a delay for low priority or for length. The delay is
# bounded, so every request eventually reaches the front of the queue and none is starved. A
# request's key never changes, even if the request is preempted, so the queue stays sorted.
# (Preemption does not make a job any shorter, because all of its tokens must be recomputed.)

PRIORITY_AGEING = 240.0  # limit of a priority's effect, in seconds like arrival times
SJF_AGEING = 0.05  # seconds per token: 1,000 more tokens count like arriving 50 seconds later


def priority_delay(r: Request) -> float:
    """
    Return the delay in seconds for a request's priority: 60 for priority 1, 96 for 2, 185 for 10,
    -60 for -1. Its absolute value is always below PRIORITY_AGEING. So a request can be overtaken
    only by requests that arrive less than 2 * PRIORITY_AGEING seconds later.
    """
    return PRIORITY_AGEING * (r.priority / (abs(r.priority) + 3))


def length_delay(r: Request) -> float:
    """Return the delay in seconds for a request's length, so that the shortest job is first."""
    return SJF_AGEING * (len(r.prompt_tokens) + r.max_new_tokens)


POLICIES = {"fcfs": lambda r: 0.0, "priority": priority_delay, "sjf": length_delay}


# --------------------------------------------------------------------------------------------------
# The scheduler


@dataclass(slots=True)
class Plan:
    """
    The work of one step: which requests take part, and how many tokens each one computes. A plan
    does not change once its step has been launched.
    """

    decodes: list[Request] = field(default_factory=list)  # each computes one token and its guesses
    # speculative decoding: guesses, checked in this step, of what follows a decode's last token
    guesses: dict[Request, list[int]] = field(default_factory=dict)
    chunks: list[tuple[Request, int]] = field(default_factory=list)  # (request, number of tokens)
    prefilled: list[Request] = field(default_factory=list)  # requests whose prefill ends here
    # copy-on-write: new block -> source block, copied before the step writes
    copies: dict[int, int] = field(default_factory=dict)
    admitted: list[Request] = field(default_factory=list)  # just got a row and a block table
    preempted: list[Request] = field(default_factory=list)  # lost their row and blocks; wait again
    # requests whose block table has new blocks: appended, or copied on write
    tables_changed: list[Request] = field(default_factory=list)
    evicted: list[int] = field(default_factory=list)  # blocks removed from the prefix cache

    @property
    def sampled(self) -> list[Request]:
        """Requests that get a new token, or several tokens if they have guesses."""
        return self.decodes + self.prefilled

    def num_sampled(self, request: Request) -> int:
        """Return how many tokens it samples: one after its last token, and one after each guess."""
        return 1 + len(self.guesses.get(request, ()))

    @property
    def work(self) -> list[tuple[Request, int]]:
        """Every request in the step, with the number of tokens that it computes."""
        return [(r, self.num_sampled(r)) for r in self.decodes] + self.chunks

    @property
    def num_tokens(self) -> int:
        return sum(n for _, n in self.work)


def setting(default, help: str, **more):
    """
    Return a dataclass field that flags.py turns into a command-line flag with this help text.
    `more` may contain `least`, `choices`, and `flag` if the flag's name differs from the field's.
    """
    return field(default=default, metadata={"help": help, **more})


@dataclass(frozen=True)
class SchedulerSettings:
    """
    The scheduler's settings, in addition to the post's four arguments. Raises ValueError if a value
    is out of range.
    """

    max_num_seqs: int = setting(256, "maximum number of running requests", least=1)
    # fraction of the blocks that an admission must leave free for the requests already running
    watermark: float = 0.0
    prefill_share: float = setting(0.25, "share of the token budget reserved for prompts")
    # number of prompts that share a step's budget evenly; later prompts get what is left over
    max_num_partial_prefills: int = 4
    max_long_partial_prefills: int = 1  # how many of these prompts may be long
    long_prefill_threshold: int = 512  # a prompt with more tokens than this is long
    # the help text describes the flag, which turns the cache off
    prefix_cache: bool = setting(
        True, "do not reuse cached prefixes of prompts", flag="--no-prefix-cache"
    )

    def __post_init__(self):
        for f in fields(self):
            least = f.metadata.get("least")
            value = getattr(self, f.name)
            if least is None or (value is None and f.default is None):
                continue
            if not (isinstance(value, Integral) and least <= value < 2**31):
                raise ValueError(
                    f"{f.name} is {value!r}, wanted at least {least}, a whole number below 2**31"
                )
        if not 0 <= self.prefill_share < 1:
            raise ValueError(
                f"prefill_share is {self.prefill_share}, wanted a share of the token budget: 0 or "
                "more, below 1"
            )


class Scheduler:
    """
    Decides what each step computes, and owns all blocks. One step looks like this:

        plan = scheduler.plan()           # admit, allocate, preempt; choose what to compute
        ...                               # run the model, and sample a token for each plan.sampled
        scheduler.update(plan, tokens)    # append tokens, commit full blocks, free what finished

    The default sizes are those from the post; `Engine` chooses its own.
    """

    def __init__(
        self,
        policy: str = "fcfs",
        token_budget: int = 16,  # maximum number of tokens per step, decodes plus prefill chunks
        max_kv_tokens: int = 256,  # pool size, in tokens
        block_size: int = 4,
        *,
        settings: SchedulerSettings | None = None,
    ):
        settings = settings or SchedulerSettings()
        num_blocks = max_kv_tokens // block_size
        if policy not in POLICIES:
            raise ValueError(f"unknown policy {policy!r}: choose one of {', '.join(POLICIES)}")
        if token_budget < 1:
            raise ValueError(f"token_budget is {token_budget}, wanted at least 1")
        if num_blocks < 1:
            raise ValueError(
                f"max_kv_tokens is {max_kv_tokens}, wanted at least 1 block of {block_size}"
            )
        self.settings = settings
        self.delay = POLICIES[policy]
        self.token_budget = token_budget
        self.block_size = block_size
        self.watermark_blocks = int(settings.watermark * num_blocks)
        self.prefill_tokens = max(1, int(token_budget * settings.prefill_share))
        self.block_allocator = BlockAllocator(num_blocks, block_size)
        self.max_num_seqs = settings.max_num_seqs
        self.free_rows = list(reversed(range(self.max_num_seqs)))
        # every request is on the list named after its status
        self.waiting: list[Request] = []  # sorted by queue_key
        self.prefilling: list[Request] = []  # in order of admission
        self.active: list[Request] = []  # decoding
        self.finishing: list[Request] = []  # their last token is being computed
        self.paused: list[Request] = []  # until a stage of the engine moves them back to `active`
        # Called after a request's computed slots have been committed. The callback may free blocks
        # that the request no longer needs (engine/window.py).
        self.after_commit: Callable[[Request], None] | None = None
        # for metrics and traces
        self.num_added = 0
        self.num_preemptions = 0
        self.num_copies = 0
        self.num_forks = 0
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0
        self.peak_blocks = 0
        # number of blocks (needed, available), if the head of the queue was not admitted
        self.admission_shortfall: tuple[int, int] | None = None
        self.committed: list[int] = []  # blocks that the last `resolve` added to the prefix cache
        self.checked: dict[int, CachedBlock] = {}  # blocks whose keys `check` has verified

    @property
    def block_cache(self) -> BlockCache:
        return self.block_allocator.block_cache

    @property
    def running(self) -> list[Request]:
        return self.active + self.prefilling + self.finishing + self.paused

    def is_done(self) -> bool:
        return not self.waiting and not self.running

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    # -- new requests: enqueue and admit -----------------------------------------------------------

    def add_request(self, request: Request):
        """
        Add a request to the queue. Its arrival_time must be set. Raises ValueError if the prompt is
        empty, or needs more than the whole pool.
        """
        if not request.prompt_tokens:
            raise ValueError(
                f"request {request.id} has an empty prompt: give it at least one token"
            )
        needed = self.blocks_for(request.num_tokens)
        available = self.block_allocator.num_blocks
        if needed > available:
            raise ValueError(
                f"request {request.id} needs {needed} blocks for its prompt, the pool has "
                f"{available}: shorten the prompt or make the pool larger (max_kv_tokens, "
                "--kv-blocks)"
            )
        self.num_added += 1
        request.arrival_number = self.num_added
        self._enqueue(request)

    def queue_key(self, request: Request) -> tuple[float, int]:
        """Return a request's sort key. The request with the smallest key is served first."""
        return request.arrival_time + self.delay(request), request.arrival_number

    def _enqueue(self, request: Request):
        request.status = "waiting"
        insort(self.waiting, request, key=self.queue_key)

    def _maybe_admit(self, step: int = 0) -> list[Request]:
        """
        Admit requests from the head of the queue while there are rows and enough blocks (above the
        watermark). Return the admitted requests. If a request does not fit, those behind it must
        also wait. Otherwise small requests could overtake a large one forever. `step` is the post's
        parameter, and is not used.
        """
        admitted = []
        while self.waiting:
            request = self.waiting[0]
            if not self._admit(request):
                break
            admitted.append(request)
        return admitted

    def _admit(self, request: Request) -> bool:
        """
        Move a waiting request to `prefilling`: give it a row and blocks for all its tokens, sharing
        the blocks of a cached prefix. If the request does not fit, return False without changing
        anything.
        """
        # a request preempted with a pending token cannot be recomputed until that token is known
        if not self.free_rows or request.num_to_come:
            return False
        allocator = self.block_allocator
        num_tokens = request.num_tokens
        hits = []
        # prompt_logprobs needs logits for every prompt token, so all of them must be computed
        if self.settings.prefix_cache and request.prompt_logprobs is None:
            hits = find_cached_prefix(request, self.block_cache, self.block_size)
        num_hit_tokens = len(hits) * self.block_size
        needed = self.blocks_for(num_tokens) - len(hits)
        # num_free includes idle hits, but this request is about to reference those
        spare = allocator.num_free - len(allocator.idle.keys() & hits)
        # a request may take the whole pool if no other is running
        reserve = self.watermark_blocks if self.active or self.prefilling else 0
        if needed + reserve > spare:
            self.admission_shortfall = (needed + reserve, spare)
            return False
        allocator.share(hits)
        request.block_table = hits + allocator.allocate_n(needed)
        request.num_filled_slots = num_hit_tokens
        request.num_computed_slots = num_hit_tokens
        request.prefill_cursor = num_hit_tokens
        if request.num_preemptions == 0:
            request.num_hit_tokens = num_hit_tokens
        request.num_committed = len(hits)
        request.prefill_target = num_tokens
        request.row = self.free_rows.pop()
        self.move(request, "prefilling")
        self.num_queried_tokens += num_tokens
        self.num_hit_tokens += num_hit_tokens
        return True

    # -- before a step: plan -----------------------------------------------------------------------

    def plan(self, step: int = 0) -> Plan:
        """
        Plan one step. Every active request decodes one token, and prefill chunks get the rest of
        the budget. (If there are more active requests than the budget allows, they take turns.)
        Allocate the blocks that the step will write. Raises RuntimeError if the only running
        request needs a block and none is left.
        """
        plan = Plan()
        self.block_allocator.evicted = plan.evicted
        self.admission_shortfall = None
        self._plan_decodes(plan)
        if not plan.preempted:  # do not readmit the victim in the same step
            plan.admitted = self._maybe_admit(step)
        if self.prefilling:
            self._plan_chunks(plan)
        allocator = self.block_allocator
        self.peak_blocks = max(self.peak_blocks, allocator.num_blocks - allocator.num_free)
        return plan

    def schedule(self, step: int) -> tuple[Request | None, list[Request]]:
        """Plan a step as the post does: return the first request with a chunk, and the decodes."""
        plan = self.plan(step)
        prefill = plan.chunks[0][0] if plan.chunks else None
        return prefill, plan.decodes

    def _plan_decodes(self, plan: Plan):
        """Choose the decodes, leaving prompts their share of the budget, and ensure free slots."""
        limit = self.token_budget
        if self.prefilling:
            limit = max(1, limit - self.prefill_tokens)
        plan.decodes = self.active[:limit]
        if len(self.active) > limit:  # take turns: the others are first next time
            self.active = self.active[limit:] + plan.decodes
        S = self.block_size
        ref_counts = self.block_allocator.ref_counts
        # Usually a request's last block is private and has a free slot, so this loop does nothing.
        # (Prompts got their blocks at admission.)
        for request in plan.decodes.copy():
            table = request.block_table
            if request.num_filled_slots == len(table) * S or ref_counts[table[-1]] > 1:
                self._ensure_slot(request, plan)
        if plan.preempted:
            plan.decodes = [r for r in plan.decodes if r.status == "active"]
            # if all the requests whose turn it was have been preempted, let the others decode
            if not plan.decodes and self.active and not self.finishing:
                self._plan_decodes(plan)

    def _ensure_slot(self, request: Request, plan: Plan):
        """
        Give a request a private slot for its next token: append a new block if the last one is
        full, or copy the last one if it is shared. If no block is free, preempt a request and check
        again, because the last block may no longer be shared, or the victim may have been this very
        request. However, if other requests are about to finish and free their blocks, just remove
        this request from plan.decodes.
        """
        allocator = self.block_allocator
        while request.row is not None:
            table = request.block_table
            is_full = request.num_filled_slots == len(table) * self.block_size
            if not is_full and allocator.ref_counts[table[-1]] == 1:
                return
            if allocator.num_free:
                plan.tables_changed.append(request)
                block = allocator.allocate_one()
                if is_full:
                    table.append(block)
                else:  # copy-on-write: the other holders keep the old block
                    plan.copies[block] = table[-1]
                    allocator.free_blocks_for_request(table[-1:])
                    table[-1] = block
                    self.num_copies += 1
            elif self.finishing:  # blocks are about to be freed
                plan.decodes.remove(request)
                return
            else:
                plan.preempted.append(self._preempt_for(request))

    def _preempt_for(self, request: Request) -> Request:
        """
        Preempt the running request that comes last in queue order, which may be `request` itself:
        free its blocks, and put it back in the queue to be recomputed later. Return the preempted
        request. In any other order, newcomers could preempt the first request again and again, and
        starve it.
        """
        running = self.running
        if len(running) == 1:
            num_blocks = self.block_allocator.num_blocks
            raise RuntimeError(
                f"request {request.id} cannot grow: it is alone in the pool and holds "
                f"{num_blocks} of {num_blocks} blocks for "
                f"{request.num_filled_slots} tokens, wanted 1 more; make the pool larger "
                "(max_kv_tokens, --kv-blocks) or lower max_new_tokens"
            )
        victim = max(running, key=self.queue_key)
        self._leave(victim)
        victim.num_preemptions += 1
        self.num_preemptions += 1
        self._enqueue(victim)
        return victim

    def _plan_chunks(self, plan: Plan):
        """
        Split the rest of the budget among the prompts (chunked prefill). The first
        `max_num_partial_prefills` prompts get even shares, and later prompts get what is left over.
        At most `max_long_partial_prefills` long prompts keep their place in this order. Any other
        long prompts move to the end. Shares are rounded up, so 9 tokens, for example, are split
        into 5 and 4. The prompt admitted first always gets a share, so no prompt waits forever.
        """
        limits = self.settings
        threshold = limits.long_prefill_threshold
        long = [r for r in self.prefilling if r.prefill_target - r.num_hit_tokens > threshold]
        last = set(long[limits.max_long_partial_prefills :])
        # the sort is stable, so the others remain in order of admission
        in_order = sorted(self.prefilling, key=lambda r: r in last)
        num_sharers = min(limits.max_num_partial_prefills, len(in_order) - len(last))
        left = self.token_budget - len(plan.decodes)
        for i, request in enumerate(in_order):
            if left == 0:
                break
            share = -(-left // max(1, num_sharers - i))
            missing = request.prefill_target - request.prefill_cursor
            n = min(share, missing)
            plan.chunks.append((request, n))
            if n == missing:
                plan.prefilled.append(request)
            left -= n

    def extend_if_free(self, request: Request, n: int) -> int:
        """
        Append blocks for the next n tokens, or for as many as there are free blocks above the
        watermark, without preempting any request. Return how many of the n tokens now have a slot.
        """
        allocator = self.block_allocator
        table = request.block_table
        start = request.num_filled_slots
        missing = self.blocks_for(start + n) - len(table)
        spare = allocator.num_free - self.watermark_blocks
        table += allocator.allocate_n(max(0, min(missing, spare)))
        return min(n, len(table) * self.block_size - start)

    def shorten(self, request: Request, num_tokens: int):
        """Free the blocks at the end of a request's table that num_tokens tokens do not need."""
        end = self.blocks_for(num_tokens)
        self.block_allocator.free_blocks_for_request(request.block_table[end:])
        del request.block_table[end:]

    # -- after a step: process its results ---------------------------------------------------------

    def update(self, plan: Plan, tokens: list[int]) -> list[Request]:
        """
        Process a step's results, where `tokens[i]` was sampled for `plan.sampled[i]`. Complete the
        requests that have finished, and return them. The two halves of this method, `advance` and
        `resolve`, are separate so that an engine can plan a step while the previous one is still
        running.
        """
        sampled = plan.sampled
        if len(tokens) != len(sampled):
            raise ValueError(
                f"{len(tokens)} tokens for a plan that samples {len(sampled)}: give one for each"
            )
        self.advance(plan)
        return self.resolve(plan, {r: [token] for r, token in zip(sampled, tokens, strict=True)})

    def advance(self, plan: Plan):
        """
        Update the plan's requests once the step has been launched: count the slots it writes as
        filled, promote the requests whose prompt it completes, and append TO_COME for each token
        that it will sample.
        """
        for request, n in plan.chunks:
            request.prefill_cursor += n
            # the slot for a prompt's last token is counted in the third loop
            request.num_filled_slots += n - (request in plan.prefilled)
            if request.is_fully_prefilled:
                self.promote(request)
        for request, guesses in plan.guesses.items():
            request.num_filled_slots += len(guesses)
            request.num_to_come += len(guesses)
            request.generated_tokens += [TO_COME] * len(guesses)
        for request in plan.sampled:
            request.num_filled_slots += 1
            request.num_to_come += 1
            request.generated_tokens.append(TO_COME)
            if len(request.generated_tokens) >= request.max_new_tokens:
                self.move(request, "finishing")

    def resolve(self, plan: Plan, tokens: dict[Request, list[int]]) -> list[Request]:
        """
        Update the plan's requests once the step has ended: replace each TO_COME with a token,
        commit full blocks (whose K and V only exist now), and complete the requests that got their
        last token. Return these requests.

        `tokens` may contain, for each request:

            as many tokens as were sampled   the usual case
            fewer                            a guess was wrong, or a stage refused a token: the
                                             request is rolled back to the last token it got
            an empty list                    a stage refused the first token
            no entry                         the request has ended or been rolled back since the
                                             launch. With overlap, for example, a stop token arrives
                                             while the next token is already being computed
        """
        S = self.block_size
        guesses = plan.guesses
        self.committed = []
        finished = []
        for request, n in plan.chunks:
            if request.row is None:  # preempted since the launch
                continue
            is_last = request in plan.prefilled
            request.num_computed_slots += n - is_last  # the last slot is counted in the next loop
            self.commit(request)
        for request, new in tokens.items():
            num_new = len(new)
            if guesses or num_new != 1:
                self._take(request, new, plan.num_sampled(request))
            else:
                request.generated_tokens[-request.num_to_come] = new[0]
                request.num_to_come -= 1
            if request.row is not None:
                request.num_computed_slots = computed = request.num_computed_slots + num_new
                if num_new > 1 or computed % S == 0:
                    self.commit(request)
            if num_new and new[-1] in request.stop_token_ids:
                request.finish_reason = "stop"
                finished.append(request)
            elif request.status == "finishing" and not request.num_to_come:
                request.finish_reason = "length"
                finished.append(request)
        for request in finished:
            self.complete(request)
        return finished

    def _take(self, request: Request, new: list[int], n: int):
        """
        Replace a request's first n TO_COME with the tokens in `new`. If `new` has fewer than n
        tokens, roll the request back: drop all its remaining TO_COME, including those from a later
        step, and free the slots and blocks after the last known token. That token then becomes the
        next input again.
        """
        start = request.num_known
        request.generated_tokens[start : start + n] = new
        request.num_to_come -= n
        if len(new) == n:
            return
        del request.generated_tokens[request.num_known :]
        request.num_to_come = 0
        if request.row is None:
            return
        request.num_filled_slots = request.num_tokens - 1
        self.shorten(request, request.num_tokens)
        if request.status == "finishing":
            self.move(request, "active")

    def commit(self, request: Request):
        """Commit the request's full blocks, and add those that are new to `committed`."""
        if self.settings.prefix_cache:
            S = self.block_size
            computed = request.num_computed_slots
            ref_counts = self.block_allocator.ref_counts
            self.committed += commit_blocks(request, self.block_cache, S, computed, ref_counts)
        if self.after_commit:
            self.after_commit(request)

    def promote(self, request: Request):
        """Let a request decode, now that its prompt has been computed."""
        self.move(request, "active")

    def move(self, request: Request, status: str):
        """Change a request's status, and move the request to the list with that name."""
        getattr(self, request.status).remove(request)
        request.status = status
        getattr(self, status).append(request)

    # -- finishing and forking requests ------------------------------------------------------------

    def complete(self, request: Request):
        """
        End a request in any state (including to abort it): free its blocks, drop its TO_COME
        placeholders, and commit nothing. The caller sets `finish_reason`.
        """
        self._leave(request)
        request.status = "done"
        del request.generated_tokens[request.num_known :]
        request.num_to_come = 0

    def _leave(self, request: Request):
        """Remove the request from its list, and free its blocks and row."""
        getattr(self, request.status).remove(request)
        request.clear_cache(self.block_allocator)
        if request.row is not None:
            self.free_rows.append(request.row)
            request.row = None

    def fork(self, parent: Request, id: int | str, **changes) -> Request:
        """
        Return a new request that continues an active request's current text separately. Parent and
        child share all blocks, and the first to write to the last, partial block copies that block.
        `changes` are the fields in which the child differs. Raises ValueError if the parent is not
        active or its last token is still TO_COME, and RuntimeError if no row is free.
        """
        if parent.status != "active":
            raise ValueError(
                f"request {parent.id} is {parent.status}: only an active request can be forked"
            )
        if parent.num_to_come and "generated_tokens" not in changes:
            raise ValueError(
                f"request {parent.id} has a token to come: fork it after that token is known"
            )
        if not self.free_rows:
            raise RuntimeError(
                f"cannot fork {parent.id}: wanted 1 row, available 0 of {self.max_num_seqs}"
            )
        for name in ("generated_tokens", "block_table", "block_keys"):
            changes.setdefault(name, list(getattr(parent, name)))
        changes["row"] = self.free_rows.pop()
        child = replace(parent, id=id, num_to_come=0, **changes)
        child.num_computed_slots = child.num_filled_slots
        self.num_added += 1
        child.arrival_number = self.num_added
        self.block_allocator.share(child.block_table)
        self.active.append(child)
        self.num_forks += 1
        return child

    # -- the invariants ----------------------------------------------------------------------------

    def check(self, plan: Plan | None = None):
        """
        Raise AssertionError, with the numbers, if blocks, requests or `plan` violate an invariant.
        Tests call this method after each step, as does an engine with --check.
        """
        self._check_blocks()
        self._check_cache()
        for status in ("waiting", "prefilling", "active", "finishing", "paused"):
            for r in getattr(self, status):
                assert r.status == status, f"{r.id} is {r.status} but on the {status} list"
                self._check_request(r)
        rows = sorted(self.free_rows + [r.row for r in self.running])
        assert rows == list(range(self.max_num_seqs)), f"rows lost or shared: {rows}"
        if plan is not None:
            self.check_plan(plan)

    def _check_blocks(self):
        """Check that each block is in exactly one state, and that reference counts are right."""
        allocator = self.block_allocator
        found = Counter(block for request in self.running for block in request.block_table)
        counted = {block: n for block, n in enumerate(allocator.ref_counts) if n != 0}
        assert found == counted, f"block tables hold {found}, reference counts say {counted}"
        everything = sorted([*found, *allocator.free, *allocator.idle])
        assert everything == list(range(allocator.num_blocks)), (
            f"{len(found)} referenced + {len(allocator.free)} free + {len(allocator.idle)} "
            f"cached and idle blocks are not the pool's {allocator.num_blocks}, once each"
        )

    def _check_cache(self):
        """Check that keys match the committed blocks, and that unreferenced blocks are idle."""
        allocator = self.block_allocator
        cache = self.block_cache
        if cache.contents != self.checked:  # hash each block's tokens only once, not in every step
            keys = {content.key: block for block, content in cache.contents.items()}
            assert keys == cache.block_of, f"keys lead to {cache.block_of}, wanted {keys}"
            for block, content in cache.contents.items() - self.checked.items():
                assert content.key == block_key(content.parent, content.tokens), (
                    f"the key of block {block} is not the hash of its parent and tokens"
                )
            self.checked = dict(cache.contents)
        unused = {block for block in cache.contents if allocator.ref_counts[block] == 0}
        assert unused == allocator.idle.keys(), (
            f"committed but not in any block table: {unused}, idle: {list(allocator.idle)}"
        )

    def _check_request(self, r: Request):
        """Check a request's row and cursors: committed <= computed <= filled <= allocated."""
        is_waiting = r.status == "waiting"
        assert (r.row is None) == is_waiting == (not r.block_table), f"{r.id}: row without blocks"
        committed = r.num_committed * self.block_size
        allocated = len(r.block_table) * self.block_size
        assert 0 <= committed <= r.num_computed_slots <= r.num_filled_slots <= allocated, (
            f"{r.id}: of {allocated} slots {committed} are committed, {r.num_computed_slots} "
            f"computed, {r.num_filled_slots} filled"
        )
        if r.status in ("active", "paused"):
            assert r.num_filled_slots == r.num_tokens - 1, f"{r.id}: an input is missing"

    def check_plan(self, plan: Plan):
        """
        Check a plan before its step: it stays within the budget, every request advances, and every
        block to be written has exactly one owner and is not committed.
        """
        S = self.block_size
        assert plan.num_tokens <= self.token_budget, (
            f"{plan.num_tokens} tokens planned, budget {self.token_budget}"
        )
        owner: dict[int, Request] = {}
        for request, n in plan.work:
            assert n >= 1, f"{request.id} is scheduled to compute nothing"
            start = request.num_filled_slots
            for block in request.block_table[start // S : (start + n - 1) // S + 1]:
                assert owner.setdefault(block, request) is request, (
                    f"two requests write block {block}"
                )
                assert self.block_allocator.ref_counts[block] == 1, (
                    f"{request.id} writes shared block {block}"
                )
                assert block not in self.block_cache.contents, (
                    f"{request.id} writes committed block {block}"
                )


# --------------------------------------------------------------------------------------------------
# The pool: the only tensors in this file


class KVBlockPool:
    """
    K and V for all blocks and layers, in one tensor: `kv` [L, 2, num_blocks + 1, Hk, S, D]. The
    dimensions are layers, K or V, blocks, KV heads, slots per block, and head size; vLLM calls this
    layout HND. One head of one block is a contiguous slab of S * D numbers. Block `num_blocks` is
    the padding block, which is never allocated. Padding tokens write to it.

    `k_pool[(layer, head)]` and `v_pool[(layer, head)]` are views [num_blocks, S, D] of a single
    head. (In K's slabs, ops/cpu.c stores [D, S] instead.) `n_head` is the number of KV heads.
    `dtype` defaults to torch's default, fp32.
    """

    def __init__(
        self, num_blocks, block_size, n_layer, n_head, head_size, device="cpu", dtype=None
    ):
        import torch

        self.padding_block = num_blocks
        shape = (n_layer, 2, num_blocks + 1, n_head, block_size, head_size)
        self.kv = torch.zeros(shape, device=device, dtype=dtype)
        self.k_pool = {}
        self.v_pool = {}
        for layer, (k, v) in enumerate(self.kv[:, :, :num_blocks]):
            for head in range(n_head):
                self.k_pool[layer, head] = k[:, head]
                self.v_pool[layer, head] = v[:, head]

    def copy_blocks(self, targets, sources):
        """
        Copy block sources[i] to block targets[i] for each i, in all layers. The arguments are lists
        or tensors of block ids. All source blocks are read before any target is written.
        """
        self.kv[:, :, targets] = self.kv[:, :, sources]


# --------------------------------------------------------------------------------------------------
# The post's helpers, kept for reading and comparison. Serving does not need them, because the
# scheduler itself extends tables and commits blocks, and no batch has to be assembled. These names
# in this file are from the post:
#
#   used in serving:   add_request, _maybe_admit, promote, complete, allocate_one, clear_cache,
#                      free_blocks_for_request, is_fully_prefilled, find_cached_prefix
#   for reading only:  schedule, maybe_allocate_block, commit_completed_blocks, write_kv_to_pool,
#                      gather_kv_from_pool, num_tokens_in_cache, tokens_so_far
#
# examples/post.py has the post's other names and its loop, and says what replaces each name here.
#
# Where are K and V written? In every layer, Attention.forward (model.py) calls project_qkv, which
# writes K and V to the pool at the batch's slot_mapping.
# Does the attention head change? Yes. It now writes to the pool and reads through the block tables,
# while the post gathers K and V before the model runs and writes them afterwards. Weights and
# arithmetic stay the same.
# What replaces assemble_fused_batch? A kernels.Batch, which has all new tokens on one flat axis
# without padding. For a simple way to build one, see flat_batch in interleaved.py.


def maybe_allocate_block(request: Request, block_allocator: BlockAllocator, block_size: int):
    """
    Append a block to the request's table if the next token does not have a slot yet. Raises
    RuntimeError if the pool is exhausted.
    """
    if request.num_filled_slots == len(request.block_table) * block_size:
        request.block_table.append(block_allocator.allocate_one())


def commit_completed_blocks(request: Request, block_cache: BlockCache, block_size: int, pool=None):
    """
    Add all of the request's full blocks, from both prompt and answer, to the prefix cache. The
    blocks stay where they are, so nothing is copied. `pool` is the post's parameter, and is unused.
    """
    commit_blocks(request, block_cache, block_size, request.num_filled_slots)


def write_kv_to_pool(pool, block_table, block_size, start_pos, k_new, v_new, layer, head):
    """Write one head's k_new, v_new (1, T, D) to a request's slots, from position start_pos on."""
    for i in range(k_new.shape[1]):
        position = start_pos + i
        block = block_table[position // block_size]
        offset = position % block_size
        pool.k_pool[layer, head][block, offset] = k_new[0, i]
        pool.v_pool[layer, head][block, offset] = v_new[0, i]


def gather_kv_from_pool(pool, block_table, block_size, num_filled_slots, layer, head):
    """Return copies of one head's K and V for the first n = num_filled_slots tokens: (1, n, D)."""
    k = pool.k_pool[layer, head][block_table].flatten(0, 1)  # [M, S, D] -> [M * S, D]
    v = pool.v_pool[layer, head][block_table].flatten(0, 1)
    return k[None, :num_filled_slots], v[None, :num_filled_slots]
