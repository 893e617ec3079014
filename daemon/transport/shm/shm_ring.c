/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The bounce ring: bytes of memory that cannot be passed as an fd (another process's
 * private memory), or whose mapping is not ready.
 *
 * The source's side makes a small memfd of slots, once for a peer and on first use, and
 * passes it, read-only where GPUs are switched off. Its copy threads gather the stream
 * slice by slice into free slots; DATA announces a full one; the other daemon's threads
 * scatter it into its engine's memory and FREE gives the slot back. So both copies run at
 * the same time, in memory that stays in the caches, and the slots themselves are the
 * flow control. Transfers that need slots take turns.
 *
 * DATA is sent in stream order although several slots of one transfer are filled at once:
 * the receiver insists on the offset that it expects, which is the whole check that each
 * byte arrives exactly once. The memfd is sealed like every other, so its maker cannot
 * cut it under the reader; that it could change it while it is read affects only its own
 * bytes, and writes of the reader there affect only bytes sent to the maker.
 */
#include "daemon/transport/shm/shm_private.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>

#include "daemon/base/mem.h"
#include "daemon/config/config.h"

static const struct sm_state ring_states[SHM_RING_STATES] = {
	[SHM_RING_NONE] = {"none", SM_TO(SHM_RING_MAKING)},
	[SHM_RING_MAKING] = {"making", SM_TO(SHM_RING_NONE) | SM_TO(SHM_RING_READY)},
	[SHM_RING_READY] = {"ready", 0},
};

static const struct sm_table ring_table = {
	.name = "shm ring", .states = ring_states, .count = SHM_RING_STATES};

void shm_ring_init(struct shm_peer *peer)
{
	struct shm_ring *rings[] = {&peer->tx, &peer->rx};

	for (size_t i = 0; i < ARRAY_LEN(rings); i++) {
		*rings[i] = (struct shm_ring){.peer = peer, .fd = -1};
		sm_init(&rings[i]->sm, &ring_table, SHM_RING_NONE);
		list_init(&rings[i]->xfers);
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
	struct shm_xfer *xfer = slot->xfer;

	xfer->landed += slot->len;
	xfer->net.used.staged += slot->len;
	xfer->net.used.descriptors++;
	xfer->net.used.path = "bounce ring";
}

/* ---- our ring ---- */

static void tx_pump(struct shm_peer *peer);

/* Announce full slots to the peer, from the transfer's front on. */
static void announce(struct shm_xfer *xfer)
{
	struct shm_slot *slot;

	while ((slot = list_first(&xfer->slots, struct shm_slot, link)) && slot->full) {
		uint8_t body[16];
		struct cursor c;

		cursor_write(&c, body, sizeof(body));
		cursor_put_u32(&c, slot->index);
		cursor_put_u32(&c, slot->len);
		cursor_put_u64(&c, slot->offset);
		list_remove(&slot->link);
		slot_moved(slot);
		slot->xfer = NULL;
		shm_send(xfer->peer,
			 &(struct shm_frame){.type = SHM_DATA,
					     .flags = xfer->net.ours ? 0 : SHM_FLAG_YOURS,
					     .id = xfer->net.id,
					     .body = body,
					     .body_len = sizeof(body)});
	}
}

static void slot_drop(struct shm_slot *slot)
{
	list_remove(&slot->link);
	slot->xfer = NULL;
	slot->busy = false;
}

static void shm_ring_on_gathered(struct copy_job *job)
{
	struct shm_slot *slot = container_of(job, struct shm_slot, job);
	struct shm_xfer *xfer = slot->xfer;
	struct shm_peer *peer = slot->peer;

	slot->running = false;
	xfer->slots_busy--;
	slot->full = true;
	if (job->result < 0)
		net_xfer_stop(&xfer->net, &job->err);
	if (sm_state(&xfer->net.sm) == NET_XFER_MOVING && shm_peer_ready(peer))
		announce(xfer);
	else
		slot_drop(slot);
	shm_xfer_changed(xfer);
	tx_pump(peer);
}

/* Small at both ends of a transfer, where one side waits for the other's first or
 * last slot; large between, because each costs both loops a few microseconds. */
static uint32_t slot_fill(const struct shm_ring *ring, const struct shm_xfer *xfer)
{
	uint64_t left = xfer->net.bytes - xfer->next;
	uint64_t len = xfer->next < left / 2 ? xfer->next : left / 2;

	if (len < ring->slot_bytes / SHM_SLOT_SLICES)
		len = ring->slot_bytes / SHM_SLOT_SLICES;
	if (len > ring->slot_bytes)
		len = ring->slot_bytes;
	return (uint32_t)(left < len ? left : len);
}

static int slot_gather(struct shm_ring *ring, struct shm_slot *slot,
		       struct shm_xfer *xfer)
{
	int r;

	slot->offset = xfer->next;
	slot->len = slot_fill(ring, xfer);
	slot->job = (struct copy_job){
		.plan = xfer->plan,
		.begin = slot->offset,
		.end = slot->offset + slot->len,
		.src = {.buffers = xfer->buffers, .buffer_count = xfer->src_count},
		.dst = {.linear = slot_bytes(ring, slot)},
		.on_done = shm_ring_on_gathered,
	};
	r = copier_submit(ring->peer->shm->net.base.env.copier, &slot->job);
	if (r < 0)
		return err_pass(r);
	slot->xfer = xfer;
	slot->busy = true;
	slot->running = true;
	slot->full = false;
	xfer->slots_busy++;
	xfer->next += slot->len;
	list_push_back(&xfer->slots, &slot->link);
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

	while (sm_state(&ring->sm) == SHM_RING_READY && shm_peer_ready(peer) &&
	       !list_empty(&ring->xfers) && (slot = slot_idle(ring))) {
		struct shm_xfer *xfer;

		n = list_pop_front(&ring->xfers);
		xfer = list_entry(n, struct shm_xfer, link);
		if (slot_gather(ring, slot, xfer) < 0)
			net_xfer_stop_last(&xfer->net);
		else if (xfer->next < xfer->net.bytes)
			list_push_back(&ring->xfers, n);
	}
}

/* With GPUs the peer may write there, too, but only over bytes sent to itself. A GPU's
 * driver does not pin memory that is mapped read-only (gpu/pin.c), and each byte would
 * need an extra copy. */
static int ring_open(const struct shm_ring *ring)
{
	char path[64];

	snprintf(path, sizeof(path), "/proc/self/fd/%d", ring->memory->fd);
	return open(path,
		    (ring->peer->shm->net.base.env.gpu ? O_RDWR : O_RDONLY) | O_CLOEXEC);
}

static void shm_ring_make(struct offload_job *job)
{
	struct shm_ring *ring = container_of(job, struct shm_ring, job);
	int r = memory_new_linear((uint64_t)ring->slot_count * ring->slot_bytes,
				  &ring->memory);

	if (r == 0) {
		memory_offer(ring->memory, ring->peer->shm->net.base.env.gpu);
		ring->fd = ring_open(ring);
		if (ring->fd < 0)
			r = err_raise_errno(errno, "reopening a bounce ring");
	}
	if (r < 0)
		err_take(&job->err);
	job->result = r;
}

/* Without a ring the transfers waiting for it fail, and the next one that needs a ring
 * tries again. */
static void ring_failed(struct shm_ring *ring, const struct err *err)
{
	struct list *n;

	memory_unref(ring->memory);
	mem_free(ring->slots);
	ring->memory = NULL;
	ring->slots = NULL;
	sm_move(&ring->sm, SHM_RING_NONE);
	while ((n = list_pop_front(&ring->xfers)))
		net_xfer_stop(&list_entry(n, struct shm_xfer, link)->net, err);
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
		sm_move(&ring->sm, SHM_RING_READY);
		cursor_write(&c, body, sizeof(body));
		cursor_put_u32(&c, ring->slot_count);
		cursor_put_u32(&c, ring->slot_bytes);
		shm_send(peer, &(struct shm_frame){.type = SHM_RING,
						   .body = body,
						   .body_len = sizeof(body),
						   .fd = ring->fd});
		ring->fd = -1; /* given away */
		snprintf(peer->net.base.path, sizeof(peer->net.base.path),
			 "memfd + bounce ring");
		tx_pump(peer);
	}
	net_peer_kick(&peer->net);
}

static int ring_begin(struct shm_ring *ring)
{
	uint64_t slot = ring->peer->shm->net.base.env.config->slice_bytes;
	int r;

	if (sm_state(&ring->sm) != SHM_RING_NONE)
		return 0;
	slot = slot < 4096 ? 4096 : slot;
	slot = slot > SHM_SLOT_BYTES_MAX / SHM_SLOT_SLICES ? SHM_SLOT_BYTES_MAX
							   : slot * SHM_SLOT_SLICES;
	ring->slot_count = SHM_RING_SLOTS;
	ring->slot_bytes = (uint32_t)slot;
	r = ring_slots(ring, ring->slot_count);
	if (r < 0)
		return err_pass(r);
	sm_move(&ring->sm, SHM_RING_MAKING);
	ring->job = (struct offload_job){.work = shm_ring_make,
					 .done = ring_made,
					 .principal = offload_peer(ring->peer)};
	offload_submit(ring->peer->shm->net.base.env.offload, &ring->job);
	return 0;
}

int shm_ring_gather(struct shm_xfer *xfer)
{
	struct shm_peer *peer = xfer->peer;
	int r = ring_begin(&peer->tx);

	if (r < 0)
		return err_pass(r);
	xfer->way = SHM_WAY_GATHER;
	list_push_back(&peer->tx.xfers, &xfer->link);
	shm_tick_want(peer->shm);
	tx_pump(peer);
	return 0;
}

int shm_on_free(struct shm_peer *peer, const struct shm_frame *f, struct cursor *c)
{
	struct shm_ring *ring = &peer->tx;
	struct shm_slot *slot;

	(void)c;
	slot = sm_state(&ring->sm) == SHM_RING_READY && f->id < ring->slot_count
		       ? &ring->slots[f->id]
		       : NULL;
	if (!slot || !slot->busy || slot->xfer)
		return err_raise(ERR_PROTO, "of slot %ju, which was not sent",
				 (uintmax_t)f->id);
	slot->busy = false;
	tx_pump(peer);
	return 0;
}

/* ---- their ring ---- */

static void slot_return(struct shm_slot *slot)
{
	slot_drop(slot);
	shm_send(slot->peer, &(struct shm_frame){.type = SHM_FREE, .id = slot->index});
}

static void shm_ring_on_scattered(struct copy_job *job)
{
	struct shm_slot *slot = container_of(job, struct shm_slot, job);
	struct shm_xfer *xfer = slot->xfer;

	slot->running = false;
	xfer->slots_busy--;
	if (job->result == 0)
		slot_moved(slot);
	slot_return(slot);
	if (job->result < 0)
		net_xfer_stop(&xfer->net, &job->err);
	shm_xfer_changed(xfer);
}

static void slot_scatter(struct shm_slot *slot)
{
	struct shm_peer *peer = slot->peer;
	struct shm_xfer *xfer = slot->xfer;

	slot->job = (struct copy_job){
		.plan = xfer->plan,
		.begin = slot->offset,
		.end = slot->offset + slot->len,
		.src = {.linear = slot_bytes(&peer->rx, slot)},
		.dst = {.buffers = xfer->buffers + xfer->src_count,
			.buffer_count = xfer->dst_count},
		.on_done = shm_ring_on_scattered,
	};
	if (copier_submit(peer->shm->net.base.env.copier, &slot->job) < 0) {
		xfer->slots_busy--;
		slot_return(slot);
		net_xfer_stop_last(&xfer->net);
		return;
	}
	slot->running = true;
}

/* Finds the local transfer. *xfer_p NULL: it accepts no more bytes. */
static int data_xfer(struct shm_peer *peer, const struct shm_frame *f,
		     struct shm_xfer **xfer_p)
{
	bool ours = f->flags & SHM_FLAG_YOURS;
	struct net_xfer *net;
	struct shm_xfer *xfer;
	int r = ours ? net_op_find(&peer->net, f->id, &net)
		     : net_inbound_find(&peer->net, f->id, &net);

	*xfer_p = NULL;
	if (r < 0 || !net)
		return err_pass(r);
	xfer = container_of(net, struct shm_xfer, net);
	if (xfer->way != SHM_WAY_SCATTER || (ours && !net->asked))
		return err_raise(ERR_PROTO, "for a transfer that requested none");
	if (sm_state(&net->sm) == NET_XFER_MOVING)
		*xfer_p = xfer;
	return 0;
}

int shm_on_data(struct shm_peer *peer, const struct shm_frame *f, struct cursor *c)
{
	struct shm_ring *ring = &peer->rx;
	uint32_t index = cursor_get_u32(c), len = cursor_get_u32(c);
	uint64_t offset = cursor_get_u64(c);
	struct shm_xfer *xfer = NULL;
	struct shm_slot *slot;
	int r;

	if (sm_state(&ring->sm) == SHM_RING_NONE || index >= ring->slot_count ||
	    len == 0 || len > ring->slot_bytes || ring->slots[index].busy)
		return err_raise(ERR_PROTO, "%u bytes in slot %u", len, index);
	r = data_xfer(peer, f, &xfer);
	if (r < 0)
		return err_pass(r);
	if (xfer && (offset != xfer->next || len > xfer->net.bytes - offset))
		return err_raise(ERR_PROTO, "bytes at %ju, expected at %ju",
				 (uintmax_t)offset, (uintmax_t)xfer->next);
	slot = &ring->slots[index];
	slot->busy = true;
	if (!xfer) {
		slot_return(slot);
		return 0;
	}
	slot->xfer = xfer;
	slot->offset = offset;
	slot->len = len;
	xfer->next += len;
	xfer->slots_busy++;
	if (sm_state(&ring->sm) == SHM_RING_READY)
		slot_scatter(slot);
	else
		list_push_back(&ring->full, &slot->link);
	return 0;
}

static void shm_ring_map(struct offload_job *job)
{
	struct shm_ring *ring = container_of(job, struct shm_ring, job);
	bool writable = ring->peer->shm->net.base.env.gpu &&
			(fcntl(ring->fd, F_GETFL) & O_ACCMODE) == O_RDWR;

	job->result = memory_import_memfd(ring->fd, 0,
					  (uint64_t)ring->slot_count * ring->slot_bytes,
					  writable, &ring->memory);
	if (job->result < 0)
		err_take(&job->err);
	else
		memory_offer(ring->memory, ring->peer->shm->net.base.env.gpu);
}

static void ring_mapped(struct offload_job *job)
{
	struct shm_ring *ring = container_of(job, struct shm_ring, job);
	struct shm_peer *peer = ring->peer;
	struct shm_slot *slot;

	mem_closep(&ring->fd);
	/* idle from here on, regardless of the result */
	sm_move(&ring->sm, SHM_RING_READY);
	net_peer_kick(&peer->net);
	if (job->result < 0) {
		net_peer_fail(&peer->net, &job->err);
		return;
	}
	snprintf(peer->net.base.path, sizeof(peer->net.base.path), "memfd + bounce ring");
	while (shm_peer_ready(peer) &&
	       (slot = list_first(&ring->full, struct shm_slot, link))) {
		list_remove(&slot->link);
		slot_scatter(slot);
	}
}

/* Room for the peer's ring. */
static int ring_expect(struct shm_peer *peer)
{
	return peer->rx.slots ? 0 : err_pass(ring_slots(&peer->rx, SHM_RING_SLOTS_MAX));
}

int shm_on_ring(struct shm_peer *peer, const struct shm_frame *f, struct cursor *c)
{
	struct shm_ring *ring = &peer->rx;
	uint32_t slots = cursor_get_u32(c), bytes = cursor_get_u32(c);
	int r;

	(void)f;
	if (sm_state(&ring->sm) != SHM_RING_NONE)
		return err_raise(ERR_PROTO, "a second ring");
	if (slots == 0 || slots > SHM_RING_SLOTS_MAX || bytes == 0 ||
	    bytes > SHM_SLOT_BYTES_MAX)
		return err_raise(ERR_PROTO, "%u slots of %u bytes", slots, bytes);
	ring->slot_count = slots;
	ring->slot_bytes = bytes;
	r = ring_expect(peer);
	if (r < 0)
		return err_pass(r);
	ring->fd = shm_wire_take_fd(peer);
	sm_move(&ring->sm, SHM_RING_MAKING);
	ring->job = (struct offload_job){.work = shm_ring_map,
					 .done = ring_mapped,
					 .principal = offload_peer(peer)};
	offload_submit(peer->shm->net.base.env.offload, &ring->job);
	return 0;
}

int shm_ring_scatter(struct shm_xfer *xfer)
{
	int r = ring_expect(xfer->peer);

	if (r < 0)
		return err_pass(r);
	xfer->way = SHM_WAY_SCATTER;
	shm_tick_want(xfer->peer->shm);
	return 0;
}

/* ---- both ---- */

/* The transfer stops: it gets no slots, and gives back those that no thread uses. */
void shm_ring_leave(struct shm_xfer *xfer)
{
	bool theirs = xfer->way == SHM_WAY_SCATTER;
	struct shm_ring *ring = theirs ? &xfer->peer->rx : &xfer->peer->tx;

	list_remove(&xfer->link);
	if (!theirs && xfer->way != SHM_WAY_GATHER)
		return;
	for (uint32_t i = 0; ring->slots && i < ring->slot_count; i++) {
		struct shm_slot *slot = &ring->slots[i];

		if (slot->xfer != xfer)
			continue;
		if (slot->running) {
			copier_cancel(xfer->peer->shm->net.base.env.copier, &slot->job);
		} else if (theirs) { /* waits for the mapping */
			xfer->slots_busy--;
			slot_return(slot);
		} else { /* gathered, but after one that was not */
			slot_drop(slot);
		}
	}
}

bool shm_rings_idle(const struct shm_peer *peer)
{
	return sm_state(&peer->tx.sm) != SHM_RING_MAKING &&
	       sm_state(&peer->rx.sm) != SHM_RING_MAKING;
}

void shm_rings_fini(struct shm_peer *peer)
{
	struct shm_ring *rings[] = {&peer->tx, &peer->rx};

	for (size_t i = 0; i < ARRAY_LEN(rings); i++) {
		if (rings[i]->memory)
			memory_release(peer->shm->net.base.env.offload, rings[i]->memory);
		mem_free(rings[i]->slots);
		mem_closep(&rings[i]->fd);
	}
	shm_ring_init(peer);
}
