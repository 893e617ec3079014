/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Chunks from an engine: copied (put), kept in its pages (publish), and the latter
 * removed (withdraw). A put and a publication differ only in the location of a part; the
 * move then has legs that fill it, or none.
 */
#include <string.h>

#include "daemon/base/context.h"
#include "daemon/session/session.h"
#include "daemon/store/files.h"
#include "daemon/store/store_impl.h"

enum { PUT_OVER = 1, PUT_LATER = 2 };

static int put_check(const struct store_handle *handle, const struct store_ids *ids,
		     uint64_t begin, uint64_t end)
{
	uint64_t tokens = handle->space->tokens;
	uint64_t from = store_ids_base(ids) * tokens;
	uint64_t last = from + (ids->count - 1) * tokens;

	if (begin == from && end > last && end <= last + tokens)
		return 0;
	return err_raise(ERR_RANGE,
			 "views: tokens [%llu, %llu) must be those of %u chunks from "
			 "chunk %llu on, [%llu, %llu], of which the last may be short",
			 (unsigned long long)begin, (unsigned long long)end, ids->count,
			 (unsigned long long)store_ids_base(ids),
			 (unsigned long long)from, (unsigned long long)(last + tokens));
}

/* Is the id in the put already? That is an engine's error. */
static bool put_has(const struct store_move *move, const uint8_t *id)
{
	for (uint32_t i = 0; i < move->count; i++) {
		if (memcmp(move->entries[i].chunk->id, id, STORE_ID_BYTES) == 0)
			return true;
	}
	return false;
}

/* Its part, in memory or in the engine's pages; outcomes as put_entry()'s. */
static int put_part(struct store_move *move, struct store_entry *entry)
{
	uint64_t begin = (move->first + move->count - 1) * move->handle->space->tokens;
	int r;

	if (move->kind == STORE_PUBLISH)
		r = store_pages_part(entry->chunk, move->class, &move->maps, begin,
				     begin + entry->tokens, &entry->part);
	else
		r = store_part_try(entry->chunk, move->class, PART_FILLING, &entry->part);
	if (r >= 0 || err_last()->code != ERR_LIMIT)
		return r < 0 ? err_pass(r) : r == ARENA_LATER ? PUT_LATER : 0;
	err_clear();
	return PUT_OVER;
}

/* One chunk of a put. PUT_OVER: there is no space for it, or it has another position.
 * PUT_LATER: there is no space yet. */
static int put_entry(struct store_move *move, const uint8_t *id, uint32_t tokens)
{
	struct store_entry *entry = &move->entries[move->count];
	uint64_t place = move->anywhere ? STORE_ANYWHERE : move->first + move->count;
	int r = store_chunk_get(move->handle->space, id, place, tokens, &entry->chunk);

	if (r < 0 && err_last()->code == ERR_EXIST && !put_has(move, id)) {
		err_clear();
		return PUT_OVER;
	}
	if (r < 0)
		return err_prefix(r, "ids[%u]", move->count);
	entry->tokens = tokens;
	move->count++;
	if (store_part_find(entry->chunk, move->class) ||
	    (move->kind == STORE_PUT &&
	     store_cover_some(move->handle, store_chunk_kept(entry->chunk),
			      &move->covers_left))) {
		entry->done = true;
		move->there++;
		move->done++;
		return 0;
	}
	r = put_part(move, entry);
	if (r == 0)
		return 0;
	move->count--;
	store_chunk_unpin(entry->chunk);
	return r < 0 ? err_pass(r) : r;
}

static bool put_step(struct loop_work *work)
{
	struct store_move *move = container_of(work, struct store_move, taking);
	struct store_entry *entry = &move->entries[move->count];
	uint64_t tokens = move->handle->space->tokens;
	uint64_t from = (move->first + move->count) * tokens;
	uint64_t held = move->end - from < tokens ? move->end - from : tokens;
	uint8_t id[STORE_ID_BYTES];
	int r;

	memcpy(id, entry->id, sizeof(id));
	*entry = (struct store_entry){.chunk = NULL};
	r = put_entry(move, id, (uint32_t)held);
	if (r < 0)
		store_move_fail_last(move);
	if (r == PUT_LATER)
		memcpy(entry->id, id, sizeof(id));
	return r == PUT_LATER || (r == 0 && move->count < move->named);
}

void store_put_taken(struct store_move *move)
{
	loop_work_stop(&move->taking);
	move->left_out = move->named - move->count;
	store_move_begin(move, 0);
	if (move->on_taken)
		move->on_taken(move->arg, move);
}

static void put_done(struct loop_work *work)
{
	store_put_taken(container_of(work, struct store_move, taking));
}

static void put_entries(struct store_move *move, const struct store_ids *ids)
{
	move->named = ids->count;
	move->covers_left = STORE_COVERS_NEW;
	for (uint32_t i = 0; i < ids->count; i++)
		memcpy(move->entries[i].id, ids->bytes + i * STORE_ID_BYTES,
		       STORE_ID_BYTES);
	loop_work_init(&move->taking, move->store->kvd->loop, put_step, put_done);
	loop_work_start(&move->taking);
}

static int put_begin(struct store_handle *handle, const struct store_ids *ids,
		     struct store_move_args *args, struct store_move **move_p)
{
	struct store_move *move;
	uint64_t begin, end;
	int r = store_move_check(handle, args);

	if (r >= 0 &&
	    (ids->count == 0 || (ids->first != STORE_ANYWHERE &&
				 ids->first + ids->count - 1 >= STORE_ANYWHERE)))
		r = err_raise(ERR_RANGE, "ids: %u from chunk %llu on exceed the range",
			      ids->count, (unsigned long long)ids->first);
	if (r >= 0 && args->publish && args->durable)
		r = err_raise(ERR_INVAL, "durable: published chunks are never in a file");
	if (r >= 0 && args->durable && !handle->space->store->files)
		r = err_raise(
			ERR_STATE,
			"durable: this daemon has no files for chunks; set chunk_dir");
	if (r >= 0 && args->durable)
		r = err_prefix(files_writable(handle->space->store->files), "durable");
	if (r >= 0)
		r = store_maps_check(handle, &args->maps, &begin, &end);
	if (r >= 0)
		r = put_check(handle, ids, begin, end);
	if (r >= 0 && args->publish)
		r = store_pages_check(handle, args->pool, &args->maps, begin);
	if (r >= 0)
		r = store_move_new(handle, args->publish ? STORE_PUBLISH : STORE_PUT,
				   ids->count, args, &move);
	if (r < 0)
		return err_pass(r);
	move->durable = args->durable;
	move->first = store_ids_base(ids);
	move->anywhere = ids->first == STORE_ANYWHERE;
	move->begin = begin;
	move->end = end;
	if (!move->class->pool)
		list_push_back(&move->class->waiting, &move->class_wait.link);
	put_entries(move, ids);
	*move_p = move;
	if (!loop_work_running(&move->taking))
		return 0;
	move->on_taken = args->on_taken;
	move->arg = args->arg;
	return 1;
}

int store_put(struct store_handle *handle, const struct store_ids *ids,
	      struct store_move_args *args, struct store_move **move_p)
{
	int r = put_begin(handle, ids, args, move_p);

	store_move_args_fini(args);
	return r < 0 ? err_pass(r) : r;
}

/* The engine's stream has reached its pages: they are complete. False: not all yet. */
bool store_publish_show(struct store_move *move)
{
	while (move->shown < move->count) {
		struct store_entry *entry = &move->entries[move->shown++];

		if (entry->part) {
			entry->done = !entry->chunk->gone;
			if (entry->done) {
				store_part_ready(entry->part);
				move->done++;
			} else { /* dropped meanwhile: it could never be withdrawn */
				store_part_free(entry->part);
				move->left_out++;
			}
			entry->part = NULL;
		}
		if (loop_enough(move->store->kvd->loop))
			break;
	}
	return move->shown == move->count;
}

int store_withdraw(struct store_handle *handle, const struct store_ids *ids,
		   uint64_t grace_ns, struct store_move **move_p)
{
	const struct store_session *part = store_session(handle->session);
	struct store_move_args args = {.pool = NULL};
	struct store_move *move;
	int r = store_move_room(part);

	if (r >= 0)
		r = store_move_new(handle, STORE_WITHDRAW, 0, &args, &move);
	if (r < 0)
		return err_pass(r);
	move->done = store_pages_withdraw(handle, ids, &move->until);
	move->left_out = ids->count - move->done;
	if (!grace_ns)
		store_pages_fail(handle, move->until);
	store_move_begin(move, grace_ns);
	*move_p = move;
	return 0;
}
