/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Moves: operations of a room in flight.
 *
 * Several parts detect that a move has ended: the transport, the wait that holds it, the
 * helper that plans it, the reader of its pages, and the room that fails, from inside any
 * of these. So none of them frees it. They mark it as ended, which stops all other
 * callbacks, and the room's next step frees it: this file's moves_free_ended() is the
 * only place. Memory that a helper reads stays until it is done, and the room is busy,
 * and so not terminal, until the last move is freed.
 */
#include <assert.h>
#include <stdio.h>
#include <string.h>

#include "daemon/base/context.h"
#include "daemon/base/mem.h"
#include "daemon/loop/offload.h"
#include "daemon/room/room.h"
#include "daemon/room/room_mail.h"
#include "daemon/session/session.h"

/* Above this many pages times layers a plan is made on a helper thread: about
 * 50 µs of planning. */
#define PLAN_INLINE_ROWS 512u
#define PLAN_ROWS_MAX (UINT64_C(1) << 26)

static const struct sm_state phases[] = {
	[MOVE_READING] = {"reading",
			  SM_TO(MOVE_PLANNING) | SM_TO(MOVE_POSTED) | SM_TO(MOVE_ENDED)},
	[MOVE_PLANNING] = {"planning",
			   SM_TO(MOVE_WAITING) | SM_TO(MOVE_POSTED) | SM_TO(MOVE_ENDED)},
	[MOVE_WAITING] = {"waiting", SM_TO(MOVE_POSTED) | SM_TO(MOVE_ENDED)},
	[MOVE_POSTED] = {"posted", SM_TO(MOVE_ENDED)},
	[MOVE_ENDED] = {"ended", 0},
};

static const struct sm_table move_table = {
	.name = "move", .states = phases, .count = ARRAY_LEN(phases)};

struct move *move_new(struct room *room, struct party *party)
{
	struct move *move = mem_zalloc(sizeof(*move));

	assert(!party || party->room == room);
	if (!move)
		return NULL;
	sm_init(&move->sm, &move_table, MOVE_READING);
	move->room = room;
	move->party = party;
	list_init(&move->op.link);
	list_push_back(&room->moves, &move->link);
	room->busy++;
	return move;
}

/* ---- a chunk's life ---- */

/* NULL: it belongs to the peer, or is not made yet; a helper may be making it. */
static const struct plan *plan_of(const struct move *move)
{
	return move->job.submitted ? NULL : move->plan;
}

static uint64_t bytes_of(const struct move *move)
{
	const struct plan *plan = plan_of(move);

	return plan ? plan->bytes : move->bytes;
}

static uint64_t room_move_rows_of(const struct move *move)
{
	const struct plan *plan = plan_of(move);

	return plan ? plan->rows : 0;
}

static void move_trace_at(const struct move *move, enum trace_what what, uint64_t at_ns)
{
	room_trace_chunk(
		move->room, what, move->party,
		&(struct trace_chunk){.seq = move->chunk ? move->chunk->seq : move->seq,
				      .bytes = bytes_of(move),
				      .rows = room_move_rows_of(move),
				      .at_ns = at_ns});
}

static void move_trace(const struct move *move, enum trace_what what)
{
	move_trace_at(move, what, 0);
}

void move_to(struct move *move, enum move_phase phase)
{
	sm_move(&move->sm, phase);
	if (phase == MOVE_PLANNING)
		move_trace(move, TRACE_PLANNED);
	else if (phase == MOVE_WAITING)
		move_trace(move, TRACE_WAITS);
	else if (phase == MOVE_POSTED)
		move_trace(move, move->in ? TRACE_ADMITTED : TRACE_QUEUED);
	else
		move_trace(move, TRACE_OVER);
}

void move_arrived(struct move *move)
{
	assert(move->in);
	move_trace(move, TRACE_ARRIVED);
}

static void room_move_on_posted(struct sched_op *op)
{
	move_trace(op->owner, TRACE_POSTED);
}

static void on_first_out(struct xp_op *op, uint64_t at_ns)
{
	const struct move *move = container_of(op, struct move, op.xp);

	move_trace_at(move, TRACE_FIRST, at_ns);
}

static void on_first_in(struct xp_inbound *in, uint64_t at_ns)
{
	const struct move *move = container_of(in->owner, struct move, inbound);

	move_trace_at(move, TRACE_FIRST, at_ns);
}

/* Add its path, each once. */
static void add_path(struct party *party, const struct xp_used *used)
{
	const struct xp_peer_base *xp = (const void *)party->remote->xp;
	const char *path = used->path ? used->path : xp ? xp->path : "";
	size_t len = strlen(party->path);

	if (!strstr(party->path, path))
		snprintf(party->path + len, sizeof(party->path) - len, "%s%s",
			 len ? " + " : "", path);
}

static void room_move_add_used(struct room_used *sum, const struct move *move,
			       const struct xp_used *used)
{
	sum->bytes += bytes_of(move);
	sum->rows += room_move_rows_of(move);
	sum->staged += used->staged;
	sum->descriptors += used->descriptors;
}

void move_done(struct move *move, const struct xp_used *used, const struct xp_way *way)
{
	static const struct xp_used nothing;
	uint64_t bytes = bytes_of(move);
	struct room *room = move->room;

	assert(move->party && move->party->room == room);
	if (!used)
		used = &nothing;
	if (way && way->row_bytes)
		move->party->way = *way;
	if (bytes > 0)
		add_path(move->party, used);
	room_move_add_used(&move->party->used, move, used);
	room_move_add_used(&room->used, move, used);
	room_counts_bytes(room, bytes);
	room_count(room,
		   room_sends(room) ? METRIC_ROOM_SENT_BYTES : METRIC_ROOM_RECEIVED_BYTES,
		   bytes);
	room_count(room, METRIC_ROOM_STAGED_BYTES, used->staged);
	handshake_moved(move->party->remote, room_sends(room) ? METRIC_OUT : METRIC_IN,
			bytes);
	room_progress(room);
	move_trace(move, TRACE_MOVED);
}

int move_sides(const struct move *move, struct xp_sides *sides)
{
	const struct room *room = move->room;
	const struct party *party = move->party;
	const struct xp_buffer *here, *there = party->pool ? party->pool->buffers : NULL;
	uint32_t here_count = room->pool->layout->buffer_count;
	uint32_t there_count = party->pool ? party->pool->layout->buffer_count : 0;

	here = handshake_local_buffers(room->pool, party->remote);
	if (!here)
		return -err_errno(err_last()->code);
	*sides = room_sends(room) ? (struct xp_sides){move->plan, here, there, here_count,
						      there_count}
				  : (struct xp_sides){move->plan, there, here,
						      there_count, here_count};
	return 0;
}

int move_post(struct move *move, enum xp_kind kind, void (*on_done)(struct sched_op *op))
{
	struct xp_op *xp = &move->op.xp;
	int r = move_sides(move, &xp->sides);

	if (r < 0)
		return err_pass(r);
	xp->kind = kind;
	xp->header = xp->owned = mem_steal(move->header);
	xp->header_len = move->header_len;
	move_to(move, MOVE_POSTED);
	move->op.owner = move;
	move->op.on_done = on_done;
	move->op.on_posted = room_move_on_posted;
	xp->on_first = on_first_out;
	sched_submit(&move->party->flow, &move->op);
	return 0;
}

void move_answer(struct move *move, const struct xp_sides *sides, const struct err *why)
{
	struct err e;

	if (move_phase(move) >= MOVE_POSTED)
		return;
	assert(move->in);
	move_to(move, MOVE_POSTED);
	move->in->on_first = on_first_in;
	if (why)
		e = *why; /* may be part of the move, which is freed */
	move->party->remote->transport->ops->land(move->in, sides, why ? &e : NULL);
}

/* ---- the end ---- */

/* It is not used any more. */
static void retire(struct move *move)
{
	list_remove(&move->link);
	list_push_back(&move->room->ended, &move->link);
	room_kick(move->room);
}

void move_end(struct move *move)
{
	if (move_phase(move) == MOVE_ENDED)
		return;
	move_to(move, MOVE_ENDED);
	move->in = NULL;
	mail_drop(move->mail);
	wait_stop(&move->wait);
	if (!move->job.submitted ||
	    offload_cancel(move->room->session->kvd->offload, &move->job))
		retire(move);
	/* else a helper reads it: room_move_plan_done() continues */
}

void moves_stop(struct room *room, const struct err *why)
{
	struct move *move;

	mails_drop(room, NULL);
	list_foreach_safe(move, &room->moves, link) {
		bool posted = move_phase(move) == MOVE_POSTED;

		if (!move->in && posted)
			sched_cancel(&move->op, why);
		else if (!move->in)
			move_end(move);
		else if (posted)
			move->party->remote->transport->ops->revoke(move->in, why);
		else
			move_answer(move, NULL, why);
	}
}

static void move_free(struct move *move)
{
	struct room *room = move->room;

	assert(room->busy > 0 && move_phase(move) == MOVE_ENDED);
	list_remove(&move->link);
	room->busy--;
	if (move->party->line != PARTY_UP)
		party_release_pool(move->party);
	if (move->on_free)
		move->on_free(move);
	room_maps_fini(&move->maps);
	room_maps_fini(&move->maps_dst);
	mem_free(move->pairs);
	mem_free(move->wants);
	charge_drop(&move->charge);
	plan_free(move->plan);
	mem_free(move->header);
	mem_free(move->op.xp.owned);
	mem_free(move);
}

void moves_free_ended(struct room *room)
{
	struct loop *loop = room->session->kvd->loop;

	while (!list_empty(&room->ended)) {
		move_free(list_first(&room->ended, struct move, link));
		if (loop_enough(loop)) {
			room_kick(room);
			return;
		}
	}
}

/* ---- planning ---- */

static void room_move_plan_work(struct offload_job *job)
{
	struct move *move = container_of(job, struct move, job);
	struct plan_request req = {.src = move->plan_src,
				   .dst = move->plan_dst,
				   .maps = move->pairs,
				   .map_count = move->pair_count,
				   .wants = move->plan_wants,
				   .want_count = move->plan_want_count,
				   .max_rows = PLAN_ROWS_MAX,
				   .max_bytes = move->plan_most};

	job->result = plan_make(&req, &move->plan);
	if (job->result >= 0 && move->encode)
		job->result = move->encode(move);
	if (job->result < 0)
		err_take(&job->err);
}

/* The account of the plan: a peer that requests or sends bytes may never take the
 * rest, and the plan stays until then. */
static struct account *plan_account(const struct move *move)
{
	const struct room *room = move->room;

	return room->role == ROOM_RECV || room->role == ROOM_OFFER
		       ? move->party->remote->account
		       : room->session->account;
}

static int charge_plan(struct move *move)
{
	int r = charge_take(&move->charge, plan_account(move), ACCOUNT_PLANS,
			    sizeof(*move) + move->header_len + plan_memory(move->plan));

	if (r < 0)
		err_take(&move->job.err);
	return r;
}

static void room_move_plan_done(struct offload_job *job)
{
	struct move *move = container_of(job, struct move, job);

	if (job->result >= 0)
		job->result = charge_plan(move);
	if (job->result < 0)
		move->refused = job->err;
	if (move_phase(move) == MOVE_ENDED) {
		retire(move);
		return;
	}
	rooms_catch_up(move->room);
	if (move_phase(move) != MOVE_PLANNING)
		return; /* answered meanwhile (the transport ends it), or ended */
	assert(room_live(move->room)); /* else its stop() had been called */
	move->planned(move);
}

/* Number of runs that a plan may have: a page of one field is one, or one a head. */
static uint64_t work_of(const struct move *move)
{
	uint64_t runs = 0;

	for (size_t i = 0; i < move->pair_count; i++) {
		const struct plan_map *map = &move->pairs[i];
		const struct layout_view *view =
			layout_view_find(move->plan_dst, map->view);
		uint64_t pages = map->dst_page_count;

		if (map->src_page_count > pages)
			pages = map->src_page_count;
		if (map->select_count > pages)
			pages = map->select_count;
		for (uint32_t n = 0; view && n < view->layer_count; n++)
			runs += pages * view->layers[n].field_count;
	}
	return runs * (move->plan_want_count ? move->plan_want_count : 1);
}

int move_pair(struct move *move, const struct room_maps *src, const struct room_maps *dst)
{
	return err_pass(room_maps_pair(src, dst, &move->pairs, &move->pair_count));
}

void move_plan(struct move *move, const struct plan_want *wants, size_t want_count,
	       void (*then)(struct move *move))
{
	struct kvd *kvd = move->room->session->kvd;
	const struct layout *here = move->room->pool->layout;
	const struct layout *there = move->party->pool->layout;
	bool sends = room_sends(move->room);

	assert(then && !move->plan);
	move->plan_src = sends ? here : there;
	move->plan_dst = sends ? there : here;
	move->plan_wants = wants;
	move->plan_want_count = want_count;
	move->planned = then;
	move_to(move, MOVE_PLANNING);
	move->job =
		(struct offload_job){.work = room_move_plan_work,
				     .done = room_move_plan_done,
				     .principal = session_principal(move->room->session)};
	list_init(&move->job.link);
	move->plan_most = account_room(plan_account(move));
	if (work_of(move) > PLAN_INLINE_ROWS) {
		offload_submit(kvd->offload, &move->job);
		return;
	}
	room_move_plan_work(&move->job);
	room_move_plan_done(&move->job);
}
