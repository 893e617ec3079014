/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A group is followed by a range of all its keys, in pages at one revision, then by the
 * changes from that revision on. etcd's gateway accepts several watches with one request,
 * at its start; so one stream, on one connection, has all of them, and is made again when
 * the desired groups change, each watch from its last revision.
 *
 * A page has as many keys as make about four megabytes: etcd reads all remaining keys for
 * each page, so small ones would be expensive with a million. A page of large values that
 * etcd could not make in time is requested again with fewer keys.
 *
 * The time that etcd needs to create watches is unknown: it is checked after half a
 * second, then after twice as long each time, up to the timeout of any request; the last
 * time is remembered. Readers have all of a group only while its watch is confirmed by
 * etcd, and while a newer stream is not overdue.
 *
 * If a revision was compacted, or etcd has not reached it, the group's keys are read
 * again.
 */
#include <string.h>

#include "daemon/base/err.h"
#include "daemon/base/log.h"
#include "daemon/cluster/etcd_impl.h"

#define PAGE_BYTES (UINT64_C(4) << 20)
#define PAGE_FIRST 64u
#define PAGE_MAX 32768u
#define FOLLOW_GATHER_NS (20 * LOOP_NS_PER_MS)
#define FOLLOW_CHECK_NS (500 * LOOP_NS_PER_MS) /* at first */
#define FOLLOW_REFUSED_NS (5 * LOOP_NS_PER_S)
#define FOLLOW_RESTLESS_NS (200 * LOOP_NS_PER_MS) /* repeated so soon: with a pause */

static struct etcd_group *half_group(struct etcd_half *half)
{
	return container_of(half - half->side, struct etcd_group, half[0]);
}

/* ---- ranges ---- */

/* All keys with the group's prefix. */
static void half_prefix(struct etcd *e, struct etcd_half *half, char key[ETCD_NAME_MAX])
{
	etcd_group_key(e->url.prefix, half->side, half_group(half)->name, key);
}

static void half_range_text(struct etcd *e, struct etcd_half *half, struct text *body)
{
	char key[ETCD_NAME_MAX];

	half_prefix(e, half, key);
	out_object(body, NULL);
	if (half->from_len)
		out_base64(body, "key", half->from, half->from_len);
	else
		etcd_put_key(body, "key", key);
	key[strlen(key) - 1]++; /* '/' */
	etcd_put_key(body, "range_end", key);
	out_id(body, "limit", half->limit);
	out_id(body, "revision", half->revision);
	out_close(body, '}');
}

static void half_range_start(struct etcd *e, struct etcd_half *half)
{
	struct text body = {NULL};

	if (half->follow == FOLLOW_WANTED) {
		half->revision = 0;
		half->from_len = 0;
		half->mark++;
		half->limit = half->first;
		half->asked_ns = loop_now_ns(e->loop);
	}
	half_range_text(e, half, &body);
	if (etcd_request_start(&half->request, "kv/range", &body) < 0) {
		err_clear();
		etcd_half_again(e, half, ETCD_AGAIN_NS);
		return;
	}
	half->follow = FOLLOW_RANGE;
	e->ranges++;
}

static void half_on_kv(struct etcd_request *request, const struct etcd_kv *kv)
{
	struct etcd_half *half = container_of(request, struct etcd_half, request);
	size_t len = kv->key_len;

	/* the next page starts after this key; of a truncated one, after all with that
	 * prefix */
	memcpy(half->from, kv->key, len);
	if (kv->key_cut)
		while (len && ++half->from[len - 1] == 0)
			len--;
	else
		half->from[len++] = '\0';
	half->from_len = len;
	etcd_group_take(request->etcd, kv, half);
}

static void half_ranged(struct etcd *e, struct etcd_half *half)
{
	uint64_t now_ns = loop_now_ns(e->loop);

	half->follow = FOLLOW_STREAM;
	half->next = half->revision + 1;
	half->seen = half->revision;
	half->watch_id = 0;
	half->first = PAGE_FIRST;
	half->sweep = NULL;
	half->sweep_at_ns = e->grace_ns > now_ns ? e->grace_ns : now_ns;
	e->stream.stale = true;
}

static void half_page_size(struct etcd_half *half)
{
	const struct etcd_request *request = &half->request;
	uint64_t fit = PAGE_BYTES * request->answer.kvs / (request->bytes + 1);

	if (fit > UINT64_C(4) * half->limit)
		fit = UINT64_C(4) * half->limit;
	half->limit = fit < 1 ? 1 : fit > PAGE_MAX ? PAGE_MAX : (unsigned int)fit;
}

static void half_is_refused(struct etcd *e, struct etcd_half *half)
{
	enum { OUT_OF_RANGE = 11 };
	const struct etcd_message *answer = &half->request.answer;
	const struct etcd_group *group = half_group(half);
	struct err err;

	if (answer->error_code == OUT_OF_RANGE) { /* compacted between two pages */
		etcd_half_again(e, half, 0);
		return;
	}
	etcd_refusal(answer, group->name, &err);
	log_warn("etcd", group->name, "the group cannot be read", "why='%s'", err.text);
	etcd_half_again(e, half, FOLLOW_REFUSED_NS);
}

static void half_on_done(struct etcd_request *request, enum etcd_outcome outcome)
{
	struct etcd_half *half = container_of(request, struct etcd_half, request);
	struct etcd *e = request->etcd;

	e->ranges--;
	etcd_kick(e);
	if (outcome == ETCD_BROKEN) {
		if (request->bytes == 0)
			half->first = half->limit > 4 ? half->limit / 4 : 1;
		etcd_half_again(e, half, 0);
	} else if (outcome == ETCD_REFUSED) {
		half_is_refused(e, half);
	} else if (!half->again) {
		if (half->revision == 0)
			half->revision = request->answer.revision;
		if (request->answer.more && request->answer.kvs && half->from_len) {
			half_page_size(half);
			half_range_start(e, half);
		} else {
			half_ranged(e, half);
		}
	}
}

void etcd_half_init(struct etcd *e, struct etcd_half *half)
{
	etcd_request_init(e, &half->request, half_on_done);
	half->request.on_kv = half_on_kv;
	half->request.patience_ns *= 4; /* etcd may have a lot to read */
	half->first = PAGE_FIRST;
}

/* Its readers are notified again when they have all. */
static void half_unsync(struct etcd_half *half)
{
	struct etcd_reader *reader;

	half->stands = false;
	list_foreach(reader, &half_group(half)->readers, link) {
		if (!reader->synced || (half->side != ETCD_RECORDS && !reader->loads))
			continue;
		reader->synced = false;
		if (reader->watch && reader->watch->on_unsynced)
			reader->watch->on_unsynced(reader->watch);
	}
}

void etcd_half_again(struct etcd *e, struct etcd_half *half, uint64_t after_ns)
{
	uint64_t now_ns = loop_now_ns(e->loop);

	if (now_ns - half->asked_ns < FOLLOW_RESTLESS_NS && after_ns < ETCD_AGAIN_NS)
		after_ns = ETCD_AGAIN_NS;
	half->again = true;
	half->retry_ns = now_ns + after_ns;
	half_unsync(half);
	etcd_kick(e);
}

static void half_cancel(struct etcd *e, struct etcd_half *half)
{
	if (etcd_request_busy(&half->request))
		e->ranges--;
	etcd_request_cancel(&half->request);
	if (half->follow == FOLLOW_STREAM)
		e->stream.stale = true;
	half->again = half->confirmed = half->stands = false;
	half->watch_id = 0;
	half->sweep = NULL;
	half->sweep_at_ns = 0;
}

void etcd_half_stop(struct etcd *e, struct etcd_half *half)
{
	half_cancel(e, half);
	half->follow = FOLLOW_NOT;
}

static void half_step(struct etcd *e, struct etcd_half *half)
{
	if (half->again) {
		half_cancel(e, half);
		half->follow = FOLLOW_WANTED;
	}
	if (half->follow != FOLLOW_WANTED)
		return;
	if (half->retry_ns > loop_now_ns(e->loop))
		etcd_kick_later(e);
	else if (e->ranges < ETCD_RANGES_MAX)
		half_range_start(e, half);
}

/* ---- the stream ---- */

static struct etcd_half *stream_half(struct etcd *e, int64_t watch_id)
{
	struct etcd_group *group;

	list_foreach(group, &e->groups, link)
		for (int side = 0; side < ETCD_SIDES; side++)
			if (group->half[side].watch_id == watch_id)
				return &group->half[side];
	return NULL;
}

static void stream_on_kv(struct etcd_request *request, const struct etcd_kv *kv)
{
	etcd_group_take(request->etcd, kv, NULL);
}

/* For the next time twice as long as it took; at least the initial value. */
static void stream_confirmed(struct etcd *e, struct etcd_half *half)
{
	struct etcd_stream *stream = &e->stream;
	uint64_t took_ns = loop_now_ns(e->loop) - stream->began_ns;

	if (half->confirmed)
		return;
	half->confirmed = half->stands = true;
	if (--stream->awaited == 0) {
		loop_timer_stop(&stream->check);
		stream->check_ns =
			2 * took_ns > FOLLOW_CHECK_NS ? 2 * took_ns : FOLLOW_CHECK_NS;
	}
	etcd_kick(e);
}

static void stream_on_message(struct etcd_request *request, const struct etcd_message *m)
{
	struct etcd *e = request->etcd;
	struct etcd_half *half = m->watch_id > 0 ? stream_half(e, m->watch_id) : NULL;

	if (!half || half->follow != FOLLOW_STREAM)
		return;
	if (m->canceled) {
		log_info("etcd", e->url.prefix,
			 "a watch was canceled; its keys are read again",
			 "compacted=%ju why='%s'", (uintmax_t)m->compact_revision,
			 m->reason);
		etcd_half_again(e, half, m->compact_revision ? 0 : FOLLOW_REFUSED_NS);
	} else if (m->created) {
		stream_confirmed(e, half);
		if (m->revision + 1 < half->next)
			etcd_half_again(e, half, 0); /* the revision decreased */
	} else if (m->kvs == 0) {
		if (m->revision >= half->next) /* progress: nothing happened until then */
			half->next = m->revision + 1;
	} else if (half->seen >= half->next) {
		half->next = half->seen + 1;
	}
}

static void stream_watch_text(struct etcd *e, struct etcd_half *half, struct text *body)
{
	char key[ETCD_NAME_MAX];

	half_prefix(e, half, key);
	half->confirmed = false;
	half->watch_id = ++e->stream.watch_ids;
	half->seen = half->next - 1;
	e->stream.awaited++;
	text_puts(body, "{"); /* a sequence of objects, without commas */
	out_object(body, "create_request");
	etcd_put_key(body, "key", key);
	key[strlen(key) - 1]++;
	etcd_put_key(body, "range_end", key);
	out_id(body, "start_revision", half->next);
	out_id(body, "watch_id", (uint64_t)half->watch_id);
	out_bool(body, "progress_notify", true);
	text_puts(body, "}}");
}

static void stream_start(struct etcd *e)
{
	struct etcd_stream *stream = &e->stream;
	struct text body = {NULL};
	struct etcd_group *group;

	stream->stale = false;
	stream->awaited = 0;
	loop_timer_stop(&stream->check);
	etcd_request_cancel(&stream->request);
	list_foreach(group, &e->groups, link)
		for (int side = 0; side < ETCD_SIDES; side++)
			if (group->half[side].follow == FOLLOW_STREAM)
				stream_watch_text(e, &group->half[side], &body);
	if (!body.data && !body.failed)
		return; /* it has no readers */
	if (etcd_request_start(&stream->request, "watch", &body) < 0) {
		err_clear();
		stream->stale = true;
		loop_timer_start(&stream->timer, ETCD_AGAIN_NS);
		return;
	}
	stream->began_ns = loop_now_ns(e->loop);
	if (stream->check_ns > stream->request.patience_ns)
		stream->check_ns = stream->request.patience_ns;
	loop_timer_start(&stream->check, stream->check_ns);
}

static void stream_on_done(struct etcd_request *request, enum etcd_outcome outcome)
{
	struct etcd *e = request->etcd;
	struct err err;

	e->stream.stale = true;
	if (outcome == ETCD_REFUSED) {
		etcd_refusal(&request->answer, "watch", &err);
		etcd_link_broken(e, &err); /* at another endpoint, perhaps */
	}
}

static void stream_on_timer(struct loop_timer *timer)
{
	struct etcd *e = container_of(timer, struct etcd, stream.timer);

	if (e->stream.stale && etcd_link_up(&e->link))
		stream_start(e);
}

/* The gateway stops reading the request when it starts to reply: the unread part, on a
 * loaded machine, is lost. */
static void stream_on_check(struct loop_timer *timer)
{
	struct etcd *e = container_of(timer, struct etcd, stream.check);
	struct etcd_group *group;

	if (e->stream.awaited == 0 || !etcd_link_up(&e->link))
		return;
	list_foreach(group, &e->groups, link)
		for (int side = 0; side < ETCD_SIDES; side++)
			if (group->half[side].follow == FOLLOW_STREAM &&
			    !group->half[side].confirmed)
				half_unsync(&group->half[side]);
	e->stream.check_ns *= 2;
	stream_start(e);
}

void etcd_follow_init(struct etcd *e)
{
	etcd_request_init(e, &e->stream.request, stream_on_done);
	e->stream.request.on_kv = stream_on_kv;
	e->stream.request.on_message = stream_on_message;
	e->stream.request.stream = true;
	e->stream.check_ns = FOLLOW_CHECK_NS;
	loop_timer_init(&e->stream.timer, e->loop, stream_on_timer);
	loop_timer_init(&e->stream.check, e->loop, stream_on_check);
}

void etcd_follow_fini(struct etcd *e)
{
	loop_timer_stop(&e->stream.timer);
	loop_timer_stop(&e->stream.check);
	etcd_request_cancel(&e->stream.request);
}

void etcd_follow_step(struct etcd *e)
{
	struct etcd_group *group;

	if (!etcd_link_up(&e->link))
		return;
	list_foreach(group, &e->groups, link)
		for (int side = 0; side < ETCD_SIDES; side++)
			half_step(e, &group->half[side]); /* two start at most */
	if (e->stream.stale && !loop_timer_running(&e->stream.timer))
		loop_timer_start(&e->stream.timer, FOLLOW_GATHER_NS);
}
