/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A calibration is a series of steps, each started by the reply to the one before:
 *
 *   echoes   of 0, 1, 16 and 128 rows in turn, so that a temporary disturbance
 *            affects all sizes alike; the largest in every fourth round only, which
 *            keeps it below 3 MB
 *   speeds   of each geometry that was opened here lately, or of one that is common:
 *            first the own daemon's, then the peer's, then that of the peer's GPUs
 *
 * A peer that does not compute attention has a path, and no speed: it can be fetched
 * from. While no GPU is in use there, its speed is requested every minute. Waiting
 * calibrations are in a list of which the first is active; a deadline for each reply ends
 * one whose peer is silent. All results are written to the page at the end, or none.
 *
 * If an engine reads the page, a failed measurement, or one due within a minute after the
 * last time, is repeated: one timer checks all peers again. Geometries opened later are
 * measured alone, without echoes. So are those that were measured SPEED_FRESH_S ago,
 * because the load of a machine changes.
 */
#include "daemon/attend/calibrate.h"

#include <errno.h>
#include <string.h>

#include "daemon/attend/attend_impl.h"
#include "daemon/attend/echo.h"
#include "daemon/store/store.h"
#include "daemon/attend/rows_send.h"
#include "daemon/attend/speed.h"
#include "daemon/base/context.h"
#include "daemon/base/log.h"
#include "daemon/base/mem.h"
#include "daemon/cost/live.h"
#include "daemon/handshake/handshake.h"
#include "daemon/peer/peer.h"
#include "daemon/session/session.h"
#include "daemon/transport/transport.h"

#define ROUNDS 24u
#define LARGE_ROUNDS 4u /* the largest in every such round */
#define PART_BYTES (256u << 10)
#define ANSWER_NS (2 * LOOP_NS_PER_S)
#define SPEED_NS (10 * LOOP_NS_PER_S) /* it measures at most one other first */
#define AGAIN_NS (60 * LOOP_NS_PER_S)

static const uint32_t usual_rows[CALIBRATE_SIZES] = {0, 1, 16, 128};

struct calibration {
	struct list link; /* attends->calibrations */
	struct attends *attends;
	struct remote *remote; /* held */
	struct calibrate_args args;
	struct calibrate_result result;
	struct fit fit;
	struct loop_timer deadline;
	unsigned int round, size; /* of the echo in flight */
	uint64_t number, sent_ns; /* its; 0: none is */
	uint64_t left, wanted;	  /* its bytes: outstanding, requested */
	struct form forms[CALIBRATE_FORMS_MAX];
	unsigned int form_count, form;
	bool gpu; /* of `form`, the speed in GPU memory is next */
	bool began, asked_peer, no_gpu;
	struct speed_wait own;
};

static void calibration_next(struct calibration *c);
static void calibration_start(struct attends *attends);

/* ---- again ---- */

static bool calibrate_can(const struct remote *remote)
{
	return remote->ready && sm_state(&remote->peer->sm) == PEER_UP &&
	       !remote->peer->self && (remote->peer->features & PEER_FEATURE_ATTEND);
}

static void calibrate_later(struct attends *attends, uint64_t after_ns)
{
	struct loop_timer *due = &attends->calibrate_due;

	if (!attends->page_used || attends->closed)
		return;
	if (!loop_timer_running(due) ||
	    due->at_ns > loop_now_ns(attends->kvd->loop) + after_ns)
		loop_timer_start(due, after_ns);
}

/* `all`: else of peers with a known path. */
static void calibrate_speeds(struct attends *attends, bool all)
{
	const struct live *live = store_costs(attends->kvd);
	struct remote *remote;

	attends->speeds_again = false;
	list_foreach(remote, handshake_remotes(attends->kvd->handshake), link) {
		const struct calibrate_args args = {.remote = remote, .speeds = true};

		if (calibrate_can(remote) &&
		    (all || live_knows(live, remote->peer->instance)) &&
		    calibrate_begin(attends, &args) < 0)
			err_clear();
	}
}

void calibrate_on_due(struct loop_timer *timer)
{
	struct attends *attends = container_of(timer, struct attends, calibrate_due);
	bool again = attends->speeds_again;
	struct remote *remote;

	list_foreach(remote, handshake_remotes(attends->kvd->handshake), link) {
		if (calibrate_can(remote) &&
		    live_stale(store_costs(attends->kvd), remote->peer->instance))
			calibrate_soon(attends, remote);
		calibrate_on_change(attends, remote);
	}
	calibrate_speeds(attends, again); /* unknown or old speeds */
}

/* ---- its end ---- */

static void calibration_end(struct calibration *c, const struct err *why)
{
	struct attends *attends = c->attends;

	loop_timer_stop(&c->deadline);
	speed_forget(&c->own);
	list_remove(&c->link);
	if (why && c->form_count)
		attends->speeds_again = true;
	calibrate_later(attends, why || c->args.rows || attends->speeds_again
					 ? AGAIN_NS
					 : SPEED_FRESH_S * LOOP_NS_PER_S);
	if (why)
		log_info("cost", c->remote->label, "not calibrated", "why=\"%s\"",
			 why->text);
	if (c->args.on_done)
		c->args.on_done(c->args.owner, &c->result, why);
	handshake_release(c->remote);
	mem_free(c);
	loop_defer(attends->kvd->loop, &attends->calibrate_next);
}

static void calibration_fail(struct calibration *c)
{
	struct err why;

	err_take(&why);
	calibration_end(c, &why);
}

static void calibration_on_deadline(struct loop_timer *timer)
{
	struct calibration *c = container_of(timer, struct calibration, deadline);
	struct err why;

	err_set(&why, ERR_TIMEOUT, "%.80s: echo timed out", c->remote->label);
	calibration_end(c, &why);
}

static uint32_t calibrate_now_s(const struct attends *attends)
{
	return (uint32_t)(loop_now_ns(attends->kvd->loop) / LOOP_NS_PER_S);
}

/* ---- echoes ---- */

/* Of an echo in one message, request and reply: both carry the same bytes. */
static uint64_t part_bytes(const struct attends *attends)
{
	uint64_t ask = attend_message_bytes(attends, WIRE_T_ATTEND);
	uint64_t tell = attend_message_bytes(attends, WIRE_T_ATTENTION_RESULT);

	ask = ask < tell ? ask : tell;
	return ask < PART_BYTES ? ask : PART_BYTES;
}

static const uint8_t *echo_bytes(struct attends *attends)
{
	if (!attends->echo_bytes)
		attends->echo_bytes = mem_zalloc(part_bytes(attends));
	return attends->echo_bytes;
}

/* All parts of one echo at once, like the legs of many rows. */
static void echo_send(struct calibration *c)
{
	const uint8_t *bytes = echo_bytes(c->attends);
	uint64_t most = part_bytes(c->attends);
	uint32_t rows = c->args.rows ? c->args.rows : usual_rows[c->size];
	uint64_t left = (uint64_t)rows * CALIBRATE_ROW_BYTES;
	int r = bytes ? 0 : -ENOMEM;

	c->number = CALIBRATE_FIRST | ++c->attends->next_leg;
	c->wanted = c->left = left;
	attends_stay_awake(c->attends);
	c->sent_ns = loop_clock_ns(c->attends->kvd->loop);
	do {
		uint64_t part = left < most ? left : most;
		const struct wire_attend msg = {.attend = c->number, .q = {bytes, part}};

		if (r >= 0)
			r = rows_send_attend(c->remote, &msg);
		left -= part;
	} while (left > 0 && r >= 0);
	if (r < 0) {
		err_pass(r);
		calibration_fail(c);
		return;
	}
	loop_timer_start(&c->deadline, ANSWER_NS);
}

static void echo_came(struct calibration *c)
{
	double us = (double)(loop_clock_ns(c->attends->kvd->loop) - c->sent_ns) / 1e3;

	fit_add(&c->fit, 2.0 * (double)c->wanted, us);
	c->result.bytes += 2 * c->wanted;
	c->attends->figures.calibration_bytes += 2 * c->wanted;
	c->number = 0;
	c->size++;
	calibration_next(c);
}

/* The size of the next echo, if there is one. */
static bool echo_next(struct calibration *c)
{
	unsigned int sizes = c->args.rows ? 1 : CALIBRATE_SIZES;
	unsigned int rounds = c->args.rounds ? c->args.rounds : ROUNDS;

	if (c->size == sizes - 1 && sizes > 1 && c->round % LARGE_ROUNDS)
		c->size++;
	if (c->size >= sizes) {
		c->size = 0;
		c->round++;
	}
	return c->round < rounds;
}

static int echoes_done(struct calibration *c)
{
	const struct live_way way = {
		.key = c->remote->peer->instance,
		.transport = c->remote->transport ? c->remote->transport->ops->name : "",
		.now_s = calibrate_now_s(c->attends)};

	for (uint32_t i = 0; i < c->fit.count; i++) {
		struct fit_size *size = &c->fit.sizes[i];
		uint32_t n =
			size->taken < FIT_SAMPLES_MAX ? size->taken : FIT_SAMPLES_MAX;
		struct cost_figure f = fit_figure(size->us, n, way.now_s);

		c->result.sizes[i].bytes = (uint64_t)size->amount;
		c->result.sizes[i].us = f.value;
		c->result.sizes[i].mad_us = f.mad;
		c->result.sizes[i].count = n;
	}
	c->result.size_count = c->fit.count;
	return c->args.rows ? 0
			    : err_pass(live_echoes(store_costs(c->attends->kvd), &way,
						   &c->fit));
}

/* ---- speeds ---- */

static struct form form_of(const struct attend_shape *shape)
{
	return (struct form){.shape = *shape, .key = "kv"}; /* a name that is none */
}

/* Recently opened ones; else a common one. */
static void calibration_forms(struct calibration *c)
{
	static const struct attend_shape common = {.kind = ATTEND_MLA,
						   .q_type = VALUE_BF16,
						   .kv_type = VALUE_BF16,
						   .heads = 16,
						   .kv_heads = 1,
						   .dqk = 576,
						   .dv = 512,
						   .scale = 0.07f};
	const struct attends *attends = c->attends;

	for (unsigned int i = 0; i < attends->opened_count; i++)
		if (i < CALIBRATE_FORMS_MAX)
			c->forms[c->form_count++] = form_of(&attends->opened[i]);
	if (!c->form_count)
		c->forms[c->form_count++] = form_of(&common);
}

/* Of a daemon; a row for any geometry does not count. */
static bool speed_known(const struct attends *attends, const uint8_t *key,
			const struct cost_shape *shape, bool gpu)
{
	struct cost_speed speed;

	return cost_page_speed(live_page(store_costs(attends->kvd)), key, shape, gpu,
			       &speed) == 0 &&
	       memcmp(&speed.shape, shape, sizeof(*shape)) == 0 &&
	       calibrate_now_s(attends) - speed.compute.fixed.at_s < SPEED_FRESH_S;
}

static void speed_tell(struct calibration *c, const uint8_t *key,
		       const struct cost_compute *compute)
{
	const struct cost_shape shape = speed_shape(&c->forms[c->form]);
	struct live *live = store_costs(c->attends->kvd);
	struct cost_compute now = *compute;

	now.fixed.at_s = now.row.at_s = calibrate_now_s(c->attends);
	now.memory.at_s = now.flops.at_s = now.fixed.at_s;
	if (live_speed(live, key, &shape, c->gpu, &now) < 0)
		err_clear();
}

static int speed_ask_peer(struct calibration *c)
{
	const struct form *form = &c->forms[c->form];
	uint8_t bytes[160];
	struct cursor out;
	struct wire_attend msg = {.attend = CALIBRATE_FIRST | ++c->attends->next_leg,
				  .pool = c->gpu ? ECHO_SPEED_GPU : 0};
	int r;

	cursor_write(&out, bytes, sizeof(bytes));
	r = form_put(form, &out);
	if (r < 0)
		return err_pass(r);
	msg.form.data = bytes;
	msg.form.len = out.pos;
	c->number = msg.attend;
	c->asked_peer = true;
	loop_timer_start(&c->deadline, SPEED_NS);
	return err_pass(rows_send_attend(c->remote, &msg));
}

static void calibration_on_own(struct speed_wait *wait,
			       const struct cost_compute *compute, const struct err *why)
{
	struct calibration *c = container_of(wait, struct calibration, own);

	if (!why)
		speed_tell(c, cost_self, compute);
	if (speed_ask_peer(c) < 0)
		calibration_fail(c);
}

/* Of the next geometry, or of this one in GPU memory. */
static void form_next(struct calibration *c)
{
	c->gpu = !c->gpu && !c->no_gpu;
	c->form += !c->gpu;
}

static void speed_came(struct calibration *c, const struct wire_attention_result *msg)
{
	const struct attend_shape *shape = &c->forms[c->form].shape;
	enum err_code code = err_from_wire(msg->code);
	struct cost_compute compute;
	struct cursor in;

	c->number = 0;
	c->asked_peer = false;
	cursor_read(&in, msg->values.data, msg->values.len);
	if (msg->code == ERR_OK && speed_get(&in, shape, c->gpu, &compute) == 0)
		speed_tell(c, c->remote->peer->instance, &compute);
	else
		err_clear(); /* it does not compute attention: it can be fetched from */
	live_no_attend(store_costs(c->attends->kvd), c->remote->peer->instance, c->gpu,
		       code == ERR_REQUIRE);
	if (code == ERR_BUSY)
		c->attends->speeds_again = true;
	c->no_gpu |= c->gpu && (code == ERR_REQUIRE || code == ERR_BUSY);
	form_next(c);
	calibration_next(c);
}

/* ---- steps ---- */

/* Without local threads the own speed stays unknown: the peer's is enough. An engine
 * attends to fetched KV by itself: a speed of its GPU here is of no use. */
static bool form_is_known(const struct calibration *c)
{
	const struct cost_shape shape = speed_shape(&c->forms[c->form]);

	return speed_known(c->attends, c->remote->peer->instance, &shape, c->gpu) &&
	       (c->gpu || !c->attends->offload ||
		speed_known(c->attends, cost_self, &shape, false));
}

static void calibration_next(struct calibration *c)
{
	int r = 0;

	loop_timer_stop(&c->deadline);
	if (!c->args.speeds && echo_next(c)) {
		echo_send(c);
		return;
	}
	if (!c->form_count) {
		r = c->args.speeds ? 0 : echoes_done(c);
		calibration_forms(c);
	}
	while (c->args.speeds && c->form < c->form_count && form_is_known(c))
		form_next(c);
	if (r < 0) {
		calibration_fail(c);
	} else if (c->args.rows || c->form == c->form_count) {
		c->attends->figures.calibrations += !c->args.rows && !c->args.speeds;
		calibration_end(c, NULL);
	} else if (c->gpu ||
		   speed_ask(c->attends, &c->forms[c->form], false, &c->own) < 0) {
		c->attends->speeds_again |= !c->gpu && err_last()->code == ERR_BUSY;
		err_clear(); /* no local speed: the peer's is useful alone */
		if (speed_ask_peer(c) < 0)
			calibration_fail(c);
	}
}

int calibrate_on_result(struct attends *attends, struct remote *remote,
			const struct wire_attention_result *msg)
{
	struct calibration *c =
		list_first(&attends->calibrations, struct calibration, link);
	struct err why;

	if (!c || c->remote != remote || c->number != msg->attend)
		return 0; /* late */
	if (c->asked_peer) {
		speed_came(c, msg);
		return 0;
	}
	if (msg->code != ERR_OK) {
		err_set(&why, err_from_wire(msg->code), "%.60s: %s", remote->label,
			msg->text);
		calibration_end(c, &why);
		return 0;
	}
	if (msg->values.len > c->left || (c->left > 0 && msg->values.len == 0))
		return err_raise(ERR_PROTO,
				 "ATTENTION_RESULT: %zu bytes of an echo of %llu",
				 msg->values.len, (unsigned long long)c->left);
	c->left -= msg->values.len;
	if (c->left == 0)
		echo_came(c);
	return 0;
}

static int home_measure(struct attends *attends)
{
	struct cost_home home;
	uint32_t now_s = calibrate_now_s(attends);
	int r;

	if (attends->home_known && now_s - attends->home_s < SPEED_FRESH_S)
		return 0;
	r = speed_home(&home);
	if (r < 0)
		return err_pass(r);
	live_home(store_costs(attends->kvd), &home);
	attends->home_known = true;
	attends->home_s = now_s;
	return 0;
}

static void calibration_start(struct attends *attends)
{
	struct calibration *c =
		list_first(&attends->calibrations, struct calibration, link);

	if (!c || c->began)
		return;
	c->began = true;
	if (home_measure(attends) < 0)
		calibration_fail(c);
	else
		calibration_next(c);
}

void calibrate_on_next(struct loop_defer *defer)
{
	calibration_start(container_of(defer, struct attends, calibrate_next));
}

/* ---- start ---- */

int calibrate_begin(struct attends *attends, const struct calibrate_args *args)
{
	struct remote *remote = args->remote;
	struct calibration *c;

	if (attends->closed || !store_costs(attends->kvd))
		return err_raise(ERR_DRAIN, "the daemon is stopping");
	if (!remote->ready || sm_state(&remote->peer->sm) != PEER_UP)
		return err_raise(ERR_PEER, "%s: %s", remote->label,
				 sm_state(&remote->peer->sm) == PEER_UP
					 ? "its data connection is not up yet"
					 : "the connection is down");
	if (remote->peer->self || !(remote->peer->features & PEER_FEATURE_ATTEND))
		return err_raise(ERR_REQUIRE,
				 "%s: its kvd does not compute attention; "
				 "set attention_threads there",
				 remote->label);
	list_foreach(c, &attends->calibrations, link) {
		if (c->remote == remote && c->args.speeds == args->speeds &&
		    !(c->began && c->args.speeds)) /* no later geometries */
			return err_raise(ERR_BUSY, "%s: calibration is running already",
					 remote->label);
	}
	c = mem_zalloc(sizeof(*c));
	if (!c)
		return err_pass(-ENOMEM);
	c->attends = attends;
	c->remote = remote;
	c->args = *args;
	list_init(&c->own.link);
	c->own.on_reported = calibration_on_own;
	loop_timer_init(&c->deadline, attends->kvd->loop, calibration_on_deadline);
	remote->reaches++;
	list_push_back(&attends->calibrations, &c->link);
	loop_defer(attends->kvd->loop, &attends->calibrate_next);
	return 0;
}

void calibrate_soon(struct attends *attends, struct remote *remote)
{
	const struct calibrate_args args = {.remote = remote};
	uint64_t now = loop_now_ns(attends->kvd->loop), wait;

	if (!attends->page_used || attends->closed)
		return;
	wait = live_ask(store_costs(attends->kvd), remote->peer->instance, now, AGAIN_NS);
	if (wait)
		calibrate_later(attends, wait);
	else if (calibrate_begin(attends, &args) < 0)
		err_clear(); /* one is in progress, and this is checked when it ends */
}

void calibrate_all(struct attends *attends)
{
	struct remote *remote;

	attends->page_used = true;
	list_foreach(remote, handshake_remotes(attends->kvd->handshake), link)
		calibrate_on_change(attends, remote);
}

void calibrate_on_change(struct attends *attends, struct remote *remote)
{
	if (attends->page_used && calibrate_can(remote) &&
	    !live_knows(store_costs(attends->kvd), remote->peer->instance))
		calibrate_soon(attends, remote);
}

void calibrate_on_open(struct attends *attends, const struct form *form)
{
	const struct cost_shape shape = speed_shape(form);
	unsigned int at;

	for (unsigned int i = 0; i < CALIBRATE_FORMS_MAX; i++) {
		const struct form has = form_of(&attends->opened[i]);
		const struct cost_shape known = speed_shape(&has);

		if (has.shape.heads && memcmp(&known, &shape, sizeof(shape)) == 0)
			return;
	}
	at = attends->opened_count++ % CALIBRATE_FORMS_MAX;
	if (attends->opened[at].heads)
		log_info("cost", NULL, "a geometry is no longer measured at new peers",
			 "opened=%u", attends->opened_count);
	attends->opened[at] = form->shape;
	if (attends->page_used && !attends->closed)
		calibrate_speeds(attends, true);
}

void calibrate_on_down(struct attends *attends, const struct remote *remote,
		       const struct err *why)
{
	struct calibration *c;

	list_foreach_safe(c, &attends->calibrations, link) {
		if (c->remote == remote)
			calibration_end(c, why);
	}
	if (store_costs(attends->kvd))
		live_drop(store_costs(attends->kvd), remote->peer->instance);
}

void calibrate_close(struct attends *attends, const struct err *why)
{
	struct calibration *c;

	list_foreach_safe(c, &attends->calibrations, link)
		calibration_end(c, why);
	loop_defer_cancel(&attends->calibrate_next);
	loop_timer_stop(&attends->calibrate_due);
}
