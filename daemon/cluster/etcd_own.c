/* SPDX-License-Identifier: Apache-2.0 */
/*
 * This daemon's publications: one transaction at a time for each place, with the record
 * and load desired when it starts, so that frequent changes are put at etcd's pace, and
 * the latest wins.
 *
 *   claim   if the place's record is missing, or is under our lease: put; else
 *           report its lease
 *   put     if it is there under our lease: put. Else it is claimed again
 *   delete  if it is there under our lease: delete
 *
 * The first claim waits for the lifetime of a lease: after that the lease of a dead
 * holder has expired. A remaining holder is another member, and the claim fails. Later,
 * when a place was lost with its lease, it is claimed until it is free.
 *
 *   IDLE -> CLAIMING -> HELD <-> PUTTING    HELD, LOST -> DELETING -> IDLE
 *   LOST -> CLAIMING                        any but IDLE -> LOST: unknown state
 */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "daemon/base/err.h"
#include "daemon/base/log.h"
#include "daemon/cluster/etcd_impl.h"
#include "daemon/cluster/roster.h"

#define OWN_CLAIM_AGAIN_NS LOOP_NS_PER_S
#define OWN_HELD_LONG 5u		      /* times */
#define OWN_CLAIM_MORE_NS (3 * LOOP_NS_PER_S) /* beyond a lease: etcd ends it late */

static const struct sm_state own_states[OWN_STATES] = {
	[OWN_IDLE] = {"idle", SM_TO(OWN_CLAIMING)},
	[OWN_CLAIMING] = {"claiming",
			  SM_TO(OWN_IDLE) | SM_TO(OWN_HELD) | SM_TO(OWN_LOST)},
	[OWN_HELD] = {"held", SM_TO(OWN_PUTTING) | SM_TO(OWN_DELETING) | SM_TO(OWN_LOST)},
	[OWN_PUTTING] = {"putting", SM_TO(OWN_HELD) | SM_TO(OWN_LOST)},
	[OWN_DELETING] = {"deleting", SM_TO(OWN_IDLE) | SM_TO(OWN_LOST)},
	[OWN_LOST] = {"lost", SM_TO(OWN_CLAIMING) | SM_TO(OWN_DELETING)},
};

static bool own_busy(const struct etcd_own *own)
{
	enum own_state state = (enum own_state)sm_state(&own->sm);

	return state == OWN_CLAIMING || state == OWN_PUTTING || state == OWN_DELETING;
}

/* A state without a request has none in flight, and the others have one. */
static bool own_has_its_request(const struct sm *sm, unsigned int from)
{
	const struct etcd_own *own = container_of(sm, struct etcd_own, sm);

	(void)from;
	return own_busy(own) == etcd_request_busy(&own->request);
}

static const struct sm_table own_table = {.name = "own",
					  .states = own_states,
					  .count = OWN_STATES,
					  .invariant = own_has_its_request};

/* ---- transactions ---- */

static void own_text_puts(struct text *body, const struct etcd_own *own, bool all)
{
	for (int side = 0; side < ETCD_SIDES; side++) {
		if (!own->text[side] || !(all || own->dirty & OWN_DIRTY(side)))
			continue;
		out_object(body, NULL);
		out_object(body, "request_put");
		etcd_put_key(body, "key", own->key[side]);
		etcd_put_key(body, "value", own->text[side]);
		out_id(body, "lease", own->etcd->lease.id);
		text_puts(body, "}}");
	}
}

static void own_text_if_ours(struct text *body, const struct etcd_own *own)
{
	text_puts(body, "{\"compare\":[{\"target\":\"LEASE\"");
	etcd_put_key(body, "key", own->key[ETCD_RECORDS]);
	out_id(body, "lease", own->etcd->lease.id);
	text_puts(body, "}],\"success\":[");
}

static void own_text_claim(struct text *body, const struct etcd_own *own)
{
	text_puts(body, "{\"compare\":[{\"target\":\"CREATE\",\"create_revision\":\"0\"");
	etcd_put_key(body, "key", own->key[ETCD_RECORDS]);
	text_puts(body, "}],\"success\":[");
	own_text_puts(body, own, true);
	text_puts(body, "],\"failure\":[{\"request_txn\":");
	own_text_if_ours(body, own);
	own_text_puts(body, own, true);
	text_puts(body, "]}}]}");
}

static void own_text_delete(struct text *body, const struct etcd_own *own)
{
	own_text_if_ours(body, own);
	for (int side = 0; side < ETCD_SIDES; side++) {
		out_object(body, NULL);
		out_object(body, "request_delete_range");
		etcd_put_key(body, "key", own->key[side]);
		text_puts(body, "}}");
	}
	text_puts(body, "]}");
}

/* ---- life ---- */

static bool own_has_work(const struct etcd_own *own)
{
	if (own_busy(own) || loop_timer_running(&own->timer))
		return false;
	if (!own->publication || sm_state(&own->sm) != OWN_HELD)
		return true;
	return own->dirty & OWN_DIRTY(ETCD_RECORDS) ||
	       (own->dirty & OWN_DIRTY(ETCD_LOADS) && own->text[ETCD_LOADS]);
}

/* After each change of it: queues it if it has work. It keeps its turn. */
static void own_look(struct etcd_own *own)
{
	struct etcd *e = own->etcd;

	if (!own_has_work(own))
		list_remove(&own->work);
	else if (!list_empty(&own->work))
		return;
	else if (own->publication)
		list_push_back(&e->due, &own->work);
	else if (sm_state(&own->sm) == OWN_IDLE)
		list_push_front(&e->leaving, &own->work);
	else
		list_push_back(&e->leaving, &own->work);
}

/* etcd no longer refuses it, or it was withdrawn. */
static void own_is_well(struct etcd_own *own)
{
	if (own->failures == 0)
		return;
	own->failures = 0;
	own->etcd->refused_puts--;
	etcd_state_check(own->etcd, NULL);
}

static void own_free(struct etcd_own *own)
{
	struct etcd *e = own->etcd;

	if (etcd_request_busy(&own->request))
		e->puts--;
	etcd_request_cancel(&own->request);
	loop_timer_stop(&own->timer);
	list_remove(&own->link);
	list_remove(&own->work);
	strmap_remove(&e->owns_by_key, own->key[ETCD_RECORDS]);
	e->own_count--;
	for (int side = 0; side < ETCD_SIDES; side++)
		mem_free(own->text[side]);
	mem_free(own);
}

static void own_on_timer(struct loop_timer *timer)
{
	struct etcd_own *own = container_of(timer, struct etcd_own, timer);

	own_look(own);
	etcd_kick(own->etcd);
}

static void own_answer(struct etcd_own *own, const struct err *err)
{
	struct publication *publication = own->publication;

	if (own->answered || !publication)
		return;
	own->answered = true;
	if (err)
		etcd_own_withdraw(publication);
	if (publication->on_done)
		publication->on_done(publication, err);
}

static void own_again(struct etcd_own *own, uint64_t after_ns)
{
	loop_timer_start(&own->timer, etcd_jitter(own->etcd, after_ns));
}

/* Another's. */
static void own_is_held(struct etcd_own *own)
{
	struct etcd *e = own->etcd;
	uint64_t now_ns = loop_now_ns(e->loop), again_ns = OWN_CLAIM_AGAIN_NS;
	struct err err;

	sm_move(&own->sm, OWN_IDLE);
	if (own->end_ns == 0)
		own->end_ns = now_ns + e->lease_s * LOOP_NS_PER_S + OWN_CLAIM_MORE_NS;
	if (!own->answered && now_ns >= own->end_ns) {
		err_set(&err, ERR_EXIST,
			"%.300s: another member holds this place and renews its lease; "
			"end it, or publish another worker or rank",
			own->key[ETCD_RECORDS]);
		own_answer(own, &err);
		return;
	}
	/* a place lost with its lease may be in etcd for a moment */
	if (own->answered && ++own->others > OWN_HELD_LONG) {
		if (!own->logged)
			log_warn("etcd", own->key[ETCD_RECORDS],
				 "another member has taken the place", "again_s=%ju",
				 (uintmax_t)(e->lease_s / 3));
		own->logged = true;
		own->others = OWN_HELD_LONG;
		again_ns = e->lease_s * LOOP_NS_PER_S / 3;
	}
	own_again(own, again_ns);
}

/* etcd refuses it: for a while, or permanently. */
static void own_is_refused(struct etcd_own *own)
{
	enum { INVALID = 3, NOT_FOUND = 5, DENIED = 7 };
	struct etcd *e = own->etcd;
	const struct etcd_message *answer = &own->request.answer;
	bool claimed = sm_state(&own->sm) == OWN_CLAIMING;
	struct err err;

	own->dirty = OWN_DIRTY_ALL;
	etcd_refusal(answer, own->key[ETCD_RECORDS], &err);
	if (answer->error_code == NOT_FOUND) {
		sm_move(&own->sm, OWN_LOST);
		if (own->sent_lease == e->lease.id) /* else there is another already */
			etcd_lease_lost(e, answer->error);
		return;
	}
	if (!own->answered &&
	    (answer->error_code == INVALID || answer->error_code == DENIED)) {
		sm_move(&own->sm, claimed ? OWN_IDLE : OWN_HELD);
		own_answer(own, &err);
		return;
	}
	sm_move(&own->sm, claimed ? OWN_LOST : OWN_HELD);
	if (own->failures < UINT8_MAX)
		own->failures++;
	if (own->failures == 1)
		log_warn("etcd", own->key[ETCD_RECORDS], "publishing failed", "why='%s'",
			 err.text);
	loop_timer_start(&own->timer, etcd_pause(e, own->failures));
	e->refused_puts += own->failures == 1;
	etcd_state_check(e, &err);
}

static void own_is_put(struct etcd_own *own)
{
	struct etcd *e = own->etcd;

	/* its lease may be lost since */
	sm_move(&own->sm, own->sent_lease == e->lease.id ? OWN_HELD : OWN_LOST);
	own_is_well(own);
	own->others = 0;
	own->logged = false;
	e->state.puts++;
	own_answer(own, NULL);
}

/* An answer to a put or a claim. */
static void own_is_answered(struct etcd_own *own)
{
	const struct etcd_message *answer = &own->request.answer;
	bool claimed = sm_state(&own->sm) == OWN_CLAIMING;

	if (answer->succeeded || (claimed && answer->nested)) {
		own_is_put(own);
	} else if (claimed) {
		own_is_held(own);
	} else {
		own->dirty = OWN_DIRTY_ALL;
		sm_move(&own->sm, OWN_LOST);
	}
}

static void own_on_done(struct etcd_request *request, enum etcd_outcome outcome)
{
	struct etcd_own *own = container_of(request, struct etcd_own, request);
	bool deleted = sm_state(&own->sm) == OWN_DELETING;

	own->etcd->puts--;
	etcd_kick(own->etcd);
	if (outcome == ETCD_BROKEN) {
		own->dirty = OWN_DIRTY_ALL;
		sm_move(&own->sm, OWN_LOST); /* claimed again, which finds it ours */
	} else if (deleted) {		     /* if that is refused, its lease ends it */
		own->dirty = OWN_DIRTY_ALL;
		sm_move(&own->sm, OWN_IDLE);
	} else if (outcome == ETCD_REFUSED) {
		own_is_refused(own);
	} else {
		own_is_answered(own);
	}
	own_look(own);
}

void etcd_own_lost(struct etcd_own *own)
{
	if (sm_state(&own->sm) == OWN_HELD)
		sm_move(&own->sm, OWN_LOST); /* else as its answer is seen */
	own_look(own);
}

static void own_start(struct etcd_own *own)
{
	struct etcd *e = own->etcd;
	enum own_state next = !own->publication		       ? OWN_DELETING
			      : sm_state(&own->sm) == OWN_HELD ? OWN_PUTTING
							       : OWN_CLAIMING;
	struct text body = {NULL};

	own->sent_lease = e->lease.id;
	if (next == OWN_DELETING) {
		own_text_delete(&body, own);
	} else if (next == OWN_CLAIMING) {
		own_text_claim(&body, own);
	} else {
		own_text_if_ours(&body, own);
		own_text_puts(&body, own, false);
		text_puts(&body, "]}");
	}
	if (etcd_request_start(&own->request, "kv/txn", &body) < 0) {
		err_clear();
		own_again(own, ETCD_AGAIN_NS);
		own_look(own);
		return;
	}
	e->puts++;
	sm_move(&own->sm, next);
	if (next != OWN_DELETING)
		own->dirty = 0;
	own_look(own);
}

/* One that can be served now. */
static bool own_serve_next(struct etcd *e)
{
	bool can = e->lease.id && e->puts < ETCD_PUTS_MAX;
	struct etcd_own *own = list_first(&e->leaving, struct etcd_own, work);

	/* it is not in etcd, or was removed with the lease */
	if (own && (sm_state(&own->sm) == OWN_IDLE ||
		    (etcd_link_up(&e->link) && !e->lease.id))) {
		own_free(own);
		return true;
	}
	if (!own)
		own = list_first(&e->due, struct etcd_own, work);
	if (!own || !can || !etcd_link_up(&e->link))
		return false;
	own_start(own);
	return true;
}

void etcd_own_step(struct etcd *e)
{
	while (own_serve_next(e)) {
		if (loop_enough(e->loop)) {
			etcd_kick(e);
			break;
		}
	}
}

/* ---- calls of the owner ---- */

static int own_texts(struct etcd_own *own, const char *record, const char *load)
{
	const char *texts[ETCD_SIDES] = {record, load};
	char *copies[ETCD_SIDES] = {NULL, NULL};
	int r = place_texts_check(record, load);

	for (int side = 0; r == 0 && side < ETCD_SIDES; side++) {
		if (!texts[side] ||
		    (own->text[side] && strcmp(own->text[side], texts[side]) == 0))
			continue;
		copies[side] = mem_strdup(texts[side]);
		r = copies[side] ? 0 : -ENOMEM;
	}
	for (int side = 0; side < ETCD_SIDES; side++) {
		if (r < 0 || !copies[side]) {
			mem_free(copies[side]);
			continue;
		}
		mem_free(own->text[side]);
		own->text[side] = copies[side];
		own->dirty |= OWN_DIRTY(side);
		own_look(own);
		etcd_kick(own->etcd);
	}
	return r < 0 ? err_pass(r) : 0;
}

int etcd_own_update(struct publication *publication, const char *record, const char *load)
{
	if (!publication->impl)
		return err_raise(ERR_STATE, "the place is not published");
	return err_pass(own_texts(publication->impl, record, load));
}

static int own_new(struct etcd *e, const struct place *place, struct etcd_own **own_p)
{
	struct etcd_own *own;

	if (e->own_count >= ETCD_OWN_MAX)
		return err_raise(ERR_LIMIT, "%u places are published (limit)",
				 e->own_count);
	own = mem_zalloc(sizeof(*own));
	if (!own)
		return err_pass(-ENOMEM);
	for (int side = 0; side < ETCD_SIDES; side++)
		etcd_place_key(e->url.prefix, (enum etcd_side)side, place,
			       own->key[side]);
	if (strmap_put(&e->owns_by_key, own->key[ETCD_RECORDS], own) < 0) {
		mem_free(own);
		return err_pass(-ENOMEM);
	}
	own->etcd = e;
	sm_init(&own->sm, &own_table, OWN_IDLE);
	list_init(&own->work);
	etcd_request_init(e, &own->request, own_on_done);
	loop_timer_init(&own->timer, e->loop, own_on_timer);
	list_push_back(&e->owns, &own->link);
	e->own_count++;
	*own_p = own;
	return 0;
}

int etcd_own_publish(struct directory *directory, struct publication *publication,
		     const struct place *place, const char *record, const char *load)
{
	struct etcd *e = etcd_of(directory);
	struct etcd_own *own, *before = publication->impl;
	char key[ETCD_NAME_MAX];
	int r = place_check(place);

	if (r < 0)
		return err_pass(r);
	etcd_place_key(e->url.prefix, ETCD_RECORDS, place, key);
	own = strmap_get(&e->owns_by_key, key);
	if (own && own->publication && own != before)
		return err_raise(ERR_EXIST, "%.300s: published by this daemon already",
				 key);
	if (!own)
		r = own_new(e, place, &own);
	if (r == 0)
		r = own_texts(own, record, load);
	if (r < 0) {
		if (own)
			own_look(own);
		etcd_kick(e);
		return err_pass(r);
	}
	if (before != own)
		etcd_own_withdraw(publication);
	own->publication = publication;
	publication->impl = own;
	own->answered = false;
	own->end_ns = 0;
	own->dirty |= OWN_DIRTY(ETCD_RECORDS); /* the result follows when it is put */
	loop_timer_stop(&own->timer);
	list_remove(&own->work); /* it may have been leaving */
	own_look(own);
	etcd_kick(e);
	return 0;
}

void etcd_own_withdraw(struct publication *publication)
{
	struct etcd_own *own = publication->impl;

	if (!own)
		return;
	publication->impl = NULL;
	own->publication = NULL;
	loop_timer_stop(&own->timer);
	own_is_well(own);
	list_remove(&own->work);
	own_look(own);
	etcd_kick(own->etcd);
}

void etcd_owns_fini(struct etcd *e)
{
	struct etcd_own *own;

	list_foreach_safe(own, &e->owns, link) {
		if (own->publication)
			own->publication->impl = NULL;
		own_free(own);
	}
	strmap_fini(&e->owns_by_key);
}
