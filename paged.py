"""
Who owns which KV block: the allocator, the prefix cache, the scheduler, and the pool that holds the
K and V themselves.

    request.block_table        [logical block] -> physical block
    slot                       physical block * block_size + offset: where the K, V of one token live

Policy is plain Python without a tensor in sight, so thousands of scheduling trials take a second;
only `KVBlockPool` and its two helpers import torch. Read top to bottom: a block, then the requests
that hold blocks, then the scheduler that decides each step who computes what, then the pool.
`python test_paged.py` shows all of it at work.
"""

from array import array
from bisect import insort
from collections import OrderedDict
from dataclasses import dataclass, field, fields, replace
from hashlib import sha256
from typing import NamedTuple

# --------------------------------------------------------------------------------------------------
# Blocks and the prefix cache


class CachedBlock(NamedTuple):
    """
    What a committed block holds: the K, V of `tokens` after the prefix that `parent` stands for.
    """

    key: bytes
    parent: bytes
    tokens: tuple[int, ...]


def root_key(salt: str = "") -> bytes:
    """The parent key of every first block: requests of different salts share nothing."""
    return sha256(salt.encode("utf-8", "surrogatepass")).digest()


def block_key(parent: bytes, tokens) -> bytes:
    """
    sha256 over the parent's key and the block's tokens: it stands for the whole prefix up to the
    block's end.
    """
    return sha256(parent + array("q", tokens).tobytes()).digest()


class BlockCache:
    """
    The prefix cache: an index from the tokens of a full block, and all before them, to the block
    with their K, V.
    """

    def __init__(self):
        self.block_of: dict[bytes, int] = {}  # key -> physical block
        self.held: dict[int, CachedBlock] = {}  # physical block -> what it holds

    def lookup(self, wanted: CachedBlock) -> int | None:
        """
        The block that holds these tokens after this prefix. The hash finds it, the comparison makes
        it certain.
        """
        block = self.block_of.get(wanted.key)
        return block if block is not None and self.held[block] == wanted else None

    def insert(self, block: int, content: CachedBlock):
        """
        Commit a full block. The first block of a key stays; a later one with the same content
        remains private.
        """
        if content.key not in self.block_of and block not in self.held:
            self.block_of[content.key] = block
            self.held[block] = content

    def forget(self, block: int):
        del self.block_of[self.held.pop(block).key]


class BlockAllocator:
    """
    Hands out blocks 0..num_blocks-1 and takes them back, each in O(1). A block is in exactly one of
    three states:

        free ──────────── allocate ─────────> referenced ──── last reference given up ───> free, if not committed
        cached and idle ─ prefix hit ───────>     "      ────           "            ───> cached and idle, if committed
        cached and idle ─ evicted: no free block is left, the least recently used goes ──> referenced, by the new owner

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
        self.free = list(
            range(num_blocks - 1, -1, -1)
        )  # a stack: the block freed last is the next one handed out
        self.idle: OrderedDict[int, None] = (
            OrderedDict()
        )  # committed, held by nobody, the longest unused first
        self.block_cache = BlockCache()
        self.num_evictions = 0

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now: free, or cached and idle."""
        return len(self.free) + len(self.idle)

    def allocate_one(self) -> int:
        """
        One block, owned by the caller alone. Raises RuntimeError when every block is referenced.
        """
        return self.allocate_n(1)[0]

    def allocate_n(self, n: int) -> list[int]:
        """n blocks or, with RuntimeError, none: nothing is lost by asking."""
        if n > self.num_free:
            raise RuntimeError(
                f"block pool exhausted: wanted {n}, available {self.num_free} of {self.num_blocks}; "
                "free a request's blocks first, or make the pool larger (num_blocks, --kv-blocks)"
            )
        return [self._take() for _ in range(n)]

    def _take(self) -> int:
        if self.free:
            block = self.free.pop()
        else:
            block, _ = self.idle.popitem(last=False)
            self.block_cache.forget(block)
            self.num_evictions += 1
        self.ref_counts[block] = 1
        return block

    def share(self, blocks: list[int]):
        """One more block table holds these blocks: a fork of a running request, or a prefix hit."""
        for block in blocks:
            if self.ref_counts[block] == 0:
                del self.idle[block]
            self.ref_counts[block] += 1

    def free_blocks_for_request(self, block_table: list[int]):
        """
        Give up one reference to each block, the tail first, so that leaves are evicted before their
        parents.
        """
        for block in reversed(block_table):
            if self.ref_counts[block] < 1:
                raise ValueError(f"block {block} is freed twice: nobody holds it")
            self.ref_counts[block] -= 1
            if self.ref_counts[block] == 0:
                if block in self.block_cache.held:
                    self.idle[block] = None
                else:
                    self.free.append(block)


# --------------------------------------------------------------------------------------------------
# Requests


TO_COME = None  # stands for a token whose step is under way


@dataclass(slots=True, eq=False)
class Request:
    """
    One text being continued. Its K, V live in `block_table`; the last token's are not there yet, it
    is the next input.

        waiting ── admitted ──> prefilling ── prompt computed ──> active ── stop or length ──> done
           ^                        │                               │
           └───── preempted ────────┴───────────────────────────────┘

    Between active and done it is `ending` while its last token is on its way.
    """

    id: int | str
    prompt_tokens: list[int]
    max_new_tokens: int
    arrival_time: float = 0.0  # any unit, the same for all requests of a scheduler
    priority: int = 0  # lower is served first
    generated_tokens: list[int] = field(default_factory=list)
    status: str = "waiting"
    prefill_cursor: int = (
        0  # tokens of the prefill target that are computed or were found in the cache
    )
    block_table: list[int] = field(default_factory=list)
    num_filled_slots: int = 0  # tokens whose K, V are in the pool
    stop_token_ids: frozenset[int] = frozenset()
    cache_salt: str = ""  # prefixes are shared only between requests of one salt
    params: object = None  # what the engine needs to sample for this request
    choice: int = 0  # which fork of its prompt this is; enters the noise of sampling
    prompt_logprobs: int | None = (
        None  # score the prompt, with so many candidates each: then it takes no prefix hits
    )
    # bookkeeping of the scheduler
    prefill_target: int = 0  # tokens to compute before sampling: the prompt, after a preemption also what was generated
    num_hit_tokens: int = 0  # of the prompt, found in the prefix cache when it was first admitted
    num_preemptions: int = 0
    admitted_time: float | None = (
        None  # when it first was; None: not yet, or a fork, which never waits
    )
    row: int | None = None  # its place in the engine's device arrays while it runs
    arrival_number: int = 0  # breaks ties of arrival_time
    block_keys: list[bytes] = field(
        default_factory=list
    )  # root key, then the key of each full block, once computed
    num_to_come: int = 0  # tokens at the end of generated_tokens whose values are on their way
    num_computed_slots: int = 0  # of the filled ones, those whose step is known to be done
    num_committed: int = (
        0  # leading blocks of the table that are in the prefix cache, or duplicates of such
    )
    finish_reason: str | None = None  # stop, length, abort or error, once done

    def __post_init__(self):
        self.prefill_target = self.prefill_target or len(self.prompt_tokens)

    @property
    def tokens_so_far(self) -> list[int]:
        return self.prompt_tokens + self.generated_tokens

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_tokens) + len(self.generated_tokens)

    @property
    def num_tokens_in_cache(
        self,
    ) -> int:  # the post's name: its cache is the pool, not the prefix cache
        return self.num_filled_slots

    @property
    def num_generated(self) -> int:
        return len(self.generated_tokens)

    @property
    def is_done(self) -> bool:
        return self.status == "done" or self.num_generated >= self.max_new_tokens

    @property
    def is_fully_prefilled(self) -> bool:
        return self.prefill_cursor >= self.prefill_target

    def tokens_between(self, start: int, end: int) -> list[int]:
        """Tokens start..end-1 of prompt and answer, without copying the rest."""
        P = len(self.prompt_tokens)
        if end <= P:
            return self.prompt_tokens[start:end]
        return self.prompt_tokens[start:] + self.generated_tokens[max(start - P, 0) : end - P]

    def content_of(self, index: int, block_size: int) -> CachedBlock:
        """What its full logical block `index` holds. Keys are computed once, in order, and kept."""
        tokens, keys = (
            tuple(self.tokens_between(index * block_size, (index + 1) * block_size)),
            self.block_keys,
        )
        if len(keys) <= index + 1:
            keys.append(block_key(keys[index], tokens))
        return CachedBlock(keys[index + 1], keys[index], tokens)

    def clear_cache(self, block_allocator: BlockAllocator):
        """Give the blocks back and forget what was computed; the tokens stay."""
        block_allocator.free_blocks_for_request(self.block_table)
        self.block_table = []
        self.num_filled_slots = self.num_computed_slots = self.prefill_cursor = (
            self.num_committed
        ) = 0


def maybe_allocate_block(request: Request, block_allocator: BlockAllocator, block_size: int):
    """
    Append a block to the table if the next token has no slot yet. Raises RuntimeError when the pool
    is exhausted.
    """
    if request.num_filled_slots == len(request.block_table) * block_size:
        request.block_table.append(block_allocator.allocate_one())


def commit_completed_blocks(request: Request, block_cache: BlockCache, block_size: int, pool=None):
    """
    Enter every block of the request that is full, and whose K, V exist, into the prefix cache:
    prompt and generated. Nothing is copied, the blocks become findable where they are; `pool` is
    the post's parameter and is not needed.
    """
    commit_blocks(request, block_cache, block_size, request.num_filled_slots)


def commit_blocks(
    request: Request, block_cache: BlockCache, block_size: int, num_slots: int, ref_counts=None
):
    """
    The same, if only so many of its filled slots are known to have their K, V; and no block that
    somebody else holds by `ref_counts`: that is a fork who has still to write there, maybe as its
    last owner, without a copy.
    """
    if not request.block_keys:
        request.block_keys.append(root_key(request.cache_salt))
    for index in range(request.num_committed, num_slots // block_size):
        block, content = request.block_table[index], request.content_of(index, block_size)
        if ref_counts is None or ref_counts[block] == 1:
            block_cache.insert(block, content)
        request.num_committed = index + 1


# --------------------------------------------------------------------------------------------------
# The scheduler


@dataclass(slots=True)
class Plan:
    """
    What one step computes. The requests in `sampled` get a token, in this order: all decodes, then
    some prefills.
    """

    step: int = 0
    decodes: list[Request] = field(default_factory=list)  # one token each
    chunks: list[tuple[Request, int]] = field(
        default_factory=list
    )  # (request, n): its next n prefill tokens
    sampled: list[Request] = field(default_factory=list)
    copies: dict[int, int] = field(
        default_factory=dict
    )  # destination block -> source block, before the step writes
    admitted: list[Request] = field(
        default_factory=list
    )  # got a row and a block table in this step
    grown: list[Request] = field(default_factory=list)  # decodes whose last block is new
    preempted: list[Request] = field(default_factory=list)
    # what the step brings besides its tokens: a score is [log-probability, the likeliest ids, their
    # log-probabilities]
    logprobs: dict[Request, list] = field(
        default_factory=dict
    )  # of the sampled token, for who asked
    prompt_scores: dict[Request, tuple[int, list]] = field(
        default_factory=dict
    )  # (start, scores of tokens start + 1 ..)

    @property
    def num_tokens(self) -> int:
        return len(self.decodes) + sum(n for _, n in self.chunks)


# What is served first has the smallest key: its arrival, made later by what else counts against it.
# So whoever comes late enough goes behind, and nobody starves. The keys are static, and a sorted
# queue stays sorted: all tokens of a request that waits are left to compute, those of its answer
# again if it was preempted.
PRIORITY_AGEING = (
    240.0  # seconds (the unit of arrival times): less than this a priority delays or hastens
)
SJF_AGEING = (
    0.05  # seconds for one token: 1,000 tokens more, and who comes within 50 seconds overtakes
)


def priority_delay(priority: int) -> float:
    """
    Seconds that a priority counts against a request: 60 for 1, 96 for 2, 185 for 10, below
    PRIORITY_AGEING for any. So a request waits at most for those who come within 2 *
    PRIORITY_AGEING seconds after it, whatever they ask for.
    """
    return PRIORITY_AGEING * (priority / (abs(priority) + 3))


POLICIES = {
    "fcfs": lambda r: (r.arrival_time, r.arrival_number),
    "priority": lambda r: (r.arrival_time + priority_delay(r.priority), r.arrival_number),
    "sjf": lambda r: (
        r.arrival_time + SJF_AGEING * (len(r.prompt_tokens) + r.max_new_tokens),
        r.arrival_number,
    ),
}


def setting(default, help: str, **more):
    """A field with its default and its meaning; serve.py makes a flag of each (settings.py)."""
    return field(default=default, metadata={"help": help, **more})


@dataclass(frozen=True)
class SchedulerSettings:
    """
    What steers a scheduler besides the post's four arguments. Raises ValueError for what is out of
    range.
    """

    max_num_seqs: int = setting(256, "requests running at once; each owns a row", least=1)
    watermark: float = 0.0  # share of the blocks kept for running requests when one is admitted
    prefill_share: float = setting(0.25, "share of the token budget that is kept for prompts")
    max_num_partial_prefills: int = setting(4, "prompts computed in one step", least=1)
    max_long_partial_prefills: int = setting(1, "long prompts among these", least=1)
    long_prefill_threshold: int = setting(512, "tokens above which a prompt is long", least=1)
    prefix_cache: bool = setting(
        True, "compute each prompt from its first token", flag="--no-prefix-cache"
    )

    def __post_init__(self):
        for f in fields(self):
            least, value = f.metadata.get("least"), getattr(self, f.name)
            if least is not None and value is not None and value < least:
                raise ValueError(f"{f.name} is {value}, wanted at least {least}")
        if not 0 <= self.prefill_share < 1:
            raise ValueError(
                f"prefill_share is {self.prefill_share}, wanted a share of the token budget: 0 or "
                "more, below 1"
            )


class Scheduler:
    """
    Decides each step who computes what, and owns every block while it does. One step:

        plan = scheduler.plan(step)          # allocate, admit, preempt: who decodes, who prefills which chunk
        ...                                  # the engine computes the plan and samples one token per plan.sampled
        scheduler.update(plan, tokens)       # append the tokens, commit full blocks, free what finished

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
        self.urgency = POLICIES[policy]
        self.token_budget = token_budget
        self.block_size = block_size
        self.watermark = int(settings.watermark * num_blocks)  # in blocks
        self.prefill_tokens = max(1, int(token_budget * settings.prefill_share))
        self.block_allocator = BlockAllocator(num_blocks, block_size)
        self.max_num_seqs = settings.max_num_seqs
        self.free_rows = list(range(settings.max_num_seqs - 1, -1, -1))
        self.waiting: list[Request] = []  # most urgent first
        self.prefilling: list[Request] = []  # in order of admission
        self.active: list[Request] = []  # decoding
        self.ending: list[Request] = []  # their last token is on its way
        # for metrics and traces
        self.num_added = self.num_preemptions = self.num_copies = self.num_forks = 0
        self.num_queried_tokens = self.num_hit_tokens = self.peak_blocks = 0
        self.checked: dict[
            int, CachedBlock
        ] = {}  # what `check` has found right: block -> what it held

    @property
    def block_cache(self) -> BlockCache:
        return self.block_allocator.block_cache

    @property
    def running(self) -> list[Request]:
        return self.active + self.prefilling + self.ending

    def is_done(self) -> bool:
        return not (self.waiting or self.prefilling or self.active or self.ending)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    # -- in ----------------------------------------------------------------------------------------

    def add_request(self, request: Request):
        """Queue a request. Raises ValueError where its prompt alone could never be admitted."""
        needed, available = self.blocks_for(request.num_tokens), self.block_allocator.num_blocks
        if not request.prompt_tokens:
            raise ValueError(
                f"request {request.id} has an empty prompt: give it at least one token"
            )
        if needed > available:
            raise ValueError(
                f"request {request.id} needs {needed} blocks for its prompt, the pool has {available}: "
                "shorten the prompt or make the pool larger (max_kv_tokens, --kv-blocks)"
            )
        request.arrival_number = self.num_added = self.num_added + 1
        self._enqueue(request)

    def _enqueue(self, request: Request):
        request.status = "waiting"
        insort(self.waiting, request, key=self.urgency)

    def _maybe_admit(self, step: int = 0) -> list[Request]:
        """
        Admit from the head of the queue while prompt, watermark and rows allow; the first that does
        not fit waits, and all behind it: nobody is overtaken by a smaller request for ever. `step`
        is the post's parameter.
        """
        admitted = []
        while self.waiting and self._admit(self.waiting[0]):
            admitted.append(self.waiting.pop(0))
        return admitted

    def _admit(self, request: Request) -> bool:
        if (
            not self.free_rows or request.num_to_come
        ):  # preempted with a token on its way: it is not known yet
            return False
        hits = self._cached_prefix(request)
        allocator, num_tokens = self.block_allocator, request.num_tokens
        needed = self.blocks_for(num_tokens) - len(hits)
        # an idle hit is counted in num_free, and is about to be no longer
        spare = allocator.num_free - sum(allocator.ref_counts[block] == 0 for block in hits)
        reserve = self.watermark if self.active or self.prefilling else 0
        if needed + reserve > spare:
            return False
        allocator.share(hits)
        request.block_table = hits + allocator.allocate_n(needed)
        request.num_filled_slots = request.prefill_cursor = len(hits) * self.block_size
        request.num_computed_slots = request.num_filled_slots
        if request.num_preemptions == 0:
            request.num_hit_tokens = request.num_filled_slots
        request.num_committed = len(hits)
        request.prefill_target = num_tokens
        request.status = "prefilling"
        request.row = self.free_rows.pop()
        self.prefilling.append(request)
        self.num_queried_tokens += num_tokens
        self.num_hit_tokens += request.num_filled_slots
        return True

    def _cached_prefix(self, request: Request) -> list[int]:
        """
        The longest run of its leading blocks in the cache, but never all of the prompt: at least
        one token must be computed to have logits to sample from.
        """
        if not request.block_keys:
            request.block_keys.append(root_key(request.cache_salt))
        hits = []
        may_hit = (
            self.settings.prefix_cache and request.prompt_logprobs is None
        )  # a score needs the logits of every token
        for index in range((request.num_tokens - 1) // self.block_size if may_hit else 0):
            block = self.block_cache.lookup(request.content_of(index, self.block_size))
            if block is None:
                break
            hits.append(block)
        return hits

    # -- one step ----------------------------------------------------------------------------------

    def plan(self, step: int = 0) -> Plan:
        """
        Decide one step: every active request decodes one token, what is left of the budget goes to
        prefill chunks. Allocates the blocks that the step writes. A request alone in the pool that
        cannot grow raises RuntimeError.
        """
        plan = Plan(step)
        self._plan_decodes(plan)
        if (
            not plan.preempted
        ):  # who was just sent away for lack of blocks does not come back in the same step
            plan.admitted = self._maybe_admit(step)
        self._plan_chunks(plan)
        plan.sampled = plan.decodes + [
            r for r, n in plan.chunks if r.prefill_cursor + n == r.prefill_target
        ]
        self.peak_blocks = max(
            self.peak_blocks, self.block_allocator.num_blocks - self.block_allocator.num_free
        )
        return plan

    def schedule(self, step: int) -> tuple[Request | None, list[Request]]:
        """
        The post's view of a plan: the first request with a prefill chunk, and those that decode.
        """
        plan = self.plan(step)
        return (plan.chunks[0][0] if plan.chunks else None), plan.decodes

    def _plan_decodes(self, plan: Plan):
        limit = (
            max(1, self.token_budget - self.prefill_tokens)
            if self.prefilling
            else self.token_budget
        )
        plan.decodes = self.active[:limit]
        if len(self.active) > limit:  # more running than budget: take turns
            self.active = self.active[limit:] + self.active[:limit]
        S, ref_counts = self.block_size, self.block_allocator.ref_counts
        for request in list(
            plan.decodes
        ):  # the hot loop: nothing to do for most, S - 1 times out of S
            table = request.block_table
            if request.num_filled_slots == len(table) * S or ref_counts[table[-1]] > 1:
                self._make_room(request, plan)
        if plan.preempted:
            plan.decodes = [r for r in plan.decodes if r.status == "active"]
            plan.grown = [r for r in plan.grown if r.status == "active"]
            if (
                not plan.decodes and self.active and not self.ending
            ):  # all whose turn it was are gone: no empty step
                self._plan_decodes(plan)

    def _needs_block(self, request: Request) -> bool:
        """
        No slot for the next token, or one in a block that a fork shares. A request that was
        preempted needs none.
        """
        table = request.block_table
        if request.status != "active":
            return False
        return (
            request.num_filled_slots == len(table) * self.block_size
            or self.block_allocator.ref_counts[table[-1]] > 1
        )

    def _make_room(self, request: Request, plan: Plan):
        """
        Give `request` a slot of its own for its next token; preempt until there is a block to take.
        """
        while self._needs_block(request):
            if self.block_allocator.num_free == 0:
                if self.ending:  # blocks are about to come back: sit this step out
                    plan.decodes.remove(request)
                    return
                plan.preempted.append(self._preempt_for(request))
                continue
            table, block = request.block_table, self.block_allocator.allocate_one()
            if request.num_filled_slots == len(table) * self.block_size:
                table.append(block)
            else:  # copy-on-write: the fork's siblings keep the old block
                self.block_allocator.free_blocks_for_request(table[-1:])
                plan.copies[block], table[-1] = table[-1], block
                self.num_copies += 1
            plan.grown.append(request)

    def _preempt_for(self, request: Request) -> Request:
        """
        Send the least urgent running request back to the queue. The order is the queue's own: were
        they to differ, the first in line could be sent away again and again by newcomers, and
        starve.
        """
        running = self.running
        if len(running) == 1:
            raise RuntimeError(
                f"request {request.id} cannot grow: it is alone in the pool and holds {len(request.block_table)} of "
                f"{self.block_allocator.num_blocks} blocks for {request.num_filled_slots} tokens, wanted 1 more; make "
                "the pool larger (max_kv_tokens, --kv-blocks) or max_new_tokens smaller"
            )
        victim = max(running, key=self.urgency)
        self._leave(victim)
        victim.num_preemptions += 1
        self.num_preemptions += 1
        self._enqueue(victim)
        return victim

    def _plan_chunks(self, plan: Plan):
        """
        Split what is left of the budget: the first few prompts get even shares, the others what
        those leave over, long ones beyond the limit last. The first of all has a share whatever it
        is, so nobody waits for ever.
        """
        left = self.token_budget - len(plan.decodes)
        long = [
            r
            for r in self.prefilling
            if r.prefill_target - r.num_hit_tokens > self.settings.long_prefill_threshold
        ]
        last = set(long[self.settings.max_long_partial_prefills :])
        num_sharers = min(self.settings.max_num_partial_prefills, len(self.prefilling) - len(last))
        for i, request in enumerate(sorted(self.prefilling, key=last.__contains__)):
            if left == 0:
                break
            sharers = max(1, num_sharers - i)
            n = min(request.prefill_target - request.prefill_cursor, -(-left // sharers))
            plan.chunks.append((request, n))
            left -= n

    def update(self, plan: Plan, tokens: list[int]) -> list[Request]:
        """
        Take in what the step computed: `tokens[i]` was sampled for `plan.sampled[i]`. Returns the
        requests that finished, their blocks freed. In two halves, so that an engine can plan a step
        while the one before still runs.
        """
        if len(tokens) != len(plan.sampled):
            raise ValueError(
                f"{len(tokens)} tokens for a plan that samples {len(plan.sampled)}: give one for each"
            )
        self.advance(plan)
        return self.resolve(plan, tokens)

    def advance(self, plan: Plan):
        """
        The step is on its way: whoever samples in it gets a place for the token, whose value is not
        known yet.
        """
        for request in plan.decodes:  # the hot loop
            request.num_filled_slots += 1
        for request, n in plan.chunks:
            request.prefill_cursor += n
            request.num_filled_slots += n
        for request in plan.sampled[len(plan.decodes) :]:
            self.promote(request)
        for request in plan.sampled:  # the hot loop
            request.num_to_come += 1
            request.generated_tokens.append(TO_COME)
            if len(request.generated_tokens) >= request.max_new_tokens:
                self._move(request, "ending")

    def resolve(self, plan: Plan, tokens: list[int]) -> list[Request]:
        """
        The step is done, its tokens are known. Only now, when their K, V exist, are full blocks
        committed. Requests that have ended since they were planned are passed over: one stopped by
        its token has one more under way.
        """
        S, finished = self.block_size, []
        for request, n in plan.chunks:
            if request.row is not None:  # not preempted since
                request.num_computed_slots += n
                self._commit(request)
        for request in plan.decodes:  # the hot loop
            if request.row is not None:
                request.num_computed_slots = computed = request.num_computed_slots + 1
                if computed % S == 0:
                    self._commit(request)
        for request, token in zip(plan.sampled, tokens):  # noqa: B905  the hot loop
            if request.num_to_come:
                request.generated_tokens[-request.num_to_come] = token
                request.num_to_come -= 1
                if token in request.stop_token_ids:
                    request.finish_reason = "stop"
                    finished.append(request)
                elif request.status == "ending" and not request.num_to_come:
                    request.finish_reason = "length"
                    finished.append(request)
        for request in finished:
            self.complete(request)
        return finished

    def _commit(self, request: Request):
        if self.settings.prefix_cache:
            held = self.block_allocator.ref_counts
            commit_blocks(
                request, self.block_cache, self.block_size, request.num_computed_slots, held
            )

    def promote(self, request: Request):
        """Its prompt is computed: from now on it decodes."""
        self._move(request, "active")

    def _move(self, request: Request, status: str):
        """From its list to that of another status."""
        getattr(self, request.status).remove(request)
        request.status = status
        getattr(self, status).append(request)

    # -- out ---------------------------------------------------------------------------------------

    def complete(self, request: Request):
        """
        End a request in whatever state, an aborted one too: free its blocks and commit nothing.
        """
        self._leave(request)
        request.status = "done"
        del request.generated_tokens[len(request.generated_tokens) - request.num_to_come :]
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
        whoever first writes to the last, partial one copies it. Raises RuntimeError when no row is
        free.
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
        own = {
            name: list(getattr(parent, name))
            for name in ("generated_tokens", "block_table", "block_keys")
        }
        child = replace(
            parent,
            id=id,
            row=self.free_rows.pop(),
            num_to_come=0,
            admitted_time=None,
            **(own | changes),
        )
        child.num_computed_slots = child.num_filled_slots
        child.arrival_number = self.num_added = self.num_added + 1
        self.block_allocator.share(child.block_table)
        self.active.append(child)
        self.num_forks += 1
        return child

    # -- the invariants ----------------------------------------------------------------------------

    def check(self, plan: Plan | None = None):
        """
        Raise AssertionError, with the numbers, where an invariant of blocks, requests or `plan`
        does not hold.
        """
        allocator, S = self.block_allocator, self.block_size
        held = [0] * allocator.num_blocks
        for request in self.running:
            for block in request.block_table:
                held[block] += 1
        assert held == allocator.ref_counts, (
            f"block tables hold {held}, reference counts say {allocator.ref_counts}"
        )
        referenced = [block for block, count in enumerate(held) if count]
        everything = sorted(referenced + allocator.free + list(allocator.idle))
        assert everything == list(range(allocator.num_blocks)), (
            f"{len(referenced)} referenced + {len(allocator.free)} free + {len(allocator.idle)} cached and idle blocks "
            f"are not the {allocator.num_blocks} of the pool, each once"
        )
        self._check_cache()
        for status in ("waiting", "prefilling", "active", "ending"):
            for r in getattr(self, status):
                assert r.status == status, f"{r.id} is {r.status} but on the {status} list"
                assert (r.row is None) == (status == "waiting") == (not r.block_table), (
                    f"{r.id}: row without blocks"
                )
                committed, room = r.num_committed * S, len(r.block_table) * S
                assert 0 <= committed <= r.num_computed_slots <= r.num_filled_slots <= room, (
                    f"{r.id}: of {room} slots {committed} are committed, {r.num_computed_slots} computed, "
                    f"{r.num_filled_slots} filled"
                )
                assert status != "active" or r.num_filled_slots == r.num_tokens - 1, (
                    f"{r.id}: an input is missing"
                )
        rows = sorted(self.free_rows + [r.row for r in self.running])
        assert rows == list(range(self.max_num_seqs)), f"rows lost or shared: {rows}"
        if plan is not None:
            self.check_plan(plan)

    def _check_cache(self):
        allocator, cache = self.block_allocator, self.block_cache
        if cache.held != self.checked:  # a block's tokens are hashed once, not in every step
            found = {content.key: block for block, content in cache.held.items()}
            assert found == cache.block_of, (
                f"by their keys are found {cache.block_of}, held are {found}"
            )
            for block, content in cache.held.items():
                if self.checked.get(block) is not content:
                    key, parent, tokens = content
                    assert key == block_key(parent, tokens), (
                        f"the key of block {block} is not of its parent and tokens"
                    )
            self.checked = dict(cache.held)
        on_free_list = cache.held.keys() & allocator.free
        assert not on_free_list, f"cached blocks {on_free_list} are on the free list"
        uncommitted = allocator.idle.keys() - cache.held.keys()
        assert not uncommitted, f"blocks {uncommitted} are idle but were never committed"

    def check_plan(self, plan: Plan):
        """
        After `plan`, before `update`: within budget, everybody advances, and every written block
        has one owner.
        """
        S = self.block_size
        assert plan.num_tokens <= self.token_budget, (
            f"{plan.num_tokens} tokens planned, budget {self.token_budget}"
        )
        written = [(r, r.num_filled_slots, 1) for r in plan.decodes]
        written += [(r, r.num_filled_slots, n) for r, n in plan.chunks]
        owner: dict[int, Request] = {}
        for request, start, n in written:
            assert n >= 1, f"{request.id} is scheduled to compute nothing"
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
    The K, V of all blocks of all layers in one tensor, `kv` [L, 2, num_blocks + 1, Hk, S, D]. One
    (block, head) is a contiguous slab of S * D numbers. Block `num_blocks` is the sink: nobody's,
    where padding may write. `k_pool[(layer, head)]` and `v_pool[(layer, head)]` are views
    [num_blocks, S, D] of one head.
    """

    def __init__(
        self, num_blocks, block_size, n_layer, n_head, head_size, device="cpu", dtype=None
    ):
        import torch

        self.num_blocks, self.block_size, self.sink = num_blocks, block_size, num_blocks
        shape = (n_layer, 2, num_blocks + 1, n_head, block_size, head_size)
        self.kv = torch.zeros(shape, device=device, dtype=dtype)
        heads = [(layer, head) for layer in range(n_layer) for head in range(n_head)]
        self.k_pool = {(layer, head): self.kv[layer, 0, :num_blocks, head] for layer, head in heads}
        self.v_pool = {(layer, head): self.kv[layer, 1, :num_blocks, head] for layer, head in heads}

    def copy_blocks(self, to, source):
        """
        Copy whole blocks of all layers, tensors or lists of ids; all are read before any is
        written.
        """
        self.kv[:, :, to] = self.kv[:, :, source]


def write_kv_to_pool(pool, block_table, block_size, start_pos, k_new, v_new, layer, head):
    """
    Write k_new and v_new (1, T, D) of one head for positions start_pos.. of a request, through its
    block table.
    """
    import torch

    positions = torch.arange(start_pos, start_pos + k_new.shape[1])
    blocks, offsets = torch.tensor(block_table)[positions // block_size], positions % block_size
    pool.k_pool[(layer, head)][blocks, offsets] = k_new[0]
    pool.v_pool[(layer, head)][blocks, offsets] = v_new[0]


def gather_kv_from_pool(pool, block_table, block_size, num_filled_slots, layer, head):
    """
    The first num_filled_slots tokens' K and V of one head as contiguous copies, (1,
    num_filled_slots, D) each.
    """
    import torch

    blocks = torch.tensor(block_table, dtype=torch.long)
    k = pool.k_pool[(layer, head)][blocks].flatten(0, 1)[
        :num_filled_slots
    ]  # [M, S, D] -> [tokens, D]
    v = pool.v_pool[(layer, head)][blocks].flatten(0, 1)[:num_filled_slots]
    return k[None], v[None]
