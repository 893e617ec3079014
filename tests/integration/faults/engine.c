/* SPDX-License-Identifier: Apache-2.0 */
/*
 * faults-engine: one engine process of the fault matrix, through libkvd alone.
 *
 *   faults-engine SOCKET NAME POOL PAGES
 *
 * It does what lines on stdin say and tells on stdout, in JSON lines, their
 * answers and, unasked, every change of a room's state with the time it was seen.
 * Nothing here blocks: a frozen daemon must not hide what libkvd shows of it.
 *
 * The moment a room has ended its pages are the next request's: they are checked
 * (success means all) and overwritten at once, as a real engine would. Whoever
 * writes there later is found by `still`, whoever still reads a source's pages
 * spoils what the other side checks.
 *
 * `late_ns` sums by how much the kernel woke this process too late. On a machine
 * that is overloaded the daemons are late as well, and bounds allow for it.
 *
 *   open ID ROOM ROLE BASE COUNT RECEIVERS WORD ENDPOINT POOL   ("-" for none)
 *   bind ID ROOM recv WORD      send ID ROOM send SEQ BEGIN END LAST WORD
 *   abort | close ID ROOM ROLE  word ID WORD, zero ID: pass it, take all back
 *   watch ID ROOM ROLE BYTES    answered when so many are there, or it ended
 *   still ID ROOM ROLE MS       answered MS after its end: was anything written?
 *   look ID                     pages of no room that were touched
 *   cmd ID COMMAND ARGS         any control command; with its reply
 *   batch ID …, finish ID       rooms by the hundred (batch.c)
 *   chunks, hold, rows ID …     query rows (rows.h); why ID POST attend
 *   bye ID                      close the session, leave
 *
 * WORD 0: at once; n: not before `word n`.
 */
#include <errno.h>
#include <inttypes.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

#include "tests/integration/faults/engine.h"

#include "daemon/base/clock.h"

#define CALL_MS 20000
#define LATE_NS 3000000u

static const char *const role_names[] = {"send", "recv", "offer", "pull"};

/* ---- answers ---- */

struct ask {
	uint64_t id;
};

void engine_print_text(const char *text)
{
	putchar('"');
	for (; *text; text++) {
		if (*text == '"' || *text == '\\')
			printf("\\%c", *text);
		else if ((unsigned char)*text >= ' ')
			putchar(*text);
	}
	putchar('"');
}

static void answer(uint64_t id, int result, const char *words)
{
	printf("{\"id\":%" PRIu64 ",\"result\":\"%s\",\"words\":", id,
	       result < 0 ? kvd_code_name(result) : "OK");
	engine_print_text(words);
	printf("}\n");
}

void engine_forget(struct engine *e, struct room *room)
{
	cache_canary(&e->cache, &room->run);
	*room = e->rooms[--e->room_count];
}

static void on_done(void *arg, int result, const struct kvd_reply *reply)
{
	struct ask *ask = arg;
	const char *words = result < 0 && reply->error ? reply->error->message : "";

	printf("{\"id\":%" PRIu64 ",\"result\":\"%s\",\"reply\":%s,\"words\":", ask->id,
	       result < 0 ? kvd_code_name(result) : "OK",
	       reply->json ? reply->json : "null");
	engine_print_text(words);
	printf("}\n");
	free(ask);
}

static struct kvd_call call_of(uint64_t id)
{
	struct ask *ask = calloc(1, sizeof(*ask));

	if (!ask)
		exit(1);
	ask->id = id;
	return (struct kvd_call){.timeout_ms = CALL_MS, .on_done = on_done, .arg = ask};
}

/* A call that was not taken: on_done will not run. */
static void refused(const struct engine *e, struct kvd_call *call, int result)
{
	struct ask *ask = call->arg;

	answer(ask->id, result, kvd_last_error(e->client)->message);
	free(ask);
}

/* ---- rooms ---- */

struct room *engine_room(struct engine *e, uint64_t number, const char *role)
{
	for (unsigned int i = 0; i < e->room_count; i++)
		if (e->rooms[i].run.room == number &&
		    strcmp(role_names[e->rooms[i].role], role) == 0)
			return &e->rooms[i];
	return NULL;
}

static void views_make(const struct room *room, uint32_t begin, uint32_t end,
		       uint32_t *pages, struct kvd_view *view)
{
	for (uint32_t i = begin; i < end; i++)
		pages[i - begin] = cache_page(&room->run, i);
	*view = (struct kvd_view){
		.pages = pages,
		.page_count = end - begin,
		.first_token = begin * PAGE_TOKENS,
		.token_begin = begin * PAGE_TOKENS,
		.token_end = end * PAGE_TOKENS,
	};
}

static struct kvd_wait wait_of(const struct engine *e, unsigned int word)
{
	if (!word || word > WORDS)
		return (struct kvd_wait){0};
	return (struct kvd_wait){.region = e->cache.region,
				 .offset = e->cache.words_at + (word - 1) * 8,
				 .value = 1};
}

int engine_open(struct engine *e, const struct open_args *a, const struct kvd_call *call)
{
	struct kvd_source source = {.endpoint = a->endpoint, .pool = a->pool};
	bool local = a->role == KVD_OFFER || a->role == KVD_PULL;
	bool target = a->role == KVD_RECV || a->role == KVD_PULL;
	struct room *room = &e->rooms[e->room_count];
	static uint32_t pages[PAGES_MAX];
	struct kvd_room_args args = {.room = a->room,
				     .role = a->role,
				     .pool = e->cache.pool,
				     .receivers = a->receivers,
				     .bootstrap_ms = a->limit_ms,
				     .waiting_ms = a->limit_ms,
				     .stall_ms = a->limit_ms};
	struct kvd_view view;
	int r;

	*room = (struct room){.run = {a->room, a->base, a->count, target},
			      .role = a->role,
			      .state = -1};
	if (e->room_count == ROOMS_MAX || a->count > PAGES_MAX ||
	    !cache_run_fits(&e->cache, &room->run))
		return -KVD_E_RANGE;
	views_make(room, 0, a->count, pages, &view);
	if (local) {
		args.views = &view;
		args.view_count = 1;
	}
	if (target) {
		args.sources = &source;
		args.source_count = 1;
	}
	args.lease_ms = a->role == KVD_OFFER ? a->limit_ms : 0;
	args.wait = wait_of(e, a->word);
	if (target)
		cache_reuse(&e->cache, &room->run);
	else
		cache_content(&e->cache, &room->run);
	r = kvd_room_open(e->client, &args, call, &room->handle);
	if (room->handle)
		e->room_count++;
	else
		cache_canary(&e->cache, &room->run);
	return r;
}

int engine_bind(struct engine *e, struct room *room, unsigned int word,
		const struct kvd_call *call)
{
	static uint32_t pages[PAGES_MAX];
	struct kvd_view view;
	struct kvd_room_pages args = {
		.views = &view, .view_count = 1, .wait = wait_of(e, word)};

	views_make(room, 0, room->run.count, pages, &view);
	return kvd_room_bind(room->handle, &args, call);
}

int engine_send(struct engine *e, struct room *room, const struct send_args *a,
		const struct kvd_call *call)
{
	static uint32_t pages[PAGES_MAX];
	struct kvd_view view;
	struct kvd_room_pages args = {.seq = a->seq,
				      .views = &view,
				      .view_count = 1,
				      .last = a->last,
				      .wait = wait_of(e, a->word)};

	if (a->begin >= a->end || a->end > room->run.count)
		return -KVD_E_RANGE;
	views_make(room, a->begin, a->end, pages, &view);
	return kvd_room_send(room->handle, &args, call);
}

/* The end, as an engine takes it: look, then reuse. */
static void room_ended(struct engine *e, struct room *room, uint64_t now_ns)
{
	bool target = room->role == KVD_RECV || room->role == KVD_PULL;

	room->ended = true;
	room->ended_ns = now_ns;
	if (target && room->state == KVD_SUCCESS)
		room->wrong = cache_content_wrong(&e->cache, &room->run);
	cache_reuse(&e->cache, &room->run);
}

static void tell_room(const struct engine *e, const struct room *room,
		      const struct kvd_room_status *st, uint64_t now_ns)
{
	printf("{\"event\":\"room\",\"room\":%" PRIu64 ",\"role\":\"%s\",\"state\":%d,"
	       "\"aborting\":%s,\"error\":\"%s\",\"retryable\":%s,\"bytes\":%" PRIu64
	       ",\"wrong\":%u,"
	       "\"t\":%" PRIu64 ",\"late\":%" PRIu64 "}\n",
	       room->run.room, role_names[room->role], st->state,
	       st->flags & KVD_FLAG_ABORTING ? "true" : "false",
	       st->error ? kvd_code_name(st->error) : "",
	       st->retryable ? "true" : "false", st->bytes, room->wrong, now_ns,
	       e->late_ns);
}

bool engine_look(struct engine *e, struct room *room)
{
	struct kvd_room_status st;
	uint64_t now_ns = clock_ns();
	unsigned int aborting;

	if (kvd_room_read(room->handle, &st) < 0)
		return false;
	aborting = st.flags & KVD_FLAG_ABORTING;
	room->bytes = st.bytes;
	if (st.state == room->state && aborting == room->aborting &&
	    st.error == room->error)
		return false;
	if (room->ended)
		room->moved_after_end = true; /* terminal states are sticky */
	room->state = st.state;
	room->aborting = aborting;
	room->error = st.error;
	if (!room->ended && (st.state == KVD_FAILED || st.state == KVD_SUCCESS))
		room_ended(e, room, now_ns);
	if (!room->batch)
		tell_room(e, room, &st, now_ns);
	return true;
}

/* ---- commands ---- */

static int role_of(const char *name)
{
	for (int i = 0; i < 4; i++)
		if (strcmp(role_names[i], name) == 0)
			return i;
	return -1;
}

static void do_open(struct engine *e, uint64_t id, const char *rest)
{
	char role[8], endpoint[160], pool[64];
	struct open_args a = {0};
	struct kvd_call call;
	int r;

	if (sscanf(rest, "%" SCNu64 " %7s %" SCNu32 " %" SCNu32 " %u %u %159s %63s",
		   &a.room, role, &a.base, &a.count, &a.receivers, &a.word, endpoint,
		   pool) != 8 ||
	    role_of(role) < 0) {
		answer(id, -KVD_E_INVAL, "open");
		return;
	}
	a.role = (enum kvd_role)role_of(role);
	a.endpoint = endpoint;
	a.pool = strcmp(pool, "-") == 0 ? NULL : pool;
	call = call_of(id);
	r = engine_open(e, &a, &call);
	if (r)
		refused(e, &call, r);
}

static void do_room(struct engine *e, uint64_t id, const char *verb, struct room *room,
		    const char *rest)
{
	struct kvd_call call = call_of(id);
	struct send_args s = {0};
	unsigned int word = 0, last = 0;
	int r = -KVD_E_INVAL;

	if (strcmp(verb, "bind") == 0 && sscanf(rest, "%u", &word) == 1) {
		r = engine_bind(e, room, word, &call);
	} else if (strcmp(verb, "send") == 0 &&
		   sscanf(rest, "%" SCNu64 " %" SCNu32 " %" SCNu32 " %u %u", &s.seq,
			  &s.begin, &s.end, &last, &s.word) == 5) {
		s.last = last != 0;
		r = engine_send(e, room, &s, &call);
	} else if (strcmp(verb, "abort") == 0) {
		r = kvd_room_abort(room->handle, "the test gives up", &call);
	} else if (strcmp(verb, "close") == 0) {
		r = kvd_room_close(room->handle, &call);
		if (!r)
			engine_forget(e, room);
	}
	if (r)
		refused(e, &call, r);
}

static void do_still(uint64_t id, struct room *room, const char *rest)
{
	unsigned int ms = 0;

	if (sscanf(rest, "%u", &ms) != 1 || !room->ended)
		answer(id, -KVD_E_STATE, "still: not ended");
	else {
		room->still_id = id;
		room->still_ns = room->ended_ns + ms * UINT64_C(1000000);
	}
}

static void tell_still(struct engine *e, struct room *room)
{
	printf("{\"id\":%" PRIu64 ",\"result\":\"OK\",\"written\":%u,\"strayed\":%u,"
	       "\"sticky\":%s}\n",
	       room->still_id, cache_reuse_wrong(&e->cache, &room->run),
	       cache_strayed(&e->cache), room->moved_after_end ? "false" : "true");
	room->still_id = 0;
}

static void do_watch(uint64_t id, struct room *room, const char *rest)
{
	if (sscanf(rest, "%" SCNu64, &room->watch_bytes) != 1)
		answer(id, -KVD_E_INVAL, "watch");
	else
		room->watch_id = id;
}

static void do_cmd(struct engine *e, uint64_t id, const char *rest)
{
	struct kvd_call call = call_of(id);
	char name[32];
	int used = 0, r;

	if (sscanf(rest, "%31s %n", name, &used) != 1)
		r = -KVD_E_INVAL;
	else
		r = kvd_submit(e->client, name, rest + used, &call);
	if (r)
		refused(e, &call, r);
}

static void do_word(struct engine *e, uint64_t id, const char *rest)
{
	unsigned int word = 0;

	if (sscanf(rest, "%u", &word) != 1 || !word || word > WORDS) {
		answer(id, -KVD_E_INVAL, "word");
		return;
	}
	__atomic_store_n(&e->cache.words[word - 1], 1, __ATOMIC_RELEASE);
	answer(id, 0, "");
}

static void do_rows(struct engine *e, uint64_t id, const char *verb, const char *rest)
{
	struct rows *rows = &e->rows;
	int r = strcmp(verb, "chunks") == 0 ? rows_chunks(rows, rest)
		: strcmp(verb, "hold") == 0 ? rows_hold(rows, rest)
					    : rows_post(rows, rest);

	answer(id, r, r < 0 ? kvd_last_error(e->client)->message : "");
}

/* Of its one post. */
static void do_post(struct engine *e, uint64_t id, const char *verb, const char *rest)
{
	unsigned int ms = 0;

	if (strcmp(verb, "why") == 0)
		rows_why(&e->rows, id);
	else if (sscanf(rest, "%u", &ms) == 1 && e->rows.ended)
		rows_still(&e->rows, id, ms);
	else
		answer(id, -KVD_E_STATE, "still: not ended");
}

static void do_line(struct engine *e, const char *line)
{
	char verb[16], number[24], role[8];
	struct room *room;
	uint64_t id = 0;
	int used = 0, more = 0;

	if (sscanf(line, "%15s %" SCNu64 " %n", verb, &id, &used) != 2)
		return;
	line += used;
	if (strcmp(verb, "open") == 0) {
		do_open(e, id, line);
	} else if (strcmp(verb, "word") == 0) {
		do_word(e, id, line);
	} else if (strcmp(verb, "cmd") == 0) {
		do_cmd(e, id, line);
	} else if (strcmp(verb, "look") == 0) {
		printf("{\"id\":%" PRIu64
		       ",\"result\":\"OK\",\"strayed\":%u,\"late\":%" PRIu64
		       ",\"rooms\":%u}\n",
		       id, cache_strayed(&e->cache), e->late_ns, e->room_count);
	} else if (strcmp(verb, "zero") == 0) {
		memset(e->cache.words, 0, WORDS * 8);
		answer(id, 0, "");
	} else if (strcmp(verb, "batch") == 0) {
		if (!batch_begin(e, id, line))
			answer(id, -KVD_E_INVAL, "batch");
	} else if (strcmp(verb, "finish") == 0) {
		batch_finish(e);
		answer(id, 0, "");
	} else if (strcmp(verb, "chunks") == 0 || strcmp(verb, "hold") == 0 ||
		   strcmp(verb, "rows") == 0) {
		do_rows(e, id, verb, line);
	} else if (strcmp(verb, "bye") == 0) {
		e->leaving = true;
		answer(id, kvd_close(e->client), "");
	} else if (sscanf(line, "%23s %7s %n", number, role, &more) == 2 &&
		   strcmp(role, "attend") == 0) {
		do_post(e, id, verb, line + more);
	} else if (sscanf(line, "%23s %7s %n", number, role, &more) == 2 &&
		   (room = engine_room(e, strtoull(number, NULL, 10), role))) {
		if (strcmp(verb, "still") == 0)
			do_still(id, room, line + more);
		else if (strcmp(verb, "watch") == 0)
			do_watch(id, room, line + more);
		else
			do_room(e, id, verb, room, line + more);
	} else {
		answer(id, -KVD_E_NOTFOUND, "no such room here");
	}
}

/* ---- the loop ---- */

static void read_stdin(struct engine *e)
{
	ssize_t n = read(STDIN_FILENO, e->input + e->input_len,
			 sizeof(e->input) - 1 - e->input_len);
	char *end;

	if (n <= 0) {
		e->leaving = n == 0 || errno != EINTR;
		return;
	}
	e->input_len += (size_t)n;
	e->input[e->input_len] = '\0';
	while (!e->leaving && (end = strchr(e->input, '\n'))) {
		*end = '\0';
		do_line(e, e->input);
		e->input_len -= (size_t)(end + 1 - e->input);
		memmove(e->input, end + 1, e->input_len + 1);
	}
}

static void look_at_session(struct engine *e)
{
	const struct kvd_daemon_info *info = kvd_daemon(e->client);
	bool lost = kvd_lost(e->client);

	if (lost == e->lost && strcmp(info->instance, e->instance) == 0)
		return;
	e->lost = lost;
	snprintf(e->instance, sizeof(e->instance), "%s", info->instance);
	printf("{\"event\":\"session\",\"lost\":%s,\"instance\":\"%s\",\"endpoint\":\"%"
	       "s\","
	       "\"t\":%" PRIu64 "}\n",
	       lost ? "true" : "false", info->instance, info->endpoint, clock_ns());
}

/* How long poll() may take: soon, while a room lives; at once while one is watched. */
static int look_at_rooms(struct engine *e)
{
	uint64_t now_ns = clock_ns();
	int timeout_ms = 50;

	rows_look(&e->rows, e->late_ns, now_ns);
	if ((e->rows.live && !e->rows.ended) || e->rows.still_id)
		timeout_ms = 2;
	for (unsigned int i = 0; i < e->room_count; i++) {
		struct room *room = &e->rooms[i];

		engine_look(e, room);
		if (room->watch_id && (room->ended || room->bytes >= room->watch_bytes)) {
			printf("{\"id\":%" PRIu64 ",\"result\":\"OK\",\"bytes\":%" PRIu64
			       "}\n",
			       room->watch_id, room->bytes);
			room->watch_id = 0;
		}
		if (room->still_id && now_ns >= room->still_ns)
			tell_still(e, room);
		if (room->watch_id)
			timeout_ms = 0;
		else if (timeout_ms && (!room->ended || room->still_id))
			timeout_ms = 2;
	}
	return timeout_ms;
}

static void turn(struct engine *e)
{
	int timeout_ms = look_at_rooms(e), asked = kvd_timeout_ms(e->client);
	struct pollfd fds[2] = {
		{.fd = STDIN_FILENO, .events = POLLIN},
		{.fd = kvd_fd(e->client), .events = kvd_events(e->client)},
	};
	uint64_t begin = clock_ns(), took;

	if (batch_turn(e) && timeout_ms > 1)
		timeout_ms = 1;
	if (asked >= 0 && asked < timeout_ms)
		timeout_ms = asked;
	fflush(stdout);
	if (poll(fds, 2, timeout_ms) == 0) {
		took = clock_ns() - begin;
		if (took > (uint64_t)timeout_ms * 1000000u + LATE_NS)
			e->late_ns += took - (uint64_t)timeout_ms * 1000000u;
	}
	if (fds[0].revents)
		read_stdin(e);
	if (e->leaving)
		return;
	(void)kvd_poll(e->client, 0);
	look_at_session(e);
}

int main(int argc, char **argv)
{
	static struct engine e;
	struct kvd_options options = {.timeout_ms = CALL_MS};

	if (argc != 5)
		return 2;
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	options.socket = argv[1];
	options.client = argv[2];
	if (kvd_open(&options, &e.client)) {
		fprintf(stderr, "%s\n", kvd_last_error(NULL)->message);
		return 1;
	}
	e.rows.client = e.client;
	cache_open(e.client, argv[3], (uint32_t)strtoul(argv[4], NULL, 10), &e.cache);
	while (!e.leaving)
		turn(&e);
	fflush(stdout);
	return 0;
}
