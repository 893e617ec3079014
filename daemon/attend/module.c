/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Attention as a module: the data of sessions and peers, and the dispatch of messages
 * within this folder. The rest of the folder uses nothing of this.
 *
 * attention_threads have an offload of their own: blocking jobs of the loop's helpers
 * (populating memory, disk) delay no query, and no more cores are used than configured.
 * So has each GPU (devices.h).
 */
#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <unistd.h>

#include "daemon/attend/attend_impl.h"
#include "daemon/attend/attend_metrics.h"
#include "daemon/attend/commands_attend.h"
#include "daemon/attend/devices.h"
#include "daemon/attend/echo.h"
#include "daemon/attend/ring_attend.h"
#include "daemon/attend/speed.h"
#include "daemon/base/context.h"
#include "daemon/base/mem.h"
#include "daemon/config/config.h"
#include "daemon/cost/live.h"
#include "daemon/session/region.h"
#include "daemon/room/rooms.h"
#include "daemon/session/session.h"
#include "daemon/store/store.h"
#include "gpu/attend_run.h"

#define SPIN_CORES 4 /* fewer: polling would take a core from computing */
#define SPIN_NS UINT64_C(200000)

/* ---- life ---- */

/* A sleeping loop receives the next message after the kernel has woken it, which takes
 * longer than all work for a few rows. */
static bool attends_on_prepare(struct loop_prepare *prepare)
{
	struct attends *attends = container_of(prepare, struct attends, awake);

	if (loop_clock_ns(attends->kvd->loop) < attends->awake_ns) {
		attends->figures.looks++;
		waits_look(rooms_waits(rooms_of(attends->kvd)));
		return true;
	}
	loop_prepare_remove(prepare);
	return false;
}

static uint64_t attends_spin_ns(const struct attends *attends)
{
	uint64_t us = attends->kvd->config->attention_busy_poll_us;

	if (us == 0) /* auto */
		return sysconf(_SC_NPROCESSORS_ONLN) < SPIN_CORES ? 0 : SPIN_NS;
	return us == 1 ? 0 : us * 1000;
}

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
	r = compute_new(kvd->loop,
			&(struct compute_args){.offload = offload,
					       .threads = kvd->config->attention_threads,
					       .isa = kvd->config->attention_isa},
			&attends->compute);
	if (r < 0) {
		mem_free(attends);
		return err_pass(r);
	}
	*part_p = attends;
	return 0;
}

static int attends_new(struct kvd *kvd, void **part_p)
{
	unsigned int threads = kvd->config->attention_threads;
	struct offload *offload = NULL;
	int r = 0;

	if (!store_of(kvd)) /* the chunks are the store's */
		return 0;
	if (kvd->config->attention_gpu_share)
		gpu_attends(kvd->gpu);
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
		offload_free(attends->offload); /* its jobs run to their end */
	devices_free(attends);
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

/* ---- events ---- */

/* Immediately, even if its rooms take longer: seats are the engine's from here on. */
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

/* Its seat gets its end, which frees the slot. */
static bool attends_ring_release(struct session *session, uint64_t id)
{
	return attend_posted(session, id);
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
	case WIRE_T_ATTENTION_RESULT:
		return err_pass(legs_on_result(attends, remote, body));
	default:
		return err_pass(serve_on_stop(attends, remote, body));
	}
}

static void attends_on_down(struct remote *remote, const struct err *why)
{
	struct attends *attends = attends_of(remote->kvd);

	if (!attends)
		return;
	legs_on_down(remote, why);
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

/* ---- figures ---- */

static const struct metric_row attend_metrics[] = {ATTEND_METRICS(METRIC_OWN)};

static void attends_cells(const void *part, uint64_t *cells)
{
	const struct attends *attends = part;
	const struct live *costs = store_costs(attends->kvd);
	struct attend_figures figures, *f = &figures;

	attends_figures(attends, f);
	ATTEND_METRICS(METRIC_CELL)
}

static bool attends_about(const void *part, char *text, size_t size)
{
	struct attend_figures f;

	attends_figures(part, &f);
	snprintf(text, size, "%s, %u threads", f.isa, f.threads);
	return f.threads > 0;
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
	legs_init(remote);
	list_init(&attend_remote(remote)->serves);
}

static bool attends_remote_idle(const struct remote *remote)
{
	const struct attend_remote *there = attend_remote(remote);

	return there->sent == 0 && list_empty(&there->lines) &&
	       list_empty(&there->serves);
}

static const struct command *const attend_tables[] = {attend_commands, cost_commands,
						      NULL};

const struct module attend_module = {
	.id = MODULE_ATTEND,
	.name = "attend",
	.feature = PEER_FEATURE_ATTEND,
	.owner = WIRE_OWNER_ATTEND,
	.commands = attend_tables,
	.verbs = attend_verbs,
	.new = attends_new,
	.close = attends_part_close,
	.drained = attends_part_drained,
	.free = attends_free,
	.session_bytes = sizeof(struct attend_session),
	.session_init = attends_session_init,
	.session_closing = attends_session_closing,
	.session_gone = attends_session_gone,
	.region_going = attends_region_going,
	.ring_has = attend_posted,
	.ring_cancel = attend_cancel,
	.ring_release = attends_ring_release,
	.remote_bytes = sizeof(struct attend_remote),
	.remote_init = attends_remote_init,
	.remote_idle = attends_remote_idle,
	.remote_change = attends_on_change,
	.remote_down = attends_on_down,
	.message = attends_on_message,
	.metrics = attend_metrics,
	.metric_count = ARRAY_LEN(attend_metrics),
	.figures = attends_cells,
	.about = {"attention", attends_about},
};
