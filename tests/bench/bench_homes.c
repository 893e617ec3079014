/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Homes of chunks at the size of a cluster: 1000 holders of 10 000 chunks each, told to
 * 32 homes in this process by the messages that they would send, and prompts found.
 *
 *     bench_homes [MiB of a home [holders [homes]]]
 *
 * A holder has 100 beginnings of 8 chunks, which all others have as well, and prompts of
 * 32 chunks behind one of them, each at two holders. What crosses wires is left out:
 * encoding and decoding of messages are in it, ZeroMQ and checksums are not. Whole
 * daemons are bench_homes_cluster.c's.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "daemon/base/clock.h"
#include "daemon/base/context.h"
#include "daemon/base/log.h"
#include "daemon/config/config.h"
#include "daemon/handshake/handshake.h"
#include "daemon/store/home.h"
#include "daemon/store/home_table.h"
#include "daemon/store/homes_impl.h"
#include "daemon/store/store_impl.h"
#include "tests/lib/index_update.h"

#define BEGINNINGS 100u
#define BEGIN_CHUNKS 8u
#define PROMPTS 288u /* of a holder */
#define PROMPT_CHUNKS 32u
#define FINDS 20000u
#define HOLDERS_MAX 8000u
#define CHURN_S 10u
#define CHANGES 200u /* a second and holder */
#define SPACE UINT64_C(0x123456789abc)

struct bench {
	struct loop *loop;
	struct kvd kvd;
	struct link link;
	struct config config;
	struct store store;
	struct members *members;
	unsigned int holders, homes;
	struct home *home[MEMBERS_MAX];
	struct remote remote[HOLDERS_MAX];
	struct peer peer[HOLDERS_MAX];
	uint64_t random;
};

/* Notes of one holder, by home. */
struct batch {
	struct index_update notes[MEMBERS_MAX];
	uint64_t messages, sent;
};

static void die(const char *what)
{
	fprintf(stderr, "bench_homes: %s: %s\n", what, err_last()->text);
	exit(1);
}

static double seconds(uint64_t since)
{
	return (double)(clock_ns() - since) / 1e9;
}

static uint64_t rnd(struct bench *b, uint64_t below)
{
	b->random = home_mix(b->random + UINT64_C(0x9e3779b97f4a7c15));
	return b->random % below;
}

static uint64_t resident(void)
{
	unsigned long long size, pages = 0;
	FILE *f = fopen("/proc/self/statm", "r");

	if (!f || fscanf(f, "%llu %llu", &size, &pages) != 2)
		pages = 0;
	if (f)
		fclose(f);
	return pages * (uint64_t)sysconf(_SC_PAGESIZE);
}

/* ---- who has what ---- */

static struct home_key key_of(uint64_t text, uint32_t chunk)
{
	uint64_t id[4] = {home_mix(text), home_mix(text + chunk), text, chunk};

	return home_key_make(SPACE, (const uint8_t *)id);
}

/* Prompt p is its two holders'; chunks of the beginning come first. */
static struct home_key prompt_key(uint64_t prompt, uint32_t chunk)
{
	if (chunk < BEGIN_CHUNKS)
		return key_of(1 + prompt % BEGINNINGS, chunk);
	return key_of(1000 + prompt, chunk);
}

static uint64_t prompt_of(const struct bench *b, unsigned int holder, unsigned int i)
{
	/* of PROMPTS, half are shared with the holder before it, half with the next one
	 */
	uint64_t pair = i % 2 ? holder : (holder + b->holders - 1) % b->holders;

	return pair * (PROMPTS / 2) + i / 2;
}

static bool has_prompt(const struct bench *b, unsigned int holder, uint64_t prompt)
{
	uint64_t pair = prompt / (PROMPTS / 2);

	return pair == holder || (pair + 1) % b->holders == holder;
}

/* ---- messages ---- */

static void batch_begin(const struct bench *b, struct batch *batch, bool anew)
{
	for (unsigned int i = 0; i < b->homes; i++)
		index_update_begin(&batch->notes[i], anew);
}

static void batch_send(struct bench *b, struct batch *batch, unsigned int holder,
		       unsigned int home)
{
	const struct wire_header h = {.type = WIRE_T_INDEX_UPDATE};
	struct index_update *note = &batch->notes[home];
	struct cursor in;

	if (index_update_end(note, &in) < 0)
		die("INDEX_UPDATE");
	if (home_on_message(b->home[home], &b->remote[holder], &h, &in) < 0)
		die("home_on_message");
	batch->messages++;
	batch->sent += index_update_count(note);
	index_update_begin(note, false);
}

static void batch_note(struct bench *b, struct batch *batch, unsigned int holder,
		       const struct home_key *key, bool put)
{
	unsigned int home = members_home(b->members, key);

	index_update_add(&batch->notes[home], key, put);
	if (index_update_count(&batch->notes[home]) == HOMES_NOTES_MAX)
		batch_send(b, batch, holder, home);
}

static void batch_end(struct bench *b, struct batch *batch, unsigned int holder)
{
	for (unsigned int i = 0; i < b->homes; i++) {
		if (index_update_count(&batch->notes[i]))
			batch_send(b, batch, holder, i);
	}
}

static void tell_all(struct bench *b, struct batch *batch, unsigned int holder)
{
	struct home_key key;

	batch_begin(b, batch, true);
	for (uint32_t i = 0; i < BEGINNINGS * BEGIN_CHUNKS; i++) {
		key = key_of(1 + i / BEGIN_CHUNKS, i % BEGIN_CHUNKS);
		batch_note(b, batch, holder, &key, true);
	}
	for (uint32_t i = 0; i < PROMPTS * PROMPT_CHUNKS; i++) {
		key = prompt_key(prompt_of(b, holder, i / PROMPT_CHUNKS),
				 BEGIN_CHUNKS + i % PROMPT_CHUNKS);
		batch_note(b, batch, holder, &key, true);
	}
	batch_end(b, batch, holder);
}

/* ---- parts of the bench ---- */

static uint64_t holdings(const struct bench *b, uint64_t *refused_p)
{
	struct store_home f;
	uint64_t used = 0;

	*refused_p = 0;
	for (unsigned int i = 0; i < b->homes; i++) {
		home_figures(b->home[i], &f);
		used += f.used;
		*refused_p += f.refused;
	}
	return used;
}

static void bench_fill(struct bench *b, struct batch *batch)
{
	uint64_t before = resident(), since = clock_ns(), refused, used;
	double s;

	for (unsigned int i = 0; i < b->holders; i++)
		tell_all(b, batch, i);
	s = seconds(since);
	used = holdings(b, &refused);
	printf("told      %.2f M chunks in %" PRIu64
	       " messages: %.2f M/s of a core, both "
	       "ends\n",
	       (double)batch->sent / 1e6, batch->messages, (double)batch->sent / s / 1e6);
	printf("kept      %.2f M (of a chunk %u at most), %" PRIu64
	       " without room; %.1f bytes each, %.1f each that was told\n",
	       (double)used / 1e6, HOME_SAME_MAX, refused,
	       (double)(resident() - before) / (double)used,
	       (double)(resident() - before) / (double)batch->sent);
}

struct finding {
	uint64_t messages, bytes;
};

/* As homes_find() asks and a home answers. */
static void find(struct bench *b, uint64_t prompt, uint32_t count, struct finding *f)
{
	uint8_t ids[MEMBERS_MAX][HOMES_PROBES_MAX * 8], body[512];
	uint8_t answer[HOME_FOUND_BYTES_MAX];
	uint32_t at[HOMES_PROBES_MAX];
	unsigned int probes = homes_probes(count, at), len[MEMBERS_MAX] = {0};

	for (unsigned int i = probes; i-- > 0;) {
		struct home_key key = prompt_key(prompt, at[i]);
		unsigned int home = members_home(b->members, &key);

		memcpy(&ids[home][len[home]], &key.id, 8);
		len[home] += 8;
	}
	for (unsigned int i = 0; i < b->homes; i++) {
		struct wire_index_query msg = {
			.ask = 7, .space = SPACE, .ids = {.data = ids[i], .len = len[i]}};
		struct cursor out;

		if (!len[i])
			continue;
		cursor_write(&out, body, sizeof(body));
		if (wire_index_query_put(&out, &msg) < 0)
			die("INDEX_QUERY");
		cursor_read(&out, body, out.pos);
		if (wire_index_query_get(&out, &msg) < 0)
			die("INDEX_QUERY");
		cursor_write(&out, answer, sizeof(answer));
		if (home_found(b->home[i], NULL, &msg, &out) < 0)
			die("home_found");
		f->messages++;
		f->bytes += out.pos;
	}
}

static void bench_find(struct bench *b, const char *what, uint32_t count, uint64_t from,
		       uint64_t prompts)
{
	struct finding f = {0};
	uint64_t since = clock_ns();
	double s;

	for (unsigned int i = 0; i < FINDS; i++)
		find(b, from + rnd(b, prompts), count, &f);
	s = seconds(since);
	printf("found     %s: %.1f us in all homes, %.1f messages of %.0f bytes, "
	       "%.2f us a message\n",
	       what, s * 1e6 / FINDS, (double)f.messages / FINDS,
	       (double)f.bytes / (double)f.messages, s * 1e6 / (double)f.messages);
}

/* Does the home of a prompt's last chunk name its holders, and nobody else? */
static void check_found(struct bench *b, int dead)
{
	uint64_t named = 0, wanted = 0;

	for (unsigned int n = 0; n < FINDS; n++) {
		uint64_t prompt = rnd(b, (uint64_t)b->holders * (PROMPTS / 2));
		struct home_key key =
			prompt_key(prompt, BEGIN_CHUNKS + PROMPT_CHUNKS - 1);
		struct wire_index_query msg = {.space = SPACE,
					       .ids = {.data = &key.id, .len = 8}};
		uint8_t answer[HOME_FOUND_BYTES_MAX];
		char endpoint[LINK_ENDPOINT_MAX];
		struct cursor out;

		cursor_write(&out, answer, sizeof(answer));
		if (home_found(b->home[members_home(b->members, &key)], NULL, &msg,
			       &out) < 0)
			die("home_found");
		cursor_read(&out, answer, out.pos);
		for (uint32_t i = cursor_get_u32(&out); i > 0; i--) {
			unsigned int holder;

			cursor_get_str(&out, endpoint, sizeof(endpoint));
			holder = (unsigned int)atoi(strrchr(endpoint, 'h') + 1);
			named++;
			if (!has_prompt(b, holder, prompt) || (int)holder == dead) {
				fprintf(stderr, "bench_homes: %s is named wrongly\n",
					endpoint);
				exit(1);
			}
		}
		wanted += 2 - (dead >= 0 && has_prompt(b, (unsigned int)dead, prompt));
	}
	printf("          %.2f %% of the holders of prompts are named, none else\n",
	       100 * (double)named / (double)wanted);
}

/* As many changes as engines make: chunks go and come back, told each 250 ms. */
static void bench_churn(struct bench *b, struct batch *batch)
{
	unsigned int rounds = CHURN_S * 4, each = CHANGES / 4;
	uint64_t since = clock_ns();
	double s;

	batch->messages = batch->sent = 0;
	for (unsigned int r = 0; r < rounds; r++) {
		for (unsigned int h = 0; h < b->holders; h++) {
			batch_begin(b, batch, false);
			for (unsigned int n = 0; n < each; n++) {
				unsigned int i = r / 2 * each + n;
				struct home_key key = prompt_key(
					prompt_of(b, h, i / PROMPT_CHUNKS % PROMPTS),
					BEGIN_CHUNKS + i % PROMPT_CHUNKS);

				batch_note(b, batch, h, &key, r % 2);
			}
			batch_end(b, batch, h);
		}
	}
	s = seconds(since);
	printf("changes   %u a second and holder: a home has %.0f messages a second with "
	       "%.0f notes, %.1f %% of a core, both ends; and %.0f sums\n",
	       CHANGES, (double)batch->messages / CHURN_S / b->homes,
	       (double)batch->sent / CHURN_S / b->homes, 100 * s / CHURN_S / b->homes,
	       (double)b->holders / 30);
}

static void sweep_all(struct bench *b, uint64_t *turns_p, double *longest_p)
{
	*turns_p = 0;
	*longest_p = 0;
	for (;;) {
		uint64_t since = clock_ns();
		bool ran = loop_turn(b->loop, 0);
		double s = seconds(since);

		if (!ran)
			return;
		++*turns_p;
		*longest_p = s > *longest_p ? s : *longest_p;
	}
}

static void bench_holder_dies(struct bench *b, struct batch *batch)
{
	uint64_t since = clock_ns(), turns;
	double down, swept, longest;

	for (unsigned int i = 0; i < b->homes; i++)
		home_on_down(b->home[i], &b->remote[1]);
	down = seconds(since);
	check_found(b, 1);
	since = clock_ns();
	sweep_all(b, &turns, &longest);
	swept = seconds(since);
	printf("holder    dies: forgotten in %.1f us by all homes, swept out in %.1f ms "
	       "of %u homes together, %" PRIu64
	       " turns, the longest %.0f us (%u slices)\n",
	       down * 1e6, swept * 1e3, b->homes, turns, longest * 1e6, b->homes);
	since = clock_ns();
	tell_all(b, batch, 1);
	printf("          comes back: told in %.1f ms of a core\n", seconds(since) * 1e3);
}

/* ---- life ---- */

static void setup(struct bench *b, uint64_t bytes)
{
	char words[MEMBERS_MAX * 64] = "", one[64];

	for (unsigned int i = 0; i < b->homes; i++) {
		snprintf(one, sizeof(one), "tcp://10.1.0.%u:18515 ", i);
		strcat(words, one);
	}
	if (loop_new_virtual(1, &b->loop) < 0 ||
	    members_new(words, NULL, NULL, &b->members) < 0)
		die("setup");
	b->config.chunk_index_bytes = bytes;
	b->kvd.loop = b->loop;
	b->kvd.config = &b->config;
	b->kvd.link = &b->link;
	b->store.kvd = &b->kvd;
	for (unsigned int i = 0; i < b->homes; i++) {
		if (home_new(&b->store, &b->home[i]) < 0)
			die("home_new");
	}
	for (unsigned int i = 0; i < b->holders; i++) {
		b->remote[i].peer = &b->peer[i];
		snprintf(b->peer[i].endpoint, sizeof(b->peer[i].endpoint),
			 "tcp://10.%u.%u.1:18515#h%u", i / 256, i % 256, i);
	}
}

static void teardown(struct bench *b)
{
	for (unsigned int i = 0; i < b->homes; i++)
		home_free(b->home[i]);
	members_free(b->members);
	loop_free(b->loop);
}

static unsigned int number(int argc, char **argv, int i, unsigned int preset,
			   unsigned int most)
{
	unsigned long n = argc > i ? strtoul(argv[i], NULL, 10) : preset;

	return n >= 1 && n <= most ? (unsigned int)n : preset;
}

int main(int argc, char **argv)
{
	struct bench *b = calloc(1, sizeof(*b));
	struct batch *batch = calloc(1, sizeof(*batch));
	unsigned int mib = number(argc, argv, 1, 8, 1 << 16);

	if (!b || !batch)
		return 1;
	log_set_level(LOG_LEVEL_ERROR);
	b->holders = number(argc, argv, 2, 1000, HOLDERS_MAX);
	b->homes = number(argc, argv, 3, MEMBERS_MAX, MEMBERS_MAX);
	setup(b, (uint64_t)mib << 20);
	printf("%u holders, %u homes of %u MiB\n", b->holders, b->homes, mib);
	bench_fill(b, batch);
	check_found(b, -1);
	bench_find(b, "prompts of 40 chunks", BEGIN_CHUNKS + PROMPT_CHUNKS, 0,
		   (uint64_t)b->holders * (PROMPTS / 2));
	bench_find(b, "512 chunks, of which 8 are there", 512, UINT64_C(1) << 40,
		   1 << 20);
	bench_churn(b, batch);
	bench_holder_dies(b, batch);
	teardown(b);
	free(batch);
	free(b);
	return 0;
}
