/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Events of engines' streams, watched over the fake driver: in order, by several at
 * once, of processes that die, with handles that are none, and with every call of
 * the driver failed in turn.
 */
#include "gpu/event.h"

#include <sched.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "daemon/base/log.h"
#include "daemon/base/mem.h"
#include "daemon/loop/loop.h"
#include "gpu/gpu.h"
#include "tests/gpu/fake_cuda.h"
#include "tests/lib/gpu_owner.h"

#define MIB (UINT64_C(1) << 20)
#define FAKE(symbol) ((__typeof__(symbol) *)gpu_fake_symbol(#symbol))

struct stage {
	struct loop *loop;
	struct gpu *gpu;
	struct gpu_events *events;
	struct gpu_owner owner;
	unsigned int changes;
	struct gpu_event *watched[GPU_EVENTS_OWNER_MAX +
				  1]; /* dropped at the end of a case that failed */
};

static void on_change(void *arg)
{
	((struct stage *)arg)->changes++;
}

static int start(void **state)
{
	struct stage *stage = mem_zalloc(sizeof(*stage));
	char path[256];

	assert_int_equal(gpu_new(gpu_fake_path("", path), "auto", &stage->gpu), 0);
	assert_int_equal(loop_new(&stage->loop), 0);
	assert_int_equal(
		gpu_events_new(stage->gpu, stage->loop, on_change, stage, &stage->events),
		0);
	assert_true(gpu_owner_start(&stage->owner, GPU_HANDLE_IPC, 0, MIB));
	FAKE(fake_cuda_fail)(NULL, 0, 0);
	*state = stage;
	return 0;
}

static int stop(void **state)
{
	struct stage *stage = *state;

	for (size_t i = 0; i < ARRAY_LEN(stage->watched); i++)
		gpu_event_drop(stage->watched[i]);
	gpu_events_free(stage->events);
	FAKE(fake_cuda_fail)(NULL, 0, 0);
	assert_int_equal(FAKE(fake_cuda_live)(), 0);
	gpu_free(stage->gpu);
	loop_free(stage->loop);
	gpu_owner_end(&stage->owner);
	mem_free(stage);
	return 0;
}

/* What a case watches and has not dropped. */
static struct gpu_event *noted(struct stage *stage, struct gpu_event *event)
{
	for (size_t i = 0; i < ARRAY_LEN(stage->watched); i++) {
		if (stage->watched[i])
			continue;
		stage->watched[i] = event;
		break;
	}
	return event;
}

static void drop(struct stage *stage, struct gpu_event *event)
{
	for (size_t i = 0; event && i < ARRAY_LEN(stage->watched); i++)
		if (stage->watched[i] == event)
			stage->watched[i] = NULL;
	gpu_event_drop(event);
}

static struct gpu_event *watch_of(struct stage *stage, const char *device,
				  const struct cu_ipc_event *handle)
{
	struct gpu_event *event = NULL;

	assert_int_equal(gpu_event_watch(stage->events, 7, device, handle, &event), 0);
	return noted(stage, event);
}

static struct gpu_event *watch(struct stage *stage)
{
	return watch_of(stage, stage->owner.handle.device, &stage->owner.event);
}

/* Its state once it is known. */
static int settled(struct stage *stage, const struct gpu_event *event)
{
	int state;

	while ((state = gpu_event_state(event)) == 0)
		loop_turn(stage->loop, LOOP_NS_PER_S);
	return state;
}

static void assert_failed(struct stage *stage, const struct gpu_event *event,
			  enum err_code code, const char *words)
{
	assert_true(settled(stage, event) < 0);
	if (err_last()->code != code || !strstr(err_last()->text, words))
		fail_msg("%s: %s (wanted %s, \"%s\")", err_name(err_last()->code),
			 err_last()->text, err_name(code), words);
	err_clear();
}

/* The thread has looked at it at least this often. */
static void looked(unsigned int times)
{
	while (FAKE(fake_cuda_calls)("cuEventQuery") < times)
		sched_yield();
}

static void event_completes_after_earlier_job(void **state)
{
	struct stage *stage = *state;
	struct gpu_event *event;

	assert_true(gpu_owner_tell(&stage->owner, GPU_OWNER_HOLD));
	assert_true(gpu_owner_tell(&stage->owner, GPU_OWNER_RECORD));
	event = watch(stage);
	looked(20);
	assert_int_equal(gpu_event_state(event), 0);
	assert_int_equal(stage->changes, 0);
	assert_true(gpu_owner_tell(&stage->owner, GPU_OWNER_LET_GO));
	assert_int_equal(settled(stage, event), 1);
	/* the state may be seen before the word that it is another one */
	while (stage->changes == 0)
		loop_turn(stage->loop, LOOP_NS_PER_S);
	assert_int_equal(stage->changes, 1);
	/* nothing is kept of it: the engine may destroy it now */
	assert_int_equal(FAKE(fake_cuda_live)(), 0);
	drop(stage, event);
}

static void event_never_recorded_is_complete(void **state)
{
	struct stage *stage = *state;
	struct gpu_event *event = watch(stage);

	assert_int_equal(settled(stage, event), 1);
	drop(stage, event);
}

/* Events are of a context, and closed in it: one that is left over would stay as long
 * as some engine has memory on the device. */
static void event_is_closed_while_its_device_stays(void **state)
{
	struct stage *stage = *state;
	struct gpu_device *device = NULL;
	struct gpu_event *event;
	int live;

	assert_int_equal(gpu_device_find(stage->gpu, stage->owner.handle.device, &device),
			 0);
	assert_int_equal(gpu_device_get(device), 0);
	live = FAKE(fake_cuda_live)();
	event = watch(stage);
	assert_int_equal(settled(stage, event), 1);
	assert_int_equal(FAKE(fake_cuda_live)(), live);
	drop(stage, event);
	gpu_device_put(device);
}

/* A context takes long to make; who has an event on another device does not wait. */
static void event_on_an_idle_device_delays_no_other(void **state)
{
	struct stage *stage = *state;
	struct gpu_device *device = NULL, *idle;
	struct gpu_event *event, *slow;

	assert_int_equal(gpu_device_find(stage->gpu, stage->owner.handle.device, &device),
			 0);
	idle = &stage->gpu->devices[1 - device->number];
	assert_true(gpu_owner_tell(&stage->owner, GPU_OWNER_HOLD));
	assert_true(gpu_owner_tell(&stage->owner, GPU_OWNER_RECORD));
	assert_int_equal(gpu_device_get(device), 0); /* the engine's memory would */
	FAKE(fake_cuda_fail)(NULL, 0, 0);
	FAKE(fake_cuda_slow)("cuDevicePrimaryCtxRetain", 5000);
	slow = watch_of(stage, idle->id, &stage->owner.event);
	while (FAKE(fake_cuda_calls)("cuDevicePrimaryCtxRetain") == 0)
		sched_yield();
	event = watch(stage);
	looked(5);
	assert_true(gpu_owner_tell(&stage->owner, GPU_OWNER_LET_GO));
	assert_int_equal(settled(stage, event), 1);
	assert_int_equal(gpu_event_state(slow), 0);
	FAKE(fake_cuda_slow)(NULL, 0);
	drop(stage, event);
	drop(stage, slow);
	gpu_device_put(device);
}

static void event_of_many_watches_is_opened_once(void **state)
{
	struct stage *stage = *state;
	struct gpu_event *events[8];

	assert_true(gpu_owner_tell(&stage->owner, GPU_OWNER_HOLD));
	assert_true(gpu_owner_tell(&stage->owner, GPU_OWNER_RECORD));
	for (size_t i = 0; i < ARRAY_LEN(events); i++)
		events[i] = watch(stage);
	looked(40);
	assert_int_equal(FAKE(fake_cuda_calls)("cuIpcOpenEventHandle"), 1);
	drop(stage, events[0]);
	drop(stage, events[1]);
	assert_true(gpu_owner_tell(&stage->owner, GPU_OWNER_LET_GO));
	for (size_t i = 2; i < ARRAY_LEN(events); i++) {
		assert_int_equal(settled(stage, events[i]), 1);
		drop(stage, events[i]);
	}
	assert_int_equal(FAKE(fake_cuda_live)(), 0);
}

/* A watch that begins after the next record is not told of the one before. */
static void event_recorded_again_is_waited_for_again(void **state)
{
	struct stage *stage = *state;
	struct gpu_event *first, *second;

	assert_true(gpu_owner_tell(&stage->owner, GPU_OWNER_RECORD));
	first = watch(stage);
	assert_int_equal(settled(stage, first), 1);
	assert_true(gpu_owner_tell(&stage->owner, GPU_OWNER_HOLD));
	assert_true(gpu_owner_tell(&stage->owner, GPU_OWNER_RECORD));
	FAKE(fake_cuda_fail)(NULL, 0, 0);
	second = watch(stage);
	looked(5);
	assert_int_equal(gpu_event_state(second), 0);
	assert_int_equal(gpu_event_state(first), 1);
	assert_true(gpu_owner_tell(&stage->owner, GPU_OWNER_LET_GO));
	assert_int_equal(settled(stage, second), 1);
	drop(stage, first);
	drop(stage, second);
}

static void event_dropped_early_is_closed(void **state)
{
	struct stage *stage = *state;

	assert_true(gpu_owner_tell(&stage->owner, GPU_OWNER_HOLD));
	assert_true(gpu_owner_tell(&stage->owner, GPU_OWNER_RECORD));
	drop(stage, watch(stage)); /* perhaps before it was opened */
	drop(stage, NULL);
	while (FAKE(fake_cuda_live)() > 0)
		sched_yield();
	assert_true(gpu_owner_tell(&stage->owner, GPU_OWNER_LET_GO));
}

static void event_of_dead_process_is_refused(void **state)
{
	struct stage *stage = *state;
	struct gpu_event *event;

	gpu_owner_kill(&stage->owner);
	event = watch(stage);
	assert_failed(stage, event, ERR_IMPORT, "process has exited");
	drop(stage, event);
}

/* It may never come, and can be let go of. */
static void event_of_dead_process_blocks_nothing(void **state)
{
	struct stage *stage = *state;
	struct gpu_event *event;

	assert_true(gpu_owner_tell(&stage->owner, GPU_OWNER_HOLD));
	assert_true(gpu_owner_tell(&stage->owner, GPU_OWNER_RECORD));
	event = watch(stage);
	looked(3);
	gpu_owner_kill(&stage->owner);
	FAKE(fake_cuda_fail)(NULL, 0, 0);
	looked(3);
	assert_true(gpu_event_state(event) <= 0);
	drop(stage, event);
}

static void handle_of_anything_else_is_refused(void **state)
{
	struct stage *stage = *state;
	struct gpu_event *event;
	struct cu_ipc_event junk;

	memset(&junk, 0x5a, sizeof(junk));
	event = watch_of(stage, stage->owner.handle.device, &junk);
	assert_failed(stage, event, ERR_IMPORT, "CU_EVENT_INTERPROCESS");
	drop(stage, event);
	event = watch_of(stage, "GPU-of-nobody", &stage->owner.event);
	assert_failed(stage, event, ERR_IMPORT, "no GPU GPU-of-nobody");
	drop(stage, event);
	event = watch_of(stage, "MIG-1", &stage->owner.event);
	assert_failed(stage, event, ERR_IMPORT, "MIG");
	drop(stage, event);
}

static void events_beyond_the_cap_are_refused(void **state)
{
	static struct gpu_event *events[GPU_EVENTS_OWNER_MAX];
	struct stage *stage = *state;
	struct gpu_event *more = NULL;

	for (size_t i = 0; i < ARRAY_LEN(events); i++)
		events[i] = watch(stage);
	assert_int_equal(gpu_event_watch(stage->events, 7, stage->owner.handle.device,
					 &stage->owner.event, &more),
			 -err_errno(ERR_LIMIT));
	err_clear();
	assert_int_equal(gpu_event_watch(stage->events, 8, stage->owner.handle.device,
					 &stage->owner.event, &more),
			 0);
	drop(stage, noted(stage, more));
	for (size_t i = 0; i < ARRAY_LEN(events); i++)
		drop(stage, events[i]);
	drop(stage, watch(stage));
}

/* What the driver's calls of one watch are is seen, then each of them fails. */
static void call_failed_fails_one_watch(void **state)
{
	static const int codes[] = {CU_ERROR_OUT_OF_MEMORY, CU_ERROR_UNKNOWN,
				    CU_ERROR_ILLEGAL_ADDRESS};
	struct stage *stage = *state;
	const char *names[64];
	unsigned int counts[64], kinds = 0, failed = 0;
	struct gpu_event *event = watch(stage);

	assert_int_equal(settled(stage, event), 1);
	drop(stage, event);
	while (FAKE(fake_cuda_live)() > 0)
		sched_yield();
	for (; kinds < 64 && FAKE(fake_cuda_called)(kinds); kinds++) {
		names[kinds] = FAKE(fake_cuda_called)(kinds);
		counts[kinds] = FAKE(fake_cuda_calls)(names[kinds]);
	}
	for (size_t c = 0; c < ARRAY_LEN(codes); c++) {
		for (unsigned int n = 0; n < 64; n++) {
			unsigned int kind = n % kinds, turn = n / kinds + 1;

			if (turn > counts[kind])
				continue;
			FAKE(fake_cuda_fail)(NULL, 0, 0);
			FAKE(fake_cuda_fail)(names[kind], turn, codes[c]);
			event = watch(stage);
			failed += settled(stage, event) < 0;
			err_clear();
			drop(stage, event);
			FAKE(fake_cuda_fail)(NULL, 0, 0);
			event = watch(stage);
			/* what it broke is whole again when the first has left */
			if (settled(stage, event) < 0)
				err_clear();
			drop(stage, event);
			while (FAKE(fake_cuda_live)() > 0)
				sched_yield();
			event = watch(stage);
			assert_int_equal(settled(stage, event), 1);
			drop(stage, event);
			while (FAKE(fake_cuda_live)() > 0)
				sched_yield();
		}
	}
	assert_true(failed >= 4);
}

#define CASE(name) cmocka_unit_test_setup_teardown(name, start, stop)

int main(int argc, char **argv)
{
	const struct CMUnitTest tests[] = {
		CASE(event_completes_after_earlier_job),
		CASE(event_never_recorded_is_complete),
		CASE(event_is_closed_while_its_device_stays),
		CASE(event_on_an_idle_device_delays_no_other),
		CASE(event_of_many_watches_is_opened_once),
		CASE(event_recorded_again_is_waited_for_again),
		CASE(event_dropped_early_is_closed),
		CASE(event_of_dead_process_is_refused),
		CASE(event_of_dead_process_blocks_nothing),
		CASE(handle_of_anything_else_is_refused),
		CASE(events_beyond_the_cap_are_refused),
		CASE(call_failed_fails_one_watch),
	};

	gpu_owner_main(argc, argv);
	log_threshold = -1; /* every fault is provoked */
	return cmocka_run_group_tests(tests, NULL, NULL);
}
