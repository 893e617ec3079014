/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Seats are in memory that cannot be truncated, so the loop may read and write them. They
 * are looked up by number at each post: if the region was unregistered since, that post
 * is refused, and no stale pointer is used.
 */
#include <errno.h>

#include "daemon/attend/attend_impl.h"
#include "daemon/attend/calibrate.h"
#include "daemon/attend/devices.h"
#include "daemon/base/mem.h"
#include "daemon/config/config.h"
#include "daemon/memory/memory.h"
#include "daemon/peer/peer.h"
#include "daemon/session/region.h"
#include "daemon/session/session.h"
#include "proto/wire.h"

#define ATTENDS_MAX 64u /* of a session */
#define SEAT_ALIGN 64u
#define MESSAGE_REST                                                              \
	8192u /* of ATTEND, ATTENTION_RESULT: all but rows, selections and values \
	       */

/* ---- the awake loop ---- */

void attends_stay_awake(struct attends *attends)
{
	struct loop *loop = attends->kvd->loop;

	if (!attends->spin_ns || loop_is_virtual(loop))
		return;
	attends->awake_ns = loop_clock_ns(loop) + attends->spin_ns;
	if (list_empty(&attends->awake.link))
		loop_prepare_add(loop, &attends->awake);
}

uint64_t attend_message_bytes(const struct attends *attends, enum wire_type type)
{
	uint64_t most = attends->kvd->config->peer_message_bytes - WIRE_HEADER_BYTES;

	return (wire_body_cap(type) < most ? wire_body_cap(type) : most) - MESSAGE_REST;
}

/* ---- seats ---- */

static uint64_t round_up(uint64_t bytes)
{
	return (bytes + SEAT_ALIGN - 1) / SEAT_ALIGN * SEAT_ALIGN;
}

/* q, o, m, l, and two words, each at a multiple of 64 bytes. */
static void seat_lay(struct attend *attend)
{
	const struct form *form = &attend->form;
	struct attend_facts *f = &attend->facts;

	f->q = 0;
	f->o = round_up(form_q_bytes(form, attend->rows));
	f->m = f->o + round_up((uint64_t)attend->rows * form->shape.dv * sizeof(float));
	f->l = f->m + round_up(attend->rows * sizeof(float));
	f->ready = f->l + round_up(attend->rows * sizeof(float));
	f->done = f->ready + SEAT_ALIGN;
	f->seat_bytes = f->done + SEAT_ALIGN;
}

static int attend_args_check(const struct attend_args *args)
{
	int r = form_check(&args->form);

	if (r < 0)
		return err_pass(r);
	if (args->rows == 0 || args->rows > ATTEND_ROWS_MAX ||
	    args->rows % args->form.shape.heads)
		return err_raise(ERR_RANGE,
				 "rows: %u must be a multiple of heads (%u), and at "
				 "most %u",
				 args->rows, args->form.shape.heads, ATTEND_ROWS_MAX);
	if (args->seats == 0 || args->seats > ATTEND_SEATS_MAX)
		return err_raise(ERR_RANGE, "seats: %u is out of range (1 to %u)",
				 args->seats, ATTEND_SEATS_MAX);
	if (args->offset % SEAT_ALIGN)
		return err_raise(ERR_INVAL, "offset: must be a multiple of %u",
				 SEAT_ALIGN);
	return 0;
}

/* Memory that cannot be truncated, and that this daemon may write. */
static int region_check(struct session *session, const struct attend *attend)
{
	const struct region *region = region_find(session, attend->region);
	uint64_t bytes = attend->facts.seat_bytes * attend->seats;

	if (!region)
		return err_pass(-ENOENT);
	if (region->kind != REGION_MEMFD || region->memory->kind != MEMORY_SEALED ||
	    !region->memory->writable || (uintptr_t)region->memory->base % SEAT_ALIGN)
		return err_raise(ERR_REQUIRE, "region: seats need a writable memfd");
	if (attend->offset > region->length || bytes > region->length - attend->offset)
		return err_raise(ERR_RANGE,
				 "region: %u seats of %llu bytes at offset %llu exceed "
				 "its %llu bytes",
				 attend->seats,
				 (unsigned long long)attend->facts.seat_bytes,
				 (unsigned long long)attend->offset,
				 (unsigned long long)region->length);
	return 0;
}

static void attend_free(struct attend *attend)
{
	charge_drop(&attend->charge);
	mem_free(attend->taken);
	mem_free(attend);
}

static int attend_new(struct session *session, const struct attend_args *args,
		      struct attend **attend_p)
{
	struct attend *attend = mem_zalloc(sizeof(*attend));
	int r;

	if (!attend)
		return err_pass(-ENOMEM);
	*attend = (struct attend){.attends = attends_of(session->kvd),
				  .session = session,
				  .region = args->region,
				  .offset = args->offset,
				  .rows = args->rows,
				  .seats = args->seats,
				  .form = args->form};
	seat_lay(attend);
	attend->taken = mem_calloc(args->seats, sizeof(struct attend_post *));
	r = attend->taken ? region_check(session, attend) : -ENOMEM;
	if (r >= 0)
		r = charge_take(&attend->charge, session->account, ACCOUNT_ATTENDS,
				sizeof(*attend) +
					args->seats * sizeof(struct attend_post *));
	if (r < 0) {
		attend_free(attend);
		return err_pass(r);
	}
	*attend_p = attend;
	return 0;
}

int attend_open(struct session *session, const struct attend_args *args,
		struct attend **attend_p)
{
	struct attend_session *part = attend_session(session);
	struct attend *attend;
	int r = attend_args_check(args);

	if (r >= 0 && idmap_count(&part->attends) >= ATTENDS_MAX)
		r = err_raise(ERR_LIMIT, "%u attention contexts: limit of a session",
			      ATTENDS_MAX);
	if (r >= 0)
		r = attend_new(session, args, &attend);
	if (r < 0)
		return err_pass(r);
	attend->id = attend->facts.id = ++session->next_id;
	r = idmap_put(&part->attends, attend->id, attend);
	if (r < 0) {
		attend_free(attend);
		return err_pass(r);
	}
	calibrate_on_open(attend->attends, &attend->form);
	*attend_p = attend;
	return 0;
}

void attend_facts(const struct attend *attend, struct attend_facts *facts_p)
{
	*facts_p = attend->facts;
}

struct attend *attend_find(struct session *session, uint64_t id)
{
	const struct attend_session *part = attend_session(session);

	return session_found(part ? idmap_get(&part->attends, id) : NULL, "attend", id);
}

void attend_close(struct attend *attend)
{
	struct attend_session *part = attend_session(attend->session);
	struct err why;

	err_set(&why, ERR_CANCELED, "the attention context was closed");
	for (uint32_t i = 0; i < attend->seats; i++) {
		if (attend->taken[i])
			post_fail(attend->taken[i], &why);
	}
	idmap_remove(&part->attends, attend->id);
	attend_free(attend);
}

void attends_figures(const struct attends *attends, struct attend_figures *figures_p)
{
	struct compute_figures c, gpu;

	compute_figures(attends->compute, &c);
	devices_figures(attends, &gpu);
	*figures_p = attends->figures;
	figures_p->batches = c.batches + gpu.batches;
	figures_p->attend_us = c.attend_us;
	figures_p->gpu_us = gpu.attend_us;
	figures_p->threads = c.threads;
	figures_p->waiting = c.waiting + gpu.waiting;
	figures_p->live = attends->post_count;
	figures_p->isa = c.isa;
}
