# SPDX-License-Identifier: Apache-2.0
"""A request that prefill pushes while computing it.

No chunk is sent before decode has bound its blocks; until then tokens accumulate. After each step
the computed tokens are sent as one chunk, with the option layer by layer during the forward pass.
States, the head of the metadata and the end are sent when the request has finished."""
from ..records import head_write
from ..rooms import FAILED, SUCCESS, WAITING_FOR_INPUT, View

PREEMPT_S = 1.0  # for the daemon to read the posted chunks
ALL_LAYERS = 1 << 31


class Push:
    def __init__(self, worker, name, handle):
        self.worker, self.name, self.handle = worker, name, handle
        self.sent = 0  # tokens of the request that were sent, in all layers
        self.layer = 0  # layers below it have sent those of this chunk, too
        self.seq, self.blocks, self.end = 0, (), 0
        self.finished = self.told = False  # told: its request has ended
        self.waits = True  # vLLM waits for its blocks
        self.first = None

    def computed(self, blocks, end):
        """Tokens [0, end) are in these blocks once the step's forward pass has run."""
        self.blocks, self.end = blocks, end

    def finish(self, blocks, end, first):
        """first: the sampled token, None: none that decode could use."""
        self.blocks, self.end, self.first = blocks, end, first
        self.finished = self.told = True

    def give_up(self, why, waits):
        self.told, self.waits = True, waits
        self.handle.stop(why)

    @property
    def ended(self):
        return self.told and self.handle.look() in (FAILED, SUCCESS)

    def _open(self):
        return not self.handle.stopped and \
            WAITING_FOR_INPUT <= self.handle.look() < SUCCESS

    def _limit(self):
        """Blocks that cannot be sent in part wait until they are full."""
        grain = self.worker.made.grain
        return self.end if self.finished else self.end - self.end % grain

    def _views(self, begin, end, layers):
        """By name: groups with some of these layers."""
        views = {}
        for group, blocks in zip(self.worker.made.groups, self.blocks):
            if group is None or group.kind == "state":
                continue
            if layers and not self.worker.made.has_layers(group.name, *layers):
                continue
            view = group.pushed(blocks, begin, end)
            if view is not None:
                views[group.name] = view if layers is None else view._replace(layers=layers)
        return views

    def layer_saved(self, layer, mark):
        """In the current pass: layers up to this one have been enqueued before the mark."""
        end = self._limit()
        if end <= self.sent or not self._open():
            return
        views = self._views(self.sent, end, (self.layer, layer + 1))
        if views:
            self._send(views, mark=mark())
        self.layer = layer + 1

    def advance(self, mark):
        """After a pass: sends the rest of it."""
        end, views = self._limit(), {}
        if (end <= self.sent and not self.finished) or not self._open():
            return
        if end > self.sent:
            views = self._views(self.sent, end,
                                (self.layer, ALL_LAYERS) if self.layer else None)
        self.sent, self.layer = max(end, self.sent), 0
        if not self.finished:
            if views:
                self._send(views, mark=mark())
            return
        for group, blocks in zip(self.worker.made.groups, self.blocks):
            state = group and group.kind == "state" and group.offered(blocks, end)
            if state:
                views[group.name] = state
        self.finished = False
        self._send(views, True, self._aux(), mark())

    def _aux(self):
        """A slot with the first token. Its view belongs to the last pipeline stage."""
        slots = self.worker.slots
        if slots is None or self.first is None:
            return None
        slot = slots.take()
        if slot is None:
            self.handle.stop("no free record: %d requests that finished have not ended"
                             % slots.count)
            return None
        self.handle.on_end = lambda: slots.give(slot)
        head_write(slots.record(slot), self.handle.number, 0, self.first)
        return slot

    def _send(self, views, last=False, aux=None, mark=None):
        self.handle.send(views, self.seq, last, aux, wait=mark)
        self.seq += 1

    def settle(self):
        """Its blocks are reused by another request: the daemon reads none of them after this."""
        if self.worker.zeroed and self.handle.given or not self.handle.wait_read(PREEMPT_S):
            self.handle.stop("the request was preempted while its blocks were read")
            self.handle.wait_still(PREEMPT_S * 30)
        self.blocks, self.end, self.layer = (), self.sent, 0
