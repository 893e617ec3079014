/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The store's parts are made by the product's own functions; what is left out is what
 * rooms do: who fills a part, and who reads it. A move of the world's stands in the
 * store's list of those that wait, asks for the same things as a put or a fetch when it
 * is kicked, and at no other time, so a kick that is missing shows as a move that does
 * not end.
 *
 * Memory that a part is loaded into is poisoned first, so nothing of an earlier load is
 * taken for bytes of the file.
 */
#include "tests/lib/files_world.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "daemon/base/mem.h"
#include "daemon/store/files_class.h"

#define PATIENCE 100000u /* turns */
#define TURN_NS (10 * LOOP_NS_PER_MS)
#define POISON 0xee

static const struct fw_kind_row {
	const char *uid;
	uint32_t first; /* kind: its space's */
	uint32_t unit_bytes, unit;
} kinds[FW_KINDS] = {
	[KIND_A] = {"1000", KIND_A, 256, 0},
	[KIND_A_RANK] = {"1000", KIND_A, 256, 1},
	[KIND_B] = {"1000", KIND_B, 512, 0},
	[KIND_OTHER] = {"1001", KIND_OTHER, 256, 0},
	[KIND_LARGE] = {"1001", KIND_LARGE, 1024, 0},
};

/* ---- content ---- */

uint64_t fw_part_bytes(enum fw_kind kind)
{
	return UINT64_C(1) * kinds[kind].unit_bytes * FW_TOKENS;
}

uint64_t fw_slot_bytes(enum fw_kind kind)
{
	return SEAL_HEADER_BYTES + fw_part_bytes(kind);
}

static uint64_t word_of(uint64_t seed, uint64_t i)
{
	uint64_t x = seed * UINT64_C(0x9e3779b97f4a7c15) + i;

	x ^= x >> 32;
	x *= UINT64_C(0xd6e8feb86659fd93);
	return x ^ x >> 29;
}

void fw_fill(void *memory, enum fw_kind kind, uint32_t id)
{
	uint64_t *words = memory, n = fw_part_bytes(kind) / sizeof(*words);

	for (uint64_t i = 0; i < n; i++)
		words[i] = word_of(id * FW_KINDS + kind + 1, i);
}

bool fw_is(const void *memory, enum fw_kind kind, uint32_t id)
{
	uint64_t n = fw_part_bytes(kind) / sizeof(uint64_t);
	const uint64_t *words = memory;

	for (uint64_t i = 0; i < n; i++) {
		if (words[i] != word_of(id * FW_KINDS + kind + 1, i))
			return false;
	}
	return true;
}

void fw_id(uint32_t id, uint8_t bytes[STORE_ID_BYTES])
{
	for (uint32_t i = 0; i < STORE_ID_BYTES; i += sizeof(uint64_t)) {
		uint64_t word = word_of(~UINT64_C(0), id + i);

		memcpy(bytes + i, &word, sizeof(word));
	}
	memcpy(bytes, &id, sizeof(id));
}

uint32_t fw_id_of(const struct store_chunk *chunk)
{
	uint32_t id;

	memcpy(&id, chunk->id, sizeof(id));
	return id;
}

/* A space is named after its first kind, and its ranks follow that. */
enum fw_kind fw_kind_of(const struct store_class *class)
{
	const struct layout *layout = class->canon->layout;

	return (enum fw_kind)(class->space->model[0] - '0') +
	       layout->views[0].layers[0].fields[0].first_unit;
}

uint32_t fw_tokens(uint32_t id)
{
	return id % 7 == 6 ? FW_TOKENS / 2 : FW_TOKENS;
}

static void canon_of(struct files_world *w, enum fw_kind kind)
{
	uint32_t unit_bytes = kinds[kind].unit_bytes, page = unit_bytes * FW_TOKENS;
	struct layout_field field = {.name = "kv",
				     .page_stride = page,
				     .token_stride = unit_bytes,
				     .unit_stride = unit_bytes,
				     .unit_bytes = unit_bytes,
				     .first_unit = kinds[kind].unit,
				     .units = 1,
				     .total_units = 2,
				     .format = "bf16"};
	struct layout_layer layer = {.field_count = 1, .fields = &field};
	struct layout_view view = {.name = "kv",
				   .page_tokens = FW_TOKENS,
				   .pages = 1,
				   .layer_count = 1,
				   .layers = &layer};
	uint64_t buffer = page;
	struct layout layout = {
		.buffer_count = 1, .buffers = &buffer, .view_count = 1, .views = &view};
	struct canon_args args = {.layout = &layout,
				  .tokens = FW_TOKENS,
				  .memory_bytes = w->config.chunk_memory_bytes};

	assert_int_equal(canon_make(&args, &w->canons[kind]), 0);
	assert_int_equal(w->canons[kind]->slot_bytes, fw_part_bytes(kind));
}

/* ---- life ---- */

void fw_begin(struct files_world *w, const struct fw_args *args)
{
	*w = (struct files_world){.args = *args, .live = mem_live()};
	if (!w->args.memory_slab)
		w->args.memory_slab = 16 * KIB;
	if (!w->args.file_slab)
		w->args.file_slab = 40 * KIB;
	if (!w->args.capacity)
		w->args.capacity = UINT64_C(1) << 40;
	w->config.chunk_memory_bytes = w->args.memory_slab * ARENA_SLABS;
	w->config.chunk_dir_bytes = w->args.file_slab * ARENA_SLABS;
	snprintf(w->config.chunk_dir, sizeof(w->config.chunk_dir), "simulated");
	w->kvd.config = &w->config;
	list_init(&w->moves);
	assert_int_equal(loop_new_virtual(w->args.seed, &w->loop), 0);
	w->kvd.loop = w->loop;
	assert_int_equal(disk_sim_new(w->args.seed, w->args.capacity, &w->sim), 0);
	for (enum fw_kind kind = 0; kind < FW_KINDS; kind++)
		canon_of(w, kind);
	w->memory = mmap(NULL, w->config.chunk_memory_bytes, PROT_READ | PROT_WRITE,
			 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	assert_true(w->memory != MAP_FAILED);
	sm_init(&w->region.sm, &region_table, REGION_READY);
}

void fw_end(struct files_world *w)
{
	if (w->store)
		fw_stop(w);
	disk_sim_free(w->sim);
	for (enum fw_kind kind = 0; kind < FW_KINDS; kind++)
		canon_free(w->canons[kind]);
	assert_true(accounts_idle(&w->kvd.accounts));
	loop_free(w->loop);
	munmap(w->memory, w->config.chunk_memory_bytes);
	assert_int_equal(mem_live(), w->live);
	err_clear();
}

void fw_start(struct files_world *w)
{
	struct disk_args args = {.path = "simulated", .on_open = files_on_open};
	struct store *store;

	assert_null(w->store);
	assert_int_equal(store_make(&w->kvd, &store), 0);
	w->store = w->kvd.part[MODULE_STORE] = store;
	assert_int_equal(files_new(store, w->config.chunk_dir_bytes), 0);
	args.arg = store->files;
	assert_int_equal(disk_sim_open(w->sim, w->loop, &args, &w->disk), 0);
	files_begin(store->files, w->disk);
	if (w->args.memory_slabs)
		arena_limit(store->arena, w->args.memory_slabs);
	if (w->args.file_slabs)
		arena_limit(store->file_arena, w->args.file_slabs);
	store->region = &w->region;
	store->base = w->memory;
	files_on_memory(store->files);
}

void fw_turn(struct files_world *w)
{
	loop_turn(w->loop, TURN_NS);
	assert_int_equal(w->region.pins, w->store ? w->store->files->jobs : 0);
}

void fw_scanned(struct files_world *w)
{
	for (unsigned int i = 0; !w->store->files->scanned; i++) {
		assert_true(i < PATIENCE);
		fw_turn(w);
	}
}

void fw_quiet(struct files_world *w)
{
	for (unsigned int i = 0; w->store->files->jobs; i++) {
		assert_true(i < PATIENCE);
		fw_turn(w);
	}
}

void fw_wait(struct files_world *w, uint64_t ns)
{
	uint64_t until = loop_now_ns(w->loop) + ns;

	while (loop_now_ns(w->loop) < until)
		loop_turn(w->loop, until - loop_now_ns(w->loop));
}

static void moves_end(struct files_world *w)
{
	struct fw_move *move;

	while ((move = list_first(&w->moves, struct fw_move, link)))
		fw_move_end(move);
}

bool fw_close(struct files_world *w)
{
	files_close(w->store->files);
	for (unsigned int i = 0; i < 1000 && !store_drained(w->store); i++)
		loop_turn(w->loop, LOOP_NS_PER_S);
	return store_drained(w->store);
}

static void store_gone(struct files_world *w)
{
	assert_int_equal(w->store->files->jobs, 0);
	assert_int_equal(w->region.pins, 0);
	store_free(w->store);
	w->store = w->kvd.part[MODULE_STORE] = NULL;
	w->disk = NULL;
	assert_false(w->kvd.abandoned);
}

void fw_stop(struct files_world *w)
{
	moves_end(w);
	assert_true(fw_close(w));
	store_gone(w);
}

void fw_power_loss(struct files_world *w)
{
	disk_sim_power_loss(w->sim);
	fw_stop(w);
}

static void end_by_hand(struct disk_op *op)
{
	op->result = err_raise(ERR_IO, "it does not come back");
	err_take(&op->err);
	op->done(op);
}

static void words_end_by_hand(struct files_world *w)
{
	struct idmap_cursor it;

	strmap_foreach(&w->store->files->words, it)
	{
		struct class_words *words = it.value;

		if (words->busy)
			end_by_hand(&words->op);
	}
}

/* In a daemon the kernel takes what is left. */
void fw_abandon(struct files_world *w)
{
	struct files *files = w->store->files;

	moves_end(w);
	assert_int_equal(disk_free(mem_steal(files->disk)), DISK_ABANDONED);
	for (uint64_t i = 0; i <= w->store->bucket_mask; i++) {
		struct store_chunk *chunk = w->store->buckets[i], *next;

		for (; chunk; chunk = next) {
			struct store_part *part;

			next = chunk->next;
			store_chunk_pin(chunk);
			list_foreach_safe(part, &chunk->parts, link) {
				if (part->job && list_empty(&part->job->link))
					end_by_hand(&part->job->op);
			}
			store_chunk_unpin(chunk);
		}
	}
	for (uint32_t i = 0; i < ARENA_SLABS; i++) {
		struct slab_file *slab = &files->slabs[i];

		if (slab->busy)
			end_by_hand(&slab->op);
		if (!list_empty(&slab->syncing))
			end_by_hand(&slab->sync);
	}
	words_end_by_hand(w);
	store_gone(w);
}

struct store_files fw_figures(const struct files_world *w)
{
	struct store_figures figures;

	store_figures(w->store, &figures);
	return figures.files;
}

void fw_fault(struct files_world *w, enum disk_sim_trouble trouble, enum disk_what what,
	      uint64_t count)
{
	const struct disk_sim_fault fault = {
		.trouble = trouble, .what = what, .count = count};

	disk_sim_fault(w->sim, &fault);
}

/* ---- behind its back ---- */

static void on_raw_open(void *arg, struct disk *disk, const struct err *why)
{
	struct files_world *w = arg;

	assert_null(why);
	w->raw = disk;
}

static void on_raw_done(struct disk_op *op)
{
	op->done = NULL;
}

void fw_raw_begin(struct files_world *w)
{
	const struct disk_args args = {
		.path = "simulated", .on_open = on_raw_open, .arg = w};
	struct disk *disk;

	assert_null(w->store);
	assert_int_equal(disk_sim_open(w->sim, w->loop, &args, &disk), 0);
	while (!w->raw)
		fw_turn(w);
}

void fw_raw_end(struct files_world *w)
{
	assert_int_equal(disk_free(mem_steal(w->raw)), 0);
}

int fw_raw(struct files_world *w, struct disk_op *op)
{
	op->done = on_raw_done;
	disk_submit(w->raw, op);
	while (op->done)
		fw_turn(w);
	return op->result;
}

/* ---- chunks ---- */

static int space_of(struct files_world *w, enum fw_kind kind,
		    struct store_space **space_p)
{
	const char model[] = {(char)('0' + kinds[kind].first), 0};
	const struct store_space_args args = {
		.model = model, .revision = "1", .scheme = "sha256", .tokens = FW_TOKENS};
	struct account *account = account_get(&w->kvd.accounts, "uid", kinds[kind].uid);
	struct store_tenant *tenant;
	int r;

	if (!account)
		return err_pass(-ENOMEM);
	r = store_tenant_of(w->store, account, STORE_NOW, &tenant);
	account_unref(account);
	if (r < 0)
		return err_pass(r);
	return err_pass(store_space_of(w->store, tenant, &args, w->canons[kind],
				       STORE_NOW, space_p));
}

int fw_class(struct files_world *w, enum fw_kind kind, struct store_class **class_p)
{
	struct store_space *space;
	int r = space_of(w, kind, &space);

	return r < 0 ? err_pass(r)
		     : err_pass(store_class_get(space, w->canons[kind], STORE_NOW,
						class_p));
}

/* What is not there is not made. */
static struct store_space *space_there(const struct files_world *w, enum fw_kind kind)
{
	struct store_space *space;

	list_foreach(space, &w->store->spaces, link) {
		if (space->model[0] == (char)('0' + kinds[kind].first) &&
		    strcmp(space->tenant->account->name + 4, kinds[kind].uid) == 0)
			return space;
	}
	return NULL;
}

struct store_chunk *fw_chunk(struct files_world *w, enum fw_kind kind, uint32_t id)
{
	const struct store_space *space = space_there(w, kind);
	uint8_t bytes[STORE_ID_BYTES];

	fw_id(id, bytes);
	return space ? store_chunk_find(space, bytes, id) : NULL;
}

struct store_part *fw_part_of(const struct store_chunk *chunk, enum fw_kind kind)
{
	struct store_part *part;

	if (!chunk)
		return NULL;
	list_foreach(part, &chunk->parts, link) {
		if (fw_kind_of(part->class) == kind)
			return part;
	}
	return NULL;
}

struct store_part *fw_part(struct files_world *w, enum fw_kind kind, uint32_t id)
{
	return fw_part_of(fw_chunk(w, kind, id), kind);
}

static uint8_t *memory_of(const struct store_part *part)
{
	return part->chunk->space->store->base + arena_offset(&part->slot);
}

int fw_put_begin(struct files_world *w, enum fw_kind kind, uint32_t id,
		 struct store_part **part_p)
{
	uint8_t bytes[STORE_ID_BYTES];
	struct store_class *class;
	struct store_chunk *chunk;
	int r = fw_class(w, kind, &class);

	fw_id(id, bytes);
	if (r >= 0)
		r = store_chunk_get(class->space, bytes, id, fw_tokens(id), &chunk);
	if (r < 0)
		return err_pass(r);
	if (store_part_find(chunk, class)) {
		store_chunk_unpin(chunk);
		return 1;
	}
	r = store_part_new(chunk, class, PART_FILLING, part_p);
	if (r < 0) {
		store_chunk_unpin(chunk);
		return err_pass(r);
	}
	fw_fill(memory_of(*part_p), kind, id);
	return 0;
}

void fw_put_end(struct store_part *part)
{
	struct store_chunk *chunk = part->chunk;

	store_part_ready(part);
	store_wake(chunk->space->store);
	store_chunk_unpin(chunk);
}

void fw_put_fail(struct store_part *part)
{
	struct store_chunk *chunk = part->chunk;
	struct store *store = chunk->space->store;

	store_part_leave(part);
	store_chunk_unpin(chunk);
	store_wake(store);
}

void fw_put(struct files_world *w, enum fw_kind kind, uint32_t id)
{
	struct store_part *part;

	assert_int_equal(fw_put_begin(w, kind, id, &part), 0);
	fw_put_end(part);
}

/* As an engine of that kind's rank. */
static struct store_handle handle_of(struct files_world *w, enum fw_kind kind)
{
	return (struct store_handle){.space = space_there(w, kind),
				     .canon = w->canons[kind]};
}

void fw_find(struct files_world *w, enum fw_kind kind, uint32_t id)
{
	struct store_handle handle = handle_of(w, kind);
	uint8_t bytes[STORE_ID_BYTES];
	struct store_found found;

	fw_id(id, bytes);
	if (handle.space)
		store_find(&handle, &(struct store_ids){bytes, 1, id}, &found);
}

uint32_t fw_drop(struct files_world *w, enum fw_kind kind, uint32_t id)
{
	struct store_handle handle = handle_of(w, kind);
	uint8_t bytes[STORE_ID_BYTES];

	fw_id(id, bytes);
	return handle.space ? store_drop(&handle, &(struct store_ids){bytes, 1, id}) : 0;
}

bool fw_forget(struct files_world *w, enum fw_kind kind, uint32_t id)
{
	struct store_chunk *chunk = fw_chunk(w, kind, id);

	if (!chunk || chunk->item.pins || list_empty(&chunk->item.slots))
		return false;
	store_on_evict(w->store, &chunk->item);
	return true;
}

bool fw_unfile(struct files_world *w, enum fw_kind kind, uint32_t id)
{
	struct store_chunk *chunk = fw_chunk(w, kind, id);

	if (!chunk || chunk->file_item.pins || list_empty(&chunk->file_item.slots))
		return false;
	store_on_file_evict(w->store, &chunk->file_item);
	return true;
}

/* ---- moves ---- */

static void move_over(struct fw_move *move, enum fw_state state)
{
	struct store_chunk *chunk = mem_steal(move->chunk);

	move->state = state;
	list_remove(&move->wait.link);
	store_chunk_unpin(chunk);
}

/* What store_move.c asks of the files. */
static void move_look(struct fw_move *move)
{
	struct store_part *part = fw_part_of(move->chunk, move->kind);

	if (move->fetch) {
		if (part && part->slot.slab && part->memory != PART_READY)
			return;
		if (part && part->memory == PART_READY &&
		    !fw_is(memory_of(part), move->kind, move->id))
			fail_msg("kind %u id %u: wrong bytes", move->kind, move->id);
		move_over(move,
			  part && part->memory == PART_READY ? MOVE_GOOD : MOVE_NOT);
	} else if (part && part->file == PART_LASTS) {
		move_over(move, MOVE_GOOD);
	} else if (part && part->file == PART_UNFILED && part->slot.slab &&
		   part->memory != PART_READY) {
		return; /* another one fills it */
	} else if (!part || !(part->memory == PART_READY || part->file != PART_UNFILED) ||
		   (!files_write(move->world->store->files, part, true) &&
		    !files_opening(move->world->store->files))) {
		move_over(move, MOVE_NOT);
	}
}

static void on_step(struct loop_defer *defer)
{
	struct fw_move *move = container_of(defer, struct fw_move, step);

	if (move->state == MOVE_WAITS)
		move_look(move);
}

static void on_wake(struct store_waiter *waiter, const struct err *why)
{
	struct fw_move *move = container_of(waiter, struct fw_move, wait);

	(void)why;
	list_push_back(&move->world->store->waiters, &waiter->link);
	loop_defer(move->world->store->kvd->loop, &move->step);
}

static struct fw_move *move_new(struct files_world *w, enum fw_kind kind, uint32_t id,
				bool fetch)
{
	struct store_chunk *chunk = fw_chunk(w, kind, id);
	struct fw_move *move;

	if (!fw_part_of(chunk, kind))
		return NULL;
	move = calloc(1, sizeof(*move));
	assert_non_null(move);
	move->world = w;
	move->kind = kind;
	move->id = id;
	move->fetch = fetch;
	move->chunk = chunk;
	store_chunk_pin(chunk);
	loop_defer_init(&move->step, on_step);
	move->wait.wake = on_wake;
	list_init(&move->wait.link);
	list_push_back(&w->store->waiters, &move->wait.link);
	list_push_back(&w->moves, &move->link);
	return move;
}

struct fw_move *fw_durable(struct files_world *w, enum fw_kind kind, uint32_t id)
{
	struct fw_move *move = move_new(w, kind, id, false);

	if (move)
		move_look(move);
	return move;
}

struct fw_move *fw_fetch(struct files_world *w, enum fw_kind kind, uint32_t id)
{
	struct fw_move *move = move_new(w, kind, id, true);
	struct store_part *part;

	if (!move)
		return NULL;
	part = fw_part_of(move->chunk, kind);
	if (!part->slot.slab) {
		if (store_part_load(part) < 0) {
			err_clear();
			fw_move_end(move);
			return NULL;
		}
		memset(memory_of(part), POISON, fw_part_bytes(kind));
	}
	move_look(move);
	return move;
}

void fw_move_end(struct fw_move *move)
{
	if (move->state == MOVE_WAITS)
		move_over(move, MOVE_NOT);
	loop_defer_cancel(&move->step);
	list_remove(&move->link);
	free(move);
}

enum fw_state fw_await(struct files_world *w, struct fw_move *move)
{
	enum fw_state state;

	for (unsigned int i = 0; move->state == MOVE_WAITS; i++) {
		assert_true(i < PATIENCE);
		fw_turn(w);
	}
	state = move->state;
	fw_move_end(move);
	return state;
}

enum fw_state fw_lasts(struct files_world *w, enum fw_kind kind, uint32_t id)
{
	struct fw_move *move = fw_durable(w, kind, id);

	return move ? fw_await(w, move) : MOVE_NOT;
}

enum fw_state fw_loads(struct files_world *w, enum fw_kind kind, uint32_t id)
{
	struct fw_move *move = fw_fetch(w, kind, id);

	return move ? fw_await(w, move) : MOVE_NOT;
}
