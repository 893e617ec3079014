/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Names are evicted as bytes are: revisions by the thousand through one store with files
 * and restarts in between, and the newest are there. Who is first, who stays, users
 * beside each other, and no memory.
 *
 * KVD_SPACES_REVISIONS: how many there are.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/log.h"
#include "daemon/base/mem.h"
#include "daemon/base/share.h"
#include "tests/lib/files_forge.h"

#define OF_ONE (STORE_SPACES_MAX - STORE_SPACES_MAX / 8) /* a user's, with none else */
#define PATIENCE 10000u					 /* turns */

/* ---- an engine's use of a space ---- */

static struct account *user_of(struct files_world *w, unsigned int uid)
{
	char name[16];
	struct account *account;

	snprintf(name, sizeof(name), "%u", uid);
	account = account_get(&w->kvd.accounts, "uid", name);
	assert_non_null(account);
	return account;
}

/* As store_open(): NULL + the error. */
static struct store_class *class_open(struct files_world *w, unsigned int uid,
				      unsigned int revision)
{
	char words[16];
	struct store_space_args args = {
		.model = "0", .revision = words, .scheme = "sha256", .tokens = FW_TOKENS};
	struct account *account = user_of(w, uid);
	struct store_tenant *tenant;
	struct store_space *space;
	struct store_class *class;
	int r;

	snprintf(words, sizeof(words), "%u", revision);
	r = store_tenant_of(w->store, account, STORE_NOW, &tenant);
	account_unref(account);
	if (r >= 0)
		r = store_space_of(w->store, tenant, &args, w->canons[KIND_A], STORE_NOW,
				   &space);
	if (r < 0)
		return NULL;
	space->handles++;
	r = store_class_get(space, w->canons[KIND_A], STORE_NOW, &class);
	if (r < 0)
		store_space_let_go(space);
	return r < 0 ? NULL : class;
}

static struct store_chunk *chunk_of(const struct store_space *space, uint32_t id)
{
	uint8_t bytes[STORE_ID_BYTES];

	fw_id(id, bytes);
	return store_chunk_find(space, bytes, id);
}

/* Filled; the class's space stays open. */
static struct store_part *part_put(struct files_world *w, struct store_class *class,
				   uint32_t id)
{
	uint8_t bytes[STORE_ID_BYTES];
	struct store_chunk *chunk;
	struct store_part *part;

	fw_id(id, bytes);
	assert_int_equal(store_chunk_get(class->space, bytes, id, fw_tokens(id), &chunk),
			 0);
	assert_int_equal(store_part_new(chunk, class, PART_FILLING, &part), 0);
	fw_fill(w->store->base + arena_offset(&part->slot), KIND_A, id);
	store_part_ready(part);
	store_chunk_unpin(chunk);
	return part;
}

/* One chunk, whose id is the revision; in its file where it is to last. */
static bool revision_put(struct files_world *w, unsigned int uid, unsigned int revision,
			 bool file)
{
	struct store_class *class = class_open(w, uid, revision);
	struct store_part *part;

	if (!class)
		return false;
	fw_turn(w);
	if (!chunk_of(class->space, revision)) {
		part = part_put(w, class, revision);
		assert_true(!file || files_write(w->store->files, part, true));
		for (unsigned int i = 0; file && part->file != PART_LASTS; i++) {
			assert_true(i < PATIENCE);
			fw_turn(w);
		}
	}
	store_space_let_go(class->space);
	fw_turn(w);
	return true;
}

static struct store_space *space_there(const struct files_world *w, unsigned int uid,
				       unsigned int revision)
{
	char words[16], name[16];
	struct store_space *space;

	snprintf(words, sizeof(words), "%u", revision);
	snprintf(name, sizeof(name), "uid:%u", uid);
	list_foreach(space, &w->store->spaces, link) {
		if (strcmp(space->revision, words) == 0 &&
		    strcmp(space->tenant->account->name, name) == 0)
			return space;
	}
	return NULL;
}

/* Its chunk comes back, from its file if need be. */
static bool revision_is_there(struct files_world *w, unsigned int uid,
			      unsigned int revision)
{
	const struct store_space *space = space_there(w, uid, revision);
	struct store_chunk *chunk = space ? chunk_of(space, revision) : NULL;
	struct store_part *part;
	bool right;

	if (!chunk)
		return false;
	part = list_first(&chunk->parts, struct store_part, link);
	store_chunk_pin(chunk);
	assert_int_equal(part->slot.slab ? 0 : store_part_load(part), 0);
	for (unsigned int i = 0; part->memory != PART_READY; i++) {
		assert_true(i < PATIENCE);
		fw_turn(w);
	}
	right = fw_is(w->store->base + arena_offset(&part->slot), KIND_A, revision);
	store_chunk_unpin(chunk);
	assert_true(right);
	return true;
}

static void begin(struct files_world *w, uint64_t seed)
{
	fw_begin(w, &(struct fw_args){.seed = seed, .file_slab = 80 * KIB});
	fw_start(w);
	fw_scanned(w);
}

static void restart(struct files_world *w)
{
	fw_stop(w);
	fw_start(w);
	fw_scanned(w);
}

static size_t descriptions(struct files_world *w)
{
	size_t count;

	fw_stop(w);
	fw_raw_begin(w);
	count = forge_descriptions(w);
	fw_raw_end(w);
	fw_start(w);
	fw_scanned(w);
	return count;
}

/* ---- many ---- */

static unsigned int revisions(void)
{
	const char *text = getenv("KVD_SPACES_REVISIONS");

	return text ? (unsigned int)strtoul(text, NULL, 10) : 600;
}

static void newest_are_there(struct files_world *w, unsigned int end)
{
	unsigned int begin = end > OF_ONE ? end - OF_ONE : 0;

	for (unsigned int i = begin; i < end; i++)
		assert_true(revision_is_there(w, 1000, i));
	assert_int_equal(w->store->space_count, end - begin);
	assert_false(fw_figures(w).readonly);
}

static void revisions_by_the_thousand_leave_the_newest(void **state)
{
	unsigned int all = revisions();
	struct files_world w;

	(void)state;
	begin(&w, 1);
	for (unsigned int i = 0; i < all; i++) {
		assert_true(revision_put(&w, 1000, i, true));
		if (i % (all / 4 + 1) == all / 4)
			restart(&w);
	}
	newest_are_there(&w, all);
	assert_int_equal(descriptions(&w), OF_ONE);
	newest_are_there(&w, all);
	fw_end(&w);
}

/* What stood in the way at a start: a description for each revision that ever was, as
 * after a loss of power. Those stay that were written last, in whatever order they lie.
 */
static void start_with_spaces_too_many_keeps_the_newest(void **state)
{
	enum { COUNT = 300, LATE = 258 };
	struct canon_args args = {.tokens = FW_TOKENS, .memory_bytes = 4 * KIB};
	struct canon *canon;
	uint8_t *data = malloc(DESCRIPTION_MOST), digest[SEAL_DIGEST_BYTES];
	uint8_t late[SEAL_DIGEST_BYTES];
	struct files_world w;

	(void)state;
	assert_non_null(data);
	fw_begin(&w, &(struct fw_args){.seed = 2});
	args.layout = w.canons[KIND_A]->layout;
	assert_int_equal(canon_make(&args, &canon), 0);
	fw_raw_begin(&w);
	for (unsigned int i = 0; i < COUNT; i++) {
		struct description d = forge_right;
		char revision[16];

		snprintf(revision, sizeof(revision), "%u", i);
		d.revision = revision;
		d.layout = canon->layout;
		forge_put(&w, data, forge_describe(&d, data), digest);
		forge_slot_of(&w, i, digest, 1 + i * 7 % COUNT);
		if (i == LATE)
			memcpy(late, digest, sizeof(late));
	}
	forge_slot_of(&w, COUNT, late, COUNT + 1); /* before it there was no room */
	fw_raw_end(&w);
	fw_start(&w);
	fw_scanned(&w);
	assert_false(fw_figures(&w).readonly);
	assert_int_equal(w.store->space_count, OF_ONE);
	for (unsigned int i = 0; i < COUNT; i++)
		assert_int_equal(revision_is_there(&w, 1000, i),
				 1 + i * 7 % COUNT > COUNT + 1 - OF_ONE);
	assert_non_null(chunk_of(space_there(&w, 1000, LATE), COUNT));
	assert_int_equal(descriptions(&w), OF_ONE);
	canon_free(canon);
	fw_end(&w);
	free(data);
}

/* ---- who stays ---- */

static void space_in_use_stays(void **state)
{
	struct store_class *open;
	struct store_chunk *pinned;
	struct files_world w;

	(void)state;
	begin(&w, 3);
	assert_true(revision_put(&w, 1000, 0, false));
	assert_true(revision_put(&w, 1000, 1, false));
	open = class_open(&w, 1000, 0);
	pinned = chunk_of(space_there(&w, 1000, 1), 1);
	store_chunk_pin(pinned);
	for (unsigned int i = 2; i < 2 * OF_ONE; i++)
		assert_true(revision_put(&w, 1000, i, false));
	assert_true(revision_is_there(&w, 1000, 0));
	assert_true(revision_is_there(&w, 1000, 1));
	assert_null(space_there(&w, 1000, 2));
	store_space_let_go(open->space);
	store_chunk_unpin(pinned);
	for (unsigned int i = 0; i < 2; i++)
		assert_true(revision_put(&w, 1000, 3 * OF_ONE + i, false));
	assert_null(space_there(&w, 1000, 1)); /* pinned is not used */
	assert_non_null(space_there(&w, 1000, 0));
	fw_end(&w);
}

/* The nth kind of parts of a space that is open, with a chunk of its own. */
static struct store_class *kind_put(struct files_world *w, struct store_space *space,
				    unsigned int nth)
{
	struct canon_args args = {.layout = w->canons[KIND_A]->layout,
				  .tokens = FW_TOKENS,
				  .memory_bytes = w->store->memory_bytes};
	struct store_class *class = NULL;
	struct layout_field *field;
	struct canon *canon;

	assert_int_equal(canon_make(&args, &canon), 0);
	field = &canon->layout->views[0].layers[0].fields[0];
	field->first_unit = nth;
	field->total_units = 128;
	if (store_class_get(space, canon, STORE_NOW, &class) == 0) {
		class->used = ++w->store->uses; /* as store_class_pool() */
		part_put(w, class, 1000 + nth);
	}
	canon_free(canon);
	return class;
}

/* Of a space's kinds the one that is unused for longest leaves, but for those with parts
 * in use, which keep all of them. */
static void kind_in_use_stays(void **state)
{
	struct store_class *first;
	struct store_space *space;
	struct store_chunk *pinned;
	struct files_world w;

	(void)state;
	begin(&w, 10);
	first = class_open(&w, 1000, 0);
	space = first->space;
	part_put(&w, first, 1);
	part_put(&w, first, 2);
	for (unsigned int i = 1; i < STORE_CLASSES_MAX; i++)
		assert_non_null(kind_put(&w, space, i));
	pinned = chunk_of(space, 2);
	store_chunk_pin(pinned);
	list_first(&chunk_of(space, 1001)->parts, struct store_part, link)
		->class->users++; /* a move that fills it */
	for (unsigned int i = 0; i < 3; i++)
		assert_non_null(kind_put(&w, space, STORE_CLASSES_MAX + i));
	assert_int_equal(space->class_count, STORE_CLASSES_MAX);
	assert_ptr_equal(space->classes[first->index], first);
	assert_int_equal(first->parts, 2);
	for (unsigned int i = 1; i < STORE_CLASSES_MAX; i++)
		assert_int_equal(chunk_of(space, 1000 + i) != NULL, i == 1 || i > 4);
	store_chunk_unpin(pinned);
	assert_non_null(kind_put(&w, space, 100));
	assert_null(chunk_of(space, 1));
	store_space_let_go(space);
	fw_end(&w);
}

static void spaces_all_open_are_a_limit(void **state)
{
	struct store_class *open[OF_ONE];
	struct files_world w;

	(void)state;
	begin(&w, 4);
	for (unsigned int i = 0; i < OF_ONE; i++)
		assert_non_null(open[i] = class_open(&w, 1000, i));
	assert_null(class_open(&w, 1000, OF_ONE));
	assert_int_equal(err_last()->code, ERR_LIMIT);
	assert_non_null(strstr(err_last()->text, "limit 256"));
	err_clear();
	store_space_let_go(open[7]->space);
	assert_true(revision_put(&w, 1000, OF_ONE, false));
	for (unsigned int i = 0; i < OF_ONE; i++) {
		if (i != 7)
			store_space_let_go(open[i]->space);
	}
	fw_end(&w);
}

/* Who makes spaces without end takes no others' below their share. */
static void users_keep_their_share(void **state)
{
	struct files_world w;

	(void)state;
	begin(&w, 5);
	for (unsigned int i = 0; i < 60; i++)
		assert_true(revision_put(&w, 1000, i, false));
	for (unsigned int i = 0; i < 60; i++)
		assert_true(revision_put(&w, 1001, i, false));
	for (unsigned int i = 0; i < 2 * STORE_SPACES_MAX; i++)
		assert_true(revision_put(&w, 1002, i, false));
	for (unsigned int i = 0; i < 60; i++) {
		assert_true(revision_is_there(&w, 1000, i));
		assert_true(revision_is_there(&w, 1001, i));
	}
	for (unsigned int i = 60; i < 79; i++) /* what another one has above his */
		assert_true(revision_put(&w, 1001, i, false));
	assert_true(revision_is_there(&w, 1000, 0));
	assert_true(revision_is_there(&w, 1001, 0));
	fw_end(&w);
}

static void user_unused_for_longest_leaves(void **state)
{
	struct store_class *open;
	struct files_world w;

	(void)state;
	begin(&w, 6);
	for (unsigned int i = 0; i < ARENA_SLABS; i++)
		assert_true(revision_put(&w, 2000 + i, 1, false));
	open = class_open(&w, 2000, 1);
	assert_true(revision_put(&w, 2001, 1, false));
	for (unsigned int i = 0; i < 3; i++)
		assert_true(revision_put(&w, 3000 + i, 1, false));
	assert_int_equal(w.store->tenant_count, ARENA_SLABS);
	assert_true(revision_is_there(&w, 2000, 1));
	assert_true(revision_is_there(&w, 2001, 1));
	for (unsigned int i = 2; i < 5; i++)
		assert_null(space_there(&w, 2000 + i, 1));
	assert_non_null(space_there(&w, 2005, 1));
	assert_true(revision_put(&w, 2002, 1, false)); /* he is back */
	assert_true(revision_is_there(&w, 2002, 1));
	store_space_let_go(open->space);
	fw_end(&w);
}

/* Before his chunks are gone. */
static void user_reconnecting_at_once_counts_once(void **state)
{
	struct store_class *next, *back;
	struct files_world w;

	(void)state;
	begin(&w, 11);
	for (unsigned int i = 0; i < ARENA_SLABS; i++)
		assert_true(revision_put(&w, 2000 + i, 1, false));
	next = class_open(&w, 3000, 1); /* 2000 leaves, then 2001 for him */
	back = class_open(&w, 2000, 1);
	fw_turn(&w);
	fw_turn(&w);
	assert_int_equal(w.store->tenant_count, ARENA_SLABS);
	assert_null(space_there(&w, 2001, 1));
	store_space_let_go(next->space);
	store_space_let_go(back->space);
	fw_end(&w);
}

/* It leaves in turns: meanwhile one of its words is made anew, and has nothing of it. */
static void space_reopened_at_once_is_empty(void **state)
{
	struct store_class *class;
	struct files_world w;

	(void)state;
	fw_begin(&w, &(struct fw_args){
			     .seed = 7, .memory_slab = 256 * KIB, .file_slab = 80 * KIB});
	fw_start(&w);
	fw_scanned(&w);
	class = class_open(&w, 1000, 0);
	for (uint32_t id = 10; id < 10 + STORE_IDS_MAX + 100; id++)
		part_put(&w, class, id);
	store_space_let_go(class->space);
	assert_true(revision_put(&w, 1000, 0, true)); /* it has a description */
	for (unsigned int i = 1; i < OF_ONE; i++)
		assert_true(revision_put(&w, 1000, i, false));
	class = class_open(&w, 1000, OF_ONE); /* 0 leaves */
	assert_non_null(class);
	store_space_let_go(class->space);
	assert_false(list_empty(&w.store->going));
	class = class_open(&w, 1000, 0);
	assert_int_equal(class->space->chunks, 0);
	store_space_let_go(class->space);
	assert_true(revision_put(&w, 1000, 0, true));
	fw_quiet(&w);
	while (!list_empty(&w.store->going))
		fw_turn(&w);
	restart(&w);
	assert_true(revision_is_there(&w, 1000, 0));
	fw_end(&w);
}

/* ---- at random ---- */

#define USERS 3u
#define NAMES 400u
#define STEPS 4000u

struct model {
	struct files_world w;
	uint64_t random;
	struct store_class *open[USERS][NAMES];
	unsigned int open_count;
};

static uint64_t draw(struct model *m, uint64_t n)
{
	m->random ^= m->random << 13;
	m->random ^= m->random >> 7;
	m->random ^= m->random << 17;
	return (m->random * UINT64_C(0x2545f4914f6cdd1d) >> 20) % n;
}

static void close_all(struct model *m)
{
	for (unsigned int u = 0; u < USERS; u++) {
		for (unsigned int i = 0; i < NAMES; i++) {
			if (m->open[u][i])
				store_space_let_go(mem_steal(m->open[u][i])->space);
		}
	}
	m->open_count = 0;
}

/* What is open is found; what counts is counted. */
static void judge(const struct model *m)
{
	const struct store *store = m->w.store;
	const struct store_space *space;
	unsigned int spaces = 0, classes = 0, open = 0;

	list_foreach(space, &store->spaces, link) {
		spaces++;
		classes += space->class_count;
		open += space->handles;
		assert_int_equal(space->pinned, 0);
		assert_false(space->going);
	}
	assert_int_equal(spaces, store->space_count);
	assert_int_equal(classes, store->class_count);
	assert_int_equal(open, m->open_count);
	assert_true(spaces <= STORE_SPACES_MAX);
	list_foreach(space, &store->going, link)
		assert_int_equal(space->handles, 0);
}

static void step(struct model *m)
{
	unsigned int u = (unsigned int)draw(m, USERS), i = (unsigned int)draw(m, NAMES);
	struct store_class **open = &m->open[u][i];

	if (draw(m, 500) == 0) {
		close_all(m);
		restart(&m->w);
	} else if (*open) {
		assert_ptr_equal((*open)->space, space_there(&m->w, 1000 + u, i));
		store_space_let_go(mem_steal(*open)->space);
		m->open_count--;
	} else if (m->open_count < 60 && draw(m, 3) == 0) {
		*open = class_open(&m->w, 1000 + u, i);
		assert_non_null(*open);
		m->open_count++;
	} else {
		assert_true(revision_put(&m->w, 1000 + u, i, draw(m, 2)));
		assert_true(revision_is_there(&m->w, 1000 + u, i));
	}
	judge(m);
}

static void spaces_open_survive_random_use(void **state)
{
	struct model *m = calloc(1, sizeof(*m));

	(void)state;
	assert_non_null(m);
	m->random = 0x9e3779b97f4a7c15;
	begin(&m->w, 8);
	for (unsigned int i = 0; i < STEPS; i++)
		step(m);
	assert_true(m->w.store->figures.spaces_evicted > 100);
	close_all(m);
	fw_end(&m->w);
	free(m);
}

/* ---- without memory ---- */

static void eviction_without_one_allocation_loses_nothing(void **state)
{
	struct files_world w;
	bool hit = true;

	(void)state;
	begin(&w, 9);
	for (unsigned int i = 0; i < OF_ONE; i++)
		assert_true(revision_put(&w, 1000, i, true));
	for (unsigned int nth = 1; hit; nth++) {
		struct store_class *class;

		mem_fail_at(nth);
		class = class_open(&w, 1000, OF_ONE + nth);
		hit = mem_count() >= nth;
		mem_fail_at(0);
		if (class)
			store_space_let_go(class->space);
		else
			assert_int_equal(err_last()->code, ERR_NOMEM);
		err_clear();
		mem_fail_at(nth);
		fw_turn(&w); /* the old one leaves, and its description */
		fw_turn(&w);
		hit |= mem_count() >= nth;
		mem_fail_at(0);
		assert_true(revision_put(&w, 1000, OF_ONE + nth, true));
		assert_true(revision_is_there(&w, 1000, OF_ONE + nth));
		assert_false(fw_figures(&w).readonly);
	}
	restart(&w);
	assert_true(w.store->space_count <= OF_ONE);
	fw_end(&w);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(revisions_by_the_thousand_leave_the_newest),
		cmocka_unit_test(start_with_spaces_too_many_keeps_the_newest),
		cmocka_unit_test(space_in_use_stays),
		cmocka_unit_test(kind_in_use_stays),
		cmocka_unit_test(spaces_all_open_are_a_limit),
		cmocka_unit_test(users_keep_their_share),
		cmocka_unit_test(user_unused_for_longest_leaves),
		cmocka_unit_test(user_reconnecting_at_once_counts_once),
		cmocka_unit_test(space_reopened_at_once_is_empty),
		cmocka_unit_test(spaces_open_survive_random_use),
		cmocka_unit_test(eviction_without_one_allocation_loses_nothing),
	};

	log_threshold = getenv("KVD_TEST_LOG") ? LOG_LEVEL_DEBUG : -1;
	cmocka_set_test_filter(getenv("KVD_TEST_FILTER"));
	return cmocka_run_group_tests(tests, NULL, NULL);
}
