/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The submission ring (proto/kvd_ring.h), on the engine's side. It is created by the
 * first call that needs it (one round trip) and belongs to the session: after a reconnect
 * the next call creates another.
 *
 * Submitting never waits. If the ring is full, or the daemon could not create one, the
 * entry is sent over the socket (xfer.submit), and so are later ones until the daemon has
 * replied. The daemon keeps the order of both, and the result shows in the same slot.
 *
 * Slots are chosen here, among those that the status page reserves for the engine. A
 * released slot is reused when the daemon has released it (KVD_FLAG_FREE): released ones
 * are queued, and the oldest is checked first, so that the page stays small.
 *
 * The arena is a ring, too: ranges are allocated in order, never across its end, and are
 * free again when the daemon's head has passed their entry. Positions only increase. An
 * empty ring starts at the front again, so that a light load stays in the same few pages,
 * and pages of a large list are released.
 */
#include "lib/client.h"

#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "proto/base64.h"
#include "proto/kvd_ring.h"

#define TRIM_BYTES (UINT64_C(4) << 20) /* of the arena, before pages are given back */
#define LOOKS                                                                     \
	16u			  /* number of released slots to check for a free \
				   * one */
#define SUBMIT_BYTES (700u << 10) /* of payload in a line of the socket */

struct client_ring {
	struct kvd_ring_header *shared;
	size_t shared_bytes;
	char *arena;
	uint64_t arena_bytes, arena_tail, arena_high;
	uint32_t entries;
	uint64_t tail, round; /* round: the tail when the arena was last started at the
			       * front */
	int event_fd;
	uint64_t ends[]; /* of each entry's range */
};

/* ---- slots -------------------------------------------------------------------- */

static uint64_t client_ring_slot_word(const struct client_map *map, uint32_t slot)
{
	return __atomic_load_n(&map->slots[slot].word, __ATOMIC_ACQUIRE);
}

/* Has the daemon released this slot, too? Its word is the last object's then. */
static bool is_free(const struct client_map *map, const struct client_left *left)
{
	uint64_t word = client_ring_slot_word(map, left->slot);

	return !left->gen ||
	       (kvd_word_gen(word) == left->gen && kvd_word_flags(word) & KVD_FLAG_FREE);
}

/* A released slot that is free; false: none among the oldest. */
static bool slot_again(struct kvd_client *client, uint32_t *slot_p)
{
	struct client_slots *s = &client->slots;

	for (uint32_t i = 0; i < s->waiting && i < LOOKS; i++) {
		struct client_left left = s->queue[s->front];

		s->front = (s->front + 1) % s->cap;
		if (is_free(client->map, &left)) {
			s->waiting--;
			*slot_p = left.slot;
			return true;
		}
		s->queue[(s->front + s->waiting - 1) % s->cap] = left;
	}
	return false;
}

static int slots_grow(struct client_slots *s)
{
	uint32_t cap = s->cap ? 2 * s->cap : 256;
	struct client_left *queue = mem_calloc(cap, sizeof(*queue));

	if (!queue)
		return -1;
	for (uint32_t i = 0; s->cap && i < s->waiting; i++)
		queue[i] = s->queue[(s->front + i) % s->cap];
	mem_free(s->queue);
	s->queue = queue;
	s->cap = cap;
	s->front = 0;
	return 0;
}

/* The queue has space for every slot in use. */
static int client_ring_slot(struct kvd_client *client, struct client_slot *slot)
{
	const struct client_map *map = client->map;
	uint32_t first = map->header->engine_first, number;
	struct client_slots *s = &client->slots;

	if (s->out >= s->cap && slots_grow(s) < 0)
		return client_fail_nomem(client);
	if (!slot_again(client, &number)) {
		if (!first || s->fresh >= map->slot_count - first)
			return client_fail(
				client, KVD_E_LIMIT,
				"all %u slots for transfers and lists are in use",
				first ? map->slot_count - first : 0);
		number = first + s->fresh++;
		s->out++;
	}
	slot->slot = number;
	slot->before = kvd_word_gen(client_ring_slot_word(map, number));
	atomic_store(&slot->gen, kvd_ring_next_gen(slot->before));
	slot->numbered = true;
	slot->object.id = KVD_RING_IDS + number;
	return 0;
}

static void slot_leave(struct kvd_client *client, const struct client_slot *slot,
		       uint32_t gen)
{
	struct client_slots *s = &client->slots;

	/* of an earlier session: removed with its page */
	if (!slot->numbered || slot->map != client->map || !s->cap)
		return;
	s->queue[(s->front + s->waiting) % s->cap] =
		(struct client_left){slot->slot, gen};
	s->waiting++;
}

void client_ring_slot_back(struct kvd_client *client, const struct client_slot *slot)
{
	slot_leave(client, slot, atomic_load(&slot->gen));
}

/* ---- creation and end ---------------------------------------------------------- */

static void client_ring_free(struct client_ring *ring)
{
	if (!ring)
		return;
	if (ring->shared)
		munmap(ring->shared, ring->shared_bytes);
	if (ring->arena)
		munmap(ring->arena, ring->arena_bytes);
	mem_closep(&ring->event_fd);
	mem_free(ring);
}

static void *map_shared(int fd, uint64_t bytes)
{
	struct stat st;
	void *at;

	if (!bytes || fstat(fd, &st) < 0 || (uint64_t)st.st_size < bytes ||
	    !(fcntl(fd, F_GET_SEALS) & F_SEAL_SHRINK))
		return NULL;
	at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	return at == MAP_FAILED ? NULL : at;
}

/* Takes the eventfd out of fds on success. */
static struct client_ring *client_ring_map(int fds[3], uint64_t entries,
					   uint64_t arena_bytes)
{
	struct client_ring *ring;

	if (!entries || entries > (1u << 20) || entries & (entries - 1))
		return NULL;
	ring = mem_zalloc(sizeof(*ring) + entries * sizeof(ring->ends[0]));
	if (!ring)
		return NULL;
	ring->event_fd = -1;
	ring->entries = (uint32_t)entries;
	ring->shared_bytes = KVD_RING_HEADER_BYTES + entries * KVD_RING_ENTRY_BYTES;
	ring->arena_bytes = arena_bytes;
	ring->shared = map_shared(fds[0], ring->shared_bytes);
	ring->arena = map_shared(fds[1], arena_bytes);
	if (!ring->shared || !ring->arena || ring->shared->magic != KVD_RING_MAGIC ||
	    ring->shared->version != KVD_RING_VERSION) {
		client_ring_free(ring);
		return NULL;
	}
	ring->event_fd = mem_steal_fd(&fds[2]);
	return ring;
}

/* No ops listed: a daemon without posted rooms. */
static uint64_t reply_ops(const cJSON *reply)
{
	const cJSON *op = NULL;
	uint64_t ops = 0;

	cJSON_ArrayForEach(op, cJSON_GetObjectItemCaseSensitive(reply, "ops"))
		if (cJSON_IsNumber(op) && op->valuedouble >= 0 && op->valuedouble < 64)
			ops |= UINT64_C(1) << (unsigned int)op->valuedouble;
	return ops;
}

static int ring_shared(struct client_request *req, const cJSON *reply)
{
	struct kvd_client *client = req->client;
	struct client_conn *conn = &client->conn;
	uint64_t entries = 0, arena = 0;

	if (!client_get_u64(reply, "entries", &entries) ||
	    !client_get_u64(reply, "arena_bytes", &arena) || conn->in_fd_count < 3)
		return client_fail(client, KVD_E_PROTO,
				   "session.share: the reply lacks its members");
	client->ring_ops = reply_ops(reply);
	client->ring = client_ring_map(conn->in_fds, entries, arena);
	return client->ring ? 0
			    : client_fail(client, KVD_E_PROTO,
					  "session.share: the shared memory has an "
					  "unknown form");
}

/* Once per session: afterwards there is a ring, or the socket is used. */
static void client_ring_make(struct kvd_client *client)
{
	struct client_op op;

	if (client->ring || client->ring_asked == client->serial || client->in_callback)
		return;
	client->ring_asked = client->serial;
	client_op_begin(client, &op, "session.share");
	if (client_op_ask(client, &op, NULL, ring_shared, NULL) < 0)
		client->error = (struct kvd_error){0};
}

void client_ring_lost(struct kvd_client *client)
{
	client_ring_free(client->ring);
	client->ring = NULL;
	client->ring_ops = 0;
	mem_free(client->slots.queue);
	client->slots = (struct client_slots){0};
}

int client_ring_begin(struct kvd_client *client)
{
	int r = client_enter(client, false);

	if (r)
		return r;
	/* a caller that only reads shared memory detects the daemon's end here */
	if (!client->in_callback && !kvd_lost(client) &&
	    client_map_health(client->map) != CLIENT_ALIVE)
		client_conn_turn(client, 0);
	r = client_session_need(client);
	if (r)
		return r;
	client_ring_make(client);
	return client_session_check(client);
}

/* ---- entries ---------------------------------------------------------------------- */

static size_t parts_bytes(const struct client_part *parts, size_t count)
{
	size_t bytes = 0;

	for (size_t i = 0; i < count; i++)
		bytes += parts[i].bytes;
	return bytes;
}

static void parts_copy(char *to, const struct client_part *parts, size_t count)
{
	for (size_t i = 0; i < count; i++) {
		if (parts[i].bytes)
			memcpy(to, parts[i].data, parts[i].bytes);
		to += parts[i].bytes;
	}
}

/* The daemon has processed everything: start at the front. */
static void arena_reset(struct client_ring *ring)
{
	if (ring->arena_high > TRIM_BYTES) {
		madvise(ring->arena, ring->arena_high, MADV_REMOVE);
		ring->arena_high = 0;
	}
	ring->arena_tail = 0;
	ring->round = ring->tail;
}

/* The position of `bytes`; false: no space now. */
static bool arena_take(struct client_ring *ring, size_t bytes, uint64_t *offset_p)
{
	/* acquire: the daemon has read the payloads of all entries before its head */
	uint64_t head = __atomic_load_n(&ring->shared->head, __ATOMIC_ACQUIRE);
	uint64_t at, end, freed = 0;

	if (head == ring->tail)
		arena_reset(ring);
	else if (head > ring->round) /* otherwise that end belongs to the previous
				      * round */
		freed = ring->ends[(head - 1) & (ring->entries - 1)];
	at = ring->arena_tail;
	if (at % ring->arena_bytes + bytes > ring->arena_bytes)
		at += ring->arena_bytes - at % ring->arena_bytes;
	end = at + bytes;
	if (bytes > ring->arena_bytes || end - freed > ring->arena_bytes)
		return false;
	*offset_p = at % ring->arena_bytes;
	ring->arena_tail = end;
	if (*offset_p + bytes > ring->arena_high)
		ring->arena_high = *offset_p + bytes;
	return true;
}

static bool client_ring_append(struct client_ring *ring, struct kvd_ring_entry *entry,
			       const struct client_part *parts, size_t count)
{
	size_t bytes = parts_bytes(parts, count);
	const uint64_t one = 1;

	if (!ring || !kvd_ring_room(ring->shared, ring->entries, ring->tail) ||
	    !arena_take(ring, bytes, &entry->offset))
		return false;
	parts_copy(ring->arena + entry->offset, parts, count);
	ring->ends[ring->tail & (ring->entries - 1)] = ring->arena_tail;
	if (kvd_ring_push(ring->shared, ring->entries, ring->tail++, entry) &&
	    write(ring->event_fd, &one, sizeof(one)) < 0)
		return true; /* EAGAIN: 2^64 - 2 signals are pending already */
	return true;
}

/* An entry refused over the socket is in no slot: the handle has the error. */
static int submitted(struct client_request *req, int result, const cJSON *reply)
{
	struct client_object *object = req->object;

	(void)reply;
	if (!req->late)
		req->client->submits--;
	if (result && object && result != -KVD_E_LOST && result != -KVD_E_NOREPLY &&
	    client_object_phase(object) == CLIENT_READY)
		client_slot_refused(container_of(object, struct client_slot, object));
	return result;
}

static int client_ring_socket_put(struct kvd_client *client,
				  const struct kvd_ring_entry *entry,
				  const struct client_part *parts, size_t count,
				  struct client_object *object)
{
	size_t bytes = parts_bytes(parts, count);
	struct kvd_call call = {.timeout_ms = -1};
	cleanup_free char *raw = NULL, *text = NULL;
	char words[BASE64_CHARS(KVD_RING_ENTRY_BYTES) + 1];
	struct client_op op;
	int r;

	if (bytes > SUBMIT_BYTES)
		return client_fail(client,
				   client->ring && bytes <= client->ring->arena_bytes
					   ? KVD_E_FULL
					   : KVD_E_TOOBIG,
				   "arena: no space for %zu bytes%s", bytes,
				   client->ring ? " now" : "");
	if (client->conn.pending >= client->max_pending ||
	    client->conn.queued_bytes + bytes > client->max_queued_bytes) {
		if (!client->in_callback)
			client_conn_turn(client, 0);
		return client_fail(client, KVD_E_FULL,
				   "the ring and the socket are full");
	}
	raw = mem_zalloc(bytes + 1);
	text = mem_zalloc(BASE64_CHARS(bytes) + 1);
	if (!raw || !text)
		return client_fail_nomem(client);
	parts_copy(raw, parts, count);
	base64_encode(raw, bytes, text);
	base64_encode(entry, sizeof(*entry), words);
	client_op_begin(client, &op, "xfer.submit");
	out_text(&op.text, "entry", words);
	out_text(&op.text, "data", text);
	op.object = object;
	op.finish = submitted;
	op.forced = true;
	r = client_op_run(client, &op, &call);
	if (!r)
		client->submits++;
	return r;
}

int client_ring_put(struct kvd_client *client, struct kvd_ring_entry *entry,
		    const struct client_part *parts, size_t count,
		    struct client_object *object)
{
	/* the daemon processes lines after the ring, but nothing makes the ring wait
	 * for a line: so a caller that used the socket continues to use it until it is
	 * empty */
	if (client->submits && !client->in_callback)
		client_conn_turn(client, 0);
	if (!client->submits && client_ring_append(client->ring, entry, parts, count))
		return 0;
	entry->offset = 0;
	return client_ring_socket_put(client, entry, parts, count, object);
}

/* ---- objects numbered here ------------------------------------------------------- */

int client_slot_make(struct client_slot *slot, struct kvd_ring_entry *entry,
		     const struct client_part *parts, size_t count,
		     struct client_object *object)
{
	int r = client_ring_slot(slot->object.client, slot);

	if (r)
		return r;
	entry->slot = slot->slot;
	entry->gen = atomic_load(&slot->gen);
	client_object_enter(&slot->object, CLIENT_READY);
	r = client_ring_put(slot->object.client, entry, parts, count, object);
	if (r) { /* numbered, but not submitted */
		slot_leave(slot->object.client, slot, 0);
		slot->numbered = false;
		slot->object.id = 0;
	}
	return r;
}

int client_slot_tell(const struct client_slot *slot, unsigned int op)
{
	struct kvd_ring_entry entry = {.op = op, .a = slot->object.id};
	struct kvd_client *client = slot->object.client;
	int r;

	if (!client_object_current(&slot->object))
		return 0; /* removed with its session */
	r = client_ring_begin(client);
	if (!r)
		r = client_ring_put(client, &entry, NULL, 0, NULL);
	return r == -KVD_E_LOST ? 0 : r;
}

int client_slot_release(struct client_slot *slot)
{
	struct client_object *object = &slot->object;
	int r = client_enter(object->client, false);

	/* the daemon may have the slot of an object whose line was refused; one in
	 * flight over the socket is undone with its reply */
	if (!r && (client_object_phase(object) == CLIENT_READY || slot->numbered))
		r = client_slot_tell(slot, KVD_RING_RELEASE);
	if (!r)
		client_object_unref(object);
	return r;
}

/* ---- errors with texts ------------------------------------------------------------- */

void client_slot_refused(struct client_slot *slot)
{
	const struct kvd_error *error = &slot->object.client->error;

	slot->error = error->code;
	mem_free(slot->fault);
	slot->fault = mem_dup(error, sizeof(*error)); /* NULL: only the code is known */
	client_object_enter(&slot->object, CLIENT_FAILED);
}

static int error_reply(struct client_request *req, const cJSON *reply)
{
	struct kvd_error *error = req->out;

	if (cJSON_GetObjectItemCaseSensitive(reply, "error"))
		client_error_parse(error, reply);
	else
		*error = (struct kvd_error){0};
	return 0;
}

int client_slot_error(const struct client_slot *slot, int timeout_ms,
		      struct kvd_error *error_p)
{
	struct kvd_client *client = slot->object.client;
	struct kvd_call call = {.timeout_ms = timeout_ms};
	struct client_op op;
	int r;

	if (client_object_phase(&slot->object) == CLIENT_FAILED) {
		client_error_set(error_p, slot->error ? slot->error : KVD_E_STATE, "%s",
				 slot->object.lost ? "not restored after a restart" : "");
		if (slot->fault)
			*error_p = *slot->fault;
		return 0;
	}
	r = client_begin(client, &call);
	if (!r && (slot->object.serial != client->serial || !slot->object.id))
		r = client_fail(client, KVD_E_STATE,
				"belongs to a session that has ended");
	if (r)
		return r;
	client_op_begin(client, &op, "xfer.state");
	out_number(&op.text, "xfer", slot->object.id);
	return client_op_ask(client, &op, &call, error_reply, error_p);
}
