/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Bytes: every shape of a plan arrives whole, in both kinds and directions, and
 * nothing beside it changes (the runner compares all areas with their images).
 */
#include "daemon/base/mem.h"
#include "tests/conform/conform.h"

/* ---- one run ---- */

static void move_run(struct world *world, enum xp_kind kind, struct end *src,
		     struct end *dst, uint64_t src_length, uint64_t dst_length,
		     struct plan_run run)
{
	struct area *from = area_new(world, src, MEMORY_SEALED, src_length);
	struct area *to = area_new(world, dst, MEMORY_SEALED, dst_length);
	struct deal *deal = deal_simple(world, kind, from, to, &run, 1);

	deal_run(deal);
	area_verify(to);
	deal_free(deal);
	area_free(from);
	area_free(to);
}

/* Both kinds and both directions. */
static void each_way(struct world *world, uint64_t src_length, uint64_t dst_length,
		     struct plan_run run)
{
	struct end *a = world->end[0], *b = world->end[1];

	move_run(world, XP_WRITE, a, b, src_length, dst_length, run);
	move_run(world, XP_WRITE, b, a, src_length, dst_length, run);
	move_run(world, XP_READ, a, b, src_length, dst_length, run);
	move_run(world, XP_READ, b, a, src_length, dst_length, run);
}

static void data_one_byte(struct world *world)
{
	each_way(world, 1, 1, (struct plan_run){.len = 1, .count = 1});
	each_way(world, 100, 100,
		 (struct plan_run){.src = 99, .dst = 0, .len = 1, .count = 1});
}

static void data_sizes(struct world *world)
{
	static const uint64_t around[] = {8,	     4096,	8192,	65536,
					  2 * 65536, 256 << 10, 1 << 20};

	for (size_t i = 0; i < ARRAY_LEN(around); i++) {
		for (uint64_t n = around[i] - 1; n <= around[i] + 1; n++) {
			struct plan_run run = {.src = 3, .dst = 5, .len = n, .count = 1};

			move_run(world, i % 2 ? XP_WRITE : XP_READ, world->end[n % 2],
				 world->end[(n + 1) % 2], n + 16, n + 16, run);
			move_run(world, i % 2 ? XP_READ : XP_WRITE, world->end[n % 2],
				 world->end[(n + 1) % 2], n + 16, n + 16, run);
		}
	}
}

static void data_large(struct world *world)
{
	uint64_t n = world->big_bytes + 12345;

	each_way(world, n + 7, n + 9,
		 (struct plan_run){.src = 7, .dst = 9, .len = n, .count = 1});
}

/* ---- strides ---- */

static void data_strides(struct world *world)
{
	static const struct plan_run runs[] = {
		/* gaps on one side, on the other, on both */
		{.len = 64, .count = 500, .src_stride = 64, .dst_stride = 100},
		{.len = 64, .count = 500, .src_stride = 100, .dst_stride = 64},
		{.len = 33, .count = 500, .src_stride = 97, .dst_stride = 41},
		/* descending */
		{.src = 49900,
		 .len = 100,
		 .count = 500,
		 .src_stride = -100,
		 .dst_stride = 100},
		{.dst = 49900,
		 .len = 100,
		 .count = 500,
		 .src_stride = 100,
		 .dst_stride = -100},
		{.src = 49900,
		 .dst = 49900,
		 .len = 60,
		 .count = 500,
		 .src_stride = -100,
		 .dst_stride = -100},
		/* one source row, many times */
		{.src = 1000,
		 .len = 256,
		 .count = 150,
		 .src_stride = 0,
		 .dst_stride = 300},
		/* source rows that overlap */
		{.len = 200, .count = 200, .src_stride = 10, .dst_stride = 210},
		/* one row, strides that mean nothing */
		{.len = 999,
		 .count = 1,
		 .src_stride = INT64_MIN,
		 .dst_stride = INT64_MAX},
	};

	for (size_t i = 0; i < ARRAY_LEN(runs); i++) {
		struct plan_run run = runs[i];

		if (run.count == 1) /* the model adds them once too often */
			run.src_stride = run.dst_stride = 0;
		each_way(world, 50000, 50000, run);
	}
}

static void data_rows_100k(struct world *world)
{
	each_way(world, 100000 * 8, 100000 * 12,
		 (struct plan_run){
			 .len = 8, .count = 100000, .src_stride = 8, .dst_stride = 12});
}

/* 100 000 runs that do not fold into a stride. */
static void data_runs_100k(struct world *world)
{
	const size_t count = 100000;
	struct plan_run *runs = mem_calloc(count, sizeof(*runs));
	uint64_t src_at = 0, dst_at = 0;

	CHECK(runs, "no memory");
	for (size_t i = 0; i < count; i++) {
		uint64_t len = 1 + world_random(world, 16);

		src_at += world_random(world, 5);
		dst_at += world_random(world, 7);
		runs[i] = (struct plan_run){
			.src = src_at, .dst = dst_at, .len = len, .count = 1};
		src_at += len;
		dst_at += len;
	}
	for (unsigned int way = 0; way < 2; way++) {
		struct area *from =
			area_new(world, world->end[way], MEMORY_SEALED, src_at);
		struct area *to =
			area_new(world, world->end[!way], MEMORY_SEALED, dst_at);

		deal_run(deal_simple(world, way ? XP_READ : XP_WRITE, from, to, runs,
				     count));
	}
	mem_free(runs);
}

/* ---- buffers ---- */

#define BUFFERS 48u
#define PIECE 777u

/* Runs that jump between many buffers of a few memories on both sides. */
static void buffers_move(struct world *world, enum xp_kind kind, struct end *src,
			 struct end *dst)
{
	struct area *from[4], *to[4];
	struct place src_places[BUFFERS], dst_places[BUFFERS];
	struct plan_run runs[BUFFERS * 2];

	for (unsigned int i = 0; i < 4; i++) {
		from[i] = area_new(world, src, MEMORY_SEALED, BUFFERS / 4 * 4096);
		to[i] = area_new(world, dst, MEMORY_SEALED, BUFFERS / 4 * 4096);
	}
	for (unsigned int i = 0; i < BUFFERS; i++) {
		src_places[i] = (struct place){from[i % 4], i / 4 * 4096 + 11, 4000};
		dst_places[i] = (struct place){to[(i + 1) % 4], i / 4 * 4096 + 23, 4000};
	}
	for (unsigned int i = 0; i < BUFFERS * 2; i++) {
		unsigned int s = i * 29 % BUFFERS, d = i * 31 % BUFFERS;

		runs[i] = (struct plan_run){.src = i,
					    .dst = i >= BUFFERS ? 2000 : 100,
					    .len = PIECE,
					    .count = 1,
					    .src_buffer = s,
					    .dst_buffer = d};
	}
	deal_run(deal_new(world, kind, src, dst, src_places, BUFFERS, dst_places, BUFFERS,
			  runs, BUFFERS * 2));
}

static void data_buffers(struct world *world)
{
	buffers_move(world, XP_WRITE, world->end[0], world->end[1]);
	buffers_move(world, XP_READ, world->end[0], world->end[1]);
	buffers_move(world, XP_WRITE, world->end[1], world->end[0]);
}

const struct conform_case cases_data[] = {
	{"data: one byte", data_one_byte, 0},
	{"data: sizes around slices and pages", data_sizes, 0},
	{"data: megabytes", data_large, HEAVY},
	{"data: strides", data_strides, HEAVY},
	{"data: 100 000 strided rows", data_rows_100k, HEAVY},
	{"data: 100 000 runs", data_runs_100k, HEAVY},
	{"data: many buffers", data_buffers, 0},
	{NULL, NULL, 0},
};
