/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A post is cut into legs (subtransfers): a part's rows with the chunks that this daemon
 * has of its hold, and with those at another daemon. Local legs are queued at compute
 * with a copy of their rows; remote legs are a message, which contains them. The work is
 * split into turns of bounded length: the query rows are the engine's again when all legs
 * have started.
 *
 * The rows of a message are bounded (leg_rows()); a part with more is several legs. A leg
 * has one reply, with all of its rows or an error, and one error fails the post: partial
 * results of fewer chunks would be plausible, and wrong.
 *
 * An ordered post starts when its word says that q is there. Until then it has a deadline
 * and can be canceled, as any other.
 *
 * A failed post ends at once. Remote legs in progress are canceled, and their replies
 * find no post; a local leg in a kernel keeps its own memory until it is done. The
 * results of all legs are merged (gather.c), and after that the loop writes the seat:
 * nothing else ever writes to it.
 */
#include <assert.h>
#include <errno.h>

#include "daemon/attend/attend_impl.h"
#include "daemon/base/context.h"
#include "daemon/base/mem.h"
#include "daemon/handshake/handshake.h"
#include "daemon/memory/memory.h"
#include "daemon/room/rooms.h"
#include "daemon/session/region.h"
#include "daemon/session/session.h"
#include "daemon/session/status.h"
#include "daemon/store/far.h"
#include "daemon/store/store.h"
#include "daemon/store/store_kv.h"
#include "proto/kvd_ring.h"

#define LEG_BYTES (160u << 10) /* of a message, unless one query token has more */
#define POSTS_MAX 1024u	       /* of a session */
#define LEGS_MAX 4096u	       /* of a post */
#define LEG_SELECT 16384u      /* numbers, unless one query token has more */

/* The common data of all legs of a part at one daemon, and of one source there. */
struct side {
	struct list link; /* post->sides, until its last leg is made */
	/* both in the post's data */
	const struct kvd_ring_part *part;
	const uint32_t *select;
	struct store_kv *kv;   /* here */
	struct far_hold *far;  /* NULL: here; only until it is in the list */
	struct remote *remote; /* the far hold's; held in the list */
	struct wire_attend head;
	bool among; /* the post has other legs there */
	uint64_t skip, tokens;
	uint32_t kv_head, kv_heads; /* of the attend's: those of one source */
	uint32_t row, left;	    /* rows without a leg */
	uint32_t most;		    /* of a leg */
	struct charge charge;
};

static void side_free(struct side *side)
{
	list_remove(&side->link);
	store_kv_free(side->kv);
	if (side->remote)
		handshake_release(side->remote);
	charge_drop(&side->charge);
	mem_free(side);
}

/* ---- ends ---- */

static void post_data_drop(struct attend_post *post)
{
	mem_free_large(mem_steal(post->data), post->data_charge.bytes);
	charge_drop(&post->data_charge);
}

static uint64_t seat_place(const struct attend *attend, uint32_t seat)
{
	return attend->offset + seat * attend->facts.seat_bytes;
}

/* The last store to a seat: a stream that sees it reads o, m, l, and an engine that reads
 * the status word after it finds the result. */
static void seat_done(const struct attend *attend, const struct region *region,
		      uint32_t seat, uint64_t value)
{
	uint64_t *word = (void *)(region->memory->base + seat_place(attend, seat) +
				  attend->facts.done);

	__atomic_store_n(word, htole64(value), __ATOMIC_RELEASE);
}

void attend_pass(struct session *session, uint64_t id, uint32_t seat, uint64_t value)
{
	const struct attend_session *part = attend_session(session);
	const struct attend *attend = part ? idmap_get(&part->attends, id) : NULL;
	const struct region *region;

	if (!attend || seat >= attend->seats || attend->taken[seat])
		return;
	region = region_find(session, attend->region);
	if (region)
		seat_done(attend, region, seat, value);
}

/* No work that could touch the seat is in progress any more. `why` NULL: success. */
static void post_end(struct attend_post *post, const struct err *why)
{
	struct attend *attend = post->attend;
	struct session *session = attend->session;
	struct attend_session *part = attend_session(session);
	const struct status_room figures = {.bytes = post->figures.queue_us,
					    .total = post->figures.together,
					    .moved_us = post->figures.attend_us,
					    .rows = post->remotes,
					    .first_token = UINT64_MAX};
	struct side *side;
	struct leg *leg;

	list_foreach_safe(side, &post->sides, link)
		side_free(side);
	list_foreach_safe(leg, &post->legs, link)
		leg_drop(leg);
	if (post->merge)
		gather_forget(post->merge);
	wait_stop(&post->wait);
	loop_timer_stop(&post->deadline);
	loop_defer_cancel(&post->begin);
	attend->taken[post->seat] = NULL;
	idmap_remove(&part->posts, post->id);
	list_remove(&post->link);
	attend->attends->post_count--;
	status_slot_room(session->status, post->slot, &figures);
	if (why)
		post->on_failed(session, post->slot, post->id, why);
	else
		status_slot_set(session->status, post->slot, KVD_SUCCESS, 0, ERR_OK);
	status_slot_release(session->status, post->slot);
	if (post->point.region)
		seat_done(attend, post->region, post->seat, post->point.value);
	region_unpin(post->region);
	post_data_drop(post);
	charge_drop(&post->charge);
	mem_free(post);
}

void post_fail(struct attend_post *post, const struct err *why)
{
	const struct err kept = *why; /* it may be in memory that is freed */

	post->attend->attends->figures.failed++;
	post_end(post, &kept);
}

void post_succeed(struct attend_post *post)
{
	post_end(post, NULL);
}

uint8_t *post_seat(const struct attend_post *post, uint64_t offset)
{
	return post->region->memory->base + seat_place(post->attend, post->seat) + offset;
}

static void on_deadline(struct loop_timer *timer)
{
	struct attend_post *post = container_of(timer, struct attend_post, deadline);
	struct err why;

	err_set(&why, ERR_TIMEOUT, "attention: timed out with %u subtransfers open",
		post->open);
	post_fail(post, &why);
}

bool attend_posted(const struct session *session, uint64_t id)
{
	const struct attend_session *part = attend_session(session);

	return part && idmap_get(&part->posts, id);
}

bool attend_cancel(struct session *session, uint64_t id)
{
	const struct attend_session *part = attend_session(session);
	struct attend_post *post = part ? idmap_get(&part->posts, id) : NULL;
	struct err why;

	if (!post)
		return false;
	err_set(&why, ERR_CANCELED, "canceled by its engine");
	post_fail(post, &why);
	return true;
}

/* None is complete before attend_post() has returned: replies and results arrive in a
 * later turn. */
void post_step(struct attend_post *post, const struct leg *leg,
	       const struct post_figures *figures)
{
	struct post_figures *most = &post->figures;

	assert(leg->in && post->open > 0);
	post->open--;
	if (figures->queue_us > most->queue_us)
		most->queue_us = figures->queue_us;
	if (figures->attend_us > most->attend_us)
		most->attend_us = figures->attend_us;
	if (figures->together > most->together)
		most->together = figures->together;
	if (post->open == 0)
		post_gather(post);
}

/* ---- a post ---- */

/* Query heads of so many of its kv heads. */
static uint32_t heads_of(const struct attend *attend, uint32_t kv_heads)
{
	return attend->form.shape.heads / attend->form.shape.kv_heads * kv_heads;
}

static int leg_new(struct attend_post *post, const struct side *side, uint32_t row,
		   uint32_t rows)
{
	const struct form *f = &post->attend->form;
	uint32_t tokens = rows / f->shape.heads;
	struct leg *leg = mem_zalloc(sizeof(*leg));
	int r;

	if (!leg)
		return err_pass(-ENOMEM);
	leg->attends = post->attend->attends;
	leg->post = post;
	leg->row = row;
	leg->head = heads_of(post->attend, side->kv_head);
	leg->item.form = *f;
	leg->item.form.first_head += side->kv_head;
	leg->item.form.shape.kv_heads = (uint16_t)side->kv_heads;
	leg->item.form.shape.heads = (uint16_t)heads_of(post->attend, side->kv_heads);
	leg->rows = tokens * leg->item.form.shape.heads;
	leg->among = side->among || rows < side->part->rows || !leg_has_all_heads(leg);
	list_init(&leg->wait);
	list_init(&leg->at_remote);
	list_push_back(&post->legs, &leg->link);
	post->next = leg;
	r = charge_take(
		&leg->charge, post->attend->session->account, ACCOUNT_ATTENDS,
		sizeof(*leg) + values_count(leg->rows, f->shape.dv) * sizeof(float) +
			(uint64_t)tokens * side->part->per_token * sizeof(uint32_t));
	if (r < 0)
		return err_pass(r);
	if (side->part->per_token) {
		leg->cut_from = side->select + (size_t)(row - side->part->row) /
						       f->shape.heads *
						       side->part->per_token;
		leg->cut_count = tokens * side->part->per_token;
		leg->skip = side->skip;
		leg->tokens = side->tokens;
	}
	if (side->remote)
		return err_pass(leg_there(leg, side->remote, &side->head));
	return err_pass(leg_here(leg, side->kv, side->part, side->tokens));
}

/* Query tokens with that many tokens: limited by one computation of a thread, and by the
 * selections of a part of a turn. */
static uint64_t tokens_of_call(const struct side *side, uint32_t heads)
{
	uint64_t each = side->part->per_token ? side->part->per_token : side->tokens;
	uint64_t most = COMPUTE_WORK / ((each ? each : 1) * heads);

	if (side->part->per_token && most > LEG_SELECT / each)
		most = LEG_SELECT / each;
	return most ? most : 1;
}

/* Splits them into the fewest legs of equal size. */
static uint32_t rows_evenly(uint32_t rows, uint64_t tokens, uint32_t heads)
{
	uint64_t all = rows / heads, legs = (all + tokens - 1) / tokens;

	return (uint32_t)((all + legs - 1) / legs) * heads;
}

/* Rows of a leg. A remote one's request and reply are one message each. */
static int leg_rows(const struct attend *attend, const struct side *side,
		    uint32_t *rows_p)
{
	const struct form *f = &attend->form;
	uint64_t ask = attend_message_bytes(attend->attends, WIRE_T_ATTEND);
	uint64_t tell = attend_message_bytes(attend->attends, WIRE_T_ATTENTION_RESULT);
	uint32_t heads = heads_of(attend, side->kv_heads);
	uint64_t asked =
		form_q_bytes(f, heads) + side->part->per_token * sizeof(uint32_t);
	uint64_t told = form_out_bytes(f, heads);
	uint64_t tokens = side->part->rows / f->shape.heads;

	if (tokens > tokens_of_call(side, heads))
		tokens = tokens_of_call(side, heads);
	if (!side->far) {
		*rows_p = rows_evenly(side->part->rows, tokens, f->shape.heads);
		return 0;
	}
	if (asked > ask || told > tell)
		return err_raise(
			ERR_TOOBIG,
			"query token: %llu bytes, with a reply of %llu, exceed a "
			"message to another daemon; use fetch",
			(unsigned long long)asked, (unsigned long long)told);
	ask = ask < LEG_BYTES ? ask : LEG_BYTES;
	if (tokens * asked > ask)
		tokens = asked > ask ? 1 : ask / asked;
	if (tokens * told > tell)
		tokens = tell / told;
	*rows_p = rows_evenly(side->part->rows, tokens, f->shape.heads);
	return 0;
}

/* Its legs are made when they start: a post may have thousands. */
static int side_add(struct attend_post *post, struct side *side)
{
	struct side *own;
	int r = leg_rows(post->attend, side, &side->most);

	if (r < 0)
		return err_pass(r);
	side->row = side->part->row;
	side->left = side->part->rows;
	if (side->left / side->most >= LEGS_MAX - post->open)
		return err_raise(ERR_TOOBIG,
				 "post: rows x tokens exceed %u calls or messages of at "
				 "most %u rows; make several posts",
				 LEGS_MAX, side->most);
	own = mem_dup(side, sizeof(*side));
	if (!own)
		return err_pass(-ENOMEM);
	r = charge_take(&own->charge, post->attend->session->account, ACCOUNT_ATTENDS,
			sizeof(*own));
	if (r < 0) {
		mem_free(own);
		return err_pass(r);
	}
	side->kv = NULL; /* moved */
	if (own->remote)
		own->remote->reaches++;
	own->far = NULL;
	list_init(&own->link);
	list_push_back(&post->sides, &own->link);
	post->open += (own->left + own->most - 1) / own->most;
	return 0;
}

/* The next leg of the first side. */
static int side_leg(struct attend_post *post)
{
	struct side *side = list_first(&post->sides, struct side, link);
	uint32_t rows = side->left < side->most ? side->left : side->most;
	int r = leg_new(post, side, side->row, rows);

	side->row += rows;
	side->left -= rows;
	if (r >= 0 && side->left == 0)
		side_free(side);
	return err_pass(r);
}

/* Its legs share the KV that they read. */
static int class_legs(struct attend_post *post, struct side *side,
		      const struct store_hold *hold, unsigned int bit)
{
	const char *view = post->attend->form.view;
	int r = store_kv_of_hold(hold, bit, side->head.first, side->head.count,
				 *view ? view : NULL, &side->kv);

	if (r >= 0)
		r = charge_more(&post->charge, store_kv_bytes(side->kv));
	if (r >= 0)
		r = side_add(post, side);
	store_kv_free(mem_steal(side->kv));
	return err_pass(r);
}

/* Each head is read from one of the sources, which are ranks: classes here, pools there.
 * Of those that have the next head, the one with the most after it; ranges of heads are
 * disjoint, so nothing is merged between them. */
static int sources_legs(struct attend_post *post, struct side *side,
			const struct store_hold *hold, uint64_t sources)
{
	const struct form *f = &post->attend->form;
	uint32_t begin[64], end[64], head = f->first_head,
				     last = head + f->shape.kv_heads;
	int r = 0;

	for (unsigned int i = 0; i < 64; i++) {
		const struct layout *layout = !(sources >> i & 1) ? NULL
					      : side->far ? far_hold_layout(side->far, i)
							  : store_kv_layout(hold, i);

		begin[i] = end[i] = 0;
		if (sources >> i == 1 && !(sources & (sources - 1)))
			end[i] = UINT32_MAX; /* the only one: its kernel checks */
		else if (layout)
			form_heads(f, layout, post->layer, &begin[i], &end[i]);
	}
	for (; head < last && r >= 0; head += side->kv_heads) {
		unsigned int best = 0;

		for (unsigned int i = 0; i < 64; i++)
			if (begin[i] <= head && end[i] > (best ? end[best - 1] : head))
				best = i + 1;
		if (!best)
			return err_raise(ERR_REQUIRE,
					 "layer %u: kv head %u is in none of the chunks' "
					 "parts; use fetch",
					 post->layer, head);
		side->kv_head = head - f->first_head;
		side->kv_heads = (end[best - 1] < last ? end[best - 1] : last) - head;
		if (side->far)
			side->head.pool = far_hold_pool(side->far, best - 1);
		r = side->far ? side_add(post, side)
			      : class_legs(post, side, hold, best - 1);
	}
	return r < 0 ? err_pass(r) : 0;
}

static int side_here(struct attend_post *post, struct side *side,
		     const struct store_hold *hold)
{
	uint64_t classes = 0;
	int r = store_kv_classes(hold, side->head.first, side->head.count, &classes);

	return r < 0 ? err_pass(r) : err_pass(sources_legs(post, side, hold, classes));
}

static int side_there(struct attend_post *post, struct side *side)
{
	struct wire_attend *head = &side->head;
	uint32_t first = head->first; /* of the hold's; the message counts the holder's */
	uint64_t pools = ~UINT64_C(0);
	struct side *other;
	int r = legs_there(post, side->far, head);

	if (r < 0)
		return err_pass(r);
	head->first -= far_hold_first(side->far);
	side->remote = far_hold_remote(side->far);
	list_foreach(other, &post->sides, link) {
		if (other->remote == side->remote)
			other->among = side->among = true;
	}
	post->remotes += !side->among;
	for (uint32_t i = 0; i < head->count; i++)
		pools &= far_hold_sources(side->far, first + i);
	if (!pools)
		return err_raise(ERR_REQUIRE,
				 "the chunks are stored there in parts of different "
				 "ranks; use fetch");
	return err_pass(sources_legs(post, side, NULL, pools));
}

static int part_check(const struct attend *attend, const struct kvd_ring_part *part)
{
	uint32_t heads = attend->form.shape.heads;

	if (part->rows == 0 || part->row % heads || part->rows % heads ||
	    part->row > attend->rows || part->rows > attend->rows - part->row)
		return err_raise(ERR_RANGE,
				 "part: rows [%u, +%u) are not whole query tokens of "
				 "the %u rows of the seat",
				 part->row, part->rows, attend->rows);
	if (part->delta && part->per_token)
		return err_raise(ERR_INVAL,
				 "part: a selection excludes a delta; selected tokens "
				 "keep their positions");
	if (part->delta == INT32_MIN)
		return err_raise(ERR_RANGE, "part: delta %d is out of range",
				 part->delta);
	if (part->delta && attend->form.rope.dims == 0)
		return err_raise(ERR_INVAL,
				 "part: a delta needs the `rope` of attention.open");
	return 0;
}

/* The highest of `count` numbers, plus one; 0: all are ~0. */
static uint32_t select_bound(const uint32_t *select, uint64_t count)
{
	uint32_t bound = 0;

	for (uint64_t i = 0; i < count; i++) /* at most 16384: else it is a helper's */
		bound = select[i] + 1 > bound ? select[i] + 1 : bound; /* ~0 wraps */
	return bound;
}

static const struct kvd_ring_part *parts_of(const uint8_t *data)
{
	return (const struct kvd_ring_part *)(const void *)data;
}

static const uint32_t *select_of(const uint8_t *data, uint32_t part_count)
{
	return (const uint32_t *)(const void *)(data +
						part_count *
							sizeof(struct kvd_ring_part));
}

void attend_post_scan(uint32_t heads, struct attend_post_args *args)
{
	const uint32_t *select = select_of(args->data, args->part_count);
	uint64_t left = args->select_count;

	for (uint32_t i = 0; i < args->part_count; i++) { /* at most 64: parts */
		const struct kvd_ring_part *part = &parts_of(args->data)[i];
		uint64_t count = (uint64_t)(part->rows / heads) * part->per_token;

		if (count > left)
			return; /* it is refused */
		args->bounds[i] = select_bound(select, count);
		select += count;
		left -= count;
	}
}

uint32_t attend_heads(const struct attend *attend)
{
	return attend->form.shape.heads;
}

/* Pieces in order, of which each is here, or at one other daemon. */
static int part_legs(struct attend_post *post, const struct kvd_ring_part *part,
		     const uint32_t *select, uint32_t bound)
{
	struct attend *attend = post->attend;
	const struct store_hold *hold = store_hold_find(attend->session, part->hold);
	uint64_t tokens = part->tokens ? part->tokens : UINT64_MAX, skip = 0;
	uint32_t at = part->first, end, chunk;
	int r = hold ? store_hold_check(hold) : -ENOENT;

	if (r >= 0)
		r = part_check(attend, part);
	if (r < 0)
		return err_pass(r);
	chunk = store_hold_chunk_tokens(hold);
	end = store_hold_chunks(hold);
	if (part->count == 0 || at > end || part->count > end - at)
		return err_raise(ERR_RANGE, "part: chunks [%u, +%u) exceed the hold's %u",
				 at, part->count, end);
	end = at + part->count;
	if (tokens > (uint64_t)part->count * chunk)
		tokens = (uint64_t)part->count * chunk;
	/* the daemon of a token is decided by its number */
	if (bound > tokens)
		return err_raise(ERR_RANGE,
				 "select: token %u is out of range (under "
				 "%llu)",
				 bound - 1, (unsigned long long)tokens);
	while (at < end && skip < tokens && r >= 0) { /* at most 25: pieces of a hold */
		struct side side = {.part = part, .select = select, .skip = skip};
		uint32_t n = store_hold_piece(hold, at, end, &side.far);

		if (n == 0)
			return err_raise(ERR_PEER,
					 "the daemon that holds the chunks is lost");
		side.tokens = (uint64_t)n * chunk < tokens - skip ? (uint64_t)n * chunk
								  : tokens - skip;
		side.head = (struct wire_attend){.first = at,
						 .count = n,
						 .tokens = side.tokens,
						 .delta = (uint32_t)part->delta,
						 .per_token = part->per_token};
		r = side.far ? side_there(post, &side) : side_here(post, &side, hold);
		skip += (uint64_t)n * chunk;
		at += n;
	}
	return r < 0 ? err_pass(r) : 0;
}

static int parts_legs(struct attend_post *post, const struct attend_post_args *args)
{
	const uint32_t *select = select_of(post->data, args->part_count);
	uint32_t heads = post->attend->form.shape.heads;
	uint64_t at = 0;
	int r = 0;

	for (uint32_t i = 0; i < args->part_count && r >= 0;
	     i++) { /* at most 64: parts */
		const struct kvd_ring_part *part = &parts_of(post->data)[i];
		uint64_t count = (uint64_t)(part->rows / heads) * part->per_token;

		if (count > args->select_count - at)
			return err_raise(ERR_INVAL,
					 "parts[%u]: its selection is incomplete", i);
		r = part_legs(post, part, select + at, args->bounds[i]);
		if (r < 0)
			return err_prefix(r, "parts[%u]", i);
		at += count;
	}
	return r < 0 ? err_pass(r) : 0;
}

static bool post_starts(const struct attend_post *post)
{
	return post->next || !list_empty(&post->sides);
}

/* Makes and starts legs, as many as the turn has time for. */
static void post_begin(struct attend_post *post)
{
	struct loop *loop = post->attend->session->kvd->loop;
	struct err why;
	int r;

	while (post_starts(post)) {
		r = post->next ? 0 : side_leg(post);
		if (r >= 0)
			r = leg_begin(post->next);
		if (r < 0) {
			err_take(&why);
			post_fail(post, &why);
			return;
		}
		if (r != LEG_AGAIN)
			post->next = NULL;
		if (post_starts(post) && loop_enough(loop)) {
			loop_defer(loop, &post->begin);
			return;
		}
	}
	/* all of q was read */
	post_data_drop(post);
	status_slot_set(post->attend->session->status, post->slot, KVD_TRANSFERRING, 0,
			ERR_OK);
}

/* q is there. Times are from here on. */
static void post_on_point(struct wait *wait)
{
	struct attend_post *post = container_of(wait, struct attend_post, wait);

	post->began_ns = loop_clock_ns(post->attend->session->kvd->loop);
	post_begin(post);
}

static void post_on_begin(struct loop_defer *defer)
{
	post_begin(container_of(defer, struct attend_post, begin));
}

/* Up to the last one that a part names. */
static uint32_t post_rows(const struct attend *attend,
			  const struct attend_post_args *args)
{
	uint64_t rows = 0;

	for (uint32_t i = 0; i < args->part_count; i++) { /* at most 64: parts */
		const struct kvd_ring_part *part = &parts_of(args->data)[i];
		uint64_t end = (uint64_t)part->row + part->rows;

		rows = end > rows ? end : rows;
	}
	/* a part with more is refused */
	return rows < attend->rows ? (uint32_t)rows : attend->rows;
}

static int post_new(struct attend *attend, struct attend_post_args *args,
		    struct attend_post **post_p)
{
	struct session *session = attend->session;
	struct attend_session *part = attend_session(session);
	struct region *region = region_find(session, attend->region);
	uint32_t rows = post_rows(attend, args);
	uint64_t values = values_count(rows, attend->form.shape.dv) * sizeof(float);
	struct attend_post *post;
	int r;

	if (!region)
		return err_pass(-ENOENT);
	post = mem_zalloc(sizeof(*post));
	if (!post)
		return err_pass(-ENOMEM);
	*post = (struct attend_post){.attend = attend,
				     .id = args->id,
				     .slot = args->slot,
				     .seat = args->seat,
				     .layer = args->layer,
				     .rows = rows,
				     .began_ns = loop_clock_ns(session->kvd->loop),
				     .on_failed = args->on_failed,
				     .region = region};
	if (args->value)
		post->point = (struct wait_spec){
			.region = region,
			.offset = seat_place(attend, args->seat) + attend->facts.ready,
			.value = args->value};
	list_init(&post->wait.link);
	list_init(&post->sides);
	list_init(&post->legs);
	loop_timer_init(&post->deadline, session->kvd->loop, on_deadline);
	loop_defer_init(&post->begin, post_on_begin);
	/* and of its merge */
	r = charge_take(&post->charge, session->account, ACCOUNT_ATTENDS,
			sizeof(*post) + values);
	if (r >= 0)
		r = idmap_put(&part->posts, post->id, post);
	if (r < 0) {
		charge_drop(&post->charge);
		mem_free(post);
		return err_pass(r);
	}
	post->data = mem_steal(args->data);
	region_pin(region);
	attend->taken[args->seat] = post;
	list_push_back(&attend->attends->posts, &post->link);
	attend->attends->post_count++;
	*post_p = post;
	return 0;
}

int attend_post(struct attend *attend, struct attend_post_args *args)
{
	struct attends *attends = attend->attends;
	const struct attend_session *part = attend_session(attend->session);
	struct attend_post *post = NULL;
	struct err why;
	int r = 0;

	if (attends->closed)
		return err_raise(ERR_DRAIN, "the daemon is stopping");
	if (args->seat >= attend->seats)
		return err_raise(ERR_RANGE, "seat: %u is out of range (under %u)",
				 args->seat, attend->seats);
	if (attend->taken[args->seat])
		return err_raise(ERR_BUSY, "seat %u is in use", args->seat);
	if (args->part_count == 0 || args->part_count > ATTEND_PARTS_MAX)
		return err_raise(ERR_RANGE, "parts: %u is out of range (1 to %u)",
				 args->part_count, ATTEND_PARTS_MAX);
	if (idmap_count(&part->posts) >= POSTS_MAX)
		return err_raise(ERR_LIMIT, "%u posts: limit of a session", POSTS_MAX);
	r = post_new(attend, args, &post);
	if (r < 0)
		return err_pass(r);
	attends->figures.posts++;
	attends->figures.rows += post->rows;
	if (args->deadline_ns)
		loop_timer_start(&post->deadline, args->deadline_ns);
	r = charge_take(&post->data_charge, attend->session->account, ACCOUNT_ATTENDS,
			(uint64_t)args->select_count * sizeof(uint32_t));
	if (r >= 0)
		r = parts_legs(post, args);
	if (r < 0) {
		err_take(&why);
		post_fail(post, &why);
		return 0;
	}
	if (wait_passed(&post->point))
		post_begin(post);
	else
		wait_start(rooms_waits(rooms_of(attends->kvd)), &post->wait, &post->point,
			   post_on_point);
	return 0;
}
