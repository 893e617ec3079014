/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A put or a fetch: its chunks in order, cut into subtransfers ("legs") of which a few
 * are in progress at a time. A put makes a chunk's part visible when the leg that fills
 * it has completed. All of its chunks are pinned until it ends, then unpinned from the
 * last to the first, so that no chunk of a prompt is older than those that it depends on.
 *
 * Terminal implies quiesced: no leg is left, the pages are the engine's, and unfilled
 * slots are freed.
 *
 * A hedge (store_hedge.c) is a move that no engine sees: chunks of a late leg, from the
 * other daemon that holds them, to slots of the memory. To publish is to put without
 * legs: the move only waits for the engine's stream. To withdraw has no entries; it waits
 * until the withdrawn pages have no readers (store_pages.c).
 */
#include <assert.h>
#include <errno.h>

#include "daemon/base/context.h"
#include "daemon/base/log.h"
#include "daemon/base/mem.h"
#include "daemon/room/rooms.h"
#include "daemon/session/pool.h"
#include "daemon/session/session.h"
#include "daemon/session/status.h"
#include "daemon/store/far.h"
#include "daemon/store/store_impl.h"

/* Of a leg; the latter two bound the turns in which it starts and ends. */
#define LEG_BYTES (UINT64_C(64) << 20)
#define LEG_CHUNKS 256u
#define LEG_TOKENS 8192u
#define MOVE_LEGS_MAX 8u /* of a move, in progress */
#define MOVES_MAX 4096u	 /* of a session */

const char *const store_kind_names[] = {"put", "fetch", "publish", "withdraw", "hedge"};

static const struct sm_state store_move_states[STORE_MOVE_STATES] = {
	[STORE_MOVE_WAITING] = {"waiting",
				SM_TO(STORE_MOVE_RUNNING) | SM_TO(STORE_MOVE_ABORTING)},
	[STORE_MOVE_RUNNING] = {"running",
				SM_TO(STORE_MOVE_SUCCESS) | SM_TO(STORE_MOVE_ABORTING)},
	[STORE_MOVE_ABORTING] = {"aborting", SM_TO(STORE_MOVE_FAILED)},
	[STORE_MOVE_FAILED] = {"failed", 0},
	[STORE_MOVE_SUCCESS] = {"success", 0},
};

static bool store_move_invariant(const struct sm *sm, unsigned int from)
{
	const struct store_move *move = container_of(sm, struct store_move, sm);

	(void)from;
	return sm_state(sm) < STORE_MOVE_FAILED || move->legs_running == 0;
}

static const struct sm_table store_move_table = {.name = "chunk move",
						 .states = store_move_states,
						 .count = STORE_MOVE_STATES,
						 .invariant = store_move_invariant};

static unsigned int store_move_poll_state(const struct store_move *move)
{
	static const unsigned int poll[STORE_MOVE_STATES] = {
		[STORE_MOVE_WAITING] = KVD_WAITING_FOR_INPUT,
		[STORE_MOVE_RUNNING] = KVD_TRANSFERRING,
		[STORE_MOVE_ABORTING] = KVD_TRANSFERRING,
		[STORE_MOVE_FAILED] = KVD_FAILED,
		[STORE_MOVE_SUCCESS] = KVD_SUCCESS,
	};

	return poll[store_move_state(move)];
}

static void store_move_publish(struct store_move *move)
{
	struct status_page *page = move->session->status;
	unsigned int flags =
		store_move_state(move) == STORE_MOVE_ABORTING ? KVD_FLAG_ABORTING : 0;

	if (move->kind == STORE_HEDGE)
		return;
	status_slot_progress(page, move->slot, move->bytes, move->total);
	status_slot_set(page, move->slot, store_move_poll_state(move), flags,
			move->error.code);
}

/* ---- the end ---- */

/* From the last to the first, some a turn. False: not all yet. */
static bool put_let_go(struct store_move *move)
{
	while (move->kept > 0) {
		struct store_entry *entry = &move->entries[--move->kept];

		if (entry->part && entry->part->memory != PART_READY)
			store_part_leave(entry->part);
		store_chunk_unpin(entry->chunk);
		if (move->kept && loop_enough(move->store->kvd->loop)) {
			store_move_kick(move);
			return false;
		}
	}
	return true;
}

/* Its references to others. */
static void store_move_release(struct store_move *move)
{
	loop_timer_stop(&move->deadline);
	wait_stop(&move->wait);
	wait_spec_fini(&move->spec);
	list_remove(&move->class_wait.link);
	list_remove(&move->part_wait.link);
	list_remove(&move->hedge_link);
	room_maps_fini(&move->maps);
	if (move->kind == STORE_FETCH)
		store_hedge_let_go(move, 0, move->count);
	else
		store_wake(move->store);
	if (move->class)
		move->class->users--;
	if (move->hold)
		store_hold_unref(move->hold);
	move->hold = NULL;
	mem_free(mem_steal(move->entries));
	if (move->pool)
		pool_unuse(move->pool);
	move->pool = NULL;
	store_handle_unref(move->handle);
	move->handle = NULL;
}

static void store_move_free(struct store_move *move)
{
	struct session *session = move->session;
	struct store_session *part = store_session(session);

	assert(!move->legs_running && move->dropped && !move->taking.running);
	if (move->kind != STORE_HEDGE) {
		idmap_remove(&part->moves, move->id);
		status_slot_release(session->status, move->slot);
	}
	loop_defer_cancel(&move->step);
	move->store->moves--;
	charge_drop(&move->charge);
	mem_free(move);
	session_drain_end(session);
}

static uint64_t store_move_prefix(const struct store_move *move)
{
	uint64_t tokens, end = move->first;

	if (!move->entries)
		return move->prefix_tokens;
	tokens = move->handle->space->tokens;
	for (uint32_t i = 0; i < move->count && move->entries[i].done; i++)
		end++;
	end *= tokens;
	if (end > move->end)
		end = move->end;
	return end > move->begin ? end - move->begin : 0;
}

static void store_move_end(struct store_move *move, enum store_move_state to)
{
	if (move->kind != STORE_FETCH && !put_let_go(move))
		return;
	move->prefix_tokens = store_move_prefix(move);
	sm_move(&move->sm, to);
	store_move_release(move);
	move->store->moves_live--;
	store_move_publish(move); /* now the pages are the engine's */
}

void store_move_abort(struct store_move *move, const struct err *why)
{
	struct store_leg *leg;

	assert(why->code != ERR_OK);
	if (store_move_state(move) >= STORE_MOVE_ABORTING)
		return;
	move->error = *why;
	sm_move(&move->sm, STORE_MOVE_ABORTING);
	if (loop_work_running(&move->taking))
		store_put_taken(move);
	list_remove(&move->class_wait.link);
	wait_stop(&move->wait);
	list_foreach(leg, &move->legs, link)
		store_leg_abort(leg, why);
	if (move->kind == STORE_WITHDRAW)
		store_pages_fail(move->handle, move->until);
	store_move_publish(move);
	store_move_kick(move);
}

void store_move_fail_last(struct store_move *move)
{
	struct err why;

	err_take(&why);
	store_move_abort(move, &why);
}

void store_move_drop(struct store_move *move)
{
	struct err why;

	if (move->dropped)
		return;
	move->dropped = true;
	err_set(&why, ERR_ABORTED, "closed by its engine before completion");
	store_move_abort(move, &why);
	store_move_kick(move);
}

static void on_move_deadline(struct loop_timer *timer)
{
	struct store_move *move = container_of(timer, struct store_move, deadline);
	struct err why;

	if (move->kind == STORE_WITHDRAW) { /* the readers' grace is over */
		store_pages_fail(move->handle, move->until);
		return;
	}
	err_set(&why, ERR_TIMEOUT, "deadline: %u of %u chunks were moved in time",
		move->done, move->count);
	store_move_abort(move, &why);
}

/* ---- legs ---- */

uint64_t store_entry_bytes(const struct store_move *move, uint32_t i)
{
	if (move->token_bytes)
		return move->token_bytes * move->entries[i].tokens;
	return move->handle->canon->chunk_bytes * move->entries[i].tokens /
	       move->handle->space->tokens;
}

static bool entry_moves(const struct store_move *move, uint32_t i)
{
	return move->kind == STORE_FETCH ||
	       (move->kind != STORE_PUBLISH && move->entries[i].part);
}

/* Is it being loaded from a file, or by a hedge? */
static bool entry_loads(const struct store_move *move, uint32_t i)
{
	const struct store_chunk *chunk = move->entries[i].chunk;
	const struct store_part *part;

	if (!chunk || move->kind == STORE_HEDGE)
		return false;
	list_foreach(part, &chunk->parts, link) {
		if (part->memory == PART_HEDGING ||
		    (part->memory == PART_FILLING && part->file != PART_UNFILED))
			return true;
	}
	return false;
}

/* A hold of an engine's pages loads no file: once they are withdrawn, it is loaded. Once:
 * a file that cannot be read is not a source. */
static bool entry_brings(struct store_move *move, uint32_t i)
{
	struct store_entry *entry = &move->entries[i];
	struct store_chunk *chunk = entry->chunk;
	uint64_t used;

	if (!chunk || entry->brought || move->kind != STORE_FETCH)
		return false;
	entry->brought = true;
	used = store_cover(move->handle, store_chunk_ready(chunk) | chunk->filed);
	return used && store_chunk_load(chunk, used);
}

static struct store_sources entry_sources(const struct store_move *move, uint32_t i)
{
	const struct store_chunk *chunk = move->entries[i].chunk;
	const struct store_hold *hold = move->hold;
	struct store_sources sources = {.far = NULL};
	uint32_t k;

	if (move->kind == STORE_PUT)
		return sources;
	if (chunk && move->kind == STORE_FETCH)
		sources.used = store_cover(move->handle, store_chunk_ready(chunk));
	if (sources.used || !store_entry_far(move, i) || entry_loads(move, i))
		return sources;
	k = store_entry_place(move, i);
	if (!move->from)
		sources.far = far_hold_at(hold->far, k);
	else if (far_hold_serves(move->from, k))
		sources.far = move->from;
	if (sources.far)
		sources.used = far_hold_sources(sources.far, k);
	return sources;
}

/* For a leg. */
static bool entry_waits(const struct store_move *move, uint32_t i)
{
	return entry_moves(move, i) && !move->entries[i].busy && !move->entries[i].done;
}

/* None of its tokens is selected; within a leg that costs its pages only. */
static bool entry_skips(struct store_move *move, uint32_t i)
{
	struct store_entry *entry = &move->entries[i];
	bool skips = move->token_bytes && !entry->tokens && !entry->busy && !entry->done;

	entry->done |= skips;
	move->done += skips;
	return skips;
}

/* The entries of the next leg start at move->next; *count_p 0: there is none, or none
 * yet. ERR_NOTFOUND: there never will be. */
static int next_leg(struct store_move *move, struct store_sources *sources_p,
		    uint32_t *count_p)
{
	uint32_t most = LEG_TOKENS / move->handle->space->tokens, n = 0;
	uint32_t end = move->cut < move->count ? move->cut : move->count;
	uint64_t bytes = 0;

	most = most == 0 ? 1 : most < LEG_CHUNKS ? most : LEG_CHUNKS;
	*count_p = 0;
	while (move->next < end &&
	       (entry_skips(move, move->next) || !entry_waits(move, move->next)))
		move->next++;
	if (move->next == end)
		return 0;
	*sources_p = entry_sources(move, move->next);
	if (move->kind != STORE_PUT && !sources_p->used &&
	    (entry_loads(move, move->next) || entry_brings(move, move->next)))
		return 0;
	if (move->kind != STORE_PUT && !sources_p->used)
		return err_raise(ERR_NOTFOUND, "chunk %llu of the prompt %s",
				 (unsigned long long)(move->first + move->next),
				 !store_entry_far(move, move->next)
					 ? "is no longer stored"
					 : "is no longer held by any daemon");
	for (uint32_t i = move->next; i < end; i++, n++) {
		struct store_sources other = entry_sources(move, i);

		bytes += store_entry_bytes(move, i);
		if (!entry_waits(move, i) || n == most || (n && bytes > LEG_BYTES) ||
		    other.used != sources_p->used || other.far != sources_p->far)
			break;
	}
	*count_p = n;
	return 0;
}

/* The pool of a class known from files may not exist yet. Outcome 1: all do. */
static int fetch_pools(struct store_move *move, uint64_t used)
{
	const struct store_space *space = move->handle->space;
	int r = 1;

	for (unsigned int i = 0; i < STORE_CLASSES_MAX && r > 0; i++) {
		struct store_class *class = space->classes[i];

		if (!(used >> i & 1))
			continue;
		r = store_class_pool(class);
		if (r != 0)
			continue;
		list_remove(&move->class_wait.link);
		list_push_back(&class->waiting, &move->class_wait.link);
	}
	return err_pass(r);
}

static int store_move_run(struct store_move *move)
{
	while (move->legs_running < MOVE_LEGS_MAX) {
		struct store_sources sources;
		uint32_t n;
		int r = next_leg(move, &sources, &n);

		if (r < 0 || n == 0)
			return r < 0 ? err_pass(r) : 0;
		r = sources.far ? 1 : fetch_pools(move, sources.used);
		if (r <= 0)
			return err_pass(r);
		r = store_leg_start(move, move->next, n, &sources);
		if (r < 0)
			return err_pass(r);
		for (; n > 0; n--)
			move->entries[move->next++].busy = true;
		move->legs_running++;
		if (loop_enough(move->store->kvd->loop)) {
			store_move_kick(move);
			break;
		}
	}
	return 0;
}

/* Chunks from this one on have no source any more. A fetch is of use up to there: it
 * fails when the chunks before it have been moved. */
static void move_cut(struct store_move *move, uint32_t first, const struct err *why)
{
	struct store_leg *leg;

	if (move->kind != STORE_FETCH || first == 0) {
		store_move_abort(move, why);
		return;
	}
	move->cut = first;
	move->cut_error = *why;
	if (move->next > first)
		move->next = first;
	list_foreach(leg, &move->legs, link) { /* at most 8: MOVE_LEGS_MAX */
		if (leg->first >= first)
			store_leg_abort(leg, why);
	}
}

/* Its holder has failed, or is slower than another: that one continues. So do the rest of
 * the chunks where an engine has withdrawn pages. */
static void leg_failed(struct store_move *move, const struct store_leg *leg)
{
	bool running = store_move_state(move) == STORE_MOVE_RUNNING;
	/* a leg that was ended here proves nothing about the holder */
	bool failed = leg->far && running && !leg->beaten;

	if (leg->first >= move->cut)
		return;
	if (leg->beaten)
		far_hold_late(leg->far);
	if (leg->beaten || (failed && leg->error.code == ERR_TIMEOUT))
		far_late(move->store->far, far_hold_remote(leg->far),
			 leg->beaten ? "another daemon's chunks arrived first"
				     : leg->error.text);
	if (failed && move->kind == STORE_FETCH)
		far_hold_fail(leg->far);
	if (!running || !(leg->left || leg->beaten ||
			  (failed && move->kind == STORE_FETCH &&
			   (entry_sources(move, leg->first).used ||
			    entry_loads(move, leg->first))))) {
		move_cut(move, leg->first, &leg->error);
		return;
	}
	if (failed)
		log_info("store", far_hold_remote(leg->far)->peer->endpoint,
			 "its chunks are fetched from another daemon", "why=\"%s\"",
			 leg->error.text);
	if (leg->first < move->next)
		move->next = leg->first;
	move->store->figures.remote.retries += failed;
	move->store->figures.remote.hedges_won += leg->beaten;
}

void store_move_leg_ended(struct store_move *move, const struct store_leg *leg)
{
	struct store *store = move->store;
	bool ok = leg->error.code == ERR_OK;

	assert(move->legs_running > 0);
	move->legs_running--;
	for (uint32_t i = leg->first; i < leg->first + leg->count; i++) {
		move->entries[i].busy = false;
		move->entries[i].done = ok;
		move->done += ok;
		if (ok && move->kind != STORE_FETCH)
			store_part_ready(move->entries[i].part);
	}
	if (!ok) {
		leg_failed(move, leg);
	} else {
		move->bytes += leg->bytes;
		if (move->kind == STORE_PUT)
			store->figures.put_bytes += leg->bytes;
		else if (move->kind == STORE_FETCH)
			store->figures.fetched_bytes += leg->bytes;
		if (leg->far) {
			store->figures.remote.bytes += leg->bytes;
			far_serves(store->far, far_hold_remote(leg->far));
		}
		if (move->kind != STORE_FETCH)
			store_wake(store); /* those that wait for the same chunk */
		if (leg->hedged)
			store_hedge_let_go(move, leg->first, leg->count);
		if (move->kind != STORE_HEDGE)
			status_slot_progress(move->session->status, move->slot,
					     move->bytes, move->total);
	}
	store_move_kick(move);
}

/* ---- steps ---- */

static void on_move_wait(struct wait *wait)
{
	struct store_move *move = container_of(wait, struct store_move, wait);

	move->wait_over = true;
	store_move_kick(move);
}

static void on_class_made(struct store_waiter *waiter, const struct err *why)
{
	struct store_move *move = container_of(waiter, struct store_move, class_wait);

	if (why)
		store_move_abort(move, why);
	else
		store_move_kick(move);
}

static void on_part(struct store_waiter *waiter, const struct err *why)
{
	struct store_move *move = container_of(waiter, struct store_move, part_wait);

	(void)why;
	store_move_park(move); /* for the next part, until it ends */
	store_move_kick(move);
}

/* May it continue? */
static bool store_move_await(struct store_move *move)
{
	if (!move->wait_over && !move->wait.armed) {
		move->wait_over = wait_passed(&move->spec);
		if (!move->wait_over)
			wait_start(rooms_waits(rooms_of(move->store->kvd)), &move->wait,
				   &move->spec, on_move_wait);
	}
	return move->wait_over && (!move->class || move->class->pool);
}

void store_move_park(struct store_move *move)
{
	list_remove(&move->part_wait.link);
	list_push_back(&move->store->waiters, &move->part_wait.link);
}

/* It touches nothing of its engine's. */
static bool store_move_still(const struct store_move *move)
{
	return move->legs_running == 0 && !(move->kind == STORE_WITHDRAW &&
					    store_pages_read(move->handle, move->until));
}

/* All is moved; only files, or readers, are pending. */
static int store_move_close_up(struct store_move *move)
{
	int r = 0;

	if (move->legs_running)
		return 0;
	if (move->next == move->cut) {
		store_move_abort(move, &move->cut_error);
		return 0;
	}
	if (store_move_still(move) && move->next == move->count)
		r = store_move_lasts(move);
	if (r == 0)
		store_move_park(move);
	move->letting_go = r > 0;
	return r < 0 ? err_pass(r) : 0;
}

static bool store_move_runs(const struct store_move *move)
{
	return store_move_state(move) == STORE_MOVE_RUNNING && !move->letting_go;
}

static void on_move_step(struct loop_defer *defer)
{
	struct store_move *move = container_of(defer, struct store_move, step);
	struct err why;
	int r = 0;

	if (loop_work_running(&move->taking))
		return;
	if (store_move_state(move) == STORE_MOVE_WAITING && store_move_await(move)) {
		sm_move(&move->sm, STORE_MOVE_RUNNING);
		store_move_publish(move);
	}
	if (store_move_state(move) == STORE_MOVE_RUNNING && move->kind == STORE_PUBLISH &&
	    !store_publish_show(move)) {
		store_move_kick(move);
		return;
	}
	if (store_move_runs(move)) {
		store_hedge_overtakes(move);
		if (store_move_run(move) < 0) {
			err_take(&why);
			move_cut(move, move->next, &why);
		}
	}
	if (store_move_runs(move))
		r = store_move_close_up(move);
	if (r < 0)
		store_move_fail_last(move);
	if (store_move_state(move) == STORE_MOVE_RUNNING && move->letting_go)
		store_move_end(move, STORE_MOVE_SUCCESS);
	if (store_move_state(move) == STORE_MOVE_ABORTING) {
		if (store_move_still(move))
			store_move_end(move, STORE_MOVE_FAILED);
		else if (move->kind == STORE_WITHDRAW)
			store_move_park(move);
	}
	if (store_move_state(move) >= STORE_MOVE_FAILED && move->dropped)
		store_move_free(move);
}

/* ---- the beginning ---- */

static int store_move_slot(struct store_move *move, const struct store_move_args *args)
{
	move->slot = args->slot;
	move->slot_gen = args->slot_gen;
	if (args->slotted)
		return 0;
	return err_pass(status_slot_take(move->session->status, move->id, &move->slot,
					 &move->slot_gen));
}

/* Last, because a new class stays as long as the handle. */
static int store_move_class(struct store_move *move, struct store_handle *handle,
			    const struct store_move_args *args)
{
	int r = args->publish ? store_class_published(handle->space, handle->canon,
						      args->pool, &move->class)
			      : store_class_of(handle, &move->class);

	if (r < 0 && !args->slotted)
		status_slot_release(move->session->status, move->slot);
	return err_pass(r);
}

int store_move_room(const struct store_session *part)
{
	if (idmap_count(&part->moves) < MOVES_MAX)
		return 0;
	return err_raise(ERR_LIMIT, "%u moves: limit of a session", MOVES_MAX);
}

int store_move_check(struct store_handle *handle, const struct store_move_args *args)
{
	struct session *session = handle->session;
	const struct store_session *part = store_session(session);
	int r = store_ready(store_of(session->kvd));

	if (r >= 0 && session->kvd->draining)
		r = err_raise(ERR_DRAIN, "no new moves: the daemon is draining");
	if (r >= 0 && (args->pool->closing || args->pool->session != session))
		r = err_raise(ERR_STATE, "pool %llu is being unregistered",
			      (unsigned long long)args->pool->id);
	if (r >= 0)
		r = store_move_room(part);
	return r < 0 ? err_pass(r) : err_pass(store_handle_fits(handle, args->pool));
}

/* The engine sees it. */
static int store_move_enter(struct store_move *move, struct store_handle *handle,
			    const struct store_move_args *args)
{
	struct store_session *part = store_session(move->session);
	int r = idmap_put(&part->moves, move->id, move);

	if (r < 0)
		return err_pass(r);
	r = store_move_slot(move, args);
	if (r >= 0 && (move->kind == STORE_PUT || move->kind == STORE_PUBLISH))
		r = store_move_class(move, handle, args);
	if (r < 0)
		idmap_remove(&part->moves, move->id);
	return err_pass(r);
}

int store_move_new(struct store_handle *handle, enum store_kind kind, uint32_t count,
		   struct store_move_args *args, struct store_move **move_p)
{
	struct session *session = handle->session;
	struct store *store = handle->space->store;
	struct store_move *move = mem_zalloc(sizeof(*move));
	int r;

	if (!move)
		return err_pass(-ENOMEM);
	move->entries = mem_calloc(count + 1, sizeof(*move->entries));
	r = move->entries ? charge_take(&move->charge, session->account, ACCOUNT_CHUNKS,
					sizeof(*move) + count * sizeof(*move->entries))
			  : -ENOMEM;
	move->kind = kind;
	move->session = session;
	if (kind != STORE_HEDGE)
		move->id = args->slotted ? args->id : ++session->next_id;
	if (r >= 0)
		r = kind == STORE_HEDGE ? store_class_of(handle, &move->class)
					: store_move_enter(move, handle, args);
	if (r < 0) {
		charge_drop(&move->charge);
		mem_free(move->entries);
		mem_free(move);
		return err_pass(r);
	}
	move->store = store;
	move->handle = store_handle_ref(handle);
	if (move->class)
		move->class->users++;
	move->pool = args->pool;
	if (move->pool)
		pool_use(move->pool);
	move->maps = room_maps_steal(&args->maps);
	move->spec = args->wait;
	args->wait = (struct wait_spec){0};
	move->cut = UINT32_MAX;
	sm_init(&move->sm, &store_move_table, STORE_MOVE_WAITING);
	list_init(&move->class_wait.link);
	move->class_wait.wake = on_class_made;
	list_init(&move->part_wait.link);
	move->part_wait.wake = on_part;
	list_init(&move->hedge_link);
	list_init(&move->legs);
	loop_defer_init(&move->step, on_move_step);
	loop_timer_init(&move->deadline, store->kvd->loop, on_move_deadline);
	store->moves++;
	store->moves_live++;
	session_drain_begin(session);
	*move_p = move;
	return 0;
}

void store_move_args_fini(struct store_move_args *args)
{
	room_maps_fini(&args->maps);
	wait_spec_fini(&args->wait);
}

void store_move_begin(struct store_move *move, uint64_t deadline_ns)
{
	for (uint32_t i = 0; i < move->count; i++) {
		if (entry_moves(move, i))
			move->total += store_entry_bytes(move, i);
	}
	move->kept = move->kind == STORE_FETCH ? 0 : move->count;
	if (deadline_ns)
		loop_timer_start(&move->deadline, deadline_ns);
	store_move_publish(move);
	store_move_kick(move);
}

/* Entries count their selected tokens, in the layers that move. */
static void fetch_select(struct store_move *move, const struct room_map *map)
{
	const struct layout_view *view =
		layout_view_find(move->handle->canon->layout, map->view);
	uint64_t tokens = move->handle->space->tokens;
	size_t from = 0;

	move->token_bytes = room_map_token_bytes(map, view);
	for (uint32_t i = 0; i < move->count; i++) { /* at most 4096: of a hold */
		size_t to = room_map_select_from(map, (move->first + i + 1) * tokens);

		move->entries[i].tokens = (uint32_t)(to - from);
		from = to;
	}
}

static int fetch_begin(struct store_hold *hold, struct store_move_args *args,
		       struct store_move **move_p)
{
	struct store_handle *handle = hold->handle;
	uint64_t tokens = handle->space->tokens, from = hold->first * tokens;
	uint64_t held = hold->tokens;
	struct store_move *move;
	uint64_t begin, end;
	uint32_t skip, count;
	int r = store_hold_check(hold);

	if (r >= 0)
		r = store_move_check(handle, args);
	if (r >= 0)
		r = store_maps_check(handle, &args->maps, &begin, &end);
	if (r >= 0 && (begin < from || end > from + held))
		r = err_raise(ERR_RANGE,
			      "views: tokens [%llu, %llu) exceed the hold's [%llu, %llu)",
			      (unsigned long long)begin, (unsigned long long)end,
			      (unsigned long long)from,
			      (unsigned long long)(from + held));
	if (r < 0)
		return err_pass(r);
	skip = (uint32_t)((begin - from) / tokens);
	count = (uint32_t)((end - from + tokens - 1) / tokens) - skip;
	r = store_move_new(handle, STORE_FETCH, count, args, &move);
	if (r < 0)
		return err_pass(r);
	move->hold = hold;
	store_hold_ref(hold);
	move->first = hold->first + skip;
	move->begin = begin;
	move->end = end;
	move->count = count;
	for (uint32_t i = 0; i < count; i++) {
		uint32_t k = skip + i; /* in the hold */
		uint64_t left = held - k * tokens;

		move->entries[i].chunk = hold->chunks[k];
		move->entries[i].tokens = (uint32_t)(left < tokens ? left : tokens);
	}
	if (move->maps.maps[0].select)
		fetch_select(move, &move->maps.maps[0]);
	store_move_begin(move, args->deadline_ns);
	*move_p = move;
	return 0;
}

int store_fetch(struct store_hold *hold, struct store_move_args *args,
		struct store_move **move_p)
{
	int r = fetch_begin(hold, args, move_p);

	store_move_args_fini(args);
	return r < 0 ? err_pass(r) : 0;
}

/* ---- look-ups ---- */

struct store_move *store_move_find(struct session *session, uint64_t id)
{
	const struct store_session *part = store_session(session);
	struct store_move *move = part ? idmap_get(&part->moves, id) : NULL;

	return session_found(move && !move->dropped ? move : NULL, "move", id);
}

bool store_has(const struct session *session, uint64_t id)
{
	const struct store_session *part = store_session(session);

	return part && (idmap_get(&part->moves, id) || idmap_get(&part->holds, id));
}

void store_move_facts(const struct store_move *move, struct store_move_facts *facts_p)
{
	*facts_p = (struct store_move_facts){
		.id = move->id,
		.bytes = move->bytes,
		.total = move->total,
		.kind = move->kind,
		.state = store_move_state(move),
		.error = &move->error,
		.chunks = move->kind == STORE_WITHDRAW ? move->done : move->count,
		.there = move->there,
		.left_out = move->left_out,
		.done = move->done,
		.prefix_tokens = store_move_prefix(move),
		.slot = move->slot,
		.slot_gen = move->slot_gen,
		.poll_state = store_move_poll_state(move),
	};
}
