/* SPDX-License-Identifier: Apache-2.0 */
/*
 * libkvd against the real daemon: what the scripted one of tests/unit cannot
 * show. Two engines (two clients of this process) of one daemon hand memory of
 * every kind over; the daemon is frozen, killed, started again. Sees nothing of
 * kvd but its public header, its library and its program.
 */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "lib/kvd.h"
#include "tests/lib/live_daemon.h"
#include "tests/lib/tmp.h"

#define PAGES 64u
#define PAGE_TOKENS 4u
#define TOKEN_BYTES 512u
#define PAGE_BYTES (PAGE_TOKENS * TOKEN_BYTES)
#define WAIT_MS 20000

struct engine {
	struct kvd_client *client;
	struct kvd_memory memory;
	uint8_t *bytes; /* PAGES pages */
	struct kvd_region *region;
	struct kvd_pool *pool;
};

struct fixture {
	struct live_daemon daemon;
	struct engine a, b;
};

/* ---- the engines ---------------------------------------------------------------- */

static void pool_register(struct engine *e)
{
	struct kvd_field field = {.name = "kv", .unit_bytes = TOKEN_BYTES, .units = 1};
	struct kvd_layout *layout = kvd_layout_new(0);
	struct kvd_pool_args args = {.regions = &e->region, .region_count = 1};
	const char *text;

	field.buffer = kvd_layout_buffer(layout, PAGES * PAGE_BYTES);
	kvd_layout_heads(layout, kvd_layout_view(layout, "kv", PAGE_TOKENS, PAGES), 0,
			 KVD_NHD, &field);
	live_well(NULL, kvd_layout_text(layout, &text));
	args.layout = text;
	live_well(e->client, kvd_pool_register(e->client, &args, NULL, &e->pool));
	kvd_layout_free(layout);
}

static void engine_open(struct fixture *f, struct engine *e, enum kvd_region_kind kind)
{
	struct kvd_region_args args = {.kind = kind, .bytes = PAGES * PAGE_BYTES};
	char shm[64];

	e->client = live_daemon_client(&f->daemon, "live-test", WAIT_MS);
	live_well(NULL, kvd_memory_alloc(PAGES * PAGE_BYTES, "live", &e->memory));
	e->bytes = e->memory.address;
	args.fd = e->memory.fd;
	args.address = e->bytes;
	if (kind == KVD_REGION_SHM) {
		int fd = shm_open(tmp_name(shm, sizeof(shm), "/kvd-live"),
				  O_CREAT | O_EXCL | O_RDWR, 0600);

		assert_true(fd >= 0);
		assert_int_equal(ftruncate(fd, PAGES * PAGE_BYTES), 0);
		e->bytes = mmap(NULL, PAGES * PAGE_BYTES, PROT_READ | PROT_WRITE,
				MAP_SHARED, fd, 0);
		assert_true(e->bytes != MAP_FAILED);
		close(fd);
		args.shm_name = shm;
		args.address = e->bytes;
	}
	memset(e->bytes, 0xa5, PAGES * PAGE_BYTES);
	live_well(e->client, kvd_region_register(e->client, &args, NULL, &e->region));
	if (kind == KVD_REGION_SHM)
		shm_unlink(shm);
	pool_register(e);
}

static void engine_close(struct engine *e)
{
	kvd_close(e->client);
	if (e->bytes && e->bytes != e->memory.address)
		munmap(e->bytes, PAGES * PAGE_BYTES);
	if (e->memory.address)
		kvd_memory_free(&e->memory);
	memset(e, 0, sizeof(*e));
}

static int setup(void **state)
{
	struct fixture *f = calloc(1, sizeof(*f));

	live_daemon_init(&f->daemon);
	*state = f;
	return 0;
}

static int teardown(void **state)
{
	struct fixture *f = *state;

	engine_close(&f->a);
	engine_close(&f->b);
	live_daemon_fini(&f->daemon);
	free(f);
	return 0;
}

/* ---- rooms ------------------------------------------------------------------------ */

static const uint32_t pages_a[] = {5, 9, 2}, pages_b[] = {60, 1, 33};

static uint8_t pattern(uint32_t page, uint32_t byte)
{
	return (uint8_t)(page * 31 + byte * 7 + byte / 256);
}

static void fill(struct engine *e)
{
	for (uint32_t i = 0; i < 3; i++)
		for (uint32_t b = 0; b < PAGE_BYTES; b++)
			e->bytes[pages_a[i] * PAGE_BYTES + b] = pattern(i, b);
}

/* The first `pages` arrived; nothing else changed. */
static void check(const struct engine *e, uint32_t pages)
{
	for (uint32_t page = 0; page < PAGES; page++) {
		uint32_t index = 3;

		for (uint32_t i = 0; i < pages; i++)
			if (pages_b[i] == page)
				index = i;
		for (uint32_t b = 0; b < PAGE_BYTES; b++)
			assert_int_equal(e->bytes[page * PAGE_BYTES + b],
					 index < 3 ? pattern(index, b) : 0xa5);
	}
}

static struct kvd_room *room_open(struct engine *e, uint64_t number, enum kvd_role role)
{
	struct kvd_source source = {0};
	struct kvd_room_args args = {.room = number, .role = role, .pool = e->pool};
	struct kvd_room *room;

	if (role == KVD_RECV) {
		args.sources = &source;
		args.source_count = 1;
	}
	live_well(e->client, kvd_room_open(e->client, &args, NULL, &room));
	return room;
}

static void send_pages(struct engine *e, struct kvd_room *room, uint32_t seq,
		       uint32_t pages, bool last)
{
	struct kvd_view view = {.pages = pages_a, .page_count = pages};
	struct kvd_room_pages args = {
		.seq = seq, .views = &view, .view_count = 1, .last = last};

	live_well(e->client, kvd_room_send(room, &args, NULL));
}

static void bind_pages(struct engine *e, struct kvd_room *room)
{
	struct kvd_view view = {.pages = pages_b, .page_count = 3};
	struct kvd_room_pages args = {.views = &view, .view_count = 1};

	live_well(e->client, kvd_room_bind(room, &args, NULL));
}

static void push(struct fixture *f, uint64_t number)
{
	struct kvd_room *from = room_open(&f->a, number, KVD_SEND);
	struct kvd_room *to = room_open(&f->b, number, KVD_RECV);
	struct kvd_room_status st;

	fill(&f->a);
	bind_pages(&f->b, to);
	assert_int_equal(kvd_room_wait(from, KVD_WAITING_FOR_INPUT, WAIT_MS),
			 KVD_WAITING_FOR_INPUT);
	send_pages(&f->a, from, 0, 3, true);
	assert_int_equal(kvd_room_wait(to, KVD_SUCCESS, WAIT_MS), KVD_SUCCESS);
	assert_int_equal(kvd_room_wait(from, KVD_SUCCESS, WAIT_MS), KVD_SUCCESS);
	check(&f->b, 3);
	assert_int_equal(kvd_room_read(to, &st), 0);
	assert_int_equal(st.bytes, 3 * PAGE_BYTES);
	live_well(f->a.client, kvd_room_close(from, NULL));
	live_well(f->b.client, kvd_room_close(to, NULL));
}

static void push_of_kind(void **state, enum kvd_region_kind kind)
{
	struct fixture *f = *state;

	engine_open(f, &f->a, kind);
	engine_open(f, &f->b, kind);
	push(f, 7);
}

static void push_between_memfds_arrives(void **state)
{
	push_of_kind(state, KVD_REGION_MEMFD);
}

static void push_between_shm_objects_arrives(void **state)
{
	push_of_kind(state, KVD_REGION_SHM);
}

static void push_between_plain_memory_arrives(void **state)
{
	push_of_kind(state, KVD_REGION_VM);
}

static void hello_names_the_process_that_answers(void **state)
{
	struct fixture *f = *state;

	f->a.client = live_daemon_client(&f->daemon, "live-test", WAIT_MS);
	assert_int_equal(kvd_daemon(f->a.client)->pid, f->daemon.pid);
	assert_string_equal(kvd_daemon(f->a.client)->name, "live");
	assert_int_equal(strlen(kvd_daemon(f->a.client)->instance), 32);
}

static void region_of_a_pool_is_busy(void **state)
{
	struct fixture *f = *state;

	engine_open(f, &f->a, KVD_REGION_MEMFD);
	assert_int_equal(kvd_region_unregister(f->a.region, NULL), -KVD_E_BUSY);
	live_well(f->a.client, kvd_pool_unregister(f->a.pool, NULL));
	live_well(f->a.client, kvd_region_unregister(f->a.region, NULL));
}

static void room_aborted_tells_what_landed(void **state)
{
	struct fixture *f = *state;
	struct kvd_room *from, *to;
	struct kvd_room_status st;
	uint8_t landed[8];

	engine_open(f, &f->a, KVD_REGION_MEMFD);
	engine_open(f, &f->b, KVD_REGION_MEMFD);
	fill(&f->a);
	from = room_open(&f->a, 8, KVD_SEND);
	to = room_open(&f->b, 8, KVD_RECV);
	live_well(f->a.client, kvd_room_read(from, &st));
	assert_int_equal(st.first_token, -1);
	bind_pages(&f->b, to);
	assert_int_equal(kvd_room_wait(from, KVD_WAITING_FOR_INPUT, WAIT_MS),
			 KVD_WAITING_FOR_INPUT);
	live_well(f->a.client, kvd_room_read(from, &st));
	assert_int_equal(st.first_token, 0);
	send_pages(&f->a, from, 0, 1, false);
	do
		live_well(f->b.client, kvd_room_read(to, &st));
	while (st.bytes < PAGE_BYTES && st.state != KVD_FAILED);
	live_well(f->b.client, kvd_room_abort(to, "enough", NULL));
	assert_int_equal(kvd_room_wait(to, KVD_SUCCESS, WAIT_MS), KVD_FAILED);
	assert_int_equal(kvd_room_wait(from, KVD_SUCCESS, WAIT_MS), KVD_FAILED);
	live_well(f->b.client, kvd_room_read(to, &st));
	assert_int_equal(st.error, KVD_E_ABORTED);
	live_well(f->b.client, kvd_room_landed(to, NULL, 0, landed, sizeof(landed)));
	assert_int_equal(landed[0], 1);
	check(&f->b, 1);
}

/* It listens (and not only exists). */
static void until_daemon(struct fixture *f)
{
	kvd_close(live_daemon_client(&f->daemon, "is it there?", WAIT_MS));
}

static void until_lost(struct kvd_client *client)
{
	while (kvd_poll(client, 1000) >= 0)
		;
	assert_true(kvd_lost(client));
}

static void daemon_killed_fails_rooms_and_another_takes_over(void **state)
{
	struct fixture *f = *state;
	struct kvd_room *room;
	struct kvd_room_status st;

	engine_open(f, &f->a, KVD_REGION_MEMFD);
	engine_open(f, &f->b, KVD_REGION_VM);
	room = room_open(&f->a, 9, KVD_SEND);
	assert_int_equal(kvd_room_state(room), KVD_BOOTSTRAPPING);
	live_daemon_kill(&f->daemon);
	assert_int_equal(kvd_room_wait(room, KVD_SUCCESS, WAIT_MS), KVD_FAILED);
	live_well(f->a.client, kvd_room_read(room, &st));
	assert_int_equal(st.error, KVD_E_DEAD);
	assert_true(st.retryable);
	until_lost(f->a.client);
	until_lost(f->b.client);
	live_well(f->a.client, kvd_room_close(room, NULL));
	assert_int_equal(kvd_reconnect(f->a.client, 1000), -KVD_E_NODAEMON);
	live_daemon_start(&f->daemon);
	engine_close(&f->b);
	engine_open(f, &f->b, KVD_REGION_MEMFD); /* waits for it */
	/* nobody told the other one, which is up with its next request */
	push(f, 9);
}

/* An upgrade: the old daemon lets what runs end, takes nothing new and goes; the
 * engines keep their processes and do nothing about it. */
static void daemon_upgraded_under_live_engines(void **state)
{
	struct fixture *f = *state;
	struct kvd_room_args args = {.room = 22, .role = KVD_SEND};
	struct kvd_room *from, *to, *refused;
	int status = -1, r = 0;

	engine_open(f, &f->a, KVD_REGION_MEMFD);
	engine_open(f, &f->b, KVD_REGION_MEMFD);
	from = room_open(&f->a, 21, KVD_SEND);
	to = room_open(&f->b, 21, KVD_RECV);
	fill(&f->a);
	bind_pages(&f->b, to);
	assert_int_equal(kvd_room_wait(from, KVD_WAITING_FOR_INPUT, WAIT_MS),
			 KVD_WAITING_FOR_INPUT);
	send_pages(&f->a, from, 0, 1, false);
	kill(f->daemon.pid, SIGTERM);
	args.pool = f->a.pool;
	for (int i = 0; i < WAIT_MS && r != -KVD_E_DRAIN; i++) {
		r = kvd_room_open(f->a.client, &args, NULL, &refused);
		if (!r) { /* it has not looked yet */
			live_well(f->a.client,
				  kvd_room_abort(refused, "too early", NULL));
			assert_int_equal(kvd_room_wait(refused, KVD_SUCCESS, WAIT_MS),
					 KVD_FAILED);
			live_well(f->a.client, kvd_room_close(refused, NULL));
		}
	}
	assert_int_equal(r, -KVD_E_DRAIN);
	assert_true(kvd_last_error(f->a.client)->retryable);
	/* the running one ends well */
	struct kvd_view rest = {
		.pages = pages_a + 1, .page_count = 2, .first_token = PAGE_TOKENS};
	struct kvd_room_pages last = {
		.seq = 1, .views = &rest, .view_count = 1, .last = true};

	live_well(f->a.client, kvd_room_send(from, &last, NULL));
	assert_int_equal(kvd_room_wait(to, KVD_SUCCESS, WAIT_MS), KVD_SUCCESS);
	assert_int_equal(kvd_room_wait(from, KVD_SUCCESS, WAIT_MS), KVD_SUCCESS);
	check(&f->b, 3);
	assert_int_equal(waitpid(f->daemon.pid, &status, 0), f->daemon.pid);
	assert_int_equal(status, 0);
	live_daemon_start(&f->daemon);
	/* both handles outlive their daemon; then the next request, as if nothing was */
	assert_int_equal(kvd_room_state(from), KVD_SUCCESS);
	live_well(f->a.client, kvd_room_close(from, NULL));
	live_well(f->b.client, kvd_room_close(to, NULL));
	memset(f->b.bytes, 0xa5, PAGES * PAGE_BYTES);
	until_daemon(f);
	push(f, 23);
}

static unsigned int open_fds(void)
{
	unsigned int n = 0;

	for (int fd = 0; fd < 1024; fd++)
		n += fcntl(fd, F_GETFD) >= 0;
	return n;
}

/* An engine with an event loop: it polls one fd, never blocks in libkvd, and after
 * each of many kills it is back by itself; nothing is left over in it. */
static void daemon_killed_again_and_again_under_an_event_loop(void **state)
{
	struct fixture *f = *state;
	struct kvd_room_status st;
	unsigned int fds = 0;

	engine_open(f, &f->a, KVD_REGION_MEMFD);
	engine_open(f, &f->b, KVD_REGION_VM);
	for (unsigned int round = 0; round < 8; round++) {
		struct kvd_room *room = room_open(&f->a, 30 + round, KVD_SEND);

		live_daemon_kill(&f->daemon);
		live_daemon_start(&f->daemon);
		for (int i = 0; i < WAIT_MS; i++) {
			struct kvd_client *c = f->a.client;
			struct pollfd p = {.fd = kvd_fd(c), .events = kvd_events(c)};
			int ms = kvd_timeout_ms(c);

			if (i && !kvd_lost(c) && kvd_daemon(c)->pid == f->daemon.pid)
				break;
			poll(&p, 1, ms >= 0 && ms < 20 ? ms : 20);
			kvd_poll(c, 0);
		}
		assert_false(kvd_lost(f->a.client));
		assert_int_equal(kvd_daemon(f->a.client)->pid, f->daemon.pid);
		assert_int_equal(kvd_room_wait(room, KVD_SUCCESS, WAIT_MS), KVD_FAILED);
		live_well(f->a.client, kvd_room_read(room, &st));
		assert_int_equal(st.error, KVD_E_DEAD);
		assert_true(st.retryable);
		live_well(f->a.client, kvd_room_close(room, NULL));
		memset(f->b.bytes, 0xa5, PAGES * PAGE_BYTES);
		push(f, 50 + round);
		if (!round)
			fds = open_fds();
	}
	assert_int_equal(open_fds(), fds);
}

/* In the namespace: 0, or the line that failed. */
static int side_car(struct fixture *f, int say, int hear)
{
	struct kvd_options o = {
		.socket = f->daemon.socket, .client = "side car", .timeout_ms = WAIT_MS};
	struct kvd_memory memory;
	struct engine e = {.client = NULL};
	struct kvd_room_args args = {.room = 25, .role = KVD_SEND};
	struct kvd_room_status st;
	struct kvd_room *room;
	char c = 'y';

	if (kvd_open(&o, &e.client) || kvd_daemon(e.client)->pid != 0)
		return __LINE__; /* it is not visible */
	if (kvd_memory_alloc(PAGES * PAGE_BYTES, "side car", &memory) ||
	    kvd_region_memory(e.client, &memory, NULL, &e.region))
		return __LINE__;
	pool_register(&e);
	args.pool = e.pool;
	if (kvd_room_open(e.client, &args, NULL, &room) ||
	    kvd_room_state(room) != KVD_BOOTSTRAPPING)
		return __LINE__;
	if (write(say, &c, 1) != 1 || read(hear, &c, 1) != 1)
		return __LINE__;
	if (kvd_room_wait(room, KVD_SUCCESS, WAIT_MS) != KVD_FAILED ||
	    kvd_room_read(room, &st) || st.error != KVD_E_DEAD || !st.retryable)
		return __LINE__;
	return kvd_room_close(room, NULL) ? __LINE__ : 0;
}

static bool may_have_a_pid_namespace(void)
{
	pid_t pid = fork();
	int status = -1;

	if (!pid)
		_exit(unshare(CLONE_NEWPID) < 0);
	return waitpid(pid, &status, 0) == pid && status == 0;
}

/* An engine whose daemon lives outside of its PID namespace: no number names it. */
static void daemon_beyond_the_pid_namespace_is_seen_to_die(void **state)
{
	struct fixture *f = *state;
	int to[2], from[2], pair[2], status = -1, line = 0, one = 1;
	bool can;
	pid_t pid;
	char c;

	assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM, 0, pair), 0);
	/* SO_PASSPIDFD: Linux 6.5 */
	can = setsockopt(pair[0], SOL_SOCKET, 76, &one, sizeof(one)) == 0 &&
	      may_have_a_pid_namespace();
	close(pair[0]);
	close(pair[1]);
	if (!can)
		skip();
	assert_int_equal(pipe(to), 0);
	assert_int_equal(pipe(from), 0);
	pid = fork();
	if (!pid) {
		if (unshare(CLONE_NEWPID) < 0)
			_exit(1);
		pid = fork();
		if (!pid) {
			line = side_car(f, from[1], to[0]);
			_exit(write(from[1], &line, sizeof(line)) != sizeof(line));
		}
		waitpid(pid, &status, 0);
		_exit(0);
	}
	close(from[1]);
	if (read(from[0], &c, 1) != 1 || c != 'y')
		fail_msg("the side car did not get so far");
	live_daemon_kill(&f->daemon);
	assert_int_equal(write(to[1], &c, 1), 1);
	assert_int_equal(read(from[0], &line, sizeof(line)), (int)sizeof(line));
	if (line)
		fail_msg("side_car(): line %d", line);
	assert_int_equal(waitpid(pid, &status, 0), pid);
	close(from[0]);
	close(to[0]);
	close(to[1]);
}

static void daemon_frozen_keeps_pages_held(void **state)
{
	struct fixture *f = *state;
	struct kvd_room_status st = {0};
	struct kvd_room *room;

	engine_open(f, &f->a, KVD_REGION_MEMFD);
	room = room_open(&f->a, 10, KVD_SEND);
	kill(f->daemon.pid, SIGSTOP);
	for (int i = 0; i < WAIT_MS && !(st.flags & KVD_FLAG_ABORTING); i++) {
		live_well(f->a.client, kvd_room_read(room, &st));
		poll(NULL, 0, 1);
	}
	assert_int_equal(st.state, KVD_TRANSFERRING);
	kill(f->daemon.pid, SIGCONT);
	for (int i = 0; i < WAIT_MS && kvd_room_state(room) != KVD_BOOTSTRAPPING; i++)
		poll(NULL, 0, 1);
	assert_int_equal(kvd_room_state(room), KVD_BOOTSTRAPPING);
}

struct tally {
	unsigned int done, bad;
};

static void on_done(void *arg, int result, const struct kvd_reply *reply)
{
	struct tally *t = arg;

	(void)reply;
	t->done++;
	t->bad += result != 0;
}

static void tally_wait(struct engine *e, struct tally *t, unsigned int done)
{
	while (t->done < done)
		live_well(e->client, kvd_poll(e->client, 1000));
	assert_int_equal(t->bad, 0);
}

static void rooms_by_the_thousand_without_blocking(void **state)
{
	enum { ROOMS = 1000 };
	static struct kvd_room *rooms[ROOMS];
	static int states[ROOMS];
	struct fixture *f = *state;
	struct tally t = {0};
	struct kvd_call call = {.on_done = on_done, .arg = &t};
	struct kvd_room_args args = {.role = KVD_SEND};

	engine_open(f, &f->a, KVD_REGION_MEMFD);
	args.pool = f->a.pool;
	for (unsigned int i = 0; i < ROOMS; i++) {
		args.room = i;
		live_well(f->a.client,
			  kvd_room_open(f->a.client, &args, &call, &rooms[i]));
	}
	tally_wait(&f->a, &t, ROOMS);
	assert_int_equal(
		kvd_room_states((const struct kvd_room *const *)rooms, ROOMS, states), 0);
	for (unsigned int i = 0; i < ROOMS; i++)
		live_well(f->a.client, kvd_room_abort(rooms[i], NULL, &call));
	tally_wait(&f->a, &t, 2 * ROOMS);
	while (kvd_room_states((const struct kvd_room *const *)rooms, ROOMS, states) <
	       ROOMS)
		poll(NULL, 0, 1);
	for (unsigned int i = 0; i < ROOMS; i++)
		live_well(f->a.client, kvd_room_close(rooms[i], &call));
	tally_wait(&f->a, &t, 3 * ROOMS);
}

/* ---- transfers ----------------------------------------------------------------------
 */

static void on_notif(void *arg, const char *from, const void *data, size_t bytes)
{
	unsigned int *count = arg;

	assert_non_null(from);
	assert_int_equal(bytes, 5);
	assert_memory_equal(data, "ready", 5);
	++*count;
}

static void xfer_writes_where_it_was_told_and_says_so(void **state)
{
	static const uint32_t from[] = {2, 0}, to[] = {0, 1};
	struct fixture *f = *state;
	struct kvd_session_key key;
	struct kvd_dlist *local, *remote;
	struct kvd_xfer *xfer;
	struct kvd_desc descs[3] = {0}, theirs[2] = {0};
	struct kvd_xfer_args args = {.op = KVD_WRITE,
				     .local_index = from,
				     .remote_index = to,
				     .local_index_count = 2,
				     .remote_index_count = 2,
				     .notif = "ready",
				     .notif_bytes = 5};
	unsigned int notifs = 0;
	uint64_t attach;

	engine_open(f, &f->a, KVD_REGION_MEMFD);
	engine_open(f, &f->b, KVD_REGION_MEMFD);
	fill(&f->a);
	for (unsigned int i = 0; i < 3; i++)
		descs[i] =
			(struct kvd_desc){(uintptr_t)f->a.bytes + pages_a[i] * PAGE_BYTES,
					  PAGE_BYTES, 0, 0};
	theirs[0] = (struct kvd_desc){(uintptr_t)f->b.bytes + pages_b[2] * PAGE_BYTES,
				      PAGE_BYTES, 0, 0};
	theirs[1] = (struct kvd_desc){(uintptr_t)f->b.bytes + pages_b[0] * PAGE_BYTES,
				      PAGE_BYTES, 0, 0};
	live_well(f->b.client, kvd_session_key(f->b.client, 0, &key));
	live_well(f->a.client, kvd_peer_attach(f->a.client, NULL, &key, NULL, &attach));
	live_well(f->a.client, kvd_dlist_prep(f->a.client, 0, descs, 3, 4, &local));
	live_well(f->a.client,
		  kvd_dlist_prep(f->a.client, attach, theirs, 2, 4, &remote));
	args.local = local;
	args.remote = remote;
	live_well(f->a.client, kvd_xfer_make(f->a.client, &args, &xfer));
	live_well(f->a.client, kvd_xfer_post(xfer, NULL, 0));
	assert_int_equal(kvd_xfer_wait(xfer, WAIT_MS), KVD_SUCCESS);
	memcpy(f->b.bytes + pages_b[1] * PAGE_BYTES, f->a.bytes + pages_a[1] * PAGE_BYTES,
	       PAGE_BYTES); /* the page that was not sent */
	check(&f->b, 3);
	memset(f->b.bytes, 0xa5, PAGES * PAGE_BYTES);
	live_well(f->a.client, kvd_xfer_post(xfer, NULL, 0));
	assert_int_equal(kvd_xfer_wait(xfer, WAIT_MS), KVD_SUCCESS);
	assert_int_equal(f->b.bytes[pages_b[0] * PAGE_BYTES], pattern(0, 0));
	for (int i = 0; i < 1000 && notifs < 2; i++)
		live_well(f->b.client,
			  kvd_notif_drain(f->b.client, 0, on_notif, &notifs));
	assert_int_equal(notifs, 2);
	live_well(f->a.client, kvd_xfer_release(xfer));
	live_well(f->a.client, kvd_dlist_release(local));
	live_well(f->a.client, kvd_dlist_release(remote));
}

/* Longer than the arena. */
static void dlist_long_is_taken_from_a_memfd(void **state)
{
	const size_t count = ((64u << 20) / sizeof(struct kvd_desc)) + 1;
	struct kvd_desc *descs = calloc(count, sizeof(*descs));
	struct fixture *f = *state;
	struct kvd_dlist *dlist;
	struct kvd_error error;

	engine_open(f, &f->a, KVD_REGION_MEMFD);
	for (size_t i = 0; i < count; i++)
		descs[i] =
			(struct kvd_desc){(uintptr_t)f->a.bytes + i % 512 * 16, 16, 0, 0};
	live_well(f->a.client, kvd_dlist_prep(f->a.client, 0, descs, count, 4, &dlist));
	assert_int_equal(kvd_dlist_state(dlist), -KVD_E_BUSY);
	live_well(f->a.client, kvd_dlist_wait(dlist, WAIT_MS));
	assert_int_equal(kvd_dlist_state(dlist), 1);
	live_well(f->a.client, kvd_dlist_release(dlist));
	descs[count - 1].address = 4096;
	live_well(f->a.client, kvd_dlist_prep(f->a.client, 0, descs, count, 4, &dlist));
	free(descs);
	assert_int_equal(kvd_dlist_wait(dlist, WAIT_MS), -KVD_E_NOTFOUND);
	live_well(f->a.client, kvd_dlist_error(dlist, 0, &error));
	assert_int_equal(error.code, KVD_E_NOTFOUND);
	assert_non_null(strstr(error.message, "is not registered"));
	live_well(f->a.client, kvd_dlist_release(dlist));
}

int main(void)
{
#define T(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
	const struct CMUnitTest tests[] = {
		T(hello_names_the_process_that_answers),
		T(region_of_a_pool_is_busy),
		T(push_between_memfds_arrives),
		T(push_between_shm_objects_arrives),
		T(push_between_plain_memory_arrives),
		T(room_aborted_tells_what_landed),
		T(daemon_killed_fails_rooms_and_another_takes_over),
		T(daemon_upgraded_under_live_engines),
		T(daemon_killed_again_and_again_under_an_event_loop),
		T(daemon_beyond_the_pid_namespace_is_seen_to_die),
		T(daemon_frozen_keeps_pages_held),
		T(rooms_by_the_thousand_without_blocking),
		T(xfer_writes_where_it_was_told_and_says_so),
		T(dlist_long_is_taken_from_a_memfd),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
