/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bench_ring PREFILL_SOCKET DECODE_SOCKET [SECONDS]: what posting costs by the
 * submission ring, and what work does to the daemons' loops. One process plays both
 * engines; the prefill engine writes to the other.
 *
 * First calls, each with the time until its caller goes on and until the result
 * shows. Then loads for SECONDS (3) each; of the loops' turns in that time it shows
 * how long they were (stats, loop.cpu_us: with a core; busy_us: by the clock, which
 * on a machine with fewer cores than threads counts the others in).
 */
#include <cjson/cJSON.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/clock.h"
#include "daemon/base/mem.h"
#include "lib/kvd.h"

#define REGION_BYTES (UINT64_C(128) << 20)
#define ROW 256u
#define MANY 1000000u
#define BUCKETS 24u

struct engine {
	struct kvd_client *client;
	struct kvd_memory memory;
	struct kvd_region *region;
};

static struct engine a, b;
static uint64_t attach;

static void well(const struct engine *e, int r, const char *what)
{
	if (r >= 0)
		return;
	fprintf(stderr, "bench_ring: %s: %s\n", what,
		kvd_last_error(e ? e->client : NULL)->message);
	exit(1);
}

static void engine_open(struct engine *e, const char *socket)
{
	struct kvd_options o = {
		.socket = socket, .client = "bench_ring", .timeout_ms = 60000};

	well(NULL, kvd_open(&o, &e->client), socket);
	well(NULL, kvd_memory_alloc(REGION_BYTES, "bench", &e->memory), "memory");
	well(e, kvd_region_memory(e->client, &e->memory, NULL, &e->region), "region");
}

/* ---- times ------------------------------------------------------------------- */

struct times {
	double call[4096], done[4096];
	unsigned int count;
};

static int by_size(const void *x, const void *y)
{
	double l = *(const double *)x, r = *(const double *)y;

	return (l > r) - (l < r);
}

static void show(const char *what, struct times *t)
{
	qsort(t->call, t->count, sizeof(double), by_size);
	qsort(t->done, t->count, sizeof(double), by_size);
	printf("%-44s %9.2f %9.2f %10.2f %10.2f\n", what, t->call[t->count / 2],
	       t->call[t->count * 99 / 100], t->done[t->count / 2],
	       t->done[t->count * 99 / 100]);
	t->count = 0;
}

static void spin(const struct kvd_xfer *xfer)
{
	int state;

	while ((state = kvd_xfer_state(xfer)) != KVD_SUCCESS)
		if (state <= KVD_FAILED)
			well(&a, -1, "a transfer failed");
}

/* ---- lists and transfers -------------------------------------------------------- */

static uint64_t *table_new(const struct engine *e, uint32_t rows, uint64_t bytes,
			   bool scattered)
{
	uint64_t *table = calloc(rows, 3 * sizeof(*table)), places = REGION_BYTES / bytes;

	for (uint32_t i = 0; table && i < rows; i++) {
		uint64_t place = scattered ? i * UINT64_C(7919) % places : i % places;

		table[3 * i] = (uintptr_t)e->memory.address + place * bytes;
		table[3 * i + 1] = bytes;
	}
	return table;
}

static struct kvd_dlist *list(const struct engine *whose, uint64_t at, uint32_t rows,
			      uint64_t bytes, bool scattered)
{
	uint64_t *table = table_new(whose, rows, bytes, scattered);
	struct kvd_dlist *dlist;
	int r;

	well(&a, kvd_dlist_prep(a.client, at, table, rows, 3, &dlist), "dlist_prep");
	while (!(r = kvd_dlist_state(dlist)))
		;
	well(&a, r < 0 ? -1 : 0, "a list was refused");
	free(table);
	return dlist;
}

static struct kvd_xfer *make(struct kvd_dlist *own, struct kvd_dlist *theirs)
{
	struct kvd_xfer_args args = {.op = KVD_WRITE, .local = own, .remote = theirs};
	struct kvd_xfer *xfer;

	well(&a, kvd_xfer_make(a.client, &args, &xfer), "xfer_make");
	return xfer;
}

static void post(struct kvd_xfer *xfer)
{
	well(&a, kvd_xfer_post(xfer, NULL, 0), "xfer_post");
}

/* ---- calls --------------------------------------------------------------------------
 */

static void bench_posts(const char *what, uint32_t rows, unsigned int rounds)
{
	struct kvd_dlist *own = list(&a, 0, rows, ROW, true);
	struct kvd_dlist *theirs = list(&b, attach, rows, ROW, true);
	struct kvd_xfer *xfer = make(own, theirs);
	struct times ring = {0};
	char name[64];

	post(xfer);
	spin(xfer);
	for (unsigned int i = 0; i < rounds; i++) {
		double t = clock_us();

		post(xfer);
		ring.call[ring.count] = clock_us() - t;
		spin(xfer);
		ring.done[ring.count++] = clock_us() - t;
	}
	snprintf(name, sizeof(name), "post %s", what);
	show(name, &ring);
	kvd_xfer_release(xfer);
	kvd_dlist_release(own);
	kvd_dlist_release(theirs);
}

static void bench_making(void)
{
	struct kvd_dlist *own = list(&a, 0, 64, ROW, true);
	struct kvd_dlist *theirs = list(&b, attach, 64, ROW, true);
	struct times t = {0};

	for (unsigned int i = 0; i < 1000; i++) {
		double from = clock_us();
		struct kvd_xfer *xfer = make(own, theirs);

		post(xfer);
		t.call[t.count] = clock_us() - from;
		spin(xfer);
		kvd_xfer_release(xfer);
		t.done[t.count++] = clock_us() - from;
	}
	show("make, post, wait, release; 64 rows", &t);
	kvd_dlist_release(own);
	kvd_dlist_release(theirs);
}

static void bench_lists(void)
{
	uint64_t *table = table_new(&a, MANY, ROW, true);
	struct times ring = {0};
	struct kvd_dlist *dlist;

	for (unsigned int i = 0; i < 5; i++) {
		double t = clock_us();

		well(&a, kvd_dlist_prep(a.client, 0, table, MANY, 3, &dlist),
		     "dlist_prep");
		ring.call[ring.count] = clock_us() - t;
		while (!kvd_dlist_state(dlist))
			;
		ring.done[ring.count++] = clock_us() - t;
		kvd_dlist_release(dlist);
	}
	show("list of 10^6 scattered rows", &ring);
	free(table);
}

static void bench_looks(void)
{
	struct kvd_dlist *own = list(&a, 0, 1, ROW, true);
	struct kvd_dlist *theirs = list(&b, attach, 1, ROW, true);
	struct kvd_xfer *xfer = make(own, theirs);
	uint64_t seen = 0;
	double t;

	post(xfer);
	spin(xfer);
	t = clock_us();
	for (unsigned int i = 0; i < 1000000; i++)
		seen += (uint64_t)kvd_xfer_state(xfer);
	printf("%-44s %9.4f\n", "state of a transfer", (clock_us() - t) / 1e6);
	t = clock_us();
	for (unsigned int i = 0; i < 1000000; i++)
		seen += kvd_notif_waiting(a.client);
	printf("%-44s %9.4f\n", "are there notifications?", (clock_us() - t) / 1e6);
	if (seen == 0)
		puts("");
	kvd_xfer_release(xfer);
	kvd_dlist_release(own);
	kvd_dlist_release(theirs);
}

/* ---- loads ----------------------------------------------------------------------------
 */

struct turns {
	double busy[BUCKETS], cpu[BUCKETS];
};

static void turns_of(const cJSON *loop, const char *name, double buckets[BUCKETS])
{
	const cJSON *h = cJSON_GetObjectItemCaseSensitive(loop, name), *n;
	unsigned int i = 0;

	cJSON_ArrayForEach(n, cJSON_GetObjectItemCaseSensitive(h, "buckets"))
		if (i < BUCKETS)
			buckets[i++] = cJSON_GetNumberValue(n);
}

static void turns_read(const struct engine *e, struct turns *turns)
{
	char *line;
	cJSON *json;
	const cJSON *loop;

	well(e, kvd_command(e->client, "stats", NULL, 0, &line), "stats");
	json = cJSON_Parse(line);
	loop = cJSON_GetObjectItemCaseSensitive(json, "loop");
	turns_of(loop, "busy_us", turns->busy);
	turns_of(loop, "cpu_us", turns->cpu);
	cJSON_Delete(json);
	kvd_string_free(line);
}

/* Upper end of the bucket that holds this share of what came in between; the last
 * one with anything in it for 1. */
static double share_us(const double *from, const double *to, double share)
{
	double all = 0, seen = 0;
	unsigned int last = 0;

	for (unsigned int i = 0; i < BUCKETS; i++) {
		all += to[i] - from[i];
		if (to[i] > from[i])
			last = i;
	}
	for (unsigned int i = 0; i <= last; i++) {
		seen += to[i] - from[i];
		if (seen >= share * all)
			return (double)(1u << i);
	}
	return (double)(1u << last);
}

static double over_200(const double *from, const double *to)
{
	double n = 0;

	for (unsigned int i = 9; i < BUCKETS; i++) /* 256 us and more */
		n += to[i] - from[i];
	return n;
}

static void turns_show(const char *what, const char *who, const struct turns *x,
		       const struct turns *y)
{
	double all = 0;

	for (unsigned int i = 0; i < BUCKETS; i++)
		all += y->cpu[i] - x->cpu[i];
	printf("%-30s %-7s %8.0f  <%-6.0f <%-6.0f <%-7.0f %6.0f   <%-6.0f <%-7.0f\n",
	       what, who, all, share_us(x->cpu, y->cpu, .99),
	       share_us(x->cpu, y->cpu, .999), share_us(x->cpu, y->cpu, 1),
	       over_200(x->cpu, y->cpu), share_us(x->busy, y->busy, .99),
	       share_us(x->busy, y->busy, 1));
}

static void load(const char *what, double seconds, void (*once)(void *arg), void *arg)
{
	struct turns a0, a1, b0, b1;
	double until = clock_us() + seconds * 1e6;

	turns_read(&a, &a0);
	turns_read(&b, &b0);
	while (clock_us() < until)
		once(arg);
	turns_read(&a, &a1);
	turns_read(&b, &b1);
	turns_show(what, "prefill", &a0, &a1);
	turns_show("", "decode", &b0, &b1);
}

static void once_posted(void *arg)
{
	post(arg);
	spin(arg);
}

static void load_posts(const char *what, uint32_t rows, uint64_t bytes, double seconds)
{
	struct kvd_dlist *own = list(&a, 0, rows, bytes, true);
	struct kvd_dlist *theirs = list(&b, attach, rows, bytes, true);
	struct kvd_xfer *xfer = make(own, theirs);

	once_posted(xfer);
	load(what, seconds, once_posted, xfer);
	kvd_xfer_release(xfer);
	kvd_dlist_release(own);
	kvd_dlist_release(theirs);
}

static void once_made(void *arg)
{
	struct kvd_dlist **lists = arg;
	struct kvd_xfer *xfer = make(lists[0], lists[1]);

	once_posted(xfer);
	kvd_xfer_release(xfer);
}

static void load_new(const char *what, uint32_t rows, double seconds)
{
	struct kvd_dlist *lists[] = {list(&a, 0, rows, ROW, true),
				     list(&b, attach, rows, ROW, true)};

	once_made(lists);
	load(what, seconds, once_made, lists);
	kvd_dlist_release(lists[0]);
	kvd_dlist_release(lists[1]);
}

static void once_indexed(void *arg)
{
	struct kvd_dlist **lists = arg;
	static uint32_t index[40000];
	struct kvd_xfer_args args = {.op = KVD_WRITE,
				     .local = lists[0],
				     .remote = lists[1],
				     .local_index = index,
				     .remote_index = index,
				     .local_index_count = 40000,
				     .remote_index_count = 40000};
	struct kvd_xfer *xfer;

	for (uint32_t i = 0; i < 40000; i++)
		index[i] = i * 7u % 100000u;
	well(&a, kvd_xfer_make(a.client, &args, &xfer), "xfer_make");
	once_posted(xfer);
	kvd_xfer_release(xfer);
}

static void load_indexed(double seconds)
{
	struct kvd_dlist *lists[] = {list(&a, 0, 100000, ROW, true),
				     list(&b, attach, 100000, ROW, true)};

	once_indexed(lists);
	load("40000 of 100000 rows by index", seconds, once_indexed, lists);
	kvd_dlist_release(lists[0]);
	kvd_dlist_release(lists[1]);
}

static void once_listed(void *arg)
{
	struct kvd_dlist *dlists[2] = {list(&a, 0, MANY, ROW, true),
				       list(&b, attach, MANY, ROW, true)};

	(void)arg;
	once_made(dlists);
	kvd_dlist_release(dlists[0]);
	kvd_dlist_release(dlists[1]);
}

/* ---- rooms ---------------------------------------------------------------------------
 */

#define PAGES 262144u
#define PAGE 256u

static const struct kvd_call posted = {.post = true};
static uint32_t page_list[2][PAGES / 2];
static struct kvd_pool *pools[2];
static uint64_t room_number;

static void pool_open(const struct engine *e, struct kvd_pool **pool_p)
{
	struct kvd_layout *layout = kvd_layout_new(0);
	struct kvd_field field = {.name = "k", .unit_bytes = PAGE, .units = 1};
	struct kvd_pool_args args = {.regions = &e->region, .region_count = 1};

	field.buffer = kvd_layout_buffer(layout, (uint64_t)PAGES * PAGE);
	kvd_layout_heads(layout, kvd_layout_view(layout, "kv", 1, PAGES), 0, KVD_NHD,
			 &field);
	well(NULL, kvd_layout_text(layout, &args.layout), "layout");
	well(e, kvd_pool_register(e->client, &args, NULL, pool_p), "pool");
	kvd_layout_free(layout);
}

enum { OPEN_TX, OPEN_RX, BIND, SEND, CLOSE_TX, CLOSE_RX, CALLS };
static struct times room_calls[CALLS];

static void room_call(unsigned int which, int r, double begin)
{
	struct times *t = &room_calls[which];

	well(which == OPEN_RX || which == BIND || which == CLOSE_RX ? &b : &a, r, "room");
	if (t->count < ARRAY_LEN(t->call))
		t->call[t->count++] = clock_us() - begin;
}

static void room_until(const struct engine *e, struct kvd_room *room, int state)
{
	int now;

	while ((now = kvd_room_state(room)) < state) {
		if (now > KVD_FAILED)
			continue;
		fprintf(stderr, "bench_ring: %s\n", kvd_room_why(room, 1000)->message);
		well(e, -1, "a room failed");
	}
}

/* One request from its opening to its end, each call timed in its engine. */
static void room_once(uint32_t pages, const struct kvd_call *call)
{
	struct kvd_source source = {.endpoint = kvd_daemon(a.client)->endpoint};
	struct kvd_view view = {.pages = page_list[1], .page_count = pages};
	struct kvd_room_args tx = {
		.room = ++room_number, .role = KVD_SEND, .pool = pools[0]};
	struct kvd_room_args rx = {.room = room_number,
				   .role = KVD_RECV,
				   .pool = pools[1],
				   .sources = &source,
				   .source_count = 1};
	struct kvd_room_pages bind = {.views = &view, .view_count = 1};
	struct kvd_room_pages send = {.views = &view, .view_count = 1, .last = true};
	struct kvd_room *sender, *receiver;
	double t = clock_us();

	room_call(OPEN_TX, kvd_room_open(a.client, &tx, call, &sender), t);
	t = clock_us();
	room_call(OPEN_RX, kvd_room_open(b.client, &rx, call, &receiver), t);
	t = clock_us();
	room_call(BIND, kvd_room_bind(receiver, &bind, call), t);
	room_until(&a, sender, KVD_WAITING_FOR_INPUT);
	view.pages = page_list[0];
	t = clock_us();
	room_call(SEND, kvd_room_send(sender, &send, call), t);
	room_until(&b, receiver, KVD_SUCCESS);
	room_until(&a, sender, KVD_SUCCESS);
	t = clock_us();
	room_call(CLOSE_TX, kvd_room_close(sender, call), t);
	t = clock_us();
	room_call(CLOSE_RX, kvd_room_close(receiver, call), t);
}

static void bench_room(uint32_t pages, const struct kvd_call *call, unsigned int rounds)
{
	static const char *const names[] = {"open (send)",  "open (recv)", "bind", "send",
					    "close (send)", "close (recv)"};

	for (unsigned int i = 0; i < rounds; i++)
		room_once(pages, call);
	for (unsigned int i = 0; i < CALLS; i++) {
		struct times *t = &room_calls[i];

		qsort(t->call, t->count, sizeof(double), by_size);
		printf("room, %6u pages, %-8s %-14s %9.2f %9.2f\n", pages,
		       call ? "posted" : "answered", names[i], t->call[t->count / 2],
		       t->call[t->count * 99 / 100]);
		t->count = 0;
	}
}

static void once_room(void *arg)
{
	room_once(*(const uint32_t *)arg, &posted);
	for (unsigned int i = 0; i < CALLS; i++)
		room_calls[i].count = 0;
}

static void load_rooms(const char *what, uint32_t pages, double seconds)
{
	once_room(&pages);
	load(what, seconds, once_room, &pages);
}

static void rooms_begin(void)
{
	pool_open(&a, &pools[0]);
	pool_open(&b, &pools[1]);
	for (uint32_t i = 0; i < PAGES / 2; i++) { /* no two side by side */
		page_list[0][i] = 2 * (i * 7u % (PAGES / 2));
		page_list[1][i] = 2 * (i * 5u % (PAGES / 2)) + 1;
	}
}

int main(int argc, char **argv)
{
	struct kvd_session_key key;
	double seconds = argc > 3 ? atof(argv[3]) : 3;

	if (argc < 3) {
		fputs("usage: bench_ring PREFILL_SOCKET DECODE_SOCKET [SECONDS]\n",
		      stderr);
		return 2;
	}
	engine_open(&a, argv[1]);
	engine_open(&b, argv[2]);
	well(&b, kvd_session_key(b.client, 0, &key), "session key");
	well(&a,
	     kvd_peer_attach(a.client, kvd_daemon(b.client)->endpoint, &key, NULL,
			     &attach),
	     "attach");
	printf("%-44s %9s %9s %10s %10s\n", "us", "call p50", "p99", "done p50", "p99");
	bench_posts("1 x 256 B again", 1, 2000);
	bench_posts("40000 x 256 B again", 40000, 50);
	bench_making();
	bench_lists();
	bench_looks();
	rooms_begin();
	for (uint32_t pages = 1; pages <= 4096; pages *= 64) {
		bench_room(pages, &posted, 500);
		bench_room(pages, NULL, 500);
	}
	bench_room(PAGES / 2, &posted, 10);
	printf("\n%-30s %-7s %8s  %-7s %-7s %-8s %6s   %-7s %-8s\n",
	       "load (us of a turn)", "loop", "turns", "cpu p99", "p99.9", "longest",
	       ">256", "p99", "longest");
	load_posts("1 x 256 B posted again", 1, ROW, seconds);
	load_posts("1024 x 64 KiB posted again", 1024, 65536, seconds);
	load_posts("16384 x 4 KiB posted again", 16384, 4096, seconds);
	load_posts("40000 x 256 B posted again", 40000, ROW, seconds);
	load_new("40000 x 256 B made anew", 40000, seconds);
	load_indexed(seconds);
	load("lists of 10^6 rows made anew", seconds, once_listed, NULL);
	load_rooms("rooms of 1 page, posted", 1, seconds);
	load_rooms("rooms of 4096 pages, posted", 4096, seconds);
	load_rooms("rooms of 131072 pages, posted", PAGES / 2, seconds);
	kvd_close(a.client);
	kvd_close(b.client);
	return 0;
}
