/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Directories that were made on purpose, with sums that fit: headers that lie about
 * classes, sizes and places, descriptions of users, layouts and words that no engine
 * could have, by the thousand; and bytes at random. Nothing of it ends the store, costs
 * more memory than it may, or gives bytes of one chunk for another's.
 *
 * A generator makes descriptions and slots, most of them right, some wrong in one thing.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <xxhash.h>

#include "daemon/base/cursor.h"
#include "daemon/base/hex.h"
#include "daemon/base/log.h"
#include "daemon/base/mem.h"
#include "daemon/store/files_class.h"
#include "tests/lib/disk_sim_impl.h"
#include "tests/lib/files_forge.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define DIRECTORIES 300u
#else
#define DIRECTORIES 2000u
#endif
/* Descriptions of all kinds, as the store itself has written them. */
static void described(struct files_world *w, uint8_t digests[][SEAL_DIGEST_BYTES])
{
	fw_start(w);
	fw_scanned(w);
	for (enum fw_kind kind = 0; kind < FW_KINDS; kind++) {
		fw_put(w, kind, 1);
		assert_int_equal(fw_lasts(w, kind, 1), MOVE_GOOD);
		memcpy(digests[kind], fw_part(w, kind, 1)->class->words->digest,
		       SEAL_DIGEST_BYTES);
	}
	fw_stop(w);
}

static void restarted(struct files_world *w)
{
	fw_raw_end(w);
	fw_start(w);
	fw_scanned(w);
}

/* It goes on working. */
static void works(struct files_world *w)
{
	for (enum fw_kind kind = 0; kind < FW_KINDS; kind++) {
		uint32_t id = 5000 + kind;

		fw_put(w, kind, id);
		assert_int_equal(fw_lasts(w, kind, id), MOVE_GOOD);
		assert_true(fw_forget(w, kind, id));
		assert_int_equal(fw_loads(w, kind, id), MOVE_GOOD);
	}
}

/* ---- headers ---- */

static void header_forged_is_skipped(void **state)
{
	static const struct {
		const char *what;
		uint64_t part_bytes, first;
		uint32_t tokens, slot_kib;
		bool found;
	} rows[] = {
		{"right", 0, 0, FW_TOKENS, 8, true},
		{"right at the end of all numbers", 0, UINT32_MAX, FW_TOKENS, 8, true},
		{"a short one", 0, 0, 1, 8, true},
		{"no tokens", 0, 0, 0, 8, false},
		{"a token too many", 0, 0, FW_TOKENS + 1, 8, false},
		{"tokens of another world", 0, 0, UINT32_MAX, 8, false},
		{"behind all numbers", 0, UINT64_C(1) << 32, FW_TOKENS, 8, false},
		{"far behind", 0, UINT64_MAX, FW_TOKENS, 8, false},
		{"another class's size", 8 * KIB, 0, FW_TOKENS, 8, false},
		{"and its slot", 8 * KIB, 0, FW_TOKENS, 12, false},
		{"one byte", 1, 0, FW_TOKENS, 8, false},
		{"a tebibyte", UINT64_C(1) << 40, 0, FW_TOKENS, 8, false},
		{"in another's slot", 0, 0, FW_TOKENS, 12, false},
		{"in a large one", 0, 0, FW_TOKENS, 40, false},
	};
	uint8_t digests[FW_KINDS][SEAL_DIGEST_BYTES], *data = forge_slot_new();
	struct files_world w;

	(void)state;
	for (unsigned int i = 0; i < ARRAY_LEN(rows); i++) {
		uint64_t slot = rows[i].slot_kib * KIB;
		struct store_space *space;
		struct seal_facts facts;

		fw_begin(&w, &(struct fw_args){.seed = i});
		described(&w, digests);
		facts = forge_facts(KIND_A, 7, digests[KIND_A]);
		facts.first = rows[i].first;
		facts.tokens = rows[i].tokens;
		if (rows[i].part_bytes)
			facts.part_bytes = rows[i].part_bytes;
		memset(data, 0, SLAB);
		fw_fill(data + SEAL_HEADER_BYTES, KIND_A, 7);
		if (facts.part_bytes <= SLAB - SEAL_HEADER_BYTES) {
			seal_make(data, &facts, data + SEAL_HEADER_BYTES);
		} else { /* its sums alone would be too many bytes to read */
			facts.part_bytes = UINT64_C(1) << 30;
			data[0]++;
		}
		fw_raw_begin(&w);
		forge_slab_file(&w, 77, slot, SLAB);
		forge_slot_at(&w, 77, slot, 0, data);
		restarted(&w);
		space = fw_chunk(&w, KIND_A, 1)->space;
		if ((store_chunk_find(space, facts.id, facts.first) != NULL) !=
		    rows[i].found)
			fail_msg("%s: found, or not", rows[i].what);
		works(&w);
		fw_end(&w);
	}
	free(data);
}

/* One chunk in all slots of many files. The one that was written last counts, and the
 * others' slots are free. */
static void chunk_in_many_slots_is_one(void **state)
{
	uint8_t digests[FW_KINDS][SEAL_DIGEST_BYTES], *data = forge_slot_new();
	struct files_world w;
	struct seal_facts facts;

	(void)state;
	fw_begin(&w, &(struct fw_args){.seed = 3});
	described(&w, digests);
	facts = forge_facts(KIND_A, 9, digests[KIND_A]);
	fw_raw_begin(&w);
	for (uint32_t slab = 50; slab < 60; slab++) {
		forge_slab_file(&w, slab, 8 * KIB, SLAB);
		for (uint32_t i = 0; i < 5; i++) {
			bool last = slab == 55 && i == 2;

			/* all but one have something else behind the header */
			facts.generation = last ? 500 : slab * 5 + i;
			fw_fill(data + SEAL_HEADER_BYTES, KIND_A, 9);
			seal_make(data, &facts, data + SEAL_HEADER_BYTES);
			fw_fill(data + SEAL_HEADER_BYTES, KIND_A, last ? 9 : 10);
			forge_slot_at(&w, slab, 8 * KIB, i, data);
		}
	}
	restarted(&w);
	assert_int_equal(fw_loads(&w, KIND_A, 9), MOVE_GOOD);
	fw_quiet(&w);
	assert_true(arena_slabs_used(w.store->file_arena) <= FW_KINDS + 1);
	works(&w);
	fw_end(&w);
	free(data);
}

/* The last generation that there is: what comes behind it is older, and nothing worse. */
static void last_generation_of_all_is_followed_by_the_first(void **state)
{
	uint8_t digests[FW_KINDS][SEAL_DIGEST_BYTES], *data = forge_slot_new();
	struct files_world w;
	struct seal_facts facts;

	(void)state;
	fw_begin(&w, &(struct fw_args){.seed = 3});
	described(&w, digests);
	facts = forge_facts(KIND_A, 9, digests[KIND_A]);
	facts.generation = UINT64_MAX;
	fw_fill(data + SEAL_HEADER_BYTES, KIND_A, 9);
	seal_make(data, &facts, data + SEAL_HEADER_BYTES);
	fw_raw_begin(&w);
	forge_slab_file(&w, 50, 8 * KIB, SLAB);
	forge_slot_at(&w, 50, 8 * KIB, 3, data);
	restarted(&w);
	works(&w);
	assert_int_equal(fw_loads(&w, KIND_A, 9), MOVE_GOOD);
	fw_stop(&w);
	fw_start(&w);
	fw_scanned(&w);
	for (enum fw_kind kind = 0; kind < FW_KINDS; kind++)
		assert_int_equal(fw_loads(&w, kind, 5000 + kind), MOVE_GOOD);
	fw_end(&w);
	free(data);
}

/* A slab has one user: whose header comes first. */
static void slab_of_two_users_belongs_to_the_first(void **state)
{
	uint8_t digests[FW_KINDS][SEAL_DIGEST_BYTES], *data = forge_slot_new();
	struct files_world w;

	(void)state;
	fw_begin(&w, &(struct fw_args){.seed = 3});
	described(&w, digests);
	fw_raw_begin(&w);
	forge_slab_file(&w, 50, 8 * KIB, SLAB);
	for (uint32_t i = 0; i < 5; i++) {
		enum fw_kind kind = i % 2 ? KIND_OTHER : KIND_A;
		struct seal_facts facts = forge_facts(kind, 20 + i, digests[kind]);

		fw_fill(data + SEAL_HEADER_BYTES, kind, 20 + i);
		seal_make(data, &facts, data + SEAL_HEADER_BYTES);
		forge_slot_at(&w, 50, 8 * KIB, i, data);
	}
	restarted(&w);
	for (uint32_t i = 0; i < 5; i++)
		assert_int_equal(fw_loads(&w, i % 2 ? KIND_OTHER : KIND_A, 20 + i),
				 i % 2 ? MOVE_NOT : MOVE_GOOD);
	works(&w);
	fw_end(&w);
	free(data);
}

/* Sectors of two slots of the first file change places, at once. */
static void swap_slots(struct files_world *w, uint64_t slot, uint64_t a, uint64_t b)
{
	const struct disk_op op = {.what = DISK_READ, .file = {.slot_bytes = slot}};
	struct sim_file *file = file_find(w->sim, &op);

	assert_non_null(file);
	for (uint64_t i = 0; i < slot / SECTOR; i++) {
		uint64_t from = a * slot / SECTOR + i, to = b * slot / SECTOR + i;
		uint8_t one[SECTOR], other[SECTOR];

		sector_read(file, from, one);
		sector_read(file, to, other);
		assert_int_equal(sector_write(w->sim, file, from, other), 0);
		assert_int_equal(sector_write(w->sim, file, to, one), 0);
	}
}

/* Whole parts, each with its header, that are not what the store knows to be there. */
static void slot_with_other_part_is_a_miss(void **state)
{
	static const struct {
		enum fw_kind kind;
		uint32_t id;
	} other[] = {{KIND_A, 2}, {KIND_A_RANK, 1}};
	struct files_world w;

	(void)state;
	for (unsigned int i = 0; i < ARRAY_LEN(other); i++) {
		fw_begin(&w, &(struct fw_args){.seed = 3});
		fw_start(&w);
		fw_scanned(&w);
		fw_put(&w, KIND_A, 1);
		fw_put(&w, other[i].kind, other[i].id);
		assert_int_equal(fw_lasts(&w, KIND_A, 1), MOVE_GOOD);
		assert_int_equal(fw_lasts(&w, other[i].kind, other[i].id), MOVE_GOOD);
		fw_forget(&w, KIND_A, 1);
		fw_forget(&w, other[i].kind, other[i].id);
		swap_slots(&w, 8 * KIB, 0, 1);
		assert_int_equal(fw_loads(&w, KIND_A, 1), MOVE_NOT);
		assert_int_equal(fw_loads(&w, other[i].kind, other[i].id), MOVE_NOT);
		assert_int_equal(fw_figures(&w).bad, 2);
		assert_int_equal(fw_figures(&w).faults, 0);
		fw_end(&w);
	}
}

/* ---- descriptions ---- */

/* A layout with one page, and what else the description of a class has. */
static size_t description_of(struct files_world *w, struct description d, uint8_t *data)
{
	struct canon_args args = {.layout = w->canons[KIND_A]->layout,
				  .tokens = FW_TOKENS,
				  .memory_bytes = 4 * KIB};
	struct canon *canon;
	size_t len;

	assert_int_equal(canon_make(&args, &canon), 0);
	if (!d.layout)
		d.layout = canon->layout;
	len = forge_describe(&d, data);
	canon_free(canon);
	return len;
}

static void description_impossible_is_removed(void **state)
{
	static const struct {
		const char *what;
		struct description d;
	} rows[] = {
		{"no user", {.tenant = ""}},
		{"a user without a number", {.tenant = "uid:"}},
		{"a daemon", {.tenant = "peer:decode"}},
		{"a number too long", {.tenant = "uid:12345678901"}},
		{"a line more", {.tenant = "uid:1000\nmodel x"}},
		{"no number", {.tenant = "uid:-1"}},
		{"a bell", {.model = "m\a"}},
		{"a line more", {.revision = "1\nscheme none"}},
		{"an escape", {.scheme = "\033[2J"}},
		{"a delete", {.rope = "\x7f"}},
		{"no model", {.model = ""}},
		{"no scheme", {.scheme = ""}},
		{"another version", {.version = 2}},
		{"no tokens", {.tokens = 0xffffffff}},
		{"too many tokens", {.tokens = CANON_TOKENS_MAX + 16}},
	};
	uint8_t *data = malloc(DESCRIPTION_MOST), digest[SEAL_DIGEST_BYTES];
	struct disk_list list = {0};
	struct disk_op op = {.what = DISK_LIST, .list = &list};
	struct files_world w;

	(void)state;
	assert_non_null(data);
	fw_begin(&w, &(struct fw_args){.seed = 9});
	fw_raw_begin(&w);
	for (unsigned int i = 0; i < ARRAY_LEN(rows); i++) {
		struct description d = forge_right;

		if (rows[i].d.tenant)
			d.tenant = rows[i].d.tenant;
		if (rows[i].d.model)
			d.model = rows[i].d.model;
		if (rows[i].d.revision)
			d.revision = rows[i].d.revision;
		if (rows[i].d.scheme)
			d.scheme = rows[i].d.scheme;
		if (rows[i].d.rope)
			d.rope = rows[i].d.rope;
		if (rows[i].d.version)
			d.version = rows[i].d.version;
		if (rows[i].d.tokens)
			d.tokens = rows[i].d.tokens == 0xffffffff ? 0 : rows[i].d.tokens;
		forge_put(&w, data, description_of(&w, d, data), digest);
	}
	restarted(&w);
	assert_int_equal(w.store->space_count, 0);
	works(&w);
	fw_stop(&w);
	fw_raw_begin(&w);
	assert_int_equal(fw_raw(&w, &op), 0);
	assert_int_equal(list.named_count, FW_KINDS);
	disk_list_fini(&list);
	fw_raw_end(&w);
	fw_end(&w);
	free(data);
}

/* A slot of the class in file 77, whose header may say another format. */
static void put_part(struct files_world *w, const uint8_t *digest, uint32_t format,
		     uint64_t sum_is_off)
{
	struct seal_facts facts = forge_facts(KIND_A, 7, digest);
	uint8_t *data = forge_slot_new();
	uint64_t sum;

	fw_fill(data + SEAL_HEADER_BYTES, KIND_A, 7);
	seal_make(data, &facts, data + SEAL_HEADER_BYTES);
	memcpy(data + 8, &format, sizeof(format)); /* behind the magic */
	sum = XXH3_64bits(data, SEAL_HEADER_BYTES - sizeof(sum)) + sum_is_off;
	memcpy(data + SEAL_HEADER_BYTES - sizeof(sum), &sum, sizeof(sum));
	forge_slab_file(w, 77, 8 * KIB, SLAB);
	forge_slot_at(w, 77, 8 * KIB, 0, data);
	free(data);
}

/* A file of another chunk_dir_size. */
#define STRAY 90u
static bool stray_is_there(struct files_world *w)
{
	struct disk_list list = {0};
	struct disk_op op = {.what = DISK_LIST, .list = &list};
	bool there = false;

	assert_int_equal(fw_raw(w, &op), 0);
	for (size_t i = 0; i < list.slab_count; i++)
		there |= list.slabs[i].file.number == STRAY;
	disk_list_fini(&list);
	return there;
}

/* Of the class that has this digest. */
static bool description_is_there(struct files_world *w, const uint8_t *digest)
{
	struct disk_list list = {0};
	struct disk_op op = {.what = DISK_LIST, .list = &list};
	char name[DISK_NAME_MAX + 1];
	bool there = false;

	class_words_name(digest, name);
	assert_int_equal(fw_raw(w, &op), 0);
	for (size_t i = 0; i < list.named_count; i++)
		there |= strcmp(list.named[i].name, name) == 0;
	disk_list_fini(&list);
	return there;
}

/* What another version of kvd has written is not ours to give up: it stays, start after
 * start, and nothing is written; what this one reads is used. */
static void files_of_another_format_are_kept(void **state)
{
	static const struct {
		const char *what;
		uint32_t description, header;
		uint64_t sum_is_off;
		bool kept;
	} rows[] = {
		{"ours", 1, 3, 0, false},
		{"a description", 2, 3, 0, true},
		{"a description from before", 0, 3, 0, true},
		{"a header", 1, 4, 0, true},
		{"a header from before", 1, 2, 0, true},
		{"both", UINT32_MAX, UINT32_MAX, 0, true},
		{"a header that is torn", 1, 4, 1, false},
	};
	uint8_t digests[FW_KINDS][SEAL_DIGEST_BYTES], digest[SEAL_DIGEST_BYTES];
	uint8_t *data = malloc(DESCRIPTION_MOST);
	struct files_world w;

	(void)state;
	assert_non_null(data);
	for (unsigned int i = 0; i < ARRAY_LEN(rows); i++) {
		struct description d = forge_right;

		print_message("%s\n", rows[i].what);
		fw_begin(&w, &(struct fw_args){.seed = i});
		described(&w, digests);
		fw_raw_begin(&w);
		d.version = rows[i].description;
		forge_put(&w, data, description_of(&w, d, data), digest);
		forge_slab_file(&w, STRAY, 8 * KIB, 8 * KIB);
		put_part(&w, digest, rows[i].header, rows[i].sum_is_off);
		for (uint32_t start = 0; start < 2 && rows[i].kept; start++) {
			restarted(&w);
			assert_true(fw_figures(&w).readonly);
			assert_int_equal(fw_figures(&w).why->code, ERR_VERSION);
			assert_non_null(strstr(fw_figures(&w).why->text, "kept"));
			assert_int_equal(fw_loads(&w, KIND_B, 1), MOVE_GOOD);
			fw_put(&w, KIND_B, 20);
			assert_int_equal(fw_lasts(&w, KIND_B, 20), MOVE_NOT);
			fw_stop(&w);
			fw_raw_begin(&w);
			assert_true(description_is_there(&w, digest));
			assert_true(stray_is_there(&w));
		}
		if (!rows[i].kept) {
			restarted(&w);
			assert_false(fw_figures(&w).readonly);
			works(&w);
			fw_stop(&w);
			fw_raw_begin(&w);
			assert_false(stray_is_there(&w));
		}
		fw_raw_end(&w);
		fw_end(&w);
	}
	free(data);
}

/* The generator makes what the store makes, so the cases above fail for what they say. */
static void description_valid_is_used(void **state)
{
	uint8_t digests[FW_KINDS][SEAL_DIGEST_BYTES], digest[SEAL_DIGEST_BYTES];
	uint8_t *data = malloc(DESCRIPTION_MOST);
	struct files_world w;

	(void)state;
	assert_non_null(data);
	fw_begin(&w, &(struct fw_args){.seed = 9});
	described(&w, digests);
	forge_digest(data, description_of(&w, forge_right, data), digest);
	assert_memory_equal(digest, digests[KIND_A], SEAL_DIGEST_BYTES);
	fw_end(&w);
	free(data);
}

/* The text is compared, too, and not its digest alone: one that says more than the class
 * does is of another writer, and a part that names it is of no class. */
static void description_with_extra_fields_is_ignored(void **state)
{
	uint8_t *data = malloc(DESCRIPTION_MOST), digest[SEAL_DIGEST_BYTES];
	struct files_world w;

	(void)state;
	assert_non_null(data);
	for (size_t more = 0; more < 2; more++) {
		size_t len;

		fw_begin(&w, &(struct fw_args){.seed = 9});
		fw_raw_begin(&w);
		len = description_of(&w, forge_right, data);
		data[len] = 0;
		forge_put(&w, data, len + more, digest);
		put_part(&w, digest, 3, 0);
		restarted(&w);
		assert_int_equal(fw_loads(&w, KIND_A, 7), more ? MOVE_NOT : MOVE_GOOD);
		works(&w);
		fw_stop(&w);
		fw_raw_begin(&w);
		assert_int_equal(description_is_there(&w, digest), !more);
		fw_raw_end(&w);
		fw_end(&w);
	}
	free(data);
}

/* Of users that there are not, by the thousand: they take no spaces from what is stored,
 * and go, for no part names them. */
static void descriptions_ten_thousand_are_read_and_dropped(void **state)
{
	enum { COUNT = 10000 };
	uint8_t *data = malloc(DESCRIPTION_MOST), digest[SEAL_DIGEST_BYTES];
	uint8_t digests[FW_KINDS][SEAL_DIGEST_BYTES];
	struct files_world w;

	(void)state;
	assert_non_null(data);
	fw_begin(&w, &(struct fw_args){.seed = 9});
	disk_sim_delays(w.sim, 100, 1000);
	described(&w, digests);
	fw_raw_begin(&w);
	for (unsigned int i = 0; i < COUNT; i++) {
		char tenant[32], model[32];
		struct description d = forge_right;

		snprintf(tenant, sizeof(tenant), "uid:%u", 2000 + i % 1000);
		snprintf(model, sizeof(model), "model %u", i);
		d.tenant = tenant;
		d.model = model;
		forge_put(&w, data, description_of(&w, d, data), digest);
	}
	restarted(&w);
	for (unsigned int i = 0; i < 3; i++)
		fw_turn(&w);
	assert_int_equal(w.store->space_count, FW_KINDS - 1);
	for (enum fw_kind kind = 0; kind < FW_KINDS; kind++)
		assert_int_equal(fw_loads(&w, kind, 1), MOVE_GOOD);
	works(&w);
	fw_stop(&w);
	fw_raw_begin(&w);
	assert_int_equal(forge_descriptions(&w), FW_KINDS);
	fw_raw_end(&w);
	fw_end(&w);
	free(data);
}

/* More kinds of parts than a space may have: those stay that were written last. */
static void kinds_too_many_leave_by_age(void **state)
{
	uint8_t *data = malloc(DESCRIPTION_MOST), digest[SEAL_DIGEST_BYTES];
	struct canon_args args = {.tokens = FW_TOKENS, .memory_bytes = 4 * KIB};
	const struct store_space *space;
	struct canon *canon;
	struct files_world w;

	(void)state;
	assert_non_null(data);
	fw_begin(&w, &(struct fw_args){.seed = 9});
	args.layout = w.canons[KIND_A]->layout;
	assert_int_equal(canon_make(&args, &canon), 0);
	fw_raw_begin(&w);
	for (unsigned int i = 0; i < STORE_CLASSES_MAX + 6; i++) {
		struct layout_field *field = &canon->layout->views[0].layers[0].fields[0];
		struct description d = forge_right;

		field->first_unit = i;
		field->total_units = 128;
		d.model = "many";
		d.layout = canon->layout;
		forge_put(&w, data, forge_describe(&d, data), digest);
		forge_slot_of(&w, i, digest, 1 + i * 37 % (STORE_CLASSES_MAX + 6));
	}
	canon_free(canon);
	restarted(&w);
	assert_false(fw_figures(&w).readonly);
	space = list_first(&w.store->spaces, struct store_space, link);
	assert_int_equal(space->class_count, STORE_CLASSES_MAX);
	for (unsigned int i = 0; i < STORE_CLASSES_MAX; i++)
		assert_true(space->classes[i]->generation > 6);
	works(&w);
	fw_end(&w);
	free(data);
}

/* As large as a description can be: fields by the thousand, which take ten times as much
 * memory. What is kept is the user's, and has its ceiling. */
static size_t large_description(const char *model, uint32_t layers, uint8_t *data)
{
	struct layout_field field = {.name = "kv",
				     .page_stride = 4 * KIB,
				     .token_stride = 1,
				     .unit_stride = 1,
				     .unit_bytes = 1,
				     .units = 1,
				     .total_units = 1};
	struct layout_view *views = calloc(LAYOUT_VIEWS_MAX, sizeof(*views));
	struct layout_layer *layer = calloc(LAYOUT_LAYERS_MAX, sizeof(*layer));
	uint64_t buffer = LAYOUT_VIEWS_MAX * 4 * KIB;
	struct layout layout = {.buffer_count = 1,
				.buffers = &buffer,
				.view_count = LAYOUT_VIEWS_MAX,
				.views = views};
	struct description d = forge_right;
	size_t len;

	assert_true(views && layer);
	for (uint32_t i = 0; i < LAYOUT_LAYERS_MAX; i++)
		layer[i] = (struct layout_layer){i, 1, &field};
	for (uint32_t i = 0; i < LAYOUT_VIEWS_MAX; i++) {
		snprintf(views[i].name, sizeof(views[i].name), "v%u", i);
		views[i].page_tokens = FW_TOKENS;
		views[i].pages = 1;
		views[i].layer_count = layers;
		views[i].layers = layer;
	}
	d.model = model;
	d.layout = &layout;
	len = forge_describe(&d, data);
	free(views);
	free(layer);
	return len;
}

static void large_descriptions_are_charged_to_their_user(void **state)
{
	enum { COUNT = 40 };
	uint8_t *data = malloc(DESCRIPTION_MOST), digest[SEAL_DIGEST_BYTES];
	struct files_world w;
	uint64_t most = 0;
	size_t len = 0;

	(void)state;
	assert_non_null(data);
	fw_begin(&w, &(struct fw_args){.seed = 9, .memory_slab = MIB});
	w.kvd.accounts.limit = 64 * MIB;
	fw_raw_begin(&w);
	for (unsigned int i = 0; i < COUNT; i++) {
		char model[32];

		snprintf(model, sizeof(model), "model %u", i);
		len = large_description(model, 900, data);
		forge_put(&w, data, len, digest);
		forge_slot_of(&w, i, digest, i); /* of another size */
	}
	assert_true(len > 900 * KIB && len <= DISK_NAMED_BYTES_MAX);
	fw_raw_end(&w);
	fw_start(&w);
	while (!w.store->files->scanned) {
		uint64_t total = w.kvd.accounts.total;

		assert_true(total <= w.kvd.accounts.limit);
		most = total > most ? total : most;
		fw_turn(&w);
	}
	assert_in_range(most, 16 * MIB, 64 * MIB);
	works(&w);
	fw_end(&w);
	free(data);
}

/* ---- at random ---- */

struct forge {
	struct files_world w;
	uint64_t random;
	uint8_t digests[FW_KINDS][SEAL_DIGEST_BYTES];
	uint8_t *data; /* a slab */
	uint8_t *description;
};

static uint64_t draw(struct forge *f, uint64_t n)
{
	f->random ^= f->random << 13;
	f->random ^= f->random >> 7;
	f->random ^= f->random << 17;
	return (f->random * UINT64_C(0x2545f4914f6cdd1d) >> 20) % n;
}

static void scribble(struct forge *f, uint8_t *bytes, size_t len)
{
	for (uint64_t i = 1 + draw(f, 4); i > 0; i--)
		bytes[draw(f, len)] ^= (uint8_t)(1 << draw(f, 8));
}

/* Mostly right; its content is always what its id says, or its sums are wrong. */
static void forge_slot(struct forge *f, uint64_t slot, uint8_t *data)
{
	enum fw_kind kind = (enum fw_kind)draw(f, FW_KINDS);
	uint32_t id = (uint32_t)draw(f, 12);
	struct seal_facts facts = forge_facts(kind, id, f->digests[kind]);

	memset(data, 0, slot);
	if (draw(f, 8) == 0)
		return;
	if (draw(f, 10) == 0) {
		for (uint64_t i = 0; i < slot; i++)
			data[i] = (uint8_t)draw(f, 256);
		return;
	}
	facts.generation = draw(f, 3) ? draw(f, 100) : UINT64_MAX - draw(f, 3);
	if (draw(f, 20) == 0)
		facts.tokens = (uint32_t)draw(f, 2 * FW_TOKENS);
	if (draw(f, 20) == 0)
		facts.first = draw(f, UINT64_C(1) << 33);
	if (draw(f, 20) == 0) {
		enum fw_kind as = (enum fw_kind)draw(f, FW_KINDS);

		memcpy(facts.class_digest, f->digests[as], SEAL_DIGEST_BYTES);
		if (fw_part_bytes(as) == fw_part_bytes(kind))
			kind = as; /* who makes the sums makes the content */
	}
	if (fw_part_bytes(kind) + SEAL_HEADER_BYTES > slot)
		return;
	fw_fill(data + SEAL_HEADER_BYTES, kind, id);
	seal_make(data, &facts, data + SEAL_HEADER_BYTES);
	if (draw(f, 12) == 0)
		scribble(f, data, SEAL_HEADER_BYTES);
	if (draw(f, 12) == 0)
		scribble(f, data + SEAL_HEADER_BYTES, fw_part_bytes(kind));
}

static void forge_slab(struct forge *f, uint32_t number)
{
	static const uint64_t slots[] = {8 * KIB, 8 * KIB, 12 * KIB, 20 * KIB, 40 * KIB,
					 4 * KIB, 5000,	   1,	     1 << 30};
	uint64_t slot = slots[draw(f, draw(f, 3) ? 4 : ARRAY_LEN(slots))];
	uint64_t bytes = draw(f, 10) ? SLAB : DISK_ALIGN * (1 + draw(f, 12));

	uint32_t at = draw(f, 10) ? number : 128 + number;

	forge_slab_file(&f->w, at, slot, bytes);
	for (uint64_t i = 0; slot % DISK_ALIGN == 0 && (i + 1) * slot <= bytes; i++) {
		forge_slot(f, slot, f->data);
		forge_slot_at(&f->w, at, slot, i, f->data);
	}
}

static void forge_description(struct forge *f)
{
	struct description d = forge_right;
	uint8_t digest[SEAL_DIGEST_BYTES];
	char name[DISK_NAME_MAX + 1];
	size_t len;

	if (draw(f, 2))
		d.tenant = draw(f, 2) ? "uid:1001" : "uid:7";
	if (draw(f, 2))
		d.model = draw(f, 2) ? "3" : "other";
	if (draw(f, 4) == 0)
		d.tokens = (uint32_t)(16 << draw(f, 4));
	len = description_of(&f->w, d, f->description);
	if (draw(f, 2))
		scribble(f, f->description, len);
	if (draw(f, 4) == 0)
		len -= draw(f, len);
	forge_digest(f->description, len, digest);
	class_words_name(digest, name);
	if (draw(f, 6) == 0)
		name[6 + draw(f, 32)] = 'A';
	if (draw(f, 6) == 0)
		snprintf(name, sizeof(name), "class-%u", (unsigned int)draw(f, 1000));
	forge_named(&f->w, name, f->description, len);
}

/* What is there is judged; then all goes on. */
static void use(struct forge *f)
{
	for (enum fw_kind kind = 0; kind < FW_KINDS; kind++) {
		for (uint32_t id = 0; id < 12; id++) {
			switch (draw(f, 5)) {
			case 0:
				fw_drop(&f->w, kind, id);
				break;
			case 1:
				fw_lasts(&f->w, kind, id);
				break;
			default:
				fw_loads(&f->w, kind, id);
				break;
			}
		}
	}
	fw_quiet(&f->w);
}

static void forged_directory(struct forge *f, uint64_t seed)
{
	f->random = seed * UINT64_C(0x9e3779b97f4a7c15) + 7;
	fw_begin(&f->w, &(struct fw_args){.seed = seed});
	disk_sim_delays(f->w.sim, 100, 20000);
	described(&f->w, f->digests);
	fw_raw_begin(&f->w);
	for (uint32_t i = 20; i < 20 + 2 + draw(f, 6); i++)
		forge_slab(f, i);
	for (uint64_t i = draw(f, 5); i > 0; i--)
		forge_description(f);
	restarted(&f->w);
	use(f);
	works(&f->w);
	fw_stop(&f->w);
	fw_start(&f->w);
	fw_scanned(&f->w);
	use(f);
	assert_false(fw_figures(&f->w).readonly);
	fw_end(&f->w);
}

static void directories_at_random_do_no_harm(void **state)
{
	const char *seed = getenv("KVD_FILES_SEED");
	struct forge f = {.data = forge_slot_new(),
			  .description = malloc(DESCRIPTION_MOST)};

	(void)state;
	assert_non_null(f.description);
	for (uint64_t i = 1; i <= DIRECTORIES; i++) {
		if (seed)
			i = strtoull(seed, NULL, 10);
		forged_directory(&f, i);
		if (seed)
			break;
	}
	free(f.data);
	free(f.description);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(header_forged_is_skipped),
		cmocka_unit_test(chunk_in_many_slots_is_one),
		cmocka_unit_test(last_generation_of_all_is_followed_by_the_first),
		cmocka_unit_test(slab_of_two_users_belongs_to_the_first),
		cmocka_unit_test(slot_with_other_part_is_a_miss),
		cmocka_unit_test(description_valid_is_used),
		cmocka_unit_test(description_with_extra_fields_is_ignored),
		cmocka_unit_test(description_impossible_is_removed),
		cmocka_unit_test(files_of_another_format_are_kept),
		cmocka_unit_test(descriptions_ten_thousand_are_read_and_dropped),
		cmocka_unit_test(kinds_too_many_leave_by_age),
		cmocka_unit_test(large_descriptions_are_charged_to_their_user),
		cmocka_unit_test(directories_at_random_do_no_harm),
	};

	log_threshold = getenv("KVD_TEST_LOG") ? LOG_LEVEL_DEBUG : -1;
	cmocka_set_test_filter(getenv("KVD_TEST_FILTER"));
	return cmocka_run_group_tests(tests, NULL, NULL);
}
