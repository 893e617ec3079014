/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a daemon measures of a peer while an engine reads its page, in virtual time: it is
 * tried again after a failure and when a line was back too soon; geometries that are
 * opened later are asked for; echoes go in parts that fit; a peer that answers wrongly is
 * refused, and one that asks too much.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "daemon/attend/attend_impl.h"
#include "daemon/attend/calibrate.h"
#include "daemon/attend/echo.h"
#include "daemon/attend/speed.h"
#include "daemon/cost/live.h"
#include "daemon/peer/peer.h"
#include "daemon/store/store.h"
#include "tests/lib/attend_world.h"

#define A_WHILE (5 * LOOP_NS_PER_S)
#define A_MINUTE (61 * LOOP_NS_PER_S)
#define BACK_NS UINT64_C(50000) /* an answer's way, and as much for each 32 KiB */

struct heard {
	struct attend_world *w;
	unsigned int echoes, speeds, gpu_speeds; /* that the holder was asked for */
	uint64_t largest;			 /* echo */
	bool lost, busy;
};

static struct attends *node_attends(const struct attend_world *w, unsigned int node)
{
	return attends_of(&w->c.nodes[node].kvd);
}

static struct live *live_of(const struct attend_world *w)
{
	return store_costs(&w->c.nodes[AW_REQUESTER].kvd);
}

static const uint8_t *holder_key(const struct attend_world *w)
{
	return attend_world_remote(w, AW_REQUESTER)->peer->instance;
}

/* Bytes take time, which the simulated lines do not know. */
static void answer_late(struct heard *heard, uint64_t bytes)
{
	struct fake_profile *profile = fake_hub_profile(heard->w->c.bytes);

	profile->delay_min_ns = BACK_NS + BACK_NS * bytes / 32768;
	profile->delay_max_ns = profile->delay_min_ns + 1000;
}

static bool tap(unsigned int node, const struct wire_header *h, struct cursor body,
		void *arg)
{
	struct heard *heard = arg;
	struct wire_attend msg;

	if (node != AW_HOLDER || h->type != WIRE_T_ATTEND ||
	    wire_attend_get(&body, &msg) < 0 || msg.attend < CALIBRATE_FIRST)
		return false;
	heard->speeds += msg.form.len > 0 && msg.pool != ECHO_SPEED_GPU;
	heard->gpu_speeds += msg.form.len > 0 && msg.pool == ECHO_SPEED_GPU;
	heard->echoes += msg.form.len == 0;
	if (msg.q.len > heard->largest)
		heard->largest = msg.q.len;
	answer_late(heard, msg.q.len);
	if (heard->busy && msg.form.len) {
		const struct wire_attention_result no = {.attend = msg.attend,
							 .code = ERR_BUSY};

		assert_int_equal(
			calibrate_on_result(node_attends(heard->w, AW_REQUESTER),
					    attend_world_remote(heard->w, AW_REQUESTER),
					    &no),
			0);
		return true;
	}
	return heard->lost;
}

static int setup(void **state)
{
	static struct attend_world w;
	static struct heard heard;

	heard = (struct heard){.w = &w};
	attend_world_tap = tap;
	attend_world_tap_arg = &heard;
	attend_world_new(&w, 1);
	for (unsigned int i = 0; i < 2; i++)
		node_attends(&w, i)->offload = w.c.nodes[i].kvd.offload;
	*state = &heard;
	return 0;
}

static int teardown(void **state)
{
	struct heard *heard = *state;

	for (unsigned int i = 0; i < 2; i++)
		node_attends(heard->w, i)->offload = NULL; /* the node's own */
	attend_world_free(heard->w);
	attend_world_tap = NULL;
	return 0;
}

static bool knows(const struct heard *heard)
{
	return live_knows(live_of(heard->w), holder_key(heard->w));
}

/* Of this daemon, and of the holder. */
static bool knows_speed(const struct heard *heard, const struct form *form)
{
	const struct cost_shape shape = speed_shape(form);
	const struct cost_page *page = live_page(live_of(heard->w));
	struct cost_speed speed;

	return cost_page_speed(page, holder_key(heard->w), &shape, COST_HOST, &speed) ==
		       0 &&
	       cost_page_speed(page, cost_self, &shape, COST_HOST, &speed) == 0;
}

static struct cost_peer told(const struct heard *heard)
{
	struct cost_peer peer;

	assert_int_equal(
		cost_page_peer(live_page(live_of(heard->w)), holder_key(heard->w), &peer),
		0);
	return peer;
}

static void run(const struct heard *heard, uint64_t ns)
{
	cluster_run(&heard->w->c, ns);
}

static struct form form_of_heads(uint16_t heads)
{
	return (struct form){.shape = {.kind = ATTEND_GQA,
				       .q_type = VALUE_BF16,
				       .kv_type = VALUE_BF16,
				       .heads = heads,
				       .kv_heads = 1,
				       .dqk = 16,
				       .dv = 16,
				       .scale = 0.25f},
			     .key = "k",
			     .value = "v"};
}

static struct form opened_form(const struct heard *heard)
{
	struct form form = form_of_heads(AW_HEADS);

	(void)heard;
	form.shape.kv_heads = AW_HEADS;
	return form;
}

/* ---- again ---- */

static void calibration_failed_is_repeated(void **state)
{
	struct heard *heard = *state;
	struct form form = opened_form(heard);

	heard->lost = true;
	calibrate_all(node_attends(heard->w, AW_REQUESTER));
	run(heard, A_WHILE);
	assert_false(knows(heard));
	assert_int_equal(heard->echoes, 1);
	heard->lost = false;
	run(heard, A_MINUTE);
	assert_true(knows(heard));
	assert_true(knows_speed(heard, &form));
	assert_int_equal(node_attends(heard->w, AW_REQUESTER)->figures.calibrations, 1);
	run(heard, 3 * A_MINUTE); /* once is enough */
	assert_int_equal(node_attends(heard->w, AW_REQUESTER)->figures.calibrations, 1);
}

static bool is_down(void *arg)
{
	const struct heard *heard = arg;

	return !attend_world_remote(heard->w, AW_REQUESTER)->ready;
}

static bool is_up(void *arg)
{
	return !is_down(arg);
}

static void peer_back_within_a_minute_is_measured(void **state)
{
	struct heard *heard = *state;
	const struct node *nodes = heard->w->c.nodes;

	calibrate_all(node_attends(heard->w, AW_REQUESTER));
	run(heard, A_WHILE);
	assert_true(knows(heard));
	mem_hub_partition(heard->w->c.links, nodes[0].endpoint, nodes[1].endpoint, true);
	cluster_until(&heard->w->c, is_down, heard, "the line's end");
	assert_false(knows(heard));
	mem_hub_partition(heard->w->c.links, nodes[0].endpoint, nodes[1].endpoint, false);
	cluster_until(&heard->w->c, is_up, heard, "the line");
	run(heard, A_MINUTE);
	assert_true(knows(heard));
	assert_int_equal(node_attends(heard->w, AW_REQUESTER)->figures.calibrations, 2);
}

static void speed_refused_temporarily_is_requested_again(void **state)
{
	struct heard *heard = *state;
	struct form form = opened_form(heard);
	unsigned int echoes;

	heard->busy = true;
	calibrate_all(node_attends(heard->w, AW_REQUESTER));
	run(heard, A_WHILE);
	assert_true(knows(heard));
	assert_false(knows_speed(heard, &form));
	echoes = heard->echoes;
	heard->busy = false;
	run(heard, A_MINUTE);
	assert_true(knows_speed(heard, &form));
	assert_int_equal(told(heard).no_attend[COST_HOST], 0);
	assert_int_equal(heard->speeds, 2);
	assert_int_equal(heard->echoes, echoes); /* the way is known */
	run(heard, 3 * A_MINUTE);
	assert_int_equal(heard->speeds, 2);
}

/* ---- geometries ---- */

/* The machines get busy, and idle again; the way is judged by what goes there. */
static void speeds_are_measured_again_after_a_while(void **state)
{
	struct heard *heard = *state;
	struct attends *requester = node_attends(heard->w, AW_REQUESTER);
	const struct form form = form_of_heads(3);
	unsigned int speeds, echoes;

	calibrate_all(requester);
	calibrate_on_open(requester, &form);
	run(heard, 2 * A_MINUTE);
	assert_true(knows_speed(heard, &form));
	speeds = heard->speeds;
	echoes = heard->echoes;
	run(heard, A_MINUTE);
	assert_int_equal(heard->speeds, speeds);
	for (unsigned int i = 0; i < 3; i++) {
		uint32_t home_s = requester->home_s;

		run(heard, SPEED_FRESH_S * LOOP_NS_PER_S);
		assert_true(heard->speeds > speeds);
		assert_true(requester->home_s > home_s);
		assert_true(knows_speed(heard, &form));
		speeds = heard->speeds;
	}
	assert_int_equal(heard->echoes, echoes);
}

static void geometry_opened_later_is_measured(void **state)
{
	struct heard *heard = *state;
	struct form form = form_of_heads(8);
	unsigned int echoes;

	calibrate_all(node_attends(heard->w, AW_REQUESTER));
	run(heard, A_WHILE);
	echoes = heard->echoes;
	assert_false(knows_speed(heard, &form));
	calibrate_on_open(node_attends(heard->w, AW_REQUESTER), &form);
	run(heard, A_WHILE);
	assert_true(knows_speed(heard, &form));
	assert_int_equal(heard->speeds, 2);
	assert_int_equal(heard->echoes, echoes);
	calibrate_on_open(node_attends(heard->w, AW_REQUESTER), &form); /* known */
	run(heard, A_WHILE);
	assert_int_equal(heard->speeds, 2);
	/* more than a calibration has at once: the latest count */
	for (uint16_t heads = 9; heads < 9 + 2 * CALIBRATE_FORMS_MAX; heads++) {
		form = form_of_heads(heads);
		calibrate_on_open(node_attends(heard->w, AW_REQUESTER), &form);
		run(heard, A_MINUTE);
		assert_true(knows_speed(heard, &form));
	}
}

/* kvd_decide() has one number of bytes for q and KV. */
static void wider_query_has_the_speed_of_its_kv(void **state)
{
	struct heard *heard = *state;
	struct form form = form_of_heads(8);
	struct cost_shape shape = cost_shape_gqa(8, 1, 16, 16, 2, 4);
	struct cost_speed speed;

	form.shape.q_type = VALUE_FP32;
	calibrate_on_open(node_attends(heard->w, AW_REQUESTER), &form);
	calibrate_all(node_attends(heard->w, AW_REQUESTER));
	run(heard, A_WHILE);
	assert_int_equal(cost_page_speed(live_page(live_of(heard->w)),
					 holder_key(heard->w), &shape, COST_HOST, &speed),
			 0);
}

/* ---- rows ---- */

/* What rows took begins with their post, and with nothing before it; also of those that
 * are merged with others. */
static void time_of_rows_is_their_posts(void **state)
{
	struct heard *heard = *state;
	struct attend_world *w = heard->w;
	struct kvd_ring_part parts[2] = {attend_world_part(w->hold),
					 attend_world_part(w->near)};

	calibrate_all(node_attends(w, AW_REQUESTER));
	run(heard, A_MINUTE);
	for (unsigned int count = 1; count <= 2; count++) {
		const struct cost_link *link;
		struct cost_peer peer;

		attend_world_rows(w, 0, count);
		attend_world_post(w, 0, 0, parts, count, NULL, 0);
		run(heard, A_WHILE);
		assert_int_equal(attend_world_state(w, 0), KVD_SUCCESS);
		peer = told(heard);
		link = &peer.links[0];
		assert_int_equal(link->congestion.count, count);
		assert_true(link->congestion.value > 0.1 && link->congestion.value < 10);
		assert_int_equal(peer.stale, 0);
	}
}

/* ---- bytes ---- */

static void echoes_are_split_to_message_size(void **state)
{
	struct heard *heard = *state;

	for (unsigned int i = 0; i < 2; i++)
		heard->w->c.nodes[i].config.peer_message_bytes = 65536;
	calibrate_all(node_attends(heard->w, AW_REQUESTER));
	run(heard, A_WHILE);
	assert_true(knows(heard));
	assert_true(heard->largest > 1152 && heard->largest < 65536);
}

static void holder_without_attention_refuses(void **state)
{
	struct heard *heard = *state;

	node_attends(heard->w, AW_HOLDER)->offload = NULL;
	calibrate_all(node_attends(heard->w, AW_REQUESTER));
	run(heard, A_WHILE);
	assert_int_equal(told(heard).no_attend[COST_HOST], 1);
	heard->speeds = 0;
	run(heard, 3 * A_MINUTE);
	assert_int_equal(heard->speeds, 0); /* it will not change its mind */
}

/* A holder without a share of GPUs is not asked again; one whose GPUs are not in use is.
 */
static void gpu_speed_is_requested_until_it_is_refused(void **state)
{
	struct heard *heard = *state;
	struct node *holder = &heard->w->c.nodes[AW_HOLDER];

	assert_int_equal(gpu_new("no such library", "auto", &holder->kvd.gpu), 0);
	holder->config.attention_gpu_share = 10;
	calibrate_all(node_attends(heard->w, AW_REQUESTER));
	run(heard, A_WHILE);
	assert_int_equal(heard->gpu_speeds, 1);
	assert_int_equal(told(heard).no_attend[COST_GPU], 0);
	run(heard, A_MINUTE);
	assert_int_equal(heard->gpu_speeds, 2);
	assert_int_equal(heard->speeds, 1);
	holder->config.attention_gpu_share = 0;
	run(heard, A_MINUTE);
	assert_int_equal(heard->gpu_speeds, 3);
	assert_int_equal(told(heard).no_attend[COST_GPU], 1);
	assert_int_equal(told(heard).no_attend[COST_HOST], 0);
	run(heard, 3 * A_MINUTE);
	assert_int_equal(heard->gpu_speeds, 3);
	gpu_free(mem_steal(holder->kvd.gpu));
}

/* ---- pulls ---- */

static void fetch(struct attend_world *w, uint64_t hold, const char *pages)
{
	cluster_ok(&w->c, w->engine[AW_REQUESTER],
		   "{'cmd':'chunk.fetch','hold':%llu,'pool':%llu,"
		   "'views':{'kv':{'pages':[%s],'tokens':[0,16]}}}",
		   (unsigned long long)hold,
		   (unsigned long long)w->cache[AW_REQUESTER].pool, pages);
}

static double pull_us(const struct attend_world *w, unsigned int node)
{
	struct cost_holder holder = {.link_count = 1};
	struct cost_peer peer;
	struct remote *remote;

	list_foreach(remote, handshake_remotes(w->c.nodes[AW_REQUESTER].kvd.handshake),
		     link) {
		if (strcmp(remote->peer->endpoint, w->c.nodes[node].endpoint) == 0)
			assert_int_equal(cost_page_peer(live_page(live_of(w)),
							remote->peer->instance, &peer),
					 0);
	}
	holder.links = peer.links;
	return cost_pull(&holder, 4096).us;
}

/* Side by side: when one ended says nothing of how long the other took. */
static void pulls_from_two_holders_are_priced_each(void **state)
{
	struct attend_world w;
	struct fake_profile *profile;
	uint64_t second;

	(void)state;
	attend_world_new_two(&w, 1);
	second = attend_world_hold(&w, AW_REQUESTER, 21, AW_CHUNKS, 600000);
	profile = fake_hub_profile(w.c.bytes);
	profile->delay_min_ns = LOOP_NS_PER_MS;
	profile->delay_max_ns = LOOP_NS_PER_MS + 1000;
	fetch(&w, w.hold, "0,1,2,3");
	fetch(&w, second, "4,5,6,7");
	cluster_run(&w.c, LOOP_NS_PER_S);
	assert_true(pull_us(&w, AW_HOLDER) > 1000);
	assert_true(pull_us(&w, AW_SECOND) > 1000);
	attend_world_free(&w);
}

/* ---- peers that ask too much, or what is none ---- */

/* What the holder says to a speed that the requester asks for: it is measured meanwhile.
 */
static int ask_speed(const struct heard *heard, const struct form *form)
{
	uint8_t bytes[160];
	struct cursor out;
	struct wire_attend msg = {.attend = CALIBRATE_FIRST + 1000000};
	int r;

	cursor_write(&out, bytes, sizeof(bytes));
	assert_int_equal(form_put(form, &out), 0);
	msg.form.data = bytes;
	msg.form.len = out.pos;
	r = echo_serve(node_attends(heard->w, AW_HOLDER),
		       attend_world_remote(heard->w, AW_HOLDER), &msg);
	run(heard, LOOP_NS_PER_MS);
	return r;
}

static int ask_heads(const struct heard *heard, uint16_t heads)
{
	const struct form form = form_of_heads(heads);

	return ask_speed(heard, &form);
}

static void speeds_of_a_peer_are_a_share(void **state)
{
	struct heard *heard = *state;
	uint16_t heads = 1;

	while (heads <= ECHO_SPEEDS)
		assert_int_equal(ask_heads(heard, heads++), 0);
	assert_true(ask_heads(heard, heads) < 0);
	assert_int_equal(err_last()->code, ERR_BUSY);
	assert_int_equal(ask_heads(heard, 1), 0); /* it was measured */
	run(heard, A_MINUTE);
	assert_int_equal(ask_heads(heard, heads++), 0);
	assert_true(ask_heads(heard, heads) < 0);
	run(heard, 100 * A_MINUTE); /* no more than at first */
	for (unsigned int i = 0; i < ECHO_SPEEDS; i++)
		assert_int_equal(ask_heads(heard, heads++), 0);
	assert_true(ask_heads(heard, heads) < 0);
	err_clear();
}

static void geometries_requested_replace_others(void **state)
{
	struct heard *heard = *state;
	const struct attends *holder = node_attends(heard->w, AW_HOLDER);
	const struct form kept = form_of_heads(1), old = form_of_heads(2);

	for (uint16_t heads = 1; heads <= SPEEDS_MAX + 4; heads++) {
		assert_int_equal(ask_heads(heard, heads), 0);
		assert_int_equal(ask_heads(heard, 1), 0);
		run(heard, A_MINUTE);
	}
	assert_true(speed_is_known(holder, &kept, false));
	assert_false(speed_is_known(holder, &old, false));
}

static void many_heads_are_measured_with_few_tokens(void **state)
{
	struct attend_shape shape = {.dqk = 576, .dv = 512, .kv_heads = 1};

	(void)state;
	for (uint16_t heads = 1; heads <= 1024; heads = (uint16_t)(heads * 2)) {
		uint32_t tokens;

		shape.heads = heads;
		tokens = speed_tokens(&shape, 2304, false);
		assert_true(tokens >= 16);
		assert_true(2.0 * (576 + 512) * heads * tokens <= 1e9);
	}
	assert_int_equal(speed_tokens(&shape, UINT64_C(1) << 40, false), 16);
	shape.heads = 16; /* as many as there is memory for */
	assert_int_equal(speed_tokens(&shape, 1152, false), (8 << 20) / 1152);
}

static void near(double value, double want, double part)
{
	if (!(fabs(value - want) <= part * want))
		fail_msg("%g is not %g", value, want);
}

/* What gave the times is found again; and whatever they are, a constant is a number. */
static void speed_reproduces_measured_times(void **state)
{
	struct speed_points p = {
		.rows = 16, .many_rows = 256, .tokens = 16, .all = 4000, .part = 1000};
	struct cost_figure *times[] = {&p.few, &p.few_all, &p.many, &p.many_part};
	const double rows[] = {16, 16, 256, 256}, tokens[] = {16, 4000, 16, 1000};
	struct cost_compute c;

	(void)state;
	for (unsigned int i = 0; i < 4; i++)
		*times[i] = (struct cost_figure){.value = 5 + 0.3 * rows[i] +
							  0.1 * tokens[i] +
							  0.002 * rows[i] * tokens[i],
						 .error = 1,
						 .count = 15};
	speed_solve(&p, 1152, 2176, &c);
	near(c.fixed.value, 5, 1e-6);
	near(c.row.value, 0.3, 1e-6);
	near(c.memory.value, 1152 / 0.1, 1e-6);
	near(c.flops.value, 2176 / 0.002, 1e-6);
	near(c.row.error, sqrt(2) / 240, 1e-6);
	near(c.flops.error / c.flops.value,
	     hypot(sqrt(2) / 3984, sqrt(2) / 984) / 240 / 0.002, 1e-6);
	for (unsigned int i = 0; i < 256; i++) { /* each 1, 10, 100 or 1000 us */
		for (unsigned int n = 0; n < 4; n++)
			times[n]->value = pow(10, i >> 2 * n & 3);
		speed_solve(&p, 1152, 2176, &c);
		assert_true(isfinite(c.memory.value) && c.memory.value > 0);
		assert_true(isfinite(c.flops.value) && c.flops.value > 0);
		assert_true(c.fixed.value > 0 && c.row.value >= 0);
		assert_true(isfinite(c.memory.error) && isfinite(c.flops.error));
	}
}

static void form_invalid_is_refused(void **state)
{
	struct heard *heard = *state;
	struct form form = form_of_heads(8);
	struct wire_attend msg = {.attend = CALIBRATE_FIRST,
				  .form = {(const uint8_t *)"?", 1}};

	assert_true(echo_serve(node_attends(heard->w, AW_HOLDER),
			       attend_world_remote(heard->w, AW_HOLDER), &msg) < 0);
	form.shape.dqk = 17;
	assert_true(ask_speed(heard, &form) < 0);
	form = form_of_heads(2048);
	assert_true(ask_speed(heard, &form) < 0);
	assert_int_equal(err_last()->code, ERR_RANGE);
	err_clear();
	assert_null(node_attends(heard->w, AW_HOLDER)->speeds);
}

/* ---- a peer whose answers are wrong ---- */

enum lie {
	LONGER,
	EMPTY,
	OF_ANOTHER, /* number */
	REFUSED,
	NO_NUMBERS,
	SHORT_SPEED,
	LIES,
};

static enum lie lie;

static bool lying(unsigned int node, const struct wire_header *h, struct cursor body,
		  void *arg)
{
	struct heard *heard = arg;
	uint8_t bytes[2048];
	struct wire_attend msg;
	struct wire_attention_result told = {.attend = 0};
	int r;

	if (node != AW_HOLDER || h->type != WIRE_T_ATTEND ||
	    wire_attend_get(&body, &msg) < 0 || msg.attend < CALIBRATE_FIRST)
		return false;
	answer_late(heard, msg.q.len);
	memset(bytes, 0xff, sizeof(bytes)); /* NaN, of a speed */
	told.attend = msg.attend + (lie == OF_ANOTHER);
	told.values.data = bytes;
	if (msg.form.len ? lie < NO_NUMBERS : lie >= NO_NUMBERS)
		return false;
	if (msg.form.len)
		told.values.len = lie == SHORT_SPEED ? 7 : SPEED_BYTES;
	else if (lie == REFUSED)
		told.code = ERR_BUSY;
	else
		told.values.len = lie == LONGER ? msg.q.len + 1 : 0;
	if (lie == EMPTY && !msg.q.len)
		return false;
	heard->echoes++;
	r = calibrate_on_result(node_attends(heard->w, AW_REQUESTER),
				attend_world_remote(heard->w, AW_REQUESTER), &told);
	assert_int_equal(r < 0, lie == LONGER || lie == EMPTY);
	err_clear();
	return true;
}

static void speed_forged_is_ignored(void **state)
{
	struct heard *heard = *state;
	struct form form = opened_form(heard);

	attend_world_tap = lying;
	calibrate_all(node_attends(heard->w, AW_REQUESTER));
	for (lie = 0; lie < LIES; lie++) {
		heard->echoes = 0;
		run(heard, A_MINUTE);
		assert_true(heard->echoes > 0);
		assert_int_equal(knows(heard), lie >= NO_NUMBERS);
		assert_false(knows_speed(heard, &form));
		if (lie == NO_NUMBERS) /* of what was told nothing is asked again */
			live_drop(live_of(heard->w), holder_key(heard->w));
		attends_on_change(attend_world_remote(heard->w, AW_REQUESTER));
	}
}

#define CASE(f) cmocka_unit_test_setup_teardown(f, setup, teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		CASE(calibration_failed_is_repeated),
		CASE(peer_back_within_a_minute_is_measured),
		CASE(speed_refused_temporarily_is_requested_again),
		CASE(geometry_opened_later_is_measured),
		CASE(speeds_are_measured_again_after_a_while),
		CASE(wider_query_has_the_speed_of_its_kv),
		CASE(time_of_rows_is_their_posts),
		CASE(echoes_are_split_to_message_size),
		CASE(holder_without_attention_refuses),
		CASE(gpu_speed_is_requested_until_it_is_refused),
		cmocka_unit_test(pulls_from_two_holders_are_priced_each),
		CASE(speeds_of_a_peer_are_a_share),
		CASE(geometries_requested_replace_others),
		CASE(many_heads_are_measured_with_few_tokens),
		cmocka_unit_test(speed_reproduces_measured_times),
		CASE(form_invalid_is_refused),
		CASE(speed_forged_is_ignored),
	};

	if (getenv("KVD_TEST_ONLY"))
		cmocka_set_test_filter(getenv("KVD_TEST_ONLY"));
	return cmocka_run_group_tests_name("attend_cost", tests, NULL, NULL);
}
