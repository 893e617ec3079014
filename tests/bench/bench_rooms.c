/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bench_rooms PREFILL_SOCKET DECODE_SOCKET WHAT [N]: what a request costs, by
 * libkvd against two live daemons (scripts/bench.sh starts them). One process
 * plays both engines with two memfds of its own.
 *
 *   latency   open + bind + send of one 64 KiB page until the receiver's slot
 *             says success: p50, p99 over N rooms, one after the other
 *   pages     one room of 64 scattered 64 KiB pages, as GB/s, beside memcpy of
 *             the same rows by one thread in the same run, taken in turn
 *   poll      1 000 open rooms: JSON poll by list, and status page reads
 *   rooms     N rooms opened, run and closed: memory and descriptors of both
 *             daemons after each thousand
 *
 * One line of JSON a figure on stdout, words on stderr.
 */
#include <dirent.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "proto/kvd.h"

#define PAGE_BYTES 65536u
#define PAGES 1024u
#define ROOM_PAGES 64u

struct engine {
	struct kvd_client *client;
	struct kvd_memory memory;
	struct kvd_region *region;
	struct kvd_pool *pool;
};

static struct engine prefill, decode;

static void die(const struct engine *e, const char *what)
{
	const struct kvd_error *why = e->client ? kvd_last_error(e->client) : NULL;

	fprintf(stderr, "bench_rooms: %s: %s\n", what, why ? why->message : "failed");
	exit(1);
}

static double now_s(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* One layer, one field, pages of one token: a page is 64 KiB in one piece. */
static void engine_open(struct engine *e, const char *socket, const char *role)
{
	struct kvd_options options = {.socket = socket, .client = "bench", .role = role};
	struct kvd_field field = {.name = "k",
				  .page_stride = PAGE_BYTES,
				  .token_stride = PAGE_BYTES,
				  .unit_stride = PAGE_BYTES,
				  .unit_bytes = PAGE_BYTES,
				  .units = 1,
				  .total_units = 1};
	struct kvd_layout *layout = kvd_layout_new(0);
	struct kvd_pool_args args = {.name = "bench", .regions = &e->region, .region_count = 1};
	uint32_t view;

	if (kvd_open(&options, &e->client) < 0)
		die(e, socket);
	if (kvd_memory_alloc((size_t)PAGES * PAGE_BYTES, role, &e->memory) < 0 ||
	    kvd_region_memory(e->client, &e->memory, NULL, &e->region) < 0)
		die(e, "memory");
	memset(e->memory.address, 1, e->memory.bytes);
	field.buffer = kvd_layout_buffer(layout, (uint64_t)PAGES * PAGE_BYTES);
	view = kvd_layout_view(layout, "kv", 1, PAGES);
	kvd_layout_field(layout, view, 0, &field);
	if (kvd_layout_text(layout, &args.layout) < 0 ||
	    kvd_pool_register(e->client, &args, NULL, &e->pool) < 0)
		die(e, "pool");
	kvd_layout_free(layout);
}

struct pair {
	struct kvd_room *send, *recv;
};

static void pair_open(struct pair *p, uint64_t number)
{
	struct kvd_source source = {.endpoint = kvd_daemon(prefill.client)->endpoint};
	struct kvd_room_args send = {.room = number, .role = KVD_SEND, .pool = prefill.pool};
	struct kvd_room_args recv = {.room = number,
				     .role = KVD_RECV,
				     .pool = decode.pool,
				     .sources = &source,
				     .source_count = 1};

	if (kvd_room_open(prefill.client, &send, NULL, &p->send) < 0)
		die(&prefill, "room.open send");
	if (kvd_room_open(decode.client, &recv, NULL, &p->recv) < 0)
		die(&decode, "room.open recv");
}

static void pair_close(struct pair *p)
{
	if (kvd_room_wait(p->recv, KVD_SUCCESS, 10000) < 0)
		die(&decode, "recv did not succeed");
	if (kvd_room_wait(p->send, KVD_SUCCESS, 10000) < 0)
		die(&prefill, "send did not succeed");
	if (kvd_room_close(p->recv, NULL) < 0)
		die(&decode, "room.close");
	if (kvd_room_close(p->send, NULL) < 0)
		die(&prefill, "room.close");
}

static void send_pages(struct pair *p, const uint32_t *pages, size_t n)
{
	struct kvd_view view = {.pages = pages, .page_count = n};
	struct kvd_send_args args = {.views = &view, .view_count = 1, .last = true};

	if (kvd_room_send(p->send, &args, NULL) < 0)
		die(&prefill, "room.send");
}

static void bind_pages(struct pair *p, const uint32_t *pages, size_t n)
{
	struct kvd_view view = {.pages = pages, .page_count = n};
	struct kvd_bind_args args = {.views = &view, .view_count = 1};

	if (kvd_room_bind(p->recv, &args, NULL) < 0)
		die(&decode, "room.bind");
}

/* Busy, as an engine's scheduler polls: one atomic load a turn. */
static void until_landed(const struct pair *p)
{
	double end = now_s() + 20;
	int state;

	while ((state = kvd_room_state(p->recv)) != KVD_SUCCESS) {
		if (state == KVD_FAILED || now_s() > end)
			die(&decode, "the room failed or hangs");
	}
}

static int by_value(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;

	return x < y ? -1 : x > y;
}

/* The receiver opens and binds while the sender's chunk is queued: what is timed
 * is the receiver's way from open to success. */
static void latency(unsigned int n)
{
	double *us = calloc(n, sizeof(*us));
	const uint32_t page = 3;

	for (unsigned int i = 0; i < n; i++) {
		struct pair p;
		struct kvd_source source = {.endpoint = kvd_daemon(prefill.client)->endpoint};
		struct kvd_room_args send = {
			.room = 1000 + i, .role = KVD_SEND, .pool = prefill.pool};
		struct kvd_room_args recv = {.room = 1000 + i,
					     .role = KVD_RECV,
					     .pool = decode.pool,
					     .sources = &source,
					     .source_count = 1};
		double begin;

		if (kvd_room_open(prefill.client, &send, NULL, &p.send) < 0)
			die(&prefill, "room.open send");
		send_pages(&p, &page, 1);
		begin = now_s();
		if (kvd_room_open(decode.client, &recv, NULL, &p.recv) < 0)
			die(&decode, "room.open recv");
		bind_pages(&p, &page, 1);
		until_landed(&p);
		us[i] = (now_s() - begin) * 1e6;
		pair_close(&p);
	}
	qsort(us, n, sizeof(*us), by_value);
	printf("{\"work\":\"room latency, one 64 KiB page\",\"rooms\":%u,\"p50_us\":%.0f,"
	       "\"p99_us\":%.0f}\n",
	       n, us[n / 2], us[n * 99 / 100]);
	free(us);
}

static void scatter(uint32_t *pages, uint32_t salt)
{
	for (uint32_t i = 0; i < ROOM_PAGES; i++)
		pages[i] = (i * 37 + salt * 11) % PAGES;
}

static void pages(unsigned int n)
{
	double *room_s = calloc(n, sizeof(double)), *copy_s = calloc(n, sizeof(double));
	double bytes = (double)ROOM_PAGES * PAGE_BYTES;

	for (unsigned int i = 0; i < n; i++) {
		uint32_t from[ROOM_PAGES], to[ROOM_PAGES];
		uint8_t *src = prefill.memory.address, *dst = decode.memory.address;
		struct pair p;
		double begin;

		scatter(from, i);
		scatter(to, i * 5 + 1);
		begin = now_s();
		for (unsigned int k = 0; k < ROOM_PAGES; k++)
			memcpy(dst + (size_t)to[k] * PAGE_BYTES,
			       src + (size_t)from[k] * PAGE_BYTES, PAGE_BYTES);
		copy_s[i] = now_s() - begin;
		pair_open(&p, 100000 + i);
		bind_pages(&p, to, ROOM_PAGES);
		if (kvd_room_wait(p.send, KVD_WAITING_FOR_INPUT, 5000) < 0)
			die(&prefill, "waiting_for_input");
		begin = now_s();
		send_pages(&p, from, ROOM_PAGES);
		until_landed(&p);
		room_s[i] = now_s() - begin;
		pair_close(&p);
	}
	qsort(room_s, n, sizeof(double), by_value);
	qsort(copy_s, n, sizeof(double), by_value);
	printf("{\"work\":\"room of 64 scattered 64 KiB pages\",\"rooms\":%u,\"kvd_gbps\":%.2f,"
	       "\"limit\":\"memcpy of the same rows, 1 thread\",\"limit_gbps\":%.2f,"
	       "\"ratio\":%.2f}\n",
	       n, bytes / room_s[n / 2] / 1e9, bytes / copy_s[n / 2] / 1e9,
	       copy_s[n / 2] / room_s[n / 2]);
	free(room_s);
	free(copy_s);
}

static void poll_rooms(unsigned int n)
{
	struct kvd_room **rooms = calloc(n, sizeof(struct kvd_room *));
	int *states = calloc(n, sizeof(int));
	size_t size = (size_t)n * 24 + 64, at;
	char *args = malloc(size), *reply;
	double begin, json_us = 1e9, page_ns = 1e9;

	at = (size_t)snprintf(args, size, "{\"rooms\":[");
	for (unsigned int i = 0; i < n; i++) {
		struct kvd_room_args send = {
			.room = 500000 + i, .role = KVD_SEND, .pool = prefill.pool};

		if (kvd_room_open(prefill.client, &send, NULL, &rooms[i]) < 0)
			die(&prefill, "room.open");
		at += (size_t)snprintf(args + at, size - at, "%s\"%u\"", i ? "," : "",
				       500000 + i);
	}
	snprintf(args + at, size - at, "]}");
	for (unsigned int k = 0; k < 20; k++) {
		double took;

		begin = now_s();
		if (kvd_command(prefill.client, "room.poll", args, 10000, &reply) < 0)
			die(&prefill, "room.poll");
		took = (now_s() - begin) * 1e6 / n;
		json_us = took < json_us ? took : json_us;
		kvd_string_free(reply);
		begin = now_s();
		for (unsigned int j = 0; j < 100; j++)
			kvd_room_states((const struct kvd_room *const *)rooms, n, states);
		took = (now_s() - begin) * 1e9 / (100.0 * n);
		page_ns = took < page_ns ? took : page_ns;
	}
	printf("{\"work\":\"poll of %u rooms\",\"json_us_a_room\":%.2f,"
	       "\"status_page_ns_a_room\":%.1f}\n", n, json_us, page_ns);
	for (unsigned int i = 0; i < n; i++) {
		kvd_room_abort(rooms[i], "bench", NULL);
		kvd_room_wait(rooms[i], KVD_FAILED, 5000);
		kvd_room_close(rooms[i], NULL);
	}
	free(rooms);
	free(states);
	free(args);
}

static long rss_kib(int pid)
{
	char path[64];
	long size = 0, resident = 0;
	FILE *f;

	snprintf(path, sizeof(path), "/proc/%d/statm", pid);
	f = fopen(path, "r");
	if (f && fscanf(f, "%ld %ld", &size, &resident) != 2)
		resident = 0;
	if (f)
		fclose(f);
	return resident * 4;
}

static int fd_count(int pid)
{
	char path[64];
	int n = 0;
	DIR *d;

	snprintf(path, sizeof(path), "/proc/%d/fd", pid);
	d = opendir(path);
	while (d && readdir(d))
		n++;
	if (d)
		closedir(d);
	return n - 2;
}

static void rooms_soak(unsigned int n)
{
	const uint32_t page = 7;
	int pids[2] = {kvd_daemon(prefill.client)->pid, kvd_daemon(decode.client)->pid};
	double begin = now_s();

	for (unsigned int i = 1; i <= n; i++) {
		struct pair p;

		pair_open(&p, 2000000 + i);
		bind_pages(&p, &page, 1);
		send_pages(&p, &page, 1);
		pair_close(&p);
		if (i % 1000 == 0)
			printf("{\"work\":\"rooms opened, run and closed\",\"rooms\":%u,"
			       "\"seconds\":%.1f,\"prefill_rss_kib\":%ld,\"prefill_fds\":%d,"
			       "\"decode_rss_kib\":%ld,\"decode_fds\":%d}\n",
			       i, now_s() - begin, rss_kib(pids[0]), fd_count(pids[0]),
			       rss_kib(pids[1]), fd_count(pids[1]));
	}
}

int main(int argc, char **argv)
{
	static const struct {
		const char *name;
		void (*run)(unsigned int n);
		unsigned int n;
	} works[] = {{"latency", latency, 1000},
		     {"pages", pages, 200},
		     {"poll", poll_rooms, 1000},
		     {"rooms", rooms_soak, 10000}};

	if (argc < 4) {
		fprintf(stderr, "usage: bench_rooms PREFILL_SOCKET DECODE_SOCKET "
				"latency|pages|poll|rooms [N]\n");
		return 2;
	}
	engine_open(&prefill, argv[1], "prefill");
	engine_open(&decode, argv[2], "decode");
	for (size_t i = 0; i < sizeof(works) / sizeof(works[0]); i++) {
		if (strcmp(argv[3], works[i].name) == 0) {
			works[i].run(argc > 4 ? (unsigned int)atoi(argv[4]) : works[i].n);
			return 0;
		}
	}
	fprintf(stderr, "bench_rooms: no such work: %s\n", argv[3]);
	return 2;
}
