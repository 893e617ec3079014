/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvd-ctl bench: measures transfers between two running daemons, as an engine would.
 *
 * Both ends are ordinary sessions. One serves memory (--serve) and prints a ticket:
 * the endpoint of its daemon, its session key, and address and size of the memory.
 * The other end reads the ticket and uses its own daemon for the rest, so only the
 * ticket and the daemons' own traffic cross the network:
 *
 *     ssh HOST kvd-ctl bench --serve | kvd-ctl bench -
 *
 * The ticket grants access to this memory only, while the serving end runs. Anyone
 * who reads the ticket can write the memory. Since arguments are visible to every
 * user of the host, the ticket can also be read from standard input. The serving end
 * exits when the reader of its standard output closes it, or on a signal.
 */
#include "ctl/bench.h"

#include <errno.h>
#include <inttypes.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "ctl/ctl.h"
#include "ctl/table.h"
#include "daemon/base/mem.h"

#define MEMORY_DEFAULT "256M"
#define MEMORY_MIN (UINT64_C(2) << 20)
#define MEMORY_MAX (UINT64_C(64) << 30)
#define ROWS_DEFAULT_MAX UINT64_C(65536)
#define ROWS_MAX (UINT64_C(1) << 22) /* of one descriptor list */
#define REPS_DEFAULT 20u
#define TICKET_MAX 512

static const char *const op_names[BENCH_OPS] = {"push", "pull"};

struct wanted {
	struct bench_case c; /* size and rows are set for each case */
	uint64_t sizes[CTL_SIZES_MAX];
	unsigned int size_count;
	uint64_t rows; /* 0: half the memory */
};

/* ---- the command line ---- */

static int parse_sizes(const char *text, struct wanted *w)
{
	if (ctl_sizes(text, MEMORY_MAX, w->sizes, &w->size_count))
		return CTL_OK;
	return ctl_usage("--size: 1 to %u of SIZE or SIZE,SIZE… like 64K,256, not '%s'",
			 CTL_SIZES_MAX, text);
}

static int parse_ops(const char *text, struct wanted *w)
{
	w->c.ops[BENCH_PUSH] = strcmp(text, "pull") != 0;
	w->c.ops[BENCH_PULL] = strcmp(text, "push") != 0;
	if (w->c.ops[BENCH_PUSH] && w->c.ops[BENCH_PULL] && strcmp(text, "both") != 0)
		return ctl_usage("--op: push, pull or both, not '%s'", text);
	return CTL_OK;
}

static int parse_wanted(const struct ctl *ctl, struct wanted *w)
{
	int r = parse_sizes(ctl->bench.size ? ctl->bench.size : "64K,4K,256", w);

	if (!r)
		r = parse_ops(ctl->bench.op ? ctl->bench.op : "both", w);
	if (!r && ctl->count > BENCH_REPS_MAX)
		r = ctl_usage("--count: at most %u", BENCH_REPS_MAX);
	w->c.reps = ctl->count ? (unsigned int)ctl->count : REPS_DEFAULT;
	w->c.flat = ctl->bench.flat;
	w->c.gather = ctl->bench.gather;
	w->c.timeout_ms = ctl->timeout_ms;
	w->rows = ctl->bench.rows;
	return r;
}

static int parse_memory(const struct ctl *ctl, uint64_t *bytes_p)
{
	const char *text = ctl->bench.memory ? ctl->bench.memory : MEMORY_DEFAULT, *end;

	if (!ctl_size(text, bytes_p, &end) || *end || *bytes_p < MEMORY_MIN ||
	    *bytes_p > MEMORY_MAX)
		return ctl_usage("--memory: 2M to 64G, not '%s'", text);
	*bytes_p = (*bytes_p + MEMORY_MIN - 1) & ~(MEMORY_MIN - 1);
	return CTL_OK;
}

/* ---- the serving end ---- */

/* Waits until the ticket's session ends or the reader of our output closes it. */
static int serve_wait(struct kvd_client *client)
{
	uint64_t epoch = kvd_daemon(client)->epoch;

	for (;;) {
		struct pollfd fds[2] = {
			{.fd = kvd_fd(client), .events = kvd_events(client)},
			{.fd = STDOUT_FILENO}};

		if (poll(fds, 2, 1000) < 0 && errno != EINTR)
			return ctl_failed("poll: %s", strerror(errno));
		if (fds[1].revents & (POLLERR | POLLNVAL))
			return CTL_OK;
		if (kvd_poll(client, 0) < 0 || kvd_daemon(client)->epoch != epoch) {
			ctl_failed("the daemon has exited; the ticket is invalid");
			return CTL_NO_DAEMON;
		}
	}
}

static int bench_serve(struct ctl *ctl)
{
	struct kvd_client *client;
	struct bench_memory memory;
	struct kvd_session_key key;
	uint64_t bytes;
	int r = parse_memory(ctl, &bytes);

	if (r)
		return r;
	client = ctl_open(ctl);
	if (!client)
		return CTL_NO_DAEMON;
	if (bench_memory_new(client, bytes, &memory))
		return CTL_ERROR;
	if (kvd_session_key(client, 0, &key) < 0) {
		r = bench_report(client, "session.key");
	} else {
		printf("%s,%" PRIu64 ",%s,%" PRIuPTR ",%zu\n",
		       kvd_daemon(client)->endpoint, key.epoch, key.secret,
		       (uintptr_t)memory.memory.address, memory.memory.bytes);
		fflush(stdout);
		r = serve_wait(client);
	}
	bench_memory_free(&memory);
	return r;
}

/* ---- the measuring end ---- */

static bool ticket_parse(const char *text, struct bench_ticket *t)
{
	int end = -1;

	*t = (struct bench_ticket){0};
	return sscanf(text,
		      "%127[^,\n],%" SCNu64 ",%32[0-9a-f],%" SCNu64 ",%" SCNu64 "%n",
		      t->endpoint, &t->key.epoch, t->key.secret, &t->address, &t->bytes,
		      &end) == 5 &&
	       end > 0 && (text[end] == '\0' || text[end] == '\n') &&
	       strlen(t->key.secret) == 32 && t->bytes >= MEMORY_MIN &&
	       t->bytes <= MEMORY_MAX;
}

static int ticket_take(const char *text, struct bench_ticket *t)
{
	char line[TICKET_MAX];

	if (strcmp(text, "-") == 0) {
		if (!fgets(line, sizeof(line), stdin))
			return ctl_failed("standard input: no ticket");
		text = line;
	}
	return ticket_parse(text, t)
		       ? CTL_OK
		       : ctl_failed("not a ticket of kvd-ctl bench --serve");
}

/* Connects to the other daemon and checks the transport. */
static int reach(struct ctl *ctl, const struct bench_ticket *t, cJSON **peer_p)
{
	const char *want = ctl->bench.transport, *has;
	cJSON *args = cJSON_CreateObject();
	int r;

	cJSON_AddStringToObject(args, "endpoint", t->endpoint);
	/* let the daemon time out first: its error names the cause */
	cJSON_AddNumberToObject(args, "timeout_ms", ctl->timeout_ms / 2);
	r = ctl_ask(ctl, "peer.connect", args, peer_p);
	if (r) {
		fprintf(stderr, "  %s cannot be reached from this daemon\n", t->endpoint);
		return r;
	}
	has = ctl_str(*peer_p, "transport", "none");
	if (want && strcmp(want, has) != 0)
		return ctl_failed(
			"%s: connected by %s, not by %s; check `transports` and "
			"`require` of both daemons",
			t->endpoint, has, want);
	return CTL_OK;
}

static cJSON *record(enum bench_op op, const struct bench_case *c,
		     const struct bench_times *t)
{
	double bytes = (double)(c->size * c->rows) / 1e9;
	cJSON *one = cJSON_CreateObject(), *spread;

	cJSON_AddStringToObject(one, "op", op_names[op]);
	cJSON_AddNumberToObject(one, "size", (double)c->size);
	cJSON_AddNumberToObject(one, "rows", (double)c->rows);
	cJSON_AddNumberToObject(one, "repetitions", c->reps);
	cJSON_AddNumberToObject(one, "gbps", bytes / t->s[c->reps / 2]);
	spread = cJSON_AddArrayToObject(one, "spread");
	cJSON_AddItemToArray(spread, cJSON_CreateNumber(bytes / t->s[c->reps * 9 / 10]));
	cJSON_AddItemToArray(spread, cJSON_CreateNumber(bytes / t->s[c->reps / 10]));
	cJSON_AddNumberToObject(one, "first_gbps", bytes / t->first_s);
	cJSON_AddNumberToObject(one, "us", t->s[c->reps / 2] * 1e6);
	return one;
}

static int show(const struct ctl *ctl, cJSON *peer, cJSON *results)
{
	const cJSON *one;
	struct table *table;

	if (ctl->json) {
		cJSON *all = cJSON_CreateObject();

		cJSON_DeleteItemFromObjectCaseSensitive(peer, "id");
		cJSON_DeleteItemFromObjectCaseSensitive(peer, "ok");
		cJSON_AddItemReferenceToObject(all, "peer", peer);
		cJSON_AddItemReferenceToObject(all, "results", results);
		ctl_print_json(all);
		cJSON_Delete(all);
		return CTL_OK;
	}
	table = table_new("op >row >rows >GB/s >10% >90% >first >us");
	cJSON_ArrayForEach(one, results) {
		const cJSON *spread = ctl_list(one, "spread");

		ctl_cells(table, one, "op size:B rows gbps:3");
		table_cellf(table, "%.3f", cJSON_GetArrayItem(spread, 0)->valuedouble);
		table_cellf(table, "%.3f", cJSON_GetArrayItem(spread, 1)->valuedouble);
		ctl_cells(table, one, "first_gbps:3 us");
	}
	printf("%s by %s%s%s, round trip %.0f us; bytes verified\n",
	       ctl_str(peer, "endpoint", "?"), ctl_str(peer, "transport", "?"),
	       *ctl_str(peer, "path", "") ? ", " : "", ctl_str(peer, "path", ""),
	       ctl_num(peer, "rtt_us"));
	return ctl_print_table(table);
}

/* The number of rows of a case; 0 after printing the error. */
static uint64_t bench_rows_of(const struct wanted *w, uint64_t size, uint64_t bytes)
{
	uint64_t most = bytes / size, rows = w->rows;

	if (!rows) {
		rows = most / 2 ? most / 2 : most;
		rows = rows < ROWS_DEFAULT_MAX ? rows : ROWS_DEFAULT_MAX;
	}
	if (rows && rows <= most && rows <= ROWS_MAX)
		return rows;
	ctl_usage("%" PRIu64 " rows of %" PRIu64 " bytes: the other end serves %" PRIu64
		  " bytes (its --memory)",
		  rows ? rows : 1, size, bytes);
	return 0;
}

static int bench_measure(struct ctl *ctl, struct wanted *w, const struct bench_ticket *t,
			 cJSON *results)
{
	struct bench_times *times = mem_calloc(BENCH_OPS, sizeof(*times));
	struct bench_memory local = {.memory = {.fd = -1}};
	uint64_t attach;
	int r = times ? CTL_OK : ctl_failed("out of memory");

	if (!r && kvd_peer_attach(ctl->client, t->endpoint, &t->key, NULL, &attach) < 0)
		r = bench_report(ctl->client, t->endpoint);
	if (!r)
		r = bench_memory_new(ctl->client, 2 * t->bytes, &local);
	for (unsigned int i = 0; !r && i < w->size_count; i++) {
		w->c.size = w->sizes[i];
		w->c.rows = bench_rows_of(w, w->c.size, t->bytes);
		ctl_progress("rows of %s, %u of %u sizes, %u repetitions each",
			     ctl_bytes((double)w->c.size), i + 1, w->size_count,
			     w->c.reps);
		r = w->c.rows ? bench_run(ctl->client, attach, t, &local, &w->c, times)
			      : CTL_USAGE;
		for (unsigned int op = 0; !r && op < BENCH_OPS; op++)
			if (w->c.ops[op])
				cJSON_AddItemToArray(results, record((enum bench_op)op,
								     &w->c, &times[op]));
	}
	ctl_progress(NULL);
	bench_memory_free(&local);
	mem_free(times);
	return r;
}

static int run(struct ctl *ctl, struct wanted *w, const struct bench_ticket *t)
{
	cJSON *results, *peer = NULL;
	int r = reach(ctl, t, &peer);

	if (!r) {
		results = cJSON_CreateArray();
		r = bench_measure(ctl, w, t, results);
		if (!r)
			r = show(ctl, peer, results);
		cJSON_Delete(results);
	}
	cJSON_Delete(peer);
	return r;
}

int ctl_run_bench(struct ctl *ctl)
{
	struct wanted w = {0};
	struct bench_ticket t = {0};
	int r;

	if (ctl->bench.serve + ctl->arg_count != 1)
		return ctl_usage("bench: either --serve or a ticket");
	if (ctl->bench.serve)
		return bench_serve(ctl);
	r = parse_wanted(ctl, &w);
	if (r)
		return r;
	if (ctl->bench.memory)
		return ctl_usage("--memory: an option of the serving end (--serve)");
	r = ticket_take(ctl->args[0], &t);
	if (r)
		return r;
	return ctl_open(ctl) ? run(ctl, &w, &t) : CTL_NO_DAEMON;
}
