/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Every call of the driver fails once: in the daemon of the source, in that of the
 * destination, with want of memory, with a fault that says nothing, and with one that
 * ends the context. The tests' driver counts all calls of a process, whichever
 * function and whichever thread, and fails the n-th of them (KVD_SWEEP: every
 * seventh n); what it says of itself
 * (contexts, mappings, streams, events, pinned memory) lies in a file that both see.
 *
 * One play is all that an engine does with a GPU: a region, a pool, a room, a transfer
 * by rows, and all of it taken back. n rises
 * until a play ends without having met it. After each:
 *
 * - what could be asked ended, with an error that names a code and reaches no further
 *   than it must: never the peer; the device only when it is the device's;
 * - success is success: the bytes are looked at;
 * - a play without a fault is well, and then nothing is left in either daemon.
 */
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "daemon/base/clock.h"
#include "tests/gpu/fake_cuda.h"
#include "tests/gpu/works/works.h"
#include "tests/lib/sweep.h"

#define PAGE (64 * KIB)
#define ROWS 40u
#define CALLS_MAX 2000u
#define SCOPE_MAX 16u

struct sweep {
	struct rig rig;
	struct fake_control *control[RIG_DAEMONS];
	struct engine ends[RIG_DAEMONS]; /* source, destination */
	uint64_t number;		 /* of rooms */
	unsigned int plays, refused, failed;
	/* of the play at hand */
	unsigned int victim;
	bool deadly;
	bool well;	 /* nothing failed */
	char before[96]; /* the call that failed in the play before */
};

static void control_make(struct sweep *s, unsigned int index)
{
	char path[160];
	void *map = MAP_FAILED;
	int fd;

	snprintf(path, sizeof(path), "%s/d%u.fake", s->rig.dir, index);
	fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
	if (fd >= 0 && ftruncate(fd, sizeof(struct fake_control)) == 0)
		map = mmap(NULL, sizeof(struct fake_control), PROT_READ | PROT_WRITE,
			   MAP_SHARED, fd, 0);
	if (map == MAP_FAILED)
		die("%s", path);
	close(fd);
	s->control[index] = map;
}

static void sweep_start(struct sweep *s, const char *transports, enum where from,
			enum where to)
{
	const enum where where[] = {from, to};

	*s = (struct sweep){.number = 0};
	if (!cuda.fake)
		skip("a driver that fails on request: the tests'");
	rig_folder(&s->rig);
	s->rig.quiet = true;
	for (unsigned int i = 0; i < RIG_DAEMONS; i++)
		control_make(s, i);
	rig_start(&s->rig, RIG_DAEMONS, transports);
	for (unsigned int i = 0; i < RIG_DAEMONS; i++) {
		engine_memory(&s->ends[i], where[i], 4 * MIB);
		engine_connect(&s->ends[i], &s->rig, i);
	}
}

/* ---- what failed, and how far it may reach ---- */

/* May a fault there be the device's? */
static bool of_device(const struct sweep *s, const char *struck)
{
	return s->deadly || strcmp(struck, "execute") == 0 || /* work that fails there */
	       strcmp(struck, "cuDevicePrimaryCtxRetain") == 0 ||
	       strcmp(struck, "cuCtxGetStreamPriorityRange") == 0; /* its context */
}

static void scope_check(const struct sweep *s, unsigned int at, const char *what,
			int code, const char *scope, const char *words)
{
	const char *struck = s->control[s->victim]->struck;

	if (!struck[0]) {
		rig_logs(&s->rig);
		die("%s failed though no call of the driver did (the last was %s): %s %s",
		    what, s->before, kvd_code_name(code), words);
	}
	if (at != s->victim)
		return; /* it was told by the other side, as what the other side is to it
			 */
	if (strcmp(scope, "op") == 0 || strcmp(scope, "room") == 0)
		return;
	if (strcmp(scope, "device") == 0 && of_device(s, struck))
		return;
	die("%s after %s: %s of scope %s: %s", what, struck, kvd_code_name(code), scope,
	    words);
}

/* True: well. */
static bool done(struct sweep *s, unsigned int at, int r, const char *what)
{
	const struct kvd_error *why = kvd_last_error(s->ends[at].client);

	if (r >= 0)
		return true;
	if (r == -KVD_E_NOREPLY || r == -KVD_E_LOST)
		die("%s after %s: %s", what, s->control[s->victim]->struck,
		    kvd_code_name(r));
	scope_check(s, at, what, r, why->scope, why->message);
	s->refused++;
	s->well = false;
	return false;
}

static void scope_of(const char *json, char scope[SCOPE_MAX])
{
	const char *at = strstr(json, "\"scope\":\"");

	scope[0] = '\0';
	if (at)
		(void)sscanf(at, "\"scope\":\"%15[a-z]", scope);
}

static bool over(const struct kvd_room *room)
{
	int state = kvd_room_state(room);

	return state == KVD_SUCCESS || state == KVD_FAILED;
}

/* Both are over. A receiver that could not even reach its source's memory has told
 * that source nothing, which then waits for somebody: the router that paired them
 * (we) ends it. Who was told has a second. */
static void rooms_end(struct kvd_room *send, struct kvd_room *recv)
{
	double failed_s = 0, end = clock_s() + WAIT_MS / 1000.0;

	while (!over(send) || !over(recv)) {
		(void)poll(NULL, 0, 0);
		if (clock_s() > end)
			return; /* room_over() says so */
		if (kvd_room_state(send) != KVD_FAILED &&
		    kvd_room_state(recv) != KVD_FAILED)
			continue;
		if (!failed_s)
			failed_s = clock_s();
		if (clock_s() - failed_s < 1)
			continue;
		(void)kvd_room_abort(over(send) ? recv : send, "its partner failed",
				     NULL);
		failed_s = clock_s() + 10;
	}
}

/* How a room ended; it is closed. */
static bool room_over(struct sweep *s, unsigned int at, struct kvd_room *room)
{
	int state = kvd_room_wait(room, KVD_SUCCESS, WAIT_MS);
	char scope[SCOPE_MAX], *text = NULL;

	well(s->ends[at].client, kvd_room_show(room, 0, &text), "room.show");
	if (state != KVD_SUCCESS && state != KVD_FAILED)
		die("a room hangs after %s: %s", s->control[s->victim]->struck, text);
	if (state == KVD_FAILED) {
		scope_of(text, scope);
		scope_check(s, at, "a room", 0, scope, text);
		s->failed++;
		s->well = false;
	}
	kvd_string_free(text);
	well(s->ends[at].client, kvd_room_close(room, NULL), "room.close");
	return state == KVD_SUCCESS;
}

/* ---- a play ---- */

static bool pools(struct sweep *s)
{
	bool all = true;

	for (unsigned int i = 0; i < RIG_DAEMONS; i++) {
		struct engine *e = &s->ends[i];

		e->region = NULL;
		e->pool = NULL;
		if (!done(s, i, engine_register(e), "region.register"))
			all = false;
		else
			engine_pool(e, PAGE);
	}
	return all;
}

static void pools_back(struct sweep *s)
{
	for (unsigned int i = 0; i < RIG_DAEMONS; i++) {
		struct engine *e = &s->ends[i];

		if (e->pool)
			well(e->client, kvd_pool_unregister(e->pool, NULL),
			     "pool.unregister");
		if (e->region)
			well(e->client, kvd_region_unregister(e->region, NULL),
			     "region.unregister");
	}
}

static void play_room(struct sweep *s)
{
	struct engine *src = &s->ends[0], *dst = &s->ends[1];
	struct kvd_room *recv, *send;
	uint8_t from[PAGE], to[PAGE];
	bool sent, landed;

	recv = room_recv(dst, src, ++s->number, 7, NULL);
	send = room_send(src, s->number, 9, NULL);
	rooms_end(send, recv);
	landed = room_over(s, 1, recv);
	sent = room_over(s, 0, send);
	if (sent && !landed)
		die("a sender succeeded, its receiver did not");
	if (!landed)
		return;
	engine_get(src, 9 * PAGE, from, PAGE);
	engine_get(dst, 7 * PAGE, to, PAGE);
	if (memcmp(from, to, PAGE) != 0)
		die("a room succeeded with other bytes, after %s",
		    s->control[s->victim]->struck);
}

static void xfer_failed(struct sweep *s, struct kvd_xfer *xfer)
{
	struct kvd_error why = {0};

	if (kvd_xfer_error(xfer, 0, &why) == 0 && why.code)
		scope_check(s, 1, "a transfer", why.code, why.scope, why.message);
	s->failed++;
	s->well = false;
}

static void play_rows(struct sweep *s, const struct rows *rows)
{
	struct engine *src = &s->ends[0], *dst = &s->ends[1];
	struct kvd_xfer *xfer = NULL;
	int state;

	if (!done(s, 1, rows_xfer_try(rows, src, dst, true, &xfer), "peer.attach"))
		return;
	if (!done(s, 1, kvd_xfer_post(xfer, NULL, 0), "a post"))
		return;
	state = kvd_xfer_wait(xfer, WAIT_MS);
	if (state == KVD_SUCCESS)
		rows_check(rows, src, dst);
	else if (state == KVD_FAILED)
		xfer_failed(s, xfer);
	else
		die("a transfer hangs after %s", s->control[s->victim]->struck);
	well(dst->client, kvd_xfer_release(xfer), "xfer.release");
}

/* All that is done with a GPU, once. False: something failed. */
static bool play(struct sweep *s, const struct rows *rows)
{
	s->well = true;
	s->plays++;
	engine_fill(&s->ends[1], (uint8_t)s->plays);
	if (pools(s)) {
		play_room(s);
		play_rows(s, rows);
	}
	pools_back(s);
	return s->well;
}

static int held(const struct sweep *s)
{
	int n = 0;

	for (unsigned int i = 0; i < RIG_DAEMONS; i++)
		n += __atomic_load_n(&s->control[i]->live, __ATOMIC_SEQ_CST);
	return n;
}

static bool nothing_held(const struct sweep *s, double limit_s)
{
	double end = clock_s() + limit_s;

	while (held(s) != 0) {
		if (clock_s() > end)
			return false;
		(void)poll(NULL, 0, 1); /* threads let go of theirs in their own time */
	}
	return true;
}

/* ---- the sweep ---- */

static void arm(struct sweep *s, unsigned int victim, unsigned int nth, int code)
{
	struct fake_control *control = s->control[victim];

	snprintf(s->before, sizeof(s->before), "%s of daemon %u",
		 s->control[s->victim]->struck, s->victim);
	s->victim = victim;
	s->deadly = code == CU_ERROR_ILLEGAL_ADDRESS;
	control->struck[0] = '\0';
	control->code = code;
	__atomic_store_n(&control->left, nth, __ATOMIC_RELEASE);
}

/* How many calls were failed. */
static unsigned int sweep_one(struct sweep *s, const struct rows *rows,
			      unsigned int victim, int code)
{
	unsigned int failed = 0;

	for (unsigned int nth = 1; nth < CALLS_MAX; nth++) {
		bool struck;

		if (sweep_leaves_out(nth, 14))
			continue;
		arm(s, victim, nth, code);
		(void)play(s, rows);
		struck = s->control[victim]->struck[0];
		__atomic_store_n(&s->control[victim]->left, 0, __ATOMIC_RELEASE);
		/* a context that could not be given back goes with its next user */
		if (struck && !nothing_held(s, 0.2) && !play(s, rows))
			die("a play without a fault failed, after %s (call %u)",
			    s->control[victim]->struck, nth);
		if (!nothing_held(s, 10))
			die("%d of the driver's objects are left after %s (call %u)",
			    held(s), s->control[victim]->struck, nth);
		if (!struck)
			return failed;
		failed++;
	}
	die("there is no end of calls");
}

static void sweep(const char *transports, enum where from, enum where to)
{
	static const int codes[] = {CU_ERROR_OUT_OF_MEMORY, CU_ERROR_UNKNOWN,
				    CU_ERROR_ILLEGAL_ADDRESS};
	static struct sweep s;
	unsigned int calls = 0;
	struct rows rows;

	sweep_start(&s, transports, from, to);
	rows_make(&rows, 4 * KIB, ROWS, 4 * MIB);
	engine_pattern(&s.ends[0], 5);
	for (size_t c = 0; c < sizeof(codes) / sizeof(codes[0]); c++) {
		for (unsigned int victim = 0; victim < RIG_DAEMONS; victim++)
			calls += sweep_one(&s, &rows, victim, codes[c]);
		arm(&s, 0, 0, 0);
		if (!play(&s, &rows))
			die("a play without a fault failed");
	}
	printf("    %u calls failed in %u plays: %u refusals, %u ends of rooms and "
	       "transfers\n",
	       calls, s.plays, s.refused, s.failed);
	for (unsigned int i = 0; i < RIG_DAEMONS; i++)
		kvd_close(s.ends[i].client);
	rig_stop(&s.rig);
}

static void sweep_local(void)
{
	sweep("local", AT_GPU, AT_GPU_VMM);
}

static void sweep_shm(void)
{
	sweep("shm", AT_GPU_VMM, AT_GPU);
}

static void sweep_tcp(void)
{
	sweep("tcp", AT_GPU, AT_GPU);
}

static void sweep_ucx(void)
{
	sweep("ucx", AT_GPU, AT_HOST);
}

const struct work sweeps[] = {
	{"sweep-local", "each call of the driver fails once: local", sweep_local},
	{"sweep-shm", "the same: staged by shm", sweep_shm},
	{"sweep-tcp", "the same: staged by tcp", sweep_tcp},
	{"sweep-ucx", "the same: staged by ucx", sweep_ucx},
	{NULL, NULL, NULL},
};
