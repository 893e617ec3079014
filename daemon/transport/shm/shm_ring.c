/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The bounce ring: bytes of memory that cannot be passed as an fd (another
 * process's private memory), or whose mapping is not there yet.
 *
 * Who holds the source makes a small memfd of slots, once for a peer and on
 * first use, and passes it, for reading alone where GPUs are switched off. Its copy
 * threads gather the stream slice by slice into free slots; DATA names a full one; the
 * other daemon's threads scatter it into its engine's memory and FREE gives the slot
 * back. So both copies run at the same time, in memory that stays in the caches, and the
 * slots themselves are the flow control. Transfers that want slots take turns.
 *
 * DATA leaves in stream order although several slots of one transfer are filled
 * at once: the receiver insists on the offset that it expects, which is the
 * whole check that no byte comes twice or never. The memfd is sealed like every
 * other, so its maker cannot cut it under the reader; that he could change it
 * while it is read hurts only bytes of his own, and what the reader writes there only
 * what he himself is sent.
 */
#include "daemon/transport/shm/shm_private.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "daemon/base/mem.h"
#include "daemon/config/config.h"

void shm_ring_init(struct shm_peer *peer)
{
	struct shm_ring *rings[] = {&peer->tx, &peer->rx};

	for (size_t i = 0; i < ARRAY_LEN(rings); i++) {
		*rings[i] = (struct shm_ring){.peer = peer, .fd = -1};
		list_init(&rings[i]->flows);
		list_init(&rings[i]->full);
	}
}

static int ring_slots(struct shm_ring *ring, uint32_t count)
{
	ring->slots = mem_calloc(count, sizeof(*ring->slots));
	if (!ring->slots)
		return err_pass(-ENOMEM);
	for (uint32_t i = 0; i < count; i++) {
		ring->slots[i].index = i;
		ring->slots[i].peer = ring->peer;
		list_init(&ring->slots[i].link);
	}
	return 0;
}

static uint8_t *slot_bytes(struct shm_ring *ring, const struct shm_slot *slot)
{
	return ring->memory->base + (size_t)slot->index * ring->slot_bytes;
}

/* Bytes of a slot have left, or are in place. */
static void slot_moved(const struct shm_slot *slot)
{
	struct shm_flow *flow = slot->flow;

	flow->landed += slot->len;
	flow->used.staged += slot->len;
	flow->used.descriptors++;
	flow->used.path = "bounce ring";
}

/* ---- our ring ---- */

static void tx_pump(struct shm_peer *peer);

/* Tell the peer of full slots, from the flow's front on. */
static void flow_announce(struct shm_flow *flow)
{
	struct shm_peer *peer = flow->peer;
	struct shm_slot *slot;

	while ((slot = list_first(&flow->slots, struct shm_slot, link)) && slot->full) {
		uint8_t body[16];
		struct cursor c;

		cursor_write(&c, body, sizeof(body));
		cursor_put_u32(&c, slot->index);
		cursor_put_u32(&c, slot->len);
		cursor_put_u64(&c, slot->offset);
		list_remove(&slot->link);
		slot_moved(slot);
		slot->flow = NULL;
		shm_send(peer, &(struct shm_frame){.type = SHM_DATA,
						   .flags = flow->wire_flags,
						   .id = flow->wire_id,
						   .body = body,
						   .body_len = sizeof(body)});
	}
}

static void slot_drop(struct shm_slot *slot)
{
	list_remove(&slot->link);
	slot->flow = NULL;
	slot->busy = false;
}

static void on_gathered(struct copy_job *job)
{
	struct shm_slot *slot = container_of(job, struct shm_slot, job);
	struct shm_flow *flow = slot->flow;
	struct shm_peer *peer = slot->peer;

	slot->running = false;
	flow->slots_busy--;
	if (job->result < 0 && flow->result == 0) {
		flow->result = job->result;
		flow->err = job->err;
	}
	slot->full = true;
	if (flow->result < 0 || flow->stopping || !shm_peer_live(peer)) {
		shm_flow_stop(flow);
		slot_drop(slot);
	} else {
		flow_announce(flow);
	}
	flow->on_change(flow);
	tx_pump(peer);
}

/* Small at both ends of a transfer, where one side waits for the other's first or
 * last slot; large between, because each costs both loops a few microseconds. */
static uint32_t slot_fill(const struct shm_ring *ring, const struct shm_flow *flow)
{
	uint64_t left = flow->plan->bytes - flow->next;
	uint64_t len = flow->next < left / 2 ? flow->next : left / 2;

	if (len < ring->slot_bytes / SHM_SLOT_SLICES)
		len = ring->slot_bytes / SHM_SLOT_SLICES;
	if (len > ring->slot_bytes)
		len = ring->slot_bytes;
	return (uint32_t)(left < len ? left : len);
}

static int slot_gather(struct shm_ring *ring, struct shm_slot *slot,
		       struct shm_flow *flow)
{
	int r;

	slot->offset = flow->next;
	slot->len = slot_fill(ring, flow);
	slot->job = (struct copy_job){
		.plan = flow->plan,
		.begin = slot->offset,
		.end = slot->offset + slot->len,
		.src = {.buffers = flow->buffers, .buffer_count = flow->src_count},
		.dst = {.linear = slot_bytes(ring, slot)},
		.on_done = on_gathered,
	};
	r = copier_submit(ring->peer->shm->base.env.copier, &slot->job);
	if (r < 0)
		return err_pass(r);
	slot->flow = flow;
	slot->busy = true;
	slot->running = true;
	slot->full = false;
	flow->slots_busy++;
	flow->next += slot->len;
	list_push_back(&flow->slots, &slot->link);
	return 0;
}

static struct shm_slot *slot_idle(struct shm_ring *ring)
{
	for (uint32_t i = 0; i < ring->slot_count; i++)
		if (!ring->slots[i].busy)
			return &ring->slots[i];
	return NULL;
}

static void tx_pump(struct shm_peer *peer)
{
	struct shm_ring *ring = &peer->tx;
	struct shm_slot *slot;
	struct list *n;

	while (ring->state == SHM_RING_READY && shm_peer_live(peer) &&
	       !list_empty(&ring->flows) && (slot = slot_idle(ring))) {
		struct shm_flow *flow;

		n = list_pop_front(&ring->flows);
		flow = list_entry(n, struct shm_flow, link);
		if (slot_gather(ring, slot, flow) < 0) {
			shm_flow_fail(flow);
			flow->on_change(flow);
		} else if (flow->next < flow->plan->bytes) {
			list_push_back(&ring->flows, n);
		}
	}
}

/* With GPUs the peer may write there, too: what is on its way to himself. Memory that is
 * mapped for reading alone a GPU's driver does not pin (gpu/pin.c), and each byte would
 * take one step more. */
static int ring_open(const struct shm_ring *ring)
{
	char path[64];

	snprintf(path, sizeof(path), "/proc/self/fd/%d", ring->memory->fd);
	return open(path,
		    (ring->peer->shm->base.env.gpu ? O_RDWR : O_RDONLY) | O_CLOEXEC);
}

static void ring_make(struct offload_job *job)
{
	struct shm_ring *ring = container_of(job, struct shm_ring, job);
	int r = memory_new_linear((uint64_t)ring->slot_count * ring->slot_bytes,
				  &ring->memory);

	if (r == 0) {
		memory_offer(ring->memory, ring->peer->shm->base.env.gpu);
		ring->fd = ring_open(ring);
		if (ring->fd < 0)
			r = err_raise_errno(errno, "opening a bounce ring anew");
	}
	if (r < 0)
		err_take(&job->err);
	job->result = r;
}

/* Without a ring what waits for it fails, and the next that needs one tries. */
static void ring_failed(struct shm_ring *ring, const struct err *err)
{
	struct list *n;

	memory_unref(ring->memory);
	mem_free(ring->slots);
	ring->memory = NULL;
	ring->slots = NULL;
	ring->state = SHM_RING_NONE;
	while ((n = list_pop_front(&ring->flows))) {
		struct shm_flow *flow = list_entry(n, struct shm_flow, link);

		err_reraise(err);
		shm_flow_fail(flow);
		flow->on_change(flow);
	}
}

static void ring_made(struct offload_job *job)
{
	struct shm_ring *ring = container_of(job, struct shm_ring, job);
	struct shm_peer *peer = ring->peer;
	uint8_t body[8];
	struct cursor c;

	if (job->result < 0) {
		ring_failed(ring, &job->err);
	} else {
		ring->state = SHM_RING_READY;
		cursor_write(&c, body, sizeof(body));
		cursor_put_u32(&c, ring->slot_count);
		cursor_put_u32(&c, ring->slot_bytes);
		shm_send(peer, &(struct shm_frame){.type = SHM_RING,
						   .body = body,
						   .body_len = sizeof(body),
						   .fd = ring->fd});
		ring->fd = -1; /* given away */
		snprintf(peer->base.path, sizeof(peer->base.path), "memfd + bounce ring");
		tx_pump(peer);
	}
	shm_peer_kick(peer);
}

static int ring_begin(struct shm_ring *ring)
{
	const struct config *config = ring->peer->shm->base.env.config;
	uint64_t slot = config ? config->slice_bytes : COPY_SLICE_BYTES;
	int r;

	if (ring->state != SHM_RING_NONE)
		return 0;
	slot = slot < 4096 ? 4096 : slot;
	slot = slot > SHM_SLOT_BYTES_MAX / SHM_SLOT_SLICES ? SHM_SLOT_BYTES_MAX
							   : slot * SHM_SLOT_SLICES;
	ring->slot_count = SHM_RING_SLOTS;
	ring->slot_bytes = (uint32_t)slot;
	r = ring_slots(ring, ring->slot_count);
	if (r < 0)
		return err_pass(r);
	ring->state = SHM_RING_MAKING;
	ring->job = (struct offload_job){.work = ring_make, .done = ring_made};
	offload_submit(ring->peer->shm->base.env.offload, &ring->job);
	return 0;
}

int shm_ring_gather(struct shm_flow *flow, uint64_t id, bool theirs)
{
	struct shm_peer *peer = flow->peer;
	int r = ring_begin(&peer->tx);

	if (r < 0)
		return err_pass(r);
	flow->mode = SHM_FLOW_GATHER;
	flow->wire_id = id;
	flow->wire_flags = theirs ? SHM_FLAG_YOURS : 0;
	list_push_back(&peer->tx.flows, &flow->link);
	shm_tick_want(peer->shm);
	tx_pump(peer);
	return 0;
}

int shm_on_free(struct shm_peer *peer, const struct shm_frame *f, struct cursor *c)
{
	struct shm_ring *ring = &peer->tx;
	struct shm_slot *slot;

	(void)c;
	slot = ring->state == SHM_RING_READY && f->id < ring->slot_count
		       ? &ring->slots[f->id]
		       : NULL;
	if (!slot || !slot->busy || slot->flow)
		return err_raise(ERR_PROTO, "of slot %ju, which was not sent",
				 (uintmax_t)f->id);
	slot->busy = false;
	tx_pump(peer);
	return 0;
}

/* ---- their ring ---- */

static void slot_return(struct shm_slot *slot)
{
	list_remove(&slot->link);
	slot->flow = NULL;
	slot->busy = false;
	shm_send(slot->peer, &(struct shm_frame){.type = SHM_FREE, .id = slot->index});
}

static void on_scattered(struct copy_job *job)
{
	struct shm_slot *slot = container_of(job, struct shm_slot, job);
	struct shm_flow *flow = slot->flow;

	slot->running = false;
	flow->slots_busy--;
	if (job->result < 0 && flow->result == 0) {
		flow->result = job->result;
		flow->err = job->err;
	}
	if (job->result == 0)
		slot_moved(slot);
	slot_return(slot);
	flow->on_change(flow);
}

static void slot_scatter(struct shm_slot *slot)
{
	struct shm_peer *peer = slot->peer;
	struct shm_flow *flow = slot->flow;

	slot->job = (struct copy_job){
		.plan = flow->plan,
		.begin = slot->offset,
		.end = slot->offset + slot->len,
		.src = {.linear = slot_bytes(&peer->rx, slot)},
		.dst = {.buffers = flow->buffers + flow->src_count,
			.buffer_count = flow->dst_count},
		.on_done = on_scattered,
	};
	if (copier_submit(peer->shm->base.env.copier, &slot->job) < 0) {
		flow->slots_busy--;
		slot_return(slot);
		shm_flow_fail(flow);
		flow->on_change(flow);
		return;
	}
	slot->running = true;
}

/* Which of our transfers is it? *flow_p NULL: one that takes no bytes any more. */
static int data_flow(struct shm_peer *peer, const struct shm_frame *f,
		     struct shm_flow **flow_p)
{
	struct shm_flow *flow = NULL;
	bool late = false;

	if (f->flags & SHM_FLAG_YOURS) {
		struct shm_op *so = shm_op_find(peer, f->id);

		flow = so ? &so->flow : NULL;
	} else {
		struct shm_in *in = shm_in_find(peer, f->id, &late);

		flow = in ? &in->flow : NULL;
	}
	if (!flow && !late)
		return err_raise(ERR_PROTO, "for transfer %#jx, which is not open",
				 (uintmax_t)f->id);
	if (flow && flow->mode != SHM_FLOW_SCATTER)
		return err_raise(ERR_PROTO, "for a transfer that asked for none");
	*flow_p = flow && !flow->stopping && flow->result == 0 ? flow : NULL;
	return 0;
}

int shm_on_data(struct shm_peer *peer, const struct shm_frame *f, struct cursor *c)
{
	struct shm_ring *ring = &peer->rx;
	uint32_t index = cursor_get_u32(c), len = cursor_get_u32(c);
	uint64_t offset = cursor_get_u64(c);
	struct shm_flow *flow = NULL;
	struct shm_slot *slot;
	int r;

	if (ring->state == SHM_RING_NONE || index >= ring->slot_count || len == 0 ||
	    len > ring->slot_bytes || ring->slots[index].busy)
		return err_raise(ERR_PROTO, "%u bytes in slot %u", len, index);
	r = data_flow(peer, f, &flow);
	if (r < 0)
		return err_pass(r);
	if (flow && (offset != flow->next || len > flow->plan->bytes - offset))
		return err_raise(ERR_PROTO, "bytes from %ju, not from %ju",
				 (uintmax_t)offset, (uintmax_t)flow->next);
	slot = &ring->slots[index];
	slot->busy = true;
	if (!flow) {
		slot_return(slot);
		return 0;
	}
	slot->flow = flow;
	slot->offset = offset;
	slot->len = len;
	flow->next += len;
	flow->slots_busy++;
	if (ring->state == SHM_RING_READY)
		slot_scatter(slot);
	else
		list_push_back(&ring->full, &slot->link);
	return 0;
}

static void ring_map(struct offload_job *job)
{
	struct shm_ring *ring = container_of(job, struct shm_ring, job);
	bool writable = ring->peer->shm->base.env.gpu &&
			(fcntl(ring->fd, F_GETFL) & O_ACCMODE) == O_RDWR;

	job->result = memory_import_memfd(ring->fd, 0,
					  (uint64_t)ring->slot_count * ring->slot_bytes,
					  writable, &ring->memory);
	if (job->result < 0)
		err_take(&job->err);
	else
		memory_offer(ring->memory, ring->peer->shm->base.env.gpu);
}

static void ring_mapped(struct offload_job *job)
{
	struct shm_ring *ring = container_of(job, struct shm_ring, job);
	struct shm_peer *peer = ring->peer;
	struct shm_slot *slot;

	mem_closep(&ring->fd);
	ring->fd = -1;
	/* idle from here on, whatever came of it */
	ring->state = SHM_RING_READY;
	shm_peer_kick(peer);
	if (job->result < 0) {
		err_reraise(&job->err);
		shm_peer_fail(peer);
		return;
	}
	snprintf(peer->base.path, sizeof(peer->base.path), "memfd + bounce ring");
	while (shm_peer_live(peer) &&
	       (slot = list_first(&ring->full, struct shm_slot, link))) {
		list_remove(&slot->link);
		slot_scatter(slot);
	}
}

int shm_on_ring(struct shm_peer *peer, const struct shm_frame *f, struct cursor *c)
{
	struct shm_ring *ring = &peer->rx;
	uint32_t slots = cursor_get_u32(c), bytes = cursor_get_u32(c);
	int r;

	(void)f;
	if (ring->state != SHM_RING_NONE)
		return err_raise(ERR_PROTO, "a second one");
	if (slots == 0 || slots > SHM_RING_SLOTS_MAX || bytes == 0 ||
	    bytes > SHM_SLOT_BYTES_MAX)
		return err_raise(ERR_PROTO, "%u slots of %u bytes", slots, bytes);
	ring->slot_count = slots;
	ring->slot_bytes = bytes;
	r = shm_ring_expect(peer);
	if (r < 0)
		return err_pass(r);
	ring->fd = shm_wire_take_fd(peer);
	ring->state = SHM_RING_MAKING;
	ring->job = (struct offload_job){.work = ring_map, .done = ring_mapped};
	offload_submit(peer->shm->base.env.offload, &ring->job);
	return 0;
}

int shm_ring_expect(struct shm_peer *peer)
{
	return peer->rx.slots ? 0 : err_pass(ring_slots(&peer->rx, SHM_RING_SLOTS_MAX));
}

void shm_ring_scatter(struct shm_flow *flow)
{
	flow->mode = SHM_FLOW_SCATTER;
	shm_tick_want(flow->peer->shm);
}

/* ---- both ---- */

static void slots_leave(struct shm_ring *ring, struct shm_flow *flow, bool theirs)
{
	struct copier *copier = ring->peer->shm->base.env.copier;

	for (uint32_t i = 0; ring->slots && i < ring->slot_count; i++) {
		struct shm_slot *slot = &ring->slots[i];

		if (slot->flow != flow)
			continue;
		if (slot->running) {
			copier_cancel(copier, &slot->job);
		} else if (theirs) { /* waits for the mapping */
			flow->slots_busy--;
			slot_return(slot);
		} else { /* gathered, but after one that was not */
			slot_drop(slot);
		}
	}
}

void shm_ring_leave(struct shm_flow *flow)
{
	list_remove(&flow->link);
	if (flow->mode == SHM_FLOW_GATHER)
		slots_leave(&flow->peer->tx, flow, false);
	else
		slots_leave(&flow->peer->rx, flow, true);
}

bool shm_rings_idle(const struct shm_peer *peer)
{
	return peer->tx.state != SHM_RING_MAKING && peer->rx.state != SHM_RING_MAKING;
}

void shm_rings_fini(struct shm_peer *peer)
{
	struct shm_ring *rings[] = {&peer->tx, &peer->rx};

	for (size_t i = 0; i < ARRAY_LEN(rings); i++) {
		if (rings[i]->memory)
			memory_release(peer->shm->base.env.offload, rings[i]->memory);
		mem_free(rings[i]->slots);
		mem_closep(&rings[i]->fd);
	}
	shm_ring_init(peer);
}
