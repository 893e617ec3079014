/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Only a hold keeps chunks from eviction. It belongs to a session and ends with it, with
 * its lease or when it is closed, whichever is first; then reads in progress continue,
 * and no new ones start. Any session with its secret may hold the same chunks: a
 * scheduler finds and holds, its workers join and fetch.
 *
 * A user's holds pin at most half of its share of the memory, so that puts of others, and
 * its own, always find evictable chunks.
 */
#include <assert.h>
#include <errno.h>
#include <string.h>

#include "daemon/base/context.h"
#include "daemon/base/mem.h"
#include "daemon/session/session.h"
#include "daemon/store/far.h"
#include "daemon/store/store_impl.h"

#define HOLDS_MAX 4096u /* of a session */

void store_hold_ref(struct store_hold *hold)
{
	hold->moves++;
}

int store_lease_over(void)
{
	return err_raise(ERR_LEASE, "the hold's lease has expired");
}

/* The ids for queries to others. */
static int hold_note_far(struct store_hold *hold, const uint8_t *ids, uint32_t count)
{
	uint64_t bytes = (uint64_t)count * STORE_ID_BYTES;
	int r = charge_take(&hold->far_charge, hold->handle->session->account,
			    ACCOUNT_CHUNKS, bytes);

	if (r < 0)
		return err_pass(r);
	hold->far_ids = mem_dup(ids, bytes);
	if (hold->far_ids)
		return 0;
	charge_drop(&hold->far_charge);
	return err_pass(-ENOMEM);
}

static void hold_forget_far(struct store_hold *hold)
{
	mem_free(mem_steal(hold->far_ids));
	charge_drop(&hold->far_charge);
}

static void hold_let_go(struct store_hold *hold)
{
	store_pins_end(hold->handle->space->store, hold->chunks, hold->count);
	hold->chunks = NULL;
	hold->count = 0;
	far_hold_free(hold->far);
	hold->far = NULL;
	hold_forget_far(hold);
}

static void hold_step(struct store_hold *hold)
{
	if (hold->moves || !(hold->closed || hold->over))
		return;
	hold_let_go(hold);
	if (!hold->closed)
		return;
	charge_drop(&hold->charge);
	store_handle_unref(hold->handle);
	mem_free(hold);
}

void store_hold_unref(struct store_hold *hold)
{
	assert(hold->moves > 0);
	hold->moves--;
	hold_step(hold);
}

static void on_lease(struct loop_timer *timer)
{
	struct store_hold *hold = container_of(timer, struct store_hold, lease);

	hold->over = true;
	hold_step(hold);
}

void store_hold_close(struct store_hold *hold)
{
	struct store_session *part = store_session(hold->handle->session);
	struct store *store = hold->handle->space->store;
	struct err why;

	if (hold->closed)
		return;
	hold->closed = true;
	if (hold->query || loop_work_running(&hold->adding)) {
		if (hold->query)
			far_cancel(hold->query);
		hold->query = NULL;
		loop_work_stop(&hold->adding);
		err_set(&why, ERR_CANCELED, "the hold was closed before the reply");
		hold->on_done(hold->arg, hold, &why);
	}
	loop_timer_stop(&hold->lease);
	idmap_remove(&part->holds, hold->id);
	strmap_remove_bytes(&store->holds, hold->secret, STORE_SECRET_BYTES);
	hold_step(hold);
}

struct store_hold *store_hold_find(struct session *session, uint64_t id)
{
	const struct store_session *part = store_session(session);
	struct store_hold *hold = part ? idmap_get(&part->holds, id) : NULL;

	if (!hold)
		err_raise(ERR_NOTFOUND, "hold: %llu is unknown in this session",
			  (unsigned long long)id);
	return hold;
}

void store_hold_facts(const struct store_hold *hold, struct store_hold_facts *facts_p)
{
	*facts_p = (struct store_hold_facts){
		.id = hold->id,
		.first = hold->first,
		.secret = hold->secret,
		.found = {.remote = far_hold_chunks(hold->far),
			  .pages = hold->in_pages,
			  .chunks = hold->count + far_hold_chunks(hold->far),
			  .tokens = hold->tokens + far_hold_tokens(hold->far)},
	};
}

/* The classes that serve the handle's need of the chunk: in memory, in engines' pages, or
 * being loaded from a file. 0: none. */
static uint64_t hold_bring(struct store_handle *handle, struct store_chunk *chunk,
			   unsigned int *covers_left)
{
	uint64_t used = store_cover_some(handle, store_chunk_ready(chunk), covers_left);

	if (used)
		return used;
	used = store_cover_some(handle, store_chunk_ready(chunk) | chunk->filed,
				covers_left);
	return store_chunk_load(chunk, used) ? used : 0;
}

/* Chunks of a hold in order: those that serve, without a gap. */
static bool hold_add(struct store_hold *hold, struct store_chunk *chunk,
		     unsigned int *covers_left)
{
	const struct store_space *space = hold->handle->space;
	uint64_t used;

	if (!chunk)
		return false;
	store_chunk_pin(chunk);
	used = hold_bring(hold->handle, chunk, covers_left);
	if (!used) {
		store_chunk_unpin(chunk);
		return false;
	}
	hold->chunks[hold->count++] = chunk;
	hold->in_pages += (used & space->published) != 0;
	hold->tokens += chunk->tokens;
	return chunk->tokens == space->tokens; /* nothing follows a short one */
}

static int hold_check(const struct store_handle *handle, uint32_t count)
{
	const struct store_tenant *tenant = handle->space->tenant;
	uint64_t share = arena_owner_share(tenant->owner);
	uint64_t pinned = arena_owner_pinned(tenant->owner);

	if (count && pinned > share / 2)
		return err_raise(
			ERR_LIMIT,
			"chunks: %s would hold or use %llu bytes (limit: %llu, half of "
			"its share of chunk_memory); release holds",
			tenant->account->name, (unsigned long long)pinned,
			(unsigned long long)share / 2);
	return 0;
}

static bool add_step(struct loop_work *work);
static void add_done(struct loop_work *work);

/* Of so many chunks here, at most. */
static int hold_new(struct store_handle *handle, uint32_t most,
		    struct store_hold **hold_p)
{
	const struct store_session *part = store_session(handle->session);
	struct store_hold *hold;
	int r;

	if (idmap_count(&part->holds) >= HOLDS_MAX)
		return err_raise(ERR_LIMIT, "%u holds: limit of a session", HOLDS_MAX);
	hold = mem_zalloc(sizeof(*hold));
	if (!hold)
		return err_pass(-ENOMEM);
	hold->handle = handle;
	hold->chunks = store_pins_new(most);
	r = hold->chunks
		    ? charge_take(&hold->charge, handle->session->account, ACCOUNT_CHUNKS,
				  sizeof(*hold) + most * sizeof(*hold->chunks))
		    : -ENOMEM;
	if (r < 0) {
		store_pins_end(handle->space->store, hold->chunks, 0);
		mem_free(hold);
		return err_pass(r);
	}
	hold->covers_left = STORE_COVERS_NEW;
	loop_timer_init(&hold->lease, handle->space->store->kvd->loop, on_lease);
	loop_work_init(&hold->adding, handle->space->store->kvd->loop, add_step,
		       add_done);
	store_handle_ref(handle);
	*hold_p = hold;
	return 0;
}

/* The session's from here on. */
static int hold_enter(struct store_hold *hold, const struct store_hold_args *args)
{
	struct session *session = hold->handle->session;
	struct store_session *part = store_session(session);
	struct store *store = hold->handle->space->store;
	int r;

	hold->on_done = args->on_done;
	hold->arg = args->arg;
	hold->lease_ns = args->lease_ns;
	hold->far_ns = args->far_ns;
	hold->id = args->id ? args->id : ++session->next_id;
	if (args->secret)
		memcpy(hold->secret, args->secret, STORE_SECRET_BYTES);
	else
		loop_random(store->kvd->loop, hold->secret, STORE_SECRET_BYTES);
	r = strmap_put_bytes(&store->holds, hold->secret, STORE_SECRET_BYTES, hold);
	if (r >= 0) {
		r = idmap_put(&part->holds, hold->id, hold);
		if (r < 0)
			strmap_remove_bytes(&store->holds, hold->secret,
					    STORE_SECRET_BYTES);
	}
	if (r < 0) {
		hold->closed = true;
		hold_step(hold);
	}
	return err_pass(r);
}

/* It has its chunks. */
static int hold_begin(struct store_hold *hold)
{
	int r = hold_check(hold->handle, hold->count);

	if (r < 0)
		store_hold_close(hold);
	else
		loop_timer_start(&hold->lease, hold->lease_ns);
	return err_pass(r);
}

static void on_far_done(void *arg)
{
	struct store_hold *hold = arg;

	hold->query = NULL;
	if (!hold->far)
		hold_forget_far(hold);
	loop_timer_start(&hold->lease, hold->lease_ns);
	hold->handle->space->store->far_found += far_hold_chunks(hold->far);
	hold->on_done(hold->arg, hold, NULL);
}

/* Other daemons are queried for the chunks after its own. */
static int hold_note_rest(struct store_hold *hold, uint32_t rest)
{
	const uint8_t *ids = hold->ids.bytes + hold->count * STORE_ID_BYTES;

	if (!hold->far_ids)
		return err_pass(hold_note_far(hold, ids, rest));
	memmove(hold->far_ids, ids, (size_t)rest * STORE_ID_BYTES);
	return 0;
}

/* Others may have the following chunks. Outcome 1: they are queried. */
static int hold_ask(struct store_hold *hold)
{
	const struct store_space *space = hold->handle->space;
	uint32_t rest = hold->ids.count - hold->count;
	int r;

	if (!hold->far_ns || !space->store->far || rest == 0 ||
	    hold->tokens % space->tokens) {
		hold_forget_far(hold);
		return 0;
	}
	r = hold_note_rest(hold, rest);
	if (r >= 0)
		r = far_ask(space->store->far, hold, rest, hold->lease_ns, hold->far_ns,
			    on_far_done, hold, &hold->query);
	if (r < 0) {
		hold_forget_far(hold);
		err_clear(); /* a miss */
		return 0;
	}
	loop_timer_stop(&hold->lease); /* it starts with the reply */
	return 1;
}

static int hold_added(struct store_hold *hold)
{
	struct store *store = hold->handle->space->store;
	int r = hold_begin(hold);

	if (r < 0)
		return err_pass(r);
	store->found += hold->count;
	store->missed += hold->ids.count - hold->count;
	r = hold_ask(hold);
	hold->ids.bytes = NULL;
	return r < 0 ? err_pass(r) : r;
}

/* Adds a chunk, or touches one, from the last on. */
static bool add_step(struct loop_work *work)
{
	struct store_hold *hold = container_of(work, struct store_hold, adding);
	uint32_t i = hold->count;

	if (!hold->added && i < hold->ids.count &&
	    hold_add(hold,
		     store_chunk_find(hold->handle->space,
				      hold->ids.bytes + i * STORE_ID_BYTES,
				      store_ids_place(&hold->ids, i)),
		     &hold->covers_left))
		return true;
	if (!hold->added)
		hold->touched = hold->count;
	hold->added = true;
	if (hold->touched > 0)
		store_chunk_touch(hold->chunks[--hold->touched]);
	return hold->touched > 0;
}

/* In the turn in which it was opened, or in a later one: then on_done is called. */
static void add_done(struct loop_work *work)
{
	struct store_hold *hold = container_of(work, struct store_hold, adding);
	struct err why;
	int r;

	if (!hold->far_ids)
		return; /* store_hold_open() continues */
	store_hold_ref(hold);
	r = hold_added(hold);
	if (r < 0) {
		err_take(&why);
		hold->on_done(hold->arg, hold, &why);
	} else if (r == 0) {
		hold->on_done(hold->arg, hold, NULL);
	}
	store_hold_unref(hold);
}

int store_hold_open(struct store_handle *handle, const struct store_ids *ids,
		    const struct store_hold_args *args, struct store_hold **hold_p)
{
	struct store_hold *hold;
	int r = hold_new(handle, ids->count, &hold);

	if (r < 0)
		return err_pass(r);
	hold->first = store_ids_base(ids);
	hold->anywhere = ids->first == STORE_ANYWHERE;
	hold->ids = *ids;
	r = hold_enter(hold, args);
	if (r < 0)
		return err_pass(r);
	*hold_p = hold;
	loop_work_start(&hold->adding);
	if (!loop_work_running(&hold->adding))
		return hold_added(hold);
	r = hold_note_far(hold, ids->bytes, ids->count);
	if (r < 0) {
		loop_work_stop(&hold->adding);
		store_hold_close(hold);
		return err_pass(r);
	}
	hold->ids.bytes = hold->far_ids;
	return 1;
}

int store_hold_join(struct store_handle *handle, const uint8_t secret[STORE_SECRET_BYTES],
		    const struct store_hold_args *args, struct store_hold **hold_p)
{
	struct store *store = handle->space->store;
	const struct store_hold *other =
		strmap_get_bytes(&store->holds, secret, STORE_SECRET_BYTES);
	struct store_hold *hold;
	int r;

	if (!other || other->handle->space != handle->space)
		return err_raise(ERR_NOTFOUND, "secret: no hold of this space has it");
	if (other->over || loop_work_running(&other->adding))
		return err_pass(store_hold_check(other));
	r = hold_new(handle, other->count, &hold);
	if (r < 0)
		return err_pass(r);
	hold->first = other->first;
	hold->anywhere = other->anywhere;
	for (uint32_t i = 0; i < other->count; i++) {
		if (!hold_add(hold, other->chunks[i], &hold->covers_left))
			break;
	}
	if (other->far && hold->count == other->count) {
		r = hold_note_far(hold, other->far_ids, far_hold_chunks(other->far));
		if (r >= 0)
			r = far_hold_join(other->far, handle, &hold->far);
		if (r < 0)
			err_clear(); /* it holds the local chunks */
		if (!hold->far)
			hold_forget_far(hold);
	}
	r = hold_enter(hold, args);
	if (r < 0)
		return err_pass(r);
	r = hold_begin(hold);
	if (r < 0)
		return err_pass(r);
	for (uint32_t i = hold->count; i-- > 0;)
		store_chunk_touch(hold->chunks[i]);
	*hold_p = hold;
	return 0;
}

int store_hold_check(const struct store_hold *hold)
{
	if (hold->query) /* other daemons' chunks for it may change */
		return err_raise(ERR_STATE, "hold: queries to other daemons are open; "
					    "wait for its reply");
	if (loop_work_running(&hold->adding))
		return err_raise(ERR_STATE, "hold: not complete yet; wait for its reply");
	return hold->over || hold->closed ? store_lease_over() : 0;
}

uint32_t store_hold_here(const struct store_hold *hold)
{
	return hold->count;
}

uint32_t store_hold_chunk_tokens(const struct store_hold *hold)
{
	return hold->handle->space->tokens;
}

struct far_hold *store_hold_far(const struct store_hold *hold)
{
	return hold->far;
}
