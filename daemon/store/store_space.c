/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Two engines share chunks when the texts of their spaces are equal: tenant, model,
 * revision, how ids are computed, how positions are encoded, tokens of a chunk, and each
 * kind of field of the layout. The texts are compared, not digests of them. Only the
 * placement of bytes may differ: page size, head order, which ranks hold which units and
 * layers. Each such placement is a class of the space, a pool of its own over the same
 * memory, and the planner moves bytes between any two.
 */
#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include <openssl/sha.h>

#include "daemon/base/log.h"
#include "daemon/base/mem.h"
#include "daemon/base/share.h"
#include "daemon/session/pool.h"
#include "daemon/session/region.h"
#include "daemon/session/session.h"
#include "daemon/store/store_impl.h"

/* ---- spaces ---- */

static int word_check(const char *name, const char *word, bool needed)
{
	size_t len = word ? strlen(word) : 0;

	if (needed && len == 0)
		return err_raise(ERR_INVAL, "%s: missing", name);
	if (len > STORE_WORD_MAX)
		return err_raise(ERR_INVAL, "%s: %zu bytes, at most %u", name, len,
				 STORE_WORD_MAX);
	for (size_t i = 0; i < len; i++) {
		if ((unsigned char)word[i] < ' ' || word[i] == 0x7f)
			return err_raise(ERR_INVAL,
					 "%s: must not contain control "
					 "characters",
					 name);
	}
	return 0;
}

int store_words_check(const struct store_space_args *args)
{
	int r = word_check("model", args->model, true);

	if (r >= 0)
		r = word_check("revision", args->revision, false);
	if (r >= 0)
		r = word_check("scheme", args->scheme, true);
	if (r >= 0)
		r = word_check("rope", args->rope, false);
	return r < 0 ? err_pass(r) : 0;
}

static const char *or_none(const char *word)
{
	return word ? word : "";
}

/* Lines; values contain no newline. */
static char *space_identity(const struct store_space_args *args, const char *tenant,
			    const struct canon *canon)
{
	cleanup_free char *kinds = canon_identity(canon);

	if (!kinds)
		return NULL;
	return mem_printf("tenant %s\nmodel %s\nrevision %s\nscheme %s\nrope %s\n"
			  "tokens %u\n%s",
			  tenant, args->model, or_none(args->revision), args->scheme,
			  or_none(args->rope), args->tokens, kinds);
}

void store_space_free(struct store_space *space)
{
	struct store_tenant *tenant = space->tenant;

	assert(space->chunks == 0 && space->handles == 0 && space->class_count == 0);
	if (space->going) {
		list_remove(&space->link);
		tenant->going--;
	} else if (!list_empty(&space->link)) {
		list_remove(&space->link);
		space->store->space_count--;
		tenant->spaces--;
	}
	mem_free(space->identity);
	mem_free(space->model);
	mem_free(space->revision);
	mem_free(space->scheme);
	mem_free(space->rope);
	mem_free(space);
}

static int space_digest(struct store_space *space)
{
	uint8_t sum[SHA256_DIGEST_LENGTH];

	if (!SHA256((const uint8_t *)space->identity, strlen(space->identity), sum))
		return err_raise(ERR_INTERNAL, "no SHA-256");
	memcpy(space->digest, sum, sizeof(space->digest));
	return 0;
}

static int space_new(struct store *store, struct store_tenant *tenant,
		     const struct store_space_args *args, const char *identity,
		     uint64_t generation, struct store_space **space_p)
{
	struct store_space *space;
	int r;

	if (!share_allows(STORE_SPACES_MAX, store->space_count, tenant->spaces) &&
	    !store_evict_space(tenant, generation, false))
		return err_raise(ERR_LIMIT,
				 "spaces of chunks: %u are open or in use, %u of them "
				 "by %s (limit %u, the latter for users with few); "
				 "close some",
				 store->space_count, tenant->spaces,
				 tenant->account->name, STORE_SPACES_MAX);
	space = mem_zalloc(sizeof(*space));
	if (!space)
		return err_pass(-ENOMEM);
	list_init(&space->link);
	space->store = store;
	space->tenant = tenant;
	space->tokens = args->tokens;
	space->identity = mem_strdup(identity);
	space->model = mem_strdup(args->model);
	space->revision = mem_strdup(or_none(args->revision));
	space->scheme = mem_strdup(args->scheme);
	space->rope = mem_strdup(or_none(args->rope));
	if (!space->identity || !space->model || !space->revision || !space->scheme ||
	    !space->rope) {
		store_space_free(space);
		return err_pass(-ENOMEM);
	}
	r = space_digest(space);
	if (r < 0) {
		store_space_free(space);
		return err_pass(r);
	}
	space->id = ++store->next_space;
	list_push_back(&store->spaces, &space->link);
	store->space_count++;
	tenant->spaces++;
	*space_p = space;
	return 0;
}

int store_space_of(struct store *store, struct store_tenant *tenant,
		   const struct store_space_args *args, const struct canon *canon,
		   uint64_t generation, struct store_space **space_p)
{
	cleanup_free char *identity = space_identity(args, tenant->account->name, canon);
	struct store_space *space;

	if (!identity)
		return err_pass(-ENOMEM);
	list_foreach(space, &store->spaces, link) {
		if (strcmp(space->identity, identity) == 0) {
			*space_p = space;
			return 0;
		}
	}
	return err_pass(space_new(store, tenant, args, identity, generation, space_p));
}

struct store_space *store_space_by_digest(const struct store *store,
					  const uint8_t digest[16])
{
	struct store_space *space;

	list_foreach(space, &store->spaces, link) {
		if (memcmp(space->digest, digest, sizeof(space->digest)) == 0)
			return space;
	}
	return NULL;
}

/* ---- classes ---- */

static void class_free(struct store_class *class)
{
	assert(list_empty(&class->waiting) && class->parts == 0);
	list_remove(&class->leave_link);
	cJSON_Delete(class->layout);
	cJSON_Delete(class->regions);
	canon_free(class->canon);
	charge_drop(&class->charge);
	mem_free(class);
}

static void on_class_closed(void *arg)
{
	class_free(arg);
}

void store_class_drop(struct store_class *class)
{
	struct store_space *space = class->space;
	struct store *store = space->store;

	if (class->published && class->pool)
		store_class_detach(class);
	space->published &= ~(UINT64_C(1) << class->index);
	space->leaving &= ~(UINT64_C(1) << class->index);
	space->classes[class->index] = NULL;
	space->class_changes++; /* handles may be open */
	space->class_count--;
	if (!space->going) {
		space->tenant->classes--;
		store->class_count--;
	}
	if (class->words)
		store->file_ops->forget(class);
	if (class->pool && store->session)
		pool_close(class->pool, on_class_closed, class);
	else
		class_free(class);
}

static void class_registered(struct store_class *class)
{
	cJSON_Delete(class->layout);
	cJSON_Delete(class->regions);
	class->layout = class->regions = NULL;
}

static void on_class_pool(void *arg, struct pool *pool, const struct err *err)
{
	struct store_class *class = arg;
	struct store_waiter *waiter;

	class->pool = pool;
	class_registered(class);
	if (!pool && class->space->store->session)
		log_warn("store", class->space->model,
			 "the pool of a space could not "
			 "be registered",
			 "why=\"%s\"", err->text);
	list_foreach_safe(waiter, &class->waiting, link) {
		list_remove(&waiter->link);
		waiter->wake(waiter, pool ? NULL : err);
	}
	store_tidy(class->space->store);
}

static int class_register(struct store_class *class)
{
	struct store *store = class->space->store;
	char name[POOL_NAME_MAX], regions[48];
	struct pool_args args = {.name = name};
	int r = layout_print(class->canon->layout, &class->layout);

	if (r < 0)
		return err_pass(r);
	snprintf(regions, sizeof(regions), "[{\"region\":%llu}]",
		 (unsigned long long)store->region->id);
	class->regions = cJSON_Parse(regions);
	snprintf(name, sizeof(name), "chunk:%llu.%u",
		 (unsigned long long)class->space->id, class->index);
	args.layout = class->layout;
	args.regions = class->regions;
	r = class->regions ? pool_register(store->session, &args, on_class_pool, class)
			   : err_raise(ERR_NOMEM, "no memory for a pool of chunks");
	if (r < 0)
		class_registered(class);
	return err_pass(r);
}

int store_class_pool(struct store_class *class)
{
	int r = 1;

	class->used = ++class->space->store->uses;
	if (!class->pool && class->published)
		r = err_raise(ERR_NOTFOUND, "the engine of these chunks has exited");
	else if (!class->pool)
		r = class->layout ? 0 : store_ready(class->space->store);
	if (r > 0 && !class->pool)
		r = class_register(class);
	return err_pass(r);
}

/* In the store; others may be evicted for it. */
static bool class_room(struct store_space *space, uint64_t generation)
{
	bool room = share_allows(STORE_POOLS_MAX, space->store->class_count,
				 space->tenant->classes);

	space->handles++; /* itself stays */
	room = room || store_evict_space(space->tenant, generation, true) ||
	       store_evict_class(space, generation);
	space->handles--;
	return room;
}

static int class_index(struct store_space *space, uint64_t generation,
		       unsigned int *index_p)
{
	if (!class_room(space, generation))
		return err_raise(ERR_LIMIT,
				 "kinds of parts of chunks: %u are in use, %u of them "
				 "by %s (limit %u, the latter for users with few); "
				 "close spaces",
				 space->store->class_count, space->tenant->classes,
				 space->tenant->account->name, STORE_POOLS_MAX);
	if (space->class_count == STORE_CLASSES_MAX &&
	    !store_evict_class(space, generation))
		return err_raise(ERR_LIMIT,
				 "kinds of parts of a space: all are in use (limit %u); "
				 "end engines of other layouts",
				 STORE_CLASSES_MAX);
	for (*index_p = 0; space->classes[*index_p];)
		++*index_p;
	return 0;
}

static int class_new(struct store_space *space, const struct canon *canon,
		     uint64_t generation, struct store_class **class_p)
{
	const struct canon_args args = {.layout = canon->layout,
					.tokens = space->tokens,
					.memory_bytes = space->store->memory_bytes};
	struct store_class *class = mem_zalloc(sizeof(*class));
	int r;

	if (!class)
		return err_pass(-ENOMEM);
	class->space = space;
	list_init(&class->waiting);
	list_init(&class->all);
	list_init(&class->pages);
	list_init(&class->left);
	list_init(&class->readings);
	list_init(&class->leave_link);
	r = class_index(space, generation, &class->index);
	if (r >= 0)
		r = canon_make(&args, &class->canon);
	if (r >= 0) /* and its description in files */
		r = charge_take(&class->charge, space->tenant->account, ACCOUNT_LAYOUTS,
				sizeof(*class) + 2 * layout_memory(class->canon->layout));
	if (r < 0) {
		class_free(class);
		return err_pass(r);
	}
	class->canon->layout->rank = class->index;
	space->classes[class->index] = class;
	space->class_count++;
	space->tenant->classes++;
	space->store->class_count++;
	*class_p = class;
	return 0;
}

int store_class_get(struct store_space *space, const struct canon *canon,
		    uint64_t generation, struct store_class **class_p)
{
	*class_p = NULL;
	for (unsigned int i = 0; i < STORE_CLASSES_MAX; i++) {
		struct store_class *class = space->classes[i];

		if (class && !class->published && canon_equal(class->canon, canon)) {
			*class_p = class;
			return 0;
		}
	}
	return err_pass(class_new(space, canon, generation, class_p));
}

int store_class_published(struct store_space *space, const struct canon *canon,
			  struct pool *pool, struct store_class **class_p)
{
	struct store_session *part = store_session(pool->session);
	struct store_class *free = NULL;
	int r = 0;

	for (unsigned int i = 0; i < STORE_CLASSES_MAX; i++) {
		struct store_class *class = space->classes[i];

		if (!class || !class->published || !canon_equal(class->canon, canon))
			continue;
		if (class->pool == pool) {
			*class_p = class;
			return 0;
		}
		/* one whose engine has exited, without parts, is used again */
		if (!class->pool && !class->parts && list_empty(&class->readings) &&
		    list_empty(&class->leave_link))
			free = class;
	}
	if (!free)
		r = class_new(space, canon, STORE_NOW, &free);
	if (r < 0)
		return err_pass(r);
	free->published = true;
	free->pool = pool;
	free->publisher = pool->session->id;
	space->published |= UINT64_C(1) << free->index;
	part->publishes++;
	*class_p = free;
	return 0;
}

int store_class_of(struct store_handle *handle, struct store_class **class_p)
{
	int r = store_class_get(handle->space, handle->canon, STORE_NOW, class_p);

	if (r >= 0)
		r = store_class_pool(*class_p);
	if (r < 0 && *class_p && !(*class_p)->parts && list_empty(&(*class_p)->waiting))
		store_class_drop(*class_p);
	return r < 0 ? err_pass(r) : 0;
}

/* ---- handles ---- */

void store_space_let_go(struct store_space *space)
{
	if (--space->handles)
		return;
	space->used = ++space->store->uses;
	store_tidy(space->store);
}

struct store_handle *store_handle_ref(struct store_handle *handle)
{
	handle->refs++;
	return handle;
}

void store_handle_unref(struct store_handle *handle)
{
	struct store_space *space = handle->space;

	if (--handle->refs)
		return;
	if (space)
		store_space_let_go(space);
	canon_free(handle->canon);
	for (uint32_t i = 0; handle->views && i < handle->view_count; i++)
		mem_free(handle->views[i]);
	mem_free(handle->views);
	charge_drop(&handle->charge);
	mem_free(handle);
}

static int views_copy(struct store_handle *handle, const struct store_space_args *args)
{
	if (!args->views)
		return 0;
	handle->views = mem_calloc(args->view_count + 1, sizeof(*handle->views));
	if (!handle->views)
		return err_pass(-ENOMEM);
	for (uint32_t i = 0; i < args->view_count; i++) {
		handle->views[i] = mem_strdup(args->views[i]);
		if (!handle->views[i])
			return err_pass(-ENOMEM);
		handle->view_count++;
	}
	return 0;
}

static int handle_canon(const struct store_handle *handle, const struct layout *layout,
			uint32_t tokens, const struct store *store,
			struct canon **canon_p)
{
	const struct canon_args args = {
		.layout = layout,
		.views = (const char *const *)handle->views,
		.view_count = handle->view_count,
		.tokens = tokens,
		.memory_bytes = store->memory_bytes,
	};

	return err_pass(canon_make(&args, canon_p));
}

static int handle_make(struct store *store, const struct store_space_args *args,
		       struct store_handle *handle)
{
	struct store_tenant *tenant;
	int r = views_copy(handle, args);

	if (r >= 0)
		r = handle_canon(handle, args->layout, args->tokens, store,
				 &handle->canon);
	if (r >= 0 && handle->canon->slot_bytes > arena_slot_most(store->arena))
		r = err_raise(ERR_TOOBIG,
			      "tokens: a part of a chunk takes %llu bytes (limit %llu); "
			      "use fewer tokens, or raise chunk_memory",
			      (unsigned long long)handle->canon->slot_bytes,
			      (unsigned long long)arena_slot_most(store->arena));
	if (r >= 0)
		r = charge_take(&handle->charge, handle->session->account,
				ACCOUNT_LAYOUTS,
				sizeof(*handle) + layout_memory(handle->canon->layout));
	if (r >= 0)
		r = store_tenant_of(store, handle->session->account, STORE_NOW, &tenant);
	if (r >= 0)
		r = store_space_of(store, tenant, args, handle->canon, STORE_NOW,
				   &handle->space);
	if (r < 0)
		return err_pass(r);
	handle->space->handles++;
	return 0;
}

int store_open(struct session *session, const struct store_space_args *args,
	       struct store_handle **handle_p)
{
	struct store *store = store_of(session->kvd);
	struct store_session *part = store_session(session);
	struct store_handle *handle;
	int r = store_ready(store);

	if (r >= 0)
		r = store_words_check(args);
	if (r >= 0)
		r = session->ending ? err_raise(ERR_SESSION, "the session is ending") : 0;
	if (r < 0)
		return err_pass(r);
	handle = mem_zalloc(sizeof(*handle));
	if (!handle)
		return err_pass(-ENOMEM);
	handle->refs = 1;
	handle->session = session;
	handle->id = ++session->next_id;
	r = handle_make(store, args, handle);
	if (r >= 0)
		r = idmap_put(&part->handles, handle->id, handle);
	if (r < 0) {
		store_handle_unref(handle);
		return err_pass(r);
	}
	*handle_p = handle;
	return 0;
}

void store_close(struct store_handle *handle)
{
	struct store_session *part = store_session(handle->session);

	if (handle->closed)
		return;
	handle->closed = true;
	idmap_remove(&part->handles, handle->id);
	store_handle_unref(handle);
}

struct store_handle *store_handle_find(struct session *session, uint64_t id)
{
	const struct store_session *part = store_session(session);

	return session_found(part ? idmap_get(&part->handles, id) : NULL, "space", id);
}

int store_handle_fits(struct store_handle *handle, const struct pool *pool)
{
	struct canon *canon mem_cleanup(canon_freep) = NULL;
	int r;

	if (pool->id == handle->pool_id)
		return 0;
	r = handle_canon(handle, pool->layout, handle->space->tokens,
			 handle->space->store, &canon);
	if (r >= 0 && !canon_equal(canon, handle->canon))
		r = err_raise(ERR_LAYOUT,
			      "pool %llu: its layout differs from the space's; open "
			      "another space for this pool",
			      (unsigned long long)pool->id);
	if (r < 0)
		return err_pass(r);
	handle->pool_id = pool->id;
	return 0;
}

/* Of one view, and of any layers. */
static int selection_check(const struct store_handle *handle,
			   const struct room_maps *maps, uint64_t *begin_p,
			   uint64_t *end_p)
{
	const struct room_map *map = &maps->maps[0];
	const struct layout_view *view =
		layout_view_find(handle->canon->layout, map->view);

	if (maps->count != 1)
		return err_raise(ERR_INVAL, "views: %zu are named; a selection is of one",
				 maps->count);
	if (!view || !room_map_token_bytes(map, view))
		return err_raise(ERR_INVAL, "views.%s: not in the space, or no layer",
				 map->view);
	*begin_p = map->token_begin;
	*end_p = map->token_end;
	return 0;
}

int store_maps_check(const struct store_handle *handle, const struct room_maps *maps,
		     uint64_t *begin_p, uint64_t *end_p)
{
	const struct layout *layout = handle->canon->layout;

	*begin_p = *end_p = 0;
	if (room_maps_selection(maps))
		return err_pass(selection_check(handle, maps, begin_p, end_p));
	for (uint32_t i = 0; i < layout->view_count; i++) {
		const struct room_map *map = room_maps_find(maps, layout->views[i].name);

		if (!map)
			return err_raise(ERR_INVAL, "views.%s: missing, but in the space",
					 layout->views[i].name);
		if (map->layers.begin != 0 || map->layers.end != UINT32_MAX)
			return err_raise(ERR_INVAL, "views.%s.layers: must be all layers",
					 map->view);
		if (i == 0) {
			*begin_p = map->token_begin;
			*end_p = map->token_end;
		}
		if (map->token_begin != *begin_p || map->token_end != *end_p)
			return err_raise(ERR_INVAL,
					 "views.%s: tokens [%llu, %llu), but the other "
					 "views have [%llu, %llu)",
					 map->view, (unsigned long long)map->token_begin,
					 (unsigned long long)map->token_end,
					 (unsigned long long)*begin_p,
					 (unsigned long long)*end_p);
	}
	if (maps->count != layout->view_count)
		return err_raise(ERR_INVAL, "views: %zu are named, but the space has %u",
				 maps->count, layout->view_count);
	if (*begin_p >= *end_p)
		return err_raise(ERR_INVAL, "views: must have at least one token");
	return 0;
}

/* ---- the end ---- */

static void space_tidy(struct store_space *space)
{
	for (unsigned int i = 0; i < STORE_CLASSES_MAX; i++) {
		struct store_class *class = space->classes[i];

		if (class && !class->parts && !class->layout && !space->handles &&
		    list_empty(&class->waiting) && list_empty(&class->readings))
			store_class_drop(class);
	}
	if (!space->handles && !space->chunks && !space->class_count)
		store_space_free(space);
}

void store_spaces_tidy(struct store *store)
{
	struct store_space *space;

	list_foreach_safe(space, &store->spaces, link)
		space_tidy(space);
}
