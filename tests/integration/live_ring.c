/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The submission ring on the real daemon, from both sides: libkvd's calls that
 * never wait, and an engine that has its own idea of the shared memory (raw: the
 * control protocol by hand, the mappings written at will). Whatever that one does,
 * it is thrown out with a reason or lives on; the engine beside it moves its bytes.
 */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "daemon/base/clock.h"
#include "lib/kvd.h"
#include "proto/kvd_ring.h"
#include "tests/lib/live_daemon.h"

#define ROWS 256u
#define ROW_BYTES 1024u
#define BYTES (ROWS * ROW_BYTES)
#define WAIT_MS 30000

struct side {
	struct kvd_client *client;
	struct kvd_memory memory;
	struct kvd_region *region;
	struct kvd_dlist *own, *theirs;
	uint64_t attach;
};

struct fixture {
	struct live_daemon daemon;
	struct side a, b; /* a writes to b */
};

static int setup(void **state)
{
	struct fixture *f = calloc(1, sizeof(*f));

	live_daemon_init(&f->daemon);
	*state = f;
	return 0;
}

static void side_close(struct side *s)
{
	kvd_close(s->client);
	if (s->memory.address)
		kvd_memory_free(&s->memory);
	memset(s, 0, sizeof(*s));
}

static int teardown(void **state)
{
	struct fixture *f = *state;

	side_close(&f->a);
	side_close(&f->b);
	live_daemon_fini(&f->daemon);
	free(f);
	return 0;
}

/* ---- two engines ------------------------------------------------------------------ */

static uint8_t *bytes_of(const struct side *s)
{
	return s->memory.address;
}

static void side_open(struct fixture *f, struct side *s, const char *name)
{
	s->client = live_daemon_client(&f->daemon, name, WAIT_MS);
	live_well(NULL, kvd_memory_alloc(BYTES, name, &s->memory));
	live_well(s->client, kvd_region_memory(s->client, &s->memory, NULL, &s->region));
}

/* One row a descriptor, as a NIXL array: address, bytes, device. */
static struct kvd_dlist *list_rows(struct side *s, uint64_t attach, const void *base,
				   uint32_t rows)
{
	uint64_t *table = calloc((size_t)rows * 3, sizeof(*table));
	struct kvd_dlist *dlist = NULL;

	for (uint32_t i = 0; i < rows; i++) {
		table[3 * i] =
			(uint64_t)(uintptr_t)base + (uint64_t)(i % ROWS) * ROW_BYTES;
		table[3 * i + 1] = ROW_BYTES;
		table[3 * i + 2] = 7;
	}
	live_well(s->client, kvd_dlist_prep(s->client, attach, table, rows, 3, &dlist));
	free(table);
	return dlist;
}

static void attach(struct fixture *f)
{
	struct kvd_session_key key;

	live_well(f->b.client, kvd_session_key(f->b.client, 0, &key));
	live_well(f->a.client,
		  kvd_peer_attach(f->a.client, NULL, &key, NULL, &f->a.attach));
}

static void sides_open(struct fixture *f)
{
	side_open(f, &f->a, "a");
	side_open(f, &f->b, "b");
	attach(f);
	f->a.own = list_rows(&f->a, 0, f->a.memory.address, ROWS);
	f->a.theirs = list_rows(&f->a, f->a.attach, f->b.memory.address, ROWS);
}

static struct kvd_xfer *make(struct side *s, const uint32_t *from, const uint32_t *to,
			     size_t n)
{
	struct kvd_xfer_args args = {.op = KVD_WRITE,
				     .local = s->own,
				     .remote = s->theirs,
				     .local_index = from,
				     .remote_index = to,
				     .local_index_count = n,
				     .remote_index_count = n};
	struct kvd_xfer *xfer = NULL;

	live_well(s->client, kvd_xfer_make(s->client, &args, &xfer));
	return xfer;
}

/* Fill row `from` of a, send it to row `to` of b, look. */
static void send_row(struct fixture *f, uint32_t from, uint32_t to, uint8_t value)
{
	struct kvd_xfer *xfer = make(&f->a, &from, &to, 1);

	memset(bytes_of(&f->a) + from * ROW_BYTES, value, ROW_BYTES);
	live_well(f->a.client, kvd_xfer_post(xfer, NULL, 0));
	assert_int_equal(kvd_xfer_wait(xfer, WAIT_MS), KVD_SUCCESS);
	for (uint32_t i = 0; i < ROW_BYTES; i++)
		assert_int_equal(bytes_of(&f->b)[to * ROW_BYTES + i], value);
	live_well(f->a.client, kvd_xfer_release(xfer));
}

static void on_notif(void *arg, const char *from, const void *data, size_t bytes)
{
	char *text = arg;
	size_t len = strlen(text);

	(void)from;
	assert_true(len + bytes + 2 < 256);
	memcpy(text + len, data, bytes);
	memcpy(text + len + bytes, ";", 2);
}

/* ---- what it is for ---------------------------------------------------------------- */

static void post_moves_the_rows_and_again(void **state)
{
	struct fixture *f = *state;
	const uint32_t from[] = {3, 200, 7}, to[] = {0, 1, 255};
	struct kvd_room_status st;
	struct kvd_xfer *xfer;

	sides_open(f);
	xfer = make(&f->a, from, to, 3);
	assert_int_equal(kvd_xfer_state(xfer), KVD_BOOTSTRAPPING);
	for (uint8_t round = 1; round < 20; round++) {
		for (int i = 0; i < 3; i++)
			memset(bytes_of(&f->a) + from[i] * ROW_BYTES, round * 3 + i,
			       ROW_BYTES);
		live_well(f->a.client, kvd_xfer_post(xfer, NULL, 0));
		assert_int_equal(kvd_xfer_wait(xfer, WAIT_MS), KVD_SUCCESS);
		for (int i = 0; i < 3; i++)
			assert_int_equal(bytes_of(&f->b)[to[i] * ROW_BYTES + 77],
					 round * 3 + i);
	}
	live_well(f->a.client, kvd_xfer_read(xfer, &st));
	assert_int_equal(st.bytes, 3 * ROW_BYTES);
	live_well(f->a.client, kvd_dlist_wait(f->a.own, WAIT_MS));
	live_well(f->a.client, kvd_xfer_release(xfer));
}

/* Twenty thousand of them: the ring goes round, and is full; slots are used again. */
static void posts_by_the_thousand_all_arrive(void **state)
{
	struct fixture *f = *state;
	struct kvd_xfer *xfers[1000];
	uint32_t row;

	sides_open(f);
	for (int round = 0; round < 20; round++) {
		memset(bytes_of(&f->a), round + 1, BYTES);
		for (uint32_t i = 0; i < 1000; i++) {
			row = i % ROWS;
			xfers[i] = make(&f->a, &row, &row, 1);
			live_well(f->a.client, kvd_xfer_post(xfers[i], NULL, 0));
		}
		for (uint32_t i = 0; i < 1000; i++) {
			assert_int_equal(kvd_xfer_wait(xfers[i], WAIT_MS), KVD_SUCCESS);
			live_well(f->a.client, kvd_xfer_release(xfers[i]));
		}
		assert_memory_equal(bytes_of(&f->b), bytes_of(&f->a), BYTES);
	}
}

/* A list of a million rows goes through the arena, and indices into all of it. */
static void list_of_a_million_rows_is_prepared(void **state)
{
	struct fixture *f = *state;
	const uint32_t many = 1000000, from[] = {999999, 12}, to[] = {1, 2};
	struct kvd_dlist *small;
	struct kvd_xfer *xfer;

	sides_open(f);
	small = f->a.own;
	f->a.own = list_rows(&f->a, 0, f->a.memory.address, many);
	xfer = make(&f->a, from, to, 2); /* at once: it stands behind the list */
	memset(bytes_of(&f->a), 9, BYTES);
	live_well(f->a.client, kvd_xfer_post(xfer, NULL, 0));
	assert_int_equal(kvd_xfer_wait(xfer, WAIT_MS), KVD_SUCCESS);
	assert_int_equal(bytes_of(&f->b)[ROW_BYTES], 9);
	live_well(f->a.client, kvd_dlist_wait(f->a.own, WAIT_MS));
	live_well(f->a.client, kvd_dlist_release(f->a.own)); /* the transfer keeps it */
	live_well(f->a.client, kvd_xfer_post(xfer, NULL, 0));
	assert_int_equal(kvd_xfer_wait(xfer, WAIT_MS), KVD_SUCCESS);
	live_well(f->a.client, kvd_xfer_release(xfer));
	f->a.own = small;
	send_row(f, 5, 5, 55);
}

static void notifications_come_in_order_and_are_counted(void **state)
{
	struct fixture *f = *state;
	const uint32_t row = 1;
	struct kvd_xfer *xfer;
	char text[256] = "";

	sides_open(f);
	xfer = make(&f->a, &row, &row, 1);
	assert_int_equal(kvd_notif_waiting(f->b.client), 0);
	live_well(f->a.client, kvd_notif_send(f->a.client, f->a.attach, "one", 3));
	live_well(f->a.client, kvd_xfer_post(xfer, "two", 3));
	assert_int_equal(kvd_xfer_wait(xfer, WAIT_MS), KVD_SUCCESS);
	live_well(f->a.client, kvd_notif_send(f->a.client, f->a.attach, "", 0));
	live_well(f->a.client, kvd_notif_send(f->a.client, f->a.attach, "four", 4));
	for (int i = 0; i < WAIT_MS && kvd_notif_waiting(f->b.client) < 4; i++)
		poll(NULL, 0, 1);
	assert_int_equal(kvd_notif_drain(f->b.client, 0, on_notif, text), 4);
	assert_string_equal(text, "one;two;;four;");
	assert_int_equal(kvd_notif_waiting(f->b.client), 0);
}

/* ---- what must be refused ------------------------------------------------------------
 */

static void list_of_foreign_memory_fails_with_words(void **state)
{
	struct fixture *f = *state;
	struct kvd_dlist *good;
	struct kvd_error why;
	struct kvd_xfer *xfer;
	const uint32_t row = 0;
	int here;

	sides_open(f);
	good = f->a.own;
	f->a.own = list_rows(&f->a, 0, &here, ROWS);
	xfer = make(&f->a, &row, &row, 1);
	live_well(f->a.client, kvd_xfer_post(xfer, NULL, 0));
	assert_int_equal(kvd_dlist_wait(f->a.own, WAIT_MS), -KVD_E_NOTFOUND);
	assert_non_null(
		strstr(kvd_last_error(f->a.client)->message, "is not registered"));
	live_well(f->a.client, kvd_dlist_error(f->a.own, 0, &why));
	assert_int_equal(why.code, KVD_E_NOTFOUND);
	assert_non_null(strstr(why.message, "is not registered"));
	assert_int_equal(kvd_xfer_wait(xfer, WAIT_MS), KVD_FAILED);
	live_well(f->a.client, kvd_xfer_error(xfer, 0, &why));
	assert_int_equal(why.code, KVD_E_NOTFOUND);
	live_well(f->a.client, kvd_xfer_release(xfer));
	live_well(f->a.client, kvd_dlist_release(f->a.own));
	f->a.own = good;
	send_row(f, 0, 9, 17); /* nobody is the worse for it */
}

static void what_can_be_seen_here_is_refused_here(void **state)
{
	struct fixture *f = *state;
	const uint32_t outside = ROWS, row = 0, two[] = {0, 1};
	struct kvd_xfer_args args;
	struct kvd_xfer *xfer;
	struct kvd_dlist *dlist;
	uint64_t table[3] = {(uint64_t)(uintptr_t)&table, 8, 0};
	pid_t child;
	int status;

	sides_open(f);
	args = (struct kvd_xfer_args){.op = KVD_READ,
				      .local = f->a.own,
				      .remote = f->a.theirs,
				      .local_index = &outside,
				      .remote_index = &row,
				      .local_index_count = 1,
				      .remote_index_count = 1};
	assert_int_equal(kvd_xfer_make(f->a.client, &args, &xfer), -KVD_E_RANGE);
	args.local_index = two;
	args.local_index_count = 2;
	assert_int_equal(kvd_xfer_make(f->a.client, &args, &xfer), -KVD_E_INVAL);
	args.local = f->a.theirs;
	assert_int_equal(kvd_xfer_make(f->a.client, &args, &xfer), -KVD_E_INVAL);
	assert_int_equal(kvd_dlist_prep(f->a.client, 0, table, 0, 3, &dlist),
			 -KVD_E_INVAL);
	assert_int_equal(kvd_dlist_prep(f->a.client, 0, table, 1, 5, &dlist),
			 -KVD_E_INVAL);
	xfer = make(&f->a, &row, &row, 1);
	child = fork();
	if (!child)
		_exit(kvd_xfer_post(xfer, NULL, 0) == -KVD_E_FORKED ? 0 : 1);
	assert_int_equal(waitpid(child, &status, 0), child);
	assert_int_equal(status, 0);
	send_row(f, 1, 1, 1);
}

/* A transfer under way cannot be posted; stopped, it ends; dropped, its slot comes back.
 */
static void stop_and_drop_end_what_runs(void **state)
{
	struct fixture *f = *state;
	struct kvd_xfer *xfers[64];
	uint32_t row = 0;
	int failed = 0;

	sides_open(f);
	for (int i = 0; i < 64; i++) {
		xfers[i] = make(&f->a, &row, &row, 1);
		live_well(f->a.client, kvd_xfer_post(xfers[i], NULL, 0));
		live_well(f->a.client, kvd_xfer_cancel(xfers[i]));
	}
	for (int i = 0; i < 64; i++) {
		failed += kvd_xfer_wait(xfers[i], WAIT_MS) == KVD_FAILED;
		live_well(f->a.client, kvd_xfer_release(xfers[i]));
		xfers[i] = make(&f->a, &row, &row, 1);
		live_well(f->a.client, kvd_xfer_post(xfers[i], NULL, 0));
		live_well(f->a.client, kvd_xfer_release(xfers[i])); /* under way */
	}
	print_message("%d of 64 were stopped in time\n", failed);
	send_row(f, 2, 3, 4);
}

/* ---- the daemon's end
 * ------------------------------------------------------------------ */

static void daemon_killed_fails_posts_and_the_next_one_serves(void **state)
{
	struct fixture *f = *state;
	const uint32_t row = 4;
	struct kvd_room_status st;
	struct kvd_xfer *xfer;

	sides_open(f);
	xfer = make(&f->a, &row, &row, 1);
	send_row(f, 1, 1, 11);
	kill(f->daemon.pid, SIGSTOP); /* it takes nothing out of the ring any more */
	live_well(f->a.client, kvd_xfer_post(xfer, NULL, 0));
	assert_int_equal(kvd_xfer_state(xfer), KVD_TRANSFERRING);
	live_daemon_kill(&f->daemon);
	assert_int_equal(kvd_xfer_wait(xfer, WAIT_MS), KVD_FAILED);
	live_well(f->a.client, kvd_xfer_read(xfer, &st));
	assert_int_equal(st.error, KVD_E_DEAD);
	live_well(f->a.client, kvd_xfer_release(xfer));
	live_daemon_start(&f->daemon);
	side_close(&f->b);
	side_open(f, &f->b,
		  "b"); /* waits for the daemon; a comes back with its next call */
	attach(f);
	live_well(f->a.client, kvd_dlist_wait(f->a.own, WAIT_MS));
	live_well(f->a.client, kvd_dlist_release(f->a.theirs)); /* its session is gone */
	f->a.theirs = list_rows(&f->a, f->a.attach, f->b.memory.address, ROWS);
	for (uint8_t i = 0; i < 100; i++)
		send_row(f, i, (uint32_t)(ROWS - 1 - i), i);
}

struct killer {
	pid_t daemon;
	int after_ms;
};

static void *kill_after(void *arg)
{
	const struct killer *killer = arg;

	poll(NULL, 0, killer->after_ms); /* any moment will do */
	kill(killer->daemon, SIGKILL);
	return NULL;
}

/* Post and look, post and look, until the daemon is shot: whatever it was writing. */
static void read_until_dead(struct kvd_xfer *xfer, struct kvd_room_status *st)
{
	uint64_t end = live_now_ms() + WAIT_MS;

	do {
		uint64_t begin = clock_of(CLOCK_THREAD_CPUTIME_ID);
		int r = kvd_xfer_read(xfer, st);

		assert_true(clock_of(CLOCK_THREAD_CPUTIME_ID) - begin <
			    UINT64_C(100000000));
		assert_int_equal(r, 0);
		assert_in_range(st->state, KVD_FAILED, KVD_SUCCESS);
		if (st->bytes)
			assert_true(st->bytes <= st->total);
		if (st->state == KVD_SUCCESS)
			kvd_xfer_post(xfer, NULL, 0);
		assert_true(live_now_ms() < end);
	} while (st->state != KVD_FAILED);
}

static void daemon_killed_at_any_moment_hangs_no_reader(void **state)
{
	struct fixture *f = *state;
	unsigned int seed = 1;

	for (unsigned int round = 0; round < 25; round++) {
		const uint32_t rows[] = {0, 1, 2, 3, 4, 5, 6, 7};
		struct killer killer = {.after_ms = rand_r(&seed) % 16};
		struct kvd_room_status st = {0};
		struct kvd_xfer *xfer;
		pthread_t thread;

		sides_open(f);
		killer.daemon = f->daemon.pid;
		xfer = make(&f->a, rows, rows, sizeof(rows) / sizeof(rows[0]));
		live_well(f->a.client, kvd_xfer_post(xfer, NULL, 0));
		assert_int_equal(pthread_create(&thread, NULL, kill_after, &killer), 0);
		read_until_dead(xfer, &st);
		assert_int_equal(st.error, KVD_E_DEAD);
		assert_int_equal(pthread_join(thread, NULL), 0);
		live_daemon_kill(&f->daemon);
		side_close(&f->a);
		side_close(&f->b);
		live_daemon_start(&f->daemon);
	}
	kvd_close(live_daemon_client(&f->daemon, "the next one serves", WAIT_MS));
}

/* ---- an engine with its own ideas
 * -------------------------------------------------------- */

struct raw {
	int fd, event;
	struct kvd_ring_header *ring;
	uint8_t *arena;
	uint64_t *entries;
	uint32_t slot;
	uint64_t tail;
};

#define RAW_ENTRIES 64u
#define RAW_ARENA (1u << 20)

static void raw_say(const struct raw *raw, const char *line)
{
	assert_int_equal(send(raw->fd, line, strlen(line), MSG_NOSIGNAL), strlen(line));
}

/* What comes until `end` is seen or the connection ends; fds of it. */
static void raw_hear(const struct raw *raw, char *text, size_t bytes, int *fds,
		     int fd_max)
{
	char control[CMSG_SPACE(sizeof(int) * 8)];
	size_t len = 0;
	ssize_t n = 1;

	memset(text, 0, bytes);
	while (n > 0 && !strchr(text, '\n') && len + 1 < bytes) {
		struct iovec iov = {text + len, bytes - len - 1};
		struct msghdr msg = {.msg_iov = &iov,
				     .msg_iovlen = 1,
				     .msg_control = control,
				     .msg_controllen = sizeof(control)};
		struct pollfd p = {.fd = raw->fd, .events = POLLIN};

		assert_int_equal(poll(&p, 1, WAIT_MS), 1);
		n = recvmsg(raw->fd, &msg, MSG_CMSG_CLOEXEC);
		if (n > 0)
			len += (size_t)n;
		for (struct cmsghdr *c = CMSG_FIRSTHDR(&msg); n > 0 && c;
		     c = CMSG_NXTHDR(&msg, c))
			for (size_t i = 0; i < (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
			     i++) {
				int fd;

				memcpy(&fd, CMSG_DATA(c) + i * sizeof(int), sizeof(fd));
				if (fd_max-- > 0)
					*fds++ = fd;
				else
					close(fd);
			}
	}
}

static void raw_open(struct fixture *f, struct raw *raw)
{
	struct sockaddr_un addr = {.sun_family = AF_UNIX};
	char text[4096], line[160];
	int fds[3] = {-1, -1, -1};

	kvd_close(live_daemon_client(&f->daemon, "is it there?", WAIT_MS));
	memset(raw, 0, sizeof(*raw));
	strcpy(addr.sun_path, f->daemon.socket);
	raw->fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
	assert_int_equal(connect(raw->fd, (struct sockaddr *)&addr, sizeof(addr)), 0);
	raw_say(raw, "{\"id\":1,\"cmd\":\"hello\",\"proto\":1,\"client\":\"raw\"}\n");
	raw_hear(raw, text, sizeof(text), NULL, 0);
	snprintf(line, sizeof(line),
		 "{\"id\":2,\"cmd\":\"session.share\",\"entries\":%u,\"arena_bytes\":%u}"
		 "\n",
		 RAW_ENTRIES, RAW_ARENA);
	raw_say(raw, line);
	raw_hear(raw, text, sizeof(text), fds, 3);
	assert_true(fds[2] >= 0);
	raw->event = fds[2];
	raw->ring = mmap(NULL, KVD_RING_HEADER_BYTES + RAW_ENTRIES * KVD_RING_ENTRY_BYTES,
			 PROT_READ | PROT_WRITE, MAP_SHARED, fds[0], 0);
	raw->arena = mmap(NULL, RAW_ARENA, PROT_READ | PROT_WRITE, MAP_SHARED, fds[1], 0);
	assert_true(raw->ring != MAP_FAILED && raw->arena != MAP_FAILED);
	assert_true(ftruncate(fds[0], 0) < 0 && ftruncate(fds[1], 0) < 0); /* sealed */
	close(fds[0]);
	close(fds[1]);
	raw->entries = (uint64_t *)(void *)((char *)raw->ring + KVD_RING_HEADER_BYTES);
	raw->slot = raw->ring->first_slot;
	assert_int_equal(raw->ring->entries, RAW_ENTRIES);
	assert_int_equal(raw->ring->arena_bytes, RAW_ARENA);
}

static void raw_close(struct raw *raw)
{
	close(raw->fd);
	close(raw->event);
	munmap(raw->ring, KVD_RING_HEADER_BYTES + RAW_ENTRIES * KVD_RING_ENTRY_BYTES);
	munmap(raw->arena, RAW_ARENA);
}

static void raw_push(struct raw *raw, const struct kvd_ring_entry *e)
{
	const uint64_t one = 1;

	if (kvd_ring_push(raw->ring, RAW_ENTRIES, raw->tail++, e))
		assert_int_equal(write(raw->event, &one, 8), 8);
}

/* The daemon throws it out, and says why. */
static void raw_is_ended(struct fixture *f, const struct kvd_ring_entry *e,
			 const char *why)
{
	char text[4096];
	struct raw raw;

	raw_open(f, &raw);
	raw_push(&raw, e);
	raw_hear(&raw, text, sizeof(text), NULL, 0);
	if (!strstr(text, why))
		fail_msg("'%s' is not in: %s", why, text);
	raw_close(&raw);
}

static void entries_that_break_the_protocol_end_the_session(void **state)
{
	struct fixture *f = *state;
	struct kvd_ring_entry e = {.op = 99};
	struct raw raw;
	char text[4096];

	raw_is_ended(f, &e, "unknown op 99");
	e = (struct kvd_ring_entry){
		.op = KVD_RING_LIST, .n0 = 1, .n1 = 3, .slot = 5, .gen = 1};
	raw_is_ended(f, &e, "slot 5 does not belong to the engine");
	e.slot = UINT32_MAX;
	raw_is_ended(f, &e, "does not belong to the engine");
	e.slot = 65536;
	e.gen = 7;
	raw_is_ended(f, &e, "generation 7 does not follow 0");
	e.gen = 1;
	e.n1 = 1;
	raw_is_ended(f, &e, "1 columns");
	e.n1 = UINT32_MAX;
	raw_is_ended(f, &e, "outside the arena");
	e.n1 = 3;
	e.offset = RAW_ARENA - 23;
	raw_is_ended(f, &e, "outside the arena");
	e.offset = UINT64_MAX - 7;
	raw_is_ended(f, &e, "outside the arena");
	e.offset = 0;
	e.n0 = UINT32_MAX;
	raw_is_ended(f, &e, "outside the arena");
	e = (struct kvd_ring_entry){
		.op = KVD_RING_POST, .a = KVD_RING_IDS + 70000, .gen = 1};
	raw_is_ended(f, &e, "does not belong to this session");
	e = (struct kvd_ring_entry){.op = KVD_RING_ABORT, .n0 = 4};
	raw_is_ended(f, &e, "role 4");
	raw_open(f, &raw);
	__atomic_store_n(&raw.ring->tail, RAW_ENTRIES + 1, __ATOMIC_SEQ_CST);
	assert_int_equal(write(raw.event, &(uint64_t){1}, 8), 8);
	raw_hear(&raw, text, sizeof(text), NULL, 0);
	assert_non_null(strstr(text, "entries ahead of head"));
	raw_close(&raw);
	sides_open(f);
	send_row(f, 1, 2, 3);
}

/* Late, or wrong in a way that honest engines are, too: the session lives. */
static void entries_that_are_late_or_refused_harm_nobody(void **state)
{
	struct fixture *f = *state;
	struct kvd_ring_entry e = {.op = KVD_RING_CANCEL, .a = 12345};
	struct raw raw;
	char text[4096];

	raw_open(f, &raw);
	raw_push(&raw, &e);
	e.op = KVD_RING_RELEASE;
	raw_push(&raw, &e);
	e.a = KVD_RING_IDS + 65540;
	raw_push(&raw, &e);
	e.a = UINT64_MAX;
	raw_push(&raw, &e);
	e = (struct kvd_ring_entry){.op = KVD_RING_ABORT, .a = 1, .n0 = 1};
	raw_push(&raw, &e);
	e = (struct kvd_ring_entry){.op = KVD_RING_NOTIFY, .a = 1, .bytes = 100};
	raw_push(&raw, &e);
	e = (struct kvd_ring_entry){
		.op = KVD_RING_LIST, .n1 = 4, .slot = 65536, .gen = 1};
	raw_push(&raw, &e); /* no rows: refused */
	e = (struct kvd_ring_entry){
		.op = KVD_RING_XFER, .a = 7, .b = 8, .slot = 65537, .gen = 1};
	raw_push(&raw, &e); /* no lists: refused */
	raw_say(&raw, "{\"id\":3,\"cmd\":\"xfer.state\",\"xfer\":281474976776193}\n");
	raw_hear(&raw, text, sizeof(text), NULL, 0);
	assert_non_null(strstr(text, "ENOTFOUND"));
	assert_non_null(strstr(text, "\"ok\":true"));
	assert_int_equal(__atomic_load_n(&raw.ring->head, __ATOMIC_ACQUIRE), 8);
	raw_close(&raw);
}

struct scribbler {
	struct raw *raw;
	unsigned int seed;
	bool shy; /* mostly entries that could be meant */
	bool stop;
};

static uint64_t random64(unsigned int *seed)
{
	return (uint64_t)(unsigned int)rand_r(seed) << 33 ^
	       (uint64_t)(unsigned int)rand_r(seed) << 16 ^ (unsigned int)rand_r(seed);
}

static uint32_t below(unsigned int *seed, uint32_t n)
{
	return (uint32_t)(random64(seed) % n);
}

static struct kvd_ring_entry plausible(unsigned int *seed)
{
	return (struct kvd_ring_entry){
		.op = 1 + below(seed, 12),
		.flags = below(seed, 32),
		.slot = 65536 + below(seed, 8),
		.gen = 1 + below(seed, 4),
		.a = below(seed, 3) ? KVD_RING_IDS + 65536 + below(seed, 8)
				    : below(seed, 10),
		.b = KVD_RING_IDS + 65536 + below(seed, 8),
		.offset = below(seed, RAW_ARENA),
		.n0 = below(seed, 40),
		.n1 = below(seed, 5),
		.bytes = below(seed, 300),
		.n2 = below(seed, 3) ? 0 : below(seed, 300),
		.c = below(seed, 9),
	};
}

static void *scribble(void *arg)
{
	struct scribbler *s = arg;
	const uint64_t one = 1;
	uint64_t *words = (uint64_t *)(void *)s->raw->ring;
	const size_t count =
		(KVD_RING_HEADER_BYTES + RAW_ENTRIES * KVD_RING_ENTRY_BYTES) / 8;

	while (!__atomic_load_n(&s->stop, __ATOMIC_RELAXED)) {
		struct kvd_ring_entry e = plausible(&s->seed);

		if (s->shy && random64(&s->seed) % 16) {
			raw_push(s->raw, &e);
			continue;
		}
		for (int i = 0; i < 64; i++)
			__atomic_store_n(&words[random64(&s->seed) % count],
					 random64(&s->seed) >> random64(&s->seed) % 64,
					 __ATOMIC_RELAXED);
		((volatile uint8_t *)s->raw->arena)[random64(&s->seed) % RAW_ARENA] =
			(uint8_t)random64(&s->seed);
		if (write(s->raw->event, &one, 8) < 0)
			break;
	}
	return NULL;
}

/* Every shared byte is written at random while another engine works. */
static void scribbler_hurts_only_itself(void **state)
{
	struct fixture *f = *state;
	unsigned int ended = 0;

	sides_open(f);
	for (unsigned int round = 0; round < 40; round++) {
		struct raw raw;
		struct scribbler s = {.raw = &raw, .seed = round + 1, .shy = round & 1};
		struct pollfd p = {.events = POLLIN};
		pthread_t thread;

		raw_open(f, &raw);
		p.fd = raw.fd;
		assert_int_equal(pthread_create(&thread, NULL, scribble, &s), 0);
		for (uint32_t i = 0; i < 20; i++)
			send_row(f, (round + i) % ROWS, (round * 7 + i) % ROWS,
				 (uint8_t)(round + i));
		ended += poll(&p, 1, 0) == 1;
		__atomic_store_n(&s.stop, true, __ATOMIC_RELAXED);
		pthread_join(thread, NULL);
		raw_close(&raw);
	}
	print_message("%u of 40 scribblers were thrown out meanwhile\n", ended);
	assert_true(ended > 0);
}

/* The eventfd's flags are shared: a blocking, emptied one must not hold the daemon. */
static void eventfd_made_blocking_holds_nobody(void **state)
{
	struct fixture *f = *state;
	struct raw raw;
	uint64_t count;

	sides_open(f);
	raw_open(f, &raw);
	assert_int_equal(
		fcntl(raw.event, F_SETFL, fcntl(raw.event, F_GETFL) & ~O_NONBLOCK), 0);
	for (int i = 0; i < 200; i++) {
		struct pollfd p = {.fd = raw.event, .events = POLLIN};

		assert_int_equal(write(raw.event, &(uint64_t){1}, 8), 8);
		if (poll(&p, 1, 0) == 1 && fcntl(raw.event, F_SETFL, O_NONBLOCK) == 0 &&
		    read(raw.event, &count, 8) < 0)
			assert_int_equal(errno, EAGAIN);
		fcntl(raw.event, F_SETFL, 0);
		if (i % 20 == 0)
			send_row(f, 1, 1, (uint8_t)i);
	}
	raw_close(&raw);
}

int main(void)
{
#define T(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
	const struct CMUnitTest tests[] = {
		T(post_moves_the_rows_and_again),
		T(posts_by_the_thousand_all_arrive),
		T(list_of_a_million_rows_is_prepared),
		T(notifications_come_in_order_and_are_counted),
		T(list_of_foreign_memory_fails_with_words),
		T(what_can_be_seen_here_is_refused_here),
		T(stop_and_drop_end_what_runs),
		T(daemon_killed_fails_posts_and_the_next_one_serves),
		T(daemon_killed_at_any_moment_hangs_no_reader),
		T(entries_that_break_the_protocol_end_the_session),
		T(entries_that_are_late_or_refused_harm_nobody),
		T(scribbler_hurts_only_itself),
		T(eventfd_made_blocking_holds_nobody),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
