/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Calls on rooms with `post`: entries of the submission ring (client_ring.c) without a
 * reply. They are the calls of client_room.c by another path. Errors that the library can
 * detect are returned by the call; entries that the daemon refuses fail the room, in its
 * slot of the status page.
 *
 * A posted room is numbered here, like a transfer, so its handle is usable at once. A
 * room opened by a call with a reply can be posted to after the reply: lines of the
 * socket follow entries of the ring, but not the reverse.
 */
#include "lib/client.h"

#include <string.h>

#include "proto/kvd_ring.h"

#define VIEWS_INLINE 4u
#define VIEW_PARTS 5u

int client_post_begin(struct kvd_client *client, unsigned int op)
{
	int r = client_ring_begin(client);

	if (r)
		return r;
	if (!client->ring && client->in_callback)
		return client_fail(client, KVD_E_STATE,
				   "post: there is no submission ring, and none can be "
				   "created in a callback; call kvd_xfer_prepare() "
				   "before");
	if (!client->ring)
		return client_fail(client, KVD_E_REQUIRE,
				   "post: this daemon has no submission ring; call "
				   "without post");
	if (!(client->ring_ops >> op & 1))
		return client_fail(client, KVD_E_NOCMD,
				   "post: %s does not support op %u of the submission "
				   "ring (rooms by the ring); call without post, or "
				   "upgrade it",
				   client->info.daemon, op);
	return 0;
}

/* ---- payloads ------------------------------------------------------------------- */

struct views {
	struct kvd_ring_view heads_in[VIEWS_INLINE], *heads;
	struct client_part parts_in[VIEW_PARTS * VIEWS_INLINE + 2], *parts;
	void *owned;
	size_t count, bytes;
};

static void views_begin(struct views *v)
{
	v->heads = v->heads_in;
	v->parts = v->parts_in;
	v->owned = NULL;
	v->count = v->bytes = 0;
}

static int views_room(struct kvd_client *client, struct views *v, size_t count)
{
	size_t heads = count * sizeof(*v->heads);

	if (count <= VIEWS_INLINE)
		return 0;
	v->owned = mem_calloc(1, heads + (VIEW_PARTS * count + 2) * sizeof(*v->parts));
	if (!v->owned)
		return client_fail_nomem(client);
	v->heads = v->owned;
	v->parts = (struct client_part *)(void *)((char *)v->owned + heads);
	return 0;
}

static void part_add(struct views *v, const void *data, size_t bytes)
{
	v->parts[v->count++] = (struct client_part){data, bytes};
	v->bytes += bytes;
}

static int view_add(struct kvd_client *client, struct views *v, size_t index,
		    const struct kvd_view *view)
{
	static const uint32_t pad;
	struct kvd_ring_view *head = &v->heads[index];
	const char *name = view->name ? view->name : "kv";
	size_t selected = view->select ? view->select_count : 0;

	if (strlen(name) >= sizeof(head->name))
		return client_fail(client, KVD_E_INVAL,
				   "views[%zu]: a name of %zu bytes; at most %zu", index,
				   strlen(name), sizeof(head->name) - 1);
	if (view->page_count > UINT32_MAX / 8 || selected > UINT32_MAX / 8)
		return client_fail(client, KVD_E_TOOBIG,
				   "views.%s: %zu pages, %zu selected tokens", name,
				   view->page_count, selected);
	if (view->select && !selected)
		return client_fail(client, KVD_E_INVAL, "views.%s.select: empty", name);
	*head = (struct kvd_ring_view){.first_token = view->first_token,
				       .token_begin = view->token_begin,
				       .token_end = view->token_end,
				       .layer_begin = view->layer_begin,
				       .layer_end = view->layer_end,
				       .page_count = (uint32_t)view->page_count,
				       .select_count = (uint32_t)selected};
	memcpy(head->name, name, strlen(name) + 1);
	part_add(v, head, sizeof(*head));
	part_add(v, view->pages, view->page_count * sizeof(*view->pages));
	part_add(v, &pad, view->page_count % 2 * sizeof(pad));
	part_add(v, view->select, selected * sizeof(*view->select));
	part_add(v, &pad, selected % 2 * sizeof(pad));
	return 0;
}

/* An opened room gets its number here; if its entry is not submitted it has none. */
static int entry_give(struct client_slot *slot, struct kvd_ring_entry *entry,
		      const struct views *v)
{
	if (entry->op != KVD_RING_BIND && entry->op != KVD_RING_SEND &&
	    entry->op != KVD_RING_EXTEND)
		return client_slot_make(slot, entry, v->parts, v->count, &slot->object);
	entry->slot = slot->slot;
	entry->gen = atomic_load(&slot->gen);
	return client_ring_put(slot->object.client, entry, v->parts, v->count, NULL);
}

static int room_named(struct kvd_room *room)
{
	struct client_object *object = &room->slot.object;

	if (client_object_phase(object) != CLIENT_MAKING)
		return 0;
	return client_fail(object->client, KVD_E_BUSY,
			   "room %llu: its opening has no reply yet; post it, too, or "
			   "call again",
			   (unsigned long long)room->slot.number);
}

int client_post_views(struct client_slot *slot, struct kvd_ring_entry *entry,
		      const void *ids, const struct kvd_view *views, size_t view_count,
		      struct text *text)
{
	struct kvd_client *client = slot->object.client;
	struct views v;
	int r;

	views_begin(&v);
	r = text->failed ? client_fail_nomem(client) : views_room(client, &v, view_count);
	if (r) {
		text_fini(text);
		return r;
	}
	if (ids)
		part_add(&v, ids, (size_t)entry->n0 * KVD_RING_ID_BYTES);
	for (size_t i = 0; !r && i < view_count; i++)
		r = view_add(client, &v, i, &views[i]);
	part_add(&v, text->data, text->len);
	if (!r && v.bytes > UINT32_MAX)
		r = client_fail(client, KVD_E_TOOBIG, "pages: %zu bytes", v.bytes);
	if (!r) {
		entry->bytes = (uint32_t)v.bytes;
		entry->n1 = (uint32_t)view_count;
		entry->n2 = (uint32_t)text->len;
		r = entry_give(slot, entry, &v);
	}
	mem_free(v.owned);
	text_fini(text);
	return r;
}

int client_post_pages(struct kvd_room *room, struct kvd_ring_entry *entry,
		      const struct kvd_view *views, size_t view_count, struct text *text)
{
	int r = entry->op == KVD_RING_OPEN ? 0 : room_named(room);

	if (r) {
		text_fini(text);
		return r;
	}
	if (entry->op != KVD_RING_OPEN) {
		entry->a = room->slot.number;
		entry->n0 = room->role;
	}
	return client_post_views(&room->slot, entry, NULL, views, view_count, text);
}

/* ---- abort, close ------------------------------------------------------------------ */

int client_post_abort(struct kvd_room *room, const char *reason)
{
	struct client_slot *slot = &room->slot;
	size_t len = reason ? strlen(reason) : 0;
	struct client_part part = {reason, len < 200 ? len : 200};
	struct kvd_ring_entry entry = {.op = KVD_RING_ABORT,
				       .slot = slot->slot,
				       .gen = atomic_load(&slot->gen),
				       .a = slot->number,
				       .n0 = room->role,
				       .bytes = (uint32_t)part.bytes};
	int r = room_named(room);

	if (!r) /* OPEN has its reason and its slot */
		r = client_post_begin(slot->object.client, KVD_RING_OPEN);
	return r ? r : client_ring_put(slot->object.client, &entry, &part, 1, NULL);
}

int client_post_close_entry(struct kvd_room *room)
{
	struct kvd_client *client = room->slot.object.client;
	struct kvd_ring_entry entry = {.op = KVD_RING_CLOSE,
				       .slot = room->slot.slot,
				       .gen = atomic_load(&room->slot.gen),
				       .a = room->slot.number,
				       .n0 = room->role};
	int r = client_post_begin(client, KVD_RING_CLOSE);

	return r ? r : client_ring_put(client, &entry, NULL, 0, NULL);
}

int client_post_close(struct kvd_room *room)
{
	struct client_object *object = &room->slot.object;
	enum client_phase phase = client_object_phase(object);
	bool lives = phase == CLIENT_READY || room->slot.numbered;
	int r = room_named(room);

	if (!r && lives && client_object_current(object))
		r = client_post_close_entry(room);
	if (r && r != -KVD_E_LOST)
		return r;
	client_object_unref(object);
	return 0;
}
