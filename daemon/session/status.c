/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One memfd a session, mapped for writing here and nowhere else: the engine gets a
 * descriptor that was opened read-only, and F_SEAL_FUTURE_WRITE keeps it from opening a
 * writable one through /proc. Only this daemon writes, so that seal costs nothing here
 * (an engine's cache must not have it: a restarted daemon has to map that again).
 *
 * A slot has one word that decides and further values for information. The word is stored
 * last with release order; the values change under a sequence that is odd meanwhile. When
 * a slot is reused the word moves to the new generation before any value does, so a
 * reader that finds its own generation in the word both before and after reading the
 * values has read those of its own object.
 *
 * Slots are reused late, oldest first: a freed slot waits until REUSE_DEPTH others wait
 * after it, then it is preferred to an unused one. Reuse keeps the page small (one slot
 * is 64 bytes of memory that stays). Late reuse means that a slow reader rarely sees
 * "another generation", and never a wrapped one.
 */
#include "daemon/session/status.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "daemon/base/account.h"
#include "daemon/base/clock.h"
#include "daemon/base/mem.h"
#include "proto/kvd_ring.h"

#define REUSE_DEPTH 1024u
/* Slots in one page of memory, and their bytes with their part of next[]. */
#define PART_SLOTS (4096u / KVD_STATUS_SLOT_BYTES)
#define PART_BYTES (4096u + PART_SLOTS * sizeof(uint32_t))
#define SLOT_NONE UINT32_MAX
#define SLOT_TAKEN (UINT32_MAX - 1)

struct status_page {
	struct kvd_status_header *header;
	struct kvd_status_slot *slot;
	size_t bytes;
	int read_fd;
	uint32_t slots;
	uint32_t own;	/* the daemon numbers the slots below this one */
	uint32_t fresh; /* slots below this one were used at least once */
	/* queue of freed slots; next[i] is SLOT_TAKEN while i is in use, also where
	 * the engine numbers */
	uint32_t *next, head, tail, waiting;
	struct charge *charge; /* the session's; NULL: none */
	uint8_t *charged;      /* a bit for each PART_SLOTS */
};

_Static_assert(sizeof(struct kvd_status_slot) == KVD_STATUS_SLOT_BYTES, "slot size");
_Static_assert(sizeof(struct kvd_status_header) == KVD_STATUS_SLOT_BYTES, "header size");

/* Readers are other processes: every shared store is atomic, and release order keeps
 * each one before the word or sequence that announces it. */
static void status_put(uint64_t *where, uint64_t v)
{
	__atomic_store_n(where, v, __ATOMIC_RELEASE);
}

/* ---- the memfd ---- */

/* Seal and map; `fd` belongs to the caller. */
static int page_map(struct status_page *page, int fd)
{
	char path[32];
	void *base;

	if (ftruncate(fd, (off_t)page->bytes) < 0)
		return err_raise_errno(errno, "status page of %zu bytes", page->bytes);
	base = mmap(NULL, page->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (base == MAP_FAILED)
		return err_raise_errno(errno, "mapping a status page");
	page->header = base;
	page->slot = (struct kvd_status_slot *)(page->header + 1);
	if (fcntl(fd, F_ADD_SEALS,
		  F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_FUTURE_WRITE | F_SEAL_SEAL) < 0)
		return err_raise_errno(errno, "sealing a status page");
	snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
	page->read_fd = open(path, O_RDONLY | O_CLOEXEC);
	if (page->read_fd < 0)
		return err_raise_errno(errno, "%s read-only", path);
	return 0;
}

static int page_init(struct status_page *page, const uint8_t instance[16])
{
	cleanup_close int fd =
		memfd_create("kvd-status", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	int r;

	if (fd < 0)
		return err_raise_errno(errno, "memfd for a status page");
	r = page_map(page, fd);
	if (r < 0)
		return err_pass(r);
	page->header->slots = page->slots;
	page->header->slot_bytes = KVD_STATUS_SLOT_BYTES;
	page->header->heartbeat_interval_ns = STATUS_HEARTBEAT_NS;
	memcpy(page->header->instance, instance, 16);
	status_page_heartbeat(page, clock_ns());
	status_put(&page->header->magic, KVD_STATUS_MAGIC);
	return 0;
}

int status_page_new(uint32_t slots, const uint8_t instance[16],
		    struct status_page **page_p)
{
	struct status_page *page = mem_zalloc(sizeof(*page));
	int r;

	assert(slots > 0 && slots < SLOT_TAKEN);
	if (!page)
		return err_pass(-ENOMEM);
	page->read_fd = -1;
	page->slots = page->own = slots;
	page->bytes = (size_t)(slots + 1) * KVD_STATUS_SLOT_BYTES;
	page->head = page->tail = SLOT_NONE;
	page->next = mem_map(slots * sizeof(*page->next)); /* few slots are ever used */
	page->charged = mem_zalloc(slots / PART_SLOTS / 8 + 1);
	r = page->next && page->charged ? page_init(page, instance) : -ENOMEM;
	if (r < 0) {
		status_page_free(page);
		return err_pass(r);
	}
	*page_p = page;
	return 0;
}

void status_page_free(void *owned)
{
	struct status_page *page = owned;

	if (!page)
		return;
	if (page->header)
		munmap(page->header, page->bytes);
	mem_closep(&page->read_fd);
	mem_unmap(page->next, page->slots * sizeof(*page->next));
	mem_free(page->charged);
	mem_free(page);
}

int status_page_fd(const struct status_page *page)
{
	return page->read_fd;
}

uint32_t status_page_slots(const struct status_page *page)
{
	return page->slots;
}

void status_page_heartbeat(struct status_page *page, uint64_t now_ns)
{
	status_put(&page->header->heartbeat_ns, now_ns);
}

void status_page_silence(struct status_page *page, uint64_t silence_ns)
{
	if (silence_ns / 4 > STATUS_HEARTBEAT_NS)
		page->header->heartbeat_interval_ns = silence_ns / 4;
}

void status_page_divide(struct status_page *page, uint32_t first)
{
	assert(page->fresh == 0 && first <= page->slots);
	page->own = first;
	page->header->engine_first = first;
}

void status_page_charge(struct status_page *page, struct charge *charge)
{
	page->charge = charge;
}

void status_page_notified(struct status_page *page)
{
	status_put(&page->header->notifs, page->header->notifs + 1);
}

void status_page_ended(struct status_page *page)
{
	assert(!page->header->ended);
	__atomic_store_n(&page->header->ended, 1, __ATOMIC_RELEASE);
}

/* ---- slots ---- */

static struct kvd_status_slot *status_slot_at(struct status_page *page, uint32_t slot)
{
	assert(slot < page->slots && page->next[slot] == SLOT_TAKEN);
	return &page->slot[slot];
}

static uint32_t free_pop(struct status_page *page)
{
	uint32_t slot = page->head;

	page->head = page->next[slot];
	if (page->head == SLOT_NONE)
		page->tail = SLOT_NONE;
	page->waiting--;
	return slot;
}

/* Touched memory of a page stays until its session ends. */
static bool part_is_charged(const struct status_page *page, uint32_t slot)
{
	uint32_t part = slot / PART_SLOTS;

	return !page->charge || page->charged[part / 8] & 1u << part % 8;
}

static void part_mark(struct status_page *page, uint32_t slot)
{
	uint32_t part = slot / PART_SLOTS;

	page->charged[part / 8] |= (uint8_t)(1u << part % 8);
}

/* The next unused slot; the account may refuse it. */
static int slot_fresh(struct status_page *page, uint32_t *slot_p)
{
	int r = part_is_charged(page, page->fresh)
			? 0
			: charge_more(page->charge, PART_BYTES);

	if (r < 0)
		return err_pass(r);
	part_mark(page, page->fresh);
	*slot_p = page->fresh++;
	return 0;
}

static int slot_choose(struct status_page *page, uint32_t *slot_p)
{
	int r;

	if (page->waiting <= REUSE_DEPTH && page->fresh < page->own) {
		r = slot_fresh(page, slot_p);
		if (r >= 0 || !page->waiting)
			return err_pass(r);
		err_clear();
	}
	if (!page->waiting)
		return err_raise(ERR_LIMIT, "all %u slots of the status page are in use",
				 page->own);
	*slot_p = free_pop(page);
	return 0;
}

/* A sequence lock with one writer: odd while the values change. Every store is a
 * release, so a reader that loads a new value also sees the odd sequence before it,
 * and reads again. */
static void figures_begin(struct kvd_status_slot *s)
{
	status_put(&s->sequence, s->sequence + 1);
}

static void figures_end(struct kvd_status_slot *s)
{
	status_put(&s->sequence, s->sequence + 1);
}

static void slot_begin(struct status_page *page, uint32_t slot, uint32_t gen,
		       uint64_t object)
{
	struct kvd_status_slot *s = &page->slot[slot];

	page->next[slot] = SLOT_TAKEN;
	/* The word first: a reader of the old object that meets a new value then finds
	 * another generation in the word, and drops its data. */
	status_put(&s->word, kvd_word_make(gen, KVD_BOOTSTRAPPING, 0, 0));
	figures_begin(s);
	status_put(&s->object, object);
	status_put(&s->bytes, 0);
	status_put(&s->total, 0);
	status_put(&s->more[0], 0);
	status_put(&s->more[1], 0);
	status_put(&s->changed_ns, clock_ns());
	figures_end(s);
}

int status_slot_take(struct status_page *page, uint64_t object, uint32_t *slot_p,
		     uint32_t *gen_p)
{
	uint32_t slot = SLOT_NONE;
	int r = slot_choose(page, &slot);

	if (r < 0)
		return err_pass(r);
	*slot_p = slot;
	*gen_p = kvd_ring_next_gen(kvd_word_gen(page->slot[slot].word));
	slot_begin(page, slot, *gen_p, object);
	return 0;
}

int status_slot_claim(struct status_page *page, uint32_t slot, uint32_t gen,
		      uint64_t object)
{
	if (slot < page->own || slot >= page->slots)
		return err_raise(ERR_PROTO, "slot %u does not belong to the engine",
				 slot);
	if (page->next[slot] == SLOT_TAKEN)
		return err_raise(ERR_PROTO, "slot %u is in use", slot);
	if (gen != kvd_ring_next_gen(kvd_word_gen(page->slot[slot].word)))
		return err_raise(ERR_PROTO, "slot %u: generation %u does not follow %u",
				 slot, gen, kvd_word_gen(page->slot[slot].word));
	if (!part_is_charged(page, slot)) { /* its engine is notified in this slot only */
		part_mark(page, slot);
		charge_more_force(page->charge, PART_BYTES);
	}
	slot_begin(page, slot, gen, object);
	return 0;
}

bool status_slot_claimed(const struct status_page *page, uint32_t slot)
{
	return slot >= page->own && slot < page->slots && page->next[slot] == SLOT_TAKEN;
}

uint32_t status_slot_gen(const struct status_page *page, uint32_t slot)
{
	assert(slot < page->slots);
	return kvd_word_gen(page->slot[slot].word);
}

uint32_t status_slot_renew(struct status_page *page, uint32_t slot)
{
	struct kvd_status_slot *s = status_slot_at(page, slot);
	uint32_t gen = kvd_ring_next_gen(kvd_word_gen(s->word));

	status_put(&s->word, kvd_word_make(gen, KVD_TRANSFERRING, 0, 0));
	return gen;
}

void status_slot_release(struct status_page *page, uint32_t slot)
{
	struct kvd_status_slot *s = status_slot_at(page, slot);

	if (slot >= page->own) {
		page->next[slot] = SLOT_NONE;
		status_put(&s->word, s->word | kvd_word_make(0, 0, KVD_FLAG_FREE, 0));
		return;
	}
	/* To the end of the queue: a late reader finds its last state until
	 * REUSE_DEPTH others are released. */
	page->next[slot] = SLOT_NONE;
	if (page->tail == SLOT_NONE)
		page->head = slot;
	else
		page->next[page->tail] = slot;
	page->tail = slot;
	page->waiting++;
}

void status_slot_progress(struct status_page *page, uint32_t slot, uint64_t bytes,
			  uint64_t total)
{
	struct kvd_status_slot *s = status_slot_at(page, slot);

	figures_begin(s);
	status_put(&s->bytes, bytes);
	status_put(&s->total, total);
	figures_end(s);
}

static uint64_t cut(uint64_t figure, uint64_t most)
{
	return figure < most ? figure : most;
}

void status_slot_room(struct status_page *page, uint32_t slot,
		      const struct status_room *room)
{
	struct kvd_status_slot *s = status_slot_at(page, slot);
	uint64_t first = room->first_token == UINT64_MAX
				 ? 0
				 : cut(room->first_token, UINT32_MAX - 1) + 1;

	figures_begin(s);
	status_put(&s->bytes, room->bytes);
	status_put(&s->total, room->total);
	status_put(&s->more[0], first | cut(room->done, UINT16_MAX) << 32);
	status_put(&s->more[1],
		   cut(room->rows, UINT32_MAX) | cut(room->moved_us, UINT32_MAX) << 32);
	figures_end(s);
}

void status_slot_set(struct status_page *page, uint32_t slot, unsigned int state,
		     unsigned int flags, enum err_code error)
{
	struct kvd_status_slot *s = status_slot_at(page, slot);

	assert(state <= KVD_SUCCESS);
	figures_begin(s);
	status_put(&s->changed_ns, clock_ns());
	figures_end(s);
	/* The word last: a load of a terminal state (acquire) includes all values, and
	 * every byte that this daemon wrote for the object before. */
	status_put(&s->word, kvd_word_make(kvd_word_gen(s->word), state, flags, error));
}

void status_slot_call(const struct status_page *page, uint32_t slot)
{
	const uint32_t *state =
		(const uint32_t *)(const void *)&page->slot[slot].word + 1;

	assert(slot < page->slots);
	syscall(SYS_futex, state, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}
