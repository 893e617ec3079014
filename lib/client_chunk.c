/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Chunks, on the engine's side. A move has a slot of the status page like a room, and the
 * same difficult case: a put or fetch without a reply may be moving bytes. It is then in
 * doubt, and shows as aborting until the late reply (libkvd then closes it) or the end of
 * the session.
 *
 * Finding and holding wait for their result, and use the submission ring. The result is a
 * word of the status page, which an awake daemon writes within microseconds, so it is
 * polled for a while before the thread sleeps. The daemon may have
 * been woken on the caller's core and be delayed by this polling (without pauses the
 * daemon would take more than its share), so the core is yielded between polls, but not
 * before an awake daemon would have answered, since other tasks may keep the core.
 */
#include "lib/client.h"

#include <sched.h>
#include <string.h>
#include <sys/random.h>

#include "daemon/base/clock.h"
#include "daemon/base/hex.h"
#include "lib/client_splice.h"
#include "proto/kvd_ring.h"

#define SPIN_NS UINT64_C(50000) /* polling time before a wait */
#define KEEP_NS UINT64_C(10000) /* of it, without yielding the core */
#define LEASE_MS 10000u		/* as the command's preset */

struct kvd_hold {
	struct client_slot slot; /* used if `numbered` */
	struct kvd_found found;
	uint64_t first;
	uint8_t secret[KVD_HOLD_SECRET_BYTES];
};

struct kvd_move {
	struct client_slot slot;
	bool fetches, spliced;
};

/* ---- ids ------------------------------------------------------------------------- */

static int space_enter(struct kvd_space *space, const struct kvd_call *call)
{
	int r = client_begin(space->object.client, call);

	return r ? r : client_object_usable(&space->object, "space");
}

static int chunks_check(struct kvd_client *client, const struct kvd_chunks *chunks)
{
	if (chunks->count == 0 || chunks->count > 4096)
		return client_fail(client, KVD_E_INVAL, "chunks: %zu; must be 1 to 4096",
				   chunks->count);
	return 0;
}

static void text_chunks(struct text *text, const struct kvd_space *space,
			const struct kvd_chunks *chunks)
{
	const uint8_t *ids = chunks->ids;

	out_number(text, "space", space->object.id);
	out_array(text, "ids");
	for (size_t i = 0; i < chunks->count; i++)
		out_hex(text, NULL, ids + i * KVD_CHUNK_ID_BYTES, KVD_CHUNK_ID_BYTES);
	out_close(text, ']');
	out_some(text, "first", chunks->first);
}

/* ---- finding ---------------------------------------------------------------------- */

/* A slot with a waiting caller in this file. */
static void asked_fini(struct client_object *object)
{
	(void)object;
}

/* A find with a result has freed its slot. */
static void asked_end(struct client_slot *slot, bool answered)
{
	if (slot->numbered && !answered) {
		struct kvd_error why = slot->object.client->error;

		(void)client_slot_tell(slot, KVD_RING_RELEASE);
		slot->object.client->error = why; /* the find's, not the report's */
	}
	client_slot_fini(slot);
	client_object_unref(&slot->object);
}

static bool state_ends(int state)
{
	return state == KVD_SUCCESS || state == KVD_FAILED;
}

/* Polls for a while; the last state read. */
static int slot_spin(const struct client_slot *slot)
{
	uint64_t begin_ns = clock_ns(), spun_ns = 0;
	int state;

	for (;;) {
		state = client_slot_state(slot);
		if (state_ends(state) || spun_ns >= SPIN_NS)
			return state;
		if (spun_ns >= KEEP_NS)
			sched_yield();
		spun_ns = clock_ns() - begin_ns;
	}
}

/* What a call that waits needs before it makes its slot. */
static int ask_enter(struct kvd_space *space, int timeout_ms)
{
	const struct kvd_call call = {.timeout_ms = timeout_ms};
	int r = space_enter(space, &call);

	return r ? r : client_ring_begin(space->object.client);
}

/* Submit the entry and wait for its word: 0 when it is KVD_SUCCESS. */
static int slot_ask(struct client_slot *slot, struct kvd_ring_entry *entry,
		    const struct client_part *parts, size_t count, int timeout_ms)
{
	struct kvd_client *client = slot->object.client;
	int state, r = client_slot_make(slot, entry, parts, count, NULL);
	struct kvd_error why = {0};

	if (r)
		return r;
	slot->number = slot->object.id;
	state = slot_spin(slot);
	if (!state_ends(state))
		state = client_slot_wait(slot, KVD_SUCCESS, timeout_ms);
	if (state == KVD_SUCCESS)
		return 0;
	if (state < 0)
		return client_fail(client, -state, "the daemon did not answer in time");
	r = client_slot_error(slot, timeout_ms, &why);
	if (!r && why.code)
		client->error = why;
	else if (!r)
		r = client_fail(client, KVD_E_STATE, "refused");
	return r ? r : -why.code;
}

static int slot_found(const struct client_slot *slot, struct kvd_found *found_p,
		      uint64_t *first_p)
{
	struct kvd_room_status st;

	if (client_slot_read(slot, &st) < 0)
		return client_fail(slot->object.client, KVD_E_LOST,
				   "the session has ended");
	*found_p = (struct kvd_found){
		.chunks = st.total, .tokens = st.bytes, .remote = st.rows};
	*first_p = st.first_token < 0 ? 0 : (uint64_t)st.first_token;
	return 0;
}

int kvd_find(struct kvd_space *space, const struct kvd_chunks *chunks, int timeout_ms,
	     struct kvd_found *found_p)
{
	struct client_part part = {chunks->ids, chunks->count * KVD_CHUNK_ID_BYTES};
	struct kvd_ring_entry entry = {.op = KVD_RING_FIND,
				       .a = space->object.id,
				       .c = chunks->first,
				       .n0 = (uint32_t)chunks->count,
				       .bytes = (uint32_t)part.bytes};
	struct client_slot slot = {0};
	uint64_t first;
	int r = ask_enter(space, timeout_ms);

	*found_p = (struct kvd_found){0};
	if (!r)
		r = chunks_check(space->object.client, chunks);
	if (r)
		return r;
	client_object_init(space->object.client, &slot.object, CLIENT_MOVE, asked_fini);
	client_slot_init(&slot, 0);
	r = slot_ask(&slot, &entry, &part, 1, timeout_ms);
	if (!r)
		r = slot_found(&slot, found_p, &first);
	asked_end(&slot, r == 0);
	return r;
}

int kvd_drop(struct kvd_space *space, const struct kvd_chunks *chunks, int timeout_ms)
{
	struct kvd_client *client = space->object.client;
	struct kvd_call call = {.timeout_ms = timeout_ms};
	struct client_op op;
	int r = space_enter(space, &call);

	if (!r)
		r = chunks_check(client, chunks);
	if (r)
		return r;
	client_op_begin(client, &op, "chunk.drop");
	text_chunks(&op.text, space, chunks);
	return client_op_run(client, &op, &call);
}

/* ---- holds ----------------------------------------------------------------------- */

static void hold_fini(struct client_object *object)
{
	struct kvd_hold *hold = container_of(object, struct kvd_hold, slot.object);

	explicit_bzero(hold->secret, sizeof(hold->secret));
	client_slot_fini(&hold->slot);
	mem_free(hold);
}

/* chunks NULL: join by the secret; *entry has the op and its own members. */
static int hold_make(struct kvd_space *space, struct kvd_ring_entry *entry,
		     const struct kvd_chunks *chunks, const void *secret,
		     uint32_t lease_ms, int timeout_ms, struct kvd_hold **hold_p)
{
	struct kvd_client *client = space->object.client;
	struct kvd_hold *hold = mem_zalloc(sizeof(*hold));
	struct client_part parts[2] = {{NULL, KVD_HOLD_SECRET_BYTES}, {NULL, 0}};
	struct kvd_error why;
	int r = 0;

	if (!hold)
		return client_fail_nomem(client);
	client_object_init(client, &hold->slot.object, CLIENT_HOLD, hold_fini);
	client_slot_init(&hold->slot, 0);
	parts[0].data = hold->secret;
	if (chunks) {
		parts[1] = (struct client_part){chunks->ids,
						chunks->count * KVD_CHUNK_ID_BYTES};
		entry->n0 = (uint32_t)chunks->count;
		entry->c = chunks->first;
		/* that of a joined hold is the daemon's, which does not disclose it */
		if (getentropy(hold->secret, sizeof(hold->secret)) < 0)
			r = client_fail(client, KVD_E_IO, "random bytes: not available");
	} else {
		memcpy(hold->secret, secret, sizeof(hold->secret));
	}
	entry->a = space->object.id;
	entry->b = lease_ms ? lease_ms : LEASE_MS;
	entry->bytes = (uint32_t)(parts[0].bytes + parts[1].bytes);
	if (!r)
		r = slot_ask(&hold->slot, entry, parts, 2, timeout_ms);
	if (!r)
		r = slot_found(&hold->slot, &hold->found, &hold->first);
	if (!r) {
		*hold_p = hold;
		return 0;
	}
	why = client->error;
	if (hold->slot.numbered)
		/* it may still be created */
		(void)client_slot_tell(&hold->slot, KVD_RING_RELEASE);
	client->error = why; /* the error of the hold, not of the report */
	client_object_unref(&hold->slot.object);
	return r;
}

int kvd_hold_open(struct kvd_space *space, const struct kvd_chunks *chunks,
		  uint32_t lease_ms, uint32_t remote_ms, int timeout_ms,
		  struct kvd_hold **hold_p)
{
	struct kvd_ring_entry entry = {
		.op = remote_ms ? KVD_RING_HOLD_REMOTE : KVD_RING_HOLD, .n1 = remote_ms};
	int r = ask_enter(space, timeout_ms);

	*hold_p = NULL;
	if (!r)
		r = chunks_check(space->object.client, chunks);
	return r ? r
		 : hold_make(space, &entry, chunks, NULL, lease_ms, timeout_ms, hold_p);
}

int kvd_hold_join(struct kvd_space *space, const void *secret, uint32_t lease_ms,
		  int timeout_ms, struct kvd_hold **hold_p)
{
	struct kvd_ring_entry entry = {.op = KVD_RING_HOLD};
	int r = ask_enter(space, timeout_ms);

	*hold_p = NULL;
	return r ? r
		 : hold_make(space, &entry, NULL, secret, lease_ms, timeout_ms, hold_p);
}

int kvd_hold_found(const struct kvd_hold *hold, struct kvd_found *found_p,
		   uint64_t *first_p)
{
	if (client_object_phase(&hold->slot.object) != CLIENT_READY)
		return -KVD_E_STATE;
	*found_p = hold->found;
	*first_p = hold->first;
	return 0;
}

uint64_t client_hold_id(const struct kvd_hold *hold)
{
	return client_object_phase(&hold->slot.object) == CLIENT_READY
		       ? hold->slot.object.id
		       : 0;
}

int kvd_hold_secret(const struct kvd_hold *hold, void *secret)
{
	if (client_object_phase(&hold->slot.object) != CLIENT_READY)
		return -KVD_E_STATE;
	memcpy(secret, hold->secret, KVD_HOLD_SECRET_BYTES);
	return 0;
}

struct holders_out {
	struct kvd_holder *holders;
	int count;
};

static int holders_reply(struct client_request *req, const cJSON *reply)
{
	const cJSON *list = cJSON_GetObjectItemCaseSensitive(reply, "holders"), *one;
	struct holders_out *out = req->out;

	cJSON_ArrayForEach(one, list) {
		struct kvd_holder *holder = &out->holders[out->count];
		const char *instance = cJSON_GetStringValue(
			cJSON_GetObjectItemCaseSensitive(one, "instance"));

		if (out->count == KVD_HOLDERS_MAX)
			break;
		if (!instance || strlen(instance) != 2 * sizeof(holder->instance) ||
		    !hex_read(instance, holder->instance, sizeof(holder->instance)) ||
		    !client_get_u64(one, "first", &holder->first) ||
		    !client_get_u64(one, "chunks", &holder->chunks) ||
		    !client_get_u64(one, "tokens", &holder->tokens))
			return client_fail(req->client, KVD_E_PROTO,
					   "chunk.holders: the reply lacks its members");
		holder->gpu = cJSON_IsTrue(cJSON_GetObjectItemCaseSensitive(one, "gpu"));
		out->count++;
	}
	return 0;
}

int kvd_hold_holders(struct kvd_hold *hold, struct kvd_holder holders[KVD_HOLDERS_MAX],
		     int timeout_ms)
{
	struct client_object *object = &hold->slot.object;
	struct kvd_client *client = object->client;
	struct kvd_call call = {.timeout_ms = timeout_ms};
	struct holders_out out = {.holders = holders};
	struct client_op op;
	int r = client_begin(client, &call);

	if (!r)
		r = client_object_usable(object, "hold");
	if (r || !hold->found.remote)
		return r;
	client_op_begin(client, &op, "chunk.holders");
	out_number(&op.text, "hold", object->id);
	r = client_op_ask(client, &op, &call, holders_reply, &out);
	return r < 0 ? r : out.count;
}

int kvd_hold_close(struct kvd_hold *hold, const struct kvd_call *call)
{
	struct client_object *object = &hold->slot.object;
	int r = client_enter(object->client, client_blocks(call));

	if (!r)
		r = client_slot_tell(&hold->slot, KVD_RING_RELEASE);
	return r ? r : client_object_forget(object, call);
}

/* ---- moves ----------------------------------------------------------------------- */

static void chunk_move_fini(struct client_object *object)
{
	struct kvd_move *move = container_of(object, struct kvd_move, slot.object);

	client_slot_fini(&move->slot);
	mem_free(move);
}

static void chunk_move_undo(struct client_slot *slot)
{
	struct client_op op;

	client_op_begin(slot->object.client, &op, "chunk.close");
	out_number(&op.text, "move", slot->object.id);
	op.forced = true;
	client_op_run(slot->object.client, &op, NULL);
}

static int chunk_move_made(struct client_request *req, int result, const cJSON *reply)
{
	struct kvd_move *move = container_of(req->object, struct kvd_move, slot.object);
	uint64_t id = 0;

	if (!result && !client_get_u64(reply, "move", &id))
		result = client_fail(req->client, KVD_E_PROTO, "the reply names no move");
	if (!result)
		move->slot.number = req->object->id = id;
	return client_slot_made(req, result, reply, chunk_move_undo);
}

static int chunk_move_check(struct kvd_client *client, const struct kvd_move_args *args)
{
	if (!args->pool || !kvd_pool_id(args->pool))
		return client_fail(client, KVD_E_STATE, "pool: not registered");
	if (!args->view_count)
		return client_fail(client, KVD_E_INVAL, "views: missing");
	return client_wait_check(client, &args->wait);
}

/* By the ring: `ids` before the views, in entry->n0. */
static int chunk_move_post(struct kvd_client *client, struct kvd_ring_entry *entry,
			   const void *ids, const struct kvd_move_args *args,
			   struct kvd_move **move_p)
{
	struct kvd_move *move;
	struct text text = {0};
	int r = client_post_begin(client, entry->op);

	if (r)
		return r;
	move = mem_zalloc(sizeof(*move));
	if (!move)
		return client_fail_nomem(client);
	client_object_init(client, &move->slot.object, CLIENT_MOVE, chunk_move_fini);
	client_slot_init(&move->slot, entry->a);
	client_text_wait(&text, NULL, &args->wait);
	entry->b = kvd_pool_id(args->pool);
	r = client_post_views(&move->slot, entry, ids, args->views, args->view_count,
			      &text);
	if (r) {
		client_object_unref(&move->slot.object);
		return r;
	}
	*move_p = move;
	return 0;
}

static int chunk_move_send(struct kvd_client *client, struct client_op *op,
			   const struct kvd_call *call, struct kvd_move **move_p)
{
	struct kvd_move *move = mem_zalloc(sizeof(*move));
	int r;

	if (!move) {
		text_fini(&op->text);
		return client_fail_nomem(client);
	}
	client_object_init(client, &move->slot.object, CLIENT_MOVE, chunk_move_fini);
	client_slot_init(&move->slot, 0);
	op->object = &move->slot.object;
	op->finish = chunk_move_made;
	*move_p = move;
	r = client_op_run(client, op, call);
	/* in doubt it is the caller's nevertheless: its pages may be in motion */
	if (r && client_object_phase(&move->slot.object) != CLIENT_DOUBT) {
		*move_p = NULL;
		client_object_unref(&move->slot.object);
	}
	return r;
}

/* The text of args after the command's own members. */
static int chunk_move_ask(struct kvd_client *client, struct client_op *op,
			  const struct kvd_move_args *args, const struct kvd_call *call,
			  struct kvd_move **move_p)
{
	out_number(&op->text, "pool", kvd_pool_id(args->pool));
	client_text_views(&op->text, args->views, args->view_count);
	client_text_wait(&op->text, "wait", &args->wait);
	out_some(&op->text, "deadline_ms", args->deadline_ms);
	return chunk_move_send(client, op, call, move_p);
}

/* By the command or the ring's PUT with `flags`. */
static int chunk_give(struct kvd_space *space, const struct kvd_chunks *chunks,
		      const struct kvd_move_args *args, const char *command, int flags,
		      const struct kvd_call *call, struct kvd_move **move_p)
{
	struct kvd_client *client = space->object.client;
	struct client_op op;
	int r = space_enter(space, call);

	*move_p = NULL;
	if (!r)
		r = chunks_check(client, chunks);
	if (!r)
		r = chunk_move_check(client, args);
	if (!r && args->deadline_ms)
		r = client_fail(client, KVD_E_INVAL, "deadline_ms: only for a fetch");
	if (r)
		return r;
	if (call && call->post) {
		struct kvd_ring_entry entry = {.op = KVD_RING_PUT,
					       .a = space->object.id,
					       .c = chunks->first,
					       .n0 = (uint32_t)chunks->count,
					       .flags = flags};

		return chunk_move_post(client, &entry, chunks->ids, args, move_p);
	}
	client_op_begin(client, &op, command);
	text_chunks(&op.text, space, chunks);
	if (args->durable)
		out_bool(&op.text, "durable", true);
	return chunk_move_ask(client, &op, args, call, move_p);
}

int kvd_put(struct kvd_space *space, const struct kvd_chunks *chunks,
	    const struct kvd_move_args *args, const struct kvd_call *call,
	    struct kvd_move **move_p)
{
	return chunk_give(space, chunks, args, "chunk.put",
			  args->durable ? KVD_RING_DURABLE : 0, call, move_p);
}

int kvd_publish(struct kvd_space *space, const struct kvd_chunks *chunks,
		const struct kvd_move_args *args, const struct kvd_call *call,
		struct kvd_move **move_p)
{
	*move_p = NULL;
	if (args->durable)
		return client_fail(space->object.client, KVD_E_INVAL,
				   "durable: only for a put");
	return chunk_give(space, chunks, args, "chunk.publish", KVD_RING_PUBLISH, call,
			  move_p);
}

int kvd_withdraw(struct kvd_space *space, const struct kvd_chunks *chunks,
		 uint32_t grace_ms, const struct kvd_call *call, struct kvd_move **move_p)
{
	struct kvd_client *client = space->object.client;
	struct client_op op;
	int r = space_enter(space, call);

	*move_p = NULL;
	if (!r)
		r = chunks_check(client, chunks);
	if (r)
		return r;
	client_op_begin(client, &op, "chunk.withdraw");
	text_chunks(&op.text, space, chunks);
	out_number(&op.text, "grace_ms", grace_ms);
	return chunk_move_send(client, &op, call, move_p);
}

int kvd_fetch(struct kvd_hold *hold, const struct kvd_move_args *args,
	      const struct kvd_call *call, struct kvd_move **move_p)
{
	struct kvd_client *client = hold->slot.object.client;
	struct client_op op;
	int r = client_begin(client, call);

	*move_p = NULL;
	if (!r)
		r = client_object_usable(&hold->slot.object, "hold");
	if (!r)
		r = chunk_move_check(client, args);
	if (!r && args->durable)
		r = client_fail(client, KVD_E_INVAL, "durable: only for a put");
	if (!r && args->views->select && !(call && call->post))
		r = client_fail(client, KVD_E_INVAL, "select: needs call.post");
	if (r)
		return r;
	if (call && call->post) {
		struct kvd_ring_entry entry = {.op = KVD_RING_FETCH,
					       .a = hold->slot.object.id,
					       .c = args->deadline_ms};

		r = chunk_move_post(client, &entry, NULL, args, move_p);
	} else {
		client_op_begin(client, &op, "chunk.fetch");
		out_number(&op.text, "hold", hold->slot.object.id);
		r = chunk_move_ask(client, &op, args, call, move_p);
	}
	if (*move_p)
		(*move_p)->fetches = true;
	return r;
}

int kvd_move_splice(struct kvd_move *move, const struct kvd_splice *splice)
{
	struct kvd_client *client = move->slot.object.client;
	int r = client_enter(client, false);
	bool written = false;

	if (!r && (!move->fetches || kvd_move_state(move) != KVD_SUCCESS))
		r = client_fail(client, KVD_E_STATE,
				"move: not a fetch that has succeeded");
	if (!r && move->spliced)
		r = client_fail(client, KVD_E_STATE,
				"move: its keys were rotated before");
	if (!r)
		r = client_splice(client, splice, &written);
	move->spliced |= written;
	return r;
}

int kvd_move_state(const struct kvd_move *move)
{
	return client_slot_state(&move->slot);
}

int kvd_move_read(const struct kvd_move *move, struct kvd_room_status *status_p)
{
	return client_slot_read(&move->slot, status_p);
}

int kvd_move_wait(struct kvd_move *move, int state, int timeout_ms)
{
	return client_slot_wait(&move->slot, state, timeout_ms);
}

static int facts_reply(struct client_request *req, const cJSON *reply)
{
	struct kvd_move_facts *facts = req->out;

	if (cJSON_GetObjectItemCaseSensitive(reply, "error"))
		client_error_parse(&facts->error, reply);
	if ((!client_get_u64(reply, "chunks", &facts->chunks) ||
	     !client_get_u64(reply, "done", &facts->done) ||
	     !client_get_u64(reply, "prefix_tokens", &facts->prefix_tokens)) &&
	    !facts->error.code) /* refused: it moved nothing */
		return client_fail(req->client, KVD_E_PROTO,
				   "chunk.move: the reply lacks its members");
	if (!client_get_u64(reply, "there", &facts->there) ||
	    !client_get_u64(reply, "left_out", &facts->left_out))
		facts->there = facts->left_out = 0; /* a fetch */
	return 0;
}

int kvd_move_show(struct kvd_move *move, int timeout_ms, struct kvd_move_facts *facts_p)
{
	struct client_object *object = &move->slot.object;
	struct kvd_client *client = object->client;
	struct kvd_call call = {.timeout_ms = timeout_ms};
	struct client_op op;
	int r = client_begin(client, &call);

	*facts_p = (struct kvd_move_facts){0};
	if (!r)
		r = client_object_usable(object, "move");
	if (r)
		return r;
	client_op_begin(client, &op, "chunk.move");
	out_number(&op.text, "move", object->id);
	return client_op_ask(client, &op, &call, facts_reply, facts_p);
}

/* If the session ends during the request, it counts as closed. */
static int chunk_move_closed(struct client_request *req, int result, const cJSON *reply)
{
	return client_object_gone(req, result == -KVD_E_LOST ? 0 : result, reply);
}

/* CANCEL, RELEASE. Not needed for a move that failed, is in doubt and closed by its
 * late reply, or has ended with its session. */
static int move_stop(struct kvd_move *move, enum kvd_ring_op what,
		     const struct kvd_call *call)
{
	struct client_object *object = &move->slot.object;
	struct kvd_client *client = object->client;
	bool closes = what == KVD_RING_RELEASE;
	int r = client_enter(client, client_blocks(call));
	struct client_op op;
	bool told;

	if (r)
		return r;
	told = client_object_phase(object) != CLIENT_READY ||
	       !client_object_current(object);
	if (!told && move->slot.numbered) {
		r = client_slot_tell(&move->slot, what);
		if (r)
			return r;
		told = true;
	}
	if (told)
		return closes ? client_object_forget(object, call)
			      : client_op_local(client, call);
	client_op_begin(client, &op, closes ? "chunk.close" : "chunk.abort");
	out_number(&op.text, "move", object->id);
	if (closes) {
		op.object = object;
		op.finish = chunk_move_closed;
	}
	return client_op_run(client, &op, call);
}

int kvd_move_abort(struct kvd_move *move, const struct kvd_call *call)
{
	return move_stop(move, KVD_RING_CANCEL, call);
}

int kvd_move_close(struct kvd_move *move, const struct kvd_call *call)
{
	return move_stop(move, KVD_RING_RELEASE, call);
}
