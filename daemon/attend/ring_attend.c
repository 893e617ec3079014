/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Posts by the submission ring. A selection may have 2^20 numbers: reading and checking
 * each of them once is a helper's job, for which the ring waits, and legs cut their parts
 * of it when they start (leg.c). Short ones are read on the loop, as the round trip to a
 * helper takes longer.
 */
#include "daemon/attend/ring_attend.h"

#include <errno.h>

#include "daemon/attend/attend.h"
#include "daemon/base/account.h"
#include "daemon/base/context.h"
#include "daemon/base/mem.h"
#include "daemon/loop/offload.h"
#include "daemon/session/session.h"
#include "daemon/session/status.h"

#define READ_INLINE (64u << 10) /* bytes: more are read by a helper */
#define DEADLINE_US_MAX 60000000u
#define DEADLINE_US_PRESET 1000000u

static void on_failed(struct session *session, uint32_t slot, uint64_t id,
		      const struct err *why)
{
	(void)err_reraise(why);
	ring_refuse(ring_of(session), slot, id);
}

/* An entry and its payload, read on the loop or, if long, on a helper. */
struct reading {
	struct offload_job job;
	struct ring *ring;
	struct kvd_ring_entry e;
	struct ring_payload payload;
	uint32_t heads;
	struct charge charge;
	struct attend_post_args args;
};

static int reading_read(struct reading *reading)
{
	const struct kvd_ring_entry *e = &reading->e;
	size_t head = e->n1 * sizeof(struct kvd_ring_part);
	struct attend_post_args *args = &reading->args;
	int r = ring_payload_copy(&reading->payload, e->offset, e->bytes, &args->data);

	if (r < 0)
		return err_pass(r);
	args->part_count = e->n1;
	args->select_count = (uint32_t)((e->bytes - head) / sizeof(uint32_t));
	attend_post_scan(reading->heads, args);
	return 0;
}

static void reading_work(struct offload_job *job)
{
	job->result = reading_read(container_of(job, struct reading, job));
	if (job->result < 0)
		err_take(&job->err);
}

static int reading_post(struct reading *reading)
{
	const struct kvd_ring_entry *e = &reading->e;
	struct attend *attend = attend_find(reading->ring->session, e->a);
	struct attend_post_args *args = &reading->args;

	if (!attend)
		return err_pass(-ENOENT);
	args->id = KVD_RING_IDS + e->slot;
	args->slot = e->slot;
	args->seat = e->n0;
	args->layer = (uint32_t)e->b;
	args->deadline_ns = (e->n2 ? e->n2 : DEADLINE_US_PRESET) * UINT64_C(1000);
	args->value = e->c;
	args->on_failed = on_failed;
	charge_drop(&reading->charge); /* the post charges itself */
	return err_pass(attend_post(attend, args));
}

static void reading_fini(struct reading *reading)
{
	charge_drop(&reading->charge);
	mem_free_large(mem_steal(reading->args.data), reading->e.bytes);
}

static void attend_refuse(struct ring *ring, const struct kvd_ring_entry *e)
{
	ring_refuse(ring, e->slot, KVD_RING_IDS + e->slot);
	status_slot_release(ring->session->status, e->slot);
	if (e->c)
		attend_pass(ring->session, e->a, e->n0, e->c);
}

static void reading_done(struct offload_job *job)
{
	struct reading *reading = container_of(job, struct reading, job);
	struct session *session = reading->ring->session;

	if (!session->ending) {
		int r = job->result < 0 ? err_reraise(&job->err) : reading_post(reading);

		if (r < 0)
			attend_refuse(reading->ring, &reading->e);
	}
	ring_work_end(reading->ring, !reading->payload.data);
	reading_fini(reading);
	mem_free(reading->payload.data);
	mem_free(reading);
	session_drain_end(session);
}

static int reading_begin(const struct reading *of, struct ring_payload *arena)
{
	struct reading *reading = mem_dup(of, sizeof(*of));
	struct session *session = of->ring->session;
	int r = reading ? 0 : -ENOMEM;

	if (r >= 0)
		r = charge_take(&reading->charge, session->account, ACCOUNT_ATTENDS,
				of->e.bytes);
	if (r < 0) {
		mem_free(reading);
		return err_pass(r);
	}
	arena->data = NULL; /* taken */
	session_drain_begin(session);
	reading->job = (struct offload_job){.work = reading_work,
					    .done = reading_done,
					    .principal = session_principal(session)};
	list_init(&reading->job.link);
	offload_submit(session->kvd->offload, &reading->job);
	return ring_work_begin(of->ring, reading);
}

static int attend_do(struct ring *ring, const struct kvd_ring_entry *e,
		     struct ring_payload *arena)
{
	struct attend *attend = attend_find(ring->session, e->a);
	struct reading reading = {.ring = ring, .e = *e, .payload = *arena};
	int r;

	if (!attend)
		return err_pass(-ENOENT);
	if (e->b > UINT32_MAX || e->n2 > DEADLINE_US_MAX)
		return err_raise(ERR_RANGE,
				 "layer %llu or deadline_us %u is out of range "
				 "(deadline_us at most %u)",
				 (unsigned long long)e->b, e->n2, DEADLINE_US_MAX);
	reading.heads = attend_heads(attend);
	if (e->bytes > READ_INLINE)
		return err_pass(reading_begin(&reading, arena));
	r = reading_read(&reading);
	if (r >= 0)
		r = reading_post(&reading);
	reading_fini(&reading);
	return err_pass(r);
}

static int op_attend(struct ring *ring, const struct kvd_ring_entry *e,
		     struct ring_payload *arena)
{
	uint64_t id = KVD_RING_IDS + e->slot;
	int r;

	if (e->n1 > ATTEND_PARTS_MAX || e->bytes < e->n1 * sizeof(struct kvd_ring_part))
		return err_raise(ERR_PROTO, "op %u: %u parts do not fit in %u bytes",
				 e->op, e->n1, e->bytes);
	if (e->bytes >
	    e->n1 * sizeof(struct kvd_ring_part) + ATTEND_SELECT_MAX * sizeof(uint32_t))
		return err_raise(ERR_PROTO,
				 "op %u: its selections do not fit in %u "
				 "bytes",
				 e->op, e->bytes);
	r = status_slot_claim(ring->session->status, e->slot, e->gen, id);
	if (r < 0)
		return err_pass(r);
	r = attend_do(ring, e, arena);
	if (r >= 0)
		return r;
	attend_refuse(ring, e);
	return 0;
}

const struct ring_verb attend_verbs[] = {{KVD_RING_ATTEND, op_attend}, {0, NULL}};
