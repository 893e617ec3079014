/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The status page, read without a system call and without a lock. The daemon writes one
 * 64-bit word per room last, with release order; a reader loads it with acquire order, so
 * a state is never newer than the values. The word has the slot's generation: a slot
 * reused by another room reads as KVD_E_GONE, never as that room's state.
 *
 * The page cannot show that its writer has stopped. Its header has a heartbeat. If a room
 * is unfinished and the heartbeat old, a reader shows it as aborting, with its pages in
 * use, because copies and queue pairs of a frozen daemon may still move bytes (invariant
 * 1); its error gives the reason. Only the end of the daemon's process proves that they
 * cannot: then the kernel has closed its queue pairs and unmapped the engine's memory. A
 * pidfd shows that permanently, so only then is failure reported (invariant 4). It is
 * checked at most every 10 ms, and only while the heartbeat is old or the connection has
 * ended: the only system call here. If a word was unfinished and the process dead, the
 * word is read once more, because the daemon may have finished the room just before its
 * end.
 *
 * A map outlives its session: rooms of an ended session keep a reference, and the daemon
 * writes their last states through its own mapping.
 */
#include "daemon/base/clock.h"
#include "lib/client.h"
#include "proto/kvd_ring.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define LOOK_NS 1000000u /* of a wait: then the connection is checked, too */

#define HEARTBEATS_MISSED 4u /* missed heartbeat intervals after which it is old */
#define ASK_EVERY_NS UINT64_C(10000000)
#define FIGURES_TRIES 16u

static const char *client_status_map_check(int fd, size_t bytes, uint32_t slots,
					   const void *base)
{
	const struct kvd_status_header *header = base;
	int seals = fcntl(fd, F_GET_SEALS);

	if (seals < 0 || !(seals & F_SEAL_SHRINK))
		return "it is not sealed against shrinking";
	if (header->magic != KVD_STATUS_MAGIC)
		return "its magic number is wrong";
	if (header->slots != slots || header->slot_bytes != KVD_STATUS_SLOT_BYTES ||
	    sizeof(*header) + (size_t)slots * KVD_STATUS_SLOT_BYTES > bytes)
		return "its header contradicts the hello reply";
	if (!header->heartbeat_interval_ns)
		return "it has no heartbeat interval";
	return NULL;
}

int client_map_new(int page_fd, size_t bytes, uint32_t slots, int pidfd,
		   struct client_map **map_p, const char **why)
{
	struct client_map *map;
	struct stat st;
	void *base;

	*why = "it is shorter than the hello reply says";
	if (fstat(page_fd, &st) < 0 || bytes < sizeof(*map->header) ||
	    (uint64_t)st.st_size < bytes)
		return -KVD_E_PROTO;
	*why = "it cannot be mapped";
	base = mmap(NULL, bytes, PROT_READ, MAP_SHARED, page_fd, 0);
	if (base == MAP_FAILED)
		return -KVD_E_PROTO;
	*why = client_status_map_check(page_fd, bytes, slots, base);
	map = *why ? NULL : mem_zalloc(sizeof(*map));
	if (!map) {
		munmap(base, bytes);
		return *why ? -KVD_E_PROTO : -KVD_E_NOMEM;
	}
	map->refs = 1;
	map->header = base;
	map->slots = (const void *)((const char *)base + sizeof(*map->header));
	map->bytes = bytes;
	map->slot_count = slots;
	map->heartbeat_interval_ns = map->header->heartbeat_interval_ns;
	map->pidfd = pidfd;
	*map_p = map;
	return 0;
}

void client_map_unref(struct client_map *map)
{
	if (!map || --map->refs)
		return;
	munmap((void *)(uintptr_t)map->header, map->bytes);
	mem_closep(&map->pidfd);
	mem_free(map);
}

uint64_t client_until_ns(const struct kvd_client *client, int timeout_ms)
{
	int ms = timeout_ms ? timeout_ms : client->timeout_ms;

	return ms < 0 ? UINT64_MAX : clock_ns() + (uint64_t)ms * 1000000u;
}

static bool map_process_ended(struct client_map *map, uint64_t now)
{
	uint64_t asked = atomic_load_explicit(&map->asked_ns, memory_order_relaxed);
	struct pollfd p = {.fd = map->pidfd, .events = POLLIN};

	if (map->pidfd < 0 || (asked && now - asked < ASK_EVERY_NS))
		return false;
	atomic_store_explicit(&map->asked_ns, now, memory_order_relaxed);
	if (poll(&p, 1, 0) != 1 || !(p.revents & POLLIN))
		return false;
	atomic_store_explicit(&map->dead, true, memory_order_release);
	return true;
}

enum client_health client_map_health(struct client_map *map)
{
	uint64_t heartbeat, now;
	bool old;

	if (atomic_load_explicit(&map->dead, memory_order_acquire))
		return CLIENT_DEAD;
	heartbeat = __atomic_load_n(&map->header->heartbeat_ns, __ATOMIC_RELAXED);
	now = clock_ns();
	old = now > heartbeat &&
	      now - heartbeat > HEARTBEATS_MISSED * map->heartbeat_interval_ns;
	if ((old || atomic_load_explicit(&map->suspect, memory_order_relaxed)) &&
	    map_process_ended(map, now))
		return CLIENT_DEAD;
	return old ? CLIENT_STALE : CLIENT_ALIVE;
}

bool client_map_silence(struct client_map *map, char text[CLIENT_SILENCE_MAX])
{
	uint64_t heartbeat, now;

	*text = '\0';
	if (!map || client_map_health(map) != CLIENT_STALE)
		return false;
	heartbeat = __atomic_load_n(&map->header->heartbeat_ns, __ATOMIC_RELAXED);
	now = clock_ns();
	snprintf(text, CLIENT_SILENCE_MAX,
		 "the local daemon does not respond (no heartbeat for %.1f s)",
		 now > heartbeat ? (double)(now - heartbeat) / 1e9 : 0.0);
	return true;
}

static uint64_t word_load(const struct kvd_status_slot *s)
{
	return __atomic_load_n(&s->word, __ATOMIC_ACQUIRE);
}

static bool word_terminal(uint64_t word)
{
	unsigned int state = kvd_word_state(word);

	return state == KVD_FAILED || state == KVD_SUCCESS;
}

/*
 * The connection ended before the reply to an opening: the daemon may have created the
 * object. Its slot, if there is one, names the object.
 */
static bool slot_may_live(const struct client_slot *slot)
{
	const struct client_map *map = slot->map;
	uint32_t count = map->header->engine_first;

	/* numbered by the daemon; slots after those are numbered by the client */
	if (!count || count > map->slot_count)
		count = map->slot_count;
	for (uint32_t i = 0; i < count; i++) {
		const struct kvd_status_slot *s = &map->slots[i];
		uint64_t word = word_load(s);

		if (kvd_word_gen(word) && !word_terminal(word) &&
		    __atomic_load_n(&s->object, __ATOMIC_RELAXED) == slot->number)
			return true;
	}
	return false;
}

/* A word for an object without a slot (yet). */
static uint64_t word_without_slot(const struct client_slot *slot, enum client_phase phase)
{
	if (phase == CLIENT_FAILED || !slot->map)
		return kvd_word_make(0, KVD_FAILED, 0, (unsigned int)slot->error);
	if (client_map_health(slot->map) == CLIENT_DEAD)
		return kvd_word_make(0, KVD_FAILED, 0, KVD_E_DEAD);
	if (phase == CLIENT_MAKING)
		return kvd_word_make(0, KVD_BOOTSTRAPPING, 0, 0);
	if (atomic_load_explicit(&slot->map->ended, memory_order_acquire) &&
	    !slot_may_live(slot))
		return kvd_word_make(0, KVD_FAILED, 0, KVD_E_LOST);
	return kvd_word_make(0, KVD_TRANSFERRING, KVD_FLAG_ABORTING, 0);
}

static uint32_t gen_load(const struct client_slot *slot)
{
	return atomic_load_explicit(&slot->gen, memory_order_acquire);
}

/* Ours, or ours when the daemon takes the pending entry of the ring. */
static bool word_ours(const struct client_slot *slot, uint64_t word, uint32_t gen)
{
	/* if created and posted at once, both may be pending */
	return kvd_word_gen(word) == gen ||
	       (slot->numbered && kvd_word_gen(word) == slot->before) ||
	       (atomic_load(&slot->posted) &&
		kvd_ring_next_gen(kvd_word_gen(word)) == gen);
}

/* The word of `gen`. An entry that the daemon has not processed shows its initial
 * state, or failed if it never will be. */
static uint64_t word_of(const struct client_slot *slot, uint32_t gen)
{
	const struct kvd_status_slot *at = &slot->map->slots[slot->slot];
	uint64_t word = word_load(at);

	if (kvd_word_gen(word) == gen || !word_ours(slot, word, gen))
		return word;
	if (__atomic_load_n(&slot->map->header->ended, __ATOMIC_ACQUIRE)) {
		/* `ended` is the daemon's last store: a word loaded after it is final,
		 * the one above may not be. */
		word = word_load(at);
		if (kvd_word_gen(word) != gen)
			return kvd_word_make(gen, KVD_FAILED, 0, KVD_E_LOST);
		return word;
	}
	return kvd_word_make(
		gen, atomic_load(&slot->posted) ? KVD_TRANSFERRING : KVD_BOOTSTRAPPING, 0,
		0);
}

/* for many slots read at once */
struct health_known {
	struct client_map *map;
	enum client_health health;
};

/* The word to show to an engine; false: the slot is another object's. */
static bool client_status_slot_word(const struct client_slot *slot,
				    struct health_known *known, uint64_t *word_p)
{
	enum client_phase phase = client_object_phase(&slot->object);
	uint32_t gen = gen_load(slot);
	enum client_health health;
	uint64_t word;

	if (phase == CLIENT_CLOSED)
		return false;
	if (phase != CLIENT_READY) {
		*word_p = word_without_slot(slot, phase);
		return true;
	}
	word = word_of(slot, gen);
	if (kvd_word_gen(word) != gen && gen != gen_load(slot)) { /* posted meanwhile */
		gen = gen_load(slot);
		word = word_of(slot, gen);
	}
	if (kvd_word_gen(word) == gen && !word_terminal(word)) {
		if (known->map != slot->map)
			*known = (struct health_known){slot->map,
						       client_map_health(slot->map)};
		health = known->health;
		if (health == CLIENT_DEAD) {
			/* Once more: the daemon may have stored the end between the
			 * load and its exit. There are no stores from here on, so this
			 * load is final. */
			word = word_of(slot, gen);
			if (kvd_word_gen(word) == gen && !word_terminal(word))
				word = kvd_word_make(gen, KVD_FAILED, 0, KVD_E_DEAD);
		} else if (health == CLIENT_STALE ||
			   kvd_word_flags(word) & KVD_FLAG_ABORTING) {
			unsigned int error = kvd_word_error(word);

			word = kvd_word_make(
				gen, KVD_TRANSFERRING,
				kvd_word_flags(word) | KVD_FLAG_ABORTING,
				error || health != CLIENT_STALE ? error : KVD_E_NOREPLY);
		}
	}
	*word_p = word;
	return kvd_word_gen(word) == gen;
}

int client_slot_state(const struct client_slot *slot)
{
	struct health_known known = {0};
	uint64_t word;

	return client_status_slot_word(slot, &known, &word) ? (int)kvd_word_state(word)
							    : -KVD_E_GONE;
}

/* Handles and slots of thousands are not in a cache: prefetch them. */
#define AHEAD 8u

size_t client_slot_states(const struct client_slot *(*slot_at)(const void *of, size_t i),
			  const void *of, size_t count, int *states)
{
	struct health_known known = {0};
	const struct client_slot *slot;
	size_t ended = 0;
	uint64_t word;

	for (size_t i = 0; i < count; i++) {
		if (i + 2 * AHEAD < count) {
			slot = slot_at(of, i + 2 * AHEAD);
			__builtin_prefetch(&slot->object.phase);
			__builtin_prefetch(&slot->slot);
		}
		if (i + AHEAD < count) {
			slot = slot_at(of, i + AHEAD);
			if (client_object_phase(&slot->object) == CLIENT_READY)
				__builtin_prefetch(&slot->map->slots[slot->slot]);
		}
		states[i] = client_status_slot_word(slot_at(of, i), &known, &word)
				    ? (int)kvd_word_state(word)
				    : -KVD_E_GONE;
		ended += states[i] <= KVD_FAILED || states[i] == KVD_SUCCESS;
	}
	return ended;
}

/* The progress values: a sequence that is odd while they change. If the writer never
 * pauses, this call returns no values after 16 tries. */
static void slot_figures(const struct kvd_status_slot *s, struct kvd_room_status *st)
{
	for (unsigned int i = 0; i < FIGURES_TRIES; i++) {
		uint64_t before = __atomic_load_n(&s->sequence, __ATOMIC_ACQUIRE);
		/* acquire: the second read of the sequence stays after these */
		uint64_t bytes = __atomic_load_n(&s->bytes, __ATOMIC_ACQUIRE);
		uint64_t total = __atomic_load_n(&s->total, __ATOMIC_ACQUIRE);
		uint64_t changed_ns = __atomic_load_n(&s->changed_ns, __ATOMIC_ACQUIRE);
		uint64_t more[2] = {__atomic_load_n(&s->more[0], __ATOMIC_ACQUIRE),
				    __atomic_load_n(&s->more[1], __ATOMIC_ACQUIRE)};

		if (before & 1 ||
		    before != __atomic_load_n(&s->sequence, __ATOMIC_RELAXED))
			continue;
		st->bytes = bytes;
		st->total = total;
		st->changed_ns = changed_ns;
		st->first_token = kvd_more_first_token(more);
		st->done = (uint16_t)kvd_more_done(more);
		st->rows = kvd_more_rows(more);
		st->moved_us = kvd_more_moved_us(more);
		return;
	}
}

int client_slot_read(const struct client_slot *slot, struct kvd_room_status *status_p)
{
	bool ready = client_object_phase(&slot->object) == CLIENT_READY;
	struct kvd_room_status st = {.first_token = -1};
	struct health_known known = {0};
	const struct kvd_status_slot *at;
	struct kvd_error error;
	uint64_t word;

	if (!client_status_slot_word(slot, &known, &word))
		return -KVD_E_GONE;
	st.state = (int)kvd_word_state(word);
	st.flags = kvd_word_flags(word);
	st.error = (int)kvd_word_error(word);
	if (st.error) {
		client_error_set(&error, st.error, "%s", "");
		st.retryable = error.retryable;
	}
	at = ready ? &slot->map->slots[slot->slot] : NULL;
	if (ready && kvd_word_gen(word_load(at)) == kvd_word_gen(word)) {
		slot_figures(at, &st);
		/* the values belong to this object only if the word still does */
		if (kvd_word_gen(word_load(at)) != kvd_word_gen(word))
			return -KVD_E_GONE;
	}
	*status_p = st;
	return 0;
}

/* The next pause of a wait, longer than the one before. */
static struct timespec pause_next(struct kvd_client *client, uint64_t *pause_ns)
{
	uint64_t ns = *pause_ns ? *pause_ns : 20000;

	/* or the daemon has exited: shown by its connection, not by the page */
	if (client->conn.pending || kvd_lost(client) || ns >= LOOK_NS)
		client_conn_turn(client, 0);
	/* a sixteenth of all previous pauses: the delay in detecting an event without
	 * a signal */
	*pause_ns = ns < LOOK_NS ? ns + ns / 16 : ns;
	return (struct timespec){.tv_nsec = (long)ns};
}

void client_pause(struct kvd_client *client, uint64_t *pause_ns)
{
	struct timespec pause = pause_next(client, pause_ns);

	nanosleep(&pause, NULL);
}

/* The half of the word that a state change modifies. */
static const uint32_t *slot_state_at(const struct client_slot *slot)
{
	return (const uint32_t *)(const void *)&slot->map->slots[slot->slot].word + 1;
}

int client_slot_wait(struct client_slot *slot, int state, int timeout_ms)
{
	struct kvd_client *client = slot->object.client;
	uint64_t until = client_until_ns(client, timeout_ms), pause_ns = 0;
	struct timespec pause;
	int r = client_enter(client, true);
	char silence[CLIENT_SILENCE_MAX];

	if (r)
		return r;
	for (;;) {
		uint32_t seen = __atomic_load_n(slot_state_at(slot), __ATOMIC_ACQUIRE);

		r = client_slot_state(slot);
		if (r <= 0 || r >= state)
			return r;
		if (clock_ns() >= until) {
			bool silent = client_map_silence(slot->map, silence);

			return client_fail(client, KVD_E_NOREPLY, "still %s%s%s",
					   kvd_state_name(r), silent ? ": " : "",
					   silence);
		}
		/* The daemon ends it early if it signals waiters (status_slot_call()). */
		pause = pause_next(client, &pause_ns);
		syscall(SYS_futex, slot_state_at(slot), FUTEX_WAIT, seen, &pause, NULL,
			0);
	}
}

/* Take slot and gen from a reply; false: the reply lacks them. */
static bool client_slot_attach(struct client_slot *slot, const cJSON *reply)
{
	uint64_t index, gen;

	if (!client_get_u64(reply, "slot", &index) ||
	    !client_get_u64(reply, "gen", &gen) || !slot->map ||
	    index >= slot->map->slot_count || !(uint32_t)gen)
		return false;
	slot->slot = (uint32_t)index;
	atomic_store_explicit(&slot->gen, (uint32_t)gen, memory_order_release);
	return true;
}

int client_slot_made(struct client_request *req, int result, const cJSON *reply,
		     void (*undo)(struct client_slot *slot))
{
	struct client_slot *slot = container_of(req->object, struct client_slot, object);

	if (!result && !client_slot_attach(slot, reply)) {
		undo(slot);
		client_object_enter(req->object, CLIENT_DOUBT);
		return client_fail(req->client, KVD_E_PROTO,
				   "the reply names no slot of the page");
	}
	if (!result) {
		client_object_enter(req->object, CLIENT_READY);
		if (req->late || req->object->refs == 1)
			undo(slot);
	} else if (result == -KVD_E_NOREPLY || result == -KVD_E_LOST) {
		client_object_enter(req->object, CLIENT_DOUBT);
	} else {
		client_slot_refused(slot);
	}
	return result;
}

void client_slot_init(struct client_slot *slot, uint64_t number)
{
	slot->map = slot->object.client->map;
	slot->map->refs++;
	slot->number = number;
}

void client_slot_fini(struct client_slot *slot)
{
	client_ring_slot_back(slot->object.client, slot);
	mem_free(slot->fault);
	client_map_unref(slot->map);
}
