/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Each seat has a slot of the status page while a request of it is in progress or has not
 * been followed by another: the terminal word frees it for the daemon, and the next
 * request of the seat takes a new one.
 */
#include "lib/client.h"

#include <string.h>

#include "daemon/base/clock.h"
#include "lib/kvd_attend.h"
#include "proto/kvd_ring.h"

#define PARTS_MAX 64u
#define SEATS_MAX 256u
#define SELECT_MAX (1u << 20) /* of a request; also the daemon's limit */
#define REPLICATE_FROM 8u
#define DEADLINE_US 1000000u /* unless the caller gives one */

struct kvd_attend {
	struct client_object object;
	struct kvd_seat seat;
	uint32_t seats, rows, heads;
	struct client_slot *slots; /* of each seat */
	uint8_t *address;	   /* of the first seat; NULL: no ordered requests */
	struct client_guard *guard;
};

static void seat_fini(struct client_object *object)
{
	(void)object; /* it is embedded in its context */
}

static void client_attend_fini(struct client_object *object)
{
	struct kvd_attend *attend = container_of(object, struct kvd_attend, object);

	client_guard_free(attend->guard);
	for (uint32_t i = 0; i < attend->seats; i++) {
		client_slot_fini(&attend->slots[i]);
		client_object_unref(&attend->slots[i].object);
	}
	mem_free(attend->slots);
	mem_free(attend);
}

static struct kvd_attend *attend_new(struct kvd_client *client, uint32_t seats)
{
	struct kvd_attend *attend = mem_zalloc(sizeof(*attend));

	if (!attend)
		return NULL;
	attend->slots = mem_calloc(seats, sizeof(*attend->slots));
	if (!attend->slots) {
		mem_free(attend);
		return NULL;
	}
	client_object_init(client, &attend->object, CLIENT_ATTEND, client_attend_fini);
	for (; attend->seats < seats; attend->seats++) {
		struct client_slot *slot = &attend->slots[attend->seats];

		client_object_init(client, &slot->object, CLIENT_MOVE, seat_fini);
		client_slot_init(slot, 0);
	}
	return attend;
}

void client_attends_lost(struct kvd_client *client)
{
	struct client_object *object;

	list_foreach(object, &client->objects[CLIENT_ATTEND], link)
		client_guard_lose(container_of(object, struct kvd_attend, object)->guard);
}

/* ---- opening ---------------------------------------------------------------------- */

static void text_rope(struct text *text, const struct kvd_rope *rope)
{
	out_object(text, "rope");
	out_number(text, "first", rope->first);
	out_number(text, "dims", rope->dims);
	out_text(text, "pairs", rope->pairs == KVD_HALVES ? "halves" : "interleaved");
	out_array(text, "inv_freq");
	for (uint32_t i = 0; i < rope->dims / 2; i++)
		out_double(text, NULL, rope->inv_freq[i]);
	text_puts(text, "]}");
}

static void attend_text(struct text *text, const struct kvd_attend_args *a)
{
	static const char *const types[] = {"bf16", "fp16", "fp32", "fp8_e4m3"};

	out_number(text, "region", kvd_region_id(a->region));
	out_number(text, "offset", a->offset);
	out_number(text, "rows", a->rows);
	out_number(text, "seats", a->seats);
	out_text(text, "kind", a->kind == KVD_MLA ? "mla" : "gqa");
	out_text(text, "q_type", types[a->q_type]);
	out_text(text, "kv_type", types[a->kv_type]);
	out_text(text, "out_type", a->out_bf16 ? "bf16" : "fp32");
	out_number(text, "heads", a->heads);
	out_number(text, "kv_heads", a->kv_heads);
	out_number(text, "first_head", a->first_head);
	out_number(text, "dqk", a->dqk);
	out_number(text, "dv", a->dv);
	out_double(text, "scale", a->scale);
	out_double(text, "softcap", a->softcap);
	out_text(text, "view", a->view);
	out_text(text, "key", a->key);
	out_text(text, "value", a->value);
	out_text(text, "key_scale", a->key_scale);
	out_text(text, "value_scale", a->value_scale);
	if (a->rope.dims)
		text_rope(text, &a->rope);
}

/* No request is in progress, and no stream waits for one. */
static int guard_make(struct kvd_attend *attend)
{
	struct kvd_client *client = attend->object.client;
	struct client_order *orders = mem_calloc(attend->seats, sizeof(*orders));

	for (uint32_t i = 0; orders && i < attend->seats; i++) {
		uint8_t *seat = attend->address + i * attend->seat.bytes;

		orders[i].done = (void *)(seat + attend->seat.done);
		atomic_store(orders[i].done, 0);
		atomic_store((_Atomic uint64_t *)(void *)(seat + attend->seat.ready), 0);
	}
	if (!orders || client_guard_new(orders, attend->seats, client->map->pidfd,
					&attend->guard) < 0)
		return client_fail_nomem(client);
	return 0;
}

static int attend_made(struct client_request *req, int result, const cJSON *reply)
{
	struct kvd_attend *attend = container_of(req->object, struct kvd_attend, object);
	struct kvd_seat *s = &attend->seat;

	if (!result &&
	    (!client_get_u64(reply, "seat_bytes", &s->bytes) ||
	     !client_get_u64(reply, "q", &s->q) || !client_get_u64(reply, "o", &s->o) ||
	     !client_get_u64(reply, "m", &s->m) || !client_get_u64(reply, "l", &s->l) ||
	     !client_get_u64(reply, "ready", &s->ready) ||
	     !client_get_u64(reply, "done", &s->done)))
		result = client_fail(req->client, KVD_E_PROTO,
				     "attention.open: the reply lacks its members");
	if (!result && attend->address && !attend->guard)
		result = guard_make(attend);
	return client_object_made(req, result, reply);
}

static int client_attend_check(struct kvd_client *client, const struct kvd_attend_args *a)
{
	if (!a->region || !kvd_region_id(a->region))
		return client_fail(client, KVD_E_STATE, "region: not registered");
	if (a->seats == 0 || a->seats > SEATS_MAX)
		return client_fail(client, KVD_E_RANGE, "seats: %u is not in 1 to %u",
				   a->seats, SEATS_MAX);
	if (!a->key || (a->kind == KVD_GQA && !a->value))
		return client_fail(client, KVD_E_INVAL, "%s: missing",
				   a->key ? "value" : "key");
	if ((unsigned int)a->kind > KVD_GQA || (unsigned int)a->q_type > KVD_FP8_E4M3 ||
	    (unsigned int)a->kv_type > KVD_FP8_E4M3 ||
	    (a->rope.dims && !a->rope.inv_freq) || a->heads == 0)
		return client_fail(client, KVD_E_INVAL,
				   "kind, q_type, kv_type, heads or rope: unknown");
	return 0;
}

int kvd_attend_open(struct kvd_client *client, const struct kvd_attend_args *args,
		    const struct kvd_call *call, struct kvd_attend **attend_p)
{
	struct kvd_attend *attend;
	struct client_op op;
	int r = client_begin(client, call);

	*attend_p = NULL;
	if (!r)
		r = client_attend_check(client, args);
	if (r)
		return r;
	attend = attend_new(client, args->seats);
	if (!attend)
		return client_fail_nomem(client);
	attend->rows = args->rows;
	attend->heads = args->heads;
	attend->address = args->address;
	client_op_begin(client, &op, "attention.open");
	attend_text(&op.text, args);
	op.object = &attend->object;
	op.finish = attend_made;
	*attend_p = attend;
	r = client_op_run(client, &op, call);
	if (r) {
		*attend_p = NULL;
		client_object_unref(&attend->object);
	}
	return r;
}

int kvd_attend_seat(const struct kvd_attend *attend, struct kvd_seat *seat_p)
{
	if (client_object_phase(&attend->object) != CLIENT_READY)
		return -KVD_E_STATE;
	*seat_p = attend->seat;
	return 0;
}

int kvd_attend_close(struct kvd_attend *attend, const struct kvd_call *call)
{
	struct kvd_client *client = attend->object.client;

	for (uint32_t i = 0; i < attend->seats; i++) {
		if (attend->slots[i].numbered && attend->slots[i].map == client->map)
			client_ring_slot_back(client, &attend->slots[i]);
		attend->slots[i].numbered = false;
	}
	return client_object_close(&attend->object, call);
}

/* ---- posts ------------------------------------------------------------------------ */

/* Of the daemon. */
static int seat_state(const struct client_slot *slot)
{
	int state = slot->numbered ? client_slot_state(slot) : KVD_BOOTSTRAPPING;

	return slot->numbered && state == KVD_BOOTSTRAPPING ? KVD_WAITING_FOR_INPUT
							    : state;
}

static bool seat_lost(const struct kvd_attend *attend, uint32_t seat)
{
	return attend->guard && client_order_lost(attend->guard, seat);
}

static struct client_slot *seat_slot(const struct kvd_attend *attend, uint32_t seat)
{
	return seat < attend->seats ? &attend->slots[seat] : NULL;
}

static int parts_fill(struct kvd_attend *attend, const struct kvd_part *parts,
		      size_t count, struct kvd_ring_part *out, struct client_part *pieces)
{
	struct kvd_client *client = attend->object.client;
	uint64_t chosen = 0;

	for (size_t i = 0; i < count; i++) {
		const struct kvd_part *p = &parts[i];

		if (!client_hold_id(p->hold))
			return client_fail(client, KVD_E_STATE,
					   "parts[%zu].hold: no reply yet", i);
		if (p->rows > attend->rows ||
		    (uint64_t)p->rows / attend->heads * p->per_token >
			    SELECT_MAX - chosen)
			return client_fail(client, KVD_E_RANGE,
					   "parts[%zu]: at most %u rows, and %u "
					   "selected tokens in all parts",
					   i, attend->rows, SELECT_MAX);
		chosen += (uint64_t)p->rows / attend->heads * p->per_token;
		if (p->per_token && !p->select)
			return client_fail(client, KVD_E_INVAL, "parts[%zu].select: NULL",
					   i);
		out[i] = (struct kvd_ring_part){.hold = client_hold_id(p->hold),
						.row = p->row,
						.rows = p->rows,
						.first = p->first,
						.count = p->count,
						.tokens = p->tokens,
						.delta = p->delta,
						.per_token = p->per_token};
		pieces[i + 1] = (struct client_part){
			p->select, (size_t)(p->rows / attend->heads) * p->per_token *
					   sizeof(uint32_t)};
	}
	pieces[0] = (struct client_part){out, count * sizeof(*out)};
	return 0;
}

/* Of the request before, which has ended. */
static void seat_reset(struct kvd_client *client, struct client_slot *slot)
{
	if (slot->numbered && slot->map == client->map)
		client_ring_slot_back(client, slot);
	slot->numbered = false;
	if (slot->map != client->map) { /* of an earlier session */
		client_slot_fini(slot);
		client_slot_init(slot, 0);
	}
	slot->object.serial = client->serial;
}

/* `ordered`: entry->c is set. A refusal changes nothing of the seat's last request, but a
 * full ring, which comes last, makes the seat one without a request. */
static int client_attend_post(struct kvd_attend *attend, struct kvd_ring_entry *entry,
			      const struct kvd_part *parts, size_t part_count,
			      bool ordered)
{
	struct kvd_client *client = attend->object.client;
	struct client_slot *slot = &attend->slots[entry->n0];
	struct kvd_ring_part out[PARTS_MAX];
	struct client_part pieces[PARTS_MAX + 1] = {{NULL, 0}};
	int r = parts_fill(attend, parts, part_count, out, pieces);

	if (r)
		return r;
	seat_reset(client, slot);
	for (size_t i = 0; i <= part_count; i++)
		entry->bytes += (uint32_t)pieces[i].bytes;
	if (ordered)
		entry->c = client_order_next(attend->guard, entry->n0,
					     clock_ns() + entry->n2 * UINT64_C(1000));
	else if (attend->guard)
		client_order_none(attend->guard, entry->n0);
	r = client_slot_make(slot, entry, pieces, part_count + 1, NULL);
	if (!r)
		slot->number = slot->object.id;
	else if (ordered)
		client_order_none(attend->guard, entry->n0);
	return r;
}

static int attend_begin(struct kvd_attend *attend, uint32_t seat, size_t part_count)
{
	struct kvd_client *client = attend->object.client;
	const struct client_slot *slot = seat_slot(attend, seat);
	int state, r = client_post_begin(client, KVD_RING_ATTEND);

	if (!r)
		r = client_object_usable(&attend->object, "attend");
	if (r)
		return r;
	if (!slot || part_count == 0 || part_count > PARTS_MAX)
		return client_fail(client, KVD_E_RANGE,
				   "seat %u of %u, %zu parts; 1 to %u parts at a time",
				   seat, attend->seats, part_count, PARTS_MAX);
	state = seat_state(slot);
	if (state == KVD_TRANSFERRING || state == KVD_WAITING_FOR_INPUT)
		return client_fail(client, KVD_E_BUSY,
				   "seat %u: in use; wait for its terminal state", seat);
	return 0;
}

int kvd_attend_post(struct kvd_attend *attend, uint32_t seat, uint32_t layer,
		    const struct kvd_part *parts, size_t part_count, uint32_t deadline_us)
{
	struct kvd_ring_entry entry = {.op = KVD_RING_ATTEND,
				       .a = attend->object.id,
				       .b = layer,
				       .n0 = seat,
				       .n1 = (uint32_t)part_count,
				       .n2 = deadline_us};
	int r = attend_begin(attend, seat, part_count);

	return r ? r : client_attend_post(attend, &entry, parts, part_count, false);
}

int kvd_attend_order(struct kvd_attend *attend, uint32_t seat, uint32_t layer,
		     const struct kvd_part *parts, size_t part_count,
		     uint32_t deadline_us, uint64_t *value_p)
{
	struct kvd_client *client = attend->object.client;
	struct kvd_ring_entry entry = {.op = KVD_RING_ATTEND,
				       .a = attend->object.id,
				       .b = layer,
				       .n0 = seat,
				       .n1 = (uint32_t)part_count,
				       .n2 = deadline_us ? deadline_us : DEADLINE_US};
	int r = attend_begin(attend, seat, part_count);

	*value_p = 0;
	if (r)
		return r;
	if (!attend->guard)
		return client_fail(client, KVD_E_STATE,
				   "attend: opened without the address of its seats");
	r = client_attend_post(attend, &entry, parts, part_count, true);
	if (!r)
		*value_p = entry.c;
	return r;
}

int kvd_attend_state(const struct kvd_attend *attend, uint32_t seat)
{
	const struct client_slot *slot = seat_slot(attend, seat);

	return !slot			 ? -KVD_E_RANGE
	       : seat_lost(attend, seat) ? KVD_FAILED
					 : seat_state(slot);
}

int kvd_attend_wait(struct kvd_attend *attend, uint32_t seat, int timeout_ms)
{
	struct client_slot *slot = seat_slot(attend, seat);
	int state = KVD_BOOTSTRAPPING;

	if (!slot)
		return client_fail(attend->object.client, KVD_E_RANGE, "seat %u of %u",
				   seat, attend->seats);
	if (slot->numbered)
		state = client_slot_wait(slot, KVD_SUCCESS, timeout_ms);
	return seat_lost(attend, seat) ? KVD_FAILED : state;
}

int kvd_attend_read(const struct kvd_attend *attend, uint32_t seat,
		    struct kvd_attend_facts *facts_p)
{
	const struct client_slot *slot = seat_slot(attend, seat);
	struct kvd_room_status st;

	*facts_p = (struct kvd_attend_facts){0};
	if (!slot || !slot->numbered)
		return -KVD_E_STATE;
	if (client_slot_read(slot, &st) < 0)
		return -KVD_E_GONE;
	facts_p->queue_us = st.bytes;
	facts_p->attend_us = st.moved_us;
	facts_p->daemons = (uint32_t)st.rows;
	facts_p->together = (uint32_t)st.total;
	facts_p->replicate = st.total > REPLICATE_FROM;
	facts_p->error = st.state == KVD_FAILED ? st.error : 0;
	facts_p->retryable = facts_p->error && st.retryable;
	if (seat_lost(attend, seat)) {
		facts_p->error = KVD_E_NOREPLY;
		facts_p->retryable = true;
	}
	return 0;
}

int kvd_attend_error(const struct kvd_attend *attend, uint32_t seat, int timeout_ms,
		     struct kvd_error *error_p)
{
	const struct client_slot *slot = seat_slot(attend, seat);

	*error_p = (struct kvd_error){0};
	if (!slot || !slot->numbered)
		return -KVD_E_STATE;
	if (!seat_lost(attend, seat))
		return client_slot_error(slot, timeout_ms, error_p);
	client_error_set(error_p, KVD_E_NOREPLY,
			 "seat %u: the daemon did not end the request in time", seat);
	return 0;
}

int kvd_attend_stop(struct kvd_attend *attend, uint32_t seat)
{
	struct kvd_client *client = attend->object.client;
	const struct client_slot *slot = seat_slot(attend, seat);
	struct kvd_ring_entry entry = {.op = KVD_RING_CANCEL};
	int r;

	if (!slot)
		return client_fail(client, KVD_E_RANGE, "seat %u of %u", seat,
				   attend->seats);
	if (!slot->numbered || kvd_lost(client) || slot->map != client->map)
		return 0;
	entry.a = slot->object.id;
	r = client_post_begin(client, KVD_RING_CANCEL);
	return r ? r : client_ring_put(client, &entry, NULL, 0, NULL);
}
