/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fuzz_ring: an engine with its own idea of the submission ring. The input says what it
 * gives: entries that are right but for what the input changes, in slots and generations
 * that follow or do not, with an arena of the input's bytes, tails that jump; and, when
 * it wishes, a second thread writes over entries, arena, tail and `asleep` while the
 * daemon reads them. What that thread writes comes from the input, when it writes it from
 * the scheduler.
 *
 * Whatever comes: the session ends for it or lives on, and so does everything that it
 * made; memory outside of its regions is not touched (the sanitizer's part).
 *
 * Input: [how][seed][steps of [what] and what it takes].
 */
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "daemon/base/cursor.h"
#include "daemon/base/err.h"
#include "daemon/base/log.h"
#include "daemon/base/mem.h"
#include "daemon/session/status.h"
#include "daemon/request/ring.h"
#include "proto/kvd_status.h"
#include "tests/fuzz/lib/fuzz.h"
#include "tests/lib/cluster_store.h"
#include "tests/lib/xfer_pair.h"

#define ENTRIES 16u
#define ARENA_BYTES 65536u
#define RING_BYTES (KVD_RING_HEADER_BYTES + ENTRIES * KVD_RING_ENTRY_BYTES)
#define STEPS_MAX 64u
#define CHUNK_TOKENS 16u
#define CHUNK_IDS 6u /* that there are */

enum how { HOW_THREAD = 1, HOW_TAIL = 2, HOW_ARENA = 4 };

static struct {
	struct pair *pair;
	bool begun;
	uint64_t other_space; /* pair->me's, of the same chunks */
	unsigned int others;  /* sessions */
	/* of one input */
	struct session *session;
	uint64_t session_id, attach, region, pool, space, attend;
	struct kvd_ring_header *ring; /* the engine's mapping */
	uint8_t *arena;
	uint64_t tail, lists[2], hold;
	uint32_t slot, gen;
	/* the other thread's */
	bool stop;
	uint8_t how;
	uint64_t seed;
} w;

static void need(bool holds)
{
	if (!holds)
		abort();
}

static bool is_alive(void)
{
	const struct session *session;

	list_foreach(session, &w.pair->c.nodes[0].kvd.sessions, link)
		if (session->id == w.session_id)
			return !session->ending;
	return false;
}

static void turns(unsigned int n)
{
	while (n-- > 0)
		loop_turn(w.pair->c.loop, 0);
}

/* ---- the other thread ---- */

static uint64_t draw(void)
{
	w.seed ^= w.seed << 13;
	w.seed ^= w.seed >> 7;
	w.seed ^= w.seed << 17;
	return w.seed;
}

static void *meddle(void *arg)
{
	uint32_t *words = (uint32_t *)(void *)w.ring,
		 *arena = (uint32_t *)(void *)w.arena;
	uint64_t r;

	(void)arg;
	while (!__atomic_load_n(&w.stop, __ATOMIC_RELAXED)) {
		r = draw();
		if (r & 1 && w.how & HOW_ARENA)
			__atomic_store_n(&arena[(r >> 8) % 1024],
					 (uint32_t)(r >> 32) & 0xffff, __ATOMIC_RELAXED);
		else if (r & 2 && w.how & HOW_TAIL)
			__atomic_store_n(&w.ring->tail,
					 __atomic_load_n(&w.tail, __ATOMIC_RELAXED) +
						 (r >> 60),
					 __ATOMIC_RELAXED);
		else if (r & 4)
			__atomic_store_n(&w.ring->asleep, (uint32_t)(r >> 8),
					 __ATOMIC_RELAXED);
		else /* a word of an entry */
			__atomic_store_n(
				&words[KVD_RING_HEADER_BYTES / 4 +
				       (r >> 8) % (ENTRIES * KVD_RING_ENTRY_BYTES / 4)],
				(uint32_t)(r >> 40) & 15, __ATOMIC_RELAXED);
	}
	return NULL;
}

/* ---- one engine ---- */

static uint64_t open_space(struct session *session, uint64_t pool)
{
	return cluster_number(cluster_call(&w.pair->c, session,
					   "{'cmd':'space.open','pool':%llu,'model':'m',"
					   "'scheme':'s','tokens':%u}",
					   (unsigned long long)pool, CHUNK_TOKENS),
			      "space");
}

/* What the next input would find. */
static void drop_chunks(void)
{
	for (unsigned int i = 0; i < CHUNK_IDS; i++) {
		for (unsigned int first = 0; first < CHUNK_IDS; first++)
			cluster_ok(&w.pair->c, w.pair->me,
				   "{'cmd':'chunk.drop','space':%llu,'first':%u,'ids':['"
				   "%02x%062x']}",
				   (unsigned long long)w.other_space, first, i, 0);
	}
}

static void session_begin(void)
{
	static struct cache cache;

	w.session = cluster_engine(&w.pair->c, 0, "raw");
	w.session_id = w.session->id;
	cache = w.pair->mine;
	cluster_cache(&w.pair->c, w.session, "raw", 0, &cache);
	w.region = (uint64_t)(uintptr_t)cache.base;
	w.pool = cache.pool;
	close(cache.fd); /* mapped until the session has ended */
	w.space = open_space(w.session, w.pool);
	w.attend = cluster_number(
		cluster_call(&w.pair->c, w.session,
			     "{'cmd':'attention.open','region':%llu,'rows':8,'seats':4,"
			     "'kind':'gqa','q_type':'bf16','kv_type':'bf16','heads':4,"
			     "'kv_heads':1,'dqk':128,'dv':128,'scale':1,'key':'k',"
			     "'value':'v'}",
			     (unsigned long long)cache.region),
		"attend");
	w.attach = pair_attach(w.pair, w.session, w.pair->you, 1);
	cluster_ok(&w.pair->c, w.session,
		   "{'cmd':'session.share','entries':%u,'arena_bytes':%u}", ENTRIES,
		   ARENA_BYTES);
	w.ring = mmap(NULL, RING_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED,
		      ring_of(w.session)->fds[0], 0);
	w.arena = mmap(NULL, ARENA_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED,
		       ring_of(w.session)->fds[1], 0);
	need(w.ring != MAP_FAILED && w.arena != MAP_FAILED);
	w.tail = 0;
	w.slot = w.ring->first_slot;
	w.gen = 1;
	w.hold = 0;
}

static bool is_gone(void *arg)
{
	(void)arg;
	return w.pair->c.nodes[0].kvd.session_count == w.others;
}

static void session_finish(void)
{
	if (is_alive())
		session_end(w.session, "the input is over");
	cluster_until(&w.pair->c, is_gone, NULL, "the end of the session");
	drop_chunks();
	munmap(w.ring, RING_BYTES);
	munmap(w.arena, ARENA_BYTES);
	munmap((void *)(uintptr_t)w.region, w.pair->mine.bytes);
}

/* ---- steps ---- */

/* The other thread may write there, too. */
#define put(at, value) __atomic_store_n(at, value, __ATOMIC_RELAXED)

static void push(const struct kvd_ring_entry *entry)
{
	uint64_t one = 1, tail = __atomic_fetch_add(&w.tail, 1, __ATOMIC_RELAXED);

	if (kvd_ring_push(w.ring, ENTRIES, tail, entry) && is_alive())
		need(write(ring_of(w.session)->fds[2], &one, sizeof(one)) == sizeof(one));
}

/* A list of rows that lie in the cache of this engine or of the other. */
static void give_list(struct cursor *in)
{
	uint8_t how = cursor_get_u8(in), rows = cursor_get_u8(in) % 32;
	bool own = how & 1;
	uint64_t base = own ? w.region : (uint64_t)(uintptr_t)w.pair->yours.base;
	uint64_t *words = (uint64_t *)(void *)(w.arena + 4096);
	unsigned int columns = 2 + (how >> 1) % 3;
	struct kvd_ring_entry entry = {.op = KVD_RING_LIST,
				       .slot = w.slot,
				       .gen = w.gen,
				       .a = own ? 0 : w.attach,
				       .offset = 4096,
				       .n0 = rows,
				       .n1 = columns};

	for (unsigned int i = 0; i < rows; i++) {
		uint64_t *row = &words[i * columns];

		put(&row[0], (uint64_t)(base + cursor_get_u8(in) * 256u));
		put(&row[1], (uint64_t)(how & 8 ? cursor_get_u16(in) : 256));
		if (columns > 2)
			put(&row[2], (uint64_t)(columns == 4 ? 256 : 0));
		if (columns > 3)
			put(&row[3], (uint64_t)(1 + (how >> 4) % 3));
	}
	w.lists[own] = KVD_RING_IDS + w.slot++;
	push(&entry);
}

static void give_transfer(struct cursor *in)
{
	uint8_t how = cursor_get_u8(in);
	struct kvd_ring_entry entry = {.op = KVD_RING_XFER,
				       .flags = how & 7,
				       .slot = w.slot++,
				       .gen = w.gen,
				       .a = w.lists[1],
				       .b = w.lists[0],
				       .offset = 512,
				       .bytes = how >> 5};

	if (how & 8) {
		entry.n0 = entry.n1 = 2;
		put(&w.arena[512], (uint8_t)(cursor_get_u8(in) % 8));
		put(&w.arena[520], (uint8_t)(cursor_get_u8(in) % 8));
	}
	push(&entry);
}

static void give_other(struct cursor *in)
{
	uint8_t how = cursor_get_u8(in);
	struct kvd_ring_entry entry = {.op = KVD_RING_POST + how % 5,
				       .flags = how >> 5,
				       .slot = w.slot,
				       .gen = w.gen + 1,
				       .a = KVD_RING_IDS + w.slot - 1 - (how >> 4 & 3)};

	if (entry.op == KVD_RING_NOTIFY) {
		entry.a = w.attach;
		entry.bytes = cursor_get_u8(in);
	} else if (entry.op == KVD_RING_ABORT) {
		entry.a = cursor_get_u8(in);
	}
	push(&entry);
}

#define ROOM_AT 1024u /* in the arena, where the other thread writes, too */

/* One view, and pages as the input says them; where it ends. */
static uint32_t put_view(struct cursor *in, uint32_t at)
{
	struct kvd_ring_view view = {.name = "kv",
				     .page_count = cursor_get_u8(in) % 12,
				     .select_count = cursor_get_u8(in) % 4};
	uint32_t *selected;
	uint64_t words[sizeof(view) / 8];
	uint32_t *pages;

	memcpy(words, &view, sizeof(view));
	for (size_t i = 0; i < ARRAY_LEN(words); i++)
		put((uint64_t *)(void *)(w.arena + at + 8 * i), words[i]);
	pages = (uint32_t *)(void *)(w.arena + at + sizeof(view));
	for (uint32_t i = 0; i < view.page_count; i++)
		put(&pages[i], (uint32_t)cursor_get_u8(in) % 20);
	selected = pages + (view.page_count + 1) / 2 * 2;
	for (uint32_t i = 0; i < view.select_count; i++)
		put(&selected[i], (uint32_t)cursor_get_u8(in) % 40);
	return at + (uint32_t)kvd_ring_view_bytes(view.page_count, view.select_count);
}

static uint32_t put_text(uint64_t number, uint8_t how, uint32_t at)
{
	static const char *const roles[] = {"send", "recv", "offer", "pull"};
	char text[256];
	int n = snprintf(text, sizeof(text),
			 "{\"room\":\"%llu\",\"role\":\"%s\",\"pool\":%llu%s%s%s}",
			 (unsigned long long)number, roles[how & 3],
			 (unsigned long long)w.pool, how & 1 ? ",\"sources\":[\"" : "",
			 how & 1 ? w.pair->c.nodes[how >> 2 & 1].endpoint : "",
			 how & 1 ? "\"]" : "");

	for (int i = 0; i < n; i++)
		put(&w.arena[at + (uint32_t)i], (uint8_t)text[i]);
	return at + (uint32_t)n;
}

/* OPEN of the next slot, or another op of rooms on one of the last four. */
static void give_room(struct cursor *in)
{
	uint8_t how = cursor_get_u8(in), more = cursor_get_u8(in);
	bool opens = how & 1;
	uint32_t end = ROOM_AT, text;
	struct kvd_ring_entry entry = {
		.op = opens ? KVD_RING_OPEN : KVD_RING_BIND + (how >> 1) % 4,
		.flags = more & (KVD_RING_LAST | KVD_RING_AUX),
		.slot = opens ? w.slot++ : w.slot - 1 - (how >> 3 & 3),
		.gen = w.gen,
		.a = 1 + more % 3,
		.b = opens ? w.pool : how >> 5,
		.offset = ROOM_AT,
		.c = more >> 5};

	if (opens ? more & 2 : how & 128) {
		end = put_view(in, end);
		entry.n1 = 1;
	}
	text = end;
	if (opens)
		end = put_text(entry.a, more, end);
	entry.n2 = end - text;
	entry.bytes = end - ROOM_AT;
	if (how & 64) /* a length that lies */
		entry.n1 ^= more & 3;
	push(&entry);
}

/* Ids of so many chunks, which follow each other; where they end. */
static uint32_t put_ids(struct cursor *in, uint32_t at, uint32_t count)
{
	uint8_t from = cursor_get_u8(in);

	for (uint32_t i = 0; i < count * KVD_RING_ID_BYTES; i++)
		put(&w.arena[at + i], (uint8_t)0);
	for (uint32_t i = 0; i < count; i++)
		put(&w.arena[at + i * KVD_RING_ID_BYTES],
		    (uint8_t)((from + i) % CHUNK_IDS));
	return at + count * KVD_RING_ID_BYTES;
}

/* The pages of so many chunks, or as the input says them. */
static uint32_t put_chunk_pages(struct cursor *in, uint32_t at, uint64_t first,
				uint32_t count, bool own)
{
	uint64_t token = first * CHUNK_TOKENS;
	uint32_t *pages;

	if (own)
		return put_view(in, at);
	for (uint32_t i = 0; i < sizeof(struct kvd_ring_view) / 8; i++)
		put((uint64_t *)(void *)(w.arena + at + 8 * i), UINT64_C(0));
	put(&w.arena[at], (uint8_t)'k');
	put(&w.arena[at + 1], (uint8_t)'v');
	put((uint64_t *)(void *)(w.arena + at +
				 offsetof(struct kvd_ring_view, first_token)),
	    token);
	put((uint32_t *)(void *)(w.arena + at +
				 offsetof(struct kvd_ring_view, page_count)),
	    count * CHUNK_TOKENS);
	pages = (uint32_t *)(void *)(w.arena + at + sizeof(struct kvd_ring_view));
	for (uint32_t i = 0; i < count * CHUNK_TOKENS; i++)
		put(&pages[i], i);
	return at + (uint32_t)kvd_ring_view_bytes(count * CHUNK_TOKENS, 0);
}

/* FIND, HOLD, HOLD_REMOTE, FETCH of a hold in one of the last slots, or PUT. */
static void give_chunk(struct cursor *in)
{
	uint8_t how = cursor_get_u8(in), more = cursor_get_u8(in);
	uint32_t count = how >> 2 & 3, at = ROOM_AT;
	struct kvd_ring_entry entry = {.op = KVD_RING_FIND + (how & 3),
				       .slot = w.slot++,
				       .gen = w.gen,
				       .a = more & 128 ? w.other_space : w.space,
				       .c = more & 3,
				       .offset = ROOM_AT,
				       .n0 = count};

	if (entry.op == KVD_RING_HOLD && more & 64) {
		entry.op = KVD_RING_HOLD_REMOTE;
		entry.n1 = how & 16 ? 1 : 1000;
	}
	if (entry.op == KVD_RING_HOLD || entry.op == KVD_RING_HOLD_REMOTE) {
		for (uint32_t i = 0; i < KVD_RING_SECRET_BYTES; i++)
			put(&w.arena[at + i], (uint8_t)(i ? 0 : more >> 2 & 3));
		at += KVD_RING_SECRET_BYTES;
		entry.b = how & 128 ? 1 : 1000;
	}
	if (entry.op == KVD_RING_FETCH) {
		entry.a = KVD_RING_IDS + entry.slot - 1 - (more >> 2 & 3);
		entry.c = how & 128;
	} else {
		at = put_ids(in, at, count);
	}
	if (entry.op == KVD_RING_FETCH || entry.op == KVD_RING_PUT) {
		entry.b = w.pool;
		entry.n1 = 1;
		at = put_chunk_pages(in, at, more & 3, count, how & 16);
	}
	entry.bytes = at - ROOM_AT;
	if (how & 32) /* a length that lies */
		entry.bytes ^= more & 63;
	if (how & 64)
		entry.n0 ^= (uint32_t)more << 24;
	push(&entry);
}

static struct kvd_status_slot slot_of(uint32_t slot)
{
	struct kvd_status_slot s;

	need(pread(status_page_fd(w.session->status), &s, sizeof(s),
		   (off_t)(sizeof(struct kvd_status_header) + slot * sizeof(s))) ==
	     sizeof(s));
	return s;
}

/* What was put last is there, or was refused; or the session has ended for it. */
static bool has_put(void *arg)
{
	(void)arg;
	return !is_alive() ||
	       kvd_word_state(slot_of(w.slot - 1).word) != KVD_TRANSFERRING;
}

/* Chunks that are there, and a hold of them, which attends find: PUT and HOLD as an
 * engine gives them, so that inputs need not come upon both first. */
static void give_story(struct cursor *in)
{
	uint8_t how = cursor_get_u8(in);
	uint32_t count = 1 + how % 3, at = ROOM_AT;
	struct cursor none;
	struct kvd_ring_entry entry = {.op = KVD_RING_PUT,
				       .slot = w.slot++,
				       .gen = w.gen,
				       .a = w.space,
				       .b = w.pool,
				       .offset = ROOM_AT,
				       .n0 = count,
				       .n1 = 1};

	cursor_read(&none, "", 0); /* ids from 0 on */
	at = put_ids(&none, at, count);
	entry.bytes = put_chunk_pages(&none, at, 0, count, false) - ROOM_AT;
	push(&entry);
	turns(4);
	cluster_until(&w.pair->c, has_put, NULL, "the end of a put");
	if (!is_alive())
		return;
	entry = (struct kvd_ring_entry){.op = KVD_RING_HOLD,
					.slot = w.slot++,
					.gen = w.gen,
					.a = w.space,
					.b = 1000,
					.offset = ROOM_AT,
					.n0 = count};
	for (uint32_t i = 0; i < KVD_RING_SECRET_BYTES; i++)
		put(&w.arena[ROOM_AT + i], (uint8_t)(i ? 0 : 1 + (how >> 4)));
	entry.bytes = put_ids(&none, ROOM_AT + KVD_RING_SECRET_BYTES, count) - ROOM_AT;
	w.hold = KVD_RING_IDS + entry.slot;
	push(&entry);
	turns(2);
}

/* ATTEND to holds in the last slots, of up to three parts; or CANCEL, RELEASE, CLOSE of
 * one, or the attend's end. */
static void give_attend(struct cursor *in)
{
	uint8_t how = cursor_get_u8(in), more = cursor_get_u8(in);
	uint32_t count = how & 3, at = ROOM_AT;
	struct kvd_ring_entry entry = {.op = KVD_RING_ATTEND,
				       .gen = w.gen,
				       .a = w.attend,
				       .b = more & 1,
				       .c = more >> 4 & 1,
				       .n2 = more & 2 ? 1 : 0,
				       .offset = ROOM_AT,
				       .n0 = more >> 2 & 3,
				       .n1 = count};

	if (how & 128) {
		static const uint32_t ops[] = {KVD_RING_CANCEL, KVD_RING_RELEASE,
					       KVD_RING_CLOSE, KVD_RING_POST};

		entry = (struct kvd_ring_entry){.op = ops[how & 3],
						.slot = w.slot - 1 - (more & 3),
						.gen = w.gen + (how >> 2 & 1)};
		entry.a = KVD_RING_IDS + entry.slot;
		push(&entry);
		return;
	}
	for (uint32_t i = 0; i < count; i++) {
		uint8_t rows = cursor_get_u8(in), chunks = cursor_get_u8(in);
		uint64_t last = KVD_RING_IDS + w.slot - 1 - (rows >> 6);
		struct kvd_ring_part part = {.hold = rows & 64 || !w.hold ? last : w.hold,
					     .row = rows & 7,
					     .rows = 4u * (rows >> 3 & 3),
					     .first = chunks & 3,
					     .count = chunks >> 2 & 3,
					     .tokens = chunks >> 4 & 3,
					     .per_token = chunks >> 6};
		uint64_t words[sizeof(part) / 8];

		memcpy(words, &part, sizeof(part));
		for (size_t n = 0; n < ARRAY_LEN(words); n++, at += 8)
			put((uint64_t *)(void *)(w.arena + at), words[n]);
	}
	for (uint32_t i = 0; i < (more >> 4 & 7); i++, at += 4)
		put((uint32_t *)(void *)(w.arena + at), (uint32_t)cursor_get_u8(in));
	entry.slot = w.slot++;
	entry.bytes = at - ROOM_AT;
	if (how & 64) /* a length that lies */
		entry.bytes ^= more;
	if (how & 32)
		entry.n1 ^= more;
	push(&entry);
}

/* An entry of the input's bytes; over the last one where a byte is 0. */
static void give_garbage(struct cursor *in)
{
	struct kvd_ring_entry entry = {.op = KVD_RING_LIST, .slot = w.slot, .gen = w.gen};
	uint8_t *bytes = (uint8_t *)&entry, at, n = cursor_get_u8(in) % 8;

	for (unsigned int i = 0; i < n; i++) {
		at = cursor_get_u8(in) % sizeof(entry);
		bytes[at] ^= cursor_get_u8(in);
	}
	push(&entry);
}

static void step(struct cursor *in)
{
	uint8_t what = cursor_get_u8(in);
	uint64_t tail;

	switch (what & 7) {
	case 0:
		give_list(in);
		break;
	case 1:
		give_chunk(in);
		break;
	case 2:
		give_transfer(in);
		break;
	case 3:
		give_attend(in);
		break;
	case 4:
		if (what & 64 && what & 32)
			give_story(in);
		else if (what & 64)
			give_room(in);
		else
			give_other(in);
		break;
	case 5:
		give_garbage(in);
		break;
	case 6:
		tail = w.tail;
		tail += w.how & HOW_TAIL ? (uint64_t)(int8_t)cursor_get_u8(in) : 0;
		put(&w.tail, tail);
		__atomic_store_n(&w.ring->tail, tail, __ATOMIC_SEQ_CST);
		break;
	default:
		turns(8);
		break;
	}
	if (what & 128)
		turns(2);
}

static void world_begin(void)
{
	void *pair = NULL;

	cluster_real_time();
	need(pair_setup(&pair) == 0);
	w.pair = pair;
	cluster_store(&w.pair->c, 0,
		      &(struct cluster_store_args){.memory_bytes = 4 << 20,
						   .attention_threads = 1});
	w.other_space = open_space(w.pair->me, w.pair->mine.pool);
	w.others = w.pair->c.nodes[0].kvd.session_count;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	pthread_t thread;
	struct cursor in;

	if (!w.begun)
		world_begin();
	w.begun = true;
	cursor_read(&in, data, size);
	w.how = cursor_get_u8(&in);
	w.seed = cursor_get_u16(&in) | 1u << 20;
	w.stop = false;
	session_begin();
	if (w.how & HOW_THREAD)
		need(pthread_create(&thread, NULL, meddle, NULL) == 0);
	for (unsigned int i = 0; i < STEPS_MAX && cursor_left(&in) > 0 && is_alive(); i++)
		step(&in);
	turns(32);
	if (w.how & HOW_THREAD) {
		__atomic_store_n(&w.stop, true, __ATOMIC_RELAXED);
		pthread_join(thread, NULL);
	}
	session_finish();
	err_clear();
	return 0;
}
