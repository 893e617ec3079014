/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Seats lie in memory that nobody can cut, so the loop may read and write them, and they
 * are looked up by number at each post: a region that was unregistered since is a refusal
 * of that post, no pointer that is left.
 *
 * attend_threads have an offload of their own: what blocks the loop's helpers (populating
 * memory, disk) makes no query wait, and no more cores are taken than were given.
 */
#include <assert.h>
#include <errno.h>
#include <string.h>
#include <unistd.h>

#include "daemon/attend/attend_impl.h"
#include "daemon/handshake/handshake.h"
#include "daemon/store/store.h"
#include "daemon/attend/calibrate.h"
#include "daemon/attend/echo.h"
#include "daemon/attend/speed.h"
#include "daemon/base/context.h"
#include "daemon/base/mem.h"
#include "daemon/config/config.h"
#include "daemon/memory/memory.h"
#include "daemon/peer/peer.h"
#include "daemon/session/region.h"
#include "daemon/session/session.h"
#include "proto/wire.h"

#define SPIN_CORES 4 /* of fewer, one that looks is missed by who computes */
#define SPIN_NS UINT64_C(200000)
#define ATTENDS_MAX 64u /* of a session */
#define SEAT_ALIGN 64u
#define MESSAGE_REST                                                      \
	8192u /* of ATTEND, ATTENDED: all but rows, selections and values \
	       */

/* ---- the awake loop ---- */

/* Asleep, a loop hears of the next message when the kernel has woken it, which takes
 * longer than all that is done for a few rows. */
static bool attends_on_prepare(struct loop_prepare *prepare)
{
	struct attends *attends = container_of(prepare, struct attends, awake);

	if (loop_clock_ns(attends->kvd->loop) < attends->awake_ns) {
		attends->looks++;
		return true;
	}
	loop_prepare_remove(prepare);
	return false;
}

static uint64_t attends_spin_ns(const struct attends *attends)
{
	uint64_t us = attends->kvd->config->attend_spin_us;

	if (us == 0) /* auto */
		return sysconf(_SC_NPROCESSORS_ONLN) < SPIN_CORES ? 0 : SPIN_NS;
	return us == 1 ? 0 : us * 1000;
}

void attends_stay_awake(struct attends *attends)
{
	struct loop *loop = attends->kvd->loop;

	if (!attends->spin_ns || loop_is_virtual(loop))
		return;
	attends->awake_ns = loop_clock_ns(loop) + attends->spin_ns;
	if (list_empty(&attends->awake.link))
		loop_prepare_add(loop, &attends->awake);
}

/* ---- life ---- */

static int attends_make(struct kvd *kvd, struct offload *offload, void **part_p)
{
	struct attends *attends = mem_zalloc(sizeof(*attends));
	int r;

	if (!attends)
		return err_pass(-ENOMEM);
	attends->kvd = kvd;
	list_init(&attends->posts);
	list_init(&attends->serving);
	list_init(&attends->calibrations);
	list_init(&attends->echo_shares);
	list_init(&attends->echo_waits);
	loop_defer_init(&attends->calibrate_next, calibrate_on_next);
	loop_timer_init(&attends->calibrate_due, kvd->loop, calibrate_on_due);
	list_init(&attends->awake.link);
	attends->awake.on_prepare = attends_on_prepare;
	attends->spin_ns = attends_spin_ns(attends);
	idmap_init(&attends->legs);
	r = compute_new(kvd->loop, offload, kvd->config->attend_threads,
			kvd->config->attend_isa, &attends->compute);
	if (r < 0) {
		mem_free(attends);
		return err_pass(r);
	}
	*part_p = attends;
	return 0;
}

static int attends_new(struct kvd *kvd, void **part_p)
{
	unsigned int threads = kvd->config->attend_threads;
	struct offload *offload = NULL;
	int r = 0;

	if (!store_of(kvd)) /* whose chunks are attended to */
		return 0;
	if (kvd->compute)
		return err_pass(attends_make(kvd, kvd->compute, part_p));
	if (threads)
		r = offload_new(kvd->loop, threads, &offload);
	if (r >= 0)
		r = attends_make(kvd, offload, part_p);
	if (r < 0) {
		if (offload)
			offload_free(offload);
		return err_pass(r);
	}
	attends_of(kvd)->offload = offload;
	return 0;
}

void attends_close(struct attends *attends)
{
	struct attend_post *post;
	struct err why;

	if (!attends || attends->closed)
		return;
	attends->closed = true;
	err_set(&why, ERR_DRAIN, "the daemon is stopping");
	list_foreach_safe(post, &attends->posts, link)
		post_fail(post, &why);
	calibrate_close(attends, &why);
	echoes_close(attends);
	legs_close(attends);
	serves_close(attends);
}

bool attends_drained(const struct attends *attends)
{
	return !attends || (attends->under_way == 0 && list_empty(&attends->posts));
}

static void attends_free(void *part)
{
	struct attends *attends = part;
	bool drained;

	attends_close(attends);
	if (attends->offload)
		offload_free(attends->offload); /* what it has runs to its end */
	loop_prepare_remove(&attends->awake);
	drained = attends_drained(attends);
	assert(drained);
	(void)drained;
	compute_free(attends->compute);
	speeds_free(attends->speeds);
	mem_free(attends->echo_bytes);
	idmap_fini(&attends->legs);
	mem_free(attends);
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

/* q, o, m, l, each at a multiple of 64 bytes. */
static void seat_lay(struct attend *attend)
{
	const struct form *form = &attend->form;
	struct attend_facts *f = &attend->facts;

	f->q = 0;
	f->o = round_up(form_q_bytes(form, attend->rows));
	f->m = f->o + round_up((uint64_t)attend->rows * form->shape.dv * sizeof(float));
	f->l = f->m + round_up(attend->rows * sizeof(float));
	f->seat_bytes = f->l + round_up(attend->rows * sizeof(float));
}

static int attend_args_check(const struct attend_args *args)
{
	int r = form_check(&args->form);

	if (r < 0)
		return err_pass(r);
	if (args->rows == 0 || args->rows > ATTEND_ROWS_MAX ||
	    args->rows % args->form.shape.heads)
		return err_raise(ERR_RANGE,
				 "rows: %u is no multiple of heads, %u, of at most %u",
				 args->rows, args->form.shape.heads, ATTEND_ROWS_MAX);
	if (args->seats == 0 || args->seats > ATTEND_SEATS_MAX)
		return err_raise(ERR_RANGE, "seats: %u is not in 1 to %u", args->seats,
				 ATTEND_SEATS_MAX);
	if (args->offset % SEAT_ALIGN)
		return err_raise(ERR_INVAL, "offset: no multiple of %u", SEAT_ALIGN);
	return 0;
}

/* Memory that nobody can cut, and that this daemon may write. */
static int region_check(struct session *session, const struct attend *attend)
{
	const struct region *region = region_find(session, attend->region);
	uint64_t bytes = attend->facts.seat_bytes * attend->seats;

	if (!region)
		return err_pass(-ENOENT);
	if (region->kind != REGION_MEMFD || region->memory->kind != MEMORY_SEALED ||
	    !region->memory->writable || (uintptr_t)region->memory->base % SEAT_ALIGN)
		return err_raise(ERR_REQUIRE,
				 "region: seats are in a memfd that can be written");
	if (attend->offset > region->length || bytes > region->length - attend->offset)
		return err_raise(ERR_RANGE,
				 "region: %u seats of %llu bytes from %llu on, it has "
				 "%llu",
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
		r = err_raise(ERR_LIMIT, "%u attends: the limit of a session",
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
	struct attend *attend = part ? idmap_get(&part->attends, id) : NULL;

	if (!attend)
		err_raise(ERR_NOTFOUND, "attend: none of number %llu in this session",
			  (unsigned long long)id);
	return attend;
}

void attend_close(struct attend *attend)
{
	struct attend_session *part = attend_session(attend->session);
	struct err why;

	err_set(&why, ERR_CANCELED, "the attend was closed");
	for (uint32_t i = 0; i < attend->seats; i++) {
		if (attend->taken[i])
			post_fail(attend->taken[i], &why);
	}
	idmap_remove(&part->attends, attend->id);
	attend_free(attend);
}

/* ---- events ---- */

/* At once, however long its rooms take: seats are the engine's from here on. */
static void attends_session_closing(struct session *session)
{
	struct attend_session *part = attend_session(session);
	struct idmap_cursor it;

	idmap_foreach(&part->attends, it)
		attend_close(it.value);
}

static void attends_session_init(struct session *session)
{
	idmap_init(&attend_session(session)->attends);
	idmap_init(&attend_session(session)->posts);
}

static void attends_session_gone(struct session *session)
{
	struct attend_session *part = attend_session(session);

	assert(!idmap_count(&part->attends) && !idmap_count(&part->posts));
	idmap_fini(&part->attends);
	idmap_fini(&part->posts);
}

void attends_region_going(struct region *region)
{
	struct attends *attends = attends_of(region->session->kvd);
	struct attend_post *post;
	struct err why;

	if (!attends)
		return;
	err_set(&why, ERR_CANCELED, "the seats' region is unregistered");
	list_foreach_safe(post, &attends->posts, link) {
		if (post->region == region)
			post_fail(post, &why);
	}
}

int attends_on_message(struct remote *remote, const struct wire_header *h,
		       struct cursor *body)
{
	struct attends *attends = attends_of(remote->kvd);

	switch (h->type) {
	case WIRE_T_ATTEND:
		return err_pass(serve_on_attend(attends, remote, body));
	case WIRE_T_ATTENDED:
		return err_pass(legs_on_attended(attends, remote, body));
	default:
		return err_pass(serve_on_stop(attends, remote, body));
	}
}

static void attends_on_down(struct remote *remote, const struct err *why)
{
	struct attends *attends = attends_of(remote->kvd);

	if (!attends)
		return;
	legs_on_down(attends, remote, why);
	calibrate_on_down(attends, remote, why);
	echo_on_down(attends, remote);
	serve_on_down(remote);
}

void attends_on_change(struct remote *remote)
{
	struct attends *attends = attends_of(remote->kvd);

	if (attends)
		calibrate_on_change(attends, remote);
}

void attends_figures(const struct attends *attends, struct attend_figures *figures_p)
{
	struct compute_figures c;

	compute_figures(attends->compute, &c);
	*figures_p =
		(struct attend_figures){.posts = attends->posted,
					.rows = attends->posted_rows,
					.served = attends->served,
					.served_rows = attends->served_rows,
					.refused = attends->refused,
					.failed = attends->failed,
					.calibrations = attends->calibrated,
					.calibration_bytes = attends->calibrated_bytes,
					.stale = attends->stale,
					.echoes = attends->echoes,
					.batches = c.batches,
					.attend_us = c.attend_us,
					.looks = attends->looks,
					.threads = c.threads,
					.waiting = c.waiting,
					.live = attends->post_count,
					.isa = c.isa};
}

/* ---- the module ---- */

static void attends_part_close(void *part, const struct err *why)
{
	(void)why;
	attends_close(part);
}

static bool attends_part_drained(const void *part, struct err *why_p)
{
	(void)why_p;
	return attends_drained(part);
}

static void attends_remote_init(struct remote *remote)
{
	list_init(&attend_remote(remote)->legs);
	list_init(&attend_remote(remote)->serves);
}

static bool attends_remote_idle(const struct remote *remote)
{
	const struct attend_remote *there = attend_remote(remote);

	return there->sent == 0 && list_empty(&there->legs) && list_empty(&there->serves);
}

const struct module attend_module = {
	.id = MODULE_ATTEND,
	.owner = WIRE_OWNER_ATTEND,
	.new = attends_new,
	.close = attends_part_close,
	.drained = attends_part_drained,
	.free = attends_free,
	.session_bytes = sizeof(struct attend_session),
	.session_init = attends_session_init,
	.session_closing = attends_session_closing,
	.session_gone = attends_session_gone,
	.region_going = attends_region_going,
	.remote_bytes = sizeof(struct attend_remote),
	.remote_init = attends_remote_init,
	.remote_idle = attends_remote_idle,
	.remote_change = attends_on_change,
	.remote_down = attends_on_down,
	.message = attends_on_message,
};
