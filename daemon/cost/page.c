/* SPDX-License-Identifier: Apache-2.0 */
/*
 * page: rows under sequence locks, one lock a row.
 *
 * Each row has its own sequence (base/seqlock.h), so an update of one peer disturbs no
 * reader of another, and a writer that is killed in the middle breaks one row, not the
 * page: readers give up after a while.
 *
 * Rows are found by a tag, a hash of peer and shape, in a table with open addressing: a
 * look-up walks from the tag's place to a place that was never used. The tag is only a
 * hint: the row itself contains its key, so tags may collide, and a row may be reassigned
 * between the two reads.
 *
 * Readers of another process cannot be trusted with the writer's rows, nor the writer
 * with the readers' time: the page is mapped read-only there, sealed against growing,
 * shrinking and further writable maps, and a reader's loops are bounded by constants of
 * its own, never by a value of the page.
 */
#include "daemon/cost/page.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "daemon/base/err.h"
#include "daemon/base/mem.h"
#include "daemon/base/seqlock.h"

/* A third of the slots stays free: look-ups end at a free one. */
#define PEER_SLOTS 128u
#define SPEED_SLOTS 256u

#define PAGE_MAGIC UINT32_C(0x4356434b)
#define PAGE_VERSION 2u

#define WORDS(type) (sizeof(type) / sizeof(uint64_t))

#define PEER_HEAD_WORDS (offsetof(struct cost_peer, links) / sizeof(uint64_t))

struct peer_row {
	uint64_t sequence;
	uint64_t words[WORDS(struct cost_peer)];
};

struct speed_row {
	uint64_t sequence;
	uint64_t words[WORDS(struct cost_speed)];
};

struct home_row {
	uint64_t sequence;
	uint64_t words[WORDS(struct cost_home)];
};

_Static_assert(sizeof(struct cost_peer) % sizeof(uint64_t) == 0, "rows are words");
_Static_assert(sizeof(struct cost_speed) % sizeof(uint64_t) == 0, "rows are words");
_Static_assert(sizeof(struct cost_home) % sizeof(uint64_t) == 0, "rows are words");

struct shared {
	uint32_t magic, version;
	uint64_t bytes; /* sizeof(struct shared): of the same version of the layout */
	uint64_t peer_tags[PEER_SLOTS];
	uint64_t speed_tags[SPEED_SLOTS];
	struct peer_row peers[PEER_SLOTS];
	struct speed_row speeds[SPEED_SLOTS];
	struct home_row home;
};

struct cost_page {
	struct shared *shared;
	int read_fd;
	bool mapped;		    /* else on the heap */
	unsigned int peers, speeds; /* of a writer: rows in use */
	uint64_t reused;	    /* rows of speeds, for others */
};

const uint8_t cost_self[COST_KEY_BYTES];

/* ---- tags ---- */

#define TAG_FREE UINT64_C(0)	/* never used: no row is beyond */
#define TAG_DROPPED UINT64_C(1) /* was used: rows may be beyond */

/* FNV-1a by 64-bit integers. */
static uint64_t cost_tag_add(uint64_t tag, const void *bytes, size_t len)
{
	const uint8_t *at = bytes;

	for (; len >= sizeof(uint32_t); len -= sizeof(uint32_t), at += sizeof(uint32_t)) {
		uint32_t word;

		memcpy(&word, at, sizeof(word));
		tag = (tag ^ word) * UINT64_C(0x100000001b3);
	}
	return tag;
}

static uint64_t cost_tag_of(const uint8_t *key)
{
	return cost_tag_add(UINT64_C(0xcbf29ce484222325), key, COST_KEY_BYTES) | 2;
}

static uint64_t cost_speed_tag(const uint8_t *key, const struct cost_shape *shape,
			       uint32_t kind)
{
	uint64_t tag = cost_tag_add(cost_tag_of(key), shape, sizeof(*shape));

	return cost_tag_add(tag, &kind, sizeof(kind)) | 2;
}

/* The i-th possible place of a row of this tag. */
static unsigned int cost_tag_place(uint64_t tag, unsigned int i, unsigned int count)
{
	return ((unsigned int)(tag >> 32) + i) % count;
}

static void cost_tag_drop(uint64_t *tags, unsigned int at, unsigned int count)
{
	seqlock_put(&tags[at], TAG_DROPPED);
	if (tags[(at + 1) % count] != TAG_FREE)
		return;
	/* nothing is beyond: nor is there for those before it */
	for (unsigned int i = 0; i < count && tags[at] == TAG_DROPPED; i++) {
		seqlock_put(&tags[at], TAG_FREE);
		at = (at + count - 1) % count;
	}
}

/* ---- the page ---- */

static int cost_page_share(struct cost_page *page, int fd)
{
	char path[32];
	void *base;

	if (ftruncate(fd, sizeof(struct shared)) < 0)
		return err_raise_errno(errno, "cost page of %zu bytes",
				       sizeof(struct shared));
	base = mmap(NULL, sizeof(struct shared), PROT_READ | PROT_WRITE, MAP_SHARED, fd,
		    0);
	if (base == MAP_FAILED)
		return err_raise_errno(errno, "mapping a cost page");
	page->shared = base;
	page->mapped = true;
	if (fcntl(fd, F_ADD_SEALS,
		  F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_FUTURE_WRITE | F_SEAL_SEAL) < 0)
		return err_raise_errno(errno, "sealing a cost page");
	snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
	page->read_fd = open(path, O_RDONLY | O_CLOEXEC);
	if (page->read_fd < 0)
		return err_raise_errno(errno, "%s read-only", path);
	return 0;
}

static int cost_page_init(struct cost_page *page, bool shared)
{
	cleanup_close int fd = -1;
	int r;

	if (!shared) {
		page->shared = mem_zalloc(sizeof(struct shared));
		if (!page->shared)
			return -err_errno(ERR_NOMEM);
	} else {
		fd = memfd_create("kvd-cost", MFD_CLOEXEC | MFD_ALLOW_SEALING);
		if (fd < 0)
			return err_raise_errno(errno, "memfd for a cost page");
		r = cost_page_share(page, fd);
		if (r < 0)
			return err_pass(r);
	}
	page->shared->bytes = sizeof(struct shared);
	page->shared->version = PAGE_VERSION;
	page->shared->magic = PAGE_MAGIC;
	return 0;
}

int cost_page_new(bool shared, struct cost_page **page_p)
{
	struct cost_page *page = mem_zalloc(sizeof(*page));
	int r;

	*page_p = NULL;
	if (!page)
		return -err_errno(ERR_NOMEM);
	page->read_fd = -1;
	r = cost_page_init(page, shared);
	if (r < 0) {
		cost_page_free(page);
		return err_pass(r);
	}
	*page_p = page;
	return 0;
}

void cost_page_free(struct cost_page *page)
{
	if (!page)
		return;
	if (page->mapped)
		munmap(page->shared, sizeof(struct shared));
	else
		mem_free(page->shared);
	mem_closep(&page->read_fd);
	mem_free(page);
}

int cost_page_fd(const struct cost_page *page)
{
	return page->read_fd;
}

static const char *cost_page_fault(int fd, const struct shared *shared)
{
	int seals = fcntl(fd, F_GET_SEALS);

	if (seals < 0 || !(seals & F_SEAL_SHRINK))
		return "it is not sealed against shrinking";
	if (shared->magic != PAGE_MAGIC)
		return "wrong magic";
	if (shared->version != PAGE_VERSION || shared->bytes != sizeof(*shared))
		return "unsupported version";
	return NULL;
}

int cost_page_map(int fd, struct cost_page **page_p)
{
	struct cost_page *page;
	const char *fault;
	struct stat st;
	void *base;

	*page_p = NULL;
	if (fstat(fd, &st) < 0 || (uint64_t)st.st_size != sizeof(struct shared))
		return err_raise(ERR_PROTO, "cost page: its size is not %zu bytes",
				 sizeof(struct shared));
	base = mmap(NULL, sizeof(struct shared), PROT_READ, MAP_SHARED, fd, 0);
	if (base == MAP_FAILED)
		return err_raise_errno(errno, "mapping a cost page");
	fault = cost_page_fault(fd, base);
	page = fault ? NULL : mem_zalloc(sizeof(*page));
	if (!page) {
		munmap(base, sizeof(struct shared));
		return fault ? err_raise(ERR_PROTO, "cost page: %s", fault)
			     : -err_errno(ERR_NOMEM);
	}
	*page = (struct cost_page){.shared = base, .read_fd = -1, .mapped = true};
	*page_p = page;
	return 0;
}

/* ---- rows, written ---- */

/* The row with this tag whose first `len` bytes are `key`, else a vacant one. */
static int cost_page_slot(const uint64_t *tags, unsigned int count, uint64_t tag,
			  const void *words, size_t stride, const void *key, size_t len)
{
	int vacant = -1;

	for (unsigned int i = 0; i < count; i++) {
		unsigned int at = cost_tag_place(tag, i, count);
		const uint8_t *row = (const uint8_t *)words + at * stride;

		if (tags[at] == tag && memcmp(row, key, len) == 0)
			return (int)at;
		if (tags[at] <= TAG_DROPPED && vacant < 0)
			vacant = (int)at;
		if (tags[at] == TAG_FREE)
			break;
	}
	return vacant;
}

int cost_page_set_peer(struct cost_page *page, const struct cost_peer *peer)
{
	struct shared *s = page->shared;
	uint64_t tag = cost_tag_of(peer->key);
	int i = cost_page_slot(s->peer_tags, PEER_SLOTS, tag, s->peers[0].words,
			       sizeof(s->peers[0]), peer, sizeof(peer->key));

	if (i < 0 || (s->peer_tags[i] != tag && page->peers == COST_PAGE_PEERS))
		return err_raise(ERR_LIMIT, "cost page: %u peers", COST_PAGE_PEERS);
	page->peers += s->peer_tags[i] != tag;
	seqlock_write(&s->peers[i].sequence, s->peers[i].words, peer, WORDS(*peer));
	seqlock_put(&s->peer_tags[i], tag);
	return 0;
}

static int cost_page_speed_slot(const struct shared *s, uint64_t tag,
				const struct cost_speed *speed)
{
	return cost_page_slot(s->speed_tags, SPEED_SLOTS, tag, s->speeds[0].words,
			      sizeof(s->speeds[0]), speed,
			      offsetof(struct cost_speed, compute));
}

/* The time of its measurement, or of its last use by a round. */
static uint32_t cost_page_speed_reported(const struct speed_row *row)
{
	struct cost_speed speed;

	memcpy(&speed, row->words, sizeof(speed)); /* the writer's own */
	return speed.attend.at_s > speed.compute.fixed.at_s ? speed.attend.at_s
							    : speed.compute.fixed.at_s;
}

static void cost_page_reuse(struct cost_page *page)
{
	struct shared *s = page->shared;
	uint32_t oldest_s = 0;
	int oldest = -1;

	for (unsigned int i = 0; i < SPEED_SLOTS; i++) {
		uint32_t reported_s;

		if (s->speed_tags[i] <= TAG_DROPPED)
			continue;
		reported_s = cost_page_speed_reported(&s->speeds[i]);
		if (oldest >= 0 && reported_s >= oldest_s)
			continue;
		oldest = (int)i;
		oldest_s = reported_s;
	}
	assert(oldest >= 0);
	cost_tag_drop(s->speed_tags, (unsigned int)oldest, SPEED_SLOTS);
	page->speeds--;
	page->reused++;
}

uint64_t cost_page_reused(const struct cost_page *page)
{
	return page->reused;
}

int cost_page_set_speed(struct cost_page *page, const struct cost_speed *speed)
{
	struct shared *s = page->shared;
	uint64_t tag = cost_speed_tag(speed->key, &speed->shape, speed->kind);
	int i = cost_page_speed_slot(s, tag, speed);

	if (i < 0 || (s->speed_tags[i] != tag && page->speeds == COST_PAGE_SPEEDS)) {
		cost_page_reuse(page);
		i = cost_page_speed_slot(s, tag, speed);
	}
	assert(i >= 0);
	page->speeds += s->speed_tags[i] != tag;
	seqlock_write(&s->speeds[i].sequence, s->speeds[i].words, speed, WORDS(*speed));
	seqlock_put(&s->speed_tags[i], tag);
	return 0;
}

void cost_page_set_home(struct cost_page *page, const struct cost_home *home)
{
	seqlock_write(&page->shared->home.sequence, page->shared->home.words, home,
		      WORDS(*home));
}

void cost_page_drop(struct cost_page *page, const uint8_t key[COST_KEY_BYTES])
{
	struct shared *s = page->shared;

	for (unsigned int i = 0; i < PEER_SLOTS; i++)
		if (s->peer_tags[i] > TAG_DROPPED &&
		    memcmp(s->peers[i].words, key, COST_KEY_BYTES) == 0) {
			cost_tag_drop(s->peer_tags, i, PEER_SLOTS);
			page->peers--;
		}
	for (unsigned int i = 0; i < SPEED_SLOTS; i++)
		if (s->speed_tags[i] > TAG_DROPPED &&
		    memcmp(s->speeds[i].words, key, COST_KEY_BYTES) == 0) {
			cost_tag_drop(s->speed_tags, i, SPEED_SLOTS);
			page->speeds--;
		}
}

/* ---- rows, read ---- */

/* The row's head has the number of links; only those are read. A change in between is
 * detected by reading the head again. */
static int cost_page_read_peer(const struct peer_row *row, struct cost_peer *peer)
{
	for (unsigned int tries = 0; tries < 4; tries++) {
		uint32_t links;

		if (!seqlock_read(&row->sequence, row->words, peer, PEER_HEAD_WORDS))
			return COST_PAGE_BUSY;
		links = peer->link_count;
		if (links > COST_LINKS_MAX) /* a page is input, too */
			links = COST_LINKS_MAX;
		if (!seqlock_read(&row->sequence, row->words, peer,
				  PEER_HEAD_WORDS + links * WORDS(struct cost_link)))
			return COST_PAGE_BUSY;
		if (peer->link_count <= links)
			return 0;
	}
	return COST_PAGE_BUSY;
}

int cost_page_peer(const struct cost_page *page, const uint8_t key[COST_KEY_BYTES],
		   struct cost_peer *peer)
{
	const struct shared *s = page->shared;
	uint64_t tag = cost_tag_of(key);

	for (unsigned int i = 0; i < PEER_SLOTS; i++) {
		unsigned int at = cost_tag_place(tag, i, PEER_SLOTS);
		uint64_t found = seqlock_get(&s->peer_tags[at]);

		if (found == TAG_FREE)
			break;
		if (found != tag)
			continue;
		if (cost_page_read_peer(&s->peers[at], peer))
			return COST_PAGE_BUSY;
		if (memcmp(peer->key, key, COST_KEY_BYTES) == 0)
			return 0;
	}
	return COST_PAGE_NONE;
}

static int cost_page_read_speed(const struct shared *s, const uint8_t *key,
				const struct cost_shape *shape, uint32_t kind,
				struct cost_speed *speed)
{
	uint64_t tag = cost_speed_tag(key, shape, kind);

	for (unsigned int i = 0; i < SPEED_SLOTS; i++) {
		unsigned int at = cost_tag_place(tag, i, SPEED_SLOTS);
		uint64_t found = seqlock_get(&s->speed_tags[at]);

		if (found == TAG_FREE)
			break;
		if (found != tag)
			continue;
		if (!seqlock_read(&s->speeds[at].sequence, s->speeds[at].words, speed,
				  WORDS(*speed)))
			return COST_PAGE_BUSY;
		if (memcmp(speed->key, key, COST_KEY_BYTES) == 0 &&
		    memcmp(&speed->shape, shape, sizeof(*shape)) == 0 &&
		    speed->kind == kind)
			return 0;
	}
	return COST_PAGE_NONE;
}

int cost_page_speed(const struct cost_page *page, const uint8_t key[COST_KEY_BYTES],
		    const struct cost_shape *shape, uint32_t kind,
		    struct cost_speed *speed)
{
	static const struct cost_shape any;
	int r = cost_page_read_speed(page->shared, key, shape, kind, speed);

	return r == COST_PAGE_NONE
		       ? cost_page_read_speed(page->shared, key, &any, COST_HOST, speed)
		       : r;
}

bool cost_page_speed_at(const struct cost_page *page, unsigned int *i_p,
			struct cost_speed *speed)
{
	const struct shared *s = page->shared;

	while (*i_p < SPEED_SLOTS) {
		unsigned int at = (*i_p)++;

		if (seqlock_get(&s->speed_tags[at]) > TAG_DROPPED &&
		    seqlock_read(&s->speeds[at].sequence, s->speeds[at].words, speed,
				 WORDS(*speed)))
			return true;
	}
	return false;
}

int cost_page_home(const struct cost_page *page, struct cost_home *home)
{
	const struct home_row *row = &page->shared->home;

	return seqlock_read(&row->sequence, row->words, home, WORDS(*home))
		       ? 0
		       : COST_PAGE_BUSY;
}

/* ---- presets ---- */

int cost_page_preset(const char *name, struct cost_page **page_p)
{
	const struct cost_preset *preset = cost_preset_find(name);
	struct cost_page *page;
	struct cost_home home;
	struct cost_peer peer = {.link_count = 1, .requesters = {1, 1}};
	struct cost_speed speed = {.kind = COST_HOST};
	int r;

	*page_p = NULL;
	if (!preset)
		return err_raise(ERR_NOTFOUND, "fabric: \"%.64s\" is unknown", name);
	r = cost_page_new(false, &page);
	if (r < 0)
		return err_pass(r);
	peer.links[0] = cost_preset_link(preset);
	speed.compute = cost_preset_compute(preset);
	home = cost_preset_home();
	r = cost_page_set_peer(page, &peer);
	r = r < 0 ? r : cost_page_set_speed(page, &speed);
	if (r < 0) {
		cost_page_free(page);
		return err_pass(r);
	}
	cost_page_set_home(page, &home);
	*page_p = page;
	return 0;
}
