/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A home alone with made-up holders, whose table is as small as one can be: what one of
 * them can take from the others, and what an answer has room for.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/context.h"
#include "daemon/config/config.h"
#include "daemon/handshake/handshake.h"
#include "daemon/loop/loop.h"
#include "daemon/store/home.h"
#include "daemon/store/homes_impl.h"
#include "daemon/store/store_impl.h"
#include "tests/lib/index_update.h"

#define HOLDERS 80u
#define SPACE UINT64_C(77)
#define SEVEN_EIGHTHS(most) ((most) - (most) / 8)

struct world {
	struct kvd kvd;
	struct link link;
	struct config config;
	struct store store;
	struct home *home;
	struct remote remotes[HOLDERS];
	struct peer peers[HOLDERS];
};

static int setup(void **state)
{
	struct world *w = calloc(1, sizeof(*w));

	assert_non_null(w);
	assert_int_equal(loop_new_virtual(5, &w->kvd.loop), 0);
	w->kvd.config = &w->config;
	w->kvd.link = &w->link;
	w->store.kvd = &w->kvd;
	assert_int_equal(home_new(&w->store, &w->home), 0);
	for (unsigned int i = 0; i < HOLDERS; i++) {
		w->remotes[i].peer = &w->peers[i];
		snprintf(w->peers[i].endpoint, sizeof(w->peers[i].endpoint),
			 "tcp://h%u:1", i);
	}
	*state = w;
	return 0;
}

static int teardown(void **state)
{
	struct world *w = *state;

	home_free(w->home);
	loop_free(w->kvd.loop);
	free(w);
	return 0;
}

static struct store_home home(struct world *w)
{
	struct store_home f;

	home_figures(w->home, &f);
	return f;
}

static void sweep(struct world *w)
{
	while (loop_turn(w->kvd.loop, 0))
		;
}

static struct home_key key_of(uint64_t chunk)
{
	return (struct home_key){.id = home_mix(chunk + 1), .space = SPACE};
}

static void note(struct world *w, unsigned int holder, bool anew, uint64_t first,
		 unsigned int count, bool put)
{
	const struct wire_header h = {.type = WIRE_T_INDEX_UPDATE};
	struct index_update told;
	struct cursor in;

	assert_true(count <= HOMES_NOTES_MAX);
	index_update_begin(&told, anew);
	for (uint64_t i = first; i < first + count; i++) {
		struct home_key key = key_of(i);

		index_update_add(&told, &key, put);
	}
	assert_int_equal(index_update_end(&told, &in), 0);
	assert_int_equal(home_on_message(w->home, &w->remotes[holder], &h, &in), 0);
}

/* Chunks that the holder claims, from `first` on, until there is no room. */
static uint64_t fill(struct world *w, unsigned int holder, uint64_t first)
{
	uint64_t before = home(w).refused, told = 0;

	while (home(w).refused == before) {
		note(w, holder, false, first + told, 16, true);
		told += 16;
		assert_true(told < 4096);
	}
	return told;
}

static bool sum_asks_again(struct world *w, unsigned int holder, uint64_t from,
			   uint64_t count)
{
	struct wire_index_digest msg = {.count = count};

	for (uint64_t i = from; i < from + count; i++) {
		struct home_key key = key_of(i);

		msg.sum ^= home_key_mix(&key);
	}
	return home_wants_all(w->home, &w->remotes[holder], &msg);
}

/* ---- cases ---- */

static void holder_resyncing_repeatedly_keeps_its_share(void **state)
{
	struct world *w = *state;
	uint64_t most;

	note(w, 0, true, 0, 1, true);
	most = home(w).most;
	fill(w, 0, 0);
	assert_int_equal(home(w).used, most / 2);
	for (unsigned int i = 0; i < 3; i++) /* nothing is swept out meanwhile */
		note(w, 0, true, 0, 0, true);
	note(w, 0, false, 10000, 256, true);
	assert_int_equal(home(w).used, 0); /* it is not heard */
	fill(w, 1, 20000);
	assert_in_range(home(w).used, SEVEN_EIGHTHS(most) - most / 2, most / 2);
	sweep(w);
	note(w, 0, true, 0, 4, true);
	assert_true(sum_asks_again(w, 0, 0, 5));
	assert_false(sum_asks_again(w, 0, 0, 4));
}

static void chunks_refused_are_resynchronised_when_there_is_space(void **state)
{
	struct world *w = *state;
	uint64_t most, told, unknown;

	note(w, 1, true, 10000, 1, true);
	most = home(w).most;
	while (home(w).used < SEVEN_EIGHTHS(most) - 64) {
		fill(w, 1, 10000);
		fill(w, 2, 20000);
	}
	note(w, 0, true, 0, 100, true);
	told = fill(w, 0, 100) + 100;
	unknown = home(w).unknown;
	assert_true(unknown >= told - most / 256);
	for (unsigned int i = 0; i < 50;
	     i++) { /* what has no room goes and others come */
		note(w, 0, false, told - 16, 16, false);
		note(w, 0, false, told - 16, 16, true);
	}
	assert_int_equal(home(w).unknown, unknown);
	assert_false(sum_asks_again(w, 0, 0, told));
	home_on_down(w->home, &w->remotes[1]);
	home_on_down(w->home, &w->remotes[2]);
	sweep(w);
	assert_true(sum_asks_again(w, 0, 0, told));
	note(w, 0, true, 0, (unsigned int)told, true);
	assert_int_equal(home(w).unknown, 0);
}

/* 79 holders have the first 64 chunks of a prompt, one has all 100. */
static void holder_of_most_is_named_among_many_of_the_start(void **state)
{
	struct world *w = *state;
	uint8_t ids[HOMES_PROBES_MAX * 8], answer[HOME_FOUND_BYTES_MAX];
	uint32_t at[HOMES_PROBES_MAX], count;
	unsigned int probes = homes_probes(100, at);
	struct wire_index_query msg = {.space = SPACE, .ids = {.data = ids}};
	char endpoint[LINK_ENDPOINT_MAX];
	struct cursor out;

	w->config.chunk_index_bytes = 1 << 20;
	for (unsigned int i = 0; i < HOLDERS; i++)
		note(w, i, true, 0, i == 33 ? 100 : 64, true);
	cursor_write(&out, ids, sizeof(ids));
	for (unsigned int i = probes; i-- > 0;) {
		struct home_key key = key_of(at[i]);

		cursor_put_u64(&out, key.id);
	}
	msg.ids.len = out.pos;
	cursor_write(&out, answer, sizeof(answer));
	assert_int_equal(home_found(w->home, NULL, &msg, &out), 0);
	cursor_read(&out, answer, out.pos);
	count = cursor_get_u32(&out);
	assert_in_range(count, HOMES_HOLDERS_MAX, HOLDERS);
	cursor_get_str(&out, endpoint, sizeof(endpoint));
	assert_string_equal(endpoint, w->peers[33].endpoint);
}

#define CASE(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		CASE(holder_resyncing_repeatedly_keeps_its_share),
		CASE(chunks_refused_are_resynchronised_when_there_is_space),
		CASE(holder_of_most_is_named_among_many_of_the_start),
	};

	return cmocka_run_group_tests_name("home", tests, NULL, NULL);
}
