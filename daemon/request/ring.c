/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The engine may write to the ring at any moment, so nothing in it is read twice. An
 * entry is copied out word by word and checked in the copy, the daemon's position comes
 * from its own counter, and lists are read from the arena with pread(). The arena's
 * descriptor is sealed against shrinking and not mapped, so a list of a million rows
 * costs no page faults.
 *
 * Turns. Rings with work are in one queue and get a few entries each, in rotation, until
 * the turn's time is over; the rest of the loop runs in between. An engine that floods
 * its ring delays only itself. An entry that takes long (a large list) runs on a helper
 * while its ring waits, so entries of one session keep their order without further
 * fields.
 *
 * Order with the socket. A line is processed after the entries that were in the ring when
 * it was found, but not after later ones: an engine that posts continuously cannot starve
 * its own commands.
 *
 * Sleep. When the ring is empty: set `asleep`, check once more, then rely on the eventfd.
 * Both sides store before they load with sequential consistency, so at least one of them
 * sees the other. The eventfd's flags are shared with the engine, which may make it
 * blocking and drain it at the wrong moment, so it is read with RWF_NOWAIT.
 */
#include "daemon/request/ring.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

#include "daemon/base/log.h"
#include "daemon/base/mem.h"
#include "daemon/base/context.h"
#include "daemon/request/ring_ops.h"

#define TURN_ENTRIES 256u
#define RING_TURN_ENTRIES 16u

/* kvd->part[MODULE_REQUEST] */
struct rings {
	struct kvd *kvd;
	unsigned int count;
	struct list ready; /* struct ring.link */
	struct loop_defer turn;
	const struct ring_verb *verbs[RING_OPS_MAX];
};

_Static_assert(sizeof(struct kvd_ring_entry) == KVD_RING_ENTRY_BYTES, "entry size");
_Static_assert(sizeof(struct kvd_ring_header) <= KVD_RING_HEADER_BYTES, "header size");
_Static_assert(offsetof(struct kvd_ring_header, tail) == 64, "the engine's line");
_Static_assert(offsetof(struct kvd_ring_header, head) == 128, "the daemon's line");

/* ---- turns ---- */

static void ring_ready(struct ring *ring)
{
	struct rings *rings = ring->rings;

	if (ring->stopped || ring->work || !list_empty(&ring->link))
		return;
	list_push_back(&rings->ready, &ring->link);
	loop_defer(rings->kvd->loop, &rings->turn);
}

static void gate_look(struct ring *ring)
{
	if (!ring->gated || ring->work || ring->head < ring->gate)
		return;
	ring->gated = false;
	ring->gate_open = true;
	if (ring->session->conn)
		ring->session->conn_ops->resume(ring->session->conn);
}

static uint64_t tail_of(const struct ring *ring)
{
	return __atomic_load_n(&ring->shared->tail, __ATOMIC_SEQ_CST);
}

static void copy_out(const struct ring *ring, struct kvd_ring_entry *entry)
{
	uint64_t words[KVD_RING_ENTRY_BYTES / 8];
	const uint64_t *at = (const uint64_t *)(const void *)((const char *)ring->shared +
							      KVD_RING_HEADER_BYTES) +
			     (ring->head & (ring->entries - 1)) * ARRAY_LEN(words);

	/* Each word is loaded once: a second load may return an unchecked value. The
	 * entry is complete because the engine stores the tail, which was loaded
	 * before (acquire), after it. */
	for (size_t i = 0; i < ARRAY_LEN(words); i++)
		words[i] = __atomic_load_n(&at[i], __ATOMIC_RELAXED);
	memcpy(entry, words, sizeof(*entry));
}

static void ring_entry_done(struct ring *ring)
{
	assert(ring->shared);
	ring->head++;
	/* a release: from here on the engine may overwrite the entry and its payload,
	 * which have been read */
	__atomic_store_n(&ring->shared->head, ring->head, __ATOMIC_RELEASE);
	gate_look(ring);
}

/* Number of pending entries; 0: none, and the engine will signal the next one. */
static int entries_waiting(struct ring *ring, uint64_t *count_p)
{
	uint64_t count = tail_of(ring) - ring->head;

	if (count == 0) {
		/* We store `asleep`, then load the tail; the engine stores the tail,
		 * then loads `asleep`. Both are sequentially consistent, so at least
		 * one side sees the other's store and no entry is missed. */
		__atomic_store_n(&ring->shared->asleep, 1, __ATOMIC_SEQ_CST);
		count = tail_of(ring) - ring->head;
		if (count)
			__atomic_store_n(&ring->shared->asleep, 0, __ATOMIC_RELAXED);
	}
	if (count > ring->entries)
		return err_raise(ERR_PROTO,
				 "submission ring: tail is %llu entries ahead of head; "
				 "more than it has",
				 (unsigned long long)count);
	*count_p = count;
	return 0;
}

/* Process a few entries. 1: call again; 0: it sleeps, or waits for a helper. */
static int ring_take(struct ring *ring)
{
	struct kvd_ring_entry entry;
	struct ring_payload arena = {.fd = ring->fds[1], .bytes = ring->arena_bytes};
	uint64_t count = 0;
	int r = entries_waiting(ring, &count);

	if (r < 0 || count == 0)
		return r < 0 ? err_pass(r) : 0;
	for (unsigned int i = 0; r >= 0 && count > 0 && i < RING_TURN_ENTRIES;
	     i++, count--) {
		copy_out(ring, &entry);
		r = ring_op(ring, &entry, &arena);
		if (r == RING_OP_LATER)
			return 0; /* ring_work_end() or ring_resume() follows */
		if (r == 0)
			ring_entry_done(ring);
		if (loop_enough(ring->session->kvd->loop))
			break;
	}
	return r < 0 ? err_pass(r) : 1;
}

static void ring_kill(struct ring *ring)
{
	struct session *session = ring->session;
	struct err why;

	err_take(&why);
	metrics_add(&session->kvd->metrics, METRIC_SESSIONS_KILLED, 1);
	log_warn("ring", session->client, "session closed",
		 "session=%ju pid=%d why=\"%s\"", (uintmax_t)session->id,
		 (int)session->pid, why.text);
	session_end(session, why.text);
}

static void on_turn(struct loop_defer *defer)
{
	struct rings *rings = container_of(defer, struct rings, turn);
	struct loop *loop = rings->kvd->loop;
	unsigned int left = TURN_ENTRIES / RING_TURN_ENTRIES;
	struct list *link;

	while (left-- > 0 && (link = list_pop_front(&rings->ready))) {
		struct ring *ring = list_entry(link, struct ring, link);
		int r = ring_take(ring);

		if (r < 0)
			ring_kill(ring);
		else if (r > 0)
			list_push_back(&rings->ready, &ring->link);
		if (loop_enough(loop))
			break;
	}
	if (!list_empty(&rings->ready))
		loop_defer(loop, &rings->turn);
}

void ring_resume(struct ring *ring)
{
	if (ring->shared)
		ring_ready(ring);
	gate_look(ring);
}

int ring_work_begin(struct ring *ring, void *work)
{
	assert(work && !ring->work);
	ring->work = work;
	return RING_OP_LATER;
}

void ring_work_end(struct ring *ring, bool shared)
{
	ring->work = NULL;
	if (ring->stopped)
		return;
	if (shared)
		ring_entry_done(ring);
	ring_resume(ring);
}

static void ring_on_event(struct loop_fd *watch, int events)
{
	struct ring *ring = container_of(watch, struct ring, watch);
	struct iovec iov;
	uint64_t count;

	(void)events;
	iov = (struct iovec){.iov_base = &count, .iov_len = sizeof(count)};
	/* the tail is authoritative; the engine may have drained the eventfd */
	if (preadv2(watch->fd, &iov, 1, -1, RWF_NOWAIT) < 0 && errno != EAGAIN)
		log_debug("ring", ring->session->client, "eventfd", "errno=%d", errno);
	__atomic_store_n(&ring->shared->asleep, 0, __ATOMIC_SEQ_CST);
	ring_ready(ring);
}

/* ---- order with the socket ---- */

bool ring_gate_passed(struct ring *ring)
{
	uint64_t waiting;

	if (!ring || ring->stopped)
		return true;
	if (ring->gated)
		return false;
	waiting = ring->shared ? tail_of(ring) - ring->head : 0;
	if (ring->gate_open || (!waiting && !ring->work)) {
		ring->gate_open = false;
		return true;
	}
	/* Entries present now precede the line, later ones follow it. An invalid tail
	 * is detected and reported in the ring's own turn. */
	ring->gate = ring->head + (waiting < ring->entries ? waiting : ring->entries);
	ring->gated = true;
	if (waiting)
		ring_ready(ring);
	return false;
}

bool ring_gate_shut(const struct ring *ring)
{
	return ring && !ring->stopped && ring->gated;
}

/* ---- memory ---- */

static int memory_new(const char *name, uint64_t bytes, int *fd_p)
{
	cleanup_close int fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);

	if (fd < 0 || ftruncate(fd, (off_t)bytes) < 0)
		return err_raise_errno(errno, "%s of %llu bytes", name,
				       (unsigned long long)bytes);
	if (fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) < 0)
		return err_raise_errno(errno, "sealing %s", name);
	*fd_p = mem_steal_fd(&fd);
	return 0;
}

static int event_new(int *fd_p)
{
	cleanup_close int fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	uint64_t count;
	struct iovec iov = {.iov_base = &count, .iov_len = sizeof(count)};

	if (fd < 0)
		return err_raise_errno(errno, "eventfd");
	if (preadv2(fd, &iov, 1, -1, RWF_NOWAIT) >= 0 || errno != EAGAIN)
		return err_raise(ERR_IO,
				 "reading an eventfd without blocking needs Linux 5.8; "
				 "use the socket");
	*fd_p = mem_steal_fd(&fd);
	return 0;
}

static size_t ring_bytes(const struct ring *ring)
{
	return KVD_RING_HEADER_BYTES + (size_t)ring->entries * KVD_RING_ENTRY_BYTES;
}

static int ring_map(struct ring *ring)
{
	struct kvd_ring_header *shared =
		mmap(NULL, ring_bytes(ring), PROT_READ | PROT_WRITE, MAP_SHARED,
		     ring->fds[0], 0);

	if (shared == MAP_FAILED)
		return err_raise_errno(errno, "mapping a submission ring");
	*shared = (struct kvd_ring_header){
		.version = KVD_RING_VERSION,
		.entry_bytes = KVD_RING_ENTRY_BYTES,
		.entries = ring->entries,
		.first_slot = SESSION_SLOTS,
		.slot_count = SESSION_ENGINE_SLOTS,
		.arena_bytes = ring->arena_bytes,
		.asleep = 1,
		.magic = KVD_RING_MAGIC,
	};
	ring->shared = shared;
	return 0;
}

static void unshare(struct ring *ring)
{
	loop_fd_stop(&ring->watch);
	if (ring->shared)
		munmap(ring->shared, ring_bytes(ring));
	ring->shared = NULL;
	for (size_t i = 0; i < RING_FDS; i++)
		mem_closep(&ring->fds[i]);
}

int ring_share(struct ring *ring, uint32_t entries, uint64_t arena_bytes)
{
	struct loop *loop = ring->session->kvd->loop;
	int r;

	assert(arena_bytes > 0);
	assert(!ring->shared && entries && !(entries & (entries - 1)));
	ring->entries = entries;
	ring->arena_bytes = arena_bytes;
	r = memory_new("kvd-ring", ring_bytes(ring), &ring->fds[0]);
	if (r >= 0)
		r = memory_new("kvd-arena", arena_bytes, &ring->fds[1]);
	if (r >= 0)
		r = event_new(&ring->fds[2]);
	if (r >= 0)
		r = ring_map(ring);
	if (r >= 0) {
		ring->head = 0;
		loop_fd_init(&ring->watch, loop, ring->fds[2], ring_on_event);
		r = loop_fd_set(&ring->watch, LOOP_READ);
	}
	if (r < 0)
		unshare(ring);
	return r < 0 ? err_pass(r) : 0;
}

/* ---- life ---- */

int rings_new(struct kvd *kvd, void **part_p)
{
	struct rings *rings = mem_zalloc(sizeof(*rings));

	if (!rings)
		return err_pass(-ENOMEM);
	rings->kvd = kvd;
	list_init(&rings->ready);
	loop_defer_init(&rings->turn, on_turn);
	MODULES_EACH(kvd, m)
	{
		for (const struct ring_verb *verb = m->verbs; verb && verb->op; verb++) {
			assert(verb->op < RING_OPS_MAX && !rings->verbs[verb->op]);
			rings->verbs[verb->op] = verb;
		}
	}
	*part_p = rings;
	return 0;
}

void rings_free(void *part)
{
	struct rings *rings = part;

	assert(rings->count == 0);
	loop_defer_cancel(&rings->turn);
	mem_free(rings);
}

struct ring *ring_need(struct session *session)
{
	struct rings *rings = session->kvd->part[MODULE_REQUEST];
	struct ring *ring = ring_of(session);

	if (ring)
		return ring;
	ring = mem_zalloc(sizeof(*ring));
	if (!ring)
		return NULL;
	ring->rings = rings;
	ring->verbs = rings->verbs;
	ring->session = session;
	list_init(&ring->link);
	list_init(&ring->faults);
	for (size_t i = 0; i < RING_FDS; i++)
		ring->fds[i] = -1;
	rings->count++;
	session->part[MODULE_REQUEST] = ring;
	return ring;
}

void ring_stop(struct ring *ring)
{
	if (!ring || ring->stopped)
		return;
	ring->stopped = true;
	list_remove(&ring->link);
	loop_fd_stop(&ring->watch);
}

void ring_free(struct ring *ring)
{
	if (!ring)
		return;
	assert(ring->stopped && !ring->work);
	unshare(ring);
	ring_faults_free(ring);
	ring->session->part[MODULE_REQUEST] = NULL;
	ring->rings->count--;
	mem_free(ring);
}
