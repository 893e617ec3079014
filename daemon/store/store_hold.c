/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Only a hold keeps chunks from eviction. It belongs to a session and ends with it, with
 * its lease or when it is closed, whichever is first; then reads in progress continue,
 * and no new ones start. Any session with its secret may hold the same chunks: a
 * scheduler finds and holds, its workers join and fetch.
 *
 * A prompt may lie at several daemons, in pieces of consecutive chunks. A hold adds the
 * chunks that are here, queries the others for those that follow, of which one daemon's
 * run becomes the next piece, and continues behind it, until a query finds nothing or its
 * time is over. So each query is about chunks that the hold lacks, and a piece is chosen
 * when all have replied.
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
#define PIECES_MAX 8u	/* of a hold, at other daemons */

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
	hold->count = hold->here = hold->away = 0;
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

	return session_found(part ? idmap_get(&part->holds, id) : NULL, "hold", id);
}

void store_hold_facts(const struct store_hold *hold, struct store_hold_facts *facts_p)
{
	*facts_p = (struct store_hold_facts){
		.id = hold->id,
		.first = hold->first,
		.found = {.remote = hold->count - hold->here,
			  .chunks = hold->count,
			  .tokens = hold->tokens},
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

static bool half_is_pinned(const struct store_handle *handle)
{
	const struct arena_owner *owner = handle->space->tenant->owner;

	return arena_owner_pinned(owner) > arena_owner_share(owner) / 2;
}

/* Chunks of a hold in order: those that serve, without a gap. */
static bool hold_add(struct store_hold *hold, struct store_chunk *chunk,
		     unsigned int *covers_left)
{
	const struct store_space *space = hold->handle->space;

	/* the limit ends a later piece, and refuses the first one */
	if (!chunk || (hold->far && half_is_pinned(hold->handle)))
		return false;
	store_chunk_pin(chunk);
	if (!hold_bring(hold->handle, chunk, covers_left)) {
		store_chunk_unpin(chunk);
		return false;
	}
	hold->chunks[hold->count++] = chunk;
	hold->tokens += chunk->tokens;
	return chunk->tokens == space->tokens; /* nothing follows a short one */
}

static int hold_check(const struct store_handle *handle, uint32_t count)
{
	const struct store_tenant *tenant = handle->space->tenant;

	if (count && half_is_pinned(handle))
		return err_raise(
			ERR_LIMIT,
			"chunks: %s would hold or use %llu bytes (limit: %llu, half of "
			"its share of chunk_memory); release holds",
			tenant->account->name,
			(unsigned long long)arena_owner_pinned(tenant->owner),
			(unsigned long long)arena_owner_share(tenant->owner) / 2);
	return 0;
}

/* The next piece, if another daemon has one: the longest comes first. */
static bool hold_add_far(struct store_hold *hold)
{
	const struct far_hold *far = hold->far;

	while (far && far_hold_first(far) != hold->count) /* at most 16: two of each */
		far = far_hold_next(far);
	if (!far)
		return false;
	hold->pieces++;
	hold->count += far_hold_chunks(far); /* of which `chunks` has NULL */
	hold->away += far_hold_chunks(far);
	hold->tokens += far_hold_tokens(far);
	return true;
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

static const uint8_t *hold_id(const struct store_hold *hold, uint32_t i)
{
	return hold->ids.bytes + (size_t)(i - hold->here) * STORE_ID_BYTES;
}

/* It has all that was found. */
static void hold_complete(struct store_hold *hold)
{
	struct store *store = hold->handle->space->store;
	uint32_t own = hold->count - hold->away;

	store->figures.found += own;
	store->figures.missed += hold->ids.count - own;
	store->figures.remote.found += hold->away;
	hold->ids.bytes = NULL;
	if (!hold->far) {
		hold_forget_far(hold);
		hold->here = hold->count;
	}
	loop_timer_start(&hold->lease, hold->lease_ns);
}

/* All have replied, or their time is over. */
static void on_far_done(void *arg)
{
	struct store_hold *hold = arg;

	hold->query = NULL;
	/* nothing follows a short one */
	if (hold_add_far(hold) && hold->tokens % hold->handle->space->tokens == 0) {
		hold->added = false;
		hold->added_from = hold->count;
		loop_work_start(&hold->adding); /* add_done() follows */
	} else {
		hold_complete(hold);
		hold->on_done(hold->arg, hold, NULL);
	}
}

/* The ids of the chunks after its own first ones, once. */
static int hold_note_rest(struct store_hold *hold)
{
	const uint8_t *ids = hold_id(hold, hold->count);
	uint32_t rest = hold->ids.count - hold->count;
	int r = 0;

	if (hold->far_until_ns)
		return 0;
	if (hold->far_ids)
		memmove(hold->far_ids, ids, (size_t)rest * STORE_ID_BYTES);
	else
		r = hold_note_far(hold, ids, rest);
	if (r < 0)
		return err_pass(r);
	hold->ids.bytes = hold->far_ids;
	hold->here = hold->count;
	hold->far_until_ns =
		loop_now_ns(hold->handle->space->store->kvd->loop) + hold->far_ns;
	return 0;
}

/* Others may have the following chunks. False: they are not queried. */
static bool hold_ask(struct store_hold *hold)
{
	const struct store_space *space = hold->handle->space;
	uint64_t now_ns = loop_now_ns(space->store->kvd->loop);
	uint32_t rest = hold->ids.count - hold->count;
	int r;

	if (!hold->far_ns || !space->store->far || rest == 0 ||
	    hold->tokens % space->tokens || hold->pieces == PIECES_MAX)
		return false;
	r = hold_note_rest(hold);
	if (r >= 0 && now_ns >= hold->far_until_ns)
		return false;
	if (r >= 0)
		r = far_ask(space->store->far, hold, hold_id(hold, hold->count), rest,
			    hold->far_until_ns - now_ns, on_far_done, hold, &hold->query);
	if (r < 0)
		err_clear(); /* a miss */
	return r >= 0;
}

/* The chunks that are here were added. Outcome 1: others are queried for the next. */
static int hold_added(struct store_hold *hold)
{
	int r = hold->far ? 0 : hold_check(hold->handle, hold->count);

	if (r < 0) {
		store_hold_close(hold);
		return err_pass(r);
	}
	if (hold_ask(hold))
		return 1;
	hold_complete(hold);
	return 0;
}

/* Adds a chunk, or touches one, from the last on. */
static bool add_step(struct loop_work *work)
{
	struct store_hold *hold = container_of(work, struct store_hold, adding);
	uint32_t i = hold->count;

	if (!hold->added && i < hold->ids.count &&
	    hold_add(hold,
		     store_chunk_find(hold->handle->space, hold_id(hold, i),
				      store_ids_place(&hold->ids, i)),
		     &hold->covers_left))
		return true;
	if (!hold->added)
		hold->touched = hold->count;
	hold->added = true;
	if (hold->touched > hold->added_from)
		store_chunk_touch(hold->chunks[--hold->touched]);
	return hold->touched > hold->added_from;
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

/* The other's piece that follows, as far as it serves this handle. */
static int hold_join_far(struct store_hold *hold, const struct store_hold *other)
{
	int r = hold->far_ids
			? 0
			: hold_note_far(hold, other->far_ids, other->count - other->here);

	if (r < 0)
		return err_pass(r);
	hold->here = other->here;
	r = far_hold_join(other->far, hold->count, hold->handle, &hold->far);
	hold_add_far(hold);
	return err_pass(r);
}

static int hold_join_pieces(struct store_hold *hold, const struct store_hold *other)
{
	int r = 0;

	for (uint32_t i = 0; i < other->count && r >= 0; i = hold->count) {
		if (!other->chunks[i])
			r = hold_join_far(hold, other);
		else
			hold_add(hold, other->chunks[i], &hold->covers_left);
		if (hold->count == i)
			break;
	}
	return err_pass(r);
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
	if (hold_join_pieces(hold, other) < 0)
		err_clear(); /* it has what was added */
	if (!hold->far) {
		hold_forget_far(hold);
		hold->here = hold->count;
	}
	r = hold_enter(hold, args);
	if (r < 0)
		return err_pass(r);
	r = hold_check(handle, hold->count - hold->away);
	if (r < 0) {
		store_hold_close(hold);
		return err_pass(r);
	}
	loop_timer_start(&hold->lease, hold->lease_ns);
	for (uint32_t i = hold->count; i-- > 0;) {
		if (hold->chunks[i])
			store_chunk_touch(hold->chunks[i]);
	}
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

uint32_t store_hold_chunks(const struct store_hold *hold)
{
	return hold->count;
}

uint32_t store_hold_piece(const struct store_hold *hold, uint32_t first, uint32_t end,
			  struct far_hold **far_p)
{
	uint32_t i = first;

	*far_p = NULL;
	if (!hold->chunks[first]) {
		*far_p = far_hold_at(hold->far, first);
		i = *far_p ? far_hold_first(*far_p) + far_hold_chunks(*far_p) : first;
		return (i < end ? i : end) - first;
	}
	while (i < end && hold->chunks[i]) /* at most 4096: the ids of a call */
		i++;
	return i - first;
}

uint32_t store_hold_chunk_tokens(const struct store_hold *hold)
{
	return hold->handle->space->tokens;
}

struct far_hold *store_hold_far(const struct store_hold *hold)
{
	return hold->far;
}
