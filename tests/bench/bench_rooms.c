/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bench_rooms PREFILL_SOCKET DECODE_SOCKET: what a request costs, by libkvd
 * against two live daemons. One process plays both engines with two memfds of its
 * own and obeys scripts/bench.py, a line of JSON for a line:
 *
 *   latency N [P] a room of P (1) pages of 64 KiB, N times: seconds from the
 *                 receiver's open and bind until its slot says success; the
 *                 sender's chunk is queued
 *   beside N MIB [P]  the same for requests that begin while another room moves MIB
 *                 megabytes, one chunk; its GB/s
 *   asleep N MIB [P]  the same by an engine that sleeps between its looks
 *   crowd N ROOMS [P]  the same for requests that begin while another session has
 *                 ROOMS rooms of P pages, all given at once; their GB/s
 *   rate N FLIGHT  rooms a second of N rooms of one page, FLIGHT of them open at a
 *                 time, all calls of both sides posted to the submission ring
 *   pages N       a room of 64 scattered 64 KiB pages, and in turn with it memcpy
 *                 of the same rows by one thread: seconds of both
 *   poll N        N open rooms: JSON poll by list and reads of the status page,
 *                 the best of several rounds a room
 *   open N        N rooms open on both sides, nothing bound: bytes of memory that
 *                 each daemon has more than before, a room
 */
#include <inttypes.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>

#include "daemon/base/clock.h"
#include "lib/kvd.h"
#include "tests/bench/rows.h"

#define PAGE_BYTES 65536u
#define PAGES 1024u
#define ROOM_PAGES 64u
#define WARM_UP 20u

struct engine {
	struct kvd_client *client;
	struct kvd_memory memory;
	struct kvd_region *region;
	struct kvd_pool *pool;
	const char *pool_name;
};

/* Who serves the requests; who serves the large room, once it is wanted. */
static struct engine prefill, decode, big_prefill, big_decode;
static const char *prefill_socket, *decode_socket;
static uint64_t next_room = 1000;
static uint32_t request_pages = 1;
static bool sleeping; /* between looks at a slot */

static void die(const struct engine *e, const char *what)
{
	const struct kvd_error *why = kvd_last_error(e->client);

	fprintf(stderr, "bench_rooms: %s: %s\n", what, why->message);
	exit(1);
}

/* A room that did not do as it should: its daemon's record says why. */
static void die_room(const struct engine *e, struct kvd_room *room, const char *what)
{
	char *record = NULL;

	if (room && kvd_room_show(room, 0, &record) == 0)
		fprintf(stderr, "bench_rooms: %s: %s\n", what, record);
	die(e, what);
}

static void *need(void *p)
{
	if (!p) {
		fprintf(stderr, "bench_rooms: out of memory\n");
		exit(1);
	}
	return p;
}

/* One layer, one field, pages of one token: a page is 64 KiB in one piece. */
static void engine_open(struct engine *e, const char *socket, const char *role,
			const char *pool, uint32_t pages)
{
	struct kvd_options options = {
		.socket = socket, .client = "bench", .role = role, .timeout_ms = 60000};
	struct kvd_field field = {.name = "k",
				  .page_stride = PAGE_BYTES,
				  .token_stride = PAGE_BYTES,
				  .unit_stride = PAGE_BYTES,
				  .unit_bytes = PAGE_BYTES,
				  .units = 1,
				  .total_units = 1};
	struct kvd_layout *layout = need(kvd_layout_new(0));
	struct kvd_pool_args args = {
		.name = pool, .regions = &e->region, .region_count = 1};
	uint32_t view;

	e->pool_name = pool;
	if (kvd_open(&options, &e->client) < 0)
		die(e, socket);
	if (kvd_memory_alloc((size_t)pages * PAGE_BYTES, role, &e->memory) < 0 ||
	    kvd_region_memory(e->client, &e->memory, NULL, &e->region) < 0)
		die(e, "memory");
	memset(e->memory.address, 1, e->memory.bytes);
	field.buffer = kvd_layout_buffer(layout, (uint64_t)pages * PAGE_BYTES);
	view = kvd_layout_view(layout, "kv", 1, pages);
	kvd_layout_field(layout, view, 0, &field);
	if (kvd_layout_text(layout, &args.layout) < 0 ||
	    kvd_pool_register(e->client, &args, NULL, &e->pool) < 0)
		die(e, "pool");
	kvd_layout_free(layout);
}

struct pair {
	const struct engine *from, *to;
	struct kvd_room *send, *recv;
	uint64_t number;
};

static void pair_send(struct pair *p, const struct engine *from, const struct engine *to)
{
	struct kvd_room_args send = {.role = KVD_SEND, .pool = from->pool};

	*p = (struct pair){.from = from, .to = to, .number = next_room++};
	send.room = p->number;
	if (kvd_room_open(from->client, &send, NULL, &p->send) < 0)
		die(from, "room.open send");
}

static void on_answer(void *arg, int result, const struct kvd_reply *reply)
{
	if (result >= 0)
		return;
	fprintf(stderr, "bench_rooms: %s: %s\n", (const char *)arg,
		reply->error ? reply->error->message : "failed");
	exit(1);
}

/* `call` NULL: wait for the answer. */
static void pair_recv(struct pair *p, const struct kvd_call *call)
{
	struct kvd_source source = {.endpoint = kvd_daemon(p->from->client)->endpoint,
				    .pool = p->from->pool_name};
	struct kvd_room_args recv = {.room = p->number,
				     .role = KVD_RECV,
				     .pool = p->to->pool,
				     .sources = &source,
				     .source_count = 1};

	if (kvd_room_open(p->to->client, &recv, call, &p->recv) < 0)
		die(p->to, "room.open recv");
}

static void pair_close(struct pair *p)
{
	if (kvd_room_wait(p->recv, KVD_SUCCESS, 30000) != KVD_SUCCESS)
		die_room(p->to, p->recv, "recv did not succeed");
	if (kvd_room_wait(p->send, KVD_SUCCESS, 30000) != KVD_SUCCESS)
		die_room(p->from, p->send, "send did not succeed");
	if (kvd_room_close(p->recv, NULL) < 0)
		die(p->to, "room.close");
	if (kvd_room_close(p->send, NULL) < 0)
		die(p->from, "room.close");
}

static void chunk_send(struct pair *p, const uint32_t *pages, size_t n)
{
	struct kvd_view view = {.pages = pages, .page_count = n};
	struct kvd_room_pages args = {.views = &view, .view_count = 1, .last = true};

	if (kvd_room_send(p->send, &args, NULL) < 0)
		die(p->from, "room.send");
}

static void pages_bind(struct pair *p, const uint32_t *pages, size_t n,
		       const struct kvd_call *call)
{
	struct kvd_view view = {.pages = pages, .page_count = n};
	struct kvd_room_pages args = {.views = &view, .view_count = 1};

	if (kvd_room_bind(p->recv, &args, call) < 0)
		die_room(p->to, p->recv, "room.bind");
}

/* Busy, as an engine's scheduler polls: answers while some are due, and one atomic
 * load a turn; whoever else wants the core gets it. Or asleep until an answer is there
 * and for 20 us and more between looks. */
static void until_landed(const struct pair *p)
{
	double end = clock_s() + 30;
	int state;

	while (kvd_pending(p->to->client) > 0) {
		if (kvd_poll(p->to->client, sleeping ? 30000 : 0) < 0)
			die(p->to, "connection");
		if (!sleeping)
			sched_yield();
	}
	if (sleeping && kvd_room_wait(p->recv, KVD_SUCCESS, 30000) != KVD_SUCCESS)
		die_room(p->to, p->recv, "the room failed or hangs");
	while ((state = kvd_room_state(p->recv)) != KVD_SUCCESS) {
		if (state == KVD_FAILED || clock_s() > end)
			die_room(p->to, p->recv, "the room failed or hangs");
		sched_yield();
	}
}

static void scatter(uint32_t *pages, uint32_t salt)
{
	for (uint32_t i = 0; i < ROOM_PAGES; i++)
		pages[i] = (i * 37 + salt * 11) % PAGES;
}

/* The receiver opens and binds in one go while the sender's chunk is queued: what is
 * timed is the receiver's way from there to success. */
static double request_s(void)
{
	const struct kvd_call open = {.on_done = on_answer, .arg = (void *)"room.open"};
	const struct kvd_call bind = {.on_done = on_answer, .arg = (void *)"room.bind"};
	uint32_t pages[ROOM_PAGES];
	struct pair p;
	double begin;

	scatter(pages, 3);
	pair_send(&p, &prefill, &decode);
	chunk_send(&p, pages, request_pages);
	begin = clock_s();
	pair_recv(&p, &open);
	pages_bind(&p, pages, request_pages, &bind);
	until_landed(&p);
	begin = clock_s() - begin;
	pair_close(&p);
	return begin;
}

static void latency(unsigned int n, unsigned int pages)
{
	request_pages = pages ? pages : 1;
	for (unsigned int i = 0; i < WARM_UP; i++)
		request_s();
	printf("[");
	for (unsigned int i = 0; i < n; i++)
		printf("%s%.9f", i ? "," : "", request_s());
	printf("]\n");
}

/* ---- beside a large room ---- */

/* A permutation: 4051 is odd, and `n` is a power of two. */
static uint32_t *scattered(uint32_t n, uint32_t places)
{
	uint32_t *pages = need(calloc(n, sizeof(*pages)));

	for (uint32_t i = 0; i < n; i++)
		pages[i] = i * 4051u % places;
	return pages;
}

static void big_begin(struct pair *p, const uint32_t *from, const uint32_t *to,
		      uint32_t n)
{
	pair_send(p, &big_prefill, &big_decode);
	pair_recv(p, NULL);
	pages_bind(p, to, n, NULL);
	if (kvd_room_wait(p->send, KVD_WAITING_FOR_INPUT, 30000) < 0)
		die_room(p->to, p->recv, "waiting_for_input");
	chunk_send(p, from, n);
}

/* Every request that begins while the large room moves counts, also one that has to
 * wait for its end. */
static void beside(unsigned int n, unsigned int mib)
{
	uint32_t pages = mib * (1048576 / PAGE_BYTES);
	uint32_t *to = scattered(pages, pages), *from = scattered(pages, PAGES);
	double begin, took = 0;
	unsigned int got = 0, rooms = 0;
	struct pair big;

	engine_open(&big_prefill, prefill_socket, "prefill", "big", PAGES);
	engine_open(&big_decode, decode_socket, "decode", "big", pages);
	printf("{\"seconds\":[");
	while (got < n) {
		big_begin(&big, from, to, pages);
		begin = clock_s();
		while (got < n && kvd_room_state(big.recv) != KVD_SUCCESS)
			printf("%s%.9f", got++ ? "," : "", request_s());
		until_landed(&big);
		took += clock_s() - begin;
		rooms++;
		pair_close(&big);
	}
	printf("],\"big_gbps\":%.3f}\n", (double)pages * PAGE_BYTES * rooms / took / 1e9);
	kvd_close(big_prefill.client);
	kvd_close(big_decode.client);
	kvd_memory_free(&big_prefill.memory);
	kvd_memory_free(&big_decode.memory);
	free(to);
	free(from);
}

static void asleep(unsigned int n, unsigned int mib)
{
	sleeping = true;
	beside(n, mib);
	sleeping = false;
}

/* ---- beside many rooms of another session ---- */

static void crowd_open(struct pair *pairs, unsigned int rooms)
{
	uint32_t to[ROOM_PAGES];

	for (unsigned int i = 0; i < rooms; i++) {
		scatter(to, i);
		pair_send(&pairs[i], &big_prefill, &big_decode);
		pair_recv(&pairs[i], NULL);
		pages_bind(&pairs[i], to, request_pages, NULL);
	}
	for (unsigned int i = 0; i < rooms; i++)
		if (kvd_room_wait(pairs[i].send, KVD_WAITING_FOR_INPUT, 30000) < 0)
			die_room(&big_prefill, pairs[i].send, "waiting_for_input");
}

/* Rooms end in any order. */
static bool crowd_moves(const struct pair *pairs, unsigned int rooms, unsigned int *first)
{
	while (*first < rooms && kvd_room_state(pairs[*first].recv) == KVD_SUCCESS)
		++*first;
	return *first < rooms;
}

static void crowd(unsigned int n, unsigned int rooms)
{
	struct pair *pairs = need(calloc(rooms, sizeof(*pairs)));
	double begin, took = 0, bytes = 0;
	unsigned int got = 0, first;
	uint32_t from[ROOM_PAGES];

	engine_open(&big_prefill, prefill_socket, "prefill", "big", PAGES);
	engine_open(&big_decode, decode_socket, "decode", "big", PAGES);
	printf("{\"seconds\":[");
	while (got < n) {
		crowd_open(pairs, rooms);
		begin = clock_s();
		for (unsigned int i = 0; i < rooms; i++) {
			scatter(from, i + 7);
			chunk_send(&pairs[i], from, request_pages);
		}
		first = 0;
		while (got < n && crowd_moves(pairs, rooms, &first))
			printf("%s%.9f", got++ ? "," : "", request_s());
		for (unsigned int i = 0; i < rooms; i++)
			until_landed(&pairs[i]);
		took += clock_s() - begin;
		bytes += (double)rooms * request_pages * PAGE_BYTES;
		for (unsigned int i = 0; i < rooms; i++)
			pair_close(&pairs[i]);
	}
	printf("],\"big_gbps\":%.3f}\n", bytes / took / 1e9);
	kvd_close(big_prefill.client);
	kvd_close(big_decode.client);
	kvd_memory_free(&big_prefill.memory);
	kvd_memory_free(&big_decode.memory);
	free(pairs);
}

/* ---- pages ---- */

static double pages_copy_s(const uint32_t *from, const uint32_t *to)
{
	const uint8_t *src = prefill.memory.address;
	uint8_t *dst = decode.memory.address;
	double begin;

	caches_sweep();
	begin = clock_s();
	for (unsigned int k = 0; k < ROOM_PAGES; k++)
		memcpy(dst + (size_t)to[k] * PAGE_BYTES,
		       src + (size_t)from[k] * PAGE_BYTES, PAGE_BYTES);
	return clock_s() - begin;
}

static double pages_room_s(const uint32_t *from, const uint32_t *to)
{
	struct pair p;
	double begin;

	pair_send(&p, &prefill, &decode);
	pair_recv(&p, NULL);
	pages_bind(&p, to, ROOM_PAGES, NULL);
	if (kvd_room_wait(p.send, KVD_WAITING_FOR_INPUT, 5000) < 0)
		die(&prefill, "waiting_for_input");
	caches_sweep();
	begin = clock_s();
	chunk_send(&p, from, ROOM_PAGES);
	until_landed(&p);
	begin = clock_s() - begin;
	pair_close(&p);
	return begin;
}

static void pages(unsigned int n, unsigned int unused)
{
	double *room_s = need(calloc(n, sizeof(double)));
	uint32_t from[ROOM_PAGES], to[ROOM_PAGES];

	(void)unused;
	printf("{\"limit\":[");
	for (unsigned int i = 0; i < n; i++) {
		scatter(from, i);
		scatter(to, i * 5 + 1);
		printf("%s%.9f", i ? "," : "", pages_copy_s(from, to));
		room_s[i] = pages_room_s(from, to);
	}
	printf("],\"kvd\":[");
	for (unsigned int i = 0; i < n; i++)
		printf("%s%.9f", i ? "," : "", room_s[i]);
	printf("]}\n");
	free(room_s);
}

/* ---- rooms a second ---- */

/* Both sides open, send, bind: nothing waits. */
static void post_pair(struct pair *p)
{
	static const struct kvd_call post = {.post = true};
	const uint32_t page = (uint32_t)(next_room * 37 % PAGES);
	struct kvd_view view = {.pages = &page, .page_count = 1};
	struct kvd_room_pages pages = {.views = &view, .view_count = 1, .last = true};
	struct kvd_room_args send = {.role = KVD_SEND, .pool = prefill.pool};

	*p = (struct pair){.from = &prefill, .to = &decode, .number = next_room++};
	send.room = p->number;
	if (kvd_room_open(prefill.client, &send, &post, &p->send) < 0 ||
	    kvd_room_send(p->send, &pages, &post) < 0)
		die(&prefill, "posting a sender");
	pair_recv(p, &post);
	pages.last = false;
	if (kvd_room_bind(p->recv, &pages, &post) < 0)
		die(&decode, "posting room.bind");
}

static bool pair_ended(struct pair *p)
{
	static const struct kvd_call post = {.post = true};

	if (kvd_room_state(p->recv) == KVD_FAILED)
		die_room(&decode, p->recv, "a room failed");
	if (kvd_room_state(p->send) == KVD_FAILED)
		die_room(&prefill, p->send, "a room failed");
	if (kvd_room_state(p->recv) != KVD_SUCCESS ||
	    kvd_room_state(p->send) != KVD_SUCCESS)
		return false;
	if (kvd_room_close(p->recv, &post) < 0 || kvd_room_close(p->send, &post) < 0)
		die(&decode, "posting room.close");
	return true;
}

static void rate(unsigned int n, unsigned int flight)
{
	struct pair *pairs = need(calloc(flight, sizeof(*pairs)));
	unsigned int begun = 0, ended = 0;
	double begin = clock_s();

	for (; begun < flight && begun < n; begun++)
		post_pair(&pairs[begun]);
	while (ended < n) {
		unsigned int before = ended;

		for (unsigned int i = 0; i < flight; i++) {
			if (!pairs[i].send || !pair_ended(&pairs[i]))
				continue;
			ended++;
			pairs[i].send = NULL;
			if (begun++ < n)
				post_pair(&pairs[i]);
		}
		if (kvd_poll(prefill.client, 0) < 0 || kvd_poll(decode.client, 0) < 0)
			die(&decode, "connection");
		if (ended == before)
			sched_yield();
		if (clock_s() - begin > 60)
			die(&decode, "rooms hang");
	}
	printf("%.1f\n", n / (clock_s() - begin));
	free(pairs);
}

/* ---- many rooms ---- */

static void rooms_drop(struct kvd_room **rooms, unsigned int n)
{
	for (unsigned int i = 0; i < n; i++) {
		kvd_room_abort(rooms[i], "bench", NULL);
		if (kvd_room_wait(rooms[i], KVD_SUCCESS, 10000) != KVD_FAILED ||
		    kvd_room_close(rooms[i], NULL) < 0)
			die(&prefill, "room.close");
	}
	free(rooms);
}

static void poll_rooms(unsigned int n, unsigned int unused)
{
	struct kvd_room **rooms = need(calloc(n, sizeof(struct kvd_room *)));
	int *states = need(calloc(n, sizeof(int)));
	size_t size = (size_t)n * 24 + 64, at;
	char *args = need(malloc(size)), *reply;
	double begin, json_s = 1e9, page_s = 1e9, took;

	(void)unused;
	at = (size_t)snprintf(args, size, "{\"rooms\":[");
	for (unsigned int i = 0; i < n; i++) {
		struct pair p;

		pair_send(&p, &prefill, &decode);
		rooms[i] = p.send;
		at += (size_t)snprintf(args + at, size - at, "%s\"%" PRIu64 "\"",
				       i ? "," : "", p.number);
	}
	snprintf(args + at, size - at, "]}");
	for (unsigned int k = 0; k < 20; k++) {
		begin = clock_s();
		if (kvd_command(prefill.client, "room.poll", args, 10000, &reply) < 0)
			die(&prefill, "room.poll");
		took = clock_s() - begin;
		json_s = took < json_s ? took : json_s;
		kvd_string_free(reply);
		begin = clock_s();
		kvd_room_states((const struct kvd_room *const *)rooms, n, states);
		took = clock_s() - begin;
		page_s = took < page_s ? took : page_s;
	}
	printf("{\"json_us\":%.3f,\"page_ns\":%.2f}\n", json_s * 1e6 / n,
	       page_s * 1e9 / n);
	rooms_drop(rooms, n);
	free(states);
	free(args);
}

static double rss_bytes(const struct engine *e)
{
	char path[64];
	long size, resident = 0;
	FILE *f;

	snprintf(path, sizeof(path), "/proc/%d/statm", kvd_daemon(e->client)->pid);
	f = fopen(path, "r");
	if (!f || fscanf(f, "%ld %ld", &size, &resident) != 2)
		die(e, path);
	fclose(f);
	return (double)resident * 4096;
}

static void open_rooms(unsigned int n, unsigned int unused)
{
	struct kvd_room **send = need(calloc(n, sizeof(struct kvd_room *)));
	struct kvd_room **recv = need(calloc(n, sizeof(struct kvd_room *)));
	double sender = rss_bytes(&prefill), receiver = rss_bytes(&decode);

	(void)unused;
	for (unsigned int i = 0; i < n; i++) {
		struct pair p;

		pair_send(&p, &prefill, &decode);
		pair_recv(&p, NULL);
		send[i] = p.send;
		recv[i] = p.recv;
	}
	printf("{\"sender_bytes\":%.0f,\"receiver_bytes\":%.0f}\n",
	       (rss_bytes(&prefill) - sender) / n, (rss_bytes(&decode) - receiver) / n);
	rooms_drop(send, n);
	rooms_drop(recv, n);
}

int main(int argc, char **argv)
{
	static const struct {
		const char *name;
		void (*run)(unsigned int n, unsigned int more);
	} works[] = {{"latency", latency}, {"beside", beside},	{"asleep", asleep},
		     {"crowd", crowd},	   {"rate", rate},	{"pages", pages},
		     {"poll", poll_rooms}, {"open", open_rooms}};
	unsigned int n, more, pages;
	char line[64], word[16];

	if (argc != 3) {
		fprintf(stderr, "usage: bench_rooms PREFILL_SOCKET DECODE_SOCKET\n");
		return 2;
	}
	prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0);
	prefill_socket = argv[1];
	decode_socket = argv[2];
	engine_open(&prefill, prefill_socket, "prefill", "bench", PAGES);
	engine_open(&decode, decode_socket, "decode", "bench", PAGES);
	while (fgets(line, sizeof(line), stdin)) {
		size_t i = 0;

		more = 0;
		pages = 1;
		if (sscanf(line, "%15s %u %u %u", word, &n, &more, &pages) < 2)
			return 2;
		if (pages < 1 || pages > ROOM_PAGES ||
		    (strcmp(word, "latency") == 0 && more > ROOM_PAGES) ||
		    (strcmp(word, "rate") == 0 && (more < 1 || more > 1024)))
			return 2;
		request_pages = pages;
		while (i < sizeof(works) / sizeof(works[0]) &&
		       strcmp(word, works[i].name) != 0)
			i++;
		if (i == sizeof(works) / sizeof(works[0]))
			return 2;
		works[i].run(n, more);
		fflush(stdout);
	}
	return 0;
}
