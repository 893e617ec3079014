/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Parts that stay in their engine's memory: pages of a pool of its own. Such a pool is a
 * class of its space, so that finds, covers, legs and other daemons take its parts like
 * those of a pool of slots; to fetch them, they open an offer in the engine's session,
 * which ends with it. A kernel that attends to them reads them where they are.
 *
 * An engine may write its pages once they are its own again. So they cannot be held: a
 * hold of another engine keeps the chunk's name, not these bytes. A reader is an offer,
 * and an offer has ended only when its puller reads no more, or can no longer succeed;
 * or it is one call of a kernel, which is told to stop. Each notes the parts that it
 * reads; a withdrawn part is removed from the index at once, and its record is kept until
 * its last reader has ended. A withdrawal has ended when no record is left that was
 * withdrawn before it: this includes parts that were dropped by others.
 *
 * An engine that exits may have published more than a turn can walk: its classes are
 * marked, none of their parts is valid any more, and the parts are freed in later turns.
 */
#include <errno.h>
#include <string.h>

#include "daemon/base/context.h"
#include "daemon/base/mem.h"
#include "daemon/base/share.h"
#include "daemon/room/room.h"
#include "daemon/session/pool.h"
#include "daemon/session/session.h"
#include "daemon/store/store_impl.h"

#define SLICE STORE_IDS_MAX /* parts a turn */

/* ---- parts ---- */

const struct layout_view *store_pages_view(const struct store_class *class, uint32_t view)
{
	return layout_view_find(class->pool->layout,
				class->canon->layout->views[view].name);
}

uint32_t store_pages_of_view(const struct store_class *class, uint32_t view)
{
	return class->space->tokens / store_pages_view(class, view)->page_tokens;
}

int store_pages_check(const struct store_handle *handle, const struct pool *pool,
		      const struct room_maps *maps, uint64_t begin)
{
	const struct layout *layout = handle->canon->layout;

	for (uint32_t v = 0; v < layout->view_count; v++) {
		const struct layout_view *view =
			layout_view_find(pool->layout, layout->views[v].name);
		const struct room_map *map = room_maps_find(maps, view->name);

		if (!token_shard_is_all(&view->shard) ||
		    handle->space->tokens % view->page_tokens)
			return err_raise(ERR_REQUIRE,
					 "views.%s: pages must hold tokens of one chunk "
					 "only (%u of %u tokens a page); put the chunks "
					 "instead",
					 view->name, handle->space->tokens,
					 view->page_tokens);
		if ((begin - map->first_token) % view->page_tokens)
			return err_raise(ERR_RANGE,
					 "views.%s.first_token: %llu: the first chunk "
					 "starts inside a page; publish whole pages only",
					 view->name,
					 (unsigned long long)map->first_token);
	}
	return 0;
}

static void pages_free(struct store_pages *pages)
{
	struct store_space *space = pages->class->space;

	list_remove(&pages->link);
	charge_drop(&pages->charge);
	space->store->published--;
	space->tenant->published--;
	mem_free(pages);
}

static int pages_new(struct store_class *class, struct store_pages **pages_p)
{
	struct store_space *space = class->space;
	struct store_tenant *tenant = space->tenant;
	struct store *store = space->store;
	struct store_pages *pages;
	size_t bytes = sizeof(*pages);
	int r;

	if (!share_allows(store->published_max, store->published, tenant->published))
		return err_raise(ERR_LIMIT,
				 "%u parts of chunks are published, %u of them by %s "
				 "(limit %u, the latter for users with few); withdraw "
				 "some",
				 store->published, tenant->published,
				 tenant->account->name, store->published_max);
	for (uint32_t v = 0; v < class->canon->layout->view_count; v++)
		bytes += store_pages_of_view(class, v) * sizeof(*pages->pages);
	pages = mem_zalloc(bytes);
	if (!pages)
		return err_pass(-ENOMEM);
	r = charge_take(&pages->charge, tenant->account, ACCOUNT_CHUNKS, bytes);
	if (r < 0) {
		mem_free(pages);
		return err_pass(r);
	}
	list_init(&pages->link);
	pages->class = class;
	store->published++;
	tenant->published++;
	*pages_p = pages;
	return 0;
}

static void pages_fill(struct store_pages *pages, const struct room_maps *maps,
		       uint64_t begin, uint64_t end)
{
	const struct layout *layout = pages->class->canon->layout;
	uint32_t *at = pages->pages;

	for (uint32_t v = 0; v < layout->view_count; v++) {
		const struct room_map *map = room_maps_find(maps, layout->views[v].name);
		uint32_t tokens = store_pages_view(pages->class, v)->page_tokens;
		uint32_t count = store_pages_of_view(pages->class, v);
		uint64_t first = (begin - map->first_token) / tokens;
		uint64_t last = (end - 1 - map->first_token) / tokens;

		for (uint64_t i = first; i < first + count; i++)
			*at++ = map->pages[i < last ? i : last];
	}
}

int store_pages_part(struct store_chunk *chunk, struct store_class *class,
		     const struct room_maps *maps, uint64_t begin, uint64_t end,
		     struct store_part **part_p)
{
	struct store_pages *pages = NULL;
	int r = pages_new(class, &pages);

	if (r < 0)
		return err_pass(r);
	r = store_part_in_pages(chunk, class, pages, part_p);
	if (r < 0) {
		pages_free(pages);
		return err_pass(r);
	}
	pages_fill(pages, maps, begin, end);
	return 0;
}

void store_pages_ready(struct store_part *part)
{
	list_push_back(&part->class->pages, &part->pages->link);
	part->pages->part = part;
}

/* The calls that read these pages; NULL: all. The pages of a call that was stopped are
 * not looked for any more: so each search tells one call at least. */
static void calls_stop(const struct store_class *class, const struct store_pages *pages)
{
	struct store_reading *reading;
	uint32_t i;

	list_foreach(reading, &class->readings, link) {
		if (reading->leg || atomic_load(&reading->left))
			continue;
		for (i = 0; i < reading->count && reading->of[i] != pages; i++)
			continue; /* at most 1024: of a call */
		if (pages && i == reading->count)
			continue;
		atomic_store(&reading->left, true);
		for (i = 0; i < reading->count; i++) /* at most 1024: of a call */
			reading->of[i]->calls--;
	}
}

void store_pages_leave(struct store_part *part)
{
	struct store_pages *pages = mem_steal(part->pages);
	struct store_class *class = part->class;

	if (!pages)
		return;
	pages->part = NULL;
	if (pages->readers == 0) {
		pages_free(pages);
		return;
	}
	pages->left = ++class->space->store->left;
	list_remove(&pages->link);
	list_push_back(&class->left, &pages->link);
	if (pages->calls > 0)
		calls_stop(class, pages);
}

void store_pages_copy(const struct store_part *part, uint32_t view, uint32_t *pages)
{
	const uint32_t *at = part->pages->pages;

	for (uint32_t v = 0; v < view; v++)
		at += store_pages_of_view(part->class, v);
	memcpy(pages, at, store_pages_of_view(part->class, view) * sizeof(*pages));
}

/* ---- readers ---- */

int store_pages_gone(void)
{
	return err_raise(ERR_NOTFOUND, "chunks: their engine has withdrawn the pages");
}

int store_reading_begin(struct store_reading *reading, struct store_class *class,
			struct store_chunk *const *chunks, uint32_t count,
			struct room_leg *leg)
{
	if (!class->published)
		return 0;
	reading->of = mem_calloc(count, sizeof(struct store_pages *));
	if (!reading->of)
		return err_pass(-ENOMEM);
	reading->class = class;
	reading->leg = leg;
	reading->count = count;
	for (uint32_t i = 0; i < count; i++) {
		reading->of[i] = store_part_find(chunks[i], class)->pages;
		reading->of[i]->readers++;
		reading->of[i]->calls += !leg;
	}
	atomic_store(&reading->left, false);
	list_init(&reading->link);
	list_push_back(&class->readings, &reading->link);
	return 0;
}

void store_reading_end(struct store_reading *reading)
{
	struct store_pages **of = mem_steal(reading->of);
	struct store *store;
	bool last = false;

	if (!of)
		return;
	store = reading->class->space->store;
	for (uint32_t i = 0; i < reading->count; i++) {
		of[i]->calls -= !reading->leg && !atomic_load(&reading->left);
		if (--of[i]->readers || of[i]->part)
			continue;
		pages_free(of[i]);
		last = true;
	}
	mem_free(of);
	list_remove(&reading->link);
	if (last)
		store_wake(store);			   /* a withdrawal waits for it */
	if (last || reading->leg || !reading->class->pool) /* not behind each call */
		store_tidy(store);
}

/* Has a part that it reads been withdrawn by then? */
static bool reading_left(const struct store_reading *reading, uint64_t until)
{
	for (uint32_t i = 0; i < reading->count; i++) {
		if (!reading->of[i]->part && reading->of[i]->left <= until)
			return true;
	}
	return false;
}

bool store_reading_left(const struct store_reading *reading)
{
	return reading->of &&
	       (!reading->class->pool || reading_left(reading, UINT64_MAX));
}

/* Those of withdrawn parts, or all. */
static void readings_fail(struct store_class *class, uint64_t until, bool all)
{
	struct store_reading *reading;
	struct err why;

	store_pages_gone();
	err_take(&why);
	list_foreach(reading, &class->readings, link) {
		if (reading->leg && reading->leg->room &&
		    (all || reading_left(reading, until)))
			room_fail(reading->leg->room, &why, NULL);
	}
}

/* ---- withdrawing ---- */

/* The next class of the space from *i on in which the session has published something. */
static struct store_class *class_of_session(const struct store_handle *handle,
					    unsigned int *i)
{
	const struct store_space *space = handle->space;

	for (; *i < STORE_CLASSES_MAX; ++*i) {
		struct store_class *class = space->classes[*i];

		if (class && class->published && class->publisher == handle->session->id)
			return class;
	}
	return NULL;
}

static uint32_t chunk_withdraw(const struct store_handle *handle,
			       struct store_chunk *chunk)
{
	struct store_part *part;
	uint32_t n = 0;

	list_foreach_safe(part, &chunk->parts, link) {
		if (!part->pages || part->memory != PART_READY ||
		    part->class->publisher != handle->session->id)
			continue;
		store_part_free(part);
		n = 1;
	}
	return n;
}

uint32_t store_pages_withdraw(struct store_handle *handle, const struct store_ids *ids,
			      uint64_t *until_p)
{
	uint32_t n = 0;

	for (uint32_t i = 0; i < ids->count; i++) {
		struct store_chunk *chunk = store_chunk_of(handle, ids, i);

		if (!chunk)
			continue;
		store_chunk_pin(chunk);
		n += chunk_withdraw(handle, chunk);
		store_chunk_unpin(chunk);
	}
	*until_p = handle->space->store->left;
	return n;
}

bool store_pages_read(const struct store_handle *handle, uint64_t until)
{
	const struct store_class *class;

	for (unsigned int i = 0; (class = class_of_session(handle, &i)); i++) {
		if (!list_empty(&class->left) &&
		    list_first(&class->left, struct store_pages, link)->left <= until)
			return true;
	}
	return false;
}

void store_pages_fail(const struct store_handle *handle, uint64_t until)
{
	struct store_class *class;

	for (unsigned int i = 0; (class = class_of_session(handle, &i)); i++)
		readings_fail(class, until, false);
}

void store_pages_drop(struct store_chunk *chunk)
{
	struct store_part *part;

	list_foreach_safe(part, &chunk->parts, link) {
		if (part->pages && part->memory == PART_READY)
			store_part_free(part);
	}
}

/* ---- engines that exit ---- */

static uint32_t class_sweep(struct store_class *class, uint32_t most)
{
	uint32_t n = 0;

	for (; n < most && !list_empty(&class->pages); n++)
		store_part_drop(
			list_first(&class->pages, struct store_pages, link)->part);
	return n;
}

static void on_leaving_go(struct loop_defer *defer)
{
	struct store *store = container_of(defer, struct store, leaving_go);
	uint32_t left = SLICE;

	while (!list_empty(&store->leaving)) {
		struct store_class *class =
			list_first(&store->leaving, struct store_class, leave_link);

		left -= class_sweep(class, left);
		if (!list_empty(&class->pages)) {
			loop_defer(store->kvd->loop, &store->leaving_go);
			return;
		}
		class->space->leaving &= ~(UINT64_C(1) << class->index);
		list_remove(&class->leave_link);
		store_tidy(store);
	}
}

void store_class_detach(struct store_class *class)
{
	struct store_session *part = store_session(class->pool->session);
	struct store *store = class->space->store;

	part->publishes--;
	class->pool = NULL;
	calls_stop(class, NULL);
	if (list_empty(&class->pages))
		return;
	class->space->leaving |= UINT64_C(1) << class->index;
	list_push_back(&store->leaving, &class->leave_link);
	loop_defer(store->kvd->loop, &store->leaving_go);
}

/* The next class in pages of the session's pools, or of this one, behind `class` (NULL:
 * the first). */
static struct store_class *class_next(const struct session *session,
				      const struct pool *pool,
				      const struct store_class *class)
{
	const struct store *store = store_of(session->kvd);
	const struct store_session *part = store_session(session);
	unsigned int i = class ? class->index + 1 : 0;
	struct store_space *space;

	if (!part || !part->publishes)
		return NULL;
	list_foreach(space, &store->spaces, link) {
		if (class && space != class->space)
			continue;
		for (; i < STORE_CLASSES_MAX; i++) {
			struct store_class *at = space->classes[i];

			if (at && at->published && at->pool &&
			    at->pool->session == session && (!pool || at->pool == pool))
				return at;
		}
		class = NULL;
		i = 0;
	}
	return NULL;
}

/* Its rooms fail with it. */
void store_session_closing(struct session *session)
{
	struct store_class *class;

	while ((class = class_next(session, NULL, NULL)))
		store_class_detach(class);
}

void store_pool_going(struct pool *pool)
{
	struct store_class *class;

	while ((class = class_next(pool->session, pool, NULL))) {
		readings_fail(class, 0, true);
		store_class_detach(class);
	}
}

unsigned int store_pool_readings(const struct pool *pool)
{
	const struct store_class *class = NULL;
	const struct store_reading *reading;
	unsigned int n = 0;

	while ((class = class_next(pool->session, pool, class))) {
		list_foreach(reading, &class->readings, link)
			n += !reading->leg || reading->leg->room;
	}
	return n;
}

/* ---- life ---- */

void store_pages_init(struct store *store)
{
	list_init(&store->leaving);
	loop_defer_init(&store->leaving_go, on_leaving_go);
}

void store_pages_fini(struct store *store)
{
	loop_defer_cancel(&store->leaving_go);
	list_init(&store->leaving);
}
