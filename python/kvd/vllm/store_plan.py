# SPDX-License-Identifier: Apache-2.0
"""The scheduler's side of KvdStoreConnector: ids of a prompt's chunks, which of them are stored,
and which are to be stored.

The scheduler finds and holds chunks with the layout of the whole model, which it combines from the
layouts that workers send in their first step: a chunk is found when the parts of all ranks are
stored. One rank's layout would not do, because the others' parts may be in transfer, or have been
left out. vLLM's configuration would not do either: the order of a cache is known only to the
attention backends, in the workers."""
import hashlib
import time
from collections import namedtuple
from dataclasses import dataclass, field

from ..chunks import ID_BYTES, IDS_MAX, holders_of
from ..cost import FETCH, LOCAL, ROUTE
from ..layout import Layout
from ..stores.choice import model_of
from ..stores.space_client import AWAY_S, CALL_S, hold_most
from ..stores.jobs import Jobs
from ..stores.names import word
from .route import NULL

CHUNK_TOKENS = 256
TOKENS_MIN = 16  # of a chunk, in the layout's tokens
LEASE_S = 10.0
REMOTE_MOST_S = 0.5  # longest wait of the scheduler for other daemons
AGAIN_S = 1.0  # until a queued request's prefix is looked up again
START_S = 20.0  # for the workers' first step
ADAPTER_S = 1.0  # for reading an adapter's folder

Words = namedtuple("Words", "model revision scheme rope tokens")
Words.__doc__ = """Names of a space. tokens: of a chunk, as the layout counts them."""


def chunk_tokens(asked, block):
    """Tokens of a chunk: whole blocks. asked: None, the default, which is rounded."""
    if asked is None:
        return -(-CHUNK_TOKENS // block) * block
    if isinstance(asked, bool) or not isinstance(asked, int) or asked < 1 or asked % block:
        raise ValueError("kvd.vllm: chunk_tokens: %r is not a multiple of the block size, %d"
                         % (asked, block))
    return asked


def whole_layout(rows):
    """The text of a layout with all heads and layers of these ranks."""
    whole, at = Layout(), 0
    whole.buffer(1)
    for layout in map(Layout.parse, rows):
        for name, view in layout.views.items():
            if name not in whole.views:
                whole.view(name, view["page_tokens"], view["pages"])
            there = whole.views[name]["layers"]
            for layer in sorted(set(view["layers"]) - set(there)):
                for f in view["layers"][layer]:
                    units, nbytes = f["total_units"], f["unit_bytes"]
                    page = nbytes * units * view["page_tokens"]
                    whole.field(name, layer, f["name"], buffer=0, offset=at, page_stride=page,
                                token_stride=nbytes * units, unit_stride=nbytes,
                                unit_bytes=nbytes, units=units, total_units=units,
                                format=f.get("format"))
                    at += page * view["pages"]
    whole.buffers = [at]
    return whole.text()


# ---- ids -------------------------------------------------------------------------------

class BlockIds:
    """vLLM's own hashes of blocks. Each covers all tokens up to its end, so a chunk's hash is its
    last block's."""

    def __init__(self, block):
        self.block = block

    def scheme(self, hashing):
        return word("vllm %s block=%d" % (hashing, self.block))

    def of(self, known, tokens, count):
        """Ids of the request's first `count` chunks."""
        ratio = tokens // self.block
        return [bytes(h) for h in known.request.block_hashes[ratio - 1:count * ratio:ratio]]


class TokenIds:
    """A chain of hashes of whole chunks, which is equal for engines with other blocks. digest: of
    an object; extra: vLLM's keys for everything but tokens (adapters, images, salts), (request,
    begin, end, first image) -> (keys, next image)."""

    def __init__(self, digest, extra):
        self.digest, self.extra = digest, extra
        self.seed = digest("kvd chunks")

    def scheme(self, _):
        return "kvd sha256_cbor chunks"

    def of(self, known, tokens, count):
        request, chain = known.request, known.chain
        count = min(count, request.num_tokens // tokens)
        while len(chain) < count:
            begin = len(chain) * tokens
            before, image = chain[-1] if chain else (self.seed, 0)
            keys, image = self.extra(request, begin, begin + tokens, image)
            chain.append((self.digest(
                (before, tuple(request.all_token_ids[begin:begin + tokens]), keys)), image))
        return [one for one, _ in chain[:count]]


class Adapter:
    """An adapter's share of its requests' ids. ok: whether its chunks may be used, None: unknown so
    far; word: bytes, or None."""

    def __init__(self, ok=None):
        self.ok, self.word = ok, None


class Adapters:
    """LoRA adapters' weights, which vLLM's ids identify by name and path alone. One that is
    retrained in place has other KV: its chunks get other ids. While the engine runs it is unknown
    which of the two is loaded, so a changed adapter has no chunks from then on, and one whose
    weights have no name never has any. weights: of a path, or None; run(call, *args): runs calls
    one after another, None: on a thread, because a folder's file system may be slow."""

    def __init__(self, weights, log, run=None):
        self.weights, self.log, self.run, self.first = weights, log, run, {}

    def of(self, request):
        """An Adapter, which is completed later."""
        lora = getattr(request, "lora_request", None)
        if lora is None:
            return Adapter(True)
        adapter = Adapter()
        self.run = self.run or Jobs("kvd-adapters").add
        self.run(self._look, lora, adapter)
        return adapter

    def _look(self, lora, adapter):
        adapter.word = self._word(lora)
        adapter.ok = adapter.word is not None  # read by the scheduler before the word

    def _word(self, lora):
        known = lora.lora_path in self.first
        try:
            told = self.weights(lora.lora_path)
        except (OSError, ValueError):
            told = None
        first = self.first.setdefault(lora.lora_path, told)
        if told is not None and first == told:
            return told.encode()
        if not known or first is not None:
            self.log.warning("kvd.vllm: adapter %s (%s) %s: its requests have no chunks, "
                             "unless \"revision\" is set in kv_connector_extra_config",
                             lora.lora_name, lora.lora_path, "has changed" if known else
                             "is not a folder of weights")
            self.first[lora.lora_path] = None
        return None


# ---- requests --------------------------------------------------------------------------

class Known:
    """A request of the scheduler's."""

    def __init__(self, request):
        self.request, self.chain = request, []
        self.saved = 0  # chunks, from the first on, that are stored or being stored
        self.local = 0  # tokens in this engine's own cache
        self.loaded = False  # its tokens from other caches have been reported
        # or else this many may be missing until its first step has a result; None: before that step
        self.doubted = None
        self.looked, self.counted = None, False  # (chunks looked up, found) until counted
        self.held, self.first, self.end, self.until = None, 0, 0, 0.0  # a hold, and its end
        self.document, self.way = None, None  # all of it that can be routed; one of choice.py
        self.blocks = None  # destination of the load
        self.failed = False  # a load failed: it is not tried again
        self.frozen = False  # of a model that has changed since
        self.adapter, self.adapter_s = Adapter(True), 0.0
        self.puts = False  # some may be in progress

    def let_go(self):
        """Close its hold. Reads in progress continue."""
        self.held, self.end, self.until, self.document, self.way = None, 0, 0.0, None, None

    @property
    def named(self):
        """Whether its chunks have ids, and belong to the current model."""
        return bool(self.adapter.ok) and not self.frozen


@dataclass
class Step:
    """What the scheduler sends to the workers in a step. Chunks are counted from the prompt's
    first, tokens are the request's, blocks are those of these tokens."""
    words: Words = None
    # (request, secret of a hold, blocks, begin, end)
    loads: list = field(default_factory=list)
    drops: list = field(default_factory=list)  # requests whose load is abandoned
    # (request, first chunk, ids, blocks, Words of the model that computed them)
    saves: list = field(default_factory=list)
    settles: list = field(default_factory=list)  # requests that were preempted
    ends: list = field(default_factory=list)  # requests that wait for their puts
    routes: dict = field(default_factory=dict)  # {first own block: route.Route}
    ended: list = field(default_factory=list)  # secrets of holds that no request routes to
    rents: list = field(default_factory=list)  # as loads, with the number of a route.Rent


class Plan:
    """spaces: a SpaceClient whose opener takes (client, layout text, words). block: tokens of one;
    group: of the block table; lease: of holds, seconds; remote: seconds to query other daemons,
    or None; adapters: Adapters, or None if the user's revision covers them; ranks: number of
    workers; loads, saves: whether it does; routes: a route.Routes, or None: it only loads;
    prices: a choice.Ways, or None: all that is held is loaded, or routed; events: an
    events.BlockEvents, or None: vLLM publishes none."""

    def __init__(self, spaces, ids, words, block, tokens, *, group=0, ranks=1, lease=LEASE_S,
                 remote=None, loads=True, saves=True, adapters=None, step=Step, routes=None,
                 prices=None, events=None, clock=time.monotonic):
        self.spaces, self.ids, self.block, self.tokens = spaces, ids, block, tokens
        self.named, self.words = words, None  # without and with the workers' layouts
        self.group, self.lease, self.remote = group, lease, remote
        self.loads, self.saves, self.adapters = loads, saves, adapters
        self.routes, self.prices, self.events = routes, prices, events
        self.new_step, self.step, self.clock = step, step(), clock
        self.ranks, self.rows, self.layout, self.start_s = ranks, {}, None, None
        self.computes = None
        self.requests, self.loading = {}, {}
        self.asked = self.found = 0  # chunks

    # ---- reports of the workers ----

    def told(self, rows):
        """{rank: (layout's text, its grain, kvd.cost.Model or None)}, of one or more."""
        self.rows.update(rows)
        if self.words is not None or len(self.rows) < self.ranks:
            return
        texts = [self.rows[rank][0] for rank in sorted(self.rows)]
        grain = max(grain for _, grain, _ in self.rows.values())
        least = TOKENS_MIN * grain
        self.tokens = -(-max(self.tokens, least) // grain) * grain
        self.layout = whole_layout(texts)
        if self.prices is not None:
            models = [model for _, _, model in self.rows.values() if model is not None]
            self.prices.model = models[0] if models else model_of(self.layout)
        self.words = self.named._replace(tokens=self.tokens // grain)

    def _waits(self):
        """Whether the workers' first step is pending."""
        if self.start_s is None:
            self.start_s = self.clock()
        return self.words is None and self.clock() < self.start_s + START_S

    def heard(self, received, bad, rented=None, put=()):
        """From a step's results: loaded requests, blocks that were not loaded, {number of a Rent that
        has ended at ranks: for each of them, whether all of it was loaded}, requests whose puts have
        ended."""
        if put and self.events is not None:
            self.events.wake()
        if self.prices is not None:
            self.prices.ended()
        for number, wholes in (rented or {}).items():
            self.routes.rented(number, wholes, self.clock())
        for known in self.loading.values() if bad else ():
            if not bad.isdisjoint(known.blocks):
                known.failed, known.saved = True, 0
        for name in received:
            if name in self.requests:
                self.requests[name].loaded = True
            known = self.loading.pop(name, None)
            if known is not None:
                known.blocks = None
                known.let_go()

    def again(self, request, lost):
        """vLLM preempts a request, which is asked for anew: its step has no valid result (lost), or
        its document is here."""
        known = self.requests.get(request.request_id)
        if lost:
            self.routes.lost(request.request_id)
        else:
            self.routes.leave(request.request_id)
        if known is not None:
            known.let_go()

    # ---- a request ----

    def arrived(self, request):
        if request.request_id in self.requests:
            return
        known = self.requests[request.request_id] = Known(request)
        if self.adapters is not None:
            known.adapter, known.adapter_s = self.adapters.of(request), self.clock()

    def _ids(self, known, count):
        """Of its first `count` chunks."""
        ids, word = self.ids.of(known, self.tokens, count), known.adapter.word
        return ids if word is None else [hashlib.sha256(word + one).digest() for one in ids]

    def matched(self, request, computed):
        """(tokens after the first `computed` ones that can be loaded or routed, whether later)"""
        known = self.requests.get(request.request_id)
        if known is None:
            return 0, False
        if self.routes is not None:
            self.routes.leave(request.request_id)
        known.local, known.loaded = computed, False
        if not self.loads or known.failed or known.frozen or request.skip_reading_prefix_cache:
            return 0, False
        if self.words is None:
            return (None, False) if self._waits() else (0, False)
        if not known.named:
            waits = known.adapter.ok is None and self.clock() < known.adapter_s + ADAPTER_S
            return (None, False) if waits else (0, False)
        end = self._held(known, computed)
        if end <= computed:
            return 0, False
        way = known.way = known.way or self._way(known, computed)
        if way == ROUTE:
            tokens = self.routes.chosen(request.request_id, known.document, computed)
            if tokens:
                return tokens, False
        if way == LOCAL:
            known.saved = known.first + known.held.chunks - known.held.remote
            end = known.saved * self.tokens
        return (end - computed, True) if end > computed else (0, False)

    def _held(self, known, computed):
        """The token up to which chunks are held. A queued request is looked up repeatedly."""
        first, now = computed // self.tokens, self.clock()
        if first == known.first and now < known.until:
            return known.end
        known.let_go()
        known.first, known.until = first, now + AGAIN_S
        # one token is left to compute: it gives the next one
        last = min((known.request.num_tokens - 1) // self.tokens, first + IDS_MAX)
        ids = self._ids(known, last)[first:] if last > first else ()
        if not ids:
            return 0
        document = None if self.routes is None else self.routes.shared(first, ids, now)
        held = document.held if document is not None else self._hold(ids, first)
        if held is None:
            known.until = now + AWAY_S
            return 0
        count = held.chunks
        if not known.counted:
            known.looked = len(ids), count
        known.saved = 0
        if count:
            self._follow(known, first, ids[:count])
            known.held, known.until = held, now + self._lease() / 2
            known.saved = first + count
            known.end = known.saved * self.tokens
            if self.routes is not None and self._is_routable(held):
                known.document = document or self.routes.document(
                    first, ids, held, self.tokens, known.until)
        return known.end

    def _way(self, known, computed):
        """How the tokens of its hold are used."""
        if self.prices is None:
            return FETCH if self.routes is None else ROUTE
        if not known.held.remote:
            return FETCH
        request, document = known.request, known.document
        page = self._page()
        if page is None:
            return FETCH
        holders = self._holders(known.held, document)
        if document is None:
            return LOCAL if self.prices.computes(page, holders) else FETCH
        steps = request.max_tokens - (request.num_tokens - request.num_prompt_tokens)
        if self.routes.rents_are_possible:  # it may be fetched after any step
            steps = 1
        return self.prices.choose(page, holders, max(1, steps),
                                  query_tokens=request.num_tokens - known.end,
                                  no_pages=self.routes.free() < (known.end - computed) // self.block)

    def _page(self):
        return self.spaces.ask((self.layout, self.words),
                               lambda space: self.prices.page(space.client))

    def _holders(self, held, document=None):
        """{(instance, gpu) of a daemon: its tokens} of this hold, which is a document's, or None's.
        Empty: unknown."""
        if document is not None and document.holders:
            return document.holders
        holders = self.spaces.ask((self.layout, self.words),
                                  lambda _: holders_of(held, CALL_S)) or {}
        if document is not None:
            document.holders = holders
        return holders

    def _is_routable(self, held):
        """Whether the own daemon has no chunk of a hold, or computes attention to them."""
        return self._computes() or held.remote == held.chunks and \
            sum(self._holders(held).values()) == held.tokens

    def _computes(self):
        """Whether the own daemon computes attention: asked once."""
        if self.computes is None:
            self.computes = self.spaces.ask((self.layout, self.words), lambda space: "attention" in
                                          space.client.command("health", CALL_S))
        return self.computes

    def _lease(self):
        return self.lease if self.routes is None else self.routes.lease

    def _hold(self, ids, first):
        """A hold of the stored ones among these, which may be empty. None: the daemon does not
        answer."""
        return self.spaces.ask((self.layout, self.words), lambda space: hold_most(
            lambda count, remote: space.hold(ids[:count], first, lease=self._lease(),
                                             remote=remote, timeout=CALL_S),
            len(ids), self.remote))

    def allocated(self, request, table, external):
        """table(): its blocks; external: number of its tokens to load."""
        known = self.requests.get(request.request_id)
        if known is None:
            return
        known.doubted = None
        if known.looked is not None:  # a queued one may be looked up once a second
            self.asked, self.found = self.asked + known.looked[0], self.found + known.looked[1]
            known.looked, known.counted = None, True
        if self.routes is not None and request.request_id in self.routes.ways:
            known.saved = self.routes.allocated(request.request_id, table()[self.group],
                                                external) // self.tokens
            self._count(known)
            return
        if known.held is None or known.blocks is not None:
            return
        if not external:  # another connector loads it, or none
            known.let_go()
            return
        begin, end = known.local, known.local + external  # may be fewer than were found
        known.blocks = self._part(table(), begin, end)
        self.loading[request.request_id] = known
        self.step.loads.append((request.request_id, known.held.secret, known.blocks, begin, end))

    def _count(self, known):
        """A routed request's first steps, of all its own tokens, in steps of one."""
        if self.prices is not None:
            page = self._page()
            if page is not None:
                document = known.document
                document.steps += self.prices.steps_of(
                    page, self._holders(document.held, document),
                    known.request.num_tokens - document.end)

    def _rent(self, step, document, request):
        """Fetch a routed document while it is routed to, if that is cheaper by now."""
        page = self._page()
        if page is None or not self.prices.turned(
                page, self._holders(document.held, document), document.steps):
            return
        rent = self.routes.rent(document, request)
        if rent is not None:
            step.rents.append((rent.number, document.held.secret,
                               self.routes.pool.numbers(rent.blocks), document.begin,
                               document.end))

    def _part(self, table, begin, end):
        blocks = list(table[self.group][begin // self.block:-(-end // self.block)])
        if NULL in blocks:
            raise RuntimeError("kvd.vllm: tokens [%d, %d) of a request are not here: blocks %s"
                               % (begin, end, blocks))
        return blocks

    def _save(self, step, known, end, table):
        """Tokens [0, end) are in the blocks of table() once the step has run."""
        whole = min(end // self.tokens, known.saved + IDS_MAX)
        if not self.saves or not known.named or self.words is None or \
                whole <= max(known.saved, known.local // self.tokens):
            return
        first, name = known.saved, known.request.request_id
        ids = self._ids(known, whole)[first:]
        blocks = self._part(table(), first * self.tokens, whole * self.tokens)
        if len(ids) == whole - first and all(len(one) == ID_BYTES for one in ids):
            step.saves.append((name, first, b"".join(ids), blocks, self.words))
            known.saved, known.puts = whole, True
            self._follow(known, first, ids)

    def _follow(self, known, first, ids):
        """Publish where these chunks are, from now on."""
        if self.events is not None:
            self.events.know((self.layout, self.words), known.request, first, ids, self.tokens)

    def finished(self, request, blocks):
        """Whether vLLM keeps its blocks until the workers report it."""
        name = request.request_id
        known = self.requests.pop(name, None)
        if known is None:
            return False
        known.let_go()
        if self.loading.pop(name, None) is not None:
            self.step.drops.append(name)  # vLLM waits for loads only
            return False
        # vLLM counts tokens that are loading, or that a step in flight writes, as computed
        if self.routes is None or self.routes.whole(name, blocks[self.group]):
            self._save(self.step, known, self._over(known), lambda: blocks)
        if self.routes is not None:
            self.routes.finished(name)
        if known.puts:
            self.step.ends.append(name)
        return known.puts

    @staticmethod
    def _over(known):
        """Tokens after the last step with a result. 0: none of its blocks is certain."""
        request = known.request
        over = request.num_computed_tokens - request.num_in_flight_tokens
        sure = known.doubted is not None and over > known.doubted
        return min(over, request.num_tokens) if sure else 0

    def reset(self):
        """The model has changed: chunks from before are neither found nor saved any more."""
        self.named = self.named._replace(revision=word(
            "%s reset %d" % (self.named.revision, time.time_ns())))
        if self.words is not None:
            self.words = self.named._replace(tokens=self.words.tokens)
        if self.routes is not None:
            self.routes.reset()
        if self.events is not None:
            self.events.forget()
        for known in self.requests.values():
            known.frozen = True
            if known.blocks is None:
                known.let_go()

    def take_counts(self):
        """(chunks looked up, found) since the last call"""
        asked, found, self.asked, self.found = self.asked, self.found, 0, 0
        return asked, found

    # ---- a step ----

    def take(self, output):
        """The step that starts now."""
        step, self.step = self.step, self.new_step()
        step.words = self.words
        step.settles += output.preempted_req_ids or ()
        for name in step.settles:
            known = self.requests.get(name)
            if known is not None:  # its stored chunks are left out when they are put again
                known.saved, known.puts = 0, False
                if self.routes is not None:  # it may run again in this step
                    known.saved = self.routes.saved(name, self.tokens)
        for name, count in output.num_scheduled_tokens.items():
            known = self.requests.get(name)
            if known is None:
                continue
            request, computed = known.request, known.request.num_computed_tokens
            if known.doubted is None:
                known.doubted = computed if computed > known.local and not known.loaded else 0
            # drafts are not tokens of the request yet; the result of a routed step may be lost
            end = self._over(known) if known.doubted or self.routes is not None else \
                min(computed + count, request.num_tokens)
            if end >= (known.saved + 1) * self.tokens:
                self._save(step, known, end,
                           lambda: output.kv_connector_block_state.get_block_ids(name))
        if self.routes is not None:
            self.routes.renew(self._hold, self.clock())
            if self.prices is not None:
                for document, name in self.routes.due(output.num_scheduled_tokens, self.clock()):
                    self._rent(step, document, self.requests[name].request)
            step.routes = self.routes.step(output.num_scheduled_tokens)
            step.ended = self.routes.take_ended()
        if self.prices is not None:
            self.prices.began(0 if step.routes else sum(output.num_scheduled_tokens.values()))
        return step
