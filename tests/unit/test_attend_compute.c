/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Queues of rows by themselves: who is served when, what is computed together, and what
 * becomes of rows that nobody waits for any more. One thread, which is held while others
 * ask; time is virtual.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/attend/compute.h"
#include "daemon/base/mem.h"
#include "daemon/loop/loop.h"
#include "daemon/loop/offload.h"
#include "daemon/plan/layout.h"
#include "daemon/store/store_impl.h"

#define D 16u
#define TOKENS 64u
#define ITEMS 2048u
#define LAYERS 64u

struct item {
	struct compute_item item;
	unsigned int served; /* as the nth; 0: not yet */
	enum err_code code;
};

static struct world {
	struct loop *loop;
	struct offload *offload;
	struct compute *compute;
	struct layout_field fields[2];
	struct layout_layer layers[LAYERS];
	struct layout_view view;
	struct layout layout;
	struct canon canon;
	struct store store;
	struct store_space space;
	struct store_class class;
	uint16_t bytes[TOKENS * D * 2];
	uint16_t q[512 * D];
	float out[512 * (D + 2)];
	struct item items[ITEMS];
	unsigned int count, served;
} w;

static int setup_share(unsigned int share)
{
	memset(&w, 0, sizeof(w));
	assert_int_equal(loop_new_virtual(1, &w.loop), 0);
	assert_int_equal(offload_new_inline(w.loop, &w.offload), 0);
	assert_int_equal(compute_new(w.loop,
				     &(struct compute_args){.offload = w.offload,
							    .threads = 1,
							    .isa = "auto",
							    .share = share},
				     &w.compute),
			 0);
	for (unsigned int i = 0; i < 2; i++) {
		w.fields[i] = (struct layout_field){.offset = i * TOKENS * D * 2,
						    .page_stride = D * 2,
						    .token_stride = D * 2,
						    .unit_stride = D * 2,
						    .unit_bytes = D * 2,
						    .units = 1,
						    .total_units = 1};
		strcpy(w.fields[i].name, i ? "v" : "k");
	}
	for (unsigned int i = 0; i < LAYERS; i++)
		w.layers[i] = (struct layout_layer){i, 2, w.fields};
	w.view = (struct layout_view){
		.page_tokens = 1, .layer_count = LAYERS, .layers = w.layers};
	w.layout = (struct layout){.view_count = 1, .views = &w.view};
	w.canon.layout = &w.layout;
	w.store.base = (uint8_t *)w.bytes;
	w.space = (struct store_space){.store = &w.store, .handles = 1};
	w.class = (struct store_class){.space = &w.space, .canon = &w.canon};
	return 0;
}

static int setup(void **state)
{
	(void)state;
	return setup_share(0);
}

static int setup_device(void **state)
{
	(void)state;
	return setup_share(10);
}

static void turns(void)
{
	for (unsigned int i = 0; i < 1000; i++)
		loop_turn(w.loop, 0);
}

static int teardown(void **state)
{
	(void)state;
	offload_hold(w.offload, false);
	turns();
	assert_true(compute_idle(w.compute));
	compute_free(w.compute);
	offload_free(w.offload);
	loop_free(w.loop);
	return 0;
}

static struct store_kv *kv_new(void)
{
	struct store_kv *kv = mem_zalloc(sizeof(*kv));

	assert_non_null(kv);
	kv->class = &w.class;
	w.space.handles++;
	kv->pages = mem_calloc(TOKENS, sizeof(*kv->pages));
	for (uint32_t i = 0; i < TOKENS; i++)
		kv->pages[i] = i;
	kv->page_count = TOKENS;
	kv->tokens = TOKENS;
	return kv;
}

static void on_done(struct compute_item *item, const struct err *why)
{
	struct item *of = item->owner;

	assert_int_equal(of->served, 0);
	of->served = ++w.served;
	of->code = why ? why->code : ERR_OK;
}

static struct item *item_new(uint64_t principal, uint32_t layer, uint32_t rows)
{
	struct item *of = &w.items[w.count++];

	assert_true(w.count <= ITEMS);
	of->item = (struct compute_item){.kv = kv_new(),
					 .form = {.shape = {.kind = ATTEND_GQA,
							    .heads = 1,
							    .kv_heads = 1,
							    .dqk = D,
							    .dv = D,
							    .scale = 1},
						  .key = "k",
						  .value = "v"},
					 .principal = principal,
					 .layer = layer,
					 .q = w.q,
					 .rows = rows,
					 .tokens = TOKENS,
					 .o = w.out,
					 .m = w.out + 512 * D,
					 .l = w.out + 512 * (D + 1),
					 .on_done = on_done,
					 .owner = of};
	return of;
}

static struct item *ask(uint64_t principal, uint32_t layer, uint32_t rows)
{
	struct item *of = item_new(principal, layer, rows);

	assert_int_equal(compute_submit(w.compute, &of->item), 0);
	return of;
}

static struct compute_figures figures(void)
{
	struct compute_figures f;

	compute_figures(w.compute, &f);
	return f;
}

/* ---- who is served ---- */

static void requester_flooding_delays_only_itself(void **state)
{
	const struct item *mine[3], *theirs[60];

	(void)state;
	offload_hold(w.offload, true);
	for (unsigned int i = 0; i < 60; i++)
		theirs[i] = ask(1, i, 16);
	loop_turn(w.loop, 0); /* one of them is at work */
	for (unsigned int i = 0; i < 3; i++)
		mine[i] = ask(2, 60 + i, 16);
	offload_hold(w.offload, false);
	turns();
	for (unsigned int i = 0; i < 3; i++)
		assert_in_range(mine[i]->served, 2 * i + 1, 2 * i + 3);
	assert_int_equal(theirs[59]->served, 63);
}

/* Many rows cost what they cost; few are served in between. */
static void turns_are_by_work_and_not_by_number(void **state)
{
	const struct item *large[8], *small[8];

	(void)state;
	offload_hold(w.offload, true);
	for (unsigned int i = 0; i < 8; i++)
		large[i] = ask(1, i, 512);
	loop_turn(w.loop, 0);
	for (unsigned int i = 0; i < 8; i++)
		small[i] = ask(2, 8 + i, 16);
	offload_hold(w.offload, false);
	turns();
	assert_in_range(small[7]->served, 8, 10);
	assert_int_equal(large[7]->served, 16);
}

/* It asks one by one, and each time as if it were new. */
static void requester_returning_keeps_its_history(void **state)
{
	const struct item *large, *small[8];

	(void)state;
	offload_hold(w.offload, true);
	ask(1, 0, 512);
	loop_turn(w.loop, 0);
	for (unsigned int i = 0; i < 8; i++)
		small[i] = ask(2, 8 + i, 16);
	offload_hold(w.offload, false);
	while (w.served < 1)
		loop_turn(w.loop, 0);
	large = ask(1, 1, 512);
	turns();
	assert_int_equal(large->served, 10);
	for (unsigned int i = 0; i < 8; i++)
		assert_int_equal(small[i]->served, 2 + i);
}

/* Who was idle has saved nothing up. */
static void requester_late_gets_equal_share(void **state)
{
	const struct item *one[8], *two[8];

	(void)state;
	for (unsigned int i = 0; i < 20; i++)
		ask(1, i, 256);
	turns();
	offload_hold(w.offload, true);
	for (unsigned int i = 0; i < 8; i++)
		one[i] = ask(1, i, 16);
	loop_turn(w.loop, 0);
	for (unsigned int i = 0; i < 8; i++)
		two[i] = ask(2, 10 + i, 16);
	offload_hold(w.offload, false);
	turns();
	for (unsigned int i = 0; i < 8; i++) {
		assert_in_range(one[i]->served, 20 + 2 * i, 20 + 2 * i + 3);
		assert_in_range(two[i]->served, 20 + 2 * i, 20 + 2 * i + 3);
	}
}

/* ---- what is computed together ---- */

/* Each of them is told of how many the call was: daemons, whatever each of them posts. */
static void rows_of_all_principals_are_one_call(void **state)
{
	const struct item *crowd[32], *mine[4];

	(void)state;
	offload_hold(w.offload, true);
	ask(1, 0, 16);
	loop_turn(w.loop, 0);
	for (unsigned int i = 0; i < 32; i++)
		crowd[i] = ask(1 + i / 2, 5, 16);
	for (unsigned int i = 0; i < 4; i++)
		mine[i] = ask(40, 6, 16);
	offload_hold(w.offload, false);
	turns();
	assert_int_equal(figures().batches, 3);
	assert_int_equal(figures().rows, 37 * 16);
	for (unsigned int i = 0; i < 32; i++)
		assert_int_equal(crowd[i]->item.together, 16);
	for (unsigned int i = 0; i < 4; i++)
		assert_int_equal(mine[i]->item.together, 1);
}

static void call_has_a_bound(void **state)
{
	const struct item *of[5];
	unsigned int told[6] = {0};

	(void)state;
	offload_hold(w.offload, true);
	ask(1, 0, 16);
	loop_turn(w.loop, 0);
	for (unsigned int i = 0; i < 5; i++)
		of[i] = ask(1 + i, 5, 512);
	offload_hold(w.offload, false);
	turns();
	assert_int_equal(figures().batches, 1 + 3);
	/* who waits for the next call is one of those who asked */
	for (unsigned int i = 0; i < 5; i++)
		told[of[i]->item.together]++;
	assert_int_equal(told[5], 2);
	assert_int_equal(told[3], 2);
	assert_int_equal(told[1], 1);
}

/* Thousands that wait, of one KV and of many: calls are as full as they may be, and what
 * waits in between is not looked at. */
static void rows_of_a_crowd_find_their_group(void **state)
{
	struct item *of;

	(void)state;
	offload_hold(w.offload, true);
	ask(1, 0, 16);
	loop_turn(w.loop, 0);
	for (unsigned int i = 0; i < 1024; i++) {
		ask(2 + i % 300, 5, 1);
		if (i % 2)
			continue;
		of = item_new(1, 5, 1);
		of->item.form.shape.softcap = 1.0f + (float)i;
		assert_int_equal(compute_submit(w.compute, &of->item), 0);
	}
	offload_hold(w.offload, false);
	while (!compute_idle(w.compute))
		turns();
	assert_int_equal(figures().batches, 1 + 1024 / 256 + 512);
	assert_int_equal(figures().rows, 16 + 1024 + 512);
	for (unsigned int i = 1; i < w.count; i++) {
		const struct compute_item *item = &w.items[i].item;

		assert_true(w.items[i].served > 0);
		if (item->form.shape.softcap > 0)
			assert_int_equal(item->together, 1);
		else
			assert_in_range(item->together, 256, 300);
	}
}

static void rows_too_long_for_a_thread_are_refused(void **state)
{
	struct item *of = item_new(1, 0, 512);

	(void)state;
	of->item.kv->tokens = of->item.tokens = COMPUTE_WORK_MOST / 512;
	assert_true(compute_submit(w.compute, &of->item) < 0);
	assert_int_equal(err_last()->code, ERR_TOOBIG);
	err_clear();
	store_kv_free(of->item.kv);
	assert_true(compute_idle(w.compute));
}

/* ---- the share of a device ---- */

static void values_make(void)
{
	for (unsigned int i = 0; i < TOKENS * D * 2; i++)
		w.bytes[i] = (uint16_t)(0x3c00 + i % 199);
	for (unsigned int i = 0; i < 5 * D; i++)
		w.q[i] = (uint16_t)(0x3c00 + i % 101);
}

#define LARGE_VALUES (5 * (D + 2))

/* Of 5 rows; its results are contiguous. */
static struct item *ask_large(bool select, bool out_bf16)
{
	static const uint32_t tokens[10] = {1, 2, 60, 4, 5, 40, 7, 8, 30, 10};
	struct item *of = item_new(1, 0, 5);

	of->item.m = w.out + 5 * D;
	of->item.l = of->item.m + 5;
	of->item.form.out_bf16 = out_bf16;
	of->item.select = select ? tokens : NULL;
	of->item.per_token = select ? 2 : 0;
	assert_int_equal(compute_submit(w.compute, &of->item), 0);
	return of;
}

/* Until its speed is known, a call has the rows of one query token; others have their
 * turns in between, and the results are those of one call. */
static void large_request_shares_a_device_by_parts(void **state)
{
	float whole[4][LARGE_VALUES];
	struct item *large, *small;

	(void)state;
	values_make();
	large = ask_large(false, false);
	small = ask(2, 1, 1);
	turns();
	assert_int_equal(small->served, 1);
	assert_int_equal(large->served, 2);
	assert_int_equal(large->code, ERR_OK);
	assert_int_equal(figures().batches, 6);
	assert_int_equal(figures().rows, 6);
	for (unsigned int i = 0; i < 4; i++) {
		ask_large(i & 1, i & 2);
		turns();
		memcpy(whole[i], w.out, sizeof(whole[i]));
	}
	assert_int_equal(figures().batches, 6 + 4 * 5);
	teardown(NULL);
	setup_share(0);
	values_make();
	for (unsigned int i = 0; i < 4; i++) {
		ask_large(i & 1, i & 2);
		turns();
		/* of bf16, the rest is not a result */
		assert_memory_equal(whole[i], w.out,
				    i & 2 ? 5 * (D * 2 + 8) : sizeof(whole[i]));
	}
	assert_int_equal(figures().batches, 4);
}

/* Between two parts it waits, and while one is computed. */
static void request_in_parts_is_withdrawn(void **state)
{
	struct item *large;

	(void)state;
	offload_hold(w.offload, true);
	large = ask(1, 0, 5);
	loop_turn(w.loop, 0);
	assert_false(compute_cancel(&large->item));
	offload_hold(w.offload, false);
	turns();
	assert_int_equal(large->served, 1);
	assert_int_equal(figures().batches, 1);
}

/* ---- what nobody waits for ---- */

static void rows_waiting_are_withdrawn(void **state)
{
	struct item *first, *second, *third;

	(void)state;
	offload_hold(w.offload, true);
	first = ask(1, 0, 16);
	loop_turn(w.loop, 0);
	second = ask(1, 1, 16);
	third = ask(2, 1, 16);
	assert_false(compute_cancel(&first->item));
	assert_true(compute_cancel(&second->item));
	assert_int_equal(figures().waiting, 1);
	offload_hold(w.offload, false);
	turns();
	assert_int_equal(first->served, 1);
	assert_int_equal(second->served, 0);
	assert_int_equal(third->served, 2);
	assert_int_equal(third->code, ERR_OK);
}

/* Each allocation fails once: a refusal, or an end with ENOMEM; once, and not twice. */
static void rows_without_memory_end_once(void **state)
{
	uint64_t used = 1;

	(void)state;
	for (uint64_t nth = 1; used >= nth; nth++) {
		struct item *of = item_new(nth, 1, 16);
		int r;

		mem_fail_at(nth);
		r = compute_submit(w.compute, &of->item);
		if (r >= 0)
			for (unsigned int i = 0; i < 100; i++)
				loop_turn(w.loop, 0);
		used = mem_count();
		mem_fail_at(0);
		assert_int_equal(of->served > 0, r >= 0);
		if (r < 0)
			store_kv_free(of->item.kv);
		if (of->served && used >= nth)
			assert_int_equal(of->code, ERR_NOMEM);
	}
}

#define CASE(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
#define SHARE(name) cmocka_unit_test_setup_teardown(name, setup_device, teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		CASE(requester_flooding_delays_only_itself),
		CASE(turns_are_by_work_and_not_by_number),
		CASE(requester_returning_keeps_its_history),
		CASE(requester_late_gets_equal_share),
		CASE(rows_of_all_principals_are_one_call),
		CASE(call_has_a_bound),
		CASE(rows_of_a_crowd_find_their_group),
		CASE(rows_too_long_for_a_thread_are_refused),
		SHARE(large_request_shares_a_device_by_parts),
		SHARE(request_in_parts_is_withdrawn),
		CASE(rows_waiting_are_withdrawn),
		CASE(rows_without_memory_end_once),
	};

	if (getenv("KVD_TEST_ONLY"))
		cmocka_set_test_filter(getenv("KVD_TEST_ONLY"));
	return cmocka_run_group_tests_name("attend_compute", tests, NULL, NULL);
}
