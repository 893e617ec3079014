/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The invariant "terminal means still", over RDMA, from the engines' side: rooms
 * of 64 MiB (or of 1024 pages of KVD_ABORT_PAGE bytes) are aborted while work requests
 * are outstanding, and the moment that the receiver's room says `failed` its pages are
 * given to somebody else. Not one of his bytes may change.
 *
 *   rdma-abort send SOCKET ROUNDS FIRST_ROOM
 *   rdma-abort recv SOCKET ENDPOINT ROUNDS FIRST_ROOM
 *
 * Rounds take turns: a push that the receiver aborts, a push that the sender
 * aborts, a pull that the puller aborts. Exit status 0: all failed as they should,
 * each in the middle, and no byte was foreign.
 *
 *   rdma-abort send SOCKET 0 ROOM
 *   rdma-abort recv SOCKET ENDPOINT 0 ROOM
 *
 * One push that nobody aborts: what happens to it is the caller's doing. "moving"
 * when the first bytes are there; then "success", every byte looked at, or "failed
 * CODE: words", the pages given away and watched. Exit status 0 for either; 1 for a
 * wrong or foreign byte. With KVD_ABORT_PAGE=BYTES for both, of pages of that many
 * bytes; with KVD_ABORT_PULL=1 for both, a pull. The record of each side is printed.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "lib/kvd.h"

#define PAGES 1024u
#define PAGE_TOKENS 16u
#define FIRST_PAGES \
	16u /* a chunk of its own: when it has landed, the rest is on its way */
#define WAIT_MS 300000 /* virtual machines on a busy host take their time */
#define WATCH_NS 50000000L
#define WATCHES 120 /* of a push that nobody aborted: a frozen peer may wake up */
#define OLD 0x11
#define FILL 0x77 /* what is sent */

static unsigned long page_bytes = 65536;
/* Short pages have gaps between them, or the planner makes one stretch of the far ones.
 */
static unsigned int spread = 1;

static size_t memory_bytes(void)
{
	return (size_t)PAGES * spread * page_bytes;
}

enum kind {
	PUSH_RECEIVER_ABORTS,
	PUSH_SENDER_ABORTS,
	PULL_ABORTS,
	KINDS,
	PUSH_ENDURES,
	PULL_ENDURES
};

struct engine {
	struct kvd_client *client;
	struct kvd_memory memory;
	struct kvd_region *region;
	struct kvd_pool *pool;
	uint32_t pages[PAGES];
	uint8_t fill; /* every byte of it, before a room */
};

static void die(const struct engine *engine, const char *what)
{
	const struct kvd_error *error = kvd_last_error(engine->client);

	fprintf(stderr, "rdma-abort: %s: %s: %s\n", what, kvd_code_name(error->code),
		error->message);
	exit(1);
}

static void nap(long ns)
{
	const struct timespec pause = {.tv_nsec = ns};

	nanosleep(&pause, NULL);
}

static bool pulls(enum kind kind)
{
	return kind == PULL_ABORTS || kind == PULL_ENDURES;
}

static bool endures(enum kind kind)
{
	return kind == PUSH_ENDURES || kind == PULL_ENDURES;
}

/* Pages in another order at each side, so that none are neighbours on both. */
static void engine_open(struct engine *engine, const char *socket, uint32_t stride,
			uint8_t fill)
{
	struct kvd_options options = {.client = "rdma-abort", .socket = socket};
	struct kvd_field field = {
		.name = "k", .unit_bytes = page_bytes / PAGE_TOKENS, .units = 1};
	struct kvd_layout *layout = kvd_layout_new(0);
	uint64_t offset = 0;
	struct kvd_pool_args pool = {
		.regions = &engine->region, .offsets = &offset, .region_count = 1};
	uint32_t view;

	if (kvd_open(&options, &engine->client))
		die(engine, "daemon");
	if (!layout || kvd_memory_alloc(memory_bytes(), "rdma-abort", &engine->memory))
		die(engine, "memory");
	engine->fill = fill;
	memset(engine->memory.address, fill, memory_bytes());
	view = kvd_layout_view(layout, "kv", PAGE_TOKENS, PAGES * spread);
	field.buffer = kvd_layout_buffer(layout, memory_bytes());
	kvd_layout_heads(layout, view, 0, KVD_NHD, &field);
	if (kvd_layout_text(layout, &pool.layout) ||
	    kvd_region_memory(engine->client, &engine->memory, NULL, &engine->region) ||
	    kvd_pool_register(engine->client, &pool, NULL, &engine->pool))
		die(engine, "register");
	kvd_layout_free(layout);
	for (uint32_t i = 0; i < PAGES; i++)
		engine->pages[i] = i * stride % PAGES * spread;
}

static struct kvd_view all_pages(const struct engine *engine)
{
	return (struct kvd_view){.pages = engine->pages, .page_count = PAGES};
}

static void room_end(struct engine *engine, struct kvd_room *room)
{
	int state = kvd_room_wait(room, KVD_SUCCESS, WAIT_MS);

	if (state == KVD_SUCCESS)
		fprintf(stderr, "rdma-abort: aborted too late\n");
	if (state != KVD_FAILED)
		die(engine, "the room did not fail");
}

static void tell_record(struct engine *engine, uint64_t number, const char *role)
{
	char args[80], *record = NULL;

	snprintf(args, sizeof(args), "{\"room\":\"%" PRIu64 "\",\"role\":\"%s\"}", number,
		 role);
	if (kvd_command(engine->client, "room.show", args, WAIT_MS, &record))
		die(engine, "room.show");
	printf("record %s\n", record);
	kvd_string_free(record);
}

/* How a room ended that nobody aborted. */
static bool tell_end(struct engine *engine, struct kvd_room *room, uint64_t number,
		     const char *role)
{
	int state = kvd_room_wait(room, KVD_SUCCESS, WAIT_MS);
	struct kvd_room_status st = {0};

	if (state == KVD_SUCCESS) {
		tell_record(engine, number, role);
		printf("success\n");
	} else {
		kvd_room_read(room, &st);
		printf("failed %s: state %d\n", kvd_code_name((enum kvd_code)st.error),
		       state);
	}
	fflush(stdout);
	return state == KVD_SUCCESS;
}

/* ---- the side that has the bytes ---- */

static void until_bytes_move(struct engine *engine, struct kvd_room *room)
{
	struct kvd_room_status st = {0};

	while (!st.bytes && !(st.flags & KVD_FLAG_ABORTING) &&
	       kvd_room_state(room) > KVD_FAILED) {
		if (kvd_room_read(room, &st))
			die(engine, "room");
		nap(20000);
	}
}

/* The receiver may abort at any time: then there is no one to send to. */
static bool is_refused_since_aborted(struct engine *engine, struct kvd_room *room)
{
	struct kvd_room_status st = {0};

	return kvd_last_error(engine->client)->code == KVD_E_STATE &&
	       !kvd_room_read(room, &st) &&
	       ((st.flags & KVD_FLAG_ABORTING) || st.state == KVD_FAILED);
}

static void send_chunk(struct engine *engine, struct kvd_room *room,
		       const struct kvd_room_pages *send)
{
	if (kvd_room_send(room, send, NULL) && !is_refused_since_aborted(engine, room))
		die(engine, "room.send");
}

static void send_chunks(struct engine *engine, struct kvd_room *room)
{
	struct kvd_view view = {.pages = engine->pages, .page_count = FIRST_PAGES};
	struct kvd_room_pages send = {.views = &view, .view_count = 1};

	send_chunk(engine, room, &send);
	view.pages += FIRST_PAGES;
	view.page_count = PAGES - FIRST_PAGES;
	view.first_token = FIRST_PAGES * PAGE_TOKENS;
	send.seq = 1;
	send.last = true;
	send_chunk(engine, room, &send);
}

static void send_one(struct engine *engine, uint64_t number, enum kind kind)
{
	struct kvd_view view = all_pages(engine);
	struct kvd_room_args open = {
		.room = number, .role = KVD_SEND, .pool = engine->pool};
	struct kvd_room *room;

	if (pulls(kind)) {
		open.role = KVD_OFFER;
		open.views = &view;
		open.view_count = 1;
	}
	if (kvd_room_open(engine->client, &open, NULL, &room))
		die(engine, "room.open");
	if (!pulls(kind)) {
		if (kvd_room_wait(room, KVD_WAITING_FOR_INPUT, WAIT_MS) <
		    KVD_WAITING_FOR_INPUT)
			die(engine, "the receiver");
		send_chunks(engine, room);
		if (kind == PUSH_SENDER_ABORTS) {
			until_bytes_move(engine, room);
			if (kvd_room_abort(room, "the sender's user went away", NULL))
				die(engine, "room.abort");
		}
	}
	if (endures(kind)) {
		tell_end(engine, room, number, pulls(kind) ? "offer" : "send");
		return; /* its daemon may be gone */
	}
	room_end(engine, room);
	if (kvd_room_close(room, NULL))
		die(engine, "room.close");
}

/* ---- the side that is written ---- */

/* Pages that have got their first or last byte. */
static unsigned int pages_touched(const struct engine *engine)
{
	const volatile uint8_t *at = engine->memory.address;
	unsigned int n = 0;

	for (size_t i = 0; i < PAGES; i++)
		n += at[i * spread * page_bytes] != engine->fill ||
		     at[(i * spread + 1) * page_bytes - 1] != engine->fill;
	return n;
}

/* Words of a page that are not all this byte. */
static uint64_t words_other(const uint64_t *at, uint8_t byte)
{
	const uint64_t word = byte * UINT64_C(0x0101010101010101);
	uint64_t n = 0;

	if (at[0] == word && !memcmp(at, at + 1, page_bytes - sizeof(*at)))
		return 0;
	for (size_t i = 0; i < page_bytes / sizeof(*at); i++)
		n += at[i] != word;
	return n;
}

/* Words that are not `mine` in its pages, or not `gap` between them. */
static uint64_t foreign_words(const struct engine *engine, uint8_t mine, uint8_t gap)
{
	const uint8_t *at = engine->memory.address;
	uint64_t n = 0;

	for (size_t i = 0; i < PAGES * spread; i++)
		n += words_other((const uint64_t *)(at + i * page_bytes),
				 i % spread ? gap : mine);
	return n;
}

/* Its pages are somebody else's now; what he wrote is what a next room finds. */
static void give_away(struct engine *engine, uint8_t mine)
{
	memset(engine->memory.address, mine, memory_bytes());
	engine->fill = mine;
}

static struct kvd_room *recv_open(struct engine *engine, const char *endpoint,
				  uint64_t number, enum kind kind)
{
	struct kvd_view view = all_pages(engine);
	struct kvd_source source = {.endpoint = endpoint};
	struct kvd_room_args open = {.room = number,
				     .role = KVD_RECV,
				     .pool = engine->pool,
				     .sources = &source,
				     .source_count = 1};
	struct kvd_room_pages bind = {.views = &view, .view_count = 1};
	struct kvd_room *room;

	if (pulls(kind)) {
		open.role = KVD_PULL;
		open.views = &view;
		open.view_count = 1;
	}
	if (kvd_room_open(engine->client, &open, NULL, &room) ||
	    (!pulls(kind) && kvd_room_bind(room, &bind, NULL)))
		die(engine, "room.open");
	return room;
}

struct tally {
	unsigned int failed, in_flight;
	uint64_t foreign;
};

static void recv_one(struct engine *engine, const char *endpoint, uint64_t number,
		     enum kind kind, struct tally *tally)
{
	uint8_t mine = (uint8_t)(0x80 | number % 97);
	struct kvd_room *room;
	unsigned int touched;
	bool success;

	room = recv_open(engine, endpoint, number, kind);
	while (kvd_room_state(room) > KVD_FAILED && kvd_room_state(room) < KVD_SUCCESS &&
	       pages_touched(engine) == 0)
		nap(20000);
	if (endures(kind)) {
		printf("moving\n");
		fflush(stdout);
		success = tell_end(engine, room, number, pulls(kind) ? "pull" : "recv");
		if (!success)
			give_away(engine, mine);
		for (int i = 0; !success && i < WATCHES; i++)
			nap(WATCH_NS);
		tally->foreign = foreign_words(engine, success ? FILL : mine,
					       success ? OLD : mine);
		return;
	}
	if (kind != PUSH_SENDER_ABORTS &&
	    kvd_room_abort(room, "the user went away", NULL))
		die(engine, "room.abort");
	room_end(engine, room);
	touched = pages_touched(engine);
	give_away(engine, mine);
	nap(WATCH_NS);
	tally->failed++;
	tally->in_flight += touched > 0 && touched < PAGES;
	tally->foreign += foreign_words(engine, mine, mine);
	if (kvd_room_close(room, NULL))
		die(engine, "room.close");
}

int main(int argc, char **argv)
{
	bool sends = argc == 5 && !strcmp(argv[1], "send");
	enum kind whole = getenv("KVD_ABORT_PULL") ? PULL_ENDURES : PUSH_ENDURES;
	unsigned long rounds;
	uint64_t first;
	struct engine engine = {0};
	struct tally tally = {0};

	if (!sends && (argc != 6 || strcmp(argv[1], "recv"))) {
		fprintf(stderr,
			"usage: rdma-abort send SOCKET ROUNDS FIRST_ROOM\n"
			"       rdma-abort recv SOCKET ENDPOINT ROUNDS FIRST_ROOM\n");
		return 2;
	}
	if (getenv("KVD_ABORT_PAGE"))
		page_bytes = strtoul(getenv("KVD_ABORT_PAGE"), NULL, 10);
	spread = page_bytes < 65536 ? 2 : 1;
	rounds = strtoul(argv[argc - 2], NULL, 10);
	first = strtoull(argv[argc - 1], NULL, 10);
	engine_open(&engine, argv[2], sends ? 7 : 11, sends ? FILL : OLD);
	for (unsigned long i = 0; i < rounds; i++) {
		if (sends)
			send_one(&engine, first + i, (enum kind)(i % KINDS));
		else
			recv_one(&engine, argv[3], first + i, (enum kind)(i % KINDS),
				 &tally);
	}
	if (rounds == 0 && sends)
		send_one(&engine, first, whole);
	else if (rounds == 0)
		recv_one(&engine, argv[3], first, whole, &tally);
	kvd_close(engine.client);
	if (!sends)
		printf("%u rooms failed, %u in the middle, %" PRIu64 " %s words\n",
		       tally.failed, tally.in_flight, tally.foreign,
		       rounds ? "foreign" : "wrong");
	return !sends && (tally.failed != rounds || tally.foreign ||
			  tally.in_flight * 10 < rounds * 9);
}
