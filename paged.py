"""
Which request owns which KV block: the allocator, the prefix cache, the scheduler, and the pool that
holds the K and V themselves.

    request.block_table     [logical block] -> physical block
    slot                    physical block * block_size + offset: the K, V of one token

    Scheduler ── owns ──> BlockAllocator ── owns ──> BlockCache
        │ allocates, shares, frees                       ^ which block holds which text
        v                                                │
    Request.block_table ──────── blocks that are full and computed are committed

This is paging as operating systems do it: the K, V of a request lie in blocks anywhere in the pool,
and its block table says where. So blocks can be shared by requests that begin with the same text.

Read top to bottom: blocks, the requests that hold them, the scheduler that decides what each step
computes, the pool, and those helpers of "Adding Paged Attention to NanoGPT" (the post, below) that
serving does without. Only `KVBlockPool` imports torch: policy is plain Python, so thousands of
scheduling trials take a second. `Scheduler.check` has the invariants; `python test_paged.py` shows
all of it at work.
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
    """A committed block's content: the K, V of `tokens` after the prefix with the key `parent`."""

    key: bytes
    parent: bytes
    tokens: tuple[int, ...]


def root_key(salt: str = "") -> bytes:
    """The parent key of every first block. Requests with different salts share no block."""
    return sha256(salt.encode("utf-8", "surrogatepass")).digest()


def block_key(parent: bytes, tokens) -> bytes:
    """
    sha256 over the key of the block before and this block's tokens: a hash chain, so a key stands
    for all of the text up to the block's end.
    """
    return sha256(parent + array("q", tokens).tobytes()).digest()


class BlockCache:
    """The prefix cache: from the tokens of a full block, and all before them, to the block."""

    def __init__(self):
        self.block_of: dict[bytes, int] = {}  # key -> physical block
        self.held: dict[int, CachedBlock] = {}  # physical block -> its content

    def lookup(self, content: CachedBlock) -> int | None:
        """The block with this content. The hash finds it, the comparison makes it certain."""
        block = self.block_of.get(content.key)
        return block if self.held.get(block) == content else None

    def insert(self, block: int, content: CachedBlock) -> bool:
        """
        Commit a full block. If another block has this key already, that one stays in the cache;
        this one stays private to its owner, and is free, not idle, once it is given back. Returns
        whether the block has entered the cache.
        """
        is_new = content.key not in self.block_of and block not in self.held
        if is_new:
            self.block_of[content.key] = block
            self.held[block] = content
        return is_new

    def forget(self, block: int):
        """Take out a block that is about to be used for something else."""
        content = self.held.pop(block)
        del self.block_of[content.key]


class BlockAllocator:
    """
    Hands out blocks 0..num_blocks-1 and takes them back, each in O(1). A block is in exactly one of
    three states:

              allocate               last reference freed, block committed
        free ──────────> referenced ──────────────────────────────────────────> idle, cached
          ^               │      ^                                                 │
          └───────────────┘      └─────────────────────────────────────────────────┘
          last reference freed,  prefix hit; or evicted, the least recently used first
          block not committed    (LRU), when an allocation finds no free block

    >>> allocator = BlockAllocator(num_blocks=3)
    >>> table = allocator.allocate_n(2); table
    [0, 1]
    >>> allocator.free_blocks_for_request(table); allocator.num_free
    3
    """

    def __init__(self, num_blocks: int, block_size: int = 4):
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.ref_counts = [0] * num_blocks  # how many block tables hold each block
        # in no table and not committed; a stack: the block freed last is handed out next
        self.free = list(reversed(range(num_blocks)))
        # in no table, but committed; the least recently used first, each with its number among all
        # that have become idle so far
        self.idle: OrderedDict[int, int] = OrderedDict()
        self.num_idled = 0
        self.block_cache = BlockCache()
        self.evicted: list[int] = []  # the last plan's: blocks that are evicted for it

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now: free, or cached and idle."""
        return len(self.free) + len(self.idle)

    def allocate_one(self) -> int:
        """One block for one owner. Raises RuntimeError when every block is referenced."""
        return self.allocate_n(1)[0]

    def allocate_n(self, n: int) -> list[int]:
        """n blocks or, with RuntimeError, none: nothing is lost by asking."""
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
        Take the least recently used idle block out of the prefix cache, for another use, and note
        it in `evicted`.
        """
        block, _ = self.idle.popitem(last=False)
        self.block_cache.forget(block)
        self.evicted.append(block)
        return block

    def share(self, blocks: list[int]):
        """One more block table holds these blocks: a fork of a running request, or a prefix hit."""
        for block in blocks:
            if self.ref_counts[block] == 0:
                del self.idle[block]
            self.ref_counts[block] += 1

    def free_blocks_for_request(self, block_table: list[int]):
        """
        Take one reference off each block; the table itself stays as it is. Free the tail first, so
        that it is evicted first: a lookup starts at the head, so a tail without its head could
        never be found. Raises ValueError for a block without a reference.
        """
        for block in reversed(block_table):
            if self.ref_counts[block] < 1:
                raise ValueError(f"block {block} is freed twice: no block table holds it")
            self.ref_counts[block] -= 1
            if self.ref_counts[block] > 0:
                continue  # another table holds it
            if block in self.block_cache.held:
                self.num_idled += 1
                self.idle[block] = self.num_idled
            else:
                self.free.append(block)


# --------------------------------------------------------------------------------------------------
# Requests


# Placeholder in `generated_tokens` for a token that a running step will sample. The token stays on
# the device, where the next step reads it. The host appends this, so the text's length is right,
# and lengths are all that planning needs.
TO_COME = None


@dataclass(slots=True, eq=False)
class Request:
    """
    One text being continued. The K, V of all its tokens but the last are in the blocks of
    `block_table`; the last token is the input of its next step.

        waiting ── admitted ──> prefilling ── prompt computed ──> active ── stop or length ──> done
           ^                        │                               │
           └───── preempted ────────┴───────────────────────────────┘

    Between active and done it is `ending` while its last token is on its way, and `held` while a
    stage of the engine makes it sit out (engine/grammar.py: until a mask is computed).

    Cursors over its positions; each is at most the next. Example, between two steps: blocks of 4, a
    prompt of 6 tokens, 4 tokens of the answer known.

        position        0  1  2  3    4  5  6  7    8  9 10 11
        block         [      7    ] [      2    ] [      9    ]
        committed  8   ────────────────────────>                 num_committed, in blocks
        filled     9   ─────────────────────────────>            num_filled_slots: K, V in the pool
        allocated 12   ──────────────────────────────────────>   len(block_table), in blocks

    The last of its 10 tokens, at position 9, is the next step's input: that step writes its K, V.
    With overlap it is under way already, and the text has 11 tokens, of which the last is TO_COME.
    Then `filled` counts the slots that it writes, and one more cursor those that are there:

        computed   9   ─────────────────────────────>            num_computed_slots: K, V exist
        filled    10   ────────────────────────────────>         num_filled_slots: or under way
    """

    # the post's eight
    id: int | str
    prompt_tokens: list[int]
    max_new_tokens: int
    generated_tokens: list[int | None] = field(default_factory=list)
    status: str = "waiting"
    prefill_cursor: int = 0  # of the prefill target, tokens that are computed or were found cached
    block_table: list[int] = field(default_factory=list)
    num_filled_slots: int = 0  # tokens whose K, V are in the pool after the steps started so far

    # what overlap, sampling and sharing add: first what the caller may set
    arrival_time: float = 0.0  # in seconds; to policy fcfs the unit does not matter
    priority: int = 0  # lower is served first
    cache_salt: str = ""  # prefixes are shared only between requests of one salt
    # score the prompt's tokens, and with each this many of the likeliest; None: do not
    prompt_logprobs: int | None = None

    # then the scheduler's books
    row: int | None = None  # its place in the engine's device arrays while it runs
    arrival_number: int = 0  # breaks ties of arrival_time
    # tokens to compute before sampling: the prompt; after a preemption also what was generated
    prefill_target: int = 0
    num_hit_tokens: int = 0  # of the prompt, found in the prefix cache when it was first admitted
    num_preemptions: int = 0
    num_to_come: int = 0  # tokens at the end of generated_tokens that are TO_COME
    num_computed_slots: int = 0  # of the filled slots, those whose step has ended: K, V exist
    # leading full blocks that `commit_blocks` is done with: most are in the prefix cache
    num_committed: int = 0
    block_keys: list[bytes] = field(default_factory=list)  # root key, then those of full blocks
    finish_reason: str | None = None  # stop, length, abort or error, once done
    # tokens that end its answer; the engine's requests have their own (engine/step.py)
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
        """The post's name: its cache is the pool, not the prefix cache."""
        return self.num_filled_slots

    @property
    def num_generated(self) -> int:
        return len(self.generated_tokens)

    @property
    def num_known(self) -> int:
        """Tokens of the answer that are not TO_COME."""
        return len(self.generated_tokens) - self.num_to_come

    @property
    def is_done(self) -> bool:
        return self.status == "done" or self.num_generated >= self.max_new_tokens

    @property
    def is_fully_prefilled(self) -> bool:
        return self.prefill_cursor >= self.prefill_target

    def tokens_between(self, start: int, end: int) -> list[int | None]:
        """Tokens start..end-1 of prompt and answer, TO_COME included, without copying the rest."""
        P = len(self.prompt_tokens)
        generated = self.generated_tokens[max(start - P, 0) : max(end - P, 0)]
        return self.prompt_tokens[start:end] + generated

    def content_of(self, index: int, block_size: int) -> CachedBlock:
        """
        The content of logical block `index`, up to whose end all tokens must be known. Its key,
        which is made once, follows from that of the block before: call it for that one first.
        """
        keys = self.block_keys
        tokens = tuple(self.tokens_between(index * block_size, (index + 1) * block_size))
        if index == len(keys) - 1:
            keys.append(block_key(keys[index], tokens))
        return CachedBlock(keys[index + 1], keys[index], tokens)

    def clear_cache(self, block_allocator: BlockAllocator):
        """Give the blocks back and forget what was computed; the tokens stay."""
        block_allocator.free_blocks_for_request(self.block_table)
        self.block_table = []
        self.prefill_cursor = 0
        self.num_filled_slots = 0
        self.num_computed_slots = 0
        self.num_committed = 0


def find_cached_prefix(request: Request, block_cache: BlockCache, block_size: int) -> list[int]:
    """
    The physical blocks of the longest cached prefix, not referenced yet. The block with the last
    token is never a hit: we need that token's logits, hits are whole blocks, and shared blocks are
    read-only. Of 8 tokens in blocks of 4, all in the cache, (8 - 1) // 4 = 1 block is a hit; 4
    tokens are computed again, into a block of the request's own.
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
    Enter the full blocks among the request's first num_slots slots, whose K, V exist, into the
    prefix cache, and count them in `num_committed`. Returns the blocks that are new there. With
    `ref_counts`, a block with other owners is skipped for good: a fork may still write into it (the
    last owner writes without copying), so its content is not final. How a full block can be shared
    and not final, by n = 2 choices of a prompt of P = 3 tokens, with blocks of 4 and overlap:

        block 5    references
        p p p -    1    step 1 has computed the prompt; step 2 is under way, with its first token, a
        p p p -    2    step 1 is known: choice b is forked at P - 1 slots, to compute the last p
                        again, whose logits give b a first token of its own
        p p p a    2    step 2 is known: the block is full, and skipped
        p p p a    1    the first choice has stopped, before it was b's turn to decode
        p p p b    1    b, now its only owner, writes in place: found by "p p p a", it would lie

    >>> cache, first = BlockCache(), Request("first", [1, 2, 3], 9, generated_tokens=[50])
    >>> first.block_table = [5]
    >>> commit_blocks(first, cache, 4, num_slots=4, ref_counts=[0, 0, 0, 0, 0, 2])
    []
    >>> first.num_committed, cache.held
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
# In which order requests are served
#
# Sort key: arrival time plus a bounded delay, for low priority or great length. Because the delay
# is bounded, every request reaches the front: no starvation. A key never changes, so the queue
# stays sorted, also after a preemption (which does not make a job shorter: all of its tokens are
# computed again).

PRIORITY_AGEING = 240.0  # seconds, as arrival times; no priority counts for more
SJF_AGEING = 0.05  # seconds a token: a request 1,000 tokens longer is overtaken for 50 seconds


def priority_delay(r: Request) -> float:
    """
    Seconds that a priority counts against a request: 60 for 1, 96 for 2, 185 for 10, -60 for -1,
    and less than PRIORITY_AGEING for any. So a request waits at most for those that come within 2 *
    PRIORITY_AGEING seconds after it, whatever their priority.
    """
    return PRIORITY_AGEING * (r.priority / (abs(r.priority) + 3))


def length_delay(r: Request) -> float:
    """Shortest job first."""
    return SJF_AGEING * (len(r.prompt_tokens) + r.max_new_tokens)


POLICIES = {"fcfs": lambda r: 0.0, "priority": priority_delay, "sjf": length_delay}


# --------------------------------------------------------------------------------------------------
# The scheduler


@dataclass(slots=True)
class Plan:
    """
    The work of one step: which requests compute how many tokens. Once the step is launched, nothing
    in it changes any more.
    """

    decodes: list[Request] = field(default_factory=list)  # one token each, and their guesses
    # of decodes: tokens that are guessed to follow the last one, and checked by this step
    guesses: dict[Request, list[int]] = field(default_factory=dict)
    chunks: list[tuple[Request, int]] = field(default_factory=list)  # and its prefill tokens
    completed: list[Request] = field(default_factory=list)  # whose prefill a chunk completes
    # copy-on-write: new block -> the block it is a copy of, made before the step writes
    copies: dict[int, int] = field(default_factory=dict)
    admitted: list[Request] = field(default_factory=list)  # got a row and a block table
    preempted: list[Request] = field(default_factory=list)  # gave theirs back, and wait again
    grown: list[Request] = field(default_factory=list)  # tables changed for their next token
    evicted: list[int] = field(default_factory=list)  # blocks taken out of the prefix cache

    @property
    def sampled(self) -> list[Request]:
        """The requests that get a token, or with guesses several."""
        return self.decodes + self.completed

    def num_sampled(self, request: Request) -> int:
        """The tokens sampled for one of these: one after its last token and after each guess."""
        return 1 + len(self.guesses.get(request, ()))

    @property
    def work(self) -> list[tuple[Request, int]]:
        """Each request that takes part, and how many of its tokens are computed."""
        return [(r, self.num_sampled(r)) for r in self.decodes] + self.chunks

    @property
    def num_tokens(self) -> int:
        return sum(n for _, n in self.work)


def setting(default, help: str, **more):
    """
    A field with its default and its meaning, of which flags.py makes a flag. `more` may have
    `least`, `choices` and, where the flag has another name, `flag`.
    """
    return field(default=default, metadata={"help": help, **more})


@dataclass(frozen=True)
class SchedulerSettings:
    """
    The scheduler's settings besides the post's four arguments. Raises ValueError for a value out of
    range.
    """

    max_num_seqs: int = setting(256, "requests running at once; each owns a row", least=1)
    watermark: float = 0.0  # share of the blocks that admissions leave to running requests
    prefill_share: float = setting(0.25, "share of the token budget that is kept for prompts")
    # prompts with even shares of a step; later ones get what is left over
    max_num_partial_prefills: int = 4
    max_long_partial_prefills: int = 1  # long prompts among these; further long ones come last
    long_prefill_threshold: int = 512  # tokens above which a prompt is long
    # the help text is that of the flag, which turns it off
    prefix_cache: bool = setting(
        True, "compute each prompt from its first token", flag="--no-prefix-cache"
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
    Decides what each step computes for which request, and owns every block. One step:

        plan = scheduler.plan()           # admit, allocate, preempt; which requests compute what
        ...                               # compute it, sample one token for each of plan.sampled
        scheduler.update(plan, tokens)    # append them, commit full blocks, free what finished

    The default sizes are the post's; `Engine` chooses its own.
    """

    def __init__(
        self,
        policy: str = "fcfs",
        token_budget: int = 16,  # tokens computed in one step, decodes and prefill chunks together
        max_kv_tokens: int = 256,  # size of the pool, in tokens
        block_size: int = 4,
        *,
        settings: SchedulerSettings | None = None,
    ):
        settings = settings or SchedulerSettings()
        num_blocks = max_kv_tokens // block_size
        if policy not in POLICIES:
            raise ValueError(f"unknown policy {policy!r}: there is {', '.join(POLICIES)}")
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
        self.watermark = int(settings.watermark * num_blocks)  # in blocks
        self.prefill_tokens = max(1, int(token_budget * settings.prefill_share))
        self.block_allocator = BlockAllocator(num_blocks, block_size)
        self.max_num_seqs = settings.max_num_seqs
        self.free_rows = list(reversed(range(self.max_num_seqs)))
        # each request is on the list that its status names
        self.waiting: list[Request] = []  # sorted by queue_key
        self.prefilling: list[Request] = []  # in order of admission
        self.active: list[Request] = []  # decoding
        self.ending: list[Request] = []  # their last token is on its way
        self.held: list[Request] = []  # sit out until a stage moves them back to `active`
        # called with each request whose computed slots have been committed: it may give back blocks
        # that the request no longer needs (engine/window.py)
        self.after_commit: Callable[[Request], None] | None = None
        # for metrics and traces
        self.num_added = 0
        self.num_preemptions = 0
        self.num_copies = 0
        self.num_forks = 0
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0
        self.peak_blocks = 0
        # where the first in the queue was not admitted: (blocks it needs, blocks spare)
        self.admission_shortfall: tuple[int, int] | None = None
        self.committed: list[int] = []  # blocks that the last `resolve` put into the prefix cache
        self.checked: dict[int, CachedBlock] = {}  # blocks whose key `check` has found right

    @property
    def block_cache(self) -> BlockCache:
        return self.block_allocator.block_cache

    @property
    def running(self) -> list[Request]:
        return self.active + self.prefilling + self.ending + self.held

    def is_done(self) -> bool:
        return not self.waiting and not self.running

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    # -- requests in: queue, admit -----------------------------------------------------------------

    def add_request(self, request: Request):
        """
        Queue a request that has its arrival time. Raises ValueError for an empty prompt, and for
        one that the whole pool cannot hold.
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
        """The smallest is served first."""
        return request.arrival_time + self.delay(request), request.arrival_number

    def _enqueue(self, request: Request):
        request.status = "waiting"
        insort(self.waiting, request, key=self.queue_key)

    def _maybe_admit(self, step: int = 0) -> list[Request]:
        """
        Admit from the head of the queue while rows and blocks (the watermark apart) are free.
        Returns the admitted. The first that does not fit waits, and so do all after it, or smaller
        ones could overtake it for ever. `step` is the post's parameter, not needed.
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
        Give a waiting request a row and the blocks for all its tokens, those of a cached prefix
        shared; it is prefilling then. Returns False, with nothing changed, if there is no room.
        """
        # a request that was preempted with a token to come cannot be computed before it is known
        if not self.free_rows or request.num_to_come:
            return False
        allocator = self.block_allocator
        num_tokens = request.num_tokens
        hits = []
        # to score a prompt takes the logits of all its tokens, so all are computed
        if self.settings.prefix_cache and request.prompt_logprobs is None:
            hits = find_cached_prefix(request, self.block_cache, self.block_size)
        num_hit_tokens = len(hits) * self.block_size
        needed = self.blocks_for(num_tokens) - len(hits)
        # an idle hit counts as free, but is about to be referenced
        spare = allocator.num_free - len(allocator.idle.keys() & hits)
        # with no other request to grow, one may take the whole pool
        reserve = self.watermark if self.active or self.prefilling else 0
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

    # -- before a step: plan it --------------------------------------------------------------------

    def plan(self, step: int = 0) -> Plan:
        """
        Decide one step: every active request decodes one token (they take turns if there are more
        than the budget), and prefill chunks get the rest of the budget. Allocates the blocks that
        the step writes. Raises RuntimeError if a request that is alone in the pool cannot grow.
        """
        plan = Plan()
        self.block_allocator.evicted = plan.evicted
        self.admission_shortfall = None
        self._plan_decodes(plan)
        if not plan.preempted:  # a victim does not come back in the same step
            plan.admitted = self._maybe_admit(step)
        if self.prefilling:
            self._plan_chunks(plan)
        allocator = self.block_allocator
        self.peak_blocks = max(self.peak_blocks, allocator.num_blocks - allocator.num_free)
        return plan

    def schedule(self, step: int) -> tuple[Request | None, list[Request]]:
        """The post's view of a plan: the first request with a prefill chunk, and the decodes."""
        plan = self.plan(step)
        prefill = plan.chunks[0][0] if plan.chunks else None
        return prefill, plan.decodes

    def _plan_decodes(self, plan: Plan):
        """Choose the decodes and make room for their tokens; prompts keep their share."""
        limit = self.token_budget
        if self.prefilling:
            limit = max(1, limit - self.prefill_tokens)
        plan.decodes = self.active[:limit]
        if len(self.active) > limit:  # more running than budget: take turns
            self.active = self.active[limit:] + plan.decodes
        S = self.block_size
        ref_counts = self.block_allocator.ref_counts
        # The hot loop. Usually the last block has room, and there is nothing to do. Prompts got
        # their blocks at admission.
        for request in plan.decodes.copy():
            table = request.block_table
            if request.num_filled_slots == len(table) * S or ref_counts[table[-1]] > 1:
                self._make_room(request, plan)
        if plan.preempted:
            plan.decodes = [r for r in plan.decodes if r.status == "active"]
            # all whose turn it was may have been preempted: then the others decode
            if not plan.decodes and self.active and not self.ending:
                self._plan_decodes(plan)

    def _make_room(self, request: Request, plan: Plan):
        """
        Give a request a slot of its own for its next token: a new block if the last one is full, a
        copy if it is shared. While no block is free, preempt and look again: by then the last block
        may no longer be shared, or the request itself may have been preempted. If ending requests
        are about to give blocks back, the request leaves plan.decodes instead.
        """
        allocator = self.block_allocator
        while request.row is not None:
            table = request.block_table
            is_full = request.num_filled_slots == len(table) * self.block_size
            if not is_full and allocator.ref_counts[table[-1]] == 1:
                return
            if allocator.num_free:
                plan.grown.append(request)
                block = allocator.allocate_one()
                if is_full:
                    table.append(block)
                else:  # copy-on-write: the fork's siblings keep the old block
                    plan.copies[block] = table[-1]
                    allocator.free_blocks_for_request(table[-1:])
                    table[-1] = block
                    self.num_copies += 1
            elif self.ending:  # blocks are about to come back
                plan.decodes.remove(request)
                return
            else:
                plan.preempted.append(self._preempt_for(request))

    def _preempt_for(self, request: Request) -> Request:
        """
        Preemption by recomputation: of the running requests the last in the queue's order, maybe
        `request` itself, gives back its blocks and goes back to the queue. Returns it. In any other
        order the first in line could be preempted for newcomers again and again, and starve.
        """
        running = self.running
        if len(running) == 1:
            num_blocks = self.block_allocator.num_blocks
            raise RuntimeError(
                f"request {request.id} cannot grow: it is alone in the pool and holds "
                f"{num_blocks} of {num_blocks} blocks for "
                f"{request.num_filled_slots} tokens, wanted 1 more; make the pool larger "
                "(max_kv_tokens, --kv-blocks) or max_new_tokens smaller"
            )
        victim = max(running, key=self.queue_key)
        self._leave(victim)
        victim.num_preemptions += 1
        self.num_preemptions += 1
        self._enqueue(victim)
        return victim

    def _plan_chunks(self, plan: Plan):
        """
        Split what is left of the budget among the prompts (chunked prefill): the first
        `max_num_partial_prefills` get even shares, the others what those leave over. Long prompts
        but the first `max_long_partial_prefills` come last, among the others. Shares are rounded
        up: 9 tokens for two prompts are 5 and 4. The prompt admitted first always has a share, so
        none waits for ever.
        """
        limits = self.settings
        threshold = limits.long_prefill_threshold
        long = [r for r in self.prefilling if r.prefill_target - r.num_hit_tokens > threshold]
        last = set(long[limits.max_long_partial_prefills :])
        # a sort is stable, so the others stay in the order of their admission
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
                plan.completed.append(request)
            left -= n

    def extend(self, request: Request, n: int) -> int:
        """
        Lengthen a block table for the next n tokens, as far as blocks are free (the watermark
        apart). Returns how many it has room for.
        """
        allocator = self.block_allocator
        table = request.block_table
        start = request.num_filled_slots
        missing = self.blocks_for(start + n) - len(table)
        table += allocator.allocate_n(max(0, min(missing, allocator.num_free - self.watermark)))
        return min(n, len(table) * self.block_size - start)

    def shorten(self, request: Request, num_tokens: int):
        """Give back the blocks at the end of a table that num_tokens tokens do not need."""
        end = self.blocks_for(num_tokens)
        self.block_allocator.free_blocks_for_request(request.block_table[end:])
        del request.block_table[end:]

    # -- after a step: take in what it computed ----------------------------------------------------

    def update(self, plan: Plan, tokens: list[int]) -> list[Request]:
        """
        Take in what the step computed: `tokens[i]` was sampled for `plan.sampled[i]`. Returns the
        requests that finished, their blocks freed. In two halves, `advance` and `resolve`, so that
        an engine can plan a step while the one before still runs.
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
        Call it once the step has been started: counts its slots as filled, promotes requests whose
        prompt it completes, and appends TO_COME for each token that it will sample.
        """
        for request, n in plan.chunks:
            request.prefill_cursor += n
            request.num_filled_slots += n - (request in plan.completed)  # the last one: see below
            if request.is_fully_prefilled:
                self.promote(request)
        for request, guesses in plan.guesses.items():
            request.num_filled_slots += len(guesses)
            request.num_to_come += len(guesses)
            request.generated_tokens += [TO_COME] * len(guesses)
        for request in plan.sampled:  # the hot loop
            request.num_filled_slots += 1
            request.num_to_come += 1
            request.generated_tokens.append(TO_COME)
            if len(request.generated_tokens) >= request.max_new_tokens:
                self.move(request, "ending")

    def resolve(self, plan: Plan, tokens: dict[Request, list[int]]) -> list[Request]:
        """
        Call it once the step is done. Puts its tokens in their places, commits full blocks (their
        K, V exist only now), and ends the requests that got their last token; returns those.

        A request with fewer tokens than were sampled goes back to the last of them: a guess was
        wrong, or a stage refused a token. A request that is left out gets none, because it has
        ended or gone back since the step was launched. For example, with overlap a request that a
        stop token ends has one more token under way.
        """
        S = self.block_size
        guesses = plan.guesses
        self.committed = []
        finished = []
        for request, n in plan.chunks:
            if request.row is None:  # preempted since
                continue
            is_last = request in plan.completed
            request.num_computed_slots += n - is_last  # the last slot counts with its token, below
            self.commit(request)
        for request, new in tokens.items():  # the hot loop
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
            elif request.status == "ending" and not request.num_to_come:
                request.finish_reason = "length"
                finished.append(request)
        for request in finished:
            self.complete(request)
        return finished

    def _take(self, request: Request, new: list[int], n: int):
        """
        Put these tokens in the places of the n that were sampled. With fewer the request goes back:
        drop all tokens to come, also those of a later step, and the slots and blocks after the last
        known token, which is the request's next input again.
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
        if request.status == "ending":  # not any more
            self.move(request, "active")

    def commit(self, request: Request):
        """Commit the request's full blocks, and note those that are new in the prefix cache."""
        if self.settings.prefix_cache:
            S = self.block_size
            computed = request.num_computed_slots
            ref_counts = self.block_allocator.ref_counts
            self.committed += commit_blocks(request, self.block_cache, S, computed, ref_counts)
        if self.after_commit:
            self.after_commit(request)

    def promote(self, request: Request):
        """Move a request whose prompt is computed: from now on it decodes."""
        self.move(request, "active")

    def move(self, request: Request, status: str):
        """Move a request from the list of its status to that of another."""
        getattr(self, request.status).remove(request)
        request.status = status
        getattr(self, status).append(request)

    # -- requests out, and forks -------------------------------------------------------------------

    def complete(self, request: Request):
        """
        End a request in whatever state, an aborted one too: free its blocks, commit nothing, drop
        tokens to come. Its `finish_reason` is the caller's to set.
        """
        self._leave(request)
        request.status = "done"
        del request.generated_tokens[request.num_known :]
        request.num_to_come = 0

    def _leave(self, request: Request):
        """Take the request off its list and give back its blocks and its row."""
        getattr(self, request.status).remove(request)
        request.clear_cache(self.block_allocator)
        if request.row is not None:
            self.free_rows.append(request.row)
            request.row = None

    def fork(self, parent: Request, id: int | str, **changes) -> Request:
        """
        A second continuation of an active request, from where it stands: all blocks are shared, and
        the first to write to the last, partial one copies it. `changes` are fields in which the
        child differs. Raises ValueError for a parent that is not active or whose last token is not
        known, RuntimeError where no row is free.
        """
        if parent.status != "active":
            raise ValueError(
                f"request {parent.id} is {parent.status}: only an active request can be forked"
            )
        if parent.num_to_come and "generated_tokens" not in changes:
            raise ValueError(f"request {parent.id} has a token to come: fork it once that is known")
        if not self.free_rows:
            raise RuntimeError(
                f"no room to fork {parent.id}: wanted 1 row, available 0 of {self.max_num_seqs}"
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
        Raise AssertionError, with the numbers, where an invariant of blocks, requests or `plan`
        does not hold. After each step in tests, and with --check.
        """
        self._check_blocks()
        self._check_cache()
        for status in ("waiting", "prefilling", "active", "ending", "held"):
            for r in getattr(self, status):
                assert r.status == status, f"{r.id} is {r.status} but on the {status} list"
                self._check_request(r)
        rows = sorted(self.free_rows + [r.row for r in self.running])
        assert rows == list(range(self.max_num_seqs)), f"rows lost or shared: {rows}"
        if plan is not None:
            self.check_plan(plan)

    def _check_blocks(self):
        """Each block is free, referenced or idle, and referenced by as many tables as it counts."""
        allocator = self.block_allocator
        held = Counter(block for request in self.running for block in request.block_table)
        counted = {block: n for block, n in enumerate(allocator.ref_counts) if n != 0}
        assert held == counted, f"block tables hold {held}, reference counts say {counted}"
        everything = sorted([*held, *allocator.free, *allocator.idle])
        assert everything == list(range(allocator.num_blocks)), (
            f"{len(held)} referenced + {len(allocator.free)} free + {len(allocator.idle)} "
            f"cached and idle blocks are not the {allocator.num_blocks} of the pool, each once"
        )

    def _check_cache(self):
        """Committed blocks are found by their keys, which are those of their content."""
        allocator = self.block_allocator
        cache = self.block_cache
        if cache.held != self.checked:  # a block's tokens are hashed once, not in every step
            keys = {content.key: block for block, content in cache.held.items()}
            assert keys == cache.block_of, f"keys lead to {cache.block_of}, held are {keys}"
            for block, content in cache.held.items() - self.checked.items():
                assert content.key == block_key(content.parent, content.tokens), (
                    f"the key of block {block} is not of its parent and tokens"
                )
            self.checked = dict(cache.held)
        unused = {block for block in cache.held if allocator.ref_counts[block] == 0}
        assert unused == allocator.idle.keys(), (
            f"committed and in no block table are {unused}, idle {list(allocator.idle)}"
        )

    def _check_request(self, r: Request):
        """Committed <= computed <= filled slots <= slots of its blocks; a row while it runs."""
        is_waiting = r.status == "waiting"
        assert (r.row is None) == is_waiting == (not r.block_table), f"{r.id}: row without blocks"
        committed = r.num_committed * self.block_size
        room = len(r.block_table) * self.block_size
        assert 0 <= committed <= r.num_computed_slots <= r.num_filled_slots <= room, (
            f"{r.id}: of {room} slots {committed} are committed, {r.num_computed_slots} computed, "
            f"{r.num_filled_slots} filled"
        )
        if r.status in ("active", "held"):
            assert r.num_filled_slots == r.num_tokens - 1, f"{r.id}: an input is missing"

    def check_plan(self, plan: Plan):
        """
        After `plan`, before `update`: within budget, every request advances, and every written
        block has one owner.
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
                assert block not in self.block_cache.held, (
                    f"{request.id} writes committed block {block}"
                )


# --------------------------------------------------------------------------------------------------
# The pool: the only tensors in this file


class KVBlockPool:
    """
    The K, V of all blocks of all layers in one tensor, `kv` [L, 2, num_blocks + 1, Hk, S, D]:
    layers, K or V, blocks, KV heads, slots of a block, head size. One head of one block is a
    contiguous slab of S * D numbers. Block `num_blocks` is the sink: never allocated, padding
    writes there. `k_pool[(layer, head)]` and `v_pool[(layer, head)]` are views [num_blocks, S, D]
    of one head; ops/cpu.c keeps K in its slabs the other way round, as [D, S]. `n_head` counts KV
    heads; without `dtype` the numbers are torch's default, fp32.
    """

    def __init__(
        self, num_blocks, block_size, n_layer, n_head, head_size, device="cpu", dtype=None
    ):
        import torch

        self.sink = num_blocks
        shape = (n_layer, 2, num_blocks + 1, n_head, block_size, head_size)
        self.kv = torch.zeros(shape, device=device, dtype=dtype)
        self.k_pool = {}
        self.v_pool = {}
        for layer, (k, v) in enumerate(self.kv[:, :, :num_blocks]):
            for head in range(n_head):
                self.k_pool[layer, head] = k[:, head]
                self.v_pool[layer, head] = v[:, head]

    def copy_blocks(self, to, source):
        """
        Copy block source[i] to block to[i], of all layers; lists or tensors of ids. All blocks are
        read before any is written.
        """
        self.kv[:, :, to] = self.kv[:, :, source]


# --------------------------------------------------------------------------------------------------
# The post's helpers, to be read and compared with. In serving, the scheduler grows tables and
# commits by itself, and there is nothing to assemble. Of the post's names
#
#   serving runs:    add_request, _maybe_admit, promote, complete, allocate_one, clear_cache,
#                    free_blocks_for_request, is_fully_prefilled, find_cached_prefix
#   to be read:      schedule, maybe_allocate_block, commit_completed_blocks, write_kv_to_pool,
#                    gather_kv_from_pool, num_tokens_in_cache, tokens_so_far
#   examples/post.py has the rest and the post's loop, and says what replaces each here.
#
# Where are K and V written? In each layer: project_qkv in model.py's Attention.forward writes them
# into the pool, at the batch's slot_mapping.
# Does the head change? Yes: it writes the pool, and reads it through the block tables. In the post
# K and V are gathered before the model and written after it. Weights and arithmetic are the same.
# What replaces assemble_fused_batch? A kernels.Batch, all new tokens on one flat axis, unpadded:
# flat_batch in interleaved.py makes one to be read.


def maybe_allocate_block(request: Request, block_allocator: BlockAllocator, block_size: int):
    """
    Append a block to the table if the next token has no slot yet. Raises RuntimeError when the pool
    is exhausted.
    """
    if request.num_filled_slots == len(request.block_table) * block_size:
        request.block_table.append(block_allocator.allocate_one())


def commit_completed_blocks(request: Request, block_cache: BlockCache, block_size: int, pool=None):
    """
    Enter every full block of the request into the prefix cache, prompt and generated. Nothing is
    copied, the blocks become findable where they are; `pool` is the post's parameter, not needed.
    """
    commit_blocks(request, block_cache, block_size, request.num_filled_slots)


def write_kv_to_pool(pool, block_table, block_size, start_pos, k_new, v_new, layer, head):
    """Write k_new, v_new (1, T, D) of one head for positions start_pos.. of a request."""
    for i in range(k_new.shape[1]):
        position = start_pos + i
        block = block_table[position // block_size]
        offset = position % block_size
        pool.k_pool[layer, head][block, offset] = k_new[0, i]
        pool.v_pool[layer, head][block, offset] = v_new[0, i]


def gather_kv_from_pool(pool, block_table, block_size, num_filled_slots, layer, head):
    """K and V of the first num_filled_slots tokens of one head: copies (1, num_filled_slots, D)."""
    k = pool.k_pool[layer, head][block_table].flatten(0, 1)  # [M, S, D] -> [M * S, D]
    v = pool.v_pool[layer, head][block_table].flatten(0, 1)
    return k[None, :num_filled_slots], v[None, :num_filled_slots]
